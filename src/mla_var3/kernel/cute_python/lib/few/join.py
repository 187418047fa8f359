"""Joining the splits of a request inside the kernel that computes them: out = Σ wᵢ Oᵢ / Σ wᵢ, wᵢ = 2^(lseᵢ - max).

The splits of a work item are the blocks of `groups` clusters. Each block leaves its output in its own shared memory;
behind a cluster barrier every block pulls its slice of all of them through distributed shared memory and adds. With one
group that is the result. With more, a slice goes to a workspace in global memory, and the block that arrives last at
the slice's counter adds the groups. So no second kernel is launched, nobody spins, and blocks need not be resident
together beyond their cluster. All sums are in the order of the splits: results are the same bits every run.

Outputs travel as vectors of four accumulators in the order in which the MMA left them in registers; `PartShape` knows
which rows and columns they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass._mlir import ir

from mla_var3.kernel.cute_python.lib.barriers import named_sync
from mla_var3.kernel.cute_python.lib.rows import row_vector
from mla_var3.kernel.cute_python.lib.softmax import exp2
from mla_var3.kernel.cute_python.lib.wgmma import WARPGROUP

MAX_CLUSTER = 16
VECTOR = 4  # accumulators of a vector: 2 x 2 of a block of 64 rows x 8 columns
RECORD = VECTOR + 2  # floats of the workspace for a vector: with the lse of its two rows
BATCH = 8  # loads that a thread has in flight together
THREADS = 2 * WARPGROUP


@dataclass(frozen=True)
class PartShape:
    """The output of a block of swapped operands: `rows` x k. Vector v is accumulator vector v // 128 % (rows / 8) of
    thread v % 128 of a consumer, in the 64 columns v // 128 // (rows / 8): two rows, next to each other, and two
    columns, 8 apart."""

    rows: int
    k: int

    @property
    def vectors(self) -> int:
        return self.rows * self.k // VECTOR

    def workspace(self, items: int, groups: int) -> int:
        """Floats of the workspace."""
        return items * groups * self.vectors * RECORD if groups > 1 else 0

    def first_row(self, v: Int32) -> Int32:
        return (v % 4) * 2 + 8 * (v // WARPGROUP % (self.rows // 8))

    def first_column(self, v: Int32) -> Int32:
        return v // (WARPGROUP * (self.rows // 8)) * 64 + v % WARPGROUP // 32 * 16 + v % 32 // 4

    def element(self, row: int, column: int) -> int:
        """Of a vector: which accumulator is its row 0 or 1 and column 0 or 1."""
        return row + 2 * column


def part_vectors(base: cute.Pointer, part: PartShape) -> cute.Tensor:
    """fp32 memory as (4, vectors)."""
    return cute.make_tensor(base, cute.make_layout((VECTOR, part.vectors), stride=(1, VECTOR)))


def workspace_part(workspace: cute.Tensor, index: Int64, part: PartShape) -> tuple[cute.Tensor, cute.Tensor]:
    """What one group of an item leaves in the workspace: vectors (4, vectors), then lse of their rows (2, vectors)."""
    base = workspace.iterator + cute.assume(index * (part.vectors * RECORD), divby=4)
    pairs = cute.make_tensor(base + part.vectors * VECTOR, cute.make_layout((2, part.vectors), stride=(1, 2)))
    return part_vectors(base, part), pairs


@cute.jit
def load_cg(target: cute.Tensor, pointer: cute.Pointer, count: cutlass.Constexpr):
    """`count` fp32 from global memory past the L1: another block of this kernel wrote them."""
    kind = ir.VectorType.get([count], Float32.mlir_type)
    value = cute.arch.load(pointer, kind, cop="cg")
    target.store(cute.TensorSSA(value, (count,), Float32))


@cute.jit
def add_parts(
    acc: cute.Tensor,  # registers (4,): weighted sum so far
    state: cute.Tensor,  # registers (4,): the maximum and the sum of weights of the two rows
    parts: cute.Tensor,  # registers (4, BATCH)
    lses: cute.Tensor,  # registers (2, BATCH); -inf for what is not there
    part: cutlass.Constexpr,
):
    """One more batch of partial results, an online softmax over them."""
    for r in cutlass.range_constexpr(2):
        best = state[r]
        for i in cutlass.range_constexpr(BATCH):
            best = cute.arch.fmax(best, lses[r, i])
        shift = best if best > -Float32.inf else Float32(0.0)
        factor = exp2(state[r] - shift)
        state[r] = best
        total = state[2 + r] * factor
        for c in cutlass.range_constexpr(2):
            e = part.element(r, c)
            acc[e] = acc[e] * factor
        for i in cutlass.range_constexpr(BATCH):
            weight = exp2(lses[r, i] - shift)
            total = total + weight
            for c in cutlass.range_constexpr(2):
                e = part.element(r, c)
                acc[e] = acc[e] + weight * parts[e, i]
        state[2 + r] = total


@cute.jit
def begin(acc: cute.Tensor, state: cute.Tensor):
    acc.fill(0.0)
    for r in cutlass.range_constexpr(2):
        state[r] = -Float32.inf
        state[2 + r] = Float32(0.0)


@cute.jit
def divide(acc: cute.Tensor, state: cute.Tensor, lse: cute.Tensor, part: cutlass.Constexpr):
    """Divides by the sums of weights; lse (2,) in log2, -inf for a row without keys (whose output is 0)."""
    for r in cutlass.range_constexpr(2):
        total = state[2 + r]
        inverse = 1.0 / total if total > 0.0 else Float32(0.0)
        value = state[r] + cute.math.log2(total, fastmath=True)
        lse[r] = value if total > 0.0 else -Float32.inf
        for c in cutlass.range_constexpr(2):
            e = part.element(r, c)
            acc[e] = acc[e] * inverse


@cute.jit
def write_result(
    acc: cute.Tensor,
    lse2: cute.Tensor,
    v: Int32,
    out: cute.Tensor,
    lse: cute.Tensor,
    batch: Int32,
    kv_head: Int32,
    first_row: Int32,
    num_rows: cutlass.Constexpr,
    group: cutlass.Constexpr,
    part: cutlass.Constexpr,
):
    """A vector of the final output, and the lse of its rows where it has column 0."""
    column = part.first_column(v)
    for r in cutlass.range_constexpr(2):
        row = first_row + part.first_row(v) + r
        if row < num_rows:
            target = row_vector(out, batch, kv_head, row, group, part.k)
            for c in cutlass.range_constexpr(2):
                target[column + 8 * c] = acc[part.element(r, c)].to(out.element_type)
            if column == 0:
                value = Float32.inf
                if lse2[r] > -Float32.inf:
                    value = lse2[r] * math.log(2.0)
                lse[batch, kv_head * group + row % group, row // group] = value


@cute.jit
def share_lse(lses: cute.Pointer, own: cute.Tensor, first: Int32, cluster: Int32, rank: Int32, peer: Int32,
              part: cutlass.Constexpr):  # fmt: skip
    """Writes two neighbouring rows' lse (registers, (2,)) into the board of block `peer`: (rows, source block)."""
    if peer < cluster:
        remote = cute.arch.map_dsmem_ptr(lses, peer)
        board = cute.make_tensor(remote, cute.make_layout((2, part.rows // 2, MAX_CLUSTER)))
        cute.autovec_copy(own, board[None, first // 2, rank])


@cute.jit
def join(
    parts: cute.Pointer,  # shared memory, fp32: this block's output
    lses: cute.Pointer,  # shared memory, fp32, (rows, MAX_CLUSTER), filled by the blocks of the cluster
    flag: cute.Pointer,  # shared memory, int32
    workspace: cute.Tensor,  # (items · groups · vectors · RECORD,) fp32, global memory
    counter: cute.Tensor,  # (items · cluster,) int32, global memory: groups that arrived at a slice; 0 in, 0 out
    out: cute.Tensor,
    lse: cute.Tensor,
    item: Int32,
    group_index: Int32,
    groups: Int32,
    cluster: Int32,
    rank: Int32,
    batch: Int32,
    kv_head: Int32,
    first_row: Int32,
    num_rows: cutlass.Constexpr,
    group: cutlass.Constexpr,
    part: cutlass.Constexpr,
    thread: Int32,  # 0..255
    barrier: cutlass.Constexpr,  # named barrier of the 256 threads
):
    """Behind the cluster barrier: adds this block's slice of the output over the cluster, and over the groups. Arrives
    at the cluster barrier when it has read the other blocks' memory; the caller waits there before it ends."""
    acc = cute.make_rmem_tensor(VECTOR, Float32)
    state = cute.make_rmem_tensor(4, Float32)
    batch_parts = cute.make_rmem_tensor((VECTOR, BATCH), Float32)
    batch_lses = cute.make_rmem_tensor((2, BATCH), Float32)
    lse2 = cute.make_rmem_tensor(2, Float32)
    batch_parts.fill(0.0)
    board = cute.make_tensor(lses, cute.make_layout((part.rows, MAX_CLUSTER)))
    per = (part.vectors + cluster - 1) // cluster
    begin_v = rank * per
    end_v = cutlass.min(begin_v + per, part.vectors)

    for v in cutlass.range(begin_v + thread, end_v, THREADS, unroll=1):
        begin(acc, state)
        row = part.first_row(v)
        for first in cutlass.range(0, cluster, BATCH, unroll=1):
            for i in cutlass.range_constexpr(BATCH):
                source = first + i
                for r in cutlass.range_constexpr(2):
                    batch_lses[r, i] = -Float32.inf
                if source < cluster:
                    remote = part_vectors(cute.arch.map_dsmem_ptr(parts, source), part)
                    cute.autovec_copy(remote[None, v], batch_parts[None, i])
                    for r in cutlass.range_constexpr(2):
                        batch_lses[r, i] = board[row + r, source]
            add_parts(acc, state, batch_parts, batch_lses, part)
        divide(acc, state, lse2, part)
        if groups == 1:
            write_result(acc, lse2, v, out, lse, batch, kv_head, first_row, num_rows, group, part)
        else:
            values, pairs = workspace_part(workspace, Int64(item) * groups + group_index, part)
            cute.autovec_copy(acc, values[None, v])
            cute.autovec_copy(lse2, pairs[None, v])

    # The others may leave: nothing of theirs is read any more.
    cute.arch.cluster_arrive()
    if groups > 1:
        # Everybody's part of the slice is out before the slice is counted.
        cute.arch.fence_acq_rel_gpu()
        named_sync(barrier, THREADS)
        board_flag = cute.make_tensor(flag, cute.make_layout(1))
        if thread == 0:
            place = counter.iterator + (item * cluster + rank)
            old = cute.arch.atomic_add(place.llvm_ptr, Int32(1), sem="acq_rel", scope="gpu")
            board_flag[0] = old
            if old == groups - 1:
                cute.make_tensor(place, cute.make_layout(1))[0] = 0
        named_sync(barrier, THREADS)
        if board_flag[0] == groups - 1:
            cute.arch.fence_acq_rel_gpu()
            for v in cutlass.range(begin_v + thread, end_v, THREADS, unroll=1):
                begin(acc, state)
                for first in cutlass.range(0, groups, BATCH, unroll=1):
                    for i in cutlass.range_constexpr(BATCH):
                        source = first + i
                        for r in cutlass.range_constexpr(2):
                            batch_lses[r, i] = -Float32.inf
                        if source < groups:
                            values, pairs = workspace_part(workspace, Int64(item) * groups + source, part)
                            load_cg(batch_parts[None, i], values[None, v].iterator, VECTOR)
                            load_cg(batch_lses[None, i], pairs[None, v].iterator, 2)
                    add_parts(acc, state, batch_parts, batch_lses, part)
                divide(acc, state, lse2, part)
                write_result(acc, lse2, v, out, lse, batch, kv_head, first_row, num_rows, group, part)
