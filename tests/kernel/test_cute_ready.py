"""cute-dsl/flash_mla_v14, v15, v18 without a GPU: what comes ahead of the wait for the kernel before, who fits beside
whom, and where a thread stores what it has."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
from reading_sass import MEMORY, first_at, instructions, overwritten_operands, waits_first

from mla_var3.device import Device
from mla_var3.diagnosis.loops import inner_loops
from mla_var3.problem import MlaProblem

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from mla_var3.kernel.cute_python.lib import wgmma
from mla_var3.kernel.cute_python.lib.latent import fragments
from mla_var3.kernel.cute_python.lib.latent.fragments import Fragments
from mla_var3.kernel.cute_python.lib.latent.shape import Shape
from mla_var3.kernel.cute_python.lib.split.cut import WARP, Cut, Room, cut_beside, cut_work
from mla_var3.kernel.cute_python.lib.swapped import swapped
from mla_var3.kernel.cute_python.lib.swapped.consumer import storage_bytes
from mla_var3.kernel.cute_python.lib.swapped.ready_plan import BOARDS, REGISTERS, THREADS
from mla_var3.kernel.cute_python.lib.wgmma import WARPGROUP
from mla_var3.kernel.cute_python.mla.flash_mla.flash_mla_v13.flash_mla_v13 import FlashMlaV13Plan
from mla_var3.kernel.cute_python.mla.flash_mla.flash_mla_v14.flash_mla_v14 import FlashMlaV14Plan
from mla_var3.kernel.cute_python.mla.flash_mla.flash_mla_v15.flash_mla_v15 import FlashMlaV15Plan
from mla_var3.kernel.cute_python.mla.flash_mla.flash_mla_v18.flash_mla_v18 import FlashMlaV18Plan

if TYPE_CHECKING:
    from pathlib import Path

H200 = Device.get("h200")
FEW_ROWS = ((8, 16, 1), (16, 32, 8), (128, 16, 1))  # splits, h, b


def cut_of(plan: Any, requests: int, splits: int) -> Cut:
    """How the plan's combine is cut."""
    sizes = Fragments.of(Shape.of(plan.problem))
    found = cut_beside(requests * sizes.blocks, sizes, splits, H200, plan.room(requests, splits))
    assert found.lets_go == found.name.endswith("g")
    return found


def compiled(plan: Any, folder: Path, fields: dict[str, Any], **tiling: Any) -> tuple[Any, Any, list[str]]:
    """The plan with two parts a request, its stages and the instructions of the first."""
    made = plan(MlaProblem(**{"t": 512, **fields}), plan.tiling_type(num_splits=2, **tiling), H200)
    main, second = made.plan_empty().compile(folder, H200, keep=("sass",)).stages
    sass = main.artefacts["sass"].read_text()
    assert (main.resources.spill_bytes, second.resources.spill_bytes, main.warnings) == (0, 0, ())
    assert overwritten_operands(sass) == []
    loops = [loop for loop in inner_loops(sass) if loop.counts()["HGMMA"]]
    assert loops and all(loop.counts()["NANOSLEEP"] == 0 for loop in loops)
    return made, (main, second), instructions(sass)


def divides_nothing(lines: list[str]) -> None:
    """Barriers are made ahead of the one wait for the kernel before, and nothing is divided behind it."""
    wait, load = waits_first(lines), first_at(lines, "UTMALDG")
    assert not any("I2F" in line or "MUFU.RCP" in line for line in lines[wait:load])


@pytest.mark.parametrize("kind", [FlashMlaV14Plan, FlashMlaV18Plan])
@pytest.mark.parametrize("fields", [{"h": 8}, {"h": 16, "dtype": "fp16"}, {"h": 16, "s": 2, "causal": True}])
def test_few_rows_wait_first_and_leave_room(tmp_path: Path, kind: Any, fields: dict[str, Any]) -> None:
    plan, (main, second), lines = compiled(kind, tmp_path, fields)
    divides_nothing(lines)
    # The next kernel's blocks are let come behind the products.
    assert first_at(lines, "PREEXIT") > max(i for i, line in enumerate(lines) if "HGMMA" in line)
    shape = plan.shape
    assert main.resources.smem == storage_bytes(shape, 2, len(BOARDS))
    assert main.resources.threads == THREADS
    held = main.resources.smem + second.resources.smem + 2 * H200.smem_reserved_per_block
    assert held <= H200.smem_per_sm
    if shape.tile_n in REGISTERS:
        assert REGISTERS[shape.tile_n] - 8 < main.resources.registers <= REGISTERS[shape.tile_n]
        # Of nine warps three lie in one of the SM's four register files, and of the combine's eight two.
        both = WARP * (3 * REGISTERS[shape.tile_n] + 2 * 64)
        assert both <= H200.regs_per_sm // 4


@pytest.mark.parametrize(("h", "singles"), [(128, False), (64, True)])
def test_many_rows_wait_first(tmp_path: Path, h: int, singles: bool) -> None:
    _, (main, _), lines = compiled(FlashMlaV15Plan, tmp_path, {"h": h}, singles=singles)
    divides_nothing(lines)
    assert main.resources.registers == 168


@pytest.mark.parametrize(
    ("kind", "splits", "h", "b"),
    [
        *(
            (kind, *work)
            for kind in (FlashMlaV14Plan, FlashMlaV18Plan)
            for work in ((8, 16, 1), (16, 32, 8), (128, 16, 1))
        ),
        (FlashMlaV15Plan, 32, 128, 1),
    ],
)
def test_the_combine_has_the_registers_that_room_is_kept_for(
    tmp_path: Path, kind: Any, splits: int, h: int, b: int
) -> None:
    plan: Any = kind(MlaProblem(b=b, h=h, t=8192), kind.tiling_type(num_splits=splits), H200)
    second = plan.plan_empty().stages[1]
    made = second.compile(tmp_path, H200, keep=("sass",))
    cut = cut_of(plan, b, splits)
    assert second.name == cut.name + "t" * plan.turned
    assert made.resources.registers <= cut.registers and made.resources.spill_bytes == 0
    lines = instructions(made.artefacts["sass"].read_text())
    assert cut.lets_go and first_at(lines, "PREEXIT") < first_at(lines, "ACQBULK") < first_at(lines, MEMORY)


def test_the_combine_stays_where_the_attention_is_not() -> None:
    def cut(b: int, t: int, h: int = 128) -> tuple[int, bool]:
        plan = FlashMlaV15Plan(MlaProblem(b=b, h=h, t=t), None, H200)
        splits = plan.num_splits(b, plan.problem.max_pages)
        return plan.blocks(b) * splits, cut_of(plan, b, splits).lets_go

    assert cut(1, 4096) == (64, True)
    assert cut(1, 1024) == (32, True)
    assert cut(1, 65536) == (128, False)  # four SMs are left


def test_no_room_means_the_usual_cut() -> None:
    sizes = Fragments.of(Shape.of(MlaProblem(h=16)))
    usual = cut_work(sizes.blocks, sizes, 16, H200)
    for room in (Room(0, 65536, 200_000), Room(-5, 65536, 200_000), Room(132, 1024, 200_000), Room(132, 65536, 512)):
        assert cut_beside(sizes.blocks, sizes, 16, H200, room) == usual
    beside = cut_beside(sizes.blocks, sizes, 16, H200, Room(132, 65536, 200_000))
    assert beside.lets_go and beside.smem is None and beside.name != usual.name


def test_the_ring_gives_a_panel_to_the_combine() -> None:
    for h in (8, 16, 32):
        slots = [
            p(MlaProblem(h=h), None, H200).resolved.num_pipeline_stages for p in (FlashMlaV13Plan, FlashMlaV14Plan)
        ]
        assert slots[0] - slots[1] == 1
    told = FlashMlaV14Plan(MlaProblem(h=16), FlashMlaV14Plan.tiling_type(num_pipeline_stages=20), H200)
    assert told.resolved.num_pipeline_stages == 20


def test_parts_are_single_tiles_where_there_are_as_many() -> None:
    def singles(**fields: Any) -> bool:
        return bool(FlashMlaV15Plan(MlaProblem(**fields), None, H200).tiling.singles)

    assert singles(b=1, h=128, t=1024) and singles(b=1, h=64, t=4096)
    assert not singles(b=1, h=128, t=4096) and not singles(b=2, h=128, t=2048)


def test_a_thread_stores_what_it_has_of_a_row() -> None:
    """Turned, the row and columns of a vector's elements are those of the accumulators that a thread has."""
    sizes = Fragments.of(Shape.of(MlaProblem(h=32)))
    seen = set()
    for thread in range(WARPGROUP):
        for c, panel, half in product(range(8), range(4), range(2)):
            lane, vector, element = thread % 32, c % 2 * 4 + thread // 32, 2 * panel + half
            row = fragments.turned_row(lane, vector, sizes) + c // 2 * fragments.GROUP
            column = fragments.turned_column(element, vector, sizes) + lane // 4
            assert (row, column) == (swapped.acc_column(thread, c), panel * 64 + wgmma.acc_row(thread, half))
            seen.add((row, column))
    assert len(seen) == 32 * 256
    turns = [Fragments.of(Shape.of(MlaProblem(h=32, k=k))).turns for k in (512, 128, 256, 384)]
    assert turns == [True, False, False, False]


def test_narrow_caches_have_parts_that_are_rows(tmp_path: Path) -> None:
    for k, name in ((512, "t"), (256, "")):
        plan = FlashMlaV18Plan(MlaProblem(h=16, k=k, t=512), FlashMlaV18Plan.tiling_type(num_splits=2), H200)
        assert plan.plan_empty().stages[1].name.endswith("g" + name)
