"""The kernels around attention as functions and operators, without a GPU: the torch versions compute."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ops_fakes import CpuEngine  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from mla_var3.device import Device  # noqa: E402
from mla_var3.dispatch import choose  # noqa: E402
from mla_var3.errors import UserError  # noqa: E402
from mla_var3.lab.naming import cell_name  # noqa: E402
from mla_var3.ops import absorb_gemm, latent_append, mla_decode, rmsnorm, rope_append  # noqa: E402
from mla_var3.packed_cache import pack  # noqa: E402
from mla_var3.workload import gemm, norm, packed_append, rope  # noqa: E402
from mla_var3.workload.decode import MlaProblem, make_inputs  # noqa: E402
from mla_var3.workload.gemm import GemmProblem  # noqa: E402
from mla_var3.workload.norm import NormProblem  # noqa: E402
from mla_var3.workload.packed_append import PackedAppendProblem  # noqa: E402
from mla_var3.workload.rope import RopeProblem  # noqa: E402

NORM, ROPE, ABSORB, DECODE = (f"torch/{design}" for design in ("rmsnorm", "rope_append", "absorb_gemm", "flash_mla"))
OPS = torch.ops.mla_var3
H200 = Device.get("h200")


PACKED = [
    PackedAppendProblem(tokens=6, h=3, page=4, positions=50, layout="v32", powers=False),
    PackedAppendProblem(tokens=6, h=3, page=4, positions=50, layout="v4", interleaved=False),
    PackedAppendProblem(tokens=6, h=3, page=4, positions=50, layout="flat", index="int32"),
    PackedAppendProblem(tokens=6, h=3, page=4, positions=50, layout="v41", interleaved=False),
    PackedAppendProblem(tokens=6, h=3, page=4, positions=50, layout="v41_fp4_planar"),
]
WITHOUT_ROPE = [
    PackedAppendProblem(tokens=6, page=4, layout="v32_no_rope", powers=False),
    PackedAppendProblem(tokens=6, page=4, layout="v32_no_rope", rest=0, index="int32"),
    PackedAppendProblem(tokens=6, page=4, layout="flat_no_rope", rest=3),
]


def packed_call(problem: PackedAppendProblem) -> tuple[Any, ...]:
    """q, latent, rope, positions, slots, table, out, a cache of pages that lie apart, its scale, options."""
    inputs = packed_append.make_inputs(problem, "cpu", seed=2, dist="skipped")
    out = packed_append.new_outputs(problem, inputs[0])[0]
    options = {"layout": problem.layout, "powers": problem.powers, "interleaved": problem.interleaved}
    return *inputs[:6], out, pages_apart(problem), inputs[6] if problem.layout == "flat" else None, options


def latent_call(problem: PackedAppendProblem) -> tuple[Any, ...]:
    """latent, slots, a cache of pages that lie apart, options."""
    latent, slots, *scale = packed_append.make_inputs(problem, "cpu", seed=2, dist="skipped")
    options = {"layout": problem.layout, "powers": problem.powers, "cache_scale": scale[0] if scale else None}
    return latent, slots, pages_apart(problem), options


def pages_apart(problem: PackedAppendProblem) -> Any:
    layout = problem.cache
    apart = 2 * layout.page_bytes(problem.page) + 1152
    memory = torch.zeros(problem.pages * apart, dtype=torch.uint8)
    shape = (problem.pages, problem.page, layout.token_bytes)
    return memory.as_strided(shape, (apart, layout.token_bytes, 1))


def same(found: Any, wanted: Any) -> bool:
    """Equal bits, NaN where the oracle has NaN of both."""
    return torch.equal(found.nan_to_num(7.0), wanted.to(found.dtype).nan_to_num(7.0))


# ---------------------------------------------------------------- against the oracle
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("fields", [{}, {"residual": True}, {"second": 64}], ids=["one", "residual", "two"])
def test_rmsnorm(on_cpu: CpuEngine, fields: dict[str, Any], dtype: str) -> None:
    problem = NormProblem(rows=5, width=128, rest=24, dtype=dtype, eps=1e-5, **fields)
    inputs = norm.make_inputs(problem, "cpu", seed=1)
    x, weight, second_weight, residual = norm.named(problem, inputs)
    x = x[:, : problem.columns]
    wanted = [part for part in norm.reference(problem, *inputs) if part.numel()]
    found = rmsnorm(x, weight, eps=1e-5, residual=residual, second_weight=second_weight, kernel=NORM)
    found = found if isinstance(found, tuple) else (found,)
    assert len(found) == len(wanted) and all(map(same, found, wanted))


@pytest.mark.parametrize("index", ["int32", "int64"])
@pytest.mark.parametrize("interleaved", [True, False])
def test_rope_append_leaves_all_else_as_it_was(on_cpu: CpuEngine, interleaved: bool, index: str) -> None:
    problem = RopeProblem(
        tokens=6, h=3, k=32, columns=96, rest=40, page=4, positions=50, interleaved=interleaved, index=index
    )
    q, latent, rotary, *rest = rope.make_inputs(problem, "cpu", seed=2, dist="skipped")
    out, cache = (torch.full_like(x, 3.0) for x in rope.new_outputs(problem, q))
    assert rope_append(q, latent, rotary, *rest, out, cache, interleaved=interleaved, kernel=ROPE) is None
    for found, wanted in zip((out, cache), rope.reference(problem, q, latent, rotary, *rest), strict=True):
        untouched = wanted.isnan()
        assert untouched.any() and bool((found[untouched] == 3.0).all())
        assert torch.equal(found[~untouched], wanted[~untouched].to(found.dtype))


@pytest.mark.parametrize("problem", PACKED, ids=cell_name)
def test_rope_append_packs_into_pages_that_lie_apart(on_cpu: CpuEngine, problem: PackedAppendProblem) -> None:
    """What is no token's is as it was: rows of other slots, bytes between pages, v4's byte that nobody reads."""
    *inputs, out, cache, scale, options = packed_call(problem)
    before = cache.untyped_storage().nbytes()
    memory = cache.as_strided((before,), (1,), 0)
    memory.fill_(0xA5)
    rope_append(*inputs, out, cache, cache_scale=scale, kernel="torch/packed_append", **options)
    given = inputs if scale is None else (*inputs, scale)
    wanted, *parts = packed_append.reference(problem, *given, pages=len(cache))
    assert torch.equal(out[..., problem.k :], wanted[..., problem.k :].to(out.dtype))
    expected = torch.full_like(memory, 0xA5)
    into = packed_append.views(problem.cache, expected.as_strided(cache.shape, cache.stride()))
    for to, right in zip(into, parts, strict=True):
        to[~right.isnan()] = right[~right.isnan()].to(to.dtype)
    assert torch.equal(memory, expected) and bool((memory != 0xA5).any())


@pytest.mark.parametrize("fourth", [False, True])
@pytest.mark.parametrize("problem", WITHOUT_ROPE, ids=cell_name)
def test_latent_append_packs_into_pages_that_lie_apart(
    on_cpu: CpuEngine, problem: PackedAppendProblem, fourth: bool
) -> None:
    """The bytes of `pack`, and nothing else is written. fourth: a cache (pages, page, 1, bytes)."""
    latent, slots, cache, options = latent_call(problem)
    memory = cache.as_strided((cache.untyped_storage().nbytes(),), (1,), 0).fill_(0xA5)
    given = cache.view(torch.float8_e4m3fn).unsqueeze(2) if fourth else cache
    assert latent_append(latent, slots, given, kernel="torch/packed_append", **options) is None
    expected = torch.full_like(memory, 0xA5)
    into = expected.as_strided(cache.shape, cache.stride())
    scale, there = options["cache_scale"], slots >= 0
    packed = pack(problem.cache, latent.unsqueeze(1), scale=scale, powers=problem.powers)
    into[slots[there].long() // problem.page, slots[there].long() % problem.page] = packed[there, 0]
    assert torch.equal(memory, expected) and bool((memory != 0xA5).any())


def test_no_latent_is_no_call(on_cpu: CpuEngine) -> None:
    latent, slots, cache, options = latent_call(WITHOUT_ROPE[0])
    latent_append(latent[:0], slots[:0], cache, **options)
    assert on_cpu.planned == 0 and not cache.any()


@pytest.mark.parametrize("side", gemm.SIDES)
def test_absorb_gemm_reads_and_writes_slices(on_cpu: CpuEngine, side: str) -> None:
    problem = GemmProblem(side=side, tokens=5, h=3, k=64, d=32, p=16, rest=8)
    x, weight = gemm.make_inputs(problem, "cpu", seed=3)
    x = x[..., : problem.summed]
    wanted = gemm.product(problem, x, weight).bfloat16()
    assert torch.equal(absorb_gemm(x, weight, side, kernel=ABSORB), wanted)
    room = torch.full((5, 3, problem.columns + 16), 3.0, dtype=torch.bfloat16)
    given = room[..., : problem.columns]
    assert absorb_gemm(x, weight, side, out=given, kernel=ABSORB) is given
    assert torch.equal(given, wanted) and bool((room[..., problem.columns :] == 3.0).all())


def test_other_tensors_of_the_same_shapes_are_not_planned_again(on_cpu: CpuEngine) -> None:
    weight = torch.randn(64, dtype=torch.bfloat16)
    for strides in (1, 1, 2):
        x = torch.randn(4, strides * 64, dtype=torch.bfloat16)[:, :64]
        found = rmsnorm(x, weight, kernel=NORM)
        assert same(found, norm.normalised(x, weight, 1e-6))
    assert on_cpu.planned == 2  # once for each distance between rows


def test_no_token_is_no_call(on_cpu: CpuEngine) -> None:
    assert absorb_gemm(torch.empty(0, 2, 32).bfloat16(), torch.empty(128, 64).bfloat16(), "q").shape == (0, 2, 64)
    assert rmsnorm(torch.empty(0, 64).bfloat16(), torch.empty(64).bfloat16()).shape == (0, 64)
    assert on_cpu.planned == 0


# ---------------------------------------------------------------- which version
@pytest.mark.parametrize(
    ("problem", "label"),
    [
        (NormProblem(), "cute-dsl/rmsnorm"),
        (NormProblem(width=100), "triton/rmsnorm"),
        (RopeProblem(), "cute-dsl/rope_append"),
        (GemmProblem(p=0), "cute-dsl/absorb_gemm"),
        (GemmProblem(side="out", h=16), "cute-dsl/absorb_gemm"),
    ],
    ids=lambda x: getattr(x, "label", None),
)
def test_a_version_of_the_layer_is_picked(problem: Any, label: str) -> None:
    assert choose(problem, H200).kernel.label == label


def test_an_a100_gets_triton() -> None:
    assert choose(NormProblem(), Device.get("a100")).kernel.label == "triton/rmsnorm"


# ---------------------------------------------------------------- what is refused
def call(**changed: Any) -> dict[str, Any]:
    """Arguments of a call of `rope_append`, some of them changed."""
    problem = RopeProblem(tokens=3, h=2, k=32, columns=96, rest=0, page=4, positions=9)
    names = ("q", "latent", "rope", "positions", "slots", "table")
    given = dict(zip(names, rope.make_inputs(problem, "cpu"), strict=True))
    out, cache = rope.new_outputs(problem, given["q"])
    return {**given, "out": out, "kv_cache": cache, **changed}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"q": torch.zeros(3, 2, 96)}, "latent is .* pass .3, any. torch.float32"),
        ({"latent": "x"}, "latent is a str"),
        ({"slots": torch.zeros(3, dtype=torch.int32)}, r"slots is \(3,\) torch.int32 .* pass \(3\) torch.int64"),
        ({"positions": torch.zeros(3)}, "positions are torch.float32"),
        ({"table": torch.zeros(9, 32)}, r"table is \(9, 32\) .* pass \(any, 64\)"),
        ({"kv_cache": torch.zeros(2, 4, 100).bfloat16()}, r"kv_cache is .* pass \(any, any, 96\)"),
        ({"kv_cache": torch.zeros(4, 4, 96).bfloat16()[::2]}, "kv_cache has strides"),
        ({"out": torch.zeros(3, 2, 64).bfloat16()}, r"out is \(3, 2, 64\)"),
        ({"layout": "v33"}, "v32"),
        ({"layout": "v32"}, "latent and rope have 96 columns: tokens of layout v32 have 576"),
        ({"cache_scale": torch.ones(1)}, "cache_scale is of layout flat"),
        ({}, "q is on cpu: rope_append runs on an NVIDIA GPU"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        rope_append(**call(**changed))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"kv_cache": torch.zeros(2, 4, 576).bfloat16()}, "kv_cache is torch.bfloat16: a cache of layout v32"),
        ({"kv_cache": torch.zeros(2, 4, 584, dtype=torch.uint8)}, r"\(pages, page, 656\)"),
        ({"cache_scale": torch.ones(1)}, "layout v32 has no cache_scale"),
        ({"layout": "flat", "kv_cache": torch.zeros(2, 4, 576, dtype=torch.uint8)}, "layout flat needs cache_scale"),
    ],
)
def test_a_packed_cache_that_does_not_fit_is_named(changed: dict[str, Any], words: str) -> None:
    *inputs, out, cache, _, options = packed_call(PACKED[0])
    given = {"kv_cache": cache, **options, **changed}
    with pytest.raises(UserError, match=words):
        rope_append(*inputs, out, **given)


def test_products_and_norms_that_make_no_sense() -> None:
    x, weight = torch.zeros(3, 2, 32).bfloat16(), torch.zeros(128, 64).bfloat16()
    for given, words in (
        ((x, weight, "k"), "side = 'k'"),
        ((x, weight[:98], "q"), "pass 2 heads' rows"),
        ((x, weight, "out"), r"x is \(3, 2, 32\) .* pass \(3, 2, 64\)"),
        ((x.float(), weight.float(), "q"), "torch.float32: the kernels compute in"),
        ((x, weight, "q"), "x is on cpu: absorb_gemm runs"),
    ):
        with pytest.raises(UserError, match=words):
            absorb_gemm(*given)
    rows = torch.zeros(3, 64).bfloat16()
    with pytest.raises(UserError, match=r"weight is \(32,\) .* pass \(64\)"):
        rmsnorm(rows, torch.zeros(32).bfloat16())
    with pytest.raises(UserError, match="second_weight and residual are not taken together"):
        rmsnorm(rows, rows[0, :32], residual=rows[:, :32], second_weight=rows[0, :32])


# ---------------------------------------------------------------- operators
def test_torchs_own_check_passes(on_cpu: CpuEngine) -> None:
    rows, weight = torch.randn(3, 96).bfloat16(), torch.randn(64).bfloat16()
    for given, width in (((None, None), 96), ((weight[:32], None), 64), ((None, rows), 96)):
        scale = torch.randn(width).bfloat16()
        torch.library.opcheck(OPS.rmsnorm.default, (rows, scale, *given), {"version": NORM})
    *given, out, cache = (x.nan_to_num() for x in call().values())
    torch.library.opcheck(
        OPS.rope_append.default, tuple(given), {"version": ROPE, "out": out.zero_(), "kv_cache": cache.zero_()}
    )
    for problem in PACKED:
        *given, out, cache, scale, options = packed_call(problem)
        named = {"version": "torch/packed_append", "cache_scale": scale, "out": out.zero_(), "kv_cache": cache}
        torch.library.opcheck(OPS.rope_append.default, (given[0].nan_to_num(), *given[1:]), {**named, **options})
    for problem in WITHOUT_ROPE:
        latent, slots, cache, options = latent_call(problem)
        named = {"version": "torch/packed_append", **options}
        torch.library.opcheck(OPS.latent_append.default, (latent, slots, cache), named)
    x, product = torch.randn(3, 2, 32).bfloat16(), torch.randn(128, 64).bfloat16()
    torch.library.opcheck(OPS.absorb_gemm.default, (x, product, "q"), {"version": ABSORB})
    torch.library.opcheck(
        OPS.absorb_gemm_into.default, (x, product, "q"), {"version": ABSORB, "target": torch.zeros(3, 2, 64).bfloat16()}
    )


def test_fake_tensors_on_a_gpu_that_is_not_here() -> None:
    with FakeTensorMode():
        x, first, second = (torch.empty(n, dtype=torch.bfloat16, device="cuda") for n in ((5, 96), 64, 32))
        found = rmsnorm(x, first, second_weight=second)
        heads = torch.empty(5, 2, 32, dtype=torch.bfloat16, device="cuda")
        kv_b = torch.empty(128, 512, dtype=torch.bfloat16, device="cuda")
        queries = absorb_gemm(heads, kv_b, "q")
        shapes = [tuple(t.shape) for t in (*found, queries, absorb_gemm(queries, kv_b, "out"))]
    assert shapes == [(5, 64), (5, 32), (5, 2, 512), (5, 2, 32)] and queries.device.type == "cuda"


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("problem", WITHOUT_ROPE, ids=cell_name)
def test_latents_are_appended_in_a_compiled_step(on_cpu: CpuEngine, problem: PackedAppendProblem, backend: str) -> None:
    latent, slots, cache, options = latent_call(problem)
    weight, latent = torch.randn(512).bfloat16(), latent.nan_to_num()

    def step(latent: Any, cache: Any) -> Any:
        normed = rmsnorm(latent, weight, kernel=NORM)
        latent_append(normed, slots, cache, kernel="torch/packed_append", **options)
        return normed

    torch._dynamo.reset()
    other = pages_apart(problem)
    wanted, found = step(latent, cache), torch.compile(step, fullgraph=True, backend=backend)(latent, other)
    assert torch.equal(found, wanted) and torch.equal(other, cache) and bool(cache.any())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_step_of_a_layer_compiles_without_a_break(on_cpu: CpuEngine, backend: str) -> None:
    """Norm, absorb, rope and cache, attention, and back to heads: as one graph, and the cache is written."""
    h, k, p, d, b = 2, 64, 64, 32, 3
    problem = MlaProblem(b=b, h=h, k=k, p=p, t=1, lengths=[5, 64, 70])
    _, cache, pages, lengths = make_inputs(problem, "cpu", seed=4, poison=False)
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Any:
        return torch.randn(shape, generator=generator).bfloat16()

    q, kv_b, latent, scale = draw(b, h, d + p), draw(h * 2 * d, k), draw(b, k + p), draw(k)
    last = lengths.long() - 1
    slots = pages.gather(1, (last // 64)[:, None])[:, 0].long() * 64 + last % 64
    table = rope.rope_table(80, p)

    def step(q: Any, latent: Any, cache: Any) -> Any:
        normed = rmsnorm(latent[:, :k], scale, kernel=NORM)
        queries = torch.zeros((b, h, k + p), dtype=q.dtype)
        absorb_gemm(q[..., :d], kv_b, "q", out=queries[..., :k], kernel=ABSORB)
        rope_append(q, normed, latent[:, k:], last, slots, table, queries, cache[:, :, 0], kernel=ROPE)
        out = mla_decode(queries[:, None], cache, pages, lengths, head_dim_v=k, kernel=DECODE)
        return absorb_gemm(out[:, 0], kv_b, "out", kernel=ABSORB)

    eager, compiled = cache.clone(), cache.clone()
    wanted = step(q, latent, eager)
    torch._dynamo.reset()
    found = torch.compile(step, fullgraph=True, backend=backend)(q, latent, compiled)
    assert torch.equal(found, wanted) and torch.equal(compiled, eager) and not torch.equal(eager, cache)
    assert bool(found.float().abs().sum() > 0)
