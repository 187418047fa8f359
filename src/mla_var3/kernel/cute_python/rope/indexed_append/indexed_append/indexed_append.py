"""indexed_append v0 in CuTe: packed_append and index_append of the same tokens, in one launch.

    k[t]           ──mean, variance, norm, 64 columns turned──→ scale ──→ codes and scale of slot[t], index cache
    q[t, :, -64:]  ──rotate──→ out[t, :, k:]
    rope[t]        ──rotate, round to bf16──→ plain of slot[t]
    latent[t]      ──largest magnitude of 128 columns, scale──→ codes and scales of slot[t], layout v32

A warp has an item: two tokens' keys of the indexer, or of one token its latent and rope, or 4 · `heads` of its query
heads. Items of the first two kinds are the ones with the longer way, so they come first. Each kind is what it is in
packed_append and index_append, whose pictures say what a lane has:

    indexer's keys   griddepcontrol.wait → position, slot and k in flight → cosines and sines → mean → variance → norm,
                     by weight and bias, which were read before the wait → turn → scale → codes → stores
    key              griddepcontrol.wait → position, slot, rope and latent in flight → cosines and sines
                     → largest of 8 columns, of 16 lanes → scale → codes: 8 bytes a lane → stores
    queries          as in rope_append, whose picture `prims.rotary` has

What has no slot in a cache is not stored there; a position outside of the table turns by NaN. NaN and infinities become
the code 0x7F and do not count for a scale. Scales that are powers of two have an exact reciprocal; others divide,
rounded once.

Runs on sm_90a. The base version. Two launches add up their chains, of which one hides the launch of the other at most;
here the chains of all items run beside each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, Uint32
from cutlass.cute.runtime import make_fake_tensor

from mla_var3.device import Requirement
from mla_var3.errors import UserError
from mla_var3.kernel.cute_python import host
from mla_var3.kernel.cute_python.prims.rotary import AT_A_TIME, LANES, load_turns, turn, turn_queries
from mla_var3.kernel.cute_python.prims.sync import wait_for_launch
from mla_var3.kernel.cute_python.prims.vectors import VECTOR, WARP, load_vector, store_vector, vectors
from mla_var3.packed_cache import E4M3_MAX, SCALE_MIN
from mla_var3.runtime import CuteKernel, KernelPlan, Tiling, Verdict, limits
from mla_var3.workload import indexed_append as append
from mla_var3.workload.index_append import EPS, LEAST
from mla_var3.workload.indexer_logits import PAGE, D

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.workload.indexed_append import IndexedAppendProblem

STEP = WARP * VECTOR  # columns of latent that a warp's vectors have
LATENT = 512  # columns
GROUP = 128 // VECTOR  # lanes that share a scale of a latent
OF_TOKEN = D // VECTOR  # lanes of a token's key of the indexer
TOKENS = WARP // OF_TOKEN  # of a warp, of the indexer's keys
MOST_HEADS = 8  # of a lane
MANY = 65536  # heads of all tokens


# ------------------------------------------------------------------------------------------------ what code is made for
class Turn(NamedTuple):
    """How the indexer's keys turn."""

    interleaved: bool


@dataclass(frozen=True)
class Geometry:
    """What the code is specialised on. h: query heads. columns: of a row of q. page: tokens of a page of the latent
    cache. interleaved, powers: of queries and latents. interleaved_keys, powers_of_keys: of the indexer's keys. heads:
    of a lane. warps: of a CTA."""

    h: int
    columns: int
    page: int
    interleaved: bool
    powers: bool
    interleaved_keys: bool
    powers_of_keys: bool
    heads: int
    warps: int

    @property
    def keys(self) -> Turn:
        return Turn(self.interleaved_keys)

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
class IndexedAppendTiling(Tiling):
    """heads: that a lane turns by the same cosines and sines, 1 to 8. warps: of a CTA."""

    heads: int = 4
    warps: int = 4

    def geometry(self, pd: IndexedAppendProblem) -> Geometry:
        return Geometry(
            pd.h, pd.columns, pd.page, pd.interleaved, pd.powers, pd.interleaved_keys, pd.powers_of_keys, self.heads,
            self.warps,
        )  # fmt: skip

    def validate(self, pd: IndexedAppendProblem, device: Device | None = None) -> Verdict:
        if not 1 <= self.heads <= MOST_HEADS:
            return Verdict.no(f"heads = {self.heads} must be 1 to {MOST_HEADS}")
        if not 1 <= self.warps <= 32:
            return Verdict.no(f"warps = {self.warps} must be 1 to 32")
        items = pd.tokens * (self.geometry(pd).chunks + 2)
        return limits.offsets(items, f"the work of {pd.tokens:,} tokens of q with {pd.h:,} heads")


# ------------------------------------------------------------------------------------------------ device: scales, codes
@cute.jit
def without_infinities(vector: cute.Tensor) -> cute.Tensor:
    """(VECTOR,) bf16 elements with NaN in the place of infinities: x · 0 + x, which is x of other values, -0 too."""
    made = cute.make_rmem_tensor(VECTOR, vector.element_type)
    words, into = cute.recast_tensor(vector, Uint32), cute.recast_tensor(made, Uint32)
    for i in cutlass.range_constexpr(cute.size(words)):
        into[i] = cute.arch.inline_ptx(
            "{ .reg .b32 zero; mov.b32 zero, 0; fma.rn.bf16x2 {$w0}, {$r0}, zero, {$r0}; }",
            write_only_types=[Uint32],
            read_only_args=[words[i]],
        )
    return made


@cute.jit
def largest_of(vector: cute.Tensor, lanes: cutlass.Constexpr) -> Float32:
    """The largest magnitude of (VECTOR,) elements and of those of the other lanes of an aligned group of so many, NaN
    left out."""
    largest, vector = Float32(0.0), without_infinities(vector)
    for i in cutlass.range_constexpr(VECTOR):
        x = Float32(vector[i])
        largest = cute.arch.fmax(largest, cute.arch.fmax(x, -x))
    for step in cutlass.range_constexpr(lanes.bit_length() - 1):
        largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, offset=1 << step))
    return largest


@cute.jit
def quotient(x: Float32, y: Float32) -> Float32:
    """x / y, rounded once whatever the compiler takes for fast."""
    return cute.arch.inline_ptx("div.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[x, y])


@cute.jit
def root(x: Float32) -> Float32:
    return cute.arch.inline_ptx("sqrt.rn.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


@cute.jit
def power_above(x: Float32) -> Float32:
    """The smallest power of two of at least x, which is a normal number."""
    return Int32((x.bitcast(Int32) + 0x7FFFFF) & ~0x7FFFFF).bitcast(Float32)


@cute.jit
def codes_of(vector: cute.Tensor, scale: Float32, power: cutlass.Constexpr) -> cute.Tensor:
    """(VECTOR / 4,) Uint32: the codes of (VECTOR,) elements over their scale, at most 448; 0x7F of NaN. power: that the
    scale is a power of two, so that its reciprocal is exact."""
    codes, over = cute.make_rmem_tensor(VECTOR // 4, Uint32), cute.make_rmem_tensor(VECTOR, Float32)
    reciprocal = Int32((254 << 23) - scale.bitcast(Int32)).bitcast(Float32) if cutlass.const_expr(power) else scale
    for i in cutlass.range_constexpr(VECTOR):
        x = Float32(vector[i])
        over[i] = x * reciprocal if cutlass.const_expr(power) else quotient(x, scale)
    for i in cutlass.range_constexpr(VECTOR // 4):
        codes[i] = cute.arch.inline_ptx(
            "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, {$r1}, {$r0}; "
            "cvt.rn.satfinite.e4m3x2.f32 high, {$r3}, {$r2}; mov.b32 {$w0}, {low, high}; }",
            write_only_types=[Uint32],
            read_only_args=[over[4 * i], over[4 * i + 1], over[4 * i + 2], over[4 * i + 3]],
        )
    return codes


@cute.jit
def store_codes(codes: cute.Tensor, target: cute.Pointer):
    """Eight of them, at a multiple of 8 bytes."""
    cute.autovec_copy(codes, cute.make_tensor(cute.recast_ptr(target, dtype=Uint32), cute.make_layout(VECTOR // 4)))


@cute.jit
def row_of(part: cute.Tensor, slot: Any, page: cutlass.Constexpr, alignment: cutlass.Constexpr):
    """Where a slot's row begins in a part of a cache, (pages, page, its columns), at a multiple of `alignment`
    elements."""
    first = cute.assume(Int64(slot // page) * part.stride[0], divby=alignment)
    return part.iterator + first + cute.assume(Int64(slot % page) * part.stride[1], divby=alignment)


# ------------------------------------------------------------------------------------------------ device: latents
class Cache(NamedTuple):
    """The parts of a cache of layout v32, in global memory."""

    codes: cute.Tensor  # (pages, page, 512) uint8, rows at multiples of 8 bytes
    scales: cute.Tensor  # (pages, page, 4) int32
    plain: cute.Tensor  # (pages, page, ROPE) bf16, rows at multiples of 8 elements


@cute.jit
def append_latent(
    latent: cute.Tensor,
    rope_: cute.Tensor,
    cache: Cache,
    positions: cute.Tensor,
    slots: cute.Tensor,
    table: cute.Tensor,
    token: Int32,
    lane: Int32,
    shape: cutlass.Constexpr,
):
    """An item of a token's latent and rope: the first lanes turn its rope, and all of them quantise the latent."""
    codes, scales, plain = cache
    count = cutlass.const_expr(LATENT // STEP)
    place = lane % LANES  # the other lanes load the same and store nothing
    from_rope = rope_.iterator + cute.assume(Int64(token) * rope_.stride[0], divby=VECTOR)
    from_rope = from_rope + cute.assume(place * VECTOR, divby=VECTOR)
    column = cute.assume(lane * VECTOR, divby=VECTOR)
    from_latent = latent.iterator + cute.assume(Int64(token) * latent.stride[0], divby=VECTOR) + column
    wait_for_launch(from_rope.toint())
    position, slot = positions[token], slots[token]
    end, held = vectors(BFloat16, 1)[None, 0], vectors(BFloat16, count)
    load_vector(end, from_rope)
    for i in cutlass.range_constexpr(count):
        load_vector(held[None, i], from_latent + i * STEP)
    cute.arch.sync_warp()
    turns = load_turns(table, position, place, shape)
    cute.arch.sync_warp()
    turn(end, turns, shape)
    # Shuffles, so all lanes take part, whether the key is stored or not.
    shared = cute.make_rmem_tensor(count, Float32)
    for i in cutlass.range_constexpr(count):
        largest = largest_of(held[None, i], GROUP)
        shared[i] = cute.arch.fmax(quotient(largest, Float32(E4M3_MAX)), Float32(SCALE_MIN))
        if cutlass.const_expr(shape.powers):
            shared[i] = power_above(shared[i])
    if slot >= 0 and Int64(slot) < Int64(codes.shape[0]) * shape.page:
        to_codes = row_of(codes, slot, shape.page, VECTOR)
        for i in cutlass.range_constexpr(count):
            made = codes_of(without_infinities(held[None, i]), shared[i], shape.powers)
            store_codes(made, to_codes + column + i * STEP)
            if lane % GROUP == 0:
                to_scale = row_of(scales, slot, shape.page, 1) + (i * (WARP // GROUP) + lane // GROUP)
                cute.make_tensor(to_scale, cute.make_layout(1))[0] = shared[i].bitcast(Int32)
        if lane < LANES:
            store_vector(end, row_of(plain, slot, shape.page, VECTOR) + column)


# ------------------------------------------------------------------------------------------------ device: keys
class Keys(NamedTuple):
    """Of the indexer, in global memory."""

    k: cute.Tensor  # (n, D) bf16, rows at multiples of 16 bytes
    weight: cute.Tensor  # (D,) float32
    bias: cute.Tensor  # (D,) float32
    codes: cute.Tensor  # (pages, PAGE, D) uint8, pages at multiples of 16 bytes
    scales: cute.Tensor  # (pages, PAGE) int32, of the same pages


@cute.jit
def of_token(value: Float32, largest: cutlass.Constexpr) -> Float32:
    """The sum of a value over the lanes of a token, or the largest that is not NaN; the same bits in each."""
    for step in cutlass.range_constexpr(OF_TOKEN.bit_length() - 1):
        other = cute.arch.shuffle_sync_bfly(value, offset=1 << step)
        value = cute.arch.fmax(value, other) if cutlass.const_expr(largest) else value + other
    return value


@cute.jit
def normed(held: cute.Tensor, weight: cute.Tensor, bias: cute.Tensor):
    """Norms a token's columns, a lane's (VECTOR,) bf16 of them, in registers. weight, bias: the lane's, float32."""
    x = cute.make_rmem_tensor(VECTOR, Float32)
    total, squares = Float32(0.0), Float32(0.0)
    for i in cutlass.range_constexpr(VECTOR):
        x[i] = Float32(held[i])
        total = total + x[i]
    mean = of_token(total, False) * (1.0 / D)
    for i in cutlass.range_constexpr(VECTOR):
        x[i] = x[i] - mean
        squares = squares + x[i] * x[i]
    reciprocal = quotient(Float32(1.0), root(of_token(squares, False) * (1.0 / D) + EPS))
    for i in cutlass.range_constexpr(VECTOR):
        held[i] = (x[i] * reciprocal * weight[i] + bias[i]).to(BFloat16)


@cute.jit
def scale_of(held: cute.Tensor, powers: cutlass.Constexpr) -> Float32:
    """The scale of a token's key, by all of its lanes."""
    largest = Float32(LEAST)
    for i in cutlass.range_constexpr(VECTOR):
        x = Float32(held[i])
        largest = cute.arch.fmax(largest, cute.arch.fmax(x, -x))
    scale = quotient(of_token(largest, True), Float32(E4M3_MAX))
    return power_above(scale) if cutlass.const_expr(powers) else scale


@cute.jit
def append_keys(
    keys: cutlass.Constexpr,
    positions: cute.Tensor,
    slots: cute.Tensor,
    table: cute.Tensor,
    item: Int32,
    lane: Int32,
    shape: cutlass.Constexpr,
):
    """An item of the indexer's keys: half of the warp has a token."""
    k, weight, bias, codes, scales = keys
    place = lane % OF_TOKEN
    token = item * TOKENS + lane // OF_TOKEN
    there = token < k.shape[0]
    # Shuffles, so all lanes take part: those without a token take the last one, and store nothing.
    token = cutlass.min(token, k.shape[0] - 1)
    column = cute.assume(place * VECTOR, divby=VECTOR)
    factors = [cute.make_rmem_tensor(VECTOR, Float32) for _ in range(2)]
    for source, target in zip((weight, bias), factors, strict=True):
        cute.autovec_copy(cute.make_tensor(source.iterator + column, cute.make_layout(VECTOR)), target)
    row = k.iterator + cute.assume(Int64(token) * k.stride[0], divby=VECTOR) + column
    wait_for_launch(row.toint())
    position, slot = positions[token], slots[token]
    held = vectors(BFloat16, 1)[None, 0]
    load_vector(held, row)
    turns = load_turns(table, position, place % LANES, shape.keys)
    normed(held, *factors)
    turned = vectors(BFloat16, 1)[None, 0]
    turned.store(held.load())
    turn(turned, turns, shape.keys)
    if place < LANES:
        held.store(turned.load())
    scale = scale_of(held, shape.powers_of_keys)
    if there and slot >= 0 and Int64(slot) < Int64(codes.shape[0]) * PAGE:
        page, at = Int64(slot // PAGE), Int64(slot % PAGE)
        to = codes.iterator + cute.assume(page * codes.stride[0], divby=16) + cute.assume(at * D, divby=D) + column
        store_codes(codes_of(held, scale, shape.powers_of_keys), to)
        if place == 0:
            scales[page, at] = scale.bitcast(Int32)


# ------------------------------------------------------------------------------------------------ device: the kernel
@cute.kernel
def indexed_append(
    q: cute.Tensor,  # (n, h, columns), global memory; tokens and heads apart by multiples of 8 elements
    latent: cute.Tensor,  # (n, 512), global memory, rows likewise
    rope_: cute.Tensor,  # (n, ROPE), global memory, rows likewise
    positions: cute.Tensor,  # (n,) int32 or int64
    slots: cute.Tensor,  # (n,) int32 or int64; outside of a cache: not written there
    table: cute.Tensor,  # (positions, ROPE) float32, global memory: cosines, sines
    out: cute.Tensor,  # (n, h, any, whose last ROPE columns are written), global memory, likewise; may be q
    cache: Cache,
    keys: Keys,
    shape: cutlass.Constexpr,  # Geometry
):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    cute.arch.griddepcontrol_launch_dependents()
    warp, lane = cute.arch.make_warp_uniform(thread // WARP), thread % WARP
    item = block * shape.warps + warp
    of_keys = (q.shape[0] + (TOKENS - 1)) // TOKENS
    if item < of_keys:
        append_keys(keys, positions, slots, table, item, lane, shape)
    else:
        item = item - of_keys
        token, chunk = item // (shape.chunks + 1), item % (shape.chunks + 1)
        if token < q.shape[0]:
            if chunk == 0:
                append_latent(latent, rope_, cache, positions, slots, table, token, lane, shape)
            else:
                turn_queries(q, out, positions, table, token, chunk - 1, lane, shape)


indexed_append.set_name_prefix("indexed_append", remove_cutlass_symbol=True, keep_mangled_name=False)


# ------------------------------------------------------------------------------------------------ host
@cute.jit
def launch_indexed_append(
    q: cute.Tensor,
    latent: cute.Tensor,
    rope_: cute.Tensor,
    positions: cute.Tensor,
    slots: cute.Tensor,
    table: cute.Tensor,
    k: cute.Tensor,
    weight: cute.Tensor,
    bias: cute.Tensor,
    out: cute.Tensor,
    codes: cute.Tensor,
    scales: cute.Tensor,
    plain: cute.Tensor,
    index_codes: cute.Tensor,
    index_scales: cute.Tensor,
    geometry: cutlass.Constexpr,
    stream: CUstream,
):
    """Launches a warp for every item, as a programmatic dependent."""
    items = q.shape[0] * (geometry.chunks + 1) + (q.shape[0] + (TOKENS - 1)) // TOKENS
    keys = Keys(k, weight, bias, index_codes, index_scales)
    indexed_append(
        q, latent, rope_, positions, slots, table, out, Cache(codes, scales, plain), keys, geometry
    ).launch(
        grid=((items + geometry.warps - 1) // geometry.warps, 1, 1),
        block=(geometry.warps * WARP, 1, 1),
        stream=stream,
        use_pdl=True,
    )  # fmt: skip


def takes(pd: IndexedAppendProblem) -> Verdict:
    for name, value in (("columns", pd.columns), ("rest", pd.rest), ("rest_of_keys", pd.rest_of_keys)):
        if value % VECTOR:
            return Verdict.no(f"{name} = {value}: rows are read in vectors of {VECTOR} elements, use a multiple of it")
    return Verdict.yes()


# ------------------------------------------------------------------------------------------------ plan
class IndexedAppendPlan(KernelPlan):
    """Inputs and outputs of `workload.indexed_append`."""

    workload = append.WORKLOAD
    tiling_type = IndexedAppendTiling
    requires = Requirement(archs=("sm_90a",), dtypes=("bf16",), problem=takes)

    def default_tiling(self) -> IndexedAppendTiling:
        # As many warps as there can be, or many heads, of which four have one row of the table.
        return IndexedAppendTiling(4 if self.problem.tokens * self.problem.h > MANY else 1, 4)

    def autotune_configs(self) -> list[Tiling]:
        most = max(1, -(-self.problem.h // AT_A_TIME))
        return [IndexedAppendTiling(heads, warps) for heads in (1, 2, 4, 8) if heads <= most for warps in (1, 2, 4, 8)]

    def plan(self, *inputs: Any) -> CuteKernel:
        return self.plan_into(inputs, append.new_outputs(self.problem, inputs[0]))

    def plan_into(self, inputs: Any, outputs: Any) -> CuteKernel:
        """A kernel on outputs of the caller's: out (n, h, any), of which the last 64 columns are written and which may
        be q, and the parts of both caches, whose pages may lie apart. Raises `UserError` where vectors do not fit."""
        self.require()
        q, latent, rope_ = inputs[:3]
        k, weight, bias = inputs[6:]
        named = {"q": q, "latent": latent, "rope": rope_, "k": k, "weight": weight, "bias": bias, "out": outputs[0]}
        named |= {"the cache": outputs[1], "the index cache": outputs[4]}
        for name, tensor in named.items():
            steps = tensor.stride()[:1] if tensor is outputs[1] or tensor is outputs[4] else tensor.stride()[:-1]
            if tensor.data_ptr() % 16 or any(step * tensor.element_size() % 16 for step in steps):
                raise UserError(
                    f"{name} starts at {tensor.data_ptr():#x} with strides {tuple(tensor.stride())}: its rows, and "
                    "pages of a cache, must begin at multiples of 16 bytes."
                )
        return self._make((*inputs, *outputs), inputs, outputs)

    def plan_empty(self) -> CuteKernel:
        self.require()
        return self._make((), (), ())

    def _make(self, given: Any, inputs: Any, outputs: Any) -> CuteKernel:
        pd, geometry = self.problem, self.tiling.geometry(self.problem)
        index, align = {"int64": (Int64, 8), "int32": (Int32, 4)}[pd.index]

        def strided(*sizes: Any) -> Any:
            outer = tuple(cute.sym_int64(divisibility=VECTOR) for _ in sizes[1:])
            return make_fake_tensor(BFloat16, sizes, (*outer, 1), assumed_align=16)

        def arguments() -> tuple[Any, ...]:
            n, rows, pages, index_pages = host.symbols(4)
            row = pd.cache.token_bytes
            apart, words = cute.sym_int64(divisibility=16), cute.sym_int64(divisibility=4)
            return (
                strided(n, pd.h, pd.columns),
                strided(n, pd.k),
                strided(n, pd.p),
                host.fake(index, n, align=align),
                host.fake(index, n, align=align),
                host.fake(Float32, rows, pd.p),
                strided(n, D),
                host.fake(Float32, D),
                host.fake(Float32, D),
                strided(n, pd.h, cute.sym_int32(divisibility=VECTOR)),
                make_fake_tensor(Uint8, (pages, pd.page, pd.k), (apart, row, 1), assumed_align=16),
                make_fake_tensor(
                    Int32, (pages, pd.page, pd.cache.scales), (cute.sym_int64(divisibility=4), row // 4, 1),
                    assumed_align=16,
                ),
                make_fake_tensor(
                    BFloat16, (pages, pd.page, pd.p), (cute.sym_int64(divisibility=VECTOR), row // 2, 1),
                    assumed_align=16,
                ),
                make_fake_tensor(
                    Uint8, (index_pages, PAGE, D), (cute.sym_int64(divisibility=16), D, 1), assumed_align=16
                ),
                make_fake_tensor(Int32, (index_pages, PAGE), (words, 1), assumed_align=4),
                geometry,
            )  # fmt: skip

        return host.stage(
            self, indexed_append, launch_indexed_append, "indexed_append", arguments, given, inputs, outputs
        )  # fmt: skip
