"""Context-parallel decode over four processes with gloo, against the oracle on the whole cache; and the merge."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from ops_fakes import CpuEngine  # noqa: E402

from mla_var3.errors import UserError  # noqa: E402
from mla_var3.ops import DecodeSchedule, context_parallel, merge_partials, mla_decode_cp  # noqa: E402
from mla_var3.workload import merge  # noqa: E402
from mla_var3.workload.decode import mla_decode_reference  # noqa: E402
from mla_var3.workload.merge import MergeProblem  # noqa: E402

RANKS, PAGE, K, P, H = 4, 16, 64, 32, 2
LENGTHS = [200, 1, 0, 70, 33]
MERGE = "torch/merge_partials"
#: (query tokens, causal, how tokens lie)
CASES = [(1, False, "pages"), (1, True, "parts"), (3, True, "pages"), (3, True, "parts"), (2, False, "parts")]


def scattered(tokens: Any, generator: Any) -> tuple[Any, Any]:
    """(cache, row of a page table) of these tokens (n, K + P) in shuffled pages; NaN in all that is nobody's."""
    pages = max(1, -(-len(tokens) // PAGE))
    cache = torch.full((pages + 1, PAGE, K + P), float("nan"), dtype=torch.bfloat16)
    row = torch.randperm(pages + 1, generator=generator)[:pages]
    for i in range(0, len(tokens), PAGE):
        held = tokens[i : i + PAGE]
        cache[row[i // PAGE], : len(held)] = held
    return cache, row


def cached(parts: list[Any], generator: Any) -> tuple[Any, Any]:
    """(kv_cache, page_table) of the requests' tokens."""
    made, base, rows = [], 0, []
    for tokens in parts:
        cache, row = scattered(tokens, generator)
        made.append(cache)
        rows.append(row + base)
        base += len(cache)
    width = max(map(len, rows)) + 1
    table = torch.full((len(rows), width), -1, dtype=torch.int32)
    for i, row in enumerate(rows):
        table[i, : len(row)] = row
    return torch.cat(made)[:, :, None], table


def one_rank(rank: int, file: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=RANKS)
    context_parallel.merge_partials = functools.partial(merge_partials, kernel=MERGE)
    engine = CpuEngine()
    for number, (s, causal, lie) in enumerate(CASES):
        generator = torch.Generator().manual_seed(number)
        tokens = [torch.randn(n, K + P, generator=generator).bfloat16() for n in LENGTHS]
        q = torch.randn(len(LENGTHS), s, RANKS * H, K + P, generator=generator).bfloat16()
        lengths = torch.tensor(LENGTHS, dtype=torch.int32)
        mine, part = [], None
        if lie == "pages":
            for request in tokens:
                pages = request.split(PAGE)[rank::RANKS]
                mine.append(torch.cat(pages) if pages else request[:0])
        else:  # unequal parts; rank 2 has nothing, the last one all that will come
            begin = [0, 10, 61, 61][rank]
            end = [10, 61, 61, 10_000][rank]
            part = tuple(torch.full((len(LENGTHS),), x, dtype=torch.int32) for x in (begin, end))
            mine = [request[begin:end] for request in tokens]
        cache, table = cached(mine, generator)
        heads = slice(rank * H, (rank + 1) * H)
        out, lse = mla_decode_cp(
            q[:, :, heads], cache, table, lengths, tokens=part, causal=causal, head_dim_v=K, scale=0.1,
            return_lse=True, kernel="torch/flash_mla", on=engine,
        )  # fmt: skip
        schedule = DecodeSchedule()
        for _ in range(2):  # counts the lengths, then reads what was counted
            again = mla_decode_cp(
                q[:, :, heads], cache, table, lengths, tokens=part, causal=causal, head_dim_v=K, scale=0.1,
                schedule=schedule, kernel="torch/flash_mla", on=engine,
            )  # fmt: skip
            assert torch.equal(again, out) and schedule.counted is not None
        whole = cached(tokens, generator)
        want_out, want_lse = mla_decode_reference(q, *whole, lengths, k=K, scale=0.1, causal=causal)
        torch.testing.assert_close(out.double(), want_out[:, :, heads], atol=0.02, rtol=0.02)
        torch.testing.assert_close(lse.double(), want_lse[:, heads], atol=1e-4, rtol=1e-4)
        assert out.dtype == torch.bfloat16 and bool((out[2] == 0).all()) and bool((lse[2] == float("inf")).all())
        # A token of one rank that is NaN, and a query row: NaN in every rank's heads of that request, and in that row.
        tokens[3][10, -1] = q[0, s - 1, 1, 0] = float("nan")
        if lie == "pages":
            mine[3] = torch.cat(tokens[3].split(PAGE)[rank::RANKS])
        else:
            mine[3] = tokens[3][begin:end]
        cache, table = cached(mine, generator)
        for scale in (0.1, -0.1, 0.0):
            out, lse = mla_decode_cp(
                q[:, :, heads], cache, table, lengths, tokens=part, causal=causal, head_dim_v=K, scale=scale,
                return_lse=True, kernel="torch/flash_mla", on=engine,
            )  # fmt: skip
            whole = cached(tokens, generator)
            want_out, want_lse = mla_decode_reference(q, *whole, lengths, k=K, scale=scale, causal=causal)
            torch.testing.assert_close(out.double(), want_out[:, :, heads], atol=0.02, rtol=0.02, equal_nan=True)
            torch.testing.assert_close(lse.double(), want_lse[:, heads], atol=1e-4, rtol=1e-4, equal_nan=True)
            assert bool(out[3].isnan().all()) and bool(lse[3].isnan().all())
            assert int(lse.isnan().sum()) == lse[3].numel() + (rank == 0)
    dist.destroy_process_group()


def test_four_ranks_give_what_one_would(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(one_rank, (str(tmp_path / "meet"),), nprocs=RANKS)


def test_without_a_group_it_says_what_is_missing() -> None:
    with pytest.raises(UserError, match=r"call torch\.distributed\.init_process_group first"):
        mla_decode_cp(*(torch.zeros(1),) * 4)


@pytest.mark.parametrize("length", range(0, 150, 7))
def test_every_token_is_on_one_rank(length: int) -> None:
    bound = torch.tensor([length])
    held = [int(context_parallel._held(bound, rank, RANKS, PAGE, None)) for rank in range(RANKS)]
    pages = [page // PAGE % RANKS for page in range(length)]
    assert held == [pages.count(rank) for rank in range(RANKS)]


# ---------------------------------------------------------------- the merge
@pytest.mark.parametrize("dist_of", merge.DISTRIBUTIONS)
def test_merge_partials(on_cpu: CpuEngine, dist_of: str) -> None:
    problem = MergeProblem(parts=3, tokens=5, h=4, k=64)
    partials, lse = merge.make_inputs(problem, seed=6, dist=dist_of)
    out, total = merge_partials(partials.view(3, 5, 4, 64), lse.view(3, 5, 4), kernel=MERGE)
    wanted, want_lse = merge.reference(problem, partials, lse)
    same = {"rtol": 0, "atol": 0, "equal_nan": True}
    torch.testing.assert_close(out.view(20, 64), wanted.bfloat16(), **same)
    torch.testing.assert_close(total.view(20), want_lse.float(), **same)
    assert bool(total.isnan().any()) == (dist_of == "nan")


def test_the_merge_is_an_operator(on_cpu: CpuEngine) -> None:
    partials, lse = torch.randn(2, 3, 64).bfloat16(), torch.randn(2, 3)
    torch.library.opcheck(torch.ops.mla_var3.merge_partials.default, (partials, lse), {"version": MERGE})
    torch._dynamo.reset()
    compiled = torch.compile(functools.partial(merge_partials, kernel=MERGE), fullgraph=True, backend="aot_eager")
    for found, wanted in zip(compiled(partials, lse), merge_partials(partials, lse, kernel=MERGE), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((torch.zeros(3).bfloat16(), torch.zeros(3)), r"partials are \(3,\)"),
        ((torch.zeros(2, 3, 8).bfloat16(), torch.zeros(3, 2)), r"lse is \(3, 2\) .* pass \(2, 3\) torch.float32"),
        ((torch.zeros(2, 3, 8), torch.zeros(2, 3)), "torch.float32: the kernels compute in"),
        ((torch.zeros(2, 8, 3).bfloat16().transpose(1, 2), torch.zeros(2, 3)), "partials has strides"),
        ((torch.zeros(2, 3, 8).bfloat16(), torch.zeros(2, 3)), "partials is on cpu: merge_partials runs"),
    ],
)
def test_what_does_not_fit_is_named(given: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        merge_partials(*given)
