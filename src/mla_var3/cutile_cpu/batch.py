"""Running many blocks of a grid at once: a leading dimension of every value that is not the same for all of them.

The steps are those of one block. A value of a tile's own rank is the same for all blocks; one with a dimension more, in
front, has a part for each (a lane). What decides about control flow has to be the same for all lanes: where it is not,
they are parted by its value, and each part starts anew.

Nothing is written before all blocks of a window have run. If one block then turns out to have read what another one, or
itself, writes earlier in the order of blocks, or if anything went wrong, the window's results are dropped and its
blocks run one by one. So what is in memory in the end is the same, bit for bit, and so are faults.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mla_var3.cutile_cpu.dtypes import Dtype, from_memory, settle, tensor, to_memory
from mla_var3.cutile_cpu.errors import Diverged, InterpreterError, KernelFault, Unbatchable
from mla_var3.cutile_cpu.machine import BlockState, Program
from mla_var3.cutile_cpu.memory import ArrayView, Memory, Several, TileSpace, as_address, masked_off

#: Elements of the largest tile of all lanes together: tiles that stay in a cache, and are large beside a step's cost.
_ELEMENTS = 1 << 17
_MOST_LANES = 1024
_FEWEST_LANES = 4  # fewer are not worth it

#: Bytes of a window's accesses before it is written.
_WINDOW_BYTES = 1 << 28

#: Lanes that are started anew, for each lane, before a window is given up.
_RESTARTS = 4

#: Bytes of the largest region in which reads and writes are told apart element by element.
_LARGEST_MAP = 1 << 28

Block = tuple[int, int, int]


@dataclass
class Access:
    """What the lanes of a batch read or write in one step. orders: each lane's place in the order of blocks. Either
    windows, one a lane, or cells: element indices, one row a lane (or flat, with the number that each lane has).
    data: what is written; None for a read."""

    seq: int
    orders: list[int]
    flat: torch.Tensor
    windows: list[torch.Tensor] | None = None
    cells: torch.Tensor | None = None
    counts: list[int] | None = None
    data: Any = None

    def bytes(self) -> int:
        tensors = [t for t in (self.cells, self.data) if t is not None]
        return 256 * len(self.orders) + sum(t.numel() * t.element_size() for t in tensors)

    def parts(self, of: torch.Tensor) -> Sequence[torch.Tensor]:
        """The cells, or the data, of each lane."""
        return of.unbind(0) if self.counts is None else of.split(self.counts)

    def bounds(self) -> list[tuple[int, int, int]]:
        """(first byte, end, order) of each lane that touches memory."""
        size = self.flat.element_size()
        if self.windows is not None:
            ends = [_extent(w.shape, w.stride()) for w in self.windows]
            starts = [w.storage_offset() for w in self.windows]
            return [(s * size, (s + e) * size, o) for s, e, o in zip(starts, ends, self.orders, strict=True)]
        assert self.cells is not None
        found = [
            (*map(int, torch.aminmax(c)), o)
            for c, o in zip(self.parts(self.cells), self.orders, strict=True)
            if c.numel()
        ]
        return [(low * size, (high + 1) * size, o) for low, high, o in found]

    def write(self) -> None:
        if self.windows is not None:
            for window, data in zip(self.windows, self.data.unbind(0), strict=True):
                window.copy_(data)
        else:
            assert self.cells is not None
            self.flat[self.cells.reshape(-1)] = self.data.reshape(-1)

    def each(self, flat: torch.Tensor) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor | None]]:
        """(order, lane, a window of `flat` or the lane's cells) of each lane; `flat` is laid out as the region is."""
        if self.windows is not None:
            for lane, (order, window) in enumerate(zip(self.orders, self.windows, strict=True)):
                yield order, lane, flat.as_strided(window.shape, window.stride(), window.storage_offset()), None
        else:
            assert self.cells is not None
            for lane, (order, cells) in enumerate(zip(self.orders, self.parts(self.cells), strict=True)):
                yield order, lane, flat, cells


def _differs(array: ArrayView) -> bool:
    """Whether an array is another one for each lane."""
    return any(isinstance(v, torch.Tensor) for v in (array.base, *array.shape, *array.strides))


def _extent(sizes: Sequence[int], strides: Sequence[int]) -> int:
    return 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))


def _overlaps(window: torch.Tensor) -> bool:
    """Whether elements of a window may share memory."""
    reach = 0
    for stride, size in sorted(zip(window.stride(), window.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


class BatchMemory:
    """Memory as a batch sees it: reads are noted and writes are kept. real: the launch's."""

    def __init__(self, real: Memory, orders: list[int]) -> None:
        self.real, self.orders = real, orders
        self.log: list[Access] = []

    def _note(self, flat: torch.Tensor, orders: list[int], **what: Any) -> None:
        self.log.append(Access(len(self.log), orders, flat, **what))

    # ------------------------------------------------------------ tiles
    def _lanes_of(self, space: TileSpace, index: tuple[Any, ...]) -> list[tuple[TileSpace, tuple[Any, ...]]]:
        """The space and index of each lane; one pair where they are the same for all."""
        array = space.array
        fixed = not _differs(array)
        ranks = [int(i == space.sparse) for i in range(len(index))]
        if fixed and not any(isinstance(v, torch.Tensor) and v.dim() > r for v, r in zip(index, ranks, strict=True)):
            return [(space, index)]

        def of(value: Any, lane: int, rank: int = 0) -> Any:
            if not isinstance(value, torch.Tensor) or value.dim() == rank:
                return value
            return value[lane] if rank else int(value[lane])

        out = []
        for lane in range(len(self.orders)):
            here = array
            if not fixed:
                shape, strides = (tuple(of(v, lane) for v in vs) for vs in (array.shape, array.strides))
                here = replace(array, base=of(array.base, lane), shape=shape, strides=strides)
            own = tuple(of(v, lane, r) for v, r in zip(index, ranks, strict=True))
            out.append((replace(space, array=here), own))
        return out

    def _whole_windows(self, space: TileSpace, index: tuple[Any, ...]) -> list[torch.Tensor] | None:
        """The windows of all lanes where the index differs, nothing else does, and all lie inside the array."""
        array, size = space.array, space.array.dtype.bytes
        differ = any(isinstance(v, torch.Tensor) for v in index)
        if not differ or space.sparse is not None or _differs(array):
            return None
        offset, strides = torch.zeros(len(self.orders), dtype=torch.int64), []
        for axis, (at, step, extent) in enumerate(zip(index, space.steps, space.tile_shape, strict=True)):
            n, stride = array.shape[space.order[axis]], array.strides[space.order[axis]]
            start = torch.as_tensor(at * step)
            low, high = (int(v) for v in torch.aminmax(start))
            if low < 0 or high + extent > n:
                return None
            offset += start * stride
            strides.append(stride)
        first, last = (array.base + int(v) * size for v in torch.aminmax(offset))
        found = self.real.region(first, last + _extent(space.tile_shape, strides) * size)
        if found is None or (array.base - found.start) % size:
            return None
        flat, base = found.flat(array.dtype.stored), (array.base - found.start) // size
        return [flat.as_strided(space.tile_shape, strides, base + o) for o in offset.tolist()]

    def load_tile(self, space: TileSpace, index: tuple[Any, ...], inbounds: bool, where: str) -> torch.Tensor:
        windows, dtype = self._whole_windows(space, index), space.array.dtype
        if windows is not None:
            self._note(_flat(windows[0]), self.orders, windows=windows)
            raw = torch.stack(windows)
            return raw if dtype.kind in ("float", "small") else from_memory(raw, dtype)
        lanes = self._lanes_of(space, index)
        many = len(lanes) > 1
        tiles = []
        for lane, (own, at) in enumerate(lanes):
            # What all lanes read counts as read by the last of them.
            orders = [self.orders[lane]] if many else [max(self.orders)]
            tiles.append(self._load_one(own, at, inbounds, where, orders))
        return torch.stack(tiles) if many else tiles[0]

    def _load_one(
        self, space: TileSpace, index: tuple[Any, ...], inbounds: bool, where: str, orders: list[int]
    ) -> torch.Tensor:
        dtype = space.array.dtype
        if space.sparse is not None:
            out = self.real.padding(space, where)
            address, inside = self.real.addresses(space, index, where, "load")
            if address.numel():
                flat, cells = self._cells(address, dtype, where, "load")
                self._note(flat, orders, cells=cells[None])
                out[inside] = from_memory(flat[cells], dtype)
            return out
        window, place, whole = self.real.window(space, index, inbounds, where, "load")
        if window is None:
            return self.real.padding(space, where)
        self._note(_flat(window), orders, windows=[window])
        if whole:
            return from_memory(window, dtype)
        out = self.real.padding(space, where)
        out[place] = from_memory(window, dtype)
        return out

    def store_tile(self, space: TileSpace, index: tuple[Any, ...], tile: Any, inbounds: bool, where: str) -> None:
        count, dtype = len(self.orders), space.array.dtype
        stored = to_memory(tile, dtype)
        stored = stored.expand(count, *space.tile_shape)
        windows = self._whole_windows(space, index)
        if windows is not None:
            if _overlaps(windows[0]):
                raise Unbatchable
            self._note(_flat(windows[0]), self.orders, windows=windows, data=stored)
            return
        lanes = self._lanes_of(space, index)
        for lane, order in enumerate(self.orders):
            own, at = lanes[lane if len(lanes) > 1 else 0]
            if space.sparse is not None:
                address, inside = self.real.addresses(own, at, where, "store")
                if address.numel():
                    flat, cells = self._cells(address, dtype, where, "store")
                    self._note(flat, [order], cells=cells[None], data=stored[lane][inside][None])
                continue
            window, place, _ = self.real.window(own, at, inbounds, where, "store")
            if window is not None:
                if _overlaps(window):
                    raise Unbatchable
                self._note(_flat(window), [order], windows=[window], data=stored[lane][place][None])

    # ------------------------------------------------------------ pointers
    def _cells(self, address: torch.Tensor, dtype: Dtype, where: str, verb: str) -> tuple[torch.Tensor, torch.Tensor]:
        try:
            return self.real.cells(address, dtype, where, verb)
        except Several:
            raise Unbatchable from None

    def _spread(self, values: Sequence[Any], shape: tuple[int, ...], always: bool) -> tuple[Any, list[torch.Tensor]]:
        """(lanes in front or (), the values as tensors of that shape)."""
        tensors = [torch.as_tensor(v) for v in values]
        lead: tuple[int, ...] = (len(self.orders),) if always or any(t.dim() > len(shape) for t in tensors) else ()
        return lead, [t.expand(lead + shape) for t in tensors]

    def load(self, address: Any, mask: Any, padding: Any, dtype: Dtype, where: str, shape: tuple[int, ...]) -> Any:
        given = [as_address(address)] if mask is None else [as_address(address), mask]
        extra = [] if padding is None else [tensor(padding, dtype)]
        lead, spread = self._spread([*given, *extra], shape, always=False)
        orders = self.orders if lead else [max(self.orders)]
        whole = spread[0]
        if mask is None or bool(spread[1].all()):
            flat, cells = self._cells(whole.reshape(-1), dtype, where, "load")
            self._note(flat, orders, cells=cells.reshape(len(orders), -1))
            return settle(from_memory(flat.index_select(0, cells).reshape(whole.shape), dtype), dtype)
        keep = spread[1]
        pad = masked_off(None if padding is None else spread[-1], dtype, tuple(whole.shape))
        kept = int(keep.reshape(-1).to(torch.uint8).argmax())
        if not keep.reshape(-1)[kept]:
            return settle(pad, dtype)
        # Lanes read one of the addresses where their mask is off: faster than taking the others out.
        safe = torch.where(keep, whole, whole.reshape(-1)[kept])
        flat, cells = self._cells(safe.reshape(-1), dtype, where, "load")
        self._note(flat, orders, cells=cells.reshape(len(orders), -1))
        read = from_memory(flat.index_select(0, cells).reshape(whole.shape), dtype)
        return settle(torch.where(keep, read, pad), dtype)

    def store(self, address: Any, value: Any, mask: Any, dtype: Dtype, where: str, shape: tuple[int, ...]) -> None:
        given = [as_address(address), to_memory(value, dtype)] + ([] if mask is None else [mask])
        _, (whole, stored, *masks) = self._spread(given, shape, always=True)
        count = len(self.orders)
        if not masks or bool(masks[0].all()):
            flat, cells = self._cells(whole.reshape(-1), dtype, where, "store")
            self._note(flat, self.orders, cells=cells.reshape(count, -1), data=stored.reshape(count, -1))
            return
        keep = masks[0]
        if bool(keep.any()):
            flat, cells = self._cells(whole[keep], dtype, where, "store")
            counts = keep.reshape(count, -1).sum(1).tolist()
            self._note(flat, self.orders, cells=cells, counts=counts, data=stored[keep])


def _flat(window: torch.Tensor) -> torch.Tensor:
    """The whole storage of a window, as one of its elements."""
    storage = window.untyped_storage()
    return window.as_strided((storage.nbytes() // window.element_size(),), (1,), 0)


# ---------------------------------------------------------------- one window
def _by_region(log: list[Access]) -> list[list[Access]]:
    regions: dict[int, list[Access]] = {}
    for access in log:
        regions.setdefault(access.flat.untyped_storage().data_ptr(), []).append(access)
    return list(regions.values())


def _disturbed(accesses: list[Access]) -> bool:
    """Whether a lane reads, in one region, what has been written before it in the order of blocks and steps."""
    reads, writes = [a for a in accesses if a.data is None], [a for a in accesses if a.data is not None]
    if not reads or not writes:
        return False
    flat = accesses[0].flat
    nbytes = flat.numel() * flat.element_size()
    if nbytes > _LARGEST_MAP or any(a.flat.element_size() != flat.element_size() for a in accesses):
        return True
    steps = max(a.seq for a in accesses) + 1
    first = torch.full((flat.numel(),), torch.iinfo(torch.int64).max)
    written = [(order * steps + a.seq, view, cells) for a in writes for order, _, view, cells in a.each(first)]
    for key, view, cells in sorted(written, key=lambda w: -w[0]):
        if cells is None:
            view.fill_(key)
        else:
            view[cells] = key
    return any(
        bool(((view if cells is None else view[cells]) < order * steps + a.seq).any())
        for a in reads
        for order, _, view, cells in a.each(first)
    )


def _write(writes: list[Access]) -> None:
    """Writes as if the blocks had run one after another, in one region."""
    bounds = sorted(b for a in writes for b in a.bounds())
    reach, last = -1, -1
    apart = True
    for low, high, order in bounds:
        apart &= low >= reach or order == last
        if high > reach:
            reach, last = high, order
    if apart:
        for access in writes:
            access.write()
        return
    single = [(order, a.seq, lane, a) for a in writes for lane, order in enumerate(a.orders)]
    parts = {id(a): (a.data.unbind(0) if a.cells is None else a.parts(a.data)) for a in writes}
    cells = {id(a): a.parts(a.cells) for a in writes if a.cells is not None}
    for _, _, lane, access in sorted(single, key=lambda s: s[:2]):
        data = parts[id(access)][lane]
        if access.windows is not None:
            access.windows[lane].copy_(data)
        else:
            access.flat[cells[id(access)][lane]] = data


class Batches:
    """Runs a launch's blocks in batches."""

    def __init__(self, program: Program, arguments: Any, memory: Memory, grid: Block) -> None:
        self.program, self.arguments, self.memory, self.grid = program, arguments, memory, grid
        self.lanes = min(_ELEMENTS // program.largest_tile, _MOST_LANES)

    def run(self, blocks: list[Block]) -> list[Block]:
        """Runs blocks from the start of the list; returns those that have to run one by one."""
        window, at = self.lanes, 0
        while self.program.batchable and min(len(blocks) - at, self.lanes) >= _FEWEST_LANES:
            chosen = blocks[at : at + window]
            try:
                log = self._run_window(chosen)
            except KernelFault:
                break  # if it is the kernel's, the block that does it will say so
            except (InterpreterError, Unbatchable):
                self.program.batchable = False
                break
            at += len(chosen)
            each = sum(a.bytes() for a in log) / len(chosen)
            window = max(self.lanes, min(int(_WINDOW_BYTES / (each + 1)), 1 << 16))
        return blocks[at:]

    def _run_window(self, blocks: list[Block]) -> list[Access]:
        """The accesses of the blocks, which have been written. Where it raises, nothing has."""
        ordered = sorted(range(len(blocks)), key=lambda i: blocks[i][::-1])
        pool: dict[Any, list[int]] = {(): ordered}
        budget = (1 + _RESTARTS) * len(blocks)
        log: list[Access] = []
        while pool:
            path, orders = pool.popitem()
            for start in range(0, len(orders), self.lanes):
                part = orders[start : start + self.lanes]
                budget -= len(part)
                if budget < 0:
                    raise Unbatchable
                try:
                    log += self._run_together([blocks[i] for i in part], part)
                except Diverged as parted:
                    for order, value in zip(part, parted.values, strict=True):
                        pool.setdefault((*path, (parted.decision, value)), []).append(order)
        regions = _by_region(log)
        if any(map(_disturbed, regions)):
            raise Unbatchable
        for accesses in regions:
            _write([a for a in accesses if a.data is not None])
        return log

    def _run_together(self, blocks: list[Block], orders: list[int]) -> list[Access]:
        memory = BatchMemory(self.memory, orders)
        bid = tuple(v[0] if len(set(v)) == 1 else torch.tensor(v) for v in zip(*blocks, strict=True))
        self.program.execute(BlockState(bid, self.grid, memory, self.arguments.lists, None), self.arguments.values)
        return memory.log
