"""From cuTile's IR to steps: every operation is looked at once, and a block of the grid then runs a list of closures.

A value lives in a numbered register; register 0 is the block's own state (`BlockState`). Constants are made once and
stand in the registers that every block starts from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mla_var3.cutile_cpu.dtypes import Dtype, dtype_of
from mla_var3.cutile_cpu.errors import InterpreterError, KernelFault, Misuse, UnsupportedOperation, describe_location
from mla_var3.cutile_cpu.memory import Memory
from mla_var3.cutile_cpu.ops import FACTORIES, Registers, Step, load_all
from mla_var3.cutile_cpu.unsupported import UNSUPPORTED


@dataclass
class BlockState:
    """What a block of the grid knows. lists: tables of list arguments, by address."""

    bid: tuple[int, int, int]
    grid: tuple[int, int, int]
    memory: Memory
    lists: dict[int, Any]
    wait: Any  # called by loops that may wait for another block: (where)


@dataclass
class Program:
    """A kernel's final IR as steps. parameters: registers of the flat arguments. can_wait: it has a `while` loop."""

    name: str
    run: Step
    parameters: tuple[int, ...]
    template: Registers
    opcodes: frozenset[str]
    can_wait: bool

    def execute(self, state: BlockState, arguments: Sequence[Any]) -> None:
        registers = self.template.copy()
        registers[0] = state
        for slot, value in zip(self.parameters, arguments, strict=True):
            registers[slot] = value
        try:
            self.run(registers)
        except KernelFault as fault:
            if fault.block is None:
                raise KernelFault(fault.message, fault.where, state.bid) from fault
            raise


class Compiler:
    """Makes the steps of one kernel. lanes: the operations work on many scalars at once (bodies of reductions)."""

    def __init__(self) -> None:
        load_all()
        self.slots: dict[str, int] = {}
        self.template: Registers = [None]
        self.opcodes: set[str] = set()
        self.can_wait = False  # whether a loop has no bound of its own
        self.lanes = False

    # ------------------------------------------------------------ for the families
    def slot(self, var: Any) -> int:
        """The register of a variable."""
        if var.name not in self.slots:
            self.slots[var.name] = len(self.template)
            self.template.append(None)
        return self.slots[var.name]

    def slots_of(self, variables: Sequence[Any]) -> tuple[int, ...]:
        return tuple(self.slot(v) for v in variables)

    def optional(self, var: Any) -> int | None:
        return None if var is None else self.slot(var)

    def result(self, op: Any) -> int:
        return self.slot(op.result_vars[0])

    @staticmethod
    def dtype(var: Any) -> Dtype:
        """The element type of a tile."""
        return dtype_of(var.get_type().dtype)

    @staticmethod
    def shape(var: Any) -> tuple[int, ...]:
        return tuple(var.get_type().shape)

    @staticmethod
    def where(op: Any) -> str:
        return describe_location(op.loc)

    # ------------------------------------------------------------ blocks
    def block(self, block: Any) -> Step:
        """The step that runs a block of IR; it returns the signal of the block's terminator."""
        steps: list[Step] = []
        origins: list[Any] = []
        for op in block:
            step = self._step(op)
            if step is not None:
                steps.append(step)
                origins.append(op)
        return _sequence(tuple(steps), tuple(origins))

    def _step(self, op: Any) -> Step | None:
        opcode = op.op
        self.opcodes.add(opcode)
        reason = UNSUPPORTED.get(opcode)
        if reason is not None:
            raise UnsupportedOperation(
                f"The cuTile interpreter does not run `{opcode}` ({reason}), at {self.where(op)}."
            )
        factory = FACTORIES.get(opcode)
        if factory is None:
            raise UnsupportedOperation(
                f"The cuTile interpreter does not know the operation `{opcode}`, at {self.where(op)}; see "
                "docs/cutile_cpu.md."
            )
        return factory(op, self)


def _sequence(steps: tuple[Step, ...], origins: tuple[Any, ...]) -> Step:
    def run(registers: Registers) -> Any:
        i = 0
        try:
            for i, step in enumerate(steps):  # noqa: B007 (read where a step raises)
                signal = step(registers)
                if signal is not None:
                    return signal
        except (Misuse, InterpreterError):
            raise
        except Exception as error:
            op = origins[i]
            raise InterpreterError(
                f"{type(error).__name__} while interpreting `{op.op}` at {describe_location(op.loc)}: {error}"
            ) from error
        return None

    return run


def compile_ir(root: Any, name: str) -> Program:
    """The program of a kernel's final IR (a `cuda.tile._ir.ir.Block`)."""
    compiler = Compiler()
    parameters = compiler.slots_of(root.params)
    run = compiler.block(root)
    return Program(name, run, parameters, compiler.template, frozenset(compiler.opcodes), compiler.can_wait)
