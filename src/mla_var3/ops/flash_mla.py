"""FlashMLA's dense decode under its own names: a program written for it runs after changing its import.

    import mla_var3.ops.flash_mla as flash_mla

`get_mla_metadata` and `flash_mla_with_kvcache` take the arguments and give the results of FlashMLA's Python interface
as of its revision 9241ae3. Different are: sparse attention and FP8 caches are refused by the name of their argument;
refusals are `UserError`, not assertions; caches and widths may be all that `mla_decode` takes; and metadata may be used
again after `cache_seqlens` changed, which FlashMLA forbids.

Metadata: FlashMLA's first call with fresh metadata runs a small kernel that deals out the blocks of all requests, and
later calls with the same metadata reuse its result; its own benchmark counts neither that kernel nor the one that
combines splits, only the attention kernel. Here blocks are dealt out by the kernels themselves, from lengths they read.
So nothing happens outside of a timed call, and all of it is counted. The two tensors of the metadata are there for
programs that copy them into buffers of a graph or hand them on: they have FlashMLA's shapes, nothing writes them, and
nothing reads them. Such tensors may also stand in the place of the metadata, as in FlashMLA's older interface.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mla_var3.errors import UserError
from mla_var3.ops.decode import mla_decode
from mla_var3.ops.engine import engine
from mla_var3.ops.request import NO_FP8, number

if TYPE_CHECKING:
    import torch

ROWS = 64  # query rows of FlashMLA's tile
FIELDS = 8  # int32 numbers that FlashMLA's scheduler keeps for each of its parts

__all__ = ["FlashMLASchedMeta", "flash_mla_with_kvcache", "get_mla_metadata"]


@dataclass
class FlashMLASchedMeta:
    """What `get_mla_metadata` returns and every call of a group shares. The first call fills it in.

    config: (field, value) pairs that later calls must agree with. tile_scheduler_metadata (parts, 8), num_splits
    (b + 1,): int32 on q's device, with the shapes that FlashMLA would give them, unless a program has put its own
    there. What they hold means nothing, and no call looks at them: they may be copied, overwritten or handed on.
    """

    have_initialized: bool = False
    config: tuple[tuple[str, Any], ...] | None = None
    tile_scheduler_metadata: torch.Tensor | None = None
    num_splits: torch.Tensor | None = None


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """Fresh metadata, and None. Arguments of older interfaces (lengths, head counts) are taken and not looked at."""
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta | torch.Tensor,
    num_splits: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense decode attention: q (b, s, h, k + p), k_cache (pages, page, h_kv, k + p), block_table (b, width) int32,
    cache_seqlens (b,) int32, head_dim_v = k: FlashMLA has 512 + 64 and 512 columns.

    softmax_scale: factor on q·k, default (k + p)^-1/2. causal: aligned to the end of each request.
    tile_scheduler_metadata: of `get_mla_metadata`, whose calls must have equal shapes, or a tensor, which with
    num_splits is not looked at. The arguments from `is_fp8_kvcache` on belong to sparse and FP8 attention: any that is
    given raises `UserError` with its name. Returns out (b, s, h, k) in q's dtype and the natural log-sum-exp (b, h, s)
    in float32; a row without keys has out 0 and +inf.
    """
    meta = tile_scheduler_metadata if isinstance(tile_scheduler_metadata, FlashMLASchedMeta) else None
    if meta is None:
        _tensor("tile_scheduler_metadata", tile_scheduler_metadata, "what get_mla_metadata() returned first")
    if num_splits is not None:
        _tensor("num_splits", num_splits, "None")
    if is_fp8_kvcache:
        raise UserError(f"is_fp8_kvcache was given: {NO_FP8}, and leave it out.")
    refused: dict[str, Any] = {
        "indices": indices,
        "attn_sink": attn_sink,
        "extra_k_cache": extra_k_cache,
        "extra_indices_in_kvcache": extra_indices_in_kvcache,
        "topk_length": topk_length,
        "extra_topk_length": extra_topk_length,
    }
    for name, value in refused.items():
        if value is not None:
            raise UserError(f"{name} was given: sparse attention is not supported here, only dense; leave it out.")
    for name, given in (("block_table", block_table), ("cache_seqlens", cache_seqlens)):
        if given is None:
            raise UserError(f"{name} is None: dense attention needs it.")
    assert block_table is not None and cache_seqlens is not None
    found = _config(q, k_cache, causal)
    if meta is not None and meta.have_initialized:
        _same_group(meta.config or found, found)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else number("softmax_scale", softmax_scale)
    both = mla_decode(
        q, k_cache, block_table, cache_seqlens, scale=scale, causal=causal, head_dim_v=head_dim_v, return_lse=True
    )
    assert isinstance(both, tuple)
    if meta is not None and not meta.have_initialized:
        _fill(meta, found, q)
    return both


def _tensor(name: str, value: Any, wanted: str) -> None:
    """Raises `UserError` for metadata that is no tensor."""
    import torch

    if not isinstance(value, torch.Tensor):
        raise UserError(f"{name} is a {type(value).__name__}: pass {wanted}, or a tensor.")


def _config(q: Any, k_cache: Any, causal: bool) -> tuple[tuple[str, Any], ...]:
    """What the calls of a group have in common."""
    if q.dim() != 4 or k_cache.dim() not in (3, 4):
        raise UserError(
            f"q {tuple(q.shape)} must have four dimensions, (b, s, h, k + p), and k_cache {tuple(k_cache.shape)} too, "
            "(pages, page, h_kv, k + p), or three without h_kv."
        )
    h_kv = k_cache.shape[2] if k_cache.dim() == 4 else 1
    names = ("b", "s_q", "h_q", "page_block_size", "h_k", "causal")
    return tuple(zip(names, (*q.shape[:3], k_cache.shape[1], h_kv, bool(causal)), strict=True))


def _same_group(config: tuple[tuple[str, Any], ...], found: tuple[tuple[str, Any], ...]) -> None:
    """Sees that a call has the shapes of the group's first one."""
    for (name, value), (_, before) in zip(found, config, strict=True):
        if value != before:
            raise UserError(
                f"{name} is {value} and was {before} in the first call with this metadata: get fresh metadata from "
                "get_mla_metadata() for calls of another shape."
            )


def multiprocessors(device: torch.device) -> int:
    """Of a GPU; 1 where there is none. A constant to whoever traces."""
    hardware = engine().hardware(device)
    return 1 if hardware is None else hardware.num_sms


def _fill(meta: FlashMLASchedMeta, config: tuple[tuple[str, Any], ...], q: torch.Tensor) -> None:
    """What FlashMLA leaves in fresh metadata: the shapes of the call, and two tensors. Nothing is launched."""
    import torch

    meta.have_initialized, meta.config = True, config
    b, s, h, _, h_kv, _ = (value for _, value in config)
    parts = max(1, multiprocessors(q.device) // h_kv // -(-s * h // (h_kv * ROWS)))
    if meta.tile_scheduler_metadata is None:
        meta.tile_scheduler_metadata = torch.empty((parts, FIELDS), dtype=torch.int32, device=q.device)
    if meta.num_splits is None:
        meta.num_splits = torch.empty(b + 1, dtype=torch.int32, device=q.device)
