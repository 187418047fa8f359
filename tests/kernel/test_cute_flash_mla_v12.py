"""cute-dsl/flash_mla_v12 without a GPU: what stands in front of its first load, and its loops, those of version 10."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from reading_sass import first_at, instructions, overwritten_operands, used_at

from mla_var3.device import Device
from mla_var3.diagnosis.loops import inner_loops
from mla_var3.problem import MlaProblem

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from mla_var3.kernel.cute_python.lib.latent.order import AT_ONCE
from mla_var3.kernel.cute_python.lib.split.divide import BITS, inverse_of
from mla_var3.kernel.cute_python.lib.split.splits import MAX_SPLITS
from mla_var3.kernel.cute_python.mla.flash_mla.flash_mla_v12.flash_mla_v12 import FlashMlaV12Plan, FlashMlaV12Tiling

if TYPE_CHECKING:
    from pathlib import Path

H200 = Device.get("h200")


def sass_of(folder: Path, fields: dict[str, Any]) -> list[str]:
    """The kernel's instructions, in the order of its code."""
    plan = FlashMlaV12Plan(MlaProblem(t=512, **fields), FlashMlaV12Tiling(num_splits=1), H200)
    main = plan.plan_empty().compile(folder, H200, keep=("sass",))
    sass = main.artefacts["sass"].read_text()
    assert (main.resources.registers, main.resources.spill_bytes, main.warnings) == (168, 0, ())
    assert overwritten_operands(sass) == []
    loops = [loop for loop in inner_loops(sass) if loop.counts()["HGMMA"]]
    assert loops and all(loop.counts()["NANOSLEEP"] == 0 for loop in loops)
    return instructions(sass)


@pytest.mark.parametrize("fields", [{"h": 128}, {"h": 64}, {"h": 128, "s": 2, "causal": True}])
def test_the_first_load_waits_for_the_length_and_the_page_alone(tmp_path: Path, fields: dict[str, Any]) -> None:
    lines = sass_of(tmp_path, fields)
    made = [i for i, line in enumerate(lines) if "SYNCS.EXCH.64" in line]
    assert len(made) == 6  # of one part: four panels, the rope's, and one to free them by
    asked = [i for i, line in enumerate(lines[: made[0]]) if "LDG" in line]
    assert len(asked) == 2 + AT_ONCE  # the length and the page, and all lengths where blocks are put in order
    assert all(used_at(lines, i) > made[-1] for i in asked)
    shuffles = [i for i, line in enumerate(lines) if "SHFL.IDX" in line][-2:]
    load = first_at(lines, "UTMALDG")
    assert shuffles[0] < load < shuffles[0] + 140
    assert not any("I2F" in line or "MUFU.RCP" in line for line in lines[:load])  # no division


def test_the_inverse_is_exact() -> None:
    for divisor in range(1, MAX_SPLITS + 1):
        inverse = inverse_of(divisor)
        assert inverse < 1 << 31
        most = ((1 << BITS) - 1) // divisor
        for near in (0, 1, divisor, 12345 * divisor, most // 2 // divisor * divisor, most // divisor * divisor):
            for number in (near - 1, near, near + 1):
                if 0 <= number <= most:
                    assert number * inverse >> BITS == number // divisor
