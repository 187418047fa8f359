"""Serving with `mla_decode`: requests that come and go over a paged latent cache, and one CUDA graph for every step.

    python examples/serve_decode.py                          # on a GPU with the fastest version for these shapes
    python examples/serve_decode.py --slots 32 --heads 128 --steps 200

The step's tensors are fixed: a slot of the batch holds a request or none, and what changes (pages, lengths, which
request has which slot) is written into them. `mla_decode` reads the lengths on the device and deals out the work there,
so the graph that was captured once is replayed for every mix of lengths. Nothing waits for the device.

In place of a model there are random queries and latents: attention is what this shows, `serve_deepseek.py` has a whole
model. The last step is checked against attention over each request's history in float32, which never saw a page.
Without a GPU a plain function takes the place of `mla_decode`, and nothing is timed.

Needs the extra cute, to compile the versions for Hopper: `pip install -e '.[cute]'` in a checkout. Without it a
bundle of compiled kernels, or Triton's version, answers.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence

import torch

from mla_var3.ops import mla_decode

PAGE, LATENT, ROPE = 64, 512, 64
SCALE = (128 + ROPE) ** -0.5


class Batch:
    """Slots for requests over one paged cache: page_table (slots, width), seq_lens (slots,), q (slots, 1, h, 576)."""

    def __init__(self, slots: int, heads: int, longest: int, device: torch.device, dtype: torch.dtype) -> None:
        width = -(-longest // PAGE)
        self.pages = torch.zeros(slots * width, PAGE, 1, LATENT + ROPE, device=device, dtype=dtype)
        self.page_table = torch.zeros(slots, width, device=device, dtype=torch.int32)
        self.seq_lens = torch.zeros(slots, device=device, dtype=torch.int32)
        self.q = torch.zeros(slots, 1, heads, LATENT + ROPE, device=device, dtype=dtype)
        self.out = torch.zeros(slots, 1, heads, LATENT, device=device, dtype=dtype)
        self.free = list(range(slots * width))
        random.Random(0).shuffle(self.free)  # a request's pages lie anywhere
        self.owned: list[list[int]] = [[] for _ in range(slots)]
        #: What each slot's request has been given, in order: only the check reads it.
        self.history: list[list[torch.Tensor]] = [[] for _ in range(slots)]

    def append(self, slot: int, rows: torch.Tensor) -> None:
        """Caches latents and rope of new tokens, rows (tokens, 576), behind those that the request has."""
        begin = sum(len(part) for part in self.history[slot])
        while len(self.owned[slot]) * PAGE < begin + len(rows):
            self.owned[slot].append(self.free.pop())
        at = torch.arange(begin, begin + len(rows))
        table = torch.tensor(self.owned[slot])
        self.pages[table[at // PAGE], at % PAGE, 0] = rows
        self.page_table[slot, : len(table)] = table.to(self.page_table)
        self.seq_lens[slot] = begin + len(rows)
        self.history[slot].append(rows)

    def leave(self, slot: int) -> None:
        """Frees a slot and its pages; a length of 0 costs the step nothing."""
        self.free += self.owned[slot]
        self.owned[slot], self.history[slot] = [], []
        self.seq_lens[slot] = 0

    def attend(self) -> None:
        """One step's attention, into `out`."""
        if self.q.is_cuda:
            mla_decode(self.q, self.pages, self.page_table, self.seq_lens, scale=SCALE, out=self.out)
        else:
            attend_on_cpu(self)


def attend_on_cpu(batch: Batch) -> None:
    """What `mla_decode` computes, over the same pages, for a machine without a GPU."""
    batch.out.zero_()
    for slot, length in enumerate(batch.seq_lens.tolist()):
        if length:
            table = batch.page_table[slot, : -(-length // PAGE)].long()
            cached = batch.pages[table].flatten(0, 2)[:length]
            batch.out[slot, 0] = exact(batch.q[slot, 0], cached).to(batch.out.dtype)


def exact(q: torch.Tensor, cached: torch.Tensor) -> torch.Tensor:
    """Attention of q (h, 576) over cached tokens (t, 576), in float32: (h, 512)."""
    weights = torch.softmax(q.float() @ cached.float().T * SCALE, -1)
    return weights @ cached[:, :LATENT].float()


def captured(batch: Batch) -> torch.cuda.CUDAGraph:
    """A graph of one step, captured after a first call that compiles."""
    batch.attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch.attend()
    return graph


def serve(slots: int, heads: int, steps: int, longest: int, device: torch.device) -> float:
    """Serves so many steps and returns the largest error of the last one, relative to the values' size.

    longest: of a request's prompt; half of the requests are gone after a few steps, and others take their slots."""
    torch.manual_seed(0)
    draw = random.Random(0)
    dtype = torch.bfloat16
    batch = Batch(slots, heads, longest + steps + 1, device, dtype)

    def tokens(count: int) -> torch.Tensor:
        return (torch.randn(count, LATENT + ROPE, device=device) / 10).to(dtype)

    for slot in range(slots):
        batch.append(slot, tokens(draw.randint(1, longest)))
    graph = captured(batch) if device.type == "cuda" else None
    began, served = time.perf_counter(), 0
    for step in range(steps):
        if step % 3 == 2:  # one request ends, another comes
            slot = draw.randrange(slots)
            batch.leave(slot)
            batch.append(slot, tokens(draw.randint(1, longest)))
        for slot in range(slots):
            batch.append(slot, tokens(1))
        batch.q.copy_(torch.randn_like(batch.q))
        if graph is not None:
            graph.replay()
        else:
            batch.attend()
        served += slots
    if device.type == "cuda":
        torch.cuda.synchronize()
        print(f"{served / (time.perf_counter() - began):,.0f} tokens a second, with the cache's bookkeeping in Python")
    worst = 0.0
    for slot in range(slots):
        right = exact(batch.q[slot, 0], torch.cat(batch.history[slot]))
        worst = max(worst, float((batch.out[slot, 0].float() - right).abs().max() / right.abs().max()))
    lengths = batch.seq_lens.tolist()
    print(f"{served} tokens for requests of {min(lengths)} to {max(lengths)} cached tokens, {dtype} on {device}")
    print(f"largest error of the last step: {worst:.1e} of the largest value")
    return worst


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Serve random requests with mla_decode.")
    for name, default, what in (
        ("slots", 8, "requests at once"),
        ("heads", 16, "query heads"),
        ("steps", 24, "tokens that each slot generates"),
        ("longest", 600, "tokens of the longest prompt"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} (default: {default})")
    given = parser.parse_args(arguments)
    if min(vars(given).values()) < 1:
        parser.error("give at least 1 of each")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if serve(given.slots, given.heads, given.steps, given.longest, device) <= 0.02:
        return 0
    print("wrong: this is not the attention of these tokens", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
