"""The form of one devlog entry: `devlogs/<design>/<language>-v<N>.md`, front matter, then sections.

A version that was one experiment has seven sections. One that grew by several has a section `Experiment: ...` for each,
which stands alone, with five headings of its own; Hypothesis and Measured of the whole are then free.

Beside it, `<language>-v<N>.records` lists the records it rests on, and says which figure is from which (`evidence`).
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from mla_var3.catalogue.registry import LANGUAGES, KernelId
from mla_var3.errors import nearest
from mla_var3.files import read_text
from mla_var3.lab.devlog import evidence
from mla_var3.lab.devlog.citations import check_text, find_record, has_figure
from mla_var3.lab.devlog.evidence import Evidence
from mla_var3.lab.devlog.front_matter import read_fields
from mla_var3.lab.devlog.segments import Finding, without_comments
from mla_var3.lab.devlog.values import Record, Unknown

SECTIONS = ("Location", "What changed", "Hypothesis", "Measured", "Bottleneck", "Verdict", "Insights")
#: Headings (###) of an experiment's section, in this order.
PARTS = ("What changed", "Hypothesis", "Measured", "Verdict", "Insights")
EXPERIMENT = "Experiment: "
#: Sections that a version of several experiments may leave to them.
FREE = ("Hypothesis", "Measured")
#: What a hypothesis says that was not written down before the measurement.
UNPREDICTED = "No figure was predicted"
#: Of what no GPU has timed, neither in a record nor in a trace.
NOT_RUN = "not run here"
VERDICTS = ("kept", "rejected", "superseded", NOT_RUN)
FIELDS = ("design", "language", "version", "date", "verdict", "devices")
#: skips: owed where `devlog.skips` says so. code: the commit that holds a version whose file is no longer here.
OPTIONAL = ("skips", "code")
TODO = "TODO"
_COMMIT = re.compile(r"[0-9a-f]{7,40}")


@dataclass
class Entry:
    """A parsed entry. fields: the front matter. sections: title -> (line of its heading, text below it). order: (line,
    title) of each heading. evidence: the list of records beside it."""

    path: Path
    fields: dict[str, Any] = field(default_factory=dict)
    sections: dict[str, tuple[int, str]] = field(default_factory=dict)
    order: list[tuple[int, str]] = field(default_factory=list)
    text: str = ""
    evidence: Evidence = field(default_factory=Evidence)

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
        """Ids, or beginnings of ids, that the list beside the entry names; none where there is no list."""
        return self.evidence.ids

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


def path_of_label(root: Path, label: str) -> Path | None:
    """Where the entry of `language/design[_vN]` lies, retired or not; None of anything else."""
    match = re.fullmatch(r"([\w-]+)/(\w+?)(?:_v(\d+))?", label)
    if match is None or match[1] not in LANGUAGES:
        return None
    return entry_path(root, KernelId(match[1], "", match[2], int(match[3] or 0)))


def records_path(path: Path) -> Path:
    """Where the list of an entry's records lies."""
    return path.with_suffix(evidence.SUFFIX)


def parse(path: Path) -> tuple[Entry, list[Finding]]:
    """Reads an entry; findings say what kept its front matter from being read."""
    entry = Entry(path, text=read_text(path))
    entry.fields, findings = read_fields(entry.text)
    entry.evidence = evidence.beside(path)
    entry.order = headings(entry.text, 2)
    entry.sections = sections(entry.text, 2)
    return entry, findings


def headings(text: str, level: int) -> list[tuple[int, str]]:
    """(line, title) of each heading with so many #, outside fenced blocks."""
    found, fence = [], ""
    for number, row in enumerate(text.split("\n"), start=1):
        marker = re.match(r"\s*(```+|~~~+)", row)
        if marker and (not fence or marker[1].startswith(fence)):
            fence = "" if fence else marker[1]
        heading = None if fence else re.fullmatch(rf"{'#' * level}\s+(.+?)\s*", row)
        if heading:
            found.append((number, heading[1]))
    return found


def sections(text: str, level: int, first_line: int = 1) -> dict[str, tuple[int, str]]:
    """Title -> (line of its heading, text below it, up to the next heading of that level)."""
    rows = text.split("\n")
    found = headings(text, level)
    ends = [*(number - 1 for number, _ in found[1:]), len(rows)][: len(found)]
    return {
        title: (first_line + number - 1, "".join(f"{row}\n" for row in rows[number:end]))
        for (number, title), end in zip(found, ends, strict=True)
    }


def check_entry(
    entry: Entry, records: Mapping[str, Record], source: str | None, root: Path | None = None
) -> list[Finding]:
    """Everything that is wrong with an entry.

    records: by id. source: path of the version's file as Location must give it; None when no such version exists.
    root: folder of the checkout, whose commits hold the files of versions that are gone; None: they are not looked at.
    """
    findings = [*_fields(entry), *_code(entry, source, root), *_records(entry, records), *_sections(entry, source)]
    measured = _measured(entry)
    findings += check_text(
        entry.text,
        records,
        require=lambda line: "all" if line in measured else "none",
        evidence=entry.evidence,
        root=root,
    )
    for number, text in enumerate(entry.text.split("\n"), start=1):
        if re.search(rf"\b{TODO}\b", text):
            findings.append(Finding(number, f"a {TODO} is left: {text.strip()[:80]}"))
    return sorted(findings, key=lambda f: f.line)


def _measured(entry: Entry) -> set[int]:
    """Lines of the sections Measured, an experiment's among them: each figure there is one of a record."""
    found: set[int] = set()
    for title, (line, text) in entry.sections.items():
        parts = {title: (line, text)} if title in SECTIONS else sections(text, 3, line + 1)
        for below, (start, said) in parts.items():
            if below == "Measured":
                found |= set(range(start, start + said.count("\n") + 1))
    return found


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
    before = ""
    for line, name in entry.evidence.listed:
        if name <= before:
            wrong = f"{name} stands twice" if name == before else f"{name} is out of order: sort the lines"
            yield Finding(line, wrong, beside)
        before = name
    lines = {name: line for line, name in entry.evidence.listed}
    for name in entry.record_ids:
        try:
            record = find_record(records, name)
        except Unknown as error:
            if name in lines:  # of a block's evidence it is told where that is compared
                yield Finding(lines[name], f"{error}", beside)
            continue
        kernel = record["kernel"]
        own += (kernel["design"], kernel["language"], kernel["version"]) == entry.kernel
        devices = entry.fields.get("devices")
        if isinstance(devices, list) and record["device"] not in devices:
            yield Finding(_line_of(entry, "devices"), f"devices lacks {record['device']}, the one of record {name}")
    if entry.verdict != NOT_RUN:
        if not own and not entry.evidence.files:
            what = "no record of this version is listed here, and no trace is cited: a verdict rests on at least one"
            yield Finding(1, what, beside)
    elif timed := next((name for name, record in records.items() if _timed(record, entry.kernel)), None):
        yield Finding(_line_of(entry, "verdict"), f"the verdict is {NOT_RUN!r}, and record {timed} has timed it")


def _timed(record: Record, kernel: tuple[str, str, int]) -> bool:
    of = record["kernel"]
    return bool(record.get("time_us")) and (of["design"], of["language"], of["version"]) == kernel


def _sections(entry: Entry, source: str | None) -> Iterator[Finding]:
    experiments = [title for _, title in entry.order if title.startswith(EXPERIMENT)]
    needed = [title for title in SECTIONS if not (experiments and title in FREE)]
    before = SECTIONS.index("Measured") + 1
    allowed = [*SECTIONS[:before], *dict.fromkeys(experiments), *SECTIONS[before:]]
    last = len(entry.text.rstrip().split("\n"))
    yield from _titles(entry.order, allowed, needed, last)
    for title in allowed:
        if title not in entry.sections:
            continue
        line, text = entry.sections[title]
        if title in experiments:
            inside = [(line + number, part) for number, part in headings(text, 3)]
            yield from _titles(inside, PARTS, PARTS, line + len(text.rstrip().split("\n")), f"{title!r}: ")
            for part, (start, said) in sections(text, 3, line + 1).items():
                if part in PARTS:
                    yield from _said(entry, part, start, said, None, experiment=True)
        else:
            yield from _said(entry, title, line, text, source)


def _titles(
    order: Sequence[tuple[int, str]], allowed: Sequence[str], needed: Sequence[str], last: int, where: str = ""
) -> Iterator[Finding]:
    """Headings that are unknown, there twice, missing or out of order. last: the line that lacks what is missing."""
    kind = "heading" if where else "section"
    titles = [title for _, title in order]
    for number, title in order:
        if title not in allowed:
            names = ", ".join(name for name in allowed if not name.startswith(EXPERIMENT))
            or_else = "" if where else f", '{EXPERIMENT}...'; use ### inside one of them"
            yield Finding(number, f"{where}{kind} {title!r} is not one of: {names}{or_else}")
        elif titles.count(title) > 1 and number != order[titles.index(title)][0]:
            yield Finding(number, f"{where}{kind} {title!r} stands twice")
    for title in needed:
        if title not in titles:
            yield Finding(last, f"{where}{kind} {title!r} is missing")
    present = list(dict.fromkeys(t for t in titles if t in allowed))
    expected = [t for t in allowed if t in present]
    if present != expected:
        wrong = next(t for t, e in zip(present, expected, strict=True) if t != e)
        yield Finding(order[titles.index(wrong)][0], f"{where}{kind} {wrong!r} is out of order: {', '.join(allowed)}")


def _said(
    entry: Entry, title: str, line: int, text: str, source: str | None, *, experiment: bool = False
) -> Iterator[Finding]:
    """Whether a section says what its title promises."""
    said = re.sub(r"^#+ .*$", "", without_comments(text), flags=re.MULTILINE)
    if not re.search(r"[^\W\d_]{2}", said):
        yield Finding(line, f"section {title!r} is empty")
        return
    if title == "Hypothesis" and not has_figure(said) and UNPREDICTED.lower() not in said.lower():
        message = "the hypothesis predicts no figure with a unit: say what the version should reach"
        yield Finding(line, message if not experiment else f"{message}, or '{UNPREDICTED}'")
    if title == "Location" and source is not None and source not in said:
        yield Finding(line, f"Location does not name the version's file, {source}")
    if title == "Verdict":
        first = re.match(r"\W*(" + "|".join(VERDICTS) + r")\b", said, re.IGNORECASE)
        if experiment and first is None:
            yield Finding(line, f"an experiment's verdict begins with one of: {', '.join(VERDICTS)}")
        if not experiment and entry.verdict in VERDICTS and (first is None or first[1].lower() != entry.verdict):
            yield Finding(line, f"the section must begin with the front matter's verdict, {entry.verdict!r}")
