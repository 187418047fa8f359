"""A mistake in device code is told once, with file, line, the line itself and the message, in every language."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import mla_var3
from mla_var3 import cli, paths
from mla_var3.device import Device
from mla_var3.errors import UserError
from mla_var3.toolchain import mistakes

H200 = Device.get("h200")
NUMBERS = itertools.count()
pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")

TRITON = """
    import triton
    import triton.language as tl

    @triton.jit
    def scale(x, BN: tl.constexpr):
        {line}
        return x

    @triton.jit
    def kernel(a, out, BN: tl.constexpr):
        at = tl.arange(0, BN)
        tl.store(out + at, scale(tl.load(a + at), BN))
"""
CUTILE = """
    import cuda.tile as ct

    def scale(x, a):
        {line}
        return x

    @ct.kernel
    def kernel(a, out):
        ct.store(out, (0,), scale(ct.load(a, (0,), (16,)), a))
"""
CUTE = """
    import cutlass
    import cutlass.cute as cute

    @cute.jit
    def scale(x, thread):
        {line}
        return x

    @cute.kernel
    def kernel(a: cute.Tensor, out: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        out[thread] = scale(a[thread], thread)

    @cute.jit
    def host(a: cute.Tensor, out: cute.Tensor, stream):
        kernel(a, out).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)
"""


def module_of(tmp_path: Path, source: str, line: str) -> Any:
    """A user's file with this line in a helper that the kernel calls, imported."""
    file = tmp_path / f"user_kernel_{next(NUMBERS)}.py"
    file.write_text(textwrap.dedent(source).format(line=line))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


def compile_triton(module: Any) -> None:
    from mla_var3.toolchain import triton_

    triton_.compile_triton(module.kernel, {"a": "*fp32", "out": "*fp32"}, {"BN": 16}, device=H200)


def vector() -> Any:
    from cuda.tile import float32, int32
    from cuda.tile.compilation import ArrayConstraint

    return ArrayConstraint(
        float32, 1, index_dtype=int32, stride_lower_bound_incl=0, alias_groups=(), may_alias_internally=False
    )


def compile_cutile(module: Any) -> None:
    from cuda.tile.compilation import CallingConvention, KernelSignature

    from mla_var3.toolchain import cutile

    signature = KernelSignature([vector(), vector()], CallingConvention.cutile_python_v1())
    cutile.compile_cutile(module.kernel, signature, device=H200)


def interpret_cutile(module: Any) -> None:
    import torch

    from mla_var3 import cutile_cpu

    cutile_cpu.launch((1,), module.kernel, (torch.ones(16), torch.ones(16)))


def compile_cute(module: Any) -> None:
    import cutlass
    from cutlass.cute.runtime import make_fake_compact_tensor

    from mla_var3.toolchain import cute

    tensors = [make_fake_compact_tensor(cutlass.Float32, (32,)) for _ in range(2)]
    cute.compile_cute(module.host, [*tensors, cute.fake_stream()], device=H200)


CASES = {
    "triton": ("triton", TRITON, compile_triton),
    "cutile": ("cuda.tile", CUTILE, compile_cutile),
    "interpreter": ("cuda.tile", CUTILE, interpret_cutile),
    "cute": ("cutlass", CUTE, compile_cute),
}
#: How it is compiled, the line with the mistake, what is marked in it ("": nothing), words of the message.
MISTAKES = [
    ("triton", "x = x * faktor", "faktor", "NameError: faktor is not defined"),
    ("triton", "x = tl.dot(x, x)", "tl.dot(x, x)", "must have equal ranks"),
    ("triton", "x += tl.zeros((3,), tl.float32)", "tl.zeros((3,), tl.float32)", "power of 2"),
    ("triton", "x = tl.sqrtt(x)", "tl.sqrtt", "no attribute 'sqrtt'; did you mean 'sqrt'?"),
    ("cutile", "x = x * faktor", "faktor", "Undefined variable faktor"),
    ("cutile", "x = ct.load(a, (0,), (16,), pad=3)", "ct.load(a, (0,), (16,), pad=3)", "argument 'pad'"),
    ("interpreter", "x = ct.load(a, (0,), (2, 8))", "ct.load(a, (0,), (2, 8))", "Expected shape length to be 1, got 2"),
    ("cute", "x = x * faktor", "faktor", "NameError: name 'faktor' is not defined"),
    ("cute", "x = cute.make_rmem_tensor(4, x.dtype)[0, 1]", "cute.make_rmem_tensor(4, x.dtype)[0, 1]", "congruent"),
    ("cute", "if thread > 3: x = cutlass.Int32(1)", "", "type `Float32` on one path and `Int32` on another"),
    ("cute", "while thread: break", "break", "Early exit (break) is not allowed"),
]


@pytest.mark.parametrize(("how", "line", "marked", "words"), MISTAKES)
def test_a_mistake_in_a_helper(tmp_path: Path, how: str, line: str, marked: str, words: str) -> None:
    package, source, compiles = CASES[how]
    pytest.importorskip(package, reason=f"{package} is not installed")
    module = module_of(tmp_path, source, line)
    with pytest.raises(Exception) as raised:
        compiles(module)
    mistake = mistakes.mistake_of(raised.value)
    assert mistake is not None
    number = Path(module.__file__).read_text().splitlines().index(f"    {line}") + 1
    said = str(mistake).splitlines()
    assert words in str(mistake)
    place = said.index(f"  {module.__file__}:{number}, in scale")
    assert said[place + 1] == f"    {line}"
    assert str(mistake).count(line) == 1 and "\x1b" not in str(mistake)
    if marked:
        assert said[place + 2] == "    " + " " * line.index(marked) + "^" * len(marked)
    assert words in mistake.sentence and mistake.sentence.endswith(f"({Path(module.__file__).name}:{number}: {line})")
    assert "\n" not in mistake.sentence


def test_what_a_primitive_refuses_is_told_at_the_line_that_calls_it(tmp_path: Path) -> None:
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    source = "from mla_var3.kernel.cute_python.prims.vectors import warp_sum\n" + textwrap.dedent(CUTE)
    module = module_of(tmp_path, source, "x = warp_sum(cute.make_rmem_tensor(4, x.dtype).load())")
    with pytest.raises(ValueError, match="shuffle_sync only supports 32 bit") as raised:
        compile_cute(module)
    mistake = mistakes.mistake_of(raised.value)
    assert mistake is not None and mistake.inside is not None
    assert (mistake.place.file, mistake.place.function) == (module.__file__, "scale")
    assert (Path(mistake.inside.file).name, mistake.inside.function) == ("vectors.py", "warp_sum")
    assert re.search(r"\n  which calls .*prims/vectors.py:\d+, in warp_sum\n    .*shuffle_sync", str(mistake))


def test_what_the_assembler_refuses(tmp_path: Path) -> None:
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    module = module_of(tmp_path, CUTE, "cute.arch.barrier(barrier_id=17, number_of_threads=32)")
    with pytest.raises(Exception, match="PTX assembly failed") as raised:
        compile_cute(module)
    mistake = mistakes.mistake_of(raised.value)
    assert mistake is not None and "\x1b" not in str(mistake)
    assert mistake.said == "ptxas: Barrier number '17' out of range, expected to be in range [0..15]"
    assert (mistake.place.file, mistake.place.function, mistake.place.text) == (
        module.__file__,
        "kernel",
        "@cute.kernel",
    )
    assert "\x1b" not in mistakes.sentence(ValueError("\x1b[91merror:\x1b[0m PTX assembly failed"))


def test_what_is_no_mistake_in_a_kernel() -> None:
    assert mistakes.mistake_of(UserError("a sentence")) is None
    assert mistakes.sentence(KeyError("first\nsecond")) == "KeyError: 'first\\nsecond'"
    assert mistakes.sentence(ValueError("first.\nsecond")) == "ValueError: first"
    try:
        Device.get("h200").ceiling(1, 2, 3, 4)  # type: ignore[call-arg]
    except TypeError as error:
        # This file is a user's, as far as anyone knows; what lies inside the package is not.
        mistake = mistakes.mistake_of(error)
    assert mistake is not None and mistake.place.file == __file__


def test_a_program_gets_the_short_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")
    from cuda.tile.compilation import CallingConvention, KernelSignature

    from mla_var3.runtime import CtKernel

    module = module_of(tmp_path, CUTILE, "x = x * faktor")
    signature = KernelSignature([vector(), vector()], CallingConvention.cutile_python_v1())
    kernel = CtKernel(
        module.kernel, lambda _: (1,), lambda _: (), (), (), None, signature_fn=lambda _: signature, name="kernel"
    )
    monkeypatch.delenv(mistakes.TRACEBACK, raising=False)
    with pytest.raises(mistakes.KernelMistake, match="Undefined variable faktor") as short:
        kernel.compile(None, H200)
    assert short.value.__cause__ is None and short.value.__suppress_context__
    monkeypatch.setenv(mistakes.TRACEBACK, "1")
    with pytest.raises(mistakes.KernelMistake) as long:
        kernel.compile(None, H200)
    assert long.value.__cause__ is long.value.original
    assert type(long.value.original).__name__ == "UnsupportedSyntaxError"


# ---------------------------------------------------------------- on the command line
@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package in which a version of a language may be broken."""
    folder = tmp_path_factory.mktemp("copied")
    shutil.copytree(Path(mla_var3.__file__).parent, folder / "mla_var3", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def run_broken(copied: Path, file: str, old: str, new: str, words: Sequence[str], **env: str) -> tuple[int, str]:
    """Status and standard error of the command line on a version in which `old` is replaced."""
    path = copied / "mla_var3/kernel" / file
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "mla_var3.cli", *words],
            env={**os.environ, "PYTHONPATH": str(copied), "PYTHONDONTWRITEBYTECODE": "1", **env},
            cwd=copied, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    finally:
        path.write_text(text)
    return done.returncode, done.stderr


CHECK = ("--device", "cpu", "--quick", "--cases", "own", "--seed", "1")


def test_check_in_tritons_interpreter(copied: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    file = "triton/norm/rmsnorm/rmsnorm/rmsnorm.py"
    status, said = run_broken(copied, file, "h * factor * w", "h * faktor * w", ["check", "triton/rmsnorm", *CHECK])
    expected = rf"""
        mla-var3: NameError: name 'faktor' is not defined; did you mean 'factor'\?
          mla_var3/kernel/{file}:\d+, in normalise
            tl.store\(out \+ column, round_to\(h \* faktor \* w, DTYPE, INTERPRET\), mask=inside\)
            {" " * 36}\^\^\^\^\^\^
          while checking case 'own' with seed 1
          \(--traceback shows the calls that led there\)
    """
    assert re.fullmatch(textwrap.dedent(expected).strip(), said.strip()), said
    assert status == 2


def test_a_version_with_an_error_of_syntax(copied: Path) -> None:
    file = "triton/norm/rmsnorm/rmsnorm/rmsnorm.py"
    old, new = "column = tl.arange(0, COLUMNS)\n", "column = tl.arange(0, COLUMNS\n"
    status, said = run_broken(copied, file, old, new, ["check", "triton/rmsnorm", *CHECK], **{mistakes.TRACEBACK: "1"})
    assert status == 2 and said.startswith("Traceback (most recent call last):")
    head, place, line, mark = said[said.index("mla-var3: ") :].rstrip().splitlines()
    assert head == "mla-var3: SyntaxError: '(' was never closed"
    assert re.fullmatch(rf"  mla_var3/kernel/{file}:\d+", place)
    assert (line.strip(), mark.strip()) == (new.strip(), "^")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("import triton.langage as tl", "ModuleNotFoundError: No module named 'triton.langage'"),
        ("from mla_var3.workload import nrom", "ImportError: cannot import name 'nrom'"),
    ],
)
def test_a_version_that_cannot_be_imported(
    line: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mla_var3.cli import _main

    monkeypatch.delenv(mistakes.TRACEBACK, raising=False)
    monkeypatch.setattr(_main, "run_words", lambda words: module_of(tmp_path, "{line}", line))
    assert cli.main(["check", "triton/rmsnorm"]) == 2
    head, place, shown, hint = capsys.readouterr().err.splitlines()
    assert head.startswith(f"mla-var3: {words}") and place.endswith(".py:1") and shown == f"    {line}"
    assert hint == "  (--traceback shows the calls that led there)"


def test_a_mistake_of_the_laboratory_itself_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(words: list[str]) -> int:
        return Device.get("h200").nothing  # type: ignore[no-any-return, attr-defined]

    from mla_var3.cli import _main

    monkeypatch.setattr(mistakes, "_is_kernel_code", lambda file: Path(file).is_relative_to(paths.package() / "kernel"))
    monkeypatch.setattr(_main, "run_words", broken)
    with pytest.raises(AttributeError, match="nothing"):
        cli.main(["list"])
