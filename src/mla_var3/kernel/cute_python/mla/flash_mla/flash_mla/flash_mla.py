r"""Absorbed MLA decode for Hopper (sm_90a), the readable baseline: one CTA a query tile, KV split and request.

    out[row, :] = softmax(scale · q[row] · Kᵀ) · V      K = [latent | rope] (t, 576)    V = latent (t, 512)

K and V are one tile, loaded once. A CTA computes 64 query rows (tokens x heads of one latent cache) against a range of
KV tiles of 64 tokens, two at a time, with three warpgroups:

    producer   four warps; each keeps one half (left or right V columns) of one of two stages filled, by TMA
    EVEN       S0 = Q·K0ᵀ of even tiles; O_L += P·V_L, output columns 0..255 in registers
    ODD        S1 = Q·K1ᵀ of odd tiles;  O_R += P·V_R, output columns 256..511

While one consumer is in its softmax, the other keeps the tensor cores busy:

    EVEN  softmax S0 | O_L += P0·V0_L | rescale, P0 -> smem | O_L += P1·V1_L | S0' = Q·K0'ᵀ
                   \ max 0            / max 1         \ P0   / P1
    ODD     S1 = Q·K1ᵀ | max, rescale | O_R += P0·V0_R and exp S1 | O_R += P1·V1_R | S1' = Q·K1'ᵀ

    freed     0L after P0·V0_L      0R after P0·V0_R      1R after P1·V1_R      1L after P1·V1_L

A consumer's own P is an operand from registers; the other reads it from shared memory, where it lies in the rope panel
of its stage, which nobody needs once the scores are made. Two half outputs with a shared running maximum are FlashMLA's
idea ("seesaw"); a producer warp for each half and P in the rope panel are not.

Split-KV: grid (query tiles x h_kv x b, splits). The host chooses the number of splits by the page table's width. With
more than one, each CTA writes an fp32 partial output with its log-sum-exp (LSE), and `combine` merges them:
out = Σ wᵢ Oᵢ / Σ wᵢ with wᵢ = 2^(lseᵢ - max), in the order of the splits.

What later versions do differently is in their own files: persistent CTAs and a tile scheduler on the device (version
23), swapped operands for few query rows (version 24).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator

from mla_var3.device import Requirement
from mla_var3.kernel.cute_python import decode_host, host
from mla_var3.kernel.cute_python.prims import paged, softmax, wgmma
from mla_var3.kernel.cute_python.prims.paged import PANEL, PANEL_BYTES, PANEL_ELEMENTS, TOKENS
from mla_var3.kernel.cute_python.prims.sync import named_arrive, named_sync, warp_arrive
from mla_var3.kernel.cute_python.prims.wgmma import WARPGROUP
from mla_var3.kernel.cute_python.split_kv import rows
from mla_var3.runtime import CuteKernel, KernelPipeline, KernelPlan, Tiling, Verdict, limits
from mla_var3.runtime.plan import require_int32
from mla_var3.runtime.scaling import any_scale
from mla_var3.workload import decode

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.workload.decode import MlaProblem

ROWS = 64  # of a query tile: one warpgroup MMA
STAGES = 2  # one for EVEN's tiles, one for ODD's: the schedule is written for two, and another number skips tiles
CONSUMERS = 2 * WARPGROUP  # threads
THREADS = 3 * WARPGROUP
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 24, 240  # 128 · (24 + 2 · 240) = 64512 of 65536
EVEN, ODD = 0, 1
MAX_SPLITS = 256
COMBINE_COLUMNS = 4  # of a thread


class Barrier(IntEnum):
    """Named barriers."""

    CTA = 0
    MAX_EVEN = 1  # the running maximum after an even tile is in shared memory
    MAX_ODD = 2
    P_EVEN = 3  # P of an even tile is in shared memory
    P_ODD = 4
    CONSUMERS = 5
    EVEN = 6  # the warps of one consumer
    ODD = 7


# ------------------------------------------------------------------------------------------------ what code is made for
@dataclass(frozen=True)
class Geometry:
    """What the code is specialised on: heads, query tokens, columns of latent and rope, page, mask."""

    h: int
    h_kv: int
    s: int
    k: int
    p: int
    page: int
    causal: bool

    @classmethod
    def of(cls, pd: MlaProblem) -> Geometry:
        return cls(pd.h, pd.h_kv, pd.s, pd.k, pd.p, pd.page_size, pd.causal and pd.s > 1)

    @property
    def group(self) -> int:
        """Heads that share a cache."""
        return self.h // self.h_kv

    @property
    def rows(self) -> int:
        """Query rows that share a cache."""
        return self.s * self.group

    @property
    def row_tiles(self) -> int:
        return -(-self.rows // ROWS)

    @property
    def panels(self) -> int:
        """64-column panels of a cached token."""
        return (self.k + self.p) // PANEL

    @property
    def rope(self) -> int:
        """The panel of rope columns; P lies in it once the scores of the stage are made."""
        return self.k // PANEL

    @property
    def half(self) -> int:
        """Output columns of one consumer."""
        return self.k // 2

    @property
    def half_panels(self) -> int:
        return self.half // PANEL

    @property
    def stage_elements(self) -> int:
        return TOKENS * (self.k + self.p)

    def freed_by(self, stage: int, consumer: int) -> tuple[int, ...]:
        """Panels of a stage that a consumer frees: its half of V, and the rope panel where it reads the other's P."""
        first = consumer * self.half_panels
        own = tuple(range(first, first + self.half_panels))
        return own if stage == consumer else (*own, self.rope)


def shared_storage(geometry: Geometry, dtype: type) -> type:
    """The CTA's shared memory: mbarriers and row values in the first 2 KiB, then Q and two stages, 72 KiB each."""

    def array(kind: type, size: int) -> Any:
        return cute.struct.MemRange[kind, size]

    fields = {
        "full": array(Int64, STAGES * geometry.panels),  # mbarriers: a panel has been loaded
        "empty": array(Int64, 2 * STAGES),  # mbarriers, [stage][half]: panels are no longer read
        "max_even": array(Float32, ROWS),  # running maximum after an even tile
        "max_odd": array(Float32, ROWS),  # and after an odd one
        "sum_even": array(Float32, ROWS),  # row sums of EVEN's P
        "sum_odd": array(Float32, ROWS),
        "query": cute.struct.Align[array(dtype, ROWS * (geometry.k + geometry.p)), 1024],
        "stages": cute.struct.Align[array(dtype, STAGES * geometry.stage_elements), 1024],
    }
    # Not a class statement: postponed annotations are strings, and the struct wants types.
    return cute.struct(type("Storage", (), {"__annotations__": fields}))


class Work(NamedTuple):
    """What a CTA computes: pairs of KV tiles first to end; num_tiles: KV tiles of the request; unmasked: keys that
    every row of the query tile may see."""

    first: Int32
    end: Int32
    num_tiles: Int32
    unmasked: Int32


class Place(NamedTuple):
    """Which rows a CTA computes. row_tile: the query tile, of a request and kv head; it has rows ROWS · row_tile on.
    split: of num_splits."""

    request: Int32
    kv_head: Int32
    row_tile: Int32
    split: Int32
    num_splits: Int32


class Outputs(NamedTuple):
    """What the kernel writes, in global memory. The partials are unused with one split."""

    out: cute.Tensor  # (b, s, h, k) 16-bit, columns contiguous
    lse: cute.Tensor  # (b, h, s) fp32
    partial_out: cute.Tensor  # (splits, b, h_kv, rows, k) fp32, contiguous
    partial_lse: cute.Tensor  # (splits, b, h_kv, rows) fp32, log2 domain


@cute.jit
def work_range(seq_len: Int32, row_tile: Int32, split: Int32, num_splits: Int32, geometry: cutlass.Constexpr):
    """The `Work` of a CTA."""
    visible = cutlass.max(seq_len, 0)
    unmasked = visible
    if cutlass.const_expr(geometry.causal):
        last_token = cutlass.min((row_tile * ROWS + ROWS - 1) // geometry.group, geometry.s - 1)
        first_token = (row_tile * ROWS) // geometry.group
        unmasked = cutlass.max(visible - geometry.s + 1 + first_token, 0)
        visible = cutlass.max(visible - geometry.s + 1 + last_token, 0)
    num_tiles = (visible + TOKENS - 1) // TOKENS
    num_pairs = (num_tiles + 1) // 2
    per_split = (num_pairs + num_splits - 1) // num_splits
    first = cutlass.min(split * per_split, num_pairs)
    end = cutlass.min(first + per_split, num_pairs)
    return Work(first, end, num_tiles, unmasked)


# ------------------------------------------------------------------------------------------------ device: load
@cute.jit
def load(
    tma: cute.CopyAtom,
    boxes: cute.Tensor,  # TMA, (box, token box, column box, page) of one kv head
    places: cute.Tensor,  # shared memory, (box, column box, stage)
    pages: cute.Tensor,  # (max_pages,) int32, global memory: this request's row of the page table
    full: cute.Pointer,  # mbarriers of the stage
    empty: cute.Pointer,  # mbarrier of the stage's half
    work: Work,
    stage: cutlass.Constexpr,
    panels: cutlass.Constexpr,
    page_size: cutlass.Constexpr,
):
    """What one producer warp does: it keeps its half of its stage filled, for pairs first..end-1.

    An odd number of tiles ends with the last tile once more: it is masked and its V zeroed like any token past the end,
    and no page table entry past the end is read.
    """
    per_page = page_size // TOKENS
    first, end, num_tiles, _ = work
    for pair in cutlass.range(first, end, unroll=1):
        tile = cutlass.min(2 * pair + stage, num_tiles - 1)
        page = pages[tile // per_page]
        cute.arch.mbarrier_wait(empty, ((pair - first) & 1) ^ 1)
        for i in cutlass.range_constexpr(len(panels)):
            barrier = full + panels[i]
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, PANEL_BYTES)
            cute.copy(
                tma, boxes[None, tile % per_page, panels[i], page], places[None, panels[i], stage],
                tma_bar_ptr=barrier, cache_policy=Int64(paged.EVICT_FIRST),
            )  # fmt: skip


@cute.jit
def copy_query_rows(
    query: cute.Tensor,  # (b, s, h, k + p), global memory
    tile: cute.Tensor,  # (ROWS, k + p) shared memory, swizzled
    request: Int32,
    kv_head: Int32,
    first_row: Int32,
    thread: Int32,  # 0..255
    geometry: cutlass.Constexpr,
):
    """Starts copying the query tile, 16 bytes at a time (cp.async); rows past the end become zeros."""
    width = cute.size(tile, mode=[1])
    per_row = 8  # threads on one row: 128 bytes, one swizzle row, a pass
    step = CONSUMERS // per_row
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(), query.element_type, num_bits_per_copy=128)
    copy = cute.make_tiled_copy_tv(
        atom, cute.make_ordered_layout((step, per_row), order=(1, 0)), cute.make_layout((1, rows.CHUNK))
    )
    target = copy.get_slice(thread).partition_D(tile)  # (chunk, row pass, column pass)
    zeros = cute.make_rmem_tensor(rows.CHUNK, query.element_type)
    zeros.fill(0.0)
    for i in cutlass.range_constexpr(ROWS // step):
        row = first_row + i * step + thread // per_row
        if row < geometry.rows:
            source = cute.zipped_divide(row_vector(query, request, kv_head, row, geometry.group), (rows.CHUNK,))
            for j in cutlass.range_constexpr(width // (per_row * rows.CHUNK)):
                cute.copy(atom, source[None, j * per_row + thread % per_row], target[(None, 0), i, j])
        else:
            for j in cutlass.range_constexpr(width // (per_row * rows.CHUNK)):
                cute.autovec_copy(zeros, target[(None, 0), i, j])
    cute.arch.cp_async_commit_group()


# ------------------------------------------------------------------------------------------------ device: one consumer
class Shared(NamedTuple):
    """What the consumers use of shared memory."""

    q_tile: cute.Tensor  # (ROWS, k + p), swizzled
    stages: cute.Pointer  # the first stage
    full: cute.Pointer  # mbarriers, as in `shared_storage`
    empty: cute.Pointer
    maxima: tuple[
        cute.Tensor, cute.Tensor
    ]  # (ROWS,) fp32 each: the running maximum after an even tile, after an odd one


@dataclass(frozen=True, eq=False)
class Consumer:
    """Views and registers of one consumer warpgroup. `me`: EVEN or ODD; thread: 0..127."""

    me: int
    geometry: Geometry
    dtype: Any
    thread: Any
    scale_log2: Any
    seq_len: Any
    full: Any  # mbarriers, as in `shared_storage`
    empty: Any
    stages: Any  # shared memory
    maxima: Any  # (ROWS,) shared memory each: after an even tile, after an odd one
    mma_s: Any  # S = Q·Kᵀ
    mma_rs: Any  # O += P·V with P in registers,
    mma_ss: Any  # with P in shared memory
    frag_q: Any  # descriptors: Q,
    frag_k: Any  # the own KV tile as K,
    frag_v: Any  # both KV tiles' own half as V,
    frag_p: Any  # the other consumer's P
    p_copy: Any
    p_target: Any  # where the own P goes
    staging: Any  # (64, k / 2) shared memory: where the output goes before it is stored
    acc_s: Any  # (64, 64) fp32 registers
    acc_o: Any  # (64, k / 2) fp32 registers
    row_max: Any  # running maximum of the thread's two rows, times scale_log2,
    row_sum: Any  # and this thread's share of the sums of the own P
    limits: Any  # keys that each of the two rows may see

    @classmethod
    def make(cls, me, geometry, shared, thread, scale_log2, seq_len, first_row) -> Consumer:
        """Views of a thread's part. shared: `Shared`."""
        q_tile, stages, full, empty, maxima = shared
        dtype = q_tile.element_type
        mma_s = wgmma.make_mma(dtype, TOKENS)
        mma_rs = wgmma.make_mma(dtype, geometry.half, a_in_registers=True, b_major=OperandMajorMode.MN)
        mma_ss = wgmma.make_mma(dtype, geometry.half, b_major=OperandMajorMode.MN)
        keys = wgmma.k_major_layout(dtype, (TOKENS, geometry.k + geometry.p))
        values = wgmma.mn_major_layout(dtype, (geometry.half, TOKENS))
        square = wgmma.k_major_layout(dtype, (ROWS, TOKENS))
        staging = wgmma.k_major_layout(dtype, (ROWS, geometry.half))
        scores, output = mma_s.get_slice(thread), mma_ss.get_slice(thread)
        half, rope = me * geometry.half * TOKENS, geometry.rope * PANEL_ELEMENTS

        def at(stage: int, offset: int, layout: Any) -> cute.Tensor:
            return wgmma.smem_view(stages, stage * geometry.stage_elements + offset, layout)

        frag_q = mma_s.make_fragment_A(scores.partition_A(q_tile))
        frag_k = mma_s.make_fragment_B(scores.partition_B(at(me, 0, keys)))
        frag_v = [mma_ss.make_fragment_B(output.partition_B(at(i, half, values))) for i in (EVEN, ODD)]
        frag_p = mma_ss.make_fragment_A(output.partition_A(at(1 - me, rope, square)))
        p_copy = cute.make_tiled_copy_C(wgmma.stmatrix_atom(dtype), mma_s).get_slice(thread)
        p_target = p_copy.partition_D(at(me, rope, square))
        made = cls(
            me=me,
            geometry=geometry,
            dtype=dtype,
            thread=thread,
            scale_log2=scale_log2,
            seq_len=seq_len,
            full=full,
            empty=empty,
            stages=stages,
            maxima=maxima,
            mma_s=mma_s,
            mma_rs=mma_rs,
            mma_ss=mma_ss,
            frag_q=frag_q,
            frag_k=frag_k,
            frag_v=frag_v,
            frag_p=frag_p,
            p_copy=p_copy,
            p_target=p_target,
            staging=wgmma.smem_view(stages, half, staging),
            acc_s=cute.make_rmem_tensor(mma_s.partition_shape_C((ROWS, TOKENS)), Float32),
            acc_o=cute.make_rmem_tensor(mma_ss.partition_shape_C((ROWS, geometry.half)), Float32),
            row_max=cute.make_rmem_tensor(2, Float32),
            row_sum=cute.make_rmem_tensor(2, Float32),
            limits=cute.make_rmem_tensor(2, Int32),
        )
        for r in range(2):
            limit = seq_len
            if geometry.causal:
                limit = seq_len - geometry.s + 1 + (first_row + wgmma.acc_row(thread, r)) // geometry.group
            made.limits[r] = limit
        return made

    @cute.jit
    def scores(self, parity: Int32, drain: cutlass.Constexpr):
        """S = Q·Kᵀ of the own tile, in the order in which its halves are refilled; waits for S. With `drain` the
        product with the other stage's V is in flight: its half is freed as soon as that ends."""
        own, other = self.me, 1 - self.me
        first = self.geometry.freed_by(own, own)
        panels = (*first, *self.geometry.freed_by(own, other))
        for i in cutlass.range_constexpr(len(panels)):
            cute.arch.mbarrier_wait(self.full + (own * self.geometry.panels + panels[i]), parity)
            blocks = wgmma.k_blocks(panels[i : i + 1])
            wgmma.gemm_issue(self.mma_s, self.acc_s, self.frag_q, self.frag_k, blocks, zero_init=i == 0)
            if cutlass.const_expr(drain and i == len(first) - 1):
                warpgroup.wait_group(len(first))
                self.free(other)
        warpgroup.wait_group(0)

    @cute.jit
    def free(self, stage: cutlass.Constexpr):
        """This warp no longer reads its half of a stage."""
        warp_arrive(self.empty + (2 * stage + self.me))

    @cute.jit
    def publish(self, row_values: cute.Tensor, r: cutlass.Constexpr, value: Float32):
        """Writes the value of the thread's row r for the other consumer; row_values: (ROWS,), shared memory."""
        if self.thread % 4 == 0:
            row_values[wgmma.acc_row(self.thread, r)] = value

    @cute.jit
    def send_p(self, p: cute.Tensor):
        """This consumer's P into the rope panel of its own stage, visible to MMAs behind the next barrier."""
        cute.copy(self.p_copy, self.p_copy.retile(p), self.p_target)
        cute.arch.fence_view_async_shared()

    @cute.jit
    def zero_past_end(self, stage: cutlass.Constexpr, first_token: Int32):
        """Zeroes this consumer's half of V in the rows of a stage that lie past the end of the request."""
        half = self.stages + (
            stage * self.geometry.stage_elements + self.me * self.geometry.half_panels * PANEL_ELEMENTS
        )
        paged.zero_rows(half, self.seq_len - first_token, self.thread, self.geometry.half_panels)
        cute.arch.fence_view_async_shared()
        named_sync(Barrier.EVEN + self.me, WARPGROUP)

    @cute.jit
    def even_step(self, pair: Int32, parity: Int32, masked: cutlass.Constexpr, more: cutlass.Constexpr):
        """EVEN's share of a pair of tiles; S0 is in acc_s. more: makes the next pair's S0."""
        max_even, max_odd = self.maxima
        if cutlass.const_expr(masked):
            softmax.mask_columns(self.acc_s, self.thread, pair * (2 * TOKENS), self.limits)
        new_max = cute.make_rmem_tensor(2, Float32)
        factor = cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            new_max[r] = cute.arch.fmax(self.row_max[r], softmax.row_max(self.acc_s, r) * self.scale_log2)
            factor[r] = softmax.exp2(self.row_max[r] - new_max[r])
            self.publish(max_even, r, new_max[r])
        named_arrive(Barrier.MAX_EVEN, CONSUMERS)
        for r in cutlass.range_constexpr(2):
            self.row_sum[r] = self.row_sum[r] * factor[r] + softmax.row_exp2(self.acc_s, r, self.scale_log2, new_max[r])
        p0 = wgmma.to_dtype(self.acc_s, self.dtype)
        wgmma.scale_rows(self.acc_o, factor)
        if cutlass.const_expr(masked):
            self.zero_past_end(EVEN, pair * (2 * TOKENS))
        # O_L += P0·V0_L
        wgmma.gemm_issue(self.mma_rs, self.acc_o, wgmma.as_a_operand(p0), self.frag_v[EVEN], range(4))

        named_sync(Barrier.MAX_ODD, CONSUMERS)
        for r in cutlass.range_constexpr(2):
            after_odd = max_odd[wgmma.acc_row(self.thread, r)]
            factor[r] = softmax.exp2(new_max[r] - after_odd)
            self.row_max[r] = after_odd
            self.row_sum[r] = self.row_sum[r] * factor[r]
        wgmma.scale_rows(self.acc_s, factor)
        self.send_p(wgmma.to_dtype(self.acc_s, self.dtype))
        named_arrive(Barrier.P_EVEN, CONSUMERS)

        warpgroup.wait_group(0)
        if cutlass.const_expr(more):
            self.free(EVEN)
        wgmma.scale_rows(self.acc_o, factor)
        if cutlass.const_expr(masked):
            self.zero_past_end(ODD, pair * (2 * TOKENS) + TOKENS)
        named_sync(Barrier.P_ODD, CONSUMERS)
        # O_L += P1·V1_L
        wgmma.gemm_issue(self.mma_ss, self.acc_o, self.frag_p, self.frag_v[ODD], range(4))
        if cutlass.const_expr(more):
            self.scores(parity ^ 1, drain=True)
        else:
            warpgroup.wait_group(0)

    @cute.jit
    def odd_step(self, pair: Int32, parity: Int32, masked: cutlass.Constexpr, more: cutlass.Constexpr):
        """ODD's share of a pair of tiles; S1 is in acc_s. more: makes the next pair's S1."""
        max_even, max_odd = self.maxima
        if cutlass.const_expr(masked):
            softmax.mask_columns(self.acc_s, self.thread, pair * (2 * TOKENS) + TOKENS, self.limits)
        best = cute.make_rmem_tensor(2, Float32)
        factor = cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            best[r] = softmax.row_max(self.acc_s, r) * self.scale_log2
        named_sync(Barrier.MAX_EVEN, CONSUMERS)
        for r in cutlass.range_constexpr(2):
            after_odd = cute.arch.fmax(max_even[wgmma.acc_row(self.thread, r)], best[r])
            factor[r] = softmax.exp2(self.row_max[r] - after_odd)
            self.row_max[r] = after_odd
            self.publish(max_odd, r, after_odd)
        named_arrive(Barrier.MAX_ODD, CONSUMERS)
        # The even tile first: its P comes while this consumer would compute exponentials, and its half of the stage is
        # the one that is needed again soonest.
        wgmma.scale_rows(self.acc_o, factor)
        if cutlass.const_expr(masked):
            self.zero_past_end(EVEN, pair * (2 * TOKENS))
        named_sync(Barrier.P_EVEN, CONSUMERS)
        # O_R += P0·V0_R
        wgmma.gemm_issue(self.mma_ss, self.acc_o, self.frag_p, self.frag_v[EVEN], range(4))
        for r in cutlass.range_constexpr(2):
            self.row_sum[r] = self.row_sum[r] * factor[r] + softmax.row_exp2(
                self.acc_s, r, self.scale_log2, self.row_max[r]
            )
        p1 = wgmma.to_dtype(self.acc_s, self.dtype)
        self.send_p(p1)
        named_arrive(Barrier.P_ODD, CONSUMERS)
        if cutlass.const_expr(masked):
            self.zero_past_end(ODD, pair * (2 * TOKENS) + TOKENS)
        # O_R += P1·V1_R
        wgmma.gemm_issue(self.mma_rs, self.acc_o, wgmma.as_a_operand(p1), self.frag_v[ODD], range(4))
        if cutlass.const_expr(more):
            warpgroup.wait_group(1)
            self.free(EVEN)
        warpgroup.wait_group(0)
        if cutlass.const_expr(more):
            self.free(ODD)
            self.scores(parity ^ 1, drain=False)

    @cute.jit
    def run(self, first: Int32, end: Int32, unmasked: Int32):
        """All pairs of a CTA. unmasked: keys that every row may see; pairs below need no mask, and the last one takes
        the masking path."""
        step = self.even_step if cutlass.const_expr(self.me == EVEN) else self.odd_step
        self.acc_o.fill(0.0)
        self.row_max.fill(softmax.NO_KEY)
        self.row_sum.fill(0.0)
        self.scores(Int32(0), drain=False)
        plain = end - 1
        if cutlass.const_expr(self.geometry.causal):
            plain = cutlass.max(cutlass.min(unmasked // (2 * TOKENS), end - 1), first)
        for pair in cutlass.range(first, plain, unroll=1):
            step(pair, (pair - first) & 1, masked=False, more=True)
        if cutlass.const_expr(self.geometry.causal):
            for pair in cutlass.range(plain, end - 1, unroll=1):
                step(pair, (pair - first) & 1, masked=True, more=True)
        step(end - 1, (end - 1 - first) & 1, masked=True, more=False)


# ------------------------------------------------------------------------------------------------ device: epilogue
def row_vector(tensor: cute.Tensor, request: Int32, kv_head: Int32, row: Int32, group: int) -> cute.Tensor:
    """A row of a (b, s, h, columns) tensor in global memory, (columns,)."""
    start = tensor.iterator + rows.row_offset(tensor, request, kv_head, row, group)
    return cute.make_tensor(start, cute.make_layout(tensor.shape[3]))


def partial_row(partial_lse: cute.Tensor, split: Int32, request: Int32, kv_head: Int32, row: Int32) -> Int64:
    """Index of a row in the (splits, b, h_kv, rows) workspaces."""
    _, b, h_kv, num_rows = partial_lse.shape
    return ((Int64(split) * b + request) * h_kv + kv_head) * num_rows + row


@cute.jit
def store_rows(
    w: cutlass.Constexpr,  # a `Consumer`; its staging tile is complete
    out: cute.Tensor,  # (b, s, h, k), global memory
    request: Int32,
    kv_head: Int32,
    first_row: Int32,
):
    """Writes a consumer's half of the rows, 16 bytes a thread and a whole row (or several) a warp."""
    columns = w.geometry.half
    per_row = cutlass.const_expr(min(columns // rows.CHUNK, 32))  # threads
    if cutlass.const_expr(columns % (per_row * rows.CHUNK) != 0 or WARPGROUP % per_row != 0):
        per_row = 8
    step = WARPGROUP // per_row
    atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), out.element_type, num_bits_per_copy=128)
    copy = cute.make_tiled_copy_tv(
        atom, cute.make_ordered_layout((step, per_row), order=(1, 0)), cute.make_layout((1, rows.CHUNK))
    )
    source = copy.get_slice(w.thread).partition_S(w.staging)
    first_chunk = w.me * columns // rows.CHUNK
    for i in cutlass.range_constexpr(ROWS // step):
        row = first_row + i * step + w.thread // per_row
        if row < w.geometry.rows:
            target = row_vector(out, request, kv_head, row, w.geometry.group)
            target = cute.zipped_divide(target, (rows.CHUNK,))
            for j in cutlass.range_constexpr(columns // (per_row * rows.CHUNK)):
                value = cute.make_rmem_tensor(rows.CHUNK, out.element_type)
                cute.autovec_copy(source[(None, 0), i, j], value)
                cute.autovec_copy(value, target[None, first_chunk + j * per_row + w.thread % per_row])


@cute.jit
def epilogue(
    w: cutlass.Constexpr,  # a `Consumer`
    sums: cutlass.Constexpr,  # (ROWS,) fp32 each, shared memory: the consumers' row sums
    outputs: Outputs,
    place: Place,
    first_row: Int32,  # of the query tile
):
    """Adds the two row sums up, divides, and writes this consumer's half of the output or of the partial one."""
    out, lse, partial_out, partial_lse = outputs
    request, kv_head, _, split, num_splits = place
    geometry, k = w.geometry, w.geometry.k
    lane_row = wgmma.acc_row(w.thread, 0)
    for r in cutlass.range_constexpr(2):
        w.row_sum[r] = softmax.quad_sum(w.row_sum[r])
        w.publish(sums[w.me], r, w.row_sum[r])
    # Past this barrier nobody reads the stages any more, so the output may be staged in them.
    named_sync(Barrier.CONSUMERS, CONSUMERS)
    inverse = cute.make_rmem_tensor(2, Float32)
    for r in cutlass.range_constexpr(2):
        w.row_sum[r] = w.row_sum[r] + sums[1 - w.me][lane_row + 8 * r]
        inverse[r] = Float32(0.0) if w.row_sum[r] == 0.0 else 1.0 / w.row_sum[r]
    wgmma.scale_rows(w.acc_o, inverse)

    if num_splits == 1:
        copy = cute.make_tiled_copy_C(wgmma.stmatrix_atom(out.element_type), w.mma_ss).get_slice(w.thread)
        cute.copy(copy, copy.retile(wgmma.to_dtype(w.acc_o, out.element_type)), copy.partition_D(w.staging))
        named_sync(Barrier.EVEN + w.me, WARPGROUP)
        store_rows(w, out, request, kv_head, first_row)
    for r in cutlass.range_constexpr(2):
        row, total = first_row + lane_row + 8 * r, w.row_sum[r]
        if row < geometry.rows:
            lse_log2 = w.row_max[r] + cute.math.log2(total, fastmath=True)
            if num_splits == 1:
                if cutlass.const_expr(w.me == EVEN):
                    if w.thread % 4 == 0:
                        head, token = kv_head * geometry.group + row % geometry.group, row // geometry.group
                        lse[request, head, token] = Float32.inf if total == 0.0 else lse_log2 * math.log(2.0)
            else:
                index = partial_row(partial_lse, split, request, kv_head, row)
                if cutlass.const_expr(w.me == EVEN):
                    if w.thread % 4 == 0:
                        of_row = cute.make_tensor(partial_lse.iterator + index, cute.make_layout(1))
                        of_row[0] = -Float32.inf if total == 0.0 else lse_log2
                start = partial_out.iterator + cute.assume(index * k, divby=k)
                store_accumulator_row(wgmma.as_rows(w.acc_o)[r, None], start + w.me * geometry.half, w.thread)


@cute.jit
def store_accumulator_row(acc_row: cute.Tensor, target: cute.Pointer, thread: Int32):
    """Writes a thread's columns of one accumulator row in fp32, as they lie: one 32-byte sector a quad."""
    groups = cute.size(acc_row) // 2
    view = cute.make_tensor(target, cute.make_layout((2, 4, groups), stride=(1, 2, 8)))
    pair = cute.make_rmem_tensor(2, Float32)
    for j in cutlass.range_constexpr(groups):
        pair[0] = acc_row[2 * j]
        pair[1] = acc_row[2 * j + 1]
        cute.autovec_copy(pair, view[None, thread % 4, j])


@cute.jit
def store_no_keys(
    outputs: Outputs,
    place: Place,
    thread: Int32,  # 0..255
    geometry: cutlass.Constexpr,
):
    """A CTA without keys: zeros and +inf, or, with several splits, an LSE of -inf: `combine` skips such a split."""
    out, lse, _, partial_lse = outputs
    request, kv_head, row_tile, split, num_splits = place
    row = row_tile * ROWS + thread // 4
    if row < geometry.rows:
        if num_splits == 1:
            zeros = cute.make_rmem_tensor(rows.CHUNK, out.element_type)
            zeros.fill(0.0)
            target = cute.zipped_divide(row_vector(out, request, kv_head, row, geometry.group), (rows.CHUNK,))
            for i in cutlass.range(thread % 4, geometry.k // rows.CHUNK, 4, unroll=1):
                cute.autovec_copy(zeros, target[None, i])
            if thread % 4 == 0:
                lse[request, kv_head * geometry.group + row % geometry.group, row // geometry.group] = Float32.inf
        else:
            if thread % 4 == 0:
                index = partial_row(partial_lse, split, request, kv_head, row)
                of_row = cute.make_tensor(partial_lse.iterator + index, cute.make_layout(1))
                of_row[0] = -Float32.inf


# ------------------------------------------------------------------------------------------------ device: the kernels
@cute.kernel
def flash_mla(
    q: cute.Tensor,  # (b, s, h, k + p) 16-bit, global memory, contiguous
    tma: cute.CopyAtom,  # one 64 x 64 box of the cache
    cache: cute.Tensor,  # TMA tensor (page, k + p, h_kv, num_pages)
    page_table: cute.Tensor,  # (b, max_pages) int32, global memory, entries of a row contiguous
    seq_lens: cute.Tensor,  # (b,) int32, global memory
    outputs: Outputs,
    scale_log2: Float32,
    num_splits: Int32,
    geometry: cutlass.Constexpr,
):
    """The CTA of a query tile, kv head and request (x) and split (y): requests are on the one axis that has room for
    any number of them."""
    dtype = q.element_type
    thread, _, _ = cute.arch.thread_idx()
    tile, split, _ = cute.arch.block_idx()
    row_tile = tile % geometry.row_tiles
    kv_head = tile // geometry.row_tiles % geometry.h_kv
    request = tile // (geometry.row_tiles * geometry.h_kv)
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    seq_len = seq_lens[request]
    work = work_range(seq_len, row_tile, split, num_splits, geometry)
    first, end, _, unmasked = work
    place = Place(request, kv_head, row_tile, split, num_splits)

    q_layout = wgmma.k_major_layout(dtype, (ROWS, geometry.k + geometry.p))
    storage = SmemAllocator().allocate(shared_storage(geometry, dtype))
    q_tile = storage.query.get_tensor(q_layout.outer, swizzle=q_layout.inner)
    stages = storage.stages.data_ptr()
    full = storage.full.data_ptr()
    empty = storage.empty.data_ptr()
    if warp == 0:
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(STAGES * geometry.panels):
                cute.arch.mbarrier_init(full + i, 1)
            for i in cutlass.range_constexpr(2 * STAGES):
                cute.arch.mbarrier_init(empty + i, WARPGROUP // 32)
        cpasync.prefetch_descriptor(tma)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()

    if warp >= CONSUMERS // 32:
        cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
        layout = wgmma.k_major_layout(dtype, (TOKENS, geometry.k + geometry.p, STAGES))
        tiles = wgmma.smem_view(stages, 0, layout)
        boxes, places = paged.boxes_of(tma, cache[None, None, kv_head, None], tiles)
        places, pages = places[None, 0, None, None], page_table[request, None]
        for i in cutlass.range_constexpr(2 * STAGES):
            stage, half = i // 2, i % 2
            if warp == CONSUMERS // 32 + i:
                load(
                    tma, boxes, places, pages, full + stage * geometry.panels, empty + i, work, stage,
                    geometry.freed_by(stage, half), geometry.page,
                )  # fmt: skip
    else:
        cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
        if first < end:
            first_row = row_tile * ROWS
            copy_query_rows(q, q_tile, request, kv_head, first_row, thread, geometry)
            cute.arch.cp_async_wait_group(0)
            cute.arch.fence_view_async_shared()
            named_sync(Barrier.CONSUMERS, CONSUMERS)
            one_a_row = cute.make_layout(ROWS)
            maxima = (storage.max_even.get_tensor(one_a_row), storage.max_odd.get_tensor(one_a_row))
            shared = Shared(q_tile, stages, full, empty, maxima)
            sums = (storage.sum_even.get_tensor(one_a_row), storage.sum_odd.get_tensor(one_a_row))
            if warp < WARPGROUP // 32:
                w = Consumer.make(EVEN, geometry, shared, thread, scale_log2, seq_len, first_row)
                w.run(first, end, unmasked)
                epilogue(w, sums, outputs, place, first_row)
            else:
                w = Consumer.make(ODD, geometry, shared, thread - WARPGROUP, scale_log2, seq_len, first_row)
                w.run(first, end, unmasked)
                epilogue(w, sums, outputs, place, first_row)
        else:
            store_no_keys(outputs, place, thread, geometry)


flash_mla.set_name_prefix("flash_mla", remove_cutlass_symbol=True, keep_mangled_name=False)


@cute.kernel
def combine(
    partial_out: cute.Tensor,  # (splits, b, h_kv, rows, k) fp32, global memory, contiguous
    partial_lse: cute.Tensor,  # (splits, b, h_kv, rows) fp32, log2 domain, global memory, contiguous
    out: cute.Tensor,  # (b, s, h, k) 16-bit, global memory, columns contiguous
    lse: cute.Tensor,  # (b, h, s) fp32, natural log, global memory
):
    """The CTA of a query row, kv head and request (x); a thread has four columns.

    Splits without keys have an LSE of -inf: their output is not read, for nobody wrote it. One that is NaN is no number
    to compare with, so that its weight, NaN too, is asked whether it is 0, and never whether it is above.
    """
    thread, _, _ = cute.arch.thread_idx()
    place, _, _ = cute.arch.block_idx()
    splits, b, h_kv, num_rows, k = partial_out.shape
    row, kv_head, request = place % num_rows, place // num_rows % h_kv, place // (num_rows * h_kv)
    group = lse.shape[1] // h_kv
    stride = Int64(b) * (h_kv * num_rows)
    index = (Int64(request) * h_kv + kv_head) * num_rows + row

    lses = cute.make_tensor(partial_lse.iterator + index, cute.make_layout(splits, stride=stride))
    columns = (COMBINE_COLUMNS, k // COMBINE_COLUMNS, splits)
    values = cute.make_tensor(
        partial_out.iterator + cute.assume(index * k, divby=k),
        cute.make_layout(columns, stride=(1, COMBINE_COLUMNS, cute.assume(stride * k, divby=k))),
    )
    best = -Float32.inf
    for i in cutlass.range(splits, unroll=4):
        best = cute.arch.fmax(best, lses[i])
    shift = best if best > -Float32.inf else Float32(0.0)

    acc = cute.make_rmem_tensor(COMBINE_COLUMNS, Float32)
    acc.fill(0.0)
    part = cute.make_rmem_tensor(COMBINE_COLUMNS, Float32)
    total = Float32(0.0)
    for i in cutlass.range(splits, unroll=4):
        weight = softmax.exp2(lses[i] - shift)
        if not weight == 0.0:
            cute.autovec_copy(values[None, thread, i], part)
            total = total + weight
            for j in cutlass.range_constexpr(COMBINE_COLUMNS):
                acc[j] = acc[j] + weight * part[j]

    inverse = Float32(0.0) if total == 0.0 else 1.0 / total
    packed = cute.make_rmem_tensor(COMBINE_COLUMNS, out.element_type)
    for j in cutlass.range_constexpr(COMBINE_COLUMNS):
        packed[j] = (acc[j] * inverse).to(out.element_type)
    target = cute.zipped_divide(row_vector(out, request, kv_head, row, group), (COMBINE_COLUMNS,))
    cute.autovec_copy(packed, target[None, thread])
    if thread == 0:
        lse[request, kv_head * group + row % group, row // group] = softmax.natural_lse(total, shift)


combine.set_name_prefix("combine", remove_cutlass_symbol=True, keep_mangled_name=False)


# ------------------------------------------------------------------------------------------------ host
@cute.jit
def launch_flash_mla(
    q: cute.Tensor,
    kv_cache: cute.Tensor,  # (num_pages, page, h_kv, k + p) 16-bit, global memory, contiguous
    page_table: cute.Tensor,
    seq_lens: cute.Tensor,
    out: cute.Tensor,
    lse: cute.Tensor,
    partial_out: cute.Tensor,
    partial_lse: cute.Tensor,
    scale: Float32,
    num_splits: Int32,
    geometry: cutlass.Constexpr,
    stream: CUstream,
):
    """Makes the TMA descriptor of the cache and launches a CTA for each query tile, kv head, split and request."""
    tma, cache = paged.make_page_tma(kv_cache)
    outputs = Outputs(out, lse, partial_out, partial_lse)
    flash_mla(
        q, tma, cache, page_table, seq_lens, outputs, scale * math.log2(math.e), num_splits, geometry
    ).launch(
        grid=(geometry.row_tiles * geometry.h_kv * q.shape[0], num_splits, 1),
        block=(THREADS, 1, 1),
        min_blocks_per_mp=1,
        stream=stream,
    )  # fmt: skip


@cute.jit
def launch_combine(
    partial_out: cute.Tensor, partial_lse: cute.Tensor, out: cute.Tensor, lse: cute.Tensor, stream: CUstream
):
    """A CTA for every query row, of k / 4 threads."""
    _, b, h_kv, num_rows, k = partial_out.shape
    combine(partial_out, partial_lse, out, lse).launch(
        grid=(num_rows * h_kv * b, 1, 1), block=(k // COMBINE_COLUMNS, 1, 1), stream=stream
    )


# ------------------------------------------------------------------------------------------------ plan
# Microseconds on an H200, of the model that chooses the number of splits: a pair of KV tiles, a CTA's begin and end
# (read off b128 h128 t4096), and the combine (estimates; the tuner measures where the choice matters).
PAIR_US, CTA_US, COMBINE_US, COMBINE_BYTES_PER_US = 4.1, 5.0, 4.0, 3.0e6


def choose_splits(tiles: int, pairs: int, query_rows: int, columns: int, num_sms: int) -> int:
    """The number of splits with the least modelled time. tiles: query tiles over all requests. pairs: of KV tiles in
    the longest request. query_rows: over all requests, each `columns` wide; partials are written and read in fp32."""

    def cost(splits: int) -> float:
        per_split = -(-pairs // splits)
        used = -(-pairs // per_split)
        time = -(-tiles * used // num_sms) * (per_split * PAIR_US + CTA_US)
        if splits > 1:
            time += COMBINE_US + 8.0 * query_rows * columns * used / COMBINE_BYTES_PER_US
        return time

    return min(range(1, max(1, min(pairs, MAX_SPLITS)) + 1), key=cost)


def takes(pd: MlaProblem) -> Verdict:
    """Whether this version computes a problem."""
    if pd.k % 128 or not 128 <= pd.k <= 512:
        return Verdict.no(f"k = {pd.k} must be 128, 256, 384 or 512: each consumer owns half of the latent")
    if pd.p != PANEL:
        return Verdict.no(f"the rope part of p = {pd.p} columns must be {PANEL}: P lies in its panel")
    if pd.page_size % TOKENS:
        return Verdict.no(f"a page of {pd.page_size} tokens is not a multiple of the KV tile of {TOKENS}")
    return Verdict.yes()


@dataclass(frozen=True)
class FlashMlaTiling(Tiling):
    """num_splits: of each request's KV tiles; 0: by `choose_splits`. Tiles and stages are no knobs: a warpgroup's MMA
    has 64 rows, a stage is for the tiles of one consumer, and two of them with Q fill shared memory."""

    launch_fields: ClassVar[tuple[str, ...]] = ("num_splits",)

    num_splits: int = 0

    def validate(self, pd: MlaProblem, device: Device | None = None) -> Verdict:
        if STAGES != len((EVEN, ODD)):
            return Verdict.no(f"STAGES = {STAGES}, and the schedule is written for two: one for each consumer's tiles")
        if not 0 <= self.num_splits <= MAX_SPLITS:
            return Verdict.no(f"num_splits = {self.num_splits} is outside 0 (chosen for the sizes) to {MAX_SPLITS}")
        if not (taken := takes(pd)):
            return taken
        smem = 2048 + (1 + STAGES) * Geometry.of(pd).stage_elements * pd.element_bytes
        if device is not None and smem > device.smem_per_block:
            return Verdict.no(
                f"{smem:,} bytes of shared memory for q and {STAGES} stages are over the {device.smem_per_block:,} "
                f"that a CTA of {device.key} may have"
            )
        if not (counted := limits.decode_sizes(pd)):
            return counted
        return limits.offsets(
            pd.b * pd.s * pd.h * pd.k if self.num_splits > 1 else 0, f"num_splits = {self.num_splits}: those of a split"
        )


class FlashMlaPlan(KernelPlan):
    """One compiled kernel a problem class; b, lengths, page table width and the number of splits are arguments."""

    workload = decode.WORKLOAD
    tiling_type = FlashMlaTiling
    tiling: FlashMlaTiling
    requires = Requirement(
        archs=("sm_90a",), dtypes=("bf16", "fp16"), features=("wgmma", "tma", "setmaxnreg"), problem=takes,
        options=("strided", "strided_out"),
    )  # fmt: skip

    def default_tiling(self) -> Tiling:
        return FlashMlaTiling()

    def autotune_configs(self) -> list[Tiling]:
        pairs = self._pairs(self.problem.max_pages)
        splits = [n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128) if n <= pairs]
        return [FlashMlaTiling(), *(FlashMlaTiling(num_splits=n) for n in splits)]

    def num_splits(self, b: int, max_pages: int) -> int:
        """Splits of each request: the tiling's, or the model's for requests as long as the page table is wide."""
        if self.tiling.num_splits:
            return self.tiling.num_splits
        pd, geometry = self.problem, Geometry.of(self.problem)
        tiles = b * geometry.h_kv * geometry.row_tiles
        if b * pd.s * pd.h * pd.k > limits.MOST:  # the partial results of a split, which 32 bits count
            return 1
        return choose_splits(tiles, self._pairs(max_pages), b * pd.s * pd.h, pd.k, host.target(self).num_sms)

    def _pairs(self, max_pages: int) -> int:
        return -(-max_pages * self.problem.page_size // (2 * TOKENS))

    def partials(self, q: Any, splits: int) -> tuple[Any, Any]:
        """Workspaces (splits, b, h_kv, rows, k) and (splits, b, h_kv, rows), fp32."""
        import torch

        pd = self.problem
        shape = (splits, q.shape[0], pd.h_kv, pd.rows)
        return q.new_empty((*shape, pd.k), dtype=torch.float32), q.new_empty(shape, dtype=torch.float32)

    @any_scale(0)
    def plan(self, *inputs: Any) -> CuteKernel | KernelPipeline:
        self.require()
        q, _, page_table, seq_lens = inputs
        require_int32(page_table=page_table, seq_lens=seq_lens)
        splits = self.num_splits(q.shape[0], page_table.shape[1])
        return self._make(
            inputs, decode.new_outputs(self.problem, q), self.partials(q, splits if splits > 1 else 0), splits
        )

    def plan_empty(self) -> CuteKernel | KernelPipeline:
        self.require()
        known = self.device is not None or bool(self.tiling.num_splits)
        return self._make((), (), (), self.num_splits(self.problem.b, self.problem.max_pages) if known else 1)

    def _make(
        self, inputs: Sequence[Any], outputs: Sequence[Any], partials: Sequence[Any], splits: int
    ) -> CuteKernel | KernelPipeline:
        """The kernel on these tensors, or, where all three are empty, one that only compiles."""
        pd, kind, split = self.problem, host.element_type(self.problem.dtype), splits > 1

        def partial_arguments(b: Any) -> tuple[Any, Any]:
            (count,) = host.symbols(1)
            return (
                host.fake(Float32, count, b, pd.h_kv, pd.rows, pd.k),
                host.fake(Float32, count, b, pd.h_kv, pd.rows, align=4),
            )

        def results(b: Any) -> tuple[Any, Any]:
            return decode_host.fake_results(kind, (b, pd.s, pd.h, pd.k), (b, pd.h, pd.s), pd.strided_out)

        def arguments() -> tuple[Any, ...]:
            b, pages, width = host.symbols(3)
            given_as = decode_host.fake_apart if pd.strided else host.fake
            return (
                given_as(kind, b, pd.s, pd.h, pd.k + pd.p),
                host.fake(kind, pages, pd.page_size, pd.h_kv, pd.k + pd.p, align=128),
                given_as(Int32, b, width, align=4),
                host.fake(Int32, b, align=4),
                *results(b),
                *partial_arguments(b),
                Float32(1.0),
                Int32(1),
                Geometry.of(pd),
            )

        def combine_arguments() -> tuple[Any, ...]:
            (b,) = host.symbols(1)
            return *partial_arguments(b), *results(b)

        given = (*inputs, *outputs, *partials, pd.scale, splits) if inputs else ()
        main = host.stage(
            self, flash_mla, launch_flash_mla, "flash_mla", arguments, given, inputs, partials if split else outputs,
            partials if split else (),
        )  # fmt: skip
        if not split:
            return main
        merge = host.stage(
            self, combine, launch_combine, "combine", combine_arguments, (*partials, *outputs), partials, outputs
        )  # fmt: skip
        return KernelPipeline([main, merge], name="flash_mla", tiling=self.tiling, plan=self)
