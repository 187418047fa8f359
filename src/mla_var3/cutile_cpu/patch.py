"""Letting code that calls `cuda.tile.launch` run here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mla_var3.cutile_cpu.grid import launch


def _on_a_gpu(args: Any) -> bool:
    if isinstance(args, (tuple, list)):
        return any(_on_a_gpu(a) for a in args)
    return bool(getattr(args, "is_cuda", False))


@contextmanager
def in_place_of_launch(**options: Any) -> Iterator[None]:
    """Inside, `ct.launch(stream, grid, kernel, args)` interprets kernels whose tensors are on the CPU.

    options: those of `launch`. It replaces the attribute of the module `cuda.tile`, for the whole process and one
    caller at a time; code that took the function out of the module earlier keeps the real one.
    """
    import cuda.tile as ct

    real = ct.launch

    def either(stream: Any, grid: Any, kernel: Any, kernel_args: Any, /, **keywords: Any) -> Any:
        if _on_a_gpu(kernel_args):
            return real(stream, grid, kernel, kernel_args, **keywords)
        return launch(grid, kernel, kernel_args, **options)

    ct.launch = either
    try:
        yield
    finally:
        ct.launch = real
