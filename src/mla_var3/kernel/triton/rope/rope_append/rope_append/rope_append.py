"""rope_append v0 in Triton: rotates new tokens' q and k, and writes latent and rope into the paged cache.

A program has one token and either `heads` of its query heads, or, first, its key:

    position → cosines, sines (float32)     columns x, y of a pair → x cos - y sin, y cos + x sin → out, or cache[slot]

The columns of interleaved pairs are read as they lie and taken apart in registers. A key whose slot is outside of the
cache is not stored; a position outside of the table turns by NaN. Runs on sm_80 and later, and in Triton's interpreter.
The base version.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from mla_var3.device import Requirement
from mla_var3.kernel.triton.prims.numerics import interpreted
from mla_var3.kernel.triton.prims.rotary import load_turns, put, turned
from mla_var3.runtime import KernelPlan, Tiling, TritonKernel, Verdict, limits
from mla_var3.workload import rope

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.workload.rope import RopeProblem


def takes(pd: RopeProblem) -> Verdict:
    if pd.p & (pd.p - 1):
        return Verdict.no(f"p = {pd.p} must be a power of two")
    return Verdict.yes()


@dataclass(frozen=True)
class RopeAppendTiling(Tiling):
    """heads: of a program, a power of two. num_warps: of a program: 1, 2, 4 or 8."""

    heads: int = 16
    num_warps: int = 4

    def validate(self, pd: RopeProblem, device: Device | None = None) -> Verdict:
        if not 1 <= self.heads <= 128 or self.heads & (self.heads - 1):
            return Verdict.no(f"heads = {self.heads} must be a power of two of up to 128")
        if self.num_warps not in (1, 2, 4, 8):
            return Verdict.no(f"num_warps = {self.num_warps} must be 1, 2, 4 or 8")
        return limits.grid(1 + -(-pd.h // self.heads), f"blocks of the {pd.h:,} heads of q")


@triton.jit(do_not_specialize=["table_rows", "cache_rows"])
def rope_append(
    Q,  # (n, H, COLUMNS), contiguous, global
    Latent,  # (n, K), contiguous, global
    Rope,  # (n, P), rows `apart` elements apart, global
    Positions,  # (n,)
    Slots,  # (n,)
    Table,  # (positions, P) float32: cosines, sines
    Out,  # (n, H, K + P), contiguous, global
    Cache,  # (slots, K + P), contiguous, global
    apart,  # a multiple of 16 where vectors are to be loaded
    table_rows,
    cache_rows,
    H: tl.constexpr,
    COLUMNS: tl.constexpr,
    K: tl.constexpr,
    LATENT: tl.constexpr,  # power of two of at least K
    P: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Grid (n, 1 + blocks of heads)."""
    DTYPE: tl.constexpr = Out.dtype.element_ty
    token = tl.cast(tl.program_id(0), tl.int64)
    position = tl.cast(tl.load(Positions + token), tl.int64)
    cosines, sines = load_turns(Table, position, table_rows, P)
    if tl.program_id(1) == 0:
        slot = tl.cast(tl.load(Slots + token), tl.int64)
        one = tl.zeros([1], tl.int64)
        written = (one + slot >= 0) & (one + slot < cache_rows)
        x, y = turned(Rope + token * apart + one, one == 0, cosines, sines, P, INTERLEAVED)
        cached = Cache + slot * (K + P)
        put(cached + K + one, written, x, y, DTYPE, P, INTERLEAVED, INTERPRET)
        column = tl.arange(0, LATENT)
        inside = (column < K) & written
        tl.store(cached + column, tl.load(Latent + token * K + column, mask=inside, other=0.0), mask=inside)
    else:
        head = (tl.program_id(1) - 1) * HEADS + tl.arange(0, HEADS)
        row = token * H + head
        valid = head < H
        first, second = turned(Q + row * COLUMNS + (COLUMNS - P), valid, cosines, sines, P, INTERLEAVED)
        put(Out + row * (K + P) + K, valid, first, second, DTYPE, P, INTERLEAVED, INTERPRET)


class RopeAppendPlan(KernelPlan):
    """Inputs (q, latent, rope, positions, slots, table), outputs (out, cache) of `workload.rope`."""

    workload = rope.WORKLOAD
    tiling_type = RopeAppendTiling
    requires = Requirement(archs=("sm_80+",), dtypes=("bf16", "fp16"), problem=takes)

    def default_tiling(self) -> RopeAppendTiling:
        heads = min(16, 1 << (self.problem.h - 1).bit_length())
        return RopeAppendTiling(heads, 4 if heads >= 16 else 2)

    def autotune_configs(self) -> list[Tiling]:
        return [RopeAppendTiling(heads, warps) for heads in (8, 16, 32, 64) for warps in (1, 2, 4)]

    def plan(self, *inputs: torch.Tensor) -> TritonKernel:
        self.workload.rebound(self.problem, *inputs)  # refuses strides that the kernel does not read
        return self._make(inputs, rope.new_outputs(self.problem, inputs[0]))

    def plan_empty(self) -> TritonKernel:
        return self._make((), ())

    def _make(self, inputs: Any, outputs: Any) -> TritonKernel:
        pd = self.problem
        tokens = len(inputs[0]) if inputs else pd.tokens
        element, index = f"*{pd.dtype}", f"*i{pd.index[3:]}"
        signature = {
            "Q": element, "Latent": element, "Rope": element, "Positions": index, "Slots": index, "Table": "*fp32",
            "Out": element, "Cache": element, "apart": "i32" if (pd.p + pd.rest) % 16 else "i32:16",
            "table_rows": "i32", "cache_rows": "i32",
        }  # fmt: skip

        def arguments(_: Any) -> tuple[Any, ...]:
            table, cache = inputs[5], outputs[1]
            return (*inputs, *outputs, inputs[2].stride(0), len(table), len(cache) * pd.page)

        return TritonKernel(
            rope_append,
            grid_fn=lambda t: (tokens, 1 + -(-pd.h // t.heads)),
            args_fn=arguments,
            input_tensors=inputs,
            output_tensors=outputs,
            tiling=self.tiling,
            meta_fn=lambda t: {
                "H": pd.h, "COLUMNS": pd.columns, "K": pd.k, "LATENT": 1 << (pd.k - 1).bit_length(), "P": pd.p,
                "INTERLEAVED": pd.interleaved, "HEADS": t.heads, "INTERPRET": interpreted(rope_append),
            },
            options_fn=lambda t: {"num_warps": t.num_warps},
            signature_fn=lambda _: signature,
            plan=self,
        )  # fmt: skip
