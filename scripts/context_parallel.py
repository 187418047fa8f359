#!/usr/bin/env python3
"""Times decode of long requests over the GPUs of a host beside one GPU, and writes a record of each.

torchrun --standalone --nproc-per-node 2 scripts/context_parallel.py --out out/context_parallel     # a rank a GPU
scripts/context_parallel.py --bundle DIR --device h100 --ranks 2      # compiles what that will need; needs no GPU

Ranks hold pages in turn. Before anything is timed, every exchange is checked against the oracle on requests of unequal
length, some without a token on some ranks, causal ones, and caches that are NaN where a rank has nothing; then on the
cell itself. Limits of the run come first. The cost of each exchange is measured at the smallest and at the largest
batch, with the merge and without any decode: a line through both, and what is expected of the rank's share,
is what a cell should take, written down before it is timed. Contenders take turns, in reversed order every other round;
a time is the slowest rank's. Without a GPU the ranks check small cells over gloo, and time nothing.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mla_var3.check.judge import ErrorReport, compare
from mla_var3.cli.arguments import experiment_cells
from mla_var3.device import Device
from mla_var3.dispatch import choose, expected
from mla_var3.errors import UserError
from mla_var3.measure import environment, timing
from mla_var3.measure.calibrate import LimitItems
from mla_var3.measure.cuda_backend import CpuBackend, CudaBackend
from mla_var3.measure.settings import BenchSettings
from mla_var3.record import Record, RecordStore, as_ratio, new_id, now, record_key
from mla_var3.workload import decode
from mla_var3.workload.decode import MlaProblem
from mla_var3.workload.merge import MergeProblem

EXPERIMENT = "context_parallel"
ONE = "one GPU"
#: Requests that break an exchange: unequal, without a token on some rank or on all, causal with several tokens.
HOSTILE = (
    {"s": 1, "lengths": (1000, 1, 0, 70, 129)},
    {"s": 3, "lengths": (1000, 64, 3, 70, 129), "causal": True},
)
LIMIT_S = 60  # that a collective waits for the other ranks
COLD_BYTES = 256e6
MOST_SETS = 16


# ---------------------------------------------------------------- the ranks
class Ranks:
    """This process among the ranks, and what it runs on."""

    def __init__(self, settings: BenchSettings, backend: Any = None) -> None:
        import torch
        import torch.distributed as dist

        self.torch, self.dist = torch, dist
        gpu = torch.cuda.is_available()
        place = int(os.environ.get("LOCAL_RANK", 0))
        if gpu:
            torch.cuda.set_device(place)
        self.device = torch.device("cuda", place) if gpu else torch.device("cpu")
        self.backend = backend or (CudaBackend() if gpu else CpuBackend())
        # Captured before NCCL has a thread that asks for events, which a capture does not bear.
        self.limits = LimitItems(self.backend, settings) if self.backend.times else None
        dist.init_process_group(
            "nccl" if gpu else "gloo", device_id=self.device if gpu else None, timeout=timedelta(seconds=LIMIT_S)
        )
        self.count, self.rank = dist.get_world_size(), dist.get_rank()
        self.hardware = Device.detect(place) or Device.get("h200")
        self.engine: Any = None  # of mla_decode: the process's own
        self.kernel: str | None = None
        if not gpu:
            from mla_var3.ops import context_parallel

            self.engine, self.kernel = on_cpu(), "torch/flash_mla"
            merge: Any = context_parallel.merge_partials
            if not isinstance(merge, functools.partial):
                context_parallel.merge_partials = functools.partial(merge, kernel="torch/merge_partials")

    def most(self, values: Sequence[float]) -> list[float]:
        """The largest of each over the ranks."""
        found = self.torch.tensor(list(values), dtype=self.torch.float64, device=self.device)
        self.dist.all_reduce(found, op=self.dist.ReduceOp.MAX)
        return [float(x) for x in found]

    def together(self) -> None:
        """Lets every rank come here."""
        self.backend.synchronize()
        self.most([0.0])

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)


def on_cpu() -> Any:
    """An engine that runs the oracle's version on a CPU."""
    from mla_var3.ops.engine import Engine

    class OnCpu(Engine):
        def stream(self, device: Any) -> int:
            return 0

        def capture(self, stream: int) -> None:
            return None

        def on(self, device: Any) -> Any:
            return nullcontext()

        def hardware(self, device: Any) -> Device:
            return Device.get("h200")

        def require_here(self, tensor: Any, name: str, function: str) -> None:
            pass

    return OnCpu()


# ---------------------------------------------------------------- what is compared
def exchanges(ranks: Ranks) -> dict[str, Any]:
    """The ways to pass partials on that are possible here, by name."""
    from mla_var3.ops.exchange import Collective, exchange_of

    class AllGather(Collective):
        """Every rank gets all partials of all heads, and takes its own."""

        def partials(self, out: Any, lse: Any) -> tuple[Any, Any]:
            b, s, heads, _ = out.shape
            h = heads // self.ranks
            mine = slice(self.rank * h, (self.rank + 1) * h)
            found = []
            for sent in (out, lse.transpose(1, 2).contiguous()):
                every = sent.new_empty((self.ranks * b, *sent.shape[1:]))
                ranks.dist.all_gather_into_tensor(every, sent, group=self.group)
                found.append(every.view(self.ranks, b, s, heads, -1)[:, :, :, mine])
            return found[0].contiguous(), found[1].squeeze(-1).contiguous()

    probe = ranks.torch.empty(0, device=ranks.device)
    ways: dict[str, Any] = {}
    ways["all_gather"] = AllGather(ranks.dist.group.WORLD, ranks.count, ranks.rank)
    ways["collective"] = exchange_of("collective", None, probe)
    try:
        ways["symmetric"] = exchange_of("symmetric", None, probe)
    except UserError as error:
        ranks.say(f"not compared: {error}")
    return ways


@dataclass
class Share:
    """One input set: the whole request, which every rank has, and this rank's part of it. schedules: by contender."""

    q: Any
    cache: Any
    table: Any
    lens: Any
    mine: Any  # pages of this rank
    heads: slice
    own: Any  # queries of these heads
    schedules: dict[str, Any] = field(default_factory=dict)


def share_of(ranks: Ranks, problem: MlaProblem, seed: int, alone: bool = False) -> Share:
    """alone: the cache is NaN where the pages are not this rank's."""
    q, cache, table, lens = decode.make_inputs(problem, ranks.device, seed=seed, dist="normal")
    h = problem.h // ranks.count
    heads = slice(ranks.rank * h, (ranks.rank + 1) * h)
    mine = table[:, ranks.rank :: ranks.count].contiguous()
    share = Share(q, cache, table, lens, mine, heads, q[:, :, heads].contiguous())
    if alone:
        share.cache = cache.clone()
        used = ranks.torch.arange(table.shape[1], device=ranks.device)[None] * problem.page_size < lens[:, None]
        used[:, ranks.rank :: ranks.count] = False
        share.cache[table[used].long()] = float("nan")
    return share


def call(ranks: Ranks, problem: MlaProblem, share: Share, way: Any, schedule: Any = None) -> tuple[Any, Any]:
    """(out, lse) of this rank's heads, or without a way of all heads on one GPU."""
    from mla_var3.ops import mla_decode, mla_decode_cp

    options: dict[str, Any] = {
        "scale": problem.scale, "causal": problem.causal, "head_dim_v": problem.k, "return_lse": True,
        "schedule": schedule, "kernel": ranks.kernel, "on": ranks.engine,
    }  # fmt: skip
    if way is None:
        out, lse = mla_decode(share.q, share.cache, share.table, share.lens, **options)
        return out, lse
    out, lse = mla_decode_cp(share.own, share.cache, share.mine, share.lens, exchange=way, **options)
    return out, lse


# ---------------------------------------------------------------- right?
def reference(problem: MlaProblem, share: Share, whole: Any) -> tuple[Any, Any]:
    """The oracle for this rank's heads, over the cache as it was before others' pages were made NaN."""
    return decode.mla_decode_reference(
        share.own, whole, share.table, share.lens, k=problem.k, scale=problem.scale, causal=problem.causal
    )


def judged(answers: Sequence[Any], wanted: tuple[Any, Any]) -> ErrorReport:
    """The verdict of this rank. Partials are rounded to 16 bits once more than the result of one GPU."""
    bounds = {
        name: replace(b, cos=b.cos + decode.ROUNDED_ONCE_MORE, row_cos=b.row_cos + decode.ROUNDED_ONCE_MORE)
        if b.row_cos < 1
        else b
        for name, b in decode.bounds_for("normal").items()
    }
    return compare(decode.WORKLOAD, answers, wanted, bounds)


def of_all(ranks: Ranks, report: ErrorReport) -> tuple[str, dict[str, float]]:
    """(why it is wrong on some rank, or "", the largest errors)."""
    names, found = ("out", "lse"), report.to_record()
    wrong, *errors = ranks.most([0.0 if report.ok else 1.0, *(found.get(name, math.inf) for name in names)])
    reason = "" if not wrong else report.reason or "wrong on another rank"
    return reason, dict(zip(names, errors, strict=True))


def poison(ranks: Ranks, way: Any) -> None:
    """NaN in what others are to store into, so that nothing of an earlier call passes for theirs."""
    held = getattr(way, "held", ())
    ranks.together()
    for buffer in held:
        buffer.memory.fill_(255)
    ranks.together()


def check(ranks: Ranks, ways: dict[str, Any], small: bool) -> bool:
    """Whether every exchange is right on the hostile requests, twice with the same bits; those that are not are taken
    out of `ways`."""
    sizes: dict[str, Any] = {"k": 64, "p": 32, "h": 4 * ranks.count} if small else {"h": 128}
    fine = True
    for number, given in enumerate(HOSTILE):
        problem = MlaProblem(b=5, t=1000, **sizes, **given)
        share = share_of(ranks, problem, number, alone=True)
        whole = decode.make_inputs(problem, ranks.device, seed=number, dist="normal")[1]
        wanted = reference(problem, share, whole)
        for name, way in list(ways.items()):
            try:
                first = call(ranks, problem, share, way)
                report = judged(first, wanted)
                poison(ranks, way)
                again = call(ranks, problem, share, way)
                if report.ok and not all(ranks.torch.equal(x, y) for x, y in zip(first, again, strict=True)):
                    report = replace(report, ok=False, reason="two calls gave different bits")
            except Exception as error:  # the others are to be measured all the same
                report = ErrorReport(False, f"{type(error).__name__}: {error}", {})
            reason, errors = of_all(ranks, report)
            if reason:
                fine = False
                del ways[name]
            ranks.say(f"check {problem.label} {name}: {reason or 'passed'} {errors}")
    return fine


# ---------------------------------------------------------------- how long?
class Timed:
    """Calls, one an input set, captured as replays of the same length on every rank, which take turns with others."""

    def __init__(self, ranks: Ranks, calls: Sequence[Callable[[], Any]], settings: BenchSettings) -> None:
        self.ranks, self.settings, self.samples = ranks, settings, list[float]()
        for run in (*calls, *calls):
            run()
        ranks.together()
        once = self._capture(calls, 1)
        (us,) = ranks.most([min(self._replay(once, 3))])
        rotations = max(1, min(round(settings.graph_ms * 1e3 / us), 200 // len(calls) or 1))
        self.count = rotations * len(calls)
        self.replay = once if rotations == 1 else self._capture(calls, rotations)

    def _capture(self, calls: Sequence[Callable[[], Any]], rotations: int) -> Any:
        backend = self.ranks.backend
        if not isinstance(backend, CudaBackend):
            return backend.capture(calls, rotations)
        import torch

        # NCCL's watchdog asks for events of earlier calls from a thread of its own, which a global capture forbids.
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                for _ in range(rotations):
                    for run in calls:
                        run()
        finally:
            torch.cuda.set_stream(stream)  # a capture that fails leaves its own current
        graph.replay()
        self.ranks.together()
        # No cycle may hold a graph: the collector would free it during a later capture, which ends that one.
        return SimpleNamespace(run=graph.replay, keep=(graph, list(calls)))

    def _replay(self, replay: Any, count: int) -> list[float]:
        self.ranks.together()
        return list(self.ranks.backend.start(replay, count).wait())

    def turn(self) -> None:
        """A sample: the best of a few replays on a cool chip, each as long as the slowest rank took."""
        self.ranks.together()
        self.ranks.backend.idle(self.settings.idle_ms / 1e3)
        self.samples.append(min(self.ranks.most(self._replay(self.replay, self.settings.burst_replays))) / self.count)

    @property
    def us(self) -> float:
        return timing.percentile(self.samples, 0.5)


def in_turn(items: Sequence[Timed], rounds: int) -> None:
    for number in range(rounds):
        for item in reversed(items) if number % 2 else items:
            item.turn()


@dataclass(frozen=True)
class Link:
    """What an exchange and the merge cost: a line through two measured batches."""

    latency_us: float
    us_per_mb: float

    def us(self, sent: float) -> float:
        return self.latency_us + self.us_per_mb * sent / 1e6


def sent_bytes(name: str, problem: MlaProblem, ranks: int) -> float:
    """Bytes that a rank sends in one call."""
    rows, others = problem.b * problem.s, ranks - 1
    queries = rows * problem.h / ranks * (problem.k + problem.p) * 2
    partials = rows * problem.h * (2 * problem.k + 4)
    return others * (queries + (partials if name == "all_gather" else partials / ranks))


def link_of(ranks: Ranks, name: str, way: Any, problems: Sequence[MlaProblem], settings: BenchSettings) -> Link:
    """Measures an exchange with its merge, without decode, at the smallest and the largest of these problems."""
    from mla_var3.ops import context_parallel

    torch, found = ranks.torch, []
    for problem in (min(problems, key=lambda p: p.b * p.h), max(problems, key=lambda p: p.b * p.h)):
        rows = (problem.b, problem.s)
        q = torch.randn(*rows, problem.h // ranks.count, problem.k + problem.p, device=ranks.device).bfloat16()
        out = torch.randn(*rows, problem.h, problem.k, device=ranks.device).bfloat16()
        lse = torch.randn(problem.b, problem.h, problem.s, device=ranks.device)

        def run(q: Any = q, out: Any = out, lse: Any = lse, k: int = problem.k) -> None:
            way.queries(q, k)
            context_parallel.merge_partials(*way.partials(out, lse), on=ranks.engine)

        item = Timed(ranks, [run], settings)
        in_turn([item], settings.burst_rounds)
        found.append((sent_bytes(name, problem, ranks.count) / 1e6, item.us))

        def back(out: Any = out, lse: Any = lse) -> None:
            context_parallel.merge_partials(*way.partials(out, lse), on=ranks.engine)

        alone = Timed(ranks, [back], settings)
        in_turn([alone], settings.burst_rounds)
        ranks.say(
            f"b{problem.b} h{problem.h} {name}: queries, partials and merge {item.us:.1f} us, without queries "
            f"{alone.us:.1f} us"
        )
    (small, first), (large, last) = found
    slope = max(0.0, (last - first) / (large - small)) if large > small else 0.0
    return Link(first - slope * small, slope)


# ---------------------------------------------------------------- what ran
def part_of(problem: MlaProblem, ranks: int) -> MlaProblem:
    """What a rank decodes: all heads over its pages."""
    pages = -(-problem.max_pages // ranks)
    return problem.replace(t=pages * problem.page_size)


def merge_of(problem: MlaProblem, ranks: int) -> MergeProblem:
    return MergeProblem(parts=ranks, tokens=problem.b * problem.s * problem.h // ranks, h=1, k=problem.k)


def code_of(ranks: Ranks, problem: MlaProblem, way: Any) -> dict[str, Any] | None:
    """The kernels of a call in order, but for those of NCCL, whose version stands beside."""
    from mla_var3.toolchain.digest import Code, hash_of, of_cubin

    device, codes = ranks.hardware, []
    shapes = [problem] if way is None else [part_of(problem, ranks.count), merge_of(problem, ranks.count)]
    for shape in shapes:
        choice = choose(shape, device)
        codes.append(choice.plan(shape, device).plan_empty().compile(None, device).code)
    kernel = getattr(way, "kernel", None)
    if kernel is not None:
        launch = {name: str(getattr(kernel.metadata, name, "")) for name in ("num_warps", "num_ctas", "shared")}
        store = of_cubin(bytes(kernel.asm["cubin"]), device.arch, hash_of(launch))
        codes[1:1] = [store]
    whole = Code.of_stages(codes)
    if whole is None:
        return None
    made = whole.to_record()
    if way is not None and kernel is None:
        nccl = ".".join(map(str, ranks.torch.cuda.nccl.version()))
        made["toolchain"] = {**made.get("toolchain", {}), "nccl": nccl}
    return made


def source_hash() -> str:
    from mla_var3.ops import context_parallel, exchange
    from mla_var3.toolchain.digest import hash_of

    files = [Path(context_parallel.__file__), Path(exchange.__file__)]
    files.append(files[0].with_name("peer_store.py"))
    return hash_of(b"\0".join(file.read_bytes() for file in files))


# ---------------------------------------------------------------- one cell
@dataclass
class Run:
    """What the cells have in common."""

    ranks: Ranks
    ways: dict[str, Any]
    links: dict[str, Link]
    limits: LimitItems | None
    settings: BenchSettings
    store: RecordStore
    surroundings: dict[str, Any]
    commit: tuple[str | None, bool | None]

    def cell(self, problem: MlaProblem) -> None:
        ranks, timed = self.ranks, self.limits is not None
        contenders: dict[str, Any] = {ONE: None, **self.ways}
        models = {name: self.model_us(problem, name) for name in contenders}
        line = "  ".join(f"{name} {us:.1f}" for name, us in models.items() if us is not None)
        part = part_of(problem, ranks.count)
        half = expected.us(part.replace(h=problem.h // 2), ranks.hardware)
        if half is not None:  # each half of the heads reads the cache, whatever of the exchange that hides
            line += f"  two halves of the heads, the exchange for nothing {2 * half:.1f}"
        ranks.say(f"{problem.label}: the model says {line}")
        size = problem.cost().bytes / (ranks.count if timed else 1)
        sets = max(1, min(MOST_SETS, round(COLD_BYTES / size + 0.5))) if timed else 1
        shares = [share_of(ranks, problem, seed) for seed in range(sets)]
        wanted = reference(problem, shares[0], shares[0].cache)
        right: dict[str, dict[str, float]] = {}
        for name, way in contenders.items():
            out, lse = call(ranks, problem, shares[0], way)
            answers = (out, lse) if way is not None else (out[:, :, shares[0].heads], lse[:, shares[0].heads])
            reason, error = of_all(ranks, judged(answers, wanted))
            if reason:
                self.write(problem, name, status="incorrect", reason=reason, error=error)
            else:
                right[name] = error
        del wanted
        if not timed:
            for name, error in right.items():
                self.write(problem, name, status="passed", error=error)
            return
        items: dict[tuple[str, bool], Timed] = {}
        for name in list(right):
            try:
                for shared in (True, False):
                    calls = [self.one(problem, share, name, contenders[name], shared) for share in shares]
                    items[name, shared] = Timed(ranks, calls, self.settings)
            except Exception as error:  # the others are to be measured all the same
                items.pop((name, True), None)
                reason = f"{type(error).__name__}: {error}"
                ranks.say(f"{problem.label} {name}: {reason}")
                self.write(problem, name, status="failed", reason=reason, error=right.pop(name))
        in_turn(list(items.values()), self.settings.burst_rounds)
        codes = {}
        for name in right:
            try:
                codes[name] = code_of(ranks, problem, contenders[name])
            except Exception as error:  # what was measured is kept, and says that it does not know its code
                codes[name] = None
                ranks.say(f"{problem.label} {name}: no digest of its code: {type(error).__name__}: {error}")
        for name, error in right.items():
            self.write(
                problem, name, status="passed", error=error,
                time_us={"burst": timing.stats(items[name, True].samples)},
                with_schedule_us={"burst": timing.stats(items[name, False].samples)},
                model_us=models[name], method=self.method(sets, items[name, True].count),
                code=codes[name],
            )  # fmt: skip
            of_model = f", model {models[name]:.1f}" if models[name] is not None else ""
            faster = items[ONE, True].us / items[name, True].us if ONE in right else 0.0
            ranks.say(f"{problem.label} {name}: {items[name, True].us:.1f} us{of_model}, {as_ratio(faster)} x one GPU")
        items.clear()
        ranks.backend.release()

    def one(self, problem: MlaProblem, share: Share, name: str, way: Any, shared: bool) -> Callable[[], Any]:
        from mla_var3.ops import DecodeSchedule

        schedule = share.schedules.setdefault(name, DecodeSchedule()) if shared else None
        return lambda: call(self.ranks, problem, share, way, schedule)

    def model_us(self, problem: MlaProblem, name: str) -> float | None:
        """What the cell should take: what a rank's decode is expected to take, and the exchange."""
        mine = problem if name == ONE else part_of(problem, self.ranks.count)
        us = expected.us(mine, self.ranks.hardware)
        if name == ONE or us is None:
            return us
        link = self.links.get(name)
        return None if link is None else us + link.us(sent_bytes(name, problem, self.ranks.count))

    def method(self, sets: int, calls: int) -> str:
        s = self.settings
        return (
            f"CUDA-graph replays of {calls} calls rotating over {sets} input sets, ranks started together, the slowest "
            f"rank's time; burst: best of {s.burst_replays} replays after {s.idle_ms:g} ms idle, a sample in each of "
            f"{s.burst_rounds} rounds; contenders in turn, every other round reversed; limits before, in the same "
            "process; calls of an input set share a schedule, with_schedule_us those that make their own"
        )

    def write(self, problem: MlaProblem, name: str, *, status: str, error: dict[str, float], **found: Any) -> None:
        """Appends the record; rank 0 does."""
        ranks = self.ranks
        if ranks.rank:
            return
        mine = problem if name == ONE else part_of(problem, ranks.count)
        cost = mine.cost()
        if name == ONE:
            choice = choose(problem, ranks.hardware)
            kernel: dict[str, Any] = choice.kernel.to_record()
            tiling: dict[str, Any] = choice.plan(problem, ranks.hardware).tiling.to_record()
            hashed, requested = environment.source_hash(choice.kernel), "dispatch"
        else:
            kernel = {"language": "ops", "layer": "context_parallel", "design": "mla_decode_cp", "version": 0}
            tiling = {"ranks": ranks.count, "exchange": name}
            hashed, requested = source_hash(), tiling
        device = ranks.hardware.key if self.limits is not None else "cpu"
        limits = None
        if self.limits is not None and "time_us" in found:
            limits = self.limits.to_record(cost, self.limits.age_s() or 0.0)
        link = self.links.get(name)
        record = {
            "id": new_id(), "at": now(), "experiment": EXPERIMENT, "status": status, "kernel": kernel,
            "problem": problem.to_record(), "tiling": tiling, "device": device, "limits": limits, "error": error,
            "environment": {**self.surroundings, "gpus": ranks.count},
            "source": {"commit": self.commit[0], "hash": hashed, "dirty": self.commit[1]},
            "requested": requested, "mode": "time" if self.limits is not None else "check",
            "flops": cost.flops, "bytes": cost.bytes, **found,
        }  # fmt: skip
        if name == ONE:
            record["picked_by"] = "dispatch"
        elif link is not None:
            record["link"] = {"latency_us": link.latency_us, "us_per_mb": link.us_per_mb}
        record["key"] = record_key(kernel, record["problem"], requested, device, hashed, record["mode"])
        self.store.append(Record.model_validate({k: v for k, v in record.items() if v is not None}))


# ---------------------------------------------------------------- the ways in
def cells(small: bool, ranks: int) -> list[MlaProblem]:
    if small:
        return [MlaProblem(b=2, h=4 * ranks, t=200, k=64, p=32), MlaProblem(b=1, h=2 * ranks, t=130, k=64, p=32)]
    return [problem for problem in experiment_cells(EXPERIMENT) if problem.h % ranks == 0]


def bundle(folder: Path, device: Device, ranks: int) -> int:
    """Compiles into a bundle what the ranks will run."""
    from mla_var3.lab.bundle import make_bundle

    decoded, merged = [], []
    for problem in cells(False, ranks):
        decoded += [problem, part_of(problem, ranks)]
        merged.append(merge_of(problem, ranks))
    for given in HOSTILE:
        hostile = MlaProblem(b=5, h=128, t=1000, **given)
        part = part_of(hostile.replace(lengths="uniform"), ranks)
        decoded.append(part.replace(causal=False, tree=True) if hostile.causal else part)
        merged.append(merge_of(hostile, ranks))
    wanted: dict[Any, list[Any]] = {}
    for shape in decoded:
        choice = choose(shape, device)
        # One class is compiled once, whatever the sizes: all of them are given, for their launch knobs.
        wanted.setdefault((choice.kernel, choice.tiling), []).append(shape)
    for shape in merged:
        wanted.setdefault((choose(shape, device).kernel, ()), []).append(shape)
    failed = 0
    for (kernel, knobs), shapes in wanted.items():
        made = make_bundle(folder, [kernel], shapes, [dict(knobs)] if knobs else "default", device)
        print(made.summary())
        failed += made.failed
    return 1 if failed else 0


def measure(out: Path, small: bool, seconds: float, backend: Any = None, **changes: Any) -> int:
    """Checks and times what is possible here. seconds: after which no cell is begun. changes: to the settings."""
    settings = BenchSettings(burst_rounds=5, sustained_rounds=0, idle_ms=20.0, overlap_probe=False)
    settings = replace(settings, **changes)
    ranks = Ranks(settings, backend)
    start = time.monotonic()
    ways = exchanges(ranks)
    fine = check(ranks, ways, small)
    limits, links = ranks.limits, {}
    problems = cells(small, ranks.count)
    if limits is not None:
        ranks.together()
        timing.take_turns(ranks.backend, limits.items, settings, lambda *_: None, _raise)
        limits.measured()
        links = {name: link_of(ranks, name, way, problems, settings) for name, way in ways.items()}
    on_gpu = ranks.device.type == "cuda"
    surroundings = environment.describe(gpu=on_gpu)
    if on_gpu:
        surroundings["nccl"] = ".".join(map(str, ranks.torch.cuda.nccl.version()))
    # A tree that travels without its .git is told which commit it is of.
    named = os.environ.get("MLA_VAR3_COMMIT")
    commit = (named, None) if named else environment.git_state()
    store = RecordStore(out / "context_parallel.jsonl")
    run = Run(ranks, ways, links, limits, settings, store, surroundings, commit)
    for problem in problems:
        (passed,) = ranks.most([time.monotonic() - start])
        if passed >= seconds:
            ranks.say(f"{passed:.0f} s have passed: {problem.label} and what follows is left out")
            break
        run.cell(problem)
        ranks.say(f"{time.monotonic() - start:.0f} s passed")
    ranks.together()
    ranks.dist.destroy_process_group()
    return 0 if fine else 1


def _raise(item: Any, error: Exception) -> None:
    raise error


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/context_parallel"), help="folder of the records")
    parser.add_argument("--seconds", type=float, default=600.0, help="after which no cell is begun (default 600)")
    parser.add_argument("--bundle", type=Path, help="compile what the ranks will run into this folder, and end")
    parser.add_argument("--device", default="h100", metavar="KEY", help="of the bundle (default h100)")
    parser.add_argument("--ranks", type=int, default=2, help="of the bundle (default 2)")
    args = parser.parse_args(words)
    try:
        if args.bundle is not None:
            return bundle(args.bundle, Device.get(args.device), args.ranks)
        if "RANK" not in os.environ:
            raise UserError(f"start it a rank a GPU: torchrun --standalone --nproc-per-node 2 {sys.argv[0]}")
        import torch

        return measure(args.out, not torch.cuda.is_available(), args.seconds)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
