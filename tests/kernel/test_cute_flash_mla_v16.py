"""cute-dsl/flash_mla_v16, v17 and v20 without a GPU: one tile is asked for first, the loop is version 8's, who
loads for whom, and in which boxes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from reading_sass import instructions, overwritten_operands, waits_first

from mla_var3.device import Device
from mla_var3.diagnosis.loops import inner_loops
from mla_var3.problem import MlaProblem

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from mla_var3.kernel.cute_python.lib.latent.loads import EVEN_ASKED, EVEN_ASKED_THREADS, shared_loads
from mla_var3.kernel.cute_python.lib.latent.shape import Shape
from mla_var3.kernel.cute_python.mla.flash_mla.flash_mla_v8.flash_mla_v8 import FlashMlaV8Plan, FlashMlaV8Tiling
from mla_var3.kernel.cute_python.mla.flash_mla.flash_mla_v16.flash_mla_v16 import FlashMlaV16Plan, FlashMlaV16Tiling
from mla_var3.kernel.cute_python.mla.flash_mla.flash_mla_v17.flash_mla_v17 import FlashMlaV17Plan, FlashMlaV17Tiling
from mla_var3.kernel.cute_python.mla.flash_mla.flash_mla_v20.flash_mla_v20 import FlashMlaV20Plan, FlashMlaV20Tiling

if TYPE_CHECKING:
    from pathlib import Path

H200 = Device.get("h200")


def compiled(plan: Any, folder: Path) -> tuple[list[str], list[Any]]:
    """Instructions of the attention kernel, and its loops of products."""
    main = plan.plan_empty().compile(folder, H200, keep=("sass",)).stages[0]
    sass = main.artefacts["sass"].read_text()
    assert (main.resources.registers, main.resources.spill_bytes, main.warnings) == (168, 0, ())
    assert overwritten_operands(sass) == []
    return instructions(sass), [loop for loop in inner_loops(sass) if loop.counts()["HGMMA"]]


def asks_for_one_tile_first(lines: list[str]) -> None:
    """Of the four producers in the code, the even stage's two tell of their loads, and the odd stage's two wait, each
    at a barrier of its own."""
    ids = rf"0x({EVEN_ASKED:x}|{EVEN_ASKED + 1:x}), {EVEN_ASKED_THREADS:#x}"
    telling = [i for i, line in enumerate(lines) if re.search(rf"BAR\.ARV {ids}", line)]
    waited = [i for i, line in enumerate(lines) if re.search(rf"BAR\.SYNC\S* {ids}", line)]
    assert len({re.search(ids, lines[i]).group(1) for i in waited}) == len(waited) == 2  # type: ignore[union-attr]
    assert len(telling) == 4
    told = telling[1::2]
    loads = [i for i, line in enumerate(lines) if "UTMALDG" in line]
    assert told[1] < waited[0]
    for begin, end in zip([0, told[0]], told, strict=True):
        assert any(begin < i < end for i in loads)
    for begin, end in zip(waited, [waited[1], len(lines)], strict=True):
        assert any(begin < i < end for i in loads)
    assert not any(told[1] < i < waited[0] for i in loads)


def test_one_tile_is_asked_for_first_and_the_loop_is_version_8s(tmp_path: Path) -> None:
    problem = MlaProblem(h=128, t=4096)
    lines, loops = compiled(FlashMlaV16Plan(problem, FlashMlaV16Tiling(num_splits=2), H200), tmp_path)
    asks_for_one_tile_first(lines)
    assert not any("ACQBULK" in line for line in lines)
    _, older = compiled(FlashMlaV8Plan(problem, FlashMlaV8Tiling(num_splits=2), H200), tmp_path)
    for old, new in zip(older, loops, strict=True):
        assert len(new.near) == len(old.near) and new.counts()["HGMMA"] == old.counts()["HGMMA"]
        assert new.counts()["NANOSLEEP"] == 0


def test_a_dependent_touches_no_memory_ahead_of_its_wait(tmp_path: Path) -> None:
    problem = MlaProblem(h=64, t=4096, dtype="fp16")
    plan = FlashMlaV16Plan(problem, FlashMlaV16Tiling(num_splits=32, dependent=True), H200)
    lines, loops = compiled(plan, tmp_path)
    asks_for_one_tile_first(lines)
    waits_first(lines)
    assert loops and all(loop.counts()["NANOSLEEP"] == 0 for loop in loops)
    assert not any("POPC" in line for line in lines)  # nor does it look for its place among the requests


def test_blocks_are_dependents_where_a_part_is_a_pair() -> None:
    def chosen(**fields: Any) -> tuple[int, bool]:
        plan = FlashMlaV16Plan(MlaProblem(**fields), None, H200)
        return plan.num_splits(plan.problem.b, plan.problem.max_pages), bool(plan.tiling.dependent)

    assert chosen(b=1, h=128, t=4096) == (32, True)
    assert chosen(b=1, h=128, t=1024) == (8, True)  # never more parts than pairs
    assert chosen(b=32, h=128, t=4096) == (2, False)
    assert chosen(b=64, h=128, t=128) == (1, False)
    verdict = FlashMlaV16Tiling(num_splits=300).validate(MlaProblem(), H200)
    assert not verdict and "num_splits" in verdict.reason


def test_four_row_tiles_of_version_17_load_for_each_other(tmp_path: Path) -> None:
    def arrivals(plan: Any) -> int:
        """Warps' signals to the blocks of the cluster that a part of a stage is free."""
        lines, _ = compiled(plan, tmp_path)
        assert sum("UTMALDG" in line and "MULTICAST" in line for line in lines) == 18
        return sum("SYNCS.ARRIVE.TRANS64.RED" in line for line in lines)

    problem = MlaProblem(h=128, s=2, t=4096)
    two = arrivals(FlashMlaV16Plan(problem, FlashMlaV16Tiling(num_splits=2), H200))
    assert arrivals(FlashMlaV17Plan(problem, FlashMlaV17Tiling(num_splits=2), H200)) == 2 * two > 0
    sizes = {s: [shared_loads(Shape.of(MlaProblem(h=64, s=s)), most) for most in (2, 4)] for s in (1, 2, 4, 6, 8)}
    assert sizes == {1: [0, 0], 2: [2, 2], 4: [2, 4], 6: [2, 2], 8: [2, 4]}


def test_version_20_asks_for_whole_tokens(tmp_path: Path) -> None:
    """Of the four producers, two of a stage: a loop of one box of whole tokens; two of them, a panel of rope columns.
    Loops have the products of version 16's."""
    problem = MlaProblem(h=128, t=4096)
    lines, loops = compiled(FlashMlaV20Plan(problem, FlashMlaV20Tiling(num_splits=2), H200), tmp_path)
    asked = [line for line in lines if "UTMALDG" in line]
    assert len(asked) == sum("MULTICAST" in line for line in asked) == 4 + 2
    assert sum("UTMALDG.4D" in line for line in asked) == 4  # whole tokens: column, panel, token, page
    asks_for_one_tile_first(lines)
    assert [loop.counts()["HGMMA"] for loop in loops] == [48, 44]  # as in versions 8 and 16
    assert all(loop.counts()["NANOSLEEP"] == 0 for loop in loops)
