r"""Attention of prompts over decompressed heads for Hopper (sm_90a), version 23; in bf16 and fp16, causal or not.

    out[i, :] = softmax(scale · q[i] · Kᵀ) · V      q, K: 192 or 128 columns a head    V: 128

Two CTAs of a cluster share K and V by multicast. It is version 21 with short query tiles dealt in pairs. Where a
request has 1 to 128 query tokens more than a multiple of 256, its first query tile is short: it has up to 128 rows. A
cluster that took it for one head, as version 21 does, would have one of the two consumers of each CTA at work. Here it
takes that of two heads:

    rows 0 .. 127 of head 2i       first CTA     UPPER 0 .. 63, LOWER 64 .. 127; K and V of head 2i, whole KV tiles
    rows 0 .. 127 of head 2i + 1   second CTA    the same, of head 2i + 1

Both CTAs have the same query tokens and as many KV tiles, so that they go through them together, and nothing but what
is loaded differs. An odd number of heads is dealt one by one, as in version 21.

As in version 21, keys are split where query tiles are too few to give each cluster one: a chunk of 512 new tokens of 16
heads has 32, for the 66 clusters of an H200.

    launch    splits_for: how many splits take the fewest KV tiles of time, from the sizes of the tensors
    schedule  split_of: of the KV tiles that any row of a query tile sees, split i of n has the i-th n-th
    store     O / sum as float32, and its log-sum-exp, as partials of the split
    merge     `merge_splits`, a kernel behind it: Σ w · partial / Σ w with w = exp(lse)

Each split is cut from what its query tile sees, with the mask too, so that splits differ by one KV tile at most. The
code is compiled with splits and without, and the host function launches one or the other.

Requests lie one after another in q (n, h, ·) and in k, v (m, h_kv, ·); `cu_seqlens_q` and `cu_seqlens_k` say where
each begins. Query head i reads kv head i // (h / h_kv). The causal mask is aligned at the end: query token i of s sees
keys 0 .. t - s + i.

A query tile is 256 query tokens of one head; a cluster of two CTAs has one of them. Each CTA loads half of every KV
tile for both (TMA multicast), so that L2 is read half as often; of a short query tile each loads all of its own head's.
Each of the four consumers of a cluster has 64 rows. Of these four blocks the first CTA has the outer two and the second
the inner two, so that both CTAs have as much to do on the diagonal.

Each CTA has three warpgroups. It goes through query tiles, and for each of them through KV tiles of 128 keys, from the
one with the highest keys, which holds the diagonal, down to the first:

    scheduler  one warp of the first CTA: finds the next query tile when the producer asks, and tells both CTAs
    producer   one warp: loads Q, K and V by TMA; L2 is to keep K and V, and to give up Q first
    UPPER      64 query rows      S = Q·Kᵀ, softmax, O += P·V     S, P and O in registers
    LOWER      64 more

A consumer issues the scores of a KV tile and behind them the product of the KV tile before it, whose P it has. The two
consumers of a CTA issue in turn: only the one that has the turn may issue, and it hands the turn on when it has issued
(named barriers). So the softmax of one runs beside the products of the other:

    tensor cores   UPPER: S1 | O += P0·V0 | LOWER: S1 | O += P0·V0 | UPPER: S2 | O += P1·V1 |
    UPPER                     S1 → P1 ...........................   wait        S2 → P2
    LOWER          ... P0     wait                     S1 → P1 ...........................

A consumer skips KV tiles of which its rows see no key. It takes the turn there and hands it on at once.

A step like this leads from one query tile to the next (`cross`). The last product of the present query tile is issued
ahead of the first scores of the next one, and O is divided and stored while these are computed:

    tensor cores   O += P·V | S of the next |
    consumer         wait     O is stored     S → P

In a softmax the wait for O += P·V stands between the exponentials of a thread's first row and those of its second. So P
of the first row is rounded beside the exponentials of the second, and V is free half a softmax earlier than where the
wait stands behind all exponentials:

    behind all    maxima  e0 ... e63                    sums, wait for O, rounding
    here          maxima  e0+ ... e31+   wait for O     e32+ P0 e33+ P1 ...

ptxas moves exponentials and waits across each other, and two things keep it from that. A loop stands in front of the
wait for O, so that the wait does not move up: the loop waits for the mbarrier `open`, and ends at once (see below). The
factor of the second row's scores is read from shared memory behind that loop, so that the second row's exponentials do
not move up.

On the diagonal the rows of a consumer may see keys of the first half of their highest KV tile only (in the picture ░ is
not seen). Then the consumer computes scores and softmax of this half only. If the next KV tile needs no mask, the
product with V takes this half only, too. Where t - s is a multiple of 128, these are UPPER of the first CTA (rows 0 ..
63 of the query tile) and LOWER of the second (rows 128 .. 191). The same picture holds for rows 128 .. 255:

    rows   0 ..  63    ◣ ░         64 x 64 scores and P in place of 64 x 128
    rows  64 .. 127    █ ◣

The mbarriers, who arrives at each of them and who waits for it:

    mbarrier     arrives                                       waits
    q_full[j]    TMA, which has loaded half j of Q             consumer j, before the first scores of a query tile
    q_empty[j]   consumer j, after the last scores             producer
    k_full[i]    TMA of both CTAs, with K of stage i           consumers, before the scores
    k_empty[i]   consumers of both CTAs, after the scores      producer
    v_full[i]    TMA of both CTAs, with V of stage i           consumers, before O += P·V
    v_empty[i]   consumers of both CTAs, after O += P·V        producer
    told[i]      scheduler, by st.async of a query tile into   consumers and producer, before they read slot i
                 slot i of both CTAs
    heard[i]     consumers and producers of both CTAs, when    scheduler, before it writes slot i again
                 they have read slot i
    asked        producer of the first CTA, before its last K  scheduler, before it finds the next query tile
    open         nobody                                        consumers, for the phase before its first one: mbarriers
                                                               count that as over, so the wait ends at once

O goes from registers to global memory, without shared memory between.

Tile scheduler: the query tiles of all requests and heads lie on a line, a split of one as a query tile of one more
head. Up to 128 requests are sorted, the one with the most keys first; more of them are in the caller's order. Requests
beside each other with equal lengths are dealt as if they were one request with the heads of all. The heads of a request
come in sections whose keys and values fit in L2 together. In a section the query tiles with the most keys come first,
and with a causal mask the last section has about three query tiles for each cluster, so that the small ones fill the
tail. Where a request has at least four times as many keys as query tokens (`FAR`), no query tile is much shorter than
the others. Its last section then has at most half as many kv heads as there are clusters, so that at least two query
tiles of a kv head are computed at the same time and its keys are read from DRAM less often: once where it has two. A
cluster's first query tile is its own number; the others it takes from a counter in global memory. It asks the counter
just before its last K of a query tile is loaded. If it asked earlier, it would hold a query tile that another cluster
could begin sooner. The lengths are read on the device only, and the last cluster sets the counter back.

Shared memory, with keys of 192 columns: Q 48 KiB, two stages of K (48 KiB each) and of V (32 KiB each). Registers of a
consumer's thread: S 64, O 64, P 32, of 232.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int16, Int32, Int64
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
CTAS = 2  # of a cluster
ROWS = 2 * HALF * CTAS  # of a query tile
SHORT = 2 * HALF  # rows of a query tile up to which each CTA has that of a head
STAGES = 2
SLOTS = 2  # in which the scheduler names query tiles
CONSUMERS = 2 * WARPGROUP  # threads
THREADS = 3 * WARPGROUP
WARP = 32
CONSUMER_WARPS = CONSUMERS // WARP
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232  # 128 · (40 + 2 · 232) = 64512 of 65536
MOST_SPLITS = 8
MOST_ROWS = 1 << 15  # of all partials: of two query tiles for each cluster of an H200, or nearly
TILE_COST, MERGE_COST = 1, 2  # in KV tiles of time: of a query tile besides its own, and of merging partials
MERGING = 8  # warps of a CTA that merges, a row each
FAR = 4  # a prefix is long where a request has at least so many times as many keys as query tokens
SORTED = 128  # requests up to which they are sorted by their keys; of more the order is the caller's
MISC_BYTES = 2048  # of shared memory, in front of Q
NO_WORD = -(1 << 31)  # which words of a slot never are, or-ed together


KEEP, PASS = 0x14F0000000000000, 0x12F0000000000000  # L2 policies: evict last (K, V) and evict first (Q)


class Barrier(IntEnum):
    """Named barriers."""

    CTA = 0
    UPPER = 1  # the warps of one consumer
    LOWER = 2
    TURN_UPPER = 3  # ordered: this consumer may issue products
    TURN_LOWER = 4


# ------------------------------------------------------------------------------------------------ what code is made for
def panels_of(columns: int) -> int:
    """64-column panels of a head; the last one may not be full."""
    return -(-columns // PANEL)


def smem_bytes(dk: int, dv: int, tokens: int) -> int:
    """Of a CTA, for KV tiles of so many tokens."""
    return MISC_BYTES + 2 * PANEL * (panels_of(dk) * (2 * HALF + STAGES * tokens) + panels_of(dv) * STAGES * tokens)


MOST_SMEM = 232_448
MOST_ACCUMULATORS = 190  # registers of S, O and P; the other 42 are addresses, row statistics and what is in flight


def kv_tile_of(dk: int, dv: int) -> int:
    """Tokens of a KV tile: the most for which shared memory and registers have room; 0: none has."""

    def fits(tokens: int) -> bool:
        registers = tokens // 2 + tokens // 4 + dv // 2
        return smem_bytes(dk, dv, tokens) <= MOST_SMEM and registers <= MOST_ACCUMULATORS

    return next((tokens for tokens in (128, 112, 96, 80, 64) if fits(tokens)), 0)


@dataclass(frozen=True)
class Geometry:
    """What the code is specialised on: heads, columns of keys and values, mask, tokens of a KV tile, whether the
    consumers issue their products in turn (`FlashAttentionV23Tiling`), and whether keys are split, so that partials are
    written."""

    h: int
    h_kv: int
    dk: int
    dv: int
    causal: bool
    tokens: int
    ordered: bool
    split: bool = False

    @property
    def splitting(self) -> Geometry:
        return replace(self, split=True)

    @property
    def group(self) -> int:
        """Query heads that share a kv head."""
        return self.h // self.h_kv

    @property
    def together(self) -> int:
        """Query heads that are dealt together: two, whose short query tiles are one, or, of an odd number, one."""
        return 2 - self.h % 2

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
        "q_full": array(Int64, 2),  # mbarriers; of Q one for each consumer's half
        "q_empty": array(Int64, 2),
        "k_full": array(Int64, STAGES),
        "k_empty": array(Int64, STAGES),
        "v_full": array(Int64, STAGES),
        "v_empty": array(Int64, STAGES),
        "told": array(Int64, SLOTS),
        "heard": array(Int64, SLOTS),
        "asked": array(Int64, 1),
        "scale": array(Float32, 1),  # scale_log2
        "open": array(Int64, 2),  # mbarriers whose phase before the first has always ended; one is waited for
        "slots": cute.struct.Align[array(Int32, 8 * SLOTS), 32],  # a `Tile` each
        "order": array(Int32, SORTED),  # requests, that with the most keys first
        "query": cute.struct.Align[array(dtype, 2 * geometry.half_elements), 1024],
        "keys": cute.struct.Align[array(dtype, STAGES * geometry.k_elements), 1024],
        "values": cute.struct.Align[array(dtype, STAGES * geometry.v_elements), 1024],
    }
    # Not a class statement: postponed annotations are strings, and the struct wants types.
    return cute.struct(type("Storage", (), {"__annotations__": fields}))


class Inputs(NamedTuple):
    """TMA atoms of boxes, TMA tensors, and lengths in global memory."""

    tma_q: cute.CopyAtom  # 64 rows x 64 columns
    q: cute.Tensor  # (n, dk, h)
    tma_k: cute.CopyAtom  # KV tile x 64 columns
    k: cute.Tensor  # (m, dk, h_kv)
    tma_v: cute.CopyAtom
    v: cute.Tensor  # (m, dv, h_kv)
    cu_seqlens_q: cute.Tensor  # (b + 1,) int32
    cu_seqlens_k: cute.Tensor


class Tile(NamedTuple):
    """A query tile, of both CTAs, and a split of its keys. row: of q, its first query token. rows: how many it has; 0:
    there is no more work. head: of q. key: of k and v, the split's first one. keys: of the split. seen: of these and
    those behind them, how many the first row sees; it may be negative. Each row sees one more than the row before.
    place: of out and lse, where its first row goes."""

    row: Any
    rows: Any
    head: Any
    key: Any
    keys: Any
    seen: Any
    place: Any


# ------------------------------------------------------------------------------------------------ tile scheduler
# These take Python integers as well as traced ones.
def ceil_div(number: Any, divisor: Any) -> Any:
    """number / divisor, rounded up; of numbers that are not negative."""
    return (number + divisor - 1) // divisor


def short_tiles(s: Any) -> Any:
    """How many query tiles of a head of a request have up to SHORT rows: the first one, or none."""
    return cutlass.select_((s > 0) & ((cutlass.max(s, 1) - 1) % ROWS < SHORT), 1, 0)


def query_tiles(s: Any, together: int = 1) -> Any:
    """Query tiles of so many heads of a request, which share a short one; none where the length is not positive."""
    return ceil_div(cutlass.max(s, 0), ROWS) * together - short_tiles(s) * (together - 1)


def section_widths(t: Any, tiles: Any, pairs: Any, room: Any, blocks: Any, geometry: Geometry) -> tuple[Any, Any]:
    """How many heads a section has, and how many the last one has, of `pairs` heads with t keys and `tiles` query tiles
    each. The keys and values of a section's heads fit in L2 together, and without a mask it has no more heads than give
    each cluster a query tile. With a causal mask the last section gives each cluster at least about three query tiles:
    if it gave fewer, the longest would end after all others. With at least `FAR` times as many keys as query tokens all
    query tiles are nearly equally long. The last section then has at most half as many kv heads as there are clusters,
    unless more fit in L2, so that at least two query tiles of each are computed at the same time. With more kv heads,
    one query tile of each would keep all clusters busy, and the next one would read the keys from DRAM again. blocks:
    clusters. room: keys of a kv head that fit in L2."""
    group = geometry.group
    most = ceil_div(pairs, group)  # kv heads
    fit = cutlass.max(cutlass.min(room // cutlass.max(t, 1), most), 1)
    if geometry.causal:
        last = ceil_div((3 * blocks + tiles // 2) // tiles, group)
        last = cutlass.select_(t >= FAR * ROWS * tiles, cutlass.min(last, blocks // 2), last)
        last = cutlass.min(cutlass.max(last, fit), most)
    else:
        fit = cutlass.min(fit, ceil_div(ceil_div(blocks, tiles), group))
        last = fit
    return fit * group, last * group


def place_of(index: Any, tiles: Any, width: Any, last: Any, pairs: Any) -> tuple[Any, Any]:
    """(query tile, head) of `pairs` heads with `tiles` query tiles each: section after section of `width` heads, the
    last one of `last`, in each the last query tile of all its heads first. Counted from the end, so that the first
    section is the one that may have fewer heads."""
    left = tiles * pairs - 1 - index
    before = left - tiles * last  # of the sections in front of the last one
    inside = before >= 0
    section = cutlass.select_(inside, before // (tiles * width), 0)
    first = cutlass.select_(inside, last + section * width, 0)
    count = cutlass.select_(inside, cutlass.min(width, pairs - first), last)
    up = cutlass.select_(inside, before - section * (tiles * width), left)
    tile = up // count
    return tile, pairs - 1 - first - (up - tile * count)


def query_tile_of(at: Any, s: Any, together: int) -> tuple[Any, Any]:
    """(query tile, head among `together` ones) at a place of the query tiles of heads that are dealt together: of two
    heads the short query tile of both comes first, then one of each head in turn."""
    short = short_tiles(s) if together > 1 else 0
    behind = cutlass.max(at - short, 0)
    first = at < short
    return cutlass.select_(first, 0, behind // together + short), cutlass.select_(first, 0, behind % together)


def rows_at(at: Any, s: Any) -> tuple[Any, Any]:
    """Where query tile `at` of a request of s queries begins, and how many rows it has. Of a rest of up to half a query
    tile the first one has half of the rows: with a causal mask each but the last then ends half a query tile earlier,
    and sees a KV tile less."""
    early = cutlass.select_((s - 1) % ROWS < SHORT, ROWS - SHORT, 0)
    first = cutlass.max(at * ROWS - early, 0)
    return first, cutlass.min((at + 1) * ROWS - early, s) - first


def tile_of(place: tuple[Any, Any], first_q: Any, s: Any, first_k: Any, t: Any, causal: bool) -> Tile:
    """The query tile at a `place_of` in a request of s queries and t keys that begin at tokens first_q and first_k."""
    at, head = place
    first, rows = rows_at(at, s)
    seen = t - s + first + 1 if causal else t
    return Tile(first_q + first, rows, head, first_k, t, seen, first_q + first)


def kv_tiles(tile: Tile, tokens: int, causal: bool) -> Any:
    """KV tiles that a query tile sees any key of."""
    last = tile.keys
    if causal:
        last = cutlass.min(tile.seen + tile.rows - 1, tile.keys)
    return ceil_div(cutlass.max(last, 0), tokens)


def split_of(tile: Tile, split: Any, splits: Any, room: Any, tokens: int, causal: bool) -> Tile:
    """A split of a query tile: of the KV tiles that any of its rows sees, as many as of the other splits, or one more
    or less. room: rows of a split's partials."""
    count = kv_tiles(tile, tokens, causal)
    begin, end = split * count // splits, (split + 1) * count // splits
    keys = cutlass.select_(end < count, end * tokens, tile.keys) - begin * tokens
    return tile._replace(
        key=tile.key + begin * tokens, keys=keys, seen=tile.seen - begin * tokens, place=tile.place + split * room
    )


def own_rows(tile: Tile, rank: Any, me: Any, together: int) -> Tile:
    """A query tile as a consumer is to read it, which counts rows from its place among the four of a cluster
    (`block_of`). A short one is that of two heads, one for each CTA: rows of UPPER, then those of LOWER."""
    if together == 1:
        return tile
    short = (tile.rows > 0) & (tile.rows <= SHORT)
    moved = cutlass.select_(short, (me - block_of(rank, me)) * HALF, 0)
    return tile._replace(
        rows=tile.rows - moved,
        head=tile.head + cutlass.select_(short, rank, 0),
        seen=tile.seen + moved,
        place=tile.place + moved,
    )


def splits_for(n: Any, m: Any, requests: Any, heads: Any, clusters: Any, tokens: int, together: int = 1) -> Any:
    """Into how many splits the keys of all query tiles are cut, for n query tokens and m keys in all: what takes the
    fewest KV tiles of time, if the requests are alike. A cluster takes one query tile after another, each of which
    costs a KV tile more than it has; partials and their merge cost two."""
    tiles = requests * (heads // together) * query_tiles(ceil_div(n, requests), together)
    length = ceil_div(ceil_div(m, requests), tokens)
    chosen, least = 1, ceil_div(tiles, clusters) * (length + TILE_COST)
    for splits in range(2, MOST_SPLITS + 1):
        time = ceil_div(tiles * splits, clusters) * (ceil_div(length, splits) + TILE_COST) + MERGE_COST
        better = (time < least) & (n * heads <= MOST_ROWS // splits)
        chosen, least = cutlass.select_(better, splits, chosen), cutlass.select_(better, time, least)
    return chosen


def whole_tiles(tile: Tile, first_row: int, tokens: int) -> Any:
    """KV tiles, from the first on, of which all rows from `first_row` on see every key; causal."""
    return cutlass.max(cutlass.min(tile.seen + first_row, tile.keys), 0) // tokens


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
    units: Int32,  # heads that are dealt together, of all splits
    together: cutlass.Constexpr,
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
    count = query_tiles(s, together) * units
    until = count
    for i in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(until, 1 << i)
        until = until + cutlass.select_(lane >= (1 << i), other, Int32(0))
    end = begin + cute.arch.shuffle_sync(until, WARP - 1)
    return Window(rank, begin, end, begin + until - count, count, Int32(leads))


@cute.jit
def sort_requests(cu_seqlens_q: cute.Tensor, cu_seqlens_k: cute.Tensor, order: cute.Tensor, lane: Int32):
    """Writes the order of up to SORTED requests, most keys first, equal ones as they come; by a whole warp. A request
    without queries has no query tile, wherever it lies."""
    requests = cu_seqlens_q.shape[0] - 1
    most = cutlass.const_expr(SORTED // WARP)
    keys = cute.make_rmem_tensor(most, Int32)
    ranks = cute.make_rmem_tensor(most, Int32)
    for i in cutlass.range_constexpr(most):
        keys[i], ranks[i] = Int32(-1), Int32(0)
        mine = i * WARP + lane
        if mine < requests:
            keys[i] = cutlass.max(cu_seqlens_k[mine + 1] - cu_seqlens_k[mine], 0)
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
def schedule(
    inputs: Inputs,
    storage: cutlass.Constexpr,
    counter: cute.Tensor,  # (2,) int32, global memory: query tiles taken, CTAs that are done; 0 in front of a launch
    block: Int32,
    blocks: Int32,
    room: Int32,  # of `section_widths`
    lane: Int32,
    geometry: cutlass.Constexpr,
    splits: Int32 = 1,
    rows: Int32 = 0,  # of q
):
    """What the scheduler warp does, until there are no more query tiles. Every split counts as a query tile of a head
    of its own."""
    cu_seqlens_q, cu_seqlens_k = inputs.cu_seqlens_q, inputs.cu_seqlens_k
    together = cutlass.const_expr(geometry.together)
    of_split = cutlass.const_expr(geometry.h // together)
    units = of_split * splits
    requests = cu_seqlens_q.shape[0] - 1
    order = storage.order.get_tensor(cute.make_layout(SORTED))
    if requests <= SORTED:
        sort_requests(cu_seqlens_q, cu_seqlens_k, order, lane)
    window = window_at(Int32(0), Int32(0), lane, cu_seqlens_q, cu_seqlens_k, order, units, together)
    index, number, working = block, Int32(0), True
    while working:
        searching = (index >= window.end) & (window.rank + WARP < requests)
        while searching:
            window = window_at(window.rank + WARP, window.end, lane, cu_seqlens_q, cu_seqlens_k, order, units, together)
            searching = (index >= window.end) & (window.rank + WARP < requests)
        working = index < window.end
        tile, following = Tile(*7 * (Int32(0),)), Int32(0)
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
            s = cu_seqlens_q[request + 1] - cu_seqlens_q[request]
            t = cutlass.max(cu_seqlens_k[request + 1] - cu_seqlens_k[request], 0)
            tiles, pairs = query_tiles(s), (end - first) * units * together
            width, last = section_widths(ceil_div(t, splits), tiles, pairs, room, blocks, geometry)
            width, last, pairs = ceil_div(width, together), ceil_div(last, together), (end - first) * units
            index_here = index - cute.arch.shuffle_sync(window.start, first)
            place, unit = place_of(index_here, query_tiles(s, together), width, last, pairs)
            at, side = query_tile_of(place, s, together)
            request = request_at(window.rank + first + unit // units, order, requests)
            first_q, first_k = cu_seqlens_q[request], cu_seqlens_k[request]
            tile = tile_of((at, unit % of_split * together + side), first_q, s, first_k, t, geometry.causal)
            if cutlass.const_expr(geometry.split):
                tile = split_of(tile, unit % units // of_split, splits, rows, geometry.tokens, geometry.causal)
        tell(storage, number, tile, lane)
        number = number + 1
        if working:
            cute.arch.mbarrier_wait(storage.asked.data_ptr(), (number & 1) ^ 1)
            if lane == 0:
                following = cute.arch.atomic_add(counter.iterator, Int32(1))
            index = blocks + cute.arch.shuffle_sync(following, 0)
    if lane == 0:
        # Whoever is here has taken its last number; the last one sets back what the next launch begins with.
        if cute.arch.atomic_add(counter.iterator + 1, Int32(1)) == blocks - 1:
            counter[0] = 0
            counter[1] = 0


@cute.jit
def load(
    inputs: Inputs, storage: cutlass.Constexpr, rank: Int32, dtype: cutlass.Constexpr, geometry: cutlass.Constexpr
):
    """What the producer warp does, until there are no more query tiles."""
    tile, number, done, loads = heard(storage, Int32(0)), Int32(1), Int32(0), Int32(0)
    while tile.rows > 0:
        count = kv_tiles(tile, geometry.tokens, geometry.causal)
        load_tile(inputs, storage, tile, count, loads, done, rank, dtype, geometry)
        done, loads = done + count, loads + Int32(count > 0)
        if count == 0:
            ask(storage, rank)
        tile = heard(storage, number)
        number = number + 1


@cute.jit
def tell(storage: cutlass.Constexpr, number: Int32, tile: Tile, lane: Int32):
    """Names query tile `number` to both CTAs of the cluster."""
    slot = number % SLOTS
    cute.arch.mbarrier_wait(storage.heard.data_ptr() + slot, (number // SLOTS & 1) ^ 1)
    if lane == 0:
        told, words = storage.told.data_ptr() + slot, storage.slots.data_ptr() + cute.assume(8 * slot, divby=8)
        zero = Int32(0)
        for rank in cutlass.range_constexpr(CTAS):
            cute.arch.mbarrier_arrive_and_expect_tx(told, 32, rank)
            cute.arch.store_async_dsmem(words, (tile[0], tile[1], tile[2], tile[3]), told, rank)
            cute.arch.store_async_dsmem(words + 4, (tile[4], tile[5], tile[6], zero), told, rank)


@cute.jit
def ask(storage: cutlass.Constexpr, rank: Int32):
    """Asks the scheduler for the next query tile. The consumers have about two KV tiles left for as long as the answer
    takes. Asked earlier, the cluster would hold a query tile that another one could begin sooner."""
    if rank == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(storage.asked.data_ptr())


@cute.jit
def load_tile(
    inputs: Inputs,
    storage: cutlass.Constexpr,
    tile: Tile,
    count: Int32,  # KV tiles
    loads: Int32,  # of Q, before
    done: Int32,  # KV tiles of query tiles before
    rank: Int32,
    dtype: cutlass.Constexpr,
    geometry: cutlass.Constexpr,
):
    """Loads Q, and K and V of all KV tiles in the order in which the consumers read them."""
    head, n, alone = tile.head, geometry.tokens, cutlass.Boolean(False)
    if cutlass.const_expr(geometry.together > 1):
        alone = tile.rows <= SHORT
        head = head + cutlass.select_(alone, rank, 0)
    kv_head = head // geometry.group
    k_layout = wgmma.k_major_layout(dtype, (n, PANEL * geometry.k_panels, STAGES))
    v_layout = wgmma.k_major_layout(dtype, (n, PANEL * geometry.v_panels, STAGES))
    q_layout = wgmma.k_major_layout(dtype, (HALF, PANEL * geometry.k_panels, 2))
    queries = wgmma.smem_view(storage.query.data_ptr(), 0, q_layout)
    keys = wgmma.smem_view(storage.keys.data_ptr(), 0, k_layout)
    values = wgmma.smem_view(storage.values.data_ptr(), 0, v_layout)
    q = cute.domain_offset((tile.row, 0), inputs.q[None, None, head])
    k = cute.domain_offset((tile.key, 0), inputs.k[None, None, kv_head])
    v = cute.domain_offset((tile.key, 0), inputs.v[None, None, kv_head])
    q_boxes, q_places = paged.boxes_of(inputs.tma_q, q, queries, HALF)
    k_boxes, k_places = paged.boxes_of(inputs.tma_k, k, keys, n // CTAS)
    v_boxes, v_places = paged.boxes_of(inputs.tma_v, v, values, n // CTAS)
    k_panels = geometry.k_panels
    full_k, full_v = storage.k_full.data_ptr(), storage.v_full.data_ptr()
    empty_k, empty_v = storage.k_empty.data_ptr(), storage.v_empty.data_ptr()
    blocks = [cutlass.select_(alone, half, block_of(rank, half)) for half in range(2)]
    last = count - 1
    if count > 0:
        if count == 1:
            ask(storage, rank)
        load_stage(inputs.tma_k, k_boxes, k_places, last, done, full_k, empty_k, n, rank, alone)
        # Nobody has read these rows before: while the consumers still read the last Q, this one comes as far as L2.
        for half in cutlass.range_constexpr(2):
            for panel in cutlass.range_constexpr(k_panels):
                cute.prefetch(inputs.tma_q, q_boxes[None, blocks[half], panel])
        full_q, empty_q = storage.q_full.data_ptr(), storage.q_empty.data_ptr()
        for half in cutlass.range_constexpr(2):
            cute.arch.mbarrier_wait(empty_q + half, (loads & 1) ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full_q + half, 2 * geometry.half_elements)
            for panel in cutlass.range_constexpr(k_panels):
                cute.copy(
                    inputs.tma_q,
                    q_boxes[None, blocks[half], panel],
                    q_places[None, 0, panel, half],
                    tma_bar_ptr=full_q + half,
                    cache_policy=Int64(PASS),
                )
        for i in cutlass.range(1, count, unroll=1):
            if i == last:
                ask(storage, rank)
            load_stage(inputs.tma_k, k_boxes, k_places, last - i, done + i, full_k, empty_k, n, rank, alone)
            load_stage(inputs.tma_v, v_boxes, v_places, count - i, done + i - 1, full_v, empty_v, n, rank, alone)
        load_stage(inputs.tma_v, v_boxes, v_places, 0, done + last, full_v, empty_v, n, rank, alone)


@cute.jit
def load_stage(
    tma: cute.CopyAtom,
    boxes: cute.Tensor,  # of `paged.boxes_of`
    places: cute.Tensor,
    kv_tile: Int32,  # of the request
    turn: Int32,  # KV tiles that this CTA has loaded before
    full: cute.Pointer,
    empty: cute.Pointer,
    tokens: cutlass.Constexpr,
    rank: Int32,
    alone: cutlass.Boolean,
):
    """Loads a KV tile's K, or its V, into the stage whose turn it is, once that is free in both CTAs: half of it for
    both, or, alone, all of it for this CTA."""
    stage, panels = turn % STAGES, cutlass.const_expr(cute.size(places, mode=[2]))
    cute.arch.mbarrier_wait(empty + stage, (turn // STAGES & 1) ^ 1)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full + stage, 2 * tokens * PANEL * panels)
    mask = Int16(cutlass.select_(alone, Int32(1) << rank, Int32((1 << CTAS) - 1)))
    for half in cutlass.range_constexpr(CTAS):
        if alone | (rank == half):
            for panel in cutlass.range_constexpr(panels):
                cute.copy(
                    tma,
                    boxes[None, kv_tile * CTAS + half, panel],
                    places[None, half, panel, stage],
                    tma_bar_ptr=full + stage,
                    mcast_mask=mask,
                    cache_policy=Int64(KEEP),
                )


def block_of(rank: Any, me: Any) -> Any:
    """Which 64 rows of a query tile a consumer has: of four blocks the outer ones are the first CTA's, so that both
    CTAs have as much to do on the diagonal."""
    return rank + me * (3 - 2 * rank)


# ------------------------------------------------------------------------------------------------ device: one consumer
class Count(NamedTuple):
    """A query tile as a consumer counts. stream: its KV tiles, which both CTAs load. count: those of them that the
    consumer's rows see any key of, from the first key on. sees: keys of the last one of these that any of its rows
    sees. done, loads: KV tiles and loads of Q of this CTA before it."""

    stream: Int32
    count: Int32
    sees: Int32
    done: Int32
    loads: Int32

    def behind(self, tile: Tile, first_row: Int32, geometry: Geometry) -> Count:
        """That of the query tile behind this one."""
        n, causal = geometry.tokens, geometry.causal
        stream = kv_tiles(tile, n, causal)
        rows = cutlass.min(cutlass.max(tile.rows - first_row, 0), HALF)
        last = cutlass.min(tile.seen + first_row + rows - 1, tile.keys) if causal else tile.keys
        last = cutlass.select_(rows > 0, cutlass.max(last, 0), 0)
        count = ceil_div(last, n)
        sees = last - (count - 1) * n
        return Count(stream, count, sees, self.done + self.stream, self.loads + Int32(self.stream > 0))


@dataclass(frozen=True, eq=False)
class Consumer:
    """Views and registers of one consumer warpgroup. `me`: 0 UPPER, 1 LOWER; thread: 0 .. 127."""

    geometry: Geometry
    storage: Any
    dtype: Any
    me: Any
    first_row: Any  # of the consumer in a query tile
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
    def make(cls, geometry, storage, dtype, me, first_row, thread, scale_log2) -> Consumer:
        n = geometry.tokens
        mma_s, mma_half = wgmma.make_mma(dtype, n), wgmma.make_mma(dtype, n // 2)
        mma_o = wgmma.make_mma(dtype, geometry.dv, a_in_registers=True, b_major=OperandMajorMode.MN)
        scores, output = mma_s.get_slice(thread), mma_o.get_slice(thread)
        q_layout = wgmma.k_major_layout(dtype, (HALF, PANEL * geometry.k_panels, 2))
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
            first_row=first_row,
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
    def issue_output(self, turn: Int32, keys: cutlass.Constexpr, onto: cutlass.Boolean):
        """Issues O += P·V of the first `keys` keys of KV tile `turn` of this CTA, whose V has been waited for
        (`wait_for_values`). onto: else O = P·V, whatever O holds."""
        blocks = tuple(range(-(-keys // wgmma.MMA_K)))
        operand = cute.make_layout(((2, 2, 2), 1, self.geometry.tokens // wgmma.MMA_K), stride=((1, 2, 4), 0, 8))
        p = cute.make_tensor(cute.recast_tensor(self.p, self.dtype).iterator, operand)
        v = self.frag_v[None, None, None, turn % STAGES]
        warpgroup.fence()
        atom = cute.make_mma_atom(self.mma_o.op)
        atom.set(warpgroup.Field.ACCUMULATE, onto)
        for i in cutlass.range_constexpr(len(blocks)):
            cute.gemm(atom, self.acc_o, p[None, None, blocks[i]], v[None, None, blocks[i]], self.acc_o)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    @cute.jit
    def wait_for_values(self, turn: Int32):
        """Waits for V of KV tile `turn` of this CTA."""
        cute.arch.mbarrier_wait(self.storage.v_full.data_ptr() + turn % STAGES, turn // STAGES & 1)

    @cute.jit
    def free(self, empty: cute.Pointer, turn: Int32):
        """This warp no longer reads a stage."""
        warp_arrive(empty + turn % STAGES, CTAS)

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
        cute.arch.barrier(barrier_id=int(Barrier.UPPER) + self.me, number_of_threads=WARPGROUP)

    # -------------------------------------------------------------------------------------------- softmax
    @cute.jit
    def soften(self, acc_s: cute.Tensor, first_key: Int32, masked: cutlass.Constexpr, due: Int32 | None = None):
        """S becomes P, exp2(scale_log2 · S - maximum), and the sums take it in. acc_s: of a KV tile, or of its first
        half, behind which P is 0. first_key: of the KV tile, in the request. due: the KV tile whose product with the
        values is in flight and reads the last P, if any."""
        if cutlass.const_expr(masked):
            softmax.mask_columns(acc_s, self.thread, first_key, self.limits)
        for r in cutlass.range_constexpr(2):
            best = quad_max(softmax.thread_max(acc_s, r)) * self.scale_log2
            top = cute.arch.fmax(self.row_max[r], best)
            self.factor[r] = softmax.exp2(self.row_max[r] - top)
            self.row_max[r] = top
        scale_log2, total = self.scale_log2, Float32(0.0)
        for r in cutlass.range_constexpr(2):
            if cutlass.const_expr(due is not None and r == 1):
                self.end_product(due)
                scale_log2 = self.storage.scale.get_tensor(cute.make_layout(1))[0]
            total = softmax.row_exp2(acc_s, r, scale_log2, self.row_max[r])
            self.row_sum[r] = self.row_sum[r] * self.factor[r] + total
        scores = cute.make_tensor(acc_s.iterator, cute.make_layout(cute.size(acc_s)))
        for i in cutlass.range_constexpr(cute.size(self.p)):
            if cutlass.const_expr(2 * i < cute.size(acc_s)):
                self.p[i] = rounded_here(scores[2 * i], scores[2 * i + 1], self.dtype)
            else:
                self.p[i] = Int32(0)

    @cute.jit
    def end_product(self, turn: Int32):
        """Waits for O += P·V of KV tile `turn`. ptxas moves this wait up to the wait for S unless a loop stands
        between: that of a wait which is over at once."""
        cute.arch.mbarrier_wait(self.storage.open.data_ptr(), 1)
        warpgroup.wait_group(0)  # O, which has read the last P too
        self.free(self.storage.v_empty.data_ptr(), turn)

    @cute.jit
    def take_turn(self):
        if cutlass.const_expr(self.geometry.ordered):
            cute.arch.barrier(barrier_id=int(Barrier.TURN_UPPER) + self.me, number_of_threads=CONSUMERS)

    @cute.jit
    def pass_turn(self):
        if cutlass.const_expr(self.geometry.ordered):
            cute.arch.barrier_arrive(barrier_id=int(Barrier.TURN_LOWER) - self.me, number_of_threads=CONSUMERS)

    @cute.jit
    def wait_for_keys(self, turn: Int32):
        """Waits for K of KV tile `turn` of this CTA."""
        cute.arch.mbarrier_wait(self.storage.k_full.data_ptr() + turn % STAGES, turn // STAGES & 1)

    @cute.jit
    def step(self, turn: Int32, first_key: Int32, masked: cutlass.Constexpr, keys: cutlass.Constexpr,
             onto: cutlass.Boolean):  # fmt: skip
        """One KV tile behind the first: S = Q·Kᵀ of this one, O += P·V of the one before, which is the first product of
        the query tile unless `onto`. Behind the scores of the request's first key nobody reads Q any more."""
        self.take_turn()
        self.wait_for_keys(turn)
        self.issue_scores(turn)
        self.wait_for_values(turn - 1)
        wgmma.scale_rows(self.acc_o, self.factor)  # beside the scores
        self.issue_output(turn - 1, keys, onto)
        self.pass_turn()
        warpgroup.wait_group(1)  # S
        self.free(self.storage.k_empty.data_ptr(), turn)
        if first_key == 0:
            warp_arrive(self.storage.q_empty.data_ptr() + self.me)
        self.soften(self.acc_s, first_key, masked, turn - 1)

    @cute.jit
    def cross(self, now: Count, due: Int32, half: cutlass.Constexpr, before: Tile, out: cute.Tensor,
              lse: cute.Tensor):  # fmt: skip
        """The step from query tile `before`, of `due` KV tiles, to the next, whose last KV tile is `now.done`. The last
        product of `before` is issued first, so that O is stored while the first scores of the next are computed."""
        turn, count = now.done + now.stream - now.count, now.count
        acc_s = self.acc_half if half else self.acc_s
        wgmma.scale_rows(self.acc_o, self.factor)
        self.take_turn()
        self.wait_for_values(now.done - 1)
        self.issue_output(now.done - 1, self.geometry.tokens, due > 1)
        cute.arch.mbarrier_wait(self.storage.q_full.data_ptr() + self.me, now.loads & 1)
        self.wait_for_keys(turn)
        if cutlass.const_expr(half):
            self.issue_half(turn)
        else:
            self.issue_scores(turn)
        self.pass_turn()
        warpgroup.wait_group(1)  # O
        self.free(self.storage.v_empty.data_ptr(), now.done - 1)
        self.epilogue(before, self.row_max, self.row_sum, out, lse)
        warpgroup.wait_group(0)  # S
        self.free(self.storage.k_empty.data_ptr(), turn)
        if count == 1:
            warp_arrive(self.storage.q_empty.data_ptr() + self.me)
        self.begin_rows()
        self.soften(acc_s, (count - 1) * self.geometry.tokens, True)

    @cute.jit
    def begin_rows(self):
        self.row_max.fill(softmax.NO_KEY)
        self.row_sum.fill(0.0)

    @cute.jit
    def see(self, tile: Tile):
        """Which keys the thread's rows see."""
        for r in cutlass.range_constexpr(2):
            limit = tile.keys
            if cutlass.const_expr(self.geometry.causal):
                limit = cutlass.min(tile.keys, tile.seen + self.first_row + wgmma.acc_row(self.thread, r))
            self.limits[r] = limit

    @cute.jit
    def first(self, tile: Tile, now: Count):
        """Softmax of the last KV tile that the rows see any key of, where no product of a query tile before is due."""
        n, count = self.geometry.tokens, now.count
        turn = now.done + now.stream - count
        self.begin_rows()
        if turn > 0:
            self.take_turn()
        cute.arch.mbarrier_wait(self.storage.q_full.data_ptr() + self.me, now.loads & 1)
        self.wait_for_keys(turn)
        first_key = (count - 1) * n
        if now.sees > n // 2:
            self.issue_scores(turn)
            warpgroup.wait_group(0)
            self.soften(self.acc_s, first_key, True)
        else:
            self.issue_half(turn)
            warpgroup.wait_group(0)
            self.soften(self.acc_half, first_key, True)
        if turn > 0:
            self.pass_turn()
        self.free(self.storage.k_empty.data_ptr(), turn)
        if count == 1:
            warp_arrive(self.storage.q_empty.data_ptr() + self.me)

    @cute.jit
    def skip_keys(self, turn: Int32):
        """A KV tile's K that the rows do not see; its turn passes, too."""
        if turn > 0:
            self.take_turn()
            self.pass_turn()
        self.wait_for_keys(turn)
        self.free(self.storage.k_empty.data_ptr(), turn)

    @cute.jit
    def skip_values(self, turn: Int32):
        """A KV tile's V that the rows do not see."""
        self.wait_for_values(turn)
        self.free(self.storage.v_empty.data_ptr(), turn)

    @cute.jit
    def skip_tile(self, now: Count):
        """A query tile of which the rows see no key."""
        if now.stream > 0:
            cute.arch.mbarrier_wait(self.storage.q_full.data_ptr() + self.me, now.loads & 1)
            warp_arrive(self.storage.q_empty.data_ptr() + self.me)
        for i in cutlass.range(now.stream, unroll=1):
            self.skip_keys(now.done + i)
            self.skip_values(now.done + i)

    @cute.jit
    def ready_values(self, tile: Tile, now: Count):
        """V of a query tile's last KV tile, without what lies behind the request's end."""
        n = self.geometry.tokens
        for i in cutlass.range(now.stream - now.count, unroll=1):
            self.skip_values(now.done + i)
        if (now.stream == now.count) & (now.stream * n > tile.keys):
            self.wait_for_values(now.done)
            self.zero_past_end(now.done, tile.keys - (now.stream - 1) * n)

    @cute.jit
    def rest(self, tile: Tile, now: Count):
        """All KV tiles that the rows see any key of but the last one."""
        stream, count, sees, done, _ = now
        n = self.geometry.tokens
        begin, plain = stream - count + 1, stream - count + 1
        if cutlass.const_expr(self.geometry.causal):
            whole = whole_tiles(tile, self.first_row, n)
            plain = cutlass.min(cutlass.max(stream - whole, begin), stream)
        if (sees <= n // 2) & (plain == begin) & (count > 1):
            self.step(done + begin, (count - 2) * n, False, n // 2, cutlass.Boolean(False))
            begin, plain = begin + 1, plain + 1
        if cutlass.const_expr(self.geometry.causal):
            for i in cutlass.range(begin, plain, unroll=1):
                self.step(done + i, (stream - 1 - i) * n, True, n, i > stream - count + 1)
        for i in cutlass.range(plain, stream, unroll=1):
            self.step(done + i, (stream - 1 - i) * n, False, n, i > stream - count + 1)

    @cute.jit
    def last(self, now: Count, due: Int32):
        """O of the query tile in front of `now`, of `due` KV tiles."""
        turn = now.done - 1
        self.wait_for_values(turn)
        wgmma.scale_rows(self.acc_o, self.factor)
        self.issue_output(turn, self.geometry.tokens, due > 1)
        warpgroup.wait_group(0)
        self.free(self.storage.v_empty.data_ptr(), turn)

    # -------------------------------------------------------------------------------------------- epilogue
    @cute.jit
    def epilogue(self, tile: Tile, row_max: cute.Tensor, row_sum: cute.Tensor, out: cute.Tensor, lse: cute.Tensor):
        """out = O / sum and lse = ln sum, rounded unless they are partials; rows past the end of the request are not
        written."""
        total, inverse = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            total[r] = softmax.quad_sum(row_sum[r])
            inverse[r] = cutlass.select_(total[r] == 0.0, Float32(0.0), cute.arch.rcp_approx(total[r]))
        groups = self.geometry.dv // 8  # of eight columns; a thread has two of each
        values = cute.make_tensor(self.acc_o.iterator, cute.make_layout((2, 2, groups), stride=(1, 2, 4)))
        if cutlass.const_expr(self.geometry.split):
            self.store_partials(tile, values, inverse, out)
        else:
            self.store_rows(tile, values, inverse, out)
        for r in cutlass.range_constexpr(2):
            row = self.first_row + wgmma.acc_row(self.thread, r)
            value = (row_max[r] + cute.math.log2(total[r], fastmath=True)) * math.log(2.0)
            if (self.thread % 4 == 0) & (row < tile.rows):
                lse[tile.head, tile.place + row] = cutlass.select_(total[r] == 0.0, -Float32.inf, value)

    @cute.jit
    def store_partials(self, tile: Tile, values: cute.Tensor, inverse: cute.Tensor, out: cute.Tensor):
        """Stores O / sum as float32. The four threads of a row store 32 bytes together."""
        for r in cutlass.range_constexpr(2):
            row = self.first_row + wgmma.acc_row(self.thread, r)
            start = row_start(out, tile, row) + cute.assume(self.thread % 4 * 2, divby=2)
            target = cute.make_tensor(start, cute.make_layout((2, self.geometry.dv // 8), stride=(1, 8)))
            if row < tile.rows:
                for g in cutlass.range_constexpr(self.geometry.dv // 8):
                    pair = cute.make_rmem_tensor(2, Float32)
                    pair[0], pair[1] = values[0, r, g] * inverse[r], values[1, r, g] * inverse[r]
                    cute.autovec_copy(pair, target[None, g])

    @cute.jit
    def store_rows(self, tile: Tile, values: cute.Tensor, inverse: cute.Tensor, out: cute.Tensor):
        """Rounds and stores O / sum."""
        groups = self.geometry.dv // 8
        words = cute.make_rmem_tensor((2, groups // 2, 2), Int32)
        odd = self.thread % 2 > 0
        for r in cutlass.range_constexpr(2):
            for pair in cutlass.range_constexpr(groups // 2):
                # Of two groups threads 0 and 2 of a row's four take the first one, and threads 1 and 3 the second one.
                first, second = (
                    rounded_here(values[0, r, g] * inverse[r], values[1, r, g] * inverse[r], self.dtype)
                    for g in (2 * pair, 2 * pair + 1)
                )
                sent, kept = cutlass.select_(odd, first, second), cutlass.select_(odd, second, first)
                got = cute.arch.shuffle_sync_bfly(sent, offset=1)
                words[0, pair, r] = cutlass.select_(odd, got, kept)
                words[1, pair, r] = cutlass.select_(odd, kept, got)
        for r in cutlass.range_constexpr(2):
            row = self.first_row + wgmma.acc_row(self.thread, r)
            start = row_start(out, tile, row) + cute.assume((self.thread % 2 * 2 + self.thread % 4 // 2) * 4, divby=4)
            target = cute.make_tensor(start, cute.make_layout((4, groups // 2), stride=(1, 16)))
            if row < tile.rows:
                for pair in cutlass.range_constexpr(groups // 2):
                    cute.autovec_copy(cute.recast_tensor(words[None, pair, r], self.dtype), target[None, pair])


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


def row_start(out: cute.Tensor, tile: Tile, row: Int32) -> cute.Pointer:
    """Where a row of a query tile begins in out (n, h, dv), or in partials (splits · n, h, dv), global memory."""
    per_token, per_head, _ = out.stride
    offset = Int64(tile.place + row) * per_token + Int64(tile.head) * per_head
    return out.iterator + cute.assume(offset, divby=8)


@cute.jit
def store_no_keys(
    tile: Tile, out: cute.Tensor, lse: cute.Tensor, first_row: Int32, thread: Int32, geometry: cutlass.Constexpr
):
    """64 rows of a query tile that see no key: zeros and -inf. thread: 0 .. 127."""
    row = first_row + thread // 2
    if row < tile.rows:
        zeros = cute.make_rmem_tensor(8, out.element_type)
        zeros.fill(0.0)
        target = cute.make_tensor(row_start(out, tile, row), cute.make_layout((8, geometry.dv // 8), stride=(1, 8)))
        for i in cutlass.range(thread % 2, geometry.dv // 8, 2, unroll=1):
            cute.autovec_copy(zeros, target[None, i])
        if thread % 2 == 0:
            lse[tile.head, tile.place + row] = -Float32.inf


@cute.jit
def heard(storage: cutlass.Constexpr, number: Int32) -> Tile:
    """Query tile `number` of this CTA, once the scheduler has named it."""
    slot = number % SLOTS
    words = storage.slots.get_tensor(cute.make_layout((8, SLOTS)))
    cute.arch.mbarrier_wait(storage.told.data_ptr() + slot, number // SLOTS & 1)
    tile = Tile(*(words[i, slot] for i in range(7)))
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        # The arrival depends on all words: issued behind the loads only, it overtakes them where stores keep them
        # waiting, and the scheduler writes the slot before it is read.
        if (tile.row | tile.rows | tile.head | tile.key | tile.keys | tile.seen | tile.place) != NO_WORD:
            cute.arch.mbarrier_arrive(storage.heard.data_ptr() + slot, 0)
    return tile


@cute.jit
def consume(
    storage: cutlass.Constexpr,
    out: cute.Tensor,
    lse: cute.Tensor,
    scale_log2: Float32,
    rank: Int32,
    me: Int32,
    thread: Int32,  # 0 .. 255
    dtype: cutlass.Constexpr,
    geometry: cutlass.Constexpr,
):
    """What a consumer does, until there are no more query tiles."""
    first_row = block_of(rank, me) * HALF
    mine = thread % WARPGROUP
    w = Consumer.make(geometry, storage, dtype, me, first_row, mine, scale_log2)
    if cutlass.const_expr(geometry.ordered):
        if me == 1:
            named_arrive(Barrier.TURN_UPPER, CONSUMERS)
    row_max, row_sum = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
    w.acc_o.fill(0.0)
    w.begin_rows()
    together = cutlass.const_expr(geometry.together)
    tile, number = own_rows(heard(storage, Int32(0)), rank, me, together), Int32(1)
    before, due = tile, Int32(0)  # the query tile whose last product is due, and its KV tiles, if any
    now = Count(Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)).behind(tile, first_row, geometry)
    working = True
    while working:
        working = tile.rows > 0
        if now.count > 0:
            for i in cutlass.range(now.stream - now.count, unroll=1):
                w.skip_keys(now.done + i)
        # Of the query tile before. Without these copies the compiler joins the branches around them.
        for r in cutlass.range_constexpr(2):
            row_max[r], row_sum[r] = w.row_max[r], w.row_sum[r]
        if now.count > 0:
            w.see(tile)
            if due > 0:
                if now.sees > geometry.tokens // 2:
                    w.cross(now, due, False, before, out, lse)
                else:
                    w.cross(now, due, True, before, out, lse)
            else:
                w.first(tile, now)
        else:
            if due > 0:
                w.last(now, due)
                w.epilogue(before, row_max, row_sum, out, lse)
        if now.count > 0:
            w.ready_values(tile, now)
            w.rest(tile, now)
        else:
            if working:
                w.skip_tile(now)
                store_no_keys(tile, out, lse, first_row, mine, geometry)
        due, before = now.count, tile
        if working:
            tile = own_rows(heard(storage, number), rank, me, together)
            number = number + 1
        now = now.behind(tile, first_row, geometry)


# ------------------------------------------------------------------------------------------------ device: the kernel
@cute.kernel
def flash_attention_v23(
    inputs: Inputs,
    out: cute.Tensor,  # (n, h, dv) 16-bit, or partials of all splits, (splits · n, h, dv) fp32, global memory
    lse: cute.Tensor,  # (h, n), or of partials (h, splits · n), fp32, global memory
    counter: cute.Tensor,  # (2,) int32, global memory
    scale_log2: Float32,
    room: Int32,  # of `section_widths`
    splits: Int32,
    rows: Int32,  # n
    dtype: cutlass.Constexpr,  # of q, k and v
    geometry: cutlass.Constexpr,
):
    """A persistent CTA of a cluster of two."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    storage = SmemAllocator().allocate(shared_storage(geometry, dtype))
    if warp == 0:
        with cute.arch.elect_one():
            for barriers, count in (
                (storage.k_full, 1), (storage.v_full, 1), (storage.told, 1),
                (storage.k_empty, CTAS * CONSUMER_WARPS), (storage.v_empty, CTAS * CONSUMER_WARPS),
                (storage.heard, CTAS * (CONSUMER_WARPS + 1)),
            ):  # fmt: skip
                for i in range(2):
                    cute.arch.mbarrier_init(barriers.data_ptr() + i, count)
            for i in range(2):
                cute.arch.mbarrier_init(storage.q_full.data_ptr() + i, 1)
                cute.arch.mbarrier_init(storage.q_empty.data_ptr() + i, CONSUMER_WARPS // 2)
            cute.arch.mbarrier_init(storage.asked.data_ptr(), 1)
            for i in range(2):
                cute.arch.mbarrier_init(storage.open.data_ptr() + i, 1)
            storage.scale.get_tensor(cute.make_layout(1))[0] = scale_log2
        for tma in (inputs.tma_q, inputs.tma_k, inputs.tma_v):
            cpasync.prefetch_descriptor(tma)
    cute.arch.mbarrier_init_fence()
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    rank = block % CTAS
    if warp >= CONSUMER_WARPS:
        cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
        if warp == CONSUMER_WARPS:
            load(inputs, storage, rank, dtype, geometry)
        if warp == CONSUMER_WARPS + 1 and rank == 0:
            lane = thread % WARP
            if cutlass.const_expr(geometry.split):
                schedule(inputs, storage, counter, block // CTAS, blocks // CTAS, room, lane, geometry, splits, rows)
            else:
                schedule(inputs, storage, counter, block // CTAS, blocks // CTAS, room, lane, geometry)
    else:
        cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
        me = cute.arch.make_warp_uniform(warp // (WARPGROUP // WARP))
        consume(storage, out, lse, scale_log2, rank, me, thread, dtype, geometry)
    # No CTA leaves while the other may still signal its mbarriers. The arrival releases: signals come ahead of it.
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


flash_attention_v23.set_name_prefix("flash_attention_v23", remove_cutlass_symbol=True, keep_mangled_name=False)


# ------------------------------------------------------------------------------------------------ device: the merge
@cute.kernel
def merge_splits(
    partials: cute.Tensor,  # (splits · n, h, dv) fp32, global memory
    partial_lse: cute.Tensor,  # (h, splits · n) fp32, global memory
    out: cute.Tensor,  # (n, h, dv) 16-bit, global memory
    lse: cute.Tensor,  # (h, n) fp32, global memory
    cu_seqlens_q: cute.Tensor,  # (b + 1,) int32, global memory
    splits: Int32,
    rows: Int32,  # n
    geometry: cutlass.Constexpr,
):
    """out = Σ w · partial / Σ w with w = exp(lse), of each query token and head; a warp each. Reads two splits at a
    time, and rescales sums as a softmax does: the same order and bits in every call. A split of which a row sees no key
    has an LSE of -inf, and one that is NaN makes the row NaN. Rows behind the last request, of which partials hold
    anything, are not written."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    lane, row = thread % WARP, block * MERGING + thread // WARP
    token, head = row // geometry.h, row % geometry.h
    columns = cutlass.const_expr(geometry.dv // WARP)  # of a lane
    column = cute.assume(lane * columns, divby=columns)
    top, total = Float32(softmax.NO_KEY), Float32(0.0)
    sums = cute.make_rmem_tensor(columns, Float32)
    sums.fill(0.0)
    values = cute.make_rmem_tensor((columns, 2), Float32)
    if token < rows:
        end = cu_seqlens_q[cu_seqlens_q.shape[0] - 1]
        for first in cutlass.range(0, splits, 2, unroll=1):
            second = cutlass.min(first + 1, splits - 1)
            found = [partial_lse[head, split * rows + token] for split in (first, second)]
            for i in cutlass.range_constexpr(2):
                per_token, per_head, _ = partials.stride
                at = Int64((first, second)[i] * rows + token) * per_token + Int64(head) * per_head + column
                source = partials.iterator + cute.assume(at, divby=columns)
                cute.autovec_copy(cute.make_tensor(source, cute.make_layout(columns)), values[None, i])
            found[1] = cutlass.select_(second > first, found[1], -Float32.inf)
            above = cute.arch.fmax(top, cute.arch.fmax(found[0], found[1]))
            kept = softmax.exp2((top - above) * math.log2(math.e))
            weights = [softmax.exp2((x - above) * math.log2(math.e)) for x in found]
            top, total = above, total * kept + (weights[0] + weights[1])
            for c in cutlass.range_constexpr(columns):
                parts = [cutlass.select_(found[i] == -Float32.inf, Float32(0.0), values[c, i]) for i in range(2)]
                sums[c] = sums[c] * kept + (weights[0] * parts[0] + weights[1] * parts[1])
        inverse = cutlass.select_(total == 0.0, Float32(0.0), cute.arch.rcp_approx(total))
        made = cute.make_rmem_tensor(columns, out.element_type)
        made.store((sums.load() * inverse).to(out.element_type))
        per_token, per_head, _ = out.stride
        at = Int64(token) * per_token + Int64(head) * per_head + column
        target = out.iterator + cute.assume(at, divby=columns)
        if token < end:
            cute.autovec_copy(made, cute.make_tensor(target, cute.make_layout(columns)))
        if (lane == 0) & (token < end):
            natural = top + cute.math.log2(total, fastmath=True) * math.log(2.0)
            lse[head, token] = cutlass.select_(total == 0.0, -Float32.inf, natural)


merge_splits.set_name_prefix("merge_splits", remove_cutlass_symbol=True, keep_mangled_name=False)


# ------------------------------------------------------------------------------------------------ host
def make_tma(tensor: cute.Tensor, rows: int, spare: cute.Tensor, op: Any):
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
    return cpasync.make_tiled_tma_atom(op, view, box, (rows, PANEL), 1)


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
    partials: cute.Tensor,  # room for MOST_ROWS rows of dv columns, fp32
    partial_lse: cute.Tensor,  # room for MOST_ROWS, fp32
    scale: Float32,
    blocks: Int32,
    room: Int32,
    asked: Int32,  # splits that the caller wants, or 0
    geometry: cutlass.Constexpr,
    stream: CUstream,
):
    """Makes the TMA descriptors and launches `blocks` persistent CTAs, no more than there are query tiles. Where keys
    are split, they write partials, and a second kernel merges these."""
    tma_q, q_view = make_tma(q, HALF, q, cpasync.CopyBulkTensorTileG2SOp())
    tma_k, k_view = make_tma(k, geometry.tokens // CTAS, q, cpasync.CopyBulkTensorTileG2SMulticastOp())
    tma_v, v_view = make_tma(v, geometry.tokens // CTAS, q, cpasync.CopyBulkTensorTileG2SMulticastOp())
    requests, rows, h = Int32(cu_seqlens_q.shape[0] - 1), Int32(q.shape[0]), geometry.h
    inputs = Inputs(tma_q, q_view, tma_k, k_view, tma_v, v_view, cu_seqlens_q, cu_seqlens_k)
    clusters, scale_log2, dtype = blocks // CTAS, scale * math.log2(math.e), q.element_type
    splits = splits_for(rows, Int32(k.shape[0]), requests, h, clusters, geometry.tokens, geometry.together)
    fit = cutlass.max(MOST_ROWS // (rows * h), 1)
    splits = cutlass.min(cutlass.select_(asked > 0, asked, splits), fit)
    grid = (cutlass.min(clusters, (rows // ROWS + requests) * h * splits) * CTAS, 1, 1)
    if splits > 1:
        own = cute.make_tensor(
            partials.iterator,
            cute.make_layout((splits * rows, h, geometry.dv), stride=(h * geometry.dv, geometry.dv, 1)),
        )
        sums = cute.make_tensor(partial_lse.iterator, cute.make_layout((h, splits * rows), stride=(splits * rows, 1)))
        flash_attention_v23(
            inputs, own, sums, counter, scale_log2, room, splits, rows, dtype, geometry.splitting
        ).launch(grid=grid, block=(THREADS, 1, 1), cluster=(CTAS, 1, 1), min_blocks_per_mp=1, stream=stream)
        merge_splits(own, sums, out, lse, cu_seqlens_q, splits, rows, geometry).launch(
            grid=(ceil_div(rows * h, MERGING), 1, 1), block=(MERGING * WARP, 1, 1), stream=stream
        )
    else:
        flash_attention_v23(inputs, out, lse, counter, scale_log2, room, splits, rows, dtype, geometry).launch(
            grid=grid, block=(THREADS, 1, 1), cluster=(CTAS, 1, 1), min_blocks_per_mp=1, stream=stream
        )


# ------------------------------------------------------------------------------------------------ plan
def takes(pd: PrefillProblem) -> Verdict:
    """Whether this version computes a problem."""
    dk, dv = pd.d + pd.p, pd.d
    if dk not in (128, 192) or dv != 128:
        return Verdict.no(
            f"{dk} columns of keys and {dv} of values are not this version's 192 or 128 and 128: take another one"
        )
    longest = max(pd.query_tokens, pd.keys)
    return limits.all_of(
        limits.offsets(longest + ROWS, f"{longest:,} tokens of q or k"),
        limits.offsets(pd.query_tokens * pd.h, f"lse is ({pd.h:,}, {pd.query_tokens:,})"),
    )


@dataclass(frozen=True)
class FlashAttentionV23Tiling(Tiling):
    """kv_tile: tokens of a KV tile; 0: as many as shared memory and registers have room for. ordered: the consumers
    issue their products in turn, so that the softmax of one runs beside the products of the other; without it they
    find their own order. section_mib: MiB of keys and values that CTAs read from L2 at a time (`section_widths`).
    splits: of the keys of a query tile, as far as there is room for partials; 0: as `splits_for` has it."""

    launch_fields: ClassVar[tuple[str, ...]] = ("section_mib", "splits")

    kv_tile: int = 0
    ordered: bool = True
    section_mib: int = 24
    splits: int = 0

    def geometry(self, pd: PrefillProblem) -> Geometry:
        """What the code is made for, with everything chosen."""
        dk, dv = pd.d + pd.p, pd.d
        tokens = self.kv_tile or kv_tile_of(dk, dv)
        return Geometry(pd.h, pd.h_kv, dk, dv, pd.causal, tokens, self.ordered)

    def validate(self, pd: PrefillProblem, device: Device | None = None) -> Verdict:
        if self.kv_tile % wgmma.MMA_K or not 0 <= self.kv_tile <= 256:
            return Verdict.no(f"kv_tile = {self.kv_tile} is not a multiple of {wgmma.MMA_K} up to 256")
        if not 1 <= self.section_mib <= 1024:
            return Verdict.no(f"section_mib = {self.section_mib} is not between 1 and 1,024")
        if not 0 <= self.splits <= MOST_SPLITS:
            return Verdict.no(f"splits = {self.splits} is not between 0 and {MOST_SPLITS}")
        if not (taken := takes(pd)):
            return taken
        geometry = self.geometry(pd)
        smem = smem_bytes(geometry.dk, geometry.dv, geometry.tokens)
        most = MOST_SMEM if device is None else device.smem_per_block
        if not geometry.tokens or smem > most:
            return Verdict.no(
                f"{smem:,} bytes of shared memory for q and {STAGES} stages of {geometry.tokens} keys and values are "
                f"over the {most:,} that a CTA may have"
            )
        return Verdict.yes()


class FlashAttentionV23Plan(KernelPlan):
    """One compiled kernel a problem class; requests, lengths and strides are arguments, and lengths are read on the
    device only."""

    workload = prefill.WORKLOAD
    tiling_type = FlashAttentionV23Tiling
    tiling: FlashAttentionV23Tiling
    any_size = True
    requires = Requirement(
        archs=("sm_90a",), dtypes=("bf16", "fp16"), features=("wgmma", "tma", "setmaxnreg"), problem=takes,
        options=("grouped", "strided_kv"),
    )  # fmt: skip

    def default_tiling(self) -> FlashAttentionV23Tiling:
        return FlashAttentionV23Tiling()

    def autotune_configs(self) -> list[Tiling]:
        tilings = [FlashAttentionV23Tiling(splits=splits) for splits in (0, 1, 2, 4)]
        return [x for x in tilings if x.validate(self.problem, self.device)]

    @any_scale(0)
    def plan(self, *inputs: Any) -> BaseKernel:
        self.require()
        q, _, v, of_q, of_k = inputs
        require_int32(cu_seqlens_q=of_q, cu_seqlens_k=of_k)
        import torch

        outputs = q.new_empty((*q.shape[:2], v.shape[2])), q.new_empty((q.shape[1], len(q)), dtype=torch.float32)
        if not len(q):
            return LibraryCall(lambda: None, name="flash_attention_v23", input_tensors=inputs, output_tensors=outputs)
        rooms = (q.new_empty(size, dtype=torch.float32) for size in (MOST_ROWS * v.shape[2], MOST_ROWS))
        return self._make(inputs, outputs, (q.new_zeros(2, dtype=torch.int32), *rooms))

    def plan_empty(self) -> BaseKernel:
        self.require()
        return self._make((), (), ())

    def _make(self, inputs: Sequence[Any], outputs: Sequence[Any], workspaces: Sequence[Any]) -> CuteKernel:
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
                host.fake(Float32, MOST_ROWS * geometry.dv),
                host.fake(Float32, MOST_ROWS),
                Float32(1.0),
                Int32(1),
                Int32(1),
                Int32(1),
                geometry,
            )

        room = (self.tiling.section_mib << 20) // (2 * (geometry.dk + geometry.dv))
        numbers = (pd.scale, host.target(self).num_sms, room, self.tiling.splits) if inputs else ()
        return host.stage(
            self,
            flash_attention_v23,
            launch_flash_attention,
            "flash_attention_v23",
            arguments,
            (*inputs, *outputs, *workspaces, *numbers),
            inputs,
            outputs,
            workspaces,
        )
