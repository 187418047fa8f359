"""rmsnorm v0 in CuTe: RMSNorm of rows of 16-bit elements, with an optional residual, or two of one projection's output.

    h = x + residual (rounded: the new residual)      out = h · rsqrt(mean(h²) + eps) · weight

Warps take a row's columns in vectors of 16 bytes, `vectors` of them a lane, all of which are in flight before the first
is used. The columns of a row that has two norms are dealt out to its warps in the order in which they lie, so that a
warp belongs to one of the norms and both take one pass over the row:

    columns     |------------ 1536: query ------------|--- 512: latent ---|- 64: rope, not read -|
    warps       |     0     |     1     |     2       |        3          |        2 vectors a lane
                each lane: 16 bytes at 512-byte steps; a warp's vector is 512 bytes in a row

    prologue    weights → registers (nobody waits for the kernel before: who writes weights may not let it start early)
                griddepcontrol.wait; the row → registers
    row         persistent only: the next row → registers, before this one is used
                h = x + residual → new residual;  Σ h²: lanes by shuffles, warps through shared memory, one barrier
                h · rsqrt(Σ / width + eps) · weight → out

A CTA has `rows` rows at a time. With `ctas_per_sm` it is persistent: it goes on to other rows, keeps the weights, and
has one row in flight while it works on another. Without, as many CTAs run at a time as fit, each with a row in flight,
and weights come from L1. Sums are in a fixed order: the same bits each time, wherever a row stands.

Runs on sm_90a. Dependents may start as soon as all CTAs have begun; they wait for this grid's end before they read.
The base version. One pass with the row in registers is quack's rmsnorm, which stages it in shared memory; warps of
two norms in one row are new.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator

from mla_var3.device import Requirement
from mla_var3.errors import UserError
from mla_var3.kernel.cute_python import host
from mla_var3.kernel.cute_python.prims.sync import wait_for_launch
from mla_var3.kernel.cute_python.prims.vectors import (
    VECTOR,
    WARP,
    load_shared_vector,
    load_vector,
    store_vector,
    sum_of,
    vectors,
    warp_sum,
)
from mla_var3.runtime import CuteKernel, KernelPlan, Tiling, Verdict
from mla_var3.workload import norm

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.workload.norm import NormProblem

MOST_VECTORS = 8
MOST_THREADS = 1024
STEP = WARP * VECTOR  # columns of a warp's vector
# Rows, and warps of theirs: latency decides, and not what is in flight.
FEW, FEW_WARPS = 512, 4096
WIDE = 8  # warps of a row


# ------------------------------------------------------------------------------------------------ what code is made for
@dataclass(frozen=True)
class Geometry:
    """What the code is specialised on. width, second: columns of the norms, second 0 where there is one. vectors: of a
    lane. rows: that a CTA has at a time. ctas_per_sm: of a persistent grid, or 0."""

    width: int
    second: int
    residual: bool
    vectors: int
    rows: int
    ctas_per_sm: int

    @property
    def first_warps(self) -> int:
        """Warps of a row's first norm."""
        return -(-self.width // (STEP * self.vectors))

    @property
    def warps(self) -> int:
        """Warps of a row."""
        return self.first_warps + -(-self.second // (STEP * self.vectors))

    @property
    def threads(self) -> int:
        return self.rows * self.warps * WARP

    @property
    def exact(self) -> bool:
        """Whether every lane has all of its vectors."""
        return self.width % (STEP * self.vectors) == 0 and self.second % (STEP * self.vectors) == 0


# ------------------------------------------------------------------------------------------------ tiling
@dataclass(frozen=True)
class RmsNormTiling(Tiling):
    """vectors: of 16 bytes that a lane holds of a row; fewer means more warps a row. rows: of a CTA at a time.
    ctas_per_sm: 0 for a CTA a group of rows, else how many persistent ones an SM has."""

    vectors: int = 4
    rows: int = 1
    ctas_per_sm: int = 0

    def geometry(self, pd: NormProblem) -> Geometry:
        return Geometry(pd.width, pd.second, pd.residual, self.vectors, self.rows, self.ctas_per_sm)

    def validate(self, pd: NormProblem, device: Device | None = None) -> Verdict:
        if not 1 <= self.vectors <= MOST_VECTORS:
            return Verdict.no(f"vectors = {self.vectors} must be 1 to {MOST_VECTORS}")
        if self.rows < 1:
            return Verdict.no(f"rows = {self.rows} must be at least 1")
        threads = self.geometry(pd).threads
        if threads > MOST_THREADS:
            return Verdict.no(
                f"{self.rows} rows of {pd.columns} columns with {self.vectors} vectors a lane take {threads} threads; "
                f"a CTA has {MOST_THREADS}"
            )
        most = (device.max_threads_per_sm if device is not None else 2048) // threads
        if not 0 <= self.ctas_per_sm <= most:
            return Verdict.no(f"ctas_per_sm = {self.ctas_per_sm} must be 0 to {most}: a CTA has {threads} threads")
        return Verdict.yes()


# ------------------------------------------------------------------------------------------------ device
@dataclass(frozen=True)
class Lane:
    """A lane's part of a row. slot: the row's place in the CTA. place: the warp's in the row. second: whether it
    belongs to the second norm. column: of the norm's columns, the first of its vectors. left: how many columns the norm
    has from that one on."""

    slot: Any
    place: Any
    second: Any
    column: Any
    left: Any


def lane_of(thread: Int32, shape: Geometry) -> Lane:
    lane, warp = thread % WARP, thread // WARP
    slot, place = warp // shape.warps, warp % shape.warps
    second = place >= shape.first_warps
    place_in_norm = cutlass.select_(second, place - shape.first_warps, place)
    column = (place_in_norm * shape.vectors * WARP + lane) * VECTOR
    width = cutlass.select_(second, Int32(shape.second), Int32(shape.width))
    return Lane(slot, place, second, column, width - column)


def either(second: Boolean, tensor: cute.Tensor, other: cute.Tensor | None) -> cute.Pointer:
    """The first element of one tensor, or of the other where the lane belongs to the second norm."""
    if other is None:
        return tensor.iterator
    address = cutlass.select_(second, other.iterator.toint(), tensor.iterator.toint())
    return cute.make_ptr(tensor.element_type, address, cute.AddressSpace.gmem, assumed_align=16)


def has(lane: Lane, i: int, there: Any, shape: Geometry) -> Any:
    """Whether the lane has its i-th vector, of a row that is there."""
    return there if shape.exact else (lane.left > i * STEP) & there


@cute.jit
def load(
    target: cute.Tensor, source: cute.Pointer, lane: cutlass.Constexpr, there: Any, shape: cutlass.Constexpr
):  # fmt: skip
    """Starts loading a lane's vectors of a row. source: its first one."""
    for i in cutlass.range_constexpr(shape.vectors):
        if has(lane, i, there, shape):
            load_vector(target[None, i], source + i * STEP)


@cute.jit
def load_weights(target: cute.Tensor, source: cute.Pointer, lane: cutlass.Constexpr, shape: cutlass.Constexpr):
    """Starts loading a lane's vectors of the weights."""
    for i in cutlass.range_constexpr(shape.vectors):
        if has(lane, i, True, shape):
            load_shared_vector(target[None, i], source + i * STEP)


@cute.jit
def store(
    values: cute.Tensor, target: cute.Pointer, lane: cutlass.Constexpr, there: Any, shape: cutlass.Constexpr
):  # fmt: skip
    """Stores a lane's vectors of a row. target: where its first one goes."""
    for i in cutlass.range_constexpr(shape.vectors):
        if has(lane, i, there, shape):
            store_vector(values[None, i], target + i * STEP)


class Exchange(NamedTuple):
    """Where the warps of a row exchange their sums. sums: (2, rows, warps) fp32, shared memory, or None where a row has
    one warp. turn: which of the two sets to take: one barrier is then enough, for who writes a set has passed the
    barrier that all readers of its last use were in front of."""

    sums: cute.Tensor | None
    turn: Int32


@cute.jit
def mean_square(h: cute.Tensor, lane: cutlass.Constexpr, exchange: Exchange, shape: cutlass.Constexpr) -> Float32:
    """Of a norm's row, in all of its lanes."""
    sums, turn = exchange
    values = h[None, 0].load().to(Float32)
    squares = values * values
    for i in cutlass.range_constexpr(1, shape.vectors):
        values = h[None, i].load().to(Float32)
        squares = squares + values * values
    total = warp_sum(sum_of(squares))
    if cutlass.const_expr(shape.warps > 1):
        if cute.arch.lane_idx() == 0:
            sums[turn, lane.slot, lane.place] = total
        cute.arch.sync_threads()
        total = Float32(0.0)
        for i in cutlass.range_constexpr(shape.warps):
            part = sums[turn, lane.slot, i]
            if cutlass.const_expr(shape.second > 0):
                mine = lane.second if i >= shape.first_warps else ~lane.second
                part = cutlass.select_(mine, part, Float32(0.0))
            total = total + part
    inverse = Float32(1.0 / shape.width)
    if cutlass.const_expr(shape.second > 0):
        inverse = cutlass.select_(lane.second, Float32(1.0 / shape.second), inverse)
    return total * inverse


@cute.jit
def finish(
    h: cute.Tensor,  # registers: x of a lane
    r: cute.Tensor | None,  # registers: the residual of a lane
    weights: cute.Tensor,  # registers
    to_out: cute.Pointer,  # of a row, in the lane's norm
    to_residual: cute.Pointer | None,  # of a row
    lane: cutlass.Constexpr,
    there: Any,
    exchange: Exchange,
    eps: Float32,
    shape: cutlass.Constexpr,
):
    """Normalises a row that is in registers, and stores it."""
    # h = x + residual, rounded: what is normalised is what the next layer adds to.
    if cutlass.const_expr(shape.residual):
        for i in cutlass.range_constexpr(shape.vectors):
            total = h[None, i].load().to(Float32) + r[None, i].load().to(Float32)
            h[None, i].store(total.to(h.element_type))
        store(h, to_residual, lane, there, shape)
    factor = cute.math.rsqrt(mean_square(h, lane, exchange, shape) + eps, fastmath=True)
    # out = h * factor * weight
    for i in cutlass.range_constexpr(shape.vectors):
        scaled = h[None, i].load().to(Float32) * factor * weights[None, i].load().to(Float32)
        h[None, i].store(scaled.to(h.element_type))
    store(h, to_out, lane, there, shape)


@cute.kernel
def rmsnorm(
    x: cute.Tensor,  # (n, width + second), rows apart by a multiple of 8 elements, global memory
    residual: cute.Tensor | None,  # (n, width), contiguous, global memory
    weight: cute.Tensor,  # (width,), global memory
    second_weight: cute.Tensor | None,  # (second,), global memory
    out: cute.Tensor,  # (n, width), contiguous, global memory
    second: cute.Tensor | None,  # (n, second), contiguous, global memory
    new_residual: cute.Tensor | None,  # (n, width), contiguous, global memory; may be `residual`
    eps: Float32,
    shape: cutlass.Constexpr,  # Geometry
):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    cute.arch.griddepcontrol_launch_dependents()
    sums = None
    if cutlass.const_expr(shape.warps > 1):
        layout = cute.make_ordered_layout((2, shape.rows, shape.warps), order=(2, 1, 0))
        sums = SmemAllocator().allocate_tensor(Float32, layout, 16)
    kind, n = x.element_type, x.shape[0]
    lane = lane_of(thread, shape)

    # Where the lane's vectors of row 0 are, and how far the next row's.
    own, width, begin = cute.assume(lane.column, divby=VECTOR), Int64(shape.width), lane.column
    if cutlass.const_expr(shape.second > 0):
        width = cutlass.select_(lane.second, Int64(shape.second), width)
        begin = begin + cutlass.select_(lane.second, Int32(shape.width), Int32(0))
    from_x = x.iterator + cute.assume(begin, divby=VECTOR)
    to_out = either(lane.second, out, second) + own
    if cutlass.const_expr(shape.residual):
        from_residual, into_residual = residual.iterator + own, new_residual.iterator + own

    weights = vectors(kind, shape.vectors)
    weights.fill(0)
    load_weights(weights, either(lane.second, weight, second_weight) + own, lane, shape)

    row = block * shape.rows + lane.slot
    there = row < n if cutlass.const_expr(shape.rows > 1) else True
    from_row = from_x + cute.assume(Int64(row) * x.stride[0], divby=VECTOR)
    down = cute.assume(Int64(row) * width, divby=VECTOR)
    h, r, to_residual = vectors(kind, shape.vectors), None, None
    h.fill(0)
    wait_for_launch(from_row.toint())
    load(h, from_row, lane, there, shape)
    if cutlass.const_expr(shape.residual):
        r = vectors(kind, shape.vectors)
        r.fill(0)
        load(r, from_residual + down, lane, there, shape)
        to_residual = into_residual + down

    if cutlass.const_expr(shape.ctas_per_sm == 0):
        finish(h, r, weights, to_out + down, to_residual, lane, there, Exchange(sums, Int32(0)), eps, shape)
    else:
        next_h = vectors(kind, shape.vectors)
        next_r = vectors(kind, shape.vectors) if cutlass.const_expr(shape.residual) else None
        turn, step = Int32(0), blocks * shape.rows
        for first in cutlass.range(block * shape.rows, n, step, unroll=1):
            row = first + lane.slot
            there = row < n
            after = row + step
            next_h.fill(0)
            load(next_h, from_x + cute.assume(Int64(after) * x.stride[0], divby=VECTOR), lane, after < n, shape)
            down = cute.assume(Int64(row) * width, divby=VECTOR)
            if cutlass.const_expr(shape.residual):
                next_r.fill(0)
                next_down = cute.assume(Int64(after) * width, divby=VECTOR)
                load(next_r, from_residual + next_down, lane, after < n, shape)
                to_residual = into_residual + down
            finish(h, r, weights, to_out + down, to_residual, lane, there, Exchange(sums, turn), eps, shape)
            turn = turn ^ 1
            cute.autovec_copy(next_h, h)
            if cutlass.const_expr(shape.residual):
                cute.autovec_copy(next_r, r)


rmsnorm.set_name_prefix("rmsnorm", remove_cutlass_symbol=True, keep_mangled_name=False)


# ------------------------------------------------------------------------------------------------ host
@cute.jit
def launch_rmsnorm(
    x: cute.Tensor,
    residual: cute.Tensor | None,
    weight: cute.Tensor,
    second_weight: cute.Tensor | None,
    out: cute.Tensor,
    second: cute.Tensor | None,
    new_residual: cute.Tensor | None,
    eps: Float32,
    sms: Int32,  # that a persistent grid is for
    geometry: cutlass.Constexpr,
    stream: CUstream,
):
    """Launches one CTA for every `rows` rows, or a persistent grid; as a programmatic dependent."""
    blocks = (x.shape[0] + geometry.rows - 1) // geometry.rows
    if cutlass.const_expr(geometry.ctas_per_sm > 0):
        blocks = cutlass.min(blocks, sms * geometry.ctas_per_sm)
    rmsnorm(x, residual, weight, second_weight, out, second, new_residual, eps, geometry).launch(
        grid=(blocks, 1, 1),
        block=(geometry.threads, 1, 1),
        stream=stream,
        use_pdl=True,
    )


def takes(pd: NormProblem) -> Verdict:
    for name, value in (("width", pd.width), ("second", pd.second), ("rest", pd.rest)):
        if value % VECTOR:
            return Verdict.no(f"{name} = {value}: rows are read in vectors of {VECTOR} elements, use a multiple of it")
    if not default_tiling(pd).validate(pd):
        return Verdict.no(f"{pd.columns} columns of a row are more than a CTA holds in registers")
    return Verdict.yes()


def default_tiling(pd: NormProblem) -> RmsNormTiling:
    """Few rows: as many warps a row as leave it two vectors a lane, which are in flight together, or one where the row
    is wide. Many: as few as waste no lane, for warps of a row wait for one another; and four warps a CTA at least."""

    def shape(vectors_: int) -> Geometry:
        return Geometry(pd.width, pd.second, pd.residual, vectors_, 1, 0)

    fitting = [v for v in (2, 4, 8) if shape(v).warps <= 16] or [8]
    warps = shape(fitting[0]).warps
    if pd.rows <= FEW and pd.rows * warps <= FEW_WARPS:
        return RmsNormTiling(1 if warps > WIDE and shape(1).threads <= MOST_THREADS else fitting[0])
    exact = [v for v in (4, 3, 2) if shape(v).exact and shape(v).warps <= 16] or fitting
    return RmsNormTiling(exact[0], max(1, 4 // shape(exact[0]).warps))


# ------------------------------------------------------------------------------------------------ plan
class RmsNormPlan(KernelPlan):
    """Inputs (x, weight, [second weight], [residual]), outputs (out, second, new residual) of `workload.norm`."""

    workload = norm.WORKLOAD
    tiling_type = RmsNormTiling
    requires = Requirement(archs=("sm_90a",), dtypes=("bf16", "fp16"), problem=takes)

    def default_tiling(self) -> RmsNormTiling:
        return default_tiling(self.problem)

    def autotune_configs(self) -> list[Tiling]:
        tilings = [
            RmsNormTiling(vectors_, rows, ctas)
            for vectors_ in (1, 2, 4, 7, 8)
            for rows in (1, 2, 4, 8)
            for ctas in (0, 2, 4, 8)
        ]
        # Of several rows a CTA, those of up to 8 warps; of persistent ones, those that leave a row 56 registers.
        return [t for t in tilings if t.validate(self.problem, self.device) and self._worth(t)]

    def _worth(self, tiling: RmsNormTiling) -> bool:
        shape = tiling.geometry(self.problem)
        few_warps = tiling.rows == 1 or shape.threads <= 8 * WARP
        held = shape.vectors * (4 * (3 + 2 * shape.residual))
        return few_warps and (not tiling.ctas_per_sm or (held + 40) * shape.threads * tiling.ctas_per_sm <= 65536)

    def plan(self, *inputs: Any) -> CuteKernel:
        return self.plan_into(inputs, norm.new_outputs(self.problem, inputs[0]))

    def plan_into(self, inputs: Any, outputs: Any) -> CuteKernel:
        """A kernel on contiguous outputs of the caller's; the new residual may be the old one. Raises `UserError` where
        rows of x do not begin at multiples of 16 bytes."""
        self.require()
        x = inputs[0]
        if x.data_ptr() % 16 or x.stride(0) % VECTOR:
            raise UserError(
                f"x starts at {x.data_ptr():#x} with rows {x.stride(0)} elements apart: both must be multiples of 16 "
                "bytes."
            )
        return self._make(inputs, outputs)

    def plan_empty(self) -> CuteKernel:
        self.require()
        return self._make((), ())

    def _make(self, inputs: Any, outputs: Any) -> CuteKernel:
        pd, kind = self.problem, host.element_type(self.problem.dtype)
        geometry = self.tiling.geometry(pd)
        given: tuple[Any, ...] = ()
        if inputs:
            x, weight, second_weight, residual = norm.named(pd, inputs)
            out, second, new_residual = outputs
            second, new_residual = second if pd.second else None, new_residual if pd.residual else None
            given = (x, residual, weight, second_weight, out, second, new_residual, pd.eps, host.target(self).num_sms)

        def arguments() -> tuple[Any, ...]:
            (n,) = host.symbols(1)
            x = make_fake_tensor(kind, (n, pd.columns), (cute.sym_int64(divisibility=VECTOR), 1), assumed_align=16)
            rows = host.fake(kind, n, pd.width)
            return (
                x,
                rows if pd.residual else None,
                host.fake(kind, pd.width),
                host.fake(kind, pd.second) if pd.second else None,
                rows,
                host.fake(kind, n, pd.second) if pd.second else None,
                rows if pd.residual else None,
                Float32(pd.eps),
                Int32(1),
                geometry,
            )

        return host.stage(self, rmsnorm, launch_rmsnorm, "rmsnorm", arguments, given, inputs, outputs)
