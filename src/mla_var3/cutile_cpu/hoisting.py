"""Which operations cuTile's front end moved out of a loop.

It moves loads and other pure operations out of loops that may run zero times, and out of helpers that return early (a
loop that is left at once, in its IR). What such an operation does wrong, the kernel's source may never do.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@functools.cache
def _mark() -> type:
    from cuda.tile._exception import Loc

    # On the operation's location, because the passes that come later copy operations, and keep that.
    return type("Hoisted", (Loc,), {"__slots__": ()})


def is_hoisted(op: Any) -> bool:
    """Whether the operation stands outside the loop in which the source has it."""
    return isinstance(op.loc, _mark())


def _homes(block: Any) -> Iterator[tuple[Any, Any]]:
    """Every operation and the block in which it is."""
    for op in block:
        yield op, block
        for nested in op.nested_blocks:
            yield from _homes(nested)


@contextmanager
def marked() -> Iterator[None]:
    """Inside, cuTile's front end marks the operations that it moves (`is_hoisted`)."""
    from dataclasses import fields

    from cuda.tile import _compile

    hoist = _compile.hoist_loop_invariants

    def hoist_and_mark(root: Any) -> None:
        before = {id(op): home for op, home in _homes(root)}
        hoist(root)
        for op, home in _homes(root):
            if home is not before[id(op)]:
                op.loc = _mark()(**{f.name: getattr(op.loc, f.name) for f in fields(op.loc)})

    # cuTile compiles under this lock, so nobody else's kernel is compiled meanwhile.
    with _compile._compiler_lock:
        _compile.hoist_loop_invariants = hoist_and_mark
        try:
            yield
        finally:
            _compile.hoist_loop_invariants = hoist
