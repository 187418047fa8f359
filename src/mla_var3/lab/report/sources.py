"""What stands beside records: lines of code of a version, and its devlog entry."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from dataclasses import dataclass, field
from pathlib import Path

from mla_var3 import paths
from mla_var3.catalogue import registry
from mla_var3.catalogue.registry import KernelId
from mla_var3.errors import UserError

_LINE = 78  # characters


@dataclass(frozen=True)
class Source:
    """Lines of a version as it is in this installation. lines: that hold code, without blank lines, comments and
    docstrings, in its file and in all that it imports of its language's folder. hash: to compare with a record's
    `source.hash`."""

    lines: int
    hash: str


@dataclass(frozen=True)
class Entry:
    """A devlog entry. path: in the repository. verdict: its word. why: the paragraph behind that. sections: (title,
    Markdown) in the entry's order."""

    path: str
    verdict: str
    why: str
    sections: list[tuple[str, str]] = field(default_factory=list)

    @property
    def line(self) -> str:
        """The verdict with as much of its reason as a line holds: the first sentence, or its first words."""
        first = re.split(r"(?<=[.;]) (?=[A-Z0-9])", self.why)[0].rstrip(".;")
        room = _LINE - len(self.verdict)
        if len(first) > room:
            first = first[:room].rpartition(" ")[0].rstrip(",;:(") + " …"
        return f"{self.verdict}: {first}" if first else self.verdict


def source_of(label: str) -> Source | None:
    """None for a version that this installation does not have."""
    kernel = next((k for k in registry.all_kernels() if k.label == label), None)
    if kernel is None:
        return None
    folder = paths.kernel_dirs()[0] / registry.LANGUAGES[kernel.language].folder
    files = [path for path in registry.source_files(kernel) if path.is_relative_to(folder)]
    lines = sum(_lines_of(path, path.stat().st_mtime_ns) for path in files)
    return Source(lines, registry.source_hash(kernel))


@functools.lru_cache(maxsize=512)
def _lines_of(path: Path, mtime_ns: int) -> int:
    """Lines of code of a file, which many versions may import. mtime_ns makes an edited file another one."""
    return code_lines(path.read_text(encoding="utf-8"))


def code_lines(text: str) -> int:
    """Lines of Python that are neither blank, nor comment, nor docstring."""
    lines: set[int] = set()
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or not node.body:
            continue
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            lines.difference_update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(lines)


def entries() -> dict[str, Entry]:
    """Devlog entries by the version's label; none where there is no devlogs/ folder (an installed wheel)."""
    from mla_var3.lab.devlog.check import find_root
    from mla_var3.lab.devlog.entry import parse, sections
    from mla_var3.lab.devlog.evidence import joined

    try:
        root = find_root()
    except UserError:
        return {}
    found: dict[str, Entry] = {}
    for path in sorted((root / "devlogs").glob("*/*-v*.md")):
        try:
            entry, _ = parse(path)
        except (OSError, UnicodeDecodeError):
            continue
        design, language, version = entry.kernel
        if version < 0:
            continue
        said = entry.sections.get("Verdict", (0, ""))[1].strip()
        # With its records in the text, which the page makes links of.
        told = sections(joined(entry.text, entry.evidence), 2)
        label = KernelId(language, "mla", design, version).label
        found[label] = Entry(
            _relative(path, root),
            entry.verdict or "no verdict",
            _why(said, entry.verdict),
            [(title, text.strip()) for title, (_, text) in told.items()],
        )
    return found


def _relative(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()


def _why(text: str, verdict: str) -> str:
    """The verdict's paragraph without its first word and its citations."""
    from mla_var3.lab.devlog.segments import without_comments

    first = re.split(r"\n\s*\n", text)[0].replace("\n", " ")
    first = without_comments(first)
    return re.sub(rf"^\W*{re.escape(verdict)}\W*", "", first, flags=re.IGNORECASE).strip() if verdict else first.strip()
