"""The check must let an honest bf16 kernel through and stop every mistake that kernels make."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from mla_var3.check.judge import UNTOUCHED, bounds_of, check, compare, wanted_cases  # noqa: E402
from mla_var3.errors import Unsupported, UserError  # noqa: E402
from mla_var3.workload import Bound, Output, decode  # noqa: E402
from mla_var3.workload.decode import (  # noqa: E402
    CASES,
    FLASHMLA,
    GARBAGE_PAGE,
    NORMAL,
    QUICK,
    ROUNDED_ONCE_MORE,
    WORKLOAD,
    MlaProblem,
    make_inputs,
    mla_decode_reference,
    same_class,
)

BLOCK = 64


class Honest:
    """What a GPU kernel does: blocks of keys, P rounded to the inputs' dtype, float32 sums, splits, then a combine.

    Mutants override one step each.
    """

    workload = WORKLOAD
    splits = 3
    deterministic = True

    def __init__(self, problem, tiling=None, device=None):
        self.problem = problem

    # ---- steps that mutants override
    def limit(self, length, i):
        """How many keys query token i of this request sees."""
        return length - self.problem.s + i + 1 if self.problem.causal else length

    def tokens(self, length):
        return length

    def scale(self):
        return self.problem.scale

    def ranges(self, length):
        """Key blocks of each split."""
        blocks = -(-length // BLOCK)
        per = max(1, -(-blocks // self.splits))
        return [range(x, min(x + per, blocks)) for x in range(0, blocks, per)]

    def pages(self, table, i, length):
        return table[i, : -(-length // self.problem.page_size)].long()

    def masked(self, logits, mask):
        return logits.masked_fill(mask, float("-inf"))

    def keys(self, cache, table, i, length):
        ids = self.pages(table, i, length)
        return cache[ids].flatten(0, 1)[: self.tokens(length)].float()

    def store(self, out, lse, values, e):
        out.copy_(values.to(out.dtype))
        lse.copy_(e)

    def accumulate(self, acc):
        return acc

    def part(self, acc, total):
        """What a split leaves for the combine."""
        return acc

    # ---- the kernel
    def plan(self, *inputs):
        q = inputs[0]
        b, s, h, _ = q.shape
        out = torch.empty(b, s, h, self.problem.k, dtype=q.dtype)
        lse = torch.empty(b, h, s, dtype=torch.float32)

        class Kernel:
            name, tiling, input_tensors, output_tensors, workspace_tensors = "fake", None, inputs, (out, lse), ()

            def __call__(kernel):
                self.run(*inputs, out, lse)
                return kernel.output_tensors

            def sharing(kernel):
                return self.shared(kernel)

            def bind(kernel, *other):
                pd = same_class(self.problem, [int(x) for x in other[3]])
                return type(self)(pd).plan(*other)

        return Kernel()

    def shared(self, kernel):
        """The call with what it shares with others; this one shares nothing."""
        return kernel

    def run(self, q, cache, table, lens, out, lse):
        pd = self.problem
        group = pd.h // pd.h_kv
        for i, length in enumerate(lens.tolist()):
            values = torch.zeros(pd.s, pd.h, pd.k)
            e = torch.full((pd.h, pd.s), math.inf)
            if length:
                keys = self.keys(cache, table, i, length)
                for g in range(pd.h_kv):
                    heads = slice(g * group, (g + 1) * group)
                    rows = q[i, :, heads].reshape(pd.s * group, -1).float()
                    o, x = self.attend(rows, keys[:, g], length, group)
                    values[:, heads], e[heads] = o.view(pd.s, group, -1), x.view(pd.s, group).t()
            self.store(out[i], lse[i], values, e)

    def attend(self, rows, keys, length, group):
        pd = self.problem
        visible = torch.tensor([self.limit(length, r // group) for r in range(len(rows))]).unsqueeze(1)
        parts = []
        for blocks in self.ranges(len(keys)):
            m = torch.full((len(rows), 1), float("-inf"))
            total, acc = torch.zeros(len(rows), 1), torch.zeros(len(rows), pd.k)
            for block in blocks:
                kv = keys[block * BLOCK : (block + 1) * BLOCK]
                position = torch.arange(block * BLOCK, block * BLOCK + len(kv))
                logits = self.masked(rows @ kv.t() * self.scale(), position >= visible)
                new = torch.maximum(m, logits.amax(1, keepdim=True))
                base = new.masked_fill(new == float("-inf"), 0.0)
                p = (logits - base).exp()
                shrink = (m - base).exp()
                total = total * shrink + p.sum(1, keepdim=True)
                acc = self.accumulate(acc * shrink + p.to(pd.torch_dtype).float() @ kv[:, : pd.k])
                m = new
            parts.append((self.part(acc, total), m, total))
        top = torch.stack([m for _, m, _ in parts]).amax(0)
        base = top.masked_fill(top == float("-inf"), 0.0)
        total = sum((m - base).exp() * x for _, m, x in parts)
        acc = sum((m - base).exp() * x for x, m, _ in parts)
        empty = total == 0
        lse = (base + total.log()).masked_fill(empty, math.inf)
        return acc / total.masked_fill(empty, 1.0), lse


class RoundedParts(Honest):
    """Its parts lie in 16 bits, as FlashInfer's do."""

    splits = 2

    def part(self, acc, total):
        some = total.clamp(min=1e-30)
        return (acc / some).to(self.problem.torch_dtype).float() * total


class DroppedFirstToken(Honest):
    def masked(self, logits, mask):
        mask = mask.clone()
        if mask.shape[1] == BLOCK:
            mask[:, 0] = True
        return super().masked(logits, mask)


class DroppedLastToken(Honest):
    def limit(self, length, i):
        return super().limit(length, i) - 1 if length > 1 else 1


class ExtraToken(Honest):
    """Reads one slot past the end, where it lies on the last page."""

    def tokens(self, length):
        return length + 1

    def limit(self, length, i):
        return super().limit(length, i) + 1


class ExtraZeroToken(Honest):
    """The slot past the end is filled with zeros, and attended."""

    def keys(self, cache, table, i, length):
        keys = super().keys(cache, table, i, length)
        return torch.cat([keys, torch.zeros_like(keys[:1])])

    def limit(self, length, i):
        return super().limit(length, i) + 1


class ZeroMask(Honest):
    """Masked logits become 0."""

    def keys(self, cache, table, i, length):
        keys = super().keys(cache, table, i, length)
        return torch.cat([keys, torch.zeros(-len(keys) % BLOCK, *keys.shape[1:])])

    def masked(self, logits, mask):
        return logits.masked_fill(mask, 0.0)


class NanPadding(Honest):
    """Padding is masked in the logits only: 0 · NaN reaches the output."""

    def tokens(self, length):
        return -(-length // BLOCK) * BLOCK


class WrongScale(Honest):
    def scale(self):
        return (self.problem.k + self.problem.p) ** -0.5


class CausalOffByOne(Honest):
    def limit(self, length, i):
        return min(length, super().limit(length, i) + 1)


class CausalTopLeft(Honest):
    def limit(self, length, i):
        return min(length, i + 1)


class NotCausal(Honest):
    def limit(self, length, i):
        return length


class MissedSplit(Honest):
    def ranges(self, length):
        ranges = super().ranges(length)
        return ranges[:-1] if len(ranges) > 2 else ranges


class DoubledBlock(Honest):
    def ranges(self, length):
        ranges = super().ranges(length)
        return [range(ranges[0].start, ranges[0].stop), *[range(r.start - 1, r.stop) for r in ranges[1:]]]


class SwappedPages(Honest):
    def pages(self, table, i, length):
        ids = super().pages(table, i, length).clone()
        if len(ids) > 1:
            ids[-1], ids[-2] = ids[-2].item(), ids[-1].item()
        return ids


class NeighboursPage(Honest):
    """The last page is taken from the request before."""

    def pages(self, table, i, length):
        ids = super().pages(table, i, length).clone()
        other = int(table[i - 1, len(ids) - 1])
        if i and other != GARBAGE_PAGE:
            ids[-1] = other
        return ids


class UnwrittenRow(Honest):
    def store(self, out, lse, values, e):
        out[:, :-1].copy_(values[:, :-1].to(out.dtype))
        lse.copy_(e)


class UnwrittenEmpty(Honest):
    def store(self, out, lse, values, e):
        if bool(torch.isfinite(e).any()):
            super().store(out, lse, values, e)


class MinusInfinity(Honest):
    def store(self, out, lse, values, e):
        super().store(out, lse, values, torch.where(e == math.inf, -e, e))


class RoundedLse(Honest):
    def store(self, out, lse, values, e):
        super().store(out, lse, values, e.bfloat16().float())


class Log2Lse(Honest):
    def store(self, out, lse, values, e):
        super().store(out, lse, values, e / math.log(2))


class TruncatedOut(Honest):
    """Rounds toward zero, twice the error of rounding to nearest."""

    def store(self, out, lse, values, e):
        bits = values.contiguous().view(torch.int32) & -65536
        super().store(out, lse, bits.view(torch.float32), e)


class RoundedSums(Honest):
    """Keeps the running sum of p·v in bf16 between blocks."""

    splits = 1

    def accumulate(self, acc):
        return acc.bfloat16().float()


class WrongHead(Honest):
    """Heads of a group in the wrong order."""

    def store(self, out, lse, values, e):
        super().store(out, lse, values.flip(1), e)


class StaleLengths(Honest):
    """Remembers the lengths it was planned for."""

    def run(self, q, cache, table, lens, out, lse):
        planned = torch.tensor(self.problem.seq_lens)
        width = (table != GARBAGE_PAGE).sum(1) * self.problem.page_size
        super().run(q, cache, table, torch.minimum(planned, width), out, lse)


class WritesInputs(Honest):
    def run(self, q, cache, table, lens, out, lse):
        super().run(q, cache, table, lens, out, lse)
        q[0, 0, 0, 0] += 1


class Fickle(Honest):
    """Other bits at the second call."""

    calls = 0

    def run(self, q, cache, table, lens, out, lse):
        super().run(q, cache, table, lens, out, lse)
        Fickle.calls += 1
        lse.mul_(1 + 2e-7 * (Fickle.calls % 2))


class EmptySchedule(Honest):
    """Right by itself, and with a shared schedule of no work."""

    def shared(self, kernel):
        class Idle(type(kernel)):
            def __call__(kernel):
                return kernel.output_tensors

        return Idle()


PLAIN = MlaProblem(b=2, s=1, t=300, h=8)
CAUSAL = MlaProblem(b=2, s=3, t=300, h=8, causal=True)
GROUPS = MlaProblem(b=2, s=2, t=300, h=6, h_kv=2, causal=True, page=16)
HONEST = {
    "plain": PLAIN,
    "causal": CAUSAL,
    "groups": GROUPS,
    "fp16": PLAIN.replace(dtype="fp16"),
    "not-paged": PLAIN.replace(page=None),
}


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_kernel_passes_every_case(name):
    report = check(Honest, HONEST[name], device="cpu")
    assert report.ok, report.reason
    assert [c.name for c in report.cases] == [x for x in CASES if x != "far_pages"]
    assert report.error["out"] < 5e-3 and report.error["lse"] < 1e-3
    assert report.seeds and not report.reason


def test_honest_rows_of_every_length_keep_a_margin():
    """Few keys are the hardest for the worst row: P's rounding errors cannot average out."""
    lengths = [1, 2, 3, 4, 5, 6, 8, 11, 16, 27, 50, 64, 65, 130, 1000]
    problem = MlaProblem(h=64, t=lengths)
    for dist, bounds in (("flashmla", FLASHMLA), ("normal", NORMAL)):
        inputs = make_inputs(problem, seed=3, dist=dist)
        kernel = Honest(problem).plan(*inputs)
        report = compare(WORKLOAD, kernel(), decode.reference(problem, *inputs), bounds)
        assert report.ok, report.reason
        assert report.outputs["out"].row_cos < 0.85 * bounds["out"].row_cos
        assert report.outputs["out"].cos < 0.7 * bounds["out"].cos


def test_parts_in_16_bits_need_a_third_rounding():
    """Which the bounds have no room for in the worst of many rows, unless the plan says that it rounds once more."""
    problem = MlaProblem(b=32, h=128, t=1024)
    inputs = make_inputs(problem, seed=1, dist="flashmla")
    reference = mla_decode_reference(*inputs, k=512, scale=problem.scale, causal=False)
    honest, rounded = (
        compare(WORKLOAD, kind(problem).plan(*inputs)(), reference, FLASHMLA).outputs["out"]
        for kind in (Honest, RoundedParts)
    )
    third = (2**-8) ** 2 / 12
    assert 0.8 * third < rounded.cos - honest.cos < 1.3 * third
    assert honest.row_cos < 0.6 * FLASHMLA["out"].row_cos and 0.9 * FLASHMLA["out"].row_cos < rounded.row_cos
    assert rounded.row_cos < 0.75 * (FLASHMLA["out"].row_cos + ROUNDED_ONCE_MORE)


def test_a_plan_can_widen_the_bounds_on_cosine_differences_alone():
    class Noisy(Honest):
        def store(self, out, lse, values, e):
            noise = torch.randn(values.shape, generator=torch.Generator().manual_seed(len(values)))
            super().store(out, lse, values * (1 + 2.6e-3 * noise), e)

    class Allowed(Noisy):
        cos_slack = ROUNDED_ONCE_MORE

    report = check(Noisy, PLAIN, device="cpu", cases=("own",), seeds=(5,))
    assert not report.ok and "cosine difference" in report.reason
    assert check(Allowed, PLAIN, device="cpu", cases=("own",), seeds=(5,)).ok
    wider, usual = bounds_of(Allowed, "normal"), bounds_of(Noisy, "normal")
    assert usual == NORMAL
    out = usual["out"]
    assert wider == {**NORMAL, "out": replace(out, cos=out.cos + 2.5e-6, row_cos=out.row_cos + 2.5e-6)}


def test_a_library_that_sums_rounded_weights_says_so():
    class Rounded(Honest):
        def store(self, out, lse, values, e):
            super().store(out, lse, values, e + 1.9e-3)

    class Allowed(Rounded):
        lse_slack = 2e-3

    report = check(Rounded, PLAIN, device="cpu", cases=("own",), seeds=(5,))
    assert not report.ok and "lse" in report.reason
    assert check(Allowed, PLAIN, device="cpu", cases=("own",), seeds=(5,)).ok
    assert bounds_of(Allowed, "normal")["out"] == NORMAL["out"]


MUTANTS = {
    DroppedFirstToken: PLAIN, DroppedLastToken: PLAIN, ExtraToken: PLAIN, ExtraZeroToken: PLAIN, ZeroMask: PLAIN,
    NanPadding: PLAIN, WrongScale: PLAIN, CausalOffByOne: CAUSAL, CausalTopLeft: CAUSAL, NotCausal: CAUSAL,
    MissedSplit: PLAIN, DoubledBlock: PLAIN, SwappedPages: PLAIN, NeighboursPage: PLAIN, UnwrittenRow: PLAIN,
    UnwrittenEmpty: PLAIN, MinusInfinity: PLAIN, RoundedLse: PLAIN, Log2Lse: PLAIN, RoundedSums: PLAIN,
    TruncatedOut: PLAIN, WrongHead: PLAIN, StaleLengths: PLAIN, WritesInputs: PLAIN, Fickle: PLAIN,
    EmptySchedule: PLAIN,
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.__name__)
def test_a_mutant_fails_the_quick_check(mutant):
    report = check(mutant, MUTANTS[mutant], device="cpu", quick=True, seeds=[11])
    assert not report.ok
    assert report.reason and "seed" in report.reason


@pytest.mark.parametrize(
    ("mutant", "problem", "case"),
    [
        (DroppedLastToken, PLAIN, "last"),
        (DroppedFirstToken, PLAIN, "first"),
        (ExtraToken, PLAIN, "just_masked"),
        (ExtraZeroToken, PLAIN, "below_zero"),
        (CausalOffByOne, CAUSAL, "just_masked"),
        (SwappedPages, PLAIN, "page_boundary"),
        (StaleLengths, PLAIN, "in_place"),
    ],
)
def test_the_dominant_cases_catch_what_they_are_for(mutant, problem, case):
    assert check(mutant, problem, device="cpu", cases=["own"]).ok or mutant is not StaleLengths
    report = check(mutant, problem, device="cpu", cases=[case])
    assert [c.name for c in report.cases] == [case]
    assert not report.ok
    if case not in ("in_place",):
        assert report.error["out"] > 0.1  # of order one: no bound could be wide enough to hide it


def test_a_kernel_that_says_it_is_not_deterministic_may_differ():
    class Admitted(Fickle):
        deterministic = False

    assert check(Admitted, PLAIN, device="cpu", quick=True).ok


def test_quick_is_a_subset_and_names_are_checked():
    report = check(Honest, PLAIN, device="cpu", quick=True, seeds=[1, 2])
    assert [c.name for c in report.cases] == [*QUICK, *QUICK]
    assert report.seeds == (1, 2)
    assert report.to_record()["cases"][0]["seed"] == 1
    with pytest.raises(UserError, match="just_masked"):
        check(Honest, PLAIN, device="cpu", cases=["just_mask"])


def test_an_exception_names_its_case():
    class Broken(Honest):
        def run(self, *args):
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom") as caught:
        check(Broken, PLAIN, device="cpu", quick=True, seeds=[5])
    assert "'own'" in caught.value.__notes__[0]


def test_a_plan_instance_brings_its_problem():
    plan = Honest(PLAIN)
    plan.tiling, plan.device = None, None
    assert check(plan, device="cpu", cases=["edges"]).ok
    with pytest.raises(UserError, match="problem"):
        check(Honest, device="cpu")


class OneRequest(Honest):
    """Takes the problem it was given, and no other number of requests."""

    requires = True  # of which `require` tells

    def require(self):
        if self.problem.b != PLAIN.b:
            raise Unsupported(f"{self.problem.b} requests")


def test_a_planned_case_that_a_version_does_not_take_is_left_out_with_its_reason():
    others = {case.name for case in WORKLOAD.cases(PLAIN, False) if case.planned and case.problem.b != PLAIN.b}
    report = check(OneRequest, PLAIN, device="cpu", seeds=[3])
    assert report.ok and others and set(report.left_out) == others
    assert others.isdisjoint(case.name for case in report.cases)
    assert all(reason.endswith("requests") for reason in report.left_out.values())


class WrongThenBroken(Honest):
    """Wrong from the first case on, and raises at one request."""

    def run(self, q, cache, table, lens, out, lse):
        if len(q) == 1:
            raise UserError("one request")
        super().run(q, cache, table, lens, out, lse)
        out += 1


def test_what_was_wrong_before_an_error_is_said_with_it():
    with pytest.raises(UserError, match="one request") as raised:
        check(WrongThenBroken, PLAIN, device="cpu", seeds=[3])
    assert "wrong before it: own (seed 3)" in raised.value.__notes__[-1]


# ---------------------------------------------------------------- compare
@pytest.fixture
def result():
    gen = torch.Generator().manual_seed(0)
    ref = torch.randn(2, 1, 4, 512, generator=gen, dtype=torch.float64) / 10
    lse = torch.full((2, 4, 1), 8.0, dtype=torch.float64)
    return SimpleNamespace(out=ref.bfloat16(), lse=lse.float(), ref=ref, ref_lse=lse)


def test_compare_accepts_rounding_and_reports_it(result):
    report = compare(WORKLOAD, (result.out, result.lse), (result.ref, result.ref_lse), FLASHMLA)
    assert report and report.reason == ""
    assert 1e-3 < report.to_record()["out"] < 2.5e-3 and report.to_record()["lse"] == 0.0
    assert set(report.to_record()) == {"out", "lse"}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_compare_refuses_what_is_not_finite(result, value):
    out = result.out.clone()
    out[1, 0, 2, 7] = value
    report = compare(WORKLOAD, (out, result.lse), (result.ref, result.ref_lse), FLASHMLA)
    assert not report and "(1, 0, 2, 7)" in report.reason
    lse = result.lse.clone()
    lse[1, 3, 0] = value
    report = compare(WORKLOAD, (result.out, lse), (result.ref, result.ref_lse), FLASHMLA)
    assert not report and "(1, 3, 0)" in report.reason


def test_compare_sees_one_wrong_element_and_one_wrong_row(result):
    out = result.out.clone()
    out[0, 0, 3, 511] += 0.01
    report = compare(WORKLOAD, (out, result.lse), (result.ref, result.ref_lse), FLASHMLA)
    assert not report and "(0, 0, 3, 511)" in report.reason
    out = result.out.clone()
    out[1, 0, 0] = (result.ref[1, 0, 0] * 1.006).bfloat16()  # each element within its bound, the row not
    report = compare(WORKLOAD, (out, result.lse), (result.ref, result.ref_lse), FLASHMLA)
    assert not report and "(1, 0, 0)" in report.reason and "cosine" in report.reason


def lazy_rows(
    queries: torch.Tensor, keys: torch.Tensor, *, forgets: bool = False, seen: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows as a kernel rounds them, exact rows) of keys in two KV tiles: P in bf16 relative to a maximum that is kept
    while it is at most 2^8 too low, and out in bf16: nothing else. forgets: the first tile's share is not rescaled when
    the maximum moves. seen: keys that the kernel takes, in place of all but the last."""
    scores, half, count = queries @ keys.T * 192**-0.5, len(keys) // 2, len(keys) - 1
    exact = torch.exp(scores[:, :count] - scores[:, :count].amax(1, keepdim=True))
    ref = exact @ keys[:count, :512] / exact.sum(1, keepdim=True)
    scores = scores[:, : seen or count]
    first, last = scores[:, :half].amax(1, keepdim=True), scores.amax(1, keepdim=True)
    top = torch.where(last > first + 8 * math.log(2), last, first)
    e = torch.exp(scores - torch.cat([first, top], 1).repeat_interleave(half, 1)[:, : scores.shape[1]])
    factor = torch.ones_like(top) if forgets else torch.exp(first - top)
    values = keys[: e.shape[1], :512]
    parts = [p.bfloat16().double() @ v for p, v in zip(e.split(half, 1), values.split(half), strict=True)]
    total = e[:, :half].sum(1, keepdim=True) * torch.exp(first - top) + e[:, half:].sum(1, keepdim=True)
    return ((parts[0] * factor + parts[1]) / total).bfloat16().double(), ref


def row_differences(out: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    """Cosine difference of each row."""
    return (out - ref).square().sum(1) / (out.square().sum(1) + ref.square().sum(1))


def test_rounding_alone_needs_the_bound_of_rows_that_one_key_rules():
    """A kernel that does nothing but round must pass in its worst row, and the bound must not be loose."""
    gen = torch.Generator().manual_seed(1)
    worst = 0.0
    for _ in range(24):
        keys, q = (torch.randn(n, 576, generator=gen).bfloat16().double() for n in (129, 4096))
        worst = max(worst, float(row_differences(*lazy_rows(q, keys[:128])).max()))
    assert 0.8 * NORMAL["out"].row_cos < worst < NORMAL["out"].row_cos


def test_rows_of_a_key_that_is_rounded_worst_lie_four_deviations_below_the_bound():
    """P of the key lies in the middle between two values of bf16, and its row of 512 columns is drawn anew again and
    again. Without the product of the two errors the bound would be 1.02e-5, and refuse some of these rows."""
    gen, u, found = torch.Generator().manual_seed(3), 2.0**-8, []
    for _ in range(4):
        ruling, others = (torch.randn(4096, 512, generator=gen).bfloat16().double() for _ in range(2))
        row = 0.43 * ruling + 0.07 * others
        found.append(row_differences((row - 0.43 * u / (1 + u) * ruling).bfloat16().double(), row))
    rows = torch.cat(found)
    mean, spread, bound = float(rows.mean()), float(rows.std()), NORMAL["out"].row_cos
    assert mean == pytest.approx(9.0e-6, rel=0.05) and spread == pytest.approx(0.5e-6, rel=0.1)
    assert 1.02e-5 < float(rows.max()) < bound and 4 * spread < bound - mean < 5 * spread


@pytest.mark.parametrize(
    "wrong", [{"forgets": True}, {"seen": 128}, {"seen": 126}], ids=["no rescale", "a key too many", "a key too few"]
)
def test_the_bound_of_rows_that_one_key_rules_refuses_what_is_wrong(wrong: dict[str, Any]):
    gen = torch.Generator().manual_seed(2)
    keys, q = (torch.randn(n, 576, generator=gen).bfloat16().double() for n in (128, 4096))
    if "forgets" in wrong:
        keys[100] *= 3.0  # in some rows the maximum moves
    assert float(row_differences(*lazy_rows(q, keys)).max()) < NORMAL["out"].row_cos
    assert float(row_differences(*lazy_rows(q, keys, **wrong)).max()) > 10 * NORMAL["out"].row_cos


def test_compare_wants_empty_rows_exactly_zero(result):
    result.ref[0, 0, 0] = 0
    result.ref_lse[0, 0, 0] = math.inf
    assert not compare(WORKLOAD, (result.out, result.lse), (result.ref, result.ref_lse), FLASHMLA)
    result.lse[0, 0, 0] = math.inf
    assert not compare(WORKLOAD, (result.out, result.lse), (result.ref, result.ref_lse), FLASHMLA)
    result.out[0, 0, 0] = 0
    assert compare(WORKLOAD, (result.out, result.lse), (result.ref, result.ref_lse), FLASHMLA)
    result.out[0, 0, 0, 3] = 1e-7
    assert not compare(WORKLOAD, (result.out, result.lse), (result.ref, result.ref_lse), FLASHMLA)


def test_compare_wants_shapes_and_dtypes(result):
    assert "shape" in compare(WORKLOAD, (result.out[:1], result.lse), (result.ref, result.ref_lse), FLASHMLA).reason
    assert (
        "float32" in compare(WORKLOAD, (result.out, result.lse.double()), (result.ref, result.ref_lse), FLASHMLA).reason
    )


def test_cases_that_an_interface_rules_out_are_left_out():
    class Library(Honest):
        leaves_out = ("in_place",)

    for quick, names in ((True, QUICK), (False, CASES)):
        assert wanted_cases(Honest, quick) == tuple(names)
        assert wanted_cases(Library, quick) == tuple(name for name in names if name != "in_place")
    assert wanted_cases(Library, cases=["in_place"]) == ("in_place",)
    with pytest.raises(UserError, match="did you mean 'in_place'"):
        wanted_cases(Honest, cases=["inplace"])


def test_what_is_written_in_part_keeps_the_rest() -> None:
    written_in_part = SimpleNamespace(outputs=(Output("out", ("row", "column"), partial=True),))
    bounds = {"out": Bound(abs=1e-3, rel=1e-3, cos=1e-6, row_cos=1e-6)}
    reference = torch.full((3, 4), math.nan, dtype=torch.float64)
    reference[1, 2:] = torch.tensor([1.0, -2.0], dtype=torch.float64)
    good = torch.full((3, 4), UNTOUCHED)
    good[1, 2:] = torch.tensor([1.0, -2.0])
    assert compare(written_in_part, (good,), (reference,), bounds).ok
    for value in (0.0, math.nan):
        bad = good.clone()
        bad[2, 1] = value
        report = compare(written_in_part, (bad,), (reference,), bounds)
        assert "must stay as it was, in 1 of 12 elements, first at (2, 1)" in report.reason
    unwritten = good.clone()
    unwritten[1, 3] = UNTOUCHED
    assert "expected -2" in compare(written_in_part, (unwritten,), (reference,), bounds).reason
