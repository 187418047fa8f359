"""merge_partials v0 in Triton: a program merges a few rows of all parts.

    lse of every part → m = max, w = exp2((lse - m) · log2 e) → Σ w · partial in float32 → / Σ w → out
                                                                                         m + log Σ w → lse

A row's LSE come first, for all parts; then its partials, whose loads do not depend on one another, so that as many are
in flight as the parts have rows in a program. Parts without keys (LSE +inf or -inf) get the weight 0, and
what lies in their partials is masked out, for it may be NaN. An LSE that is NaN makes the row NaN. Runs on sm_80 and
later, and in Triton's interpreter. The base version, after the second kernel of Flash-Decoding (Dao et al. 2023).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from mla_var3.device import Requirement
from mla_var3.kernel.triton.prims.numerics import interpreted, round_to
from mla_var3.runtime import KernelPlan, Tiling, TritonKernel, Verdict, limits
from mla_var3.workload import merge

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.workload.merge import MergeProblem

MOST_PARTS = 32  # whose loads are unrolled
MOST_COLUMNS = 4096


def takes(pd: MergeProblem) -> Verdict:
    if pd.parts > MOST_PARTS:
        return Verdict.no(f"{pd.parts} parts are more than the {MOST_PARTS} whose loads are unrolled")
    if pd.k > MOST_COLUMNS:
        return Verdict.no(f"rows of {pd.k} columns are more than the {MOST_COLUMNS} of a program")
    return Verdict.yes()


@dataclass(frozen=True)
class MergePartialsTiling(Tiling):
    """rows: of a program, a power of two. num_warps: 1, 2, 4 or 8."""

    rows: int = 1
    num_warps: int = 2

    def validate(self, pd: MergeProblem, device: Device | None = None) -> Verdict:
        if self.rows < 1 or self.rows & (self.rows - 1):
            return Verdict.no(f"rows = {self.rows} must be a power of two")
        if self.num_warps not in (1, 2, 4, 8):
            return Verdict.no(f"num_warps = {self.num_warps} must be 1, 2, 4 or 8")
        held = self.rows * triton.next_power_of_2(pd.k) // (32 * self.num_warps)
        if held > 64:
            return Verdict.no(f"a thread would hold {held} columns of a part: use fewer rows, or more warps")
        return limits.offsets(pd.rows, f"partials have {pd.rows:,} rows")


@triton.jit(do_not_specialize=["n"])
def merge_partials(
    Partials,  # (PARTS, n, K), contiguous, global
    Lse,  # (PARTS, n) float32, contiguous, global
    Out,  # (n, K), contiguous, global
    OutLse,  # (n,) float32, global
    n,
    PARTS: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,  # power of two of at least K
    ROWS: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Grid (blocks of rows,)."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    LN_2: tl.constexpr = 0.6931471805599453
    DTYPE: tl.constexpr = Out.dtype.element_ty
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < n
    column = tl.arange(0, COLUMNS)
    at = tl.cast(row, tl.int64)[:, None] * K + column[None, :]
    valid = inside[:, None] & (column < K)[None, :]
    most = tl.full([ROWS], float("-inf"), tl.float32)
    for i in tl.static_range(PARTS):
        lse = tl.load(Lse + tl.cast(n, tl.int64) * i + row, mask=inside, other=float("inf"))
        most = tl.maximum(most, tl.where(tl.abs(lse) < float("inf"), lse, float("-inf")))
    # Rows without any key: a finite number in place of the maximum keeps NaN out of what follows. That of a part whose
    # LSE is NaN is meant to come through.
    most = tl.where(most > float("-inf"), most, 0.0)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for i in tl.static_range(PARTS):
        lse = tl.load(Lse + tl.cast(n, tl.int64) * i + row, mask=inside, other=float("inf"))
        seen = tl.abs(lse) != float("inf")
        weight = tl.where(seen, tl.exp2((tl.where(seen, lse, most) - most) * LOG2_E), 0.0)
        total += weight
        partial = tl.load(Partials + tl.cast(n, tl.int64) * (i * K) + at, mask=valid & seen[:, None], other=0.0)
        acc += weight[:, None] * partial.to(tl.float32)
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    tl.store(Out + at, round_to(acc / total[:, None], DTYPE, INTERPRET), mask=valid)
    tl.store(OutLse + row, tl.where(empty, float("inf"), most + tl.log2(total) * LN_2), mask=inside)


class MergePartialsPlan(KernelPlan):
    """Inputs (partials, lse), outputs (out, lse) of `workload.merge`."""

    workload = merge.WORKLOAD
    tiling_type = MergePartialsTiling
    requires = Requirement(archs=("sm_80+",), dtypes=("bf16", "fp16"), problem=takes)

    def default_tiling(self) -> MergePartialsTiling:
        warps = 2
        while warps < 8 and not MergePartialsTiling(1, warps).validate(self.problem):
            warps *= 2
        return MergePartialsTiling(1, warps)

    def autotune_configs(self) -> list[Tiling]:
        tilings = [MergePartialsTiling(rows, warps) for rows in (1, 2, 4, 8) for warps in (1, 2, 4, 8)]
        return [tiling for tiling in tilings if tiling.validate(self.problem, self.device)]

    def plan(self, *inputs: torch.Tensor) -> TritonKernel:
        self.workload.rebound(self.problem, *inputs)  # refuses strides that the kernel does not read
        return self._make(inputs, merge.new_outputs(self.problem, inputs[0]))

    def plan_empty(self) -> TritonKernel:
        return self._make((), ())

    def _make(self, inputs: Any, outputs: Any) -> TritonKernel:
        pd = self.problem
        rows = inputs[0].shape[1] if inputs else pd.rows
        element = f"*{pd.dtype}"
        return TritonKernel(
            merge_partials,
            grid_fn=lambda t: (-(-rows // t.rows),),
            args_fn=lambda _: (*inputs, *outputs, rows),
            input_tensors=inputs,
            output_tensors=outputs,
            tiling=self.tiling,
            meta_fn=lambda t: {
                "PARTS": pd.parts, "K": pd.k, "COLUMNS": triton.next_power_of_2(pd.k), "ROWS": t.rows,
                "INTERPRET": interpreted(merge_partials),
            },
            options_fn=lambda t: {"num_warps": t.num_warps},
            signature_fn=lambda _: {
                "Partials": element, "Lse": "*fp32", "Out": element, "OutLse": "*fp32", "n": "i32"
            },
            plan=self,
        )  # fmt: skip
