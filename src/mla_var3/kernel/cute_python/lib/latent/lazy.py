"""A running maximum that may lag behind: probabilities stay below 2^8 and the output is rarely rescaled."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from mla_var3.kernel.cute_python.lib import wgmma

# In log2: fp32 sums and 16-bit probabilities (bf16 and fp16 alike) have room for 2^8 at the same relative precision.
SLACK = 8.0


@cute.jit
def lazy_max(old: Float32, new: Float32) -> Float32:
    """`old` unless `new` is more than SLACK above it."""
    return new if new > old + SLACK else old


@cute.jit
def scale_if_changed(acc: cute.Tensor, factors: cute.Tensor):
    """acc[r, :] *= factors[r] for the thread's two rows, skipped by a warp whose factors are all 1."""
    if cute.arch.vote_any_sync(factors[0] != 1.0 or factors[1] != 1.0):
        wgmma.scale_rows(acc, factors)


@cute.jit
def publish(row_values: cute.Tensor, thread: cutlass.Int32, r: cutlass.Constexpr, value: Float32):
    """One of the four threads that share accumulator row r writes its value; row_values: (64,), shared memory."""
    if thread % 4 == 0:
        row_values[wgmma.acc_row(thread, r)] = value
