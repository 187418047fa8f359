"""Positions that a table does not have, in a version of rope_append, packed_append or indexed_append.

python rope_positions.py LABEL...     prints why a version is wrong on a CPU; TRITON_INTERPRET=1 for those of Triton
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

from mla_var3 import workload
from mla_var3.catalogue import registry
from mla_var3.device import Device
from mla_var3.packed_cache import E4M3_NAN
from mla_var3.workload.indexed_append import IndexedAppendProblem
from mla_var3.workload.packed_append import PackedAppendProblem
from mla_var3.workload.rope import RopeProblem

SIZES: dict[str, Any] = {"tokens": 9, "h": 4, "positions": 16, "page": 4}
PROBLEMS: list[RopeProblem] = [
    RopeProblem(**SIZES),
    RopeProblem(**SIZES, interleaved=False, index="int32"),
    *(PackedAppendProblem(**SIZES, layout=layout, interleaved=layout != "v4") for layout in ("v32", "v4", "flat")),
    *(IndexedAppendProblem(**{**SIZES, "page": 64}, interleaved_keys=pairs) for pairs in (False, True)),
]
#: Beside the table, close to it and far, and those of the table, which stay right.
POSITIONS = [0, -1, 15, 16, 17, -16, 5, -(2**31), 2**31 - 1]


def problems(label: str) -> list[RopeProblem]:
    design = label.split("/")[1]
    return [p for p in PROBLEMS if p.workload == (design if design in workload.names() else "rope")]


def rows_of(problem: RopeProblem, outputs: Any, slots: torch.Tensor) -> dict[str, torch.Tensor]:
    """What tokens have in the cache, in float64."""
    at = (slots.long() // problem.page, slots.long() % problem.page)
    parts = [x[at].double() for x in outputs[1:]]
    if not isinstance(problem, PackedAppendProblem | IndexedAppendProblem):
        return {"latent": parts[0][:, : problem.k], "rope": parts[0][:, problem.k :]}
    names = ("latent", "scales", "rope", "index_codes", "index_scales")
    return dict(zip(names, parts, strict=isinstance(problem, IndexedAppendProblem)))


def wrong(label: str, problem: RopeProblem, device: str) -> Iterator[str]:
    """What is not as it must be: rotated columns NaN of tokens outside of the table, and all else right."""
    kind = workload.get(problem.workload)
    inputs = list(kind.make_inputs(problem, device, seed=3, poison=False))
    positions = torch.tensor(POSITIONS, device=device).to(inputs[3].dtype)
    # What lies beside the table would be taken for cosines and sines.
    beside = torch.full((3 * problem.positions, problem.p), 0.5, device=device)
    beside[problem.positions : 2 * problem.positions] = inputs[5]
    inputs[5] = beside[problem.positions : 2 * problem.positions]
    inside = [i for i, position in enumerate(POSITIONS) if 0 <= position < problem.positions]
    outside = [i for i in range(len(POSITIONS)) if i not in inside]
    inputs[3] = positions.clamp(0, problem.positions - 1)
    oracle = kind.reference(problem, *inputs)
    inputs[3] = positions
    hardware = Device.detect() if device == "cuda" else Device.get("h200")
    kernel = registry.get_plan(registry.KernelId.parse(label))(problem, None, hardware).plan(*inputs)
    for x in kernel.output_tensors:
        x.fill_(3)
    outputs = kernel()
    if not bool((outputs[0][..., : problem.k] == 3).all()):
        yield "columns of out that are nobody's were written"
    found, wanted = (rows_of(problem, x, inputs[4]) for x in (outputs, oracle))
    found["out"], wanted["out"] = (x[0][..., problem.k :].double() for x in (outputs, oracle))
    for name in found:
        of = found[name]
        if name in ("out", "rope"):
            odd = of == E4M3_NAN if name == "rope" and problem.label.startswith("flat") else of.isnan()
            if not bool(odd[outside].all()):
                yield f"{name} of a position outside of the table is not NaN"
            if not torch.allclose(of[inside], wanted[name][inside], rtol=2**-7, atol=1e-5):
                yield f"{name} of other positions is wrong"
        elif name.startswith("index_"):  # outside of the table scales are those of the columns that do not turn
            if name == "index_codes" and not bool((of[outside, : problem.p] == E4M3_NAN).all()):
                yield f"{name} of a position outside of the table are not NaN where they turn"
            if not torch.equal(of[inside], wanted[name][inside]):
                yield f"{name} of other positions is wrong"
        elif not torch.equal(of, wanted[name]):
            yield f"{name} is wrong"


if __name__ == "__main__":
    for version in sys.argv[1:]:
        for given in problems(version):
            for reason in wrong(version, given, "cpu"):
                print(version, given.label, reason)
        print("tried", version, len(problems(version)))
