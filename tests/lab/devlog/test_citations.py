"""Figures of a text against the records beside them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_var3.lab.devlog import values
from mla_var3.lab.devlog.citations import check_text, has_figure
from mla_var3.lab.devlog.evidence import apart, parse
from mla_var3.lab.devlog.segments import without_comments

FAST, SLOW, COMPILED = "aaaa11112222", "bbbb33334444", "cccc55556666"
Records = dict[str, dict[str, Any]]


def messages(text: str, records: Records, require: Any = "all") -> list[str]:
    """What is wrong with a page; the comments of the text stand in the list beside it."""
    page, lines = apart(text)
    return [f"{f.line}: {f.message}" for f in check_text(page, records, require=require, evidence=parse(lines))]


# 2·128·128·4096·1088 FLOPs in 220.2 us are 663.2 TFLOP/s; the limit is 181.9 us, and 181.9 / 220.2 is 82.6 %.
@pytest.mark.parametrize(
    "text",
    [
        f"220.2 us <!-- r:{FAST} burst -->",
        f"220 us <!-- r:{FAST} burst -->",
        f"0.220 ms <!-- r:{FAST} burst -->",
        f"220.20 µs <!-- r:{FAST} time_us.burst.median -->",
        f"from 219.2 to 221.2 us <!-- r:{FAST} burst.p10 burst.p90 -->",
        f"220.2 / 264.2 us <!-- r:{FAST} burst sustained -->",
        f"663.2 TFLOP/s <!-- r:{FAST} burst.tflops -->",
        f"82.6 % of its limit, 181.9 us <!-- r:{FAST} burst.of_limit burst.limit -->",
        f"82.6% of the {803} TFLOP/s of cuBLAS <!-- r:{FAST} burst.of_matmul burst.matmul -->",
        f"2.90 TB/s of 4640 GB/s <!-- r:{FAST} burst.gbps burst.read -->",
        f"168 registers, 232,448 bytes or 227 KB <!-- r:{FAST} resources.registers resources.smem resources.smem -->",
        f"232 KB <!-- r:{FAST} resources.smem --> are 227 KiB <!-- r:{FAST} resources.smem -->",
        f"12 HGMMA <!-- r:{FAST} resources.instructions.HGMMA --> and an error of 3.1e-4 <!-- r:{FAST} error.out -->",
        f"1.14x <!-- r:{FAST} vs {SLOW} burst.speedup -->, or 113.5 % <!-- r:{FAST} vs r:{SLOW} burst.speedup -->",
        f"1.135× <!-- r:{FAST} vs {SLOW} burst.limit_speedup -->",
        f"9.2 us of host time <!-- r:{FAST} host -->",
        f"231.0 us in the search <!-- r:{FAST} tuning.trials.1.time_us -->",
        f"220.2 us <!-- r:{FAST[:6]} burst -->",
        f"a figure at the end of a line, 220.2 us<!-- r:{FAST} burst -->,\nand its record before the next",
        f"a citation over two lines, 220.2 us <!-- r:{FAST}\nburst -->",
        f"220.2 us<!--r:{FAST} burst-->.",
        f"It was compiled <!-- r:{COMPILED} -->.",
        "b128 s1 h128 t4096, tiles of 64×512, 8 warps, version 4.8.1, 2026-11-21, sm_90a",
        "A citation is written as `<!-- r:ID burst -->`.",
        "<!-- 999 us -->",
        "<!--\n999 us [r:ID burst]\n-->",
        "It was written as `[r:ID burst]`.",
        "It is not closed: `<!-- r:ID burst`.",
        "```python\nt = '999 us'\n```",
        "[text](https://example.org/300us/20%20)",
    ],
)
def test_agrees(text: str, records: Records) -> None:
    assert messages(text, records) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("It takes 220.2 us.", "220.2 us has no record"),
        ("fast:\n220.2\nus", "2: 220.2 us has no record"),
        ("- 220 us", "220 us has no record"),
        ("17 % better", "17 % has no record"),
        ("1.2x faster", "1.2x has no record"),
        ("227 KB of shared memory", "227 KB has no record"),
        ("168 registers", "168 registers has no record"),
        ("```\n220 us\n```", "2: 220 us has no record"),
        ("one line\n\n300 us/call", "3: 300 us has no record"),
        (f"`220.2 us <!-- r:{FAST} burst -->`", "220.2 us has no record"),
        (f"221.0 us <!-- r:{FAST} burst -->", f"221.0 us differs from its record: burst of {FAST} is 220.20 us"),
        (f"220.21 us <!-- r:{FAST} burst -->", "differs"),
        (f"255.9 / 264.2 us <!-- r:{FAST} burst sustained -->", "255.9 us differs"),
        (f"82.6 % <!-- r:{FAST} burst.of_read -->", f"differs from its record: burst.of_read of {FAST} is"),
        (f"13 % <!-- r:{FAST} vs {SLOW} burst.speedup -->", f"burst.speedup of {FAST} vs {SLOW} is 113.53 %"),
        (f"220.2 GB/s <!-- r:{FAST} burst -->", f"220.2 GB/s differs from its record: burst of {FAST} is 220.2 us"),
        (f"220.2 us 663.2 TFLOP/s <!-- r:{FAST} burst.tflops -->", "220.2 us has no record"),
        (f"220.2 us <!-- r:{FAST} burst sustained -->", f"no figure for sustained of {FAST}, 264.24 us"),
        ("220.2 us <!-- r:0000aaaa1111 burst -->", "record 0000aaaa1111 does not exist in results/"),
        ("220.2 us <!-- r:aaa burst -->", "record aaa does not exist"),
        (f"220.2 us <!-- r:{FAST} brust -->", "the record has no 'brust'"),
        (f"220.2 us <!-- r:{FAST} burst.tflop -->", "'burst.tflop' is unknown; there are: burst, burst.p10"),
        (f"220.2 us <!-- r:{FAST} vs {SLOW} burst -->", "compares nothing; of two records there are: burst.speedup"),
        (f"220.2 us <!-- r:{COMPILED} burst -->", "it has no time: its status is compiled"),
    ],
)
def test_disagrees(text: str, message: str, records: Records) -> None:
    found = messages(text, records)
    assert len(found) == 1, found
    assert message in found[0]


def test_figures_stand_in_the_order_of_their_expressions(records: Records) -> None:
    assert messages(f"264.2 / 220.2 us <!-- r:{FAST} burst sustained -->", records) == [
        "1: 220.2 us has no record: name it in the .records file beside the page",
        f"2: its block has no figure for burst of {FAST}, 220.2 us",
    ]


@pytest.mark.parametrize(
    "text",
    [
        f"220.2 us <!-- r:{FAST} burst -->",
        f"220.2 us <!-- r:{FAST} burst",
        f"220.2 us [r:{FAST} burst]",
        "220.2 us <!-- r:  -->",
        f"| 220.2 us <!-- r:{FAST} burst --> |",
    ],
)
def test_a_page_has_no_citation_in_its_text(text: str, records: Records) -> None:
    """Whether or not it is the right one."""
    said = [f.message for f in check_text(text, records, require="none")]
    assert said == ["a citation stands in the .records file beside the page, not in a comment: devlog cite writes it"]


def test_beginning_of_two_ids_is_ambiguous(records: Records) -> None:
    records["aaaa1111ffff"] = {**records[FAST], "id": "aaaa1111ffff"}
    (found,) = messages("220.2 us <!-- r:aaaa1111 burst -->", records)
    assert "ambiguous: aaaa11112222, aaaa1111ffff" in found


def test_two_problems_have_no_speedup(records: Records) -> None:
    records[SLOW]["problem"] = {**records[SLOW]["problem"], "b": 64}
    (found,) = messages(f"1.14x <!-- r:{FAST} vs {SLOW} burst.speedup -->", records)
    assert "differ in their problem" in found


TABLE = """| cell | burst (us) | TFLOP/s | registers | note |
| --- | --- | --- | --- | --- |
| b128 h128 | {us} | 663.2 | 168 <!-- r:aaaa11112222 burst burst.tflops resources.registers --> | 8 warps |
"""


def test_table_columns_take_their_unit_from_the_header(records: Records) -> None:
    assert messages(TABLE.format(us="220.2"), records) == []
    (found,) = messages(TABLE.format(us="230.2"), records)
    assert found.startswith("3: 230.2 us differs")


def test_table_without_citation(records: Records) -> None:
    found = messages(without_comments(TABLE.format(us="220.2")), records, "tables")
    assert found == [
        "3: 220.2 us has no record: name it in the .records file beside the page",
        "3: 663.2 TFLOP/s has no record: name it in the .records file beside the page",
        "3: 168 registers has no record: name it in the .records file beside the page",
    ]


def test_names_of_a_problem_are_no_units(records: Records) -> None:
    assert messages("| b | s | h | x |\n| --- | --- | --- | --- |\n| 128 | 1 | 64 | 3 |\n", records) == []


def test_prose_may_stand_alone_where_only_tables_are_held(records: Records) -> None:
    assert messages("It starts in 0.5 s.", records, "tables") == []
    assert len(messages(f"It takes 1 us <!-- r:{FAST} burst -->.", records, "none")) == 1


def test_figures_of_a_text() -> None:
    assert has_figure("from 5 to 4 us")
    assert not has_figure("faster by a third, on 132 SMs")


@given(st.floats(1e-3, 1e6), st.integers(0, 4), st.integers(-3, 3).filter(bool))
def test_rounded_figure_passes_and_its_neighbours_do_not(number: float, decimals: int, off: int) -> None:
    value = values.Value(number, "time")
    shown = f"{number:.{decimals}f}"
    assert values.shown_as(value, shown, "us")
    other = f"{float(shown) + off * 10.0**-decimals * 1.01:.{decimals}f}"
    assert not values.shown_as(value, other, "us") or abs(float(other) - number) <= 0.5000011 * 10.0**-decimals
