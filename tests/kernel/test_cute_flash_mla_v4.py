"""cute-dsl/flash_mla_v4 without a GPU: what it compiles to, what it refuses, and how it cuts requests."""

from __future__ import annotations

import pytest

from mla_var3.device import Device
from mla_var3.errors import Infeasible, Unsupported
from mla_var3.problem import MlaProblem

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from mla_var3.kernel.cute_python.lib.few import schedule
from mla_var3.kernel.cute_python.lib.few.join import PartShape
from mla_var3.kernel.cute_python.lib.few.pair import fixed_bytes, most_slots
from mla_var3.kernel.cute_python.lib.swapped import ring
from mla_var3.kernel.cute_python.lib.swapped.limits import SMEM_BYTES
from mla_var3.kernel.cute_python.mla.flash_mla.flash_mla_v4.flash_mla_v4 import FlashMlaV4Plan, FlashMlaV4Tiling
from mla_var3.toolchain.aot import code_knobs

H200 = Device.get("h200")


@pytest.mark.parametrize("fields", [{"h": 16}, {"h": 3}, {"h": 16, "s": 2, "causal": True}])
def test_compiles_without_spills_or_waits(fields: dict[str, object]) -> None:
    found = FlashMlaV4Plan(MlaProblem(t=512, **fields), None, H200).plan_empty().compile(None, H200)
    assert (found.resources.spill_bytes, found.resources.stack_bytes) == (0, 0)
    assert found.warnings == ()
    # Each consumer: 4 panels x 4 and half of the rope panel for the scores, 4 x 4 for the output.
    assert found.resources.instructions["HGMMA"] == 2 * (4 * 4 + 2 + 4 * 4)
    assert found.resources.instructions["UTMALDG"] == 9
    assert found.resources.smem <= H200.smem_per_block
    assert found.stages == ()


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
        FlashMlaV4Plan(MlaProblem(**{"h": 16, **fields}), None, H200).require()


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"tile_n": 24}, "tile_n = 24"),
        ({"num_splits": 257}, "num_splits"),
        ({"num_splits": 17, "cluster": 17}, "cluster = 17"),
        ({"num_splits": 6, "cluster": 4}, "must divide"),
        ({"cluster": 4}, "give both"),
        ({"num_pipeline_stages": 8}, "the 9 panels"),
        ({"num_pipeline_stages": 40}, "shared memory"),
    ],
)
def test_tiling_says_why_not(fields: dict[str, int], word: str) -> None:
    assert word in FlashMlaV4Tiling(**fields).validate(MlaProblem(h=16), H200).reason
    with pytest.raises(Infeasible):
        FlashMlaV4Plan(MlaProblem(h=16), FlashMlaV4Tiling(**fields), H200).require()


def test_every_vector_of_the_output_is_there_once() -> None:
    """The slices that blocks of a cluster add cover each element of the output, for any number of blocks."""
    for rows in (8, 16, 32):
        part = PartShape(rows, 512)
        places = [
            (part.first_row(v) + r, part.first_column(v) + 8 * c)
            for v in range(part.vectors)
            for r in range(2)
            for c in range(2)
        ]
        assert sorted(places) == [(r, c) for r in range(rows) for c in range(512)]


def test_the_output_of_a_block_fits_where_the_ring_was() -> None:
    for tile_n in (8, 16, 32):
        slots = most_slots(tile_n, 576, 2)
        assert slots >= 18
        assert 4 * tile_n * 512 <= slots * ring.SLOT_BYTES
        assert fixed_bytes(tile_n, 576, 2) + slots * ring.SLOT_BYTES <= SMEM_BYTES


def test_the_smallest_ring_holds_the_output_of_a_block() -> None:
    """The output of 32 rows takes eight slots; the least ring is the nine panels of a tile."""
    assert FlashMlaV4Tiling(tile_n=32, num_pipeline_stages=9).validate(MlaProblem(h=32), H200)
    assert 9 * ring.SLOT_BYTES >= 4 * 32 * 512


@pytest.mark.parametrize(
    ("items", "tiles"), [(1, 2048), (1, 64), (8, 128), (32, 128), (128, 64), (1, 1), (132, 1), (3, 1000)]
)
def test_chosen_splits_are_one_wave_of_clusters(items: int, tiles: int) -> None:
    splits = schedule.choose_splits(items, tiles, 132, tile_us=0.0159, least_us=1.3)
    cluster = schedule.clusters_of(splits)
    assert 1 <= splits <= tiles and splits % cluster == 0
    assert items * splits <= schedule.blocks_at_once(cluster, 132)


def test_splits_and_clusters_are_arguments_of_the_launch() -> None:
    knobs = code_knobs(FlashMlaV4Tiling(num_splits=8, cluster=4))
    assert "num_splits" not in knobs and "cluster" not in knobs


def test_a_workspace_only_for_several_clusters() -> None:
    part = PartShape(16, 512)
    assert part.workspace(items=4, groups=1) == 0
    assert part.workspace(items=4, groups=3) == 4 * 3 * 16 * 512 * 3 // 2
