"""The command line: quick to answer, one line for a mistake, and tables that survive a pipe."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import made_up
from mla_var3 import cli
from mla_var3.catalogue import registry
from mla_var3.cli import arguments
from mla_var3.device import Device
from mla_var3.errors import install
from mla_var3.lab import doctor
from mla_var3.lab.report import tables
from mla_var3.record import Record, RecordStore
from mla_var3.workload.decode import MlaProblem

SOURCE = Path(cli.__file__).resolve().parents[1]
ENV = {**os.environ, "PYTHONPATH": str(SOURCE)}
HEAVY = ("torch", "pydantic", "hydra", "omegaconf", "pandas", "numpy", "cutlass", "triton", "cuda.tile", "rich", "yaml")
HAS_TORCH = bool([k for k in registry.all_kernels() if k.language == "torch"]) and not registry.missing("torch")


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(Device, "detect", staticmethod(lambda index=0: None))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mla_var3.cli", *words]
    return subprocess.run(command, env=ENV, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


# ---------------------------------------------------------------- quick to answer
@pytest.mark.parametrize("words", [[], ["--help"], ["list"], ["sweep", "--help"], ["check", "--help"]])
def test_answers_at_once_without_anything_heavy(words: list[str]) -> None:
    code = (
        "import sys, mla_var3\n"
        "if sys.argv[1:]:\n"
        "    from mla_var3.cli import main\n"
        "    try: main(sys.argv[1:])\n"
        "    except SystemExit: pass\n"
        f"print('heavy:', [m for m in {HEAVY!r} if m in sys.modules])"
    )
    best = 9.0
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", code, *words], env=ENV, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        out = process.stdout.read()
        # Time of the processor, not of the clock: other tests run beside this one.
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        assert out.splitlines()[-1] == "heavy: []"
        best = min(best, used.ru_utime + used.ru_stime)
    assert best < 0.5


def test_list_shows_kernels_experiments_models_and_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list"]) == 0
    out = capsys.readouterr().out
    for kernel in registry.all_kernels():
        assert kernel.label in out
    for word in ("quickstart", "decode", "deepseek-v3", "h200", "sm_90a"):
        assert word in out
    assert "on sm_100a, sm_103a, sm_120a, sm_80, sm_86, sm_89: compiled, never run" in out


def test_a_clone_is_new_until_a_devlog_speaks_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clone = registry.KernelId("cute-dsl", "mla", "flash_mla", 99)
    before = registry.standings()
    assert before["cute-dsl/flash_mla_v24"] == "newest" and before["cute-dsl/flash_mla_v23"] == "kept"
    versions = (*registry.all_kernels(), clone)
    monkeypatch.setattr(registry, "all_kernels", lambda: tuple(sorted(versions)))
    after = registry.standings()
    assert after.pop(clone.label) == "new" and after == before


def test_list_marks_versions_and_folds_what_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    from mla_var3.cli.list import _runs

    assert cli.main(["list"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    marks = {words[0]: words[2] for line in lines if len(words := line.split()) > 3 and "/" in words[0]}
    live = [k for k in registry.all_kernels() if k.language == "cute-dsl" and k.design == "flash_mla"]
    wanted = ["kept"] * (len(live) - 1) + ["newest"]
    here = not registry.missing("cute-dsl")
    assert [marks[k.label] for k in live] == (wanted if here else ["not"] * len(live))
    assert any(line.startswith("(retired: ") and "cute-dsl/flash_mla v1..v22, " in line for line in lines)
    assert sum(line.startswith("(") for line in lines) <= 2, "what is not installed is one line"
    assert _runs(["a/x", "a/x_v9", "a/x_v10", "a/x_v2", "b/y_v3"]) == ["a/x v0 v2 v9..v10", "b/y v3"]


def test_a_missing_language_is_named_with_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(what: Any) -> str:
        return f"{getattr(what, 'language', what)} is not here: pip install it."

    monkeypatch.setattr(registry, "missing", missing)
    assert cli.main(["list", "kernels"]) == 0
    out = capsys.readouterr().out
    assert "not installed" in out
    assert "(triton is not here: pip install it.)" in out
    assert cli.main(["check", "*"]) == 2
    err = capsys.readouterr().err
    assert "none of these kernels can be used here" in err


def test_version_and_bare_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("mla-var3 ")
    assert cli.main([]) == 0
    out = capsys.readouterr().out
    assert all(f"  {verb}" in out for verb in cli.verbs())


@pytest.mark.parametrize("verb", [v for v in cli.verbs() if v != "devlog"])
def test_every_verb_has_help_with_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        assert cli.main([verb, "--help"]) == 0
    out = capsys.readouterr().out
    assert "usage: mla-var3 " + verb in out
    assert "mla-var3 " + verb in out.replace("usage: mla-var3 " + verb, "") or verb == "doctor"


# ---------------------------------------------------------------- mistakes
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["chek"], "there is no verb 'chek': did you mean 'check'?"),
        (["check"], "the following arguments are required: KERNEL"),
        (["check", "a/b", "--bb", "3"], "there is no option --bb: did you mean '--b'?"),
        (["check", "nothing/like_this"], "no kernel matches 'nothing/like_this'"),
        (["list", "kernel"], "what 'kernel' is unknown: did you mean 'kernels'?"),
        (["compile", "*", "--device", "h20000"], "There is no device 'h20000': did you mean 'h200'?"),
        (["sweep", "experiment=deocde"], "experiment 'deocde' is unknown: did you mean 'decode'?"),
        (["clone", "torch/nothing"], "no kernel 'torch/nothing'"),
        (["compare", "nowhere.jsonl"], "there are no records at nowhere.jsonl"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(
    words: list[str], sentence: str, no_gpu: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"mla-var3: {sentence}")
    assert err.count("\n") == 1
    assert "Traceback" not in out + err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--h", "0"], "problem.h = 0 is too small"),
        (["--model", "kimi"], "--model 'kimi' is unknown: did you mean 'kimi-k2'?"),
        (["--page", "x"], "--page 'x' is not a whole number"),
        (["--lengths", "raged"], "is unknown: did you mean 'ragged'?"),
        (["--tiling", "tile_m"], "--tiling 'tile_m' is not NAME=VALUE"),
        (["--cases", "edgy"], "check case 'edgy' is unknown: did you mean 'edges'?"),
        (["--device", "cuda"], "there is no GPU here"),
    ],
)
@pytest.mark.skipif(not HAS_TORCH, reason="no torch kernel here")
def test_a_wrong_value_names_its_option(
    words: list[str], sentence: str, no_gpu: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check", "torch/flash_mla", *words]) == 2
    assert sentence in capsys.readouterr().err


def test_bench_without_a_gpu_says_what_works(no_gpu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "*"]) == 2
    assert "bench needs a GPU" in capsys.readouterr().err


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m mla_var3.cli list; echo status $? >&2"
    script = f"({command}) | true"
    done = subprocess.run(["bash", "-c", script], env=ENV, capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


# ---------------------------------------------------------------- verbs
def test_problem_options() -> None:
    parser = arguments.Parser()
    arguments.add_problem(parser)

    def problem(*words: str, **defaults: Any) -> MlaProblem:
        return arguments.problem_of(parser.parse_args(list(words)), **defaults)

    assert problem() == MlaProblem()
    assert problem("--model", "kimi-k2").h == 64
    assert problem("--model", "kimi-k2", "--h", "8", "--page", "contiguous").page is None
    assert problem("--lengths", "70,0,128").seq_lens == (70, 0, 128)
    assert problem("--lengths", "ragged:3", b=4).lengths == (("name", "ragged"), ("seed", 3))
    assert problem("--b", "3", b=2, t=300) == MlaProblem(b=3, t=300)
    assert arguments.tiling_fields("a=1, b=true,c=x") == {"a": 1, "b": True, "c": "x"}


@pytest.mark.skipif(not HAS_TORCH, reason="no torch kernel here")
def test_check_on_the_cpu(no_gpu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["check", "torch/flash_mla", "--b", "1", "--t", "70", "--h", "4", "--quick", "--cases", "own,edges"]
    assert cli.main([*words, "--seed", "7"]) == 0
    out = capsys.readouterr().out
    assert "torch/flash_mla b1_s1_h4_t70: passed, 2 cases" in out
    assert "seed 7" in out


@pytest.mark.parametrize("words", [["bench"], ["bench", "--calibrate"]])
def test_bench_without_a_kernel_asks_for_a_gpu(
    words: list[str], no_gpu: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    assert "bench needs a GPU and there is none here" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["check", "bench", "clone", "compile"])
def test_a_retired_version_says_where_its_code_is(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([verb, "cute-dsl/flash_mla_v8"]) == 2
    err = capsys.readouterr().err
    assert "cute-dsl/flash_mla_v8 is retired: commit 2ea73c2 has its code" in err
    assert "devlogs/flash_mla/cute-dsl-v8.md" in err and err.count("\n") == 1


@pytest.mark.slow
def test_compile_shows_resources_and_keeps_artefacts(no_gpu: Path) -> None:
    if not any(k.label == "triton/flash_mla" for k in registry.all_kernels()) or registry.missing("triton"):
        pytest.skip("no triton kernel here")
    done = run(
        "compile", "triton/flash_mla", "--h", "16", "--device", "h200", "--keep", "ptx", "--out", "kept", cwd=no_gpu
    )
    assert done.returncode == 0, done.stderr
    assert "triton/flash_mla" in done.stdout
    assert "227 KiB of shared memory" in done.stdout
    assert list((no_gpu / "kept").rglob("*.ptx"))
    wrong = run("compile", "triton/flash_mla", "--device", "h200", "--tiling", "tile_m=48", cwd=no_gpu)
    assert wrong.returncode == 2
    assert wrong.stderr.strip().endswith("tile_m = 48 must be a power of two of at least 16")
    assert len(wrong.stderr.strip().splitlines()) == 1


# ---------------------------------------------------------------- tables
def record(language: str, us: float | None, at: str = "2026-01-02T03:04:05Z", **fields: Any) -> Record:
    label, of = f"{language}/flash_mla", {"at": at, "experiment": "decode"}
    if us is None:
        of |= {"status": "failed", "reason": "the worker was ended by SIGSEGV " + "x" * 200}
    else:
        limit = {"matmul_tflops": 803.0, "read_gbps": 4640.0, "limit_us": 181.9}
        limits = {"burst": limit, "sustained": {**limit, "limit_us": 213.8}, "bound": "compute"}
        fields = {"limits": limits, "error": {"out": 1.7e-3, "lse": 1e-6}, **fields}
    return made_up.record(label, us, MlaProblem(b=128), hot=1.2, **of, **fields)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    store = RecordStore(tmp_path / "h200" / "2026-01-02-decode.jsonl")
    for one in (
        record("triton", 999.0, at="2026-01-01T00:00:00Z"),
        record("triton", 400.0),
        record("cute-dsl", 220.25),
        record("cutile-dsl", None),
    ):
        store.append(one)
    with store.path.open("a") as file:
        file.write("torn {\n")
    return tmp_path


def test_compare_prints_tables_that_a_pipe_does_not_cut(results: Path) -> None:
    done = run("compare", str(results), "--kernels", "cute-dsl/flash_mla", "triton/flash_mla")
    assert done.returncode == 0, done.stderr
    assert "decode.jsonl:5: not JSON" in done.stderr
    lines = done.stdout.splitlines()
    cute = next(line for line in lines if line.split()[:1] == ["cute-dsl/flash_mla"])
    for cell in ("220.2", "83", "264.3", "81", "663", "2.90"):
        assert cell in cute.split()
    assert "The same in every row: version kept, error 1.7e-03, recorded 2026-01-02." in lines
    assert not any(line != line.rstrip() for line in lines)
    assert "…" not in done.stdout
    assert "999.0" not in done.stdout, "only the newest record of a kernel and cell"
    assert "geometric mean" in done.stdout
    assert "1.816" in done.stdout


def test_compare_shows_what_differs_and_marks_versions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = RecordStore(tmp_path / "h200" / "2026-01-02-decode.jsonl")
    live = [k for k in registry.all_kernels() if k.language == "cute-dsl" and k.design == "flash_mla"]
    versions = [("cute-dsl", live[-1].version, 128), ("cute-dsl", 0, 128), ("cute-dsl", 8, 128), ("peer", 0, 128)]
    for number, (language, version, b) in enumerate([*versions, ("cute-dsl", 8, 16)]):
        design = "flash_mla_lib" if language == "peer" else "flash_mla"
        kernel = {"language": language, "layer": "mla", "design": design, "version": version}
        store.append(record(language, 200.0 + number, kernel=kernel, problem=MlaProblem(b=b).to_record()))
    assert cli.main(["compare", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if line.startswith(" b")]
    assert [row[0] for row in rows] == ["b16_s1_h128_t4096", "b128_s1_h128_t4096"], "numbers sort as numbers"
    assert rows[0][1:3] == ["cute-dsl/flash_mla_v8", "(retired)"] and rows[1][1] == live[-1].label
    assert "1.01 times as fast as peer/flash_mla_lib" in out
    assert cli.main(["compare", str(tmp_path), "--cells", "b128_*"]) == 0
    out = capsys.readouterr().out
    found = {words[0]: words[1] for line in out.splitlines() if (words := line.split()) and "/" in words[0]}
    assert found[live[-1].label] == "newest" and found["cute-dsl/flash_mla"] == "kept"
    assert "flash_mla_v8" not in out and "Not shown: 1 records of retired versions" in out
    assert "The same in every row: error 1.7e-03, recorded 2026-01-02." in out
    assert "error" not in out.splitlines()[2], "a column that tells nothing is left out"
    assert cli.main(["compare", str(tmp_path), "--all"]) == 0
    out = capsys.readouterr().out
    assert out.count("cute-dsl/flash_mla_v8 ") == 2 and out.count(" retired ") == 2


def test_compare_refuses_what_is_not_there(
    results: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(results)
    for words, sentence in (
        (["--kernels", "cute/flash_mla"], "no record of kernel 'cute/flash_mla': did you mean 'cute-dsl/flash_mla'?"),
        (["--cells", "b64*"], "no record of cell 'b64*'"),
        (["--device", "h100"], "no record of device 'h100': did you mean 'h200'?"),
        (["--kernels", "cutile-dsl/flash_mla"], "holds a time"),
    ):
        assert cli.main(["compare", "h200", *words]) == 2
        assert sentence in capsys.readouterr().err
    assert cli.main(["compare", "h200", "--all"]) == 0
    assert "999.0" in capsys.readouterr().out


def test_comparison_keeps_a_long_reason_and_marks_what_failed(capsys: pytest.CaptureFixture[str]) -> None:
    tables.show(tables.comparison([record("triton", 400.0), record("cutile-dsl", None)]))
    out = capsys.readouterr().out
    assert "x" * 200 in out
    assert "failed: the worker was ended by SIGSEGV" in out
    assert "compute-bound" in out


def test_roofline_prefers_measured_ceilings_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    problem = MlaProblem(b=128)
    tables.show(tables.roofline([problem], Device.get("h200")))
    out = capsys.readouterr().out
    assert "181.9" in out
    assert "213.8" in out
    assert "803 TFLOP/s (measured 2026-11-21)" in out
    tables.show(tables.roofline([problem], Device.get("a100")))
    assert "312 TFLOP/s (data sheet)" in capsys.readouterr().out
    tables.show(tables.roofline([MlaProblem(b=128, h=16)], Device.get("h200")))
    out = capsys.readouterr().out
    assert "131.1" in out and "memory" in out


def test_resources_stand_against_the_limits(capsys: pytest.CaptureFixture[str]) -> None:
    used = {
        "registers": 168,
        "smem": 229376,
        "spill_bytes": 8,
        "threads": 384,
        "ctas_per_sm": 1,
        "instructions": {"HGMMA": 4},
    }
    rows = [tables.Compiled("a/b", cell, "h200", used, 1.5, ["it spills"]) for cell in ("one", "two")]
    tables.show(tables.resources(rows, Device.get("h200")))
    out = capsys.readouterr().out
    assert "one, two" in out
    assert "168/168" in out
    assert "224.0 (99 %)" in out
    assert "1: it spills" in out


# ---------------------------------------------------------------- doctor
def test_doctor_ends_with_0_unless_the_installation_is_broken(
    no_gpu: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["doctor", "--no-compile"]) == 0
    out = capsys.readouterr().out
    for area in ("python", "package", "driver", "cpu", "profiler", "counters", "configs", "folder"):
        assert f"\n{area} " in "\n" + out
    real = doctor.installed
    monkeypatch.setattr(
        doctor, "installed", lambda name: None if name in ("torch", "triton", "pydantic") else real(name)
    )
    assert cli.main(["doctor", "--no-compile"]) == 1
    out = capsys.readouterr().out
    assert "BROKEN   torch is not installed" in out
    assert "missing  pydantic is not installed (pin <3,>=2.7)\n" + " " * 19 + f" -> {install('lab')}" in out
    assert "missing  triton is not installed (pin >=3.6)\n" + " " * 19 + " -> pip install 'triton>=3.6'" in out


def test_doctor_compares_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor.installed
    wrong = {"nvidia-cuda-tileiras": "13.5.1", "nvidia-cutlass-dsl": "4.7.0"}
    monkeypatch.setattr(doctor, "installed", lambda name: wrong.get(name) or real(name))
    texts = [f.text for f in doctor._packages() if f.state != doctor.OK]
    assert "nvidia-cutlass-dsl 4.7.0 is not what the pin asks for: <=4.8.1,>=4.8.0" in texts
    assert any(text.startswith("cuTile's compilers disagree") for text in texts)


def test_doctor_says_which_engines_find_the_plug_in(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"vllm": "0.33.0", "sglang": "0.6.0"}
    monkeypatch.setattr(doctor, "installed", here.get)
    monkeypatch.setattr(doctor.metadata, "entry_points", lambda group, name: (name,))
    known, unknown = doctor._engines()
    assert known.state == doctor.OK and "vllm 0.33.0 finds the plug-in: --attention-backend MLA_VAR3" in known.text
    assert unknown.state == doctor.NOTE and unknown.text == "sglang 0.6.0 is not known; these are: 0.5.23"
    monkeypatch.setattr(doctor.metadata, "entry_points", lambda group, name: ())
    assert [found.state for found in doctor._engines()] == [doctor.MISSING] * 2
    here.clear()
    assert [found.state for found in doctor._engines()] == [doctor.NOTE] * 2


def test_doctor_knows_who_may_read_counters(tmp_path: Path) -> None:
    params, status = tmp_path / "params", tmp_path / "status"
    assert doctor.counters(params, status).state == doctor.NOTE
    params.write_text("RmProfilingAdminOnly: 0\n")
    assert doctor.counters(params, status).state == doctor.OK
    params.write_text("RmProfilingAdminOnly: 1\n")
    status.write_text("CapEff:\t00000000a80425fb\n")
    found = doctor.counters(params, status)
    assert found.state == doctor.MISSING
    assert "--cap-add=SYS_ADMIN" in found.todo
    status.write_text("CapEff:\t000001ffffffffff\n")
    assert doctor.counters(params, status).state == doctor.OK


def test_doctor_reports_a_compiler_that_ends_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.exit('libnvvm is missing')"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    found = doctor._probed("cute-dsl", process, Device.get("h200"))
    assert found.state == doctor.MISSING
    assert "cute-dsl cannot compile for sm_90a: libnvvm is missing" in found.text
    assert install("cute") in found.todo


def test_compare_begins_with_the_newest_device_and_fits_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    from mla_var3 import paths
    from mla_var3.cli.compare import SCREEN, WIDTH
    from mla_var3.record import load

    newest = max((r for r in load([paths.shipped_results_dir()]).records if r.time_us), key=lambda r: r.at)
    assert cli.main(["compare"]) == 0
    out = capsys.readouterr().out
    assert f"Fastest recorded on {newest.device}" in out and out.count("Fastest recorded on") == 1
    assert len([line for line in out.splitlines() if " % " in line]) <= SCREEN and len(out.splitlines()) < 40
    assert max(map(len, out.splitlines())) <= WIDTH
    assert "Other devices have records too: mla-var3 compare --device h" in out


def test_a_share_of_more_than_a_limit_is_explained() -> None:
    from mla_var3 import paths
    from mla_var3.lab.sweep import telling
    from mla_var3.record import load
    from mla_var3.workload import problem_from_record

    live = {kernel.label for kernel in registry.all_kernels() if kernel.language != "peer"}
    records = load([paths.shipped_results_dir() / "h200"]).records
    shares = [(r, r.of_limit("burst") or 0.0) for r in records if r.time_us and r.kernel.label in live]
    above, below = (next(r for r, share in shares if low < share < high) for low, high in ((1.0, 2.0), (0.5, 0.9)))
    for record, explained in ((above, True), (below, False)):
        table, _ = telling.answer([problem_from_record(record.problem)], [record], None, "x")
        assert table is not None and (telling.OVER_LIMIT in str(table.caption)) == explained
