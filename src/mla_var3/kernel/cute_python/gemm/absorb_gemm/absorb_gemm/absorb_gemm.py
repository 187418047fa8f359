"""absorb_gemm v0 in CuTe for Hopper (sm_90a): the two products per head around absorbed attention, operands swapped.

    side "q"     outᵀ (512 x n) = W_UKᵀ (512 x 128) · xᵀ          side "out"     outᵀ (128 x n) = W_UV (128 x 512) · xᵀ

Tokens are few and the weight is large, so that output columns are on the M side of the MMA and tokens on the N side:
the weight is operand A (M-major for side "q", K-major for side "out", so it is read as it is stored), x is operand B,
and a tile of 8 tokens wastes nothing. A CTA keeps `tile_m` columns of a head's weight in shared memory and goes over
the head's token tiles, or every splits-th of them. Everything is loaded by TMA in panels of 64 summed columns:

                  panel 0          panel 1                        full[k] of the ring's first slots waits for the
    weight        tile_m x 64      tile_m x 64    resident        weight's panel k, too
    x             tile_n x 64      tile_n x 64    ring of `slots` panels, over all token tiles

    load (one warp)   half the weight → griddepcontrol.wait → x, with its first tile the other half, as slots get free
    consumers         a warpgroup has 64 columns, or twice 64:
        mma           for k: wait full[k];  Aᵢ(k) · B(k) → accᵢ;  when it is done, free the slot
        epilogue      accᵢ → 16 bits, transposed by stmatrix → shared memory, 64 columns a token → 128 bytes a token

The weight is nobody's output, so that half of it is loaded while the kernel before this one still ends (programmatic
dependent launch). The other half comes between the panels of x: behind the whole weight the first product would wait
for all of it. x and out may be slices (strides are multiples of 16 bytes): rows past the last token are read as zeros
and not written.

The base version. Resident weights with tokens streaming past are those of an inference GEMM whose M is a batch;
the swap is that of the decode versions, whose K·Qᵀ has the same shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator

from mla_var3.device import Device, Requirement
from mla_var3.errors import UserError
from mla_var3.kernel.cute_python import host
from mla_var3.kernel.cute_python.prims import wgmma
from mla_var3.kernel.cute_python.prims.sync import named_arrive, named_sync, wait_for_launch, warp_arrive
from mla_var3.kernel.cute_python.prims.wgmma import MMA_K, MMA_M, WARPGROUP
from mla_var3.runtime import CuteKernel, KernelPlan, Tiling, Verdict, limits
from mla_var3.workload import gemm

if TYPE_CHECKING:
    from mla_var3.workload.gemm import GemmProblem

PANEL = 64  # summed columns of a load: 128 bytes, one row of the shared memory swizzle
BLOCK = MMA_M  # output columns that a warpgroup multiplies at a time
VECTOR = 8  # elements of 16 bytes
WARPS = WARPGROUP // 32
TILES_M = (64, 128, 256, 512)
TILES_N = (8, 16, 32, 64)
SLOTS = 4  # least panels of the ring, for the next tile of x to come while one is multiplied
STAGED = 32  # tokens that a consumer has in shared memory on their way out
RESERVED = 1024  # bytes of shared memory that every CTA of an SM takes beside its own
BARRIERS = 1024  # and of a CTA's, those of mbarriers
MOST_CTAS = 4  # of an SM that shares a head's columns among them
ASSUMED = Device.assumed()  # where no device is named
# L2 policy as createpolicy encodes it: the weight is not read again before a step's other layers have passed.
EVICT_FIRST = 0x12F0000000000000


class Barrier(IntEnum):
    """Named barriers."""

    START = 1  # the mbarriers are made
    CONSUMER = 2  # the warps of one consumer; and those behind it, of the others


# ------------------------------------------------------------------------------------------------ what code is made for
@dataclass(frozen=True)
class Geometry:
    """What the code is specialised on. side: "q" or "out". h: heads. k, d: columns of latent and of a head. tile_m:
    output columns of a CTA. tile_n: tokens of a tile."""

    side: str
    h: int
    k: int
    d: int
    tile_m: int
    tile_n: int

    @property
    def columns(self) -> int:
        """Of a head's output."""
        return self.k if self.side == "q" else self.d

    @property
    def panels(self) -> int:
        """Of the summed columns."""
        return (self.d if self.side == "q" else self.k) // PANEL

    @property
    def slots(self) -> int:
        """Panels of the ring: at least those of a token tile, whose weight comes into the slots of the same numbers."""
        return max(self.panels, SLOTS)

    @property
    def blocks(self) -> int:
        """64-column blocks of a CTA."""
        return self.tile_m // BLOCK

    @property
    def consumers(self) -> int:
        # Two blocks each from 256 columns on: four consumers of one block would have registers for one CTA an SM.
        return self.blocks if self.blocks <= 2 else self.blocks // 2

    @property
    def own_blocks(self) -> int:
        """Blocks of a consumer: number `consumer`, and those `consumers` further on."""
        return self.blocks // self.consumers

    @property
    def threads(self) -> int:
        return self.consumers * WARPGROUP + 32

    @property
    def staged(self) -> int:
        return min(self.tile_n, STAGED)

    @property
    def a_major(self) -> OperandMajorMode:
        return OperandMajorMode.MN if self.side == "q" else OperandMajorMode.K

    @property
    def smem(self) -> int:
        """Bytes of a CTA's shared memory."""
        elements = BLOCK * PANEL * self.blocks * self.panels + self.slots * self.tile_n * PANEL
        return 2 * (elements + self.consumers * self.staged * BLOCK) + BARRIERS


def shared_storage(geometry: Geometry, dtype: type) -> type:
    """The CTA's shared memory."""

    def array(kind: type, size: int) -> Any:
        return cute.struct.MemRange[kind, size]

    def panels(size: int) -> Any:
        return cute.struct.Align[array(dtype, size), 1024]

    fields = {
        "full": array(Int64, geometry.slots),  # mbarriers: the panel has been loaded
        "empty": array(Int64, geometry.slots),  # mbarriers: the panel is no longer read
        "weight": panels(geometry.blocks * geometry.panels * BLOCK * PANEL),
        "ring": panels(geometry.slots * geometry.tile_n * PANEL),
        "staging": panels(geometry.consumers * geometry.staged * BLOCK),
    }
    # Not a class statement: postponed annotations are strings, and the struct wants types.
    return cute.struct(type("Storage", (), {"__annotations__": fields}))


def block_layout(dtype: type, geometry: Geometry, count: int) -> cute.ComposedLayout:
    """Of `count` panels of the weight, (64 output columns, 64 summed columns, count), swizzled. What is contiguous in
    memory is so here."""
    kind = warpgroup.SmemLayoutAtomKind
    of_q = geometry.a_major == OperandMajorMode.MN
    atom = warpgroup.make_smem_layout_atom(kind.MN_SW128 if of_q else kind.K_SW128, dtype)
    return cute.tile_to_shape(atom, (BLOCK, PANEL, count), order=(0, 1, 2))


def weight_in(storage: Any, geometry: Geometry) -> cute.Tensor:
    """(64 output columns, 64 summed columns, panels · blocks), the blocks of a panel behind each other."""
    base = storage.weight.data_ptr()
    return wgmma.smem_view(base, 0, block_layout(base.dtype, geometry, geometry.blocks * geometry.panels))


def ring_in(storage: Any, geometry: Geometry) -> cute.Tensor:
    """(tokens, 64 summed columns, slots)."""
    base = storage.ring.data_ptr()
    return wgmma.smem_view(base, 0, wgmma.k_major_layout(base.dtype, (geometry.tile_n, PANEL, geometry.slots)))


# ------------------------------------------------------------------------------------------------ device: load
def boxes_of(tma: cute.CopyAtom, source: cute.Tensor, places: cute.Tensor, rows: int) -> tuple[Any, Any]:
    """(boxes, places) of `cute.copy`: boxes (box, row tile, panel, head) of a tensor, places (box, place)."""
    boxes = cute.group_modes(cute.flat_divide(source, (rows, PANEL)), 0, 2)
    places, boxes = cpasync.tma_partition(tma, 0, cute.make_layout(1), cute.group_modes(places, 0, 2), boxes)
    return boxes, places


def next_slot(slot: Int32, phase: Int32, slots: int) -> tuple[Int32, Int32]:
    """(slot, phase) one panel further on in the ring."""
    wrapped = Int32(slot + 1 == slots)
    return slot + 1 - wrapped * slots, phase ^ wrapped


class Operand(NamedTuple):
    """What is loaded by TMA: a box of a panel's columns, and the TMA tensor (rows, summed columns, h)."""

    tma: cute.CopyAtom
    tensor: cute.Tensor


@cute.jit
def load(
    weight: Operand,  # rows are output columns
    x: Operand,  # rows are tokens
    x_address: Int64,
    storage: cutlass.Constexpr,
    first_block: Int32,
    head: Int32,
    split: Int32,
    splits: Int32,
    tiles: Int32,
    geometry: cutlass.Constexpr,
):
    """What the producer warp does. Loops stay loops: unrolled, the first loads wait for their instructions."""
    full, empty = storage.full.data_ptr(), storage.empty.data_ptr()
    panels, slots = geometry.panels, geometry.slots
    ahead = panels // 2
    weights = boxes_of(*weight, weight_in(storage, geometry), BLOCK)
    for k in cutlass.range(ahead, unroll=1):
        load_weight(weight.tma, *weights, full, first_block, k, head, geometry)
    # x may be what the kernel before writes, and out what it reads.
    wait_for_launch(x_address)
    boxes, places = boxes_of(*x, ring_in(storage, geometry), geometry.tile_n)
    slot, phase = Int32(0), Int32(0)
    for tile in cutlass.range(split, tiles, splits, unroll=1):
        for k in cutlass.range(panels, unroll=1):
            cute.arch.mbarrier_wait(empty + slot, phase ^ 1)
            # One lane is to be elected for the whole warp, not one for each group that left the wait together.
            cute.arch.sync_warp()
            if (tile == split) & (k >= ahead):
                load_weight(weight.tma, *weights, full, first_block, k, head, geometry)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full + slot, 2 * geometry.tile_n * PANEL)
            cute.copy(x.tma, boxes[None, tile, k, head], places[None, slot], tma_bar_ptr=full + slot)
            slot, phase = next_slot(slot, phase, slots)


@cute.jit
def load_weight(
    tma: cute.CopyAtom,
    boxes: cute.Tensor,  # of `boxes_of`, as places
    places: cute.Tensor,
    full: cute.Pointer,
    first_block: Int32,
    k: Int32,
    head: Int32,
    geometry: cutlass.Constexpr,
):
    """Panel k of the CTA's columns, for the first token tile, whose panel k is in slot k."""
    blocks = geometry.blocks
    with cute.arch.elect_one():
        # No arrival: that is the token panel's, which comes into the same slot.
        cute.arch.mbarrier_expect_tx(full + k, 2 * blocks * BLOCK * PANEL)
    for block in cutlass.range(blocks, unroll=1):
        cute.copy(
            tma,
            boxes[None, first_block + block, k, head],
            places[None, k * blocks + block],
            tma_bar_ptr=full + k,
            cache_policy=Int64(EVICT_FIRST),
        )


# ------------------------------------------------------------------------------------------------ device: mma
def make_mma(dtype: type, n: int, a_major: OperandMajorMode) -> cute.TiledMma:
    """A 64 x n x 16 tiled MMA of one warpgroup, both operands in shared memory, B K-major, fp32 accumulators."""
    source = warpgroup.OperandSource.SMEM
    op = warpgroup.MmaF16BF16Op(dtype, Float32, (MMA_M, n, MMA_K), source, a_major, OperandMajorMode.K)
    return cute.make_tiled_mma(cute.make_mma_atom(op), (1, 1, 1))


@cute.jit
def mma(
    tiled_mma: cute.TiledMma,
    accs: cutlass.Constexpr,  # registers, (MMA, 1, 1) of each own block
    weight: cute.Tensor,  # descriptors, (MMA, 1, 4, panels · blocks)
    tokens: cute.Tensor,  # descriptors, (MMA, 1, 4, slots)
    storage: cutlass.Constexpr,
    consumer: Int32,
    slot: Int32,
    phase: Int32,
    geometry: cutlass.Constexpr,
):
    """A token tile, whose first panel is at (slot, phase): acc of each own block; gives the next tile's (slot, phase).
    A panel's products are issued while those of the panel before it run."""
    full, empty = storage.full.data_ptr(), storage.empty.data_ptr()
    before = slot
    for i in cutlass.range_constexpr(geometry.own_blocks):
        accs[i].fill(0.0)
    for k in cutlass.range(geometry.panels, unroll=1):
        cute.arch.mbarrier_wait(full + slot, phase)
        warpgroup.fence()
        for i in cutlass.range_constexpr(geometry.own_blocks):
            atom = cute.make_mma_atom(tiled_mma.op)
            atom.set(warpgroup.Field.ACCUMULATE, True)
            place = k * geometry.blocks + i * geometry.consumers + consumer
            for j in cutlass.range_constexpr(PANEL // MMA_K):
                # accᵢ += Aᵢ(k) · B(k)
                cute.gemm(atom, accs[i], weight[None, None, j, place], tokens[None, None, j, slot], accs[i])
        warpgroup.commit_group()
        warpgroup.wait_group(1)
        if k > 0:
            warp_arrive(empty + before)
        before = slot
        slot, phase = next_slot(slot, phase, geometry.slots)
    warpgroup.wait_group(0)
    warp_arrive(empty + before)
    return slot, phase


# ------------------------------------------------------------------------------------------------ device: epilogue
@cute.jit
def epilogue(
    acc: cute.Tensor,  # registers, (MMA, 1, 1): 64 columns x tile_n tokens
    target: cute.Pointer,  # where the block's columns of token 0 go, global memory
    stride: Int64,  # from a token of out to the next, elements
    first_token: Int32,
    n: Int32,  # tokens
    staging: cute.Pointer,  # shared memory: (staged tokens, 64 columns), swizzled
    barrier: Int32,
    thread: Int32,  # of the consumer
    geometry: cutlass.Constexpr,
):
    """Rounds, transposes and stores a block: a warp's store has 128 bytes of each of four tokens."""
    dtype, staged = target.dtype, geometry.staged
    rounded = wgmma.to_dtype(acc, dtype)
    # Stores 64 x staged with the 64 rows next to each other: as K-major staged x 64.
    atom = cute.make_copy_atom(cute.nvgpu.warp.StMatrix8x8x16bOp(True, 4 if staged % 16 == 0 else 2), dtype)
    shape = make_mma(dtype, staged, geometry.a_major)
    copy = cute.make_tiled_copy_C(atom, shape).get_slice(thread)
    into = copy.partition_D(wgmma.smem_view(staging, 0, wgmma.mn_major_layout(dtype, (BLOCK, staged))))
    part = shape.partition_shape_C((BLOCK, staged))
    chunk, row = thread % VECTOR, thread // VECTOR
    vector = cute.make_layout(VECTOR)
    for i in cutlass.range_constexpr(geometry.tile_n // staged):
        values = cute.make_tensor(rounded.iterator + i * (staged // 2), cute.make_layout(part))
        cute.copy(copy, copy.retile(values), into)
        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
        for j in cutlass.range_constexpr(-(-staged * VECTOR // WARPGROUP)):
            held = j * (WARPGROUP // VECTOR) + row
            token = first_token + i * staged + held
            inside = token < n
            if cutlass.const_expr(staged * VECTOR < WARPGROUP):
                inside = inside & (held < staged)
            if inside:
                place = staging + cute.assume(held * BLOCK + (chunk ^ (held % 8)) * VECTOR, divby=VECTOR)
                address = target + cute.assume(Int64(token) * stride + chunk * VECTOR, divby=VECTOR)
                held_vector = cute.make_tensor(place.align(16), vector)
                cute.autovec_copy(held_vector, cute.make_tensor(address.align(16), vector))
        # What was staged has been read.
        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)


@cute.jit
def consume(
    out: cute.Tensor,
    storage: cutlass.Constexpr,
    first_block: Int32,
    head: Int32,
    split: Int32,
    splits: Int32,
    tiles: Int32,
    warp: Int32,
    thread: Int32,
    geometry: cutlass.Constexpr,
):
    """What a consumer does."""
    dtype = out.element_type
    consumer, thread = warp // WARPS, thread % WARPGROUP
    tiled_mma = make_mma(dtype, geometry.tile_n, geometry.a_major)
    part = tiled_mma.get_slice(thread)
    weight = tiled_mma.make_fragment_A(part.partition_A(weight_in(storage, geometry)))
    tokens = tiled_mma.make_fragment_B(part.partition_B(ring_in(storage, geometry)))
    shape = tiled_mma.partition_shape_C((BLOCK, geometry.tile_n))
    accs = [cute.make_rmem_tensor(shape, Float32) for _ in range(geometry.own_blocks)]
    staging = storage.staging.data_ptr() + cute.assume(
        consumer * (geometry.staged * BLOCK), divby=geometry.staged * BLOCK
    )
    stride = cute.assume(Int64(out.stride[0]), divby=VECTOR)
    target = out.iterator + cute.assume(Int64(head) * out.stride[1], divby=VECTOR)
    slot, phase = Int32(0), Int32(0)
    for tile in cutlass.range(split, tiles, splits, unroll=1):
        slot, phase = mma(tiled_mma, accs, weight, tokens, storage, consumer, slot, phase, geometry)
        for i in cutlass.range_constexpr(geometry.own_blocks):
            column = cute.assume((first_block + i * geometry.consumers + consumer) * BLOCK, divby=BLOCK)
            epilogue(
                accs[i], target + column, stride, tile * geometry.tile_n, out.shape[0], staging,
                Barrier.CONSUMER + consumer, thread, geometry,
            )  # fmt: skip


# ------------------------------------------------------------------------------------------------ device: the kernel
@cute.kernel
def absorb_gemm(
    weight_tma: cute.CopyAtom,  # a panel of 64 output columns
    weight: cute.Tensor,  # TMA tensor (columns, summed columns, h)
    x_tma: cute.CopyAtom,  # a panel of tile_n tokens
    x: cute.Tensor,  # TMA tensor (n, summed columns, h)
    x_address: Int64,
    out: cute.Tensor,  # (n, h, columns) 16-bit, global memory, strided
    geometry: cutlass.Constexpr,
):
    """The CTA of tile_m columns (x), head (y) and every splits-th token tile (z)."""
    thread, _, _ = cute.arch.thread_idx()
    column_tile, head, split = cute.arch.block_idx()
    _, _, splits = cute.arch.grid_dim()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    storage = SmemAllocator().allocate(shared_storage(geometry, out.element_type))
    full, empty = storage.full.data_ptr(), storage.empty.data_ptr()
    tiles = (out.shape[0] + geometry.tile_n - 1) // geometry.tile_n
    first_block = column_tile * geometry.blocks
    if warp == geometry.consumers * WARPS:
        # The producer makes the mbarriers itself, so that its first loads need not wait for the others.
        cpasync.prefetch_descriptor(weight_tma)
        cpasync.prefetch_descriptor(x_tma)
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(geometry.slots):
                cute.arch.mbarrier_init(full + i, 1)
                cute.arch.mbarrier_init(empty + i, geometry.consumers * WARPS)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_warp()
        named_arrive(Barrier.START, geometry.threads)
        operands = Operand(weight_tma, weight), Operand(x_tma, x)
        load(*operands, x_address, storage, first_block, head, split, splits, tiles, geometry)
    else:
        cute.arch.griddepcontrol_launch_dependents()
        named_sync(Barrier.START, geometry.threads)
        consume(out, storage, first_block, head, split, splits, tiles, warp, thread, geometry)


absorb_gemm.set_name_prefix("absorb_gemm", remove_cutlass_symbol=True, keep_mangled_name=False)


# ------------------------------------------------------------------------------------------------ host
@cute.jit
def launch_absorb_gemm(
    x: cute.Tensor,  # (n, h, summed columns) 16-bit, global memory; tokens and heads apart by multiples of 8 elements
    weight: cute.Tensor,  # (h · 2d, k) 16-bit, global memory, contiguous
    out: cute.Tensor,  # (n, h, columns) 16-bit, global memory, strided as x may be
    splits: Int32,
    geometry: cutlass.Constexpr,
    stream: CUstream,
):
    """Launches a CTA for every column tile, head and split of the token tiles, as a programmatic dependent."""
    h, k, d = geometry.h, geometry.k, geometry.d
    dtype = out.element_type
    # W_UKᵀ and W_UV of each head.
    if cutlass.const_expr(geometry.side == "q"):
        factor = cute.make_tensor(weight.iterator, cute.make_layout((k, d, h), stride=(1, k, 2 * d * k)))
    else:
        factor = cute.make_tensor(weight.iterator + d * k, cute.make_layout((d, k, h), stride=(k, 1, 2 * d * k)))
    copy = cpasync.CopyBulkTensorTileG2SOp()
    weight_box = cute.select(block_layout(dtype, geometry, 1), mode=[0, 1])
    weight_tma, weight_tiles = cpasync.make_tiled_tma_atom(copy, factor, weight_box, (BLOCK, PANEL), 1)
    n, _, summed = x.shape
    tokens = cute.make_tensor(x.iterator, cute.make_layout((n, summed, h), stride=(x.stride[0], 1, x.stride[1])))
    x_box = wgmma.k_major_layout(dtype, (geometry.tile_n, PANEL))
    x_tma, x_tiles = cpasync.make_tiled_tma_atom(copy, tokens, x_box, (geometry.tile_n, PANEL), 1)
    tiles = (n + geometry.tile_n - 1) // geometry.tile_n
    absorb_gemm(weight_tma, weight_tiles, x_tma, x_tiles, x.iterator.toint(), out, geometry).launch(
        grid=(geometry.columns // geometry.tile_m, h, cutlass.min(splits, tiles)),
        block=(geometry.threads, 1, 1),
        min_blocks_per_mp=1,
        stream=stream,
        use_pdl=True,
    )


# ------------------------------------------------------------------------------------------------ plan
def takes(pd: GemmProblem) -> Verdict:
    for name, value in (("k", pd.k), ("d", pd.d)):
        if value % PANEL:
            return Verdict.no(f"{name} = {value}: columns are loaded in panels of {PANEL}, use a multiple of it")
    for name, value in (("p", pd.p), ("rest", pd.rest)):
        if value % VECTOR:
            return Verdict.no(f"{name} = {value}: rows begin at multiples of {VECTOR} elements, use a multiple of it")
    if not (heads := limits.grid(pd.h, "heads of x")):
        return heads
    if not AbsorbGemmTiling().validate(pd):
        return Verdict.no(f"{BLOCK} output columns over {pd.summed} summed ones are more than a CTA's shared memory")
    return Verdict.yes()


@dataclass(frozen=True)
class AbsorbGemmTiling(Tiling):
    """tile_m: output columns of a CTA. tile_n: tokens of a tile. splits: CTAs that share the token tiles of the same
    columns."""

    launch_fields: ClassVar[tuple[str, ...]] = ("splits",)

    tile_m: int = 64
    tile_n: int = 8
    splits: int = 1

    def geometry(self, pd: GemmProblem) -> Geometry:
        return Geometry(pd.side, pd.h, pd.k, pd.d, self.tile_m, self.tile_n)

    def ctas(self, pd: GemmProblem) -> int:
        return pd.columns // self.tile_m * pd.h * min(self.splits, self.tiles(pd))

    def tiles(self, pd: GemmProblem) -> int:
        """Token tiles of the problem."""
        return -(-pd.tokens // self.tile_n)

    def validate(self, pd: GemmProblem, device: Device | None = None) -> Verdict:
        if self.tile_m not in TILES_M or pd.columns % self.tile_m:
            return Verdict.no(f"tile_m = {self.tile_m} must be one of {TILES_M} and divide the {pd.columns} columns")
        if self.tile_n not in TILES_N:
            return Verdict.no(f"tile_n = {self.tile_n} must be one of {TILES_N}")
        if self.splits < 1:
            return Verdict.no(f"splits = {self.splits} must be at least 1")
        smem = self.geometry(pd).smem
        most = (device or ASSUMED).smem_per_block
        if smem > most:
            return Verdict.no(f"{smem:,} bytes of shared memory are over the {most:,} that a CTA may have")
        return limits.grid(min(self.splits, self.tiles(pd)), "splits of the tokens of x")


def cost(pd: GemmProblem, tiling: AbsorbGemmTiling, sms: int) -> float:
    """What the SM with the most CTAs does, in elements that it could load meanwhile: it moves weights and outputs, and
    tokens from L2, which CTAs of a head share; a CTA's first product waits for its weight; token tiles of a CTA follow
    each other, and so do CTAs that find no room. The factors are those that pick best among all tilings of 90 problems
    on two chips (devlogs/absorb_gemm)."""
    geometry = tiling.geometry(pd)
    ctas, steps = -(-tiling.ctas(pd) // sms), -(-tiling.tiles(pd) // tiling.splits)
    weight, tokens = tiling.tile_m * pd.summed, min(steps * tiling.tile_n, pd.tokens)
    moved = ctas * (weight + tokens * (pd.summed / 16 + tiling.tile_m)) + weight / 2
    room = min(ASSUMED.smem_per_sm // (geometry.smem + RESERVED), ASSUMED.max_threads_per_sm // geometry.threads, ctas)
    return moved + 16 * 1024 * (steps - 1) * ctas / room + 128 * 1024 * (-(-ctas // room) - 1)


def tilings(pd: GemmProblem, sms: int, within: float) -> list[AbsorbGemmTiling]:
    """Those whose cost is at most `within` times the least, by their cost."""
    found = []
    for tile_n in TILES_N:
        if tile_n >= 2 * pd.tokens and tile_n > TILES_N[0]:
            continue  # half of the tile would be empty
        tiles = -(-pd.tokens // tile_n)
        for tile_m in TILES_M:
            most = max(1, min(MOST_CTAS * sms // (-(-pd.columns // tile_m) * pd.h), tiles))
            for splits in sorted({-(-tiles // -(-tiles // splits)) for splits in range(1, most + 1)}):
                tiling = AbsorbGemmTiling(tile_m, tile_n, splits)
                if tiling.validate(pd):
                    found.append((cost(pd, tiling, sms), tiling))
    found.sort(key=lambda pair: pair[0])
    return [tiling for least, tiling in found if least <= within * found[0][0]]


class AbsorbGemmPlan(KernelPlan):
    """Inputs (x, weight), output (out,) of `workload.gemm`. One compiled kernel a problem class and tile; tokens,
    strides and splits are arguments."""

    workload = gemm.WORKLOAD
    tiling_type = AbsorbGemmTiling
    tiling: AbsorbGemmTiling
    requires = Requirement(archs=("sm_90a",), dtypes=("bf16", "fp16"), features=("wgmma", "tma"), problem=takes)

    @property
    def sms(self) -> int:
        return (self.device or ASSUMED).num_sms

    def default_tiling(self) -> AbsorbGemmTiling:
        return tilings(self.problem, self.sms, 1.0)[0]

    def autotune_configs(self) -> list[Tiling]:
        return [*tilings(self.problem, self.sms, 1.5)]

    def plan(self, *inputs: Any) -> CuteKernel:
        return self.plan_into(inputs, gemm.new_output(self.problem, inputs[0]))

    def plan_into(self, inputs: Any, out: Any) -> CuteKernel:
        """A kernel on an output of the caller's, (n, h, columns or more), of which the first columns are written.
        Raises `UserError` where rows do not begin at multiples of 16 bytes, or the weight is not contiguous."""
        self.require()
        x, weight = inputs
        for name, tensor in {"x": x, "weight": weight, "out": out}.items():
            if tensor.data_ptr() % 16 or tensor.stride(-1) != 1 or any(s % VECTOR for s in tensor.stride()[:-1]):
                raise UserError(
                    f"{name} starts at {tensor.data_ptr():#x} with strides {tuple(tensor.stride())}: its rows must "
                    "begin at multiples of 16 bytes, their columns beside each other."
                )
        if not weight.is_contiguous():
            raise UserError(f"weight has strides {tuple(weight.stride())}: pass it contiguous, as it is stored.")
        # A view would stay where it is when `out` is pointed at other memory.
        product = out if out.shape[-1] == self.problem.columns else out[..., : self.problem.columns]
        given = (x, weight, product, self.tiling.splits)
        return self._make(given, inputs, (out,))

    def plan_empty(self) -> CuteKernel:
        self.require()
        return self._make((), (), ())

    def _make(self, given: Any, inputs: Any, outputs: Any) -> CuteKernel:
        pd, kind, geometry = self.problem, host.element_type(self.problem.dtype), self.tiling.geometry(self.problem)

        def rows(n: Any, columns: int) -> Any:
            strides = (cute.sym_int64(divisibility=VECTOR), cute.sym_int64(divisibility=VECTOR), 1)
            return make_fake_tensor(kind, (n, pd.h, columns), strides, assumed_align=16)

        def arguments() -> tuple[Any, ...]:
            (n,) = host.symbols(1)
            weight = host.fake(kind, pd.h * 2 * pd.d, pd.k)
            return rows(n, pd.summed), weight, rows(n, pd.columns), Int32(1), geometry

        return host.stage(self, absorb_gemm, launch_absorb_gemm, "absorb_gemm", arguments, given, inputs, outputs)
