#!/usr/bin/env python3
"""What a sweep on Ray costs its driver, and what compiling through Ray costs against the pool of processes.

    scripts/sweep_cost.py            # about 30 minutes on two cores; writes results/sweep_cost.json and prints tables

Cells measure nothing: each takes a GPU that is a logical resource, on a node that is a process of this machine, for
20 ms. Seconds run from the plan of the sweep to its last record on the disk; CPU time and memory are the driver's.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mla_var3 import paths
from mla_var3.device import Device
from mla_var3.lab.sweep.config import ExperimentConfig, KernelsConfig, SweepConfig, compose
from mla_var3.lab.sweep.hand import Cell, Hand
from mla_var3.lab.sweep.launch import Launcher, Local
from mla_var3.lab.sweep.run import Sweep
from mla_var3.measure import environment

OUT = Path(__file__).resolve().parents[1] / "results" / "sweep_cost.json"
CELL_S = 0.02
DEVICE, KERNEL = "h100", "torch/flash_mla"
STORE = 80_000_000


class Sleeper(Hand):
    """Sleeps in place of measuring."""

    def device(self, announced: Device | None) -> Device | None:
        return announced

    def measure(self, cell: Cell, settings: Any, experiment: str, *code: Any) -> list[str]:
        from mla_var3.measure.cell import contender_key, unmeasured
        from mla_var3.record import new_id

        time.sleep(CELL_S)
        (contender,) = cell.contenders
        if not hasattr(self, "record"):  # looking at packages takes longer than all the rest
            outcome: dict[str, Any] = {"status": "infeasible", "reason": "nothing is measured"}
            (self.record,) = unmeasured(
                cell.problem, [contender], cell.device, settings, experiment=experiment, **outcome
            )
        key = contender_key(cell.problem, contender, cell.device)
        own = {"id": new_id(), "problem": cell.problem.to_record(), "key": key}
        return [self.record.model_copy(update=own).to_json()]


def cells_on(cells: int, nodes: int) -> dict[str, Any]:
    """A sweep of so many cells on so many nodes of one GPU each."""
    from ray.cluster_utils import Cluster

    from mla_var3.lab.sweep.ray_ import ANNOUNCED, Ray

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": STORE, "include_dashboard": False}
    )
    for _ in range(nodes):
        cluster.add_node(num_cpus=0, num_gpus=1, resources={ANNOUNCED + DEVICE: 1}, object_store_memory=STORE)
    os.environ["RAY_ADDRESS"] = cluster.address
    grid = [{"b": 1 + i % 100, "t": 64 * (1 + i // 100)} for i in range(cells)]
    config = SweepConfig(
        experiment=ExperimentConfig(name="cost", cells=grid), kernels=KernelsConfig(patterns=[KERNEL]), launcher="ray"
    )
    launcher = Ray(Sleeper)
    try:
        cpu, began = time.process_time(), time.monotonic()
        sweep = Sweep(config, launcher)
        sweep.run()
        cpu, passed = time.process_time() - cpu, time.monotonic() - began
    finally:
        launcher.close()
        cluster.shutdown()
    made = sum(len(journal.made) for journal in sweep.journals.values())
    if made != cells:
        raise SystemExit(f"{made} records of {cells} cells")
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    per_cell = round(1e3 * cpu / cells, 2)
    return {
        "cells": cells, "nodes": nodes, "seconds": round(passed, 1), "driver_cpu_ms_per_cell": per_cell,
        "driver_mb": round(memory),
    }  # fmt: skip


def compiling(how: str, kernels: str) -> dict[str, Any]:
    """`experiment=compile_matrix` with two compiler processes and empty caches."""
    words = ["experiment=compile_matrix", f"kernels={kernels}", "jobs=2", f"launcher={how}"]
    launcher: Launcher
    if how == "ray":
        import ray

        from mla_var3.lab.sweep.ray_ import Ray

        ray.init(
            num_cpus=2, object_store_memory=STORE, include_dashboard=False, logging_level="ERROR",
            runtime_env={"py_modules": [str(paths.package())]},
        )  # fmt: skip
        launcher = Ray()
    else:
        launcher = Local(None)
    began = time.monotonic()
    sweep = Sweep(compose(words), launcher)
    sweep.run()
    passed = time.monotonic() - began
    launcher.close()
    made = [record for journal in sweep.journals.values() for record in journal.made]
    return {"launcher": how, "kernels": kernels, "points": len(made), "seconds": round(passed, 1)}


def in_a_process(*words: str) -> dict[str, Any]:
    """One measurement, with memory, caches and a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="sweep-cost-") as folder:
        caches = dict.fromkeys(("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "CUDA_TILE_CACHE_DIR"), f"{folder}/cache")
        env = {**os.environ, "PYTHONPATH": paths.python_path(), **caches}
        env.pop("RAY_ADDRESS", None)
        command = [sys.executable, str(Path(__file__).resolve()), "--one", *words]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
        shutil.rmtree(f"{folder}/cache", ignore_errors=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(found, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cells", type=int, nargs="*", default=[1_000, 10_000], help="none leaves this part")
    parser.add_argument("--nodes", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--kernels", default="all", help="of compile_matrix; '' leaves it out")
    parser.add_argument("--repeats", type=int, default=3, help="of compile_matrix, launchers in turn")
    parser.add_argument("--one", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        what, *words = args.one
        found = cells_on(*map(int, words)) if what == "cells" else compiling(*words)
        print(json.dumps(found))
        return
    commit, dirty = environment.git_state()
    made = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit, "dirty": dirty,
        "cores": len(os.sched_getaffinity(0)), "python": platform.python_version(),
    }  # fmt: skip
    result: dict[str, Any] = json.loads(OUT.read_text()) if OUT.is_file() else {}
    if args.cells:
        runs = [in_a_process("cells", str(c), str(n)) for c in args.cells for n in args.nodes]
        result["cells"] = {**made, "cell_s": CELL_S, "runs": runs}
    if args.kernels:
        turns = [how for _ in range(args.repeats) for how in ("local", "ray")]
        result["compile_matrix"] = {**made, "runs": [in_a_process("compile", how, args.kernels) for how in turns]}
    OUT.write_text(json.dumps(result, indent=1) + "\n")
    if not args.cells:
        return
    print(f"\n| cells | {' | '.join(f'{n} nodes (s)' for n in args.nodes)} |")
    print("| --- " * (1 + len(args.nodes)) + "|")
    for cells in args.cells:
        row = [str(found["seconds"]) for found in result["cells"]["runs"] if found["cells"] == cells]
        print(f"| {cells:,} | {' | '.join(row)} |")


if __name__ == "__main__":
    main()
