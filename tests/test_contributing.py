"""CONTRIBUTING.md: its commands exist, and what it says of the change is so. `test_pasted_blocks` runs them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from mla_var3 import cli
from mla_var3.catalogue import registry
from mla_var3.device import Device


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


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_what_it_says_of_the_change(text: str) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    kernel = registry.KernelId.parse("triton/rmsnorm")
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
