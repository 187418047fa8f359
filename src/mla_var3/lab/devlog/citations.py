"""Figures in Markdown and the records beside them.

A citation is an HTML comment that begins with "r:", so that a rendered page shows the figure alone. It stands after the
figures it covers, in the same list item, paragraph or table row:

    220.2 us <!-- r:3f9c2d1e4a5b burst -->
    220.2 / 255.9 us, 81.3 % of the limit <!-- r:3f9c2d1e4a5b burst sustained burst.of_limit -->
    | b128 h128 t4096 | 220.2 | 663 <!-- r:3f9c2d1e4a5b burst burst.tflops --> |
    1.12x <!-- r:3f9c2d1e4a5b vs 77aa01b2c3d4 burst.speedup -->

It begins no line: Markdown ends a paragraph before a line that a comment begins.

It names a record (its id, or the first digits of it, six at least) and one expression of `values` for each figure, in
order. An expression with a dimension covers the nearest figure before it that has a unit; a plain number (a count, an
error) the nearest number. A citation without expressions covers nothing and only says that the record exists.

A figure is a number with a unit of `values.UNITS`, or a number in a table column whose header names one: "burst (us)",
"TFLOP/s". The record's value, rounded to the digits that are written, must be what is written. Fenced blocks of code,
other HTML comments and link targets hold no figures; inline code holds figures, and no citations.

A table row that names kernels (cute-dsl/flash_mla_v1) names that of each record that it cites.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mla_var3.kernel.registry import LANGUAGES, KernelId
from mla_var3.lab.devlog import values
from mla_var3.lab.devlog.values import Record, Unknown, Value

Require = Literal["all", "tables", "none"]

_NUMBER = r"(?<![\w.,#§])[-+−]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?"
_ATTACHED = ("x", "×")  # "1.12x" is a ratio, "64 x 512" and "64x512" are shapes
_SPACED = sorted((re.escape(u) for u in values.UNITS if u not in _ATTACHED), key=len, reverse=True)
_UNIT = rf"(?:\s?(?P<unit>{'|'.join(_SPACED)})|(?P<times>[x×]))(?![\w°×]|/s\b)"
_JOIN = r"\s*(?:/|–|-|to|and|±)\s*"
_FIGURES = re.compile(rf"(?P<numbers>{_NUMBER}(?:{_JOIN}{_NUMBER})*){_UNIT}")
_NUMBERS = re.compile(_NUMBER)
#: A citation; `body` is what stands behind "r:".
CITATION = re.compile(r"<!--\s*r:(?P<body>[^<>]*?)-->")
#: Any other comment, from its beginning to its end or that of the text.
COMMENT = re.compile(r"<!--(?!\s*r:).*?(?:-->|\Z)", re.DOTALL)
# What looks like a citation and is none: a comment that is not closed, and the form in brackets.
_UNCLOSED = re.compile(r"<!--\s*r:")
_BRACKETS = re.compile(r"\[r:([^\]\n]*)\]?")
_BODY = re.compile(r"\s*(?P<id>[^\s/]+)(?:\s+vs\s+(?:r:)?(?P<other>\S+))?(?P<expressions>(?:\s+\S+)*)\s*")
# Header words that are units without parentheses; the others are also names of things (s: query tokens, B, x).
_HEADER_WORDS = frozenset(u for u in values.UNITS if len(u) > 1 or u == "%")
_CODE_FENCES = frozenset(
    ("bash", "sh", "shell", "console", "python", "py", "yaml", "toml", "json", "c", "cpp", "ptx", "diff")
)
_MIN_PREFIX = 6
_KERNELS = re.compile(rf"(?<![\w/.-])(?:{'|'.join(LANGUAGES)})/[a-z]\w*")


@dataclass(frozen=True)
class Finding:
    """What is wrong, and on which line (1 is the first). path: the file, where it is not that of the text."""

    line: int
    message: str
    path: Path | None = None


@dataclass
class _Segment:
    """A run of text inside which figures and citations belong together; `starts` maps offsets to lines."""

    text: str
    starts: list[tuple[int, int]]
    units: dict[int, str] = field(default_factory=dict)  # of a table row: column -> unit that its header names
    table: bool = False

    def line(self, offset: int) -> int:
        return max((line for start, line in self.starts if start <= offset), default=self.starts[0][1])


@dataclass
class _Number:
    start: int
    text: str
    unit: str
    covered: bool = False

    def __str__(self) -> str:
        return f"{self.text}{'' if self.unit in ('', *_ATTACHED) else ' '}{self.unit}"


# ---------------------------------------------------------------- reading Markdown
def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match[0])


def cite(names: str, expressions: Iterable[str] = ()) -> str:
    """A citation as it is written. names: an id, or "A vs B"."""
    return f"<!-- r:{' '.join([names, *expressions])} -->"


def without_comments(markdown: str) -> str:
    """A text without its comments, citations among them, and without the space before each."""
    return re.sub(r"[ \t]*<!--.*?(?:-->|\Z)", "", markdown, flags=re.DOTALL)


def _lines(markdown: str) -> Iterator[tuple[str, bool]]:
    """Each line and whether it lies in a fenced block; code, comments but citations, and link targets are blank."""
    text = COMMENT.sub(_blank, markdown)
    text = re.sub(r"(?<=\])\([^()\n]*\)|<https?://[^>\s]*>|https?://[^\s<]+", _blank, text)
    # A citation inside inline code shows how one is written; the figures there count as any others.
    text = re.sub(r"(?<!`)`[^`\n]+`(?!`)", lambda m: _strip(m[0]), text)
    fence, code = "", False
    for line in text.split("\n"):
        marker = re.match(r"\s*(```+|~~~+)\s*(\w*)", line)
        if marker and not fence:
            fence, code = marker[1], marker[2] in _CODE_FENCES
            yield "", True
        elif marker and marker[1].startswith(fence) and not marker[2]:
            fence = ""
            yield "", True
        else:
            yield ("" if fence and code else line), bool(fence)


def _strip(text: str) -> str:
    """The text with blanks for citations and for what looks like one."""
    for pattern in (CITATION, _UNCLOSED, _BRACKETS):
        text = pattern.sub(_blank, text)
    return text


def _segments(markdown: str, first_line: int) -> Iterator[_Segment]:
    """Table rows, lines of fenced text, headings, list items and paragraphs, in order."""
    block: list[tuple[int, str]] = []
    header: list[str] | None = None
    units: dict[int, str] = {}

    def flush() -> Iterator[_Segment]:
        if block:
            text, starts = "", []
            for number, line in block:
                starts.append((len(text), number))
                text += line + " "
            yield _Segment(text, starts)
            block.clear()

    lines = list(_lines(markdown))
    for index, (line, fenced) in enumerate(lines):
        number, stripped = first_line + index, line.strip()
        if fenced:
            yield from flush()
            yield _Segment(line, [(0, number)])
        elif stripped.startswith("|"):
            yield from flush()
            if header is None:
                header = [text for _, text in _cells(line)]
                following = lines[index + 1][0] if index + 1 < len(lines) else ""
                titled = re.fullmatch(r"\s*\|[\s:|-]+", following)
                units = {i: u for i, text in enumerate(header) if titled and (u := _header_unit(text))}
                if titled:
                    continue
            yield _Segment(line, [(0, number)], units, table=True)
        else:
            header = None
            if not stripped or re.match(r"(?:#|[-*+]\s|\d+[.)]\s)", stripped):
                yield from flush()
            if stripped:
                block.append((number, line))
    yield from flush()


def _cells(row: str) -> list[tuple[int, str]]:
    """(offset, text) of each cell of a table row; an escaped bar separates nothing."""
    bars = [m.start() for m in re.finditer(r"(?<!\\)\|", row)]
    ends = [*bars[1:], len(row)]
    cells = [(start + 1, row[start + 1 : end]) for start, end in zip(bars, ends, strict=True)]
    return cells[:-1] if len(cells) > 1 and not cells[-1][1].strip() else cells


def _header_unit(text: str) -> str | None:
    """The unit that a column's header names: in parentheses, or as a word that means nothing else."""
    for group in re.findall(r"\(([^)]*)\)", text):
        for word in re.split(r"[,;\s]+", group):
            if word in values.UNITS:
                return str(word)
    return next((word for word in re.split(r"[,;\s]+", text) if word in _HEADER_WORDS), None)


def _numbers(segment: _Segment) -> list[_Number]:
    """Every number of a segment outside its citations, in order, with its unit ("" for none)."""
    text = _strip(segment.text)
    found: dict[int, _Number] = {m.start(): _Number(m.start(), m[0], "") for m in _NUMBERS.finditer(text)}
    for column, (offset, cell) in enumerate(_cells(text) if segment.units else ()):
        for match in _NUMBERS.finditer(cell) if column in segment.units else ():
            start = offset + match.start()
            if start in found:
                found[start].unit = segment.units[column]
    for match in _FIGURES.finditer(text):
        for number in _NUMBERS.finditer(match["numbers"]):
            start = match.start("numbers") + number.start()
            found[start] = _Number(start, number[0], match["unit"] or match["times"])
    return [found[start] for start in sorted(found)]


# ---------------------------------------------------------------- checking
def cited_ids(markdown: str) -> set[str]:
    """Ids, or beginnings of ids, of every record that a text cites."""
    bodies = (_BODY.fullmatch(m["body"]) for s in _segments(markdown, 1) for m in CITATION.finditer(s.text))
    return {i for body in bodies if body for i in (body["id"], body["other"]) if i}


def has_figure(markdown: str) -> bool:
    """Whether a text holds at least one number with a unit."""
    return any(number.unit for segment in _segments(markdown, 1) for number in _numbers(segment))


def check_text(
    markdown: str, records: Mapping[str, Record], *, require: Require = "all", first_line: int = 1
) -> list[Finding]:
    """Compares a text's figures with the records it cites; no findings means that all agree.

    records: by id. require: which figures need a citation, "all", those in "tables", or "none"; a citation is compared
    in any case. first_line: number of the text's first line in its file.
    """
    findings: list[Finding] = []
    for segment in _segments(markdown, first_line):
        numbers = _numbers(segment)
        previous = 0
        findings += _malformed(segment, numbers)
        for match in CITATION.finditer(segment.text):
            before = [n for n in numbers if previous <= n.start < match.start()]
            line = segment.line(match.start())
            findings += (Finding(line, message) for message in _check_citation(match, before, records))
            previous = match.end()
            if segment.table:
                findings += (Finding(line, m) for m in _misnamed(match, segment.text[: match.start()], records))
        if require == "all" or (require == "tables" and segment.table):
            findings += (
                Finding(
                    segment.line(n.start), f"{n} has no record beside it: add {cite('ID', ['expression'])} after it"
                )
                for n in numbers
                if n.unit and not n.covered
            )
    return sorted(findings, key=lambda f: f.line)


def _malformed(segment: _Segment, numbers: list[_Number]) -> Iterator[Finding]:
    """Citations in brackets, comments that are not closed, and citations that begin a line; the numbers before the
    first two count as covered, as one finding is enough."""
    closed = {match.start() for match in CITATION.finditer(segment.text)}
    wrong = [(m.start(), f"{m[0]} is written {cite(m[1].strip())}") for m in _BRACKETS.finditer(segment.text)]
    wrong += [
        (m.start(), f"this citation is not closed: write {cite('ID', ['expression', '...'])}")
        for m in _UNCLOSED.finditer(segment.text)
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


def _check_citation(match: re.Match[str], before: list[_Number], records: Mapping[str, Record]) -> Iterator[str]:
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
    pairs: list[tuple[_Number, str, Value]] = []
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


def _misnamed(match: re.Match[str], before: str, records: Mapping[str, Record]) -> Iterator[str]:
    """Whether the kernels that a row names before a citation lack the record's. An unknown record is told elsewhere."""
    body, named = _BODY.fullmatch(match["body"]), _KERNELS.findall(before)
    if not body or not named:
        return
    try:
        kernel = find_record(records, body["id"])["kernel"]
    except Unknown:
        return
    label = KernelId(*(kernel[name] for name in ("language", "layer", "design", "version"))).label
    if label not in named:
        yield f"{_shown(match)} is a record of {label}, and its row names {', '.join(named)}"


def _differences(pairs: Iterable[tuple[_Number, str, Value]], citation: str) -> Iterator[str]:
    for number, expression, value in pairs:
        if values.shown_as(value, number.text, number.unit):
            continue
        if values.dimension_of(number.unit) != value.dimension and number.unit not in ("%", "x", "×"):
            unit = values.BASE_UNIT.get(value.dimension, "no unit")
            yield f"{number} is not in the unit of {expression}, whose value is in {unit}: {citation}"
        else:
            yield f"{number} differs from its record: {expression} is {_like(value, number)} in {citation}"


def _like(value: Value, number: _Number) -> str:
    """The record's value in the unit that the text uses, where that makes sense."""
    if number.unit in ("%", "x", "×") and value.dimension in ("ratio", ""):
        return f"{values.write(value, number.unit, 5)}{' %' if number.unit == '%' else number.unit}"
    if number.unit and values.dimension_of(number.unit) == value.dimension:
        return f"{values.write(value, number.unit, 5)} {number.unit}"
    return value.text()
