"""RoPE and append: the table against YaRN's and DeepSeek's formulas, the oracle, and a check that stops mistakes."""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mla_var3.check.judge import check
from mla_var3.device import Requirement
from mla_var3.errors import UserError
from mla_var3.workload.rope import (
    CASES,
    WORKLOAD,
    RopeProblem,
    Yarn,
    frequencies,
    make_inputs,
    new_outputs,
    reference,
    rope_table,
    rotated,
)
from torch_plan import TorchPlan

PROBLEM = RopeProblem(tokens=5, h=3, positions=512)
EVERYWHERE = [name for name in CASES if name != "planned_many"]


def plan_of(spoil: Callable[[RopeProblem, Any, Any], None]) -> type[TorchPlan]:
    """The oracle as a kernel, whose outputs are spoiled before they count."""

    class Plan(TorchPlan):
        workload = WORKLOAD
        requires = Requirement(archs=())

        def plan(self, *inputs: Any) -> Any:
            outputs = new_outputs(self.problem, inputs[0])

            def run(*given: Any) -> tuple[Any, ...]:
                wanted = reference(self.problem, *given)
                both = [torch.where(w.isnan(), held, w.to(held.dtype)) for w, held in zip(wanted, outputs, strict=True)]
                spoil(self.problem, given, both)
                return tuple(both)

            return self.kernel(run, inputs, outputs)

    return Plan


# ---------------------------------------------------------------- the table
def test_plain_frequencies() -> None:
    found = frequencies(64)
    assert found.shape == (32,) and found[0] == 1.0
    assert float(found[31]) == pytest.approx(10000 ** (-62 / 64), rel=1e-12)


def test_yarn_keeps_what_turns_often_and_stretches_what_does_not() -> None:
    """DeepSeek-V3: 32 turns in 4096 positions are made by pair 10.5, one by pair 22.5."""
    plain, stretched = frequencies(64), frequencies(64, yarn=Yarn())
    assert torch.equal(stretched[:11], plain[:11])
    torch.testing.assert_close(stretched[23:], plain[23:] / 40.0)
    share = (16 - 10) / (23 - 10)
    assert float(stretched[16]) == pytest.approx(float(plain[16]) * (1 - share + share / 40), rel=1e-12)


def test_magnitude_and_softmax_factor_of_deepseek() -> None:
    v3, v2_like = Yarn(), Yarn(mscale=0.707, mscale_all_dim=0.0)
    assert v3.magnitude == 1.0 and v3.softmax == pytest.approx((0.1 * math.log(40) + 1) ** 2)
    assert v2_like.magnitude == pytest.approx(0.0707 * math.log(40) + 1) and v2_like.softmax == 1.0
    assert Yarn(factor=1.0).softmax == 1.0
    torch.testing.assert_close(
        rope_table(4, yarn=v2_like), rope_table(4, yarn=Yarn(mscale_all_dim=0.0, mscale=0.0)) * v2_like.magnitude
    )


def test_the_last_angles_are_as_exact_as_float32() -> None:
    table = rope_table(163840, 64)
    assert table.shape == (163840, 64) and table.dtype == torch.float32
    assert float(table[163839, 0]) == pytest.approx(math.cos(163839.0), abs=1e-7)
    assert float(table[163839, 32]) == pytest.approx(math.sin(163839.0), abs=1e-7)
    torch.testing.assert_close(table[:, :32].square() + table[:, 32:].square(), torch.ones(163840, 32))


# ---------------------------------------------------------------- the oracle
def test_interleaved_pairs_turn_as_complex_numbers() -> None:
    x, angles = torch.randn(6, dtype=torch.float64), torch.tensor([0.3, -1.1, 2.0], dtype=torch.float64)
    found = rotated(x, angles.cos(), angles.sin(), interleaved=True)
    for i in range(3):
        z = complex(x[2 * i], x[2 * i + 1]) * cmath.exp(1j * float(angles[i]))
        assert complex(found[2 * i], found[2 * i + 1]) == pytest.approx(z)


def test_halves_are_interleaved_pairs_in_another_order() -> None:
    x, angles = torch.randn(5, 8, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    one = rotated(x, angles.cos(), angles.sin(), interleaved=True)[:, order]
    torch.testing.assert_close(one, rotated(x[:, order], angles.cos(), angles.sin(), interleaved=False))


def test_what_is_written_and_what_is_not() -> None:
    inputs = make_inputs(PROBLEM, seed=2, dist="skipped")
    q, latent, _, _, slots, _ = inputs
    out, cache = reference(PROBLEM, *inputs)
    assert bool(q[..., :128].isnan().all()) and bool(q[..., 128:].isfinite().all())
    assert bool(out[..., :512].isnan().all()) and bool(out[..., 512:].isfinite().all())
    rows = cache.view(-1, 576)
    written = slots[slots >= 0]
    assert slots.tolist().count(-1) == 2 and len(set(written.tolist())) == 3
    assert torch.equal(rows[written, :512], latent[slots >= 0].double())
    assert int(rows.isfinite().all(1).sum()) == 3 and int(rows.isnan().all(1).sum()) == len(rows) - 3


def test_position_zero_turns_nothing() -> None:
    inputs = list(make_inputs(PROBLEM, seed=2))
    inputs[3] = torch.zeros_like(inputs[3])
    out, _ = reference(PROBLEM, *inputs)
    assert torch.equal(out[..., 512:], inputs[0][..., 128:].double())


# ---------------------------------------------------------------- the check
@pytest.mark.parametrize("problem", [PROBLEM, PROBLEM.replace(interleaved=False, dtype="fp16")], ids=lambda p: p.label)
def test_what_is_rounded_once_passes(problem: RopeProblem) -> None:
    report = check(plan_of(lambda *_: None), problem, device="cpu", cases=EVERYWHERE, seeds=[4])
    assert report.ok, report.reason
    assert {c.name for c in report.cases} == set(EVERYWHERE) and set(report.error) == {"out", "cache"}


def other_direction(problem: RopeProblem, given: Any, outputs: Any) -> None:
    q, table = given[0], given[5][given[3].long()]
    sines = -table[:, None, 32:].float()
    outputs[0][..., 512:] = rotated(q[..., -64:].float(), table[:, None, :32], sines, interleaved=problem.interleaved)


def unrotated_key(problem: RopeProblem, given: Any, outputs: Any) -> None:
    outputs[1].view(-1, 576)[given[4].long(), 512:] = given[2]


def writes_slot_minus_one(problem: RopeProblem, given: Any, outputs: Any) -> None:
    outputs[1].view(-1, 576)[-1] = 0.0


def clears_the_latent_columns_of_q(problem: RopeProblem, given: Any, outputs: Any) -> None:
    outputs[0][..., :512] = 0.0


@pytest.mark.parametrize(
    ("spoil", "case", "words"),
    [
        (other_direction, "own", "out"),
        (unrotated_key, "own", "cache"),
        (writes_slot_minus_one, "none", "cache was written where it must stay as it was"),
        (clears_the_latent_columns_of_q, "own", "out was written where it must stay as it was"),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_wrong_kernels_fail(spoil: Any, case: str, words: str) -> None:
    report = check(plan_of(spoil), PROBLEM, device="cpu", cases=[case], seeds=[4])
    assert not report.ok and words in report.reason


def test_what_it_costs() -> None:
    cost = RopeProblem(tokens=100, h=16).cost()
    assert cost.written == 100 * (16 * 64 + 576) * 2
    assert cost.bytes == 2 * cost.written + 100 * (64 * 4 + 16)
    assert cost.flops == 100 * 17 * 32 * 6


def test_other_tokens_bind_and_other_heads_and_dtypes_do_not() -> None:
    other = PROBLEM.replace(tokens=9, rest=64)
    assert WORKLOAD.rebound(PROBLEM, *make_inputs(other)) == other
    for spoiled, sentence in (
        (make_inputs(PROBLEM.replace(h=4)), "q is"),
        (make_inputs(PROBLEM.replace(index="int32")), "positions is torch.int32"),
        (make_inputs(PROBLEM.replace(dtype="fp16")), "float16"),
    ):
        with pytest.raises(UserError, match=sentence):
            WORKLOAD.rebound(PROBLEM, *spoiled)


@pytest.mark.parametrize(
    ("fields", "word"),
    [({"tokens": 0}, "tokens"), ({"p": 63}, "odd"), ({"columns": 32}, "columns"), ({"index": "int16"}, "index"),
     ({"interleaved": 1}, "interleaved")],
)  # fmt: skip
def test_problems_that_make_no_sense_are_refused(fields: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError, match=word):
        RopeProblem(**fields)
