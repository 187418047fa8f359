"""Scores that are not ordinary, in every kernel of every language: NaN stays visible, a scale of zero and below is a
factor as any other, and logits may be as large as docs/serving.md says. Plans are driven by the cases of their
workloads, the public functions by the same inputs.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import ops_gpu  # noqa: E402
from public_calls import attend, right  # noqa: E402

from mla_var3.catalogue import registry  # noqa: E402
from mla_var3.catalogue.registry import KernelId  # noqa: E402
from mla_var3.check.judge import check  # noqa: E402
from mla_var3.device import Device  # noqa: E402
from mla_var3.ops import flash_mla, merge_partials, mla_decode  # noqa: E402
from mla_var3.workload import decode, sparse_decode  # noqa: E402
from mla_var3.workload.decode import PROMISED, MlaProblem  # noqa: E402
from mla_var3.workload.merge import MergeProblem  # noqa: E402
from mla_var3.workload.mixed import MixedProblem  # noqa: E402
from mla_var3.workload.prefill import PrefillProblem  # noqa: E402
from mla_var3.workload.sparse_decode import SparseProblem  # noqa: E402
from running import captured  # noqa: E402

pytestmark = pytest.mark.gpu

#: Whole requests, requests of few splits and of many, with 128 query rows and with 16; several query tokens in fp16.
DECODE = [
    MlaProblem(b=4, h=128, t=4096, lengths=[4096, 130, 65, 1]),
    MlaProblem(b=4, h=16, t=4096, lengths=[4096, 130, 65, 1]),
    MlaProblem(b=3, h=16, s=3, causal=True, t=900, lengths=[900, 65, 3], dtype="fp16"),
    MlaProblem(b=3, h=16, causal=True, t=900, lengths=[900, 65, 20], queries=[1, 0, 3]),
    MlaProblem(b=3, h=8, s=4, tree=True, t=900, lengths=[900, 65, 20]),
    MlaProblem(b=3, h=16, k=256, p=0, t=900, lengths=[900, 65, 20]),
]
PACKED = [SparseProblem(b=5, s=2, h=64, t=1000, topk=333, layout=layout) for layout in ("v32", "v4", "flat", "bf16")]
PACKED.append(SparseProblem(b=5, s=2, h=64, t=1000, layout="v32", paged=True))
OTHERS = [PrefillProblem(b=2, s=129, h=4, causal=True), MixedProblem(b=3, h=16, t=700, n=64), MergeProblem(parts=4)]
CASES = {"merge": ("empty", "nan", "in_place")}
DESIGNS = ("flash_mla", "sparse_mla", "flash_attention", "mla_var6_plus", "merge_partials")
OURS = [
    k
    for k in registry.all_kernels()
    if k.language != "peer" and k.design in DESIGNS and not registry.missing(k.language)
]
PLANNED = [
    (kernel, problem)
    for problem in (*DECODE, *PACKED, *OTHERS)
    for kernel in OURS
    if registry.get_plan(kernel).requires.accepts(problem)
]
FEW = MlaProblem(b=1, h=16, t=64, lengths=[3])
#: What `mla_decode` is asked for: the scale, the distribution of the inputs, and how splits are merged.
ASKED = [(0.0, "normal"), (-0.1, "normal"), (None, "nan"), (None, "extremes")]
SPLIT_TOKENS = 128  # of `fixed_split`, which has a kernel of its own that merges


def planned(kernel: KernelId, problem: Any) -> Any:
    plan = registry.get_plan(kernel)(problem, None, Device.detect())
    verdict = plan.supported()
    if not verdict or not (verdict := plan.feasible()):
        pytest.skip(verdict.reason)
    return plan


def test_every_attention_of_ours_is_asked() -> None:
    asked = {kernel for kernel, _ in PLANNED}
    assert asked == set(OURS) and {"torch", "triton"} <= {kernel.language for kernel in asked}


@pytest.mark.parametrize(("kernel", "problem"), PLANNED, ids=lambda x: x.label)
def test_a_plan_is_right(kernel: KernelId, problem: Any) -> None:
    cases = CASES.get(problem.workload, PROMISED)
    report = check(planned(kernel, problem), device="cuda", cases=cases)
    assert report.ok, report.reason
    assert {case.name for case in report.cases} == set(cases)


# ---------------------------------------------------------------- the public functions
def asked(problem: MlaProblem, scale: float | None, dist: str, **options: Any) -> Any:
    """The verdict on `mla_decode`, called with a scale on inputs of a distribution."""
    given = decode.make_inputs(problem, "cuda", seed=7, dist=dist)
    found = ops_gpu.decode(problem, given, scale=scale, head_dim_v=problem.k, **options)
    bounds = decode.bounds_for(dist)
    return ops_gpu.judge(found, given, problem.scale if scale is None else scale, problem.causal, bounds)


@pytest.mark.parametrize(("scale", "dist"), ASKED)
@pytest.mark.parametrize("problem", DECODE, ids=lambda p: p.label)
def test_mla_decode_is_right(problem: MlaProblem, scale: float | None, dist: str) -> None:
    verdict = asked(problem, scale, dist)
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize(("scale", "dist"), ASKED)
@pytest.mark.parametrize("problem", DECODE[:2], ids=lambda p: p.label)
def test_splits_of_a_fixed_length_are_right(problem: MlaProblem, scale: float | None, dist: str) -> None:
    verdict = asked(problem, scale, dist, fixed_split=SPLIT_TOKENS)
    assert verdict.ok, verdict.reason


def test_the_mean_of_three_tokens() -> None:
    """The smallest input of the kind, in every version that takes it: scale 0 gives the mean, and LSE ln 3."""
    problem = FEW
    q, cache, table, lens = decode.make_inputs(problem, "cuda", seed=1, dist="normal")
    mean = cache[table[0, 0], :3, 0, :512].float().mean(0)
    tried = 0
    for kernel in OURS:
        if kernel.design != "flash_mla" or kernel.language == "torch":
            continue
        out, lse = mla_decode(q, cache, table, lens, scale=0.0, return_lse=True, kernel=kernel.label)
        torch.testing.assert_close(out[0, 0].float(), mean.expand(16, -1), rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(lse, torch.full_like(lse, math.log(3)), rtol=1e-5, atol=1e-5)
        tried += 1
    assert tried >= 1


def test_a_capture_replays_with_a_scale_below_zero() -> None:

    problem = DECODE[1]
    given = decode.make_inputs(problem, "cuda", seed=3, dist="normal")
    graph, found = captured(lambda: ops_gpu.decode(problem, given, scale=-0.1))
    given[0].copy_(torch.randn_like(given[0]))
    graph.replay()
    torch.cuda.synchronize()
    verdict = ops_gpu.judge(found, given, -0.1, False, decode.NORMAL)
    assert verdict.ok, verdict.reason


def test_a_compiled_function_takes_a_scale_below_zero() -> None:

    problem = DECODE[1]
    given = decode.make_inputs(problem, "cuda", seed=4, dist="normal")

    @torch.compile(fullgraph=True)
    def step(q: Any, pages: Any, table: Any, lens: Any) -> Any:
        return mla_decode(q, pages, table, lens, scale=-0.1, return_lse=True)

    verdict = ops_gpu.judge(step(*given), given, -0.1, False, decode.NORMAL)
    assert verdict.ok, verdict.reason


def test_the_drop_in_takes_a_scale_below_zero() -> None:
    problem = DECODE[1]
    given = decode.make_inputs(problem, "cuda", seed=5, dist="normal")
    metadata, _ = flash_mla.get_mla_metadata()
    found = flash_mla.flash_mla_with_kvcache(*given, 512, metadata, softmax_scale=-0.1)
    verdict = ops_gpu.judge(found, given, -0.1, False, decode.NORMAL)
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize(("scale", "dist"), [(0.0, "flashmla"), (-0.05, "below_zero"), (None, "nan")])
@pytest.mark.parametrize("problem", PACKED, ids=lambda p: p.label)
def test_packed_and_sparse_decode_are_right(problem: SparseProblem, scale: float | None, dist: str) -> None:
    asked = problem if scale is None else problem.replace(softmax_scale=scale)
    inputs = sparse_decode.make_inputs(asked, "cuda", seed=6, dist=dist)
    right(asked, inputs, attend(asked, inputs, scale=asked.scale), dist)


def test_a_merge_keeps_the_nan_of_one_part() -> None:
    """What a rank whose tokens are NaN sends, beside parts without keys of both signs, whose partials are NaN too."""
    partials = torch.full((4, 3, 512), 2.0, device="cuda", dtype=torch.bfloat16)
    lse = torch.tensor(
        [[1.0, 1.0, math.inf], [math.nan, 1.0, -math.inf], [math.inf, -math.inf, math.inf], [-math.inf, 1.0, math.inf]],
        device="cuda",
    )
    partials[lse.isinf()] = math.nan
    out, total = merge_partials(partials, lse)
    assert bool(out[0].isnan().all()) and bool(total[0].isnan())
    assert out[1].tolist() == [2.0] * 512 and math.isclose(float(total[1]), 1.0 + math.log(3.0), rel_tol=1e-6)
    assert not out[2].any() and float(total[2]) == math.inf
