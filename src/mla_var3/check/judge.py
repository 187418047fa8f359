"""Is a kernel right? `compare` judges one result, `check` drives a kernel through the cases of its workload.

Cases, oracle and bounds are the workload's (`mla_var3.workload`); what a case does with a kernel is the same for all.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from mla_var3.errors import Infeasible, Unsupported, UserError, Verdict, nearest
from mla_var3.workload import Bound, Case, Output, Workload

if TYPE_CHECKING:
    import torch

    from mla_var3.device import Device
    from mla_var3.runtime.plan import KernelPlan
    from mla_var3.runtime.types import Kernel, Tiling


def bounds_of(plan: Any, dist: str) -> dict[str, Bound]:
    """The bounds of a plan's workload on inputs of a distribution, wider by the plan's `cos_slack`: that of a kernel
    whose design rounds once more. `lse_slack` is added to the absolute bound of a log-sum-exp, whose cosine difference
    is not judged then: that of a library which sums rounded weights."""
    slack, of_lse = getattr(plan, "cos_slack", 0.0), getattr(plan, "lse_slack", 0.0)
    bounds = plan.workload.bounds(dist)
    if of_lse:
        bounds = {**bounds, "lse": replace(bounds["lse"], abs=bounds["lse"].abs + of_lse, cos=math.inf)}
    if lacks := [output.name for output in plan.workload.outputs if output.name not in bounds]:
        raise UserError(
            f"bounds of workload {plan.workload.name} lacks {', '.join(lacks)}: return one Bound for each output."
        )
    return {
        name: replace(b, cos=b.cos + slack, row_cos=b.row_cos + slack) if math.isfinite(b.row_cos) else b
        for name, b in bounds.items()
    }


@dataclass(frozen=True)
class Off:
    """How far one output is from its reference. error: relative (Frobenius) where rows are judged, else the largest
    one, absolute where the reference is below 1 and relative to it elsewhere. cos, row_cos: cosine difference of all of
    it and of the worst row. largest: absolute error."""

    error: float = math.inf
    cos: float = math.inf
    row_cos: float = math.inf
    largest: float = math.inf


@dataclass(frozen=True)
class ErrorReport:
    """How far a result is from the reference. outputs: by name. reason: the first bound that broke, with numbers."""

    ok: bool
    reason: str
    outputs: dict[str, Off]

    def __bool__(self) -> bool:
        return self.ok

    def to_record(self) -> dict[str, float]:
        return {name: off.error for name, off in self.outputs.items()}


@dataclass(frozen=True)
class CaseResult:
    """One case of a check: its name, the seed of its inputs, how it was bound ("plan" or "bind"), and its error."""

    name: str
    ok: bool
    reason: str
    seed: int
    via: str
    label: str
    error: ErrorReport

    def to_record(self) -> dict[str, Any]:
        data = {"name": self.name, "ok": self.ok, "seed": self.seed, "via": self.via, "problem": self.label}
        data["error"] = self.error.to_record()
        if not self.ok:
            data["reason"] = self.reason
        return data


@dataclass(frozen=True)
class CheckReport:
    """The verdict on a kernel. error: the worst over the cases. left_out: why, of each case whose problem the version
    does not take. Truthiness is ok."""

    ok: bool
    reason: str
    error: dict[str, float]
    cases: list[CaseResult] = field(default_factory=list)
    seeds: tuple[int, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.ok

    def to_record(self) -> dict[str, Any]:
        cases = [c.to_record() for c in self.cases]
        return {"ok": self.ok, "reason": self.reason, "error": self.error, "seeds": list(self.seeds), "cases": cases}


# ---------------------------------------------------------------- judging one result
#: What a `partial` output holds before a call: exact in every dtype. Where it is of integers, all their bits are set.
UNTOUCHED = -8192.0


def untouched(x: torch.Tensor) -> float:
    """`UNTOUCHED` as a value of x."""
    if x.is_floating_point():
        return UNTOUCHED
    import torch

    return -1 if torch.iinfo(x.dtype).min < 0 else torch.iinfo(x.dtype).max


def compare(
    workload: Workload, outputs: Sequence[torch.Tensor], references: Sequence[torch.Tensor], bounds: Mapping[str, Bound]
) -> ErrorReport:
    """Judges the outputs of a workload against references of the same shapes in higher precision.

    Where the reference of a `partial` output is NaN, the output must still be `untouched`; of others it must be NaN.
    Where a reference is infinite the output must be the same infinity; elsewhere it must be finite. A row whose
    reference is 0 must be exactly 0.
    """
    found: dict[str, Off] = {}
    reason = ""
    for output, answer, reference in zip(workload.outputs, outputs, references, strict=True):
        why, found[output.name] = _judge_output(output, answer, reference, bounds[output.name])
        reason = reason or why
    return ErrorReport(not reason, reason, found)


def _judge_output(output: Output, answer: torch.Tensor, reference: torch.Tensor, bound: Bound) -> tuple[str, Off]:
    import torch

    name = output.name
    if answer.shape != reference.shape:
        return f"{name} has shape {tuple(answer.shape)}, expected {tuple(reference.shape)}", Off()
    if output.dtype is not None and answer.dtype != getattr(torch, output.dtype):
        return f"{name} is {answer.dtype}, expected torch.{output.dtype}", Off()
    if output.partial:
        nobodys = torch.isnan(reference)
        touched = nobodys & (answer != untouched(answer))
        if bool(touched.any()):
            return f"{name} was written where it must stay as it was, in {_where(touched)}", Off()
        answer, reference = answer.masked_fill(nobodys, 0.0), reference.masked_fill(nobodys, 0.0)
    a, r = answer.double(), reference.double()
    if output.unordered:
        moved = (a < 0) != (r < 0)
        if bool(moved.any()):
            return (
                f"{name} names something where its reference does not, or the other way round, in {_where(moved)}",
                Off(),
            )
        a, r = a.sort(-1).values, r.sort(-1).values
    infinite = torch.isinf(r)
    odd = (torch.isinf(a) | infinite) & (a != r) & ~torch.isnan(a)
    if bool(odd.any()):
        return f"{name} is infinite where its reference is not, or the other way round, in {_where(odd)}", Off()
    missing = torch.isnan(r)
    bad = ~torch.isfinite(a) & ~(infinite & (a == r)) & ~missing
    if bool(bad.any()):
        return f"{name} is not finite in {_where(bad)}", Off()
    hidden = missing & ~torch.isnan(a)
    if bool(hidden.any()):
        return f"{name} is a number where its reference is NaN, in {_where(hidden)}", Off()
    if output.rows:
        stray = (a != 0).any(dim=-1) & (r == 0).all(dim=-1)
        if bool(stray.any()):
            return f"{name} is not 0 in a row whose reference is 0, in {_where(stray)}", Off()
    judged_already = infinite | missing
    if bool(judged_already.any()):
        a, r = a.masked_fill(judged_already, 0.0), r.masked_fill(judged_already, 0.0)

    diff = (a - r).abs_()
    beyond = diff - bound.ulps * torch.finfo(answer.dtype).eps * r.abs() if bound.ulps else diff
    fails = (beyond >= bound.abs) & (beyond >= bound.rel * (r.abs() + 1e-6))
    over = diff.square().sum(dim=-1) if output.rows else diff.square()
    ref_square, ans_square = (x.square().sum(dim=-1) if output.rows else x.square() for x in (r, a))
    total = float(ref_square.sum())
    cos = float(over.sum()) / (total + float(ans_square.sum())) if total >= 1e-12 else 0.0
    worst_row, row_cos = 0.0, None
    if output.rows:
        row_cos = torch.where(ref_square < 1e-12, 0.0, over / (ref_square + ans_square).clamp(min=1e-300))
        worst_row = float(row_cos.max()) if row_cos.numel() else 0.0
    largest = float(diff.max()) if diff.numel() else 0.0
    relative = math.sqrt(float(over.sum()) / total) if total > 0 else 0.0
    worst = float((diff / r.abs().clamp(min=1.0)).max()) if diff.numel() else 0.0
    off = Off(relative if output.rows else worst, cos, worst_row, largest)

    axes = ", ".join(output.axes)
    if bool(fails.any()):
        at = _position(int(torch.where(fails, diff, -1.0).argmax()), a.shape)
        values = f"it is {a[at]:.8g}, expected {r[at]:.8g}"
        return f"{name} {_count(fails)} beyond the bounds; at ({axes}) = {at} {values}", off
    if cos >= bound.cos:
        return f"{name}'s cosine difference is {cos:.3g}, bound {bound.cos:.3g}", off
    if row_cos is not None and worst_row >= (most := bound.of_row(a.shape[-1])):
        at = _position(int(row_cos.argmax()), row_cos.shape)
        rows = ", ".join(output.axes[:-1])
        return f"{name}'s cosine difference in row ({rows}) = {at} is {worst_row:.3g}, bound {most:.3g}", off
    return "", off


def _position(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    at: list[int] = []
    for size in reversed(shape):
        flat, rest = divmod(flat, size)
        at.insert(0, rest)
    return tuple(at)


def _count(mask: torch.Tensor) -> str:
    return f"{int(mask.sum())} of {mask.numel()} elements"


def _where(mask: torch.Tensor) -> str:
    first = _position(int(mask.flatten().to(dtype=mask.dtype).int().argmax()), mask.shape)
    return f"{_count(mask)}, first at {first}"


# ---------------------------------------------------------------- driving a kernel through cases
def check(
    plan: KernelPlan | type[KernelPlan],
    problem: Any = None,
    tiling: Tiling | None = None,
    device: str = "cuda",
    *,
    quick: bool = False,
    seeds: Sequence[int] | None = None,
    cases: Sequence[str] | None = None,
    hardware: Device | None = None,
) -> CheckReport:
    """Runs a kernel version through the cases of its workload and judges every result.

    plan: a plan, or its class with a problem and perhaps a tiling. device: the torch device to run on. hardware: the
    device to plan for (default: the plan's, else the one detected). quick: the cases of the workload's `quick`. seeds:
    one pass for each; a fresh one by default, recorded in the report. cases: names, in place of all or quick ones.

    In each case outputs and floating-point workspaces are filled with NaN (`partial` outputs as `untouched` says)
    before the call, the call is repeated and must give the same bits (unless the plan says that it is not
    deterministic), and the inputs must not change. "own" is planned; the other cases are bound to that kernel, except
    those that are `planned`, each a problem of its own: one that the version does not take is left out, and the report
    says why. A wrong result is a report with ok = False. What the kernel itself raises is raised, with the case's name
    added, and with what was wrong before.
    """
    plan_cls, problem, tiling, hardware, compiled = _resolve(plan, problem, tiling, device, hardware)
    workload: Workload = plan_cls.workload
    on_gpu = str(device).startswith("cuda")
    wanted = wanted_cases(plan_cls, quick, cases)
    if seeds is None:
        seeds = (random.SystemRandom().randrange(1 << 30),)
    results: list[CaseResult] = []
    left_out: dict[str, str] = {}
    for base_seed in seeds:
        run = _Run(plan_cls, tiling, hardware, device, compiled)
        given = [case for case in workload.cases(problem, on_gpu) if on_gpu or cases is not None or not case.gpu]
        binds = any(case.name in wanted and not case.planned for case in given)
        for index, case in enumerate(given):
            if case.name not in wanted and not (index == 0 and binds):  # the first is what others are bound to
                continue
            if index and case.planned and not (taken := _takes(plan_cls, case.problem)):
                left_out[case.name] = taken.reason
                continue
            seed = base_seed + 101 * index
            try:
                verdict = run.case(case, seed)
            except Exception as error:
                error.add_note(f"while checking case {case.name!r} with seed {seed}")
                if before := report(results, ()).reason:
                    error.add_note(f"wrong before it: {before}")
                raise
            if case.name in wanted and verdict is not None:
                via = "plan" if case.planned else "bind"
                results.append(
                    CaseResult(case.name, verdict.ok, verdict.reason, seed, via, case.problem.label, verdict)
                )
    return replace(report(results, tuple(seeds)), left_out=left_out)


def _takes(plan_cls: Any, problem: Any) -> Verdict:
    """Whether a version plans a problem, whatever the device; a plan that states no requirement plans all."""
    if getattr(plan_cls, "requires", None) is None:
        return Verdict.yes()
    try:
        plan_cls(problem).require()
    except Unsupported as error:
        return Verdict.no(str(error))
    except Infeasible:
        pass  # planning it says so, with the case's name
    return Verdict.yes()


def wanted_cases(plan: Any, quick: bool = False, cases: Sequence[str] | None = None) -> tuple[str, ...]:
    """Names of the cases that a check runs: those given, else all (or quick) ones that the plan's class does not leave
    out, as a wrapped library's interface may rule some out. An unknown name is a `UserError`."""
    workload: Workload = plan.workload
    if cases is not None:
        for name in cases:
            if name not in workload.case_names:
                raise UserError(f"check case {name!r} is unknown: {nearest(name, workload.case_names)}.")
        return tuple(cases)
    names = workload.quick if quick else tuple(workload.case_names)
    return tuple(name for name in names if name not in getattr(plan, "leaves_out", ()))


def _resolve(
    plan: Any, problem: Any, tiling: Tiling | None, device: str, hardware: Device | None
) -> tuple[Any, Any, Tiling | None, Device | None, dict[Any, Any] | None]:
    """The plan's class, problem, tiling and device, and the compiled functions of a plan, which others of it share."""
    compiled = None
    if not isinstance(plan, type):
        compiled = getattr(plan, "compiled", None)
        problem = plan.problem if problem is None else problem
        tiling = plan.tiling if tiling is None else tiling
        hardware = plan.device if hardware is None else hardware
        plan = type(plan)
    if problem is None:
        raise UserError("check() needs a problem when it is given a plan's class: pass one.")
    if hardware is None and str(device).startswith("cuda"):
        from mla_var3.device import Device

        hardware = Device.detect()
    return plan, problem, tiling, hardware, compiled


def report(results: list[CaseResult], seeds: tuple[int, ...]) -> CheckReport:
    """The verdict on all cases; error: the worst of each output. Cases that share a name are told apart by label."""
    failed = [c for c in results if not c.ok]
    labels = {name: len({c.label for c in results if c.name == name}) for name in {c.name for c in results}}
    names = [f"{c.name} {c.label}" if labels[c.name] > 1 else c.name for c in failed]
    reason = "; ".join(f"{name} (seed {c.seed}): {c.reason}" for name, c in list(zip(names, failed, strict=True))[:3])
    if len(failed) > 3:
        reason += f"; and {len(failed) - 3} more cases"
    error: dict[str, float] = {}
    for result in results:
        for name, value in result.error.to_record().items():
            error[name] = max(error.get(name, 0.0), value)
    return CheckReport(not failed, reason, error, results, seeds)


@dataclass
class _Run:
    """One pass over the cases. kernel: the first one planned, which later cases are bound to."""

    plan_cls: Any
    tiling: Tiling | None
    hardware: Device | None
    device: str
    compiled: Any = None  # what plans share
    kernel: Kernel | None = None

    def case(self, case: Case, seed: int) -> ErrorReport | None:
        """The verdict on one case; None where its inputs cannot be made here."""
        workload: Workload = self.plan_cls.workload
        inputs: tuple[Any, ...] | None = self.inputs(case.problem, seed, case.dist)
        if not isinstance(inputs, tuple):
            raise UserError(
                f"make_inputs of workload {workload.name} returns a {type(inputs).__name__}: return a tuple."
            )
        if case.alter is not None:
            assert inputs is not None
            inputs = case.alter(inputs)
        if inputs is None:
            return None
        kernel, deterministic = self.bound(case, inputs)
        if case.then is not None:
            kernel()
            for old, new in zip(inputs, self.inputs(case.then, seed + 1, case.dist), strict=True):
                old.copy_(new)
        self.kernel = self.kernel or kernel
        problem = case.then or case.problem
        return judge(
            workload,
            kernel,
            inputs,
            lambda: _oracle(workload, workload.reference(problem, *inputs)),
            bounds_of(self.plan_cls, case.dist),
            case.problem.torch_dtype,
            deterministic,
        )

    def inputs(self, problem: Any, seed: int, dist: str) -> tuple[Any, ...]:
        """Inputs as the plan's class wants them: a wrapped library may not bear every poison."""
        options = getattr(self.plan_cls, "input_options", {})
        return self.plan_cls.workload.make_inputs(problem, self.device, seed=seed, dist=dist, **options)

    def bound(self, case: Case, inputs: Sequence[Any]) -> tuple[Kernel, bool]:
        """The kernel of a case, and whether it is deterministic: planned when the case wants that or there is none
        yet, else bound to the first one."""
        if self.kernel is not None and not case.planned:
            return self.kernel.bind(*inputs), bool(getattr(self.plan_cls, "deterministic", True))
        tiling = self.tiling
        if tiling is not None and not tiling.validate(case.problem, self.hardware):
            tiling = None
        plan = self.plan_cls(case.problem, tiling, self.hardware)
        if self.compiled is not None:
            plan.compiled = self.compiled
        return plan.plan(*inputs), bool(plan.deterministic)


def _oracle(workload: Workload, references: Any) -> tuple[torch.Tensor, ...]:
    """The references, where they have the form that they are judged in. Raises `UserError` where not: then no kernel
    is wrong, but the workload."""
    import torch

    names, said = [output.name for output in workload.outputs], f"the reference of workload {workload.name}"
    if not isinstance(references, tuple) or not all(isinstance(x, torch.Tensor) for x in references):
        raise UserError(
            f"{said} returns a {type(references).__name__}: return a tuple of tensors, ({', '.join(names)})."
        )
    if len(references) != len(names):
        raise UserError(f"{said} returns {len(references)} tensors: return one for each output, ({', '.join(names)}).")
    for name, x in zip(names, references, strict=True):
        if x.is_floating_point() and x.element_size() < 4:
            raise UserError(f"{said} gives {name} in {x.dtype}: compute it in float64, or at least in float32.")
    return references


def judge(
    workload: Workload,
    kernel: Any,
    inputs: Sequence[torch.Tensor],
    reference_fn: Callable[[], tuple[Any, ...]],
    bounds: Mapping[str, Bound],
    dtype: torch.dtype,
    deterministic: bool,
) -> ErrorReport:
    """Runs a kernel twice over poisoned outputs, and compares with the oracle and with the first run; where calls can
    share a schedule, once more with one, which must give the same bits.

    The inputs must not change, but where the workload's `updates` held NaN (those over 2^31 elements are not watched);
    outputs without a dtype of their own must be of `dtype`.
    """
    watched = [(x, x.clone(), i in workload.updates) for i, x in enumerate(inputs) if x.numel() < 2**31]
    _poison(workload, kernel)
    kernel()
    first = [x.clone() for x in kernel.output_tensors]
    for x, before, updated in watched:
        if not _same_bits(x.where(before == before, before) if updated else x, before):
            return _wrong(workload, "the call changed its inputs")
    for output, x in zip(workload.outputs, first, strict=True):
        if output.dtype is None and x.dtype != dtype and (x.is_floating_point() or not output.bits):
            return _wrong(workload, f"{output.name} is {x.dtype}, expected {dtype}")
    references = reference_fn()
    verdict = compare(workload, first, references, bounds)
    if not verdict.ok:
        return verdict
    _poison(workload, kernel)
    second = kernel()
    if deterministic and not all(_same_bits(x, y) for x, y in zip(first, second, strict=True)):
        return replace(verdict, ok=False, reason="two calls with the same inputs gave different bits")
    if (sharing := kernel.sharing()) is not kernel:
        _poison(workload, kernel)
        if not all(_same_bits(x, y) for x, y in zip(first, sharing(), strict=True)):
            return replace(verdict, ok=False, reason="a call that shares its schedule gave different bits")
    if not deterministic:
        again = compare(workload, second, references, bounds)
        return verdict if again.ok else replace(again, reason=f"the second call: {again.reason}")
    return verdict


def _wrong(workload: Workload, reason: str) -> ErrorReport:
    return ErrorReport(False, reason, {output.name: Off() for output in workload.outputs})


#: What an output of integers holds before a call, of which all is to be written.
_NOT_WRITTEN = -77


def _poison(workload: Workload, kernel: Any) -> None:
    for output, x in zip(workload.outputs, kernel.output_tensors, strict=True):
        # A finite value where part of an output is to stay: NaN there would hide that an input's NaN was copied.
        if output.partial:
            x.fill_(untouched(x))
        elif x.is_floating_point():
            x.fill_(math.nan)
        else:
            x.fill_(_NOT_WRITTEN)
    for x in getattr(kernel, "workspace_tensors", ()):
        if x.is_floating_point():
            x.fill_(math.nan)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    import torch

    ints = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(ints), b.contiguous().view(ints))
