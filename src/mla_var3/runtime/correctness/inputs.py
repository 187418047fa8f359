"""Tensors for a decode problem: random, paged, ragged, poisoned where nothing may be read.

The input set is `(q, kv_cache, page_table, seq_lens)`:

    q          (b, s, h, k + p)                dtype of the problem
    kv_cache   (num_pages, page, h_kv, k + p)  same; columns 0..k-1 are the latent (V, and the first part of K)
    page_table (b, max_pages) int32            entry j of request i is the page of its tokens j·page .. j·page + page-1
    seq_lens   (b,) int32                      tokens of each request; 0 is allowed

A contiguous cache (`problem.page is None`) is the same tensors with 64-token pages in order.

Distributions (`dist`):

    flashmla       N(0, 1) / 10 clamped to ±1: what FlashMLA's own test draws. Logits are small, attention is flat.
    normal         N(0, 1): logits have a spread of about 1.7, attention is uneven.
    first, last    one token (the first, the last) takes about 95 % of the attention of every query row.
    page_boundary  the last token of a page and the first of the next one share it.
    just_masked    the first token past each row's limit would take it: past the end of the request (where that lies on
                   the request's last page, in place of the poison) and past the causal limit.
    below_zero     every attended logit is far below zero, so a token whose key was filled with zeros, or a mask that
                   writes 0 in place of -inf, would take it.

The dominant ones lie on top of "flashmla" values: the last columns of q hold a common sign pattern, and the keys of
the chosen tokens a multiple of it, as large as their length asks for. So one dropped or extra token is an error of
order one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mla_var3.errors import UserError, nearest

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from mla_var3.problem import MlaProblem

    InputSet = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

DOMINANT = ("first", "last", "page_boundary", "just_masked", "below_zero")
DISTRIBUTIONS = ("flashmla", "normal", *DOMINANT)

#: What unused page-table entries hold: a kernel that follows one of them leaves the cache, and faults.
GARBAGE_PAGE = 2147480000

#: How far (natural log) the chosen tokens stand above all others together: exp(3) = 20, or 95 % of the attention.
_LEAD = 3.0
#: Magnitude of the sign pattern in q.
_PATTERN = 2.0


def make_inputs(
    problem: MlaProblem,
    device: torch.device | str = "cpu",
    *,
    seed: int = 0,
    dist: str = "flashmla",
    shuffle_pages: bool = True,
    poison: bool = True,
    spare_pages: int = 0,
) -> InputSet:
    """Makes one input set of `problem` on `device`; the module docstring has shapes and distributions.

    seed: the same seed gives the same bits on the same kind of device (CPU and CUDA draw differently).
    shuffle_pages: pages are handed out in random order; a contiguous cache never is.
    poison: NaN in the cache's unreferenced pages and after each request's last token, and `GARBAGE_PAGE` in unused
        page-table entries. Without it those hold finite random values, and 0.
    spare_pages: pages that belong to no request, beside the b · max_pages; with shuffling they lie between the others.
    Raises `UserError` for an unknown distribution or a problem with decompressed tokens (n > 0).
    """
    import torch

    if dist not in DISTRIBUTIONS:
        raise UserError(f"input distribution {dist!r} is unknown: {nearest(dist, DISTRIBUTIONS)}.")
    if problem.n:
        raise UserError(f"problem.n = {problem.n}: these inputs are of the absorbed form only, use n = 0.")
    page, max_pages = problem.page_size, problem.max_pages
    num_pages = problem.b * max_pages + spare_pages
    width = problem.k + problem.p
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        x = torch.randn(shape, dtype=problem.torch_dtype, device=device, generator=generator)
        return x if dist == "normal" else x.div_(10).clamp_(-1.0, 1.0)

    q = draw(problem.b, problem.s, problem.h, width)
    kv_cache = draw(num_pages, page, problem.h_kv, width)

    lens = torch.tensor(problem.seq_lens, dtype=torch.int64)
    if shuffle_pages and problem.page is not None:
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed + 1))
    else:
        order = torch.arange(num_pages)
    table = order[: problem.b * max_pages].view(problem.b, max_pages).clone()
    used = torch.arange(max_pages) < ((lens + page - 1) // page).unsqueeze(1)

    if poison:
        referenced = torch.zeros(num_pages, dtype=torch.bool)
        referenced[table[used]] = True
        kv_cache[torch.nonzero(~referenced).flatten().to(device)] = math.nan
        _tail(kv_cache, table, lens, math.nan)
    table[~used] = GARBAGE_PAGE if poison else 0
    if dist in DOMINANT:
        _dominate(problem, q, kv_cache, table, dist)

    page_table = table.to(torch.int32).to(device)
    seq_lens = lens.to(torch.int32).to(device)
    return q, kv_cache, page_table, seq_lens


def _tail(kv_cache: torch.Tensor, table: torch.Tensor, lens: torch.Tensor, value: float) -> None:
    """Fills what lies after each request's last token on its last page."""
    import torch

    page = kv_cache.shape[1]
    fill = lens % page
    partial = fill > 0
    if not bool(partial.any()):
        return
    last = table[torch.arange(len(lens)), (lens - 1).clamp(min=0) // page]
    offset = torch.arange(page).expand(len(lens), page)
    dead = partial.unsqueeze(1) & (offset >= fill.unsqueeze(1))
    slots = (last.unsqueeze(1) * page + offset)[dead]
    kv_cache.view(-1, *kv_cache.shape[2:])[slots.to(kv_cache.device)] = value


def _chosen(problem: MlaProblem, dist: str, length: int) -> list[int]:
    """Positions that dominate; `length` itself is the slot after the last token."""
    page, s = problem.page_size, problem.s
    if dist == "just_masked":
        masked = range(max(0, length - s + 1), length) if problem.causal else range(0)
        return [*masked, length]
    if length == 0:
        return []
    if dist == "first":
        return [0]
    if dist == "last":
        return [length - 1]
    if dist == "page_boundary":
        if length <= page:
            return [length - 1]
        edge = max(1, length // page // 2) * page
        return [edge - 1, edge]
    return list(range(length))


def _dominate(problem: MlaProblem, q: torch.Tensor, kv_cache: torch.Tensor, table: torch.Tensor, dist: str) -> None:
    """Writes the sign pattern into q and its multiple into the chosen keys."""
    import torch

    device, width = q.device, problem.k + problem.p
    w = min(64, width)
    signs = torch.where(torch.arange(w) % 3 == 0, -1.0, 1.0).to(device=device, dtype=q.dtype)
    q[..., width - w :] = _PATTERN * signs
    page = problem.page_size
    flat = kv_cache.view(-1, problem.h_kv, width)
    slots: list[int] = []
    sizes: list[float] = []
    pages = table.tolist()
    for i, length in enumerate(problem.seq_lens):
        lead = math.log(max(length, 1)) + _LEAD
        if dist == "below_zero":
            lead = -(lead + 5.0)
        for position in _chosen(problem, dist, length):
            entry = position // page
            if entry >= -(-length // page):  # the slot after the last token lies on no page of this request
                continue
            slots.append(pages[i][entry] * page + position % page)
            sizes.append(lead / (w * _PATTERN * problem.scale))
    if not slots:
        return
    index = torch.tensor(slots, device=device)
    if dist == "just_masked":  # the slot after the end may hold poison: give it values that would be believed
        rows = torch.randn(
            (len(slots), problem.h_kv, width), dtype=torch.float32, device=device,
            generator=torch.Generator(device=device).manual_seed(len(slots)),
        )  # fmt: skip
        flat[index] = (rows / 10).clamp_(-1.0, 1.0).to(q.dtype)
    keys = torch.tensor(sizes, device=device, dtype=torch.float32).view(-1, 1, 1) * signs.float()
    flat[index, :, width - w :] = keys.expand(-1, problem.h_kv, -1).to(q.dtype)


def same_class(problem: MlaProblem, lengths: Sequence[int]) -> MlaProblem:
    """A problem of the same class (so of the same compiled kernels) with other requests: one for each length."""
    return problem.replace(b=len(lengths), t=max(lengths, default=0), lengths=tuple(lengths))
