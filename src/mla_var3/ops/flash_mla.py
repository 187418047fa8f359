"""FlashMLA's decode under its own names: a program written for it runs after changing its import.

    import mla_var3.ops.flash_mla as flash_mla

`get_mla_metadata` and `flash_mla_with_kvcache` take the arguments and give the results of FlashMLA's Python interface
as of its revision 9241ae3: dense decode, and sparse decode over FP8 caches in the layouts of DeepSeek V3.2 and V4.
Different are: refusals are `UserError`, not assertions, and name the argument; heads, caches and widths may be all that
`mla_decode` and `sparse_mla_decode` take, a bf16 cache under indices too; dense decode takes those FP8 caches as well,
as `packed_mla_decode` does, where FlashMLA's kernel ends at their dtype; and metadata may be used again after lengths
changed, which FlashMLA forbids.

Metadata: FlashMLA's first call with fresh metadata runs a small kernel that deals out the blocks of all requests, and
later calls with the same metadata reuse its result; its own benchmark counts neither that kernel nor the one that
combines splits, only the attention kernel. Here blocks are dealt out by the kernels themselves, from lengths they read.
So nothing happens outside of a timed call, and all of it is counted. The two tensors of the metadata are there for
programs that copy them into buffers of a graph or hand them on: they have FlashMLA's shapes, nothing writes them, and
nothing reads them. Such tensors may also stand in the place of the metadata, as in FlashMLA's older interface.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from mla_var3.errors import UserError
from mla_var3.ops.decode import mla_decode
from mla_var3.ops.engine import engine
from mla_var3.ops.request import number
from mla_var3.ops.sparse import beside_in, packed_mla_decode, sparse_mla_decode
from mla_var3.packed_cache import VALUES, bytes_of, layout_of

if TYPE_CHECKING:
    import torch

P = ParamSpec("P")
R = TypeVar("R")

ROWS = 64  # query rows of FlashMLA's tile
FIELDS = 8  # int32 numbers that FlashMLA's scheduler keeps for each of its parts
#: Layouts of FP8 caches: by the columns of q, and of DeepSeek V4.1 by the bytes of a token.
_OF_COLUMNS = {576: "v32", 512: "v4"}
_OF_V41 = {layout_of(name).token_bytes: name for name in ("v41", "v41_fp4")}

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


#: What the functions below call their arguments, and what they say to do, in the words of this interface.
_NAMES = {
    "call packed_mla_decode for packed FP8 caches": "pass is_fp8_kvcache=True for packed FP8 caches",
    "extra_topk_lens": "extra_topk_length", "extra_indices": "extra_indices_in_kvcache",
    "extra_cache": "extra_k_cache", "topk_lens": "topk_length", "page_table": "block_table",
    "seq_lens": "cache_seqlens", "kv_cache": "k_cache", "packed_mla_decode": "flash_mla_with_kvcache",
    "sparse_mla_decode": "flash_mla_with_kvcache", "mla_decode": "flash_mla_with_kvcache",
}  # fmt: skip
_NAMED = re.compile(rf"\b({'|'.join(_NAMES)})\b|^sink\b")


def _in_its_own_names(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator: what this package's functions refuse is told in the names of FlashMLA's arguments."""

    @functools.wraps(function)
    def called(*args: P.args, **options: P.kwargs) -> R:
        try:
            return function(*args, **options)
        except UserError as error:
            said = _NAMED.sub(lambda found: _NAMES.get(found[0], "attn_sink"), str(error))
            raise type(error)(said) from error

    return called


@_in_its_own_names
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
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode attention, dense or, with indices, sparse.

    Dense: q (b, s, h, k + p), k_cache (pages, page, h_kv, k + p), block_table (b, width) int32, cache_seqlens (b,)
    int32, head_dim_v = k: FlashMLA has 512 + 64 and 512 columns. causal: aligned to the end of each request. With
    is_fp8_kvcache k_cache is as of sparse decode, and causal must be true where s > 1. The arguments behind
    is_fp8_kvcache must not be given.

    Sparse: q (b, s, h, 576), k_cache (pages, page, 1, 656) of float8_e4m3fn, uint8 or int8, layout v32 of
    `mla_var3.packed_cache`; or q (b, s, h, 512) and (pages, page, 1, 584), layout v4, whose pages lie a multiple of 576
    bytes apart, or (pages, page, 1, 528), layout v41, beside which extra_k_cache may have 288 bytes, layout v41_fp4.
    Without is_fp8_kvcache, which FlashMLA wants, k_cache is (pages, page, 1, 576) of bf16. indices (b, s, topk) int32,
    attn_sink (h,) float32, topk_length (b,) int32, extra_k_cache, extra_indices_in_kvcache and extra_topk_length: as of
    `sparse_mla_decode`. head_dim_v is 512; block_table and cache_seqlens are not looked at.

    softmax_scale: factor on q·k, default (columns of q)^-1/2. tile_scheduler_metadata: of `get_mla_metadata`, whose
    calls must have equal shapes, or a tensor, which with num_splits is not looked at. out, lse: where to write, as of
    `mla_decode`; vLLM's FlashMLA has `out`. Returns out (b, s, h, k) in q's dtype and the natural log-sum-exp (b, h, s)
    in float32, without the sink; a row without keys has out 0 and +inf.
    """
    meta = tile_scheduler_metadata if isinstance(tile_scheduler_metadata, FlashMLASchedMeta) else None
    if meta is None:
        _tensor("tile_scheduler_metadata", tile_scheduler_metadata, "what get_mla_metadata() returned first")
    if num_splits is not None:
        _tensor("num_splits", num_splits, "None")
    found = _config(q, k_cache, causal, is_fp8_kvcache, indices, extra_k_cache, extra_indices_in_kvcache)
    if meta is not None and meta.have_initialized:
        _same_group(meta.config or found, found)
    caches = {"k_cache": k_cache, "extra_k_cache": extra_k_cache}
    layouts = {name: _layout(q, is_fp8_kvcache, cache) for name, cache in caches.items() if cache is not None}
    if is_fp8_kvcache:
        for name, of_cache in layouts.items():
            bytes_of(layout_of(of_cache), caches[name], name)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else number("softmax_scale", softmax_scale)
    if indices is not None:
        if causal:
            raise UserError("causal was given with indices, which say themselves what is attended to: leave it out.")
        if head_dim_v != VALUES:
            raise UserError(f"head_dim_v is {head_dim_v}: sparse attention has {VALUES} columns of values.")
        layout, of_extra = layouts["k_cache"], layouts.get("extra_k_cache")
        beside_in("k_cache", layout, "extra_k_cache", of_extra)
        both = sparse_mla_decode(
            q, k_cache, indices, layout=layout, scale=scale, topk_lens=topk_length, sink=attn_sink,
            extra_cache=extra_k_cache, extra_indices=extra_indices_in_kvcache, extra_topk_lens=extra_topk_length,
            extra_layout=of_extra, return_lse=True, out=out, lse=lse,
        )  # fmt: skip
    else:
        refused: dict[str, Any] = {
            "attn_sink": attn_sink,
            "extra_k_cache": extra_k_cache,
            "extra_indices_in_kvcache": extra_indices_in_kvcache,
            "topk_length": topk_length,
            "extra_topk_length": extra_topk_length,
        }
        for name, value in refused.items():
            if value is not None:
                raise UserError(f"{name} was given without indices: it is of sparse attention; leave it out.")
        for name, given in (("block_table", block_table), ("cache_seqlens", cache_seqlens)):
            if given is None:
                raise UserError(f"{name} is None: dense attention needs it.")
        assert block_table is not None and cache_seqlens is not None
        given = q, k_cache, block_table, cache_seqlens
        if is_fp8_kvcache:
            if q.shape[1] > 1 and not causal:
                raise UserError("causal is False: over an FP8 cache several query tokens are causal; pass causal=True.")
            if head_dim_v != VALUES:
                raise UserError(f"head_dim_v is {head_dim_v}: FP8 caches have {VALUES} columns of values.")
            layout = layouts["k_cache"]
            both = packed_mla_decode(*given, layout=layout, scale=scale, return_lse=True, out=out, lse=lse)
        else:
            both = mla_decode(
                *given, scale=scale, causal=causal, head_dim_v=head_dim_v, return_lse=True, out=out, lse=lse
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


def _layout(q: torch.Tensor, is_fp8: bool, cache: torch.Tensor) -> str:
    """Of a cache that goes with q: DeepSeek V4 and V4.1 have as many columns, and other bytes of a token."""
    if not is_fp8:
        return "bf16"
    if q.shape[-1] not in _OF_COLUMNS:
        raise UserError(f"q has {q.shape[-1]} columns: FP8 caches go with 576, of DeepSeek V3.2, or 512, of V4.")
    return _OF_V41.get(cache.shape[-1], "v4") if q.shape[-1] == VALUES else _OF_COLUMNS[q.shape[-1]]


def _config(
    q: Any, k_cache: Any, causal: bool, is_fp8: bool, indices: Any, extra_cache: Any, extra_indices: Any
) -> tuple[tuple[str, Any], ...]:
    """What the calls of a group have in common."""
    import torch

    given = {"q": q, "k_cache": k_cache, "indices": indices, "extra_k_cache": extra_cache}
    given["extra_indices_in_kvcache"] = extra_indices
    for name, value in given.items():
        if not isinstance(value, torch.Tensor) and (name in ("q", "k_cache") or value is not None):
            raise UserError(f"{name} is a {type(value).__name__}: pass a torch tensor.")
    if q.dim() != 4 or k_cache.dim() not in (3, 4):
        raise UserError(
            f"q {tuple(q.shape)} must have four dimensions, (b, s, h, k + p), and k_cache {tuple(k_cache.shape)} too, "
            "(pages, page, h_kv, k + p), or three without h_kv."
        )
    h_kv = k_cache.shape[2] if k_cache.dim() == 4 else 1
    topk, extra_topk = (None if x is None else x.shape[-1] for x in (indices, extra_indices))
    values = {
        "b": q.shape[0], "s_q": q.shape[1], "h_q": q.shape[2], "page_block_size": k_cache.shape[1], "h_k": h_kv,
        "causal": bool(causal), "is_fp8_kvcache": bool(is_fp8), "topk": topk,
        "extra_page_block_size": None if extra_cache is None else extra_cache.shape[1], "extra_topk": extra_topk,
    }  # fmt: skip
    return tuple(values.items())


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
    values = dict(config)
    b, s, h, h_kv = (values[name] for name in ("b", "s_q", "h_q", "h_k"))
    tiles = s * -(-h // ROWS) if values["topk"] is not None else -(-s * h // (h_kv * ROWS))
    parts = max(1, multiprocessors(q.device) // h_kv // tiles)
    if meta.tile_scheduler_metadata is None:
        meta.tile_scheduler_metadata = torch.empty((parts, FIELDS), dtype=torch.int32, device=q.device)
    if meta.num_splits is None:
        meta.num_splits = torch.empty(b + 1, dtype=torch.int32, device=q.device)
