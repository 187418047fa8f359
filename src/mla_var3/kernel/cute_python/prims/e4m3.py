"""e4m3 codes to bf16, in registers.

sm_90 has an instruction for two codes to two halves, which are exact, and none to bf16. Their way leads through fp32,
where a scale is multiplied with, so that a value is rounded once whatever its scale is. Moving the bits of a code into
the fields of a bf16 (exact too, 2^-120 of it) is not faster here: logic runs at the rate of conversions, and a scale
that must not be rounded first takes more than one 16-bit product.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32


@cute.jit
def widen(codes: Int32, scale: Any) -> tuple[Int32, Int32]:
    """Four codes as two words of two bf16, in order, times a scale (Float32; None: 1)."""
    text = "{ .reg .b16 c0, c1, h0, h1, h2, h3; .reg .b32 x, y; .reg .f32 f0, f1, f2, f3; mov.b32 {c0, c1}, {$r0}; "
    text += "cvt.rn.f16x2.e4m3x2 x, c0; cvt.rn.f16x2.e4m3x2 y, c1; mov.b32 {h0, h1}, x; mov.b32 {h2, h3}, y; "
    text += "".join(f"cvt.f32.f16 f{i}, h{i}; " for i in range(4))
    arguments = [codes]
    if cutlass.const_expr(scale is not None):
        text += "".join(f"mul.f32 f{i}, f{i}, {{$r1}}; " for i in range(4))
        arguments.append(scale)
    text += "cvt.rn.bf16x2.f32 {$w0}, f1, f0; cvt.rn.bf16x2.f32 {$w1}, f3, f2; }"
    return cute.arch.inline_ptx(text, write_only_types=[Int32, Int32], read_only_args=arguments)
