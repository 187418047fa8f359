"""The interpreter against the compiler, without pytest and in several processes: tileiras takes most of the time.

    python tests/cutile_cpu/gpu_compare.py            # all cases, as many processes as cores, at most 16
    python tests/cutile_cpu/gpu_compare.py -j 4 cast mma   # cases whose names begin so

It prints every difference and a summary; it exits with 1 when there is a difference. A case that tileiras refuses and
that does not say so (`Case.refused`) is one.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent / "src")]


def to(value: Any, device: str) -> Any:
    """Arguments on another device; lists of tensors too."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.to(device, copy=True)
    return [to(v, device) for v in value] if isinstance(value, list) else value


def case_names() -> list[str]:
    """Cases that a GPU run takes. Integers of 16 bits, and scalars of most types, are left to the CPU's tests: they
    are held against exact integers there, and each kernel costs a compilation here."""
    import cutile_cases_more  # noqa: F401
    from cutile_cases import CASES

    def wanted(name: str) -> bool:
        parts = name.split("-")
        return parts[-1] not in ("int16", "uint16") and ("scalar" not in parts or parts[-1] in ("int32", "uint64"))

    return [case.name for case in CASES if wanted(case.name)]


def compare(name: str) -> tuple[str, str]:
    """("same" | "different" | "refused", details) of one case; refused: by both, as the case expects."""
    import cuda.tile as ct
    import cutile_cases_more  # noqa: F401
    import torch
    from cutile_cases import CASES
    from cutile_compare import difference

    from mla_var3 import cutile_cpu

    (case,) = (c for c in CASES if c.name == name)
    arguments = case.inputs()
    given = [to(a, "cuda") for a in copy.deepcopy(arguments)]
    try:
        ct.launch(torch.cuda.current_stream(), (*case.grid, 1, 1)[:3], case.kernel, tuple(given))
        torch.cuda.synchronize()
    except ct.TileError as refused:
        text = str(refused).splitlines()[-1]
        return ("refused", text) if case.refused else ("different", f"{name}: tileiras refuses it: {text}")
    if case.refused:
        return "different", f"{name}: tileiras takes it, and the interpreter refuses it"
    cutile_cpu.launch(case.grid, case.kernel, arguments)
    found = [difference(case, arguments[i], given[i].cpu()) for i in case.outputs]
    text = "; ".join(f for f in found if f)
    return ("different" if text else "same"), text


def _one(name: str) -> tuple[str, str, str]:
    try:
        return (name, *compare(name))
    except Exception as error:
        return name, "different", f"{name}: {type(error).__name__}: {error}"


def main() -> int:
    from multiprocessing import get_context

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("-j", "--jobs", type=int, default=min(len(os.sched_getaffinity(0)), 16))
    parser.add_argument("starts", nargs="*", help="beginnings of the names of cases")
    options = parser.parse_args()
    names = [n for n in case_names() if not options.starts or n.startswith(tuple(options.starts))]
    count: dict[str, int] = {"same": 0, "different": 0, "refused": 0}
    with get_context("spawn").Pool(options.jobs) as pool:
        for name, outcome, text in pool.imap_unordered(_one, names, chunksize=4):
            count[outcome] += 1
            if outcome == "different":
                print(f"{outcome:9} {name}: {text}", flush=True)
    count["refused by tileiras, as expected"] = count.pop("refused")
    print(", ".join(f"{n} {what}" for what, n in count.items()), f"of {len(names)} kernels", flush=True)
    return int(count["different"] > 0 or count["same"] == 0)


if __name__ == "__main__":
    raise SystemExit(main())
