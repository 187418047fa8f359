"""What the finder's script is given: what is picked for what, and what calls should take."""

from __future__ import annotations

import random
from typing import Any

import pytest

from mla_var3 import paths
from mla_var3.device import Device
from mla_var3.dispatch import choose, evidence, expected
from mla_var3.errors import UserError
from mla_var3.lab.report import finder
from mla_var3.lab.report.gather import arrange, gather
from mla_var3.workload.decode import MlaProblem


@pytest.mark.parametrize("key", ["h200", "h100"])
def test_picks_are_the_dispatchers(key: str) -> None:
    """Asked at the ends of batch and context, and true of what lies between."""
    rng, device = random.Random(7), Device.get(key)
    told = finder.of_device(key, [])
    assert told is not None
    answers = set()
    for _ in range(150):
        kind = rng.randrange(len(finder.KINDS))
        s, causal = finder.KINDS[kind]
        h, b, t = rng.randint(1, finder.HEADS), int(2 ** rng.uniform(0, 12)), int(2 ** rng.uniform(0, 17))
        said = told["picks"][kind][h - 1]
        try:
            label = choose(MlaProblem(b=b, s=s, h=h, t=t, causal=causal), device).label
        except UserError:
            label = ""
        assert said == finder.DEPENDS or (told["labels"][said] if said >= 0 else "") == label
        answers.add(said)
    assert len(answers - {finder.NOBODY, finder.DEPENDS}) >= 2
    unsure = {(finder.KINDS[i][0], h + 1) for i, row in enumerate(told["picks"]) for h, c in enumerate(row) if c < 0}
    # 4,096 requests of 2,000 query rows have partial results that 32 bits do not count.
    assert all(s * h >= 2000 for s, h in unsure), "what is picked is known but at the far end"


def test_times_of_the_table_are_what_is_expected_of_its_shapes() -> None:
    told = finder.of_device("h200", gather([paths.shipped_results_dir() / "h200"]).points)
    assert told is not None and told["error"] is not None and 0.0 < told["error"] < 0.5
    shapes, device = finder.shapes(), Device.get("h200")
    assert len(told["times"]) == len(shapes) == 250 and all(len(row) == 5 for row in told["times"])
    found = evidence.timed("decode", "h200")
    for i in (0, 77, 249):
        index, us, limit, library, theirs = told["times"][i]
        label = choose(shapes[i], device).label
        guess = expected.Expectations(label, device, device, found).of(shapes[i])
        assert told["labels"][index] == label and guess is not None and us == pytest.approx(guess.us)
        assert limit == pytest.approx(expected.limit_us(shapes[i], device)) and limit < us
        assert told["labels"][library].startswith("peer/") and theirs > 0


def test_few_records_say_little(make: Any) -> None:
    told = finder.of_device("b200", arrange([make("peer/fa4", device="b200")]).points)
    assert told is not None and told["error"] is None
    assert not any(told["times"]), "of what is picked there is no record, so nothing is expected of it"
    assert finder.of_device("gb999", []) is None


def test_plain_problems_are_those_that_can_be_typed() -> None:
    plain = MlaProblem(b=3, s=2, h=16, t=100, causal=True)
    assert finder.is_plain(plain)
    others: list[dict[str, Any]] = [
        {"dtype": "fp16"},
        {"page": None},
        {"lengths": [1, 2, 100]},
        {"k": 256},
        {"h_kv": 2},
    ]
    assert not any(finder.is_plain(plain.replace(**other)) for other in others)


def test_models_bring_their_heads() -> None:
    assert finder.models()[0] == ("deepseek-v3", 128)
    assert "minicpm3" not in dict(finder.models()), "its latent is narrower: other problems than those that are asked"
