"""Merging of partial attention: its oracle is attention over the whole, and a check that tells wrong kernels apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mla_var3.catalogue import registry
from mla_var3.check.judge import check
from mla_var3.errors import UserError
from mla_var3.workload.merge import CASES, DISTRIBUTIONS, MergeProblem, make_inputs, rebound, reference

PROBLEM = MergeProblem(parts=3, tokens=5, h=2, k=32)


def plan_type() -> Any:
    return registry.get_plan(registry.KernelId.parse("torch/merge_partials"))


def test_merged_parts_are_attention_over_the_whole() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(10, 60, generator=generator, dtype=torch.float64) * 4
    values = torch.randn(60, 32, generator=generator, dtype=torch.float64)
    parts = [(0, 7), (7, 40), (40, 60)]
    partials = torch.stack([logits[:, a:b].softmax(-1) @ values[a:b] for a, b in parts])
    lse = torch.stack([logits[:, a:b].logsumexp(-1) for a, b in parts])
    out, total = reference(PROBLEM, partials, lse)
    torch.testing.assert_close(out, logits.softmax(-1) @ values)
    torch.testing.assert_close(total, logits.logsumexp(-1))


def test_a_row_without_keys_is_zero() -> None:
    partials, lse = make_inputs(PROBLEM, dist="empty")
    out, total = reference(PROBLEM, partials, lse)
    assert bool(partials.isnan().any()) and not bool(out.isnan().any())
    assert bool((out[::5] == 0).all()) and bool((total[::5] == float("inf")).all())
    assert bool(total[1].isfinite()) or bool((lse[:, 1] == float("inf")).all())


@pytest.mark.parametrize("dist", DISTRIBUTIONS)
def test_inputs_are_the_same_for_the_same_seed(dist: str) -> None:
    one, two, other = (make_inputs(PROBLEM, seed=seed, dist=dist) for seed in (1, 1, 2))
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(one, two, strict=True))
    assert not torch.equal(one[0].nan_to_num(), other[0].nan_to_num())


def test_the_oracle_passes_every_case() -> None:
    report = check(plan_type(), PROBLEM, device="cpu", seeds=[3])
    assert report.ok, report.reason


WRONG = {
    "the mean of the parts": lambda partials, lse: (partials.double().mean(0), lse.double().logsumexp(0)),
    "weights without a maximum": lambda partials, lse: (
        (lse.exp()[..., None] * partials.float()).sum(0) / lse.exp().sum(0)[:, None],
        lse.exp().sum(0).log(),
    ),
    "LSE in bits": lambda partials, lse: (
        reference(PROBLEM, partials, lse)[0],
        reference(PROBLEM, partials, lse)[1] / 0.6931,
    ),
    "the last part left out": lambda partials, lse: reference(PROBLEM, partials[:2], lse[:2]),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_does_not_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_type(), "merge_partials", lambda self, *inputs: WRONG[name](*inputs))
    report = check(plan_type(), PROBLEM, device="cpu", seeds=[3])
    assert not report.ok


def test_what_it_costs() -> None:
    cost = MergeProblem(parts=4, tokens=2, h=8, k=512).cost()
    assert cost.written == 16 * (1024 + 4) and cost.bytes == cost.written + 4 * 16 * (1024 + 4)
    assert cost.flops == 2 * 4 * 16 * 512


@pytest.mark.parametrize(("field", "value"), [("parts", 0), ("tokens", -1), ("h", 1.5), ("k", 0), ("dtype", "fp8")])
def test_a_problem_that_makes_no_sense_is_refused(field: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"problem.{field} = "):
        PROBLEM.replace(**{field: value})


def test_other_rows_are_bound_and_other_shapes_are_not() -> None:
    partials, lse = make_inputs(PROBLEM.replace(tokens=7))
    assert rebound(PROBLEM, partials, lse) == PROBLEM.replace(tokens=14, h=1)
    for given, words in (
        ((partials, lse[:2]), r"lse is \(2, 14\)"),
        ((partials.float(), lse), "planned for bf16"),
        ((partials.transpose(1, 2), lse), "partials is"),
        ((partials,), "1 tensors are given"),
    ):
        with pytest.raises(UserError, match=words):
            rebound(PROBLEM, *given)
    assert set(CASES) >= {"empty", "far", "high"}
