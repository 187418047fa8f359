"""`mla-var3 report`: records as one page."""

from __future__ import annotations

import argparse

HELP = "records as one page: which kernel is fastest where, by how much, how far from the limit"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from mla_var3.lab.report import verb

    verb.add_arguments(parser)
    parser.epilog = verb.EPILOG


def run(args: argparse.Namespace) -> int:
    """See `mla_var3.lab.report.verb`."""
    from mla_var3.lab.report import verb

    return verb.run(args)
