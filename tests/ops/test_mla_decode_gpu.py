"""`mla_decode` on a GPU: no waiting, streams beside each other, graphs that live as long as they like."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ops_gpu import compile_ahead, decode, judge, request, same_bits  # noqa: E402
from public_calls import pages_apart  # noqa: E402

from mla_var3.check.judge import check  # noqa: E402
from mla_var3.device import Device  # noqa: E402
from mla_var3.errors import UserError  # noqa: E402
from mla_var3.ops import DecodeSchedule, mla_decode  # noqa: E402
from mla_var3.ops.engine import Engine, capture_id  # noqa: E402
from mla_var3.ops.ways import way_for  # noqa: E402
from mla_var3.workload.decode import FLASHMLA, MlaProblem, make_inputs  # noqa: E402
from running import captured  # noqa: E402

pytestmark = pytest.mark.gpu

SPLIT = MlaProblem(b=2, h=16, t=20000, lengths=[20000, 777])  # takes workspaces
LENGTHS = [9000, 5, 0, 4096, 4097, 700, 12001, 64]
FIXED = [
    MlaProblem(b=8, h=128, t=1, lengths=LENGTHS),
    MlaProblem(b=8, h=16, t=1, lengths=LENGTHS),
    MlaProblem(b=8, h=8, s=4, t=1, lengths=LENGTHS),
    MlaProblem(b=8, h=128, s=2, causal=True, t=1, lengths=LENGTHS),
    MlaProblem(b=8, h=16, dtype="fp16", t=1, lengths=LENGTHS),
]
SPLIT_TOKENS = 4096
HANDED_OVER = [
    MlaProblem(b=8, h=128, t=1, lengths=LENGTHS),
    MlaProblem(b=8, h=16, t=1, lengths=LENGTHS),
    MlaProblem(b=8, h=16, h_kv=2, s=2, causal=True, t=1, lengths=LENGTHS),
]
#: A chunk of 200 tokens among requests with few and with none; for each version that may be picked.
COUNTS = [2, 200, 0, 1, 4, 1, 3, 1]
PACKED = [MlaProblem(b=8, h=h, t=1, lengths=LENGTHS, queries=COUNTS, causal=True) for h in (128, 16)]
PACKED.append(MlaProblem(b=8, h=16, t=1, lengths=LENGTHS, queries=[1, 2, 0, 1, 2, 1, 2, 1], causal=True))
TREE = MlaProblem(b=8, s=6, h=16, t=1, lengths=LENGTHS, tree=True)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    compile_ahead([SPLIT, SPLIT.replace(b=1, t=20000, lengths="uniform")])
    compile_ahead(FIXED, fixed_split=SPLIT_TOKENS)
    compile_ahead([*HANDED_OVER, *(problem.replace(strided_pages=True) for problem in HANDED_OVER)])
    compile_ahead([*PACKED, TREE])


def test_a_call_never_waits() -> None:
    given = make_inputs(SPLIT, "cuda")
    mla_decode(*given)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = mla_decode(*given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert same_bits(out, mla_decode(*given))


def test_streams_run_beside_each_other_without_meeting() -> None:
    sets = [make_inputs(SPLIT, "cuda", seed=i) for i in range(2)]
    wanted = [mla_decode(*given, return_lse=True) for given in sets]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in sets]
    found: list[Any] = []
    for _ in range(50):
        for stream, given in zip(streams, sets, strict=True):
            with torch.cuda.stream(stream):
                found.append(mla_decode(*given, return_lse=True))
    torch.cuda.synchronize()
    for i, pair in enumerate(found):
        assert all(same_bits(a, b) for a, b in zip(pair, wanted[i % 2], strict=True)), i


def test_graphs_outlive_the_kernels_that_were_kept_for_them() -> None:
    """Two graphs of several layers each, replayed in turn, beside eager calls, after the engine forgot everything."""
    engine = Engine()
    layers = [make_inputs(SPLIT, "cuda", seed=i) for i in range(3)]
    wanted = [mla_decode(*given, on=engine) for given in layers]
    graphs, outs = [], []
    for _ in range(2):
        graph, out = captured(lambda: [mla_decode(*given, on=engine) for given in layers])
        graphs.append(graph)
        outs.append(out)
    engine.forget()
    torch.cuda.empty_cache()
    filler = [torch.full((1 << 24,), float("nan"), device="cuda") for _ in range(4)]
    for _ in range(5):
        for graph, results in zip(graphs, outs, strict=True):
            for out in results:
                out.zero_()
            graph.replay()
            assert same_bits(mla_decode(*layers[0], on=engine), wanted[0])
            for out, want in zip(results, wanted, strict=True):
                assert same_bits(out, want)
    assert all(torch.isnan(x).all() for x in filler), "a replay wrote into memory of others"


def test_the_driver_numbers_captures() -> None:
    numbers = []
    x = torch.zeros(4, device="cuda")
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            numbers.append(capture_id(torch.cuda.current_stream().cuda_stream))
            x.add_(1)
    assert 0 not in numbers and numbers[0] != numbers[1]
    assert capture_id(torch.cuda.current_stream().cuda_stream) == 0


def test_a_capture_of_unknown_shapes_says_what_to_do() -> None:
    engine, given, x = Engine(), make_inputs(SPLIT, "cuda"), torch.zeros(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(UserError, match="call once before the capture"):
            mla_decode(*given, on=engine)
        x.add_(1)
    assert same_bits(mla_decode(*given, on=engine), mla_decode(*given))


# ---------------------------------------------------------------- what engines hand over
def pages_and_a_bit_apart(cache: Any) -> Any:
    """The same pages with 16 bytes of NaN behind each."""
    step = cache[0].numel() + 8
    between = cache.new_full((len(cache) * step,), float("nan")).as_strided(cache.shape, (step, *cache.stride()[1:]))
    between.copy_(cache)
    return between


def wide(table: Any, columns: int = 37) -> Any:
    """The table as the front of wider rows."""
    rows = table.new_full((len(table), table.shape[1] + columns), -1)
    rows[:, : table.shape[1]] = table
    return rows[:, : table.shape[1]]


FORMS: dict[str, Any] = {
    "pages apart": lambda q, cache, table, lens: (q, pages_apart(cache), table, lens),
    "pages far apart": lambda q, cache, table, lens: (q, pages_apart(cache, 60, before=7), table, lens),
    "pages 16 bytes apart": lambda q, cache, table, lens: (q, pages_and_a_bit_apart(cache), table, lens),
    "int64": lambda q, cache, table, lens: (q, cache, table.long(), lens.long()),
    "wide rows": lambda q, cache, table, lens: (q, cache, wide(table), lens),
    "wide table": lambda q, cache, table, lens: (q, cache, torch.nn.functional.pad(table, (0, 37), value=-1), lens),
    "wide rows of int64": lambda q, cache, table, lens: (q, cache, wide(table.long()), lens.long()),
    "all": lambda q, cache, table, lens: (q, pages_apart(cache), wide(table.long()), lens.long()),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("problem", HANDED_OVER, ids=lambda p: p.problem_class().key())
def test_what_engines_hand_over_gives_the_same_results(problem: MlaProblem, form: str) -> None:
    given = make_inputs(problem, "cuda", seed=21)
    handed = FORMS[form](*given)
    options: dict[str, Any] = {"causal": problem.causal, "return_lse": True}
    forms = [handed]
    if problem.h_kv == 1:  # without that dimension
        forms.append((handed[0], handed[1][:, :, 0], *handed[2:]))
    for each in forms:
        found = mla_decode(*each, **options)
        verdict = judge(found, given, problem.scale, problem.causal, FLASHMLA)
        assert verdict.ok, verdict.reason
        if not each[1].is_contiguous() or each[2].shape != given[2].shape:  # other code or splits, perhaps other bits
            continue
        assert all(same_bits(a, b) for a, b in zip(found, mla_decode(*given, **options), strict=True))


@pytest.mark.parametrize("problem", HANDED_OVER, ids=lambda p: p.problem_class().key())
def test_a_fixed_split_takes_pages_apart(problem: MlaProblem) -> None:
    given = make_inputs(problem, "cuda", seed=22)
    options: dict[str, Any] = {"causal": problem.causal, "return_lse": True, "fixed_split": SPLIT_TOKENS}
    results = [mla_decode(given[0], pages_apart(given[1], room), *given[2:], **options) for room in (1, 2)]
    for found in results:
        verdict = judge(found, given, problem.scale, problem.causal, FLASHMLA)
        assert verdict.ok, verdict.reason
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("problem", HANDED_OVER, ids=lambda p: p.problem_class().key())
def test_a_captured_call_follows_tables_and_lengths_of_64_bits(problem: MlaProblem) -> None:
    """Two calls in one graph, so that the second's copies of int64 tensors may lie where the first's were; filler
    outside of the graph shows that a replay's copies lie in memory of the graph alone."""
    causal = problem.causal
    sets = [FORMS["all"](*make_inputs(problem, "cuda", seed=seed)) for seed in (31, 32)]
    graph, made = captured(lambda: [mla_decode(*given, causal=causal, return_lse=True) for given in sets])
    torch.cuda.empty_cache()
    filler = [torch.full((problem.b, n), -7, dtype=torch.int32, device="cuda") for n in (1, 64, 188, 200) * 50]
    for turn in (1, 2, 3):
        changed = problem.replace(lengths=problem.seq_lens[turn:] + problem.seq_lens[:turn])
        for i, given in enumerate(sets):
            for old, new in zip(given, make_inputs(changed, "cuda", seed=10 * turn + i), strict=True):
                old.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        for found, given in zip(made, sets, strict=True):
            verdict = judge(found, given, problem.scale, causal, FLASHMLA)
            assert verdict.ok, verdict.reason
    assert all(bool((x == -7).all()) for x in filler), "a replay wrote into memory of others"


# ---------------------------------------------------------------- packed queries, trees
@pytest.mark.parametrize("problem", PACKED, ids=lambda p: p.label)
def test_packed_queries(problem: MlaProblem) -> None:
    """Right, also as int64; each request has what it has alone; a graph follows other counts of the same total."""
    q, cache, table, lens, offsets = given = make_inputs(problem, "cuda", seed=41)
    options: dict[str, Any] = {"causal": True, "return_lse": True}
    out, lse = mla_decode(q, cache, table, lens, cu_seqlens_q=offsets, **options)
    verdict = judge((out, lse), given, problem.scale, True, FLASHMLA)
    assert verdict.ok, verdict.reason
    again = mla_decode(q, cache, table, lens, cu_seqlens_q=offsets.long(), **options)
    assert same_bits(out, again[0]) and same_bits(lse, again[1])
    graph, found = captured(lambda: mla_decode(q, cache, table, lens, cu_seqlens_q=offsets, **options))
    counts = problem.query_lens
    for turn in (1, 3):
        changed = problem.replace(queries=counts[turn:] + counts[:turn])
        for old, new in zip(given, make_inputs(changed, "cuda", seed=41 + turn), strict=True):
            old.copy_(new)
        graph.replay()
        verdict = judge(found, given, problem.scale, True, FLASHMLA)
        assert verdict.ok, verdict.reason


def test_rows_past_the_last_request_are_left_alone() -> None:
    """As where a graph is captured for more query tokens than a step has."""
    problem = PACKED[0]
    q, cache, table, lens, offsets = make_inputs(problem, "cuda", seed=43)
    padded = torch.cat([q, torch.full_like(q[:37], float("nan"))])
    out = torch.full((len(padded), problem.h, problem.k), 7.0, dtype=q.dtype, device="cuda")
    mla_decode(padded, cache, table, lens, cu_seqlens_q=offsets, causal=True, out=out)
    assert bool((out[len(q) :] == 7).all())
    verdict = judge(
        mla_decode(q, cache, table, lens, cu_seqlens_q=offsets, causal=True, return_lse=True),
        (q, cache, table, lens, offsets), problem.scale, True, FLASHMLA,
    )  # fmt: skip
    assert verdict.ok, verdict.reason


def test_a_tree_of_speculative_tokens() -> None:
    q, cache, table, lens, mask = given = make_inputs(TREE, "cuda", seed=44)
    found = mla_decode(q, cache, table, lens, mask=mask.bool(), return_lse=True)
    verdict = judge(found, given, TREE.scale, False, FLASHMLA)
    assert verdict.ok, verdict.reason
    chain = torch.ones_like(mask).tril().bool()
    found, wanted = (mla_decode(q, cache, table, lens, **x) for x in ({"mask": chain}, {"causal": True}))
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=2e-2)


# ---------------------------------------------------------------- a schedule
@pytest.mark.parametrize("problem", [*FIXED[:4], *PACKED, TREE], ids=lambda pd: pd.label)
def test_layers_share_a_schedule(problem: MlaProblem) -> None:
    """The bits of a call that shares a schedule are those of one by itself, also in a graph whose lengths change."""
    given = make_inputs(problem, "cuda", seed=5)
    other = make_inputs(problem, "cuda", seed=6)
    schedule = DecodeSchedule()
    layers = [decode(problem, given, schedule=schedule) for _ in range(2)]
    other_layer = decode(problem, (other[0], other[1], other[2], *given[3:]), schedule=schedule)
    alone = decode(problem, (other[0], other[1], other[2], *given[3:]))
    expected = decode(problem, given)
    assert all(same_bits(x, y) for layer in layers for x, y in zip(layer, expected, strict=True))
    assert all(same_bits(x, y) for x, y in zip(other_layer, alone, strict=True))
    graph, fresh = torch.cuda.CUDAGraph(), DecodeSchedule()
    with torch.cuda.graph(graph):
        found = [decode(problem, given, schedule=fresh) for _ in range(2)]
    given[3].copy_(given[3].flip(0))
    given[2].copy_(given[2].flip(0))
    graph.replay()
    expected = decode(problem, given)
    assert all(same_bits(x, y) for layer in found for x, y in zip(layer, expected, strict=True))


def test_a_fixed_split_shares_a_schedule() -> None:
    given, schedule = make_inputs(FIXED[0], "cuda", seed=7), DecodeSchedule()
    options: dict[str, Any] = {"fixed_split": SPLIT_TOKENS, "return_lse": True}
    found = [mla_decode(*given, **options, schedule=schedule) for _ in range(2)]
    expected = mla_decode(*given, **options)
    assert all(same_bits(x, y) for layer in found for x, y in zip(layer, expected, strict=True))


# ---------------------------------------------------------------- fixed split
@pytest.mark.parametrize("problem", FIXED, ids=lambda p: p.problem_class().key())
def test_a_fixed_split_gives_a_request_the_same_bits_anywhere(problem: MlaProblem) -> None:
    """Alone, under a narrow page table; among seven others; at other places; under a table wider than anyone needs."""
    given = make_inputs(problem, "cuda", seed=11)
    options: dict[str, Any] = {"causal": problem.causal, "return_lse": True, "fixed_split": SPLIT_TOKENS}
    out, lse = mla_decode(*given, **options)
    verdict = judge((out, lse), given, problem.scale, problem.causal, FLASHMLA)
    assert verdict.ok, verdict.reason
    for shift in (1, 5):
        order = [(i + shift) % problem.b for i in range(problem.b)]
        moved = (given[0][order].contiguous(), given[1], given[2][order].contiguous(), given[3][order].contiguous())
        found, sums = mla_decode(*moved, **options)
        assert same_bits(found, out[order].contiguous()) and same_bits(sums, lse[order].contiguous())
    for i, length in enumerate(problem.seq_lens):
        narrow = max(1, -(-length // 64))
        for width in (narrow, min(narrow + 70, given[2].shape[1])):
            found, sums = mla_decode(*request(given, i, width), **options)
            assert same_bits(found[0], out[i]) and same_bits(sums[0], lse[i]), (length, width)
    wide = torch.cat([given[2], torch.full((problem.b, 200), 2147480000, dtype=torch.int32, device="cuda")], dim=1)
    found, sums = mla_decode(given[0], given[1], wide, given[3], **options)
    assert same_bits(found, out) and same_bits(sums, lse)


@pytest.mark.parametrize("problem", [FIXED[1], FIXED[3]], ids=lambda p: p.problem_class().key())
def test_a_fixed_split_is_right_on_the_cases_that_break_kernels(problem: MlaProblem) -> None:
    device = Device.detect()
    report = check(way_for(problem, device, fixed_split=SPLIT_TOKENS).make(problem, device), device="cuda")
    assert report.ok, report.reason


def test_free_splits_are_right_on_the_same_batch() -> None:
    given = make_inputs(FIXED[0], "cuda", seed=2)
    free = mla_decode(*given, return_lse=True)
    assert judge(free, given, FIXED[0].scale, False, FLASHMLA).ok


def test_a_fixed_split_can_be_captured() -> None:
    problem = FIXED[3]
    given = make_inputs(problem, "cuda", seed=3)
    options: dict[str, Any] = {"causal": True, "return_lse": True, "fixed_split": SPLIT_TOKENS}
    wanted = mla_decode(*given, **options)
    graph, found = captured(lambda: mla_decode(*given, **options))
    for x in found:
        x.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert all(same_bits(a, b) for a, b in zip(found, wanted, strict=True))
