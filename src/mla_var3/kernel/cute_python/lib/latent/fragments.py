"""Parts in the order in which the matrix product leaves them in registers.

The end of a block that makes a part of a result is all latency: nothing else runs on its SM. As a row in memory, a part
is divided by its row's sum, which both consumers have to tell each other, and staged in shared memory. Here a consumer
does neither: it scales its half of a row by a power of two, rounds, and stores, 16 bytes a thread and 512 a warp.

A row group is the eight rows that a warp's threads hold in one half of their accumulators. Of it, vector v of a
consumer is 32 of its columns: thread 4 i + j holds row i and, from each of the columns 32 v + 8 g + 2 j (g = 0 to 3)
on, two. A block's part is (consumer, row group, vector, thread, 8) of fp16.

Turned is the order of a block whose accumulators have query rows for columns (`lib.swapped`). Of a row group, vector
(i, w) is rows i, i + 2, i + 4 and i + 6 in the columns that warp w of the consumer finishes: thread 4 l + j holds row
2 j + i and, from each of its four panels, columns 16 w + l and 16 w + l + 8.

fp16, whatever the output is: the sum of a row's magnitudes is brought to [2^14, 2^15), which bounds its largest
element, and the largest of k / 2 elements is at most 2^8 below. A rounding is 2^-12 of an element that matters, as in
`lib.latent.ending`. The marks of a row, (consumer, 2) of float32: A, its maximum in the log2 domain plus the exponent
that was taken off the consumer's half (-inf without keys), and the sum of the consumer's own probabilities relative to
2^A. So the row's sum of exponentials is that of 2^A times the second mark over the consumers.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Int64

from mla_var3.kernel.cute_python.lib import softmax, wgmma
from mla_var3.kernel.cute_python.lib.latent.shape import TILE_M, Shape
from mla_var3.kernel.cute_python.lib.wgmma import WARPGROUP

GROUP = 8  # rows of a row group
VECTOR = 8  # elements of a thread's vector: 16 bytes
COLUMNS = 4 * VECTOR  # of a vector, over the four threads of a row
MARKS = 4  # float32 of a row: two of each consumer
TOP = 14  # exponent that the sum of a row's magnitudes is brought to
# Exponent of a row that is all zeros, or nearly. Down to a 2^28th of it no precision of fp16 is lost, and sums of
# probabilities relative to it stay in float32's range, also where one half of V is zeros and the other is not.
LEAST = -40
TURNED_ROWS = 4  # of a warp's vector, turned
TURNED_WARPS = 4  # whose vectors a row group has twice, turned


@dataclass(frozen=True)
class Fragments:
    """Sizes of the parts of a problem class."""

    blocks: int  # of a request: row tiles x kv heads
    groups: int  # row groups of a block that are stored
    vectors: int  # of a consumer's row group

    @classmethod
    def of(cls, shape: Shape) -> Fragments:
        rows = min(shape.rows, TILE_M)
        return cls(shape.row_tiles * shape.h_kv, -(-rows // GROUP), shape.half // COLUMNS)

    @property
    def elements(self) -> int:
        """fp16 elements of a block's part."""
        return 2 * self.groups * self.vectors * 32 * VECTOR

    @property
    def marks(self) -> int:
        """float32 of a block's part."""
        return self.groups * GROUP * MARKS

    @property
    def turns(self) -> bool:
        """Whether parts can lie turned: a thread then has a vector of a row."""
        return self.vectors == 2 * TURNED_WARPS


def part_index(index: Int32, kv_head: Int32, row_tile: Int32, shape: Shape) -> Int64:
    """Which part: `index` is split · b + request."""
    return Int64(index) * (shape.row_tiles * shape.h_kv) + kv_head * shape.row_tiles + row_tile


@cute.jit
def row_marks(marks: cute.Pointer, part: Int64, row: Int32, sizes: cutlass.Constexpr) -> cute.Tensor:
    """The marks of a row of the block, (MARKS,)."""
    offset = part * sizes.marks + row * MARKS
    return cute.make_tensor(marks + cute.assume(offset, divby=MARKS), cute.make_layout(MARKS))


@cute.jit
def vector_at(
    parts: cute.Pointer,
    part: Int64,
    consumer: Int32,
    group: Int32,
    vector: Int32,
    lane: Int32,
    sizes: cutlass.Constexpr,
) -> cute.Tensor:
    """A thread's vector, (VECTOR,)."""
    place = ((consumer * sizes.groups + group) * sizes.vectors + vector) * 32 + lane
    offset = part * sizes.elements + place * VECTOR
    return cute.make_tensor(parts + cute.assume(offset, divby=VECTOR), cute.make_layout(VECTOR))


def turned_row(lane: Int32, vector: Int32, sizes: Fragments) -> Int32:
    """The row of a row group that a lane's vector belongs to, turned."""
    return lane % 4 * 2 + vector // (sizes.vectors // 2)


def turned_column(element: Int32, vector: Int32, sizes: Fragments) -> Int32:
    """The column, of a consumer's, from which on the eight lanes with the same lane % 4 hold one each as `element` of
    their vectors, turned."""
    return element // 2 * 64 + vector % (sizes.vectors // 2) * 16 + element % 2 * 8


@cute.jit
def exponent_of(acc_o: cute.Tensor, r: cutlass.Constexpr) -> Int32:
    """The exponent of the sum of the magnitudes of a row, over the four threads that share it; at least LEAST."""
    row = wgmma.as_rows(acc_o)
    sums = cute.make_rmem_tensor(4, Float32)
    sums.fill(0.0)
    for j in cutlass.range_constexpr(cute.size(row, mode=[1])):
        sums[j % 4] = sums[j % 4] + cute.math.absf(row[r, j])
    total = softmax.quad_sum((sums[0] + sums[1]) + (sums[2] + sums[3]))
    return cutlass.max((total.bitcast(Int32) >> 23) - 127, LEAST)


@cute.jit
def bounded_exponent(magnitude: Float32) -> Int32:
    """The exponent of a magnitude, LEAST to 127: NaN and inf of a caller's V take the largest."""
    return cutlass.min(cutlass.max((magnitude.bitcast(Int32) >> 23) - 127, LEAST), 127)


@cute.jit
def power_of_two(exponent: Int32) -> Float32:
    """2^exponent, for -126 to 127."""
    return ((exponent + 127) << 23).bitcast(Float32)


@cute.jit
def store_part(
    registers: tuple[cute.Tensor, cute.Tensor, cute.Tensor],  # of `ending.result_registers`
    parts: cute.Pointer,  # fp16, global memory
    marks: cute.Pointer,  # float32, global memory
    index: Int32,  # split · b + request
    kv_head: Int32,
    row_tile: Int32,
    shape: cutlass.Constexpr,
    thread: Int32,  # 0..255
):
    """This consumer's half of a part; it waits for nobody."""
    acc_o, m, total = registers
    sizes = Fragments.of(shape)
    me, lane = thread // WARPGROUP, thread % WARPGROUP
    part = part_index(index, kv_head, row_tile, shape)
    factor = cute.make_rmem_tensor(2, Float32)
    for r in cutlass.range_constexpr(2):
        total[r] = softmax.quad_sum(total[r])
        exponent = exponent_of(acc_o, r)
        factor[r] = power_of_two(TOP - exponent)
        row = wgmma.acc_row(lane, r)
        if thread % 4 == 0 and row < sizes.groups * GROUP:
            found = cute.make_rmem_tensor(2, Float32)
            found[0], found[1] = m[r] + Float32(exponent - TOP), total[r] * factor[r]
            cute.autovec_copy(found, cute.zipped_divide(row_marks(marks, part, row, sizes), (2,))[None, me])
    wgmma.scale_rows(acc_o, factor)
    words = cute.recast_tensor(wgmma.to_dtype(acc_o, Float16), Int32)  # (half of the rows, 8 columns)
    for r in cutlass.range_constexpr(2):
        group = lane // 32 * 2 + r
        if group < sizes.groups:
            base = vector_at(parts, part, me, group, 0, lane % 32, sizes)
            for v in cutlass.range_constexpr(sizes.vectors):
                values = cute.make_rmem_tensor(VECTOR // 2, Int32)
                for g in cutlass.range_constexpr(VECTOR // 2):
                    values[g] = words[r + 2 * (v * (VECTOR // 2) + g)]
                target = cute.make_tensor(base.iterator + v * (32 * VECTOR), base.layout)
                cute.autovec_copy(cute.recast_tensor(values, Float16), target)


@cute.jit
def store_no_keys(
    marks: cute.Pointer,
    index: Int32,
    kv_head: Int32,
    row_tile: Int32,
    shape: cutlass.Constexpr,
    thread: Int32,  # 0..255
):
    """A part without keys: what makes the combine pass over it."""
    sizes = Fragments.of(shape)
    part = part_index(index, kv_head, row_tile, shape)
    if thread < sizes.groups * GROUP:
        found = cute.make_rmem_tensor(MARKS, Float32)
        for i in cutlass.range_constexpr(MARKS):
            found[i] = Float32(0.0) if cutlass.const_expr(i % 2) else -Float32.inf
        cute.autovec_copy(found, row_marks(marks, part, thread, sizes))
