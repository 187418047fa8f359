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
from mla_var3.lab.report import answers
from mla_var3.lab.report.gather import Gathered, arrange, gather
from mla_var3.lab.report.page import write_page

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
        tab.set_default_timeout(10_000)
        tab.on("console", lambda message: said.append(f"console {message.type}: {message.text}"))
        tab.on("pageerror", lambda error: said.append(f"error: {error}"))
        tab.on("request", watch)
        tab.goto(path.as_uri() + address)
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
    """The page holds six digits of each figure."""
    return None if value is None else pytest.approx(value, rel=1e-4, abs=1e-5)


# ---------------------------------------------------------------- the same answers as in Python
def test_the_map_says_what_the_records_say(open_page: Open, shipped_page: Path, shipped: Gathered) -> None:
    tab = open_page(shipped_page)
    for state in ("burst", "sustained"):
        tab.select_option("#state", state)
        tab.evaluate("report.settled()")
        found = answers.winners([p for p in shipped.newest if p.problem.s <= 64], state)
        want = {w.best.cell: (w.best.record.kernel.label, w.margin, w.tie, w.vs_peer) for w in found}
        have = {w["cell"]: (w["kernel"], w["margin"], w["tie"], w["vs_peer"]) for w in tab.evaluate("report.winners()")}
        assert have.keys() == want.keys()
        for cell, (kernel, margin, tie, vs_peer) in want.items():
            assert have[cell] == (kernel, near(margin), tie, near(vs_peer))
        assert tab.locator("#map path[role=button]").count() == len(want), "a tile for each cell, and for nothing else"


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
    assert "slower" in tab.inner_text("#compare-table")


# ---------------------------------------------------------------- using it
def test_filters_leave_only_what_passes(open_page: Open, shipped_page: Path) -> None:
    tab = open_page(shipped_page)
    tab.uncheck("#languages input[value=peer]")
    tab.uncheck("#languages input[value=cute-dsl]")
    tab.uncheck("#languages input[value=triton]")
    tab.evaluate("report.settled()")
    assert {w["kernel"].split("/")[0] for w in tab.evaluate("report.winners()")} == {"cutile-dsl"}
    assert "cutile-dsl/flash_mla" in tab.inner_text("#map-lead")
    tab.select_option("#phase", "prefill")
    tab.evaluate("report.settled()")
    assert {w["kernel"] for w in tab.evaluate("report.winners()")} == {"cutile-dsl/flash_attention"}
    tab.uncheck("#languages input[value=cutile-dsl]")
    tab.evaluate("report.settled()")
    assert "Nothing was measured that passes the filters" in tab.inner_text("#map")
    tab.check("#languages input[value=peer]")
    tab.evaluate("report.settled()")
    assert tab.locator("#map path[role=button]").count() == 7


def test_a_tile_shows_its_cell_on_hover_and_opens_it_on_a_click(open_page: Open, shipped_page: Path) -> None:
    tab = open_page(shipped_page)
    # Scrolling hides what hovers, and its event comes a frame late.
    tile(tab, CELL).scroll_into_view_if_needed()
    tab.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    tile(tab, CELL).hover()
    hover = tab.locator("#hover")
    hover.wait_for(state="visible")
    assert CELL in hover.inner_text()
    assert "of limit" in hover.inner_text()
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


def test_a_shape_is_found_or_said_to_be_missing(open_page: Open, shipped_page: Path) -> None:
    tab = open_page(shipped_page)
    for name, value in (("h", 16), ("s", 1), ("b", 128), ("t", 4096)):
        tab.fill(f"#find-{name}", str(value))
    tab.click("#find button")
    tab.wait_for_function("location.hash.includes('cell=b128_s1_h16_t4096')")
    tab.fill("#find-b", "100")
    tab.click("#find button")
    said = tab.inner_text("#find-said")
    assert "b=100 t=4096 was not measured" in said
    assert "b128_s1_h16_t4096" in said


def test_the_keyboard_reaches_marks_and_opens_them(open_page: Open, shipped_page: Path) -> None:
    tab = open_page(shipped_page)
    tab.focus("#margin")
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
    tab.wait_for_timeout(100)  # scrolling hides what hovers
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
