"""What several verbs take: the parser, and the options that describe kernels, a problem and a tiling."""

from __future__ import annotations

import argparse
import ast
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from mla_var3.errors import UserError, nearest

if TYPE_CHECKING:
    from mla_var3.catalogue.registry import KernelId
    from mla_var3.device import Device
    from mla_var3.runtime.types import Tiling
    from mla_var3.workload import Workload

#: What takes no longer than this is not spoken of.
QUIET_S = 2.0


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Says on standard error what is being done, once it has taken `QUIET_S`."""
    timer = threading.Timer(QUIET_S, lambda: print(f"{what} ...", file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, with the nearest valid choice."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        # What `"$NAME"` of a shell gives where NAME is not set; an option that gets it is as one that is left out.
        if any(not word and not before.startswith("-") for before, word in zip(["", *words], words, strict=False)):
            self.error("one of the names is empty: leave it out, or say what it is")
        return super().parse_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (-\S+)", message)
        invalid = re.match(r"argument (\S+): invalid choice: '([^']*)' \(choose from (.*)\)", message)
        number = re.match(r"argument (\S+): invalid (int|float) value: ('.*')", message)
        alone = re.match(r"argument (\S+): expected (?:one|at least one) argument", message)
        if unknown:
            # Of subcommands too: what they do not know comes up to the parser above them.
            below = [p for a in self._actions if isinstance(a.choices, dict) for p in a.choices.values()]
            options = [text for parser in (self, *below) for a in parser._actions for text in a.option_strings]
            word = unknown[1].split("=")[0]
            message = f"there is no option {word}: {nearest(word, options)}"
        elif invalid:
            choices = [part.strip().strip("'") for part in invalid[3].split(",")]
            message = f"{invalid[1]} {invalid[2]!r} is unknown: {nearest(invalid[2], choices)}"
        elif number:
            message = f"{number[1]} {number[3]} is not a {'whole ' * (number[2] == 'int')}number"
        elif alone:
            message = f"{alone[1]} takes a value; one that begins with a minus is written {alone[1]}=-1"
        raise UserError(f"{message} ({self.prog} --help).")


def add_verb(verbs: Any, name: str, says: str, **options: Any) -> argparse.ArgumentParser:
    """The parser of a verb's own verb. says: in the list of verbs, and at the head of its help."""
    made: argparse.ArgumentParser = verbs.add_parser(
        name, help=says, description=f"{says[:1].upper()}{says[1:]}.", **options
    )
    return made


def add_kernels(parser: argparse.ArgumentParser, count: str) -> None:
    """The kernels, `count` as argparse's nargs."""
    parser.add_argument("kernels", nargs=count, metavar="KERNEL", help="language/design[_vN]; * and ? are wildcards")


def add_problem(parser: argparse.ArgumentParser) -> None:
    """The options that describe a problem; read them with `problem_of`."""
    from mla_var3.lab.naming import SIZES
    from mla_var3.workload import get, names

    group = parser.add_argument_group("problem")
    group.add_argument("--model", metavar="NAME", help="heads and widths: deepseek-v3 (default), ... (`list models`)")
    for name, text in SIZES.items():
        spelled = [f"--{name}"] + ([f"--{name.replace('_', '-')}"] if "_" in name else [])
        group.add_argument(*spelled, type=int, metavar="N", help=text)
    group.add_argument(
        "--batch", metavar="WORD", dest="problem", action=Field, default="",
        help="b, s and t in one word, as vLLM's benchmark has it: 128q1s1k, or 2q1k_32q1s1k",
    )  # fmt: skip
    group.add_argument(
        "--lengths",
        metavar="L",
        help="ragged, normal, edges (':SEED' may follow), or a list: 70,0,128, of prompts also QUERIES:KEYS",
    )
    group.add_argument("--causal", action="store_true", default=None, help="query token i sees keys 0 .. t - s + i")
    group.add_argument("--page", metavar="N", help="tokens a cache page, or 'contiguous'")
    group.add_argument("--dtype", metavar="D", help="bf16 (default), fp16 or fp32")
    group.add_argument(
        "--problem", metavar="K=V,...", default="", action=Field, help="fields of any workload, by their names"
    )
    # Each of them is an option too: `--rows 4096` is `--problem rows=4096`. They are too many to be listed in a help.
    taken = {*SIZES, "causal", "dtype", "lengths", "page"}
    for name in sorted({name for one in names() for name in get(one).problem.fields()} - taken):
        group.add_argument(
            *{f"--{name}", f"--{name.replace('_', '-')}"}, dest="problem", action=Field, nargs="?", const="true",
            help=argparse.SUPPRESS,
        )  # fmt: skip


class Field(argparse.Action):
    """Fields of a problem, by `--problem` or by options of their own, one behind another. Without a value one is
    true."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        name = (option_string or "").lstrip("-").replace("-", "_")
        said = [getattr(namespace, self.dest), values if name == self.dest else f"{name}={values}"]
        setattr(namespace, self.dest, ",".join(filter(None, said)))


def add_tiling(parser: argparse.ArgumentParser) -> None:
    """The knobs; read them with `tiling_fields`."""
    parser.add_argument("--tiling", metavar="K=V,...", default="", help="knobs that differ from the default tiling")


def given_fields(args: argparse.Namespace, workload: Workload | None = None) -> dict[str, Any]:
    """Fields of a problem that the options of `add_problem` set, lengths and page as they are written apart; workload:
    whose fields a batch is to have."""
    from mla_var3.lab.naming import SIZES, with_batch

    named = {name: value for name in (*SIZES, "causal", "dtype") if (value := getattr(args, name)) is not None}
    fields = {**named, **fields_of(args.problem, "--problem")}
    if "batch" in fields and args.lengths is not None:
        raise UserError(f"batch {fields['batch']!r} says the lengths: leave --lengths out.")
    return with_batch(fields, None if workload is None else workload.problem)


def problem_of(args: argparse.Namespace, workload: Workload | None = None, **defaults: Any) -> Any:
    """The problem that the options of `add_problem` describe, over `defaults`; of decode unless a workload is given."""
    from mla_var3.workload import DEFAULT, get

    workload = workload or get(DEFAULT)
    return workload.problem.from_record({**defaults, **_asked(args, workload)})


def problem_for(args: argparse.Namespace, kernels: Sequence[KernelId], **defaults: Any) -> Any:
    """The problem that the options of `add_problem` describe, for versions of one workload: what no option sets is as
    `lab.sweep.plan.problem_for` has it, `defaults` before the workload's own."""
    from mla_var3.lab.sweep import plan

    workload = workload_of(kernels)
    return plan.problem_for(kernels, workload, _asked(args, workload), defaults)


def says_problem(args: argparse.Namespace) -> bool:
    """Whether an option of `add_problem` was given."""
    return bool(given_fields(args)) or any(value is not None for value in (args.page, args.lengths, args.model))


def _asked(args: argparse.Namespace, workload: Workload) -> dict[str, Any]:
    """Fields of a problem that options set."""
    from mla_var3.lab.naming import model_dims

    fields = given_fields(args, workload)
    if args.page is not None:
        fields["page"] = page_of(args)
    if args.lengths is not None:
        fields |= _lengths(args.lengths)
    # A problem's own heads and widths are those of the default model.
    return {**(model_dims(model_of(args), workload.problem) if args.model else {}), **fields}


def page_of(args: argparse.Namespace) -> int | None:
    """What `--page` says, None for a contiguous cache."""
    return None if args.page in ("contiguous", "none") else _integer("--page", args.page)


def model_of(args: argparse.Namespace) -> dict[str, Any]:
    """What the file of conf/model says that `--model` names."""
    from mla_var3 import paths
    from mla_var3.files import read_yaml

    name = args.model
    if name not in (models := paths.options("model")):
        raise UserError(f"--model {name!r} is unknown: {nearest(name, models)}.")
    return read_yaml(paths.option_file("model", name))


def workload_of(kernels: Sequence[KernelId]) -> Workload:
    """What versions of one workload compute; decode where none of their languages is installed."""
    from mla_var3.workload import DEFAULT, get

    return get(next(iter(by_workload(kernels)), DEFAULT))


def by_workload(kernels: Sequence[KernelId]) -> dict[str, list[KernelId]]:
    """The versions whose language is installed, by the name of what they compute, in the order given."""
    from mla_var3.catalogue import registry

    found: dict[str, list[KernelId]] = {}
    for kernel in kernels:
        if not registry.missing(kernel.language):
            found.setdefault(registry.get_plan(kernel).workload.name, []).append(kernel)
    return found


def _integer(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{name} {text!r} is not a whole number.") from None


def _lengths(text: str) -> dict[str, Any]:
    if ":" in text and re.fullmatch(r"[\d\s,:]+", text):
        pairs = [[_integer("--lengths", n.strip()) for n in part.split(":")] for part in text.split(",")]
        return {"b": len(pairs), "lengths": [pair[0] if len(pair) == 1 else pair for pair in pairs]}
    if re.fullmatch(r"[-+\d\s,.]+", text):
        lengths = [_integer("--lengths", part.strip()) for part in text.split(",")]
        if min(lengths) < 0:
            raise UserError(f"--lengths {text} has {min(lengths)}: give each request at least 0 tokens.")
        return {"b": len(lengths), "t": max(lengths), "lengths": lengths}
    name, _, seed = text.partition(":")
    return {"lengths": {"name": name, "seed": _integer("--lengths seed", seed) if seed else 0}}


def job_count(args: argparse.Namespace) -> int | None:
    """Processes of `--jobs`; None for one a core."""
    if args.jobs < 0:
        raise UserError(f"--jobs {args.jobs} is below 0: give a number of processes, or 0 for one a core.")
    return args.jobs or None


def tiling_fields(text: str) -> dict[str, Any]:
    """Fields of "tile_m=64,swapped=true"."""
    return fields_of(text, "--tiling")


def fields_of(text: str, option: str) -> dict[str, Any]:
    """Fields of the comma-separated KEY=VALUE words of an option."""
    fields: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in re.split(r",(?![^\[{]*[]}])", text))):  # not within a list
        name, equals, value = part.partition("=")
        if not equals:
            example = "tile_m=64,num_splits=4" if option == "--tiling" else "b=4,t=512"
            raise UserError(f"{option} {part!r} is not NAME=VALUE: write for example {option} {example}.")
        try:
            fields[name.strip()] = ast.literal_eval({"true": "True", "false": "False"}.get(value.lower(), value))
        except (ValueError, SyntaxError):
            fields[name.strip()] = value
    return fields


def tiling_of(plan_type: Any, problem: Any, device: Device | None, asked: dict[str, Any]) -> Tiling:
    """The version's default tiling with the fields that were asked for; an unknown field names the nearest."""
    from mla_var3.lab.knobs import knobs

    tiling: Tiling = plan_type(problem, None, device).tiling
    names = list(tiling.to_record())
    for name in asked:
        if name not in names:
            raise UserError(f"{plan_type.__name__} has no knob {name!r}: {nearest(name, names)}.")
    return knobs(tiling, asked)


def usable(patterns: list[str]) -> list[KernelId]:
    """The versions that patterns name and whose language is installed; the others are reported."""
    from mla_var3.catalogue import registry
    from mla_var3.lab.sweep.plan import select_kernels

    found = []
    for kernel in select_kernels(patterns):
        reason = registry.missing(kernel)
        if reason:
            print(f"{kernel.label}: skipped: {reason}", file=sys.stderr)
        else:
            found.append(kernel)
    if not found:
        raise UserError("none of these kernels can be used here: install their languages (mla-var3 doctor says how).")
    return found


def experiment_cells(name: str) -> list[Any]:
    """The problems of an experiment of `conf/experiment`."""
    from mla_var3.lab.sweep.config import compose
    from mla_var3.lab.sweep.plan import expand_cells

    return expand_cells(compose([f"experiment={name}"]))
