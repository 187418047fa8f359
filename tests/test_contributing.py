"""CONTRIBUTING.md: its commands exist, its way from a copy to a check works, and what it says of the change is so."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mla_var3
from mla_var3 import cli, paths
from mla_var3.device import Device
from mla_var3.kernel import registry

VERSION = "triton/norm/rmsnorm/rmsnorm_v1/rmsnorm_v1.py"


@pytest.fixture(scope="module")
def text(repo_root: Path) -> str:
    return (repo_root / "CONTRIBUTING.md").read_text(encoding="utf-8")


def commands(text: str) -> list[list[str]]:
    blocks = re.findall(r"^```console\n(.*?)^```", text, re.M | re.S)
    return [shlex.split(line.partition("  #")[0]) for block in blocks for line in block.splitlines()]


def test_every_command_exists(text: str, repo_root: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (repo_root / "Makefile").read_text(), re.M))
    seen = []
    for program, *words in commands(text):
        if program == "make":
            assert set(words) <= targets, words
        elif program == "mla-var3":
            verb, *rest = words
            seen.append(verb)
            parser = cli.load(verb)._parser() if hasattr(cli.load(verb), "main") else cli.parser_of(verb)
            parser.parse_args(rest)
    assert seen == ["clone", "check", "compile", "diff", "bench", "devlog", "devlog"]
    assert "make docs" in text and "docs" in targets


def test_a_copy_with_the_change_is_right(text: str, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    package, ignored = tmp_path / "src" / "mla_var3", shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(mla_var3.__file__).parent, package, ignore=ignored)
    shutil.copytree(paths.conf_dir(), tmp_path / "conf")  # what makes the folder a checkout
    env = {**os.environ, "PYTHONPATH": str(package.parent), "PYTHONDONTWRITEBYTECODE": "1", "CUDA_VISIBLE_DEVICES": ""}

    def run(verb: str) -> str:
        (words,) = (words[1:] for words in commands(text) if words[:2] == ["mla-var3", verb])
        done = subprocess.run(
            [sys.executable, "-m", "mla_var3.cli", *words],
            env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "made triton/rmsnorm_v1\n" in run("clone")
    copy = package / "kernel" / VERSION
    assert f"src/mla_var3/kernel/{VERSION}" in text
    source = copy.read_text()
    assert source.count("columns // 1024") == 1
    copy.write_text(source.replace("columns // 1024", "columns // 512"))
    assert re.search(r"^triton/rmsnorm_v1 r3_w7168: passed, \d+ cases", run("check"), re.M)


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_what_it_says_of_the_change(text: str) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    (kernel,) = registry.find("rmsnorm", 0, "triton")
    plan_type, device = registry.get_plan(kernel), Device.get("h200")
    problem = plan_type.workload.problem()
    assert plan_type(problem, None, device).tiling.num_warps == 8
    before, after = (
        plan_type(problem, plan_type.tiling_type(warps), device).plan_empty().compile(None, device).resources
        for warps in (8, 16)
    )
    said = re.search(r"here (\d+) registers a thread in place of (\d+), and half of the loads", text)
    assert said is not None
    assert (after.registers, before.registers) == (int(said[1]), int(said[2]))
    assert 2 * after.instructions["LDG"] == before.instructions["LDG"]
