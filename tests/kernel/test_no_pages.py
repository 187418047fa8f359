"""A cache of no pages is one that no request has tokens in: out is 0 and LSE +inf, in every language."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import no_pages

from mla_var3.catalogue import registry
from mla_var3.catalogue.registry import KernelId


@pytest.mark.parametrize("language", ["torch", "triton", "cutile-dsl"])
def test_on_a_cpu(language: str, repo_root: Path) -> None:
    if reason := registry.missing(language) or registry.cannot_run_on_cpu(language):
        pytest.skip(reason)
    interpreter = registry.LANGUAGES[language].interpreter
    assert interpreter is not None
    source = os.pathsep.join([str(repo_root / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, no_pages.__file__, language],
        env={**os.environ, **interpreter.env, "PYTHONPATH": source}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert {"flash_mla", "sparse_mla"} <= {label.partition("/")[2] for label, _, _ in found}
    assert not [one for one in found if one[2]]


@pytest.mark.gpu
@pytest.mark.parametrize("problem", no_pages.PROBLEMS, ids=str)
@pytest.mark.parametrize("kernel", no_pages.KERNELS, ids=lambda kernel: kernel.label)
def test_on_a_gpu(kernel: KernelId, problem: dict[str, Any]) -> None:
    if not no_pages.takes(kernel, problem):
        pytest.skip("not here, or it computes something else")
    assert no_pages.wrong(kernel, problem, "cuda") == ""
