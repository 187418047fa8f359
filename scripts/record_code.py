#!/usr/bin/env python3
"""Writes down what records of live versions timed compiles to, in results/code.json (`catalogue.ledger`); needs no GPU.

    scripts/record_code.py                 # every version whose source changed since its lines were written
    scripts/record_code.py --all           # all of them, compiled anew
    scripts/record_code.py cute-dsl/flash_mla_v23
    PYTHONPATH=DIR scripts/record_code.py triton/flash_mla     # pip install --no-deps --target DIR triton==3.6.0
    PYTHONPATH=DIR scripts/record_code.py --compare    # lists what another compiler makes otherwise; writes nothing

Of CuTe, DIR has two folders to name, as its packages are found through a .pth file: with the release 4.8.0,

    pip install --no-deps --target DIR nvidia-cutlass-dsl{,-libs-base,-libs-core,-libs-cu13}==4.8.0
    PYTHONPATH=DIR/nvidia_cutlass_dsl/dsl_packages:DIR scripts/record_code.py --compare cute-dsl/flash_mla_v23

A line says what the source that is here makes with the compiler of the records: where they name another one than is
installed, lines stay as they are. A record that timed the source that is here says itself which code that makes, so
that nothing is compiled for it. Other lines are compiled, each in a process of its own: in one that has compiled others
before, CuTe's compiler was seen to choose other registers. That takes about ten seconds.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from mla_var3 import paths
from mla_var3.catalogue import ledger, registry
from mla_var3.catalogue.ledger import Line
from mla_var3.catalogue.retired import retired
from mla_var3.device import Device
from mla_var3.lab.knobs import knobs, own_knobs
from mla_var3.record import load
from mla_var3.toolchain.aot import code_knobs
from mla_var3.toolchain.digest import Code
from mla_var3.toolchain.versions import toolchain
from mla_var3.workload import get, problem_from_record

#: Beside what records timed, so that every compiled version has a line: kernel, workload, problem, tiling.
ALWAYS = (
    ("cute-dsl/flash_mla", "decode", {"h": 128}, {"num_splits": 1}),
    ("cute-dsl/flash_mla", "decode", {"h": 128}, {"num_splits": 4}),
    ("cute-dsl/sparse_mla", "sparse_decode", {"h": 128, "layout": "bf16"}, None),
    ("cutile-dsl/flash_attention", "prefill", {"b": 8, "s": 1024, "h": 128, "causal": True}, None),
)


#: CuTe versions with a part whose tiles follow from the number of rows, and are no knob of theirs.
SIZED = frozenset({"cute-dsl/chunk_absorb"})


@dataclass(frozen=True)
class Call:
    """What one line is compiled from. tiling: of the record, None for the default. toolchain: what compiled what a
    record timed. code: what that was, of a record that timed the source that is here; else None."""

    label: str
    problem: dict[str, Any]
    tiling: dict[str, Any] | None
    device: str
    toolchain: Mapping[str, str] = field(default_factory=dict)
    code: Mapping[str, Any] | None = None

    def place(self) -> tuple[Any, ...]:
        """Equal for calls that one line stands for, as `place_of` has it of that line."""
        pd, plan = self.plan()
        knobs, functions = json.dumps(code_knobs(plan.tiling), sort_keys=True), plan.plan_empty().functions
        return self.label, pd.problem_class().key(), knobs, functions, own_problem(self.label, pd)

    def taken(self) -> bool:
        """Whether the version still takes the problem: it may have left it to a later one."""
        plan = registry.get_plan(registry.KernelId.parse(self.label))
        return bool(plan.requires.accepts(problem_from_record(self.problem)))

    def plan(self) -> tuple[Any, Any]:
        kernel, pd, hardware = registry.KernelId.parse(self.label), problem_from_record(self.problem), self.device
        plan = registry.get_plan(kernel)(pd, None, Device.get(hardware))
        # Of a record's knobs, those that the version still has, but for parts that are retired since.
        gone = retired()
        asked = {
            name: value
            for name, value in own_knobs(type(plan), self.tiling).items()
            if not (isinstance(value, str) and value in gone)
        }
        return pd, plan.with_tiling(knobs(plan.tiling, asked))


def place_of(line: Line) -> tuple[Any, ...]:
    knobs = json.dumps(line.knobs, sort_keys=True)
    return line.kernel, line.problem_class, knobs, tuple(line.functions), line.problem


def own_problem(label: str, problem: Any) -> str:
    """`Line.problem`: elsewhere than in CuTe a launch is known by its values, which follow from the sizes. Of the
    versions in `SIZED` the code does."""
    return "" if label.startswith("cute-dsl/") and label not in SIZED else problem.label


def line_of(call: Call) -> Line:
    """The line of a call; compiled in this process if no record says what it is."""
    pd, plan = call.plan()
    kernel = plan.plan_empty()
    code = Code.from_record(call.code) if call.code else kernel.compile(None, Device.get(call.device)).code
    if code is None:
        raise SystemExit(f"{call.label}: what it compiles to has no digest")
    return Line(
        kernel=call.label,
        problem_class=pd.problem_class().key(),
        knobs=code_knobs(plan.tiling),
        functions=kernel.functions,
        stages=[stage.name for stage in code.kernels],
        arch=code.arch,
        source=ledger.source_of(call.label),
        digest=code.digest,
        problem=own_problem(call.label, pd),
        toolchain=dict(code.toolchain),
    )


def wanted(kernels: Collection[str] = ()) -> Iterator[Call]:
    """What every record timed that says so, of versions that are here, take it and are compiled here, and `ALWAYS`.
    kernels: only these versions, where any are named."""
    here = {kernel.label for kernel in registry.all_kernels() if not kernels or kernel.label in kernels}
    for label, workload, fields, tiling in ALWAYS:
        if label in here:
            yield Call(label, get(workload).problem(**fields).to_record(), tiling, "h200")
    for record in load([paths.shipped_results_dir()]).records:
        code = record.code or {}
        if code.get("kernels") and record.time_us and record.kernel.label in here:
            own = code if record.source.hash == ledger.source_of(record.kernel.label) else None
            by = code.get("toolchain") or {}
            call = Call(record.kernel.label, record.problem, record.tiling, record.device, by, own)
            if call.taken():
                yield call


def compile_apart(calls: Sequence[Call]) -> int:
    """Prints the lines of calls, each compiled in a process of its own: a copy of this one, which has imported the
    compilers, as that takes seconds. 1 where one did not compile."""
    import torch  # noqa: F401 - for the copies

    for package in {registry.LANGUAGES[call.label.split("/")[0]].package for call in calls}:
        importlib.import_module(package)
    for call in calls:
        if not (child := os.fork()):
            status = 1
            try:
                print(json.dumps(asdict(line_of(replace(call, code=None)))), flush=True)
                status = 0
            except BaseException:
                traceback.print_exc()
            os._exit(status)
        if os.waitpid(child, 0)[1]:
            return 1
    return 0


def compiled_apart(calls: Sequence[Call]) -> list[Line]:
    """The lines of calls, by `compile_apart` in a process that is started for them."""
    words = [sys.executable, __file__, "--some", json.dumps([asdict(call) for call in calls])]
    made = []
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        for text in process.stdout or ():
            made.append(line := Line(**json.loads(text)))
            where = line.problem or line.problem_class
            print(f"{line.kernel} {where} {'+'.join(line.functions)}: {line.digest}", flush=True)
    if process.returncode:
        raise SystemExit(f"{calls[len(made)].label} did not compile: nothing was written.")
    return made


def compiled_here(calls: Sequence[Call]) -> list[Line]:
    """The lines of calls, by as many processes as there are cores."""
    workers = os.cpu_count() or 1
    with ThreadPoolExecutor(workers) as pool:
        shares = filter(None, (calls[i::workers] for i in range(workers)))
        return [line for found in pool.map(compiled_apart, shares) for line in found]


def compare(kernels: Collection[str]) -> int:
    """Compiles what lines of unchanged sources stand for with the compiler that is here, and prints those whose digest
    is another; 1 where there are any."""
    before = {place_of(line): line for line in ledger.lines() if line.source == ledger.source_of(line.kernel)}
    calls: dict[tuple[Any, ...], Call] = {}
    for call in wanted(kernels):
        if (place := call.place()) in before:
            calls.setdefault(place, call)  # the first, of which lines are
    made = compiled_here(list(calls.values()))
    differing = [line for line in made if line.digest != before[place_of(line)].digest]
    for line in differing:
        was = before[place_of(line)]
        print(f"{line.kernel} {line.problem or line.problem_class} {dict(line.knobs)}: {was.digest} -> {line.digest}")
    releases = sorted({(name, version) for line in made for name, version in line.toolchain.items()})
    print(f"{len(differing)} of {len(made)} lines differ with {', '.join(map(' '.join, releases))}")
    return bool(differing)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("kernels", nargs="*", metavar="KERNEL", help="only these versions")
    parser.add_argument("--all", action="store_true", help="also what has a line of the source that is here")
    parser.add_argument("--compare", action="store_true", help="compile the lines anew and list those that differ")
    parser.add_argument("--some", help=argparse.SUPPRESS)  # JSON of a list of `Call`
    args = parser.parse_args()
    if args.some:
        return compile_apart([Call(**call) for call in json.loads(args.some)])
    if args.compare:
        return compare(args.kernels)
    here = {kernel.label for kernel in registry.all_kernels()}
    lines = [line for line in ledger.lines() if line.kernel in here]
    known = () if args.all else lines
    current = {place_of(line) for line in known if line.source == ledger.source_of(line.kernel)}
    todo: dict[tuple[Any, ...], Call] = {}
    told: dict[tuple[Any, ...], Call] = {}
    other: Counter[str] = Counter()
    asked: set[tuple[Any, ...]] = set()
    for call in wanted(args.kernels):
        place = call.place()
        asked.add(place)
        if place in current:
            continue
        if call.code and not args.all:
            told.setdefault(place, call)
            continue
        language = call.label.split("/")[0]
        installed = toolchain(language)
        if any(installed.get(package, version) != version for package, version in call.toolchain.items()):
            other[f"{call.label}: compiled by {dict(call.toolchain)}, and {installed} is here"] += 1
            continue
        todo.setdefault(place, call)
    made = [line_of(call) for call in told.values()]
    made += compiled_here([call for place, call in todo.items() if place not in told])
    # A line that nothing asks for any more goes, unless its version was not looked at.
    # So does one of an older source: the new one launches other kernels, or its record needs another compiler.
    looked = [
        line
        for line in lines
        if (args.kernels and line.kernel not in args.kernels)
        or (place_of(line) in asked and line.source == ledger.source_of(line.kernel))
    ]
    kept = [*looked, *made]
    for what, count in other.items():
        print(f"{count} left as they are: {what}")
    kept.sort(key=lambda line: (line.kernel, line.problem_class, line.problem, list(line.functions), line.digest))
    ledger.path().write_text(ledger.to_json(kept), encoding="utf-8")
    print(f"{len(kept)} lines in {ledger.path()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
