"""The pictures, as Altair charts over rows that are filled in later.

A chart names its data (`rows`, `roofs`); the page fills them in the browser after filtering, `export` fills them from
`answers` for a picture file. So both are the same charts. Text and lines are `currentColor`: they follow the page
between light, dark and paper.
"""

from __future__ import annotations

import colorsys
import math
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

#: Okabe and Ito's colours, which the common kinds of colour blindness keep apart, without black; then two of Tol's
#: muted ones. Colour never stands alone: tiles carry a code, points a shape, bars a name.
PALETTE = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999933", "#AA4499",
)  # fmt: skip
#: One hue for each language, in degrees; libraries have the warm ones. Versions are shades of their language's.
HUES = {"cute-dsl": 205, "cutile-dsl": 160, "triton": 280, "torch": None, "peer": 30}
#: How far ahead: twice the octaves that a tile's colour spans, from the library's side over level to ours. Black text
#: reads on all three.
AHEAD, LEVEL, BEHIND = "#5b9bd5", "#f4f4f4", "#e8873a"
FAR_AHEAD = 1.5  # times as fast; what is further ahead looks the same
NO_LIBRARY = "#c4c4c4"
SHAPES = {
    "cute-dsl": "circle", "cutile-dsl": "square", "triton": "triangle-up", "torch": "diamond", "peer": "cross",
}  # fmt: skip
INK = "currentColor"
TILE = (36, 22)  # pixels


def shade(language: str, place: float) -> str:
    """A colour of a language's hue: place 0 is its palest shade, 1 its strongest."""
    hue = HUES.get(language)
    # Libraries are few and unrelated, so theirs span red to yellow, away from the cold hues of the languages here.
    degrees = (hue or 0) + (80 * (place - 0.75) if language == "peer" else 0)
    lightness = 0.52 if language == "peer" else 0.82 - 0.44 * place
    r, g, b = colorsys.hls_to_rgb(degrees % 360 / 360, lightness, 0.0 if hue is None else 0.75)
    return "#" + "".join(f"{round(255 * c):02x}" for c in (r, g, b))


def config() -> dict[str, Any]:
    """What all charts share."""
    text = {"labelColor": INK, "titleColor": INK, "labelFontSize": 11, "titleFontSize": 12, "titleFontWeight": "normal"}
    return {
        "background": None,
        "font": "system-ui, sans-serif",
        "view": {"stroke": None},
        "axis": {
            **text,
            "domainColor": INK,
            "tickColor": INK,
            "gridColor": INK,
            "gridOpacity": 0.12,
            "domainOpacity": 0.4,
        },
        "axisY": {"labelLimit": 330},
        "header": {"labelColor": INK, "titleColor": INK, "labelFontSize": 12},
        "legend": {**text, "symbolStrokeColor": INK, "columns": 2},
        "title": {"color": INK, "subtitleColor": INK, "anchor": "start", "fontSize": 13, "subtitleFontSize": 11},
        "text": {"color": INK},
        "rule": {"color": INK},
    }


def _data(name: str = "rows") -> alt.NamedData:
    return alt.NamedData(name=name)


def _by(field: str) -> alt.EncodingSortField:
    """An order that layers can share: each name has one value of the field in all of them."""
    return alt.EncodingSortField(field=field, op="min")


def _colour(kernels: Mapping[str, str], field: str = "kernel", *, legend: bool = True) -> alt.Color:
    """kernels: name -> colour, the same in every picture of a report."""
    shown = alt.Legend(title=None, orient="bottom", symbolLimit=0, labelLimit=0) if legend else None
    return alt.Color(f"{field}:N", scale=alt.Scale(domain=list(kernels), range=list(kernels.values())), legend=shown)


def _languages(names: Sequence[str], orient: str) -> alt.Color:
    scale = alt.Scale(domain=list(names), range=[shade(name, 0.85) for name in names])
    return alt.Color("language:N", scale=scale, legend=alt.Legend(title=None, orient=orient))


def _shape() -> alt.Shape:
    """A shape for each language, beside the colour."""
    return alt.Shape("language:N", scale=alt.Scale(domain=list(SHAPES), range=list(SHAPES.values())), legend=None)


# ---------------------------------------------------------------- regime map
def _tiles(base: alt.Chart) -> alt.Chart:
    far = math.log2(FAR_AHEAD)
    scale = alt.Scale(domain=[-far, 0, far], range=[BEHIND, LEVEL, AHEAD], clamp=True)
    colour = alt.Color("ahead:Q", scale=scale, legend=None)
    tile = base.mark_rect(stroke=INK, strokeWidth=0.4, cornerRadius=3, cursor="pointer", invalid="show")
    return tile.encode(color=alt.condition("!isValid(datum.ahead)", alt.value(NO_LIBRARY), colour))


def map_legend() -> alt.Chart:
    """What the colours of the map's tiles say. legend: label, ahead (`rows.map_legend`)."""
    axis = alt.Axis(orient="top", labelAngle=0, domain=False, ticks=False, labelPadding=2, titleAnchor="start")
    x = alt.X("label:N", sort=None, title="the best library's time over ours", axis=axis)
    return _tiles(alt.Chart(_data("legend")).encode(x=x)).properties(width={"step": 50}, height=14)


def map_panel() -> alt.LayerChart:
    """A panel of the regime map: requests up, context to the right, a tile for each cell.

    rows: panel, b, t, code (of the fastest kernel), ahead (octaves that ours is ahead of the best library, or null),
    and `tip`, `said`. Colour: how far ahead. No tile: no version that is here was measured.
    """
    x = alt.X("t:O", title="cached tokens", axis=alt.Axis(labelAngle=0, grid=False, labelExpr=_SHORT, labelPadding=3))
    y = alt.Y("b:O", title="requests", sort="descending", axis=alt.Axis(grid=False))
    base = alt.Chart(_data()).encode(x=x, y=y, tooltip=alt.Tooltip("tip:N"))
    tile = _tiles(base).encode(description=alt.Description("said:N"))
    code = base.mark_text(fontSize=10, color="#000000", aria=False).encode(text="code:N")
    width, height = TILE
    return alt.layer(tile, code).properties(
        width={"step": width}, height={"step": height}, view=alt.ViewConfig(stroke=INK, strokeOpacity=0.15)
    )


#: Pixels of the map: between its panels, and what a title may be wider than a panel's tiles.
SPACING, TITLE_ROOM = 14, 45


def title_lines(name: str, width: int) -> list[str]:
    """A panel's title, broken behind commas where a line would be wider than the panel; a letter has 7 pixels."""
    lines: list[str] = []
    for part in name.split(", "):
        if lines and 7 * len(f"{lines[-1]}, {part}") <= width:
            lines[-1] += f", {part}"
        else:
            lines.append(part)
    return [f"{line}," for line in lines[:-1]] + lines[-1:]


def regime_map(panels: Mapping[str, tuple[int, int]], width: int = 1100) -> alt.VConcatChart:
    """Panels (name -> contexts and batches in it) in rows of that many pixels, large ones first, each with its own
    axes, under the legend. The page does the same to `map_panel`."""
    found: list[list[str]] = []
    left = 0
    for name, (contexts, _) in sorted(panels.items(), key=lambda item: -item[1][0]):
        wide = contexts * TILE[0] + 70
        if not found or left < wide:
            found, left = [*found, []], width
        found[-1].append(name)
        left -= wide + SPACING

    def panel(name: str) -> alt.LayerChart:
        chosen = map_panel().transform_filter(alt.FieldEqualPredicate(field="panel", equal=name))
        width, height = (n * step for n, step in zip(panels[name], TILE, strict=True))
        title = alt.TitleParams(title_lines(name, width + TITLE_ROOM), fontSize=12, offset=4)
        return chosen.properties(title=title, width=width, height=height)

    return alt.vconcat(
        map_legend(), *(alt.hconcat(*map(panel, row), spacing=SPACING) for row in found), spacing=SPACING
    )


#: 131072 -> 128k
_SHORT = "datum.value % 1024 == 0 ? datum.value / 1024 + 'k' : datum.value"


# ---------------------------------------------------------------- one cell
def cell(kernels: Mapping[str, str], width: int | str = 460) -> alt.LayerChart:
    """A bar for each contender with its p10..p90 range, and a line at the limit of its own run.

    rows: name, kernel, us, p10, p90, limit (or null), tip.
    """
    y = alt.Y("name:N", title=None, sort=_by("us"), axis=alt.Axis(grid=False, domain=False))
    base = alt.Chart(_data()).encode(y=y, tooltip=alt.Tooltip("tip:N"))
    bar = base.mark_bar(height=12, stroke=INK, strokeWidth=0.4, cursor="pointer").encode(
        x=alt.X("us:Q", title="microseconds of one call"),
        color=_colour(kernels, legend=False),
        description=alt.Description("said:N"),
    )
    spread = base.mark_rule(strokeWidth=2).encode(x="p10:Q", x2="p90:Q")
    ends = [base.mark_tick(thickness=2, height=9, color=INK).encode(x=f"{end}:Q") for end in ("p10", "p90")]
    limit = base.transform_filter("isValid(datum.limit)").mark_tick(
        thickness=2.5, height=20, color=INK, strokeDash=[3, 2]
    )
    chart = alt.layer(bar, spread, *ends, limit.encode(x="limit:Q"))
    return chart.properties(width=width, height={"step": 24})


# ---------------------------------------------------------------- roofline
def roofline(kernels: Mapping[str, str], width: int | str = 560, height: int = 380) -> alt.LayerChart:
    """TFLOP/s over FLOPs a byte, both on log axes, under the roofs.

    rows: x, y, kernel, language, name, cell, tip. roofs: x, y, kind ("measured", "data sheet").
    """
    log = {"type": "log", "nice": False}
    x = alt.X(
        "x:Q", title="FLOP per byte of minimal traffic", scale=alt.Scale(**log), axis=alt.Axis(format="~s", tickCount=6)
    )
    y = alt.Y("y:Q", title="TFLOP/s", scale=alt.Scale(**log), axis=alt.Axis(format="~s", tickCount=6))
    roofs = (
        alt.Chart(_data("roofs"))
        .mark_line(stroke=INK, strokeWidth=1.8)
        .encode(
            x=x, y=y,
            strokeDash=alt.StrokeDash(
                "kind:N", legend=alt.Legend(title=None, orient="top"),
                scale=alt.Scale(domain=["measured", "data sheet"], range=[[1, 0], [5, 4]]),
            ),
        )
    )  # fmt: skip
    points = (
        alt.Chart(_data())
        .mark_point(filled=True, size=62, stroke=INK, strokeWidth=0.5, opacity=0.9, cursor="pointer")
        .encode(
            x=x, y=y, color=_colour(kernels), tooltip=alt.Tooltip("tip:N"), description=alt.Description("said:N"),
            shape=_shape(),
        )
    )  # fmt: skip
    return alt.layer(roofs, points).properties(width=width, height=height)


# ---------------------------------------------------------------- ladder
def ladder(languages: Sequence[str], width: int | str = 460, height: int = 280) -> alt.LayerChart:
    """Time by version, a line for each language; dashed: the fastest library; solid: the limit.

    rows: version ("v1"), us, p10, p90, language, label, tip. marks: us, what, label.
    """
    colour = _languages(languages, "bottom")
    x = alt.X("version:O", title="version", sort=None, axis=alt.Axis(labelAngle=0, grid=False))
    y = alt.Y("us:Q", title="microseconds of one call", scale=alt.Scale(zero=True))
    base = alt.Chart(_data()).encode(x=x, y=y, color=colour)
    tips = {"tooltip": alt.Tooltip("tip:N"), "description": alt.Description("said:N")}
    line = base.mark_line(strokeWidth=2)
    range_ = base.mark_rule(strokeWidth=2).encode(y="p10:Q", y2="p90:Q")
    point = base.mark_point(filled=True, size=90, stroke=INK, strokeWidth=0.5, cursor="pointer").encode(
        shape=_shape(),
        **tips,
    )
    text = base.mark_text(dy=-12, fontSize=11, color=INK).encode(text="label:N", color=alt.value(INK))
    marks = alt.Chart(_data("marks"))
    dash = alt.StrokeDash("what:N", legend=None, scale=alt.Scale(domain=["library", "limit"], range=[[6, 4], [1, 0]]))
    rule = marks.mark_rule(strokeWidth=1.5, aria=False).encode(y="us:Q", strokeDash=dash)
    name = marks.mark_text(align="left", dx=6, fontSize=11).encode(y="us:Q", x=alt.value("width"), text="label:N")
    return alt.layer(rule, name, line, range_, point, text).properties(width=width, height=height)


# ---------------------------------------------------------------- languages
def languages(names: Sequence[str], width: int | str = 420) -> alt.LayerChart:
    """Share of the limit by cell, a point for each language. rows: cell, rank, language, share (percent), tip."""
    y = alt.Y("cell:N", title=None, sort=_by("rank"), axis=alt.Axis(grid=True))
    base = alt.Chart(_data()).encode(y=y)
    line = base.mark_rule(strokeWidth=1.5, opacity=0.5, aria=False).encode(x="min(share):Q", x2="max(share):Q")
    point = base.mark_point(filled=True, size=90, stroke=INK, strokeWidth=0.5, cursor="pointer").encode(
        x=alt.X("share:Q", title="% of the limit of the same run", scale=alt.Scale(zero=True)),
        color=_languages(names, "top"),
        shape=_shape(),
        tooltip=alt.Tooltip("tip:N"),
        description=alt.Description("said:N"),
    )
    return alt.layer(line, point).properties(width=width, height={"step": 20})


def instructions(kinds: Sequence[str], width: int | str = 420) -> alt.Chart:
    """Shares of kinds of instructions in the machine code. rows: name, kind, rank, count, share, tip."""
    domain, values = list(kinds), list(PALETTE)
    return (
        alt.Chart(_data())
        .mark_bar(height=20, stroke=INK, strokeWidth=0.3)
        .encode(
            y=alt.Y("name:N", title=None, sort=None, axis=alt.Axis(grid=False)),
            x=alt.X("share:Q", title="% of the instructions in the machine code", scale=alt.Scale(domain=[0, 100])),
            color=alt.Color(
                "kind:N",
                sort=domain,
                scale=alt.Scale(domain=domain, range=values),
                legend=alt.Legend(title=None, orient="bottom", columns=3),
            ),
            order=alt.Order("rank:Q"),
            tooltip=alt.Tooltip("tip:N"),
            description=alt.Description("said:N"),
        )
        .properties(width=width, height={"step": 34})
    )


# ---------------------------------------------------------------- comparison
def moves(width: int | str = 420) -> alt.LayerChart:
    """Change of time over limit with what the spreads allow. rows: name, rank, change, low, high (all in
    percent), way, tip."""
    scale = alt.Scale(domain=["faster", "slower", "within its spread"], range=["#0072B2", "#D55E00", "#999999"])
    shapes = alt.Scale(
        domain=["faster", "slower", "within its spread"], range=["triangle-left", "triangle-right", "circle"]
    )
    y = alt.Y("name:N", title=None, sort=_by("rank"), axis=alt.Axis())
    base = alt.Chart(_data()).encode(y=y)
    spread = base.mark_rule(strokeWidth=2).encode(
        x=alt.X("low:Q", title="% more time over limit (left: faster)"), x2="high:Q"
    )
    point = base.mark_point(filled=True, size=80, stroke=INK, strokeWidth=0.5, cursor="pointer").encode(
        x="change:Q",
        color=alt.Color("way:N", scale=scale, legend=alt.Legend(title=None, orient="top")),
        shape=alt.Shape("way:N", scale=shapes, legend=alt.Legend(title=None, orient="top")),
        tooltip=alt.Tooltip("tip:N"),
        description=alt.Description("said:N"),
    )
    zero = alt.Chart(_data()).mark_rule(strokeDash=[3, 3], aria=False).encode(x=alt.datum(0))
    return alt.layer(zero, spread, point).properties(width=width, height={"step": 20})


def only_used(spec: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Leaves in the legends what the rows hold; colours stay as they are."""
    if isinstance(spec, dict):
        legend, field = spec.get("legend"), spec.get("field")
        if isinstance(legend, dict) and field and "domain" in (spec.get("scale") or {}):
            held = {row.get(field) for row in rows}
            legend["values"] = [value for value in spec["scale"]["domain"] if value in held]
        for value in spec.values():
            only_used(value, rows)
    elif isinstance(spec, list):
        for value in spec:
            only_used(value, rows)


def spec(chart: Any) -> dict[str, Any]:
    """The Vega-Lite form, with the shared config and without data."""
    found: dict[str, Any] = chart.to_dict(validate=True)
    found["config"] = config()
    return found
