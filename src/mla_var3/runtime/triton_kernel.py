"""`TritonKernel`: a Triton kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_var3.errors import UserError
from mla_var3.runtime.base import BaseKernel, FlopsBytes
from mla_var3.toolchain import mistakes
from mla_var3.toolchain.compiled import CompiledKernel

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.runtime.plan import KernelPlan


class TritonKernel(BaseKernel):
    """Launches a `@triton.jit` function over `grid_fn(tiling)` programs.

    args_fn(tiling): positional arguments; tensors are the kernel's own. meta_fn(tiling): constexpr arguments by name.
    options_fn(tiling): num_warps and num_stages. signature_fn(tiling): argument name -> Triton type of the
    non-constexpr arguments ("*bf16", "i32", "fp32"), for compiling without tensors. In a process started with
    TRITON_INTERPRET=1 calls run on CPU tensors.
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
        meta_fn: Callable[[Any], Mapping[str, Any]] | None = None,
        options_fn: Callable[[Any], Mapping[str, int]] | None = None,
        signature_fn: Callable[[Any], Mapping[str, str]] | None = None,
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
        self.grid_fn = grid_fn
        self.args_fn = args_fn
        self.meta_fn = meta_fn
        self.options_fn = options_fn
        self.signature_fn = signature_fn
        self._ready: tuple[Any, ...] | None = None

    def _meta(self) -> dict[str, Any]:
        return dict(self.meta_fn(self.tiling)) if self.meta_fn else {}

    def _options(self) -> dict[str, int]:
        return dict(self.options_fn(self.tiling)) if self.options_fn else {}

    def _arguments(self) -> tuple[Any, ...]:
        """Of every launch: they are kept, so tensors must be the kernel's own. A view would stay where it was made when
        these are pointed at other memory."""
        made = tuple(self.args_fn(self.tiling))
        own = {id(x) for x in (*self.input_tensors, *self.output_tensors, *self.workspace_tensors)}
        for i, argument in enumerate(made):
            if hasattr(argument, "data_ptr") and id(argument) not in own:
                raise UserError(
                    f"{self.name}: argument {i} of args_fn is a tensor that is none of the kernel's inputs, outputs "
                    "and workspaces; pass one of those, and take parts of it in the kernel."
                )
        return made

    def launch(self) -> None:
        try:
            # By identity: comparing the fields of two tilings takes 0.16 us, more than the rest of this function.
            if self._ready is None or self._ready[0] is not self.tiling:
                keywords = {**self._meta(), **self._options()}
                run = self.kernel_fn[self.grid_fn(self.tiling)]
                self._ready = (self.tiling, run, self._arguments(), keywords)
            _, run, args, keywords = self._ready
            run(*args, **keywords)
        except Exception as error:
            mistakes.reraise(error)

    def compile(self, out_dir: Path | None, device: Device, keep: Sequence[str] = ()) -> CompiledKernel:
        from mla_var3.toolchain.triton_ import compile_triton

        if self.signature_fn is None:
            raise UserError(f"{self.name} has no signature_fn: give TritonKernel one that types its arguments.")
        try:
            options = self._options()
            return compile_triton(
                self.kernel_fn,
                dict(self.signature_fn(self.tiling)),
                self._meta(),
                device=device,
                num_warps=options.get("num_warps", 4),
                num_stages=options.get("num_stages", 2),
                out_dir=out_dir,
                keep=keep,
            )
        except Exception as error:
            mistakes.reraise(error)
