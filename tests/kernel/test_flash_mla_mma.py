"""flash_mla_mma without a GPU: its tiles fit every device, its warps share out all of the work, and the code for an
A100 has no instruction of Hopper."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from mla_var3.catalogue import registry
from mla_var3.device import Device
from mla_var3.workload.decode import MlaProblem

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

KERNEL = registry.KernelId.parse("cute-dsl/flash_mla_mma")
WIDTHS = ((512, 64), (512, 0), (512, 48), (256, 64), (256, 32), (128, 64), (128, 0))
HEADS = (1, 8, 16, 17, 32, 40, 64, 128)


def geometries() -> list[Any]:
    plan_type: Any = registry.get_plan(KERNEL)
    knobs = [{"tile_m": m, "tile_n": n} for m in (16, 32, 64) for n in (16, 32, 64)]
    found = []
    for (k, p), fields in itertools.product(WIDTHS, knobs):
        tiling, problem = plan_type.tiling_type(**fields), MlaProblem(h=16, k=k, p=p)
        if tiling.validate(problem, Device.get("h200")):
            found.append(tiling.geometry(problem, Device.get("h200")))
    assert len(found) > 30
    return found


@pytest.mark.parametrize("device", [d for d in Device.all() if d.sm_version >= (8, 0)], ids=lambda d: d.key)
def test_tiles_fit_every_device(device: Device) -> None:
    plan_type: Any = registry.get_plan(KERNEL)
    for (k, p), h in itertools.product(WIDTHS, HEADS):
        plan = plan_type(MlaProblem(h=h, k=k, p=p), None, device)
        assert plan.supported() and plan.feasible(), (h, k, p)
        geometry = plan.geometry()
        assert geometry.stages >= 2 and geometry.m in (16, 32, 64)
        assert geometry.m <= 32 or device.arch == "sm_90a"
        assert geometry.overlapped == (geometry.stages >= 3)
    chosen = plan_type(MlaProblem(h=128), None, device).geometry()
    assert chosen.m == (64 if device.arch == "sm_90a" else 32)
    assert chosen.overlapped == (device.smem_per_block > 150_000)


def test_what_does_not_fit_or_is_not_written_is_refused_with_a_reason() -> None:
    plan_type, rtx = registry.get_plan(KERNEL), Device.get("rtx4090")
    cases: tuple[tuple[dict[str, Any], dict[str, Any], str], ...] = (
        (
            {"h": 128},
            {"tile_m": 64, "tile_n": 32},
            "and 2 KV tiles of 32 tokens are over the 101,376 that a CTA of rtx4090",
        ),
        ({"h": 16}, {"num_pipeline_stages": 3}, "are over the 101,376"),
        ({"h": 16}, {"num_pipeline_stages": 1}, "at least 2"),
        ({"h": 16}, {"tile_m": 16, "tile_n": 16}, "threads share a row, two tokens each at least"),
        ({"h": 16, "k": 128}, {"tile_m": 16}, "two warps have the same columns"),
        ({"h": 16}, {"tile_m": 48}, "tile_m = 48"),
        ({"h": 16}, {"split_tokens": 96}, "not a multiple of 64"),
        ({"h": 16, "k": 384}, {}, "k = 384"),
        ({"h": 16, "p": 40}, {}, "p = 40"),
    )
    for fields, knobs, word in cases:
        assert word in plan_type.tiling_type(**knobs).validate(MlaProblem(**fields), rtx).reason


def test_warps_share_out_all_scores_and_outputs() -> None:
    for geometry in geometries():
        of_rows, of_tokens, of_columns = geometry.score_warps
        assert of_rows * of_tokens * of_columns == 8
        rows, columns = geometry.score_shape
        assert rows * of_rows * 16 == geometry.m and columns * of_tokens * 8 == geometry.tokens and columns % 2 == 0
        slices = [n * of_columns + share for n in range(geometry.warp_slices) for share in range(of_columns)]
        assert set(range(geometry.slices)) <= set(slices) and len(set(slices)) == len(slices)
        of_rows, of_columns = geometry.output_warps
        rows, columns = geometry.output_shape
        assert rows * of_rows * 16 == geometry.m and columns * of_columns * 8 == geometry.k and columns % 4 == 0
        assert geometry.row_threads * geometry.vector * geometry.vectors == geometry.tokens and geometry.vector >= 2


@pytest.mark.parametrize("tokens", [16, 32, 64])
def test_scores_lie_where_neither_products_nor_softmax_meet_in_a_bank(tokens: int) -> None:
    from mla_var3.kernel.cute_python.mla.flash_mla_mma.flash_mla_mma import flash_mla_mma as module

    def place(row: int, column: int) -> int:
        return int(module.score_place(row, column, tokens))

    places = {place(row, column) for row in range(64) for column in range(tokens)}
    assert places == set(range(64 * tokens))
    # Pairs of columns of half a warp, which are stored together: four rows, four lanes each.
    for row, column in itertools.product(range(0, 64, 4), range(0, tokens, 8)):
        lanes = [(row + lane // 4, column + lane % 4 * 2) for lane in range(16)]
        assert len({(place(r, c) + e) % 32 for r, c in lanes for e in range(2)}) == 32
    # Vectors of four stay together.
    for row, column in itertools.product(range(64), range(0, tokens, 4)):
        assert [place(row, column + i) for i in range(4)] == [place(row, column) + i for i in range(4)]


@pytest.mark.parametrize(("key", "h"), [("a100", 128), ("rtx4090", 16)])
def test_the_code_for_other_gpus_has_no_instruction_of_hopper(key: str, h: int, tmp_path: Path) -> None:
    """Nor does it spill in the loop of products."""
    device = Device.get(key)
    made = registry.get_plan(KERNEL)(MlaProblem(h=h), None, device).plan_empty().compile(tmp_path, device, ("sass",))
    resources = made.resources
    assert resources.spill_loop_bytes == 0 and resources.spill_bytes <= 96
    sass = made.artefacts["sass"].read_text()
    for name in ("ACQBULK", "UTMALDG", "SYNCS", "HGMMA", "UBLKCP"):
        assert name not in sass
    assert sass.count("HMMA.16816") >= 34 and sass.count("LDGSTS") > 20 and ".MT88" in sass
