"""The one exception a user sees, a sentence that says what is wrong and what to do; and verdicts, which say why not."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import util
from pathlib import Path

from mla_var3.names import in_order

EXIT_USER_ERROR = 2

#: What the package itself and its extras bring, as it is imported.
EXTRAS = {
    "": ("torch", "triton", "tvm_ffi", "elftools"),
    "cute": ("cutlass",),
    "cutile": ("cuda.tile",),
    "jax": ("jax", "jax_tvm_ffi"),
    "lab": (
        "altair", "hydra", "markdown_it", "numpy", "omegaconf", "packaging", "pandas", "pyarrow", "pydantic", "rich",
        "vl_convert", "yaml",
    ),
    "ray": ("ray",),
}  # fmt: skip


class UserError(Exception):
    """A mistake in what was asked for. The command line prints it as one line and exits with 2."""


class Unsupported(UserError):
    """The kernel cannot run this problem, or not on this device; the sweep records it as `skipped`."""


class Infeasible(UserError):
    """The tiling breaks a limit of the problem or the device; the sweep records it as `infeasible`."""


def install(extra: str) -> str:
    """The command that gets an extra of this package ("": the package alone), of a checkout where this is one: the end
    of a sentence about what is missing."""
    extra = f"[{extra}]" if extra else ""
    root = Path(__file__).resolve().parents[2]
    if not (root / "pyproject.toml").is_file() or not (root / "src" / "mla_var3").is_dir():
        return f"pip install 'mla_var3{extra}'"
    return f"pip install -e '{'.' if Path.cwd() == root else root}{extra}'"


def importable(package: str) -> bool:
    """Whether a package is here; it is not imported, but those that it lies in are."""
    try:
        return util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def absent(what: str, module: str) -> str | None:
    """One sentence: `what` needs a package that is not installed, and what installs it; None when neither this package
    nor an extra of it does, or when the package is here and lacks such a module."""
    for extra, modules in EXTRAS.items():
        found = next((name for name in modules if module == name or module.startswith(f"{name}.")), None)
        if found is not None and not importable(found):
            return f"{what} needs the package {found}, which is not installed: {install(extra)}."
    return None


#: Choices are all listed where they take no more characters than this; of longer lists the nearest few are named.
_LISTED, _NAMED = 160, 3


def nearest(word: str, choices: Iterable[str]) -> str:
    """End of a sentence that names the closest valid choice, where one is close, and the others: all of a short list,
    the nearest three of a long one."""
    options = in_order(choices)
    near = difflib.get_close_matches(word, options, n=_NAMED, cutoff=0.0)
    close = difflib.get_close_matches(word, near, n=1, cutoff=0.5)
    everything = ", ".join(options)
    if len(everything) <= _LISTED:
        others = f"valid: {everything}"
    elif close:
        others = f"also near, of {len(options)}: {', '.join(near[1:])}"
    else:
        others = f"the nearest of {len(options)} are {', '.join(near)}"
    return f"did you mean {close[0]!r}? ({others})" if close else others


@dataclass(frozen=True)
class Verdict:
    """True or false, and why: `if not verdict: print(verdict.reason)`."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok

    @classmethod
    def yes(cls) -> Verdict:
        return cls(True)

    @classmethod
    def no(cls, reason: str) -> Verdict:
        return cls(False, reason)

    def require(self, error: type[UserError] = Infeasible) -> None:
        """Raises `error` with the reason when false."""
        if not self.ok:
            raise error(self.reason)
