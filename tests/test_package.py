"""The package as a user gets it: built as a wheel, unpacked elsewhere, found without the checkout."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from mla_var3 import paths
from mla_var3.catalogue import registry
from mla_var3.errors import EXTRAS, absent, install
from mla_var3.lab.sweep import config as sweep_config
from mla_var3.lab.sweep import plan as sweep_plan
from mla_var3.record import load
from mla_var3.workload import problem_from_record


def test_a_process_finds_the_package_first_and_what_was_on_the_path_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    root = str(paths.import_root())
    several = os.pathsep.join(("/a", root, "", "/b"))
    for before, wanted in ((None, [root]), ("", [root]), ("/a", [root, "/a"]), (several, [root, "/a", "/b"])):
        if before is None:
            monkeypatch.delenv("PYTHONPATH", raising=False)
        else:
            monkeypatch.setenv("PYTHONPATH", before)
        assert paths.python_path().split(os.pathsep) == wanted
    assert paths.python_path(Path("/other/src")).split(os.pathsep) == ["/other/src", "/a", root, "/b"]


def _run(code_or_args: list[str], cwd: Path, pythonpath: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(pythonpath)}
    return subprocess.run(
        [sys.executable, *code_or_args], cwd=cwd, env=env, text=True, capture_output=True, timeout=120, check=False
    )


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory, repo_root: Path) -> Path:
    """The wheel, which the first of all processes that run these tests builds."""
    pytest.importorskip("hatchling", reason="hatchling builds the wheel: make test installs it")
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    folder = shared / "wheel"
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    with (shared / "wheel.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not list(folder.glob("*.whl")):
            folder.mkdir(exist_ok=True)
            done = subprocess.run(
                [*command, "-w", str(folder), str(repo_root)],
                text=True, capture_output=True, timeout=240, check=False, cwd=folder,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
    (built,) = folder.glob("mla_var3-*.whl")
    return built


@pytest.fixture(scope="session")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's content in a folder of its own."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_wheel_holds_what_the_package_needs_at_run_time(unpacked: Path, repo_root: Path) -> None:
    package = unpacked / "mla_var3"
    assert (package / "conf" / "devices.json").is_file()
    assert (package / "py.typed").is_file(), "type checkers read the annotations of an installed package only then"
    assert list((package / "lab" / "devlog").glob("*.md")), "the devlog template"
    configs = {p.relative_to(repo_root / "conf") for p in (repo_root / "conf").rglob("*.yaml")}
    assert configs == {p.relative_to(package / "data/conf") for p in (package / "data/conf").rglob("*.yaml")}


#: Bytes that a wheel may have, and its content: an engine installs it into every image.
MOST_PACKED, MOST_UNPACKED = 2_000_000, 10_000_000


def test_a_wheel_is_small(wheel: Path) -> None:
    assert wheel.stat().st_size < MOST_PACKED
    with zipfile.ZipFile(wheel) as archive:
        assert sum(entry.file_size for entry in archive.infolist()) < MOST_UNPACKED


def ids(folder: Path) -> set[str]:
    lines = [line for file in folder.rglob("*.jsonl") for line in file.read_text(encoding="utf-8").splitlines()]
    assert lines
    return {json.loads(line)["id"] for line in lines}


def test_of_the_records_a_wheel_has_the_dispatchers_and_quickstarts(unpacked: Path, repo_root: Path) -> None:
    shipped = unpacked / "mla_var3" / "data" / "results"
    assert {p.relative_to(shipped).as_posix() for p in shipped.rglob("*") if p.is_file()} == {
        "code.json", "h100/shipped.jsonl", "h200/shipped.jsonl",
    }  # fmt: skip
    cells = set(sweep_plan.expand_cells(sweep_config.compose(["experiment=quickstart"])))
    sources = [file.read_text(encoding="utf-8") for file in (paths.package() / "dispatch").rglob("*.py")]
    wanted = {found for text in sources for found in re.findall(r"\b[0-9a-f]{12}\b", text)} & ids(repo_root / "results")
    of_cells = set()
    for file in (repo_root / "results").rglob("*.jsonl"):
        for record in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
            if record["problem"].get("h") in (16, 128) and record.get("time_us"):
                problem = problem_from_record(record["problem"])
                if problem in cells:
                    of_cells.add((problem.label, record["device"]))
                    wanted.add(record["id"])
    assert len(of_cells) == 2 * len(cells) == 8, "each cell was timed on both"
    assert ids(shipped) == wanted
    loaded = load(shipped)
    assert not loaded.problems and len(loaded.records) == len(wanted)


def test_a_record_that_the_dispatcher_names_goes_into_the_wheel(
    tmp_path: Path, repo_root: Path, module_at: Callable[[Path], Any]
) -> None:
    pytest.importorskip("hatchling", reason="hatchling builds the wheel: make test installs it")
    module = module_at(repo_root / "scripts" / "wheel_records.py")
    for name, text in {
        module.EXPERIMENT: "cells: [{b: 8, h: 16, t: 4096}]",
        f"{module.DISPATCH}/rules/decode.py": 'records=("0123456789ab",)',
        "results/h200/day.jsonl": "\n".join(
            json.dumps({"id": name, "device": "h200", "problem": {"b": b, "h": 16, "t": 4096}, "time_us": us})
            for name, b, us in (
                ("0123456789ab", 9, 1.0), ("0123456789ac", 9, 1.0), ("cell", 8, 1.0), ("untimed", 8, None)
            )
        ),
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = [(device, json.loads(line)["id"]) for device, line in module.kept(tmp_path)]
    assert found == [("h200", "0123456789ab"), ("h200", "cell")]


def test_verbs_of_a_wheel_say_where_the_other_records_are(unpacked: Path, tmp_path: Path) -> None:
    note = (
        "note: an installed package has the dispatcher's records and those of quickstart's cells alone: all records "
        "are in results/ of a checkout of the project, so give that folder as FILE.\n"
    )
    for words in (["report", "--show", "sets"], ["compare"]):
        done = _run(["-m", "mla_var3.cli", *words], tmp_path, unpacked)
        assert done.returncode == 0 and note in done.stderr and "h200" in done.stdout, done.stderr
    for verb in ("check", "table"):
        done = _run(["-m", "mla_var3.cli", "devlog", verb], tmp_path, unpacked)
        assert done.returncode == 2 and done.stderr == (
            "mla-var3: there is no devlogs/ here or above, and an installed package has none: work in a checkout of "
            "the project, or give --root FOLDER, which holds devlogs/ and results/.\n"
        ), done.stderr


def test_wheel_works_from_another_folder(unpacked: Path, tmp_path: Path) -> None:
    where = _run(["-c", "import mla_var3; print(mla_var3.__file__)"], tmp_path, unpacked)
    assert Path(where.stdout.strip()).is_relative_to(unpacked)
    code = (
        "from mla_var3 import paths\nfrom mla_var3.device import Device\n"
        "assert paths.repo_root() is None and paths.conf_dir().is_dir() and paths.shipped_results_dir().is_dir()\n"
        "print(Device.get('h200').arch, 'quickstart' in paths.options('experiment'))"
    )
    found = _run(["-c", code], tmp_path, unpacked)
    assert found.stdout.split() == ["sm_90a", "True"], found.stderr
    listing = _run(["-m", "mla_var3.cli", "list"], tmp_path, unpacked)
    assert listing.returncode == 0, listing.stderr
    for word in ("flash_mla", "torch", "triton", "cutile-dsl", "cute-dsl"):
        assert word in listing.stdout
    learned = _run(["-m", "mla_var3.cli", "knowledge", "find", "--bound", "compute"], tmp_path, unpacked)
    assert learned.returncode == 0 and "seesaw-schedule.md" in learned.stdout, learned.stderr


@pytest.mark.skipif(bool(registry.missing("triton")), reason="no triton here")
def test_a_clone_from_the_wheel_is_the_users_own(unpacked: Path, tmp_path: Path) -> None:
    before = sorted((unpacked / "mla_var3" / "kernel").rglob("*.py"))

    def verb(*words: str) -> str:
        done = _run(["-m", "mla_var3.cli", *words], tmp_path, unpacked)
        assert done.returncode == 0, done.stdout + done.stderr
        return str(done.stdout)

    verb("clone", "triton/flash_mla")
    own = tmp_path / "kernels" / "triton" / "mla" / "flash_mla" / "flash_mla_v1" / "flash_mla_v1.py"
    assert own.is_file() and sorted((unpacked / "mla_var3" / "kernel").rglob("*.py")) == before
    assert "made triton/flash_mla_v2" in verb("clone", "triton/flash_mla_v1"), "a copy of what is the user's, too"
    assert "triton/flash_mla_v2" in verb("list", "kernels")
    # Edited: what runs, and what is hashed, is the user's file.
    hashed = (
        "from mla_var3.catalogue import registry as r\nprint(r.source_hash(r.KernelId.parse('triton/flash_mla_v1')))"
    )
    first = _run(["-c", hashed], tmp_path, unpacked).stdout
    own.write_text(own.read_text() + "\nraise RuntimeError('this is the copy')\n")
    assert _run(["-c", hashed], tmp_path, unpacked).stdout != first
    words = ["check", "triton/flash_mla_v1", "--b", "1", "--t", "70", "--h", "4", "--device", "cpu", "--cases", "own"]
    broken = _run(["-m", "mla_var3.cli", *words], tmp_path, unpacked)
    assert broken.returncode != 0 and "this is the copy" in broken.stderr
    assert "triton/flash_mla_v2 b1_s1_h4_t70: passed" in verb(*(w.replace("_v1", "_v2") for w in words))


def test_wheel_names_its_command_and_licence(unpacked: Path, repo_root: Path) -> None:
    (info,) = unpacked.glob("mla_var3-*.dist-info")
    points = (info / "entry_points.txt").read_text()
    assert "mla-var3 = mla_var3.cli:main" in points
    assert "[vllm.general_plugins]\nmla_var3 = mla_var3.engines.vllm:register\n" in points
    assert "[sglang.srt.plugins]\nmla_var3 = mla_var3.engines.sglang:register\n" in points
    assert (info / "licenses" / "LICENSE").read_text() == (repo_root / "LICENSE").read_text()
    assert "License-Expression: Apache-2.0" in (info / "METADATA").read_text()


# What import and `list` may not load, and why: each costs seconds, or fails on a machine without that language.
_HEAVY = ("torch", "triton", "cutlass", "cuda.tile", "pandas", "pydantic", "hydra", "numpy")


@pytest.mark.parametrize("arguments", [["--help"], ["list"]])
def test_commands_that_must_answer_at_once_load_nothing_heavy(arguments: list[str], repo_root: Path) -> None:
    code = (
        "import sys\nfrom mla_var3.cli import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit:\n    pass\n"
        f"print('LOADED', *[m for m in {_HEAVY!r} if m in sys.modules])"
    )
    done = _run(["-c", code], repo_root, repo_root / "src")
    assert done.stdout.strip().splitlines()[-1] == "LOADED", done.stdout + done.stderr


def test_list_answers_in_half_a_second(repo_root: Path) -> None:
    """The least CPU time of five runs, above what a bare interpreter takes: other processes must not decide it."""

    def cost(code: str) -> float:
        probe = (
            "import resource, subprocess, sys\n"
            "subprocess.run([sys.executable, '-c', sys.argv[1]], capture_output=True, check=True)\n"
            "r = resource.getrusage(resource.RUSAGE_CHILDREN)\nprint(r.ru_utime + r.ru_stime)"
        )
        return min(float(_run(["-c", probe, code], repo_root, repo_root / "src").stdout) for _ in range(5))

    assert cost("from mla_var3.cli import main; main(['list'])") < 0.5


def test_pins_of_what_generates_code_agree(repo_root: Path) -> None:
    extras = tomllib.loads((repo_root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pins = dict(d.split("==") for extra in ("cute", "cutile") for d in extras[extra] if "==" in d)
    tools = {pins[name] for name in ("nvidia-cuda-tileiras", "nvidia-cuda-nvcc", "nvidia-nvvm")}
    assert len(tools) == 1, "tileiras, ptxas and libnvvm must be of one release"
    assert not any(d.startswith("cuda-tile[") for d in extras["cutile"]), "its extra collides with torch's pins"


# ---------------------------------------------------------------- as a dependency
def test_the_package_alone_asks_for_what_runs_kernels_only(unpacked: Path) -> None:
    (info,) = unpacked.glob("mla_var3-*.dist-info")
    asked = [Requirement(r) for r in Distribution.at(info).requires or []]
    alone = {r.name for r in asked if r.marker is None}
    assert alone == {"torch", "triton", "apache-tvm-ffi", "torch-c-dlpack-ext", "pyelftools"}
    extras = {
        extra: {r.name for r in asked if r.marker and r.marker.evaluate({"extra": extra})} - alone for extra in EXTRAS
    }
    assert (
        extras["cute"] == {"nvidia-cutlass-dsl"} and "cuda-tile" in extras["cutile"] and "hydra-core" in extras["lab"]
    )


CONTRACTS = sorted((Path(__file__).parent / "engines" / "contracts").glob("*.json"))


@pytest.mark.slow
@pytest.mark.skipif("MLA_VAR3_NETWORK" not in os.environ, reason="asks a package index: MLA_VAR3_NETWORK=1 runs it")
@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda file: file.stem)
def test_pip_resolves_the_package_beside_an_engine(contract: Path, wheel: Path, tmp_path: Path) -> None:
    """In an empty environment, with what the engine pins, and with [cute] where that is a release that it takes."""
    pins = json.loads(contract.read_text(encoding="utf-8"))["pins"]
    extra = "[cute]" if pins["nvidia-cutlass-dsl"].startswith("==4.8.") else ""
    asked = [name.replace("-dsl", "-dsl[cu13]") + pin for name, pin in pins.items()]
    words = ["-m", "pip", "install", "--dry-run", "--ignore-installed", "-q", "--report", str(tmp_path / "report.json")]
    done = subprocess.run(
        [sys.executable, *words, f"{wheel}{extra}", *asked], text=True, capture_output=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    made = [each["metadata"] for each in json.loads((tmp_path / "report.json").read_text())["install"]]
    versions = {each["name"].lower().replace("_", "-"): each["version"] for each in made}
    assert {name: f"=={versions[name]}" for name in pins} == pins and "mla-var3" in versions


def test_every_package_of_an_extra_is_named_when_it_is_missing(
    repo_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`EXTRAS` knows each distribution of the package and its extras by what is imported of it."""
    monkeypatch.setattr("mla_var3.errors.importable", lambda package: False)
    project = tomllib.loads((repo_root / "pyproject.toml").read_text())["project"]
    asked = {"": project["dependencies"], **project["optional-dependencies"]}
    for extra, modules in EXTRAS.items():
        wanted = {Requirement(text).name for text in asked[extra]} - NOT_IMPORTED
        assert wanted <= {DISTRIBUTIONS.get(module, module) for module in modules}, extra
        for module in modules:
            sentence = absent("sweep", f"{module}.deeper")
            assert sentence is not None and sentence.endswith(f"not installed: {install(extra)}.")
    assert absent("sweep", "mla_var3.nothing") is None
    monkeypatch.setattr("mla_var3.errors.importable", lambda package: True)
    assert absent("sweep", "yaml.nothing") is None, "it is installed, and lacks that module"


#: Distributions that have another name than what is imported of them.
DISTRIBUTIONS = {
    "cutlass": "nvidia-cutlass-dsl", "cuda.tile": "cuda-tile", "jax_tvm_ffi": "jax-tvm-ffi", "hydra": "hydra-core",
    "markdown_it": "markdown-it-py", "vl_convert": "vl-convert-python", "yaml": "pyyaml", "tvm_ffi": "apache-tvm-ffi",
    "elftools": "pyelftools",
}  # fmt: skip
#: cuTile's compilers are programs and libraries, and tvm_ffi finds the other by itself.
NOT_IMPORTED = {"nvidia-cuda-tileiras", "nvidia-cuda-nvcc", "nvidia-nvvm", "torch-c-dlpack-ext"}

# A machine that has nothing of some extras: importing what they bring fails as if it were not installed.
BLOCK = """
import importlib.abc, sys

class Blocked(importlib.abc.MetaPathFinder):
    names = {names!r}

    def find_spec(self, name, path, target=None):
        if any(name == n or name.startswith(n + ".") for n in self.names):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
"""


def _without(*extras: str) -> str:
    return BLOCK.format(names=[module for extra in extras for module in EXTRAS[extra]])


def test_the_package_alone_attends(unpacked: Path, tmp_path: Path) -> None:
    """With nothing of any extra a version is picked and planned; on a CPU the torch version computes."""
    code = """
import torch
from mla_var3.device import Device
from mla_var3.dispatch import choose
from mla_var3.catalogue.registry import KernelId, get_plan, missing
from mla_var3.workload.decode import MlaProblem

problem = MlaProblem(b=2, h=4, t=100)
print(choose(problem, Device.get("h200")).kernel.label, missing("cute-dsl"))
plan = get_plan(KernelId.parse("torch/flash_mla"))(problem)
print(plan.plan(*plan.prepare_inputs("cpu"))()[0].shape)
"""
    done = _run(["-c", _without(*filter(None, EXTRAS)) + code], tmp_path, unpacked)
    assert done.returncode == 0, done.stderr
    picked, attended = done.stdout.splitlines()
    assert picked.startswith("triton/") and picked.endswith("is not installed: pip install 'mla_var3[cute]'.")
    assert attended == "torch.Size([2, 1, 4, 512])"
    assert "pip install 'mla_var3[cute]'" in done.stderr, "the pick that a missing compiler decided is warned of"


@pytest.mark.parametrize("words", [["sweep", "experiment=quickstart"], ["report"], ["devlog", "check"]])
def test_a_verb_names_the_extra_that_it_needs(words: list[str], tmp_path: Path, repo_root: Path) -> None:
    code = f"{_without('lab')}\nfrom mla_var3.cli import main\nsys.exit(main({words!r}))"
    done = _run(["-c", code], tmp_path, repo_root / "src")
    assert done.returncode == 2, done.stderr
    assert re.fullmatch(
        rf"mla-var3: {words[0]} needs the package \w+, which is not installed: pip install .*\[lab\]'\.\n",
        done.stderr,
    )
