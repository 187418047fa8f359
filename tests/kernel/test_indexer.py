"""The lightning indexer's versions without a GPU: compiled, refused in words, and Triton's in its interpreter."""

from __future__ import annotations

import math
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
LOGITS = "cute-dsl/mqa_logits_v4"
TOPK, SHORT, LONG = "cute-dsl/topk_v3", "cute-dsl/topk_v5", "cute-dsl/topk_v6"
CHUNKS = "cute-dsl/topk_v7"
TWO = "cute-dsl/indexer_topk"


@pytest.mark.parametrize(
    ("label", "problem"),
    [
        (LOGITS, IndexerLogitsProblem(table=False)),
        (LOGITS, IndexerLogitsProblem(s=6)),
        (LOGITS, IndexerLogitsProblem(heads=16, table=False)),
        (TOPK, TopkProblem(b=1)),
        (TOPK, TopkProblem(b=4096)),
        (TOPK, TopkProblem(b=4096, t=8000, topk=512, table=True, dtype="bf16")),
        (TOPK, TopkProblem(b=4096, topk=512, table=True, dtype="bf16")),
        (TOPK, TopkProblem(b=1024, t=131072)),
        (SHORT, TopkProblem(b=1, t=8192)),
        (SHORT, TopkProblem(b=4096, t=8192, table=True, dtype="bf16")),
        (SHORT, TopkProblem(b=4096, t=16384, topk=512)),
        (SHORT, TopkProblem(b=64, t=32768)),
        (LOGITS, IndexerLogitsProblem(heads=16, table=False, dtype="bf16")),
        (LOGITS, IndexerLogitsProblem(s=3, heads=32, dtype="bf16")),
        (LONG, TopkProblem(b=1, t=131072)),
        (LONG, TopkProblem(b=6, s=2, t=400_000, table=True, dtype="bf16")),
        (CHUNKS, TopkProblem(b=1, t=131072)),
        (CHUNKS, TopkProblem(b=16, t=262144)),
        (CHUNKS, TopkProblem(b=100, t=70000, dtype="bf16")),
    ],
    ids=lambda x: x if isinstance(x, str) else x.label,
)
def test_cute_compiles_for_hopper(label: str, problem: Any) -> None:
    made = plan_type(label)(problem, None, H200).plan_empty().compile(None, H200)
    assert made.resources.spill_bytes <= (64 if label in (TOPK, LONG) else 0)
    assert made.resources.smem <= H200.smem_per_block


def test_triton_is_right_in_its_interpreter() -> None:
    problems = [
        IndexerLogitsProblem(b=2, t=100, heads=16, s=3),
        IndexerLogitsProblem(b=2, t=70, heads=64, table=False, dtype="bf16"),
    ]
    found = right_in_tritons_interpreter("triton/mqa_logits", [(problem, None, None) for problem in problems])
    assert [len(names) for names in found] == [9, 9]


def test_query_tiles_hold_as_many_tokens_as_an_mma_has_columns_for() -> None:
    from mla_var3.kernel.cute_python.indexer.mqa_logits.mqa_logits_v4.mqa_logits_v4 import MqaLogitsV4Tiling

    def tile(**fields: Any) -> tuple[int, int, int]:
        geometry = MqaLogitsV4Tiling().geometry(IndexerLogitsProblem(**fields))
        return geometry.tokens, geometry.n, geometry.chunks

    assert tile(table=False) == (4, 256, 0)
    assert tile(table=False, heads=16) == (16, 256, 0)
    assert [tile(s=s)[0::2] for s in range(1, 9)] == [(1, 1), (2, 1), (3, 1), (4, 1), (3, 2), (3, 2), (4, 2), (4, 2)]
    assert tile(s=8, heads=32) == (8, 256, 1)


@pytest.mark.parametrize(
    ("producers", "problem"),
    [
        (1, {"b": 255, "t": 8192}),  # a request too few
        (0, {"b": 256, "t": 8192}),
        (0, {"b": 16, "t": 131072}),
        (0, {"b": 256, "t": 8192, "s": 2, "heads": 32}),
        (1, {"b": 256, "t": 8192, "s": 2}),  # a query tile of 128 columns
        (1, {"b": 256, "t": 8192, "table": False}),
    ],
)
def test_four_producer_warps_begin_at_two_million_cached_tokens(producers: int, problem: dict[str, Any]) -> None:
    assert plan_type(LOGITS)(IndexerLogitsProblem(**problem), None, H200).tiling.producers == producers


@pytest.mark.parametrize("tokens", range(1, 17))
def test_each_sum_is_stored_by_one_lane_of_four(tokens: int) -> None:
    """`kept_by` with whole numbers in place of a lane's registers."""
    from mla_var3.kernel.cute_python.indexer.mqa_logits.mqa_logits_v4.mqa_logits_v4 import Geometry, kept_by

    geometry = Geometry(16, 0, tokens, 2, 1, False)
    stored = []
    for lane in range(4):
        kept: Any = kept_by(lane, geometry)  # type: ignore[arg-type]
        if kept.stores:
            sums = [kept.first + j for j in range(geometry.kept)]
            own = lane // geometry.lanes
            stored += [2 * (i // 2 * geometry.together + own) + i % 2 for i in sums]
    assert sorted(stored) == list(range(2 * tokens))


@pytest.mark.parametrize(
    ("problem", "knobs", "issues"),
    [
        ({"table": False}, {}, [(0, (0, 1, 2)), (0, (3,))]),
        ({"table": False}, {"turns": False}, [(0, (0, 1, 2, 3))]),
        ({"table": False}, {"query_parts": 2}, [(0, (0, 1, 2, 3)), (1, (0, 1, 2, 3))]),
        ({"table": False, "heads": 32}, {}, [(0, (0, 1, 2, 3)), (1, (0, 1, 2, 3))]),
        ({"table": False, "heads": 16}, {}, [(0, (0, 1, 2, 3)), (1, (0, 1, 2, 3))]),
        ({"s": 4}, {}, [(0, (0, 1, 2)), (0, (3,))]),
        ({"s": 4, "dtype": "bf16"}, {}, [(0, (0, 1, 2, 3))]),
        ({"s": 6}, {}, [(0, (0, 1, 2, 3)), (1, (0, 1, 2, 3))]),
        ({"s": 5, "heads": 32}, {}, [(0, (0, 1, 2, 3)), (1, (0, 1, 2, 3))]),
        ({"s": 2}, {}, [(0, (0, 1, 2, 3))]),
    ],
)
def test_what_is_issued_together_ends_a_turn_or_is_a_part_of_the_query_tile(
    problem: dict[str, Any], knobs: dict[str, Any], issues: list[Any]
) -> None:
    from mla_var3.kernel.cute_python.indexer.mqa_logits.mqa_logits_v4.mqa_logits_v4 import MqaLogitsV4Tiling, issues_of

    geometry = MqaLogitsV4Tiling(**knobs).geometry(IndexerLogitsProblem(**problem))
    assert issues_of(geometry) == issues
    assert geometry.turns == (len(issues) == 2 and issues[0][0] == issues[1][0])


@pytest.mark.parametrize(("heads", "tokens"), [(64, 4), (64, 3), (64, 2), (64, 1), (32, 8), (32, 2), (16, 16), (16, 6)])
def test_weights_of_a_quad_are_read_from_where_they_were_put_without_conflicts(heads: int, tokens: int) -> None:
    """The words that a lane reads, against the columns that the box of the query tile deals to it."""
    from mla_var3.kernel.cute_python.indexer.mqa_logits.mqa_logits_v4.mqa_logits_v4 import Geometry

    g = Geometry(heads, 0, tokens, 2, 1, False)
    vector = 4 if g.lanes == 1 else 2
    run = g.lanes * vector
    for lane in range(4):
        read: list[int] = []
        for group in range(g.groups):
            for j in range(heads // run):
                first = lane % g.lanes * vector + lane // g.lanes * g.pitch + j * run + group * g.together * g.pitch
                read += range(first, first + vector)
        # The accumulator gives a lane columns 8 k + 2 lane + (0, 1); the box has (run, together, runs, groups).
        columns = [8 * k + 2 * lane + e for k in range(g.n // 8) for e in range(2)]
        wanted = []
        for column in columns:
            group, rest = divmod(column, g.together * heads)
            runs, inner = divmod(rest, g.run * g.together)
            token, head = group * g.together + inner // g.run, runs * g.run + inner % g.run
            wanted.append(token * g.pitch + head)
        assert read == wanted
    banks = [(lane % g.lanes * vector + lane // g.lanes * g.pitch) % 32 // vector for lane in range(4)]
    assert len(set(banks)) == 4


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
    tiling_type: Any = plan_type(SHORT).tiling_type

    def made(rows: int, t: int, aligned: bool = True, dtype: str = "fp32", **knobs: Any) -> tuple[int, int, bool]:
        """Logits of a thread, threads, whether they are loaded early."""
        geometry = tiling_type(**knobs).geometry(TopkProblem(b=rows, t=t, dtype=dtype), rows, t, 132, aligned)
        return geometry.held, geometry.threads, geometry.early

    assert [made(1, t) for t in (1, 4096, 4097, 8192, 8193, 16384)] == [
        (8, 256, True), (8, 512, True), (8, 1024, True), (8, 1024, True), (16, 1024, True), (16, 1024, True),
    ]  # fmt: skip
    assert [made(rows, 4096)[:2] for rows in (1, 132, 264, 265)] == [(8, 512), (8, 512), (8, 512), (16, 256)]
    assert [made(64, t)[1] for t in (1024, 2048, 2049, 4096, 4097)] == [256, 256, 512, 512, 1024]
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


def test_ctas_of_few_rows_are_kept_apart() -> None:
    tiling_type: Any = plan_type(SHORT).tiling_type

    def most(rows: int, t: int, **knobs: Any) -> int:
        """CTAs of an SM; 0: as many as fit."""
        geometry = tiling_type(**knobs).geometry(TopkProblem(b=rows, t=t), rows, t, 132)
        # A CTA has other shared memory beside it.
        assert not geometry.most or geometry.most * geometry.room < 228 << 10 <= (geometry.most + 1) * geometry.room
        return geometry.most

    assert [most(rows, 4096) for rows in (1, 132, 133, 264, 265, 4096)] == [1, 1, 2, 2, 0, 0]
    assert [most(rows, 8192) for rows in (132, 133, 265)] == [0, 2, 0]  # the first are of 1,024 threads
    assert [most(rows, 2048) for rows in (132, 264, 265, 529)] == [1, 2, 0, 0] and most(64, 4096, early=False) == 1


@pytest.mark.parametrize("k", [1, 64, 512, 2048])
@pytest.mark.parametrize(("held", "threads"), [(8, 512), (16, 512), (32, 256), (8, 1024), (16, 1024)])
def test_a_floor_leaves_more_than_k(held: int, threads: int, k: int) -> None:
    """Of logits in random order, by drawing some: the least maximum of groups, and how many are not below it."""
    made: Any = plan_type(SHORT).tiling_type
    geometry = type(made().geometry(TopkProblem(b=1, t=8192), 1, 8192, 132))(k, 32, 0, held, threads, True)
    assert held % geometry.group == 0 or (geometry.group % held == 0 and geometry.group <= 32 * held)
    assert k <= geometry.least_count <= threads * held
    rng = random.Random(1)
    for count in {geometry.least_count, threads * held}:
        logits = [rng.random() for _ in range(count)] + [0.0] * (threads * held - count)
        # Vectors go to the threads in turn, so each has about as many logits in range.
        groups = [logits[i :: threads * held // geometry.group] for i in range(threads * held // geometry.group)]
        floor = min(max(group) for group in groups)
        assert sum(x >= floor for x in logits) >= k or count < threads * held // geometry.group


def test_a_cluster_holds_a_long_row() -> None:
    tiling_type: Any = plan_type(LONG).tiling_type

    def made(rows: int, t: int, aligned: bool = True, **knobs: Any) -> tuple[int, int]:
        """CTAs of a row, logits of a thread."""
        geometry = tiling_type(**knobs).geometry(TopkProblem(b=rows, t=t), rows, t, 132, aligned)
        assert geometry.own_k < geometry.share and t <= geometry.ctas * geometry.held * 1024
        assert geometry.own_k <= geometry.least_count / geometry.ctas
        return geometry.ctas, geometry.held

    assert [made(1, t) for t in (1, 16384, 65536, 131071, 131072, 262144, 1 << 19)] == [
        (2, 8), (2, 8), (8, 8), (8, 16), (16, 8), (16, 16), (16, 32),
    ]  # fmt: skip
    assert [made(rows, 131072) for rows in (7, 8, 15, 16, 30, 31)] == [
        (16, 8), (8, 16), (8, 16), (4, 32), (4, 32), (4, 32),
    ]  # fmt: skip
    assert made(1, 1 << 19, False) == (16, 40) and made(1, 131072, ctas=4) == (4, 32)


def test_clusters_of_all_rows_run_at_once_and_read_in_chunks() -> None:
    tiling_type: Any = plan_type(CHUNKS).tiling_type

    def made(rows: int, t: int, aligned: bool = True, **knobs: Any) -> tuple[int, int, int]:
        """CTAs of a row, chunks, logits of a thread in each."""
        geometry = tiling_type(**knobs).geometry(TopkProblem(b=rows, t=t), rows, t, 132, aligned)
        assert geometry.own_k < geometry.share and t <= geometry.ctas * geometry.held * geometry.chunks * 1024
        assert geometry.sampled <= geometry.least_count / geometry.ctas / geometry.chunks
        return geometry.ctas, geometry.chunks, geometry.held

    assert [made(1, t) for t in (1, 16384, 65536, 131072, 1 << 19, 1 << 20)] == [
        (1, 1, 8), (2, 1, 8), (8, 1, 8), (16, 1, 8), (16, 1, 32), (16, 4, 16),
    ]  # fmt: skip
    assert [made(rows, 262144)[:2] for rows in (7, 8, 15, 16, 30, 31, 66, 67, 500)] == [
        (16, 1), (8, 1), (8, 1), (4, 4), (4, 4), (2, 8), (2, 8), (1, 16), (1, 16),
    ]  # fmt: skip
    assert made(64, 65536) == (2, 1, 32) and made(128, 65536) == (1, 4, 16) and made(1, 1 << 19, False) == (16, 1, 40)
    # Lists of a CTA have room for what 16 chunks of a row are above the floor of the first, and for 32 of a cluster's.
    assert [made(128, t)[:2] for t in (262144, 262145, 1 << 20, (1 << 20) + 1)] == [(1, 16), (2, 9), (2, 32), (4, 17)]
    assert made(132, 1 << 22)[:2] == (8, 32)


def test_what_is_above_the_top_fits_beside_the_candidates() -> None:
    """The largest of 32 warps of the lesser of what two halves' largest logits are: sqrt(E / 32) of a half's logits lie
    above it, E from the exponential distribution."""
    tiling_type: Any = plan_type(CHUNKS).tiling_type
    for rows in (1, 8, 16, 32, 66, 132, 4096):
        for t in (32769, 131072, 262144, 1 << 19, 1 << 20, 1 << 22):
            geometry = tiling_type().geometry(TopkProblem(b=rows, t=t), rows, t, 132)
            above = geometry.chunks * (1 if geometry.largest_is_top else math.sqrt(20 / 32) * 64)
            assert above <= geometry.share


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
    assert "consumers = 3 must be one of 0, 2, 4" in tiling(consumers=3).validate(wide).reason
    assert "query_parts = 3 must be 0, 1 or 2" in tiling(query_parts=3).validate(wide).reason
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


@pytest.mark.parametrize("label", [LOGITS, TOPK, SHORT, LONG, "triton/mqa_logits"])
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
    two = plan_type(TWO)
    for version, sizes in {
        SHORT: ((1, 8192), (8192, 8192), (4096, 32768), (1, 1)),
        LONG: ((1, 32769), (64, 65536), (16, 131072), (8, 262144), (1, 1 << 19), (4, 1 << 19)),
        CHUNKS: ((65, 32769), (132, 65536), (17, 70000), (32, 131072), (9, 262144), (5, 1 << 19), (1, 1 << 20)),
        TOPK: ((133, 32769), (133, 1 << 18), (4096, 65536), (1024, 131072)),
    }.items():
        for b, t in sizes:
            assert choose(TopkProblem(b=b, t=t), H200).kernel.label == version
            # The two kernels part where the dispatcher does. Their rows are as long as whole pages.
            one = IndexerTopkProblem(b=b, t=t)
            assert two(one, None, H200).tiling.parts(one)["topk"][0] == version or one.columns != t
            of_queries = IndexerTopkProblem(b=1, s=b, t=t, table=False)
            assert two(of_queries, None, H200).tiling.parts(of_queries)["topk"][0] == version
    assert choose(TopkProblem(b=133, t=65537, dtype="bf16"), H200).kernel.label == TOPK
    assert choose(TopkProblem(b=256, t=1 << 19), H200).kernel.label == CHUNKS
    few = IndexerTopkProblem(b=64, t=65536, topk=512)
    assert choose(TopkProblem(b=64, t=65536, topk=512), H200).kernel.label == CHUNKS
    assert two(few, None, H200).tiling.parts(few)["topk"][0] == CHUNKS
    picked = {choose(IndexerTopkProblem(b=b, t=t), H200).kernel.label for b, t in ((1, 8192), (8, 32768), (17, 512))}
    assert picked == {TWO}
    assert choose(IndexAppendProblem(), H200).kernel.label == "cute-dsl/index_append"
    with pytest.raises(Unsupported, match=r"^no version takes .* at most 2,048 are chosen\.$"):
        choose(TopkProblem(topk=4096), H200)
