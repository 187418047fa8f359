"""bf16 columns as e4m3 codes and scales, in registers."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from mla_var3.kernel.cute_python.prims.vectors import VECTOR

E4M3_MAX = 448.0


@cute.jit
def largest_of(vector: cute.Tensor, lanes: cutlass.Constexpr) -> Float32:
    """The largest magnitude of (VECTOR,) elements and of those of the other lanes of an aligned group of so many."""
    largest = Float32(0.0)
    for i in cutlass.range_constexpr(VECTOR):
        x = Float32(vector[i])
        largest = cute.arch.fmax(largest, cute.arch.fmax(x, -x))
    for step in cutlass.range_constexpr(lanes.bit_length() - 1):
        largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, offset=1 << step))
    return largest


@cute.jit
def bits_of(x: Float32) -> Int32:
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x])


@cute.jit
def float_of(bits: Int32) -> Float32:
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[bits])


@cute.jit
def power_above(x: Float32) -> Float32:
    """The smallest power of two of at least x, which is a normal number."""
    return float_of((bits_of(x) + 0x7FFFFF) & ~0x7FFFFF)


@cute.jit
def quotient(x: Float32, y: Float32) -> Float32:
    """x / y, rounded once whatever the compiler takes for fast."""
    return cute.arch.inline_ptx("div.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[x, y])


@cute.jit
def e4m3_codes(vector: cute.Tensor, scale: Float32, power: cutlass.Constexpr) -> cute.Tensor:
    """(VECTOR / 4,) Uint32: the codes of (VECTOR,) elements over their scale, at most 448. power: that the scale is a
    power of two, so that its reciprocal is exact."""
    codes = cute.make_rmem_tensor(VECTOR // 4, Uint32)
    over = cute.make_rmem_tensor(VECTOR, Float32)
    reciprocal = float_of((254 << 23) - bits_of(scale)) if cutlass.const_expr(power) else scale
    for i in cutlass.range_constexpr(VECTOR):
        x = Float32(vector[i])
        over[i] = x * reciprocal if cutlass.const_expr(power) else quotient(x, scale)
    for i in cutlass.range_constexpr(VECTOR // 4):
        codes[i] = cute.arch.inline_ptx(
            "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, {$r1}, {$r0}; "
            "cvt.rn.satfinite.e4m3x2.f32 high, {$r3}, {$r2}; mov.b32 {$w0}, {low, high}; }",
            write_only_types=[Uint32],
            read_only_args=[over[4 * i], over[4 * i + 1], over[4 * i + 2], over[4 * i + 3]],
        )
    return codes
