"""`mla-var3 devlog render`: the history of a design as one HTML page that needs nothing beside it.

A picture of the ladder (time by version) for the cells that most versions were timed in, the table behind it, then
every entry, the oldest first. The picture is that of the report (`charts.ladder`), drawn into the page as SVG.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_var3.errors import UserError, nearest
from mla_var3.files import check_folder, write_whole
from mla_var3.lab.devlog import skips
from mla_var3.lab.devlog.citations import find_record
from mla_var3.lab.devlog.entry import Entry, parse, sections
from mla_var3.lab.devlog.evidence import joined
from mla_var3.lab.devlog.segments import COMMENT, without_comments
from mla_var3.lab.devlog.values import Record, Unknown
from mla_var3.names import kernel_label
from mla_var3.record import as_ratio

if TYPE_CHECKING:
    from mla_var3.lab.report.answers import Ladder
    from mla_var3.lab.report.gather import Point

OUT = "out/devlog"
#: Cells that get a picture.
CELLS = 4
#: A citation in the HTML that was made of an entry.
_MARK = re.compile(r"\s*&lt;!--\s*r:(.*?)--&gt;", re.DOTALL)

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5b6570; --line: #d5dae0; --paper: #ffffff; --tint: #f3f5f7; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ec; --soft: #9aa5b1; --line: #3a424b; --paper: #14171a; --tint: #1d2226; }
}
body { font: 15px/1.55 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 62rem;
  margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.7rem } h2 { font-size: 1.3rem; margin-top: 2.6rem; border-top: 1px solid var(--line);
  padding-top: 1.2rem } h3 { font-size: 1.02rem; margin-bottom: .2rem }
table { border-collapse: collapse; font-size: .88rem; margin: .8rem 0; display: block; overflow-x: auto }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .6rem; text-align: left; vertical-align: top }
th { color: var(--soft); font-weight: 600 }
td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
figure { margin: 1.2rem 0; overflow-x: auto } figcaption, .meta { color: var(--soft); font-size: .88rem }
code { background: var(--tint); padding: .05rem .3rem; border-radius: 3px; font-size: .9em }
pre { background: var(--tint); padding: .7rem; overflow-x: auto }
a { color: inherit } sup a { color: var(--soft); text-decoration: none; font-size: .8em }
.verdict { font-size: .8rem; font-weight: 600; border: 1px solid var(--line); border-radius: 3px; padding: .1rem .45rem;
  margin-left: .6rem; vertical-align: middle }
.kept { border-color: #009e73 } .rejected { border-color: #d55e00 }
@media print { body { max-width: none } h2 { break-before: page } }
"""


@dataclass(frozen=True)
class Page:
    """What was written: file, entries on it, pictures in it."""

    path: Path
    entries: int
    pictures: int


def designs(root: Path) -> list[str]:
    """Designs that have entries."""
    return sorted({path.parent.name for path in (root / "devlogs").glob("*/*-v*.md")})


def render(root: Path, design: str | None = None, out: Path | None = None, state: str = "burst") -> list[Page]:
    """Writes the page of a design, or of each design, to `out/<design>.html`. Raises `UserError`."""
    from mla_var3.lab.devlog.check import load_records

    known = designs(root)
    if design is not None and design not in known:
        raise UserError(f"no design {design!r} has entries in {root / 'devlogs'}: {nearest(design, known)}.")
    if not known:
        raise UserError(f"there are no entries in {root / 'devlogs'}: mla-var3 devlog new starts one.")
    folder = Path(OUT) if out is None else out
    check_folder(folder, "--out")
    records, _ = load_records(root)
    pages = []
    for name in [design] if design is not None else known:
        text, entries, pictures = page(root, name, records, state)
        path = folder / f"{name}.html"
        write_whole(path, text)
        pages.append(Page(path, entries, pictures))
    return pages


def page(root: Path, design: str, records: dict[str, Any], state: str = "burst") -> tuple[str, int, int]:
    """(HTML, entries on it, pictures in it)."""
    entries = [parse(path)[0] for path in sorted((root / "devlogs" / design).glob("*-v*.md"))]
    entries = sorted(entries, key=lambda e: (str(e.fields.get("date", "")), e.kernel[2], e.kernel[1]))
    pictures = _pictures(records, design, state)
    body = [
        f"<h1>{_esc(design)}: its versions</h1>",
        _contents(entries),
        *([] if pictures else ["<p class='meta'>No version of it was timed yet.</p>"]),
        *pictures,
        *(_entry(entry, records) for entry in entries),
        _records(entries, records),
    ]
    head = f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{_esc(design)}</title>"
    view = "<meta name='viewport' content='width=device-width, initial-scale=1'>"
    text = f"{head}{view}<style>{_STYLE}</style></head><body>\n" + "\n".join(body) + "\n</body></html>\n"
    return text, len(entries), sum("<svg" in part for part in pictures)


def _esc(text: object) -> str:
    return html.escape(str(text))


def _label(entry: Entry) -> str:
    design, language, version = entry.kernel
    return kernel_label(language, design, version)


def _anchor(entry: Entry) -> str:
    return f"{entry.kernel[1]}-v{entry.kernel[2]}"


def _contents(entries: Sequence[Entry]) -> str:
    rows = []
    for entry in entries:
        first = re.split(r"(?<=[.:])\s", _plain(entry.sections.get("What changed", (0, ""))[1]), maxsplit=2)
        cells = (
            f"<a href='#{_anchor(entry)}'>{_esc(_label(entry))}</a>", _esc(entry.fields.get("date", "")),
            _esc(entry.verdict), _esc(_short(" ".join(first[:2]))),
        )  # fmt: skip
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{name}</th>" for name in ("version", "date", "verdict", "what changed"))
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def _plain(markdown: str) -> str:
    text = without_comments(markdown)
    return " ".join(re.sub(r"[`*_]|\[([^\]]*)\]\([^)]*\)", lambda m: m[1] or "", text).split())


def _short(text: str, most: int = 260) -> str:
    return text if len(text) <= most else text[:most].rpartition(" ")[0] + " …"


# ---------------------------------------------------------------- the ladder
def _pictures(records: dict[str, Any], design: str, state: str) -> list[str]:
    """A figure and its table for each of the cells that most versions were timed in."""
    from mla_var3.lab.report import answers
    from mla_var3.lab.report.gather import arrange
    from mla_var3.record import Record as Model

    gathered = arrange([Model.model_validate(record) for record in records.values()])
    found: list[str] = []
    for device in gathered.devices:
        mine = [p for p in gathered.newest if p.record.device == device and p.stats(state)]
        ours = sorted({p.language for p in mine if p.design == design and not p.is_peer})
        for cell in _cells(mine, design):
            ladders = answers.ladders(mine, design, cell, state)
            found.append(_picture(ladders, ours, design, cell, device, state))
    return found


def _cells(points: Iterable[Point], design: str) -> list[str]:
    """At most `CELLS`: one for each number of query rows first, those with most versions before others."""
    versions: dict[str, set[tuple[str, int]]] = {}
    rows: dict[str, int] = {}
    for p in points:
        if p.design == design and not p.is_peer:
            versions.setdefault(p.cell, set()).add((p.language, p.record.kernel.version))
            rows[p.cell] = getattr(p.problem, "rows", 0)
    order = sorted(versions, key=lambda cell: (-len(versions[cell]), -rows[cell], cell))
    first = [cell for i, cell in enumerate(order) if rows[cell] not in {rows[c] for c in order[:i]}]
    return list(dict.fromkeys([*first, *order]))[:CELLS]


def _picture(
    ladders: Sequence[Ladder], languages: Sequence[str], design: str, cell: str, device: str, state: str
) -> str:
    from mla_var3.lab.report import charts, rows
    from mla_var3.lab.report.export import render as draw

    steps, marks, far = rows.ladder(ladders, state)
    spec = charts.spec(charts.ladder(languages))
    charts.only_used(spec, steps)
    spec["datasets"] = {"rows": steps, "marks": marks}
    # Names of the two lines stand behind the picture's right edge.
    spec["config"]["padding"] = {"left": 8, "top": 8, "right": 60, "bottom": 8}
    svg = draw(spec, "svg").decode()
    # The page is light or dark; the picture follows it, as its ink did before it was drawn.
    svg = svg[svg.index("<svg") :].replace("#1b1f24", "currentColor")
    beyond = f" Beyond the picture: {', '.join(p.name for p in far)}." if far else ""
    title = f"{design} on {cell}, {device}, {state}: time by version"
    figure = f"<figure role='img' aria-label='{_esc(title)}'>{svg}<figcaption>{_esc(title + '.' + beyond)}</figcaption>"
    head = "".join(
        f"<th>{name}</th>"
        for name in ("version", f"{state} (us)", "% of limit", "against the version before", "mean of shared cells")
    )
    lines = []
    for ladder in ladders:
        for step in ladder.steps:
            share = step.point.share(state)
            cells = (
                f"{step.point.us(state):,.1f}", "-" if share is None else f"{100 * share:.1f}",
                "-" if step.gain is None else f"{as_ratio(step.gain, 4)}×",
                "-" if step.mean is None else f"{as_ratio(step.mean, 4)}× ({step.cells})",
            )  # fmt: skip
            link = f"<a href='#{step.point.language}-v{step.point.record.kernel.version}'>{_esc(step.point.name)}</a>"
            lines.append(f"<tr><td>{link}</td>" + "".join(f"<td class='n'>{c}</td>" for c in cells) + "</tr>")
    return f"{figure}</figure><table><tr>{head}</tr>{''.join(lines)}</table>"


# ---------------------------------------------------------------- entries
def _entry(entry: Entry, records: dict[str, Any]) -> str:
    verdict = entry.verdict or "no verdict"
    badge = f"<span class='verdict {_esc(verdict.split()[0])}'>{_esc(verdict)}</span>"
    devices = entry.fields.get("devices")
    measured = ", ".join(map(str, devices)) if isinstance(devices, list) and devices else "nowhere"
    meta = [f"{entry.fields.get('date', '')}", f"measured on {measured}"]
    said = skips.stated(entry)
    if said:
        meta.append("does not run on " + ", ".join(f"{name} ({reason})" for name, reason in said.items()))
    parts = [
        f"<h2 id='{_esc(_anchor(entry))}'>{_esc(_label(entry))}{badge}</h2>",
        f"<p class='meta'>{_esc('; '.join(meta))}</p>",
    ]
    for title, (_, text) in sections(joined(entry.text, entry.evidence), 2).items():
        parts.append(f"<h3>{_esc(title)}</h3>")
        parts.append(_html(text, records))
    return "\n".join(parts)


def _html(markdown: str, records: dict[str, Any]) -> str:
    """Markdown as HTML: raw HTML stays text, links into the repository become text, citations small marks."""
    from markdown_it import MarkdownIt

    text = COMMENT.sub("", markdown)
    text = re.sub(r"\[([^\]\n]*)\]\((?!https?://|#)[^)\s]*\)", r"\1", text)
    made: str = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)

    def mark(match: re.Match[str]) -> str:
        words = html.unescape(match[1]).split()
        if words and "/" in words[0]:
            return f"<sup title='{_esc(' '.join(words))}'>{_esc(words[0].rpartition('/')[2])}</sup>"
        try:
            full = str(find_record(records, words[0])["id"])
        except (Unknown, IndexError):
            return f" [r:{match[1].strip()}]"
        return f"<sup><a href='#r-{full}' title='{_esc(' '.join(words))}'>r:{_esc(full[:6])}</a></sup>"

    # Inside code a citation only shows how one is written.
    pieces = re.split(r"(<code[\s\S]*?</code>)", made)
    return "".join(piece if piece.startswith("<code") else _MARK.sub(mark, piece) for piece in pieces)


def _records(entries: Sequence[Entry], records: dict[str, Any]) -> str:
    """Every record that the entries cite, so that a mark on the page leads to something."""
    from mla_var3.lab.devlog import tables

    cited: dict[str, Record] = {}
    for entry in entries:
        for name in entry.record_ids:
            try:
                record = find_record(records, name)
            except Unknown:
                continue
            cited[str(record["id"])] = record
    if not cited:
        return ""
    rows = []
    for identity, record in sorted(cited.items(), key=lambda row: (str(row[1]["at"]), row[0])):
        times = record.get("time_us") or {}
        medians = [f"{times[s]['median']:,.1f}" if times.get(s) else "-" for s in ("burst", "sustained")]
        text = (identity, tables.label(record), tables.problem_label(record), record["device"], record["at"][:10])
        cells = "".join(f"<td>{_esc(one)}</td>" for one in (*text, record["status"]))
        rows.append(f"<tr id='r-{identity}'>{cells}{''.join(f'<td class=n>{m}</td>' for m in medians)}</tr>")
    names = ("record", "version", "cell", "device", "date", "status", "burst (us)", "sustained (us)")
    head = "".join(f"<th>{name}</th>" for name in names)
    return f"<h2 id='records'>Records</h2><table><tr>{head}</tr>{''.join(rows)}</table>"
