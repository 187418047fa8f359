"""Sparse decode on a GPU, by our kernels and libraries: every case in every layout, and that calls are captured."""

# ruff: noqa: E402 - the imports below need what importorskip found
from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from planning import planned, right

from mla_var3.catalogue import registry
from mla_var3.check.judge import compare
from mla_var3.packed_cache import fields, unpack
from mla_var3.workload.sparse_decode import WORKLOAD, SparseProblem, bounds, input_names, make_inputs, reference
from running import captured

pytestmark = pytest.mark.gpu

DESIGNS = ("sparse_mla", "flash_mla_sparse", "fa3_sparse", "flashinfer_sparse")
KERNELS = [k for k in registry.all_kernels() if k.design in DESIGNS]
V4 = {"layout": "v4", "topk": 128, "page": 256, "extra": 512, "extra_page": 64, "lengths": True, "sink": True}
PROBLEMS = [
    SparseProblem(b=4, s=2, h=128, t=8192),
    SparseProblem(b=40, h=16, t=8192, topk=512, page=1),
    SparseProblem(b=4, s=2, h=64, t=8192, extra_lengths=True, **V4),
    SparseProblem(b=4, h=20, t=4096, layout="flat", page=61, sink=True),
    SparseProblem(b=4, h=8, t=4096, layout="bf16", lengths=True),
    SparseProblem(b=2, s=3, h=16, t=4096, page=61, lengths=True, sink=True),
    SparseProblem(b=2, s=2, h=128, t=4096, **V4),
    SparseProblem(b=40, h=64, t=8192, contexts="half_short", strided=True),
    SparseProblem(b=4, s=3, h=12, t=8192, contexts="lognormal:2", missing="scattered:0.2", strided=True, page=16),
    SparseProblem(b=4, s=2, h=64, t=4096, contexts="short", extra_t=1024, strided=True, **V4),
    SparseProblem(b=4, s=2, h=64, t=4096, layout="v41", topk=128, extra=512, extra_layout="v41_fp4", sink=True),
    SparseProblem(b=4, h=16, t=4096, layout="v41_planar", page=61, lengths=True),
    # Query tiles of 48, 40 and 24 heads, and such with rows without a head between query tokens.
    SparseProblem(b=70, s=2, h=96, t=4096, topk=512, sink=True),
    SparseProblem(b=5, s=2, h=40, t=4096, extra_lengths=True, **V4),
    SparseProblem(b=4, s=3, h=22, t=4096, topk=512, page=16, sink=True, lengths=True),
    SparseProblem(b=3, s=2, h=128, t=4096, layout="v41", topk=300, page=3, extra=200, strided=True),
    SparseProblem(
        b=70,
        s=2,
        h=8,
        t=4096,
        layout="v41_planar",
        topk=128,
        page=256,
        extra=500,
        extra_layout="v41_fp4_planar",
        extra_page=5,
        lengths=True,
        extra_lengths=True,
        contexts="short",
        extra_t=1024,
    ),
    # Many tiles of each worker, so that rows without a token meet every stage; 128 and 112 heads in clusters.
    SparseProblem(b=140, h=64, t=4096, topk=512),
    SparseProblem(b=70, s=2, h=128, t=4096, topk=512, missing="scattered:0.3"),
    SparseProblem(b=70, s=2, h=112, t=4096, topk=512, missing="tiles:0.3"),
    SparseProblem(b=130, s=2, h=16, t=4096, topk=500, page=16, strided=True),
    SparseProblem(b=70, s=2, h=64, t=4096, layout="v4", topk=128, page=256, extra=512, extra_page=64, sink=True),
    # Of models without rope columns.
    SparseProblem(b=3, s=2, h=64, t=4096, layout="v32_no_rope", topk=2176, strided=True),
    SparseProblem(b=40, h=8, t=4096, layout="v32_no_rope", topk=500, page=61, extra=300, lengths=True),
    SparseProblem(b=4, h=16, t=4096, layout="flat_no_rope", topk=700, sink=True),
]
DENSE = [
    SparseProblem(b=8, s=2, h=128, t=8192, lengths=True, paged=True),
    SparseProblem(b=128, h=16, t=4096, paged=True),
    SparseProblem(b=3, s=4, h=8, t=5000, page=61, lengths=True, paged=True),
    SparseProblem(b=40, h=64, t=3000, layout="v4", page=256, lengths=True, sink=True, paged=True),
    SparseProblem(b=5, s=3, h=20, t=3000, layout="flat", page=1, lengths=True, paged=True),
    SparseProblem(b=40, h=64, t=3000, layout="v41", page=64, lengths=True, paged=True),
    SparseProblem(b=5, s=2, h=16, t=3000, layout="v41_planar", page=7, lengths=True, sink=True, paged=True),
    SparseProblem(b=3, s=2, h=64, t=3000, layout="flat_no_rope", page=64, lengths=True, paged=True),
]
#: Caches of DeepSeek V4.1, with codes of both kinds.
V41 = SparseProblem(b=4, h=64, t=2048, layout="v41", topk=128, page=16, extra=320, extra_layout="v41_fp4", extra_page=7)


@pytest.mark.parametrize("problem", [*PROBLEMS, *DENSE], ids=lambda p: p.label)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.label)
def test_right_in_every_case(kernel: Any, problem: SparseProblem) -> None:
    right(planned(kernel, problem))


@pytest.mark.parametrize("problem", [*PROBLEMS, *DENSE], ids=lambda p: p.label)
@pytest.mark.parametrize("heads", [0, 16, 24, 32])
def test_right_however_many_heads_a_query_tile_has(heads: int, problem: SparseProblem) -> None:
    plan = planned("cute-dsl/sparse_mla_v2", problem)
    if heads not in {tiling.heads for tiling in plan.autotune_configs()}:
        pytest.skip("as many are not tried for so few heads")
    right(plan.with_tiling(type(plan.tiling)(heads=heads)))


@pytest.mark.parametrize(("problem", "dist"), [(PROBLEMS[2], "holes"), (DENSE[0], "empty")], ids=["sparse", "dense"])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.label)
def test_a_graph_replays_with_other_inputs(kernel: Any, problem: SparseProblem, dist: str) -> None:
    if kernel.language == "peer":
        pytest.skip("it may have copied its inputs when it was planned")
    plan = planned(kernel, problem)
    if not plan.graph_capturable:
        pytest.skip("it waits for the device")
    inputs = make_inputs(problem, "cuda", seed=1)
    call = plan.plan(*inputs)
    graph, _ = captured(call)
    for old, new in zip(inputs, make_inputs(problem, "cuda", seed=2, dist=dist), strict=True):
        old.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    replayed = [x.clone() for x in call.output_tensors]
    assert all(torch.equal(x, y) for x, y in zip(replayed, call(), strict=True))


def answers(problem: SparseProblem, inputs: tuple[Any, ...]) -> tuple[Any, Any]:
    """Of version 2."""
    call = planned("cute-dsl/sparse_mla_v2", problem).plan(*inputs)
    call()
    torch.cuda.synchronize()
    return call.output_tensors


@pytest.mark.parametrize("version", [1, 2])
def test_workers_without_a_tile_write_nothing_however_late_they_come(version: int) -> None:
    """Layout flat has no combine, and one request leaves the first three workers without a tile. They are launched
    last, and here, where a kernel holds three multiprocessors, not before other workers end."""
    pytest.importorskip("triton")
    from held_gpu import held

    problem = SparseProblem(b=1, h=16, t=4096, layout="flat")
    plan = planned(f"cute-dsl/sparse_mla_v{version}", problem)
    call = plan.plan(*make_inputs(problem, "cuda", seed=1))
    wanted = [x.clone() for x in call()]
    for x in call.output_tensors:
        x.fill_(777.0)
    with held(3) as stream, torch.cuda.stream(stream):
        call()
    assert all(torch.equal(x, y) for x, y in zip(call.output_tensors, wanted, strict=True))


#: Of one split and of several, with P in its rows, with workers that merge, and over two caches.
WITHOUT_TOKENS = [
    SparseProblem(b=3, h=8, t=64, topk=1),
    SparseProblem(b=3, h=64, t=4096, sink=True),
    SparseProblem(b=70, s=2, h=96, t=4096, topk=512),
    SparseProblem(b=3, h=16, t=4096, layout="flat", sink=True),
    SparseProblem(b=3, s=2, h=20, t=4096, layout="v4", topk=128, page=256, extra=512, extra_page=64, sink=True),
    V41,
]


@pytest.mark.parametrize("problem", WITHOUT_TOKENS, ids=lambda p: p.label)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("split_tokens", [0, 256])
def test_queries_that_are_not_finite_attend_to_nothing_where_no_index_names_a_token(
    split_tokens: int, value: float, problem: SparseProblem
) -> None:
    """Times a row of zeros they give NaN, which must not reach a query token without keys; and NaN must stay where an
    index names a token."""
    inputs = make_inputs(problem, "cuda", seed=2)
    named = dict(zip(input_names(problem), inputs, strict=True))
    named["q"][:2, 0, ::3, 5] = value
    for part in problem.parts:
        named[f"{part.prefix}indices"][0, 0] = -1
    if value != value:
        named["q"][1, 0, 1] = value
    else:
        named["q"][1] = 1.0
    plan = planned("cute-dsl/sparse_mla_v2", problem)
    call = plan.with_tiling(replace(plan.tiling, split_tokens=split_tokens)).plan(*inputs)
    out, lse = call()
    assert not bool(out[0, 0].any()) and bool((lse[0, :, 0] == float("inf")).all())
    if value != value:
        assert bool(out[1, 0, 1].isnan().all())
    verdict = compare(WORKLOAD, (out, lse), reference(problem, *inputs), bounds("nan"))
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize("planar", [False, True])
@pytest.mark.parametrize("extra", [False, True])
def test_every_code_and_scale_of_v41_is_read(extra: bool, planar: bool) -> None:
    """Each query token attends to one token, whose columns are out. Tokens have all codes; e2m1 ones all e4m3 scales
    but NaN, of both signs; e4m3 ones scales that are up to 22 powers apart. fp16 has no factor below 2^-14, so a scale
    that is 18 powers or more below a token's largest counts as 0."""
    sizes = {"t": 4, "extra_t": 4, "page": 4, "extra_page": 4, "topk": 1, "extra": 1}
    problem = V41.replace(b=64, s=4, **sizes)
    if planar:
        problem = problem.replace(layout="v41_planar", extra_layout="v41_fp4_planar")
    part, other = problem.parts[extra], problem.parts[not extra]
    named = dict(zip(input_names(problem), make_inputs(problem, "cuda", poison=False), strict=True))
    named["q"].zero_()
    cache, tokens = named[f"{part.prefix}cache"], torch.arange(256, device="cuda").view(256, 1)
    views, groups = fields(part.layout, cache), torch.arange(part.layout.scales, device="cuda")
    codes = torch.arange(part.layout.code_bytes, device="cuda") + 3 * tokens
    scales = (tokens + groups) % 256 if extra else 80 + tokens // 2 + groups * (tokens % 4) % 23
    if extra:
        scales = scales.where(scales % 128 != 127, 7)
    else:
        codes = codes.where(codes % 128 != 127, 56)
    views.codes.copy_(codes.to(torch.uint8).view_as(views.codes))
    views.scales.copy_(scales.to(torch.uint8).view_as(views.scales))
    named[f"{part.prefix}indices"].copy_(tokens.view(64, 4, 1))
    named[f"{other.prefix}indices"].fill_(-1)
    out, _ = answers(problem, tuple(named.values()))
    wanted = unpack(part.layout, cache).view(256, len(groups), -1)
    if not extra:
        low = scales < scales.amax(1, keepdim=True) - 17
        assert bool(low.any())
        wanted = wanted.masked_fill(low.unsqueeze(-1), 0.0)
    wanted = wanted.view(64, 4, 1, 512).expand(64, 4, 64, 512)
    assert torch.equal(wanted, wanted.bfloat16().double()) and torch.equal(out.double(), wanted)


@pytest.mark.parametrize(("extra", "byte"), [(False, 255), (True, 0x7F), (True, 0xFF)])
def test_a_scale_of_v41_that_is_nan_makes_its_query_token_nan(extra: bool, byte: int) -> None:
    inputs = make_inputs(V41, "cuda", seed=3)
    named, part = dict(zip(input_names(V41), inputs, strict=True)), V41.parts[extra]
    scales = fields(part.layout, named[f"{part.prefix}cache"]).scales
    spoilt = []
    for request, place in ((1, 0), (3, part.topk - 1)):
        token = int(named[f"{part.prefix}indices"][request, 0, place])
        scales[token // part.page, token % part.page, (5 * request) % part.layout.scales] = byte
        spoilt.append(request)
    out, lse = answers(V41, inputs)
    for request in range(V41.b):
        assert bool(out[request].isnan().all()) == (request in spoilt)
        assert bool(lse[request].isnan().all()) == (request in spoilt)
    wanted = reference(V41, *inputs)
    verdict = compare(WORKLOAD, (out, lse), wanted, bounds("flashmla"))
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.label)
@pytest.mark.parametrize("kernel", [k for k in KERNELS if k.language == "peer"], ids=lambda k: k.label)
def test_a_library_is_captured_with_its_schedule_or_without(kernel: Any, problem: SparseProblem) -> None:
    call = planned(kernel, problem).plan(*make_inputs(problem, "cuda", seed=1))
    wanted = [x.clone() for x in call()]
    for launch in filter(None, (call, call.with_schedule)):
        graph, _ = captured(launch)
        for x in (*call.written_tensors(), *(call.attached.made or ())):
            x.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(x, y) for x, y in zip(call.output_tensors, wanted, strict=True))
