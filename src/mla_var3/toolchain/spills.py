"""Where a kernel spills registers: in its loops of products, in the loops around them, or outside of both.

A spill in an innermost loop that multiplies costs its latency and its traffic for every KV tile. One in a loop around
that, which goes through splits or requests, costs it once for each of these, and one outside once a CTA.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mla_var3.toolchain import loops, sass

#: `Spill.place`, where it costs most first.
PLACES = (LOOP, AROUND, OUTSIDE) = ("loop", "around", "outside")


@dataclass(frozen=True)
class Spill:
    """A store to local memory or a load from it. width: bytes of a thread. place: one of `PLACES`. file, line: in the
    source, "" and 0 where the binary does not say. near: the line is that of code just before it."""

    address: int
    stores: bool
    width: int
    place: str
    file: str = ""
    line: int = 0
    near: bool = False


def of(code: str, lines: Mapping[int, tuple[str, int]] | None = None) -> list[Spill]:
    """The spills of one kernel's part of a listing, in its order. lines: of `sass.source_lines`.

    A kernel without a product in any loop has no loop that its time is spent in: all of its spills count as in it. An
    array that is indexed at run time lies in local memory too and counts as spilled, as in `Resources.spill_bytes`.
    """
    every = loops.instructions(code)
    found = [one for one in every if one.name in ("STL", "LDL")]
    if not found:
        return []
    multiplying = [loop for loop in loops.loops(every) if loop.tensor]
    inner = {one.address for loop in loops.innermost(multiplying) for one in loop.body}
    outer = {one.address for loop in multiplying for one in loop.body}

    def place(address: int) -> str:
        return LOOP if address in inner or not multiplying else AROUND if address in outer else OUTSIDE

    return [
        Spill(
            one.address, one.name == "STL", sass.width(one.opcode), place(one.address),
            *(lines or {}).get(one.address, ("", 0)),
        )
        for one in found
    ]  # fmt: skip


def bytes_in(found: Iterable[Spill], place: str) -> int:
    """Bytes of the spills at a place."""
    return sum(one.width for one in found if one.place == place)
