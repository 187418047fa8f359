"""What FlashMLA's own sparse decode test asks, asked of the same functions here: both layouts, heads 64 and 128 and
fewer, any page size, extra caches, lengths, sinks of both infinities, requests without tokens, NaN in unused tokens,
caches whose pages lie apart, graphs. And what programs do around it: append to such a cache, and trace the call.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ops_gpu import same_bits  # noqa: E402
from public_calls import right  # noqa: E402

from mla_var3.ops import flash_mla, packed_mla_decode, rope_append, sparse_mla_decode  # noqa: E402
from mla_var3.packed_cache import LAYOUTS, new_cache  # noqa: E402
from mla_var3.workload.packed_append import PackedAppendProblem  # noqa: E402
from mla_var3.workload.rope import rope_table  # noqa: E402
from mla_var3.workload.sparse_decode import (  # noqa: E402
    SparseProblem,
    input_names,
    make_inputs,
)
from running import captured  # noqa: E402

pytestmark = pytest.mark.gpu

#: Cached tokens, indices and tokens of a page, as FlashMLA's test has them.
SIZES = [(512, 64, 2), (512, 64, 64), (512, 64, 69), (1024, 576, 2), (1024, 576, 61), (2046, 2048, 2), (2046, 2048, 64),
         (2046, 2048, 576)]  # fmt: skip
APPENDED = [
    PackedAppendProblem(tokens=96, h=64, page=16, rest=0, positions=128, layout=layout)
    for layout in ("v32", "v4", "flat", "v41", "v41_planar")
]
LAYOUTS_ASKED = ("v32", "v4")
DENSE_PAGES = (1, 2, 61, 64, 576)
CAPTURED = SparseProblem(
    b=9, s=2, h=64, t=2000, topk=128, page=64, layout="v4", lengths=True, sink=True, extra=512, extra_page=2
)
CAPTURED_DENSE = SparseProblem(
    b=9, h=16, t=3000, layout="flat", lengths=True, sink=True, softmax_scale=0.04, paged=True
)  # fmt: skip
#: DeepSeek V4.1's caches: FP8, and FP4 beside it.
V41 = {"layout": "v41", "topk": 128, "extra": 512, "extra_page": 64, "extra_layout": "v41_fp4", "sink": True}
#: Its pages lie a token apart.
APART = SparseProblem(b=4, s=2, h=64, t=1024, topk=576, page=61, softmax_scale=192**-0.5)
FLASH_MLA = {
    "cache": "k_cache", "lengths": "topk_length", "sink": "attn_sink", "extra_cache": "extra_k_cache",
    "extra_indices": "extra_indices_in_kvcache", "extra_lengths": "extra_topk_length",
}  # fmt: skip


def v32() -> list[SparseProblem]:
    """Two kernels for each page size."""
    return [
        SparseProblem(b=b, s=s, h=h, t=t, topk=topk, page=page, sink=True)
        for (t, topk, page), b, (s, h) in itertools.product(SIZES, (4, 74), ((1, 128), (3, 64)))
    ] + [SparseProblem(b=321, s=3, h=16, t=512, topk=64, page=69, sink=True)]


def v4() -> list[SparseProblem]:
    """A part of FlashMLA's product, drawn once: with and without an extra cache, and lengths of both."""
    rng = random.Random(31)
    made = []
    for number, (t, topk, page) in enumerate(SIZES):
        extra_t, extra, extra_page = rng.choice(SIZES)
        fields: dict[str, Any] = {"s": rng.choice((1, 3)), "h": rng.choice((8, 64, 128)), "lengths": number % 3 > 0}
        if number % 2:
            fields |= {"extra": extra, "extra_t": extra_t, "extra_page": extra_page, "extra_lengths": number % 4 == 3}
        made += [SparseProblem(b=b, layout="v4", t=t, topk=topk, page=page, sink=True, **fields) for b in (4, 74, 321)]
    return made


def corners(layout: str, sink: bool) -> list[SparseProblem]:
    """Problems without valid indices, or without tokens."""
    extra: dict[str, Any] = {"extra": 64, "extra_t": 512, "extra_page": 61} if layout == "v4" else {}
    return [
        SparseProblem(b=b, s=3, h=64, t=t, topk=topk, page=page, layout=layout, sink=sink, **extra)
        for b, (t, topk, page) in itertools.product((4, 74), ((512, 64, 61), (650, 576, 53)))
    ]


def dense(layout: str, page: int) -> list[SparseProblem]:
    """Several query tokens, few heads and many, one request and more than there are multiprocessors."""
    sizes = [(1, 1, 16, 20000), (4, 2, 128, 2046), (74, 1, 8, 1024), (321, 3, 64, 300)]
    return [
        SparseProblem(b=b, s=s, h=h, t=t, layout=layout, page=page, lengths=b > 1, paged=True) for b, s, h, t in sizes
    ]


def read_back(appended: PackedAppendProblem) -> tuple[SparseProblem, SparseProblem]:
    """Of tokens that were appended: each with those around it, and half of them as one request's."""
    n, h, page, layout = appended.tokens, appended.h, appended.page, appended.layout
    pages = -(-(n // 2 - 3) // page)
    return (
        SparseProblem(b=n, h=h, t=8, topk=8, page=page, layout=layout, softmax_scale=0.04),
        SparseProblem(h=h, t=pages * page, page=page, layout=layout, softmax_scale=0.04, paged=True),
    )


def problems() -> list[SparseProblem]:
    """All that this file asks for."""
    found = [*v32(), *v4(), CAPTURED, CAPTURED_DENSE, APART]
    for layout in LAYOUTS_ASKED:
        found += [problem for sink in (False, True) for problem in corners(layout, sink)]
        found += [problem for page in DENSE_PAGES for problem in dense(layout, page)]
    return found + [problem for appended in APPENDED for problem in read_back(appended)]


def attend(problem: SparseProblem, inputs: tuple[Any, ...], meta: Any = None) -> tuple[Any, Any]:
    """Through FlashMLA's names, with caches as its test has them."""
    given = {FLASH_MLA.get(name, name): x for name, x in zip(input_names(problem), inputs, strict=True)}
    for cache in ("k_cache", "extra_k_cache"):
        if cache in given:
            given[cache] = given[cache].unsqueeze(2).view(torch.float8_e4m3fn)
    meta = flash_mla.get_mla_metadata()[0] if meta is None else meta
    return flash_mla.flash_mla_with_kvcache(
        **given, block_table=None, cache_seqlens=None, head_dim_v=512, tile_scheduler_metadata=meta, is_fp8_kvcache=True
    )


@pytest.mark.parametrize("page", sorted({page for _, _, page in SIZES}))
@pytest.mark.parametrize("layout", LAYOUTS_ASKED)
def test_as_flash_mla_asks(layout: str, page: int) -> None:
    asked = [p for p in (v32() if layout == "v32" else v4()) if p.page == page]
    assert asked
    for seed, problem in enumerate(asked):
        inputs = make_inputs(problem, "cuda", seed=seed)
        right(problem, inputs, attend(problem, inputs), "flashmla")


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("dist", ["none", "empty", "holes"])
@pytest.mark.parametrize("layout", LAYOUTS_ASKED)
def test_as_flash_mla_asks_in_its_corners(layout: str, dist: str, sink: bool) -> None:
    """No valid index, requests without tokens."""
    for seed, problem in enumerate(corners(layout, sink)):
        inputs = make_inputs(problem, "cuda", seed=seed, dist=dist)
        out, lse = attend(problem, inputs)
        right(problem, inputs, (out, lse), dist)
        if dist == "none":
            assert not out.any() and bool(torch.isposinf(lse).all())


def test_a_captured_call_follows_indices_lengths_and_cache() -> None:
    problem = CAPTURED
    inputs = make_inputs(problem, "cuda", seed=1)
    meta, _ = flash_mla.get_mla_metadata()
    graph, made = captured(lambda: attend(problem, inputs, meta))
    for seed in (2, 3):
        for old, new in zip(inputs, make_inputs(problem, "cuda", seed=seed, dist="holes"), strict=True):
            old.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        right(problem, inputs, made, "holes")
        assert all(same_bits(a, b) for a, b in zip(made, attend(problem, inputs, meta), strict=True))


@pytest.mark.parametrize("page", DENSE_PAGES)
@pytest.mark.parametrize("layout", LAYOUTS_ASKED)
def test_dense_decode_over_packed_caches_under_flash_mla_s_name(layout: str, page: int) -> None:
    """Ragged lengths."""
    for seed, problem in enumerate(dense(layout, page)):
        for dist in ("flashmla", "empty"):
            inputs = make_inputs(problem, "cuda", seed=seed, dist=dist)
            q, cache, table, lens = inputs
            cache = cache.unsqueeze(2).view(torch.float8_e4m3fn)
            meta, _ = flash_mla.get_mla_metadata()
            found = flash_mla.flash_mla_with_kvcache(
                q, cache, table, lens, 512, meta, causal=True, is_fp8_kvcache=True
            )  # fmt: skip
            right(problem, inputs, found, dist)


def test_a_captured_dense_call_follows_lengths_and_pages() -> None:
    problem = CAPTURED_DENSE
    inputs = make_inputs(problem, "cuda", seed=1)
    q, cache, table, lens, scale, sink = inputs
    options: dict[str, Any] = {"layout": "flat", "cache_scale": scale, "sink": sink, "scale": 0.04, "return_lse": True}
    graph, made = captured(lambda: packed_mla_decode(q, cache, table, lens, **options))
    for seed, of in ((2, problem.replace(lengths=False)), (3, problem)):
        for old, new in zip(inputs, make_inputs(of, "cuda", seed=seed, dist="unseen"), strict=True):
            old.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        right(problem, inputs, made, "unseen")
        eager = packed_mla_decode(q, cache, table, lens, **options)
        assert all(same_bits(a, b) for a, b in zip(made, eager, strict=True))


def test_pages_that_lie_apart_and_a_traced_call() -> None:
    """V3.2's cache as FlashMLA's test makes it: a token more between pages; the operator gives the same bits."""
    problem = APART
    inputs = list(make_inputs(problem, "cuda", seed=1))
    wide = torch.full((len(inputs[1]), 62, 656), 255, dtype=torch.uint8, device="cuda")
    wide[:, :61] = inputs[1]
    inputs[1] = wide[:, :61]
    both = sparse_mla_decode(*inputs, return_lse=True)
    right(problem, tuple(inputs), both, "flashmla")
    step = torch.compile(lambda *x: sparse_mla_decode(*x, return_lse=True), backend="eager", fullgraph=True)
    assert all(same_bits(a, b) for a, b in zip(step(*inputs), both, strict=True))


@pytest.mark.parametrize("appended", APPENDED, ids=lambda p: p.label)
def test_what_was_appended_is_attended_to(appended: PackedAppendProblem) -> None:
    """A step of a server: new tokens go into the cache by rope_append, and the newest ones are read back."""
    layout, n, h, page = appended.layout, appended.tokens, appended.h, appended.page
    made = LAYOUTS[layout]
    k = made.columns - 64
    cache = new_cache(made, 8, page, "cuda")
    cache.as_strided((8 * cache.stride(0),), (1,)).fill_(255)
    q = torch.randn(n, h, 192, device="cuda").bfloat16()
    latent, rope = (torch.randn(n, width, device="cuda").div(10).bfloat16() for width in (k, 64))
    queries = torch.randn(n, h, made.columns, device="cuda").clamp(-1, 1).bfloat16()
    slots = torch.randperm(8 * page, device="cuda")[:n]
    scale = torch.full((1,), 1.0 / 448.0, device="cuda") if layout == "flat" else None
    positions = torch.arange(n, device="cuda")
    table = rope_table(128, device="cuda")
    rope_append(q, latent, rope, positions, slots, table, queries, cache, layout=layout, cache_scale=scale)
    indices = slots[torch.arange(n, device="cuda")[:, None] // 8 * 8 + torch.arange(8, device="cuda")].int()
    problem, dense_problem = read_back(appended)
    inputs = (queries[:, None], cache, indices[:, None], *([] if scale is None else [scale]))
    found = sparse_mla_decode(*inputs[:3], layout=layout, scale=0.04, cache_scale=scale, return_lse=True)
    right(problem, inputs, found, "flashmla")
    # Half of the tokens again, as one request's, in order; nothing is written behind them in its last page.
    count = n // 2 - 3
    cache.as_strided((8 * cache.stride(0),), (1,)).fill_(255)
    pages = torch.randperm(8, device="cuda")[: -(-count // page)].int()
    slots = pages[positions[:count] // page].long() * page + positions[:count] % page
    new = (x[:count] for x in (q, latent, rope, positions))
    rope_append(*new, slots, table, queries[:count], cache, layout=layout, cache_scale=scale)
    lens = torch.tensor([count], dtype=torch.int32, device="cuda")
    inputs = (queries[:1, None], cache, pages[None], lens, *([] if scale is None else [scale]))
    found = packed_mla_decode(*inputs[:4], layout=layout, scale=0.04, cache_scale=scale, return_lse=True)
    right(dense_problem, inputs, found, "flashmla")


@pytest.mark.parametrize("fields", [{}, {**V41, "layout": "v4", "extra_layout": ""}, V41], ids=["v32", "v4", "v41"])
def test_strides_are_read_and_not_copied(fields: dict[str, Any]) -> None:
    """Views as FlashMLA's own test makes them, traced calls too: the profile has kernels of the version only."""
    problem = SparseProblem(b=8, s=2, h=64, t=4096, strided=True, **fields)
    inputs = make_inputs(problem, "cuda", seed=3)
    assert not inputs[0].is_contiguous()
    right(problem, inputs, attend(problem, inputs), "flashmla")
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        attend(problem, inputs)
        torch.cuda.synchronize()
    names = {event.name for event in profile.events() if event.device_type == torch.profiler.DeviceType.CUDA}
    assert names and all("sparse_mla" in name or "combine" in name for name in names), names


@pytest.mark.parametrize("planar", [False, True])
def test_a_traced_call_with_caches_of_v41_gives_the_same_bits(planar: bool) -> None:
    layouts = {"layout": "v41_planar", "extra_layout": "v41_fp4_planar"} if planar else {}
    problem = SparseProblem(b=5, s=2, h=16, t=600, page=16, strided=True, **{**V41, **layouts})
    inputs = make_inputs(problem, "cuda", seed=6)
    given = dict(zip(input_names(problem), inputs, strict=True))
    given["kv_cache"] = given.pop("cache")
    names = list(given)

    def step(*x: Any) -> Any:
        options = dict(zip(names, x, strict=True))
        layouts = {"layout": problem.layout, "extra_layout": problem.extra_layout}
        return sparse_mla_decode(**options, **layouts, return_lse=True)

    both = step(*given.values())
    right(problem, inputs, both, "flashmla")
    traced = torch.compile(step, backend="eager", fullgraph=True)(*given.values())
    assert all(same_bits(a, b) for a, b in zip(traced, both, strict=True))


@pytest.mark.parametrize(
    ("name", "fields"), [("indices", {"topk": 1024}), ("extra_indices", {**V41, "extra": 1024})], ids=["v32", "v41"]
)
def test_a_captured_call_follows_rows_that_become_short_and_full_again(name: str, fields: dict[str, Any]) -> None:
    """Between replays indices turn to -1 and back: rows that were zeroed in shared memory hold tokens again."""
    problem = SparseProblem(b=140, h=64, t=4096, **fields)
    inputs = make_inputs(problem, "cuda", seed=4)
    indices = inputs[input_names(problem).index(name)]
    full = indices.clone()
    graph, results = captured(lambda: attend(problem, inputs))
    rng = torch.Generator().manual_seed(5)
    for share in (0.0, 0.5, 0.0, 0.9, 1.0, 0.3, 0.0):
        indices.copy_(full)
        for request, left in enumerate((torch.rand(problem.b, generator=rng) * (1 - share) * 1024).long().tolist()):
            if share:
                indices[request, :, left:] = -1
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        right(problem, inputs, results, "flashmla")
