"""`CtKernel`: a cuTile kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_var3.errors import Unsupported, UserError
from mla_var3.runtime.base import BaseKernel, FlopsBytes
from mla_var3.toolchain import mistakes
from mla_var3.toolchain.compiled import CompiledKernel

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.runtime.plan import KernelPlan

_CONSTANTS = {"ConstInt": int, "ConstBool": bool, "ConstFloat": float}
_HINTED: dict[Any, Any] = {}  # (kernel function, hints) -> hinted copy


def __getattr__(name: str) -> Any:
    """ConstInt, ConstBool, ConstFloat: cuTile's annotations for constants embedded in the code."""
    if name in _CONSTANTS:
        import cuda.tile as ct

        return ct.Constant[_CONSTANTS[name]]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _name_of(kernel_fn: Any) -> str:
    from mla_var3.toolchain.cutile import kernel_name  # a @ct.kernel object hides the function's name

    return kernel_name(kernel_fn)


def _interpret(grid: Any, kernel: Any, args: Any) -> None:
    """Launches on the CPU; what the interpreter refuses is the user's mistake."""
    from mla_var3 import cutile_cpu
    from mla_var3.cutile_cpu.errors import Misuse

    try:
        cutile_cpu.launch(grid, kernel, args)
    except cutile_cpu.UnsupportedOperation as error:
        raise Unsupported(str(error)) from error
    except Misuse as error:
        raise UserError(str(error)) from error


class CtKernel(BaseKernel):
    """Launches a cuTile kernel, the `@ct.kernel` function `kernel_fn`: on the GPU, or in the interpreter where its
    tensors are on the CPU.

    grid_fn(tiling): the number of blocks along up to three axes. args_fn(tiling): the kernel's arguments in order,
    tensors and constants. input_tensors, output_tensors: those of the call. hints_fn(tiling): compiler hints as a
    dictionary with any of num_worker_warps, num_ctas, occupancy and opt_level. signature_fn(tiling): the
    `KernelSignature` to compile for when there are no tensors. The other arguments are those of `CuteKernel`.
    """

    def __init__(
        self,
        kernel_fn: Any,
        grid_fn: Callable[[Any], tuple[int, ...]],
        args_fn: Callable[[Any], tuple[Any, ...]],
        input_tensors: Sequence[Any],
        output_tensors: Sequence[Any],
        tiling: Any,
        autotune_configs: Sequence[Any] = (),
        algorithmic_flops_bytes_fn: FlopsBytes | None = None,
        *,
        hints_fn: Callable[[Any], dict[str, Any]] | None = None,
        signature_fn: Callable[[Any], Any] | None = None,
        name: str | None = None,
        workspace_tensors: Sequence[Any] = (),
        plan: KernelPlan | None = None,
    ) -> None:
        super().__init__(
            name or getattr(kernel_fn, "__name__", None) or _name_of(kernel_fn),
            input_tensors=input_tensors,
            output_tensors=output_tensors,
            workspace_tensors=workspace_tensors,
            tiling=tiling,
            autotune_configs=autotune_configs,
            algorithmic_flops_bytes_fn=algorithmic_flops_bytes_fn,
            plan=plan,
        )
        self.kernel_fn = kernel_fn
        self.grid_fn = grid_fn
        self.args_fn = args_fn
        self.hints_fn = hints_fn
        self.signature_fn = signature_fn
        self._ready: tuple[Any, ...] | None = None

    def hinted(self) -> Any:
        """The kernel function with this tiling's hints; one copy for equal hints, kept for the process's life.

        A hinted copy owns its compiled code: a second one would compile again, and dropping one unloads code that a
        captured CUDA graph may still launch.
        """
        hints = self.hints_fn(self.tiling) if self.hints_fn else {}
        if not hints:
            return self.kernel_fn
        key = (self.kernel_fn, tuple(sorted(hints.items())))
        if key not in _HINTED:
            _HINTED[key] = self.kernel_fn.replace_hints(**hints)
        return _HINTED[key]

    @property
    def compiler_picks_products(self) -> bool:
        return True

    @property
    def on_cpu(self) -> bool:
        """Whether the tensors are on the CPU: the kernel is then interpreted (`mla_var3.cutile_cpu`), not compiled."""
        tensors = (*self.input_tensors, *self.output_tensors)
        return bool(tensors) and all(t.device.type == "cpu" for t in tensors)

    def launch(self) -> None:
        try:
            # By identity: comparing the fields of two tilings takes 0.16 us of every launch.
            if self._ready is None or self._ready[0] is not self.tiling:
                args = tuple(self.args_fn(self.tiling))
                self._ready = (self.tiling, self._launcher(), self.grid_fn(self.tiling), self.hinted(), args)
            _, launch, grid, kernel, args = self._ready
            launch(grid, kernel, args)
        except Exception as error:
            mistakes.reraise(error)

    def _launcher(self) -> Callable[..., None]:
        """What launches (grid, kernel, arguments): the GPU's current stream, or the interpreter."""
        if self.on_cpu:
            return _interpret
        import cuda.tile as ct
        import torch

        # Making this object takes 6.6 us on an H200's host. cuTile takes the stream's number too: to be run on a GPU.
        return lambda grid, kernel, args: ct.launch(torch.cuda.current_stream(), grid, kernel, args)

    def compile(self, out_dir: Path | None, device: Device, keep: Sequence[str] = ()) -> CompiledKernel:
        from mla_var3.toolchain.cutile import compile_cutile

        if self.signature_fn is None:
            raise UserError(f"{self.name} has no signature_fn: give CtKernel one that describes its arguments.")
        try:
            signature = self.signature_fn(self.tiling)
            return compile_cutile(self.hinted(), signature, device=device, out_dir=out_dir, keep=keep)
        except Exception as error:
            mistakes.reraise(error)
