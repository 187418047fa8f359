"""`mla-var3 doctor`: what of this machine works."""

from __future__ import annotations

import argparse

from mla_var3.cli.arguments import doing

HELP = "what of this machine works for which language, and what to do about the rest"
EPILOG = "Ends with 0 unless the installation itself is broken."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", default="h200", metavar="KEY", help="device to try the compilers for (default h200)"
    )
    parser.add_argument("--no-compile", action="store_true", help="skip the trial compilations")


def run(args: argparse.Namespace) -> int:
    """See `mla_var3.lab.doctor`."""
    from mla_var3.lab import doctor

    with doing("trying what is installed"):
        return doctor.run(args)
