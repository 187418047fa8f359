"""The runtime that every kernel version is written against. Names resolve on first use, so importing is free."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mla_var3.errors import Verdict
from mla_var3.runtime.types import Kernel, Tiling
from mla_var3.toolchain.compiled import CompiledKernel, Resources

if TYPE_CHECKING:
    from mla_var3.runtime.concurrent import ConcurrentKernels as ConcurrentKernels
    from mla_var3.runtime.ct_kernel import ConstBool as ConstBool
    from mla_var3.runtime.ct_kernel import ConstFloat as ConstFloat
    from mla_var3.runtime.ct_kernel import ConstInt as ConstInt
    from mla_var3.runtime.ct_kernel import CtKernel as CtKernel
    from mla_var3.runtime.cute_kernel import CuteKernel as CuteKernel
    from mla_var3.runtime.pipeline import KernelPipeline as KernelPipeline
    from mla_var3.runtime.plan import KernelPlan as KernelPlan
    from mla_var3.runtime.torch_kernel import LibraryCall as LibraryCall
    from mla_var3.runtime.torch_kernel import TorchKernel as TorchKernel
    from mla_var3.runtime.triton_kernel import TritonKernel as TritonKernel

_LAZY = {
    "KernelPlan": "plan",
    "BaseKernel": "base",
    "CuteKernel": "cute_kernel",
    "CtKernel": "ct_kernel",
    "ConstInt": "ct_kernel",
    "ConstBool": "ct_kernel",
    "ConstFloat": "ct_kernel",
    "TritonKernel": "triton_kernel",
    "TorchKernel": "torch_kernel",
    "LibraryCall": "torch_kernel",
    "KernelPipeline": "pipeline",
    "ConcurrentKernels": "concurrent",
}

__all__ = ["CompiledKernel", "Kernel", "Resources", "Tiling", "Verdict", *_LAZY]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"mla_var3.runtime.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'mla_var3.runtime' has no attribute {name!r}")
