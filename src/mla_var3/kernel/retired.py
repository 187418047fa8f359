"""Versions whose code is no longer here: their devlogs stay, and name the commit that has it."""

from __future__ import annotations

import re
from functools import cache

from mla_var3 import paths


@cache
def retired() -> dict[str, str]:
    """`cute-dsl/flash_mla_v8` -> commit, by the devlogs of this checkout; empty for an installed package."""
    root = paths.repo_root()
    found = {}
    for entry in sorted((root / "devlogs").glob("*/*-v*.md")) if root is not None else ():
        head = entry.read_text(encoding="utf-8").split("\n---", 1)[0]
        fields = dict(re.findall(r"^(\w+):[ \t]*(.+?)[ \t]*$", head, re.MULTILINE))
        if "code" in fields:
            version = int(fields.get("version", 0))
            name = fields["design"] + (f"_v{version}" if version else "")
            found[f"{fields['language']}/{name}"] = fields["code"]
    return found


def where_is(label: str) -> str | None:
    """One sentence that says where a retired version's code is; None for any other name."""
    commit = retired().get(label)
    if commit is None:
        return None
    folder, _, name = label.partition("/")
    design = re.sub(r"_v\d+$", "", name)
    number = name.removeprefix(f"{design}_v") if name != design else "0"
    return (
        f"{label} is retired: commit {commit} has its code (git worktree add ../{name} {commit}), and "
        f"devlogs/{design}/{folder}-v{number}.md says what it was."
    )
