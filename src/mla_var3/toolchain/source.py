"""The source that a kernel version is made of: its file, and what that imports of kernels, directly or not."""

from __future__ import annotations

import ast
import functools
import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mla_var3 import paths
from mla_var3.errors import UserError

_PREFIX = "mla_var3.kernel."
#: What a plan's class may say of itself to who does not import it, as literals.
DECLARED = ("peer", "parts", "uses")
_PLANS = re.compile(r"^    workload = (\w+)\.WORKLOAD$", re.MULTILINE)


@functools.lru_cache(maxsize=512)
def _read(path: Path, mtime_ns: int) -> tuple[tuple[Path, ...], tuple[Mapping[str, ast.expr], ...]]:
    """Files of kernels that a file imports, wherever in it, and which attributes of `DECLARED` its classes set, of each
    that sets any. mtime_ns makes an edited file another one."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    except SyntaxError:  # its record says so, and has a hash all the same
        return (), ()
    targets = [target for node in ast.walk(tree) for name in _named(node) if (target := _file(name)) is not None]
    classes = [dict(_declared(node)) for node in tree.body if isinstance(node, ast.ClassDef)]
    return tuple(dict.fromkeys(targets)), tuple(one for one in classes if one)


def _declared(node: ast.ClassDef) -> Iterator[tuple[str, ast.expr]]:
    for line in node.body:
        targets = (
            line.targets if isinstance(line, ast.Assign) else [line.target] if isinstance(line, ast.AnnAssign) else []
        )
        value = line.value if isinstance(line, ast.Assign | ast.AnnAssign) else None
        for target in targets:
            if value is not None and isinstance(target, ast.Name) and target.id in DECLARED:
                yield target.id, value


def declarations(path: Path) -> list[dict[str, Any]]:
    """What the classes of a file say of themselves (`DECLARED`), a dict for each that says something. The file is
    parsed and not run, so what is computed there is refused (`UserError`)."""
    if not path.is_file():
        return []
    found = []
    for one in _read(path, path.stat().st_mtime_ns)[1]:
        try:
            found.append({name: ast.literal_eval(value) for name, value in one.items()})
        except ValueError:
            names = " and ".join(one)
            raise UserError(
                f"{path.name} computes {names} of a plan: write a literal, for it is read without running the file."
            ) from None
    return found


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


def workload(path: Path) -> str:
    """The workload that a plan in a file names (`workload = norm.WORKLOAD`); empty where none does."""
    return _workload(path, path.stat().st_mtime_ns) if path.is_file() else ""


@functools.lru_cache(maxsize=512)
def _workload(path: Path, mtime_ns: int) -> str:
    text = path.read_text(encoding="utf-8")
    if (named := _PLANS.search(text)) is None:
        return ""
    renamed = re.search(rf"\b(\w+) as {named[1]}\b", text)  # from mla_var3.workload import packed_append as append
    return renamed[1] if renamed else named[1]


def import_closure(path: Path) -> list[Path]:
    """A version's file and all that it imports of kernels, sorted; `__init__` files, which hold no code, left out."""
    todo = [path] if path.is_file() else []
    found = set(todo)
    while todo:
        here = todo.pop()
        new = [other for other in _read(here, here.stat().st_mtime_ns)[0] if other not in found]
        found.update(new)
        todo += new
    return sorted(found)


def source_hash(path: Path) -> str:
    """SHA-256 (16 hex digits) over names and contents of a version's import closure."""
    digest = hashlib.sha256()
    for file in import_closure(path):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
