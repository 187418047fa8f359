"""Arrays, views of their tiles, loads and stores by tile and by pointer, tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mla_var3.cutile_cpu.dtypes import MASK64, Dtype, dtype_of, settle, tensor
from mla_var3.cutile_cpu.errors import KernelFault, UnsupportedOperation
from mla_var3.cutile_cpu.memory import ArrayView, TileSpace
from mla_var3.cutile_cpu.ops import Registers, Step, implements


def _addressable(dtype: Dtype, cx: Any, op: Any) -> Dtype:
    if dtype.bits % 8:
        raise UnsupportedOperation(
            f"The cuTile interpreter does not run arrays of {dtype.name}, whose elements have {dtype.bits} bits, at "
            f"{cx.where(op)}; pass bytes and use unpack_from_bytes."
        )
    return dtype


# ---------------------------------------------------------------- arrays and views
@implements("make_tensor_view")
def _make_tensor_view(op: Any, cx: Any) -> Step:
    base, shape, strides = cx.slot(op.base_ptr), cx.slots_of(op.shape), cx.slots_of(op.strides)
    result = cx.result(op)
    dtype = _addressable(dtype_of(op.result_vars[0].get_type().dtype), cx, op)

    def step(R: Registers) -> None:
        R[result] = ArrayView(R[base], tuple(R[s] for s in shape), tuple(R[s] for s in strides), dtype)

    return step


@implements("make_list_view")
def _make_list_view(op: Any, cx: Any) -> Step:
    base, length, result = cx.slot(op.base_ptr), cx.slot(op.length), cx.result(op)

    def step(R: Registers) -> None:
        R[result] = (R[0].lists[R[base]], R[length])

    return step


@implements("get_array_list_item")
def _get_array_list_item(op: Any, cx: Any) -> Step:
    x, index, results, where = cx.slot(op.x), cx.slot(op.index), cx.slots_of(op.result_vars), cx.where(op)

    def step(R: Registers) -> None:
        table, length = R[x]
        at = R[0].decide(R[index])
        if not 0 <= at < length:
            raise KernelFault(f"item {at} of a list of {length} arrays", where)
        for slot, word in zip(results, table[at], strict=True):
            R[slot] = word

    return step


def _space(op: Any, cx: Any, make: Callable[[ArrayView], TileSpace]) -> Step:
    array, result = cx.slot(op.array), cx.result(op)

    def step(R: Registers) -> None:
        R[result] = make(R[array])

    return step


@implements("make_partition_view")
def _make_partition_view(op: Any, cx: Any) -> Step:
    ty = op.result_vars[0].get_type()
    tile, order, padding = tuple(ty.tile_shape), tuple(ty.order), ty.padding_mode.value
    return _space(op, cx, lambda array: TileSpace(array, tile, tile, order, padding))


@implements("make_strided_view")
def _make_strided_view(op: Any, cx: Any) -> Step:
    ty = op.result_vars[0].get_type()
    tile, steps, order = tuple(ty.tile_shape), tuple(ty.traversal_steps), tuple(ty.order)
    return _space(op, cx, lambda array: TileSpace(array, tile, steps, order, ty.padding_mode.value))


@implements("make_gather_scatter_view")
def _make_gather_scatter_view(op: Any, cx: Any) -> Step:
    ty = op.result_vars[0].get_type()
    tile, sparse, padding = tuple(ty.tile_shape), ty.sparse_dim, ty.padding_mode.value
    ones, order = (1,) * len(tile), tuple(range(len(tile)))
    return _space(op, cx, lambda array: TileSpace(array, tile, ones, order, padding, sparse))


@implements("num_tiles")
def _num_tiles(op: Any, cx: Any) -> Step:
    view, results = cx.slot(op.view), cx.slots_of(op.result_vars)

    def step(R: Registers) -> None:
        for slot, count in zip(results, R[view].counts(), strict=True):
            R[slot] = count

    return step


# ---------------------------------------------------------------- tiles
def read_index(op: Any, cx: Any) -> Callable[[Registers], tuple[Any, ...]]:
    """The index of a tile access: signed 32-bit numbers, or 64-bit ones for partitions of arrays indexed so."""
    from cuda.tile._ir.type import PartitionViewTy

    slots = cx.slots_of(op.index)
    ty = op.view.get_type()
    wide = isinstance(ty, PartitionViewTy) and ty.array_ty.index_dtype.bitwidth > 32

    def signed(value: int) -> int:
        value &= MASK64 if wide else 0xFFFFFFFF
        top = 63 if wide else 31
        return value - (1 << (top + 1)) if value >> top else value

    def signed_tile(value: torch.Tensor) -> torch.Tensor:
        return value if wide else (value << 32) >> 32

    def read(R: Registers) -> tuple[Any, ...]:
        values = [R[s] for s in slots]
        return tuple(signed_tile(v) if isinstance(v, torch.Tensor) else signed(v) for v in values)

    return read


@implements("tile_load")
def _tile_load(op: Any, cx: Any) -> Step:
    view, index, result, where = cx.slot(op.view), read_index(op, cx), cx.result(op), cx.where(op)
    inbounds, dtype = any(op.inbounds), cx.dtype(op.result_vars[0])

    def step(R: Registers) -> None:
        R[result] = settle(R[0].memory.load_tile(R[view], index(R), inbounds, where), dtype)

    return step


@implements("tile_store")
def _tile_store(op: Any, cx: Any) -> Step:
    view, index, tile, where = cx.slot(op.view), read_index(op, cx), cx.slot(op.tile), cx.where(op)
    inbounds = any(op.inbounds)

    def step(R: Registers) -> None:
        R[0].memory.store_tile(R[view], index(R), R[tile], inbounds, where)

    return step


# ---------------------------------------------------------------- pointers
@implements("foreign_pointer_cast")
def _foreign_pointer_cast(op: Any, cx: Any) -> Step:
    pointer, result = cx.slot(op.pointer), cx.result(op)

    def step(R: Registers) -> None:
        R[result] = R[pointer]

    return step


@implements("pointer_offset")
def _pointer_offset(op: Any, cx: Any) -> Step:
    pointer, offset, result = cx.slot(op.pointer), cx.slot(op.offset), cx.result(op)
    dtype, offset_dtype = cx.dtype(op.pointer), cx.dtype(op.offset)
    size = _addressable(dtype.pointee, cx, op).bytes
    cx.batchable &= cx.rank(op.pointer) == cx.rank(op.offset)

    def step(R: Registers) -> None:
        p, n = R[pointer], R[offset]
        if isinstance(p, torch.Tensor) or isinstance(n, torch.Tensor):
            R[result] = tensor(p, dtype) + tensor(n, offset_dtype) * size
        else:
            R[result] = (p + n * size) & MASK64

    return step


@implements("load_pointer")
def _load_pointer(op: Any, cx: Any) -> Step:
    pointer, mask, padding = cx.slot(op.pointer), cx.optional(op.mask), cx.optional(op.padding_value)
    result, where = cx.result(op), cx.where(op)
    dtype, shape = _addressable(cx.dtype(op.pointer).pointee, cx, op), cx.shape(op.result_vars[0])
    cx.batchable &= all(v is None or cx.shape(v) == shape for v in (op.pointer, op.mask, op.padding_value))

    def step(R: Registers) -> None:
        keep = None if mask is None else R[mask]
        pad = None if padding is None else R[padding]
        R[result] = R[0].memory.load(R[pointer], keep, pad, dtype, where, shape)

    return step


@implements("store_pointer")
def _store_pointer(op: Any, cx: Any) -> Step:
    pointer, mask, value = cx.slot(op.pointer), cx.optional(op.mask), cx.slot(op.value)
    where, dtype, shape = cx.where(op), _addressable(cx.dtype(op.pointer).pointee, cx, op), cx.shape(op.pointer)
    cx.batchable &= all(v is None or cx.shape(v) == shape for v in (op.value, op.mask))

    def step(R: Registers) -> None:
        R[0].memory.store(R[pointer], R[value], None if mask is None else R[mask], dtype, where, shape)

    return step


# ---------------------------------------------------------------- order of accesses
@implements("make_token", "join_tokens", "grid_dependency_control_wait", "grid_dependency_control_launch_dependents")
def _nothing(op: Any, cx: Any) -> None:
    # A block's operations run in their order, kernels run one after another: nothing to wait for.
    for var in op.result_vars:
        cx.slot(var)
