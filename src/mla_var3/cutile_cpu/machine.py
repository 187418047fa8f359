"""From cuTile's IR to steps: every operation is looked at once, and a block of the grid then runs a list of closures.

A value lives in a numbered register; register 0 is the block's own state (`BlockState`). Constants are made once and
stand in the registers that every block starts from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mla_var3.cutile_cpu.dtypes import Dtype, dtype_of
from mla_var3.cutile_cpu.errors import (
    Diverged,
    InterpreterError,
    KernelFault,
    Misuse,
    UnsupportedOperation,
    describe_location,
)
from mla_var3.cutile_cpu.hoisting import is_hoisted
from mla_var3.cutile_cpu.ops import FACTORIES, Registers, Step, load_all
from mla_var3.cutile_cpu.unsupported import UNSUPPORTED, advice, is_refused, use_of


@dataclass
class BlockState:
    """What a block of the grid knows, or blocks that run together (then `bid` has tensors where they differ). lists:
    tables of list arguments, by address."""

    bid: tuple[Any, Any, Any]
    grid: tuple[int, int, int]
    memory: Any
    lists: dict[int, Any]
    wait: Any  # called by loops that may wait for another block: (where, whether only another block can end it)
    abandoned: bool = False  # the block is to end, because its launch has
    decisions: int = 0

    def decide(self, value: Any) -> Any:
        """A scalar that has to be the same for all blocks which run together. Raises `Diverged` where it is not."""
        if not isinstance(value, torch.Tensor):
            return value
        if not value.dim():
            return value.item()
        self.decisions += 1
        values = value.tolist()
        if values.count(values[0]) < len(values):
            raise Diverged(self.decisions, values)
        return values[0]


@dataclass
class Program:
    """A kernel's final IR as steps. parameters: registers of the flat arguments. can_wait: it has a `while` loop that
    may turn more than once. batchable: blocks may be run together. largest_tile: elements of the largest tile."""

    name: str
    run: Step
    parameters: tuple[int, ...]
    template: Registers
    opcodes: frozenset[str]
    can_wait: bool
    batchable: bool
    largest_tile: int

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


#: Operations whose effect depends on the order of blocks at every step.
_ORDERED = ("tile_atomic_rmw", "tile_atomic_cas", "tile_atomic_red_view", "tile_printf")

#: Operations that work element by element, on tiles of one shape.
_BY_ELEMENT = frozenset(
    "raw_binary_arith raw_fpowi fma raw_cmp raw_binary_bitwise raw_bitwise_shift raw_where unaryop tile_astype "
    "typed_const assign end_branch".split()
)


class Compiler:
    """Makes the steps of one kernel. lanes: the operations work on many scalars at once (bodies of reductions).
    suspects: registers that may hold a `KernelFault` in the place of a value, because a hoisted operation makes it."""

    def __init__(self) -> None:
        load_all()
        self.slots: dict[str, int] = {}
        self.template: Registers = [None]
        self.opcodes: set[str] = set()
        self.can_wait = False
        self.lanes = False
        self.suspects: set[int] = set()
        self.batchable, self.largest_tile = True, 1

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

    @classmethod
    def rank(cls, var: Any) -> int:
        return len(cls.shape(var))

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
        use = use_of(op)
        if use is not None and is_refused(use):
            operation, detail, dtype = use
            what = f"`{operation}`{f' ({detail})' if detail else ''} of {dtype}"
            raise UnsupportedOperation(
                f"The cuTile interpreter does not run {what}, which cuTile's compiler refuses for every GPU, "
                f"at {self.where(op)}; {advice(use)}."
            )
        factory = FACTORIES.get(opcode)
        if factory is None:
            raise UnsupportedOperation(
                f"The cuTile interpreter does not know the operation `{opcode}`, at {self.where(op)}; see "
                "docs/cutile_cpu.md."
            )
        self._look_at(op)
        step = factory(op, self)
        if step is None:
            return None
        suspects = tuple(s for s in map(self.slot, op.all_inputs()) if s in self.suspects)
        if is_hoisted(op):
            results = self.slots_of(op.result_vars)
            self.suspects.update(results)
            return _postponing(step, suspects, results)
        return _demanding(step, suspects) if suspects else step

    def _look_at(self, op: Any) -> None:
        """Whether the operation does the same for blocks together, and how large its tiles are."""
        shapes = [tuple(getattr(v.get_type(), "shape", None) or ()) for v in (*op.all_inputs(), *op.result_vars)]
        if op.op in _BY_ELEMENT - {"end_branch"}:
            self.batchable &= len(set(shapes)) == 1
        elif self.lanes:
            self.batchable &= op.op in _BY_ELEMENT
        self.batchable &= op.op not in _ORDERED
        for var, shape in zip(op.result_vars, shapes[len(shapes) - len(op.result_vars) :], strict=True):
            if type(var.get_type()).__name__ == "TileTy":
                self.largest_tile = max(self.largest_tile, math.prod(shape))


def _postponing(step: Step, inputs: tuple[int, ...], results: tuple[int, ...]) -> Step:
    """The step of a hoisted operation: a fault of it becomes its results, for who uses them."""

    def run(registers: Registers) -> Any:
        try:
            for slot in inputs:
                if type(registers[slot]) is KernelFault:
                    raise registers[slot]
            return step(registers)
        except KernelFault as fault:
            for slot in results:
                registers[slot] = fault
            return None

    return run


def _demanding(step: Step, inputs: tuple[int, ...]) -> Step:
    """The step of an operation that stands where the source has it: it raises the faults among its inputs."""

    def run(registers: Registers) -> Any:
        for slot in inputs:
            if type(registers[slot]) is KernelFault:
                raise registers[slot]
        return step(registers)

    return run


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
    return Program(
        name,
        run,
        parameters,
        compiler.template,
        frozenset(compiler.opcodes),
        compiler.can_wait,
        compiler.batchable and not compiler.can_wait,
        compiler.largest_tile,
    )
