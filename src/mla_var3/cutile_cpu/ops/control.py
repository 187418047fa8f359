"""Loops, branches and their ends. A block returns the signal of its terminator: (kind, values)."""

from __future__ import annotations

from typing import Any

import torch

from mla_var3.cutile_cpu.dtypes import constant
from mla_var3.cutile_cpu.errors import KernelFault
from mla_var3.cutile_cpu.ops import Registers, Step, implements

YIELD, CONTINUE, BREAK, RETURN = "yield", "continue", "break", "return"


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a is b or torch.equal(a, b)
    return bool(a is b or a == b)


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
        signal = (then if R[cond] else other)(R)
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
            start, stop, by = (R[s] for s in bounds)
            if by <= 0:
                raise KernelFault(f"a range with the step {by}, which is not positive,", where)
            values = [R[s] for s in initial]
            for i in range(start, stop, by):
                R[induction] = i
                kind, values = turn(R, values)
                if kind == RETURN:
                    return kind, values
                if kind == BREAK:
                    break
            for slot, value in zip(results, values, strict=True):
                R[slot] = value
            return None

        return step

    cx.can_wait = True

    def forever(R: Registers) -> Any:
        values = [R[s] for s in initial]
        while True:
            kind, after = turn(R, values)
            if kind == RETURN:
                return kind, after
            # A turn that changes none of the loop's variables can only be waiting for memory to change.
            waits = kind != BREAK and all(map(_same, values, after))
            values = after
            if kind == BREAK:
                break
            if waits:
                R[0].wait(where)
        for slot, value in zip(results, values, strict=True):
            R[slot] = value
        return None

    return forever


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
