"""The source that a kernel version is made of: its file, and what that imports of kernels, directly or not."""

from __future__ import annotations

import ast
import functools
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from mla_var3 import paths

_PREFIX = "mla_var3.kernel."
_LABEL = re.compile(r'"([a-z-]+/\w+)"')


@functools.lru_cache(maxsize=512)
def _imports(path: Path, mtime_ns: int) -> tuple[Path, ...]:
    """Files of kernels that a file imports, wherever in it. mtime_ns makes an edited file another one."""
    found: dict[Path, None] = {}
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    except SyntaxError:  # its record says so, and has a hash all the same
        return ()
    for node in ast.walk(tree):
        for name in _named(node):
            if (target := _file(name)) is not None:
                found.setdefault(target)
    return tuple(found)


def strings(path: Path) -> frozenset[str]:
    """The strings of a file that may be labels of versions."""
    return _strings(path, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=512)
def _strings(path: Path, mtime_ns: int) -> frozenset[str]:
    return frozenset(_LABEL.findall(path.read_text(encoding="utf-8")))


def _named(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _file(module: str) -> Path | None:
    """The file of a module of kernels; None for another module, a package, or a name that is no module."""
    if not module.startswith(_PREFIX):
        return None
    parts = module.removeprefix(_PREFIX).split(".")
    candidates = (folder.joinpath(*parts).with_suffix(".py") for folder in paths.kernel_dirs())
    return next((path for path in candidates if path.is_file()), None)


def import_closure(path: Path) -> list[Path]:
    """A version's file and all that it imports of kernels, sorted; `__init__` files, which hold no code, left out."""
    todo = [path] if path.is_file() else []
    found = set(todo)
    while todo:
        here = todo.pop()
        new = [other for other in _imports(here, here.stat().st_mtime_ns) if other not in found]
        found.update(new)
        todo += new
    return sorted(found)


def source_hash(path: Path) -> str:
    """SHA-256 (16 hex digits) over names and contents of a version's import closure."""
    digest = hashlib.sha256()
    for file in import_closure(path):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
