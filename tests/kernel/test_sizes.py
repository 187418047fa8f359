"""Sizes beyond a grid's axes and beyond 32 bits: each version takes them or says which argument is too large, before a
launch; and for the largest batches one version is left."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from mla_var3.catalogue import registry
from mla_var3.device import Device
from mla_var3.dispatch import choose
from mla_var3.errors import Infeasible, UserError
from mla_var3.ops.ways import way_for
from mla_var3.runtime import limits
from mla_var3.workload import Problem, get
from mla_var3.workload.decode import MlaProblem
from mla_var3.workload.sparse_decode import SparseProblem

H200 = Device.get("h200")
VERSIONS = [k for k in registry.all_kernels() if k.language not in ("torch", "peer") and k.design != "mla_layer"]

#: Workload -> large problems: each is over an axis of a grid, or over 2^31 of something that a kernel counts, or would
#: be in a version that is written differently.
LARGE: dict[str, list[dict[str, Any]]] = {
    "decode": [
        {"b": 70_000, "t": 384, "h": 16},
        {"b": 70_000, "t": 384, "h": 128},
        {"b": 70_000, "t": 384, "h": 16, "k": 384},
        {"b": 70_000, "t": 384, "h": 4, "h_kv": 2},
        {"b": 1 << 20, "t": 64, "h": 8},
        {"b": 1, "s": 32_768, "t": 32_768, "h": 128},
        {"b": 1, "s": 29_000, "t": 32_768, "h": 128},
        {"b": 40_000, "t": 1 << 22, "h": 16},
        {"b": 1, "t": (1 << 31) - 1, "h": 16},
        {"b": 32, "s": 8192, "t": 8192, "h": 16, "tree": True},
        {"b": 1, "s": 32_768, "t": 32_768, "h": 128, "queries": {"total": 32_768}},
    ],
    "sparse_decode": [
        {"b": 70_000, "h": 16},
        {"b": 70_000, "h": 128},
        {"b": 70_000, "h": 16, "layout": "bf16"},
        {"b": 70_000, "h": 128, "layout": "bf16"},
        {"b": 70_000, "h": 128, "paged": True},
        {"b": 1 << 20, "h": 8, "topk": 2048},
        {"b": 40_000, "h": 16, "paged": True, "t": 1 << 22},
        {"b": 1, "h": 16, "paged": True, "t": (1 << 31) - 1},
    ],
    "mixed": [{"b": 70_000, "t": 128, "n": 64, "h": 2}],
    "prefill": [{"b": 70_000, "s": 16, "h": 2}, {"b": 1, "s": 1 << 20, "h": 128}, {"b": 1, "s": 16, "h": 70_000}],
    "norm": [{"rows": 400_000, "width": 7168}, {"rows": 1 << 30, "width": 512}],
    "rope": [{"tokens": 70_000, "h": 128}, {"tokens": 1, "h": 1 << 20}, {"tokens": 1 << 27, "h": 128}],
    "packed_append": [{"tokens": 70_000, "h": 128}, {"tokens": 1, "h": 1 << 20}, {"tokens": 1 << 27, "h": 128}],
    "gemm": [
        {"side": side, **sizes}
        for side in ("q", "out")
        for sizes in ({"tokens": 9_000_000, "h": 1}, {"tokens": 70_000, "h": 128}, {"tokens": 1, "h": 70_000})
    ],
    "merge": [{"parts": 2, "tokens": 1 << 24, "h": 128}, {"parts": 2, "tokens": 70_000, "h": 128}],
}


def plans(problem: Problem) -> Any:
    """(version, plan) of all that compute the workload, with their own knobs and with each that cuts work."""
    for kernel in VERSIONS:
        if registry.missing(kernel):
            continue
        plan_type = registry.get_plan(kernel)
        if plan_type.workload.name != problem.workload:
            continue
        plan = plan_type(problem, None, H200)
        yield kernel, plan
        record = plan.tiling.to_record()
        for name, value in (("num_splits", 1), ("num_splits", 64), ("split_tokens", 64), ("splits", 1 << 17)):
            if name in record and plan.supported():
                yield kernel, plan.with_tiling(plan.tiling.from_record({**record, name: value}))


def stages(kernel: Any) -> list[Any]:
    return [each for stage in getattr(kernel, "stages", ()) for each in stages(stage)] or [kernel]


@pytest.mark.parametrize(
    ("workload", "fields"), [(name, fields) for name, some in LARGE.items() for fields in some], ids=str
)
def test_a_version_has_room_or_says_that_it_has_not(workload: str, fields: dict[str, Any]) -> None:
    problem, seen = get(workload).problem(**fields), 0
    for kernel, plan in plans(problem):
        seen += 1
        verdict = plan.supported()
        verdict = plan.feasible() if verdict else verdict
        if not verdict:
            assert verdict.reason and "problem." not in verdict.reason, kernel.label
            continue
        if kernel.language == "cute-dsl":
            continue  # its grid is the host function's, which is compiled
        for stage in stages(plan.plan_empty()):
            x, *others = (*stage.grid_fn(plan.tiling), 1, 1)
            assert x <= limits.MOST and max(others) <= limits.GRID_YZ, (kernel.label, x, others)
    assert seen >= 1


#: Kernel, problem, knobs and what the refusal says, for each version that has a limit of its own.
REFUSED: list[tuple[str, Problem, dict[str, Any], str]] = [
    *(
        (f"cutile-dsl/{name}", get(workload).problem(**fields), {}, "70,000 requests of q")
        for name, workload, fields in (
            ("flash_mla", "decode", {"b": 70_000, "h": 16}),
            ("flash_mla_v2", "decode", {"b": 70_000, "h": 16}),
            ("mla_var6_plus", "mixed", {"b": 70_000, "t": 128, "n": 64, "h": 2}),
            ("flash_attention", "prefill", {"b": 70_000, "s": 16, "h": 2}),
        )
    ),
    ("cutile-dsl/sparse_mla", SparseProblem(b=35_000, s=2, h=16), {}, "70,000 query tokens of q"),
    ("cute-dsl/flash_mla_v23", MlaProblem(b=70_000, h=128), {}, "the partial results of 70,000 requests"),
    ("cute-dsl/sparse_mla", SparseProblem(b=70_000, layout="bf16"), {}, "the partial results of 70,000 requests"),
    ("cute-dsl/sparse_mla_v2", SparseProblem(b=70_000), {}, "the partial results of 70,000 requests"),
    ("cute-dsl/sparse_mla_v2", SparseProblem(b=70_000, paged=True), {}, "the partial results of 70,000 requests"),
    ("cute-dsl/flash_mla", MlaProblem(b=70_000, h=128), {"num_splits": 2}, "num_splits = 2"),
    *(
        (f"cute-dsl/flash_mla_v{n}", MlaProblem(b=512, h=h, t=1 << 20), {"split_tokens": 64}, "fixed_split: splits of")
        for n, h in ((23, 128), (24, 16))
    ),
    *(
        (label, MlaProblem(s=32_768, t=32_768), {}, r"q has 32,768 query tokens of 128 heads in a request, .* with cu_")
        for label in ("cute-dsl/flash_mla", "cute-dsl/flash_mla_v23", "triton/flash_mla")
    ),
    *(
        (label, MlaProblem(b=40_000, h=16, t=1 << 22), {}, "page_table has 40,000 rows of 65,536 pages")
        for label in ("cute-dsl/flash_mla", "cute-dsl/flash_mla_v23", "cute-dsl/flash_mla_v24", "triton/flash_mla")
    ),
    *(
        (f"{language}/absorb_gemm", get("gemm").problem(tokens=1, h=70_000), {}, "70,000 heads of x")
        for language in ("cute-dsl", "triton", "cutile-dsl")
    ),
    ("triton/absorb_gemm", get("gemm").problem(tokens=9_000_000, h=1), {}, "of the 9,000,000 tokens of x"),
    ("triton/merge_partials", get("merge").problem(parts=2, tokens=1 << 24, h=128), {}, "2,147,483,648 rows"),
    ("cutile-dsl/rmsnorm", get("norm").problem(rows=4_200_000, width=512), {}, "4,200,000 rows of x"),
    *(
        (f"{language}/rope_append", get("rope").problem(tokens=1, h=1 << 22), {}, "4,194,304 heads of q")
        for language in ("triton", "cutile-dsl")
    ),
    *(
        (f"cute-dsl/{name}", get(workload).problem(tokens=1 << 29, h=128), {}, "536,870,912 tokens of q")
        for name, workload in (("rope_append", "rope"), ("packed_append", "packed_append"))
    ),
]


@pytest.mark.parametrize(("label", "problem", "knobs", "words"), REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_what_is_refused_is_named(label: str, problem: Problem, knobs: dict[str, Any], words: str) -> None:
    kernel = registry.KernelId.parse(label)
    if reason := registry.missing(kernel):
        pytest.skip(reason)
    plan_type = registry.get_plan(kernel)
    tiling = plan_type(problem, None, H200).tiling
    plan = plan_type(problem, tiling.from_record({**tiling.to_record(), **knobs}), H200)
    with pytest.raises(UserError, match=words):
        plan.require()


@pytest.mark.parametrize("fields", [{"h": 128}, {"h": 16}, {"h": 16, "k": 384}, {"h": 4, "h_kv": 2}], ids=str)
def test_70_000_requests_have_a_version(fields: dict[str, Any]) -> None:
    problem = MlaProblem(b=70_000, t=384, **fields)
    choice = choose(problem, H200)
    plan = choice.plan(problem, H200)
    assert plan.supported() and plan.feasible(), choice.label
    if fields.get("k") == 384:
        assert choice.kernel.label == "cute-dsl/flash_mla", "no other version takes such a width"


@pytest.mark.parametrize(("b", "t"), [*itertools.product((60_000, 62_000, 64_500, 65_535, 65_536, 70_000), (64, 384))])
def test_what_is_picked_has_room_for_the_sizes(b: int, t: int) -> None:
    problem = MlaProblem(b=b, t=t, h=128)
    plan = way_for(problem, H200).make(problem, H200)
    assert plan.supported() and plan.feasible()


def test_a_fixed_split_that_asks_for_too_much_is_refused_by_its_name() -> None:
    """The version follows from the class alone, so that a request's bits do: none is taken in its place."""
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    problem = MlaProblem(b=128, t=131_072)
    assert way_for(problem, H200, fixed_split=4096).make(problem, H200).feasible()
    plan = way_for(problem, H200, fixed_split=64).make(problem, H200)
    with pytest.raises(Infeasible, match=r"^fixed_split: splits of 64 tokens, of 128 requests with room for 131,072"):
        plan.require()
