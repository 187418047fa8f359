"""What to try next, by SYNTHETIC records: the gain that they predict, and which of them it rests on."""

from __future__ import annotations

from typing import Any

import pytest
from diagnosis_fakes import KERNEL, PLAIN, WIDE, record

from mla_var3.catalogue.registry import KernelId
from mla_var3.cli.diagnose import next_experiments
from mla_var3.lab.diagnosis.evidence import Evidence
from mla_var3.lab.diagnosis.verdict import Diagnosis, diagnose
from mla_var3.workload.decode import MlaProblem

LIMITS = record()["limits"]
OTHER_RUN = {**LIMITS, "burst": {**LIMITS["burst"], "read_gbps": 4599.0}}
LIBRARY = KernelId("peer", "mla", "flash_mla", 0)
RETIRED = KernelId("cute-dsl", "mla", "flash_mla", 16)


def times(us: float) -> dict[str, Any]:
    return {"burst": {"median": us, "p10": us, "p90": us, "n": 5}}


def made(identity: str, us: float, kernel: KernelId = KERNEL, **more: Any) -> dict[str, Any]:
    return record(id=identity, time_us=times(us), kernel=kernel.to_record(), tiling=None, **more)


MINE = made("aaaaaaaaaaaa", 300.0)


#: The shortest call of the device.
SHORT = made("dddddddddddd", 5.0, PLAIN, problem=MlaProblem(b=1, h=16, t=64).to_record())


def of(
    *others: dict[str, Any], index: dict[str, Any] | None = None, kernel: KernelId = KERNEL, mine: Any = MINE
) -> Diagnosis:
    e = Evidence(kernel, WIDE, "h200", record=mine)
    return diagnose(e, index or {"entries": [], "references": []}, [mine, *others])


def test_a_contender_that_is_faster_on_the_problem_predicts_what_it_is_ahead_by() -> None:
    d = of(made("bbbbbbbbbbbb", 250.0, LIBRARY))
    (one,) = d.experiments
    assert one.gain == pytest.approx(1.2) and not one.at_most and one.us == pytest.approx(250.0)
    assert one.records == ("bbbbbbbbbbbb", "aaaaaaaaaaaa") and "in the same run" in one.why
    assert next_experiments(d)[:4] == [
        "",
        "Next experiment:",
        "  - do what peer/flash_mla does otherwise",
        "      predicted: 1.20x in burst, to 250.0 us",
    ]
    assert next_experiments(d)[4].startswith("      rests on record bbbbbbbbbbbb (beside aaaaaaaaaaaa): ")


def test_what_runs_differ_by_is_no_gain() -> None:
    assert of(made("bbbbbbbbbbbb", 298.5, LIBRARY)).experiments == ()
    # Of another run 5 % is not enough, and 7 % is.
    assert of(made("bbbbbbbbbbbb", 285.7, limits=OTHER_RUN, kernel=LIBRARY)).experiments == ()
    (one,) = of(made("bbbbbbbbbbbb", 280.0, limits=OTHER_RUN, kernel=LIBRARY)).experiments
    assert one.gain == pytest.approx(300 / 280) and "over the limit of its own run" in one.why
    assert of(made("bbbbbbbbbbbb", 250.0, LIBRARY, device="h100")).experiments == ()
    assert of(made("bbbbbbbbbbbb", 250.0, LIBRARY, experiment="host_cost")).experiments == ()


def test_of_two_that_runs_cannot_tell_apart_the_one_that_is_here() -> None:
    d = of(made("bbbbbbbbbbbb", 240.0, RETIRED), made("cccccccccccc", 245.0, PLAIN))
    assert d.experiments[0].records[0] == "cccccccccccc"
    assert "mla-var3 diff cute-dsl/flash_mla_v23 cute-dsl/flash_mla" in d.experiments[0].what
    d = of(made("bbbbbbbbbbbb", 200.0, RETIRED), made("cccccccccccc", 245.0, PLAIN))
    assert d.experiments[0].records[0] == "bbbbbbbbbbbb" and "retired" in d.experiments[0].what


def test_the_same_version_nearer_to_its_limit_bounds_the_gain() -> None:
    longer = MlaProblem(b=128, h=128, t=65536)
    limits = {"burst": {**LIMITS["burst"], "limit_us": 2920.0}, "bound": "compute"}
    other = made("bbbbbbbbbbbb", 4000.0, problem=longer.to_record(), limits=limits)
    (one,) = of(other, SHORT).experiments
    # 182.5 of 300 us here, 73 % of the limit there: at that rate it would take 250 us.
    assert one.at_most and one.gain == pytest.approx(1.2) and one.us == pytest.approx(250.0)
    assert "73.0 % of its limit on b128_s1_h128_t65536 and 60.8 % here" in one.why
    assert "50.0 of 300.0 us come on top" in one.why and one.records[0] == "bbbbbbbbbbbb"
    # Not of another bound, of another class of problems, of a problem in the cache, of another version.
    for changes in (
        {"limits": {**limits, "bound": "memory"}},
        {"problem": MlaProblem(b=128, h=64, t=65536).to_record()},
        {"time_us": times(2800.0)},
        {"kernel": PLAIN.to_record()},
    ):
        assert of({**other, **changes}, SHORT).experiments == (), changes


def test_no_call_gets_shorter_than_the_shortest_that_was_recorded() -> None:
    short = {"burst": {**LIMITS["burst"], "limit_us": 0.2}, "bound": "compute"}
    mine = made("aaaaaaaaaaaa", 4.0, limits=short)
    other = made("bbbbbbbbbbbb", 3.0, problem=MlaProblem(b=64, h=128, t=4096).to_record(), limits={
        "burst": {**LIMITS["burst"], "limit_us": 2.7}, "bound": "compute"})  # fmt: skip
    (one,) = of(other, mine=mine).experiments
    assert one.gain == pytest.approx(4 / 3)


def entry(*gains: dict[str, Any]) -> dict[str, Any]:
    trigger = {"bound": "compute", "conditions": []}
    return {
        "entries": [
            {
                "path": "optimizations/seesaw-schedule.md", "kind": "optimization", "title": "Seesaw", "summary": "",
                "languages": ["any"], "archs": ["any"], "applies": [trigger], "gains": list(gains),
            }
        ],
        "references": [],
    }  # fmt: skip


def gain(identity: str, speedup: float, problem: dict[str, Any], bound: str = "compute") -> dict[str, Any]:
    return {
        "record": identity, "over": "0" * 12, "state": "burst", "speedup": speedup, "problem": problem,
        "device": "h200", "bound": bound,
    }  # fmt: skip


def test_a_technique_predicts_what_it_gained_on_the_nearest_problem() -> None:
    near, far = gain("bbbbbbbbbbbb", 1.08, {"b": 64}), gain("cccccccccccc", 1.5, {"b": 1, "t": 65536})
    mine = {**MINE, "kernel": PLAIN.to_record()}
    d = of(index=entry(far, near), kernel=PLAIN, mine=mine)
    (one,) = d.experiments
    assert one.gain == pytest.approx(1.08) and one.records == ("bbbbbbbbbbbb", "0" * 12)
    assert "docs/knowledge/optimizations/seesaw-schedule.md" in one.what and "1.08x with it on b64_" in one.why
    # Version 23 states that it has it.
    assert of(index=entry(far, near)).experiments == ()
    assert "no record predicts a gain of 1 % or more" in next_experiments(of(index=entry(far, near)))[-1]
    # Evidence of another bound says nothing here, and a loss is no suggestion.
    assert of(index=entry(gain("b" * 12, 1.3, {}, "memory")), kernel=PLAIN, mine=mine).experiments == ()
    assert of(index=entry(gain("b" * 12, 0.9, {}), far), kernel=PLAIN, mine=mine).experiments == ()


def test_the_limit_caps_every_prediction() -> None:
    mine = {**made("aaaaaaaaaaaa", 190.0), "kernel": PLAIN.to_record()}
    (one,) = of(index=entry(gain("b" * 12, 1.5, {})), kernel=PLAIN, mine=mine).experiments
    assert one.gain == pytest.approx(190.0 / 182.5) and one.us == pytest.approx(182.5)


def test_nothing_is_suggested_to_a_library_or_a_retired_version() -> None:
    for kernel in (LIBRARY, RETIRED):
        mine = {**MINE, "kernel": kernel.to_record()}
        d = of(made("bbbbbbbbbbbb", 250.0, PLAIN), kernel=kernel, mine=mine)
        assert d.experiments == () and next_experiments(d) == []
