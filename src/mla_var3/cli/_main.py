"""Finding and running a verb. Not in the package itself: its verbs `list` and `compile` would hide Python's."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from mla_var3.cli.arguments import Parser
from mla_var3.errors import EXIT_USER_ERROR, UserError, absent, nearest
from mla_var3.files import cause, no_space
from mla_var3.toolchain import mistakes

PROG = "mla-var3"
TRACEBACK = "--traceback"
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

DESCRIPTION = "A laboratory for Multi-head Latent Attention kernels."

EXAMPLES = """\
examples:
  mla-var3 sweep experiment=quickstart             compile or measure a first comparison
  mla-var3 check triton/flash_mla --b 2 --t 300    is it right?
  mla-var3 bench 'cute-dsl/*' --b 128 --h 128      how fast, beside the limits of this GPU
  mla-var3 compile cute-dsl/flash_mla --device h200 --keep sass --out out/sass
  mla-var3 clone cute-dsl/flash_mla                start the next version
Each verb has its own --help. --traceback shows the whole traceback of an error."""


def verbs() -> list[str]:
    """The names of all verbs: the files of this folder but for `arguments` and those with an underscore."""
    names = (path.stem for path in Path(__file__).parent.glob("*.py"))
    return sorted(name for name in names if not name.startswith("_") and name != "arguments")


def load(verb: str) -> Any:
    """A verb's module."""
    return import_module(f"mla_var3.cli.{verb}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb and returns the exit status: 0, 1 (a check failed), 2 (a mistake in the request), 3 (not
    checked: see `check`), 130 (Ctrl-C)."""
    words = list(sys.argv[1:] if argv is None else argv)
    if TRACEBACK in words:
        words = [word for word in words if word != TRACEBACK]
        os.environ[mistakes.TRACEBACK] = "1"  # so that processes started from here know it too
    try:
        status = run_words(words)
        sys.stdout.flush()
        return status
    except MemoryError:
        print(f"{PROG}: this machine has not enough memory for that: ask for less at once.", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print(f"{PROG}: stopped", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read has gone (`| head`): nothing more can be said, and Python must not try at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except Exception as error:
        said = sentence(words, error)
        if said is None:
            raise
        mistakes.show_if_wanted(error)
        print(f"{PROG}: {said}", file=sys.stderr)
        return EXIT_USER_ERROR


def sentence(words: list[str], error: Exception) -> str | None:
    """What to say of a user's mistake, in the request or in a kernel's code; None where it is neither."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and (full := no_space(error)) is not None:
        return full
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename} cannot be read or written: {cause(error)} ({TRACEBACK} shows by what)."
    if isinstance(error, ModuleNotFoundError) and (said := absent(words[0], error.name or "")) is not None:
        return said
    mistake = mistakes.mistake_of(error)
    if mistake is None:
        return None
    more = [] if mistakes.wanted() else [f"({TRACEBACK} shows the calls that led there)"]
    return "\n  ".join([str(mistake), *getattr(error, "__notes__", []), *more])


def run_words(words: list[str]) -> int:
    """Runs the verb that the first word names; one with actions of its own gets the other words untouched."""
    if words[:1] == ["--bundle"]:
        if len(words) < 3:
            raise UserError(f"--bundle takes a folder, and a verb stands behind it: {PROG} --bundle DIR check KERNEL.")
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
    if verb not in verbs():
        raise UserError(f"there is no verb {verb!r}: {nearest(verb, verbs())}.")
    module = load(verb)
    if hasattr(module, "main"):
        return int(module.main(rest))
    return int(module.run(parser_of(verb).parse_args(rest)))


def print_help() -> None:
    """What `mla-var3 --help` says."""
    print(f"usage: {PROG} VERB ...\n\n{DESCRIPTION}\n\nverbs:")
    for verb in verbs():
        print(f"  {verb:11}{load(verb).HELP}")
    print(f"\n{EXAMPLES}")


def parser_of(verb: str) -> Parser:
    """The parser of a verb that has `add_arguments`."""
    module = load(verb)
    parser = Parser(
        prog=f"{PROG} {verb}",
        description=module.HELP[:1].upper() + module.HELP[1:] + ".",
        epilog=getattr(module, "EPILOG", None),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    return parser
