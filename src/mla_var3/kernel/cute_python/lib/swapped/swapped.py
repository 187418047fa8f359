"""Swapped operands: tokens on the M side of the MMA, query rows on the N side, so that few rows need no padding to 64.

    Sᵀ (64 tokens x n rows) = K · Qᵀ        Oᵀ (latent columns x n rows) += Vᵀ · P

A 64-token x 64-column panel of the cache is the A operand of both: K-major for the scores, MN-major (transposed) for
the output. What belongs to one query row lies in one accumulator column, so the softmax goes down the columns: over
eight lanes of each warp, and over the four warps through shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from mla_var3.kernel.cute_python.lib import rows
from mla_var3.kernel.cute_python.lib.barriers import named_sync
from mla_var3.kernel.cute_python.lib.latent.lazy import lazy_max
from mla_var3.kernel.cute_python.lib.softmax import exp2
from mla_var3.kernel.cute_python.lib.wgmma import (
    MMA_K,
    MMA_M,
    WARPGROUP,
    acc_row,
    mn_major_layout,
    smem_view,
)

if TYPE_CHECKING:
    from mla_var3.problem import MlaProblem

TOKENS = 64  # of a tile: one warpgroup MMA
PANEL = 64  # columns of a panel: 128 bytes, one row of the shared memory swizzle
WARPS = WARPGROUP // 32
VECTOR = 4  # accumulators of a vector: 16 bytes


@dataclass(frozen=True)
class SwappedShape:
    """What the code is specialised on. tile_n: query rows of a block. consumers: warpgroups. slots: of the ring."""

    h: int
    h_kv: int
    s: int
    k: int
    p: int
    page: int
    causal: bool
    tile_n: int
    consumers: int
    slots: int

    @classmethod
    def of(cls, pd: MlaProblem, tile_n: int, consumers: int, slots: int) -> SwappedShape:
        causal = pd.causal and pd.s > 1
        return cls(pd.h, pd.h_kv, pd.s, pd.k, pd.p, pd.page_size, causal, tile_n, consumers, slots)

    @property
    def group(self) -> int:
        return self.h // self.h_kv

    @property
    def rows(self) -> int:
        return self.s * self.group

    @property
    def row_tiles(self) -> int:
        return -(-self.rows // self.tile_n)

    @property
    def latent_panels(self) -> int:
        return self.k // PANEL

    @property
    def panels(self) -> int:
        return (self.k + self.p) // PANEL

    def finished_by(self, consumer: int) -> tuple[int, ...]:
        """Latent panels of the output that a consumer writes."""
        each = self.latent_panels // self.consumers
        return tuple(range(consumer * each, (consumer + 1) * each))


@cute.jit
def work_range(seq_len: Int32, row_tile: Int32, split: Int32, num_splits: Int32, shape: cutlass.Constexpr):
    """(first tile, end tile, keys that every row of the tile may see) of a split; sizes differ by at most one tile."""
    most = cutlass.max(seq_len, 0)
    least = most
    if cutlass.const_expr(shape.causal):
        last_token = cutlass.min((row_tile * shape.tile_n + shape.tile_n - 1) // shape.group, shape.s - 1)
        first_token = (row_tile * shape.tile_n) // shape.group
        least = cutlass.max(most - shape.s + 1 + first_token, 0)
        most = cutlass.max(most - shape.s + 1 + last_token, 0)
    num_tiles = (most + TOKENS - 1) // TOKENS
    return split * num_tiles // num_splits, (split + 1) * num_tiles // num_splits, least


@cute.jit
def tiles_of(seq_len: Int32, shape: cutlass.Constexpr):
    """(tiles, keys that every query may see) of a request whose rows are all in one tile."""
    _, end, least = work_range(seq_len, Int32(0), Int32(0), Int32(1), shape)
    return end, least


@cute.jit
def part_range(seq_len: Int32, split: Int32, num_splits: Int32, shape: cutlass.Constexpr):
    """(first tile, end tile, keys that every query may see); parts of one size, the last one shorter."""
    end, least = tiles_of(seq_len, shape)
    first = Int32(0)
    if num_splits > 1:  # a division takes a tenth of a microsecond, and the first load waits for it
        each = (end + num_splits - 1) // num_splits
        first = cutlass.min(split * each, end)
        end = cutlass.min(first + each, end)
    return first, end, least


# ------------------------------------------------------------------------------------------------ MMAs
def make_mma(dtype: type, n: int, a_major: OperandMajorMode) -> cute.TiledMma:
    """A 64 x n x 16 tiled MMA of one warpgroup, both operands in shared memory, B K-major, fp32 accumulators."""
    source = warpgroup.OperandSource.SMEM
    op = warpgroup.MmaF16BF16Op(dtype, Float32, (MMA_M, n, MMA_K), source, a_major, OperandMajorMode.K)
    return cute.make_tiled_mma(cute.make_mma_atom(op), (1, 1, 1))


@cute.jit
def issue(
    tiled_mma: cute.TiledMma,
    acc: cute.Tensor,  # registers, (MMA, 1, 1)
    frag_a: cute.Tensor,  # descriptors, (MMA, 1, 4): one panel
    frag_b: cute.Tensor,  # descriptors, (MMA, 1, K)
    first_b: cutlass.Constexpr,
    zero_init: cutlass.Constexpr = False,
):
    """Issues acc (+)= panel · B[first_b .. first_b + 3]; the caller fences before and commits after."""
    atom = cute.make_mma_atom(tiled_mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, not zero_init)
    for i in cutlass.range_constexpr(PANEL // MMA_K):
        cute.gemm(atom, acc, frag_a[None, None, i], frag_b[None, None, first_b + i], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)


def transposed_copy(dtype: type, tiled_mma: cute.TiledMma, n: int, thread: Int32):
    """Stores a 64 x n accumulator, rounded to 16 bits, with its 64 rows contiguous: as a K-major n x 64 panel."""
    atom = cute.make_copy_atom(cute.nvgpu.warp.StMatrix8x8x16bOp(True, 4 if n % 16 == 0 else 2), dtype)
    return cute.make_tiled_copy_C(atom, tiled_mma).get_slice(thread)


def transposed_panel(base: cute.Pointer, offset: int, dtype: type, n: int) -> cute.Tensor:
    """A K-major n x 64 panel in shared memory as (64, n)."""
    return smem_view(base, offset, mn_major_layout(dtype, (PANEL, n)))


# ------------------------------------------------------------------------------------------------ columns
def as_columns(acc: cute.Tensor) -> cute.Tensor:
    """View of an m64nN accumulator (pairs of columns, rows 8 apart, groups of columns) as (N/4 columns, 2 rows)."""
    groups = cute.size(acc) // 4
    return cute.make_tensor(acc.iterator, cute.make_layout(((2, groups), 2), stride=((1, 4), 2)))


def vectors_of(acc: cute.Tensor) -> cute.Tensor:
    """View of an m64nN accumulator as (4, N/8): two columns by two rows each, which go to shared memory at once."""
    return cute.make_tensor(acc.iterator, cute.make_layout((VECTOR, cute.size(acc) // VECTOR), stride=(1, VECTOR)))


def acc_column(thread: Int32, c: int) -> Int32:
    """Tile column that accumulator column c (0 .. N/4 - 1) of a thread holds."""
    return (thread % 4) * 2 + c % 2 + 8 * (c // 2)


@cute.jit
def mask_tokens(
    acc_s: cute.Tensor,
    thread: Int32,
    first_token: Int32,  # of the tile
    seq_len: Int32,
    first_row: Int32,  # of the row tile
    shape: cutlass.Constexpr,
) -> None:
    """Sets scores of tokens that a column's query may not see to -inf."""
    columns = as_columns(acc_s)
    for c in cutlass.range_constexpr(cute.size(columns, mode=[0])):
        limit = seq_len - first_token
        if cutlass.const_expr(shape.causal):
            limit = limit - shape.s + 1 + (first_row + acc_column(thread, c)) // shape.group
        for i in cutlass.range_constexpr(2):
            columns[c, i] = columns[c, i] if acc_row(thread, i) < limit else -Float32.inf


@cute.jit
def over_lanes(value: Float32, largest: cutlass.Constexpr) -> Float32:
    """Maximum or sum over the eight lanes of a warp that share a column."""
    for i in cutlass.range_constexpr(3):
        other = cute.arch.shuffle_sync_bfly(value, offset=4 << i)
        value = cute.arch.fmax(value, other) if cutlass.const_expr(largest) else value + other
    return value


@cute.jit
def publish(values: cute.Tensor, board: cute.Tensor, thread: Int32):
    """Writes a warp's column values (registers, (N/4,)) to its row of `board` (shared memory, (N, warps))."""
    if thread % 32 < 4:
        pairs = cute.make_tensor(board.iterator, cute.make_layout((2, 4, cute.size(values) // 2), stride=(1, 2, 8)))
        pair = cute.make_rmem_tensor(2, Float32)
        for j in cutlass.range_constexpr(cute.size(values) // 2):
            pair[0] = values[2 * j]
            pair[1] = values[2 * j + 1]
            cute.autovec_copy(pair, pairs[None, thread % 4, j])


@cute.jit
def publish_sums(values: cute.Tensor, board: cute.Tensor, thread: Int32):
    """`publish` of the sums of `values` over the eight lanes that share a column; `values` are lost. Each lane is left
    with one column or a half of them, so that lanes send each other what they do not keep: 7 shuffles for 8 columns in
    place of 24."""
    lane, count = thread % 32, cutlass.const_expr(cute.size(values))
    kept = count
    for bit in cutlass.range_constexpr(4, 1, -1):
        upper = (lane >> bit) & 1
        if cutlass.const_expr(kept > 1):
            kept = kept // 2
            for c in cutlass.range_constexpr(kept):
                sent = cutlass.select_(upper > 0, values[c], values[c + kept])
                own = cutlass.select_(upper > 0, values[c + kept], values[c])
                values[c] = own + cute.arch.shuffle_sync_bfly(sent, offset=1 << bit)
        else:
            values[0] = values[0] + cute.arch.shuffle_sync_bfly(values[0], offset=1 << bit)
    each = cutlass.const_expr(32 // 4 // count)  # lanes with the same column
    if lane // 4 % each == 0:
        c = lane // 4 // each
        board[(lane % 4) * 2 + c % 2 + 8 * (c // 2)] = values[0]


@cute.jit
def collect(values: cute.Tensor, board: cute.Pointer, n: cutlass.Constexpr, warps: cutlass.Constexpr, thread: Int32,
            largest: cutlass.Constexpr):  # fmt: skip
    """values[c] = maximum or sum over the `warps` rows of a board (shared memory, n each) of this thread's columns."""
    pair = cute.make_rmem_tensor(2, Float32)
    pairs = cute.make_tensor(board, cute.make_layout((2, 4, n // 8, warps), stride=(1, 2, 8, n)))
    for j in cutlass.range_constexpr(n // 8):
        for i in cutlass.range_constexpr(warps):
            cute.autovec_copy(pairs[None, thread % 4, j, i], pair)
            for e in cutlass.range_constexpr(2):
                if cutlass.const_expr(i == 0):
                    values[2 * j + e] = pair[e]
                elif cutlass.const_expr(largest):
                    values[2 * j + e] = cute.arch.fmax(values[2 * j + e], pair[e])
                else:
                    values[2 * j + e] = values[2 * j + e] + pair[e]


def board_row(board: cute.Pointer, n: int, warp: Int32) -> cute.Tensor:
    """One warp's row of a board."""
    return cute.make_tensor(board + warp * n, cute.make_layout(n))


@cute.jit
def column_softmax(
    acc_s: cute.Tensor,  # registers: scores in, exp2 of them less the new maximum out
    m: cute.Tensor,  # registers, (N/4,): running maximum times scale_log2, updated
    total: cute.Tensor,  # registers, (N/4,): this thread's part of the sums, updated
    factor: cute.Tensor,  # registers, (N/4,): what older sums and outputs must be multiplied with
    board: cute.Pointer,  # shared memory, fp32, (4, n)
    n: cutlass.Constexpr,
    scale_log2: Float32,
    thread: Int32,  # 0..127
    barrier: cutlass.Constexpr,  # named barrier of this warpgroup
    lazy: cutlass.Constexpr = False,  # as for `lib.latent.lazy`: the maximum may lag behind by 2^8
):
    """One step of the online softmax down the columns of a warpgroup's accumulator."""
    columns = as_columns(acc_s)
    count = cutlass.const_expr(n // 4)
    best = cute.make_rmem_tensor(count, Float32)
    for c in cutlass.range_constexpr(count):
        best[c] = over_lanes(cute.arch.fmax(columns[c, 0], columns[c, 1]), True)
    publish(best, board_row(board, n, thread // 32), thread)
    named_sync(barrier, WARPGROUP)
    collect(best, board, n, WARPS, thread, True)
    for c in cutlass.range_constexpr(count):
        new = best[c] * scale_log2
        new = lazy_max(m[c], new) if cutlass.const_expr(lazy) else cute.arch.fmax(m[c], new)
        factor[c] = exp2(m[c] - new)
        m[c] = new
        for i in cutlass.range_constexpr(2):
            columns[c, i] = exp2(columns[c, i] * scale_log2 - new)
        total[c] = total[c] * factor[c] + (columns[c, 0] + columns[c, 1])


@cute.jit
def scale_columns(acc: cute.Tensor, factors: cute.Tensor) -> None:
    """acc[:, c] *= factors[c] for the thread's columns."""
    columns = as_columns(acc)
    for c in cutlass.range_constexpr(cute.size(columns, mode=[0])):
        for i in cutlass.range_constexpr(2):
            columns[c, i] = columns[c, i] * factors[c]


# ------------------------------------------------------------------------------------------------ query rows
def chunk(panels: cute.Pointer, n: int, row: Int32, index: Int32) -> cute.Tensor:
    """16 bytes of a tile of K-major n x 64 panels (128-byte swizzle, base aligned to 1024 bytes)."""
    offset = (index // 8) * (n * PANEL) + row * PANEL + ((index % 8) ^ (row % 8)) * rows.CHUNK
    return cute.make_tensor(panels + cute.assume(offset, divby=rows.CHUNK), cute.make_layout(rows.CHUNK))


@cute.jit
def load_queries(
    query: cute.Tensor,  # (b, s, h, width), global memory
    tile: cute.Pointer,  # shared memory: n x width in panels
    n: cutlass.Constexpr,
    batch: Int32,
    kv_head: Int32,
    first_row: Int32,
    num_rows: cutlass.Constexpr,
    group: cutlass.Constexpr,
    thread: Int32,
    num_threads: cutlass.Constexpr,
):
    """Copies n query rows with 16-byte asynchronous copies and waits for this thread's; rows past the end become
    zeros. The caller fences (async proxy) and joins the threads."""
    width = cutlass.const_expr(query.shape[3])
    per_row = cutlass.const_expr(width // rows.CHUNK)
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(), query.element_type, num_bits_per_copy=128)
    zeros = cute.make_rmem_tensor(rows.CHUNK, query.element_type)
    zeros.fill(0.0)
    for i in cutlass.range_constexpr(-(-n * per_row // num_threads)):
        index = i * num_threads + thread
        row = index // per_row
        if row < n:
            target = chunk(tile, n, row, index % per_row)
            if first_row + row < num_rows:
                source = rows.row_vector(query, batch, kv_head, first_row + row, group, width)
                cute.copy(atom, cute.zipped_divide(source, (rows.CHUNK,))[None, index % per_row], target)
            else:
                cute.autovec_copy(zeros, target)
    cute.arch.cp_async_commit_group()
    cute.arch.cp_async_wait_group(0)


@cute.jit
def store_outputs(
    tile: cute.Pointer,  # shared memory: n x 64 panels, 16-bit
    out: cute.Tensor,  # (b, s, h, width), global memory
    first_panel: Int32,
    num_panels: cutlass.Constexpr,
    n: cutlass.Constexpr,
    batch: Int32,
    kv_head: Int32,
    first_row: Int32,
    num_rows: cutlass.Constexpr,
    group: cutlass.Constexpr,
    thread: Int32,  # 0..127, one warpgroup
):
    """Writes some panels of the n rows, whole rows at a time; rows past the end are skipped."""
    per_row = cutlass.const_expr(num_panels * PANEL // rows.CHUNK)
    width = cutlass.const_expr(out.shape[3])
    value = cute.make_rmem_tensor(rows.CHUNK, out.element_type)
    for i in cutlass.range_constexpr(-(-n * per_row // WARPGROUP)):
        index = i * WARPGROUP + thread
        row = index // per_row
        if row < n and first_row + row < num_rows:
            at = first_panel * (PANEL // rows.CHUNK) + index % per_row
            cute.autovec_copy(chunk(tile, n, row, at), value)
            target = rows.row_vector(out, batch, kv_head, first_row + row, group, width)
            cute.autovec_copy(value, cute.zipped_divide(target, (rows.CHUNK,))[None, at])


@cute.jit
def store_partial(
    acc: cute.Tensor,  # registers: 64 columns x n rows of the output, already divided by the sums
    partial_out: cute.Tensor,  # (splits, b, h_kv, rows, k) fp32, global memory
    partial_lse: cute.Tensor,  # (splits, b, h_kv, rows) fp32, global memory
    panel: cutlass.Constexpr,
    split: Int32,
    batch: Int32,
    kv_head: Int32,
    first_row: Int32,
    num_rows: cutlass.Constexpr,
    thread: Int32,  # 0..127
):
    """Writes accumulators as they lie: eight lanes fill a 32-byte sector of one row."""
    columns = as_columns(acc)
    k = cutlass.const_expr(partial_out.shape[4])
    for c in cutlass.range_constexpr(cute.size(columns, mode=[0])):
        row = first_row + acc_column(thread, c)
        if row < num_rows:
            index = rows.partial_row(partial_lse, split, batch, kv_head, row)
            target = cute.make_tensor(partial_out.iterator + index * k, cute.make_layout(k))
            for i in cutlass.range_constexpr(2):
                target[panel * PANEL + acc_row(thread, i)] = columns[c, i]
