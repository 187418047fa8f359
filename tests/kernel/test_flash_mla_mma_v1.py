"""flash_mla_mma_v1 without a GPU: its tiles fit every device, its warps share out all of the work, what they exchange
lies where both sides look for it, and no code spills in the loop of products."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mla_var3.catalogue import registry
from mla_var3.device import Device
from mla_var3.workload.decode import MlaProblem

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

KERNEL = registry.KernelId.parse("cute-dsl/flash_mla_mma_v1")
WIDTHS = ((512, 64), (512, 0), (512, 48), (256, 64), (256, 32), (128, 64), (128, 0))
HEADS = (1, 8, 16, 17, 32, 40, 64, 128)


def geometries() -> list[Any]:
    plan_type: Any = registry.get_plan(KERNEL)
    knobs = [{"tile_m": m, "tile_n": n} for m in (16, 32, 64) for n in (16, 32)]
    found = []
    for (k, p), fields in itertools.product(WIDTHS, knobs):
        tiling, problem = plan_type.tiling_type(**fields), MlaProblem(h=16, k=k, p=p)
        if tiling.validate(problem, Device.get("h200")):
            found.append(tiling.geometry(problem, Device.get("h200")))
    assert {(g.m, g.tokens) for g in found} == {(16, 16), (16, 32), (32, 16), (32, 32), (64, 16), (64, 32)}
    return found


@pytest.mark.parametrize("device", [d for d in Device.all() if d.sm_version >= (8, 0)], ids=lambda d: d.key)
def test_tiles_fit_every_device(device: Device) -> None:
    plan_type: Any = registry.get_plan(KERNEL)
    for (k, p), h in itertools.product(WIDTHS, HEADS):
        plan = plan_type(MlaProblem(h=h, k=k, p=p), None, device)
        assert plan.supported() and plan.feasible(), (h, k, p)
        assert plan.geometry().stages >= 4
        if h <= 16 and k == 512 and device.smem_per_block < 110_000:
            assert (plan.geometry().m, plan.geometry().tokens, plan.geometry().stages) == (16, 16, 5)
    chosen = plan_type(MlaProblem(h=128), None, device).geometry()
    large = device.smem_per_block > 200_000
    assert chosen.tokens == (32 if large else 16)
    if device.smem_per_block < 110_000:
        assert (chosen.m, chosen.stages) == (32, 4)


def test_what_does_not_fit_or_is_not_written_is_refused_with_a_reason() -> None:
    plan_type, rtx = registry.get_plan(KERNEL), Device.get("rtx4090")
    cases: tuple[tuple[dict[str, Any], dict[str, Any], str], ...] = (
        ({"h": 128}, {"tile_m": 64, "tile_n": 32}, "and 4 KV tiles of 32 tokens are over the 101,376"),
        ({"h": 16}, {"num_pipeline_stages": 6}, "are over the 101,376"),
        ({"h": 16}, {"num_pipeline_stages": 3}, "at least 4"),
        ({"h": 16, "k": 128}, {"tile_m": 16, "tile_n": 16}, "too few for eight warps"),
        ({"h": 16, "k": 128}, {"tile_m": 16, "tile_n": 32}, "too few for eight warps"),
        ({"h": 16}, {"tile_m": 48}, "tile_m = 48"),
        ({"h": 16}, {"tile_n": 64}, "tile_n = 64"),
        ({"h": 16}, {"split_tokens": 96}, "not a multiple of 64"),
        ({"h": 16, "k": 384}, {}, "k = 384"),
        ({"h": 16, "p": 40}, {}, "p = 40"),
    )
    for fields, knobs, word in cases:
        assert word in plan_type.tiling_type(**knobs).validate(MlaProblem(**fields), rtx).reason


def test_warps_share_out_all_scores_and_outputs() -> None:
    for geometry in geometries():
        of_rows, of_tokens = geometry.score_warps
        assert of_rows * of_tokens * 4 == 8
        rows, tokens = geometry.score_shape
        assert rows * of_rows * 16 == geometry.m and rows
        if geometry.few:
            assert of_tokens * 8 == geometry.tokens
        else:
            assert tokens * of_tokens * 16 == geometry.tokens and tokens
        assert set(range(geometry.slices)) <= {n * 4 + share for n in range(geometry.warp_slices) for share in range(4)}
        of_rows, of_columns = geometry.output_warps
        rows, columns = geometry.output_shape
        assert rows * of_rows * 16 == geometry.m and columns * of_columns * 8 == geometry.k and columns % 4 == 0


def test_the_softmax_reads_each_score_once_where_products_store_it_and_half_a_warp_meets_all_banks() -> None:
    from mla_var3.kernel.cute_python.mla.flash_mla_mma.flash_mla_mma_v1 import flash_mla_mma_v1 as module

    for geometry in geometries():
        # Where accumulators 2 half and 2 half + 1 of a product's lane lie: its block of rows and of tokens, and bytes.
        stored = {}
        for block, tokens, lane, half in itertools.product(
            range(geometry.m // 16), range(geometry.token_blocks), range(32), range(2)
        ):
            at = (block * geometry.token_blocks + tokens) * 4 * module.BLOCK + lane * 16 + half * 8
            stored[at] = (block * 16 + half * 8 + lane // 4, tokens * 8 + lane % 4 * 2)
        read = set()
        warps = range(4, 8) if geometry.few else range(8)  # that have the softmax
        for warp, half_warp, pair in itertools.product(warps, range(2), range(geometry.pairs)):
            banks = set()
            for lane in range(16 * half_warp, 16 * half_warp + 16):
                worker: Any = SimpleNamespace(geometry=geometry, lane=lane, warp=warp)
                block, row, first, place = map(int, module.Worker.softmax_place(worker))
                tokens = pair * geometry.between + first
                at = (block * geometry.token_blocks + tokens) * 4 * module.BLOCK
                at += (row % 8 * 4 + place) * 16 + row // 8 * 8
                assert stored[at] == (block * 16 + row, tokens * 8 + place * 2)
                read.add(at)
                banks |= {at // 4 % 32, at // 4 % 32 + 1}
            assert len(banks) == (32 if geometry.m > 16 or geometry.few else 16)
        assert read == set(stored)
        # Threads of a row are those that its steps reach, in one warp.
        rows: dict[tuple[int, int], set[int]] = {}
        for warp, lane in itertools.product(warps, range(32)):
            worker = SimpleNamespace(geometry=geometry, lane=lane, warp=warp)
            block, row, _, _ = map(int, module.Worker.softmax_place(worker))
            rows.setdefault((warp, block * 16 + row), set()).add(lane)
        assert len(rows) == geometry.m
        for lanes in rows.values():
            reached = {min(lanes)}
            for step in geometry.row_steps:
                reached |= {lane ^ step for lane in reached}
            assert reached == lanes and len(lanes) == geometry.row_threads


@pytest.mark.parametrize(("key", "h"), [("a100", 128), ("rtx4090", 128), ("h200", 128)])
def test_no_code_spills_in_the_loop_and_that_for_other_gpus_has_no_instruction_of_hopper(
    key: str, h: int, tmp_path: Path
) -> None:
    device = Device.get(key)
    made = registry.get_plan(KERNEL)(MlaProblem(h=h), None, device).plan_empty().compile(tmp_path, device, ("sass",))
    assert made.resources.spill_loop_bytes == 0 and made.resources.spill_bytes <= 96
    sass = made.artefacts["sass"].read_text()
    for name in ("UTMALDG", "HGMMA", "UBLKCP", *(("ACQBULK", "SYNCS") if device.sm_version < (9, 0) else ())):
        assert name not in sass
    assert "HMMA.16816" in sass and "LDGSTS" in sass and ".MT88" in sass
