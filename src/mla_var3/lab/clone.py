"""Copies a kernel version under a new version number, so that the next experiment starts from code that works.

What is renamed: the version's folder and files; functions, methods, classes and constants that it defines and that
carry the old name (`flash_mla_v1_combine`, `FlashMlaV1Plan`); every use of them, in code, comments and strings; imports
of its own modules. What stays: the design's folder, and names that come from elsewhere, even when they look alike. Code
is renamed token by token, so formatting and comments are kept.
"""

from __future__ import annotations

import argparse
import ast
import io
import keyword
import re
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from mla_var3 import paths
from mla_var3.catalogue.registry import KernelId, all_kernels
from mla_var3.catalogue.retired import retired
from mla_var3.errors import UserError

#: Of a version's number: a larger one is a slip of the hand.
_LARGEST = 9999


@dataclass(frozen=True)
class Clone:
    """What was made: the new version, its files, and the names that changed (old -> new)."""

    kernel: KernelId
    files: tuple[Path, ...]
    names: dict[str, str]


def camel(module_name: str) -> str:
    """`flash_mla_v1` -> `FlashMlaV1`: how the classes of a version begin."""
    return "".join(part[:1].upper() + part[1:] for part in module_name.split("_"))


def target_version(source: KernelId, wanted: str | None, taken: Sequence[KernelId] | None = None) -> KernelId:
    """The version to make: `wanted` ("3", "v3", "flash_mla_v3"), or one more than the newest of design and language,
    retired ones included."""
    family = [
        k
        for k in (all_kernels() if taken is None else taken)
        if (k.language, k.layer, k.design) == (source.language, source.layer, source.design)
    ]
    # The numbers of retired versions are taken as well: their devlogs stay.
    base = re.escape(KernelId(source.language, source.layer, source.design, 0).label)
    gone = [int(match[1] or 0) for label in retired() if (match := re.fullmatch(rf"{base}(?:_v(\d+))?", label))]
    free = max([*(k.version for k in family), *gone], default=source.version) + 1
    if wanted is None:
        number = free
    else:
        match = re.fullmatch(rf"(?:{re.escape(source.design)}_)?v?(\d+)", wanted)
        if match is None:
            raise UserError(f"{wanted!r} is no version of {source.design}: write 3, v3 or {source.design}_v3.")
        number = int(match[1])
    if number < 1:
        raise UserError("version 0 is the base version: a clone needs a number of at least 1.")
    clone = KernelId(source.language, source.layer, source.design, number)
    if clone in family:
        raise UserError(f"{clone.label} exists: choose another version, {free} is free.")
    if number in gone:
        raise UserError(f"{clone.label} is retired, and its devlog stays: choose another version, {free} is free.")
    if number > _LARGEST:
        raise UserError(f"version {number} is above {_LARGEST}: choose another version, {free} is free.")
    return clone


def clone_version(source: KernelId, wanted: str | None = None, *, dry_run: bool = False) -> Clone:
    """Clones a version beside itself, or, where this package is installed, into `kernels/` of the current folder.
    Raises `UserError` when the target exists or the folder cannot be written."""
    if source.language == "peer":
        raise UserError(
            f"{source.label} wraps somebody else's library, so a copy would measure the same code: clone a version of "
            "your own language (mla-var3 list kernels)."
        )
    target = target_version(source, wanted)
    folder = source.path.parent
    # An installed package is not the user's to write into: the last of the folders is.
    beside = paths.kernel_dirs()[-1].joinpath(*folder.parts[-4:-1])
    made = clone_folder(folder, source.module_name, target.module_name, beside, dry_run=dry_run)
    if not dry_run:
        all_kernels.cache_clear()
    return Clone(target, made.files, made.names)


@dataclass(frozen=True)
class FolderClone:
    """Files and renamed names of a copied folder."""

    files: tuple[Path, ...]
    names: dict[str, str]


def clone_folder(folder: Path, old: str, new: str, beside: Path | None = None, *, dry_run: bool = False) -> FolderClone:
    """Copies the version folder `.../<design>/<old>` to `.../<design>/<new>`, or to `beside/<new>`, and renames what it
    defines."""
    out = (beside or folder.parent) / new
    if out.exists():
        raise UserError(f"{out} exists already: choose another version, or remove that folder.")
    sources = {path: path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))}
    if not sources:
        raise UserError(f"{folder} holds no Python files: there is nothing to clone.")
    trees = {}
    for path, text in sources.items():
        try:
            trees[path] = ast.parse(text)
        except SyntaxError as error:
            raise UserError(
                f"{path.name}, line {error.lineno}: {error.msg}; a clone starts from code that runs."
            ) from error
    modules = {path.stem: _renamed(path.stem, old, new) for path in sources}
    modules = {a: b for a, b in modules.items() if a != b}
    names = {name: _renamed(name, old, new) for tree in trees.values() for name in _defined(tree)}
    names = {a: b for a, b in names.items() if a != b}
    clash = set(names.values()) & {name for tree in trees.values() for name in _used(tree)}
    if clash:
        raise UserError(f"the name {sorted(clash)[0]!r} is in use in {old} already: rename it there first.")

    design = folder.parent.name
    results: dict[Path, str] = {}
    for path, text in sources.items():
        relative = path.relative_to(folder)
        target = out.joinpath(*relative.parts[:-1], modules.get(path.stem, path.stem) + ".py")
        results[target] = _rewrite(text, trees[path], names, modules, design, old, new)
    main = out / f"{new}.py"
    if main in results:
        results[main] = _note(results[main], old)
    if not dry_run:
        _write(out, results, folder)
    return FolderClone(tuple(results), {**modules, **names})


def _renamed(name: str, old: str, new: str) -> str:
    """`name` with its part `old` (snake case, whole words) or `Old` (camel case, at a word's end) replaced."""
    snake = re.sub(rf"(?<![A-Za-z0-9]){re.escape(old)}(?![A-Za-z0-9]|_v\d)", new, name)
    if snake != name:
        return snake
    upper = re.sub(rf"(?<![A-Za-z0-9]){re.escape(old.upper())}(?![A-Za-z0-9]|_V\d)", new.upper(), name)
    if upper != name:
        return upper
    return re.sub(rf"(?<![A-Z]){re.escape(camel(old))}(?![a-z0-9]|V\d)", camel(new), name)


def _defined(tree: ast.Module) -> set[str]:
    """Functions, methods and classes at any depth, and names assigned in the module's or a class's body."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        if isinstance(node, ast.Module | ast.ClassDef):
            for statement in node.body:
                targets = statement.targets if isinstance(statement, ast.Assign) else []
                if isinstance(statement, ast.AnnAssign):
                    targets = [statement.target]
                found |= {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
    return found


def _used(tree: ast.Module) -> set[str]:
    return {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} | {
        n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)
    }


def _own_path(dotted: str, design: str, old: str) -> bool:
    """Whether an absolute module path goes through the version being cloned: ...<design>.<version>[.<module>]."""
    parts = dotted.split(".")
    return any(pair == (design, old) for pair in pairwise(parts)) and "kernel" in parts[:-2]


def _version_folder(dotted: str, design: str, old: str) -> int:
    """Index in a dotted own path of the version's folder: the last `old` but one when the module is named alike."""
    parts = dotted.split(".")
    at = [i + 1 for i, pair in enumerate(pairwise(parts)) if pair == (design, old)]
    # A base version repeats its design's name: design.version.module are then three equal words.
    return at[0]


def _new_path(
    parts: list[str], own: bool, relative: bool, modules: dict[str, str], design: str, old: str, new: str
) -> list[str]:
    if relative:
        return [modules.get(part, part) for part in parts]
    if not own:
        return parts
    at = _version_folder(".".join(parts), design, old)
    return [*parts[:at], new, *[modules.get(part, part) for part in parts[at + 1 :]]]


def _imports(
    tree: ast.Module,
    tokens: list[tokenize.TokenInfo],
    names: dict[str, str],
    modules: dict[str, str],
    ids: tuple[str, str, str],
) -> tuple[dict[tuple[int, int], str], set[str]]:
    """What the words of import statements become (by position), and the local names that come from elsewhere."""
    design, old, new = ids
    changes: dict[tuple[int, int], str] = {}
    foreign: set[str] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        start, end = (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)
        inside = [t for t in tokens if start <= t.start < end and t.type == tokenize.NAME]
        for token in inside:
            changes[token.start] = token.string
        if isinstance(node, ast.ImportFrom):
            path = (node.module or "").split(".") if node.module else []
            own = node.level > 0 or _own_path(node.module or "", design, old)
            for token, part in zip(
                inside[1:], _new_path(path, own, node.level > 0, modules, design, old, new), strict=False
            ):
                changes[token.start] = part
            if own:
                for token in inside[len(path) + 2 :]:
                    changes[token.start] = names.get(token.string, modules.get(token.string, token.string))
            else:
                # `from ...<design> import <version>` is ours too.
                if path[-1:] == [design] and "kernel" in path:
                    for token in inside[len(path) + 2 :]:
                        changes[token.start] = new if token.string == old else token.string
                else:
                    foreign |= {alias.asname or alias.name for alias in node.names}
            continue
        position = 1
        for alias in node.names:
            path = alias.name.split(".")
            own = _own_path(alias.name, design, old)
            for token, part in zip(
                inside[position:], _new_path(path, own, False, modules, design, old, new), strict=False
            ):
                changes[token.start] = part
            if not own:
                foreign.add(alias.asname or path[0])
            position += len(path) + (2 if alias.asname else 0)
    return changes, foreign


def _rewrite(
    text: str, tree: ast.Module, names: dict[str, str], modules: dict[str, str], design: str, old: str, new: str
) -> str:
    """The source text with own names, own imports, and mentions of them in comments and strings renamed."""
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    imports, foreign = _imports(tree, tokens, names, modules, (design, old, new))
    local = {a: b for a, b in {**modules, **names}.items() if a not in foreign}
    lines = text.splitlines(keepends=True)
    edits: list[tuple[tuple[int, int], tuple[int, int], str]] = []
    code = [t for t in tokens if t.type not in (tokenize.NL, tokenize.NEWLINE, tokenize.COMMENT)]
    before = {
        t.start: (code[i - 2].string if i > 1 else "", code[i - 1].string if i else "") for i, t in enumerate(code)
    }
    for token in tokens:
        word = token.string
        if token.start in imports:
            word = imports[token.start]
        elif token.type == tokenize.NAME and not keyword.iskeyword(word):
            owner, dot = before[token.start]
            # An attribute of something imported from elsewhere keeps its name.
            word = word if dot == "." and owner in foreign else local.get(word, word)
        elif token.type in (tokenize.STRING, tokenize.COMMENT) or tokenize.tok_name[token.type] == "FSTRING_MIDDLE":
            word = _prose(word, names, modules, design, old, new)
        if word != token.string:
            edits.append((token.start, token.end, word))
    for (row, column), (end_row, end_column), word in reversed(edits):
        head, tail = lines[row - 1][:column], lines[end_row - 1][end_column:]
        lines[row - 1 : end_row] = [head + word + tail]
    return "".join(lines)


def _prose(text: str, names: dict[str, str], modules: dict[str, str], design: str, old: str, new: str) -> str:
    """Comments and strings: own dotted and slashed paths, then own names as whole words."""
    mark = "\0"
    for sep in (".", "/"):
        path = re.escape(sep.join((design, old)) + sep)
        text = re.sub(rf"(?<![\w]){path}(?=\w)", f"{mark}D{sep}{mark}N{sep}", text)
    words = {**modules, **names}
    if words:
        pattern = "|".join(re.escape(w) for w in sorted(words, key=len, reverse=True))
        # Not inside a longer path or name: lib/flash_mla or mla_var3.kernel.torch.mla.flash_mla is somebody else's.
        text = re.sub(rf"(?<![\w./]|\\)(?:{pattern})(?![\w/])", lambda m: words[m[0]], text)
        text = re.sub(rf"(?<={mark}N[./])(?:{pattern})\b", lambda m: words[m[0]], text)
    return text.replace(f"{mark}D", design).replace(f"{mark}N", new)


def _note(text: str, old: str) -> str:
    """Adds to the module's docstring where the version comes from, for its author to replace."""
    tree = ast.parse(text)
    first = tree.body[0] if tree.body else None
    if not (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    ):
        return text
    lines = text.splitlines(keepends=True)
    row = (first.end_lineno or first.lineno) - 1
    closing = re.search(r"(\"\"\"|''')\s*$", lines[row].rstrip("\n"))
    if closing is None:
        return text
    head = lines[row][: closing.start()].rstrip()
    line = f"Cloned from {old}; what this version changes: nothing yet."
    lines[row] = (head + "\n\n" if head else "\n") + line + "\n" + closing[1] + "\n"
    return "".join(lines)


def _write(out: Path, results: dict[Path, str], folder: Path) -> None:
    for path, text in results.items():
        try:
            compile(text, str(path), "exec", dont_inherit=True)
        except SyntaxError as error:
            raise UserError(f"the clone of {folder.name} would not parse ({error}): copy it by hand.") from error
    try:
        for path, text in results.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}; clone in a checkout that you may write.") from error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kernel", help="version to copy, as language/design[_vN]: cute-dsl/flash_mla")
    parser.add_argument("version", nargs="?", help="number or name of the copy; default: the next free one")
    parser.add_argument("--dry-run", action="store_true", help="print what would be made, write nothing")


def run(args: argparse.Namespace) -> int:
    made = clone_version(KernelId.parse(args.kernel), args.version, dry_run=args.dry_run)
    print(f"{'would make' if args.dry_run else 'made'} {made.kernel.label}")
    for path in made.files:
        print(f"  {path}")
    for old, new in made.names.items():
        print(f"  {old} -> {new}")
    if not args.dry_run:
        print(f"next: mla-var3 check {made.kernel.label}; then edit {made.kernel.path.name}")
    return 0
