"""How users name a version, and in which order names are listed."""

from __future__ import annotations

import re
from collections.abc import Iterable


def by_number(text: str) -> list[tuple[int, str]]:
    """A sorting key in which the numbers of a name count as numbers: v9 before v10, b16 before b128."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", text)]


def in_order(names: Iterable[str]) -> list[str]:
    """Each name once, sorted by `by_number`."""
    return sorted(set(names), key=by_number)


def version_name(design: str, version: int) -> str:
    """`flash_mla` for the base version, `flash_mla_v2` for version 2."""
    return f"{design}_v{version}" if version else design


def kernel_label(language: str, design: str, version: int) -> str:
    """`cute-dsl/flash_mla` or `cute-dsl/flash_mla_v2`: how users name a version."""
    return f"{language}/{version_name(design, version)}"
