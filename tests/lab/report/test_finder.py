"""What the finder's script is given: which versions take what, and how far its predictions were off."""

from __future__ import annotations

import random
from typing import Any

import pytest

from mla_var3 import paths
from mla_var3.device import Device
from mla_var3.dispatch import selection
from mla_var3.dispatch import table as tables
from mla_var3.lab.report import finder
from mla_var3.lab.report.gather import arrange, gather
from mla_var3.workload.decode import MlaProblem


@pytest.mark.parametrize("key", ["h200", "h100"])
def test_who_takes_what_is_as_the_versions_say(key: str) -> None:
    """Asked at the ends of batch and context, and true of what lies between."""
    rng, device = random.Random(7), Device.get(key)
    recipes = {r.label: r for r in tables.load().devices[key].recipes}
    said = {r["label"]: r["takes"] for r in (finder.of_device(key, []) or {})["recipes"]}
    assert said.keys() == recipes.keys()
    answers = set()
    for _ in range(150):
        kind = rng.randrange(len(finder.KINDS))
        s, causal = finder.KINDS[kind]
        h, b, t = rng.randint(1, finder.HEADS), int(2 ** rng.uniform(0, 12)), int(2 ** rng.uniform(0, 17))
        problem = MlaProblem(b=b, s=s, h=h, t=t, causal=causal)
        for label, recipe in recipes.items():
            takes = bool(selection.takes(selection.Choice(recipe.kernel, recipe.tiling, None, ""), problem, device))
            answer = said[label][kind][h - 1]
            assert answer == "?" or answer == str(int(takes)), f"{label} on {problem.label}"
            answers.add(answer)
    assert {"0", "1"} <= answers
    best = recipes["cute-dsl/flash_mla_v23"].label
    open_ = {(finder.KINDS[i][0], h + 1) for i, row in enumerate(said[best]) for h, c in enumerate(row) if c == "?"}
    # 4,096 requests of 2,000 query rows have partial results that 32 bits do not count.
    assert all(s * h >= 2000 for s, h in open_), "of what is picked most it is known but at the far end"


def test_predictions_say_how_far_they_were_off() -> None:
    found = finder.of_device("h200", gather([paths.shipped_results_dir() / "h200"]).newest)
    assert found is not None
    for median, most in (found["errors"]["near"], found["errors"]["far"]):
        assert 0.0 < median < most < 2.0
    assert found["errors"]["near"][1] < found["errors"]["far"][1], "near a record predictions are better"
    assert {r["kernel"] for r in found["libraries"]} >= {"peer/flash_mla_lib", "peer/fa3_qv"}
    assert finder.of_device("gb999", []) is None


def test_few_records_say_nothing_of_errors(make: Any) -> None:
    found = finder.of_device("b200", arrange([make("peer/fa4", device="b200")]).newest)
    assert found is not None
    assert found["from"] != "b200", "what was not measured is predicted from another device, and says so"
    assert [len(r["points"]) for r in found["libraries"]] == [1]


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
