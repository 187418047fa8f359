"""The dispatcher: its table, what it picks between and beyond measured points, and how it appears in a sweep."""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from mla_var3 import cli, paths
from mla_var3.catalogue import registry
from mla_var3.catalogue.registry import KernelId
from mla_var3.cli.arguments import experiment_cells
from mla_var3.cli.dispatch import from_files
from mla_var3.device import Device, Requirement
from mla_var3.dispatch import choose, pick, selection, survey
from mla_var3.dispatch import model as cost
from mla_var3.dispatch import table as tables
from mla_var3.errors import Unsupported, UserError, Verdict
from mla_var3.lab.devlog.entry import entry_path
from mla_var3.record import Record, load
from mla_var3.runtime.plan import KernelPlan
from mla_var3.runtime.types import Tiling
from mla_var3.workload import decode
from mla_var3.workload.decode import MlaProblem

H200, H100, A100 = (Device.get(key) for key in ("h200", "h100", "a100"))


# ---------------------------------------------------------------- a laboratory of its own
@dataclasses.dataclass(frozen=True)
class ToyTiling(Tiling):
    tile: int = 1
    num_splits: int = 0

    def validate(self, pd: MlaProblem, device: Device | None = None) -> Verdict:
        return Verdict.yes() if self.tile < 9 else Verdict.no("tile is over 8")


class ToyPlan(KernelPlan):
    workload = decode.WORKLOAD
    tiling_type = ToyTiling
    requires = Requirement(archs=("sm_90a",))

    def default_tiling(self) -> ToyTiling:
        return ToyTiling()

    def autotune_configs(self) -> list[Tiling]:
        return [ToyTiling()]

    def plan(self, *inputs: Any) -> Any:
        raise NotImplementedError

    def plan_empty(self) -> Any:
        raise NotImplementedError


class FewRowsPlan(ToyPlan):
    requires = Requirement(archs=("sm_90a",), problem=lambda pd: Verdict(pd.rows <= 32, "too many rows"))


class WaitingPlan(ToyPlan):
    graph_capturable = False


BASE, MANY, FEW, NEW, ODD = (KernelId("cute-dsl", "mla", "toy", n) for n in range(5))
PLANS: dict[KernelId, Any] = {MANY: ToyPlan, FEW: FewRowsPlan, NEW: ToyPlan, ODD: WaitingPlan}


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "all_kernels", lambda: tuple(PLANS))
    monkeypatch.setattr(registry, "get_plan", lambda kernel: PLANS[kernel])
    monkeypatch.setattr(registry, "missing", lambda what: None)


def record(kernel: KernelId, us: float, *, at: str = "2026-01-01T00:00:00Z", **fields: Any) -> Record:
    """A passed record. fields: of the problem, or of the record where their name is one of its."""
    own = {name: fields.pop(name) for name in list(fields) if name in Record.model_fields}
    problem = MlaProblem(**fields)
    stats = {"median": us, "p10": us, "p90": us, "n": 5}
    limits = {
        state: {"matmul_tflops": 800.0, "read_gbps": 4600.0, "limit_us": cost.limit_us(problem, H200, (state,))}
        for state in cost.STATES
    }
    data = {
        "id": f"{kernel.module_name}-{problem.label}-{us:g}", "at": at, "experiment": "x", "status": "passed",
        "kernel": kernel.to_record(), "problem": problem.to_record(), "tiling": {"tile": 1, "num_splits": 0},
        "device": "h200", "time_us": {"burst": stats, "sustained": stats}, "limits": limits,
        "error": {"out": 1e-3, "lse": 1e-6}, "source": {"hash": "0"}, "requested": "default",
    }  # fmt: skip
    return Record.model_validate({**data, **own})


def grid(factors: dict[KernelId, dict[int, float]]) -> list[Record]:
    """Times of a factor (by h) over the limit, and 10 us, at some batch sizes and lengths."""
    made = []
    for kernel, by_h in factors.items():
        for h, factor in by_h.items():
            for b, t in ((1, 4096), (1, 65536), (128, 4096), (16, 8192)):
                us = factor * (cost.limit_us(MlaProblem(b=b, h=h, t=t), H200) + 10)
                made.append(record(kernel, us, b=b, h=h, t=t))
    return made


# MANY wastes what it pads few heads with, FEW is written for them.
MEASURED = grid({MANY: {8: 1.5, 16: 1.4, 128: 1.1}, FEW: {8: 1.1, 16: 1.15}})


# ---------------------------------------------------------------- the table
def test_the_newest_passed_record_of_a_point_counts() -> None:
    cell = {"b": 2, "t": 4096, "h": 16}
    cool = {"median": 1.0, "p10": 1.0, "p90": 1.0, "n": 5}
    table = tables.build(
        [
            record(MANY, 50.0, at="2026-01-02T00:00:00Z", **cell),
            record(MANY, 40.0, at="2026-01-01T00:00:00Z", **cell),
            record(MANY, 10.0, at="2026-01-03T00:00:00Z", status="incorrect", reason="x", time_us=None, **cell),
            record(KernelId("torch", "mla", "flash_mla"), 1.0, **cell),
            record(KernelId("peer", "mla", "other"), 1.0, **cell),
            record(MANY, 1.0, at="2026-01-04T00:00:00Z", device="unheard-of", **cell),
            record(MANY, 1.0, at="2026-01-04T00:00:00Z", experiment="mla_var6_plus", **cell),
            record(MANY, 1.0, at="2026-01-04T00:00:00Z", experiment="host_cost", **cell),
            record(MANY, 1.0, at="2026-01-04T00:00:00Z", time_us={"burst": cool, "sustained": None}, **cell),
        ]
    )
    (recipe,) = table.devices["h200"].recipes
    assert recipe.kernel == MANY and recipe.tiling == ()
    assert [point.us for point in recipe.points] == [50.0]


def test_a_time_beside_others_counts_before_a_newer_one_alone() -> None:
    def limits(tflops: float) -> dict[str, Any]:
        return {s: {"matmul_tflops": tflops, "read_gbps": 4600.0, "limit_us": 20.0} for s in cost.STATES}

    cell = {"b": 2, "t": 4096, "h": 16}
    old = {"at": "2026-01-01T00:00:00Z", "limits": limits(800.0), **cell}
    beside = [record(MANY, 40.0, **old), record(FEW, 45.0, **old)]
    alone = record(MANY, 50.0, at="2026-01-02T00:00:00Z", limits=limits(801.0), **cell)
    unknown = record(MANY, 55.0, at="2026-01-03T00:00:00Z", limits=None, **cell)

    def kept(*records: Record) -> str:
        recipes = tables.build(records).devices["h200"].recipes
        return next(recipe.points[0].record for recipe in recipes if recipe.kernel == MANY)

    assert kept(*beside, alone) == beside[0].id
    assert kept(beside[0], alone) == alone.id  # neither had company
    assert kept(*beside, alone, unknown) == beside[0].id  # without limits nobody knows of a run
    newer = record(MANY, 60.0, at="2026-01-04T00:00:00Z", limits=old["limits"], **cell)
    assert kept(*beside, alone, newer) == newer.id


def test_runs_are_linked_by_what_both_timed() -> None:
    """The chip of the second run takes a fifth longer: what was last timed on the first one gains nothing by it."""
    timed = [("a", "one", 1, 10.0), ("b", "one", 1, 9.5), ("a", "two", 2, 12.0), ("c", "two", 2, 11.0)]
    level = tables.levelled(timed)
    assert level == pytest.approx({"a": 12.0, "b": 11.4, "c": 11.0})
    # Alone, or in a run that nobody knows, a time links nothing; runs that share nothing keep their own times.
    assert tables.levelled([*timed, ("b", "three", 3, 1.0), ("c", "", 4, 1.0)]) == pytest.approx(level)
    apart = [("d", "four", 4, 5.0), ("e", "four", 4, 6.0)]
    assert tables.levelled([*timed, *apart]) == pytest.approx({**level, "d": 5.0, "e": 6.0})
    assert tables.levelled([("a", "one", 1, 10.0)]) == {}


def test_a_good_chip_does_not_decide(toys: None) -> None:
    def limits(tflops: float) -> dict[str, Any]:
        return {s: {"matmul_tflops": tflops, "read_gbps": 4600.0, "limit_us": 20.0} for s in cost.STATES}

    cell = {"b": 2, "t": 4096, "h": 16}
    good = {"at": "2026-01-01T00:00:00Z", "limits": limits(800.0), **cell}
    bad = {"at": "2026-01-02T00:00:00Z", "limits": limits(700.0), **cell}
    records = [
        record(MANY, 40.0, **good),
        record(FEW, 39.0, **good),
        record(MANY, 44.0, **bad),
        record(NEW, 41.0, **bad),
    ]
    chosen = choose(MlaProblem(**cell), H200, table=tables.build(records))
    assert chosen.kernel == NEW


def test_a_pick_counts_where_it_ran_with_the_versions_own_knobs() -> None:
    cell, own, other = {"b": 2, "t": 4096, "h": 16}, {"tile": 1}, {"tile": 2}
    named = record(MANY, 50.0, at="2026-01-02T00:00:00Z", tiling=own, **cell)
    picked = {"at": "2026-01-04T00:00:00Z", "picked_by": "dispatch", **cell}
    same = record(MANY, 40.0, requested="dispatch", tiling=own, **picked)
    knobs = record(MANY, 30.0, requested="dispatch", tiling=other, **picked)
    fixed = record(MANY, 20.0, requested="fixed_split", tiling=own, **{**picked, "picked_by": "fixed_split"})
    for records, wanted in (([named, same], 40.0), ([named, knobs], 50.0), ([named, fixed], 50.0)):
        (recipe,) = tables.build(records).devices["h200"].recipes
        assert recipe.tiling == () and [point.us for point in recipe.points] == [wanted]


def test_times_of_another_day_are_brought_to_the_same_limits() -> None:
    """A chip that was 10 % slower that day: what the limit explains shrinks by as much, the rest stays."""
    problem = MlaProblem(b=128, h=128, t=4096)
    slow = record(MANY, 300.0, b=128, h=128, t=4096)
    assert slow.limits is not None
    limit = cost.limit_us(problem, H200, ("burst",))
    for state in cost.STATES:
        getattr(slow.limits, state).limit_us *= 1.1
    us = tables.build([slow]).devices["h200"].recipes[0].points[0].us
    other = cost.limit_us(problem, H200, ("sustained",))
    assert us == pytest.approx(((300 - 0.1 * limit) * (300 - 0.1 * other)) ** 0.5, rel=1e-4)


def test_a_long_call_on_a_fast_chip_lowers_no_floor() -> None:
    """The floor is of launches and first tiles: a call of hundreds of microseconds a little over its limit says nothing
    of it."""
    small, large = MlaProblem(b=1, h=16, t=1024), {"b": 128, "h": 128, "t": 8192}
    at_limit = record(MANY, cost.limit_us(MlaProblem(**large), H200) + 0.5, **large)
    short = record(MANY, cost.limit_us(small, H200) + 6.0, b=1, h=16, t=1024)
    assert tables.build([short, at_limit]).devices["h200"].floor_us == pytest.approx(6.0, abs=0.01)
    assert tables.build([at_limit]).devices["h200"].floor_us == tables.DeviceTable("h200").floor_us


def test_a_table_survives_its_file(tmp_path: Path) -> None:
    table = tables.build(MEASURED)
    path = tmp_path / "table.json"
    path.write_text(table.to_json())
    again = tables.load(path)
    assert again.devices["h200"].recipes == table.devices["h200"].recipes
    path.write_text("{")
    tables.load.cache_clear()
    with pytest.raises(UserError, match=r"damaged .*: run `mla-var3 dispatch build`"):
        tables.load(path)
    with pytest.raises(UserError, match="cannot be read"):
        tables.load(tmp_path / "nowhere.json")
    path.write_text('{"schema": 99}')
    tables.load.cache_clear()
    with pytest.raises(UserError, match="has the form 99"):
        tables.load(path)


def test_the_shipped_table_is_that_of_the_shipped_records() -> None:
    built = from_files([paths.shipped_results_dir()])
    assert tables.PATH.read_text(encoding="utf-8") == built.to_json(), "run `mla-var3 dispatch build`"
    ids = {r.id for r in load(paths.shipped_results_dir()).records}
    points = [p for device in built.devices.values() for recipe in device.recipes for p in recipe.points]
    assert points and {p.record for p in points} <= ids


def test_a_version_that_its_devlog_rejects_is_not_in_the_table(
    toys: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it was faster or not; what it was measured beside stays."""
    records = tmp_path / "some.jsonl"
    records.write_text("".join(record.model_dump_json() + "\n" for record in MEASURED))

    def kernels() -> set[KernelId]:
        return {recipe.kernel for recipe in from_files([records]).devices["h200"].recipes}

    monkeypatch.setattr(paths, "repo_root", lambda: tmp_path)
    assert {FEW, MANY} <= kernels()
    for verdict, kept in (("kept", True), ("rejected", False)):
        entry = entry_path(tmp_path, MANY)
        entry.parent.mkdir(parents=True, exist_ok=True)
        entry.write_text(f"---\nverdict: {verdict}\n---\n")
        assert (MANY in kernels()) is kept and FEW in kernels()


def test_the_table_lands_near_the_best_where_it_was_not_told() -> None:
    """Leave one cell out, pick from the others: within 1 % of the best version there on average, nowhere over 10 %. Of
    an H100 one version a cell was measured, so that there is nothing to compare."""
    results = {device.device: selection.hold_out(device) for device in tables.load().devices.values()}
    assert len(results["h200"]) >= 15 and set(results) == {"h100", "h200"}
    for held in filter(None, results.values()):
        found = selection.summary(held)
        assert found["mean_ratio"] < 1.01, found
        assert found["worst"]["ratio"] < 1.1, found


@pytest.mark.parametrize("experiment", ["decode", "ragged", "query_rows", "tensor_parallel", "pages"])
@pytest.mark.parametrize("device", [H200, H100], ids=lambda device: device.key)
def test_measured_chips_are_served_by_cute(experiment: str, device: Device) -> None:
    """Records of code that is no longer here count for nothing, and a baseline's would be all there is: measure."""
    cells = experiment_cells(experiment)
    picked = [choose(cell, device).kernel for cell in cells]
    baselines = [(cell, kernel) for cell, kernel in zip(cells, picked, strict=True) if kernel.language != "cute-dsl"]
    assert len(cells) >= 12 and not baselines


def test_a_base_version_serves_only_what_later_ones_refuse(toys: None, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = {**PLANS, BASE: ToyPlan}
    monkeypatch.setattr(registry, "all_kernels", lambda: tuple(plans))
    monkeypatch.setattr(registry, "get_plan", plans.__getitem__)
    records = [*grid({BASE: {8: 1.0, 16: 1.0}, FEW: {8: 1.3, 16: 1.3}}), record(BASE, 1.0, b=64, h=8, t=512)]
    table = tables.build(records)
    # Where only the base was measured, and faster than the later one anywhere, the later one stands before it.
    ranked = selection.rank(table.devices["h200"], MlaProblem(b=64, h=8, t=512), H200)
    assert [choice.kernel for choice in ranked] == [FEW, BASE]
    assert ranked[1].us is not None and ranked[0].us is not None and ranked[1].us < ranked[0].us
    assert choose(MlaProblem(b=4, h=128, t=4096), H200, table=table).kernel == BASE, "FEW refuses 128 heads"


# ---------------------------------------------------------------- picking
@pytest.mark.parametrize(
    ("problem", "kernel"),
    [
        ({"b": 100, "h": 128, "t": 5000}, MANY),
        ({"b": 100, "h": 16, "t": 5000}, FEW),
        ({"b": 3, "h": 8, "t": 30000}, FEW),
        ({"b": 1, "h": 4, "t": 300}, FEW),
        ({"b": 4, "h": 8, "s": 8, "t": 9000}, MANY),  # 64 rows: the other one refuses them
        ({"b": 300, "h": 64, "t": 100000, "causal": True, "s": 2, "dtype": "fp16"}, MANY),
    ],
)
def test_picks_between_and_beyond_measured_points(toys: None, problem: dict[str, Any], kernel: KernelId) -> None:
    choice = choose(MlaProblem(**problem), H200, table=tables.build(MEASURED))
    assert choice.kernel == kernel
    assert choice.us is not None and choice.us > 0
    assert choice.records and all(r.startswith(kernel.module_name) for r in choice.records)


def test_a_measured_cell_is_predicted_as_measured(toys: None) -> None:
    problem = MlaProblem(b=128, h=16, t=4096)
    table = tables.build(MEASURED)
    chosen, refused = survey(problem, H200, table=table)
    times = {r.kernel.label: r.time_us.burst.median for r in MEASURED if MlaProblem.from_record(r.problem) == problem}
    assert [c.kernel for c in chosen] == [FEW, MANY, NEW]
    for choice in chosen[:2]:
        assert choice.us == pytest.approx(times[choice.kernel.label], rel=0.02)
        assert "measured here" in choice.reason
    assert chosen[2].us is None and "has no time of it" in chosen[2].reason
    assert [r.label for r in refused] == [ODD.label] and "waits for the device" in refused[0].reason


def test_versions_that_nobody_measured_come_last_the_newest_first(toys: None) -> None:
    table = tables.build([r for r in MEASURED if r.kernel.version == FEW.version])
    assert choose(MlaProblem(h=128), H200, table=table).kernel == NEW
    assert choose(MlaProblem(h=8), H200, table=table).kernel == FEW
    assert choose(MlaProblem(h=8), H200, table=tables.Table()).kernel == NEW


def test_another_device_of_the_architecture_borrows_the_measurements(toys: None) -> None:
    choice = choose(MlaProblem(b=64, h=16), H100, table=tables.build(MEASURED))
    assert choice.kernel == FEW and "from measurements on h200" in choice.reason


def test_a_device_without_peaks_is_judged_by_those_of_the_measured_one(toys: None) -> None:
    slice_of_one = dataclasses.replace(
        H200, key="mig-3g", num_sms=60, hbm_gbps=None, tflops={}, measured=(), known=False
    )
    table = tables.build(MEASURED)
    for h, kernel in ((16, FEW), (128, MANY)):
        assert choose(MlaProblem(b=100, h=h), slice_of_one, table=table).kernel == kernel
    with pytest.raises(UserError, match="mig-3g has no peaks"):
        cost.limit_us(MlaProblem(), slice_of_one)


def test_a_device_that_no_version_is_written_for_is_unsupported(toys: None) -> None:
    with pytest.raises(Unsupported, match=r"no version takes .* on a100: .*this is sm_80"):
        choose(MlaProblem(h=16), A100, table=tables.build(MEASURED))


def test_a_version_that_cannot_be_imported_stops_nobody(toys: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def get_plan(kernel: KernelId) -> Any:
        if kernel == FEW:
            raise SyntaxError("half a kernel")
        return PLANS[kernel]

    monkeypatch.setattr(registry, "get_plan", get_plan)
    chosen, refused = survey(MlaProblem(b=128, h=16), H200, table=tables.build(MEASURED))
    assert chosen[0].kernel == MANY
    assert any("SyntaxError: half a kernel" in r.reason for r in refused)


def test_a_condition_narrows_the_choice(toys: None) -> None:
    def accepts(plan_type: Any, plan: Any) -> Verdict:
        return Verdict(plan_type is not FewRowsPlan, "not this one")

    assert choose(MlaProblem(b=128, h=16), H200, table=tables.build(MEASURED), accepts=accepts).kernel == MANY
    only = choose(MlaProblem(b=128, h=16), H200, table=tables.build(MEASURED), kernels=[NEW])
    assert only.kernel == NEW


def test_knobs_that_were_asked_for_count_where_they_were_measured(toys: None) -> None:
    """Four splits that were best for one request are nothing for a full batch; a knob out of bounds is no choice."""
    cell = {"b": 1, "h": 128, "t": 65536}
    asked = {"requested": {"num_splits": 4}, "tiling": {"tile": 1, "num_splits": 4}}
    table = tables.build([*MEASURED, record(MANY, 20.0, **cell, **asked)])
    near = choose(MlaProblem(b=1, h=128, t=66000), H200, table=table)
    assert near.kernel == MANY and near.knobs == {"num_splits": 4}
    assert near.label == f"{MANY.label} (num_splits=4)"
    assert near.plan(MlaProblem(**cell), H200).tiling == ToyTiling(num_splits=4)
    assert choose(MlaProblem(b=128, h=128, t=65536), H200, table=table).knobs == {}
    assert choose(MlaProblem(b=1, h=64, t=65536), H200, table=table).knobs == {}
    odd = {"requested": {"tile": 9}, "tiling": {"tile": 9, "num_splits": 0}}
    table = tables.build([*MEASURED, record(MANY, 20.0, **cell, **odd)])
    assert choose(MlaProblem(**cell), H200, table=table).knobs == {}


def test_picking_again_nearby_costs_no_thought(toys: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[MlaProblem] = []

    def counted(problem: MlaProblem, device: Device) -> Any:
        asked.append(problem)
        return choose(problem, device, table=tables.build(MEASURED))

    selection.forget()
    monkeypatch.setattr(selection, "choose", counted)
    picks = [pick(MlaProblem(b=b, h=16, t=t), H200) for b, t in ((128, 4096), (127, 4096), (130, 4160), (128, 4000))]
    assert len(asked) == 1 and {p.kernel for p in picks} == {FEW}
    assert (asked[0].b, asked[0].t) == (128, 4096)
    pick(MlaProblem(b=64, h=16, t=4096), H200)
    assert len(asked) == 2
    selection.forget()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 64, 128, 4096, 131072])
def test_powers_of_two_stand_for_themselves(size: int) -> None:
    assert selection.neighbourhood(size) == size


# ---------------------------------------------------------------- the verb
def test_show_says_what_is_picked_and_why(toys: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "toys.json"
    path.write_text(tables.build(MEASURED).to_json())
    words = ["dispatch", "show", "--b", "128", "--s", "1", "--h", "16", "--t", "4096"]
    assert cli.main([*words, "--device", "h200", "--table", str(path)]) == 0
    out = capsys.readouterr().out
    assert f"picked: {FEW.label}: predicted" in out and f"rests on records {FEW.module_name}-b128_s1_h16_t4096" in out
    assert f"then  {MANY.label}: predicted" in out and f"not   {ODD.label}" in out
    assert cli.main([*words, "--device", "a100", "--table", str(path)]) == 1
    assert "no version takes this problem here" in capsys.readouterr().out


def test_build_makes_a_table_and_holds_cells_out(
    toys: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "records.jsonl"
    source.write_text("\n".join([*(r.to_json() for r in MEASURED), "{torn"]) + "\n")
    target = tmp_path / "made.json"
    assert cli.main(["dispatch", "build", str(source), "--out", str(target)]) == 0
    said = capsys.readouterr()
    assert "h200: 2 versions and tunings, 20 points" in said.out and "geometric mean" in said.out
    assert f"{source}:21: " in said.err
    assert json.loads(target.read_text())["held_out"]["h200"]["cells"] == 8
    empty = tmp_path / "none.jsonl"
    empty.write_text("")
    assert cli.main(["dispatch", "build", str(empty), "--out", str(target)]) == 2
    assert "hold no times" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["shw"], "dispatch has no action 'shw': did you mean 'show'?"),
        (["show", "--device", "h2000"], "no device 'h2000'"),
    ],
)
def test_mistakes_are_named(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["dispatch", *words]) == 2
    assert sentence in capsys.readouterr().err


def test_the_verb_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["dispatch"]) == 0
    out = capsys.readouterr().out
    assert "build" in out and "show" in out


# ---------------------------------------------------------------- lengths that differ
def test_ragged_points_are_far_from_uniform_ones() -> None:
    uniform, ragged = MlaProblem(b=128, t=4096), MlaProblem(b=128, t=8192, lengths={"name": "ragged", "seed": 1})
    near, far = (cost.place_of(problem, H200) for problem in (uniform, ragged))
    assert ragged.fill == pytest.approx(0.5, abs=0.05) and uniform.fill == 1.0
    assert near.distance(far) == pytest.approx(1.0, abs=0.1)  # as many keys, half of the table's width
    assert MlaProblem(b=2, t=1, lengths=[0, 0]).fill == 1.0


def test_pick_hands_on_about_how_full_the_table_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[MlaProblem] = []
    monkeypatch.setattr(selection, "choose", lambda problem, device: asked.append(problem))
    monkeypatch.setattr(selection, "takes", lambda *_: Verdict.yes())
    for mean in (8192, 4000, 1000):
        selection._pick.cache_clear()
        pick(MlaProblem(b=16, t=8192, lengths=[8192, *[(mean * 16 - 8192) // 15] * 15]), H200)
    selection._pick.cache_clear()
    assert [problem.fill for problem in asked] == [1.0, pytest.approx(0.5, abs=0.01), pytest.approx(0.125, abs=0.01)]
    assert asked[0].lengths == "uniform" and {problem.t for problem in asked} == {8192}


def test_a_missing_package_that_makes_serving_slow_is_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    here = registry.missing

    def without_cute(what: Any) -> str | None:
        return "cute-dsl is left out." if getattr(what, "language", what) == "cute-dsl" else here(what)

    monkeypatch.setattr(registry, "missing", without_cute)
    monkeypatch.setattr(selection, "_warned", set())
    with pytest.warns(
        RuntimeWarning, match=r"is picked, predicted to take .* cute-dsl/\S+ may do it in .* left out\.$"
    ):
        choose(MlaProblem(b=128), H200)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choose(MlaProblem(b=64), H200)
        monkeypatch.setattr(selection, "_warned", set())
        choose(MlaProblem(b=64), A100)  # where no CuTe version was measured


@pytest.mark.parametrize("left_out", ["cutile-dsl", "triton"])
def test_a_missing_package_that_serving_does_not_need_is_not_spoken_of(
    left_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, slow = registry.missing, KernelId.parse("cute-dsl/flash_mla_v23")
    fast = KernelId.parse(f"{left_out}/flash_mla")

    def without(what: Any) -> str | None:
        return f"{left_out} is left out." if getattr(what, "language", what) == left_out else here(what)

    ranked = [selection.Choice(fast, (), 1.0, "predicted"), selection.Choice(slow, (), 2.0, "predicted")]
    monkeypatch.setattr(registry, "missing", without)
    monkeypatch.setattr(selection, "rank", lambda *_: list(ranked))
    monkeypatch.setattr(selection, "_warned", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose(MlaProblem(b=128), H200).kernel == slow
