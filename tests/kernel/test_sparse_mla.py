"""sparse_mla: what it compiles to, which problems and tilings it takes, that it is right on a CPU, and that decode does
not meet it."""

# ruff: noqa: E402 - the imports below need what importorskip found
from __future__ import annotations

import importlib
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from planning import plan_type, right_in_tritons_interpreter

from mla_var3.catalogue import registry
from mla_var3.check.judge import check
from mla_var3.device import Device
from mla_var3.packed_cache import LAYOUTS, unpack
from mla_var3.workload.decode import MlaProblem
from mla_var3.workload.sparse_decode import CASES, SparseProblem

H200 = Device.get("h200")
SMALL = {"b": 2, "h": 5, "t": 96, "topk": 40}
V4 = {"layout": "v4", "page": 7, "extra": 24, "extra_t": 60, "extra_page": 5, "lengths": True, "sink": True}
PROBLEMS: dict[str, dict[str, Any]] = {
    "v32": {**SMALL, "s": 2},
    "v4": {**SMALL, **V4, "extra_lengths": True},
    "flat": {**SMALL, "layout": "flat", "sink": True},
    "bf16": {**SMALL, "layout": "bf16", "lengths": True},
}
#: Caches that most versions do not take.
NO_ROPE: dict[str, dict[str, Any]] = {
    "v32_no_rope": {**SMALL, "layout": "v32_no_rope", "lengths": True},
    "flat_no_rope": {**SMALL, "s": 2, "layout": "flat_no_rope"},
}
DENSE: dict[str, dict[str, Any]] = {
    "dense v32": {"b": 2, "h": 5, "t": 96, "s": 2, "page": 7, "paged": True},
    "dense v4": {"b": 2, "h": 5, "t": 96, "layout": "v4", "page": 16, "lengths": True, "sink": True, "paged": True},
    "dense flat": {"b": 2, "h": 5, "t": 96, "s": 2, "layout": "flat", "page": 1, "paged": True},
    "dense bf16": {"b": 2, "h": 5, "t": 96, "layout": "bf16", "page": 64, "lengths": True, "paged": True},
}
ONLY_ON_A_GPU = {"many", "far", "missing_nan"}


def cases_of(name: str) -> set[str]:
    lacking = {"bf16": {"scales", "codes", "subnormal"}, "flat": {"extra"}, "flat_no_rope": {"extra"}}.get(
        name.removeprefix("dense "), set()
    )
    of_indices = {"holes", "none", "duplicates", "tail", "tiles", "rows", "contexts", "extra"}
    return set(CASES) - ONLY_ON_A_GPU - lacking - (of_indices if name in DENSE else set())


@pytest.mark.parametrize(
    ("label", "name"),
    [
        *(("torch/sparse_mla", name) for name in (*PROBLEMS, *NO_ROPE, *DENSE)),
        *(("cutile-dsl/sparse_mla", name) for name in PROBLEMS),
    ],
)
def test_right_on_a_cpu(label: str, name: str) -> None:
    report = check(plan_type(label), SparseProblem(**{**PROBLEMS, **NO_ROPE, **DENSE}[name]), device="cpu", seeds=[5])
    assert report.ok, report.reason
    assert {case.name for case in report.cases} == cases_of(name)


#: One split; as many as there are tiles, or more; fewer.
TILINGS = {
    "v32": {"tile_m": 16, "tile_n": 16, "num_splits": 1},
    "v4": {"tile_m": 16, "tile_n": 16, "num_splits": 3},
    "flat": {"tile_m": 16, "tile_n": 32, "num_splits": 2},
    "bf16": {"tile_m": 16, "tile_n": 64, "num_splits": 2},
    "dense v32": {"tile_m": 16, "tile_n": 16, "num_splits": 3},
    "dense v4": {"tile_m": 16, "tile_n": 16, "num_splits": 1},
    "dense flat": {"tile_m": 16, "tile_n": 32, "num_splits": 4},
    "dense bf16": {"tile_m": 16, "tile_n": 64, "num_splits": 1},
}


#: Cases of each layout: all in one of them, what depends on the layout in the others.
CHECKED = {
    "v32": {"own", "uneven", "holes", "unseen", "in_place", "scales", "codes", "subnormal"},
    "v4": cases_of("v4"),
    "flat": {"own", "below_zero", "scales", "subnormal"},
    "bf16": {"own", "unseen", "apart", "extra"},
    "dense v32": cases_of("dense v32"),
    "dense v4": {"own", "uneven", "last", "apart", "scales", "lengths"},
    "dense flat": {"own", "uneven", "unseen", "scales"},
    "dense bf16": {"own", "uneven", "below_zero", "in_place"},
}


@pytest.mark.slow
def test_triton_is_right_in_its_interpreter() -> None:
    problems = {**PROBLEMS, **DENSE}
    work = [(SparseProblem(**fields), TILINGS[name], sorted(CHECKED[name])) for name, fields in problems.items()]
    found = right_in_tritons_interpreter("triton/sparse_mla", work)
    assert {name: set(cases) for name, cases in zip(problems, found, strict=True)} == CHECKED


#: Compute-bound, split and memory-bound; both tiles of heads.
SERVED: list[dict[str, Any]] = [
    {"b": 128, "s": 2, "h": 128},
    {"b": 128, "h": 16},
    {"layout": "v4", "b": 2, "h": 64, "topk": 128, "page": 256, "extra": 512, "extra_page": 64, "sink": True},
    {"layout": "v4", "b": 128, "h": 8, "page": 2, "lengths": True},
    {"layout": "flat", "b": 128, "h": 128, "sink": True},
    {"b": 128, "h": 16, "t": 4096, "paged": True},
    {"b": 2, "s": 2, "h": 128, "t": 32768, "paged": True},
    {"layout": "v4", "b": 128, "h": 16, "t": 4096, "page": 256, "sink": True, "paged": True},
]


@pytest.mark.parametrize("fields", SERVED, ids=lambda f: SparseProblem(**f).label)
def test_triton_compiles_for_hopper_without_spills(fields: dict[str, Any]) -> None:
    problem = SparseProblem(**fields)
    plan = plan_type("triton/sparse_mla")(problem, None, H200)
    assert plan.supported() and plan.feasible()
    made = plan.plan_empty().compile(None, H200)
    split = plan.num_splits(problem.b * problem.s) > 1
    assert [c.name for c in made.stages] == (["sparse_mla", "combine"] if split else [])
    for stage in made.stages or [made]:
        assert stage.resources.spill_bytes == 0 and 0 < stage.resources.smem <= H200.smem_per_block
    assert (made.stages or [made])[0].resources.instructions["HMMA"] > 0


def test_few_query_tokens_are_split_and_many_are_not() -> None:
    plan = plan_type("triton/sparse_mla")
    assert plan(SparseProblem(b=2, h=128), None, H200).num_splits(2) == 16
    assert plan(SparseProblem(b=1, h=16), None, H200).num_splits(1) == 16  # 128 indices each
    assert plan(SparseProblem(b=128, s=2), None, H200).num_splits(256) == 1
    assert plan(SparseProblem(b=1, h=16, t=32768, paged=True), None, H200).num_splits(1) == 128
    assert plan(SparseProblem(b=1, h=16, t=1000, paged=True), None, H200).num_splits(1) == 8


def test_tilings_say_why_they_are_refused() -> None:
    plan = plan_type("triton/sparse_mla")
    tiling = plan.tiling_type
    for layout in PROBLEMS:
        for h in (1, 8, 16, 17, 64, 128):
            problem = SparseProblem(layout=layout, h=h)
            assert plan(problem, None, H200).feasible() and plan(problem, None, Device.get("rtx4090")).feasible()
            made = plan(problem, None, H200)
            feasible = [t for t in made.autotune_configs() if t.validate(problem, H200)]
            assert made.tiling in feasible and len(feasible) >= 8
    problem = SparseProblem()
    for knobs, words in (
        ({"tile_m": 48}, "tile_m = 48"),
        ({"tile_n": 8}, "tile_n = 8"),
        ({"num_warps": 3}, "num_warps = 3"),
        ({"num_pipeline_stages": 0}, "num_pipeline_stages = 0"),
        ({"num_splits": 129}, "num_splits = 129"),
        ({"tile_m": 64, "num_warps": 4}, "registers"),
        ({"tile_n": 32, "num_pipeline_stages": 8, "num_warps": 16}, "shared memory"),
    ):
        assert words in tiling(**knobs).validate(problem, H200).reason


@pytest.mark.parametrize("label", ["torch/sparse_mla", "triton/sparse_mla"])
def test_a_problem_of_dense_decode_is_refused(label: str) -> None:
    assert "the kernel computes sparse_decode" in plan_type(label)(MlaProblem(), None, H200).supported().reason


def test_page_tables_are_refused_by_what_takes_indices_alone() -> None:
    problem = SparseProblem(h=16, paged=True)
    assert plan_type("triton/sparse_mla")(problem, None, H200).supported()
    reason = plan_type("cutile-dsl/sparse_mla")(problem, None, H200).supported().reason
    assert reason == "the kernel takes indices; the problem has a page table"


@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
def test_cutile_multiplies_gathered_bf16_rows_with_two_warpgroups(heads: int) -> None:
    plan = plan_type("cutile-dsl/sparse_mla")
    problem = SparseProblem(h=heads, layout="bf16")
    assert plan(problem, None, H200).tiling.num_warpgroups == 2
    verdict = plan.tiling_type(num_warpgroups=1).validate(problem, H200)
    assert "num_warpgroups = 1: use 2" in verdict.reason
    assert plan.tiling_type(num_warpgroups=1).validate(SparseProblem(h=heads, layout="v32"), H200)


def test_an_a100_cannot_run_it_in_triton() -> None:
    reason = plan_type("triton/sparse_mla")(SparseProblem(), None, Device.get("a100")).supported().reason
    assert "sm_89 or later" in reason


#: DeepSeek V4.1's caches: codes of e4m3 and of e2m1.
V41 = {"layout": "v41", "topk": 128, "page": 256, "extra": 512, "extra_page": 64, "extra_layout": "v41_fp4"}


@pytest.mark.parametrize(
    ("version", "fields", "products"),
    [
        (1, {"h": 64}, 68),
        (2, {"h": 16}, 68),
        (2, {"h": 48}, 68),
        (2, {"h": 64}, 68),
        (2, {"h": 64, **V41}, 96),
    ],
)
def test_keys_in_registers_are_read_before_they_are_written_again(
    version: int, fields: dict[str, Any], products: int, tmp_path: Path
) -> None:
    """A operands are widened while products read the ones before: ptxas has to leave those alone until a wait, and to
    keep the loop's registers in registers. Both consumers run one copy of the loop: 36 products of a tile's scores, and
    twice the 16 of its values; in V4.1 twice 32 of its scores, as the factors of the two kinds of codes differ."""
    from reading_sass import overwritten_in_groups

    plan = plan_type(f"cute-dsl/sparse_mla_v{version}")(SparseProblem(b=128, sink=True, **fields), None, H200)
    made = plan.plan_empty().compile(tmp_path, H200, ("sass",))
    sass = made.artefacts["sass"].read_text()
    assert made.resources.spill_bytes <= 96 and made.resources.instructions["HGMMA"] == products
    assert overwritten_in_groups(sass) == []
    early = sass.replace("WARPGROUP.DEPBAR.LE gsb0, 0x1", "WARPGROUP.DEPBAR.LE gsb0, 0x2")
    assert len(overwritten_in_groups(early)) > 50


def test_query_tiles_have_fewer_heads_where_there_are_few_requests() -> None:
    plan = plan_type("cute-dsl/sparse_mla_v2")
    heads = {b: plan(SparseProblem(b=b, h=128), None, H200).tiling.heads for b in (1, 8, 128)}
    assert heads == {1: 16, 8: 32, 128: 0}
    of_twenty = plan(SparseProblem(b=1, h=20), None, H200)
    assert of_twenty.tiling.geometry(of_twenty.problem).tiles == 2
    wrong = plan.tiling_type(heads=20).validate(of_twenty.problem, H200)
    assert "0 or one of 8, 16, 24, 32, 40, 48, 56, 64" in wrong.reason
    wrong = plan.tiling_type(split_tokens=100).validate(of_twenty.problem, H200)
    assert wrong.reason == "split_tokens = 100 is not a multiple of 64"


def test_rows_last_tokens_are_looked_for_where_there_are_many_rows_and_nobody_says_it() -> None:
    plan = plan_type("cute-dsl/sparse_mla_v2")

    def shortens(**fields: Any) -> bool:
        made = plan(SparseProblem(h=128, **fields), None, H200)
        assert all(tiling.shortens == made.tiling.shortens for tiling in made.autotune_configs())
        return bool(made.tiling.shortens)

    assert not any(shortens(b=b, s=s) for b, s in ((1, 1), (63, 1), (31, 2)))
    assert all(shortens(b=b, s=s) for b, s in ((64, 1), (32, 2), (256, 4)))
    for given in ({"lengths": True}, {"paged": True}, {"layout": "v4", "extra": 512, "extra_lengths": True}):
        assert not shortens(b=256, **given)
        reason = plan.tiling_type(shortens=True).validate(SparseProblem(h=128, **given), H200).reason
        assert reason.startswith("shortens = True is for rows whose lengths nobody gives: set it to False with lengths")


#: Heads of published models with MLA, whole and after tensor parallelism.
HEADS = (6, 8, 12, 16, 24, 32, 40, 48, 64, 96, 128)


def test_query_tiles_have_less_than_eight_rows_without_a_head() -> None:
    geometry = plan_type("cute-dsl/sparse_mla_v2").tiling_type().geometry
    tiles = {}
    for h in range(1, 200):
        made = geometry(SparseProblem(h=h))
        assert made.row_tiles == -(-h // 64) and 0 <= made.row_tiles * made.n - h < 8 * made.row_tiles, h
        tiles[h] = (made.row_tiles, made.n)
    assert [tiles[h] for h in HEADS] == [
        (1, 8), (1, 8), (1, 16), (1, 16), (1, 24), (1, 32), (1, 40), (1, 48), (1, 64), (2, 48), (2, 64)
    ]  # fmt: skip


def test_two_query_tiles_of_48_heads_and_more_share_rows_in_a_cluster() -> None:
    tiling = plan_type("cute-dsl/sparse_mla_v2").tiling_type

    def ctas(heads: int = 0, shortens: bool = False, **fields: Any) -> int:
        made = tiling(heads=heads, shortens=shortens)
        return int(made.geometry(SparseProblem(b=128, **{"layout": "v32", **fields})).ctas)

    assert ctas(h=96) == ctas(h=96, s=3) == ctas(h=96, lengths=True) == ctas(h=192, heads=48) == 2
    # One tile a query token, three of them, tiles of other heads, and P in a place of its own.
    assert {ctas(h=48), ctas(h=144), ctas(h=96, heads=24), ctas(h=96, paged=True)} == {1}
    assert ctas(h=96, layout="v4", extra=512) == 1
    # With more heads a tile, where rows' last tokens are looked for.
    assert ctas(h=128, shortens=True) == ctas(h=112, shortens=True) == ctas(h=256, s=2, shortens=True) == 2
    assert {ctas(h=128), ctas(h=128, lengths=True), ctas(h=128, paged=True)} == {1}
    assert {ctas(h=h, shortens=True) for h in (16, 64, 192)} == {1}
    assert ctas(h=128, shortens=True, layout="v4", extra=512) == ctas(h=128, shortens=True, layout="v41") == 1
    default = plan_type("cute-dsl/sparse_mla_v2")
    assert [
        default(pd, None, H200).tiling.geometry(pd).ctas
        for pd in (SparseProblem(b=b, s=2, h=128, layout="v32") for b in (16, 32, 128))
    ] == [1, 2, 2]


def test_sinks_are_asked_for_ahead_of_the_search_with_query_tiles_of_64_heads() -> None:
    tiling = plan_type("cute-dsl/sparse_mla_v2").tiling_type(shortens=True)
    asked = {h: tiling.geometry(SparseProblem(b=128, h=h, sink=True)).asks_ahead for h in (16, 48, 64, 96, 128)}
    assert asked == {16: False, 48: False, 64: True, 96: False, 128: True}
    assert not tiling.geometry(SparseProblem(b=128, h=64)).asks_ahead


@pytest.mark.parametrize("layout", ["v32", "v4", "flat"])
def test_shared_memory_holds_as_many_tiles_as_it_is_said_to(layout: str) -> None:
    """A CTA that takes too much compiles, and fails when it is launched."""
    tiling = plan_type("cute-dsl/sparse_mla_v2").tiling_type
    source = importlib.import_module(tiling.__module__)
    for n in source.HEADS:
        geometry = tiling(heads=n).geometry(SparseProblem(h=n, layout=layout, sink=True))
        size = source.shared_storage(geometry).size_in_bytes()
        assert geometry.stages * geometry.stage_bytes < size <= H200.smem_per_block, n
        assert geometry.p_in_rows == (layout == "v32" and n == 48)
        for fields in ({"paged": True, "topk": 0}, {"strided_out": True}):
            assert not tiling(heads=n).geometry(SparseProblem(h=n, layout=layout, **fields)).p_in_rows


def test_splits_of_a_row_that_ends_early_divide_its_tiles() -> None:
    """Each tile up to the last one that names a token belongs to one split; a split without one gets the row's last
    tile, which then names none."""
    share_of = importlib.import_module(plan_type("cute-dsl/sparse_mla_v2").__module__).share_of
    for tiles, step, named in itertools.product(range(1, 36), range(1, 36), range(36)):
        if step > tiles or named > tiles:
            continue
        shares = [share_of(first, min(first + step, tiles), named, tiles) for first in range(0, tiles, step)]
        empty = [share for share in shares if share[0] >= named]
        assert all(share == (tiles - 1, tiles) for share in empty) and (not empty or named < tiles)
        ends = [0, *(end for first, end in shares if first < named)]
        assert [first for first, _ in shares if first < named] == ends[:-1] and ends[-1] == named, (tiles, step, named)


def test_more_heads_are_not_expected_to_take_less_time() -> None:
    """Which query tiles a call has is decided by the expected time, and that by padding too."""
    plan = plan_type("cute-dsl/sparse_mla_v2")

    def expected(h: int, **fields: int) -> float:
        made = plan(SparseProblem(h=h, **fields), None, H200)
        return float(made._time(made.tiling))

    for b in (1, 2, 4, 8, 16, 32, 128, 256):
        for s in range(1, 9):
            times = [expected(h, b=b, s=s) for h in HEADS]
            assert all(less <= 1.02 * more for less, more in itertools.pairwise(times)), (b, s, times)
    assert expected(96, b=128, s=2) <= 0.85 * expected(128, b=128, s=2)


def test_tiles_of_powers_of_two_are_those_of_the_records() -> None:
    """Calls of these heads have the query tiles that were measured."""
    plan = plan_type("cute-dsl/sparse_mla_v2")
    for h in (8, 16, 32, 64, 128):
        tried = [tiling.heads for tiling in plan(SparseProblem(h=h), None, H200).autotune_configs()]
        assert tried == [0, *(n for n in (32, 16) if n < min(h, 64))], h


@pytest.mark.parametrize(("h", "s"), [(12, 2), (6, 8), (40, 3), (72, 2), (128, 2), (16, 1)])
def test_a_combine_finds_the_rows_of_a_query_token(h: int, s: int) -> None:
    """Whose tiles end with rows without a head where the heads fill none."""
    for n in (0, 16, 32):
        geometry = plan_type("cute-dsl/sparse_mla_v2").tiling_type(heads=n).geometry(SparseProblem(h=h, s=s))
        merge, found = geometry.merge, []
        for of_request in range(merge.all_rows):
            of_head, row = divmod(of_request, merge.rows)
            tile = of_head * (geometry.tiles // merge.h_kv) + row // geometry.n
            found.append((tile, row % geometry.n))
        wanted = [(token * geometry.row_tiles + head // geometry.n, head % geometry.n)
                  for token in range(s) for head in range(h)]  # fmt: skip
        assert found == wanted and geometry.combines


def test_what_is_refused_of_fixed_splits_is_named_by_the_argument() -> None:
    tiling = plan_type("cute-dsl/sparse_mla_v2").tiling_type(split_tokens=64)
    reason = tiling.validate(SparseProblem(b=4096, h=128, topk=2048), H200).reason
    assert reason.startswith(
        "fixed_split: splits of 64 tokens, of 4,096 requests with room for 2,048 tokens in indices"
    )
    reason = tiling.validate(SparseProblem(b=4096, h=128, t=4096, paged=True), H200).reason
    assert "take longer splits, fewer columns of page_table, or fewer requests" in reason


def test_e2m1_codes_become_e4m3_codes_of_64_times_their_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """With PTX's `prmt` on Python's integers, which know no 32 bits."""
    module = sys.modules[plan_type("cute-dsl/sparse_mla_v2").__module__]

    def permute(low: int, high: int, selector: int) -> int:
        source = ((high & 0xFFFFFFFF) << 32 | low & 0xFFFFFFFF).to_bytes(8, "little")
        places = [selector >> 4 * i & 15 for i in range(4)]
        assert all(place < 8 for place in places), "it would replicate a sign"
        return int.from_bytes(bytes(source[place] for place in places), "little")

    monkeypatch.setattr(module, "permute", permute)
    monkeypatch.setattr(module, "select_bytes", permute)
    # Every code at every place, beside others.
    codes = torch.tensor(
        [(16 * (5 * i + 3) + i + 7 * j) % 256 for i in range(256) for j in range(4)], dtype=torch.uint8
    )
    made = []
    for word in codes.view(torch.int32).tolist():
        made += [byte for part in module.e4m3_of_e2m1(word) for byte in (part & 0xFFFFFFFF).to_bytes(4, "little")]
    scales = torch.full((1, 1, 32), 0x38, dtype=torch.uint8)  # 1 in e4m3
    cache = torch.cat([codes.view(-1, 1, 256), scales.expand(4, 1, 32)], dim=2)
    values = unpack(LAYOUTS["v41_fp4"], cache).flatten()
    found = torch.tensor(made, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    assert torch.equal(found, 64 * values) and torch.equal(found.signbit(), values.signbit())
    assert len(set(codes.tolist())) == 256


def test_caches_of_v41_or_without_rope_columns_are_served_on_hopper_by_version_2() -> None:
    from mla_var3.dispatch import selection

    for fields in (V41, {"layout": "v41_planar", "paged": True, "t": 512}, *NO_ROPE.values()):
        problem = SparseProblem(**{**fields, "b": 4, "h": 64})
        if registry.missing("cute-dsl") is None:
            assert selection.choose(problem, H200).kernel.label == "cute-dsl/sparse_mla_v2"
        taken = {one.choice.label for one in selection.survey(problem, H200) if one.verdict}
        assert taken <= {"cute-dsl/sparse_mla_v2", *(["cute-dsl/sparse_mla_mma"] if problem.no_rope else [])}


def test_a_cache_of_bf16_has_no_codes() -> None:
    reason = plan_type("cute-dsl/sparse_mla_v2")(SparseProblem(layout="bf16"), None, H200).supported().reason
    assert "use sparse_mla" in reason


def test_sparse_decode_is_served_by_it_and_dense_decode_is_not() -> None:
    from mla_var3.dispatch import selection

    first = "triton/sparse_mla" if registry.missing("cute-dsl") else "cute-dsl/sparse_mla_v2"
    for problem in (SparseProblem(b=128), SparseProblem(**V4)):
        assert selection.choose(problem, H200).kernel.label == first
    dense = selection.choose(SparseProblem(b=128, h=16, t=4096, paged=True), H200).kernel
    assert dense.design == "sparse_mla" and dense.language in ("cute-dsl", "triton")
    for problem in (MlaProblem(b=128), MlaProblem(b=1, h=16)):
        labels = [one.choice.label for one in selection.survey(problem, H200)]
        assert labels and not any("sparse_mla" in label for label in labels), "of another workload: no candidate"
