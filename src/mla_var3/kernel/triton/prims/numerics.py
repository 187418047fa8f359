"""Products and roundings that mean the same on a GPU and in Triton's CPU interpreter.

The interpreter (seen in Triton 3.9) stores bf16 as 16-bit integers: `tl.dot` multiplies those integers, a cast from
float32 truncates (or, asked to round, loses the carry into an odd exponent), and casts take most of its time. With
INTERPRET set, products are made in float32, which holds bf16 exactly, and both conversions are done on the bits.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dot(a, b, acc, INTERPRET: tl.constexpr):
    """acc + a · b with float32 sums; a (M, K) and b (K, N) of one 16-bit dtype, acc (M, N) float32."""
    if INTERPRET:
        return tl.dot(_widen(a), _widen(b), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def _widen(x):
    """float32 of bf16 (by its bits) or fp16."""
    if x.dtype == tl.bfloat16:
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        return bits.to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def round_to(x, dtype: tl.constexpr, INTERPRET: tl.constexpr):
    """float32 x rounded to the nearest (ties to even) of dtype; NaN stays NaN."""
    if INTERPRET and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = tl.where(x == x, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0)
        return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


def interpreted(kernel_fn: object) -> bool:
    """Whether a `@triton.jit` function was decorated under TRITON_INTERPRET=1, so that it runs on CPU tensors."""
    return not isinstance(kernel_fn, triton.JITFunction)
