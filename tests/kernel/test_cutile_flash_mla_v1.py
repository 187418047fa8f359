"""cuTile's flash_mla_v1: Hopper code with two blocks an SM, joins that leave their counter at zero, right results."""

# ruff: noqa: E402 - the imports below need what importorskip found
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
ct = pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")

from mla_var3.device import Device
from mla_var3.kernel.cutile.lib.merge import LAYOUTS, column_blocks
from mla_var3.kernel.cutile.mla.flash_mla.flash_mla_v1.flash_mla_v1 import (
    MAX_SPLITS,
    FlashMlaV1Plan,
    FlashMlaV1Tiling,
    choose_splits,
)
from mla_var3.problem import MlaProblem
from mla_var3.runtime.correctness.checking import bounds_for, compare
from mla_var3.runtime.correctness.inputs import make_inputs

H200 = Device.get("h200")
ROWS = FlashMlaV1Tiling()
FEW = FlashMlaV1Tiling(True, 16, 64, 64, num_warpgroups=1, occupancy=2)
EIGHT = replace(FEW, tile_m=8)
FEW_HEADS = MlaProblem(b=128, t=4096, h=16)
MANY_HEADS = MlaProblem(b=128, t=4096, h=128)


# ---------------------------------------------------------------- what the compiler makes of it
@pytest.mark.parametrize(
    ("problem", "tiling"),
    [
        (FEW_HEADS, FEW),
        (FEW_HEADS, replace(FEW, tile_k=256)),
        (MlaProblem(b=128, t=4096, h=8), EIGHT),
        (MANY_HEADS, ROWS),
        (MANY_HEADS, replace(ROWS, tile_k=256)),
    ],
    ids=["few", "few-k256", "eight", "rows", "rows-k256"],
)
def test_tilings_compile_to_hopper_code(problem: MlaProblem, tiling: FlashMlaV1Tiling) -> None:
    made = FlashMlaV1Plan(problem, tiling, H200).plan_empty().compile(None, H200)
    count, taken = made.resources.instructions, made.resources
    assert made.warnings == ()
    assert count["HMMA"] == 0 and count["STL"] == 0 and taken.spill_bytes == 0 and taken.stack_bytes == 0
    # One loop; cuTile may keep up to three copies of its body. A wait for every product would be twice as many.
    body = 68 if tiling.swapped else 44 if tiling.tile_k == 256 else 52
    assert count["HGMMA"] in (body, 2 * body, 3 * body) and count["WARPGROUP"] < count["HGMMA"]
    # Tokens come by TMA, the last tile too: no copies through registers beside those of the join.
    assert count["UTMALDG"] >= 18 and count["LDGSTS"] == 0 and count["USETMAXREG"] > 0
    assert taken.ctas_per_sm == tiling.occupancy and taken.smem <= H200.smem_per_block


def test_the_join_kernel_is_small() -> None:
    main, join = FlashMlaV1Plan(MlaProblem(b=1, t=65536, h=128), device=H200).plan_empty().stages
    assert main.name == "flash_mla_v1" and join.name == "combine_splits"
    made = join.compile(None, H200)
    assert made.warnings == () and made.resources.spill_bytes == 0 and made.resources.ctas_per_sm >= 4


# ---------------------------------------------------------------- choices
def test_refusals_say_why() -> None:
    for tiling, words in (
        (replace(FEW, tile_m=32), "tile_m = 32: swapped it is one of (8, 16)."),
        (replace(ROWS, tile_m=128), "tile_m = 128: with heads on M it is one of (64,)."),
        (replace(FEW, tile_n=32), "tile_n = 32: swapped it is one of (64,)."),
        (replace(ROWS, tile_n=128), "tile_n = 128 does not divide a page of 64 tokens: a tile is in one page."),
        (replace(ROWS, tile_k=96), "tile_k = 96 is not one of 64, 128, 256, 512."),
        (replace(FEW, occupancy=1), "1 warpgroups and 1 blocks an SM: swapped they are (1, 2)."),
        (replace(ROWS, num_warpgroups=1), "1 warpgroups and 1 blocks an SM: with heads on M they are (2, 1)."),
        (replace(ROWS, num_splits=257), "num_splits = 257 is outside 0..256."),
        (replace(ROWS, merge_splits=0), "merge_splits = 0 is outside 1..256."),
    ):
        verdict = tiling.validate(FEW_HEADS, H200)
        assert not verdict and verdict.reason == words


@pytest.mark.parametrize("page", [16, 64, 128])
@pytest.mark.parametrize("heads", [1, 3, 16, 32, 128])
def test_default_tilings_are_feasible(heads: int, page: int) -> None:
    for s in (1, 2, 70):
        plan = FlashMlaV1Plan(MlaProblem(h=heads, s=s, page=page), device=H200)
        assert plan.feasible()
        configs = plan.autotune_configs()
        assert configs[0] == plan.tiling and all(x.validate(plan.problem, H200) for x in configs)


def test_splits_fill_the_places_of_the_device() -> None:
    assert choose_splits(128, 64, 132, FEW) == 2  # two blocks an SM
    assert choose_splits(1, 2048, 132, FEW) == 256  # one long request: every place, 8 tiles each
    assert choose_splits(256, 64, 132, ROWS) == 1  # two full waves as they are
    assert choose_splits(64, 64, 132, ROWS) == 2
    assert choose_splits(1, 0, 132, FEW) == 1
    for tiling in (FEW, ROWS):
        for blocks in (1, 5, 131, 133, 300):
            for tiles in (1, 17, 512):
                assert 1 <= choose_splits(blocks, tiles, 132, tiling) <= min(tiles, MAX_SPLITS)


def test_layouts_of_the_join_hold_every_number_of_splits() -> None:
    held = {blocks: most for most, blocks in LAYOUTS}
    assert all(held[column_blocks(n)] >= n for n in range(1, MAX_SPLITS + 1))


def test_one_block_joins_few_splits_and_a_kernel_many() -> None:
    plan = FlashMlaV1Plan(FEW_HEADS, FEW, H200)
    assert not hasattr(plan.with_tiling(replace(FEW, num_splits=4)).plan_empty(), "stages")
    assert len(plan.with_tiling(replace(FEW, num_splits=5)).plan_empty().stages) == 2


def test_sizes_do_not_change_the_signature() -> None:
    def mangled(problem: MlaProblem) -> str:
        kernel = FlashMlaV1Plan(problem, device=H200).plan_empty()
        kernel = kernel.stages[0] if hasattr(kernel, "stages") else kernel
        return kernel.signature_fn(kernel.tiling).with_mangled_symbol("x").symbol

    assert len({mangled(FEW_HEADS.replace(b=b, t=t)) for b, t in ((1, 65536), (16, 4096), (128, 4096), (7, 1))}) == 1
    assert mangled(FEW_HEADS.replace(causal=True)) != mangled(FEW_HEADS)


# ---------------------------------------------------------------- in the interpreter
EDGES = (0, 1, 63, 64, 65, 127, 130, 300)


@pytest.fixture
def interpreted() -> Iterator[None]:
    cutile_cpu = pytest.importorskip("mla_var3.cutile_cpu")
    with cutile_cpu.in_place_of_launch():
        yield


def problem_of(**fields: Any) -> MlaProblem:
    return MlaProblem(**{"b": len(EDGES), "t": max(EDGES), "lengths": EDGES, **fields})


@pytest.mark.parametrize(
    ("fields", "knobs", "dist"),
    [
        ({"h": 16}, {"num_splits": 1}, "normal"),
        ({"h": 16}, {"num_splits": 2}, "just_masked"),
        ({"h": 16}, {"num_splits": 3, "merge_splits": 1}, "normal"),
        ({"h": 5}, {"num_splits": 3}, "below_zero"),
        ({"h": 8, "s": 2, "causal": True}, {"num_splits": 2}, "just_masked"),
        ({"h": 12, "h_kv": 2, "page": 128}, {"num_splits": 2, "tile_k": 256}, "normal"),
        ({"h": 32, "s": 3, "causal": True}, {"num_splits": 3}, "normal"),
        ({"h": 70, "page": 16, "dtype": "fp16"}, {"num_splits": 2}, "last"),
    ],
    ids=lambda x: "-".join(f"{k}{v}" for k, v in x.items()) if isinstance(x, dict) else x,
)
def test_edges_are_right_in_the_interpreter(
    interpreted: None, fields: dict[str, Any], knobs: dict[str, Any], dist: str
) -> None:
    problem = problem_of(**fields)
    plan = FlashMlaV1Plan(problem, device=H200)
    plan = plan.with_tiling(replace(plan.tiling, **knobs))
    inputs = make_inputs(problem, "cpu", seed=7, dist=dist)  # NaN behind every request's last token
    kernel = plan.plan(*inputs)
    floats = [x for x in (*kernel.output_tensors, *kernel.workspace_tensors) if x.is_floating_point()]
    bits = []
    for _ in range(2):
        for x in floats:
            x.fill_(float("nan"))
        out, lse = kernel()
        bits.append((out.clone(), lse.clone()))
    report = compare(out, lse, *plan.reference_fn(*inputs), bounds_for(dist))
    assert report.ok, report.reason
    assert all(torch.equal(x, y) for x, y in zip(*bits, strict=True))
    counters = [x for x in kernel.workspace_tensors if x.dtype == torch.int32]
    assert all(not bool(x.any()) for x in counters)  # the last block leaves them as it found them


# ---------------------------------------------------------------- on a GPU
GPU_CASES = {
    "few": (problem_of(h=16), {"num_splits": 2}),
    "few-long": (MlaProblem(b=2, t=9000, h=16), {}),
    "eight-causal": (problem_of(h=4, s=2, causal=True), {}),
    "rows": (MlaProblem(b=16, t=1000, h=128), {}),
    "rows-joined": (MlaProblem(b=4, s=2, t=700, h=128, causal=True), {"num_splits": 3}),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_CASES)
def test_it_is_right_on_a_gpu(name: str) -> None:
    from mla_var3.runtime.correctness.checking import check

    problem, knobs = GPU_CASES[name]
    plan = FlashMlaV1Plan(problem)
    report = check(FlashMlaV1Plan, problem, replace(plan.tiling, **knobs))
    assert report.ok, report.reason


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 2, 5])
def test_a_graph_replays_over_changed_inputs(splits: int) -> None:
    problem = MlaProblem(b=3, t=900, h=16)
    plan = FlashMlaV1Plan(problem, replace(FEW, num_splits=splits))
    inputs = plan.prepare_inputs("cuda", seed=1)
    kernel = plan.plan(*inputs)
    kernel()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = kernel()
        kernel()
    inputs[3].copy_(torch.tensor([0, 65, 900], dtype=torch.int32))
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    report = compare(out, lse, *plan.reference_fn(*inputs), bounds_for("flashmla"))
    assert report.ok, report.reason
