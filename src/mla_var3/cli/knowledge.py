"""`mla-var3 knowledge`: what was learned."""

from __future__ import annotations

from collections.abc import Sequence

HELP = "what was learned: entries that fit a kernel; check and compile the pages"


def main(words: Sequence[str]) -> int:
    """Runs `mla-var3 knowledge WORDS`, which has actions of its own."""
    from mla_var3.lab.knowledge.cli import main as run

    return run(words)
