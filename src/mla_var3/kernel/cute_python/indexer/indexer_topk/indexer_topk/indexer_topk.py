"""indexer_topk v0 in CuTe: the lightning indexer's choice by two kernels that stand for themselves.

    stage        what                                              launch
    mqa_logits   the logits of query tokens, to memory             programmatic dependent
    topk         the k largest of each, through the page table     programmatic dependent

The second is launched while the first still runs, and waits for its end before it reads. A query token of at most k
cached tokens chooses all of them, whatever its logits are, so the first computes none for it. `ops.indexer_topk` calls
the same two, with as many query tokens at a time as have 256 MB of logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mla_var3.device import Requirement
from mla_var3.errors import Verdict
from mla_var3.kernel.parts import Part, PartsKernel, PartsTiling, plans_of
from mla_var3.runtime import KernelPlan, Tiling
from mla_var3.workload import indexer_topk as workload
from mla_var3.workload.indexer_logits import PAGE, IndexerLogitsProblem, new_logits
from mla_var3.workload.topk import TopkProblem

if TYPE_CHECKING:
    from mla_var3.workload.indexer_topk import IndexerTopkProblem

MOST_LOGITS = 256 << 20  # bytes
SHORT = 32768  # logits of a row that a CTA holds
LONG = 1 << 19  # that a cluster holds
CTAS = 32  # that hold all rows, at most, where clusters do
ROWS = 132  # of which clusters run at once


@dataclass(frozen=True)
class IndexerTopkTiling(PartsTiling):
    """logits, topk: the versions. topk = "": as the dispatcher has it, version 5 for rows of up to 32,768 logits,
    version 6 for few longer ones, version 7 for up to 132, else version 3."""

    logits: str = "cute-dsl/mqa_logits_v4"
    topk: str = ""

    def parts(self, pd: IndexerTopkProblem) -> dict[str, Part]:
        b, s = (pd.b, pd.s) if pd.table else (pd.rows, 1)
        scored = IndexerLogitsProblem(b=pd.b, s=pd.s, t=pd.t, heads=pd.heads, table=pd.table, lengths=pd.lengths)
        rows = TopkProblem(b=b, s=s, t=pd.columns, topk=pd.topk, table=pd.table, lengths=pd.lengths)
        chooses = self.topk or chooses_by(pd.rows, pd.columns)
        return {"logits": (self.logits, scored, {"beyond": pd.topk}), "topk": (chooses, rows, {})}


def chooses_by(rows: int, t: int) -> str:
    """The version of the top-k."""
    if t <= SHORT:
        return "cute-dsl/topk_v5"
    held = t <= LONG and rows * (1 << (-(-t // SHORT) - 1).bit_length()) <= CTAS
    if held:
        return "cute-dsl/topk_v6"
    return "cute-dsl/topk_v7" if rows <= ROWS else "cute-dsl/topk_v3"


def takes(pd: IndexerTopkProblem) -> Verdict:
    if pd.rows * pd.columns * 4 > MOST_LOGITS:
        return Verdict.no(
            f"{pd.rows:,} query tokens have more than {MOST_LOGITS >> 20} MB of logits: take some at a time"
        )
    return IndexerTopkTiling().validate(pd)


class IndexerTopkPlan(KernelPlan):
    """Inputs and output (indices,) of `workload.indexer_topk`."""

    workload = workload.WORKLOAD
    tiling_type = IndexerTopkTiling
    requires = Requirement(archs=("sm_90a",), dtypes=("fp32",), features=("wgmma", "tma", "setmaxnreg"), problem=takes)
    parts = ("cute-dsl/mqa_logits_v4", "cute-dsl/topk_v3", "cute-dsl/topk_v5", "cute-dsl/topk_v6", "cute-dsl/topk_v7")

    def default_tiling(self) -> IndexerTopkTiling:
        return IndexerTopkTiling()

    def autotune_configs(self) -> list[Tiling]:
        return [IndexerTopkTiling()]

    def plan(self, *inputs: Any) -> PartsKernel:
        rows = inputs[0].shape[:-2].numel()
        return self.plan_into(inputs, (inputs[-1].new_empty((rows, self.problem.topk)),))

    def plan_into(self, inputs: Any, outputs: Any) -> PartsKernel:
        """A kernel on indices of the caller's, (rows, k) int32, contiguous."""
        self.require()
        parts = plans_of(self)
        rows, columns = len(outputs[0]), inputs[4].shape[1] * PAGE if self.problem.table else len(inputs[1])
        logits = new_logits(self.problem, inputs[0], rows, columns)
        scores: Any = parts["logits"]
        chooses: Any = parts["topk"]
        ranges = inputs[3:] if self.problem.table else inputs[4:]
        stages = [scores.plan_into(inputs, (logits,)), chooses.plan_into((logits, *ranges), outputs)]
        return PartsKernel(
            stages, name="indexer_topk", input_tensors=inputs, output_tensors=outputs, workspace_tensors=[logits],
            tiling=self.tiling, plan=self,
        )  # fmt: skip

    def plan_empty(self) -> PartsKernel:
        self.require()
        stages = [part.plan_empty() for part in plans_of(self).values()]
        return PartsKernel(stages, name="indexer_topk", output_tensors=(), tiling=self.tiling, plan=self)
