"""`BenchSettings`: everything about a measurement that can be set."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mla_var3.errors import UserError, nearest

MODES = ("time", "check", "compile")


@dataclass(frozen=True)
class BenchSettings:
    """How a cell is measured. Durations in the unit of the name's suffix; limits are what a phase may take.

    Raises `UserError` for a value that makes no sense.
    """

    # ---- how far a point goes
    mode: str = "time"  #: time; check: stop once it is right; compile: stop once it is compiled, running nothing
    quick_check: bool = True  #: the short list of cases of `mla_var3.check.judge`
    resources: bool = True  #: compile for registers, shared memory and instruction counts
    backend: str = "auto"  #: auto: CUDA where there is a device, else the CPU; or "module:Class" of a `Backend`

    # ---- inputs
    cold_mb: float = 256.0  #: distinct input sets that calls rotate over, so that the L2 never holds the next one
    max_sets: int = 512  #: most input sets, however small they are
    dist: str = "normal"  #: of `mla_var3.workload.decode`; random data, because zeros draw less power
    seed: int = 0  #: of the first input set

    # ---- burst: a cool chip
    graph_ms: float = 4.0  #: a graph holds as many rotations over the input sets as take this long, at least one
    idle_ms: float = 30.0  #: gap before the replays of a round
    burst_replays: int = 4  #: replays after a gap; the best one is the round's sample
    burst_rounds: int = 5  #: samples; contenders take turns, in reversed order every other round. 0 leaves burst out

    # ---- sustained: at the chip's power limit
    sustained_s: float = 0.4  #: back-to-back replays in one turn; its second half is used
    sustained_rounds: int = 1  #: turns, in reversed order every other one. 0 leaves sustained out

    settle_s: float = 1.6  #: replays back to back that are thrown away before the first contender's sustained turn
    rest_s: float = 0.0  #: above 0: every sustained turn stands behind a rest this long, and none behind `settle_s`

    limits_every_s: float = 0.0  #: a cell takes the run's limits of the same process if younger; 0: each has its own

    # ---- beside
    host_calls: int = 30  #: calls whose host time is taken
    cross_check_ms: float = 5.0  #: length of the graph of `do_bench_cudagraph`, replayed 10 times; 0 leaves it out
    timeline: bool = False  #: how a call's time is divided among its kernels, by torch's profiler, after the timing
    overlap_probe: bool = True  #: look for calls that run beside the one before, and prevent it
    tune_budget_s: float = 60.0  #: no new tiling is tried after this
    tune_cache: str | None = None  #: folder of tuning results; null: the user's cache folder

    # ---- memory
    memory_headroom: float = 0.92  #: part of the device's memory that a cell may need

    # ---- what a phase may take before its contender counts as hung
    startup_limit_s: float = 300.0  #: imports, the device and the buffers of the limits
    plan_limit_s: float = 120.0
    compile_limit_s: float = 240.0
    check_limit_s: float = 240.0
    tune_limit_s: float = 900.0
    prepare_limit_s: float = 240.0
    time_limit_s: float = 60.0

    give_up: int = 3  #: a contender that ended the worker this often is skipped in the cells left; 0: never

    # ---- worker
    commit: str | None = None  #: for the records, where the tree travels without its .git
    worker_env: tuple[tuple[str, str], ...] = ()  #: environment variables of the worker, as pairs

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_type(field, getattr(self, field.name))
        if self.mode not in MODES:
            raise UserError(f"bench mode {self.mode!r} is unknown: {nearest(self.mode, MODES)}.")
        env: Any = self.worker_env
        pairs = env.items() if isinstance(env, Mapping) else env
        object.__setattr__(self, "worker_env", tuple((str(k), str(v)) for k, v in pairs))
        least = {"max_sets": 1, "burst_replays": 1, "burst_rounds": 0, "sustained_rounds": 0, "give_up": 0}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise UserError(f"bench setting {name} = {getattr(self, name)} is too small: use at least {low}.")
        for field in dataclasses.fields(self):
            if field.name.endswith("_limit_s") and getattr(self, field.name) <= 0:
                raise UserError(f"bench setting {field.name} = {getattr(self, field.name)} must be above 0.")
        if self.mode == "time" and not (self.burst_rounds or self.sustained_rounds):
            raise UserError("bench settings leave out burst and sustained: give one of them at least a round.")

    @classmethod
    def fast(cls, **changes: Any) -> BenchSettings:
        """About 0.6 s a contender in place of 1 s: fewer rounds, a shorter soak, no cross-check."""
        return dataclasses.replace(cls(**_FAST), **changes)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> BenchSettings:
        """From a mapping of field names, and `preset` ("standard" or "fast") that they change.

        An unknown name is a `UserError` that says which is nearest.
        """
        values = dict(values)
        preset = str(values.pop("preset", "standard"))
        if preset not in ("standard", "fast"):
            raise UserError(f"bench preset {preset!r} is unknown: {nearest(preset, ('standard', 'fast'))}.")
        names = [f.name for f in dataclasses.fields(cls)]
        for name in values:
            if name not in names:
                raise UserError(f"bench has no setting {name!r}: {nearest(str(name), names)}.")
        return cls.fast(**values) if preset == "fast" else cls(**values)

    def limit_s(self, phase: str) -> float:
        """Most seconds that a phase may take; tuning's is at least its budget and two minutes."""
        limit = float(getattr(self, f"{phase}_limit_s"))
        return max(limit, self.tune_budget_s + 120.0) if phase == "tune" else limit

    def to_record(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def _check_type(field: dataclasses.Field[Any], value: Any) -> None:
    """Refuses a value of another type than the default's: a command line makes numbers of what looks like one."""
    if field.name == "worker_env" or (value is None and field.default is None):
        return
    if isinstance(field.default, bool):
        right, what = isinstance(value, bool), "true or false"
    elif isinstance(field.default, int):
        right, what = isinstance(value, int) and not isinstance(value, bool), "a whole number"
    elif isinstance(field.default, float):
        right, what = isinstance(value, int | float) and not isinstance(value, bool), "a number"
    else:
        right, what = isinstance(value, str), f"text: '\"{value}\"' on a command line"
    if not right:
        raise UserError(f"bench setting {field.name} = {value!r} is not right: give {what}.")


_FAST: dict[str, Any] = {
    "burst_rounds": 3,
    "idle_ms": 20.0,
    "sustained_s": 0.3,
    "host_calls": 15,
    "cross_check_ms": 0.0,
}


def from_record(data: Mapping[str, Any]) -> BenchSettings:
    """Inverse of `BenchSettings.to_record`, through JSON."""
    return BenchSettings(**dict(data))
