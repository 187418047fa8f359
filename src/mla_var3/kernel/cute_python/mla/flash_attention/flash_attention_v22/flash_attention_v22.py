r"""Attention of prompts over decompressed heads for Hopper (sm_90a), version 22: query tiles of short requests hold
the query heads that share a kv head, and a consumer without a row does not compute.

    out[i, :] = softmax(scale · q[i] · Kᵀ) · V      q, K: dk columns a head    V: dv <= dk

Requests lie behind each other in q (n, h, dk) and in k, v (m, h_kv, ·); `cu_seqlens_q` and `cu_seqlens_k` say where
each begins. Query head i reads kv head i // (h / h_kv). The causal mask is aligned at the end: query token i of s sees
keys 0 .. t - s + i.

It is version 12 with three changes, all for requests of few query tokens:

- Packed heads. A query tile has 128 rows, or 192. Where g query heads share a kv head, and 64 is a multiple of g, its
  rows are g heads of one query token, then those of the next one. A request of s query tokens then has s · g / 128
  query tiles a kv head in place of g times s / 128, each rounded up, and the rows of a query tile end near one
  another, so that fewer keys are computed that a row does not see:

      row      0        1      ...  g - 1    g        g + 1   ...
      token    0        0           0        1        1
      head     0        1           g - 1    0        1

- Consumers without a row. A query tile at the end of a request may have rows for the first consumer only. The others
  then free K and V as they come, and neither compute nor take turns.
- The order of requests. A request is dealt ahead of another whose query tokens see fewer keys in the mean, and not
  of another that has fewer keys: a few query tokens behind a long prefix are long query tiles, and a long prompt ends
  with short ones.

A CTA of three warpgroups goes through query tiles, and through the KV tiles of each from the last one, which holds the
diagonal, to the first:

    producer   one warp: asks for query tiles, says which (mbarrier), and loads Q, K and V by TMA
    UPPER      rows 0 .. 63      S = Q·Kᵀ, softmax, O += P·V     S, P and O in registers
    LOWER      rows 64 .. 127

A consumer issues the scores of a KV tile ahead of the product with the values of the tile before, so that its softmax
runs beside a product (FlashAttention-3's overlap within a warpgroup):

    tensor cores   S1 = Q·K1ᵀ | O += P0·V0 | S2 = Q·K2ᵀ | O += P1·V1 |
    softmax                   | S1 → P1                 | S2 → P2

On the diagonal, with KV tiles of 128 keys and heads of their own, the upper 64 rows see no key of the second half of
the last KV tile. They compute scores and softmax of its first half only, and P is 0 beyond (░); so does every consumer
whose rows see keys of the first half only:

    UPPER    ◣ ░         one product of 64 x 64 in place of 64 x 128
    LOWER    █ ◣

UPPER is ahead of LOWER from there on, so that their softmaxes do not coincide.

With `consumers` = 3 a query tile has 192 rows and a CTA a third consumer: each of them has 160 registers a thread in
place of 232. With `ordered` the consumers that have rows issue their products in turn: one that has issued the scores
of a KV tile and the product with the values of the one before passes the turn on to the next, so that their softmaxes
do not coincide.
Where O has 256 columns (`lazy`), the running maximum lags behind by up to 8 in the exponent of two, and a warp
multiplies O only where one of its maxima moves. It lags from the second KV tile on that needs no mask; until then it is
exact. Of the first KV tile a row may see a single key, whose score says little of the others'. Were it the maximum, of
keys that count alike half would have probabilities just above 1, where a unit of bf16 is twice what it is below 1.

Each consumer frees its own half of Q as soon as its last scores are made, in front of the last softmax, and the
producer has asked L2 for the next query tile's rows before that (TMA prefetch): nobody has read them yet.

    mbarrier       arrives                              waits
    q_full[j]      TMA with part j of Q; the producer,  consumer j, in front of the first scores of a query tile
                   where consumer j has no row
    q_empty[j]     consumer j, behind the last scores   producer
    k_full[i]      TMA with K of stage i                consumers, in front of the scores
    k_empty[i]     consumers, once these are made       producer
    v_full[i]      TMA with V of stage i                consumers, in front of O += P·V
    v_empty[i]     consumers, once that has ended       producer
    told[i]        producer: slot i names a query tile  consumers
    heard[i]       consumers have read slot i           producer

O goes from registers to global memory, without shared memory between: four threads that share a row exchange their
columns, so that each has 16 bytes. Q is free for the next query tile as soon as the last scores are made.

Tile scheduler: requests lie on a line of query tiles, the one whose query tokens see the most keys in the mean first;
those that are alike are dealt as one with the heads of all. Heads come in sections whose keys and values fit in L2
together. In a section the query tiles with the most keys come first, and with a causal mask the last section has about
three query tiles for each CTA, so that the small ones fill the tail. A CTA's first tile is its own number; the others
it takes from a counter in global memory, which it asks in front of its last load of a query tile: whoever asked earlier
would hold a query tile that another CTA comes to sooner. The lengths are read on the device only, and the last CTA sets
the counter back.

Shared memory and registers bound the KV tile of N tokens (`kv_tile_of`), with two stages of K and of V:

    dk / dv      N     Q      K        V        bytes      S + O + P, registers a thread
    192 / 128    128   48 K   2 x 48 K 2 x 32 K 212,992    64 + 64 + 32
    128 / 128    128   32 K   2 x 32 K 2 x 32 K 163,840    64 + 64 + 32
    256 / 256    80    64 K   2 x 40 K 2 x 40 K 229,376    40 + 128 + 20
    256 / 128    96    64 K   2 x 48 K 2 x 24 K 212,992    48 + 64 + 24
    96 / 64      128   32 K   2 x 32 K 2 x 16 K 131,072    64 + 32 + 32

A head of 96 columns lies in two panels of 64: TMA fills the missing ones with zeros, and no product reads them.
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
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_tensor
from cutlass.cutlass_dsl import T, dsl_user_op
from cutlass.memory import SmemAllocator

from mla_var3.device import Requirement
from mla_var3.kernel.cute_python import host
from mla_var3.kernel.cute_python.prims import paged, softmax, wgmma
from mla_var3.kernel.cute_python.prims.paged import PANEL
from mla_var3.kernel.cute_python.prims.sync import named_arrive, warp_arrive
from mla_var3.kernel.cute_python.prims.wgmma import WARPGROUP
from mla_var3.runtime import CuteKernel, KernelPlan, LibraryCall, Tiling, Verdict, limits
from mla_var3.runtime.plan import require_int32
from mla_var3.runtime.scaling import any_scale
from mla_var3.workload import prefill

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mla_var3.device import Device
    from mla_var3.runtime.base import BaseKernel
    from mla_var3.workload.prefill import PrefillProblem

HALF = 64  # rows of a consumer: one warpgroup MMA
STAGES = 2
SLOTS = 2  # in which the producer names query tiles
WARP = 32
WARPGROUP_WARPS = WARPGROUP // WARP
# (producer, consumer) by the number of consumers: 128 · (40 + 2 · 232) = 64512 of 65536, 128 · (32 + 3 · 160) = 65536
REGISTERS = {2: (40, 232), 3: (32, 160)}
SORTED = 128  # requests up to which they are sorted by their keys; of more the order is the caller's
MISC_BYTES = 2048  # of shared memory, in front of Q


class Barrier(IntEnum):
    """Named barriers."""

    CTA = 0
    CONSUMER = 1  # + its number: the warps of one consumer
    TURN = 4  # + its number; ordered: this consumer may issue products


# ------------------------------------------------------------------------------------------------ what code is made for
def panels_of(columns: int) -> int:
    """64-column panels of a head; the last one may not be full."""
    return -(-columns // PANEL)


def smem_bytes(dk: int, dv: int, tokens: int, consumers: int) -> int:
    """Of a CTA, for KV tiles of so many tokens."""
    return MISC_BYTES + 2 * PANEL * (
        panels_of(dk) * (HALF * consumers + STAGES * tokens) + panels_of(dv) * STAGES * tokens
    )


MOST_SMEM = 232_448
# Registers of S, O and P by the number of consumers; the others are addresses, row statistics and what is in flight.
MOST_ACCUMULATORS = {2: 190, 3: 136}


def kv_tile_of(dk: int, dv: int, consumers: int = 2) -> int:
    """Tokens of a KV tile: the most for which shared memory and registers have room; 0: none has."""

    def fits(tokens: int) -> bool:
        registers = tokens // 2 + tokens // 4 + dv // 2
        return smem_bytes(dk, dv, tokens, consumers) <= MOST_SMEM and registers <= MOST_ACCUMULATORS[consumers]

    return next((tokens for tokens in (128, 112, 96, 80, 64) if fits(tokens)), 0)


@dataclass(frozen=True)
class Geometry:
    """What the code is specialised on: heads, columns of keys and values, mask, tokens of a KV tile, and whether the
    consumers issue their products in turn."""

    h: int
    h_kv: int
    dk: int
    dv: int
    causal: bool
    tokens: int
    ordered: bool
    consumers: int

    @property
    def lazy(self) -> bool:
        """Whether the maximum lags behind: where O is wide. A largest probability that is not 1 is rounded, which
        narrower results do not have the room for in the bounds of the check."""
        return self.dv == 256

    @property
    def rows(self) -> int:
        """Of a query tile."""
        return HALF * self.consumers

    @property
    def group(self) -> int:
        """Query heads that share a kv head."""
        return self.h // self.h_kv

    @property
    def packed(self) -> int:
        """Query heads of a query tile: all that share a kv head, where a consumer's rows are whole query tokens."""
        return self.group if HALF % self.group == 0 else 1

    @property
    def deals(self) -> int:
        """Query tiles of a head are dealt for so many heads, or groups of them."""
        return self.h // self.packed

    @property
    def k_panels(self) -> int:
        return panels_of(self.dk)

    @property
    def v_panels(self) -> int:
        return panels_of(self.dv)

    @property
    def half_elements(self) -> int:
        """Of one consumer's Q."""
        return HALF * PANEL * self.k_panels

    @property
    def k_elements(self) -> int:
        """Of a stage of K."""
        return self.tokens * PANEL * self.k_panels

    @property
    def v_elements(self) -> int:
        return self.tokens * PANEL * self.v_panels


def shared_storage(geometry: Geometry, dtype: type) -> type:
    """The CTA's shared memory: mbarriers, slots and the order of requests in the first 2 KiB, then Q, K and V."""

    def array(kind: type, size: int) -> Any:
        return cute.struct.MemRange[kind, size]

    fields = {
        "q_full": array(Int64, geometry.consumers),  # mbarriers; of Q one for each consumer's rows
        "q_empty": array(Int64, geometry.consumers),
        "k_full": array(Int64, STAGES),
        "k_empty": array(Int64, STAGES),
        "v_full": array(Int64, STAGES),
        "v_empty": array(Int64, STAGES),
        "told": array(Int64, SLOTS),
        "heard": array(Int64, SLOTS),
        "open": array(Int64, 1),  # an mbarrier that is never closed
        "slots": array(Int32, 8 * SLOTS),  # a `Tile` each
        "order": array(Int32, SORTED),  # requests, that with the most keys a query token first
        "query": cute.struct.Align[array(dtype, geometry.consumers * geometry.half_elements), 1024],
        "keys": cute.struct.Align[array(dtype, STAGES * geometry.k_elements), 1024],
        "values": cute.struct.Align[array(dtype, STAGES * geometry.v_elements), 1024],
    }
    # Not a class statement: postponed annotations are strings, and the struct wants types.
    return cute.struct(type("Storage", (), {"__annotations__": fields}))


class Inputs(NamedTuple):
    """TMA atoms of boxes, TMA tensors, and lengths in global memory."""

    tma_q: cute.CopyAtom  # 64 rows x 64 columns
    q: cute.Tensor  # of `make_query_tma`
    tma_k: cute.CopyAtom  # KV tile x 64 columns
    k: cute.Tensor  # (m, dk, h_kv)
    tma_v: cute.CopyAtom
    v: cute.Tensor  # (m, dv, h_kv)
    cu_seqlens_q: cute.Tensor  # (b + 1,) int32
    cu_seqlens_k: cute.Tensor


class Tile(NamedTuple):
    """A query tile. row: of q, its first query token. rows: of the request from there on, `packed` ones a query token;
    0: there is no more work. head: of q, the first one. key: of k and v, the request's first one. keys: of the request.
    seen: keys that the first query token sees; where fewer keys than queries are causal it may be negative, and each
    query token sees one more than the one before."""

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


def query_tiles(s: Any, geometry: Geometry) -> Any:
    """Query tiles of a deal of a request; none where the length is not positive."""
    return ceil_div(cutlass.max(s, 0) * geometry.packed, geometry.rows)


def mean_keys(s: Any, t: Any, causal: bool) -> Any:
    """Twice the keys that a query token of a request sees, in the mean; 0 where a request has no key."""
    return cutlass.max(2 * t - cutlass.min(s, t) if causal else 2 * t, 0)


def section_widths(t: Any, tiles: Any, pairs: Any, room: Any, blocks: Any, geometry: Geometry) -> tuple[Any, Any]:
    """Deals of a section, and of the last one, of `pairs` deals that have t keys and `tiles` query tiles each. A
    section has as many as fit in L2 with their keys and values, and without a mask no more than give each CTA a
    query tile. With a causal mask the last one gives each CTA about three query tiles at least: of fewer, the longest
    would outlast the others together. room: keys of a kv head that fit in L2."""
    group = geometry.group // geometry.packed
    most = ceil_div(pairs, group)  # kv heads
    fit = cutlass.max(cutlass.min(room // cutlass.max(t, 1), most), 1)
    if geometry.causal:
        last = ceil_div((3 * blocks + tiles // 2) // tiles, group)
        last = cutlass.min(cutlass.max(last, fit), most)
    else:
        fit = cutlass.min(fit, ceil_div(ceil_div(blocks, tiles), group))
        last = fit
    return fit * group, last * group


def place_of(index: Any, tiles: Any, width: Any, last: Any, pairs: Any) -> tuple[Any, Any]:
    """(query tile, deal) of `pairs` deals with `tiles` query tiles each: section after section of `width` deals, the
    last one of `last`, in each the last query tile of all its deals first. Counted from the end, so that the first
    section is the one that may have fewer of them."""
    left = tiles * pairs - 1 - index
    before = left - tiles * last  # of the sections in front of the last one
    inside = before >= 0
    section = cutlass.select_(inside, before // (tiles * width), 0)
    first = cutlass.select_(inside, last + section * width, 0)
    count = cutlass.select_(inside, cutlass.min(width, pairs - first), last)
    up = cutlass.select_(inside, before - section * (tiles * width), left)
    tile = up // count
    return tile, pairs - 1 - first - (up - tile * count)


def tile_of(place: tuple[Any, Any], first_q: Any, s: Any, first_k: Any, t: Any, geometry: Geometry) -> Tile:
    """The query tile at a `place_of` in a request of s queries and t keys that begin at tokens first_q and first_k."""
    at, deal = place
    packed = geometry.packed
    first = at * (geometry.rows // packed)
    seen = t - s + first + 1 if geometry.causal else t
    return Tile(first_q + first, (s - first) * packed, deal * packed, first_k, t, seen)


def kv_tiles(tile: Tile, geometry: Geometry) -> Any:
    """KV tiles that a query tile sees any key of."""
    last = tile.keys
    if geometry.causal:
        last = cutlass.min(tile.seen + (cutlass.min(tile.rows, geometry.rows) - 1) // geometry.packed, tile.keys)
    return ceil_div(cutlass.max(last, 0), geometry.tokens)


def whole_tiles(tile: Tile, first_row: Any, geometry: Geometry) -> Any:
    """KV tiles, from the first on, of which all rows from `first_row` on see every key; causal."""
    seen = tile.seen + first_row // geometry.packed
    return cutlass.max(cutlass.min(seen, tile.keys), 0) // geometry.tokens


def last_keys(tile: Tile, count: Any, first_row: Any, geometry: Geometry) -> Any:
    """Keys of the last of `count` KV tiles that any of the HALF rows from `first_row` on sees; not above 0: none."""
    last = tile.keys
    if geometry.causal:
        rows = cutlass.min(tile.rows, first_row + HALF)
        last = cutlass.min(tile.seen + (rows - 1) // geometry.packed, tile.keys)
    return last - (count - 1) * geometry.tokens


def working(tile: Tile, geometry: Geometry) -> Any:
    """Consumers that have any row of a query tile."""
    return cutlass.min(ceil_div(tile.rows, HALF), geometry.consumers)


class Window(NamedTuple):
    """32 requests of the line, one a lane. rank: of the first. begin, end: query tiles in front of the window and up
    to its end, all heads; the same in all lanes. start, count: query tiles in front of the lane's request, and its own
    ones. leads: whether the request differs in its lengths from the one before; requests that are alike are dealt as
    one with all their heads."""

    rank: Int32
    begin: Int32
    end: Int32
    start: Int32
    count: Int32
    leads: Int32


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
    cu_seqlens_k: cute.Tensor,
    order: cute.Tensor,
    geometry: cutlass.Constexpr,
) -> Window:
    """The window of requests `rank` on, in front of which there are `begin` query tiles; by a whole warp."""
    requests = cu_seqlens_q.shape[0] - 1
    s, t = Int32(-1), Int32(-1)
    if rank + lane < requests:
        request = request_at(rank + lane, order, requests)
        s = cutlass.max(cu_seqlens_q[request + 1] - cu_seqlens_q[request], 0)
        t = cutlass.max(cu_seqlens_k[request + 1] - cu_seqlens_k[request], 0)
    before_s, before_t = cute.arch.shuffle_sync_up(s, 1), cute.arch.shuffle_sync_up(t, 1)
    leads = (lane == 0) | (s != before_s) | (t != before_t)
    count = query_tiles(s, geometry) * geometry.deals
    until = count
    for i in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(until, 1 << i)
        until = until + cutlass.select_(lane >= (1 << i), other, Int32(0))
    end = begin + cute.arch.shuffle_sync(until, WARP - 1)
    return Window(rank, begin, end, begin + until - count, count, Int32(leads))


@cute.jit
def sort_requests(
    cu_seqlens_q: cute.Tensor,
    cu_seqlens_k: cute.Tensor,
    order: cute.Tensor,
    lane: Int32,
    geometry: cutlass.Constexpr,
):
    """Writes the order of up to SORTED requests, that whose query tokens see the most keys in the mean first, equal
    ones as they come; by a whole warp. A request without queries has no query tile, wherever it lies."""
    requests = cu_seqlens_q.shape[0] - 1
    most = cutlass.const_expr(SORTED // WARP)
    keys = cute.make_rmem_tensor(most, Int32)
    ranks = cute.make_rmem_tensor(most, Int32)
    for i in cutlass.range_constexpr(most):
        keys[i], ranks[i] = Int32(-1), Int32(0)
        mine = i * WARP + lane
        if mine < requests:
            s, t = cu_seqlens_q[mine + 1] - cu_seqlens_q[mine], cu_seqlens_k[mine + 1] - cu_seqlens_k[mine]
            keys[i] = mean_keys(s, t, geometry.causal)
    for other in cutlass.range_constexpr(most):
        if other * WARP < requests:
            for at in cutlass.range(WARP, unroll=4):
                theirs = cute.arch.shuffle_sync(keys[other], at)
                for i in cutlass.range_constexpr(most):
                    before = other * WARP + at < i * WARP + lane
                    ahead = (theirs > keys[i]) | ((theirs == keys[i]) & before)
                    ranks[i] = ranks[i] + Int32(ahead)
    for i in cutlass.range_constexpr(most):
        if i * WARP + lane < requests:
            order[ranks[i]] = i * WARP + lane
    cute.arch.sync_warp()


# ------------------------------------------------------------------------------------------------ device: load
@cute.jit
def load(
    inputs: Inputs,
    storage: cutlass.Constexpr,
    counter: cute.Tensor,  # (2,) int32, global memory: query tiles taken, CTAs that are done; 0 in front of a launch
    block: Int32,
    blocks: Int32,
    room: Int32,  # of `section_widths`
    lane: Int32,
    dtype: cutlass.Constexpr,
    geometry: cutlass.Constexpr,
):
    """What the producer warp does, until there are no more query tiles."""
    requests = inputs.cu_seqlens_q.shape[0] - 1
    order = storage.order.get_tensor(cute.make_layout(SORTED))
    if requests <= SORTED:
        sort_requests(inputs.cu_seqlens_q, inputs.cu_seqlens_k, order, lane, geometry)
    window = window_at(Int32(0), Int32(0), lane, inputs.cu_seqlens_q, inputs.cu_seqlens_k, order, geometry)
    index, number, done, loads, working = block, Int32(0), Int32(0), Int32(0), True
    while working:
        searching = (index >= window.end) & (window.rank + WARP < requests)
        while searching:
            window = window_at(
                window.rank + WARP, window.end, lane, inputs.cu_seqlens_q, inputs.cu_seqlens_k, order, geometry
            )
            searching = (index >= window.end) & (window.rank + WARP < requests)
        working = index < window.end
        tile = Tile(Int32(0), Int32(0), Int32(0), Int32(0), Int32(0), Int32(0))
        if working:
            holders = cute.arch.vote_ballot_sync((window.start <= index) & (index < window.start + window.count))
            holder = Int32(31 - cute.arch.clz(Int32(holders)))
            # The requests from `first` up to `end` are alike.
            leaders = cute.arch.vote_ballot_sync((window.leads > 0) & (lane <= holder))
            others = Int32(cute.arch.vote_ballot_sync((window.leads > 0) & (lane > holder)))
            first = Int32(31 - cute.arch.clz(Int32(leaders)))
            end = Int32(WARP)
            if others != 0:
                end = Int32(31 - cute.arch.clz(others & -others))
            request = request_at(window.rank + first, order, requests)
            s = inputs.cu_seqlens_q[request + 1] - inputs.cu_seqlens_q[request]
            t = cutlass.max(inputs.cu_seqlens_k[request + 1] - inputs.cu_seqlens_k[request], 0)
            tiles, pairs = query_tiles(s, geometry), (end - first) * geometry.deals
            width, last = section_widths(t, tiles, pairs, room, blocks, geometry)
            at, pair = place_of(index - cute.arch.shuffle_sync(window.start, first), tiles, width, last, pairs)
            request = request_at(window.rank + first + pair // geometry.deals, order, requests)
            first_q, first_k = inputs.cu_seqlens_q[request], inputs.cu_seqlens_k[request]
            tile = tile_of((at, pair % geometry.deals), first_q, s, first_k, t, geometry)
        tell(storage, number, tile, lane)
        number = number + 1
        if working:
            count = kv_tiles(tile, geometry)
            following = load_tile(inputs, storage, counter, lane, tile, count, loads, done, dtype, geometry)
            done, loads = done + count, loads + Int32(count > 0)
            index = blocks + cute.arch.shuffle_sync(following, 0)
    if lane == 0:
        # Whoever is here has taken its last number; the last one sets back what the next launch begins with.
        if cute.arch.atomic_add(counter.iterator + 1, Int32(1)) == blocks - 1:
            counter[0] = 0
            counter[1] = 0


@cute.jit
def tell(storage: cutlass.Constexpr, number: Int32, tile: Tile, lane: Int32):
    """Names query tile `number` of this CTA to the consumers."""
    slot = number % SLOTS
    cute.arch.mbarrier_wait(storage.heard.data_ptr() + slot, (number // SLOTS & 1) ^ 1)
    if lane == 0:
        words = storage.slots.get_tensor(cute.make_layout((8, SLOTS)))
        for i in cutlass.range_constexpr(len(tile)):
            words[i, slot] = tile[i]
        cute.arch.mbarrier_arrive(storage.told.data_ptr() + slot)


@cute.jit
def q_of(q: cute.Tensor, tile: Tile, geometry: cutlass.Constexpr) -> cute.Tensor:
    """(rows, columns) of a query tile, as a tensor of TMA. q: of `make_query_tma`."""
    if cutlass.const_expr(geometry.packed == 1):
        return cute.domain_offset((tile.row, 0), q[None, None, tile.head])
    return cute.domain_offset(((0, tile.row), 0), q[None, None, tile.head // geometry.packed])


@cute.jit
def load_tile(
    inputs: Inputs,
    storage: cutlass.Constexpr,
    counter: cute.Tensor,
    lane: Int32,
    tile: Tile,
    count: Int32,  # KV tiles
    loads: Int32,  # of Q, before
    done: Int32,  # KV tiles of query tiles before
    dtype: cutlass.Constexpr,
    geometry: cutlass.Constexpr,
):
    """Loads Q, and K and V of all KV tiles in the order in which the consumers read them. Returns the number of the
    next query tile, in lane 0. It is asked for in front of the last load: the consumers have work for as long as the
    answer takes, and whoever asked earlier would take a query tile that another CTA comes to sooner."""
    kv_head, n = tile.head // geometry.group, geometry.tokens
    k_layout = wgmma.k_major_layout(dtype, (n, PANEL * geometry.k_panels, STAGES))
    v_layout = wgmma.k_major_layout(dtype, (n, PANEL * geometry.v_panels, STAGES))
    q_layout = wgmma.k_major_layout(dtype, (HALF, PANEL * geometry.k_panels, geometry.consumers))
    queries = wgmma.smem_view(storage.query.data_ptr(), 0, q_layout)
    keys = wgmma.smem_view(storage.keys.data_ptr(), 0, k_layout)
    values = wgmma.smem_view(storage.values.data_ptr(), 0, v_layout)
    q = q_of(inputs.q, tile, geometry)
    k = cute.domain_offset((tile.key, 0), inputs.k[None, None, kv_head])
    v = cute.domain_offset((tile.key, 0), inputs.v[None, None, kv_head])
    q_boxes, q_places = paged.boxes_of(inputs.tma_q, q, queries, HALF)
    k_boxes, k_places = paged.boxes_of(inputs.tma_k, k, keys, n)
    v_boxes, v_places = paged.boxes_of(inputs.tma_v, v, values, n)
    k_panels, v_panels = geometry.k_panels, geometry.v_panels
    full_k, full_v = storage.k_full.data_ptr(), storage.v_full.data_ptr()
    empty_k, empty_v = storage.k_empty.data_ptr(), storage.v_empty.data_ptr()
    if count > 0:
        load_stage(inputs.tma_k, k_boxes, k_places, count - 1, done, full_k, empty_k, k_panels, n)
        # Nobody has read these rows before: while the consumers still read the last Q, this one comes as far as L2.
        for half in cutlass.range_constexpr(geometry.consumers):
            if tile.rows > half * HALF:
                for panel in cutlass.range_constexpr(k_panels):
                    cute.prefetch(inputs.tma_q, q_boxes[None, half, panel])
        full_q, empty_q = storage.q_full.data_ptr(), storage.q_empty.data_ptr()
        for half in cutlass.range_constexpr(geometry.consumers):
            cute.arch.mbarrier_wait(empty_q + half, (loads & 1) ^ 1)
            if tile.rows > half * HALF:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full_q + half, 2 * geometry.half_elements)
                for panel in cutlass.range_constexpr(k_panels):
                    cute.copy(
                        inputs.tma_q,
                        q_boxes[None, half, panel],
                        q_places[None, 0, panel, half],
                        tma_bar_ptr=full_q + half,
                    )
            else:  # this consumer has no row
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(full_q + half)
        for i in cutlass.range(1, count, unroll=1):
            load_stage(inputs.tma_k, k_boxes, k_places, count - 1 - i, done + i, full_k, empty_k, k_panels, n)
            load_stage(inputs.tma_v, v_boxes, v_places, count - i, done + i - 1, full_v, empty_v, v_panels, n)
    following = Int32(0)
    if lane == 0:
        following = cute.arch.atomic_add(counter.iterator, Int32(1))
    if count > 0:
        load_stage(inputs.tma_v, v_boxes, v_places, 0, done + count - 1, full_v, empty_v, v_panels, n)
    return following


@cute.jit
def load_stage(
    tma: cute.CopyAtom,
    boxes: cute.Tensor,  # of `paged.boxes_of`
    places: cute.Tensor,
    kv_tile: Int32,  # of the request
    turn: Int32,  # KV tiles that this CTA has loaded before
    full: cute.Pointer,
    empty: cute.Pointer,
    panels: cutlass.Constexpr,
    tokens: cutlass.Constexpr,
):
    """Loads a KV tile's K, or its V, into the stage whose turn it is, once that is free."""
    stage = turn % STAGES
    cute.arch.mbarrier_wait(empty + stage, (turn // STAGES & 1) ^ 1)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full + stage, 2 * tokens * PANEL * panels)
    for panel in cutlass.range_constexpr(panels):
        cute.copy(
            tma,
            boxes[None, kv_tile, panel],
            places[None, 0, panel, stage],
            tma_bar_ptr=full + stage,
        )


# ------------------------------------------------------------------------------------------------ device: one consumer
class Count(NamedTuple):
    """A query tile as a consumer counts. count: its KV tiles. sees: keys of the last one of these that any row of the
    consumer sees. done, loads: KV tiles and loads of Q of this CTA before it."""

    count: Int32
    sees: Int32
    done: Int32
    loads: Int32

    def behind(self, tile: Tile, me: Int32, geometry: Geometry) -> Count:
        """That of the query tile behind this one."""
        count = kv_tiles(tile, geometry)
        sees = last_keys(tile, count, me * HALF, geometry)
        return Count(count, sees, self.done + self.count, self.loads + Int32(self.count > 0))


@dataclass(frozen=True, eq=False)
class Consumer:
    """Views and registers of one consumer warpgroup. `me`: 0 UPPER, 1 LOWER; thread: 0 .. 127."""

    geometry: Geometry
    storage: Any
    dtype: Any
    me: Any
    thread: Any
    scale_log2: Any
    mma_s: Any  # S = Q·Kᵀ
    mma_half: Any  # S of the first half of a KV tile
    mma_o: Any  # O += P·V, P in registers
    frag_q: Any  # descriptors: the own half of Q,
    frag_k: Any  # all stages of K,
    frag_half: Any  # of the first half of these,
    frag_v: Any  # and of V
    acc_s: Any  # (64, KV tile) fp32 registers
    acc_half: Any  # (64, half a KV tile)
    acc_o: Any  # (64, dv) fp32 registers
    p: Any  # (64, KV tile) 16-bit registers, as words of two
    row_max: Any  # running maximum of the thread's two rows, times scale_log2,
    row_sum: Any  # and this thread's share of the sums
    factor: Any  # what O is to be multiplied with ahead of the next product,
    limits: Any  # and keys that each of the two rows sees

    @classmethod
    def make(cls, geometry, storage, dtype, me, thread, scale_log2) -> Consumer:
        n = geometry.tokens
        mma_s, mma_half = wgmma.make_mma(dtype, n), wgmma.make_mma(dtype, n // 2)
        mma_o = wgmma.make_mma(dtype, geometry.dv, a_in_registers=True, b_major=OperandMajorMode.MN)
        scores, output = mma_s.get_slice(thread), mma_o.get_slice(thread)
        q_layout = wgmma.k_major_layout(dtype, (HALF, PANEL * geometry.k_panels, geometry.consumers))
        k_layout = wgmma.k_major_layout(dtype, (n, PANEL * geometry.k_panels, STAGES))
        v_atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.MN_SW128, dtype)
        v_layout = cute.tile_to_shape(v_atom, (PANEL * geometry.v_panels, n, STAGES), order=(1, 0, 2))
        queries = wgmma.smem_view(storage.query.data_ptr(), 0, q_layout)
        keys = wgmma.smem_view(storage.keys.data_ptr(), 0, k_layout)
        values = wgmma.smem_view(storage.values.data_ptr(), 0, v_layout)
        frag_q = mma_s.make_fragment_A(scores.partition_A(queries))
        half = cute.local_tile(keys, (n // 2, PANEL * geometry.k_panels, STAGES), (0, 0, 0))
        acc_s = cute.make_rmem_tensor(mma_s.partition_shape_C((HALF, n)), Float32)
        return cls(
            geometry=geometry,
            storage=storage,
            dtype=dtype,
            me=me,
            thread=thread,
            scale_log2=scale_log2,
            mma_s=mma_s,
            mma_half=mma_half,
            mma_o=mma_o,
            frag_q=frag_q[None, None, None, me],
            frag_k=mma_s.make_fragment_B(scores.partition_B(keys)),
            frag_half=mma_half.make_fragment_B(mma_half.get_slice(thread).partition_B(half)),
            frag_v=mma_o.make_fragment_B(output.partition_B(values)),
            acc_s=acc_s,
            acc_half=cute.make_rmem_tensor(mma_half.partition_shape_C((HALF, n // 2)), Float32),
            acc_o=cute.make_rmem_tensor(mma_o.partition_shape_C((HALF, geometry.dv)), Float32),
            p=cute.make_rmem_tensor(cute.size(acc_s) // 2, Int32),
            row_max=cute.make_rmem_tensor(2, Float32),
            row_sum=cute.make_rmem_tensor(2, Float32),
            factor=cute.make_rmem_tensor(2, Float32),
            limits=cute.make_rmem_tensor(2, Int32),
        )

    # -------------------------------------------------------------------------------------------- products
    @cute.jit
    def issue_scores(self, turn: Int32):
        """Issues S = Q·Kᵀ of KV tile `turn` of this CTA, whose K has been waited for."""
        stage = turn % STAGES
        blocks = tuple(range(self.geometry.dk // wgmma.MMA_K))
        wgmma.gemm_issue(
            self.mma_s, self.acc_s, self.frag_q, self.frag_k[None, None, None, stage], blocks, zero_init=True
        )

    @cute.jit
    def issue_half(self, turn: Int32):
        """Issues S of the first half of KV tile `turn`."""
        blocks = tuple(range(self.geometry.dk // wgmma.MMA_K))
        keys = self.frag_half[None, None, None, turn % STAGES]
        wgmma.gemm_issue(self.mma_half, self.acc_half, self.frag_q, keys, blocks, zero_init=True)

    @cute.jit
    def issue_output(self, turn: Int32):
        """Issues O += P·V of KV tile `turn` of this CTA, whose V has been waited for (`wait_for_values`)."""
        blocks = tuple(range(self.geometry.tokens // wgmma.MMA_K))
        operand = cute.make_layout(((2, 2, 2), 1, len(blocks)), stride=((1, 2, 4), 0, 8))
        p = cute.make_tensor(cute.recast_tensor(self.p, self.dtype).iterator, operand)
        wgmma.gemm_issue(self.mma_o, self.acc_o, p, self.frag_v[None, None, None, turn % STAGES], blocks)

    @cute.jit
    def wait_for_values(self, turn: Int32):
        """Waits for V of KV tile `turn` of this CTA."""
        cute.arch.mbarrier_wait(self.storage.v_full.data_ptr() + turn % STAGES, turn // STAGES & 1)

    @cute.jit
    def free(self, empty: cute.Pointer, turn: Int32):
        """This warp no longer reads a stage."""
        warp_arrive(empty + turn % STAGES)

    @cute.jit
    def zero_past_end(self, turn: Int32, first: Int32):
        """Zeroes rows `first` .. of V of a KV tile: they belong to another request or to nobody, and 0 · NaN is NaN.
        Both consumers write all of them, so that none waits for the other."""
        stage = turn % STAGES
        n, panels = self.geometry.tokens, self.geometry.v_panels
        # The swizzle permutes 16-byte chunks within a row of a panel only, so that rows need no address arithmetic.
        layout = cute.make_layout((8, 8, n, panels), stride=(1, 8, PANEL, n * PANEL))
        offset = cute.assume(stage * self.geometry.v_elements, divby=512)
        view = cute.make_tensor(self.storage.values.data_ptr() + offset, layout)
        zeros = cute.make_rmem_tensor(8, self.dtype)
        zeros.fill(0.0)
        for row in cutlass.range(first + self.thread // 8, n, WARPGROUP // 8, unroll=1):
            for i in cutlass.range_constexpr(panels):
                cute.autovec_copy(zeros, view[None, self.thread % 8, row, i])
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=int(Barrier.CONSUMER) + self.me, number_of_threads=WARPGROUP)

    # -------------------------------------------------------------------------------------------- softmax
    @cute.jit
    def soften(self, acc_s: cute.Tensor, first_key: Int32, slack: Float32, masked: cutlass.Constexpr):
        """S becomes exp2(scale_log2 · S - maximum), and the sums take it in. acc_s: of a KV tile, or of its first half.
        first_key: of the KV tile, in the request. slack: by how much a score may be above the maximum; lazy."""
        if cutlass.const_expr(masked):
            softmax.mask_columns(acc_s, self.thread, first_key, self.limits)
        for r in cutlass.range_constexpr(2):
            best = quad_max(softmax.thread_max(acc_s, r)) * self.scale_log2
            if cutlass.const_expr(self.geometry.lazy):
                top = cutlass.select_(best > self.row_max[r] + slack, best, self.row_max[r])
            else:
                top = cute.arch.fmax(self.row_max[r], best)
            self.factor[r] = softmax.exp2(self.row_max[r] - top)
            self.row_max[r] = top
        for r in cutlass.range_constexpr(2):
            total = softmax.row_exp2(acc_s, r, self.scale_log2, self.row_max[r])
            self.row_sum[r] = self.row_sum[r] * self.factor[r] + total

    @cute.jit
    def round_p(self, acc_s: cute.Tensor):
        """P in 16 bits, an operand of the next product; 0 where it is wider than acc_s. No product that reads the last
        one may be in flight."""
        scores = cute.make_tensor(acc_s.iterator, cute.make_layout(cute.size(acc_s)))
        for i in cutlass.range_constexpr(cute.size(self.p)):
            if cutlass.const_expr(2 * i < cute.size(acc_s)):
                self.p[i] = rounded_here(scores[2 * i], scores[2 * i + 1], self.dtype)
            else:
                self.p[i] = Int32(0)

    @cute.jit
    def step(self, turn: Int32, first_key: Int32, slack: Float32, takers: Int32, masked: cutlass.Constexpr):
        """One KV tile behind the first: S = Q·Kᵀ of this one, O += P·V of the one before. Behind the scores of the
        request's first key nobody reads Q any more. takers: consumers that take turns; of one alone there are none."""
        if cutlass.const_expr(self.geometry.ordered):
            if takers > 1:
                cute.arch.barrier(barrier_id=int(Barrier.TURN) + self.me, number_of_threads=2 * WARPGROUP)
        stage = turn % STAGES
        cute.arch.mbarrier_wait(self.storage.k_full.data_ptr() + stage, turn // STAGES & 1)
        self.issue_scores(turn)
        # Behind the issue of the scores, so that it runs beside them.
        self.wait_for_values(turn - 1)
        if cutlass.const_expr(not self.geometry.lazy):
            wgmma.scale_rows(self.acc_o, self.factor)
        self.issue_output(turn - 1)
        if cutlass.const_expr(self.geometry.ordered):
            if takers > 1:
                behind = cutlass.select_(self.me == takers - 1, Int32(0), self.me + 1)
                cute.arch.barrier_arrive(barrier_id=int(Barrier.TURN) + behind, number_of_threads=2 * WARPGROUP)
        warpgroup.wait_group(1)  # S
        self.free(self.storage.k_empty.data_ptr(), turn)
        if first_key == 0:
            warp_arrive(self.storage.q_empty.data_ptr() + self.me)
        self.soften(self.acc_s, first_key, slack, masked)
        # Over at once. ptxas moves the wait for O up into the softmax unless there is a loop between, such as a wait's.
        cute.arch.mbarrier_wait(self.storage.open.data_ptr(), 0)
        warpgroup.wait_group(0)  # O, which has read the last P too
        self.free(self.storage.v_empty.data_ptr(), turn - 1)
        self.round_p(self.acc_s)
        if cutlass.const_expr(self.geometry.lazy):
            self.rescale()

    @cute.jit
    def rescale(self):
        """O *= factor where a row of the warp has another maximum than before."""
        moved = (self.factor[0] != 1.0) | (self.factor[1] != 1.0)
        if cute.arch.vote_ballot_sync(moved) != 0:
            wgmma.scale_rows(self.acc_o, self.factor)

    @cute.jit
    def attend(self, tile: Tile, now: Count):
        """O and the row statistics of a query tile that sees any key, of which this consumer has a row."""
        count, sees, done, loads = now
        takers = working(tile, self.geometry)
        n, causal = self.geometry.tokens, self.geometry.causal
        for r in cutlass.range_constexpr(2):
            limit = tile.keys
            if cutlass.const_expr(causal):
                row = self.me * HALF + wgmma.acc_row(self.thread, r)
                limit = cutlass.min(tile.keys, tile.seen + row // self.geometry.packed)
            self.limits[r] = limit
        self.acc_o.fill(0.0)
        self.row_max.fill(softmax.NO_KEY)
        self.row_sum.fill(0.0)

        cute.arch.mbarrier_wait(self.storage.q_full.data_ptr() + self.me, loads & 1)
        cute.arch.mbarrier_wait(self.storage.k_full.data_ptr() + done % STAGES, done // STAGES & 1)
        first_key = (count - 1) * n
        if sees > n // 2:
            self.issue_scores(done)
            warpgroup.wait_group(0)
            self.soften(self.acc_s, first_key, Float32(0.0), True)
            self.round_p(self.acc_s)
        else:
            self.issue_half(done)
            warpgroup.wait_group(0)
            self.soften(self.acc_half, first_key, Float32(0.0), True)
            self.round_p(self.acc_half)
        self.free(self.storage.k_empty.data_ptr(), done)
        if count == 1:
            warp_arrive(self.storage.q_empty.data_ptr() + self.me)
        if count * n > tile.keys:
            self.wait_for_values(done)
            self.zero_past_end(done, tile.keys - first_key)

        plain = Int32(1)  # from this KV tile on no row needs a mask
        if cutlass.const_expr(causal):
            whole = whole_tiles(tile, self.me * HALF, self.geometry)
            plain = cutlass.min(cutlass.max(count - whole, 1), count)
            for i in cutlass.range(1, plain, unroll=1):
                self.step(done + i, (count - 1 - i) * n, Float32(0.0), takers, True)
        for i in cutlass.range(plain, count, unroll=1):
            slack = cutlass.select_(i == plain, Float32(0.0), Float32(softmax.SLACK))
            self.step(done + i, (count - 1 - i) * n, slack, takers, False)

        last = done + count - 1
        if cutlass.const_expr(not self.geometry.lazy):
            wgmma.scale_rows(self.acc_o, self.factor)
        self.wait_for_values(last)
        self.issue_output(last)
        warpgroup.wait_group(0)
        self.free(self.storage.v_empty.data_ptr(), last)

    @cute.jit
    def pass_by(self, now: Count):
        """Frees what is loaded for a query tile of which this consumer has no row, as it comes."""
        cute.arch.mbarrier_wait(self.storage.q_full.data_ptr() + self.me, now.loads & 1)
        warp_arrive(self.storage.q_empty.data_ptr() + self.me)
        for turn in cutlass.range(now.done, now.done + now.count, unroll=1):
            cute.arch.mbarrier_wait(self.storage.k_full.data_ptr() + turn % STAGES, turn // STAGES & 1)
            self.free(self.storage.k_empty.data_ptr(), turn)
            self.wait_for_values(turn)
            self.free(self.storage.v_empty.data_ptr(), turn)

    # -------------------------------------------------------------------------------------------- epilogue
    @cute.jit
    def epilogue(self, tile: Tile, out: cute.Tensor, lse: cute.Tensor):
        """out = O / sum and lse = ln sum; rows past the end of the request are not written."""
        inverse = cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            row = self.me * HALF + wgmma.acc_row(self.thread, r)
            total = softmax.quad_sum(self.row_sum[r])
            inverse[r] = Float32(0.0) if total == 0.0 else 1.0 / total
            if self.thread % 4 == 0 and row < tile.rows:
                value = (self.row_max[r] + cute.math.log2(total, fastmath=True)) * math.log(2.0)
                head, token = place_of_row(tile, row, self.geometry)
                lse[head, token] = -Float32.inf if total == 0.0 else value
        wgmma.scale_rows(self.acc_o, inverse)
        packed = wgmma.to_dtype(self.acc_o, self.dtype)
        columns = self.geometry.dv
        flat = cute.make_tensor(packed.iterator, cute.make_layout(HALF * columns // WARPGROUP))
        words = cute.recast_tensor(flat, Int32)
        for r in cutlass.range_constexpr(2):
            row = self.me * HALF + wgmma.acc_row(self.thread, r)
            inside = row < tile.rows
            start = row_start(out, tile, cutlass.select_(inside, row, Int32(0)), self.geometry)
            # (eight columns, thread of the four, 32 columns)
            target = cute.make_tensor(start, cute.make_layout((8, 4, columns // 32), stride=(1, 8, 32)))
            for block in cutlass.range_constexpr(columns // 32):
                # The thread's words of four groups of eight columns; word i of each lies with thread i of the four.
                turned = transposed([words[r + 2 * (4 * block + g)] for g in range(4)], self.thread)
                chunk = cute.make_rmem_tensor(4, Int32)
                for i in cutlass.range_constexpr(4):
                    chunk[i] = turned[i]
                if inside:
                    cute.autovec_copy(cute.recast_tensor(chunk, self.dtype), target[None, self.thread % 4, block])


@cute.jit
def quad_max(value: Float32) -> Float32:
    """Maximum over the four threads that share a row."""
    for offset in cutlass.range_constexpr(1, 3):
        value = cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, offset=offset))
    return value


@dsl_user_op
def rounded_here(low: Float32, high: Float32, dtype: type, *, loc=None, ip=None) -> Int32:
    """Two numbers in 16 bits, as a word. Left to the compiler, this would move down to where the word is read, behind
    the next scores, and P would take twice the registers meanwhile: ptxas then waits for every product."""
    name = "bf16x2" if dtype is cutlass.BFloat16 else "f16x2"
    result = llvm.inline_asm(
        T.i32(),
        [Float32(high).ir_value(loc=loc, ip=ip), Float32(low).ir_value(loc=loc, ip=ip)],
        f"cvt.rn.{name}.f32 $0, $1, $2;",
        "=r,f,f",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    return Int32(result)


def transposed(words: list[Int32], thread: Int32) -> list[Int32]:
    """Word i of lane j of four neighbours becomes word j of lane i; 4 shuffles."""
    words = list(words)
    for bit in (1, 2):
        upper = (thread & bit) > 0
        for low in (i for i in range(4) if not i & bit):
            sent = cutlass.select_(upper, words[low], words[low + bit])
            got = cute.arch.shuffle_sync_bfly(sent, offset=bit)
            words[low] = cutlass.select_(upper, got, words[low])
            words[low + bit] = cutlass.select_(upper, words[low + bit], got)
    return words


def place_of_row(tile: Tile, row: Int32, geometry: Geometry) -> tuple[Int32, Int32]:
    """(head, query token) of q of a row of a query tile."""
    return tile.head + row % geometry.packed, tile.row + row // geometry.packed


def row_start(out: cute.Tensor, tile: Tile, row: Int32, geometry: Geometry) -> cute.Pointer:
    """Where a row of a query tile begins in out (n, h, dv), global memory."""
    per_token, per_head, _ = out.stride
    head, token = place_of_row(tile, row, geometry)
    offset = Int64(token) * per_token + Int64(head) * per_head
    return out.iterator + cute.assume(offset, divby=8)


@cute.jit
def store_no_keys(tile: Tile, out: cute.Tensor, lse: cute.Tensor, thread: Int32, geometry: cutlass.Constexpr):
    """A query tile that sees no key: zeros and -inf. thread: 0 .. 255."""
    row = thread // 2
    if row < tile.rows:
        zeros = cute.make_rmem_tensor(8, out.element_type)
        zeros.fill(0.0)
        target = cute.make_tensor(
            row_start(out, tile, row, geometry), cute.make_layout((8, geometry.dv // 8), stride=(1, 8))
        )
        for i in cutlass.range(thread % 2, geometry.dv // 8, 2, unroll=1):
            cute.autovec_copy(zeros, target[None, i])
        if thread % 2 == 0:
            head, token = place_of_row(tile, row, geometry)
            lse[head, token] = -Float32.inf


@cute.jit
def heard(storage: cutlass.Constexpr, number: Int32) -> Tile:
    """Query tile `number` of this CTA, once the producer has named it."""
    slot = number % SLOTS
    words = storage.slots.get_tensor(cute.make_layout((8, SLOTS)))
    cute.arch.mbarrier_wait(storage.told.data_ptr() + slot, number // SLOTS & 1)
    tile = Tile(words[0, slot], words[1, slot], words[2, slot], words[3, slot], words[4, slot], words[5, slot])
    cute.arch.sync_warp()
    warp_arrive(storage.heard.data_ptr() + slot)
    return tile


@cute.jit
def consume(
    storage: cutlass.Constexpr,
    out: cute.Tensor,
    lse: cute.Tensor,
    scale_log2: Float32,
    me: Int32,
    thread: Int32,  # of the consumers
    dtype: cutlass.Constexpr,
    geometry: cutlass.Constexpr,
):
    """What a consumer does, until there are no more query tiles."""
    w = Consumer.make(geometry, storage, dtype, me, thread % WARPGROUP, scale_log2)
    if cutlass.const_expr(geometry.ordered):
        if me == geometry.consumers - 1:
            named_arrive(Barrier.TURN, 2 * WARPGROUP)
    tile, number = heard(storage, Int32(0)), Int32(1)
    now = Count(Int32(0), Int32(0), Int32(0), Int32(0)).behind(tile, me, geometry)
    while tile.rows > 0:
        if now.count > 0:
            if me * HALF < tile.rows:
                w.attend(tile, now)
                w.epilogue(tile, out, lse)
            else:
                w.pass_by(now)
        else:
            store_no_keys(tile, out, lse, thread, geometry)
        tile = heard(storage, number)
        number, now = number + 1, now.behind(tile, me, geometry)


# ------------------------------------------------------------------------------------------------ device: the kernel
@cute.kernel
def flash_attention_v22(
    inputs: Inputs,
    out: cute.Tensor,  # (n, h, dv) 16-bit, global memory
    lse: cute.Tensor,  # (h, n) fp32, global memory
    counter: cute.Tensor,  # (2,) int32, global memory
    scale_log2: Float32,
    room: Int32,  # of `section_widths`
    geometry: cutlass.Constexpr,
):
    """A persistent CTA."""
    dtype = out.element_type
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    storage = SmemAllocator().allocate(shared_storage(geometry, dtype))
    warps = cutlass.const_expr(geometry.consumers * WARPGROUP_WARPS)
    if warp == 0:
        with cute.arch.elect_one():
            for barriers, count in (
                (storage.k_full, 1), (storage.v_full, 1), (storage.told, 1),
                (storage.k_empty, warps), (storage.v_empty, warps), (storage.heard, warps),
            ):  # fmt: skip
                for i in range(2):
                    cute.arch.mbarrier_init(barriers.data_ptr() + i, count)
            for i in range(geometry.consumers):
                cute.arch.mbarrier_init(storage.q_full.data_ptr() + i, 1)
                cute.arch.mbarrier_init(storage.q_empty.data_ptr() + i, WARPGROUP_WARPS)
            cute.arch.mbarrier_init(storage.open.data_ptr(), 1)
        for tma in (inputs.tma_q, inputs.tma_k, inputs.tma_v):
            cpasync.prefetch_descriptor(tma)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    of_producer, of_consumer = REGISTERS[geometry.consumers]
    if warp >= warps:
        cute.arch.setmaxregister_decrease(of_producer)
        if warp == warps:
            warp_arrive(storage.open.data_ptr())
            load(inputs, storage, counter, block, blocks, room, thread % WARP, dtype, geometry)
    else:
        cute.arch.setmaxregister_increase(of_consumer)
        me = cute.arch.make_warp_uniform(warp // (WARPGROUP // WARP))
        consume(storage, out, lse, scale_log2, me, thread, dtype, geometry)


flash_attention_v22.set_name_prefix("flash_attention_v22", remove_cutlass_symbol=True, keep_mangled_name=False)


# ------------------------------------------------------------------------------------------------ host
def make_tma(tensor: cute.Tensor, rows: int, spare: cute.Tensor):
    """(TMA atom, tensor (tokens, columns, heads)) for boxes of `rows` tokens by 64 columns of one head.

    tensor: (tokens, heads, columns), global memory, columns contiguous. spare: a tensor with at least one row, whose
    address stands in where `tensor` has no rows and so no memory: a descriptor wants some, and nobody reads it.
    """
    tokens, heads, columns = tensor.shape
    per_token, per_head, _ = tensor.stride
    # What a tensor says of the stride of a mode of size 1 means nothing.
    per_head = cute.assume(cutlass.select_(Int32(heads) > 1, Int64(per_head), Int64(columns)), divby=8)
    per_token = cute.assume(cutlass.select_(Int32(tokens) > 1, Int64(per_token), Int64(columns)), divby=8)
    layout = cute.make_layout((cutlass.max(tokens, 1), columns, heads), stride=(per_token, 1, per_head))
    address = cutlass.select_(Int32(tokens) > 0, tensor.iterator.toint(), spare.iterator.toint())
    view = cute.make_tensor(
        cute.make_ptr(tensor.element_type, address, cute.AddressSpace.gmem, assumed_align=16), layout
    )
    box = wgmma.k_major_layout(tensor.element_type, (rows, PANEL))
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), view, box, (rows, PANEL), 1)


def make_query_tma(q: cute.Tensor, geometry: Geometry):
    """`make_tma` for boxes of HALF rows of q; packed: (TMA atom, tensor ((heads of a group, tokens), columns, groups)),
    whose rows are the heads of one query token behind those of the one before."""
    packed = geometry.packed
    if packed == 1:
        return make_tma(q, HALF, q)
    tokens, heads, columns = q.shape
    per_token, per_head, _ = q.stride
    # What a tensor says of the stride of a mode of size 1 means nothing.
    per_token = cute.assume(cutlass.select_(Int32(tokens) > 1, Int64(per_token), Int64(columns)), divby=8)
    per_head = cute.assume(Int64(per_head), divby=8)
    shape = ((packed, tokens), columns, heads // packed)
    view = cute.make_tensor(q.iterator, cute.make_layout(shape, stride=((per_head, per_token), 1, packed * per_head)))
    box = wgmma.k_major_layout(q.element_type, (HALF, PANEL))
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), view, box, (HALF, PANEL), 1)


@cute.jit
def launch_flash_attention(
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,
    cu_seqlens_q: cute.Tensor,
    cu_seqlens_k: cute.Tensor,
    out: cute.Tensor,
    lse: cute.Tensor,
    counter: cute.Tensor,
    scale: Float32,
    blocks: Int32,
    room: Int32,
    geometry: cutlass.Constexpr,
    stream: CUstream,
):
    """Makes the TMA descriptors and launches `blocks` persistent CTAs, no more than there are query tiles."""
    tma_q, q_view = make_query_tma(q, geometry)
    tma_k, k_view = make_tma(k, geometry.tokens, q)
    tma_v, v_view = make_tma(v, geometry.tokens, q)
    requests = cu_seqlens_q.shape[0] - 1
    most = (q.shape[0] * geometry.packed // geometry.rows + requests) * geometry.deals
    inputs = Inputs(tma_q, q_view, tma_k, k_view, tma_v, v_view, cu_seqlens_q, cu_seqlens_k)
    flash_attention_v22(inputs, out, lse, counter, scale * math.log2(math.e), room, geometry).launch(
        grid=(cutlass.min(blocks, most), 1, 1),
        block=((geometry.consumers + 1) * WARPGROUP, 1, 1),
        min_blocks_per_mp=1,
        stream=stream,
    )


# ------------------------------------------------------------------------------------------------ plan
def takes(pd: PrefillProblem) -> Verdict:
    """Whether this version computes a problem."""
    dk, dv = pd.d + pd.p, pd.d
    if dk % wgmma.MMA_K or dk > 256:
        return Verdict.no(f"keys of d + p = {dk} columns must be a multiple of {wgmma.MMA_K}, 256 at most")
    if dv % PANEL or dv > 256:
        return Verdict.no(f"values of d = {dv} columns must be 64, 128, 192 or 256")
    longest = max(pd.query_tokens, pd.keys)
    return limits.all_of(
        limits.offsets(longest + 3 * HALF, f"{longest:,} tokens of q or k"),
        limits.offsets(pd.query_tokens * pd.h, f"lse is ({pd.h:,}, {pd.query_tokens:,})"),
    )


@dataclass(frozen=True)
class FlashAttentionV22Tiling(Tiling):
    """kv_tile: tokens of a KV tile; 0: as many as shared memory and registers have room for. ordered: the consumers
    issue their products in turn, so that the softmax of one runs beside the products of the others; without it they
    find their own order. consumers: 2 or 3; 0: 3 where registers have room for KV tiles of 128 tokens with so many.
    section_mib: MiB of keys and values that CTAs read from L2 at a time (`section_widths`)."""

    launch_fields: ClassVar[tuple[str, ...]] = ("section_mib",)

    kv_tile: int = 0
    ordered: bool = True
    consumers: int = 0
    section_mib: int = 24

    def geometry(self, pd: PrefillProblem) -> Geometry:
        """What the code is made for, with everything chosen."""
        dk, dv = pd.d + pd.p, pd.d
        consumers = self.consumers or (3 if kv_tile_of(dk, dv, 3) == 128 else 2)
        tokens = self.kv_tile or kv_tile_of(dk, dv, consumers)
        return Geometry(pd.h, pd.h_kv, dk, dv, pd.causal, tokens, self.ordered, consumers)

    def validate(self, pd: PrefillProblem, device: Device | None = None) -> Verdict:
        if self.kv_tile % wgmma.MMA_K or not 0 <= self.kv_tile <= 256:
            return Verdict.no(f"kv_tile = {self.kv_tile} is not a multiple of {wgmma.MMA_K} up to 256")
        if self.consumers and self.consumers not in REGISTERS:
            return Verdict.no(f"consumers = {self.consumers} is not 2 or 3")
        if not 1 <= self.section_mib <= 1024:
            return Verdict.no(f"section_mib = {self.section_mib} is not between 1 and 1,024")
        if not (taken := takes(pd)):
            return taken
        geometry = self.geometry(pd)
        smem = smem_bytes(geometry.dk, geometry.dv, geometry.tokens, geometry.consumers)
        most = MOST_SMEM if device is None else device.smem_per_block
        if not geometry.tokens or smem > most:
            return Verdict.no(
                f"{smem:,} bytes of shared memory for q and {STAGES} stages of {geometry.tokens} keys and values are "
                f"over the {most:,} that a CTA may have"
            )
        return Verdict.yes()


class FlashAttentionV22Plan(KernelPlan):
    """One compiled kernel a problem class; requests, lengths and strides are arguments, and lengths are read on the
    device only."""

    workload = prefill.WORKLOAD
    tiling_type = FlashAttentionV22Tiling
    tiling: FlashAttentionV22Tiling
    any_size = True
    requires = Requirement(
        archs=("sm_90a",), dtypes=("bf16", "fp16"), features=("wgmma", "tma", "setmaxnreg"), problem=takes,
        options=("grouped", "strided_kv"),
    )  # fmt: skip

    def default_tiling(self) -> FlashAttentionV22Tiling:
        return FlashAttentionV22Tiling()

    def autotune_configs(self) -> list[Tiling]:
        tilings = (FlashAttentionV22Tiling(n, turn) for n in (0, 64, 96, 112) for turn in (False, True))
        return [x for x in tilings if x.validate(self.problem, self.device)]

    @any_scale(0)
    def plan(self, *inputs: Any) -> BaseKernel:
        self.require()
        q, _, v, of_q, of_k = inputs
        require_int32(cu_seqlens_q=of_q, cu_seqlens_k=of_k)
        import torch

        outputs = q.new_empty((*q.shape[:2], v.shape[2])), q.new_empty((q.shape[1], len(q)), dtype=torch.float32)
        if not len(q):
            return LibraryCall(lambda: None, name="flash_attention_v22", input_tensors=inputs, output_tensors=outputs)
        return self._make(inputs, outputs, (q.new_zeros(2, dtype=torch.int32),))

    def plan_empty(self) -> BaseKernel:
        self.require()
        return self._make((), (), ())

    def _make(self, inputs: Sequence[Any], outputs: Sequence[Any], counter: Sequence[Any]) -> CuteKernel:
        """The kernel on these tensors, or, where there are none, one that only compiles."""
        pd, kind = self.problem, host.element_type(self.problem.dtype)
        geometry = self.tiling.geometry(pd)

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
                host.fake(Int32, 2, align=4),
                Float32(1.0),
                Int32(1),
                Int32(1),
                geometry,
            )

        room = (self.tiling.section_mib << 20) // (2 * (geometry.dk + geometry.dv))
        given = (*inputs, *outputs, *counter, pd.scale, host.target(self).num_sms, room) if inputs else ()
        return host.stage(
            self,
            flash_attention_v22,
            launch_flash_attention,
            "flash_attention_v22",
            arguments,
            given,
            inputs,
            outputs,
            counter,
        )
