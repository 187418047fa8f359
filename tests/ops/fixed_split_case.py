"""Run in a process of its own with TRITON_INTERPRET=1: the fixed-split mode on the CPU, around a version in torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from mla_var3.check.judge import compare
from mla_var3.device import Device, Requirement
from mla_var3.errors import Verdict
from mla_var3.ops import fixed
from mla_var3.ops.fixed import FixedSplitPlan, FixedSplitTiling
from mla_var3.runtime.pipeline import KernelPipeline
from mla_var3.runtime.plan import KernelPlan
from mla_var3.runtime.torch_kernel import TorchKernel
from mla_var3.runtime.types import Tiling
from mla_var3.workload import decode
from mla_var3.workload.decode import (
    DOMINATED,
    FLASHMLA,
    NORMAL,
    MlaProblem,
    gather_tokens,
    make_inputs,
    mla_decode_reference,
    same_class,
)

H200 = Device.get("h200")
PART = 128


@dataclass(frozen=True)
class PlainTiling(Tiling):
    num_splits: int = 0

    def validate(self, pd: MlaProblem, device: Device | None = None) -> Verdict:
        return Verdict.yes()


class PlainPlan(KernelPlan):
    """Whole requests, or the partials of two splits of equal numbers of 64-token tiles, as version 0 leaves them."""

    workload = decode.WORKLOAD
    tiling_type = PlainTiling
    requires = Requirement(archs=())

    def default_tiling(self) -> PlainTiling:
        return PlainTiling()

    def autotune_configs(self) -> list[Tiling]:
        return [PlainTiling()]

    def partials(self, q: Any, splits: int) -> tuple[Any, Any]:
        pd = self.problem
        shape = (splits, q.shape[0], pd.h_kv, pd.rows)
        return q.new_empty((*shape, pd.k), dtype=torch.float32), q.new_empty(shape, dtype=torch.float32)

    def plan(self, *inputs: Any) -> Any:
        pd, q, splits = self.problem, inputs[0], self.tiling.num_splits or 1
        b = q.shape[0]
        outputs = q.new_empty((b, pd.s, pd.h, pd.k)), q.new_empty((b, pd.h, pd.s), dtype=torch.float32)
        return self.make(inputs, outputs, self.partials(q, splits), splits)

    def plan_empty(self) -> Any:
        return self.make((), (), (), self.tiling.num_splits or 1)

    def make(self, inputs: Any, outputs: Any, partials: Any, splits: int) -> Any:
        pd = self.problem

        def whole(*given: Any) -> tuple[Any, Any]:
            out, lse = mla_decode_reference(*given, k=pd.k, scale=pd.scale, causal=pd.causal)
            return out, lse

        def parts(*given: Any) -> tuple[Any, Any]:
            return self.parts_of(splits, *given)

        options = {"input_tensors": inputs, "tiling": self.tiling, "plan": self}
        if splits == 1:
            return TorchKernel(whole, output_tensors=outputs, **options)
        main = TorchKernel(parts, output_tensors=partials, workspace_tensors=partials, **options)
        return KernelPipeline([main, TorchKernel(whole, output_tensors=outputs, **options)])

    def parts_of(self, splits: int, q: Any, cache: Any, table: Any, lens: Any) -> tuple[Any, Any]:
        pd, b = self.problem, q.shape[0]
        assert not pd.causal, "a run that is not the last has no causal edge"
        out = torch.full((splits, b, pd.h_kv, pd.rows, pd.k), float("nan"))
        lse = torch.full((splits, b, pd.h_kv, pd.rows), float("-inf"))
        for i, length in enumerate(lens.tolist()):
            keys = gather_tokens(cache, table[i], length).double()
            per_split = math.ceil(math.ceil(length / 64) / splits) * 64
            for split in range(splits):
                mine = keys[split * per_split : (split + 1) * per_split]
                if not len(mine):
                    continue
                for g in range(pd.h_kv):
                    rows = q[i, :, g * pd.group : (g + 1) * pd.group].reshape(pd.rows, -1).double()
                    logits = rows @ mine[:, g].T * pd.scale
                    out[split, i, g] = (torch.softmax(logits, 1) @ mine[:, g, : pd.k]).float()
                    lse[split, i, g] = (torch.logsumexp(logits, 1) / torch.log(torch.tensor(2.0))).float()
        return out, lse


def run(problem: MlaProblem, given: tuple[Any, ...], bounds: Any, steps: int) -> tuple[Any, Any]:
    plan = FixedSplitPlan(problem, FixedSplitTiling(PART), H200)
    kernel: Any = plan.plan(*given)
    assert len(kernel.inner) == steps, (problem.label, len(kernel.inner))
    for x in (*kernel.output_tensors, *kernel.workspace_tensors):
        if x.is_floating_point():
            x.fill_(float("nan"))
    out, lse = kernel()
    verdict = compare(plan.workload, (out, lse), plan.reference_fn(*given), bounds)
    assert verdict.ok, (problem.label, problem.seq_lens, verdict.reason)
    return out, lse


def request(given: tuple[Any, ...], i: int, width: int) -> tuple[Any, ...]:
    """One request by itself, its row of the page table cut to a width."""
    q, cache, table, lens = given
    return q[i : i + 1].contiguous(), cache, table[i : i + 1, :width].contiguous(), lens[i : i + 1].contiguous()


def main() -> None:
    fixed.inner_choice = lambda *arguments: type("Any", (), {"kernel": None})  # type: ignore[assignment]
    fixed.registry.get_plan = lambda kernel: PlainPlan  # type: ignore[assignment,return-value]
    small: dict[str, Any] = {"k": 128, "p": 64, "t": 1}
    for problem, dist, bounds in (
        (MlaProblem(h=4, b=4, lengths=[600, 0, 129, 128], **small), "normal", NORMAL),
        (MlaProblem(h=4, h_kv=2, s=3, b=3, causal=True, lengths=[300, 2, 0], **small), "normal", NORMAL),
        (MlaProblem(h=6, h_kv=3, s=2, b=2, dtype="fp16", lengths=[64, 257], **small), "flashmla", FLASHMLA),
        (MlaProblem(h=2, s=2, b=2, lengths=[513, 200], **small), "page_boundary", DOMINATED),
        (MlaProblem(h=2, s=3, b=2, causal=True, lengths=[513, 257], **small), "just_masked", DOMINATED),
    ):
        given = make_inputs(problem, seed=3, dist=dist)
        out, lse = run(problem, given, bounds, steps=1 if problem.causal else 2)
        for i, length in enumerate(problem.seq_lens):
            narrow = max(1, -(-length // 64))
            for width in {narrow, min(narrow + 3, given[2].shape[1])}:
                steps = 2 if width * 64 > PART and not problem.causal else 1
                found, sums = run(same_class(problem, [length]), request(given, i, width), bounds, steps=steps)
                assert torch.equal(found[0], out[i]) and torch.equal(sums[0], lse[i]), (problem.label, i, width)
    print("same bits")


if __name__ == "__main__":
    main()
