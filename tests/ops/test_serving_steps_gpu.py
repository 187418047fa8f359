"""What a serving engine does with `mla_decode`, step by step, on a GPU: captured graphs over a batch that changes."""

from __future__ import annotations

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ops_gpu import compile_ahead, judge, same_bits  # noqa: E402

from mla_var3.ops import DecodeSchedule, mla_decode  # noqa: E402
from mla_var3.workload.decode import FLASHMLA, GARBAGE_PAGE, MlaProblem  # noqa: E402

pytestmark = pytest.mark.gpu

STEPS = 200
SIZES = (1, 4, 16, 64)  # requests that a graph is captured for
LONGEST = 3000
PAGES = 6000
HEADS = (128, 16)


def problems(h: int) -> list[MlaProblem]:
    """What is captured."""
    return [MlaProblem(b=size, h=h, t=-(-LONGEST // 64) * 64) for size in SIZES]


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    compile_ahead(problem for h in HEADS for problem in problems(h))


@pytest.mark.parametrize("h", HEADS)
def test_two_hundred_steps_of_a_batch_that_changes(h: int) -> None:
    """Requests come, grow by a token a step and leave; the graph of the next larger size is replayed, its other slots
    empty, with garbage in their rows of the page table. Every step is judged."""
    rng, wrong = random.Random(h), []
    width = -(-LONGEST // 64)
    cache = torch.randn(PAGES, 64, 1, 576, device="cuda", dtype=torch.bfloat16).div_(10).clamp_(-1, 1)
    q = torch.zeros(SIZES[-1], 1, h, 576, device="cuda", dtype=torch.bfloat16)
    table = torch.full((SIZES[-1], width), GARBAGE_PAGE, device="cuda", dtype=torch.int32)
    lens = torch.zeros(SIZES[-1], device="cuda", dtype=torch.int32)
    graphs: dict[int, Any] = {}
    for size in SIZES:
        given = (q[:size], cache, table[:size], lens[:size])
        mla_decode(*given)
        torch.cuda.synchronize()
        graphs[size] = torch.cuda.CUDAGraph(), given
        schedule = DecodeSchedule()  # made by the first layer of each replay
        with torch.cuda.graph(graphs[size][0]):
            layers = [mla_decode(*given, return_lse=True, schedule=schedule) for _ in range(2)]
        graphs[size] = (*graphs[size], layers)
    free = list(range(PAGES))
    rng.shuffle(free)
    live: list[tuple[int, list[int]]] = []  # (tokens, pages) of a request
    for step in range(STEPS):
        live = [(tokens + 1, pages) for tokens, pages in live]
        for i in range(len(live) - 1, -1, -1):
            if live[i][0] > LONGEST or rng.random() < 0.03 + 0.3 * (step % 50 > 40):
                free.extend(live.pop(i)[1])
        for _ in range(rng.choice((0, 0, 1, 3, 12))):
            if len(live) < SIZES[-1]:
                live.append((rng.choice((1, 63, 64, 65, rng.randint(1, LONGEST))), []))
        rows = torch.full((SIZES[-1], width), GARBAGE_PAGE, dtype=torch.int32)
        for i, (tokens, pages) in enumerate(live):
            while len(pages) < -(-tokens // 64):
                pages.append(free.pop())
            rows[i, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        table.copy_(rows)
        lens.copy_(torch.tensor([tokens for tokens, _ in live] + [0] * (SIZES[-1] - len(live)), dtype=torch.int32))
        q.normal_().div_(10)
        graph, given, layers = graphs[next(size for size in SIZES if size >= len(live))]
        for x in (*layers[0], *layers[1]):
            x.fill_(float("nan"))
        graph.replay()
        verdict = judge(layers[0], given, 192**-0.5, False, FLASHMLA)
        if not verdict.ok:
            wrong.append(f"step {step}, {len(live)} requests: {verdict.reason}")
        if not all(same_bits(x, y) for x, y in zip(*layers, strict=True)):
            wrong.append(f"step {step}, {len(live)} requests: the second layer has other bits")
    assert not wrong, f"{len(wrong)} of {STEPS}: {wrong[:3]}"
