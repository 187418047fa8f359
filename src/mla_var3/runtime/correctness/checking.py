"""Is a kernel right? `compare` judges one result, `check` drives a kernel through the cases that break kernels.

Bounds
------
On FlashMLA's inputs (N(0, 1) / 10, clamped) they are FlashMLA's own (`FLASHMLA`): every element of out within 8e-4
absolute or 2.01/128 relative, cosine difference below 5e-6, lse within 1e-6 absolute or 8.01/65536 relative (and a
cosine difference below 1e-7). Three things are stricter here: the reference is not rounded to the output's dtype, the
cosine difference must hold in the worst row too, and a row without keys must be exactly 0 with lse = +inf.

On N(0, 1) inputs (`NORMAL`) they follow from two facts. With u = 2^-8, bf16's unit roundoff:

    out: rounding P and out moves an element by at most u · Σ p|v| + u · |out|. With values of spread σ, Σ p|v| is about
         0.8 σ, so the error is at most 2u σ = 7.8e-3 σ where |out| <= σ: FlashMLA's 8e-4 at σ = 0.1. So the absolute
         bound scales with σ: 8e-3 at σ = 1. Relative: 2 units in the last place, 2.01/128, whatever σ is.
    cos: 1 - cos = |Δ|² / (|a|² + |b|²) = ε²/2 with ε the relative error. Rounding has a relative rms of u/√6 = 1.6e-3
         in out, and as much in P where many keys share a row: (2 · u²/6)/2 = 2.5e-6, whatever σ is, so 5e-6 stays for
         the whole. In a row that one key rules, P's error is that key's alone, at most u (0 when P is taken relative
         to the exact maximum, and not when a kernel rescales lazily), and the output's has an rms of at most u/√3,
         where all elements lie just over a power of two: (u² + u²/3)/2 = 1.02e-5 in the worst row. (Nothing but
         these roundings gives 9.2e-6 in the worst of 200,000 rows of 128 keys; a test draws some of them.)
    lse: a logit is a sum of products q·k, its float32 error scales with |q||k|: 1e-6 at spreads of 0.1, 1e-4 at 1.
         Relative: 8.01/65536.

The dominant inputs have FlashMLA's values with one key ruling each row: FlashMLA's bounds with that (`DOMINATED`).
A kernel that rounds a third time by its design says so in its plan (`cos_slack`, `ROUNDED_ONCE_MORE`).
The bounds are the same for fp16, whose rounding is 8 times finer, as in FlashMLA's test.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from mla_var3.errors import UserError, nearest

if TYPE_CHECKING:
    import torch

    from mla_var3.device import Device
    from mla_var3.problem import MlaProblem
    from mla_var3.runtime.plan import KernelPlan
    from mla_var3.runtime.types import Kernel, Tiling


@dataclass(frozen=True)
class Bounds:
    """What an error may be at most; an element passes with either its absolute or its relative error."""

    out_abs: float
    out_rel: float
    out_cos: float
    row_cos: float
    lse_abs: float
    lse_rel: float
    lse_cos: float = 1e-7


FLASHMLA = Bounds(out_abs=8e-4, out_rel=2.01 / 128, out_cos=5e-6, row_cos=5e-6, lse_abs=1e-6, lse_rel=8.01 / 65536)
DOMINATED = replace(FLASHMLA, row_cos=1.02e-5)
NORMAL = replace(DOMINATED, out_abs=8e-3, lse_abs=1e-4)

#: `cos_slack` of plans whose result is rounded to 16 bits once more on its way, beside P and out: a third
#: u²/12 = 1.3e-6 of cosine difference, and twice that in the bounds, as they have it for the other two.
ROUNDED_ONCE_MORE = 2.5e-6


def bounds_for(dist: str, plan: Any = None) -> Bounds:
    """The bounds of an input distribution of `mla_var3.runtime.correctness.inputs`, wider by a plan's `cos_slack`."""
    bounds = {"flashmla": FLASHMLA, "normal": NORMAL}.get(dist, DOMINATED)
    slack = getattr(plan, "cos_slack", 0.0)
    return replace(bounds, out_cos=bounds.out_cos + slack, row_cos=bounds.row_cos + slack)


@dataclass(frozen=True)
class ErrorReport:
    """How far a result is from the reference.

    out: relative Frobenius error. lse: largest absolute error where finite. cos, row_cos: cosine difference of all of
    out and of the worst row. out_abs: largest absolute error of out. reason: the first bound that broke, with numbers.
    """

    ok: bool
    reason: str
    out: float
    lse: float
    cos: float = 0.0
    row_cos: float = 0.0
    out_abs: float = 0.0

    def __bool__(self) -> bool:
        return self.ok

    def to_record(self) -> dict[str, float]:
        return {"out": self.out, "lse": self.lse}


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
    """The verdict on a kernel. error: the worst over the cases. Truthiness is ok."""

    ok: bool
    reason: str
    error: dict[str, float]
    cases: list[CaseResult] = field(default_factory=list)
    seeds: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return self.ok

    def to_record(self) -> dict[str, Any]:
        cases = [c.to_record() for c in self.cases]
        return {"ok": self.ok, "reason": self.reason, "error": self.error, "seeds": list(self.seeds), "cases": cases}


# ---------------------------------------------------------------- judging one result
def compare(
    out: torch.Tensor, lse: torch.Tensor, ref_out: torch.Tensor, ref_lse: torch.Tensor, bounds: Bounds = FLASHMLA
) -> ErrorReport:
    """Judges out (b, s, h, k) and lse (b, h, s) against a reference of the same shapes in higher precision."""
    import torch

    for name, a, r in (("out", out, ref_out), ("lse", lse, ref_lse)):
        if a.shape != r.shape:
            return _wrong(f"{name} has shape {tuple(a.shape)}, expected {tuple(r.shape)}")
    if lse.dtype != torch.float32:
        return _wrong(f"lse is {lse.dtype}, expected torch.float32")
    a, r = out.double(), ref_out.double()
    bad = ~torch.isfinite(a)
    if bool(bad.any()):
        return _wrong(f"out is not finite in {_where(bad)}")
    empty = torch.isposinf(ref_lse)
    odd = torch.isposinf(lse) != empty
    if bool(odd.any()):
        return _wrong(f"lse is +inf for a row with keys, or not +inf for one without, in {_where(odd)}")
    if not bool(torch.isfinite(lse[~empty]).all()):
        return _wrong(f"lse is not finite in {_where(~torch.isfinite(lse) & ~empty)}")
    stray = (a != 0).any(dim=-1) & empty.transpose(1, 2)
    if bool(stray.any()):
        return _wrong(f"out is not 0 for a row without keys in {_where(stray)}")

    diff = (a - r).abs_()
    square = diff.square().sum(dim=-1)
    ref_square, ans_square = r.square().sum(dim=-1), a.square().sum(dim=-1)
    row_cos = torch.where(ref_square < 1e-12, 0.0, square / (ref_square + ans_square).clamp(min=1e-300))
    total = float(ref_square.sum())
    cos = float(square.sum()) / (total + float(ans_square.sum())) if total >= 1e-12 else 0.0
    frobenius = math.sqrt(float(square.sum()) / total) if total > 0 else 0.0
    fails = (diff >= bounds.out_abs) & (diff >= bounds.out_rel * (r.abs() + 1e-6))

    e_ref, e_ans = ref_lse[~empty].double(), lse[~empty].double()
    e_diff = (e_ans - e_ref).abs()
    e_fails = (e_diff >= bounds.lse_abs) & (e_diff >= bounds.lse_rel * (e_ref.abs() + 1e-6))
    e_total = float(e_ref.square().sum())
    e_cos = float(e_diff.square().sum()) / (e_total + float(e_ans.square().sum())) if e_total >= 1e-12 else 0.0

    worst_row = float(row_cos.max()) if row_cos.numel() else 0.0
    reason = ""
    if bool(fails.any()):
        at = _position(int(torch.where(fails, diff, -1.0).argmax()), a.shape)
        values = f"it is {a[at]:.6g}, expected {r[at]:.6g}"
        reason = f"out {_count(fails)} beyond the bounds; at (b, s, h, k) = {at} {values}"
    elif cos >= bounds.out_cos:
        reason = f"out's cosine difference is {cos:.3g}, bound {bounds.out_cos:.3g}"
    elif worst_row >= bounds.row_cos:
        at = _position(int(row_cos.argmax()), row_cos.shape)
        reason = f"out's cosine difference in row (b, s, h) = {at} is {worst_row:.3g}, bound {bounds.row_cos:.3g}"
    elif bool(e_fails.any()):
        i = int(torch.where(e_fails, e_diff, -1.0).argmax())
        at = tuple(int(x) for x in torch.nonzero(~empty)[i])
        expected = f"it is {float(e_ans[i]):.8g}, expected {float(e_ref[i]):.8g}"
        reason = f"lse {_count(e_fails)} beyond the bounds; at (b, h, s) = {at} {expected}"
    elif e_cos >= bounds.lse_cos:
        reason = f"lse's cosine difference is {e_cos:.3g}, bound {bounds.lse_cos:.3g}"
    largest = float(e_diff.max()) if e_diff.numel() else 0.0
    out_abs = float(diff.max()) if diff.numel() else 0.0
    return ErrorReport(not reason, reason, frobenius, largest, cos, worst_row, out_abs)


def _wrong(reason: str) -> ErrorReport:
    return ErrorReport(False, reason, math.inf, math.inf, math.inf, math.inf, math.inf)


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


# ---------------------------------------------------------------- the cases
@dataclass(frozen=True)
class _Case:
    name: str
    problem: MlaProblem
    dist: str
    fresh: bool = False  # planned anew, not bound
    run: Callable[..., Any] | None = None


#: Names of the cases of `check`, in order, with what each is for.
CASES = {
    "own": "the problem as it is (on a CPU: cut down to a few short requests), planned",
    "edges": "lengths 0, 1, page - 1, page, page + 1, s - 1, s, t - 1, t in one batch",
    "edges_normal": "the same with N(0, 1) values",
    "first": "the first token of each request dominates",
    "last": "the last token dominates",
    "page_boundary": "the tokens on both sides of a page boundary dominate",
    "just_masked": "the first token that must not be seen would dominate",
    "below_zero": "a zero-filled key, or a masked logit of 0, would dominate",
    "single": "one request of the full length",
    "many": "more requests than a device has multiprocessors, most of them short",
    "in_place": "lengths, pages, queries and cache change under a bound kernel",
    "planned": "lengths as in edges, planned anew",
    "far_pages": "pages beyond 2^31 elements from the start of the cache (on a GPU)",
}
QUICK = ("own", "edges", "just_masked", "below_zero", "in_place")


def _cases(problem: MlaProblem, on_gpu: bool) -> Iterator[_Case]:
    from mla_var3.runtime.correctness.inputs import DOMINANT, same_class

    page, s = problem.page_size, problem.s
    longest = max(problem.seq_lens, default=0)
    t = min(longest, 4096 if on_gpu else 4 * page + 9) or 1
    full = min(longest, 131072 if on_gpu else 8 * page + 1) or 1
    edges = [x for x in (t, 0, 1, page - 1, page, page + 1, s - 1, s, 2 * page, t - 1) if x >= 0]
    lengths = list(dict.fromkeys(edges))
    ruled = list(dict.fromkeys([t, page + 1, page, max(1, t - 3), max(1, page // 2), 2 * page + page // 2]))
    own = problem if on_gpu else same_class(problem, [min(x, 2 * page + 3) for x in problem.seq_lens[:2]])
    short = [(7 * i) % (2 * page) for i in range(199)] if on_gpu else [(29 * i) % (page + 9) for i in range(12)]

    yield _Case("own", own, "flashmla", fresh=True)
    yield _Case("edges", same_class(problem, lengths), "flashmla")
    yield _Case("edges_normal", same_class(problem, lengths), "normal")
    for dist in DOMINANT:
        yield _Case(dist, same_class(problem, ruled), dist)
    yield _Case("single", same_class(problem, [full]), "flashmla")
    yield _Case("many", same_class(problem, [*short, t]), "normal")
    yield _Case("in_place", same_class(problem, lengths), "flashmla", run=_in_place)
    yield _Case("planned", same_class(problem, lengths), "normal", fresh=True)
    if problem.page is not None:
        yield _Case("far_pages", same_class(problem, ruled), "flashmla", run=_far_pages)


def case_problems(problem: MlaProblem) -> list[MlaProblem]:
    """The problems that `check` plans or binds on a GPU for this one: of its class, each once, itself first."""
    return list(dict.fromkeys(case.problem for case in _cases(problem, on_gpu=True)))


def check(
    plan: KernelPlan | type[KernelPlan],
    problem: MlaProblem | None = None,
    tiling: Tiling | None = None,
    device: str = "cuda",
    *,
    quick: bool = False,
    seeds: Sequence[int] | None = None,
    cases: Sequence[str] | None = None,
    hardware: Device | None = None,
) -> CheckReport:
    """Runs a kernel version through the cases of `CASES` and judges every result.

    plan: a plan, or its class with a problem and perhaps a tiling. device: the torch device to run on. hardware: the
    device to plan for (default: the plan's, else the one detected). quick: the cases of `QUICK`. seeds: one pass for
    each; a fresh one by default, recorded in the report. cases: names, in place of all or `QUICK`.

    In each case outputs and floating-point workspaces are filled with NaN before the call, the call is repeated and
    must give the same bits (unless the plan says that it is not deterministic), and the inputs must not change. "own"
    is planned; the other cases are bound to that kernel, except "planned".
    A wrong result is a report with ok = False. What the kernel itself raises is raised, with the case's name added.
    """
    plan_cls, problem, tiling, hardware, compiled = _resolve(plan, problem, tiling, device, hardware)
    own = getattr(plan_cls, "check", None)
    if own is not None:  # another kind of problem, with cases of its own (mla_var3.runtime.correctness.prefill)
        found: CheckReport = own(
            problem, tiling, device, quick=quick, seeds=seeds, hardware=hardware, compiled=compiled
        )
        return found
    wanted = tuple(cases) if cases is not None else QUICK if quick else tuple(CASES)
    for name in wanted:
        if name not in CASES:
            raise UserError(f"check case {name!r} is unknown: {nearest(name, CASES)}.")
    on_gpu = str(device).startswith("cuda")
    if cases is None:
        # What a wrapped library's interface rules out; its class says why.
        left_out = (*getattr(plan_cls, "leaves_out", ()), *(() if on_gpu else ("far_pages",)))
        wanted = tuple(x for x in wanted if x not in left_out)
    if seeds is None:
        seeds = (random.SystemRandom().randrange(1 << 30),)
    results: list[CaseResult] = []
    for base_seed in seeds:
        kernel: Kernel | None = None
        for index, case in enumerate(_cases(problem, on_gpu)):
            if case.name not in wanted and not (case.name == "own" and kernel is None and _needs_bind(wanted)):
                continue
            seed = base_seed + 101 * index
            try:
                session = _Session(plan_cls, tiling, hardware, device, kernel, seed, compiled)
                verdict = (case.run or _plain)(session, case)
            except Exception as error:
                error.add_note(f"while checking case {case.name!r} with seed {seed}")
                raise
            kernel = kernel or session.kernel
            if case.name in wanted and verdict is not None:
                via = "plan" if case.fresh else "bind"
                label = case.problem.label
                results.append(CaseResult(case.name, verdict.ok, verdict.reason, seed, via, label, verdict))
    return report(results, tuple(seeds))


def _resolve(
    plan: Any, problem: MlaProblem | None, tiling: Tiling | None, device: str, hardware: Device | None
) -> tuple[Any, MlaProblem, Tiling | None, Device | None, dict[Any, Any] | None]:
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


def _needs_bind(wanted: Sequence[str]) -> bool:
    return any(name not in ("own", "planned") for name in wanted)


def report(results: list[CaseResult], seeds: tuple[int, ...], labels: bool = False) -> CheckReport:
    """The verdict on all cases. labels: names their problems, for cases of one name and several problems."""
    failed = [c for c in results if not c.ok]
    names = [f"{c.name} {c.label}" if labels else c.name for c in failed]
    reason = "; ".join(f"{name} (seed {c.seed}): {c.reason}" for name, c in list(zip(names, failed, strict=True))[:3])
    if len(failed) > 3:
        reason += f"; and {len(failed) - 3} more cases"
    error = {
        "out": max((c.error.out for c in results), default=0.0),
        "lse": max((c.error.lse for c in results), default=0.0),
    }
    return CheckReport(not failed, reason, error, results, seeds)


# ---------------------------------------------------------------- running a case
@dataclass
class _Session:
    plan_cls: Any
    tiling: Tiling | None
    hardware: Device | None
    device: str
    kernel: Kernel | None
    seed: int
    compiled: dict[Any, Any] | None = None  # what plans share
    deterministic: bool = True

    def inputs(self, problem: MlaProblem, seed: int, dist: str = "flashmla") -> tuple[torch.Tensor, ...]:
        """Inputs as the plan's class wants them: a wrapped library may not bear every poison."""
        from mla_var3.runtime.correctness.inputs import make_inputs

        return make_inputs(problem, self.device, seed=seed, dist=dist, **getattr(self.plan_cls, "input_options", {}))

    def bound(self, case: _Case, inputs: Sequence[torch.Tensor]) -> Kernel:
        """The kernel of a case: planned when it asks for that or there is none yet, else bound to the first one."""
        self.deterministic = bool(getattr(self.plan_cls, "deterministic", True))
        if self.kernel is not None and not case.fresh:
            return self.kernel.bind(*inputs)
        tiling = self.tiling
        if tiling is not None and not tiling.validate(case.problem, self.hardware):
            tiling = None
        plan = self.plan_cls(case.problem, tiling, self.hardware)
        if self.compiled is not None:
            plan.compiled = self.compiled
        self.deterministic = bool(plan.deterministic)
        kernel: Kernel = plan.plan(*inputs)
        self.kernel = self.kernel or kernel
        return kernel


def _plain(session: _Session, case: _Case) -> ErrorReport:
    inputs = session.inputs(case.problem, session.seed, case.dist)
    return _judge(session, case, session.bound(case, inputs), inputs)


def _in_place(session: _Session, case: _Case) -> ErrorReport:
    """Binds to one input set, runs, then writes another one into the same tensors and runs the same kernel again."""
    from mla_var3.runtime.correctness.inputs import same_class

    first = case.problem.seq_lens
    inputs = session.inputs(case.problem, session.seed, case.dist)
    kernel = session.bound(case, inputs)
    kernel()
    changed = same_class(case.problem, [*first[1:], first[0]])
    for old, new in zip(inputs, session.inputs(changed, session.seed + 1), strict=True):
        old.copy_(new)
    return _judge(session, case, kernel, inputs)


def _far_pages(session: _Session, case: _Case) -> ErrorReport | None:
    """The same pages at the end of a cache of more than 2^31 elements; None where memory is short."""
    import torch

    from mla_var3.runtime.correctness.inputs import GARBAGE_PAGE

    q, cache, table, lens = session.inputs(case.problem, session.seed, case.dist)
    before = 2**31 // cache[0].numel() + 1
    if q.is_cuda and torch.cuda.mem_get_info(q.device)[0] < 1.5 * (before + len(cache)) * cache[0].nbytes:
        return None
    large = torch.empty((before + len(cache), *cache.shape[1:]), dtype=cache.dtype, device=cache.device)
    large[before:] = cache
    table = torch.where(table == GARBAGE_PAGE, table, table + before)
    inputs = (q, large, table, lens)
    return _judge(session, case, session.bound(case, inputs), inputs)


def _judge(session: _Session, case: _Case, kernel: Any, inputs: Sequence[torch.Tensor]) -> ErrorReport:
    from mla_var3.runtime.correctness.oracle import mla_decode_reference

    pd = case.problem
    return judge(
        kernel,
        inputs,
        lambda: mla_decode_reference(*inputs, k=pd.k, scale=pd.scale, causal=pd.causal),
        bounds_for(case.dist, session.plan_cls),
        pd.torch_dtype,
        session.deterministic,
    )


def judge(
    kernel: Any,
    inputs: Sequence[torch.Tensor],
    reference_fn: Callable[[], tuple[Any, ...]],
    bounds: Bounds,
    dtype: torch.dtype,
    deterministic: bool,
) -> ErrorReport:
    """Runs a kernel twice over poisoned outputs, and compares with the oracle and with the first run.

    The inputs must not change (those over 2^31 elements are not watched); out must be of `dtype`.
    """
    watched = [(x, x.clone()) for x in inputs if x.numel() < 2**31]
    _poison(kernel)
    kernel()
    first = [x.clone() for x in kernel.output_tensors]
    out, lse = first
    if not all(_same_bits(x, before) for x, before in watched):
        return _wrong("the call changed its inputs")
    if out.dtype != dtype:
        return _wrong(f"out is {out.dtype}, expected {dtype}")
    ref_out, ref_lse = reference_fn()
    verdict = compare(out, lse, ref_out, ref_lse, bounds)
    if not verdict.ok:
        return verdict
    _poison(kernel)
    second_out, second_lse = kernel()
    if deterministic and not (_same_bits(out, second_out) and _same_bits(lse, second_lse)):
        return replace(verdict, ok=False, reason="two calls with the same inputs gave different bits")
    if not deterministic:
        again = compare(second_out, second_lse, ref_out, ref_lse, bounds)
        return verdict if again.ok else replace(again, reason=f"the second call: {again.reason}")
    return verdict


def _poison(kernel: Any) -> None:
    for x in (*kernel.output_tensors, *getattr(kernel, "workspace_tensors", ())):
        if x.is_floating_point():
            x.fill_(math.nan)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    import torch

    ints = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(ints), b.contiguous().view(ints))
