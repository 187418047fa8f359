r"""Absorbed MLA decode for every GPU since Ampere (sm_80 and up): warp-level products, cp.async, a tile scheduler on
the device.

    out[row, :] = softmax(scale · q[row] · Kᵀ) · V      K = [latent | rope] (t, k + p)    V = latent (t, k)

K and V are one KV tile in shared memory, which is loaded once: `ldmatrix` reads it as the B operand of the scores, and
`ldmatrix.trans` as that of the output. A CTA of eight warps computes a query tile of 16, 32 or 64 rows: 64 on Hopper
only, where ptxas keeps their Q and O in registers. A KV tile has 32 tokens, or 16 where two of 32 do not fit into
shared memory; 64 may be asked for. All warps do the same, one KV tile at a time:

    load      cp.async of the KV tile `stages - 1` further on, in panels of 64 columns
    scores    S = Q·Kᵀ: each warp multiplies up to 32 rows by up to 32 tokens over its share of the columns
              | partial sums of S -> shared memory
    softmax   each thread adds up its part of a row of S and keeps the row's running maximum and sum
              | P, and factors of rows whose maximum has moved -> shared memory
    output    O += P·V: each warp has its own output columns in registers, of all rows

Where shared memory has room for three KV tiles or more, the softmax of one runs beside the scores of the next one, and
the warps fall into two halves, which do these two in opposite order:

    warps 0..3   barrier | softmax i    | scores i + 1 | barrier | output i | barrier | softmax i + 1 | ..
    warps 4..7   barrier | scores i + 1 | softmax i    | barrier | output i | barrier | scores i + 2  | ..

Warps i and i + 4 share a quarter of the SM, so its tensor core multiplies for one while the other one is in its
softmax. Where only two KV tiles fit (GPUs with 99 KB), all warps do scores, softmax and output of a KV tile in turn.

How the scores are divided: a product of one warp is 16 rows by 8 columns, and what a warp reads of Q or K from shared
memory serves one row of such products, or one column. So a warp with 32 x 32 scores reads half as much for each of them
as one with 16 x 16. A tile of 64 x 32 scores is only two warps' work at that size. Therefore four warps share each 32 x
32 scores: each multiplies over a quarter of the columns of Q and K, and has a partial sum of all of these scores. With
32 query rows and 32 tokens two groups of four warps have 16 tokens each. The softmax adds up the partial sums where it
reads them, in fp32 and in a fixed order. So the sums cost their way through shared memory. In return the softmax has
rows in the order that suits it, each row within one warp, and exchanges no maximum between warps.

Query rows lie in registers, in the order of the A operand: a warp needs its share of the columns only. So they take
neither shared memory nor reads of it.

The running maximum may stay behind the true one by up to 8 in the log2 domain, a factor of 2^8 (lazy rescale), so that
most KV tiles move it for no row. The barrier behind the softmax also tells all warps whether the maximum of any row has
moved (PTX `barrier.red.or`), and O is rescaled only if so.

`split_kv.scheduler` deals requests to workers from their lengths; `split_kv/README.md` says how requests become splits
and how splits become outputs. Behind a split's last tile the first tiles of the worker's next split are loaded while
the results are written. Rows are gathered by page (`paged.copy_rows`), so pages may have any size.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float16, Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from mla_var3.device import Device, Requirement
from mla_var3.kernel.cute_python import decode_host, host
from mla_var3.kernel.cute_python.prims import paged, softmax, warp_mma
from mla_var3.kernel.cute_python.prims.paged import PANEL
from mla_var3.kernel.cute_python.prims.sync import grid_wait, launch_dependents, named_any
from mla_var3.kernel.cute_python.prims.warp_mma import load_matrices
from mla_var3.kernel.cute_python.split_kv import combine, partials, rows, scheduler
from mla_var3.kernel.cute_python.split_kv.launch import Inputs, Version
from mla_var3.kernel.cute_python.split_kv.partials import Partials, Results
from mla_var3.kernel.cute_python.split_kv.scheduler import Costs, Pool, Schedule, Split, SplitIndex
from mla_var3.kernel.cute_python.split_kv.walk import Cta, Group, Place, begin
from mla_var3.runtime import CuteKernel, KernelPlan, Tiling, Verdict, limits
from mla_var3.runtime.scaling import any_scale
from mla_var3.workload import decode

if TYPE_CHECKING:
    from mla_var3.workload.decode import MlaProblem

WARPS = 8  # the merge in shares of rows is written for as many threads
WARP = 32
THREADS = WARPS * WARP
ROW_TILES = (16, 32, 64)
TOKEN_TILES = (16, 32, 64)
SCORE_ROWS = 32  # most query rows of a warp in the scores
WIDTHS = (128, 256, 512)  # latent columns
SLICE = warp_mma.K  # columns of a query or key that a product is over
WARP_COLUMNS = 32  # fewest output columns of a warp: a vector of partials has 32
ROW_BYTES = 2 * PANEL  # of a token in a panel
PAD = 8  # elements behind a row of P: ldmatrix reads eight rows from all banks
ROOM = 4096  # bytes of shared memory for what a thread keeps of rows, and for alignment
MOST_STAGES = 6
OVERLAPPED_STAGES = 3  # at least: one KV tile's V, the next one's K, and one that is loaded


class Barrier(IntEnum):
    """Named barriers, of all threads."""

    CTA = 0
    MOVED = 1  # P is in shared memory, and whether a row's maximum has moved


# ------------------------------------------------------------------------------------------------ what code is made for
@dataclass(frozen=True)
class Geometry:
    """What the code is specialised on: heads, query tokens, columns of latent and rope, tokens of a page, mask. m: rows
    of the query tile; tokens: of a KV tile; stages: KV tiles in shared memory. overlapped: whether a KV tile's softmax
    runs beside the scores of the next one. packed: requests differ in their query
    tokens, and s is those of a block (`split_kv.rows`). tree: the caller's mask says which of the newest s keys a query
    token sees."""

    h: int
    h_kv: int
    s: int
    k: int
    p: int
    page: int
    causal: bool
    m: int
    tokens: int
    stages: int
    overlapped: bool
    packed: bool = False
    tree: bool = False

    @property
    def group(self) -> int:
        """Heads that share a cache."""
        return self.h // self.h_kv

    @property
    def rows(self) -> int:
        """Query rows that share a cache."""
        return self.s * self.group

    @property
    def row_tiles(self) -> int:
        return -(-self.rows // self.m)

    @property
    def tiles(self) -> int:
        """Query tiles of a request."""
        return self.row_tiles * self.h_kv

    @property
    def box(self) -> int:
        """No TMA box of the cache: rows are gathered."""
        return 0

    @property
    def threads(self) -> int:
        return THREADS

    @property
    def cluster(self) -> None:
        """CTAs form no cluster."""
        return None

    @property
    def sharing(self) -> int:
        """CTAs that share the loads of a KV tile: each loads for itself."""
        return 1

    @property
    def panels(self) -> int:
        """64-column panels of a cached token. A last one that is not full ends with columns that the query has not."""
        return -(-(self.k + self.p) // PANEL)

    @property
    def stage_elements(self) -> int:
        return self.tokens * PANEL * self.panels

    @property
    def panel_bytes(self) -> int:
        return self.tokens * ROW_BYTES

    # -------------------------------------------------------------------------------------------- shares of warps
    @property
    def score_warps(self) -> tuple[int, int, int]:
        """(warps along the rows, along the tokens, along the columns) of the scores."""
        of_rows = -(-self.m // SCORE_ROWS)
        of_tokens = min(2 // of_rows, self.tokens // 16) if self.tokens < 64 else 2
        return of_rows, of_tokens, WARPS // (of_rows * of_tokens)

    @property
    def score_shape(self) -> tuple[int, int]:
        """(rows, tokens) of a warp's scores, in 16 x 8 products."""
        of_rows, of_tokens, _ = self.score_warps
        return self.m // of_rows // warp_mma.M, self.tokens // of_tokens // warp_mma.N

    @property
    def score_elements(self) -> int:
        """Of a KV tile: a partial sum of each share of the columns."""
        return self.score_warps[2] * self.m * self.tokens

    @property
    def slices(self) -> int:
        """16-column slices of a query or key: what the scores are multiplied over."""
        return (self.k + self.p) // SLICE

    @property
    def warp_slices(self) -> int:
        """Slices of a warp: every so many-th one. The last one may be past the end."""
        return -(-self.slices // self.score_warps[2])

    @property
    def output_warps(self) -> tuple[int, int]:
        """(warps along the rows, along the columns) of the output."""
        of_columns = min(WARPS, self.k // WARP_COLUMNS)
        return WARPS // of_columns, of_columns

    @property
    def output_shape(self) -> tuple[int, int]:
        """(rows, columns) of a warp's output, in 16 x 8 products."""
        of_rows, of_columns = self.output_warps
        return self.m // of_rows // warp_mma.M, self.k // of_columns // warp_mma.N

    @property
    def row_threads(self) -> int:
        """Threads on a row in the softmax."""
        return THREADS // self.m

    @property
    def vector(self) -> int:
        """Tokens that a thread reads together in the softmax."""
        return min(4, self.tokens // self.row_threads)

    @property
    def vectors(self) -> int:
        """Such vectors of a thread."""
        return self.tokens // (self.row_threads * self.vector)

    # -------------------------------------------------------------------------------------------- split-KV
    @property
    def partials(self) -> Partials:
        return Partials(self.tiles, self.m, self.k)

    @property
    def costs(self) -> Costs:
        """In KV tiles. A tile of 32 tokens takes about 1.2 us, a split's begin and end 3 us, and the combine 2 to 3."""
        ratio = 64 // self.tokens
        return Costs(tokens=self.tokens, overhead=1 + ratio, combine=ratio, listed=1 + ratio, level=1 + ratio)

    @property
    def merge(self) -> combine.Merge:
        return combine.Merge(self.h, self.h_kv, self.s, self.partials, self.costs)


def shared_storage(geometry: Geometry, dtype: type) -> type:
    """The CTA's shared memory."""

    def array(kind: type, size: int, align: int = 16) -> Any:
        return cute.struct.Align[cute.struct.MemRange[kind, size], align]

    m, columns = geometry.m, geometry.output_warps[1]
    fields = {
        "first": array(Int32, scheduler.FIRST_WORDS),
        "row_range": array(Int32, 4),  # of a merge that workers share: the first and the end
        "factor": array(Float32, m),  # of rows, in a tile that has moved a maximum
        "row_max": array(Float32, m),  # at the end of a split
        "row_sum": array(Float32, m),
        "magnitudes": array(Float32, m * columns),
        "scores": array(Float32, (1 + geometry.overlapped) * geometry.score_elements),  # partial sums
        "p": array(dtype, m * (geometry.tokens + PAD)),
        "ring": array(dtype, geometry.stages * geometry.stage_elements, 1024),
    }
    # Not a class statement: postponed annotations are strings, and the struct wants types.
    return cute.struct(type("Storage", (), {"__annotations__": fields}))


def fixed_bytes(geometry: Geometry) -> int:
    """Shared memory besides KV tiles: partial sums of scores, P and `ROOM`."""
    of_scores, of_p = (1 + geometry.overlapped) * geometry.score_elements, geometry.m * (geometry.tokens + PAD)
    return ROOM + 4 * of_scores + 2 * of_p


def score_place(row: Int32, column: Int32, tokens: int) -> Int32:
    """Where a score lies in its partial sum. Columns are permuted, so that neither the products' pairs of columns of
    neighbouring rows nor the softmax's vectors meet in a bank."""
    permuted = column ^ ((row & 2) << 2)
    if tokens > 16:
        permuted = permuted ^ ((row & 1) << 4)
    return row * tokens + permuted


# ------------------------------------------------------------------------------------------------ device: load
class Reader(NamedTuple):
    """Whose KV tiles a warp loads: a split's request and its length, and the kv head. end: tile behind the split's
    last."""

    request: Int32
    length: Int32
    kv_head: Int32
    end: Int32


def first_row_of(warp: Int32, geometry: Geometry) -> Int32:
    """The first row of a KV tile that a warp loads."""
    return warp * (geometry.tokens // WARPS) if geometry.tokens >= 4 * WARPS else warp % (geometry.tokens // 4) * 4


@cute.jit
def pages_at(inputs: Inputs, of: Reader, tile: Int32, warp: Int32, geometry: cutlass.Constexpr) -> Int32:
    """The page of the row that this lane looks up for its warp (`paged.row_source_of`); of a tile past the split, that
    of its last one."""
    token = cutlass.min(tile, of.end - 1) * geometry.tokens + first_row_of(warp, geometry) + cute.arch.lane_idx()
    return inputs.page_table[of.request, paged.row_entry_of(token, of.length, geometry.page)]


@cute.jit
def load_tile(
    inputs: Inputs,
    of: Reader,
    stage: cute.Pointer,  # shared memory
    tile: Int32,
    pages: Int32,  # of `pages_at`
    warp: Int32,
    geometry: cutlass.Constexpr,
):
    """Starts copying this warp's rows of a KV tile; of a tile past the split nothing. One group of cp.async."""
    width = geometry.k + geometry.p
    first_row = first_row_of(warp, geometry)
    count = cutlass.const_expr(max(4, geometry.tokens // WARPS))
    # With 16 tokens only half of the warps have rows, and share the panels with the other half.
    shares = cutlass.const_expr(WARPS * count // geometry.tokens)
    if tile < of.end:
        for j in cutlass.range_constexpr(0, count, paged.ROWS):
            token = tile * geometry.tokens + first_row
            source = paged.row_source_of(inputs.cache, pages, token, j, of.length, of.kv_head)
            for i in cutlass.range_constexpr(-(-geometry.panels // shares)):
                panel = Int32(i)
                if cutlass.const_expr(shares > 1):
                    panel = i * shares + warp // (WARPS // shares)
                place = stage + cute.assume(panel * (geometry.tokens * PANEL), divby=geometry.tokens * PANEL)
                if cutlass.const_expr((i + 1) * shares > geometry.panels):
                    if panel < geometry.panels:
                        paged.copy_rows(source, panel * PANEL, width, place, first_row + j)
                else:
                    paged.copy_rows(source, panel * PANEL, width, place, first_row + j)
    cute.arch.cp_async_commit_group()


# ------------------------------------------------------------------------------------------------ device: one thread
@dataclass(frozen=True, eq=False)
class Worker:
    """What a thread of the CTA computes with. thread: 0..255; warp: the same value in all lanes."""

    geometry: Geometry
    inputs: Any
    dtype: Any
    storage: Any
    mma: Any
    thread: Any
    warp: Any
    lane: Any
    scale_log2: Any
    kv_head: Any
    first_row: Any  # of the query tile
    query: Any  # registers: A operands of this warp's slices, (8, rows, slices)
    acc_o: Any  # registers: (4, rows, columns) fp32, in 16 x 8 products
    of_row: Any  # registers: running maximum and this thread's share of the sum of its row in the softmax

    @classmethod
    def make(cls, geometry, inputs, storage, thread, warp, scale_log2, kv_head, first_row) -> Worker:
        dtype = inputs.q.element_type
        of_query = (warp_mma.OPERANDS, geometry.score_shape[0], geometry.warp_slices)
        return cls(
            geometry=geometry,
            inputs=inputs,
            dtype=dtype,
            storage=storage,
            mma=warp_mma.make_mma(dtype),
            thread=thread,
            warp=warp,
            lane=thread % WARP,
            scale_log2=scale_log2,
            kv_head=kv_head,
            first_row=first_row,
            query=cute.make_rmem_tensor(cute.make_layout(of_query), dtype),
            acc_o=cute.make_rmem_tensor(cute.make_layout((4, *geometry.output_shape)), Float32),
            of_row=cute.make_rmem_tensor(2, Float32),
        )

    @property
    def ring(self) -> Any:
        return self.storage.ring.data_ptr()

    def stage(self, number: Int32) -> cute.Pointer:
        size = self.geometry.stage_elements
        return self.ring + cute.assume(number * size, divby=size)

    def scores_in(self, buffer: Int32) -> cute.Pointer:
        """Partial sums of a KV tile's scores, (shares, rows, tokens)."""
        scores, size = self.storage.scores.data_ptr(), self.geometry.score_elements
        return scores + cute.assume(buffer * size, divby=size) if self.geometry.overlapped else scores

    # -------------------------------------------------------------------------------------------- load
    @cute.jit
    def load_query(self, block: rows.Block):
        """The warp's part of the query rows as A operands, from global memory. Rows past the end are the last one
        again: their results are not stored. Slices past the end are zeros."""
        geometry, q = self.geometry, self.inputs.q
        _, of_tokens, of_columns = geometry.score_warps
        share = self.warp % of_columns
        row = self.first_row + self.warp // (of_columns * of_tokens) * (geometry.score_shape[0] * warp_mma.M)
        last = block.count * geometry.group - 1
        words = cute.recast_tensor(self.query, Int32)  # (4, rows, slices)
        for i in cutlass.range_constexpr(geometry.score_shape[0]):
            for half in cutlass.range_constexpr(2):
                at = cutlass.min(row + (i * warp_mma.M + 8 * half) + self.lane // 4, last)
                base = q.iterator + rows.row_offset(q, block.first, self.kv_head, at, geometry.group)
                for n in cutlass.range_constexpr(geometry.warp_slices):
                    slice_ = n * of_columns + share
                    inside = slice_ < geometry.slices
                    column = cutlass.min(slice_, geometry.slices - 1) * SLICE + self.lane % 4 * 2
                    for part in cutlass.range_constexpr(2):
                        source = base + cute.assume(column + 8 * part, divby=2)
                        word = cute.make_tensor(cute.recast_ptr(source, dtype=Int32), cute.make_layout(1))[0]
                        if cutlass.const_expr(geometry.slices % of_columns):
                            word = cutlass.select_(inside, word, Int32(0))
                        words[half + 2 * part, i, n] = word

    @cute.jit
    def start(self, walk: cutlass.Constexpr, split: Split) -> Int32:
        """Starts loading the first `stages - 1` KV tiles of a split. Returns the pages of the next one."""
        geometry, tiles = self.geometry, walk.tiles_of(split)
        pages = Int32(0)
        if tiles.first < tiles.end:
            of = Reader(walk.queries.block(split.request).request, split.length, self.kv_head, tiles.end)
            found = [pages_at(self.inputs, of, tiles.first + i, self.warp, geometry) for i in range(geometry.stages)]
            for i in cutlass.range_constexpr(geometry.stages - 1):
                load_tile(self.inputs, of, self.stage(i), tiles.first + i, found[i], self.warp, geometry)
            pages = found[geometry.stages - 1]
        return pages

    # -------------------------------------------------------------------------------------------- scores
    @cute.jit
    def scores(self, stage: Int32, buffer: Int32):
        """S = Q·Kᵀ over this warp's slices, to shared memory. buffer: of two where they are overlapped.

        A slice is 32 bytes of a token's row in a panel; a lane's row of a matrix is 16 of them. They lie at chunk ^
        (token % 8) of the row, eight chunks long.
        """
        geometry, lane = self.geometry, self.lane
        _, of_tokens, of_columns = geometry.score_warps
        along_m, along_n = geometry.score_shape
        share, token_warp = self.warp % of_columns, self.warp // of_columns % of_tokens
        row_warp = self.warp // (of_columns * of_tokens)
        matrix, swizzle = lane // 8, lane % 8
        chunk = share % 4 * 2
        token = token_warp * (along_n * warp_mma.N) + lane % 8 + matrix // 2 * 8
        keys = self.stage(stage).toint() + token * ROW_BYTES + ((chunk + matrix % 2) ^ swizzle) * 16
        target = self.scores_in(buffer) + share * (geometry.m * geometry.tokens)
        acc = cute.make_rmem_tensor(cute.make_layout((4, along_m, 2)), Float32)
        b = cute.make_rmem_tensor(cute.make_layout((4, 2)), self.dtype)
        both = cute.make_tensor(b.iterator, cute.make_layout(warp_mma.OPERANDS))
        pair = cute.make_rmem_tensor(2, Float32)
        for j in cutlass.range_constexpr(along_n // 2):
            acc.fill(0.0)
            for n in cutlass.range_constexpr(geometry.warp_slices):
                panel, flipped = divmod(n * of_columns, 4)
                panel = Int32(panel)
                if cutlass.const_expr(of_columns == 8):
                    # The last slices of some warps are past the end: zeros of the query, and keys that are there.
                    panel = panel + cutlass.min(share // 4, geometry.panels - 1 - n * of_columns // 4)
                load_matrices((keys ^ flipped * 32) + panel * geometry.panel_bytes + j * 16 * ROW_BYTES, both)
                for i in cutlass.range_constexpr(along_m):
                    for c in cutlass.range_constexpr(2):
                        of_pair = acc[None, i, c]
                        cute.mma_atom_call(self.mma, of_pair, self.query[None, i, n], b[None, c], of_pair)
            for i in cutlass.range_constexpr(along_m):
                for half in cutlass.range_constexpr(2):
                    row = row_warp * (along_m * warp_mma.M) + i * warp_mma.M + half * 8 + lane // 4
                    for c in cutlass.range_constexpr(2):
                        column = token_warp * (along_n * warp_mma.N) + (2 * j + c) * warp_mma.N + lane % 4 * 2
                        pair[0], pair[1] = acc[2 * half, i, c], acc[2 * half + 1, i, c]
                        place = target + cute.assume(score_place(row, column, geometry.tokens), divby=2)
                        cute.autovec_copy(pair, cute.make_tensor(place, cute.make_layout(2)))

    # -------------------------------------------------------------------------------------------- softmax
    @cute.jit
    def softmax(self, first_token: Int32, length: Int32, unmasked: Int32, block: rows.Block, buffer: Int32) -> Boolean:
        """P of a KV tile and the factors of its rows, to shared memory. Returns whether this thread's factor is not
        1."""
        geometry, threads = self.geometry, self.geometry.row_threads
        size, count = geometry.vector, geometry.vectors
        row, place = self.thread // threads, self.thread % threads
        values = cute.make_rmem_tensor(cute.make_layout((size, count)), Float32)
        part = cute.make_rmem_tensor(size, Float32)
        for c in cutlass.range_constexpr(count):
            column = (c * threads + place) * size
            for share in cutlass.range_constexpr(geometry.score_warps[2]):
                source = self.scores_in(buffer) + share * (geometry.m * geometry.tokens)
                source = source + cute.assume(score_place(row, column, geometry.tokens), divby=size)
                cute.autovec_copy(cute.make_tensor(source, cute.make_layout(size)), part)
                for i in cutlass.range_constexpr(size):
                    values[i, c] = part[i] if cutlass.const_expr(share == 0) else values[i, c] + part[i]
        if first_token + geometry.tokens > unmasked:
            self.mask(values, row, place, first_token, length, block)

        best = values[0]
        for i in cutlass.range_constexpr(1, size * count):
            best = cute.arch.fmax(best, values[i])
        for i in cutlass.range_constexpr(threads.bit_length() - 1):
            best = cute.arch.fmax(best, cute.arch.shuffle_sync_bfly(best, offset=1 << i))
        older = self.of_row[0]
        newer = softmax.lazy_max(older, best * self.scale_log2)
        factor = softmax.exp2(older - newer)
        total = self.of_row[1] * factor
        rounded = cute.make_rmem_tensor(size, self.dtype)
        target = self.storage.p.data_ptr() + row * (geometry.tokens + PAD)
        for c in cutlass.range_constexpr(count):
            for i in cutlass.range_constexpr(size):
                value = softmax.exp2(values[i, c] * self.scale_log2 - newer)
                total = total + value
                rounded[i] = value.to(self.dtype)
            at = target + cute.assume((c * threads + place) * size, divby=size)
            cute.autovec_copy(rounded, cute.make_tensor(at, cute.make_layout(size)))
        self.of_row[0], self.of_row[1] = newer, total
        factors = self.rows_in(self.storage.factor)
        if place == 0:
            factors[row] = factor
        return newer != older

    @cute.jit
    def mask(self, values: cute.Tensor, row: Int32, place: Int32, first_token: Int32, length: Int32, block: rows.Block):
        """Sets scores of tokens that the row may not see to -inf."""
        geometry, threads = self.geometry, self.geometry.row_threads
        size, count = geometry.vector, geometry.vectors
        limit, of_token = length - first_token, (self.first_row + row) // geometry.group
        if cutlass.const_expr(geometry.causal):
            limit = limit - block.count + 1 + of_token
        for c in cutlass.range_constexpr(count):
            for i in cutlass.range_constexpr(size):
                column = (c * threads + place) * size + i
                seen = column < limit
                if cutlass.const_expr(self.inputs.mask is not None):
                    s = geometry.s
                    key = first_token + column - (length - s)
                    at = (block.request * s + cutlass.min(of_token, s - 1)) * s
                    at = at + cutlass.min(cutlass.max(key, 0), s - 1)
                    told = cute.make_tensor(self.inputs.mask.iterator + at, cute.make_layout(1))
                    seen = seen & ((key < 0) | (told[0] != 0))
                values[i, c] = values[i, c] if seen else -Float32.inf

    def rows_in(self, array: Any) -> cute.Tensor:
        """(rows,) shared memory."""
        return array.get_tensor(cute.make_layout(self.geometry.m))

    # -------------------------------------------------------------------------------------------- output
    def output_row(self, i: int, half: int) -> Int32:
        """The row of the query tile that this thread's accumulators (2 half .., i, ..) are of."""
        of_columns, along_m = self.geometry.output_warps[1], self.geometry.output_shape[0]
        return self.warp // of_columns * (along_m * warp_mma.M) + i * warp_mma.M + half * 8 + self.lane // 4

    @cute.jit
    def scale_output(self, i: cutlass.Constexpr, half: cutlass.Constexpr, factor: Float32):
        for j in cutlass.range_constexpr(self.geometry.output_shape[1]):
            for c in cutlass.range_constexpr(2):
                self.acc_o[2 * half + c, i, j] = self.acc_o[2 * half + c, i, j] * factor

    @cute.jit
    def rescale(self):
        """Multiplies the output of each row with the row's factor."""
        factors = self.rows_in(self.storage.factor)
        for i in cutlass.range_constexpr(self.geometry.output_shape[0]):
            for half in cutlass.range_constexpr(2):
                self.scale_output(i, half, factors[self.output_row(i, half)])

    @cute.jit
    def output(self, stage: Int32):
        """O += P·V of this warp's columns. V is K's panels, read transposed: two matrices of tokens, two of columns."""
        geometry, lane = self.geometry, self.lane
        of_columns = geometry.output_warps[1]
        along_m, along_n = geometry.output_shape
        matrix, swizzle = lane // 8, lane % 8
        column = self.warp % of_columns * (along_n * warp_mma.N)
        token = lane % 8 + matrix % 2 * 8
        chunk = column % PANEL // 8 + matrix // 2
        values = self.stage(stage).toint() + column // PANEL * geometry.panel_bytes
        values = values + token * ROW_BYTES + (chunk ^ swizzle) * 16
        stride = 2 * (geometry.tokens + PAD)
        row = self.warp // of_columns * (along_m * warp_mma.M) + lane % 8 + matrix % 2 * 8
        weights = self.storage.p.data_ptr().toint() + row * stride + matrix // 2 * 16

        a = cute.make_rmem_tensor(cute.make_layout((warp_mma.OPERANDS, along_m)), self.dtype)
        b = cute.make_rmem_tensor(cute.make_layout((4, 2)), self.dtype)
        both = cute.make_tensor(b.iterator, cute.make_layout(warp_mma.OPERANDS))
        for n in cutlass.range_constexpr(geometry.tokens // warp_mma.K):
            for i in cutlass.range_constexpr(along_m):
                load_matrices(weights + n * 2 * warp_mma.K + i * warp_mma.M * stride, a[None, i])
            for j in cutlass.range_constexpr(along_n // 2):
                load_matrices((values ^ j * 32) + n * warp_mma.K * ROW_BYTES, both, transposed=True)
                for i in cutlass.range_constexpr(along_m):
                    for c in cutlass.range_constexpr(2):
                        acc = self.acc_o[None, i, 2 * j + c]
                        cute.mma_atom_call(self.mma, acc, a[None, i], b[None, c], acc)

    # -------------------------------------------------------------------------------------------- a split
    @cute.jit
    def run(self, of: Reader, first: Int32, unmasked: Int32, pages: Int32, block: rows.Block):
        """Tiles first..of.end-1 of a split that `start` has begun. unmasked: keys that every row may see."""
        geometry = self.geometry
        stages = geometry.stages
        self.acc_o.fill(0.0)
        self.of_row[0], self.of_row[1] = Float32(softmax.NO_KEY), Float32(0.0)
        self.load_query(block)
        stage, buffer = Int32(0), Int32(0)
        if cutlass.const_expr(geometry.overlapped):
            cute.arch.cp_async_wait_group(stages - 2)
            cute.arch.sync_threads()
            self.scores(stage, buffer)
        for tile in cutlass.range(first, of.end, unroll=1):
            # Past it the KV tile that is multiplied next is there, and all warps are done with the tile before this
            # one, whose stage is filled next.
            cute.arch.cp_async_wait_group(stages - 2 - geometry.overlapped)
            cute.arch.sync_threads()
            free = cutlass.select_(stage == 0, Int32(stages - 1), stage - 1)
            load_tile(self.inputs, of, self.stage(free), tile + (stages - 1), pages, self.warp, geometry)
            pages = pages_at(self.inputs, of, tile + stages, self.warp, geometry)
            following = cutlass.select_(stage == stages - 1, Int32(0), stage + 1)
            token, moved = tile * geometry.tokens, Boolean(False)
            if cutlass.const_expr(not geometry.overlapped):
                self.scores(stage, buffer)
                cute.arch.sync_threads()
                moved = self.softmax(token, of.length, unmasked, block, buffer)
            else:
                # Warps i and i + 4 share a quarter of the SM: one is in its softmax while the other one multiplies.
                if self.warp < WARPS // 2:
                    moved = self.softmax(token, of.length, unmasked, block, buffer)
                    if tile + 1 < of.end:
                        self.scores(following, 1 - buffer)
                else:
                    if tile + 1 < of.end:
                        self.scores(following, 1 - buffer)
                    moved = self.softmax(token, of.length, unmasked, block, buffer)
            if named_any(Barrier.MOVED, THREADS, moved):
                self.rescale()
            self.output(stage)
            stage, buffer = following, 1 - buffer


# ------------------------------------------------------------------------------------------------ device: epilogue
@dataclass(frozen=True, eq=False)
class OfRows:
    """Running maximum and sum of the rows that a thread has outputs of, (2, rows) registers each."""

    top: Any
    total: Any


@cute.jit
def share_rows(w: cutlass.Constexpr) -> OfRows:
    """The rows' maxima and sums, from the threads of the softmax to those of the output."""
    geometry = w.geometry
    total = w.of_row[1]
    for i in cutlass.range_constexpr(geometry.row_threads.bit_length() - 1):
        total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << i)
    maxima, sums = w.rows_in(w.storage.row_max), w.rows_in(w.storage.row_sum)
    if w.thread % geometry.row_threads == 0:
        row = w.thread // geometry.row_threads
        maxima[row], sums[row] = w.of_row[0], total
    cute.arch.sync_threads()
    shape = (2, geometry.output_shape[0])
    found = OfRows(*(cute.make_rmem_tensor(cute.make_layout(shape), Float32) for _ in range(2)))
    for i in cutlass.range_constexpr(shape[1]):
        for half in cutlass.range_constexpr(2):
            row = w.output_row(i, half)
            found.top[half, i], found.total[half, i] = maxima[row], sums[row]
    return found


@cute.jit
def add_partial(w: cutlass.Constexpr, of_rows: cutlass.Constexpr, results: Results, tile: Int32, slot: Int32):
    """Adds a partial, whose vectors have what this thread's accumulators have."""
    geometry, layout = w.geometry, w.geometry.partials
    along_m, along_n = geometry.output_shape
    column_warp, of_columns = w.warp % geometry.output_warps[1], geometry.output_warps[1]
    is_right = column_warp >= of_columns // 2
    for i in cutlass.range_constexpr(along_m):
        for half in cutlass.range_constexpr(2):
            index = layout.row(slot, tile, w.output_row(i, half))
            found = cute.make_rmem_tensor(partials.STATS, Float32)
            cute.autovec_copy(layout.stats(results.stats.iterator, index), found)
            older = of_rows.top[half, i]
            top = cute.arch.fmax(older, cute.arch.fmax(found[0], found[2]))
            mine, theirs = softmax.exp2(older - top), (softmax.exp2(found[0] - top), softmax.exp2(found[2] - top))
            added = found[1] * theirs[0] + found[3] * theirs[1]
            of_rows.top[half, i], of_rows.total[half, i] = top, of_rows.total[half, i] * mine + added
            weight = cutlass.select_(is_right, theirs[1], theirs[0])
            source = layout.outputs(results.outputs.iterator, index)
            for n in cutlass.range_constexpr(along_n // partials.QUAD):
                quad = column_warp * (along_n // partials.QUAD) + n
                at = cute.assume((quad * partials.QUAD + w.lane % 4) * partials.VECTOR, divby=partials.VECTOR)
                values = cute.make_rmem_tensor(partials.VECTOR, Float16)
                cute.autovec_copy(cute.make_tensor(source + at, cute.make_layout(partials.VECTOR)), values)
                for j in cutlass.range_constexpr(partials.VECTOR):
                    c, column = 2 * half + j % 2, n * partials.QUAD + j // 2
                    w.acc_o[c, i, column] = w.acc_o[c, i, column] * mine + Float32(values[j]) * weight


@cute.jit
def epilogue(
    w: cutlass.Constexpr,
    of_rows: cutlass.Constexpr,  # `OfRows`
    results: Results,
    block: rows.Block,
    place: Place,  # where the results go
    tile: Int32,  # the query tile, of the request
):
    """Divides whole results by their row sums, or scales a partial one (`split_kv.partials`), and writes them, 16 bytes
    a thread."""
    geometry, layout = w.geometry, w.geometry.partials
    out, lse, outputs, stats = results
    slot, whole = place.slot, place.whole
    along_m, along_n = geometry.output_shape
    of_columns = geometry.output_warps[1]
    column_warp, lane = w.warp % of_columns, w.lane
    factor = cute.make_rmem_tensor(cute.make_layout((2, along_m)), Float32)
    if whole:
        for i in cutlass.range_constexpr(along_m):
            for half in cutlass.range_constexpr(2):
                total, row = of_rows.total[half, i], w.first_row + w.output_row(i, half)
                factor[half, i] = cutlass.select_(total > 0.0, cute.arch.rcp_approx(total), Float32(0.0))
                if column_warp == 0 and lane % 4 == 0 and row < block.count * geometry.group:
                    head, token = w.kv_head * geometry.group + row % geometry.group, row // geometry.group
                    lse[block.first, head, token] = softmax.natural_lse(total, of_rows.top[half, i])
    else:
        layout_of = cute.make_layout((of_columns, geometry.m), stride=(1, of_columns))
        magnitudes = w.storage.magnitudes.get_tensor(layout_of)
        for i in cutlass.range_constexpr(along_m):
            for half in cutlass.range_constexpr(2):
                size = Float32(0.0)
                for j in cutlass.range_constexpr(along_n):
                    for c in cutlass.range_constexpr(2):
                        size = size + cute.math.absf(w.acc_o[2 * half + c, i, j])
                size = softmax.quad_sum(size)
                if lane % 4 == 0:
                    magnitudes[column_warp, w.output_row(i, half)] = size
        cute.arch.sync_threads()
        side = column_warp // (of_columns // 2)
        for i in cutlass.range_constexpr(along_m):
            for half in cutlass.range_constexpr(2):
                size = Float32(0.0)
                for j in cutlass.range_constexpr(of_columns // 2):
                    size = size + magnitudes[side * (of_columns // 2) + j, w.output_row(i, half)]
                exponent = partials.exponent_of(size)
                factor[half, i] = partials.power_of_two(partials.TARGET_EXPONENT - exponent)
                if column_warp % (of_columns // 2) == 0 and lane % 4 == 0:
                    # All of the row's sum is told of its left half.
                    own = cutlass.select_(side == 0, of_rows.total[half, i], Float32(0.0))
                    of_slot = layout.stats(stats.iterator, layout.row(slot, tile, w.output_row(i, half)))
                    partials.store_stats(of_slot, side, of_rows.top[half, i], own, exponent)
    for i in cutlass.range_constexpr(along_m):
        for half in cutlass.range_constexpr(2):
            w.scale_output(i, half, factor[half, i])
            row = w.output_row(i, half)
            base = outputs.iterator.toint() + 2 * layout.row(slot, tile, row) * layout.columns
            if whole:
                at = rows.row_offset(out, block.first, w.kv_head, w.first_row + row, geometry.group)
                base = out.iterator.toint() + 2 * at
            for n in cutlass.range_constexpr(along_n // partials.QUAD):
                words = cute.make_rmem_tensor(partials.QUAD, Int32)
                for j in cutlass.range_constexpr(partials.QUAD):
                    pair = cute.make_rmem_tensor(2, Float32)
                    for c in cutlass.range_constexpr(2):
                        pair[c] = w.acc_o[2 * half + c, i, n * partials.QUAD + j]
                    if whole:
                        words[j] = word_of(pair, out.element_type)
                    else:
                        words[j] = word_of(pair, Float16)
                quad = column_warp * (along_n // partials.QUAD) + n
                column = quad * (partials.QUAD * partials.VECTOR) + lane % 4 * partials.VECTOR
                if whole:
                    partials.transpose_quad(words, lane)
                address = cute.make_ptr(Int32, base + Int64(2 * column), cute.AddressSpace.gmem, assumed_align=16)
                partials.store_vector(words, address, w.first_row + row < block.count * geometry.group)


def word_of(pair: cute.Tensor, dtype: type) -> Int32:
    """Two values, rounded to 16 bits."""
    rounded = cute.make_rmem_tensor(2, dtype)
    rounded.store(pair.load().to(dtype))
    return cute.recast_tensor(rounded, Int32)[0]


# ------------------------------------------------------------------------------------------------ device: the kernel
@cute.jit
def consume(
    w: cutlass.Constexpr,  # `Worker`
    results: Results,
    walk: cutlass.Constexpr,  # `Walk`
    split: Split,
    tile: Int32,  # the query tile, of the request
):
    """All splits of the worker."""
    geometry, thread = w.geometry, w.thread
    of_tile = rows.TileRows(w.kv_head, w.first_row, geometry.group, geometry.m)
    row_range = w.storage.row_range.get_tensor(cute.make_layout(2))
    group = Group(Barrier.CTA, THREADS)
    keyless = walk.line.empty
    if cutlass.const_expr(geometry.packed):
        keyless = walk.table[rows.keyless_place(walk.table)]
    walk.store_empty(results, keyless, of_tile, thread, THREADS)
    split_index, pages = SplitIndex(Int32(0), Int32(1)), Int32(0)
    if walk.has_work(split):
        pages = w.start(walk, split)
    while walk.has_work(split):
        tiles = walk.tiles_of(split)
        block = walk.queries.block(split.request)
        split_index = SplitIndex(Int32(0), Int32(1))
        is_cut = walk.announce(split, tiles, row_range, thread)
        if tiles.first < tiles.end:
            unmasked = cutlass.max(split.length, 0)
            if cutlass.const_expr(geometry.causal):
                unmasked = cutlass.max(unmasked - block.count + 1 + w.first_row // geometry.group, 0)
            elif cutlass.const_expr(geometry.tree):
                unmasked = cutlass.max(unmasked - geometry.s, 0)
            of = Reader(block.request, split.length, w.kv_head, tiles.end)
            w.run(of, tiles.first, unmasked, pages, block)
        following = walk.next_split(split)
        cute.arch.sync_threads()  # nobody reads a KV tile or Q any more
        if walk.has_work(following):
            pages = w.start(walk, following)
        else:
            # Let go at a CTA's start, the next call of a short request is there before this one has begun.
            launch_dependents()
        if tiles.first < tiles.end:
            place = walk.place_of(split, tiles)
            of_rows = share_rows(w)
            add = functools.partial(add_partial, w, of_rows, results, tile)
            place = walk.merge_few(place, split, tiles, is_cut, add, group, thread)
            split_index, signal = place.split_index, walk.signal_of(place)
            epilogue(w, of_rows, results, block, place, tile)
            cute.arch.sync_threads()
            walk.publish(signal, thread)
        else:
            rows.store_no_keys(results, block, of_tile, thread, THREADS)
        split = following
    walk.end(results, split_index, split.request, row_range, group, thread, (8, 1))


@cute.kernel
def flash_mla_mma(
    inputs: Inputs,
    results: Results,  # packed, lse is (first token, h, token behind it)
    flags: cute.Tensor,  # int32, global memory: 0 in front of a launch and behind it
    schedule: Schedule,
    scale_log2: Float32,
    pool: Pool,
    geometry: cutlass.Constexpr,
):
    """The CTA of a query tile (x) and worker (y, from the last one)."""
    thread, _, _ = cute.arch.thread_idx()
    tile, block, _ = cute.arch.block_idx()
    worker = pool.workers - 1 - block  # a worker waits for later ones (README.md), which this way are launched first
    lane, warp = thread % WARP, cute.arch.make_warp_uniform(cute.arch.warp_idx())
    kv_head, first_row = tile // geometry.row_tiles, tile % geometry.row_tiles * geometry.m
    storage = SmemAllocator().allocate(shared_storage(geometry, inputs.q.element_type))
    queries = rows.Queries(geometry.s, schedule.blocks, inputs.mask)
    # Nothing that a kernel before may have written is read, and nothing is written, ahead of this.
    grid_wait()
    walk, split = begin(
        schedule, flags, inputs.seq_lens, queries, pool, Cta(worker, tile, thread, warp, lane),
        storage.first.data_ptr(), 0, geometry.merge,
    )  # fmt: skip
    w = Worker.make(geometry, inputs, storage, thread, warp, scale_log2, kv_head, first_row)
    consume(w, results, walk, split, tile)


flash_mla_mma.set_name_prefix("flash_mla_mma", remove_cutlass_symbol=True, keep_mangled_name=False)


# ------------------------------------------------------------------------------------------------ plan
def takes(pd: MlaProblem) -> Verdict:
    """Whether this version computes a problem."""
    if pd.k not in WIDTHS:
        return Verdict.no(f"k = {pd.k} must be 128, 256 or 512: each of eight warps owns a share of the latent")
    if pd.p % SLICE or pd.p > PANEL:
        return Verdict.no(f"the rope part of p = {pd.p} columns must be a multiple of {SLICE} up to {PANEL}")
    return Verdict.yes()


@dataclass(frozen=True)
class FlashMlaMmaTiling(Tiling):
    """tile_m: rows of the query tile, 16, 32 or 64. tile_n: tokens of a KV tile, 16, 32 or 64. num_pipeline_stages: KV
    tiles in shared memory, at least 2. Of these three 0 is what suits the problem and the shared memory of the device.
    overlap: whether a KV tile's softmax runs beside the scores of the next one, where shared memory has room for that.
    workers: CTAs for each query tile; 0: as many as fill the device. split_tokens: tokens of a split, a multiple of 64,
    so that a request's splits depend on nothing but its length; 0: the scheduler chooses. query_tokens: of packed
    queries, tokens of a block; 0: as many as a tile has rows for."""

    launch_fields: ClassVar[tuple[str, ...]] = ("workers", "split_tokens")

    tile_m: int = 0
    tile_n: int = 0
    num_pipeline_stages: int = 0
    overlap: bool = True
    workers: int = 0
    split_tokens: int = 0
    query_tokens: int = 0

    def geometry(self, pd: MlaProblem, device: Device | None = None) -> Geometry:
        """What the code is made for, with everything chosen; device: None for the assumed one."""
        of = device or Device.assumed()

        def made(m: int, tokens: int, stages: int, overlapped: bool) -> Geometry:
            s = (self.query_tokens or max(1, m // pd.group)) if pd.packed else pd.s
            causal = pd.causal and (pd.packed or s > 1)
            return Geometry(
                pd.h, pd.h_kv, s, pd.k, pd.p, pd.page_size, causal, m, tokens, stages, overlapped, pd.packed, pd.tree
            )  # fmt: skip

        def stages_of(m: int, tokens: int, overlapped: bool) -> int:
            bare = made(m, tokens, 0, overlapped)
            return min(MOST_STAGES, (of.smem_per_block - fixed_bytes(bare)) // (2 * bare.stage_elements))

        fewest = 32 if pd.k < WARPS * WARP_COLUMNS else ROW_TILES[0]  # rows of two warps
        query_rows = (self.query_tokens or 1) * pd.group if pd.packed else pd.rows
        # ptxas keeps Q and O of 64 rows in registers for Hopper, and spills some of Q in the loop elsewhere.
        most = ROW_TILES[-1] if of.arch == "sm_90a" else SCORE_ROWS
        m = self.tile_m or next((m for m in ROW_TILES if m >= max(fewest, query_rows)), most)
        m = m if self.tile_m else min(m, most)
        tokens = self.tile_n or next((n for n in (32, 16) if stages_of(m, n, False) >= 2), 32)
        stages = self.num_pipeline_stages or stages_of(m, tokens, True)
        if not self.overlap or stages < OVERLAPPED_STAGES or stages_of(m, tokens, True) < stages:
            return made(m, tokens, self.num_pipeline_stages or max(0, stages_of(m, tokens, False)), False)
        return made(m, tokens, stages, True)

    def validate(self, pd: MlaProblem, device: Device | None = None) -> Verdict:
        if self.tile_m not in (0, *ROW_TILES):
            return Verdict.no(f"tile_m = {self.tile_m}, and this version is written for 16, 32 and 64")
        if self.tile_n not in (0, *TOKEN_TILES):
            return Verdict.no(f"tile_n = {self.tile_n}, and this version is written for 16, 32 and 64")
        if self.query_tokens < 0 or (self.query_tokens and not pd.packed):
            return Verdict.no(f"query_tokens = {self.query_tokens} is for packed queries only, and at least 0")
        if not 0 <= self.workers <= scheduler.MOST_WORKERS:
            return Verdict.no(f"workers = {self.workers} must be between 0 and {scheduler.MOST_WORKERS:,}")
        if self.split_tokens < 0 or self.split_tokens % TOKEN_TILES[-1]:
            return Verdict.no(f"split_tokens = {self.split_tokens} is not a multiple of {TOKEN_TILES[-1]}")
        if not (taken := takes(pd)):
            return taken
        geometry = self.geometry(pd, device)
        if geometry.m < 2 * warp_mma.M and geometry.output_warps[0] > 1:
            return Verdict.no(f"tile_m = {geometry.m} is too few rows for k = {pd.k}: two warps have the same columns")
        if geometry.tokens < 2 * geometry.row_threads:
            return Verdict.no(
                f"tile_n = {geometry.tokens} is too few tokens for tile_m = {geometry.m}: {geometry.row_threads} "
                "threads share a row, two tokens each at least"
            )
        if self.num_pipeline_stages == 1:
            return Verdict.no("num_pipeline_stages = 1 leaves no KV tile to load while one is computed: at least 2")
        of, stages = device or Device.assumed(), max(2, geometry.stages)
        smem = fixed_bytes(geometry) + 2 * stages * geometry.stage_elements
        if smem > of.smem_per_block:
            return Verdict.no(
                f"{smem:,} bytes of shared memory for {geometry.m} query rows and {stages} KV tiles of "
                f"{geometry.tokens} tokens are over the {of.smem_per_block:,} that a CTA of {of.key} may have"
            )
        if not (counted := limits.decode_sizes(pd)):
            return counted
        workers = self.workers or (max(1, device.num_sms // geometry.tiles) if device is not None else 1)
        requests = rows.most_blocks(pd.query_tokens, pd.b, geometry.s) if pd.packed else pd.b
        tokens, fixed = pd.max_pages * pd.page_size, self.split_tokens // geometry.tokens
        return decode_host.schedule_sizes(requests, tokens, workers, fixed, geometry.partials, geometry.costs)


class FlashMlaMmaPlan(KernelPlan):
    """One compiled kernel a problem class and tile; b, lengths, page table width, workers and split_tokens are
    arguments."""

    workload = decode.WORKLOAD
    tiling_type = FlashMlaMmaTiling
    tiling: FlashMlaMmaTiling
    uses = ("adaptive-tiles", "device-tile-scheduler", "fast-exp2-softmax", "split-kv")
    requires = Requirement(
        archs=("sm_80+",),
        dtypes=("bf16", "fp16"),
        features=("cp_async",),
        problem=takes,
        options=("strided_pages", "packed", "tree", "strided", "strided_out", "no_rope"),
    )

    def default_tiling(self) -> Tiling:
        pd = self.problem
        if not pd.packed or pd.query_tokens <= pd.b:
            return FlashMlaMmaTiling()
        # All of a tile where some have several: of a request in two blocks the cache is read twice, which costs more
        # than rows without a token.
        return FlashMlaMmaTiling(query_tokens=max(1, SCORE_ROWS // pd.group))

    def autotune_configs(self) -> list[Tiling]:
        return [self.default_tiling()]

    def geometry(self) -> Geometry:
        return self.tiling.geometry(self.problem, host.target(self))

    def workers(self) -> int:
        """Workers of a query tile: the tiling's, or those that fill the device."""
        return self.tiling.workers or max(1, host.target(self).num_sms // self.geometry().tiles)

    @any_scale(0)
    def plan(self, *inputs: Any) -> CuteKernel:
        self.require()
        version = Version(flash_mla_mma, self.geometry())
        fixed = self.tiling.split_tokens // version.geometry.tokens
        return decode_host.decode_kernel(self, "flash_mla_mma", version, inputs, self.workers(), fixed)

    def plan_empty(self) -> CuteKernel:
        self.require()
        version = Version(flash_mla_mma, self.geometry())
        return decode_host.decode_kernel(self, "flash_mla_mma", version, (), 0, 0)
