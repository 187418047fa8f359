"""cute-dsl/flash_mla_v9 without a GPU: what it compiles to, where consumers give, how it splits."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from mla_var3.device import Device
from mla_var3.diagnosis.loops import inner_loops
from mla_var3.problem import MlaProblem

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from mla_var3.kernel.cute_python.lib.swapped import ending, ring
from mla_var3.kernel.cute_python.lib.swapped.consumer import most_slots
from mla_var3.kernel.cute_python.mla.flash_mla.flash_mla_v9.flash_mla_v9 import FlashMlaV9Plan, FlashMlaV9Tiling

if TYPE_CHECKING:
    from pathlib import Path

H200 = Device.get("h200")
PANELS = 9


@pytest.mark.parametrize("fields", [{"h": 8}, {"h": 16}, {"h": 16, "s": 2, "causal": True}, {"h": 16, "dtype": "fp16"}])
def test_compiles_without_spills_or_waits(tmp_path: Path, fields: dict[str, Any]) -> None:
    plan = FlashMlaV9Plan(MlaProblem(t=512, **fields), FlashMlaV9Tiling(num_splits=2), H200)
    main, second = plan.plan_empty().compile(tmp_path, H200, keep=("sass",)).stages
    resources = main.resources
    assert (resources.spill_bytes, resources.stack_bytes, main.warnings) == (0, 0, ())
    # 9 panels x 4 for the scores, 8 x 4 for the output; a copy of the code for each consumer
    assert (resources.instructions["HGMMA"], resources.instructions["UTMALDG"]) == (2 * 68, PANELS)
    assert resources.smem <= H200.smem_per_block
    assert second.resources.spill_bytes == 0
    sass = main.artefacts["sass"].read_text()
    # ptxas may put the second try of each wait into the loop.
    loops = [loop for loop in inner_loops(sass) if loop.counts()["HGMMA"]]
    assert len(loops) == 2 and all(loop.counts()["NANOSLEEP"] == 0 for loop in loops)
    # Results and parts alike leave 16 bytes a thread, two for each eight rows, from code that both consumers share.
    assert len(re.findall(r"STG\.E\.128", sass)) == 2 * 2 * plan.shape.tile_n // 8


@pytest.mark.parametrize("slots", [18, 22, 25, 26])
def test_a_consumer_gives_where_nobody_reads(slots: int) -> None:
    """In its own last tile's panels; without a tile, in panels that the other's only tile does not lie in."""
    for count in range(200):
        taken = []
        for me in range(ending.CONSUMERS):
            first = ending.last_slot(count, me, slots, PANELS)
            taken.append({(first + i) % slots for i in range(PANELS)})
            tiles = range(me, count, ending.CONSUMERS)
            if tiles:
                assert first == tiles[-1] * PANELS % slots
        assert not taken[0] & taken[1]


def test_what_is_given_fits_the_panels() -> None:
    for n in (8, 16, 32):
        assert 64 * n * 4 <= ring.SLOT_BYTES  # a panel of fp32 in a slot
        assert most_slots(n, ending.CONSUMERS, 576, 2) >= ending.CONSUMERS * PANELS


def test_many_kv_heads_share_out_the_rows() -> None:
    plan = FlashMlaV9Plan(MlaProblem(h=128, h_kv=8, b=3), None, H200)
    assert (plan.shape.tile_n, plan.shape.row_tiles, plan.blocks(3)) == (16, 1, 24)
    assert plan.tiling.validate(plan.problem, H200)


def test_few_requests_fill_the_chip_and_many_are_whole() -> None:
    def splits(**fields: Any) -> int:
        problem = MlaProblem(h=16, **fields)
        return FlashMlaV9Plan(problem, None, H200).num_splits(problem.b, problem.max_pages)

    assert splits(b=128, t=4096) == 1
    assert splits(b=32, t=8192) == 4
    assert splits(b=1, t=131072) == 128
    assert splits(b=1, t=64) == 1
