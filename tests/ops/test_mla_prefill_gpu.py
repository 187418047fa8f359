"""`mla_prefill` on a GPU: right with every version that is here, in a graph whose lengths change, compiled, and for
problems of any shape that was not thought of."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ops_gpu import same_bits  # noqa: E402
from public_calls import right  # noqa: E402

from mla_var3.catalogue import registry  # noqa: E402
from mla_var3.check.judge import check  # noqa: E402
from mla_var3.device import Device  # noqa: E402
from mla_var3.dispatch import choose  # noqa: E402
from mla_var3.errors import Unsupported, UserError  # noqa: E402
from mla_var3.ops import flash_attn_varlen_func, mla_prefill  # noqa: E402
from mla_var3.ops.engine import Engine  # noqa: E402
from mla_var3.workload import prefill  # noqa: E402
from mla_var3.workload.prefill import PrefillProblem, make_inputs  # noqa: E402
from running import captured  # noqa: E402

pytestmark = pytest.mark.gpu

WORKLOAD = prefill.WORKLOAD
#: Ours, and the library that takes all of them.
VERSIONS = [k for k in registry.all_kernels() if k.layer == "mla" and k.workload == "prefill" and k.language != "peer"]
FA3 = registry.KernelId("peer", "mla", "fa3")
WIDTHS = ((128, 64), (128, 0), (256, 0), (128, 128), (64, 32))
CHUNKS = ((1, 129), (64, 64), (65, 300), (0, 77), (33, 0), (128, 257), (10, 4), (0, 0), (70, 6), (5, 5))
PROBLEM = PrefillProblem(b=len(CHUNKS), h=8, causal=True, lengths=CHUNKS)
CHECKED = [PrefillProblem(b=2, s=300, h=8, d=d, p=p, causal=True) for d, p in WIDTHS]


def picked(d: int, p: int, causal: bool) -> tuple[PrefillProblem, ...]:
    apart = {"dtype": "fp16", "strided_kv": True, "h": 4, "h_kv": 2}
    return tuple(PROBLEM.replace(d=d, p=p, causal=causal, **more) for more in ({}, apart))


def served(problem: PrefillProblem) -> bool:
    """Whether a version other than torch's takes the problem here."""
    device = Device.detect()
    try:
        return device is not None and bool(choose(problem, device))
    except Unsupported:
        return False


@pytest.mark.parametrize("d, p", WIDTHS)
@pytest.mark.parametrize("kernel", [*VERSIONS, FA3], ids=lambda k: k.label)
def test_right_on_the_cases_that_break_kernels(kernel: registry.KernelId, d: int, p: int) -> None:
    if reason := registry.missing(kernel):
        pytest.skip(reason)
    plan = registry.get_plan(kernel)(CHECKED[WIDTHS.index((d, p))], None, Device.detect())
    verdict = plan.supported()
    verdict = plan.feasible() if verdict else verdict
    if not verdict:
        pytest.skip(verdict.reason)
    report = check(plan, device="cuda")
    assert report.ok, report.reason
    assert len(report.cases) >= 9


@pytest.mark.parametrize("d, p", WIDTHS)
@pytest.mark.parametrize("causal", [True, False])
def test_what_is_picked_is_right(d: int, p: int, causal: bool) -> None:
    for problem in picked(d, p, causal):
        inputs = make_inputs(problem, "cuda", seed=1)
        options = {"causal": causal, "return_lse": True}
        made = mla_prefill(*inputs, **options)
        right(problem, inputs, made)
        assert all(map(same_bits, made, mla_prefill(*inputs, **options)))
        found = flash_attn_varlen_func(*inputs, *problem.longest, causal=causal)
        assert torch.equal(found, made[0])


def test_rows_of_no_request_stay_as_they_are() -> None:
    q, k, v, *offsets = make_inputs(PROBLEM, "cuda", seed=1)
    longer = [torch.cat([x, torch.full_like(x[:200], torch.nan)]) for x in (q, k, v)]
    out = torch.full((len(q) + 200, 8, 128), 7.0, dtype=q.dtype, device="cuda")
    lse = torch.full((8, len(q) + 200), 7.0, device="cuda")
    mla_prefill(*longer, *offsets, out=out, lse=lse)
    right(PROBLEM, (q, k, v, *offsets), (out[: len(q)], lse[:, : len(q)].contiguous()))
    assert bool((out[len(q) :] == 7.0).all()) and bool((lse[:, len(q) :] == 7.0).all())


def test_a_graph_follows_lengths_that_change() -> None:
    problem = PROBLEM.replace(b=6, lengths=((200, 300), (0, 0), (1, 1), (64, 190), (129, 129), (0, 5)))
    inputs = make_inputs(problem, "cuda", seed=2)
    if not served(problem):
        with pytest.raises(UserError, match="call outside of the capture"):
            captured(lambda: mla_prefill(*inputs, return_lse=True))
        return
    graph, made = captured(lambda: mla_prefill(*inputs, return_lse=True))
    for seed, lengths in ((3, problem.pairs[::-1]), (4, ((394, 625), *((0, 0),) * 5))):
        changed = problem.replace(lengths=lengths)
        for old, new in zip(inputs, make_inputs(changed, "cuda", seed=seed), strict=True):
            old.copy_(new)
        graph.replay()
        right(changed, inputs, made)
        assert all(map(same_bits, made, mla_prefill(*inputs, return_lse=True)))


def test_one_kernel_serves_all_lengths() -> None:
    """Planned once for few requests; then more, longer, fewer, strided, through the same kernel."""
    device = Device.detect()
    if device is None or not served(PROBLEM):
        pytest.skip("no version but torch's takes the problem here")
    engine, kernel = Engine(), choose(PROBLEM, device).kernel.label  # of other lengths others are picked
    for seed, lengths in enumerate(
        (((3, 3),), CHUNKS, ((1000, 2000), (0, 0)), tuple((7 * i, 9 * i) for i in range(60)))
    ):
        for strided in (False, True):
            problem = PROBLEM.replace(b=len(lengths), lengths=lengths, strided_kv=strided)
            inputs = make_inputs(problem, "cuda", seed=seed)
            right(problem, inputs, mla_prefill(*inputs, return_lse=True, kernel=kernel, on=engine))
    assert len(engine._kept) == 1


def test_nothing_waits_for_the_device() -> None:
    if not served(PROBLEM):
        pytest.skip("no version but torch's takes the problem here")
    inputs = make_inputs(PROBLEM, "cuda", seed=2)
    mla_prefill(*inputs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        made = mla_prefill(*inputs, return_lse=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    right(PROBLEM, inputs, made)


def test_torch_compile_takes_it_whole() -> None:
    inputs = make_inputs(PROBLEM, "cuda", seed=3)
    want = mla_prefill(*inputs, return_lse=True)

    def step(q: Any, k: Any, v: Any, of_q: Any, of_k: Any) -> Any:
        out, lse = mla_prefill(q * 1.0, k, v, of_q, of_k, return_lse=True)
        return out + 0.0, lse

    found = torch.compile(step, fullgraph=True, dynamic=True)(*inputs)
    assert torch.equal(found[0], want[0]) and torch.equal(found[1], want[1])


#: The lengths of flash_attn 2.8's test of its varlen function, the most of a request: queries and keys.
GRID = (
    (1, 147), (113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256), (1024, 1024), (1023, 1024),
    (1024, 1023), (2048, 2048),
)  # fmt: skip


SHARED = (6, 2, 1)  # heads of keys beside 6 of queries


def grid(h_kv: int, causal: bool) -> Iterator[tuple[tuple[int, int], PrefillProblem]]:
    """(most queries and keys of a request, problem) of four requests each."""
    rng = random.Random(f"{h_kv} {causal}")
    for d, p in ((128, 0), (128, 64)):
        for most in GRID:
            lengths = [tuple(rng.randint(max(1, n - 20), n) for n in most) for _ in range(4)]
            yield most, PrefillProblem(b=4, h=6, h_kv=h_kv, d=d, p=p, causal=causal, lengths=lengths)


@pytest.mark.parametrize("h_kv", SHARED, ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("causal", [True, False])
def test_the_grid_of_flash_attns_own_test(h_kv: int, causal: bool) -> None:
    """Four requests of random lengths, up to 20 below the most, as it draws them."""
    for most, problem in grid(h_kv, causal):
        inputs = make_inputs(problem, "cuda", seed=sum(most))
        out, lse, _ = flash_attn_varlen_func(*inputs, *most, causal=causal, return_attn_probs=True)
        right(problem, inputs, (out, lse))


SEEDS = range(8)


def drawn(seed: int) -> PrefillProblem:
    rng = random.Random(f"prompts {seed}")
    fields = WORKLOAD.draw(rng)  # type: ignore[misc]
    fields |= {"s": min(fields["s"], 700), "h": min(fields["h"], 16), "t": min(fields["t"], 2000)}
    fields |= {"h_kv": min(fields["h_kv"], fields["h"]), "b": min(fields["b"], 12), "causal": rng.random() < 0.7}
    return PrefillProblem(**fields, dtype=rng.choice(("bf16", "fp16")), strided_kv=rng.random() < 0.3)


def problems() -> Iterator[PrefillProblem]:
    """What is asked of `mla_prefill` here, as it sees it: without lengths."""
    both = (True, False)
    asked = [problem for d, p in WIDTHS for causal in both for problem in picked(d, p, causal)]
    asked += [next(grid(h_kv, causal))[1].replace(p=p) for h_kv in SHARED for causal in both for p in (0, 64)]
    for problem in (*asked, *map(drawn, SEEDS)):
        yield problem.replace(lengths={"queries": problem.query_tokens, "keys": problem.keys})


@pytest.mark.parametrize("seed", SEEDS)
def test_problems_that_nobody_chose(seed: int) -> None:
    problem = drawn(seed)
    inputs = make_inputs(problem, "cuda", seed=seed)
    made = mla_prefill(*inputs, causal=problem.causal, return_lse=True)
    right(problem, inputs, made)
