"""cute-dsl/flash_mla_v13 without a GPU: what it compiles to, in which order it starts, what it refuses."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from mla_var3.device import Device
from mla_var3.diagnosis.loops import inner_loops
from mla_var3.errors import Infeasible, Unsupported
from mla_var3.problem import MlaProblem

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from mla_var3.kernel.cute_python.lib.latent.order import AT_ONCE
from mla_var3.kernel.cute_python.mla.flash_mla.flash_mla_v13.flash_mla_v13 import (
    FlashMlaV13Plan,
    FlashMlaV13Tiling,
    spans_of,
)

if TYPE_CHECKING:
    from pathlib import Path

H200 = Device.get("h200")
PANELS = 9


def sass_of(folder: Path, fields: dict[str, Any], **tiling: Any) -> tuple[Any, str]:
    plan = FlashMlaV13Plan(MlaProblem(t=512, **fields), FlashMlaV13Tiling(num_splits=2, **tiling), H200)
    main, second = plan.plan_empty().compile(folder, H200, keep=("sass",)).stages
    assert second.resources.spill_bytes == 0
    return main, main.artefacts["sass"].read_text()


@pytest.mark.parametrize("fields", [{"h": 8}, {"h": 16, "s": 2, "causal": True}, {"h": 16, "dtype": "fp16"}])
def test_compiles_without_spills_or_waits(tmp_path: Path, fields: dict[str, Any]) -> None:
    main, sass = sass_of(tmp_path, fields)
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


def test_barriers_are_made_by_one_lane_and_do_not_wait_for_the_page(tmp_path: Path) -> None:
    _, sass = sass_of(tmp_path, {"h": 16})
    lines = [line for line in sass.splitlines() if re.search(r"/\*[0-9a-f]{4,5}\*/", line)]
    made = [i for i, line in enumerate(lines) if "SYNCS.EXCH.64" in line]
    slots = (2 * PANELS, 40)
    assert slots[0] <= len(made) // 2 <= slots[1]  # full and empty of each slot, none in a loop over lanes
    assert made[-1] - made[0] == len(made) - 1
    loads = [i for i, line in enumerate(lines[: made[0]]) if "LDG" in line]
    assert (
        len(loads) == 2 + AT_ONCE
    )  # length and page are asked for ahead, and all lengths where blocks are put in order
    for asked in loads:
        register = re.search(r"LDG\.E (R\d+),", lines[asked])
        assert register is not None
        used = next(i for i in range(asked + 1, len(lines)) if re.search(rf"\b{register.group(1)}\b", lines[i]))
        assert used > made[-1]
    load = next(i for i, line in enumerate(lines) if "UTMALDG" in line)
    assert not any("I2F" in line or "MUFU.RCP" in line for line in lines[:load])  # no division


def test_the_loop_over_panels_is_a_loop(tmp_path: Path) -> None:
    for tokens, loads in ((64, 1), (32, 4)):  # with two spans of panels and two rows of boxes, four places
        main, _ = sass_of(tmp_path / str(tokens), {"h": 16}, box_tokens=tokens)
        assert main.resources.instructions["UTMALDG"] == loads


def test_boxes_are_short_where_rows_are_many() -> None:
    def box(h: int) -> int:
        return int(FlashMlaV13Plan(MlaProblem(h=h), None, H200).resolved.box_tokens)

    assert [box(h) for h in (8, 16, 32)] == [64, 64, 32]
    for panels in (3, 5, 7, 9):
        assert sum(spans_of(panels, 64)) == sum(spans_of(panels, 32)) == panels


@pytest.mark.parametrize(
    ("fields", "word"),
    [({"k": 500}, "k = 500"), ({"p": 32}, "p = 32"), ({"page": 48}, "48"), ({"n": 64}, "n = 64"),
     ({"h": 64}, "flash_mla_v8"), ({"h": 16, "s": 3}, "flash_mla_v8"), ({"dtype": "fp32"}, "fp32")],
)  # fmt: skip
def test_refuses_with_a_reason(fields: dict[str, Any], word: str) -> None:
    with pytest.raises(Unsupported, match=word):
        FlashMlaV13Plan(MlaProblem(**{"h": 16, **fields}), None, H200).require()


@pytest.mark.parametrize(
    ("fields", "word"),
    [({"tile_n": 24}, "tile_n = 24"), ({"tile_n": 8}, "16 query rows"), ({"num_splits": 257}, "num_splits"),
     ({"num_pipeline_stages": 17}, "9 of a tile for each of 2"), ({"num_pipeline_stages": 40}, "shared memory"),
     ({"box_tokens": 16}, "box_tokens = 16")],
)  # fmt: skip
def test_tiling_says_why_not(fields: dict[str, int], word: str) -> None:
    assert word in FlashMlaV13Tiling(**fields).validate(MlaProblem(h=16), H200).reason
    with pytest.raises(Infeasible):
        FlashMlaV13Plan(MlaProblem(h=16), FlashMlaV13Tiling(**fields), H200).require()


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
