"""A CuTe kernel of the tests' own, in the form of a version: y = factor · x, and, with more than one request, + 1."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from mla_var3.device import Device, Requirement
from mla_var3.errors import Verdict
from mla_var3.runtime.cute_kernel import CuteKernel
from mla_var3.runtime.pipeline import KernelPipeline
from mla_var3.runtime.plan import KernelPlan
from mla_var3.runtime.types import Tiling
from mla_var3.toolchain.compiled import CompiledKernel
from mla_var3.workload import decode
from mla_var3.workload.decode import MlaProblem

FIELD = warpgroup.Field.ACCUMULATE  # values of the compiler at module level, as versions have them
KINDS = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}
Index = Int32 | Float32


@dataclass(frozen=True)
class TinyTiling(Tiling):
    threads: int = 128

    def validate(self, pd: MlaProblem, device: Device | None = None) -> Verdict:
        return Verdict.no(f"{self.threads} threads are over 1024") if self.threads > 1024 else Verdict.yes()


@cute.kernel
def tiny_scale(x: cute.Tensor, y: cute.Tensor, factor: Float32, threads: cutlass.Constexpr[int]):  # (?,) fp32 each
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * threads + thread
    if i < cute.size(x):
        y[i] = x[i] * factor


@cute.kernel
def tiny_shift(y: cute.Tensor, threads: cutlass.Constexpr[int]):  # (?,) fp32
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * threads + thread
    if i < cute.size(y):
        y[i] = y[i] + 1.0


tiny_scale.set_name_prefix("tiny_scale", remove_cutlass_symbol=True, keep_mangled_name=False)


@cute.jit
def launch_scale(x: cute.Tensor, y: cute.Tensor, factor: Float32, threads: cutlass.Constexpr[int], stream: CUstream):
    grid = (cute.size(x) + threads - 1) // threads
    tiny_scale(x, y, factor, threads).launch(grid=(grid, 1, 1), block=(threads, 1, 1), stream=stream)


@cute.jit
def launch_shift(y: cute.Tensor, threads: cutlass.Constexpr[int], stream: CUstream):
    grid = (cute.size(y) + threads - 1) // threads
    tiny_shift(y, threads).launch(grid=(grid, 1, 1), block=(threads, 1, 1), stream=stream)


def _compile(shift: bool, tiling: TinyTiling, device: Device, out_dir: Any = None, keep: Any = ()) -> CompiledKernel:
    from cutlass.cute.runtime import make_fake_compact_tensor

    from mla_var3.toolchain.cute import compile_cute, fake_stream

    x, y = (make_fake_compact_tensor(Float32, (cute.sym_int32(),), assumed_align=4) for _ in range(2))
    args = [y, tiling.threads] if shift else [x, y, Float32(1.0), tiling.threads]
    host = launch_shift if shift else launch_scale
    return compile_cute(host, [*args, fake_stream()], device=device, out_dir=out_dir, keep=keep)


class TinyPlan(KernelPlan):
    workload = decode.WORKLOAD
    tiling_type = TinyTiling
    requires = Requirement(archs=("sm_80+",), dtypes=("bf16",))

    def default_tiling(self) -> TinyTiling:
        return TinyTiling()

    def autotune_configs(self) -> list[Tiling]:
        return [TinyTiling(64), TinyTiling(2048)]

    def plan_empty(self) -> Any:
        return self._kernel(None, None)

    def plan(self, *inputs: Any) -> Any:
        import torch

        return self._kernel(inputs[0], torch.empty_like(inputs[0]))

    def _kernel(self, x: Any, y: Any) -> Any:
        from mla_var3.toolchain.aot import compiled_host

        stages = []
        for name, fn, args in (("tiny_scale", tiny_scale, (x, y, 3.0)), ("tiny_shift", tiny_shift, (y,))):
            compile_fn = partial(_compile, fn is tiny_shift)
            launch = None
            if x is not None:
                host = compiled_host(self, name, compile_fn).handle
                launch = partial(_launch, host, args)
            inputs, outputs = ((x,), (y,)) if x is not None else ((), ())
            stages.append(
                CuteKernel(fn, launch, inputs, outputs, self.tiling, name=name, compile_fn=compile_fn, plan=self)
            )
        return KernelPipeline(stages, name="tiny_scale", plan=self) if self.problem.b > 1 else stages[0]


def _launch(host: Any, args: tuple[Any, ...], tiling: Any) -> None:
    host(*args)
