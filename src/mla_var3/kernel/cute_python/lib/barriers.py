"""Named barriers and mbarrier helpers."""

from __future__ import annotations

import cutlass.cute as cute


def named_sync(barrier: int, threads: int) -> None:
    """Arrives at a named barrier and waits until `threads` threads have (ids 1..15; 0 is the block's own)."""
    cute.arch.barrier(barrier_id=int(barrier), number_of_threads=threads)


def named_arrive(barrier: int, threads: int) -> None:
    """Arrives at a named barrier without waiting."""
    cute.arch.barrier_arrive(barrier_id=int(barrier), number_of_threads=threads)


@cute.jit
def release(empty: cute.Pointer):
    """One arrival by this warp at an `empty` mbarrier that counts warps."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(empty)
