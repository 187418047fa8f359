r"""Absorbed MLA decode for Ampere, Ada and Hopper (sm_80 to sm_90): warp-level products, cp.async, a tile scheduler on
the device, warps of their own for scores and for outputs.

    out[row, :] = softmax(scale · q[row] · Kᵀ) · V      K = [latent | rope] (t, k + p)    V = latent (t, k)

K and V are one KV tile in shared memory, which is loaded once: `ldmatrix` reads it as the B operand of the scores, and
`ldmatrix.trans` as that of the output. A CTA of twelve warps computes a query tile of 64 rows and KV tiles of 32
tokens, or of 16 where three of 32 do not fit into shared memory.

Eight warps compute outputs and four compute scores, three on each quarter of the SM. Two warps of the scores share 32
rows, and each multiplies them over half of the columns. Then each gives the other its partial sums of 16 rows, through
shared memory, and has the scores of its own 16 rows in registers, as it has their maxima and sums. A warp of the output
has 64 columns of all rows.

**Against version 2**, where a warp of the scores multiplies nothing while it is in its softmax: here the softmax of a
KV tile stands between the products of the next one, a step of it behind those of each slice of 16 columns.

    warps 0..7    output    wait FULL i | arrive EMPTY i | O += P·V of KV tile i, copies of tile i + stages - 1
    warps 8..11   scores    wait EMPTY i - 1 | S = Q·Kᵀ of KV tile i + 1, softmax of tile i; half-way arrive FULL i

    copies    cp.async of a KV tile in panels of 64 columns, by the warps of the output, between their products, into
              the stage that the tile before has left
    FULL      P of a KV tile is there, with factors of rows whose maximum has moved and where the rows lie that are
              loaded next; all warps of the output are done with the KV tile before
    EMPTY     the KV tile two further on has arrived, and P of the tile before has been read

So three KV tiles are in work at once, and a fourth one is loaded. FULL i is told when half of the products of KV tile
i + 1 are left, so the scores find EMPTY i told when they are done with them.

**Three stages**, which is what 163 KB hold of 32 tokens and 99 KB of 16, leave no fourth stage. Of 16 tokens a warp of
the output has registers for all that it reads. So it reads that, a barrier of these warps says that no one reads the KV
tile any more, and the copies of the one three further on go there, ahead of the products. With 32 tokens the stage that
the tile before has left is loaded into, ahead of the products too. There is no room then for two buffers of partial
sums and for one more panel of the query, so the softmax stands behind the products as in version 2, and EMPTY, which
says that P of the tile itself has been read, is told behind the output.

**Empty loads.** Ahead of a cp.async that a load from shared memory precedes ptxas puts three empty loads, which take
the way of shared memory too. Copies side by side need them once, so those of a step of 16 tokens are.

**Registers.** With twelve warps a thread has 168. A warp of the output holds 128 of outputs. A warp of the scores would
hold 144 of Q, so it keeps the first panels there, 16 registers each, and reads the others from shared memory in each KV
tile. A warp of the output has none left for a page while it multiplies, so a warp of the scores looks up where rows
lie. From step to step a warp of the output adds to its addresses. If it computed them anew, it would take the thread's
number and some thirty instructions for each KV tile and each 16 tokens, and the products would wait for these.

The running maximum may stay behind the true one by up to 8 in the log2 domain, a factor of 2^8 (lazy rescale), so that
most KV tiles move it for no row. Beside P lies a word of each warp of the scores that says whether the maximum of any
of its rows has moved, and O is rescaled only if so.

`split_kv.scheduler` deals requests to workers from their lengths; `split_kv/README.md` says how requests become splits
and how splits become outputs. Behind a split's last tile the first tiles of the worker's next split are loaded while
the results are written. Rows are gathered, each by the page of its token, so pages may have any size.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
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
from mla_var3.kernel.cute_python.prims.sync import grid_wait, launch_dependents, named_arrive, named_sync
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

WARP = 32
OUTPUT_WARPS, SCORE_WARPS = 8, 4  # the merge in shares of rows is written for as many threads as the first have
OUTPUT_THREADS, SCORE_THREADS = OUTPUT_WARPS * WARP, SCORE_WARPS * WARP
THREADS = OUTPUT_THREADS + SCORE_THREADS
ROWS = SCORE_WARPS * warp_mma.M  # of the query tile
ROW_BLOCKS = ROWS // warp_mma.M
TOKEN_TILES = (32, 16)
SPLIT_TOKENS = 64  # which fixed splits are multiples of
WIDTHS = (256, 512)  # latent columns
SLICE = warp_mma.K  # columns of a query or key that a product is over
PANEL_SLICES = PANEL // SLICE
RESIDENT = {32: 4, 16: 6}  # panels of the query that lie in registers, 16 a panel, by the tokens of a KV tile
RESIDENT_APART = 5  # the same with 32 tokens where the softmax does not overlap, so that no scores are kept meanwhile
ROW_BYTES = 2 * PANEL  # of a token or a query row in a panel
PAD = 8  # elements behind a row of P: ldmatrix reads eight rows from all banks
BUFFERS = 2  # of P
ROOM = 4096  # bytes of shared memory for what a thread keeps of rows, and for alignment
SOFTMAX_STEPS = 4  # besides those for 8-token blocks
FEWEST_STAGES, MOST_STAGES = 3, 8  # of two the output and the scores are computed, and at least one is loaded


class Barrier(IntEnum):
    """Named barriers."""

    CTA = 0
    OUTPUT = 1  # of the warps of the output
    FULL = 2  # + the buffer of P
    EMPTY = 4  # + the buffer of P
    PAIR = 6  # + the number of two warps of the scores that share 32 rows


# ------------------------------------------------------------------------------------------------ what code is made for
@dataclass(frozen=True)
class Geometry:
    """What the code is specialised on: heads, query tokens, columns of latent and rope, tokens of a page, mask. tokens:
    of a KV tile; stages: KV tiles in shared memory. packed: requests differ in their query tokens, and s is those of a
    block (`split_kv.rows`). tree: the caller's mask says which of the newest s keys a query token sees."""

    h: int
    h_kv: int
    s: int
    k: int
    p: int
    page: int
    causal: bool
    tokens: int
    stages: int
    packed: bool = False
    tree: bool = False

    @property
    def overlap(self) -> bool:
        """Whether the softmax of a KV tile stands between the products of the next one's scores. With three stages of
        32 tokens there is no room for what that takes."""
        return self.tokens != TOKEN_TILES[0] or self.stages > FEWEST_STAGES

    @property
    def spread(self) -> bool:
        """Whether the copies of a KV tile stand between the products of the output, else ahead of them."""
        return self.tokens == TOKEN_TILES[0] and self.stages > FEWEST_STAGES

    @property
    def at_once(self) -> bool:
        """Whether a warp of the output has registers for all that it reads of a KV tile. Then copies go to the stage of
        the output's own KV tile, as soon as nobody reads it any more, else to the one that the tile before has left."""
        return self.tokens == warp_mma.K

    @property
    def ahead(self) -> int:
        """How many KV tiles further on the one is that is loaded at an output."""
        return self.stages if self.at_once else self.stages - 1

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
        return -(-self.rows // ROWS)

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

    @property
    def resident(self) -> int:
        """Panels of the query that lie in registers: the first ones. The others lie in shared memory."""
        return min(RESIDENT[self.tokens] if self.overlap else RESIDENT_APART, self.panels)

    @property
    def query_elements(self) -> int:
        """Of the query in shared memory."""
        return ROWS * PANEL * max(1, self.panels - self.resident)

    @property
    def slices(self) -> list[tuple[int, int]]:
        """(panel, which of two) of the 16-column slices that a warp multiplies scores over: half of each panel. Those
        at the same place of their panels come one after another: their addresses differ by constants."""
        return [(panel, i) for i in range(PANEL_SLICES // 2) for panel in range(self.panels)]

    @property
    def softmax_steps(self) -> int:
        """Of a KV tile (`Scores.softmax_step`): with two 8-token blocks of the partner's sums, and with one of P."""
        return SOFTMAX_STEPS + self.token_blocks // 2 + self.token_blocks

    @property
    def exchange_elements(self) -> int:
        """Partial sums of scores that warps give each other, of one KV tile or two."""
        return (BUFFERS if self.overlap else 1) * ROWS * self.tokens

    # -------------------------------------------------------------------------------------------- shares of warps
    @property
    def token_blocks(self) -> int:
        """8-token blocks of a KV tile."""
        return self.tokens // warp_mma.N

    @property
    def ways(self) -> int:
        """Threads that copy the same 16 bytes of a row, each in other panels."""
        return OUTPUT_THREADS // paged.ROW_LANES // self.tokens

    @property
    def copies(self) -> int:
        """Panels that a thread copies 16 bytes of. Some threads have no last one."""
        return -(-self.panels // self.ways)

    @property
    def p_stride(self) -> int:
        """Bytes of a row of P."""
        return 2 * (self.tokens + PAD)

    @property
    def p_elements(self) -> int:
        return ROWS * (self.tokens + PAD)

    @property
    def columns(self) -> int:
        """Output columns of a warp, in 8-column products."""
        return self.k // (OUTPUT_WARPS * warp_mma.N)

    # -------------------------------------------------------------------------------------------- split-KV
    @property
    def partials(self) -> Partials:
        return Partials(self.tiles, ROWS, self.k)

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

    fields = {
        "first": array(Int32, scheduler.FIRST_WORDS),
        "row_range": array(Int32, 4),  # of a merge that workers share: the first and the end
        "moved": array(Int32, BUFFERS * SCORE_WARPS),  # whether a maximum of the warp's rows has
        "sources": array(Int64, BUFFERS * WARP),  # where the rows of the KV tile lie that is loaded next
        "factor": array(Float32, BUFFERS * ROWS),  # of rows, in a tile that has moved a maximum
        "row_max": array(Float32, ROWS),  # at the end of a split
        "row_sum": array(Float32, ROWS),
        "magnitudes": array(Float32, ROWS * OUTPUT_WARPS),
        "p": array(dtype, BUFFERS * geometry.p_elements),
        "exchange": array(Float32, geometry.exchange_elements),
        "query": array(dtype, geometry.query_elements, 1024),
        "ring": array(dtype, geometry.stages * geometry.stage_elements, 1024),
    }
    # Not a class statement: postponed annotations are strings, and the struct wants types.
    return cute.struct(type("Storage", (), {"__annotations__": fields}))


def shared_bytes(geometry: Geometry) -> int:
    """Shared memory: KV tiles, the buffers of P, parts of scores, the query's last panels, and `ROOM`."""
    halves = BUFFERS * geometry.p_elements + geometry.query_elements + geometry.stages * geometry.stage_elements
    return ROOM + 4 * geometry.exchange_elements + 2 * halves


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
def row_source(inputs: Inputs, of: Reader, tile: Int32, row: Int32, geometry: cutlass.Constexpr) -> Int64:
    """Where a row of a KV tile lies in global memory; of a tile past the split, a row of its last one. Tokens past the
    end of the request are the last one again."""
    cache, width = inputs.cache, geometry.k + geometry.p
    token = cutlass.min(cutlass.min(tile, of.end - 1) * geometry.tokens + row, of.length - 1)
    page, in_page = divided(token, geometry.page)
    page = inputs.page_table[of.request, page]
    offset = Int64(page) * paged.page_stride(cache) + (in_page * cache.shape[2] + of.kv_head) * width
    return cache.iterator.toint() + 2 * offset


def loaded_row(geometry: Geometry) -> Int32:
    """The row of a KV tile that this thread of the output loads."""
    return (cute.arch.thread_idx()[0] >> 3) % geometry.tokens


class Copy(NamedTuple):
    """What a thread of the output copies of a KV tile: 16 bytes of a row in every panel, or, where there are more
    threads than that, in every other one. source: address in global memory of those in the first panel; target: where
    they go in shared memory; way: which panels it has, counted from 0."""

    source: Int64
    target: Int32
    way: Int32


def way_of(geometry: Geometry) -> Int32:
    """`Copy.way` of this thread of the output."""
    if geometry.ways == 1:
        return Int32(0)
    return cute.arch.thread_idx()[0] // (paged.ROW_LANES * geometry.tokens)


def source_of(row: Int64, geometry: Geometry) -> Int64:
    """`Copy.source` of this thread. row: `row_source` of the row that it loads."""
    chunk = cute.arch.thread_idx()[0] & (paged.ROW_LANES - 1)
    return row + 2 * (way_of(geometry) * PANEL + chunk * paged.CHUNK)


def target_of(stage: Int32, geometry: Geometry) -> Int32:
    """`Copy.target` of this thread. stage: shared memory. Eight threads copy a row. A thread's addresses in the panels
    differ by constants."""
    row, chunk = loaded_row(geometry), cute.arch.thread_idx()[0] & (paged.ROW_LANES - 1)
    at = stage + way_of(geometry) * geometry.panel_bytes + row * ROW_BYTES
    return at + (chunk ^ (row & 7)) * (2 * paged.CHUNK)


@cute.jit
def copy_last(copy: Copy, dtype: cutlass.Constexpr, geometry: cutlass.Constexpr):
    """Starts copying a thread's last panel, which may not be full, or not be there."""
    width, ways, i = cutlass.const_expr((geometry.k + geometry.p, geometry.ways, geometry.copies - 1))
    at = copy.source + 2 * PANEL * ways * i
    if cutlass.const_expr(geometry.copies * ways * PANEL > width):
        # Where the cache ends inside the panel, its last columns are read again: behind it there may be no memory.
        chunk = cute.arch.thread_idx()[0] & (paged.ROW_LANES - 1)
        column = (copy.way + ways * i) * PANEL + (chunk + 1) * paged.CHUNK
        at = at - 2 * cutlass.max(column - width, 0)
    if cutlass.const_expr(geometry.copies * ways <= geometry.panels):
        copy_chunk(dtype, at, copy.target + ways * i * geometry.panel_bytes)
    elif copy.way + i * ways < geometry.panels:
        copy_chunk(dtype, at, copy.target + ways * i * geometry.panel_bytes)


def copy_chunk(dtype: type, source: Int64, target: Int32) -> None:
    """cp.async of 16 bytes."""
    atom = cute.make_copy_atom(
        cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL), dtype, num_bits_per_copy=128
    )  # fmt: skip
    vector = cute.make_layout(paged.CHUNK)
    place = cute.make_ptr(dtype, target, cute.AddressSpace.smem, assumed_align=16)
    origin = cute.make_ptr(dtype, source, cute.AddressSpace.gmem, assumed_align=16)
    cute.copy(atom, cute.make_tensor(origin, vector), cute.make_tensor(place, vector))


# ------------------------------------------------------------------------------------------------ device: one thread
def opaque(value: Int32) -> Int32:
    """The same value, of which the compiler does not know where it is from. What is computed from it is computed here:
    not ahead of a loop, where it would take a register."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value])


def opaque_wide(value: Int64) -> Int64:
    """`opaque` of 64 bits."""
    return cute.arch.inline_ptx("mov.b64 {$w0}, {$r0};", write_only_types=[Int64], read_only_args=[value])


@dataclass(frozen=True, eq=False)
class Cell:
    """What both kinds of warps know. thread, warp: among those of its kind; warp is the same value in all lanes."""

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

    def stage(self, number: Int32) -> Int32:
        """Where a KV tile lies in shared memory."""
        return self.storage.ring.data_ptr().toint() + number * (2 * self.geometry.stage_elements)

    def p_in(self, buffer: Int32) -> Int32:
        """Where P of a KV tile lies in shared memory: (rows, tokens and `PAD`)."""
        return self.storage.p.data_ptr().toint() + buffer * (2 * self.geometry.p_elements)

    def factors_in(self, buffer: Int32) -> cute.Tensor:
        """(rows,) shared memory."""
        return cute.make_tensor(self.storage.factor.data_ptr() + buffer * ROWS, cute.make_layout(ROWS))

    def moved_in(self, buffer: Int32) -> cute.Tensor:
        """(warps of the scores,) int32, shared memory."""
        start = self.storage.moved.data_ptr() + cute.assume(buffer * SCORE_WARPS, divby=SCORE_WARPS)
        return cute.make_tensor(start, cute.make_layout(SCORE_WARPS))

    def sources_in(self, buffer: Int32) -> cute.Tensor:
        """(rows of a KV tile,) int64, shared memory: `row_source`s."""
        return cute.make_tensor(self.storage.sources.data_ptr() + buffer * WARP, cute.make_layout(WARP))

    def rows_in(self, array: Any) -> cute.Tensor:
        """(rows,) shared memory."""
        return array.get_tensor(cute.make_layout(ROWS))


# ------------------------------------------------------------------------------------------------ device: scores
@dataclass(frozen=True, eq=False)
class Older:
    """The KV tile whose softmax stands between the products of the next one. source: where the rows lie that are loaded
    next; arrives: whether its FULL is told between the products, else by the caller."""

    first_token: Any
    length: Any
    unmasked: Any
    block: Any
    buffer: Any
    source: Any
    arrives: bool


@dataclass(frozen=True, eq=False)
class Scores(Cell):
    """A thread of a warp of the scores, which has 16 rows: those of lane / 4, and 8 further on."""

    me: Any  # the warp's number among those of the scores
    query: Any  # registers: A operands of the resident panels, (8, rows, slices, panels)
    acc: Any  # registers: (4, 8-token blocks) fp32, in 16 x 8 products, of the KV tile that is in the softmax
    part: Any  # registers: (4, 2) of what the partner gives
    newer: Any  # registers: the two rows' maxima behind the KV tile
    factor: Any  # registers: of the two rows; 1 where the maximum has not moved
    row_max: Any  # registers: running maxima of the two rows
    row_sum: Any  # registers: this thread's share of their sums

    @classmethod
    def make(cls, **of_cell: Any) -> Scores:
        geometry, dtype = of_cell["geometry"], of_cell["dtype"]
        of_query = (warp_mma.OPERANDS, 2, PANEL_SLICES // 2, geometry.resident)
        return cls(
            **of_cell,
            me=of_cell["warp"],
            query=cute.make_rmem_tensor(cute.make_layout(of_query), dtype),
            acc=cute.make_rmem_tensor(cute.make_layout((4, geometry.token_blocks)), Float32),
            part=cute.make_rmem_tensor(cute.make_layout((4, 2)), Float32),
            newer=cute.make_rmem_tensor(2, Float32),
            factor=cute.make_rmem_tensor(2, Float32),
            row_max=cute.make_rmem_tensor(2, Float32),
            row_sum=cute.make_rmem_tensor(2, Float32),
        )

    @cute.jit
    def load_query(self, block: rows.Block):
        """The warp's half of 32 query rows as A operands, from global memory: the first panels to registers, and the
        others to shared memory. Its own 16 rows come first, those of its partner behind. Rows past the end are the last
        one again: their results are not stored. Columns past the end are zeros."""
        geometry, q = self.geometry, self.inputs.q
        lane, side, width = opaque(self.lane), self.me % 2, cutlass.const_expr(geometry.k + geometry.p)
        last = block.count * geometry.group - 1
        words = cute.recast_tensor(self.query, Int32)  # (4, rows, slices, panels)
        for i in cutlass.range_constexpr(2):
            for half in cutlass.range_constexpr(2):
                in_tile = (self.me ^ i) * warp_mma.M + (8 * half + lane // 4)
                at = cutlass.min(self.first_row + in_tile, last)
                base = q.iterator + rows.row_offset(q, block.first, self.kv_head, at, geometry.group)
                for n in cutlass.range_constexpr(len(geometry.slices)):
                    panel, j = geometry.slices[n]
                    for part in cutlass.range_constexpr(2):
                        # Of the panel's four slices the warp has two.
                        column = side * (2 * SLICE) + (panel * PANEL + j * SLICE + 8 * part) + lane % 4 * 2
                        source = base + cute.assume(cutlass.min(column, width - 2), divby=2)
                        word = cute.make_tensor(cute.recast_ptr(source, dtype=Int32), cute.make_layout(1))[0]
                        if cutlass.const_expr((panel + 1) * PANEL > width):
                            word = cutlass.select_(column < width, word, Int32(0))
                        if cutlass.const_expr(panel < geometry.resident):
                            words[half + 2 * part, i, j, panel] = word
                        else:
                            chunk = (side * 4 + (2 * j + part)) ^ (lane // 4)
                            place = (panel - geometry.resident) * (ROWS * ROW_BYTES) + in_tile * ROW_BYTES
                            place = self.storage.query.data_ptr().toint() + place + chunk * 16 + lane % 4 * 4
                            place = cute.make_ptr(Int32, place, cute.AddressSpace.smem, assumed_align=4)
                            cute.make_tensor(place, cute.make_layout(1))[0] = word
        cute.arch.sync_warp()

    @cute.jit
    def scores(self, stage: Int32, buffer: Int32, older: Older | None):
        """S = Q·Kᵀ of a KV tile: the warp multiplies 32 rows over half of the columns, and so does its partner over the
        other half. It keeps its own 16 rows, and gives the other ones to its partner. Between the products stand the
        steps of the softmax of the KV tile before, if there is one.

        A slice is 32 bytes of a token's row in a panel; a lane's row of a matrix is 16 of them. They lie at chunk ^
        (token % 8) of the row, eight chunks long. A query row in shared memory lies in the same way.
        """
        geometry, lane = self.geometry, self.lane
        side, matrix, swizzle = self.me % 2, lane // 8, lane % 8
        keys = self.stage(stage) + (swizzle + matrix // 2 * 8) * ROW_BYTES
        keys = keys + ((side * 4 + matrix % 2) ^ swizzle) * 16
        in_block = self.storage.query.data_ptr().toint() + (swizzle + matrix % 2 * 8) * ROW_BYTES
        in_block = in_block + ((side * 4 + matrix // 2) ^ swizzle) * 16
        queries = [in_block + (self.me ^ i) * (warp_mma.M * ROW_BYTES) for i in range(2)]
        pairs = cutlass.const_expr(geometry.token_blocks // 2)
        a = cute.make_rmem_tensor(cute.make_layout((warp_mma.OPERANDS, 2)), self.dtype)
        b = cute.make_rmem_tensor(cute.make_layout((4, 2, pairs)), self.dtype)
        sums = cute.make_rmem_tensor(cute.make_layout((4, geometry.token_blocks, 2)), Float32)
        sums.fill(0.0)
        for n in cutlass.range_constexpr(len(geometry.slices)):
            panel, j = geometry.slices[n]
            for pair in cutlass.range_constexpr(pairs):
                both = cute.make_tensor(b[None, None, pair].iterator, cute.make_layout(warp_mma.OPERANDS))
                load_matrices((keys ^ j * 32) + (panel * geometry.panel_bytes + pair * warp_mma.K * ROW_BYTES), both)
            for i in cutlass.range_constexpr(2):
                if cutlass.const_expr(panel >= geometry.resident):
                    at = (queries[i] ^ j * 32) + (panel - geometry.resident) * (ROWS * ROW_BYTES)
                    load_matrices(at, a[None, i])
                for t in cutlass.range_constexpr(geometry.token_blocks):
                    acc = sums[None, t, i]
                    of_keys = b[None, t % 2, t // 2]
                    if cutlass.const_expr(panel < geometry.resident):
                        cute.mma_atom_call(self.mma, acc, self.query[None, i, j, panel], of_keys, acc)
                    else:
                        cute.mma_atom_call(self.mma, acc, a[None, i], of_keys, acc)
            if cutlass.const_expr(older is not None):
                self.softmax_step(n, older)
        if cutlass.const_expr(older is not None):
            for n in cutlass.range_constexpr(len(geometry.slices), geometry.softmax_steps):
                self.softmax_step(n, older)
        # The partner reads it behind the next barrier, and no one writes here again before all warps of the scores have
        # passed the EMPTY behind that.
        for t in cutlass.range_constexpr(geometry.token_blocks):
            cute.autovec_copy(sums[None, t, 1], self.given(self.me, t, buffer))
        for t in cutlass.range_constexpr(geometry.token_blocks):
            for c in cutlass.range_constexpr(4):
                self.acc[c, t] = sums[c, t, 0]

    def given(self, warp: Int32, t: int, buffer: Int32) -> cute.Tensor:
        """Where a warp leaves this lane's partial sums of an 8-token block of its partner's rows: (4,)."""
        size = 16 * WARP * self.geometry.token_blocks
        place = self.storage.exchange.data_ptr().toint() + self.lane * 16
        if self.geometry.overlap:
            warp = warp + buffer * SCORE_WARPS
        place = cute.make_ptr(
            Float32, place + (warp * size + t * (16 * WARP)), cute.AddressSpace.smem, assumed_align=16
        )  # fmt: skip
        return cute.make_tensor(place, cute.make_layout(4))

    @cute.jit
    def softmax_step(self, n: cutlass.Constexpr, older: Older):
        """The n-th step of the softmax of a KV tile, from the partial sums in registers and the partner's: P and the
        factors of its rows, to shared memory. A step takes about as many instructions as the products of a slice."""
        geometry, lane, blocks = self.geometry, self.lane, cutlass.const_expr(self.geometry.token_blocks)
        loads = cutlass.const_expr(blocks // 2)
        if cutlass.const_expr(0 < n <= loads):
            for i in cutlass.range_constexpr(2):
                for c in cutlass.range_constexpr(4):
                    self.acc[c, 2 * (n - 1) + i] = self.acc[c, 2 * (n - 1) + i] + self.part[c, i]
        if cutlass.const_expr(n < loads):
            for i in cutlass.range_constexpr(2):
                cute.autovec_copy(self.given(self.me ^ 1, 2 * n + i, older.buffer), self.part[None, i])
        if cutlass.const_expr(n == loads):
            if older.first_token + geometry.tokens > older.unmasked:
                self.mask(older.first_token, older.length, older.block)
            for half in cutlass.range_constexpr(2):
                best = self.acc[2 * half, 0]
                for j in cutlass.range_constexpr(blocks):
                    best = cute.arch.fmax(best, cute.arch.fmax(self.acc[2 * half, j], self.acc[2 * half + 1, j]))
                self.newer[half] = cute.arch.fmax(best, cute.arch.shuffle_sync_bfly(best, offset=1))
        if cutlass.const_expr(n == loads + 1):
            for half in cutlass.range_constexpr(2):
                best = self.newer[half]
                best = cute.arch.fmax(best, cute.arch.shuffle_sync_bfly(best, offset=2))
                self.newer[half] = softmax.lazy_max(self.row_max[half], best * self.scale_log2)
        if cutlass.const_expr(n == loads + 2):
            for half in cutlass.range_constexpr(2):
                self.factor[half] = softmax.exp2(self.row_max[half] - self.newer[half])
                self.row_max[half] = self.newer[half]
                self.row_sum[half] = self.row_sum[half] * self.factor[half]
        first = cutlass.const_expr(loads + SOFTMAX_STEPS - 1)
        if cutlass.const_expr(first <= n < first + blocks):
            for half in cutlass.range_constexpr(2):
                self.weights(half, n - first, older.buffer)
        if cutlass.const_expr(n == first + blocks):
            factors, moved = self.factors_in(older.buffer), self.moved_in(older.buffer)
            any_moves = Int32(cute.arch.vote_any_sync((self.factor[0] != 1.0) | (self.factor[1] != 1.0)))
            if lane == 0:
                moved[self.me] = any_moves
            if (any_moves != 0) & (lane % 4 == 0):
                for half in cutlass.range_constexpr(2):
                    factors[self.row(half)] = self.factor[half]
            sources = self.sources_in(older.buffer)
            if self.me == 0:
                sources[self.lane] = older.source
            if cutlass.const_expr(older.arrives):
                cute.arch.barrier_arrive(
                    barrier_id=int(Barrier.FULL) + older.buffer, number_of_threads=THREADS
                )  # fmt: skip

    @cute.jit
    def weights(self, half: cutlass.Constexpr, j: cutlass.Constexpr, buffer: Int32):
        """P of an 8-token block of one of the two rows, to shared memory."""
        geometry, lane = self.geometry, self.lane
        target = self.p_in(buffer) + (self.me * warp_mma.M + lane // 4) * geometry.p_stride + lane % 4 * 4
        rounded = cute.make_rmem_tensor(2, self.dtype)
        for c in cutlass.range_constexpr(2):
            value = softmax.exp2(self.acc[2 * half + c, j] * self.scale_log2 - self.newer[half])
            self.row_sum[half] = self.row_sum[half] + value
            rounded[c] = value.to(self.dtype)
        at = target + (8 * half * geometry.p_stride + 2 * warp_mma.N * j)
        at = cute.make_ptr(self.dtype, at, cute.AddressSpace.smem, assumed_align=4)
        cute.autovec_copy(rounded, cute.make_tensor(at, cute.make_layout(2)))

    def row(self, half: int) -> Int32:
        """The row of the query tile that this thread's accumulators (2 half .., ..) are of."""
        return self.me * warp_mma.M + half * 8 + self.lane // 4

    @cute.jit
    def mask(self, first_token: Int32, length: Int32, block: rows.Block):
        """Sets scores of tokens that the row may not see to -inf."""
        geometry, of_mask = self.geometry, self.inputs.mask
        column = self.lane % 4 * 2
        for half in cutlass.range_constexpr(2):
            limit = length - first_token
            of_token = (self.first_row + self.row(half)) // geometry.group
            if cutlass.const_expr(geometry.causal):
                limit = limit - block.count + 1 + of_token
            for j in cutlass.range_constexpr(geometry.token_blocks):
                for c in cutlass.range_constexpr(2):
                    at = column + (j * warp_mma.N + c)
                    seen = at < limit
                    if cutlass.const_expr(of_mask is not None):
                        s = geometry.s
                        key = first_token + at - (length - s)
                        entry = (block.request * s + cutlass.min(of_token, s - 1)) * s
                        entry = entry + cutlass.min(cutlass.max(key, 0), s - 1)
                        told = cute.make_tensor(of_mask.iterator + entry, cute.make_layout(1))
                        seen = seen & ((key < 0) | (told[0] != 0))
                    self.acc[2 * half + c, j] = self.acc[2 * half + c, j] if seen else -Float32.inf

    @cute.jit
    def run(self, of: Reader, first: Int32, unmasked: Int32, block: rows.Block):
        """Tiles first..of.end-1 of a split. unmasked: keys that every row may see."""
        geometry = self.geometry
        self.row_max.fill(softmax.NO_KEY)
        self.row_sum.fill(0.0)
        self.load_query(block)
        if cutlass.const_expr(geometry.overlap):
            self.run_overlapped(of, first, unmasked, block)
        else:
            self.run_apart(of, first, unmasked, block)

    @cute.jit
    def run_overlapped(self, of: Reader, first: Int32, unmasked: Int32, block: rows.Block):
        """The softmax of a KV tile between the products of the next one."""
        stage, buffer, stages = Int32(0), Int32(0), cutlass.const_expr(self.geometry.stages)
        cute.arch.barrier(barrier_id=int(Barrier.EMPTY), number_of_threads=THREADS)
        self.scores(stage, buffer, None)
        for tile in cutlass.range(first, of.end - 1, unroll=1):
            stage = cutlass.select_(stage == stages - 1, Int32(0), stage + 1)
            cute.arch.barrier(barrier_id=int(Barrier.EMPTY) + (1 - buffer), number_of_threads=THREADS)
            self.scores(stage, 1 - buffer, self.older(of, tile, unmasked, block, buffer, True))
            buffer = 1 - buffer
        cute.arch.barrier(barrier_id=int(Barrier.EMPTY) + (1 - buffer), number_of_threads=THREADS)
        self.softmax(self.older(of, of.end - 1, unmasked, block, buffer, False))
        self.end()
        cute.arch.barrier_arrive(barrier_id=int(Barrier.FULL) + buffer, number_of_threads=THREADS)

    @cute.jit
    def run_apart(self, of: Reader, first: Int32, unmasked: Int32, block: rows.Block):
        """The softmax of a KV tile behind its products."""
        stage, buffer, stages = Int32(0), Int32(0), cutlass.const_expr(self.geometry.stages)
        for tile in cutlass.range(first, of.end, unroll=1):
            cute.arch.barrier(barrier_id=int(Barrier.EMPTY) + buffer, number_of_threads=THREADS)
            this = self.older(of, tile, unmasked, block, buffer, False)
            self.scores(stage, buffer, None)
            cute.arch.barrier(barrier_id=int(Barrier.PAIR) + self.me // 2, number_of_threads=2 * WARP)
            self.softmax(this)
            if tile == of.end - 1:
                self.end()
            cute.arch.barrier_arrive(barrier_id=int(Barrier.FULL) + buffer, number_of_threads=THREADS)
            stage = cutlass.select_(stage == stages - 1, Int32(0), stage + 1)
            buffer = 1 - buffer

    @cute.jit
    def softmax(self, older: Older):
        """All steps of a KV tile's softmax."""
        for n in cutlass.range_constexpr(self.geometry.softmax_steps):
            self.softmax_step(n, older)

    @cute.jit
    def older(
        self, of: Reader, tile: Int32, unmasked: Int32, block: rows.Block, buffer: Int32, arrives: cutlass.Constexpr
    ):  # fmt: skip
        """What the softmax of a KV tile is told. The warps of the output have no register for the source while they
        multiply."""
        geometry = self.geometry
        source = row_source(self.inputs, of, tile + geometry.ahead, self.lane % geometry.tokens, geometry)
        return Older(tile * geometry.tokens, of.length, unmasked, block, buffer, source, arrives)

    @cute.jit
    def end(self):
        """The rows' maxima and sums, to shared memory."""
        maxima, sums = self.rows_in(self.storage.row_max), self.rows_in(self.storage.row_sum)
        for half in cutlass.range_constexpr(2):
            total = softmax.quad_sum(self.row_sum[half])
            if self.lane % 4 == 0:
                maxima[self.row(half)], sums[self.row(half)] = self.row_max[half], total


@cute.jit
def compute_scores(
    w: cutlass.Constexpr,  # `Scores`
    walk: cutlass.Constexpr,  # `Walk`
    split: Split,
):
    """The part of the warps of the scores in all splits of the worker."""
    while walk.has_work(split):
        tiles = walk.tiles_of(split)
        if tiles.first < tiles.end:
            block = walk.queries.block(split.request)
            of = Reader(block.request, split.length, w.kv_head, tiles.end)
            w.run(of, tiles.first, keys_of_all_rows(split, block, w), block)
        split = walk.next_split(split)


@cute.jit
def keys_of_all_rows(split: Split, block: rows.Block, w: cutlass.Constexpr) -> Int32:
    """Keys of a split's request that every row of the query tile may see."""
    geometry = w.geometry
    unmasked = cutlass.max(split.length, 0)
    if cutlass.const_expr(geometry.causal):
        unmasked = cutlass.max(unmasked - block.count + 1 + w.first_row // geometry.group, 0)
    elif cutlass.const_expr(geometry.tree):
        unmasked = cutlass.max(unmasked - geometry.s, 0)
    return unmasked


# ------------------------------------------------------------------------------------------------ device: output
@dataclass(frozen=True, eq=False)
class Output(Cell):
    """A thread of a warp of the output, which has a share of the columns of all rows, and loads."""

    acc_o: Any  # registers: (4, rows, columns) fp32, in 16 x 8 products

    @classmethod
    def make(cls, **of_cell: Any) -> Output:
        shape = (4, ROW_BLOCKS, of_cell["geometry"].columns)
        return cls(
            **of_cell,
            acc_o=cute.make_rmem_tensor(cute.make_layout(shape), Float32),
        )

    def reader(self, walk: Any, split: Split, end: Int32) -> Reader:
        return Reader(walk.queries.block(split.request).request, split.length, self.kv_head, end)

    @cute.jit
    def start(self, walk: cutlass.Constexpr, split: Split):
        """Starts loading the first KV tiles of a split, as many as there are stages."""
        geometry, tiles = self.geometry, walk.tiles_of(split)
        if tiles.first < tiles.end:
            of = self.reader(walk, split, tiles.end)
            for i in cutlass.range_constexpr(geometry.stages):
                row = row_source(self.inputs, of, tiles.first + i, loaded_row(geometry), geometry)
                if tiles.first + i < tiles.end:
                    target = target_of(self.stage(Int32(i)), geometry)
                    copy = Copy(source_of(row, geometry), target, way_of(geometry))
                    copy_last(copy, self.dtype, geometry)
                    for j in cutlass.range_constexpr(geometry.copies - 1):
                        self.copy_panel(copy, j)
                cute.arch.cp_async_commit_group()

    @staticmethod
    def row(i: int, half: int, lane: Int32) -> Int32:
        """The row of the query tile that a thread's accumulators (2 half .., i, ..) are of."""
        return i * warp_mma.M + half * 8 + lane // 4

    @cute.jit
    def scale(self, i: cutlass.Constexpr, half: cutlass.Constexpr, factor: Float32):
        for j in cutlass.range_constexpr(self.geometry.columns):
            for c in cutlass.range_constexpr(2):
                self.acc_o[2 * half + c, i, j] = self.acc_o[2 * half + c, i, j] * factor

    @cute.jit
    def rescale(self, buffer: Int32, moved: cute.Tensor):
        """Multiplies the output of each row with the row's factor, where a maximum of its 16 rows has moved."""
        factors = self.factors_in(buffer)
        for i in cutlass.range_constexpr(ROW_BLOCKS):
            if moved[i] != 0:
                for half in cutlass.range_constexpr(2):
                    self.scale(i, half, factors[self.row(i, half, self.lane)])

    def addresses(self) -> tuple[Int32, Int32, Int32]:
        """In shared memory: of V in stage 0 and of P in buffer 0, what this lane's first `ldmatrix` reads; where this
        thread copies to first. V is K's panels, read transposed: two matrices of tokens, two of columns."""
        geometry, lane = self.geometry, self.lane
        matrix, swizzle = lane // 8, lane % 8
        column = self.warp * (geometry.columns * warp_mma.N)
        token = swizzle + matrix % 2 * 8
        chunk = column % PANEL // 8 + matrix // 2
        values = self.stage(Int32(0)) + column // PANEL * geometry.panel_bytes
        values = values + token * ROW_BYTES + (chunk ^ swizzle) * 16
        weights = self.p_in(Int32(0)) + token * geometry.p_stride + matrix // 2 * 16
        return values, weights, target_of(self.stage(Int32(geometry.ahead % geometry.stages)), geometry)

    @cute.jit
    def output(self, values: Int32, weights: Int32, copy: Copy, loads: Boolean) -> tuple[Int32, Int32, Int32]:
        """O += P·V of this warp's columns. values, weights: `addresses` in the stage and the buffer. copy: of the KV
        tile that is loaded meanwhile, where one is. Returns values, weights and copy.target behind the last step."""
        geometry = self.geometry
        stride = cutlass.const_expr(geometry.p_stride)
        a = cute.make_rmem_tensor(cute.make_layout((warp_mma.OPERANDS, ROW_BLOCKS)), self.dtype)
        b = cute.make_rmem_tensor(cute.make_layout((4, 2)), self.dtype)
        both = cute.make_tensor(b.iterator, cute.make_layout(warp_mma.OPERANDS))
        # A loop, in which ptxas loads nothing ahead of the next 16 tokens: for that there are no registers. From step
        # to step addresses move on, so that none is computed from the thread's number again.
        steps, columns = cutlass.const_expr((geometry.token_blocks // 2, geometry.columns // 2))
        of_step = cutlass.const_expr(columns * geometry.ways if geometry.spread else 0)  # panels
        source, target = copy.source, copy.target
        for n in cutlass.range(steps, unroll=1):
            # Else each sum of an address and a constant takes a register from step to step.
            values, weights = opaque(values), opaque(weights)
            later = Copy(opaque_wide(source), opaque(target), copy.way)
            for i in cutlass.range_constexpr(ROW_BLOCKS):
                load_matrices(weights + i * warp_mma.M * stride, a[None, i])
            for j in cutlass.range_constexpr(columns):
                # 16 tokens of 16 columns.
                load_matrices(values ^ j * 32, both, transposed=True)
                for i in cutlass.range_constexpr(ROW_BLOCKS):
                    for c in cutlass.range_constexpr(2):
                        acc = self.acc_o[None, i, 2 * j + c]
                        cute.mma_atom_call(self.mma, acc, a[None, i], b[None, c], acc)
                # Between the products: all at once, copies hold up what other warps read from shared memory. Those of a
                # step side by side: ahead of a copy that a load from shared memory precedes ptxas puts three empty
                # loads, which take the way of shared memory as well.
                if cutlass.const_expr(geometry.spread and j == columns // 2 - 1):
                    for i in cutlass.range_constexpr(columns):
                        if cutlass.const_expr(steps * columns < geometry.copies):
                            if loads:
                                self.copy_panel(later, i)
                        elif loads & (n * columns + i < geometry.copies - 1):
                            self.copy_panel(later, i)
            values, weights = values + warp_mma.K * ROW_BYTES, weights + 2 * warp_mma.K
            source, target = source + 2 * PANEL * of_step, target + geometry.panel_bytes * of_step
        return values, weights, target

    @cute.jit
    def output_at_once(self, values: Int32, weights: Int32, copy: Copy, loads: Boolean, buffer: Int32, tells: Boolean):
        """`output` where all that a warp reads of the KV tile and of P has room in registers. Copies go to where the KV
        tile was, and EMPTY is told."""
        geometry = self.geometry
        columns = cutlass.const_expr(geometry.columns // 2)
        a = cute.make_rmem_tensor(cute.make_layout((warp_mma.OPERANDS, ROW_BLOCKS)), self.dtype)
        b = cute.make_rmem_tensor(cute.make_layout((4, 2, columns)), self.dtype)
        load_matrices(weights, a[None, 0])
        for j in cutlass.range_constexpr(columns):
            both = cute.make_tensor(b[None, None, j].iterator, cute.make_layout(warp_mma.OPERANDS))
            load_matrices(values ^ j * 32, both, transposed=True)
        named_sync(Barrier.OUTPUT, OUTPUT_THREADS)
        self.copy_all(copy, loads)
        self.tell_empty(geometry.stages - FEWEST_STAGES + 1, buffer, tells)
        for i in cutlass.range_constexpr(1, ROW_BLOCKS):
            load_matrices(weights + i * warp_mma.M * geometry.p_stride, a[None, i])
        for i in cutlass.range_constexpr(ROW_BLOCKS):
            for j in cutlass.range_constexpr(columns):
                for c in cutlass.range_constexpr(2):
                    acc = self.acc_o[None, i, 2 * j + c]
                    cute.mma_atom_call(self.mma, acc, a[None, i], b[None, c, j], acc)

    @cute.jit
    def tell_empty(self, pending: cutlass.Constexpr, buffer: Int32, tells: Boolean):
        """EMPTY, if the scores wait for it, when all but the last `pending` KV tiles have arrived."""
        cute.arch.cp_async_wait_group(pending)
        if tells:
            cute.arch.barrier_arrive(barrier_id=int(Barrier.EMPTY) + buffer, number_of_threads=THREADS)

    @cute.jit
    def copy_all(self, copy: Copy, loads: Boolean):
        """Starts copying all of a thread's panels, where a KV tile is left to load."""
        if loads:
            copy_last(copy, self.dtype, self.geometry)
            for i in cutlass.range_constexpr(self.geometry.copies - 1):
                self.copy_panel(copy, i)
        cute.arch.cp_async_commit_group()

    def copy_panel(self, copy: Copy, i: int) -> None:
        """Starts copying the thread's i-th panel, which is not its last one."""
        ways, size = self.geometry.ways, self.geometry.panel_bytes
        copy_chunk(self.dtype, copy.source + 2 * PANEL * ways * i, copy.target + ways * size * i)

    @cute.jit
    def run(self, count: Int32):
        """A split of `count` KV tiles that `start` has begun."""
        geometry = self.geometry
        stages = cutlass.const_expr(geometry.stages)
        self.acc_o.fill(0.0)
        for i in cutlass.range_constexpr(BUFFERS):
            cute.arch.cp_async_wait_group(stages - 1 - i)
            if cutlass.const_expr(geometry.overlap):
                named_arrive(Barrier.EMPTY + i, THREADS)  # both even for one KV tile: the second is for its softmax
            elif i < count:
                named_arrive(Barrier.EMPTY + i, THREADS)
        stage, buffer = Int32(0), Int32(0)
        values, weights, target = self.addresses()
        values, weights, target = opaque(values), opaque(weights), opaque(target)
        # Steps of `output`, each of which moves addresses on.
        steps = cutlass.const_expr(0 if geometry.at_once else geometry.token_blocks // 2)
        tile_bytes = cutlass.const_expr(2 * geometry.stage_elements)
        back = cutlass.const_expr(-(stages - 1) * tile_bytes)
        copied = cutlass.const_expr(steps * (geometry.columns // 2) * geometry.ways * geometry.spread)  # panels
        moved = cute.make_rmem_tensor(SCORE_WARPS, Int32)
        last = cutlass.const_expr(stages - 1 if geometry.at_once else 0)  # at which stage copies go to the last one
        for tile in cutlass.range(count, unroll=1):
            cute.arch.barrier(barrier_id=int(Barrier.FULL) + buffer, number_of_threads=THREADS)
            cute.autovec_copy(self.moved_in(buffer), moved)
            source = source_of(self.sources_in(buffer)[loaded_row(geometry)], geometry)
            copy = Copy(source, target, way_of(geometry))
            loads = tile + geometry.ahead < count
            if cutlass.const_expr(not geometry.at_once):
                loads = loads & (tile > 0)
            if cutlass.const_expr(geometry.spread):
                if loads:
                    copy_last(copy, self.dtype, geometry)
            elif cutlass.const_expr(not geometry.at_once):
                self.copy_all(copy, loads)
            if (moved[0] | moved[1] | moved[2] | moved[3]) != 0:
                self.rescale(buffer, moved)
            # Told behind the products, the scores would wait for EMPTY: FULL comes when half of theirs are left.
            if cutlass.const_expr(geometry.at_once):
                self.output_at_once(values, weights, copy, loads, buffer, tile + 1 < count)
            elif cutlass.const_expr(geometry.overlap):
                self.tell_empty(stages - FEWEST_STAGES - 1, buffer, tile + 1 < count)
                values, weights, target = self.output(values, weights, copy, loads)
                if tile > 0:
                    cute.arch.cp_async_commit_group()
            else:
                values, weights, target = self.output(values, weights, copy, loads)
                self.tell_empty(stages - FEWEST_STAGES, buffer, tile + BUFFERS < count)
            # To the next stage and the other buffer.
            step = cutlass.select_(stage == stages - 1, Int32(back), Int32(tile_bytes))
            values = values + step - steps * warp_mma.K * ROW_BYTES
            step = cutlass.select_(stage == last, Int32(back), Int32(tile_bytes))
            target = target + step - copied * geometry.panel_bytes
            step = cutlass.select_(buffer == 0, Int32(2 * geometry.p_elements), Int32(-2 * geometry.p_elements))
            weights = weights + step - steps * 2 * warp_mma.K
            buffer = 1 - buffer
            stage = cutlass.select_(stage == stages - 1, Int32(0), stage + 1)


# ------------------------------------------------------------------------------------------------ device: epilogue
@dataclass(frozen=True, eq=False)
class OfRows:
    """Running maximum and sum of the rows that a thread has outputs of, (2, rows) registers each."""

    top: Any
    total: Any


@cute.jit
def share_rows(w: cutlass.Constexpr) -> OfRows:  # w: `Output`
    """The rows' maxima and sums, which the warps of the scores have left."""
    maxima, sums = w.rows_in(w.storage.row_max), w.rows_in(w.storage.row_sum)
    shape = (2, ROW_BLOCKS)
    found = OfRows(*(cute.make_rmem_tensor(cute.make_layout(shape), Float32) for _ in range(2)))
    for i in cutlass.range_constexpr(ROW_BLOCKS):
        for half in cutlass.range_constexpr(2):
            row = w.row(i, half, w.lane)
            found.top[half, i], found.total[half, i] = maxima[row], sums[row]
    return found


@cute.jit
def add_partial(w: cutlass.Constexpr, of_rows: cutlass.Constexpr, results: Results, tile: Int32, slot: Int32):
    """Adds a partial, whose vectors have what this thread's accumulators have."""
    geometry, layout, lane = w.geometry, w.geometry.partials, w.lane
    is_right = w.warp >= OUTPUT_WARPS // 2
    for i in cutlass.range_constexpr(ROW_BLOCKS):
        for half in cutlass.range_constexpr(2):
            index = layout.row(slot, tile, w.row(i, half, lane))
            found = cute.make_rmem_tensor(partials.STATS, Float32)
            cute.autovec_copy(layout.stats(results.stats.iterator, index), found)
            older = of_rows.top[half, i]
            top = cute.arch.fmax(older, cute.arch.fmax(found[0], found[2]))
            mine, theirs = softmax.exp2(older - top), (softmax.exp2(found[0] - top), softmax.exp2(found[2] - top))
            added = found[1] * theirs[0] + found[3] * theirs[1]
            of_rows.top[half, i], of_rows.total[half, i] = top, of_rows.total[half, i] * mine + added
            weight = cutlass.select_(is_right, theirs[1], theirs[0])
            source = layout.outputs(results.outputs.iterator, index)
            for n in cutlass.range_constexpr(geometry.columns // partials.QUAD):
                quad = w.warp * (geometry.columns // partials.QUAD) + n
                at = cute.assume((quad * partials.QUAD + lane % 4) * partials.VECTOR, divby=partials.VECTOR)
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
    warp, lane = w.warp, w.lane
    factor = cute.make_rmem_tensor(cute.make_layout((2, ROW_BLOCKS)), Float32)
    if whole:
        for i in cutlass.range_constexpr(ROW_BLOCKS):
            for half in cutlass.range_constexpr(2):
                total, row = of_rows.total[half, i], w.first_row + w.row(i, half, lane)
                factor[half, i] = cutlass.select_(total > 0.0, cute.arch.rcp_approx(total), Float32(0.0))
                if warp == 0 and lane % 4 == 0 and row < block.count * geometry.group:
                    head, token = w.kv_head * geometry.group + row % geometry.group, row // geometry.group
                    lse[block.first, head, token] = softmax.natural_lse(total, of_rows.top[half, i])
    else:
        layout_of = cute.make_layout((OUTPUT_WARPS, ROWS), stride=(1, OUTPUT_WARPS))
        magnitudes = w.storage.magnitudes.get_tensor(layout_of)
        for i in cutlass.range_constexpr(ROW_BLOCKS):
            for half in cutlass.range_constexpr(2):
                size = Float32(0.0)
                for j in cutlass.range_constexpr(geometry.columns):
                    for c in cutlass.range_constexpr(2):
                        size = size + cute.math.absf(w.acc_o[2 * half + c, i, j])
                size = softmax.quad_sum(size)
                if lane % 4 == 0:
                    magnitudes[warp, w.row(i, half, lane)] = size
        named_sync(Barrier.OUTPUT, OUTPUT_THREADS)
        side = warp // (OUTPUT_WARPS // 2)
        for i in cutlass.range_constexpr(ROW_BLOCKS):
            for half in cutlass.range_constexpr(2):
                size = Float32(0.0)
                for j in cutlass.range_constexpr(OUTPUT_WARPS // 2):
                    size = size + magnitudes[side * (OUTPUT_WARPS // 2) + j, w.row(i, half, lane)]
                exponent = partials.exponent_of(size)
                factor[half, i] = partials.power_of_two(partials.TARGET_EXPONENT - exponent)
                if warp % (OUTPUT_WARPS // 2) == 0 and lane % 4 == 0:
                    # All of the row's sum is told of its left half.
                    own = cutlass.select_(side == 0, of_rows.total[half, i], Float32(0.0))
                    of_slot = layout.stats(stats.iterator, layout.row(slot, tile, w.row(i, half, lane)))
                    partials.store_stats(of_slot, side, of_rows.top[half, i], own, exponent)
    for i in cutlass.range_constexpr(ROW_BLOCKS):
        for half in cutlass.range_constexpr(2):
            w.scale(i, half, factor[half, i])
            row = w.row(i, half, lane)
            base = outputs.iterator.toint() + 2 * layout.row(slot, tile, row) * layout.columns
            if whole:
                at = rows.row_offset(out, block.first, w.kv_head, w.first_row + row, geometry.group)
                base = out.iterator.toint() + 2 * at
            for n in cutlass.range_constexpr(geometry.columns // partials.QUAD):
                words = cute.make_rmem_tensor(partials.QUAD, Int32)
                for j in cutlass.range_constexpr(partials.QUAD):
                    pair = cute.make_rmem_tensor(2, Float32)
                    for c in cutlass.range_constexpr(2):
                        pair[c] = w.acc_o[2 * half + c, i, n * partials.QUAD + j]
                    if whole:
                        words[j] = word_of(pair, out.element_type)
                    else:
                        words[j] = word_of(pair, Float16)
                quad = warp * (geometry.columns // partials.QUAD) + n
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
def compute_output(
    w: cutlass.Constexpr,  # `Output`
    results: Results,
    walk: cutlass.Constexpr,  # `Walk`
    split: Split,
    tile: Int32,  # the query tile, of the request
):
    """The part of the warps of the output in all splits of the worker, and all that goes to global memory."""
    geometry, thread = w.geometry, w.thread
    of_tile = rows.TileRows(w.kv_head, w.first_row, geometry.group, ROWS)
    row_range = w.storage.row_range.get_tensor(cute.make_layout(2))
    group = Group(Barrier.OUTPUT, OUTPUT_THREADS)
    keyless = walk.line.empty
    if cutlass.const_expr(geometry.packed):
        keyless = walk.table[rows.keyless_place(walk.table)]
    walk.store_empty(results, keyless, of_tile, thread, OUTPUT_THREADS)
    split_index = SplitIndex(Int32(0), Int32(1))
    if walk.has_work(split):
        w.start(walk, split)
    while walk.has_work(split):
        tiles = walk.tiles_of(split)
        block = walk.queries.block(split.request)
        split_index = SplitIndex(Int32(0), Int32(1))
        is_cut = walk.announce(split, tiles, row_range, thread)
        if tiles.first < tiles.end:
            w.run(tiles.end - tiles.first)
        following = walk.next_split(split)
        named_sync(Barrier.OUTPUT, OUTPUT_THREADS)  # nobody reads a KV tile any more
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
            named_sync(Barrier.OUTPUT, OUTPUT_THREADS)
            walk.publish(signal, thread)
        else:
            rows.store_no_keys(results, block, of_tile, thread, OUTPUT_THREADS)
        split = following
    walk.end(results, split_index, split.request, row_range, group, thread, (8, 1))


@cute.kernel
def flash_mla_mma_v3(
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
    kv_head, first_row = tile // geometry.row_tiles, tile % geometry.row_tiles * ROWS
    storage = SmemAllocator().allocate(shared_storage(geometry, inputs.q.element_type))
    queries = rows.Queries(geometry.s, schedule.blocks, inputs.mask)
    # Nothing that a kernel before may have written is read, and nothing is written, ahead of this.
    grid_wait()
    walk, split = begin(
        schedule, flags, inputs.seq_lens, queries, pool, Cta(worker, tile, thread, warp, lane),
        storage.first.data_ptr(), 0, geometry.merge,
    )  # fmt: skip
    of_cell = functools.partial(
        dict, geometry=geometry, inputs=inputs, dtype=inputs.q.element_type, storage=storage, lane=lane,
        scale_log2=scale_log2, kv_head=kv_head, first_row=first_row, mma=warp_mma.make_mma(inputs.q.element_type),
    )  # fmt: skip
    # Both, though a warp's number is never negative: without the first the compiler makes other code than was timed.
    if (warp >= 0) & (warp < OUTPUT_WARPS):
        compute_output(Output.make(**of_cell(thread=thread, warp=warp)), results, walk, split, tile)
    else:
        compute_scores(Scores.make(**of_cell(thread=thread, warp=warp - OUTPUT_WARPS)), walk, split)


flash_mla_mma_v3.set_name_prefix("flash_mla_mma_v3", remove_cutlass_symbol=True, keep_mangled_name=False)


# ------------------------------------------------------------------------------------------------ plan
def takes(pd: MlaProblem) -> Verdict:
    """Whether this version computes a problem."""
    if pd.k not in WIDTHS:
        return Verdict.no(f"k = {pd.k} must be 256 or 512: each of eight warps owns 32 columns of the latent or more")
    if pd.p % SLICE or pd.p > PANEL:
        return Verdict.no(f"the rope part of p = {pd.p} columns must be a multiple of {SLICE} up to {PANEL}")
    return Verdict.yes()


@dataclass(frozen=True)
class FlashMlaMmaV3Tiling(Tiling):
    """tile_n: tokens of a KV tile, 16 or 32. num_pipeline_stages: KV tiles in shared memory, at least 3. Of both 0 is
    what suits the shared memory of the device. workers: CTAs for each query tile; 0: as many as fill the device.
    split_tokens: tokens of a split, a multiple of 64, so that a request's splits depend on nothing but its length; 0:
    the scheduler chooses. query_tokens: of packed queries, tokens of a block; 0: as many as a tile has rows for."""

    launch_fields: ClassVar[tuple[str, ...]] = ("workers", "split_tokens")

    tile_n: int = 0
    num_pipeline_stages: int = 0
    workers: int = 0
    split_tokens: int = 0
    query_tokens: int = 0

    def geometry(self, pd: MlaProblem, device: Device | None = None) -> Geometry:
        """What the code is made for, with everything chosen; device: None for the assumed one."""
        of = device or Device.assumed()
        s = (self.query_tokens or max(1, ROWS // pd.group)) if pd.packed else pd.s
        causal = pd.causal and (pd.packed or s > 1)

        def made(tokens: int, stages: int) -> Geometry:
            return Geometry(pd.h, pd.h_kv, s, pd.k, pd.p, pd.page_size, causal, tokens, stages, pd.packed, pd.tree)

        def counts(tokens: int) -> Sequence[int]:
            if self.num_pipeline_stages:
                return [self.num_pipeline_stages]
            # With three stages of 16 tokens two KV tiles are on their way already, so a fourth one is not waited for.
            return range(MOST_STAGES if tokens > warp_mma.K else FEWEST_STAGES, FEWEST_STAGES - 1, -1)

        sizes = [self.tile_n] if self.tile_n else list(TOKEN_TILES)
        forms = [made(tokens, stages) for tokens in sizes for stages in counts(tokens)]
        return next((form for form in forms if shared_bytes(form) <= of.smem_per_block), forms[-1])

    def validate(self, pd: MlaProblem, device: Device | None = None) -> Verdict:
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
        if 0 < self.num_pipeline_stages < FEWEST_STAGES:
            return Verdict.no(
                f"num_pipeline_stages = {self.num_pipeline_stages} leaves no KV tile to load while two are computed "
                f"with: at least {FEWEST_STAGES}"
            )
        of, smem = device or Device.assumed(), shared_bytes(geometry)
        if smem > of.smem_per_block:
            return Verdict.no(
                f"{smem:,} bytes of shared memory for {ROWS} query rows and {geometry.stages} KV tiles of "
                f"{geometry.tokens} tokens are over the {of.smem_per_block:,} that a CTA of {of.key} may have"
            )
        if not (counted := limits.decode_sizes(pd)):
            return counted
        workers = self.workers or (max(1, device.num_sms // geometry.tiles) if device is not None else 1)
        requests = rows.most_blocks(pd.query_tokens, pd.b, geometry.s) if pd.packed else pd.b
        tokens, fixed = pd.max_pages * pd.page_size, self.split_tokens // geometry.tokens
        return decode_host.schedule_sizes(requests, tokens, workers, fixed, geometry.partials, geometry.costs)


class FlashMlaMmaV3Plan(KernelPlan):
    """One compiled kernel a problem class and tile; b, lengths, page table width, workers and split_tokens are
    arguments."""

    workload = decode.WORKLOAD
    tiling_type = FlashMlaMmaV3Tiling
    tiling: FlashMlaMmaV3Tiling
    uses = ("adaptive-tiles", "device-tile-scheduler", "fast-exp2-softmax", "split-kv")
    requires = Requirement(
        # For sm_100a and sm_103a ptxas spills in the loop of products. For sm_120a and sm_121a it does in the loop over
        # KV tiles, and moves accumulators from register to register, ten times for each product.
        archs=("sm_80", "sm_86", "sm_87", "sm_89", "sm_90a"),
        dtypes=("bf16", "fp16"),
        features=("cp_async",),
        problem=takes,
        options=("strided_pages", "packed", "tree", "strided", "strided_out", "no_rope"),
    )

    def default_tiling(self) -> Tiling:
        pd = self.problem
        if not pd.packed or pd.query_tokens <= pd.b:
            return FlashMlaMmaV3Tiling()
        # All of a tile where some have several: of a request in two blocks the cache is read twice, which costs more
        # than rows without a token.
        return FlashMlaMmaV3Tiling(query_tokens=max(1, ROWS // pd.group))

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
        version = Version(flash_mla_mma_v3, self.geometry())
        fixed = self.tiling.split_tokens // version.geometry.tokens
        return decode_host.decode_kernel(self, "flash_mla_mma_v3", version, inputs, self.workers(), fixed)

    def plan_empty(self) -> CuteKernel:
        self.require()
        version = Version(flash_mla_mma_v3, self.geometry())
        return decode_host.decode_kernel(self, "flash_mla_mma_v3", version, (), 0, 0)
