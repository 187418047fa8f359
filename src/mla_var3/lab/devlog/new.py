"""`mla-var3 devlog new`: starts an entry from records. What only a person can say is a TODO, which check refuses."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from mla_var3.catalogue import registry
from mla_var3.catalogue.registry import KernelId
from mla_var3.errors import UserError
from mla_var3.lab.devlog import evidence, skips, tables
from mla_var3.lab.devlog.check import is_of, load_records, source_name
from mla_var3.lab.devlog.citations import cite, find_record
from mla_var3.lab.devlog.entry import TODO, entry_path
from mla_var3.lab.devlog.values import Record, Unknown
from mla_var3.record import ASIDE


def new(kernel: KernelId, root: Path, chosen: Sequence[str] = (), *, force: bool = False) -> Path:
    """Writes the entry of a version and the list of its records beside it; returns the entry's path.

    chosen: record files and record ids; without any, the newest record of each cell and device in `results/`.
    Raises `UserError` when the entry exists (unless `force`), or a file or record does not.
    """
    path = entry_path(root, kernel)
    if path.exists() and not force:
        raise UserError(f"{path} exists: edit it, or give --force to start it again.")
    files = [Path(item) for item in chosen if item.endswith(".jsonl") or "/" in item]
    by_id, _ = load_records(root, files)
    own = _own(kernel, by_id, chosen, files)
    path.parent.mkdir(parents=True, exist_ok=True)
    pairs = _before(kernel, by_id, own)
    text, lines = evidence.apart(_fill(kernel, root, own, pairs))
    path.write_text(text, encoding="utf-8")
    evidence.write(path, [str(record["id"]) for record in [*own, *(before for _, before in pairs)]], lines)
    return path


def _own(kernel: KernelId, by_id: dict[str, Any], chosen: Sequence[str], files: Sequence[Path]) -> list[Record]:
    """The records that the entry is about: named ones, those of named files, or the newest of each cell."""
    named = [item for item in chosen if Path(item) not in files]
    try:
        found: list[Record] = [find_record(by_id, item) for item in named]
    except Unknown as error:
        raise UserError(f"{error}: give an id that stands there, or the file that holds it.") from error
    for record in found:
        if not is_of(record, kernel):
            raise UserError(
                f"record {record['id']} is one of {tables.label(record)}, not of {kernel.label}: give another."
            )
    if files or not named:
        pool = list(by_id.values())
        if files:
            from mla_var3.record import load

            ids = {record.id for record in load(files).records}
            pool = [record for record in pool if record["id"] in ids]
        told = (record for record in pool if files or record.get("experiment") not in ASIDE)
        found += tables.newest(record for record in told if is_of(record, kernel))
    return list({record["id"]: record for record in found}.values())


def _before(kernel: KernelId, by_id: dict[str, Any], own: Sequence[Record]) -> list[tuple[Record, Record]]:
    """(record, record of the version before) for the cells that both have a time of."""
    earlier = [
        k
        for k in registry.all_kernels()
        if (k.language, k.layer, k.design) == (kernel.language, kernel.layer, kernel.design)
        and k.version < kernel.version
    ]
    if not earlier:
        return []
    told = (r for r in by_id.values() if is_of(r, earlier[-1]) and r.get("experiment") not in ASIDE)
    before = {tables.cell(r): r for r in tables.newest(told) if r["time_us"]}
    return [
        (record, before[tables.cell(record)]) for record in own if record["time_us"] and tables.cell(record) in before
    ]


def _fill(kernel: KernelId, root: Path, own: Sequence[Record], pairs: Sequence[tuple[Record, Record]]) -> str:
    template = Template(resources.files("mla_var3.lab.devlog").joinpath("template.md").read_text(encoding="utf-8"))
    devices = {str(r["device"]) for r in [*own, *(before for _, before in pairs)]}
    parts = [
        tables.of_records(own, tables.TIMES),
        tables.of_records(own, tables.RESOURCES, distinct=True),
        f"Against {tables.label(pairs[0][1])}, same cells:\n\n{tables.of_pairs(pairs)}" if pairs else "",
    ]
    measured = "\n\n".join(text for text in parts if text)
    untimed = [
        f"- {tables.problem_label(r)} on {r['device']}: {r['status']} {cite(r['id'])}" for r in own if not r["time_us"]
    ]
    if untimed:
        measured += "\n\nWithout a time:\n\n" + "\n".join(untimed)
    version = "the base version: say what it computes and how" if kernel.version == 0 else "against the version before"
    return template.substitute(
        design=kernel.design,
        language=kernel.language,
        version=kernel.version,
        date=date.today().isoformat(),
        devices=", ".join(sorted(devices)),
        skips=skips.words(kernel),
        label=kernel.label,
        source=source_name(kernel, root),
        measured_from=_origin(own),
        changed=f"{TODO}: {version}, and where the idea is from.",
        measured=measured.strip() or f"{TODO}: no records yet; measure, then start the entry again with --force.",
    )


def _origin(own: Sequence[Record]) -> str:
    """Which source the records describe."""
    sources = {(str(r["source"].get("commit") or "")[:12], str(r["source"]["hash"])) for r in own}
    said = [
        f"commit {commit}, source hash {digest}" if commit else f"source hash {digest}"
        for commit, digest in sorted(sources)
    ]
    return f"Measured at {'; '.join(said)}." if said else f"{TODO}: not measured yet."
