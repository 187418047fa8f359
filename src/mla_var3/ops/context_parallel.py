"""Context-parallel decode: the tokens of every request lie on several GPUs, and each reads its own.

    q, this rank's heads ─ all-gather ─→ all heads ─ mla_decode over this rank's tokens ─→ partials of all heads
                         ─ all-to-all ─→ all ranks' partials of this rank's heads ─ merge_partials ─→ out, LSE

With the sequence split, no rank reads what another one has cached, however few heads it has. With the heads split alone
every rank reads all of it, since MLA's heads share one latent cache. Partials are merged by their log-sum-exp as in
Flash-Decoding (Dao et al. 2023).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from mla_var3.errors import UserError
from mla_var3.ops.decode import LATENT, mla_decode
from mla_var3.ops.exchange import Collective, exchange_of
from mla_var3.ops.request import LEAST, MOST, dtype_name, integers, judge, named_as, narrowed, require_contiguous
from mla_var3.ops.tracing import traceable
from mla_var3.ops.ways import serve
from mla_var3.workload.merge import MergeProblem

if TYPE_CHECKING:
    import torch

    from mla_var3.ops.engine import DecodeSchedule, Engine


def mla_decode_cp(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    group: torch.distributed.ProcessGroup | None = None,
    *,
    tokens: tuple[torch.Tensor, torch.Tensor] | None = None,
    scale: float | None = None,
    causal: bool = False,
    head_dim_v: int = LATENT,
    return_lse: bool = False,
    exchange: str | Collective | None = None,
    schedule: DecodeSchedule | None = None,
    kernel: str | None = None,
    on: Engine | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`mla_decode` where each rank of a process group holds a part of every request's tokens, and some of the heads.

    q (b, s, h, k + p): this rank's heads, equally many on every rank. kv_cache, page_table: as of `mla_decode`, for the
    tokens on this rank. seq_lens (b,) int32: tokens of each request on all ranks together, the same on every rank.

    tokens: which tokens are here. None: pages in turn, page j of a request on rank j mod n as entry j div n of its row.
    (begin, end), each (b,) int32: the tokens from begin up to end or the request's length, one behind another from the
    row's first entry; ranks may hold different numbers, or none. Every token is on one rank.

    group: a process group of torch.distributed (NCCL for GPUs); default: all ranks. Every rank calls at the same time.
    exchange: "collective", by the group's collectives, or "symmetric", by stores into the memory of the other GPUs of a
    host, whose calls of a group are on one stream; default: symmetric where the ranks can. schedule: as of
    `mla_decode`; it keeps what is counted of the lengths too, a dozen small kernels. The other arguments are those of
    `mla_decode`; causal is at the end of the whole request. Returns out (b, s, h, k) of this rank's heads, or
    (out, lse) with lse (b, h, s). Never waits for the device, but in the first call of a group. Raises `UserError` as
    `mla_decode` does.
    """
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        raise UserError(
            "mla_decode_cp runs on the ranks of a process group: call torch.distributed.init_process_group first."
        )
    judge("q", q, (None, None, None, None), None, q)
    for name, tensor in (("kv_cache", kv_cache), ("page_table", page_table), ("seq_lens", seq_lens)):
        if not isinstance(tensor, torch.Tensor):
            raise UserError(f"{name} is a {type(tensor).__name__}: pass a torch tensor.")
    if kv_cache.dim() not in (3, 4):
        raise UserError(f"kv_cache is {tuple(kv_cache.shape)}: pass (pages, page, h_kv, k + p), or without h_kv.")
    if tokens is not None and not (isinstance(tokens, tuple | list) and len(tokens) == 2):
        raise UserError(f"tokens is a {type(tokens).__name__}: pass a pair, (begin, end), or None for pages in turn.")
    for tensor in tokens or ():
        judge("tokens", tensor, (len(seq_lens),), None, q)
    s = q.shape[1]
    way = exchange_of(exchange, group, q)
    ranks, rank = way.ranks, way.rank
    every = way.queries(q.detach(), head_dim_v)
    counted = None if schedule is None else schedule.counted
    if counted is None:
        page, b = kv_cache.shape[1], len(q)
        # Counted with 64 bits, of numbers that 32 hold.
        judge("page_table", page_table, (b, None), None, q)
        lengths = integers("seq_lens", seq_lens, (b,), q, 0, MOST).long()
        if tokens is not None:
            begin, end = (integers(f"tokens[{i}]", x, (b,), q, LEAST, MOST).long() for i, x in enumerate(tokens))
            tokens = begin, end
        here = narrowed(_held(lengths, rank, ranks, page, tokens), 0, page_table.shape[1] * page)
        mask = None
        if causal and s > 1:
            # Query token i sees the request up to token length - s + i. Of this rank's tokens that is a prefix, which
            # ends within the newest s of them: what a tree's mask can say.
            query = torch.arange(s, device=q.device)
            seen = _held(lengths[:, None] - s + 1 + query, rank, ranks, page, tokens)  # (b, s)
            mask = here[:, None, None] - s + query < seen[:, :, None]
        counted = here, mask
        if schedule is not None:
            schedule.counted = counted
    here, mask = counted
    partial = mla_decode(
        every, kv_cache, page_table, here, scale=scale, mask=mask, head_dim_v=head_dim_v, return_lse=True,
        schedule=schedule, kernel=kernel, on=on,
    )  # fmt: skip
    out, lse = merge_partials(*way.partials(*partial), on=on)
    return (out, lse.transpose(1, 2).contiguous()) if return_lse else out


@traceable
def merge_partials(
    partials: torch.Tensor, lse: torch.Tensor, *, kernel: str | None = None, on: Engine | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over n parts of a sequence, from what each part gave: (out, lse).

    partials (n, ..., k), bf16 or fp16; lse (n, ...) float32, the natural log-sum-exp of each row, +inf or -inf where
    a row saw no key of the part, whose partial may then hold anything. Both contiguous. Returns out (..., k) and lse
    (...), 0 and +inf of a row that saw no key at all. An LSE that is NaN makes both NaN, whatever the other parts hold.
    kernel, on: as of `mla_decode`. Raises `UserError` in one sentence for what does not fit.
    """
    import torch

    if not isinstance(partials, torch.Tensor):
        raise UserError(f"partials is a {type(partials).__name__}: pass a torch tensor.")
    if partials.dim() < 2:
        raise UserError(f"partials are {tuple(partials.shape)}: pass (parts, ..., k).")
    judge("lse", lse, tuple(partials.shape[:-1]), torch.float32, partials)
    partials = require_contiguous("partials", partials)
    if not lse.is_contiguous():
        raise UserError(f"lse has strides {tuple(lse.stride())}: pass it contiguous.")
    parts, *rows, k = partials.shape
    count = lse[0].numel() if parts else 0
    problem = _merge(parts, max(count, 1), k, dtype_name(partials.dtype, "partials"))
    out = partials.new_empty((count, k))
    total = lse.new_empty((count,))
    if count:
        serve(
            "merge_partials", problem, (partials.detach().view(parts, count, k), lse.detach().view(parts, count)),
            (out, total), kernel, on, first="partials",
        )  # fmt: skip
    return out.view(*rows, k), total.view(rows)


def _held(
    bound: torch.Tensor, rank: int, ranks: int, page: int, tokens: tuple[torch.Tensor, torch.Tensor] | None
) -> torch.Tensor:
    """How many of the requests' first `bound` tokens are on a rank; bound (b, ...) int64, below 1 for none. tokens: of
    `mla_decode_cp`, int64."""
    bound = bound.clamp(min=0)
    if tokens is None:
        turn = page * ranks
        return bound // turn * page + (bound % turn - rank * page).clamp(0, page)
    begin, end = (x.view(-1, *[1] * (bound.dim() - 1)) for x in tokens)
    return (bound.minimum(end) - begin).clamp(min=0)


@functools.lru_cache(maxsize=4096)
@named_as(parts="partials (n, ..., k): n", tokens="partials (n, ..., k): rows", k="partials (n, ..., k): k")
def _merge(parts: int, rows: int, k: int, dtype: str) -> MergeProblem:
    return MergeProblem(parts=parts, tokens=rows, h=1, k=k, dtype=dtype)
