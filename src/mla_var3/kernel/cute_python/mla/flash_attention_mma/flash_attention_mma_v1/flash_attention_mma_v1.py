r"""Attention of prompts over decompressed heads with warp-level products, two groups of warps taking turns at the
scores.

    out[i, :] = softmax(scale · q[i] · Kᵀ) · V      q, K: dk columns a head    V: dv <= dk

Requests lie behind each other in q (n, h, dk) and in k, v (m, h_kv, ·); `cu_seqlens_q` and `cu_seqlens_k` say where
each begins. Query head i reads kv head i // (h / h_kv). The causal mask is aligned at the end: query token i of s sees
keys 0 .. t - s + i.

A CTA computes one query tile of 256 rows of one head, and goes through its KV tiles of 64 keys from the last one, which
holds the diagonal, to the first. It has two groups of four warps, so a warp of each on every quarter of the SM, and a
warp has 32 rows of its own. KV tile i of a group:

    softmax    row maxima of S
    output     O += P·V, with the exponentials of the next 16 keys between the products of these
    turn       S = Q·Kᵀ of KV tile i + 1

Scores alone need shared memory for as long as the tensor core. In version 0 two warps of a quarter multiply them at the
same time as chance has it, each at half the rate, and later both are in their softmax, when the tensor core waits. Here
a group begins its turn when the other one has ended its own (named barriers TURN), so that the other one is in its
softmax and output meanwhile:

    group 0    turn i                 softmax, output i          turn i + 1
    group 1    softmax, output i - 1  turn i                     softmax, output i
                                             copies K and V i + 2

When group 1 has ended turn i, nobody reads K of KV tile i or V of i - 1 any more: its threads copy over them (cp.async,
16 bytes a thread), and wait for what they have copied at the end of their next turn, before group 0 needs it. So a KV
tile has no barrier of the whole CTA, and shared memory holds two tiles of K and three of V.

What a warp reads of K and V from shared memory by ldmatrix serves its 32 rows. Q is read again in each KV tile, since
registers hold O and S (128 and 64 of a thread's 255 with 128 columns). Row maxima and sums, and where K and V are
copied from, lie in shared memory between their uses, 64 bytes a thread: all registers are taken while the scores are
multiplied.

A query tile begins with the KV tiles that some of its rows do not see as a whole: masks are applied there only, and a
warp leaves out those that none of its rows sees. The loop over all others has no branch around its products.

192 / 128 columns take 214,016 bytes of shared memory, which devices with 227 KB have.

Tile scheduler: the grid has a CTA for each query tile that there might be. Requests lie on a line of query tiles, the
one with the most keys first. Within a request heads come in sections whose keys and values fit in L2 together, and in a
section the query tiles with the most keys come first: the GPU starts CTAs in this order, so the small ones fill the
tail. Lengths are read on the device only; a CTA past the end of the line has nothing to do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator

from mla_var3.device import Device, Requirement
from mla_var3.kernel.cute_python import host
from mla_var3.kernel.cute_python.prims import softmax, warp_mma
from mla_var3.kernel.cute_python.prims.sync import named_sync
from mla_var3.kernel.cute_python.prims.warp_mma import WARP, load_matrices
from mla_var3.runtime import CuteKernel, KernelPlan, LibraryCall, Tiling, Verdict, limits
from mla_var3.runtime.plan import require_int32
from mla_var3.runtime.scaling import any_scale
from mla_var3.workload import prefill

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mla_var3.runtime.base import BaseKernel
    from mla_var3.workload.prefill import PrefillProblem

PANEL = 64  # columns of a panel: 128 bytes, in which ldmatrix and cp.async meet no bank twice once rows are swizzled
ROW_BYTES = 2 * PANEL
CHUNK = 8  # elements of a cp.async: 16 bytes
CHUNKS = PANEL // CHUNK  # threads on a row of a panel
SORTED = 128  # requests up to which they are sorted by their keys; of more the order is the caller's
MISC_BYTES = 1024  # of shared memory, in front of Q
ROWS, WARPS = 256, 8  # of the query tile
THREADS = WARPS * WARP
GROUP = THREADS // 2  # threads of a group
WARP_ROWS = ROWS // WARPS
ALONG_M = WARP_ROWS // warp_mma.M  # products along the rows of a warp
TOKENS = 64  # keys of a KV tile
K_STAGES, V_STAGES = 2, 3  # tiles of K and of V in shared memory
PARKED = 4 * THREADS  # words of all row maxima, sums or addresses that lie in shared memory


class Barrier(IntEnum):
    """Named barriers."""

    CTA = 0
    TURN = 1  # + the group's number: it may begin its turn
    ENDED = 3  # the warps of group 1, between its turn and its copies


# ------------------------------------------------------------------------------------------------ what code is made for
def panels_of(columns: int) -> int:
    """64-column panels of a head; the last one may not be full."""
    return -(-columns // PANEL)


@dataclass(frozen=True)
class Geometry:
    """What the code is specialised on: heads, columns of keys and values, mask."""

    h: int
    h_kv: int
    dk: int
    dv: int
    causal: bool

    @property
    def group(self) -> int:
        """Query heads that share a kv head."""
        return self.h // self.h_kv

    @property
    def q_elements(self) -> int:
        return ROWS * PANEL * panels_of(self.dk)

    @property
    def k_elements(self) -> int:
        """Of a stage of K."""
        return TOKENS * PANEL * panels_of(self.dk)

    @property
    def v_elements(self) -> int:
        return TOKENS * PANEL * panels_of(self.dv)

    @property
    def smem_bytes(self) -> int:
        return (
            MISC_BYTES + 16 * PARKED + 2 * (self.q_elements + K_STAGES * self.k_elements + V_STAGES * self.v_elements)
        )


def shared_storage(geometry: Geometry, dtype: type) -> type:
    """The CTA's shared memory: what the tile scheduler needs in the first KiB, then Q, K and V."""

    def panels(size: int) -> Any:
        return cute.struct.Align[cute.struct.MemRange[dtype, size], 1024]

    fields = {
        "counts": cute.struct.MemRange[Int32, SORTED],  # keys of each request
        "order": cute.struct.MemRange[Int32, SORTED],  # requests, that with the most keys first
        "maxima": cute.struct.Align[cute.struct.MemRange[Float32, PARKED], 1024],
        "sums": cute.struct.Align[cute.struct.MemRange[Float32, PARKED], 1024],
        "k_sources": cute.struct.Align[cute.struct.MemRange[Int64, PARKED // 2], 1024],
        "v_sources": cute.struct.Align[cute.struct.MemRange[Int64, PARKED // 2], 1024],
        "query": panels(geometry.q_elements),
        "keys": panels(K_STAGES * geometry.k_elements),
        "values": panels(V_STAGES * geometry.v_elements),
    }
    # Not a class statement: postponed annotations are strings, and the struct wants types.
    return cute.struct(type("Storage", (), {"__annotations__": fields}))


class Inputs(NamedTuple):
    """Global memory."""

    q: cute.Tensor  # (n, h, dk)
    k: cute.Tensor  # (m, h_kv, dk)
    v: cute.Tensor  # (m, h_kv, dv)
    cu_seqlens_q: cute.Tensor  # (b + 1,) int32
    cu_seqlens_k: cute.Tensor


class Tile(NamedTuple):
    """A query tile. row: of q, its first query token. rows: of the request from there on; 0: there is none. head: of q.
    key: of k and v, the request's first one. keys: of the request. seen: keys that the first row sees; where fewer keys
    than queries are causal it may be negative, and each row sees one more than the row before."""

    row: Any
    rows: Any
    head: Any
    key: Any
    keys: Any
    seen: Any


# ------------------------------------------------------------------------------------------------ tile scheduler
# These take Python integers as well as traced ones.
def ceil_div(number: Any, divisor: Any) -> Any:
    """number / divisor, rounded up; of numbers that are not negative."""
    return (number + divisor - 1) // divisor


def query_tiles(s: Any) -> Any:
    """Query tiles of a head of a request; none where the length is not positive."""
    return ceil_div(cutlass.max(s, 0), ROWS)


def section_width(t: Any, room: Any, geometry: Geometry) -> Any:
    """Query heads of a section of a request of t keys: those of as many kv heads as fit in L2, at least one. room: keys
    of a kv head, with their values, that fit there."""
    heads = room // cutlass.max(t, 1)
    return cutlass.min(cutlass.max(heads, 1), geometry.h_kv) * geometry.group


def place_of(index: Any, tiles: Any, width: Any, heads: int) -> tuple[Any, Any]:
    """(query tile, head) of a request with `tiles` query tiles a head: section after section of `width` heads, in each
    the last query tile of all its heads first."""
    section = index // (tiles * width)
    inside = index - section * (tiles * width)
    count = cutlass.min(width, heads - section * width)  # the last section may have fewer heads
    down = inside // count
    return tiles - 1 - down, section * width + (inside - down * count)


def tile_of(place: tuple[Any, Any], first_q: Any, s: Any, first_k: Any, t: Any, geometry: Geometry) -> Tile:
    """The query tile at a `place_of` in a request of s queries and t keys that begin at tokens first_q and first_k."""
    at, head = place
    first = at * ROWS
    seen = t - s + first + 1 if geometry.causal else t
    return Tile(first_q + first, s - first, head, first_k, t, seen)


def keys_seen(tile: Tile, row: Any, causal: bool) -> Any:
    """Keys that a row of the query tile sees; not above 0: none."""
    return cutlass.min(tile.keys, tile.seen + row) if causal else tile.keys


def kv_tiles(tile: Tile, geometry: Geometry) -> Any:
    """KV tiles that a query tile sees any key of."""
    last = keys_seen(tile, cutlass.min(tile.rows, ROWS) - 1, geometry.causal)
    return ceil_div(cutlass.max(last, 0), TOKENS)


def whole_tiles(tile: Tile, geometry: Geometry) -> Any:
    """KV tiles, from the first on, of which all rows see every key."""
    return cutlass.max(keys_seen(tile, 0, geometry.causal), 0) // TOKENS


class Window(NamedTuple):
    """32 requests of the line, one a lane. rank: of the first. begin, end: query tiles in front of the window and up
    to its end, all heads; the same in all lanes. start, count: query tiles in front of the lane's request, and its own
    ones."""

    rank: Int32
    begin: Int32
    end: Int32
    start: Int32
    count: Int32


@cute.jit
def request_at(rank: Int32, order: cute.Tensor, requests: Int32) -> Int32:
    """The request at a place of the line; order: (SORTED,) shared memory."""
    request = rank
    if requests <= SORTED:
        request = order[rank]
    return request


@cute.jit
def window_at(
    rank: Int32,
    begin: Int32,
    lane: Int32,
    cu_seqlens_q: cute.Tensor,
    order: cute.Tensor,
    geometry: cutlass.Constexpr,
) -> Window:
    """The window of requests `rank` on, in front of which there are `begin` query tiles; by a whole warp."""
    requests = cu_seqlens_q.shape[0] - 1
    count = Int32(0)
    if rank + lane < requests:
        request = request_at(rank + lane, order, requests)
        count = query_tiles(cu_seqlens_q[request + 1] - cu_seqlens_q[request]) * geometry.h
    until = count
    for i in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(until, 1 << i)
        until = until + cutlass.select_(lane >= (1 << i), other, Int32(0))
    end = begin + cute.arch.shuffle_sync(until, WARP - 1)
    return Window(rank, begin, end, begin + until - count, count)


@cute.jit
def sort_requests(inputs: Inputs, counts: cute.Tensor, order: cute.Tensor, thread: Int32):
    """Writes the order of up to SORTED requests, most keys first, equal ones as they come; by the whole CTA, which has
    as many threads at least. A request without queries has no query tile, wherever it lies."""
    offsets = inputs.cu_seqlens_k
    requests = offsets.shape[0] - 1
    mine = Int32(0)
    if thread < requests:
        mine = cutlass.max(offsets[thread + 1] - offsets[thread], 0)
        counts[thread] = mine
    cute.arch.sync_threads()
    if thread < requests:
        rank = Int32(0)
        for other in cutlass.range(requests, unroll=1):
            theirs = counts[other]
            rank = rank + Int32((theirs > mine) | ((theirs == mine) & (other < thread)))
        order[rank] = thread
    cute.arch.sync_threads()


@cute.jit
def tile_at(
    inputs: Inputs,
    storage: cutlass.Constexpr,
    index: Int32,
    room: Int32,  # of `section_width`
    thread: Int32,
    geometry: cutlass.Constexpr,
) -> Tile:
    """Query tile `index` of the line; one without rows where the line has ended. Every warp looks for itself."""
    lane = thread % WARP
    requests = inputs.cu_seqlens_q.shape[0] - 1
    order = storage.order.get_tensor(cute.make_layout(SORTED))
    if requests <= SORTED:
        sort_requests(inputs, storage.counts.get_tensor(cute.make_layout(SORTED)), order, thread)
    window = window_at(Int32(0), Int32(0), lane, inputs.cu_seqlens_q, order, geometry)
    searching = (index >= window.end) & (window.rank + WARP < requests)
    while searching:
        window = window_at(window.rank + WARP, window.end, lane, inputs.cu_seqlens_q, order, geometry)
        searching = (index >= window.end) & (window.rank + WARP < requests)
    tile = Tile(Int32(0), Int32(0), Int32(0), Int32(0), Int32(0), Int32(0))
    if index < window.end:
        holders = cute.arch.vote_ballot_sync((window.start <= index) & (index < window.start + window.count))
        holder = Int32(31 - cute.arch.clz(Int32(holders)))
        local = index - cute.arch.shuffle_sync(window.start, holder)
        request = request_at(window.rank + holder, order, requests)
        first_q, first_k = inputs.cu_seqlens_q[request], inputs.cu_seqlens_k[request]
        s, t = inputs.cu_seqlens_q[request + 1] - first_q, inputs.cu_seqlens_k[request + 1] - first_k
        place = place_of(local, query_tiles(s), section_width(t, room, geometry), geometry.h)
        tile = tile_of(place, first_q, s, first_k, cutlass.max(t, 0), geometry)
    return tile


# ------------------------------------------------------------------------------------------------ device: load
class Source(NamedTuple):
    """What a thread copies rows of: one head of a request in q, k or v. base: address of its 16 bytes of a row, in the
    first row and first panel; step: bytes from one row to the next."""

    base: Int64
    step: Int64


def source_of(tensor: cute.Tensor, first: Int32, head: Int32, thread: Int32) -> Source:
    """tensor: (tokens, heads, columns), global memory; first: the request's first row."""
    per_token, per_head, _ = tensor.stride
    offset = Int64(first) * per_token + Int64(head) * per_head + thread % CHUNKS * CHUNK
    return Source(tensor.iterator.toint() + 2 * offset, 2 * per_token)


@cute.jit
def load_rows(
    source: Source,
    first: Int32,  # row of the request
    last: Int32 | None,  # the request's last row, which stands in for those behind it; None: there are none behind
    place: Int32,  # shared memory: where this thread's first 16 bytes go, of `first_place`
    thread: Int32,
    tokens: cutlass.Constexpr,
    columns: cutlass.Constexpr,
    threads: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
):
    """Starts copying `tokens` rows of `columns` columns, by so many threads."""
    atom = cute.make_copy_atom(
        cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL), dtype, num_bits_per_copy=128
    )  # fmt: skip
    chunk = cute.make_layout(CHUNK)
    together = cutlass.const_expr(threads // CHUNKS)  # rows
    address = source.base + Int64(first) * source.step + Int64(thread // CHUNKS) * source.step
    for j in cutlass.range_constexpr(tokens // together):
        if cutlass.const_expr(last is not None):
            row = cutlass.min(first + thread // CHUNKS + j * together, last)
            address = source.base + Int64(row) * source.step
        elif cutlass.const_expr(j > 0):
            address = address + together * source.step
        for panel in cutlass.range_constexpr(panels_of(columns)):
            left = cutlass.const_expr((columns - panel * PANEL) // CHUNK)  # threads that have columns in this panel
            start = cute.make_ptr(dtype, address + panel * ROW_BYTES, cute.AddressSpace.gmem, assumed_align=16)
            target = place + (panel * tokens + j * together) * ROW_BYTES
            target = cute.make_ptr(dtype, target, cute.AddressSpace.smem, assumed_align=16)
            if cutlass.const_expr(left >= CHUNKS):
                cute.copy(atom, cute.make_tensor(start, chunk), cute.make_tensor(target, chunk))
            elif thread % CHUNKS < left:
                cute.copy(atom, cute.make_tensor(start, chunk), cute.make_tensor(target, chunk))


def first_place(base: Int32, thread: Int32) -> Int32:
    """Where a thread's first 16 bytes go. base: of the panels, shared memory. Chunk c of row r lies at c ^ (r % 8)."""
    place = thread * 16
    return base + (place ^ (place // CHUNKS & ROW_BYTES - 16))


# ------------------------------------------------------------------------------------------------ device: one thread
@dataclass(frozen=True, eq=False)
class Worker:
    """What a thread computes with; warp: the same value in all lanes."""

    geometry: Geometry
    dtype: Any
    mma: Any
    tile: Any  # `Tile`
    thread: Any
    lane: Any
    group: Any  # 0 or 1
    first_row: Any  # of the warp, in the query tile
    scale_log2: Any
    below: Any  # where the rows that a lane names lie from the first one on, in bytes: of A operands and of V, whose
    beside: Any  # matrices lie below each other first, and of K, whose lie beside each other first
    query: Any  # shared memory addresses: of the warp's rows of Q,
    keys: Any  # of K,
    values: Any  # and of V
    of_k: Any  # `Source`
    of_v: Any
    k_place: Any  # of `first_place`
    v_place: Any
    acc_s: Any  # registers: (4, rows, keys) fp32, in 16 x 8 products
    acc_o: Any  # (4, rows, columns)
    p: Any  # A operands of 16 keys and the next 16: words, (4, rows, 2)
    row_max: Any  # (2, rows): running maximum times scale_log2,
    row_sum: Any  # this thread's share of the sums,
    tops: Any  # where both lie between KV tiles, shared memory,
    sums: Any
    k_source: Any  # and where `of_k` and `of_v` do,
    v_source: Any
    factor: Any  # and what O is to be multiplied with

    @classmethod
    def make(cls, geometry, inputs, storage, tile, thread, warp, scale_log2) -> Worker:
        dtype, lane = inputs.q.element_type, thread % WARP
        first_row = warp * WARP_ROWS
        swizzle = lane % 8
        query, keys, values = (x.data_ptr().toint() for x in (storage.query, storage.keys, storage.values))
        kv_head = tile.head // geometry.group

        def registers(*shape: int, kind: Any = Float32) -> Any:
            return cute.make_rmem_tensor(cute.make_layout(shape), kind)

        return cls(
            geometry=geometry,
            dtype=dtype,
            mma=warp_mma.make_mma(dtype),
            tile=tile,
            thread=thread,
            lane=lane,
            group=warp // (WARPS // 2),
            first_row=first_row,
            scale_log2=scale_log2,
            below=lane % 16 * ROW_BYTES + ((lane // 16) ^ swizzle) * 16,
            beside=(lane % 8 + lane // 16 * 8) * ROW_BYTES + ((lane // 8 % 2) ^ swizzle) * 16,
            query=query + first_row * ROW_BYTES,
            keys=keys,
            values=values,
            of_k=source_of(inputs.k, tile.key, kv_head, thread % GROUP),
            of_v=source_of(inputs.v, tile.key, kv_head, thread % GROUP),
            k_place=first_place(keys, thread % GROUP),
            v_place=first_place(values, thread % GROUP),
            acc_s=registers(4, ALONG_M, TOKENS // warp_mma.N),
            acc_o=registers(4, ALONG_M, geometry.dv // warp_mma.N),
            p=registers(4, ALONG_M, 2, kind=Int32),
            row_max=registers(2, ALONG_M),
            row_sum=registers(2, ALONG_M),
            tops=storage.maxima.data_ptr() + thread * 4,
            sums=storage.sums.data_ptr() + thread * 4,
            k_source=storage.k_sources.data_ptr() + thread * 2,
            v_source=storage.v_sources.data_ptr() + thread * 2,
            factor=registers(2, ALONG_M),
        )

    def row(self, i: int, half: int) -> Int32:
        """The row of the query tile that accumulators (2 half .., i, ..) are of."""
        return self.first_row + (i * warp_mma.M + 8 * half) + self.lane // 4

    # -------------------------------------------------------------------------------------------- load
    @cute.jit
    def load_query(self, q: cute.Tensor, place: Int32):
        """Rows past the end of the request are its last one again: their results are not stored."""
        geometry, tile = self.geometry, self.tile
        source = source_of(q, tile.row, tile.head, self.thread)
        load_rows(source, Int32(0), tile.rows - 1, place, self.thread, ROWS, geometry.dk, THREADS, self.dtype)

    @cute.jit
    def load(self, of_values: cutlass.Constexpr, at: Int32, stage: Int32, clamped: cutlass.Constexpr):
        """Starts copying K or V of KV tile `at`; by group 1. clamped: keys past the end of the request are its last one
        again: they belong to another request or to nobody, and 0 · NaN is NaN."""
        geometry = self.geometry
        columns = geometry.dv if cutlass.const_expr(of_values) else geometry.dk
        place = self.v_place if cutlass.const_expr(of_values) else self.k_place
        size = geometry.v_elements if cutlass.const_expr(of_values) else geometry.k_elements
        place_of_source = self.v_source if cutlass.const_expr(of_values) else self.k_source
        parked = cute.make_tensor(place_of_source, cute.make_layout(2))
        source = Source(parked[0], parked[1])
        last = self.tile.keys - 1 if cutlass.const_expr(clamped) else None
        place = place + stage * (2 * size)
        load_rows(source, at * TOKENS, last, place, self.thread % GROUP, TOKENS, columns, GROUP, self.dtype)

    # -------------------------------------------------------------------------------------------- scores
    @cute.jit
    def scores(self, stage: Int32):
        """S = Q·Kᵀ. A slice of 16 columns is 32 bytes of a row in a panel, so that the swizzled place of the next one
        differs in two bits."""
        geometry = self.geometry
        keys = self.keys + stage * (2 * geometry.k_elements)
        self.acc_s.fill(0.0)
        a = cute.make_rmem_tensor(cute.make_layout((warp_mma.OPERANDS, ALONG_M)), self.dtype)
        b = cute.make_rmem_tensor(cute.make_layout((4, 2)), self.dtype)
        both = cute.make_tensor(b.iterator, cute.make_layout(warp_mma.OPERANDS))
        for n in cutlass.range_constexpr(geometry.dk // warp_mma.K):
            panel, part = divmod(n, PANEL // warp_mma.K)
            for i in cutlass.range_constexpr(ALONG_M):
                offset = cutlass.const_expr((panel * ROWS + i * warp_mma.M) * ROW_BYTES)
                load_matrices((self.below ^ part * 32) + (self.query + offset), a[None, i])
            for j in cutlass.range_constexpr(TOKENS // 16):
                offset = cutlass.const_expr((panel * TOKENS + j * 16) * ROW_BYTES)
                load_matrices((self.beside ^ part * 32) + (keys + offset), both)
                for i in cutlass.range_constexpr(ALONG_M):
                    for c in cutlass.range_constexpr(2):
                        acc = self.acc_s[None, i, 2 * j + c]
                        cute.mma_atom_call(self.mma, acc, a[None, i], b[None, c], acc)

    # -------------------------------------------------------------------------------------------- softmax
    def park(self, values: cute.Tensor, place: cute.Pointer):
        """Writes row maxima or sums to where they lie between KV tiles."""
        flat = cute.make_tensor(values.iterator, cute.make_layout(4))
        cute.autovec_copy(flat, cute.make_tensor(place.align(16), flat.layout))

    def fetch(self, values: cute.Tensor, place: cute.Pointer):
        """Reads them."""
        flat = cute.make_tensor(values.iterator, cute.make_layout(4))
        cute.autovec_copy(cute.make_tensor(place.align(16), flat.layout), flat)

    @cute.jit
    def mask(self, first_key: Int32):
        """Sets scores of keys that a row does not see to -inf."""
        geometry = self.geometry
        for i in cutlass.range_constexpr(ALONG_M):
            for half in cutlass.range_constexpr(2):
                left = self.tile.keys - first_key
                if cutlass.const_expr(geometry.causal):
                    left = cutlass.min(left, self.tile.seen - first_key + self.row(i, half))
                left = left - self.lane % 4 * 2
                for j in cutlass.range_constexpr(TOKENS // warp_mma.N):
                    for e in cutlass.range_constexpr(2):
                        score = self.acc_s[2 * half + e, i, j]
                        self.acc_s[2 * half + e, i, j] = score if 8 * j + e < left else -Float32.inf

    @cute.jit
    def maxima(self):
        """Takes a KV tile's scores into the running maxima, and says by how much less older results count."""
        self.fetch(self.row_max, self.tops)
        self.fetch(self.row_sum, self.sums)
        count = TOKENS // warp_mma.N
        for i in cutlass.range_constexpr(ALONG_M):
            for half in cutlass.range_constexpr(2):
                best = cute.make_rmem_tensor(2, Float32)
                for j in cutlass.range_constexpr(count):
                    for e in cutlass.range_constexpr(2):
                        score = self.acc_s[2 * half + e, i, j]
                        best[e] = score if cutlass.const_expr(j == 0) else cute.arch.fmax(best[e], score)
                top = quad_max(cute.arch.fmax(best[0], best[1])) * self.scale_log2
                top = cute.arch.fmax(self.row_max[half, i], top)
                self.factor[half, i] = softmax.exp2(self.row_max[half, i] - top)
                self.row_max[half, i] = top
                self.row_sum[half, i] = self.row_sum[half, i] * self.factor[half, i]
        self.park(self.row_max, self.tops)

    @cute.jit
    def exponentials(self, n: cutlass.Constexpr, word: cutlass.Constexpr):
        """One word of each of the A operands of keys 16 n .. 16 n + 15: two probabilities of a row."""
        half, beside = word % 2, word // 2
        pair = cute.make_rmem_tensor(2, Float32)
        rounded = cute.make_rmem_tensor(2, self.dtype)
        for i in cutlass.range_constexpr(ALONG_M):
            for e in cutlass.range_constexpr(2):
                score = self.acc_s[2 * half + e, i, 2 * n + beside]
                pair[e] = softmax.exp2(score * self.scale_log2 - self.row_max[half, i])
            self.row_sum[half, i] = self.row_sum[half, i] + (pair[0] + pair[1])
            rounded.store(pair.load().to(self.dtype))
            self.p[word, i, n % 2] = cute.recast_tensor(rounded, Int32)[0]

    # -------------------------------------------------------------------------------------------- output
    @cute.jit
    def output(self, stage: Int32):
        """O += P·V, with the exponentials of the next 16 keys between the products of these."""
        geometry = self.geometry
        values = self.values + stage * (2 * geometry.v_elements)
        steps, columns = TOKENS // warp_mma.K, geometry.dv // 16
        operands = cute.make_layout((warp_mma.OPERANDS, ALONG_M, 2))
        p = cute.make_tensor(cute.recast_ptr(self.p.iterator, dtype=self.dtype), operands)
        # Fragments of V: those that are multiplied, and the next ones.
        b = cute.make_rmem_tensor(cute.make_layout((4, 2, 2)), self.dtype)
        both = cute.make_tensor(b.iterator, cute.make_layout((warp_mma.OPERANDS, 2)))
        for word in cutlass.range_constexpr(4):
            self.exponentials(0, word)
        self.load_values(values, 0, both[None, 0])
        for at in cutlass.range_constexpr(steps * columns):
            n, j = divmod(at, columns)
            if cutlass.const_expr(at + 1 < steps * columns):
                self.load_values(values, at + 1, both[None, (at + 1) % 2])
            for i in cutlass.range_constexpr(ALONG_M):
                for c in cutlass.range_constexpr(2):
                    if cutlass.const_expr(n == 0):
                        self.scale_output(i, 2 * j + c, self.factor)
                    acc = self.acc_o[None, i, 2 * j + c]
                    cute.mma_atom_call(self.mma, acc, p[None, i, n % 2], b[None, c, at % 2], acc)
            if cutlass.const_expr(n + 1 < steps):
                for word in cutlass.range_constexpr(j * 4 // columns, (j + 1) * 4 // columns):
                    self.exponentials(n + 1, word)
                if cutlass.const_expr(n + 2 == steps and j + 1 == columns):
                    self.park(self.row_sum, self.sums)

    @cute.jit
    def load_values(self, values: Int32, at: cutlass.Constexpr, target: cute.Tensor):
        """Loads the fragment of V of 16 keys and 16 columns, of which there are dv / 16 beside each other."""
        geometry = self.geometry
        n, j = divmod(at, geometry.dv // 16)
        panel, part = divmod(j, PANEL // 16)
        offset = cutlass.const_expr((panel * TOKENS + n * warp_mma.K) * ROW_BYTES)
        load_matrices((self.below ^ part * 32) + (values + offset), target, transposed=True)

    @cute.jit
    def scale_output(self, i: cutlass.Constexpr, j: cutlass.Constexpr, factor: cute.Tensor):
        """Multiplies a product's outputs with the factors of their rows, (2, rows)."""
        for c in cutlass.range_constexpr(4):
            self.acc_o[c, i, j] = self.acc_o[c, i, j] * factor[c // 2, i]

    # -------------------------------------------------------------------------------------------- a query tile
    def begin_turn(self):
        cute.arch.barrier(barrier_id=self.group + int(Barrier.TURN), number_of_threads=THREADS)

    @cute.jit
    def end_turn(self, turn: Int32, count: Int32):
        """Lets the other group begin, once what this one has copied is there; then group 1 copies over what nobody
        reads any more: K of this turn and V of the KV tile before. A query tile has the turns 0 .. `count` - 1, and
        nobody waits for group 1's last one."""
        cute.arch.cp_async_wait_group(0)
        if self.group == 0 or turn + 1 < count:
            cute.arch.barrier_arrive(barrier_id=int(Barrier.TURN) + 1 - self.group, number_of_threads=THREADS)
        if self.group == 1 and turn + 2 < count:
            named_sync(Barrier.ENDED, GROUP)
            self.load(False, count - 3 - turn, turn % K_STAGES, False)
            self.load(True, count - 3 - turn, (turn + 2) % V_STAGES, False)
            cute.arch.cp_async_commit_group()

    @cute.jit
    def step(self, i: Int32, count: Int32, seen: Int32, masked: cutlass.Constexpr):
        """The softmax and output of KV tile i from the end, and the turn behind it. masked: some row of the CTA does
        not see all of it. seen: keys that any row of the warp sees; a warp leaves out a KV tile of which it sees none.
        Only masked steps ask: with a branch around the products ptxas loads each fragment right in front of its
        products, and waits for it."""
        first_key = (count - 1 - i) * TOKENS
        if cutlass.const_expr(not masked):
            self.maxima()
            self.output(i % V_STAGES)
            self.begin_turn()
            self.scores((i + 1) % K_STAGES)
            self.end_turn(i + 1, count)
        else:
            if first_key < seen:
                self.mask(first_key)
                self.maxima()
                self.output(i % V_STAGES)
            if first_key > 0:
                self.begin_turn()
                if first_key - TOKENS < seen:
                    self.scores((i + 1) % K_STAGES)
                self.end_turn(i + 1, count)

    @cute.jit
    def attend(self, q: cute.Tensor, q_place: Int32, count: Int32):
        """O and the row statistics of the warp's rows. count: KV tiles, at least one."""
        geometry, tile = self.geometry, self.tile
        self.acc_o.fill(0.0)
        self.row_max.fill(softmax.NO_KEY)
        self.row_sum.fill(0.0)
        self.park(self.row_max, self.tops)
        self.park(self.row_sum, self.sums)
        for place, source in ((self.k_source, self.of_k), (self.v_source, self.of_v)):
            parked = cute.make_tensor(place, cute.make_layout(2))
            parked[0], parked[1] = source.base, source.step
        self.load_query(q, q_place)
        if self.group == 1:
            self.load(False, count - 1, Int32(0), True)
            self.load(True, count - 1, Int32(0), True)
        cute.arch.cp_async_commit_group()
        if self.group == 1 and count > 1:
            self.load(False, count - 2, Int32(1), False)
            self.load(True, count - 2, Int32(1), False)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(1)
        cute.arch.sync_threads()
        seen = keys_seen(tile, self.first_row + (WARP_ROWS - 1), geometry.causal)
        whole = whole_tiles(tile, geometry)
        if self.group == 1:
            cute.arch.barrier_arrive(barrier_id=int(Barrier.TURN), number_of_threads=THREADS)
        self.begin_turn()
        if (count - 1) * TOKENS < seen:
            self.scores(Int32(0))
        self.end_turn(Int32(0), count)
        for i in cutlass.range(count - whole, unroll=1):
            self.step(i, count, seen, True)
        for i in cutlass.range(count - whole, count - 1, unroll=1):
            self.step(i, count, seen, False)
        if whole > 0:
            self.maxima()
            self.output((count - 1) % V_STAGES)

    # -------------------------------------------------------------------------------------------- epilogue
    @cute.jit
    def epilogue(self, out: cute.Tensor, lse: cute.Tensor):
        """out = O / sum and lse = ln sum; rows past the end of the request are not written."""
        geometry, tile = self.geometry, self.tile
        self.fetch(self.row_max, self.tops)
        self.fetch(self.row_sum, self.sums)
        for i in cutlass.range_constexpr(ALONG_M):
            for half in cutlass.range_constexpr(2):
                row = self.row(i, half)
                total = softmax.quad_sum(self.row_sum[half, i])
                self.factor[half, i] = Float32(0.0) if total == 0.0 else 1.0 / total
                if self.lane % 4 == 0 and row < tile.rows:
                    value = (self.row_max[half, i] + cute.math.log2(total, fastmath=True)) * math.log(2.0)
                    lse[tile.head, tile.row + row] = -Float32.inf if total == 0.0 else value
        pair = cute.make_rmem_tensor(2, Float32)
        rounded = cute.make_rmem_tensor(2, self.dtype)
        for i in cutlass.range_constexpr(ALONG_M):
            for j in cutlass.range_constexpr(geometry.dv // warp_mma.N):
                self.scale_output(i, j, self.factor)
            for half in cutlass.range_constexpr(2):
                row = self.row(i, half)
                inside = row < tile.rows
                start = row_start(out, tile, cutlass.select_(inside, row, Int32(0)))
                # (eight columns, thread of the four, 32 columns)
                layout = cute.make_layout((8, 4, geometry.dv // 32), stride=(1, 8, 32))
                target = cute.make_tensor(start, layout)
                for block in cutlass.range_constexpr(geometry.dv // 32):
                    # The thread's words of four groups of eight columns; word g of each lies with thread g of the four.
                    words = []
                    for g in cutlass.range_constexpr(4):
                        for e in cutlass.range_constexpr(2):
                            pair[e] = self.acc_o[2 * half + e, i, 4 * block + g]
                        rounded.store(pair.load().to(self.dtype))
                        words.append(cute.recast_tensor(rounded, Int32)[0])
                    turned = transposed(words, self.lane)
                    chunk = cute.make_rmem_tensor(4, Int32)
                    for g in cutlass.range_constexpr(4):
                        chunk[g] = turned[g]
                    if inside:
                        cute.autovec_copy(cute.recast_tensor(chunk, self.dtype), target[None, self.lane % 4, block])


@cute.jit
def quad_max(value: Float32) -> Float32:
    """Maximum over the four threads that share a row."""
    for offset in cutlass.range_constexpr(1, 3):
        value = cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, offset=offset))
    return value


def transposed(words: list[Int32], lane: Int32) -> list[Int32]:
    """Word i of lane j of four neighbours becomes word j of lane i; 4 shuffles."""
    words = list(words)
    for bit in (1, 2):
        upper = (lane & bit) > 0
        for low in (i for i in range(4) if not i & bit):
            sent = cutlass.select_(upper, words[low], words[low + bit])
            got = cute.arch.shuffle_sync_bfly(sent, offset=bit)
            words[low] = cutlass.select_(upper, got, words[low])
            words[low + bit] = cutlass.select_(upper, words[low + bit], got)
    return words


def row_start(out: cute.Tensor, tile: Tile, row: Int32) -> cute.Pointer:
    """Where a row of a query tile begins in out (n, h, dv), global memory."""
    per_token, per_head, _ = out.stride
    offset = Int64(tile.row + row) * per_token + Int64(tile.head) * per_head
    return out.iterator + cute.assume(offset, divby=8)


@cute.jit
def store_no_keys(tile: Tile, out: cute.Tensor, lse: cute.Tensor, thread: Int32, geometry: cutlass.Constexpr):
    """A query tile that sees no key: zeros and -inf."""
    zeros = cute.make_rmem_tensor(8, out.element_type)
    zeros.fill(0.0)
    for row in cutlass.range(thread // CHUNKS, cutlass.min(tile.rows, ROWS), THREADS // CHUNKS, unroll=1):
        target = cute.make_tensor(row_start(out, tile, row), cute.make_layout((8, geometry.dv // 8), stride=(1, 8)))
        for i in cutlass.range(thread % CHUNKS, geometry.dv // 8, CHUNKS, unroll=1):
            cute.autovec_copy(zeros, target[None, i])
        if thread % CHUNKS == 0:
            lse[tile.head, tile.row + row] = -Float32.inf


# ------------------------------------------------------------------------------------------------ device: the kernel
@cute.kernel
def flash_attention_mma_v1(
    inputs: Inputs,
    out: cute.Tensor,  # (n, h, dv) 16-bit, global memory
    lse: cute.Tensor,  # (h, n) fp32, global memory
    scale_log2: Float32,
    room: Int32,  # of `section_width`
    geometry: cutlass.Constexpr,
):
    """The CTA of a query tile."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    storage = SmemAllocator().allocate(shared_storage(geometry, inputs.q.element_type))
    tile = tile_at(inputs, storage, block, room, thread, geometry)
    if tile.rows > 0:
        count = kv_tiles(tile, geometry)
        if count > 0:
            w = Worker.make(geometry, inputs, storage, tile, thread, warp, scale_log2)
            w.attend(inputs.q, first_place(storage.query.data_ptr().toint(), thread), count)
            w.epilogue(out, lse)
        else:
            store_no_keys(tile, out, lse, thread, geometry)


flash_attention_mma_v1.set_name_prefix("flash_attention_mma_v1", remove_cutlass_symbol=True, keep_mangled_name=False)


# ------------------------------------------------------------------------------------------------ host
@cute.jit
def launch_flash_attention(
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,
    cu_seqlens_q: cute.Tensor,
    cu_seqlens_k: cute.Tensor,
    out: cute.Tensor,
    lse: cute.Tensor,
    scale: Float32,
    room: Int32,
    geometry: cutlass.Constexpr,
    stream: CUstream,
):
    """Launches a CTA for each query tile that there may be."""
    requests = cu_seqlens_q.shape[0] - 1
    most = (q.shape[0] // ROWS + requests) * geometry.h
    inputs = Inputs(q, k, v, cu_seqlens_q, cu_seqlens_k)
    flash_attention_mma_v1(inputs, out, lse, scale * math.log2(math.e), room, geometry).launch(
        grid=(most, 1, 1),
        block=(THREADS, 1, 1),
        min_blocks_per_mp=1,
        preferred_smem_carveout=100,  # else it is asked of a GPU while compiling
        stream=stream,
    )


# ------------------------------------------------------------------------------------------------ plan
def takes(pd: PrefillProblem) -> Verdict:
    """Whether this version computes a problem."""
    dk, dv = pd.d + pd.p, pd.d
    if dk % warp_mma.K or dk > 192:
        return Verdict.no(f"keys of d + p = {dk} columns must be a multiple of {warp_mma.K}, 192 at most")
    if dv % PANEL or dv > 128:
        return Verdict.no(f"values of d = {dv} columns must be 64 or 128")
    longest = max(pd.query_tokens, pd.keys)
    return limits.all_of(
        limits.offsets(longest + ROWS, f"{longest:,} tokens of q or k"),
        limits.offsets(pd.query_tokens * pd.h, f"lse is ({pd.h:,}, {pd.query_tokens:,})"),
    )


@dataclass(frozen=True)
class FlashAttentionMmaV1Tiling(Tiling):
    """section_mib: MiB of keys and values that CTAs read from L2 at a time (`section_width`). With 40 the last section
    of 128 heads has as many query tiles as the device has SMs, or nearly, so that they end together."""

    launch_fields: ClassVar[tuple[str, ...]] = ("section_mib",)

    section_mib: int = 40

    def validate(self, pd: PrefillProblem, device: Device | None = None) -> Verdict:
        if not 1 <= self.section_mib <= 1024:
            return Verdict.no(f"section_mib = {self.section_mib} is not between 1 and 1,024")
        if not (taken := takes(pd)):
            return taken
        of, size = device or Device.assumed(), geometry_of(pd).smem_bytes
        if size > of.smem_per_block:
            return Verdict.no(
                f"{size:,} bytes of shared memory for {ROWS} query rows and KV tiles of {TOKENS} keys are over"
                f" the {of.smem_per_block:,} that a CTA of {of.key} may have"
            )
        return Verdict.yes()


def geometry_of(pd: PrefillProblem) -> Geometry:
    """What the code is made for."""
    return Geometry(pd.h, pd.h_kv, pd.d + pd.p, pd.d, pd.causal)


class FlashAttentionMmaV1Plan(KernelPlan):
    """One compiled kernel a problem class and tile; requests, lengths and strides are arguments, and lengths are read
    on the device only."""

    workload = prefill.WORKLOAD
    tiling_type = FlashAttentionMmaV1Tiling
    tiling: FlashAttentionMmaV1Tiling
    any_size = True
    requires = Requirement(
        archs=("sm_90a",), dtypes=("bf16", "fp16"), features=("cp_async",), problem=takes,
        options=("grouped", "strided_kv"),
    )  # fmt: skip

    def default_tiling(self) -> FlashAttentionMmaV1Tiling:
        return FlashAttentionMmaV1Tiling()

    def autotune_configs(self) -> list[Tiling]:
        return [FlashAttentionMmaV1Tiling(section_mib=x) for x in (12, 24, 40)]

    @any_scale(0)
    def plan(self, *inputs: Any) -> BaseKernel:
        self.require()
        q, _, v, of_q, of_k = inputs
        require_int32(cu_seqlens_q=of_q, cu_seqlens_k=of_k)
        import torch

        outputs = q.new_empty((*q.shape[:2], v.shape[2])), q.new_empty((q.shape[1], len(q)), dtype=torch.float32)
        if not len(q):
            return LibraryCall(
                lambda: None, name="flash_attention_mma_v1", input_tensors=inputs, output_tensors=outputs
            )
        return self._make(inputs, outputs)

    def plan_empty(self) -> BaseKernel:
        self.require()
        return self._make((), ())

    def _make(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> CuteKernel:
        """The kernel on these tensors, or, where there are none, one that only compiles."""
        pd, kind, geometry = self.problem, host.element_type(self.problem.dtype), geometry_of(self.problem)

        def rows_of(tokens: Any, heads: int, columns: int) -> Any:
            strides = (cute.sym_int64(divisibility=8), cute.sym_int64(divisibility=8), 1)
            return make_fake_tensor(kind, (tokens, heads, columns), strides, assumed_align=16)

        def arguments() -> tuple[Any, ...]:
            n, m, offsets = host.symbols(3)
            return (
                rows_of(n, pd.h, geometry.dk),
                rows_of(m, pd.h_kv, geometry.dk),
                rows_of(m, pd.h_kv, geometry.dv),
                host.fake(Int32, offsets, align=4),
                host.fake(Int32, offsets, align=4),
                rows_of(n, pd.h, geometry.dv),
                host.fake(Float32, pd.h, n, align=4),
                Float32(1.0),
                Int32(1),
                geometry,
            )

        room = (self.tiling.section_mib << 20) // (2 * (geometry.dk + geometry.dv))
        given = (*inputs, *outputs, pd.scale, room) if inputs else ()
        name = "flash_attention_mma_v1"
        return host.stage(self, flash_attention_mma_v1, launch_flash_attention, name, arguments, given, inputs, outputs)
