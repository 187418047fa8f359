"""A prefix of cached latents as keys and values of every head, piece by piece: what two ways to attend over it share,
over decompressed heads and in latent space (absorbed).

    rows of the cache ─gather→ latents (m, k) ─· W_UK of every head→ keys[..., :d]      cu_seqlens_k of the piece
                           └─→ rope columns, into every head's keys[..., d:]
                              latents         ─· W_UV of every head→ values

Products write where attention reads: nothing is transposed, split or concatenated. The last piece holds what is left of
the prefixes and, behind each one, the request's new tokens, so that causal attention over it sees both at once; where
everything fits into one piece, nothing is merged. Else each piece's result is merged with that of the pieces before by
the log-sum-exps of both, from two tensors into a third.

`mla_var3.ops.chunk_prefill` calls these functions on a caller's tensors; `decompress` and `absorbed` make pipelines of
them and of kernels that are versions of their own, which the laboratory plans, checks and times.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mla_var3.kernel.parts import Part, PartsKernel, PartsTiling, plans_of
from mla_var3.runtime import LibraryCall
from mla_var3.workload import chunked_prefill

if TYPE_CHECKING:
    from mla_var3.runtime import KernelPlan
    from mla_var3.runtime.base import BaseKernel
    from mla_var3.workload.chunked_prefill import ChunkedProblem

#: Bytes of the keys and values of a piece. With 128 heads of 192 and 128 columns in 16 bits it has 13,107 tokens.
PIECE_BYTES = 1 << 30


@dataclass(frozen=True)
class Piece:
    """Tokens first .. end - 1 of the prefixes behind one another, or with end None all from `first` on and the new
    tokens too. rows: how many there are at most."""

    first: int
    end: int | None
    rows: int

    @property
    def own(self) -> bool:
        """Whether it holds the new tokens, so that attention over it is causal."""
        return self.end is None


def pieces(prefix_tokens: int, new_tokens: int, token_bytes: int) -> Iterator[Piece]:
    """The pieces of a call, that with the new tokens last. token_bytes: of the keys and values of a token."""
    most = max(1, PIECE_BYTES // token_bytes)
    # The new tokens stay together, however many they are.
    ahead = max(0, prefix_tokens - max(0, most - new_tokens))
    for first in range(0, ahead, most):
        end = min(first + most, ahead)
        yield Piece(first, end, end - first)
    yield Piece(ahead, None, prefix_tokens - ahead + new_tokens)


def gather(cache: Any, table: Any, lens: Any, of_q: Any, piece: Piece, latents: Any, keys: Any, of_k: Any) -> None:
    """Writes the piece's latents (rows, k), the rope columns of its keys (rows, h, d + p), and where each request's
    keys begin among them, of_k (b + 1,) int32. cache (pages, page, k + p), whose pages may lie apart; table (b, width),
    lens (b,), of_q (b + 1,) int32. Rows that no request has are left alone. Waits for nothing."""
    if cache.is_cuda and len(table) <= _most_requests() and cache.stride()[1:] == (cache.shape[2], 1):
        _gather_by_kernel(cache, table, lens, of_q, piece, latents, keys, of_k)
        return
    import torch

    page, k = cache.shape[1], latents.shape[1]
    new = of_q.diff()
    before = (lens - new).clamp(min=0)
    ends = before.cumsum(0)
    begins = ends - before
    start = (piece.first - begins).clamp(min=0).minimum(before)
    if piece.end is None:
        count = before - start + new
    else:
        count = ends.clamp(piece.first, piece.end) - begins.clamp(piece.first, piece.end)
    of_k[0] = 0
    of_k[1:] = ends = count.cumsum(0)
    at = torch.arange(len(latents), device=cache.device)
    request = torch.searchsorted(ends, at, right=True).clamp(max=len(table) - 1)
    token = (at + (start - ends + count)[request]).clamp(0, table.shape[1] * page - 1)
    rows = cache[table[request, token // page].long().clamp(0, len(cache) - 1), token % page]
    latents.copy_(rows[:, :k])
    if rows.shape[1] > k:
        keys[..., keys.shape[2] - rows.shape[1] + k :] = rows[:, None, k:]


def _most_requests() -> int:
    """Up to how many requests the kernel takes; 0 without Triton."""
    if importlib.util.find_spec("triton") is None:
        return 0
    from mla_var3.kernel.triton.prims.rows import MOST_REQUESTS

    return MOST_REQUESTS


def _gather_by_kernel(
    cache: Any, table: Any, lens: Any, of_q: Any, piece: Piece, latents: Any, keys: Any, of_k: Any, rows: int = 8
) -> None:
    """`gather` by one kernel, a program for so many rows."""
    from mla_var3.kernel.triton.prims.rows import gather_rows

    (count, h, columns), k = keys.shape, latents.shape[1]
    p = cache.shape[2] - k
    gather_rows[(-(-count // rows),)](
        cache, table, lens, of_q, latents, keys, of_k, len(table), piece.first, piece.end or 0, count, table.shape[1],
        len(cache), cache.stride(0), OWN=piece.own, PAGE=cache.shape[1], K=k, P=p, H=h, D=columns - p,
        LATENT_COLUMNS=_power(k), ROPE_COLUMNS=_power(p), ROWS=rows,
        REQUESTS=next(most for most in (8, 64, 1024) if len(table) <= most),  # so that few kernels are compiled
    )  # fmt: skip


def _power(number: int) -> int:
    """The least power of two of at least a number, and of at least 1."""
    return 1 << max(number - 1, 0).bit_length()


def up_project(weight: Any, latents: Any, keys: Any, values: Any) -> None:
    """Writes the first d columns of keys (m, h, d + p), and values (m, h, v), of latents (m, k). weight (h · (d + v),
    k): for each head d rows of W_UK and v of W_UV. Two batched products of cuBLAS, a head each, which write with the
    strides of keys and values."""
    import torch

    h, v = values.shape[1:]
    of_heads = weight.view(h, -1, weight.shape[1])
    d = of_heads.shape[1] - v
    rows = latents.expand(h, -1, -1)
    torch.bmm(rows, of_heads[:, :d].transpose(1, 2), out=keys[..., :d].transpose(0, 1))
    torch.bmm(rows, of_heads[:, d:].transpose(1, 2), out=values.transpose(0, 1))


#: What a part of the keys gives: out (n, h, d), contiguous, and lse (h, n), whose heads may lie apart.
Attended = tuple[Any, Any]


def merge(first: Attended, second: Attended, total: Attended) -> None:
    """Writes attention over the keys of both parts to `total`, which lies elsewhere. An LSE of +inf or -inf is that of
    a row that saw no key, whose out is 0."""
    (out, lse), (first_out, first_lse), (second_out, second_lse) = total, first, second
    if out.is_cuda and importlib.util.find_spec("triton") is not None:
        _merge_by_kernel(first, second, total)
        return
    import torch

    sums = torch.stack([first_lse, second_lse])
    sums = sums.masked_fill(sums.isinf(), -math.inf)
    whole = sums.logsumexp(0)
    weights = (sums - whole.masked_fill(whole == -math.inf, 0.0)).exp()
    rows = weights.transpose(1, 2)[..., None]
    out.copy_(first_out.float() * rows[0] + second_out.float() * rows[1])
    lse.copy_(whole)


def _merge_by_kernel(first: Attended, second: Attended, total: Attended, rows: int = 4) -> None:
    """`merge` by one kernel, a program for so many rows."""
    from mla_var3.kernel.triton.prims.numerics import interpreted
    from mla_var3.kernel.triton.prims.rows import merge_rows

    n, h, d = total[0].shape
    merge_rows[(-(-n * h // rows),)](
        *first, *second, *total, n, first[1].stride(0), second[1].stride(0), total[1].stride(0), H=h, D=d,
        COLUMNS=_power(d), ROWS=rows, INTERPRET=interpreted(merge_rows),
    )  # fmt: skip


# ---------------------------------------------------------------- pipelines of versions
#: attend(q, keys, values, of_q, of_k, causal): a stage, its out (n, h, d), and its lse (h, n).
Attend = Callable[[Any, Any, Any, Any, Any, bool], tuple["BaseKernel", Any, Any]]


class ChunkKernel(PartsKernel):
    """The stages of a way. Its outputs are `workload.chunked_prefill`'s."""


def cut(pd: ChunkedProblem) -> list[Piece]:
    """The pieces of a problem."""
    return list(pieces(pd.prefix_tokens, pd.query_tokens, (2 * pd.d + pd.p) * pd.h * pd.element_bytes))


def decompress(pd: ChunkedProblem, inputs: Sequence[Any], attend: Attend) -> tuple[list[BaseKernel], Any, Any]:
    """(stages, out (n, h, d), lse (h, n)) of a prefix as keys and values of every head."""
    import torch

    x = chunked_prefill.named(inputs)
    q, table, of_q = x["q"], x["page_table"], x["cu_seqlens_q"]
    n, found = len(q), cut(pd)
    room = max(piece.rows for piece in found)
    latents = q.new_empty((room, pd.k))
    keys, values = (q.new_empty((room, pd.h, columns)) for columns in (pd.d + pd.p, pd.d))
    stages: list[BaseKernel] = []

    def call(name: str, function: Callable[..., Any], *given: Any) -> None:
        stages.append(LibraryCall(functools.partial(function, *given), name=name))

    total: Attended | None = None
    free: Attended | None = None  # where the next merge writes
    for piece in found:
        rows, of_k = slice(piece.rows), torch.zeros_like(of_q)
        lists = (x["kv_cache"], table, x["seq_lens"], of_q, piece, latents[rows], keys[rows], of_k)
        call("gather", gather, *lists)
        call("up-projection", up_project, x["kv_b"], latents[rows], keys[rows], values[rows])
        stage, out, lse = attend(q, keys[rows], values[rows], of_q, of_k, piece.own)
        stages.append(stage)
        if total is None:
            total = out, lse
            continue
        free = free or (torch.empty_like(total[0]), q.new_empty((q.shape[1], n), dtype=torch.float32))
        call("merge", merge, total, (out, lse), free)
        total, free = free, total
    assert total is not None
    return stages, *total


@dataclass(frozen=True)
class DecompressTiling(PartsTiling):
    """causal: over the piece with the new tokens. full: over the others."""

    causal: str = "cute-dsl/flash_attention_v23"
    full: str = "cute-dsl/flash_attention_v23"

    def parts(self, pd: ChunkedProblem) -> dict[str, Part]:
        *ahead, last = cut(pd)
        found: dict[str, Part] = {"causal": (self.causal, pd.piece(last.rows, True), {})}
        if ahead:
            found["full"] = (self.full, pd.piece(max(piece.rows for piece in ahead), False), {})
        return found


@dataclass(frozen=True)
class AbsorbTiling(PartsTiling):
    """product: with W_UK and W_UV. attention: over the cache."""

    product: str = "cute-dsl/absorb_gemm"
    attention: str = "cute-dsl/flash_mla_v23"

    def parts(self, pd: ChunkedProblem) -> dict[str, Part]:
        return {
            "absorb": (self.product, pd.product("q"), {}),
            "attention": (self.attention, pd.decoding, {}),
            "values": (self.product, pd.product("out"), {}),
        }


def empty(plan: KernelPlan, name: str) -> ChunkKernel:
    """A kernel of a way's plan that compiles only."""
    stages = [part.plan_empty() for part in plans_of(plan).values()]
    return ChunkKernel(stages, name=name, output_tensors=(), tiling=plan.tiling, plan=plan)


def decompressed(plan: KernelPlan, inputs: Sequence[Any]) -> ChunkKernel:
    """The kernel of a plan whose tiling is a `DecompressTiling`."""
    parts = plans_of(plan)

    def attend(
        q: Any, keys: Any, values: Any, of_q: Any, of_k: Any, causal: bool
    ) -> tuple[BaseKernel, Any, Any]:  # fmt: skip
        kernel = parts["causal" if causal else "full"].plan(q, keys, values, of_q, of_k)
        return kernel, *kernel.output_tensors

    stages, out, lse = decompress(plan.problem, inputs, attend)
    return ChunkKernel(
        stages, name="chunk_decompress", input_tensors=inputs, output_tensors=(out, lse.t()), tiling=plan.tiling,
        plan=plan,
    )  # fmt: skip


def absorbed(plan: KernelPlan, inputs: Sequence[Any]) -> ChunkKernel:
    """The kernel of a plan whose tiling is an `AbsorbTiling`."""
    parts, pd, x = plans_of(plan), plan.problem, chunked_prefill.named(inputs)
    q = x["q"]
    absorb = parts["absorb"].plan(q[..., : pd.d], x["kv_b"])
    (queries,) = absorb.output_tensors
    rope, turned = queries[..., pd.k :], q[..., pd.d :]
    attention = parts["attention"].plan(
        queries, x["kv_cache"].unsqueeze(2), x["page_table"], x["seq_lens"], x["cu_seqlens_q"]
    )
    attended, lse = attention.output_tensors
    values = parts["values"].plan(attended, x["kv_b"])
    stages = [absorb, LibraryCall(lambda: rope.copy_(turned), name="rope columns"), attention, values]
    made = (queries, attended)
    return ChunkKernel(
        stages, name="chunk_absorb", input_tensors=inputs, output_tensors=(*values.output_tensors, lse),
        workspace_tensors=[*made, *(x for stage in stages for x in stage.workspace_tensors)], tiling=plan.tiling,
        plan=plan,
    )  # fmt: skip
