"""Versions that are told the strides of rows alone refuse inputs whose columns lie apart, by the input's name."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from mla_var3.catalogue import registry
from mla_var3.device import Device
from mla_var3.errors import UserError
from mla_var3.workload import gemm, merge, norm, packed_append, rope

H200 = Device.get("h200")
SMALL: dict[str, Any] = {"tokens": 3, "h": 2, "positions": 16, "page": 4}
#: Design: workload, a problem, names of its inputs.
DESIGNS: dict[str, tuple[Any, Any, tuple[str, ...]]] = {
    "absorb_gemm": (gemm, gemm.GemmProblem(tokens=3, h=2), ("x", "weight")),
    "rmsnorm": (norm, norm.NormProblem(rows=3, width=512), ("x", "weight")),
    "rope_append": (rope, rope.RopeProblem(**SMALL), ("q", "latent", "rope")),
    "packed_append": (packed_append, packed_append.PackedAppendProblem(**SMALL), ("q", "latent", "rope")),
    "merge_partials": (merge, merge.MergeProblem(parts=2, tokens=3, h=2), ("partials", "lse")),
}
VERSIONS = [
    (f"{language}/{design}", i)
    for design, (_, _, names) in DESIGNS.items()
    for language in ("triton", "cutile-dsl")
    for i in range(len(names))
    if f"{language}/{design}" in {k.label for k in registry.all_kernels()}
]


@pytest.mark.parametrize(("label", "i"), VERSIONS)
def test_columns_that_lie_apart_are_refused_when_planned(label: str, i: int) -> None:
    kernel = registry.KernelId.parse(label)
    if (reason := registry.missing(kernel)) is not None:
        pytest.skip(reason)
    workload, problem, names = DESIGNS[kernel.design]
    inputs = list(workload.make_inputs(problem))
    plan = registry.get_plan(kernel)(problem, None, H200)
    assert plan.plan(*inputs).output_tensors
    x = inputs[i]
    room = x.new_zeros((*x.shape[:-1], 2 * x.shape[-1]))
    inputs[i] = room[..., ::2].copy_(x)
    with pytest.raises(UserError, match=rf"\b{names[i]} has (strides|columns)"):
        plan.plan(*inputs)
