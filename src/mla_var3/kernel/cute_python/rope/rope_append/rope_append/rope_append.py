"""rope_append v0 in CuTe: rotates new tokens' q and k, and writes latent and rope into the paged cache, in one launch.

    q[t, :, -64:]  ──rotate──→ out[t, :, 512:576]
    rope[t]        ──rotate──→ cache[slot[t]][512:576]        latent[t]  ──copy──→ cache[slot[t]][0:512]

A warp has an item: of one token either 4 · `heads` query heads, or its key. Eight lanes take a head's 64 columns, 16
bytes each, so that whole lines of 128 bytes are read and written; halves are exchanged by shuffles (`prims.rotary`):

    lane of eight   0      1       2       3       4       5       6       7
    columns         0..7   8..15   16..23  24..31  32..39  40..47  48..55  56..63
    interleaved     pairs (2i, 2i + 1) lie in one lane     halves: pairs (i, i + 32) in two, four lanes apart

    item   griddepcontrol.wait → position, vectors of q (all of them in flight) → its cosines and sines
           → x cos - y sin, y cos + x sin in float32 → stores
    key    griddepcontrol.wait → position, slot, rope and latent in flight → the same; nothing is stored where the slot
           is outside of the cache. A position outside of the table turns by NaN

A lane turns `heads` heads by the same cosines and sines. One warp an item and no shared memory: warps do not wait for
one another. What lies in q and out may be the same memory, for a lane has read what it writes.

Runs on sm_90a. Dependents may start as soon as all CTAs have begun; they wait for this grid's end before they read. The
base version. One launch for both rotations and the append is the idea of vLLM's and FlashInfer's fused kernels.
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
from mla_var3.errors import UserError
from mla_var3.kernel.cute_python import host
from mla_var3.kernel.cute_python.prims.rotary import AT_A_TIME, LANES, ROPE, load_turns, turn, turn_queries
from mla_var3.kernel.cute_python.prims.sync import wait_for_launch
from mla_var3.kernel.cute_python.prims.vectors import VECTOR, WARP, load_vector, store_vector, vectors
from mla_var3.runtime import CuteKernel, KernelPlan, Tiling, Verdict, limits
from mla_var3.workload import rope

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.workload.rope import RopeProblem

STEP = WARP * VECTOR  # columns of latent that a warp's vectors have
MOST_LATENT = 4 * STEP
MOST_HEADS = 8  # of a lane
FEW, SOME = 8192, 65536  # heads of all tokens


# ------------------------------------------------------------------------------------------------ what code is made for
@dataclass(frozen=True)
class Geometry:
    """What the code is specialised on. h: query heads. latent: columns. columns: of a row of q. page: tokens of a cache
    page. heads: of a lane. warps: of a CTA. eager: of `RopeAppendTiling`."""

    h: int
    latent: int
    columns: int
    page: int
    interleaved: bool
    heads: int
    warps: int
    eager: bool

    @property
    def chunks(self) -> int:
        """Items of a token's query heads."""
        return -(-self.h // (AT_A_TIME * self.heads))

    @property
    def exact(self) -> bool:
        """Whether every lane has all of its heads."""
        return self.h % (AT_A_TIME * self.heads) == 0


# ------------------------------------------------------------------------------------------------ tiling
@dataclass(frozen=True)
class RopeAppendTiling(Tiling):
    """heads: that a lane turns by the same cosines and sines, 1 to 8. warps: of a CTA. eager: the next
    kernel's CTAs may come at once, as this package's may, which wait before they read."""

    heads: int = 4
    warps: int = 4
    eager: bool = True

    def geometry(self, pd: RopeProblem) -> Geometry:
        return Geometry(pd.h, pd.k, pd.columns, pd.page, pd.interleaved, self.heads, self.warps, self.eager)

    def validate(self, pd: RopeProblem, device: Device | None = None) -> Verdict:
        if not 1 <= self.heads <= MOST_HEADS:
            return Verdict.no(f"heads = {self.heads} must be 1 to {MOST_HEADS}")
        if not 1 <= self.warps <= 32:
            return Verdict.no(f"warps = {self.warps} must be 1 to 32")
        items = pd.tokens * (self.geometry(pd).chunks + 1)
        return limits.offsets(items, f"the work of {pd.tokens:,} tokens of q with {pd.h:,} heads")


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
    end, held = vectors(rope_.element_type, 1)[None, 0], vectors(latent.element_type, count)
    load_vector(end, from_rope)
    held.fill(0)
    for i in cutlass.range_constexpr(count):
        if lane * VECTOR + i * STEP < shape.latent if cutlass.const_expr(shape.latent % STEP != 0) else True:
            load_vector(held[None, i], from_latent + i * STEP)
    cute.arch.sync_warp()
    turns = load_turns(table, position, place, shape)
    cute.arch.sync_warp()
    turn(end, turns, shape)
    if slot >= 0 and Int64(slot) < Int64(cache.shape[0]) * shape.page:
        width = cutlass.const_expr(shape.latent + ROPE)
        page = cute.assume(Int64(slot // shape.page) * cache.stride[0], divby=VECTOR)
        row = cache.iterator + page + cute.assume(Int64(slot % shape.page) * width, divby=VECTOR)
        for i in cutlass.range_constexpr(count):
            if lane * VECTOR + i * STEP < shape.latent if cutlass.const_expr(shape.latent % STEP != 0) else True:
                store_vector(held[None, i], row + column + i * STEP)
        if lane < LANES:
            store_vector(end, row + column + shape.latent)


@cute.kernel
def rope_append(
    q: cute.Tensor,  # (n, h, columns), global memory; tokens and heads apart by multiples of 8 elements
    latent: cute.Tensor,  # (n, latent), global memory, rows likewise
    rope_: cute.Tensor,  # (n, ROPE), global memory, rows likewise
    positions: cute.Tensor,  # (n,) int32 or int64
    slots: cute.Tensor,  # (n,) int32 or int64; outside of the cache: not written
    table: cute.Tensor,  # (positions, ROPE) float32, global memory: cosines, sines
    out: cute.Tensor,  # (n, h, any, whose last ROPE columns are written), global memory, likewise; may be q
    cache: cute.Tensor,  # (pages, page, latent + ROPE), global memory, pages likewise
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
    geometry: cutlass.Constexpr,
    stream: CUstream,
):
    """Launches a warp for every item, as a programmatic dependent."""
    items = q.shape[0] * (geometry.chunks + 1)
    rope_append(q, latent, rope_, positions, slots, table, out, cache, geometry).launch(
        grid=((items + geometry.warps - 1) // geometry.warps, 1, 1),
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
        # As many warps as there can be; or, where memory is what they wait for, four heads for one row of the table.
        heads = self.problem.tokens * self.problem.h
        if heads > SOME:
            return RopeAppendTiling(4, 4)
        return RopeAppendTiling(1, 4 if heads <= FEW else 8)

    def autotune_configs(self) -> list[Tiling]:
        most = -(-self.problem.h // AT_A_TIME)
        return [RopeAppendTiling(heads, warps) for heads in (1, 2, 4, 8) if heads <= most for warps in (1, 2, 4, 8)]

    def plan(self, *inputs: Any) -> CuteKernel:
        return self.plan_into(inputs, rope.new_outputs(self.problem, inputs[0]))

    def plan_into(self, inputs: Any, outputs: Any) -> CuteKernel:
        """A kernel on outputs of the caller's: out (n, h, any), of which the last p columns are written and which may
        be q, and the cache (pages, page, k + p), whose pages may lie apart. Raises `UserError` where vectors of 16
        bytes do not fit."""
        self.require()
        q, latent, rope_, positions, slots, table = inputs
        out, cache = outputs
        apart = {"q": q, "latent": latent, "rope": rope_, "out": out, "cache": cache}
        for name, tensor in apart.items():
            if tensor.data_ptr() % 16 or any(stride % VECTOR for stride in tensor.stride()[:-1]):
                raise UserError(
                    f"{name} starts at {tensor.data_ptr():#x} with strides {tuple(tensor.stride())}: its rows must "
                    "begin at multiples of 16 bytes."
                )
        given = (q, latent, rope_, positions, slots, table, out, cache)
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
            return (
                strided(n, pd.h, pd.columns),
                strided(n, pd.k),
                strided(n, pd.p),
                host.fake(index, n, align=4 if pd.index == "int32" else 8),
                host.fake(index, n, align=4 if pd.index == "int32" else 8),
                host.fake(Float32, rows, pd.p),
                strided(n, pd.h, into),
                strided(pages, pd.page, pd.width, inner=(pd.width,)),
                geometry,
            )

        return host.stage(self, rope_append, launch_rope_append, "rope_append", arguments, given, inputs, outputs)
