"""Versions that split by a request's own length, on a GPU: right for ragged ones, and the same bits in any batch."""

from __future__ import annotations

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from mla_var3.catalogue import registry  # noqa: E402
from mla_var3.check.judge import bounds_of, compare  # noqa: E402
from mla_var3.device import Device  # noqa: E402
from mla_var3.toolchain.aot import CompileCache  # noqa: E402
from mla_var3.workload.decode import (  # noqa: E402
    MlaProblem,
    make_inputs,
    same_class,
)

pytestmark = pytest.mark.gpu

#: (version, heads, query tokens); several query tokens are masked. First those with a knob split_tokens.
CLASSES = [
    *(("cute-dsl/flash_mla_v23", h, s) for h, s in ((128, 1), (64, 1), (128, 2), (64, 2), (32, 2))),
    *(("cute-dsl/flash_mla_v24", h, s) for h, s in ((8, 1), (16, 1), (32, 1), (8, 2), (16, 2))),
]
#: Those that are told num_splits = 1.
WHOLE = [(f"{name}/flash_mla", h, s) for name in ("cute-dsl", "triton") for h, s in ((16, 1), (128, 1), (64, 2))]
SPLITS = (64, 256, 1024, 4096)
REPEATS = 100
MANY = 300  # requests: more than a warp lists at once, and than there are multiprocessors
MOST_BYTES = 8 << 30  # of partial results


def lengths_of(rng: random.Random, tokens: int) -> list[int]:
    """Around KV tiles and splits, and at random; the longest has 25 splits, or 40,000 tokens."""
    longest = min(25 * tokens + 17, 40_000)
    edges = [0, 1, 2, 63, 64, 65, 127, 128, 129]
    edges += [n * tokens + d for n in (1, 2, 3, 5, 17) for d in (-1, 0, 1) if n * tokens + 1 <= longest]
    drawn = [rng.randint(0, longest) for _ in range(12)]
    lengths = [longest, *edges, *drawn]
    rng.shuffle(lengths)
    return lengths


class Case:
    """A version on a batch, with splits of `tokens` tokens, or of whole requests where that is 0.

    `of`: any requests of the batch, in any order, under a page table of any width.
    """

    def __init__(self, label: str, h: int, s: int, tokens: int, dist: str) -> None:
        self.kernel, self.tokens = registry.KernelId.parse(label), tokens
        if reason := registry.missing(self.kernel.language):
            pytest.skip(reason)
        self.problem = same_class(
            MlaProblem(h=h, s=s, causal=s > 1), lengths_of(random.Random(h + s + tokens), tokens or 512)
        )
        self.device = Device.detect()
        self.given = make_inputs(self.problem, "cuda", seed=h + tokens, dist=dist)
        self.compiled = CompileCache()

    def planned(self, inputs: Any, workers: int = 0) -> Any:
        plan_type = registry.get_plan(self.kernel)
        b, width = inputs[2].shape
        problem = self.problem.replace(b=b, t=width * 64, lengths="uniform")
        knobs = {"split_tokens": self.tokens, "workers": workers} if self.tokens else {"num_splits": 1}
        default = plan_type(problem, None, self.device).tiling.to_record()
        plan = plan_type(problem, plan_type.tiling_type.from_record({**default, **knobs}), self.device)
        plan.compiled = self.compiled
        return plan.plan(*inputs)

    def call(self, inputs: Any, workers: int = 0) -> tuple[Any, Any]:
        """(out, lse), written over NaN, with NaN in the partial results."""
        kernel = self.planned(inputs, workers)
        for x in (*kernel.output_tensors, *kernel.workspace_tensors):
            if x.is_floating_point():
                x.fill_(float("nan"))
        return kernel()

    def of(self, requests: list[int], width: int | None = None) -> tuple[Any, ...]:
        q, cache, table, lens = self.given
        return q[requests].contiguous(), cache, table[requests, :width].contiguous(), lens[requests].contiguous()


def differing(a: Any, b: Any) -> Any:
    kind = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return (a.contiguous().view(kind) != b.contiguous().view(kind)).sum()


@pytest.fixture(params=SPLITS)
def tokens(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.mark.parametrize(("label", "h", "s"), CLASSES)
def test_right_for_ragged_lengths(label: str, h: int, s: int, tokens: int) -> None:
    for dist in ("flashmla", "normal", "last", "page_boundary", "just_masked"):
        case = Case(label, h, s, tokens, dist)
        pd = case.problem
        out, lse = case.call(case.given)
        plan_type = registry.get_plan(case.kernel)
        reference = plan_type(pd, None, case.device).reference_fn(*case.given)
        verdict = compare(plan_type.workload, (out, lse), reference, bounds_of(plan_type, dist))
        assert verdict.ok, (dist, verdict.reason, pd.seq_lens)


@pytest.mark.parametrize(("label", "h", "s"), CLASSES)
def test_the_same_bits_in_any_batch(label: str, h: int, s: int, tokens: int) -> None:
    everywhere_the_same(Case(label, h, s, tokens, "normal"))


@pytest.mark.parametrize(("label", "h", "s"), WHOLE)
def test_the_same_bits_of_whole_requests(label: str, h: int, s: int) -> None:
    everywhere_the_same(Case(label, h, s, 0, "normal"))


def everywhere_the_same(case: Case) -> None:
    """Each request alone, under a table of two widths; all of them by other numbers of workers; some of them; many."""
    lengths, b, tokens = case.problem.seq_lens, case.problem.b, case.tokens
    out, lse = (x.clone() for x in case.call(case.given))
    rng = random.Random(3)

    def expect(requests: list[int], width: int | None = None, workers: int = 0) -> None:
        found = case.call(case.of(requests, width), workers)
        wrong = [int(differing(x, y[requests])) for x, y in zip(found, (out, lse), strict=True)]
        assert wrong == [0, 0], (requests, width, workers, [lengths[i] for i in requests])

    for i, length in enumerate(lengths):
        narrow = max(1, -(-length // 64))
        expect([i], narrow)
        expect([i], min(narrow + 3, case.given[2].shape[1]))
    everybody = list(range(b))
    for workers in (1, 2, 5, 33, 100, 132, 264) if tokens else ():
        if workers * -(-case.problem.rows // 64) <= 264:
            expect(everybody, workers=workers)
    for _ in range(5):
        expect(rng.sample(everybody, rng.randint(2, b)))
    short = [i for i in everybody if lengths[i] <= min(5 * (tokens or 512) + 1, 6000)]
    wide = max(1, max(-(-lengths[i] // 64) for i in short))
    slots = -(-wide * 64 // tokens) if tokens else 1
    most = min(MANY, MOST_BYTES // (slots * max(64, case.problem.rows) * 1024))
    for _ in range(3):
        expect([rng.choice(short) for _ in range(most)], wide)
    expect([rng.choice(everybody) for _ in range(140)] if tokens == 0 or tokens > 256 else everybody[::-1])


@pytest.mark.parametrize(("label", "h", "s"), CLASSES)
def test_the_same_bits_in_every_call(label: str, h: int, s: int, tokens: int) -> None:
    """Other work of changing size runs in between, so that CTAs are placed in another order."""
    case = Case(label, h, s, tokens, "normal")
    kernel = case.planned(case.given)
    first = [x.clone() for x in kernel()]
    noise, wrong = torch.randn(1 << 20, device="cuda"), []
    for i in range(REPEATS):
        noise[: 1 << (10 + i % 11)].mul_(1.0001)
        wrong += [differing(x, y) for x, y in zip(kernel(), first, strict=True)]
    assert int(torch.stack(wrong).sum()) == 0
