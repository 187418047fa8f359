"""Keeping what a compiler made."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from mla_var3.errors import UserError, nearest

# Kind -> file ending. No language makes all of them; remarks are what CuTe DSL's compiler says of each kernel.
KINDS: Mapping[str, str] = {
    "ptx": ".ptx",
    "cubin": ".cubin",
    "sass": ".sass",
    "mlir": ".mlir",
    "ttir": ".ttir",
    "ttgir": ".ttgir",
    "tileir": ".tileirbc",
    "object": ".o",
    "remarks": ".remarks.txt",
}
DEFAULT = ("ptx", "cubin", "sass", "tileir")


def wanted(out_dir: Path | None, keep: Sequence[str]) -> tuple[str, ...]:
    """Kinds to keep: none without a folder, the usual ones when `keep` names none.

    A kind that the language at hand does not make is passed over; one that no language makes is a `UserError`.
    """
    for kind in keep:
        if kind not in KINDS:
            raise UserError(f"cannot keep {kind!r}: {nearest(kind, KINDS)}.")
    if out_dir is None:
        if keep:
            raise UserError(f"keeping {', '.join(keep)} needs a folder: give out_dir.")
        return ()
    return tuple(keep) or DEFAULT


def path_of(out_dir: Path, name: str, kind: str) -> Path:
    """Where an artefact of that kind belongs; makes the folder."""
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    return out_dir / (re.sub(r"[^\w.-]+", "_", name) + KINDS[kind])


def save(
    name: str, out_dir: Path | None, kinds: Sequence[str], made: Mapping[str, bytes | str | None]
) -> dict[str, Path]:
    """Writes those of `made` that are in `kinds` to `out_dir/name.<ending>`; returns kind -> path."""
    kept: dict[str, Path] = {}
    for kind, data in made.items():
        if out_dir is None or kind not in kinds or data is None:
            continue
        kept[kind] = path_of(out_dir, name, kind)
        kept[kind].write_bytes(data.encode() if isinstance(data, str) else data)
    return kept
