"""DeepGEMM's indexer logits under their own names: a program written for them runs after changing its import.

    import mla_var3.ops.deep_gemm as deep_gemm

`fp8_mqa_logits`, `fp8_paged_mqa_logits` and `get_paged_mqa_logits_metadata` take the arguments and give the results of
DeepGEMM's functions as of its revision 54e2261. Different are: refusals are `UserError`, not assertions; 16 heads are
taken beside 32 and 64, and any number of query tokens of a request, where DeepGEMM has one and two on Hopper; a sum
that is NaN becomes -inf; and head dims other than 128, FP4 and max_seqlen_k are not taken.

Metadata: DeepGEMM's is a schedule that a kernel of its own makes, once for all layers of a step. Here the kernel deals
out its work itself, from the lengths that it reads, in every call: the tensor that stands in its place has DeepGEMM's
shape and dtype, nothing writes it and nothing reads it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mla_var3.errors import UserError
from mla_var3.ops.indexer import indexer_logits

if TYPE_CHECKING:
    import torch

__all__ = ["fp8_mqa_logits", "fp8_paged_mqa_logits", "get_paged_mqa_logits_metadata"]


def fp8_mqa_logits(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
) -> torch.Tensor:
    """Logits (n, t) float32. q (n, h, 128), kv: keys (t, 128) of torch.float8_e4m3fn and their scales (t,) float32.
    clean_logits: what is out of a query token's range is -inf; else it may hold anything."""
    if max_seqlen_k:
        raise UserError(f"max_seqlen_k = {max_seqlen_k}: logits that begin at each row's start are not made: pass 0.")
    given: Any = kv
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise UserError("kv is no pair of keys and scales: pass ((t, 128) torch.float8_e4m3fn, (t,) torch.float32).")
    keys, scales = given
    return indexer_logits(
        q, keys, weights, cu_seq_len_k_end, starts=cu_seq_len_k_start, scales=scales, clean=bool(clean_logits)
    )


def fp8_paged_mqa_logits(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: Any,
    max_context_len: int,
    clean_logits: bool = False,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Logits (b · s, max_context_len) float32. q (b, s, h, 128), kv_cache (pages, 64, 1, 132) torch.uint8, context_lens
    (b, s), block_table (b, width). schedule_meta is not looked at. clean_logits: as of `fp8_mqa_logits`."""
    if indices is not None:
        raise UserError("indices is for packed query tokens, which are not taken on Hopper: leave it out.")
    if isinstance(max_context_len, bool) or not isinstance(max_context_len, int) or max_context_len < 1:
        raise UserError(f"max_context_len is {max_context_len!r}: pass the columns of the logits, at least 1.")
    width = -(-max_context_len // 64)
    if block_table.shape[-1] < width:
        raise UserError(
            f"block_table has {block_table.shape[-1]} pages of 64 tokens for a request, and max_context_len is "
            f"{max_context_len}: give as many pages."
        )
    found = indexer_logits(
        q, kv_cache, weights, context_lens, page_table=block_table[:, :width], clean=bool(clean_logits)
    )
    return found[:, :max_context_len]


def get_paged_mqa_logits_metadata(
    context_lens: torch.Tensor, block_kv: int, num_sms: int, indices: torch.Tensor | None = None
) -> torch.Tensor:
    """A tensor (num_sms + 1, 2) int32 that no call looks at."""
    if block_kv != 64:
        raise UserError(f"block_kv = {block_kv}: pages have 64 tokens.")
    if indices is not None:
        raise UserError("indices is for packed query tokens, which are not taken on Hopper: leave it out.")
    return context_lens.new_zeros((num_sms + 1, 2))
