"""The products per head: the oracle against the module that they come from, costs, and a check that tells right kernels
from wrong ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mla_var3.check.judge import check
from mla_var3.device import Requirement
from mla_var3.errors import UserError
from mla_var3.workload.gemm import (
    CASES,
    DISTRIBUTIONS,
    WORKLOAD,
    GemmProblem,
    make_inputs,
    new_output,
    product,
    reference,
)
from torch_plan import TorchPlan

Q = GemmProblem(tokens=5, h=3, k=96, p=16, d=32)
OUT = Q.replace(side="out")
EVERYWHERE = [name for name in CASES if name not in ("planned_many", "far")]


def plan_of(compute: Callable[[GemmProblem, Any, Any], Any]) -> type[TorchPlan]:
    """Plan of a kernel that writes `compute`'s columns, from the first on."""

    class Plan(TorchPlan):
        workload = WORKLOAD
        requires = Requirement(archs=())

        def plan(self, *inputs: Any) -> Any:
            out = new_output(self.problem, inputs[0])

            def run(x: Any, weight: Any) -> tuple[Any]:
                made = compute(self.problem, x, weight).to(out.dtype)
                return (torch.cat([made, out[..., made.shape[-1] :]], dim=-1),)

            return self.kernel(run, inputs, (out,))

    return Plan


def test_absorbed_products_are_those_of_the_decompressed_form() -> None:
    """q · (W_UK · latent) = (q · W_UK) · latent, and the same for values, with kv_b_proj as a linear layer has it."""
    problem = Q.replace(dtype="fp32")
    x, weight = make_inputs(problem, seed=1)
    latent = torch.randn(7, problem.k, dtype=torch.float64)
    projected = torch.nn.functional.linear(latent, weight.double()).view(7, problem.h, 2 * problem.d)
    keys, values = projected.split(problem.d, dim=-1)
    scores = torch.einsum("nhd,thd->nht", x.double(), keys)
    (absorbed,) = reference(problem, x, weight)
    torch.testing.assert_close(torch.einsum("nhk,tk->nht", absorbed[..., : problem.k], latent), scores)
    weights = torch.rand(5, problem.h, 7, dtype=torch.float64)
    attended = torch.einsum("nht,tk->nhk", weights, latent)
    (out,) = reference(OUT.replace(dtype="fp32"), attended, weight)
    torch.testing.assert_close(out, torch.einsum("nht,thd->nhd", weights, values))


def test_rope_columns_are_poison_and_are_not_to_be_written() -> None:
    problem = Q.replace(rest=8)
    x, weight = make_inputs(problem, seed=1)
    assert x.shape == (5, 3, 32) and x.stride() == (152, 48, 1) and weight.shape == (3 * 64, 96)
    assert bool(x.isfinite().all()) and bool(weight.isfinite().all())
    whole = torch.as_strided(x, (4, 152), (152, 1))
    assert bool(whole[:, 144:].isnan().all()) and bool(whole[:, :144].reshape(4, 3, 48)[..., 32:].isnan().all())
    (out,) = reference(problem, x, weight)
    assert out.shape == (5, 3, 112) and bool(out[..., 96:].isnan().all()) and not bool(out[..., :96].isnan().any())
    assert torch.equal(x, make_inputs(problem, seed=1)[0]) and not torch.equal(x, make_inputs(problem, seed=2)[0])
    x, _ = make_inputs(OUT, seed=1)
    assert x.shape == (5, 3, 96) and x.is_contiguous() and new_output(OUT, x).shape == (5, 3, 32)


@pytest.mark.parametrize("dist", DISTRIBUTIONS)
def test_distributions_are_what_they_are_called(dist: str) -> None:
    x, _ = make_inputs(Q.replace(h=64, tokens=30), seed=3, dist=dist)
    largest = x.float().abs().amax(dim=(1, 2))
    ranges = {
        "large": (2.0**12, 2.0**15),
        "huge": (2.0**100, 2.0**103),
        "small": (2.0**-12, 2.0**-9),
        "outliers": (1e3, 1e4),
    }
    low, high = ranges.get(dist, (1.0, 8.0))
    if dist == "tokens":
        assert not largest[::3].any() and largest[1::3].max() > 10 * largest[1::3].min()
    else:
        assert low < largest.min() and largest.max() < high


@pytest.mark.parametrize("problem", [Q, OUT, Q.replace(dtype="fp16"), OUT.replace(dtype="fp16")], ids=lambda p: p.label)
def test_what_is_rounded_once_passes(problem: GemmProblem) -> None:
    cases = [name for name in EVERYWHERE if name != "huge" or problem.dtype == "bf16"]
    report = check(plan_of(product), problem, device="cpu", cases=cases, seeds=[4])
    assert report.ok, report.reason
    assert {c.name for c in report.cases} == set(cases)


def of_the_other_half(problem: GemmProblem, x: Any, weight: Any) -> Any:
    h, d, k = problem.h, problem.d, problem.k
    return product(problem, x, weight.view(h, 2, d, k).flip(1).reshape(h * 2 * d, k))


def of_the_next_token(problem: GemmProblem, x: Any, weight: Any) -> Any:
    return product(problem, x, weight).roll(1, 0)


def of_the_next_head(problem: GemmProblem, x: Any, weight: Any) -> Any:
    return product(problem, x, weight).roll(1, 1)


def into_the_rope(problem: GemmProblem, x: Any, weight: Any) -> Any:
    made = product(problem, x, weight)
    return torch.cat([made, torch.zeros_like(made[..., : problem.beside])], dim=-1)


def with_sums_in_16_bits(problem: GemmProblem, x: Any, weight: Any) -> Any:
    """Halves of the sum are rounded before they are added."""
    half, cut = problem.summed // 2, x.clone()
    cut[..., :half] = 0
    rest = x - cut
    return (product(problem, cut, weight).to(x.dtype) + product(problem, rest, weight).to(x.dtype)).double()


def by_way_of_fp16(problem: GemmProblem, x: Any, weight: Any) -> Any:
    return product(problem, x.half(), weight)


@pytest.mark.parametrize(
    ("compute", "problem", "case"),
    [
        (of_the_other_half, Q, "own"),
        (of_the_other_half, OUT, "own"),
        (of_the_next_token, Q, "uneven"),
        (of_the_next_head, OUT, "own"),
        (into_the_rope, Q, "own"),
        (with_sums_in_16_bits, OUT, "own"),
        (by_way_of_fp16, Q, "huge"),
    ],
    ids=lambda x: getattr(x, "__name__", getattr(x, "label", x)),
)
def test_wrong_kernels_fail(compute: Any, problem: GemmProblem, case: str) -> None:
    report = check(plan_of(compute), problem, device="cpu", cases=[case], seeds=[4])
    assert not report.ok and case in report.reason


def test_what_it_costs() -> None:
    for side, columns in (("q", 512), ("out", 128)):
        cost = GemmProblem(side=side, tokens=7, h=16).cost()
        assert cost.flops == 2 * 7 * 16 * 128 * 512
        assert cost.bytes == 2 * 16 * (128 * 512 + 7 * (128 + 512)) and cost.written == 2 * 7 * 16 * columns
    problem = GemmProblem(tokens=7, h=16, rest=24)
    x, weight = make_inputs(problem)
    assert problem.output_bytes() == 2 * new_output(problem, x).numel()
    assert problem.input_bytes() - problem.output_bytes() == 2 * (7 * (16 * 192 + 24) + weight.numel())


def test_other_tokens_and_distances_bind_and_other_widths_do_not() -> None:
    for problem, other in ((Q, Q.replace(tokens=9, rest=48, p=32)), (OUT, OUT.replace(tokens=2, rest=16))):
        assert WORKLOAD.rebound(problem, *make_inputs(other)) == other
    x, weight = make_inputs(Q)
    for spoiled, sentence in (
        (make_inputs(Q.replace(d=16)), "x is"),
        (make_inputs(Q.replace(dtype="fp16")), "torch.float16"),
        ((x, weight[:-1]), "weight is"),
        ((x, weight.t().contiguous().t()), "contiguous"),
        ((x.transpose(1, 2).contiguous().transpose(1, 2), weight), "columns 3 elements apart"),
        ((x[:1].expand(5, -1, -1), weight), "overlap"),
    ):
        with pytest.raises(UserError, match=sentence):
            WORKLOAD.rebound(Q, *spoiled)


@pytest.mark.parametrize(
    ("fields", "word"), [({"side": "k"}, "side"), ({"tokens": 0}, "tokens"), ({"h": 0}, "h"), ({"rest": -1}, "rest")]
)
def test_problems_that_make_no_sense_are_refused(fields: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError, match=word):
        GemmProblem(**fields)
