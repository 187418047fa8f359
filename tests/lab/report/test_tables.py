"""Tables on the terminal."""

from __future__ import annotations

from mla_var3.lab.report import tables


def test_stages_of_one_name_are_told_apart() -> None:
    stages = [{"name": name, "registers": count} for name, count in (("main", 168), ("combine", 40), ("combine", 56))]
    row = tables.Compiled("cute-dsl/flash_mla_v23", "b1", "h200", {"stages": stages}, 1.0, [])
    assert [one.kernel.partition(": ")[2] for one in tables._merged([row])] == ["combine 1", "combine 2", "main"]
