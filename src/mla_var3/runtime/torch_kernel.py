"""`TorchKernel`: a function of torch operations as a kernel; `LibraryCall`: a stage that is somebody else's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_var3.errors import UserError
from mla_var3.runtime.base import BaseKernel
from mla_var3.toolchain.compiled import CompiledKernel

if TYPE_CHECKING:
    from mla_var3.device import Device


class LibraryCall(BaseKernel):
    """Calls `fn`, which puts work of a library (torch's cuBLAS, say) on the current stream and writes where it is to:
    a stage of a pipeline of which nothing is compiled here."""

    comes_compiled = True

    def __init__(self, fn: Callable[[], Any], *, name: str, **options: Any) -> None:
        self.fn = fn
        super().__init__(name, **options)

    def launch(self) -> None:
        self.fn()

    def compile(self, out_dir: Path | None, device: Device, keep: Sequence[str] = ()) -> CompiledKernel:
        raise UserError(f"{self.name} is a library's: there is no kernel of its own to compile.")


class TorchKernel(BaseKernel):
    """Calls `fn(*input_tensors)` and copies its results into `output_tensors`.

    torch itself allocates inside `fn`, from its caching allocator (a graph's private pool under capture); that is
    the one exception to "a call allocates nothing". `fn` must not wait for the device, or it cannot be captured.
    """

    def __init__(self, fn: Callable[..., tuple[Any, ...]], *, name: str | None = None, **options: Any) -> None:
        self.fn = fn
        super().__init__(name or fn.__name__, **options)

    def launch(self) -> None:
        for target, value in zip(self.output_tensors, self.fn(*self.input_tensors), strict=True):
            target.copy_(value)

    def compile(self, out_dir: Path | None, device: Device, keep: Sequence[str] = ()) -> CompiledKernel:
        raise UserError(f"{self.name} is made of torch operations: there is no kernel of its own to compile.")
