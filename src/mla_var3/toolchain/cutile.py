"""cuTile: compiling a kernel for a signature, with no GPU."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_var3.errors import UserError, install
from mla_var3.toolchain import artefacts, digest, resources, sass
from mla_var3.toolchain.compiled import CompiledKernel
from mla_var3.toolchain.tile_ir import tile_ir
from mla_var3.toolchain.versions import toolchain

if TYPE_CHECKING:
    from mla_var3.device import Device

#: What compiling said, of kernels of which nothing is kept on disk: the tilings of a search share their join.
_READ: dict[Any, CompiledKernel] = {}


def compile_cutile(
    kernel: Any,
    signature: Any,
    *,
    device: Device,
    out_dir: Path | None = None,
    keep: Sequence[str] = (),
    name: str | None = None,
) -> CompiledKernel:
    """Compiles a `@ct.kernel` function for `device`.

    signature: a `cuda.tile.compilation.KernelSignature`, built by hand (`from_kernel_args` needs a driver); hints are
    those of `kernel` (`kernel.replace_hints(...)`). out_dir, keep: see `artefacts.wanted`; kinds cubin, sass, tileir
    (bytecode). cuTile makes no PTX. A tile that misses HGMMA is no error to the compiler: it is in `warnings`. `code`
    is what the compiler was given, see `code_of`.
    """
    from cuda.tile.compilation import export_kernel

    name = name or kernel_name(kernel)
    kinds = artefacts.wanted(out_dir, keep)
    key = (kernel, signature.with_mangled_symbol(name).symbol, device.key, name)
    if not kinds and key in _READ:
        return _READ[key]
    gpu_code = device.arch.removesuffix("a")
    start = time.perf_counter()
    cubin = io.BytesIO()
    try:
        export_kernel(kernel, [signature], cubin, gpu_code=gpu_code, output_format="cubin")
    except FileNotFoundError as missing:
        raise UserError(f"cuTile's compiler is missing ({missing}): {install('cutile')}.") from missing
    seconds = time.perf_counter() - start
    bytecode = None
    if "tileir" in kinds:
        tileir = io.BytesIO()
        export_kernel(kernel, [signature], tileir, gpu_code=gpu_code, output_format="tileir_bytecode")
        bytecode = tileir.getvalue()
    text = sass.disassemble(cubin.getvalue())
    (taken,) = resources.read(cubin.getvalue(), device, sass=text).values()
    kept = artefacts.save(name, out_dir, kinds, {"cubin": cubin.getvalue(), "sass": text, "tileir": bytecode})
    resources.require(taken, device)
    warnings = tuple(resources.problems(taken, device))
    code = code_of(name, *tile_ir(kernel, signature, gpu_code), device)
    made = CompiledKernel(name, device.arch, taken, kept, (), warnings, seconds, code)
    if not kinds:
        _READ[key] = made
    return made


def code_of(name: str, ir: bytes, options: str, device: Device) -> digest.Code:
    """The code of a call of one kernel: its Tile IR, and with its launch what makes code of that. ir, options: of
    `tile_ir`.

    tileiras 13.4.92 makes one of two machine codes from the same Tile IR, from run to run of the same command, so that
    machine code tells nothing.
    """
    compiler = toolchain("cutile-dsl")
    kernel = digest.KernelCode(name, digest.hash_of(ir), "", 0, 0)
    return digest.Code(device.arch, (kernel,), (digest.hash_of([options, compiler]),), toolchain=compiler)


def kernel_name(kernel: Any) -> str:
    """The name of a `@ct.kernel` function, which is an object without `__name__`."""
    function = getattr(kernel, "_pyfunc", kernel)
    return str(getattr(function, "__name__", "kernel"))
