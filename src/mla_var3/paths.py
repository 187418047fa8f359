"""Where configs and shipped records lie: in the repository when installed from it, else inside the package."""

from __future__ import annotations

import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def package() -> Path:
    """The folder of this package."""
    return _PACKAGE


def import_root() -> Path:
    """The folder that this package is imported from."""
    return _PACKAGE.parent


def python_path(source: Path | None = None) -> str:
    """PYTHONPATH of a process that imports the package as it lies in `source`, by default as it is imported here: that
    folder in front of what is on the path already."""
    first = str(source or import_root())
    others = (part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part and part != first)
    return os.pathsep.join((first, *others))


def repo_root() -> Path | None:
    """The repository this package is run from, or None when it was installed from a wheel."""
    root = _PACKAGE.parents[1]
    return root if (root / "conf" / "sweep.yaml").is_file() and _PACKAGE.parent.name == "src" else None


def conf_dir() -> Path:
    """The folder of `sweep.yaml` and its groups."""
    root = repo_root()
    return _PACKAGE / "data" / "conf" if root is None else root / "conf"


def user_conf_dir() -> Path | None:
    """`conf/` in the current folder, when there is one and it is not the shipped one: its files add to the groups."""
    here = Path.cwd() / "conf"
    return here if here.is_dir() and here.resolve() != conf_dir().resolve() else None


def conf_dirs() -> list[Path]:
    """Every folder that configs are searched in, the shipped one first."""
    user = user_conf_dir()
    return [conf_dir(), *([user] if user is not None else [])]


def kernel_dirs() -> list[Path]:
    """Every folder that versions are found in, as `<language>/<layer>/<design>/<version>/`: the package's own, and
    beside an installed package `kernels/` in the current folder, where somebody's own versions lie."""
    return [_PACKAGE / "kernel", *([Path.cwd() / "kernels"] if repo_root() is None else [])]


def shipped_results_dir() -> Path:
    """The records that the project ships, one folder a device: in a checkout all, in an installed package those that
    the dispatcher rests on and those of quickstart's cells."""
    root = repo_root()
    return _PACKAGE / "data" / "results" if root is None else root / "results"


def records_elsewhere() -> str | None:
    """One sentence for who reads shipped records in an installed package, which has few of them; None in a checkout."""
    if repo_root() is not None:
        return None
    return (
        "an installed package has the dispatcher's records and those of quickstart's cells alone: all records are in "
        "results/ of a checkout of the project, so give that folder as FILE."
    )


def options(group: str) -> list[str]:
    """Names of the yaml files of a config group, sorted."""
    return sorted({path.stem for folder in conf_dirs() for path in (folder / group).glob("*.yaml")})


def option_file(group: str, name: str) -> Path:
    """The file of one of `options`."""
    return next(path for folder in conf_dirs() if (path := folder / group / f"{name}.yaml").is_file())
