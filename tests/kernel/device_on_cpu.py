"""The functions of the split_kv room with the code that the kernels trace, running on plain Python integers.

`Room` copies the modules `scheduler`, `rows`, `partials`, `combine` and `walk`. Each function keeps its code object,
which is what `@cute.jit` has wrapped, and gets a module in which `cutlass`, `cute` and `Int32` mean what they do on the
device. The modules themselves stay as they are, and a test may plant a fault in a copy (`Room.replace`).

A warp is 32 greenlets, a lane each. A lane runs until it needs the others (a vote, a shuffle, a barrier), and goes on
when all of them have come to the same operation; lanes that come to different ones are an error. Memory has bounds, and
what is read or written outside them is an error too, as is an `Int32` of more than 32 bits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from greenlet import getcurrent, greenlet

from mla_var3.kernel.cute_python.split_kv import combine, partials, rows, scheduler, walk

WARP = 32


# ------------------------------------------------------------------------------------------------ numbers
def int32(value: Any = 0) -> int:
    """A number as the device's Int32 has it; Python's own integers do not wrap, so that one beyond is an error."""
    number = int(value)
    if not -(1 << 31) <= number < 1 << 31:
        raise OverflowError(f"{number} takes more than 32 bits")
    return number


def signed(word: int) -> int:
    """32 bits as a signed number."""
    return (word & 0xFFFFFFFF) - ((word & 0x80000000) << 1)


class Word(int):
    """An integer whose sums, differences and products may not leave 32 bits. A remainder by zero has no value on the
    device; here it has that of `by_zero`."""

    by_zero = -1

    def __add__(self, other: int) -> Word:
        return Word(int32(int(self) + int(other)))

    def __sub__(self, other: int) -> Word:
        return Word(int32(int(self) - int(other)))

    def __rsub__(self, other: int) -> Word:
        return Word(int32(int(other) - int(self)))

    def __mul__(self, other: int) -> Word:
        return Word(int32(int(self) * int(other)))

    def __floordiv__(self, other: int) -> Word:
        return Word(int(self) // int(other))

    def __mod__(self, other: int) -> Word:
        return Word(int(self) % int(other) if other else self.by_zero)

    __radd__, __rmul__ = __add__, __mul__


# ------------------------------------------------------------------------------------------------ memory
@dataclass(frozen=True)
class Pointer:
    """A place in a list of words."""

    memory: list[Any]
    offset: int = 0

    def __add__(self, words: int) -> Pointer:
        return Pointer(self.memory, self.offset + words)

    def load(self) -> Any:
        if not 0 <= self.offset < len(self.memory):
            raise IndexError(f"read of word {self.offset} of {len(self.memory)}")
        return self.memory[self.offset]

    def store(self, value: Any) -> None:
        if not 0 <= self.offset < len(self.memory):
            raise IndexError(f"write of word {self.offset} of {len(self.memory)}")
        self.memory[self.offset] = value


@dataclass(frozen=True)
class Layout:
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Tensor:
    """A view of memory; an index that is None keeps its mode."""

    def __init__(self, iterator: Pointer, layout: Layout) -> None:
        self.iterator, self.layout = iterator, layout

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    def at(self, index: Any) -> Pointer | Tensor:
        indices = index if isinstance(index, tuple) else (index,)
        if len(indices) < len(self.shape):  # one number over several modes: the first one fastest
            flat, indices = indices[0], ()
            for size in self.shape:
                indices, flat = (*indices, flat % size), flat // size
        place, shape, stride = self.iterator, [], []
        for i, size, step in zip(indices, self.layout.shape, self.layout.stride, strict=True):
            if i is None:
                shape.append(size)
                stride.append(step)
                continue
            if not 0 <= i < size:
                raise IndexError(f"index {i} of a mode of {size}")
            place = place + int(i) * step
        return Tensor(place, Layout(tuple(shape), tuple(stride))) if shape else place

    def __getitem__(self, index: Any) -> Any:
        found = self.at(index)
        return found.load() if isinstance(found, Pointer) else found

    def __setitem__(self, index: Any, value: Any) -> None:
        found = self.at(index)
        assert isinstance(found, Pointer)
        found.store(value)

    def fill(self, value: Any) -> None:
        for i in range(size_of(self)):
            self[i] = value

    def values(self) -> list[Any]:
        return [self[i] for i in range(size_of(self))]


def size_of(tensor: Tensor) -> int:
    return int(np.prod(tensor.shape))


def make_layout(shape: Any, stride: Any = None) -> Layout:
    sizes = shape if isinstance(shape, tuple) else (shape,)
    if stride is None:
        stride, step = [], 1
        for size in sizes:
            stride.append(step)
            step *= size
    return Layout(sizes, tuple(stride) if isinstance(stride, (tuple, list)) else (stride,))


def make_tensor(iterator: Pointer, layout: Layout) -> Tensor:
    return Tensor(iterator, layout)


def make_registers(shape: Any, _: Any = None) -> Tensor:
    layout = make_layout(shape)
    return Tensor(Pointer([0] * int(np.prod(layout.shape))), layout)


def of_values(values: Sequence[int]) -> Tensor:
    """A tensor in memory of its own."""
    return Tensor(Pointer(list(values)), make_layout(len(values)))


def autovec_copy(source: Tensor, target: Tensor) -> None:
    assert size_of(source) == size_of(target)
    for i in range(size_of(source)):
        target[i] = source[i]


# ------------------------------------------------------------------------------------------------ warps
class Lane(greenlet):
    """A thread of a CTA. shared: the CTA's shared memory, an array each allocation."""

    thread: int
    shared: list[list[int]]


def meet(*said: Any) -> Any:
    """Stops this thread until the others of the warp, or of the CTA, have come to the same operation."""
    return getcurrent().parent.switch(said)


def shuffled(kind: str, said: list[tuple[Any, ...]]) -> list[Any]:
    """What each lane of a warp gets of an operation that all of them have come to."""
    values = [words[0] for words in said]
    if kind == "any":
        return [any(values)] * WARP
    if kind == "ballot":
        return [signed(sum(1 << i for i, value in enumerate(values) if value))] * WARP
    if kind == "redux":
        return [{"add": sum, "max": max}[said[0][1]](values)] * WARP
    if kind == "up":
        return [values[i - words[1] if i >= words[1] else i] for i, words in enumerate(said)]
    assert kind == "shuffle", kind
    return [values[words[1] % WARP] for words in said]


def run_cta(work: Callable[[], Any], threads: int = WARP) -> list[Any]:
    """What each thread of a CTA returns."""
    lanes, shared = [Lane(work) for _ in range(threads)], list[list[int]]()
    for i, lane in enumerate(lanes):
        lane.thread, lane.shared = i, shared
    at = [lane.switch() for lane in lanes]
    while not all(lane.dead for lane in lanes):
        moved = False
        for first in range(0, threads, WARP):
            warp = range(first, first + WARP)
            alive = [i for i in warp if not lanes[i].dead]
            if not alive or at[alive[0]][0] == "cta":
                continue
            kinds = {"ended" if lanes[i].dead else at[i][0] for i in warp}
            assert len(kinds) == 1, f"the lanes of a warp have come apart: {sorted(kinds)}"
            kind, said = at[first][0], [at[i][1:] for i in warp]
            for i, result in zip(warp, shuffled(kind, said), strict=True):
                at[i] = lanes[i].switch(result)
            moved = True
        if not moved:
            assert all(not lane.dead and at[i][0] == "cta" for i, lane in enumerate(lanes)), "a barrier without all"
            at = [lane.switch() for lane in lanes]
    return at


# ------------------------------------------------------------------------------------------------ cutlass and cute
class Allocator:
    """Shared memory of the CTA that runs: what its threads allocate in the same order is the same."""

    def __init__(self) -> None:
        self.shared, self.next = getcurrent().shared, 0

    def allocate_tensor(self, _: Any, layout: Layout, __: int = 0) -> Tensor:
        if self.next == len(self.shared):
            self.shared.append([0] * int(np.prod(layout.shape)))
        self.next += 1
        return Tensor(Pointer(self.shared[self.next - 1]), layout)


def counted(*bounds: int, unroll: int = 1) -> range:
    return range(*(int(bound) for bound in bounds))


def cutlass_on_cpu() -> SimpleNamespace:
    return SimpleNamespace(
        max=max,
        min=min,
        select_=lambda condition, then, otherwise: then if condition else otherwise,
        const_expr=lambda value: value,
        range=counted,
        range_constexpr=range,
    )


def cute_on_cpu(ulps: int = 0) -> SimpleNamespace:
    """ulps: how far the device's approximate reciprocal is off."""

    def reciprocal(value: Any) -> Any:
        exact = np.float32(1) / np.float32(value)
        return np.nextafter(exact, np.float32(np.inf) * np.sign(ulps)) if ulps else exact

    arch = SimpleNamespace(
        lane_idx=lambda: getcurrent().thread % WARP,
        thread_idx=lambda: (getcurrent().thread, 0, 0),
        make_warp_uniform=lambda value: value,
        vote_any_sync=lambda value: meet("any", bool(value)),
        vote_ballot_sync=lambda value: meet("ballot", bool(value)),
        warp_redux_sync=lambda value, kind: meet("redux", value, kind),
        shuffle_sync_up=lambda value, offset: meet("up", value, offset),
        shuffle_sync=lambda value, source: meet("shuffle", value, source),
        sync_threads=lambda: meet("cta"),
        clz=lambda word: 32 - (word & 0xFFFFFFFF).bit_length(),
        popc=lambda word: (word & 0xFFFFFFFF).bit_count(),
        rcp_approx=reciprocal,
    )
    return SimpleNamespace(
        arch=arch,
        size=size_of,
        assume=lambda value, divby: value,
        make_layout=make_layout,
        make_tensor=make_tensor,
        make_rmem_tensor=make_registers,
        autovec_copy=autovec_copy,
    )


# ------------------------------------------------------------------------------------------------ the room's functions
ON_CPU = {
    "Int32": int32,
    "Int64": int,
    "Boolean": bool,
    "Float32": np.float32,
    "SmemAllocator": Allocator,
    "launch_dependents": lambda: None,
    "grid_wait": lambda: None,
}


def index_of_words(index: int, count: int) -> scheduler.SplitIndex:
    return scheduler.SplitIndex(Word(index), Word(count))


class Room:
    """Copies of the room's modules, as attributes. ulps: of the approximate reciprocal."""

    def __init__(self, ulps: int = 0) -> None:
        self.copies: dict[str, ModuleType] = {}
        by_original: dict[Any, Any] = {}
        originals = {"scheduler": scheduler, "rows": rows, "partials": partials, "combine": combine, "walk": walk}
        for name, module in originals.items():
            made = self.copies[name] = ModuleType(f"{module.__name__} on a CPU")
            by_original[module] = made
            vars(made).update(vars(module))
            for value in vars(module).values():
                if getattr(value, "__module__", None) != module.__name__:
                    continue
                if inspect.isclass(value):
                    by_original[value] = self._class(value, made)
                elif callable(value):
                    by_original[value] = self._function(value, made)
        for made in self.copies.values():
            for key, value in list(vars(made).items()):
                if isinstance(value, (FunctionType, type, ModuleType)) and value in by_original:
                    setattr(made, key, by_original[value])
            vars(made).update(ON_CPU, cutlass=cutlass_on_cpu(), cute=cute_on_cpu(ulps))
        # `takes_last` computes a remainder by zero of a request's last split, and then does not use it.
        vars(self.copies["scheduler"]).update(SplitIndex=index_of_words)
        self.scheduler: Any = self.copies["scheduler"]
        self.rows: Any = self.copies["rows"]
        self.partials: Any = self.copies["partials"]
        self.combine: Any = self.copies["combine"]
        self.walk: Any = self.copies["walk"]

    @staticmethod
    def _function(value: Any, made: ModuleType) -> FunctionType:
        plain = inspect.unwrap(value)
        copy = FunctionType(plain.__code__, vars(made), plain.__name__, plain.__defaults__, plain.__closure__)
        copy.__kwdefaults__ = plain.__kwdefaults__
        return copy

    @classmethod
    def _class(cls, value: type, made: ModuleType) -> type:
        """A class of the same fields, whose methods see the copied module."""
        own = {
            key: cls._function(method, made)
            for key, method in vars(value).items()
            if callable(method) and not key.startswith("_") and method.__module__ == value.__module__
        }
        return type(value.__name__, (value,), {"__module__": made.__name__, **own}) if own else value

    @contextmanager
    def replace(self, module: str, **others: Any) -> Iterator[None]:
        """Other functions for a while, in all copies that have the ones of this module."""
        before = [(made, dict(vars(made))) for made in self.copies.values()]
        for name, other in others.items():
            old = getattr(self.copies[module], name)
            for made in self.copies.values():
                if vars(made).get(name) is old:
                    setattr(made, name, other)
        try:
            yield
        finally:
            for made, names in before:
                vars(made).update(names)
