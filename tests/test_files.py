"""mla_var3.files: a full disk is told once, in words that say what to do."""

from __future__ import annotations

import errno
import os
import tempfile
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from mla_var3 import cli, files
from mla_var3.toolchain import pool, sass

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files that has no byte left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(files.shutil, "disk_usage", lambda folder: Usage(65536, 65536, 0))
    return tmp_path


def refuse(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_only_a_full_disk_is_one() -> None:
    assert files.no_space() is None
    assert files.no_space(OSError(errno.EACCES, "no")) is None and files.no_space(KeyError()) is None
    said = files.no_space(OSError(errno.ENOSPC, "no space", "/data/x.cubin"))
    assert said is not None and said.startswith("the disk is full (/data/x.cubin cannot be written): free some space")


def test_what_a_tool_could_not_write(full: Path, tmp_path: Path) -> None:
    cubin = tmp_path / "x.cubin"
    cubin.write_bytes(b"no cubin")
    with pytest.raises(
        files.UserError, match=r"the disk is full \(temporary files go to .*\): free some space, or name"
    ):
        sass.disassemble(cubin)


def test_a_worker_and_a_verb_say_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    told = pool._attempt(refuse, None)
    assert told.error_type == "UserError" and told.error.startswith("the disk is full (temporary files go to ")
    monkeypatch.setattr(cli.main.__globals__["mistakes"], "show_if_wanted", lambda error: None)
    monkeypatch.setitem(cli.main.__globals__, "run_words", refuse)
    assert cli.main(["list"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("mla-var3: the disk is full") and said.count("\n") == 1
