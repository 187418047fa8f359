"""Atomic operations. Elements are updated one after another where several of them share an address.

Where the mask is off nothing happens, and the result is `expected` for compare-and-swap (as documented) and poison for
the others, where cuTile says "implementation-defined".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mla_var3.cutile_cpu.dtypes import Dtype, from_memory, poison, settle, tensor, to_memory
from mla_var3.cutile_cpu.memory import Memory
from mla_var3.cutile_cpu.ops import Registers, Step, implements
from mla_var3.cutile_cpu.ops.arith import int_arith
from mla_var3.cutile_cpu.ops.memory import read_index

Update = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def updater(mode: str, dtype: Dtype) -> Update:
    """The new element from the old one and the operand, for a name of cuTile's `AtomicRMWMode`."""
    if mode == "EXCHANGE":
        return lambda old, new: new
    if mode == "ADD_FLOAT":
        return torch.add
    if mode.startswith("BITWISE_"):
        return getattr(torch, mode.lower())
    return int_arith(mode.split("_")[0].lower(), dtype)[1]


def _rounds(address: torch.Tensor) -> list[torch.Tensor]:
    """Index sets that together are all elements; within one, no address occurs twice."""
    order = torch.argsort(address, stable=True)
    ordered = address[order]
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[1:] = ordered[1:] != ordered[:-1]
    place = torch.arange(len(ordered))
    rank = place - torch.cummax(torch.where(first, place, 0), dim=0).values
    return [order[rank == r] for r in range(int(rank.max()) + 1)]


def read_modify_write(
    memory: Memory, address: torch.Tensor, operand: torch.Tensor, dtype: Dtype, update: Update, where: str
) -> torch.Tensor:
    """Old elements (1-D tile) at `address`, which get `update(old, operand)`."""
    old = torch.empty(address.shape, dtype=dtype.held)
    for chosen in _rounds(address):
        here = address[chosen]
        before = from_memory(memory.read(here, dtype, where), dtype)
        old[chosen] = before
        memory.write(here, to_memory(update(before, operand[chosen]), dtype), dtype, where)
    return old


@implements("tile_atomic_rmw")
def _atomic_rmw(op: Any, cx: Any) -> Step:
    pointer, mask, result, where = cx.slot(op.pointer), cx.optional(op.mask), cx.result(op), cx.where(op)
    update, dtype = cx.slot(op.update), cx.dtype(op.result_vars[0])
    act = updater(op.mode.name, dtype)

    def step(R: Registers) -> None:
        address = torch.as_tensor(R[pointer])
        shape = tuple(address.shape)
        keep = torch.as_tensor(True if mask is None else R[mask]).expand(shape)
        out = poison(dtype, shape)
        if bool(keep.any()):
            operand = tensor(R[update], dtype).expand(shape)[keep].reshape(-1)
            out[keep] = read_modify_write(R[0].memory, address[keep].reshape(-1), operand, dtype, act, where)
        R[result] = settle(out, dtype)

    return step


@implements("tile_atomic_cas")
def _atomic_cas(op: Any, cx: Any) -> Step:
    pointer, mask, result, where = cx.slot(op.pointer), cx.optional(op.mask), cx.result(op), cx.where(op)
    expected, desired, dtype = cx.slot(op.expected), cx.slot(op.desired), cx.dtype(op.result_vars[0])
    bits = {32: torch.int32, 64: torch.int64}[dtype.bits]

    def step(R: Registers) -> None:
        address = torch.as_tensor(R[pointer])
        shape = tuple(address.shape)
        keep = torch.as_tensor(True if mask is None else R[mask]).expand(shape)
        out = tensor(R[expected], dtype).expand(shape).clone()
        if bool(keep.any()):
            # Compared as bits: -0 is not 0, and a NaN equals itself.
            both = torch.stack([to_memory(R[v], dtype).expand(shape)[keep].reshape(-1) for v in (expected, desired)], 1)
            memory, found = R[0].memory, torch.empty(len(both), dtype=dtype.stored)
            at = address[keep].reshape(-1)
            for chosen in _rounds(at):
                before = memory.read(at[chosen], dtype, where)
                found[chosen] = before
                want, new = both[chosen, 0].contiguous(), both[chosen, 1].contiguous()
                same = before.view(bits) == want.view(bits)
                if bool(same.any()):
                    memory.write(at[chosen][same], new[same], dtype, where)
            out[keep] = from_memory(found, dtype)
        R[result] = settle(out, dtype)

    return step


@implements("tile_atomic_red_view")
def _atomic_red_view(op: Any, cx: Any) -> Step:
    view, index, update, where = cx.slot(op.view), read_index(op, cx), cx.slot(op.update), cx.where(op)
    dtype = cx.dtype(op.update)
    act = updater(op.mode.name, dtype)

    def step(R: Registers) -> None:
        space, memory = R[view], R[0].memory
        address, inside = memory.addresses(space, index(R), where, "atomic store")
        if address.numel():
            operand = tensor(R[update], dtype).expand(space.tile_shape)[inside]
            read_modify_write(memory, address, operand, dtype, act, where)

    return step
