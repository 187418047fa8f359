"""The picture of a trace, as SVG: all CTAs of the call, then the warps of some CTAs, then a few microseconds of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from mla_var3.lab.profiling.modes.trace import WARPGROUP, Cta, Step, Trace, Warp
from mla_var3.toolchain.cute_trace import WAIT

FILE = "trace.svg"
WIDTH, LEFT, LANE, GAP = 1160, 190, 14, 3  # pixels
FLYING = "products in flight"
ELSEWHERE = "elsewhere"
#: Narrower than this a step is shown as a part of what is around it.
_FINEST = 0.5
_LABELLED = 5.6  # pixels of a letter
#: A span in which single steps are seen: a few passes of a main loop.
WINDOW_US = 6.0
_MOST_CTA_ROWS = 160
# Paul Tol's "muted" and "bright", without their greys, which are for waits.
_RANGES = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#332288", "#88ccee", "#44aa99", "#117733",
           "#999933", "#ddcc77", "#cc6677", "#882255")  # fmt: skip
_WAITS = ("#c8ccd1", "#aeb4bb", "#979ea6", "#dfe2e5", "#868d95", "#bcb6ad", "#d6d0c7", "#a39d94")
_KERNELS = ("#5b7c99", "#8c6d46", "#6b8e5a", "#8a6a8e", "#4f8a8b", "#9a7b7b")
_FIXED = {FLYING: "#1b7f3b", ELSEWHERE: "#f4e3c1"}

Segment = tuple[float, float, str]


def innermost(warp: Warp) -> list[Segment]:
    """(begin, end, what) from the warp's begin to its end without gaps: the innermost function or wait."""
    edges: list[tuple[float, int, int, Step]] = []
    for step in warp.steps:
        edges.append((step.begin, 1, step.depth, step))
        edges.append((step.end, 0, -step.depth, step))
    edges.sort(key=lambda edge: edge[:3])
    found: list[Segment] = []
    stack: list[Step] = []
    at = warp.begin
    for time, begins, _, step in edges:
        if time > at:
            found.append((at, time, stack[-1].event.name if stack else ELSEWHERE))
            at = time
        if begins:
            stack.append(step)
        elif step in stack:
            stack.remove(step)
    if warp.end > at:
        found.append((at, warp.end, ELSEWHERE))
    return found


def columns(segments: Sequence[Segment], begin: float, end: float, width: float) -> list[tuple[float, float, str]]:
    """Segments between `begin` and `end` as (left, right, what) in pixels. What is too narrow to be seen is joined: a
    column of half a pixel shows what fills most of it."""
    count = max(1, round(width / _FINEST))
    scale = count / (end - begin)
    filled: list[dict[str, float]] = [{} for _ in range(count)]
    for first, last, what in segments:
        left, right = max(0.0, (first - begin) * scale), min(float(count), (last - begin) * scale)
        at = left
        while at < right:
            column = int(at)
            edge = min(right, column + 1.0)
            filled[column][what] = filled[column].get(what, 0.0) + edge - at
            at = edge
    found: list[tuple[float, float, str]] = []
    for i, parts in enumerate(filled):
        if not parts or sum(parts.values()) < 0.5:
            continue
        what = max(parts, key=lambda name: parts[name])
        if found and found[-1][2] == what and found[-1][1] == i * _FINEST:
            found[-1] = found[-1][0], (i + 1) * _FINEST, what
        else:
            found.append((i * _FINEST, (i + 1) * _FINEST, what))
    return found


def shown(cta: Cta) -> list[Warp]:
    """Warps with a lane: of a warpgroup whose warps do the same the first one, else all four."""
    groups: dict[int, list[Warp]] = {}
    for warp in cta.warps:
        groups.setdefault(warp.number // WARPGROUP, []).append(warp)
    found: list[Warp] = []
    for warps in groups.values():
        alike = len({tuple(dict.fromkeys(step.event for step in warp.steps)) for warp in warps}) == 1
        found += warps[:1] if alike and any(warp.flying for warp in warps) else warps
    return found


def windows(cta: Cta) -> list[tuple[str, float]]:
    """(where, begin) of the spans of `WINDOW_US` in which single steps of a CTA are shown; none of a CTA that is
    shorter than all of them, whose whole shows as much."""
    if cta.end - cta.begin < 3 * WINDOW_US:
        return []
    middle = (cta.begin + cta.end - WINDOW_US) / 2
    return [("its begin", cta.begin), ("its middle", middle), ("its end", cta.end - WINDOW_US)]


def draw(trace: Trace) -> str:
    """The picture."""
    picture = _Picture(trace)
    return picture.text()


class _Picture:
    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.parts: list[str] = []
        self.y = 4.0
        self.colours = _colours(trace)

    def text(self) -> str:
        trace = self.trace
        self._all_ctas()
        for cta in trace.drawn():
            self._title(f"{cta.kernel}, CTA {cta.number} on SM {cta.sm}: the whole of it", 16)
            self._warps(cta, cta.begin, cta.end)
        last = trace.drawn()[-1]
        for where, begin in windows(last):
            self._title(f"{last.kernel}, CTA {last.number}: {WINDOW_US:g} us at {where}", 16)
            self._warps(last, begin, begin + WINDOW_US, labels=True)
        self._legend()
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 10} {self.y:.0f}" '
            f'width="{LEFT + WIDTH + 10}" height="{self.y:.0f}" role="img" font-family="system-ui, sans-serif" '
            'font-size="11" fill="currentColor"><title>Timeline inside a kernel</title>'
        )
        return head + "".join(self.parts) + "</svg>\n"

    def _title(self, text: str, above: float) -> None:
        self.y += above
        self.parts.append(f'<text x="0" y="{self.y + 12:.1f}" font-size="13" font-weight="600">{escape(text)}</text>')
        self.y += 20

    def _rect(self, x: float, width: float, height: float, what: str, said: str) -> None:
        self.parts.append(
            f'<rect x="{LEFT + x:.5g}" y="{self.y:.5g}" width="{width:.4g}" height="{height:g}" '
            f'fill="{self.colours[what]}"><title>{escape(said)}</title></rect>'
        )

    def _axis(self, begin: float, end: float) -> None:
        step = next(s for s in _steps() if (end - begin) / s <= 12)
        first = -(-begin // step) * step
        ticks = [first + i * step for i in range(int((end - first) / step) + 1)]
        for tick in ticks:
            x = LEFT + (tick - begin) / (end - begin) * WIDTH
            self.parts.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{self.y:.1f}" y2="{self.y + 4:.1f}" stroke="currentColor"/>'
                f'<text x="{x:.1f}" y="{self.y + 14:.1f}" text-anchor="middle">{tick:g}</text>'
            )
        self.parts.append(f'<text x="{LEFT - 8}" y="{self.y + 14:.1f}" text-anchor="end">us</text>')
        self.y += 20

    def _all_ctas(self) -> None:
        trace = self.trace
        end = max(cta.end for cta in trace.ctas)
        self._title("All CTAs of the call, from begin to end", 0)
        for kernel in trace.kernels:
            ctas = sorted(trace.of(kernel), key=lambda cta: (cta.begin, cta.end))
            # Where they are many, every so many: the picture is to fit a screen.
            some = ctas[:: -(-len(ctas) // _MOST_CTA_ROWS)]
            self.parts.append(
                f'<text x="{LEFT - 8}" y="{self.y + 10:.1f}" text-anchor="end">{escape(kernel)} ({len(ctas)})</text>'
            )
            top = self.y
            for cta in some:
                x, width = cta.begin / end * WIDTH, (cta.end - cta.begin) / end * WIDTH
                said = f"{kernel} CTA {cta.number}, SM {cta.sm}: {cta.begin:.2f} to {cta.end:.2f} us"
                self._rect(x, max(width, 0.5), 1, kernel, said)
                self.y += 1.0
            self.y = max(self.y, top + LANE) + GAP
        self._axis(0.0, end)

    def _warps(self, cta: Cta, begin: float, end: float, labels: bool = False) -> None:
        height = LANE + 6 if labels else LANE
        for warp in shown(cta):
            name = f"warp {warp.number}: {warp.role}"
            self.parts.append(
                f'<text x="{LEFT - 8}" y="{self.y + height - 4:.1f}" text-anchor="end">{escape(name)}</text>'
            )
            for left, right, what in columns(innermost(warp), begin, end, WIDTH):
                self._step(left, right, what, begin, end, height, labels)
            self.y += height + (0 if warp.flying else GAP)
            if warp.flying:
                for left, right, what in columns([(*span, FLYING) for span in warp.flying], begin, end, WIDTH):
                    self._step(left, right, what, begin, end, 5, False)
                self.y += 5 + GAP
        self._axis(begin, end)

    def _step(
        self, left: float, right: float, what: str, begin: float, end: float, height: float, labels: bool
    ) -> None:
        scale = (end - begin) / WIDTH
        self._rect(
            left, right - left, height, what, f"{what}: {(right - left) * scale:.2f} us from {begin + left * scale:.2f}"
        )
        if labels and (right - left) > _LABELLED * len(what):
            self.parts.append(
                f'<text x="{LEFT + (left + right) / 2:.1f}" y="{self.y + height - 6:.1f}" text-anchor="middle" '
                f'fill="#111111">{escape(what)}</text>'
            )

    def _legend(self) -> None:
        self._title("Colours", 10)
        x = 0.0
        for what, colour in self.colours.items():
            width = 22 + _LABELLED * len(what) + 10
            if x + width > LEFT + WIDTH:
                x, self.y = 0.0, self.y + 18
            self.parts.append(
                f'<rect x="{x:.1f}" y="{self.y:.1f}" width="14" height="12" fill="{colour}"/>'
                f'<text x="{x + 18:.1f}" y="{self.y + 10:.1f}">{escape(what)}</text>'
            )
            x += width
        self.y += 22


def _steps() -> Iterator[float]:
    """1, 2, 5, 10, ... times a tenth of a microsecond."""
    scale = 0.1
    while True:
        yield from (scale, 2 * scale, 5 * scale)
        scale *= 10


def _colours(trace: Trace) -> dict[str, str]:
    """By what is drawn: waits in greys, functions in colours, the longest first."""
    times: dict[str, float] = {}
    waits: set[str] = set()
    for cta in trace.drawn():
        for warp in shown(cta):
            for step in warp.steps:
                times[step.event.name] = times.get(step.event.name, 0.0) + step.own_us
                if step.event.kind == WAIT:
                    waits.add(step.event.name)
    names = sorted(times, key=lambda name: -times[name])
    found = {name: _RANGES[i % len(_RANGES)] for i, name in enumerate(n for n in names if n not in waits)}
    found |= {name: _WAITS[i % len(_WAITS)] for i, name in enumerate(n for n in names if n in waits)}
    found |= _FIXED
    found |= {kernel: _KERNELS[i % len(_KERNELS)] for i, kernel in enumerate(trace.kernels)}
    return found
