"""`mla-var3 devlog`: the development log."""

from __future__ import annotations

from collections.abc import Sequence

HELP = "start, check, cite and render entries of the development log"


def main(words: Sequence[str]) -> int:
    """Runs `mla-var3 devlog WORDS`, which has actions of its own."""
    from mla_var3.lab.devlog.cli import main as run

    return run(words)
