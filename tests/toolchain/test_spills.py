"""Where registers are spilled, in listings whose loops are known."""

from __future__ import annotations

from listings import HGMMA, listing

from mla_var3.toolchain import spills


def places(*code: str) -> list[tuple[str, int]]:
    return [(one.place, one.width) for one in spills.of(listing(*code))]


def test_a_spill_counts_where_it_is() -> None:
    code = (
        "STL [R1], R2",  # once a CTA
        "LDL.64 R4, [R1+0x8]",  # 1: head of the loop over splits
        HGMMA,  # 2: head of the loop of products
        "STL.128 [R1+0x10], R8",
        "@P0 BRA 0x20",
        "LDL.LU R4, [R1]",
        "@P1 BRA 0x10",
        "@P2 LDL R4, [R1]",
        "EXIT",
    )
    wanted = [("outside", 4), ("around", 8), ("loop", 16), ("around", 4), ("outside", 4)]
    assert places(*code) == wanted
    assert [one.stores for one in spills.of(listing(*code))] == [True, False, True, False, False]


def test_a_spill_in_the_retry_of_a_wait_is_in_the_loop() -> None:
    code = (
        "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R1], R2",
        "@!P0 BRA 0x50",
        HGMMA,
        "@P1 BRA 0x0",
        "EXIT",
        "LDL R2, [R1]",
        "BRA 0x20",
    )
    assert places(*code) == [("loop", 4)]


def test_of_a_loop_with_products_around_another_one_only_the_inner_counts() -> None:
    code = (HGMMA, "STL [R1], R2", HGMMA, "@P0 BRA 0x20", "@P1 BRA 0x0", "EXIT")
    assert places(*code) == [("around", 4)]


def test_without_products_in_a_loop_every_spill_counts() -> None:
    assert places("STL [R1], R2", "FADD R1, R2, R3", "@P0 BRA 0x10", HGMMA, "EXIT") == [("loop", 4)]
    assert places("FADD R1, R2, R3", "EXIT") == []


def test_lines_of_the_source_stand_beside_the_spills() -> None:
    code = listing("STL [R1], R2", "LDL R2, [R1]", "EXIT")
    first, second = spills.of(code, {0x0: ("/x/kernel.py", 7)})
    assert (first.file, first.line, second.file, second.line) == ("/x/kernel.py", 7, "", 0)
