"""Where in a kernel's code a mistake is: file, line and message, from what a language's compiler or interpreter raised.

Each language says it in its own way. CuTe traces Python, so the traceback has the line, but syntax that it refuses is
named in the exception; Triton's exceptions hold a node of the function's syntax tree, one exception a call; cuTile's
hold a location. Whichever it is, `KernelMistake` says it once.
"""

from __future__ import annotations

import ast
import difflib
import gc
import linecache
import os
import re
import sysconfig
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from mla_var3 import paths
from mla_var3.errors import UserError

#: The page about starting a workload, a design or a peer.
NEW_PAGE = "docs/new.md"
#: Environment variable: 1 shows the whole traceback too, on the command line and in programs.
TRACEBACK = "MLA_VAR3_TRACEBACK"

# Of a compiler's message: where it is shown, and in one line.
_MOST_LINES, _MOST_CHARACTERS = 12, 600
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_WORKLOADS = paths.package() / "workload"
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def wanted() -> bool:
    """Whether the whole traceback is to be shown."""
    return os.environ.get(TRACEBACK, "") not in ("", "0")


def show_if_wanted(error: BaseException) -> None:
    """Prints an exception's traceback, of a mistake that of the exception itself, to standard error if it is wanted."""
    if wanted():
        traceback.print_exception(getattr(error, "original", error))


@dataclass(frozen=True)
class Place:
    """A line of code. line: from 1. columns: from and to, from 0, in characters; None where nobody knows them."""

    file: str
    line: int
    columns: tuple[int, int] | None = None

    @property
    def text(self) -> str:
        """The line itself, with its indentation."""
        linecache.checkcache(self.file)
        return linecache.getline(self.file, self.line).rstrip()

    @property
    def function(self) -> str:
        """The innermost function that the line is in, as the file says it: compilers rename what they rewrite."""
        try:
            tree = ast.parse(Path(self.file).read_text(encoding="utf-8"))
        except (OSError, SyntaxError, ValueError):
            return ""
        around = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef)
            # A compiler that means the whole function names the line of its first decorator.
            and min([node.lineno, *(part.lineno for part in node.decorator_list)])
            <= self.line
            <= (node.end_lineno or 0)
        ]
        return max(around, key=lambda node: node.lineno).name if around else ""

    @property
    def shared(self) -> bool:
        """Whether it is in a primitive or a workload, which many versions call."""
        return Path(self.file).parent.name == "prims" or self.workload

    @property
    def workload(self) -> bool:
        """Whether it is in what a workload's file says."""
        return Path(self.file).parent == _WORKLOADS

    def __str__(self) -> str:
        """`src/.../rmsnorm_v1.py:84, in normalise`, from the current folder where the file is below it."""
        path = Path(self.file)
        here = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        function = self.function
        return f"{here}:{self.line}" + (f", in {function}" if function else "")

    def marked(self) -> list[str]:
        """The line without its indentation, and marks below its columns."""
        text = self.text
        shown = [text.strip()]
        if self.columns is not None and text:
            indent = len(text) - len(text.lstrip())
            start, end = max(self.columns[0], indent), min(self.columns[1], len(text))
            if (indent, len(text)) != (start, end) and start < len(text):
                shown.append(" " * (start - indent) + "^" * max(end - start, 1))
        return shown


class KernelMistake(Exception):
    """A mistake in a kernel's code. Its text has the message, the place, the line and marks below what is meant.

    kind: name of the exception that it was. said: its message. place: in the version where that is known, else in a
    primitive. inside: in the primitive that the version called. original: the exception itself.
    """

    def __init__(self, kind: str, said: str, place: Place, inside: Place | None, original: BaseException) -> None:
        self.kind, self.said, self.place, self.inside, self.original = kind, said, place, inside, original
        head = f"{kind}: {said}" if said else kind
        lines = [head.replace("\n", "\n  "), f"  {place}", *(f"    {line}" for line in place.marked())]
        if inside is not None:
            lines += [f"  which calls {inside}", *(f"    {line}" for line in inside.marked())]
        super().__init__("\n".join(lines))

    @property
    def sentence(self) -> str:
        """In one line, without a full stop: for a record or a table."""
        said = f"{self.kind}: {' '.join(self.said.split())[:_MOST_CHARACTERS]}" if self.said else self.kind
        return f"{said} ({Path(self.place.file).name}:{self.place.line}: {self.place.text.strip()})"


def mistake_of(error: BaseException) -> KernelMistake | None:
    """The mistake in a kernel's code that an exception comes from; None when it has no place in such code.

    Kernel code is what lies in a folder of versions or primitives, a workload's file, or outside this package, Python
    and its libraries.
    """
    if isinstance(error, KernelMistake):
        return error
    if isinstance(error, UserError) or not isinstance(error, Exception):
        return None
    if type(error).__name__ == "OutOfMemoryError":  # the device's, not the line's
        return None
    chain = list(_chain(error))
    places = [place for one in chain for place in _places(one) if _is_kernel_code(place.file)]
    if not places:
        return None
    last = places[-1]
    own = next((place for place in reversed(places) if not place.shared), last)
    # A version that only imports its workload is not where the workload's mistake is.
    own = last if last.workload and not own.function else own
    kind, said = _said(chain[-1])
    return KernelMistake(kind, said, own, None if own is last else last, error)


def reraise(error: Exception) -> NoReturn:
    """Raises an exception again, as `KernelMistake` where it comes from a kernel's code: without the frames of the
    compiler, unless `TRACEBACK` is set."""
    mistake = mistake_of(error)
    if mistake is None or mistake is error:
        raise error
    raise mistake from (error if wanted() else None)


def sentence(error: BaseException) -> str:
    """What an exception says in one line, without a full stop; with its place in a kernel's code where it has one."""
    mistake = mistake_of(error)
    if mistake is not None:
        return mistake.sentence
    lines = [line.strip() for line in _COLOURS.sub("", str(error)).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


# ---------------------------------------------------------------- what was meant
def _chain(error: BaseException) -> Iterator[BaseException]:
    """An exception, and those behind it that it only passes on; the last one has the message."""
    seen: set[int] = set()
    here: BaseException | None = error
    while here is not None and id(here) not in seen:
        seen.add(id(here))
        yield here
        here = _behind(here)


def _behind(error: BaseException) -> BaseException | None:
    library = type(error).__module__.partition(".")[0]
    if library == "triton":
        said, context = getattr(error, "error_message", None), error.__context__
        # Triton hides what it caught where it repeats it, and then loses its type.
        return error.__cause__ or (context if said in (None, repr(context)) else None)
    if library == "cutlass":
        cause = getattr(error, "cause", None)
        return cause if isinstance(cause, BaseException) else None
    return None


def _said(error: BaseException) -> tuple[str, str]:
    """Kind and message of an exception, without the places that a compiler writes into it."""
    if isinstance(error, SyntaxError):
        return type(error).__name__, error.msg
    if log := getattr(error, "ptxas_error", None):
        return type(error).__name__, f"ptxas: {_of_ptxas(log)}"
    library, hints = type(error).__module__.partition(".")[0], getattr(error, "suggestion", None) or ()
    # What the exceptions of a compiler call their message; with a place and the line, it is their text.
    name = {"triton": "error_message", "cuda": "message", "cutlass": "message" if hasattr(error, "suggestion") else ""}
    said = getattr(error, name.get(library, ""), None) or str(error)
    texts = [said + _nearest_name(error) + _page(said), *([hints] if isinstance(hints, str) else hints)]
    lines = [line.strip() for text in texts for line in _COLOURS.sub("", text).splitlines()]
    lines = [line[:_MOST_CHARACTERS].removeprefix("error: unknown: ") for line in lines if line]
    return type(error).__name__, "\n".join(lines[:_MOST_LINES])


def _page(said: str) -> str:
    """Where it is written what a workload has, behind what Python says of one that lacks some of it."""
    lacks = "Workload.__init__() missing" in said or said.endswith("has no attribute 'WORKLOAD'")
    return f"\n{NEW_PAGE} has a whole workload, with what each field is for" if lacks else ""


def _of_ptxas(log: str) -> str:
    """What the assembler complains of, without the lines of a PTX file that nobody has seen."""
    found = re.findall(r"\berror\s*:\s*(.+?)\s*(?=\n\s*ptxas|\Z)", _COLOURS.sub("", log), re.DOTALL)
    return "\n".join(" ".join(one.split()) for one in found[:_MOST_LINES]) or " ".join(log.split())[:_MOST_CHARACTERS]


def _nearest_name(error: BaseException) -> str:
    """What Python adds to its own traceback of a name that is not there, and to nothing else before 3.12."""
    known: list[str] = []
    if isinstance(error, AttributeError) and error.obj is not None:
        known = dir(error.obj)
    elif isinstance(error, NameError):
        for frame, _ in traceback.walk_tb(error.__traceback__):
            known = [*frame.f_locals, *frame.f_globals]
    close = difflib.get_close_matches(getattr(error, "name", None) or "", known, n=1, cutoff=0.7)
    return f"; did you mean {close[0]!r}?" if close else ""


# ---------------------------------------------------------------- where it was
def _places(error: BaseException) -> Iterator[Place]:
    """The places that one exception names, from the outermost call inwards."""
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.lineno is not None:
            one_line = frame.end_lineno in (None, frame.lineno)
            yield Place(frame.filename, frame.lineno, _span(frame.colno, frame.end_colno, one_line))
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        start = (error.offset or 1) - 1
        yield Place(error.filename, error.lineno, (start, max((error.end_offset or 0) - 1, start + 1)))
    yield from _of_tile(getattr(error, "loc", None))
    yield from _of_triton(getattr(error, "src", None), getattr(error, "node", None))
    yield from _of_diagnostic(getattr(error, "formatted", None))
    named, line = getattr(error, "filename", None), getattr(error, "line", None)
    if isinstance(named, str) and isinstance(line, int):  # of CuTe
        yield Place(named, line, _span(getattr(error, "col", None), getattr(error, "end_col", None)))


def _of_tile(location: Any) -> Iterator[Place]:
    """cuTile's location, after those that it is called from."""
    if location is None or getattr(location, "filename", None) is None:
        return
    yield from _of_tile(location.call_site)
    one_line = location.last_line in (None, location.line)
    yield Place(location.filename, location.line, _span(location.col, location.end_col, one_line))


def _of_triton(source: Any, node: Any) -> Iterator[Place]:
    """The place of a node of a Triton function. The exception has its text, whose first line is its `def`, and the
    traceback none of the compiler's frames: which function it was, the function objects tell."""
    if not source or not hasattr(node, "lineno"):
        return
    for function in gc.get_objects():
        if type(function).__name__ == "JITFunction" and getattr(function, "src", None) == source:
            one_line = node.end_lineno in (None, node.lineno)
            line = function.def_file_line_number - 1 + node.lineno
            yield Place(function.file_name, line, _span(node.col_offset, node.end_col_offset, one_line))
            return


def _of_diagnostic(text: Any) -> Iterator[Place]:
    """The place that CuTe's compiler writes into its text: of a stage behind tracing, the kernel."""
    for file, line in re.findall(r"--> (\S.*?):(\d+):\d+", _COLOURS.sub("", text)) if isinstance(text, str) else ():
        yield Place(file, int(line))


def _span(start: int | None, end: int | None, one_line: bool = True) -> tuple[int, int] | None:
    """Columns of what is on one line; nothing is marked of what goes over several."""
    return None if start is None or not one_line else (start, start + 1 if end is None else end)


def _is_kernel_code(file: str) -> bool:
    path = Path(file)
    if path.parent == _WORKLOADS:
        return path.name != "__init__.py"
    for folder in paths.kernel_dirs():
        if path.is_relative_to(folder):
            return len(path.relative_to(folder).parts) > 2  # the registry and what hosts share stand higher
    if path.is_relative_to(paths.package()) or any(path.is_relative_to(folder) for folder in _LIBRARIES):
        return False
    return path.is_file() and not {"site-packages", "dist-packages"} & set(path.parts)
