"""`CuteKernel`: a CuTe DSL kernel, host function and device function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_var3.errors import UserError
from mla_var3.runtime.base import BaseKernel, FlopsBytes
from mla_var3.toolchain import mistakes
from mla_var3.toolchain.compiled import CompiledKernel

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.runtime.plan import KernelPlan


class CuteKernel(BaseKernel):
    """A kernel in CuTe DSL has two functions: a `@cute.jit` host function that launches, and the `@cute.kernel` device
    function that it launches. This class holds what is called and what compiles.

    kernel_fn: the device function, which names the kernel. launch_fn(tiling): launches on the current stream; it is a
    closure over the tensors and the compiled host function. input_tensors, output_tensors: those of the call, outputs
    allocated already. tiling, autotune_configs: the knobs in use, and those that a tuner may try.
    algorithmic_flops_bytes_fn(tiling): FLOPs and least bytes of a call, for the roofline. compile_fn(tiling, device,
    out_dir=None, keep=()): compiles from fake tensors, with no GPU, and returns a `CompiledKernel`; without it
    `compile` raises `UserError`.
    """

    def __init__(
        self,
        kernel_fn: Any,
        launch_fn: Callable[[Any], None],
        input_tensors: Sequence[Any],
        output_tensors: Sequence[Any],
        tiling: Any,
        autotune_configs: Sequence[Any] = (),
        algorithmic_flops_bytes_fn: FlopsBytes | None = None,
        compile_fn: Callable[..., CompiledKernel] | None = None,
        *,
        name: str | None = None,
        workspace_tensors: Sequence[Any] = (),
        plan: KernelPlan | None = None,
    ) -> None:
        super().__init__(
            name or kernel_fn.__name__,
            input_tensors=input_tensors,
            output_tensors=output_tensors,
            workspace_tensors=workspace_tensors,
            tiling=tiling,
            autotune_configs=autotune_configs,
            algorithmic_flops_bytes_fn=algorithmic_flops_bytes_fn,
            plan=plan,
        )
        self.kernel_fn = kernel_fn
        self.launch_fn = launch_fn
        self.compile_fn = compile_fn

    def launch(self) -> None:
        try:
            self.launch_fn(self.tiling)
        except Exception as error:
            mistakes.reraise(error)

    def compile(self, out_dir: Path | None, device: Device, keep: Sequence[str] = ()) -> CompiledKernel:
        if self.compile_fn is None:
            raise UserError(f"{self.name} has no compile_fn: give CuteKernel one that compiles from fake tensors.")
        try:
            if out_dir is None and not keep and self.plan is not None:
                from mla_var3.toolchain.aot import compiled_host

                found = compiled_host(self.plan, self.name, self.compile_fn, tiling=self.tiling, device=device)
                return replace(found, artefacts={})
            return self.compile_fn(self.tiling, device, out_dir=out_dir, keep=keep)
        except Exception as error:
            mistakes.reraise(error)
