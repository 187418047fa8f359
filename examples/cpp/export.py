"""Exports a call of `mla_decode` to a program without Python: its compiled function, and which arguments it takes.

    python examples/cpp/export.py out/cpp --b 4 --h 16 --t 4096 --device h200

writes libmla_decode.so and mla_decode.h. The version is the one that `mla_decode` picks for the shapes; needs CuTe DSL
(pip install 'mla_var3[cute]') and no GPU. A page table row names t tokens; requests may have any length up to that.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from mla_var3.device import Device
from mla_var3.errors import EXIT_USER_ERROR, UserError
from mla_var3.ops.calls import Buffer, Call, call_of
from mla_var3.ops.ways import way_for
from mla_var3.toolchain.aot import default_cache_dir
from mla_var3.toolchain.loader import symbol_of
from mla_var3.workload.decode import MlaProblem

#: DLPack's (code, bits).
DTYPES = {
    "bfloat16": "kDLBfloat, 16", "float16": "kDLFloat, 16", "float32": "kDLFloat, 32", "int32": "kDLInt, 32",
    "uint8": "kDLUInt, 8",
}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--b", type=int, default=4, help="requests")
    parser.add_argument("--h", type=int, default=16, help="query heads")
    parser.add_argument("--t", type=int, default=4096, help="most tokens of a request")
    parser.add_argument("--device", default="h200", metavar="KEY", help="a key of `mla-var3 list devices`")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    args = parser().parse_args(words)
    try:
        problem = MlaProblem(b=args.b, h=args.h, t=args.t)
        device = Device.get(args.device)
        call = call_of(way_for(problem, device), problem, device)
        (step,) = call.steps  # a CuTe version's kernels are launched by one function
        if "object" not in step.compiled.artefacts:
            raise UserError(f"{default_cache_dir()} cannot be written: set XDG_CACHE_HOME to a folder that can.")
        args.folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(step.compiled.artefacts["object"], args.folder / "libmla_decode.so")
        (args.folder / "mla_decode.h").write_text(header(call, problem, device), encoding="utf-8")
    except UserError as error:
        print(f"export.py: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    print(f"{args.folder}: {call.label} for {problem.label} on {device.key}")
    return 0


def header(call: Call, problem: MlaProblem, device: Device) -> str:
    """The description as C++ constants, of the types of call.h."""
    (step,) = call.steps
    symbol = f"__tvm_ffi_{symbol_of(step.compiled.name)}"
    arguments = ",\n".join(f"    {argument(x)}" for x in step.arguments)

    def table(name: str, buffers: tuple[Buffer, ...]) -> str:
        rows = ",\n".join(f"    {buffer(x)}" for x in buffers)
        return f"inline constexpr Buffer {name}[] = {{\n{rows}}};\n"

    return f"""// {call.label} for {problem.label} on {device.key}, written by export.py.
#pragma once
#include "call.h"

extern "C" int {symbol}(void*, const TVMFFIAny*, int32_t, TVMFFIAny*);

namespace mla_decode {{
inline constexpr auto function = &{symbol};
inline constexpr double scale = {problem.scale!r};  // of q.k, one of the arguments
inline constexpr int64_t latent = {problem.k};  // columns that are values too
// q, kv_cache (its first size, pages, is the caller's), page_table, seq_lens
{table("inputs", call.inputs)}// out, lse
{table("outputs", call.outputs)}{table("workspaces", call.workspaces)}inline constexpr Argument arguments[] = {{
{arguments}}};
}}  // namespace mla_decode
"""


def buffer(x: Buffer) -> str:
    shape = ", ".join(map(str, x.shape))
    return f"{{{len(x.shape)}, {{{shape}}}, {{{DTYPES[x.dtype]}, 1}}, {str(x.zeroed).lower()}}}"


def argument(x: Buffer | float | int | None) -> str:
    if x is None:
        return "{Kind::none}"
    if isinstance(x, Buffer):
        return f"{{Kind::{x.role}, {x.index}}}"
    return f"{{Kind::integer, {x}}}" if isinstance(x, int) else f"{{Kind::real, 0, {x!r}}}"


if __name__ == "__main__":
    raise SystemExit(main())
