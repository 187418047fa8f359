"""Absorbed MLA decode in cuTile for Hopper (sm_90a), the readable baseline: paged, ragged, causal, split-KV.

    out[row, :] = softmax(scale · q[row] · Kᵀ) · V      K = [latent | rope] (t, 576)    V = latent (t, 512)

One CTA (cuTile: block) takes a query tile (rows of one request and one latent cache) and one split of the request's
tokens. A KV tile is loaded once and serves as K and as V:

    load      page id ─► TMA: KV tile, in 512 / tile_k column chunks, and its rope columns
    scores    S = Q·Kᵀ
    softmax   running maximum and denominator; P = exp2(scale · S - max), rounded to 16 bits
    rescale   O = O · exp2(old max - max) + P·V, chunk by chunk

    heads on M:  S  (tile_m, tile_n)  O  (tile_m, 512)    64 rows; two warpgroups share S and O by columns
    swap AB:     Sᵀ (tile_n, tile_m)  Oᵀ (512, tile_m)    16 rows: no padding up to 64, which costs work and power

The schedule is the compiler's: cuTile gives TMA loads to a producer warpgroup and makes as many stages as fit. The
width of a column chunk decides that. As one chunk of 512 columns K has a single stage, and loads wait for the last
product (450 us at b128 h128 t4096); as four of 128 it has two (306 us). Asking for it by `latency=` changes nothing.

Rows are packed as (query tokens, heads of the group): tile_m = TS · TG with TG the group's size rounded up to a power
of two, at most tile_m. What overhangs is zero-filled on load and clipped on store.

KV tiles of which every row sees every token go through a loop without masks. The others (the last tile, and with a
causal mask those of the last s tokens) go through a second loop that masks scores before the softmax, and reads its
tile with rows past the end replaced by zeros, because 0 · NaN would reach O. Page ids are read only for tiles that
exist.

Split-KV: grid (query tiles, splits, b). The host chooses the number of splits by the page table's width. With more than
one each CTA writes an fp32 partial with its LSE, and `prims.combine` merges them.

K and V as one tile is FlashMLA's, the online softmax and the combine are FlashAttention's and Flash-Decoding's. What
version 2 does differently for few rows is in its own file.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import cuda.tile as ct

from mla_var3.device import Device, Requirement
from mla_var3.kernel.cutile.prims.combine import combine_kernel, new_partials, warm_up
from mla_var3.kernel.cutile.prims.handles import ct_dtype, handle, signature
from mla_var3.kernel.cutile.prims.latent import (
    FLOOR,
    LATENT,
    LN2,
    LOG2E,
    WIDTH,
    ceil_pow2,
    takes_latents,
    takes_pages_of_16,
)
from mla_var3.runtime import CtKernel, KernelPipeline, KernelPlan, Tiling, Verdict
from mla_var3.runtime.plan import require_int32
from mla_var3.runtime.scaling import any_scale
from mla_var3.workload import decode

if TYPE_CHECKING:
    from mla_var3.workload.decode import MlaProblem

ConstInt = ct.Constant[int]
ConstBool = ct.Constant[bool]

MAX_SPLITS = 128

#: Of the shared memory of a CTA: barriers, row statistics, descriptors.
SMEM_MISC = 2048

#: Hints of the decorated kernel, which a tiling may change.
HINTS = {"num_worker_warps": 8, "num_ctas": 1}


# ------------------------------------------------------------------------------------------------ tiling
@dataclass(frozen=True)
class FlashMlaTiling(Tiling):
    """Knobs of the kernel.

    swapped: swap AB, tokens on the M side of the MMA and query rows on N; otherwise rows on M. tile_m: rows of a query
    tile, 64, or 16 when swapped. tile_n: tokens of a KV tile, a page or a divisor of one. tile_k: latent columns of a
    chunk; chunks are separate tiles to cuTile, which decides by their size how many stages they have. num_splits: of
    each request; 0 chooses by the sizes when the kernel is bound. num_warpgroups: consumers. num_ctas: of a cluster,
    over which cuTile spreads a tile.
    """

    swapped: bool = False
    tile_m: int = 64
    tile_n: int = 64
    tile_k: int = 128
    num_splits: int = 0
    num_warpgroups: int = 2
    num_ctas: int = 1

    def validate(self, pd: MlaProblem, device: Device | None = None) -> Verdict:
        page, side = pd.page_size, "swapped" if self.swapped else "with heads on M"
        if self.tile_n > page or page % self.tile_n:
            return Verdict.no(f"tile_n = {self.tile_n} does not divide a page of {page} tokens: a tile is in one page.")
        # Swapped with 32 or 64 rows, what cuTile 1.7.0 with tileiras 13.4.92 makes is wrong where the last tile is
        # partly filled and there is no causal mask; with 8 rows it spills 10 KB.
        if self.tile_m != (16 if self.swapped else 64):
            return Verdict.no(f"tile_m = {self.tile_m}: {side} it is {16 if self.swapped else 64}.")
        tokens = (64,) if self.swapped else (16, 32, 64)
        if self.tile_n not in tokens:
            return Verdict.no(f"tile_n = {self.tile_n}: {side} it is one of {tokens}.")
        if self.tile_k not in (64, 128, 256, 512):
            return Verdict.no(f"tile_k = {self.tile_k} is not one of 64, 128, 256, 512.")
        if not {self.num_warpgroups, self.num_ctas} <= {1, 2}:
            return Verdict.no("num_warpgroups and num_ctas: each is 1 or 2.")
        if not 0 <= self.num_splits <= MAX_SPLITS:
            return Verdict.no(f"num_splits = {self.num_splits} is outside 0..{MAX_SPLITS}.")
        smem = 2 * WIDTH * (self.tile_m + self.tile_n) + 2 * self.tile_m * self.tile_n + SMEM_MISC
        if device is not None and smem > device.smem_per_block:
            return Verdict.no(f"Q, one KV tile and P take {smem} bytes; a CTA has {device.smem_per_block}.")
        return Verdict.yes()


# ------------------------------------------------------------------------------------------------ device
def load_last(KV, row, head_kv, valid, HKV, TN, TK, SWAPPED):
    """The KV tile at `row` (in tiles) without TMA, its rows from `valid` on zero: (latent chunks (TN, TK), rope).

    A TMA load would do the same from a shorter array, but its descriptor then depends on the length and is built by
    every CTA; and selecting after a load takes the tile through registers, which spills or costs the second stage.
    """
    CHUNKS = 512 // TK
    if SWAPPED:
        # As a gather (below) the loop is unrolled five times, with a wait for every HGMMA.
        zero = ct.PaddingMode.ZERO
        kv = ct.Array.from_foreign(KV.foreign_pointer, (row * TN + valid, HKV, 576), (HKV * 576, 576, 1))
        ks = tuple(
            ct.reshape(ct.load(kv, (row, head_kv, c), (TN, 1, TK), padding_mode=zero, allow_tma=False), (TN, TK))
            for c in ct.static_iter(range(CHUNKS))
        )
        k_rope = ct.reshape(ct.load(kv, (row, head_kv, 8), (TN, 1, 64), padding_mode=zero, allow_tma=False), (TN, 64))
    else:
        # cp.async with zero-fill, straight into the stages of the first loop.
        memory = KV.get_raw_memory()
        token = ct.arange(TN, dtype=ct.int32)
        inside = (token < valid)[:, None]
        at = ct.astype((row * TN + token) * HKV + head_kv, ct.int64)[:, None] * 576
        ks = tuple(
            memory.load_offset(
                at + (c * TK + ct.arange(TK, dtype=ct.int32))[None, :],
                mask=ct.broadcast_to(inside, (TN, TK)),
                padding_value=0,
            )
            for c in ct.static_iter(range(CHUNKS))
        )
        k_rope = memory.load_offset(
            at + (512 + ct.arange(64, dtype=ct.int32))[None, :], mask=ct.broadcast_to(inside, (TN, 64)), padding_value=0
        )
    return ks, k_rope


def attend(qs, q_rope, ks, k_rope, m, l, accs, scale, mask, CHUNKS, SWAPPED, MASKED):
    """One KV tile: the new running maximum m (base 2, scaled), denominator l and unnormalised output chunks accs."""
    # S = Q·Kᵀ, or Sᵀ = K·Qᵀ: waits for the loads of this tile.
    if SWAPPED:
        s = ct.mma(k_rope, ct.transpose(q_rope), ct.zeros((k_rope.shape[0], q_rope.shape[0]), dtype=ct.float32))
        for c in ct.static_iter(range(CHUNKS)):
            s = ct.mma(ks[c], ct.transpose(qs[c]), s)
        axis = 0
    else:
        s = ct.mma(q_rope, ct.transpose(k_rope), ct.zeros((q_rope.shape[0], k_rope.shape[0]), dtype=ct.float32))
        for c in ct.static_iter(range(CHUNKS)):
            s = ct.mma(qs[c], ct.transpose(ks[c]), s)
        axis = 1
    if MASKED:
        s = ct.where(mask, s, float("-inf"))
    # Softmax: P = exp2(scale · S - m'), l = l · exp2(m - m') + sum P.
    m_new = ct.maximum(m, ct.max(s, axis, keepdims=True) * scale)
    p = ct.exp2(s * scale - m_new)
    keep = ct.exp2(m - m_new)
    l = l * keep + ct.sum(p, axis, keepdims=True)
    p16 = ct.astype(p, k_rope.dtype)
    # Rescale and O += P·V, or Oᵀ += Vᵀ·Pᵀ, with V the latent chunks of K; a chunk's stage is free after its product.
    if SWAPPED:
        accs = tuple(ct.mma(ct.transpose(ks[c]), p16, accs[c] * keep) for c in ct.static_iter(range(CHUNKS)))
    else:
        accs = tuple(ct.mma(p16, ks[c], accs[c] * keep) for c in ct.static_iter(range(CHUNKS)))
    return m_new, l, accs


# The hint belongs to the function, not to a plan's copy of it: plans share the compiled code, and it lives as long as
# the process, as CUDA graphs need. With 4 worker warps O (64, 512) does not fit (760 spills), and swapped is slower.
@ct.kernel(num_worker_warps=8)
def flash_mla(
    Q,  # handle of (b, S, HKV · G, 576), global
    KV,  # handle of (num_pages, PAGE, HKV, 576), global; same dtype
    PAGE_TABLE,  # handle of (b, max_pages) int32, global
    SEQ_LENS,  # handle of (b,) int32, global
    OUT,  # handle of (b, S, HKV · G, 512), global; written when splits == 1
    LSE,  # handle of (b, HKV · G, S) float32, global; likewise
    O_PARTIAL,  # handle of (b, splits, S, HKV · G, 512) float32, global; written when splits > 1, else anything
    LSE_PARTIAL,  # handle of (b, splits, S, HKV · G) float32, global; likewise
    scale: float,  # softmax scale · log2(e)
    b: int,
    max_pages: int,
    num_pages: int,
    splits: int,
    S: ConstInt,
    HKV: ConstInt,
    G: ConstInt,
    PAGE: ConstInt,
    CAUSAL: ConstBool,
    TS: ConstInt,
    TG: ConstInt,
    TN: ConstInt,
    TK: ConstInt,
    SWAPPED: ConstBool,
):
    """Grid (query tiles · HKV, splits, b): CTAs that share tokens are neighbours, so L2 serves all but the first."""
    TM = TS * TG
    CHUNKS = 512 // TK
    H = HKV * G
    g_tiles = (G + TG - 1) // TG
    x = ct.bid(0)
    split = ct.bid(1)
    req = ct.bid(2)
    g_tile = x % g_tiles
    head_kv = x // g_tiles % HKV
    s_tile = x // g_tiles // HKV

    q = ct.Array.from_foreign(Q.foreign_pointer, (b, S, HKV, G, 576), (S * H * 576, H * 576, G * 576, 576, 1))
    kv = ct.Array.from_foreign(KV.foreign_pointer, (num_pages * PAGE, HKV, 576), (HKV * 576, 576, 1))
    pages = PAGE_TABLE.get_raw_memory()
    length = SEQ_LENS.get_raw_memory().load_offset(req)

    # ------------------------------------------------ load Q, which stays in shared memory
    zero = ct.PaddingMode.ZERO
    qs = tuple(
        ct.reshape(ct.load(q, (req, s_tile, head_kv, g_tile, c), (1, TS, 1, TG, TK), padding_mode=zero), (TM, TK))
        for c in ct.static_iter(range(CHUNKS))
    )
    q_rope = ct.reshape(ct.load(q, (req, s_tile, head_kv, g_tile, 8), (1, TS, 1, TG, 64), padding_mode=zero), (TM, 64))

    # ------------------------------------------------ this split's KV tiles: first .. last - 1, unmasked ones first
    tiles = (length + TN - 1) // TN
    per_split = (tiles + splits - 1) // splits
    first = split * per_split
    last = min(first + per_split, tiles)
    if CAUSAL:
        unmasked = max(length - (S - 1), 0) // TN
    else:
        unmasked = length // TN
    last_unmasked = min(last, unmasked)

    if SWAPPED:
        m = ct.full((1, TM), FLOOR, dtype=ct.float32)
        l = ct.zeros((1, TM), dtype=ct.float32)
        accs = tuple(ct.zeros((TK, TM), dtype=ct.float32) for c in ct.static_iter(range(CHUNKS)))
    else:
        m = ct.full((TM, 1), FLOOR, dtype=ct.float32)
        l = ct.zeros((TM, 1), dtype=ct.float32)
        accs = tuple(ct.zeros((TM, TK), dtype=ct.float32) for c in ct.static_iter(range(CHUNKS)))

    PER_PAGE = PAGE // TN
    table = req * max_pages
    for t in range(first, last_unmasked):
        row = pages.load_offset(table + t // PER_PAGE) * PER_PAGE + t % PER_PAGE
        ks = tuple(
            ct.reshape(ct.load(kv, (row, head_kv, c), (TN, 1, TK)), (TN, TK)) for c in ct.static_iter(range(CHUNKS))
        )
        k_rope = ct.reshape(ct.load(kv, (row, head_kv, 8), (TN, 1, 64)), (TN, 64))
        m, l, accs = attend(qs, q_rope, ks, k_rope, m, l, accs, scale, None, CHUNKS, SWAPPED, False)

    if CAUSAL:
        limit = length - (S - 1) + s_tile * TS + ct.arange(TM, dtype=ct.int32) // TG
    else:
        limit = ct.full((TM,), length, dtype=ct.int32)
    for t in range(max(first, unmasked), last):
        row = pages.load_offset(table + t // PER_PAGE) * PER_PAGE + t % PER_PAGE
        ks, k_rope = load_last(KV, row, head_kv, min(length - t * TN, TN), HKV, TN, TK, SWAPPED)
        token = t * TN + ct.arange(TN, dtype=ct.int32)
        if SWAPPED:
            mask = token[:, None] < limit[None, :]
        else:
            mask = limit[:, None] > token[None, :]
        m, l, accs = attend(qs, q_rope, ks, k_rope, m, l, accs, scale, mask, CHUNKS, SWAPPED, True)

    # ------------------------------------------------ epilogue: O / l and the LSE, to the output or to the partials
    empty = l == 0.0
    safe = ct.where(empty, 1.0, l)
    factor = 1.0 / safe
    lse = ct.reshape((m + ct.log2(safe)) * LN2, (1, TS, 1, TG))
    none = ct.reshape(empty, (1, TS, 1, TG))
    slot = req * splits + split
    o_strides = (S * H * 512, H * 512, G * 512, 512, 1)
    out = ct.Array.from_foreign(OUT.foreign_pointer, (b, S, HKV, G, 512), o_strides)
    partials = ct.Array.from_foreign(O_PARTIAL.foreign_pointer, (b * splits, S, HKV, G, 512), o_strides)
    # A run-time branch, so that one compilation serves any number of splits; it costs swapped tilings 1 to 4 %. It is
    # taken again for every piece of 128 columns: with more stores in a branch, or with both stores and no branch,
    # cuTile gives up warp specialisation. Swapped needs 64: of wider pieces, some make every HGMMA wait for the last.
    PIECE = min(TK, 64 if SWAPPED else 128)
    for c in ct.static_iter(range(CHUNKS)):
        o = accs[c] * factor
        for i in ct.static_iter(range(TK // PIECE)):
            if SWAPPED:
                piece = ct.transpose(ct.extract(o, (i, 0), (PIECE, TM)))
            else:
                piece = ct.extract(o, (0, i), (TM, PIECE))
            piece = ct.reshape(piece, (1, TS, 1, TG, PIECE))
            column = c * (TK // PIECE) + i
            if splits == 1:
                ct.store(out, (req, s_tile, head_kv, g_tile, column), ct.astype(piece, OUT.dtype))
            else:
                ct.store(partials, (slot, s_tile, head_kv, g_tile, column), piece)
    if splits == 1:
        lses = ct.Array.from_foreign(LSE.foreign_pointer, (b, S, HKV, G), (S * H, 1, G * S, S))
        ct.store(lses, (req, s_tile, head_kv, g_tile), ct.where(none, float("inf"), lse))
    else:
        lses = ct.Array.from_foreign(LSE_PARTIAL.foreign_pointer, (b * splits, S, HKV, G), (S * H, H, G, 1))
        ct.store(lses, (slot, s_tile, head_kv, g_tile), ct.where(none, float("-inf"), lse))


# ------------------------------------------------------------------------------------------------ host
def choose_splits(blocks: int, tiles: int, sms: int) -> int:
    """The number of splits of each request.

    blocks: CTAs of the unsplit grid. tiles: KV tiles of the longest request. Minimises the time of a simple model, in
    units of one KV tile (2.4 us): the SMs work in waves; a CTA costs its tiles and 3 more for its start and end; the
    combine costs 2 and another one for every 32 splits.
    """

    def cost(splits: int) -> float:
        waves = -(-blocks * splits // sms)
        return waves * (-(-tiles // splits) + 3) + (2 + splits / 32 if splits > 1 else 0)

    return min(range(1, max(1, min(tiles, MAX_SPLITS)) + 1), key=cost)


def takes(pd: MlaProblem) -> Verdict:
    return takes_pages_of_16(pd) and takes_latents(pd)


# ------------------------------------------------------------------------------------------------ plan
class FlashMlaPlan(KernelPlan):
    """One compiled attention kernel a problem class; b, lengths, page table width and splits are arguments."""

    workload = decode.WORKLOAD
    tiling_type = FlashMlaTiling
    requires = Requirement(archs=("sm_90a",), dtypes=("bf16", "fp16"), features=("wgmma", "tma"), problem=takes)
    deterministic = True

    def default_tiling(self) -> FlashMlaTiling:
        pd = self.problem
        # Swapped wins up to 16 rows (155 against 166 us at b128 t4096) and loses at 32 (two query tiles, each its own
        # reads from L2); under 64-token pages its M side would fall short of a warpgroup.
        if ceil_pow2(pd.s) * ceil_pow2(pd.group) <= 16 and pd.page_size >= 64:
            return FlashMlaTiling(True, 16)
        # Smaller KV tiles want wider chunks: with narrow ones every HGMMA gets a wait of its own, or it spills.
        tile_n = min(64, pd.page_size)
        return FlashMlaTiling(tile_n=tile_n, tile_k={16: 256, 32: 512}.get(tile_n, 128))

    def autotune_configs(self) -> list[Tiling]:
        pd, base = self.problem, self.default_tiling()
        shapes = [FlashMlaTiling(*side, tile_k=k) for side in ((True, 16), (False, 64)) for k in (128, 64, 512)]
        hints = ({}, {"num_warpgroups": 1}, {"num_ctas": 2})
        others = [replace(shape, **hint) for hint in hints for shape in shapes]
        chosen = self.with_tiling(base).num_splits(pd.b, pd.max_pages)
        splits = [
            replace(base, num_splits=n) for n in (1, chosen // 2, chosen * 2) if 1 <= n <= MAX_SPLITS and n != chosen
        ]
        return list(dict.fromkeys(t for t in (base, *others, *splits) if t.validate(pd, self.device)))

    # ------------------------------------------------------------ sizes
    def tile_shape(self) -> tuple[int, int]:
        """(query tokens, heads of the group) of a query tile."""
        heads = min(self.tiling.tile_m, ceil_pow2(self.problem.group))
        return self.tiling.tile_m // heads, heads

    def query_tiles(self) -> int:
        """Query tiles of one request, over all latent caches."""
        pd = self.problem
        tokens, heads = self.tile_shape()
        return -(-pd.s // tokens) * -(-pd.group // heads) * pd.h_kv

    def num_splits(self, b: int, max_pages: int) -> int:
        """Splits of the bound kernel: the tiling's, or the model's for these sizes; lengths are not looked at."""
        tiles = max_pages * self.problem.page_size // self.tiling.tile_n
        if self.tiling.num_splits:
            return min(self.tiling.num_splits, max(tiles, 1))
        device = self.device or Device.detect()
        return choose_splits(b * self.query_tiles(), tiles, (device or Device.assumed()).num_sms)

    # ------------------------------------------------------------ kernels
    def _attention(
        self, inputs: tuple[Any, ...], outputs: tuple[Any, ...], partials: tuple[Any, ...], splits: int
    ) -> CtKernel:
        """Writes `outputs` (out, lse) when splits is 1, else `partials` (o_partial, lse_partial)."""
        pd, ti = self.problem, self.tiling
        constants = [
            pd.s, pd.h_kv, pd.group, pd.page_size, pd.causal, *self.tile_shape(), ti.tile_n, ti.tile_k, ti.swapped
        ]  # fmt: skip

        def grid(_: Any) -> tuple[int, ...]:
            return (self.query_tiles(), splits, inputs[0].shape[0] if inputs else pd.b)

        def args(_: Any) -> tuple[Any, ...]:
            names = ("q", "kv_cache", "page_table", "seq_lens", "out", "lse", "o_partial", "lse_partial")
            handles = [handle(x, name) for x, name in zip((*inputs, *outputs, *partials), names, strict=True)]
            b, max_pages, num_pages = inputs[0].shape[0], inputs[2].shape[1], inputs[1].shape[0]
            return (*handles, pd.scale * LOG2E, b, max_pages, num_pages, splits, *constants)

        def describe(_: Any) -> Any:
            io = ct_dtype(pd.dtype)
            handles = [io, io, ct.int32, ct.int32, io, ct.float32, ct.float32, ct.float32]
            return signature(handles, [ct.float32, *[ct.int32] * 4], constants)

        def hints(_: Any) -> dict[str, Any]:
            chosen = {"num_worker_warps": 4 * ti.num_warpgroups, "num_ctas": ti.num_ctas}
            return {name: n for name, n in chosen.items() if n != HINTS[name]}

        return CtKernel(
            flash_mla,
            grid,
            args,
            inputs,
            outputs if splits == 1 else partials,
            ti,
            hints_fn=hints,
            signature_fn=describe,
            name="flash_mla",
            plan=self,
        )

    def _combine(self, partials: Any, outputs: Any) -> CtKernel:
        pd = self.problem
        return combine_kernel(
            partials, outputs, s=pd.s, h=pd.h, width=LATENT, dtype=pd.dtype, tiling=self.tiling, plan=self
        )

    @any_scale(0)
    def plan(self, *inputs: Any) -> CtKernel | KernelPipeline:
        import torch

        self.require()
        q, _, page_table, seq_lens = inputs
        require_int32(page_table=page_table, seq_lens=seq_lens)
        pd, b = self.problem, q.shape[0]
        splits = self.num_splits(b, page_table.shape[1])
        out = torch.empty((b, pd.s, pd.h, LATENT), dtype=q.dtype, device=q.device)
        outputs = (out, torch.empty((b, pd.h, pd.s), dtype=torch.float32, device=q.device))
        if splits == 1:
            self._warm_combine(q)
            unused = torch.empty((2, 4), dtype=torch.float32, device=q.device)
            return self._attention(inputs, outputs, tuple(unused), 1)
        partials = new_partials(b, splits, pd.s, pd.h, LATENT, q.device)
        return KernelPipeline(
            [self._attention(inputs, outputs, partials, splits), self._combine(partials, outputs)],
            name="flash_mla",
            tiling=self.tiling,
            workspace_tensors=partials,
            plan=self,
        )

    def plan_empty(self) -> CtKernel | KernelPipeline:
        self.require()
        splits = self.num_splits(self.problem.b, self.problem.max_pages)
        attention = self._attention((), (), (), splits)
        if splits == 1:
            return attention
        return KernelPipeline([attention, self._combine(None, None)], name="flash_mla", tiling=self.tiling, plan=self)

    def _warm_combine(self, q: Any) -> None:
        """Compiles the combine for a later bind that splits; the attention kernel is the same for both."""
        pd = self.problem
        key = ("combine", pd.s, pd.h, pd.dtype, q.device)
        if self.tiling.num_splits != 1 and q.is_cuda and key not in self.compiled:
            warm_up(q, s=pd.s, h=pd.h, width=LATENT, dtype=pd.dtype)
            self.compiled[key] = True
