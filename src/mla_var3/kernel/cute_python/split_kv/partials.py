"""Results in registers to global memory: rows of the output, or the partial of a split.

In an m64nN accumulator a quad (four lanes) holds the eight columns of a row in each 8 x 8 block, two columns a lane. A
partial keeps that order. A vector of 16 bytes has the pairs that one lane holds in four blocks, and the four vectors of
a quad lie beside each other and have the 32 columns of these blocks. The reader puts the columns in order
(`transpose_quad`), once for all splits.

A partial is stored in fp16, whatever the output's type is, which takes half the bytes of fp32. A row has two halves,
the left and the right columns, and each consumer computes one of them. Each half is multiplied by 2^(14 - exponent),
where exponent is that of the sum of its magnitudes, so that this sum comes to [2^14, 2^15). Then no element overflows.
Of 256 columns the largest element is at least 2^6, so elements down to 2^-20 of it keep all 11 bits of fp16.

The statistics of a row are two numbers for each half. A is the row's maximum in the log2 domain plus exponent - 14. The
sum is that of the probabilities that the half's consumer computed, relative to 2^A. The row's sum of exponentials is
the sum of 2^A · sum over both halves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Int64

VECTOR = 8  # 16-bit elements of a vector: 16 bytes
QUAD = 4  # vectors, and the blocks of eight columns that they have pairs of
PANEL = 64  # columns
STATS = 4  # float32 of a row: A and the sum, of the left half and of the right one
TARGET_EXPONENT = 14  # exponent that the sum of magnitudes is brought to
# Exponent of a half that is all zeros, or nearly. Down to a 2^28th of it no precision of fp16 is lost, and sums of
# probabilities relative to it stay in float32's range, also where one half of V is zeros and the other is not.
MIN_EXPONENT = -40


@dataclass(frozen=True)
class Partials:
    """Layout of partials: outputs (slots, tiles, rows, columns) fp16 and statistics (slots, tiles, rows, STATS)
    fp32, contiguous. tiles: query tiles of a request, over all kv heads. rows: of a query tile.

    of_panels: the accumulators have columns on the M side of the MMA, 16 of a 64-column panel a warp, so that a quad
    has two blocks of a panel and two of the next one; otherwise its four blocks lie beside each other.
    """

    tiles: int
    rows: int
    columns: int
    of_panels: bool = False

    def row(self, slot: Int32, tile: Int32, row: Int32) -> Int64:
        """Index of a row."""
        return (Int64(slot) * self.tiles + tile) * self.rows + row

    def column(self, quad: Int32, block: Int32) -> Int32:
        """The first of the eight columns in a block of a row's quad."""
        if not self.of_panels:
            return quad * (QUAD * VECTOR) + block * VECTOR
        return (quad // 4 * 2 + block // 2) * PANEL + quad % 4 * 16 + block % 2 * VECTOR

    def outputs(self, base: cute.Pointer, row: Int64) -> cute.Pointer:
        """Where a row's outputs begin."""
        return base + cute.assume(row * self.columns, divby=self.columns)

    def stats(self, base: cute.Pointer, row: Int64) -> cute.Tensor:
        """A row's statistics, (STATS,)."""
        return cute.make_tensor(base + cute.assume(row * STATS, divby=STATS), cute.make_layout(STATS))

    @property
    def row_words(self) -> int:
        """float32 words that a row takes in a workspace."""
        return self.columns // 2 + STATS

    def views(self, workspace: cute.Tensor) -> tuple[cute.Tensor, cute.Tensor]:
        """(outputs, statistics) in a workspace of `row_words` fp32 a row, aligned to 16 bytes."""
        rows = cute.size(workspace) // self.row_words
        outputs = cute.make_tensor(
            cute.recast_ptr(workspace.iterator, dtype=Float16), cute.make_layout(rows * self.columns)
        )
        behind = workspace.iterator + cute.assume(rows * (self.columns // 2), divby=self.columns // 2)
        return outputs, cute.make_tensor(behind, cute.make_layout(rows * STATS))


class Results(NamedTuple):
    """What attention and combine write, in global memory. out: (b, s, h, k) 16-bit, columns contiguous. lse: (b, h, s)
    fp32, natural log. outputs, stats: fp16 and fp32, `Partials`."""

    out: cute.Tensor
    lse: cute.Tensor
    outputs: cute.Tensor
    stats: cute.Tensor


def exponent_of(magnitude: Float32) -> Int32:
    """The exponent of a sum of magnitudes, MIN_EXPONENT to 127: NaN and inf of a caller's V take the largest."""
    return cutlass.min(cutlass.max((magnitude.bitcast(Int32) >> 23) - 127, MIN_EXPONENT), 127)


def power_of_two(exponent: Int32) -> Float32:
    """2^exponent, for -126 to 127."""
    return ((exponent + 127) << 23).bitcast(Float32)


@cute.jit
def store_stats(stats: cute.Tensor, half: Int32, maximum: Float32, total: Float32, exponent: Int32):
    """Half of a row's statistics. maximum, total: of the running softmax, log2 domain. exponent: of the half."""
    pair = cute.make_rmem_tensor(2, Float32)
    pair[0] = maximum + Float32(exponent - TARGET_EXPONENT)
    pair[1] = total * power_of_two(TARGET_EXPONENT - exponent)
    cute.autovec_copy(pair, cute.zipped_divide(stats, (2,))[None, half])


@cute.jit
def transpose_quad(words: cute.Tensor, lane: Int32):
    """(4,) words of the four lanes of a quad: word i of lane j becomes word j of lane i."""
    for bit in cutlass.range_constexpr(2):
        step = 1 << bit
        odd = (lane >> bit) & 1
        for i in cutlass.range_constexpr(4):
            if cutlass.const_expr(i & step == 0):
                sent = cutlass.select_(odd > 0, words[i], words[i + step])
                came = cute.arch.shuffle_sync_bfly(sent, offset=step)
                words[i] = cutlass.select_(odd > 0, came, words[i])
                words[i + step] = cutlass.select_(odd > 0, words[i + step], came)


@cute.jit
def store_vector(words: cute.Tensor, target: cute.Pointer, inside: cutlass.Boolean):
    """(4,) words, which are 16 bytes, to global memory."""
    if inside:
        vector = cute.make_tensor(cute.recast_ptr(target, dtype=Int32), cute.make_layout(4))
        cute.autovec_copy(words, vector)


def list_request(table: cute.Tensor, request: Int32, count: Int32, base: Int32) -> None:
    """Writes a request's entry of the splits table (`Schedule.table`), which the combine reads: how many splits the
    request has, and the slot of the first one; one thread. table: (2 (b + 1),) int32, global memory."""
    table[2 * request], table[2 * request + 1] = count, base
