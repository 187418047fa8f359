"""Which packages generate the code of each language, and their installed versions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from importlib import metadata

GENERATES: Mapping[str, tuple[str, ...]] = {
    "cute-dsl": (
        "nvidia-cutlass-dsl",
        "nvidia-cutlass-dsl-libs-base",
        "nvidia-cutlass-dsl-libs-core",
        "nvidia-cutlass-dsl-libs-cu12",
        "nvidia-cutlass-dsl-libs-cu13",
    ),
    "cutile-dsl": ("cuda-tile", "nvidia-cuda-tileiras", "nvidia-cuda-nvcc", "nvidia-nvvm"),
    "triton": ("triton",),
}


def installed(names: Iterable[str]) -> dict[str, str]:
    """Versions of those of the packages that are installed."""
    found = {}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def toolchain(language: str) -> dict[str, str]:
    """Versions of what generates a language's code here."""
    return installed(GENERATES.get(language, ()))
