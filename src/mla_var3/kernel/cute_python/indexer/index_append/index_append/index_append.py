"""index_append v0 in CuTe: norms, turns and quantises new tokens' indexer keys, and writes them into the index cache.

    k[t]  ──mean, variance over 128 columns──→ normed, rounded to bf16 ──the first 64 turned, rounded to bf16──→
          largest magnitude ──/ 448──→ scale of slot[t]     column / scale ──→ e4m3 ──→ codes of slot[t]

Half of a warp has a token, a lane 8 of its columns, so that the first 8 lanes of a token have the columns that turn, as
in `prims.rotary`. Sums and the largest magnitude are those of 16 lanes, by shuffles:

    griddepcontrol.wait → position, slot and k in flight → its cosines and sines → mean → variance → norm, by weight and
    bias, which were read before the wait → turn → largest of 8 columns, of 16 lanes → scale → 8 codes a lane → stores;
    nothing where the slot is outside of the cache. A position outside of the table turns by NaN

Infinities make the whole row NaN, by its mean; NaN passes over the maximum and becomes the code 0x7F. Scales that are
powers of two have an exact reciprocal; others divide, rounded once.

Runs on sm_90a. The base version; what becomes of a column is that of packed_append.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, Uint32
from cutlass.cute.runtime import make_fake_tensor

from mla_var3.device import Requirement
from mla_var3.errors import UserError
from mla_var3.kernel.cute_python import host
from mla_var3.kernel.cute_python.prims.rotary import LANES, ROPE, load_turns, turn
from mla_var3.kernel.cute_python.prims.sync import wait_for_launch
from mla_var3.kernel.cute_python.prims.vectors import VECTOR, WARP, load_vector, vectors
from mla_var3.packed_cache import E4M3_MAX
from mla_var3.runtime import CuteKernel, KernelPlan, Tiling, Verdict, limits
from mla_var3.workload import index_append as append
from mla_var3.workload.index_append import EPS, LEAST
from mla_var3.workload.indexer_logits import PAGE, D

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.workload.index_append import IndexAppendProblem

OF_TOKEN = D // VECTOR  # lanes
AT_A_TIME = WARP // OF_TOKEN  # tokens of a warp


# ------------------------------------------------------------------------------------------------ what code is made for
@dataclass(frozen=True)
class Geometry:
    """What the code is specialised on. powers: whether scales are powers of two. warps: of a CTA."""

    interleaved: bool
    powers: bool
    warps: int


@dataclass(frozen=True)
class IndexAppendTiling(Tiling):
    """warps: of a CTA."""

    warps: int = 4

    def geometry(self, pd: IndexAppendProblem) -> Geometry:
        return Geometry(pd.interleaved, pd.powers, self.warps)

    def validate(self, pd: IndexAppendProblem, device: Device | None = None) -> Verdict:
        if not 1 <= self.warps <= 32:
            return Verdict.no(f"warps = {self.warps} must be 1 to 32")
        return limits.offsets(pd.tokens, f"the work of {pd.tokens:,} tokens")


# ------------------------------------------------------------------------------------------------ device
@cute.jit
def of_token(value: Float32, largest: cutlass.Constexpr) -> Float32:
    """The sum of a value over the lanes of a token, or the largest that is not NaN; the same bits in each."""
    for step in cutlass.range_constexpr(OF_TOKEN.bit_length() - 1):
        other = cute.arch.shuffle_sync_bfly(value, offset=1 << step)
        value = cute.arch.fmax(value, other) if cutlass.const_expr(largest) else value + other
    return value


@cute.jit
def quotient(x: Float32, y: Float32) -> Float32:
    """x / y, rounded once whatever the compiler takes for fast."""
    return cute.arch.inline_ptx("div.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[x, y])


@cute.jit
def root(x: Float32) -> Float32:
    return cute.arch.inline_ptx("sqrt.rn.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


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
    """The scale of a token, by all of its lanes."""
    largest = Float32(LEAST)
    for i in cutlass.range_constexpr(VECTOR):
        x = Float32(held[i])
        largest = cute.arch.fmax(largest, cute.arch.fmax(x, -x))
    scale = quotient(of_token(largest, True), Float32(E4M3_MAX))
    if cutlass.const_expr(powers):
        scale = Int32((scale.bitcast(Int32) + 0x7FFFFF) & ~0x7FFFFF).bitcast(Float32)
    return scale


@cute.jit
def codes_of(held: cute.Tensor, scale: Float32, powers: cutlass.Constexpr) -> cute.Tensor:
    """(VECTOR / 4,) Uint32: the codes of a lane's columns over their scale; 0x7F of NaN."""
    codes, over = cute.make_rmem_tensor(VECTOR // 4, Uint32), cute.make_rmem_tensor(VECTOR, Float32)
    reciprocal = Int32((254 << 23) - scale.bitcast(Int32)).bitcast(Float32)
    for i in cutlass.range_constexpr(VECTOR):
        x = Float32(held[i])
        over[i] = x * reciprocal if cutlass.const_expr(powers) else quotient(x, scale)
    for i in cutlass.range_constexpr(VECTOR // 4):
        codes[i] = cute.arch.inline_ptx(
            "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, {$r1}, {$r0}; "
            "cvt.rn.satfinite.e4m3x2.f32 high, {$r3}, {$r2}; mov.b32 {$w0}, {low, high}; }",
            write_only_types=[Uint32],
            read_only_args=[over[4 * i], over[4 * i + 1], over[4 * i + 2], over[4 * i + 3]],
        )
    return codes


@cute.kernel
def index_append(
    k: cute.Tensor,  # (n, D) bf16, global memory, rows at multiples of 16 bytes
    weight: cute.Tensor,  # (D,) float32
    bias: cute.Tensor,  # (D,) float32
    positions: cute.Tensor,  # (n,) int32 or int64
    slots: cute.Tensor,  # (n,) int32 or int64; outside of the cache: not written
    table: cute.Tensor,  # (positions, ROPE) float32: cosines, sines
    codes: cute.Tensor,  # (pages, PAGE, D) uint8, pages at multiples of 16 bytes
    scales: cute.Tensor,  # (pages, PAGE) int32, of the same pages
    shape: cutlass.Constexpr,  # Geometry
):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    cute.arch.griddepcontrol_launch_dependents()
    warp, lane = cute.arch.make_warp_uniform(thread // WARP), thread % WARP
    place = lane % OF_TOKEN
    token = (block * shape.warps + warp) * AT_A_TIME + lane // OF_TOKEN
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
    turns = load_turns(table, position, place % LANES, shape)
    normed(held, *factors)
    turned = vectors(BFloat16, 1)[None, 0]
    turned.store(held.load())
    turn(turned, turns, shape)
    if place < LANES:
        held.store(turned.load())
    scale = scale_of(held, shape.powers)
    if there and slot >= 0 and Int64(slot) < Int64(codes.shape[0]) * PAGE:
        page, at = Int64(slot // PAGE), Int64(slot % PAGE)
        to = codes.iterator + cute.assume(page * codes.stride[0], divby=16) + cute.assume(at * D, divby=D) + column
        into = cute.make_tensor(cute.recast_ptr(to, dtype=Uint32), cute.make_layout(VECTOR // 4))
        cute.autovec_copy(codes_of(held, scale, shape.powers), into)
        if place == 0:
            scales[page, at] = scale.bitcast(Int32)


index_append.set_name_prefix("index_append", remove_cutlass_symbol=True, keep_mangled_name=False)


# ------------------------------------------------------------------------------------------------ host
@cute.jit
def launch_index_append(
    k: cute.Tensor,
    weight: cute.Tensor,
    bias: cute.Tensor,
    positions: cute.Tensor,
    slots: cute.Tensor,
    table: cute.Tensor,
    codes: cute.Tensor,
    scales: cute.Tensor,
    geometry: cutlass.Constexpr,
    stream: CUstream,
):
    """Launches half a warp for every token, as a programmatic dependent."""
    tokens = geometry.warps * AT_A_TIME
    index_append(k, weight, bias, positions, slots, table, codes, scales, geometry).launch(
        grid=((k.shape[0] + tokens - 1) // tokens, 1, 1),
        block=(geometry.warps * WARP, 1, 1),
        stream=stream,
        use_pdl=True,
    )


def takes(pd: IndexAppendProblem) -> Verdict:
    if pd.rest % VECTOR:
        return Verdict.no(f"rest = {pd.rest}: rows are read in vectors of {VECTOR} elements, use a multiple of it")
    return Verdict.yes()


# ------------------------------------------------------------------------------------------------ plan
class IndexAppendPlan(KernelPlan):
    """Inputs and outputs of `workload.index_append`."""

    workload = append.WORKLOAD
    tiling_type = IndexAppendTiling
    requires = Requirement(archs=("sm_90a",), dtypes=("bf16",), problem=takes)

    def default_tiling(self) -> IndexAppendTiling:
        return IndexAppendTiling(1 if self.problem.tokens <= 1024 else 4)

    def autotune_configs(self) -> list[Tiling]:
        return [IndexAppendTiling(warps) for warps in (1, 2, 4, 8)]

    def plan(self, *inputs: Any) -> CuteKernel:
        return self.plan_into(inputs, append.new_outputs(self.problem, inputs[0]))

    def plan_into(self, inputs: Any, outputs: Any) -> CuteKernel:
        """A kernel on a cache of the caller's: its codes and scales (`workload.index_append.views`). Raises `UserError`
        where vectors do not fit."""
        self.require()
        k, weight, bias = inputs[:3]
        for name, tensor in {"k": k, "weight": weight, "bias": bias, "the cache": outputs[0]}.items():
            apart = tensor.stride(0) * tensor.element_size() if tensor.dim() > 1 else 0
            if tensor.data_ptr() % 16 or apart % 16:
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

        def arguments() -> tuple[Any, ...]:
            n, rows, pages = host.symbols(3)
            stride, words = cute.sym_int64(divisibility=16), cute.sym_int64(divisibility=4)
            return (
                make_fake_tensor(BFloat16, (n, D), (cute.sym_int64(divisibility=VECTOR), 1), assumed_align=16),
                host.fake(Float32, D),
                host.fake(Float32, D),
                host.fake(index, n, align=align),
                host.fake(index, n, align=align),
                host.fake(Float32, rows, ROPE),
                make_fake_tensor(Uint8, (pages, PAGE, D), (stride, D, 1), assumed_align=16),
                make_fake_tensor(Int32, (pages, PAGE), (words, 1), assumed_align=4),
                geometry,
            )

        return host.stage(self, index_append, launch_index_append, "index_append", arguments, given, inputs, outputs)
