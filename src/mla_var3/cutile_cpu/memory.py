"""Memory that a launch may touch: the storages of the tensors it was given, and views of them.

Addresses are those of the CPU's memory. An access is inside one of the storages or it is a `KernelFault`. The storage
and not the array is the bound of accesses by pointer, because kernels make arrays from pointers (`Array.from_foreign`)
that reach beyond the array the pointer came from.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Any

import torch

from mla_var3.cutile_cpu.dtypes import Dtype, from_memory, poison, same_bits, settle, tensor, to_memory
from mla_var3.cutile_cpu.errors import KernelFault
from mla_var3.cutile_cpu.rounding import constant


class Region:
    """The storage of one or several argument tensors."""

    def __init__(self, storage: Any, name: str) -> None:
        self.start, self.nbytes, self.storage, self.name = storage.data_ptr(), storage.nbytes(), storage, name
        self.end = self.start + self.nbytes
        self._flat: dict[torch.dtype, torch.Tensor] = {}

    def flat(self, dtype: torch.dtype) -> torch.Tensor:
        """The whole storage as a tensor of one type."""
        if dtype not in self._flat:
            whole = torch.empty(0, dtype=dtype)
            self._flat[dtype] = whole.set_(self.storage, 0, (self.nbytes // whole.element_size(),), (1,))
        return self._flat[dtype]


@dataclass(frozen=True)
class ArrayView:
    """An array: byte address, shape and strides in elements."""

    base: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Dtype


@dataclass(frozen=True)
class TileSpace:
    """Tiles of an array. steps: elements from one tile to the next, along the tile's axes; 1 for starts that are
    element indices. order: the array's axis of each axis of the tile. sparse: the axis that is indexed by a tile."""

    array: ArrayView
    tile_shape: tuple[int, ...]
    steps: tuple[int, ...]
    order: tuple[int, ...]
    padding: str
    sparse: int | None = None

    def counts(self) -> tuple[int, ...]:
        """Number of tiles along each axis of the tile."""
        extents = (self.array.shape[axis] for axis in self.order)
        return tuple(-(-n // step) for n, step in zip(extents, self.steps, strict=True))


_PADDING = {"zero": 0.0, "neg_zero": -0.0, "nan": float("nan"), "pos_inf": float("inf"), "neg_inf": float("-inf")}


class Memory:
    """The regions of one launch. fill: poison undetermined padding (else zeros). strict: tiles that lie wholly outside
    their array are faults (else padding, and stores of nothing). Arrays without elements are no fault in either case:
    cuTile's own tests load from empty slices. watch: count in `changes` only writes that change something. trace, if
    a list, gets (place, …, value) of what is read."""

    def __init__(self, fill: bool, strict: bool, watch: bool = False) -> None:
        self.fill, self.strict, self.watch = fill, strict, watch
        self._regions: dict[int, Region] = {}
        self._sorted: list[Region] = []
        self._starts: list[int] = []
        self.changes = 0
        self.trace: list[Any] | None = None
        self._arguments: list[tuple[torch.Tensor, str]] = []
        self._undetermined: dict[str, None] = {}  # lines of loads whose padding was poisoned, in order
        self._before: list[int] = []

    def add(self, tensor_: torch.Tensor, name: str) -> None:
        self._arguments.append((tensor_, name))
        storage = tensor_.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in self._regions:
            self._regions[storage.data_ptr()] = Region(storage, name)
            self._sorted = sorted(self._regions.values(), key=lambda r: r.start)
            self._starts = [r.start for r in self._sorted]

    def region(self, low: int, high: int) -> Region | None:
        """The region with all bytes of [low, high)."""
        i = bisect.bisect_right(self._starts, low) - 1
        return self._sorted[i] if i >= 0 and high <= self._sorted[i].end else None

    def _describe(self, address: int) -> str:
        if not self._sorted:
            return "no tensor was given to the kernel"
        nearest = min(self._sorted, key=lambda r: max(r.start - address, address - r.end, 0))
        if address < nearest.start:
            return f"{nearest.start - address} bytes before {nearest.name}"
        return f"byte {address - nearest.start} of {nearest.name}, which has {nearest.nbytes}"

    # ------------------------------------------------------------ pointers
    def cells(self, address: torch.Tensor, dtype: Dtype, where: str, verb: str) -> tuple[torch.Tensor, torch.Tensor]:
        """(flat memory, element indices) of addresses (1-D) that lie in one region."""
        size = dtype.bytes
        low, high = (int(v) for v in torch.aminmax(address))
        found = self.region(low, high + size)
        if found is None:
            starts = torch.tensor(self._starts, dtype=torch.int64)
            ends = torch.tensor([r.end for r in self._sorted], dtype=torch.int64)
            at = torch.searchsorted(starts, address, right=True) - 1
            bad = (at < 0) | (address + size > ends[at.clamp(min=0)]) if len(starts) else torch.ones_like(at) > 0
            if bool(bad.any()):
                worst = int(address[bad][0])
                raise KernelFault(f"{verb} outside memory: {self._describe(worst)}", where)
            raise Several(at)
        index = address - found.start
        if size > 1:
            if bool((index & (size - 1)).any()):
                raise KernelFault(f"{verb} at an address that is no multiple of {size} bytes in {found.name}", where)
            index = index >> (size.bit_length() - 1)
        return found.flat(dtype.stored), index

    def read(self, address: torch.Tensor, dtype: Dtype, where: str) -> torch.Tensor:
        """Stored elements at byte addresses (1-D)."""
        try:
            flat, index = self.cells(address, dtype, where, "load")
            found = flat[index]
            if self.trace is not None:
                self.trace.append((address, found))
            return found
        except Several as several:
            out = torch.empty(address.shape, dtype=dtype.stored)
            for which in several.groups():
                out[which] = self.read(address[which], dtype, where)
            return out

    def write(self, address: torch.Tensor, stored: torch.Tensor, dtype: Dtype, where: str) -> None:
        try:
            flat, index = self.cells(address, dtype, where, "store")
            if self.watch and same_bits(flat[index], stored):
                return
            self.changes += 1
            flat[index] = stored
        except Several as several:
            for which in several.groups():
                self.write(address[which], stored[which], dtype, where)

    def load(self, address: Any, mask: Any, padding: Any, dtype: Dtype, where: str, shape: tuple[int, ...]) -> Any:
        """A tile of the elements at `address` (a scalar or a tile of that shape); padding where mask is false."""
        whole = as_address(address).expand(shape)
        if mask is None:
            raw = self.read(whole.reshape(-1), dtype, where).reshape(shape)
            return settle(from_memory(raw, dtype), dtype)
        keep = torch.as_tensor(mask).expand(shape)
        out = masked_off(None if padding is None else tensor(padding, dtype), dtype, shape)
        if bool(keep.any()):
            out[keep] = from_memory(self.read(whole[keep].reshape(-1), dtype, where), dtype)
        return settle(out, dtype)

    def store(self, address: Any, value: Any, mask: Any, dtype: Dtype, where: str, shape: tuple[int, ...]) -> None:
        whole = as_address(address).expand(shape)
        stored = to_memory(value, dtype).expand(shape)
        if mask is not None:
            keep = torch.as_tensor(mask).expand(shape)
            whole, stored = whole[keep], stored[keep]
        if whole.numel():
            self.write(whole.reshape(-1), stored.reshape(-1), dtype, where)

    # ------------------------------------------------------------ tiles
    def window(
        self, space: TileSpace, index: tuple[Any, ...], inbounds: bool, where: str, verb: str
    ) -> tuple[torch.Tensor | None, tuple[Any, ...], bool]:
        """(the part of memory inside the array, its place in the tile, whether it is the whole tile)."""
        array, size = space.array, space.array.dtype.bytes
        offset, sizes, strides, place = 0, [], [], []
        whole = True
        for axis, (at, step, extent) in enumerate(zip(index, space.steps, space.tile_shape, strict=True)):
            n, stride = array.shape[space.order[axis]], array.strides[space.order[axis]]
            start = at * step
            low, high = max(0, -start), min(extent, n - start)
            if high <= low:
                if inbounds or (self.strict and n > 0):
                    raise KernelFault(
                        f"{verb} of a tile outside its array: elements {start} to {start + extent - 1} of axis "
                        f"{space.order[axis]}, which has {n}",
                        where,
                    )
                return None, (), False
            if high - low < extent:
                whole = False
                if inbounds:
                    raise KernelFault(
                        f"{verb} with check_bounds=False of a tile that overhangs its array: elements {start} to "
                        f"{start + extent - 1} of axis {space.order[axis]}, which has {n}",
                        where,
                    )
            offset += (start + low) * stride
            sizes.append(high - low)
            strides.append(stride)
            place.append(slice(low, high))
        last = sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
        first = array.base + offset * size
        found = self.region(first, first + (last + 1) * size)
        if found is None:
            bad = first if self.region(first, first + size) is None else first + last * size
            raise KernelFault(f"{verb} outside memory: {self._describe(bad)}", where)
        element, rest = divmod(first - found.start, size)
        if rest:
            raise KernelFault(f"{verb} at an address that is no multiple of {size} bytes in {found.name}", where)
        return found.flat(array.dtype.stored).as_strided(sizes, strides, element), tuple(place), whole

    def padding(self, space: TileSpace, where: str) -> torch.Tensor:
        dtype = space.array.dtype
        if space.padding == "undetermined":
            if not self.fill:
                return _filled(0, dtype, space.tile_shape)
            if not self._undetermined:
                self._before = [_nans(t) for t, _ in self._arguments]
            self._undetermined[where] = None
            return poison(dtype, space.tile_shape)
        return _filled(_PADDING[space.padding], dtype, space.tile_shape)

    def poisoned(self) -> tuple[str, list[str]] | None:
        """(name of an argument that holds more NaN than when padding was poisoned first, lines of loads), if any."""
        for (tensor_, name), before in zip(self._arguments, self._before, strict=False):
            if _nans(tensor_) > before:
                return name, list(self._undetermined)
        return None

    def load_tile(self, space: TileSpace, index: tuple[Any, ...], inbounds: bool, where: str) -> torch.Tensor:
        if space.sparse is not None:
            return self._load_sparse(space, index, where)
        window, place, whole = self.window(space, index, inbounds, where, "load")
        if whole and window is not None:
            out = from_memory(window, space.array.dtype)
        else:
            out = self.padding(space, where)
            if window is not None:
                out[place] = from_memory(window, space.array.dtype)
        if self.trace is not None:
            self.trace.append((space, *index, out))
        return out

    def store_tile(self, space: TileSpace, index: tuple[Any, ...], tile: Any, inbounds: bool, where: str) -> None:
        stored = to_memory(tile, space.array.dtype).expand(space.tile_shape)
        if space.sparse is not None:
            address, inside = self.addresses(space, index, where, "store")
            if address.numel():
                self.write(address, stored[inside], space.array.dtype, where)
            return
        window, place, _ = self.window(space, index, inbounds, where, "store")
        if window is None:
            return
        if self.watch and same_bits(window, stored[place]):
            return
        self.changes += 1
        try:
            window.copy_(stored[place])
        except RuntimeError:  # elements share memory: the order among them is open
            address, inside = self.addresses(space, index, where, "store")
            self.write(address, stored[inside], space.array.dtype, where)

    def addresses(
        self, space: TileSpace, index: tuple[Any, ...], where: str, verb: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(byte addresses (1-D) of the elements inside the array, which elements of the tile they are)."""
        address = torch.tensor(space.array.base)
        inside = torch.tensor(True)
        rank = len(space.tile_shape)
        for axis, (at, step, extent) in enumerate(zip(index, space.steps, space.tile_shape, strict=True)):
            n, stride = space.array.shape[space.order[axis]], space.array.strides[space.order[axis]]
            element = at if isinstance(at, torch.Tensor) else at * step + torch.arange(extent)
            element = element.reshape((1,) * axis + (extent,) + (1,) * (rank - 1 - axis))
            inside = inside & (element >= 0) & (element < n)
            address = address + element * stride * space.array.dtype.bytes
        inside = inside.expand(space.tile_shape)
        if self.strict and all(space.array.shape) and not bool(inside.any()):
            raise KernelFault(f"{verb} of a tile outside its array of shape {space.array.shape}", where)
        return address.expand(space.tile_shape)[inside], inside

    def _load_sparse(self, space: TileSpace, index: tuple[Any, ...], where: str) -> torch.Tensor:
        address, inside = self.addresses(space, index, where, "load")
        out = self.padding(space, where)
        if address.numel():
            out[inside] = from_memory(self.read(address, space.array.dtype, where), space.array.dtype)
        return out


class Several(Exception):
    """Addresses in several regions. at: the region of each."""

    def __init__(self, at: torch.Tensor) -> None:
        super().__init__()
        self.at = at

    def groups(self) -> list[torch.Tensor]:
        return [self.at == which for which in self.at.unique()]


def _nans(tensor_: torch.Tensor) -> int:
    if not tensor_.is_floating_point():
        return 0
    # Numbers of 8 bits have no `isnan` of their own.
    return int((tensor_ if tensor_.element_size() > 1 else tensor_.to(torch.float32)).isnan().sum())


def as_address(address: Any) -> torch.Tensor:
    """Addresses as a tensor; one beyond 2^63 is negative there, and outside every region all the same."""
    return (
        address
        if isinstance(address, torch.Tensor)
        else torch.tensor(address - (1 << 64) if address >> 63 else address)
    )


def masked_off(padding: torch.Tensor | None, dtype: Dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """What a load by pointer gives where its mask is false."""
    return poison(dtype, shape) if padding is None else padding.expand(shape).clone()


def _filled(value: float, dtype: Dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if dtype.kind == "small":
        return tensor(constant(value, dtype, shape), dtype).clone()
    if dtype.kind == "float":
        return torch.full(shape, value, dtype=dtype.held)
    # An integer has no -0, NaN or infinity: the front end refuses those modes, zero is what is left.
    return torch.zeros(shape, dtype=dtype.held)
