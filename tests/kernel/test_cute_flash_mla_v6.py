"""cute-dsl/flash_mla_v6 without a GPU: what it compiles to, and when it puts requests in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from reading_sass import overwritten_operands

from mla_var3.device import Device
from mla_var3.diagnosis.loops import inner_loops
from mla_var3.problem import MlaProblem

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from mla_var3.kernel.cute_python.lib.latent.parts_plan import RAGGED
from mla_var3.kernel.cute_python.mla.flash_mla.flash_mla_v5.flash_mla_v5 import FlashMlaV5Plan
from mla_var3.kernel.cute_python.mla.flash_mla.flash_mla_v6.flash_mla_v6 import FlashMlaV6Plan, FlashMlaV6Tiling

if TYPE_CHECKING:
    from pathlib import Path

H200 = Device.get("h200")


@pytest.mark.parametrize("h", [128, 16])
def test_compiles_to_the_loop_of_version_5(tmp_path: Path, h: int) -> None:
    problem, loops = MlaProblem(h=h, t=512), {}
    for plan in (FlashMlaV5Plan(problem, None, H200), FlashMlaV6Plan(problem, FlashMlaV6Tiling(num_splits=1), H200)):
        main = plan.plan_empty().compile(tmp_path, H200, keep=("sass",))
        sass = main.artefacts["sass"].read_text()
        assert (main.resources.registers, main.resources.spill_bytes, main.warnings) == (168, 0, ())
        assert main.resources.instructions["HGMMA"] == 184
        assert overwritten_operands(sass) == []
        loops[plan.tiling.__class__.__name__] = inner_loops(sass)
    before, after = loops.values()
    assert len(before) == len(after) == 2
    for old, new in zip(before, after, strict=True):
        assert abs(len(new.near) - len(old.near)) <= 10
        # ptxas may put the second try of each wait into the loop: 6 % of the time of a pair of tiles.
        assert new.counts()["NANOSLEEP"] == 0


@pytest.mark.parametrize(
    ("b", "h", "splits", "waits"), [(64, 128, 1, 0), (66, 128, 1, 0), (67, 128, 1, 1), (128, 16, 1, 0), (128, 16, 2, 1)]
)
def test_requests_are_put_in_order_only_where_blocks_wait(b: int, h: int, splits: int, waits: int) -> None:
    plan = FlashMlaV6Plan(MlaProblem(b=b, h=h, t=4096), None, H200)
    assert plan.scalars(b, splits) == (plan.problem.scale, splits, waits)


def test_unequal_requests_are_cut_as_in_version_5() -> None:
    ragged = MlaProblem(b=64, h=128, t=8192, lengths={"name": "ragged", "seed": 1})
    plan = FlashMlaV6Plan(ragged, None, H200)
    assert plan.fill < RAGGED
    assert plan.num_splits(64, ragged.max_pages) == FlashMlaV5Plan(ragged, None, H200).num_splits(64, 128) == 2


def test_compiles_for_the_device_that_is_given_to_compile(tmp_path: Path) -> None:
    kernel = FlashMlaV6Plan(MlaProblem(h=16, t=512), FlashMlaV6Tiling(num_splits=1)).plan_empty()
    assert kernel.compile(tmp_path, H200).resources.spill_bytes == 0
