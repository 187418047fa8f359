"""Markdown as `citations` and `evidence` read it: blocks of text, and the numbers in them with their units.

A block is a paragraph, a list item, a table row, a heading or a line of fenced text. Fenced blocks of code, comments
other than citations and link targets hold no figures; inline code holds figures, and no citations.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mla_var3.lab.devlog import values

_NUMBER = r"(?<![\w.,#§])[-+−]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?"
ATTACHED = ("x", "×")  # "1.12x" is a ratio, "64 x 512" and "64x512" are shapes
_SPACED = sorted((re.escape(u) for u in values.UNITS if u not in ATTACHED), key=len, reverse=True)
_UNIT = rf"(?:\s?(?P<unit>{'|'.join(_SPACED)})|(?P<times>[x×]))(?![\w°×]|/s\b)"
_JOIN = r"\s*(?:/|–|-|to|and|±)\s*"
_FIGURES = re.compile(rf"(?P<numbers>{_NUMBER}(?:{_JOIN}{_NUMBER})*){_UNIT}")
_NUMBERS = re.compile(_NUMBER)
#: A citation; `body` is what stands behind "r:".
CITATION = re.compile(r"<!--\s*r:(?P<body>[^<>]*?)-->")
#: Any other comment, from its beginning to its end or that of the text.
COMMENT = re.compile(r"<!--(?!\s*r:).*?(?:-->|\Z)", re.DOTALL)
# What looks like a citation and is none: a comment that is not closed, and the form in brackets.
UNCLOSED = re.compile(r"<!--\s*r:")
BRACKETS = re.compile(r"\[r:([^\]\n]*)\]?")
# Header words that are units without parentheses; the others are also names of things (s: query tokens, B, x).
_HEADER_WORDS = frozenset(u for u in values.UNITS if len(u) > 1 or u == "%")
_CODE_FENCES = frozenset(
    ("bash", "sh", "shell", "console", "python", "py", "yaml", "toml", "json", "c", "cpp", "ptx", "diff")
)


@dataclass(frozen=True)
class Finding:
    """What is wrong, and on which line (1 is the first). path: the file, where it is not that of the text."""

    line: int
    message: str
    path: Path | None = None


@dataclass
class Segment:
    """A run of text inside which figures and citations belong together; `starts` maps offsets to lines."""

    text: str
    starts: list[tuple[int, int]]
    units: dict[int, str] = field(default_factory=dict)  # of a table row: column -> unit that its header names
    table: bool = False
    level: int = 0  # of a heading: its number of #

    def line(self, offset: int) -> int:
        return max((line for start, line in self.starts if start <= offset), default=self.starts[0][1])


@dataclass
class Number:
    """A number of a block. covered: whether a record was named for it."""

    start: int
    text: str
    unit: str
    covered: bool = False

    def __str__(self) -> str:
        return f"{self.text}{'' if self.unit in ('', *ATTACHED) else ' '}{self.unit}"


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match[0])


def without_comments(markdown: str) -> str:
    """A text without its comments, citations among them, and without the space before each."""
    return re.sub(r"[ \t]*<!--.*?(?:-->|\Z)", "", markdown, flags=re.DOTALL)


def _lines(markdown: str) -> Iterator[tuple[str, bool]]:
    """Each line and whether it lies in a fenced block; code, comments but citations, and link targets are blank."""
    text = COMMENT.sub(_blank, markdown)
    text = re.sub(r"(?<=\])\([^()\n]*\)|<https?://[^>\s]*>|https?://[^\s<]+", _blank, text)
    # A citation inside inline code shows how one is written; the figures there count as any others.
    text = re.sub(r"(?<!`)`[^`\n]+`(?!`)", lambda m: strip(m[0]), text)
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


def strip(text: str) -> str:
    """The text with blanks for citations and for what looks like one."""
    for pattern in (CITATION, UNCLOSED, BRACKETS):
        text = pattern.sub(_blank, text)
    return text


def segments(markdown: str) -> Iterator[Segment]:
    """Table rows, lines of fenced text, headings, list items and paragraphs, in order."""
    block: list[tuple[int, str]] = []
    header: list[str] | None = None
    units: dict[int, str] = {}

    def flush() -> Iterator[Segment]:
        if block:
            text, starts = "", []
            for number, line in block:
                starts.append((len(text), number))
                text += line + " "
            yield Segment(text, starts)
            block.clear()

    lines = list(_lines(markdown))
    for index, (line, fenced) in enumerate(lines):
        number, stripped = index + 1, line.strip()
        if fenced:
            yield from flush()
            yield Segment(line, [(0, number)])
        elif stripped.startswith("|"):
            yield from flush()
            if header is None:
                header = [text for _, text in _cells(line)]
                following = lines[index + 1][0] if index + 1 < len(lines) else ""
                titled = re.fullmatch(r"\s*\|[\s:|-]+", following)
                units = {i: u for i, text in enumerate(header) if titled and (u := _header_unit(text))}
                if titled:
                    continue
            yield Segment(line, [(0, number)], units, table=True)
        else:
            header = None
            heading = re.match(r"(#+)\s", stripped)
            if heading or not stripped or re.match(r"(?:[-*+]\s|\d+[.)]\s)", stripped):
                yield from flush()
            if heading:
                yield Segment(line, [(0, number)], level=len(heading[1]))
            elif stripped:
                block.append((number, line))
    yield from flush()


def masked(markdown: str) -> str:
    """The text with blanks where it is code, a link's target or a comment that is no citation: as long as it was."""
    read = (line for line, _ in _lines(markdown))
    return "\n".join(line or " " * len(raw) for line, raw in zip(read, markdown.split("\n"), strict=True))


def plain(text: str) -> str:
    """A block's text, or the beginning of one, without marks of headings and lists, emphasis, code and links, and
    without citations; the cells of a table row stand between single bars."""
    text = re.sub(r"[*`\[\]]", "", strip(text)).strip().lstrip("| ")
    text = re.sub(r"^\s*(?:#+\s|[-+]\s|\d+[.)]\s)?", "", text)
    text = re.sub(r"\s+([.,;:)])", r"\1", " ".join(text.split()))
    return re.sub(r"\s*\|\s*", " | ", text).strip()


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


def numbers_of(segment: Segment) -> list[Number]:
    """Every number of a segment outside its citations, in order, with its unit ("" for none)."""
    text = strip(segment.text)
    found: dict[int, Number] = {m.start(): Number(m.start(), m[0], "") for m in _NUMBERS.finditer(text)}
    for column, (offset, cell) in enumerate(_cells(text) if segment.units else ()):
        for match in _NUMBERS.finditer(cell) if column in segment.units else ():
            start = offset + match.start()
            if start in found:
                found[start].unit = segment.units[column]
    for match in _FIGURES.finditer(text):
        for number in _NUMBERS.finditer(match["numbers"]):
            start = match.start("numbers") + number.start()
            found[start] = Number(start, number[0], match["unit"] or match["times"])
    return [found[start] for start in sorted(found)]
