"""Profiles from request to report.md: folders, refusals, profilers that fail, the command lines, the sweep."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import profiling_fakes as fakes
import pytest

import made_up
from mla_var3 import cli
from mla_var3.catalogue import registry
from mla_var3.catalogue.registry import KernelId
from mla_var3.device import Device
from mla_var3.errors import UserError, Verdict
from mla_var3.lab.profiling import MODES, folder, points, run, target
from mla_var3.lab.profiling.modes import event, ncu, spans, timeline, tools
from mla_var3.lab.profiling.modes.event import Timing
from mla_var3.lab.profiling.request import Request, baseline_of, version_before
from mla_var3.lab.sweep import config as sweep_config
from mla_var3.measure import environment
from mla_var3.record import KernelRef, Record
from mla_var3.workload.decode import MlaProblem

H200 = Device.get("h200")
TORCH, TRITON = KernelId("torch", "mla", "flash_mla"), KernelId("triton", "mla", "flash_mla")
PROBLEM = MlaProblem(b=128)

pytestmark = pytest.mark.skipif(bool(registry.missing("torch")), reason="torch is not installed")
needs_triton = pytest.mark.skipif(bool(registry.missing("triton")), reason="triton is not installed")


def request(mode: str = "annotation", kernel: KernelId = TORCH, **fields: Any) -> Request:
    return Request(kernel, PROBLEM, mode, **{"out": "profiles", **fields})


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bin_dir: Path) -> Path:
    """An H200 as far as profiling is concerned: what would run in this process takes 200 us."""

    def in_process(request: Request, plan: Any, below: Path, facts: Any) -> None:
        facts.timing = Timing(200.0, 199.0, 201.0, 20, 8.0, 1980.0)
        if request.mode == "timeline":
            facts.spans = [spans.Span("flash_mla", 0, 200, "7"), spans.Span("combine", 205, 4, "7")]

    monkeypatch.setattr(run, "_in_process", in_process)
    real = run._compile
    monkeypatch.setattr(run, "_compile", lambda kernel, *rest: real(kernel, *rest) if kernel == TORCH else None)
    monkeypatch.setattr(environment, "describe", lambda gpu=False: {"gpu": "fake" if gpu else None})
    monkeypatch.chdir(tmp_path)
    return bin_dir


def made(root: Path) -> dict[str, Any]:
    """The one params.json below a folder, and where it lies."""
    (path,) = root.rglob("params.json")
    return {"folder": path.parent, **json.loads(path.read_text())}


def test_single_calls_are_timed_by_the_timer_of_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []

    class Timer:
        def synchronize(self) -> None:
            launched.append(-1)

        def singles(self, call: Any, count: int, flush_bytes: int) -> Any:
            assert flush_bytes >= 100 << 20, "more than any L2 holds"
            for _ in range(count):
                call()
            return [10.0 + i for i in range(count)], [3.0] * count, {"sm_mhz": 1755.0}

    monkeypatch.setattr(event, "CudaBackend", Timer)
    timing = event.time_call(SimpleNamespace(launch=lambda: launched.append(1)), 11)
    assert launched == [1] * event.WARM + [-1] + [1] * 11
    assert (timing.median, timing.p10, timing.p90) == (15.0, 11.0, 19.0)
    assert (timing.n, timing.host_us, timing.sm_mhz) == (11, 3.0, 1755.0)


# ---------------------------------------------------------------- folders
def test_a_profile_has_a_folder_of_its_own(tmp_path: Path) -> None:
    wanted = request("ncu", TRITON, tiling={"tile_m": 32}, out=str(tmp_path))
    first, second = folder.make(wanted), folder.make(wanted)
    assert first != second
    assert first.relative_to(tmp_path).parts[:3] == ("ncu", "triton-flash_mla", "b128_s1_h128_t4096-tile_m32")
    other = replace(wanted, problem=MlaProblem(b=2, t=(70, 4), page=None), tiling={}, tune=True)
    name = folder.params_name(other)
    assert name.startswith("b2_s1_h128_t70_list_contiguous-") and name.endswith("-tuned")
    longer = replace(wanted, problem=MlaProblem(b=2, t=(70, 5), page=None), tiling={}, tune=True)
    assert folder.params_name(longer) != name


def test_a_request_travels_as_json() -> None:
    wanted = request("ncu", TRITON, tiling={"tile_m": 32}, baseline=TORCH, launches=3, kernel_name="x.*")
    assert Request.from_record(json.loads(json.dumps(wanted.to_record()))) == wanted
    for fields, sentence in (
        ({"mode": "event_"}, "did you mean 'event'"),
        ({"launches": 0}, "launches = 0 is too small"),
        ({"timeout_s": 0.0}, "timeout = 0 s must be above 0"),
    ):
        with pytest.raises(UserError, match=sentence):
            replace(wanted, **fields)


def test_the_baseline_is_the_version_before_unless_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from mla_var3.lab.profiling import request as module

    second, fourth = replace(TRITON, version=2), replace(TRITON, version=4)
    monkeypatch.setattr(module, "all_kernels", lambda: (TORCH, TRITON, second, fourth))
    assert version_before(fourth) == second and version_before(TRITON) is None
    assert baseline_of(second, None, "annotation") == TRITON
    assert baseline_of(second, None, "ncu") is None
    assert baseline_of(second, "none", "annotation") is None
    assert baseline_of(second, "torch/flash_mla", "ncu") == TORCH
    with pytest.raises(UserError, match="no kernel 'torch/flash_ml': did you mean"):
        baseline_of(second, "torch/flash_ml", "ncu")


# ---------------------------------------------------------------- annotation
def test_annotation_has_position_counters_and_baseline(gpu: Path) -> None:
    fakes.ncu(gpu)
    outcome = run.profile(request(kernel=TORCH), H200)
    assert outcome.ran and outcome.folder.parts[:4] == ("profiles", "annotation", "torch-flash_mla", PROBLEM.label)
    text = (outcome.folder / "report.md").read_text()
    assert text == outcome.report
    for part in (
        "# annotation: torch/flash_mla b128_s1_h128_t4096",
        "## Roofline",
        "measured 2026",
        "200.0",
        "## Counters",
        "tensor pipe active (%)",
        "gmma 60 %",
        "256 × 384",
        "waits for warpgroup products",
        "no binary to look into: it is made of torch operations",
        "`counters.ncu-rep`: raw report",
    ):
        assert part in text, part
    assert "Nothing ran" not in text
    params = made(outcome.folder)
    assert params["status"] == "done" and params["request"]["mode"] == "annotation"
    assert params["source"]["hash"].keys() == {"torch/flash_mla"}
    (command,) = params["commands"]["torch/flash_mla"]
    assert (
        command[1:3] == ["--clock-control", "none"] and "-k" not in command
    )  # torch's kernels have names of their own
    facts = json.loads((outcome.folder / "facts.json").read_text())["kernels"][0]
    assert facts["launches"][0]["figures"]["tensor"] == 71.5 and facts["time_us"] == 200
    assert (outcome.folder / "counters.log").exists() and (outcome.folder / "job.json").exists()


@needs_triton
def test_a_baseline_stands_beside_the_kernel(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.ncu(gpu)
    outcome = run.profile(request(kernel=TRITON, baseline=TORCH, tiling={"tile_m": 32}), H200)
    assert "triton/flash_mla takes 200.0 us and torch/flash_mla 200.0 us" in outcome.report
    assert "has no knob tile_m" in outcome.report
    assert (outcome.folder / "baseline" / "counters.ncu-rep").exists()
    assert "regex:combine|flash_mla" in fakes.calls(gpu, "ncu")[0] or "regex:flash_mla" in fakes.calls(gpu, "ncu")[0]
    monkeypatch.setattr(registry.get_plan(TORCH), "supported", lambda self: Verdict.no("it is too small"))
    with pytest.raises(
        UserError, match=r"the baseline torch/flash_mla cannot be used: it is too small .--baseline none"
    ):
        run.profile(request(kernel=TRITON, baseline=TORCH), H200)


@pytest.mark.parametrize(
    "install, sentence",
    [
        (lambda d: None, "no counters: Nsight Compute (ncu) is not installed here: put it on PATH."),
        (lambda d: fakes.ncu(d, fakes.PERMISSION, report=False, status=1), "ERR_NVGPUCTRPERM"),
        (lambda d: fakes.ncu(d, fakes.NOTHING, report=False), "no counters: the call launched no kernel"),
    ],
)
def test_annotation_goes_on_without_counters_and_says_so(gpu: Path, install: Any, sentence: str) -> None:
    install(gpu)
    outcome = run.profile(request(), H200)
    assert sentence in outcome.report and "## Roofline" in outcome.report
    assert "## Counters" not in outcome.report and "--mode annotation" not in outcome.report


@needs_triton
def test_annotation_without_the_device_says_what_compiling_can(tmp_path: Path) -> None:
    # In a process of its own: Triton's interpreter, which other tests choose, is chosen for a whole process.
    asked = tmp_path / "request.json"
    folder.write_json(asked, request(kernel=TRITON, device="h100", out=str(tmp_path)).to_record())
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | tools.target_env(line_info=False)
    command = [sys.executable, "-m", "mla_var3.lab.profiling.run", str(asked)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=env)
    assert done.returncode == 0, done.stderr
    below = Path(done.stdout.strip().splitlines()[-1])
    report = (below / "report.md").read_text()
    assert "**Nothing ran:** there is no NVIDIA H100" in report and "no kernel can take less than" in report
    assert "## Resources" in report and "HGMMA" in report
    assert {".ptx", ".cubin", ".sass"} <= {path.suffix for path in (below / "artefacts").rglob("*")}
    assert made(below)["ran"] is False


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (UserError("there is no compiler here."), "there is no compiler here."),
        (ModuleNotFoundError("No module named 'cutlass'", name="cutlass"), "cutlass is not installed"),
    ],
)
def test_resources_come_without_the_compiler_where_they_are_kept(error: Exception, said: str, tmp_path: Path) -> None:
    from types import SimpleNamespace

    from mla_var3.lab.profiling import run as module
    from mla_var3.lab.profiling.facts import Facts

    kept = SimpleNamespace(warnings=())

    class Kernel:
        def compile(self, out_dir: Path | None, device: Any) -> Any:
            if out_dir is not None:
                raise error
            return kept

    facts = Facts("cute-dsl/flash_mla", {}, None)  # type: ignore[arg-type]
    plan: Any = SimpleNamespace(plan_empty=Kernel)
    module._compile(KernelId("cute-dsl", "mla", "flash_mla", 0), plan, Device.get("h200"), tmp_path, facts)
    assert facts.compiled is kept
    assert facts.notes == [f"no artefacts: {said}"]


# ---------------------------------------------------------------- ncu
@needs_triton
def test_ncu_takes_every_section_with_source_lines_and_leaves_the_clocks_alone(gpu: Path) -> None:
    fakes.ncu(gpu)
    outcome = run.profile(request("ncu", TRITON, launches=2), H200)
    first, *imports = fakes.calls(gpu, "ncu")
    for pair in (
        ("--clock-control", "none"), ("--set", "full"), ("--import-source", "yes"), ("--profile-from-start", "off"),
    ):  # fmt: skip
        assert first[first.index(pair[0]) + 1] == pair[1]
    assert first[-4:-1] == [sys.executable, "-m", "mla_var3.lab.profiling.target"]
    job = json.loads(Path(first[-1]).read_text())
    assert job["calls"] == 2 and job["kernel"]["language"] == "triton" and job["tiling"]["tile_m"]
    assert [words[words.index("--page") + 1] for words in imports] == ["raw", "source", "source"]
    assert [words[-1] for words in imports[1:]] == ["cuda,sass", "sass"]  # lines, and where there are none instructions
    assert "## Where the warps wait" in outcome.report and "HGMMA.64x256x16" in outcome.report
    assert (outcome.folder / "ncu.ncu-rep").exists()


FAILURES: list[tuple[dict[str, Any], str]] = [
    ({"said": fakes.PERMISSION, "report": False, "status": 1}, r"ERR_NVGPUCTRPERM.*--mode annotation, which does"),
    ({"said": fakes.NOTHING, "report": False}, "launched no kernel that ncu could see: try --mode timeline"),
    ({"said": "==ERROR== LibraryNotLoaded", "report": False, "status": 1}, "ncu failed: LibraryNotLoaded.*timeline"),
    ({"said": "", "report": False, "status": 9}, "ended with status 9 and wrote no report"),
    ({"said": "target: the problem is too big.", "status": 2}, "profiled process failed: the problem is too big"),
    (
        {"said": "Traceback (most recent call last):\n  File\nValueError: bad\n==ERROR== code (1)", "status": 1},
        "profiled process failed: ValueError: bad",
    ),
    ({"csv": "==WARNING== nothing in it"}, "holds no kernel"),
]


@pytest.mark.parametrize("fake, sentence", FAILURES)
def test_what_goes_wrong_under_ncu_is_one_sentence(gpu: Path, fake: dict[str, Any], sentence: str) -> None:
    fakes.ncu(gpu, **fake)
    with pytest.raises(UserError, match=sentence) as caught:
        run.profile(request("ncu"), H200)
    assert "\n" not in str(caught.value)
    params = made(Path("profiles"))
    assert params["status"] == "failed" and params["reason"] == str(caught.value)
    assert (params["folder"] / "ncu.log").exists()


def test_names_that_match_nothing(gpu: Path, tmp_path: Path) -> None:
    body = f"""\
    if "--import" in args:
        print({fakes.raw_csv()!r})
    elif "-k" in args:
        print({fakes.AVAILABLE!r})
    else:
        pathlib.Path(option("-o") + ".ncu-rep").write_bytes(b"report")
    """
    fakes.install(gpu, "ncu", body)
    report, job = tmp_path / "a.ncu-rep", tmp_path / "job.json"
    launches, notes, command = ncu.profile(report, job, full=True, kernel_name="flash_mla", timeout_s=20)
    assert len(launches) == 2 and "no kernel was named like 'flash_mla'" in notes[0] and "-k" not in command
    report.unlink()
    with pytest.raises(UserError, match="no kernel matches 'mine': the call launched other_kernel, vectorized"):
        ncu.profile(report, job, full=True, kernel_name="mine", timeout_s=20, named=True)


def test_a_chip_without_a_metric_is_profiled_without_it(gpu: Path, tmp_path: Path) -> None:
    body = f"""\
    if "--import" in args:
        print({fakes.raw_csv()!r})
    elif "--metrics" in args:
        print("==ERROR== Failed to find metric dram__bytes_read.sum")
        sys.exit(1)
    else:
        pathlib.Path(option("-o") + ".ncu-rep").write_bytes(b"report")
    """
    fakes.install(gpu, "ncu", body)
    _, notes, _ = ncu.profile(tmp_path / "a.ncu-rep", tmp_path / "j", full=False, kernel_name=None, timeout_s=20)
    assert "lacks one of the extra metrics" in notes[0]


def test_a_profiler_that_hangs_is_ended(gpu: Path, tmp_path: Path) -> None:
    fakes.install(gpu, "ncu", "import time\nprint('begun', flush=True)\ntime.sleep(60)\n")
    with pytest.raises(UserError, match=r"ncu was not done after 0.5 s .*--timeout, or use --mode annotation"):
        ncu.profile(tmp_path / "a.ncu-rep", tmp_path / "j", full=True, kernel_name=None, timeout_s=0.5)
    assert "begun" in (tmp_path / "a.log").read_text()


# ---------------------------------------------------------------- nsys, timeline, event
def test_nsys_shows_kernels_and_gaps(gpu: Path) -> None:
    fakes.nsys(gpu)
    outcome = run.profile(request("nsys"), H200)
    assert "## Time axis" in outcome.report and "busy 212.0, idle 10.0, two at once 2.0" in outcome.report
    assert "--capture-range=cudaProfilerApi" in fakes.calls(gpu, "nsys")[0]


@pytest.mark.parametrize(
    "fake, sentence",
    [
        ({"ending": ".qdstrm"}, r"nsys wrote no report, but only the unprocessed trace .*use --mode timeline"),
        ({"ending": ".txt"}, r"nsys wrote no report \(its output"),
        ({"csv": "SKIPPED"}, r"nsys saw nothing on the device.*timeline"),
    ],
)
def test_what_goes_wrong_under_nsys_is_one_sentence(gpu: Path, fake: dict[str, Any], sentence: str) -> None:
    fakes.nsys(gpu, **fake)
    with pytest.raises(UserError, match=sentence):
        run.profile(request("nsys"), H200)


def test_event_and_timeline_need_no_tool(gpu: Path) -> None:
    event = run.profile(request("event"), H200)
    assert "200.0" in event.report and "cold L2" in event.report and "at 1,980 MHz" in event.report
    axis = run.profile(request("timeline"), H200)
    assert "| combine" in axis.report and "idle 5.0" in axis.report


def test_a_call_that_launches_nothing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    class Nothing:
        name = "empty"

        def launch(self) -> None: ...

    with pytest.raises(UserError, match=r"saw no kernel in 2 calls of empty: .*--mode event"):
        timeline.record(Nothing(), 2, tmp_path / "trace.json")


# ---------------------------------------------------------------- refusals on the command line
@pytest.mark.parametrize(
    "words, sentence",
    [
        (
            ["torch/flash_mla", "--mode", "ncu"],
            "profile mode ncu needs a GPU and there is none here: --mode annotation",
        ),
        (["torch/flash_mla", "--mode", "timelin"], "'timelin' is unknown: did you mean 'timeline'"),
        (["torch/flash_ml"], "no kernel matches 'torch/flash_ml'"),
        (["torch/flash_mla", "--baseline", "x"], "no kernel 'x'"),
        (["torch/flash_mla", "--device", "h2000"], "There is no device 'h2000'"),
        (["torch/flash_mla", "--tiling", "tile=3"], "has no knob 'tile'"),
        (["torch/flash_mla", "--launches", "0"], "launches = 0 is too small"),
    ],
)
def test_the_verb_refuses_in_one_sentence(
    words: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Device, "detect", staticmethod(lambda index=0: None))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["profile", *words]) == 2
    error = capsys.readouterr().err.strip()
    assert sentence in error and len(error.splitlines()) == 1


def test_a_missing_tool_is_refused_before_anything_is_made(
    gpu: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Device, "detect", staticmethod(lambda index=0: H200))
    assert cli.main(["profile", "torch/flash_mla", "--mode", "nsys"]) == 2
    assert "(nsys) is not installed here: put it on PATH, or use --mode timeline" in capsys.readouterr().err
    assert cli.main(["profile", "torch/flash_mla", "--mode", "ncu"]) == 2
    assert "(ncu) is not installed here" in capsys.readouterr().err
    assert not Path("out").exists()


def test_the_verb_prints_the_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Device, "detect", staticmethod(lambda index=0: None))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["profile", "torch/flash_mla", "--b", "4"]) == 0
    out = capsys.readouterr().out
    assert "# annotation: torch/flash_mla b4_s1" in out and "## Files" not in out
    assert Path(out.strip().splitlines()[-1]).read_text().count("## Files") == 1
    assert "Nothing ran" in out
    assert cli.main(["profile", "torch/flash_mla", "--mode", "timeline"]) == 2
    assert "timeline needs a GPU" in capsys.readouterr().err


def test_the_target_refuses_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Device, "detect", staticmethod(lambda index=0: None))
    job = tmp_path / "job.json"
    job.write_text(json.dumps({"kernel": TORCH.to_record(), "problem": PROBLEM.to_record(), "tiling": None}))
    assert target.main([str(job)]) == 2
    assert tools.target_error(capsys.readouterr().err) == "the profiled process sees no GPU."
    assert target.main([]) == 2


# ---------------------------------------------------------------- the sweep
def record(status: str = "passed") -> Record:
    right = status == "passed"
    own = {"status": status, "reason": "" if right else "it is wrong", "tiling": {"tile_m": 64}}
    return made_up.record(TRITON, 200.0 if right else None, PROBLEM, limit=None, **own)


def test_the_group_profile_is_refused_where_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Device, "detect", staticmethod(lambda index=0: None))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["sweep", "experiment=quickstart", "profile=annotation"]) == 2
    assert "profile=annotation follows a measurement, and this sweep only compiles" in capsys.readouterr().err
    assert cli.main(["sweep", "profile=anotation"]) == 2
    assert "did you mean 'annotation'" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"profile.mode = 'x' is unknown"):
        sweep_config.compose(["profile.mode=x"])


@pytest.mark.parametrize("mode", ["disabled", *MODES])
def test_the_group_profile_composes(mode: str) -> None:
    config = sweep_config.compose([f"profile={mode}", "profile.launches=4"])
    assert (config.profile.mode, config.profile.launches) == (mode, 4)


def test_points_that_passed_are_profiled_with_their_tiling(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Request] = []
    said: list[str] = []

    def fake(request: Request) -> Path:
        seen.append(request)
        if len(seen) == 2:
            raise UserError("denied.")
        return Path("profiles/x")

    monkeypatch.setattr(points, "_run", fake)
    config = points.ProfileConfig(mode="annotation", out="p")
    assert points.profile_points([record(), record("failed"), record()], config, said.append) == [Path("profiles/x")]
    assert [r.tiling for r in seen] == [{"tile_m": 64}] * 2 and seen[0].out == "p"
    assert "[profile 1/2] b128_s1_h128_t4096 triton/flash_mla: profiles/x/report.md" in said[0]
    assert "not profiled: denied." in said[1]


def test_a_sweep_profiles_after_everything_was_timed(
    gpu: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mla_var3.measure import cell

    order: list[str] = []

    def measure_cells(cells: Any, *rest: Any, **more: Any) -> Iterator[Record]:
        for problem, _ in cells:
            order.append("timed")
            yield record().model_copy(update={"problem": problem.to_record(), "kernel": KernelRef(**TORCH.to_record())})

    def one(request: Request) -> Path:
        order.append(request.mode)
        return Path("x")

    monkeypatch.setattr(Device, "detect", staticmethod(lambda index=0: H200))
    monkeypatch.setattr(cell, "measure_cells", measure_cells)
    monkeypatch.setattr(points, "_run", one)
    words = ["sweep", "experiment=quickstart", "kernels=torch/flash_mla", "profile=timeline"]
    assert cli.main(words) == 0
    assert order == ["timed"] * 4 + ["timeline"] * 4
    assert "[profile 4/4]" in capsys.readouterr().err
    assert cli.main([*words[:-1], "profile=ncu"]) == 2
    assert "(ncu) is not installed here" in capsys.readouterr().err and len(order) == 8


def test_a_point_is_profiled_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    wanted = points.request_of(record(), points.ProfileConfig(mode="timeline"))
    with pytest.raises(UserError, match=r"profile mode timeline needs a GPU|triton"):
        points._run(replace(wanted, kernel=TORCH, tiling={}))


# ---------------------------------------------------------------- on a GPU
@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["event", "timeline", "annotation"])
def test_profiles_on_a_gpu(mode: str, tmp_path: Path) -> None:
    wanted = Request(TRITON, MlaProblem(b=16, h=16, t=1024), mode, out=str(tmp_path))
    outcome = run.profile(wanted, Device.detect())
    time = outcome.facts[0].time_us()
    assert time is not None and 1 < time[0] < 10_000
    if mode == "timeline":
        assert any("flash_mla" in span.name for span in outcome.facts[0].spans)
    if mode == "annotation" and outcome.facts[0].launches:
        assert "tensor" in outcome.facts[0].launches[0].figures()
