"""cute-dsl/flash_mla_v7 without a GPU: the loop is version 6's, and how its combine is cut and compiled."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from reading_sass import overwritten_operands

from mla_var3.device import Device
from mla_var3.diagnosis.loops import inner_loops
from mla_var3.problem import MlaProblem

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from mla_var3.kernel.cute_python.lib.split.combine_warps import WARP, cut_work
from mla_var3.kernel.cute_python.lib.split.splits import MAX_SPLITS
from mla_var3.kernel.cute_python.mla.flash_mla.flash_mla_v6.flash_mla_v6 import FlashMlaV6Plan, FlashMlaV6Tiling
from mla_var3.kernel.cute_python.mla.flash_mla.flash_mla_v7.flash_mla_v7 import FlashMlaV7Plan, FlashMlaV7Tiling

if TYPE_CHECKING:
    from pathlib import Path

H200 = Device.get("h200")


@pytest.mark.parametrize("h", [128, 16])
def test_compiles_to_a_loop_as_long_as_version_6_has(tmp_path: Path, h: int) -> None:
    problem, loops = MlaProblem(h=h, t=512), []
    for plan in (
        FlashMlaV6Plan(problem, FlashMlaV6Tiling(num_splits=1), H200),
        FlashMlaV7Plan(problem, FlashMlaV7Tiling(num_splits=1), H200),
    ):
        main = plan.plan_empty().compile(tmp_path, H200, keep=("sass",))
        sass = main.artefacts["sass"].read_text()
        assert (main.resources.registers, main.resources.spill_bytes, main.warnings) == (168, 0, ())
        assert overwritten_operands(sass) == []
        loops.append(inner_loops(sass))
    for old, new in zip(*loops, strict=True):
        assert abs(len(new.near) - len(old.near)) <= 10
        # ptxas may put the second try of each wait into the loop: 6 % of the time of a pair of tiles.
        assert new.counts()["NANOSLEEP"] == 0


@pytest.mark.parametrize(
    ("tokens", "h", "splits", "name", "blocks_an_sm"),
    [
        (1, 128, 32, "combine_warps32x8x2x1", 1),
        (1, 128, 64, "combine_warps64x8x2x1", 1),
        (16, 16, 16, "combine_warps16x8x2x2", 2),
        (1, 16, 128, "combine_warps128x4x1x1", 1),
        (1, 8, 100, "combine_warps128x2x1x1", 1),
        (32, 128, 2, "combine_warps2x8x8x8", 8),
        (512, 128, 3, "combine_warps4x8x8x0", None),
        (4, 1, 4, "combine_warps4x2x8x1", 1),
    ],
)
def test_work_is_cut_to_spread_evenly(tokens: int, h: int, splits: int, name: str, blocks_an_sm: int | None) -> None:
    cut = cut_work(tokens, h, 512, splits, H200)
    assert cut.name == name
    threads = WARP * cut.units * cut.groups
    assert threads <= 1024
    assert cut.groups * cut.share >= splits
    assert cut.units <= h * 512 // cut.columns
    blocks = tokens * -(-h * 512 // cut.columns // cut.units)
    if blocks_an_sm is None:
        assert cut.smem is None
        return
    assert blocks <= blocks_an_sm * H200.num_sms
    assert H200.ctas_per_sm(32, cut.smem or 0, threads) == blocks_an_sm


@pytest.mark.parametrize("splits", [2, 3, 8, 13, 32, 64, 128, MAX_SPLITS])
def test_combine_computes_its_addresses_before_it_waits(tmp_path: Path, splits: int) -> None:
    plan = FlashMlaV7Plan(MlaProblem(b=1, h=128, t=65536), FlashMlaV7Tiling(num_splits=splits), H200)
    combine = plan.plan_empty().stages[1].compile(tmp_path, H200, keep=("sass",))
    assert (combine.resources.spill_bytes, combine.warnings) == (0, ())
    opcodes = re.findall(
        r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", combine.artefacts["sass"].read_text(), re.M
    )
    wait = opcodes.index("ACQBULK")
    assert not any(name.startswith("LDG") for name in opcodes[:wait])
    behind = [name for name in opcodes[wait:] if not name.startswith(("BSYNC", "NOP"))]
    assert behind[1].startswith("LDG.E.128"), behind[:4]


@pytest.mark.parametrize("h", [1, 16, 128])
def test_the_sums_of_a_block_fit_the_memory_it_asks_for(h: int) -> None:
    """Whatever number of splits is asked for; asking for less would let blocks write over each other's."""
    most = 0
    for tokens in (1, 2, 5, 8, 16, 40, 132, 600):
        for k in (256, 384, 512):
            for splits in (2, 5, 9, 17, 33, 65, 129, MAX_SPLITS):
                cut = cut_work(tokens, h, k, splits, H200)
                assert cut.smem is None or cut.sums_bytes <= cut.smem <= H200.smem_per_block, cut
                most = max(most, cut.sums_bytes)
    assert most == 1024 * 32  # 1024 threads, eight columns each


@pytest.mark.parametrize("k", [256, 384, 512])
def test_a_piece_lies_in_one_half_of_a_row(k: int) -> None:
    for splits in (2, 8, 64):
        cut = cut_work(4, 16, k, splits, H200)
        assert k // 2 % cut.columns == 0
