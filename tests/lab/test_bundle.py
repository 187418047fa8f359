"""A bundle is made without a GPU and used without a compiler."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mla_var3.catalogue.registry import KernelId, all_kernels, get_plan
from mla_var3.device import Device
from mla_var3.errors import UserError, install
from mla_var3.lab import bundle
from mla_var3.toolchain import aot, loader
from mla_var3.toolchain.bundle import Bundle, close_bundle, open_bundle
from mla_var3.workload import get, problem_from_record
from mla_var3.workload.decode import MlaProblem
from mla_var3.workload.topk import TopkProblem

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

PLANS = Path(__file__).parents[1] / "toolchain" / "plans"
SRC = Path(aot.__file__).parents[2]
TINY = "tiny_scale:TinyPlan"
ONE, TWO = MlaProblem(b=1, h=16, t=64), MlaProblem(b=2, h=16, t=64)

#: A process in which cutlass cannot be imported, and whose package metadata says that it is not installed.
WITHOUT_COMPILER = f"""
import sys
sys.path[:0] = [{str(SRC)!r}, {str(PLANS)!r}]
sys.path = [p for p in sys.path if "dsl_packages" not in p]
from pathlib import Path
from mla_var3.device import Device
from mla_var3.errors import UserError
from mla_var3.workload.decode import MlaProblem
from mla_var3.lab import bundle
from mla_var3.toolchain import aot, loader, without_compiler
from mla_var3.toolchain.bundle import open_bundle
installed = {{k: v for k, v in aot._installed().items() if k not in aot.PACKAGES}}
aot._installed = lambda: installed
assert not loader.compiler_here()
"""


@pytest.fixture(autouse=True)
def _clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv(aot.BUNDLES, "")  # put back afterwards, also when a test opened one
    monkeypatch.syspath_prepend(str(PLANS))
    aot._warned.clear()
    yield
    aot._warned.clear()


@pytest.fixture(scope="session")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of both stages in two tilings, made by a worker process."""
    folder = tmp_path_factory.mktemp("bundle") / "tiny"
    sys.path.insert(0, str(PLANS))
    try:
        made = bundle.make_bundle(folder, [TINY, "triton/flash_mla"], [ONE, TWO], "tuning", "h200", 1, progress=False)
    finally:
        sys.path.remove(str(PLANS))
    assert made.refused == (("triton/flash_mla", "bundles hold kernels of cute-dsl; this one is triton"),)
    assert made.failed == 0
    return folder


@pytest.fixture
def folder(shipped: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(shipped, tmp_path / "copy"))


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_COMPILER + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_manifest_says_what_is_in_it(shipped: Path) -> None:
    manifest = json.loads((shipped / "manifest.json").read_text())
    entries = manifest["entries"]
    assert manifest["device"] == "h200"
    assert sorted((e["name"], e["tiling"]["threads"]) for e in entries) == [
        ("tiny_scale", 64),
        ("tiny_scale", 128),
        ("tiny_shift", 64),
        ("tiny_shift", 128),
    ]
    entry = next(e for e in entries if e["name"] == "tiny_scale" and e["tiling"]["threads"] == 64)
    assert (entry["kernel"], entry["arch"]) == (TINY, "sm_90a")
    assert entry["problem"] == ONE.problem_class().key() and entry["problem_class"]["h"] == 16
    assert entry["problems"] == sorted([ONE.label, TWO.label])
    assert entry["toolchain"]["nvidia-cutlass-dsl"] == "4.8.1"
    assert entry["compiled"]["resources"]["threads"] == 64 and entry["compiled"]["resources"]["registers"] > 0


def test_it_holds_our_objects_and_nothing_else(shipped: Path) -> None:
    files = sorted(p.relative_to(shipped) for p in shipped.rglob("*") if p.is_file())
    objects = [p for p in files if p.parent.name == "objects"]
    assert [p for p in files if p not in objects] == [Path("manifest.json")]
    assert len(objects) == 8 and {p.suffix for p in objects} == {".so", ".json"}
    assert all(p.name.startswith(("tiny_scale-sm_90a-", "tiny_shift-sm_90a-")) for p in objects)
    assert sum((shipped / p).stat().st_size for p in objects) < 1_000_000


def test_an_opened_bundle_is_loaded_and_not_compiled(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tiny_scale

    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("compiled")

    monkeypatch.setattr(tiny_scale, "_compile", never)
    plan = tiny_scale.TinyPlan(TWO, None, Device.get("h200"))
    with pytest.raises(AssertionError, match="compiled"):
        aot.compiled_host(plan, "tiny_scale", never)
    opened = open_bundle(shipped)
    assert len(opened.entries) == 4 and aot.usable("cute-dsl") and not aot.usable("triton")
    found = aot.compiled_host(plan, "tiny_scale", never)
    assert found.handle is not None and found.resources.threads == 128
    # A compiler of another point release, which an engine brings, does not compile what the bundle holds.
    here = {**aot._installed(), "nvidia-cutlass-dsl": "4.8.0"}
    monkeypatch.setattr(aot, "_installed", lambda: here)
    plan.compiled = aot.CompileCache()
    assert aot.compiled_host(plan, "tiny_scale", never).handle is not None
    here["recipe"] = "another way of calling it"
    plan.compiled = aot.CompileCache()
    with pytest.raises(AssertionError, match="compiled"):
        aot.compiled_host(plan, "tiny_scale", never)
    monkeypatch.undo()
    close_bundle(shipped)
    assert aot.bundle_dirs() == [] and not aot.usable("cute-dsl")


def test_a_machine_without_the_compiler_plans_and_loads(shipped: Path) -> None:
    said = run(f"""
        open_bundle(Path({str(shipped)!r}))
        import json, time
        module = without_compiler.import_version("tiny_scale")
        import tvm_ffi, torch
        loader.load_runtime()
        device = Device.get("h200")
        kernels, times = [], []
        for threads in (64, 128):
            plan = bundle.plan_of({TINY!r})(MlaProblem(b=2, h=16, t=64), module.TinyTiling(threads), device)
            start = time.perf_counter()
            kernels.append(plan.plan(torch.zeros(8)))
            times.append((time.perf_counter() - start) * 1e3)
        assert "cutlass" not in sys.modules
        launch = kernels[0].stages[1].launch_fn
        print(json.dumps({{"times": times, "stages": [s.name for s in kernels[0].stages],
                          "handle": type(launch.args[0]).__name__, "tiling": kernels[0].tiling.threads}}))
        for threads, name in ((32, "tiny_scale"), (64, "tiny_other")):
            plan = module.TinyPlan(MlaProblem(b=2, h=16, t=64), module.TinyTiling(threads), device)
            try:
                aot.compiled_host(plan, name, module._compile)
            except UserError as error:
                print(error)
    """).splitlines()
    found = json.loads(said[0])
    assert found["stages"] == ["tiny_scale", "tiny_shift"] and found["handle"] == "Function"
    assert max(found["times"]) < 100, found  # two host functions each; cores are shared
    assert "the nearest has tiling {'threads': 64}" in said[1] or "the nearest has tiling {'threads': 128}" in said[1]
    assert "it holds no tiny_other" in said[2] and install("cute") in said[2]


def test_a_function_picks_versions_of_cute_once_a_bundle_is_used(shipped: Path) -> None:
    said = run(f"""
        from mla_var3.ops import use_bundle, ways
        problem = MlaProblem(b=2, h=16, t=64)
        for _ in range(2):
            print(ways.way_for(problem, Device.get("h200")).key[0].language)
            use_bundle({str(shipped)!r})
    """).splitlines()
    assert said[0] != "cute-dsl" and said[1] == "cute-dsl"


def test_another_source_or_compiler_is_not_taken(shipped: Path) -> None:
    said = run(
        f"""
        device, problem = Device.get("h200"), MlaProblem(b=1, h=16, t=64)
        def ask(source):
            try:
                aot.load_or_compile(source, problem.problem_class(), {{"threads": 64}}, device, "tiny_scale", None)
            except UserError as error:
                print(error)
        source = aot.entries_of(Path({str(shipped)!r}))[0]["source"]
        ask("0" * 16)
        installed["nvidia-cutlass-dsl-libs-cu13"] = "4.7.0"
        ask(source)
        installed["nvidia-cutlass-dsl-libs-cu13"] = "4.8.0"
        ask(source)
        """,
        **{aot.BUNDLES: str(shipped)},
    ).splitlines()
    assert "the nearest has source " in said[0]
    assert "the nearest has nvidia-cutlass-dsl-libs-cu13 4.8.1 (here 4.7.0)" in said[1]
    assert len(said) == 2, "another point release, as an engine pins it, is taken"


def test_damage_is_named(folder: Path, tmp_path: Path) -> None:
    victim = sorted((folder / "objects").glob("*.so"))[0]
    data = victim.read_bytes()
    victim.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(UserError, match=rf"{victim.name} is damaged"):
        open_bundle(folder)
    victim.unlink()
    with pytest.raises(UserError, match="cannot be read"):
        open_bundle(folder)
    (folder / "manifest.json").write_text('{"schema": 1')
    with pytest.raises(UserError, match=r"manifest.json is damaged"):
        open_bundle(folder)
    with pytest.raises(UserError, match="is no bundle"):
        open_bundle(tmp_path / "nowhere")


def test_another_tvm_ffi_or_machine_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "tvm_ffi_abi", lambda: "9.9")
    with pytest.raises(UserError, match=r"needs apache-tvm-ffi 0\.\d+ and here is 9\.9"):
        open_bundle(folder)
    monkeypatch.undo()
    monkeypatch.setattr(bundle.platform, "machine", lambda: "aarch64")
    with pytest.raises(UserError, match="was made for x86_64, and this machine is aarch64"):
        open_bundle(folder)


def test_making_it_again_compiles_only_what_is_new(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tiny_scale

    compiled: list[Any] = []
    real = tiny_scale._compile

    def counting(shift: bool, tiling: Any, *args: Any, **kwargs: Any) -> Any:
        compiled.append((shift, tiling.threads))
        return real(shift, tiling, *args, **kwargs)

    monkeypatch.setattr(tiny_scale, "_compile", counting)
    fields = [{"threads": 64}, {"threads": 96}, {"threads": 2048}]
    made = bundle.make_bundle(folder, [TINY], [ONE], fields, workers=0)
    assert compiled == [(False, 96), (True, 96)]  # the shift for the cases of the check with several requests
    assert len(made.entries) == 6
    assert [e["problems"] for e in made.entries if e["tiling"]["threads"] == 96] == [[ONE.label], []]
    assert [reason for _, reason in made.refused] == ["2048 threads are over 1024"]


def test_it_holds_what_the_check_of_a_problem_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """b32 s4 is not split, but the check also plans fewer requests of its class, which are."""
    names: set[str] = set()
    monkeypatch.setattr(aot, "compiled_host", lambda plan, name, *rest, **options: names.add(name))
    monkeypatch.setattr(bundle, "_make", lambda folder, jobs, *rest: [bundle.run_bundle_job(job) for job in jobs])
    problem = MlaProblem(b=32, s=4, h=128, t=4096)
    plan = get_plan(KernelId.parse("cute-dsl/flash_mla"))(problem, None, Device.get("h200"))
    assert plan.num_splits(problem.b, problem.max_pages) == 1
    bundle.make_bundle(tmp_path / "b", ["cute-dsl/flash_mla"], [problem], workers=1, progress=False)
    assert names == {"flash_mla", "combine"}


def test_a_case_that_the_check_leaves_out_is_not_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of a top-k has rows of a million logits, which a version of short rows does not take."""
    names: set[str] = set()
    monkeypatch.setattr(aot, "compiled_host", lambda plan, name, *rest, **options: names.add(name))
    monkeypatch.setattr(bundle, "_make", lambda folder, jobs, *rest: [bundle.run_bundle_job(job) for job in jobs])
    bundle.make_bundle(tmp_path / "b", ["cute-dsl/topk_v5"], [TopkProblem(b=1, t=8192)], workers=1, progress=False)
    assert "topk_v5_8_1024_early" in names and all(name.startswith("topk_v5") for name in names)


def test_of_an_experiment_of_several_workloads_each_version_has_its_own_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(bundle, "_tilings", lambda name, problem, *of: asked.append((name, problem.workload)) or [])
    monkeypatch.setattr(bundle, "_make", lambda *of: None)
    versions = ["cute-dsl/merge_partials", "cute-dsl/rmsnorm"]
    problems = [get(name).problem() for name in ("norm", "merge", "decode")]
    bundle.make_bundle(tmp_path, versions, problems)
    assert asked == [("cute-dsl/merge_partials", "merge"), ("cute-dsl/rmsnorm", "norm")]
    asked.clear()
    bundle.make_bundle(tmp_path, versions, problems[:1])  # of one workload, the others say why they are refused
    assert asked == [(version, "norm") for version in versions]


def test_what_an_older_source_left_is_removed(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    for entry in manifest["entries"]:
        if entry["tiling"]["threads"] == 64:
            entry["source"] = "0" * 16
    (folder / "manifest.json").write_text(json.dumps(manifest))
    made = bundle.make_bundle(folder, [TINY], [ONE], "default", workers=0)
    assert sorted(e["name"] for e in made.entries) == ["tiny_scale", "tiny_shift"]
    assert len(list((folder / "objects").iterdir())) == 4


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nothing to bundle \(triton/flash_mla: bundles hold kernels of cute-dsl"):
        bundle.make_bundle(tmp_path / "b", ["triton/flash_mla"], [ONE])
    with pytest.raises(UserError, match="tilings is 'all'"):
        bundle.make_bundle(tmp_path / "b", [TINY], [ONE], "all")
    with pytest.raises(UserError, match="has no plan Other"):
        bundle.make_bundle(tmp_path / "b", ["tiny_scale:Other"], [ONE])
    with pytest.raises(UserError, match="the problem is fp16"):
        bundle.make_bundle(tmp_path / "b", [TINY], [ONE.replace(dtype="fp16")])


def test_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser()
    bundle.add_arguments(parser)
    args = parser.parse_args(["--bundle", str(folder), "--tilings", "default"])
    args.jobs = 0
    monkeypatch.setattr(bundle, "compile_many", lambda jobs, *rest, run, **options: [_Done(run(job)) for job in jobs])
    assert bundle.bundle_main(args, [TINY], [ONE], Device.get("h200")) == 0  # type: ignore[list-item]
    assert f"{folder}: 4 host functions of {TINY}" in capsys.readouterr().out


def test_a_manifest_holds_the_classes_of_every_version() -> None:
    """The class of one workload has another one in it, which is no word of JSON."""
    for kernel in all_kernels():
        if kernel.language == bundle.LANGUAGE:
            plan = get_plan(kernel)
            problem = plan.workload.problem()
            assert json.loads(json.dumps(bundle._class_record(plan(problem, None, Device.get("h200"))))), kernel.label


def test_a_servers_bundle_has_the_versions_of_its_calls(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mla_var3.cli import main

    made: list[bundle.BundleJob] = []

    def made_of(folder: Path, jobs: Any, refused: Any, *rest: Any) -> Any:
        made[:] = jobs
        return Bundle(folder, {"entries": []}, tuple(refused))

    monkeypatch.setattr(bundle, "_make", made_of)
    words = ["compile", "--bundle", "somewhere", "--model", "deepseek-v3.2", "--tp", "8", "--device", "h200"]
    assert main([*words, "--page", "32"]) == 0 and not capsys.readouterr().err
    classes = {problem_from_record(job.points[0][0]).problem_class().key() for job in made}
    assert {f"s{s}_h16_kv1_k512_p64_d128_causal_pg32_bf16" for s in range(2, 9)} < classes
    assert {"s1_h16_kv1_k512_p64_d128_causal_pg32_bf16_packed", "sparse_v32_s1_h16_pg32_x0"} < classes
    assert {"prefill_h16_kv16_p64_d128_causal_bf16", "append_v32_powers_h16_c192_interleaved_32_int64"} < classes
    assert {"indexer_s1_h64_fp32", "topk2048_s4_fp32", "topk2048_rows_fp32"} < classes
    assert "index_append_powers_halves_int64" in classes, "the indexer's heads are not divided"
    of_indexer = [job for job in made if job.kernel == "cute-dsl/mqa_logits_v4"]
    assert {knobs["beyond"] for job in of_indexer for _, knobs in job.points} == {0, 2048}
    assert not any(job.checked for job in made), "of a server, nobody checks"
    for name in ("deepseek-v2-lite", "deepseek-v4-flash", "minicpm3", "kimi-linear", "longcat-flash"):
        assert main([*words, "--model", name, "--tp", "1"]) == 0 and made
    assert main([*words, "--tp", "3"]) == 2
    assert "--tp 3 does not divide the 128 heads of deepseek-v3.2: give a divisor." in capsys.readouterr().err
    assert main(["compile", "torch/flash_mla", "--tp", "8"]) == 2
    assert "of a KERNEL give its share of the heads, --h N." in capsys.readouterr().err
    assert main(["compile", "--device", "h200"]) == 2 and "no KERNEL is named" in capsys.readouterr().err


class _Done:
    ok = True

    def __init__(self, compiled: Any) -> None:
        self.compiled = compiled


@pytest.mark.gpu
def test_a_bundle_runs_on_a_gpu_without_the_compiler(tmp_path: Path) -> None:
    device = Device.detect()
    assert device is not None
    made = tmp_path / "bundle"
    bundle.make_bundle(made, [TINY], [TWO], "default", device, workers=0)
    said = run(f"""
        import torch
        open_bundle(Path({str(made)!r}))
        plan = bundle.plan_of({TINY!r})(MlaProblem(b=2, h=16, t=64), None, Device.detect())
        x = torch.randn(1000, device="cuda")
        kernel = plan.plan(x)
        (y,) = kernel()
        torch.cuda.synchronize()
        print(torch.equal(y, x * 3 + 1), "cutlass" in sys.modules)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kernel()
        x.fill_(2.0)
        graph.replay()
        torch.cuda.synchronize()
        print(bool((y == 7).all()))
    """)
    assert said.split() == ["True", "False", "True"]


def test_a_stage_of_another_version_is_kept_as_that_versions_own(tmp_path: Path) -> None:
    """A pipeline that borrows a kernel and calls a library: what is bundled serves the kernel's own version too."""
    from mla_var3.workload.norm import NormProblem

    problem = NormProblem(rows=3, width=512)
    made = bundle.make_bundle(tmp_path / "b", ["borrowing:BorrowingPlan"], [problem], workers=0, progress=False)
    entries = json.loads((tmp_path / "b" / "manifest.json").read_text())["entries"]
    assert made.failed == 0
    assert {(entry["kernel"], entry["name"]) for entry in entries} == {("cute-dsl/rmsnorm", "rmsnorm")}
    assert any(entry["problems"] == [problem.label] for entry in entries)
    said = run(
        f"""
        from mla_var3.catalogue.registry import KernelId, all_kernels, get_plan
        from mla_var3.workload.norm import NormProblem
        open_bundle(Path({str(tmp_path / "b")!r}))
        device = Device.get("h200")
        plan = get_plan(KernelId.parse("cute-dsl/rmsnorm"))(NormProblem(rows=3, width=512), None, device)
        print(plan.plan_empty().compile(None, device).resources.registers > 0)
        """
    )
    assert said.split() == ["True"]
