"""merge_partials v0 in CuTe: out = Σ wᵢ · partialᵢ / Σ wᵢ with wᵢ = exp(lseᵢ - max), lse = max + log Σ wᵢ, of each row.

A warp has a row, or with fewer `vectors` a slice of its columns; a lane has `vectors` times 16 bytes of each part:

    columns     |-- 16 bytes of lane 0 --|-- lane 1 --| ... |-- lane 31 --|-- second vector of lane 0 --| ...

    prologue    addresses; griddepcontrol.wait
    loads       lse of all parts (every lane the same), partials, up to TOGETHER vectors: nothing waits for anything
    weights     max over the parts that saw a key, wᵢ in every lane: no shuffle, no shared memory, no barrier
    sums        Σ wᵢ · partialᵢ in float32, part by part; the loads of further parts behind them
    store       Σ / Σ wᵢ rounded once; lse by the first lane of a row

A part in which a row saw no key has an LSE of +inf or -inf; what is in its partial (NaN, maybe) becomes 0 before it is
multiplied. An LSE that is NaN makes the row NaN: no comparison takes it for no key. The order of sums is that of the
parts: the same bits each time, wherever a row stands.

Runs on sm_90a. Dependents may start as soon as all CTAs have begun; they wait for this grid's end before they read. The
base version: the second kernel of Flash-Decoding (Dao et al. 2023), with a row's parts all in flight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64

from mla_var3.device import Requirement
from mla_var3.errors import UserError
from mla_var3.kernel.cute_python import host
from mla_var3.kernel.cute_python.prims.softmax import NO_KEY, exp2, natural_lse
from mla_var3.kernel.cute_python.prims.sync import wait_for_launch
from mla_var3.kernel.cute_python.prims.vectors import VECTOR, WARP, load_vector, store_vector, vectors
from mla_var3.runtime import CuteKernel, KernelPlan, Tiling, Verdict
from mla_var3.workload import merge

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.workload.merge import MergeProblem

MOST_PARTS = 32  # whose loads are unrolled
MOST_VECTORS = 4  # of a lane
MOST_WARPS = 8  # of a CTA
STEP = WARP * VECTOR  # columns of a warp's vector
TOGETHER = 8  # vectors of a lane that are in flight together; of 16 the compiler was seen to load four late
FEW = 1024  # rows: about as many warps as all SMs have schedulers, so that latency decides and not what is in flight


# ------------------------------------------------------------------------------------------------ what code is made for
@dataclass(frozen=True)
class Geometry:
    """What the code is specialised on. parts: of the sequence. k: columns. vectors: of a lane. warps: of a CTA."""

    parts: int
    k: int
    vectors: int
    warps: int

    @property
    def slices(self) -> int:
        """Warps of a row."""
        return -(-self.k // (STEP * self.vectors))

    @property
    def exact(self) -> bool:
        """Whether every lane has all of its vectors."""
        return self.k % (STEP * self.vectors) == 0

    @property
    def together(self) -> int:
        """Parts that are loaded together."""
        return min(self.parts, max(1, TOGETHER // self.vectors))


# ------------------------------------------------------------------------------------------------ tiling
@dataclass(frozen=True)
class MergePartialsTiling(Tiling):
    """vectors: of 16 bytes that a lane has of each part; fewer means more warps a row. warps: of a CTA."""

    vectors: int = 2
    warps: int = 4

    def geometry(self, pd: MergeProblem) -> Geometry:
        return Geometry(pd.parts, pd.k, self.vectors, self.warps)

    def validate(self, pd: MergeProblem, device: Device | None = None) -> Verdict:
        if not 1 <= self.vectors <= MOST_VECTORS:
            return Verdict.no(f"vectors = {self.vectors} must be 1 to {MOST_VECTORS}")
        if not 1 <= self.warps <= MOST_WARPS:
            return Verdict.no(f"warps = {self.warps} must be 1 to {MOST_WARPS}")
        return Verdict.yes()


# ------------------------------------------------------------------------------------------------ device
def mask(values: cute.Tensor, keyless: Any) -> None:
    """Makes (VECTOR,) elements 0 where the row saw no key: 0 times NaN would be NaN."""
    words = cute.recast_tensor(values, Int32)
    for i in range(cute.size(words)):
        words[i] = cutlass.select_(keyless, Int32(0), words[i])


@cute.kernel
def merge_partials(
    partials: cute.Tensor,  # (parts, n, k), contiguous, global memory
    lse: cute.Tensor,  # (parts, n) fp32, natural log, global memory
    out: cute.Tensor,  # (n, k), contiguous, global memory
    out_lse: cute.Tensor,  # (n,) fp32, global memory
    shape: cutlass.Constexpr,  # Geometry
):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    cute.arch.griddepcontrol_launch_dependents()
    lane, warp = thread % WARP, block * shape.warps + thread // WARP
    row, slice_ = warp // shape.slices, warp % shape.slices
    kind, n = partials.element_type, lse.shape[1]
    column = (slice_ * shape.vectors * WARP + lane) * VECTOR
    # No load has a condition: behind one it would wait for the sums of the loads before it. What is past the end reads
    # the last row, or the last columns, once more.
    first_row = Int64(cutlass.min(row, n - 1))
    columns = [column + i * STEP for i in range(shape.vectors)]
    if cutlass.const_expr(not shape.exact):
        columns = [cutlass.min(c, shape.k - VECTOR) for c in columns]
    sources = [partials.iterator + cute.assume(first_row * shape.k + c, divby=VECTOR) for c in columns]

    found = cute.make_rmem_tensor(shape.parts, Float32)
    values = vectors(kind, shape.together * shape.vectors)
    sums = cute.make_rmem_tensor(cute.make_layout((VECTOR, shape.vectors)), Float32)
    sums.fill(0.0)
    weights = cute.make_rmem_tensor(shape.parts, Float32)
    top, total = Float32(NO_KEY), Float32(0.0)
    wait_for_launch(sources[0].toint())
    for p in cutlass.range_constexpr(shape.parts):
        found[p] = lse[p, first_row]
    for first in cutlass.range_constexpr(0, shape.parts, shape.together):
        count = cutlass.const_expr(min(shape.together, shape.parts - first))
        for p in cutlass.range_constexpr(count):
            part = cute.assume(Int64(n) * ((first + p) * shape.k), divby=VECTOR)
            for i in cutlass.range_constexpr(shape.vectors):
                load_vector(values[None, p * shape.vectors + i], sources[i] + part)
        if cutlass.const_expr(first == 0):
            # w = exp(lse - max): the difference first, for lse may be so large that lse · log2 e has no fraction left.
            for p in cutlass.range_constexpr(shape.parts):
                keyless = (found[p] == Float32.inf) | (found[p] == -Float32.inf)
                found[p] = cutlass.select_(keyless, Float32(NO_KEY), found[p])
                top = cute.arch.fmax(top, found[p])
            for p in cutlass.range_constexpr(shape.parts):
                weight = exp2((found[p] - top) * math.log2(math.e))
                weights[p] = cutlass.select_(found[p] == NO_KEY, Float32(0.0), weight)
                total = total + weights[p]
        # Σ w · partial
        for p in cutlass.range_constexpr(count):
            weight = weights[first + p]
            for i in cutlass.range_constexpr(shape.vectors):
                vector = values[None, p * shape.vectors + i]
                mask(vector, found[first + p] == NO_KEY)
                sums[None, i].store(sums[None, i].load() + weight * vector.load().to(Float32))
    # out = Σ w · partial / Σ w
    inverse = cutlass.select_(total == 0.0, Float32(0.0), cute.arch.rcp_approx(total))
    result = vectors(kind, shape.vectors)
    target = out.iterator + cute.assume(Int64(row) * shape.k + column, divby=VECTOR)
    for i in cutlass.range_constexpr(shape.vectors):
        result[None, i].store((sums[None, i].load() * inverse).to(kind))
        if (row < n) & (column + i * STEP < shape.k):
            store_vector(result[None, i], target + i * STEP)
    if (row < n) & (column == 0):
        out_lse[row] = top + natural_lse(total, Float32(0.0))


merge_partials.set_name_prefix("merge_partials", remove_cutlass_symbol=True, keep_mangled_name=False)


# ------------------------------------------------------------------------------------------------ host
@cute.jit
def launch_merge_partials(
    partials: cute.Tensor,
    lse: cute.Tensor,
    out: cute.Tensor,
    out_lse: cute.Tensor,
    geometry: cutlass.Constexpr,
    stream: CUstream,
):
    """Launches a warp for every slice of a row, as a programmatic dependent."""
    blocks = (out.shape[0] * geometry.slices + geometry.warps - 1) // geometry.warps
    merge_partials(partials, lse, out, out_lse, geometry).launch(
        grid=(blocks, 1, 1),
        block=(geometry.warps * WARP, 1, 1),
        min_blocks_per_mp=1,  # else the compiler saves registers, and loads one part after the other
        stream=stream,
        use_pdl=True,
    )


def takes(pd: MergeProblem) -> Verdict:
    if pd.parts > MOST_PARTS:
        return Verdict.no(f"{pd.parts} parts are more than the {MOST_PARTS} whose loads are unrolled")
    if pd.k % VECTOR:
        return Verdict.no(f"k = {pd.k}: rows are read in vectors of {VECTOR} elements, use a multiple of it")
    if pd.rows * -(-pd.k // STEP) >= 1 << 31:
        return Verdict.no(f"{pd.rows} rows are more than a grid's warps can be numbered with 32 bits")
    return Verdict.yes()


# ------------------------------------------------------------------------------------------------ plan
class MergePartialsPlan(KernelPlan):
    """Inputs (partials, lse), outputs (out, lse) of `workload.merge`."""

    workload = merge.WORKLOAD
    tiling_type = MergePartialsTiling
    requires = Requirement(archs=("sm_90a",), dtypes=("bf16", "fp16"), problem=takes)

    def default_tiling(self) -> MergePartialsTiling:
        """Few rows: one vector a lane, so that their loads are spread over more SMs. Many: a row of 512 in one warp,
        which computes its weights once, where all parts are in flight together then."""
        few = self.problem.rows <= FEW
        whole = not few and self.problem.k > STEP and 2 * self.problem.parts <= TOGETHER
        return MergePartialsTiling(2 if whole else 1, 2 if few else 4)

    def autotune_configs(self) -> list[Tiling]:
        most = min(MOST_VECTORS, -(-self.problem.k // STEP))
        tilings = [MergePartialsTiling(v, warps) for v in (1, 2, 4) if v <= most for warps in (1, 2, 4, 8)]
        return [t for t in tilings if t.validate(self.problem, self.device)]

    def plan(self, *inputs: Any) -> CuteKernel:
        """Raises `UserError` where partials do not begin at a multiple of 16 bytes."""
        self.require()
        if inputs[0].data_ptr() % 16:
            raise UserError(f"partials start at {inputs[0].data_ptr():#x}: pass them at a multiple of 16 bytes.")
        return self._make(inputs, merge.new_outputs(self.problem, inputs[0]))

    def plan_empty(self) -> CuteKernel:
        self.require()
        return self._make((), ())

    def _make(self, inputs: Any, outputs: Any) -> CuteKernel:
        pd, kind = self.problem, host.element_type(self.problem.dtype)
        geometry = self.tiling.geometry(pd)

        def arguments() -> tuple[Any, ...]:
            (n,) = host.symbols(1)
            return (
                host.fake(kind, pd.parts, n, pd.k),
                host.fake(Float32, pd.parts, n, align=4),
                host.fake(kind, n, pd.k),
                host.fake(Float32, n, align=4),
                geometry,
            )

        return host.stage(
            self,
            merge_partials,
            launch_merge_partials,
            "merge_partials",
            arguments,
            (*inputs, *outputs),
            inputs,
            outputs,
        )
