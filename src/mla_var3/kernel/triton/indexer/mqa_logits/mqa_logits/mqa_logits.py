"""mqa_logits v0 in Triton: a program a tile of query tokens and a tile of keys; FP8 products, summed in registers.

    K (KEYS x 128) · Qᵀ (128 x TOKENS · H) → max(·, 0) · weight → Σ over the H columns of a token → · scale → logits

A tile of keys that no query token of the tile has in range ends its program at once. Keys and scales come from the
pages that the page table names, or from their tensors. The baseline of the version in CuTe DSL: no pipeline, and a grid
for the longest request. Shown to be right in Triton's interpreter; no GPU has run it yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from mla_var3.device import Requirement
from mla_var3.kernel.triton.prims.numerics import interpreted, round_to
from mla_var3.runtime import KernelPlan, Tiling, TritonKernel, Verdict
from mla_var3.workload import indexer_logits
from mla_var3.workload.indexer_logits import PAGE, D

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.workload.indexer_logits import IndexerLogitsProblem

COLUMNS = 256  # of a product, at most


def takes(pd: IndexerLogitsProblem) -> Verdict:
    if pd.heads not in (16, 32, 64):
        return Verdict.no(f"heads = {pd.heads}: an indexer of 16, 32 or 64 heads is taken")
    return Verdict.yes()


@dataclass(frozen=True)
class MqaLogitsTiling(Tiling):
    """keys: of a tile. tokens: query tokens of a tile, a power of two. num_warps: of a program."""

    keys: int = 64
    tokens: int = 1
    num_warps: int = 4

    def validate(self, pd: IndexerLogitsProblem, device: Device | None = None) -> Verdict:
        if self.keys not in (64, 128):
            return Verdict.no(f"keys = {self.keys} must be 64 or 128")
        if self.tokens not in (1, 2, 4, 8, 16) or self.tokens * pd.heads > COLUMNS:
            return Verdict.no(
                f"tokens = {self.tokens} must be a power of two, and of {pd.heads} heads at most {COLUMNS}"
            )
        if self.num_warps not in (4, 8):
            return Verdict.no(f"num_warps = {self.num_warps} must be 4 or 8")
        return Verdict.yes()


@triton.jit
def _products(keys, queries, INTERPRET: tl.constexpr):
    """keys (M, 128) · queries (128, N), both uint8 codes of e4m3, in float32."""
    if INTERPRET:
        return tl.dot(_widen(keys), _widen(queries), input_precision="ieee")
    else:
        return tl.dot(keys.to(tl.float8e4nv, bitcast=True), queries.to(tl.float8e4nv, bitcast=True))


@triton.jit
def _widen(codes):
    """float32 of e4m3 codes, on their bits: NaN stays NaN."""
    bits = codes.to(tl.uint32)
    magnitude = ((bits & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    signed = tl.where(bits & 0x80 != 0, -magnitude, magnitude)
    return tl.where(bits & 0x7F == 0x7F, float("nan"), signed)


@triton.jit
def mqa_logits(
    Q,  # (rows, H, 128) uint8, global
    Keys,  # (t, 128) uint8, or the cache, pages `page_stride` apart
    Scales,  # (t,) float32
    Weights,  # (rows, H) float32
    Starts,  # (rows,) int32, or anything
    Ends,  # (rows,) int32
    Table,  # (b, width) int32, or anything
    Logits,  # (rows, columns), rows `stride` apart
    rows,
    columns,
    page_stride,
    table_stride,
    stride,
    S,  # query tokens of a request; rows, where there is no page table
    H: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    PAGED: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Grid (tiles of query tokens, tiles of keys)."""
    chunks = tl.cdiv(S, TOKENS)
    request = tl.program_id(0) // chunks
    token = tl.program_id(0) % chunks * TOKENS + tl.arange(0, TOKENS)
    row = request * S + token
    there = (token < S) & (row < rows)
    end = tl.minimum(tl.load(Ends + row, mask=there, other=0), columns)
    start = tl.zeros_like(end)
    if not PAGED:
        start = tl.maximum(tl.load(Starts + row, mask=there, other=0), 0)
    first = tl.program_id(1) * KEYS
    wanted = there & (start < end) & (start < first + KEYS) & (end > first)
    if tl.max(wanted.to(tl.int32), 0) == 0:
        return
    last = tl.max(tl.where(there, end, 0), 0)
    key = first + tl.arange(0, KEYS)
    used = key < last
    column = tl.arange(0, 128)
    if PAGED:
        page = tl.load(Table + tl.cast(request, tl.int64) * table_stride + key // 64, mask=used, other=0)
        base = Keys + tl.cast(page, tl.int64) * page_stride
        codes = tl.load(base[:, None] + (key % 64 * 128)[:, None] + column[None, :], mask=used[:, None], other=0)
        behind = (base + 64 * 128).to(tl.pointer_type(tl.float32), bitcast=True)
        scale = tl.load(behind + key % 64, mask=used, other=0.0)
    else:
        codes = tl.load(Keys + tl.cast(key, tl.int64)[:, None] * 128 + column[None, :], mask=used[:, None], other=0)
        scale = tl.load(Scales + key, mask=used, other=0.0)
    n = tl.arange(0, TOKENS * H)
    of = request * S + tl.program_id(0) % chunks * TOKENS + n // H
    inside = of < rows
    at = tl.cast(of, tl.int64) * H + n % H
    queries = tl.load(Q + at[None, :] * 128 + column[:, None], mask=inside[None, :], other=0)
    weight = tl.load(Weights + at, mask=inside, other=0.0)
    products = _products(codes, queries, INTERPRET)
    # max with NaN gives the number, as everywhere here.
    terms = tl.where(products > 0.0, products, 0.0) * weight[None, :]
    found = tl.sum(tl.reshape(terms, (KEYS, TOKENS, H)), 2) * scale[:, None]
    found = tl.where(found == found, found, float("-inf"))
    target = Logits + tl.cast(row, tl.int64)[None, :] * stride + key[:, None]
    mask = there[None, :] & (key[:, None] >= start[None, :]) & (key[:, None] < end[None, :])
    tl.store(target, round_to(found, Logits.dtype.element_ty, INTERPRET), mask=mask)


class MqaLogitsPlan(KernelPlan):
    """Inputs and output (logits,) of `workload.indexer_logits`."""

    workload = indexer_logits.WORKLOAD
    tiling_type = MqaLogitsTiling
    requires = Requirement(archs=("sm_90a",), dtypes=("fp32", "bf16"), problem=takes)

    def default_tiling(self) -> MqaLogitsTiling:
        pd = self.problem
        most = COLUMNS // 2 // pd.heads or 1
        tokens = 1
        while tokens < min(most, pd.s):
            tokens *= 2
        return MqaLogitsTiling(64 if pd.table else 128, tokens, 4 if pd.table else 8)

    def autotune_configs(self) -> list[Tiling]:
        tilings = [MqaLogitsTiling(keys, t, warps) for keys in (64, 128) for t in (1, 2, 4, 8) for warps in (4, 8)]
        return [tiling for tiling in tilings if tiling.validate(self.problem, self.device)]

    def plan(self, *inputs: torch.Tensor) -> TritonKernel:
        problem = indexer_logits.rebound(self.problem, *inputs)
        logits = indexer_logits.new_logits(problem, inputs[0], problem.rows, problem.columns)
        return self.plan_into(inputs, (logits,))

    def plan_into(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> TritonKernel:
        """A kernel on logits of the caller's (rows, columns), whose rows may lie apart."""
        return self._make(inputs, outputs)

    def plan_empty(self) -> TritonKernel:
        return self._make((), ())

    def _make(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> TritonKernel:
        pd = self.problem

        def sizes() -> tuple[int, int, int]:
            """Rows, columns, and query tokens of a request."""
            if not inputs:
                return pd.rows, pd.columns, pd.s if pd.table else pd.rows
            rows, columns = outputs[0].shape
            return rows, columns, pd.s if pd.table else rows

        def grid(tiling: MqaLogitsTiling) -> tuple[int, int]:
            rows, columns, s = sizes()
            return rows // s * triton.cdiv(s, tiling.tokens), triton.cdiv(columns, tiling.keys)

        def args(_: Any) -> tuple[Any, ...]:
            (logits,), (rows, columns, s) = outputs, sizes()
            if pd.table:
                q, cache, weights, ends, table = inputs
                given = (q, cache, weights, weights, ends, ends, table)
                strides = (cache.stride(0), table.stride(0))
            else:
                q, keys, scales, weights, starts, ends = inputs
                given = (q, keys, scales, weights, starts, ends, ends)
                strides = (PAGE * D, 0)
            return (*given, logits, rows, columns, *strides, logits.stride(0), s)

        return TritonKernel(
            mqa_logits,
            grid_fn=grid,
            args_fn=args,
            input_tensors=inputs,
            output_tensors=outputs,
            tiling=self.tiling,
            meta_fn=lambda tiling: {
                "H": pd.heads, "TOKENS": tiling.tokens, "KEYS": tiling.keys, "PAGED": pd.table,
                "INTERPRET": interpreted(mqa_logits),
            },
            options_fn=lambda tiling: {"num_warps": tiling.num_warps},
            signature_fn=lambda _: {
                "Q": "*u8", "Keys": "*u8", "Scales": "*fp32", "Weights": "*fp32", "Starts": "*i32", "Ends": "*i32",
                "Table": "*i32", "Logits": f"*{pd.dtype}",
                **dict.fromkeys(("rows", "columns", "page_stride", "table_stride", "stride", "S"), "i32"),
            },
            plan=self,
        )  # fmt: skip
