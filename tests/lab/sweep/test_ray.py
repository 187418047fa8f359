"""Sweeps on a Ray cluster of several nodes on this machine, with GPUs that are logical resources."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mla_var3 import cli, paths
from mla_var3.device import Device
from mla_var3.errors import UserError
from mla_var3.lab.sweep import config as sweep_config
from mla_var3.lab.sweep.launch import Launcher, Local
from mla_var3.lab.sweep.run import Sweep
from mla_var3.record import Record, load
from mla_var3.toolchain import aot

ray_utils = pytest.importorskip("ray.cluster_utils", reason="ray is not installed")
pytest.importorskip("torch", reason="torch is not installed")

from mla_var3.lab.sweep import ray_  # noqa: E402

HERE = str(Path(__file__).parent)
FAKES = os.pathsep.join([HERE, str(Path(__file__).parents[2] / "measure")])
STORE = 80_000_000
KERNEL = "kernels=torch/flash_mla"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A head without GPUs and a node with two H100; its nodes find this folder's fakes, and note what they do."""
    folder = tmp_path_factory.mktemp("ray")
    path = os.pathsep.join([FAKES, str(paths.import_root()), *filter(None, [os.environ.get("PYTHONPATH")])])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        patch.syspath_prepend(HERE)
        patch.setenv("RAY_AUTH_MODE", "disabled")  # whatever this machine's other clusters do
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setenv("SWEEP_LOG", str(folder / "log.jsonl"))
        head = {"num_cpus": 2, "object_store_memory": STORE, "include_dashboard": False}
        found = ray_utils.Cluster(initialize_head=True, head_node_args=head)
        try:
            add(found, "h100", 2)
            patch.setenv("RAY_ADDRESS", found.address)
            yield found
        finally:
            found.shutdown()


def add(cluster: Any, key: str, gpus: int) -> Any:
    return cluster.add_node(
        num_cpus=1, num_gpus=gpus, resources={f"mla_var3_{key}": gpus}, object_store_memory=STORE
    )  # fmt: skip


@pytest.fixture
def log(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs in an empty folder; the file where the actors note what they took."""
    monkeypatch.chdir(tmp_path)
    path = Path(os.environ["SWEEP_LOG"])
    path.write_text("")
    return path


def notes(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def cells(*sizes: int, **fields: int) -> str:
    more = "".join(f", {name}: {value}" for name, value in fields.items())
    return "experiment.cells=[" + ",".join(f"{{b: {b}, t: 64{more}}}" for b in sizes) + "]"


def sweep(launcher: Launcher, *words: str, planned: Callable[[], None] = lambda: None) -> list[Record]:
    """Runs a sweep with a launcher and returns the records of all files. planned: called before it runs."""
    config = sweep_config.compose(["experiment=ladder", "experiment.name=test", KERNEL, "launcher=ray", *words])
    try:
        job = Sweep(config, launcher)
        planned()
        job.run()
    finally:
        launcher.close()
    return load(Path("results")).records if Path("results").is_dir() else []


def pretend() -> ray_.Ray:
    from sweep_fakes import PretendHand

    return ray_.Ray(PretendHand)


def outcomes(records: list[Record]) -> set[tuple[Any, ...]]:
    return {(r.kernel.label, r.problem_label, json.dumps(r.tiling), r.device, r.status, r.key) for r in records}


def test_a_sweep_comes_to_what_it_does_here(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through real workers: one cell passes, one is wrong, one is too large, as on this machine."""
    words = [
        "experiment.cells=[{b: 1, t: 64, h: 16},{b: 2, t: 64, h: 16},{b: 8192, t: 131072, h: 16}]",
        "bench=fast", "bench.backend=bench_torch_fakes:TwoRequestsAreWrong", "bench.burst_rounds=1",
        "bench.graph_ms=0.1", "bench.sustained_s=0.01", "bench.settle_s=0.0", "bench.overlap_probe=false",
        "bench.cold_mb=0.1",
    ]  # fmt: skip
    there = sweep(ray_.Ray(), *words)
    monkeypatch.setenv("PYTHONPATH", FAKES)
    sweep(Local(Device.get("h100")), *words, "results_dir=here")
    here = load(Path("here")).records
    assert outcomes(there) == outcomes(here) and len(there) == len(here) == 3
    assert {r.status for r in there} == {"passed", "incorrect", "skipped"}
    passed = next(r for r in there if r.status == "passed")
    assert passed.median("burst") is not None and passed.environment["node"]


def test_two_gpus_get_disjoint_cells_and_a_deadly_cell_fails_after_three_workers(log: Path) -> None:
    from sweep_fakes import DEADLY

    deadly = f"{{b: 7, t: 64, h: {DEADLY}}}"
    records = sweep(pretend(), cells(1, 2, 3, 4, 5, 6).replace("]", f",{deadly}]"))
    assert len(records) == 7
    (failed,) = [r for r in records if r.status == "failed"]
    assert failed.problem["h"] == DEADLY and failed.reason.startswith("it ended 3 workers, the last with ActorDied")
    taken = [note for note in notes(log) if note["cell"] != failed.problem_label]
    assert len(taken) == len({note["cell"] for note in taken}) == 6, "no cell twice"
    by_gpu = {gpu: {n["cell"] for n in taken if n["gpu"] == [gpu]} for gpu in ("0", "1")}
    assert all(by_gpu.values()) and not by_gpu["0"] & by_gpu["1"]
    assert len(notes(log)) == 6 + 3
    again = sweep(pretend(), cells(1, 2, 3, 4, 5, 6), "resume=true")
    assert len(again) == 7 and len(notes(log)) == 9, "nothing finished is measured again"


def test_cells_go_to_the_devices_that_are_named(
    cluster: Any, log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The node with the H200 is killed while it measures, and another one comes; nobody has a B200."""
    from sweep_fakes import SLOW

    nodes = [add(cluster, "h200", 1)]
    launcher = pretend()
    look = launcher._look

    def remove_while_it_measures() -> None:
        if len(nodes) == 1 and any(n["device"] == "h200" and f"_h{SLOW}_" in n["cell"] for n in notes(log)):
            cluster.remove_node(nodes[0], allow_graceful=False)
            nodes.append(add(cluster, "h200", 1))
        look()

    monkeypatch.setattr(launcher, "_look", remove_while_it_measures)
    try:
        slow = f"{{b: 4, t: 64, h: {SLOW}}}"
        records = sweep(launcher, cells(1, 2).replace("]", f",{slow}]"), "device=[h100,h200,b200]")
    finally:
        cluster.remove_node(nodes[-1])
    by_device = {key: [r for r in records if r.device == key] for key in ("h100", "h200", "b200")}
    assert [r.status for r in by_device["h100"]] == [r.status for r in by_device["h200"]] == ["infeasible"] * 3
    assert [r.status for r in by_device["b200"]] == ["skipped"] * 3
    assert "the cluster has no NVIDIA B200" in by_device["b200"][0].reason
    taken = [n for n in notes(log) if n["device"] == "h200"]
    assert len(taken) == 4 and len({n["cell"] for n in taken}) == 3, "the cell of the lost node is taken up whole"
    assert len({n["node"] for n in taken}) == 2
    assert "was lost on node" in capsys.readouterr().err


def test_a_killed_driver_goes_on_where_its_records_end(log: Path, tmp_path: Path) -> None:
    script = (
        "import sys\nfrom sweep_fakes import PretendHand\nfrom mla_var3.lab.sweep import config\n"
        "from mla_var3.lab.sweep.ray_ import Ray\nfrom mla_var3.lab.sweep.run import Sweep\n"
        "Sweep(config.compose(sys.argv[1:]), Ray(PretendHand)).run()\n"
    )  # fmt: skip
    words = ["experiment=ladder", "experiment.name=test", KERNEL, "launcher=ray", "device=h100", cells(*range(1, 13))]
    driver = subprocess.Popen([sys.executable, "-c", script, *words], stderr=subprocess.PIPE, text=True)
    assert driver.stderr is not None
    for line in driver.stderr:
        if line.startswith("[3/"):
            break
    driver.send_signal(signal.SIGKILL)
    driver.communicate(timeout=30)
    held = load(Path("results")).records
    assert 3 <= len(held) < 12
    before = len(notes(log))
    records = sweep(pretend(), cells(*range(1, 13)), "device=h100", "resume=true")
    assert len(records) == len({r.key for r in records}) == 12
    assert [r.id for r in records[: len(held)]] == [r.id for r in held]
    assert len(notes(log)) - before == 12 - len(held)


def test_cells_are_skipped_once_their_gpus_are_gone(cluster: Any, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_, "PATIENCE_S", 1.0)
    node = add(cluster, "b200", 1)
    records = sweep(pretend(), cells(1, 2), "device=b200", planned=lambda: cluster.remove_node(node))
    assert [(r.status, r.reason) for r in records] == [("skipped", "the cluster has no NVIDIA B200 SXM6 left")] * 2


def test_compiling_comes_to_what_it_does_here(log: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    words = ["kernels=triton/rmsnorm", "experiment.workload=norm", "experiment.cells=[{}]", "experiment.mode=compile"]
    sweep(ray_.Ray(), *words, "device=h100", "compile_dir=there")
    sweep(Local(None), *words, "device=h100", "compile_dir=here")
    (there,), (here,) = load(Path("there")).records, load(Path("here")).records
    assert outcomes([there]) == outcomes([here]) and there.status == "compiled"
    assert there.code and here.code and there.code["digest"] == here.code["digest"]


def test_compiled_code_travels_under_its_digest(log: Path) -> None:
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    words = ["kernels=cute-dsl/rmsnorm", "experiment.workload=norm", "experiment.cells=[{rows: 1},{rows: 2}]"]
    assert len(sweep(pretend(), *words)) == 2
    first, second = (note["code"] for note in notes(log))
    assert first and first == second, "one compilation for both"
    folder = log.with_name("another_cache") / "mla_var3" / "cute"
    assert sorted(path.name for path in folder.iterdir()) == first
    entries = [aot.read_entry(path) for path in folder.glob("*.json")]
    for entry in entries:
        assert entry is not None and aot.load_entry(folder, entry).arch == "sm_90a"


def test_a_budget_begins_no_further_cell_and_ends_what_runs(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = sweep(pretend(), cells(*range(1, 9)), "device=h100", "budget_s=0.01")
    assert {r.problem_label for r in records} == {n["cell"] for n in notes(log)} and 1 <= len(records) < 8
    assert f"are over: {8 - len(records)} points are left" in capsys.readouterr().err


def test_the_doctor_tells_what_the_cluster_offers(log: Path) -> None:
    said = ray_.offer()
    assert "2 announced as h100" in said and "GPUs" in said


def test_an_address_that_nobody_answers_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    with pytest.raises(UserError, match=r"no Ray cluster answers at RAY_ADDRESS=127.0.0.1:9 .*: start one there"):
        ray_.connect(start=True)
    assert cli.main(["sweep", "experiment=ladder", "launcher=ray"]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.gpu
def test_a_cell_is_measured_on_the_gpu_that_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a cluster that the sweep starts by itself, whose GPU says what it is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", "local")
    words = ["experiment=ladder", "bench=fast", "launcher=ray"]
    assert cli.main(["sweep", *words, "kernels=cute-dsl/flash_mla,triton/flash_mla"]) == 0
    records = load(Path("results")).records
    detected = Device.detect()
    assert detected is not None and {r.device for r in records} == {detected.key}
    passed = [r for r in records if r.status == "passed"]
    assert passed and not any(r.status == "failed" for r in records)
    for record in passed:
        assert record.time_us is not None and record.limits is not None and record.of_limit("burst")
        assert record.environment["gpu"] and record.environment["chip"] and record.environment["node"]
