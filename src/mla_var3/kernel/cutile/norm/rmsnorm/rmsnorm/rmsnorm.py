"""rmsnorm v0 in cuTile for Hopper (sm_90a): RMSNorm of rows of 16-bit elements.

    h = x + residual (rounded: the new residual) → Σ h² in float32 → h · rsqrt(Σ / width + eps) · weight → out

A CTA (cuTile: block) takes `tile_m` rows. Tiles are powers of two and widths such as 7168 and 1536 are not, so a row is
read as pieces of `columns`, the largest power of two that divides the width, up to 1024; all pieces stay in registers
from the load to the store and nothing is padded. Rows past the end are read as zeros and not stored. Where a row has
two norms, CTAs of the second stand behind those of the first in the grid's second dimension.

The base version.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cuda.tile as ct

from mla_var3.device import Device, Requirement
from mla_var3.kernel.cutile.prims.handles import ct_dtype, handle, signature
from mla_var3.runtime import CtKernel, KernelPlan, Tiling, Verdict, limits
from mla_var3.workload import norm

if TYPE_CHECKING:
    from mla_var3.workload.norm import NormProblem

ConstInt = ct.Constant[int]
ConstBool = ct.Constant[bool]

MOST_COLUMNS = 1024  # of a piece
MOST_PIECES = 16
REGISTERS = 28  # of a thread, beside a row's columns


def columns_of(width: int) -> int:
    """Columns of a piece: the largest power of two that divides the width, up to MOST_COLUMNS."""
    return min(width & -width, MOST_COLUMNS)


# ------------------------------------------------------------------------------------------------ tiling
@dataclass(frozen=True)
class RmsNormTiling(Tiling):
    """tile_m: rows of a CTA, a power of two. num_warps: 4 or 8. occupancy: CTAs that an SM should hold; without it
    cuTile takes all registers for one."""

    tile_m: int = 1
    num_warps: int = 4
    occupancy: int = 4

    def validate(self, pd: NormProblem, device: Device | None = None) -> Verdict:
        if self.tile_m < 1 or self.tile_m & (self.tile_m - 1):
            return Verdict.no(f"tile_m = {self.tile_m} must be a power of two.")
        if self.num_warps not in (4, 8):
            return Verdict.no(f"num_warps = {self.num_warps} must be 4 or 8.")
        if not 1 <= self.occupancy <= 64 // self.num_warps:
            return Verdict.no(f"occupancy = {self.occupancy} must be 1 to {64 // self.num_warps}.")
        if pd.residual and self.tile_m > 1:
            return Verdict.no(f"tile_m = {self.tile_m}: with a residual a CTA of more than a row spills.")
        # cuTile adds four warps that load; what a row takes beside its columns was read off what compiled to no spills.
        most = 65536 // (32 * (self.num_warps + 4) * self.occupancy) // 8 * 8
        need = self.tile_m * max(pd.width, pd.second) // (64 * self.num_warps) + REGISTERS
        if need > min(most, 255):
            return Verdict.no(f"a thread takes about {need} registers; with {self.occupancy} CTAs an SM it has {most}.")
        return Verdict.yes()


# ------------------------------------------------------------------------------------------------ device
def normalise(x, residual, weight, out, new_residual, tile, first, eps, WIDTH, PIECE, TM, RESIDUAL):
    """One norm of TM rows. first: the piece of x that it begins with."""
    zero = ct.PaddingMode.ZERO
    pieces = tuple(
        ct.load(x, (tile, first + c), (TM, PIECE), padding_mode=zero) for c in ct.static_iter(range(WIDTH // PIECE))
    )
    if RESIDUAL:
        pieces = tuple(
            ct.astype(
                ct.astype(pieces[c], ct.float32)
                + ct.astype(ct.load(residual, (tile, c), (TM, PIECE), padding_mode=zero), ct.float32),
                x.dtype,
            )
            for c in ct.static_iter(range(WIDTH // PIECE))
        )
        for c in ct.static_iter(range(WIDTH // PIECE)):
            ct.store(new_residual, (tile, c), pieces[c])
    total = ct.zeros((TM, 1), dtype=ct.float32)
    for c in ct.static_iter(range(WIDTH // PIECE)):
        h = ct.astype(pieces[c], ct.float32)
        total = total + ct.sum(h * h, 1, keepdims=True)
    factor = ct.rsqrt(total * (1.0 / WIDTH) + eps)
    for c in ct.static_iter(range(WIDTH // PIECE)):
        w = ct.reshape(ct.astype(ct.load(weight, (c,), (PIECE,)), ct.float32), (1, PIECE))
        ct.store(out, (tile, c), ct.astype(ct.astype(pieces[c], ct.float32) * factor * w, out.dtype))


@ct.kernel
def rmsnorm(
    X,  # handle of (n, WIDTH + SECOND), rows `stride` elements apart, global
    RESIDUAL_IN,  # handle of (n, WIDTH), global; of anything without one
    WEIGHT,  # handle of (WIDTH,), global
    SECOND_WEIGHT,  # handle of (SECOND,), global; of anything without one
    OUT,  # handle of (n, WIDTH), global
    SECOND_OUT,  # handle of (n, SECOND), global; of anything without one
    RESIDUAL_OUT,  # handle of (n, WIDTH), global; of anything without one
    n: int,
    stride: int,
    eps: float,
    WIDTH: ConstInt,
    SECOND: ConstInt,
    PIECE: ConstInt,
    SECOND_PIECE: ConstInt,
    TM: ConstInt,
    RESIDUAL: ConstBool,
):
    """Grid (row tiles, norms)."""
    tile = ct.bid(0)
    x = ct.Array.from_foreign(X.foreign_pointer, (n, WIDTH + SECOND), (stride, 1))
    if SECOND == 0 or ct.bid(1) == 0:
        residual = ct.Array.from_foreign(RESIDUAL_IN.foreign_pointer, (n, WIDTH), (WIDTH, 1))
        new_residual = ct.Array.from_foreign(RESIDUAL_OUT.foreign_pointer, (n, WIDTH), (WIDTH, 1))
        weight = ct.Array.from_foreign(WEIGHT.foreign_pointer, (WIDTH,), (1,))
        out = ct.Array.from_foreign(OUT.foreign_pointer, (n, WIDTH), (WIDTH, 1))
        normalise(x, residual, weight, out, new_residual, tile, 0, eps, WIDTH, PIECE, TM, RESIDUAL)
    else:
        weight = ct.Array.from_foreign(SECOND_WEIGHT.foreign_pointer, (SECOND,), (1,))
        out = ct.Array.from_foreign(SECOND_OUT.foreign_pointer, (n, SECOND), (SECOND, 1))
        normalise(x, out, weight, out, out, tile, WIDTH // SECOND_PIECE, eps, SECOND, SECOND_PIECE, TM, False)


# ------------------------------------------------------------------------------------------------ host
def takes(pd: NormProblem) -> Verdict:
    for width in filter(None, (pd.width, pd.second)):
        if width // columns_of(width) > MOST_PIECES:
            return Verdict.no(
                f"{width} columns are {width // columns_of(width)} pieces of {columns_of(width)}: tiles are powers of "
                f"two, and a CTA takes up to {MOST_PIECES}."
            )
    if pd.second and pd.width % columns_of(pd.second):
        return Verdict.no(f"the second norm begins at column {pd.width}, in the middle of a piece of its columns.")
    if pd.stride % 8:
        return Verdict.no(f"rows are {pd.stride} elements apart: TMA wants a multiple of 8.")
    # Rows of x are read by TMA however far apart they are; the results lie behind each other.
    return limits.offsets(pd.rows * max(pd.width, pd.second), f"the results for the {pd.rows:,} rows of x")


# ------------------------------------------------------------------------------------------------ plan
class RmsNormPlan(KernelPlan):
    """Inputs (x, weight, [second weight], [residual]), outputs (out, second, new residual) of `workload.norm`."""

    workload = norm.WORKLOAD
    tiling_type = RmsNormTiling
    requires = Requirement(archs=("sm_90a",), dtypes=("bf16", "fp16"), features=("tma",), problem=takes)

    def default_tiling(self) -> RmsNormTiling:
        choices = [RmsNormTiling(1, 4, occupancy) for occupancy in (8, 4, 2, 1)]
        return next((t for t in choices if t.validate(self.problem, self.device)), choices[-1])

    def autotune_configs(self) -> list[Tiling]:
        tilings = [
            RmsNormTiling(rows, warps, occupancy) for rows in (1, 2, 4) for warps in (4, 8) for occupancy in (2, 4, 8)
        ]
        return [t for t in tilings if t.validate(self.problem, self.device)]

    def plan(self, *inputs: Any) -> CtKernel:
        self.require()
        self.workload.rebound(self.problem, *inputs)  # refuses strides that the kernel does not read
        return self._make(inputs, norm.new_outputs(self.problem, inputs[0]))

    def plan_empty(self) -> CtKernel:
        self.require()
        return self._make((), ())

    def _make(self, inputs: Any, outputs: Any) -> CtKernel:
        pd, ti = self.problem, self.tiling
        pieces = [columns_of(pd.width), columns_of(pd.second or pd.width)]
        constants = [pd.width, pd.second, *pieces, ti.tile_m, pd.residual]

        def args(_: Any) -> tuple[Any, ...]:
            x, weight, second_weight, residual = norm.named(pd, inputs)
            out, second, new_residual = outputs
            # What the problem lacks is never touched, but needs an address.
            named = {
                "x": x[0, :1],
                "residual": out if residual is None else residual,
                "weight": weight,
                "the second weight": weight if second_weight is None else second_weight,
                "out": out,
                "second": out if second_weight is None else second,
                "the new residual": out if residual is None else new_residual,
            }
            handles = [handle(tensor, name) for name, tensor in named.items()]
            return (*handles, len(x), x.stride(0), pd.eps, *constants)

        def grid(_: Any) -> tuple[int, ...]:
            rows = len(inputs[0]) if inputs else pd.rows
            return (-(-rows // ti.tile_m), 2 if pd.second else 1, 1)

        def describe(_: Any) -> Any:
            io = ct_dtype(pd.dtype)
            return signature([io] * 7, [ct.int32, ct.int32, ct.float32], constants)

        return CtKernel(
            rmsnorm,
            grid,
            args,
            inputs,
            outputs,
            ti,
            hints_fn=lambda _: {"num_worker_warps": ti.num_warps, "occupancy": ti.occupancy},
            signature_fn=describe,
            name="rmsnorm",
            plan=self,
        )
