"""Division by the number of splits as a multiplication: what a block divides by is known where it is launched."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

BITS = 30  # quotients are right for number · divisor < 2^30: tiles of 64 of a request of up to 2^27 tokens (144 GiB)


def inverse_of(divisor: Int32) -> Int32:
    """2^30 / divisor, rounded up; on the host. divisor: 1 to 256."""
    return ((1 << BITS) + divisor - 1) // divisor


@cute.jit
def divide(number: Int32, inverse: Int32) -> Int32:
    """number // divisor, of a number that is not negative; inverse: of `inverse_of`.

    With inverse = (2^30 + e) / divisor and e < divisor, number · inverse is over number / divisor · 2^30 by
    number · e / divisor < 2^30 / divisor, which is the least that the fraction lacks to the next quotient.
    """
    return Int32((Int64(number) * Int64(inverse)) >> BITS)


@cute.jit
def part_of(count: Int32, split: Int32, num_splits: Int32, inverse: Int32):
    """(first, end) of a part of `count` things, cut into `num_splits` of one size, the last ones shorter or empty."""
    each = divide(count + num_splits - 1, inverse)
    first = cutlass.min(split * each, count)
    return first, cutlass.min(first + each, count)
