"""The append to the index cache: the oracle against torch's own norm and plain loops, and inputs that no order of sums
changes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from mla_var3.catalogue import registry
from mla_var3.check.judge import check, compare
from mla_var3.errors import UserError
from mla_var3.lab import naming
from mla_var3.workload import index_append as workload
from mla_var3.workload.index_append import EPS, IndexAppendProblem

SMALL = IndexAppendProblem(tokens=7, positions=300)


def in_float32(problem: IndexAppendProblem, *inputs: Any, flip: bool = False) -> Any:
    """Keys (tokens, 128) by torch's layer_norm in float32, or by sums from the right, and pairs one by one."""
    k, weight, bias, positions, _, table = inputs
    x = k.float()
    if flip:
        x = x.flip(-1)
        apart = x - x.cumsum(-1)[:, -1:] / 128
        y = (apart * torch.rsqrt(apart.square().cumsum(-1)[:, -1:] / 128 + EPS)).flip(-1) * weight + bias
    else:
        y = torch.nn.functional.layer_norm(x, (128,), weight, bias, EPS)
    y = y.bfloat16().float()
    out = y.clone()
    for i, position in enumerate(positions.tolist()):
        for pair in range(32):
            one, two = (2 * pair, 2 * pair + 1) if problem.interleaved else (pair, pair + 32)
            cosine, sine = (
                (table[position, pair], table[position, 32 + pair]) if 0 <= position < 300 else (math.nan,) * 2
            )
            out[i, one] = y[i, one] * cosine - y[i, two] * sine
            out[i, two] = y[i, two] * cosine + y[i, one] * sine
    return out.bfloat16()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dist", ["normal", "huge", "tiny", "odd"])
def test_keys_are_those_of_float32_in_any_order(interleaved: bool, dist: str) -> None:
    problem = SMALL.replace(interleaved=interleaved)
    inputs = workload.make_inputs(problem, seed=1, dist=dist)
    found, near = workload.keys_of(problem, *inputs[:4], inputs[5])
    assert not near.any()
    for flip in (False, True):
        assert torch.equal(
            found.float().nan_to_num(77.0), in_float32(problem, *inputs, flip=flip).float().nan_to_num(77.0)
        )
    assert (dist == "odd") == bool(found.isnan().any())


def test_inputs_are_drawn_again_where_a_sum_could_decide() -> None:
    """Without it some of a hundred rows lie too near to the middle between two bf16 numbers."""
    problem = SMALL.replace(tokens=200)
    _, weight, bias, positions, _, table = workload.make_inputs(problem, seed=1)
    plain = torch.randn(200, 128, generator=torch.Generator().manual_seed(2)).bfloat16()
    assert 0 < int(workload.keys_of(problem, plain, weight, bias, positions, table)[1].sum()) < 150


@pytest.mark.parametrize("powers", [False, True])
def test_codes_times_scales_are_the_keys(powers: bool) -> None:
    inputs = workload.make_inputs(SMALL, seed=4)
    keys, _ = workload.keys_of(SMALL, *inputs[:4], inputs[5])
    keys[2] = 0.0
    codes, scales = workload.quantised(keys, powers)
    back = codes.view(torch.float8_e4m3fn).double() * scales[:, None].double()
    assert torch.allclose(back, keys.double(), rtol=2.0**-4, atol=float(scales.max()) * 2**-9)
    assert codes[2].eq(0).all() and float(scales[2]) == pytest.approx(1e-4 / 448, rel=1.0 if powers else 1e-6)
    largest = codes.view(torch.float8_e4m3fn).float().abs().amax(-1)
    assert largest[[0, 1, 3]].ge(224 if powers else 448).all() and largest.le(448).all()


def test_every_case_passes_and_a_wrong_byte_does_not() -> None:
    plan = registry.get_plan(registry.KernelId.parse("torch/index_append"))
    report = check(plan, SMALL, device="cpu", seeds=[5])
    assert report, report.reason
    on_cpu = [case.name for case in workload.WORKLOAD.cases(SMALL, False) if not case.gpu]
    assert [case.name for case in report.cases] == on_cpu
    assert set(on_cpu) < set(workload.CASES) and set(workload.QUICK) <= set(on_cpu)
    inputs = workload.make_inputs(SMALL)
    right = workload.reference(SMALL, *inputs)
    found = [x.nan_to_num(0.0) for x in right]
    held = [torch.where(r.isnan(), torch.zeros(()), f) for r, f in zip(right, found, strict=True)]
    held[0].view(-1)[int((~right[0].view(-1).isnan()).nonzero()[9])] += 1
    verdict = compare(workload.WORKLOAD, held, right, workload.bounds("normal"))
    assert not verdict and "codes" in verdict.reason


def test_problems_that_make_no_sense_are_refused_and_names_tell_apart() -> None:
    for fields, said in (
        ({"tokens": 0}, "tokens = 0"), ({"rest": -1}, "rest = -1"), ({"powers": 1}, "powers = 1 is not a boolean"),
        ({"index": "int8"}, "index = 'int8' is unknown"), ({"dtype": "fp16"}, "dtype = 'fp16' is not taken"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=said):
            IndexAppendProblem(**fields)
    problems = [SMALL, SMALL.replace(interleaved=True), SMALL.replace(powers=False), SMALL.replace(index="int32")]
    assert len({naming.cell_name(p) for p in problems}) == len(problems)
    assert "7 tokens, pairs of halves, scales powers of two" in naming.words(SMALL)
    with pytest.raises(UserError, match="this kernel takes 6 tensors"):
        workload.rebound(SMALL, *workload.make_inputs(SMALL)[:5])
