"""How tests run kernels: captured in a CUDA graph, and in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent


def captured(call: Callable[[], Any]) -> tuple[Any, Any]:
    """A CUDA graph of a call, which is made once before, and what the captured call returned."""
    import torch

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = call()
    return graph, made


def allocated_by(call: Callable[[], Any]) -> int:
    """How many pieces of the GPU's memory a call allocates that was made once before."""
    import torch

    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    call()
    return int(torch.cuda.memory_stats()["allocation.all.allocated"] - before)


def in_tritons_interpreter(*words: str) -> str:
    """What Python prints in a process of its own: the interpreter is chosen when a kernel is decorated, so that a
    process has it or not. Modules of tests, tests/kernel and tests/ops can be imported there."""
    path = (TESTS.parent / "src", TESTS, TESTS / "kernel", TESTS / "ops", os.environ.get("PYTHONPATH", ""))
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, check=False, timeout=600,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(map(str, path))},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout
