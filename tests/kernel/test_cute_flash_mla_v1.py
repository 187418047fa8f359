"""cute-dsl/flash_mla_v1 without a GPU: what it compiles to, what it refuses, and registers that MMAs still read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from reading_sass import overwritten_operands

from mla_var3.device import Device
from mla_var3.problem import MlaProblem

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from mla_var3.kernel.cute_python.lib.split.combine_groups import num_groups
from mla_var3.kernel.cute_python.mla.flash_mla.flash_mla_v1.flash_mla_v1 import FlashMlaV1Plan, FlashMlaV1Tiling

if TYPE_CHECKING:
    from pathlib import Path

H200 = Device.get("h200")


def test_compiles_without_spills_on_the_fast_path(tmp_path: Path) -> None:
    plan = FlashMlaV1Plan(MlaProblem(h=16, t=512), FlashMlaV1Tiling(num_splits=2), H200)
    compiled = plan.plan_empty().compile(tmp_path, H200, keep=("sass",))
    main, combine = compiled.stages
    assert (main.resources.registers, main.resources.spill_bytes, main.resources.stack_bytes) == (168, 0, 0)
    assert (main.resources.threads, main.warnings) == (384, ())
    # 2 x (2 x 36) for the scores, prologue and loop; 2 x 2 x 8 for the values, loop and last pair
    assert main.resources.instructions["HGMMA"] == 176
    assert main.resources.instructions["UTMALDG"] == 18
    assert main.resources.smem_dynamic <= H200.smem_per_block
    assert "cutlass" not in main.name
    assert combine.resources.spill_bytes == 0
    assert overwritten_operands(main.artefacts["sass"].read_text()) == []


def test_finds_an_overwritten_operand() -> None:
    product = "        /*0010*/   HGMMA.64x256x16.F32.BF16 R24, R152, gdesc[UR4].tnspB, R24, gsb0 ;\n"
    wait = "        /*0020*/   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;\n"
    write = "        /*0030*/   FMUL R153, R1, R2 ;\n"
    assert overwritten_operands(product + write + wait) == ["FMUL R153, R1, R2"]
    assert overwritten_operands(product + wait + write) == []


@pytest.mark.parametrize(
    ("fields", "word"), [({"tile_n": 128}, "128"), ({"num_splits": -1}, "num_splits"), ({"num_splits": 257}, "256")]
)
def test_tiling_says_why_not(fields: dict[str, int], word: str) -> None:
    assert word in FlashMlaV1Tiling(**fields).validate(MlaProblem(), H200).reason


def test_splits_are_shared_out_in_few_rounds() -> None:
    for splits in range(2, 257):
        groups = num_groups(splits)
        assert groups * 128 <= 1024
        assert -(-splits // groups) <= max(4, splits / 8 + 1)
