"""Contenders for tests on a GPU: one that is right and can be captured, one that breaks the device context."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from bench_torch_fakes import TorchRight

from mla_var3.runtime import TorchKernel


class Gather(TorchRight):
    """Attention over gathered pages in float32: nothing waits for the device, so it can be captured."""

    graph_capturable = True

    def attend(self, *inputs: Any) -> tuple[Any, ...]:
        q, cache, table, lens = inputs
        pd = self.problem
        b, s, h, _ = q.shape
        pages = table.long().clamp(0, cache.shape[0] - 1)
        tokens = cache[pages].flatten(1, 2).float()  # (b, tokens, h_kv, k + p)
        position = torch.arange(tokens.shape[1], device=q.device)
        valid = position < lens.view(b, 1)
        tokens = torch.where(valid.view(b, -1, 1, 1), tokens, 0.0).repeat_interleave(h // pd.h_kv, 2)
        score = torch.einsum("bshc,bthc->bhst", q.float(), tokens) * pd.scale
        seen = valid.view(b, 1, 1, -1)
        if pd.causal:
            last = lens.view(b, 1, 1, 1) - s + torch.arange(s, device=q.device).view(1, 1, s, 1)
            seen = seen & (position.view(1, 1, 1, -1) <= last)
        score = torch.where(seen, score, -torch.inf)
        lse = torch.logsumexp(score, -1)
        empty = torch.isinf(lse)
        share = torch.where(seen, torch.exp(score - torch.where(empty, 0.0, lse).unsqueeze(-1)), 0.0)
        out = torch.einsum("bhst,bthc->bshc", share, tokens[..., : pd.k])
        return out, torch.where(empty, torch.inf, lse)


@triton.jit
def write_far_away(x):
    tl.store(x + (1 << 40), 1)


@triton.jit
def never_ends(x):
    while tl.load(x, volatile=True) != 12345:
        pass


class BadPointer(TorchRight):
    """Writes where no memory is."""

    kernel: Any = write_far_away

    def plan(self, *inputs: Any) -> TorchKernel:
        kernel = super().plan(*inputs)
        flag = torch.zeros(16, dtype=torch.int64, device=inputs[0].device)

        def break_it(*tensors: Any) -> tuple[Any, ...]:
            type(self).kernel[(1,)](flag)
            return kernel.output_tensors

        kernel.fn = break_it
        return kernel


class NeverEnds(BadPointer):
    """Spins on the device until it is killed."""

    kernel = never_ends
