"""`mla-var3 diagnose`: the reason why a kernel is slow."""

from __future__ import annotations

import argparse

from mla_var3.cli.arguments import add_problem

HELP = "the reason why a kernel is slow, from profiles and records, and what has helped before"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from mla_var3.lab.diagnosis import verb

    verb.add_arguments(parser)
    add_problem(parser)
    parser.epilog = verb.EPILOG


def run(args: argparse.Namespace) -> int:
    """See `mla_var3.lab.diagnosis.verb`."""
    from mla_var3.lab.diagnosis import verb

    return verb.run(args)
