"""cute-dsl/flash_mla_v8 without a GPU: the loop is version 7's, where its parts lie, how its combine is cut."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
import torch
from reading_sass import overwritten_operands

from mla_var3.device import Device
from mla_var3.diagnosis.loops import inner_loops
from mla_var3.problem import MlaProblem

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from mla_var3.kernel.cute_python.lib.latent.fragments import LEAST, TOP, Fragments
from mla_var3.kernel.cute_python.lib.latent.lazy import SLACK
from mla_var3.kernel.cute_python.lib.latent.shape import Shape
from mla_var3.kernel.cute_python.lib.split.cut import AHEAD, WARP, cut_work
from mla_var3.kernel.cute_python.lib.split.splits import MAX_SPLITS
from mla_var3.kernel.cute_python.mla.flash_mla.flash_mla_v7.flash_mla_v7 import FlashMlaV7Plan, FlashMlaV7Tiling
from mla_var3.kernel.cute_python.mla.flash_mla.flash_mla_v8.flash_mla_v8 import FlashMlaV8Plan, FlashMlaV8Tiling

if TYPE_CHECKING:
    from pathlib import Path

H200 = Device.get("h200")


@pytest.mark.parametrize("h", [128, 16])
def test_compiles_to_a_loop_as_long_as_version_7_has(tmp_path: Path, h: int) -> None:
    problem, loops = MlaProblem(h=h, t=512), []
    for plan in (
        FlashMlaV7Plan(problem, FlashMlaV7Tiling(num_splits=1), H200),
        FlashMlaV8Plan(problem, FlashMlaV8Tiling(num_splits=1), H200),
    ):
        main = plan.plan_empty().compile(tmp_path, H200, keep=("sass",))
        sass = main.artefacts["sass"].read_text()
        assert (main.resources.registers, main.resources.spill_bytes, main.warnings) == (168, 0, ())
        assert overwritten_operands(sass) == []
        loops.append(inner_loops(sass))
    for old, new in zip(*loops, strict=True):
        assert abs(len(new.near) - len(old.near)) <= 12
        # ptxas may put the second try of each wait into the loop: 6 % of the time of a pair of tiles.
        assert new.counts()["NANOSLEEP"] == 0
    # A part's vectors go straight from registers to memory, 512 bytes a warp: 8 of each half of the rows.
    for v in range(1, 8):
        assert len(re.findall(rf"STG\.E\.128 desc\S+\.64\+{512 * v:#x}\]", sass)) == 2


def test_marks_of_a_half_that_is_zeros_stay_in_range() -> None:
    """Its sum is told relative to the least exponent; the other half's elements may be as large as 2^64."""
    tokens, largest, smallest_normal = 2.0**24, 3.4e38, 2.0**-126
    assert tokens * 2.0**SLACK * 2.0 ** (TOP - LEAST) < largest
    assert smallest_normal < 2.0 ** (LEAST - 64)
    assert 2.0 ** (LEAST - 28) * 2.0 ** (TOP - LEAST) >= 2.0**-14  # fp16's smallest normal number


@pytest.mark.parametrize(
    ("pd", "blocks", "groups", "vectors"),
    [
        (MlaProblem(h=128), 2, 8, 8),
        (MlaProblem(h=16), 1, 2, 8),
        (MlaProblem(h=20), 1, 3, 8),
        (MlaProblem(h=1), 1, 1, 8),
        (MlaProblem(h=16, s=2), 1, 4, 8),
        (MlaProblem(h=24, h_kv=8, s=3), 8, 2, 8),
        (MlaProblem(h=64, s=3, k=256), 3, 8, 4),
    ],
)
def test_parts_and_marks_have_a_place_each(pd: MlaProblem, blocks: int, groups: int, vectors: int) -> None:
    sizes = Fragments.of(Shape.of(pd))
    assert (sizes.blocks, sizes.groups, sizes.vectors) == (blocks, groups, vectors)
    rows = 8 * groups
    assert (sizes.elements, sizes.marks) == (rows * pd.k, rows * 4)
    plan = FlashMlaV8Plan(pd, None, H200)
    parts, marks = plan.partials(torch.empty(3, pd.s, pd.h, pd.k + pd.p, dtype=torch.bfloat16), 5)
    for memory, each, unit in ((parts, sizes.elements, pd.s * pd.h * pd.k), (marks, sizes.marks, pd.s * pd.h * 4)):
        assert 5 * 3 * blocks * each <= memory.numel() < 5 * 3 * blocks * each + unit
    assert (parts.dtype, marks.dtype) == (torch.float16, torch.float32)
    outputs = (torch.empty(3, pd.s, pd.h, pd.k, dtype=torch.bfloat16), torch.empty(3, pd.h, pd.s))
    shown = plan.results(outputs, (parts, marks), 5)
    assert shown[0].shape[1:] == outputs[0].shape[1:] and shown[0].dtype == torch.bfloat16
    assert [x.data_ptr() for x in shown] == [parts.data_ptr(), marks.data_ptr()]
    assert plan.results(outputs, (), 1) == outputs


@pytest.mark.parametrize(
    ("requests", "pd", "splits", "name", "blocks_an_sm"),
    [
        (1, MlaProblem(h=128), 32, "combine_fragments32x8x1x1x2x1", 1),
        (1, MlaProblem(h=128), 64, "combine_fragments64x16x1x1x2x1", 1),
        (8, MlaProblem(h=16, s=2), 16, "combine_fragments16x4x1x1x2x2", 2),
        (1, MlaProblem(h=16), 128, "combine_fragments128x8x4x1x1x1", 1),
        (1, MlaProblem(h=8), 100, "combine_fragments128x8x4x1x1x1", 1),
        (16, MlaProblem(h=128), 4, "combine_fragments4x1x1x2x8x2", 2),
        (32, MlaProblem(h=128), 2, "combine_fragments2x1x1x2x8x4", 4),
        (512, MlaProblem(h=128), 3, "combine_fragments4x1x1x2x8x0", None),
    ],
)
def test_work_is_cut_to_spread_evenly(
    requests: int, pd: MlaProblem, splits: int, name: str, blocks_an_sm: int | None
) -> None:
    sizes = Fragments.of(Shape.of(pd))
    cut = cut_work(requests * sizes.blocks, sizes, splits, H200)
    assert cut.name == name
    if blocks_an_sm is None:
        assert cut.smem is None
        return
    assert cut.smem is not None
    taken = cut.smem + H200.smem_reserved_per_block
    assert blocks_an_sm * taken <= H200.smem_per_sm < (blocks_an_sm + 1) * taken


def test_every_cut_covers_the_parts_and_fits_a_block() -> None:
    for pd in (MlaProblem(h=128), MlaProblem(h=16), MlaProblem(h=1), MlaProblem(h=96, h_kv=3, s=2, k=128)):
        sizes = Fragments.of(Shape.of(pd))
        for requests in (1, 2, 7, 32, 300):
            for splits in range(2, MAX_SPLITS + 1):
                cut = cut_work(requests * sizes.blocks, sizes, splits, H200)
                assert cut.most >= splits and cut.shares * cut.share >= cut.most
                assert cut.share <= AHEAD or cut.share % AHEAD == 0
                assert WARP * cut.units * cut.warps <= 1024
                assert sizes.vectors % cut.wide == 0 and (cut.wide == 1 or cut.shares == 1)
                assert cut.smem is None or cut.smem_bytes <= cut.smem <= H200.smem_per_block
                if cut.shares > 1:  # the last step: a thread for every `width` columns of a unit
                    width = max(2, 8 // cut.shares)
                    assert cut.lanes * 8 // width <= WARP * cut.warps


@pytest.mark.parametrize(("h", "splits"), [(128, 2), (128, 32), (16, 128), (16, MAX_SPLITS), (128, MAX_SPLITS)])
def test_combine_asks_for_all_it_needs_behind_the_wait(tmp_path: Path, h: int, splits: int) -> None:
    problem = MlaProblem(b=1, h=h, t=128 * splits)
    plan = FlashMlaV8Plan(problem, FlashMlaV8Tiling(num_splits=splits), H200)
    second = plan.plan_empty().stages[1].compile(tmp_path, H200, keep=("sass",))
    assert (second.resources.spill_bytes, second.warnings) == (0, ())
    sizes = Fragments.of(Shape.of(problem))
    cut = cut_work(sizes.blocks, sizes, splits, H200)
    behind = second.artefacts["sass"].read_text().split("ACQBULK", 1)[1]
    loads = [x.start() for x in re.finditer(r"LDG\.E\.128", behind)]
    assert len(loads) == cut.share * (1 + cut.wide)
    # Neither a barrier nor, where they do not take turns, an exponential before them.
    assert behind.find("BAR.SYNC") == -1 or behind.find("BAR.SYNC") > loads[-1]
    assert cut.share > AHEAD or behind.find("MUFU.EX2") > loads[-1]
