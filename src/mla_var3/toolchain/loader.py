"""Linking compiled CuTe objects into shared libraries, and loading those without the compiler.

Loading needs two libraries: `tvm_ffi`, and `libcute_dsl_runtime.so` of the package nvidia-cutlass-dsl-libs-cu13 (or
-cu12). `cutlass` is not imported. A loaded function takes torch tensors and numbers by position, not by keyword, and
launches on torch's current stream.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from importlib import metadata, util
from pathlib import Path
from typing import Any

from mla_var3.errors import UserError

RUNTIME = "libcute_dsl_runtime.so"
# cu13 first: it is the flavour the kernels are compiled with, and the plain package always brings cu12 along.
_FLAVOURS = ("lib", "cu13/lib", "cu12/lib")

_runtime: dict[str, Any] = {}  # keeps the handle: an unloaded runtime would leave every kernel with dangling calls


class CannotLink(UserError):
    """An object cannot become a loadable library here."""


def symbol_of(name: str) -> str:
    """The exported name of a host function."""
    return re.sub(r"\W", "_", name)


def compiler_here() -> bool:
    """Whether the CuTe compiler is installed; imports nothing."""
    try:
        return util.find_spec("cutlass") is not None
    except (ImportError, ValueError):
        return False


# ---------------------------------------------------------------- making
def link(function: Any, name: str, target: Path) -> None:
    """Writes a function that `cute.compile` made (with `--enable-tvm-ffi`) to `target`, a loadable library.

    Raises `CannotLink` where none of ld, gcc and clang is installed, or when it fails.
    """
    command = _linker()
    # Named here, the loader finds them by their sonames among what is loaded already: no search path, no globals.
    runtime = next((path for path in runtime_candidates() if path.is_file()), None)
    needed = [str(path) for path in (runtime, _tvm_ffi_library()) if path is not None and path.is_file()]
    with tempfile.TemporaryDirectory(prefix="link-") as scratch:
        unlinked = Path(scratch) / "kernel.o"
        function.export_to_c(str(unlinked), function_name=symbol_of(name))
        made = subprocess.run(
            [*command, "-o", str(target), str(unlinked), *needed], capture_output=True, text=True, check=False
        )
    if made.returncode:
        raise CannotLink(f"linking {name} with {command[0]} failed: {made.stderr.strip()[:300]}")


def _linker() -> list[str]:
    # noexecstack: newer C libraries refuse to load what asks for an executable stack.
    for tool in ("ld", "ld.lld"):
        if shutil.which(tool):
            return [tool, "-shared", "-Bsymbolic", "-z", "noexecstack"]
    for tool in ("cc", "gcc", "clang"):
        if shutil.which(tool):
            return [tool, "-shared", "-nostdlib", "-Wl,-Bsymbolic", "-Wl,-z,noexecstack"]
    raise CannotLink("keeping compiled kernels needs a linker: install binutils, gcc or clang.")


# ---------------------------------------------------------------- loading
def load(path: Path, name: str, near: Sequence[Path] = ()) -> Any:
    """The host function `name` of a library that `link` made: a `tvm_ffi.Function`. Milliseconds.

    near: folders in which the runtime library may lie, beside the usual places. Raises `UserError` when tvm_ffi or
    the runtime is missing, and what the loader raises when the library is no library or lacks the function.
    """
    try:
        import tvm_ffi
    except ImportError as missing:
        raise UserError("loading compiled kernels needs tvm_ffi: pip install 'apache-tvm-ffi<0.2'.") from missing
    load_runtime(near)
    return tvm_ffi.load_module(str(Path(path).resolve()))[symbol_of(name)]


def load_runtime(near: Sequence[Path] = ()) -> str:
    """Loads the CuTe runtime library once in a process and returns where it was found."""
    if _runtime:
        return next(iter(_runtime))
    reasons = []
    for place in [*map(str, runtime_candidates(near)), RUNTIME]:  # the bare name: LD_LIBRARY_PATH and the system
        if place != RUNTIME and not Path(place).is_file():
            continue
        try:
            _runtime[place] = ctypes.CDLL(place)
            return place
        except OSError as error:
            reasons.append(str(error))
    raise UserError(
        f"{RUNTIME} was not found ({'; '.join(reasons)}): pip install --no-deps nvidia-cutlass-dsl-libs-cu13==4.8.1, "
        "or put the file beside the bundle or on LD_LIBRARY_PATH."
    )


def runtime_candidates(near: Sequence[Path] = ()) -> Iterator[Path]:
    """Where the runtime library may lie, best first; no path is checked."""
    for entry in os.environ.get("CUTE_DSL_LIBS", "").split(os.pathsep):  # cutlass's own variable
        if entry.endswith(RUNTIME):
            yield Path(entry)
    for folder in near:
        for place in (folder, folder / "lib", folder.parent):
            yield place / RUNTIME
    with contextlib.suppress(ImportError, ValueError):
        spec = util.find_spec("nvidia_cutlass_dsl")
        for root in (spec.submodule_search_locations or ()) if spec is not None else ():
            for flavour in _FLAVOURS:
                yield Path(root) / flavour / RUNTIME


def _tvm_ffi_library() -> Path:
    spec = util.find_spec("tvm_ffi")
    root = Path(next(iter(spec.submodule_search_locations or ("",)))) if spec is not None else Path()
    return root / "lib" / "libtvm_ffi.so"


def tvm_ffi_abi() -> str:
    """What a loaded object must share with the tvm_ffi here: its major and minor version; "" when there is none."""
    try:
        return ".".join(metadata.version("apache-tvm-ffi").split(".")[:2])
    except metadata.PackageNotFoundError:
        return ""
