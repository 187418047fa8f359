"""The kernels around attention on a GPU: as functions, as operators, in a graph, and as one compiled step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ops_gpu import same_bits  # noqa: E402

from mla_var3.check.judge import compare  # noqa: E402
from mla_var3.ops import absorb_gemm, mla_decode, rmsnorm, rope_append  # noqa: E402
from mla_var3.workload import Problem, gemm, norm, rope  # noqa: E402
from mla_var3.workload.decode import MlaProblem, make_inputs  # noqa: E402
from mla_var3.workload.gemm import GemmProblem  # noqa: E402
from mla_var3.workload.norm import NormProblem  # noqa: E402
from mla_var3.workload.rope import RopeProblem  # noqa: E402

pytestmark = pytest.mark.gpu

H, K, P, D, B = 16, 512, 64, 128, 5
NORMS = [
    NormProblem(rows=B, width=K, rest=P),
    NormProblem(rows=3, residual=True),
    NormProblem(rows=9, width=1536, second=K),
]
ROPES = [
    RopeProblem(tokens=B, h=H, rest=K, positions=4096),
    RopeProblem(tokens=700, h=H, interleaved=False, positions=4096),
]
GEMMS = [GemmProblem(side=side, tokens=n, h=H, p=0) for side in gemm.SIDES for n in (B, 70)]
DECODE = MlaProblem(b=B, h=H, t=300, lengths=[300, 1, 64, 65, 200])
#: What make_gpu_bundle.py compiles ahead.
PROBLEMS: list[Problem] = [*NORMS, *ROPES, *GEMMS]


def right(workload: Any, name: str, found: Any, wanted: Any) -> None:
    judged = replace(workload, outputs=tuple(output for output in workload.outputs if output.name == name))
    report = compare(judged, [found], [wanted], workload.bounds("normal"))
    assert report.ok, f"{name}: {report.reason}"


@pytest.mark.parametrize("problem", NORMS, ids=lambda p: p.label)
def test_rmsnorm(problem: NormProblem) -> None:
    inputs = norm.make_inputs(problem, "cuda", seed=1)
    x, weight, second_weight, residual = norm.named(problem, inputs)
    x = x[:, : problem.columns]
    found = rmsnorm(x, weight, residual=residual, second_weight=second_weight)
    out, second, summed = norm.reference(problem, *inputs)
    if isinstance(found, torch.Tensor):
        right(norm.WORKLOAD, "out", found, out)
        return
    right(norm.WORKLOAD, "out", found[0], out)
    right(norm.WORKLOAD, *(("second", found[1], second) if problem.second else ("residual", found[1], summed)))


@pytest.mark.parametrize("problem", ROPES, ids=lambda p: p.label)
def test_rope_append_into_a_large_cache(problem: RopeProblem) -> None:
    inputs = rope.make_inputs(problem, "cuda", seed=2, dist="skipped")
    out, cache = (torch.full_like(x, 3.0) for x in rope.new_outputs(problem, inputs[0], problem.pages + 40))
    rope_append(*inputs, out, cache, interleaved=problem.interleaved)
    wanted = rope.reference(problem, *inputs, pages=len(cache))
    for name, found, oracle in zip(("out", "cache"), (out, cache), wanted, strict=True):
        untouched = oracle.isnan()
        assert bool((found[untouched] == 3.0).all())
        right(rope.WORKLOAD, name, found[~untouched][None], oracle[~untouched][None])


@pytest.mark.parametrize("problem", GEMMS, ids=lambda p: p.label)
def test_absorb_gemm_between_slices(problem: GemmProblem) -> None:
    wide = problem.replace(p=P)
    x, weight = gemm.make_inputs(wide, "cuda", seed=3)
    room = torch.full((problem.tokens, H, problem.columns + P), 3.0, dtype=torch.bfloat16, device="cuda")
    for _ in range(2):  # the second call finds what the first has planned
        out = absorb_gemm(x[..., : problem.summed], weight, problem.side, out=room[..., : problem.columns])
        right(gemm.WORKLOAD, "out", out, gemm.product(wide, x[..., : problem.summed], weight))
        assert bool((room[..., problem.columns :] == 3.0).all())
        room[..., : problem.columns] = 5.0


class Layer:
    """What surrounds attention in one decode step, with random weights."""

    def __init__(self) -> None:
        generator = torch.Generator(device="cuda").manual_seed(4)

        def draw(*shape: int) -> Any:
            return torch.randn(shape, generator=generator, device="cuda").bfloat16()

        _, self.cache, self.pages, self.lengths = make_inputs(DECODE, "cuda", seed=4, poison=False)
        self.q, self.latent = draw(B, H, D + P), draw(B, K + P)
        self.kv_b, self.weight = draw(H * 2 * D, K), draw(K)
        self.last = self.lengths.long() - 1
        page = self.pages.gather(1, (self.last // 64)[:, None])[:, 0].long()
        self.slots = page * 64 + self.last % 64
        self.table = rope.rope_table(4096, P, device="cuda")

    def step(self, q: Any, latent: Any, cache: Any) -> Any:
        normed = rmsnorm(latent[:, :K], self.weight)
        queries = torch.empty((B, H, K + P), dtype=q.dtype, device=q.device)
        absorb_gemm(q[..., :D], self.kv_b, "q", out=queries[..., :K])
        rope_append(q, normed, latent[:, K:], self.last, self.slots, self.table, queries, cache[:, :, 0])
        out = mla_decode(queries[:, None], cache, self.pages, self.lengths)
        assert isinstance(out, torch.Tensor)
        return absorb_gemm(out[:, 0], self.kv_b, "out")


def test_a_step_in_a_graph_and_compiled_gives_the_bits_of_eager_calls() -> None:
    layer = Layer()
    caches = [layer.cache.clone() for _ in range(3)]
    wanted = layer.step(layer.q, layer.latent, caches[0])
    assert bool(wanted.isfinite().all()) and bool(wanted.float().abs().sum() > 0)

    graph = torch.cuda.CUDAGraph()
    layer.step(layer.q, layer.latent, caches[1])
    caches[1].copy_(layer.cache)
    with torch.cuda.graph(graph):
        replayed = layer.step(layer.q, layer.latent, caches[1])
    graph.replay()
    torch.cuda.synchronize()
    assert same_bits(replayed, wanted) and same_bits(caches[1], caches[0])

    torch._dynamo.reset()
    compiled = torch.compile(layer.step, fullgraph=True)(layer.q, layer.latent, caches[2])
    assert same_bits(compiled, wanted) and same_bits(caches[2], caches[0])


def test_torchs_own_check_passes() -> None:
    layer, ops = Layer(), torch.ops.mla_var3
    rows = layer.latent[:, :K].contiguous()
    torch.library.opcheck(ops.rmsnorm.default, (rows, layer.weight))
    torch.library.opcheck(ops.absorb_gemm.default, (layer.q[..., :D], layer.kv_b, "q"))
    queries = torch.zeros((B, H, K + P), dtype=torch.bfloat16, device="cuda")
    given = (layer.q, rows, layer.latent[:, K:], layer.last, layer.slots, layer.table)
    torch.library.opcheck(ops.rope_append.default, given, {"out": queries, "kv_cache": layer.cache[:, :, 0]})
