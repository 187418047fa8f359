"""`mla-var3 profile`: why is a kernel as fast as it is?"""

from __future__ import annotations

import argparse

from mla_var3.cli.arguments import add_kernels, add_problem, add_tiling

HELP = "why is a kernel as fast as it is? roofline, counters, source lines, time axis"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from mla_var3.lab.profiling import verb

    add_kernels(parser, "+")
    add_problem(parser)
    add_tiling(parser)
    verb.add_arguments(parser)
    parser.epilog = verb.EPILOG


def run(args: argparse.Namespace) -> int:
    """See `mla_var3.lab.profiling.verb`."""
    from mla_var3.lab.profiling import verb

    return verb.profile(args)
