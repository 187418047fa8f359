"""What a cluster's tests put in place of GPUs: no torch where nothing is measured, so that actors start at once."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mla_var3.device import Device
from mla_var3.lab.sweep.hand import Cell, Hand, keep

#: Heads of a cell that ends whoever measures it, and of one that takes seconds.
DEADLY, SLOW = 13, 17
SECONDS = 0.3


class PretendHand(Hand):
    """Measures nothing: notes in the file SWEEP_LOG who took which cell."""

    def device(self, announced: Device | None) -> Device | None:
        return announced

    def measure(self, cell: Cell, settings: Any, experiment: str, *code: Any) -> list[str]:
        import ray

        from mla_var3.measure.cell import unmeasured

        context = ray.get_runtime_context()
        note = {
            "cell": cell.problem.label, "device": cell.device.key, "node": context.get_node_id(), "pid": os.getpid(),
            "gpu": context.get_accelerator_ids()["GPU"], "code": sorted(name for files in code for name, _ in files),
        }  # fmt: skip
        with Path(os.environ["SWEEP_LOG"]).open("a") as log:
            log.write(json.dumps(note) + "\n")
        heads = getattr(cell.problem, "h", 0)
        if heads == DEADLY:
            os.kill(os.getpid(), signal.SIGKILL)
        os.environ["XDG_CACHE_HOME"] = str(Path(os.environ["SWEEP_LOG"]).with_name("another_cache"))
        for files in code:
            keep(files)
        time.sleep(5.0 if heads == SLOW else SECONDS)
        outcome: dict[str, Any] = {"status": "infeasible", "reason": "nothing was measured"}
        records = unmeasured(cell.problem, cell.contenders, cell.device, settings, experiment=experiment, **outcome)
        return [record.to_json() for record in records]


class HostBackend:
    """Times torch on the CPU with the host's clock. Of two requests every answer is wrong."""

    torch_device = "cpu"
    times = True
    clock = "perf_counter of a test"

    def check(self, plan: Any, device: Any, quick: bool) -> Any:
        return SimpleNamespace(ok=plan.problem.b != 2, reason="the answer is wrong", error={"out": 0.0, "lse": 0.0})

    def capture(self, calls: Any, rotations: int, *, graph: bool = True, separated: bool = False) -> Any:
        return lambda: [call() for _ in range(rotations) for call in calls]

    def start(self, replay: Any, count: int) -> Any:
        taken = []
        for _ in range(count):
            start = time.perf_counter()
            replay()
            taken.append((time.perf_counter() - start) * 1e6)
        return SimpleNamespace(wait=lambda: taken)

    def launches(self, call: Any) -> int | None:
        return 1

    def sensors(self) -> dict[str, float]:
        return {"sm_mhz": 1980.0}

    def idle(self, seconds: float) -> None: ...

    def synchronize(self) -> None: ...

    def broken(self) -> bool:
        return False

    def release(self) -> None: ...

    def limit_calls(self) -> Any:
        return {key: (lambda: time.sleep(1e-4), 1e6) for key in ("matmul", "read", "copy")}

    def cross_check_us(self, calls: Any, graph_ms: float) -> float:
        return 21.0
