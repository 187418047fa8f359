"""The runner of code blocks: it must see what is wrong with a page's code."""

from __future__ import annotations

from pathlib import Path

import pytest

from mla_var3.cli.knowledge import main
from mla_var3.lab.knowledge.compile_blocks import run_page

KERNEL = """\
import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_compact_tensor


@cute.kernel
def add_one(x: cute.Tensor):
    x[cute.arch.thread_idx()[0]] = x[cute.arch.thread_idx()[0]] + 1.0


@cute.jit
def launch(x: cute.Tensor):
    add_one(x).launch(grid=(1, 1, 1), block=(32, 1, 1))


x = make_fake_compact_tensor(cutlass.Float32, (32,))
"""
COMPILE = "cute.compile(launch, x)\n"


def page(tmp_path: Path, *fences: tuple[str, str]) -> Path:
    path = tmp_path / "some-page.md"
    blocks = "\n".join(f"```python {info}\n{code}```\n" for info, code in fences)
    path.write_text(f"---\nkind: reference\n---\n# Page\nText.\n\n{blocks}")
    return path


def problems(*args: tuple[str, str], tmp_path: Path) -> list[str]:
    return [result.problem for result in run_page(page(tmp_path, *args))]


def test_good_blocks_share_names_and_have_their_architecture(tmp_path: Path) -> None:
    path = page(tmp_path, ("sm_90a expect=LDG,STG absent=HGMMA", KERNEL + COMPILE), ("sm_80", COMPILE))
    first, second = run_page(path)
    assert (first.problem, second.problem) == ("", "")
    assert first.symbols and "add_one" in first.symbols[0]
    assert (first.arch, second.arch) == ("sm_90a", "sm_80")
    assert first.instructions["STG"] == 1


@pytest.mark.parametrize(
    ("info", "code", "problem"),
    [
        ("sm_90a expect=HGMMA", KERNEL + COMPILE, "its code holds no HGMMA"),
        ("sm_90a absent=STG", KERNEL + COMPILE, "its code holds 1 STG"),
        ("sm_90a", KERNEL, "add_one, launch is shown and never compiled"),
        ("sm_90a", KERNEL + "assert x is None\n", "AssertionError"),
        ("sm_90a", KERNEL + "cute.make_fragment\n", "has no attribute 'make_fragment'"),
        ("sm_90a", KERNEL + COMPILE + "import cutlass.utils\ncutlass.utils.SmemAllocator()\n", "DeprecationWarning"),
        ("sm_90a raises='DSLBaseError: LAUNCH_OUTSIDE_JIT'", KERNEL + COMPILE, "should fail with DSLBaseError"),
        ("sm_90a raises='DSLBaseError: UNSUP_EARLY_EXIT'", KERNEL + "add_one(x).launch()\n", "it fails with"),
        ("sm_90a raises='DSLBaseError: LAUNCH_OUTSIDE_JIT'", KERNEL + "add_one(x).launch()\n", ""),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, info: str, code: str, problem: str) -> None:
    (found,) = problems((info, code), tmp_path=tmp_path)
    assert problem in found if problem else found == ""


def test_a_failure_names_the_page_s_line(tmp_path: Path) -> None:
    path = page(tmp_path, ("sm_90a", KERNEL + COMPILE), ("sm_90a", "y = 'a message'\nraise ValueError(y)\n"))
    good, bad = run_page(path)
    assert (good.line, good.problem) == (7, "")
    text = path.read_text().splitlines()
    assert bad.problem == f"line {text.index('raise ValueError(y)') + 1}: ValueError: a message"


def test_the_verb_says_what_is_wrong(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", str(page(tmp_path, ("host", "assert 1 + 1 == 2\n")))]) == 0
    assert main(["compile", str(page(tmp_path, ("host", "assert 1 + 1 == 3\n")))]) == 1
    assert "AssertionError" in capfd.readouterr().out


def test_later_blocks_wait_for_earlier_ones(tmp_path: Path) -> None:
    assert len(run_page(page(tmp_path, ("host", "1 / 0\n"), ("host", "pass\n")))) == 1
