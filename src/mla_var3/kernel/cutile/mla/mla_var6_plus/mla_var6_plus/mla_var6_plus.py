"""Decoding over a mixed cache in cuTile for Hopper (sm_90a): the o oldest tokens as latents, the n newest decompressed.

    q_latent ─► flash_mla        over the paged latents   ─► o_latent (b, s, h, 512), lse ─┐
                (splits)         + combine                          at the same time       ├─► mla_var6_plus ─► out, lse
    q_heads  ─► flash_attention  over the n newest tokens ─► o_heads (b, s, h, 128), lse ──┘

The two paths have outputs in different spaces: softmax-weighted latents, and softmax-weighted values. The last kernel
brings the first into the second with W_UV, head by head, and merges them by their LSEs. With w = exp(lse - max):

    out = (w_old · W_UV·o_latent + w_new · o_heads) / (w_old + w_new)        lse = max + log(w_old + w_new)

`mla_var3.workload.mixed` has the computation and its reference. n = 0 leaves out the second path (flash_mla
and its projection), o = 0 the first and the merge (flash_attention). Two streams run the paths; how they divide the
device is left to its scheduler: the latent path is compute-bound when s is large, the other one reads 71 times as many
bytes a token.

    flash_mla        one CTA (cuTile: block) a query tile, split and request; a KV tile is loaded once, by TMA, and
                     serves as K (576 columns) and V (512); up to 16 rows with swap AB
    flash_attention  one CTA a query tile and head; K tile by TMA, scores, softmax, V tile by TMA, O += P·V
    mla_var6_plus    one CTA a tile of query rows and head; O_latent · W_UVᵀ, then the merge

The base version. Its attention kernels are those of `flash_mla` version 0 and `flash_attention` version 0, copied with
the tilings that this design uses; their files say why they are as they are. The merge by LSE is Flash-Decoding's; that
the projection may come after the sum is what absorbing W_UV rests on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import cuda.tile as ct

from mla_var3.device import Device, Requirement
from mla_var3.errors import Infeasible, Unsupported
from mla_var3.kernel.cutile.prims.combine import combine_kernel, new_partials, warm_up
from mla_var3.kernel.cutile.prims.handles import ct_dtype, handle, signature
from mla_var3.kernel.cutile.prims.latent import FLOOR, LATENT, LN2, LOG2E, ROPE, ceil_pow2, sizes, takes_pages_of_16
from mla_var3.runtime import CtKernel, KernelPipeline, KernelPlan, Tiling, Verdict, limits
from mla_var3.runtime.concurrent import ConcurrentKernels
from mla_var3.runtime.plan import require_int32
from mla_var3.runtime.scaling import any_scale
from mla_var3.workload import decode, mixed

if TYPE_CHECKING:
    from mla_var3.runtime.base import BaseKernel
    from mla_var3.workload.mixed import MixedProblem

ConstInt = ct.Constant[int]
ConstBool = ct.Constant[bool]

HEAD = 128
KEY = HEAD + ROPE
MAX_SPLITS = 128

#: Of the shared memory of a CTA: barriers, row statistics, descriptors.
SMEM_MISC = 2048


# ------------------------------------------------------------------------------------------------ tiling
class HeadsTile(NamedTuple):
    """Of the decompressed path. tile_m: tokens of a query tile. tile_n: of a KV tile. k_columns: of K that one load
    brings. num_warpgroups: consumers. occupancy: CTAs that an SM should hold."""

    tile_m: int
    tile_n: int
    k_columns: int
    num_warpgroups: int
    occupancy: int


class LatentTile(NamedTuple):
    """Of the latent path. swapped: swap AB. tile_m: rows of a query tile. tile_n: tokens of a KV tile. tile_k: latent
    columns of a chunk."""

    swapped: bool
    tile_m: int
    tile_n: int
    tile_k: int

    @classmethod
    def of(cls, pd: MixedProblem) -> LatentTile:
        # Up to 16 rows swap AB needs no padding to 64; smaller KV tiles want wider chunks.
        if ceil_pow2(pd.s) * ceil_pow2(pd.h) <= 16 and pd.page_size >= 64:
            return cls(True, 16, 64, 128)
        tile_n = min(64, pd.page_size)
        return cls(False, 64, tile_n, {16: 256, 32: 512}.get(tile_n, 128))


@dataclass(frozen=True)
class MlaVar6PlusTiling(Tiling):
    """Knobs of the kernel.

    tile_m: query rows (of all requests, one head) of a CTA of the merge. tile_k: latent columns it takes at a time.
    old_splits: of the latent path, 0 chooses. new_tile_m, new_tile_n: tokens of a query tile and of a KV tile of the
    decompressed path, 64 or 128.
    """

    tile_m: int = 64
    tile_k: int = 128
    old_splits: int = 0
    new_tile_m: int = 64
    new_tile_n: int = 64

    def validate(self, pd: MixedProblem, device: Device | None = None) -> Verdict:
        if self.tile_m not in (64, 128):
            return Verdict.no(f"tile_m = {self.tile_m} is neither 64 nor 128.")
        if self.tile_k not in (64, 128, 256):
            return Verdict.no(f"tile_k = {self.tile_k} is not one of 64, 128, 256.")
        if not 0 <= self.old_splits <= MAX_SPLITS:
            return Verdict.no(f"old_splits = {self.old_splits} is outside 0..{MAX_SPLITS}.")
        if self.new_tile_m not in (64, 128):
            return Verdict.no(f"new_tile_m = {self.new_tile_m} is neither 64 nor 128.")
        if self.new_tile_n not in (64, 128):
            return Verdict.no(f"new_tile_n = {self.new_tile_n} is neither 64 nor 128.")
        tile = self.heads_tile()
        smem = 2 * (KEY * tile.tile_m + (KEY + HEAD) * tile.tile_n) + SMEM_MISC
        if device is not None and tile.occupancy * smem > device.smem_per_sm:
            return Verdict.no(
                f"{tile.occupancy} CTAs with Q and one KV tile take {tile.occupancy * smem} bytes of shared memory; an "
                f"SM has {device.smem_per_sm}."
            )
        return Verdict.yes()

    def heads_tile(self) -> HeadsTile:
        """One consumer warpgroup for 64 rows, and two CTAs an SM where they fit; two warpgroups for 128."""
        if self.new_tile_m == 64:
            return HeadsTile(64, self.new_tile_n, 64, 1, 2 if self.new_tile_n == 64 else 1)
        return HeadsTile(self.new_tile_m, self.new_tile_n, 128, 2, 1)


# -------------------------------------------------------------------------------- device: latent path
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


def attend_latents(qs, q_rope, ks, k_rope, m, l, accs, scale, mask, CHUNKS, SWAPPED, MASKED):
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
    OLD_LENS,  # handle of (b,) int32, global: latent tokens of each request
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
    length = OLD_LENS.get_raw_memory().load_offset(req)

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
        m, l, accs = attend_latents(qs, q_rope, ks, k_rope, m, l, accs, scale, None, CHUNKS, SWAPPED, False)

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
        m, l, accs = attend_latents(qs, q_rope, ks, k_rope, m, l, accs, scale, mask, CHUNKS, SWAPPED, True)

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


# -------------------------------------------------------------------------------- device: decompressed path
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


def attend_heads(qs, k, v, req, tile, head, m, l, acc, scale, mask, TM, TN, KC, MASKED):
    """One KV tile: the new running maximum m (base 2, scaled), denominator l and unnormalised output acc."""
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
    (value,) = load_rows(v, req, tile, head, TN, 128, 128)
    return m_new, l, ct.mma(ct.astype(p, v.dtype), value, acc * keep)


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
    acc = ct.zeros((TM, 128), dtype=ct.float32)
    for j in range(0, unmasked):
        m, l, acc = attend_heads(qs, k, v, req, j, head, m, l, acc, scale, None, TM, TN, KC, False)
    row = t - s + row_tile * TM + ct.arange(TM, dtype=ct.int32)
    for j in range(unmasked, last):
        token = j * TN + ct.arange(TN, dtype=ct.int32)
        if CAUSAL:
            mask = token[None, :] <= row[:, None]
        else:
            mask = ct.broadcast_to((token < t)[None, :], (TM, TN))
        m, l, acc = attend_heads(qs, k, v, req, j, head, m, l, acc, scale, mask, TM, TN, KC, True)

    # ------------------------------------------------ epilogue: O / l and the LSE
    empty = l == 0.0
    safe = ct.where(empty, 1.0, l)
    o = acc * (1.0 / safe)
    ct.store(out, (req, row_tile, head, 0), ct.reshape(ct.astype(o, OUT.dtype), (1, TM, 1, 128)))
    lse = ct.where(empty, float("inf"), (m + ct.log2(safe)) * LN2)
    ct.store(lses, (req, head, row_tile), ct.reshape(lse, (1, 1, TM)))


# -------------------------------------------------------------------------------- device: projection and merge
def seen(LSES, at, inside):
    """LSEs in base 2 of rows at offsets `at`; rows without a key, which hold +inf, count as -inf."""
    lse = LSES.get_raw_memory().load_offset(at, mask=inside, padding_value=float("inf"))
    return ct.where(lse == float("inf"), float("-inf"), lse * LOG2E)


@ct.kernel
def mla_var6_plus(
    O_LATENT,  # handle of (b, S, H, 512), global
    LSE_OLD,  # handle of (b, H, S) float32, global
    O_HEADS,  # handle of (b, S, H, 128), global; same dtype; anything when HAS_NEW is false
    LSE_NEW,  # handle of (b, H, S) float32, global; likewise
    W_UV,  # handle of (H, 128, 512), global; same dtype
    OUT,  # handle of (b, S, H, 128), global; same dtype
    LSE,  # handle of (b, H, S) float32, global
    b: int,
    S: ConstInt,
    H: ConstInt,
    HAS_NEW: ConstBool,
    TM: ConstInt,
    TK: ConstInt,
):
    """Grid (tiles of b · S query rows, H): out = W_UV · o_latent of one head, merged with o_heads."""
    tile = ct.bid(0)
    head = ct.bid(1)
    rows = b * S
    zero = ct.PaddingMode.ZERO
    latent = ct.Array.from_foreign(O_LATENT.foreign_pointer, (rows, H, 512), (H * 512, 512, 1))
    weight = ct.Array.from_foreign(W_UV.foreign_pointer, (H, 128, 512), (128 * 512, 512, 1))
    out = ct.Array.from_foreign(OUT.foreign_pointer, (rows, H, 128), (H * 128, 128, 1))

    # ------------------------------------------------ load and project: O = O_latent · W_UVᵀ, TK latent columns a time
    o = ct.zeros((TM, 128), dtype=ct.float32)
    for c in range(512 // TK):
        x = ct.reshape(ct.load(latent, (tile, head, c), (TM, 1, TK), padding_mode=zero), (TM, TK))
        w = ct.reshape(ct.load(weight, (head, 0, c), (1, 128, TK)), (128, TK))
        o = ct.mma(x, ct.transpose(w), o)

    # ------------------------------------------------ merge by LSE, and store
    row = tile * TM + ct.arange(TM, dtype=ct.int32)
    inside = row < rows
    at = (row // S * H + head) * S + row % S
    lse = seen(LSE_OLD, at, inside)
    if HAS_NEW:
        new = seen(LSE_NEW, at, inside)
        # A floor under the maximum: for a row that sees no key on either path it would be -inf.
        top = ct.maximum(ct.maximum(lse, new), -1.0e30)
        w_old = ct.exp2(lse - top)
        w_new = ct.exp2(new - top)
        total = w_old + w_new
        safe = ct.where(total == 0.0, 1.0, total)
        heads = ct.Array.from_foreign(O_HEADS.foreign_pointer, (rows, H, 128), (H * 128, 128, 1))
        y = ct.reshape(ct.load(heads, (tile, head, 0), (TM, 1, 128), padding_mode=zero), (TM, 128))
        o = o * (w_old / safe)[:, None] + ct.astype(y, ct.float32) * (w_new / safe)[:, None]
        lse = ct.where(total == 0.0, float("-inf"), top + ct.log2(safe))
    ct.store(out, (tile, head, 0), ct.reshape(ct.astype(o, OUT.dtype), (TM, 1, 128)))
    natural = ct.where(lse == float("-inf"), float("inf"), lse * LN2)
    LSE.get_raw_memory().store_offset(at, natural, mask=inside)


# ------------------------------------------------------------------------------------------------ host
def choose_splits(blocks: int, tiles: int, sms: int) -> int:
    """The number of splits of each request's latents.

    blocks: CTAs of the unsplit grid. tiles: KV tiles of the longest request. Minimises the time of a simple model, in
    units of one KV tile (2.4 us): the SMs work in waves; a CTA costs its tiles and 3 more for its start and end; the
    combine costs 2 and another one for every 32 splits. That the other path runs too is left out.
    """

    def cost(splits: int) -> float:
        waves = -(-blocks * splits // sms)
        return waves * (-(-tiles // splits) + 3) + (2 + splits / 32 if splits > 1 else 0)

    return min(range(1, max(1, min(tiles, MAX_SPLITS)) + 1), key=cost)


def takes(pd: MixedProblem) -> Verdict:
    """Whether the version can be planned for a problem, n = 0 among them."""
    if (pd.k, pd.p, pd.d) != (LATENT, ROPE, HEAD):
        return Verdict.no(
            f"written for latent 512, rope 64 and heads of 128; the problem has k = {pd.k}, p = {pd.p}, d = {pd.d}."
        )
    if not (verdict := takes_pages_of_16(pd)):
        return verdict
    return limits.all_of(
        sizes(pd),
        limits.grid(pd.h, "heads of q"),
        limits.offsets(pd.n * pd.h * KEY, f"{pd.n:,} decompressed tokens of {pd.h:,} heads"),
    )


def offered(pd: MixedProblem) -> Verdict:
    """Whether the version is among those to choose from for a problem."""
    if not pd.n:
        return Verdict.no("n = 0 keeps no token decompressed, which is flash_mla: use one of its versions.")
    return takes(pd)


# ------------------------------------------------------------------------------------------------ plan
class MlaVar6PlusPlan(KernelPlan):
    """Decoding over a mixed cache in cuTile, base version."""

    workload = mixed.WORKLOAD
    cos_slack = decode.ROUNDED_ONCE_MORE  # the latent output, before it meets W_UV
    tiling_type = MlaVar6PlusTiling
    requires = Requirement(archs=("sm_90a",), dtypes=("bf16", "fp16"), features=("wgmma", "tma"), problem=offered)
    deterministic = True

    def require(self) -> None:
        """As in the base, but n = 0 may be planned: flash_mla and its projection, with the inputs of this design."""
        wide = replace(self.requires, problem=takes)
        verdict = wide.accepts(self.problem)
        if verdict and self.device is not None:
            verdict = self.device.can_run(wide)
        verdict.require(Unsupported)
        self.feasible().require(Infeasible)

    def default_tiling(self) -> MlaVar6PlusTiling:
        return MlaVar6PlusTiling(new_tile_m=64 if self.problem.s <= 64 else 128)

    def autotune_configs(self) -> list[Tiling]:
        base = self.default_tiling()
        others = [replace(base, new_tile_n=128), replace(base, tile_k=64), replace(base, tile_k=256)]
        return [x for x in (base, *others) if x.validate(self.problem, self.device)]

    # ------------------------------------------------------------ latent path
    def query_tile(self) -> tuple[int, int]:
        """(query tokens, heads) of a query tile of the latent path."""
        rows = LatentTile.of(self.problem).tile_m
        heads = min(rows, ceil_pow2(self.problem.h))
        return rows // heads, heads

    def query_tiles(self) -> int:
        """Query tiles of one request in the latent path."""
        tokens, heads = self.query_tile()
        return -(-self.problem.s // tokens) * -(-self.problem.h // heads)

    def num_splits(self, b: int, max_pages: int) -> int:
        """Splits of the latent path: the tiling's, or the model's for these sizes; lengths are not looked at."""
        tiles = max_pages * self.problem.page_size // LatentTile.of(self.problem).tile_n
        if self.tiling.old_splits:
            return min(self.tiling.old_splits, max(tiles, 1))
        device = self.device or Device.detect()
        return choose_splits(b * self.query_tiles(), tiles, (device or Device.assumed()).num_sms)

    def _flash_mla(
        self, inputs: tuple[Any, ...], outputs: tuple[Any, ...], partials: tuple[Any, ...], splits: int
    ) -> CtKernel:
        """On (q_latent, kv_cache, page_table, old_lens): writes `outputs` (o_latent, lse_old) when splits is 1, else
        `partials` (o_partial, lse_partial)."""
        pd, tile = self.problem, LatentTile.of(self.problem)
        causal = pd.old().causal
        constants = [
            pd.s, 1, pd.h, pd.page_size, causal, *self.query_tile(), tile.tile_n, tile.tile_k, tile.swapped
        ]  # fmt: skip

        def grid(_: Any) -> tuple[int, ...]:
            return (self.query_tiles(), splits, inputs[0].shape[0] if inputs else pd.b)

        def args(_: Any) -> tuple[Any, ...]:
            names = ("q_latent", "kv_cache", "page_table", "old_lens", "out", "lse", "o_partial", "lse_partial")
            handles = [handle(x, name) for x, name in zip((*inputs, *outputs, *partials), names, strict=True)]
            b, max_pages, num_pages = inputs[0].shape[0], inputs[2].shape[1], inputs[1].shape[0]
            return (*handles, pd.scale * LOG2E, b, max_pages, num_pages, splits, *constants)

        def describe(_: Any) -> Any:
            io = ct_dtype(pd.dtype)
            handles = [io, io, ct.int32, ct.int32, io, ct.float32, ct.float32, ct.float32]
            return signature(handles, [ct.float32, *[ct.int32] * 4], constants)

        return CtKernel(
            flash_mla,
            grid,
            args,
            inputs,
            outputs if splits == 1 else partials,
            self.tiling,
            signature_fn=describe,
            name="flash_mla",
            plan=self,
        )

    def _combine(self, partials: Any, outputs: Any) -> CtKernel:
        pd = self.problem
        return combine_kernel(
            partials, outputs, s=pd.s, h=pd.h, width=LATENT, dtype=pd.dtype, tiling=self.tiling, plan=self
        )

    def _latents(self, inputs: tuple[Any, ...]) -> CtKernel | KernelPipeline:
        """The latent path on (q_latent, kv_cache, page_table, old_lens): outputs (o_latent (b, s, h, 512), lse_old (b,
        h, s)). Without inputs it compiles only."""
        pd = self.problem
        if not inputs:
            splits = self.num_splits(pd.b, pd.old().max_pages)
            attention, outputs, partials = self._flash_mla((), (), (), splits), None, None
            if splits == 1:
                return attention
        else:
            import torch

            q, _, page_table, old_lens = inputs
            require_int32(page_table=page_table, old_lens=old_lens)
            b = q.shape[0]
            splits = self.num_splits(b, page_table.shape[1])
            o_latent = torch.empty((b, pd.s, pd.h, LATENT), dtype=q.dtype, device=q.device)
            outputs = (o_latent, torch.empty((b, pd.h, pd.s), dtype=torch.float32, device=q.device))
            if splits == 1:
                self._warm_combine(q)
                unused = torch.empty((2, 4), dtype=torch.float32, device=q.device)
                return self._flash_mla(inputs, outputs, tuple(unused), 1)
            partials = new_partials(b, splits, pd.s, pd.h, LATENT, q.device)
            attention = self._flash_mla(inputs, outputs, partials, splits)
        return KernelPipeline(
            [attention, self._combine(partials, outputs)],
            name="flash_mla",
            tiling=self.tiling,
            workspace_tensors=partials or (),
            plan=self,
        )

    def _warm_combine(self, q: Any) -> None:
        """Compiles the combine for a later bind that splits; the attention kernel is the same for both."""
        pd = self.problem
        key = ("combine", pd.s, pd.h, pd.dtype, q.device)
        if self.tiling.old_splits != 1 and q.is_cuda and key not in self.compiled:
            warm_up(q, s=pd.s, h=pd.h, width=LATENT, dtype=pd.dtype)
            self.compiled[key] = True

    # ------------------------------------------------------------ decompressed path
    def _heads(self, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> CtKernel:
        """flash_attention on (q_heads, k_new, v_new) and (o_heads, lse_new); without tensors it compiles only."""
        pd, tile = self.problem, self.tiling.heads_tile()
        constants = [pd.h, pd.causal, tile.tile_m, tile.tile_n, tile.k_columns]

        def grid(_: Any) -> tuple[int, ...]:
            b, s, h = inputs[0].shape[:3] if inputs else (pd.b, pd.s, pd.h)
            return (-(-s // tile.tile_m), h, b)

        def args(_: Any) -> tuple[Any, ...]:
            names = ("q_heads", "k_new", "v_new", "o_heads", "lse_new")
            handles = [handle(x, name) for x, name in zip((*inputs, *outputs), names, strict=True)]
            q, k, _v = inputs
            return (*handles, pd.scale * LOG2E, q.shape[0], q.shape[1], k.shape[1], *constants)

        def describe(_: Any) -> Any:
            io = ct_dtype(pd.dtype)
            return signature([io, io, io, io, ct.float32], [ct.float32, *[ct.int32] * 3], constants)

        return CtKernel(
            flash_attention,
            grid,
            args,
            inputs,
            outputs,
            self.tiling,
            hints_fn=lambda _: {"num_worker_warps": 4 * tile.num_warpgroups, "occupancy": tile.occupancy},
            signature_fn=describe,
            name="flash_attention",
            plan=self,
        )

    # ------------------------------------------------------------ both
    def _merge(self, tensors: tuple[Any, ...], outputs: tuple[Any, ...]) -> CtKernel:
        """tensors: o_latent, lse_old, o_heads, lse_new, w_uv; outputs: out, lse. Without any it compiles only."""
        pd, ti = self.problem, self.tiling
        constants = [pd.s, pd.h, pd.n > 0, ti.tile_m, ti.tile_k]

        def grid(_: Any) -> tuple[int, ...]:
            return (-(-(outputs[0].shape[0] if outputs else pd.b) * pd.s // ti.tile_m), pd.h, 1)

        def args(_: Any) -> tuple[Any, ...]:
            return (*(handle(x) for x in (*tensors, *outputs)), outputs[0].shape[0], *constants)

        def describe(_: Any) -> Any:
            io = ct_dtype(pd.dtype)
            return signature([io, ct.float32, io, ct.float32, io, io, ct.float32], [ct.int32], constants)

        return CtKernel(
            mla_var6_plus,
            grid,
            args,
            tensors,
            outputs,
            ti,
            signature_fn=describe,
            name="mla_var6_plus",
            plan=self,
        )

    @any_scale(0, 1)
    def plan(self, *inputs: Any) -> BaseKernel:
        import torch

        self.require()
        q_latent, q_heads, kv_cache, page_table, old_lens, k_new, v_new, w_uv = inputs
        pd, b = self.problem, q_heads.shape[0]
        out = q_heads.new_empty((b, pd.s, pd.h, HEAD))
        lse = torch.empty((b, pd.h, pd.s), dtype=torch.float32, device=q_heads.device)
        if not pd.old().t:
            return self._pipeline([self._heads((q_heads, k_new, v_new), (out, lse))], inputs, [])
        old = self._latents((q_latent, kv_cache, page_table, old_lens))
        o_latent, lse_old = old.output_tensors
        if not pd.n:
            merge = self._merge((o_latent, lse_old, o_latent, lse_old, w_uv), (out, lse))
            return self._pipeline([old, merge], inputs, [o_latent, lse_old, *old.workspace_tensors])
        o_heads, lse_new = torch.empty_like(out), torch.empty_like(lse)
        new = self._heads((q_heads, k_new, v_new), (o_heads, lse_new))
        merge = self._merge((o_latent, lse_old, o_heads, lse_new, w_uv), (out, lse))
        workspaces = [o_latent, lse_old, o_heads, lse_new, *old.workspace_tensors]
        return self._pipeline([ConcurrentKernels([old, new], name="paths"), merge], inputs, workspaces)

    def plan_empty(self) -> BaseKernel:
        self.require()
        pd = self.problem
        if not pd.old().t:
            return self._pipeline([self._heads((), ())], (), [])
        old, merge = self._latents(()), self._merge((), ())
        if not pd.n:
            return self._pipeline([old, merge], (), [])
        paths = ConcurrentKernels([old, self._heads((), ())], name="paths")
        return self._pipeline([paths, merge], (), [])

    def _pipeline(self, stages: list[BaseKernel], inputs: tuple[Any, ...], workspaces: list[Any]) -> KernelPipeline:
        return KernelPipeline(
            stages,
            name="mla_var6_plus",
            input_tensors=inputs,
            workspace_tensors=workspaces,
            tiling=self.tiling,
            plan=self,
        )
