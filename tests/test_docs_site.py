"""The documentation builds as a site, strictly: every link, anchor and name of the API that it uses is there."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import pytest

for package in ("mkdocs", "material", "mkdocstrings", "mkdocstrings_handlers.python"):
    try:
        importlib.import_module(package)
    except ImportError:
        pytest.skip(f"{package} is not installed: it is in the extra `docs`", allow_module_level=True)


@pytest.fixture(scope="module")
def site(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; a warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=repo_root, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return folder


def text_of(site: Path, page: str) -> str:
    found = (site / page / "index.html").read_text(encoding="utf-8")
    return unescape(re.sub(r"<[^>]+>", "", found[found.index("<article") : found.index("</article>")]))


def test_every_page_of_the_repository_is_on_it(site: Path, repo_root: Path) -> None:
    built = {path.parent.relative_to(site).as_posix() for path in site.rglob("index.html")}
    for path in [*(repo_root / "docs").rglob("*.md"), *(repo_root / "devlogs").rglob("*.md")]:
        page = path.relative_to(repo_root).with_suffix("")
        assert (page.parent if page.name == "README" else page).as_posix() in built, path
    assert {"CONTRIBUTING", "CHANGELOG", "."} <= built


def test_the_tabs_and_what_they_list(site: Path) -> None:
    start = (site / "index.html").read_text(encoding="utf-8")
    tabs = [unescape(word.strip()) for word in re.findall(r'class="md-tabs__link">\s*(.*?)\s*</a>', start, re.S)]
    assert tabs == ["Start", "Serving", "Writing kernels", "Results", "Knowledge", "Devlogs", "API"]
    devlogs = (site / "devlogs" / "index.html").read_text(encoding="utf-8")
    places = [devlogs.index(f'href="flash_mla/cute-dsl-v{number}/"') for number in (2, 10, 24)]
    assert places == sorted(places), "versions are in the order of their numbers"


def test_the_api_is_that_of_the_docstrings(site: Path) -> None:
    serving = text_of(site, "docs/api/serving")
    # Signatures are on one line or on several, by whether Ruff is there to format them.
    assert re.search(r"mla_decode\(\s*q: Tensor,\s*kv_cache: Tensor", serving)
    assert "Attention of q over each request's cached tokens" in serving
    kernels = text_of(site, "docs/api/kernels")
    for name in ("KernelPlan", "Tiling", "CuteKernel", "CtKernel", "TritonKernel", "Requirement", "KernelMistake"):
        assert name in kernels, name
    assert "MlaProblem" in text_of(site, "docs/api/laboratory")


def test_code_blocks_and_tables_are_made(site: Path) -> None:
    page = (site / "docs/knowledge/languages/cute-dsl/concepts/concepts-architecture/index.html").read_text()
    assert "sm_90a expect=" not in page, "what the tests read behind a block's language is not shown"
    assert page.count('<div class="language-python highlight">') + page.count('<div class="highlight">') > 1
    assert "<table>" in page


def test_fields_of_a_docstring_become_a_list(repo_root: Path, module_at: Callable[[Path], Any]) -> None:
    module = module_at(repo_root / "scripts/docs_site.py")
    text = (
        "One line.\n\nx: of the tile, i\n- 1 and more.\na, b: both.\n\nA sentence: not a field of one word? It is: no."
    )
    assert module.as_list(text).splitlines() == [
        "One line.",
        "",
        "- **x**: of the tile, i",
        r"  \- 1 and more.",
        "- **a, b**: both.",
        "",
        "A sentence: not a field of one word? It is: no.",
    ]
