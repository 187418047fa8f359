r"""Decode over packed FP8 caches for Hopper (sm_90a), by indices or by a page table: codes become A operands in
registers; swapped operands, for any number of heads.

    Sᵀ (64 tokens x n) = K · Qᵀ     softmax down the columns     Oᵀ (512 x n) += Vᵀ · P       n = 8 to 64 heads

A cached token's bytes lie in shared memory as they do in the cache; no 16-bit copy of them is made there. KV tiles are
on the M side of both products, so that a key is an A operand, which may come from registers: a warp reads codes in the
order in which the MMA wants its fragments (`ldmatrix`; transposed for V) and widens them to fp16, which holds every
e4m3. Shared memory is read twice for a tile and not written, and a token takes 656 bytes of it, not 1,152: three tiles
fit beside the queries of 64 heads.

A token's scales are split: 2^e, of its largest one, is kept apart, and each group of columns has a factor below 2 left.
With 32 and 64 heads a tile the factor is rounded to fp16 and multiplied with the group's codes. With 8 and 16, scores
and probabilities are fewer than codes: the group's share of a score is multiplied with it in fp32, and so is a copy of
P for the group's values, and codes are only widened. 2^e goes into the scores in fp32, and into the probabilities: with
x = log2 e · score + e,

    P' = exp2(x - m)     out = Σ P' · (V · 2^-e) / Σ P' · 2^-e     m: a running maximum of x

so keys and probabilities have fp16's 11 bits, and its range suffices whatever the scales are. Queries are fp16 as well:
a query tile is multiplied by a power of two that brings its largest element below 2^15. Columns that are bf16 in the
cache stay so for the scores, times 2^-e, beside queries in bf16. In v4 they are values too, and are rounded to fp16.

Layouts of V4.1 have 16 scales a token, powers of two, or 32 of e4m3 beside e2m1. Codes are multiplied with them however
many heads there are. A power of two is made where it is used: one byte permutation makes it of a word with four of them
(`power_factors`). sm_90 converts no e2m1. The warp that makes a token's scores first turns its 256 bytes into 512 bytes
of e4m3 in place (`expand`): three bits of each code select one of eight bytes, since 2^6 times an e2m1 is an e4m3. All
that follows reads such a tile like any other. An e2m1 times an e4m3 scale has six significant bits, and fp16 holds it.

A CTA has up to 64 heads of a query token, fewer where there are few requests (`SparseMlaV2Plan.default_tiling`), and
goes through its worker's splits, one KV tile of 64 tokens at a time:

    producer   four warps, each with 16 rows of every tile: index, two tiles ahead -> a bulk copy of each row
    EVEN       scores of tiles 0, 2, ..;  Oᵀ_L += V_Lᵀ·P, columns 0..255, of all tiles
    ODD        scores of tiles 1, 3, ..;  Oᵀ_R += V_Rᵀ·P, columns 256..511, of all tiles

    EVEN   softmax S0, P0 -> smem | Oᵀ_L += V0_Lᵀ·P0 | S2ᵀ = K2·Qᵀ | wait P1 | Oᵀ_L += V1_Lᵀ·P1
    ODD    S1ᵀ = K1·Qᵀ | wait P0 | Oᵀ_R += V0_Rᵀ·P0 | softmax S1, P1 -> smem | Oᵀ_R += V1_Rᵀ·P1

Both run the same code, half a loop apart, so that half as many instructions are fetched: a consumer's number is in
addresses and barriers. Half a panel of 64 columns is widened while the one before it is multiplied, and the bytes of
two more are on the way into registers. Of consumers, schedule, splits and merges the rest is flash_mla's, version 24.

An index that names no token has a score of -inf and a probability of 0: a word of each producer warp says for which of
its 16 rows of a tile an index names a token. But the row in shared memory must not hold NaN then, since 0 times NaN is
NaN. Against version 1:

- Such a row gets a copy of another row that the same query token attends to: of the warp's 16 rows of the tile, the
  nearest one in front of it that an index names, or the last one that an index names if there is none in front of it
  (`filled_index`). Its bytes are in L2 already, and a tile takes as many copies whatever is missing. The copy makes a
  result NaN or infinite only where the row itself does so. Version 1 copied a row of zeros in its place,
  all CTAs the same 656 bytes, and these copies queued up: a missing index cost more than a token.
- Where all 16 rows of a warp are missing, it zeroes them in shared memory (`clear_row`), and remembers for each stage
  that its rows hold zeros already. A fence of the lanes that stored zeros stands in front of later bulk copies into
  these rows, which write through another proxy. With fewer than 48 heads in a query tile, and where rows' last tokens
  are not looked for, it also zeroes the missing rows of a warp of which indices name fewer than four
  (`Geometry.zeroes_some`). Where P lies in a tile's rows these do not stay zeros: a lane copies the row again that it
  copied for the tile before, if that tile is of the same request and cache and had copies; if not, it zeroes its row.
- The load of an index waits for no length; an index behind the length is ignored a tile later.
- Tiles behind the last index of a row of indices that names a token are left out where no lengths are given and there
  are `MANY` query tokens or more (`look`): each split of the row has less in proportion, so nobody has to deal out
  anew. Producers begin as if rows were full.
- Where no lengths are given, the next split is computed from the one before, without a loop or a length.
- q, indices and page tables are read with the strides that they have.
- With query tiles of 48 heads over v32, P of a tile lies in the tile's own rows, where the rope columns were
  (`Geometry.p_in_rows`), which makes room for a fourth tile. Results go through the rows of a split's last tile, which
  producers get back behind them. And as registers are left, a consumer's thread keeps its addresses in them (`Kept`).
- Over v32, where a query token has an even number of query tiles of 48 heads or more, two of them may be a cluster:
  each CTA copies every other row to both, and a stage is free when the consumers of both have given it back
  (`Geometry.ctas`).
- With query tiles of more than 48 heads, sinks are loaded while rows' last tokens are looked for
  (`Geometry.asks_ahead`).
- A worker's first split is made uniform over a warp (`uniform`) where it comes from memory.
- Tokens of a page are a constant of the code where engines have such pages (`CONSTANT_PAGES`). One piece of code serves
  all others: an index is divided by a multiplier that the host function makes of the cache's shape.
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
from cutlass import BFloat16, Boolean, Float16, Float32, Int32, Int64, Uint8, Uint32
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator

from mla_var3.device import Device, Requirement
from mla_var3.kernel.cute_python import decode_host, host
from mla_var3.kernel.cute_python.prims import paged, softmax, wgmma
from mla_var3.kernel.cute_python.prims.sync import named_any, named_sync, warp_arrive
from mla_var3.kernel.cute_python.prims.wgmma import MMA_K, WARPGROUP
from mla_var3.kernel.cute_python.split_kv import combine, partials, rows, scheduler
from mla_var3.kernel.cute_python.split_kv.partials import Partials, Results
from mla_var3.kernel.cute_python.split_kv.scheduler import Costs, Pool, Schedule, Split
from mla_var3.kernel.cute_python.split_kv.walk import Cta, Group, Place, Tiles, begin, begin_filled
from mla_var3.packed_cache import VALUES, layout_of
from mla_var3.runtime import CuteKernel, KernelPlan, Tiling, Verdict, limits
from mla_var3.workload import sparse_decode

if TYPE_CHECKING:
    from mla_var3.workload.sparse_decode import SparseProblem

HEADS = tuple(range(8, 65, 8))  # of a query tile: what the N side of an MMA may have, up to what registers hold
FEW_HEADS = 16  # of a query tile, up to which scales are multiplied with sums and copies of P
TOKENS = 64  # of a KV tile
PANEL = 64  # columns
CONSUMERS = 2
CONSUMER_THREADS = CONSUMERS * WARPGROUP
WARPS = WARPGROUP // 32
PRODUCERS = 4  # warps
THREADS = CONSUMER_THREADS + 32 * PRODUCERS
ROWS = TOKENS // PRODUCERS  # of a tile, of each producer warp; two lanes each
LEAST_NAMED = 4  # rows: where indices name fewer of a producer warp's 16, `Geometry.zeroes_some` has the others zeroed
EVEN, ODD = 0, 1
OWN, OTHER = 0, 1  # consumers, as one sees them
HALF_PANELS = VALUES // PANEL // CONSUMERS  # of V, of one consumer
MOST_STAGES = 8
# us of an H200, for a query tile of so many heads: begin and end of a call, and each KV tile. Of 8, 16, 32 and 64 they
# are measured, and those between lie on the lines between them.
TIMES = {
    8: (7.9, 1.1), 16: (7.9, 1.17), 24: (9.15, 1.34), 32: (10.4, 1.51), 40: (11.4, 1.73), 48: (12.5, 1.96),
    56: (13.5, 2.18), 64: (14.5, 2.4),
}  # fmt: skip
BLOCKS = 2  # k blocks of 16 that are widened and multiplied together: half a panel of keys, 32 tokens of one of V
AHEAD = 2  # of which bytes are on the way into registers in front of the one that is widened
# Exponents of a token's scales are cut off there. Below, its bf16 columns times 2^-e would leave bf16's range; in v4,
# where they become fp16, they may be up to 4,094.
LEAST_EXPONENT, LEAST_EXPONENT_V4 = -60, -4
MOST_EXPONENT = 126
# In layouts of V4.1 e is as many below the exponent of a token's largest scale: of fp16's range, e4m3 codes leave room
# above, and smaller scales have it below.
LIFT = 3
# The same below that of the largest scale of e2m1 codes, which are at most 6, not 448.
LIFT_FP4 = 9
# e2m1 codes become e4m3 codes of 2^6 times their value: these are the bytes of 0, 0.5, 1, 1.5 and of 2, 3, 4, 6.
E2M1_EXPONENT = 6
E2M1_BYTES = (0x6C686000, 0x7C787470)
PANEL_WORDS = PANEL // 2  # of a row of results, in a panel
QUERY_EXPONENT = 14  # of the largest element of a query tile in fp16
# A row's last token is looked for where splits of full rows have so many tiles, and workers so few splits.
LEAST_TILES, SPANS = 8, 64
# Tokens of a page that are a constant of the code, where those of all caches are among them: what engines and records
# have. ANY_PAGE stands in place of others, which are read at the call.
CONSTANT_PAGES, ANY_PAGE = (1, 16, 32, 64, 128, 256), -1
LOOKED_AT = 16  # tiles that a warp looks at together
MANY = 64  # query tokens, from which on looking costs full rows nothing


class Barrier(IntEnum):
    """Named barriers."""

    CTA = 0
    CONSUMERS = 1
    SETUP = 2  # the CTA's mbarriers are made
    EVEN = 3  # the warps of one consumer
    ODD = 4
    P_EVEN = 5  # P of an even tile is in shared memory
    P_ODD = 6
    LOOKED = 7  # consumers have looked for rows' last tokens


# ------------------------------------------------------------------------------------------------ what code is made for
@dataclass(frozen=True)
class Geometry:
    """What the code is specialised on: heads, those of a query tile (n), query tokens, the caches' layout, tokens of
    their pages (or `ANY_PAGE`; extra_page: 0 where there is no extra cache), which optional inputs there are, whether a
    page table stands in place of indices, whether out has strides, and whether a row's last token is looked for
    (shortens), which is where nobody says it."""

    h: int
    n: int
    s: int
    layout: str
    page: int
    extra_page: int
    lengths: bool
    extra_lengths: bool
    sink: bool
    paged: bool = False
    extra_layout: str = ""
    strided_out: bool = False
    shortens: bool = False

    @property
    def ctas(self) -> int:
        """CTAs of a cluster: 2 or 1. It is 2 over v32 where a query token has an even number of query tiles, and a
        query tile has 48 heads (`p_in_rows`), or more than 48 and rows' last tokens are looked for (`shortens`): 16
        requests of 128 heads took 1.7 % longer in clusters. The query tiles of the two CTAs belong to one query token
        and read the same rows: each CTA starts the copies of every other row, and a copy writes to the shared memory of
        both. Otherwise it is 1."""
        wide = self.p_in_rows or (self.layout == "v32" and self.n > 48 and self.shortens)
        return 2 if wide and self.row_tiles % 2 == 0 else 1

    @property
    def zeroes_some(self) -> bool:
        """Whether rows that no index names are zeroed, and get no copies, where indices name fewer than LEAST_NAMED of
        a producer warp's 16 rows of a tile. There 16 copies would read one row to three. With copies, 5 requests of 128
        heads took 2.1 % longer with nine tenths of their indices missing than with all of them valid, perhaps because
        such reads queue up in L2. This holds with fewer than 48 heads in a query tile where rows' last tokens are not
        looked for (`shortens`)."""
        return self.n < 48 and not self.shortens

    @property
    def asks_ahead(self) -> bool:
        """Whether sinks are loaded before the search for rows' last tokens, so that both loads are under way together.
        If sinks were loaded after the search, consumers would wait for them once the query has arrived. It is done only
        with more than 48 heads in a query tile: where sinks were loaded after the search, only such calls took over 1 %
        longer than version 1."""
        return self.sink and self.shortens and self.n > 48

    @property
    def cache(self) -> Any:
        """Of `packed_cache.LAYOUTS`."""
        return layout_of(self.layout)

    @property
    def extra(self) -> Any:
        """The same of the extra cache."""
        return layout_of(self.extra_layout or self.layout)

    @property
    def float_scales(self) -> bool:
        """Whether scales are float32, which lie behind a row's codes."""
        return bool(self.cache.scale_bytes == 4)

    @property
    def fine(self) -> bool:
        """Whether 64 columns have several scales, as in the layouts of V4.1. Their codes are multiplied with them,
        however few heads there are."""
        return 0 < self.cache.tile < PANEL

    @property
    def fp4(self) -> bool:
        """Whether the codes of the extra cache are e2m1."""
        return bool(self.extra.bits == 4)

    @property
    def registers(self) -> tuple[int, int]:
        """Of a producer's thread and a consumer's. One and two times these are three times 168, which 384 threads are
        compiled for: a CTA cannot take more than it was given."""
        return (24, 240) if self.n > 48 else (56, 224)

    @property
    def row_tiles(self) -> int:
        """Query tiles of a query token."""
        return -(-self.h // self.n)

    @property
    def tiles(self) -> int:
        """Query tiles of a request."""
        return self.row_tiles * self.s

    @property
    def panels(self) -> int:
        """64-column panels of a cached token: of codes, then of bf16."""
        return self.cache.columns // PANEL

    @property
    def code_panels(self) -> int:
        return self.cache.quantised // PANEL

    @property
    def plain_start(self) -> int:
        """The first byte of a row's bf16 columns: behind its codes and, in v32, their scales."""
        cache = self.cache
        return cache.quantised + (cache.scales * cache.scale_bytes if self.float_scales else 0)

    @property
    def row_bytes(self) -> int:
        """Of a row in shared memory, and but for V4.1 from one token of a page to the next. There a row is 512 bytes of
        codes and then its scales; e2m1 codes come into the second half of these 512 bytes (`expand`)."""
        return self.plain_start + 2 * self.cache.plain + (self.groups if self.fine else 0)

    @property
    def stride(self) -> int:
        """Bytes from one row to the next in shared memory: an odd multiple of 16, so that eight rows' 16 bytes lie in
        different banks."""
        return self.row_bytes + (16 if self.row_bytes % 32 == 0 else 0)

    @property
    def groups(self) -> int:
        """Factors of a token: one for each scale, and in v4 one for its bf16 columns."""
        if self.fine:
            return max(self.cache.scales, self.extra.scales)
        return self.cache.scales + (1 if self.layout == "v4" else 0)

    def group(self, panel: int) -> int:
        """The factor that a panel's columns are multiplied with; where they have several, the first one."""
        if self.fine:
            return panel * self.groups // self.panels
        if panel < self.code_panels and self.cache.tile:
            return panel * PANEL // self.cache.tile
        return self.cache.scales

    def begins_group(self, panel: int) -> bool:
        """Whether a panel's factor is another than that of the one before it."""
        return panel > 0 and self.group(panel) != self.group(panel - 1)

    def own_group(self, panel: int) -> int:
        """The same of one of a consumer's own panels of V, among those of its own."""
        return self.group(panel) if self.groups else 0

    @property
    def own_groups(self) -> int:
        """Factors of a consumer's own panels of V."""
        return self.groups // CONSUMERS

    def is_mixed(self, panel: int) -> bool:
        """Whether one of a consumer's own panels of V is codes in EVEN, and bf16 in ODD."""
        return panel + HALF_PANELS >= self.code_panels

    @property
    def scales_sums(self) -> bool:
        """Whether a group's factor is multiplied with its share of a score and with a probability for its values, and
        not with its codes: of few heads these are fewer. Of 32 heads they are fewer too, but the copies of P would take
        the shared memory of a tile, and so its bytes under way."""
        return self.groups > 0 and self.n <= FEW_HEADS and not self.fine

    @property
    def copies(self) -> int:
        """Of P: one for each factor that it is multiplied with."""
        return self.groups if self.scales_sums else 1

    @property
    def code_factors(self) -> int:
        """Factors of a token that its codes are multiplied with."""
        return 0 if self.scales_sums else self.groups

    @property
    def least_exponent(self) -> int:
        return LEAST_EXPONENT_V4 if self.layout == "v4" else LEAST_EXPONENT

    @property
    def stage_bytes(self) -> int:
        """Of shared memory, with a tile's factors and, in v4, its scales."""
        return TOKENS * (self.stride + 2 * self.code_factors + (8 if self.layout == "v4" else 0))

    @property
    def p_bytes(self) -> int:
        """Of shared memory: P of both consumers, where it has a place of its own (`p_in_rows`)."""
        return 2 * self.n * CONSUMERS * self.copies * TOKENS

    @property
    def free_bytes(self) -> int:
        """Of shared memory, for tiles and P, beside Q and exchange buffers; barriers and alignment take under 2 KiB."""
        taken = 2048 + 2 * self.n * PANEL * self.panels + 4 * self.n * (6 * WARPS + 1)
        return Device.assumed().smem_per_block - taken

    @property
    def p_in_rows(self) -> bool:
        """Whether P of a tile lies in the tile's own rows, where its bf16 columns were: in v32 these are for scores
        alone, and P is made of the scores. Where that makes room for another tile: with 48 heads. Neither with a page
        table nor with strides of out, where it has not run on a GPU."""
        if self.layout != "v32" or self.scales_sums or self.paged or self.strided_out:
            return False
        return (self.free_bytes - self.p_bytes) // self.stage_bytes < self.free_bytes // self.stage_bytes

    @property
    def stages(self) -> int:
        """Tiles in shared memory."""
        free = self.free_bytes - (0 if self.p_in_rows else self.p_bytes)
        return min(free // self.stage_bytes, MOST_STAGES)

    @property
    def pairs(self) -> int:
        """Columns of the accumulators that a thread holds, half of them: it holds two that lie next to each other."""
        return self.n // 8

    @property
    def partials(self) -> Partials:
        return Partials(self.tiles, self.n, VALUES)

    @property
    def as_long(self) -> bool:
        """Whether all requests have as many tiles, whatever their indices are: no length has to be read."""
        return not (self.lengths or self.extra_lengths or self.paged)

    @property
    def padded(self) -> bool:
        """Whether there are rows without a head between those of one query token and of the next."""
        return self.s > 1 and self.h % self.n > 0

    @property
    def merge(self) -> combine.Merge:
        """A combine takes the rows of a request and kv head to lie behind each other in their tiles. Where that holds
        for each query token by itself, its heads are to the combine those of a kv head of its own."""
        if self.padded:
            return combine.Merge(self.s * self.h, self.s, 1, self.partials, self.costs)
        return combine.Merge(self.h, 1, self.s, self.partials, self.costs)

    @property
    def combines(self) -> bool:
        """Whether a combine may be launched where the scheduler chooses the splits. In layout flat workers merge them,
        and multiply with the scale of V once."""
        return not self.cache.one_scale

    @property
    def costs(self) -> Costs:
        """In KV tiles, as dense decode's."""
        return Costs(tokens=TOKENS, overhead=3, combine=1, listed=2, level=3)


def shared_storage(geometry: Geometry) -> type:
    """The CTA's shared memory."""

    def array(kind: type, size: int) -> Any:
        return cute.struct.MemRange[kind, size]

    n, stages = geometry.n, geometry.stages
    exchange = cute.struct.Align[array(Float32, CONSUMERS * WARPS * n), 16]  # a value of each warp and head
    fields = {
        "full": array(Int64, stages),  # mbarriers: the tile has been loaded
        "empty": array(Int64, stages),  # mbarriers: it is no longer read
        "query_full": array(Int64, 1),  # mbarrier: the query has been loaded
        "query_empty": array(Int64, 1),  # mbarrier: its scores are made
        "first": array(Int32, scheduler.FIRST_WORDS),
        "valid": array(Int32, PRODUCERS * stages),  # [stage]: which indices name a token, two bits a row
        "largest": array(Int32, CONSUMERS * WARPS),  # of the query, of each warp
        "tokens": array(Int32, CONSUMERS * WARPS),  # not 0: rows of a warp's, in a split, name tokens
        "is_short": array(Int32, 1),  # whether a row of the worker's ends early
        "spans": array(Int32, 2 * SPANS if geometry.shortens else 1),  # first and end tile of splits (`look`)
        "exchange": exchange,  # maxima, then sums of P
        "magnitudes": exchange,
        "maxima": exchange,  # running maximum, of each warp
        "moves": array(Int32, 1),  # how often the running maximum of a split has moved
        "sinks": array(Float32, n if geometry.sink else 1),  # of the heads, times log2 e
        "row_max": cute.struct.Align[array(Float32, n), 16],  # running maximum that both consumers share
        "factors": cute.struct.Align[array(Float16, max(1, stages * geometry.code_factors * TOKENS)), 16],
        "scales": cute.struct.Align[array(Int64, stages * TOKENS if geometry.layout == "v4" else 1), 16],
        "query": cute.struct.Align[array(Float16, n * PANEL * geometry.panels), 1024],
        "p": cute.struct.Align[array(Float16, 0 if geometry.p_in_rows else geometry.p_bytes // 2), 1024],
        "rows": cute.struct.Align[array(Uint8, stages * TOKENS * geometry.stride), 128],
    }
    # Not a class statement: postponed annotations are strings, and the struct wants types.
    return cute.struct(type("Storage", (), {"__annotations__": fields}))


def stage_at(stage: Int32, phase: Int32, offset: int, stages: int) -> tuple[Int32, Int32]:
    """(stage, phase) `offset` tiles further on in the ring; offset <= stages."""
    moved = stage + offset
    wrapped = Int32(moved >= stages)
    return moved - wrapped * stages, phase ^ wrapped


# ------------------------------------------------------------------------------------------------ device: load
class Cache(NamedTuple):
    """A packed cache and what says which of its tokens are attended to."""

    tokens: cute.Tensor  # (pages, page, bytes of a token) uint8, global memory; pages apart
    indices: cute.Tensor  # (b, s, topk) int32, global memory; or the page table, (b, width)
    lengths: cute.Tensor | None  # (b,) int32, global memory: indices that count; or cached tokens
    divisor: cute.FastDivmodDivisorV2 | None  # tokens of a page, where they are no constant

    @property
    def page(self) -> Any:
        """Tokens of a page, to divide by numbers that are not negative."""
        return self.tokens.shape[1] if self.divisor is None else self.divisor


@cute.jit
def count_of(cache: cutlass.Constexpr, request: Int32, token: Int32, geometry: cutlass.Constexpr) -> Int32:
    """Indices of a query token that count; of a page table, cached tokens that it sees: up to itself."""
    if cutlass.const_expr(geometry.paged):
        count = cutlass.max(cache.lengths[request] - (geometry.s - 1) + token, 0)
    else:
        count = Int32(cache.indices.shape[2])
        if cutlass.const_expr(cache.lengths is not None):
            count = cutlass.max(cutlass.min(count, cache.lengths[request]), 0)
    return count


class Row(NamedTuple):
    """A producer lane's row of a tile. index: as it is in memory (`read_row`), of a page table the page; or the cached
    token, and -1 where none is named (`named`). is_extra: whether the tile is the extra cache's. left: indices from the
    tile's first one on that count. there: whether there is a tile. first: the tile's first position. request: whose
    tile it is. asks: whether the request's query is loaded behind the tile."""

    index: Int32
    is_extra: Boolean
    left: Int32
    there: Boolean
    first: Int32
    request: Int32
    asks: Boolean


class Progress(NamedTuple):
    """Where a producer is: a split, and its tile. asks: the tile behind which the split's query is loaded. The tile
    behind that one waits for the stage of the last tile but one of the split before, which is free when all scores of
    that split are made, and so is the query's place."""

    split: Split
    tile: Int32
    end: Int32  # of the split's tiles
    asks: Int32


@cute.jit
def read_row(caches: cutlass.Constexpr, place: Progress, token: Int32, row: Int32, geometry: cutlass.Constexpr) -> Row:
    """This lane's row of the tile at a place. The tiles of the extra cache follow the first one's. Only loads, which
    nothing here waits for."""
    there = scheduler.has_work(place.split) & (place.tile < place.end)
    request = cutlass.select_(there, place.split.request, Int32(0))
    number, count, is_extra = place.tile, count_of(caches[0], request, token, geometry), Boolean(False)
    if cutlass.const_expr(geometry.paged):
        source = caches[0].indices[request, None].iterator
    else:
        source, width = caches[0].indices[request, token, None].iterator, Int32(caches[0].indices.shape[2])
    if cutlass.const_expr(len(caches) > 1):
        of_first = scheduler.ceil_div(count, TOKENS)
        is_extra = number >= of_first
        behind = caches[1].indices[request, token, None].iterator
        number = cutlass.select_(is_extra, number - of_first, number)
        count = cutlass.select_(is_extra, count_of(caches[1], request, token, geometry), count)
        width = cutlass.select_(is_extra, Int32(caches[1].indices.shape[2]), width)
        address = cutlass.select_(is_extra, behind.toint(), source.toint())
        source = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=4)
    first = number * TOKENS
    if cutlass.const_expr(geometry.paged):
        # Entries behind a request's last token are not read.
        at = cutlass.max(cutlass.min(first + row, cutlass.select_(there, count, Int32(0)) - 1), 0) // caches[0].page
    else:
        # What counts is asked later (`named`), so that this load waits for no length.
        at = cutlass.min(first + row, width - 1)
    index = cute.make_tensor(source + at, cute.make_layout(1))[0]
    return Row(index, is_extra, count - first, there, first, request, there & (place.tile == place.asks))


@cute.jit
def named(found: Row, caches: cutlass.Constexpr, row: Int32, geometry: cutlass.Constexpr) -> Row:
    """The row with a cached token for its index."""
    most, index = caches[0].tokens.shape[0] * caches[0].tokens.shape[1], found.index
    if cutlass.const_expr(len(caches) > 1):
        extra = caches[1].tokens.shape[0] * caches[1].tokens.shape[1]
        most = cutlass.select_(found.is_extra, extra, most)
    if cutlass.const_expr(geometry.paged):
        index = index * caches[0].tokens.shape[1] + (found.first + row) % caches[0].page
    is_token = (row < found.left) & (index >= 0) & (index < most)
    index = cutlass.select_(is_token, index, Int32(-1))
    return Row(index, found.is_extra, found.left, found.there, found.first, found.request, found.asks)


@cute.jit
def last_named(
    caches: cutlass.Constexpr, split: Split, token: Int32, tile: Int32, count: cutlass.Constexpr,
    geometry: cutlass.Constexpr,
) -> Int32:  # fmt: skip
    """The last one of `count` tiles of a row, from `tile` down, that names a token, or -1; by a whole warp."""
    lane, best, found = cute.arch.lane_idx(), Int32(-1), []
    for i in cutlass.range_constexpr(2 * count):
        number = cutlass.max(tile - i // 2, 0)
        at = Progress(split, number, number + 1, Int32(-1))
        found.append(read_row(caches, at, token, lane + i % 2 * 32, geometry))
    for i in cutlass.range_constexpr(2 * count):
        row = named(found[i], caches, lane + i % 2 * 32, geometry)
        best = cutlass.max(best, cutlass.select_(row.index >= 0, cutlass.max(tile - i // 2, 0), Int32(-1)))
    return Int32(cute.arch.warp_redux_sync(best, kind="max"))


def looks(walk: Any) -> Boolean:
    """Whether rows' last tokens are looked for: it has to pay, and there must be room for what is found."""
    line, pool = walk.line, walk.pool
    tiles = cutlass.min(scheduler.ceil_div(pool.tokens, TOKENS), cutlass.select_(line.lead > 0, line.span, line.step))
    few = line.span <= cutlass.select_(line.lead > 0, (SPANS - 2) * pool.width, Int32(SPANS))
    return (tiles >= LEAST_TILES) & few & (pool.fixed == 0)


def share_of(first: Any, end: Any, named: Any, tiles: Any) -> tuple[Any, Any]:
    """First and end tile of a split of a row of `tiles` tiles, of which only the first `named` name tokens, where the
    split has tiles first to end of a full row. The splits of a row divide those tiles in proportion. A split never
    becomes empty: where its share is none it gets the row's last tile, which names no token then."""
    first, end = scheduler.ceil_div(first * named, tiles), scheduler.ceil_div(end * named, tiles)
    none = 1 - cutlass.min(end - first, 1)
    return first + none * (tiles - 1 - first), end + none * (tiles - end)


@cute.jit
def look(
    split: Split, caches: cutlass.Constexpr, storage: cutlass.Constexpr, walk: cutlass.Constexpr, token: Int32,
    warp: Int32, geometry: cutlass.Constexpr,
) -> Boolean:  # fmt: skip
    """Notes which tiles the worker's splits have: each its share (`share_of`) of a row's tiles up to the last one that
    names a token, where an eighth or more of the tiles lies behind that. Returns whether a row is so short; else nobody
    reads what is noted. By the consumers' warps, each of which takes every eighth split, while the first tile is
    loaded. Little code is run for full rows: what runs once is fetched line by line."""
    spans, width = storage.spans.get_tensor(cute.make_layout((2, SPANS))), walk.pool.width
    tiles, early = scheduler.ceil_div(walk.pool.tokens, TOKENS), Boolean(False)
    if looks(walk) & walk.has_work(split):
        request = split.request + warp
        last = cutlass.min((split.end - 1) // width, caches[0].indices.shape[0] - 1)
        while request <= last:
            begin = cutlass.max(split.point, request * width)
            behind = cutlass.min(split.end, (request + 1) * width)
            first = scheduler.place_of(begin, request * width, tiles, walk.line)
            end = scheduler.place_of(behind, request * width, tiles, walk.line)
            row = Split(begin, split.end, request, request * width, split.length)
            # One tile decides for most rows, which are full.
            probed = tiles - cutlass.max(tiles // 8, 1)
            if last_named(caches, row, token, probed, 1, geometry) < 0:
                found, tile, early = Int32(-1), tiles - 1, Boolean(True)
                while (found < 0) & (tile >= 0):
                    found = last_named(caches, row, token, tile, LOOKED_AT, geometry)
                    tile = tile - LOOKED_AT
                first, end = share_of(first, end, found + 1, tiles)
            spans[0, request % SPANS] = first
            spans[1, request % SPANS] = end
            request = request + CONSUMERS * WARPS
    return early


@cute.jit
def span_of(split: Split, storage: cutlass.Constexpr) -> tuple[Int32, Int32]:
    """First and end tile of a split, as `look` has noted them."""
    spans = storage.spans.get_tensor(cute.make_layout((2, SPANS)))
    number = split.request % SPANS
    return cute.arch.make_warp_uniform(spans[0, number]), cute.arch.make_warp_uniform(spans[1, number])


def short_word(storage: Any) -> cute.Tensor:
    """Whether a row of the worker's ends early; 0 until all have met behind `look`. In shared memory, since a register
    more in the loops over tiles is one too many with 64 heads."""
    return storage.is_short.get_tensor(cute.make_layout(1))


def is_short(storage: Any) -> Boolean:
    """The same; uniform, or what depends on it would be kept by each thread."""
    return cute.arch.make_warp_uniform(short_word(storage)[0]) > 0


@cute.jit
def meet(storage: cutlass.Constexpr, found: Boolean) -> Boolean:
    """Waits until all have looked; whether any found a short row."""
    word = cute.arch.make_warp_uniform(Int32(named_any(Barrier.LOOKED, THREADS, found)))
    short_word(storage)[0] = word
    return word > 0


@cute.jit
def look_beside_sinks(
    split: Split, inputs: cutlass.Constexpr, storage: cutlass.Constexpr, walk: cutlass.Constexpr, token: Int32,
    thread: Int32, first_row: Int32, geometry: cutlass.Constexpr,
):  # fmt: skip
    """`look` and `meet`, while the sinks of the tile's heads are on their way into shared memory."""
    head = cutlass.min(first_row + cutlass.min(thread, geometry.n - 1), geometry.h - 1)
    logit = inputs.sink[head]
    warp = cute.arch.make_warp_uniform(thread // 32)
    meet(storage, look(split, inputs.caches, storage, walk, token, warp, geometry))
    if thread < geometry.n:
        storage.sinks.data_ptr()[thread] = logit * math.log2(math.e)


@cute.jit
def next_place(
    place: Progress, storage: cutlass.Constexpr, walk: cutlass.Constexpr, geometry: cutlass.Constexpr
) -> Progress:
    """The place of the tile behind one, perhaps of the worker's next split with tiles; by a whole warp."""
    split, tile, end, asks = place
    tile = tile + 1
    searching = walk.has_work(split) & (tile >= end)
    if cutlass.const_expr(geometry.as_long):
        if searching:  # its next split has tiles, or there is none
            split = walk.next_split(split)
            tile, end, _ = walk.tiles_of(split)
            if cutlass.const_expr(geometry.shortens):
                if is_short(storage) & walk.has_work(split):
                    tile, end = span_of(split, storage)
            asks = cutlass.max(cutlass.min(tile + geometry.stages - 3, end - 1), tile)
    else:
        while searching:
            split = walk.next_split(split)
            tile, end, _ = walk.tiles_of(split)
            asks = cutlass.max(cutlass.min(tile + geometry.stages - 3, end - 1), tile)
            searching = walk.has_work(split) & (tile >= end)
    return Progress(split, tile, end, asks)


def page_address(cache: Cache, index: Int32) -> Int64:
    """Where the page of a cached token begins."""
    tokens = cache.tokens
    return tokens.iterator.toint() + Int64(index // cache.page) * tokens.stride[0]


def row_address(cache: Cache, index: Int32, geometry: Geometry) -> Int64:
    """Where a cached token's row begins."""
    return page_address(cache, index) + index % cache.page * geometry.row_bytes


def scale_address(cache: Cache, index: Int32, geometry: Geometry) -> Int64:
    """Where a cached token's scales begin in v4: behind the rows of its page."""
    page, each = cache.tokens.shape[1], geometry.cache.scales + geometry.cache.padding
    return page_address(cache, index) + page * geometry.row_bytes + index % cache.page * each


def codes_address(cache: Cache, index: Int32, layout: Any) -> Int64:
    """Where a cached token's codes begin in a layout of V4.1."""
    each = layout.code_bytes if layout.planar else layout.token_bytes
    return page_address(cache, index) + index % cache.page * each


def scales_address(cache: Cache, index: Int32, layout: Any) -> Int64:
    """Where its scales do in a planar one: behind the codes of its page."""
    page = cache.tokens.shape[1]
    return page_address(cache, index) + page * layout.code_bytes + index % cache.page * layout.scales


def of_either(found: Row, of_main: Any, of_extra: Any, geometry: Geometry) -> Any:
    """What holds of a row of the cache, or of one of an extra cache of another layout."""
    return cutlass.select_(found.is_extra, of_extra, of_main) if geometry.fp4 else of_main


def token_bytes(found: Row, geometry: Geometry) -> Any:
    """Of a row, copied."""
    if not geometry.fine:
        return geometry.row_bytes
    return of_either(found, Int32(geometry.cache.token_bytes), Int32(geometry.extra.token_bytes), geometry)


def of_cache(caches: Any, found: Row, address: Any, geometry: Geometry) -> Int64:
    """`address` of a row in the one cache or the other; where no token is named, that of the first one's token 0."""
    at = [address(cache, cutlass.max(found.index, 0), geometry) for cache in caches]
    return at[0] if len(at) == 1 else cutlass.select_(found.is_extra, at[1], at[0])


@cute.jit
def copy_row(
    caches: cutlass.Constexpr, found: Row, storage: cutlass.Constexpr, stage: Int32, row: Int32,
    geometry: cutlass.Constexpr,
):  # fmt: skip
    """Starts copying a cached token's row into a tile."""
    full = (storage.full.data_ptr() + stage).toint()
    if cutlass.const_expr(geometry.fine):
        target = (storage.rows.data_ptr() + (stage * TOKENS + row) * geometry.stride).toint()
        copy_fine_row(caches, found, target, full, geometry)
    else:
        source = of_cache(caches, found, row_address, geometry)
        target = (storage.rows.data_ptr() + (stage * TOKENS + row) * geometry.stride).toint()
        if cutlass.const_expr(geometry.ctas > 1):
            copy_to_both(target, source, Int32(geometry.row_bytes), full)
        else:
            copy_bytes(target, source, Int32(geometry.row_bytes), full)
    if cutlass.const_expr(geometry.layout == "v4"):
        source = of_cache(caches, found, scale_address, geometry)
        target = (storage.scales.data_ptr() + (stage * TOKENS + row)).toint()
        cute.arch.inline_ptx("cp.async.ca.shared.global [{$r0}], [{$r1}], 8;", read_only_args=[target, source])


def copy_bytes(target: Int32, source: Int64, size: Int32, full: Int32) -> None:
    """Starts a bulk copy from global into shared memory, which the mbarrier `full` counts by its bytes. All addresses
    but that one, and the size, are multiples of 16."""
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[target, source, size, full],
    )


def copy_to_both(target: Int32, source: Int64, size: Int32, full: Int32) -> None:
    """The same into both CTAs of a cluster, at one place of their shared memory each, where each one's mbarrier counts
    the bytes."""
    cute.arch.inline_ptx(
        "{ .reg .b16 both; mov.b16 both, 3; cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [{$r0}], [{$r1}], {$r2}, [{$r3}], both; }",
        read_only_args=[target, source, size, full],
    )


def copy_fine_row(caches: Any, found: Row, target: Int32, full: Int32, geometry: Geometry) -> None:
    """The same of a layout of V4.1: codes end and scales begin at byte 512 of a row, whatever their bits are."""
    layouts, index = (geometry.cache, geometry.extra), cutlass.max(found.index, 0)

    def of_row(address: Any) -> Any:
        at = [address(cache, index, layout) for cache, layout in zip(caches, layouts, strict=False)]
        return at[0] if len(at) == 1 else cutlass.select_(found.is_extra, at[1], at[0])

    def size(layout: Any) -> Int32:
        return Int32(layout.code_bytes if layout.planar else layout.token_bytes)

    begin = of_either(found, Int32(0), Int32(VALUES - geometry.extra.code_bytes), geometry)
    copy_bytes(target + begin, of_row(codes_address), of_either(found, *map(size, layouts), geometry), full)
    if geometry.cache.planar:
        scales = of_either(found, *(Int32(layout.scales) for layout in layouts), geometry)
        copy_bytes(target + VALUES, of_row(scales_address), scales, full)


@cute.jit
def clear_row(storage: cutlass.Constexpr, stage: Int32, row: Int32, geometry: cutlass.Constexpr):
    """Stores zeros in place of a row that no index names, by the row's two lanes; in layout v4 in place of its scales
    as well. Nothing is read: a row of zeros in global memory would be one that all CTAs copy at once, and requests for
    one line of L2 queue up. A later bulk copy writes into the row through another proxy, so the caller has to put a
    fence between the two (`fence_view_async_shared`). Both lanes of the row call it."""
    side, chunks = cute.arch.lane_idx() % 2, geometry.row_bytes // 16
    # The second lane begins an odd multiple of 64 bytes behind the first one, at most half a row: so what eight lanes
    # store together lies in different banks.
    apart = (8 * chunks - 64) // 128 * 128 + 64
    target = (storage.rows.data_ptr() + (stage * TOKENS + row) * geometry.stride).toint() + side * apart
    for chunk in cutlass.range(chunks - apart // 16, unroll=4):
        cute.arch.inline_ptx(
            "st.shared.v4.b32 [{$r0}], {{$r1}, {$r1}, {$r1}, {$r1}};", read_only_args=[target + 16 * chunk, Int32(0)]
        )
    if cutlass.const_expr(geometry.layout == "v4"):
        target = (storage.scales.data_ptr() + (stage * TOKENS + row)).toint() + 4 * side
        cute.arch.inline_ptx("st.shared.b32 [{$r0}], {$r1};", read_only_args=[target, Int32(0)])


class Inputs(NamedTuple):
    """What the kernel reads, in global memory."""

    tma: cute.CopyAtom  # a query tile's columns of a panel
    q: cute.Tensor  # TMA tensor (h, columns, s, b), bf16
    caches: tuple[Cache, ...]  # the cache, and perhaps the extra one
    lengths: cute.Tensor  # (b,) int32: 64 for each tile of a request's indices
    sink: cute.Tensor | None  # (h,) fp32: a logit more in a head's softmax
    flat: cute.Tensor | None  # (1,) fp32: the cache's scale


@cute.jit
def load(
    inputs: Inputs,
    storage: cutlass.Constexpr,
    walk: cutlass.Constexpr,  # `Walk`
    split: Split,
    token: Int32,  # of the request's query tokens
    row_tile: Int32,  # of the query token's
    warp: Int32,  # 0..PRODUCERS-1
    geometry: cutlass.Constexpr,
):
    """What a producer warp does, over all splits of the worker: 16 rows of every tile, and one of them the queries.
    Indices are read two tiles ahead. Rows are not brought into L2 ahead of their copies: L2 would be asked for each
    twice, and fetch whole lines of rows that end within one."""
    tma, q, caches = inputs[:3]
    row = producer_row(warp)
    full, empty = storage.full.data_ptr(), storage.empty.data_ptr()
    valid = storage.valid.get_tensor(cute.make_layout((PRODUCERS, geometry.stages)))
    # Here and not in a function of its own: with the first loads in one, called ahead of this, calls in layout v4 took
    # 3 to 6 % longer, though the loop below has the same instructions.
    tile, end, _ = walk.tiles_of(split)
    place = Progress(split, tile, end, Int32(-1))
    if cutlass.const_expr(not geometry.as_long):
        if walk.has_work(split) & (tile >= end):
            place = next_place(place, storage, walk, geometry)
    place = Progress(place.split, place.tile, place.end, Int32(-1))  # its query is loaded at once
    if (warp == 0) & walk.has_work(place.split):
        load_query(tma, q, storage, place.split.request, token, row_tile, geometry)
    first = named(read_row(caches, place, token, row, geometry), caches, row, geometry)
    place = next_place(place, storage, walk, geometry)
    second = read_row(caches, place, token, row, geometry)
    has_looked = Boolean(False)
    stage, phase, parity = Int32(0), Int32(0), Int32(0)
    blank = Int32(0)  # a bit a stage: whether this lane's row holds zeros already
    spare = Int32(-1)  # what this lane copied for the tile before, where P lies in the tile's rows
    while first.there:
        cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
        votes = Int32(cute.arch.vote_ballot_sync(first.index >= 0))
        index, of_stage = first.index, Int32(1) << stage
        if cutlass.const_expr(geometry.zeroes_some):
            index = start_rows(caches, first, storage, stage, row, warp, votes, (blank & of_stage) != 0, geometry)
            blank = cutlass.select_(index < 0, blank | of_stage, blank & ~of_stage)
        else:
            if votes != -1:
                index = filled_index(first.index, votes, spare)
                if not cute.arch.vote_any_sync(index >= 0):
                    if (blank & of_stage) == 0:
                        clear_row(storage, stage, row, geometry)
                        # Ahead of copies into these rows, a round of the stages later, which may be the other CTA's.
                        cute.arch.fence_view_async_shared()
                    cute.arch.sync_warp()
            with cute.arch.elect_one():
                valid[warp, stage] = named_word(votes, first, geometry)
                copied = cutlass.select_(index >= 0, Int32(ROWS * token_bytes(first, geometry)), Int32(0))
                cute.arch.mbarrier_arrive_and_expect_tx(full + stage, copied)
            if copies(row_tile, geometry) & (index >= 0):
                copy_row(caches, first._replace(index=index), storage, stage, row, geometry)
            if cutlass.const_expr(not geometry.p_in_rows):
                blank = cutlass.select_(votes == 0, blank | of_stage, blank & ~of_stage)
        if cutlass.const_expr(geometry.layout == "v4"):
            cute.arch.cp_async_mbarrier_arrive_noinc(full + stage)
        stage, phase = stage_at(stage, phase, 1, geometry.stages)
        if (warp == 0) & first.asks:
            cute.arch.mbarrier_wait(storage.query_empty.data_ptr(), parity)
            parity = parity ^ 1
            load_query(tma, q, storage, first.request, token, row_tile, geometry)
        if cutlass.const_expr(geometry.shortens):
            if not has_looked:
                has_looked = Boolean(True)
                if meet(storage, Boolean(False)):
                    place = begin_again(storage, walk, geometry)
                    second = read_row(caches, place, token, row, geometry)
        # Behind the copies, so that these wait for no index; the one read here is used a tile later.
        if cutlass.const_expr(geometry.p_in_rows):
            keeps = second.request == first.request
            if cutlass.const_expr(geometry.extra_page != 0):
                keeps = keeps & (second.is_extra == first.is_extra)
            spare = cutlass.select_(keeps, index, Int32(-1))
        first = named(second, caches, row, geometry)
        place = next_place(place, storage, walk, geometry)
        second = read_row(caches, place, token, row, geometry)
    if cutlass.const_expr(geometry.shortens):
        if not has_looked:
            meet(storage, Boolean(False))


@cute.jit
def start_rows(
    caches: cutlass.Constexpr, first: Row, storage: cutlass.Constexpr, stage: Int32, row: Int32, warp: Int32,
    votes: Int32, is_blank: Boolean, geometry: cutlass.Constexpr,
) -> Int32:  # fmt: skip
    """Starts the copies of a producer warp's 16 rows of a tile where some rows are zeroed (`Geometry.zeroes_some`), and
    zeroes the others, unless they hold zeros already. Then one lane arrives at the stage's mbarrier `full` for the
    warp, which adds the bytes of the rows that are copied to those that the mbarrier waits for. Returns the cached
    token whose row is copied into this lane's row, -1 where that is zeroed. votes: a bit for each lane, whether its
    index names a token. is_blank: whether this lane's row holds zeros already."""
    full, index, copying = storage.full.data_ptr() + stage, first.index, Int32(-1)
    if votes != -1:
        if cute.arch.popc(votes) >= 2 * LEAST_NAMED:
            index = filled_index(first.index, votes, Int32(-1))
        copying = Int32(cute.arch.vote_ballot_sync(index >= 0))
    if copies(Int32(0), geometry) & (index >= 0):
        copy_row(caches, first._replace(index=index), storage, stage, row, geometry)
    if copying != -1:
        # Behind the copies, whose way is longer.
        if (index < 0) & ~is_blank:
            clear_row(storage, stage, row, geometry)
        # Ahead of copies into these rows, a round of the stages later.
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
    valid = storage.valid.get_tensor(cute.make_layout((PRODUCERS, geometry.stages)))
    with cute.arch.elect_one():
        valid[warp, stage] = named_word(votes, first, geometry)
        copied = Int32(cute.arch.popc(copying)) // 2 * token_bytes(first, geometry)
        cute.arch.mbarrier_arrive_and_expect_tx(full, copied)
    return index


@cute.jit
def begin_again(storage: cutlass.Constexpr, walk: cutlass.Constexpr, geometry: cutlass.Constexpr) -> Progress:
    """The place of a producer's second tile where rows are short: behind the first one, or where its first tile should
    have been; then consumers pass over that (`consume`)."""
    split = scheduler.filled_split(walk.worker, walk.seq_lens.shape[0], walk.pool)
    tile, _, _ = walk.tiles_of(split)
    first, end = span_of(split, storage)
    place = Progress(split, first, end, Int32(-1))
    if first == tile:
        place = next_place(place, storage, walk, geometry)
    return place


def named_word(votes: Int32, found: Row, geometry: Geometry) -> Int32:
    """What consumers read of 16 rows. votes: two bits a row, whether its index names a token. Where caches differ in
    their codes, every other bit says which cache the tile is of: the word is negative for e2m1."""
    return of_either(found, votes & 0x55555555, votes | -0x55555556, geometry) if geometry.fp4 else votes


def copies(row_tile: Int32, geometry: Geometry) -> Boolean:
    """Whether this lane starts its row's copy: one of the row's two lanes, and of every other row in a cluster.
    row_tile: the query tile's number among those of its query token, even in one CTA of a cluster and odd in the
    other."""
    if geometry.ctas > 1:
        return cute.arch.lane_idx() % 4 == 2 * (row_tile % 2)
    return cute.arch.lane_idx() % 2 == 0


def filled_index(index: Int32, votes: Int32, spare: Int32) -> Int32:
    """The cached token whose row is copied into this lane's row of the tile. All lanes of the warp have to call it. A
    row has two lanes, with the same index, of which one starts the copy (`copies`). The result is `index` if that names
    a token, which it does where it is not negative. Else it is the index of the nearest lane with a lower number that
    names one; if no lower one does, that of the highest lane that does; if no lane does, `spare`. votes: a bit for each
    lane, whether its index names a token. spare: -1, or with P in the rows what this lane copied for the tile
    before."""
    below = votes & Int32(cute.arch.lanemask_le())
    source = Int32(cute.arch.bfind(Uint32(cutlass.select_(below != 0, below, votes))))
    found = Int32(cute.arch.shuffle_sync(index, source))
    return cutlass.select_(votes == 0, spare, found)


def producer_row(warp: Int32) -> Int32:
    """A lane's row of a tile. warp: 0..PRODUCERS-1."""
    return warp * ROWS + cute.arch.lane_idx() // 2


# ------------------------------------------------------------------------------------------------ device: the query
def query_tile(storage: Any, geometry: Geometry) -> cute.Tensor:
    """Q in shared memory as it is loaded: (n, columns of all panels), bf16, swizzled as the products read it."""
    layout = wgmma.k_major_layout(BFloat16, (geometry.n, PANEL * geometry.panels))
    return wgmma.smem_view(cute.recast_ptr(storage.query.data_ptr(), dtype=BFloat16), 0, layout)


@cute.jit
def load_query(
    tma: cute.CopyAtom,
    q: cute.Tensor,  # TMA tensor (h, columns, s, b)
    storage: cutlass.Constexpr,
    request: Int32,
    token: Int32,  # of the request's query tokens
    row_tile: Int32,  # of the query token's
    geometry: cutlass.Constexpr,
):
    """A warp's: starts the load of a query tile. Rows behind the last head are zeros."""
    full = storage.query_full.data_ptr()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, 2 * geometry.n * PANEL * geometry.panels)
    boxes, places = paged.boxes_of(tma, q[None, None, token, None], query_tile(storage, geometry), geometry.n)
    for panel in cutlass.range(geometry.panels, unroll=1):
        paged.load_box(tma, boxes[None, row_tile, panel, request], places[None, 0, panel], full)


@cute.jit
def widen_query(storage: cutlass.Constexpr, thread: Int32, geometry: cutlass.Constexpr) -> Float32:
    """Makes a query tile what the products read, in place: columns that keys have as codes in fp16, in the order of
    `key_words`, others in bf16, all divided by a power of two, which is returned: that of the largest number among
    them, since a head that is inf or NaN must not take all others' columns below what fp16 holds. By both consumers,
    who wait for each other in it."""
    items = geometry.n * geometry.panels * (PANEL // MMA_K)
    words, found = cute.make_rmem_tensor((4, 2), Int32), cute.make_rmem_tensor((4, 2), Int32)
    most = Int32(0)  # two magnitudes' bits and 0x80 more, with which those of inf and NaN are negative
    for item in cutlass.range(thread, items, CONSUMER_THREADS, unroll=2):
        copy_slice(storage, item, words, False, geometry)
        for j in cutlass.range_constexpr(8):
            most = cute.arch.inline_ptx(
                "max.s16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Int32],
                read_only_args=[most, (words[j] & 0x7FFF7FFF) + 0x00800080],
            )  # fmt: skip
    most = cutlass.max(most & 0xFFFF, (most >> 16) & 0xFFFF)
    most = Int32(cute.arch.warp_redux_sync(most, kind="max"))
    largest = storage.largest.get_tensor(cute.make_layout(CONSUMERS * WARPS))
    largest[thread // 32] = most
    named_sync(Barrier.CONSUMERS, CONSUMER_THREADS)
    for i in cutlass.range_constexpr(CONSUMERS * WARPS):
        most = cutlass.max(most, largest[i])
    exponent = cutlass.max((most >> 7) - 128 - QUERY_EXPONENT, LEAST_EXPONENT)
    factor = partials.power_of_two(-exponent)
    pair = (127 - exponent) << 7
    pair = pair | (pair << 16)
    for item in cutlass.range(thread, items, CONSUMER_THREADS, unroll=2):
        copy_slice(storage, item, words, False, geometry)
        if item // geometry.n < geometry.code_panels * (PANEL // MMA_K):
            # Of 16 columns, the MMA's first eight are 0, 1, 4, 5, ..
            for j in cutlass.range_constexpr(8):
                found[j // 2, j % 2] = to_half(words[j], factor)
        else:
            for j in cutlass.range_constexpr(8):
                found[j] = times_bf16(words[j], pair)
        copy_slice(storage, item, found, True, geometry)
    return partials.power_of_two(exponent)


def copy_slice(storage: Any, item: Int32, words: cute.Tensor, stores: bool, geometry: Geometry) -> None:
    """16 columns of a row of Q, (4, 2) words, from or to shared memory; neighbouring items are neighbouring rows."""
    row, part = item % geometry.n, item // geometry.n
    base = storage.query.data_ptr() + cute.assume(part // 4 * (geometry.n * PANEL), divby=geometry.n * PANEL)
    for j in range(2):
        place = chunk_place(base, row, part % 4 * 2 + j)
        memory = cute.make_tensor(cute.recast_ptr(place, dtype=Int32), cute.make_layout(4))
        cute.autovec_copy(words[None, j], memory) if stores else cute.autovec_copy(memory, words[None, j])


def chunk_place(panel: cute.Pointer, row: Int32, chunk: Any) -> cute.Pointer:
    """Where 16 bytes of a panel's row lie: K-major with the 128-byte swizzle."""
    return (panel + cute.assume(row * PANEL + (chunk ^ (row % 8)) * 8, divby=8)).align(16)


# ------------------------------------------------------------------------------------------------ device: words
def to_half(word: Int32, factor: Float32) -> Int32:
    """Two bf16 times a factor, as two fp16."""
    text = "{ .reg .b32 x, y; .reg .f32 f, g; shl.b32 x, {$r0}, 16; and.b32 y, {$r0}, 0xffff0000; mov.b32 f, x; "
    text += "mov.b32 g, y; mul.f32 f, f, {$r1}; mul.f32 g, g, {$r1}; cvt.rn.f16x2.f32 {$w0}, g, f; }"
    return cute.arch.inline_ptx(text, write_only_types=[Int32], read_only_args=[word, factor])


def times_bf16(word: Int32, factors: Int32) -> Int32:
    """Two bf16 times two others."""
    return cute.arch.inline_ptx(
        "mul.rn.bf16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[word, factors]
    )


def times_half(word: Int32, factors: Int32) -> Int32:
    """Two fp16 times two others."""
    return cute.arch.inline_ptx(
        "mul.rn.f16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[word, factors]
    )


def half_pair(value: Float32) -> Int32:
    """A number in fp16, twice."""
    return cute.arch.inline_ptx(
        "cvt.rn.f16x2.f32 {$w0}, {$r0}, {$r0};", write_only_types=[Int32], read_only_args=[value]
    )


def permute(low: Int32, high: Int32, selector: int) -> Int32:
    """Four of the eight bytes of two words (PTX `prmt`)."""
    return cute.arch.inline_ptx(
        f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, {selector};", write_only_types=[Int32], read_only_args=[low, high]
    )


def select_bytes(low: Any, high: Any, selector: Int32) -> Int32:
    """`permute` by a selector that a register holds, in its lower half."""
    words = [Int32(low), Int32(high), selector]
    return cute.arch.inline_ptx("prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Int32], read_only_args=words)


def larger_halves(a: Int32, b: Int32) -> Int32:
    """The larger ones of two pairs of unsigned numbers of 16 bits."""
    return cute.arch.inline_ptx("max.u16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[a, b])


def largest_byte(words: list[Int32]) -> Int32:
    """Of the bytes of words, unsigned: in the upper byte of 16 bits the lower one does not decide."""
    upper, lower = words[0], words[0] << 8
    for word in words[1:]:
        upper, lower = larger_halves(upper, word), larger_halves(lower, word << 8)
    both = larger_halves(upper, lower)
    return cutlass.max((both >> 24) & 255, (both >> 8) & 255)


def e4m3_pair(word: Int32, half: int, factors: Int32) -> Int32:
    """Two of a word's four e4m3, the lower or upper ones, as two fp16 times two others."""
    text = "{ .reg .b16 c, d; .reg .b32 x; mov.b32 {c, d}, {$r0}; "
    text += f"cvt.rn.f16x2.e4m3x2 x, {'d' if half else 'c'}; mul.rn.f16x2 {{$w0}}, x, {{$r1}}; }}"
    return cute.arch.inline_ptx(text, write_only_types=[Int32], read_only_args=[word, factors])


def e4m3_of_e2m1(word: Int32) -> tuple[Int32, Int32]:
    """Eight e2m1 as eight e4m3 of 2^6 times their value, in order. The three bits of a magnitude select one of eight
    bytes; signs come from the word itself and, for even columns, from it four bits further left."""
    magnitudes, left = word & 0x77777777, word << 4
    found = []
    for half, order in enumerate((0x5140, 0x7362)):
        selector = magnitudes >> 16 if half else magnitudes
        signs = permute(left, word, order) & -0x7F7F7F80
        found.append(select_bytes(*E2M1_BYTES, selector) | signs)
    return found[0], found[1]


def widen(codes: Int32, factors: Int32 | None) -> tuple[Int32, Int32]:
    """Four codes as two words of two fp16, in order, times two factors (fp16; None: 1)."""
    text = "{ .reg .b16 c, d; .reg .b32 x, y; mov.b32 {c, d}, {$r0}; "
    if factors is None:
        text += "cvt.rn.f16x2.e4m3x2 {$w0}, c; cvt.rn.f16x2.e4m3x2 {$w1}, d; }"
        return cute.arch.inline_ptx(text, write_only_types=[Int32, Int32], read_only_args=[codes])
    text += "cvt.rn.f16x2.e4m3x2 x, c; cvt.rn.f16x2.e4m3x2 y, d; "
    text += "mul.rn.f16x2 {$w0}, x, {$r1}; mul.rn.f16x2 {$w1}, y, {$r1}; }"
    return cute.arch.inline_ptx(text, write_only_types=[Int32, Int32], read_only_args=[codes, factors])


def code_words(found: tuple[Int32, ...], words: cute.Tensor, factors: cute.Tensor | None) -> None:
    """(4, 2) words of an A operand from codes of two columns of a token, and of the next one: they become two tokens of
    a column, and of the next."""
    for m in range(4):
        block, b = m // 2, m % 2
        codes = permute(found[m], found[m], 0x3120)
        pair = None if factors is None else factors[m]
        words[2 * b, block], words[2 * b + 1, block] = widen(codes, pair)


def load_matrices(address: Int32, transposed: bool = False) -> tuple[Int32, ...]:
    """Four 8 x 8 matrices of 16-bit elements from shared memory, a word of each; a lane gives the address of a row."""
    text = f"ldmatrix.sync.aligned.m8n8.x4{'.trans' if transposed else ''}.shared.b16 "
    text += "{{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];"
    return cute.arch.inline_ptx(text, write_only_types=[Int32] * 4, read_only_args=[address])


def a_operand(words: cute.Tensor, dtype: type) -> cute.Tensor:
    """(4, k blocks) words as the A operand ((2, 2, 2), 1, k blocks) of an MMA."""
    blocks = words.shape[1]
    layout = cute.make_layout(((2, 2, 2), 1, blocks), stride=((1, 2, 4), 0, 8))
    return cute.make_tensor(cute.recast_ptr(words.iterator, dtype=dtype), layout)


@cute.jit
def issue(
    tiled_mma: cute.TiledMma,
    acc: cute.Tensor,  # registers, (MMA, 1, 1)
    frag_a: cute.Tensor,  # registers, (MMA, 1, BLOCKS)
    frag_b: cute.Tensor,  # descriptors, (MMA, 1, K)
    first_b: cutlass.Constexpr,
    zero_init: cutlass.Constexpr = False,
):
    """Issues acc (+)= A · B[first_b ..] and commits it; waits for nothing."""
    warpgroup.fence()
    atom = cute.make_mma_atom(tiled_mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, not zero_init)
    for i in cutlass.range_constexpr(BLOCKS):
        cute.gemm(atom, acc, frag_a[None, None, i], frag_b[None, None, first_b + i], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


# ------------------------------------------------------------------------------------------------ device: one consumer
class Registers(NamedTuple):
    """What a consumer's thread keeps of a split. The code of both consumers shares it."""

    acc_o: list[cute.Tensor]  # a (64, n) fp32 accumulator of each own panel of V
    row_sum: cute.Tensor  # (n / 4,) fp32: this thread's share of the sums of the own P


class Kept(NamedTuple):
    """Addresses in shared memory, in bytes, that a consumer's thread keeps in registers: of its part of stage 0."""

    keys: Int32  # `load_keys`
    values: Int32  # `load_values`, of the own panels
    scales: Int32  # of its first token in the scores (`scales_of`)
    valid: Int32  # the word of its warp's rows
    stores: Int32  # where it stores factors (`read_factors`),
    loads: Int32  # and where it loads them (`load_factors`)
    maxima: Int32  # of its warp, its columns'
    tokens: Int32  # `Consumer.tokens`
    lane: Int32

    @classmethod
    def make(cls, me: Int32, storage: Any, thread: Int32, geometry: Geometry) -> Kept:
        """thread: 0..255."""
        lane, warp = thread % 32, thread // 32 % WARPS
        tile, factors = storage.rows.data_ptr().toint(), storage.factors.data_ptr().toint()
        values = (
            tile + ((warp * 16 + lane % 16) * geometry.stride + lane // 16 * 16),
            tile + (lane * geometry.stride + me * (HALF_PANELS * PANEL) + warp * 16),
            tile + (wgmma.acc_row(thread % WARPGROUP, 0) * geometry.stride + geometry.cache.quantised),
            storage.valid.data_ptr().toint() + 4 * warp,
            factors + 2 * (lane // 8 * 16 + warp * 4 + lane // 4 % 2 + lane % 4 * TOKENS),
            factors + 2 * (me * geometry.own_groups * TOKENS + lane % 4 * 16),
            storage.maxima.data_ptr().toint() + 4 * ((me * WARPS + warp) * geometry.n + 2 * (lane % 4)),
            storage.tokens.data_ptr().toint() + 4 * (me * WARPS + warp),
            lane,
        )
        # Through a shuffle, of which each lane gets its own: else the compiler makes them of the thread's number again
        # for each tile.
        return cls(*(Int32(cute.arch.shuffle_sync(Int32(value), lane)) for value in values))


def shared_word(kind: Any, address: Any, align: int) -> cute.Pointer:
    """A pointer to an address in shared memory."""
    return cute.make_ptr(kind, address, cute.AddressSpace.smem, assumed_align=align)


@dataclass(frozen=True, eq=False)
class Consumer:
    """Views and registers of one consumer warpgroup. `me`: EVEN or ODD, the same in all threads of a warp: both run
    the same code, which is fetched once. thread: 0..127."""

    me: Any
    geometry: Geometry
    thread: Any
    scale_log2: Any  # of a score in fp32
    full: Any  # mbarriers, as in `shared_storage`
    empty: Any
    query_empty: Any
    rows: Any  # shared memory
    valid: Any  # (PRODUCERS, stages)
    factors: Any  # [stage][group][4][16]: in lane % 4, of its tokens of each k block
    scales: Any  # v4's
    exchange: Any  # of this consumer: (WARPS, n)
    maxima: Any  # of this warp: (n,), the running maximum of the columns,
    shared_max: Any  # (n,), and what was last published
    moves: Any  # (1,), shared memory: how often it was,
    seen: Any  # (1,), and when this consumer last looked
    mma_s: Any  # Sᵀ = K·Qᵀ in fp16,
    mma_plain: Any  # in bf16
    mma_o: Any  # Oᵀ += Vᵀ·P
    frag_q: Any  # descriptors: Q, (MMA, 1, 4 · panels);
    frag_plain: Any  # in bf16;
    frag_p: Any  # (MMA, 1, 4): of the own P (OWN) and the other one's (OTHER), the copy for each own group of V
    p_copy: Any
    p_targets: Any  # where the own copies go
    acc_s: Any  # (64, n) fp32 registers
    factors_of_sums: Any  # (2, groups): of the thread's two tokens, where sums are multiplied with them
    scaled: Any  # of the thread's two tokens: 2^e times scale_log2,
    exponents: Any  # e, or -inf where an index names none,
    weights: Any  # and 2^-e
    acc_o: Any  # a (64, n) fp32 accumulator of each own panel of V, which both consumers' code shares,
    row_sum: Any  # as this thread's share of the sums of the own P' · 2^-e
    tokens: Any  # (1,), shared memory: not 0 once rows of this warp's have named tokens
    kept: Any  # `Kept`, with P in the rows, else None

    @classmethod
    def make(cls, me, geometry, storage, thread, scale_log2, registers, kept) -> Consumer:
        """Views of a thread's part. registers: `Registers`. kept: `Kept`, or None."""
        n, query, p = geometry.n, storage.query.data_ptr(), storage.p.data_ptr()
        mma_s, mma_plain, mma_o = (
            wgmma.make_mma(dtype, n, a_in_registers=True) for dtype in (Float16, BFloat16, Float16)
        )
        scores, plain, output = (mma.get_slice(thread) for mma in (mma_s, mma_plain, mma_o))
        shape = (n, PANEL * geometry.panels)
        of_half = wgmma.smem_view(query, 0, wgmma.k_major_layout(Float16, shape))
        of_plain = wgmma.smem_view(cute.recast_ptr(query, dtype=BFloat16), 0, wgmma.k_major_layout(BFloat16, shape))
        p_layout = wgmma.k_major_layout(Float16, (n, TOKENS))
        # Stores a 64 x n accumulator with its 64 rows next to each other: as K-major n x 64.
        store = cute.make_copy_atom(cute.nvgpu.warp.StMatrix8x8x16bOp(True, 4 if n % 16 == 0 else 2), Float16)
        p_copy = cute.make_tiled_copy_C(store, mma_s).get_slice(thread)

        def place(maker, copy):
            return cute.assume((maker * geometry.copies + copy) * (n * TOKENS), divby=n * TOKENS)

        own = max(1, geometry.copies // CONSUMERS)  # copies that a consumer reads
        first = me * own if geometry.copies > 1 else 0
        reads = [[place(maker, first + i) for i in range(own)] for maker in (me, 1 - me)]
        targets = [
            wgmma.smem_view(p, place(me, i), wgmma.mn_major_layout(Float16, (TOKENS, n)))
            for i in range(geometry.copies)
        ]
        if geometry.p_in_rows:
            reads, targets = [[], []], []
        return cls(
            me=me,
            geometry=geometry,
            thread=thread,
            scale_log2=scale_log2,
            full=storage.full.data_ptr(),
            empty=storage.empty.data_ptr(),
            query_empty=storage.query_empty.data_ptr(),
            rows=storage.rows.data_ptr(),
            valid=storage.valid.get_tensor(cute.make_layout((PRODUCERS, geometry.stages))),
            factors=storage.factors.data_ptr(),
            scales=storage.scales.data_ptr(),
            exchange=storage.exchange.data_ptr() + cute.assume(me * (WARPS * n), divby=n),
            maxima=storage.maxima.data_ptr() + cute.assume((me * WARPS + thread // 32) * n, divby=n),
            shared_max=storage.row_max.data_ptr(),
            moves=storage.moves.get_tensor(cute.make_layout(1)),
            seen=cute.make_rmem_tensor(1, Int32),
            mma_s=mma_s,
            mma_plain=mma_plain,
            mma_o=mma_o,
            frag_q=mma_s.make_fragment_B(scores.partition_B(of_half)),
            frag_plain=mma_plain.make_fragment_B(plain.partition_B(of_plain)),
            frag_p=[
                [mma_o.make_fragment_B(output.partition_B(wgmma.smem_view(p, at, p_layout))) for at in of_maker]
                for of_maker in reads
            ],
            p_copy=p_copy,
            p_targets=[p_copy.partition_D(target) for target in targets],
            acc_s=cute.make_rmem_tensor(mma_s.partition_shape_C((TOKENS, n)), Float32),
            factors_of_sums=cute.make_rmem_tensor(cute.make_layout((2, max(1, geometry.groups))), Float32),
            scaled=cute.make_rmem_tensor(2, Float32),
            exponents=cute.make_rmem_tensor(2, Float32),
            weights=cute.make_rmem_tensor(2, Float32),
            acc_o=registers.acc_o,
            row_sum=registers.row_sum,
            kept=kept,
            tokens=cute.make_tensor(storage.tokens.data_ptr() + (me * WARPS + thread // 32), cute.make_layout(1)),
        )

    def tile_rows(self, stage: Int32) -> cute.Pointer:
        """Where a tile's rows begin."""
        return self.rows + cute.assume(stage * (TOKENS * self.geometry.stride), divby=16)

    def p_view(self, stage: Int32, tokens_first: bool) -> cute.Tensor:
        """P of a tile in its rows, (TOKENS, n), or (n, TOKENS), without a swizzle. A token's bf16 columns are a core
        matrix of 8 heads and 8 tokens. Those of 16 tokens lie in these tokens' rows, which the same warp has read."""
        geometry, row = self.geometry, self.geometry.stride // 2
        base = self.tile_rows(stage) + geometry.plain_start
        base = cute.recast_ptr(base.align(16), dtype=Float16)
        tokens, heads = ((8, 2, TOKENS // 16), (1, row, 16 * row)), ((8, geometry.n // 8), (8, 2 * row))
        modes = (tokens, heads) if tokens_first else (heads, tokens)
        return cute.make_tensor(base, cute.make_layout(tuple(m[0] for m in modes), stride=tuple(m[1] for m in modes)))

    def p_operands(self, maker: int, stage: Int32) -> list[Any]:
        """P of a tile as a B operand, each copy for an own group of V. maker: OWN or OTHER."""
        if not self.geometry.p_in_rows:
            found: list[Any] = self.frag_p[maker]
            return found
        view = self.p_view(stage, False)
        return [self.mma_o.make_fragment_B(self.mma_o.get_slice(self.thread).partition_B(view))]

    # -------------------------------------------------------------------------------------------- factors
    @cute.jit
    def note_tokens(self, names: Int32):
        """Notes whether one of the warp's rows of a tile names a token. In shared memory, since a register more in the
        loop over tiles is one too many with 64 heads."""
        tokens = self.tokens
        if cutlass.const_expr(self.kept is not None):
            tokens = cute.make_tensor(shared_word(Int32, self.kept.tokens, 4), cute.make_layout(1))
        if (names & 0x55555555) != 0:
            tokens[0] = Int32(1)

    def scales_of(self, stage: Int32, row: Int32, half: int) -> tuple[Int32, list[Float32]]:
        """(e, the factor of each group, times 2^-e) of a token; half: which of the thread's two it is."""
        geometry = self.geometry
        if geometry.float_scales:
            found = cute.make_rmem_tensor(geometry.cache.scales, Float32)
            place = self.tile_rows(stage) + cute.assume(row * geometry.stride + geometry.cache.quantised, divby=16)
            source = cute.recast_ptr(place.align(16), dtype=Float32)
            if self.kept is not None:
                source = self.kept.scales + (stage * TOKENS + 8 * half) * geometry.stride
                source = shared_word(Float32, source, 16)
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(geometry.cache.scales)), found)
            top = cute.math.absf(found[0])
            for g in range(1, geometry.cache.scales):
                top = cute.arch.fmax(top, cute.math.absf(found[g]))
            exponent = self.clamped((top.bitcast(Int32) >> 23) - 127)
            inverse = partials.power_of_two(-exponent)
            return exponent, [found[g] * inverse for g in range(geometry.cache.scales)]
        found = cute.make_rmem_tensor(2, Int32)
        place = cute.recast_ptr(self.scales + (stage * TOKENS + row), dtype=Int32)
        cute.autovec_copy(cute.make_tensor(place, cute.make_layout(2)), found)
        values = [(found[g // 4] >> (g % 4 * 8)) & 255 for g in range(geometry.cache.scales)]
        top = values[0]
        for value in values[1:]:
            top = cutlass.max(top, value)
        exponent = self.clamped(top - 127)
        # 2^(value - 127 - e): an exponent field of value - e, 0 or less where it is far below fp16's range.
        factors = [(cutlass.max(value - exponent, 0) << 23).bitcast(Float32) for value in values]
        return exponent, [*factors, partials.power_of_two(-exponent)]

    def clamped(self, exponent: Int32) -> Int32:
        return cutlass.min(cutlass.max(exponent, self.geometry.least_exponent), MOST_EXPONENT)

    @cute.jit
    def read_factors(self, stage: Int32, pairs: cute.Tensor, plain: cute.Tensor):
        """Of the thread's two tokens of an own tile: what scores and probabilities are multiplied with; pairs (2,
        groups): each factor in fp16, twice; plain (2,): 2^-e in bf16, twice. Where codes are multiplied with them, the
        factors go to shared memory too, for the products with V."""
        geometry = self.geometry
        lane, warp = self.thread % 32, self.thread // 32
        if cutlass.const_expr(self.kept is None):
            names = self.valid[warp, stage]
        else:
            lane, word = self.kept.lane, shared_word(Int32, self.kept.valid + 4 * PRODUCERS * stage, 4)
            names = cute.make_tensor(word, cute.make_layout(1))[0]
        self.note_tokens(names)
        for r in cutlass.range_constexpr(2):
            row = wgmma.acc_row(self.thread, r)
            self.scaled[r], self.weights[r] = self.scale_log2, Float32(1.0)
            exponent = Int32(0)
            if cutlass.const_expr(geometry.groups > 0):
                exponent, values = self.scales_of(stage, row, r)
                self.scaled[r] = self.scale_log2 * partials.power_of_two(exponent)
                self.weights[r] = partials.power_of_two(-exponent)
                word = (127 - exponent) << 7
                plain[r] = word | (word << 16)
                for g in cutlass.range_constexpr(geometry.groups):
                    if cutlass.const_expr(geometry.scales_sums):
                        self.factors_of_sums[r, g] = values[g]
                    else:
                        pairs[r, g] = half_pair(values[g])
            is_token = (names >> (lane // 4 * 2 + 16 * r)) & 1
            self.exponents[r] = Float32(cutlass.select_(is_token > 0, Float32(exponent), -Float32.inf))
        # Token 16 w + 8 r + a of the tile is in k block w; of the block's tokens, 2 i, 2 i + 1 and 8 behind are lane
        # i's. Each of the four lanes that have a token stores every fourth factor.
        base = self.factors + (stage * geometry.code_factors * TOKENS + lane // 8 * 16 + warp * 4 + lane // 4 % 2)
        for first in cutlass.range_constexpr(0, geometry.code_factors, 4):
            place = base + (first + lane % 4) * TOKENS
            if cutlass.const_expr(self.kept is not None):
                target = self.kept.stores + 2 * TOKENS * (geometry.code_factors * stage + first)
                place = shared_word(Float16, target, 2)
            for r in cutlass.range_constexpr(2):
                low = cutlass.select_(lane % 2 > 0, pairs[r, first + 1], pairs[r, first])
                high = cutlass.select_(lane % 2 > 0, pairs[r, first + 3], pairs[r, first + 2])
                halves = cute.make_rmem_tensor(1, Int32)
                halves[0] = cutlass.select_(lane % 4 > 1, high, low)
                cute.make_tensor(place + 2 * r, cute.make_layout(1))[0] = cute.recast_tensor(halves, Float16)[0]

    # -------------------------------------------------------------------------------------------- of V4.1
    @cute.jit
    def expand(self, stage: Int32):
        """Makes e4m3 codes of the e2m1 codes of the warp's 16 rows of an own tile, in place: 256 bytes become 512. Two
        lanes have a row and every other 16 bytes of it. All are read before any is written."""
        lane, warp = self.thread % 32, self.thread // 32
        row = self.tile_rows(stage).toint() + (warp * 16 + lane % 16) * self.geometry.stride + lane // 16 * 16
        words = cute.make_rmem_tensor((4, 8), Int32)
        for i in cutlass.range_constexpr(8):
            found = cute.arch.inline_ptx(
                "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", write_only_types=[Int32] * 4,
                read_only_args=[row + (VALUES // 2 + 32 * i)],
            )  # fmt: skip
            for j in cutlass.range_constexpr(4):
                words[j, i] = found[j]
        cute.arch.sync_warp()
        target = row + lane // 16 * 16
        for i in cutlass.range_constexpr(8):
            for j in cutlass.range_constexpr(0, 4, 2):
                made = (*e4m3_of_e2m1(words[j, i]), *e4m3_of_e2m1(words[j + 1, i]))
                cute.arch.inline_ptx(
                    "st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
                    read_only_args=[target + (64 * i + 8 * j), *made],
                )
        cute.arch.sync_warp()

    def scale_words(self, stage: Int32, row: Int32, layout: Any) -> list[Int32]:
        """The scales of a token, four in a word."""
        found = cute.make_rmem_tensor(layout.scales // 4, Int32)
        place = self.tile_rows(stage) + cute.assume(row * self.geometry.stride + VALUES, divby=16)
        source = cute.recast_ptr(place.align(16), dtype=Int32)
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout(layout.scales // 4)), found)
        return [found[i] for i in range(layout.scales // 4)]

    def power_factors(self, stage: Int32, names: Int32) -> Any:
        """Reads the ue8m0 scales of the thread's two tokens, and stores their factors for the products with V. Returns
        what gives the factors of half a panel: of the two tokens in its first k block, then in its second one."""
        geometry, lane, kept = self.geometry, self.thread % 32, []
        for r in range(2):
            found = self.scale_words(stage, wgmma.acc_row(self.thread, r), geometry.cache)
            top = largest_byte(found)
            exponent = self.clamped(top - (127 + LIFT))
            number = cutlass.select_(top == 255, Float32(math.nan), Float32(exponent))
            self.set_exponent(r, exponent, number, names)
            # 2^(scale - 127 - e) has this exponent field in fp16, 0 and so the number 0 where it is below 2^-14. Four
            # fields as bytes, which are the upper ones of fp16 but for the lowest bits: two at a time in 16 bits each.
            below = exponent + (127 - 15)
            below = below | (below << 16)
            fields = []
            for word in found:
                even = larger_halves(word & 0x00FF00FF, below) - below
                odd = larger_halves((word >> 8) & 0x00FF00FF, below) - below
                fields.append((even | (odd << 8)) << 2)
            kept.append(fields)
            each = geometry.groups // geometry.cache.scales
            for i, word in enumerate(fields):
                half = select_bytes(word, 0, lane % 4 * 16 + 4)
                for j in range(each):
                    self.store_factor(stage, r, (4 * i + lane % 4) * each + j, half)

        def of_half_panel(i: int) -> list[Int32]:
            selector = 0x0404 | i % 4 << 4 | i % 4 << 12
            return [permute(kept[r][i // 4], Int32(0), selector) for r in range(2)] * BLOCKS

        return of_half_panel

    def e4m3_factors(self, stage: Int32, names: Int32) -> Any:
        """The same of e4m3 scales, each of which has one k block's columns."""
        geometry, lane, kept = self.geometry, self.thread % 32, []
        for r in range(2):
            found = self.scale_words(stage, wgmma.acc_row(self.thread, r), geometry.extra)
            # The exponent field of the largest one, at least 1 as all subnormal numbers have it.
            field = cutlass.max(largest_byte([word & 0x7F7F7F7F for word in found]) >> 3, 1)
            exponent = field - (7 + LIFT_FP4)
            self.set_exponent(r, exponent, Float32(exponent), names)
            power = (15 - E2M1_EXPONENT - exponent) << 10  # 2^(-6 - e) in fp16
            power = power | (power << 16)
            kept.append((found, power))
            for i in range(0, len(found), 2):
                # A scale of one word, and of the next one.
                both = select_bytes(found[i], found[i + 1], lane % 4 * 17 + 0x40)
                both = e4m3_pair(both, 0, power)
                self.store_factor(stage, r, 4 * i + lane % 4, both)
                self.store_factor(stage, r, 4 * i + 4 + lane % 4, both >> 16)

        def of_half_panel(i: int) -> list[Int32]:
            both = [e4m3_pair(found[i // 2], i % 2, power) for found, power in kept]
            return [permute(pair, pair, order) for order in (0x1010, 0x3232) for pair in both]

        return of_half_panel

    def set_exponent(self, r: int, exponent: Int32, number: Float32, names: Int32) -> None:
        """Keeps e of one of the thread's two tokens; number: e, or NaN."""
        is_token = (names >> (self.thread % 32 // 4 * 2 + 16 * r)) & 1
        self.scaled[r] = self.scale_log2 * partials.power_of_two(exponent)
        self.weights[r] = partials.power_of_two(-exponent)
        self.exponents[r] = cutlass.select_(is_token > 0, number, Float32(-math.inf))

    def store_factor(self, stage: Int32, r: int, group: Int32, half: Int32) -> None:
        """Stores the factor of one of the thread's two tokens, in the lower half of a word, where `load_factors` reads
        it: as `read_factors` does."""
        geometry, lane, warp = self.geometry, self.thread % 32, self.thread // 32
        place = (stage * geometry.code_factors + group) * TOKENS + lane // 8 * 16 + warp * 4 + lane // 4 % 2 + 2 * r
        store_half((self.factors + place).toint(), half)

    def issue_fine(self, stage: Int32, names: Int32, layout: Any) -> None:
        """`issue_scores` of an own tile in a layout of V4.1, e2m1 codes expanded. names: `named_word`."""
        lane, parts = self.thread % 32, [(i // 2, i % 2) for i in range(2 * self.geometry.panels)]
        row = self.thread // 32 * 16 + lane % 16
        address = self.tile_rows(stage).toint() + (row * self.geometry.stride + lane // 16 * 16)
        found = [self.load_keys(address, *part) for part in parts[:AHEAD]]
        factors = self.e4m3_factors(stage, names) if layout.bits == 4 else self.power_factors(stage, names)
        for i in range(len(parts)):
            if i + AHEAD < len(parts):
                found.append(self.load_keys(address, *parts[i + AHEAD]))
            words, pairs = cute.make_rmem_tensor(cute.make_layout((4, BLOCKS)), Int32), factors(i)
            for m in range(4):
                words[m % 2, m // 2], words[2 + m % 2, m // 2] = widen(found[i][m], pairs[m])
            issue(self.mma_s, self.acc_s, a_operand(words, Float16), self.frag_q, 2 * i, i == 0)
            if i > 0:
                warpgroup.wait_group(1)
        warpgroup.wait_group(0)

    @cute.jit
    def fine_scores(self, stage: Int32):
        """acc_s = K·Qᵀ of an own tile, by the layout that it has."""
        geometry = self.geometry
        names = cute.arch.make_warp_uniform(self.valid[self.thread // 32, stage])
        self.note_tokens(names)
        if cutlass.const_expr(geometry.fp4):
            if names < 0:
                self.expand(stage)
                self.issue_fine(stage, names, geometry.extra)
            else:
                self.issue_fine(stage, names, geometry.cache)
        else:
            self.issue_fine(stage, names, geometry.cache)

    # -------------------------------------------------------------------------------------------- scores
    def load_keys(self, address: Int32, panel: int, half: int) -> tuple[Int32, ...]:
        """Half a panel's bytes. address: of the lane's row, and of 16 bytes in it."""
        geometry = self.geometry
        if panel < geometry.code_panels:
            return load_matrices(address + (panel * PANEL + 32 * half))
        start = geometry.plain_start + 2 * PANEL * (panel - geometry.code_panels) + 64 * half
        return (*load_matrices(address + start), *load_matrices(address + (start + 32)))

    def key_words(self, found: tuple[Int32, ...], panel: int, pairs: cute.Tensor, plain: cute.Tensor) -> cute.Tensor:
        """Half a panel as an A operand. Of codes a lane has four neighbouring columns of a token and k block, which the
        MMA takes for 2 i, 2 i + 1 and 8 behind: Q's columns lie that way too (`widen_query`). bf16 columns stay so."""
        geometry, words = self.geometry, cute.make_rmem_tensor(cute.make_layout((4, BLOCKS)), Int32)
        if panel >= geometry.code_panels:
            for i in range(8):
                words[i % 4, i // 4] = found[i] if geometry.scales_sums else times_bf16(found[i], plain[i % 2])
            return a_operand(words, BFloat16)
        for m in range(4):
            factors = pairs[m % 2, geometry.group(panel)] if geometry.code_factors else None
            block, r = m // 2, m % 2
            words[r, block], words[2 + r, block] = widen(found[m], factors)
        return a_operand(words, Float16)

    def add_group(self, sums: cute.Tensor, panel: int, first: bool) -> None:
        """acc_s (+)= the sums of a panel's group, times its factors."""
        columns, part = wgmma.as_columns(self.acc_s), wgmma.as_columns(sums)
        group = self.geometry.group(panel)
        for r in range(2):
            factor = self.factors_of_sums[r, group] if group < self.geometry.groups else self.weights[r]
            for c in range(self.geometry.n // 4):
                product = part[c, r] * factor
                columns[c, r] = product if first else columns[c, r] + product

    def issue_scores(self, stage: Int32, pairs: cute.Tensor, plain: cute.Tensor) -> None:
        """acc_s = K·Qᵀ of an own tile; all products have ended."""
        geometry, lane = self.geometry, self.thread % 32
        row = self.thread // 32 * 16 + lane % 16
        address = self.tile_rows(stage).toint() + (row * geometry.stride + lane // 16 * 16)
        if self.kept is not None:
            address = self.kept.keys + stage * (TOKENS * geometry.stride)
        parts = [(panel, half) for panel in range(geometry.panels) for half in range(2)]
        found = [self.load_keys(address, *part) for part in parts[:AHEAD]]
        self.read_factors(stage, pairs, plain)
        sums, ended = [self.acc_s], []  # ended: the groups' last panels
        if geometry.scales_sums:
            sums = [cute.make_rmem_tensor(self.acc_s.layout, Float32) for _ in range(2)]
        for i, (panel, half) in enumerate(parts):
            if i + AHEAD < len(parts):
                found.append(self.load_keys(address, *parts[i + AHEAD]))
            keys = self.key_words(found[i], panel, pairs, plain)
            is_plain = panel >= geometry.code_panels
            mma, frag = (self.mma_plain, self.frag_plain) if is_plain else (self.mma_s, self.frag_q)
            is_next = geometry.scales_sums and half == 0 and geometry.begins_group(panel)
            if is_next:
                ended.append(panel - 1)
            issue(mma, sums[len(ended) % len(sums)], keys, frag, 4 * panel + 2 * half, i == 0 or is_next)
            if i > 0:
                warpgroup.wait_group(1)
            if is_next:
                self.add_group(sums[(len(ended) - 1) % 2], panel - 1, len(ended) == 1)
        warpgroup.wait_group(0)
        if geometry.scales_sums:
            self.add_group(sums[len(ended) % 2], geometry.panels - 1, not ended)

    @cute.jit
    def scores(self, stage: Int32, phase: Int32):
        """Sᵀ = K·Qᵀ of an own tile, times the tokens' scales, plus their e: x."""
        geometry = self.geometry
        cute.arch.mbarrier_wait(self.full + stage, phase)
        if cutlass.const_expr(geometry.fine):
            self.fine_scores(stage)
        else:
            pairs = cute.make_rmem_tensor(cute.make_layout((2, max(1, geometry.groups))), Int32)
            plain = cute.make_rmem_tensor(2, Int32)
            self.issue_scores(stage, pairs, plain)
        columns = wgmma.as_columns(self.acc_s)
        for c in cutlass.range_constexpr(geometry.n // 4):
            for r in cutlass.range_constexpr(2):
                columns[c, r] = columns[c, r] * self.scaled[r] + self.exponents[r]

    # -------------------------------------------------------------------------------------------- softmax
    @cute.jit
    def read_max(self, row_max: cute.Tensor):
        """(n / 4,) registers: the running maximum of the thread's columns."""
        if cutlass.const_expr(self.kept is None):
            softmax.collect(row_max, self.maxima, 1, self.thread % 32, True)
        else:
            softmax.collect(row_max, shared_word(Float32, self.kept.maxima, 8), 1, Int32(0), True)

    @cute.jit
    def write_max(self, row_max: cute.Tensor):
        softmax.publish(row_max, self.maxima, self.thread % 32)
        cute.arch.sync_warp()

    def sync(self) -> None:
        """All warps of this consumer meet."""
        cute.arch.barrier(barrier_id=Barrier.EVEN + self.me, number_of_threads=WARPGROUP)

    def any_thread(self, holds: Boolean) -> Boolean:
        """`sync`, which returns whether `holds` in any thread."""
        text = "{ .reg .pred in, any; setp.ne.b32 in, {$r0}, 0; "
        text += f"barrier.cta.red.or.pred.aligned any, {{$r1}}, {WARPGROUP}, in; selp.b32 {{$w0}}, 1, 0, any; }}"
        found = cute.arch.inline_ptx(
            text, write_only_types=[Int32], read_only_args=[Int32(holds), Int32(Barrier.EVEN + self.me)]
        )
        return found != 0

    @cute.jit
    def exceeds(self, row_max: cute.Tensor) -> Boolean:
        """Whether the running maximum of any column has to move; the same in all warps, which meet here."""
        columns = wgmma.as_columns(self.acc_s)
        if cutlass.const_expr(self.geometry.p_in_rows):
            most = self.most_above(row_max)
        else:
            most = cute.arch.fmax(columns[0, 0], columns[0, 1]) - row_max[0]
            for c in cutlass.range_constexpr(1, self.geometry.n // 4):
                most = cute.arch.fmax(most, cute.arch.fmax(columns[c, 0], columns[c, 1]) - row_max[c])
        return self.any_thread(most > softmax.SLACK)

    def most_above(self, row_max: cute.Tensor) -> Any:
        """How far a score is above its column's maximum at most: by a tree, whose registers 64 heads do not have."""
        columns = wgmma.as_columns(self.acc_s)
        above = [cute.arch.fmax(columns[c, 0], columns[c, 1]) - row_max[c] for c in range(self.geometry.n // 4)]
        while len(above) > 1:
            pairs = [above[i : i + 2] for i in range(0, len(above), 2)]
            above = [cute.arch.fmax(*pair) if len(pair) > 1 else pair[0] for pair in pairs]
        return above[0]

    @cute.jit
    def move_max(self, row_max: cute.Tensor, is_first: Boolean):
        """Moves the maximum of the columns that need it, publishes it to the other consumer, and rescales. is_first:
        whether it is the split's first tile, in front of which outputs and sums are zeros."""
        columns = wgmma.as_columns(self.acc_s)
        n, count = self.geometry.n, self.geometry.n // 4
        lane, warp = self.thread % 32, self.thread // 32
        best = cute.make_rmem_tensor(count, Float32)
        for c in cutlass.range_constexpr(count):
            best[c] = cute.arch.fmax(columns[c, 0], columns[c, 1])
            for i in cutlass.range_constexpr(3):
                best[c] = cute.arch.fmax(best[c], cute.arch.shuffle_sync_bfly(best[c], offset=4 << i))
        softmax.publish(best, self.exchange + cute.assume(warp * n, divby=n), lane)
        self.sync()
        softmax.collect(best, self.exchange, WARPS, lane, True)
        for c in cutlass.range_constexpr(count):
            new = softmax.lazy_max(row_max[c], best[c])
            best[c] = softmax.exp2(row_max[c] - new)
            row_max[c] = new
        moves, seen = self.moves, self.seen
        seen[0] = seen[0] + 1
        if warp == 0:
            softmax.publish(row_max, self.shared_max, lane)
            moves[0] = seen[0]
        self.write_max(row_max)
        self.rescale(best, is_first)

    @cute.jit
    def follow_max(self, moves: Int32, is_first: Boolean):
        """Takes over the maximum that the other consumer has published, if it has moved. moves: how often it has.
        is_first: as of `move_max`."""
        seen = self.seen
        if moves != seen[0]:
            seen[0] = moves
            count = cutlass.const_expr(self.geometry.n // 4)
            theirs, mine = cute.make_rmem_tensor(count, Float32), cute.make_rmem_tensor(count, Float32)
            softmax.collect(theirs, self.shared_max, 1, self.thread % 32, True)
            self.read_max(mine)
            # As many barriers as the other one has passed in `move_max`: racecheck counts them (docs/debugging.md).
            self.sync()
            for c in cutlass.range_constexpr(count):
                mine[c] = softmax.exp2(mine[c] - theirs[c])
            self.write_max(theirs)
            self.rescale(mine, is_first)

    @cute.jit
    def rescale(self, factor: cute.Tensor, is_first: Boolean):
        """Multiplies outputs and sums with the columns' factors; with P in the rows not where they are zeros."""
        if cutlass.const_expr(self.geometry.p_in_rows):
            if not is_first:
                self.scale_results(factor)
        else:
            self.scale_results(factor)

    def scale_results(self, factor: cute.Tensor) -> None:
        for c in range(self.geometry.n // 4):
            self.row_sum[c] = self.row_sum[c] * factor[c]
        for i in range(HALF_PANELS):
            wgmma.scale_columns(self.acc_o[i], factor)

    # -------------------------------------------------------------------------------------------- values
    def value_parts(self) -> list[tuple[int, int]]:
        """(own panel, half of the tokens), in the order in which they are multiplied."""
        return [(panel, half) for half in range(2) for panel in range(HALF_PANELS)]

    def load_values(self, stage: Int32, panel: int, half: int) -> tuple[Int32, ...]:
        """The bytes of 32 tokens in an own panel. Warp w has columns 16 w .. 16 w + 15: of codes a lane has two
        neighbouring ones, of bf16 two that are eight apart."""
        geometry, lane, warp = self.geometry, self.thread % 32, self.thread // 32
        tile = self.tile_rows(stage).toint() + 32 * half * geometry.stride
        address = tile + (lane * geometry.stride + (self.me * HALF_PANELS + panel) * PANEL + warp * 16)
        if self.kept is not None:
            far = 32 * half * geometry.stride + panel * PANEL
            address = self.kept.values + stage * (TOKENS * geometry.stride) + far
        if not geometry.is_mixed(panel):
            return load_matrices(address, transposed=True)
        # Four matrices of eight tokens and columns, for each of two k blocks; of codes only the first four are there.
        row, column = lane // 16 * 8 + lane % 8, geometry.plain_start + warp * 32 + lane // 8 % 2 * 16
        plain = tile + (row * geometry.stride + column)
        first = load_matrices(cutlass.select_(self.me > 0, plain, address), transposed=True)
        return (*first, *load_matrices(plain + MMA_K * geometry.stride, transposed=True))

    def load_factors(self, stage: Int32, panel: int, half: int) -> cute.Tensor | None:
        """(4,) words, of two tokens each: what 32 tokens' columns of an own panel are multiplied with."""
        geometry = self.geometry
        if not geometry.code_factors:
            return None
        factors = cute.make_rmem_tensor(4, Int32)
        group = self.me * geometry.own_groups + geometry.own_group(panel)
        if geometry.fine:  # the warp's 16 columns of the panel are one scale's
            group = group + self.thread // 32 * (geometry.groups // geometry.panels) // WARPS
        token = (stage * geometry.code_factors + group) * TOKENS + self.thread % 4 * 16 + 8 * half
        source = cute.recast_ptr((self.factors + cute.assume(token, divby=8)).align(16), dtype=Int32)
        if self.kept is not None:
            place = TOKENS * (geometry.code_factors * stage + geometry.own_group(panel)) + 8 * half
            source = shared_word(Int32, self.kept.loads + 2 * place, 16)
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout(4)), factors)
        return factors

    def value_words(self, found: tuple[Int32, ...], panel: int, factors: cute.Tensor | None) -> cute.Tensor:
        """32 tokens of an own panel, transposed, as an A operand: as rows a and a + 8 a lane's two columns."""
        words = cute.make_rmem_tensor(cute.make_layout((4, BLOCKS)), Int32)
        if self.geometry.is_mixed(panel):
            self.mixed_words(found, words, factors)
        else:
            code_words(found, words, factors)
        return a_operand(words, Float16)

    @cute.jit
    def mixed_words(self, found: cutlass.Constexpr, words: cute.Tensor, factors: cutlass.Constexpr):
        """The words of a panel that is codes in EVEN, and bf16 in ODD."""
        if self.me > 0:
            for i in cutlass.range_constexpr(8):
                word = to_half(found[i], Float32(1.0))
                if cutlass.const_expr(factors is not None):
                    word = times_half(word, factors[i // 2])
                words[i] = word
        else:
            code_words(found, words, factors)

    def begin_values(self, stage: Int32) -> list[Any]:
        """Loads the bytes that `multiply` begins with."""
        return [self.load_values(stage, *part) for part in self.value_parts()[:AHEAD]]

    def begin_factors(self, stage: Int32) -> list[Any]:
        """Loads the factors of these; who makes the tile's P has stored them."""
        found: list[Any] = []
        for _ in range(AHEAD):
            found.append(self.next_factors(stage, found))
        return found

    def next_factors(self, stage: Int32, found: list[Any]) -> cute.Tensor | None:
        """The factors of the part behind those found: the same as of one before it, or loaded."""
        parts, group = self.value_parts(), self.geometry.own_group
        panel, half = parts[len(found)]
        for (other, of_half), factors in zip(parts, found, strict=False):
            if of_half == half and group(other) == group(panel):
                return factors
        return self.load_factors(stage, panel, half)

    @cute.jit
    def free(self, stage: Int32, is_last: Boolean):
        """Gives a tile back to the producers, in a cluster to those of both CTAs; a split's last one, where results go
        through its rows, behind these."""
        if cutlass.const_expr(self.geometry.p_in_rows):
            if not is_last:
                warp_arrive(self.empty + stage, self.geometry.ctas)
        else:
            warp_arrive(self.empty + stage, self.geometry.ctas)

    def multiply(
        self, maker: int, stage: Int32, found: list[Any], factors: list[Any], is_last: Boolean, begun: Any = None
    ) -> None:
        """Oᵀ += Vᵀ·P of this consumer's panels, with the P of OWN or OTHER; frees the tile. found, factors: of
        `begin_values` and `begin_factors`. is_last: whether it is the split's last tile. begun: the first half panel's
        operand, where there is one already."""
        parts, geometry, p = self.value_parts(), self.geometry, self.p_operands(maker, stage)
        for i, (panel, half) in enumerate(parts):
            if i + AHEAD < len(parts):
                found.append(self.load_values(stage, *parts[i + AHEAD]))
                factors.append(self.next_factors(stage, factors))
            values = begun if i == 0 and begun is not None else self.value_words(found[i], panel, factors[i])
            copy = geometry.own_group(panel) if geometry.scales_sums else 0
            issue(self.mma_o, self.acc_o[panel], values, p[copy], 2 * half)
            if i > 0:
                warpgroup.wait_group(1)
        if geometry.p_in_rows:
            warpgroup.wait_group(0)  # P lies in the tile
        self.free(stage, is_last)
        warpgroup.wait_group(0)

    # -------------------------------------------------------------------------------------------- tiles
    @cute.jit
    def own_tile(self, stage: Int32, is_first: Boolean, is_last: Boolean):
        """A tile whose x are in acc_s: softmax, P to both consumers, and this one's product. is_first, is_last: whether
        it is the split's first tile, and its last one."""
        geometry = self.geometry
        row_max = cute.make_rmem_tensor(geometry.n // 4, Float32)
        self.read_max(row_max)
        if self.exceeds(row_max):
            self.move_max(row_max, is_first)
        columns = wgmma.as_columns(self.acc_s)
        for c in cutlass.range_constexpr(geometry.n // 4):
            for r in cutlass.range_constexpr(2):
                columns[c, r] = softmax.exp2(columns[c, r] - row_max[c])
                self.row_sum[c] = self.row_sum[c] + columns[c, r] * self.weights[r]
        self.store_p(stage)
        cute.arch.fence_view_async_shared()
        found, factors = self.begin_values(stage), self.begin_factors(stage)
        # In this order: racecheck follows what was written to the other consumer where a barrier of all of its own
        # warps comes before the arrival, and reports it where none does (docs/debugging.md).
        self.sync()
        cute.arch.barrier_arrive(barrier_id=Barrier.P_EVEN + self.me, number_of_threads=CONSUMER_THREADS)
        self.multiply(OWN, stage, found, factors, is_last)

    def store_p(self, stage: Int32) -> None:
        """The own P, in acc_s, to shared memory: as it is, or for each group of values times its factor."""
        part, targets = self.acc_s, self.p_targets
        if self.geometry.p_in_rows:
            targets = [self.p_copy.partition_D(self.p_view(stage, True))]
        for i, target in enumerate(targets):
            if self.geometry.scales_sums:
                part = cute.make_rmem_tensor(self.acc_s.layout, Float32)
                columns, of_part = wgmma.as_columns(self.acc_s), wgmma.as_columns(part)
                for c in range(self.geometry.n // 4):
                    for r in range(2):
                        of_part[c, r] = columns[c, r] * self.factors_of_sums[r, i]
            cute.copy(self.p_copy, self.p_copy.retile(wgmma.to_dtype(part, Float16)), target)

    @cute.jit
    def other_tile(self, stage: Int32, phase: Int32, is_first: Boolean, is_last: Boolean):
        """This consumer's product with the V of a tile whose P the other one makes."""
        cute.arch.mbarrier_wait(self.full + stage, phase)
        # Who makes P has expanded e2m1 codes before.
        early = [] if self.geometry.fp4 else self.begin_values(stage)
        cute.arch.barrier(barrier_id=Barrier.P_ODD - self.me, number_of_threads=CONSUMER_THREADS)
        found = self.begin_values(stage) if self.geometry.fp4 else early
        factors, begun = self.begin_factors(stage), None
        moves = self.moves[0]
        if cutlass.const_expr(self.geometry.p_in_rows):
            # Ahead of the branch on what has just been read.
            begun = self.value_words(found[0], self.value_parts()[0][0], factors[0])
        self.follow_max(moves, is_first)
        self.multiply(OTHER, stage, found, factors, is_last, begun)

    @cute.jit
    def run(self, first: Int32, end: Int32, stage: Int32, phase: Int32):
        """Tiles first..end-1 of a split. (stage, phase): of the first one. All registers are what a row without keys
        has."""
        stages = self.geometry.stages
        row_max = cute.make_rmem_tensor(self.geometry.n // 4, Float32)
        row_max.fill(softmax.NO_KEY)
        moves, seen, tokens = self.moves, self.seen, self.tokens
        tokens[0] = Int32(0)
        self.write_max(row_max)
        seen[0] = Int32(0)
        # ODD reads it behind P0.
        if (self.me == EVEN) & (self.thread < 32):
            moves[0] = Int32(0)
        own, own_phase = stage_at(stage, phase, self.me, stages)
        for tile in cutlass.range(first + self.me, end + 1, CONSUMERS, unroll=1):
            # Ahead of the other one's P, so that its softmax runs under these products.
            if tile < end:
                self.scores(own, own_phase)
            # Behind its last scores, of which a consumer may have none, the query may be replaced.
            if (tile + CONSUMERS >= end) & ((tile < end) | (tile == first + 1)):
                warp_arrive(self.query_empty)
            if tile > first:
                self.other_tile(stage, phase, tile == first + 1, tile == end)
            if tile < end:
                self.own_tile(own, tile == first, tile == end - 1)
            stage, phase = stage_at(own, own_phase, 1, stages)
            own, own_phase = stage_at(stage, phase, 1, stages)
        # racecheck follows barriers of all only where each consumer has waited as often (docs/debugging.md). EVEN has,
        # once more, where a tile is left over: twice in its own, where ODD has waited for its P.
        if (self.me == ODD) & ((end - first) % 2 == 1):
            self.sync()


@dataclass(frozen=True, eq=False)
class Token:
    """Query token `token` of every request, as `split_kv.rows` has blocks of them; q, out and lse are those of b · s
    requests of one token."""

    token: Int32
    s: int

    def block(self, request: Int32) -> rows.Block:
        return rows.Block(request * self.s + self.token, 1, request)


# ------------------------------------------------------------------------------------------------ device: epilogue
class Factors(NamedTuple):
    """What scores and values are multiplied with. values: the scale of layout flat, else 1. scores: log2 e times those
    of the softmax and of layout flat."""

    values: Float32
    scores: Float32


@dataclass(frozen=True, eq=False)
class Head:
    """The softmax of one head at a split's end; thread `number` of each consumer holds that head's.

    A thread's accumulators have 16 of 64 heads. Worked out there, sums, reciprocal and log-sum-exp of a head would be
    worked out by 32 threads of each consumer, in code that is 16 times as long.
    """

    number: Any  # thread of the consumer
    maximum: Any  # (1,) registers
    sums: Any  # (CONSUMERS,) registers: each one's sums of P, over all tokens

    @classmethod
    def make(cls, thread: Int32) -> Head:
        return cls(thread % WARPGROUP, cute.make_rmem_tensor(1, Float32), cute.make_rmem_tensor(CONSUMERS, Float32))

    @cute.jit
    def collect(self, row_sum: cute.Tensor, storage: cutlass.Constexpr, thread: Int32, n: cutlass.Constexpr):
        """Adds up all threads' shares of the sums; row_sum is lost. The consumers meet here."""
        exchange, maxima = storage.exchange.data_ptr(), storage.maxima.data_ptr()
        publish_sums(row_sum, exchange + thread // 32 * n, thread % 32)
        named_sync(Barrier.CONSUMERS, CONSUMER_THREADS)
        if self.number < n:
            self.maximum[0] = maxima[self.number]
            for i in cutlass.range_constexpr(CONSUMERS):
                self.sums[i] = of_warps(exchange + i * (WARPS * n), self.number, n)

    @cute.jit
    def forget(self, acc_o: cutlass.Constexpr, storage: cutlass.Constexpr):
        """Where no index of the split names a token, makes results what a row without keys has. They are that already,
        but for queries that are not finite: times a row of zeros these give NaN, which no -inf takes away. Behind
        `collect`, in which the consumers meet."""
        tokens = storage.tokens.get_tensor(cute.make_layout(CONSUMERS * WARPS))
        found = tokens[0]
        for i in cutlass.range_constexpr(1, CONSUMERS * WARPS):
            found = found | tokens[i]
        if cute.arch.make_warp_uniform(found) == 0:
            for i in cutlass.range_constexpr(CONSUMERS):
                self.sums[i] = Float32(0.0)
            for i in cutlass.range_constexpr(HALF_PANELS):
                acc_o[i].fill(0.0)


def of_warps(exchange: cute.Pointer, head: Int32, n: int) -> Float32:
    """The sum of what the warps of a consumer have published of a head."""
    values = [exchange[i * n + head] for i in range(WARPS)]
    return (values[0] + values[1]) + (values[2] + values[3])


def publish_sums(values: cute.Tensor, exchange: cute.Pointer, lane: Int32) -> None:
    """`softmax.publish_sums`, which takes a power of two of columns, up to 32, of all columns."""
    first, size = 0, cute.size(values)
    while first < size:
        count = min(8, 1 << ((size - first).bit_length() - 1))
        part = cute.make_tensor(values.iterator + first, cute.make_layout(count))
        softmax.publish_sums(part, exchange + 4 * first, lane)
        first += count


def elements_of(thread: Int32, c: int, panel: int, in_order: Any, geometry: Geometry) -> list[Int32]:
    """16-bit elements, of a head's row, of a thread's two results in column c of a panel of its consumer's: they are
    two neighbouring columns, or of a bf16 panel two that are eight apart."""
    _, word = word_place(thread, c, panel, in_order)
    elements = [2 * word, 2 * word + 1]
    if geometry.is_mixed(panel):
        me, lane, warp = thread // WARPGROUP, thread % 32, thread // 32 % WARPS
        quad = (me * HALF_PANELS + panel) * 2 + warp // 2
        for i in range(2):
            pair = warp % 2 * 8 + 4 * i + lane // 8  # of the quad's 16
            within = cutlass.select_(in_order, pair, pair % 4 * 4 + pair // 4)
            plain = (quad * 16 + within) * 2 + lane // 4 % 2
            elements[i] = cutlass.select_(me > 0, plain, elements[i])
    return elements


def word_place(thread: Int32, c: int, panel: int, in_order: Any) -> tuple[Int32, Int32]:
    """(head of the query tile, word of its row) of a thread's two results in column c of a panel of its consumer's:
    neighbouring columns, which are rows a and a + 8 of the MMA, a = lane / 4. in_order: the row has its columns in
    order, else as `split_kv.partials` wants them: pairs of four blocks of eight beside each other."""
    me, lane, warp = thread // WARPGROUP, thread % 32, thread // 32 % WARPS
    a, quad = lane // 4, (me * HALF_PANELS + panel) * 2 + warp // 2
    within = cutlass.select_(in_order, warp % 2 * 8 + a, a % 4 * 4 + warp % 2 * 2 + a // 4)
    return wgmma.acc_column(lane, c), quad * 16 + within


@cute.jit
def add_partial(
    acc_o: cutlass.Constexpr,  # of this consumer
    found: cutlass.Constexpr,  # `Head`
    storage: cutlass.Constexpr,
    results: Results,
    tile: Int32,  # query tile of the request
    thread: Int32,  # 0..255
    geometry: cutlass.Constexpr,
    slot: Int32,
):
    """Adds a partial; behind a barrier of all consumers."""
    outputs, stats = results.outputs, results.stats
    n, count, layout = geometry.n, geometry.n // 4, geometry.partials
    me, lane = thread // WARPGROUP, thread % 32
    exchange = storage.exchange.data_ptr() + cute.assume(me * (WARPS * n), divby=n)
    if found.number < n:
        theirs_of = cute.make_rmem_tensor(partials.STATS, Float32)
        cute.autovec_copy(layout.stats(stats.iterator, layout.row(slot, tile, found.number)), theirs_of)
        top = cute.arch.fmax(found.maximum[0], cute.arch.fmax(theirs_of[0], theirs_of[2]))
        older = softmax.exp2(found.maximum[0] - top)
        found.maximum[0] = top
        for i in cutlass.range_constexpr(CONSUMERS):
            weight = softmax.exp2(theirs_of[2 * i] - top)
            found.sums[i] = found.sums[i] * older + theirs_of[2 * i + 1] * weight
            if me == i:
                exchange[n + found.number] = weight
        exchange[found.number] = older
    cute.arch.barrier(barrier_id=Barrier.EVEN + me, number_of_threads=WARPGROUP)
    mine, theirs = cute.make_rmem_tensor(count, Float32), cute.make_rmem_tensor(count, Float32)
    softmax.collect(mine, exchange, 1, lane, False)
    softmax.collect(theirs, exchange + n, 1, lane, False)
    for c in cutlass.range_constexpr(count):
        for i in cutlass.range_constexpr(HALF_PANELS):
            head, word = word_place(thread, c, i, Boolean(False))
            source = layout.outputs(outputs.iterator, layout.row(slot, tile, head))
            pair = cute.make_rmem_tensor(2, Float16)
            if cutlass.const_expr(geometry.is_mixed(i)):
                elements = elements_of(thread, c, i, Boolean(False), geometry)
                for r in cutlass.range_constexpr(2):
                    pair[r] = cute.make_tensor(source + elements[r], cute.make_layout(1))[0]
            else:
                source = source + cute.assume(2 * word, divby=2)
                cute.autovec_copy(cute.make_tensor(source, cute.make_layout(2)), pair)
            columns = wgmma.as_columns(acc_o[i])
            for r in cutlass.range_constexpr(2):
                columns[c, r] = columns[c, r] * mine[c] + Float32(pair[r]) * theirs[c]


@cute.jit
def weigh_whole(
    found: cutlass.Constexpr,  # `Head`
    weights: cute.Pointer,  # (n,) fp32, shared memory: what this consumer's outputs are to be multiplied with
    sinks: cute.Pointer,  # shared memory
    lse: cute.Tensor,
    scale: Float32,  # of values
    place: Int32,  # the query token's, of all requests
    first_row: Int32,
    thread: Int32,  # 0..255
    geometry: cutlass.Constexpr,
):
    """What outputs of a whole request are multiplied with: one over their sums, the sink's share among them. And its
    log-sum-exp."""
    if found.number < geometry.n:
        total, maximum = found.sums[EVEN] + found.sums[ODD], found.maximum[0]
        over = total
        if cutlass.const_expr(geometry.sink):
            over = total + softmax.exp2(sinks[found.number] - maximum)
        weights[found.number] = cutlass.select_(total > 0.0, scale * cute.arch.rcp_approx(over), Float32(0.0))
        head = first_row + found.number
        if thread < WARPGROUP and head < geometry.h:
            lse[place, head, 0] = softmax.natural_lse(total, maximum)


@cute.jit
def weigh_partial(
    acc_o: cutlass.Constexpr, found: cutlass.Constexpr, weights: cute.Pointer, results: Results, scale: Float32,
    slot: Int32, tile: Int32, thread: Int32, geometry: cutlass.Constexpr,
):  # fmt: skip
    """What outputs of a share of a request are multiplied with: a power of two (`split_kv.partials`), and of layout
    flat `scale`. And its statistics. weights: as of `weigh_whole`, the first row of an exchange buffer of the
    consumer's warps."""
    n, count = geometry.n, geometry.n // 4
    me, lane, warp = thread // WARPGROUP, thread % 32, thread // 32 % WARPS
    magnitudes = cute.make_rmem_tensor(count, Float32)
    magnitudes.fill(0.0)
    for i in cutlass.range_constexpr(HALF_PANELS):
        columns = wgmma.as_columns(acc_o[i])
        for c in cutlass.range_constexpr(count):
            for r in cutlass.range_constexpr(2):
                magnitudes[c] = magnitudes[c] + cute.math.absf(columns[c, r])
    publish_sums(magnitudes, weights + warp * n, lane)
    cute.arch.barrier(barrier_id=Barrier.EVEN + me, number_of_threads=WARPGROUP)
    if found.number < n:
        magnitude, factor = of_warps(weights, found.number, n), Float32(1.0)
        if cutlass.const_expr(geometry.cache.one_scale):
            magnitude, factor = magnitude * cute.math.absf(scale), scale
        exponent = partials.exponent_of(magnitude)
        weights[found.number] = factor * partials.power_of_two(partials.TARGET_EXPONENT - exponent)
        own = cutlass.select_(me > 0, found.sums[ODD], found.sums[EVEN])
        layout = geometry.partials
        of_row = layout.stats(results.stats.iterator, layout.row(slot, tile, found.number))
        partials.store_stats(of_row, me, found.maximum[0], own, exponent)


@cute.jit
def epilogue(
    acc_o: cutlass.Constexpr,  # of this consumer
    weights: cute.Pointer,  # (n,) fp32, shared memory; the consumer's threads have yet to meet
    storage: cutlass.Constexpr,
    results: Results,
    token: Int32,  # the query token, of all requests
    place: Place,  # where the results go
    tile: Int32,  # query tile of the request
    first_row: Int32,
    thread: Int32,  # 0..255
    geometry: cutlass.Constexpr,
):
    """Multiplies results with their weights and writes them. The same code for both consumers, so that there is half as
    much to fetch."""
    out, _, outputs, _ = results
    slot, whole = place.slot, place.whole
    n, count, layout = geometry.n, geometry.n // 4, geometry.partials
    me, lane = thread // WARPGROUP, thread % 32
    factor = cute.make_rmem_tensor(count, Float32)
    cute.arch.barrier(barrier_id=Barrier.EVEN + me, number_of_threads=WARPGROUP)
    softmax.collect(factor, weights, 1, lane, False)
    base = outputs.iterator.toint() + 2 * layout.row(slot, tile, Int32(0)) * layout.columns
    if whole:
        base = out.iterator.toint() + 2 * rows.row_offset(out, token, Int32(0), first_row, geometry.h)
    heads = cutlass.min(geometry.h - first_row, n)
    # Through shared memory, a panel at a time where the consumer's P was: rows are written 128 bytes at a time, and the
    # next query may be loaded meanwhile.
    exchange = cute.recast_ptr(storage.p.data_ptr(), dtype=Int32)
    exchange = exchange + cute.assume(me * (geometry.copies * n * TOKENS // 2), divby=32)
    for i in cutlass.range_constexpr(HALF_PANELS):
        wgmma.scale_columns(acc_o[i], factor)
        words = cute.make_rmem_tensor(2 * geometry.pairs, Int32)
        if whole:
            store_words(words, wgmma.to_dtype(acc_o[i], out.element_type))
        else:
            store_words(words, wgmma.to_dtype(acc_o[i], Float16))
        if cutlass.const_expr(i > 0):
            cute.arch.barrier(barrier_id=Barrier.EVEN + me, number_of_threads=WARPGROUP)
        _, word = word_place(thread, 0, i, whole)
        for r in cutlass.range_constexpr(2):
            # Heads r, r + 8, ..: behind the first one's place by as many rows.
            row = wgmma.acc_column(lane, r)
            if cutlass.const_expr(geometry.is_mixed(i)):
                elements = [element % PANEL for element in elements_of(thread, 0, i, whole, geometry)]
                places = [exchange.toint() + (4 * exchange_word(row, at // 2) + 2 * (at % 2)) for at in elements]
            else:
                place_of_row = exchange + exchange_word(row, word % PANEL_WORDS)
            for c in cutlass.range_constexpr(r, count, 2):
                both = permute(words[c - r], words[c - r + 1], 0x7632 if r else 0x5410)
                below = c // 2 * 8 * PANEL_WORDS
                if cutlass.const_expr(geometry.is_mixed(i)):
                    for half in cutlass.range_constexpr(2):
                        store_half(places[half] + 4 * below, both >> (16 * half))
                else:
                    place_of_row[below] = both
        cute.arch.barrier(barrier_id=Barrier.EVEN + me, number_of_threads=WARPGROUP)
        chunk = thread % 8
        for row in cutlass.range(thread % WARPGROUP // 8, heads, WARPGROUP // 8, unroll=1):
            vector = cute.make_rmem_tensor(4, Int32)
            source = (exchange + cute.assume(exchange_word(row, 4 * chunk), divby=4)).align(16)
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(4)), vector)
            target = base + Int64(row * (2 * VALUES) + ((me * HALF_PANELS + i) * PANEL + 8 * chunk) * 2)
            if cutlass.const_expr(rows.has_strides(out)):
                # How much further apart rows are than in a contiguous out.
                further = cutlass.select_(whole, 2 * (Int64(out.stride[2]) - VALUES), Int64(0))
                target = target + row * further
            target = cute.make_ptr(Int32, target, cute.AddressSpace.gmem, assumed_align=16)
            cute.autovec_copy(vector, cute.make_tensor(target, cute.make_layout(4)))


class QueryTile(NamedTuple):
    """A query tile that has results: its query token among those of the call, its number, and its first head."""

    token: Int32
    tile: Int32
    first_row: Int32


@cute.jit
def epilogue_in_rows(
    acc_o: cutlass.Constexpr, weights: cute.Pointer, storage: cutlass.Constexpr, stage: Int32, results: Results,
    query: QueryTile, place: Place, thread: Int32, geometry: cutlass.Constexpr,
):  # fmt: skip
    """`epilogue` where P has no place of its own: through the rows of the split's last tile, in shared memory. Nobody
    reads that stage any more, and producers do not have it yet. One instruction rounds two numbers and packs them."""
    out, _, outputs, _ = results
    count, layout = geometry.n // 4, geometry.partials
    me, lane = thread // WARPGROUP, thread % 32
    factor = cute.make_rmem_tensor(count, Float32)
    cute.arch.barrier(barrier_id=Barrier.EVEN + me, number_of_threads=WARPGROUP)
    softmax.collect(factor, weights, 1, lane, False)
    base = outputs.iterator.toint() + 2 * layout.row(place.slot, query.tile, Int32(0)) * layout.columns
    if place.whole:
        base = out.iterator.toint() + 2 * rows.row_offset(out, query.token, Int32(0), query.first_row, geometry.h)
    heads = cutlass.min(geometry.h - query.first_row, geometry.n)
    chunk, of_chunk = thread % 8, thread % WARPGROUP // 8
    base = base + Int64(of_chunk * (2 * VALUES) + (me * HALF_PANELS * PANEL + 8 * chunk) * 2)
    exchange = storage.rows.data_ptr() + cute.assume(
        stage * (TOKENS * geometry.stride) + me * (TOKENS * geometry.stride // 2), divby=64
    )
    exchange = cute.recast_ptr(exchange.align(64), dtype=Int32)
    for i in cutlass.range_constexpr(HALF_PANELS):
        columns, words = wgmma.as_columns(acc_o[i]), cute.make_rmem_tensor(count, Int32)
        for c in cutlass.range_constexpr(count):
            for r in cutlass.range_constexpr(2):
                columns[c, r] = columns[c, r] * factor[c]
        if place.whole:
            for c in cutlass.range_constexpr(count):
                words[c] = rounded_pair(columns[c, 0], columns[c, 1], out.element_type)
        else:
            for c in cutlass.range_constexpr(count):
                words[c] = rounded_pair(columns[c, 0], columns[c, 1], Float16)
        # Two places in turn: who meets behind the second one has read the first one.
        panel = exchange + i % 2 * (geometry.n * PANEL_WORDS)
        _, word = word_place(thread, 0, i, place.whole)
        for r in cutlass.range_constexpr(2):
            place_of_row = panel + exchange_word(wgmma.acc_column(lane, r), word % PANEL_WORDS)
            for c in cutlass.range_constexpr(r, count, 2):
                place_of_row[c // 2 * 8 * PANEL_WORDS] = words[c]
        cute.arch.barrier(barrier_id=Barrier.EVEN + me, number_of_threads=WARPGROUP)
        steps = geometry.n * 8 // WARPGROUP
        vectors = cute.make_rmem_tensor((4, steps), Int32)
        for k in cutlass.range_constexpr(steps):
            row = of_chunk + k * (WARPGROUP // 8)
            source = (panel + cute.assume(exchange_word(row, 4 * chunk), divby=4)).align(16)
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(4)), vectors[None, k])
        for k in cutlass.range_constexpr(steps):
            row = k * (WARPGROUP // 8)
            target = base + (row * (2 * VALUES) + 2 * PANEL * i)
            target = cute.make_ptr(Int32, target, cute.AddressSpace.gmem, assumed_align=16)
            at = cute.make_tensor(target, cute.make_layout(4))
            if cutlass.const_expr(geometry.h % geometry.n == 0):
                cute.autovec_copy(vectors[None, k], at)
            elif of_chunk + row < heads:
                cute.autovec_copy(vectors[None, k], at)


def rounded_pair(low: Float32, high: Float32, dtype: Any) -> Int32:
    """Two numbers, rounded to a 16-bit type, as a word."""
    name = "bf16x2" if dtype is BFloat16 else "f16x2"
    return cute.arch.inline_ptx(
        f"cvt.rn.{name}.f32 {{$w0}}, {{$r0}}, {{$r1}};", write_only_types=[Int32], read_only_args=[high, low]
    )


def exchange_word(row: Int32, word: Any) -> Any:
    """Where a word of a panel's results lies: 16-byte chunks of a row are permuted, so that neither the threads that
    write nor those that read have a bank in common."""
    return row * PANEL_WORDS + ((word // 4) ^ (row % 8)) * 4 + word % 4


def store_half(address: Int32, word: Int32) -> None:
    """The lower half of a word, to shared memory."""
    text = "{ .reg .b16 low, high; mov.b32 {low, high}, {$r1}; st.shared.b16 [{$r0}], low; }"
    cute.arch.inline_ptx(text, read_only_args=[address, word])


@cute.jit
def store_words(words: cute.Tensor, rounded: cute.Tensor):
    """The 16-bit elements of an accumulator as words."""
    words.store(cute.recast_tensor(rounded, Int32).load().reshape(words.shape))


# ------------------------------------------------------------------------------------------------ device: consume
@cute.jit
def merge_all(
    walk: cutlass.Constexpr,  # `Walk`
    place: Place,
    split: Split,
    tiles: Tiles,
    add: cutlass.Constexpr,  # `add_partial`, but for the slot
    thread: Int32,  # 0..255
) -> Place:
    """`Walk.merge_all` with one branch around all that only a cut request needs."""
    split_index, slot, whole = place
    if (not whole) & (walk.line.lead > 0):
        slot = scheduler.slot_of(walk.worker, split.request)
        if walk.pool.combined == 0:
            own = scheduler.split_index_of(walk.worker, split, tiles.of_request, walk.line)
            walk.merge_tree(own, split.request, add, Group(Barrier.CONSUMERS, CONSUMER_THREADS), thread)
            whole = own.index == 0
    return Place(split_index, slot, whole)


@cute.jit
def consume(
    storage: cutlass.Constexpr,
    results: Results,
    sink: cute.Tensor | None,
    factors: cutlass.Constexpr,  # `Factors`
    walk: cutlass.Constexpr,  # `Walk`
    split: Split,
    of_tile: cutlass.Constexpr,  # `rows.TileRows`
    thread: Int32,  # 0..255
    geometry: cutlass.Constexpr,
):
    """What the consumers do, over all splits of the worker."""
    first_row, tile = of_tile.first_row, walk.tile
    panel = wgmma.make_mma(Float16, geometry.n, a_in_registers=True).partition_shape_C((TOKENS, geometry.n))
    acc_o = [cute.make_rmem_tensor(panel, Float32) for _ in range(HALF_PANELS)]
    registers, found = Registers(acc_o, cute.make_rmem_tensor(geometry.n // 4, Float32)), Head.make(thread)
    row_sum = registers.row_sum
    add = functools.partial(add_partial, acc_o, found, storage, results, tile, thread, geometry)
    me = cute.arch.make_warp_uniform(thread // WARPGROUP)
    if cutlass.const_expr(geometry.sink and not geometry.asks_ahead):
        # Read once, as a split's end would wait for them.
        if thread < geometry.n:
            head = cutlass.min(first_row + thread, geometry.h - 1)
            storage.sinks.data_ptr()[thread] = sink[head] * math.log2(math.e)
    kept = None
    if cutlass.const_expr(geometry.p_in_rows):
        kept = Kept.make(me, storage, thread, geometry)
    stage, phase, parity = Int32(0), Int32(0), Int32(0)
    if cutlass.const_expr(geometry.shortens):
        tile_of_full, _, _ = walk.tiles_of(split)
        skips = is_short(storage) & walk.has_work(split) & (span_of(split, storage)[0] != tile_of_full)
        stage = cute.arch.make_warp_uniform(Int32(skips))
        if stage > 0:
            # The first tile that was loaded is another split's.
            cute.arch.mbarrier_wait(storage.full.data_ptr(), 0)
            warp_arrive(storage.empty.data_ptr(), geometry.ctas)
    if cutlass.const_expr(not geometry.as_long):
        walk.store_empty(results, walk.line.empty, of_tile, thread, CONSUMER_THREADS)
    while walk.has_work(split):
        tiles = walk.tiles_of(split)
        first, end, _ = tiles
        has_tiles = first < end
        if cutlass.const_expr(geometry.as_long):
            has_tiles = True
        block = walk.queries.block(split.request)
        if has_tiles:
            cute.arch.mbarrier_wait(storage.query_full.data_ptr(), parity)
            parity = parity ^ 1
        # Said here, or the last split's results would keep their registers while the query is loaded.
        for i in cutlass.range_constexpr(HALF_PANELS):
            acc_o[i].fill(0.0)
        row_sum.fill(0.0)
        walk.list_splits(split, tiles, thread)
        if has_tiles:
            of_query = widen_query(storage, thread, geometry)
            cute.arch.fence_view_async_shared()
            named_sync(Barrier.CONSUMERS, CONSUMER_THREADS)
            scale = factors.scores * of_query
            w = Consumer.make(me, geometry, storage, thread % WARPGROUP, scale, registers, kept)
            begin, stop = first, end
            if cutlass.const_expr(geometry.shortens):
                if is_short(storage):
                    begin, stop = span_of(split, storage)
            w.run(begin, stop, stage, phase)
            moved = stage + (stop - begin)
            phase = phase ^ (moved // geometry.stages & 1)
            stage = moved % geometry.stages
        following = walk.next_split(split)
        if not walk.has_work(following):
            cute.arch.griddepcontrol_launch_dependents()
        if has_tiles:
            place = walk.place_of(split, tiles)
            found.collect(row_sum, storage, thread, geometry.n)
            if cutlass.const_expr(not geometry.paged):
                found.forget(acc_o, storage)
            weights = storage.magnitudes.data_ptr() + cute.assume(me * (WARPS * geometry.n), divby=geometry.n)
            alone = place.whole  # nobody merges it
            place = merge_all(walk, place, split, tiles, add, thread)
            if place.whole:
                weigh_whole(
                    found, weights, storage.sinks.data_ptr(), results.lse, factors.values, block.first, first_row,
                    thread, geometry,
                )  # fmt: skip
            else:
                # A combine knows no scale; workers that merge multiply their sum with it.
                scale = cutlass.select_(walk.pool.combined > 0, factors.values, Float32(1.0))
                weigh_partial(acc_o, found, weights, results, scale, place.slot, tile, thread, geometry)
            if cutlass.const_expr(geometry.p_in_rows):
                held, _ = stage_at(stage, phase, geometry.stages - 1, geometry.stages)  # the split's last tile
                query = QueryTile(block.first, tile, first_row)
                epilogue_in_rows(acc_o, weights, storage, held, results, query, place, thread, geometry)
                # Copies of rows write there next, through another proxy.
                cute.arch.fence_view_async_shared()
                cute.arch.sync_warp()
                warp_arrive(storage.empty.data_ptr() + held, geometry.ctas)
            else:
                epilogue(acc_o, weights, storage, results, block.first, place, tile, first_row, thread, geometry)
            if cutlass.const_expr(geometry.p_in_rows):
                # Of a whole request nothing is published, and what the consumers share next stands behind the barriers
                # in which the next query is made fp16.
                if not alone:
                    named_sync(Barrier.CONSUMERS, CONSUMER_THREADS)
                    walk.publish_all(split, tiles, thread)
            else:
                named_sync(Barrier.CONSUMERS, CONSUMER_THREADS)
                walk.publish_all(split, tiles, thread)
        else:
            rows.store_no_keys(results, block, of_tile, thread, CONSUMER_THREADS)
        split = following


# ------------------------------------------------------------------------------------------------ device: the kernels
def uniform(values: Any) -> Any:
    """The same numbers, of which the compiler knows that they are equal in all threads of a warp: then it keeps them in
    registers that the warp shares."""
    return type(values)(*(cute.arch.make_warp_uniform(value) for value in values))


@cute.kernel
def sparse_mla_v2(
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
    lane = thread % 32
    lengths = inputs.lengths
    token, first_row = tile // geometry.row_tiles, tile % geometry.row_tiles * geometry.n
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    storage = SmemAllocator().allocate(shared_storage(geometry))
    if warp == CONSUMERS * WARPS:
        full, empty = storage.full.data_ptr(), storage.empty.data_ptr()
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(geometry.stages):
                # In v4 each lane arrives once more, when its copies of scales have.
                cute.arch.mbarrier_init(full + i, PRODUCERS * (33 if geometry.layout == "v4" else 1))
                cute.arch.mbarrier_init(empty + i, CONSUMERS * WARPS * geometry.ctas)
            if cutlass.const_expr(geometry.shortens):
                short_word(storage)[0] = Int32(0)
            cute.arch.mbarrier_init(storage.query_full.data_ptr(), 1)
            cute.arch.mbarrier_init(storage.query_empty.data_ptr(), CONSUMERS * WARPS)
        cpasync.prefetch_descriptor(inputs.tma)
        cute.arch.mbarrier_init_fence()
    # Nothing that a kernel before may have written is read, and nothing is written, ahead of this.
    cute.arch.griddepcontrol_wait()
    queries, of_tile = Token(token, geometry.s), rows.TileRows(Int32(0), first_row, geometry.h, geometry.n)
    cta, searcher = Cta(worker, tile, thread, warp, lane), CONSUMER_THREADS
    row_tile, producer = first_row // geometry.n, warp - CONSUMERS * WARPS
    if cutlass.const_expr(geometry.as_long):
        walk, split = begin_filled(schedule, flags, lengths, queries, pool, cta, searcher, geometry.merge)
    else:
        walk, split = begin(
            schedule, flags, lengths, queries, pool, cta, storage.first.data_ptr(), searcher, geometry.merge
        )  # fmt: skip
        split, walk = uniform(split), replace(walk, line=uniform(walk.line))
    named_sync(Barrier.SETUP, THREADS)
    if cutlass.const_expr(geometry.ctas > 1):  # both CTAs' mbarriers are made
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    flat_scale = Float32(1.0)
    if cutlass.const_expr(geometry.cache.one_scale):
        flat_scale = inputs.flat[0]
    if warp >= CONSUMERS * WARPS:
        cute.arch.setmaxregister_decrease(geometry.registers[0])
        load(inputs, storage, walk, split, token, row_tile, producer, geometry)
    else:
        cute.arch.setmaxregister_increase(geometry.registers[1])
        if cutlass.const_expr(geometry.shortens):
            if cutlass.const_expr(geometry.asks_ahead):
                look_beside_sinks(split, inputs, storage, walk, token, thread, first_row, geometry)
            else:
                meet(storage, look(split, inputs.caches, storage, walk, token, warp, geometry))
        factors = Factors(flat_scale, scale_log2 * flat_scale)
        consume(storage, results, inputs.sink, factors, walk, split, of_tile, thread, geometry)
    if cutlass.const_expr(geometry.ctas > 1):  # no CTA leaves while the other one may signal its mbarriers
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()


sparse_mla_v2.set_name_prefix("sparse_mla_v2", remove_cutlass_symbol=True, keep_mangled_name=False)


@cute.kernel
def add_lengths(lengths: cute.Tensor, caches: tuple[Cache, ...], geometry: cutlass.Constexpr):
    """lengths: (b,) int32, global memory: 64 for each tile of a request's indices of both caches; one CTA."""
    thread, _, _ = cute.arch.thread_idx()
    cute.arch.griddepcontrol_launch_dependents()
    cute.arch.griddepcontrol_wait()
    for request in cutlass.range(thread, lengths.shape[0], CONSUMER_THREADS, unroll=1):
        tiles = Int32(0)
        for cache in caches:
            tiles = tiles + scheduler.ceil_div(count_of(cache, request, Int32(0), geometry), TOKENS)
        lengths[request] = tiles * TOKENS


add_lengths.set_name_prefix("add_lengths", remove_cutlass_symbol=True, keep_mangled_name=False)


# ------------------------------------------------------------------------------------------------ host
def make_query_tma(q: cute.Tensor, heads: int) -> tuple[Any, cute.Tensor]:
    """(TMA atom, tensor (h, columns, s, b)) for boxes of `heads` heads x 64 columns of a query token. q: (b, s, h,
    columns), columns contiguous and rows multiples of 16 bytes apart. A head past the last one reads zeros."""
    b, s, h, columns = q.shape
    of_request, of_token, of_head, _ = q.stride
    # What a tensor says of the stride of a mode of size 1 means nothing.
    of_head = of_head if h > 1 else columns
    of_token = of_token if s > 1 else h * columns
    of_request = cute.assume(cutlass.select_(b > 1, Int64(of_request), Int64(s * h * columns)), divby=paged.CHUNK)
    view = cute.make_layout((h, columns, s, b), stride=(of_head, 1, of_token, of_request))
    layout = wgmma.k_major_layout(q.element_type, (heads, PANEL))
    load = cpasync.CopyBulkTensorTileG2SOp()
    return cpasync.make_tiled_tma_atom(load, cute.make_tensor(q.iterator, view), layout, (heads, PANEL), 1)


def divisor_of(cache: cute.Tensor, geometry: Geometry) -> cute.FastDivmodDivisorV2 | None:
    """`Cache.divisor`."""
    return cute.fast_divmod_create_divisor_v2(cache.shape[1]) if geometry.page == ANY_PAGE else None


@cute.jit
def launch_sparse_mla_v2(
    q: cute.Tensor,  # (b, s, h, columns) bf16, columns contiguous
    cache: cute.Tensor,  # (pages, page, bytes of a token) uint8, contiguous within a page
    indices: cute.Tensor,  # (b, s, topk) int32, or a page table (b, width); its last dimension contiguous
    cache_lengths: cute.Tensor | None,  # (b,) int32
    extra_cache: cute.Tensor | None,
    extra_indices: cute.Tensor | None,
    extra_lengths: cute.Tensor | None,
    lengths: cute.Tensor,  # (b,) int32: 64 for each tile of a request's indices; written where it depends on lengths
    sink: cute.Tensor | None,
    flat: cute.Tensor | None,
    out: cute.Tensor,  # (b, s, h, 512) bf16, columns contiguous
    lse: cute.Tensor,  # (b, h, s) fp32
    of_partials: cute.Tensor,  # `Partials.views`
    flags: cute.Tensor,
    words: cute.Tensor,  # `scheduler.schedule_in`
    scale: Float32,
    workers: Int32,
    fixed: Int32,  # KV tiles of a split, or 0: the scheduler chooses
    geometry: cutlass.Constexpr,
    stream: CUstream,
):
    """Launches a CTA for each query tile and worker, as a programmatic dependent."""
    b, s, h = q.shape[0], geometry.s, geometry.h
    caches = (Cache(cache, indices, cache_lengths, divisor_of(cache, geometry)),)
    if cutlass.const_expr(geometry.extra_page != 0):
        caches = (*caches, Cache(extra_cache, extra_indices, extra_lengths, divisor_of(extra_cache, geometry)))
    tokens = Int32(0)
    if cutlass.const_expr(geometry.paged):
        tokens = indices.shape[1] * cache.shape[1]
    else:
        for each in caches:
            tokens = tokens + scheduler.ceil_div(each.indices.shape[2], TOKENS) * TOKENS
    if cutlass.const_expr(geometry.extra_page != 0 and (geometry.lengths or geometry.extra_lengths)):
        add_lengths(lengths, caches, geometry).launch(
            grid=(1, 1, 1), block=(CONSUMER_THREADS, 1, 1), stream=stream, use_pdl=True
        )

    of_lse = rows.lse_by_token(lse, b)
    schedule = scheduler.schedule_in(words, workers, False)
    results = Results(rows.by_token(out, b), of_lse, *geometry.partials.views(of_partials))
    pool = scheduler.make_pool(b, tokens, workers, fixed, Int32(scheduler.OWN), geometry.costs)
    if cutlass.const_expr(not geometry.combines):
        if fixed == 0:
            pool = scheduler.make_merged_pool(b, tokens, workers, geometry.costs)
    tma, q_boxes = make_query_tma(q, geometry.n)
    inputs = Inputs(tma, q_boxes, caches, lengths, sink, flat)
    sparse_mla_v2(inputs, results, flags, schedule, scale * math.log2(math.e), pool, geometry).launch(
        grid=(geometry.tiles, workers, 1),
        block=(THREADS, 1, 1),
        cluster=(geometry.ctas, 1, 1) if geometry.ctas > 1 else None,
        min_blocks_per_mp=1,
        stream=stream,
        use_pdl=True,
    )  # fmt: skip
    if cutlass.const_expr(geometry.padded):
        # As `Geometry.merge` has it: heads of all query tokens behind each other, and of a query token by itself.
        of_rows = cute.make_layout((b, 1, s * h, VALUES), stride=(s * h * VALUES, VALUES, VALUES, 1))
        if cutlass.const_expr(rows.has_strides(out)):
            of_request, of_token, of_head, _ = out.stride
            of_rows = cute.make_layout((b, 1, (h, s), VALUES), stride=(of_request, VALUES, (of_head, of_token), 1))
        out = cute.make_tensor(out.iterator, of_rows)
        of_request, of_head, of_token = lse.stride
        lse = cute.make_tensor(
            lse.iterator, cute.make_layout((b, (h, s), 1), stride=(of_request, (of_head, of_token), 1))
        )
        if cutlass.const_expr(sink is not None):
            sink = cute.make_tensor(sink.iterator, cute.make_layout(((h, s),), stride=((1, 0),)))
    of_token = Results(out, lse, results.outputs, results.stats)
    ctas = 2 * workers * geometry.tiles
    combine.launch(of_token, schedule.table, lengths, None, pool, ctas, geometry.merge, stream, sink)


# ------------------------------------------------------------------------------------------------ plan
def takes(pd: SparseProblem) -> Verdict:
    """Whether this version computes a problem."""
    if pd.layout == "bf16":
        return Verdict.no("layout bf16 has no codes to widen: use sparse_mla")
    return Verdict.yes()


def pages_of(pd: SparseProblem) -> tuple[int, int]:
    """Tokens of a page of the cache and of the extra one, as code is made for them."""
    if {pd.page, pd.extra_page} <= {0, *CONSTANT_PAGES}:
        return pd.page, pd.extra_page
    return ANY_PAGE, ANY_PAGE if pd.extra else 0


@dataclass(frozen=True)
class SparseMlaV2Tiling(Tiling):
    """heads: of a query tile, a multiple of 8 up to 64; 0: the least with which there are as few query tiles as with
    64. workers: CTAs for each query tile of a request; 0: as many as fill the device. split_tokens: indices of a split
    (cached tokens, of a page table), a multiple of 64, so that a request's splits depend on nothing but how many it
    has; 0: the scheduler splits requests as it fills the device. shortens: whether tiles behind the last index of a row
    that names a token are left out, where no lengths are given; with split_tokens none is."""

    launch_fields: ClassVar[tuple[str, ...]] = ("workers", "split_tokens")

    heads: int = 0
    workers: int = 0
    split_tokens: int = 0
    shortens: bool = False

    def geometry(self, pd: SparseProblem) -> Geometry:
        """What the code is made for."""
        each = -(-pd.h // -(-pd.h // HEADS[-1]))  # heads of a query tile, if all have as many
        n = self.heads or next(n for n in HEADS if n >= each)
        page, extra_page = pages_of(pd)
        return Geometry(
            pd.h, n, pd.s, pd.layout, page, extra_page, pd.lengths, pd.extra_lengths, pd.sink, pd.paged,
            pd.extra_layout, pd.strided_out, self.shortens,
        )  # fmt: skip

    def validate(self, pd: SparseProblem, device: Device | None = None) -> Verdict:
        if not 0 <= self.workers <= scheduler.MOST_WORKERS:
            return Verdict.no(f"workers = {self.workers} must be between 0 and {scheduler.MOST_WORKERS:,}")
        if self.heads not in (0, *HEADS):
            return Verdict.no(f"heads = {self.heads} must be 0 or one of {', '.join(map(str, HEADS))}")
        if self.split_tokens < 0 or self.split_tokens % TOKENS:
            return Verdict.no(f"split_tokens = {self.split_tokens} is not a multiple of {TOKENS}")
        geometry = self.geometry(pd)
        if self.shortens and not geometry.as_long:
            return Verdict.no(
                "shortens = True is for rows whose lengths nobody gives: set it to False with lengths, extra_lengths "
                "or a page table, which leave out tiles behind an end that is given"
            )
        if device is not None and geometry.tiles > device.num_sms:
            return Verdict.no(
                f"{geometry.tiles} query tiles of a request are more than the {device.num_sms} multiprocessors of "
                f"{device.key}: workers wait for each other and must all be running"
            )
        if not (counted := limits.sparse_sizes(pd)):
            return counted
        workers = self.workers or (max(1, device.num_sms // geometry.tiles) if device is not None else 1)
        tokens = sum(-(-each // TOKENS) * TOKENS for each in ((pd.t,) if pd.paged else (pd.topk, pd.extra)))
        fixed = self.split_tokens // TOKENS
        sizes = decode_host.schedule_sizes(pd.b, tokens, workers, fixed, geometry.partials, geometry.costs)
        return sizes if sizes or pd.paged else Verdict.no(sizes.reason.replace("page_table", "indices"))


class SparseMlaV2Plan(KernelPlan):
    """One compiled kernel a `code_class`; b, numbers of tokens and indices, workers and split_tokens are arguments."""

    workload = sparse_decode.WORKLOAD
    tiling_type = SparseMlaV2Tiling
    tiling: SparseMlaV2Tiling
    uses = (
        "adaptive-tiles", "clusters-multicast", "dependent-launch", "device-tile-scheduler", "fast-exp2-softmax",
        "loading/packed-fp8-keys", "split-kv", "swapped-operands", "two-warpgroup-output",
    )  # fmt: skip
    requires = Requirement(
        archs=("sm_90a",),
        dtypes=("bf16",),
        features=("wgmma", "setmaxnreg", "cluster"),
        problem=takes,
        options=("no_rope", "paged", "strided", "strided_out", "v41"),
    )
    reads_any_strides = True

    @classmethod
    def code_class(cls, problem: SparseProblem) -> Any:
        page, extra_page = pages_of(problem)
        return replace(problem.problem_class(), page=page, extra_page=extra_page)

    def default_tiling(self) -> Tiling:
        """Fewer heads a tile where query tiles of all heads would leave most multiprocessors with a KV tile or none:
        more CTAs read the same tokens then, and each has less to begin and end. Rows' last tokens are looked for where
        there are many rows: with one to eight requests that cost 2 to 4 % of a call, and with 64 nothing."""
        return min(self.autotune_configs(), key=self._time)

    def autotune_configs(self) -> list[Tiling]:
        pd, geometry = self.problem, SparseMlaV2Tiling().geometry(self.problem)
        most, shortens = geometry.n, geometry.as_long and pd.b * pd.s >= MANY
        # Those that halve 64, and those that fill their tiles but for less than one of 16 rows.
        rounded = -(-pd.h // 16) * 16
        fewer = [n for n in HEADS if 16 <= n < most and (64 % n == 0 or rounded % n == 0)]
        tilings = [SparseMlaV2Tiling(heads=n, shortens=shortens) for n in (0, *reversed(fewer))]
        return [tiling for tiling in tilings if tiling.validate(pd, self.device)] or tilings[:1]

    def _time(self, tiling: SparseMlaV2Tiling) -> float:
        """About how long a call takes, in us."""
        pd, geometry = self.problem, tiling.geometry(self.problem)
        sms = (self.device or Device.assumed()).num_sms
        of_request = sum(-(-tokens // TOKENS) for tokens in ((pd.t,) if pd.paged else (pd.topk, pd.extra)))
        begin, each = TIMES[geometry.n]
        return begin + each * max(1.0, pd.b * geometry.tiles * of_request / sms)

    def workers(self) -> int:
        """Workers of a query tile: the tiling's, or those that fill the device."""
        return self.tiling.workers or max(1, host.target(self).num_sms // self.tiling.geometry(self.problem).tiles)

    def plan(self, *inputs: Any) -> CuteKernel:
        import torch

        self.require()
        pd, geometry, workers = self.problem, self.tiling.geometry(self.problem), self.workers()
        given = sparse_decode.named(pd, *inputs)
        q = given["q"]
        b = q.shape[0]
        outputs = sparse_decode.new_outputs(pd, q)
        names = ("cache", "page_table", "seq_lens") if pd.paged else ("cache", "indices", "lengths")
        parts = [[given.get(f"{prefix}{name}") for name in names] for prefix in ("", "extra_")]
        widths = [part[1].shape[-1] * (pd.page if pd.paged else 1) for part in parts if part[1] is not None]
        tiles, fixed = sum(-(-width // TOKENS) for width in widths), self.tiling.split_tokens // TOKENS
        if pd.paged or (pd.lengths and not pd.extra):
            lengths = parts[0][2]
        else:
            lengths = torch.full((b,), tiles * TOKENS, dtype=torch.int32, device=q.device)
        slots = scheduler.most_slots(b, workers, tiles, fixed)
        spaces = decode_host.workspaces(q, geometry.partials, b, workers, slots)
        flat = given["scale"] if pd.cache.one_scale else None
        arguments = (
            q, *parts[0], *parts[1], lengths, given.get("sink"), flat, *outputs, *spaces, pd.scale, workers, fixed
        )  # fmt: skip
        return self._make(arguments, inputs, outputs, (*spaces, lengths))

    def plan_empty(self) -> CuteKernel:
        self.require()
        return self._make((), (), ())

    def _make(self, given: Any, inputs: Any, outputs: Any, workspaces: Any = ()) -> CuteKernel:
        pd, geometry, kind = self.problem, self.tiling.geometry(self.problem), host.element_type(self.problem.dtype)

        def cache(page: int, layout: Any) -> Any:
            row, apart = layout.token_bytes, cute.sym_int64(divisibility=16)
            pages, of_page = host.symbols(2)
            shape = pages, of_page if page == ANY_PAGE else page, row
            return make_fake_tensor(Uint8, shape, (apart, row, 1), assumed_align=16)

        def indices(b: Any) -> Any:
            shape = (b,) if pd.paged else (b, pd.s)
            return decode_host.fake_apart(Int32, *shape, *host.symbols(1), align=4)

        def arguments() -> tuple[Any, ...]:
            (b,) = host.symbols(1)
            extra = pd.extra > 0
            return (
                decode_host.fake_apart(kind, b, pd.s, pd.h, pd.columns),
                cache(geometry.page, geometry.cache),
                indices(b),
                host.fake(Int32, b, align=4) if pd.lengths or pd.paged else None,
                cache(geometry.extra_page, geometry.extra) if extra else None,
                indices(b) if extra else None,
                host.fake(Int32, b, align=4) if pd.extra_lengths else None,
                host.fake(Int32, b, align=4),
                host.fake(Float32, pd.h, align=4) if pd.sink else None,
                host.fake(Float32, 1, align=4) if pd.cache.one_scale else None,
                *decode_host.fake_results(kind, (b, pd.s, pd.h, VALUES), (b, pd.h, pd.s), pd.strided_out),
                *decode_host.fake_workspaces(),
                Float32(1.0),
                Int32(1),
                Int32(0),
                geometry,
            )

        return host.stage(
            self, sparse_mla_v2, launch_sparse_mla_v2, "sparse_mla_v2", arguments, given, inputs, outputs, workspaces
        )
