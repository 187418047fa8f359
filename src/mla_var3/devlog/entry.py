"""The form of one devlog entry: `devlogs/<design>/<language>-v<N>.md`, front matter, then seven sections."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from mla_var3.devlog.citations import Finding, Require, check_text, cited_ids, find_record, has_figure
from mla_var3.devlog.front_matter import read_fields
from mla_var3.devlog.values import Record, Unknown
from mla_var3.errors import nearest
from mla_var3.kernel.registry import LANGUAGES, KernelId

SECTIONS = ("Location", "What changed", "Hypothesis", "Measured", "Bottleneck", "Verdict", "Insights")
VERDICTS = ("kept", "rejected", "superseded", "not run here")
# A version that is gone keeps its entry as a tombstone, which says why it went.
GONE = ("rejected", "superseded")
FIELDS = ("design", "language", "version", "date", "verdict", "devices", "records")
#: `devlog.skips` says when this one is owed.
OPTIONAL = ("skips",)
TODO = "TODO"


@dataclass
class Entry:
    """A parsed entry. fields: the front matter. sections: title -> (line of its heading, text below it)."""

    path: Path
    fields: dict[str, Any] = field(default_factory=dict)
    sections: dict[str, tuple[int, str]] = field(default_factory=dict)
    order: list[tuple[int, str]] = field(default_factory=list)
    text: str = ""

    @property
    def kernel(self) -> tuple[str, str, int]:
        """(design, language, version) of the file's name and folder; version is -1 when the name is no entry's."""
        match = re.fullmatch(r"(.+)-v(\d+)", self.path.stem)
        return (
            (self.path.parent.name, match[1], int(match[2])) if match else (self.path.parent.name, self.path.stem, -1)
        )

    @property
    def verdict(self) -> str:
        return str(self.fields.get("verdict", ""))

    @property
    def record_ids(self) -> list[str]:
        """Ids of the front matter's list, as text: YAML reads an id of digits alone as a number."""
        value = self.fields.get("records") or []
        return [str(item) for item in value] if isinstance(value, list) else []


def entry_path(root: Path, kernel: KernelId) -> Path:
    """Where the entry of a version lies."""
    return root / "devlogs" / kernel.design / f"{kernel.language}-v{kernel.version}.md"


def parse(path: Path) -> tuple[Entry, list[Finding]]:
    """Reads an entry; findings say what kept its front matter from being read."""
    entry = Entry(path, text=path.read_text(encoding="utf-8"))
    entry.fields, findings = read_fields(entry.text)
    title: str | None = None
    fence = ""
    for number, row in enumerate(entry.text.split("\n"), start=1):
        marker = re.match(r"\s*(```+|~~~+)", row)
        if marker and (not fence or marker[1].startswith(fence)):
            fence = "" if fence else marker[1]
        heading = None if fence else re.fullmatch(r"##\s+(.+?)\s*", row)
        if heading:
            title = heading[1]
            entry.order.append((number, title))
            entry.sections[title] = (number, "")
        elif title is not None:
            start, text = entry.sections[title]
            entry.sections[title] = (start, text + row + "\n")
    return entry, findings


def check_entry(entry: Entry, records: Mapping[str, Record], source: str | None) -> list[Finding]:
    """Everything that is wrong with an entry.

    records: by id. source: path of the version's file as Location must give it; None when no such version exists.
    """
    findings = [*_fields(entry, source), *_records(entry, records), *_sections(entry, source)]
    for title, (line, text) in entry.sections.items():
        require: Require = "all" if title == "Measured" else "none"
        findings += check_text(text, records, require=require, first_line=line + 1)
    for number, text in enumerate(entry.text.split("\n"), start=1):
        if re.search(rf"\b{TODO}\b", text):
            findings.append(Finding(number, f"a {TODO} is left: {text.strip()[:80]}"))
    return sorted(findings, key=lambda f: f.line)


def _line_of(entry: Entry, name: str) -> int:
    for number, line in enumerate(entry.text.split("\n"), start=1):
        if line.startswith(f"{name}:"):
            return number
    return 1


def _fields(entry: Entry, source: str | None) -> Iterator[Finding]:
    if not entry.fields:
        return
    for name in entry.fields:
        if name not in (*FIELDS, *OPTIONAL):
            near = nearest(name, [*FIELDS, *OPTIONAL])
            yield Finding(_line_of(entry, name), f"front matter has no field {name!r}: {near}")
    for name in FIELDS:
        if name not in entry.fields:
            yield Finding(1, f"front matter lacks {name}")
    design, language, version = entry.kernel
    for name, want in (("design", design), ("language", language), ("version", str(version))):
        if name in entry.fields and entry.fields[name] != want:
            yield Finding(_line_of(entry, name), f"{name} is {entry.fields[name]}, and the file is that of {want}")
    if language not in LANGUAGES:
        yield Finding(1, f"language {language!r} is unknown: {nearest(language, LANGUAGES)}")
    if "date" in entry.fields:
        try:
            date.fromisoformat(str(entry.fields["date"]))
        except ValueError:
            yield Finding(_line_of(entry, "date"), f"date {entry.fields['date']!r} is not of the form 2026-11-21")
    verdict = entry.verdict
    if verdict and verdict not in VERDICTS:
        yield Finding(_line_of(entry, "verdict"), f"verdict {verdict!r} is unknown: {nearest(verdict, VERDICTS)}")
    elif verdict and source is None and verdict not in GONE:
        gone = " or ".join(GONE)
        yield Finding(
            _line_of(entry, "verdict"),
            f"no version {language}/{design} v{version} exists: the entry of a removed version is a tombstone, {gone}",
        )
    for name in ("devices", "records"):
        if name in entry.fields and not isinstance(entry.fields[name], list):
            yield Finding(_line_of(entry, name), f"{name} must be a list, as in {name}: [a, b]")


def _records(entry: Entry, records: Mapping[str, Record]) -> Iterator[Finding]:
    if not entry.fields:
        return
    line = _line_of(entry, "records")
    own = 0
    known: set[str] = set()
    for name in entry.record_ids:
        try:
            record = find_record(records, name)
        except Unknown as error:
            yield Finding(line, f"{error}")
            continue
        known.add(str(record["id"]))
        kernel = record["kernel"]
        own += (kernel["design"], kernel["language"], kernel["version"]) == entry.kernel
        devices = entry.fields.get("devices")
        if isinstance(devices, list) and record["device"] not in devices:
            yield Finding(_line_of(entry, "devices"), f"devices lacks {record['device']}, the one of record {name}")
    if not own and entry.verdict != "not run here":
        yield Finding(line, "records names no record of this version: a verdict rests on at least one")
    for name in sorted(cited_ids(entry.text)):
        try:
            full = str(find_record(records, name)["id"])
        except Unknown:
            continue  # reported where it is cited
        if full not in known:
            yield Finding(line, f"record {full} is cited and not in the front matter's records")


def _sections(entry: Entry, source: str | None) -> Iterator[Finding]:
    titles = [title for _, title in entry.order]
    for number, title in entry.order:
        if title not in SECTIONS:
            yield Finding(number, f"section {title!r} is not one of: {', '.join(SECTIONS)}; use ### inside one of them")
        elif titles.count(title) > 1 and number != entry.order[titles.index(title)][0]:
            yield Finding(number, f"section {title!r} stands twice")
    for title in SECTIONS:
        if title not in titles:
            yield Finding(len(entry.text.rstrip().split("\n")), f"section {title!r} is missing")
    present = list(dict.fromkeys(t for t in titles if t in SECTIONS))
    expected = [t for t in SECTIONS if t in present]
    if present != expected:
        wrong = next(t for t, e in zip(present, expected, strict=True) if t != e)
        yield Finding(entry.sections[wrong][0], f"section {wrong!r} is out of order: {', '.join(SECTIONS)}")
    for title in expected:
        line, text = entry.sections[title]
        said = re.sub(r"<!--.*?(?:-->|\Z)|^#+ .*$", "", text, flags=re.DOTALL | re.MULTILINE)
        if not re.search(r"[^\W\d_]{2}", said):
            yield Finding(line, f"section {title!r} is empty")
            continue
        if title == "Hypothesis" and not has_figure(said):
            yield Finding(line, "the hypothesis predicts no figure with a unit: say what the version should reach")
        if title == "Location" and source is not None and source not in said:
            yield Finding(line, f"Location does not name the version's file, {source}")
        if title == "Verdict" and entry.verdict in VERDICTS:
            first = re.match(r"\W*(" + "|".join(VERDICTS) + r")\b", said, re.IGNORECASE)
            if first is None or first[1].lower() != entry.verdict:
                yield Finding(line, f"the section must begin with the front matter's verdict, {entry.verdict!r}")
