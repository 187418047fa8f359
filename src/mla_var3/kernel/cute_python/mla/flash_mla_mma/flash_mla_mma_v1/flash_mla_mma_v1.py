r"""Absorbed MLA decode for every GPU since Ampere (sm_80 and up): warp-level products, cp.async, a tile scheduler on
the device, one barrier for each KV tile.

    out[row, :] = softmax(scale · q[row] · Kᵀ) · V      K = [latent | rope] (t, k + p)    V = latent (t, k)

K and V are one KV tile in shared memory, which is loaded once: `ldmatrix` reads it as the B operand of the scores, and
`ldmatrix.trans` as that of the output. A CTA of eight warps computes a query tile of 16, 32 or 64 rows and KV tiles of
32 tokens, or of 16 where four of 32 do not fit into shared memory. Query rows lie in registers, as A operands.

**Against version 0**, which is retired. There each KV tile has two barriers, and all of the softmax waits for all of
the scores, all of the output for all of the softmax. Here a step works on three KV tiles, so that nothing in it waits
for anything else in it, and one barrier divides the steps:

    warps 0..3   barrier | load i + 2, softmax i | scores i + 1 | output i - 1             | barrier | load i + 3, ..
    warps 4..7   barrier | scores i + 1          | output i - 1 | softmax i                | barrier | scores i + 2, ..

    load      cp.async of the KV tile `stages - 2` further on, in panels of 64 columns: by warps 0 to 3
    softmax   each thread adds up partial sums of scores and keeps a row's running maximum and sum
              | P, and factors of rows whose maximum has moved -> shared memory
    scores    S = Q·Kᵀ: each warp multiplies up to 32 rows by up to 32 tokens over a quarter of the columns
              | partial sums of S -> shared memory
    output    O += P·V: each warp has its own output columns in registers, of all rows

Warps i and i + 4 share a quarter of the SM, so its tensor core multiplies for one while the other one is in its
softmax. Scores, P and factors have two buffers each, and shared memory holds four KV tiles or more: those that a step
computes with, and one that is loaded.

**Few rows and little shared memory.** With 16 rows and KV tiles of 16 tokens a KV tile has a pair of scores for each
thread of four warps, and products take a small part of the time. Then four warps load while the others are in the
softmax, and behind a second barrier all multiply (`Worker.run_few`). A step computes with two KV tiles, so more of the
shared memory is for those that are on their way.

Partial sums of a 16 x 8 product lie as its accumulators do, 16 bytes a lane, so that a warp stores them without moves.
`softmax_place` deals rows to lanes so that half a warp, which reads 8 bytes a lane of these, meets all banks. All
addresses in a loop are one base and constants.

**Registers** decide what ptxas does: with 64 query rows a thread holds 128 of outputs and 72 of Q. Where it has to
spill, it loads the keys of a product right in front of it, and the warp waits. Addresses of the query and of results
were computed ahead of all splits and spilled; `opaque` keeps them where they are used, and ptxas then loads keys two
slices ahead.

The running maximum may stay behind the true one by up to 8 in the log2 domain, a factor of 2^8 (lazy rescale), so that
most KV tiles move it for no row. The barrier tells all warps whether the maximum of any row has moved (PTX
`barrier.red.or`), and O is rescaled only if so.

`split_kv.scheduler` deals requests to workers from their lengths; `split_kv/README.md` says how requests become splits
and how splits become outputs. Behind a split's last tile the first tiles of the worker's next split are loaded while
the results are written. Rows are gathered, each by the page of its token, so pages may have any size.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float16, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync
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
TOKEN_TILES = (16, 32)
SPLIT_TOKENS = 64  # which fixed splits are multiples of
WHOLE = ("sm_80", "sm_90a")  # architectures for which ptxas keeps 64 query rows and their outputs in registers
WIDTHS = (128, 256, 512)  # latent columns
SLICE = warp_mma.K  # columns of a query or key that a product is over
SHARES = 4  # warps that share the columns of the same scores, and partial sums of each
BLOCK = 512  # bytes of the partial sums of 16 rows and 8 tokens, a product's accumulators: 16 a lane
WARP_COLUMNS = 32  # fewest output columns of a warp: a vector of partials has 32
ROW_BYTES = 2 * PANEL  # of a token in a panel
LOAD_ROWS = THREADS // 2 // paged.ROW_LANES  # rows of a KV tile that the warps that load copy at once
PAD = 8  # elements behind a row of P: ldmatrix reads eight rows from all banks
ROOM = 4096  # bytes of shared memory for what a thread keeps of rows, and for alignment
FEWEST_STAGES, MOST_STAGES = 4, 8  # three KV tiles are computed with, and at least one is loaded


class Barrier(IntEnum):
    """Named barriers, of all threads."""

    CTA = 0
    TILE = 1  # between two steps; also tells whether a row's maximum has moved


# ------------------------------------------------------------------------------------------------ what code is made for
@dataclass(frozen=True)
class Geometry:
    """What the code is specialised on: heads, query tokens, columns of latent and rope, tokens of a page, mask. m: rows
    of the query tile; tokens: of a KV tile; stages: KV tiles in shared memory. packed: requests differ in their query
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
    def few(self) -> bool:
        """Whether tiles are so small that a warp multiplies scores of 8 tokens, and that half of the warps have all of
        the softmax (`Worker.run_few`)."""
        return self.m == ROW_TILES[0] and self.tokens == TOKEN_TILES[0]

    @property
    def score_warps(self) -> tuple[int, int]:
        """(warps along the rows, along the tokens) of the scores; of each, `SHARES` along the columns."""
        if self.few:
            return 1, 2
        return (2, 1) if self.m == ROW_TILES[-1] or self.tokens == TOKEN_TILES[0] else (1, 2)

    @property
    def score_shape(self) -> tuple[int, int]:
        """(16-row blocks, 16-token blocks) of a warp's scores; `few`, it has half a block of tokens."""
        of_rows, of_tokens = self.score_warps
        return self.m // of_rows // warp_mma.M, self.tokens // of_tokens // warp_mma.K

    @property
    def token_blocks(self) -> int:
        """8-token blocks of a KV tile."""
        return self.tokens // warp_mma.N

    @property
    def load_rows(self) -> int:
        """Rows of a KV tile that a thread loads."""
        return self.tokens // LOAD_ROWS

    @property
    def buffers(self) -> int:
        """Of partial sums and of P."""
        return 1 if self.few else 2

    @property
    def ahead(self) -> int:
        """How many KV tiles further on the one is that is loaded in a step."""
        return self.stages - 1 if self.few else self.stages - 2

    @property
    def score_elements(self) -> int:
        """Of a KV tile: a partial sum of each share of the columns."""
        return SHARES * self.m * self.tokens

    @property
    def p_elements(self) -> int:
        return self.m * (self.tokens + PAD)

    @property
    def slices(self) -> int:
        """16-column slices of a query or key: what the scores are multiplied over."""
        return (self.k + self.p) // SLICE

    @property
    def warp_slices(self) -> int:
        """Slices of a warp: every so many-th one. The last one may be past the end."""
        return -(-self.slices // SHARES)

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
        return THREADS // self.m // (2 if self.few else 1)

    @property
    def between(self) -> int:
        """8-token blocks of a row that different lanes of the softmax have."""
        return self.row_threads // 4

    @property
    def pairs(self) -> int:
        """Pairs of tokens that a thread has of its row in the softmax: one of every `between`-th block."""
        return self.tokens // (warp_mma.N * self.between)

    @property
    def row_steps(self) -> tuple[int, ...]:
        """Distances of lanes over which the threads of a row add or compare."""
        return (1, 2, 4, 16) if self.between == 4 else (1, 2, 16) if self.between == 2 else (1, 2)

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
        "factor": array(Float32, 2 * m),  # of rows, in a tile that has moved a maximum
        "row_max": array(Float32, m),  # at the end of a split
        "row_sum": array(Float32, m),
        "magnitudes": array(Float32, m * columns),
        "scores": array(Float32, geometry.buffers * geometry.score_elements),  # partial sums
        "p": array(dtype, geometry.buffers * geometry.p_elements),
        "ring": array(dtype, geometry.stages * geometry.stage_elements, 1024),
    }
    # Not a class statement: postponed annotations are strings, and the struct wants types.
    return cute.struct(type("Storage", (), {"__annotations__": fields}))


def fixed_bytes(geometry: Geometry) -> int:
    """Shared memory besides KV tiles: buffers of partial sums of scores and of P, and `ROOM`."""
    return ROOM + geometry.buffers * (4 * geometry.score_elements + 2 * geometry.p_elements)


# ------------------------------------------------------------------------------------------------ device: load
class Reader(NamedTuple):
    """Whose KV tiles a warp loads: a split's request and its length, and the kv head. end: tile behind the split's
    last."""

    request: Int32
    length: Int32
    kv_head: Int32
    end: Int32


def divided(token: Int32, page: int) -> tuple[Int32, Int32]:
    """(page, token in it) of a token, which is not negative."""
    if page & (page - 1):
        return token // page, token % page
    return token >> (page.bit_length() - 1), token & (page - 1)


@cute.jit
def find_pages(inputs: Inputs, of: Reader, tile: Int32, pages: cute.Tensor, geometry: cutlass.Constexpr):
    """Reads the pages of the rows that this thread loads of a tile; of a tile past the split, of its last one. pages:
    registers."""
    first = cutlass.min(tile, of.end - 1) * geometry.tokens + (cute.arch.thread_idx()[0] >> 3)
    for i in cutlass.range_constexpr(geometry.load_rows):
        token = cutlass.min(first + i * LOAD_ROWS, of.length - 1)
        pages[i] = inputs.page_table[of.request, divided(token, geometry.page)[0]]


@cute.jit
def load_tile(
    inputs: Inputs,
    of: Reader,
    stage: Int32,  # shared memory
    tile: Int32,
    pages: cute.Tensor,  # of `find_pages`
    geometry: cutlass.Constexpr,
):
    """Starts copying this thread's rows of a KV tile; of a tile past the split nothing. One group of cp.async. Eight
    threads copy a row, 16 bytes each of every panel. Tokens past the end of the request are the last one again. A
    thread's addresses in the panels differ by constants."""
    cache, width = inputs.cache, cutlass.const_expr(geometry.k + geometry.p)
    thread = cute.arch.thread_idx()[0]
    row, chunk = thread >> 3, thread & (paged.ROW_LANES - 1)
    atom = cute.make_copy_atom(
        cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL), cache.element_type, num_bits_per_copy=128
    )  # fmt: skip
    vector = cute.make_layout(paged.CHUNK)
    if tile < of.end:
        target = stage + row * ROW_BYTES + (chunk ^ (row & 7)) * (2 * paged.CHUNK)
        for j in cutlass.range_constexpr(geometry.load_rows):
            token = cutlass.min(tile * geometry.tokens + row + j * LOAD_ROWS, of.length - 1)
            _, in_page = divided(token, geometry.page)
            offset = (in_page * cache.shape[2] + of.kv_head) * width + chunk * paged.CHUNK
            source = cache.iterator.toint() + 2 * (Int64(pages[j]) * paged.page_stride(cache) + offset)
            for i in cutlass.range_constexpr(geometry.panels):
                at = source + 2 * PANEL * i
                if cutlass.const_expr((i + 1) * PANEL > width):
                    # Where the cache ends inside the panel, its last columns are read again: behind it there may be no
                    # memory.
                    at = at - 2 * cutlass.max((chunk + 1) * paged.CHUNK + PANEL * i - width, 0)
                place = target + i * geometry.panel_bytes + j * LOAD_ROWS * ROW_BYTES
                place = cute.make_ptr(cache.element_type, place, cute.AddressSpace.smem, assumed_align=16)
                origin = cute.make_ptr(cache.element_type, at, cute.AddressSpace.gmem, assumed_align=16)
                cute.copy(atom, cute.make_tensor(origin, vector), cute.make_tensor(place, vector))
    cute.arch.cp_async_commit_group()


# ------------------------------------------------------------------------------------------------ device: one thread
def opaque(value: Int32) -> Int32:
    """The same value, of which the compiler does not know where it is from. What is computed from it is computed here:
    not ahead of a loop, where it would take a register."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value])


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
    pages: Any  # registers: of the rows that this thread loads next
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
            pages=cute.make_rmem_tensor(geometry.load_rows, Int32),
            of_row=cute.make_rmem_tensor(2, Float32),
        )

    def stage(self, number: Int32) -> Int32:
        """Where a KV tile lies in shared memory."""
        return self.storage.ring.data_ptr().toint() + number * (2 * self.geometry.stage_elements)

    def scores_in(self, buffer: Int32) -> Int32:
        """Where partial sums of a KV tile's scores lie in shared memory: (16-row blocks, 8-token blocks, shares,
        lanes of a product, its 4 elements in a lane)."""
        return self.storage.scores.data_ptr().toint() + buffer * (4 * self.geometry.score_elements)

    def p_in(self, buffer: Int32) -> Int32:
        """Where P of a KV tile lies in shared memory: (rows, tokens and `PAD`)."""
        return self.storage.p.data_ptr().toint() + buffer * (2 * self.geometry.p_elements)

    # -------------------------------------------------------------------------------------------- load
    @cute.jit
    def load_query(self, block: rows.Block):
        """The warp's part of the query rows as A operands, from global memory. Rows past the end are the last one
        again: their results are not stored. Slices past the end are zeros."""
        geometry, q = self.geometry, self.inputs.q
        share, lane = self.warp % SHARES, opaque(self.lane)
        row = self.first_row + self.warp // (SHARES * geometry.score_warps[1]) * (geometry.score_shape[0] * warp_mma.M)
        last = block.count * geometry.group - 1
        words = cute.recast_tensor(self.query, Int32)  # (4, rows, slices)
        for i in cutlass.range_constexpr(geometry.score_shape[0]):
            for half in cutlass.range_constexpr(2):
                at = cutlass.min(row + (i * warp_mma.M + 8 * half) + lane // 4, last)
                base = q.iterator + rows.row_offset(q, block.first, self.kv_head, at, geometry.group)
                for n in cutlass.range_constexpr(geometry.warp_slices):
                    slice_ = n * SHARES + share
                    inside = slice_ < geometry.slices
                    column = cutlass.min(slice_, geometry.slices - 1) * SLICE + lane % 4 * 2
                    for part in cutlass.range_constexpr(2):
                        source = base + cute.assume(column + 8 * part, divby=2)
                        word = cute.make_tensor(cute.recast_ptr(source, dtype=Int32), cute.make_layout(1))[0]
                        if cutlass.const_expr(geometry.slices % SHARES):
                            word = cutlass.select_(inside, word, Int32(0))
                        words[half + 2 * part, i, n] = word

    @cute.jit
    def start(self, walk: cutlass.Constexpr, split: Split):
        """Starts loading the first KV tiles of a split (`Geometry.ahead`), and looks up the pages of the next one."""
        geometry, tiles = self.geometry, walk.tiles_of(split)
        if (tiles.first < tiles.end) & self.loads:
            of = Reader(walk.queries.block(split.request).request, split.length, self.kv_head, tiles.end)
            for i in cutlass.range_constexpr(geometry.ahead):
                find_pages(self.inputs, of, tiles.first + i, self.pages, geometry)
                load_tile(self.inputs, of, self.stage(Int32(i)), tiles.first + i, self.pages, geometry)
            find_pages(self.inputs, of, tiles.first + geometry.ahead, self.pages, geometry)

    @property
    def loads(self) -> Boolean:
        """Whether this warp is of the half that loads KV tiles."""
        return self.warp < WARPS // 2

    # -------------------------------------------------------------------------------------------- scores
    @cute.jit
    def scores(self, stage: Int32, buffer: Int32):
        """S = Q·Kᵀ over this warp's slices, to shared memory. buffer: of two."""
        if cutlass.const_expr(self.geometry.few):
            self.scores_of_few(stage, buffer)
        else:
            self.scores_of_blocks(stage, buffer)

    @cute.jit
    def scores_of_few(self, stage: Int32, buffer: Int32):
        """S of 16 rows and 8 tokens. One `ldmatrix` loads the keys of two slices, which lie in two panels."""
        geometry, lane = self.geometry, self.lane
        share, token_warp = self.warp % SHARES, self.warp // SHARES
        matrix, swizzle = lane // 8, lane % 8
        token = token_warp * warp_mma.N + swizzle
        last = self.stage(stage) + token * ROW_BYTES + ((share * 2 + matrix % 2) ^ swizzle) * 16
        keys = last + matrix // 2 * geometry.panel_bytes
        # Two accumulators: a product of one waits for the one before.
        acc = cute.make_rmem_tensor(cute.make_layout((4, 2)), Float32)
        acc.fill(0.0)
        b = cute.make_rmem_tensor(cute.make_layout((4, 2)), self.dtype)
        both = cute.make_tensor(b.iterator, cute.make_layout(warp_mma.OPERANDS))
        for n in cutlass.range_constexpr(geometry.warp_slices):
            if cutlass.const_expr(n % 2 == 0):
                # Behind an odd number of panels lies another KV tile, or nothing: of the last one all lanes read.
                at = cutlass.const_expr(n * geometry.panel_bytes)
                load_matrices((last if cutlass.const_expr(n + 1 == geometry.warp_slices) else keys) + at, both)
            of_slice = acc[None, n % 2]
            cute.mma_atom_call(self.mma, of_slice, self.query[None, 0, n], b[None, n % 2], of_slice)
        total = cute.make_rmem_tensor(4, Float32)
        for i in cutlass.range_constexpr(4):
            total[i] = acc[i, 0] + acc[i, 1]
        target = self.scores_in(buffer) + (token_warp * SHARES + share) * BLOCK + opaque(lane) * 16
        target = cute.make_ptr(Float32, target, cute.AddressSpace.smem, assumed_align=16)
        cute.autovec_copy(total, cute.make_tensor(target, cute.make_layout(4)))

    @cute.jit
    def scores_of_blocks(self, stage: Int32, buffer: Int32):
        """S of blocks of 16 rows and 16 tokens.

        A slice is 32 bytes of a token's row in a panel; a lane's row of a matrix is 16 of them. They lie at chunk ^
        (token % 8) of the row, eight chunks long. A panel has `SHARES` slices, one of each warp.
        """
        geometry, lane = self.geometry, self.lane
        of_tokens, (along_m, along_n) = geometry.score_warps[1], geometry.score_shape
        share, token_warp = self.warp % SHARES, self.warp // SHARES % of_tokens
        row_warp = self.warp // (SHARES * of_tokens)
        matrix, swizzle = lane // 8, lane % 8
        token = token_warp * (along_n * warp_mma.K) + swizzle + matrix // 2 * 8
        keys = self.stage(stage) + token * ROW_BYTES + ((share * 2 + matrix % 2) ^ swizzle) * 16
        blocks = geometry.token_blocks
        first = (row_warp * along_m * blocks + token_warp * (2 * along_n)) * SHARES + share
        target = self.scores_in(buffer) + first * BLOCK + opaque(lane) * 16
        acc = cute.make_rmem_tensor(cute.make_layout((4, along_m, 2)), Float32)
        b = cute.make_rmem_tensor(cute.make_layout((4, 2, 2)), self.dtype)
        steps = cutlass.const_expr(along_n * geometry.warp_slices)
        self.load_keys(keys, b, 0)
        for step in cutlass.range_constexpr(steps):
            j, n = divmod(step, geometry.warp_slices)
            if cutlass.const_expr(step + 1 < steps):
                self.load_keys(keys, b, step + 1)
            if cutlass.const_expr(n == 0):
                acc.fill(0.0)
            for c in cutlass.range_constexpr(2):
                for i in cutlass.range_constexpr(along_m):
                    of_pair = acc[None, i, c]
                    cute.mma_atom_call(self.mma, of_pair, self.query[None, i, n], b[None, c, step % 2], of_pair)
            if cutlass.const_expr(n == geometry.warp_slices - 1):
                for i in cutlass.range_constexpr(along_m):
                    for c in cutlass.range_constexpr(2):
                        place = target + (i * blocks + 2 * j + c) * (SHARES * BLOCK)
                        place = cute.make_ptr(Float32, place, cute.AddressSpace.smem, assumed_align=16)
                        cute.autovec_copy(acc[None, i, c], cute.make_tensor(place, cute.make_layout(4)))

    def load_keys(self, keys: Int32, b: cute.Tensor, step: int) -> None:
        """The keys of a slice and 16 tokens as B operands, to one of two sets of registers."""
        j, n = divmod(step, self.geometry.warp_slices)
        both = cute.make_tensor(b[None, None, step % 2].iterator, cute.make_layout(warp_mma.OPERANDS))
        load_matrices(keys + (n * self.geometry.panel_bytes + j * warp_mma.K * ROW_BYTES), both)

    # -------------------------------------------------------------------------------------------- softmax
    def softmax_place(self) -> tuple[Int32, Int32, Int32, Int32]:
        """(16-row block, row in it, 8-token block, pair in it) of this thread. Lanes are dealt so that those of half a
        warp, which read 8 bytes each of the partial sums, have all banks."""
        geometry, lane = self.geometry, self.lane
        warps = cutlass.const_expr(WARPS * warp_mma.M // geometry.m)  # on a block of rows
        block, part, half, top = self.warp // warps, self.warp % warps, lane // 8 % 2, lane // 16
        if cutlass.const_expr(geometry.few):
            block, part = Int32(0), self.warp % (WARPS // 2)
        if cutlass.const_expr(geometry.between == 1):
            row, token_block = (part ^ half) * 4 + top * 2 + lane // 4 % 2, Int32(0)
        elif cutlass.const_expr(geometry.between == 2):
            row, token_block = (part ^ (half * 2)) * 2 + lane // 4 % 2, top
        else:
            row, token_block = part ^ (half * 4), top * 2 + lane // 4 % 2
        return block, half * 8 + row, token_block, lane % 4

    @cute.jit
    def softmax(self, first_token: Int32, length: Int32, unmasked: Int32, block: rows.Block, buffer: Int32) -> Boolean:
        """P of a KV tile and the factors of its rows, to shared memory. Returns whether this thread's factor is not
        1."""
        geometry = self.geometry
        count = geometry.pairs
        of_block, in_block, token_block, place = self.softmax_place()
        row = of_block * warp_mma.M + in_block
        values = cute.make_rmem_tensor(cute.make_layout((2, count)), Float32)
        part = cute.make_rmem_tensor(2, Float32)
        source = self.scores_in(buffer) + (of_block * geometry.token_blocks + token_block) * (SHARES * BLOCK)
        source = source + (in_block % 8 * 4 + place) * 16 + in_block // 8 * 8
        for v in cutlass.range_constexpr(count):
            for share in cutlass.range_constexpr(SHARES):
                at = source + (v * geometry.between * SHARES + share) * BLOCK
                at = cute.make_ptr(Float32, at, cute.AddressSpace.smem, assumed_align=8)
                cute.autovec_copy(cute.make_tensor(at, cute.make_layout(2)), part)
                for i in cutlass.range_constexpr(2):
                    values[i, v] = part[i] if cutlass.const_expr(share == 0) else values[i, v] + part[i]
        column = token_block * warp_mma.N + place * 2
        if first_token + geometry.tokens > unmasked:
            self.mask(values, row, column, first_token, length, block)

        best = functools.reduce(cute.arch.fmax, [cute.arch.fmax(values[0, v], values[1, v]) for v in range(count)])
        for step in geometry.row_steps:
            best = cute.arch.fmax(best, cute.arch.shuffle_sync_bfly(best, offset=step))
        older = self.of_row[0]
        newer = softmax.lazy_max(older, best * self.scale_log2)
        factor = softmax.exp2(older - newer)
        total = self.of_row[1] * factor
        rounded = cute.make_rmem_tensor(2, self.dtype)
        target = self.p_in(buffer) + row * (2 * (geometry.tokens + PAD)) + 2 * column
        for v in cutlass.range_constexpr(count):
            for i in cutlass.range_constexpr(2):
                value = softmax.exp2(values[i, v] * self.scale_log2 - newer)
                total = total + value
                rounded[i] = value.to(self.dtype)
            at = target + 2 * v * geometry.between * warp_mma.N
            at = cute.make_ptr(self.dtype, at, cute.AddressSpace.smem, assumed_align=4)
            cute.autovec_copy(rounded, cute.make_tensor(at, cute.make_layout(2)))
        self.of_row[0], self.of_row[1] = newer, total
        factors = self.factors_in(buffer)
        if (place == 0) & (token_block == 0):
            factors[row] = factor
        return newer != older

    def factors_in(self, buffer: Int32) -> cute.Tensor:
        """(rows,) shared memory."""
        m = self.geometry.m
        return cute.make_tensor(self.storage.factor.data_ptr() + buffer * m, cute.make_layout(m))

    @cute.jit
    def mask(
        self, values: cute.Tensor, row: Int32, column: Int32, first_token: Int32, length: Int32, block: rows.Block
    ):
        """Sets scores of tokens that the row may not see to -inf. column: of the thread's first one."""
        geometry = self.geometry
        limit, of_token = length - first_token, (self.first_row + row) // geometry.group
        if cutlass.const_expr(geometry.causal):
            limit = limit - block.count + 1 + of_token
        for v in cutlass.range_constexpr(geometry.pairs):
            for i in cutlass.range_constexpr(2):
                at = column + (v * geometry.between * warp_mma.N + i)
                seen = at < limit
                if cutlass.const_expr(self.inputs.mask is not None):
                    s = geometry.s
                    key = first_token + at - (length - s)
                    entry = (block.request * s + cutlass.min(of_token, s - 1)) * s
                    entry = entry + cutlass.min(cutlass.max(key, 0), s - 1)
                    told = cute.make_tensor(self.inputs.mask.iterator + entry, cute.make_layout(1))
                    seen = seen & ((key < 0) | (told[0] != 0))
                values[i, v] = values[i, v] if seen else -Float32.inf

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
    def rescale(self, buffer: Int32):
        """Multiplies the output of each row with the row's factor."""
        factors = self.factors_in(buffer)
        for i in cutlass.range_constexpr(self.geometry.output_shape[0]):
            for half in cutlass.range_constexpr(2):
                self.scale_output(i, half, factors[self.output_row(i, half)])

    @cute.jit
    def output(self, stage: Int32, buffer: Int32):
        """O += P·V of this warp's columns. V is K's panels, read transposed: two matrices of tokens, two of columns."""
        geometry, lane = self.geometry, self.lane
        of_columns = geometry.output_warps[1]
        along_m, along_n = geometry.output_shape
        matrix, swizzle = lane // 8, lane % 8
        column = self.warp % of_columns * (along_n * warp_mma.N)
        token = swizzle + matrix % 2 * 8
        chunk = column % PANEL // 8 + matrix // 2
        values = self.stage(stage) + column // PANEL * geometry.panel_bytes
        values = values + token * ROW_BYTES + (chunk ^ swizzle) * 16
        stride = cutlass.const_expr(2 * (geometry.tokens + PAD))
        row = self.warp // of_columns * (along_m * warp_mma.M) + swizzle + matrix % 2 * 8
        weights = self.p_in(buffer) + row * stride + matrix // 2 * 16

        a = cute.make_rmem_tensor(cute.make_layout((warp_mma.OPERANDS, along_m)), self.dtype)
        b = cute.make_rmem_tensor(cute.make_layout((4, 2, 2)), self.dtype)
        columns = cutlass.const_expr(along_n // 2)
        steps = cutlass.const_expr(geometry.token_blocks // 2 * columns)
        self.load_values(values, b, 0)
        for i in cutlass.range_constexpr(along_m):
            load_matrices(weights + i * warp_mma.M * stride, a[None, i])
        for step in cutlass.range_constexpr(steps):
            n, j = divmod(step, columns)
            if cutlass.const_expr(step + 1 < steps):
                self.load_values(values, b, step + 1)
            for i in cutlass.range_constexpr(along_m):
                for c in cutlass.range_constexpr(2):
                    acc = self.acc_o[None, i, 2 * j + c]
                    cute.mma_atom_call(self.mma, acc, a[None, i], b[None, c, step % 2], acc)
                if cutlass.const_expr(j == columns - 1 and step + 1 < steps):
                    load_matrices(weights + ((n + 1) * 2 * warp_mma.K + i * warp_mma.M * stride), a[None, i])

    def load_values(self, values: Int32, b: cute.Tensor, step: int) -> None:
        """16 tokens of 16 output columns as B operands, to one of two sets of registers."""
        n, j = divmod(step, self.geometry.output_shape[1] // 2)
        both = cute.make_tensor(b[None, None, step % 2].iterator, cute.make_layout(warp_mma.OPERANDS))
        load_matrices((values ^ j * 32) + n * warp_mma.K * ROW_BYTES, both, transposed=True)

    # -------------------------------------------------------------------------------------------- a split
    @cute.jit
    def run(self, of: Reader, first: Int32, unmasked: Int32, block: rows.Block):
        """Tiles first..of.end-1 of a split that `start` has begun. unmasked: keys that every row may see."""
        geometry = self.geometry
        stages = geometry.stages
        self.acc_o.fill(0.0)
        self.of_row[0], self.of_row[1] = Float32(softmax.NO_KEY), Float32(0.0)
        self.load_query(block)
        cute.arch.cp_async_wait_group(stages - 3)
        cute.arch.sync_threads()
        older, stage, buffer, moved = Int32(stages - 1), Int32(0), Int32(0), Boolean(False)
        self.scores(stage, buffer)
        for tile in cutlass.range(first, of.end + 1, unroll=1):
            # Past it the KV tile that scores are computed of is there, what the softmax and the output read has been
            # written, and all warps are done with the KV tile whose stage is filled next.
            cute.arch.cp_async_wait_group(stages - 4)
            rescaled = named_any(Barrier.TILE, THREADS, moved)
            following = cutlass.select_(stage == stages - 1, Int32(0), stage + 1)
            free = cutlass.select_(older == 0, Int32(stages - 1), older - 1)
            token, moved = tile * geometry.tokens, Boolean(False)
            # Warps i and i + 4 share a quarter of the SM: one multiplies while the other one is in its softmax.
            if self.loads:
                load_tile(self.inputs, of, self.stage(free), tile + (stages - 2), self.pages, geometry)
                find_pages(self.inputs, of, tile + (stages - 1), self.pages, geometry)
                if tile < of.end:
                    moved = self.softmax(token, of.length, unmasked, block, buffer)
            if tile + 1 < of.end:
                self.scores(following, 1 - buffer)
            if tile > first:
                if rescaled:
                    self.rescale(1 - buffer)
                self.output(older, 1 - buffer)
            if (self.warp >= WARPS // 2) & (tile < of.end):
                moved = self.softmax(token, of.length, unmasked, block, buffer)
            older, stage, buffer = stage, following, 1 - buffer

    @cute.jit
    def run_few(self, of: Reader, first: Int32, unmasked: Int32, block: rows.Block):
        """As `run`, with two barriers for each KV tile: warps 0 to 3 load while the others are in the softmax, then all
        multiply. So no step needs more than two KV tiles, one buffer of partial sums and one of P."""
        geometry = self.geometry
        stages = geometry.stages
        self.acc_o.fill(0.0)
        self.of_row[0], self.of_row[1] = Float32(softmax.NO_KEY), Float32(0.0)
        self.load_query(block)
        cute.arch.cp_async_wait_group(stages - 2)
        cute.arch.sync_threads()
        stage, free, buffer = Int32(0), Int32(stages - 1), Int32(0)
        self.scores(stage, buffer)
        for tile in cutlass.range(first, of.end, unroll=1):
            # Past it the partial sums of the KV tile are there, and nobody reads the KV tile before.
            cute.arch.sync_threads()
            moved = Boolean(False)
            if self.loads:
                load_tile(self.inputs, of, self.stage(free), tile + (stages - 1), self.pages, geometry)
                find_pages(self.inputs, of, tile + stages, self.pages, geometry)
            else:
                moved = self.softmax(tile * geometry.tokens, of.length, unmasked, block, buffer)
            # Past it P of the KV tile and the next KV tile are there.
            cute.arch.cp_async_wait_group(stages - 2)
            rescaled = named_any(Barrier.TILE, THREADS, moved)
            following = cutlass.select_(stage == stages - 1, Int32(0), stage + 1)
            if tile + 1 < of.end:
                self.scores(following, buffer)
            if rescaled:
                self.rescale(buffer)
            self.output(stage, buffer)
            free, stage = stage, following


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
    for step in geometry.row_steps:
        total = total + cute.arch.shuffle_sync_bfly(total, offset=step)
    maxima, sums = w.rows_in(w.storage.row_max), w.rows_in(w.storage.row_sum)
    of_block, in_block, token_block, place = w.softmax_place()
    tells = (place == 0) & (token_block == 0)
    if cutlass.const_expr(geometry.few):
        tells = tells & (w.warp >= WARPS // 2)
    if tells:
        row = of_block * warp_mma.M + in_block
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
    split_index = SplitIndex(Int32(0), Int32(1))
    if walk.has_work(split):
        w.start(walk, split)
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
            if cutlass.const_expr(geometry.few):
                w.run_few(of, tiles.first, unmasked, block)
            else:
                w.run(of, tiles.first, unmasked, block)
        following = walk.next_split(split)
        cute.arch.sync_threads()  # nobody reads a KV tile or Q any more
        if walk.has_work(following):
            w.start(walk, following)
        else:
            # Let go at a CTA's start, the next call of a short request is there before this one has begun.
            launch_dependents()
        if tiles.first < tiles.end:
            place = walk.place_of(split, tiles)
            # Else addresses of results are computed ahead of all splits, and take registers in the loop of products.
            of_end = replace(w, lane=opaque(w.lane))
            of_rows = share_rows(of_end)
            add = functools.partial(add_partial, of_end, of_rows, results, tile)
            place = walk.merge_few(place, split, tiles, is_cut, add, group, thread)
            split_index, signal = place.split_index, walk.signal_of(place)
            epilogue(of_end, of_rows, results, block, place, tile)
            cute.arch.sync_threads()
            walk.publish(signal, thread)
        else:
            rows.store_no_keys(results, block, of_tile, thread, THREADS)
        split = following
    walk.end(results, split_index, split.request, row_range, group, thread, (8, 1))


@cute.kernel
def flash_mla_mma_v1(
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


flash_mla_mma_v1.set_name_prefix("flash_mla_mma_v1", remove_cutlass_symbol=True, keep_mangled_name=False)


# ------------------------------------------------------------------------------------------------ plan
def takes(pd: MlaProblem) -> Verdict:
    """Whether this version computes a problem."""
    if pd.k not in WIDTHS:
        return Verdict.no(f"k = {pd.k} must be 128, 256 or 512: each of eight warps owns a share of the latent")
    if pd.p % SLICE or pd.p > PANEL:
        return Verdict.no(f"the rope part of p = {pd.p} columns must be a multiple of {SLICE} up to {PANEL}")
    return Verdict.yes()


def written(m: int, tokens: int, k: int) -> bool:
    """Whether eight warps have work in a query tile of m rows and a KV tile: two tokens or more of a row for a thread
    of the softmax, or of half of the warps, and no two warps with the same output columns and rows."""
    return m * tokens >= THREADS and m // warp_mma.M >= WARPS // min(WARPS, k // WARP_COLUMNS)


@dataclass(frozen=True)
class FlashMlaMmaV1Tiling(Tiling):
    """tile_m: rows of the query tile, 16, 32 or 64. tile_n: tokens of a KV tile, 16 or 32. num_pipeline_stages: KV
    tiles in shared memory, at least 4. Of these three 0 is what suits the problem and the shared memory of the device.
    workers: CTAs for each query tile; 0: as many as fill the device. split_tokens: tokens of a split, a multiple of 64,
    so that a request's splits depend on nothing but its length; 0: the scheduler chooses. query_tokens: of packed
    queries, tokens of a block; 0: as many as a tile has rows for."""

    launch_fields: ClassVar[tuple[str, ...]] = ("workers", "split_tokens")

    tile_m: int = 0
    tile_n: int = 0
    num_pipeline_stages: int = 0
    workers: int = 0
    split_tokens: int = 0
    query_tokens: int = 0

    def geometry(self, pd: MlaProblem, device: Device | None = None) -> Geometry:
        """What the code is made for, with everything chosen; device: None for the assumed one."""
        of = device or Device.assumed()

        def made(m: int, tokens: int, stages: int) -> Geometry:
            s = (self.query_tokens or max(1, m // pd.group)) if pd.packed else pd.s
            causal = pd.causal and (pd.packed or s > 1)
            return Geometry(
                pd.h, pd.h_kv, s, pd.k, pd.p, pd.page_size, causal, m, tokens, stages, pd.packed, pd.tree
            )  # fmt: skip

        def stages_of(m: int, tokens: int) -> int:
            bare = made(m, tokens, 0)
            return min(MOST_STAGES, (of.smem_per_block - fixed_bytes(bare)) // (2 * bare.stage_elements))

        query_rows = (self.query_tokens or 1) * pd.group if pd.packed else pd.rows
        most = ROW_TILES[-1] if self.tile_m or of.arch in WHOLE else ROW_TILES[-2]
        pairs = [(m, n) for m in ROW_TILES for n in (32, 16) if self.tile_m in (0, m) and self.tile_n in (0, n)]
        pairs = [(m, n) for m, n in pairs if (m <= most and written(m, n, pd.k)) or (self.tile_m and self.tile_n)]
        fitting = [(m, n) for m, n in pairs if stages_of(m, n) >= (self.num_pipeline_stages or FEWEST_STAGES)]
        enough = [(m, n) for m, n in fitting if m >= query_rows]
        m, tokens = enough[0] if enough else max(fitting or pairs or [(ROW_TILES[-1], TOKEN_TILES[-1])])
        return made(m, tokens, self.num_pipeline_stages or max(0, stages_of(m, tokens)))

    def validate(self, pd: MlaProblem, device: Device | None = None) -> Verdict:
        if self.tile_m not in (0, *ROW_TILES):
            return Verdict.no(f"tile_m = {self.tile_m}, and this version is written for 16, 32 and 64")
        if self.tile_n not in (0, *TOKEN_TILES):
            return Verdict.no(f"tile_n = {self.tile_n}, and this version is written for 16 and 32")
        if self.query_tokens < 0 or (self.query_tokens and not pd.packed):
            return Verdict.no(f"query_tokens = {self.query_tokens} is for packed queries only, and at least 0")
        if not 0 <= self.workers <= scheduler.MOST_WORKERS:
            return Verdict.no(f"workers = {self.workers} must be between 0 and {scheduler.MOST_WORKERS:,}")
        if self.split_tokens < 0 or self.split_tokens % 64:
            return Verdict.no(f"split_tokens = {self.split_tokens} is not a multiple of {SPLIT_TOKENS}")
        if not (taken := takes(pd)):
            return taken
        geometry = self.geometry(pd, device)
        if not written(geometry.m, geometry.tokens, pd.k):
            return Verdict.no(
                f"tile_m = {geometry.m} and tile_n = {geometry.tokens} are too few for eight warps with k = {pd.k}"
            )
        if 0 < self.num_pipeline_stages < FEWEST_STAGES:
            return Verdict.no(
                f"num_pipeline_stages = {self.num_pipeline_stages} leaves no KV tile to load while three are computed "
                f"with: at least {FEWEST_STAGES}"
            )
        of, stages = device or Device.assumed(), max(FEWEST_STAGES, geometry.stages)
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


class FlashMlaMmaV1Plan(KernelPlan):
    """One compiled kernel a problem class and tile; b, lengths, page table width, workers and split_tokens are
    arguments."""

    workload = decode.WORKLOAD
    tiling_type = FlashMlaMmaV1Tiling
    tiling: FlashMlaMmaV1Tiling
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
            return FlashMlaMmaV1Tiling()
        # All of a tile where some have several: of a request in two blocks the cache is read twice, which costs more
        # than rows without a token.
        return FlashMlaMmaV1Tiling(query_tokens=max(1, 32 // pd.group))

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
        version = Version(flash_mla_mma_v1, self.geometry())
        fixed = self.tiling.split_tokens // version.geometry.tokens
        return decode_host.decode_kernel(self, "flash_mla_mma_v1", version, inputs, self.workers(), fixed)

    def plan_empty(self) -> CuteKernel:
        self.require()
        version = Version(flash_mla_mma_v1, self.geometry())
        return decode_host.decode_kernel(self, "flash_mla_mma_v1", version, (), 0, 0)
