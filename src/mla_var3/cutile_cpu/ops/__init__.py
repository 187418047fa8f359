"""What each operation of cuTile's IR does: one function an opcode, which makes a step from an operation.

A step takes the registers of a block and fills in the operation's results. `FACTORIES` maps opcodes to functions that
make steps; the modules beside this one fill it.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

Registers = list[Any]
Step = Callable[[Registers], Any]
Factory = Callable[[Any, Any], Step | None]

FACTORIES: dict[str, Factory] = {}


def implements(*opcodes: str) -> Callable[[Factory], Factory]:
    """Registers a function (operation, compiler) -> step; None for an operation that does nothing."""

    def register(factory: Factory) -> Factory:
        for opcode in opcodes:
            if opcode in FACTORIES:
                raise ValueError(f"{opcode} is implemented twice")
            FACTORIES[opcode] = factory
        return factory

    return register


def load_all() -> None:
    """Imports every family."""
    for family in ("arith", "atomics", "control", "convert", "memory", "misc", "mma", "reduce_scan", "shape"):
        import_module(f"{__name__}.{family}")
