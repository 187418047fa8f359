"""A page of docs/knowledge: front matter, sections, fenced blocks and links, each with its line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mla_var3.files import read_text
from mla_var3.lab.devlog.evidence import Evidence, beside, cited_lines
from mla_var3.lab.devlog.front_matter import body_line, read_fields
from mla_var3.lab.devlog.segments import COMMENT, Finding, without_comments

FOLDER = Path("docs/knowledge")
_FENCE = re.compile(r"\s*(```+|~~~+)[ \t]*(?P<info>[^\n`]*?)[ \t]*$")
_LINK = re.compile(r"(?<!!)\[[^\]\n]*\]\((?P<target>[^()\s]+)\)|<(?P<auto>https?://[^>\s]+)>")


@dataclass(frozen=True)
class Section:
    """A `##` section; line is that of its heading, text is what follows it."""

    title: str
    line: int
    text: str


@dataclass(frozen=True)
class Fence:
    """A fenced block; line is that of its opening fence, info what stands behind the backticks."""

    info: str
    line: int
    code: str

    @property
    def language(self) -> str:
        return self.info.split()[0].lower() if self.info.split() else ""


@dataclass(frozen=True)
class Link:
    """Where a link points: a path (with an anchor, perhaps) or a URL."""

    target: str
    line: int

    @property
    def is_url(self) -> bool:
        return bool(re.match(r"[a-z]+:", self.target))


@dataclass
class Page:
    """A page as it stands. meta: its front matter, plain strings, lists and mappings of strings. evidence: the list of
    records beside it. cited: lines of the paragraphs, list items and table rows that have records there."""

    path: Path
    text: str
    meta: Mapping[str, Any] = field(default_factory=dict)
    heading: str = ""
    sections: list[Section] = field(default_factory=list)
    fences: list[Fence] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)
    summary: str = ""
    evidence: Evidence = field(default_factory=Evidence)
    cited: set[int] = field(default_factory=set)
    gains: list[dict[str, Any]] = field(default_factory=list)

    @property
    def kind(self) -> str:
        return str(self.meta.get("kind", ""))

    def line_of(self, name: str) -> int:
        """Line of a field of the front matter, 1 when it is not there."""
        for number, line in enumerate(self.text.split("\n"), start=1):
            if line.startswith(f"{name}:"):
                return number
        return 1


def read(path: Path) -> tuple[Page, list[Finding]]:
    """Reads a page; findings say what kept a part of it from being read."""
    page = Page(path, read_text(path))
    page.meta, findings = read_fields(page.text)
    page.evidence = beside(path)
    page.cited = cited_lines(page.text, page.evidence)
    _read_body(page, findings, body_line(page.text))
    return page, findings


def prose(page: Page) -> Iterator[tuple[int, str]]:
    """Lines outside front matter, fenced blocks and comments."""
    fenced = _fenced_lines(page)
    body = COMMENT.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), page.text)
    first = body_line(page.text)
    for number, line in enumerate(body.split("\n"), start=1):
        if number >= first and number not in fenced:
            yield number, line


def paragraphs(page: Page) -> Iterator[tuple[int, str]]:
    """Paragraphs, list items, table rows and headings outside fenced blocks, each with the line where it begins."""
    block: list[str] = []
    first = 0
    previous = 0
    for number, line in [*prose(page), (1 << 30, "")]:
        starts_new = re.match(r"\s*(?:#|[-*+]\s|\d+[.)]\s|\|)", line) is not None
        if block and (not line.strip() or starts_new or number != previous + 1):
            yield first, "\n".join(block)
            block = []
        if line.strip():
            if not block:
                first = number
            block.append(line)
        previous = number


def anchor(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", lambda m: m[1] or "", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def _fenced_lines(page: Page) -> set[int]:
    return {n for f in page.fences for n in range(f.line, f.line + f.code.count("\n") + 2)}


def _read_body(page: Page, findings: list[Finding], start: int) -> None:
    lines = page.text.split("\n")
    open_at, marker, info = 0, "", ""
    code: list[str] = []
    for number in range(start, len(lines) + 1):
        line = lines[number - 1]
        match = _FENCE.match(line)
        if marker:
            if match and match[1].startswith(marker) and not match["info"]:
                page.fences.append(Fence(info, open_at, "".join(f"{row}\n" for row in code)))
                marker = ""
            else:
                code.append(line)
        elif match:
            open_at, marker, info, code = number, match[1], match["info"], []
    if marker:
        findings.append(Finding(open_at, "this fenced block is never closed"))
    titles: list[tuple[str, int]] = []
    for number, line in prose(page):
        heading = re.match(r"(#+)\s+(.+?)\s*$", line)
        if heading:
            page.anchors.add(anchor(heading[2]))
            if len(heading[1]) == 1 and not page.heading:
                page.heading = heading[2]
            elif len(heading[1]) == 2:
                titles.append((heading[2], number))
        elif page.heading and not titles and not page.summary and line.strip():
            page.summary = without_comments(line).strip()
        # Links inside inline code are shown, not meant.
        plain = re.sub(r"`[^`\n]+`", lambda m: " " * len(m[0]), line)
        for found in _LINK.finditer(plain):
            page.links.append(Link(found["target"] or found["auto"], number))
    ends = [*(number for _, number in titles[1:]), len(lines) + 1]
    for (title, number), end in zip(titles, ends, strict=False):
        page.sections.append(Section(title, number, "\n".join(lines[number : end - 1])))
