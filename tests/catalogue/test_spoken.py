"""Which record speaks for a kernel, and what a cell answers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import made_up
from mla_var3.catalogue import ledger, registry, spoken
from mla_var3.record import Record, as_ratio

V23, V24, GONE, LIB, FA3 = (
    "cute-dsl/flash_mla_v23",
    "cute-dsl/flash_mla_v24",
    "cute-dsl/flash_mla_v7",
    "flash_mla_lib",
    "fa3_qv",
)
LIMITS = {name: 50.0 + i / 1000 for i, name in enumerate("abcdef")}  # a run is known by its limits
HERE = {k.label: registry.source_hash(k) for k in registry.all_kernels() if k.label in (V23, V24)}
_numbers = itertools.count()


def record(label: str, us: float, run: str, day: int, *, today: bool = True, **fields: Any) -> Record:
    """Of a run on a day of November; today: the code that is here."""
    own = {
        "id": f"{next(_numbers):012x}", "at": f"2026-11-{day:02}T10:00:00Z",
        "source": {"hash": HERE.get(label, "0") if today else "other"},
    }  # fmt: skip
    name = label if "/" in label else f"peer/{label}"
    return made_up.record(name, us, limit=LIMITS[run], **{**own, **fields})


def speaks(*records: Record) -> dict[str, Record]:
    found = spoken.speaking(records)
    assert len({spoken.name(r) for r in found}) == len(found)
    return {spoken.name(r): r for r in found}


def test_the_newest_of_todays_code_speaks_and_one_beside_a_library_first() -> None:
    old, new = record(V23, 100, "a", 21), record(V23, 101, "b", 22)
    assert speaks(old, new)[V23] is new
    other = record(V23, 90, "c", 23, today=False)
    assert speaks(old, new, other)[V23] is new
    assert speaks(record(V23, 80, "d", 20, today=False), other)[V23] is other, "of other code alone, the newest"
    assert speaks(old, new, record(LIB, 99, "a", 21))[V23] is old, "there it took turns with a library"
    assert speaks(old, other, record(LIB, 99, "c", 23))[V23] is old, "today's code counts before that"


def test_a_record_of_one_state_does_not_displace_one_of_both() -> None:
    stats = {"median": 90.0, "p10": 90.0, "p90": 90.0, "n": 3}
    both, burst = record(V23, 100, "a", 21), record(V23, 90, "b", 22, time_us={"burst": stats})
    assert speaks(both, burst, record(LIB, 99, "b", 22))[V23] is both
    assert speaks(record(V23, 100, "a", 21, today=False), burst)[V23] is burst, "today's code counts before that"


def test_a_digest_that_the_ledger_knows_is_todays_code_too(monkeypatch: pytest.MonkeyPatch) -> None:
    known = record(V23, 100, "a", 21, today=False, code={"digest": "aa"})
    other = record(V23, 101, "b", 22, today=False, code={"digest": "bb"})
    says = {"aa": ledger.SAME, "bb": ledger.OTHER}
    monkeypatch.setattr(ledger, "standing", lambda label, problem, digest: says[digest])
    assert speaks(known, other)[V23] is known
    assert (spoken.standing(known), spoken.standing(other)) == (ledger.SAME, ledger.OTHER)


def test_a_library_speaks_from_the_run_of_the_fastest_version() -> None:
    ours, beside, later = record(V23, 100, "a", 21), record(LIB, 99, "a", 21), record(LIB, 90, "b", 22)
    found = speaks(ours, beside, later, record(V24, 130, "b", 22))
    assert found[f"peer/{LIB}"] is beside
    answer = spoken.answer(found.values(), "burst")
    assert answer and (answer.ours, answer.library, answer.of_one_run) == (ours, beside, True)
    assert answer.best is beside and as_ratio(answer.ratio) == "0.990"
    alone = spoken.answer(speaks(record(V23, 100, "c", 23), later).values(), "burst")
    assert alone and alone.library is later and not alone.of_one_run
    assert alone.ratio == pytest.approx(0.9 * LIMITS["c"] / LIMITS["b"])


def test_another_run_counts_only_if_it_is_ahead_by_more_than_runs_differ() -> None:
    ours, beside = record(V23, 100, "a", 22), record(LIB, 110, "a", 22)
    for us, faster in ((99.0, V23), (90.0, V24)):
        answer = spoken.answer(speaks(ours, beside, record(V24, us, "b", 21)).values(), "burst")
        assert answer and answer.ours and answer.ours.kernel.label == faster
    for us, library in ((109.0, beside), (95.0, None)):
        elsewhere = record(FA3, us, "b", 21)
        answer = spoken.answer(speaks(ours, beside, elsewhere).values(), "burst")
        assert answer and answer.library is (library or elsewhere)


def test_code_that_has_changed_since_counts_only_if_it_is_ahead_by_more_than_runs_differ() -> None:
    libraries = record(LIB, 110, "a", 22), record(LIB, 110, "b", 21)
    for us, faster in ((99.0, V23), (90.0, V24)):
        changed = record(V24, us, "b", 21, today=False)
        answer = spoken.answer(speaks(record(V23, 100, "a", 22), changed, *libraries).values(), "burst")
        assert answer and answer.ours and answer.ours.kernel.label == faster
    alone = record(V23, 100, "a", 22, today=False), record(V24, 99, "b", 21, today=False)
    answer = spoken.answer(speaks(*alone, *libraries).values(), "burst")
    assert answer and answer.ours is alone[1], "of changed code alone, the fastest"


def test_the_pick_and_the_version_are_one_and_a_tuned_one_is_another() -> None:
    picked = record(V23, 100, "a", 22, requested="dispatch", picked_by="dispatch")
    found = speaks(record(V23, 90, "b", 21), picked, record(V23, 95, "c", 21, requested="tuned"))
    assert found == {V23: picked, f"{V23} (tuned)": found[f"{V23} (tuned)"]}
    knobs = [record(V23, 95, "c", 21, requested=asked) for asked in ({"b": 1, "a": 2}, {"a": 2, "b": 1})]
    assert spoken.name(knobs[0]) == spoken.name(knobs[1]) == f"{V23} (a=2, b=1)"
    fixed = record(V23, 50, "a", 22, requested={"split_tokens": 8}, picked_by="fixed_split")
    answer = spoken.answer(speaks(picked, fixed).values(), "burst")
    assert answer and answer.ours is picked, "the fixed-split mode runs the same versions"


def test_a_retired_version_answers_only_where_no_other_was_timed() -> None:
    gone, live = record(GONE, 50, "a", 21), record(V23, 100, "a", 21)
    for records, ours in (((gone, live), live), ((gone,), gone)):
        answer = spoken.answer(speaks(*records).values(), "burst")
        assert answer and answer.ours is ours
    assert spoken.live(record(LIB, 1, "a", 21)) and not spoken.live(gone)


def test_what_is_wrong_now_and_what_was_timed_for_something_else_answer_nothing() -> None:
    answer = spoken.answer(speaks(record(V23, 100, "a", 21), record(V24, 110, "a", 21)).values(), "burst", {V23})
    assert answer and answer.ours and answer.ours.kernel.label == V24
    aside = record(V23, 90, "b", 22, experiment="one_turn")
    assert spoken.speaking([aside]) == [] and spoken.speaking([aside], aside=True) == [aside]
    assert spoken.answer([], "burst") is None


def test_speaking_twice_says_the_same() -> None:
    records = [record(V23, 100, "a", 21), record(V23, 99, "b", 22), record(LIB, 99, "a", 21), record(LIB, 98, "b", 22)]
    once = spoken.speaking([*records, record(V24, 97, "c", 22)])
    assert spoken.speaking(once) == once


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (0.998, "0.998"), (0.9996, "0.9996"), (0.99996, "0.99996"), (1.0, "1.00"), (1 - 1e-9, "1.00"), (1.0004, "1.00"),
        (1.05, "1.05"), (12.34, "12.3"), (123.4, "123"), (0.0501, "0.0501"), (None, "-"), (float("nan"), "-"),
    ],
)  # fmt: skip
def test_a_ratio_under_1_reads_under_1(ratio: float | None, text: str) -> None:
    assert as_ratio(ratio) == text
    assert ratio is None or ratio != ratio or ratio > 1 - 1e-6 or float(text) < 1
