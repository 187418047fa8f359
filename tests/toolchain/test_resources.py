"""Counting instructions, adding up spills, and judging what a kernel takes: no compiler needed."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mla_var3.device import Device
from mla_var3.errors import Infeasible, UserError
from mla_var3.toolchain import resources, sass, spills
from mla_var3.toolchain.compiled import Resources

H200, B200, RTX = Device.get("h200"), Device.get("b200"), Device.get("rtx5090")
LISTING = """
\tcode for sm_90a
\t\tFunction : first
        /*0000*/                   LDC R1, c[0x0][0x28] ;                       /* 0x00000a00ff017b82 */
                                                                                /* 0x000fe20000000800 */
        /*0010*/              @!P0 STL.64 [R1+0x8], R2 ;                        /* 0x00000a00ff017b82 */
        /*0020*/                   STL [R1], R2 ;                               /* 0x00000a00ff017b82 */
        /*0030*/             @UP1  UTMALDG.2D [UR8], [UR4] ;                    /* 0x00000a00ff017b82 */
        /*0040*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], !UPT ; /* 0x0 */
        /*0050*/              @P2  MUFU.EX2 R3, R3 ;                            /* 0x0 */
        /*0060*/                   MUFU.RCP R3, R3 ;                            /* 0x0 */
        /*0070*/                   LDL.LU.128 R4, [R1] ;                        /* 0x0 */
\t\tFunction : second
        /*0000*/                   UTCHMMA gdesc[UR8], gdesc[UR6], tmem[UR10], UP0 ; /* 0x0 */
        /*10010*/                  EXIT ;                                       /* 0x0 */
"""
FINE = Resources(
    registers=168, smem_dynamic=200_000, threads=384, ctas_per_sm=1, instructions={"HGMMA": 8, "UTMALDG": 2}
)


def test_counts_by_group_and_function() -> None:
    parts = sass.functions(LISTING)
    assert list(parts) == ["first", "second"]
    first, second = (sass.count_instructions(text) for text in parts.values())
    assert {k: n for k, n in first.items() if n} == {
        "STL": 2,
        "UTMALDG": 1,
        "HGMMA": 1,
        "MUFU.EX2": 1,
        "LDL": 1,
        "total": 8,
    }
    assert {k: n for k, n in second.items() if n} == {"UTCMMA": 1, "total": 2}
    assert set(sass.HEADLINE) < set(first)
    assert [(one.stores, one.width) for one in spills.of(parts["first"])] == [(True, 8), (True, 4), (False, 16)]


def test_ptxas_remarks() -> None:
    text = """ptxas info    : Function properties for kernel_a
ptxas         .     40 bytes stack frame, 48 bytes spill stores, 36 bytes spill loads
ptxas info    : Used 32 registers"""
    assert resources.parse_ptxas(text) == {"kernel_a": 84}
    assert resources.parse_ptxas("") == {}


@pytest.mark.parametrize(
    ("taken", "device", "words"),
    [
        (replace(FINE, smem_static=40_000), H200, "shared memory of 240,000 bytes is over the 232,448"),
        (replace(FINE, smem_dynamic=102_400), RTX, "shared memory of 102,400 bytes is over the 101,376"),
        (replace(FINE, registers=176), H200, "176 registers for each of 384 threads are over the 168 that h200 has"),
        (replace(FINE, threads=1536), H200, "1536 threads are over the 1024"),
    ],
)
def test_what_cannot_be_launched_is_no_warning(taken: Resources, device: Device, words: str) -> None:
    with pytest.raises(Infeasible, match=words):
        resources.require(taken, device)


def test_a_good_kernel_has_no_problems() -> None:
    resources.require(FINE, H200)
    assert resources.problems(FINE, H200) == []
    combine = Resources(registers=32, threads=128, ctas_per_sm=16, instructions={"LDG": 4, "total": 90})
    assert resources.problems(combine, H200) == []


@pytest.mark.parametrize(
    ("taken", "device", "words"),
    [
        (replace(FINE, spill_bytes=4096), H200, "LDL), none of them in the loop of products"),
        (replace(FINE, spill_bytes=4096, spill_loop_bytes=96), H200, "LDL), 96 bytes of them in the loop of products"),
        (replace(FINE, spill_bytes=4096, spill_loop_bytes=4096), H200, "spills registers: 4,096 bytes of local-memory"),
        (replace(FINE, stack_bytes=64), H200, "uses 64 bytes of stack a thread"),
        (replace(FINE, instructions={"HMMA": 9, "UTMALDG": 1}), H200, "9 HMMA and no warpgroup (HGMMA)"),
        (replace(FINE, instructions={"HMMA": 9, "HGMMA": 4, "UTMALDG": 1}), H200, "9 HMMA beside 4 warpgroup (HGMMA)"),
        (replace(FINE, instructions={"HMMA": 9, "UTMALDG": 1}), B200, "9 HMMA and no tcgen05 (UTCMMA)"),
        (replace(FINE, instructions={"HGMMA": 9, "LDGSTS": 7}), H200, "without TMA (7 LDGSTS, 0 LDG)"),
        (
            replace(FINE, instructions={"HGMMA": 160, "WARPGROUP": 320, "UTMALDG": 1}),
            H200,
            "serialises its tensor-core products: 320 WARPGROUP instructions for 160 warpgroup (HGMMA)",
        ),
    ],
)
def test_each_problem_is_one_sentence_with_its_numbers(taken: Resources, device: Device, words: str) -> None:
    (said,) = resources.problems(taken, device)
    assert words in said


@pytest.mark.parametrize(("products", "syncs"), [(104, 41), (208, 90), (176, 55), (8, 4), (1, 3), (2, 3)])
def test_products_that_overlap_are_not_called_serialised(products: int, syncs: int) -> None:
    count = {"HGMMA": products, "WARPGROUP": syncs, "UTMALDG": 1}
    assert resources.problems(replace(FINE, instructions=count), H200) == []


def test_warp_level_products_are_native_on_consumer_blackwell() -> None:
    assert resources.problems(replace(FINE, smem_dynamic=0, instructions={"HMMA": 9, "LDGSTS": 4}), RTX) == []


def test_no_cubin_and_no_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="there is no cubin at"):
        sass.disassemble(tmp_path / "none.cubin")
    with pytest.raises(UserError, match="cuobjdump cannot read the cubin"):
        sass.disassemble(b"no cubin at all")
    monkeypatch.setattr(sass.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    sass.tool.cache_clear()
    try:
        with pytest.raises(UserError, match="pip install triton"):
            sass.tool("cuobjdump")
    finally:
        sass.tool.cache_clear()


def test_the_room_is_light() -> None:
    names = "sass resources cute cutile triton_ pool artefacts"
    heavy = "torch cutlass triton cuda rich pandas"
    code = (
        f"import sys, importlib; [importlib.import_module('mla_var3.toolchain.' + n) for n in '{names}'.split()];"
        f"print(sorted(set('{heavy}'.split()) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
