"""Warp-level products, mma.sync m16n8k16, and the loads of their operands from shared memory: sm_80 and up.

Of a 16 x 8 accumulator lane i holds columns 2 (i % 4) and the next one, of row i / 4 and of the row 8 further on. That
is the order that 8 x 8 matrices of 16-bit elements have in registers (`load_matrices`), so operands need no exchange.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp

WARP = 32
M, N, K = 16, 8, 16  # of a product
OPERANDS = 8  # 16-bit elements of an A operand in a lane; of two B operands


def make_mma(dtype: type) -> cute.MmaAtom:
    """acc (4,) fp32 += A (8,) · B (4,), of a lane."""
    return cute.make_mma_atom(warp.MmaF16BF16Op(dtype, Float32, (M, N, K)))


def load_matrices(address: Int32, target: cute.Tensor, transposed: bool = False) -> None:
    """Four 8 x 8 matrices of 16-bit elements from shared memory: (8,) registers, two of each. address: where this
    lane's row of 16 bytes lies; lanes 8 i .. 8 i + 7 have the rows of matrix i."""
    dtype: Any = target.element_type
    atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transposed, 4), dtype)
    place = cute.make_ptr(dtype, address, cute.AddressSpace.smem, assumed_align=16)
    cute.copy(atom, cute.make_tensor(place, cute.make_layout(OPERANDS)), target)
