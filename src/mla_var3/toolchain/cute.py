"""CuTe DSL: compiling a host function from fake tensors, with no GPU; keeping and loading what came out."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_var3.toolchain import artefacts, digest, resources, sass
from mla_var3.toolchain.compiled import CompiledKernel
from mla_var3.toolchain.versions import toolchain

if TYPE_CHECKING:
    from mla_var3.device import Device

# Field 2 of the launch configuration is the dynamic shared memory.
_SMEM_SLOT = re.compile(
    r"(%\w+) = llvm\.getelementptr %\w+\[0, 2\] : \(!llvm\.ptr\) -> !llvm\.ptr, "
    r"!llvm\.struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>\n\s*llvm\.store (%\w+), \1 : i64"
)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_LAUNCHED = re.compile(r"llvm\.mlir\.addressof @(\w+) : !llvm\.ptr")


def fake_stream() -> Any:
    """The stream argument to compile for: at a call, TVM-FFI passes torch's current stream."""
    from cutlass.cute.runtime import make_fake_stream

    return make_fake_stream(use_tvm_ffi_env_stream=True)


def compile_cute(
    host_fn: Any,
    fake_args: Sequence[Any],
    *,
    device: Device,
    out_dir: Path | None = None,
    keep: Sequence[str] = (),
    name: str | None = None,
    options: str = "",
) -> CompiledKernel:
    """Compiles a `@cute.jit` host function for `device`; `handle` of the result is the callable (TVM-FFI).

    fake_args: every argument, made with `cutlass.cute.runtime.make_fake_tensor` and its kin; the stream is
    `fake_stream()`, and is then left out in calls. out_dir, keep: see `artefacts.wanted`; kinds ptx, cubin, sass, mlir,
    object (for `load_cute`), remarks. The last one are ptxas's own words, at about twice the compile time; spill bytes
    are then taken from them instead of from the code, and the two agree except for arrays indexed at run time. options:
    further ones of `cute.compile`. A host function that launches several kernels gives one stage each.
    """
    import cutlass.cute as cute

    name = name or str(getattr(host_fn, "__name__", "kernel"))
    kinds = artefacts.wanted(out_dir, keep)
    start = time.perf_counter()
    said, remarks = io.StringIO(), "remarks" in kinds
    with tempfile.TemporaryDirectory(prefix="cute-") as scratch:
        flags = f"--gpu-arch {device.arch} --enable-tvm-ffi --keep-cubin --dump-dir {scratch}"
        flags += (" --keep-ptx" if "ptx" in kinds else "") + (" remarks{ptx}" if remarks else "")
        with _bare_argv(), contextlib.redirect_stderr(said) if remarks else contextlib.nullcontext():
            compiled = cute.compile(host_fn, *fake_args, options=f"{flags} {options}".strip())
        seconds = time.perf_counter() - start
        cubin = bytes(compiled.__cubin__)
        ptx = compiled.__ptx__ if "ptx" in kinds else None
    text = sass.disassemble(cubin)
    ir = str(compiled.ir_module)
    dynamic, unknown = _dynamic_smem(ir)
    launch, order = digest.host_function(ir)
    told = _COLOURS.sub("", said.getvalue())
    found = resources.read(cubin, device, sass=text, smem_dynamic=dynamic, remarks=told)
    made = {"ptx": ptx, "cubin": cubin, "sass": text, "mlir": ir, "remarks": told}
    kept = artefacts.save(name, out_dir, kinds, made)
    if out_dir is not None and "object" in kinds:
        kept["object"] = artefacts.path_of(out_dir, name, "object")
        compiled.export_to_c(str(kept["object"]), function_name=_symbol(name))
    stages = []
    for function in sorted(found, key=lambda name: order.index(name) if name in order else len(order)):
        taken = found[function]
        resources.require(taken, device)
        warnings = resources.problems(taken, device)
        if function in unknown:
            warnings.append("dynamic shared memory is computed at launch and was not checked")
        stages.append(CompiledKernel(digest.plain_name(function), device.arch, taken, warnings=tuple(warnings)))
    whole = CompiledKernel.of_stages(name, device.arch, stages)
    return replace(
        whole,
        artefacts=kept,
        stages=whole.stages if len(stages) > 1 else (),
        seconds=seconds,
        code=digest.of_cubin(cubin, device.arch, digest.hash_of(launch), order, toolchain("cute-dsl")),
        handle=compiled,
    )


@contextlib.contextmanager
def _bare_argv() -> Iterator[None]:
    """Hides the command line: every compile parses it for a flag of its own, and takes our --h for --help and exits."""
    kept, sys.argv = sys.argv, sys.argv[:1]
    try:
        yield
    finally:
        sys.argv = kept


def load_cute(path: Path, name: str) -> Any:
    """The callable of an `object` that `compile_cute` kept under `name`. Needs no compiler; loads in milliseconds."""
    from cutlass.cute.runtime import load_module

    return load_module(str(path), enable_tvm_ffi=True)[_symbol(name)]


def _symbol(name: str) -> str:
    return re.sub(r"\W", "_", name)


def _dynamic_smem(ir: str) -> tuple[dict[str, int], set[str]]:
    """Dynamic shared memory by kernel, and the kernels whose launch computes it at run time."""
    dynamic: dict[str, int] = {}
    unknown: set[str] = set()
    for body in ir.split("llvm.func ")[1:]:
        slots = [match[2] for match in _SMEM_SLOT.finditer(body)]
        if not slots:
            continue
        constants = dict(re.findall(r"(%\w+) = llvm\.mlir\.constant\((-?\d+) : i64\)", body))
        # A kernel's handle is the global `kernels_<symbol>`; a prefix set on the kernel renames the symbol.
        addressed = [match[1] for match in _LAUNCHED.finditer(body)]
        launched = [symbol.removeprefix("kernels_") for symbol in addressed if symbol.startswith("kernels_")]
        for value, symbol in zip(slots, launched, strict=False):
            if value in constants:
                dynamic[symbol] = max(dynamic.get(symbol, 0), int(constants[value]))
            else:
                unknown.add(symbol)
    return dynamic, unknown
