"""How users name a version."""

from __future__ import annotations


def version_name(design: str, version: int) -> str:
    """`flash_mla` for the base version, `flash_mla_v2` for version 2."""
    return f"{design}_v{version}" if version else design


def kernel_label(language: str, design: str, version: int) -> str:
    """`cute-dsl/flash_mla` or `cute-dsl/flash_mla_v2`: how users name a version."""
    return f"{language}/{version_name(design, version)}"
