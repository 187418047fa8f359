"""The index of docs/knowledge: README.md for readers, index.json for `find` and for a diagnosis."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mla_var3.lab.knowledge import triggers
from mla_var3.lab.knowledge.page import FOLDER, Page

VERSION = 1
_BEGIN, _END = "<!-- index: written by `mla-var3 knowledge check` -->", "<!-- end of index -->"


def build(pages: Sequence[Page], root: Path) -> dict[str, Any]:
    """What index.json holds: entries with triggers, and reference pages. Paths are relative to docs/knowledge."""
    entries, references = [], []
    for page in pages:
        meta = page.meta
        common = {
            "path": page.path.relative_to(root / FOLDER).as_posix(),
            "kind": page.kind,
            "title": str(meta.get("title", page.heading)),
            "summary": page.summary,
            "date": str(meta.get("date", "")),
        }
        urls = sorted({link.target for link in page.links if link.is_url})
        if page.kind == "reference":
            more = {"language": meta["language"], "checked": list(meta["checked"]), "keywords": list(meta["keywords"])}
            references.append(common | more)
            continue
        entries.append(
            common
            | {
                "languages": list(meta["languages"]),
                "archs": list(meta["archs"]),
                "applies": [trigger.to_json() for trigger in triggers.parse(meta["applies"])],
                "metrics": dict(meta["metrics"]),
                "records": sorted(page.evidence.ids),
                "gains": page.gains,
                "sources": urls,
            }
        )
    return {"version": VERSION, "entries": entries, "references": references}


def render(index: dict[str, Any], before: str) -> str:
    """README.md: what stands in `before` outside the two marks, and the tables between them."""
    head, _, rest = before.partition(_BEGIN)
    tail = rest.partition(_END)[2]
    return f"{head.rstrip()}\n\n{_BEGIN}\n{_tables(index)}\n{_END}\n{tail.lstrip()}"


def written_lines(text: str) -> range:
    """Line numbers of the part of a README that `render` writes; empty where there is none."""
    lines = text.splitlines()
    if _BEGIN not in lines or _END not in lines:
        return range(0)
    return range(lines.index(_BEGIN) + 1, lines.index(_END) + 2)


def _tables(index: dict[str, Any]) -> str:
    lines: list[str] = []
    for kind, title in (("optimization", "Optimizations"), ("anti-pattern", "Anti-patterns")):
        lines += [f"## {title}", "", "| entry | applies when | languages |", "| --- | --- | --- |"]
        for entry in (e for e in index["entries"] if e["kind"] == kind):
            when = "; or ".join(str(triggers.Trigger.from_json(t)) for t in entry["applies"])
            lines.append(f"| [{entry['title']}]({entry['path']}) | {when} | {', '.join(entry['languages'])} |")
        lines.append("")
    for language in sorted({page["language"] for page in index["references"]}):
        lines += [f"## {language}", "", "| page | about |", "| --- | --- |"]
        mine = [page for page in index["references"] if page["language"] == language]
        lines += [f"| [{page['title']}]({page['path']}) | {page['summary']} |" for page in mine]
        lines.append("")
    return "\n".join(lines).rstrip()


def files(index: dict[str, Any], root: Path) -> dict[Path, str]:
    """The two files and what they must hold."""
    readme = root / FOLDER / "README.md"
    before = readme.read_text(encoding="utf-8") if readme.is_file() else "# What was learned\n"
    return {
        root / FOLDER / "index.json": json.dumps(index, indent=1, ensure_ascii=False) + "\n",
        readme: render(index, before),
    }


def stale(index: dict[str, Any], root: Path) -> list[Path]:
    """Files of the index that do not hold what the pages say."""
    wanted = files(index, root)
    return [path for path, text in wanted.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]


def write(index: dict[str, Any], root: Path) -> list[Path]:
    """Writes the files that are stale, and names them."""
    wanted = files(index, root)
    changed = stale(index, root)
    for path in changed:
        path.write_text(wanted[path], encoding="utf-8")
    return changed
