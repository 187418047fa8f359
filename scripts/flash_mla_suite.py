#!/usr/bin/env python3
"""Runs the cases of FlashMLA's own tests of decode over the functions of this package, on a GPU.

    scripts/flash_mla_suite.py /path/to/FlashMLA/tests --done results.jsonl --seconds 180
    scripts/flash_mla_suite.py /path/to/FlashMLA/tests --dense --kernel cute-dsl/flash_mla_mma_v1
    scripts/flash_mla_suite.py /path/to/FlashMLA/tests --done results.jsonl --part 2/4
    MLA_VAR3_BUNDLES=bundle scripts/flash_mla_suite.py /path/to/FlashMLA/tests --done results.jsonl --bundled
    scripts/flash_mla_suite.py /path/to/FlashMLA/tests --count h200      # needs no GPU

The folder is that of a checkout: of revision 9241ae3, whose test has 4,748 cases, or of a later one with the layouts of
DeepSeek V4.1. Its modules make the inputs, with strides as they are there and the seed that a case has in a run of all,
and the results that are expected; `flash_mla` is `mla_var3.ops.flash_mla` to them. Nothing of FlashMLA's is compiled.
--dense runs its test of dense decode in place of that of sparse decode, without its benchmark. --kernel names the
version that computes all cases; without it the one that is picked does.

Cases of one class of code are run one after another in one process, since compiling it takes longer than running them,
classes with many cases first. Results go to the file of --done, a line a case; cases that it has are left out, so that
the next run goes on where this one ended. --part N/M leaves all classes but every M-th to other runs. --bundled runs
what open bundles (MLA_VAR3_BUNDLES) have code for: nothing is compiled then, the cases of a class run in several
processes at once, and those that take most memory come first. --passes N runs every N-th case, then those behind them,
and so on; with --bundled, in a pass cases that take least memory first, and those that need more than 16 GB behind all
passes: a run that is cut has then seen an even share of the rest of the grid.
N should have no factor in common with the sizes of the grid, as 7 has none. Prints how many cases were right, wrong or
refused, and what the wrong ones were. Exit code: 0 where none was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import importlib.util
import io
import json
import multiprocessing
import os
import sys
import time
import types
import warnings
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from mla_var3.catalogue import registry
from mla_var3.device import Device
from mla_var3.errors import UserError
from mla_var3.ops import flash_mla
from mla_var3.packed_cache import VALUES
from mla_var3.toolchain import aot
from mla_var3.workload.decode import MlaProblem
from mla_var3.workload.sparse_decode import SparseProblem

DENSE = "test_flash_mla_dense_decoding.py"
FILES = ("test_flash_mla_sparse_decoding.py", "test-sparse-decode.py")
KERNEL, DENSE_KERNEL = "cute-dsl/sparse_mla_v2", "cute-dsl/flash_mla_v23"  # what is picked on Hopper
#: Functions of `flash_mla`'s module that compute.
COMPUTE = ("mla_decode", "packed_mla_decode", "sparse_mla_decode")
LAYOUTS = {"V41_FP8Sparse": "v41", "V41_FP4Sparse": "v41_fp4"}
RIGHT, WRONG, REFUSED, NO_ROOM = "right", "wrong", "refused", "no room"
LAST_OF = 25.0  # seconds before the end, from which on no class is begun, which has to be compiled first;
LAST_OF_BUNDLED = 5.0  # and which has not
TOGETHER = 16  # cases of a bundled class that one process runs: with a class a process, the largest would end last
LARGE = 16e9  # bytes: in passes, cases that need more come behind all others, which would wait for their room
SHARE = 0.8  # of the GPU's memory, for tensors of cases that run at a time
#: Pairs of a query token and a cached one that are computed at a time for the expected results of sparse decode.
PAIRS = 1 << 19


# ------------------------------------------------------------------------------------------------ the suite
@dataclass(frozen=True)
class Suite:
    """The modules of FlashMLA's tests, and their cases in order. dense: of dense decode; the test is lib and ref."""

    lib: Any
    ref: Any
    kit: Any
    cases: list[Any]
    dense: bool = False

    @classmethod
    def of(cls, folder: Path, dense: bool = False) -> Suite:
        sys.path.insert(0, str(folder.resolve()))
        sys.modules["flash_mla"] = flash_mla
        if importlib.util.find_spec("rich") is None:  # for a table, which is not printed here
            sys.modules.update((name, types.ModuleType(name)) for name in ("rich", "rich.console", "rich.table"))
        file = folder / DENSE if dense else next(folder / name for name in FILES if (folder / name).exists())
        spec = importlib.util.spec_from_file_location("flash_mla_s_test", file)
        assert spec is not None and spec.loader is not None
        test = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(test)
        if dense:
            return cls(test, test, test.kk, dense_cases(test), True)
        test.lib.KVScope.quant_and_dequant_ = lambda scope: pack_used(scope, test.lib.quant)
        return cls(test.lib, test.ref, test.kk, test.gen_testcase())


def dense_cases(test: Any) -> list[Any]:
    """Those that the test's `main` would run, which has them in no list that it gives away."""
    cases: list[Any] = []
    ignored: Any = lambda *_: None  # noqa: E731
    cuda = types.SimpleNamespace(set_device=ignored, get_device_capability=lambda: (9, 0))
    torch, run = test.torch, test.test_flash_mla
    test.test_flash_mla = cases.append
    test.torch = types.SimpleNamespace(
        device=str, cuda=cuda, set_default_dtype=ignored, set_default_device=ignored, bfloat16=None
    )
    test.main(None)
    test.torch, test.test_flash_mla = torch, run
    return cases


def problem_of(case: Any) -> SparseProblem | MlaProblem:
    """The problem of a case, but for the tokens of its cache, which are drawn."""
    if hasattr(case, "is_causal"):
        causal = case.is_causal and case.s_q > 1
        return MlaProblem(b=case.b, s=case.s_q, h=case.h_q, h_kv=case.h_kv, t=case.s_k, causal=causal)
    layout = "v32" if case.d_qk == 576 else "v4"
    of_extra = ""
    if getattr(case, "kvcache_layout", None) is not None:
        layout = LAYOUTS[case.kvcache_layout.name]
        extra = case.extra_kvcache_layout
        of_extra = "" if extra is None or not case.extra_topk else LAYOUTS[extra.name]
    return SparseProblem(
        b=case.b, s=case.s_q, h=case.h_q, t=case.s_kv, topk=case.topk, layout=layout, page=case.block_size,
        lengths=case.have_topk_length, sink=case.enable_attn_sink, extra=case.extra_topk or 0,
        extra_t=case.extra_s_k or 0, extra_page=case.extra_block_size or (case.block_size if case.extra_topk else 0),
        extra_lengths=case.have_extra_topk_length, extra_layout="" if of_extra == layout else of_extra,
    )  # fmt: skip


def class_of(problem: SparseProblem | MlaProblem, device: Device | None, kernel: str = "") -> str:
    """Equal for cases that have one compiled kernel."""
    plan = plan_for(problem, device, kernel)
    return f"{plan.code_class(plan.problem).key()} {json.dumps(aot.code_knobs(plan.tiling), sort_keys=True)}"


def plan_for(problem: SparseProblem | MlaProblem, device: Device | None, kernel: str = "") -> Any:
    """The plan of a case; where it has more query tokens than the version takes together, that of requests of one."""
    label = kernel or (DENSE_KERNEL if isinstance(problem, MlaProblem) else KERNEL)
    plan = registry.get_plan(registry.KernelId.parse(label))(problem, None, device)
    if isinstance(problem, SparseProblem) and problem.s > 1 and not plan.feasible():
        return plan_for(problem.replace(b=problem.b * problem.s, s=1), device, kernel)
    return plan


def is_bundled(problem: SparseProblem | MlaProblem, device: Device, there: set[str], kernel: str = "") -> bool:
    """Whether the code of a case is among that of these identities."""
    plan = plan_for(problem, device, kernel)
    source, made = aot.source_of(plan).hash, plan.plan_empty()
    names = [stage.name for stage in getattr(made, "stages", ())] or [made.name]
    keys = [aot.make_key(source, plan.code_class(plan.problem), plan.tiling, device, name) for name in names]
    return all(key.identity in there for key in keys)


def room_of(problem: SparseProblem | MlaProblem) -> int:
    """About how many bytes a case takes at most, with what its inputs and expected results are made from."""
    if isinstance(problem, MlaProblem):
        longest = 2.5 * problem.t
        rows = problem.s * problem.h
        return round(1e9 + longest * (problem.b * problem.h_kv * 576 * 2 * 4 + 4 * problem.h * 576 * 2 + 4 * rows * 4))
    columns, queries = 576 if problem.layout == "v32" else 512, problem.b * problem.s
    spread = 2.5 if problem.b > 1 else 1.5  # contexts are normal, with half of their mean as the deviation
    caches = [(problem.t, problem.page), (problem.extra_t, problem.extra_page or 1)]
    in_bf16 = [problem.b * max(spread * tokens + 2 * page, 4 * page) * columns * 2 for tokens, page in caches]
    kept = 1.9 * sum(in_bf16)  # and packed
    # Of pages one token more is drawn, of heads and columns one and 128 more; in V4.1's test no more than are there.
    drawn = [2 * (1 + 1 / page) * (1 + 128 / columns) for _, page in caches]
    if problem.layout == "v41":
        drawn = [2.0, 2.0]
    making = max(size * times for size, times in zip(in_bf16, drawn, strict=True))
    pairs = max(PAIRS, problem.s * (problem.topk + problem.extra))
    compared = pairs * (10 * columns + 12 * problem.h) + queries * problem.h * VALUES * 50
    expanded = 4e9 if problem.extra_layout == "v41_fp4" else 0.0  # what e2m1 codes are made from
    return round(1e9 + kept + max(making, compared) + expanded)


def pack_used(scope: Any, quant: Any) -> None:
    """Packs a cache and unpacks it again, as a test's `quant_and_dequant_` does, by its own functions, but only the
    rows that indices name. All others are NaN: these functions say once what bytes such a row has."""
    import torch

    cache, width = scope.blocked_k, scope.t.d_qk
    rows, pages, page = cache.view(-1, width), cache.shape[0], cache.shape[1]
    layout = getattr(scope, "kvcache_layout", None)
    if layout is None:
        layouts = quant.FP8KVCacheLayout
        layout = layouts.V32_FP8Sparse if width == 576 else layouts.MODEL1_FP8Sparse
    used = (rows[:, 0] == rows[:, 0]).nonzero().view(-1)
    some = rows.new_full((64 * (len(used) // 64 + 1), width), float("nan"))  # and a row at least that is NaN
    some[: len(used)] = rows[used]
    packed = quant.quantize_k_cache(some.view(-1, 64, 1, width), layout)
    rows[used] = quant.dequantize_k_cache(packed, layout).view(-1, width)[: len(used)]
    like = quant.quantize_k_cache(cache[:2], layout)  # two pages, which say where pages lie
    whole = torch.empty(pages * like.stride(0), dtype=torch.uint8, device=cache.device).view(like.dtype)
    whole = whole.as_strided((pages, *like.shape[1:]), like.stride())
    apart = layout.name == "MODEL1_FP8Sparse"
    for target, source in zip(token_parts(whole, apart), token_parts(packed, apart), strict=True):
        target.copy_(source[-1, -1])
        target[used // page, used % page] = source.reshape(-1, source.shape[2])[: len(used)]
    scope.blocked_k_quantized = whole


def token_parts(cache: Any, apart: bool) -> list[Any]:
    """What belongs to the tokens of a packed cache, (pages, page, words of 8 bytes): its rows, or where scales lie
    behind a page's rows (apart), rows and scales."""
    import torch

    pages, page, _, each = cache.shape
    if not apart:
        return [cache[:, :, 0].view(torch.int64)]
    words = cache.as_strided((pages, page * each), (cache.stride(0), 1)).view(torch.int64)
    of_rows = page * (each // 8 - 1)
    return [words[:, :of_rows].view(pages, page, -1), words[:, of_rows:].view(pages, page, 1)]


def results(suite: Suite, number: int) -> tuple[Any, Any]:
    """(out, lse) as computed, and as expected."""
    import torch

    case = suite.cases[number].to_test_param()
    case.seed = number
    made = suite.lib.generate_testcase_for_decode(case)
    found = suite.lib.run_flash_mla_decode(case, made, flash_mla.get_mla_metadata()[0], None)
    torch.cuda.synchronize()
    return found, expected(suite, case, made)


def expected(suite: Suite, case: Any, made: Any) -> tuple[Any, Any]:
    """(out, lse) of the test's own reference, which is given a few requests at a time: it holds all rows that they
    attend to, one for each pair of tokens, several times in fp32."""
    import torch

    def of_requests(thing: Any, first: int, end: int, *names: str) -> Any:
        found = copy.copy(thing)
        for name in names:
            value = getattr(thing, name)
            setattr(found, name, None if value is None else value[first:end])
        return found

    b, given = case.decode.b, case.s_q * (case.topk + (case.decode.extra_topk or 0))
    at_a_time, parts = max(1, PAIRS // given), []
    for first in range(0, b, at_a_time):
        end = min(first + at_a_time, b)
        some, of_some = copy.copy(case), of_requests(made, first, end, "q")
        some.decode = copy.copy(case.decode)
        some.decode.b = end - first
        for name in ("kv_scope", "extra_kv_scope"):
            if (scope := getattr(made, name)) is not None:
                setattr(of_some, name, of_requests(scope, first, end, "indices_in_kvcache", "topk_length"))
        parts.append(suite.ref.ref_sparse_attn_decode(some, of_some))
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs), torch.cat(lses)


def dense_results(suite: Suite, number: int) -> tuple[Any, Any]:
    """(out, lse) as computed, and as expected, of a case of dense decode."""
    import torch

    case = suite.cases[number]
    lengths, q, table, cache = suite.lib.generate_test_data(case)
    meta = flash_mla.get_mla_metadata()[0]
    found = flash_mla.flash_mla_with_kvcache(q, cache, table, lengths, case.dv, meta, None, causal=case.is_causal)
    torch.cuda.synchronize()
    return found, suite.ref.reference_torch(lengths, table, q, cache, case.dv, case.is_causal)


def run_case(suite: Suite, number: int) -> tuple[str, str]:
    """(verdict, what is wrong), with FlashMLA's bounds."""
    import torch

    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), torch.inference_mode():
            (out, lse), (wanted, wanted_lse) = (dense_results if suite.dense else results)(suite, number)
            same = suite.kit.check_is_allclose
            abs_tol = 8e-4 if suite.dense else 1e-3
            ok = same("out", out, wanted, abs_tol=abs_tol, rel_tol=2.01 / 128, cos_diff_tol=5e-6)
            ok &= same("lse", lse, wanted_lse, abs_tol=1e-6, rel_tol=8.01 / 65536)
    except UserError as error:
        return REFUSED, str(error)
    except torch.OutOfMemoryError:
        return NO_ROOM, ""
    return (RIGHT, "") if ok else (WRONG, " ".join(said.getvalue().split()))


# ------------------------------------------------------------------------------------------------ processes
def work(pipe: Connection, folder: Path, dense: bool = False, kernel: str = "") -> None:
    """A process: asks for classes, and for room for their cases, until there are none.

    It keeps the memory that it has for the next case: to give it back and to take it again takes longer than most cases
    do, and processes wait for each other in the driver meanwhile. It gives it back where a case needs more, or less
    than half of it, and where others wait for room.
    """
    import torch

    warnings.simplefilter("ignore")  # FlashMLA's way to take slices is deprecated
    suite = Suite.of(folder, dense)
    if not kernel:
        registry.get_plan(registry.KernelId.parse(DENSE_KERNEL if dense else KERNEL))  # takes seconds
    for name in COMPUTE if kernel else ():
        setattr(flash_mla, name, functools.partial(getattr(flash_mla, name), kernel=kernel))
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("cuda:0")
    if not dense:  # as each test has it
        torch.set_float32_matmul_precision("high")
    torch.ones(1, 64, 64).float().bmm(torch.ones(1, 64, 64).float())  # loads a library, while cases are counted
    room = 0
    while True:
        pipe.send(("class",))
        numbers, others_wait = pipe.recv()
        if not numbers:
            return
        if others_wait:
            torch.cuda.empty_cache()
            room = 0
        for number in numbers:
            needed = room_of(problem_of(suite.cases[number]))
            if not room / 2 <= needed <= room:
                torch.cuda.empty_cache()
                pipe.send(("room", needed))
                pipe.recv()
                room = needed
            begun = time.monotonic()
            try:
                verdict, why = run_case(suite, number)
            except Exception as error:  # the GPU's context may be lost with it: another process goes on
                pipe.send(("case", number, WRONG, f"{type(error).__name__}: {error}", time.monotonic() - begun))
                os._exit(1)
            pipe.send(("case", number, verdict, why, time.monotonic() - begun))


@dataclass
class Worker:
    """One of them, as the parent sees it. room: bytes that it was given and has not given back."""

    process: Any
    pipe: Connection
    numbers: list[int] = field(default_factory=list)  # of its class, still to be run
    room: int = 0


@dataclass
class Run:
    """A run of classes of cases by many processes. classes: numbers of cases, the first class last."""

    folder: Path
    done: Path
    classes: list[list[int]]
    end: float
    memory: int
    dense: bool = False
    kernel: str = ""
    last: float = LAST_OF
    found: list[tuple[int, str, str]] = field(default_factory=list)
    workers: list[Worker] = field(default_factory=list)
    waiting: list[tuple[Worker, int]] = field(default_factory=list)

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(theirs, self.folder, self.dense, self.kernel), daemon=True)
        process.start()
        theirs.close()
        self.workers.append(Worker(process, ours))

    def all(self, processes: int) -> None:
        """Until all classes are run, or time is up."""
        for _ in range(min(processes, len(self.classes)) - len(self.workers)):
            self.start()
        while self.workers and (left := self.end - time.monotonic()) > 0:
            for pipe in wait([w.pipe for w in self.workers], timeout=min(left, 1.0)):
                self.hear(next(w for w in self.workers if w.pipe is pipe))
            self.give_room()
        for worker in self.workers:
            worker.process.terminate()

    def hear(self, worker: Worker) -> None:
        try:
            kind, *rest = worker.pipe.recv()
        except (EOFError, ConnectionError):
            self.workers.remove(worker)
            self.waiting = [each for each in self.waiting if each[0] is not worker]
            if worker.numbers:  # what it had left is another's
                self.classes.append(worker.numbers)
            if self.classes and self.end - time.monotonic() > self.last:
                self.start()
            return
        if kind == "class":
            worker.numbers = self.classes.pop() if self.classes and self.end - time.monotonic() > self.last else []
            others_wait = bool(self.waiting)
            worker.room = 0 if others_wait else worker.room
            worker.pipe.send((list(worker.numbers), others_wait))
        elif kind == "room":
            worker.room = 0
            self.waiting.append((worker, rest[0]))
        else:
            number, verdict, why, seconds = rest
            worker.numbers.remove(number)
            self.found.append((number, verdict, why))
            line = {"case": number, "verdict": verdict, "why": why, "seconds": round(seconds, 2)}
            with self.done.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def give_room(self) -> None:
        """In the order in which it was asked for."""
        while self.waiting:
            worker, room = self.waiting[0]
            taken = sum(each.room for each in self.workers)
            if taken and taken + room > self.memory:
                return
            self.waiting.pop(0)
            worker.room = room
            with contextlib.suppress(OSError):  # of a process that ended, which `hear` will find
                worker.pipe.send(True)


# ------------------------------------------------------------------------------------------------ command
def classes_of(
    cases: list[Any], device: Device | None, part: tuple[int, int], done: set[int], kernel: str = "",
    bundled: bool = False, passes: int = 1,
) -> list[list[int]]:  # fmt: skip
    """Numbers of cases, a list a class, those with most cases first. bundled: only of classes that open bundles have,
    and lists of at most `TOGETHER` cases that need about as much memory, those that need most first. passes: this many
    rounds of lists, each of every so-manyth case, of bundled ones those that need least memory first, and `LARGE` ones
    behind all rounds."""
    found: dict[str, list[int]] = {}
    for number, case in enumerate(cases):
        found.setdefault(class_of(problem_of(case), device, kernel), []).append(number)
    ordered = sorted(found.values(), key=len, reverse=True)
    if bundled and device is not None:
        rooms = [room_of(problem_of(case)) for case in cases]
        there = {entry["identity"] for folder in aot.bundle_dirs() for entry in aot.entries_of(folder)}
        ordered = [
            sorted(numbers, key=rooms.__getitem__, reverse=True)
            for numbers in ordered
            if is_bundled(problem_of(cases[numbers[0]]), device, there, kernel)
        ]
    ordered = [[n for n in numbers if n % passes == i] for i in range(passes) for numbers in ordered]
    if bundled and device is not None:
        ordered = [numbers[i : i + TOGETHER] for numbers in ordered for i in range(0, len(numbers), TOGETHER)]
        if passes > 1:
            ordered.sort(key=lambda some: (rooms[some[0]] > LARGE, some[0] % passes, rooms[some[0]]))
        else:
            ordered.sort(key=lambda some: rooms[some[0]], reverse=True)
    left = ([number for number in numbers if number not in done] for numbers in ordered[part[0] - 1 :: part[1]])
    return [numbers for numbers in left if numbers]


def part_of(text: str) -> tuple[int, int]:
    number, _, of = text.partition("/")
    if not (number.isdigit() and of.isdigit() and 1 <= int(number) <= int(of)):
        raise argparse.ArgumentTypeError(f"{text} is no part: give it as 2/4.")
    return int(number), int(of)


def already(file: Path) -> dict[int, tuple[str, str]]:
    """Of a file of results, those that need no other run."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    read = (json.loads(line) for line in lines if line.startswith("{") and line.endswith("}"))
    return {x["case"]: (x["verdict"], x["why"]) for x in read if x["verdict"] != NO_ROOM}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", type=Path, help="the folder `tests` of a checkout of FlashMLA")
    parser.add_argument("--done", type=Path, default=Path("flash_mla_suite.jsonl"), help="file of results")
    parser.add_argument("--dense", action="store_true", help="the test of dense decode")
    parser.add_argument("--kernel", default="", metavar="LABEL", help="the version that computes all cases")
    parser.add_argument("--part", type=part_of, default=(1, 1), help="N/M: every M-th class, from the N-th on (1/1)")
    parser.add_argument("--passes", type=int, default=1, metavar="N", help="rounds of every N-th case (1)")
    parser.add_argument("--bundled", action="store_true", help="only what open bundles have code for")
    parser.add_argument("--seconds", type=float, default=600.0, help="time that the run takes at most (600)")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 1) - 2), help="at a time")
    parser.add_argument("--memory", type=float, help="GB for what runs at a time (0.8 of what is free)")
    parser.add_argument("--count", metavar="DEVICE", help="count cases and classes for a device, and run none")
    asked = parser.parse_args(argv)
    end = time.monotonic() + asked.seconds
    files = (DENSE,) if asked.dense else FILES
    if not any((asked.tests / name).exists() for name in files):
        parser.error(f"{asked.tests} has no {' and no '.join(files)}: give the folder tests of FlashMLA's checkout.")
    device = Device.get(asked.count) if asked.count else Device.detect()
    if device is None:
        parser.error("there is no GPU here: give --count DEVICE to count cases.")
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # of memory that is kept, all fits
    last = LAST_OF_BUNDLED if asked.bundled else LAST_OF
    run = Run(asked.tests, asked.done, [], end, 0, asked.dense, asked.kernel, last)
    for _ in range(0 if asked.count else asked.processes):  # they import what they need while cases are counted
        run.start()
    suite, before = Suite.of(asked.tests, asked.dense), already(asked.done)
    classes = classes_of(suite.cases, device, asked.part, set(before), asked.kernel, asked.bundled, asked.passes)
    asked_for, several = sum(map(len, classes)), "lists" if asked.bundled else "classes"
    print(f"{len(suite.cases)} cases, {len(before)} done; {asked_for} in {len(classes)} {several} now", flush=True)
    if asked.count:
        return 0
    import torch

    run.classes = classes[::-1]
    run.memory = round(1e9 * asked.memory if asked.memory else SHARE * torch.cuda.mem_get_info()[0])
    run.all(asked.processes)
    verdicts = {**before, **{number: (verdict, why) for number, verdict, why in run.found}}
    counts = Counter(verdict for verdict, _ in verdicts.values())
    said = ", ".join(f"{counts[verdict]} {verdict}" for verdict in (RIGHT, WRONG, REFUSED, NO_ROOM))
    print(f"{len(run.found)} cases run now; of {len(suite.cases)} in all: {said}")
    for number, (verdict, why) in sorted(verdicts.items()):
        if verdict in (WRONG, REFUSED):
            print(f"{verdict} {number} {problem_of(suite.cases[number]).label}: {why}")
    return 1 if counts[WRONG] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
