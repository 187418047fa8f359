"""`mla-var3 diff`: two versions side by side."""

from __future__ import annotations

import argparse

from mla_var3.cli.arguments import add_problem, add_tiling

HELP = "two versions side by side: resources, instructions, the inner loop's SASS, counters, times"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from mla_var3.lab.diagnosis import compare

    compare.add_arguments(parser)
    add_problem(parser)
    add_tiling(parser)
    parser.epilog = compare.EPILOG


def run(args: argparse.Namespace) -> int:
    """See `mla_var3.lab.diagnosis.compare`."""
    from mla_var3.lab.diagnosis import compare

    return compare.run(args)
