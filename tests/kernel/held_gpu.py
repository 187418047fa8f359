"""A kernel that keeps multiprocessors busy until it is told to end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import triton
import triton.language as tl

WARPS = 32  # with as many, no CTA of an attention kernel has room beside one of this kernel


@triton.jit
def wait_for(word):
    while tl.load(word, volatile=True) == 0:
        pass


@contextmanager
def held(multiprocessors: int) -> Iterator[torch.cuda.Stream]:
    """A stream for what runs meanwhile. Behind the block multiprocessors are free, and all streams are waited for."""
    word, one = torch.zeros(1, dtype=torch.int32, device="cuda"), torch.ones(1, dtype=torch.int32).pin_memory()
    own, free, release = (torch.cuda.Stream() for _ in range(3))
    torch.cuda.synchronize()
    with torch.cuda.stream(own):
        wait_for[(multiprocessors,)](word, num_warps=WARPS)
    time.sleep(0.05)
    try:
        yield free
    finally:
        with torch.cuda.stream(release):
            word.copy_(one, non_blocking=True)
        torch.cuda.synchronize()
