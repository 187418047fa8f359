"""Which packages generate the code of each language, and their installed versions."""

from __future__ import annotations

import contextlib
import functools
import re
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
#: The package whose version says whether a language's kernels compile, and the oldest one with which they do.
OLDEST: Mapping[str, tuple[str, str]] = {"cute-dsl": ("nvidia-cutlass-dsl", "4.8.0")}


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


@functools.cache
def too_old(language: str) -> str | None:
    """What is installed for a language that its kernels do not compile with: "PACKAGE VERSION or later, and .. is
    installed"; None where nothing is."""
    package, least = OLDEST.get(language, ("", ""))
    found = installed([package]).get(package) if package else None
    if found is None or _number(found) >= _number(least):
        return None
    return f"{package} {least} or later, and {found} is installed"


def _number(version: str) -> tuple[int, ...]:
    """Of "4.8.1" (4, 8, 1)."""
    return tuple(int(digits) for digits in re.findall(r"\d+", version.partition("+")[0])[:3])
