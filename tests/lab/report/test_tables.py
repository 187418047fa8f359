"""Tables on the terminal."""

from __future__ import annotations

import pytest

from mla_var3.lab.report import tables


def test_stages_of_one_name_are_told_apart() -> None:
    stages = [{"name": name, "registers": count} for name, count in (("main", 168), ("combine", 40), ("combine", 56))]
    row = tables.Compiled("cute-dsl/flash_mla_v23", "b1", "h200", {"stages": stages}, 1.0, [])
    merged = tables._merged([row])
    assert [one.kernel.partition(": ")[2] for one in merged] == ["combine 1", "combine 2", "main"]
    # One compilation makes all of them: its time stands once.
    assert [one.seconds for one in merged] == [None, None, 1.0]


def test_code_size_and_compile_time_are_columns(capsys: pytest.CaptureFixture[str]) -> None:
    counts = {"instructions": {"total": 128}}
    rows = [
        tables.Compiled("a/old", "one", "h200", counts),  # recorded before the size of its code was
        tables.Compiled("a/new", "one", "h200", {"code_bytes": 136832, **counts}, 16.04),
    ]
    tables.show(tables.resources(rows))
    out = capsys.readouterr().out.splitlines()
    (head,) = (line for line in out if "code KiB" in line)
    new, old = (line for line in out if "a/" in line)
    at = head.index("code KiB") + len("code KiB")
    assert (new[:at].split()[-1], old[:at].split()[-1]) == ("133.6", "2.0")
    at = head.index("compile s") + len("compile s")
    assert (new[:at].split()[-1], old[:at].split()[-1]) == ("16.0", "-")
