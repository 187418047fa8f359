"""Joins the partial results of split-KV kernels: out = Σ wᵢ outᵢ / Σ wᵢ with wᵢ = exp(lseᵢ).

A program takes ROWS query rows; partial outputs are normalised and in float32, so the result is rounded once. A split
without keys has lse = -inf and its output, which nobody wrote, is not read. The order of the sum is fixed: same bits
each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl

from mla_var3.kernel.triton.prims.numerics import interpreted, round_to
from mla_var3.runtime.triton_kernel import TritonKernel

MAX_SPLITS = 128


@triton.jit(do_not_specialize=["num_splits", "rows"])
def combine(
    PartialOut,  # (num_splits, b·s·h, K) float32, contiguous, global
    PartialLse,  # (num_splits, b·s·h) float32, natural log, -inf where a split has no keys
    Out,  # (b·s·h, K) bf16 or fp16
    Lse,  # (b, h, s) float32, +inf where a row has no keys
    num_splits,
    rows,  # b·s·h
    S: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    SPLITS: tl.constexpr,  # power of two of at least num_splits
    ROWS: tl.constexpr,  # query rows a program
    INTERPRET: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = row < rows
    rows64 = tl.cast(rows, tl.int64)
    columns = tl.arange(0, K)
    splits = tl.arange(0, SPLITS)
    here = (splits[None, :] < num_splits) & valid[:, None]
    lses = tl.load(PartialLse + splits[None, :] * rows64 + row[:, None], mask=here, other=float("-inf"))
    top = tl.max(lses, 1)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(lses - base[:, None]), 1)
    acc = tl.zeros([ROWS, K], dtype=tl.float32)
    for i in range(0, num_splits):
        first = i * rows64
        part = tl.load(PartialLse + first + row, mask=valid, other=float("-inf"))
        written = part > float("-inf")
        slots = row[:, None] * tl.cast(K, tl.int64) + columns[None, :]
        values = tl.load(PartialOut + first * K + slots, mask=written[:, None], other=0.0)
        acc += tl.exp(part - base)[:, None] * values
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    slots = row[:, None] * tl.cast(K, tl.int64) + columns[None, :]
    tl.store(Out + slots, round_to(acc / total[:, None], Out.dtype.element_ty, INTERPRET), mask=valid[:, None])
    token = row // H  # request · S + token of the request
    lse = tl.where(empty, float("inf"), base + tl.log(total))
    tl.store(Lse + (tl.cast(token // S, tl.int64) * H + row % H) * S + token % S, lse, mask=valid)


def combine_kernel(
    partials: Sequence[Any], outputs: Sequence[Any], *, num_splits: int, b: int, s: int, h: int, k: int, dtype: str
) -> TritonKernel:
    """The stage after a split-KV kernel. partials: (out, lse), or () to compile only; outputs: (out, lse)."""
    interpret = interpreted(combine)
    rows = 16 if interpret else 1  # the interpreter's time goes by programs, a GPU's latency by the work of one
    return TritonKernel(
        combine,
        grid_fn=lambda _: (-(-b * s * h // rows),),
        args_fn=lambda _: (*partials, *outputs, num_splits, b * s * h),
        input_tensors=partials,
        output_tensors=outputs,
        tiling=None,
        meta_fn=lambda _: {"S": s, "H": h, "K": k, "SPLITS": MAX_SPLITS, "ROWS": rows, "INTERPRET": interpret},
        options_fn=lambda _: {"num_warps": 4, "num_stages": 3},
        signature_fn=lambda _: {
            "PartialOut": "*fp32", "PartialLse": "*fp32", "Out": f"*{dtype}", "Lse": "*fp32",
            "num_splits": "i32", "rows": "i32",
        },
    )  # fmt: skip
