"""What a cluster's tests put in place of GPUs: no torch where nothing is measured, so that actors start at once."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
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
