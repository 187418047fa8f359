"""Prefill: its inputs, its oracle against torch's attention, and a check that tells right kernels from wrong ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from mla_var3.check.judge import check
from mla_var3.device import Requirement
from mla_var3.errors import UserError, Verdict
from mla_var3.runtime import KernelPlan, TorchKernel
from mla_var3.runtime.types import Tiling
from mla_var3.workload.decode import MlaProblem
from mla_var3.workload.prefill import CASES, WORKLOAD, PrefillProblem, make_inputs, prefill_reference

PROBLEM = PrefillProblem(b=2, s=70, h=2, causal=True)


@dataclass(frozen=True)
class NoTiling(Tiling):
    def validate(self, pd: Any, device: Any = None) -> Verdict:
        return Verdict.yes()


class OraclePlan(KernelPlan):
    """The oracle as a kernel; subclasses spoil it."""

    workload = WORKLOAD
    tiling_type = NoTiling
    requires = Requirement(archs=())

    def default_tiling(self) -> Tiling:
        return NoTiling()

    def autotune_configs(self) -> list[Tiling]:
        return []

    def compute(self, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
        return prefill_reference(q, k, v, scale=self.problem.scale, causal=self.problem.causal)

    def plan(self, *inputs: Any) -> TorchKernel:
        q, _, v = inputs
        out = q.new_empty((*q.shape[:3], v.shape[3]))
        lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
        return TorchKernel(self.compute, name="x", input_tensors=inputs, output_tensors=(out, lse), plan=self)

    def plan_empty(self) -> TorchKernel:
        return TorchKernel(self.compute, name="x", plan=self)


def test_shapes_and_seeds() -> None:
    q, k, v = make_inputs(PROBLEM, seed=4)
    assert q.shape == k.shape == (2, 70, 2, 192) and v.shape == (2, 70, 2, 128) and q.dtype == torch.bfloat16
    again = make_inputs(PROBLEM, seed=4)
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), again, strict=True))
    small = make_inputs(PROBLEM, dist="flashmla")[0]
    assert small.abs().max() <= 1 and small.float().std() < 0.2
    assert not torch.equal(q, make_inputs(PROBLEM, seed=5)[0])


@pytest.mark.parametrize("causal", [True, False])
def test_the_oracle_agrees_with_torch(causal: bool) -> None:
    problem = PROBLEM.replace(causal=causal, dtype="fp32")
    q, k, v = make_inputs(problem, seed=1)
    out, lse = prefill_reference(q, k, v, scale=problem.scale, causal=causal)
    assert out.dtype == lse.dtype == torch.float64
    rows = [x.transpose(1, 2).double() for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*rows, is_causal=causal, scale=problem.scale)
    torch.testing.assert_close(out, expected.transpose(1, 2), rtol=1e-12, atol=1e-12)
    logits = rows[0] @ rows[1].transpose(2, 3) * problem.scale
    if causal:
        logits.masked_fill_(torch.ones(70, 70, dtype=torch.bool).triu(1), float("-inf"))
    torch.testing.assert_close(lse, logits.logsumexp(-1), rtol=1e-12, atol=1e-12)


def test_the_cost_is_that_of_decompressed_heads() -> None:
    flops, _ = OraclePlan(PROBLEM).algorithmic_flops_bytes()
    pairs = 70 * 71 // 2
    assert flops == 2 * 2 * 2 * pairs * (192 + 128)


@pytest.mark.parametrize(
    ("fields", "word"), [({"t": 71}, "t = 71"), ({"lengths": "ragged"}, "one length"), ({"n": 5}, "no latents")]
)
def test_fields_of_decode_that_no_prefill_has_are_refused(fields: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError, match=word):
        PrefillProblem.from_record({"s": 70, **fields})


def test_a_decode_problem_is_none_that_the_version_takes() -> None:
    plan = OraclePlan(MlaProblem(b=2, s=70, t=70, h=2))
    assert plan.supported().reason == "the kernel computes prefill; the problem is one of decode"


def test_unknown_distributions_and_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(UserError, match="did you mean 'normal'"):
        make_inputs(PROBLEM, dist="norml")
    q, k, v = make_inputs(PROBLEM)
    with pytest.raises(UserError, match="prefill wants k"):
        prefill_reference(q, k[:, 1:], v, scale=1.0, causal=False)


def test_the_check_passes_the_oracle_in_every_case() -> None:
    report = check(OraclePlan, PROBLEM, device="cpu", seeds=[2])
    assert report.ok, report.reason
    assert {c.name for c in report.cases} == set(CASES) and report.error["out"] < 1e-2
    assert check(OraclePlan, PROBLEM, device="cpu", quick=True).ok


class NotCausal(OraclePlan):
    def compute(self, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
        return prefill_reference(q, k, v, scale=self.problem.scale, causal=False)


class WrongScale(OraclePlan):
    def compute(self, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
        return prefill_reference(q, k, v, scale=128**-0.5, causal=self.problem.causal)


class ChangesInputs(OraclePlan):
    def compute(self, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
        result = super().compute(q, k, v)
        q.mul_(2)
        return result


class LeavesRows(OraclePlan):
    def plan(self, *inputs: Any) -> TorchKernel:
        kernel = super().plan(*inputs)
        kernel.launch = lambda: None  # type: ignore[method-assign]
        return kernel


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (NotCausal, "beyond the bounds"),
        (WrongScale, "beyond the bounds"),
        (ChangesInputs, "changed its inputs"),
        (LeavesRows, "not finite"),
    ],
)
def test_the_check_finds_what_is_wrong(plan: type[OraclePlan], words: str) -> None:
    report = check(plan, PROBLEM, device="cpu", quick=True, seeds=[1])
    assert not report.ok and words in report.reason


def test_binding() -> None:
    inputs = make_inputs(PROBLEM, seed=1)
    kernel = OraclePlan(PROBLEM).plan(*inputs)
    more = make_inputs(PROBLEM.replace(b=3), seed=2)
    assert kernel.bind(*more).output_tensors[0].shape == (3, 70, 2, 128)
    other = make_inputs(PROBLEM.replace(s=64), seed=2)
    with pytest.raises(UserError, match="cannot bind"):
        kernel.bind(*other)
    with pytest.raises(UserError, match="planned for bf16"):
        kernel.bind(*(x.half() for x in inputs))


def test_options_of_paged_inputs_are_passed_over() -> None:
    plan = OraclePlan(PROBLEM)
    assert torch.equal(
        plan.prepare_inputs("cpu", seed=3, dist="normal", poison=False)[0], plan.prepare_inputs("cpu", seed=3)[0]
    )
