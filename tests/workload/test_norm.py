"""RMSNorm: its oracle against torch's own, what it costs, and a check that tells right kernels from wrong ones."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mla_var3.check.judge import check
from mla_var3.device import Requirement
from mla_var3.errors import UserError
from mla_var3.workload.norm import (
    CASES,
    DISTRIBUTIONS,
    WORKLOAD,
    NormProblem,
    make_inputs,
    named,
    new_outputs,
    reference,
)
from torch_plan import TorchPlan

PROBLEMS = [
    NormProblem(rows=5, width=96),
    NormProblem(rows=5, width=96, residual=True, dtype="fp16"),
    NormProblem(rows=5, width=96, second=32, rest=16),
]
EVERYWHERE = [name for name in CASES if name not in ("planned_many", "far")]


def plan_of(compute: Callable[..., tuple[Any, ...]]) -> type[TorchPlan]:
    class Plan(TorchPlan):
        workload = WORKLOAD
        requires = Requirement(archs=())

        def plan(self, *inputs: Any) -> Any:
            run = functools.partial(compute, self.problem)
            return self.kernel(run, inputs, new_outputs(self.problem, inputs[0]))

    return Plan


@pytest.mark.parametrize("dist", DISTRIBUTIONS)
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.label)
def test_the_oracle_is_torch_s(problem: NormProblem, dist: str) -> None:
    inputs = make_inputs(problem, seed=3, dist=dist)
    x, weight, second_weight, residual = named(problem, inputs)
    out, second, new_residual = reference(problem, *inputs)
    h = x[:, : problem.width]
    if residual is not None:
        h = h + residual
        assert torch.equal(new_residual, h.double())
    want = torch.nn.functional.rms_norm(h.double(), (problem.width,), weight.double(), problem.eps)
    torch.testing.assert_close(out, want)
    if second_weight is not None:
        rest = x[:, problem.width :].double()
        want = torch.nn.functional.rms_norm(rest, (problem.second,), second_weight.double(), problem.eps)
        torch.testing.assert_close(second, want)
    assert second.shape == (5, problem.second) and new_residual.shape == (5, problem.width * problem.residual)


def test_columns_of_nobody_are_poison_and_rows_lie_apart() -> None:
    problem = PROBLEMS[2]
    x = make_inputs(problem, seed=1)[0]
    assert x.shape == (5, 128) and x.stride() == (144, 1) and bool(x.isfinite().all())
    whole = torch.as_strided(x, (4, 144), (144, 1))
    assert bool(whole[:, 128:].isnan().all())
    again = make_inputs(problem, seed=1)[0]
    assert torch.equal(x, again) and not torch.equal(x, make_inputs(problem, seed=2)[0])


def test_every_third_row_is_zeros_and_stays_so() -> None:
    inputs = make_inputs(PROBLEMS[0], seed=1, dist="rows")
    assert not inputs[0][::3].any() and bool(inputs[0][1].any())
    assert not reference(PROBLEMS[0], *inputs)[0][::3].any()


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.label)
def test_what_is_rounded_once_passes(problem: NormProblem) -> None:
    report = check(plan_of(reference), problem, device="cpu", cases=EVERYWHERE, seeds=[4])
    assert report.ok, report.reason
    assert {c.name for c in report.cases} == set(EVERYWHERE) and set(report.error) == {"out", "second", "residual"}


def without_eps(problem: NormProblem, *inputs: Any) -> tuple[Any, ...]:
    return reference(problem.replace(eps=1e-12), *inputs)


def in_half(problem: NormProblem, *inputs: Any) -> tuple[Any, ...]:
    """Squares in 16 bits: they overflow, or lose what is small beside them."""
    x, weight, *_ = inputs
    h = x[:, : problem.width]
    total = h.square().sum(-1, keepdim=True).float()
    out = h.float() * (total / problem.width + problem.eps).rsqrt() * weight.float()
    return (out, *reference(problem, *inputs)[1:])


def of_one_row_too_many(problem: NormProblem, *inputs: Any) -> tuple[Any, ...]:
    out, second, residual = reference(problem, *inputs)
    return out.roll(1, 0), second, residual


def with_a_truncated_residual(problem: NormProblem, *inputs: Any) -> tuple[Any, ...]:
    """The new residual's last bit is lost."""
    out, second, residual = reference(problem, *inputs)
    bits = residual.to(inputs[0].dtype).view(torch.int16) & -2
    return out, second, bits.view(inputs[0].dtype)


@pytest.mark.parametrize(
    ("compute", "problem", "case"),
    [
        (without_eps, PROBLEMS[0], "tiny"),
        (in_half, PROBLEMS[0].replace(dtype="fp16"), "huge"),
        (of_one_row_too_many, PROBLEMS[2], "uneven"),
        (with_a_truncated_residual, PROBLEMS[1], "own"),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_wrong_kernels_fail(compute: Any, problem: NormProblem, case: str) -> None:
    report = check(plan_of(compute), problem, device="cpu", cases=[case], seeds=[4])
    assert not report.ok and case in report.reason


def test_what_it_costs() -> None:
    plain, added = NormProblem(rows=100, width=512).cost(), NormProblem(rows=100, width=512, residual=True).cost()
    assert plain.written == 100 * 512 * 2 and plain.bytes == 2 * plain.written + 1024
    assert added.written == 2 * plain.written and added.bytes == 2 * added.written + 1024
    two = NormProblem(rows=100, width=1536, second=512, rest=64)
    assert two.cost().bytes == 2 * 100 * 2048 * 2 + 4096  # not the 64 columns of nobody
    assert two.input_bytes() - two.output_bytes() == 100 * 2112 * 2 + 4096


def test_other_rows_and_distances_bind_and_other_widths_do_not() -> None:
    problem = PROBLEMS[2]
    other = problem.replace(rows=9, rest=48)
    assert WORKLOAD.rebound(problem, *make_inputs(other)) == other
    for spoiled, sentence in (
        (make_inputs(problem.replace(width=104)), "x is"),
        (make_inputs(problem.replace(dtype="fp16")), "torch.float16"),
        (make_inputs(PROBLEMS[0]), "takes 3 tensors"),
    ):
        with pytest.raises(UserError, match=sentence):
            WORKLOAD.rebound(problem, *spoiled)


@pytest.mark.parametrize(
    ("fields", "word"),
    [({"rows": 0}, "rows"), ({"second": -1}, "second"), ({"residual": 1}, "residual"), ({"eps": 0.0}, "eps"),
     ({"second": 8, "residual": True}, "two norms")],
)  # fmt: skip
def test_problems_that_make_no_sense_are_refused(fields: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError, match=word):
        NormProblem(**fields)
