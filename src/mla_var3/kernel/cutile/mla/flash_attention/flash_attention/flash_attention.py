"""Prefill attention over decompressed heads in cuTile for Hopper (sm_90a): causal or not, out and LSE.

    out[i, :] = softmax(scale · q[i] · Kᵀ) · V      q, K: 128 + 64 columns a head    V: 128

One CTA (cuTile: block) takes a query tile of `tile_m` tokens of one head and goes over that head's KV tiles of `tile_n`
tokens:

    load      TMA: K tile (tile_n, 128 | 64)
    scores    S = Q·Kᵀ
    softmax   running maximum and denominator; P = exp2(scale · S - max), rounded to 16 bits
    load      TMA: V tile (tile_n, 128)
    rescale   O = O · exp2(old max - max) + P·V

    causal, KV tiles:       ░ seen by every row: first loop, no mask      ◣ on the diagonal: second loop, masked
        last query tile     ░ ░ ░ ░ ◣       this CTA starts first: it has the most KV tiles
        first query tile    ◣

Without a mask the second loop takes the last, partly filled tile, if there is one. The mask is aligned at the end: row
i of s sees keys 0 .. t - s + i. CTAs of one head are neighbours in the grid, so that those that run at a time share the
keys of few heads: those of all heads would not fit in L2 (5 MB a head at 8192 tokens). Among them the longest rows come
first, which keeps the tail of the grid short.

Two consumer warpgroups have 64 rows each; the products of one hide the softmax of the other. K comes as 128 + 64
columns, V in pieces of `v_columns`: the width of a load decides how many stages cuTile makes (131 KB of shared memory
with V in one piece, 197 KB with V in halves). One piece, with the fewest waits and one product a tile into one
accumulator, was the faster at 8192 tokens. exp2 flushes subnormals: without that every exponential costs two more
multiplications and a comparison (2776 instead of 2384 instructions).

The base version. The online softmax and the two loops are FlashAttention-2's; producer and consumers are cuTile's own
warp specialisation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import cuda.tile as ct

from mla_var3.device import Device, Requirement
from mla_var3.kernel.cutile.prims.handles import ct_dtype, handle, signature
from mla_var3.runtime import CtKernel, KernelPipeline, KernelPlan, LibraryCall, Tiling, Verdict, limits
from mla_var3.runtime.scaling import any_scale
from mla_var3.workload import prefill

if TYPE_CHECKING:
    from mla_var3.runtime.base import BaseKernel
    from mla_var3.workload.prefill import PrefillProblem

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

#: Of the shared memory of a CTA: barriers, row statistics, descriptors.
SMEM_MISC = 2048

#: (tile_m, tile_n, num_warpgroups, occupancy) that compile to Hopper code: see `FlashAttentionTiling.validate`.
SHAPES = ((128, 128, 2, 1), (128, 64, 2, 1), (256, 64, 2, 1), (64, 128, 1, 1), (64, 64, 1, 2))


# ------------------------------------------------------------------------------------------------ tiling
@dataclass(frozen=True)
class FlashAttentionTiling(Tiling):
    """Knobs of the kernel.

    tile_m: tokens of a query tile. tile_n: of a KV tile. k_columns, v_columns: columns of K and of V that one load
    brings, 64 or 128 (K's last 64 are always a load of their own). num_warpgroups: consumers. occupancy: CTAs that an
    SM should hold. num_ctas: of a cluster, over which cuTile spreads a tile.
    """

    tile_m: int = 128
    tile_n: int = 128
    k_columns: int = 128
    v_columns: int = 128
    num_warpgroups: int = 2
    occupancy: int = 1
    num_ctas: int = 1

    def validate(self, pd: PrefillProblem, device: Device | None = None) -> Verdict:
        shape = (self.tile_m, self.tile_n, self.num_warpgroups, self.occupancy)
        # Other shapes compile, but to code that spills, waits for every product or has fewer CTAs an SM than it should.
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
                f"{self.occupancy} CTAs with Q and one KV tile take {self.occupancy * smem} bytes of shared memory; "
                f"an SM has {device.smem_per_sm}."
            )
        return Verdict.yes()


# ------------------------------------------------------------------------------------------------ device
def load_rows(array, req, tile, head, ROWS, PIECE, WIDTH):
    """(ROWS, WIDTH) of one head by TMA: pieces of PIECE columns, the rest in one of 64; rows past the end are zero."""
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
    """One KV tile: the new running maximum m (base 2, scaled), denominator l and unnormalised output pieces accs."""
    # S = Q·Kᵀ: waits for K, piece by piece.
    ks = load_rows(k, req, tile, head, TN, KC, 192)
    s = ct.zeros((TM, TN), dtype=ct.float32)
    for c in ct.static_iter(range(len(qs))):
        s = ct.mma(qs[c], ct.transpose(ks[c]), s)
    if MASKED:
        s = ct.where(mask, s, float("-inf"))
    # Softmax: P = exp2(scale · S - m'), l = l · exp2(m - m') + sum P.
    m_new = ct.maximum(m, ct.max(s, 1, keepdims=True) * scale)
    p = ct.exp2(s * scale - m_new, flush_to_zero=True)
    keep = ct.exp2(m - m_new, flush_to_zero=True)
    l = l * keep + ct.sum(p, 1, keepdims=True)
    # Rescale and O += P·V: waits for V, which was loaded meanwhile.
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
    """Grid (query tiles, H, b)."""
    row_tile = ct.num_blocks(0) - 1 - ct.bid(0)
    head = ct.bid(1)
    req = ct.bid(2)
    q = ct.Array.from_foreign(Q.foreign_pointer, (b, s, H, 192), (s * H * 192, H * 192, 192, 1))
    k = ct.Array.from_foreign(K.foreign_pointer, (b, t, H, 192), (t * H * 192, H * 192, 192, 1))
    v = ct.Array.from_foreign(V.foreign_pointer, (b, t, H, 128), (t * H * 128, H * 128, 128, 1))
    out = ct.Array.from_foreign(OUT.foreign_pointer, (b, s, H, 128), (s * H * 128, H * 128, 128, 1))
    lses = ct.Array.from_foreign(LSE.foreign_pointer, (b, H, s), (H * s, s, 1))
    qs = load_rows(q, req, row_tile, head, TM, KC, 192)

    # ------------------------------------------------ KV tiles: 0 .. unmasked - 1 without a mask, .. last - 1 with it
    if CAUSAL:
        before = t - s + row_tile * TM  # keys before the query tile's first row
        unmasked = max(before + 1, 0) // TN
        last = (max(min(before + TM, t), 0) + TN - 1) // TN
    else:
        unmasked = t // TN
        last = (t + TN - 1) // TN

    m = ct.full((TM, 1), FLOOR, dtype=ct.float32)
    l = ct.zeros((TM, 1), dtype=ct.float32)
    accs = tuple(ct.zeros((TM, VC), dtype=ct.float32) for c in ct.static_iter(range(128 // VC)))
    for j in range(0, unmasked):
        m, l, accs = attend(qs, k, v, req, j, head, m, l, accs, scale, None, TM, TN, KC, VC, False)
    row = t - s + row_tile * TM + ct.arange(TM, dtype=ct.int32)
    for j in range(unmasked, last):
        token = j * TN + ct.arange(TN, dtype=ct.int32)
        if CAUSAL:
            mask = token[None, :] <= row[:, None]
        else:
            mask = ct.broadcast_to((token < t)[None, :], (TM, TN))
        m, l, accs = attend(qs, k, v, req, j, head, m, l, accs, scale, mask, TM, TN, KC, VC, True)

    # ------------------------------------------------ epilogue: O / l and the LSE
    empty = l == 0.0
    safe = ct.where(empty, 1.0, l)
    factor = 1.0 / safe
    for c in ct.static_iter(range(128 // VC)):
        o = ct.reshape(ct.astype(accs[c] * factor, OUT.dtype), (1, TM, 1, VC))
        ct.store(out, (req, row_tile, head, c), o)
    lse = ct.where(empty, float("inf"), (m + ct.log2(safe)) * LN2)
    ct.store(lses, (req, head, row_tile), ct.reshape(lse, (1, 1, TM)))


# ------------------------------------------------------------------------------------------------ host
def takes(pd: PrefillProblem) -> Verdict:
    if (pd.d, pd.p) != (VALUE, ROPE):
        return Verdict.no(f"written for heads of 128 + 64 and 128 columns; the problem has d = {pd.d}, p = {pd.p}.")
    if not pd.uniform or pd.s != pd.t:
        return Verdict.no(f"written for whole prompts of one length; the problem is {pd.label}.")
    return limits.all_of(
        limits.grid(pd.b, "requests of q"),
        limits.grid(pd.h, "heads of q"),
        limits.offsets(pd.t * pd.h * KEY, f"{pd.t:,} keys of {pd.h:,} heads in a request"),
    )


# ------------------------------------------------------------------------------------------------ plan
class FlashAttentionPlan(KernelPlan):
    """Prefill attention in cuTile, base version: inputs and outputs of `workload.prefill`, of whole prompts alike.

    Packed tensors of these are tensors (b, s, h, columns), so that no offset is read. The kernel writes the LSE prompt
    by prompt, (b, h, s): where there are several, torch copies it into (h, b · s) behind the kernel.
    """

    workload = prefill.WORKLOAD
    tiling_type = FlashAttentionTiling
    requires = Requirement(archs=("sm_90a",), dtypes=("bf16", "fp16"), features=("wgmma", "tma"), problem=takes)
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

    def _attention(self, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> CtKernel:
        """The kernel on the inputs and (out, lse (b, h, s)). Without tensors it compiles only."""
        pd, ti = self.problem, self.tiling
        constants = [pd.h, pd.causal, ti.tile_m, ti.tile_n, ti.k_columns, ti.v_columns]

        def grid(_: Any) -> tuple[int, ...]:
            return (-(-pd.s // ti.tile_m), pd.h, pd.b)

        def args(_: Any) -> tuple[Any, ...]:
            names = ("q", "k", "v", "out", "lse")
            handles = [handle(x, name) for x, name in zip((*inputs[:3], *outputs), names, strict=True)]
            return (*handles, pd.scale * LOG2E, pd.b, pd.s, pd.t, *constants)

        def describe(_: Any) -> Any:
            io = ct_dtype(pd.dtype)
            return signature([io, io, io, io, ct.float32], [ct.float32, *[ct.int32] * 3], constants)

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

    @any_scale(0)
    def plan(self, *inputs: Any) -> BaseKernel:
        import torch

        self.require()
        pd, (q, _, v, *_) = self.problem, inputs
        out = torch.empty((*q.shape[:2], v.shape[-1]), dtype=q.dtype, device=q.device)
        lse = torch.empty((pd.b, pd.h, pd.s), dtype=torch.float32, device=q.device)
        if pd.b == 1:
            return self._attention(inputs, (out, lse[0]))
        packed = torch.empty((pd.h, pd.b, pd.s), dtype=torch.float32, device=q.device)
        attention = self._attention(inputs, (out, lse))
        order = LibraryCall(lambda: packed.copy_(lse.transpose(0, 1)), name="lse_order", input_tensors=(lse,))
        return KernelPipeline(
            [attention, order],
            name="flash_attention",
            output_tensors=(out, packed.view(pd.h, -1)),
            workspace_tensors=(lse,),
            tiling=self.tiling,
            plan=self,
        )

    def plan_empty(self) -> CtKernel:
        self.require()
        return self._attention((), ())
