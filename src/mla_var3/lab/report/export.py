"""Records as CSV or Parquet, and the report's pictures as SVG or PNG files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_var3.errors import UserError, nearest
from mla_var3.files import write_whole
from mla_var3.lab.report.gather import Gathered, Point

PICTURES = ("map", "cell", "roofline", "ladder", "languages", "instructions", "compare")
TABLES = (".csv", ".parquet")


def write_table(gathered: Gathered, path: Path) -> int:
    """Every timed record, one row each with flat columns, and what the report calls its parts; returns the rows.

    The file's ending picks CSV or Parquet; another one is a `UserError`.
    """
    if path.suffix not in TABLES:
        raise UserError(f"{path} ends in {path.suffix!r}: {nearest(path.suffix, TABLES)}.")
    from mla_var3.record import to_frame

    frame = to_frame(p.record for p in gathered.points)
    extra = {"cell": [p.cell for p in gathered.points], "contender": [p.name for p in gathered.points]}
    extra |= {"set": [p.set for p in gathered.points]}
    for position, (name, values) in enumerate(extra.items()):
        frame.insert(position, name, values)
    frame.insert(len(extra), "newest", [p.newest for p in gathered.points])
    # A column of one type: what is a number in one record and a text in the next becomes text.
    for name in frame.columns:
        if frame[name].dtype == object and frame[name].map(type).nunique() > 1:
            frame[name] = frame[name].map(lambda value: None if value is None or value != value else str(value))
    write_whole(path, frame.to_csv(index=False) if path.suffix == ".csv" else frame.to_parquet(index=False))
    return len(frame)


@dataclass(frozen=True)
class Choice:
    """What the pictures are of. pair: two languages. compare: names of two record sets, or None."""

    device: str
    state: str
    cell: str
    design: str
    pair: tuple[str, str]
    compare: tuple[str, str] | None = None


def picture_specs(
    gathered: Gathered, choice: Choice, names: Sequence[str] = PICTURES
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file stem, Vega-Lite form with its rows) of each picture that has something to show."""
    from mla_var3.lab import naming
    from mla_var3.lab.report import answers, charts, legend, rows

    kernels = legend.kernels(gathered)
    titles = {k.title: k.colour for k in kernels.values()}
    state, device = choice.state, choice.device
    mine = [p for p in gathered.newest if p.record.device == device]
    ours = sorted({p.language for p in gathered.points if not p.is_peer})

    def of(
        stem: str, chart: Any, title: str, more: str | Sequence[str] = "", **data: Sequence[dict[str, Any]]
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        if data["rows"]:
            spec = charts.spec(chart)
            charts.only_used(spec, [row for some in data.values() for row in some])
            spec |= {
                "datasets": {name: list(some) for name, some in data.items()},
                "title": {"text": title, **({"subtitle": more} if more else {})},
            }
            spec["config"] |= {"background": "#ffffff", "padding": 10}
            yield stem, spec

    where = f"{_device_name(device)}, {state}"
    if "map" in names:
        decode = [p for p in mine if naming.phase(p.problem) == "decode"]
        found = answers.winners(decode, state)
        tiles = rows.regime_map(found, kernels)
        codes = {tile["code"] for tile in tiles}
        places = {name: [t for t in tiles if t["panel"] == name] for name in dict.fromkeys(t["panel"] for t in tiles)}
        panels = {name: (len({t["t"] for t in some}), len({t["b"] for t in some})) for name, some in places.items()}
        named = [f"{k.code} {k.label}" for k in kernels.values() if k.code in codes]
        said = [
            "Panels: heads × query tokens. Blue: ahead of the best library; orange: behind; grey: no library measured.",
            "No tile: no version that is here was measured. Fastest:",
            *(", ".join(named[i : i + 6]) for i in range(0, len(named), 6)),
        ]  # fmt: skip
        title = f"MLA decode against the best library, {where}"
        yield from of(
            f"map-{device}-{state}", charts.regime_map(panels), title, said, rows=tiles, legend=rows.map_legend()
        )
    block = [p for p in mine if p.cell == choice.cell and p.stats(state)]
    if "cell" in names and block:
        drawn, far = rows.cell(block, kernels, state)
        more = _beyond("Dashed: the limit, measured in the same run.", far)
        yield from of(
            f"cell-{choice.cell}-{device}-{state}", charts.cell(titles), f"{choice.cell}, {where}", more, rows=drawn
        )
    if "roofline" in names:
        live = [p for p in block if p.live and p.language != "torch"]
        points, lines = rows.roofline(live, answers.roofs(gathered.newest, device, state), kernels, state)
        stem, title = f"roofline-{choice.cell}-{device}-{state}", f"Roofline, {choice.cell}, {where}"
        yield from of(stem, charts.roofline(titles), title, rows=points, roofs=lines)
    if "ladder" in names:
        steps, marks, far = rows.ladder(answers.ladders(mine, choice.design, choice.cell, state), state)
        title, stem = f"{choice.design} by version", f"ladder-{choice.design}-{choice.cell}-{device}-{state}"
        more = _beyond(f"{choice.cell}, {where}.", far)
        yield from of(stem, charts.ladder(ours), title, more, rows=steps, marks=marks)
    pairs = answers.pairs(mine, *choice.pair, state)
    stem = f"{choice.pair[0]}-{choice.pair[1]}-{device}-{state}"
    if "languages" in names:
        title = f"{choice.pair[0]} and {choice.pair[1]}, the fastest of each, {where}"
        yield from of(f"languages-{stem}", charts.languages(ours), title, rows=rows.languages(pairs, state))
    if "instructions" in names and pairs:
        pair: tuple[Point, Point] = next((some for some in pairs if some[0].cell == choice.cell), pairs[0])
        kinds = [*answers.INSTRUCTION_KINDS, "other"]
        yield from of(
            f"instructions-{stem}",
            charts.instructions(kinds),
            "Instructions in the machine code",
            rows=rows.instructions(pair),
        )
    if "compare" in names and choice.compare:
        before, after = ([p for p in gathered.points if p.set == name] for name in choice.compare)
        found_moves = answers.compare(before, after, state).moves
        yield from of(
            f"compare-{state}",
            charts.moves(),
            f"{choice.compare[0]} to {choice.compare[1]}, {state}",
            rows=rows.moves(found_moves),
        )


def _beyond(text: str, far: Sequence[Point]) -> str:
    return text + (f" Beyond the picture: {', '.join(p.name for p in far)}." if far else "")


def _device_name(key: str) -> str:
    from mla_var3.device import Device

    try:
        return Device.get(key).name
    except UserError:
        return key


def render(spec: dict[str, Any], kind: str) -> bytes:
    """The picture as the bytes of an SVG or PNG file, drawn without a browser or a network."""
    import altair
    import vl_convert

    version = ".".join(altair.SCHEMA_VERSION.lstrip("v").split(".")[:2])
    if kind == "png":
        return bytes(vl_convert.vegalite_to_png(spec, vl_version=version, scale=2))
    svg: str = vl_convert.vegalite_to_svg(spec, vl_version=version)
    # Coordinates come with up to 14 digits; a hundredth of a pixel is enough. Texts have three at most.
    svg = re.sub(r"-?\d+\.\d{4,}", lambda found: f"{float(found[0]):.2f}", svg)
    # "point", "bar" and the like behind every label: a tenth of a picture with thousands of marks.
    svg = re.sub(r' aria-roledescription="[^"]*"', "", svg)
    return svg.replace("currentColor", "#1b1f24").encode()


def write_pictures(
    gathered: Gathered, folder: Path, choice: Choice, names: Sequence[str] = PICTURES, kinds: Sequence[str] = ("svg",)
) -> list[Path]:
    """Writes each picture that has something to show; returns the files. Raises `UserError` for an unknown name."""
    for name in names:
        if name not in PICTURES:
            raise UserError(f"there is no picture {name!r}: {nearest(name, PICTURES)}.")
    written = []
    for stem, spec in picture_specs(gathered, choice, names):
        for kind in kinds:
            path = folder / f"{stem}.{kind}"
            write_whole(path, render(spec, kind))
            written.append(path)
    return written
