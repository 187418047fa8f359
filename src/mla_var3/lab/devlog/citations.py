"""Figures in Markdown, held against the records that they are from.

Which records these are stands beside the page (`evidence`). A program that writes text with figures puts each record
behind them first, as an HTML comment (`cite`), and `evidence.apart` takes the comments out of it and makes the list;
a comment that is left in a page is a mistake.

A line of evidence names a record (its id, or the first digits of it, six at least) and one expression of `values` for
each figure, in order. An expression with a dimension covers a figure that has a unit; a plain number (a count, an
error) any number. A line without expressions covers nothing and only says that the record exists. The lines of a block
cover the figures of the block in their order, those that they have the values of.

A figure is a number with a unit of `values.UNITS`, or a number in a table column whose header names one: "burst (us)",
"TFLOP/s". The record's value, rounded to the digits that are written, must be what is written. A line of a file that is
no record (a trace) is cited as "FILE:LINE number ...": the numbers must stand in that line (FILE:FIRST-LAST: in one of
those lines), `A/B` is a quotient of two of them, and the figure is one of them, rounded.

A table row that names kernels (cute-dsl/flash_mla_v1) names that of each record that it cites.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

from mla_var3.catalogue.registry import LANGUAGES, KernelId
from mla_var3.lab.devlog import values
from mla_var3.lab.devlog.evidence import Cited, Evidence, bind
from mla_var3.lab.devlog.segments import (
    BRACKETS,
    CITATION,
    UNCLOSED,
    Finding,
    Number,
    Segment,
    numbers_of,
    segments,
)
from mla_var3.lab.devlog.values import Record, Unknown, Value

Require = Literal["all", "tables", "none"]

_BODY = re.compile(r"\s*(?P<id>[^\s/]+)(?:\s+vs\s+(?:r:)?(?P<other>\S+))?(?P<expressions>(?:\s+\S+)*)\s*")
_MIN_PREFIX = 6
#: The dimension of a number that a file has: it is compared as it is written, in whatever unit.
AS_WRITTEN = "as written"
_KERNELS = re.compile(rf"(?<![\w/.-])(?:{'|'.join(LANGUAGES)})/[a-z]\w*")


def cite(names: str, expressions: Iterable[str] = ()) -> str:
    """A citation in text that a program writes. names: an id, or "A vs B"."""
    return f"<!-- r:{' '.join([names, *expressions])} -->"


# ---------------------------------------------------------------- checking
def has_figure(markdown: str) -> bool:
    """Whether a text holds at least one number with a unit."""
    return any(number.unit for segment in segments(markdown) for number in numbers_of(segment))


def check_text(
    markdown: str,
    records: Mapping[str, Record],
    *,
    require: Require | Callable[[int], Require] = "all",
    evidence: Evidence | None = None,
    root: Path | None = None,
) -> list[Finding]:
    """Compares a page's figures with the records beside it; no findings means that all agree.

    records: by id. require: which figures need a record, "all", those in "tables", or "none", of the whole page or by
    line; what stands beside the page is compared in any case. evidence: the list beside the page; root: the folder that
    its paths of files begin at.
    """
    blocks = list(segments(markdown))
    beside, findings = bind(blocks, evidence) if evidence is not None else ({}, [])
    where = "the .records file beside the page" if evidence is None or evidence.path is None else evidence.path.name
    for place, segment in enumerate(blocks):
        numbers = numbers_of(segment)
        findings += _in_the_text(segment, where)
        findings += _check_evidence(segment, numbers, beside.get(place, []), records, root)
        needs = require if isinstance(require, str) else require(segment.starts[0][1])
        if needs == "all" or (needs == "tables" and segment.table):
            findings += (
                Finding(segment.line(n.start), f"{n} has no record: name it in the .records file beside the page")
                for n in numbers
                if n.unit and not n.covered
            )
    return sorted(findings, key=lambda f: f.line)


# ---------------------------------------------------------------- evidence beside the page
def _check_evidence(
    segment: Segment, numbers: list[Number], cited: Sequence[Cited], records: Mapping[str, Record], root: Path | None
) -> Iterator[Finding]:
    """What is wrong with the evidence of one block; marks the numbers that it covers."""
    expected: list[tuple[Cited, str, Value]] = []
    broken = False
    for line in cited:
        found, messages = _values_of(line.body, records, root)
        broken |= bool(messages)
        yield from (Finding(line.line, message, line.path) for message in messages)
        expected += [(line, expression, value) for expression, value in found]
        if segment.table:
            said = _misnamed(line.body, segment.text, records)
            yield from (Finding(line.line, message, line.path) for message in said)
    if broken:  # one finding is enough for evidence that cannot be read
        for number in numbers:
            number.covered = True
        return
    pairs = _aligned([value for _, _, value in expected], numbers)
    for _, place in pairs:
        numbers[place].covered = True
    # What agrees with nothing is between two pairs that do: figures there are those that were meant.
    edges = [(-1, -1), *pairs, (len(expected), len(numbers))]
    for (left, first), (right, last) in pairwise(edges):
        figures = [n for n in numbers[first + 1 : last] if n.unit]
        for line, expression, value in expected[left + 1 : right]:
            shown = f"{expression} of {line.source}"
            if figures:
                number = figures.pop(0)
                number.covered = True
                message = f"{number} differs from its record: {shown} is {_like(value, number)}"
                yield Finding(segment.line(number.start), message)
            else:
                message = f"its block has no figure for {shown}, {value.text()}"
                yield Finding(line.line, message, line.path)


def _aligned(expected: Sequence[Value], numbers: Sequence[Number]) -> list[tuple[int, int]]:
    """The longest list of (place in `expected`, place in `numbers`), both rising, of values that are as written."""
    best = [[0] * (len(numbers) + 1) for _ in range(len(expected) + 1)]
    agree = [[_agrees(value, number) for number in numbers] for value in expected]
    for i in reversed(range(len(expected))):
        for j in reversed(range(len(numbers))):
            best[i][j] = max(best[i + 1][j], best[i][j + 1], agree[i][j] + best[i + 1][j + 1] if agree[i][j] else 0)
    found, i, j = [], 0, 0
    while i < len(expected) and j < len(numbers):
        if agree[i][j] and best[i][j] == 1 + best[i + 1][j + 1]:
            found.append((i, j))
            i, j = i + 1, j + 1
        elif best[i + 1][j] >= best[i][j + 1]:
            i += 1
        else:
            j += 1
    return found


def _agrees(value: Value, number: Number) -> bool:
    if value.dimension == AS_WRITTEN:
        return values.shown_as(Value(value.number), number.text, "")
    return (bool(number.unit) or value.dimension == "") and values.shown_as(value, number.text, number.unit)


def _values_of(
    body: str, records: Mapping[str, Record], root: Path | None
) -> tuple[list[tuple[str, Value]], list[str]]:
    """([(expression, its value)], what is wrong) of one line of evidence."""
    found: list[tuple[str, Value]] = []
    words = body.split()
    if "/" in words[0]:
        try:
            return [(word, Value(_of_file(words[0], word, root), AS_WRITTEN)) for word in words[1:]], []
        except Unknown as error:
            return [], [str(error)]
    match = _BODY.fullmatch(body)
    try:
        if match is None:
            raise Unknown(f"{body!r} is no evidence: write ID expression ..., ID vs ID expression ..., FILE:LINE ...")
        record = find_record(records, match["id"])
        other = find_record(records, match["other"]) if match["other"] else None
    except Unknown as error:
        return [], [str(error)]
    messages = []
    for expression in match["expressions"].split():
        try:
            found.append((expression, values.evaluate(expression, record, other)))
        except Unknown as error:
            messages.append(f"{' '.join(words)}: {error}")
    return found, messages


def _of_file(place: str, expression: str, root: Path | None) -> float:
    """A number that a line of a file has, or the quotient of two. place: FILE:LINE or FILE:FIRST-LAST."""
    match = re.fullmatch(r"(?P<file>[^:]+):(?P<first>\d+)(?:-(?P<last>\d+))?", place)
    if match is None:
        raise Unknown(f"{place} names no line: write FILE:LINE, or FILE:FIRST-LAST")
    path = (root or Path()) / match["file"]
    if not path.is_file():
        raise Unknown(f"file {match['file']} does not exist")
    first = int(match["first"])
    lines = path.read_text(encoding="utf-8").split("\n")[first - 1 : int(match["last"] or first)]
    have = set(re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?", " ".join(lines)))
    terms = expression.split("/")
    for term in terms:
        if term.lstrip("-") not in have:
            raise Unknown(f"{place} has no number {term}")
    numbers = [float(term.replace(",", "")) for term in terms]
    if len(numbers) > 2:
        raise Unknown(f"{expression} is no quotient of two numbers")
    return numbers[0] / numbers[1] if len(numbers) == 2 else numbers[0]


def _in_the_text(segment: Segment, where: str) -> Iterator[Finding]:
    """A citation, or what looks like one, that stands in the page itself."""
    for pattern in (CITATION, UNCLOSED, BRACKETS):
        match = pattern.search(segment.text)
        if match:
            message = f"a citation stands in {where}, not in a comment: devlog cite writes it"
            yield Finding(segment.line(match.start()), message)
            return


def find_record(records: Mapping[str, Record], name: str) -> Record:
    """The record with that id, or the only one whose id begins so. Raises `Unknown`."""
    if name in records:
        return records[name]
    close = [i for i in records if i.startswith(name)] if len(name) >= _MIN_PREFIX else []
    if len(close) > 1:
        raise Unknown(f"record {name} is ambiguous: {', '.join(sorted(close))}")
    if not close:
        raise Unknown(f"record {name} does not exist in results/")
    return records[close[0]]


def _misnamed(cited: str, row: str, records: Mapping[str, Record]) -> Iterator[str]:
    """Whether the kernels that a row names lack the record's. An unknown record is told elsewhere."""
    body, named = _BODY.fullmatch(cited), _KERNELS.findall(row)
    if not body or not named:
        return
    try:
        kernel = find_record(records, body["id"])["kernel"]
    except Unknown:
        return
    label = KernelId(*(kernel[name] for name in ("language", "layer", "design", "version"))).label
    if label not in named:
        yield f"{' '.join(cited.split())} is a record of {label}, and its row names {', '.join(named)}"


def _like(value: Value, number: Number) -> str:
    """The record's value in the unit that the text uses, where that makes sense."""
    if number.unit in ("%", "x", "×") and value.dimension in ("ratio", ""):
        return f"{values.write(value, number.unit, 5)}{' %' if number.unit == '%' else number.unit}"
    if number.unit and values.dimension_of(number.unit) == value.dimension:
        return f"{values.write(value, number.unit, 5)} {number.unit}"
    return value.text()
