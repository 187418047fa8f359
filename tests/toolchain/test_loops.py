"""Loops of SASS: listings written for the test, whose loops are known."""

from __future__ import annotations

from listings import HGMMA, listing

from mla_var3.toolchain import loops


def found(*lines: str) -> list[tuple[int, int, int]]:
    """(head, back-edge, products) of each loop, addresses counted in instructions."""
    made = loops.loops(loops.instructions(listing(*lines)))
    return [(x.start // 16, x.end // 16, x.tensor) for x in made]


def test_a_line_is_read_with_its_guard_opcode_and_target() -> None:
    one, two, three = loops.instructions(listing("@!UP0 BRA 0x20", "MUFU.EX2 R3, R7", "BRA.DIV ~URZ, 0x0"))
    assert (one.guard, one.opcode, one.target, one.always_jumps) == ("@!UP0", "BRA", 0x20, False)
    assert (two.name, two.opcode, two.target) == ("MUFU", "MUFU.EX2", None)
    assert (three.name, three.target, three.always_jumps) == ("BRA", 0, False)


def test_normal_forms_differ_only_where_the_work_does() -> None:
    a, b, c, d = loops.instructions(
        listing(
            "FMNMX R9, R152, R153, !PT", "FMNMX R7, R15, R16, !PT", "FMNMX.FTZ R7, R15, R16, !PT", "LDS R1, [R2+0x8]"
        )
    )
    assert a.normal() == b.normal() != c.normal()
    assert d.normal() == "LDS R, [R+0x8]"  # an offset is work, an address is not
    x, y = loops.instructions(listing("@P3 BRA 0x10", "@!P1 BRA 0x0"))
    assert x.normal() == y.normal()


def test_nested_loops_and_the_inner_one() -> None:
    code = ("MOV R1, R2", "IADD3 R1, R1, R2, RZ", HGMMA, HGMMA, "@P0 BRA 0x20", "@P1 BRA 0x10", "EXIT")
    assert found(*code) == [(1, 5, 2), (2, 4, 2)]
    (inner,) = loops.inner_loops(listing(*code))
    assert (inner.start, inner.end, inner.tensor, len(inner.near), inner.far) == (0x20, 0x40, 2, 3, 0)
    assert inner.counts() == {"HGMMA": 2, "BRA": 1}


def test_a_retry_behind_the_end_is_part_of_the_loop_and_no_loop_of_its_own() -> None:
    code = (
        "MOV R1, R2",
        "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R1], R2",  # 1: head
        "@!P0 BRA 0x60",
        HGMMA,  # 3: where the retry jumps back to, backwards
        "@P1 BRA 0x10",
        "EXIT",
        "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R1], R2",  # 6: retried until it succeeds
        "@!P0 BRA 0x60",
        "BRA 0x30",
    )
    assert found(*code) == [(1, 4, 1), (6, 7, 0)]
    (inner,) = loops.inner_loops(listing(*code))
    assert (len(inner.near), inner.far) == (4, 3)


def test_roles_behind_an_indirect_branch_have_a_loop_each() -> None:
    code = (
        "BRX R2 -0x10",
        HGMMA,  # role one
        "@P0 BRA 0x10",
        "EXIT",
        HGMMA,  # role two
        HGMMA,
        "@P0 BRA 0x40",
        "EXIT",
    )
    assert found(*code) == [(1, 2, 1), (4, 6, 2)]
    assert [loop.tensor for loop in loops.inner_loops(listing(*code))] == [2, 1]


def test_a_jump_into_the_middle_makes_no_natural_loop() -> None:
    # Entered at 1 and at 2: neither dominates the other, so no back-edge of either is a loop.
    assert found("@P0 BRA 0x20", "MOV R1, R2", HGMMA, "@P1 BRA 0x10", "EXIT") == []


def test_without_products_the_largest_innermost_loop() -> None:
    code = ("LDG R1, [R2]", "@P0 BRA 0x0", "FADD R1, R2, R3", "FADD R1, R2, R3", "@P0 BRA 0x20", "EXIT", "BRA 0x60")
    largest = loops.inner_loops(listing(*code))[0]
    assert (largest.start, largest.end) == (0x20, 0x40)
    assert loops.inner_loops(listing("EXIT")) == [] and loops.inner_loops("") == []


def test_the_kernel_with_the_most_products_of_a_listing() -> None:
    text = listing("MOV R1, R2", "MOV R1, R2", "EXIT", name="join") + "\n" + listing(HGMMA, "EXIT", name="main")
    name, part = loops.main_function(text)
    assert name == "main" and len(loops.instructions(part)) == 2
