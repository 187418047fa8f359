"""The lightning indexer's versions without a GPU: compiled, refused in words, and Triton's in its interpreter."""

from __future__ import annotations

import random
from typing import Any

import pytest
from planning import plan_type, right_in_tritons_interpreter

from mla_var3.device import Device
from mla_var3.dispatch import choose
from mla_var3.errors import Unsupported, UserError
from mla_var3.workload import indexer_logits, topk
from mla_var3.workload.index_append import IndexAppendProblem
from mla_var3.workload.indexer_logits import IndexerLogitsProblem
from mla_var3.workload.indexer_topk import IndexerTopkProblem
from mla_var3.workload.topk import TopkProblem

H200 = Device.get("h200")
LOGITS, TOPK, SHORT = "cute-dsl/mqa_logits_v3", "cute-dsl/topk_v3", "cute-dsl/topk_v4"
TWO = "cute-dsl/indexer_topk"


@pytest.mark.parametrize(
    ("label", "problem"),
    [
        (LOGITS, IndexerLogitsProblem(table=False)),
        (LOGITS, IndexerLogitsProblem(s=3)),
        (LOGITS, IndexerLogitsProblem(heads=16, table=False, dtype="bf16")),
        (TOPK, TopkProblem(b=1)),
        (TOPK, TopkProblem(b=4096)),
        (TOPK, TopkProblem(b=4096, t=8000, topk=512, table=True, dtype="bf16")),
        (TOPK, TopkProblem(b=4096, topk=512, table=True, dtype="bf16")),
        (TOPK, TopkProblem(b=1024, t=131072)),
        (SHORT, TopkProblem(b=1, t=8192)),
        (SHORT, TopkProblem(b=4096, t=8192, table=True, dtype="bf16")),
        (SHORT, TopkProblem(b=4096, t=16384, topk=512)),
        (SHORT, TopkProblem(b=64, t=32768)),
        (LOGITS, IndexerLogitsProblem(s=3, heads=32, dtype="bf16")),
    ],
    ids=lambda x: x if isinstance(x, str) else x.label,
)
def test_cute_compiles_for_hopper(label: str, problem: Any) -> None:
    made = plan_type(label)(problem, None, H200).plan_empty().compile(None, H200)
    assert made.resources.spill_bytes <= (64 if label == TOPK else 0)
    assert made.resources.smem <= H200.smem_per_block


def test_triton_is_right_in_its_interpreter() -> None:
    problems = [
        IndexerLogitsProblem(b=2, t=100, heads=16, s=3),
        IndexerLogitsProblem(b=2, t=70, heads=64, table=False, dtype="bf16"),
    ]
    found = right_in_tritons_interpreter("triton/mqa_logits", [(problem, None, None) for problem in problems])
    assert [len(names) for names in found] == [9, 9]


def test_query_tiles_hold_as_many_tokens_as_an_mma_has_columns_for() -> None:
    from mla_var3.kernel.cute_python.indexer.mqa_logits.mqa_logits_v3.mqa_logits_v3 import MqaLogitsV3Tiling

    def tile(**fields: Any) -> tuple[int, int, int]:
        geometry = MqaLogitsV3Tiling().geometry(IndexerLogitsProblem(**fields))
        return geometry.tokens, geometry.n, geometry.chunks

    assert tile(table=False) == (4, 256, 0)
    assert tile(table=False, heads=16) == (16, 256, 0)
    assert [tile(s=s)[0::2] for s in range(1, 9)] == [(1, 1), (2, 1), (3, 1), (4, 1), (3, 2), (3, 2), (4, 2), (4, 2)]
    assert tile(s=8, heads=32) == (8, 256, 1)


@pytest.mark.parametrize("tokens", range(1, 17))
def test_each_sum_is_stored_by_one_lane_of_four(tokens: int) -> None:
    """`kept_by` with whole numbers in place of a lane's registers."""
    from mla_var3.kernel.cute_python.indexer.mqa_logits.mqa_logits_v3.mqa_logits_v3 import Geometry, kept_by

    geometry = Geometry(16, 0, tokens, 2)
    stored = []
    for lane in range(4):
        kept: Any = kept_by(lane, geometry)  # type: ignore[arg-type]
        if kept.stores:
            sums = [kept.first + j for j in range(geometry.kept)]
            own = lane // geometry.lanes
            stored += [2 * (i // 2 * geometry.together + own) + i % 2 for i in sums]
    assert sorted(stored) == list(range(2 * tokens))


def test_few_long_rows_are_a_clusters_and_many_are_a_ctas_of_few_threads() -> None:
    from mla_var3.kernel.cute_python.indexer.topk.topk_v3.topk_v3 import TopkTiling

    def made(rows: int, t: int, **knobs: Any) -> tuple[int, int, int]:
        """CTAs of a row, logits of a thread, threads."""
        geometry = TopkTiling(**knobs).geometry(TopkProblem(b=rows, t=t), rows, t, 132)
        return geometry.ctas, geometry.held, geometry.threads

    assert [made(1, t) for t in (4096, 8192, 131072, 262144, 1 << 20)] == [
        (1, 8, 512), (2, 8, 512), (16, 16, 512), (16, 32, 512), (16, 0, 512),
    ]  # fmt: skip
    assert [made(rows, 65536)[:2] for rows in (8, 16, 33, 64, 132)] == [(16, 8), (8, 16), (4, 32), (2, 0), (1, 0)]
    assert [made(4096, t) for t in (8192, 8193, 16384, 16385, 131072, 131073)] == [
        (1, 32, 256), (1, 32, 512), (1, 32, 512), (1, 0, 512), (1, 0, 512), (1, 0, 512),
    ]  # fmt: skip
    assert made(264, 8192) == (1, 16, 512) and made(265, 8192) == (1, 32, 256)
    assert made(4096, 8192, held=False) == (1, 0, 512)
    assert made(4096, 8192, ctas=8, held=False) == (8, 0, 512) and made(1, 8192, ctas=1, threads=256) == (1, 32, 256)


def test_threads_of_a_short_row_hold_it() -> None:
    from mla_var3.kernel.cute_python.indexer.topk.topk_v4.topk_v4 import TopkTiling

    def made(rows: int, t: int, aligned: bool = True, dtype: str = "fp32", **knobs: Any) -> tuple[int, int, bool]:
        """Logits of a thread, threads, whether they are loaded early."""
        geometry = TopkTiling(**knobs).geometry(TopkProblem(b=rows, t=t, dtype=dtype), rows, t, 132, aligned)
        return geometry.held, geometry.threads, geometry.early

    assert [made(1, t) for t in (1, 4096, 4097, 8192, 8193, 16384)] == [
        (8, 256, True), (8, 512, True), (8, 1024, True), (8, 1024, True), (16, 1024, True), (16, 1024, True),
    ]  # fmt: skip
    assert [made(rows, 8192) for rows in (132, 133, 264, 265, 528, 529)] == [
        (8, 1024, True), (16, 512, True), (16, 512, True), (32, 256, True), (32, 256, True), (32, 256, False),
    ]  # fmt: skip
    assert [made(rows, 16384) for rows in (132, 133, 265)] == [(16, 1024, True), (32, 512, True), (32, 512, False)]
    assert made(4096, 4096) == (16, 256, False) and made(1, 8192, early=False) == (8, 1024, False)
    assert made(4096, 8192, threads=512) == (16, 512, False) and made(1, 8192, threads=256) == (32, 256, True)
    # A row that begins behind a multiple of 16 bytes has a vector more.
    assert made(1, 8192, False) == (16, 1024, True) and made(1, 8189, False) == (8, 1024, True)
    assert made(1, 32768) == (32, 1024, True) and made(133, 32765, False) == (32, 1024, False)
    assert made(1, 32768, False) == (40, 1024, True) and made(1, 9000, threads=256) == (16, 1024, True)
    assert made(4096, 16384, False) == (24, 1024, False) and made(1, 8186, False, "bf16") == (16, 1024, True)


@pytest.mark.parametrize("k", [1, 64, 512, 2048])
@pytest.mark.parametrize(("held", "threads"), [(8, 512), (16, 512), (32, 256), (8, 1024), (16, 1024)])
def test_a_floor_leaves_more_than_k(held: int, threads: int, k: int) -> None:
    """Of logits in random order, by drawing some: the least maximum of groups, and how many are not below it."""
    from mla_var3.kernel.cute_python.indexer.topk.topk_v4.topk_v4 import Geometry

    geometry = Geometry(k, 32, 0, held, threads, True)
    assert held % geometry.group == 0 or (geometry.group % held == 0 and geometry.group <= 32 * held)
    assert k <= geometry.least_count <= threads * held
    rng = random.Random(1)
    for count in {geometry.least_count, threads * held}:
        logits = [rng.random() for _ in range(count)] + [0.0] * (threads * held - count)
        # Vectors go to the threads in turn, so each has about as many logits in range.
        groups = [logits[i :: threads * held // geometry.group] for i in range(threads * held // geometry.group)]
        floor = min(max(group) for group in groups)
        assert sum(x >= floor for x in logits) >= k or count < threads * held // geometry.group


@pytest.mark.parametrize("ctas", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("k", [1, 64, 512, 2048])
def test_what_a_cluster_gathers_is_more_than_k_and_fits(k: int, ctas: int) -> None:
    from mla_var3.kernel.cute_python.indexer.topk.topk_v3.topk_v3 import GATHERED, Geometry

    geometry = Geometry(k, 32, 0, ctas, 16, 512)
    assert geometry.own_k * ctas >= k and geometry.share * ctas == GATHERED
    assert geometry.own_k <= geometry.share and (ctas == 1 or geometry.own_k * ctas >= 1.5 * k)


def test_refusals_say_why() -> None:
    logits, chooses = plan_type(LOGITS), plan_type(TOPK)
    assert "an indexer of 16, 32, 64 heads is taken" in logits.requires.accepts(IndexerLogitsProblem(heads=48)).reason
    assert "at most 2,048 are chosen" in chooses.requires.accepts(TopkProblem(topk=2049)).reason
    with pytest.raises(Unsupported, match="the problem is fp16"):
        chooses(TopkProblem(dtype="fp16"), None, H200).plan_empty()
    tiling = logits.tiling_type
    wide = IndexerLogitsProblem(table=False)
    assert "a tile takes 1 to 4" in tiling(tokens=5).validate(wide).reason
    assert "do not fit in the registers of 4 consumers" in tiling(consumers=4).validate(wide).reason
    assert "ended in a launch failure" in tiling(consumers=3).validate(IndexerLogitsProblem()).reason
    assert "consumers = 5 must be one of 0, 2, 3, 4" in tiling(consumers=5).validate(wide).reason
    assert "ctas = 3 must be 0 or one of 1, 2, 4, 8, 16" in chooses.tiling_type(3).validate(TopkProblem()).reason
    short = plan_type(SHORT)
    assert "rows of up to 32,768 logits are taken" in short.requires.accepts(TopkProblem(t=32769)).reason
    assert "as many hold rows of up to 8,192" in short.tiling_type(256).validate(TopkProblem(t=9000)).reason
    assert "threads = 128 must be 0 or one of 256" in chooses.tiling_type(threads=128).validate(TopkProblem()).reason
    assert "more than 256 MB of logits" in plan_type(TWO).requires.accepts(IndexerTopkProblem(b=1025, t=65536)).reason
    append = plan_type("cute-dsl/index_append")
    assert "use a multiple of it" in append.requires.accepts(IndexAppendProblem(rest=4)).reason
    problem = IndexerLogitsProblem(b=2, t=100)
    q, cache, weights, ends, table = indexer_logits.make_inputs(problem)
    wider = cache.new_zeros(cache.numel() + 8 * len(cache))
    apart = wider.as_strided(cache.shape, (64 * 132 + 8, 132, 1))
    with pytest.raises(UserError, match="8456 bytes apart: use a multiple of 16"):
        logits(problem, None, H200).plan_into((q, apart, weights, ends, table), ())
    values, high, pages = topk.make_inputs(TopkProblem(b=2, t=100, topk=5, table=True))
    with pytest.raises(UserError, match="logits have 100 columns, and 1 pages have 64 tokens"):
        topk.rebound(TopkProblem(b=2, t=100, topk=5, table=True), values, high, pages[:, :1].contiguous())


@pytest.mark.parametrize("label", [LOGITS, TOPK, SHORT, "triton/mqa_logits"])
def test_every_tiling_that_is_tuned_is_feasible(label: str) -> None:
    plan, t = plan_type(label), 9000 if label == SHORT else 65536
    for problem in (plan.workload.problem(t=t, **fields) for fields in ({}, {"table": False}, {"s": 3})):
        assert len(plan(problem, None, H200).autotune_configs()) >= 3
        assert all(t.validate(problem, H200) for t in plan(problem, None, H200).autotune_configs())


def test_the_dispatcher_picks_by_what_runs_here() -> None:
    plan_type(LOGITS)
    assert choose(IndexerLogitsProblem(), H200).kernel.label == LOGITS
    assert choose(IndexerLogitsProblem(dtype="bf16", table=False), H200).kernel.label == LOGITS
    assert choose(IndexerLogitsProblem(dtype="bf16"), H200).kernel.label == LOGITS
    with pytest.raises(Unsupported, match="16, 32 or 64 heads is taken"):
        choose(IndexerLogitsProblem(heads=128), H200)
    sizes = (1, 32769), (1, 1 << 20), (8192, 40000), (4096, 65536), (1024, 131072)
    assert {choose(TopkProblem(b=b, t=t), H200).kernel.label for b, t in sizes} == {TOPK}
    for b, t in ((1, 8192), (8192, 8192), (4096, 32768), (1, 1)):
        assert choose(TopkProblem(b=b, t=t), H200).kernel.label == SHORT
    two = plan_type(TWO)
    for t, chooses in ((32768, SHORT), (32769, TOPK)):
        problem = IndexerTopkProblem(b=40, t=t)
        assert two(problem, None, H200).tiling.parts(problem)["topk"][0] == chooses
    assert choose(TopkProblem(b=133, t=65537, dtype="bf16"), H200).kernel.label == TOPK
    picked = {choose(IndexerTopkProblem(b=b, t=t), H200).kernel.label for b, t in ((1, 8192), (8, 32768), (17, 512))}
    assert picked == {TWO}
    assert choose(IndexAppendProblem(), H200).kernel.label == "cute-dsl/index_append"
    with pytest.raises(Unsupported, match=r"^no version takes .* at most 2,048 are chosen\.$"):
        choose(TopkProblem(topk=4096), H200)
