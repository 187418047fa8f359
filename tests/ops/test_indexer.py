"""The lightning indexer as functions and operators, without a GPU: the torch versions compute."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from mla_var3.errors import UserError  # noqa: E402
from mla_var3.ops import deep_gemm, indexer, indexer_logits, indexer_topk, topk_indices  # noqa: E402
from mla_var3.workload import indexer_logits as of_logits  # noqa: E402
from mla_var3.workload import indexer_topk as of_both  # noqa: E402
from mla_var3.workload.indexer_logits import IndexerLogitsProblem  # noqa: E402
from mla_var3.workload.indexer_topk import IndexerTopkProblem  # noqa: E402

LOGITS, TOPK, BOTH = "torch/mqa_logits", "torch/topk", "torch/indexer_topk"
OPS = torch.ops.mla_var3
PAGED = IndexerTopkProblem(b=3, s=2, t=200, heads=16, topk=40, lengths="ragged")
PREFILL = IndexerTopkProblem(b=2, s=7, t=90, heads=16, topk=40, table=False)


pytestmark = pytest.mark.usefixtures("on_cpu")


def call(
    problem: IndexerTopkProblem, seed: int = 1
) -> tuple[tuple[Any, Any, Any, Any], dict[str, Any], tuple[Any, ...]]:
    """Positional arguments, options, and the workload's inputs."""
    inputs = of_both.make_inputs(problem, seed=seed)
    if problem.table:
        q, cache, weights, ends, table = inputs
        return (q.view(torch.float8_e4m3fn), cache.unsqueeze(2), weights, ends), {"page_table": table}, inputs
    q, keys, scales, weights, starts, ends = inputs
    return (q, keys.view(torch.float8_e4m3fn), weights, ends), {"starts": starts, "scales": scales}, inputs


def logits_of(problem: IndexerTopkProblem, inputs: tuple[Any, ...]) -> Any:
    (found,) = of_logits.reference(IndexerLogitsProblem(heads=problem.heads, s=problem.s, table=problem.table), *inputs)
    return found


@pytest.mark.parametrize("problem", [PAGED, PREFILL], ids=lambda p: p.label)
def test_logits_and_the_choice_are_the_oracles(problem: IndexerTopkProblem) -> None:
    args, options, inputs = call(problem)
    want = logits_of(problem, inputs)
    found = indexer_logits(*args, **options, clean=True, kernel=LOGITS)
    assert found.dtype == torch.float32 and found.stride(0) % 128 == 0
    assert torch.equal(found.double(), want.nan_to_num(nan=-float("inf"), neginf=-float("inf")))
    low = indexer_logits(*args, **options, dtype=torch.bfloat16, kernel=LOGITS)
    there = ~want.isnan()
    assert low.dtype == torch.bfloat16 and torch.allclose(low[there].double(), want[there], rtol=2**-8)
    (best,) = of_both.reference(problem, *inputs)
    assert torch.equal(indexer_topk(*args, k=problem.topk, **options, kernel=BOTH).long(), best)
    ranges = {name: x for name, x in options.items() if name != "scales"}
    assert torch.equal(topk_indices(found, args[3], problem.topk, **ranges, kernel=TOPK).long(), best)


@pytest.mark.parametrize("problem", [PAGED, PREFILL], ids=lambda p: p.label)
def test_a_small_workspace_gives_the_same_choice(problem: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from mla_var3.ops import ways

    args, options, inputs = call(problem)
    (best,) = of_both.reference(problem, *inputs)
    calls: list[str] = []
    pick = ways._named

    def choice(asked: Any, device: Any) -> Any:
        calls.append(asked.workload)
        return pick({"indexer_logits": LOGITS, "topk": TOPK}[asked.workload])

    monkeypatch.setattr(ways, "_pick", choice)
    for rows in (problem.rows, 4, 1):
        ways.way_for.cache_clear()
        calls.clear()
        monkeypatch.setattr(indexer, "WORKSPACE", 4 * problem.columns * rows)
        assert torch.equal(indexer_topk(*args, k=problem.topk, **options).long(), best)
        assert set(calls) == {"indexer_logits", "topk"}
    ways.way_for.cache_clear()


@pytest.mark.parametrize("problem", [PAGED, PREFILL], ids=lambda p: p.label)
@pytest.mark.parametrize("k", [40, 150, 256])
def test_what_is_chosen_as_a_whole_gets_no_logits(problem: Any, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """None at all where no row is longer than k."""
    from mla_var3.ops import ways

    problem = problem.replace(topk=k)
    args, options, inputs = call(problem)
    (best,) = of_both.reference(problem, *inputs)
    pick, computed = ways._named, list[Any]()

    def choice(asked: Any, device: Any) -> Any:
        return pick({"indexer_logits": LOGITS, "topk": TOPK}[asked.workload])

    def compute(served: Any, way: Any, *rest: Any) -> None:
        computed.append(way.key)
        ways.compute(served, way, *rest)

    monkeypatch.setattr(ways, "_pick", choice)
    monkeypatch.setattr(indexer, "compute", compute)
    ways.way_for.cache_clear()
    found = indexer_topk(*args, k=k, **options).long()
    assert torch.equal(found.sort(1).values, best.sort(1).values)
    ways.way_for.cache_clear()
    assert computed == ([(pick(LOGITS).kernel, ())] if problem.columns > k else [])


@pytest.mark.parametrize(
    ("t", "k", "n", "told"),
    [
        (4096, 2048, 0, True), (4160, 2048, 0, False), (1024, 512, 0, True), (2048, 512, 0, False),
        (700, 64, 637, True), (700, 64, 636, False), (700, 699, 2, True),
    ],
)  # fmt: skip
def test_rows_that_may_be_short_get_the_code_of_the_two_kernels(
    t: int, k: int, n: int, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits' plan is the one that `cute-dsl/indexer_topk` has, so that a bundle of that holds its code. n: query
    tokens of a prompt, 0 over pages."""
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    from mla_var3.catalogue import registry
    from mla_var3.device import Device
    from mla_var3.kernel.parts import plans_of

    device = Device.get("h200")
    problem = IndexerTopkProblem(b=1 if n else 3, s=n or 2, t=t, topk=k, table=not n)
    args, options, _ = call(problem)
    plans: list[Any] = []
    monkeypatch.setattr(indexer, "compute", lambda served, way, some, *_: plans.append(way.make(some, device)))
    monkeypatch.setattr(indexer, "topk_indices", lambda *given, **named: None)
    indexer_topk(*args, k=k, **options)
    (plan,) = plans
    two = registry.get_plan(registry.KernelId.parse("cute-dsl/indexer_topk"))
    own: Any = plans_of(two(problem, None, device))["logits"]
    assert type(plan) is type(own) and plan.problem.problem_class() == own.problem.problem_class()
    assert (plan.tiling == own.tiling) == told and plan.tiling.beyond == (k if told else 0)


@pytest.mark.parametrize("table", [True, False])
@pytest.mark.parametrize(("t", "k"), [(512, 512), (1024, 512), (2048, 512), (65536, 2048)])
def test_what_a_bundle_asks_for_is_what_a_call_launches(
    t: int, k: int, table: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    from mla_var3.device import Device

    problem = IndexerTopkProblem(b=2 if table else 1, s=3, t=t, topk=k, table=table)
    calls: list[Any] = []

    def served(function: str, asked: Any, inputs: Any, outputs: Any, kernel: Any, on: Any, **_: Any) -> None:
        calls.append((asked, indexer.way_for(asked, Device.get("h200"))))

    monkeypatch.setattr(indexer, "compute", lambda served, way, some, *_: calls.append((some, way)))
    monkeypatch.setattr(indexer, "serve", served)
    args, options, _ = call(problem)
    indexer_topk(*args, k=k, **options)
    told = indexer.launched(problem, Device.get("h200"))
    assert [(of.problem_class(), of.t, way.key) for of, way in told] == [
        (of.problem_class(), of.t, way.key) for of, way in calls
    ]


def test_rows_that_lie_apart_and_lengths_of_int64() -> None:
    torch.manual_seed(0)
    wide = torch.randn(5, 3, 40)[:, 1]
    ends = torch.tensor([0, 3, 40, 1 << 40, 20])
    found = topk_indices(wide, ends, 8, kernel=TOPK)
    assert found[0].tolist() == [-1] * 8 and found[1].tolist()[3:] == [-1] * 5
    assert found[3].tolist() == wide[3].topk(8).indices.tolist()
    strided = torch.randn(40, 5).t()
    assert topk_indices(strided, ends, 8, kernel=TOPK)[2].tolist() == strided[2].topk(8).indices.tolist()
    assert topk_indices(wide[:0], ends[:0], 8, kernel=TOPK).shape == (0, 8)
    assert topk_indices(wide[:, :0], ends, 8, kernel=TOPK).tolist() == [[-1] * 8] * 5


def test_deep_gemms_names_take_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    from mla_var3.ops import ways

    monkeypatch.setattr(ways, "_pick", lambda asked, device: ways._named(LOGITS))
    ways.way_for.cache_clear()
    (q, cache, weights, ends), options, inputs = call(PAGED)
    meta = deep_gemm.get_paged_mqa_logits_metadata(ends, 64, 132)
    assert meta.shape == (133, 2) and meta.dtype == torch.int32
    found = deep_gemm.fp8_paged_mqa_logits(q, cache, weights, ends, options["page_table"], meta, 150, clean_logits=True)
    want = logits_of(PAGED, inputs)[:, :150].nan_to_num(nan=-float("inf"), neginf=-float("inf"))
    assert torch.equal(found.double(), want)
    (q, keys, weights, ends), options, inputs = call(PREFILL)
    found = deep_gemm.fp8_mqa_logits(q, (keys, options["scales"]), weights, options["starts"], ends)
    assert torch.equal(found.double(), logits_of(PREFILL, inputs).nan_to_num(nan=-float("inf"), neginf=-float("inf")))
    want = logits_of(PREFILL, inputs)
    again = deep_gemm.fp8_fp4_mqa_logits(
        (q, None), (keys, options["scales"]), weights, options["starts"], ends, clean_logits=False, max_seqlen_k=9
    )
    for row, start, end, full in zip(again, options["starts"].tolist(), ends.tolist(), want, strict=True):
        count = max(0, min(9, end - start))
        assert torch.equal(row[:count].double(), full[start : start + count]), "begins at the row's own start"
    for columns in (32, 64):
        narrow_q, narrow = q[..., :columns].contiguous(), keys[:, :columns].contiguous()
        wide_q, wide = (
            torch.cat([x, torch.zeros_like(y[..., columns:])], -1) for x, y in ((narrow_q, q), (narrow, keys))
        )
        found, want = (
            deep_gemm.fp8_mqa_logits(x, (y, options["scales"]), weights, options["starts"], ends)
            for x, y in ((narrow_q, narrow), (wide_q, wide))
        )
        assert torch.equal(found, want) and bool(want.isfinite().any())
    ways.way_for.cache_clear()
    wrong: list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]] = [
        ("q is no pair", deep_gemm.fp8_fp4_mqa_logits, (q, (keys, keys), weights, ends, ends), {}),
        ("q has scales", deep_gemm.fp8_fp4_mqa_logits, ((q, q), (keys, keys), weights, ends, ends), {}),
        ("max_seqlen_k = 5", deep_gemm.fp8_mqa_logits, (q, (keys, keys), weights, ends, ends), {"max_seqlen_k": 5}),
        ("kv is no pair", deep_gemm.fp8_mqa_logits, (q, keys, weights, ends, ends), {}),
        ("block_kv = 32", deep_gemm.get_paged_mqa_logits_metadata, (ends, 32, 132), {}),
        ("indices is for packed", deep_gemm.get_paged_mqa_logits_metadata, (ends, 64, 132, ends), {}),
    ]
    for said, function, args, more in wrong:
        with pytest.raises(UserError, match=f"^{said}"):
            function(*args, **more)


@pytest.mark.parametrize("problem", [PAGED, PREFILL], ids=lambda p: p.label)
def test_operators_give_shapes_to_a_tracer_and_results_to_a_call(problem: IndexerTopkProblem) -> None:
    args, options, _ = call(problem)
    found = OPS.indexer_logits(*args, **options, version=LOGITS)
    best = OPS.indexer_topk(*args, k=problem.topk, **options, version=BOTH)
    ranges = {name: x for name, x in options.items() if name != "scales"}
    assert torch.equal(OPS.topk_indices(found, args[3], problem.topk, **ranges, version=TOPK), best)
    with FakeTensorMode() as mode:
        fakes: Any = tuple(mode.from_tensor(x) for x in args)
        more = {name: mode.from_tensor(x) for name, x in options.items()}
        logits = indexer_logits(*fakes, **more)
        indices = indexer_topk(fakes[0], fakes[1], fakes[2], fakes[3], problem.topk, **more)
        more.pop("scales", None)
        same = topk_indices(logits, fakes[3], problem.topk, **more)
    assert (logits.shape, logits.stride(), logits.dtype) == (found.shape, found.stride(), found.dtype)
    for fake in (indices, same):
        assert (fake.shape, fake.dtype) == (best.shape, best.dtype)


def test_what_does_not_fit_is_told_of_the_argument() -> None:
    args, options, _ = call(PAGED)
    q, cache, weights, ends = args
    (pq, keys, pw, pends), more, _ = call(PREFILL)
    logits = torch.randn(6, 64)
    lens = torch.full((6,), 9)

    def refused(said: str, function: Any, *given: Any, **named: Any) -> None:
        with pytest.raises(UserError, match=said) as error:
            function(*given, **named)
        assert str(error.value).count(". ") == 0

    refused(r"^q is torch\.int8: codes are", indexer_logits, q.view(torch.int8), cache, weights, ends, **options)
    refused(r"^keys is \(\d+, 64, 100\)", indexer_logits, q, cache[..., 0, :100], weights, ends, **options)
    refused("^scales and page_table", indexer_logits, *args, **options, scales=weights)
    refused("^scales is missing", indexer_logits, pq, keys, pw, pends)
    refused(r"^weights is \(6, 15\)", indexer_logits, q, cache, weights[:, :15], ends, **options)
    refused("^dtype is torch.float16", indexer_logits, *args, **options, dtype=torch.float16)
    refused(r"^ends is \(2, 2\)", indexer_logits, q, cache, weights, ends[:2], **options)
    refused("^keys has no rows", indexer_logits, pq, keys[:0], pw, pends, scales=more["scales"][:0])
    refused("^keys has strides", indexer_logits, q, cache.transpose(0, 1).contiguous().transpose(0, 1), weights, ends,
            **options)  # fmt: skip
    refused("^page_table has no columns", indexer_logits, *args, page_table=options["page_table"][:, :0])
    refused("^logits are torch.float16", topk_indices, logits.half(), lens, 5)
    refused("^k is 0", topk_indices, logits, lens, 0)
    refused("^k is 2.0", topk_indices, logits, lens, 2.0)
    refused("^starts and page_table", topk_indices, logits, lens, 5, starts=lens, page_table=lens.view(6, 1))
    refused("^page_table has 4 rows for the 6 rows", topk_indices, logits, lens, 5, page_table=lens[:4].view(4, 1))
    refused("^page_table has 1 columns", topk_indices, torch.randn(6, 65), lens, 5, page_table=lens.view(6, 1))
    refused("at most 2,048 are chosen", topk_indices, logits, lens, 2049)
    for name in ("k", 0, 2.0, True):
        refused("^k is ", indexer_topk, *args, name, **options)
    refused("an indexer of 16, 32, 64 heads", indexer_topk, torch.zeros(2, 48, 128, dtype=torch.uint8), keys,
            torch.ones(2, 48), pends[:2], 2000, scales=more["scales"])  # fmt: skip
    refused("an indexer of 16, 32, 64 heads", indexer_logits, torch.zeros(2, 48, 128, dtype=torch.uint8), keys,
            torch.ones(2, 48), pends[:2], scales=more["scales"])  # fmt: skip
