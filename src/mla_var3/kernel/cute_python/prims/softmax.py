"""Online softmax on a warpgroup's accumulator of query rows x tokens, in the log2 domain (scores · scale · log2 e).

The running maximum may lag behind by 2^SLACK: probabilities stay below that, and older results are rarely rescaled
(the idea is FlashAttention-4's).
"""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from mla_var3.kernel.cute_python.prims.wgmma import as_rows

# Start of the running maximum: finite, so that a row without keys gives exp2(-inf - m) = 0 and never inf - inf, and
# below every score that finite 16-bit inputs can give.
NO_KEY = -1.0e30
# In log2: fp32 sums and 16-bit probabilities (bf16 and fp16 alike) have room for 2^8 at the same relative precision.
SLACK = 8.0


def exp2(x: Float32) -> Float32:
    return cute.math.exp2(x, fastmath=True)


@cute.jit
def lazy_max(old: Float32, new: Float32) -> Float32:
    """`old` unless `new` is more than SLACK above it."""
    return new if new > old + SLACK else old


@cute.jit
def mask_columns(acc_s: cute.Tensor, thread: Int32, first_column: Int32, limits: cute.Tensor) -> None:
    """Sets scores of columns at or past the row's limit to -inf. first_column: of the tile, in tokens."""
    rows = as_rows(acc_s)
    base = first_column + (thread % 4) * 2
    for r in cutlass.range_constexpr(2):
        left = limits[r] - base
        for j in cutlass.range_constexpr(cute.size(rows, mode=[1])):
            column = (j // 2) * 8 + j % 2
            rows[r, j] = rows[r, j] if column < left else -Float32.inf


@cute.jit
def mask_newest(
    acc_s: cute.Tensor,
    thread: Int32,
    first_column: Int32,  # of the tile, in tokens from the first of the newest s keys on
    s: cutlass.Constexpr,
    mask: cute.Pointer,  # uint8, global memory
    places: cute.Tensor,  # of each of the thread's rows, where its s values begin
) -> None:
    """Sets scores of the newest s keys that a row may not see to -inf. Loads for every column, so that all are in
    flight together."""
    rows = as_rows(acc_s)
    base = first_column + (thread % 4) * 2
    for r in cutlass.range_constexpr(2):
        for j in cutlass.range_constexpr(cute.size(rows, mode=[1])):
            key = base + (j // 2) * 8 + j % 2
            seen = cute.make_tensor(mask + (places[r] + cutlass.min(cutlass.max(key, 0), s - 1)), cute.make_layout(1))
            rows[r, j] = rows[r, j] if key < 0 or seen[0] != 0 else -Float32.inf


@cute.jit
def thread_max(acc_s: cute.Tensor, r: cutlass.Constexpr) -> Float32:
    """Maximum of this thread's columns of accumulator row r, as four independent chains."""
    rows = as_rows(acc_s)
    best = cute.make_rmem_tensor(4, Float32)
    for j in cutlass.range_constexpr(cute.size(rows, mode=[1])):
        best[j % 4] = rows[r, j] if j < 4 else cute.arch.fmax(best[j % 4], rows[r, j])
    return cute.arch.fmax(cute.arch.fmax(best[0], best[1]), cute.arch.fmax(best[2], best[3]))


@cute.jit
def row_max(acc_s: cute.Tensor, r: cutlass.Constexpr) -> Float32:
    """Maximum of accumulator row r over the four threads that share it."""
    rows = as_rows(acc_s)
    best = rows[r, 0]
    for j in cutlass.range_constexpr(1, cute.size(rows, mode=[1])):
        best = cute.arch.fmax(best, rows[r, j])
    for offset in cutlass.range_constexpr(1, 3):
        best = cute.arch.fmax(best, cute.arch.shuffle_sync_bfly(best, offset=offset))
    return best


@cute.jit
def row_exp2(acc_s: cute.Tensor, r: cutlass.Constexpr, scale_log2: Float32, shift: Float32) -> Float32:
    """Replaces row r by exp2(s · scale_log2 - shift) and returns what this thread adds to its sum."""
    rows = as_rows(acc_s)
    even = Float32(0.0)
    odd = Float32(0.0)
    for j in cutlass.range_constexpr(0, cute.size(rows, mode=[1]), 2):
        rows[r, j] = exp2(rows[r, j] * scale_log2 - shift)
        rows[r, j + 1] = exp2(rows[r, j + 1] * scale_log2 - shift)
        even = even + rows[r, j]
        odd = odd + rows[r, j + 1]
    return even + odd


@cute.jit
def quad_sum(value: Float32) -> Float32:
    """Sum over the four threads that share a row."""
    for offset in cutlass.range_constexpr(1, 3):
        value = value + cute.arch.shuffle_sync_bfly(value, offset=offset)
    return value


@cute.jit
def natural_lse(total: Float32, shift: Float32) -> Float32:
    """ln(total · 2^shift); +inf, which says that a row has no key, where total is 0."""
    value = Float32.inf
    if total > 0.0:
        value = (cute.math.log2(total, fastmath=True) + shift) * math.log(2.0)
    return value
