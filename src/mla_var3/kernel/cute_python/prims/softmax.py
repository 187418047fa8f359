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

# Start of the running maximum: finite, so that a row without keys gives exp2(-inf - m) = 0 and never inf - inf, and far
# below the scores that results hold for (`workload.decode.HIGHEST`), as bf16 inputs might also have.
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
    """ln(total · 2^shift); +inf, which says that a row has no key, where total is 0. NaN, which a score that is NaN
    makes of the total while the maximum stays a number, stays NaN: it equals nothing."""
    value = (cute.math.log2(total, fastmath=True) + shift) * math.log(2.0)
    if total == 0.0:
        value = Float32.inf
    return value


# ------------------------------------------------------------------------------------------------ of swapped operands
@cute.jit
def publish(values: cute.Tensor, row: cute.Pointer, lane: Int32):
    """Writes a warp's column values (registers, (N/4,)), the same in the eight lanes of a column, to a row of N values
    of an exchange buffer (shared memory)."""
    if lane < 4:
        pairs = cute.make_tensor(row, cute.make_layout((2, 4, cute.size(values) // 2), stride=(1, 2, 8)))
        pair = cute.make_rmem_tensor(2, Float32)
        for j in cutlass.range_constexpr(cute.size(values) // 2):
            pair[0], pair[1] = values[2 * j], values[2 * j + 1]
            cute.autovec_copy(pair, pairs[None, lane, j])


@cute.jit
def publish_sums(values: cute.Tensor, row: cute.Pointer, lane: Int32):
    """`publish` of the sums of `values` over the eight lanes of a column; `values` are lost. Each lane is left with one
    column or a share of it, so that lanes send each other what they do not keep: 7 shuffles for 8 columns, not 24."""
    count = cutlass.const_expr(cute.size(values))
    kept = count
    for bit in cutlass.range_constexpr(4, 1, -1):
        upper = (lane >> bit) & 1
        if cutlass.const_expr(kept > 1):
            kept = kept // 2
            for c in cutlass.range_constexpr(kept):
                sent = cutlass.select_(upper > 0, values[c], values[c + kept])
                own = cutlass.select_(upper > 0, values[c + kept], values[c])
                values[c] = own + cute.arch.shuffle_sync_bfly(sent, offset=1 << bit)
        else:
            values[0] = values[0] + cute.arch.shuffle_sync_bfly(values[0], offset=1 << bit)
    each = cutlass.const_expr(32 // 4 // count)  # lanes with the same column
    if lane // 4 % each == 0:
        c = lane // 4 // each
        exchange = cute.make_tensor(row, cute.make_layout(4 * count))
        exchange[(lane % 4) * 2 + c % 2 + 8 * (c // 2)] = values[0]


@cute.jit
def collect(values: cute.Tensor, exchange: cute.Pointer, warps: cutlass.Constexpr, lane: Int32,
            largest: cutlass.Constexpr):  # fmt: skip
    """values[c] = maximum or sum over `warps` rows of an exchange buffer of this thread's columns."""
    n = cutlass.const_expr(4 * cute.size(values))
    pair = cute.make_rmem_tensor(2, Float32)
    pairs = cute.make_tensor(exchange, cute.make_layout((2, 4, n // 8, warps), stride=(1, 2, 8, n)))
    for j in cutlass.range_constexpr(n // 8):
        for i in cutlass.range_constexpr(warps):
            cute.autovec_copy(pairs[None, lane % 4, j, i], pair)
            for e in cutlass.range_constexpr(2):
                if cutlass.const_expr(i == 0):
                    values[2 * j + e] = pair[e]
                elif cutlass.const_expr(largest):
                    values[2 * j + e] = cute.arch.fmax(values[2 * j + e], pair[e])
                else:
                    values[2 * j + e] = values[2 * j + e] + pair[e]
