"""RoPE and append to packed caches: the oracle against packing a cache as a whole, and a check that stops mistakes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from mla_var3.check.judge import compare, untouched
from mla_var3.errors import UserError
from mla_var3.lab.naming import cell_name
from mla_var3.packed_cache import LAYOUTS, NO_ROPE, new_cache, pack
from mla_var3.workload import rope
from mla_var3.workload.packed_append import (
    CASES,
    WORKLOAD,
    PackedAppendProblem,
    bounds,
    make_inputs,
    new_outputs,
    reference,
    views,
)
from mla_var3.workload.rope import RopeProblem

SMALL: dict[str, Any] = {"tokens": 9, "h": 3, "positions": 64, "page": 5}
PROBLEMS = [
    PackedAppendProblem(**SMALL, layout="v32"),
    PackedAppendProblem(**SMALL, layout="v32", powers=False),
    PackedAppendProblem(**SMALL, layout="v4", interleaved=False),
    PackedAppendProblem(**SMALL, layout="flat"),
    PackedAppendProblem(**SMALL, layout="v41"),
    PackedAppendProblem(**SMALL, layout="v41_fp4", interleaved=False),
    PackedAppendProblem(**SMALL, layout="v41_planar", interleaved=False),
    PackedAppendProblem(**SMALL, layout="v41_fp4_planar"),
]


@pytest.mark.parametrize("dist", ["normal", "tiny", "huge", "skipped"])
@pytest.mark.parametrize("problem", PROBLEMS, ids=cell_name)
def test_bytes_are_those_of_the_bf16_cache_packed(problem: PackedAppendProblem, dist: str) -> None:
    inputs = make_inputs(problem, seed=1, dist=dist)
    out, *parts = reference(problem, *inputs)
    plain = RopeProblem(**{name: getattr(problem, name) for name in RopeProblem.fields()})
    like, cache = rope.reference(plain, *inputs[:6])
    assert torch.equal(out.nan_to_num(7.0), like.nan_to_num(7.0))
    scale = inputs[6] if problem.layout == "flat" else None
    packed = pack(problem.cache, cache.nan_to_num(0.0).bfloat16(), scale=scale, powers=problem.powers)
    written = cache.isfinite().all(-1)
    assert 0 < int(written.sum()) < written.numel()
    if problem.cache.plain:  # rounded once, where the cache is written
        assert torch.equal(parts[2][written], cache[written][:, problem.k :])
        parts[2] = parts[2].bfloat16().double()
    for found, wanted in zip(parts, views(problem.cache, packed), strict=True):
        assert torch.equal(found[written], wanted[written].double()) and bool(found[~written].isnan().all())


def spoiled(problem: PackedAppendProblem, part: int, change: Any) -> str:
    """Why the oracle's outputs, with one of them changed, are not right; empty where they are."""
    inputs = make_inputs(problem, seed=3, dist="skipped")
    wanted = reference(problem, *inputs)
    outputs = new_outputs(problem, inputs[0])
    for held, right in zip(outputs, wanted, strict=True):
        held.fill_(untouched(held))
        held[~right.isnan()] = right[~right.isnan()].to(held.dtype)
    change(outputs[part], wanted[part].isnan())
    return compare(WORKLOAD, outputs, wanted, bounds("skipped")).reason


@pytest.mark.parametrize("problem", PROBLEMS, ids=cell_name)
def test_one_bit_and_one_byte_too_many_are_found(problem: PackedAppendProblem) -> None:
    def flip(x: torch.Tensor, nobodys: torch.Tensor) -> None:
        at = tuple(int(i) for i in (~nobodys).nonzero()[-1])
        x[at] = x[at] + 1

    def write(x: torch.Tensor, nobodys: torch.Tensor) -> None:
        x[tuple(int(i) for i in nobodys.nonzero()[0])] = 0

    assert spoiled(problem, 1, lambda *_: None) == ""
    for part, name in ((1, "codes"), (2, "scales"), (3, "plain")):
        if part == 2 and problem.layout == "flat":
            continue
        assert f"{name} 1 of" in spoiled(problem, part, flip)
        assert f"{name} was written where it must stay" in spoiled(problem, part, write)


@pytest.mark.parametrize("fused", [False, True])
def test_float32_may_round_to_either_side_of_a_tie_and_no_further(fused: bool) -> None:
    """Of so many columns some lie where float32, with or without fused multiply-add, decides otherwise than float64."""
    problem = PackedAppendProblem(tokens=6000, h=1, positions=4096)
    inputs = make_inputs(problem, seed=1)
    rope_columns, table = inputs[2].float(), inputs[5][inputs[3]]
    x, y, cosines, sines = rope_columns[:, ::2], rope_columns[:, 1::2], table[:, :32], table[:, 32:]
    if fused:  # the second product is not rounded; float64 holds it
        first = ((x * cosines).double() - y.double() * sines.double()).float()
        second = ((y * cosines).double() + x.double() * sines.double()).float()
    else:
        first, second = x * cosines - y * sines, y * cosines + x * sines
    wanted = reference(problem, *inputs)
    outputs = new_outputs(problem, inputs[0])
    for held, right in zip(outputs, wanted, strict=True):
        held.copy_(right.nan_to_num(untouched(held)))
    at = (inputs[4] // problem.page, inputs[4] % problem.page)
    nearest = outputs[3][at].clone()
    outputs[3][at] = torch.stack([first, second], dim=-1).flatten(1).bfloat16()
    other = (outputs[3][at] != nearest).sum()
    assert 0 < int(other) < 1e-4 * nearest.numel()
    assert compare(WORKLOAD, outputs, wanted, bounds("normal")).ok
    # One bit more than the nearest number is found, but where that is nearly as near, relative to the value.
    outputs[3][at] = (nearest.view(torch.int16) + 1).view(torch.bfloat16)
    reason = compare(WORKLOAD, outputs, wanted, bounds("normal")).reason
    assert int(reason.removeprefix("plain ").split()[0]) > 0.7 * nearest.numel()


def test_every_layout_has_its_views() -> None:
    widths_of = {
        "v32": (512, 4, 64), "v4": (448, 7, 64), "flat": (512, 0, 64),
        "v41": (448, 16, 64), "v41_planar": (448, 16, 64),
        "v41_fp4": (224, 32, 32), "v41_fp4_planar": (224, 32, 32),
    }  # fmt: skip
    assert {*widths_of, "bf16", *NO_ROPE} == {*LAYOUTS}
    for name, widths in widths_of.items():
        cache = new_cache(LAYOUTS[name], 3, 4)
        found = views(LAYOUTS[name], cache)
        assert tuple(x.shape[2] for x in found) == widths
        memory = cache.untyped_storage().data_ptr()
        assert all(x.untyped_storage().data_ptr() == memory for x in found)


def test_cost_counts_bytes_of_a_token_and_a_half_of_bf16_s() -> None:
    problem = PackedAppendProblem(tokens=100, h=16, layout="v4", columns=512)
    cost = problem.cost()
    assert cost.written == 100 * (16 * 64 * 2 + 583) and problem.k == 448
    assert cost.bytes == cost.written + 100 * (16 * 64 + 512) * 2 + 100 * (64 * 4 + 16)


def test_records_and_binding_keep_the_layout() -> None:
    for problem in PROBLEMS:
        record = problem.to_record()
        assert record["workload"] == "packed_append" and PackedAppendProblem.from_record(record) == problem
        other = dataclasses.replace(problem, tokens=2, rest=64)
        assert WORKLOAD.rebound(problem, *make_inputs(other)) == other
    assert len({p.problem_class().key() for p in PROBLEMS}) == len({cell_name(p) for p in PROBLEMS}) == 8
    assert {case.name for case in WORKLOAD.cases(PROBLEMS[0], True)} == set(CASES)


@pytest.mark.parametrize(
    ("fields", "word"),
    [({"layout": "v33"}, "v32"), ({"layout": "bf16"}, "workload rope"), ({"k": 256}, "512 latent"), ({"p": 32}, "rope"),
     ({"layout": "v4", "powers": False}, "powers"),
     ({"layout": "v41", "powers": False}, "powers"), ({"layout": "flat_no_rope"}, "has no rope columns.*pack"),
     ({"layout": "v41_fp4", "k": 256}, "448 latent"),
     ({"dtype": "fp16"}, "bf16"), ({"powers": 1}, "boolean")],
)  # fmt: skip
def test_problems_that_make_no_sense_are_refused(fields: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError, match=word):
        PackedAppendProblem(**fields)
