"""The kernels that only read and that copy: what device memory delivers when nothing is written back, as much, or as
much in rows with gaps between them.

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


@triton.jit
def copy_rows(x, out, WORDS: tl.constexpr, PITCH: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """x: (programs * ROWS, WORDS) int32. out: as many rows, PITCH words apart. LANES: WORDS or more, a power of two."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    word = tl.arange(0, LANES)[None, :]
    tl.store(out + row * PITCH + word, tl.load(x + row * WORDS + word, mask=word < WORDS), mask=word < WORDS)


def launch_copy_rows(x: Any, words: int, pitch: int) -> int:
    """Copies rows of `words` int32 from the front of x, where they lie in order, to behind them, where they are `pitch`
    apart: as many as x has room for. Returns how many. A program has 1,024 words: more were slower in such copies."""
    lanes = triton.next_power_of_2(words)
    rows = max(1, 1024 // lanes)
    programs = x.numel() // (rows * (words + pitch))
    copy_rows[(programs,)](x, x[programs * rows * words :], words, pitch, rows, lanes, num_warps=WARPS)
    return programs * rows
