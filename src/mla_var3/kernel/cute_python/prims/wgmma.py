"""Warpgroup MMA helpers: tiled MMAs, ranges of k, and the two views of an accumulator."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

WARPGROUP = 128  # threads
MMA_M = 64
MMA_K = 16


def make_mma(dtype: type, n: int, *, a_in_registers: bool = False, b_major: OperandMajorMode = OperandMajorMode.K):
    """A 64 x n x 16 tiled MMA of one warpgroup: A is K-major in shared memory (or in registers), fp32 accumulators."""
    source = warpgroup.OperandSource.RMEM if a_in_registers else warpgroup.OperandSource.SMEM
    op = warpgroup.MmaF16BF16Op(dtype, Float32, (MMA_M, n, MMA_K), source, OperandMajorMode.K, b_major)
    return cute.make_tiled_mma(cute.make_mma_atom(op), (1, 1, 1))


@cute.jit
def gemm_issue(
    tiled_mma: cute.TiledMma,
    acc: cute.Tensor,  # registers, (MMA, 1, 1)
    frag_a: cute.Tensor,  # shared memory descriptors or registers, (MMA, 1, K)
    frag_b: cute.Tensor,  # shared memory descriptors, (MMA, 1, K)
    blocks: cutlass.Constexpr,  # k blocks, a tuple
    zero_init: cutlass.Constexpr = False,
):
    """Issues acc (+)= A·B over the given k blocks and commits them as one group; waits for nothing."""
    warpgroup.fence()
    # A fresh atom: setting a field on a shared one inside a loop or branch leaves a value that does not dominate
    # its later uses.
    atom = cute.make_mma_atom(tiled_mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, not zero_init)
    for i in cutlass.range_constexpr(len(blocks)):
        k = blocks[i]
        cute.gemm(atom, acc, frag_a[None, None, k], frag_b[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


def k_blocks(panels: tuple[int, ...]) -> tuple[int, ...]:
    """The 16-column k blocks of some 64-column panels."""
    return tuple(4 * panel + i for panel in panels for i in range(4))


def as_rows(acc: cute.Tensor) -> cute.Tensor:
    """View of an m64nN accumulator ((2, 2, N/8), 1, 1) as (2 rows, N/4 columns) of this thread."""
    layout = acc.layout
    (col, row, group), *_ = layout.shape
    (dcol, drow, dgroup), *_ = layout.stride
    return cute.make_tensor(acc.iterator, cute.make_layout((row, (col, group)), stride=(drow, (dcol, dgroup))))


def as_a_operand(acc_like: cute.Tensor) -> cute.Tensor:
    """View of registers in the m64nN accumulator's order as the A operand ((2, 2, 2), 1, N/16) of a following MMA."""
    (_, _, groups), *_ = acc_like.layout.shape
    return cute.make_tensor(acc_like.iterator, cute.make_layout(((2, 2, 2), 1, groups // 2), stride=((1, 2, 4), 0, 8)))


def acc_row(thread: cutlass.Int32, half: int) -> cutlass.Int32:
    """Tile row that accumulator row `half` (0 or 1) of a warpgroup's thread 0..127 holds."""
    return (thread // 32) * 16 + (thread % 32) // 4 + 8 * half


@cute.jit
def scale_rows(acc: cute.Tensor, factors: cute.Tensor) -> None:
    """acc[r, :] *= factors[r] for the thread's two rows."""
    rows = as_rows(acc)
    for r in cutlass.range_constexpr(2):
        factor = factors[r]
        for j in cutlass.range_constexpr(cute.size(rows, mode=[1])):
            rows[r, j] = rows[r, j] * factor


def to_dtype(acc: cute.Tensor, dtype: type) -> cute.Tensor:
    """The accumulator in `dtype`, in new registers of the same order."""
    out = cute.make_rmem_tensor_like(acc, dtype)
    out.store(acc.load().to(dtype))
    return out


def k_major_layout(dtype: type, shape: tuple[int, ...]) -> cute.ComposedLayout:
    """128-byte-swizzled layout (rows, columns[, stages]), columns contiguous: 64-column panels one after the other."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
    return cute.tile_to_shape(atom, shape, order=tuple(range(len(shape))))


def mn_major_layout(dtype: type, shape: tuple[int, int]) -> cute.ComposedLayout:
    """The transpose of `k_major_layout(rows, columns)`: (columns, rows) over the very same bytes."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.MN_SW128, dtype)
    return cute.tile_to_shape(atom, shape, order=(1, 0))


def smem_view(base: cute.Pointer, offset: int, layout: cute.ComposedLayout) -> cute.Tensor:
    """Tensor over `base + offset` elements (a multiple of 1024 bytes, so that the swizzle phase is kept)."""
    return cute.make_tensor(cute.recast_ptr(base + offset, layout.inner), layout.outer)


def stmatrix_atom(dtype: type) -> cute.CopyAtom:
    """Stores accumulators rounded to 16 bits: four 8 x 8 matrices an instruction."""
    return cute.make_copy_atom(cute.nvgpu.warp.StMatrix8x8x16bOp(False, 4), dtype)


def as_columns(acc: cute.Tensor) -> cute.Tensor:
    """View of an m64nN accumulator (pairs of columns, rows 8 apart, groups of columns) as (N/4 columns, 2 rows)."""
    groups = cute.size(acc) // 4
    return cute.make_tensor(acc.iterator, cute.make_layout(((2, groups), 2), stride=((1, 4), 2)))


def acc_column(thread: Int32, c: int) -> Int32:
    """Query row that accumulator column c (0 .. N/4 - 1) of a thread holds."""
    return (thread % 4) * 2 + c % 2 + 8 * (c // 2)


@cute.jit
def scale_columns(acc: cute.Tensor, factors: cute.Tensor) -> None:
    """acc[:, c] *= factors[c] for the thread's columns."""
    columns = as_columns(acc)
    for c in cutlass.range_constexpr(cute.size(columns, mode=[0])):
        for i in cutlass.range_constexpr(2):
            columns[c, i] = columns[c, i] * factors[c]
