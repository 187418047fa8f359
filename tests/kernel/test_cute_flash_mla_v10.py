"""cute-dsl/flash_mla_v10 without a GPU: what a single tile adds to the code, whose P is waited for, how it splits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from reading_sass import overwritten_operands

from mla_var3.device import Device
from mla_var3.diagnosis.loops import inner_loops
from mla_var3.problem import MlaProblem

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from mla_var3.kernel.cute_python.lib.split.splits import MAX_SPLITS, choose_short_splits
from mla_var3.kernel.cute_python.mla.flash_mla.flash_mla_v8.flash_mla_v8 import FlashMlaV8Plan, FlashMlaV8Tiling
from mla_var3.kernel.cute_python.mla.flash_mla.flash_mla_v10.flash_mla_v10 import (
    FULL,
    FlashMlaV10Plan,
    FlashMlaV10Tiling,
)

if TYPE_CHECKING:
    from pathlib import Path

H200 = Device.get("h200")


def test_a_single_tile_adds_two_products_a_consumer_and_leaves_the_loop(tmp_path: Path) -> None:
    problem, loops, products = MlaProblem(h=128, t=512), [], []
    for plan in (
        FlashMlaV8Plan(problem, FlashMlaV8Tiling(num_splits=1), H200),
        FlashMlaV10Plan(problem, FlashMlaV10Tiling(num_splits=1), H200),
    ):
        main = plan.plan_empty().compile(tmp_path, H200, keep=("sass",))
        sass = main.artefacts["sass"].read_text()
        assert (main.resources.registers, main.resources.spill_bytes, main.warnings) == (168, 0, ())
        assert overwritten_operands(sass) == []
        loops.append(inner_loops(sass))
        products.append(main.resources.instructions["HGMMA"])
    # Each consumer's product with its half of V, masked and not: four instructions. Scores are made in code there was.
    assert products[1] - products[0] == 2 * 2 * 4
    for old, new in zip(*loops, strict=True):
        assert len(new.near) <= 1.03 * len(old.near)
        assert new.counts()["NANOSLEEP"] == 0


@pytest.mark.parametrize("h", [64, 16])
def test_consumers_that_are_apart_wait_for_p_alone(tmp_path: Path, h: int) -> None:
    plan = FlashMlaV10Plan(MlaProblem(b=128, h=h, t=512), None, H200)
    main = plan.plan_empty().compile(tmp_path, H200, keep=("sass",))
    sass = main.artefacts["sass"].read_text()
    assert (main.resources.registers, main.resources.spill_bytes, main.warnings) == (168, 0, ())
    assert overwritten_operands(sass) == []
    loops = [loop for loop in inner_loops(sass) if loop.counts()["HGMMA"]]
    assert [loop.counts()["HGMMA"] for loop in loops] == [36 + 2 * 4] * 2
    # Named barriers of a pair: one that P is there, one that the other's is.
    assert [loop.counts()["BAR.SYNC"] + loop.counts()["BAR.ARV"] for loop in loops] == [2, 2]


@pytest.mark.parametrize(
    ("problem", "apart"),
    [
        (MlaProblem(b=128, h=64), True),
        (MlaProblem(b=FULL, h=8), True),
        (MlaProblem(b=FULL - 1, h=64), False),
        (MlaProblem(b=128, h=65), False),  # two row tiles
        (MlaProblem(b=128, h=64, s=2), False),
        (MlaProblem(b=12, h=64, h_kv=8), True),
    ],
)
def test_consumers_are_apart_where_a_batch_of_one_row_tile_fills_the_chip(problem: MlaProblem, apart: bool) -> None:
    assert FlashMlaV10Plan(problem, None, H200).tiling.apart is apart


@pytest.mark.parametrize(
    ("b", "h", "t", "splits"),
    # the fastest of those measured (results/h200/traces/2026-11-22-flash_mla_v10.txt)
    [(1, 16, 512, 8), (1, 16, 8192, 128), (1, 16, 131072, 128), (2, 16, 4096, 64), (8, 16, 1024, 16), (32, 16, 8192, 4),
     (1, 128, 2048, 32), (1, 128, 4096, 32), (1, 128, 8192, 64), (1, 128, 65536, 64), (2, 128, 4096, 32),
     (4, 128, 1024, 8), (16, 128, 512, 4), (16, 128, 8192, 4), (32, 128, 512, 2), (64, 128, 4096, 1)],
)  # fmt: skip
def test_splits_are_the_fastest_measured(b: int, h: int, t: int, splits: int) -> None:
    problem = MlaProblem(b=b, h=h, t=t)
    assert FlashMlaV10Plan(problem, None, H200).num_splits(b, problem.max_pages) == splits


def test_there_are_no_more_parts_than_tiles() -> None:
    for row_tiles in (1, 2, 7, 200):
        for tiles in (0, 1, 2, 3, 7, 64, 1000):
            splits = choose_short_splits(row_tiles, tiles, 64 * row_tiles, 512, 132)
            assert 1 <= splits <= max(1, min(tiles, MAX_SPLITS))


def test_told_splits_are_kept_and_other_orders_refused() -> None:
    problem = MlaProblem(b=1, h=16, t=4096)
    assert FlashMlaV10Plan(problem, FlashMlaV10Tiling(num_splits=5), H200).num_splits(1, problem.max_pages) == 5
    assert FlashMlaV10Tiling(apart=True).validate(problem, H200)
    assert "num_splits" in FlashMlaV10Tiling(num_splits=MAX_SPLITS + 1).validate(problem, H200).reason
