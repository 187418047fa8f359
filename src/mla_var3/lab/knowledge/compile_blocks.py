"""Runs the code blocks of pages in this process and says what came out: one JSON object a line.

    python -m mla_var3.lab.knowledge.compile_blocks docs/knowledge/languages/cute-dsl/concepts/concepts-mma.md

The process belongs to the pages: it replaces `cute.compile` and cuTile's `export_kernel` to give every compile of a
block the block's architecture and to read the code that comes out. No GPU is used.
"""

from __future__ import annotations

import contextlib
import io
import json
import linecache
import sys
import tempfile
import time
import traceback
import types
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mla_var3.errors import UserError
from mla_var3.lab.knowledge.blocks import HOST, Block, blocks
from mla_var3.lab.knowledge.page import read


@dataclass
class Result:
    """What became of a block. symbols: names of the compiled kernels; problem: empty when all is as it says."""

    line: int
    arch: str
    seconds: float = 0.0
    compiled: int = 0
    symbols: list[str] = field(default_factory=list)
    instructions: dict[str, int] = field(default_factory=dict)
    problem: str = ""


def run_page(path: Path) -> list[Result]:
    """Compiles the blocks of a page, in order."""
    page, _ = read(path)
    found, findings = blocks(page)
    if findings:
        raise UserError(f"{path}:{findings[0].line}: {findings[0].message}.")
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="knowledge-") as folder:
        # One file that holds every block at its own line: the DSLs read the source of a function from its file, and
        # a traceback then names the page's line.
        file = Path(folder) / f"{path.stem.replace('-', '_')}.py"
        lines = [""] * page.text.count("\n")
        for block in found:
            lines[block.line : block.line + block.code.count("\n")] = block.code.rstrip("\n").split("\n")
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        linecache.checkcache(str(file))
        module = types.ModuleType(file.stem)
        module.__file__ = str(file)
        sys.modules[module.__name__] = module
        for block in found:
            results.append(_run(block, module, file, Path(folder)))
            if results[-1].problem:
                break  # later blocks may build on this one
    if not any(result.problem for result in results):
        _nothing_unseen(found, results)
    return results


def _nothing_unseen(found: list[Block], results: list[Result]) -> None:
    """Every kernel must have come out of a compiler, and every host function and helper must be used."""
    symbols = " ".join(symbol for result in results for symbol in result.symbols)
    used = {name for block in found for name in block.names}
    for block, result in zip(found, results, strict=True):
        left = [name for name in block.kernels if name not in symbols] + [n for n in block.hosts if n not in used]
        if left and block.raises is None:
            result.problem = f"{', '.join(left)} is shown and never compiled"


def _run(block: Block, module: types.ModuleType, file: Path, folder: Path) -> Result:
    result = Result(block.line, block.arch)
    start = time.perf_counter()
    # dont_inherit: this module's own `annotations` import would turn the block's annotations into strings.
    code = compile("\n" * block.line + block.code, str(file), "exec", dont_inherit=True)
    cubins: list[bytes] = []
    error: BaseException | None = None
    said = io.StringIO()
    with contextlib.ExitStack() as stack:
        if block.arch != HOST:
            stack.enter_context(_compilers(block.arch, cubins, folder, file.read_text(encoding="utf-8")))
        stack.enter_context(contextlib.redirect_stdout(said))
        # The compilers report a failure on stderr as well as in the exception that is kept.
        stack.enter_context(contextlib.redirect_stderr(said))
        # A page shows nothing that is on its way out.
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("error", DeprecationWarning)
        try:
            exec(code, module.__dict__)
        except Exception as caught:
            error = caught
    result.compiled = len(cubins)
    _judge(block, result, error, file)
    if not result.problem and error is None:
        _read_code(block, result, cubins)
    result.seconds = round(time.perf_counter() - start, 3)
    return result


def _where(error: BaseException, file: Path) -> str:
    """The page's line that an error passed through last."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(file)]
    return f"line {lines[-1]}: " if lines else ""


def _judge(block: Block, result: Result, error: BaseException | None, file: Path) -> None:
    if block.raises is None:
        if error is not None:
            result.problem = f"{_where(error, file)}{type(error).__name__}: {' '.join(str(error).split())[:600]}"
        return
    kind, part = block.raises
    names = [cls.__name__ for cls in type(error).__mro__] if error is not None else []
    if error is None:
        result.problem = f"it should fail with {kind} and does not"
    elif kind not in names or part.lower() not in " ".join(_messages(error)).lower():
        result.problem = f"it should fail with {kind}: {part}; it fails with {type(error).__name__}: {str(error)[:600]}"


def _messages(error: BaseException | None) -> Iterator[str]:
    """The texts of an error and of those behind it, on one line each."""
    while error is not None:
        yield " ".join(f"{error} {' '.join(map(str, vars(error).values()))}".split())
        error = error.__cause__ or error.__context__


def _read_code(block: Block, result: Result, cubins: list[bytes]) -> None:
    from mla_var3.toolchain import sass

    counts: Counter[str] = Counter()
    for cubin in filter(None, cubins):
        text = sass.disassemble(cubin)
        result.symbols += sass.functions(text)
        counts.update(sass.count_instructions(text))
    result.instructions = {name: number for name, number in counts.items() if number}
    missing = [name for name in block.expect if not counts[name]]
    unwanted = [f"{counts[name]} {name}" for name in block.absent if counts[name]]
    if missing:
        result.problem = f"its code holds no {', '.join(missing)}: {dict(counts)}"
    elif unwanted:
        result.problem = f"its code holds {', '.join(unwanted)}"


@contextlib.contextmanager
def _compilers(arch: str, cubins: list[bytes], folder: Path, source: str) -> Iterator[None]:
    """Compiles for `arch` whatever the code inside compiles, and keeps the cubins. source: of the page; a compiler that
    it does not name is not imported."""
    undo: list[tuple[Any, str, Any]] = []
    for module, name, make in (
        ("cutlass.cute", "compile", _cute_compile),
        ("cuda.tile.compilation", "export_kernel", _export_kernel),
    ):
        loaded = _import(module) if module.rpartition(".")[0] in source else None
        if loaded is not None:
            undo.append((loaded, name, getattr(loaded, name)))
            setattr(loaded, name, make(getattr(loaded, name), arch, cubins, folder))
    kept, sys.argv = sys.argv, sys.argv[:1]  # every CuTe compile parses the command line for a flag of its own
    try:
        yield
    finally:
        sys.argv = kept
        for module_, name, value in undo:
            setattr(module_, name, value)


def _import(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _cute_compile(original: Any, arch: str, cubins: list[bytes], folder: Path) -> Any:
    def compile_(fn: Any, *args: Any, options: str = "", **kwargs: Any) -> Any:
        flags = f"--gpu-arch {arch} --keep-cubin --dump-dir {folder} {options}".strip()
        compiled = original(fn, *args, options=flags, **kwargs)
        # A host function that launches nothing has no cubin, and was compiled all the same.
        cubin = compiled.__cubin__
        cubins.append(cubin if isinstance(cubin, bytes) else b"")
        return compiled

    return compile_


def _export_kernel(original: Any, arch: str, cubins: list[bytes], folder: Path) -> Any:
    def export(kernel: Any, signatures: Any, output: Any, **kwargs: Any) -> Any:
        kwargs |= {"gpu_code": arch.removesuffix("a"), "output_format": "cubin"}
        kept = io.BytesIO()
        done = original(kernel, signatures, kept, **kwargs)
        cubins.append(kept.getvalue())
        if hasattr(output, "write"):
            output.write(kept.getvalue())
        return done

    return export


def main() -> int:
    """0 when every block of the pages named is as it says; each result is a line of JSON."""
    wrong = 0
    for name in sys.argv[1:]:
        for result in run_page(Path(name)):
            print(json.dumps({"page": name, **asdict(result)}), flush=True)
            wrong += bool(result.problem)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
