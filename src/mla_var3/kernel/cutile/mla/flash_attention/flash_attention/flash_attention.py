"""Prefill attention over decompressed heads (192/128) in cuTile: causal or not, out and log-sum-exp.

One block takes `tile_m` query tokens of one head and walks over that head's keys in tiles of `tile_n`:

    Q (tile_m, 128 | 64)   K tile (tile_n, 128 | 64) ──► S = Q·Kᵀ ──► online softmax ──► O (tile_m, 128) += P·V

    causal, tiles of keys:   ░ seen by every row: first loop, no mask      ◣ on the diagonal: second loop, masked
        rows of the last block   ░ ░ ░ ░ ◣       this block starts first: it has the most tiles
        rows of the first block  ◣

Without a mask the second loop takes the last, partly filled tile, if there is one. The mask is aligned at the end: row
i of s sees keys 0 .. t - s + i. Blocks of one head are neighbours in the grid, so that the blocks that run at a time
share the keys of few heads: those of all heads would not fit in L2 (5 MB a head at 8192 tokens). Among them the longest
rows come first, so that what is left at the end of the grid is short.

Two warpgroups have 64 rows each; the products of one hide the softmax of the other. K comes as 128 + 64 columns, V in
pieces of `v_columns`: the width of a load decides how many buffers cuTile makes (131 KB of shared memory with V whole,
197 KB with V in halves). Whole, with the fewest waits and one product a tile into one accumulator, was the faster at
8192 tokens. exp2 flushes subnormals: without that every exponential costs two more multiplications and a
comparison (2776 instead of 2384 instructions).

Architecture: Hopper (sm_90a), through HGMMA, TMA and cuTile's own warp specialisation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import cuda.tile as ct

from mla_var3.device import Device, Requirement
from mla_var3.kernel.cutile.lib.handles import ct_dtype, handle, signature
from mla_var3.runtime import CtKernel, Tiling, Verdict
from mla_var3.runtime.correctness.prefill import PrefillPlan, takes_prefill

if TYPE_CHECKING:
    from mla_var3.problem import MlaProblem

ConstInt = ct.Constant[int]
ConstBool = ct.Constant[bool]

NOPE = 128
ROPE = 64
KEY = NOPE + ROPE
VALUE = 128
LN2 = 0.6931471805599453
LOG2E = 1.4426950408889634

#: Running maximum before any key: finite, so that "maximum minus maximum" is never infinity minus infinity.
FLOOR = -1.0e30

#: Of the shared memory of a block: barriers, row statistics, descriptors.
SMEM_MISC = 2048

#: (tile_m, tile_n, num_warpgroups, occupancy) that compile to Hopper code: see `FlashAttentionTiling.validate`.
SHAPES = ((128, 128, 2, 1), (128, 64, 2, 1), (256, 64, 2, 1), (64, 128, 1, 1), (64, 64, 1, 2))


@dataclass(frozen=True)
class FlashAttentionTiling(Tiling):
    """Knobs of the kernel.

    tile_m: query tokens of a block. tile_n: keys of a tile. k_columns, v_columns: columns of K and of V that one load
    brings, 64 or 128 (K's last 64 are always a load of their own). num_warpgroups: of those that compute. occupancy:
    blocks that an SM should hold. num_ctas: of a cluster, which cuTile spreads a tile over.
    """

    tile_m: int = 128
    tile_n: int = 128
    k_columns: int = 128
    v_columns: int = 128
    num_warpgroups: int = 2
    occupancy: int = 1
    num_ctas: int = 1

    def validate(self, pd: MlaProblem, device: Device | None = None) -> Verdict:
        shape = (self.tile_m, self.tile_n, self.num_warpgroups, self.occupancy)
        # Other shapes compile, but to code that spills, waits for every product or holds fewer blocks than asked.
        if shape not in SHAPES:
            return Verdict.no(f"(tile_m, tile_n, num_warpgroups, occupancy) = {shape} is not one of {SHAPES}.")
        for name, value in (("k_columns", self.k_columns), ("v_columns", self.v_columns)):
            if value not in (64, 128):
                return Verdict.no(f"{name} = {value} is neither 64 nor 128.")
        if self.num_ctas not in (1, 2):
            return Verdict.no(f"num_ctas = {self.num_ctas} is neither 1 nor 2.")
        smem = 2 * (KEY * self.tile_m + (KEY + VALUE) * self.tile_n) + SMEM_MISC
        if device is not None and self.occupancy * smem > device.smem_per_sm:
            return Verdict.no(
                f"{self.occupancy} blocks with Q and one tile of keys take {self.occupancy * smem} bytes of shared "
                f"memory; an SM has {device.smem_per_sm}."
            )
        return Verdict.yes()


def load_rows(array, req, tile, head, ROWS, PIECE, WIDTH):
    """(ROWS, WIDTH) of one head in pieces of PIECE columns, the rest in a piece of 64; rows past the end are zero."""
    zero = ct.PaddingMode.ZERO
    pieces = tuple(
        ct.reshape(ct.load(array, (req, tile, head, c), (1, ROWS, 1, PIECE), padding_mode=zero), (ROWS, PIECE))
        for c in ct.static_iter(range(WIDTH // PIECE))
    )
    if WIDTH % PIECE:
        last = ct.load(array, (req, tile, head, WIDTH // 64 - 1), (1, ROWS, 1, 64), padding_mode=zero)
        pieces = (*pieces, ct.reshape(last, (ROWS, 64)))
    return pieces


def attend(qs, k, v, req, tile, head, m, l, accs, scale, mask, TM, TN, KC, VC, MASKED):
    """One tile of keys: the new running maximum (base 2, scaled), denominator and unnormalised output pieces."""
    ks = load_rows(k, req, tile, head, TN, KC, 192)
    s = ct.zeros((TM, TN), dtype=ct.float32)
    for c in ct.static_iter(range(len(qs))):
        s = ct.mma(qs[c], ct.transpose(ks[c]), s)
    if MASKED:
        s = ct.where(mask, s, float("-inf"))
    m_new = ct.maximum(m, ct.max(s, 1, keepdims=True) * scale)
    p = ct.exp2(s * scale - m_new, flush_to_zero=True)
    keep = ct.exp2(m - m_new, flush_to_zero=True)
    l = l * keep + ct.sum(p, 1, keepdims=True)
    vs = load_rows(v, req, tile, head, TN, VC, 128)
    p16 = ct.astype(p, v.dtype)
    accs = tuple(ct.mma(p16, vs[c], accs[c] * keep) for c in ct.static_iter(range(128 // VC)))
    return m_new, l, accs


@ct.kernel
def flash_attention(
    Q,  # handle of (b, s, H, 192), global
    K,  # handle of (b, t, H, 192), global; same dtype
    V,  # handle of (b, t, H, 128), global; same dtype
    OUT,  # handle of (b, s, H, 128), global; same dtype
    LSE,  # handle of (b, H, s) float32, global
    scale: float,  # softmax scale · log2(e)
    b: int,
    s: int,
    t: int,
    H: ConstInt,
    CAUSAL: ConstBool,
    TM: ConstInt,
    TN: ConstInt,
    KC: ConstInt,
    VC: ConstInt,
):
    """Grid (tiles of query tokens, H, b)."""
    row_tile = ct.num_blocks(0) - 1 - ct.bid(0)
    head = ct.bid(1)
    req = ct.bid(2)
    q = ct.Array.from_foreign(Q.foreign_pointer, (b, s, H, 192), (s * H * 192, H * 192, 192, 1))
    k = ct.Array.from_foreign(K.foreign_pointer, (b, t, H, 192), (t * H * 192, H * 192, 192, 1))
    v = ct.Array.from_foreign(V.foreign_pointer, (b, t, H, 128), (t * H * 128, H * 128, 128, 1))
    out = ct.Array.from_foreign(OUT.foreign_pointer, (b, s, H, 128), (s * H * 128, H * 128, 128, 1))
    lses = ct.Array.from_foreign(LSE.foreign_pointer, (b, H, s), (H * s, s, 1))
    qs = load_rows(q, req, row_tile, head, TM, KC, 192)

    if CAUSAL:
        before = t - s + row_tile * TM  # keys that precede the block's first row
        whole = max(before + 1, 0) // TN
        last = (max(min(before + TM, t), 0) + TN - 1) // TN
    else:
        whole = t // TN
        last = (t + TN - 1) // TN

    m = ct.full((TM, 1), FLOOR, dtype=ct.float32)
    l = ct.zeros((TM, 1), dtype=ct.float32)
    accs = tuple(ct.zeros((TM, VC), dtype=ct.float32) for c in ct.static_iter(range(128 // VC)))
    for j in range(0, whole):
        m, l, accs = attend(qs, k, v, req, j, head, m, l, accs, scale, None, TM, TN, KC, VC, False)
    row = t - s + row_tile * TM + ct.arange(TM, dtype=ct.int32)
    for j in range(whole, last):
        token = j * TN + ct.arange(TN, dtype=ct.int32)
        if CAUSAL:
            mask = token[None, :] <= row[:, None]
        else:
            mask = ct.broadcast_to((token < t)[None, :], (TM, TN))
        m, l, accs = attend(qs, k, v, req, j, head, m, l, accs, scale, mask, TM, TN, KC, VC, True)

    empty = l == 0.0
    safe = ct.where(empty, 1.0, l)
    factor = 1.0 / safe
    for c in ct.static_iter(range(128 // VC)):
        o = ct.reshape(ct.astype(accs[c] * factor, OUT.dtype), (1, TM, 1, VC))
        ct.store(out, (req, row_tile, head, c), o)
    lse = ct.where(empty, float("inf"), (m + ct.log2(safe)) * LN2)
    ct.store(lses, (req, head, row_tile), ct.reshape(lse, (1, 1, TM)))


def _accepts(pd: MlaProblem) -> Verdict:
    if (pd.d, pd.p) != (VALUE, ROPE):
        return Verdict.no(f"written for heads of 128 + 64 and 128 columns; the problem has d = {pd.d}, p = {pd.p}.")
    if pd.t < 1:
        return Verdict.no("there is nothing to attend to: t = 0.")
    if pd.t * pd.h * KEY >= 2**31:
        return Verdict.no(f"t · h = {pd.t * pd.h} keys of a request: strides are 32 bits, use under 11184811.")
    return takes_prefill(pd)


class FlashAttentionPlan(PrefillPlan):
    """Prefill attention in cuTile, base version: inputs (q, k, v), outputs (out (b, s, h, 128), lse (b, h, s))."""

    tiling_type = FlashAttentionTiling
    requires = Requirement(archs=("sm_90a",), dtypes=("bf16", "fp16"), features=("wgmma", "tma"), problem=_accepts)
    deterministic = True

    def default_tiling(self) -> FlashAttentionTiling:
        return FlashAttentionTiling()

    def autotune_configs(self) -> list[Tiling]:
        tilings = (
            FlashAttentionTiling(),
            FlashAttentionTiling(128, 128, 128, 64),
            FlashAttentionTiling(128, 64, 128, 128),
            FlashAttentionTiling(128, 128, 64, 64),
            FlashAttentionTiling(256, 64, 64, 128),
            FlashAttentionTiling(64, 128, 64, 128, num_warpgroups=1),
            FlashAttentionTiling(64, 64, 64, 128, num_warpgroups=1, occupancy=2),
        )
        tilings += tuple(replace(x, num_ctas=2) for x in tilings)
        return [x for x in tilings if x.validate(self.problem, self.device)]

    def _constants(self) -> list[Any]:
        pd, ti = self.problem, self.tiling
        return [pd.h, pd.causal, ti.tile_m, ti.tile_n, ti.k_columns, ti.v_columns]

    def kernel_on(self, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> CtKernel:
        """The kernel on (q, k, v) and (out, lse); keys may outnumber queries. Without tensors it compiles only."""
        pd, ti = self.problem, self.tiling

        def grid(_: Any) -> tuple[int, ...]:
            b, s, h = inputs[0].shape[:3] if inputs else (pd.b, pd.s, pd.h)
            return (-(-s // ti.tile_m), h, b)

        def args(_: Any) -> tuple[Any, ...]:
            names = ("q", "k", "v", "out", "lse")
            handles = [handle(x, name) for x, name in zip((*inputs, *outputs), names, strict=True)]
            q, k, _v = inputs
            return (*handles, pd.scale * LOG2E, q.shape[0], q.shape[1], k.shape[1], *self._constants())

        def describe(_: Any) -> Any:
            io = ct_dtype(pd.dtype)
            return signature([io, io, io, io, ct.float32], [ct.float32, *[ct.int32] * 3], self._constants())

        def hints(_: Any) -> dict[str, Any]:
            hints = {"num_worker_warps": 4 * ti.num_warpgroups, "occupancy": ti.occupancy}
            return hints | ({"num_ctas": ti.num_ctas} if ti.num_ctas > 1 else {})

        return CtKernel(
            flash_attention,
            grid,
            args,
            inputs,
            outputs,
            ti,
            hints_fn=hints,
            signature_fn=describe,
            name="flash_attention",
            plan=self,
        )

    def plan(self, *inputs: Any) -> CtKernel:
        import torch

        self.require()
        q, _, v = inputs
        b, s, h, _ = q.shape
        out = torch.empty((b, s, h, v.shape[-1]), dtype=q.dtype, device=q.device)
        lse = torch.empty((b, h, s), dtype=torch.float32, device=q.device)
        return self.kernel_on(inputs, (out, lse))

    def plan_empty(self) -> CtKernel:
        self.require()
        return self.kernel_on((), ())
