"""Sparse and dense decode over packed caches as functions, as operators and under FlashMLA's name, without a GPU: the
torch version computes."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ops_fakes import CpuEngine, serve_on_cpu  # noqa: E402
from public_calls import NAMES, same  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from mla_var3.catalogue import registry  # noqa: E402
from mla_var3.errors import UserError  # noqa: E402
from mla_var3.ops import flash_mla as api  # noqa: E402
from mla_var3.ops import packed_mla_decode, sparse, sparse_mla_decode, ways  # noqa: E402
from mla_var3.packed_cache import layout_of, new_cache  # noqa: E402
from mla_var3.workload.sparse_decode import SparseProblem, input_names, make_inputs, reference  # noqa: E402
from running import in_tritons_interpreter  # noqa: E402

SPARSE = "torch/sparse_mla"
OP = torch.ops.mla_var3.sparse_mla_decode
PACKED_OP = torch.ops.mla_var3.packed_mla_decode
V4: dict[str, Any] = {"layout": "v4", "extra": 24, "extra_t": 60, "extra_page": 2, "sink": True}
PROBLEMS = {
    name: SparseProblem(**{"b": 3, "s": 2, "h": 5, "t": 96, "topk": 40, "page": 16, "softmax_scale": 0.3, **fields})
    for name, fields in {
        "v32": {"page": 1},
        "v32_lengths": {"lengths": True, "sink": True},
        "v4": {**V4, "lengths": True, "extra_lengths": True},
        "v4_alone": {"layout": "v4"},
        "flat": {"layout": "flat", "sink": True},
        "bf16": {"layout": "bf16", "lengths": True, "extra": 8, "extra_page": 3},
        "v41": {"layout": "v41", "page": 2, "lengths": True},
        "v41_fp4": {**V4, "layout": "v41", "extra_layout": "v41_fp4"},
        "v32_no_rope": {"layout": "v32_no_rope", "page": 8},
        "v41_planar": {**V4, "layout": "v41_planar", "extra_layout": "v41_fp4_planar", "extra_lengths": True},
    }.items()
}
DENSE = {
    name: SparseProblem(**{"b": 5, "s": 2, "h": 5, "t": 70, "page": 16, "paged": True, "softmax_scale": 0.3, **fields})
    for name, fields in {
        "v32": {"page": 1, "lengths": True},
        "v4": {"layout": "v4", "page": 2, "sink": True, "lengths": True, "s": 1},
        "flat": {"layout": "flat"},
        "v41": {"layout": "v41_planar", "page": 4},
    }.items()
}
FLASH_MLA = {
    "cache": "k_cache", "lengths": "topk_length", "sink": "attn_sink", "extra_cache": "extra_k_cache",
    "extra_indices": "extra_indices_in_kvcache", "extra_lengths": "extra_topk_length",
}  # fmt: skip


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> CpuEngine:
    """Functions and operators compute on the CPU."""
    engine = serve_on_cpu(monkeypatch)
    monkeypatch.setattr(api, "sparse_mla_decode", functools.partial(sparse_mla_decode, kernel=SPARSE))
    monkeypatch.setattr(api, "packed_mla_decode", functools.partial(packed_mla_decode, kernel=SPARSE))
    return engine


def dist_of(problem: SparseProblem) -> str:
    return "empty" if problem.paged else "holes"


def call_of(problem: SparseProblem, names: dict[str, str] = NAMES, **options: Any) -> dict[str, Any]:
    """The inputs of a problem by the names of arguments."""
    options = {"seed": 1, "dist": dist_of(problem), **options}
    inputs = zip(input_names(problem), make_inputs(problem, "cpu", **options), strict=True)
    return {names.get(name, name): x for name, x in inputs}


def wanted_of(problem: SparseProblem) -> tuple[Any, Any]:
    out, lse = reference(problem, *make_inputs(problem, "cpu", seed=1, dist=dist_of(problem)))
    return out.bfloat16(), lse.float()


# ---------------------------------------------------------------- against the oracle
@pytest.mark.parametrize("name", PROBLEMS)
def test_function_and_operator_give_the_oracle_s_results(on_cpu: CpuEngine, name: str) -> None:
    problem = PROBLEMS[name]
    given = call_of(problem)
    options: dict[str, Any] = {"layout": problem.layout, "scale": 0.3}
    if problem.extra_layout:
        options["extra_layout"] = problem.extra_layout
    wanted = wanted_of(problem)
    both = sparse_mla_decode(**given, **options, return_lse=True, kernel=SPARSE)
    assert same(both, wanted)
    out, lse = (torch.zeros_like(x) for x in wanted)
    assert sparse_mla_decode(**given, **options, out=out, lse=lse, kernel=SPARSE) is out
    assert same((out, lse), wanted)
    first = [given.pop(name) for name in ("q", "kv_cache", "indices")]
    assert same(OP(*first, **given, **options, version=SPARSE), wanted)


@pytest.mark.parametrize("name", DENSE)
def test_dense_function_and_operator_give_the_oracle_s_results(on_cpu: CpuEngine, name: str) -> None:
    problem = DENSE[name]
    given, wanted = call_of(problem), wanted_of(problem)
    options: dict[str, Any] = {"layout": problem.layout, "scale": 0.3}
    assert same(packed_mla_decode(**given, **options, return_lse=True, kernel=SPARSE), wanted)
    out, lse = (torch.zeros_like(x) for x in wanted)
    assert packed_mla_decode(**given, **options, out=out, lse=lse, kernel=SPARSE) is out and same((out, lse), wanted)
    long = {**given, "seq_lens": given["seq_lens"].long(), "page_table": given["page_table"].long()}
    long["kv_cache"] = given["kv_cache"].unsqueeze(2).view(torch.float8_e4m3fn)
    assert same(packed_mla_decode(**long, **options, return_lse=True, kernel=SPARSE), wanted)
    first = [given.pop(name) for name in ("q", "kv_cache", "page_table", "seq_lens")]
    into = torch.ops.mla_var3.packed_mla_decode_into
    out.zero_()
    into(*first, **given, **options, version=SPARSE, target=out, lse=lse)
    assert same((out, lse), wanted) and same(PACKED_OP(*first, **given, **options, version=SPARSE), wanted)
    torch.library.opcheck(PACKED_OP.default, tuple(first), {**given, **options, "version": SPARSE})


@pytest.mark.parametrize("name", ["v32", "v4"])
def test_flash_mla_s_dense_call_takes_packed_caches(on_cpu: CpuEngine, name: str) -> None:
    problem = DENSE[name].replace(sink=False)
    given = call_of(problem)
    meta, splits = api.get_mla_metadata()
    q, table, lens = (given[x] for x in ("q", "page_table", "seq_lens"))
    cache = given["kv_cache"].unsqueeze(2).view(torch.float8_e4m3fn)
    options: dict[str, Any] = {"softmax_scale": 0.3, "is_fp8_kvcache": True}
    found = api.flash_mla_with_kvcache(q, cache, table, lens, 512, meta, splits, causal=problem.s > 1, **options)
    assert same(found, wanted_of(problem)) and meta.have_initialized
    fresh, _ = api.get_mla_metadata()
    q = q[:, :1].repeat(1, 2, 1, 1)
    for words, changes in (
        ("causal is False: over an FP8 cache", {}),
        ("head_dim_v is 256: FP8 caches have 512", {"head_dim_v": 256, "causal": True}),
        (
            "^k_cache is torch.bfloat16: a cache of layout",
            {"k_cache": torch.zeros(3, 64, 1, 576).bfloat16(), "causal": True},
        ),
        ("attn_sink was given without indices", {"attn_sink": torch.zeros(5), "causal": True}),
        ("block_table is None", {"block_table": None, "causal": True}),
    ):
        named = {"q": q, "k_cache": cache, "block_table": table, "cache_seqlens": lens, "head_dim_v": 512, **changes}
        with pytest.raises(UserError, match=words):
            api.flash_mla_with_kvcache(**named, tile_scheduler_metadata=fresh, is_fp8_kvcache=True)
    assert not fresh.have_initialized


@pytest.mark.parametrize("name", [name for name in PROBLEMS if name not in ("flat", "v41_planar", "v32_no_rope")])
def test_flash_mla_s_call_gives_the_same(on_cpu: CpuEngine, name: str) -> None:
    """As its own test calls it: caches of four dimensions, FP8 types, no page table, lengths that change."""
    problem = PROBLEMS[name]
    meta, splits = api.get_mla_metadata()
    for _ in range(2):
        given = call_of(problem, FLASH_MLA)
        for cache in ("k_cache", "extra_k_cache"):
            if cache in given:
                x = given[cache].unsqueeze(2)
                given[cache] = x if problem.layout == "bf16" else x.view(torch.float8_e4m3fn)
        given |= {"block_table": None, "cache_seqlens": None, "head_dim_v": 512, "tile_scheduler_metadata": meta}
        given |= {"num_splits": splits, "softmax_scale": 0.3, "is_fp8_kvcache": problem.layout != "bf16"}
        assert same(api.flash_mla_with_kvcache(**given), wanted_of(problem))
    assert meta.have_initialized and meta.config is not None and dict(meta.config)["topk"] == 40
    assert on_cpu.planned == 1


@pytest.mark.parametrize(("s", "h", "parts"), [(1, 64, 132), (2, 128, 33), (3, 16, 44), (200, 64, 1)])
def test_metadata_has_flash_mla_s_shapes(on_cpu: CpuEngine, s: int, h: int, parts: int) -> None:
    """num_sms / s / (h / 64) of 132 multiprocessors, at least 1, with heads padded to 64."""
    problem = SparseProblem(b=1, s=s, h=h, t=8, topk=2)
    given = call_of(problem, FLASH_MLA)
    meta, _ = api.get_mla_metadata()
    q, cache, indices = given["q"], given["k_cache"].unsqueeze(2), given["indices"]
    api.flash_mla_with_kvcache(q, cache, None, None, 512, meta, indices=indices, is_fp8_kvcache=True)
    assert meta.tile_scheduler_metadata is not None and meta.tile_scheduler_metadata.shape == (parts, 8)
    with pytest.raises(UserError, match="topk is 1 and was 2 in the first call"):
        api.flash_mla_with_kvcache(q, cache, None, None, 512, meta, indices=indices[..., :1], is_fp8_kvcache=True)


def test_scales_that_nobody_gives() -> None:
    """192^-1/2 of decompressed heads, or 512^-1/2 in v4; FlashMLA's names have that of q's columns."""
    for layout, scale in (("v32", 192**-0.5), ("v4", 512**-0.5), ("v41", 512**-0.5), ("bf16", 192**-0.5)):
        problem = SparseProblem(b=1, h=2, t=64, topk=8, layout=layout, softmax_scale=scale)
        found = sparse_mla_decode(**call_of(problem), layout=layout, return_lse=True, kernel=SPARSE, on=CpuEngine())
        assert same(found, wanted_of(problem))


def test_indices_that_lie_apart_and_of_64_bits_are_copied() -> None:
    problem = PROBLEMS["v32_lengths"]
    given = call_of(problem)
    given["indices"] = given["indices"].long().repeat_interleave(2, dim=2)[..., ::2]
    given["topk_lens"] = given["topk_lens"].long()
    found = sparse_mla_decode(**given, scale=0.3, return_lse=True, kernel=SPARSE, on=CpuEngine())
    assert same(found, wanted_of(problem))


class Spy(CpuEngine):
    """Keeps what it is asked to compute on, and computes nothing."""

    def run(self, way: Any, problem: Any, inputs: Any, outputs: Any, schedule: Any = None, *_: Any) -> None:
        self.way, self.problem = way, problem
        self.given = dict(zip(input_names(problem), inputs, strict=True))


@pytest.mark.parametrize(
    ("kernel", "copied"), [(SPARSE, False), ("cute-dsl/sparse_mla_v2", False), ("triton/sparse_mla", True)]
)
def test_strides_are_passed_on_to_versions_that_read_them(kernel: str, copied: bool) -> None:
    if (reason := registry.missing(registry.KernelId.parse(kernel))) is not None:
        pytest.skip(reason)
    engine, problem = Spy(), SparseProblem(b=3, s=2, h=8, t=256, topk=64, strided=True)
    given = call_of(problem, dist="holes")
    sparse_mla_decode(**given, kernel=kernel, on=engine)
    for name in ("q", "indices"):
        x, found = given[name], engine.given[name]
        assert not x.is_contiguous()
        assert torch.equal(found, x) and found.is_contiguous() == copied
        assert (found.data_ptr() == x.data_ptr()) == (not copied)


def test_a_query_whose_rows_are_not_16_bytes_apart_is_copied() -> None:
    engine, problem = Spy(), SparseProblem(b=3, s=2, h=8, t=256, topk=64)
    given = call_of(problem, dist="holes")
    wide = torch.zeros(3, 2, 8, 580, dtype=torch.bfloat16)
    wide[..., :576] = given["q"]
    sparse_mla_decode(**{**given, "q": wide[..., :576]}, kernel=SPARSE, on=engine)
    assert torch.equal(engine.given["q"], given["q"]) and engine.given["q"].is_contiguous()


def test_calls_whose_pages_differ_share_code_and_are_planned_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel is kept for the shapes that it was planned for, and is launched on the tensors of the call."""
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    from mla_var3.toolchain import aot

    classes: list[str] = []
    launched: list[dict[int, Any]] = []

    def launch(*arguments: Any) -> None:
        launched.append({x.data_ptr(): x.shape for x in arguments if isinstance(x, torch.Tensor)})

    def compiled_host(plan: Any, name: str, compile_fn: Any, **_: Any) -> Any:
        classes.append(plan.code_class(plan.problem).key())
        return SimpleNamespace(handle=launch)

    monkeypatch.setattr(aot, "compiled_host", compiled_host)
    engine, kept = CpuEngine(), []
    # The last three have as many tokens in as many bytes.
    for page, pages in ((61, 6), (53, 6), (61, 6), (64, 6), (53, 6), (2, 6), (3, 4), (6, 2)):
        problem = SparseProblem(b=2, s=1, h=16, t=page * pages // 2, topk=40, page=page)
        given = call_of(problem)
        kept.append(given)  # freed memory could come back under the same address
        assert given["kv_cache"].shape[:2] == (pages, page)
        sparse_mla_decode(**given, kernel="cute-dsl/sparse_mla_v2", on=engine)
        assert launched[-1][given["kv_cache"].data_ptr()] == (pages, page, 656)
        assert given["indices"].data_ptr() in launched[-1]
    assert engine.planned == len(classes) == 6
    assert sorted(set(classes)) == ["sparse_v32_s1_h16_pg64_x0", "sparse_v32_s1_h16_pgany_x0"]
    assert len(launched) == 8


@pytest.mark.parametrize("name", ["v32_lengths", "v4", "flat", "bf16", "v41_fp4", "v41_planar"])
def test_many_query_tokens_are_requests_of_their_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = PROBLEMS[name].replace(s=9)
    asked: list[tuple[int, int]] = []

    def on_torch(function: str, problem: Any, inputs: Any, outputs: Any, _: Any, on: Any, **more: Any) -> None:
        asked.append((problem.b, problem.s))
        ways.serve(function, problem, inputs, outputs, SPARSE, on, **more)

    monkeypatch.setattr(sparse, "_fits", lambda problem, *_: problem.s == 1)
    monkeypatch.setattr(sparse, "serve", on_torch)
    given = call_of(problem)
    call = functools.partial(sparse_mla_decode, layout=problem.layout, scale=0.3, return_lse=True, on=CpuEngine())
    if problem.extra_layout:
        given["extra_layout"] = problem.extra_layout
    assert same(call(**given), wanted_of(problem)) and asked == [(27, 1)]
    # Where requests and tokens are no one dimension: q is copied, out and lse are written with their strides.
    given["q"] = given["q"].transpose(0, 1).contiguous().transpose(0, 1)
    out = torch.zeros(9, 3, 5, 640, dtype=torch.bfloat16).transpose(0, 1)[..., :512]
    lse = torch.zeros(3, 9, 7).transpose(1, 2)[:, :5]
    found = call(**given, out=out, lse=lse)
    assert found[0].data_ptr() == out.data_ptr() and found[1].data_ptr() == lse.data_ptr()
    assert same(found, wanted_of(problem)) and not out.as_strided((9, 3, 5, 640), (9600, 3200, 640, 1))[..., 512:].any()


def test_a_version_says_how_many_query_tokens_it_takes_together() -> None:
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    for layout, columns in (("v32", 576), ("v41", 512), ("flat_no_rope", 512)):
        cache = new_cache(layout_of(layout), 8, 64, "cpu")
        given = {"layout": layout, "scale": 0.1} | ({"cache_scale": torch.ones(1)} if "flat" in layout else {})
        for s, together in ((8, True), (100, True), (200, False)):
            for fixed_split in (None, 128):
                engine, q = Spy(), torch.zeros(2, s, 16, columns, dtype=torch.bfloat16)
                indices = torch.zeros(2, s, 256, dtype=torch.int32)
                sparse_mla_decode(q, cache, indices, **given, fixed_split=fixed_split, on=engine)
                assert engine.way.key[0].label == "cute-dsl/sparse_mla_v2"
                assert (engine.problem.b, engine.problem.s) == ((2, s) if together else (2 * s, 1))
                assert engine.given["q"].data_ptr() == q.data_ptr()


@pytest.mark.parametrize("long", [False, True])
def test_a_fixed_split_counts_no_more_indices_than_a_row_has(long: bool) -> None:
    """A length may be that of the context; its partial results would lie behind the memory for them."""
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    engine, problem = Spy(), SparseProblem(b=3, s=2, h=8, t=256, topk=100, lengths=True)
    given = call_of(problem, dist="holes")
    lens = torch.tensor([7, 100, 5000], dtype=torch.int64 if long else torch.int32)
    sparse_mla_decode(**{**given, "topk_lens": lens}, fixed_split=64, on=engine)
    assert engine.given["lengths"].tolist() == [7, 100, 100]
    (kernel, tiling), problem = engine.way.key, engine.problem
    assert kernel.label == "cute-dsl/sparse_mla_v2" and dict(tiling)["split_tokens"] == 64
    assert (problem.b, problem.topk, problem.lengths) == (3, 100, True)


@pytest.mark.parametrize("function", [sparse_mla_decode, packed_mla_decode])
def test_a_fixed_split_that_cannot_be_is_refused(function: Any) -> None:
    given = call_of((PROBLEMS if function is sparse_mla_decode else DENSE)["v32"])
    with pytest.raises(UserError, match="fixed_split = 100 is not a whole number of KV tiles: give a multiple of 64"):
        function(**given, fixed_split=100, on=CpuEngine())
    with pytest.raises(UserError, match="fixed_split chooses its own version: give it, or kernel, not both"):
        function(**given, fixed_split=64, kernel=SPARSE, on=CpuEngine())


def test_operators_pass_a_fixed_split_on(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    engine = Spy()
    monkeypatch.setattr(ways, "engine", lambda: engine)
    for function, problem in ((sparse_mla_decode, PROBLEMS["v4"]), (packed_mla_decode, DENSE["flat"])):
        given = call_of(problem)
        step = functools.partial(function, layout=problem.layout, fixed_split=128, return_lse=True)
        torch.compile(step, backend="eager", fullgraph=True)(**given)
        assert dict(engine.way.key[1])["split_tokens"] == 128


def test_no_request_is_no_call() -> None:
    engine = CpuEngine()
    q, cache = torch.empty(0, 1, 4, 576).bfloat16(), torch.empty(1, 64, 656, dtype=torch.uint8)
    out, lse = sparse_mla_decode(q, cache, torch.empty(0, 1, 8, dtype=torch.int32), return_lse=True, on=engine)
    assert out.shape == (0, 1, 4, 512) and lse.shape == (0, 4, 1) and engine.planned == 0
    table, lens = torch.empty(0, 3, dtype=torch.int32), torch.empty(0, dtype=torch.int32)
    assert packed_mla_decode(q, cache, table, lens, on=engine).shape == (0, 1, 4, 512) and engine.planned == 0


# The interpreter is chosen when a kernel is decorated, so a process has it or not.
FOLLOWING = """
import torch
from ops_fakes import CpuEngine
from test_sparse_mla_decode import DENSE, PROBLEMS, call_of
from mla_var3.check.judge import compare
from mla_var3.ops import packed_mla_decode, sparse_mla_decode
from mla_var3.workload.sparse_decode import WORKLOAD, bounds, make_inputs, reference

used = []

class Noting(CpuEngine):
    def run(self, way, *given, **options):
        used.append(way)
        super().run(way, *given, **options)

engine = Noting()

def right(problem, given, dist, seed):
    found = (packed_mla_decode if problem.paged else sparse_mla_decode)(
        **given, layout=problem.layout, scale=0.3, return_lse=True, kernel="triton/sparse_mla", on=engine
    )
    wanted = reference(problem, *make_inputs(problem, "cpu", seed=seed, dist=dist))
    verdict = compare(WORKLOAD, found, wanted, bounds(dist))
    assert verdict.ok, f"{problem.label} {dist}: {verdict.reason}"

# Layouts of DeepSeek V4.1 and without rope columns are none that Triton's version takes.
taken = [problem for problem in (*PROBLEMS.values(), *DENSE.values()) if not problem.v41 and not problem.no_rope]
for problem in taken:
    kept = []  # so that the second call's tensors lie elsewhere
    for seed, dist in enumerate(("empty", "unseen") if problem.paged else ("none", "holes")):
        kept.append(call_of(problem, seed=seed, dist=dist))
        right(problem, kept[-1], dist, seed)
assert len(taken) > 4 and engine.planned == len(taken)

# As many tokens of a request, of a cache that is one page shorter: what lies behind it is nobody's.
engine.forget()
problem = PROBLEMS["v32"]
given = call_of(problem, seed=2, dist="holes")
cache = given["kv_cache"]
longer = torch.cat([cache, cache.new_zeros(1, *cache.shape[1:])])
sparse_mla_decode(**{**given, "kv_cache": longer}, scale=0.3, kernel="triton/sparse_mla", on=engine)
right(problem, {**given, "kv_cache": longer[:-1]}, "holes", 2)

# Of a layout that no version splits by a request's own length a version computes each request in one piece: the same
# bits where requests change places, are fewer, and are more, and of rows that have room for more indices.
engine.forget()
given = call_of(PROBLEMS["bf16"], seed=3, dist="normal")
own = [name for name in given if name not in ("kv_cache", "extra_cache")]

def of(requests, width=0):
    some = {name: x[requests] if name in own else x for name, x in given.items()}
    if width:
        some["indices"] = torch.nn.functional.pad(some["indices"], (0, width), value=7)
    return sparse_mla_decode(**some, layout="bf16", scale=0.3, return_lse=True, fixed_split=64, on=engine)

whole, used = of([0, 1, 2]), []
assert whole[0].isfinite().all() and len({x.sum().item() for x in whole[1]}) == 3
for requests in ([0], [1], [2], [2, 0, 1], [1, 2], [2, 2, 1, 0, 0, 1, 2]):
    for width in (0, 30):
        assert all(torch.equal(x, y[requests]) for x, y in zip(of(requests, width), whole)), (requests, width)
assert {way.key[0].label for way in used} == {"triton/sparse_mla"}
print("followed")
"""


@pytest.mark.slow
def test_a_kept_triton_kernel_follows_the_tensors_of_each_call() -> None:
    pytest.importorskip("triton")
    assert "followed" in in_tritons_interpreter("-c", FOLLOWING)


# ---------------------------------------------------------------- operators
@pytest.mark.parametrize("name", ["v32", "v4", "flat"])
def test_torchs_own_check_passes(on_cpu: CpuEngine, name: str) -> None:
    given = call_of(PROBLEMS[name], poison=False)
    first = tuple(given.pop(name) for name in ("q", "kv_cache", "indices"))
    named = {**given, "layout": PROBLEMS[name].layout, "scale": 0.3, "version": SPARSE}
    torch.library.opcheck(OP.default, first, named)
    out, lse = (torch.zeros_like(x) for x in OP(*first, **named))
    into = torch.ops.mla_var3.sparse_mla_decode_into
    torch.library.opcheck(into.default, first, {**named, "target": out, "lse": lse})


def test_fake_tensors_and_a_trace(on_cpu: CpuEngine) -> None:
    with FakeTensorMode():
        q = torch.empty(3, 2, 16, 512, dtype=torch.bfloat16, device="cuda")
        cache = torch.empty(9, 64, 584, dtype=torch.uint8, device="cuda")
        indices = torch.empty(3, 2, 128, dtype=torch.int32, device="cuda")
        out, lse = sparse_mla_decode(q, cache, indices, layout="v4", return_lse=True)
    assert tuple(out.shape) == (3, 2, 16, 512) and tuple(lse.shape) == (3, 16, 2) and lse.dtype == torch.float32
    problem = PROBLEMS["v32"]
    given = call_of(problem)

    def step(**tensors: Any) -> Any:
        out, lse = sparse_mla_decode(**tensors, scale=0.3, return_lse=True, kernel=SPARSE)
        return out + 1, lse.exp()

    out, lse = wanted_of(problem)
    assert same(torch.compile(step, backend="eager", fullgraph=True)(**given), (out + 1, lse.exp()))


# ---------------------------------------------------------------- what is refused
def test_flash_mla_s_call_names_caches_that_do_not_go_together() -> None:
    q, some = torch.zeros(1, 1, 64, 512, dtype=torch.bfloat16), torch.zeros(1, 1, 4, dtype=torch.int32)
    caches = {size: torch.zeros(2, 4, 1, size, dtype=torch.uint8) for size in (584, 528, 288)}
    for main, extra, words in (
        (288, None, "^k_cache: layout v41_fp4 is for an extra cache: the cache itself has layout v41"),
        (584, 528, "^extra_k_cache: an extra cache of layout v41 does not go beside layout v4: it has layout v4"),
        (528, 584, "^extra_k_cache: an extra cache of layout v4 does not go .*: it has layout v41 or v41_fp4"),
    ):
        more = {} if extra is None else {"extra_k_cache": caches[extra], "extra_indices_in_kvcache": some}
        with pytest.raises(UserError, match=words):
            api.flash_mla_with_kvcache(
                q, caches[main], None, None, 512, api.get_mla_metadata()[0], is_fp8_kvcache=True, indices=some, **more
            )


@pytest.mark.parametrize("kernel", ["cute-dsl/sparse_mla", "triton/sparse_mla", "cutile-dsl/sparse_mla"])
def test_versions_that_do_not_read_v41_say_so(kernel: str) -> None:
    problem = PROBLEMS["v41_fp4"]
    with pytest.raises(
        UserError, match=r"the kernel knows no cache of DeepSeek V4\.1; the problem's has a layout of it"
    ):
        sparse_mla_decode(
            **call_of(problem), layout="v41", extra_layout="v41_fp4", kernel=kernel, on=CpuEngine(), scale=0.3
        )
    with pytest.raises(UserError, match=r"layout: layout v41_fp4 is for an extra cache"):
        packed_mla_decode(**call_of(DENSE["v41"]), layout="v41_fp4", on=CpuEngine())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"layout": "v33"}, "cache layout 'v33' is unknown"),
        ({"layout": ["v32"]}, "^layout is a list: pass the name of a layout, as v32"),
        (
            {"extra_layout": ["v32"], "extra_cache": torch.zeros(1, 4, 656, dtype=torch.uint8)},
            "^extra_layout is a list: pass the name",
        ),
        ({"layout": "v4"}, r"q is \(3, 2, 5, 576\) .* pass \(any, any, any, 512\)"),
        ({"q": torch.zeros(3, 2, 5, 576)}, "pass .* torch.bfloat16"),
        ({"kv_cache": torch.zeros(2, 4, 584, dtype=torch.uint8)}, r"^kv_cache: a cache of layout v32 is \(pages, page"),
        ({"kv_cache": torch.zeros(4, 16, 657, dtype=torch.uint8)[..., :656]}, "rows of a page must lie beside"),
        (
            {"kv_cache": torch.zeros(9000, dtype=torch.uint8).as_strided((2, 4, 656), (2632, 656, 1))},
            "2632 bytes apart",
        ),
        ({"indices": torch.zeros(3, 1, 40, dtype=torch.int32)}, r"indices is \(3, 1, 40\) .* pass \(3, 2, any\)"),
        ({"indices": torch.zeros(3, 2, 0, dtype=torch.int32)}, "give at least one index"),
        ({"indices": torch.zeros(3, 2, 8)}, "indices is .* torch.int32"),
        ({"topk_lens": torch.zeros(2, dtype=torch.int32)}, "topk_lens is"),
        ({"sink": torch.zeros(4)}, "sink is"),
        ({"cache_scale": torch.ones(1)}, "layout v32 has no cache_scale"),
        ({"extra_cache": torch.zeros(1, 4, 656, dtype=torch.uint8)}, "extra_cache was given without extra_indices"),
        ({"extra_topk_lens": torch.zeros(3, dtype=torch.int32)}, "extra_topk_lens was given without extra_cache"),
        ({"layout": "v41_fp4"}, "^layout: layout v41_fp4 is for an extra cache: the cache itself has layout v41"),
        ({"extra_layout": "v41_fp4"}, "extra_layout was given without extra_cache"),
        (
            {
                "extra_cache": torch.zeros(1, 4, 528, dtype=torch.uint8),
                "extra_layout": "v41",
                "extra_indices": torch.zeros(3, 2, 4, dtype=torch.int32),
            },
            "^extra_layout: an extra cache of layout v41 does not go beside layout v32: it has layout v32",
        ),
        ({"scale": torch.ones(1)}, "scale is of type Tensor"),
        ({"kernel": "triton/flash_mla"}, "the kernel computes decode"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], sentence: str) -> None:
    given = {**call_of(PROBLEMS["v32"]), "on": CpuEngine(), **changes}
    with pytest.raises(UserError, match=sentence):
        sparse_mla_decode(**given)


def test_models_without_rope_columns_have_no_default_scale() -> None:
    given = call_of(PROBLEMS["v32_no_rope"])
    with pytest.raises(UserError, match=r"^scale has no default in layout v32_no_rope: pass that"):
        sparse_mla_decode(**given, layout="v32_no_rope", on=CpuEngine())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"layout": "bf16"}, "layout bf16 is not packed: mla_decode takes such a cache"),
        ({"layout": "v4"}, r"q is \(5, 2, 5, 576\) .* pass \(any, any, any, 512\)"),
        ({"kv_cache": torch.zeros(2, 4, 584, dtype=torch.uint8)}, r"^kv_cache: a cache of layout v32 is \(pages, page"),
        ({"page_table": torch.zeros(4, 9, dtype=torch.int32)}, r"page_table is \(4, 9\) .* pass \(5, any\)"),
        ({"page_table": torch.zeros(5, 0, dtype=torch.int32)}, r"page_table is \(5, 0\): give it at least one column"),
        ({"seq_lens": torch.zeros(4, dtype=torch.int32)}, "seq_lens is"),
        ({"seq_lens": torch.zeros(5)}, "seq_lens is .* torch.int32"),
        ({"sink": torch.zeros(4)}, "sink is"),
        ({"cache_scale": torch.ones(1)}, "layout v32 has no cache_scale"),
        ({"kernel": "cutile-dsl/sparse_mla"}, "takes indices; the problem has a page table"),
    ],
)
def test_what_does_not_fit_dense_decode_is_named(changes: dict[str, Any], sentence: str) -> None:
    given = {**call_of(DENSE["v32"]), "on": CpuEngine(), **changes}
    with pytest.raises(UserError, match=sentence):
        packed_mla_decode(**given)


def test_a_cpu_is_refused() -> None:
    dense = call_of(DENSE["v32"])
    with pytest.raises(UserError, match=r"^q is on cpu: packed_mla_decode runs on an NVIDIA GPU"):
        packed_mla_decode(**dense)
    with pytest.raises(UserError, match=r"^q is on cpu: packed_mla_decode runs on an NVIDIA GPU"):
        PACKED_OP(*dense.values())
    given = call_of(PROBLEMS["v32"])
    with pytest.raises(UserError, match=r"^q is on cpu: sparse_mla_decode runs on an NVIDIA GPU"):
        sparse_mla_decode(**given)
    with pytest.raises(UserError, match=r"^q is on cpu: sparse_mla_decode runs on an NVIDIA GPU"):
        OP(given["q"], given["kv_cache"], given["indices"])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"causal": True}, "causal was given with indices"),
        ({"head_dim_v": 256}, "head_dim_v is 256: sparse attention has 512"),
        ({"q": torch.zeros(3, 2, 5, 640).bfloat16()}, "q has 640 columns: FP8 caches go with 576"),
        ({"is_fp8_kvcache": False}, "a cache of layout bf16"),
        ({"extra_topk_length": torch.zeros(3, dtype=torch.int32)}, "extra_topk_length was given without"),
    ],
)
def test_flash_mla_s_arguments_that_do_not_fit(changes: dict[str, Any], sentence: str) -> None:
    given = call_of(PROBLEMS["v32"], FLASH_MLA)
    meta, _ = api.get_mla_metadata()
    given |= {"block_table": None, "cache_seqlens": None, "head_dim_v": 512, "tile_scheduler_metadata": meta}
    with pytest.raises(UserError, match=sentence):
        api.flash_mla_with_kvcache(**{**given, "is_fp8_kvcache": True, **changes})
    assert not meta.have_initialized
