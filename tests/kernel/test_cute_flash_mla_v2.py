"""cute-dsl/flash_mla_v2 without a GPU: what it compiles to, what it refuses, and how it splits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mla_var3.device import Device
from mla_var3.errors import Infeasible, Unsupported
from mla_var3.problem import MlaProblem

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from mla_var3.kernel.cute_python.lib.split import merge
from mla_var3.kernel.cute_python.lib.split.memory_splits import choose_splits
from mla_var3.kernel.cute_python.lib.swapped.consumer import most_slots
from mla_var3.kernel.cute_python.lib.swapped.limits import SMEM_BYTES
from mla_var3.kernel.cute_python.mla.flash_mla.flash_mla_v2.flash_mla_v2 import FlashMlaV2Plan, FlashMlaV2Tiling

H200 = Device.get("h200")


@pytest.mark.parametrize(
    ("fields", "consumers"),
    [
        ({"h": 16}, 2),
        ({"h": 3}, 1),
        # 128 registers of output a thread: ptxas must neither spill nor wait after every product.
        ({"h": 16, "s": 2, "causal": True}, 2),
    ],
)
def test_compiles_without_spills_or_waits(fields: dict[str, object], consumers: int) -> None:
    plan = FlashMlaV2Plan(MlaProblem(t=512, **fields), FlashMlaV2Tiling(num_splits=2, num_consumers=consumers), H200)
    main, second = plan.plan_empty().compile(None, H200).stages
    assert (main.resources.spill_bytes, main.resources.stack_bytes) == (0, 0)
    assert main.warnings == ()
    # 9 panels x 4 for the scores, 8 x 4 for the output; a copy of the code for each consumer
    assert main.resources.instructions["HGMMA"] == consumers * 68
    assert main.resources.instructions["UTMALDG"] == 9
    assert main.resources.smem <= H200.smem_per_block
    assert "cutlass" not in main.name
    assert (second.resources.spill_bytes, second.resources.stack_bytes) == (0, 0)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"k": 500}, "k = 500"),
        ({"p": 32}, "p = 32"),
        ({"page": 48}, "48"),
        ({"n": 64}, "n = 64"),
        ({"h": 128, "s": 2}, "flash_mla"),
        ({"dtype": "fp32"}, "fp32"),
    ],
)
def test_refuses_with_a_reason(fields: dict[str, object], word: str) -> None:
    with pytest.raises(Unsupported, match=word):
        FlashMlaV2Plan(MlaProblem(**{"h": 16, **fields}), None, H200).require()


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"tile_n": 24}, "tile_n = 24"),
        ({"num_consumers": 3}, "num_consumers"),
        ({"num_splits": 257}, "num_splits"),
        ({"num_blocks": -1}, "num_blocks"),
        ({"num_pipeline_stages": 17}, "9 of a tile for each of 2"),
        ({"num_pipeline_stages": 40}, "shared memory"),
    ],
)
def test_tiling_says_why_not(fields: dict[str, int], word: str) -> None:
    assert word in FlashMlaV2Tiling(**fields).validate(MlaProblem(h=16), H200).reason
    with pytest.raises(Infeasible):
        FlashMlaV2Plan(MlaProblem(h=16), FlashMlaV2Tiling(**fields), H200).require()


def test_the_smallest_tile_that_holds_the_rows() -> None:
    tiles = {rows: FlashMlaV2Tiling().resolved(MlaProblem(h=rows)).tile_n for rows in (1, 8, 9, 16, 17, 32, 128)}
    assert tiles == {1: 8, 8: 8, 9: 16, 16: 16, 17: 32, 32: 32, 128: 32}
    assert FlashMlaV2Plan(MlaProblem(h=72), None, H200).shape.row_tiles == 3


def test_the_ring_takes_what_is_left() -> None:
    for tile_n in (8, 16, 32):
        for consumers in (1, 2):
            slots = most_slots(tile_n, consumers, 576, 2)
            assert slots >= 22
            tiling = FlashMlaV2Tiling(tile_n=tile_n, num_consumers=consumers, num_pipeline_stages=slots)
            assert tiling.validate(MlaProblem(h=8), H200)
            assert not replace(tiling, num_pipeline_stages=slots + 1).validate(MlaProblem(h=8), H200)
    assert H200.smem_per_block == SMEM_BYTES


def test_blocks_are_items_unless_said_otherwise() -> None:
    problem = MlaProblem(h=16, b=64, t=4096)
    assert FlashMlaV2Plan(problem, FlashMlaV2Tiling(num_splits=4), H200).num_blocks(64, 4) == 256
    assert FlashMlaV2Plan(problem, FlashMlaV2Tiling(num_splits=4, num_blocks=132), H200).num_blocks(64, 4) == 132
    assert FlashMlaV2Plan(problem, FlashMlaV2Tiling(num_blocks=132), H200).num_blocks(64, 1) == 64


def test_splits_fill_the_chip_only_when_it_is_not_full() -> None:
    assert choose_splits(128, 64, 128 * 16, 512, 132) == 1
    assert 32 <= choose_splits(1, 2048, 16, 512, 132) <= 132
    assert choose_splits(1, 1, 16, 512, 132) == 1


def test_a_merge_block_has_a_thread_for_each_split() -> None:
    for k in (128, 256, 384, 512):
        for splits in (2, 8, 9, 64, merge.MAX_SPLITS):
            sharing, side = merge.arrange(splits, k)
            assert 32 * sharing * side >= splits
            assert (k // merge.COLUMNS) % side == 0
            assert sharing * side <= merge.WARPS
