"""Profiling one kernel from a program: how near to the limit it is, what it takes, and what to look at next.

    python examples/profile_one.py                              # cute-dsl/flash_mla_v23, DeepSeek V3's decode
    python examples/profile_one.py triton/rmsnorm --rows 4096   # a kernel of another workload

On a GPU machine the kernel runs, with the decisive counters where Nsight Compute and its permission are here. Without
one it is compiled for an H200 and set beside the roofline: what it takes of an SM needs no GPU. `mla-var3 profile` does
the same on the command line, `mla-var3 diagnose` goes on from there.

Needs the extras lab and cute: `pip install -e '.[lab,cute]'` in a checkout.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from mla_var3.catalogue.registry import KernelId, get_plan
from mla_var3.device import Device
from mla_var3.errors import EXIT_USER_ERROR, UserError
from mla_var3.lab.profiling.request import OUT, Request
from mla_var3.lab.profiling.run import profile
from mla_var3.toolchain.mistakes import KernelMistake


def look(label: str, fields: dict[str, int], out: str) -> None:
    """Prints what a profile of a version says. label: language/design[_vN]. fields: of its workload's problem."""
    kernel = KernelId.parse(label)
    problem = get_plan(kernel).workload.problem.from_record(fields)
    made = profile(Request(kernel, problem, "annotation", out=out), Device.detect())
    (facts,) = made.facts
    print(f"{label}, {problem.label}, tiling {dict(facts.tiling)}")
    print(f"  {facts.limit.bound}-bound: no kernel can take less than {facts.limit.limit_us:.1f} us")
    time = facts.time_us()
    if time is not None:
        us, how = time
        print(f"  {us:.1f} us, {facts.limit.share(us):.0f} % of the limit ({how})")
    else:
        print("  not run: this machine has no such GPU")
    for stage in (facts.compiled.stages or (facts.compiled,)) if facts.compiled is not None else ():
        taken = stage.resources
        print(
            f"  {stage.name}: {taken.registers} registers, {taken.smem} bytes of shared "
            f"memory, {taken.spill_bytes} spilled, {taken.ctas_per_sm} CTAs an SM"
        )
    print(f"  {made.folder / 'report.md'}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Profile one kernel.")
    parser.add_argument("kernel", nargs="?", default="cute-dsl/flash_mla_v23", help="language/design[_vN]")
    for name in ("b", "t", "h", "rows", "width"):
        parser.add_argument(f"--{name}", type=int, help="field of the problem")
    parser.add_argument("--out", default=OUT, help="where profiles go (default: %(default)s)")
    args = vars(parser.parse_args(arguments))
    kernel, out = args.pop("kernel"), args.pop("out")
    try:
        look(kernel, {name: value for name, value in args.items() if value is not None}, out)
    except (UserError, KernelMistake) as error:
        print(error, file=sys.stderr)
        return EXIT_USER_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main())
