"""`mla-var3 clone`: copies a version under the next version number."""

from __future__ import annotations

import argparse

HELP = "copy a version under the next version number, ready to be changed"
EPILOG = """\
examples:
  mla-var3 clone triton/flash_mla        makes triton/flash_mla_v1, or the next free one
  mla-var3 clone cute-dsl/flash_mla_v23 30
From a checkout the copy goes beside the version. From an installed package it goes into kernels/ of the folder you
start from, and every verb that starts there finds it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from mla_var3.lab import clone

    clone.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """See `mla_var3.lab.clone`."""
    from mla_var3.lab import clone

    return clone.run(args)
