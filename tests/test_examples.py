"""Every program of examples/ runs, and says what it promises. examples/cpp and serve_deepseek.py have other tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mla_var3 import cli

torch = pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture
def example(repo_root: Path, module_at: Callable[[Path], Any]) -> Callable[[str], Any]:
    """Loads an example by its name, as a module."""
    return lambda name: module_at(repo_root / "examples" / f"{name}.py")


def test_no_example_is_without_a_test(repo_root: Path) -> None:
    tests = "".join(path.read_text() for path in (repo_root / "tests").rglob("test_*.py"))
    folder = repo_root / "examples"
    for path in (*folder.glob("*.py"), *folder.rglob("conf/experiment/*.yaml"), *folder.glob("*/*.py")):
        assert path.stem in tests, f"{path.relative_to(repo_root)} is run by no test"


def test_every_example_names_what_it_needs(repo_root: Path) -> None:
    for path in (*(repo_root / "examples").glob("*.py"), *(repo_root / "examples" / "experiment").glob("*.py")):
        said = path.read_text(encoding="utf-8").split('"""')[1]
        assert re.search(r"Needs the (extras?|package)", said), path.name


def test_a_written_kernel_refuses_what_it_does_not_take(repo_root: Path) -> None:
    """In a process of its own: the example chooses Triton's interpreter."""
    pytest.importorskip("triton", reason="triton is not installed")
    words = [sys.executable, str(repo_root / "examples" / "write_a_kernel.py"), "--width", "20000"]
    env = {**os.environ, "PYTHONPATH": str(repo_root / "src"), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("20000 columns are more than a program's registers\n")


# ---------------------------------------------------------------- serving
SMALL = "--slots 3 --heads 4 --steps 6 --longest 150".split()


def test_serving_over_a_paged_cache(
    example: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = example("serve_decode")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert module.main(SMALL) == 0
    said = capsys.readouterr().out
    assert re.search(r"^18 tokens for requests of \d+ to \d+ cached tokens, torch.bfloat16 on cpu$", said, re.M)
    # A request that reads another one's page is found.
    attend = module.Batch.attend

    def mixed_up(batch: Any) -> None:
        batch.page_table[0] = batch.page_table[1].clone()
        attend(batch)

    monkeypatch.setattr(module.Batch, "attend", mixed_up)
    assert module.main(SMALL) == 1
    assert "wrong:" in capsys.readouterr().err


@pytest.mark.gpu
def test_serving_with_mla_decode_in_a_graph(example: Callable[[str], Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert example("serve_decode").main([]) == 0
    assert "tokens a second" in capsys.readouterr().out


# ---------------------------------------------------------------- a kernel of one's own
def test_a_kernel_is_checked_in_the_interpreter(repo_root: Path) -> None:
    """In a process of its own: Triton chooses its interpreter where a function is decorated."""
    pytest.importorskip("triton", reason="triton is not installed")
    done = subprocess.run(
        [sys.executable, repo_root / "examples/write_a_kernel.py", "--rows", "3", "--width", "200"],
        env={**os.environ, "PYTHONPATH": str(repo_root / "src"), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    *cases, last = done.stdout.splitlines()
    assert all(line.endswith("right") for line in cases) and len(cases) > 5
    assert re.fullmatch(rf"{len(cases)} of {len(cases)} cases right, seed \d+", last)


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_a_kernel_is_compiled(
    example: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr(sys, "argv", ["write_a_kernel.py", "--compile", "h200"])
    module = example("write_a_kernel")
    assert module.main(["--compile", "h200"]) == 0
    assert re.fullmatch(r"NVIDIA H200.*: \d+ registers, 0 bytes spilled, 128 threads\n", capsys.readouterr().out)
    verdict = module.SmallNormPlan(module.NormProblem(residual=True)).supported()
    assert not verdict and verdict.reason == "this kernel has one norm, and no residual"


# ---------------------------------------------------------------- an experiment of one's own
def test_an_experiment_and_its_records(
    repo_root: Path,
    example: Callable[[str], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With one contender, on one cell of each number of heads."""
    pytest.importorskip("triton", reason="triton is not installed")
    reader = example("experiment/read_records")
    folder = tmp_path / "experiment"
    shutil.copytree(repo_root / "examples/experiment", folder)
    monkeypatch.chdir(folder)
    assert reader.main([]) == 2 and "run the sweep first" in capsys.readouterr().err
    words = ["experiment=few_heads", "device=a100", "problem.b=1", "experiment.grid={h: [8], t: [256]}"]
    assert cli.main(["sweep", *words, "kernels=triton/flash_mla"]) == 0
    capsys.readouterr()
    assert reader.main([]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^a100 +b1_s1_h8_t256 +triton/flash_mla +compiled, \d+ registers$", said, re.M)
    assert re.search(r"^cpu +b2_s1_h8_t128\w* +triton/flash_mla +passed$", said, re.M)
    assert "few_heads" in cli_output(capsys, "list", "experiments")


def cli_output(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(list(words)) == 0
    return capsys.readouterr().out


# ---------------------------------------------------------------- a profile
def test_a_profile_from_a_program(
    example: Callable[[str], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    module = example("profile_one")
    assert module.main(["triton/rmsnorm", "--rows", "64", "--width", "512", "--out", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "triton/rmsnorm, r64_w512, tiling {'num_warps': 1}"
    assert lines[1].startswith("  memory-bound: no kernel can take less than ")
    assert re.fullmatch(r"  rmsnorm: \d+ registers, \d+ bytes of shared memory, 0 spilled, \d+ CTAs an SM", lines[3])
    assert Path(lines[4].strip()).is_file()
    assert module.main(["triton/rmsnom"]) == 2
    assert "did you mean 'triton/rmsnorm'" in capsys.readouterr().err
