"""rmsnorm v0 in Triton: a program a row; where a row has two norms, a program each.

    h = x + residual (rounded: the new residual) → Σ h² in float32 → h · rsqrt(Σ / width + eps) · weight → out

The row stays in registers from the load to the store; its columns are padded up to a power of two, with zeros that add
nothing to the sum. Runs on sm_80 and later, and in Triton's interpreter. The base version, as in Triton's tutorial on
layer norms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from mla_var3.device import Requirement
from mla_var3.kernel.triton.prims.numerics import interpreted, round_to
from mla_var3.runtime import KernelPlan, Tiling, TritonKernel, Verdict
from mla_var3.workload import norm

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.workload.norm import NormProblem

#: Columns of a row that a program's registers hold, with a residual beside them.
MOST_COLUMNS = 32768


def padded(columns: int) -> int:
    """The smallest power of two that is not below."""
    return 1 << (columns - 1).bit_length()


def takes(pd: NormProblem) -> Verdict:
    if max(pd.width, pd.second) > MOST_COLUMNS:
        return Verdict.no(f"a row of {max(pd.width, pd.second)} columns is more than the {MOST_COLUMNS} of a program")
    return Verdict.yes()


@dataclass(frozen=True)
class RmsNormTiling(Tiling):
    """num_warps: of a program: 1, 2, 4, 8 or 16."""

    num_warps: int = 8

    def validate(self, pd: NormProblem, device: Device | None = None) -> Verdict:
        if self.num_warps not in (1, 2, 4, 8, 16):
            return Verdict.no(f"num_warps = {self.num_warps} must be 1, 2, 4, 8 or 16")
        held = padded(max(pd.width, pd.second)) // (32 * self.num_warps)
        if held > 128:
            return Verdict.no(f"a thread would hold {held} columns; use more than {self.num_warps} warps")
        return Verdict.yes()


@triton.jit(do_not_specialize=["eps"])
def normalise(
    x,  # of this row and norm, global
    Residual,  # of this row, global
    weight,  # (WIDTH,)
    out,  # of this row, global
    NewResidual,  # of this row, global
    eps,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,  # power of two of at least WIDTH
    RESIDUAL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    DTYPE: tl.constexpr = out.dtype.element_ty
    column = tl.arange(0, COLUMNS)
    inside = column < WIDTH
    h = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        total = h + tl.load(Residual + column, mask=inside, other=0.0).to(tl.float32)
        rounded = round_to(total, DTYPE, INTERPRET)
        tl.store(NewResidual + column, rounded, mask=inside)
        h = rounded.to(tl.float32)
    factor = tl.rsqrt(tl.sum(h * h, 0) / WIDTH + eps)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + column, round_to(h * factor * w, DTYPE, INTERPRET), mask=inside)


@triton.jit(do_not_specialize=["eps"])
def rmsnorm(
    X,  # (n, WIDTH + SECOND), rows `stride` elements apart, global
    Residual,  # (n, WIDTH), or without columns
    Weight,  # (WIDTH,)
    SecondWeight,  # (SECOND,), or anything
    Out,  # (n, WIDTH), contiguous, global
    SecondOut,  # (n, SECOND), contiguous, global
    NewResidual,  # (n, WIDTH), or without columns
    stride,  # a multiple of 16 where vectors are to be loaded
    eps,
    WIDTH: tl.constexpr,
    SECOND: tl.constexpr,
    COLUMNS: tl.constexpr,
    SECOND_COLUMNS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Grid (n, norms)."""
    row = tl.cast(tl.program_id(0), tl.int64)
    x, at = X + row * stride, row * WIDTH
    if SECOND == 0 or tl.program_id(1) == 0:
        normalise(
            x, Residual + at, Weight, Out + at, NewResidual + at, eps, WIDTH, COLUMNS, RESIDUAL, INTERPRET
        )  # fmt: skip
    else:
        out = SecondOut + row * SECOND
        normalise(
            x + WIDTH, Residual, SecondWeight, out, NewResidual, eps, SECOND, SECOND_COLUMNS, False, INTERPRET
        )  # fmt: skip


class RmsNormPlan(KernelPlan):
    """Inputs (x, weight, [second weight], [residual]), outputs (out, second, new residual) of `workload.norm`."""

    workload = norm.WORKLOAD
    tiling_type = RmsNormTiling
    requires = Requirement(archs=("sm_80+",), dtypes=("bf16", "fp16"), problem=takes)

    def default_tiling(self) -> RmsNormTiling:
        columns = padded(max(self.problem.width, self.problem.second))
        return RmsNormTiling(min(16, max(1, columns // 1024)))

    def autotune_configs(self) -> list[Tiling]:
        return [RmsNormTiling(warps) for warps in (1, 2, 4, 8, 16)]

    def plan(self, *inputs: torch.Tensor) -> TritonKernel:
        self.workload.rebound(self.problem, *inputs)  # refuses strides that the kernel does not read
        return self._make(inputs, norm.new_outputs(self.problem, inputs[0]))

    def plan_empty(self) -> TritonKernel:
        return self._make((), ())

    def _make(self, inputs: Any, outputs: Any) -> TritonKernel:
        pd = self.problem
        rows = len(inputs[0]) if inputs else pd.rows
        element, stride = f"*{pd.dtype}", "i32" if pd.stride % 16 else "i32:16"
        names = ("X", "Residual", "Weight", "SecondWeight", "Out", "SecondOut", "NewResidual")

        def args(_: Any) -> tuple[Any, ...]:
            x, weight, second_weight, residual = norm.named(pd, inputs)
            out, second, new_residual = outputs
            # What the problem lacks is never touched, but needs an address.
            tensors = (
                x,
                x if residual is None else residual,
                weight,
                weight if second_weight is None else second_weight,
                out,
                out if second_weight is None else second,
                out if residual is None else new_residual,
            )
            return (*tensors, x.stride(0), pd.eps)

        return TritonKernel(
            rmsnorm,
            grid_fn=lambda _: (rows, 2 if pd.second else 1),
            args_fn=args,
            input_tensors=inputs,
            output_tensors=outputs,
            tiling=self.tiling,
            meta_fn=lambda _: {
                "WIDTH": pd.width, "SECOND": pd.second, "COLUMNS": padded(pd.width),
                "SECOND_COLUMNS": padded(max(pd.second, 1)), "RESIDUAL": pd.residual, "INTERPRET": interpreted(rmsnorm),
            },
            options_fn=lambda t: {"num_warps": t.num_warps},
            signature_fn=lambda _: {**dict.fromkeys(names, element), "stride": stride, "eps": "fp32"},
            plan=self,
        )  # fmt: skip
