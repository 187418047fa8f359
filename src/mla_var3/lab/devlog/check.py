"""`mla-var3 devlog check`: every version has an entry, every figure agrees with the record it points at, and every file
and kernel that a page or a config names exists."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mla_var3 import paths
from mla_var3.catalogue import ledger, registry
from mla_var3.catalogue.registry import KernelId
from mla_var3.errors import UserError
from mla_var3.files import read_text
from mla_var3.lab.devlog import evidence, named, skips
from mla_var3.lab.devlog.citations import check_text, find_record
from mla_var3.lab.devlog.entry import Entry, check_entry, entry_path, holds, parse, records_path
from mla_var3.lab.devlog.values import Record, Unknown
from mla_var3.names import by_number
from mla_var3.toolchain.digest import Code
from mla_var3.workload import problem_from_record

#: Pages that scripts/results_pages.py makes of records.
MADE = Path("docs/results")


def find_root(given: Path | None = None) -> Path:
    """The folder with `devlogs/` and `results/`: as given, else the current folder or the nearest above it, else the
    repository that the package runs from. Raises `UserError` when there is none."""
    if given is not None:
        if not given.is_dir():
            raise UserError(f"{given} is not a folder: give the one that holds devlogs/ and results/.")
        return given.resolve()
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / "devlogs").is_dir():
            return folder
    root = paths.repo_root()
    if root is None:
        raise UserError(
            "there is no devlogs/ here or above, and an installed package has none: work in a checkout of the project, "
            "or give --root FOLDER, which holds devlogs/ and results/."
        )
    return root


def load_records(root: Path, more: Sequence[Path] = ()) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Records of `results/` (and of other files) by id, and one line for each that cannot be read, that stands twice,
    or whose digest is damaged."""
    from mla_var3.record import load

    folders = [folder for folder in (root / "results",) if folder.is_dir()]
    result = load([*folders, *more])
    records: dict[str, dict[str, Any]] = {}
    problems = [_relative(text, root) for text in result.problems]
    for record in result.records:
        if record.id in records and records[record.id] != record.model_dump():
            problems.append(f"results: two different records have the id {record.id}")
        if record.code is not None and not _whole(record.code):
            problems.append(f"results: the digest of record {record.id} is not that of the code that it holds")
        records[record.id] = record.model_dump()
    return records, problems


def _whole(code: Mapping[str, Any]) -> bool:
    """Whether the digest of a record's code is that of what it is made of."""
    try:
        return Code.from_record(code).digest == code["digest"]
    except (KeyError, TypeError):
        return False


def _relative(text: str, root: Path) -> str:
    return text.removeprefix(f"{root}/")


def check(root: Path, only: Iterable[Path] = ()) -> tuple[list[str], list[str]]:
    """(failures, notes): a failure is `file:line: message`, and notes of one kind are one line. only: these entries or
    Markdown files and nothing else; for a list of records the entry that it belongs to."""
    records, failures = load_records(root)
    unread_of: dict[str, list[str]] = {}
    others: list[str] = []
    chosen = [path.resolve() for path in only]
    entries = sorted((root / "devlogs").glob("*/*.md"), key=lambda path: by_number(str(path)))
    entries = [path for path in entries if path.name != "README.md"]
    pages = [path for path in (root / "README.md",) if path.is_file()] + sorted((root / "docs").rglob("*.md"))
    if chosen:
        for path in chosen:
            if not path.is_file():
                raise UserError(f"{path} is not a file: give entries or other Markdown files.")
        chosen = list(dict.fromkeys(_entry_of(path) for path in chosen))
        pages = [path for path in chosen if path not in entries]
        entries = [path for path in chosen if path in entries]
        failures = []  # of record files: they are not what was asked about
    naming = [*pages, *(() if chosen else _also_naming(root))]
    # Made from records, which a test makes again; they cite none.
    pages = [path for path in pages if not path.is_relative_to(root / MADE)]
    labels = named.labels_of(root)

    versions = _versions(root)
    unasked: list[str] = []
    for path in entries:
        entry, findings = parse(path)
        version = versions.get(path)
        source = None if version is None else source_name(version, root)
        findings += check_entry(entry, records, source, root)
        if version is None and entry.commit and entry.location and holds(root, entry.commit, entry.location) is None:
            unasked.append(entry.commit)
        held = partial(_held, root, entry) if version is None or "code" in entry.fields else None
        findings += named.check(entry.text, root, labels, held)
        skipped, unread = skips.check(entry, version, records)
        findings += skipped
        if unread and version is not None:
            unread_of.setdefault(unread, []).append(version.label)
        failures += [f"{_name(f.path or path, root)}:{f.line}: {f.message}" for f in findings]
        if version is not None:
            others += _standing(entry.record_ids, version, records)
    notes = [f"where {', '.join(of)} do not run was not compared: {why}" for why, of in unread_of.items()]
    if others:
        notes.append(f"not all of their records time the code that is here: {'; '.join(others)}")
    if unasked:
        commits = ", ".join(dict.fromkeys(unasked))
        notes.append(f"not here, so not asked whether they hold the files of {len(unasked)} entries: commits {commits}")
    if not chosen:
        lists = [*(root / "devlogs").glob("*/*.records"), *root.glob("*.records"), *(root / "docs").rglob("*.records")]
        for path in sorted(lists):
            if not _entry_of(path).is_file():
                failures.append(f"{_name(path, root)}:1: no page {_entry_of(path).name} stands beside this list")
        for path, kernel in versions.items():
            # Of other people's libraries there is nothing to tell: an entry may stand, and none has to.
            owed = kernel.language != "peer" and kernel.path.is_relative_to(root)
            if owed and not path.is_file():
                failures.append(
                    f"{_name(path, root)}:1: {kernel.label} has no entry: mla-var3 devlog new {kernel.label}"
                )
    for path in pages:
        text, beside = read_text(path), evidence.beside(path)
        found = check_text(text, records, require="tables", evidence=beside, root=root)
        failures += [f"{_name(f.path or path, root)}:{f.line}: {f.message}" for f in found]
    for path in naming:
        missing = named.check(read_text(path), root, labels)
        failures += [f"{_name(path, root)}:{f.line}: {f.message}" for f in missing]
    return failures, notes


def _held(root: Path, entry: Entry, path: str) -> bool | None:
    """Whether the commit of a retired version's entry has a path; None where that cannot be asked, and of the version's
    own file, of which `check_entry` tells."""
    return None if entry.commit is None or path == entry.location else holds(root, entry.commit, path)


def _also_naming(root: Path) -> list[Path]:
    """What names files and kernels beside README.md, docs/ and the entries."""
    pages = [path for path in (root / "CONTRIBUTING.md", root / "devlogs" / "README.md") if path.is_file()]
    return [*pages, *sorted((root / "conf").rglob("*.yaml")), *sorted((root / "examples").rglob("*.yaml"))]


def _entry_of(path: Path) -> Path:
    """The page that a list of records belongs to; any other file itself."""
    entry = path.with_suffix(".md")
    return entry if path == records_path(entry) else path


def _versions(root: Path) -> dict[Path, KernelId]:
    return {entry_path(root, kernel): kernel for kernel in registry.all_kernels()}


def source_name(kernel: KernelId, root: Path) -> str:
    """The version's file as an entry names it: from the root of the repository, or of the package."""
    path = kernel.path
    return (
        str(path.relative_to(root))
        if path.is_relative_to(root)
        else f"mla_var3/{path.as_posix().split('/mla_var3/')[-1]}"
    )


def _name(path: Path, root: Path) -> str:
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


def _standing(ids: Iterable[str], kernel: KernelId, records: dict[str, dict[str, Any]]) -> list[str]:
    """The version with counts, where its records that timed code did not all time that which is here, as
    `mla_var3.catalogue.ledger` knows it."""
    found: Counter[str] = Counter()
    named: dict[str, Record] = {}
    for name in ids:
        with contextlib.suppress(Unknown):
            of_name = find_record(records, name)
            named[str(of_name["id"])] = of_name
    for record in named.values():
        if not is_of(record, kernel) or not record.get("time_us"):
            continue
        digest = (record.get("code") or {}).get("digest", "")
        found[ledger.standing(kernel.label, problem_from_record(record["problem"]), digest)] += 1
    if not found.keys() - {ledger.SAME, ledger.LIBRARY}:
        return []
    counts = ", ".join(f"{count} {word}" for word, count in sorted(found.items()))
    return [f"{kernel.label} ({counts})"]


def is_of(record: Record, kernel: KernelId) -> bool:
    """Whether a record is one of that version."""
    return KernelId.from_record(record["kernel"]) == kernel
