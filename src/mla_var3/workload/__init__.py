"""What is computed, without tensors or tilings: one file a workload, found by walking this folder.

A file has the problem (a frozen dataclass), its FLOPs and bytes, how inputs are made, the oracle, the cases that break
kernels and the error bounds, and ends with `WORKLOAD = Workload(...)`. A kernel's plan names its workload; checking,
timing and records go through it, so that a new file is all that a new workload takes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pkgutil
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, ClassVar, NamedTuple, Protocol, Self

from mla_var3.errors import UserError, nearest

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
#: Dtypes of problems, as torch calls them.
TORCH_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

#: The workload of a record whose problem names none: the first one there was.
DEFAULT = "decode"


class Rows(NamedTuple):
    """Rows with gaps between them. bytes: of all rows. width: bytes of a row. pitch: from one row's start to the
    next's."""

    bytes: int
    width: int
    pitch: int


@dataclass(frozen=True)
class Cost:
    """The least work and traffic of a problem.

    flops: floating-point operations of the matrix products (a multiply-add is 2), or of all where there are none.
    bytes: device memory traffic when every input is read once and every output written once.
    pairs: of attention, (query token, cached token) pairs that attend, over all requests, for one head.
    written: those of the bytes that are written, where they are so many that a copy is the limit, and not a kernel that
    only reads.
    rows: of those written, the ones in rows with gaps between them, which no copy writes as fast as bytes in order.
    """

    flops: int
    bytes: int
    pairs: int = 0
    written: int = 0
    rows: Rows | None = None

    @property
    def intensity(self) -> float:
        """FLOPs per byte; infinite when nothing moves."""
        return self.flops / self.bytes if self.bytes else math.inf


class ProblemClass(Protocol):
    """What a compiled kernel is specialised on; hashable."""

    def key(self) -> str:
        """A short file-name-safe string, equal exactly for equal classes."""
        ...


class Problem(ABC):
    """One instance of a workload: a frozen dataclass of plain values, so that problems are hashable.

    A subclass names its workload, and raises `UserError`, naming the field, when the values make no sense.
    """

    workload: ClassVar[str]
    layer: ClassVar[str] = "mla"  # of the versions that compute it
    dtype: str

    @property
    @abstractmethod
    def label(self) -> str:
        """Short name for tables and folders, such as b128_s1_h128_t4096."""

    @abstractmethod
    def problem_class(self) -> ProblemClass:
        """What compiled code depends on; problems of one class share kernels."""

    @abstractmethod
    def cost(self) -> Cost:
        """FLOPs and minimal bytes of one call."""

    @abstractmethod
    def input_bytes(self) -> int:
        """Device memory of one input set with its outputs."""

    @abstractmethod
    def output_bytes(self) -> int:
        """Device memory of the outputs alone."""

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def torch_dtype(self) -> Any:
        import torch

        return getattr(torch, TORCH_DTYPES[self.dtype])

    def replace(self, **changes: Any) -> Self:
        """A copy with other fields."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    def to_record(self) -> dict[str, Any]:
        """The JSON form that records hold; it names every workload but `DEFAULT`."""
        named = {} if self.workload == DEFAULT else {"workload": self.workload}
        # Fields are numbers, strings and tuples of them: nothing to copy deeply, which takes ten times as long.
        return {**named, **{name: getattr(self, name) for name in self.fields()}}

    @classmethod
    def from_record(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of `to_record`; an unknown field is a `UserError` that names the nearest."""
        names = cls.fields()
        for key in data:
            if key not in names and key != "workload":
                raise UserError(f"problem has no field {key!r}: {nearest(str(key), names)}.")
        return cls(**{name: value for name, value in data.items() if name != "workload"})

    @classmethod
    @functools.cache  # a report asks for them a hundred thousand times
    def fields(cls) -> tuple[str, ...]:
        """Names of the fields, in order."""
        return tuple(f.name for f in dataclasses.fields(cls))  # type: ignore[arg-type]


#: Lengths, strides and grids are 32-bit on the device, and the host walks through requests and query tokens.
MOST, MOST_LISTED = (1 << 31) - 1, 1 << 20


def check_integer(name: str, value: Any, low: int, most: int = MOST) -> None:
    """Raises `UserError` when a problem's field is no whole number from `low` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise UserError(f"problem.{name} = {value!r} is not an integer: use a whole number of at least {low}.")
    if value < low:
        raise UserError(f"problem.{name} = {value} is too small: use at least {low}.")
    if value > most:
        raise UserError(f"problem.{name} = {value} is too large: use at most {most:,}.")


def check_seed(name: str, seed: int) -> None:
    """Raises `UserError` for a seed that no generator of random numbers takes. name: how the user gives it."""
    if not 0 <= seed < 1 << 62:
        raise UserError(f"{name} {seed} is no seed: use a whole number from 0 to {(1 << 62) - 1}.")


def check_dtype(dtype: Any) -> None:
    """Raises `UserError` for a dtype that no workload has."""
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise UserError(f"problem.dtype = {dtype!r} is unknown: {nearest(str(dtype), DTYPE_BYTES)}.")


def check_scale(scale: Any) -> None:
    """Raises `UserError` for a factor on q·k that is neither a finite number nor None, which stands for the default."""
    number = isinstance(scale, int | float) and not isinstance(scale, bool)
    if scale is not None and not (number and math.isfinite(scale)):
        raise UserError(f"problem.softmax_scale = {scale!r} is no finite number: use for example 0.1.")


def check_bound(name: str, tensor: Any, shape: tuple[int, ...], dtype: str) -> None:
    """Raises `UserError` when a tensor that a kernel is to be bound to has another shape or dtype. dtype: of a problem,
    or torch's name of one."""
    import torch

    if tuple(tensor.shape) != shape:
        raise UserError(f"cannot bind: {name} is {tuple(tensor.shape)}, and this kernel wants {shape}.")
    if tensor.dtype != getattr(torch, TORCH_DTYPES.get(dtype, dtype)):
        raise UserError(f"cannot bind: {name} is {tensor.dtype}, and this kernel was planned for {dtype}.")


# ---------------------------------------------------------------- judging
#: Columns of a row from which on `Bound.row_cos` holds as it stands.
FULL_ROW = 128


@dataclass(frozen=True)
class Output:
    """One output. axes: names of its dimensions. dtype: float32, or None for the problem's own. rows: whether the last
    axis is a vector whose direction is judged (cosine difference), and its error is relative; else it is absolute.
    partial: only some of it is written: where the reference is NaN, a call must leave what was there. bits: it
    may be of integers, the bits of values, whose reference is the same numbers. unordered: what its last axis holds is
    a set, in any order, but for negative numbers, which stand where the reference has them."""

    name: str
    axes: tuple[str, ...]
    dtype: str | None = None
    rows: bool = True
    partial: bool = False
    bits: bool = False
    unordered: bool = False


@dataclass(frozen=True)
class Bound:
    """What an output's error may be at most; an element passes with either its absolute or its relative error.

    cos: cosine difference, 1 - cos, of the whole output. row_cos: of its worst row. Infinite where it is not judged.
    ulps: what rounding to the output's dtype may add to either error, in epsilons of the dtype times the reference.
    row_mean: cosine difference of a row in the mean, where row_cos is wider for rows of few columns; 0 where it is not.
    """

    abs: float
    rel: float
    cos: float = math.inf
    row_cos: float = math.inf
    ulps: float = 0.0
    row_mean: float = 0.0

    def of_row(self, columns: int) -> float:
        """`row_cos` of a row of so many columns, as the docstring of `mla_var3.workload.decode` derives it."""
        if not self.row_mean or columns >= FULL_ROW:
            return self.row_cos
        return float(self.row_mean * (self.row_cos / self.row_mean) ** math.sqrt(FULL_ROW / columns))


@dataclass(frozen=True)
class Case:
    """One case of the check. dist: distribution of the inputs.

    planned: planned anew, not bound to the first case's kernel. then: a problem whose inputs are written into the same
    tensors after a first call, and judged. alter: changes a set of inputs before it is used; None from it leaves the
    case out (memory is short). gpu: left out on a CPU, unless it is asked for by its name.
    """

    name: str
    problem: Any
    dist: str
    planned: bool = False
    then: Any = None
    alter: Callable[[tuple[Any, ...]], tuple[Any, ...] | None] | None = None
    gpu: bool = False


@dataclass(frozen=True)
class Workload:
    """Everything that is known of a workload beside its kernels.

    make_inputs(problem, device, *, seed, dist, **options): fresh random inputs. reference(problem, *inputs): the
    oracle, outputs in higher precision. cases(problem, on_gpu): what the check runs, "own" (the problem itself) first;
    names and purposes are in `case_names`, those of a quick check in `quick`. bounds(dist): by output.
    rebound(problem, *inputs): the problem that other tensors of the same class have; raises `UserError` for a tensor
    that does not fit. as_bound(problem): what it makes of the problem's own inputs, by default the problem itself.
    small(problem): like it, and done in seconds on a CPU. sample(small, given): fields of a problem of which a user
    gave only these. variants: fields, tried in turn, that replace the default ones where a version does not take the
    default problem. draw(rng): fields of a problem that somebody may have, at random. updates: places of inputs that a
    call writes into, where they hold NaN and nowhere else.
    """

    name: str
    problem: type[Any]
    outputs: tuple[Output, ...]
    make_inputs: Callable[..., tuple[Any, ...]]
    reference: Callable[..., tuple[Any, ...]]
    cases: Callable[[Any, bool], Iterable[Case]]
    case_names: Mapping[str, str]
    quick: tuple[str, ...]
    bounds: Callable[[str], Mapping[str, Bound]]
    rebound: Callable[..., Any]
    small: Callable[[Any], Any]
    sample: Callable[[bool, Mapping[str, Any]], dict[str, Any]]
    as_bound: Callable[[Any], Any] = lambda problem: problem
    variants: tuple[Mapping[str, Any], ...] = ()
    draw: Callable[[random.Random], dict[str, Any]] | None = None
    updates: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if lacks := sorted(getattr(self.problem, "__abstractmethods__", ())):
            raise UserError(
                f"{self.problem.__name__} of workload {self.name} lacks {', '.join(lacks)}: the methods of "
                "mla_var3.workload.Problem say what each of them returns, and docs/new.md has an example."
            )

    def case_problems(self, problem: Any) -> list[Any]:
        """The problems that the check plans or binds on a GPU for this one, each once, itself first."""
        return list(dict.fromkeys(case.problem for case in self.cases(problem, True)))


# ---------------------------------------------------------------- finding
@cache
def names() -> tuple[str, ...]:
    """Names of the workloads here: the files of this folder."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


@cache
def get(name: str) -> Workload:
    """A workload by its name; a `UserError` names the nearest."""
    if name not in names():
        raise UserError(f"workload {name!r} is unknown: {nearest(name, names())}.")
    found: Workload = import_module(f"{__name__}.{name}").WORKLOAD
    return found


def problem_from_record(data: Mapping[str, Any]) -> Any:
    """The problem that a record holds, of the workload that it names."""
    return get(str(data.get("workload", DEFAULT))).problem.from_record(data)
