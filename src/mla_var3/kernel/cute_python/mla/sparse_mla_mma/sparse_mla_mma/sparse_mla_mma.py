r"""Sparse decode, and decode over packed FP8 caches, for every GPU since Ampere (sm_80 and up): warp-level products,
cp.async, a tile scheduler on the device, one barrier for each KV tile.

    out[row, :] = softmax(scale · q[row] · Kᵀ) · V      K = the tokens that the row's indices name, V = K[:, :512]

The schedule is that of flash_mla_mma_v1, whose docstring says why each thing is as it is: a CTA of eight warps computes
16, 32 or 64 heads of one query token, and a step works on three KV tiles of 16 or 32 tokens:

    warps 0..3   barrier | load i + s - 2, softmax i | scores i + 1 | output i - 1             | barrier | ..
    warps 4..7   barrier | scores i + 1              | output i - 1 | softmax i                | barrier | ..

**Codes stay codes in shared memory**, so a tile takes 57 % of the bytes of bf16, and KV tiles of 32 tokens fit where
those of bf16 do not. They are widened between `ldmatrix` and the product, which takes no exchange between lanes:

    keys     a matrix is 8 tokens by 16 columns of codes. A lane has four columns of a token, 4 t .. 4 t + 3, where the
             product wants 2 t, 2 t + 1, 2 t + 8 and 2 t + 9: columns of a sum may be in any order, so Q is loaded in it
    values   a transposed matrix gives a lane two columns, 2 g and 2 g + 1, of two tokens. The even columns of 16 are
             one product's, the odd ones another's. A lane then has four neighbouring columns of the output in two
             products, which `exchange` deals as others store them

A code is exact in bf16. Layout v32 has a float32 scale for 128 columns of a token. The four warps that share a score
take 128 columns each, so that a warp's partial sums have one scale a token: they are multiplied with it, and the rope
columns are added behind that. Values are multiplied in float32 and rounded to bf16 once. The one scale of layout flat
is a factor of the softmax's scale and of the output.

From sm_89 on an instruction converts e4m3 to fp16. On sm_80 and sm_86 (and elsewhere with `permutes`) bytes are moved
to where bf16 has its exponent and mantissa, and a product with 2^120 mends the exponent, also of subnormals
(`widened`).

Rows lie an odd multiple of 16 bytes apart, so that eight rows of a matrix lie in all banks without a swizzle. An index
that names no token of the cache, or stands at or past the length, reads nothing: its row is zeros, and a word for each
token of a stage says that its scores are -inf. With a page table in place of indices position i names token i mod page
of entry i / page.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Boolean, Float16, Float32, Int32, Int64, Uint8
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator

from mla_var3.device import Device, Requirement
from mla_var3.kernel.cute_python import decode_host, host
from mla_var3.kernel.cute_python.prims import softmax, warp_mma
from mla_var3.kernel.cute_python.prims.sync import grid_wait, has_dependents, launch_dependents, named_any
from mla_var3.kernel.cute_python.prims.warp_mma import load_matrices
from mla_var3.kernel.cute_python.split_kv import combine, partials, rows, scheduler
from mla_var3.kernel.cute_python.split_kv.partials import Partials, Results
from mla_var3.kernel.cute_python.split_kv.scheduler import Costs, Pool, Schedule, Split
from mla_var3.kernel.cute_python.split_kv.walk import Cta, Group, Place, begin
from mla_var3.packed_cache import VALUES, layout_of
from mla_var3.runtime import CuteKernel, KernelPlan, Tiling, Verdict, limits
from mla_var3.runtime.scaling import any_scale
from mla_var3.workload import sparse_decode

if TYPE_CHECKING:
    from mla_var3.workload.sparse_decode import SparseProblem

LAYOUTS = ("v32", "flat", "bf16", "v32_no_rope", "flat_no_rope")
WARPS = 8
WARP = 32
THREADS = WARPS * WARP
ROW_TILES = (16, 32, 64)
TOKEN_TILES = (16, 32)
WHOLE = ("sm_90a",)  # architectures for which ptxas keeps 64 query rows and their outputs in registers
CONVERTS = (8, 9)  # the first compute capability with a conversion of e4m3
SLICE = warp_mma.K  # columns of a query or key that a product is over
SHARES = 4  # warps that share the columns of the same scores, and partial sums of each
SHARE_SLICES = VALUES // SLICE // SHARES  # slices of the latent that a warp has: those of one scale of layout v32
BLOCK = 512  # bytes of the partial sums of 16 rows and 8 tokens, a product's accumulators: 16 a lane
CHUNK = 16  # bytes that a thread copies at a time: a row of a matrix
BANKS = 128  # bytes
ROW_LANES = 8  # threads that copy a row
LOAD_ROWS = THREADS // 2 // ROW_LANES  # rows of a KV tile that the warps that load copy at once
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
    """What the code is specialised on: heads, query tokens, the cache's layout and its tokens a page, which optional
    inputs there are. paged: whether there is a page table in place of indices. m: heads of the query tile; tokens: of a
    KV tile; stages: KV tiles in shared memory. permutes: whether codes are widened by byte permutes."""

    h: int
    s: int
    layout: str
    page: int
    lengths: bool
    sink: bool
    paged: bool
    m: int
    tokens: int
    stages: int
    permutes: bool

    @property
    def cache(self) -> Any:
        return layout_of(self.layout)

    @property
    def k(self) -> int:
        """Columns of a value."""
        return VALUES

    @property
    def coded(self) -> bool:
        """Whether the latent is codes."""
        return self.layout != "bf16"

    @property
    def scaled(self) -> bool:
        """Whether 128 columns of a token have a float32 scale."""
        return self.cache.tile > 0

    @property
    def has_rope(self) -> bool:
        return self.cache.columns > VALUES

    @property
    def rope_coded(self) -> bool:
        return self.cache.quantised > VALUES

    @property
    def row_bytes(self) -> int:
        """Of a token in the cache."""
        return 2 * self.cache.columns if self.layout == "bf16" else self.cache.token_bytes

    @property
    def stride(self) -> int:
        """Bytes from one token to the next in shared memory: an odd multiple of 16, so that eight rows lie in all
        banks."""
        return self.row_bytes if self.row_bytes // CHUNK % 2 else self.row_bytes + CHUNK

    @property
    def chunks(self) -> int:
        """Of 16 bytes, of a token."""
        return self.row_bytes // CHUNK

    @property
    def slice_bytes(self) -> int:
        return SLICE if self.coded else 2 * SLICE

    @property
    def scales_at(self) -> int:
        """Where the scales of a token lie."""
        return self.cache.code_bytes

    @property
    def rope_at(self) -> int:
        """Where the rope columns of a token lie."""
        if not self.coded or self.rope_coded:
            return VALUES * self.slice_bytes // SLICE
        return self.scales_at + self.cache.scales * self.cache.scale_bytes

    @property
    def row_tiles(self) -> int:
        """Query tiles of a query token."""
        return -(-self.h // self.m)

    @property
    def tiles(self) -> int:
        """Query tiles of a request."""
        return self.row_tiles * self.s

    @property
    def stage_bytes(self) -> int:
        return self.tokens * self.stride

    # -------------------------------------------------------------------------------------------- shares of warps
    @property
    def score_warps(self) -> tuple[int, int]:
        """(warps along the rows, along the tokens) of the scores; of each, `SHARES` along the columns."""
        return (2, 1) if self.m == ROW_TILES[-1] or self.tokens == TOKEN_TILES[0] else (1, 2)

    @property
    def score_shape(self) -> tuple[int, int]:
        """(16-row blocks, 16-token blocks) of a warp's scores."""
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
    def score_elements(self) -> int:
        """Of a KV tile: a partial sum of each share of the columns."""
        return SHARES * self.m * self.tokens

    @property
    def p_elements(self) -> int:
        return self.m * (self.tokens + PAD)

    @property
    def warp_slices(self) -> int:
        """Slices of a warp: `SHARE_SLICES` of the latent, and one of the rope columns, if there are any."""
        return SHARE_SLICES + self.has_rope

    @property
    def key_steps(self) -> int:
        """Loads of 16 tokens' keys: two slices of codes each, or one slice."""
        return (SHARE_SLICES // 2 if self.coded else SHARE_SLICES) + self.has_rope

    @property
    def output_shape(self) -> tuple[int, int]:
        """(rows, columns) of a warp's output, in 16 x 8 products: all rows, and an eighth of the columns."""
        return self.m // warp_mma.M, VALUES // WARPS // warp_mma.N

    @property
    def row_threads(self) -> int:
        """Threads on a row in the softmax."""
        return THREADS // self.m

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
        return Partials(self.tiles, self.m, VALUES)

    @property
    def costs(self) -> Costs:
        """In KV tiles. A tile of 32 tokens takes about 1.2 us, a split's begin and end 3 us, and the combine 2 to 3."""
        ratio = 64 // self.tokens
        return Costs(tokens=self.tokens, overhead=1 + ratio, combine=ratio, listed=1 + ratio, level=1 + ratio)

    @property
    def merge(self) -> combine.Merge:
        return combine.Merge(self.h, 1, self.s, self.partials, self.costs)

    @property
    def combines(self) -> bool:
        """Whether a combine may be launched: it takes query rows to lie behind each other in their tiles."""
        return self.s == 1 or self.h % self.m == 0


def shared_storage(geometry: Geometry) -> type:
    """The CTA's shared memory."""

    def array(kind: type, size: int, align: int = 16) -> Any:
        return cute.struct.Align[cute.struct.MemRange[kind, size], align]

    m = geometry.m
    fields = {
        "first": array(Int32, scheduler.FIRST_WORDS),
        "factor": array(Float32, 2 * m),  # of rows, in a tile that has moved a maximum
        "row_max": array(Float32, m),  # at the end of a split
        "row_sum": array(Float32, m),
        "magnitudes": array(Float32, m * WARPS),
        "named": array(Int32, geometry.stages * geometry.tokens),  # whether a token of a stage is one of the cache
        "scores": array(Float32, 2 * geometry.score_elements),  # partial sums
        "p": array(BFloat16, 2 * geometry.p_elements),
        "ring": array(Uint8, geometry.stages * geometry.stage_bytes, BANKS),
    }
    # Not a class statement: postponed annotations are strings, and the struct wants types.
    return cute.struct(type("Storage", (), {"__annotations__": fields}))


def fixed_bytes(geometry: Geometry) -> int:
    """Shared memory besides KV tiles: two buffers of partial sums of scores, two of P, and `ROOM`."""
    return ROOM + 4 * 2 * geometry.score_elements + 2 * 2 * geometry.p_elements


# ------------------------------------------------------------------------------------------------ device: load
class Inputs(NamedTuple):
    """What the kernel reads, in global memory."""

    q: cute.Tensor  # (b · s, 1, h, columns) bf16, columns contiguous
    cache: cute.Tensor  # (pages, page, bytes of a token) uint8, or (pages, page, columns) bf16; pages apart
    indices: cute.Tensor  # (b, s, topk) int32, or a page table (b, width)
    lengths: cute.Tensor  # (b,) int32: indices or tokens that count
    sink: cute.Tensor | None  # (h,) fp32
    flat: cute.Tensor | None  # (1,) fp32


class Reader(NamedTuple):
    """Whose KV tiles a warp loads: a request and one of its query tokens, and how many of its indices, or cached
    tokens, count. end: tile behind the split's last."""

    request: Int32
    token: Int32
    count: Int32
    end: Int32


@dataclass(frozen=True, eq=False)
class Token:
    """Query token `token` of every request, as `split_kv.rows` has blocks of them; q, out and lse are those of b · s
    requests of one token."""

    token: Int32
    s: int

    def block(self, request: Int32) -> rows.Block:
        return rows.Block(request * self.s + self.token, 1, request)


def divided(token: Int32, page: int) -> tuple[Int32, Int32]:
    """(page, token in it) of a token, which is not negative."""
    if page & (page - 1):
        return token // page, token % page
    return token >> (page.bit_length() - 1), token & (page - 1)


def reader(inputs: Inputs, split: Split, token: Int32, end: Int32, geometry: Geometry) -> Reader:
    """Of a split and one of its request's query tokens."""
    if geometry.paged:
        count = split.length - (geometry.s - 1 - token)
    else:
        count = cutlass.min(split.length, inputs.indices.shape[2])
    return Reader(split.request, token, cutlass.max(count, 0), end)


@cute.jit
def find_rows(inputs: Inputs, of: Reader, tile: Int32, found: cute.Tensor, first: int, geometry: cutlass.Constexpr):
    """Reads the indices, or the pages, of the rows that this thread loads of a tile; of a tile past the split, of its
    last one. Only loads, which nothing here waits for. found: registers, from `first` on."""
    row = cutlass.min(tile, of.end - 1) * geometry.tokens + (cute.arch.thread_idx()[0] >> 3)
    for i in cutlass.range_constexpr(geometry.load_rows):
        at = cutlass.max(cutlass.min(row + i * LOAD_ROWS, of.count - 1), 0)
        if cutlass.const_expr(geometry.paged):
            found[first + i] = inputs.indices[of.request, divided(at, geometry.page)[0]]
        else:
            found[first + i] = inputs.indices[of.request, of.token, at]


@cute.jit
def load_tile(
    inputs: Inputs,
    of: Reader,
    stage: Int32,  # shared memory
    named: cute.Pointer,  # (tokens,) int32, shared memory
    tile: Int32,
    found: cute.Tensor,  # of `find_rows`, from `first` on
    first: int,
    geometry: cutlass.Constexpr,
):
    """Starts copying this thread's rows of a KV tile; of a tile past the split nothing. One group of cp.async. Eight
    threads copy a row, 16 bytes each at a time. The row of no token is zeros."""
    cache = inputs.cache
    thread = cute.arch.thread_idx()[0]
    row, chunk = thread >> 3, thread & (ROW_LANES - 1)
    apart = cache.stride[0] * (cache.element_type.width // 8)
    if tile < of.end:
        target = stage + row * geometry.stride + chunk * CHUNK
        of_token = cute.make_tensor(named, cute.make_layout(geometry.tokens))
        for j in cutlass.range_constexpr(geometry.load_rows):
            position, index = tile * geometry.tokens + row + j * LOAD_ROWS, found[first + j]
            there = position < of.count
            if cutlass.const_expr(geometry.paged):
                page, in_page = index, divided(position, geometry.page)[1]
            else:
                there = there & (index >= 0) & (index < cache.shape[0] * cache.shape[1])
                page, in_page = divided(cutlass.max(index, 0), geometry.page)
            page, in_page = cutlass.select_(there, page, Int32(0)), cutlass.select_(there, in_page, Int32(0))
            filled = cutlass.select_(there, Int32(CHUNK), Int32(0))
            source = cache.iterator.toint() + Int64(page) * apart + (in_page * geometry.row_bytes + chunk * CHUNK)
            place = target + j * (LOAD_ROWS * geometry.stride)
            for i in cutlass.range_constexpr(geometry.chunks // ROW_LANES):
                copy_chunk(place + i * (ROW_LANES * CHUNK), source + i * (ROW_LANES * CHUNK), filled)
            if cutlass.const_expr(geometry.chunks % ROW_LANES):
                last = cutlass.const_expr(geometry.chunks // ROW_LANES * ROW_LANES * CHUNK)
                if chunk < geometry.chunks % ROW_LANES:
                    copy_chunk(place + last, source + last, filled)
            if chunk == 0:
                of_token[row + j * LOAD_ROWS] = Int32(there)
    cute.arch.cp_async_commit_group()


def copy_chunk(target: Int32, source: Int64, filled: Int32) -> None:
    """Starts copying 16 bytes to shared memory, of which the first `filled` are read and the others become zeros."""
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};", read_only_args=[target, source, filled]
    )


# ------------------------------------------------------------------------------------------------ device: words
def widened(word: Int32, permutes: bool, scales: Any = None) -> tuple[Int32, Int32]:
    """Four e4m3 as two words of two bf16, in order. scales: two float32, of the lower and the upper halves of the
    words, or None.

    permutes: with the seven bits of exponent and mantissa where bf16 has the low four of its exponent and the high
    three of its mantissa, a number is 2^-120 of its value, subnormals too. NaN is the code with all seven bits, and one
    more overflows into the eighth, which `prmt` spreads: all bits set are a NaN, which is added.
    """
    if permutes:
        text = "{ .reg .b32 v, n, m, x, y; mov.b32 m, 0x7b807b80; "
        text += "and.b32 v, {$r0}, 0x7f7f7f7f; add.u32 n, v, 0x01010101; "
        for half, (order, spread) in enumerate(((0x1404, 0x9988), (0x3424, 0xBBAA))):
            text += f"prmt.b32 x, v, 0, {order}; shr.u32 x, x, 4; prmt.b32 y, {{$r0}}, 0, {order}; "
            text += f"and.b32 y, y, 0x80008000; or.b32 x, x, y; prmt.b32 y, n, 0, {spread}; "
            text += f"fma.rn.bf16x2 {{$w{half}}}, x, m, y; "
        both = cute.arch.inline_ptx(text + "}", write_only_types=[Int32, Int32], read_only_args=[word])
        if scales is None:
            return both[0], both[1]
        return times(both[0], scales), times(both[1], scales)
    text = "{ .reg .b16 c, d, e, f; .reg .b32 x, y; .reg .f32 p, q, r, s; mov.b32 {c, d}, {$r0}; "
    text += "cvt.rn.f16x2.e4m3x2 x, c; cvt.rn.f16x2.e4m3x2 y, d; mov.b32 {c, d}, x; mov.b32 {e, f}, y; "
    text += "cvt.f32.f16 p, c; cvt.f32.f16 q, d; cvt.f32.f16 r, e; cvt.f32.f16 s, f; "
    given = [word]
    if scales is not None:
        text += "mul.f32 p, p, {$r1}; mul.f32 q, q, {$r2}; mul.f32 r, r, {$r1}; mul.f32 s, s, {$r2}; "
        given += scales
    text += "cvt.rn.bf16x2.f32 {$w0}, q, p; cvt.rn.bf16x2.f32 {$w1}, s, r; }"
    both = cute.arch.inline_ptx(text, write_only_types=[Int32, Int32], read_only_args=given)
    return both[0], both[1]


def times(word: Int32, scales: Any) -> Int32:
    """Two bf16, each times a float32, rounded."""
    text = "{ .reg .b32 x, y; .reg .f32 p, q; shl.b32 x, {$r0}, 16; and.b32 y, {$r0}, 0xffff0000; mov.b32 p, x; "
    text += "mov.b32 q, y; mul.f32 p, p, {$r1}; mul.f32 q, q, {$r2}; cvt.rn.bf16x2.f32 {$w0}, q, p; }"
    return cute.arch.inline_ptx(text, write_only_types=[Int32], read_only_args=[word, *scales])


def tokens_apart(word: Int32) -> Int32:
    """Bytes 0, 2, 1, 3: of two columns of two tokens, the first column of both, then the second."""
    return cute.arch.inline_ptx("prmt.b32 {$w0}, {$r0}, 0, 0x3120;", write_only_types=[Int32], read_only_args=[word])


@cute.jit
def swap_bit(words: cute.Tensor, lane: Int32, bit: cutlass.Constexpr):
    """(4,) words of the lanes of a quad: a bit of the lane changes places with the low bit of the word's number."""
    odd = (lane >> bit) & 1
    for i in cutlass.range_constexpr(0, 4, 2):
        sent = cutlass.select_(odd > 0, words[i], words[i + 1])
        came = cute.arch.shuffle_sync_bfly(sent, offset=1 << bit)
        words[i] = cutlass.select_(odd > 0, came, words[i])
        words[i + 1] = cutlass.select_(odd > 0, words[i + 1], came)


@cute.jit
def exchange(words: cute.Tensor, lane: Int32, back: cutlass.Constexpr = False):
    """(4,) words, pairs of the 32 columns that a quad has of a row: from four neighbouring columns of 16 for each lane
    to two of each eight, as `split_kv.partials` has them, or back."""
    swap_bit(words, lane, 1 if back else 0)
    swap_bit(words, lane, 0 if back else 1)


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
    storage: Any
    mma: Any
    thread: Any
    warp: Any
    lane: Any
    scale_log2: Any
    token: Any  # of the request's query tokens
    first_row: Any  # of the query tile, in the token's heads
    query: Any  # registers: A operands of this warp's slices, (8, rows, slices)
    acc_o: Any  # registers: (4, rows, columns) fp32, in 16 x 8 products
    found: Any  # registers: indices or pages of the rows that this thread loads next
    of_row: Any  # registers: running maximum and this thread's share of the sum of its row in the softmax

    @classmethod
    def make(cls, geometry, inputs, storage, thread, warp, scale_log2, token, first_row) -> Worker:
        of_query = (warp_mma.OPERANDS, geometry.score_shape[0], geometry.warp_slices)
        return cls(
            geometry=geometry,
            inputs=inputs,
            storage=storage,
            mma=warp_mma.make_mma(BFloat16),
            thread=thread,
            warp=warp,
            lane=thread % WARP,
            scale_log2=scale_log2,
            token=token,
            first_row=first_row,
            query=cute.make_rmem_tensor(cute.make_layout(of_query), BFloat16),
            acc_o=cute.make_rmem_tensor(cute.make_layout((4, *geometry.output_shape)), Float32),
            found=cute.make_rmem_tensor(geometry.load_rows, Int32),
            of_row=cute.make_rmem_tensor(2, Float32),
        )

    def stage(self, number: Int32) -> Int32:
        """Where a KV tile lies in shared memory."""
        return self.storage.ring.data_ptr().toint() + number * self.geometry.stage_bytes

    def named_in(self, number: Int32) -> cute.Pointer:
        """Where it is said of each token of a stage whether it is one of the cache, in shared memory."""
        return self.storage.named.data_ptr() + number * self.geometry.tokens

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
        """The warp's part of the query rows as A operands, from global memory, their columns in the order of the keys.
        Rows past the end are the last one again: their results are not stored."""
        geometry, q = self.geometry, self.inputs.q
        share, lane = self.warp % SHARES, opaque(self.lane)
        row = self.first_row + self.warp // (SHARES * geometry.score_warps[1]) * (geometry.score_shape[0] * warp_mma.M)
        words = cute.recast_tensor(self.query, Int32)  # (4, rows, slices)
        for i in cutlass.range_constexpr(geometry.score_shape[0]):
            for half in cutlass.range_constexpr(2):
                at = cutlass.min(row + (i * warp_mma.M + 8 * half) + lane // 4, geometry.h - 1)
                base = q.iterator + rows.row_offset(q, block.first, Int32(0), at, geometry.h)
                for n in cutlass.range_constexpr(geometry.warp_slices):
                    is_rope = cutlass.const_expr(n == SHARE_SLICES)
                    column = VALUES + share * SLICE if is_rope else share * (VALUES // SHARES) + n * SLICE
                    for part in cutlass.range_constexpr(2):
                        if cutlass.const_expr(geometry.rope_coded if is_rope else geometry.coded):
                            source = base + cute.assume(column + lane % 4 * 4 + 2 * part, divby=2)
                        else:
                            source = base + cute.assume(column + lane % 4 * 2 + 8 * part, divby=2)
                        word = cute.make_tensor(cute.recast_ptr(source, dtype=Int32), cute.make_layout(1))[0]
                        words[half + 2 * part, i, n] = word

    @cute.jit
    def start(self, walk: cutlass.Constexpr, split: Split):
        """Starts loading the first `stages - 2` KV tiles of a split, and looks up the rows of the next one."""
        geometry, tiles = self.geometry, walk.tiles_of(split)
        if (tiles.first < tiles.end) & self.loads:
            of = reader(self.inputs, split, self.token, tiles.end, geometry)
            count, each = cutlass.const_expr(geometry.stages - 2), geometry.load_rows
            found = cute.make_rmem_tensor(count * each, Int32)
            for i in cutlass.range_constexpr(count):
                find_rows(self.inputs, of, tiles.first + i, found, i * each, geometry)
            find_rows(self.inputs, of, tiles.first + count, self.found, 0, geometry)
            for i in cutlass.range_constexpr(count):
                number = Int32(i)
                load_tile(
                    self.inputs, of, self.stage(number), self.named_in(number), tiles.first + i, found, i * each,
                    geometry,
                )  # fmt: skip

    @property
    def loads(self) -> Boolean:
        """Whether this warp is of the half that loads KV tiles."""
        return self.warp < WARPS // 2

    # -------------------------------------------------------------------------------------------- scores
    @cute.jit
    def scores(self, stage: Int32, buffer: Int32):
        """S = Q·Kᵀ over this warp's slices, to shared memory. buffer: of two.

        A matrix is 16 bytes of eight tokens, and a load is of four: 16 tokens and two slices of codes, or a slice of
        bf16. The warps of a share have the 128 columns of one scale, and 16 rope columns."""
        geometry, lane = self.geometry, self.lane
        of_tokens, (along_m, along_n) = geometry.score_warps[1], geometry.score_shape
        share, token_warp = self.warp % SHARES, self.warp // SHARES % of_tokens
        row_warp = self.warp // (SHARES * of_tokens)
        matrix = lane // 8
        first_token = self.stage(stage) + token_warp * (along_n * warp_mma.K * geometry.stride)
        keys = first_token + (lane % 8 + matrix // 2 * 8) * geometry.stride + matrix % 2 * CHUNK
        rope = keys + geometry.rope_at + share * (SLICE if geometry.rope_coded else 2 * SLICE)
        keys = keys + share * (SHARE_SLICES * geometry.slice_bytes)
        scales = first_token + lane % 4 * (2 * geometry.stride) + (geometry.scales_at + 4 * share)
        blocks = geometry.token_blocks
        first = (row_warp * along_m * blocks + token_warp * (2 * along_n)) * SHARES + share
        target = self.scores_in(buffer) + first * BLOCK + opaque(lane) * 16
        acc = cute.make_rmem_tensor(cute.make_layout((4, along_m, 2)), Float32)
        raw = cute.make_rmem_tensor(cute.make_layout((warp_mma.OPERANDS, 2)), BFloat16)
        steps = cutlass.const_expr(along_n * geometry.key_steps)
        self.load_keys(keys, rope, raw, 0)
        for step in cutlass.range_constexpr(steps):
            j, n = divmod(step, geometry.key_steps)
            if cutlass.const_expr(step + 1 < steps):
                self.load_keys(keys, rope, raw, step + 1)
            if cutlass.const_expr(n == 0):
                acc.fill(0.0)
            is_rope = cutlass.const_expr(geometry.has_rope and n == geometry.key_steps - 1)
            is_coded = cutlass.const_expr(geometry.rope_coded if is_rope else geometry.coded)
            words = cute.recast_tensor(raw[None, step % 2], Int32)
            for part in cutlass.range_constexpr(2 if is_coded and not is_rope else 1):
                slice_ = SHARE_SLICES if is_rope else 2 * n + part if is_coded else n
                for c in cutlass.range_constexpr(2):
                    b = cute.make_rmem_tensor(4, BFloat16)
                    pair = cute.recast_tensor(b, Int32)
                    if cutlass.const_expr(is_coded):
                        pair[0], pair[1] = widened(words[2 * c + part], geometry.permutes)
                    else:
                        pair[0], pair[1] = words[2 * c], words[2 * c + 1]
                    for i in cutlass.range_constexpr(along_m):
                        of_pair = acc[None, i, c]
                        cute.mma_atom_call(self.mma, of_pair, self.query[None, i, slice_], b, of_pair)
            if cutlass.const_expr(geometry.scaled and n == SHARE_SLICES // 2 - 1):
                for c in cutlass.range_constexpr(2):
                    for e in cutlass.range_constexpr(2):
                        scale = float_at(scales + (j * warp_mma.K + 8 * c + e) * geometry.stride)
                        for i in cutlass.range_constexpr(along_m):
                            acc[e, i, c], acc[2 + e, i, c] = acc[e, i, c] * scale, acc[2 + e, i, c] * scale
            if cutlass.const_expr(n == geometry.key_steps - 1):
                for i in cutlass.range_constexpr(along_m):
                    for c in cutlass.range_constexpr(2):
                        place = target + (i * blocks + 2 * j + c) * (SHARES * BLOCK)
                        place = cute.make_ptr(Float32, place, cute.AddressSpace.smem, assumed_align=16)
                        cute.autovec_copy(acc[None, i, c], cute.make_tensor(place, cute.make_layout(4)))

    def load_keys(self, keys: Int32, rope: Int32, raw: cute.Tensor, step: int) -> None:
        """The bytes of 16 tokens' keys of a step, to one of two sets of registers."""
        geometry = self.geometry
        j, n = divmod(step, geometry.key_steps)
        at = rope if geometry.has_rope and n == geometry.key_steps - 1 else keys + n * 32
        load_matrices(at + j * (warp_mma.K * geometry.stride), raw[None, step % 2])

    # -------------------------------------------------------------------------------------------- softmax
    def softmax_place(self) -> tuple[Int32, Int32, Int32, Int32]:
        """(16-row block, row in it, 8-token block, pair in it) of this thread. Lanes are dealt so that those of half a
        warp, which read 8 bytes each of the partial sums, have all banks."""
        geometry, lane = self.geometry, self.lane
        warps = cutlass.const_expr(WARPS * warp_mma.M // geometry.m)  # on a block of rows
        block, part, half, top = self.warp // warps, self.warp % warps, lane // 8 % 2, lane // 16
        if cutlass.const_expr(geometry.between == 1):
            row, token_block = (part ^ half) * 4 + top * 2 + lane // 4 % 2, Int32(0)
        elif cutlass.const_expr(geometry.between == 2):
            row, token_block = (part ^ (half * 2)) * 2 + lane // 4 % 2, top
        else:
            row, token_block = part ^ (half * 4), top * 2 + lane // 4 % 2
        return block, half * 8 + row, token_block, lane % 4

    @cute.jit
    def softmax(self, stage: Int32, buffer: Int32) -> Boolean:
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
        of_token = cute.make_rmem_tensor(2, Int32)
        for v in cutlass.range_constexpr(count):
            named = self.named_in(stage) + cute.assume(column + v * geometry.between * warp_mma.N, divby=2)
            cute.autovec_copy(cute.make_tensor(named.align(8), cute.make_layout(2)), of_token)
            for i in cutlass.range_constexpr(2):
                values[i, v] = cutlass.select_(of_token[i] != 0, values[i, v], -Float32.inf)

        best = functools.reduce(cute.arch.fmax, [cute.arch.fmax(values[0, v], values[1, v]) for v in range(count)])
        for step in geometry.row_steps:
            best = cute.arch.fmax(best, cute.arch.shuffle_sync_bfly(best, offset=step))
        older = self.of_row[0]
        newer = softmax.lazy_max(older, best * self.scale_log2)
        factor = softmax.exp2(older - newer)
        total = self.of_row[1] * factor
        rounded = cute.make_rmem_tensor(2, BFloat16)
        target = self.p_in(buffer) + row * (2 * (geometry.tokens + PAD)) + 2 * column
        for v in cutlass.range_constexpr(count):
            for i in cutlass.range_constexpr(2):
                value = softmax.exp2(values[i, v] * self.scale_log2 - newer)
                total = total + value
                rounded[i] = value.to(BFloat16)
            at = target + 2 * v * geometry.between * warp_mma.N
            at = cute.make_ptr(BFloat16, at, cute.AddressSpace.smem, assumed_align=4)
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

    def rows_in(self, array: Any) -> cute.Tensor:
        """(rows,) shared memory."""
        return array.get_tensor(cute.make_layout(self.geometry.m))

    # -------------------------------------------------------------------------------------------- output
    def output_row(self, i: int, half: int) -> Int32:
        """The row of the query tile that this thread's accumulators (2 half .., i, ..) are of."""
        return i * warp_mma.M + half * 8 + self.lane // 4

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
        """O += P·V of this warp's 64 columns. V is K's bytes, read transposed: 16 tokens of two chunks at a time, which
        have 16 columns each where they are codes, and eight where they are bf16."""
        geometry, lane = self.geometry, self.lane
        along_m, _ = geometry.output_shape
        matrix, swizzle = lane // 8, lane % 8
        first_token = self.stage(stage)
        values = first_token + (swizzle + matrix % 2 * 8) * geometry.stride + matrix // 2 * CHUNK
        values = values + self.warp * (VALUES // WARPS * geometry.slice_bytes // SLICE)
        scales = first_token + lane % 4 * (2 * geometry.stride) + (geometry.scales_at + self.warp // 2 * 4)
        stride = cutlass.const_expr(2 * (geometry.tokens + PAD))
        weights = self.p_in(buffer) + (swizzle + matrix % 2 * 8) * stride + matrix // 2 * 16

        a = cute.make_rmem_tensor(cute.make_layout((warp_mma.OPERANDS, along_m)), BFloat16)
        raw = cute.make_rmem_tensor(cute.make_layout((warp_mma.OPERANDS, 2)), BFloat16)
        of_token = cute.make_rmem_tensor(4, Float32)  # scales of this lane's two tokens of each eight
        loads = cutlass.const_expr(2 if geometry.coded else 4)
        steps = cutlass.const_expr(geometry.token_blocks // 2 * loads)
        self.load_values(values, raw, 0)
        for step in cutlass.range_constexpr(steps):
            n, j = divmod(step, loads)
            if cutlass.const_expr(j == 0):
                for i in cutlass.range_constexpr(along_m):
                    load_matrices(weights + (n * 2 * warp_mma.K + i * warp_mma.M * stride), a[None, i])
                if cutlass.const_expr(geometry.scaled):
                    for e in cutlass.range_constexpr(4):
                        token = cutlass.const_expr(n * warp_mma.K + e // 2 * 8 + e % 2)
                        of_token[e] = float_at(scales + token * geometry.stride)
            if cutlass.const_expr(step + 1 < steps):
                self.load_values(values, raw, step + 1)
            words = cute.recast_tensor(raw[None, step % 2], Int32)
            for part in cutlass.range_constexpr(2):
                if cutlass.const_expr(geometry.coded):
                    b = cute.make_rmem_tensor(cute.make_layout((4, 2)), BFloat16)  # of even columns, and of odd ones
                    pairs = cute.recast_tensor(b, Int32)
                    for e in cutlass.range_constexpr(2):
                        own = [of_token[2 * e], of_token[2 * e + 1]] if geometry.scaled else None
                        codes = tokens_apart(words[2 * part + e])
                        pairs[e, 0], pairs[e, 1] = widened(codes, geometry.permutes, own)
                    for i in cutlass.range_constexpr(along_m):
                        for c in cutlass.range_constexpr(2):
                            acc = self.acc_o[None, i, 4 * j + 2 * part + c]
                            cute.mma_atom_call(self.mma, acc, a[None, i], b[None, c], acc)
                else:
                    b = cute.make_rmem_tensor(4, BFloat16)
                    pair = cute.recast_tensor(b, Int32)
                    pair[0], pair[1] = words[2 * part], words[2 * part + 1]
                    for i in cutlass.range_constexpr(along_m):
                        acc = self.acc_o[None, i, 2 * j + part]
                        cute.mma_atom_call(self.mma, acc, a[None, i], b, acc)

    def load_values(self, values: Int32, raw: cute.Tensor, step: int) -> None:
        """The bytes of 16 tokens of two chunks, to one of two sets of registers."""
        n, j = divmod(step, 2 if self.geometry.coded else 4)
        at = values + (j * 2 * CHUNK + n * warp_mma.K * self.geometry.stride)
        load_matrices(at, raw[None, step % 2], transposed=True)

    # -------------------------------------------------------------------------------------------- a split
    @cute.jit
    def run(self, of: Reader, first: Int32, block: rows.Block):
        """Tiles first..of.end-1 of a split that `start` has begun."""
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
            moved = Boolean(False)
            # Warps i and i + 4 share a quarter of the SM: one multiplies while the other one is in its softmax.
            if self.loads:
                load_tile(
                    self.inputs, of, self.stage(free), self.named_in(free), tile + (stages - 2), self.found, 0, geometry
                )
                find_rows(self.inputs, of, tile + (stages - 1), self.found, 0, geometry)
                if tile < of.end:
                    moved = self.softmax(stage, buffer)
            if tile + 1 < of.end:
                self.scores(following, 1 - buffer)
            if tile > first:
                if rescaled:
                    self.rescale(1 - buffer)
                self.output(older, 1 - buffer)
            if (self.warp >= WARPS // 2) & (tile < of.end):
                moved = self.softmax(stage, buffer)
            older, stage, buffer = stage, following, 1 - buffer
        if cutlass.const_expr(self.inputs.flat is not None):
            scale = self.inputs.flat[0]
            for i in cutlass.range_constexpr(geometry.output_shape[0]):
                for half in cutlass.range_constexpr(2):
                    self.scale_output(i, half, scale)


def float_at(address: Int32) -> Float32:
    """A float32 in shared memory."""
    place = cute.make_ptr(Float32, address, cute.AddressSpace.smem, assumed_align=4)
    return cute.make_tensor(place, cute.make_layout(1))[0]


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
    if (place == 0) & (token_block == 0):
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


def place_of(n: int, j: int, c: int, half: int, geometry: Geometry) -> tuple[int, int]:
    """Where among a lane's accumulators of a row those of word j of the n-th 32 columns are, and its half c."""
    if geometry.coded:
        return 2 * half + j % 2, n * partials.QUAD + j // 2 * 2 + c
    return 2 * half + c, n * partials.QUAD + j


@cute.jit
def add_partial(w: cutlass.Constexpr, of_rows: cutlass.Constexpr, results: Results, tile: Int32, slot: Int32):
    """Adds a partial, whose vectors have what this thread's accumulators have."""
    geometry, layout = w.geometry, w.geometry.partials
    along_m, along_n = geometry.output_shape
    is_right = w.warp >= WARPS // 2
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
                quad = w.warp * (along_n // partials.QUAD) + n
                at = cute.assume((quad * partials.QUAD + w.lane % 4) * partials.VECTOR, divby=partials.VECTOR)
                values = cute.make_rmem_tensor(partials.VECTOR, Float16)
                cute.autovec_copy(cute.make_tensor(source + at, cute.make_layout(partials.VECTOR)), values)
                if cutlass.const_expr(geometry.coded):
                    exchange(cute.recast_tensor(values, Int32), w.lane, back=True)
                for j in cutlass.range_constexpr(partials.VECTOR):
                    c, column = place_of(n, j // 2, j % 2, half, geometry)
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
    lane = w.lane
    factor = cute.make_rmem_tensor(cute.make_layout((2, along_m)), Float32)
    if whole:
        for i in cutlass.range_constexpr(along_m):
            for half in cutlass.range_constexpr(2):
                total, row = of_rows.total[half, i], w.first_row + w.output_row(i, half)
                head, over = cutlass.min(row, geometry.h - 1), total
                if cutlass.const_expr(geometry.sink):
                    over = total + softmax.exp2(w.inputs.sink[head] * math.log2(math.e) - of_rows.top[half, i])
                factor[half, i] = cutlass.select_(total > 0.0, 1.0 / over, Float32(0.0))
                if w.warp == 0 and lane % 4 == 0 and row < geometry.h:
                    lse[block.first, head, 0] = softmax.natural_lse(total, of_rows.top[half, i])
    else:
        magnitudes = w.storage.magnitudes.get_tensor(cute.make_layout((WARPS, geometry.m), stride=(1, WARPS)))
        for i in cutlass.range_constexpr(along_m):
            for half in cutlass.range_constexpr(2):
                size = Float32(0.0)
                for j in cutlass.range_constexpr(along_n):
                    for c in cutlass.range_constexpr(2):
                        size = size + cute.math.absf(w.acc_o[2 * half + c, i, j])
                size = softmax.quad_sum(size)
                if lane % 4 == 0:
                    magnitudes[w.warp, w.output_row(i, half)] = size
        cute.arch.sync_threads()
        side = w.warp // (WARPS // 2)
        for i in cutlass.range_constexpr(along_m):
            for half in cutlass.range_constexpr(2):
                size = Float32(0.0)
                for j in cutlass.range_constexpr(WARPS // 2):
                    size = size + magnitudes[side * (WARPS // 2) + j, w.output_row(i, half)]
                exponent = partials.exponent_of(size)
                factor[half, i] = partials.power_of_two(partials.TARGET_EXPONENT - exponent)
                if w.warp % (WARPS // 2) == 0 and lane % 4 == 0:
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
                at = rows.row_offset(
                    out, block.first, Int32(0), cutlass.min(w.first_row + row, geometry.h - 1), geometry.h
                )
                base = out.iterator.toint() + 2 * at
            for n in cutlass.range_constexpr(along_n // partials.QUAD):
                words = cute.make_rmem_tensor(partials.QUAD, Int32)
                for j in cutlass.range_constexpr(partials.QUAD):
                    pair = cute.make_rmem_tensor(2, Float32)
                    for c in cutlass.range_constexpr(2):
                        element, column = place_of(n, j, c, half, geometry)
                        pair[c] = w.acc_o[element, i, column]
                    if whole:
                        words[j] = word_of(pair, out.element_type)
                    else:
                        words[j] = word_of(pair, Float16)
                if cutlass.const_expr(geometry.coded):
                    exchange(words, lane)
                quad = w.warp * (along_n // partials.QUAD) + n
                column = quad * (partials.QUAD * partials.VECTOR) + lane % 4 * partials.VECTOR
                if whole:
                    partials.transpose_quad(words, lane)
                address = cute.make_ptr(Int32, base + Int64(2 * column), cute.AddressSpace.gmem, assumed_align=16)
                partials.store_vector(words, address, w.first_row + row < geometry.h)


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
    of_tile = rows.TileRows(Int32(0), w.first_row, geometry.h, geometry.m)
    group = Group(Barrier.CTA, THREADS)
    walk.store_empty(results, walk.line.empty, of_tile, thread, THREADS)
    if walk.has_work(split):
        w.start(walk, split)
    while walk.has_work(split):
        tiles = walk.tiles_of(split)
        block = walk.queries.block(split.request)
        walk.list_splits(split, tiles, thread)
        if tiles.first < tiles.end:
            w.run(reader(w.inputs, split, w.token, tiles.end, geometry), tiles.first, block)
        following = walk.next_split(split)
        cute.arch.sync_threads()  # nobody reads a KV tile or Q any more
        if walk.has_work(following):
            w.start(walk, following)
        else:
            # Let go at a CTA's start, the next call of a short request is there before this one has begun.
            launch_dependents()
        if tiles.first < tiles.end:
            # Else addresses of results are computed ahead of all splits, and take registers in the loop of products.
            of_end = replace(w, lane=opaque(w.lane))
            of_rows = share_rows(of_end)
            add = functools.partial(add_partial, of_end, of_rows, results, tile)
            place = walk.place_of(split, tiles)
            place = walk.merge_all(place, split, tiles, add, group, thread)
            epilogue(of_end, of_rows, results, block, place, tile)
            cute.arch.sync_threads()
            walk.publish_all(split, tiles, thread)
        else:
            rows.store_no_keys(results, block, of_tile, thread, THREADS)
        split = following


@cute.kernel
def sparse_mla_mma(
    inputs: Inputs,
    results: Results,  # out (b · s, 1, h, 512), lse (b · s, h, 1)
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
    token, first_row = tile // geometry.row_tiles, tile % geometry.row_tiles * geometry.m
    storage = SmemAllocator().allocate(shared_storage(geometry))
    # Nothing that a kernel before may have written is read, and nothing is written, ahead of this.
    grid_wait()
    if cutlass.const_expr(inputs.flat is not None):
        scale_log2 = scale_log2 * inputs.flat[0]
    walk, split = begin(
        schedule, flags, inputs.lengths, Token(token, geometry.s), pool, Cta(worker, tile, thread, warp, lane),
        storage.first.data_ptr(), 0, geometry.merge,
    )  # fmt: skip
    w = Worker.make(geometry, inputs, storage, thread, warp, scale_log2, token, first_row)
    consume(w, results, walk, split, tile)


sparse_mla_mma.set_name_prefix("sparse_mla_mma", remove_cutlass_symbol=True, keep_mangled_name=False)


# ------------------------------------------------------------------------------------------------ host
@cute.jit
def launch_sparse_mla_mma(
    q: cute.Tensor,  # (b, s, h, columns) bf16, columns contiguous
    cache: cute.Tensor,  # (pages, page, bytes of a token) uint8, or (pages, page, columns) bf16, contiguous in a page
    indices: cute.Tensor,  # (b, s, topk) int32, or a page table (b, width)
    lengths: cute.Tensor,  # (b,) int32: indices, or cached tokens, of a request
    sink: cute.Tensor | None,  # (h,) fp32
    flat: cute.Tensor | None,  # (1,) fp32
    out: cute.Tensor,  # (b, s, h, 512) bf16, columns contiguous
    lse: cute.Tensor,  # (b, h, s) fp32
    of_partials: cute.Tensor,  # `Partials.views`
    flags: cute.Tensor,
    words: cute.Tensor,  # `scheduler.schedule_in`
    scale: Float32,
    workers: Int32,
    geometry: cutlass.Constexpr,
    stream: CUstream,
):
    """Launches a CTA for each query tile and worker, as a programmatic dependent where there is such a thing."""
    b = q.shape[0]
    if cutlass.const_expr(geometry.paged):
        tokens = indices.shape[1] * geometry.page
    else:
        tokens = scheduler.ceil_div(indices.shape[2], geometry.tokens) * geometry.tokens
    schedule = scheduler.schedule_in(words, workers, False)
    results = Results(rows.by_token(out, b), rows.lse_by_token(lse, b), *geometry.partials.views(of_partials))
    if cutlass.const_expr(geometry.combines):
        pool = scheduler.make_pool(b, tokens, workers, Int32(0), Int32(scheduler.OWN), geometry.costs)
    else:
        pool = scheduler.make_merged_pool(b, tokens, workers, geometry.costs)
    inputs = Inputs(rows.by_token(q, b), cache, indices, lengths, sink, flat)
    sparse_mla_mma(inputs, results, flags, schedule, scale * math.log2(math.e), pool, geometry).launch(
        grid=(geometry.tiles, workers, 1),
        block=(THREADS, 1, 1),
        min_blocks_per_mp=1,
        stream=stream,
        use_pdl=has_dependents(),
    )
    if cutlass.const_expr(geometry.combines):
        of_token = Results(out, lse, results.outputs, results.stats)
        ctas = 2 * workers * geometry.tiles
        combine.launch(of_token, schedule.table, lengths, None, pool, ctas, geometry.merge, stream, sink)


# ------------------------------------------------------------------------------------------------ plan
def takes(pd: SparseProblem) -> Verdict:
    """Whether this version computes a problem."""
    if pd.layout not in LAYOUTS:
        return Verdict.no(f"layout {pd.layout} is not among those of this version: {', '.join(LAYOUTS)}")
    if pd.extra:
        return Verdict.no("this version reads one cache: it takes no extra one")
    return Verdict.yes()


def written(m: int, tokens: int) -> bool:
    """Whether eight warps have work in a query tile of m rows and a KV tile: two tokens or more of a row for a thread
    of the softmax."""
    return m * tokens >= 2 * THREADS


@dataclass(frozen=True)
class SparseMlaMmaTiling(Tiling):
    """tile_m: heads of the query tile, 16, 32 or 64. tile_n: tokens of a KV tile, 16 or 32. num_pipeline_stages: KV
    tiles in shared memory, at least 4. Of these three 0 is what suits the problem and the shared memory of the device.
    permutes: widens codes by byte permutes, as GPUs before sm_89 do, although the device converts e4m3. workers: CTAs
    for each query tile of a request; 0: as many as fill the device."""

    launch_fields: ClassVar[tuple[str, ...]] = ("workers",)

    tile_m: int = 0
    tile_n: int = 0
    num_pipeline_stages: int = 0
    permutes: bool = False
    workers: int = 0

    def geometry(self, pd: SparseProblem, device: Device | None = None) -> Geometry:
        """What the code is made for, with everything chosen; device: None for the assumed one."""
        of = device or Device.assumed()
        permutes = pd.layout != "bf16" and (self.permutes or of.sm_version < CONVERTS)

        def made(m: int, tokens: int, stages: int) -> Geometry:
            return Geometry(
                pd.h, pd.s, pd.layout, pd.page, pd.lengths and not pd.paged, pd.sink, pd.paged, m, tokens, stages,
                permutes,
            )  # fmt: skip

        def stages_of(m: int, tokens: int) -> int:
            bare = made(m, tokens, 0)
            return min(MOST_STAGES, (of.smem_per_block - fixed_bytes(bare)) // bare.stage_bytes)

        most = ROW_TILES[-1] if self.tile_m or of.arch in WHOLE else ROW_TILES[-2]
        pairs = [(m, n) for m in ROW_TILES for n in (32, 16) if self.tile_m in (0, m) and self.tile_n in (0, n)]
        pairs = [(m, n) for m, n in pairs if (m <= most and written(m, n)) or (self.tile_m and self.tile_n)]
        fitting = [(m, n) for m, n in pairs if stages_of(m, n) >= (self.num_pipeline_stages or FEWEST_STAGES)]
        enough = [(m, n) for m, n in fitting if m >= pd.h]
        m, tokens = enough[0] if enough else max(fitting or pairs or [(ROW_TILES[-1], TOKEN_TILES[-1])])
        return made(m, tokens, self.num_pipeline_stages or max(0, stages_of(m, tokens)))

    def validate(self, pd: SparseProblem, device: Device | None = None) -> Verdict:
        if self.tile_m not in (0, *ROW_TILES):
            return Verdict.no(f"tile_m = {self.tile_m}, and this version is written for 16, 32 and 64")
        if self.tile_n not in (0, *TOKEN_TILES):
            return Verdict.no(f"tile_n = {self.tile_n}, and this version is written for 16 and 32")
        if not 0 <= self.workers <= scheduler.MOST_WORKERS:
            return Verdict.no(f"workers = {self.workers} must be between 0 and {scheduler.MOST_WORKERS:,}")
        if not (taken := takes(pd)):
            return taken
        geometry = self.geometry(pd, device)
        if not written(geometry.m, geometry.tokens):
            return Verdict.no(f"tile_m = {geometry.m} and tile_n = {geometry.tokens} are too few for eight warps")
        if 0 < self.num_pipeline_stages < FEWEST_STAGES:
            return Verdict.no(
                f"num_pipeline_stages = {self.num_pipeline_stages} leaves no KV tile to load while three are computed "
                f"with: at least {FEWEST_STAGES}"
            )
        of, stages = device or Device.assumed(), max(FEWEST_STAGES, geometry.stages)
        smem = fixed_bytes(geometry) + stages * geometry.stage_bytes
        if smem > of.smem_per_block:
            return Verdict.no(
                f"{smem:,} bytes of shared memory for {geometry.m} query rows and {stages} KV tiles of "
                f"{geometry.tokens} tokens are over the {of.smem_per_block:,} that a CTA of {of.key} may have"
            )
        if device is not None and geometry.tiles > device.num_sms:
            return Verdict.no(
                f"{geometry.tiles} query tiles of a request are more than the {device.num_sms} multiprocessors of "
                f"{device.key}: workers wait for each other and must all be running"
            )
        if not (counted := limits.sparse_sizes(pd)):
            return counted
        workers = self.workers or (max(1, device.num_sms // geometry.tiles) if device is not None else 1)
        tokens = pd.t if pd.paged else -(-pd.topk // geometry.tokens) * geometry.tokens
        return decode_host.schedule_sizes(pd.b, tokens, workers, 0, geometry.partials, geometry.costs)


class SparseMlaMmaPlan(KernelPlan):
    """One compiled kernel a problem class and tile; b, numbers of tokens and indices, and workers are arguments."""

    workload = sparse_decode.WORKLOAD
    tiling_type = SparseMlaMmaTiling
    tiling: SparseMlaMmaTiling
    uses = ("adaptive-tiles", "device-tile-scheduler", "fast-exp2-softmax", "loading/packed-fp8-keys", "split-kv")
    requires = Requirement(
        archs=("sm_80+",),
        dtypes=("bf16",),
        features=("cp_async",),
        problem=takes,
        options=("no_rope", "paged", "strided", "strided_out"),
    )

    def default_tiling(self) -> Tiling:
        return SparseMlaMmaTiling()

    def autotune_configs(self) -> list[Tiling]:
        return [self.default_tiling()]

    def geometry(self) -> Geometry:
        return self.tiling.geometry(self.problem, host.target(self))

    def workers(self) -> int:
        """Workers of a query tile: the tiling's, or those that fill the device."""
        return self.tiling.workers or max(1, host.target(self).num_sms // self.geometry().tiles)

    @any_scale(0)
    def plan(self, *inputs: Any) -> CuteKernel:
        import torch

        self.require()
        pd, geometry, workers = self.problem, self.geometry(), self.workers()
        given = sparse_decode.named(pd, *inputs)
        q = given["q"]
        b = q.shape[0]
        outputs = sparse_decode.new_outputs(pd, q)
        indices = given["page_table" if pd.paged else "indices"]
        lengths = given["seq_lens"] if pd.paged else given.get("lengths")
        if lengths is None:
            tokens = -(-indices.shape[2] // geometry.tokens) * geometry.tokens
            lengths = torch.full((b,), tokens, dtype=torch.int32, device=q.device)
        spaces = decode_host.workspaces(q, geometry.partials, b, workers)
        flat = given["scale"] if pd.cache.one_scale else None
        arguments = (
            q, given["cache"], indices, lengths, given.get("sink"), flat, *outputs, *spaces, pd.scale, workers
        )  # fmt: skip
        return self._make(arguments, inputs, outputs, (*spaces, lengths))

    def plan_empty(self) -> CuteKernel:
        self.require()
        return self._make((), (), ())

    def _make(self, given: Any, inputs: Any, outputs: Any, workspaces: Any = ()) -> CuteKernel:
        pd, geometry = self.problem, self.geometry()
        kind = host.element_type(pd.dtype)

        def cache() -> Any:
            of = Uint8 if geometry.coded else kind
            row = geometry.row_bytes if geometry.coded else pd.columns
            apart = cute.sym_int64(divisibility=16 if geometry.coded else 8)
            return make_fake_tensor(of, (*host.symbols(1), pd.page, row), (apart, row, 1), assumed_align=16)

        def arguments() -> tuple[Any, ...]:
            (b,) = host.symbols(1)
            fake = decode_host.fake_apart if pd.strided else host.fake
            return (
                fake(kind, b, pd.s, pd.h, pd.columns),
                cache(),
                fake(Int32, *((b,) if pd.paged else (b, pd.s)), *host.symbols(1), align=4),
                host.fake(Int32, b, align=4),
                host.fake(Float32, pd.h, align=4) if pd.sink else None,
                host.fake(Float32, 1, align=4) if pd.cache.one_scale else None,
                *decode_host.fake_results(kind, (b, pd.s, pd.h, VALUES), (b, pd.h, pd.s), pd.strided_out),
                *decode_host.fake_workspaces(),
                Float32(1.0),
                Int32(1),
                geometry,
            )

        return host.stage(
            self, sparse_mla_mma, launch_sparse_mla_mma, "sparse_mla_mma", arguments, given, inputs, outputs, workspaces
        )
