"""cute-dsl/flash_mla_v11 and v13 without a GPU: what they compile to, in which order they start, how they split."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from reading_sass import first_at, instructions, used_at

from mla_var3.device import Device
from mla_var3.diagnosis.loops import inner_loops
from mla_var3.errors import Infeasible
from mla_var3.problem import MlaProblem

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from mla_var3.kernel.cute_python.lib.latent.order import AT_ONCE
from mla_var3.kernel.cute_python.lib.swapped.halves import P_READY
from mla_var3.kernel.cute_python.lib.swapped.plan import spans_of
from mla_var3.kernel.cute_python.mla.flash_mla.flash_mla_v11.flash_mla_v11 import FlashMlaV11Plan
from mla_var3.kernel.cute_python.mla.flash_mla.flash_mla_v13.flash_mla_v13 import FlashMlaV13Plan

if TYPE_CHECKING:
    from pathlib import Path

H200 = Device.get("h200")
PANELS = 9
PLANS = pytest.mark.parametrize("plan", [FlashMlaV11Plan, FlashMlaV13Plan])


def sass_of(plan: Any, folder: Path, fields: dict[str, Any], **tiling: Any) -> tuple[Any, str]:
    made = plan(MlaProblem(t=512, **fields), plan.tiling_type(num_splits=2, **tiling), H200).plan_empty()
    main, second = made.compile(folder, H200, keep=("sass",)).stages
    assert second.resources.spill_bytes == 0
    return main, main.artefacts["sass"].read_text()


@PLANS
@pytest.mark.parametrize("fields", [{"h": 8}, {"h": 16, "s": 2, "causal": True}, {"h": 16, "dtype": "fp16"}])
def test_compiles_without_spills_or_waits(plan: Any, tmp_path: Path, fields: dict[str, Any]) -> None:
    main, sass = sass_of(plan, tmp_path, fields)
    resources = main.resources
    assert (resources.spill_bytes, resources.stack_bytes, main.warnings) == (0, 0, ())
    # A consumer makes 9 panels x 4 of scores, and 4 x 4 of the output with its own P and with the other's; the odd one
    # has a second copy of those for a tile without a partner.
    assert resources.instructions["HGMMA"] == 2 * (36 + 16 + 16) + 16
    assert resources.smem <= H200.smem_per_block
    loops = [loop for loop in inner_loops(sass) if loop.counts()["HGMMA"]]
    assert len(loops) == 2 and all(loop.counts()["NANOSLEEP"] == 0 for loop in loops)
    # Whether a maximum moves is asked at a barrier, by each consumer.
    assert len(re.findall(r"BAR\.RED\.OR", sass)) == 2
    # Before a consumer tells the other one that its P is there, its own warps meet: racecheck follows no other order.
    lines = [line for line in instructions(sass) if "BAR." in line or "STS" in line]
    told = [i for i, line in enumerate(lines) if re.search(rf"BAR\.ARV (0x{P_READY:x}|0x{P_READY + 1:x}),", line)]
    assert len(told) == 2 and all(re.search(r"BAR\.SYNC\S* 0x[34], 0x80", lines[i - 1]) for i in told)


@PLANS
def test_barriers_are_made_by_one_lane_and_do_not_wait_for_the_page(plan: Any, tmp_path: Path) -> None:
    _, sass = sass_of(plan, tmp_path, {"h": 16})
    lines = instructions(sass)
    made = [i for i, line in enumerate(lines) if "SYNCS.EXCH.64" in line]
    slots = (2 * PANELS, 40)
    assert slots[0] <= len(made) // 2 <= slots[1]  # full and empty of each slot, none in a loop over lanes
    assert made[-1] - made[0] == len(made) - 1
    # Length and page are asked for ahead; by version 13 all lengths, too, where blocks may be put in another order.
    loads = [i for i, line in enumerate(lines[: made[0]]) if "LDG" in line]
    assert len(loads) == 2 + (AT_ONCE if plan is FlashMlaV13Plan else 0)
    assert all(used_at(lines, i) > made[-1] for i in (loads if plan is FlashMlaV13Plan else loads[1:]))
    load = first_at(lines, "UTMALDG")
    divides = any("I2F" in line or "MUFU.RCP" in line for line in lines[:load])
    assert divides == (plan is FlashMlaV11Plan)


@PLANS
def test_the_loop_over_panels_is_a_loop(plan: Any, tmp_path: Path) -> None:
    for tokens, loads in ((64, 1), (32, 4)):  # with two spans of panels and two rows of boxes, four places
        main, _ = sass_of(plan, tmp_path / str(tokens), {"h": 16}, box_tokens=tokens)
        assert main.resources.instructions["UTMALDG"] == loads


def test_boxes_are_short_where_rows_are_many() -> None:
    def box(h: int) -> int:
        return int(FlashMlaV13Plan(MlaProblem(h=h), None, H200).resolved.box_tokens)

    assert [box(h) for h in (8, 16, 32)] == [64, 64, 32]
    for panels in (3, 5, 7, 9):
        assert sum(spans_of(panels, 64)) == sum(spans_of(panels, 32)) == panels


def test_a_box_has_32_or_64_tokens() -> None:
    tiling = FlashMlaV13Plan.tiling_type(box_tokens=16)
    assert "box_tokens = 16" in tiling.validate(MlaProblem(h=16), H200).reason
    with pytest.raises(Infeasible):
        FlashMlaV13Plan(MlaProblem(h=16), tiling, H200).require()


def test_parts_may_be_single_tiles_and_many_requests_are_whole() -> None:
    def splits(**fields: Any) -> int:
        problem = MlaProblem(h=16, **fields)
        return FlashMlaV13Plan(problem, None, H200).num_splits(problem.b, problem.max_pages)

    # The fastest of those timed on an H200 (the trace of the devlog, part 5).
    fastest = {(1, 512): 8, (1, 2048): 32, (1, 4096): 64, (1, 16384): 128, (4, 2048): 32, (16, 512): 8, (16, 8192): 8}
    assert {key: splits(b=key[0], t=key[1]) for key in fastest} == fastest
    assert splits(b=128, t=4096) == 1
    assert splits(b=32, t=8192) == 4
    assert splits(b=1, t=64) == 1
