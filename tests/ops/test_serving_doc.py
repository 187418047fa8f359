"""docs/serving.md: its code is compiled everywhere, its commands are run, and on a GPU its code is run as well."""

from __future__ import annotations

import ast
import inspect
import os
import re
import shlex
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from mla_var3 import cli
from mla_var3.errors import EXTRAS

pytest.importorskip("torch")


def blocks(repo_root: Path, language: str) -> list[str]:
    text = (repo_root / "docs" / "serving.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


def test_every_block_is_of_a_kind_that_is_tested(repo_root: Path) -> None:
    text = (repo_root / "docs" / "serving.md").read_text(encoding="utf-8")
    kinds = re.findall(r"^```(\w*)\n.*?^```", text, re.M | re.S)
    assert set(kinds) == {"python", "bash", "console", "text"} and kinds.count("python") == 14


def test_the_shell_is_told_what_exists(repo_root: Path, module_at: Callable[[Path], Any]) -> None:
    """Blocks that are not run here: extras, and the programs of examples/cpp, which test_cpp_example.py runs."""
    lines = [line.partition(" #")[0] for block in blocks(repo_root, "console") for line in block.splitlines()]
    installs = [shlex.split(line)[2] for line in lines if line.startswith("pip install ")]
    assert {re.sub(r"^\.\[?|\]$", "", what) for what in installs} <= {"", *EXTRAS}
    export, build, program = (shlex.split(line) for line in lines if not line.startswith("pip "))
    module = module_at(repo_root / export[1])
    asked = module.parser().parse_args(export[2:])
    assert (str(asked.folder), asked.device) == (build[1], "h200") and program == [f"{build[1]}/decode"]
    assert os.access(repo_root / build[0], os.X_OK)


def test_the_code_compiles_and_calls_what_exists(repo_root: Path) -> None:
    from mla_var3 import ops, packed_cache
    from mla_var3.ops import flash_mla

    functions: dict[str, Any] = {
        "mla_decode": ops.mla_decode,
        "packed_mla_decode": ops.packed_mla_decode,
        "sparse_mla_decode": ops.sparse_mla_decode,
        "mla_prefill": ops.mla_prefill,
        "flash_attn_varlen_func": ops.flash_attn_varlen_func,
        "mla_chunk_prefill": ops.mla_chunk_prefill,
        "rmsnorm": ops.rmsnorm,
        "rope_append": ops.rope_append,
        "absorb_gemm": ops.absorb_gemm,
        "step": lambda q, pages, page_table, seq_lens: None,
        "compile_for": ops.compile_for,
        "new_cache": packed_cache.new_cache,
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


def test_the_commands_run(repo_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands = [line for block in blocks(repo_root, "bash") for line in block.splitlines()]
    assert len(commands) == 2
    for command in commands:
        program, *words = shlex.split(command)
        assert program == "mla-var3"
        if words[0] == "compare":  # picks are in the records once a sweep has measured them
            capsys.readouterr()
            status = cli.main(words)
            assert status == 0 or "no record of kernel 'dispatch'" in capsys.readouterr().err
            continue
        assert cli.main(words) == 0, command


@pytest.mark.gpu
def test_the_code_runs(repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX shares the GPU with torch
    names: dict[str, Any] = {}
    for code in blocks(repo_root, "python"):
        if "import jax" in code and find_spec("jax_tvm_ffi") is None:
            continue  # test_jax_gpu.py says that it is missing
        exec(compile(code, "docs/serving.md", "exec"), names)
    assert names["out"].shape == (4, 1, 128, 512)
