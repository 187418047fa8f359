"""The file contract: any Python file that exports three names can be verified and timed, and so can any design here.

    get_inputs()             a list or tuple of arguments, at least one of them a tensor; fresh values at every call
    kernel_fn(*inputs)       a tensor, or a tuple or list of tensors
    reference_fn(*inputs)    the same in plain torch

`verify` calls both on the same values and says in one sentence what is wrong: names that are missing, results of
another number, shape or kind, values that are not finite, inputs that were changed, errors beyond the tolerance.
`benchmark` verifies first: what is wrong has no time. `scripts/verify_kernel.py` and `scripts/benchmark_kernel.py` are
the command lines; they exit with 0 (right), 1 (wrong) or 2 (cannot be judged).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mla_var3.errors import EXIT_USER_ERROR, UserError
from mla_var3.measure.cuda_backend import make_backend
from mla_var3.measure.timing import stats
from mla_var3.record import as_ratio
from mla_var3.toolchain import mistakes

NAMES = ("kernel_fn", "reference_fn", "get_inputs")
ROUNDS = 2
#: Relative and absolute tolerance by the dtype of a result: torch.testing's own.
TOLERANCES = {"bfloat16": (1.6e-2, 1e-5), "float16": (1e-3, 1e-5), "float32": (1.3e-6, 1e-5), "float64": (1e-7, 1e-7)}
#: Fresh inputs are rotated until they are together larger than this, so that no call finds its own in the L2.
COLD_BYTES = 256 << 20
MAX_SETS = 64


@dataclass(frozen=True)
class Contract:
    """The three functions of a file, under its name. check: of a design, the house's own check, a `CheckReport`."""

    name: str
    kernel_fn: Callable[..., Any]
    reference_fn: Callable[..., Any]
    get_inputs: Callable[[], Sequence[Any]]
    check: Callable[[], Any] | None = None


@dataclass(frozen=True)
class Verified:
    """What `verify` found. reason: one sentence, empty when right. errors: (largest absolute, largest relative) of each
    result, as far as it was compared."""

    ok: bool
    reason: str = ""
    errors: tuple[tuple[float, float], ...] = ()
    dtypes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.ok


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call. method: how they were taken."""

    median: float
    p10: float
    p90: float
    n: int
    method: str


@dataclass(frozen=True)
class Benchmarked:
    """What `benchmark` found: no times unless the kernel is right."""

    verified: Verified
    times: dict[str, Timing] = field(default_factory=dict)


# ---------------------------------------------------------------- loading
def load(path: Path) -> Contract:
    """The contract of a file. Raises `UserError` when there is none, with what is missing."""
    from importlib import util

    if not path.is_file():
        raise UserError(f"there is no file {path}: give a Python file, or a design as language/design[_vN].")
    name = f"mla_var3_contract_{path.stem}"
    spec = util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path} is not a Python file: its name must end in .py.")
    module = util.module_from_spec(spec)
    sys.modules[name] = module  # device code is found again through its module
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)  # as if the file were run: its neighbours can be imported
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"{path} cannot be imported: {mistakes.sentence(error)}.") from error
    finally:
        sys.path.remove(folder)
    missing = [x for x in NAMES if not callable(getattr(module, x, None))]
    if missing:
        raise UserError(f"{path} does not export {_list(missing)}: a kernel file defines the functions {_list(NAMES)}.")
    return Contract(path.name, module.kernel_fn, module.reference_fn, module.get_inputs)


def of_design(
    label: str,
    problem: Any = None,
    *,
    fields: Mapping[str, Any] | None = None,
    device: str | None = None,
    seed: int = 0,
) -> Contract:
    """The contract of a version here, `language/design[_vN]`, on a problem (by default a small one of its kind, with
    `fields` in place of its own).

    The kernel is planned for the first inputs and bound to all later ones. Raises `UserError` for an unknown label, and
    `Unsupported` or `Infeasible` when the version does not take the problem.
    """
    import torch

    from mla_var3.catalogue import registry
    from mla_var3.check.judge import check
    from mla_var3.device import Device
    from mla_var3.lab.naming import with_batch
    from mla_var3.lab.sweep.cpu import use_interpreter
    from mla_var3.lab.sweep.plan import problem_for

    version = registry.KernelId.parse(label)
    reason = registry.missing(version)
    if reason:
        raise UserError(reason)
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    small = where == "cpu"
    hardware = None if small else Device.detect()
    if small:
        use_interpreter(version.language, label)
    plan_type = registry.get_plan(version)
    if problem is None:
        workload = plan_type.workload
        given = with_batch(fields or {}, workload.problem)
        problem = problem_for([version], workload, given, workload.sample(small, given))
    plan = plan_type(problem, None, hardware)
    plan.require()
    options = getattr(plan, "input_options", {})
    state: dict[str, Any] = {"kernel": None, "seed": seed}

    def get_inputs() -> Sequence[Any]:
        state["seed"] += 1
        return plan.prepare_inputs(where, seed=state["seed"], **options)

    def kernel_fn(*inputs: Any) -> tuple[Any, ...]:
        kernel = state["kernel"]
        same = kernel is not None and all(a is b for a, b in zip(kernel.input_tensors, inputs, strict=True))
        if not same:
            kernel = plan.plan(*inputs) if kernel is None else kernel.bind(*inputs)
            state["kernel"] = kernel
        return tuple(kernel())

    def house_check() -> Any:
        return check(plan_type, problem, device=where, hardware=hardware)

    return Contract(version.label, kernel_fn, plan.reference_fn, get_inputs, house_check)


# ---------------------------------------------------------------- verifying
def verify(
    contract: Contract, *, rtol: float | None = None, atol: float | None = None, rounds: int = ROUNDS
) -> Verified:
    """Judges a contract on `rounds` fresh sets of inputs. A result passes where |kernel - reference| <= atol + rtol ·
    |reference|; a tolerance that is not given is `TOLERANCES` of the result's dtype. Infinities must agree.

    Raises `UserError` when the file gives nothing to judge with (its inputs, or its reference).
    """
    verdict = Verified(False, "nothing was compared")
    for _ in range(max(1, rounds)):
        verdict = _verify_once(contract, rtol, atol)
        if not verdict:
            return verdict
    return verdict


def inputs_of(contract: Contract) -> tuple[Any, ...]:
    """One set of inputs, checked. Raises `UserError`."""
    import torch

    try:
        inputs = contract.get_inputs()
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"get_inputs of {contract.name} failed: {mistakes.sentence(error)}.") from error
    if not isinstance(inputs, list | tuple) or not any(isinstance(x, torch.Tensor) for x in inputs):
        raise UserError(
            f"get_inputs of {contract.name} returned {type(inputs).__name__}: return a list with at least one tensor."
        )
    return tuple(inputs)


def _verify_once(contract: Contract, rtol: float | None, atol: float | None) -> Verified:
    inputs = inputs_of(contract)
    pristine = _copied(inputs)
    for_reference = _copied(inputs)
    try:
        expected = _results(contract.reference_fn(*for_reference))
    except Exception as error:
        raise UserError(f"reference_fn of {contract.name} failed: {mistakes.sentence(error)}.") from error
    if expected is None:
        raise UserError(f"reference_fn of {contract.name} returned no tensor: return a tensor or a tuple of tensors.")
    changed = _changed(for_reference, pristine)
    if changed:
        return Verified(False, f"reference_fn changes its inputs: {changed}")
    try:
        found = _results(contract.kernel_fn(*inputs))
    except UserError:
        raise
    except Exception as error:
        mistakes.show_if_wanted(error)
        return Verified(False, f"kernel_fn failed: {mistakes.sentence(error)}")
    if found is None:
        return Verified(False, "kernel_fn returned no tensor: return a tensor or a tuple of tensors")
    changed = _changed(inputs, pristine)
    if changed:
        return Verified(False, f"kernel_fn changes its inputs: {changed}")
    if len(found) != len(expected):
        return Verified(False, f"kernel_fn returned {len(found)} tensors and reference_fn {len(expected)}")
    errors, dtypes = [], []
    for index, (a, r) in enumerate(zip(found, expected, strict=True)):
        name = "the result" if len(found) == 1 else f"result {index}"
        reason, off = _compare(name, a, r, rtol, atol)
        errors.append(off)
        dtypes.append(str(a.dtype).removeprefix("torch."))
        if reason:
            return Verified(False, reason, tuple(errors), tuple(dtypes))
    return Verified(True, "", tuple(errors), tuple(dtypes))


def _compare(name: str, a: Any, r: Any, rtol: float | None, atol: float | None) -> tuple[str, tuple[float, float]]:
    import torch

    nothing = (float("inf"), float("inf"))
    if a.shape != r.shape:
        return f"{name} has shape {tuple(a.shape)}, and the reference's {tuple(r.shape)}", nothing
    if a.is_floating_point() != r.is_floating_point() or a.is_complex() != r.is_complex():
        return f"{name} is {a.dtype}, and the reference's {r.dtype}", nothing
    if a.device != r.device:
        return f"{name} is on {a.device}, and the reference's on {r.device}", nothing
    if not a.is_floating_point():
        wrong = a != r
        if bool(wrong.any()):
            return f"{name} differs in {_where(wrong)}", nothing
        return "", (0.0, 0.0)
    if bool(r.isnan().any()):
        return f"{name} of reference_fn is NaN in {_where(r.isnan())}", nothing
    if bool(a.isnan().any()):
        return f"{name} is NaN in {_where(a.isnan())}", nothing
    x, y = a.double(), r.double()
    infinite = x.isinf() | y.isinf()
    if bool((infinite & (x != y)).any()):
        return f"{name} and the reference's are not infinite in the same places: {_where(infinite & (x != y))}", nothing
    default = TOLERANCES.get(str(a.dtype).removeprefix("torch."), TOLERANCES["bfloat16"])
    relative, absolute = default[0] if rtol is None else rtol, default[1] if atol is None else atol
    diff = torch.where(infinite, 0.0, (x - y).abs())
    size = torch.where(infinite, 0.0, y.abs())
    error = (float(diff.max()), float((diff / size.clamp(min=1e-30)).max())) if diff.numel() else (0.0, 0.0)
    wrong = diff > absolute + relative * size
    if bool(wrong.any()):
        at = tuple(int(i) for i in torch.nonzero(wrong)[int(diff[wrong].argmax())])
        values = f"at {at} it is {float(x[at]):.6g}, expected {float(y[at]):.6g}"
        return f"{name} is beyond rtol {relative:g}, atol {absolute:g} in {_where(wrong)}; {values}", error
    return "", error


def _results(value: Any) -> tuple[Any, ...] | None:
    """The tensors that a function returned, copied so that a later call cannot change them; None when it gave none."""
    import torch

    values = value if isinstance(value, list | tuple) else (value,)
    if not values or not all(isinstance(x, torch.Tensor) for x in values):
        return None
    return tuple(x.detach().clone() for x in values)


def _copied(inputs: Sequence[Any]) -> tuple[Any, ...]:
    import torch

    return tuple(x.detach().clone() if isinstance(x, torch.Tensor) else x for x in inputs)


def _changed(inputs: Sequence[Any], before: Sequence[Any]) -> str:
    """Which input is no longer what it was, bit by bit (so that NaN equals itself); empty when none."""
    import torch

    for index, (x, y) in enumerate(zip(inputs, before, strict=True)):
        if not isinstance(x, torch.Tensor):
            continue
        if x.shape != y.shape or x.dtype != y.dtype:
            return f"argument {index} was {tuple(y.shape)} {y.dtype} and is {tuple(x.shape)} {x.dtype}"
        same = (x == y) | ((x != x) & (y != y))
        if not bool(same.all()):
            return f"argument {index} differs in {_where(~same)}"
    return ""


def _where(mask: Any) -> str:
    import torch

    first = tuple(int(i) for i in torch.nonzero(mask)[0])
    return f"{int(mask.sum())} of {mask.numel()} elements, first at {first}"


def _list(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


# ---------------------------------------------------------------- timing
def benchmark(
    contract: Contract, *, rtol: float | None = None, atol: float | None = None, seconds: float = 0.5
) -> Benchmarked:
    """Verifies (a design for which no tolerance is given by the house's own check), then times `kernel_fn` and
    `reference_fn` on the same inputs, for about `seconds` each.

    On a GPU: CUDA-graph replays over enough input sets to leave the L2 cold, or, for a function that cannot be
    captured, events around each call. On a CPU: the wall clock, good for a first look only.
    """
    if contract.check is not None and rtol is None and atol is None:
        report = contract.check()
        verified = Verified(report.ok, report.reason)
    else:
        verified = verify(contract, rtol=rtol, atol=atol, rounds=1)
    if not verified:
        return Benchmarked(verified)
    sets = _input_sets(contract)
    times = {name: _time(getattr(contract, name), sets, seconds) for name in ("kernel_fn", "reference_fn")}
    return Benchmarked(verified, times)


def _input_sets(contract: Contract) -> list[tuple[Any, ...]]:
    import torch

    first = inputs_of(contract)
    if not _on_gpu(first):
        return [first]
    size = max(1, sum(x.nbytes for x in first if isinstance(x, torch.Tensor)))
    free = torch.cuda.mem_get_info()[0]
    count = max(1, min(MAX_SETS, -(-COLD_BYTES // size), int(free * 0.4 // size)))
    return [first, *(inputs_of(contract) for _ in range(count - 1))]


def _on_gpu(inputs: Sequence[Any]) -> bool:
    return any(getattr(x, "is_cuda", False) for x in inputs)


def _time(fn: Callable[..., Any], sets: Sequence[tuple[Any, ...]], seconds: float) -> Timing:
    """On a GPU with the timer of `mla_var3.measure`; what cannot be captured in a graph is launched in a loop."""
    if not _on_gpu(sets[0]):
        return _time_cpu(fn, sets[0], seconds)
    backend = make_backend("auto", on_gpu=True)
    calls: list[Callable[[], Any]] = [partial(fn, *inputs) for inputs in sets]
    for call in calls:
        call()
    backend.synchronize()
    try:
        replay, how = backend.capture(calls, 1), f"CUDA-graph replays over {len(calls)} input sets"
    except Exception:
        backend.synchronize()
        replay = backend.capture(calls, 1, graph=False)
        how = f"events around {len(calls)} calls (not capturable in a CUDA graph: host time is included)"
    samples: list[float] = []
    deadline = time.monotonic() + seconds
    while len(samples) < 5 or (time.monotonic() < deadline and len(samples) < 10_000):
        samples += [us / len(calls) for us in backend.start(replay, 5).wait()]
    return _timing(samples, how)


def _time_cpu(fn: Callable[..., Any], inputs: tuple[Any, ...], seconds: float) -> Timing:
    fn(*inputs)
    samples: list[float] = []
    deadline = time.monotonic() + seconds
    while len(samples) < 3 or (time.monotonic() < deadline and len(samples) < 1000):
        start = time.perf_counter()
        fn(*inputs)
        samples.append(1e6 * (time.perf_counter() - start))
    return _timing(samples, "wall clock on the CPU")


def _timing(samples: Sequence[float], method: str) -> Timing:
    found = stats(samples)
    return Timing(found["median"], found["p10"], found["p90"], len(samples), method)


# ---------------------------------------------------------------- command lines
def main_verify(arguments: Sequence[str] | None = None) -> int:
    """`scripts/verify_kernel.py`: 0 right, 1 wrong, 2 cannot be judged."""
    parser = _parser("verify_kernel.py", "Is a kernel right?")
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help="fresh input sets to compare on (default: %(default)s)"
    )
    return _run(parser, arguments, _verify_command)


def main_benchmark(arguments: Sequence[str] | None = None) -> int:
    """`scripts/benchmark_kernel.py`: 0 timed, 1 wrong (and not timed), 2 cannot be judged."""
    parser = _parser(
        "benchmark_kernel.py", "How long does a kernel take? It is verified first; a wrong one has no time."
    )
    parser.add_argument(
        "--seconds", type=float, default=0.5, help="time to measure each function (default: %(default)s)"
    )
    return _run(parser, arguments, _benchmark_command)


def _parser(prog: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        epilog="TARGET is a Python file that exports kernel_fn, reference_fn and get_inputs, or language/design[_vN], "
        "for which any field of the problem can be set. Exit status: 0 right, 1 wrong, 2 cannot be judged.",
    )
    parser.add_argument("target", metavar="TARGET", help="kernel file, or language/design[_vN]")
    parser.add_argument(
        "--rtol",
        type=float,
        help="relative tolerance (default: torch.testing's by dtype; of a design the house's own check)",
    )
    parser.add_argument("--atol", type=float, help="absolute tolerance (likewise)")
    problem = parser.add_argument_group("problem of a design")
    for name in ("b", "s", "t", "h", "k", "p", "d", "n", "page"):
        problem.add_argument(f"--{name}", type=int, metavar="N")
    problem.add_argument("--batch", metavar="WORD", help="b, s and t in one word, as vLLM's benchmark has it: 128q1s1k")
    problem.add_argument("--dtype", choices=("bf16", "fp16", "fp32"))
    problem.add_argument("--causal", action="store_true", default=None)
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), help="where a design runs (default: the GPU, if there is one)"
    )
    return parser


def _run(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    command: Callable[[Contract, argparse.Namespace], int],
) -> int:
    args = parser.parse_args(arguments)
    try:
        return command(_target(args), args)
    except UserError as error:
        mistakes.show_if_wanted(error)
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR


def _target(args: argparse.Namespace) -> Contract:
    names = ("b", "s", "t", "batch", "h", "k", "p", "d", "n", "page", "dtype", "causal")
    fields = {x: getattr(args, x) for x in names}
    fields = {name: value for name, value in fields.items() if value is not None}
    path = Path(args.target)
    if path.suffix == ".py" or path.exists():
        if fields:
            raise UserError(f"{_list(['--' + x for x in fields])} belong to a design: a file makes its own inputs.")
        return load(path)
    return of_design(args.target, fields=fields, device=args.device)


def _verify_command(contract: Contract, args: argparse.Namespace) -> int:
    if contract.check is not None and args.rtol is None and args.atol is None:
        report = contract.check()
        if report.ok:
            print(f"{contract.name}: right in {len(report.cases)} cases; errors: {_errors(report.error)}.")
        else:
            print(f"{contract.name}: WRONG: {report.reason}.")
        return 0 if report.ok else 1
    verdict = verify(contract, rtol=args.rtol, atol=args.atol, rounds=args.rounds)
    if not verdict:
        print(f"{contract.name}: WRONG: {verdict.reason}.")
        return 1
    errors = ", ".join(
        f"{dtype} absolute {a:.2e} relative {r:.2e}"
        for dtype, (a, r) in zip(verdict.dtypes, verdict.errors, strict=True)
    )
    print(f"{contract.name}: right on {args.rounds} input sets; largest errors: {errors}.")
    return 0


def _errors(error: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.2e}" for name, value in error.items())


def _benchmark_command(contract: Contract, args: argparse.Namespace) -> int:
    found = benchmark(contract, rtol=args.rtol, atol=args.atol, seconds=args.seconds)
    if not found.verified:
        print(f"{contract.name}: WRONG, so it has no time: {found.verified.reason}.")
        return 1
    for name, timing in found.times.items():
        spread = f"p10 {timing.p10:.1f}, p90 {timing.p90:.1f}, n {timing.n}"
        print(f"{name:13} {timing.median:10.1f} us   {spread}; {timing.method}")
    kernel, reference = found.times["kernel_fn"].median, found.times["reference_fn"].median
    print(f"{contract.name}: {as_ratio(reference / kernel)} times as fast as its reference.")
    return 0
