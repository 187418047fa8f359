"""Winners and margins, ladders, languages, and what moved between two record sets; the experiment behind the map."""

from __future__ import annotations

import colorsys
import math
from typing import Any

import pytest

from mla_var3.catalogue import registry
from mla_var3.catalogue.registry import KernelId
from mla_var3.device import Device
from mla_var3.dispatch import choose
from mla_var3.errors import UserError
from mla_var3.lab import naming
from mla_var3.lab.report import answers, rows, sources
from mla_var3.lab.report.gather import arrange
from mla_var3.lab.report.legend import kernels
from mla_var3.lab.sweep import config, plan
from mla_var3.workload.decode import MlaProblem

CELL = MlaProblem(b=1, t=4096)
OTHER = MlaProblem(b=8, t=4096)


def test_the_winner_its_margin_and_the_best_library(make: Any) -> None:
    labels = {"cute-dsl/flash_mla": 100, "cute-dsl/flash_mla_v23": 80, "peer/fa4": 90, "peer/fa3_qv": 95}
    (w,) = answers.winners(arrange([make(*item) for item in labels.items()]).newest, "burst")
    names = [p.kernel if p else None for p in (w.best, w.ours, w.next, w.peer)]
    assert names == ["cute-dsl/flash_mla_v23", "cute-dsl/flash_mla_v23", "cute-dsl/flash_mla", "peer/fa4"]
    assert w.margin == pytest.approx(100 / 80 - 1)
    assert w.vs_peer == pytest.approx(90 / 80)
    assert not w.tie
    assert not w.mixed


def test_a_retired_version_is_ours_only_where_no_other_was_measured(make: Any) -> None:
    retired, live, peer = make("cute-dsl/flash_mla_v1", 50), make("cute-dsl/flash_mla", 100), make("peer/fa4", 90)
    (w,) = answers.winners(arrange([retired, live, peer]).newest, "burst")
    assert (w.best.kernel, w.ours and w.ours.kernel, w.next) == ("peer/fa4", "cute-dsl/flash_mla", None)
    (w,) = answers.winners(arrange([retired, peer]).newest, "burst")
    assert (w.best.kernel, w.best.live, w.vs_peer) == ("cute-dsl/flash_mla_v1", False, pytest.approx(90 / 50))
    assert w.best.shown == "cute-dsl/flash_mla_v1 (retired)"
    assert rows.regime_map([w], kernels(arrange([retired, peer]))) == [], "the map is of versions that are here"


def test_a_problem_that_was_drawn_at_random_is_not_on_the_map(make: Any) -> None:
    """But one that another experiment chose is, whoever else drew it."""
    chosen, random = MlaProblem(b=8, t=4096), MlaProblem(b=7, t=3992)
    records = [make(problem=chosen), make(problem=random, experiment="unseen")]
    records += [make("triton/flash_mla", problem=chosen, experiment="unseen")]
    found = answers.winners(arrange(records).newest, "burst")
    assert {(w.best.problem, w.drawn) for w in found} == {(chosen, False), (random, True)}
    assert [w.best.problem for w in rows.on_map(found)] == [chosen]
    assert answers.drawn() == {"unseen", "unseen_indexer", "unseen_prefill", "unseen_sparse"}


def test_a_librarys_schedule_counts_once_a_step(make: Any) -> None:
    whole = {s: {"median": 122.0 + x, "p10": 122.0, "p90": 123.0, "n": 5} for s, x in (("burst", 0), ("sustained", 9))}
    found = arrange([make(us=80), make("peer/fa4", 61, with_schedule_us=whole)]).newest
    assert answers.winners(found, "burst")[0].vs_peer == pytest.approx((61 + (122 - 61) / 61) / 80)


def test_ranges_that_touch_are_a_tie(make: Any) -> None:
    points = arrange([make("cute-dsl/flash_mla", 100, spread=0.02), make("peer/fa4", 103, spread=0.02)]).newest
    assert answers.winners(points, "burst")[0].tie
    points = arrange([make("cute-dsl/flash_mla", 100, spread=0.01), make("peer/fa4", 103, spread=0.01)]).newest
    assert not answers.winners(points, "burst")[0].tie


def test_a_version_does_not_compete_with_itself(make: Any) -> None:
    some = [make(us=80, requested="tuned"), make(us=85), make(us=81, requested="dispatch", picked_by="dispatch")]
    (w,) = answers.winners(arrange([*some, make("triton/flash_mla", 90)]).newest, "burst")
    assert w.next is not None
    assert w.next.kernel == "triton/flash_mla"
    assert w.margin == pytest.approx(90 / 80 - 1)


def test_what_the_dispatcher_loses_is_of_todays_pick_and_not_of_an_old_record(make: Any) -> None:
    """The record says that version 0 was taken; the table of today takes another one for this cell."""
    picked = choose(CELL, Device.get("h200")).kernel.label
    assert picked != "cute-dsl/flash_mla"
    records = [make(us=300, requested="dispatch", picked_by="dispatch"), make("triton/flash_mla", 80)]
    (pick,) = answers.picks(arrange(records).newest, "burst")
    assert (pick.label, pick.point, pick.loss) == (picked, None, None)
    assert "no cell" in answers.losses([pick])
    (pick,) = answers.picks(arrange([*records, make(picked, 84)]).newest, "burst")
    assert pick.best.kernel == "triton/flash_mla"
    assert pick.loss == pytest.approx(84 / 80 - 1)
    assert "In 1 of 1 cells the pick was measured: it is the fastest in 0, and loses 5.0 %" in answers.losses([pick])
    assert answers.picks(arrange([make(device="gb999")]).newest, "burst") == []


def test_cells_without_a_measurement_are_not_on_the_map(make: Any) -> None:
    gathered = arrange([make(problem=CELL), make("peer/fa4", None, status="failed", reason="no", problem=OTHER)])
    tiles = rows.regime_map(answers.winners(gathered.newest, "burst"), kernels(gathered))
    assert [(t["b"], t["t"], t["code"], t["ahead"]) for t in tiles] == [(1, 4096, "cu0", None)]


def test_a_panel_of_few_cells_is_not_on_the_map_where_others_have_more(make: Any) -> None:
    large = [MlaProblem(b=b, t=4096) for b in (1, 2, 4, 8)]
    odd = [MlaProblem(b=3, t=128, h=20), MlaProblem(b=2, t=512, lengths=[1, 512])]
    found = [answers.winners(arrange([make(problem=p) for p in some]).newest, "burst") for some in (large + odd, odd)]
    assert {w.best.problem for w in rows.on_map(found[0])} == set(large)
    assert {w.best.problem for w in rows.on_map(found[1])} == set(odd)


def test_no_two_cells_share_a_place_on_the_map() -> None:
    base = MlaProblem(b=2, t=512)
    kinds: list[dict[str, Any]] = [
        {},
        {"causal": True, "s": 2},
        {"s": 2},
        {"dtype": "fp16"},
        {"page": 16},
        {"page": None},
    ]
    kinds += [
        {"k": 256},
        {"h_kv": 2},
        {"lengths": [1, 512]},
        {"lengths": [2, 512]},
        {"lengths": {"name": "ragged", "seed": 1}},
    ]
    kinds += [{"s": 512}, {"s": 256}]
    cells = [base.replace(**kind) for kind in kinds] + [MlaProblem(b=4, t=512), MlaProblem(b=2, t=1024)]
    assert len({(naming.panel(c), naming.place(c)) for c in cells}) == len(cells)
    assert naming.panel(base) == "128 heads × 1"


def test_a_state_that_was_not_measured_has_no_winner(make: Any) -> None:
    record = make()
    assert record.time_us is not None
    record.time_us.sustained = None
    points = arrange([record]).newest
    assert answers.winners(points, "sustained") == []
    assert len(answers.winners(points, "burst")) == 1


def test_the_ladder_has_each_versions_gain_there_and_over_all_cells(make: Any) -> None:
    records = [make("cute-dsl/flash_mla", 100, problem=CELL), make("cute-dsl/flash_mla_v2", 50, problem=CELL)]
    records += [make("cute-dsl/flash_mla", 100, problem=OTHER), make("cute-dsl/flash_mla_v2", 200, problem=OTHER)]
    records += [make("peer/fa4", 60, problem=CELL), make("triton/flash_mla", 300, problem=CELL)]
    cute, triton = answers.ladders(arrange(records).newest, "flash_mla", "b1_s1_h128_t4096", "burst")
    assert [s.point.kernel for s in cute.steps] == ["cute-dsl/flash_mla", "cute-dsl/flash_mla_v2"]
    assert [s.gain for s in cute.steps] == [None, pytest.approx(2.0)]
    assert cute.steps[1].mean == pytest.approx(math.sqrt(2.0 * 0.5))
    assert cute.steps[1].cells == 2
    assert cute.peer is not None
    assert (cute.peer.kernel, cute.limit) == ("peer/fa4", 50)
    assert [s.gain for s in triton.steps] == [None]


def test_two_languages_meet_with_their_fastest_on_the_same_cells(make: Any) -> None:
    records = [make("cute-dsl/flash_mla", 100), make("cute-dsl/flash_mla_v23", 80), make("cutile-dsl/flash_mla", 120)]
    records += [make("cute-dsl/flash_mla_v1", 10)]  # retired
    records += [make("cutile-dsl/flash_mla", 10, problem=OTHER)]
    ((a, b),) = answers.pairs(arrange(records).newest, "cutile-dsl", "cute-dsl", "burst")
    assert (a.name, b.name) == ("cutile-dsl/flash_mla", "cute-dsl/flash_mla_v23")
    mix = answers.instruction_mix(a)
    assert mix["tensor cores"] == 100
    assert sum(mix.values()) == 1000


def test_a_slower_chip_alone_moves_nothing(make: Any) -> None:
    before = arrange([make(us=100, limit=50)]).points
    after = arrange([make(us=120, limit=60, day="2026-11-22")]).points
    (move,) = answers.compare(before, after, "burst").moves
    assert move.change == pytest.approx(0)
    assert not move.moved


@pytest.mark.parametrize(
    ("us", "spread", "moved"), [(110, 0.01, True), (110, 0.06, False), (90, 0.01, True), (101, 0.01, False)]
)
def test_moved_is_what_the_spreads_cannot_explain(make: Any, us: float, spread: float, moved: bool) -> None:
    before, after = arrange([make(us=100, spread=spread)]), arrange([make(us=us, spread=spread, day="2026-11-22")])
    (move,) = answers.compare(before.points, after.points, "burst").moves
    assert move.moved is moved
    assert move.change == pytest.approx(us / 100 - 1)
    assert move.low < move.change < move.high


def test_what_stands_in_one_set_only_is_counted(make: Any) -> None:
    found = answers.compare(
        arrange([make(), make("peer/fa4", limit=None)]).points,
        arrange(
            [make("peer/fa4", limit=None), make("triton/flash_mla"), make("triton/flash_mla", problem=OTHER)]
        ).points,
        "burst",
    )
    assert (len(found.moves), found.unlimited, len(found.only_before), len(found.only_after)) == (0, 1, 1, 2)


def test_roofs_are_of_the_runs_and_of_the_data_sheet(make: Any) -> None:
    points = arrange([make(), make("peer/fa4", device="gb999")]).newest
    measured, sheet = answers.roofs(points, "h200", "burst")
    assert (measured.kind, measured.tflops, measured.gbps) == ("measured", 800, 4600)
    assert (sheet.kind, sheet.gbps) == ("data sheet", Device.get("h200").hbm_gbps)
    assert measured.at(1.0) == pytest.approx(4.6)
    assert measured.at(1e6) == 800
    assert [r.kind for r in answers.roofs(points, "gb999", "burst")] == ["measured"]


def test_codes_fit_a_tile_and_differ(make: Any) -> None:
    from mla_var3.catalogue.registry import all_kernels

    found = kernels(arrange([make(k.label) for k in all_kernels()]))
    codes = [k.code for k in found.values()]
    assert len(set(codes)) == len(codes)
    assert all(1 <= len(code) <= 5 for code in codes)


def test_lines_of_code_leave_out_comments_blank_lines_and_docstrings() -> None:
    text = '"""Doc\nstring."""\n\n# why\nx = """two\nlines"""  # counted\n\n\n'
    text += 'def f():\n    """Doc."""\n    return (\n        1\n    )\n'
    assert sources.code_lines(text) == 6


def test_lines_of_code_are_of_all_that_a_version_imports_in_its_language() -> None:
    kernel = KernelId.parse("cute-dsl/flash_mla_v23")
    found = sources.source_of(kernel.label)
    assert found is not None
    own = sources.code_lines(kernel.path.read_text(encoding="utf-8"))
    prims = kernel.path.parents[3] / "prims"
    used = [path for path in registry.source_files(kernel) if path.parent == prims]
    assert len(used) > 3
    assert found.lines >= own + sum(sources.code_lines(path.read_text(encoding="utf-8")) for path in used)


def test_a_language_has_a_hue_and_libraries_stand_apart(make: Any) -> None:
    labels = [k.label for k in registry.all_kernels()] + [f"cute-dsl/flash_mla_v{n}" for n in range(1, 23)]
    found = kernels(arrange([make(label) for label in labels]))
    hues: dict[str, set[int]] = {}
    for label, kernel in found.items():
        r, g, b = (int(kernel.colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
        hue, _, saturation = colorsys.rgb_to_hls(r, g, b)
        hues.setdefault(label.split("/")[0], set()).add(round(360 * hue) if saturation > 0.1 else -1)
        assert kernel.live == (label in {k.label for k in registry.all_kernels()})
    for language in ("cute-dsl", "cutile-dsl", "triton", "torch"):
        assert max(hues[language]) - min(hues[language]) <= 3, "shades of one hue"
    assert not any(0 <= hue <= 75 for language in hues if language != "peer" for hue in hues[language])
    assert all(0 <= hue <= 75 or hue >= 345 for hue in hues["peer"])
    colours = [k.colour for k in found.values() if k.live]
    assert len(set(colours)) == len(colours)


def test_a_verdict_is_one_line() -> None:
    lines = {label: entry.line for label, entry in sources.entries().items()}
    assert lines["cute-dsl/flash_mla_v1"].startswith("superseded: by version 7")
    assert all(len(line) <= 90 and "\n" not in line for line in lines.values())


def test_the_devlogs_verdicts_are_found() -> None:
    entry = sources.entries()["cute-dsl/flash_mla_v1"]
    assert entry.verdict == "superseded"
    assert entry.path == "devlogs/flash_mla/cute-dsl-v1.md"
    assert "<!--" not in entry.why and "  " not in entry.why
    assert entry.sections[0][0] == "Location"


# ---------------------------------------------------------------- the experiment
def test_the_regime_map_is_wide_enough_and_fits_both_gpus() -> None:
    cells = plan.expand_cells(config.compose(["experiment=regime_map"]))
    assert len(cells) >= 150
    for name, least, most in (("h", 8, 128), ("s", 1, 16), ("b", 1, 256), ("t", 512, 131072)):
        assert (min(getattr(c, name) for c in cells), max(getattr(c, name) for c in cells)) == (least, most)
    for key in ("h200", "h100"):
        assert all(2 * c.input_bytes() < 0.9 * Device.get(key).memory_gb * 1e9 for c in cells)


def test_the_regime_map_is_a_grid_and_no_scatter() -> None:
    """In each panel every number of requests meets every context, but for those that no memory holds."""
    cells = plan.expand_cells(config.compose(["experiment=regime_map"]))
    panels = {(c.s, c.h): {(o.b, o.t) for o in cells if (o.s, o.h) == (c.s, c.h)} for c in cells}
    assert {h for s, h in panels if s == 1} == {8, 16, 32, 64, 128}
    for (s, _), places in panels.items():
        grid = {(b, t) for b in {b for b, _ in places} for t in {t for _, t in places}}
        assert grid - places == ({(256, 131072)} if s == 1 else set())
    asked = config.compose(["experiment=regime_map"])
    assert {"dispatch", "peer/*", "cute-dsl/*"} <= {*asked.kernels.patterns} and asked.bench["limits_every_s"] == 20.0


def test_parts_are_disjoint_and_together_everything() -> None:
    whole = plan.expand_cells(config.compose(["experiment=regime_map"]))
    parts = [plan.expand_cells(config.compose(["experiment=regime_map", f"part={k}/5"])) for k in range(1, 6)]
    assert sorted(map(whole.index, [c for part in parts for c in part])) == list(range(len(whole)))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert all({8, 128} <= {c.h for c in part} and {1, 16} <= {c.b for c in part} for part in parts)


@pytest.mark.parametrize("part", ["5/4", "0/3", "half", "1", "99/99"])
def test_a_part_that_is_none_says_what_one_looks_like(part: str) -> None:
    with pytest.raises(UserError, match=r"part = .* (is no part|is empty)"):
        plan.expand_cells(config.compose(["experiment=decode", f"part={part}"]))
