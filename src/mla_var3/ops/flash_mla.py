"""FlashMLA's dense decode under its own names: a program written for it runs after changing its import.

    import mla_var3.ops.flash_mla as flash_mla

`get_mla_metadata` and `flash_mla_with_kvcache` take the arguments and give the results of FlashMLA's Python interface
as of its revision 9241ae3. Different are: sparse attention and FP8 caches are refused by the name of their argument;
refusals are `UserError`, not assertions; a width of 512 without rope columns is refused; pages may hold any number of
tokens; and metadata may be used again after `cache_seqlens` changed, which FlashMLA forbids.

Metadata: FlashMLA's first call with fresh metadata runs a small kernel that deals out the blocks of all requests, and
later calls with the same metadata reuse its result; its own benchmark counts neither that kernel nor the one that
combines splits, only the attention kernel. Here metadata holds what was picked on the host; blocks are dealt out by the
kernels themselves, from lengths they read. So nothing happens outside of a timed call, and all of it is counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mla_var3.errors import UserError
from mla_var3.ops.decode import LATENT, mla_decode

if TYPE_CHECKING:
    import torch

__all__ = ["FlashMLASchedMeta", "flash_mla_with_kvcache", "get_mla_metadata"]


@dataclass
class FlashMLASchedMeta:
    """What `get_mla_metadata` returns and every call of a group shares. The first call fills it in.

    config: (field, value) pairs that later calls must agree with. tile_scheduler_metadata, num_splits: always None,
    for programs that look at them.
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
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: None = None,
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
    """Dense decode attention: q (b, s, h, 576), k_cache (pages, page, h_kv, 576), block_table (b, width) int32,
    cache_seqlens (b,) int32, head_dim_v = 512.

    softmax_scale: factor on q·k, default 576^-1/2. causal: aligned to the end of each request. The arguments from
    `is_fp8_kvcache` on belong to sparse and FP8 attention: any that is given raises `UserError` with its name.
    Returns out (b, s, h, 512) in q's dtype and the natural log-sum-exp (b, h, s) in float32; a row without keys has
    out 0 and +inf.
    """
    if not isinstance(tile_scheduler_metadata, FlashMLASchedMeta):
        raise UserError(
            f"tile_scheduler_metadata is a {type(tile_scheduler_metadata).__name__}: pass what get_mla_metadata() of "
            "this module returned first."
        )
    refused: dict[str, Any] = {
        "is_fp8_kvcache": is_fp8_kvcache or None,
        "indices": indices,
        "attn_sink": attn_sink,
        "extra_k_cache": extra_k_cache,
        "extra_indices_in_kvcache": extra_indices_in_kvcache,
        "topk_length": topk_length,
        "extra_topk_length": extra_topk_length,
    }
    for name, value in refused.items():
        if value is not None:
            kind = "FP8 caches" if name == "is_fp8_kvcache" else "sparse attention"
            raise UserError(f"{name} was given: {kind} are not supported here, only dense bf16 and fp16; leave it out.")
    if num_splits is not None:
        raise UserError("num_splits was given: pass None, the second value of get_mla_metadata().")
    for name, given in (("block_table", block_table), ("cache_seqlens", cache_seqlens)):
        if given is None:
            raise UserError(f"{name} is None: dense attention needs it.")
    assert block_table is not None and cache_seqlens is not None
    if head_dim_v != LATENT:
        raise UserError(f"head_dim_v = {head_dim_v} must be {LATENT}.")
    _same_group(tile_scheduler_metadata, q, k_cache, causal)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
    both = mla_decode(
        q, k_cache, block_table, cache_seqlens, scale=scale, causal=causal, head_dim_v=head_dim_v, return_lse=True
    )
    assert isinstance(both, tuple)
    return both


def _same_group(meta: FlashMLASchedMeta, q: Any, k_cache: Any, causal: bool) -> None:
    """Fills the metadata in, or sees that the call has the shapes of the one that did."""
    if q.dim() != 4 or k_cache.dim() != 4:
        raise UserError(
            f"q {tuple(q.shape)} and k_cache {tuple(k_cache.shape)} must have four dimensions: (b, s, h, 576) and "
            "(pages, page, h_kv, 576)."
        )
    names = ("b", "s_q", "h_q", "page_block_size", "h_k", "causal")
    found = tuple(zip(names, (*q.shape[:3], *k_cache.shape[1:3], bool(causal)), strict=True))
    if not meta.have_initialized:
        meta.have_initialized, meta.config = True, found
        return
    for (name, value), (_, before) in zip(found, meta.config or found, strict=True):
        if value != before:
            raise UserError(
                f"{name} is {value} and was {before} in the first call with this metadata: get fresh metadata from "
                "get_mla_metadata() for calls of another shape."
            )
