"""cute-dsl/flash_mla_v3 without a GPU: what it compiles to, what it refuses, and registers that MMAs still read."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from reading_sass import overwritten_operands

from mla_var3.device import Device
from mla_var3.problem import MlaProblem

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from mla_var3.kernel.cute_python.lib.latent.loads import shared_loads
from mla_var3.kernel.cute_python.lib.latent.shape import Shape
from mla_var3.kernel.cute_python.lib.phased import steps
from mla_var3.kernel.cute_python.mla.flash_mla.flash_mla_v3.flash_mla_v3 import (
    FlashMlaV3Plan,
    FlashMlaV3Tiling,
)

if TYPE_CHECKING:
    from pathlib import Path

H200 = Device.get("h200")


@pytest.mark.parametrize(("h", "multicast"), [(128, True), (16, False)])
def test_compiles_without_spills(tmp_path: Path, h: int, multicast: bool) -> None:
    plan = FlashMlaV3Plan(MlaProblem(h=h, t=512), FlashMlaV3Tiling(num_splits=2), H200)
    main, combine = plan.plan_empty().compile(tmp_path, H200, keep=("sass", "ptx")).stages
    assert (main.resources.registers, main.resources.spill_bytes, main.resources.stack_bytes) == (168, 0, 0)
    assert (main.resources.threads, main.warnings) == (384, ())
    # 4 x 36 for the scores (even: before the loop and in it; odd: in the loop and at the end), 2 x (8 + 3 x 4) for V:
    # the odd product with its own V is there once for a maximum that rose and once for one that did not.
    assert main.resources.instructions["HGMMA"] == 184
    assert main.resources.smem_dynamic <= H200.smem_per_block
    assert combine.resources.spill_bytes == 0
    assert overwritten_operands(main.artefacts["sass"].read_text()) == []
    assert ("multicast::cluster" in main.artefacts["ptx"].read_text()) is multicast


def test_finds_an_overwritten_operand() -> None:
    product = "        /*0010*/   HGMMA.64x256x16.F32.BF16 R24, R152, gdesc[UR4].tnspB, R24, gsb0 ;\n"
    wait = "        /*0020*/   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;\n"
    write = "        /*0030*/   FMUL R153, R1, R2 ;\n"
    assert overwritten_operands(product + write + wait) == ["FMUL R153, R1, R2"]
    assert overwritten_operands(product + wait + write) == []


@pytest.mark.parametrize(("s", "h", "blocks"), [(1, 128, 2), (1, 64, 0), (3, 64, 0), (2, 64, 2), (4, 64, 2)])
def test_blocks_share_loads_where_row_tiles_pair_up(s: int, h: int, blocks: int) -> None:
    assert shared_loads(Shape.of(MlaProblem(s=s, h=h))) == blocks


def test_resident_slices_are_spread() -> None:
    chosen = steps.resident_slices(36)
    assert len(chosen) == steps.RESIDENT
    gaps = [b - a for a, b in itertools.pairwise(chosen)]
    assert max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize(
    ("fields", "word"), [({"tile_n": 128}, "128"), ({"num_splits": -1}, "num_splits"), ({"num_splits": 257}, "256")]
)
def test_tiling_says_why_not(fields: dict[str, int], word: str) -> None:
    assert word in FlashMlaV3Tiling(**fields).validate(MlaProblem(), H200).reason
