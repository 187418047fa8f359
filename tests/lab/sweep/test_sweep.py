"""Sweeps: configuration and its mistakes, points and their verdicts, records that survive, and the way of a point."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import made_up
from mla_var3 import cli, paths
from mla_var3.catalogue import registry
from mla_var3.catalogue.registry import KernelId
from mla_var3.device import Device, Requirement
from mla_var3.errors import UserError, Verdict
from mla_var3.lab.sweep import config as sweep_config
from mla_var3.lab.sweep import cpu as sweep_cpu
from mla_var3.lab.sweep import plan as sweep_plan
from mla_var3.lab.sweep import run as sweep
from mla_var3.lab.sweep import run as sweep_run
from mla_var3.record import Record, load, now
from mla_var3.runtime.plan import KernelPlan
from mla_var3.runtime.types import Tiling
from mla_var3.workload import decode
from mla_var3.workload.decode import MlaProblem

H200, A100 = Device.get("h200"), Device.get("a100")


# ---------------------------------------------------------------- fakes
@dataclass(frozen=True)
class ToyTiling(Tiling):
    tile_m: int = 64
    num_splits: int = 0

    def validate(self, pd: MlaProblem, device: Device | None = None) -> Verdict:
        return Verdict.yes() if self.tile_m <= 128 else Verdict.no(f"tile_m = {self.tile_m} is over 128")


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
        return SimpleNamespace(functions=("toy",))


TOYS = tuple(KernelId(language, "mla", "toy", n) for language in ("triton", "cute-dsl") for n in (0, 1))


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Two versions of a design in two languages that are there, and an empty folder to run in."""
    monkeypatch.setattr(registry, "all_kernels", lambda: TOYS)
    monkeypatch.setattr(registry, "get_plan", lambda kernel: ToyPlan)
    monkeypatch.setattr(registry, "missing", lambda language: None)
    monkeypatch.setattr(registry, "source_files", lambda kernel: [])
    monkeypatch.setattr(registry, "cannot_run_on_cpu", lambda language: "toys do not run on a CPU")
    monkeypatch.setattr(Device, "detect", staticmethod(lambda index=0: None))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def gpu(toys: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As `toys`, with an H200 in the machine."""
    monkeypatch.setattr(Device, "detect", staticmethod(lambda index=0: H200))
    return toys


def pretend(monkeypatch: pytest.MonkeyPatch, stop_after: int = 10**6) -> list[str]:
    """Replaces the measuring worker; Ctrl-C comes after some records. Returns the labels of what was measured."""
    from mla_var3.measure import cell as cell_

    seen: list[str] = []

    def measure_cells(cells: Any, device: Device, settings: Any, *, experiment: str) -> Iterator[Record]:
        for problem, contenders in cells:
            for contender in contenders:
                if len(seen) == stop_after:
                    raise KeyboardInterrupt
                seen.append(f"{contender.kernel.label} {problem.label}")
                yield measured(contender, problem, device, experiment)

    monkeypatch.setattr(cell_, "measure_cells", measure_cells)
    return seen


def measured(contender: Any, problem: MlaProblem, device: Device, experiment: str = "x", us: float = 50.0) -> Record:
    from mla_var3.measure.cell import contender_key

    own = {"at": now(), "requested": contender.requested, "key": contender_key(problem, contender, device)}
    return made_up.record(
        contender.kernel, us, problem, limit=us / 2, experiment=experiment, device=device.key, **own
    )  # fmt: skip


def files(folder: Path) -> list[Record]:
    return load(folder).records


# ---------------------------------------------------------------- configuration
@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("experiment=quickstrt", "experiment 'quickstrt' is unknown: did you mean 'quickstart'?"),
        ("model=kimi", "model 'kimi' is unknown: did you mean 'kimi-k2'?"),
        ("device=h2000", "device 'h2000' is unknown: did you mean 'h200'?"),
        ("bench=standart", "bench 'standart' is unknown: did you mean 'standard'?"),
        ("kernels=cutee", "kernels 'cutee' is unknown: did you mean 'cute'?"),
        ("problm.b=3", "there is no key 'problm': did you mean 'problem'?"),
        ("problem.bb=3", "there is no key 'problem.bb': did you mean 'b'?"),
        ("experiment.cels=[]", "there is no key 'experiment.cels': did you mean 'cells'?"),
        ("+extra.key=1", "there is no key 'extra': the nearest of 19 are "),
        ("resume=maybe", "resume has a wrong value: Value 'maybe' is not a valid bool"),
        ("experiment.mode=measured", "experiment.mode = 'measured' is unknown: did you mean 'measure'?"),
        ("decode", "'decode' is not KEY=VALUE: did you mean experiment=decode?"),
        ("--multrun", "there is no option --multrun: did you mean '--multirun'?"),
        ("problem.t=[1,", "cannot read the override 'problem.t=[1,'"),
    ],
)
def test_a_typing_error_is_one_line_with_the_nearest_choice(word: str, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        sweep_config.compose([word])
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


def test_every_experiment_composes_and_expands() -> None:
    sizes = {}
    for name in paths.options("experiment"):
        config = sweep_config.compose([f"experiment={name}"])
        assert config.experiment.name == name
        if name == "captured":  # cells of a file
            continue
        sizes[name] = len(sweep_plan.expand_cells(config))
    assert sizes["decode"] == 17 and sizes["sparse_served"] == 30
    served = sweep_plan.expand_cells(sweep_config.compose(["experiment=sparse_served"]))
    assert {p.layout for p in served} == {"v32", "v4", "v41"} and {p.h for p in served} >= {6, 8, 12, 16, 32, 64, 128}
    assert set(sizes) >= {"quickstart", "decode", "tensor_parallel", "speculative", "ladder", "compile_matrix"}
    for experiment in ("experiment=unseen", "experiment=unseen_sparse", "experiment=unseen_indexer"):
        drawn, again, others = (
            sweep_plan.expand_cells(sweep_config.compose([experiment, f"seed={seed}"])) for seed in (7, 7, 8)
        )
        assert len(drawn) == 24 and drawn == again and not set(drawn) & set(others)
    grid = sweep_plan.expand_cells(sweep_config.compose(["experiment=tensor_parallel"]))
    assert {p.h for p in grid} == {8, 16, 32, 64}
    masked = sweep_plan.expand_cells(sweep_config.compose(["experiment=speculative"]))
    assert {p.s for p in masked} == {2, 4, 8, 16, 32, 64}
    assert all(p.causal for p in masked)


def test_cells_of_a_model_have_the_scale_of_its_query_heads() -> None:
    heads = {"deepseek-v4-flash": 512, "deepseek-v4-pro": 512, "mistral-small-4": 128, "minicpm3": 96}
    for name in paths.options("model"):
        config = sweep_config.compose([f"model={name}", "experiment.cells=[{b: 1, t: 128}]"])
        assert config.model.name == name
        (cell,) = sweep_plan.expand_cells(config)
        columns = heads.get(name, 256 if name.startswith("glm") else 192)
        assert cell.scale == columns**-0.5, name


def test_overrides_set_every_cell_and_equal_cells_run_once() -> None:
    config = sweep_config.compose(["experiment=decode", "problem.b=64", "problem.t=4096", "problem.page=contiguous"])
    cells = sweep_plan.expand_cells(config)
    assert {(c.b, c.t, c.page) for c in cells} == {(64, 4096, None)}
    assert len(cells) == len(set(cells)) < 17


def test_the_model_fills_what_cells_leave_out() -> None:
    words = ["model=kimi-k2", "experiment.cells=[{b: 1, t: 128}, {b: 1, t: 128, h: 8}]"]
    assert [c.h for c in sweep_plan.expand_cells(sweep_config.compose(words))] == [64, 8]


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("experiment.cells=[{bb: 1}]", "problem has no field 'bb': did you mean 'b'?"),
        ("experiment.cells=[3]", r"experiment.cells\[0\] = 3 is not a mapping"),
        ("experiment.cells=[]", "has neither cells nor a grid"),
        ("problem.dtype=bf17", "problem.dtype = 'bf17' is unknown: did you mean 'bf16'?"),
        ("problem.h=0", "problem.h = 0 is too small"),
        ("problem.b=many", "problem.b = 'many' is not an integer"),
    ],
)
def test_a_cell_that_makes_no_sense_names_its_field(word: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        sweep_plan.expand_cells(sweep_config.compose([word]))


def test_configs_of_the_current_folder_add_to_the_shipped_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "conf" / "experiment"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("name: mine\ncells: [{b: 3, t: 64}]\n")
    (folder / "broken.yaml").write_text("name: broken\ncells: [{b: 3\n")
    (folder / "typo.yaml").write_text("name: typo\ncels: []\n")
    monkeypatch.chdir(tmp_path)
    assert sweep_plan.expand_cells(sweep_config.compose(["experiment=mine"]))[0].b == 3
    with pytest.raises(UserError, match=r"broken.yaml, line \d+ is not valid yaml: .*; correct that line"):
        sweep_config.compose(["experiment=broken"])
    with pytest.raises(UserError, match=r"there is no key 'experiment\.cels': did you mean 'cells'"):
        sweep_config.compose(["experiment=typo"])


@pytest.mark.parametrize("group", ["experiment", "kernels", "model"])
def test_a_config_that_cannot_be_read_is_named(group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "conf" / group
    folder.mkdir(parents=True)
    (folder / "rows.yaml").write_text("- a\n- b\n")
    (folder / "latin.yaml").write_bytes("description: caf\xe9\n".encode("latin-1"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=rf"conf/{group}/rows\.yaml is a list: a config file has keys with values"):
        sweep_config.compose([f"{group}=rows"])
    with pytest.raises(UserError, match=rf"conf/{group}/latin\.yaml is not UTF-8 \(byte 16\): save it"):
        sweep_config.compose([f"{group}=latin"])


def test_a_model_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "conf" / "model"
    folder.mkdir(parents=True)
    (folder / "rows.yaml").write_text("- a\n")
    (folder / "latin.yaml").write_bytes("h: \xe9\n".encode("latin-1"))
    monkeypatch.chdir(tmp_path)
    for name, said in (("rows", "rows.yaml is a list"), ("latin", "latin.yaml is not UTF-8 (byte 3)")):
        assert cli.main(["check", "torch/flash_mla", "--device", "cpu", "--model", name]) == 2
        assert said in capsys.readouterr().err
    (folder / "broken.yaml").write_text("h: [4\nk: 1\n")
    assert cli.main(["check", "torch/flash_mla", "--device", "cpu", "--model", "broken"]) == 2
    with pytest.raises(UserError, match=r"broken\.yaml, line 2 is not valid yaml: .*; correct that line\.$") as swept:
        sweep_config.compose(["model=broken"])
    assert str(swept.value) in capsys.readouterr().err, "a sweep and a check say the same"
    assert cli.main(["list", "models"]) == 0 and "latin" in capsys.readouterr().out


def test_the_line_that_goes_on_is_one_that_a_shell_takes() -> None:
    words = [
        "experiment=decode",
        "kernels.patterns=[dispatch,peer/fa3_qv]",
        "resume=false",
        "problem.lengths={name: ragged}",
    ]
    line = sweep_run.resumed(words)
    assert shlex.split(line) == ["mla-var3", "sweep", words[0], words[1], words[3], "resume=true"]


def test_kernels_are_groups_names_or_wildcards(toys: Path) -> None:
    def chosen(word: str) -> list[str]:
        config = sweep_config.compose([word])
        return [k.label for k in sweep_plan.select_kernels(config.kernels.patterns, config.kernels.exclude)]

    assert chosen("kernels=cute") == ["cute-dsl/toy", "cute-dsl/toy_v1"]
    assert chosen("kernels=base") == ["cute-dsl/toy", "triton/toy"]
    assert chosen("kernels=triton/toy_v1,cute-dsl/toy") == ["triton/toy_v1", "cute-dsl/toy"]
    assert chosen("kernels=triton/toy_v1,*/toy*") == [
        "triton/toy_v1",
        *(k.label for k in sorted(TOYS) if k.label != "triton/toy_v1"),
    ]
    assert not sweep_config.compose(["experiment=quickstart", "kernels=triton/*"]).kernels.newest
    assert sweep_config.compose(["kernels=newest"]).kernels.newest
    assert not sweep_config.compose(["experiment=quickstart"]).kernels.newest
    assert chosen("kernels=toy_v1") == ["cute-dsl/toy_v1", "triton/toy_v1"]
    assert chosen("kernels=*/toy*") == [k.label for k in sorted(TOYS)]
    with pytest.raises(UserError, match="no kernel matches 'triton/toi': did you mean 'triton/toy'"):
        chosen("kernels=triton/toi")


def test_a_version_can_be_kept_to_some_cells(toys: Path) -> None:
    def labels(*words: str) -> list[list[str]]:
        config = sweep_config.compose(
            ["experiment=quickstart", "kernels=base", "experiment.cells=[{s: 1},{s: 2}]", *words]
        )
        target = sweep_plan.find_targets(config, [])[0]
        points = sweep_plan.expand(config, target)
        return [[p.kernel.label for p in points if p.problem.s == s] for s in (1, 2)]

    both = ["cute-dsl/toy", "triton/toy"]
    assert labels() == [both, both]
    assert labels("kernels.only=[{kernels: 'triton/*', s: 1}]") == [both, ["cute-dsl/toy"]]
    assert labels("kernels.only=[{kernels: 'triton/*', s: 1, h: 3}]") == [["cute-dsl/toy"], ["cute-dsl/toy"]]
    assert sweep_config.compose(["experiment=one_turn"]).kernels.only
    assert not sweep_config.compose(["experiment=one_turn", "kernels=peer/fa3_qv"]).kernels.only
    with pytest.raises(UserError, match=r"kernels.only leaves no kernel for b1_s2_h128_t4096: shorten it"):
        labels("kernels.only=[{kernels: '*', s: 1}]", "problem.b=1", "problem.t=4096")
    with pytest.raises(UserError, match=r"kernels.only\[0\] names 'heads', no field of a cell"):
        labels("kernels.only=[{kernels: '*', heads: 1}]")
    with pytest.raises(UserError, match=r"kernels.only\[0\] = .* is no rule: write"):
        labels("kernels.only=[toy]")


# ---------------------------------------------------------------- points
def test_points_carry_their_verdict(toys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = MlaProblem(b=2, t=128)
    good = sweep_plan.prepare(problem, TOYS[0], H200, {"tile_m": 128, "unknown": 1})
    assert good.runnable
    assert good.asked == {"tile_m": 128}
    assert good.requested == {"tile_m": 128}
    infeasible = sweep_plan.prepare(problem, TOYS[0], H200, {"tile_m": 256})
    assert (infeasible.status, infeasible.reason) == ("infeasible", "tile_m = 256 is over 128")
    other = sweep_plan.prepare(problem, TOYS[0], A100)
    assert (other.status, other.reason) == ("skipped", "the kernel is written for sm_90a; this is sm_80")
    wrong = sweep_plan.prepare(problem, TOYS[0], H200, {"tile_m": "wide"})
    assert wrong.status == "infeasible"
    assert "tiling.tile_m = 'wide' is not of the type of its default 64" in wrong.reason

    def broken(kernel: KernelId) -> Any:
        compile("def wrong(:\n", toys / "toy.py", "exec")

    (toys / "toy.py").write_text("def wrong(:\n")
    monkeypatch.setattr(registry, "get_plan", broken)
    failed = sweep_plan.prepare(problem, TOYS[0], H200)
    said = "toy.py could not be imported: SyntaxError: invalid syntax (toy.py:1: def wrong(:)"
    assert (failed.status, failed.reason) == ("failed", said)


def test_a_knob_that_no_kernel_has_is_a_typing_error(toys: Path) -> None:
    config = sweep_config.compose(["tiling.num_split=4"])
    with pytest.raises(UserError, match=r"no chosen kernel has a knob tiling\.num_split: did you mean 'num_splits'"):
        sweep_plan.expand(config, sweep_plan.find_targets(config, [])[0])


def test_newest_takes_the_latest_version_that_takes_the_cell(toys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class FewHeads(ToyPlan):
        requires = Requirement(archs=("sm_90a",), problem=lambda problem: problem.h <= 16)

    monkeypatch.setattr(registry, "get_plan", lambda kernel: FewHeads if kernel.version else ToyPlan)
    config = sweep_config.compose(["kernels=newest", "experiment.cells=[{b: 1, h: 128}, {b: 1, h: 16}]"])
    points = sweep_plan.expand(config, sweep_plan.find_targets(config, [])[0])
    assert sorted((p.problem.h, p.kernel.label) for p in points) == [
        (16, "cute-dsl/toy_v1"),
        (16, "triton/toy_v1"),
        (128, "cute-dsl/toy"),
        (128, "triton/toy"),
    ]


def test_targets() -> None:
    def target(word: str, detected: Device | None) -> tuple[str, bool]:
        (found,) = sweep_plan.find_targets(sweep_config.compose([word]), [] if detected is None else [detected])
        assert found.present or "measuring nothing" in found.note
        return found.device.key, found.present

    assert target("device=auto", None) == ("h200", False)
    assert target("device=auto", A100) == ("a100", True)
    assert target("device=h200", A100) == ("h200", False)
    assert target("device=h200", H200) == ("h200", True)


# ---------------------------------------------------------------- measuring
def test_measured_records_are_stored_and_shown(
    gpu: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = pretend(monkeypatch)
    assert sweep.main(["experiment=quickstart", "kernels=triton", "-v"]) == 0
    records = files(gpu / "results" / "h200")
    assert len(seen) == len(records) == 8
    assert records[0].experiment == "quickstart"
    out, err = capsys.readouterr()
    assert "Measured on NVIDIA H200" in out
    assert "triton/toy_v1" in out
    assert "[8/8" in err
    assert "8 passed; records in results/h200/" in err


def test_a_sweep_with_wrong_results_says_so_first_and_ends_with_1(
    gpu: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mla_var3.measure import cell as cell_

    def measure_cells(cells: Any, device: Device, settings: Any, *, experiment: str) -> Iterator[Record]:
        for problem, contenders in cells:
            for contender in contenders:
                record = measured(contender, problem, device, experiment)
                if contender.kernel.version:
                    data = record.model_dump(exclude={"time_us", "limits"}) | {
                        "status": "incorrect",
                        "reason": "off by 1",
                    }
                    record = Record.model_validate(data)
                yield record

    monkeypatch.setattr(cell_, "measure_cells", measure_cells)
    words = ["experiment=quickstart", "kernels=triton"]
    assert sweep.main(words) == 1
    out, err = capsys.readouterr()
    assert out.index("Failed: wrong results") < out.index("Fastest here on")
    assert "triton/toy_v1" in out[: out.index("Fastest here on")] and "off by 1" in out
    assert "triton/toy_v1" not in out[out.index("Fastest here on") :], "nothing of it is an answer, or told twice"
    assert "4 passed, 4 incorrect" in err and "mla-var3 check triton/toy_v1" in err
    assert sweep.main([*words, "resume=true"]) == 1, "what is known to be wrong stays wrong"
    assert sweep.main(["experiment=quickstart", "kernels=triton/toy"]) == 0


def test_an_experiment_for_two_languages_shows_them_beside_each_other(
    gpu: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch)
    words = ["experiment=quickstart", "kernels=*", "experiment.beside=[triton,cute-dsl]"]
    assert sweep.main(words) == 0
    out = capsys.readouterr().out
    assert "cute-dsl beside triton, the fastest of each, measured, burst" in out
    rows = [line.split() for line in out[: out.index("Geometric mean over the 4 cells")].splitlines() if "_s" in line]
    assert len(rows) == 4 and all(row[1:4] == ["50.0", "50.0", "1.00"] for row in rows)
    config = sweep_config.compose(["experiment=compare_dsl"])
    assert config.experiment.beside == ["cutile-dsl", "cute-dsl"] and "ratio" in config.experiment.description
    with pytest.raises(UserError, match="names two languages, and has 1"):
        sweep_config.compose(["experiment.beside=[triton]"])
    with pytest.raises(UserError, match="language 'cute' is unknown: did you mean 'cute-dsl'"):
        sweep_config.compose(["experiment.beside=[cute,triton]"])


def test_ctrl_c_keeps_what_was_finished_and_resume_does_the_rest(
    gpu: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["experiment=quickstart", "kernels=triton"]
    pretend(monkeypatch, stop_after=3)
    assert sweep.main(words) == 130
    assert len(files(gpu / "results")) == 3
    said = capsys.readouterr().err
    assert "stopped: finished points are in results/h200/" in said
    assert "Go on with: mla-var3 sweep experiment=quickstart kernels=triton resume=true" in said
    seen = pretend(monkeypatch)
    assert sweep.main([*words, "resume=true", "verbose=true"]) == 0
    assert len(seen) == 5
    records = files(gpu / "results")
    assert len(records) == len({(r.kernel.label, r.problem_label) for r in records}) == 8
    out = capsys.readouterr().out
    assert out.count("triton/toy_v1") >= 4, "resumed points are in the final table too"


def test_parts_of_an_experiment_meet_in_one_file(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = pretend(monkeypatch)
    words = ["experiment=quickstart", "kernels=triton"]
    assert sweep.main([*words, "part=1/2"]) == 0
    assert len(seen) == 4
    assert sweep.main([*words, "part=2/2", "resume=true"]) == 0
    assert len(seen) == len(set(seen)) == 8
    assert len(list((gpu / "results").rglob("*.jsonl"))) == 1
    assert sweep.main([*words, "resume=true"]) == 0
    assert len(seen) == 8, "nothing is left of the whole"


def test_a_budget_ends_a_sweep_between_cells(
    gpu: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = pretend(monkeypatch)
    clock = iter(range(0, 10_000, 10))
    monkeypatch.setattr(sweep.time, "monotonic", lambda: float(next(clock)))
    words = ["experiment=quickstart", "kernels=triton"]
    assert sweep.main([*words, "budget_s=25"]) == 0
    assert len(seen) == 4, "25 s end in the second cell of two contenders"
    goes_on = "go on with: mla-var3 sweep experiment=quickstart kernels=triton budget_s=25 resume=true"
    assert f"25 s are over: 4 points are left; {goes_on}" in capsys.readouterr().err
    assert sweep.main([*words, "resume=true"]) == 0
    assert len(seen) == len(set(seen)) == 8


def test_a_new_version_of_the_source_is_measured_again(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    words = ["experiment=ladder", "kernels=triton/toy"]
    sweep.main(words)
    monkeypatch.setattr("mla_var3.measure.environment.source_hash", lambda kernel, plan=None: "changed")
    seen = pretend(monkeypatch)
    sweep.main([*words, "resume=true"])
    assert len(seen) == 1


def test_refused_points_are_records_and_cost_nothing(
    gpu: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(what: Any) -> str | None:
        reason = "cute-dsl needs the package cutlass, which is not installed: pip install x."
        return reason if "cute" in str(what) else None

    monkeypatch.setattr(registry, "missing", missing)
    seen = pretend(monkeypatch)
    for _ in range(2):
        assert sweep.main(["experiment=ladder", "kernels=*", "resume=true"]) == 0
    records = files(gpu / "results")
    assert [r.status for r in records].count("skipped") == 2, "a resumed sweep does not repeat them"
    assert len(seen) == 2
    out, err = capsys.readouterr()
    assert err.count("skipped: cute-dsl needs the package cutlass, which is not installed: pip install x.") == 2
    (details,) = (gpu / "out" / "results" / "h200").glob("*.txt")
    assert "cutlass" in details.read_text() and "cutlass" not in out, "said once, and the table has it for each"


def test_infeasible_tiling_and_wrong_device_leave_records(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = pretend(monkeypatch)
    assert sweep.main(["experiment=ladder", "kernels=triton/toy", "tiling.tile_m=256"]) == 0
    (record,) = files(gpu / "results")
    assert (record.status, record.reason, record.requested) == (
        "infeasible",
        "tile_m = 256 is over 128",
        {"tile_m": 256},
    )
    assert sweep.main(["experiment=ladder", "kernels=triton/toy", "resume=true"]) == 0
    assert len(seen) == 1, "the default tiling is another point"
    assert sweep.main(["experiment=ladder", "kernels=triton/toy", "device=a100", "experiment.cpu=false"]) == 0
    (record,) = files(gpu / "out" / "results" / "a100")
    assert (record.status, record.reason) == ("skipped", "the kernel is written for sm_90a; this is sm_80")
    assert len(seen) == 1


def test_a_cell_too_large_for_memory_is_skipped_with_the_numbers(gpu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["experiment=ladder", "kernels=triton/toy", "problem.b=4096", "problem.t=131072"]
    assert sweep.main(words) == 0, "the real measuring function refuses it before it starts a worker"
    (record,) = files(gpu / "results")
    assert record.status == "skipped"
    assert "GB" in record.reason
    assert "GB" in capsys.readouterr().out


def test_a_full_disk_stops_with_one_sentence_and_keeps_the_rest(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mla_var3 import record as records_

    pretend(monkeypatch)
    real, calls = records_._append, []

    def append(fd: int, line: bytes) -> None:
        calls.append(line)
        if len(calls) > 2:
            raise OSError(28, "No space left on device")
        real(fd, line)

    monkeypatch.setattr(records_, "_append", append)
    with pytest.raises(UserError, match=r"the disk is full; the file holds 2 records.*resume=true"):
        sweep.main(["experiment=quickstart", "kernels=triton"])
    monkeypatch.setattr(records_, "_append", real)
    assert len(files(gpu / "results")) == 2


def test_a_corrupt_line_is_reported_and_costs_no_other(
    gpu: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch)
    words = ["experiment=quickstart", "kernels=triton/toy"]
    sweep.main(words)
    (path,) = (gpu / "results" / "h200").glob("*.jsonl")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], '{"id": 3\n', *lines[1:]]))
    seen = pretend(monkeypatch)
    assert sweep.main([*words, "resume=true"]) == 0
    assert not seen
    assert f"{path.name}:2: not JSON" in capsys.readouterr().err


def test_bench_settings_and_their_mistakes(
    gpu: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mla_var3.measure import cell as cell_

    settings: list[Any] = []

    def measure_cells(cells: Any, device: Device, given: Any, *, experiment: str) -> Iterator[Record]:
        settings.append((given, [c.tune for _, contenders in cells for c in contenders]))
        return iter(())

    monkeypatch.setattr(cell_, "measure_cells", measure_cells)
    sweep.main(["experiment=ladder", "kernels=triton/toy", "bench=fast", "bench.burst_rounds=9"])
    assert settings[-1][0].burst_rounds == 9
    assert settings[-1][0].cross_check_ms == 0
    sweep.main(["experiment=ladder", "kernels=triton/toy", "bench=tuned"])
    assert settings[-1][1] == [True, False], "the default tiling in turn with the tuned one"
    with pytest.raises(UserError, match="bench has no setting 'burst_round': did you mean 'burst_rounds'"):
        sweep.main(["bench.burst_round=9"])
    with pytest.raises(UserError, match="give one of them"):
        sweep.main(["bench.tune=true", "tiling.tile_m=64", "kernels=triton"])
    assert "Error executing job" not in capsys.readouterr().err, "one line, and it is ours"


def test_multirun_runs_every_combination(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = pretend(monkeypatch)
    words = ["-m", "experiment=ladder", "kernels=triton/toy,cute-dsl/toy_v1", "problem.b=1,2"]
    assert sweep.main(words) == 0
    assert sorted(seen) == [
        "cute-dsl/toy_v1 b1_s1_h128_t4096",
        "cute-dsl/toy_v1 b2_s1_h128_t4096",
        "triton/toy b1_s1_h128_t4096",
        "triton/toy b2_s1_h128_t4096",
    ]


def test_hydra_can_show_the_configuration(toys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep.main(["--cfg", "job", "experiment=ladder"]) == 0
    assert "name: ladder" in capsys.readouterr().out


# ---------------------------------------------------------------- without a GPU
def compiled_here(monkeypatch: pytest.MonkeyPatch, fail: str = "", spilled: int = 0) -> list[Any]:
    """Replaces the compilers: jobs run in this process, and one label can crash its process. spilled: bytes that code
    spills, all in the loop of products."""
    from mla_var3.lab.sweep import compile as sweep_compile
    from mla_var3.toolchain.compiled import CompiledKernel, Resources
    from mla_var3.toolchain.pool import CompileResult

    jobs: list[Any] = []

    def run_job(job: Any) -> CompiledKernel:
        resources = Resources(
            registers=168, threads=384, instructions={"HGMMA": 8}, spill_bytes=spilled, spill_loop_bytes=spilled
        )
        return CompiledKernel("toy", "sm_90a", resources)

    def compile_many(todo: Any, **options: Any) -> list[CompileResult]:
        jobs.extend(todo)
        return [
            CompileResult(job, None, "the compiling process died (signal 11)", "Crash")
            if fail and job.label.startswith(fail)
            else CompileResult(job, options["run"](job))
            for job in todo
        ]

    monkeypatch.setattr(sweep_compile, "run_job", run_job)
    monkeypatch.setattr(sweep_compile, "compile_many", compile_many)
    return jobs


def test_without_a_gpu_kernels_are_compiled_for_the_target(
    toys: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = compiled_here(monkeypatch, fail="triton/toy_v1")
    shipped = toys / "shipped"
    (shipped / "h200").mkdir(parents=True)
    from mla_var3.measure.cell import Contender

    old = measured(Contender(TOYS[2]), MlaProblem(b=128, t=4096), H200, us=220.25)
    old.at = "2026-01-02T03:04:05Z"
    aside = measured(Contender(TOYS[2]), MlaProblem(b=128, t=4096), H200, us=333.25)
    aside.at, aside.experiment = "2026-01-03T03:04:05Z", "one_turn"
    wrong = measured(Contender(TOYS[1]), MlaProblem(b=128, t=4096), H200, us=111.25)
    lines = "".join(record.to_json() + "\n" for record in (old, aside, wrong))
    (shipped / "h200" / "2026-01-02-decode.jsonl").write_text(lines)
    monkeypatch.setattr(paths, "shipped_results_dir", lambda: shipped)

    assert sweep.main(["experiment=quickstart", "kernels=triton", "--verbose"]) == 1, "what does not compile failed"
    out, err = capsys.readouterr()
    assert out.index("Failed: wrong results") < out.index("Compiled for") < out.index("Fastest here")
    answer = out[out.index("Fastest here") :]
    (row,) = [line for line in answer.splitlines() if "b128_s1_h128_t4096" in line]
    assert "cute-dsl/toy " in row and "220.2" in row, "the recorded time of what does not compile now is no answer"
    assert "left out, for what they are now is wrong or does not compile: triton/toy_v1" in answer
    assert "No GPU here: compiling for NVIDIA H200" in err
    assert len(jobs) == 6, "cells of one class share a compilation"
    records = files(toys / "out" / "results" / "h200")
    assert sorted(r.status for r in records) == ["compiled"] * 4 + ["failed"] * 4
    assert all(r.time_us is None for r in records)
    assert "168/168" in out
    assert "HGMMA" in out
    assert "181.9" in out, "the roofline of the first cell, from the measured ceilings"
    assert "measured 2026-11-21" in out
    assert "Recorded on NVIDIA H200" in out
    assert "2026-01-02" in out
    assert "220.2" in out and "333.2" not in out, "what was timed for something else stands aside"
    assert "the compiling process died (signal 11)" in out

    before = len(jobs)
    assert sweep.main(["experiment=quickstart", "kernels=triton", "resume=true"]) == 1
    assert [job.label.split()[0] for job in jobs[before:]] == ["triton/toy_v1"] * 3, "only what failed is tried again"


def test_a_full_disk_while_compiling_tells_how_many_records_the_file_holds(
    toys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mla_var3 import record as records_

    compiled_here(monkeypatch)
    real, calls = records_._append, []

    def append(fd: int, line: bytes) -> None:
        calls.append(line)
        if len(calls) in (2, 4):  # a short record may find room where a long one did not
            raise OSError(28, "No space left on device")
        real(fd, line)

    monkeypatch.setattr(records_, "_append", append)
    words = ["experiment=quickstart", "kernels=triton/toy,cute-dsl/toy"]
    with pytest.raises(UserError, match=r"the disk is full; the file holds (\d+) records.*resume=true") as caught:
        sweep.main(words)
    monkeypatch.setattr(records_, "_append", real)
    held = len(files(toys / "out" / "results"))
    assert held >= 1 and f"the file holds {held} records" in str(caught.value)


def test_compile_matrix_takes_every_claimed_architecture(toys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = compiled_here(monkeypatch)
    monkeypatch.setattr(ToyPlan, "requires", Requirement(archs=("sm_80", "sm_90a")))
    assert sweep.main(["experiment=compile_matrix", "kernels=triton/toy"]) == 0
    assert {job.device for job in jobs} == {"a100", "h200"}
    assert {p.name for p in (toys / "out" / "results").iterdir()} == {"a100", "h200"}


def test_compile_matrix_refuses_spills_in_the_loop_of_products_of_kernels_in_cute_dsl(
    toys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled_here(monkeypatch, spilled=24)
    assert sweep.main(["experiment=compile_matrix", "kernels=triton/toy"]) == 0
    assert sweep.main(["experiment=compile_matrix", "kernels=cute-dsl/toy"]) == 1
    found = {r.kernel.label: r for r in files(toys / "out" / "results")}
    assert found["triton/toy"].status == "compiled"
    refused = found["cute-dsl/toy"]
    assert refused.status == "failed" and refused.resources is not None
    assert refused.reason == "spills 24 bytes in the loop of products, and may spill none there"


def test_a_crash_on_the_cpu_is_that_kernels_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\ncat > /dev/null\necho 'the end' >&2\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.setattr(sweep_cpu.sys, "executable", str(script))
    problem = sweep_cpu.small(MlaProblem(b=64, s=8, h=128, t=4096, causal=True))
    assert (problem.b, problem.s, problem.h, problem.causal) == (2, 4, 32, True)
    work = [(KernelId("torch", "mla", "flash_mla", n), problem) for n in (0, 1)]
    results = list(sweep_cpu.run_many(work, timeout_s=20))
    assert [r.status for r in results] == ["failed", "failed"]
    assert results[0].reason == "its process ended with 3: the end"
    script.write_text("#!/bin/sh\nexec sleep 60\n")
    began = time.monotonic()
    (late,) = sweep_cpu.run_many(work[:1], timeout_s=0.5)
    assert late.reason == "took longer than 0.5 s"
    assert time.monotonic() - began < 20


def test_the_oracles_of_all_workloads_run_on_the_cpu() -> None:
    kernels = [k for k in registry.all_kernels() if k.language == "torch"]
    if not kernels or registry.missing("torch"):
        pytest.skip("no torch kernel here")
    problems = {k: registry.get_plan(k).workload.problem() for k in kernels}
    results = list(sweep_cpu.run_many([(k, sweep_cpu.small(problem)) for k, problem in problems.items()]))
    assert [r.kernel for r in results] == kernels and len({p.workload for p in problems.values()}) > 3
    for result in results:
        assert (result.status, result.reason) == ("passed", ""), result.kernel.label
        assert result.error is not None and max(result.error.values()) < 0.01


@pytest.mark.slow
def test_ctrl_c_of_a_real_sweep_without_a_gpu(tmp_path: Path) -> None:
    """The process is interrupted while kernels compile: exit 130, and what was compiled is on the disk."""
    if not any(k.language == "triton" for k in registry.all_kernels()) or registry.missing("triton"):
        pytest.skip("no triton kernel here")
    words = ["experiment=tensor_parallel", "kernels=triton", "device=h100", "jobs=1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "mla_var3.cli", "sweep", *words],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(paths.import_root())}, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # Tests that run in the background of a shell inherit an ignored Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if line.startswith("[1/"):
            os.killpg(process.pid, signal.SIGINT)
            break
    _, rest = process.communicate(timeout=60)
    text = "".join(said) + rest
    assert process.returncode == 130, text
    assert "resume=true" in rest
    assert "Traceback" not in rest
    (path,) = (tmp_path / "out" / "results" / "h100").glob("*.jsonl")
    statuses = [json.loads(line)["status"] for line in path.read_text().splitlines()]
    assert statuses
    assert set(statuses) <= {"compiled", "failed"}
