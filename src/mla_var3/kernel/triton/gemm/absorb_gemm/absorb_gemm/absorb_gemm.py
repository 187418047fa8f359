"""absorb_gemm v0 in Triton: the two products per head around absorbed attention, one output tile a program.

    side "q"     out (tile_m tokens x tile_n columns) = x (tile_m x 128) · W_UK (128 x tile_n)
    side "out"   out (tile_m tokens x tile_n columns) = x (tile_m x 512) · W_UVᵀ (512 x tile_n)

A program goes over the summed columns in steps of tile_k. Programs of one head's columns and the same tokens are
neighbours in the grid, so that they share x in L2. Tokens past the last one are read as zeros and not written. Runs on
sm_80 and later, and in Triton's interpreter. The base version, as in Triton's tutorial on matrix products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from mla_var3.device import Device, Requirement
from mla_var3.kernel.triton.prims.numerics import dot, interpreted, round_to
from mla_var3.runtime import KernelPlan, Tiling, TritonKernel, Verdict, limits
from mla_var3.workload import gemm

if TYPE_CHECKING:
    from mla_var3.workload.gemm import GemmProblem

LEAST = 16  # of a tile in every direction: what an MMA takes


def takes(pd: GemmProblem) -> Verdict:
    for name, value in (("k", pd.k), ("d", pd.d)):
        if value % LEAST:
            return Verdict.no(f"{name} = {value} must be a multiple of {LEAST}")
    return Verdict.yes()


@dataclass(frozen=True)
class AbsorbGemmTiling(Tiling):
    """tile_m: tokens of a program. tile_n: columns. tile_k: summed columns of a step. num_pipeline_stages: steps in
    flight. num_warps: 2, 4 or 8."""

    tile_m: int = 16
    tile_n: int = 64
    tile_k: int = 64
    num_pipeline_stages: int = 3
    num_warps: int = 4

    def validate(self, pd: GemmProblem, device: Device | None = None) -> Verdict:
        for name in ("tile_m", "tile_n", "tile_k"):
            value = getattr(self, name)
            if value < LEAST or value & (value - 1):
                return Verdict.no(f"{name} = {value} must be a power of two of at least {LEAST}")
        for name, value, columns in (("tile_n", self.tile_n, pd.columns), ("tile_k", self.tile_k, pd.summed)):
            if columns % value:
                return Verdict.no(f"{name} = {value} must divide {columns} columns")
        if self.num_warps not in (2, 4, 8):
            return Verdict.no(f"num_warps = {self.num_warps} must be 2, 4 or 8")
        if not 1 <= self.num_pipeline_stages <= 8:
            return Verdict.no(f"num_pipeline_stages = {self.num_pipeline_stages} must be 1 to 8")
        smem = self.num_pipeline_stages * (self.tile_m + self.tile_n) * self.tile_k * pd.element_bytes
        if device is not None and smem > device.smem_per_block:
            return Verdict.no(f"needs about {smem} bytes of shared memory; a block has {device.smem_per_block}")
        tiles = -(-pd.tokens // self.tile_m)
        return limits.all_of(
            limits.grid(pd.h, "heads of x"),
            limits.grid(tiles, f"tiles of {self.tile_m} of the {pd.tokens:,} tokens of x"),
        )


@triton.jit(do_not_specialize=["n"])
def absorb_gemm(
    X,  # (n, H, SUMMED), tokens and heads apart, columns beside each other, global
    Weight,  # (H, 2, D, K), contiguous, global
    Out,  # (n, H, COLUMNS), strided as X may be, global
    n,
    x_token,  # strides, elements; multiples of 8
    x_head,
    out_token,
    out_head,
    K: tl.constexpr,
    D: tl.constexpr,
    OF_Q: tl.constexpr,  # side "q"
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Grid (column tiles, H, token tiles)."""
    SUMMED: tl.constexpr = D if OF_Q else K
    DTYPE: tl.constexpr = Out.dtype.element_ty
    head = tl.cast(tl.program_id(1), tl.int64)
    token = tl.program_id(2) * TILE_M + tl.arange(0, TILE_M)
    column = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    summed = tl.arange(0, TILE_K)
    inside = token[:, None] < n
    rows = tl.cast(token, tl.int64)[:, None]
    x = X + rows * x_token + head * x_head + summed[None, :]
    if OF_Q:
        w = Weight + head * (2 * D * K) + summed[:, None] * K + column[None, :]
    else:
        w = Weight + (2 * head + 1) * (D * K) + column[None, :] * K + summed[:, None]
    acc = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
    for _ in range(SUMMED // TILE_K):
        acc = dot(tl.load(x, mask=inside, other=0.0), tl.load(w), acc, INTERPRET)
        x += TILE_K
        w += TILE_K * K if OF_Q else TILE_K
    out = Out + rows * out_token + head * out_head + column[None, :]
    tl.store(out, round_to(acc, DTYPE, INTERPRET), mask=inside)


class AbsorbGemmPlan(KernelPlan):
    """Inputs (x, weight), output (out,) of `workload.gemm`."""

    workload = gemm.WORKLOAD
    tiling_type = AbsorbGemmTiling
    requires = Requirement(archs=("sm_80+",), dtypes=("bf16", "fp16"), problem=takes)

    def default_tiling(self) -> AbsorbGemmTiling:
        pd = self.problem
        if not self.requires.accepts(pd):
            return AbsorbGemmTiling()
        tile_m = min(128, max(LEAST, triton.next_power_of_2(pd.tokens)))
        tile_k = min(128, pd.summed & -pd.summed)
        # Few tokens: many programs, with few columns each. Many: a square tile.
        tile_n = min(128 if tile_m >= 64 else 32, pd.columns & -pd.columns)
        smem = (self.device or Device.assumed()).smem_per_block
        # Two stages at least, one of which is loaded while the other is multiplied.
        while tile_k > LEAST and 2 * (tile_m + tile_n) * tile_k * pd.element_bytes > smem:
            tile_k //= 2
        room = smem // ((tile_m + tile_n) * tile_k * pd.element_bytes)
        stages = min(4, max(2, pd.summed // tile_k), room)
        return AbsorbGemmTiling(tile_m, tile_n, tile_k, stages, 8 if tile_m * tile_n >= 128 * 128 else 4)

    def autotune_configs(self) -> list[Tiling]:
        default = self.default_tiling()
        tilings = [
            AbsorbGemmTiling(tile_m, tile_n, tile_k, stages, warps)
            for tile_m in (16, 32, 64, 128)
            for tile_n in (32, 64, 128)
            for tile_k in (64, 128)
            for stages in (2, 4)
            for warps in (4, 8)
            if tile_m <= default.tile_m and tile_m * tile_n >= 512 * warps // 4
        ]
        return [default, *(t for t in tilings if t != default and t.validate(self.problem, self.device))]

    def plan(self, *inputs: torch.Tensor) -> TritonKernel:
        gemm.check_columns(*inputs)
        return self._make(inputs, (gemm.new_output(self.problem, inputs[0]),))

    def plan_empty(self) -> TritonKernel:
        return self._make((), ())

    def _make(self, inputs: Any, outputs: Any) -> TritonKernel:
        pd, ti = self.problem, self.tiling
        tokens = len(inputs[0]) if inputs else pd.tokens
        distances = (pd.summed + pd.beside, pd.columns + pd.beside, pd.rest)
        stride = "i32" if any(x % 16 for x in distances) else "i32:16"

        def args(_: Any) -> tuple[Any, ...]:
            x, weight = inputs
            (out,) = outputs
            return (x, weight, out, len(x), *x.stride()[:2], *out.stride()[:2])

        return TritonKernel(
            absorb_gemm,
            grid_fn=lambda t: (pd.columns // t.tile_n, pd.h, -(-tokens // t.tile_m)),
            args_fn=args,
            input_tensors=inputs,
            output_tensors=outputs,
            tiling=ti,
            meta_fn=lambda t: {
                "K": pd.k, "D": pd.d, "OF_Q": pd.side == "q", "TILE_M": t.tile_m, "TILE_N": t.tile_n,
                "TILE_K": t.tile_k, "INTERPRET": interpreted(absorb_gemm),
            },
            options_fn=lambda t: {"num_warps": t.num_warps, "num_stages": t.num_pipeline_stages},
            signature_fn=lambda _: {
                **dict.fromkeys(("X", "Weight", "Out"), f"*{pd.dtype}"), "n": "i32",
                **dict.fromkeys(("x_token", "x_head", "out_token", "out_head"), stride),
            },
            plan=self,
        )  # fmt: skip
