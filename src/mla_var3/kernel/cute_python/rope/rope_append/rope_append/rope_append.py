"""rope_append v0 in CuTe: rotates new tokens' q and k, and writes latent and rope into the paged cache, in one launch.

    q[t, :, -64:]  ──rotate──→ out[t, :, 512:576]
    rope[t]        ──rotate──→ cache[slot[t]][512:576]        latent[t]  ──copy──→ cache[slot[t]][0:512]

A warp has an item: of one token either 8 · `heads` query heads, or its key. Four lanes take a head's 64 columns, each
16 bytes of the first half and the same place of the second, so that it holds whole pairs in both conventions:

    lane of four    0       1       2       3       0       1       2       3
    columns         0..7    8..15   16..23  24..31  32..39  40..47  48..55  56..63
    interleaved     pairs (2i, 2i + 1) lie in one vector         halves: pairs (i, i + 32) in the lane's two

    item   griddepcontrol.wait → position, vectors of q (all of them in flight) → 32 bytes of cosines, 32 of sines
           → x cos - y sin, y cos + x sin in float32 → stores
    key    griddepcontrol.wait → position, slot, rope and latent in flight → the same; nothing is stored where slot < 0

A lane turns `heads` heads by the same cosines and sines. One warp an item and no shared memory: warps do not wait for
one another. What lies in q and out may be the same memory, for a lane has read what it writes.

Where it is to `prefetch`, as many CTAs as the device has SMs come on top. They bring two weights of later kernels into
L2, at once and beside everything else: weights are nobody's output, so that nothing is waited for.

Runs on sm_90a. Dependents may start as soon as all CTAs have begun; they wait for this grid's end before they read. The
base version. One launch for both rotations and the append is the idea of vLLM's and FlashInfer's fused kernels; weights
that are prefetched while other kernels leave the memory idle are that of vLLM Ascend's weight prefetch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_tensor

from mla_var3.device import Requirement
from mla_var3.errors import UserError, nearest
from mla_var3.kernel.cute_python import host
from mla_var3.kernel.cute_python.prims.prefetch import PRIORITIES, prefetch_rows
from mla_var3.kernel.cute_python.prims.rotary import AT_A_TIME, HALF, LANES, ROPE, load_turns, turn, turn_queries
from mla_var3.kernel.cute_python.prims.sync import wait_for_launch
from mla_var3.kernel.cute_python.prims.vectors import VECTOR, WARP, load_vector, store_vector, vectors
from mla_var3.runtime import CuteKernel, KernelPlan, Tiling, Verdict
from mla_var3.workload import rope

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mla_var3.device import Device
    from mla_var3.workload.rope import RopeProblem

STEP = WARP * VECTOR  # columns of latent that a warp's vectors have
MOST_LATENT = 4 * STEP
FEW = 8192  # heads of all tokens: a device has about as many at a time with eight warps an SM
NOTHING = "nothing"  # is prefetched
PREFETCHERS = 132  # CTAs that prefetch: one for each SM of the devices that it is written for


# ------------------------------------------------------------------------------------------------ what code is made for
@dataclass(frozen=True)
class Geometry:
    """What the code is specialised on. h: query heads. latent: columns. columns: of a row of q. page: tokens of a cache
    page. heads: of a lane. warps: of a CTA. eager, prefetch: of `RopeAppendTiling`."""

    h: int
    latent: int
    columns: int
    page: int
    interleaved: bool
    heads: int
    warps: int
    eager: bool
    prefetch: str

    @property
    def chunks(self) -> int:
        """Items of a token's query heads."""
        return -(-self.h // (AT_A_TIME * self.heads))

    @property
    def exact(self) -> bool:
        """Whether every lane has all of its heads."""
        return self.h % (AT_A_TIME * self.heads) == 0

    @property
    def prefetchers(self) -> int:
        """CTAs behind those of the items."""
        return 0 if self.prefetch == NOTHING else PREFETCHERS


# ------------------------------------------------------------------------------------------------ tiling
@dataclass(frozen=True)
class RopeAppendTiling(Tiling):
    """heads: that a lane turns by the same cosines and sines, 1 to 4. warps: of a CTA. eager: the next
    kernel's CTAs may come at once, as this package's may, which wait before they read. prefetch: "nothing", or the L2
    eviction priority, "evict_normal" or "evict_last", at which the two weights that `plan_into` is then given are
    prefetched."""

    heads: int = 2
    warps: int = 4
    eager: bool = True
    prefetch: str = NOTHING

    def geometry(self, pd: RopeProblem) -> Geometry:
        knobs = (self.heads, self.warps, self.eager, self.prefetch)
        return Geometry(pd.h, pd.k, pd.columns, pd.page, pd.interleaved, *knobs)

    def validate(self, pd: RopeProblem, device: Device | None = None) -> Verdict:
        if not 1 <= self.heads <= 4:
            return Verdict.no(f"heads = {self.heads} must be 1 to 4")
        if not 1 <= self.warps <= 32:
            return Verdict.no(f"warps = {self.warps} must be 1 to 32")
        if self.prefetch not in (known := (NOTHING, *PRIORITIES)):
            return Verdict.no(f"prefetch = {self.prefetch!r} is unknown: {nearest(self.prefetch, known)}")
        return Verdict.yes()


# ------------------------------------------------------------------------------------------------ device
@cute.jit
def append_key(
    latent: cute.Tensor,
    rope_: cute.Tensor,
    cache: cute.Tensor,
    positions: cute.Tensor,
    slots: cute.Tensor,
    table: cute.Tensor,
    token: Int32,
    lane: Int32,
    shape: cutlass.Constexpr,
):
    """An item of a key: the first lanes turn its rope, and all of them copy the latent."""
    count = cutlass.const_expr(-(-shape.latent // STEP))
    place = lane % LANES  # the other lanes load the same and store nothing
    from_rope = rope_.iterator + cute.assume(Int64(token) * rope_.stride[0], divby=VECTOR)
    from_rope = from_rope + cute.assume(place * VECTOR, divby=VECTOR)
    column = cute.assume(lane * VECTOR, divby=VECTOR)
    from_latent = latent.iterator + cute.assume(Int64(token) * latent.stride[0], divby=VECTOR) + column
    wait_for_launch(from_rope.toint())
    position, slot = positions[token], slots[token]
    ends, held = vectors(rope_.element_type, 2), vectors(latent.element_type, count)
    for half in cutlass.range_constexpr(2):
        load_vector(ends[None, half], from_rope + half * HALF)
    held.fill(0)
    for i in cutlass.range_constexpr(count):
        if lane * VECTOR + i * STEP < shape.latent if cutlass.const_expr(shape.latent % STEP != 0) else True:
            load_vector(held[None, i], from_latent + i * STEP)
    cute.arch.sync_warp()
    turns = load_turns(table, position, place, shape)
    cute.arch.sync_warp()
    turn(ends[None, 0], ends[None, 1], turns, shape)
    if slot >= 0:
        width = cutlass.const_expr(shape.latent + ROPE)
        page = cute.assume(Int64(slot // shape.page) * cache.stride[0], divby=VECTOR)
        row = cache.iterator + page + cute.assume(Int64(slot % shape.page) * width, divby=VECTOR)
        for i in cutlass.range_constexpr(count):
            if lane * VECTOR + i * STEP < shape.latent if cutlass.const_expr(shape.latent % STEP != 0) else True:
                store_vector(held[None, i], row + column + i * STEP)
        if lane < LANES:
            for half in cutlass.range_constexpr(2):
                store_vector(ends[None, half], row + column + (shape.latent + half * HALF))


@cute.kernel
def rope_append(
    q: cute.Tensor,  # (n, h, columns), global memory; tokens and heads apart by multiples of 8 elements
    latent: cute.Tensor,  # (n, latent), global memory, rows likewise
    rope_: cute.Tensor,  # (n, ROPE), global memory, rows likewise
    positions: cute.Tensor,  # (n,) int32 or int64
    slots: cute.Tensor,  # (n,) int32 or int64; below 0: not written
    table: cute.Tensor,  # (positions, ROPE) float32, global memory: cosines, sines
    out: cute.Tensor,  # (n, h, any, whose last ROPE columns are written), global memory, likewise; may be q
    cache: cute.Tensor,  # (pages, page, latent + ROPE), global memory, pages likewise
    first: cute.Tensor | None,  # to be prefetched: (rows, any multiple of 8), global memory, rows likewise
    second: cute.Tensor | None,  # likewise
    shape: cutlass.Constexpr,  # Geometry
):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    if cutlass.const_expr(shape.eager):
        cute.arch.griddepcontrol_launch_dependents()
    warp, lane = cute.arch.make_warp_uniform(thread // WARP), thread % WARP
    item = block * shape.warps + warp
    token, chunk = item // (shape.chunks + 1), item % (shape.chunks + 1)
    if token < q.shape[0]:
        # The key first: its item is the one with the longer way.
        if chunk == 0:
            append_key(latent, rope_, cache, positions, slots, table, token, lane, shape)
        else:
            turn_queries(q, out, positions, table, token, chunk - 1, lane, shape)
    if cutlass.const_expr(shape.prefetchers > 0):
        blocks, _, _ = cute.arch.grid_dim()
        prefetcher = block - (blocks - shape.prefetchers)
        if prefetcher >= 0:
            # Neighbouring boxes from different SMs.
            worker, workers = warp * shape.prefetchers + prefetcher, shape.prefetchers * shape.warps
            prefetch_rows(first, worker, workers, shape.prefetch)
            prefetch_rows(second, worker, workers, shape.prefetch)


rope_append.set_name_prefix("rope_append", remove_cutlass_symbol=True, keep_mangled_name=False)


# ------------------------------------------------------------------------------------------------ host
@cute.jit
def launch_rope_append(
    q: cute.Tensor,
    latent: cute.Tensor,
    rope_: cute.Tensor,
    positions: cute.Tensor,
    slots: cute.Tensor,
    table: cute.Tensor,
    out: cute.Tensor,
    cache: cute.Tensor,
    first: cute.Tensor | None,
    second: cute.Tensor | None,
    geometry: cutlass.Constexpr,
    stream: CUstream,
):
    """Launches a warp for every item, and the CTAs that prefetch, as a programmatic dependent."""
    items = q.shape[0] * (geometry.chunks + 1)
    blocks = (items + geometry.warps - 1) // geometry.warps
    if cutlass.const_expr(geometry.prefetchers > 0):
        blocks += geometry.prefetchers
    rope_append(q, latent, rope_, positions, slots, table, out, cache, first, second, geometry).launch(
        grid=(blocks, 1, 1),
        block=(geometry.warps * WARP, 1, 1),
        stream=stream,
        use_pdl=True,
    )


def takes(pd: RopeProblem) -> Verdict:
    if pd.p != ROPE:
        return Verdict.no(f"written for {ROPE} rope columns; the problem has p = {pd.p}")
    for name, value in (("k", pd.k), ("columns", pd.columns), ("rest", pd.rest)):
        if value % VECTOR:
            return Verdict.no(f"{name} = {value}: rows are read in vectors of {VECTOR} elements, use a multiple of it")
    if pd.k > MOST_LATENT:
        return Verdict.no(f"k = {pd.k}: a warp copies up to {MOST_LATENT} latent columns")
    return Verdict.yes()


# ------------------------------------------------------------------------------------------------ plan
class RopeAppendPlan(KernelPlan):
    """Inputs (q, latent, rope, positions, slots, table), outputs (out, cache) of `workload.rope`."""

    workload = rope.WORKLOAD
    tiling_type = RopeAppendTiling
    requires = Requirement(archs=("sm_90a",), dtypes=("bf16", "fp16"), problem=takes)

    def default_tiling(self) -> RopeAppendTiling:
        # Few heads in all: as many warps as there can be. Many: two heads a lane, for one row of the table.
        few = self.problem.tokens * self.problem.h <= FEW or self.problem.h <= AT_A_TIME
        return RopeAppendTiling(1 if few else 2, 4)

    def autotune_configs(self) -> list[Tiling]:
        most = -(-self.problem.h // AT_A_TIME)
        return [RopeAppendTiling(heads, warps) for heads in (1, 2, 4) if heads <= most for warps in (1, 2, 4, 8)]

    def plan(self, *inputs: Any) -> CuteKernel:
        return self.plan_into(inputs, rope.new_outputs(self.problem, inputs[0]))

    def plan_into(self, inputs: Any, outputs: Any, weights: Sequence[Any] = ()) -> CuteKernel:
        """A kernel on outputs of the caller's: out (n, h, any), of which the last p columns are written and which may
        be q, and the cache (pages, page, k + p), whose pages may lie apart. weights: two (rows, columns) of the
        problem's dtype, rows of which may lie apart, where the tiling prefetches. Raises `UserError` where vectors of
        16 bytes do not fit, and for weights that are missing or not asked for."""
        self.require()
        if len(weights) != (wanted := 0 if self.tiling.prefetch == NOTHING else 2):
            raise UserError(
                f"prefetch = {self.tiling.prefetch!r} takes {wanted} weights, and {len(weights)} are given: pass them "
                f"to plan_into with a tiling that prefetches, and none with prefetch = {NOTHING!r}."
            )
        q, latent, rope_, positions, slots, table = inputs
        out, cache = outputs
        apart = {"q": q, "latent": latent, "rope": rope_, "out": out, "cache": cache}
        for name, tensor in apart.items():
            if tensor.data_ptr() % 16 or any(stride % VECTOR for stride in tensor.stride()[:-1]):
                raise UserError(
                    f"{name} starts at {tensor.data_ptr():#x} with strides {tuple(tensor.stride())}: its rows must "
                    "begin at multiples of 16 bytes."
                )
        for weight in weights:
            if weight.data_ptr() % 16 or weight.stride(1) != 1 or (weight.shape[1] | weight.stride(0)) % VECTOR:
                raise UserError(
                    f"a weight of {tuple(weight.shape)} starts at {weight.data_ptr():#x} with strides "
                    f"{tuple(weight.stride())}: it is prefetched by rows that begin at multiples of 16 bytes and are "
                    "such a multiple long."
                )
        given = (q, latent, rope_, positions, slots, table, out, cache, *(weights or (None, None)))
        return self._make(given, inputs, outputs)

    def plan_empty(self) -> CuteKernel:
        self.require()
        return self._make((), (), ())

    def _make(self, given: Any, inputs: Any, outputs: Any) -> CuteKernel:
        pd, geometry = self.problem, self.tiling.geometry(self.problem)
        kind = host.element_type(pd.dtype)
        index = {"int64": Int64, "int32": Int32}[pd.index]

        def far() -> Any:
            return cute.sym_int64(divisibility=VECTOR)

        def strided(*sizes: Any, inner: tuple[Any, ...] = ()) -> Any:
            outer = tuple(far() for _ in range(len(sizes) - 1 - len(inner)))
            return make_fake_tensor(kind, sizes, (*outer, *inner, 1), assumed_align=16)

        def arguments() -> tuple[Any, ...]:
            n, rows, pages = host.symbols(3)
            into = cute.sym_int32(divisibility=VECTOR)
            weights = [strided(cute.sym_int32(), cute.sym_int32(divisibility=VECTOR)) for _ in range(2)]
            if geometry.prefetch == NOTHING:
                weights = [None, None]
            return (
                strided(n, pd.h, pd.columns),
                strided(n, pd.k),
                strided(n, pd.p),
                host.fake(index, n, align=4 if pd.index == "int32" else 8),
                host.fake(index, n, align=4 if pd.index == "int32" else 8),
                host.fake(Float32, rows, pd.p),
                strided(n, pd.h, into),
                strided(pages, pd.page, pd.width, inner=(pd.width,)),
                *weights,
                geometry,
            )

        return host.stage(self, rope_append, launch_rope_append, "rope_append", arguments, given, inputs, outputs)
