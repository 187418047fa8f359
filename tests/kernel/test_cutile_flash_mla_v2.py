"""cuTile's flash_mla_v2: three stages that nobody waits for, a combine that transposes, right results."""

# ruff: noqa: E402 - the imports below need what importorskip found
from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
ct = pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")

from mla_var3.check.judge import compare
from mla_var3.device import Device
from mla_var3.kernel.cutile.mla.flash_mla.flash_mla_v2.flash_mla_v2 import (
    COMBINE_TILES,
    MAX_SPLITS,
    FlashMlaV2Plan,
    FlashMlaV2Tiling,
    choose_splits,
    combine_kernel,
    combine_tile,
)
from mla_var3.kernel.cutile.prims.latent import FLOOR
from mla_var3.workload.decode import MlaProblem, bounds_for, make_inputs

H200 = Device.get("h200")
RING = FlashMlaV2Tiling()
FEW_HEADS = MlaProblem(b=128, t=4096, h=16)
MASKED = MlaProblem(b=128, t=4096, h=8, s=2, causal=True)


def waits_for_its_own_load(sass: str) -> bool:
    """Whether a thread that asks for a TMA load then waits for that load's barrier, before it asks for another one."""
    announced = ""
    for line in sass.splitlines():
        if found := re.search(r"SYNCS\.ARRIVE\.TRANS64 RZ, \[UR\d+\+(0x[0-9a-f]+)\]", line):
            announced = found[1]
        found = re.search(r"SYNCS\.PHASECHK\.TRANS64\.TRYWAIT P\d, \[UR\d+\+(0x[0-9a-f]+)\]", line)
        if found and found[1] == announced:
            return True
    return False


# ---------------------------------------------------------------- what the compiler makes of it
@pytest.mark.parametrize(
    ("problem", "tiling"),
    [
        (FEW_HEADS, replace(RING, num_splits=1)),
        (FEW_HEADS, replace(RING, num_splits=2)),
        (FEW_HEADS.replace(h=8, dtype="fp16", page=128), replace(RING, num_splits=1)),
        (FEW_HEADS.replace(h=8, dtype="fp16", page=128), replace(RING, num_splits=2)),
        (FEW_HEADS.replace(causal=True), replace(RING, num_splits=1)),
        (FEW_HEADS, replace(RING, num_splits=1, tile_k=512)),
        (FEW_HEADS, replace(RING, occupancy=2, num_splits=2, tile_k=512)),
        (FEW_HEADS, replace(RING, pages=2, num_splits=1, tile_k=256)),
        (MASKED, replace(FlashMlaV2Plan(MASKED).tiling, num_splits=1)),
        (MASKED, replace(FlashMlaV2Plan(MASKED).tiling, num_splits=2)),
    ],
    ids=[
        "unsplit",
        "split",
        "eight-fp16",
        "eight-fp16-split",
        "causal-of-one",
        "wide",
        "two-ctas",
        "pairs",
        "masked",
        "masked-split",
    ],
)
def test_tilings_compile_to_hopper_code(problem: MlaProblem, tiling: FlashMlaV2Tiling, tmp_path: Path) -> None:
    made = FlashMlaV2Plan(problem, tiling, H200).plan_empty().compile(tmp_path, H200, ("sass",))
    main = made.stages[0] if made.stages else made
    count, taken = main.resources.instructions, main.resources
    assert made.warnings == ()
    assert count["HMMA"] == 0 and count["STL"] == 0 and taken.spill_bytes == 0 and taken.stack_bytes == 0
    # A wait for every product would be twice as many.
    assert count["HGMMA"] % 68 == 0 and count["WARPGROUP"] < 0.6 * count["HGMMA"]
    assert taken.ctas_per_sm == tiling.occupancy and taken.smem <= H200.smem_per_block
    if tiling.pages == tiling.occupancy == 1:
        # Q, three tiles of latents, one of rope: an epilogue that needed more would have cost one of the three.
        assert taken.smem > 2 * (16 * 576 + 3 * 64 * 512 + 64 * 64)
    assert not waits_for_its_own_load(main.artefacts["sass"].read_text())


def test_float32_partials_behind_narrow_loads_serialise_products(tmp_path: Path) -> None:
    """Why a split problem takes one load of 512 columns and an unsplit one loads of 64."""

    def loads_of(splits: int, tile_k: int) -> tuple[int, int]:
        tiling = replace(RING, num_splits=splits, tile_k=tile_k)
        made = FlashMlaV2Plan(FEW_HEADS, tiling, H200).plan_empty().compile(tmp_path, H200, ())
        count = (made.stages[0] if made.stages else made).resources.instructions
        return count["HGMMA"], count["WARPGROUP"]

    products, waits = loads_of(2, 64)
    assert waits >= 2 * products
    assert loads_of(1, 0) == loads_of(1, 64) != loads_of(1, 512)
    assert loads_of(2, 0) == loads_of(2, 512) != (products, waits)


def test_the_wait_is_seen_where_there_is_one() -> None:
    """From version 1, whose atomic made its loads wait: what this version is there to avoid."""
    load = """
        @P0 SYNCS.ARRIVE.TRANS64 RZ, [UR16+0x1b800], R9 ;
        UTMALDG.3D [UR8], [UR6], desc[URZ] ;
        SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR16+0x1b800], R8 ;
    """
    assert waits_for_its_own_load(load)
    another = "SYNCS.ARRIVE.TRANS64 RZ, [UR16+0x1b808], R9 ;"
    assert not waits_for_its_own_load(load.replace("UTMALDG", f"{another}\n        UTMALDG"))


@pytest.mark.parametrize("splits", [most for most, _ in COMBINE_TILES])
def test_the_combine_kernel_is_small(splits: int) -> None:
    """Beside the attention kernel's, its code stays in an SM's instruction cache (128 KB)."""
    plan = FlashMlaV2Plan(MlaProblem(b=1, t=131072, h=16), replace(RING, num_splits=splits), H200)
    main, combine = plan.plan_empty().stages
    assert main.name == "flash_mla_v2" and combine.name == "join_sums"
    made = combine.compile(None, H200)
    assert made.warnings == () and made.resources.spill_bytes == 0 and made.resources.ctas_per_sm >= 3
    code = 16 * (made.resources.instructions["total"] + main.compile(None, H200).resources.instructions["total"])
    assert code < 96 * 1024


# ---------------------------------------------------------------- choices
def test_refusals_say_why() -> None:
    for tiling, words in (
        (replace(RING, tile_k=96), "tile_k = 96 is not one of 64, 128, 256, 512, or 0 for a choice."),
        (replace(RING, pages=3), "pages = 3 is neither 1 nor 2."),
        (replace(RING, occupancy=3), "1 warpgroups, 3 CTAs an SM and clusters of 1: each is 1 or 2."),
        (replace(RING, num_splits=257), "num_splits = 257 is outside 0..256."),
        (replace(RING, pages=2, occupancy=2), "2 CTAs with Q and 2 KV tiles take 348160 bytes; a CTA has"),
    ):
        verdict = tiling.validate(FEW_HEADS, H200)
        assert not verdict and words in verdict.reason
    for options, words in (
        ({"h": 128}, "for 16 query rows of a latent cache at most; the problem has 128"),
        ({"page": 32}, "pages of 32 tokens"),
        ({"k": 256}, "k = 256"),
    ):
        verdict = FlashMlaV2Plan(FEW_HEADS.replace(**options)).supported()
        assert not verdict and words in verdict.reason


@pytest.mark.parametrize("fields", [{"h": 1}, {"h": 16}, {"h": 3, "s": 4}, {"h": 8, "s": 2, "causal": True}], ids=str)
def test_default_tilings_are_feasible(fields: dict[str, Any]) -> None:
    plan = FlashMlaV2Plan(MlaProblem(**fields), device=H200)
    assert plan.feasible()
    configs = plan.autotune_configs()
    assert configs[0] == plan.tiling and all(x.validate(plan.problem, H200) for x in configs)


def test_the_search_refuses_what_leaves_the_tensor_cores() -> None:
    """Clusters of two with two warpgroups: most products by plain arithmetic, of which the compiler says nothing."""
    from mla_var3.toolchain.resources import off_tensor_cores

    plan = FlashMlaV2Plan(FEW_HEADS, device=H200)
    clusters = FlashMlaV2Tiling(tile_k=512, num_warpgroups=2, num_ctas=2)
    assert clusters in plan.autotune_configs()
    usual, off = (plan.with_tiling(x).plan_empty().compile(None, H200) for x in (plan.tiling, clusters))
    assert off_tensor_cores(usual, None, H200) == ""
    reason = off_tensor_cores(off, usual, H200)
    assert re.search(r"^flash_mla_v2 falls off the tensor-core path of sm_90a: \d+ warpgroup", reason)


def test_splits_fill_the_device() -> None:
    assert choose_splits(128, 64, 132, 1) == 1
    assert choose_splits(32, 128, 132, 1) == 4
    assert choose_splits(1, 2048, 132, 1) == 128
    assert choose_splits(1, 0, 132, 1) == 1
    for blocks in (1, 5, 131, 133, 300):
        for tiles in (1, 17, 512):
            for occupancy in (1, 2):
                assert 1 <= choose_splits(blocks, tiles, 132, occupancy) <= min(tiles, MAX_SPLITS)


def test_offsets_of_partials_fit_32_bits() -> None:
    plan = FlashMlaV2Plan(FEW_HEADS, replace(RING, num_splits=256), H200)
    assert plan.num_splits(1, 1024) == 256
    assert plan.num_splits(2000, 1024) == 131 and 2000 * 131 * 512 * 16 < 2**31 <= 2000 * 132 * 512 * 16


def test_tiles_of_the_combine_hold_every_number_of_splits() -> None:
    assert combine_tile(1) == COMBINE_TILES[0] and COMBINE_TILES[-1][0] == MAX_SPLITS
    for n in range(1, MAX_SPLITS + 1):
        most, columns = combine_tile(n)
        assert n <= most and 512 % columns == 0


def test_sizes_do_not_change_the_signature() -> None:
    def mangled(problem: MlaProblem) -> str:
        kernel = FlashMlaV2Plan(problem, device=H200).plan_empty()
        kernel = kernel.stages[0] if hasattr(kernel, "stages") else kernel
        return kernel.signature_fn(kernel.tiling).with_mangled_symbol("x").symbol

    one = {mangled(FEW_HEADS.replace(b=b, t=t)) for b, t in ((16, 64), (128, 4096), (7, 1))}
    many = {mangled(FEW_HEADS.replace(b=b, t=t)) for b, t in ((1, 65536), (32, 8192))}
    assert len(one) == len(many) == 1 and one != many


# ---------------------------------------------------------------- in the interpreter
EDGES = (0, 1, 63, 64, 65, 127, 130, 300)


def problem_of(**fields: Any) -> MlaProblem:
    return MlaProblem(**{"b": len(EDGES), "t": max(EDGES), "lengths": EDGES, **fields})


@pytest.mark.parametrize(
    ("fields", "knobs", "dist"),
    [
        ({"h": 16}, {"num_splits": 1}, "normal"),
        ({"h": 16}, {"num_splits": 3, "pages": 2}, "just_masked"),
        ({"h": 5}, {"num_splits": 3}, "below_zero"),
        ({"h": 8, "s": 2, "causal": True}, {"num_splits": 2}, "just_masked"),
        ({"h": 3, "s": 3, "causal": True}, {"num_splits": 1, "pages": 2, "occupancy": 1}, "last"),
        ({"h": 12, "h_kv": 2, "page": 128}, {"num_splits": 2, "tile_k": 64}, "normal"),
        ({"h": 16, "page": 256, "dtype": "fp16"}, {"num_splits": 1}, "last"),
    ],
    ids=lambda x: "-".join(f"{k}{v}" for k, v in x.items()) if isinstance(x, dict) else x,
)
def test_edges_are_right_in_the_interpreter(
    interpreted: None, fields: dict[str, Any], knobs: dict[str, Any], dist: str
) -> None:
    problem = problem_of(**fields)
    plan = FlashMlaV2Plan(problem, device=H200)
    plan = plan.with_tiling(replace(plan.tiling, **knobs))
    inputs = make_inputs(problem, "cpu", seed=7, dist=dist)  # NaN behind every request's last token
    kernel = plan.plan(*inputs)
    bits = []
    for _ in range(2):
        for x in (*kernel.output_tensors, *kernel.workspace_tensors):
            x.fill_(float("nan"))
        out, lse = kernel()
        bits.append((out.clone(), lse.clone()))
    report = compare(plan.workload, (out, lse), plan.reference_fn(*inputs), bounds_for(dist))
    assert report.ok, report.reason
    assert all(torch.equal(x, y) for x, y in zip(*bits, strict=True))


@pytest.mark.parametrize("splits", [6, 9, 40, 140])
def test_every_tile_of_the_combine_is_right(interpreted: None, splits: int) -> None:
    problem = MlaProblem(b=2, t=(64 * splits, 100), h=16)
    plan = FlashMlaV2Plan(problem, replace(RING, num_splits=splits), H200)
    inputs = make_inputs(problem, "cpu", seed=3)
    out, lse = plan.plan(*inputs)()
    report = compare(plan.workload, (out, lse), plan.reference_fn(*inputs), bounds_for("normal"))
    assert report.ok, report.reason


@pytest.mark.parametrize(
    ("maxima", "seen"),
    [
        ((0.0, 3.0, -2.0), (True, True, True)),
        ((0.0, 500.0, 400.0), (True, True, True)),  # relative to the first, the second overflows
        ((500.0, 0.0, 100.0), (True, True, True)),
        ((-3000.0, 2000.0, 1999.0), (True, True, True)),
        ((0.0, 7.0, 300.0), (False, True, True)),  # the first has no key
        ((0.0, 0.0, 5.0), (False, False, True)),
        ((0.0, 0.0, 0.0), (False, False, False)),
    ],
    ids=str,
)
def test_the_combine_survives_any_maxima(interpreted: None, maxima: tuple[float, ...], seen: tuple[bool, ...]) -> None:
    """Every other row has these maxima and the rest equal ones, so that both ways meet in a CTA."""
    splits, rows = len(maxima), 16
    torch.manual_seed(5)
    o_partial = torch.randn(1, splits, 1, 512, rows)
    stats = torch.empty(1, splits, 1, 2, rows)
    for i in range(splits):
        stats[0, i, 0, 0], stats[0, i, 0, 1] = 1.0, 1.0 + torch.rand(rows)
        stats[0, i, 0, 0, ::2] = maxima[i] if seen[i] else FLOOR
        if not seen[i]:
            stats[0, i, 0, 1, ::2] = 0.0
            o_partial[0, i, ..., ::2] = 0.0
    out, lse = torch.full((1, 1, rows, 512), float("nan")), torch.full((1, rows, 1), float("nan"))
    combine = combine_kernel(
        (o_partial, stats), (out, lse), s=1, h_kv=1, group=rows, tile_shape=(1, rows), splits=splits, dtype="fp32"
    )
    combine.launch()
    m, sums = stats.double()[0, :, 0, 0], stats.double()[0, :, 0, 1]
    top = m.max(0).values
    weight = torch.exp2(m - top)
    total = (weight * sums).sum(0)
    want = (o_partial.double()[0, :, 0] * weight[:, None, :]).sum(0) / torch.where(total == 0, 1.0, total)
    assert torch.allclose(out[0, 0].double(), want.T, rtol=1e-5, atol=1e-6)
    lses = torch.where(total == 0, float("inf"), (top + torch.log2(total)) * 0.6931471805599453)
    assert torch.allclose(lse[0, :, 0].double(), lses, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- on a GPU
GPU_CASES = {
    "few": (problem_of(h=16), {"num_splits": 1}),
    "few-long": (MlaProblem(b=2, t=9000, h=16), {}),
    "longest": (MlaProblem(b=1, t=17000, h=16), {"num_splits": 256}),
    "pairs": (problem_of(h=16), {"num_splits": 3, "pages": 2}),
    "masked": (problem_of(h=4, s=2, causal=True), {}),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_CASES)
def test_it_is_right_on_a_gpu(name: str) -> None:
    from mla_var3.check.judge import check

    problem, knobs = GPU_CASES[name]
    plan = FlashMlaV2Plan(problem)
    report = check(FlashMlaV2Plan, problem, replace(plan.tiling, **knobs))
    assert report.ok, report.reason


@pytest.mark.gpu
def test_another_batch_compiles_nothing() -> None:
    """A bind to sizes that need splits, after a plan that needed none, in a graph capture."""
    many = MlaProblem(b=132, t=200, h=16)
    few = MlaProblem(b=1, t=9000, h=16)
    kernel = FlashMlaV2Plan(many).plan(*FlashMlaV2Plan(many).prepare_inputs("cuda", seed=1))
    kernel()
    plan = FlashMlaV2Plan(few)
    inputs = plan.prepare_inputs("cuda", seed=2)
    other = kernel.bind(*inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = other()
    graph.replay()
    torch.cuda.synchronize()
    report = compare(plan.workload, (out, lse), plan.reference_fn(*inputs), bounds_for("flashmla"))
    assert report.ok, report.reason
