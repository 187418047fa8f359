"""`mla-var3 list`: what there is, from files alone."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

HELP = "kernel versions, experiments, models, devices: what there is"
EPILOG = "example: mla-var3 list kernels"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what", nargs="?", default="all", choices=["all", "kernels", "experiments", "models", "devices"]
    )


def run(args: argparse.Namespace) -> int:
    """Prints what there is, from files alone."""
    shown = ["kernels", "experiments", "models", "devices"] if args.what == "all" else [args.what]
    for index, what in enumerate(shown):
        if index:
            print()
        if len(shown) > 1:
            print(f"{what}:")
        for line in _LISTS[what]():
            print(f"  {line}" if len(shown) > 1 else line)
    return 0


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _list_kernels() -> list[str]:
    from mla_var3.kernel.registry import all_kernels, missing

    why = {kernel: missing(kernel) for kernel in all_kernels()}
    rows = [
        (
            k.label,
            k.layer,
            "" if why[k] is None else "not installed",
            _summary(k.path.read_text(encoding="utf-8")),
        )
        for k in all_kernels()
    ]
    return [*_columns(rows), *dict.fromkeys(f"({reason})" for reason in why.values() if reason)]


def _summary(source: str) -> str:
    """First line of a module's docstring, read without importing it."""
    match = re.match(r'\s*(?:#[^\n]*\n\s*)*r?"""\s*([^\n]*?)\s*(?:"""|\n)', source)
    return match[1] if match else ""


def _list_experiments() -> list[str]:
    return _yaml_comments("experiment")


def _list_models() -> list[str]:
    return _yaml_comments("model")


def _yaml_comments(group: str) -> list[str]:
    """Names of a config group's files, each with its description, or its first comment."""
    from mla_var3 import paths

    files = {name: paths.option_file(group, name) for name in paths.options(group)}
    return _columns([(name, _said(path.read_text(encoding="utf-8"))) for name, path in files.items()])


def _said(text: str) -> str:
    match = re.search(r"^description: *(.+)", text, re.M) or re.match(r"# ?(.*)", text)
    return match[1].strip() if match else ""


def _list_devices() -> list[str]:
    from mla_var3.device import Device

    return _columns([(d.key, d.arch, d.name) for d in Device.all()])


_LISTS = {"kernels": _list_kernels, "experiments": _list_experiments, "models": _list_models, "devices": _list_devices}
