"""Versions whose code is no longer here: their devlogs stay, and name the commit that has it."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from mla_var3 import paths
from mla_var3.names import kernel_label


@cache
def retired() -> dict[str, tuple[str, Path]]:
    """`cute-dsl/flash_mla_v8` -> (commit, devlog, from the root), by the devlogs of this checkout; empty for an
    installed package."""
    root = paths.repo_root()
    found = {}
    for entry in sorted((root / "devlogs").glob("*/*-v*.md")) if root is not None else ():
        head = entry.read_text(encoding="utf-8").split("\n---", 1)[0]
        fields = dict(re.findall(r"^(\w+):[ \t]*(.+?)[ \t]*$", head, re.MULTILINE))
        if "code" in fields:
            label = kernel_label(fields["language"], fields["design"], int(fields["version"]))
            found[label] = (fields["code"], entry.relative_to(root or entry))
    return found


def where_is(label: str) -> str | None:
    """One sentence that says where a retired version's code is; None for any other name."""
    if label not in retired():
        return None
    commit, devlog = retired()[label]
    return (
        f"{label} is retired: commit {commit} has its code (git worktree add ../{label.partition('/')[2]} {commit}), "
        f"and {devlog} says what it was."
    )
