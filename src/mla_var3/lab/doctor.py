"""`mla-var3 doctor`: what of this machine works for which language, what does not, and what to do about it."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from mla_var3 import paths
from mla_var3.device import Device
from mla_var3.errors import UserError, install

OK, NOTE, MISSING, BROKEN = "ok", "note", "missing", "BROKEN"

#: Without these nothing works; all else can be missing.
CORE = ("torch",)
#: The extras whose packages are looked for; the others are for special uses.
EXTRAS = ("cute", "cutile", "lab")
#: The three that compile cuTile: their major.minor must agree.
TILE = ("nvidia-cuda-tileiras", "nvidia-cuda-nvcc", "nvidia-nvvm")
TOOLS = {
    "ncu": "Nsight Compute: package cuda-nsight-compute of NVIDIA's apt repository, or the CUDA toolkit",
    "nsys": "Nsight Systems: package nsight-systems of NVIDIA's apt repository, or the CUDA toolkit",
    "compute-sanitizer": "package cuda-sanitizer of NVIDIA's apt repository, or the CUDA toolkit",
}
_PROBE_S = 120.0
_SYS_ADMIN, _PERFMON = 21, 38  # bits of the capability sets


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, its state, what was found, and what to do when it is not ok."""

    area: str
    state: str
    text: str
    todo: str = ""


def run(args: argparse.Namespace) -> int:
    """Prints the findings; 1 only when the installation itself is broken."""
    device = Device.get(args.device)
    findings = []
    for finding in examine(device, compile_too=not args.no_compile):
        findings.append(finding)
        print(f"{finding.area:10} {finding.state:8} {finding.text}", flush=True)
        if finding.todo:
            print(f"{'':19} -> {finding.todo}")
    broken = [f for f in findings if f.state == BROKEN]
    missing = [f for f in findings if f.state == MISSING]
    print()
    if broken:
        print(f"{len(broken)} things are broken: see the lines marked {BROKEN}.")
    elif missing:
        print(f"This installation works; {len(missing)} things are missing, each with what to do above.")
    else:
        print("Everything works.")
    return 1 if broken else 0


def examine(device: Device, *, compile_too: bool = True) -> Iterator[Finding]:
    """Every finding, as it is found."""
    yield from _python()
    yield from _packages()
    yield from _gpu()
    if compile_too:
        yield from _compilers(device)
    yield from _on_cpu()
    yield from _peers()
    yield from _engines()
    yield from _profilers()
    yield from _cluster()
    yield from _folders()


# ---------------------------------------------------------------- Python and packages
def _python() -> Iterator[Finding]:
    version = tuple(sys.version_info[:3])
    text = ".".join(map(str, version))
    if version < (3, 11):
        yield Finding("python", BROKEN, text, "install Python 3.11 or later")
    else:
        yield Finding("python", OK, f"{text} at {sys.executable}")


def requirements() -> list[tuple[str, str]]:
    """What the package and `EXTRAS` ask for, each with its extra, "" for the package itself: from its installed
    metadata, or from pyproject.toml in a checkout."""
    root = paths.repo_root()
    if root is not None and (root / "pyproject.toml").is_file():
        import tomllib

        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        groups = {"": project["dependencies"]} | {e: project["optional-dependencies"][e] for e in EXTRAS}
        return [(text, extra) for extra, texts in groups.items() for text in texts]
    try:
        texts = metadata.requires("mla_var3") or []
    except metadata.PackageNotFoundError:
        return []
    marked = [(text.partition(";")[0].strip(), re.search(r"extra == ['\"](\w+)", text)) for text in texts]
    return [(text, mark[1] if mark else "") for text, mark in marked if mark is None or mark[1] in EXTRAS]


def _packages() -> Iterator[Finding]:
    try:
        from packaging.requirements import Requirement
    except ImportError:
        yield Finding("package", MISSING, "packaging is not installed, so pins cannot be compared", install("lab"))
        return
    for text, extra in requirements():
        requirement = Requirement(text)
        version = installed(requirement.name)
        pin = str(requirement.specifier) or "any"
        command = install(extra) if extra else f"pip install '{text}'"
        if version is None:
            state = BROKEN if requirement.name in CORE else MISSING
            yield Finding("package", state, f"{requirement.name} is not installed (pin {pin})", command)
        elif not requirement.specifier.contains(version, prereleases=True):
            yield Finding("package", NOTE, f"{requirement.name} {version} is not what the pin asks for: {pin}", command)
        else:
            yield Finding("package", OK, f"{requirement.name} {version} (pin {pin})")
    versions = {name: version for name in TILE if (version := installed(name)) is not None}
    if len({".".join(v.split(".")[:2]) for v in versions.values()}) > 1:
        found = ", ".join(f"{n} {v}" for n, v in versions.items())
        yield Finding("package", MISSING, f"cuTile's compilers disagree: {found}", install("cutile"))


def installed(name: str) -> str | None:
    """Version of a distribution, None when it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


# ---------------------------------------------------------------- GPU
def _gpu() -> Iterator[Finding]:
    smi = shutil.which("nvidia-smi")
    if smi is None:
        yield Finding("driver", NOTE, "no nvidia-smi: no NVIDIA driver here", _without_gpu())
    else:
        yield _driver(smi)
    if installed("torch") is None:
        return
    try:
        import torch

        device = Device.detect()
        build = (
            f"torch {torch.__version__}, built for {'CUDA ' + torch.version.cuda if torch.version.cuda else 'the CPU'}"
        )
    except (OSError, ImportError, RuntimeError, UserError) as error:
        lines = str(error).splitlines() or [""]
        yield Finding("gpu", BROKEN, f"torch cannot be used: {lines[0]}", "reinstall torch for this machine")
        return
    if device is not None:
        known = "" if device.known else "; not in devices.json, so without published peaks"
        yield Finding("gpu", OK, f"{device.name}, {device.arch}, key {device.key}{known} ({build})")
    elif smi is not None and torch.version.cuda is None:
        yield Finding(
            "gpu", MISSING, f"there is a driver, but {build}", "install a CUDA build: constraints/gpu.txt has the pins"
        )
    elif smi is not None:
        yield Finding("gpu", MISSING, f"torch sees no GPU ({build})", "compare the driver's CUDA version with torch's")
    else:
        yield Finding("gpu", NOTE, f"none ({build})")


def _without_gpu() -> str:
    return "nothing to do: compiling, small CPU runs and comparing records work without"


def _driver(smi: str) -> Finding:
    try:
        words = [smi, "--query-gpu=name,driver_version", "--format=csv,noheader"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True)
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        return Finding("driver", OK, "; ".join(lines) or "no GPU listed")
    except (OSError, subprocess.SubprocessError) as error:
        return Finding(
            "driver", MISSING, f"nvidia-smi fails: {error}", "load the driver, or start the container with GPUs"
        )


# ---------------------------------------------------------------- compilers
def _compilers(device: Device) -> Iterator[Finding]:
    """A trial compilation in every language, all at once, each in a process of its own."""
    from mla_var3.catalogue.registry import missing
    from mla_var3.lab.doctor_probe import PROBES

    env = {**os.environ, "PYTHONPATH": paths.python_path()}
    running = {}
    for language in PROBES:
        reason = missing(language)
        if reason:
            what, _, how = reason.partition(": ")
            yield Finding("compiler", MISSING, what, how.rstrip("."))
            continue
        command = [sys.executable, "-m", "mla_var3.lab.doctor_probe", language, device.key]
        running[language] = subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
        )
    for language, process in running.items():
        yield _probed(language, process, device)


def _probed(language: str, process: subprocess.Popen[str], device: Device) -> Finding:
    try:
        out, err = process.communicate(timeout=_PROBE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return Finding(
            "compiler", MISSING, f"{language} did not finish a small kernel in {_PROBE_S:g} s", "try again alone"
        )
    last = (out.strip().splitlines() or [""])[-1]
    if not last.startswith("{"):
        said = (err.strip().splitlines() or [f"exit status {process.returncode}"])[-1]
        return Finding(
            "compiler", MISSING, f"{language} cannot compile for {device.arch}: {said}", _reinstall(language)
        )
    answer = json.loads(last)
    if answer["ok"]:
        return Finding("compiler", OK, f"{language} compiles for {device.arch} ({answer['seconds']} s with imports)")
    return Finding(
        "compiler", MISSING, f"{language} cannot compile for {device.arch}: {answer['text']}", _reinstall(language)
    )


def _reinstall(language: str) -> str:
    from mla_var3.catalogue.registry import LANGUAGES

    return f"reinstall it with the pins: {LANGUAGES[language].how}"


def _on_cpu() -> Iterator[Finding]:
    from mla_var3.catalogue.registry import LANGUAGES, cannot_run_on_cpu, missing

    for language, known in LANGUAGES.items():
        if language == "peer" or missing(language) is not None:
            continue
        reason = cannot_run_on_cpu(language)
        name = known.interpreter.name if known.interpreter is not None else ""
        yield Finding("cpu", NOTE if reason else OK, reason or f"{language} kernels run with {name}")


def _peers() -> Iterator[Finding]:
    """Other people's kernels to compare with: optional, each found by itself."""
    from mla_var3.catalogue.registry import all_kernels, missing

    for kernel in all_kernels():
        if kernel.language == "peer" and missing("peer") is None:
            what, _, how = (missing(kernel) or "").partition(": ")
            yield Finding("peer", NOTE, what, how.rstrip(".")) if what else Finding("peer", OK, kernel.label)


def _engines() -> Iterator[Finding]:
    """Serving engines that are installed, and whether they find the plug-in."""
    from mla_var3.engines import sglang
    from mla_var3.engines.vllm import releases

    for engine, group, known, how in (
        ("vllm", "vllm.general_plugins", [each.version for each in releases.RELEASES],
         "--attention-backend MLA_VAR3 or MLA_VAR3_SPARSE"),
        ("sglang", "sglang.srt.plugins", list(sglang.RELEASES), "--attention-backend mla_var3 --page-size 64"),
    ):  # fmt: skip
        version = installed(engine)
        if version is None:
            yield Finding("engine", NOTE, f"{engine} is not installed")
        elif not metadata.entry_points(group=group, name="mla_var3"):
            yield Finding(
                "engine",
                MISSING,
                f"{engine} {version} does not find the plug-in: mla_var3 is imported but not "
                "installed in its environment",
                install(""),
            )
        elif version not in known:
            yield Finding("engine", NOTE, f"{engine} {version} is not known; these are: {', '.join(known)}", how)
        else:
            yield Finding("engine", OK, f"{engine} {version} finds the plug-in: {how}")


# ---------------------------------------------------------------- profilers
def _profilers() -> Iterator[Finding]:
    from mla_var3.lab.profiling.modes import tools

    state = MISSING if shutil.which("nvidia-smi") else NOTE  # of no use without a GPU
    for name, how in TOOLS.items():
        path = tools.find(name)
        yield Finding("profiler", OK, f"{name} at {path}") if path else Finding("profiler", state, f"no {name}", how)
    yield counters()


def counters(params: Path = Path("/proc/driver/nvidia/params"), status: Path = Path("/proc/self/status")) -> Finding:
    """Whether this process may read the GPU's performance counters, which ncu needs."""
    if not params.is_file():
        return Finding("counters", NOTE, "no NVIDIA driver, so no performance counters")
    admin_only = "RmProfilingAdminOnly: 1" in params.read_text()
    if not admin_only:
        return Finding("counters", OK, "every user may read performance counters")
    if _may(status):
        return Finding("counters", OK, "restricted to administrators, and this process is one")
    return Finding(
        "counters",
        MISSING,
        "performance counters are restricted to administrators: ncu will end with ERR_NVGPUCTRPERM",
        "start the container with --cap-add=SYS_ADMIN, or set NVreg_RestrictProfilingToAdminUsers=0 for the driver",
    )


def _may(status: Path) -> bool:
    """Whether the effective capabilities include SYS_ADMIN or PERFMON."""
    if not status.is_file():
        return False
    for line in status.read_text().splitlines():
        if line.startswith("CapEff:"):
            bits = int(line.split()[1], 16)
            return bool(bits >> _SYS_ADMIN & 1 or bits >> _PERFMON & 1)
    return False


# ---------------------------------------------------------------- cluster
def _cluster() -> Iterator[Finding]:
    """What the Ray cluster offers that this machine belongs to; nothing is said where Ray is not installed."""
    if installed("ray") is None:
        return
    from mla_var3.lab.sweep.ray_ import offer

    try:
        yield Finding("cluster", OK, offer())
    except UserError as error:
        what, _, how = str(error).partition(": ")
        yield Finding("cluster", NOTE, what, how.rstrip("."))


# ---------------------------------------------------------------- folders
def _folders() -> Iterator[Finding]:
    if (paths.conf_dir() / "sweep.yaml").is_file():
        yield Finding("configs", OK, str(paths.conf_dir()))
    else:
        yield Finding("configs", BROKEN, f"none at {paths.conf_dir()}", "reinstall mla-var3")
    user = paths.user_conf_dir()
    if user is not None:
        yield Finding("configs", OK, f"{user} adds to them")
    records = sorted(paths.shipped_results_dir().rglob("*.jsonl")) if paths.shipped_results_dir().is_dir() else []
    yield Finding(
        "records", OK if records else NOTE, f"{len(records)} record files shipped at {paths.shipped_results_dir()}"
    )
    here = Path.cwd()
    free = shutil.disk_usage(here).free / 1e9
    if not os.access(here, os.W_OK):
        yield Finding(
            "folder", MISSING, f"{here} cannot be written", "start in a folder of yours, or give results_dir="
        )
    elif free < 1:
        yield Finding(
            "folder", MISSING, f"{free:.1f} GB are free in {here}", "make room: records stop when the disk is full"
        )
    else:
        yield Finding("folder", OK, f"{free:,.0f} GB free in {here}")
