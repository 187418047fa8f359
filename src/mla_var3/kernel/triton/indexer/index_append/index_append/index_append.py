"""index_append v0 in Triton: norms, turns and quantises new tokens' indexer keys, and writes them into the index cache.

A program has one token. Its columns are read in three parts, the first and the second of each pair that turns together,
and the others, so that no column has to change its place:

    first, second (32 each), rest (64) → mean, variance over all → normed, rounded to bf16 → pairs turned, rounded to
    bf16 → largest magnitude / 448 → scale → column / scale → e4m3 → cache[slot]

Codes are made by integer arithmetic, so any device and Triton's interpreter give the same bits; NaN becomes e4m3's. A
token whose slot is outside of the cache is not stored; a position outside of the table turns by NaN. Runs on sm_80 and
later. The base version; what becomes of a column is that of packed_append.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from mla_var3.device import Requirement
from mla_var3.kernel.triton.prims.numerics import interpreted, round_to
from mla_var3.kernel.triton.prims.rotary import load_turns
from mla_var3.packed_cache import E4M3_NAN
from mla_var3.runtime import KernelPlan, Tiling, TritonKernel, Verdict
from mla_var3.workload import index_append as append
from mla_var3.workload.index_append import EPS, LEAST, ROPE
from mla_var3.workload.indexer_logits import PAGE, D

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.workload.index_append import IndexAppendProblem


@dataclass(frozen=True)
class IndexAppendTiling(Tiling):
    """num_warps: of a program: 1, 2 or 4."""

    num_warps: int = 1

    def validate(self, pd: IndexAppendProblem, device: Device | None = None) -> Verdict:
        if self.num_warps not in (1, 2, 4):
            return Verdict.no(f"num_warps = {self.num_warps} must be 1, 2 or 4")
        return Verdict.yes()


NAN = tl.constexpr(E4M3_NAN)


@triton.jit
def e4m3(x):
    """uint8, the bits of the nearest e4m3 (ties to even) of float32, at most 448; NAN of NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    sign, odd = (bits >> 24) & 0x80, (bits & 0x7FFFFFFF) > 0x7F800000
    size = tl.minimum(tl.abs(x), 448.0)
    # Below 2^-6 codes are multiples of 2^-9: adding 2^14 leaves just these in the mantissa.
    small = (size + 16384.0).to(tl.uint32, bitcast=True) & 0xFF
    bits = size.to(tl.uint32, bitcast=True)
    large = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    return tl.where(odd, NAN, sign | tl.where(size < 0.015625, small, large)).to(tl.uint8)


@triton.jit
def rounded(x, INTERPRET: tl.constexpr):
    """float32 of what is left of float32 in bf16."""
    bits = round_to(x, tl.bfloat16, INTERPRET).to(tl.uint16, bitcast=True)
    return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def size_of(x):
    """The largest magnitude that is not NaN, at least 0."""
    return tl.max(tl.where(x == x, tl.abs(x), 0.0), axis=0)


@triton.jit(do_not_specialize=["table_rows", "cache_rows"])
def index_append(
    K,  # (n, COLUMNS) bf16, rows `apart` elements apart, global
    Weight,  # (COLUMNS,) float32
    Bias,  # (COLUMNS,) float32
    Positions,  # (n,)
    Slots,  # (n,)
    Table,  # (positions, ROPE) float32: cosines, sines
    Codes,  # uint8, of row r of page g at g * code_page + r * COLUMNS
    Scales,  # int32, at g * scale_page + r
    apart,
    code_page,
    scale_page,
    table_rows,
    cache_rows,
    COLUMNS: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE: tl.constexpr,
    EPS: tl.constexpr,
    LEAST: tl.constexpr,
    POWERS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Grid (n,)."""
    token = tl.cast(tl.program_id(0), tl.int64)
    position, slot = tl.cast(tl.load(Positions + token), tl.int64), tl.cast(tl.load(Slots + token), tl.int64)
    cosines, sines = load_turns(Table, position, table_rows, ROPE)
    pair = tl.arange(0, ROPE // 2)
    one = 2 * pair if INTERLEAVED else pair
    two = one + 1 if INTERLEAVED else one + ROPE // 2
    other = ROPE + tl.arange(0, COLUMNS - ROPE)
    row = K + token * apart
    x, y, z = tl.load(row + one).to(tl.float32), tl.load(row + two).to(tl.float32), tl.load(row + other).to(tl.float32)
    mean = (tl.sum(x, axis=0) + tl.sum(y, axis=0) + tl.sum(z, axis=0)) * (1.0 / COLUMNS)
    x, y, z = x - mean, y - mean, z - mean
    squares = tl.sum(x * x, axis=0) + tl.sum(y * y, axis=0) + tl.sum(z * z, axis=0)
    # A vector of one: only these have the functions that round once.
    deviation = tl.sqrt_rn(squares * (1.0 / COLUMNS) + EPS + tl.zeros([1], tl.float32))
    reciprocal = tl.sum(tl.div_rn(tl.full([1], 1.0, tl.float32), deviation), axis=0)
    x = rounded(x * reciprocal * tl.load(Weight + one) + tl.load(Bias + one), INTERPRET)
    y = rounded(y * reciprocal * tl.load(Weight + two) + tl.load(Bias + two), INTERPRET)
    z = rounded(z * reciprocal * tl.load(Weight + other) + tl.load(Bias + other), INTERPRET)
    first = rounded(x * cosines - y * sines, INTERPRET)
    second = rounded(y * cosines + x * sines, INTERPRET)
    largest = tl.maximum(tl.maximum(size_of(first), size_of(second)), tl.maximum(size_of(z), LEAST))
    scale = tl.div_rn(largest + tl.zeros([1], tl.float32), tl.full([1], 448.0, tl.float32))
    if POWERS:
        scale = (((scale.to(tl.uint32, bitcast=True) + 0x7FFFFF) >> 23) << 23).to(tl.float32, bitcast=True)
    page, at = slot // PAGE, slot % PAGE
    there = (slot + tl.zeros([1], tl.int64) >= 0) & (slot + tl.zeros([1], tl.int64) < cache_rows)
    to = Codes + page * code_page + at * COLUMNS
    half = tl.broadcast_to(scale, (ROPE // 2,))
    tl.store(to + one, e4m3(tl.div_rn(first, half)), mask=there & (one >= 0))
    tl.store(to + two, e4m3(tl.div_rn(second, half)), mask=there & (two >= 0))
    tl.store(to + other, e4m3(tl.div_rn(z, tl.broadcast_to(scale, (COLUMNS - ROPE,)))), mask=there & (other >= 0))
    bits = scale.to(tl.int32, bitcast=True)
    tl.store(Scales + page * scale_page + at + tl.arange(0, 1), bits, mask=there)


class IndexAppendPlan(KernelPlan):
    """Inputs and outputs of `workload.index_append`."""

    workload = append.WORKLOAD
    tiling_type = IndexAppendTiling
    requires = Requirement(archs=("sm_80+",), dtypes=("bf16",))

    def default_tiling(self) -> IndexAppendTiling:
        return IndexAppendTiling()

    def autotune_configs(self) -> list[Tiling]:
        return [IndexAppendTiling(warps) for warps in (1, 2, 4)]

    def plan(self, *inputs: torch.Tensor) -> TritonKernel:
        return self.plan_into(inputs, append.new_outputs(self.problem, inputs[0]))

    def plan_into(self, inputs: Any, outputs: Any) -> TritonKernel:
        """A kernel on a cache of the caller's: its codes and scales (`workload.index_append.views`)."""
        self.workload.rebound(self.problem, *inputs)
        return self._make(inputs, outputs)

    def plan_empty(self) -> TritonKernel:
        return self._make((), ())

    def _make(self, inputs: Any, outputs: Any) -> TritonKernel:
        pd = self.problem
        tokens = len(inputs[0]) if inputs else pd.tokens
        index = f"*i{pd.index[3:]}"
        signature = {
            "K": "*bf16", "Weight": "*fp32", "Bias": "*fp32", "Positions": index, "Slots": index, "Table": "*fp32",
            "Codes": "*u8", "Scales": "*i32", "apart": "i32", "code_page": "i64", "scale_page": "i64",
            "table_rows": "i32", "cache_rows": "i32",
        }  # fmt: skip

        def arguments(_: Any) -> tuple[Any, ...]:
            apart = (inputs[0].stride(0), *(x.stride(0) for x in outputs))
            return (*inputs, *outputs, *apart, len(inputs[5]), outputs[1].numel())

        return TritonKernel(
            index_append,
            grid_fn=lambda t: (tokens,),
            args_fn=arguments,
            input_tensors=inputs,
            output_tensors=outputs,
            tiling=self.tiling,
            meta_fn=lambda t: {
                "COLUMNS": D, "ROPE": ROPE, "PAGE": PAGE, "EPS": EPS, "LEAST": LEAST, "POWERS": pd.powers,
                "INTERLEAVED": pd.interleaved, "INTERPRET": interpreted(index_append),
            },
            options_fn=lambda t: {"num_warps": t.num_warps},
            signature_fn=lambda _: signature,
            plan=self,
        )  # fmt: skip
