"""Positions outside of the table, in every language that turns by one: NaN, and nothing beside the table is read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from rope_positions import problems, wrong

from mla_var3.catalogue import registry
from mla_var3.device import Device

OURS = [k.label for k in registry.all_kernels() if k.layer == "rope" and k.language != "peer"]


def here(label: str) -> str:
    if (reason := registry.missing(registry.KernelId.parse(label))) is not None:
        pytest.skip(reason)
    return label


def test_all_of_them_are_tried() -> None:
    languages = {label.split("/")[0] for label in OURS}
    assert languages == {"torch", "triton", "cute-dsl", "cutile-dsl"} and all(problems(label) for label in OURS)


@pytest.mark.parametrize("label", [label for label in OURS if label.startswith(("torch/", "cutile-dsl/"))])
def test_on_a_cpu(label: str) -> None:
    assert [(p.label, why) for p in problems(here(label)) for why in wrong(label, p, "cpu")] == []


@pytest.mark.slow
@pytest.mark.parametrize("label", [label for label in OURS if label.startswith("triton/")])
def test_in_tritons_interpreter(label: str, repo_root: Path) -> None:
    """Which is chosen when a kernel is decorated, so a process has it or not."""
    source = os.pathsep.join([str(repo_root / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("rope_positions.py")), here(label)],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == [f"tried {label} {len(problems(label))}"]


@pytest.mark.gpu
@pytest.mark.parametrize("label", OURS)
def test_on_a_gpu(label: str) -> None:
    plan = registry.get_plan(registry.KernelId.parse(here(label)))
    tried = [p for p in problems(label) if plan(p, None, Device.detect()).supported()]
    if not tried:
        pytest.skip(f"{label} does not run here")
    assert [(p.label, why) for p in tried for why in wrong(label, p, "cuda")] == []
