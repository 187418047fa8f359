"""`mla-var3 knowledge check`: the form of pages, their links, and the records they quote."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

from mla_var3.errors import UserError, nearest
from mla_var3.files import read_text
from mla_var3.lab.devlog.evidence import SUFFIX
from mla_var3.lab.devlog.segments import Finding
from mla_var3.lab.knowledge import triggers
from mla_var3.lab.knowledge.blocks import blocks
from mla_var3.lab.knowledge.gains import measured
from mla_var3.lab.knowledge.index import written_lines
from mla_var3.lab.knowledge.page import FOLDER, Page, Section, paragraphs, read

#: Kind -> fields of the front matter (others are mistakes) and sections, in this order. None: sections are free.
KINDS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...] | None]] = {
    "optimization": (
        ("kind", "title", "date", "languages", "archs", "applies", "metrics"),
        (
            "When to apply",
            "Mechanism",
            "Metrics affected",
            "Implementation",
            "Evidence",
            "Pitfalls",
            "Interactions",
        ),
    ),
    "anti-pattern": (
        ("kind", "title", "date", "languages", "archs", "applies", "metrics"),
        ("When to suspect it", "Mechanism", "Metrics affected", "Instead", "Evidence", "Pitfalls", "Interactions"),
    ),
    "reference": (("kind", "title", "date", "language", "checked", "keywords"), None),
}
_FOLDERS = {"optimization": "optimizations", "anti-pattern": "anti-patterns", "reference": "languages"}
_LISTS = ("languages", "archs", "keywords", "checked", "applies")
LANGUAGES = ("cute-dsl", "cutile-dsl", "triton", "any")
DIRECTIONS = ("up", "down")
#: What a claim rests on. Geometry: arithmetic with sizes that stand beside it.
BASES = ("Compiled", "Measured", "Package", "Source", "Geometry")
_BASIS = re.compile(rf"\*(?P<basis>{'|'.join(BASES)})\b[^*\n]*\*")
_URL = re.compile(r"https?://")
_DEVLOG = re.compile(r"\]\([^)\s]*devlogs/[^)\s]*\)")
# A figure somebody measured: time, rate, share, clock, power, or a ratio. Bytes and counts are geometry.
_FIGURE = re.compile(
    r"(?<![\w.])(?P<number>\d[\d,]*(?:\.\d+)?)(?:\s?(?:us|µs|ns|ms|TFLOP/s|GFLOP/s|GB/s|TB/s|%|MHz|GHz|W)(?![\w/])|x(?![\w×]))"
)
_TRACE = re.compile(r"\]\((?P<path>[^)\s]*results/[^)\s]*/traces/[^)\s]*\.txt)\)")
_CODE = re.compile(r"`([^`\n]+)`")


def pages_of(root: Path) -> list[Path]:
    """Every page below docs/knowledge, README files of it and its languages included."""
    folder = root / FOLDER
    if not folder.is_dir():
        raise UserError(f"there is no {FOLDER}/ in {root}: give --root FOLDER.")
    return sorted(path for path in folder.rglob("*.md") if path != folder / "README.md")


def check(root: Path) -> tuple[list[str], list[Page]]:
    """(what is to mend, each `file:line: message`; the pages that were read)."""
    from mla_var3.lab.devlog import named
    from mla_var3.lab.devlog.check import load_records

    records, failures = load_records(root)
    labels = named.labels_of(root)
    pages: list[Page] = []
    anchors: dict[Path, set[str]] = {}
    found: list[tuple[Page, list[Finding]]] = []
    for path in pages_of(root):
        page, findings = read(path)
        pages.append(page)
        anchors[path.resolve()] = page.anchors
        found.append((page, findings))
    for page, findings in found:
        findings += check_page(page, records, root, labels)
        findings += _links(page, anchors)
        name = page.path.relative_to(root)
        own = page.evidence.path.relative_to(root) if page.evidence.path else name
        ordered = sorted(findings, key=lambda f: (f.path is not None, f.line))
        failures += [f"{own if f.path else name}:{f.line}: {f.message}" for f in ordered]
    overview = root / FOLDER / "README.md"
    if overview.is_file():
        page, findings = read(overview)
        # Its tables are written after the check, of pages that are there then; what is written by hand has links.
        tables = written_lines(read_text(overview))
        mine = [f for f in _links(page, anchors) if f.line not in tables and "index.json" not in f.message]
        failures += [f"{overview.relative_to(root)}:{f.line}: {f.message}" for f in mine]
    titles: dict[str, Path] = {}
    for page in pages:
        title = str(page.meta.get("title", ""))
        if title and title in titles:
            failures.append(f"{page.path.relative_to(root)}:1: {titles[title].name} has the title {title!r} too")
        titles.setdefault(title, page.path)
    return failures, pages


def check_page(page: Page, records: Mapping[str, Mapping[str, Any]], root: Path, labels: set[str]) -> list[Finding]:
    """Everything that is wrong with one page but its links. Notes what an optimization's evidence measured."""
    from mla_var3.lab.devlog import named
    from mla_var3.lab.devlog.citations import check_text

    findings = [*_meta(page, root), *_sections(page), *_figures(page), *named.check(page.text, root, labels)]
    findings += blocks(page)[1]
    findings += check_text(page.text, records, require="none", evidence=page.evidence, root=root)
    if page.kind == "reference":
        for section in page.sections:
            findings += _basis(page, section)
    if page.kind == "optimization":
        page.gains = measured(page.evidence, records)
    return findings


# ---------------------------------------------------------------- front matter
def _meta(page: Page, root: Path) -> Iterator[Finding]:
    if not page.meta:
        return
    if page.kind not in KINDS:
        yield Finding(page.line_of("kind"), f"kind {page.kind!r} is unknown: {nearest(page.kind, KINDS)}")
        return
    fields, _ = KINDS[page.kind]
    for name in page.meta:
        if name not in fields:
            yield Finding(page.line_of(name), f"front matter has no field {name!r}: {nearest(name, fields)}")
    for name in fields:
        if name not in page.meta:
            yield Finding(1, f"front matter lacks {name}")
    folder = (root / FOLDER / _FOLDERS[page.kind]).resolve()
    if not page.path.resolve().is_relative_to(folder):
        yield Finding(page.line_of("kind"), f"a page of kind {page.kind} belongs into {_FOLDERS[page.kind]}/")
    for name in _LISTS:
        if name in page.meta and (not isinstance(page.meta[name], list) or not page.meta[name]):
            yield Finding(page.line_of(name), f"{name} must be a list, as in {name}: [a, b]")
    try:
        date.fromisoformat(str(page.meta.get("date", "2026-01-01")))
    except ValueError:
        yield Finding(page.line_of("date"), f"date {page.meta['date']!r} is not of the form 2026-11-21")
    if "title" in page.meta and page.heading and page.heading != page.meta["title"]:
        yield Finding(page.line_of("title"), f"title and the heading differ: {page.heading!r}")
    if not page.summary:
        yield Finding(1, "no sentence stands between the heading and the first section: say what the page is about")
    languages = page.meta.get("languages", [page.meta.get("language", "any")])
    for language in languages if isinstance(languages, list) else []:
        if language not in LANGUAGES:
            yield Finding(
                page.line_of("languages"), f"language {language!r} is unknown: {nearest(language, LANGUAGES)}"
            )
    if "applies" in page.meta:
        try:
            list(triggers.parse(page.meta["applies"]))
        except UserError as error:
            yield Finding(page.line_of("applies"), str(error))
    yield from _metrics(page)


def _metrics(page: Page) -> Iterator[Finding]:
    if "metrics" not in page.meta:
        return
    metrics = page.meta["metrics"]
    if not isinstance(metrics, Mapping) or not metrics:
        yield Finding(
            page.line_of("metrics"), "metrics must be a mapping, as in metrics: {waves: up, stall.gmma: down}"
        )
        return
    known = triggers.vocabulary()
    names = [name for group, members in known.items() if group != "problem" for name in members]
    for name, direction in metrics.items():
        for part in (part.strip() for part in str(name).split("/")):
            if part not in names and not re.fullmatch(r"[A-Z][A-Z0-9.]+", part):
                yield Finding(page.line_of("metrics"), f"metrics: {part!r} is unknown: {nearest(part, names)}")
        if direction not in DIRECTIONS:
            yield Finding(page.line_of("metrics"), f"metrics: {name} goes {nearest(str(direction), DIRECTIONS)}")


# ---------------------------------------------------------------- body
def _sections(page: Page) -> Iterator[Finding]:
    _, wanted = KINDS.get(page.kind, ((), None))
    titles = [section.title for section in page.sections]
    if page.kind == "reference" and not titles:
        yield Finding(1, "the page has no ## section")
    if wanted is None:
        return
    for section in page.sections:
        if section.title not in wanted:
            yield Finding(section.line, f"section {section.title!r} is not one of: {', '.join(wanted)}")
        if len(re.findall(r"[^\W\d_]{2,}", section.text)) < 5:
            yield Finding(section.line, f"section {section.title!r} is empty")
    for title in wanted:
        if titles.count(title) != 1:
            yield Finding(1, f"section {title!r} must stand once, it stands {titles.count(title)} times")
    if [t for t in titles if t in wanted] != [t for t in wanted if t in titles]:
        yield Finding(1, f"sections are out of order: {', '.join(wanted)}")
    evidence = next((s for s in page.sections if s.title == "Evidence"), None)
    if evidence is not None:
        for line, text in paragraphs(page):
            inside = evidence.line < line <= evidence.line + evidence.text.count("\n") + 1
            if inside and not text.lstrip().startswith(("|", "#")) and not _rests(page, line, text):
                beside = page.path.with_suffix(SUFFIX).name
                yield Finding(line, f"evidence without a record in {beside}, a URL, or a link to a devlog")


def _rests(page: Page, line: int, text: str) -> bool:
    return bool(_cited(page, line, text) or _URL.search(text) or _DEVLOG.search(text) or _BASIS.search(text))


def _cited(page: Page, line: int, text: str) -> bool:
    """Whether a text that begins on a line of the page has a record beside the page."""
    return not page.cited.isdisjoint(range(line, line + text.count("\n") + 1))


def _basis(page: Page, section: Section) -> Iterator[Finding]:
    if section.title in ("See also",):
        return
    found = {m["basis"] for m in _BASIS.finditer(section.text)}
    if not found:
        yield Finding(section.line, f"section {section.title!r} does not say what it rests on: *{'*, *'.join(BASES)}*")
    if "Measured" in found and not (
        _cited(page, section.line, section.text) or _URL.search(section.text) or _DEVLOG.search(section.text)
    ):
        yield Finding(section.line, f"section {section.title!r} says *Measured*, and names no record, devlog or URL")
    if "Source" in found and not _URL.search(section.text):
        yield Finding(section.line, f"section {section.title!r} says *Source*, and names no URL")


def _figures(page: Page) -> Iterator[Finding]:
    """Measured figures need a record or a URL in their paragraph, or a link to a trace in which they stand."""
    for line, text in paragraphs(page):
        if _cited(page, line, text) or _URL.search(text):
            continue
        linked = [(page.path.parent / m["path"]).resolve() for m in _TRACE.finditer(text)]
        traces = [read_text(path) for path in linked if path.is_file()]
        for found in _FIGURE.finditer(_CODE.sub("", text)):
            number = re.compile(rf"(?<![\d.]){re.escape(found['number'])}(?![\d.])")
            if not traces:
                yield Finding(line, f"{found[0]!r} has neither a record nor a URL in its paragraph")
                break
            if not any(number.search(trace) for trace in traces):
                yield Finding(line, f"{found[0]!r} does not stand in the trace that its paragraph links to")


def _links(page: Page, anchors: Mapping[Path, set[str]]) -> Iterator[Finding]:
    for link in page.links:
        if link.is_url:
            continue
        target, _, part = link.target.partition("#")
        path = (page.path.parent / target).resolve() if target else page.path.resolve()
        if not path.exists():
            yield Finding(link.line, f"link to {link.target}: there is no such file")
        elif part and path in anchors and part not in anchors[path]:
            yield Finding(link.line, f"link to {link.target}: the page has no heading with that anchor")
