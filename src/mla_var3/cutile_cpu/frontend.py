"""From a kernel and its arguments to a `Program`: cuTile's own front end, the signature it would get, the cache.

`cuda.tile` derives the signature of a launch in its C extension, which wants libcuda. Here the same facts are taken
from CPU tensors: data type, rank, which extents are 1 or multiples of 16, which strides are 1 or multiples of 16 bytes,
whether the address is a multiple of 16 bytes, whether elements share memory.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from mla_var3.cutile_cpu import hoisting
from mla_var3.cutile_cpu.errors import Misuse, TooLarge, WrongType, WrongValue
from mla_var3.cutile_cpu.machine import Program, compile_ir

#: Releases of cuda-tile, major.minor, whose operations the interpreter follows: they are not a stable interface.
CUDA_TILE_RELEASES = ("1.6", "1.7")

#: Compiled programs kept; a program holds its kernel, its closures and its constants.
CACHE_SIZE = 256

#: Ranks above TMA's are not specialised on extents and strides.
_TMA_RANK = 5

_CACHE: OrderedDict[Any, Program] = OrderedDict()
_LOCK = threading.Lock()


def check_version() -> None:
    """Raises `Misuse` when a release of cuda-tile is installed that is not in `CUDA_TILE_RELEASES`, or none."""
    oldest, newest = CUDA_TILE_RELEASES[0], CUDA_TILE_RELEASES[-1]
    try:
        import cuda.tile as ct
    except ImportError as missing:
        raise Misuse(
            f"The cuTile interpreter needs cuda-tile {oldest} to {newest}: pip install 'mla_var3[cutile-cpu]'."
        ) from missing
    if ct.__version__.rsplit(".", 1)[0] not in CUDA_TILE_RELEASES:
        raise Misuse(
            f"The cuTile interpreter is written for cuda-tile {oldest} to {newest} and this is {ct.__version__}: "
            f"pip install 'cuda-tile=={newest}.*', or run the kernel on a GPU."
        )


@dataclass(frozen=True)
class Argument:
    """One launch argument. key: what a program is specialised on. values: the flat run-time values."""

    constraint: Any
    key: Any
    values: tuple[Any, ...]


@dataclass
class Arguments:
    """All arguments of a launch. tensors: (tensor, name) that the kernel may touch. lists: list tables by address."""

    constraints: list[Any]
    key: tuple[Any, ...]
    values: list[Any]
    tensors: list[tuple[Any, str]]
    lists: dict[int, Any]


# ---------------------------------------------------------------- arguments
def _disjoint(shape: Sequence[int], strides: Sequence[int]) -> bool:
    pairs = sorted(zip(strides, shape, strict=True))
    if not pairs:
        return True
    return pairs[0][0] > 0 and all(b[0] > 0 and b[0] >= a[0] * a[1] for a, b in pairwise(pairs))


def _picked(dims: Sequence[int], values: Sequence[int], name: str) -> dict[int, int]:
    out = {}
    for dim in dims:
        if not -len(values) <= dim < len(values):
            raise WrongValue(f"{name} has a static dimension {dim}, but {len(values)} dimensions.")
        out[dim % len(values)] = values[dim]
    return out


def _check_memory(t: Any, name: str) -> None:
    """Raises where a tensor has no elements in the CPU's memory, one after another by strides, that could be read."""
    import torch

    if t.device.type != "cpu":
        why = "has no memory" if t.is_meta else "is not in the CPU's memory"
        raise WrongValue(f"{name} is on {t.device} and {why}: the cuTile interpreter runs on CPU tensors.")
    if t.layout != torch.strided:
        raise WrongType(f"{name} has the layout {t.layout}: give a dense tensor (`to_dense()`).")
    if t.is_neg():
        raise WrongType(f"{name} is stored with the sign turned: give `{name}.resolve_neg()`.")


def _array(tensors: Sequence[Any], annotation: Any, name: str) -> tuple[Any, Any]:
    """(constraint, key) of an array argument, or of all arrays of a list together."""
    from cuda.tile import int32
    from cuda.tile._ir.typing_support import to_dtype
    from cuda.tile.compilation import ArrayConstraint

    first = tensors[0]
    for t in tensors:
        _check_memory(t, name)
        if t.dtype != first.dtype or t.dim() != first.dim():
            raise WrongType(f"{name}: the arrays of a list have one data type and one rank.")
    try:
        dtype = to_dtype(first.dtype)
    except TypeError:
        raise WrongType(f"{name} is {first.dtype}, which cuTile has no data type for.") from None
    index_dtype = int32 if annotation is None else annotation.index_dtype
    static_shape = () if annotation is None else annotation.static_shape_dims
    static_strides = () if annotation is None else annotation.static_stride_dims
    rank, bits = first.dim(), dtype.bitwidth
    limit = 2 ** (index_dtype.bitwidth - 1)
    facts: list[list[Any]] = []
    for t in tensors:
        shape, strides = tuple(t.shape), tuple(t.stride())
        if any(v >= limit for v in (*shape, *strides)):
            raise TooLarge(f"{name} has a shape or stride beyond 32 bits: annotate it with ct.IndexedWithInt64.")
        small = rank <= _TMA_RANK
        facts.append(
            [
                tuple(small and n == 1 and not static_shape for n in shape),
                tuple(small and s == 1 and not static_strides for s in strides),
                tuple(small and n % 16 == 0 for n in shape),
                tuple(small and s * bits % 128 == 0 for s in strides),
                t.data_ptr() % 16 == 0,
                _disjoint(shape, strides),
                _picked(static_shape, shape, name),
                _picked(static_strides, strides, name),
            ]
        )
    if any(f[6:] != facts[0][6:] for f in facts):
        raise WrongValue(f"{name}: the arrays of a list differ in a static dimension.")
    ones, unit, by16, bytes16 = (
        tuple(all(column) for column in zip(*(f[i] for f in facts), strict=True)) for i in range(4)
    )
    aligned, disjoint = all(f[4] for f in facts), all(f[5] for f in facts)
    known_shape, known_strides = facts[0][6], facts[0][7]
    divisor = 128 // bits if 128 % bits == 0 else 1
    constraint = ArrayConstraint(
        dtype,
        rank,
        index_dtype=index_dtype,
        stride_lower_bound_incl=0,
        alias_groups=(),
        may_alias_internally=not disjoint,
        stride_constant=[known_strides.get(i, 1 if unit[i] else None) for i in range(rank)],
        shape_constant=[known_shape.get(i, 1 if ones[i] else None) for i in range(rank)],
        stride_divisible_by=[divisor if b else 1 for b in bytes16],
        shape_divisible_by=[16 if b else 1 for b in by16],
        base_addr_divisible_by=16 if aligned else 1,
    )
    key = ("array", first.dtype, rank, index_dtype.bitwidth, ones, unit, by16, bytes16, aligned, disjoint)
    return constraint, (*key, tuple(known_shape.items()), tuple(known_strides.items()))


def _words(tensor: Any) -> tuple[int, ...]:
    return (tensor.data_ptr(), *tensor.shape, *tensor.stride())


def _describe(value: Any, node: Any, name: str, into: Arguments) -> Argument:
    import torch
    from cuda.tile import bool_, float32, int32
    from cuda.tile.compilation import ListConstraint, ScalarConstraint, TupleConstraint
    from cuda.tile.compilation._signature import ConstantConstraint

    if type(value) is tuple:
        items = getattr(node, "items", None)
        each = getattr(node, "each", None)
        if items is not None and len(items) != len(value):
            raise WrongType(f"{name} has {len(value)} items, and its annotation {len(items)}.")
        parts = [
            _describe(v, items[i] if items is not None else each if each is not None else node, f"{name}[{i}]", into)
            for i, v in enumerate(value)
        ]
        values = tuple(v for p in parts for v in p.values)
        return Argument(TupleConstraint([p.constraint for p in parts]), ("tuple", *(p.key for p in parts)), values)
    if node.KIND != "leaf":
        raise WrongType(f"{name} is annotated as a tuple: pass one, not {type(value).__name__}.")
    if node.constant:
        try:
            return Argument(ConstantConstraint(value), ("constant", type(value), repr(value)), ())
        except TypeError as error:
            raise WrongType(f"{name} cannot be a constant: {error}.") from None
    if isinstance(value, bool):
        return Argument(ScalarConstraint(bool_), "bool", (value,))
    if isinstance(value, int):
        dtype = int32 if node.scalar is None else node.scalar.dtype
        if not -(1 << (dtype.bitwidth - 1)) <= value < 1 << (dtype.bitwidth - 1):
            raise TooLarge(f"{name} = {value} does not fit {dtype}: annotate it with ct.ScalarInt64.")
        return Argument(ScalarConstraint(dtype), ("int", dtype.bitwidth), (value,))
    if isinstance(value, float):
        return Argument(ScalarConstraint(float32), "float", (torch.tensor(value, dtype=torch.float32),))
    if isinstance(value, list):
        if not value:
            raise WrongType(f"{name} is an empty list, which cuTile does not take.")
        if not all(isinstance(t, torch.Tensor) for t in value):
            raise WrongType(f"{name} has items that are not arrays.")
        constraint, key = _array(value, None if node.list is None else node.list.element, name)
        into.tensors += [(t.detach(), f"{name}[{i}]") for i, t in enumerate(value)]
        # The table has an address of its own, as on the GPU; nothing else lives there.
        table = tuple(_words(t) for t in value)
        address = id(table)
        into.lists[address] = table
        whole = ListConstraint(constraint, alias_groups=(), elements_may_alias=True)
        return Argument(whole, ("list", key), (address, len(value)))
    if not isinstance(value, torch.Tensor) and hasattr(value, "__dlpack__"):
        value = torch.from_dlpack(value)
    if isinstance(value, torch.Tensor):
        constraint, key = _array([value], node.array, name)
        into.tensors.append((value.detach(), name))
        return Argument(constraint, key, _words(value))
    raise WrongType(f"{name} is a {type(value).__name__}, which is no argument of a cuTile kernel.")


def annotated(kernel: Any) -> Any:
    """The annotated function of a `@ct.kernel` object."""
    function = getattr(kernel, "_annotated_function", None)
    if function is None:
        raise WrongType(f"{kernel!r} is not a cuTile kernel: decorate the function with @ct.kernel.")
    return function


def describe_arguments(kernel: Any, args: Sequence[Any]) -> Arguments:
    """What a launch of `kernel` with `args` is specialised on, and its flat run-time values."""
    function = annotated(kernel)
    names = tuple(function.pysig.parameters)
    if len(args) != len(names):
        raise WrongType(
            f"{function.pyfunc.__name__} takes {len(names)} arguments ({', '.join(names)}), not {len(args)}."
        )
    into = Arguments([], (), [], [], {})
    keys = []
    for value, node, name in zip(args, function.parameter_annotations, names, strict=True):
        described = _describe(value, node, name, into)
        into.constraints.append(described.constraint)
        into.values += described.values
        keys.append(described.key)
    into.key = tuple(keys)
    return into


# ---------------------------------------------------------------- the front end
def final_ir(kernel: Any, constraints: Sequence[Any], arch: str | None = None) -> Any:
    """The final IR (a `cuda.tile._ir.ir.Block`) of a kernel for parameter constraints. Errors are cuTile's own; with an
    architecture (`sm_90`) also those for data types that it lacks."""
    from cuda.tile._bytecode.version import BytecodeVersion
    from cuda.tile._compile import compile_tile
    from cuda.tile._passes.ast2hir import get_function_hir
    from cuda.tile.compilation import CallingConvention, KernelSignature

    function = annotated(kernel)
    # It keeps what it read of a function, with the globals of that moment.
    get_function_hir.cache_clear()
    # A symbol and a version are given because cuTile would otherwise mangle a name, and ask tileiras for its version.
    signature = KernelSignature(constraints, CallingConvention.cutile_python_v2(), symbol=function.pyfunc.__name__)
    with hoisting.marked():
        result = compile_tile(
            function,
            [signature],
            sm_arch=arch,
            bytecode_version=BytecodeVersion.V_13_4,
            return_final_ir=True,
            return_bytecode=False,
            return_cubin=False,
        )
    (block,) = result.final_ir
    return block


def program(kernel: Any, arguments: Arguments, arch: str | None = None) -> Program:
    """The program of a kernel for these arguments; made once for arguments with equal keys.

    As in cuTile it belongs to the kernel object: one that is made anew from the same function sees what the function's
    globals and closure hold by then.
    """
    function = annotated(kernel)
    key = (kernel, arch, arguments.key)
    with _LOCK:
        found = _CACHE.get(key)
        if found is not None:
            _CACHE.move_to_end(key)
            return found
    made = compile_ir(final_ir(kernel, arguments.constraints, arch), function.pyfunc.__name__)
    with _LOCK:
        _CACHE[key] = made
        while len(_CACHE) > CACHE_SIZE:
            _CACHE.popitem(last=False)
    return made
