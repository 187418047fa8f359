"""What cuTile's compiler refuses though cuda-tile's front end makes IR of it: small programs, and the table of it.

    python tests/cutile_cpu/refusals.py

compiles every program, and writes the table and the names of the refused programs. It needs cuda-tile 1.7 with its
tileiras and no GPU. A program is compiled for the oldest GPU that has its data types:
sm_90, and sm_100 for float8_e8m0fnu. An operation is written down as refused when it is the only one of a refused
program that no accepted program has. A refused program of which nothing, or more than one operation, can be blamed
ends the script: it needs a smaller program beside it, or the table needs a finer key.
"""

# ruff: noqa: E402 - the imports below need the path
from __future__ import annotations

import itertools
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent.parent / "src")]

import cuda.tile as ct
import torch

from mla_var3.cutile_cpu import frontend
from mla_var3.cutile_cpu.unsupported import Use, use_of

TABLE = HERE.parent.parent / "src" / "mla_var3" / "cutile_cpu" / "refused.py"
#: Names of the programs of which the front end makes IR and that the compiler refuses, one a line.
PROGRAMS = HERE / "refused_programs.txt"

SMALL = ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")
FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
ALL = (*SMALL, *FLOATS, *INTEGERS, "bool")


@dataclass(frozen=True)
class Probe:
    """One program. inputs(): the arguments of its launch, over a grid of one block."""

    name: str
    kernel: Any
    inputs: Callable[[], list[torch.Tensor]]
    arch: str


def _arch(*dtypes: str) -> str:
    return "sm_100" if "float8_e8m0fnu" in dtypes else "sm_90"


def _ones(dtype: str, *shape: int) -> torch.Tensor:
    return torch.ones(shape).to(getattr(torch, dtype))


def _tensors(*wanted: tuple[Any, ...]) -> Callable[[], list[torch.Tensor]]:
    """What makes the arguments of a launch: (data type, extents) of each."""
    return lambda: [_ones(dtype, *shape) for dtype, *shape in wanted]


# ---------------------------------------------------------------- kernels
def _unary(fn: Callable[..., Any]) -> Any:
    @ct.kernel
    def unary(x, out):
        ct.store(out, (0,), ct.astype(fn(ct.load(x, (0,), (8,))), ct.float32))

    return unary


def _to_scalar(fn: Callable[..., Any]) -> Any:
    @ct.kernel
    def reduced(x, out):
        ct.store(out, (0,), ct.full((8,), ct.astype(fn(ct.load(x, (0,), (8,))), ct.float32), ct.float32))

    return reduced


def _binary(fn: Callable[..., Any]) -> Any:
    @ct.kernel
    def binary(x, y, out):
        ct.store(out, (0,), ct.astype(fn(ct.load(x, (0,), (8,)), ct.load(y, (0,), (8,))), ct.float32))

    return binary


def _load(mode: Any) -> Any:
    @ct.kernel
    def load(x, out):
        ct.store(out, (0, 0), ct.astype(ct.load(x, (0, 0), (8, 16), padding_mode=mode), ct.float32))

    return load


def _load_by_pointer(mode: Any) -> Any:
    @ct.kernel
    def load_by_pointer(x, out):
        tile = ct.load(x, (0, 0), (8, 16), padding_mode=mode, allow_tma=False)
        ct.store(out, (0, 0), ct.astype(tile, ct.float32))

    return load_by_pointer


def _load_steps(mode: Any) -> Any:
    @ct.kernel
    def load_steps(x, out):
        view = x.tiled_view((8, 16), traversal_steps=(4, 16), padding_mode=mode)
        ct.store(out, (0, 0), ct.astype(view.load((0, 0)), ct.float32))

    return load_steps


def _load_view(mode: Any) -> Any:
    @ct.kernel
    def load_view(x, out):
        ct.store(out, (0, 0), ct.astype(x.tiled_view((8, 16), padding_mode=mode).load((0, 0)), ct.float32))

    return load_view


def _load_rows(mode: Any) -> Any:
    @ct.kernel
    def load_rows(x, out):
        rows = ct.arange(8, dtype=ct.int32)
        tile = ct.load_advanced_indexing(x, (rows, ct.Slice(0, 16)), padding_mode=mode)
        ct.store(out, (0, 0), ct.astype(tile, ct.float32))

    return load_rows


def _store_view(mode: Any) -> Any:
    @ct.kernel
    def store_view(x, out):
        x.tiled_view((8, 16), padding_mode=mode).store((0, 0), ct.astype(ct.load(out, (0, 0), (8, 16)), x.dtype))

    return store_view


def _gather(value: float) -> Any:
    @ct.kernel
    def gather(x, out):
        at = ct.arange(8, dtype=ct.int32)
        ct.store(out, (0,), ct.astype(ct.gather(x, at, padding_value=value), ct.float32))

    return gather


def _mma(acc_dtype: Any) -> Any:
    @ct.kernel
    def mma(x, y, out):
        acc = ct.zeros((16, 16), acc_dtype)
        acc = ct.mma(ct.load(x, (0, 0), (16, 32)), ct.load(y, (0, 0), (32, 16)), acc)
        ct.store(out, (0, 0), ct.astype(acc, ct.float32))

    return mma


def _matmul() -> Any:
    @ct.kernel
    def matmul(x, y, out):
        product = ct.matmul(ct.load(x, (0, 0), (16, 32)), ct.load(y, (0, 0), (32, 16)))
        ct.store(out, (0, 0), ct.astype(product, ct.float32))

    return matmul


def _cast(to: Any) -> Any:
    @ct.kernel
    def cast(x, out):
        ct.store(out, (0,), ct.astype(ct.astype(ct.load(x, (0,), (8,)), to), ct.float32))

    return cast


# Functions of the programs that are more than one call.
def _is_where(x, y):
    return ct.where(ct.astype(ct.arange(8, dtype=ct.int32), ct.bool_), x, y)


def _fused(x, y):
    return x * y + x


def _add_by_hand(x):
    return ct.reduce(x, 0, lambda a, b: a + b, 0)


def _first_by_hand(x):
    return ct.reduce(x, 0, lambda a, b: a, 0)


def _scan_by_hand(x):
    return ct.scan(x, 0, lambda a, b: a + b, 0)


def _scan_first(x):
    return ct.scan(x, 0, lambda a, b: a, 0)


def _permute_1(x):
    return ct.permute(x, (0,))


def _permute_2(x):
    return ct.reshape(ct.permute(ct.reshape(x, (2, 4)), (1, 0)), (8,))


def _permute_3(x):
    return ct.reshape(ct.permute(ct.reshape(x, (2, 2, 2)), (1, 0, 2)), (8,))


def _permute_0(x):
    return ct.permute(ct.reshape(ct.extract(x, (0,), (1,)), ()), ())


def _reshape_0(x):
    return ct.reshape(ct.extract(x, (0,), (1,)), ())


def _reshape_0_to_0(x):
    return ct.reshape(ct.reshape(ct.extract(x, (0,), (1,)), ()), ())


def _reshape_0_to_2(x):
    return ct.extract(ct.reshape(ct.reshape(ct.extract(x, (0,), (1,)), ()), (1, 1)), (0, 0), (1, 1)).reshape(())


def _reshape_1_to_1(x):
    return ct.reshape(x, (8,))


def _transpose_0(x):
    return ct.transpose(ct.reshape(ct.extract(x, (0,), (1,)), ()))


def _transpose_1(x):
    return ct.transpose(x)


def _transpose_2(x):
    return ct.reshape(ct.transpose(ct.reshape(x, (2, 4))), (8,))


def _extract(x):
    return ct.broadcast_to(ct.extract(x, (0,), (4,)).reshape((4, 1)), (4, 2)).reshape((8,))


def _insert(x, y):
    return ct.insert(x, (0,), ct.extract(y, (1,), (4,)))


def _cat(x, y):
    return ct.cat((ct.extract(x, (0,), (4,)), ct.extract(y, (1,), (4,))), 0)


def _expand(x):
    return ct.reshape(ct.expand_dims(x, 0), (8,))


UNARY = "exp exp2 log log2 sqrt rsqrt sin cos tan sinh cosh tanh floor ceil abs negative isnan bitwise_not".split()
BINARY = (
    "add sub mul truediv floordiv pow atan2 mod minimum maximum cdiv bitwise_and bitwise_or bitwise_xor bitwise_lshift "
    "bitwise_rshift greater greater_equal less less_equal equal not_equal"
).split()
REDUCE = "sum max min prod argmax argmin".split()
SCAN = "cumsum cumprod".split()
PADDING = {m.value: m for m in ct.PaddingMode}
LOADS = (_load, _load_by_pointer, _load_view, _load_steps, _load_rows, _store_view)
GATHERED = {"0": 0, "1": 1, "-0": -0.0, "nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def probes() -> Iterator[Probe]:
    """Every program, in the order of the families that the table covers."""
    kernels: dict[str, Any] = {}

    def made(key: str, make: Callable[[Any], Any], value: Any) -> Any:
        return kernels.setdefault(key, make(value))

    for make, (mode, value), dtype in itertools.product(LOADS, PADDING.items(), ALL):
        for rows, kind in ((8, "whole"), (5, "overhanging")):
            if kind == "overhanging" and make is not _load:
                continue
            name = f"{make.__name__[1:]}-{mode}-{kind}-{dtype}"
            kernel = made(f"{make.__name__}-{mode}", make, value)
            inputs = _tensors((dtype, rows, 16), ("float32", 8, 16))
            yield Probe(name, kernel, inputs, _arch(dtype))
    for (text, value), dtype in itertools.product(GATHERED.items(), ALL):
        kernel = made(f"gather-{text}", _gather, value)
        yield Probe(f"gather-{text}-{dtype}", kernel, _tensors((dtype, 5), ("float32", 8)), _arch(dtype))

    one: list[tuple[str, Any, Any]] = [(n, _unary, getattr(ct, n)) for n in (*UNARY, *SCAN)]
    one += [(n, _to_scalar, getattr(ct, n)) for n in REDUCE]
    one += [(f.__name__[1:], _to_scalar, f) for f in (_add_by_hand, _first_by_hand, _permute_0, _reshape_0)]
    one += [(f.__name__[1:], _to_scalar, f) for f in (_reshape_0_to_0, _reshape_0_to_2, _transpose_0)]
    shapes = (_permute_1, _permute_2, _permute_3, _reshape_1_to_1, _transpose_1, _transpose_2, _extract, _expand)
    one += [(f.__name__[1:], _unary, f) for f in (*shapes, _scan_by_hand, _scan_first)]
    for (name, make, fn), dtype in itertools.product(one, ALL):
        inputs = _tensors((dtype, 8), ("float32", 8))
        yield Probe(f"{name}-{dtype}", made(name, make, fn), inputs, _arch(dtype))

    two: list[tuple[str, Any]] = [(n, getattr(ct, n)) for n in BINARY]
    two += [(f.__name__[1:], f) for f in (_is_where, _fused, _insert, _cat)]
    for (name, fn), dtype in itertools.product(two, ALL):
        inputs = _tensors((dtype, 8), (dtype, 8), ("float32", 8))
        yield Probe(f"{name}-{dtype}", made(name, _binary, fn), inputs, _arch(dtype))

    for x, y in [*((d, d) for d in ALL), *itertools.permutations(SMALL, 2), *itertools.product(SMALL, ("float16",))]:
        inputs = _tensors((x, 16, 32), (y, 32, 16), ("float32", 16, 16))
        yield Probe(f"matmul-{x}-{y}", kernels.setdefault("matmul", _matmul()), inputs, _arch(x, y))
        for acc in ("float16", "bfloat16", "float32", "float64", "int32"):
            yield Probe(f"mma-{x}-{y}-{acc}", made(f"mma-{acc}", _mma, getattr(ct, acc)), inputs, _arch(x, y))

    for source, to in itertools.product(ALL, ALL):
        kernel = made(f"cast-{to}", _cast, getattr(ct, "bool_" if to == "bool" else to))
        inputs = _tensors((source, 8), ("float32", 8))
        yield Probe(f"cast-{source}-{to}", kernel, inputs, _arch(source, to))


# ---------------------------------------------------------------- the compiler
@dataclass(frozen=True)
class Verdict:
    """accepted: by cuda-tile and tileiras. uses: of the program's operations; None where cuda-tile makes no IR of it.
    said: the compiler's words."""

    accepted: bool
    uses: frozenset[Use] | None
    said: str = ""


def front_end(probe: Probe) -> tuple[frozenset[Use] | None, bytes, str]:
    """(uses in the final IR, the bytecode for tileiras, "") of a program. Without bytecode where cuda-tile writes none,
    and without uses where it makes no IR; then with what it said."""
    from cuda.tile._bytecode.version import BytecodeVersion
    from cuda.tile._compile import compile_tile
    from cuda.tile.compilation import CallingConvention, KernelSignature

    arguments = frontend.describe_arguments(probe.kernel, probe.inputs())
    signature = KernelSignature(arguments.constraints, CallingConvention.cutile_python_v2(), symbol="probe")
    uses: frozenset[Use] | None = None
    try:
        for bytecode in (False, True):
            compiled = compile_tile(
                frontend.annotated(probe.kernel),
                [signature],
                sm_arch=probe.arch,
                bytecode_version=BytecodeVersion.V_13_4,
                return_final_ir=not bytecode,
                return_bytecode=bytecode,
                return_cubin=False,
            )
            if not bytecode:
                (block,) = compiled.final_ir
                uses = frozenset(use for op in block.traverse() if (use := use_of(op)) is not None)
    except Exception as refused:  # cuTile's own errors, and its failed assertions
        return uses, b"", str(refused).splitlines()[0] if str(refused) else type(refused).__name__
    return uses, bytes(compiled.bytecode), ""


def compiled(probe: Probe, uses: frozenset[Use] | None, bytecode: bytes, said: str, folder: str) -> Verdict:
    """What tileiras says of a program that the front end accepted."""
    from cuda.tile._compile import _find_compiler_bin

    if not bytecode:
        return Verdict(False, uses, said)
    path = os.path.join(folder, f"{probe.name}.tileirbc")
    Path(path).write_bytes(bytecode)
    try:
        _find_compiler_bin().run([path, "-o", path + ".cubin"], ["--gpu-name", probe.arch, "-O0"], 120)
    except ct.TileError as refused:
        return Verdict(False, uses, str(refused).splitlines()[1] if "\n" in str(refused) else str(refused))
    finally:
        for file in (path, path + ".cubin"):
            Path(file).unlink(missing_ok=True)
    return Verdict(True, uses)


def ask(chosen: list[Probe], processes: int = 2) -> dict[str, Verdict]:
    """The compiler's verdict on each program, by its name."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(processes) as pool:
        jobs = {p.name: pool.submit(compiled, p, *front_end(p), folder) for p in chosen}
        return {name: job.result() for name, job in jobs.items()}


def blame(verdicts: dict[str, Verdict]) -> tuple[frozenset[Use], list[str]]:
    """(the uses that tileiras refuses, what could not be explained)."""
    good = frozenset(use for v in verdicts.values() if v.accepted for use in v.uses or ())
    late = {name: (v.uses, v.said) for name, v in verdicts.items() if not v.accepted and v.uses is not None}
    refused = frozenset(use for uses, _ in late.values() if len(uses - good) == 1 for use in uses - good)
    lost = [f"{name}: {said}: {sorted(uses - good)}" for name, (uses, said) in late.items() if not uses & refused]
    return refused, lost


def main() -> int:
    chosen = list(probes())
    verdicts = ask(chosen)
    refused, lost = blame(verdicts)
    for line in lost:
        print(line)
    TABLE.write_text(table(refused))
    late = sorted(name for name, v in verdicts.items() if not v.accepted and v.uses is not None)
    PROGRAMS.write_text("\n".join(late) + "\n")
    early = sum(v.uses is None for v in verdicts.values())
    good = sum(v.accepted for v in verdicts.values())
    print(f"{len(chosen)} programs: {good} accepted, {early} refused by the front end, the others later")
    return bool(lost)


#: Data types that the table names together.
GROUPS = {"_INTEGERS": INTEGERS, "_UNSIGNED": INTEGERS[4:], "_FLOATS": FLOATS, "_SMALL": SMALL}


def table(refused: frozenset[Use]) -> str:
    """The text of the module with the table."""
    rows: dict[tuple[str, str], set[str]] = {}
    for operation, detail, dtype in sorted(refused):
        rows.setdefault((operation, detail), set()).add(dtype)
    lines = [HEAD.format(version=ct.__version__)]
    for (operation, detail), dtypes in rows.items():
        terms: list[str] = []
        for name, group in GROUPS.items():
            if dtypes >= set(group):
                terms.append(f"*{name}")
                dtypes = dtypes - set(group)
        terms += [f'"{dtype}"' for dtype in sorted(dtypes)]
        if len(terms) == 1:
            value = terms[0][1:] if terms[0].startswith("*") else f"({terms[0]},)"
        else:
            value = f"({', '.join(terms)})"
        lines.append(f'    ("{operation}", "{detail}"): {value},')
    return "\n".join([*lines, "}"]) + "\n"


HEAD = '''"""Written by tests/cutile_cpu/refusals.py from what the compiler of cuda-tile {version} refuses."""

from __future__ import annotations

_SMALL = ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")
_FLOATS = ("float16", "bfloat16", "float32", "float64")
_UNSIGNED = ("uint8", "uint16", "uint32", "uint64")
_INTEGERS = ("int8", "int16", "int32", "int64", *_UNSIGNED)

#: (operation, detail) -> data types with which the front end makes IR of it and the compiler refuses it, for every GPU.
REFUSED: dict[tuple[str, str], tuple[str, ...]] = {{'''

if __name__ == "__main__":
    sys.exit(main())
