"""Sparse decode: the oracle against loops over bytes' values, inputs that are what they say, and a check that stops
mistakes."""

# ruff: noqa: E402 - the imports below need what importorskip found
from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from mla_var3.check.judge import check
from mla_var3.device import Requirement
from mla_var3.errors import UserError, Verdict
from mla_var3.packed_cache import LAYOUTS, fields, unpack
from mla_var3.runtime import KernelPlan, TorchKernel
from mla_var3.runtime.types import Tiling
from mla_var3.workload.sparse_decode import (
    CASES,
    DISTRIBUTIONS,
    QUANTISED,
    WORKLOAD,
    SparseProblem,
    draw,
    input_names,
    make_inputs,
    named,
    new_outputs,
    reference,
)

V32 = SparseProblem(b=2, s=2, h=3, t=70, topk=20, page=16)
V4 = V32.replace(layout="v4", lengths=True, sink=True, extra=9, extra_t=30, extra_page=5, extra_lengths=True)
FLAT, BF16 = V32.replace(layout="flat", sink=True), V32.replace(layout="bf16", lengths=True)
ALL = [V32, V4, FLAT, BF16]
DENSE = [
    SparseProblem(b=5, s=3, h=3, t=70, page=7, lengths=True, paged=True),
    SparseProblem(b=4, h=3, t=70, page=16, lengths=True, sink=True, layout="v4", paged=True),
    SparseProblem(b=2, s=2, h=3, t=33, page=1, layout="flat", paged=True),
]
EVERYWHERE = [name for name in CASES if name not in ("many", "far")]


def cases_of(problem: SparseProblem) -> list[str]:
    lacking = {"bf16": ("scales", "codes", "subnormal"), "flat": ("extra",)}.get(problem.layout, ())
    lacking += ("holes", "none", "duplicates", "extra") if problem.paged else ()
    return [name for name in EVERYWHERE if name not in lacking]


# ---------------------------------------------------------------- the oracle
def by_hand(problem: SparseProblem, *inputs: Any) -> tuple[Any, Any]:
    """Token by token, from the whole unpacked cache."""
    given = named(problem, *inputs)
    scale = given.get("scale")
    caches = {
        prefix: unpack(problem.cache, given[f"{prefix}cache"], scale).flatten(0, 1)
        for prefix in ("", "extra_")[: 1 + bool(problem.extra)]
    }
    b, s, h = problem.b, problem.s, problem.h
    out, lse = torch.zeros((b, s, h, 512), dtype=torch.float64), torch.zeros((b, h, s), dtype=torch.float64)
    for i in range(b):
        for j in range(s):
            keys = []
            for prefix, cache in caches.items():
                indices = given[f"{prefix}indices"][i, j].tolist()
                if f"{prefix}lengths" in given:
                    indices = indices[: int(given[f"{prefix}lengths"][i])]
                keys += [cache[x] for x in indices if 0 <= x < len(cache)]
            for head in range(h):
                weights = [math.exp(float(given["q"][i, j, head].double() @ key) * problem.scale) for key in keys]
                lse[i, head, j] = math.log(sum(weights)) if keys else math.inf
                total = sum(weights) + (math.exp(float(given["sink"][head])) if problem.sink else 0.0)
                for weight, key in zip(weights, keys, strict=True):
                    out[i, j, head] += weight / total * key[:512]
    return out, lse


@pytest.mark.parametrize("dist", ["flashmla", "holes", "empty", "duplicates"])
@pytest.mark.parametrize("problem", ALL, ids=lambda p: p.layout)
def test_the_oracle_is_what_is_written_down(problem: SparseProblem, dist: str) -> None:
    inputs = make_inputs(problem, seed=3, dist=dist)
    found, wanted = reference(problem, *inputs), by_hand(problem, *inputs)
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-9, atol=1e-12)
    assert bool(found[0].isfinite().all()) and not bool(found[1].isnan().any())


def with_indices(problem: SparseProblem, *inputs: Any) -> tuple[SparseProblem, tuple[Any, ...]]:
    """The same attention by indices: those of each query token, read off the page table one by one."""
    given = named(problem, *inputs)
    b, s, width = problem.b, problem.s, given["page_table"].shape[1] * problem.page
    indices = torch.full((b, s, width), -1, dtype=torch.int32)
    for i, length in enumerate(given["seq_lens"].tolist()):
        for token in range(s):
            for position in range(max(0, length - (s - 1 - token))):
                page = int(given["page_table"][i, position // problem.page])
                indices[i, token, position] = page * problem.page + position % problem.page
    sparse = problem.replace(paged=False, topk=width, lengths=False)
    given["indices"] = indices
    return sparse, tuple(given[name] for name in input_names(sparse))


@pytest.mark.parametrize("dist", ["flashmla", "empty", "last", "unseen"])
@pytest.mark.parametrize("problem", DENSE, ids=lambda p: p.layout)
def test_a_page_table_says_what_indices_would(problem: SparseProblem, dist: str) -> None:
    inputs = make_inputs(problem, seed=3, dist=dist)
    sparse, same = with_indices(problem, *inputs)
    found, wanted = reference(problem, *inputs), by_hand(sparse, *same)
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-9, atol=1e-12)
    assert bool(found[0].isfinite().all()) and not bool(found[1].isnan().any())


def test_a_page_that_a_request_needs_must_be_in_the_cache() -> None:
    problem = DENSE[2]
    q, cache, table, lens, scale = make_inputs(problem)
    with pytest.raises(UserError, match="names page 66 of a cache of 66"):
        reference(problem, q, cache, torch.where(table == table[0, 0], 66, table), lens, scale)


def test_sinks_divide_out_and_leave_lse() -> None:
    plain, sunk = V32, V32.replace(sink=True)
    inputs = make_inputs(plain, seed=3)
    out, lse = reference(plain, *inputs)
    sink = torch.tensor([math.inf, -math.inf, 1.5])
    divided, same = reference(sunk, *inputs, sink)
    assert torch.equal(lse, same)
    assert not bool(divided[:, :, 0].any()) and torch.equal(divided[:, :, 1], out[:, :, 1])
    factor = 1 / (1 + torch.exp(1.5 - lse[:, 2]))
    torch.testing.assert_close(divided[:, :, 2], out[:, :, 2] * factor[..., None])


def test_no_token_gives_zeros_and_an_infinite_lse() -> None:
    for problem in ALL:
        out, lse = reference(problem, *make_inputs(problem, dist="none"))
        assert not bool(out.any()) and bool((lse == math.inf).all())


def test_negative_lengths_are_none() -> None:
    given = list(make_inputs(BF16, seed=1))
    given[3] = torch.tensor([-4, 2], dtype=torch.int32)
    _, lse = reference(BF16, *given)
    assert bool((lse[0] == math.inf).all()) and bool(lse[1].isfinite().all())


# ---------------------------------------------------------------- inputs
@pytest.mark.parametrize("problem", ALL, ids=lambda p: p.layout)
def test_what_nobody_attends_to_is_nan_and_what_is_attended_to_is_not(problem: SparseProblem) -> None:
    inputs = make_inputs(problem, seed=5, dist="holes")
    given = named(problem, *inputs)
    for part in problem.parts:
        cache, indices = given[f"{part.prefix}cache"], given[f"{part.prefix}indices"]
        assert indices.shape == (2, 2, part.topk) and cache.shape[:2] == (part.pages, part.page)
        values = unpack(problem.cache, cache, given.get("scale")).flatten(0, 1)
        counts = torch.arange(part.topk) < torch.tensor(part.lens)[:, None, None]
        named_ones = (indices >= 0) & (indices < len(values))
        seen = torch.zeros(len(values), dtype=torch.bool)
        seen[indices[named_ones & counts].long()] = True
        assert bool(values[seen].isfinite().all()) and bool(values[~seen].isnan().all())
        assert 0.5 < float(named_ones.double().mean()) < 0.85
        outside = indices[~named_ones]
        assert int(outside.min()) == -(2**31) and int(outside.max()) == 2**31 - 1
        views = fields(problem.cache, cache)
        if part.prefix == "" and views.scales is not None:
            assert bool((views.scales.reshape(-1, views.scales.shape[-1])[~seen].float() != 0).all())
    mild = named(problem, *make_inputs(problem, seed=5, dist="holes", poison=False, garbage=False))
    assert bool(unpack(problem.cache, mild["cache"], mild.get("scale")).isfinite().all())
    assert int(mild["indices"].min()) == -1 and int(mild["indices"].max()) < problem.parts[0].tokens


@pytest.mark.parametrize("problem", DENSE, ids=lambda p: p.layout)
def test_what_lies_behind_a_request_s_last_token_is_nan(problem: SparseProblem) -> None:
    given = named(problem, *make_inputs(problem, seed=5))
    cache, table, lens = given["cache"], given["page_table"], given["seq_lens"].tolist()
    assert tuple(lens) == problem.parts[0].lens and max(lens) <= problem.t
    values = unpack(problem.cache, cache, given.get("scale"))
    pages = set()
    for i, length in enumerate(lens):
        used = -(-length // problem.page)
        mine = values[table[i, :used].long()].flatten(0, 1)
        assert bool(mine[:length].isfinite().all()) and bool(mine[length:].isnan().all())
        assert bool(((table[i, used:] < 0) | (table[i, used:] >= len(cache))).all())
        pages |= set(table[i, :used].tolist())
    assert len(pages) == sum(-(-length // problem.page) for length in lens)  # nobody shares one
    others = [page for page in range(len(cache)) if page not in pages]
    assert bool(values[others].isnan().all())
    for dist in ("holes", "none", "duplicates"):
        with pytest.raises(UserError, match="a page table has none"):
            make_inputs(problem, dist=dist)


def test_query_tokens_choose_different_tokens_of_their_own_request() -> None:
    problem = V32.replace(b=3, t=64, topk=64)
    indices = named(problem, *make_inputs(problem))["indices"]
    for i in range(3):
        first, second = (sorted(indices[i, j].tolist()) for j in range(2))
        assert first == second and len(set(first)) == 64
    pages = [set((indices[i] // 16).flatten().tolist()) for i in range(3)]
    assert not (pages[0] & pages[1] or pages[0] & pages[2] or pages[1] & pages[2])
    short = named(V32.replace(t=7), *make_inputs(V32.replace(t=7), garbage=False))["indices"]
    assert bool(((short >= 0).sum(-1) == 7).all())


def test_scales_codes_and_subnormals() -> None:
    between = fields(LAYOUTS["v32"], named(V32, *make_inputs(V32, dist="scales", poison=False))["cache"]).scales
    assert bool((torch.frexp(between)[0] > 0.5).all())
    assert bool((torch.frexp(between.bfloat16().float())[0] == 0.5).all())  # rounded, they are off by the most
    many = fields(LAYOUTS["v4"], named(V4, *make_inputs(V4, dist="scales", poison=False))["cache"]).scales
    assert len(set(many.flatten().tolist())) > 10
    for problem in (V32, V4, FLAT):
        codes = fields(problem.cache, named(problem, *make_inputs(problem, dist="codes", poison=False))["cache"]).codes
        assert set(codes.flatten().tolist()) == set(range(256)) - {0x7F, 0xFF}
        small = named(problem, *make_inputs(problem, dist="subnormal", poison=False))
        codes = fields(problem.cache, small["cache"]).codes
        assert set(codes.flatten().tolist()) == {*range(8), *range(128, 136)}
        values = unpack(problem.cache, small["cache"], small.get("scale"))
        assert 0.03 < float(values[..., :448].square().mean().sqrt()) < 0.2
    with pytest.raises(UserError, match="bf16 has none"):
        make_inputs(BF16, dist="codes")


# ---------------------------------------------------------------- the check
def plan_of(compute: Callable[..., tuple[Any, ...]]) -> type[KernelPlan]:
    """A kernel of torch operations."""

    @dataclass(frozen=True)
    class NoTiling(Tiling):
        def validate(self, pd: Any, device: Any = None) -> Verdict:
            return Verdict.yes()

    class Plan(KernelPlan):
        workload = WORKLOAD
        tiling_type = NoTiling
        requires = Requirement(archs=(), options=("paged",))

        def default_tiling(self) -> Tiling:
            return NoTiling()

        def autotune_configs(self) -> list[Tiling]:
            return []

        def plan(self, *inputs: Any) -> TorchKernel:
            outputs = new_outputs(self.problem, inputs[0])
            run = lambda *given: compute(self.problem, *given)  # noqa: E731
            return TorchKernel(run, name="x", input_tensors=inputs, output_tensors=outputs, plan=self)

        def plan_empty(self) -> TorchKernel:
            return TorchKernel(lambda *given: given, name="x", plan=self)

    return Plan


def sixteen_bit(scales_too: bool) -> Callable[..., tuple[Any, ...]]:
    """What a kernel for tensor cores does at least: keys and P rounded to bf16, sums in float32; the scale of layout
    flat is a factor of both products. scales_too: scales are rounded before they multiply."""

    def compute(problem: SparseProblem, *inputs: Any) -> tuple[Any, Any]:
        given = named(problem, *inputs)
        out, lse = (x.float() for x in reference(problem, *inputs))
        factor = float(given["scale"]) if "scale" in given else 1.0
        for i in range(problem.b):
            for j in range(problem.s):
                keys = []
                for part in problem.parts:
                    cache, indices = given[f"{part.prefix}cache"], given[f"{part.prefix}indices"][i, j]
                    if f"{part.prefix}lengths" in given:
                        indices = indices[: int(given[f"{part.prefix}lengths"][i])]
                    indices = indices[(indices >= 0) & (indices < cache.shape[0] * cache.shape[1])].long()
                    views = fields(problem.cache, cache)
                    if scales_too and views.scales is not None and views.scales.dtype == torch.float32:
                        views.scales.copy_(views.scales.bfloat16().float())
                    keys.append(unpack(problem.cache, cache, torch.ones(1)).flatten(0, 1)[indices])
                k = torch.cat(keys).bfloat16().float()
                if not len(k):
                    continue
                logits = given["q"][i, j].float() @ k.t() * (problem.scale * factor)
                top = logits.amax(-1, keepdim=True)
                p = torch.exp(logits - top)
                total = p.sum(-1, keepdim=True)
                lse[i, :, j] = (top + total.log()).squeeze(-1)
                if problem.sink:
                    total = total + torch.exp(given["sink"][:, None] - top)
                out[i, j] = p.bfloat16().float() @ k[:, :512] * factor / total
        return out, lse

    def leaves_inputs(problem: SparseProblem, *inputs: Any) -> tuple[Any, Any]:
        if problem.paged:
            problem, inputs = with_indices(problem, *inputs)
        copies = [x.clone() if x.dim() != 3 or x.dtype == torch.int32 else _copied(x) for x in inputs]
        return compute(problem, *copies)

    return leaves_inputs


def _copied(cache: Any) -> Any:
    """A cache with the bytes between its pages."""
    memory = cache.as_strided((cache.untyped_storage().nbytes() // cache.element_size(),), (1,), 0).clone()
    return memory.as_strided(cache.shape, cache.stride(), cache.storage_offset())


@pytest.mark.parametrize("problem", [*ALL, *DENSE], ids=lambda p: p.problem_class().key())
def test_the_oracle_and_what_tensor_cores_compute_pass_every_case(problem: SparseProblem) -> None:
    for compute in (reference, sixteen_bit(scales_too=False)):
        report = check(plan_of(compute), problem.replace(h=8), device="cpu", cases=cases_of(problem), seeds=[4])
        assert report.ok, report.reason
        assert {c.name for c in report.cases} == set(cases_of(problem)) and set(report.error) == {"out", "lse"}


def test_scales_that_are_rounded_to_bf16_fail_where_they_are_no_powers_of_two() -> None:
    wrong = plan_of(sixteen_bit(scales_too=True))
    for seed in range(3):
        report = check(wrong, V32.replace(h=8), device="cpu", cases=["own", "scales"], seeds=[seed])
        assert [c.name for c in report.cases if not c.ok] == ["scales"] and "cosine" in report.reason


def ignoring(name: str) -> Callable[..., tuple[Any, ...]]:
    """The oracle on inputs of which one is replaced by what says nothing."""

    def compute(problem: SparseProblem, *inputs: Any) -> tuple[Any, ...]:
        given = named(problem, *inputs)
        if name.endswith("lengths"):
            given[name] = torch.full_like(given[name], 10**6)
        elif name == "sink":
            given[name] = torch.full_like(given[name], -math.inf)
        return reference(problem, *(given[x] for x in input_names(problem)))

    return compute


def without_the_last(problem: SparseProblem, *inputs: Any) -> tuple[Any, ...]:
    given = named(problem, *inputs)
    given["extra_indices"] = given["extra_indices"].clone()
    given["extra_indices"][..., -1] = -1
    given["extra_lengths"] = given["extra_lengths"] - 1
    return reference(problem, *(given[x] for x in input_names(problem)))


def garbage_is_token_0(problem: SparseProblem, *inputs: Any) -> tuple[Any, ...]:
    given = named(problem, *inputs)
    tokens = given["cache"].shape[0] * given["cache"].shape[1]
    inside = (given["indices"] >= 0) & (given["indices"] < tokens)
    given["indices"] = torch.where(inside, given["indices"], 0)
    return reference(problem, *(given[x] for x in input_names(problem)))


def zeros_for_none(problem: SparseProblem, *inputs: Any) -> tuple[Any, ...]:
    """A token of zeros stands where an index names none, and is not masked."""
    out, lse = reference(problem, *inputs)
    indices = named(problem, *inputs)["indices"]
    there = (indices >= 0) & (indices < problem.parts[0].tokens)
    weight = torch.log((~there).sum(-1).double()).unsqueeze(1)  # (b, 1, s)
    new = torch.logaddexp(lse.nan_to_num(posinf=-1e9), weight)
    return out * torch.exp(lse.nan_to_num(posinf=-1e9) - new).transpose(1, 2).unsqueeze(-1), new


def of_other_lengths(more: int) -> Callable[..., tuple[Any, ...]]:
    """The oracle on lengths that are off, within what the page table names."""

    def compute(problem: SparseProblem, *inputs: Any) -> tuple[Any, ...]:
        given = named(problem, *inputs)
        named_pages = (given["page_table"] >= 0) & (given["page_table"] < len(given["cache"]))
        most = named_pages.long().cumprod(-1).sum(-1) * problem.page
        given["seq_lens"] = torch.minimum(given["seq_lens"] + more, most).to(torch.int32)
        return reference(problem, *(given[x] for x in input_names(problem)))

    return compute


def not_causal(problem: SparseProblem, *inputs: Any) -> tuple[Any, ...]:
    """Every query token as if it were the last one."""
    given = named(problem, *inputs)
    found = []
    for token in range(problem.s):
        given["q"] = inputs[0][:, token : token + 1]
        found.append(reference(problem.replace(s=1), *(given[x] for x in input_names(problem))))
    return torch.cat([x for x, _ in found], dim=1), torch.cat([x for _, x in found], dim=2)


def pages_in_order(problem: SparseProblem, *inputs: Any) -> tuple[Any, ...]:
    given = named(problem, *inputs)
    given["page_table"] = torch.arange(given["page_table"].numel(), dtype=torch.int32).view_as(given["page_table"])
    return reference(problem, *(given[x] for x in input_names(problem)))


def lse_with_the_sink(problem: SparseProblem, *inputs: Any) -> tuple[Any, ...]:
    out, lse = reference(problem, *inputs)
    return out, torch.logaddexp(lse, named(problem, *inputs)["sink"].double()[None, :, None])


@pytest.mark.parametrize(
    ("compute", "problem", "case"),
    [
        (ignoring("lengths"), V4, "own"),
        (ignoring("extra_lengths"), V4, "own"),
        (ignoring("sink"), FLAT, "own"),
        (without_the_last, V4, "last"),
        (garbage_is_token_0, V32, "unseen"),
        (zeros_for_none, V32, "below_zero"),
        (lse_with_the_sink, FLAT, "own"),
        (of_other_lengths(-1), DENSE[1], "last"),
        (of_other_lengths(1), DENSE[1], "unseen"),
        (of_other_lengths(1), DENSE[1], "uneven"),
        (not_causal, DENSE[0], "last"),
        (pages_in_order, DENSE[2], "own"),
    ],
    ids=[
        "lengths",
        "extra-lengths",
        "sink",
        "last",
        "garbage",
        "zeros",
        "lse",
        "short",
        "long",
        "long-nan",
        "not-causal",
        "pages",
    ],
)
def test_wrong_kernels_fail(compute: Any, problem: SparseProblem, case: str) -> None:
    for seed in range(3):
        report = check(plan_of(compute), problem.replace(h=8), device="cpu", cases=[case], seeds=[seed])
        assert not report.ok


def test_every_distribution_is_of_some_case() -> None:
    used = {case.dist for problem in ALL for case in WORKLOAD.cases(problem, True)}
    assert used == set(DISTRIBUTIONS) and set(QUANTISED) <= used
    assert {case.name for problem in ALL for case in WORKLOAD.cases(problem, True)} == set(CASES)


# ---------------------------------------------------------------- the problem
def test_what_it_costs() -> None:
    """With one query token every chosen token is read once; with two, those that both choose count once."""
    one = SparseProblem(b=128, s=1).cost()
    assert one.pairs == 128 * 2048 and one.flops == 2 * 128 * 2048 * 128 * 1088
    rows = 128 * 128 * (576 + 512) * 2
    assert one.bytes == 128 * 2048 * 656 + rows
    two = SparseProblem(b=128, s=2).cost()
    assert two.flops == 2 * one.flops and two.bytes == 128 * round(4096 - 2048**2 / 32768) * 656 + 2 * rows
    v4 = SparseProblem(b=2, h=64, layout="v4", topk=128, extra=512, extra_page=64).cost()
    assert v4.flops == 2 * 2 * 640 * 64 * 1024 and v4.bytes == 2 * 640 * 584 + 2 * 64 * 1024 * 2
    short = SparseProblem(t=100).cost()
    assert short.pairs == 100
    dense = SparseProblem(b=2, s=3, h=16, t=100, paged=True).cost()
    assert dense.pairs == 2 * (100 + 99 + 98) and dense.flops == 2 * dense.pairs * 16 * 1088
    assert dense.bytes == 200 * 656 + 2 * 3 * 16 * 1088 * 2
    ragged = SparseProblem(b=9, s=4, t=5, lengths=True, paged=True)
    assert {0, 5} <= set(ragged.parts[0].lens)
    assert ragged.cost().pairs == sum(max(0, x - i) for x in ragged.parts[0].lens for i in range(4))
    lens = V4.parts[0].lens
    assert len(set(lens)) == 2 and max(lens) <= V4.topk
    assert V4.cost().pairs == 2 * (sum(lens) + sum(V4.parts[1].lens))


def test_a_problem_is_recorded_and_bound_as_it_is() -> None:
    for problem in [*ALL, *DENSE]:
        record = problem.to_record()
        assert record["workload"] == "sparse_decode" and SparseProblem.from_record(record) == problem
        assert record.get("paged", False) == problem.paged and record.get("paged") is not False
        inputs = make_inputs(problem)
        assert WORKLOAD.rebound(problem, *inputs) == WORKLOAD.as_bound(problem)
        assert len(problem.problem_class().key()) < 80
    assert len({problem.problem_class().key() for problem in [*ALL, V32.replace(sink=True), *DENSE]}) == 8
    assert DENSE[0].problem_class() == DENSE[0].replace(b=1, t=9, lengths=False).problem_class()
    assert DENSE[0].label == "v32_b5_s3_h3_t70"
    assert DENSE[2].input_bytes() == (
        66 * 576 + 4 * (66 + 2) + 2 * 2 * 3 * 576 * 2 + 2 * 2 * 3 * (1024 + 4)
    )  # fmt: skip
    assert V32.input_bytes() == (
        10 * 16 * 656 + 4 * 2 * 2 * 20 + 2 * 2 * 3 * 576 * 2 + 2 * 2 * 3 * (1024 + 4)
    )  # fmt: skip


def test_other_classes_do_not_bind() -> None:
    for given, words in (
        (V32.replace(h=4), "q is"),
        (V32.replace(page=8), "pages of 8"),
        (V32.replace(sink=True), "3 inputs are wanted"),
        (V32.replace(topk=0, paged=True), "3 inputs are wanted"),
    ):
        with pytest.raises(UserError, match=words):
            WORKLOAD.rebound(V32, *make_inputs(given))
    q, cache, table, lens = make_inputs(DENSE[0])
    for spoiled, words in (
        ((q, cache, table[:4], lens), r"page_table is \(4, 10\)"),
        ((q, cache, table, lens[:4]), "seq_lens is"),
        ((q, cache, table, lens.long()), "seq_lens is torch.int64"),
    ):
        with pytest.raises(UserError, match=words):
            WORKLOAD.rebound(DENSE[0], *spoiled)
    q, cache, indices = make_inputs(V32)
    for spoiled, words in (
        ((q, cache.float(), indices), "is torch.float32"),
        ((q, cache, indices.long()), "indices is torch.int64"),
        ((q[..., ::2], cache, indices), "q is"),
        ((q, cache, indices.transpose(0, 1)), "contiguous"),
    ):
        with pytest.raises(UserError, match=words):
            WORKLOAD.rebound(V32, *spoiled)


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"layout": "v3"}, "did you mean"), ({"topk": 0}, "topk"), ({"dtype": "fp16"}, "dtype"), ({"sink": 1}, "sink"),
     ({"extra": 4, "layout": "flat"}, "extra"), ({"extra_lengths": True}, "extra_lengths"), ({"extra": -1}, "extra"),
     ({"paged": True, "topk": 512}, "topk is a number of indices"), ({"paged": True, "extra": 4}, "extra is a number"),
     ({"paged": 1}, "paged"), ({"paged": True, "extra_lengths": True}, "extra_lengths")],
)  # fmt: skip
def test_problems_that_make_no_sense_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        SparseProblem(**fields)


def test_drawn_problems_make_sense() -> None:
    rng = random.Random(3)
    drawn = [SparseProblem(**draw(rng)) for _ in range(200)]
    assert {p.layout for p in drawn} == set(LAYOUTS) and any(p.extra_lengths for p in drawn)
    assert max(p.input_bytes() for p in drawn) < 16e9
