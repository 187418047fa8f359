"""Every exchange on two GPUs: right on requests that break one, by the script that times them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu


def test_two_gpus_give_what_one_would(repo_root: Path, tmp_path: Path) -> None:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("there are not two GPUs here")
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = str(repo_root / "scripts" / "context_parallel.py")
    done = subprocess.run(
        [*words, script, "--out", str(tmp_path), "--seconds", "0"], capture_output=True, text=True, timeout=300,
        check=False, env={**os.environ, "PYTHONPATH": str(repo_root / "src")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("all_gather", "collective", "symmetric"):
        assert done.stdout.count(f"{name}: passed") == 2
