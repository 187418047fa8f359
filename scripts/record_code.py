#!/usr/bin/env python3
"""Compiles what records of live versions timed and writes results/code.json (`mla_var3.kernel.ledger`); needs no GPU.

    scripts/record_code.py                 # every version whose source changed since its lines were written
    scripts/record_code.py --all           # all of them
    scripts/record_code.py cute-dsl/flash_mla_v21

A kernel is compiled in a process of its own: in one that has compiled others before, the compiler was seen to choose
other registers. One compilation takes about ten seconds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from mla_var3 import paths
from mla_var3.device import Device
from mla_var3.kernel import ledger, registry
from mla_var3.kernel.ledger import Line
from mla_var3.lab.sweep.plan import knobs
from mla_var3.record import load
from mla_var3.workload import problem_from_record
from mla_var3.workload.decode import MlaProblem

#: Beside what records timed, so that every CuTe version has a line: kernel, problem, tiling.
ALWAYS = (("cute-dsl/flash_mla", {"h": 128}, {"num_splits": 1}), ("cute-dsl/flash_mla", {"h": 128}, {"num_splits": 4}))


def compiled_line(label: str, problem: dict[str, Any], tiling: dict[str, Any] | None, device: str) -> Line:
    """The line of one version, compiled in this process."""
    from mla_var3.toolchain.aot import code_knobs

    kernel = registry.KernelId.parse(label)
    pd, hardware = problem_from_record(problem), Device.get(device)
    plan = registry.get_plan(kernel)(pd, None, hardware)
    plan = plan.with_tiling(knobs(plan.tiling, tiling or {}))
    code = plan.plan_empty().compile(None, hardware).code
    if code is None:
        raise SystemExit(f"{label}: what it compiles to has no digest")
    return Line(
        kernel=label,
        problem_class=pd.problem_class().key(),
        knobs=code_knobs(plan.tiling),
        stages=[stage.name for stage in code.kernels],
        arch=code.arch,
        source=registry.source_hash(kernel),
        digest=code.digest,
    )


def wanted() -> Iterator[tuple[str, dict[str, Any], dict[str, Any] | None, str]]:
    """(version, problem, tiling, device) of every record that says which code it timed, and of `ALWAYS`."""
    here = {kernel.label for kernel in registry.all_kernels()}
    for label, fields, tiling in ALWAYS:
        yield label, MlaProblem(**fields).to_record(), tiling, "h200"
    for record in load([paths.shipped_results_dir()]).records:
        if record.code and not record.code.get("binary") and record.kernel.label in here:
            yield record.kernel.label, record.problem, record.tiling, record.device


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("kernels", nargs="*", metavar="KERNEL", help="only these versions")
    parser.add_argument("--all", action="store_true", help="also what has a line of the source that is here")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # JSON of the arguments of `compiled_line`
    args = parser.parse_args()
    if args.one:
        print(json.dumps(asdict(compiled_line(*json.loads(args.one)))))
        return 0
    hashes = {kernel.label: registry.source_hash(kernel) for kernel in registry.all_kernels()}
    lines = [line for line in ledger.lines() if line.kernel in hashes]
    known = () if args.all else lines
    current = {(line.kernel, line.problem_class) for line in known if line.source == hashes[line.kernel]}
    todo: dict[str, tuple[str, str]] = {}  # arguments of `compiled_line` -> (version, problem class)
    for label, problem, tiling, device in wanted():
        place = (label, problem_from_record(problem).problem_class().key())
        if place not in current and (not args.kernels or label in args.kernels):
            # Sizes that code is not made for are all alike, so that each class is compiled once.
            alike = {**problem, "b": 1, "t": 4096, "lengths": "uniform"}
            todo.setdefault(json.dumps([label, alike, tiling, device], sort_keys=True), place)
    again = set(todo.values())
    kept = [line for line in lines if (line.kernel, line.problem_class) not in again]
    for arguments in todo:
        words = [sys.executable, __file__, "--one", arguments]
        line = Line(**json.loads(subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout))
        kept.append(line)
        print(f"{line.kernel} {line.problem_class} {'+'.join(line.stages)}: {line.digest}", flush=True)
    kept.sort(key=lambda line: (line.kernel, line.problem_class, list(line.stages), line.digest))
    ledger.path().write_text(ledger.to_json(kept), encoding="utf-8")
    print(f"{len(kept)} lines in {ledger.path()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
