"""What to profile, as plain data that travels to other processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mla_var3.catalogue.registry import KernelId, all_kernels
from mla_var3.errors import UserError, nearest
from mla_var3.lab.profiling import MODES
from mla_var3.workload import Problem, problem_from_record

OUT = "out/profiles"
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Request:
    """One profile.

    tiling: knobs that differ from the default. baseline: a version to compare with. device: key to compile for; None is
    the GPU that is here, else h200. launches: profiled calls (ncu, nsys, timeline). kernel_name: regular expression of
    the device functions that ncu profiles; None is the names of the version's own. timeout_s: of one profiler run.
    """

    kernel: KernelId
    problem: Problem
    mode: str = "annotation"
    tiling: Mapping[str, Any] = field(default_factory=dict, hash=False)
    baseline: KernelId | None = None
    device: str | None = None
    tune: bool = False
    launches: int = 1
    kernel_name: str | None = None
    out: str = OUT
    timeout_s: float = TIMEOUT_S

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UserError(f"profile mode {self.mode!r} is unknown: {nearest(self.mode, MODES)}.")
        if self.launches < 1:
            raise UserError(f"launches = {self.launches} is too small: profile at least one call.")
        if self.timeout_s <= 0:
            raise UserError(f"timeout = {self.timeout_s:g} s must be above 0.")

    def to_record(self) -> dict[str, Any]:
        return {
            "kernel": self.kernel.to_record(),
            "problem": self.problem.to_record(),
            "mode": self.mode,
            "tiling": dict(self.tiling),
            "baseline": None if self.baseline is None else self.baseline.to_record(),
            "device": self.device,
            "tune": self.tune,
            "launches": self.launches,
            "kernel_name": self.kernel_name,
            "out": self.out,
            "timeout_s": self.timeout_s,
        }

    @classmethod
    def from_record(cls, data: Mapping[str, Any]) -> Request:
        fields = dict(data)
        fields["kernel"] = KernelId(**fields["kernel"])
        fields["problem"] = problem_from_record(fields["problem"])
        if fields.get("baseline") is not None:
            fields["baseline"] = KernelId(**fields["baseline"])
        return cls(**fields)


def version_before(kernel: KernelId) -> KernelId | None:
    """The version of the same design and language that comes before, None for the first."""
    older = [
        k
        for k in all_kernels()
        if (k.language, k.layer, k.design) == (kernel.language, kernel.layer, kernel.design)
        and k.version < kernel.version
    ]
    return max(older, key=lambda k: k.version, default=None)


def baseline_of(kernel: KernelId, text: str | None, mode: str) -> KernelId | None:
    """What `--baseline` means: a label, "none", or, left out, the version before (in mode annotation)."""
    if text is None:
        return version_before(kernel) if mode == "annotation" else None
    return None if text == "none" else KernelId.parse(text)
