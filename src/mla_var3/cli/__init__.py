"""`mla-var3`: one file a verb, found by walking this folder.

A verb's file has `HELP`, one line, and either `add_arguments(parser)` and `run(args)`, with an `EPILOG` where examples
help, or `main(words)` where it has actions of its own. Files are imported when their verb is run or the verbs are
listed, and import nothing heavy by themselves.
"""

from __future__ import annotations

from mla_var3.cli._main import EXIT_BROKEN_PIPE, EXIT_INTERRUPTED, PROG, load, main, parser_of, print_help, verbs

__all__ = ["EXIT_BROKEN_PIPE", "EXIT_INTERRUPTED", "PROG", "load", "main", "parser_of", "print_help", "verbs"]
