"""Tables on the terminal."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from rich.table import Table

from mla_var3.cli.compare import WIDTH
from mla_var3.lab.naming import cell_name
from mla_var3.lab.report import tables
from mla_var3.lab.sweep import telling
from mla_var3.record import Record
from mla_var3.workload.sparse_decode import SparseProblem

LONG = SparseProblem(
    b=512, s=6, h=128, layout="v41", topk=128, extra=512, page=256, sink=True, extra_t=4096, extra_page=64,
    extra_layout="v41_fp4", strided=True,
)  # fmt: skip


def test_stages_of_one_name_are_told_apart() -> None:
    stages = [{"name": name, "registers": count} for name, count in (("main", 168), ("combine", 40), ("combine", 56))]
    row = tables.Compiled("cute-dsl/flash_mla_v23", "b1", "h200", {"stages": stages}, 1.0, [])
    merged = tables._merged([row])
    assert [one.kernel.partition(": ")[2] for one in merged] == ["combine 1", "combine 2", "main"]
    # One compilation makes all of them: its time stands once.
    assert [one.seconds for one in merged] == [None, None, 1.0]


def test_code_size_and_compile_time_are_columns(capsys: pytest.CaptureFixture[str]) -> None:
    counts = {"instructions": {"total": 128}}
    rows = [
        tables.Compiled("a/old", "one", "h200", counts),  # recorded before the size of its code was
        tables.Compiled("a/new", "one", "h200", {"code_bytes": 136832, **counts}, 16.04),
    ]
    tables.show(tables.resources(rows))
    out = capsys.readouterr().out.splitlines()
    (head,) = (line for line in out if "code KiB" in line)
    new, old = (line for line in out if "a/" in line)
    at = head.index("code KiB") + len("code KiB")
    assert (new[:at].split()[-1], old[:at].split()[-1]) == ("133.6", "2.0")
    at = head.index("compile s") + len("compile s")
    assert (new[:at].split()[-1], old[:at].split()[-1]) == ("16.0", "-")


@pytest.mark.parametrize(
    "table",
    [
        lambda records: telling.answer([LONG], records, None, "Fastest")[0],
        lambda records: tables.comparison(records, "Recorded", dated=True),
        lambda records: tables.versus(records, *(r.kernel.label for r in records[:2])),
    ],
    ids=["answer", "comparison", "versus"],
)
def test_long_names_go_on_in_the_next_line_where_a_table_is_too_wide(
    table: Callable[[list[Record]], Table], make: Callable[..., Record], capsys: pytest.CaptureFixture[str]
) -> None:
    records: list[Any] = [
        make("cute-dsl/sparse_mla", 12_345.6, problem=LONG),
        make("cute-dsl/sparse_mla_v2", 123_456.7, problem=LONG),
        make("peer/torch_compile_merge_partials", 123_456.7, problem=LONG, day="2026-11-20"),
    ]
    tables.show(table(records))
    whole = capsys.readouterr().out
    assert cell_name(LONG) in whole and max(map(len, whole.splitlines())) > WIDTH
    tables.show(table(records), most=WIDTH)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= WIDTH
    # Nothing is cut: what is printed is the same.
    assert sorted(re.sub(r"[\s─]", "", out)) == sorted(re.sub(r"[\s─]", "", whole))
