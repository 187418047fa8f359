"""Files that people name: what cannot be read is named in one sentence; a place that cannot take a file is found before
the work, and what stands there is never torn."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_var3.errors import UserError

if TYPE_CHECKING:
    import yaml

#: Fewer bytes than a compiler's temporary files take.
_LEAST_SPACE = 1 << 20


def cause(error: OSError) -> str:
    """Why a file could not be read or written, in words."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return "the disk is full" if full else (error.strerror or str(error)).lower()


def no_space(error: BaseException | None = None) -> str | None:
    """One sentence about a full disk, where `error` says that it is full; without an error, where temporary files have
    no room. None where neither is so."""
    said = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    try:
        folder = tempfile.gettempdir()
        if not said and (error is not None or shutil.disk_usage(folder).free > _LEAST_SPACE):
            return None
    except OSError:  # no folder takes a file
        folder = os.environ.get("TMPDIR", "/tmp")
    named = error.filename if isinstance(error, OSError) and isinstance(error.filename, str) else None
    where = f"{named} cannot be written" if named else f"temporary files go to {folder}"
    return f"the disk is full ({where}): free some space, or name another folder in TMPDIR."


def read_bytes(path: Path) -> bytes:
    """What a file holds. Raises `UserError` that names it where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {cause(error)}; give another, or mend it.") from error


def read_text(path: Path) -> str:
    """The text of a file. Raises `UserError` that names it where it cannot be read or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (byte {error.start}): save it in that encoding.") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {cause(error)}; give another, or mend it.") from error


def read_yaml(path: Path) -> dict[str, Any]:
    """The keys and values of a config file; nothing where it is empty. Raises `UserError` that names the file where it
    cannot be read, is not UTF-8, not YAML, or has no keys."""
    import yaml

    try:
        said = yaml.safe_load(read_text(path))
    except yaml.YAMLError as error:
        raise UserError(invalid_yaml(error, path)) from error
    if said is not None and not isinstance(said, dict):
        kind = "a list" if isinstance(said, list) else f"a {type(said).__name__}"
        raise UserError(f"{path} is {kind}: a config file has keys with values, a line each, as in `h: 128`.")
    return said or {}


def invalid_yaml(error: yaml.YAMLError, path: Path | None = None) -> str:
    """One sentence about what a parser found. path: the file that it read; default: as the error names it."""
    mark = getattr(error, "problem_mark", None)
    where = path or (mark.name if mark is not None else "a config file")
    line = f", line {mark.line + 1}" if mark is not None else ""
    said = getattr(error, "problem", None) or str(error).partition("\n")[0]
    return f"{where}{line} is not valid yaml: {said}; correct that line."


def check_folder(folder: Path | str, name: str) -> None:
    """Raises `UserError` where no file can be made in a folder; one that is not there yet is judged by what it would be
    made in. Leaves nothing behind. name: how the user gives the folder ("--out")."""
    folder = here = Path(folder)
    try:
        while not here.exists() and here != here.parent:
            here = here.parent
        with tempfile.TemporaryFile(dir=here):
            pass
    except OSError as error:
        at = "" if here == folder else f" ({here})"
        raise UserError(f"{name} {folder} cannot be written{at}: {cause(error)}; give another folder.") from error


def check_file(path: Path | str, name: str) -> None:
    """As `check_folder`, for a file that `write_whole` will write."""
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{name} {path} is a folder: give a file.")
    check_folder(path.parent, name)


def write_whole(path: Path | str, data: str | bytes) -> None:
    """Writes a file aside and renames it, with the folder where it is missing: whoever reads sees the old file or the
    new one, and where it cannot be written the old one stays. Raises `UserError`."""
    path = Path(path)
    raw = data.encode() if isinstance(data, str) else data
    aside: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():  # a pipe or a device: nothing to keep, and not to be replaced
            path.write_bytes(raw)
            return
        target = path.resolve()  # of a link: the file that it leads to
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as file:
            aside = Path(file.name)
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(aside, target.stat().st_mode & 0o777 if target.exists() else 0o644)
        os.replace(aside, target)
    except OSError as error:
        if aside is not None:
            with contextlib.suppress(OSError):
                aside.unlink()
        kept = "; what was there is unchanged" if path.is_file() else ""
        raise UserError(f"cannot write {path}: {cause(error)}{kept}.") from error
