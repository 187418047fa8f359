"""DeepGEMM's indexer logits under their own names: a program written for them runs after changing its import.

    import mla_var3.ops.deep_gemm as deep_gemm

`fp8_mqa_logits`, `fp8_paged_mqa_logits`, `get_paged_mqa_logits_metadata`, and the newer `fp8_fp4_mqa_logits` and
`fp8_fp4_paged_mqa_logits`, take the arguments and give the results of DeepGEMM's functions as of its revision 54e2261.
Different are: refusals are `UserError`, not assertions; 16 heads are taken beside 32 and 64, and any number of query
tokens of a request, where DeepGEMM has one and two on Hopper; a sum that is NaN becomes -inf; and FP4 is not taken.

Two things cost more here than there. Head dims of 32 and 64 are copied in front of zeros, up to 128 columns; with pages
they are not taken. Logits that begin at each row's start (max_seqlen_k) are copied out of logits of all keys.

Metadata: DeepGEMM's is a schedule that a kernel of its own makes, once for all layers of a step. Here the kernel deals
out its work itself, from the lengths that it reads, in every call: the tensor that stands in its place has DeepGEMM's
shape and dtype, nothing writes it and nothing reads it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mla_var3.errors import UserError
from mla_var3.ops.indexer import indexer_logits
from mla_var3.workload.indexer_logits import PAGE, D

if TYPE_CHECKING:
    import torch

__all__ = [
    "fp8_fp4_mqa_logits",
    "fp8_fp4_paged_mqa_logits",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "get_paged_mqa_logits_metadata",
]


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
    clean_logits: what is out of a query token's range is -inf; else it may hold anything. max_seqlen_k: 0, or the
    columns of logits (n, max_seqlen_k) whose row i begins at key cu_seq_len_k_start[i], without clean_logits. Head dims
    of 32 and 64 are taken too."""
    return fp8_fp4_mqa_logits(
        (q, None), kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits, max_seqlen_k
    )  # fmt: skip


def fp8_fp4_mqa_logits(
    q: tuple[torch.Tensor, torch.Tensor | None],
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
    logits_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`fp8_mqa_logits` with q as a pair of codes and None, which stands for the scales of FP4, and logits of
    logits_dtype, torch.float32 (default) or torch.bfloat16."""
    codes = _codes(q)
    given: Any = kv
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise UserError("kv is no pair of keys and scales: pass ((t, 128) torch.float8_e4m3fn, (t,) torch.float32).")
    if max_seqlen_k and clean_logits:
        raise UserError(f"max_seqlen_k = {max_seqlen_k} and clean_logits are not taken together: pass one of them.")
    keys, scales = given
    codes, keys = _widened(codes), _widened(keys)
    found = indexer_logits(
        codes, keys, weights, cu_seq_len_k_end,
        starts=cu_seq_len_k_start, scales=scales, dtype=logits_dtype, clean=bool(clean_logits),
    )  # fmt: skip
    if not max_seqlen_k:
        return found
    import torch

    column = torch.arange(max_seqlen_k, device=found.device) + cu_seq_len_k_start[:, None].long()
    return found.gather(1, column.clamp_(0, found.shape[1] - 1))


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
    return fp8_fp4_paged_mqa_logits(
        (q, None), kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, clean_logits,
        indices=indices,
    )  # fmt: skip


def fp8_fp4_paged_mqa_logits(
    q: tuple[torch.Tensor, torch.Tensor | None],
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: Any,
    max_context_len: int,
    clean_logits: bool = False,
    logits_dtype: torch.dtype | None = None,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """`fp8_paged_mqa_logits` with q and logits_dtype as of `fp8_fp4_mqa_logits`."""
    codes = _codes(q)
    if indices is not None:
        raise UserError("indices is for packed query tokens, which are not taken on Hopper: leave it out.")
    if isinstance(max_context_len, bool) or not isinstance(max_context_len, int) or max_context_len < 1:
        raise UserError(f"max_context_len is {max_context_len!r}: pass the columns of the logits, at least 1.")
    width = -(-max_context_len // PAGE)
    if block_table.shape[-1] < width:
        raise UserError(
            f"block_table has {block_table.shape[-1]} pages of {PAGE} tokens for a request, and max_context_len is "
            f"{max_context_len}: give as many pages."
        )
    found = indexer_logits(
        codes, kv_cache, weights, context_lens,
        page_table=block_table[:, :width], dtype=logits_dtype, clean=bool(clean_logits),
    )  # fmt: skip
    return found[:, :max_context_len]


def get_paged_mqa_logits_metadata(
    context_lens: torch.Tensor, block_kv: int, num_sms: int, indices: torch.Tensor | None = None
) -> torch.Tensor:
    """A tensor (num_sms + 1, 2) int32 that no call looks at."""
    if block_kv != PAGE:
        raise UserError(f"block_kv = {block_kv}: pages have {PAGE} tokens.")
    if indices is not None:
        raise UserError("indices is for packed query tokens, which are not taken on Hopper: leave it out.")
    return context_lens.new_zeros((num_sms + 1, 2))


def _codes(q: Any) -> Any:
    """The codes of a pair."""
    if not isinstance(q, tuple | list) or len(q) != 2:
        raise UserError("q is no pair of codes and scales: pass (torch.float8_e4m3fn codes, None).")
    if q[1] is not None:
        raise UserError(
            "q has scales, which are of FP4 and not taken on Hopper: pass (torch.float8_e4m3fn codes, None)."
        )
    return q[0]


def _widened(codes: Any) -> Any:
    """Codes of 32 or 64 columns in front of zeros; others as they are, to be judged."""
    import torch

    if not isinstance(codes, torch.Tensor) or codes.dim() < 2 or codes.shape[-1] not in (32, 64):
        return codes
    made = torch.nn.functional.pad(codes.view(torch.uint8), (0, D - codes.shape[-1]))
    return made.view(codes.dtype)
