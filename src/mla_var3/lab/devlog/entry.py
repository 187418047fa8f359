"""The form of one devlog entry: `devlogs/<design>/<language>-v<N>.md`, front matter, then seven sections.

Beside it, `<language>-v<N>.records` lists the records it rests on: one id a line, sorted; a line that begins with # is
a comment.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from mla_var3.errors import nearest
from mla_var3.kernel.registry import LANGUAGES, KernelId
from mla_var3.lab.devlog.citations import (
    Finding,
    Require,
    check_text,
    cited_ids,
    find_record,
    has_figure,
    without_comments,
)
from mla_var3.lab.devlog.front_matter import read_fields
from mla_var3.lab.devlog.values import Record, Unknown

SECTIONS = ("Location", "What changed", "Hypothesis", "Measured", "Bottleneck", "Verdict", "Insights")
VERDICTS = ("kept", "rejected", "superseded", "not run here")
FIELDS = ("design", "language", "version", "date", "verdict", "devices")
#: skips: owed where `devlog.skips` says so. code: the commit that holds a version whose file is no longer here.
OPTIONAL = ("skips", "code")
TODO = "TODO"
_COMMIT = re.compile(r"[0-9a-f]{7,40}")


@dataclass
class Entry:
    """A parsed entry. fields: the front matter. sections: title -> (line of its heading, text below it). listed: (line,
    text) of each line of the list of records that is no comment."""

    path: Path
    fields: dict[str, Any] = field(default_factory=dict)
    sections: dict[str, tuple[int, str]] = field(default_factory=dict)
    order: list[tuple[int, str]] = field(default_factory=list)
    text: str = ""
    listed: list[tuple[int, str]] = field(default_factory=list)

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
        """Ids of the list beside the entry; none where there is no list."""
        return [name for _, name in self.listed]

    @property
    def commit(self) -> str | None:
        """The front matter's `code`, where it is written as a commit is."""
        code = str(self.fields.get("code", ""))
        return code if _COMMIT.fullmatch(code) else None

    @property
    def location(self) -> str | None:
        """The version's file as Location names it, the first path in it with the version's module name."""
        design, language, version = self.kernel
        name = KernelId(language, "mla", design, version).module_name
        said = without_comments(self.sections.get("Location", (0, ""))[1])
        found = re.search(rf"`((?:[\w.-]+/)+{re.escape(name)}\.py)`", said)
        return found[1] if found else None


def entry_path(root: Path, kernel: KernelId) -> Path:
    """Where the entry of a version lies."""
    return root / "devlogs" / kernel.design / f"{kernel.language}-v{kernel.version}.md"


def records_path(path: Path) -> Path:
    """Where the list of an entry's records lies."""
    return path.with_suffix(".records")


def write_records(path: Path, ids: Iterable[str]) -> None:
    """Writes the list of an entry's records; without any, the entry has no list."""
    listed = sorted(set(ids))
    if listed:
        records_path(path).write_text("".join(f"{name}\n" for name in listed), encoding="utf-8")
    else:
        records_path(path).unlink(missing_ok=True)


def parse(path: Path) -> tuple[Entry, list[Finding]]:
    """Reads an entry; findings say what kept its front matter from being read."""
    entry = Entry(path, text=path.read_text(encoding="utf-8"))
    entry.fields, findings = read_fields(entry.text)
    beside = records_path(path)
    rows = beside.read_text(encoding="utf-8").split("\n") if beside.is_file() else []
    numbered = [(number, row.strip()) for number, row in enumerate(rows, start=1)]
    entry.listed = [(number, row) for number, row in numbered if row and not row.startswith("#")]
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


def check_entry(
    entry: Entry, records: Mapping[str, Record], source: str | None, root: Path | None = None
) -> list[Finding]:
    """Everything that is wrong with an entry.

    records: by id. source: path of the version's file as Location must give it; None when no such version exists.
    root: folder of the checkout, whose commits hold the files of versions that are gone; None: they are not looked at.
    """
    findings = [*_fields(entry), *_code(entry, source, root), *_records(entry, records), *_sections(entry, source)]
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


def _fields(entry: Entry) -> Iterator[Finding]:
    if not entry.fields:
        return
    for name in entry.fields:
        if name == "records":
            beside = records_path(entry.path).name
            yield Finding(_line_of(entry, name), f"records stand in {beside}, beside the entry: one id a line, sorted")
        elif name not in (*FIELDS, *OPTIONAL):
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
    if "devices" in entry.fields and not isinstance(entry.fields["devices"], list):
        yield Finding(_line_of(entry, "devices"), "devices must be a list, as in devices: [a, b]")


def _code(entry: Entry, source: str | None, root: Path | None) -> Iterator[Finding]:
    """Whether the entry of a version that is gone names the commit that has it, and only such an entry does."""
    if not entry.fields:
        return
    line, place = _line_of(entry, "code"), entry.sections.get("Location", (1, ""))[0]
    code, named = entry.fields.get("code"), entry.location
    if source is not None:
        if code is not None:
            yield Finding(line, f"code is for a version whose file is gone, and {source} is here: leave it out")
        return
    design, language, version = entry.kernel
    if code is None:
        yield Finding(
            1,
            f"no version {language}/{design} v{version} exists: add code: COMMIT, the last commit that holds its file",
        )
    elif entry.commit is None:
        yield Finding(line, f"code {code!r} is no commit: give 7 to 40 of its digits")
    if named is None:
        yield Finding(
            place, "Location does not name the version's file: write its path in the commit as `folder/file.py`"
        )
    elif root is not None and (root / named).is_file():
        yield Finding(place, f"Location names {named}, which is here, and no version {language}/{design} v{version} is")
    elif root is not None and entry.commit and holds(root, entry.commit, named) is False:
        yield Finding(line, f"commit {code} does not hold {named}, the file that Location names")


def holds(root: Path, commit: str, path: str) -> bool | None:
    """Whether a commit holds a file; None where that cannot be asked: no git, no repository, or not that commit."""
    command = ["git", "-C", str(root), "ls-tree", "--name-only", commit, "--", path]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return bool(done.stdout.strip()) if done.returncode == 0 else None


def _records(entry: Entry, records: Mapping[str, Record]) -> Iterator[Finding]:
    if not entry.fields:
        return
    beside = records_path(entry.path)
    own = 0
    known: set[str] = set()
    before = ""
    for line, name in entry.listed:
        if name <= before:
            wrong = f"{name} stands twice" if name == before else f"{name} is out of order: sort the lines"
            yield Finding(line, wrong, beside)
        before = name
        try:
            record = find_record(records, name)
        except Unknown as error:
            yield Finding(line, f"{error}", beside)
            continue
        known.add(str(record["id"]))
        kernel = record["kernel"]
        own += (kernel["design"], kernel["language"], kernel["version"]) == entry.kernel
        devices = entry.fields.get("devices")
        if isinstance(devices, list) and record["device"] not in devices:
            yield Finding(_line_of(entry, "devices"), f"devices lacks {record['device']}, the one of record {name}")
    if not own and entry.verdict != "not run here":
        yield Finding(1, "no record of this version is listed here: a verdict rests on at least one", beside)
    for name in sorted(cited_ids(entry.text)):
        try:
            full = str(find_record(records, name)["id"])
        except Unknown:
            continue  # reported where it is cited
        if full not in known:
            yield Finding(1, f"record {full} is cited in {entry.path.name} and not listed here", beside)


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
        said = re.sub(r"^#+ .*$", "", without_comments(text), flags=re.MULTILINE)
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
