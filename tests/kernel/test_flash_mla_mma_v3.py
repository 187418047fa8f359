"""flash_mla_mma_v3 without a GPU: its tiles fit the devices that it is for, its warps share out all work, and its code
spills nothing in the loop of products."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from mla_var3.catalogue import registry
from mla_var3.device import Device
from mla_var3.workload.decode import MlaProblem

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

KERNEL = registry.KernelId.parse("cute-dsl/flash_mla_mma_v3")
WIDTHS = ((512, 64), (512, 0), (512, 48), (256, 64), (256, 32), (256, 0))
TILES = {"h200": (32, 4), "a100": (32, 3), "rtx4090": (16, 3), "a40": (16, 3)}


def geometries() -> list[Any]:
    plan_type: Any = registry.get_plan(KERNEL)
    return [
        plan_type(MlaProblem(h=64, k=k, p=p), None, Device.get(key)).geometry()
        for (k, p), key in itertools.product(WIDTHS, TILES)
    ]


@pytest.mark.parametrize("key", TILES)
def test_tiles_fit_every_device_that_it_is_for(key: str) -> None:
    plan_type: Any = registry.get_plan(KERNEL)
    for (k, p), h in itertools.product(WIDTHS, (33, 64, 128)):
        plan = plan_type(MlaProblem(h=h, k=k, p=p), None, Device.get(key))
        assert plan.supported() and plan.feasible()
        # No more of 16 tokens than were checked on a GPU.
        assert plan.geometry().stages == 3 if plan.geometry().tokens == 16 else plan.geometry().stages >= 3
    chosen = plan_type(MlaProblem(h=128), None, Device.get(key)).geometry()
    assert (chosen.tokens, chosen.stages) == TILES[key]


def test_what_shared_memory_holds_is_what_was_counted() -> None:
    from mla_var3.kernel.cute_python.mla.flash_mla_mma.flash_mla_mma_v3 import flash_mla_mma_v3 as module

    for g in geometries():
        words = module.scheduler.FIRST_WORDS + 4 + 2 * module.SCORE_WARPS + 2 * 2 * module.WARP + 4 * module.ROWS
        words += module.ROWS * module.OUTPUT_WARPS
        assert 4 * words + 8 * 16 <= module.ROOM, "what a thread keeps of rows, and the alignment of eight arrays"
        assert (2 * g.exchange_elements + g.p_elements * 2) % 512 == 0, "Q and the ring begin at whole KiB"


def test_what_does_not_fit_or_is_not_written_is_refused_with_a_reason() -> None:
    plan_type, rtx = registry.get_plan(KERNEL), Device.get("rtx4090")
    cases: tuple[tuple[dict[str, Any], dict[str, Any], str], ...] = (
        ({"h": 128}, {"tile_n": 32}, "and 3 KV tiles of 32 tokens are over the 101,376"),
        ({"h": 128}, {"num_pipeline_stages": 4}, "and 4 KV tiles of 16 tokens are over the 101,376"),
        ({"h": 128}, {"num_pipeline_stages": 2}, "at least 3"),
        ({"h": 128}, {"tile_n": 64}, "tile_n = 64"),
        ({"h": 128}, {"split_tokens": 96}, "not a multiple of 64"),
        ({"h": 128, "k": 128}, {}, "k = 128"),
        ({"h": 128, "p": 40}, {}, "p = 40"),
    )
    for fields, knobs, word in cases:
        assert word in plan_type.tiling_type(**knobs).validate(MlaProblem(**fields), rtx).reason
    for key in ("b200", "rtxpro6000"):
        plan = registry.get_plan(KERNEL)(MlaProblem(h=128), None, Device.get(key))
        assert "the kernel is written for sm_80" in plan.supported().reason


def test_warps_share_out_all_columns_and_all_panels() -> None:
    from mla_var3.kernel.cute_python.mla.flash_mla_mma.flash_mla_mma_v3 import flash_mla_mma_v3 as module

    for g in geometries():
        # Of a panel's four slices a warp of the scores has two, and its partner the others.
        columns = {panel * 64 + (2 * side + i) * 16 for panel, i in g.slices for side in range(2)}
        assert columns >= set(range(0, g.k + g.p, 16)) and len(columns) == 4 * g.panels
        assert g.columns * 8 * module.OUTPUT_WARPS == g.k and g.columns % 4 == 0
        panels = [way + g.ways * i for way in range(g.ways) for i in range(g.copies)]
        assert sorted(x for x in panels if x < g.panels) == list(range(g.panels))
        # Only a thread's last copy may be past the end, or end where the cache does.
        last = max(way + g.ways * (g.copies - 2) for way in range(g.ways))
        assert (last + 1) * 64 <= g.k + g.p
        # There is a place between the products for each copy but the last.
        assert not g.spread or g.token_blocks // 2 * (g.columns // 2) >= g.copies - 1
        # Three stages of 32 tokens leave no room for what the overlap takes.
        assert g.overlap == ((g.tokens, g.stages) != (32, 3))
        # Eight rows of P, 16 bytes each, meet all banks.
        assert {(row * g.p_stride + b) // 4 % 32 for row in range(8) for b in range(0, 16, 4)} == set(range(32))


@pytest.mark.parametrize("key", ["a100", "rtx4090", "h200"])
def test_no_code_spills_in_the_loop_and_that_for_other_gpus_has_no_instruction_of_hopper(
    key: str, tmp_path: Path
) -> None:
    device = Device.get(key)
    made = registry.get_plan(KERNEL)(MlaProblem(h=128), None, device).plan_empty().compile(tmp_path, device, ("sass",))
    assert made.resources.spill_loop_bytes == 0 and made.resources.registers == 168
    sass = made.artefacts["sass"].read_text()
    for name in ("UTMALDG", "HGMMA", "UBLKCP", *(("ACQBULK", "SYNCS") if device.sm_version < (9, 0) else ())):
        assert name not in sass
    assert "HMMA.16816" in sass and "LDGSTS" in sass and ".MT88" in sass
