"""Autotuning: measure every feasible tiling, record those that fail, keep the result on disk.

Before a tiling is timed, its compiled code is read where a compiler chooses the matrix instructions (cuTile): one that
falls off the tensor-core path is refused by its instruction counts. And its result is compared with that of the first
tiling that ran: a wrong one never gets a time.

Results live as one JSON file a key under `cache_dir` (default: `$XDG_CACHE_HOME/mla_var3/tuning`). The key covers
the problem class, the sizes b and t, the device, the kernel's source and the versions of what generates its code; a
change in any of them tunes again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mla_var3.errors import Infeasible, UserError
from mla_var3.files import write_whole
from mla_var3.runtime.types import Tiling
from mla_var3.toolchain import mistakes
from mla_var3.toolchain.source import source_hash
from mla_var3.toolchain.versions import GENERATES, installed

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.toolchain.compiled import CompiledKernel

#: Most that two tilings' results may be apart, of their norm: each has an error of some 2e-3 in bf16.
SAME = 2e-2

#: Median microseconds of a kernel.
Measure = Callable[[Any], float]


class Tunable(Protocol):
    """What the tuner asks of a kernel; `mla_var3.runtime.base.BaseKernel`, whose method calls it, has all of it."""

    name: str
    output_tensors: tuple[Any, ...]

    @property
    def plan(self) -> Any: ...

    @property
    def compiler_picks_products(self) -> bool: ...

    def __call__(self) -> tuple[Any, ...]: ...

    def configs(self) -> list[Any]: ...

    def retile(self, tiling: Any) -> Tunable: ...

    def compile(self, out_dir: Path | None, device: Device, keep: Sequence[str] = ()) -> CompiledKernel: ...


@dataclass(frozen=True)
class Trial:
    """One tiling tried. time_us: median.

    status: measured; infeasible; refused, by its compiled code; incorrect; failed; not reached, as the budget ended.
    """

    tiling: dict[str, Any]
    status: str
    reason: str = ""
    time_us: float | None = None


@dataclass(frozen=True)
class TuneResult:
    """best: the fastest tiling. trials: every one, in the order tried. from_cache: nothing was measured this time."""

    best: Any
    trials: list[Trial] = field(default_factory=list)
    from_cache: bool = False


def default_cache_dir() -> Path:
    """Where tuning results are kept unless a caller says otherwise."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mla_var3" / "tuning"


def tuning_key(kernel: Tunable) -> str:
    """Name of the cache entry: readable front, then a hash over everything the result depends on."""
    plan = kernel.plan
    problem = plan.problem.to_record() if plan is not None else {}
    device = plan.device.key if plan is not None and plan.device is not None else "unknown"
    parts = {
        "name": kernel.name,
        "plan": type(plan).__module__ if plan is not None else "",
        "problem": problem,
        "device": device,
        "source": _source_of(kernel),
        "packages": installed(("torch", *(name for names in GENERATES.values() for name in names))),
        "configs": [_record(c) for c in kernel.configs()],
    }
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:20]
    return f"{kernel.name}-{device}-{digest}"


def _source_of(kernel: Tunable) -> str:
    """Hash of the import closure of the plan's file, or of the kernel class's where there is no plan."""
    owner = kernel.plan if kernel.plan is not None else kernel
    file = getattr(sys.modules.get(type(owner).__module__), "__file__", None)
    return source_hash(Path(file)) if file else ""


def _record(tiling: Any) -> Any:
    return tiling.to_record() if isinstance(tiling, Tiling) else tiling


def autotune(
    kernel: Tunable,
    measure: Measure,
    *,
    budget_s: float = 60.0,
    cache_dir: Path | None = None,
    progress: bool = True,
) -> TuneResult:
    """Times `kernel` in every feasible tiling of its plan and returns the fastest.

    measure: kernel -> median microseconds, such as `measure.timing.median_us`. budget_s: no new tiling is begun after
    this many seconds (one that runs is finished). progress: a line per trial on stderr. Raises `UserError` when no
    tiling could be measured, with the reason of the first failure.
    """
    path = (cache_dir or default_cache_dir()) / f"{tuning_key(kernel)}.json"
    cached = _load(path, kernel)
    if cached is not None:
        return cached
    configs = kernel.configs()
    start = time.monotonic()
    trials: list[Trial] = []
    gate = _Gate(kernel)
    for i, tiling in enumerate(configs):
        late = time.monotonic() - start > budget_s
        reason = f"the budget of {budget_s:g} s ended before it"
        trial = Trial(_record(tiling), "not reached", reason) if late else _try(kernel, tiling, measure, gate)
        trials.append(trial)
        if progress:
            shown = f"{trial.time_us:.1f} us" if trial.time_us is not None else f"{trial.status}: {trial.reason}"
            print(f"tuning {kernel.name} {i + 1}/{len(configs)}: {tiling} -> {shown}", file=sys.stderr, flush=True)
    timed = [(t.time_us, i) for i, t in enumerate(trials) if t.time_us is not None]
    if not timed:
        first = next((t.reason for t in trials if t.reason), "it has no tilings")
        raise UserError(f"no tiling of {kernel.name} could be measured; the first reason: {first}")
    result = TuneResult(configs[min(timed)[1]], trials)
    if not any(t.status == "not reached" for t in trials):  # a result cut short is not worth keeping
        _store(path, result)
    return result


def _empty(kernel: Tunable, tiling: Any) -> Tunable | None:
    """The kernel in this tiling without tensors; None where it has none or cannot be planned."""
    if kernel.plan is None or not isinstance(tiling, Tiling):
        return None
    try:
        return kernel.plan.with_tiling(tiling).plan_empty()
    except UserError:
        return None


class _Gate:
    """What a tiling must pass before it is timed: code on the tensor-core path, and the result of the first."""

    def __init__(self, kernel: Tunable) -> None:
        self.kernel = kernel
        self.usual: CompiledKernel | None = None
        self.expected: list[Any] | None = None

    def refuses(self, tiling: Any) -> str:
        """Why the compiled code is not worth timing; "" also where nobody can say (no compiler, no device named)."""
        empty, device = _empty(self.kernel, tiling), getattr(self.kernel.plan, "device", None)
        if empty is None or device is None or not empty.compiler_picks_products:
            return ""
        from mla_var3.toolchain.resources import off_tensor_cores

        try:
            compiled = empty.compile(None, device)
        except Infeasible:
            raise
        except UserError:
            return ""
        reason = off_tensor_cores(compiled, self.usual, device)
        if not reason and self.usual is None:
            self.usual = compiled
        return reason

    def differs(self, candidate: Tunable) -> str:
        """How the result differs from the first tiling's; "" when it does not, or is no tensor of floats."""
        torch = sys.modules.get("torch")
        outputs = [x for x in candidate.output_tensors if torch is not None and torch.is_tensor(x)]
        if torch is None or not outputs or not all(x.is_floating_point() for x in outputs):
            return ""
        for x in outputs:
            x.fill_(float("nan"))
        candidate()
        if self.expected is None:
            self.expected = [x.clone() for x in outputs]
            return ""
        for number, (x, y) in enumerate(zip(outputs, self.expected, strict=True)):
            x, y = x.double(), y.double()
            if not torch.equal(x.isfinite(), y.isfinite()):
                return f"output {number} is finite elsewhere than the first tiling's"
            apart = torch.where(x == y, 0.0, x - y)  # equal infinities: rows without a token
            error = float(apart.norm() / torch.where(y.isfinite(), y, 0.0).norm().clamp_min(1e-30))
            if not error <= SAME:
                return f"output {number} is {error:.3g} of its norm apart from the first tiling's; {SAME:g} is allowed"
        return ""


def _try(kernel: Tunable, tiling: Any, measure: Measure, gate: _Gate) -> Trial:
    record = _record(tiling)
    plan = kernel.plan
    if isinstance(tiling, Tiling) and plan is not None:
        verdict = tiling.validate(plan.problem, plan.device)
        if not verdict:
            return Trial(record, "infeasible", verdict.reason)
    try:
        refused = gate.refuses(tiling)
        if refused:
            return Trial(record, "refused", refused)
        with _quiet_gpu():
            candidate = kernel.retile(tiling)
            wrong = gate.differs(candidate)
            if wrong:
                return Trial(record, "incorrect", wrong)
            time_us = measure(candidate)
    except Infeasible as error:
        return Trial(record, "infeasible", str(error))
    except Exception as error:  # any failure of a candidate is that candidate's result
        return Trial(record, "failed", mistakes.sentence(error))
    if not math.isfinite(time_us) or time_us <= 0:
        return Trial(record, "failed", f"measured {time_us} us")
    return Trial(record, "measured", "", time_us)


@contextlib.contextmanager
def _quiet_gpu() -> Iterator[None]:
    """Surfaces an asynchronous failure inside the candidate that caused it, not in the next one."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.synchronize()


def _load(path: Path, kernel: Tunable) -> TuneResult | None:
    try:
        data = json.loads(path.read_text())
        trials = [Trial(**t) for t in data["trials"]]
        best = next(c for c in kernel.configs() if _record(c) == data["best"])
    except (OSError, ValueError, KeyError, TypeError, StopIteration):
        return None
    return TuneResult(best, trials, from_cache=True)


def _store(path: Path, result: TuneResult) -> None:
    """Writes beside and renames, so that two processes tuning the same kernel never leave a torn file."""
    text = json.dumps({"best": _record(result.best), "trials": [asdict(t) for t in result.trials]}, default=str)
    write_whole(path, text)
