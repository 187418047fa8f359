"""absorb_gemm v0 in cuTile for Hopper (sm_90a): the two products per head around absorbed attention, operands swapped.

    side "q"     outᵀ (tile_m columns x tile_n tokens) = W_UKᵀ (tile_m x 128) · xᵀ (128 x tile_n)
    side "out"   outᵀ (tile_m columns x tile_n tokens) = W_UV (tile_m x 512) · xᵀ (512 x tile_n)

Output columns are on the M side, which a warpgroup's product wants 64 of, and tokens on the N side, of which 16 are
enough. A CTA (cuTile: block) has one output tile and goes over the summed columns in steps of tile_k, all by TMA;
CTAs that share x are neighbours in the grid. Tokens past the last one are read as zeros and not stored.

The base version; the swap is that of flash_mla v2 in cuTile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cuda.tile as ct

from mla_var3.device import Device, Requirement
from mla_var3.kernel.cutile.prims.handles import ct_dtype, handle, signature
from mla_var3.runtime import CtKernel, KernelPlan, Tiling, Verdict, limits
from mla_var3.workload import gemm

if TYPE_CHECKING:
    from mla_var3.workload.gemm import GemmProblem

ConstInt = ct.Constant[int]
ConstBool = ct.Constant[bool]

TILES_M = (64, 128)
TILES_N = (16, 32, 64, 128)
TILES_K = (64, 128)


# ------------------------------------------------------------------------------------------------ tiling
@dataclass(frozen=True)
class AbsorbGemmTiling(Tiling):
    """tile_m: output columns of a CTA. tile_n: tokens. tile_k: summed columns of a load. num_warps: 4 or 8.
    occupancy: CTAs that an SM should hold."""

    tile_m: int = 64
    tile_n: int = 16
    tile_k: int = 64
    num_warps: int = 4
    occupancy: int = 2

    def validate(self, pd: GemmProblem, device: Device | None = None) -> Verdict:
        for name, values in (("tile_m", TILES_M), ("tile_n", TILES_N), ("tile_k", TILES_K)):
            if getattr(self, name) not in values:
                return Verdict.no(f"{name} = {getattr(self, name)} must be one of {values}.")
        for name, value, columns in (("tile_m", self.tile_m, pd.columns), ("tile_k", self.tile_k, pd.summed)):
            if columns % value:
                return Verdict.no(f"{name} = {value} must divide {columns} columns.")
        if self.num_warps not in (4, 8):
            return Verdict.no(f"num_warps = {self.num_warps} must be 4 or 8.")
        if self.num_warps == 8 and self.tile_m == 64:
            return Verdict.no("num_warps = 8: two warpgroups want 128 output columns.")
        if not 1 <= self.occupancy <= 8:
            return Verdict.no(f"occupancy = {self.occupancy} must be 1 to 8.")
        tiles = -(-pd.tokens // self.tile_n)
        return limits.all_of(
            limits.grid(pd.h, "heads of x"),
            limits.grid(tiles, f"tiles of {self.tile_n} of the {pd.tokens:,} tokens of x"),
        )


# ------------------------------------------------------------------------------------------------ device
@ct.kernel
def absorb_gemm(
    X,  # handle of (n, H, SUMMED), strided, global
    WEIGHT,  # handle of (H · 2D, K), global
    OUT,  # handle of (n, H, COLUMNS), strided, global
    n: int,
    x_token: int,  # strides, elements
    x_head: int,
    out_token: int,
    out_head: int,
    H: ConstInt,
    K: ConstInt,
    D: ConstInt,
    OF_Q: ConstBool,
    TM: ConstInt,
    TN: ConstInt,
    TK: ConstInt,
):
    """Grid (column tiles, H, token tiles)."""
    SUMMED = D if OF_Q else K
    COLUMNS = K if OF_Q else D
    tile_m = ct.bid(0)
    head = ct.bid(1)
    tile_n = ct.bid(2)
    x = ct.Array.from_foreign(X.foreign_pointer, (n, H, SUMMED), (x_token, x_head, 1))
    weight = ct.Array.from_foreign(WEIGHT.foreign_pointer, (H, 2, D, K), (2 * D * K, D * K, K, 1))
    out = ct.Array.from_foreign(OUT.foreign_pointer, (n, H, COLUMNS), (out_token, out_head, 1))
    acc = ct.zeros((TM, TN), dtype=ct.float32)
    for k in range(SUMMED // TK):
        rows = ct.load(x, (tile_n, head, k), (TN, 1, TK), padding_mode=ct.PaddingMode.ZERO)
        b = ct.transpose(ct.reshape(rows, (TN, TK)))
        if OF_Q:
            a = ct.transpose(ct.reshape(ct.load(weight, (head, 0, k, tile_m), (1, 1, TK, TM)), (TK, TM)))
        else:
            a = ct.reshape(ct.load(weight, (head, 1, tile_m, k), (1, 1, TM, TK)), (TM, TK))
        acc = ct.mma(a, b, acc)
    product = ct.transpose(ct.astype(acc, OUT.dtype))
    ct.store(out, (tile_n, head, tile_m), ct.reshape(product, (TN, 1, TM)))


# ------------------------------------------------------------------------------------------------ host
def takes(pd: GemmProblem) -> Verdict:
    for name, value in (("k", pd.k), ("d", pd.d)):
        if value % TILES_K[0]:
            return Verdict.no(f"{name} = {value} must be a multiple of {TILES_K[0]}.")
    for name, value in (("p", pd.p), ("rest", pd.rest)):
        if value % 8:
            return Verdict.no(f"{name} = {value}: TMA wants rows that begin at multiples of 8 elements.")
    if pd.tokens * (pd.h * (max(pd.k, pd.d) + pd.p) + pd.rest) >= 2**31:
        return Verdict.no(f"{pd.tokens} tokens reach beyond 2^31 elements, and cuTile's offsets are 32 bits.")
    return Verdict.yes()


# ------------------------------------------------------------------------------------------------ plan
class AbsorbGemmPlan(KernelPlan):
    """Inputs (x, weight), output (out,) of `workload.gemm`."""

    workload = gemm.WORKLOAD
    tiling_type = AbsorbGemmTiling
    requires = Requirement(archs=("sm_90a",), dtypes=("bf16", "fp16"), features=("wgmma", "tma"), problem=takes)

    def default_tiling(self) -> AbsorbGemmTiling:
        pd = self.problem
        if not self.requires.accepts(pd):
            return AbsorbGemmTiling()
        tile_n = next((n for n in TILES_N if n >= pd.tokens), TILES_N[-1])
        wide = tile_n >= 64 and pd.columns % 128 == 0
        return AbsorbGemmTiling(128 if wide else 64, tile_n, 64, 8 if wide else 4)

    def autotune_configs(self) -> list[Tiling]:
        most = self.default_tiling().tile_n
        tilings = [
            AbsorbGemmTiling(tile_m, tile_n, tile_k, tile_m // 16, occupancy)
            for tile_m in TILES_M
            for tile_n in TILES_N
            for tile_k in TILES_K
            for occupancy in (1, 2, 4)
            if tile_n <= most
        ]
        return [t for t in tilings if t.validate(self.problem, self.device)]

    def plan(self, *inputs: Any) -> CtKernel:
        self.require()
        gemm.check_columns(*inputs)
        return self._make(inputs, (gemm.new_output(self.problem, inputs[0]),))

    def plan_empty(self) -> CtKernel:
        self.require()
        return self._make((), ())

    def _make(self, inputs: Any, outputs: Any) -> CtKernel:
        pd, ti = self.problem, self.tiling
        constants = [pd.h, pd.k, pd.d, pd.side == "q", ti.tile_m, ti.tile_n, ti.tile_k]

        def args(_: Any) -> tuple[Any, ...]:
            x, weight = inputs
            (out,) = outputs
            handles = (handle(x[0, 0, :1], "x"), handle(weight, "weight"), handle(out, "out"))
            return (*handles, len(x), *x.stride()[:2], *out.stride()[:2], *constants)

        def grid(_: Any) -> tuple[int, ...]:
            tokens = len(inputs[0]) if inputs else pd.tokens
            return (pd.columns // ti.tile_m, pd.h, -(-tokens // ti.tile_n))

        def describe(_: Any) -> Any:
            io = ct_dtype(pd.dtype)
            return signature([io] * 3, [ct.int32] * 5, constants)

        return CtKernel(
            absorb_gemm,
            grid,
            args,
            inputs,
            outputs,
            ti,
            hints_fn=lambda _: {"num_worker_warps": ti.num_warps, "occupancy": ti.occupancy},
            signature_fn=describe,
            name="absorb_gemm",
            plan=self,
        )
