"""packed_append v0 in CuTe: rotates new tokens' q and k, and writes latent and rope into a packed cache, in one launch.

    q[t, :, -64:]  ──rotate──→ out[t, :, k:]
    rope[t]        ──rotate, round to bf16──→ plain of slot[t]; of layout flat from there ──scale──→ e4m3
    latent[t]      ──largest magnitude of a scale's columns, scale──→ codes and scales of slot[t]

A warp has an item: of one token either 4 · `heads` query heads, or its key. Queries go as in rope_append, whose picture
`prims.rotary` has. Of a latent a lane has 8 columns in each 256, so that the columns of a scale are those of 16 lanes
(v32) or 8 (v4), which find their largest magnitude by shuffles:

    key    griddepcontrol.wait → position, slot, rope and latent in flight → its cosines and sines
           → largest of 8 columns, of the lanes → scale → codes: 8 bytes a lane → stores; nothing where the slot is
           outside of the cache. A position outside of the table turns by NaN

Infinities of columns that become e4m3 are NaN to the maximum, which passes over NaN, and to the conversion, which keeps
it as the code 0x7F and would cut infinities to 448. Scales that are powers of two have an exact reciprocal; others
divide, rounded once. In the layouts of V4.1 rope columns, rounded to bf16, become codes like those of the latent, with
scales of their own; in FP4 codes are e2m1, with scales that are e4m3, NaN where one of their columns is not finite.
sm_90 has no conversion to e2m1: it is made of roundings to whole numbers (`e2m1_codes`).

Caches without rope columns have a kernel of their own, `latent_append`. Its items are those of keys, which wait for no
row of the table, and their latents are quantised as in the layouts v32 and flat.

Runs on sm_90a. The base version: rope_append with bytes for a row of the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint8, Uint32
from cutlass.cute.runtime import make_fake_tensor

from mla_var3.device import Requirement
from mla_var3.errors import UserError
from mla_var3.kernel.cute_python import host
from mla_var3.kernel.cute_python.prims.rotary import AT_A_TIME, LANES, ROPE, load_turns, turn, turn_queries
from mla_var3.kernel.cute_python.prims.sync import wait_for_launch
from mla_var3.kernel.cute_python.prims.vectors import VECTOR, WARP, load_vector, store_vector, vectors
from mla_var3.packed_cache import E2M1_MAX, E2M1_SCALE_MIN, E4M3_MAX, E4M3_NAN, SCALE_MIN, V41, layout_of
from mla_var3.runtime import CuteKernel, KernelPlan, Tiling, Verdict, limits
from mla_var3.workload import packed_append as append

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.workload.packed_append import PackedAppendProblem

STEP = WARP * VECTOR  # columns of latent that a warp's vectors have
INFINITE = 0x7F80  # bits of the magnitude of infinity in bf16
MOST_HEADS = 8  # of a lane
FEW, SOME = 8192, 65536  # heads of all tokens


# ------------------------------------------------------------------------------------------------ what code is made for
@dataclass(frozen=True)
class Geometry:
    """What the code is specialised on. h: query heads. layout: of the cache. columns: of a row of q. page: tokens of a
    cache page. powers: whether scales are powers of two. heads: of a lane. warps: of a CTA."""

    h: int
    layout: str
    columns: int
    page: int
    interleaved: bool
    powers: bool
    heads: int
    warps: int

    @property
    def latent(self) -> int:
        """Columns."""
        return append.latent_columns(layout_of(self.layout))

    @property
    def lanes(self) -> int:
        """That share a scale in each 256 columns; 0 where the whole cache has one."""
        return layout_of(self.layout).tile // VECTOR

    @property
    def rope_scales(self) -> int:
        """Scales in front of those of rope columns; 0 where these have none."""
        return self.latent // layout_of(self.layout).tile if self.layout in V41 else 0

    @property
    def fp4(self) -> bool:
        """Whether codes are e2m1."""
        return layout_of(self.layout).bits == 4

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
class PackedAppendTiling(Tiling):
    """heads: that a lane turns by the same cosines and sines, 1 to 8. warps: of a CTA."""

    heads: int = 4
    warps: int = 4

    def geometry(self, pd: PackedAppendProblem) -> Geometry:
        return Geometry(
            pd.h, pd.layout, pd.columns, pd.page, pd.interleaved, pd.powers, self.heads, self.warps
        )  # fmt: skip

    def validate(self, pd: PackedAppendProblem, device: Device | None = None) -> Verdict:
        if not 1 <= self.heads <= MOST_HEADS:
            return Verdict.no(f"heads = {self.heads} must be 1 to {MOST_HEADS}")
        if not 1 <= self.warps <= 32:
            return Verdict.no(f"warps = {self.warps} must be 1 to 32")
        if pd.no_rope:
            return limits.offsets(pd.tokens, f"latent has {pd.tokens:,} tokens")
        items = pd.tokens * (self.geometry(pd).chunks + 1)
        return limits.offsets(items, f"the work of {pd.tokens:,} tokens of q with {pd.h:,} heads")


# ------------------------------------------------------------------------------------------------ device
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
def bits_of(x: Float32) -> Int32:
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x])


@cute.jit
def float_of(bits: Int32) -> Float32:
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[bits])


@cute.jit
def power_above(x: Float32) -> Float32:
    """The smallest power of two of at least x, which is a normal number."""
    return float_of((bits_of(x) + 0x7FFFFF) & ~0x7FFFFF)


@cute.jit
def quotient(x: Float32, y: Float32) -> Float32:
    """x / y, rounded once whatever the compiler takes for fast."""
    return cute.arch.inline_ptx("div.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[x, y])


@cute.jit
def e4m3_codes(vector: cute.Tensor, scale: Float32, power: cutlass.Constexpr) -> cute.Tensor:
    """(VECTOR / 4,) Uint32: the codes of (VECTOR,) elements over their scale, at most 448; 0x7F of NaN. power: that the
    scale is a power of two, so that its reciprocal is exact."""
    codes, vector = cute.make_rmem_tensor(VECTOR // 4, Uint32), without_infinities(vector)
    over = cute.make_rmem_tensor(VECTOR, Float32)
    reciprocal = float_of((254 << 23) - bits_of(scale)) if cutlass.const_expr(power) else scale
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
def e4m3_scale(vector: cute.Tensor, lanes: cutlass.Constexpr) -> Int32:
    """The bits of the e4m3 scale of (VECTOR,) elements and those of the other lanes of an aligned group, of e2m1 codes:
    the largest magnitude over 6, or NaN where one of them is not finite. Magnitudes are compared by their bits, where
    NaN and infinities are above all others."""
    words, most = cute.recast_tensor(vector, Int32), Int32(0)
    for i in cutlass.range_constexpr(cute.size(words)):
        for half in cutlass.range_constexpr(2):
            most = cutlass.max(most, (words[i] >> (16 * half)) & 0x7FFF)
    for step in cutlass.range_constexpr(lanes.bit_length() - 1):
        most = cutlass.max(most, cute.arch.shuffle_sync_bfly(most, offset=1 << step))
    scale = cute.arch.fmax(quotient(float_of(most << 16), Float32(E2M1_MAX)), Float32(E2M1_SCALE_MIN))
    bits = cute.arch.inline_ptx(
        "{ .reg .b16 pair; cvt.rn.satfinite.e4m3x2.f32 pair, {$r1}, {$r0}; cvt.u32.u16 {$w0}, pair; }",
        write_only_types=[Int32],
        read_only_args=[scale, Float32(0.0)],
    )
    return cutlass.select_(most < INFINITE, bits, Int32(E4M3_NAN))


@cute.jit
def e2m1_codes(vector: cute.Tensor, bits: Int32) -> Uint32:
    """The codes of (VECTOR,) elements over their scale, the even ones in the lower halves of bytes; 0 where it is NaN.
    bits: of the e4m3 scale. e2m1 has whole numbers of halves below 2, of ones below 4, and of twos up to 6: these are 0
    to 4, 2 to 4, and 2 to 3, to which 0, 2 and 4 are added."""
    scale = cute.arch.inline_ptx(
        "{ .reg .b16 pair, low, high; .reg .b32 both; cvt.u16.u32 pair, {$r0}; cvt.rn.f16x2.e4m3x2 both, pair; "
        "mov.b32 {low, high}, both; cvt.f32.f16 {$w0}, low; }",
        write_only_types=[Float32],
        read_only_args=[bits],
    )
    found = Int32(0)
    for i in cutlass.range_constexpr(VECTOR):
        over = quotient(Float32(vector[i]), scale)
        size = cute.arch.fmin(cute.arch.fmax(over, -over), Float32(E2M1_MAX))
        small, large = size < 2.0, size >= 4.0
        unit = cutlass.select_(small, Float32(2.0), cutlass.select_(large, Float32(0.5), Float32(1.0)))
        more = cutlass.select_(small, Int32(0), cutlass.select_(large, Int32(4), Int32(2)))
        found = found | (rounded(size * unit) + more | ((bits_of(over) >> 28) & 8)) << (4 * i)
    return Uint32(cutlass.select_(bits != E4M3_NAN, found, Int32(0)))


@cute.jit
def rounded(x: Float32) -> Int32:
    """The nearest whole number, ties to even."""
    return cute.arch.inline_ptx("cvt.rni.s32.f32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x])


@cute.jit
def row_of(part: cute.Tensor, slot: Any, alignment: cutlass.Constexpr, shape: cutlass.Constexpr):
    """Where a slot's row begins in a part of the cache, (pages, page, its columns), at a multiple of `alignment`
    elements."""
    page = cute.assume(Int64(slot // shape.page) * part.stride[0], divby=alignment)
    return part.iterator + page + cute.assume(Int64(slot % shape.page) * part.stride[1], divby=alignment)


@cute.jit
def store_codes(codes: cute.Tensor, target: cute.Pointer):
    """Eight of them, aligned to the bytes that they take: 8, or 4 of e2m1."""
    into = cute.make_tensor(cute.recast_ptr(target, dtype=Uint32), cute.make_layout(cute.size(codes)))
    cute.autovec_copy(codes, into)


class Cache(NamedTuple):
    """The parts of a packed cache, in global memory. plain: None where there are no rope columns."""

    codes: cute.Tensor  # (pages, page, bytes of the latent's codes) uint8, rows at multiples of 8 bytes
    scales: cute.Tensor  # (pages, page, scales) int32 or uint8; (1,) float32 of flat layouts
    plain: Any  # (pages, page, ROPE) bf16, or codes in uint8, rows at multiples of 8 elements


@cute.jit
def store_quantised(
    vector: cute.Tensor, target: cute.Pointer, scale: Any, to_scale: cute.Pointer, lane: Int32,
    shape: cutlass.Constexpr,
):  # fmt: skip
    """A lane's codes of a layout of V4.1 and, by the first lane of those that share one, their scale: bits of e4m3, or
    a power of two in float32."""
    if cutlass.const_expr(shape.fp4):
        codes, bits = cute.make_rmem_tensor(1, Uint32), scale
        codes[0] = e2m1_codes(vector, scale)
        store_codes(codes, target)
    else:
        bits = bits_of(scale) >> 23
        store_codes(e4m3_codes(vector, scale, True), target)
    if lane % shape.lanes == 0:
        cute.make_tensor(to_scale, cute.make_layout(1))[0] = bits.to(Uint8)


@cute.jit
def append_v41(latent: cute.Tensor, rope_: cute.Tensor, cache: Cache, slot: Any, lane: Int32, shape: cutlass.Constexpr):
    """Quantises and stores a key in a layout of V4.1. latent (VECTOR, count) and rope_ (VECTOR,): the lane's columns;
    those of rope_ are the same in lanes LANES apart."""
    codes, scales, plain = cache
    count = cutlass.const_expr(latent.shape[1])
    parts = [latent[None, i] for i in range(count)] + [rope_]
    # Shuffles, so all lanes take part, whether the key is stored or not.
    if cutlass.const_expr(shape.fp4):
        shared = [e4m3_scale(part, shape.lanes) for part in parts]
    else:
        largest = [quotient(largest_of(part, shape.lanes), Float32(E4M3_MAX)) for part in parts]
        shared = [power_above(cute.arch.fmax(x, Float32(SCALE_MIN))) for x in largest]
    if slot >= 0 and Int64(slot) < Int64(codes.shape[0]) * shape.page:
        step = cutlass.const_expr(VECTOR // 2 if shape.fp4 else VECTOR)  # bytes of a lane's codes
        column, group = cute.assume(lane * step, divby=step), lane // shape.lanes
        to_codes, to_scales = row_of(codes, slot, step, shape), row_of(scales, slot, 1, shape)
        for i in cutlass.range_constexpr(count):
            if lane * VECTOR + i * STEP < shape.latent:
                to_scale = to_scales + (i * (WARP // shape.lanes) + group)
                store_quantised(parts[i], to_codes + column + i * WARP * step, shared[i], to_scale, lane, shape)
        if lane < LANES:
            to_plain, to_scale = row_of(plain, slot, step, shape) + column, to_scales + (shape.rope_scales + group)
            store_quantised(rope_, to_plain, shared[count], to_scale, lane, shape)


@cute.jit
def append_key(
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
    """An item of a key: the first lanes turn its rope, and all of them quantise the latent."""
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
    if cutlass.const_expr(shape.rope_scales > 0):
        append_v41(held, end, cache, slot, lane, shape)
    else:
        append_split(held, end, cache, slot, lane, shape)


@cute.jit
def append_split(held: cute.Tensor, end: Any, cache: Cache, slot: Any, lane: Int32, shape: cutlass.Constexpr):
    """Quantises and stores a key whose rope columns have no scale of their own. held, end: as of `append_v41`; end is
    None where there are no rope columns."""
    codes, scales, plain = cache
    count, column = cutlass.const_expr(-(-shape.latent // STEP)), cute.assume(lane * VECTOR, divby=VECTOR)
    # Shuffles, so all lanes take part, whether the key is stored or not.
    shared = cute.make_rmem_tensor(count, Float32)
    for i in cutlass.range_constexpr(count):
        if cutlass.const_expr(shape.lanes == 0):
            shared[i] = scales[0]
        else:
            largest = largest_of(held[None, i], shape.lanes)
            shared[i] = cute.arch.fmax(quotient(largest, Float32(E4M3_MAX)), Float32(SCALE_MIN))
            if cutlass.const_expr(shape.powers):
                shared[i] = power_above(shared[i])
    power = cutlass.const_expr(shape.powers and shape.lanes > 0)
    if slot >= 0 and Int64(slot) < Int64(codes.shape[0]) * shape.page:
        to_codes = row_of(codes, slot, VECTOR, shape)
        for i in cutlass.range_constexpr(count):
            if lane * VECTOR + i * STEP < shape.latent if cutlass.const_expr(shape.latent % STEP != 0) else True:
                store_codes(e4m3_codes(held[None, i], shared[i], power), to_codes + column + i * STEP)
                if cutlass.const_expr(shape.lanes > 0):
                    if lane % shape.lanes == 0:
                        to_scale = row_of(scales, slot, 1, shape) + (i * (WARP // shape.lanes) + lane // shape.lanes)
                        bits = bits_of(shared[i])
                        if cutlass.const_expr(scales.element_type is Uint8):
                            bits = bits >> 23
                        cute.make_tensor(to_scale, cute.make_layout(1))[0] = bits.to(scales.element_type)
        if cutlass.const_expr(plain is not None):
            if lane < LANES:
                to_plain = row_of(plain, slot, VECTOR, shape) + column
                if cutlass.const_expr(shape.lanes == 0):
                    store_codes(e4m3_codes(end, shared[0], False), to_plain)
                else:
                    store_vector(end, to_plain)


@cute.kernel
def packed_append(
    q: cute.Tensor,  # (n, h, columns), global memory; tokens and heads apart by multiples of 8 elements
    latent: cute.Tensor,  # (n, latent), global memory, rows likewise
    rope_: cute.Tensor,  # (n, ROPE), global memory, rows likewise
    positions: cute.Tensor,  # (n,) int32 or int64
    slots: cute.Tensor,  # (n,) int32 or int64; outside of the cache: not written
    table: cute.Tensor,  # (positions, ROPE) float32, global memory: cosines, sines
    out: cute.Tensor,  # (n, h, any, whose last ROPE columns are written), global memory, likewise; may be q
    cache: Cache,
    shape: cutlass.Constexpr,  # Geometry
):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
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


packed_append.set_name_prefix("packed_append", remove_cutlass_symbol=True, keep_mangled_name=False)


@cute.kernel
def latent_append(
    latent: cute.Tensor,  # (n, latent), global memory, rows apart by multiples of 8 elements
    slots: cute.Tensor,  # (n,) int32 or int64; outside of the cache: not written
    codes: cute.Tensor,  # as in `Cache`
    scales: cute.Tensor,
    shape: cutlass.Constexpr,  # Geometry
):
    """Of caches without rope columns: a warp has a token."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    cute.arch.griddepcontrol_launch_dependents()
    warp, lane = cute.arch.make_warp_uniform(thread // WARP), thread % WARP
    token = block * shape.warps + warp
    if token < latent.shape[0]:
        count = cutlass.const_expr(shape.latent // STEP)
        column = cute.assume(lane * VECTOR, divby=VECTOR)
        row = latent.iterator + cute.assume(Int64(token) * latent.stride[0], divby=VECTOR) + column
        wait_for_launch(row.toint())
        slot, held = slots[token], vectors(latent.element_type, count)
        for i in cutlass.range_constexpr(count):
            load_vector(held[None, i], row + i * STEP)
        append_split(held, None, Cache(codes, scales, None), slot, lane, shape)


latent_append.set_name_prefix("latent_append", remove_cutlass_symbol=True, keep_mangled_name=False)


# ------------------------------------------------------------------------------------------------ host
@cute.jit
def launch_packed_append(
    q: cute.Tensor,
    latent: cute.Tensor,
    rope_: cute.Tensor,
    positions: cute.Tensor,
    slots: cute.Tensor,
    table: cute.Tensor,
    out: cute.Tensor,
    codes: cute.Tensor,
    scales: cute.Tensor,
    plain: cute.Tensor,
    geometry: cutlass.Constexpr,
    stream: CUstream,
):
    """Launches a warp for every item, as a programmatic dependent."""
    items = q.shape[0] * (geometry.chunks + 1)
    packed_append(q, latent, rope_, positions, slots, table, out, Cache(codes, scales, plain), geometry).launch(
        grid=((items + geometry.warps - 1) // geometry.warps, 1, 1),
        block=(geometry.warps * WARP, 1, 1),
        stream=stream,
        use_pdl=True,
    )


@cute.jit
def launch_latent_append(
    latent: cute.Tensor,
    slots: cute.Tensor,
    codes: cute.Tensor,
    scales: cute.Tensor,
    geometry: cutlass.Constexpr,
    stream: CUstream,
):
    """Launches a warp for every token, as a programmatic dependent."""
    latent_append(latent, slots, codes, scales, geometry).launch(
        grid=((latent.shape[0] + geometry.warps - 1) // geometry.warps, 1, 1),
        block=(geometry.warps * WARP, 1, 1),
        stream=stream,
        use_pdl=True,
    )


def takes(pd: PackedAppendProblem) -> Verdict:
    for name, value in (("columns", pd.columns), ("rest", pd.rest)):
        if value % VECTOR:
            return Verdict.no(f"{name} = {value}: rows are read in vectors of {VECTOR} elements, use a multiple of it")
    return Verdict.yes()


# ------------------------------------------------------------------------------------------------ plan
class PackedAppendPlan(KernelPlan):
    """Inputs and outputs of `workload.packed_append`."""

    workload = append.WORKLOAD
    tiling_type = PackedAppendTiling
    requires = Requirement(archs=("sm_90a",), dtypes=("bf16",), problem=takes, options=("v41", "no_rope"))

    def default_tiling(self) -> PackedAppendTiling:
        # As in rope_append: as many warps as there can be, or many heads, of which four have one row of the table.
        heads = self.problem.tokens * self.problem.h
        if heads > SOME:
            return PackedAppendTiling(4, 4)
        return PackedAppendTiling(1, 4 if heads <= FEW else 8)

    def autotune_configs(self) -> list[Tiling]:
        most = max(1, -(-self.problem.h // AT_A_TIME))
        return [PackedAppendTiling(heads, warps) for heads in (1, 2, 4, 8) if heads <= most for warps in (1, 2, 4, 8)]

    def plan(self, *inputs: Any) -> CuteKernel:
        return self.plan_into(inputs, append.new_outputs(self.problem, inputs[0]))

    def plan_into(self, inputs: Any, outputs: Any) -> CuteKernel:
        """A kernel on outputs of the caller's: out (n, h, any), of which the last p columns are written and which may
        be q, and codes, scales and plain columns of a cache (`workload.packed_append.views`), whose pages may lie
        apart. Raises `UserError` where vectors do not fit."""
        self.require()
        out, codes, scales, plain = outputs
        if self.problem.no_rope:
            named = {"latent": inputs[0], "the cache": codes}
        else:
            named = dict(zip(("q", "latent", "rope"), inputs[:3], strict=True)) | {"out": out, "the cache": codes}
        for name, tensor in named.items():
            steps = tensor.stride()[:1] if tensor is codes else tensor.stride()[:-1]
            if tensor.data_ptr() % 16 or any(step * tensor.element_size() % 16 for step in steps):
                raise UserError(
                    f"{name} starts at {tensor.data_ptr():#x} with strides {tuple(tensor.stride())}: its rows, and "
                    "pages of a cache, must begin at multiples of 16 bytes."
                )
        shared = inputs[-1] if self.problem.cache.one_scale else scales
        if self.problem.no_rope:
            return self._make((*inputs[:2], codes, shared), inputs, outputs)
        return self._make((*inputs[:6], out, codes, shared, plain), inputs, outputs)

    def plan_empty(self) -> CuteKernel:
        self.require()
        return self._make((), (), ())

    def _make(self, given: Any, inputs: Any, outputs: Any) -> CuteKernel:
        pd, geometry = self.problem, self.tiling.geometry(self.problem)
        kind = host.element_type(pd.dtype)
        index = {"int64": Int64, "int32": Int32}[pd.index]

        def strided(*sizes: Any) -> Any:
            outer = tuple(cute.sym_int64(divisibility=VECTOR) for _ in sizes[1:])
            return make_fake_tensor(kind, sizes, (*outer, 1), assumed_align=16)

        def indices(n: Any) -> Any:
            return host.fake(index, n, align=4 if pd.index == "int32" else 8)

        def part(element: Any, pages: Any, width: int, row: int, apart: int) -> Any:
            """row: elements from one token to the next. apart: what the distance of pages is a multiple of."""
            strides = (cute.sym_int64(divisibility=apart), row, 1)
            return make_fake_tensor(element, (pages, pd.page, width), strides, assumed_align=16 if apart > 1 else 1)

        def cached(pages: Any) -> tuple[Any, Any, Any]:
            layout = pd.cache
            row = layout.code_bytes + 2 * layout.plain if layout.planar else layout.token_bytes
            codes = part(Uint8, pages, geometry.latent * layout.bits // 8, row, 16)
            if layout.one_scale:
                scales = host.fake(Float32, 1, align=4)
            elif layout.scale_bytes == 4:
                scales = part(Int32, pages, layout.scales, row // 4, 4)
            else:
                apart = layout.scales + layout.padding if layout.planar else row
                scales = part(Uint8, pages, layout.scales, apart, 1)
            if pd.no_rope:
                return codes, scales, None
            if layout.plain:
                return codes, scales, part(kind, pages, ROPE, row // 2, VECTOR)
            return codes, scales, part(Uint8, pages, ROPE * layout.bits // 8, row, 16)

        def arguments() -> tuple[Any, ...]:
            n, rows, pages = host.symbols(3)
            codes, scales, plain = cached(pages)
            if pd.no_rope:
                return strided(n, pd.k), indices(n), codes, scales, geometry
            into = cute.sym_int32(divisibility=VECTOR)
            return (
                strided(n, pd.h, pd.columns),
                strided(n, pd.k),
                strided(n, pd.p),
                indices(n),
                indices(n),
                host.fake(Float32, rows, pd.p),
                strided(n, pd.h, into),
                codes,
                scales,
                plain,
                geometry,
            )

        if pd.no_rope:
            functions = (latent_append, launch_latent_append, "latent_append")
        else:
            functions = (packed_append, launch_packed_append, "packed_append")
        return host.stage(self, *functions, arguments, given, inputs, outputs)
