"""What a record says about where it was measured: GPU, driver, packages, clocks, power, temperature, and the commit."""

from __future__ import annotations

import contextlib
import hashlib
import platform
import shutil
import subprocess
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_var3 import paths

if TYPE_CHECKING:
    from mla_var3.catalogue.registry import KernelId

#: Packages whose version a record names, beside those that generate code.
MORE_PACKAGES = ("mla-var3", "torch", "apache-tvm-ffi", "flash-mla", "flashinfer-python")

_QUERY = {
    "sm_mhz": "clocks.sm",
    "mem_mhz": "clocks.mem",
    "power_w": "power.draw",
    "temperature_c": "temperature.gpu",
}


def describe(gpu: bool = False) -> dict[str, Any]:
    """Python, platform, packages, the libraries behind peers; with `gpu`, also the current GPU's name, `chip`, driver,
    power limit and CUDA."""
    from mla_var3.catalogue.registry import library_versions
    from mla_var3.toolchain import aot
    from mla_var3.toolchain.versions import GENERATES, installed

    found: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": installed((*(n for names in GENERATES.values() for n in names), *MORE_PACKAGES)),
        "gpu": None,
        "driver": None,
    }
    # Kernels out of a bundle were compiled elsewhere, with packages that this machine need not have.
    bundled = {k: v for folder in aot.bundle_dirs() for e in aot.entries_of(folder) for k, v in e["toolchain"].items()}
    if bundled:
        found["bundle_packages"] = bundled
    # A peer that was fetched is no installed package.
    if peers := library_versions():
        found["peers"] = peers
    if gpu:
        import torch

        sensors = Sensors()
        found["gpu"] = torch.cuda.get_device_name()
        found["chip"] = chip()
        found["driver"] = sensors.driver()
        found["power_limit_w"] = sensors.power_limit_w()
        found["cuda"] = torch.version.cuda
        found.update(by_quantity({"idle": sensors.read()}))
    return found


def by_quantity(readings: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Readings of each state as a record has them: clocks {state: {sm_mhz, mem_mhz}}, power {state: W}, temperature."""
    clocks = {s: {n: r[n] for n in ("sm_mhz", "mem_mhz") if n in r} for s, r in readings.items()}
    return {
        "clocks": {s: c for s, c in clocks.items() if c},
        "power": {s: r["power_w"] for s, r in readings.items() if "power_w" in r},
        "temperature": {s: r["temperature_c"] for s, r in readings.items() if "temperature_c" in r},
    }


class Sensors:
    """Clocks, power and temperature of the current GPU: through NVML where its Python package is, else `nvidia-smi`.

    Neither changes a setting. Without both, readings are empty. Power is what the driver reports, an average over
    about a second on most chips.
    """

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handle: Any = None
        with contextlib.suppress(Exception):
            import pynvml  # type: ignore[import-not-found,unused-ignore]

            pynvml.nvmlInit()
            self._handle = _nvml_handle(pynvml)
            self._nvml = pynvml
        self._smi = shutil.which("nvidia-smi") if self._nvml is None else None

    def read(self) -> dict[str, float]:
        """sm_mhz, mem_mhz, power_w, temperature_c, as far as they can be read now."""
        if self._nvml is None:
            values = self._ask(",".join(_QUERY.values()))
            return {n: float(v) for n, v in zip(_QUERY, values, strict=False) if _is_number(v)}
        nvml, handle = self._nvml, self._handle
        readers = {
            "sm_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "mem_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
            "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        }
        found: dict[str, float] = {}
        for name, reader in readers.items():
            with contextlib.suppress(Exception):
                found[name] = float(reader())  # type: ignore[no-untyped-call]
        return found

    def driver(self) -> str | None:
        """The driver's version."""
        if self._nvml is not None:
            with contextlib.suppress(Exception):
                version = self._nvml.nvmlSystemGetDriverVersion()
                return version.decode() if isinstance(version, bytes) else str(version)
        values = self._ask("driver_version")
        return values[0] if values else None

    def power_limit_w(self) -> float | None:
        """The power limit in force, in watts."""
        if self._nvml is not None:
            with contextlib.suppress(Exception):
                return float(self._nvml.nvmlDeviceGetEnforcedPowerLimit(self._handle)) / 1e3
        values = self._ask("enforced.power.limit")
        return float(values[0]) if values and _is_number(values[0]) else None

    def _ask(self, query: str) -> list[str]:
        smi = self._smi or shutil.which("nvidia-smi")
        if smi is None:
            return []
        words = [smi, f"--query-gpu={query}", "--format=csv,noheader,nounits"]
        which = _torch_uuid() or _torch_bus_id()
        if which:
            words += ["-i", which]
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=10, check=True)
        except (OSError, subprocess.SubprocessError):
            return []
        lines = done.stdout.strip().splitlines()
        # Several lines: nothing said which of the GPUs is meant, and another one's readings would be worse than none.
        return [value.strip() for value in lines[0].split(",")] if len(set(lines)) == 1 else []


def _nvml_handle(nvml: Any) -> Any:
    """The device torch uses, by its id, else by its place on the bus: CUDA numbers devices otherwise than NVML (its own
    order, CUDA_VISIBLE_DEVICES). `LookupError` rather than another GPU's readings."""
    uuid = _torch_uuid()
    if uuid:
        for form in (uuid, uuid.encode()):
            with contextlib.suppress(Exception):
                return nvml.nvmlDeviceGetHandleByUUID(form)
    bus = _torch_bus_id()
    if bus:
        for form in (bus, bus.encode()):
            with contextlib.suppress(Exception):
                return nvml.nvmlDeviceGetHandleByPciBusId(form)
    if nvml.nvmlDeviceGetCount() != 1:
        raise LookupError("which of the GPUs torch uses is not known")
    return nvml.nvmlDeviceGetHandleByIndex(0)


def _torch_uuid() -> str | None:
    with contextlib.suppress(Exception):
        import torch

        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        return uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
    return None


def _torch_bus_id() -> str | None:
    with contextlib.suppress(Exception):
        import torch

        props = torch.cuda.get_device_properties(torch.cuda.current_device())
        return f"{props.pci_domain_id:08x}:{props.pci_bus_id:02x}:{props.pci_device_id:02x}.0"
    return None


def chip() -> str | None:
    """Eight hex digits that tell this GPU from others of its kind: times of two chips differ by a percent or two."""
    uuid = _torch_uuid()
    return None if uuid is None else hashlib.sha256(uuid.encode()).hexdigest()[:8]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


# ---------------------------------------------------------------- source
def git_state(package: Path | None = None) -> tuple[str | None, bool | None]:
    """(commit, whether the package's folder differs from it), new files included; (None, None) outside a repository.

    The rest of the repository does not count: results are appended to while a sweep runs.
    """
    folder = package or paths.package()

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.strip()

    try:
        # A wheel installed inside somebody else's repository must not claim that repository's commit.
        if not git("ls-files", "."):
            return None, None
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "."))
    except (OSError, subprocess.SubprocessError):
        return None, None


def source_hash(kernel: KernelId, plan: str | None = None) -> str:
    """Hash of the version's files and its lib; for a plan given as "module:Class", of the module's file."""
    if plan is None:
        from mla_var3.catalogue import registry

        return registry.source_hash(kernel)
    with contextlib.suppress(ImportError, ValueError, OSError):
        spec = util.find_spec(plan.partition(":")[0])
        if spec is not None and spec.origin:
            return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()[:16]
    return "unknown"
