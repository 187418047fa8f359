"""What goes wrong in an interpreted kernel, said with the kernel's line."""

from __future__ import annotations

import linecache
import os
from typing import Any


class Misuse(Exception):
    """What was asked for is no launch that can be interpreted: one sentence that says what is wrong and what to do."""


class UndeterminedPadding(UserWarning):
    """A result is NaN, and the kernel loaded padding that cuTile leaves undetermined. Python shows it once a line."""


class WrongType(Misuse, TypeError):
    """A call that `ct.launch` refuses with a TypeError."""


class WrongValue(Misuse, ValueError):
    """A call that `ct.launch` refuses with a ValueError."""


class TooLarge(Misuse, OverflowError):
    """A call that `ct.launch` refuses with an OverflowError."""


class KernelFault(Misuse):
    """The kernel did something cuTile leaves undefined, or one of its own assertions failed.

    where: the kernel's line. block: (x, y, z) of the block that did it.
    """

    def __init__(self, message: str, where: str = "", block: tuple[int, ...] | None = None) -> None:
        self.message, self.where, self.block = message, where, block
        at = f" at {where}" if where else ""
        who = f" in block {tuple(block)}" if block is not None else ""
        super().__init__(f"{message}{at}{who}")


class UnsupportedOperation(Misuse):
    """An operation of the published list (`mla_var3.cutile_cpu.UNSUPPORTED`)."""


class InterpreterError(RuntimeError):
    """A mistake of the interpreter, not of the kernel: please report it with the kernel."""


def describe_location(loc: Any) -> str:
    """`file.py:12 in helper (source text), called from file.py:40` of an operation of cuTile's IR."""
    parts: list[str] = []
    while loc is not None:
        if loc.filename is None:
            break
        name = getattr(loc.function, "name", None) or "<lambda>"
        text = linecache.getline(loc.filename, loc.line).strip()
        shown = f"{os.path.basename(loc.filename)}:{loc.line} in {name}"
        parts.append(f"{shown}: `{text}`" if text and not parts else shown)
        loc = loc.call_site
    return ", called from ".join(parts) or "an unknown line"


# ---------------------------------------------------------------- of blocks that run together
class Unbatchable(BaseException):
    """Blocks cannot be run together."""


class Diverged(BaseException):
    """Blocks that run together go different ways. decision: the how manyth one it is; values: what each decides."""

    def __init__(self, decision: int, values: list[Any]) -> None:
        super().__init__()
        self.decision, self.values = decision, values
