"""A batch of new tokens behind prefixes in a paged latent cache, for the tests of `mla_chunk_prefill`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from mla_var3.workload.prefill import prefill_reference

#: (new tokens, tokens in all): a first chunk, later ones of few and of many, an idle request, one token.
REQUESTS = ((5, 5), (9, 30), (0, 12), (1, 17), (17, 40))


class Sizes(NamedTuple):
    h: int = 3
    d: int = 32
    p: int = 16
    k: int = 64
    page: int = 8


SMALL = Sizes()


class Given:
    """The arguments of a call: rows of pages that no request names are NaN, and page tables end in garbage."""

    def __init__(
        self,
        requests: Sequence[tuple[int, int]] = REQUESTS,
        *,
        sizes: Sizes = SMALL,
        v: int | None = None,
        dtype: Any = torch.float32,
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        self.sizes, v = sizes, sizes.d if v is None else v
        h, d, p, k, page = sizes
        g = torch.Generator().manual_seed(seed)
        counts, lens = zip(*requests, strict=True)
        self.lens, self.counts = lens, counts
        draw = functools.partial(torch.randn, generator=g)
        self.q = draw(sum(counts), h, d + p).to(dtype)
        self.kv_b = (draw(h * (d + v), k) * k**-0.5).to(dtype)
        width = -(-max(lens) // page) + 1
        used = [-(-n // page) for n in lens]
        order = torch.randperm(sum(used) + 3, generator=g).tolist()
        self.cache = torch.full((len(order), page, k + p), torch.nan).to(dtype)
        self.table = torch.full((len(lens), width), 2**31 - 8, dtype=torch.int32)
        self.latents = []
        for i, n in enumerate(lens):
            rows = draw(n, k + p).to(dtype)
            self.latents.append(rows)
            for j in range(used[i]):
                self.table[i, j] = at = order.pop()
                part = rows[j * page : (j + 1) * page]
                self.cache[at, : len(part)] = part
        self.seq_lens = torch.tensor(lens, dtype=torch.int32)
        self.of_q = torch.tensor([0, *counts]).cumsum(0).int()
        self.prefix = sum(lens) - sum(counts)
        self.arguments = tuple(
            x.to(device) for x in (self.q, self.cache, self.table, self.seq_lens, self.of_q, self.kv_b)
        )

    def wanted(self, scale: float | None = None) -> tuple[Any, Any]:
        """(out (n, h, v), lse (n, h)) in float64: attention over decompressed heads."""
        h, d, p, k, _ = self.sizes
        rows = torch.cat(self.latents).double()
        kv = (rows[:, :k] @ self.kv_b.double().t()).view(len(rows), h, -1)
        keys = torch.cat([kv[..., :d], rows[:, None, k:].expand(-1, h, -1)], -1)
        of_k = torch.tensor([0, *self.lens]).cumsum(0)
        factor = (d + p) ** -0.5 if scale is None else scale
        out, lse = prefill_reference(self.q, keys, kv[..., d:], self.of_q, of_k, scale=factor, causal=True)
        return out, lse.t()


def close(found: Any, wanted: Any, limit: float = 2e-6) -> None:
    for x, y in zip(found, wanted, strict=True):
        assert x.shape == y.shape and torch.isfinite(x).all()
        assert float((x.double().cpu() - y).abs().max()) < limit * max(1.0, float(y.abs().max()))
