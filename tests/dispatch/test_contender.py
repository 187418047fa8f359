"""What the dispatcher picks, and the fixed-split mode, as contenders of a sweep, a bench and a check."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mla_var3 import cli
from mla_var3.catalogue import registry
from mla_var3.device import Device
from mla_var3.dispatch import choose
from mla_var3.lab.sweep import config as sweep_config
from mla_var3.lab.sweep import plan as sweep_plan
from mla_var3.lab.sweep import run as sweep
from mla_var3.lab.sweep.launch import Local
from mla_var3.measure import environment
from mla_var3.measure.cell import Contender, contender_key
from mla_var3.record import Record, load, new_id, now
from mla_var3.workload.decode import MlaProblem

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
H200 = Device.get("h200")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(Device, "detect", staticmethod(lambda index=0: H200))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def points(*words: str) -> list[sweep_plan.Point]:
    config = sweep_config.compose(words)
    return sweep_plan.expand(config, sweep_plan.Target(H200, True))


# ---------------------------------------------------------------- points
def test_dispatch_stands_for_one_version_a_cell() -> None:
    found = points("experiment=decode", "kernels=dispatch")
    assert len(found) == 17
    for point in found:
        choice = choose(point.problem, H200)
        assert (point.kernel, point.asked, point.picked_by) == (choice.kernel, choice.knobs, "dispatch")
        assert point.runnable and point.requested == "dispatch" and point.tiling is not None


def test_dispatch_stands_beside_named_versions() -> None:
    found = points("experiment=quickstart", "kernels=dispatch,cute-dsl/flash_mla,cute-dsl/flash_mla_v23")
    named = {(p.problem, p.kernel) for p in found if not p.picked_by}
    assert len(named) == 8
    # A version that is named and picked is one contender: it is timed once, under its own name.
    for point in (p for p in found if p.picked_by):
        assert (point.problem, point.kernel) not in named
    cells = {p.problem for p in found}
    both = [cell for cell in cells if (cell, choose(cell, H200).kernel) in named]
    assert both and len(found) == 12 - len(both)
    for cell in cells:
        mine = [p for p in found if p.problem == cell]
        assert len({contender_key(cell, _contender(p), H200) for p in mine}) == len(mine) == 3 - (cell in both)


def _contender(point: sweep_plan.Point) -> Contender:
    return Contender(point.kernel, dict(point.asked) or None, picked_by=point.picked_by)


def test_the_newest_of_each_family_does_not_push_the_pick_out() -> None:
    config = sweep_config.compose(["experiment=quickstart", "kernels=cute"])
    config.kernels.patterns, config.kernels.newest = ["dispatch", "cute-dsl/flash_mla*"], True
    found = sweep_plan.expand(config, sweep_plan.Target(H200, True))
    cells = {p.problem for p in found}
    assert len(cells) == 4
    for cell in cells:
        (pick,) = [p for p in found if p.problem == cell and p.kernel == choose(cell, H200).kernel]
        assert pick.runnable


def test_fixed_split_sets_the_knob_of_the_version_that_it_takes() -> None:
    found = points("experiment=fixed_split", "tiling.split_tokens=2048")
    assert {p.picked_by for p in found} == {"dispatch", "fixed_split"}
    for point in found:
        if point.picked_by == "fixed_split":
            assert point.kernel.label in ("cute-dsl/flash_mla_v23", "cute-dsl/flash_mla_v24")
            assert point.runnable and point.tiling.split_tokens == 2048, point.reason
            assert point.asked == {"split_tokens": 2048} == point.requested == _contender(point).requested
        else:
            assert "split_tokens" not in point.asked and point.requested == "dispatch"


def test_a_knob_that_nobody_has_is_named(gpu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sweep", "experiment=fixed_split", "tiling.split_token=64"]) == 2
    assert "did you mean 'split_tokens'" in capsys.readouterr().err


def test_a_cell_that_no_version_takes_has_no_pick() -> None:
    odd = MlaProblem(h=16, p=32)
    assert sweep_plan.picked("dispatch", odd.replace(dtype="fp32"), H200) is None


# ---------------------------------------------------------------- records
def measure(monkeypatch: pytest.MonkeyPatch) -> list[Contender]:
    """Replaces the measuring worker by one whose records say what the contenders are."""
    from mla_var3.measure import cell as cell_

    seen: list[Contender] = []

    def measure_cells(cells: Any, device: Device, settings: Any, *, experiment: str) -> Iterator[Record]:
        run = cell_._Run(device, settings, experiment)
        for problem, contenders in cells:
            for number, contender in enumerate(contenders):
                seen.append(contender)
                source = environment.source_hash(contender.kernel, contender.plan)
                slot = cell_._Slot(number, 0, problem, contender, source)
                us = 50.0 + number
                stats = {"median": us, "p10": us, "p90": us, "n": 5}
                fields = {"status": "passed", "time_us": {"burst": stats}, "error": {"out": 1e-3, "lse": 1e-6}}
                yield run.record(slot, fields)

    monkeypatch.setattr(cell_, "measure_cells", measure_cells)
    return seen


def test_a_record_names_the_version_and_what_picked_it(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = measure(monkeypatch)
    assert cli.main(["sweep", "experiment=quickstart", "kernels=dispatch,cute-dsl/flash_mla"]) == 0
    records = load(gpu / "results").records
    assert len(records) == len(seen) == 8
    for record in records:
        if record.picked_by is None:
            assert record.kernel.label == "cute-dsl/flash_mla" and record.requested == "default"
            continue
        choice = choose(MlaProblem.from_record(record.problem), H200)
        assert record.picked_by == record.requested == "dispatch"
        assert record.kernel.label == choice.kernel.label
    assert len({r.key for r in records}) == 8
    assert cli.main(["sweep", "experiment=quickstart", "kernels=dispatch,cute-dsl/flash_mla", "resume=true"]) == 0
    assert len(seen) == 8, "everything was there already"


def test_tables_have_the_pick_as_the_version_that_it_is(
    gpu: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measure(monkeypatch)
    assert cli.main(["sweep", "experiment=quickstart", "kernels=dispatch,cute-dsl/flash_mla", "verbose=true"]) == 0
    out = capsys.readouterr().out
    (cell, *_) = {p.problem for p in points("experiment=quickstart", "kernels=dispatch")}
    assert choose(cell, H200).kernel.label in out and "dispatch" not in out
    compare = ["compare", str(gpu / "results"), "--kernels"]
    assert cli.main([*compare, "cute-dsl/flash_mla", choose(cell, H200).kernel.label]) == 0
    out = capsys.readouterr().out
    assert f"cute-dsl/flash_mla against {choose(cell, H200).kernel.label}" in out and "geometric mean" in out
    assert cli.main([*compare, "dispatch"]) == 2
    assert "stands under the version that it picked" in capsys.readouterr().err


def test_bench_measures_the_pick(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = measure(monkeypatch)
    assert cli.main(["bench", "dispatch", "--b", "128", "--h", "16", "--t", "4096"]) == 0
    (contender,) = seen
    assert contender.picked_by == "dispatch"
    assert contender.kernel == choose(MlaProblem(b=128, h=16, t=4096), H200).kernel


def test_check_checks_the_pick(gpu: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from mla_var3.check import judge as checking

    checked: list[Any] = []

    def check(plan_type: Any, problem: MlaProblem, tiling: Any, where: str, **options: Any) -> Any:
        checked.append((plan_type, where))
        return checking.CheckReport(True, "", {"out": 1e-3, "lse": 1e-6})

    monkeypatch.setattr(checking, "check", check)
    assert cli.main(["check", "dispatch", "--b", "128", "--h", "16"]) == 0
    kernel = choose(MlaProblem(b=128, h=16), H200).kernel
    assert checked == [(registry.get_plan(kernel), "cuda")]
    assert f"dispatch picks {kernel.label}" in capsys.readouterr().out
    monkeypatch.setattr(Device, "detect", staticmethod(lambda index=0: None))
    assert cli.main(["check", "dispatch"]) == 2
    assert "dispatch picks a version for a GPU" in capsys.readouterr().err


def test_without_a_gpu_the_picks_are_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from mla_var3.lab.sweep import compile as sweep_compile

    monkeypatch.setattr(Device, "detect", staticmethod(lambda index=0: None))
    monkeypatch.chdir(tmp_path)
    asked: list[Any] = []

    def compile_points(mine: Any, *arguments: Any, **options: Any) -> Iterator[Any]:
        asked.extend(mine)
        return iter(())

    monkeypatch.setattr(sweep_compile, "compile_points", compile_points)
    words = ["experiment=fixed_split", "experiment.cpu=false", "experiment.recorded=false"]
    assert cli.main(["sweep", *words]) == 0
    assert {p.picked_by for p in asked} == {"dispatch", "fixed_split"}


def test_a_pick_is_never_tuned() -> None:
    config = sweep_config.compose(["experiment=quickstart", "kernels=dispatch", "bench.tune=true"])
    job = sweep.Sweep(config, Local(H200))
    (first, *_) = sweep_plan.expand(config, job.target, job.cells)
    contender = job.contender(first)
    assert not contender.tune and contender.requested == "dispatch"


def test_records_of_picks_say_so() -> None:
    data = {
        "id": new_id(), "at": now(), "experiment": "x", "status": "skipped", "reason": "y", "device": "h200",
        "kernel": {"language": "cute-dsl", "layer": "mla", "design": "flash_mla"}, "problem": MlaProblem().to_record(),
        "source": {"hash": "0"}, "picked_by": "dispatch",
    }  # fmt: skip
    assert '"picked_by":"dispatch"' in Record.model_validate(data).to_json()
