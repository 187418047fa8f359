"""Makes bundles (`mla_var3.toolchain.bundle`): compiles versions for what another machine is to run."""

from __future__ import annotations

import itertools
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_var3 import __version__
from mla_var3.catalogue import registry
from mla_var3.catalogue.registry import KernelId
from mla_var3.device import Device
from mla_var3.errors import UserError
from mla_var3.files import write_whole
from mla_var3.ops.indexer import launched
from mla_var3.ops.ways import way_for
from mla_var3.runtime.types import Tiling
from mla_var3.toolchain import aot, loader, without_compiler
from mla_var3.toolchain.bundle import Bundle
from mla_var3.toolchain.pool import compile_many
from mla_var3.workload import Problem, problem_from_record
from mla_var3.workload.decode import MlaProblem
from mla_var3.workload.index_append import IndexAppendProblem
from mla_var3.workload.indexed_append import IndexedAppendProblem
from mla_var3.workload.indexer_logits import PAGE as PAGE_OF_KEYS
from mla_var3.workload.indexer_topk import IndexerTopkProblem
from mla_var3.workload.norm import NormProblem
from mla_var3.workload.packed_append import PackedAppendProblem
from mla_var3.workload.prefill import PrefillProblem
from mla_var3.workload.rope import RopeProblem
from mla_var3.workload.sparse_decode import SparseProblem

if TYPE_CHECKING:
    import argparse

    from mla_var3.ops.engine import Way
    from mla_var3.runtime.base import BaseKernel
    from mla_var3.runtime.plan import KernelPlan

LANGUAGE = "cute-dsl"
TIMEOUT_S = 300.0

_NEEDS = {
    loader.RUNTIME: "package nvidia-cutlass-dsl-libs-cu13 (or -cu12), or the file beside the bundle",
    "tvm_ffi": "package apache-tvm-ffi, same major and minor version",
    "mla_var3": "the same source of the kernels and of their lib",
}


@dataclass(frozen=True)
class BundleJob:
    """Host functions that share code. kernel: a registered label, or `module:PlanClass`. folder: where entries go.

    points: (problem, tiling) records of one code class and of tilings that the code does not tell apart. Sizes and
    launch knobs decide which stages a pipeline has, so all of them are planned. checked: points that nobody asked for,
    but that the check of the others plans: other batches and lengths, hence other splits and perhaps another combine.
    """

    kernel: str
    points: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = field(hash=False)
    device: str
    folder: str
    checked: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = field(default=(), hash=False)

    @property
    def label(self) -> str:
        problem, tiling = (*self.points, *self.checked)[0]
        knobs = ", ".join(f"{k}={v}" for k, v in tiling.items())
        return f"{self.kernel} {plan_of(self.kernel).code_class(problem_from_record(problem)).key()} {knobs}".strip()


# ---------------------------------------------------------------- making
def make_bundle(
    folder: Path,
    kernels: Sequence[KernelId | str],
    problems: Sequence[Problem],
    tilings: str | Sequence[Any] = "default",
    device: Device | str = "h200",
    workers: int | None = None,
    *,
    progress: bool = True,
) -> Bundle:
    """Compiles every kernel for every problem and tiling into `folder` and returns what it holds now.

    kernels: versions, their labels, or `module:PlanClass` for a plan outside of this package. tilings: "default",
    "tuning" (the default and all that the tuner would try and the device allows), or a list, for every kernel, of
    tilings or of fields that differ from the default. workers: processes; 0 compiles in this one. What `folder` holds
    already is kept and not compiled again. Kernels of other languages, and tilings that a problem or the device does
    not allow, are refused with a reason; `UserError` when nothing is left.
    """
    device = Device.get(device) if isinstance(device, str) else device
    groups: dict[tuple[str, str, str], BundleJob] = {}
    refused: list[tuple[str, str]] = []
    workloads = {problem.workload for problem in problems}
    for kernel in kernels:
        name = kernel.label if isinstance(kernel, KernelId) else kernel
        language = _language(name)
        if language != LANGUAGE:
            refused.append((name, f"bundles hold kernels of {LANGUAGE}; this one is {language}"))
            continue
        for problem in problems:
            # Of an experiment of several workloads, each version has cells of its own.
            if len(workloads) > 1 and plan_of(name).workload.name != problem.workload:
                continue
            for tiling in _tilings(name, problem, device, tilings, refused):
                add(groups, name, problem, tiling, device, Path(folder) / "objects")
    return _make(Path(folder), list(groups.values()), refused, device, workers, progress)


def add(
    groups: dict[tuple[str, str, str], BundleJob],
    kernel: str,
    problem: Problem,
    tiling: Tiling,
    device: Device,
    folder: Path,
) -> set[tuple[str, str, str]]:
    """Adds a point, and what its check plans, to the jobs of `groups`; returns the keys of those that it needs."""
    key = _code(kernel, problem, tiling)
    job = groups.get(key) or BundleJob(kernel, (), device.key, str(folder))
    groups[key] = replace(job, points=(*job.points, (problem.to_record(), tiling.to_record())))
    touched = {key}
    workload = plan_of(kernel).workload
    cases = workload.case_problems(problem)[1:]
    bound = [workload.as_bound(case) for case in cases]  # the check plans some cases and binds the others
    for other in dict.fromkeys((*cases, *bound)):
        if not device.can_run(plan_of(kernel).requires, other):
            continue  # the check leaves it out
        # As the check does where a case does not allow the tiling.
        taken = tiling if tiling.validate(other, device) else plan_of(kernel)(other, None, device).tiling
        key = _code(kernel, problem, taken)
        job = groups.get(key) or BundleJob(kernel, (), device.key, str(folder))
        touched.add(key)
        point = (other.to_record(), taken.to_record())
        if point not in job.checked:
            groups[key] = replace(job, checked=(*job.checked, point))
    return touched


def _code(kernel: str, problem: Problem, tiling: Tiling) -> tuple[str, str, str]:
    """Equal for points of one code class and of tilings that the code does not tell apart."""
    code_class = plan_of(kernel).code_class(problem)
    return kernel, code_class.key(), json.dumps(aot.code_knobs(tiling), sort_keys=True, default=str)


def _tilings(
    kernel: str,
    problem: Problem,
    device: Device,
    wanted: str | Sequence[Any],
    refused: list[tuple[str, str]],
) -> list[Tiling]:
    """The tilings that the problem and the device allow, each once; others go to `refused`."""
    plan_type = plan_of(kernel)
    label = f"{kernel} {problem.label}"
    supported = device.can_run(plan_type.requires, problem)
    if not supported:
        refused.append((label, supported.reason))
        return []
    plan = plan_type(problem, None, device)
    if wanted == "default":
        candidates: list[Tiling] = [plan.tiling]
    elif wanted == "tuning":
        candidates = [plan.tiling, *plan.autotune_configs()]
    elif isinstance(wanted, str):
        raise UserError(f"tilings is {wanted!r}: use default, tuning, or a list of tilings.")
    else:
        candidates = [_as_tiling(plan, tiling) for tiling in wanted]
    found: list[Tiling] = []
    for tiling in dict.fromkeys(candidates):
        verdict = tiling.validate(problem, device)
        if verdict:
            found.append(tiling)
        elif wanted != "tuning":  # the tuner's list may hold infeasible ones: that is no news
            refused.append((f"{label} {tiling}", verdict.reason))
    return found


def _as_tiling(plan: KernelPlan, tiling: Any) -> Tiling:
    return tiling if isinstance(tiling, Tiling) else plan.tiling_type.from_record({**plan.tiling.to_record(), **tiling})


def _language(kernel: str) -> str:
    return LANGUAGE if ":" in kernel else KernelId.parse(kernel).language


def plan_of(kernel: str) -> type[KernelPlan]:
    """The plan class of a registered label, or of `module:PlanClass`."""
    if ":" not in kernel:
        return registry.get_plan(KernelId.parse(kernel))
    module, _, name = kernel.partition(":")
    try:
        loaded = without_compiler.import_version(module) if aot.usable(LANGUAGE) else import_module(module)
    except ModuleNotFoundError as error:
        raise UserError(f"{kernel} cannot be imported ({error}): give an importable module.") from error
    plan = getattr(loaded, name, None)
    if plan is None:
        raise UserError(f"{module} has no plan {name}: write module:PlanClass.")
    return plan


def run_bundle_job(job: BundleJob) -> list[dict[str, Any]]:
    """In a worker process: compiles a job's host functions into the folder; returns their entries."""
    plan_type, device = plan_of(job.kernel), Device.get(job.device)
    entries: dict[str, dict[str, Any]] = {}
    for record, knobs in (*job.points, *job.checked):
        problem = problem_from_record(record)
        plan = plan_type(problem, plan_type.tiling_type.from_record(knobs), device)
        plan.require()
        plan.compiled = aot.CompileCache(Path(job.folder), making=True)
        for stage in _host_functions(plan.plan_empty()):
            # A stage of another version is that version's code, whoever calls it.
            owner = plan if stage.plan is None else stage.plan
            label = job.kernel if type(owner) is plan_type else registry.label_of(owner)
            before = len(plan.compiled.entries)
            aot.compiled_host(owner, stage.name, stage.compile_fn, tiling=stage.tiling, device=device)
            for entry in plan.compiled.entries[before:]:
                named = {"kernel": label, "problem_class": _class_record(owner), "problems": []}
                noted = entries.setdefault(entry["key"], {**named, **entry})
                if (record, knobs) in job.points:
                    noted["problems"] = sorted({*noted["problems"], owner.problem.label})
    return list(entries.values())


def _host_functions(kernel: BaseKernel) -> list[Any]:
    """The CuTe kernels of a kernel, stages of pipelines and concurrent groups taken apart, without libraries' calls."""
    stages = getattr(kernel, "stages", None)
    if stages:
        return [leaf for stage in stages if not stage.comes_compiled for leaf in _host_functions(stage)]
    if getattr(kernel, "compile_fn", None) is None:
        raise UserError(f"{kernel.name} has no compile_fn: a bundle holds CuteKernels that compile from fake tensors.")
    return [kernel]


def _class_record(plan: Any) -> dict[str, Any]:
    return asdict(plan.code_class(plan.problem))


def _make(
    folder: Path,
    jobs: Sequence[BundleJob],
    refused: list[tuple[str, str]],
    device: Device,
    workers: int | None,
    progress: bool,
) -> Bundle:
    if not jobs:
        reason = "; ".join(f"{label}: {why}" for label, why in refused[:3]) or "no kernel, problem or tiling was given"
        raise UserError(f"nothing to bundle ({reason}).")
    made: list[dict[str, Any]] = []
    failed = 0
    if workers == 0:
        made = [entry for job in jobs for entry in run_bundle_job(job)]
    else:
        for result in compile_many(jobs, workers, progress, timeout_s=TIMEOUT_S, run=run_bundle_job):
            if result.ok:
                some: Any = result.compiled
                made += some
            else:
                failed += 1
                refused.append((result.job.label, result.error))
    entries = _joined(folder, made)
    if not entries:
        raise UserError(f"nothing was compiled; the first reason: {refused[0][1]}.")
    manifest = {
        "schema": aot.SCHEMA,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "mla_var3": __version__,
        "device": device.key,
        "made_on": {"machine": platform.machine(), "python": platform.python_version()},
        "needs": _NEEDS,
        "entries": sorted(entries, key=lambda e: (e["kernel"], e["name"], e["problem"], e["key"])),
    }
    write_whole(folder / "manifest.json", json.dumps(manifest, indent=1))
    return Bundle(folder, manifest, tuple(refused), failed)


def _joined(folder: Path, made: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the bundle held with what was made now. What came from another source of the same kernels is removed."""
    source = {entry["kernel"]: entry["source"] for entry in made}
    entries: dict[str, dict[str, Any]] = {}
    for entry in aot.entries_of(folder) if (folder / "manifest.json").exists() else []:
        if source.get(entry["kernel"], entry["source"]) == entry["source"]:
            entries[entry["key"]] = entry
        else:
            for ending in (".so", ".json"):
                (folder / "objects" / entry["object"]).with_suffix(ending).unlink(missing_ok=True)
    for entry in made:
        before = entries.get(entry["key"], entry)
        entries[entry["key"]] = {**entry, "problems": sorted({*before["problems"], *entry["problems"]})}
    return list(entries.values())


# ---------------------------------------------------------------- for a server
#: Models whose layers attend to tokens that an indexer chose: to how many, and the indexer's heads, which tensor
#: parallelism does not divide, as all devices need the same tokens.
CHOSEN = {"deepseek-v3.2": (2048, 64), "glm-5": (2048, 32)}
#: Models whose indexer turns columns 2i and 2i + 1 together (RoPE).
INTERLEAVED = ("glm-5",)
#: Query tokens of a request of the indexer, and tokens that its page table has room for: the top-k's code depends on
#: both.
DRAFTED = range(1, 5)
ROOM = tuple(1 << i for i in range(10, 18))
#: Query tokens of a request, requests and cached tokens of calls: a class of calls gets the versions of all of them.
TOKENS, REQUESTS, CONTEXTS = range(1, 9), (1, 8, 64, 256), (256, 2048, 16384, 131072)
#: Query tokens of a request in the mean, where requests differ in theirs.
MEANS = (1, 2, 4, 8, 32, 128)
#: Tokens of a cache page of an engine whose kernels are these.
PAGE = 64


def served(model: Mapping[str, Any], tp: int = 1, page: int | None = PAGE) -> list[Problem]:
    """Problems that stand for the calls of a serving engine: `model`, a file of conf/model, on each of tp devices.

    Dense decode of one to eight query tokens a request and of requests that differ in theirs, over caches in bf16 and,
    of 576 columns, in fp8 with one scale; sparse decode of models that choose tokens, and their indexer; prompts and
    chunks; new tokens into these caches; and the norm of the latent.
    """
    if tp < 1 or model["h"] % tp:
        raise UserError(f"--tp {tp} does not divide the {model['h']} heads of {model['name']}: give a divisor.")
    h, k, p, d = model["h"] // tp, model["k"], model["p"], model["d"]
    found: list[Problem] = []
    for b, t in itertools.product(REQUESTS, CONTEXTS):
        widths = {"b": b, "h": h, "t": t, "k": k, "p": p, "d": d, "page": page}
        found += [MlaProblem(**widths, s=s, causal=s > 1) for s in TOKENS]
        found += [MlaProblem(**widths, causal=True, queries={"total": b * s}) for s in MEANS]
        if (k, p) == (512, 64):
            sizes = {"b": b, "h": h, "t": t, "page": page}
            found += [SparseProblem(**sizes, s=s, layout="flat", paged=True) for s in TOKENS]
            if model["name"] in CHOSEN:
                topk, _ = CHOSEN[model["name"]]
                kinds = itertools.product(("v32", "bf16"), (False, True))  # the plug-ins give lengths in large steps
                found += [SparseProblem(**sizes, topk=topk, layout=x, lengths=given) for x, given in kinds]
    for s, t, causal, strided in itertools.product((128, 512, 1024, 8192), (0, 8192), (True, False), (False, True)):
        if causal or t:  # pieces of a prefix in front of the last one are seen without a mask
            found.append(PrefillProblem(h=h, p=p, d=d, s=s, t=t or s, causal=causal, strided_kv=strided))
    for tokens in (1, 64, 8192):
        found.append(NormProblem(rows=tokens, width=k))
        if not p:
            continue
        new = {"tokens": tokens, "h": h, "columns": d + p, "page": page, "rest": 0}
        found.append(RopeProblem(**new, k=k, p=p))
        if (k, p) == (512, 64):
            layouts = ("flat", "v32") if model["name"] in CHOSEN else ("flat",)
            found += [PackedAppendProblem(**new, k=k, p=p, layout=layout) for layout in layouts]
            if model["name"] in CHOSEN and page and page % PAGE_OF_KEYS == 0:
                found.append(IndexedAppendProblem(**new, k=k, p=p, interleaved_keys=model["name"] in INTERLEAVED))
    if model["name"] in CHOSEN:
        found += _indexer(model["name"])
    return list(dict.fromkeys(found))


def _indexer(model: str) -> list[Problem]:
    """Calls of the indexer of a model: over its cache, over the keys of prompts, and the append of new keys."""
    topk, heads = CHOSEN[model]
    of: dict[str, Any] = {"heads": heads, "topk": topk}
    tables = itertools.product(REQUESTS, DRAFTED, ROOM)
    found: list[Problem] = [IndexerTopkProblem(b=b, s=s, t=t, table=True, **of) for b, s, t in tables]
    found += [IndexerTopkProblem(b=1, s=s, t=t, table=False, **of) for s in (128, 8192) for t in ROOM if t >= s]
    interleaved = model in INTERLEAVED
    return [*found, *(IndexAppendProblem(tokens=tokens, interleaved=interleaved) for tokens in (1, 64, 8192))]


def _calls(problem: Problem, device: Device) -> list[tuple[Problem, Way]]:
    """What a function of `mla_var3.ops` launches for a problem, each with how it is computed."""
    if isinstance(problem, IndexerTopkProblem):
        return launched(problem, device)
    return [(problem, way_for(problem, device))]


def make_served(
    folder: Path,
    problems: Sequence[Problem],
    device: Device | str = "h200",
    workers: int | None = None,
    *,
    progress: bool = True,
) -> Bundle:
    """Compiles into `folder` what the functions of `mla_var3.ops` pick for these problems. A problem that a version of
    another language computes is refused; where that is Triton's, the server compiles it."""
    device = Device.get(device) if isinstance(device, str) else device
    groups: dict[tuple[str, str, str], BundleJob] = {}
    refused: dict[tuple[str, str], list[tuple[str, str]]] = {}  # of a workload, and of what computes it, if anything
    for problem in problems:
        try:
            calls = _calls(problem, device)
        except UserError as error:
            refused.setdefault((problem.workload, ""), []).append((problem.label, str(error)))
            continue
        for of, way in calls:
            label, plan = way.key[0].label, way.make(of, device)
            if _language(label) != LANGUAGE:
                why = f"{label} computes it, which is not of {LANGUAGE}"
                refused.setdefault((of.workload, label), []).append((of.label, why))
                continue
            key = _code(label, of, plan.tiling)
            job = groups.get(key) or BundleJob(label, (), device.key, str(Path(folder) / "objects"))
            point = of.to_record(), plan.tiling.to_record()
            if point not in job.points:
                groups[key] = replace(job, points=(*job.points, point))
    said = []
    for (workload, _), ((label, why), *others) in refused.items():
        said.append(
            (f"{workload} {label}", f"{why} ({len(others)} more of its problems are refused)" if others else why)
        )
    return _make(Path(folder), list(groups.values()), said, device, workers, progress)


# ---------------------------------------------------------------- command line
def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `mla-var3 compile` that make a bundle."""
    parser.add_argument(
        "--bundle", metavar="DIR", help="make a bundle of compiled CuTe kernels, to run without a compiler"
    )
    parser.add_argument(
        "--tilings", choices=("default", "tuning"), default="default",
        help="which tilings of a kernel a bundle holds: its default one, or all that the tuner may pick",
    )  # fmt: skip
    parser.add_argument(
        "--experiment", metavar="NAME", help="a bundle for the cells of this experiment, in place of one problem"
    )
    parser.add_argument(
        "--tp", type=int, metavar="N",
        help="with --bundle and --model and no KERNEL: a bundle for a server that divides the heads among N devices "
        "(default 1)",
    )  # fmt: skip


def bundle_main(
    args: argparse.Namespace,
    kernels: Sequence[KernelId],
    problems: Sequence[Problem],
    device: Device,
    fields: dict[str, Any] | None = None,
) -> int:
    """`mla-var3 compile --bundle DIR`: prints what was made and what was refused; 1 when something did not compile.

    fields: knobs over the default tiling (`--tiling`); they replace `--tilings`.
    """
    tilings = [fields] if fields else args.tilings
    return told(make_bundle(Path(args.bundle), kernels, problems, tilings, device, args.jobs or None))


def served_main(args: argparse.Namespace, problems: Sequence[Problem], device: Device) -> int:
    """`mla-var3 compile --bundle DIR --model NAME --tp N`, as `bundle_main`."""
    return told(make_served(Path(args.bundle), problems, device, args.jobs or None))


def told(bundle: Bundle) -> int:
    """Prints what was made and what was refused; 1 when something did not compile."""
    for label, reason in bundle.refused:
        print(f"refused: {label}: {reason}", file=sys.stderr)
    print(bundle.summary())
    return 1 if bundle.failed else 0
