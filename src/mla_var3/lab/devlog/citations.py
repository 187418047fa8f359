"""Figures in Markdown, held against the records that they are from.

Which records these are stands beside the page (`evidence`), or, in text that a program writes, in the text itself: an
HTML comment that begins with "r:", behind the figures it covers, in the same list item, paragraph or table row:

    220.2 us <!-- r:3f9c2d1e4a5b burst -->
    220.2 / 255.9 us, 81.3 % of the limit <!-- r:3f9c2d1e4a5b burst sustained burst.of_limit -->
    | b128 h128 t4096 | 220.2 | 663 <!-- r:3f9c2d1e4a5b burst burst.tflops --> |
    1.12x <!-- r:3f9c2d1e4a5b vs 77aa01b2c3d4 burst.speedup -->

It begins no line: Markdown ends a paragraph before a line that a comment begins.

Either names a record (its id, or the first digits of it, six at least) and one expression of `values` for each figure,
in order. An expression with a dimension covers a figure that has a unit; a plain number (a count, an error) any number.
A citation without expressions covers nothing and only says that the record exists. A comment covers the nearest figures
before it; evidence beside the page covers figures of its block in their order, those that it has the values of.

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

from mla_var3.kernel.registry import LANGUAGES, KernelId
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
    strip,
)
from mla_var3.lab.devlog.values import Record, Unknown, Value

Require = Literal["all", "tables", "none"]

_BODY = re.compile(r"\s*(?P<id>[^\s/]+)(?:\s+vs\s+(?:r:)?(?P<other>\S+))?(?P<expressions>(?:\s+\S+)*)\s*")
_MIN_PREFIX = 6
#: The dimension of a number that a file has: it is compared as it is written, in whatever unit.
AS_WRITTEN = "as written"
_KERNELS = re.compile(rf"(?<![\w/.-])(?:{'|'.join(LANGUAGES)})/[a-z]\w*")


def cite(names: str, expressions: Iterable[str] = ()) -> str:
    """A citation as it is written. names: an id, or "A vs B"."""
    return f"<!-- r:{' '.join([names, *expressions])} -->"


# ---------------------------------------------------------------- checking
def cited_ids(markdown: str) -> set[str]:
    """Ids, or beginnings of ids, of every record that a text cites."""
    bodies = (_BODY.fullmatch(m["body"]) for s in segments(markdown) for m in CITATION.finditer(s.text))
    return {i for body in bodies if body for i in (body["id"], body["other"]) if i}


def has_figure(markdown: str) -> bool:
    """Whether a text holds at least one number with a unit."""
    return any(number.unit for segment in segments(markdown) for number in numbers_of(segment))


def check_text(
    markdown: str,
    records: Mapping[str, Record],
    *,
    require: Require | Callable[[int], Require] = "all",
    first_line: int = 1,
    evidence: Evidence | None = None,
    root: Path | None = None,
) -> list[Finding]:
    """Compares a text's figures with the records it cites; no findings means that all agree.

    records: by id. require: which figures need a citation, "all", those in "tables", or "none", of the whole text or by
    line; a citation is compared in any case. first_line: number of the text's first line in its file. evidence: what
    stands beside the page; root: the folder that its paths of files begin at.
    """
    blocks = list(segments(markdown, first_line))
    beside, findings = bind(blocks, evidence) if evidence is not None else ({}, [])
    for place, segment in enumerate(blocks):
        numbers = numbers_of(segment)
        previous = 0
        findings += _malformed(segment, numbers)
        for match in CITATION.finditer(segment.text):
            before = [n for n in numbers if previous <= n.start < match.start()]
            line = segment.line(match.start())
            findings += (Finding(line, message) for message in _check_citation(match, before, records))
            previous = match.end()
            if segment.table:
                findings += (Finding(line, m) for m in _misnamed(match["body"], segment.text[: match.start()], records))
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


# ---------------------------------------------------------------- citations in the text
def _malformed(segment: Segment, numbers: list[Number]) -> Iterator[Finding]:
    """Citations in brackets, comments that are not closed, and citations that begin a line; the numbers before the
    first two count as covered, as one finding is enough."""
    closed = {match.start() for match in CITATION.finditer(segment.text)}
    wrong = [(m.start(), f"{m[0]} is written {cite(m[1].strip())}") for m in BRACKETS.finditer(segment.text)]
    wrong += [
        (m.start(), f"this citation is not closed: write {cite('ID', ['expression', '...'])}")
        for m in UNCLOSED.finditer(segment.text)
        if m.start() not in closed
    ]
    for start, message in wrong:
        yield Finding(segment.line(start), message)
        for number in numbers:
            number.covered |= number.start < start
    for start in closed:
        first = max((at for at, _ in segment.starts if at <= start), default=0)
        if re.fullmatch(r"\s*(?:(?:[-*+]|\d+[.)])\s+)?", segment.text[first:start]):
            yield Finding(
                segment.line(start),
                "a comment that begins a line ends the paragraph: put the citation behind its figure",
            )


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


def _check_citation(match: re.Match[str], before: list[Number], records: Mapping[str, Record]) -> Iterator[str]:
    """What is wrong with one citation; marks the numbers before it that it covers."""
    shown = _shown(match)
    try:
        body = _BODY.fullmatch(match["body"])
        if body is None:
            forms = " or ".join(cite(names, ["expression", "..."]) for names in ("ID", "ID vs ID"))
            raise Unknown(f"{match[0]} is no citation: write {forms}")
        record = find_record(records, body["id"])
        other = find_record(records, body["other"]) if body["other"] else None
    except Unknown as error:
        yield str(error)
        for number in before:  # one finding is enough for a citation that points nowhere
            number.covered = True
        return
    evaluated: list[tuple[str, Value | None]] = []
    for expression in body["expressions"].split():
        try:
            evaluated.append((expression, values.evaluate(expression, record, other)))
        except Unknown as error:
            yield f"{shown}: {error}"
            evaluated.append((expression, None))
    left = list(before)
    pairs: list[tuple[Number, str, Value]] = []
    for expression, value in reversed(evaluated):
        plain = value is not None and value.dimension == ""
        while left and not (left[-1].unit or plain):
            left.pop()
        if not left:
            have = sum(bool(n.unit) for n in before)
            yield f"{shown} has no figure for {expression} before it: {len(evaluated)} expressions, {have} figures"
            return
        number = left.pop()
        number.covered = True
        if value is not None:
            pairs.append((number, expression, value))
    yield from _differences(reversed(pairs), shown)


def _shown(match: re.Match[str]) -> str:
    """A citation in a message: without the marks of a comment."""
    return f"r:{' '.join(match['body'].split())}"


def _misnamed(cited: str, before: str, records: Mapping[str, Record]) -> Iterator[str]:
    """Whether the kernels that a row names before a citation lack the record's. An unknown record is told elsewhere."""
    body, named = _BODY.fullmatch(cited), _KERNELS.findall(strip(before))
    if not body or not named:
        return
    try:
        kernel = find_record(records, body["id"])["kernel"]
    except Unknown:
        return
    label = KernelId(*(kernel[name] for name in ("language", "layer", "design", "version"))).label
    if label not in named:
        yield f"r:{' '.join(cited.split())} is a record of {label}, and its row names {', '.join(named)}"


def _differences(pairs: Iterable[tuple[Number, str, Value]], citation: str) -> Iterator[str]:
    for number, expression, value in pairs:
        if values.shown_as(value, number.text, number.unit):
            continue
        if values.dimension_of(number.unit) != value.dimension and number.unit not in ("%", "x", "×"):
            unit = values.BASE_UNIT.get(value.dimension, "no unit")
            yield f"{number} is not in the unit of {expression}, whose value is in {unit}: {citation}"
        else:
            yield f"{number} differs from its record: {expression} is {_like(value, number)} in {citation}"


def _like(value: Value, number: Number) -> str:
    """The record's value in the unit that the text uses, where that makes sense."""
    if number.unit in ("%", "x", "×") and value.dimension in ("ratio", ""):
        return f"{values.write(value, number.unit, 5)}{' %' if number.unit == '%' else number.unit}"
    if number.unit and values.dimension_of(number.unit) == value.dimension:
        return f"{values.write(value, number.unit, 5)} {number.unit}"
    return value.text()
