"""Bundles: folders of compiled CuTe kernels, made without a GPU and run without a compiler.

    manifest.json     what is in it: kernel, problem class, tiling, architecture, key, hash, resources, packages
    objects/          one library for each host function, and a `.json` beside it (the form of the cache, see `aot`)

A bundle holds what was compiled from kernels of this project and nothing of NVIDIA's: the machine that runs it brings
`libcute_dsl_runtime.so` and `tvm_ffi` along (docs/licences.md).
"""

from __future__ import annotations

import hashlib
import os
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mla_var3.errors import UserError
from mla_var3.toolchain import aot, loader


@dataclass(frozen=True)
class Bundle:
    """A bundle on disk. refused: (label, reason) of what could not be put into it. failed: how many did not compile."""

    folder: Path
    manifest: dict[str, Any] = field(repr=False)
    refused: tuple[tuple[str, str], ...] = ()
    failed: int = 0

    @property
    def entries(self) -> list[dict[str, Any]]:
        return list(self.manifest["entries"])

    def summary(self) -> str:
        """One line for a user."""
        size = sum(e["bytes"] for e in self.entries) / 1e6
        kernels = sorted({e["kernel"] for e in self.entries})
        text = f"{self.folder}: {len(self.entries)} host functions of {', '.join(kernels)}, {size:.1f} MB"
        return text + (f"; {len(self.refused)} refused" if self.refused else "")


def open_bundle(folder: Path) -> Bundle:
    """Verifies a bundle and makes its kernels found by this process and those it starts.

    Raises `UserError` when a file is missing or damaged, when nothing in it was made for this kind of machine, or when
    its toolchain contradicts what is installed here.
    """
    folder = Path(folder).resolve()
    entries = aot.entries_of(folder)
    for entry in entries:
        path = folder / "objects" / entry["object"]
        try:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}): copy the bundle again.") from error
        if digest != entry["sha256"]:
            raise UserError(f"{path} is damaged: its hash is not the manifest's; copy the bundle again.")
    machines = {e["machine"] for e in entries}
    if entries and platform.machine() not in machines:
        raise UserError(f"{folder} was made for {', '.join(machines)}, and this machine is {platform.machine()}.")
    abis = {e["toolchain"].get("tvm-ffi-abi", "") for e in entries}
    if entries and loader.tvm_ffi_abi() not in abis:
        here = f"here is {loader.tvm_ffi_abi()}" if loader.tvm_ffi_abi() else "it is not installed"
        raise UserError(
            f"{folder} needs apache-tvm-ffi {min(abis)} and {here}: pip install 'apache-tvm-ffi=={min(abis)}.*'."
        )
    known = aot.bundle_dirs()
    if folder not in known:
        os.environ[aot.BUNDLES] = os.pathsep.join(map(str, [*known, folder]))
    return Bundle(folder, {"entries": entries})


def close_bundle(folder: Path) -> None:
    """Makes this process, and those it starts from now on, forget a bundle. What is loaded stays loaded."""
    left = [str(known) for known in aot.bundle_dirs() if known != Path(folder).resolve()]
    if left:
        os.environ[aot.BUNDLES] = os.pathsep.join(left)
    else:
        os.environ.pop(aot.BUNDLES, None)
