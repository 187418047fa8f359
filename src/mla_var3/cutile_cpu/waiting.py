"""What a `while` loop does from turn to turn: whether it waits for other blocks, and whether it can end at all."""

from __future__ import annotations

import warnings
from typing import Any

from mla_var3.cutile_cpu.dtypes import same_bits

#: Every so many turns a loop that reads memory lets other blocks run, whatever it does.
_FAIR = 1024

#: Turns of one loop after which a warning names it.
_MANY = 1 << 18


class Abandoned(BaseException):
    """Ends a block whose launch has ended."""


class Watch:
    """Follows one execution of a loop, for a block's state.

    course: which of the carried variables decide, with memory, what a turn does. A loop waits when a turn changes no
    variable, or reads what the turn before it read; a counter may have gone on. When the deciding variables are what
    they were some turns ago, and memory is too, the loop will do the same again for ever, unless another block changes
    memory.
    """

    def __init__(self, state: Any, course: tuple[int, ...], where: str) -> None:
        self.state, self.course, self.where = state, course, where
        self.turns, self.power = 0, 1
        self.values: list[Any] | None = None
        self.snapshot: tuple[int, list[Any]] | None = None
        self.reads: list[Any] = []
        self.read_before: list[Any] = []
        self.outer = state.memory.trace

    def begin(self) -> None:
        if self.state.abandoned:
            raise Abandoned
        self.reads = self.state.memory.trace = []

    def end(self, values: list[Any]) -> None:
        """After a turn that leads to another one, which starts with `values`."""
        self.turns += 1
        if self.turns == _MANY:
            warnings.warn(
                f"The loop at {self.where} has not ended after {_MANY:,} turns in block {self.state.bid}.", stacklevel=2
            )
        idle = self.values is not None and all(map(same_bits, self.values, values))
        polls = bool(self.reads) and _same_reads(self.reads, self.read_before)
        self.values, self.read_before = values, self.reads
        circles = self._circles([values[i] for i in self.course])
        if idle or polls or circles or (self.reads and self.turns % _FAIR == 0):
            self.state.wait(self.where, circles)

    def _circles(self, course: list[Any]) -> bool:
        """Whether the loop was here before, with the same memory (Brent: it is compared with ever later turns)."""
        version = self.state.memory.changes
        if self.snapshot is not None and self.snapshot[0] == version:
            if all(map(same_bits, self.snapshot[1], course)):
                return True
            if self.turns < self.power:
                return False
        self.snapshot, self.power = (version, course), 2 * self.turns
        return False

    def close(self) -> None:
        """The loop has ended; for a loop around it, its last turn's reads are its reads."""
        if self.outer is not None:
            self.outer += self.reads
        self.state.memory.trace = self.outer


def _same_reads(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(
        len(one) == len(other) and all(map(same_bits, one, other)) for one, other in zip(a, b, strict=True)
    )
