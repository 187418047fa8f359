"""Triton: compiling a `@triton.jit` function for a signature, with no GPU."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_var3.errors import UserError
from mla_var3.toolchain import artefacts, digest, resources, sass
from mla_var3.toolchain.compiled import CompiledKernel
from mla_var3.toolchain.versions import toolchain

if TYPE_CHECKING:
    from mla_var3.device import Device

#: What the metadata of a compiled kernel say of its launch.
LAUNCH = ("num_warps", "num_ctas", "cluster_dims", "launch_pdl", "shared")


def compile_triton(
    fn: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    *,
    device: Device,
    num_warps: int = 4,
    num_stages: int = 2,
    out_dir: Path | None = None,
    keep: Sequence[str] = (),
    name: str | None = None,
) -> CompiledKernel:
    """Compiles a `@triton.jit` function for `device`; `handle` of the result is Triton's compiled kernel.

    signature: argument -> Triton type of every argument that is no constexpr: "*bf16", "i32", "fp32". A number after a
    colon promises divisibility ("i32:16"); pointers are taken as 16-byte aligned, as torch's are, unless they say
    otherwise ("*bf16:1"). constexprs: the others, by name. out_dir, keep: see
    `artefacts.wanted`; kinds ptx, cubin, sass, ttir, ttgir.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if not isinstance(fn, triton.runtime.JITFunction):
        raise UserError(
            f"{getattr(fn, '__name__', fn)} is no compilable Triton function: decorate it with @triton.jit, in a "
            "process without TRITON_INTERPRET=1."
        )
    name = name or fn.__name__
    kinds = artefacts.wanted(out_dir, keep)
    types, attributes = _typed(fn, signature, constexprs)
    major, minor = device.sm_version
    kept_before: list[bool] = []
    start = time.perf_counter()
    with triton.knobs.compilation.scope():
        # Called once, with whether Triton's own cache had it: then this call says nothing of the time to compile.
        triton.knobs.compilation.listener = lambda **told: kept_before.append(bool(told["cache_hit"]))
        compiled = triton.compile(
            ASTSource(fn=fn, signature=types, constexprs=dict(constexprs), attrs=attributes),
            target=GPUTarget("cuda", 10 * major + minor, 32),
            options={"num_warps": num_warps, "num_stages": num_stages},
        )
    seconds = time.perf_counter() - start if kept_before == [False] else None
    cubin = bytes(compiled.asm["cubin"])
    text = sass.disassemble(cubin)
    (taken,) = resources.read(cubin, device, sass=text, smem_dynamic=int(compiled.metadata.shared)).values()
    made = {kind: compiled.asm.get(kind) for kind in ("ptx", "ttir", "ttgir")}
    kept = artefacts.save(name, out_dir, kinds, {"cubin": cubin, "sass": text, **made})
    resources.require(taken, device)
    warnings = tuple(resources.problems(taken, device))
    code = code_of(cubin, {key: getattr(compiled.metadata, key, None) for key in LAUNCH}, device)
    return CompiledKernel(name, device.arch, taken, kept, (), warnings, seconds, code, compiled)


def code_of(cubin: bytes, launch: Mapping[str, Any], device: Device) -> digest.Code:
    """The code of a call of one kernel. launch: what Triton's metadata say of `LAUNCH`."""
    return digest.of_cubin(cubin, device.arch, digest.hash_of(launch), toolchain=toolchain("triton"))


def _typed(
    fn: Any, signature: Mapping[str, str], constexprs: Mapping[str, Any]
) -> tuple[dict[str, str], dict[tuple[int], list[list[Any]]]]:
    """Triton's signature (in the function's order) and its divisibility attributes by position."""
    types: dict[str, str] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    missing = [arg for arg in fn.arg_names if arg not in signature and arg not in constexprs]
    extra = [arg for arg in [*signature, *constexprs] if arg not in fn.arg_names]
    if missing or extra:
        which = f"lacks {', '.join(missing)}" if missing else f"has no argument {', '.join(extra)} to take"
        raise UserError(f"the signature of {fn.__name__} {which}; its arguments are {', '.join(fn.arg_names)}.")
    for position, arg in enumerate(fn.arg_names):
        if arg in constexprs:
            types[arg] = "constexpr"
            continue
        kind, _, promised = signature[arg].partition(":")
        types[arg] = kind
        divisor = int(promised) if promised else (16 if kind.startswith("*") else 1)
        if divisor > 1:
            attributes[(position,)] = [["tt.divisibility", divisor]]
    return types, attributes
