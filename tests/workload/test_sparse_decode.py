"""Sparse decode: the oracle against loops over bytes' values, inputs that are what they say, and a check that stops
mistakes."""

# ruff: noqa: E402 - the imports below need what importorskip found
from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from mla_var3.check.judge import check
from mla_var3.device import Requirement
from mla_var3.errors import UserError
from mla_var3.packed_cache import LAYOUTS, fields, unpack
from mla_var3.workload.decode import APART
from mla_var3.workload.sparse_decode import (
    CASES,
    CONTEXTS,
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
from torch_plan import TorchPlan

V32 = SparseProblem(b=2, s=2, h=3, t=70, topk=20, page=16)
V4 = V32.replace(layout="v4", lengths=True, sink=True, extra=9, extra_t=30, extra_page=5, extra_lengths=True)
FLAT, BF16 = V32.replace(layout="flat", sink=True), V32.replace(layout="bf16", lengths=True)
SERVED = [
    V32.replace(contexts="half_short:3", strided=True, b=4),
    V4.replace(contexts="uniform", missing="scattered:0.3", strided=True, b=3),
]
NEW = V32.replace(layout="v41", sink=True)
FP4 = V4.replace(layout="v41_planar", extra_layout="v41_fp4_planar", lengths=False, extra_lengths=False)
ALL = [V32, V4, FLAT, BF16, NEW, FP4]
DENSE = [
    SparseProblem(b=5, s=3, h=3, t=70, page=7, lengths=True, paged=True),
    SparseProblem(b=4, h=3, t=70, page=16, lengths=True, sink=True, layout="v4", paged=True),
    SparseProblem(b=2, s=2, h=3, t=33, page=1, layout="flat", paged=True),
]
EVERYWHERE = [name for name in CASES if name not in ("many", "far", "missing_nan")]


def cases_of(problem: SparseProblem) -> list[str]:
    lacking = {"bf16": ("scales", "codes", "subnormal"), "flat": ("extra",)}.get(problem.layout, ())
    of_indices = ("holes", "none", "duplicates", "tail", "tiles", "rows", "contexts", "extra")
    lacking += of_indices if problem.paged else ()
    return [name for name in EVERYWHERE if name not in lacking]


# ---------------------------------------------------------------- the oracle
def by_hand(problem: SparseProblem, *inputs: Any) -> tuple[Any, Any]:
    """Token by token, from the whole unpacked cache."""
    given = named(problem, *inputs)
    scale = given.get("scale")
    caches = {
        part.prefix: unpack(part.layout, given[f"{part.prefix}cache"], scale).flatten(0, 1) for part in problem.parts
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
@pytest.mark.parametrize("problem", [*ALL, *SERVED], ids=lambda p: p.problem_class().key())
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
        values = unpack(part.layout, cache, given.get("scale")).flatten(0, 1)
        counts = torch.arange(part.topk) < torch.tensor(part.lens)[:, None, None]
        named_ones = (indices >= 0) & (indices < len(values))
        seen = torch.zeros(len(values), dtype=torch.bool)
        seen[indices[named_ones & counts].long()] = True
        assert bool(values[seen].isfinite().all()) and bool(values[~seen].isnan().all())
        assert 0.5 < float(named_ones.double().mean()) < 0.85
        outside = indices[~named_ones]
        assert int(outside.min()) == -(2**31) and int(outside.max()) == 2**31 - 1
        views = fields(part.layout, cache)
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


def counted(problem: SparseProblem, given: dict[str, Any], prefix: str) -> Any:
    """(b, s, topk) bool: whether an index counts and names a token, looked at one by one."""
    indices, tokens = given[f"{prefix}indices"], given[f"{prefix}cache"].shape[0] * given[f"{prefix}cache"].shape[1]
    found = torch.zeros(indices.shape, dtype=torch.bool)
    for i in range(problem.b):
        most = int(given[f"{prefix}lengths"][i]) if f"{prefix}lengths" in given else indices.shape[2]
        for j in range(problem.s):
            for place, index in enumerate(indices[i, j, :most].tolist()):
                found[i, j, place] = 0 <= index < tokens
    return found


@pytest.mark.parametrize("contexts", ["uniform", "lognormal:5", "half_short", "short:2"])
@pytest.mark.parametrize("problem", [V32.replace(t=150, topk=70, b=6), V4.replace(b=6)], ids=lambda p: p.layout)
def test_a_short_context_fills_the_front_of_its_rows(problem: SparseProblem, contexts: str) -> None:
    problem = problem.replace(contexts=contexts, lengths=False, extra_lengths=False)
    given = named(problem, *make_inputs(problem, seed=5))
    tokens = problem.context_lens
    assert len(tokens) == 6 and min(tokens) >= 1 and max(tokens) <= problem.t
    for part in problem.parts:
        indices = given[f"{part.prefix}indices"]
        for i, held in enumerate(part.contexts):
            assert held == (-(-tokens[i] * part.t // problem.t) if part.prefix else tokens[i])
            for row in indices[i].tolist():
                front = row[: min(held, part.topk)]
                assert min(front) >= 0 and len(set(front)) == len(front) and set(row[len(front) :]) <= {-1}
            # The context is one prefix of the request's pages, whichever of its tokens a row names.
            pages = set((indices[i][indices[i] >= 0] // part.page).tolist())
            assert len(pages) <= -(-held // part.page)
    short = [held < (problem.extra or problem.topk) for held in problem.parts[-1].contexts]
    if contexts.startswith(("half", "short")):
        assert sum(short) == (6 if contexts.startswith("short") else 3)
    long = SparseProblem(b=6, t=16384, contexts=contexts)
    assert long.context_lens != long.replace(contexts=f"{contexts.partition(':')[0]}:9").context_lens


@pytest.mark.parametrize("missing", ["end:0.25", "scattered:0.4", "tiles:0.5", "rows:0.5"])
@pytest.mark.parametrize(
    "problem",
    [
        V32.replace(t=400, topk=333, b=3),
        V32.replace(t=400, topk=333, b=3, contexts="half_short", lengths=True),
        V4.replace(t=400, topk=333, b=3),
    ],
    ids=["v32", "contexts", "v4"],
)
def test_missing_indices_are_those_that_the_problem_says(problem: SparseProblem, missing: str) -> None:
    whole = named(problem, *make_inputs(problem, seed=5))
    spoiled = problem.replace(missing=missing)
    given = named(spoiled, *make_inputs(spoiled, seed=5))
    kind, pairs = missing.partition(":")[0], 0
    for part in problem.parts:
        indices, found = given[f"{part.prefix}indices"], counted(spoiled, given, part.prefix)
        there = counted(problem, whole, part.prefix)
        gone = there & ~found
        assert bool((indices[gone] == -1).all()) and not bool((found & ~there).any())
        assert found.any() and (gone.any() or part.topk < 64)
        for i, j in ((i, j) for i in range(3) for j in range(2)):
            is_empty = (i, j) in spoiled.empty_rows()
            assert int(found[i, j].sum()) == (0 if is_empty else spoiled.filled(part)[i])
            lost = gone[i, j].nonzero().flatten().tolist()
            if kind == "end":
                assert bool((indices[i, j, part.topk - round(0.25 * part.topk) :] == -1).all())
            elif kind == "tiles":  # whole ones
                assert all(lost.count(64 * (place // 64)) and len(lost) % 64 == 0 for place in lost)
            elif kind == "scattered" and len(lost) > 9:
                assert lost != list(range(lost[0], lost[0] + len(lost)))
        pairs += int(found.sum())
    assert len(spoiled.empty_rows()) == (3 if kind == "rows" else 0)
    assert spoiled.cost().pairs == pairs < problem.cost().pairs
    assert spoiled.cost().flops == 2 * pairs * problem.h * (problem.columns + 512)
    assert spoiled.cost().bytes < problem.cost().bytes


@pytest.mark.parametrize("problem", [V32, V4, DENSE[0]], ids=lambda p: p.problem_class().key())
def test_strided_inputs_are_the_same_values_further_apart(problem: SparseProblem) -> None:
    plain, apart = make_inputs(problem, seed=5), make_inputs(problem.replace(strided=True), seed=5)
    for name, one, other in zip(input_names(problem), plain, apart, strict=True):
        memory = (other.untyped_storage().nbytes() - other.storage_offset() * other.element_size()) // (
            other.element_size()
        )
        if name in ("q", "indices", "extra_indices", "page_table"):
            assert torch.equal(
                one.view(torch.int16) if name == "q" else one, other.view(torch.int16) if name == "q" else other
            )
            sizes = [size + 1 for size in one.shape[:-1]] + [one.shape[-1] + APART]
            assert memory == math.prod(sizes)
            assert other.stride() == torch.empty(sizes, device="meta").stride()
            everything = other.as_strided((memory,), (1,))
            between = everything.isnan().sum() if name == "q" else (everything == 0).sum()
            assert int(between) >= memory - one.numel()
        else:
            assert one.stride() == other.stride()
    oracle = reference(problem, *plain), reference(problem.replace(strided=True), *apart)
    for one, other in zip(*oracle, strict=True):
        assert torch.equal(one, other)
    bytes_of = [
        sum(
            x.untyped_storage().nbytes() for x, name in zip(inputs, input_names(problem), strict=True) if name != "sink"
        )
        for inputs in (plain, apart)
    ]
    more = problem.replace(strided=True).input_bytes() - problem.input_bytes()
    assert more == bytes_of[1] - bytes_of[0] > 0


def test_strided_results_take_the_memory_that_a_problem_says() -> None:
    made = new_outputs(problem := V4.replace(strided_out=True), make_inputs(problem)[0])
    assert [tuple(x.shape) for x in made] == [tuple(x.shape) for x in new_outputs(V4, make_inputs(V4)[0])]
    assert not any(x.is_contiguous() for x in made) and made[1].stride(-1) > 1
    assert problem.output_bytes() == sum(x.untyped_storage().nbytes() for x in made) > V4.output_bytes()
    assert problem.problem_class().key() == V4.problem_class().key() + "_outapart"
    assert "strided_out" not in V4.to_record() and SparseProblem.from_record(problem.to_record()) == problem


def test_scales_codes_and_subnormals() -> None:
    between = fields(LAYOUTS["v32"], named(V32, *make_inputs(V32, dist="scales", poison=False))["cache"]).scales
    assert bool((torch.frexp(between)[0] > 0.5).all())
    assert bool((torch.frexp(between.bfloat16().float())[0] == 0.5).all())  # rounded, they are off by the most
    many = fields(LAYOUTS["v4"], named(V4, *make_inputs(V4, dist="scales", poison=False))["cache"]).scales
    assert len(set(many.flatten().tolist())) > 10
    for problem in (V32, V4, FLAT, NEW, FP4):
        codes = fields(problem.cache, named(problem, *make_inputs(problem, dist="codes", poison=False))["cache"]).codes
        assert set(codes.flatten().tolist()) == set(range(256)) - {0x7F, 0xFF}
        small = named(problem, *make_inputs(problem, dist="subnormal", poison=False))
        codes = fields(problem.cache, small["cache"]).codes
        assert set(codes.flatten().tolist()) == {*range(8), *range(128, 136)}
        values = unpack(problem.cache, small["cache"], small.get("scale"))
        assert 0.03 < float(values[..., :448].square().mean().sqrt()) < 0.2
    fp4 = LAYOUTS["v41_fp4_planar"]
    for dist, halves in (("codes", range(16)), ("subnormal", (0, 1, 8, 9))):
        cache = named(FP4, *make_inputs(FP4, dist=dist, poison=False))["extra_cache"]
        codes = fields(fp4, cache).codes
        assert {*(codes & 15).flatten().tolist(), *(codes >> 4).flatten().tolist()} == set(halves)
        assert 0.03 < float(unpack(fp4, cache).square().mean().sqrt()) < 0.2
    many = fields(fp4, named(FP4, *make_inputs(FP4, dist="scales", poison=False))["extra_cache"]).scales
    assert len(set(many.flatten().tolist())) > 10 and 0x7F not in many
    with pytest.raises(UserError, match="bf16 has none"):
        make_inputs(BF16, dist="codes")


# ---------------------------------------------------------------- the check
def plan_of(compute: Callable[..., tuple[Any, ...]]) -> type[TorchPlan]:
    class Plan(TorchPlan):
        workload = WORKLOAD
        requires = Requirement(archs=(), options=("paged", "strided", "v41"))

        def plan(self, *inputs: Any) -> Any:
            run = functools.partial(compute, self.problem)
            return self.kernel(run, inputs, new_outputs(self.problem, inputs[0]))

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
                    views = fields(part.layout, cache)
                    if scales_too and views.scales is not None and views.scales.dtype == torch.float32:
                        views.scales.copy_(views.scales.bfloat16().float())
                    keys.append(unpack(part.layout, cache, torch.ones(1)).flatten(0, 1)[indices])
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


@pytest.mark.parametrize("problem", SERVED, ids=lambda p: p.layout)
def test_what_tensor_cores_compute_passes_where_inputs_are_strided(problem: SparseProblem) -> None:
    cases = ["own", "tiles", "in_place", "lengths", "extra"]
    report = check(plan_of(sixteen_bit(scales_too=False)), problem, device="cpu", cases=cases, seeds=[4])
    assert report.ok and len(report.cases) == len(cases), report.reason


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


def none_is_token_0(problem: SparseProblem, *inputs: Any) -> tuple[Any, ...]:
    """-1, and nothing else that names no token, is taken for the first one."""
    given = named(problem, *inputs)
    given["indices"] = torch.where(given["indices"] == -1, 0, given["indices"])
    return reference(problem, *(given[x] for x in input_names(problem)))


def skips_behind_an_empty_tile(problem: SparseProblem, *inputs: Any) -> tuple[Any, ...]:
    """A row ends with the first tile of 64 whose indices all name none."""
    given = named(problem, *inputs)
    given["indices"] = given["indices"].clone()
    inside = (given["indices"] >= 0) & (given["indices"] < problem.parts[0].tokens)
    for row, names in zip(given["indices"].flatten(0, 1), inside.flatten(0, 1), strict=True):
        for begin in range(0, len(row), 64):
            if not bool(names[begin : begin + 64].any()):
                row[begin:] = -1
    return reference(problem, *(given[x] for x in input_names(problem)))


def one_row_is_all(problem: SparseProblem, *inputs: Any) -> tuple[Any, ...]:
    """A request without tokens in its first row has none in any."""
    given = named(problem, *inputs)
    given["indices"] = given["indices"].clone()
    given["indices"][(given["indices"] < 0).all(-1).any(-1)] = -1
    return reference(problem, *(given[x] for x in input_names(problem)))


def as_if_contiguous(problem: SparseProblem, *inputs: Any) -> tuple[Any, ...]:
    """Rows of q are taken to lie behind each other."""
    given = named(problem, *inputs)
    given["q"] = given["q"].as_strided(given["q"].shape, torch.empty(given["q"].shape, device="meta").stride())
    return reference(problem, *(given[x] for x in input_names(problem)))


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
        (none_is_token_0, V32, "tail"),
        (none_is_token_0, V32, "contexts"),
        (zeros_for_none, V32, "tail"),
        (skips_behind_an_empty_tile, V32, "tiles"),
        (one_row_is_all, V32, "rows"),
        (as_if_contiguous, SERVED[0], "own"),
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
        "none-in-the-tail",
        "none-of-a-context",
        "zeros-in-the-tail",
        "tiles",
        "rows",
        "strides",
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
    v41 = SparseProblem(b=2, h=64, layout="v41", topk=128, extra=512, extra_layout="v41_fp4").cost()
    assert v41.flops == v4.flops and v41.bytes == 2 * (128 * 528 + 512 * 288) + 2 * 64 * 1024 * 2
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
    served = SparseProblem(b=4, t=4096, contexts="short")
    assert served.cost().pairs == sum(served.context_lens) < 4 * 2048
    assert served.cost().bytes == sum(served.context_lens) * 656 + rows // 32
    assert SparseProblem(b=2, missing="end:0.25").cost().pairs == 2 * 1536
    assert SparseProblem(b=2, missing="rows:0.5").cost().bytes == 2048 * 656 + rows // 64


def test_a_problem_is_recorded_and_bound_as_it_is() -> None:
    for problem in [*ALL, *SERVED, *DENSE]:
        record = problem.to_record()
        for name in ("contexts", "missing", "strided", "extra_layout"):
            assert record.get(name, getattr(SparseProblem, name)) == getattr(problem, name)
            assert (name in record) == (getattr(problem, name) != getattr(SparseProblem, name))
        assert record["workload"] == "sparse_decode" and SparseProblem.from_record(record) == problem
        assert record.get("paged", False) == problem.paged and record.get("paged") is not False
        inputs = make_inputs(problem)
        assert WORKLOAD.rebound(problem, *inputs) == WORKLOAD.as_bound(problem)
        assert len(problem.problem_class().key()) < 80
    assert len({problem.problem_class().key() for problem in [*ALL, *SERVED, V32.replace(sink=True), *DENSE]}) == 12
    same = V4.replace(extra_layout="v4")
    assert same == V4 and same.problem_class() == V4.problem_class()
    assert FP4.problem_class() != FP4.replace(extra_layout="").problem_class()
    assert SERVED[0].problem_class() == V32.replace(strided=True).problem_class() != V32.problem_class()
    assert V32.replace(contexts="uniform:0", missing="end:0") == V32.replace(contexts="uniform")
    assert DENSE[0].problem_class() == DENSE[0].replace(b=1, t=9, lengths=False).problem_class()
    assert DENSE[0].label == "v32_b5_s3_h3_t70"
    assert FP4.label.startswith("v41_planar+v41_fp4_planar_b"), "another problem than with two caches of one layout"
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


def test_strides_that_a_kernel_cannot_read_do_not_bind() -> None:
    problem = SERVED[0]
    q, cache, indices = make_inputs(problem)
    plain = make_inputs(problem.replace(strided=False))
    assert WORKLOAD.rebound(problem, *plain) == WORKLOAD.as_bound(problem)
    wide = q.new_zeros((4, 2, 3, 577))
    for spoiled, words in (
        (
            (q.transpose(-1, -2).contiguous().transpose(-1, -2), cache, indices),
            "q has strides .* must lie side by side",
        ),
        ((wide[..., :576], cache, indices), "q has strides .* multiples of 16 bytes"),
        ((q.new_zeros(q.numel() + 1)[1:].view(q.shape), cache, indices), "q has strides .* multiples of 16 bytes"),
        ((q, cache, indices.transpose(-1, -2).contiguous().transpose(-1, -2)), "indices has strides"),
    ):
        with pytest.raises(UserError, match=words):
            WORKLOAD.rebound(problem, *spoiled)
    with pytest.raises(UserError, match=r"q has strides .* must be contiguous"):
        WORKLOAD.rebound(problem.replace(strided=False), q, cache, indices)


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"layout": "v3"}, "did you mean"), ({"topk": 0}, "topk"), ({"dtype": "fp16"}, "dtype"), ({"sink": 1}, "sink"),
     ({"extra": 4, "layout": "flat"}, "extra"), ({"extra_lengths": True}, "extra_lengths"), ({"extra": -1}, "extra"),
     ({"paged": True, "topk": 512}, "topk is a number of indices"), ({"paged": True, "extra": 4}, "extra is a number"),
     ({"contexts": "unifrom"}, "contexts.*did you mean"), ({"contexts": "uniform:x"}, "contexts.*uniform:7"),
     ({"contexts": "uniform:-1"}, "contexts.*uniform:7"), ({"contexts": 3}, "contexts"),
     ({"missing": "end"}, "missing.*end:0.25"), ({"missing": "end:2"}, "missing.*end:0.25"),
     ({"missing": "ends:0.2"}, "missing.*did you mean"), ({"missing": "end:nan"}, "missing"),
     ({"layout": "v41_fp4"}, "problem.layout: layout v41_fp4 is for an extra cache"),
     ({"layout": "v41_fp4", "extra": 4, "extra_layout": "v41"}, "problem.layout: layout v41_fp4 is for an extra cache"),
     ({"layout": ["v32"]}, r"problem.layout = \['v32'\] is unknown"),
     ({"layout": "v41", "extra": 4, "extra_layout": ["v41"]}, r"problem.extra_layout: cache layout \['v41'\] is unkn"),
     ({"layout": "v4", "extra": 4, "extra_layout": "v41_fp4"}, "problem.extra_layout.*does not go beside layout v4"),
     ({"layout": "v41", "extra": 4, "extra_layout": "v4"}, "it has layout v41 or v41_fp4"),
     ({"layout": "v41", "extra_layout": "v41_fp4"}, "extra_layout is for an extra cache: give extra"),
     ({"strided": 1}, "strided"), ({"paged": True, "contexts": "short"}, "contexts is of indices"),
     ({"paged": True, "missing": "end:0.5"}, "missing is of indices"), ({"paged": 1}, "paged"),
     ({"paged": True, "extra_lengths": True}, "extra_lengths")],
)  # fmt: skip
def test_problems_that_make_no_sense_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        SparseProblem(**fields)


def test_drawn_problems_make_sense() -> None:
    rng = random.Random(3)
    drawn = [SparseProblem(**draw(rng)) for _ in range(200)]
    assert {p.layout for p in drawn} == {"v32", "v4"} and any(p.extra_lengths for p in drawn)
    assert {p.contexts.partition(":")[0] for p in drawn} == set(CONTEXTS) and len({p.missing for p in drawn}) > 9
    assert 60 < sum(p.strided for p in drawn) < 140
    assert max(p.input_bytes() for p in drawn) < 16e9
    assert all(p.cost().pairs <= p.b * p.s * (p.topk + p.extra) for p in drawn)
