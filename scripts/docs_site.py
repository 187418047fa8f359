"""What mkdocs.yml cannot say: MkDocs' hooks, and how docstrings become Markdown.

Pages of the site have the paths that they have in the repository, so that every link between them, and every link from
them to a file, means the same in both. Files that are linked and are no pages lie beside the pages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
#: Tabs of the navigation that list whatever is in these folders, behind the pages that mkdocs.yml names.
LISTED = {"Knowledge": ("docs/knowledge",), "Devlogs": ("devlogs",), "Results": ("docs/results",)}

_LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)")
_CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_FENCE = re.compile(r"^( *```\w+) .*$", re.MULTILINE)
_FIELD = re.compile(r"\w+(?:, \w+)*(?:\([^)]*\))?: ")


def pages() -> list[str]:
    """Paths of all pages from the root of the repository, sorted."""
    found = [path for folder in ("docs", "devlogs") for path in (ROOT / folder).rglob("*.md")]
    return sorted([*TOP, *(path.relative_to(ROOT).as_posix() for path in found)])


def linked(page: str) -> Iterator[str]:
    """Files of the repository that a page links to, by their paths from its root."""
    path = ROOT / page
    for match in _LINK.finditer(_CODE.sub("", path.read_text(encoding="utf-8"))):
        target = (path.parent / match[1]).resolve()
        if "://" not in match[1] and target.is_file() and target.is_relative_to(ROOT):
            yield target.relative_to(ROOT).as_posix()


def tree(folder: str, known: set[str]) -> list[Any]:
    """A folder's pages as a part of the navigation, folders behind pages; without those that are named elsewhere."""
    path = ROOT / folder
    here: list[Any] = sorted((p.relative_to(ROOT).as_posix() for p in path.glob("*.md")), key=_natural)
    here = [page for page in here if page not in known]
    here.sort(key=lambda page: not page.endswith("README.md"))
    below = [(p.name, tree(p.relative_to(ROOT).as_posix(), known)) for p in sorted(path.iterdir()) if p.is_dir()]
    return [*here, *({name.replace("-", " "): part} for name, part in below if part)]


def _natural(text: str) -> list[Any]:
    """cute-dsl-v2 before cute-dsl-v10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", text)]


# ---------------------------------------------------------------- hooks
def on_config(config: Any) -> Any:
    named = {page for tab in config.nav for part in tab.values() for page in part}
    for tab in config.nav:
        for name, part in tab.items():
            for folder in LISTED.get(name, ()):
                part += tree(folder, named)
    return config


def on_files(files: Files, config: Any) -> Files:
    theme = [file for file in files if Path(file.src_dir or "") != Path(config.docs_dir)]
    ours = pages()
    ours += sorted({target for page in ours for target in linked(page)} - set(ours))
    made = [File(path, str(ROOT), config.site_dir, config.use_directory_urls) for path in ours]
    return Files([*theme, *made])


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Code blocks without what the tests of the knowledge read behind their language."""
    return _FENCE.sub(r"\1", markdown)


# ---------------------------------------------------------------- docstrings
class Fields(griffe.Extension):
    """Lines of a docstring that begin with names and a colon, one a field, become a list."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_list(obj.docstring.value)


def as_list(text: str) -> str:
    """`shape: of the tile.` as `- **shape**: of the tile.`, with the lines that go on behind it."""
    out: list[str] = []
    inside = False
    for line in text.splitlines():
        field = _FIELD.match(line)
        if field:
            out += ([""] if not inside and out and out[-1] else []) + [f"- **{field[0][:-2]}**: {line[field.end() :]}"]
            inside = True
        else:
            inside = inside and bool(line)
            # A line that goes on with a minus is no item of a list.
            out.append("  " + re.sub("^- ", r"\\- ", line) if inside else line)
    return "\n".join(out)
