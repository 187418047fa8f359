"""The page in a real browser: opened from disk, filtered, hovered, followed, printed; silent, and without a network."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mla_var3 import paths
from mla_var3.cli import dispatch
from mla_var3.lab import naming
from mla_var3.lab.report import answers, rows
from mla_var3.lab.report.gather import Gathered, arrange, gather
from mla_var3.lab.report.page import write_page
from mla_var3.workload.decode import MlaProblem
from mla_var3.workload.layer import LayerProblem

ROOT = Path(__file__).resolve().parents[3]
CELL = "b128_s1_h128_t4096"


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("report_pictures", ROOT / "scripts" / "report_pictures.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    manager = script().browser()
    try:
        started = manager.__enter__()
    except RuntimeError as error:
        pytest.skip(f"needs a browser: {error}")
    yield started
    manager.__exit__(None, None, None)


@pytest.fixture(scope="module")
def shipped() -> Gathered:
    """The records of the H200 that come with the project."""
    return gather([paths.shipped_results_dir() / "h200"])


@pytest.fixture(scope="module")
def shipped_page(shipped: Gathered, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(shipped, tmp_path_factory.mktemp("report") / "index.html")


Open = Callable[..., Any]
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def open_page(chromium: Any) -> Iterator[Open]:
    """Opens a page and, at the end, fails if it said anything on the console or asked for anything but its own file."""
    contexts, said = [], []

    def watch(request: Any) -> None:
        if not request.url.startswith(("file:", "data:", "blob:")):
            said.append(f"request: {request.url}")

    def open_(path: Path, address: str = "", **options: Any) -> Any:
        context = chromium.new_context(**{"viewport": {"width": 1280, "height": 900}, "offline": True} | options)
        contexts.append(context)
        tab = context.new_page()
        tab.set_default_timeout(60_000)  # two cores may have much else to do
        tab.on("console", lambda message: said.append(f"console {message.type}: {message.text}"))
        tab.on("pageerror", lambda error: said.append(f"error: {error}"))
        tab.on("request", watch)
        tab.goto(path.as_uri() + address)
        tab.wait_for_function("window.report")
        tab.evaluate("report.settled()")
        return tab

    yield open_
    for context in contexts:
        context.close()
    assert said == []


def tile(tab: Any, cell: str) -> Any:
    """A tile of the map, by the words it has for screen readers."""
    return tab.locator(f'#map path[aria-label^="{cell}:"]').first


def near(value: float | None) -> Any:
    """The page holds seven digits of each figure."""
    return None if value is None else pytest.approx(value, rel=1e-4, abs=1e-5)


# ---------------------------------------------------------------- the same answers as in Python
def test_the_map_says_what_the_records_say(open_page: Open, shipped_page: Path, shipped: Gathered) -> None:
    tab = open_page(shipped_page)
    for state in ("burst", "sustained"):
        tab.select_option("#state", state)
        tab.evaluate("report.settled()")
        found = answers.winners([p for p in shipped.newest if naming.phase(p.problem) == "decode"], state)
        have = {w["cell"]: w for w in tab.evaluate("report.winners()")}
        assert have.keys() == {w.best.cell for w in found}
        for w in found:
            want = {"best": w.best.record.kernel.label, "margin": near(w.margin), "tie": w.tie, "mixed": w.mixed}
            assert have[w.best.cell] == {"cell": w.best.cell, "vs_peer": near(w.vs_peer), **want}
        cells = {w.best.cell for w in rows.on_map(found)}
        assert set(tab.evaluate("report.map()")) == cells
        assert tab.locator("#map path[role=button]").count() == len(cells), "a tile for each cell, and for nothing else"


def test_the_ladder_says_what_the_records_say(open_page: Open, shipped_page: Path, shipped: Gathered) -> None:
    tab = open_page(shipped_page, f"#cell={CELL}&design=flash_mla")
    steps = [s for lad in answers.ladders(shipped.newest, "flash_mla", CELL, "burst") for s in lad.steps]
    have = {s["name"]: s for s in tab.evaluate("report.ladder()")}
    assert have.keys() == {s.point.name for s in steps}
    for step in steps:
        one = have[step.point.name]
        assert one["cells"] == step.cells
        for name in ("gain", "mean"):
            assert one[name] == near(getattr(step, name))


def test_two_record_sets_move_as_in_python(open_page: Open, make: Any, tmp_path: Path) -> None:
    records = [make(label, us, day=day) for day, factor in (("2026-11-21", 1.0), ("2026-11-22", 1.1))
               for label, us in (("cute-dsl/flash_mla", 100 * factor), ("peer/fa4", 90))]  # fmt: skip
    gathered = arrange(records)
    tab = open_page(write_page(gathered, tmp_path / "page.html"))
    before, after = ([p for p in gathered.points if p.set == name] for name in gathered.sets)
    want = {m.after.name: m for m in answers.compare(before, after, "burst").moves}
    have = {m["name"]: m for m in tab.evaluate("report.moves()")}
    assert {name: m["moved"] for name, m in have.items()} == {"cute-dsl/flash_mla": True, "peer/fa4": False}
    for name, m in want.items():
        assert [have[name][x] for x in ("change", "low", "high")] == [
            pytest.approx(v, abs=1e-5) for v in (m.change, m.low, m.high)
        ]
    tab.evaluate("report.ready()")
    assert "1 moved beyond their own spread" in tab.inner_text("#compare-lead")
    assert "slower" in tab.text_content("#compare-table")


# ---------------------------------------------------------------- using it
def test_filters_leave_only_what_passes(open_page: Open, shipped_page: Path) -> None:
    tab = open_page(shipped_page)
    tab.click("#filters summary")
    tab.uncheck("#languages input[value=peer]")
    tab.uncheck("#languages input[value=cute-dsl]")
    tab.uncheck("#languages input[value=triton]")
    tab.evaluate("report.settled()")
    assert {w["best"].split("/")[0] for w in tab.evaluate("report.winners()")} == {"cutile-dsl"}
    assert "cutile-dsl/flash_mla" in tab.inner_text("#map-codes")
    tab.select_option("#phase", "prefill")
    tab.evaluate("report.settled()")
    assert {w["best"] for w in tab.evaluate("report.winners()")} == {"cutile-dsl/flash_attention"}
    tab.uncheck("#languages input[value=cutile-dsl]")
    tab.evaluate("report.settled()")
    assert "Nothing was measured that passes the filters" in tab.inner_text("#map")
    tab.check("#languages input[value=peer]")
    tab.evaluate("report.settled()")
    assert tab.locator("#map path[role=button]").count() == len(tab.evaluate("report.map()")) > 3


def test_a_tile_shows_its_cell_on_hover_and_opens_it_on_a_click(open_page: Open, shipped_page: Path) -> None:
    tab = open_page(shipped_page)
    # Scrolling hides what hovers, and its event comes a frame late.
    tile(tab, CELL).scroll_into_view_if_needed()
    tab.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    tile(tab, CELL).hover()
    hover = tab.locator("#hover")
    hover.wait_for(state="visible")
    assert CELL in hover.inner_text()
    assert "% of the limit" in hover.inner_text()
    tile(tab, CELL).click()
    tab.wait_for_function(f"location.hash.includes('cell={CELL}')")
    tab.evaluate("report.settled()")
    assert tab.inner_text("#cell-lead").startswith(CELL)
    assert tab.locator("#cell-table tbody tr").count() >= 9


def test_a_contender_opens_its_record_with_the_command_that_repeats_it(open_page: Open, shipped_page: Path) -> None:
    tab = open_page(shipped_page, f"#cell={CELL}")
    tab.locator("#cell-table a", has_text=re.compile(r"cute-dsl/flash_mla_v1\b")).first.click()
    tab.locator("#record h3").wait_for()
    text = tab.inner_text("#record")
    assert "mla-var3 bench cute-dsl/flash_mla_v1 --b 128" in text
    for word in ("registers", "CUDA-graph replays", "GPU", "hash"):
        assert word.lower() in text.lower()
    tab.go_back()
    tab.wait_for_function("document.getElementById('record').childElementCount === 0")


def test_a_record_of_a_layer_shows_where_its_time_goes(open_page: Open, make: Any, tmp_path: Path) -> None:
    spans = [{"name": "nvjet", "us": 30.0}, {"name": "flash_mla", "us": 60.0}, {"name": "combine", "us": 10.0}]
    part = {"median": 31.0, "p10": 30.0, "p90": 32.0, "n": 3}
    record = make(
        "cute-dsl/mla_layer", 100.0, problem=LayerProblem(b=8), timeline=spans, error={"out": 3e-3},
        beside_us={"projections": {"burst": part}},
    )  # fmt: skip
    tab = open_page(write_page(arrange([record]), tmp_path / "index.html"), f"#record={record.id}")
    text = tab.locator("#record").inner_text()
    assert "nvjet 30.0 µs (30.0 %), flash_mla 60.0 µs (60.0 %), combine 10.0 µs (10.0 %)" in text
    assert "projections 31.0 µs burst" in text and "lse" not in text
    wide = [box["width"] for span in tab.locator("#record .stacked span").all() if (box := span.bounding_box())]
    assert len(wide) == 3 and wide[1] == pytest.approx(2 * wide[0], rel=0.02)


def test_a_verdict_leads_to_its_devlog_and_a_citation_to_its_record(open_page: Open, shipped_page: Path) -> None:
    tab = open_page(shipped_page, f"#cell={CELL}")
    tab.evaluate("report.ready()")
    tab.locator("#ladder-table a[href='#devlog-cute-dsl-flash_mla_v1']").click()
    entry = tab.locator("#devlog-cute-dsl-flash_mla_v1")
    tab.wait_for_function("document.getElementById('devlog-cute-dsl-flash_mla_v1').open")
    assert "Hypothesis" in entry.inner_text()
    entry.locator("a", has_text="record").first.click()
    tab.wait_for_function("location.hash.startsWith('#record=')")
    tab.locator("#record h3").wait_for()


# ---------------------------------------------------------------- the finder
def ask(tab: Any, b: int, s: int, h: int, t: int, causal: bool = False, device: str = "h200") -> str:
    """What the finder says of a shape."""
    tab.select_option("#device", device)
    for name, value in (("h", h), ("b", b), ("t", t), ("s", s)):
        tab.fill(f"#find-{name}", str(value))
    if s > 1:
        tab.set_checked("#find-causal", causal)
    tab.evaluate("report.settled()")
    return str(tab.inner_text("#find-said"))


#: (b, s, h, t, causal), measured and not.
SHAPES: dict[str, list[tuple[int, int, int, int, bool]]] = {
    "h200": [
        (128, 1, 128, 4096, False), (1, 1, 128, 65536, False), (32, 4, 128, 4096, False), (128, 1, 16, 4096, False),
        (96, 1, 16, 6000, False), (3, 1, 128, 70001, False), (100, 2, 64, 5000, True), (2000, 1, 1, 17, False),
    ],
    "h100": [(1, 1, 128, 4096, False), (1, 8, 20, 900, True), (500, 1, 8, 512, False), (7, 3, 40, 33333, False)],
}  # fmt: skip


@pytest.mark.parametrize("device", SHAPES)
def test_the_finder_answers_as_dispatch_show(
    open_page: Open, shipped: Gathered, shipped_page: Path, tmp_path: Path, capsys: Capture, device: str
) -> None:
    gathered = shipped if device == "h200" else gather([paths.shipped_results_dir() / device])
    records = {p.record.id: p for p in gathered.points}
    tab = open_page(shipped_page if device == "h200" else write_page(gathered, tmp_path / "page.html"))

    def shown(b: int, s: int, h: int, t: int, causal: bool) -> tuple[str, str]:
        """The label that `dispatch show` picks for a shape, and what it says of its time."""
        words = ["show", "--b", str(b), "--s", str(s), "--h", str(h), "--t", str(t), "--device", device]
        assert dispatch.main([*words, *(["--causal"] if causal else [])]) == 0
        found = re.search(r"\d  picked (\S+), for .*\n +(.*)", capsys.readouterr().out)
        assert found
        return found[1], found[2]

    measured = []
    for b, s, h, t, causal in SHAPES[device]:
        label, time = shown(b, s, h, t, causal)
        said, more = ask(tab, b, s, h, t, causal, device), tab.inner_text("#find-more")
        assert said.startswith(label)
        assert "of what the hardware allows" in said and "the best library, peer/" in said
        measured.append(time.startswith("measured"))
        if measured[-1]:
            rests = re.search(r"([\d.]+) us burst.*: record (\w+)", time)
            assert rests
            point = records[rests[2]]
            assert point.problem == MlaProblem(b=b, s=s, h=h, t=t, causal=causal)
            assert f"{label}: {point.us('burst'):.1f} µs, {100 * (point.share('burst') or 0):.1f} %" in said
            assert f"Measured in burst, {rests[2]} of" in said
        else:
            near = re.search(r"near it h = (\d+), s = (\d+), b = (\d+), t = (\d+) should take about (\S+) µs", said)
            assert near and "Not measured here" in said and "mla-var3 dispatch show" in more
            h, s, b, t = map(int, near.groups()[:4])
            other, time = shown(b, s, h, t, s > 1)
            assert f"µs by {other}, " in said or other == label
            expected = re.search(r"expected ([\d.]+) us", time)
            if expected:  # where that shape was measured, the command line shows the record
                assert float(near[5]) == pytest.approx(float(expected[1]), rel=0.01)
            assert tab.locator("#find-said a").count() == 0, "no record of another shape stands in for this one"
    assert 0 < sum(measured) < len(measured)


def test_what_the_finder_cannot_answer_it_says_with_the_command(open_page: Open, shipped_page: Path) -> None:
    tab = open_page(shipped_page)
    assert "mla-var3 dispatch show --b 2 --s 33 --h 16 --t 4096 --causal --device h200" in ask(
        tab, 2, 33, 16, 4096, True
    )
    assert "up to 128 heads" in ask(tab, 2, 1, 129, 4096)
    assert "whole numbers" in ask(tab, 0, 1, 128, 4096)
    tab.select_option("#find-model", "kimi-k2")
    assert tab.input_value("#find-h") == "64"


def test_a_measured_shape_opens_its_cell_and_a_cell_fills_the_finder(open_page: Open, shipped_page: Path) -> None:
    tab = open_page(shipped_page)
    ask(tab, 128, 1, 16, 4096)
    tab.evaluate("report.ready()")
    assert tab.inner_text("#cell-lead").startswith("b128_s1_h16_t4096:")
    tab.evaluate("location.hash = '#cell=b1_s1_h128_t65536'")
    tab.wait_for_function("document.getElementById('find-t').value === '65536'")
    assert "flash_mla_v23" in tab.inner_text("#find-said")


@pytest.mark.parametrize("width", [1400, 400])
def test_the_answer_stands_in_the_first_900_pixels(open_page: Open, shipped_page: Path, width: int) -> None:
    tab = open_page(shipped_page, viewport={"width": width, "height": 900})
    assert tab.evaluate("scrollY") == 0
    for part in ("find", "find-said", "find-more"):
        box = tab.locator(f"#{part}").bounding_box()
        assert box["height"] > 10 and box["y"] + box["height"] <= 900
        assert box["x"] >= 0 and box["x"] + box["width"] <= width


def test_the_keyboard_reaches_marks_and_opens_them(open_page: Open, shipped_page: Path) -> None:
    tab = open_page(shipped_page)
    tab.focus("#filters summary")
    tab.keyboard.press("Tab")  # the menu of the picture, or its first tile
    for _ in range(4):
        if tab.evaluate("document.activeElement.matches('#map path')"):
            break
        tab.keyboard.press("Tab")
    first = tab.evaluate("document.activeElement.getAttribute('aria-label')")
    assert re.match(r"b\d+_s\d+_h\d+_t\d+", first)
    assert tab.locator("#hover").is_visible()
    tab.keyboard.press("ArrowRight")
    second = tab.evaluate("document.activeElement.getAttribute('aria-label')")
    assert second != first
    tab.keyboard.press("Enter")
    tab.wait_for_function(f"location.hash.includes('{second.split(':')[0]}')")


def test_the_roofline_shows_a_record_on_hover(open_page: Open, shipped_page: Path) -> None:
    tab = open_page(shipped_page)
    tab.evaluate("report.ready()")
    point = tab.locator("#roofline path[role=button]").last
    point.scroll_into_view_if_needed()
    # Scrolling hides what hovers, and its event comes with a frame, which may take long on a busy machine.
    tab.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    point.hover(force=True)
    tab.locator("#hover").wait_for(state="visible")
    assert "TFLOP/s" in tab.inner_text("#hover")
    assert "data sheet" in tab.inner_text("#roofline-table")


# ---------------------------------------------------------------- where it is read
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_part_is_drawn_on_screen_and_phone_in_light_and_dark(
    open_page: Open, shipped_page: Path, tmp_path: Path, scheme: str
) -> None:
    for width, height in ((1280, 900), (390, 844)):
        tab = open_page(shipped_page, f"#cell={CELL}", viewport={"width": width, "height": height}, color_scheme=scheme)
        tab.evaluate("report.ready()")
        for part in ("map", "cell-chart", "roofline", "ladder", "languages-chart", "instructions"):
            box = tab.locator(f"#{part} svg.marks").bounding_box()
            assert box is not None and box["height"] > 60, part
        assert tab.evaluate("document.documentElement.scrollWidth") <= width, "the page itself never scrolls sideways"
        ink = tab.evaluate("getComputedStyle(document.querySelector('#roofline svg.marks text')).fill")
        paper = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        shades = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (ink, paper)]
        assert (shades[0] > shades[1]) == (scheme == "dark"), "text of pictures follows the page"
        shot = tab.screenshot(path=str(tmp_path / f"{scheme}-{width}.png"))
        assert shot.startswith(b"\x89PNG") and len(shot) > 20_000


#: What is wider than its place, or than the screen. The name of what is chosen shows in full in a control's list.
CUT = """() => {
  const found = [], screen = document.documentElement.clientWidth;
  for (const e of document.querySelectorAll("main *, header *")) {
    if (e.closest(".vega-embed, .unseen, thead, .entry, select, input, summary") || !e.clientWidth) continue;
    const wide = e.scrollWidth > e.clientWidth + 1, out = e.getBoundingClientRect().right > screen + 1;
    if (wide || out) found.push([e.id || e.tagName, e.scrollWidth, e.textContent.slice(0, 60)]);
  }
  for (const text of document.querySelectorAll("svg.marks text")) {
    const box = text.getBoundingClientRect(), room = text.closest("svg").getBoundingClientRect();
    const out = box.left < room.left - 1 || box.right > room.right + 1;
    if (out || text.textContent.includes("…")) found.push(text.textContent);
  }
  return found;
}"""


@pytest.mark.parametrize("width", [1400, 400])
def test_nothing_is_cut(open_page: Open, shipped_page: Path, width: int) -> None:
    tab = open_page(shipped_page, f"#cell={CELL}", viewport={"width": width, "height": 900})
    tab.evaluate("report.ready()")
    tab.evaluate(
        "document.querySelectorAll('main > section details:not([id^=devlog])').forEach((d) => { d.open = true; })"
    )
    assert tab.evaluate(CUT) == []


#: Pairs of an axis's labels that lie on each other or touch, and labels in letters of less than 11 pixels.
ILLEGIBLE = """() => {
  const found = [];
  for (const axis of document.querySelectorAll("#map .role-axis-label")) {
    const texts = [...axis.querySelectorAll("text")], boxes = texts.map((text) => text.getBoundingClientRect());
    texts.forEach((a, i) => {
      const style = getComputedStyle(a);
      if (parseFloat(style.fontSize) < 11 || style.opacity === "0") found.push(a.textContent);
      texts.slice(i + 1).forEach((b, j) => {
        const x = boxes[i], y = boxes[i + 1 + j];
        const apart = Math.max(x.left - y.right, y.left - x.right, x.top - y.bottom, y.top - x.bottom);
        if (apart < 1) found.push(`${a.textContent} ${b.textContent}`);
      });
    });
  }
  return found;
}"""


@pytest.mark.parametrize("contexts", [(512, 2048, 8192, 32768, 131072), tuple(range(4001, 16001, 1000))])
def test_the_maps_axes_are_legible_on_a_narrow_screen(
    open_page: Open, make: Any, tmp_path: Path, contexts: tuple[int, ...]
) -> None:
    """The numbers of a grid lie flat; twelve odd ones stand upright."""
    cells = [MlaProblem(b=b, h=h, t=t) for h in (16, 128) for b in (1, 16, 256) for t in contexts]
    records = [
        make(label, us, problem=cell)
        for cell in cells
        for label, us in (("cute-dsl/flash_mla", 100), ("peer/fa4", 120))
    ]
    tab = open_page(write_page(arrange(records), tmp_path / "page.html"), viewport={"width": 400, "height": 900})
    assert tab.locator("#map path[role=button]").count() == len(cells)
    labels = tab.locator("#map .role-axis-label text").all_text_contents()
    assert {"512", "2k", "8k", "32k", "128k"} <= {*labels} if len(contexts) == 5 else {"4001", "15001"} <= {*labels}
    assert tab.evaluate(ILLEGIBLE) == [] and tab.evaluate(CUT) == []


@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (400, "dark")])
def test_axe_finds_nothing_to_object_to(open_page: Open, shipped_page: Path, width: int, scheme: str) -> None:
    """axe-core: names of controls, scopes of headers, contrast, order of headings, and the rest of its rules."""
    package = importlib.util.find_spec("axe_playwright_python")
    if package is None or package.origin is None:
        pytest.skip("needs axe-core: pip install axe-playwright-python")
    tab = open_page(shipped_page, viewport={"width": width, "height": 900}, color_scheme=scheme)
    tab.evaluate("report.ready()")
    tab.click("#filters summary")
    tab.evaluate(Path(package.origin).with_name("axe.min.js").read_text(encoding="utf-8"))
    found = tab.evaluate("axe.run(document, { resultTypes: ['violations'] })")
    assert len(found["passes"]) > 20, "axe ran"
    assert [(v["id"], [n["html"][:120] for n in v["nodes"][:3]]) for v in found["violations"]] == []


def test_headers_have_scopes(open_page: Open, shipped_page: Path) -> None:
    tab = open_page(shipped_page)
    tab.evaluate("report.ready()")
    assert tab.locator("th").count() > 100
    assert tab.locator("th:not([scope])").count() == 0


def test_the_chosen_theme_stays(open_page: Open, shipped_page: Path) -> None:
    tab = open_page(shipped_page, color_scheme="light")
    paper = "getComputedStyle(document.body).backgroundColor"
    light = tab.evaluate(paper)
    tab.click("#theme")
    dark = tab.evaluate(paper)
    assert dark != light
    tab.reload()
    tab.wait_for_function("window.report")
    assert tab.evaluate(paper) == dark


def test_a_retired_version_is_never_named_fastest_without_a_word(open_page: Open, make: Any, tmp_path: Path) -> None:
    records = [make("cute-dsl/flash_mla_v1", 50), make(us=100), make("peer/fa4", 120)]
    records += [make("cute-dsl/flash_mla_v1", 50, problem=MlaProblem(b=2))]
    tab = open_page(write_page(arrange(records), tmp_path / "page.html"))
    tab.evaluate("report.ready()")
    lead = tab.inner_text("#cell-lead")
    assert "Fastest on h200, burst: cute-dsl/flash_mla, 100.0 µs" in lead
    assert "cute-dsl/flash_mla_v1 (retired) took 50.0 µs" in lead
    assert "1.20× the best library" in tile(tab, "b1_s1_h128_t4096").get_attribute("aria-label")
    assert tile(tab, "b2_s1_h128_t4096").count() == 0
    row = tab.locator("#map-table tr", has_text="b2_s1_h128_t4096")
    assert "cute-dsl/flash_mla_v1 (retired)" in row.text_content()
    assert tab.locator("#cell-chart path[role=button]").count() == 2
    assert "cute-dsl/flash_mla_v1 (retired)" in tab.inner_text("#cell-table")


def test_the_roofline_is_of_one_cell_or_one_kernel(open_page: Open, shipped_page: Path, shipped: Gathered) -> None:
    tab = open_page(shipped_page, f"#cell={CELL}")
    tab.evaluate("report.ready()")
    decode = [p for p in shipped.newest if naming.phase(p.problem) == "decode" and p.live and p.language != "torch"]
    points = tab.locator("#roofline path[role=button]")
    assert points.count() == sum(p.cell == CELL for p in decode)
    tab.select_option("#of", "cute-dsl/flash_mla_v24")
    tab.evaluate("report.ready()")
    assert points.count() == sum(p.record.kernel.label == "cute-dsl/flash_mla_v24" for p in decode)
    assert tab.locator("#of option", has_text="flash_mla_v8").count() == 0


def test_on_paper_everything_is_there_in_black_on_white(open_page: Open, shipped_page: Path) -> None:
    tab = open_page(shipped_page, color_scheme="dark")
    tab.evaluate("report.ready()")
    tab.emulate_media(media="print")
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not tab.locator("nav").is_visible()
    assert tab.pdf().startswith(b"%PDF")


def test_without_scripts_the_page_says_what_to_do(open_page: Open, chromium: Any, shipped_page: Path) -> None:
    context = chromium.new_context(java_script_enabled=False)
    tab = context.new_page()
    tab.goto(shipped_page.as_uri())
    assert "mla-var3 report --show map" in tab.inner_text("noscript")
    context.close()


def test_what_is_left_out_is_on_the_page(open_page: Open, make: Any, tmp_path: Path) -> None:
    gathered = arrange(
        [make(device="gb999"), make("peer/fa4", None, status="failed", reason="<b>no</b> luck")],
        ["x.jsonl:3: torn; skipped."],
    )
    tab = open_page(write_page(gathered, tmp_path / "page.html"))
    tab.evaluate("report.ready()")
    text = tab.inner_text("#left")
    for words in ("x.jsonl:3: torn", "failed: <b>no</b> luck", "'gb999' is not in devices.json"):
        assert words in text


def test_three_thousand_records_open_in_under_two_seconds(open_page: Open, many: Any, tmp_path: Path) -> None:
    path = write_page(arrange(many), tmp_path / "many.html")
    taken: list[float] = []
    while len(taken) < 3 and min(taken, default=9e9) >= 2000:  # a machine that does other things too gets three tries
        taken.append(open_page(path).evaluate("performance.getEntriesByName('first part drawn')[0].startTime"))
    assert min(taken) < 2000


def test_without_chromium_the_reason_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = script()
    monkeypatch.setattr(pictures, "PROGRAMS", ())
    with pytest.raises(RuntimeError, match=r"no Chromium here .*apt install chromium"), pictures.browser():
        pass


# ---------------------------------------------------------------- inside a kernel
def test_a_trace_is_drawn_in_the_page(open_page: Open, make: Any, tmp_path: Path) -> None:
    from mla_var3.lab.report import traces

    picture = (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 9" width="9" height="9">'
        '<rect x="1" y="1" width="5" height="5" fill="#4477aa"><title>exponentials: 0.35 us</title></rect></svg>'
    )
    share = {"warpgroup": 0, "role": "consume", "name": "wait full", "kind": "wait", "percent": 12.5, "count": 40.0,
             "mean_us": 0.25}  # fmt: skip
    some = [
        traces.Drawn("cute-dsl/flash_mla_v23", cell, "h200", "now", [f"It is of {cell}."], [share], picture)
        for cell in ("b1_s1_h128_t65536", "b128_s1_h64_t4096")
    ]
    path = write_page(arrange([make()]), tmp_path / "traced.html", drawn=some)
    tab = open_page(path)
    tab.locator("#part-inside").scroll_into_view_if_needed()
    tab.evaluate("report.settled()")
    tab.wait_for_selector("#inside svg rect", state="attached")
    assert tab.locator("#inside svg rect title").text_content() == "exponentials: 0.35 us"
    assert "b1_s1_h128_t65536" in tab.locator("#inside-said").inner_text()
    tab.select_option("#trace", label="cute-dsl/flash_mla_v23 on b128_s1_h64_t4096, h200")
    tab.evaluate("report.settled()")
    assert "It is of b128_s1_h64_t4096." in tab.locator("#inside-said").inner_text()
    row = tab.locator("#inside-table tbody tr").first.text_content()
    assert "0 (consume)" in row and "wait full" in row and "12.5" in row


@pytest.mark.parametrize(("width", "whole"), [(1200, True), (400, False)])
def test_a_trace_fits_the_page_or_is_moved_by_itself(
    width: int, whole: bool, open_page: Open, make: Any, tmp_path: Path
) -> None:
    """A trace is drawn 1,360 wide: a page shows it to its end, and a phone no smaller than can be read."""
    from mla_var3.lab.report import traces

    drawn = traces.find([paths.shipped_results_dir() / "h200" / "profiles"])
    tab = open_page(
        write_page(arrange([make()]), tmp_path / "page.html", drawn=drawn), viewport={"width": width, "height": 900}
    )
    tab.locator("#part-inside").scroll_into_view_if_needed()
    tab.evaluate("report.settled()")
    tab.wait_for_selector("#inside svg rect", state="attached")
    picture = tab.locator("#inside svg").bounding_box()["width"]
    frame = tab.locator("#inside").bounding_box()["width"]
    page = tab.evaluate("document.documentElement.scrollWidth")
    assert (picture <= frame) == whole and picture >= 800
    assert page <= width


def test_a_page_without_traces_says_how_to_make_one(open_page: Open, make: Any, tmp_path: Path) -> None:
    tab = open_page(write_page(arrange([make()]), tmp_path / "none.html"))
    tab.locator("#part-inside").scroll_into_view_if_needed()
    tab.evaluate("report.settled()")
    tab.wait_for_selector("#inside-said code")
    assert "profile cute-dsl/flash_mla_v23 --mode trace" in tab.locator("#inside-said").inner_text()
    assert not tab.locator("#trace").is_visible()
