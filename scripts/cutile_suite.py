#!/usr/bin/env python3
"""Runs the tests of a checkout that launches cuTile kernels on this machine's CPU.

    scripts/cutile_suite.py /path/to/TileGym --path src tests/ops
    scripts/cutile_suite.py /path/to/cutile-python test --cutile-no-strict -k "not bench"

Nothing is fetched or installed. What is not an option below goes to pytest, with the options of the interpreter's
plugin (`--cutile-…`, in pytest's own --help). The checkout's pytest settings hold; plugins that they ask for must be
here. Prints passed, failed, refused (an operation that the interpreter does not run), too slow and skipped for each
test file, and what made tests fail. Exit code: pytest's.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="folder of the other project, in which pytest runs")
    parser.add_argument("--path", type=Path, action="append", default=[], help="folder in it to import from, as src")
    parser.add_argument("--seconds", type=int, default=60, help="time for one test (60); needs pytest-timeout")
    asked, for_pytest = parser.parse_known_args(argv)
    if not asked.checkout.is_dir():
        parser.error(f"{asked.checkout} is no folder: give the checkout whose tests are to run.")
    missing = [name for name in ("pytest", "cuda.tile") if not _installed(name)]
    if missing:
        parser.error(f"{' and '.join(missing)} not installed: pip install pytest 'mla_var3[cutile-cpu]'.")
    paths = [*(asked.checkout / p for p in asked.path), SOURCE]
    command = [sys.executable, "-m", "pytest", "-p", "mla_var3.cutile_cpu.pytest_plugin"]
    command += ["-q", "--tb=no", "-rN", "--disable-warnings", "-p", "no:cacheprovider"]
    if _installed("pytest_timeout"):
        command += [f"--timeout={asked.seconds}"]
    old = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([*(str(p.resolve()) for p in paths), *([old] if old else [])])
    return subprocess.run(
        [*command, *for_pytest], cwd=asked.checkout, env={**os.environ, "PYTHONPATH": path}, check=False
    ).returncode


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
