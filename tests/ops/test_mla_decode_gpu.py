"""`mla_decode` on a GPU: no waiting, streams beside each other, graphs that live as long as they like."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ops_gpu import compile_ahead, judge, request, same_bits  # noqa: E402

from mla_var3.check.judge import check  # noqa: E402
from mla_var3.device import Device  # noqa: E402
from mla_var3.errors import UserError  # noqa: E402
from mla_var3.ops import mla_decode  # noqa: E402
from mla_var3.ops.decode import way_for  # noqa: E402
from mla_var3.ops.engine import Engine, capture_id  # noqa: E402
from mla_var3.workload.decode import FLASHMLA, MlaProblem, make_inputs  # noqa: E402

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


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    compile_ahead([SPLIT, SPLIT.replace(b=1, t=20000, lengths="uniform")])
    compile_ahead(FIXED, fixed_split=SPLIT_TOKENS)


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
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs.append([mla_decode(*given, on=engine) for given in layers])
        graphs.append(graph)
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
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = mla_decode(*given, **options)
    for x in found:
        x.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert all(same_bits(a, b) for a, b in zip(found, wanted, strict=True))
