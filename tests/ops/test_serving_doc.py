"""docs/serving.md: its code is compiled everywhere, its commands are run, and on a GPU its code is run as well."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from mla_var3 import cli

pytest.importorskip("torch")


def blocks(repo_root: Path, language: str) -> list[str]:
    text = (repo_root / "docs" / "serving.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


def test_every_block_is_of_a_kind_that_is_tested(repo_root: Path) -> None:
    text = (repo_root / "docs" / "serving.md").read_text(encoding="utf-8")
    kinds = re.findall(r"^```(\w*)\n.*?^```", text, re.M | re.S)
    assert set(kinds) == {"python", "bash"} and kinds.count("python") == 6


def test_the_code_compiles_and_calls_what_exists(repo_root: Path) -> None:
    from mla_var3 import ops
    from mla_var3.ops import flash_mla

    functions: dict[str, Any] = {
        "mla_decode": ops.mla_decode,
        "compile_for": ops.compile_for,
        "DecodeSchedule": ops.DecodeSchedule,
        "flash_mla.flash_mla_with_kvcache": flash_mla.flash_mla_with_kvcache,
        "flash_mla.get_mla_metadata": flash_mla.get_mla_metadata,
    }
    seen = set()
    for code in blocks(repo_root, "python"):
        tree = ast.parse(code)
        compile(tree, "docs/serving.md", "exec")
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in functions:
                name = ast.unparse(node.func)
                seen.add(name)
                keywords = {k.arg: None for k in node.keywords if k.arg is not None}
                inspect.signature(functions[name]).bind(*node.args, **keywords)
    assert seen == set(functions)


def test_the_commands_run(repo_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands = [line for block in blocks(repo_root, "bash") for line in block.splitlines()]
    assert len(commands) == 3
    for command in commands:
        program, *words = shlex.split(command)
        assert program == "mla-var3"
        if words == ["dispatch", "build"]:  # not over the table of this checkout
            words += ["--out", str(tmp_path / "table.json")]
        if words[0] == "compare":  # picks are in the records once a sweep has measured them
            capsys.readouterr()
            status = cli.main(words)
            assert status == 0 or "no record of kernel 'dispatch'" in capsys.readouterr().err
            continue
        assert cli.main(words) == 0, command


@pytest.mark.gpu
def test_the_code_runs(repo_root: Path) -> None:
    names: dict[str, Any] = {}
    for code in blocks(repo_root, "python"):
        exec(compile(code, "docs/serving.md", "exec"), names)
    assert names["out"].shape == (4, 1, 128, 512)
