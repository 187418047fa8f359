"""GPUs: their limits and peaks, which one is here, and what it can run.

The figures live in `conf/devices.json`, each with its source; this module only reads them. Importing it costs a
JSON file at most: torch is imported by `Device.detect` alone.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import TYPE_CHECKING, Any

from mla_var3.errors import UserError, Verdict, nearest

if TYPE_CHECKING:
    from mla_var3.workload import Problem

# What a feature needs. "sm_90a": exactly that architecture; "sm_90+": that version and every later one.
FEATURES: Mapping[str, tuple[str, ...]] = {
    "wgmma": ("sm_90a",),
    "tcgen05": ("sm_100a", "sm_103a"),
    "tma": ("sm_90+",),
    # Consumer Blackwell has TMA and clusters but no multicast into the CTAs of a cluster.
    "tma_multicast": ("sm_90a", "sm_100a", "sm_103a"),
    "cluster": ("sm_90+",),
    "setmaxnreg": ("sm_90a", "sm_100a", "sm_103a", "sm_120a"),
    "pdl": ("sm_90+",),
    "fp8": ("sm_89+",),
    "cp_async": ("sm_80+",),
    "bf16": ("sm_80+",),
}

#: What problems may have and most kernels do not take: a field or property of the problem, and why it is refused.
OPTIONS: Mapping[str, str] = {
    "strided_pages": "the kernel reads contiguous caches; the problem's pages lie further apart",
    "packed": "the kernel takes requests with equally many query tokens; the problem's are packed",
    "paged": "the kernel takes indices; the problem has a page table",
    "v41": "the kernel knows no cache of DeepSeek V4.1; the problem's has a layout of it",
    "no_rope": "the kernel reads caches with rope columns; the problem's has none",
    "strided": "the kernel reads contiguous q, indices and page tables; the problem's rows lie further apart",
    "strided_out": "the kernel writes contiguous results; the problem's rows of out and lse lie further apart",
    "strided_kv": "the kernel reads contiguous k and v; the problem's are views of one tensor",
    "grouped": "the kernel has as many heads of keys as of queries; the problem's share them",
    "tree": "the kernel takes no mask but the causal one; the problem has a tree's",
}

_REG_UNIT = 256  # registers are handed to a warp in units of 256
_SMEM_UNIT = 128  # bytes of shared memory, likewise
SUBPARTITIONS = 4  # warps of a CTA are spread over the SM's four register files


@dataclass(frozen=True)
class Requirement:
    """What a kernel version needs of a device and of a problem.

    archs: architectures it is written for, as in `FEATURES` ("sm_90a", "sm_80+"); () is any.
    features: names of `FEATURES`. dtypes: of the problem; () is any.
    problem: a predicate over the problem that returns a `Verdict` (its reason is passed on) or a bool.
    options: names of `OPTIONS` that it takes.
    workload: name of the problem's workload; "" is any. A `KernelPlan` fills it in.
    """

    archs: tuple[str, ...] = ("sm_90a",)
    dtypes: tuple[str, ...] = ("bf16", "fp16")
    features: tuple[str, ...] = ()
    problem: Callable[[Any], Verdict | bool] | None = None
    options: tuple[str, ...] = ()
    workload: str = ""

    def __post_init__(self) -> None:
        for feature in self.features:
            if feature not in FEATURES:
                raise UserError(f"Requirement has an unknown feature {feature!r}: {nearest(feature, FEATURES)}.")
        for option in self.options:
            if option not in OPTIONS:
                raise UserError(f"Requirement has an unknown option {option!r}: {nearest(option, OPTIONS)}.")

    def accepts(self, problem: Problem) -> Verdict:
        """Whether the problem alone is one the kernel takes, on whatever device."""
        if self.workload and problem.workload != self.workload:
            return Verdict(False, f"the kernel computes {self.workload}; the problem is one of {problem.workload}")
        if self.dtypes and problem.dtype not in self.dtypes:
            return Verdict(False, f"the kernel takes {' or '.join(self.dtypes)}; the problem is {problem.dtype}")
        for option, reason in OPTIONS.items():
            if getattr(problem, option, False) and option not in self.options:
                return Verdict(False, reason)
        if self.problem is None:
            return Verdict(True)
        answer = self.problem(problem)
        if isinstance(answer, Verdict):
            return answer
        return Verdict(answer, "" if answer else "the kernel does not take this problem")


@dataclass(frozen=True)
class Ceiling:
    """A measured limit. state: "burst" (cool chip), "sustained" (at its power limit) or "both"."""

    quantity: str
    value: float
    unit: str
    state: str
    date: str
    command: str
    note: str = ""


@dataclass(frozen=True)
class Device:
    """One GPU. Sizes in bytes, rates in GB/s and dense TFLOP/s; None where nothing is published.

    smem_per_block is the opt-in maximum. sources: field (or "tflops.bf16") -> document, URL and note.
    """

    key: str
    name: str
    arch: str
    sm_version: tuple[int, int]
    num_sms: int
    regs_per_sm: int
    max_regs_per_thread: int
    smem_per_sm: int
    smem_per_block: int
    smem_reserved_per_block: int
    max_threads_per_sm: int
    max_threads_per_block: int
    max_ctas_per_sm: int
    l2_bytes: int
    memory_gb: float
    hbm_gbps: float | None = None
    power_w: float | None = None
    boost_mhz: int | None = None
    tflops: Mapping[str, float | None] = field(default_factory=dict, hash=False)
    sources: Mapping[str, str] = field(default_factory=dict, hash=False, compare=False, repr=False)
    measured: tuple[Ceiling, ...] = field(default=(), hash=False)
    known: bool = True

    @staticmethod
    def get(key: str) -> Device:
        """The device of `devices.json` with that key; an unknown key is a `UserError` that names the nearest, and what
        to name in the place of a GPU that has no entry."""
        devices = _devices()
        if key not in devices:
            raise UserError(
                f"There is no device {key!r}: {nearest(key, devices)}. For a GPU that is not among them name one of "
                "its architecture, as a40 for an RTX 3090 (sm_86) and rtx4090 for an L4 (sm_89)."
            )
        return devices[key]

    @staticmethod
    def assumed() -> Device:
        """The device that kernels are planned for where none is named: an H200. Shared memory, threads and number of
        SMs are also those of an H100."""
        return Device.get("h200")

    @staticmethod
    def all() -> list[Device]:
        """Every device of `devices.json`, in its order."""
        return list(_devices().values())

    @staticmethod
    def detect(index: int = 0) -> Device | None:
        """The GPU that torch sees at `index`, or None where there is no torch or no GPU.

        A GPU that is not in `devices.json`, or that shows another number of SMs than its entry (a MIG slice), becomes
        a Device with the driver's limits, no peaks, and `known` False.
        """
        try:
            import torch
        except ImportError:
            return None
        if not torch.cuda.is_available():
            return None
        count = torch.cuda.device_count()
        if not 0 <= index < count:
            raise UserError(f"There is no GPU {index}: torch sees {count}, numbered from 0.")
        return _from_properties(torch.cuda.get_device_properties(index))

    @property
    def mark(self) -> str:
        """What stands beside kernels for this device: "" where a GPU of its architecture has run kernels here, by which
        its ceilings were measured."""
        return "" if any(d.measured for d in Device.all() if d.arch == self.arch) else "compiled, never run"

    def can_run(self, requirement: Requirement, problem: Problem | None = None) -> Verdict:
        """Whether this device (and, where given, this problem) meets the requirement; if not, one sentence says why."""
        for feature in requirement.features:
            needed = FEATURES[feature]
            if not any(self._is(arch) for arch in needed):
                return Verdict(False, f"{feature} needs {_one_of(needed)}; this is {self.arch}")
        if requirement.archs and not any(self._is(arch) for arch in requirement.archs):
            return Verdict(False, f"the kernel is written for {_one_of(requirement.archs)}; this is {self.arch}")
        return Verdict(True) if problem is None else requirement.accepts(problem)

    def ctas_per_sm(self, registers: int, smem: int, threads: int) -> int:
        """CTAs of one kernel that fit on an SM at a time; 0 when not even one does.

        registers: per thread at launch (what `setmaxnreg` moves later does not count). smem: static plus dynamic
        bytes of one CTA, without the bytes that CUDA reserves. threads: of one CTA.
        """
        if threads < 1 or threads > self.max_threads_per_block or registers > self.max_regs_per_thread:
            return 0
        if smem > self.smem_per_block:
            return 0
        warps = -(-threads // 32)
        limits = [self.max_ctas_per_sm, self.max_threads_per_sm // (32 * warps)]
        held = _round_up(smem + self.smem_reserved_per_block, _SMEM_UNIT)
        if smem:
            limits.append(self.smem_per_sm // held)
        if registers:
            # A warp's registers lie in one of the SM's four partitions, and a CTA's warps are spread evenly over them.
            per_warp = _round_up(registers * 32, _REG_UNIT)
            if per_warp * _round_up(warps, SUBPARTITIONS) > self.regs_per_sm:
                return 0
            limits.append(self.regs_per_sm // SUBPARTITIONS // per_warp * SUBPARTITIONS // warps)
        return min(limits)

    def max_registers(self, threads: int) -> int:
        """Most registers a thread can have at launch with `threads` threads in the CTA (384 threads: 168)."""
        warps = _round_up(-(-threads // 32), SUBPARTITIONS)
        per_warp = self.regs_per_sm // SUBPARTITIONS // (warps // SUBPARTITIONS)
        return min(self.max_regs_per_thread, per_warp // _REG_UNIT * _REG_UNIT // 32)

    def ceiling(self, quantity: str, state: str) -> Ceiling | None:
        """The newest measured ceiling of that quantity ("matmul_tflops", "read_gbps") in that state."""
        found = [c for c in self.measured if c.quantity == quantity and c.state in (state, "both")]
        return max(found, key=lambda c: c.date, default=None)

    def _is(self, arch: str) -> bool:
        if arch.endswith("+"):
            return self.sm_version >= _version_of(arch[:-1])
        return self.arch == arch


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _version_of(arch: str) -> tuple[int, int]:
    digits = re.fullmatch(r"sm_(\d+)(\d)[af]?", arch)
    if digits is None:
        raise UserError(f"{arch!r} is no architecture: write it like 'sm_90a' or 'sm_80'.")
    return int(digits[1]), int(digits[2])


def _one_of(archs: tuple[str, ...]) -> str:
    return " or ".join(f"{arch[:-1]} or later" if arch.endswith("+") else arch for arch in archs)


@functools.cache
def _file() -> dict[str, Any]:
    text = resources.files("mla_var3").joinpath("conf/devices.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


@functools.cache
def _devices() -> dict[str, Device]:
    data = _file()
    return {entry["key"]: _from_entry(entry, data) for entry in data["devices"]}


def _from_entry(entry: dict[str, Any], data: dict[str, Any]) -> Device:
    def cite(key: str, note: str = "") -> str:
        source = data["sources"][key]
        return f"{source['title']}, {source['url']}" + (f" ({note})" if note else "")

    limits = dict(data["architectures"][entry["arch"]])
    origin, note = limits.pop("source"), limits.pop("note", "")
    sources = {name: cite(origin, note) for name in limits}
    figures = {name: entry[name] for name in ("num_sms", "l2_bytes", "memory_gb", "hbm_gbps", "power_w", "boost_mhz")}
    sources |= {name: cite(f["source"], f.get("note", "")) for name, f in figures.items()}
    sources |= {f"tflops.{dtype}": cite(f["source"], f.get("note", "")) for dtype, f in entry["tflops"].items()}
    return Device(
        key=entry["key"],
        name=entry["name"],
        arch=entry["arch"],
        **{**limits, "sm_version": tuple(limits["sm_version"])},
        **{name: f["value"] for name, f in figures.items()},
        tflops={dtype: f["value"] for dtype, f in entry["tflops"].items()},
        sources=sources,
        measured=tuple(Ceiling(**c) for c in entry["measured"]),
    )


def _from_properties(props: Any) -> Device:
    """The Device of what `torch.cuda.get_device_properties` returned."""
    name = str(props.name)
    for entry in _file()["devices"]:
        if any(re.fullmatch(pattern, name, re.IGNORECASE) for pattern in entry["name_patterns"]):
            device = _devices()[entry["key"]]
            if device.num_sms == props.multi_processor_count:
                return replace(device, name=name)
    version = (int(props.major), int(props.minor))
    arch = f"sm_{version[0]}{version[1]}" + ("a" if version >= (9, 0) else "")
    same: dict[str, Any] = next(
        (limits for limits in _file()["architectures"].values() if tuple(limits["sm_version"]) == version), {}
    )
    fields = {
        "num_sms": props.multi_processor_count,
        "regs_per_sm": getattr(props, "regs_per_multiprocessor", None) or same.get("regs_per_sm", 65536),
        "max_regs_per_thread": same.get("max_regs_per_thread", 255),
        "smem_per_sm": props.shared_memory_per_multiprocessor,
        "smem_per_block": props.shared_memory_per_block_optin,
        "smem_reserved_per_block": same.get("smem_reserved_per_block", 1024 if version >= (8, 0) else 0),
        "max_threads_per_sm": props.max_threads_per_multi_processor,
        "max_threads_per_block": same.get("max_threads_per_block", 1024),
        # torch does not report it; 16 is the fewest of any architecture since 7.0.
        "max_ctas_per_sm": same.get("max_ctas_per_sm", 16),
        "l2_bytes": props.L2_cache_size,
        "memory_gb": round(props.total_memory / 1e9, 1),
    }
    key = re.sub(r"[^a-z0-9]+", "-", name.lower().replace("nvidia", "").replace("geforce", "")).strip("-")
    reported = "torch.cuda.get_device_properties"
    return Device(
        key=key,
        name=name,
        arch=arch,
        sm_version=version,
        sources=dict.fromkeys(fields, reported),
        known=False,
        **fields,
    )
