"""The indexer's logits as public functions on a GPU: compiled, captured, from tensors that lie apart, in both types."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from mla_var3.catalogue import registry  # noqa: E402
from mla_var3.ops import deep_gemm, indexer_logits  # noqa: E402
from mla_var3.workload.indexer_logits import IndexerLogitsProblem, make_inputs, reference  # noqa: E402
from running import captured  # noqa: E402

pytestmark = pytest.mark.gpu

PAGED = IndexerLogitsProblem(b=9, s=2, t=900, lengths="ragged")
PROMPT = IndexerLogitsProblem(b=1, s=130, t=1000, table=False)


@pytest.fixture(autouse=True)
def here() -> None:
    if (reason := registry.missing(registry.KernelId.parse("cute-dsl/mqa_logits_v4"))) is not None:
        pytest.skip(reason)


def call_of(problem: IndexerLogitsProblem, seed: int = 1) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Arguments, options and the oracle, which is -inf out of range."""
    inputs = make_inputs(problem, "cuda", seed=seed)
    (want,) = reference(problem, *inputs)
    want = want.nan_to_num(nan=-float("inf"), neginf=-float("inf"))
    if problem.table:
        q, cache, weights, ends, table = inputs
        return (q.view(torch.float8_e4m3fn), cache, weights, ends), {"page_table": table}, want
    q, keys, scales, weights, starts, ends = inputs
    return (q, keys.view(torch.float8_e4m3fn), weights, ends), {"starts": starts, "scales": scales}, want


def close(found: Any, want: Any) -> None:
    rtol = 1e-3 if found.dtype == torch.float32 else 2.0**-8
    there = want.isfinite()
    assert torch.equal(found.isfinite(), there)
    torch.testing.assert_close(found[there].double(), want[there], atol=0.1, rtol=rtol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("problem", [PAGED, PROMPT], ids=lambda p: p.label)
def test_a_call_and_a_compiled_one_are_right(problem: IndexerLogitsProblem, dtype: Any) -> None:
    """Without a graph break, and with the bits of an eager call."""

    def step(*given: Any, **options: Any) -> Any:
        return indexer_logits(*given, **options, dtype=dtype, clean=True)

    torch._dynamo.reset()
    ready = torch.compile(step, fullgraph=True)
    for seed in (1, 2):
        given, options, want = call_of(problem, seed)
        found = step(*given, **options)
        assert found.dtype == dtype
        close(found, want)
        assert torch.equal(ready(*given, **options), found)


def test_tensors_that_lie_apart_give_the_same_bits() -> None:
    given, options, want = call_of(PAGED)
    q, cache, weights, ends = given
    wanted = indexer_logits(*given, **options, clean=True)
    close(wanted, want)
    apart = torch.zeros((len(cache), 64 * 132 + 16), dtype=torch.uint8, device="cuda")
    pages = apart[:, : 64 * 132].view_as(cache)
    pages.copy_(cache)
    wide = torch.zeros((*q.shape[:2], 2 * q.shape[2], 128), dtype=torch.uint8, device="cuda")
    codes = wide[:, :, : q.shape[2]]
    codes.copy_(q.view(torch.uint8))
    table = torch.zeros((len(ends), options["page_table"].shape[1] + 3), dtype=torch.int32, device="cuda")
    few = table[:, :-3]
    few.copy_(options["page_table"])
    again = indexer_logits(codes, pages.unsqueeze(2), weights, ends.long(), page_table=few, clean=True)
    assert torch.equal(again, wanted)


def test_a_graph_follows_lengths_and_pages() -> None:
    given, options, _ = call_of(PAGED)
    q, cache, weights, ends = given
    graph, found = captured(lambda: indexer_logits(*given, **options))
    for seed in (2, 3):
        other, changed, want = call_of(PAGED, seed)
        for old, new in ((q, other[0]), (cache, other[1]), (weights, other[2]), (ends, other[3])):
            old.view(torch.uint8).copy_(new.view(torch.uint8))
        options["page_table"].copy_(changed["page_table"])
        found.fill_(-float("inf"))
        graph.replay()
        close(found, want)


def test_deep_gemms_names_on_a_gpu() -> None:
    (q, cache, weights, ends), options, want = call_of(PAGED)
    table = options["page_table"]
    meta = deep_gemm.get_paged_mqa_logits_metadata(ends, 64, 132)
    for dtype in (torch.float32, torch.bfloat16):
        found = deep_gemm.fp8_fp4_paged_mqa_logits(
            (q, None), cache.unsqueeze(2), weights, ends, table, meta, 900, clean_logits=True, logits_dtype=dtype
        )
        assert found.shape == (18, 900)
        close(found, want[:, :900])
    (q, keys, weights, ends), options, want = call_of(PROMPT)
    keyed = keys, options["scales"]
    close(deep_gemm.fp8_mqa_logits(q.view(torch.float8_e4m3fn), keyed, weights, options["starts"], ends), want)
