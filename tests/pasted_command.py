"""Stands in for `mla-var3` where what a verb does needs a GPU or long: times are made up; sweeps and profiles are
planned only. Everything before and after that is the command's own. Where there is a GPU, times are real.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from mla_var3 import cli
from mla_var3.device import Device

US = 123.0


def measure_cells(cells: Any, device: Device, settings: Any, *, experiment: str) -> Iterator[Any]:
    """A record of each contender that takes its problem, as `measure.cell` yields them; a refusal is raised."""
    import made_up
    from mla_var3.catalogue import registry
    from mla_var3.measure import environment
    from mla_var3.measure.cell import contender_key
    from mla_var3.record import now

    commit, dirty = environment.git_state()
    for problem, contenders in cells:
        for contender in contenders:
            plan = registry.get_plan(contender.kernel)(problem, None, device)
            plan.require()
            own = {
                "at": now(), "experiment": experiment, "device": device.key, "tiling": {},
                "source": {
                    "hash": registry.source_hash(contender.kernel), "commit": commit or "0" * 40, "dirty": dirty,
                },
                "key": contender_key(problem, contender, device),
            }  # fmt: skip
            yield made_up.record(contender.kernel, US, problem, limit=100.0, **own)


def planned(sweep: Any) -> None:
    """In place of `Sweep.run`."""
    print(f"planned {len(sweep.cells)} cells, {len(sweep.kernels)} kernels")
    assert sweep.cells and (sweep.kernels or sweep.config.kernels.patterns)


def requested(request: Any, detected: Device | None) -> None:
    """In place of `profile.show`."""
    from mla_var3.catalogue import registry

    for kernel in filter(None, (request.kernel, request.baseline)):
        registry.get_plan(kernel)(request.problem, None, Device.get("h200")).require()
        print(f"planned {kernel.label} {request.problem.label}, mode {request.mode}")


def main(words: list[str]) -> int:
    from mla_var3.lab.sweep import launch, run
    from mla_var3.measure import cell

    if words[:1] == ["sweep"]:
        run.Sweep.run = planned  # type: ignore[method-assign]
        run.launcher_of = lambda config: launch.Local(Device.detect())  # no cluster is started
    elif words[:1] == ["profile"]:
        cli.load("profile").show = requested
    elif words[:1] == ["bench"] and Device.detect() is None:
        Device.detect = staticmethod(lambda index=0: Device.get("h200"))  # type: ignore[method-assign]
        cell.measure_cells = measure_cells
    return cli.main(words)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
