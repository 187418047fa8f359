"""Positions outside of the table, in every language that turns by one: NaN, and nothing beside the table is read."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import rope_positions
from planning import plan_type
from rope_positions import problems, wrong

from mla_var3.catalogue import registry
from mla_var3.device import Device
from running import in_tritons_interpreter

OURS = [k.label for k in registry.all_kernels() if k.layer == "rope" and k.language != "peer"]


def test_all_of_them_are_tried() -> None:
    languages = {label.split("/")[0] for label in OURS}
    assert languages == {"torch", "triton", "cute-dsl", "cutile-dsl"} and all(problems(label) for label in OURS)


@pytest.mark.parametrize("label", [label for label in OURS if label.startswith(("torch/", "cutile-dsl/"))])
def test_on_a_cpu(label: str) -> None:
    plan_type(label)
    assert [(p.label, why) for p in problems(label) for why in wrong(label, p, "cpu")] == []


@pytest.mark.slow
@pytest.mark.parametrize("label", [label for label in OURS if label.startswith("triton/")])
def test_in_tritons_interpreter(label: str) -> None:
    plan_type(label)
    tried = in_tritons_interpreter(rope_positions.__file__, label)
    assert tried.splitlines() == [f"tried {label} {len(problems(label))}"]


@pytest.mark.gpu
@pytest.mark.parametrize("label", OURS)
def test_on_a_gpu(label: str) -> None:
    plan = plan_type(label)
    tried = [p for p in problems(label) if plan(p, None, Device.detect()).supported()]
    if not tried:
        pytest.skip(f"{label} does not run here")
    assert [(p.label, why) for p in tried for why in wrong(label, p, "cuda")] == []
