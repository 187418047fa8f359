"""Source files that a binary's line information names, found on this machine.

A kernel out of a bundle, or of a cache that moved, was compiled elsewhere: its lines name the files of that place. The
same file of this package, or of one installed here, stands for them; a bundle loads only beside the sources it was
made from.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from mla_var3 import paths

_PACKAGE = "mla_var3"
#: A wait for an mbarrier is inline assembly, and CuTe's compiler counts its lines as lines of the source: instructions
#: of a wait, and some behind it, carry lines up to six below its own.
_WAIT, _WAIT_LINES = "mbarrier_wait(", 6
_OF_A_WAIT = re.compile(r"(?:@!?U?P\d+ +)?(?:SYNCS\.PHASECHK|NANOSLEEP)")
#: Loops and branches have no line of their own there: they carry that of the host function's decorator.
NO_LINE = "(a loop or a branch, which have no line of their own)"
#: Folders below which a path says what it says on any machine.
_SITES = ("site-packages", "dist-packages")


@functools.cache
def find(name: str) -> Path | None:
    """The file that `name` means here; None when there is none."""
    path = PurePosixPath(name)
    if Path(path).is_file():
        return Path(path)
    inside = _after(path, _PACKAGE)
    if inside is not None:
        here = paths.package() / inside
        return here if here.is_file() else None
    for site in _SITES:
        inside = _after(path, site)
        if inside is not None:
            some = [Path(entry) / inside for entry in sys.path if (Path(entry) / inside).is_file()]
            return some[0] if some else None
    return None


def short(name: str) -> str:
    """How a report names a file: with its folder where that tells files of one name apart (`prims/combine.py`)."""
    path = PurePosixPath(name)
    inside = _after(path, _PACKAGE)
    if inside is None or inside.parent.name in ("", path.stem):
        return path.name
    return f"{inside.parent.name}/{path.name}"


@functools.cache
def lines(name: str) -> tuple[str, ...]:
    """The file's lines, () where it is not here."""
    path = find(name)
    try:
        return () if path is None else tuple(path.read_text(encoding="utf-8", errors="replace").splitlines())
    except OSError:
        return ()


def place(name: str, line: int, instruction: str, texts: Sequence[str] = ()) -> tuple[int, str]:
    """(line, its text) of an instruction that the binary ascribes to `line`. texts: the file's lines, if known better.

    Undoes what `_WAIT_LINES` says where it can be told: for the instructions of a wait, and for lines without code.
    """
    texts = texts or lines(name)
    if not 0 < line <= len(texts):
        return line, ""
    text = texts[line - 1].strip()
    if _WAIT not in text and (_OF_A_WAIT.match(instruction) or not _is_code(text)):
        for above in range(line - 1, max(line - 1 - _WAIT_LINES, 0), -1):
            if _WAIT in texts[above - 1]:
                return above, texts[above - 1].strip()
    return line, NO_LINE if re.match(r"@[\w.]*(?:jit|kernel)\b", text) else text


def _is_code(text: str) -> bool:
    return bool(text) and not text.startswith(("@", "def ", "#", '"""', ")"))


def _after(path: PurePosixPath, folder: str) -> PurePosixPath | None:
    """What follows the last part that is `folder`; None when nothing does."""
    places = [n for n, part in enumerate(path.parts[:-1]) if part == folder]
    return PurePosixPath(*path.parts[places[-1] + 1 :]) if places else None
