"""`mla-var3`: the verbs. This module imports nothing heavy; a verb's room is loaded when the verb runs."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from mla_var3.errors import EXIT_USER_ERROR, UserError, nearest

PROG = "mla-var3"
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

#: Verb -> what it does, in the order of the help.
VERBS = {
    "list": "kernel versions, experiments, models, devices: what there is",
    "doctor": "what of this machine works for which language, and what to do about the rest",
    "check": "is a kernel right? on the GPU, or on the CPU where its language runs there",
    "bench": "time kernels on one problem, or --calibrate to measure the limits of this GPU",
    "compile": "registers, shared memory, spills and instructions for a device, without a GPU",
    "compare": "tables from record files",
    "report": "records as one page: which kernel is fastest where, by how much, how far from the limit",
    "profile": "why is a kernel as fast as it is? roofline, counters, source lines, time axis",
    "diagnose": "the reason why a kernel is slow, from profiles and records, and what has helped before",
    "diff": "two versions side by side: resources, instructions, the inner loop's SASS, counters, times",
    "sweep": "run an experiment: experiment in, records and tables out",
    "dispatch": "which version and knobs for a problem, from records; make its table",
    "clone": "copy a version under the next version number, ready to be changed",
    "devlog": "start, check, cite and render entries of the development log",
    "knowledge": "what was learned: entries that fit a kernel; check and compile the pages",
}

DESCRIPTION = "A laboratory for Multi-head Latent Attention kernels."

EXAMPLES = """\
examples:
  mla-var3 sweep experiment=quickstart             compile or measure a first comparison
  mla-var3 check triton/flash_mla --b 2 --t 300    is it right?
  mla-var3 bench 'cute-dsl/*' --b 128 --h 128      how fast, beside the limits of this GPU
  mla-var3 compile cute-dsl/flash_mla --device h200 --keep sass --out out/sass
  mla-var3 clone cute-dsl/flash_mla                start the next version
Each verb has its own --help."""

SWEEP_HELP = """\
usage: mla-var3 sweep [experiment=NAME] [GROUP=CHOICE ...] [KEY=VALUE ...] [-m]

Runs every kernel on every cell of an experiment. With the target GPU in the machine: checked and timed. Without it:
compiled for the target, checked on the CPU at small sizes, and shown beside recorded measurements.

groups (conf/<group>/*.yaml; a conf/ folder where you start adds to them):
{groups}

keys:
  problem.b=64             set a field in every cell: b s t h h_kv k p d n causal page dtype lengths
  tiling.num_splits=4      set a knob in every kernel that has it
  tilings=[...]            run every kernel in each of these, in turn: 'tilings=[{{num_splits: 4}},{{}}]'
  bench.burst_rounds=9     a field of BenchSettings; bench.tune=true tries a version's tilings first
  profile.launches=3       a field of the chosen profile; each passed point is profiled after all were timed
  part=1/4                 every 4th cell from the 1st; the other parts later, with resume=true
  resume=true              skip points whose records exist already
  results_dir=results      measured records: <results_dir>/<device>/<date>-<experiment>.jsonl
  compile_dir=out/results  the same for compiled points and CPU runs
  jobs=0                   compiler processes; 0 is one a core

kernels= also takes names and wildcards: kernels=cute-dsl/flash_mla,triton/*
kernels=dispatch is what the dispatcher picks for each cell; beside others: kernels=dispatch,cute
'kernels.only=[{{kernels: peer/*, s: 1}}]' keeps versions to the cells with these fields
-m runs every combination of comma-separated values; --cfg job prints the configuration instead of running it.

examples:
  mla-var3 sweep experiment=decode
  mla-var3 sweep experiment=decode kernels=cute problem.b=64 tiling.num_splits=4 resume=true
  mla-var3 sweep -m experiment=ladder kernels=cute,triton problem.b=32,128
  mla-var3 sweep experiment=compile_matrix jobs=8
"""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, with the nearest valid choice."""

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (-\S+)", message)
        invalid = re.match(r"argument (\S+): invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if unknown:
            options = [text for action in self._actions for text in action.option_strings]
            word = unknown[1].split("=")[0]
            message = f"there is no option {word}: {nearest(word, options)}"
        elif invalid:
            choices = [part.strip().strip("'") for part in invalid[3].split(",")]
            message = f"{invalid[1]} {invalid[2]!r} is unknown: {nearest(invalid[2], choices)}"
        raise UserError(f"{message} ({self.prog} --help).")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb and returns the exit status: 0, 1 (a check failed), 2 (a mistake in the request), 130 (Ctrl-C)."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        status = dispatch(words)
        sys.stdout.flush()
        return status
    except UserError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print(f"{PROG}: stopped", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read has gone (`| head`): nothing more can be said, and Python must not try at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE


def dispatch(words: list[str]) -> int:
    """The verb's function, found by its name; verbs that others own get their words untouched."""
    if words[:1] == ["--bundle"] and len(words) > 2:
        from mla_var3.toolchain.bundle import open_bundle

        open_bundle(Path(words[1]))
        words = words[2:]
    if not words or words[0] in ("-h", "--help", "help"):
        print_help()
        return 0
    if words[0] in ("-V", "--version"):
        from mla_var3 import __version__

        print(f"{PROG} {__version__}")
        return 0
    verb, rest = words[0], words[1:]
    if verb not in VERBS:
        raise UserError(f"there is no verb {verb!r}: {nearest(verb, VERBS)}.")
    if verb == "sweep":
        if any(word in ("-h", "--help") for word in rest):
            print(SWEEP_HELP.format(groups=_groups_text()))
            return 0
        from mla_var3.sweep.run import main as sweep

        return sweep(rest)
    if verb == "devlog":
        from mla_var3.devlog.cli import main as devlog

        return devlog(rest)
    if verb == "knowledge":
        from mla_var3.knowledge.cli import main as knowledge

        return knowledge(rest)
    if verb == "dispatch":
        from mla_var3.dispatch.verb import main as dispatch_verb

        return dispatch_verb(rest)
    args = _parser(verb).parse_args(rest)
    if verb == "list":
        return list_things(args)
    if verb == "clone":
        from mla_var3 import clone

        return clone.run(args)
    if verb == "doctor":
        from mla_var3 import doctor

        return doctor.run(args)
    if verb == "report":
        from mla_var3.report import verb as report

        return report.run(args)
    if verb == "diagnose":
        from mla_var3.diagnosis import verb as diagnosis

        return diagnosis.run(args)
    if verb == "diff":
        from mla_var3.diagnosis import compare

        return compare.run(args)
    from mla_var3 import verbs

    return int(getattr(verbs, verb)(args))


def print_help() -> None:
    print(f"usage: {PROG} VERB ...\n\n{DESCRIPTION}\n\nverbs:")
    for verb, text in VERBS.items():
        print(f"  {verb:11}{text}")
    print(f"\n{EXAMPLES}")


# ---------------------------------------------------------------- arguments
def _parser(verb: str) -> Parser:
    parser = Parser(
        prog=f"{PROG} {verb}",
        description=VERBS[verb][:1].upper() + VERBS[verb][1:] + ".",
        epilog=_EPILOGS.get(verb),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _ARGUMENTS[verb](parser)
    return parser


def _kernels(parser: argparse.ArgumentParser, count: str) -> None:
    parser.add_argument("kernels", nargs=count, metavar="KERNEL", help="language/design[_vN]; * and ? are wildcards")


def add_problem(parser: argparse.ArgumentParser) -> None:
    """The options that describe a problem; read them with `mla_var3.verbs.problem_of`."""
    group = parser.add_argument_group("problem")
    group.add_argument("--model", metavar="NAME", help="geometry: deepseek-v3 (default), deepseek-v2-lite, kimi-k2")
    for name, text in (
        ("b", "requests"),
        ("s", "query tokens of each request"),
        ("t", "cached tokens of each request"),
        ("h", "query heads"),
        ("h_kv", "latent caches"),
        ("k", "latent columns"),
        ("p", "rope columns"),
        ("d", "head dim"),
        ("n", "tokens of each request that are decompressed (design mla_var6_plus)"),
    ):
        names = [f"--{name}"] + ([f"--{name.replace('_', '-')}"] if "_" in name else [])
        group.add_argument(*names, type=int, metavar="N", help=text)
    group.add_argument("--lengths", metavar="L", help="ragged, normal, edges (':SEED' may follow), or a list: 70,0,128")
    group.add_argument("--causal", action="store_true", default=None, help="query token i sees keys 0 .. t - s + i")
    group.add_argument("--page", metavar="N", help="tokens a cache page, or 'contiguous'")
    group.add_argument("--dtype", metavar="D", help="bf16 (default), fp16 or fp32")


def add_tiling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tiling", metavar="K=V,...", default="", help="knobs that differ from the default tiling")


def _list(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what", nargs="?", default="all", choices=["all", "kernels", "experiments", "models", "devices"]
    )


def _doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", default="h200", metavar="KEY", help="device to try the compilers for (default h200)"
    )
    parser.add_argument("--no-compile", action="store_true", help="skip the trial compilations")


def _check(parser: argparse.ArgumentParser) -> None:
    _kernels(parser, "+")
    add_problem(parser)
    add_tiling(parser)
    parser.add_argument(
        "--device", default="auto", choices=["auto", "cuda", "cpu"], help="where to run (default: a GPU)"
    )
    parser.add_argument("--quick", action="store_true", help="the short list of cases")
    parser.add_argument("--cases", metavar="A,B", help="these cases only; a wrong name lists them")
    parser.add_argument("--seed", type=int, help="of the inputs; a fresh one by default, and printed")
    from mla_var3.diagnosis import debugging

    debugging.add_arguments(parser)


def _bench(parser: argparse.ArgumentParser) -> None:
    _kernels(parser, "*")
    add_problem(parser)
    add_tiling(parser)
    parser.add_argument("--calibrate", action="store_true", help="measure this GPU's limits instead of kernels")
    parser.add_argument("--preset", default="standard", help="standard, or fast: about half a second a kernel")
    parser.add_argument("--tune", action="store_true", help="try the version's tilings first")
    parser.add_argument(
        "--results-dir", default="results", metavar="DIR", help="records go to DIR/<device>/<date>-bench.jsonl"
    )


def _compile(parser: argparse.ArgumentParser) -> None:
    _kernels(parser, "+")
    add_problem(parser)
    add_tiling(parser)
    parser.add_argument(
        "--device",
        default="auto",
        metavar="KEY",
        help="a key of `mla-var3 list devices` (default: what is here, else h200)",
    )
    parser.add_argument("--keep", default="", metavar="KIND,...", help="keep artefacts: ptx, cubin, sass, tileir, mlir")
    parser.add_argument(
        "--out", default="out/compile", metavar="DIR", help="where kept artefacts go (default out/compile)"
    )
    parser.add_argument("--jobs", type=int, default=0, metavar="N", help="compiler processes; 0 is one a core")
    from mla_var3.toolchain import bundle

    bundle.add_arguments(parser)


def _compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="record files or folders (default: results/ and the shipped ones)"
    )
    parser.add_argument("--kernels", nargs="+", metavar="KERNEL", help="only these; exactly two also get their ratios")
    parser.add_argument("--cells", nargs="+", metavar="CELL", help="only these: b128_s1_h128_t4096; wildcards allowed")
    parser.add_argument("--device", metavar="KEY", help="only records of this device")
    parser.add_argument("--all", action="store_true", help="every record, not only the newest of each kernel and cell")
    parser.add_argument("--resources", action="store_true", help="also what the kernels take of the device")


def _profile(parser: argparse.ArgumentParser) -> None:
    from mla_var3.profiling import verb

    _kernels(parser, "+")
    add_problem(parser)
    add_tiling(parser)
    verb.add_arguments(parser)
    parser.epilog = verb.EPILOG


def _diagnose(parser: argparse.ArgumentParser) -> None:
    from mla_var3.diagnosis import verb

    verb.add_arguments(parser)
    add_problem(parser)
    parser.epilog = verb.EPILOG


def _diff(parser: argparse.ArgumentParser) -> None:
    from mla_var3.diagnosis import compare

    compare.add_arguments(parser)
    add_problem(parser)
    add_tiling(parser)
    parser.epilog = compare.EPILOG


def _report(parser: argparse.ArgumentParser) -> None:
    from mla_var3.report import verb

    verb.add_arguments(parser)
    parser.epilog = verb.EPILOG


def _clone(parser: argparse.ArgumentParser) -> None:
    from mla_var3 import clone

    clone.add_arguments(parser)


_ARGUMENTS = {
    "list": _list,
    "doctor": _doctor,
    "check": _check,
    "bench": _bench,
    "compile": _compile,
    "compare": _compare,
    "profile": _profile,
    "diagnose": _diagnose,
    "diff": _diff,
    "report": _report,
    "clone": _clone,
}

_EPILOGS = {
    "list": "example: mla-var3 list kernels",
    "doctor": "Ends with 0 unless the installation itself is broken.",
    "check": """\
examples:
  mla-var3 check triton/flash_mla --b 2 --t 300 --h 16
  mla-var3 check 'cute-dsl/*' --lengths 70,0,128 --s 4 --causal
  mla-var3 check cute-dsl/flash_mla_v1 --b 2 --t 300 --sanitize racecheck
Ends with 1 when a kernel is wrong.""",
    "bench": """\
examples:
  mla-var3 bench cute-dsl/flash_mla triton/flash_mla --b 128 --h 128 --t 4096
  mla-var3 bench '*' --b 1 --t 65536 --preset fast
  mla-var3 bench --calibrate""",
    "compile": """\
examples:
  mla-var3 compile '*/flash_mla' --device h200
  mla-var3 compile cute-dsl/flash_mla --h 16 --keep ptx,sass --out out/sass --tiling num_splits=4""",
    "compare": """\
examples:
  mla-var3 compare
  mla-var3 compare results/h200 --kernels cute-dsl/flash_mla triton/flash_mla
  mla-var3 compare --cells 'b128_*' --device h200""",
    "clone": """\
examples:
  mla-var3 clone triton/flash_mla        makes triton/flash_mla_v1, or the next free one
  mla-var3 clone cute-dsl/flash_mla_v1 5""",
}


# ---------------------------------------------------------------- list
def list_things(args: argparse.Namespace) -> int:
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

    rows = []
    for name in paths.options(group):
        path = next(p for folder in paths.conf_dirs() if (p := folder / group / f"{name}.yaml").is_file())
        rows.append((name, _said(path.read_text(encoding="utf-8"))))
    return _columns(rows)


def _said(text: str) -> str:
    match = re.search(r"^description: *(.+)", text, re.M) or re.match(r"# ?(.*)", text)
    return match[1].strip() if match else ""


def _list_devices() -> list[str]:
    from mla_var3.device import Device

    return _columns([(d.key, d.arch, d.name) for d in Device.all()])


def _groups_text() -> str:
    """The config groups and their choices, for the help of sweep."""
    from mla_var3 import paths
    from mla_var3.device import Device

    lines = []
    for group in ("experiment", "kernels", "model", "device", "bench", "profile"):
        names = paths.options(group)
        if group == "device":
            names += [d.key for d in Device.all()]
        lines.append(f"  {group:11}{', '.join(names)}")
    return "\n".join(lines)


_LISTS = {"kernels": _list_kernels, "experiments": _list_experiments, "models": _list_models, "devices": _list_devices}


if __name__ == "__main__":
    raise SystemExit(main())
