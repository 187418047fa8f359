"""`mla-var3 list`: what there is, from files alone."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence

HELP = "kernel versions, experiments, models, devices: what there is"
EPILOG = "example: mla-var3 list kernels"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        nargs="?",
        default="all",
        choices=["all", "kernels", "experiments", "models", "devices"],
        help="what to list (default all)",
    )


def run(args: argparse.Namespace) -> int:
    """Prints what there is, from files alone."""
    shown = ["kernels", "experiments", "models", "devices"] if args.what == "all" else [args.what]
    for index, what in enumerate(shown):
        if index:
            print()
        if len(shown) > 1:
            print(f"{what}:")
        for line in _list_kernels(folded=args.what == "all") if what == "kernels" else _LISTS[what]():
            print(f"  {line}" if len(shown) > 1 else line)
    return 0


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _list_kernels(folded: bool) -> list[str]:
    """Versions that are here, each with what it is, and in a line those that are not. folded: how to get what is not
    installed is left to `list kernels`."""
    from mla_var3.catalogue.registry import PEER, all_kernels, missing, standings
    from mla_var3.catalogue.retired import retired

    why = {kernel: missing(kernel) for kernel in all_kernels()}
    standing = standings()
    rows = [
        (
            k.label,
            k.layer,
            standing.get(k.label, "") if why[k] is None else "not installed",
            _summary(_about(k.path.read_text(encoding="utf-8"), k.design if k.language == PEER else "")),
        )
        for k in all_kernels()
    ]
    lines = _columns(rows)
    if unrun := _never_run():
        lines.append(unrun)
    if gone := retired():
        lines.append(f"(retired: {', '.join(_runs(gone))}; to any verb, their names say where their code is)")
    reasons = list(dict.fromkeys(reason for reason in why.values() if reason))
    if folded and len(reasons) > 1:
        return [*lines, f"({len(reasons)} are not installed: mla-var3 list kernels says how to get each)"]
    return [*lines, *(f"({reason})" for reason in reasons)]


def _never_run() -> str:
    """What holds of all versions on architectures that none has run on."""
    from mla_var3.device import Device

    marks: dict[str, list[str]] = {}
    for device in Device.all():
        if device.mark and device.arch not in marks.setdefault(device.mark, []):
            marks[device.mark].append(device.arch)
    return "; ".join(f"on {', '.join(sorted(archs))}: {mark}" for mark, archs in marks.items())


def _runs(labels: Iterable[str]) -> list[str]:
    """Labels with the versions of a design in one word: triton/x_v1, v2, v3 and v5 are `triton/x_v1..v3, v5`."""
    numbers: dict[str, list[int]] = {}
    for label in labels:
        design, _, version = re.sub(r"_v(\d+)$", r" \1", label).partition(" ")
        numbers.setdefault(design, []).append(int(version or 0))
    found = []
    for design, some in sorted(numbers.items()):
        some.sort()
        begins = [n for n in some if n - 1 not in some]
        ends = [n for n in some if n + 1 not in some]
        runs = [f"v{a}" if a == b else f"v{a}..v{b}" for a, b in zip(begins, ends, strict=True)]
        found.append(f"{design} {' '.join(runs)}")
    return found


def _about(source: str, peer: str) -> str:
    """A version's source from its docstring on: the file's, or that of the class that is the peer's plan."""
    classes = re.split(r"^class .*:\n", source, flags=re.MULTILINE)
    return next((text for text in classes[1:] if peer and f'    peer = "{peer}"\n' in text), source)


def _summary(source: str) -> str:
    """First sentence of the docstring that source begins with, read without importing it."""
    match = re.match(r'\s*(?:#[^\n]*\n\s*)*r?"""\s*(.*?)\s*("""|\n\s*\n|(?<=\.)\s)', source, re.DOTALL)
    return " ".join(match[1].split()) if match else ""


def _list_experiments() -> list[str]:
    return _yaml_comments("experiment")


def _list_models() -> list[str]:
    return _yaml_comments("model")


def _yaml_comments(group: str) -> list[str]:
    """Names of a config group's files, each with its description, or its first comment."""
    from mla_var3 import paths

    files = {name: paths.option_file(group, name) for name in paths.options(group)}
    # A file in another encoding is named where it is used; here it is one of many.
    texts = {name: path.read_text(encoding="utf-8", errors="replace") for name, path in files.items()}
    return _columns([(name, _said(text)) for name, text in texts.items()])


def _said(text: str) -> str:
    match = re.search(r"^description: *(.+)", text, re.M) or re.match(r"# ?(.*)", text)
    return match[1].strip() if match else ""


def _list_devices() -> list[str]:
    from mla_var3.device import Device

    return _columns([(d.key, d.arch, d.name, d.mark) for d in Device.all()])


_LISTS = {"experiments": _list_experiments, "models": _list_models, "devices": _list_devices}
