"""What a sweep says at its end: failures first, one answer a cell, two languages beside each other."""

from __future__ import annotations

import io
from typing import Any

import pytest

import made_up
from mla_var3.catalogue import spoken
from mla_var3.lab.report import tables
from mla_var3.lab.sweep import telling
from mla_var3.record import Record
from mla_var3.workload.decode import MlaProblem

CELL, OTHER = MlaProblem(b=128, s=1, h=16, t=4096), MlaProblem(b=1, s=1, h=16, t=4096)


def made(label: str, us: float, problem: MlaProblem = CELL, limit: float = 50.0, **fields: Any) -> Record:
    """A timed record of a version; equal limits are of one run."""
    return made_up.record(label, us, problem, limit=limit, **{"id": f"{label}-{us}-{problem.label}", **fields})


def shown(table: Any) -> str:
    stream = io.StringIO()
    tables.show(table, stream)
    return stream.getvalue()


V0, V23, CUTILE, PEER = "cute-dsl/flash_mla", "cute-dsl/flash_mla_v23", "cutile-dsl/flash_mla", "peer/flash_mla_lib"


def test_an_answer_under_1_reads_under_1() -> None:
    table, worst = telling.answer([CELL], [made(V23, 100.0), made(PEER, 99.9)], None, "Fastest")
    assert f"0.999 times as fast as {PEER}" in shown(table) and worst is not None


def test_a_kernel_that_is_wrong_now_is_no_answer_and_that_is_said() -> None:
    records = [made(V23, 100.0), made(V0, 120.0), made(PEER, 110.0), made(V23, 100.0, OTHER)]
    text = shown(telling.answer([CELL, OTHER], records, None, "Fastest", wrong={V23})[0])
    lines = text.splitlines()
    (row,) = [line for line in lines if line.strip().startswith("b128_")]
    assert V0 in row and V23 not in row and "0.917 times as fast" in row
    (row,) = [line for line in lines if line.strip().startswith("b1_")]
    assert "none was timed" in row and V23 not in row
    assert f"left out, for what they are now is wrong or does not compile: {V23}" in text


def test_times_of_two_runs_and_of_other_code_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    from mla_var3.catalogue import ledger

    records = [made(V23, 100.0), made(PEER, 120.0, limit=60.0)]
    text = shown(telling.answer([CELL], records, None, "Fastest")[0])
    assert "1.00 times as fast as peer/flash_mla_lib ~" in text and "each compared with the limit of its own" in text
    assert "*" not in text
    monkeypatch.setattr(spoken, "standing", lambda record: ledger.OTHER)
    assert f"{V23} *" in shown(telling.answer([CELL], records, None, "Fastest")[0])


def test_two_languages_stand_beside_each_other_in_every_cell() -> None:
    records = [made(V23, 100.0), made(V0, 130.0), made(CUTILE, 150.0), made(CUTILE, 80.0, OTHER)]
    table = telling.side_by_side([CELL, OTHER], records, ["cutile-dsl", "cute-dsl"], "recorded")
    text = shown(table)
    (row,) = [line.split() for line in text.splitlines() if line.strip().startswith("b128_")]
    assert row == ["b128_s1_h16_t4096", "150.0", "100.0", "1.50", CUTILE, "/", V23]
    (row,) = [line.split() for line in text.splitlines() if line.strip().startswith("b1_")]
    assert row[1:4] == ["80.0", "-", "-"] and row[-3:] == ["none", "was", "timed"]
    assert "over the 1 cells that both were timed in: cute-dsl is 1.500 times as fast" in text
    assert "mla-var3 report --show languages" in text
    assert telling.side_by_side([CELL], [made(PEER, 1.0)], ["cutile-dsl", "cute-dsl"], "recorded") is None


def test_what_failed_is_the_first_thing_to_do_next() -> None:
    lines = telling.then(made(V0, 100.0), [made(V23, 100.0), made(V23, 100.0, OTHER)])
    assert lines[1].split() == ["mla-var3", "check", V23, "what", "is", "wrong"] and "diagnose" in "\n".join(lines)
