"""Writing a kernel: RMSNorm in Triton with its tiling and its plan in one file, checked and compiled.

    python examples/write_a_kernel.py                       # is it right? on a GPU, or in Triton's interpreter on a CPU
    python examples/write_a_kernel.py --compile h200        # what it takes of a device; needs no GPU

A version of the laboratory is a file like this one, in a folder of src/mla_var3/kernel that `mla-var3 clone` makes;
then `mla-var3 check`, `compile`, `diff` and `bench` find it by its name. What is computed, the inputs, the oracle, the
hostile cases and the error bounds are the workload's, here `mla_var3.workload.norm`: a kernel brings none of its own.

Needs the package alone, which brings torch and Triton: `pip install -e .` in a checkout.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

# Triton chooses its interpreter where a function is decorated, so this stands before.
if not torch.cuda.is_available() and "--compile" not in sys.argv:
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl

from mla_var3.check.judge import check
from mla_var3.device import Device, Requirement
from mla_var3.errors import EXIT_USER_ERROR, UserError
from mla_var3.kernel.triton.prims.numerics import interpreted, round_to
from mla_var3.runtime import KernelPlan, Tiling, TritonKernel, Verdict
from mla_var3.workload import norm
from mla_var3.workload.norm import NormProblem


# ---------------------------------------------------------------- tiling: the knobs, and which values make sense
@dataclass(frozen=True)
class SmallNormTiling(Tiling):
    """num_warps: of a program, which takes one row."""

    num_warps: int = 4

    def validate(self, pd: NormProblem, device: Device | None = None) -> Verdict:
        if self.num_warps not in (1, 2, 4, 8, 16):
            return Verdict.no(f"num_warps = {self.num_warps} must be 1, 2, 4, 8 or 16")
        return Verdict.yes()


# ---------------------------------------------------------------- device: the kernel itself
@triton.jit(do_not_specialize=["eps"])
def small_norm(
    X,  # (n, WIDTH), rows `stride` elements apart, global
    Weight,  # (WIDTH,), global
    Out,  # (n, WIDTH), contiguous, global
    stride,
    eps,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,  # a power of two of at least WIDTH
    INTERPRET: tl.constexpr,
):
    """Grid (n,): out = x · rsqrt(mean(x²) + eps) · weight, of one row."""
    row = tl.cast(tl.program_id(0), tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = column < WIDTH
    x = tl.load(X + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(Weight + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    y = round_to(x * scale * weight, Out.dtype.element_ty, INTERPRET)
    tl.store(Out + row * WIDTH + column, y, mask=inside)


# ---------------------------------------------------------------- plan: problem and tiling become something to launch
def takes(pd: NormProblem) -> Verdict:
    if pd.second or pd.residual:
        return Verdict.no("this kernel has one norm, and no residual")
    return Verdict.yes() if pd.width <= 16384 else Verdict.no(f"{pd.width} columns are more than a program's registers")


class SmallNormPlan(KernelPlan):
    """Inputs (x, weight), output (out,)."""

    workload = norm.WORKLOAD
    tiling_type = SmallNormTiling
    requires = Requirement(archs=("sm_80+",), dtypes=("bf16", "fp16"), problem=takes)

    def default_tiling(self) -> SmallNormTiling:
        return SmallNormTiling()

    def autotune_configs(self) -> list[Tiling]:
        return [SmallNormTiling(warps) for warps in (1, 2, 4, 8, 16)]

    def plan(self, *inputs: torch.Tensor) -> TritonKernel:
        return self._make(inputs, norm.new_outputs(self.problem, inputs[0]))

    def plan_empty(self) -> TritonKernel:
        return self._make((), ())

    def _make(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> TritonKernel:
        pd = self.problem
        stride = "i32" if pd.stride % 16 else "i32:16"
        return TritonKernel(
            small_norm,
            grid_fn=lambda _: (len(inputs[0]) if inputs else pd.rows,),
            args_fn=lambda _: (inputs[0], inputs[1], outputs[0], inputs[0].stride(0), pd.eps),
            input_tensors=inputs,
            output_tensors=outputs,
            tiling=self.tiling,
            meta_fn=lambda _: {
                "WIDTH": pd.width,
                "COLUMNS": 1 << (pd.width - 1).bit_length(),
                "INTERPRET": interpreted(small_norm),
            },
            options_fn=lambda tiling: {"num_warps": tiling.num_warps},
            # What compiling without tensors needs to know of the arguments that are no constants.
            signature_fn=lambda _: {
                **dict.fromkeys(("X", "Weight", "Out"), f"*{pd.dtype}"), "stride": stride, "eps": "fp32",
            },
            plan=self,
        )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="RMSNorm in Triton: is it right, and what does it take?")
    parser.add_argument("--rows", type=int, default=5)
    parser.add_argument("--width", type=int, default=1536)
    parser.add_argument("--compile", metavar="DEVICE", help="compile for a device of `mla-var3 list devices`")
    args = parser.parse_args(arguments)
    try:
        return run(args)
    except UserError as error:
        print(error, file=sys.stderr)
        return EXIT_USER_ERROR


def run(args: argparse.Namespace) -> int:
    """0 when it is right or compiled, 1 when it is wrong. Raises `UserError` where the kernel, or the device, does not
    take the problem."""
    problem = NormProblem(rows=args.rows, width=args.width)
    device = Device.get(args.compile) if args.compile else Device.detect()
    plan = SmallNormPlan(problem, None, device)
    plan.require()
    if device is not None and args.compile:
        made = plan.plan_empty().compile(None, device)
        taken = made.resources
        print(f"{device.name}: {taken.registers} registers, {taken.spill_bytes} bytes spilled, {taken.threads} threads")
        return 0
    where = "cuda" if torch.cuda.is_available() else "cpu"
    report = check(SmallNormPlan, problem, device=where)
    for case in report.cases:
        print(f"{case.name:14}{'right' if case.ok else f'WRONG: {case.reason}'}")
    print(f"{sum(case.ok for case in report.cases)} of {len(report.cases)} cases right, seed {report.seeds[0]}")
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
