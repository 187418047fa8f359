"""Running cuTile kernels on a CPU: an interpreter of the final IR that cuda-tile's own front end makes.

    from mla_var3 import cutile_cpu

    cutile_cpu.launch((blocks,), kernel, (tensor, other, 128))       # in the place of ct.launch
    cutile_cpu.launch(..., seed=7, poison=False)                     # order of blocks; padding that is not determined
    with cutile_cpu.pretend_gpu():                                   # other people's code, which asks for a GPU
        their_function(torch.rand(8, device="cuda"))
    with cutile_cpu.in_place_of_launch():                            # code that asks for no more than ct.launch
        their_function(cpu_tensor)

It needs no libcuda and no tileiras. docs/cutile_cpu.md says what it promises and what it does not run (`UNSUPPORTED`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mla_var3.cutile_cpu.unsupported import UNSUPPORTED, UNSUPPORTED_USES

if TYPE_CHECKING:
    from mla_var3.cutile_cpu.errors import InterpreterError, KernelFault, UndeterminedPadding, UnsupportedOperation
    from mla_var3.cutile_cpu.frontend import CUDA_TILE_RELEASES, check_version
    from mla_var3.cutile_cpu.grid import launch
    from mla_var3.cutile_cpu.patch import in_place_of_launch
    from mla_var3.cutile_cpu.pretend import pretend_gpu

__all__ = [
    "CUDA_TILE_RELEASES",
    "UNSUPPORTED",
    "UNSUPPORTED_USES",
    "InterpreterError",
    "KernelFault",
    "UndeterminedPadding",
    "UnsupportedOperation",
    "check_version",
    "in_place_of_launch",
    "launch",
    "pretend_gpu",
]

_WHERE = {
    "CUDA_TILE_RELEASES": "frontend",
    "check_version": "frontend",
    "InterpreterError": "errors",
    "KernelFault": "errors",
    "UndeterminedPadding": "errors",
    "UnsupportedOperation": "errors",
    "launch": "grid",
    "in_place_of_launch": "patch",
    "pretend_gpu": "pretend",
}


def __getattr__(name: str) -> Any:
    """Everything but the lists loads torch, so it loads when it is used."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
