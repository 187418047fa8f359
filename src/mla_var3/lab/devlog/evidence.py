"""Which record each figure of a page is from: the `.records` file beside it, so that the page shows figures alone.

    3f9c2d1e4a5b                        records that the page rests on, one id a line, sorted; before all else
    # a comment

    [Measured]                          a heading of the page: what follows is about its section
    > 128 requests, 4096 tokens |       the beginning of a paragraph, a list item or a table row in that section
    3f9c2d1e4a5b burst sustained        a record, and an expression of `values` for each figure, in the block's order
    3f9c2d1e4a5b vs 77aa01b2c3d4 burst.speedup
    results/h200/traces/a.txt:12 143.2  a file of the repository, a line of it, and numbers as that line has them

Headings and beginnings follow the page's order; where several blocks begin alike, the next one is meant. In them,
emphasis, marks of code and brackets of links do not count, and a table row's cells stand between bars. Evidence before
the first heading is about what the page has before its first heading, or about the whole of a page.

`citations.check_text` compares figures with evidence. `apart` takes citations that stand as comments in a generated
text (see `citations.cite`) out of it and gives the lines of evidence; `joined` puts them back, for a page that links
its figures.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mla_var3.files import read_text
from mla_var3.lab.devlog.segments import CITATION, Finding, Segment, masked, plain, segments

SUFFIX = ".records"


@dataclass(frozen=True)
class Cited:
    """One line of evidence. body: "ID expression ..." or "FILE:LINE number ..."; line: where it stands in `path`."""

    body: str
    line: int = 0
    path: Path | None = None

    @property
    def source(self) -> str:
        """What it names, without the expressions: "ID", "ID vs ID" or "FILE:LINE"."""
        words = self.body.split()
        return " ".join(words[: 3 if words[1:2] == ["vs"] else 1])

    @property
    def ids(self) -> list[str]:
        """Ids of the records that it names; none where it names a file."""
        return [] if "/" in self.source else self.source.split(" vs ")


@dataclass
class Block:
    """Evidence of one block of the page: the block's beginning, on which line it is quoted, and the lines below it."""

    quote: str
    line: int
    cited: list[Cited] = field(default_factory=list)


@dataclass
class Part:
    """Evidence of one section: its heading, "" for the beginning of the file."""

    heading: str
    line: int
    blocks: list[Block] = field(default_factory=list)


@dataclass
class Evidence:
    """A `.records` file. listed: (line, text) of what stands before all headings and quotes."""

    path: Path | None = None
    listed: list[tuple[int, str]] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def cited_ids(self) -> list[str]:
        """Ids, or beginnings of ids, of the records that blocks cite."""
        found = (name for part in self.parts for block in part.blocks for cited in block.cited for name in cited.ids)
        return list(dict.fromkeys(found))

    @property
    def files(self) -> list[str]:
        """Files of the repository, as traces are, that blocks cite lines of, each as `FILE:LINE`."""
        found = (cited.source for part in self.parts for block in part.blocks for cited in block.cited)
        return [source for source in found if "/" in source]

    @property
    def ids(self) -> list[str]:
        """Ids of every record that the file names, the listed ones first."""
        return list(dict.fromkeys([*(name for _, name in self.listed), *self.cited_ids]))


def beside(page: Path) -> Evidence:
    """The evidence of a page; an empty one where no `.records` file stands beside it."""
    path = page.with_suffix(SUFFIX)
    return parse(read_text(path), path) if path.is_file() else Evidence(path)


def parse(text: str, path: Path | None = None) -> Evidence:
    """Reads a `.records` file; what has no meaning is in its findings."""
    found = Evidence(path)
    part, block = Part("", 1), None
    for number, line in enumerate(text.split("\n"), start=1):
        row = line.strip()
        if not row or row.startswith("#"):
            continue
        if row.startswith("[") and row.endswith("]"):
            part, block = Part(plain(row[1:-1]), number), None
            found.parts.append(part)
        elif row.startswith(">"):
            block = Block(plain(row[1:]), number)
            if part not in found.parts:
                found.parts.append(part)
            part.blocks.append(block)
            if not block.quote:
                found.findings.append(Finding(number, "> quotes nothing: give the beginning of the block", path))
        elif block is not None:
            block.cited.append(Cited(row, number, path))
        elif found.parts:
            message = f"{row.split()[0]} stands behind a heading and no block: quote the block's beginning behind >"
            found.findings.append(Finding(number, message, path))
        else:
            found.listed.append((number, row))
    for block in (block for part in found.parts for block in part.blocks if block.quote and not block.cited):
        message = f"no record stands below > {block.quote}: add a line, ID expression ..."
        found.findings.append(Finding(block.line, message, path))
    return found


def bind(blocks: Sequence[Segment], evidence: Evidence) -> tuple[dict[int, list[Cited]], list[Finding]]:
    """(evidence of each segment, by its place; what of the evidence is about no segment)."""
    bound: dict[int, list[Cited]] = {}
    findings = list(evidence.findings)
    last = -1  # the place of the last heading that was found
    for part in evidence.parts:
        start, end = 0, len(blocks)
        if part.heading:
            headings = [i for i, block in enumerate(blocks) if block.level and plain(block.text) == part.heading]
            place = next((i for i in headings if i > last), None)
            if place is None:
                message = f"the page has no heading {part.heading!r}" + (" behind the one before" if headings else "")
                findings.append(Finding(part.line, message, evidence.path))
                continue
            start, end, last = place, _end(blocks, place), place
        at = start - 1
        for quoted in part.blocks:
            found = next((i for i in range(at + 1, end) if plain(blocks[i].text).startswith(quoted.quote)), None)
            if found is None:
                before = " behind the block before" if quoted is not part.blocks[0] else ""
                where = f" under {part.heading!r}" if part.heading else ""
                message = f"no block{where} begins with {quoted.quote!r}{before}"
                findings.append(Finding(quoted.line, message, evidence.path))
                continue
            at = found
            bound.setdefault(found, []).extend(quoted.cited)
    return bound, findings


def cited_lines(markdown: str, evidence: Evidence) -> set[int]:
    """Lines of the page's paragraphs, list items and table rows that have evidence."""
    blocks = list(segments(markdown))
    bound, _ = bind(blocks, evidence)
    return {line for place, cited in bound.items() if cited for _, line in blocks[place].starts}


def _end(blocks: Sequence[Segment], heading: int) -> int:
    """Where the section of a heading ends: at the next heading that is not below it."""
    own = blocks[heading].level
    return next((i for i in range(heading + 1, len(blocks)) if 0 < blocks[i].level <= own), len(blocks))


def apart(markdown: str) -> tuple[str, str]:
    """(the text without the citations that stand in it as comments, lines of evidence with what they said)."""
    blocks = list(segments(markdown))
    lines: list[str] = []
    heading, said, at = "", "", -1
    for place, block in enumerate(blocks):
        if block.level:
            heading, at = plain(block.text), place
        found = [" ".join(m["body"].split()) for m in CITATION.finditer(block.text)]
        if not found:
            continue
        if heading != said or not lines:
            lines += ["", *([f"[{heading}]"] if heading else [])]
            said = heading
        lines += [f"> {_quote(blocks, at, place)}", *(re.sub(r"\bvs r:", "vs ", body) for body in found)]
        at = place
    hidden = masked(markdown)
    text, start = "", 0
    for match in CITATION.finditer(hidden):
        text += markdown[start : match.start()].rstrip(" \t")
        start = match.end()
    return text + markdown[start:], "\n".join(lines).strip() + "\n" if lines else ""


def _quote(blocks: Sequence[Segment], after: int, place: int) -> str:
    """The shortest beginning of a block, whole cells or six words at least, that no block before it begins with."""
    text = plain(blocks[place].text)
    between = [plain(block.text) for block in blocks[max(after, -1) + 1 : place]]
    bars = [m.end() for m in re.finditer(r" \|", text)] if blocks[place].table else []
    spaces = [m.start() for m in re.finditer(r"\s", text)][5:]
    ends = [*(bars or spaces), len(text)]
    return next((text[:end] for end in ends if not any(t.startswith(text[:end]) for t in between)), text)


def joined(markdown: str, evidence: Evidence) -> str:
    """The text with its evidence as comments, each behind its block."""
    rows = markdown.split("\n")
    blocks = list(segments(markdown))
    bound, _ = bind(blocks, evidence)
    for place, cited in bound.items():
        comments = "".join(f" <!-- r:{line.body} -->" for line in cited)
        number = blocks[place].starts[-1][1] - 1
        row = rows[number].rstrip()
        bar = row.endswith("|") and blocks[place].table
        rows[number] = f"{row[:-1].rstrip()}{comments} |" if bar else row + comments
    return "\n".join(rows)


def write(page: Path, ids: Iterable[str], lines: str = "") -> None:
    """Writes the file beside a page: ids that the lines of evidence do not name, sorted, then the lines. With nothing
    to say there is no file."""
    named = set(parse(lines).cited_ids)
    listed = "".join(f"{name}\n" for name in sorted(set(ids)) if name not in named)
    text = "\n".join(part for part in (listed, lines) if part)
    path = page.with_suffix(SUFFIX)
    if text:
        path.write_text(text, encoding="utf-8")
    else:
        path.unlink(missing_ok=True)
