"""The lightning indexer's workloads: their oracles against plain sums and sorts, and a check that stops mistakes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from mla_var3.catalogue import registry
from mla_var3.check.judge import check, compare, untouched
from mla_var3.errors import UserError
from mla_var3.lab import naming
from mla_var3.workload import indexer_logits, topk
from mla_var3.workload.indexer_logits import PAGE, IndexerLogitsProblem, index_pages
from mla_var3.workload.indexer_topk import IndexerTopkProblem
from mla_var3.workload.topk import TopkProblem

PAGED = IndexerLogitsProblem(b=4, s=2, t=130, heads=16, lengths="ragged")
PREFILL = IndexerLogitsProblem(b=2, s=5, t=70, heads=32, table=False)


def dense(problem: IndexerLogitsProblem, inputs: tuple[Any, ...]) -> Any:
    """Logits (rows, columns) token by token, NaN out of range."""
    out = torch.full((problem.rows, problem.columns), math.nan, dtype=torch.float64)
    if problem.table:
        q, cache, weights, ends, table = inputs
        codes, scales = index_pages(cache)
        q, ends = q.flatten(0, 1), ends.flatten()
        starts = torch.zeros_like(ends)
    else:
        q, keys, of_keys, weights, starts, ends = inputs
    for i, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        for j in range(max(start, 0), min(end, problem.columns)):
            if problem.table:
                page, row = int(table[i // problem.s, j // PAGE]), j % PAGE
                key, scale = codes[page, row], scales[page, row]
            else:
                key, scale = keys[j], of_keys[j]
            products = q[i].view(torch.float8_e4m3fn).double() @ key.view(torch.float8_e4m3fn).double()
            products = torch.where(products > 0, products, 0.0)
            found = float((products * weights[i].double()).sum() * scale.double())
            out[i, j] = -math.inf if math.isnan(found) else found
    return out


@pytest.mark.parametrize("dist", ["normal", "exact", "denormal", "odd"])
@pytest.mark.parametrize("problem", [PAGED, PREFILL], ids=lambda p: p.label)
def test_oracle_is_the_sum_token_by_token(problem: IndexerLogitsProblem, dist: str) -> None:
    inputs = indexer_logits.make_inputs(problem, seed=2, dist=dist)
    (found,), wanted = indexer_logits.reference(problem, *inputs), dense(problem, inputs)
    assert torch.equal(found.isnan(), wanted.isnan()) and bool(found.isnan().any())
    assert torch.allclose(found.nan_to_num(7.0), wanted.nan_to_num(7.0), rtol=1e-12, atol=1e-12)
    assert (dist == "odd") == bool((found == -math.inf).any())


def test_whole_numbers_are_exact_in_float32_and_many_are_equal() -> None:
    problem = PREFILL.replace(heads=64, b=1, s=40, t=500)
    (found,) = indexer_logits.reference(problem, *indexer_logits.make_inputs(problem, dist="exact"))
    values = found[~found.isnan()]
    assert torch.equal(values, values.float().double())
    assert values.unique().numel() < values.numel() // 2


def test_slots_behind_a_request_are_poisoned_and_never_reach_a_logit() -> None:
    inputs = indexer_logits.make_inputs(PAGED, seed=3)
    _, scales = index_pages(inputs[1])
    assert bool(scales.isnan().any()) and int(inputs[4].max()) == indexer_logits.NO_PAGE
    (found,) = indexer_logits.reference(PAGED, *inputs)
    assert not bool((found == -math.inf).any())


def test_costs_count_pairs_in_range() -> None:
    problem = IndexerLogitsProblem(b=1, s=4, t=10, heads=16, table=False)
    pairs = 7 + 8 + 9 + 10
    cost = problem.cost()
    assert (cost.pairs, cost.flops) == (pairs, pairs * 16 * 256)
    assert cost.bytes == 4 * (16 * 132 + 8) + 10 * 132 + pairs * 4
    both = IndexerTopkProblem(b=1, s=4, t=10, heads=16, table=False, topk=3)
    assert both.cost().bytes == cost.bytes - pairs * 4 + 4 * 3 * 4
    assert TopkProblem(b=2, t=100, topk=8).cost().bytes == 2 * (400 + 8 + 32)


def by_hand(row: list[float], k: int) -> list[int]:
    """The k best of a row by a sort of (value, column), NaN as -inf."""
    values = [-math.inf if math.isnan(x) else x for x in row]
    return sorted(range(len(row)), key=lambda j: (-values[j], j))[:k]


@pytest.mark.parametrize("dist", topk.DISTRIBUTIONS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("table", [False, True])
def test_topk_is_the_sort_of_each_row(dist: str, dtype: str, table: bool) -> None:
    problem = TopkProblem(b=7, s=2, t=90, topk=20, table=table, lengths="ragged", dtype=dtype)
    inputs = topk.make_inputs(problem, seed=4, dist=dist)
    (found,) = topk.reference(problem, *inputs)
    for i, (start, end) in enumerate(problem.ranges()):
        end = max(start, min(end, problem.t))
        wanted = [start + j for j in by_hand(inputs[0][i, start:end].float().tolist(), problem.topk)]
        if table:
            wanted = [int(inputs[2][i // 2, j // PAGE]) * PAGE + j % PAGE for j in wanted]
        assert found[i].tolist() == wanted + [-1] * (problem.topk - len(wanted))


def test_a_choice_that_differs_by_a_tie_is_wrong_and_another_order_is_not() -> None:
    problem = TopkProblem(b=2, t=50, topk=5)
    inputs = topk.make_inputs(problem, dist="equal")
    (right,) = topk.reference(problem, *inputs)
    assert compare(topk.WORKLOAD, [right.flip(1).int()], [right], topk.bounds("equal"))
    other = right.clone()
    other[1, 2] = 7  # as large, and in a higher column
    report = compare(topk.WORKLOAD, [other.int()], [right], topk.bounds("equal"))
    assert not report and "3 of 10 elements beyond the bounds" in report.reason
    short = right.clone()
    short[0, 4] = -1
    moved = short.clone()
    moved[0, 0], moved[0, 4] = -1, short[0, 0]
    report = compare(topk.WORKLOAD, [moved.int()], [short], topk.bounds("equal"))
    assert not report and "names something where its reference does not" in report.reason


@pytest.mark.parametrize("kernel", ["torch/mqa_logits", "torch/topk", "torch/indexer_topk"])
def test_every_case_has_its_name_and_passes_on_the_cpu(kernel: str) -> None:
    plan = registry.get_plan(registry.KernelId.parse(kernel))
    fields: dict[str, Any] = {"b": 2, "t": 150}
    fields |= {"topk": 40} if "topk" in kernel else {}
    fields |= {"heads": 16, "s": 2} if kernel != "torch/topk" else {"s": 2}
    for table in (True, False):
        report = check(plan, plan.workload.problem(**fields, table=table), device="cpu", seeds=[5])
        assert report, report.reason
        on_cpu = [case.name for case in plan.workload.cases(plan.workload.problem(**fields), False) if not case.gpu]
        assert [case.name for case in report.cases] == on_cpu
        assert set(on_cpu) < set(plan.workload.case_names) and set(plan.workload.quick) <= set(on_cpu)


def test_a_check_stops_a_head_that_is_left_out_and_a_slot_that_is_read() -> None:
    inputs = indexer_logits.make_inputs(PREFILL, seed=6)
    references = indexer_logits.reference(PREFILL, *inputs)
    written = references[0].nan_to_num(untouched(torch.zeros(1))).float()
    bounds = indexer_logits.bounds("normal")
    assert compare(indexer_logits.WORKLOAD, [written], references, bounds)
    weights = inputs[3].clone()
    weights[3, 4] = 0.0
    (fewer,) = indexer_logits.reference(PREFILL, *inputs[:3], weights, *inputs[4:])
    report = compare(
        indexer_logits.WORKLOAD, [fewer.nan_to_num(untouched(written)).float()], references, bounds
    )  # fmt: skip
    assert not report and "logits" in report.reason
    spilled = written.clone()
    spilled[0, -1] = 0.0
    assert "must stay as it was" in compare(indexer_logits.WORKLOAD, [spilled], references, bounds).reason


WIDE = IndexerLogitsProblem(b=1, s=24, t=500, table=False)


def on_tensor_cores(q: Any, keys: Any, scales: Any, weights: Any, starts: Any, ends: Any) -> Any:
    """Logits (n, t) with FP8 products summed as Hopper's tensor cores do, 32 a step, NaN out of range."""
    out = torch.empty(len(q), len(keys), dtype=torch.float64)
    columns = keys.view(torch.float8_e4m3fn).double()
    for i, heads in enumerate(q.view(torch.float8_e4m3fn).double()):
        total = torch.zeros(len(heads), len(keys), dtype=torch.float64)
        for first in range(0, indexer_logits.D, 32):
            step = slice(first, first + 32)
            terms = torch.cat([heads[:, None, step] * columns[None, :, step], total[..., None]], -1)
            unit = torch.exp2(terms.abs().amax(-1, keepdim=True).clamp(min=1e-30).log2().floor() - 13)
            total = (terms / unit).trunc().sum(-1) * unit[..., 0]
        out[i] = (total.relu() * weights[i, :, None].double()).sum(0) * scales.double()
    column = torch.arange(len(keys))
    return out.masked_fill((column < starts[:, None]) | (column >= ends[:, None]), math.nan)


def judged(logits: Any, references: Any, dtype: Any) -> Any:
    written = logits.nan_to_num(untouched(torch.zeros(1))).to(dtype)
    return compare(indexer_logits.WORKLOAD, [written], references, indexer_logits.bounds("normal"))


def test_sums_of_tensor_cores_are_within_the_bound_and_not_far_below_it() -> None:
    inputs = indexer_logits.make_inputs(WIDE, seed=1)
    references = indexer_logits.reference(WIDE, *inputs)
    found = on_tensor_cores(*inputs)
    error = (found - references[0]).abs().nan_to_num(0.0)
    assert 0.2 * indexer_logits.FP8_SUMS < float(error.max()) < 0.6 * indexer_logits.FP8_SUMS
    assert 0.006 < float(error.square().mean().sqrt()) < 0.01
    for dtype in (torch.float32, torch.bfloat16):
        report = judged(found, references, dtype)
        assert report, report.reason


@pytest.mark.parametrize("off", [0.02, 0.3])
def test_a_logit_near_0_may_be_off_by_as_much_as_others(off: float) -> None:
    one = IndexerLogitsProblem(b=2, s=2, t=716, lengths="ragged")
    drawn = (indexer_logits.reference(one, *indexer_logits.make_inputs(one, seed=seed)) for seed in range(200))
    references = next(found for found in drawn if float(found[0][3, 0].abs()) < 1.0)
    assert int((~references[0].isnan()).sum()) == 1
    report = judged(references[0] + off, references, torch.float32)
    assert report.outputs["logits"].cos > 1e-4
    assert bool(report) == (off < indexer_logits.FP8_SUMS)


def _first_head_dropped(inputs: list[Any]) -> None:
    inputs[3][:, 0] = 0.0


def _one_head_of_one_token_dropped(inputs: list[Any]) -> None:
    inputs[3][7, 40] = 0.0


def _two_scales_swapped(inputs: list[Any]) -> None:
    inputs[2][[200, 201]] = inputs[2][[201, 200]]


def _keys_shifted_by_one(inputs: list[Any]) -> None:
    inputs[1][:] = inputs[1].roll(1, 0)


def _scales_shifted_by_one(inputs: list[Any]) -> None:
    inputs[2][:] = inputs[2].roll(1)


def _weights_of_the_next_token(inputs: list[Any]) -> None:
    inputs[3][:] = inputs[3].roll(1, 0)


def _heads_swapped(inputs: list[Any]) -> None:
    inputs[0][3, [10, 11]] = inputs[0][3, [11, 10]]


def _last_columns_left_out(inputs: list[Any]) -> None:
    inputs[0][..., -1] = 0


def _scales_in_bf16(inputs: list[Any]) -> None:
    inputs[2][:] = inputs[2].bfloat16().float()


FAULTS = (
    _first_head_dropped, _one_head_of_one_token_dropped, _two_scales_swapped, _keys_shifted_by_one,
    _scales_shifted_by_one, _weights_of_the_next_token, _heads_swapped, _last_columns_left_out,
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__.strip("_"))
def test_planted_faults_are_refused(fault: Any, dtype: Any) -> None:
    inputs = indexer_logits.make_inputs(WIDE, seed=4)
    references = indexer_logits.reference(WIDE, *inputs)
    wrong = [x.clone() for x in inputs]
    fault(wrong)
    assert not judged(indexer_logits.reference(WIDE, *wrong)[0], references, dtype)


def test_logits_in_float32_are_held_to_more_than_bf16() -> None:
    inputs = indexer_logits.make_inputs(WIDE, seed=4)
    references = indexer_logits.reference(WIDE, *inputs)
    assert not judged(references[0].bfloat16().double(), references, torch.float32)
    rounded = [x.clone() for x in inputs]
    _scales_in_bf16(rounded)
    assert not judged(indexer_logits.reference(WIDE, *rounded)[0], references, torch.float32)


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        (IndexerLogitsProblem, {"heads": 0}, "problem.heads = 0 is too small"),
        (IndexerLogitsProblem, {"table": 1}, "problem.table = 1 is not a boolean"),
        (IndexerLogitsProblem, {"lengths": "odd"}, "problem.lengths = 'odd' is unknown"),
        (IndexerTopkProblem, {"dtype": "bf16"}, "logits are compared in fp32"),
        (TopkProblem, {"topk": 0}, "problem.topk = 0 is too small"),
        (TopkProblem, {"dtype": "fp8"}, "problem.dtype = 'fp8' is unknown"),
    ],
)
def test_problems_that_make_no_sense_are_refused(kind: Any, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said.replace(".", r"\.")):
        kind(**fields)


def test_problems_have_names_that_tell_them_apart() -> None:
    problems = [
        PAGED, PREFILL, PAGED.replace(dtype="bf16"), PAGED.replace(lengths="uniform"), TopkProblem(),
        TopkProblem(topk=512), TopkProblem(table=True), TopkProblem(lengths="ragged"), IndexerTopkProblem(),
        IndexerTopkProblem(topk=512),
    ]  # fmt: skip
    names = [naming.cell_name(p) for p in problems]
    assert len(set(names)) == len(names)
    assert naming.words(PAGED) == (
        "4 requests of 2 query tokens and 130 cached tokens, 16 heads, lengths ragged, logits in fp32"
    )
    assert naming.words(TopkProblem(table=True)) == "2048 of 65536 logits in 64 rows, fp32, through a page table"
    for problem in problems:
        assert type(problem).from_record(problem.to_record()) == problem
