"""rope_append v0 in cuTile for Hopper (sm_90a): rotates new tokens' q and k, and writes latent and rope into the cache.

A CTA (cuTile: block) has one token and either `heads` of its query heads, or, first, its key:

    position → cosines, sines (float32)     columns x, y of a pair → x cos - y sin, y cos + x sin → out, or cache[slot]

The first columns of all pairs are one tile and the second ones another, read and written by offsets, for in interleaved
pairs they do not lie beside each other. A key whose slot is outside of the cache is not stored; a position outside of
the table turns by NaN. The base version.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cuda.tile as ct

from mla_var3.device import Device, Requirement
from mla_var3.kernel.cutile.prims.handles import ct_dtype, handle, signature
from mla_var3.runtime import CtKernel, KernelPlan, Tiling, Verdict, limits
from mla_var3.workload import rope

if TYPE_CHECKING:
    from mla_var3.workload.rope import RopeProblem

ConstInt = ct.Constant[int]
ConstBool = ct.Constant[bool]


# ------------------------------------------------------------------------------------------------ tiling
@dataclass(frozen=True)
class RopeAppendTiling(Tiling):
    """heads: of a CTA, a power of two. num_warps: 4 or 8. occupancy: CTAs that an SM should hold; without it cuTile
    takes all registers for one."""

    heads: int = 16
    num_warps: int = 4
    occupancy: int = 8

    def validate(self, pd: RopeProblem, device: Device | None = None) -> Verdict:
        if not 1 <= self.heads <= 64 or self.heads & (self.heads - 1):
            return Verdict.no(f"heads = {self.heads} must be a power of two of up to 64.")
        if self.num_warps not in (4, 8):
            return Verdict.no(f"num_warps = {self.num_warps} must be 4 or 8.")
        if not 1 <= self.occupancy <= 64 // self.num_warps:
            return Verdict.no(f"occupancy = {self.occupancy} must be 1 to {64 // self.num_warps}.")
        return limits.grid(1 + -(-pd.h // self.heads), f"blocks of the {pd.h:,} heads of q")


# ------------------------------------------------------------------------------------------------ device
def turn(source, target, from_rows, to_rows, inside, cosines, sines, HALF, INTERLEAVED, COUNT):
    """Turns COUNT rows that begin at offsets from_rows, (COUNT, 1), and stores them at to_rows where `inside`."""
    pair = ct.arange(HALF, dtype=ct.int32)[None, :]
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, pair + HALF
    mask = ct.broadcast_to(inside, (COUNT, HALF))
    memory = source.get_raw_memory()
    x = ct.astype(memory.load_offset(from_rows + first, mask=mask, padding_value=0.0), ct.float32)
    y = ct.astype(memory.load_offset(from_rows + second, mask=mask, padding_value=0.0), ct.float32)
    memory = target.get_raw_memory()
    memory.store_offset(to_rows + first, ct.astype(x * cosines - y * sines, target.dtype), mask=mask)
    memory.store_offset(to_rows + second, ct.astype(y * cosines + x * sines, target.dtype), mask=mask)


@ct.kernel
def rope_append(
    Q,  # handle of (n, H, COLUMNS), global
    LATENT,  # handle of (n, K), global
    ROPE,  # handle of (n, P), rows `apart` elements apart, global
    POSITIONS,  # handle of (n,)
    SLOTS,  # handle of (n,)
    TABLE,  # handle of (positions, P) float32: cosines, sines
    OUT,  # handle of (n, H, K + P), global
    CACHE,  # handle of (slots, K + P), global
    apart: int,
    table_rows: int,
    cache_rows: int,
    H: ConstInt,
    COLUMNS: ConstInt,
    K: ConstInt,
    P: ConstInt,
    INTERLEAVED: ConstBool,
    HEADS: ConstInt,
):
    """Grid (n, 1 + blocks of heads)."""
    token = ct.full((1,), ct.bid(0), dtype=ct.int32)
    HALF = P // 2
    position = ct.astype(POSITIONS.get_raw_memory().load_offset(token), ct.int64)
    pair = ct.arange(HALF, dtype=ct.int64)
    table = TABLE.get_raw_memory()
    there = ct.broadcast_to((position >= 0) & (position < table_rows), (HALF,))
    row = position * P + pair
    cosines = ct.reshape(table.load_offset(row, mask=there, padding_value=float("nan")), (1, HALF))
    sines = ct.reshape(table.load_offset(row + HALF, mask=there, padding_value=float("nan")), (1, HALF))
    token = ct.astype(token, ct.int64)
    if ct.bid(1) == 0:
        slot = ct.astype(SLOTS.get_raw_memory().load_offset(token), ct.int64)
        row = slot * (K + P)
        inside = (slot >= 0) & (slot < cache_rows)
        at = ct.reshape(row + K, (1, 1))
        source = ct.reshape(token * apart, (1, 1))
        turn(ROPE, CACHE, source, at, ct.reshape(inside, (1, 1)), cosines, sines, HALF, INTERLEAVED, 1)
        column = ct.arange(K, dtype=ct.int64)
        latent = LATENT.get_raw_memory().load_offset(token * K + column)
        CACHE.get_raw_memory().store_offset(row + column, latent, mask=ct.broadcast_to(inside, (K,)))
    else:
        head = (ct.bid(1) - 1) * HEADS + ct.arange(HEADS, dtype=ct.int32)
        row = ct.reshape(token * H + ct.astype(head, ct.int64), (HEADS, 1))
        inside = ct.reshape(head < H, (HEADS, 1))
        source = row * COLUMNS + (COLUMNS - P)
        turn(Q, OUT, source, row * (K + P) + K, inside, cosines, sines, HALF, INTERLEAVED, HEADS)


# ------------------------------------------------------------------------------------------------ host
def takes(pd: RopeProblem) -> Verdict:
    if pd.p & (pd.p - 1) or pd.k & (pd.k - 1):
        return Verdict.no(f"k = {pd.k} and p = {pd.p} must be powers of two, as tiles are.")
    return Verdict.yes()


# ------------------------------------------------------------------------------------------------ plan
class RopeAppendPlan(KernelPlan):
    """Inputs (q, latent, rope, positions, slots, table), outputs (out, cache) of `workload.rope`."""

    workload = rope.WORKLOAD
    tiling_type = RopeAppendTiling
    requires = Requirement(archs=("sm_90a",), dtypes=("bf16", "fp16"), problem=takes)

    def default_tiling(self) -> RopeAppendTiling:
        return RopeAppendTiling(min(16, 1 << (self.problem.h - 1).bit_length()))

    def autotune_configs(self) -> list[Tiling]:
        return [RopeAppendTiling(heads, 4, occupancy) for heads in (8, 16, 32) for occupancy in (4, 8)]

    def plan(self, *inputs: Any) -> CtKernel:
        return self.plan_into(inputs, rope.new_outputs(self.problem, inputs[0]))

    def plan_into(self, inputs: Any, outputs: Any) -> CtKernel:
        """A kernel on outputs of the caller's, contiguous: out (n, h, k + p), of which the last p columns are written,
        and the cache (pages, page, k + p)."""
        self.require()
        self.workload.rebound(self.problem, *inputs)  # refuses strides that the kernel does not read
        return self._make(inputs, outputs)

    def plan_empty(self) -> CtKernel:
        self.require()
        return self._make((), ())

    def _make(self, inputs: Any, outputs: Any) -> CtKernel:
        pd, ti = self.problem, self.tiling
        constants = [pd.h, pd.columns, pd.k, pd.p, pd.interleaved, ti.heads]

        def args(_: Any) -> tuple[Any, ...]:
            q, latent, rope_, positions, slots, table = inputs
            named = {
                "q": q, "latent": latent, "rope": rope_[0, :1], "positions": positions, "slots": slots, "table": table,
                "out": outputs[0], "cache": outputs[1],
            }  # fmt: skip
            handles = [handle(tensor, name) for name, tensor in named.items()]
            return (*handles, rope_.stride(0), len(table), len(outputs[1]) * pd.page, *constants)

        def grid(_: Any) -> tuple[int, ...]:
            tokens = len(inputs[0]) if inputs else pd.tokens
            return (tokens, 1 + -(-pd.h // ti.heads), 1)

        def describe(_: Any) -> Any:
            io, index = ct_dtype(pd.dtype), {"int64": ct.int64, "int32": ct.int32}[pd.index]
            return signature([io, io, io, index, index, ct.float32, io, io], [ct.int32] * 3, constants)

        return CtKernel(
            rope_append,
            grid,
            args,
            inputs,
            outputs,
            ti,
            hints_fn=lambda _: {"num_worker_warps": ti.num_warps, "occupancy": ti.occupancy},
            signature_fn=describe,
            name="rope_append",
            plan=self,
        )
