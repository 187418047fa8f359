"""Vectors of 16 bytes between global memory and registers, and the sum over the lanes of a warp."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32

VECTOR = 8  # 16-bit elements of a vector
WARP = 32


def vectors(kind: type, count: int) -> cute.Tensor:
    """(VECTOR, count) elements in registers."""
    return cute.make_rmem_tensor(cute.make_layout((VECTOR, count)), kind)


def load_vector(target: cute.Tensor, source: cute.Pointer) -> None:
    """(VECTOR,) elements from global memory, past L1: what is read once must not push out what others read again."""
    atom = cute.make_copy_atom(
        cute.nvgpu.CopyG2ROp(),
        target.element_type,
        num_bits_per_copy=128,
        l1c_evict_priority=cute.nvgpu.CacheEvictionPriority.NO_ALLOCATE,
    )
    cute.copy(atom, cute.make_tensor(source, cute.make_layout(VECTOR)), target)


def load_shared_vector(target: cute.Tensor, source: cute.Pointer) -> None:
    """(VECTOR,) elements from global memory that other CTAs of the SM read too, by way of L1."""
    cute.autovec_copy(cute.make_tensor(source, cute.make_layout(VECTOR)), target)


def store_vector(values: cute.Tensor, target: cute.Pointer) -> None:
    """(VECTOR,) elements to global memory."""
    cute.autovec_copy(values, cute.make_tensor(target, cute.make_layout(VECTOR)))


@cute.jit
def sum_of(values: cute.TensorSSA) -> Float32:
    """The sum of VECTOR float32, as a tree: three sums long, where a chain is seven."""
    terms = cute.make_rmem_tensor(VECTOR, Float32)
    terms.store(values)
    for i in cutlass.range_constexpr(3):
        half = VECTOR >> (i + 1)
        for j in cutlass.range_constexpr(half):
            terms[j] = terms[j] + terms[j + half]
    return terms[0]


@cute.jit
def warp_sum(value: Float32) -> Float32:
    """The sum over the lanes of a warp, in every lane; the same bits in each."""
    for i in cutlass.range_constexpr(5):
        value = value + cute.arch.shuffle_sync_bfly(value, offset=1 << i)
    return value
