"""Small CuTe kernels that differ in one thing each, for the digest's tests; `python digest_kernels.py NAME` prints
one."""

from __future__ import annotations

import sys
from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_compact_tensor

from mla_var3.device import Device
from mla_var3.toolchain.cute import compile_cute, fake_stream


@cute.kernel
def scale(x: cute.Tensor, y: cute.Tensor, factor: cutlass.Constexpr):
    """y = factor · x"""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    at = block * 128 + thread
    if at < cute.size(x):
        y[at] = x[at] * Float32(factor)


@cute.kernel
def renamed(a: cute.Tensor, b: cute.Tensor, by: cutlass.Constexpr):
    # The same, in other words and on other lines.
    t, _, _ = cute.arch.thread_idx()
    c, _, _ = cute.arch.block_idx()
    place = c * 128 + t
    if place < cute.size(a):
        b[place] = a[place] * Float32(by)


@cute.jit
def launch(x: cute.Tensor, y: cute.Tensor, n: Int32, factor: cutlass.Constexpr, stream: CUstream):
    scale(x, y, factor).launch(grid=((n + 127) // 128, 1, 1), block=(128, 1, 1), stream=stream)


@cute.jit
def launch_renamed(a: cute.Tensor, b: cute.Tensor, count: Int32, by: cutlass.Constexpr, stream: CUstream):
    renamed(a, b, by).launch(grid=((count + 127) // 128, 1, 1), block=(128, 1, 1), stream=stream)


@cute.jit
def launch_other_grid(x: cute.Tensor, y: cute.Tensor, n: Int32, factor: cutlass.Constexpr, stream: CUstream):
    scale(x, y, factor).launch(grid=((n + 63) // 64, 1, 1), block=(128, 1, 1), stream=stream)


@cute.jit
def launch_pdl(x: cute.Tensor, y: cute.Tensor, n: Int32, factor: cutlass.Constexpr, stream: CUstream):
    scale(x, y, factor).launch(grid=((n + 127) // 128, 1, 1), block=(128, 1, 1), stream=stream, use_pdl=True)


@cute.jit
def launch_cluster(x: cute.Tensor, y: cute.Tensor, n: Int32, factor: cutlass.Constexpr, stream: CUstream):
    scale(x, y, factor).launch(grid=((n + 127) // 128, 1, 1), block=(128, 1, 1), cluster=(2, 1, 1), stream=stream)


@cute.jit
def launch_smem(x: cute.Tensor, y: cute.Tensor, n: Int32, factor: cutlass.Constexpr, stream: CUstream):
    scale(x, y, factor).launch(grid=((n + 127) // 128, 1, 1), block=(128, 1, 1), smem=4096, stream=stream)


@cute.jit
def launch_two(x: cute.Tensor, y: cute.Tensor, n: Int32, factor: cutlass.Constexpr, stream: CUstream):
    renamed(x, y, 5.0).launch(grid=((n + 127) // 128, 1, 1), block=(128, 1, 1), stream=stream)
    scale(x, y, factor).launch(grid=((n + 127) // 128, 1, 1), block=(128, 1, 1), stream=stream)


@cute.jit
def launch_two_swapped(x: cute.Tensor, y: cute.Tensor, n: Int32, factor: cutlass.Constexpr, stream: CUstream):
    scale(x, y, factor).launch(grid=((n + 127) // 128, 1, 1), block=(128, 1, 1), stream=stream)
    renamed(x, y, 5.0).launch(grid=((n + 127) // 128, 1, 1), block=(128, 1, 1), stream=stream)


def compiled(host: Any, factor: float = 3.0, options: str = "", device: str = "h200") -> Any:
    x, y = (make_fake_compact_tensor(Float32, (cute.sym_int32(),), assumed_align=16) for _ in range(2))
    arguments = (x, y, Int32(1), factor, fake_stream())
    return compile_cute(host, arguments, device=Device.get(device), options=options)


if __name__ == "__main__":
    print(compiled(globals()[sys.argv[1]]).code.digest)
