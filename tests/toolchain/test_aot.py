"""Compiled host functions are kept, found again under every part of their key, and loaded without the compiler."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mla_var3.device import Device
from mla_var3.errors import UserError
from mla_var3.toolchain import aot, loader
from mla_var3.toolchain.compiled import CompiledKernel, Resources
from mla_var3.workload.decode import MlaProblem

PLANS = Path(__file__).parent / "plans"
SRC = Path(aot.__file__).parents[2]
H200 = Device.get("h200")
PROBLEM = MlaProblem(b=1, h=16, t=64)
CLASS = PROBLEM.problem_class()


@pytest.fixture(autouse=True)
def _clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv(aot.BUNDLES, raising=False)
    monkeypatch.syspath_prepend(str(PLANS))
    aot._warned.clear()
    yield
    aot._warned.clear()


@pytest.fixture(scope="module")
def made() -> Any:
    """The tiny kernel, compiled once; its handle can be exported any number of times."""
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    sys.path.insert(0, str(PLANS))
    import tiny_scale

    compiled = tiny_scale._compile(False, tiny_scale.TinyTiling(), H200)
    sys.path.remove(str(PLANS))
    return dataclasses.replace(compiled, warnings=("slow: a test",))


class Compiler:
    """A compile_fn that counts, and answers with what was compiled before."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.calls = answer, 0

    def __call__(self) -> Any:
        self.calls += 1
        return self.answer


def get(compiler: Compiler, cache: Path | None, **changes: Any) -> Any:
    asked = {
        "source": "0123456789abcdef",
        "problem_class": CLASS,
        "tiling": {"threads": 128},
        "device": H200,
        "name": "tiny_scale",
        "compile_fn": compiler,
        "cache": aot.CompileCache(cache),
    }
    return aot.load_or_compile(**{**asked, **changes})


def test_second_call_loads_what_the_first_kept(made: Any, tmp_path: Path) -> None:
    compiler = Compiler(made)
    first, second = get(compiler, tmp_path), get(compiler, tmp_path)
    assert compiler.calls == 1
    assert first.handle is not None and second.handle is not None
    assert second.resources == made.resources and second.resources.threads == 128
    assert (second.name, second.arch, second.warnings) == (made.name, "sm_90a", ("slow: a test",))
    assert second.artefacts["object"].suffix == ".so"
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".json", ".so"]


def test_what_is_kept_says_how_long_its_compiling_took(made: Any, tmp_path: Path) -> None:
    slow = Compiler(dataclasses.replace(made, seconds=123.4567))
    assert get(slow, tmp_path).seconds == 123.457
    assert get(slow, tmp_path).seconds == 123.457 and slow.calls == 1
    unknown = Compiler(dataclasses.replace(made, seconds=None))
    assert get(unknown, tmp_path / "other").seconds is None


def test_the_default_folder_follows_xdg_at_the_call(made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    get(Compiler(made), None)
    assert len(list((tmp_path / "elsewhere/mla_var3/cute").glob("tiny_scale-sm_90a-*.so"))) == 1


CHANGES: dict[str, dict[str, Any]] = {
    "source": {"source": "fedcba9876543210"},
    "problem class": {"problem_class": PROBLEM.replace(h=32).problem_class()},
    "problem dtype": {"problem_class": PROBLEM.replace(dtype="fp16").problem_class()},
    "tiling": {"tiling": {"threads": 256}},
    "tiling field": {"tiling": {"threads": 128, "stages": 1}},
    "architecture": {"device": Device.get("b200")},
    "name": {"name": "tiny_scale_other"},
    "options": {"options": "--opt-level 2"},
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_part_of_the_key_misses(made: Any, tmp_path: Path, what: str) -> None:
    compiler = Compiler(made)
    get(compiler, tmp_path)
    get(compiler, tmp_path, **CHANGES[what])
    assert compiler.calls == 2
    get(compiler, tmp_path)
    get(compiler, tmp_path, **CHANGES[what])
    assert compiler.calls == 2


@pytest.mark.parametrize("name", [*aot.PACKAGES, "tvm-ffi-abi", "recipe"])
def test_another_version_of_what_generates_code_misses(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    compiler = Compiler(made)
    get(compiler, tmp_path)
    other = {**aot._installed(), name: "0.0.1"}
    monkeypatch.setattr(aot, "_installed", lambda: other)
    get(compiler, tmp_path)
    assert compiler.calls == 2


def test_the_compiler_s_variables_count_and_its_logging_does_not(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = Compiler(made)
    get(compiler, tmp_path)
    monkeypatch.setenv("CUTE_DSL_LOG_LEVEL", "1")
    get(compiler, tmp_path)
    assert compiler.calls == 1
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    get(compiler, tmp_path)
    assert compiler.calls == 2


def test_this_version_s_source_decides(made: Any, tmp_path: Path) -> None:
    """A registered version is known by the hash of its files and lib."""
    from mla_var3.catalogue import registry

    kernel = registry.KernelId.parse("triton/flash_mla")
    compiler = Compiler(made)
    get(compiler, tmp_path, source=aot.Source(registry.source_hash(kernel)))
    assert aot.source_of_file(kernel.path).hash == registry.source_hash(kernel)
    assert compiler.calls == 1


@pytest.mark.parametrize("damage", ["cut", "flip", "no json", "torn json", "no object"])
def test_a_damaged_entry_is_made_again(made: Any, tmp_path: Path, damage: str) -> None:
    compiler = Compiler(made)
    library = get(compiler, tmp_path).artefacts["object"]
    notes, data = library.with_suffix(".json"), library.read_bytes()
    fresh = tmp_path / "fresh"  # never write into a library that is loaded: that would tear this process
    if damage == "cut":
        fresh.write_bytes(data[: len(data) // 2])
        os.replace(fresh, library)
    elif damage == "flip":
        fresh.write_bytes(data[:-100] + b"\xff" * 100)
        os.replace(fresh, library)
    elif damage == "no object":
        library.unlink()
    elif damage == "no json":
        notes.unlink()
    else:
        notes.write_text(notes.read_text()[:40])
    assert get(compiler, tmp_path).handle is not None
    assert compiler.calls == 2
    assert get(compiler, tmp_path).handle is not None
    assert compiler.calls == 2


def test_a_folder_that_cannot_be_written_warns_once(made: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    compiler = Compiler(made)
    with pytest.warns(RuntimeWarning, match=r"not kept in .*file/cache"):
        first = get(compiler, tmp_path / "file" / "cache")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = get(compiler, tmp_path / "file" / "cache")
    assert first.handle is made.handle and second.handle is made.handle
    assert compiler.calls == 2


def test_without_a_linker_kernels_run_and_are_not_kept(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader.shutil, "which", lambda tool: None)
    with pytest.warns(RuntimeWarning, match="install binutils"):
        assert get(Compiler(made), tmp_path).handle is made.handle
    assert list(tmp_path.iterdir()) == []


def test_what_was_not_made_by_the_compiler_is_handed_through(tmp_path: Path) -> None:
    other = CompiledKernel("other", "sm_90a", Resources())
    compiler = Compiler(other)
    assert get(compiler, tmp_path) is other and get(compiler, tmp_path) is other
    assert compiler.calls == 2 and list(tmp_path.iterdir()) == []


def test_launch_knobs_are_not_part_of_the_key(made: Any, tmp_path: Path) -> None:
    """A knob that is only an argument of the launch has the same code for all its values."""

    class Splits(tiny_tiling()):  # type: ignore[misc]
        launch_fields = ("threads",)

    compiler = Compiler(made)
    get(compiler, tmp_path, tiling=Splits(64))
    get(compiler, tmp_path, tiling=Splits(128))
    assert compiler.calls == 1


def tiny_tiling() -> Any:
    import tiny_scale

    return tiny_scale.TinyTiling


def test_code_that_changed_after_this_process_started_is_not_kept(made: Any, tmp_path: Path) -> None:
    """A process that imported a version and then saw it edited must not file the old code under the new source."""
    compiler = Compiler(made)
    with pytest.warns(RuntimeWarning, match="changed after this process started"):
        get(compiler, tmp_path, source=aot.Source("0123456789abcdef", settled=False))
    assert compiler.calls == 1 and list(tmp_path.iterdir()) == []
    old, new = tmp_path / "old.py", tmp_path / "new.py"
    for path, age in ((old, 3600.0), (new, -3600.0)):
        path.write_text("")
        os.utime(path, (time.time() - age,) * 2)
    assert aot._older_than_process([old]) and not aot._older_than_process([old, new])


def test_a_plan_shares_its_host_functions(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import tiny_scale

    plan = tiny_scale.TinyPlan(PROBLEM, None, H200)
    calls: list[Any] = []

    def compile_fn(tiling: Any, device: Device) -> Any:
        calls.append((tiling.threads, device.arch))
        return made

    first = aot.compiled_host(plan, "tiny_scale", compile_fn)
    assert aot.compiled_host(plan.with_tiling(plan.tiling), "tiny_scale", compile_fn) is first
    assert aot.compiled_host(tiny_scale.TinyPlan(PROBLEM, None, H200), "tiny_scale", compile_fn).handle is not None
    assert calls == [(128, "sm_90a")]
    aot.compiled_host(plan.with_tiling(tiny_scale.TinyTiling(64)), "tiny_scale", compile_fn)
    assert calls == [(128, "sm_90a"), (64, "sm_90a")]
    monkeypatch.setattr(Device, "detect", staticmethod(lambda index=0: None))
    with pytest.raises(UserError, match="give the plan a device"):
        aot.compiled_host(tiny_scale.TinyPlan(PROBLEM), "tiny_scale", compile_fn)


# ---------------------------------------------------------------- other processes
RACE = """
import sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from mla_var3.toolchain import aot
from mla_var3.device import Device
from mla_var3.workload.decode import MlaProblem

class Slow(aot.Store):
    def keep(self, key, compiled, *, strict=False):
        return compiled
    def load(self, key):
        return "loaded" if (self.folder / "done").exists() else None

store = Slow(Path(sys.argv[2]))
key = aot.make_key("0" * 16, MlaProblem(b=1, h=16).problem_class(), {}, Device.get("h200"), "race")
print("ready", flush=True)
sys.stdin.readline()
with store.lock(key):
    print("locked", flush=True)
    if store.load(key) is None:
        with open(store.folder / "compiled", "a") as file:
            file.write("x")
        time.sleep(float(sys.argv[3]))
        (store.folder / "done").touch()
print("released", flush=True)
"""


def _racer(folder: Path, seconds: float) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", RACE, str(SRC), str(folder), str(seconds)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def _say(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def test_two_processes_compile_once(tmp_path: Path) -> None:
    racers = [_racer(tmp_path, 0.3) for _ in range(2)]
    for racer in racers:
        _say(racer)
    assert [racer.wait(30) for racer in racers] == [0, 0]
    assert (tmp_path / "compiled").read_text() == "x"
    assert not list(tmp_path.glob("*.lock"))


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path: Path) -> None:
    victim, heir = _racer(tmp_path, 60.0), _racer(tmp_path, 0.0)
    _say(victim)
    assert victim.stdout is not None and victim.stdout.readline() == "locked\n"
    assert list(tmp_path.glob("*.lock"))
    _say(heir)
    time.sleep(0.1)
    assert heir.poll() is None  # it waits
    victim.send_signal(signal.SIGKILL)
    victim.wait(30)
    assert heir.wait(30) == 0
    assert (tmp_path / "compiled").read_text() == "xx"


LOAD = """
import json, sys, time
src, plans, folder = sys.argv[1:4]
sys.path[:0] = [src, plans]
sys.path = [p for p in sys.path if "dsl_packages" not in p]  # where cutlass lives
sys.modules["torch"] = None  # loading does not need it, and importing it takes seconds
import tvm_ffi
from pathlib import Path
from mla_var3.toolchain.compiled import CompiledKernel, Resources
from mla_var3.toolchain import aot, loader
from mla_var3.device import Device
from mla_var3.workload.decode import MlaProblem
def key():
    return aot.make_key("0123456789abcdef", MlaProblem(b=1, h=16).problem_class(), {"threads": 128},
                        Device.get("h200"), "tiny_scale")
start = time.perf_counter()
found = aot.Store(Path(folder)).load(key())
first = time.perf_counter() - start
start = time.perf_counter()
aot.Store(Path(folder)).load(key())
second = time.perf_counter() - start
print(json.dumps({"compiler": loader.compiler_here(), "cutlass": "cutlass" in sys.modules,
                  "first_ms": first * 1e3, "second_ms": second * 1e3,
                  "handle": type(found.handle).__name__, "threads": found.resources.threads}))
"""


def test_a_process_without_the_compiler_loads_it_in_milliseconds(made: Any, tmp_path: Path) -> None:
    get(Compiler(made), tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(SRC), str(PLANS), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["compiler"] is False and said["cutlass"] is False
    assert said["handle"] == "Function" and said["threads"] == 128
    # first: with the runtime library and the package versions, once in a process. Generous: cores are shared.
    assert said["first_ms"] < 500 and said["second_ms"] < 50, said


# ---------------------------------------------------------------- modules without the compiler
def test_a_version_is_imported_without_the_compiler(tmp_path: Path) -> None:
    code = textwrap.dedent(f"""
        import sys
        sys.path[:0] = [{str(SRC)!r}, {str(PLANS)!r}]
        sys.path = [p for p in sys.path if "dsl_packages" not in p]
        from mla_var3.errors import UserError
        from mla_var3.workload.decode import MlaProblem
        from mla_var3.device import Device
        from mla_var3.toolchain.without_compiler import import_version
        module = import_version("tiny_scale")
        assert "cutlass" not in sys.modules and "cutlass.cute" not in sys.modules
        plan = module.TinyPlan(MlaProblem(b=2, h=16), None, Device.get("h200"))
        assert plan.feasible() and plan.plan_empty().stages[0].name == "tiny_scale"
        assert module.tiny_scale.__name__ == "tiny_scale"
        for call in (lambda: module.launch_scale(1), lambda: module.FIELD + 1, lambda: list(module.KINDS["bf16"])):
            try:
                call()
            except (UserError, TypeError) as error:
                print(error)
            else:
                raise SystemExit("accepted")
        try:
            plan.plan_empty().compile(None, plan.device)
        except UserError as error:
            print(error)
        else:
            raise SystemExit("compiled")
        """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "launch_scale cannot be compiled here" in done.stdout
    assert "is not compiled: the CuTe compiler is not installed and no bundle is open" in done.stdout
    assert "cutlass.cute.nvgpu.warpgroup.Field.ACCUMULATE was used in planning" in done.stdout
