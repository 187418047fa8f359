#!/usr/bin/env python3
"""The pictures of README and docs, from results/: scripts/report_pictures.py docs/pictures

Charts become SVG files without a browser; screenshots of the page need Chromium (Debian: apt install chromium).
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

#: Debian's command is a shell script around the program; the program itself starts faster and takes any option.
PROGRAMS = ("/usr/lib/chromium/chromium", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CELL = "b128_s1_h128_t4096"
TRACE = "cute-dsl/flash_mla_v23 on b1_s1_h128_t65536, h200"

#: name -> (part of the page, width, colours, scale, greatest height)
SHOTS = {
    "report-find": ("find", 1200, "light", 1.0, 900),
    "report-map": ("map", 1200, "light", 1.0, 900),
    "report-cell": ("cell", 1200, "light", 1.0, 900),
    "report-inside": ("inside", 1200, "light", 1.0, 1300),
    "report-ladder-dark": ("ladder", 1200, "dark", 1.0, 900),
    "report-phone": ("find", 400, "light", 1.5, 900),
}


def find_browser() -> str | None:
    """Chromium's program, or None where there is none."""
    return next((found for program in PROGRAMS if (found := shutil.which(program))), None)


@contextmanager
def browser() -> Iterator[Any]:
    """A headless Chromium. Raises `RuntimeError` where it, or the package that drives it, is missing."""
    program = find_browser()
    if program is None:
        raise RuntimeError("no Chromium here (Debian: apt install chromium)")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        raise RuntimeError("playwright is not installed (pip install playwright)") from error
    with sync_playwright() as driver:
        # In containers Chromium often runs as root, which its sandbox refuses; the page is our own.
        chromium = driver.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-dev-shm-usage"])
        try:
            yield chromium
        finally:
            chromium.close()


def screenshots(page: Path, folder: Path) -> list[Path]:
    """One PNG file for each of `SHOTS`."""
    written = []
    with browser() as chromium:
        for name, (part, width, colours, scale, height) in SHOTS.items():
            size = {"width": width, "height": 6000}
            context = chromium.new_context(viewport=size, color_scheme=colours, device_scale_factor=scale)
            tab = context.new_page()
            tab.set_default_timeout(120_000)
            tab.goto(f"{page.as_uri()}#cell={CELL}")
            tab.wait_for_function("window.report")
            tab.select_option("#trace", label=TRACE)
            tab.evaluate("report.ready()")
            box = tab.locator(f"#part-{part}").bounding_box()
            path = folder / f"{name}.png"
            clip = {**box, "x": 0, "width": width, "height": min(box["height"], height)}
            tab.screenshot(path=str(path), clip=clip, full_page=True)  # parts may lie below the window
            written.append(path)
            context.close()
    return written


def main(arguments: Sequence[str] | None = None) -> int:
    from mla_var3.cli import main as mla_var3

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where they go")
    folder: Path = parser.parse_args(arguments).folder
    words = ["--pictures", str(folder), "--cell", CELL, "--picture", "map"]
    status = mla_var3(["report", str(ROOT / "results"), *words])
    if status:
        return status
    with tempfile.TemporaryDirectory() as scratch:
        page = Path(scratch) / "index.html"
        status = mla_var3(["report", str(ROOT / "results"), "--out", str(page)])
        if status:
            return status
        try:
            for path in screenshots(page, folder):
                print(path)
        except RuntimeError as error:
            print(f"no screenshots: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
