"""Prefill: its inputs, its oracle against torch's attention, and a check that tells right kernels from wrong ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mla_var3 import workload as workloads
from mla_var3.check.judge import check, compare
from mla_var3.device import Requirement
from mla_var3.errors import UserError
from mla_var3.workload import decode
from mla_var3.workload.decode import MlaProblem
from mla_var3.workload.prefill import (
    CASES,
    LENGTH_NAMES,
    WORKLOAD,
    PrefillProblem,
    bounds,
    make_inputs,
    prefill_reference,
)
from torch_plan import TorchPlan

PROBLEM = PrefillProblem(b=2, s=70, h=2, causal=True)


class OraclePlan(TorchPlan):
    """The oracle as a kernel; subclasses spoil it."""

    workload = WORKLOAD
    requires = Requirement(archs=(), options=("strided_kv", "grouped"))

    def compute(self, *inputs: Any) -> tuple[Any, ...]:
        return prefill_reference(*inputs, scale=self.problem.scale, causal=self.problem.causal)

    def plan(self, *inputs: Any) -> Any:
        q, _, v, *_ = inputs
        out = q.new_empty((*q.shape[:2], v.shape[2]))
        lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
        return self.kernel(self.compute, inputs, (out, lse))


def test_shapes_and_seeds() -> None:
    q, k, v, of_q, of_k = make_inputs(PROBLEM, seed=4)
    assert q.shape == k.shape == (140, 2, 192) and v.shape == (140, 2, 128) and q.dtype == torch.bfloat16
    assert of_q.tolist() == of_k.tolist() == [0, 70, 140] and of_q.dtype == torch.int32
    again = make_inputs(PROBLEM, seed=4)
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), again, strict=False))
    small = make_inputs(PROBLEM, dist="flashmla")[0]
    assert small.abs().max() <= 1 and small.float().std() < 0.2
    assert not torch.equal(q, make_inputs(PROBLEM, seed=5)[0])


def test_what_lies_behind_the_tokens_in_memory_is_nan() -> None:
    for x in make_inputs(PROBLEM)[:3]:
        held = torch.as_strided(x, (x.numel() + 64 * x.stride(0),), (1,), 0)
        assert held[: x.numel()].isfinite().all() and held[x.numel() :].isnan().all()


def test_strided_keys_and_values_are_views_of_one_tensor() -> None:
    _, k, v, *_ = make_inputs(PROBLEM.replace(strided_kv=True, h=4, h_kv=2))
    assert k.shape == (140, 2, 192) and v.shape == (140, 2, 128)
    assert k.stride() == v.stride() == (640, 320, 1) and v.data_ptr() - k.data_ptr() == 2 * 192


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("h_kv", [1, 2])
def test_the_oracle_agrees_with_torch(causal: bool, h_kv: int) -> None:
    problem = PROBLEM.replace(causal=causal, dtype="fp32", h_kv=h_kv)
    inputs = make_inputs(problem, seed=1)
    out, lse = prefill_reference(*inputs, scale=problem.scale, causal=causal)
    assert out.dtype == lse.dtype == torch.float64
    q, k, v = (x.unflatten(0, (2, 70)).transpose(1, 2).double() for x in inputs[:3])
    k, v = (x.repeat_interleave(2 // h_kv, dim=1) for x in (k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=problem.scale)
    torch.testing.assert_close(out, expected.transpose(1, 2).flatten(0, 1), rtol=1e-12, atol=1e-12)
    logits = q @ k.transpose(2, 3) * problem.scale
    if causal:
        logits.masked_fill_(torch.ones(70, 70, dtype=torch.bool).triu(1), float("-inf"))
    torch.testing.assert_close(lse, logits.logsumexp(-1).transpose(0, 1).flatten(1), rtol=1e-12, atol=1e-12)


def test_the_oracle_of_chunks_is_the_end_of_whole_prompts() -> None:
    """Queries of a chunk are the last ones of a prompt that is as long as its keys."""
    whole = PrefillProblem(h=2, b=3, causal=True, lengths=(70, 33, 5), dtype="fp32")
    q, k, v, offsets, _ = make_inputs(whole, seed=3)
    want, want_lse = prefill_reference(q, k, v, offsets, offsets, scale=0.1, causal=True)
    kept = [*range(60, 70), *range(70, 103), *range(107, 108)]
    of_chunks = torch.tensor([0, 10, 43, 44], dtype=torch.int32)
    out, lse = prefill_reference(q[kept], k, v, of_chunks, offsets, scale=0.1, causal=True)
    torch.testing.assert_close(out, want[kept], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, want_lse[:, kept], rtol=1e-12, atol=1e-12)


def test_queries_that_see_no_key_and_rows_behind_the_last_request() -> None:
    problem = PrefillProblem(h=2, b=3, causal=True, lengths=((3, 0), (5, 2), (0, 4)))
    q, k, v, of_q, of_k = make_inputs(problem)
    longer = torch.cat([q, q.new_full((2, *q.shape[1:]), float("nan"))])
    out, lse = prefill_reference(longer, k, v, of_q, of_k, scale=1.0, causal=True)
    assert (out[:6] == 0).all() and (lse[:, :6] == float("-inf")).all()
    assert out[6:8].isfinite().all() and lse[:, 6:8].isfinite().all()
    assert out[8:].isnan().all() and lse[:, 8:].isnan().all()


# ---------------------------------------------------------------- lengths
@pytest.mark.parametrize("name", LENGTH_NAMES)
@pytest.mark.parametrize("t", [1000, 4000, 300])
def test_drawn_lengths_have_the_means_that_the_problem_says(name: str, t: int) -> None:
    problem = PrefillProblem(b=13, s=1000, t=t, lengths={"name": name, "seed": 5})
    queries, keys = zip(*problem.pairs, strict=True)
    assert sum(queries) == problem.query_tokens == 13_000 and sum(keys) == problem.keys == 13 * t
    assert min(queries) >= 0 and min(keys) >= 0
    if t == 1000:
        assert queries == keys
    if t == 4000:
        assert all(k >= q for q, k in problem.pairs) and all(k == 0 for q, k in problem.pairs if q == 0)
    assert problem.longest == (max(queries), max(keys))
    assert problem == PrefillProblem.from_record(problem.to_record())
    if name not in ("uniform",):
        assert len(set(queries)) > 3 and problem.pairs != problem.replace(lengths={"name": name, "seed": 6}).pairs


def test_lengths_may_be_a_list_or_a_total() -> None:
    problem = PrefillProblem(b=3, lengths=[(5, 9), 7, (0, 3)])
    assert problem.pairs == ((5, 9), (7, 7), (0, 3)) and (problem.s, problem.t) == (4, 7)
    assert (problem.query_tokens, problem.keys) == (12, 19) and problem.label == "b3_s4_h128_t7_list"
    assert PrefillProblem(b=1, s=8, d=256, p=0).label == "b1_s8_h128_t8_d256_p0"
    assert PrefillProblem.from_record(problem.to_record()) == problem == problem.replace()
    assert problem.replace(s=64).uniform and problem.replace(s=64, h=16).s == 64
    known = PrefillProblem(b=3, lengths={"queries": 11, "keys": 3})
    assert sum(q for q, _ in known.pairs) == 11 and known.keys == 3 and known.to_record()["lengths"]["queries"] == 11
    assert PrefillProblem.from_record(known.to_record()) == known


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"h": 6, "h_kv": 4}, "h = 6 is not a multiple of h_kv = 4"),
        ({"lengths": "normul"}, "did you mean 'normal'"),
        ({"lengths": "edges"}, "lengths name 'edges' is unknown"),
        ({"b": 2, "lengths": [3]}, "1 entries for b = 2"),
        ({"lengths": [(1, 2, 3)]}, "nor a pair of them"),
        ({"lengths": [-1]}, "neither a whole number of at least 0"),
        ({"lengths": {"seed": 3}}, "needs the fields name and seed"),
        ({"lengths": {"queries": 3, "keys": -1}}, "lengths.keys = -1 is too small"),
        ({"lengths": 3}, "is neither a name"),
        ({"strided_kv": 1}, "strided_kv = 1 is not a boolean"),
    ],
)
def test_fields_that_make_no_sense_are_named(fields: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError, match=word):
        PrefillProblem(**fields)


def test_the_record_of_a_whole_prompt_is_what_it_was() -> None:
    record = PrefillProblem(b=2, s=70, h=16, causal=True).to_record()
    assert record == {
        "workload": "prefill", "b": 2, "s": 70, "h": 16, "p": 64, "d": 128, "causal": True, "dtype": "bf16",
    }  # fmt: skip
    chunk = PrefillProblem(b=2, s=70, t=90, h=16, h_kv=2, lengths="normal", strided_kv=True)
    assert PrefillProblem.from_record(chunk.to_record()) == chunk
    assert chunk.label == "b2_s70_h16_t90_kv2_normal_strided"


def test_the_cost_is_that_of_decompressed_heads() -> None:
    flops, bytes_ = OraclePlan(PROBLEM).algorithmic_flops_bytes()
    pairs = 70 * 71 // 2
    assert flops == 2 * 2 * 2 * pairs * (192 + 128)
    assert bytes_ == sum(x.nbytes for x in make_inputs(PROBLEM)[:3]) + 2 * 140 * 2 * 128


@pytest.mark.parametrize("causal", [True, False])
def test_pairs_are_counted_as_the_mask_says(causal: bool) -> None:
    lengths = ((3, 7), (5, 5), (4, 0), (0, 6), (6, 2))
    problem = PrefillProblem(h=4, h_kv=2, b=5, causal=causal, lengths=lengths)
    seen = sum(not causal or j <= t - s + i for s, t in lengths for i in range(s) for j in range(t))
    assert problem.cost().pairs == seen and problem.cost().flops == seen * 2 * (192 + 128) * 4
    # q and out of 18 tokens; k and v of all requests but the fourth, which asks for nothing.
    assert problem.cost().bytes == 2 * (18 * 4 + 14 * 2) * (192 + 128)
    assert problem.replace(lengths="uniform", b=1, s=6, t=2).cost().pairs == (3 if causal else 12)


def test_fields_of_decode_in_old_records() -> None:
    with pytest.raises(UserError, match="no latents"):
        PrefillProblem.from_record({"s": 70, "n": 5})
    old = {"s": 70, "t": 70, "h": 16, "h_kv": 1, "k": 512, "page": 64, "n": 0, "lengths": "uniform"}
    assert PrefillProblem.from_record(old) == PrefillProblem(s=70, h=16)
    assert PrefillProblem.from_record({"s": 70, "h": 16, "h_kv": 1}).grouped


def test_a_decode_problem_is_none_that_the_version_takes() -> None:
    plan = OraclePlan(MlaProblem(b=2, s=70, t=70, h=2))
    assert plan.supported().reason == "the kernel computes prefill; the problem is one of decode"


def test_unknown_distributions_and_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(UserError, match="did you mean 'normal'"):
        make_inputs(PROBLEM, dist="norml")
    q, k, v, *offsets = make_inputs(PROBLEM)
    with pytest.raises(UserError, match="prefill wants k"):
        prefill_reference(q, k[:, 1:], v, *offsets, scale=1.0, causal=False)


def test_the_check_passes_the_oracle_in_every_case() -> None:
    report = check(OraclePlan, PROBLEM, device="cpu", seeds=[2])
    assert report.ok, report.reason
    assert {c.name for c in report.cases} == set(CASES) and report.error["out"] < 1e-2
    assert check(OraclePlan, PROBLEM, device="cpu", quick=True).ok


def test_the_check_takes_chunks_and_unequal_prompts_as_the_problem() -> None:
    for problem in (
        PROBLEM.replace(t=90, lengths="normal"),
        PROBLEM.replace(b=3, lengths=((5, 9), 7, (0, 3)), h_kv=1, causal=False),
    ):
        report = check(OraclePlan, problem, device="cpu", quick=True, seeds=[1])
        assert report.ok, report.reason


class NotCausal(OraclePlan):
    def compute(self, *inputs: Any) -> tuple[Any, ...]:
        return prefill_reference(*inputs, scale=self.problem.scale, causal=False)


class WrongScale(OraclePlan):
    def compute(self, *inputs: Any) -> tuple[Any, ...]:
        return prefill_reference(*inputs, scale=128**-0.5, causal=self.problem.causal)


class ChangesInputs(OraclePlan):
    def compute(self, *inputs: Any) -> tuple[Any, ...]:
        result = super().compute(*inputs)
        inputs[0].mul_(2)
        return result


class LeavesRows(OraclePlan):
    def plan(self, *inputs: Any) -> Any:
        kernel = super().plan(*inputs)
        kernel.launch = lambda: None  # type: ignore[method-assign]
        return kernel


class AlignedAtTheStart(OraclePlan):
    """The causal mask of torch's attention, which ends where queries do."""

    def compute(self, *inputs: Any) -> tuple[Any, ...]:
        q, k, v, of_q, of_k = inputs
        seen = torch.minimum(of_q.diff(), of_k.diff())
        kept = torch.cat([begin + torch.arange(n) for begin, n in zip(of_k.tolist(), seen.tolist(), strict=False)])
        ends = torch.cat([of_k[:1], seen.cumsum(0)])
        return prefill_reference(q, k[kept], v[kept], of_q, ends, scale=self.problem.scale, causal=True)


class WritesBehind(OraclePlan):
    def compute(self, *inputs: Any) -> tuple[Any, ...]:
        out, lse = super().compute(*inputs)
        end = int(inputs[3][-1])
        out[end:] = 0.0
        return out, lse


class PlansLengths(OraclePlan):
    def plan(self, *inputs: Any) -> Any:
        kept = [x.clone() for x in inputs[3:]]
        kernel = super().plan(*inputs)
        kernel.fn = lambda q, k, v, *_: self.compute(q, k, v, *kept)
        return kernel


class WholeTiles(OraclePlan):
    """Multiplies the next request's values with probabilities of 0, as a kernel that masks scores alone does."""

    def compute(self, *inputs: Any) -> tuple[Any, ...]:
        _, _, v, of_q, of_k = inputs
        out, lse = super().compute(*inputs)
        for begin, end, last in zip(of_q.tolist(), of_q.tolist()[1:], of_k.tolist()[1:], strict=False):
            if end > begin and last < len(v):
                out[begin:end] += 0.0 * v[last].double().repeat_interleave(self.problem.h // self.problem.h_kv, 0)
        return out, lse


@pytest.mark.parametrize(
    ("plan", "case"),
    [
        (AlignedAtTheStart, "chunks"),
        (WritesBehind, "behind"),
        (PlansLengths, "in_place"),
        (WholeTiles, "behind"),
        (WholeTiles, "neighbours"),
    ],
)
def test_each_hostile_case_finds_what_it_is_for(plan: type[OraclePlan], case: str) -> None:
    report = check(plan, PROBLEM, device="cpu", cases=[case], seeds=[1])
    assert not report.ok and case in report.reason
    assert check(plan, PROBLEM, device="cpu", cases=["own", "edges"], seeds=[1]).ok


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (NotCausal, "beyond the bounds"),
        (WrongScale, "beyond the bounds"),
        (ChangesInputs, "changed its inputs"),
        (LeavesRows, "not finite"),
    ],
)
def test_the_check_finds_what_is_wrong(plan: type[OraclePlan], words: str) -> None:
    report = check(plan, PROBLEM, device="cpu", quick=True, seeds=[1])
    assert not report.ok and words in report.reason


# ---------------------------------------------------------------- rows of few columns
def test_the_bound_of_a_row_depends_on_columns_below_128_alone() -> None:
    of_row = bounds("flashmla")["out"].of_row
    assert [of_row(columns) for columns in (128, 192, 256, 512)] == [5e-6] * 4
    assert of_row(64) == pytest.approx(7.2e-6, rel=5e-3) and of_row(96) == pytest.approx(5.7e-6, rel=1e-2)
    for dist in ("normal", "nan", "extremes", "neighbours"):
        assert bounds(dist) == decode.bounds_for(dist) and bounds(dist)["out"].of_row(64) == 1.1e-5
    for other in ("decode", "mixed", "sparse_decode", "chunked_prefill", "rope", "norm", "merge", "gemm"):
        assert workloads.get(other).bounds("flashmla")[workloads.get(other).outputs[0].name].row_mean == 0.0


def _differences(columns: int, rows: int, of_p: float) -> torch.Tensor:
    """Cosine differences of rows of many keys, with the errors that the derivation of the bound has: P's, as
    independent of the row as random values are, and the rounding of the row itself."""
    draw, found = torch.Generator().manual_seed(columns), []
    for _ in range(rows >> 13):
        row = torch.randn(1 << 13, columns, generator=draw)
        out = torch.randn(1 << 13, columns, generator=draw).mul_(of_p).add_(row).bfloat16().float()
        found.append((out - row).square_().sum(1) / (out.square_().sum(1) + row.square_().sum(1)))
    return torch.cat(found)


@pytest.mark.parametrize(("columns", "rows"), [(64, 1 << 20), (128, 1 << 19)])
def test_the_worst_of_a_million_rounded_rows_is_within_the_bound_and_near_it(columns: int, rows: int) -> None:
    found = _differences(columns, rows, 2**-8 / 12**0.5 / 0.96)
    mean, bound = float(found.mean()), bounds("flashmla")["out"].of_row(columns)
    assert mean == pytest.approx(decode.ROW_MEAN, rel=0.015)
    assert float(found.std()) / mean == pytest.approx((2.8 / columns) ** 0.5, rel=0.03)
    assert 0.65 * bound < float(found.max()) < 0.85 * bound


@pytest.mark.parametrize("columns", [64, 128])
def test_a_maximum_from_a_few_keys_is_refused_with_few_columns_too(columns: int) -> None:
    """Most of P is then just above 1, where bf16's steps are twice as large."""
    assert float(_differences(columns, 1 << 14, 2**-8 / 3**0.5).max()) > bounds("flashmla")["out"].of_row(columns)


def _tiled(inputs: tuple[Any, ...], scale: float, mistake: str = "") -> tuple[Any, Any]:
    """Out and lse of one causal prompt as a kernel computes them: KV tiles of 64 keys, P in bf16 relative to the
    maximum so far, sums in float32, out in bf16; or with one mistake."""
    q, k, v = (x.transpose(0, 1).float() for x in inputs[:3])
    s = q.shape[1]
    logits = (q @ k.transpose(1, 2)) * scale
    logits.masked_fill_(torch.ones(s, s, dtype=torch.bool).triu(1 + (mistake == "mask")), float("-inf"))
    top = torch.full((len(q), s, 1), float("-inf"))
    total, out = torch.zeros(len(q), s, 1), torch.zeros(v.shape)
    for begin in reversed(range(0, s, 64)):  # from the diagonal on, as kernels go
        part = logits[..., begin : begin + 64]
        new = torch.maximum(top, part.amax(-1, keepdim=True))
        at = new.masked_fill(new.isinf(), 0.0)
        p = (part - at).exp()
        step = (top - at).exp()
        total = total * step + p.sum(-1, keepdim=True)
        if mistake != "rescale" or begin != 64:
            out *= step
        rounded = p.to(torch.float8_e4m3fn) if mistake == "fp8" else p.bfloat16()
        out += rounded.float() @ v[:, begin : begin + 64]
        top = new
    return (out / total).bfloat16().transpose(0, 1), (top + total.log()).squeeze(-1)


@pytest.mark.parametrize("widths", [{"d": 64, "p": 32}, {"d": 128, "p": 64}])
@pytest.mark.parametrize("mistake", ["", "rescale", "mask", "fp8"])
def test_a_kernels_roundings_pass_and_mistakes_do_not(widths: dict[str, int], mistake: str) -> None:
    problem = PrefillProblem(b=1, s=512, h=16, causal=True, **widths)
    inputs = make_inputs(problem, seed=2, dist="flashmla")
    want = prefill_reference(*inputs, scale=problem.scale, causal=True)
    found = compare(WORKLOAD, _tiled(inputs, problem.scale, mistake), want, bounds("flashmla"))
    if mistake:
        assert not found.ok and found.reason.startswith("out")
    else:
        assert found.ok, found.reason
        assert found.outputs["out"].row_cos < 0.8 * bounds("flashmla")["out"].of_row(problem.d)


def test_binding() -> None:
    inputs = make_inputs(PROBLEM, seed=1)
    kernel = OraclePlan(PROBLEM).plan(*inputs)
    more = make_inputs(PROBLEM.replace(b=3, s=64), seed=2)
    assert kernel.bind(*more).output_tensors[0].shape == (192, 2, 128)
    assert WORKLOAD.rebound(PROBLEM, *more) == PROBLEM.replace(b=3, s=64)
    for problem, words in (
        (PROBLEM.replace(h=4), r"q is \(140, 4, 192\)"),
        (PROBLEM.replace(h_kv=1), r"k is \(140, 1, 192\)"),
        (PROBLEM.replace(d=64), r"q is \(140, 2, 128\)"),
    ):
        with pytest.raises(UserError, match=f"cannot bind: {words}"):
            kernel.bind(*make_inputs(problem, seed=2))
    with pytest.raises(UserError, match="planned for bf16"):
        kernel.bind(*(x.half() for x in inputs[:3]), *inputs[3:])
    with pytest.raises(UserError, match="5 inputs are wanted"):
        kernel.bind(*inputs[:3])
    with pytest.raises(UserError, match="one entry more"):
        kernel.bind(*inputs[:4], inputs[4][:-1])
    with pytest.raises(UserError, match="not 2 of these"):
        kernel.bind(inputs[0][:-1], *inputs[1:])


def test_binding_unequal_requests() -> None:
    problem = PROBLEM.replace(lengths=((40, 90), (7, 7)))
    inputs = make_inputs(problem, seed=1)
    bound = WORKLOAD.rebound(problem.replace(b=1, lengths=(9,)), *inputs)
    assert bound == WORKLOAD.as_bound(problem) and bound.lengths == (("queries", 47), ("keys", 97))
    assert bound.problem_class() == problem.problem_class() == PROBLEM.problem_class()


def test_options_of_paged_inputs_are_passed_over() -> None:
    plan = OraclePlan(PROBLEM)
    assert torch.equal(
        plan.prepare_inputs("cpu", seed=3, dist="normal", spare_pages=2)[0], plan.prepare_inputs("cpu", seed=3)[0]
    )
