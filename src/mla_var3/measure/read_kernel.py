"""The kernels that only read and that copy: what device memory delivers when nothing is written back, or as much.

A copy is no substitute for a read: it moves half of its bytes the other way. torch's is none for a kernel that copies:
captured in a graph it becomes a memcpy node, which is slower still.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

#: Elements (int32) that a program reads: BLOCK at a time, STEPS times. 128 KiB each, so that 2 GiB make 16384 programs.
BLOCK, STEPS, WARPS = 8192, 4, 8


@triton.jit
def read_only(x, out, BLOCK: tl.constexpr, STEPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """x: (programs * STEPS * BLOCK,) int32. out: (programs,) int32, the wrapped sums, so that no load is dropped."""
    program = tl.program_id(0)
    first = program.to(tl.int64) * (BLOCK * STEPS)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    for step in tl.static_range(STEPS):
        total += tl.load(x + first + step * BLOCK + lane)
    tl.store(out + program, tl.sum(total))


def launch(x: Any, out: Any) -> None:
    """Reads all of x, a CUDA int32 tensor of a multiple of BLOCK * STEPS elements; out: one int32 per program."""
    read_only[(x.numel() // (BLOCK * STEPS),)](x, out, BLOCK=BLOCK, STEPS=STEPS, num_warps=WARPS)


@triton.jit
def copy(x, out, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """x, out: (programs * BLOCK,) int32."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    lane = tl.arange(0, BLOCK)
    tl.store(out + first + lane, tl.load(x + first + lane))


def launch_copy(x: Any, out: Any) -> None:
    """Copies all of x to out, CUDA int32 tensors of a multiple of BLOCK elements."""
    copy[(x.numel() // BLOCK,)](x, out, BLOCK=BLOCK, num_warps=WARPS)
