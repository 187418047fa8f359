"""Splits of a fixed length in sparse decode, and in dense decode over packed caches, on a GPU: right, and the same bits
of a request wherever it stands in whatever batch."""

from __future__ import annotations

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ops_gpu import compile_ahead, same_bits  # noqa: E402
from public_calls import attend, right  # noqa: E402

from mla_var3.check.judge import check  # noqa: E402
from mla_var3.device import Device  # noqa: E402
from mla_var3.ops.ways import way_for  # noqa: E402
from mla_var3.workload.sparse_decode import (  # noqa: E402
    CASES,
    WORKLOAD,
    SparseProblem,
    input_names,
    make_inputs,
)
from running import captured  # noqa: E402

pytestmark = pytest.mark.gpu

SPLIT_TOKENS = 128
V4 = {"layout": "v4", "topk": 128, "page": 256, "extra": 500, "extra_page": 64, "sink": True}
V41 = {**V4, "layout": "v41"}
#: Whole rows that count and such with lengths; query tiles that are full, and such with rows without a head; two
#: caches; a scale of the cache, which partial results are multiplied with; page tables. Some requests are split.
PROBLEMS = [
    SparseProblem(b=9, h=128, t=4096, topk=1000),
    SparseProblem(b=9, s=2, h=96, t=4096, topk=1000, lengths=True, sink=True),
    SparseProblem(b=9, s=2, h=64, t=4096, lengths=True, extra_lengths=True, **V4),
    SparseProblem(b=9, s=2, h=16, t=4096, topk=700, layout="flat", page=61, lengths=True, sink=True),
    SparseProblem(b=9, s=3, h=12, t=4096, topk=333, page=16, sink=True),
    SparseProblem(b=9, s=2, h=40, t=1500, page=61, paged=True, sink=True, lengths=True),
    SparseProblem(b=9, h=8, t=1500, layout="v4", page=256, paged=True, lengths=True),
    SparseProblem(b=9, s=2, h=64, t=4096, lengths=True, extra_lengths=True, extra_layout="v41_fp4", **V41),
    SparseProblem(b=9, h=16, t=4096, topk=700, layout="v32_no_rope"),
]
#: What the caller may pass as one row for each request.
OF_REQUESTS = ("q", "indices", "lengths", "extra_indices", "extra_lengths", "page_table", "seq_lens")
#: Those of a call that needs other code are a matter of free splits.
CHECKED = tuple(name for name in CASES if name not in ("lengths", "extra", "far", "many", "missing_nan"))


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    compile_ahead(PROBLEMS, fixed_split=SPLIT_TOKENS)


@pytest.fixture(params=PROBLEMS, ids=lambda p: p.label)
def problem(request: pytest.FixtureRequest) -> SparseProblem:
    found: SparseProblem = request.param
    return found


def call(problem: SparseProblem, given: dict[str, Any], fixed_split: int | None = SPLIT_TOKENS) -> tuple[Any, Any]:
    """(out, lse), written over NaN."""
    b, s, h, _ = given["q"].shape
    out = torch.full((b, s, h, 512), float("nan"), dtype=torch.bfloat16, device="cuda")
    lse = torch.full((b, h, s), float("nan"), device="cuda")
    return attend(
        problem, tuple(given.values()), scale=problem.scale, out=out, lse=lse, fixed_split=fixed_split
    )  # fmt: skip


def inputs_of(problem: SparseProblem, dist: str) -> dict[str, Any]:
    return dict(zip(input_names(problem), make_inputs(problem, "cuda", seed=11, dist=dist), strict=True))


def of(given: dict[str, Any], requests: list[int]) -> dict[str, Any]:
    """Requests of a batch, in any order, any of them several times."""
    return {name: x[requests].contiguous() if name in OF_REQUESTS else x for name, x in given.items()}


def wider(given: dict[str, Any], columns: int) -> dict[str, Any]:
    """With room for more indices or pages, which name tokens that nobody may look at."""
    rows = {name: x for name, x in given.items() if name in ("indices", "extra_indices", "page_table")}
    return {**given, **{name: torch.nn.functional.pad(x, (0, columns), value=3) for name, x in rows.items()}}


@pytest.mark.parametrize("dist", ["normal", "unseen", "empty"])
def test_right(problem: SparseProblem, dist: str) -> None:
    given = inputs_of(problem, dist)
    right(problem, tuple(given.values()), call(problem, given), dist)


@pytest.mark.parametrize("dist", ["normal", "empty"])
def test_a_request_has_the_same_bits_in_any_batch(problem: SparseProblem, dist: str) -> None:
    """Alone; among others in another order; among fewer, and among many more; several times in one batch."""
    given, everybody, rng = inputs_of(problem, dist), list(range(problem.b)), random.Random(7)
    out, lse = call(problem, given)
    batches = [[i] for i in everybody] + [everybody[::-1], everybody[3:], everybody[:4]]
    batches += [rng.sample(everybody, rng.randint(2, problem.b)) for _ in range(4)]
    batches += [[rng.choice(everybody) for _ in range(b)] for b in (40, 131, 300)]
    wrong = []
    for requests in batches:
        found, sums = call(problem, of(given, requests))
        if not (same_bits(found, out[requests]) and same_bits(sums, lse[requests])):
            differs = [(found[i] != out[r]).any().item() for i, r in enumerate(requests)]
            wrong.append((len(requests), sum(differs), differs.index(True) if any(differs) else None))
    assert not wrong, f"(requests, how many differ, first of them): {wrong}"


def test_rows_have_any_width_where_lengths_say_what_counts(problem: SparseProblem) -> None:
    counted = problem.paged or (problem.lengths and (problem.extra_lengths or not problem.extra))
    given = inputs_of(problem, "normal")
    out, lse = call(problem, given)
    same = []
    for columns in (1, 64, 1000):
        found, sums = call(problem, wider(given, columns))
        same.append(same_bits(found, out) and same_bits(sums, lse))
    if counted:
        assert same == [True] * 3
    else:  # the new columns count
        assert same == [False] * 3


def test_a_length_above_the_width_counts_all_of_a_row() -> None:
    problem = PROBLEMS[1]
    given = inputs_of(problem, "normal")
    given["lengths"].fill_(problem.topk)
    out, lse = call(problem, given)
    given["lengths"].fill_(1 << 20)
    found, sums = call(problem, given)
    assert same_bits(found, out) and same_bits(sums, lse)


def test_other_numbers_of_workers_change_no_bit(problem: SparseProblem) -> None:
    device, given = Device.detect(), inputs_of(problem, "normal")
    plan = way_for(problem, device, fixed_split=SPLIT_TOKENS).make(problem, device)
    wanted = [x.clone() for x in plan.plan(*given.values())()]
    record, most = plan.tiling.to_record(), plan.workers()
    for workers in {1, 2, 7, most - 1, most}:
        tiling = type(plan.tiling).from_record({**record, "workers": workers})
        kernel = plan.with_tiling(tiling).plan(*given.values())
        for x in (*kernel.output_tensors, *kernel.workspace_tensors):
            if x.is_floating_point():
                x.fill_(float("nan"))
        assert all(same_bits(x, y) for x, y in zip(kernel(), wanted, strict=True)), workers


def test_free_splits_depend_on_the_batch() -> None:
    """Or the tests above could pass of themselves."""
    problem = PROBLEMS[0]
    given = inputs_of(problem, "normal")
    out, _ = call(problem, given, None)
    alone, _ = call(problem, of(given, [4]), None)
    assert not same_bits(alone[0], out[4])


def test_right_on_the_cases_that_break_kernels(problem: SparseProblem) -> None:
    device = Device.detect()
    names = [case.name for case in WORKLOAD.cases(problem, True) if case.name in CHECKED]
    report = check(way_for(problem, device, fixed_split=SPLIT_TOKENS).make(problem, device), cases=names)
    assert report.ok, report.reason


def test_a_graph_replays_with_other_inputs() -> None:
    problem = PROBLEMS[2]
    given, other = inputs_of(problem, "normal"), inputs_of(problem, "empty")
    graph, found = captured(lambda: call(problem, given))
    for name, x in given.items():
        x.copy_(other[name])
    graph.replay()
    torch.cuda.synchronize()
    assert all(same_bits(x, y) for x, y in zip(found, call(problem, other), strict=True))
