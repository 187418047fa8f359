"""Loops, branches and their ends. A block returns the signal of its terminator: (kind, values)."""

from __future__ import annotations

from typing import Any

from mla_var3.cutile_cpu.errors import KernelFault
from mla_var3.cutile_cpu.ops import Registers, Step, implements
from mla_var3.cutile_cpu.rounding import constant
from mla_var3.cutile_cpu.waiting import Abandoned, Watch

YIELD, CONTINUE, BREAK, RETURN = "yield", "continue", "break", "return"


def _terminator(kind: str, slots: tuple[int, ...]) -> Step:
    def step(R: Registers) -> Any:
        return kind, [R[s] for s in slots]

    return step


@implements("continue")
def _continue(op: Any, cx: Any) -> Step:
    return _terminator(CONTINUE, cx.slots_of(op.values))


@implements("break")
def _break(op: Any, cx: Any) -> Step:
    return _terminator(BREAK, cx.slots_of(op.values))


@implements("end_branch")
def _end_branch(op: Any, cx: Any) -> Step:
    return _terminator(YIELD, cx.slots_of(op.outputs))


@implements("return")
def _return(op: Any, cx: Any) -> Step:
    return _terminator(RETURN, ())


@implements("ifelse")
def _ifelse(op: Any, cx: Any) -> Step:
    cond, results = cx.slot(op.cond), cx.slots_of(op.result_vars)
    then, other = cx.block(op.then_block), cx.block(op.else_block)

    def step(R: Registers) -> Any:
        signal = (then if R[0].decide(R[cond]) else other)(R)
        if signal is None or signal[0] != YIELD:
            return signal
        for slot, value in zip(results, signal[1], strict=True):
            R[slot] = value
        return None

    return step


@implements("loop")
def _loop(op: Any, cx: Any) -> Step:
    initial, results = cx.slots_of(op.initial_values), cx.slots_of(op.result_vars)
    carried = cx.slots_of(op.body_vars)
    body, where = cx.block(op.body), cx.where(op)

    def turn(R: Registers, values: list[Any]) -> tuple[Any, list[Any]]:
        for slot, value in zip(carried, values, strict=True):
            R[slot] = value
        signal = body(R)
        return (CONTINUE, values) if signal is None else signal

    if op.is_for_loop:
        bounds = cx.slots_of((op.start, op.stop, op.step))
        induction = cx.slot(op.induction_var)

        def step(R: Registers) -> Any:
            start, stop = R[bounds[0]], R[bounds[1]]
            by = R[0].decide(R[bounds[2]])
            if by <= 0:
                raise KernelFault(f"a range with the step {by}, which is not positive,", where)
            values = [R[s] for s in initial]
            # Blocks that run together may start at different numbers; they make as many turns.
            for i in range(R[0].decide((stop - start + (by - 1)) // by)):
                if R[0].abandoned:
                    raise Abandoned
                R[induction] = start + i * by
                kind, values = turn(R, values)
                if kind == RETURN:
                    return kind, values
                if kind == BREAK:
                    break
            for slot, value in zip(results, values, strict=True):
                R[slot] = value
            return None

        return step

    if not _turns_again(op.body):

        def once(R: Registers) -> Any:
            kind, values = turn(R, [R[s] for s in initial])
            if kind == RETURN:
                return kind, values
            for slot, value in zip(results, values, strict=True):
                R[slot] = value
            return None

        return once

    cx.can_wait = True
    course = _course(op)

    def forever(R: Registers) -> Any:
        values = [R[s] for s in initial]
        watch = Watch(R[0], course, where)
        while True:
            watch.begin()
            kind, values = turn(R, values)
            if kind == RETURN:
                return kind, values
            if kind == BREAK:
                break
            watch.end(values)
        watch.close()
        for slot, value in zip(results, values, strict=True):
            R[slot] = value
        return None

    return forever


# ---------------------------------------------------------------- what a `while` loop goes by
#: Operations without an effect that end a kernel when their operands are wrong.
_MAY_FAULT = frozenset(
    "tile_load load_pointer tile_extract tile_insert get_array_list_item assume_div_by assume_bounded".split()
)


def _turns_again(block: Any) -> bool:
    """Whether a loop's body may go on to another turn. A helper that returns early is a loop whose body does not."""
    return any(op.op == "continue" or (op.op == "ifelse" and any(map(_turns_again, op.nested_blocks))) for op in block)


def _mentioned(block: Any) -> set[str]:
    """Names of all variables that operations of a block take, nested ones too."""
    names = {v.name for op in block for v in op.all_inputs()}
    return names.union(*(_mentioned(nested) for op in block for nested in op.nested_blocks))


def _course(op: Any) -> tuple[int, ...]:
    """Which of a loop's carried variables decide, with memory, what its turns do: what they access, whether one ends.

    A variable that only counts the turns is none of them.
    """
    needed: set[str] = set()
    feeds: dict[str, set[str]] = {}
    names = [v.name for v in op.body_vars]

    def walk(block: Any, results: tuple[Any, ...]) -> None:
        for inner in block:
            if inner.op == "continue":
                for name, value in zip(names, inner.values, strict=True):
                    feeds.setdefault(name, set()).add(value.name)
            elif inner.op == "end_branch":
                for var, value in zip(results, inner.outputs, strict=True):
                    feeds.setdefault(var.name, set()).add(value.name)
            elif inner.op == "ifelse":
                needed.add(inner.cond.name)
                for branch in inner.nested_blocks:
                    walk(branch, inner.result_vars)
            elif inner.nested_blocks or inner.has_observable_effect or inner.op in _MAY_FAULT:
                needed.update(v.name for v in inner.all_inputs())
                needed.update(*(_mentioned(nested) for nested in inner.nested_blocks))
            elif inner.op not in ("break", "return"):
                for var in inner.result_vars:
                    feeds[var.name] = {v.name for v in inner.all_inputs()}

    walk(op.body, ())
    pending = list(needed)
    while pending:
        for name in feeds.get(pending.pop(), set()) - needed:
            needed.add(name)
            pending.append(name)
    return tuple(i for i, name in enumerate(names) if name in needed)


@implements("make_dummy")
def _make_dummy(op: Any, cx: Any) -> Step | None:
    # A variable that is not set on every path: cuTile's own code generation puts zero here.
    from cuda.tile._ir.type import TileTy

    slot = cx.result(op)
    if isinstance(op.result_vars[0].get_type(), TileTy):
        cx.template[slot] = constant(0, cx.dtype(op.result_vars[0]), cx.shape(op.result_vars[0]))
    return None


@implements("typed_const")
def _typed_const(op: Any, cx: Any) -> Step | None:
    var = op.result_vars[0]
    cx.template[cx.slot(var)] = constant(op.value, cx.dtype(var), cx.shape(var))
    return None


@implements("assign")
def _assign(op: Any, cx: Any) -> Step:
    source, result = cx.slot(op.value), cx.result(op)

    def step(R: Registers) -> None:
        R[result] = R[source]

    return step
