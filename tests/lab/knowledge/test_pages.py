"""The pages of docs/knowledge as they are: form, index, names that exist, and code blocks that compile."""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mla_var3.lab.knowledge import index
from mla_var3.lab.knowledge.blocks import blocks
from mla_var3.lab.knowledge.check import check, pages_of
from mla_var3.lab.knowledge.page import FOLDER, paragraphs, read

ROOT = Path(__file__).resolve().parents[3]
PAGES = pages_of(ROOT)
#: Pages with code, folder by folder.
WITH_CODE: dict[str, list[Path]] = {}
for path in PAGES:
    if blocks(read(path)[0])[0]:
        WITH_CODE.setdefault(path.parent.relative_to(ROOT / FOLDER).as_posix(), []).append(path)
#: What the original texts about CuTe DSL promise, by name.
SIXTEEN = """
concepts-architecture concepts-layouts concepts-tensors concepts-mma patterns-getting-started patterns-elementwise
patterns-gemm patterns-memory patterns-compilation patterns-pipeline patterns-reduction api-core api-arch api-nvgpu
api-runtime-utils troubleshooting
""".split()
# Sections that are about names which are gone or on their way out.
_GONE = re.compile(r"older texts|names on their way out|types", re.IGNORECASE)
_NAME = re.compile(r"(?:cute|cutlass|cpasync|warpgroup|tcgen05|pipeline|ct)(?:\.[A-Za-z_]\w*)+(?=\W|$)")
_MODULES = {
    "cute": "cutlass.cute",
    "cutlass": "cutlass",
    "cpasync": "cutlass.cute.nvgpu.cpasync",
    "warpgroup": "cutlass.cute.nvgpu.warpgroup",
    "tcgen05": "cutlass.cute.nvgpu.tcgen05",
    "pipeline": "cutlass.pipeline",
    "ct": "cuda.tile",
}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT / FOLDER).as_posix()


def test_form_links_and_records() -> None:
    failures, pages = check(ROOT)
    assert failures == []
    assert len(pages) == len(PAGES)


def test_index_is_what_the_pages_say() -> None:
    _, pages = check(ROOT)
    stale = index.stale(index.build(pages, ROOT), ROOT)
    assert stale == [], "run mla-var3 knowledge check"


def test_the_sixteen_reference_pages_are_there() -> None:
    stems = {path.stem for path in PAGES if "cute-dsl" in path.parts}
    assert [name for name in SIXTEEN if name not in stems] == []


def test_elementwise_has_its_variations() -> None:
    page, _ = read(ROOT / FOLDER / "languages/cute-dsl/patterns/patterns-elementwise.md")
    titles = [section.title for section in page.sections]
    assert [letter for letter in "ABCDE" if not any(t.startswith(f"Variation {letter}:") for t in titles)] == []


def test_no_folder_is_crowded() -> None:
    for folder in {path.parent for path in PAGES}:
        pages = [p for p in folder.iterdir() if not p.name.startswith(".") and p.suffix != ".records"]
        assert len(pages) <= 13, folder


@pytest.mark.parametrize("folder", WITH_CODE)
def test_blocks_compile(folder: str) -> None:
    """One process a folder; it needs no GPU, and must not find one either."""
    pages = WITH_CODE[folder]
    done = subprocess.run(
        [sys.executable, "-m", "mla_var3.lab.knowledge.compile_blocks", *map(str, pages)],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert results, done.stderr[-2000:]
    assert [f"{name_of(Path(r['page']))}:{r['line']}: {r['problem']}" for r in results if r["problem"]] == []
    for path in pages:
        assert sum(r["page"] == str(path) for r in results) == len(blocks(read(path)[0])[0]), path
    assert done.returncode == 0


@functools.cache
def exists(dotted: str) -> bool:
    """Whether `cute.arch.thread_idx` and its like are in the installed packages."""
    head, *rest = dotted.split(".")
    found = importlib.import_module(_MODULES[head])
    for part in rest:
        if not hasattr(found, part):
            try:
                importlib.import_module(f"{found.__name__}.{part}")
            except (ImportError, AttributeError):
                return False
        found = getattr(found, part)
    return True


def test_names_in_text_exist() -> None:
    missing = []
    for path in (p for p in PAGES if "cute-dsl" in p.parts or "cutile-dsl" in p.parts):
        page, _ = read(path)
        gone = [
            range(section.line, section.line + section.text.count("\n") + 2)
            for section in page.sections
            if _GONE.search(section.title)
        ]
        for line, text in paragraphs(page):
            if any(line in span for span in gone):
                continue
            for code in re.findall(r"`([^`\n]+)`", text):
                dotted = _NAME.match(code)
                if dotted and "/" not in code and not exists(dotted[0]):
                    missing.append(f"{name_of(path)}:{line}: {dotted[0]}")
    assert missing == []
