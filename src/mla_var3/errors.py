"""The one exception a user sees: a sentence that says what is wrong and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

EXIT_USER_ERROR = 2


class UserError(Exception):
    """A mistake in what was asked for. The command line prints it as one line and exits with 2."""


class Unsupported(UserError):
    """The kernel cannot run this problem, or not on this device; the sweep records it as `skipped`."""


class Infeasible(UserError):
    """The tiling breaks a limit of the problem or the device; the sweep records it as `infeasible`."""


def nearest(word: str, choices: Iterable[str]) -> str:
    """End of a sentence that names the closest valid choice, or all of them when none is close."""
    options = sorted(set(choices))
    close = difflib.get_close_matches(word, options, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}? (valid: {', '.join(options)})"
    return f"valid: {', '.join(options)}"
