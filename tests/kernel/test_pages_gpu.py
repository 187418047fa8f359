"""Caches with pages of any size, and with pages that lie apart, on a GPU."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from planning import planned, right  # noqa: E402

from mla_var3.check.judge import bounds_of, check, compare  # noqa: E402
from mla_var3.toolchain.aot import CompileCache  # noqa: E402
from mla_var3.workload.decode import MlaProblem, make_inputs, same_class  # noqa: E402

pytestmark = pytest.mark.gpu

V23, V24 = "cute-dsl/flash_mla_v23", "cute-dsl/flash_mla_v24"
#: (version, heads, caches they share, query tokens, page); several query tokens are masked.
CASES = [
    *((V23, 128, 1, 1, page) for page in (1, 2, 16, 24, 32, 48, 128)),
    *((V23, 64, 1, 2, page) for page in (1, 16, 24)),
    *((V23, 128, 2, 1, page) for page in (2, 32)),
    *((V24, 16, 1, 1, page) for page in (1, 2, 16, 24, 32, 48, 128)),
    *((V24, 8, 1, 1, page) for page in (1, 32)),
    *((V24, 8, 1, 2, page) for page in (1, 16, 24)),
    *((V24, 16, 2, 1, page) for page in (2, 48)),
]
STRIDED = [case for case in CASES if case[1:4] in ((128, 1, 1), (16, 1, 1)) and case[4] in (1, 32, 128)]


def apart(cache: Any, stride: int) -> Any:
    """The same pages, `stride` elements from each other, with NaN between them."""
    memory = torch.full((len(cache) * stride,), float("nan"), dtype=cache.dtype, device=cache.device)
    _, _, h_kv, width = cache.shape
    strided = memory.as_strided(cache.shape, (stride, h_kv * width, width, 1))
    strided.copy_(cache)
    return strided


@pytest.mark.parametrize(("label", "h", "h_kv", "s", "page"), CASES)
def test_every_case_of_the_check(label: str, h: int, h_kv: int, s: int, page: int) -> None:
    problem = MlaProblem(b=5, s=s, t=4100, h=h, h_kv=h_kv, causal=s > 1, page=page, lengths="ragged")
    right(planned(label, problem, CompileCache()), seeds=(3,))


@pytest.mark.parametrize(("label", "h", "h_kv", "s", "page"), CASES)
def test_splits_of_few_and_of_many_requests(label: str, h: int, h_kv: int, s: int, page: int) -> None:
    """One long request, and more requests than there are multiprocessors, all of them longer than the ring."""
    compiled = CompileCache()
    for lengths in ([30_011], [64, 65, 63, 1, 0, 129, 700] * 40):
        problem = same_class(MlaProblem(s=s, h=h, h_kv=h_kv, causal=s > 1, page=page), lengths)
        right(planned(label, problem, compiled), ("own",), seeds=(5,))


@pytest.mark.parametrize(("label", "h", "h_kv", "s", "page"), STRIDED)
def test_pages_that_lie_apart(label: str, h: int, h_kv: int, s: int, page: int) -> None:
    """The same bits as with pages behind each other; the last stride takes the cache past 2^31 elements."""
    lengths = [777, 0, 1, page, page + 1, 64, 65, 130]
    problem = same_class(MlaProblem(s=s, h=h, h_kv=h_kv, causal=s > 1, page=page), lengths)
    q, cache, table, lens = make_inputs(problem, "cuda", seed=page)
    plan = planned(label, problem, CompileCache())
    kernel = plan.plan(q, cache, table, lens)
    expected = [x.clone() for x in kernel()]
    reference = plan.reference_fn(q, cache, table, lens)
    verdict = compare(plan.workload, expected, reference, bounds_of(type(plan), "flashmla"))
    assert verdict.ok, verdict.reason
    elements, strided = cache[0].numel(), planned(label, problem.replace(strided_pages=True), CompileCache())
    first = strided.plan(q, apart(cache, 2 * elements), table, lens)
    for stride in (elements + 8, 2 * elements, max(elements + 64, 2**31 // len(cache) // 8 * 8 + 800)):
        for bound in (
            strided.plan(q, apart(cache, stride), table, lens),
            first.bind(q, apart(cache, stride), table, lens),
        ):
            for x in (*bound.output_tensors, *bound.workspace_tensors):
                if x.is_floating_point():
                    x.fill_(float("nan"))
            for found, wanted in zip(bound(), expected, strict=True):
                assert torch.equal(found, wanted), stride


@pytest.mark.parametrize(("label", "h", "h_kv", "s", "page"), CASES)
def test_a_cache_of_one_page(label: str, h: int, h_kv: int, s: int, page: int) -> None:
    problem = same_class(MlaProblem(s=s, h=h, h_kv=h_kv, causal=s > 1, page=page), [page])
    report = check(planned(label, problem, CompileCache()), seeds=(7,), cases=("own",))
    assert report.ok, report.reason
