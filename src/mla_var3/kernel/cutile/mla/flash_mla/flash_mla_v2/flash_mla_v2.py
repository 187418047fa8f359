"""Absorbed MLA decode in cuTile for Hopper (sm_90a) with up to 16 query rows: three stages, filled by TMA.

    Sᵀ (64 tokens x 16) = K · Qᵀ     softmax down the columns     Oᵀ (512 x 16) += Vᵀ · P       one KV tile as K and V

KV tiles of 64 tokens are on the M side of the MMA and query rows on the N side (swap AB). One CTA (cuTile: block) takes
the rows of one request and one latent cache and one split of its tokens:

    load      page id ─► TMA: 64 x 512 latent, 64 x 64 rope    cuTile makes a ring of three stages of it
    scores    Sᵀ = K·Qᵀ + bias, 0 or -inf
    softmax   running maximum; denominators stay spread over the 64 tokens of a tile
    rescale   Oᵀ = Oᵀ · exp2(old max - max) + Kᵀ·P

    stages    │ tile t: softmax, V product │ tile t+1: K product │ tile t+2: in flight │

What decides the speed is how many bytes are in flight and that nothing else waits for them. What changed against
versions 0 and 1 (version 1 is retired; its devlog has what it was), each for something seen in the code cuTile made:

- No atomic. Version 1's last CTA of a query tile, found by an atomic, did the combine; an atomic orders all loads
  before it, and cuTile then waits for each TMA load right after issuing it: one load in flight. Here the combine is a
  second kernel.
- No shared memory for the epilogue. A run-time branch between the output and a partial keeps buffers for both, and
  transposing float32 partials needs more; each cost a stage. Here they are two compilations (`UNSPLIT`), and partials
  are stored as they lie, (512, rows), for the combine to transpose. The two want loads of different width: with 64
  columns a load the first product starts when 8 KB are there, which makes the unsplit compilation faster, but float32
  partials behind such a loop cost it a stage and make every product wait for itself. They get one load of 512 columns.
- No second loop for the last, partly filled tile, whose buffers are a third of the ring. The last tile is a box that
  *ends* at the last valid token, so its first row may lie before the page's first: TMA fills the rows of negative index
  with zeros, and rows past the end, which may hold NaN, are not read (version 1's, as are the spread denominators,
  which NVIDIA's decode kernel in TileGym has too).

      page   │ t0 t1 t2 … tv │ garbage │        full tile: rows 0 .. 63
             box ┌───────────┐                  last tile: rows v-63 .. v; the negative ones are zero, and masked

- No masking by selection, which makes the compiler copy accumulators between the products in flight ("insufficient
  register resources", every product then waits for itself). A bias is added: the box holds finite values only.

Split-KV: grid (query tiles, splits, b); the host chooses the number of splits by the page table's width. Layout of the
partials, both float32:

    o_partial  (b, splits, query tiles, 512, rows)   sums of weighted values, not divided
    stats      (b, splits, query tiles, 2, rows)     maxima (base 2, scaled) and denominators relative to them

Dividing by the denominators would make the attention kernel's stores wait for a reduction over its warps, for nothing:
the combine, out = Σ wᵢ Oᵢ / Σ wᵢ lᵢ, divides once. What takes time in so small a kernel are trips to memory and
barriers, not bytes. So wᵢ = 2^(mᵢ - m₀), relative to the *first* split's maximum, which needs no reduction. Where
another split's is so much larger that float32 overflows, the result is not finite; the CTA sees it and adds up again,
split by split, relative to the running maximum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import cuda.tile as ct

from mla_var3.device import Device, Requirement
from mla_var3.kernel.cutile.prims.handles import ct_dtype, handle, signature
from mla_var3.kernel.cutile.prims.latent import FLOOR, LATENT, LN2, LOG2E, WIDTH, ceil_pow2, takes_latents
from mla_var3.runtime import CtKernel, KernelPipeline, KernelPlan, Tiling, Verdict
from mla_var3.runtime.plan import require_int32
from mla_var3.runtime.scaling import any_scale
from mla_var3.workload import decode

if TYPE_CHECKING:
    import torch

    from mla_var3.workload.decode import MlaProblem

ConstInt = ct.Constant[int]
ConstBool = ct.Constant[bool]

TOKENS = 64  # of a KV tile: the M side of a warpgroup's MMA
ROWS = 16  # of a query tile; with 8, products wait for themselves

#: (splits that a CTA of the combine takes at once, its columns): the first that holds all splits is used. Each is a
#: compilation of its own: one kernel for all of them has more code than an SM keeps beside the attention kernel's.
COMBINE_TILES = ((4, 32), (8, 32), (32, 16), (128, 4), (256, 2))
MAX_SPLITS = COMBINE_TILES[-1][0]

#: Sums below it have not overflowed on the way.
LARGE = 1.0e38


# ------------------------------------------------------------------------------------------------ tiling
@dataclass(frozen=True)
class FlashMlaV2Tiling(Tiling):
    """Knobs of the kernel.

    tile_k: latent columns of a load: 64, 128, 256 or 512; 0 takes 64 where a request is not split and 512 where it is.
    pages: KV tiles that share a softmax, 1 or 2. num_warpgroups: consumers. occupancy: CTAs that an SM should hold;
    with 2 each has one stage. num_ctas: of a cluster, over which cuTile spreads a tile. num_splits: of each request; 0
    chooses by the sizes when the kernel is bound.
    """

    tile_k: int = 0
    pages: int = 1
    num_warpgroups: int = 1
    occupancy: int = 1
    num_splits: int = 0
    num_ctas: int = 1

    def validate(self, pd: MlaProblem, device: Device | None = None) -> Verdict:
        if self.tile_k not in (0, 64, 128, 256, 512):
            return Verdict.no(f"tile_k = {self.tile_k} is not one of 64, 128, 256, 512, or 0 for a choice.")
        if self.pages not in (1, 2):
            return Verdict.no(f"pages = {self.pages} is neither 1 nor 2.")
        if not {self.num_warpgroups, self.occupancy, self.num_ctas} <= {1, 2}:
            given = f"{self.num_warpgroups} warpgroups, {self.occupancy} CTAs an SM and clusters of {self.num_ctas}"
            return Verdict.no(f"{given}: each is 1 or 2.")
        if not 0 <= self.num_splits <= MAX_SPLITS:
            return Verdict.no(f"num_splits = {self.num_splits} is outside 0..{MAX_SPLITS}.")
        smem = 2 * WIDTH * (ROWS + TOKENS * self.pages) + 8192
        if device is not None and self.occupancy * smem > device.smem_per_block:
            return Verdict.no(
                f"{self.occupancy} CTAs with Q and {self.pages} KV tiles take {self.occupancy * smem} bytes; "
                f"a CTA has {device.smem_per_block}."
            )
        return Verdict.yes()


# ------------------------------------------------------------------------------------------------ device: attention
def load(latents, ropes, page, row, head_kv, TK):
    """A box of 64 tokens of a page from `row` on, which may be negative, by TMA: (latent chunks (64, TK), rope)."""
    ks = tuple(ct.reshape(latents.load((page, row, head_kv, c)), (64, TK)) for c in ct.static_iter(range(512 // TK)))
    return ks, ct.reshape(ropes.load((page, row, head_kv, 8)), (64, 64))


def scores(qs, q_rope, ks, k_rope, bias, CHUNKS):
    """Sᵀ = K·Qᵀ + bias, (64, rows). Waits for the loads of this box: with narrow chunks for one at a time."""
    s = ct.mma(k_rope, ct.transpose(q_rope), ct.zeros((k_rope.shape[0], q_rope.shape[0]), dtype=ct.float32))
    for c in ct.static_iter(range(CHUNKS)):
        s = ct.mma(ks[c], ct.transpose(qs[c]), s)
    return s + bias


@ct.kernel
def flash_mla_v2(
    Q,  # handle of (b, S, HKV · G, 576), global
    KV,  # handle of (num_pages, PAGE, HKV, 576), global; same dtype
    PAGE_TABLE,  # handle of (b, max_pages) int32, global
    SEQ_LENS,  # handle of (b,) int32, global
    OUT,  # UNSPLIT: handle of (b, S, HKV · G, 512), global; else o_partial
    LSE,  # UNSPLIT: handle of (b, HKV · G, S) float32, global; else stats
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
    TK: ConstInt,
    PAIR: ConstBool,
    UNSPLIT: ConstBool,
):
    """Grid (query tiles · HKV, splits, b)."""
    TN = 64
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

    zero = ct.PaddingMode.ZERO
    q = ct.Array.from_foreign(Q.foreign_pointer, (b, S, HKV, G, 576), (S * H * 576, H * 576, G * 576, 576, 1))
    kv = ct.Array.from_foreign(KV.foreign_pointer, (num_pages, PAGE, HKV, 576), (PAGE * HKV * 576, HKV * 576, 576, 1))
    # Boxes that start at any row of a page, also at a negative one.
    latents = kv.tiled_view((1, TN, 1, TK), padding_mode=zero, traversal_steps=(1, 1, 1, TK))
    ropes = kv.tiled_view((1, TN, 1, 64), padding_mode=zero, traversal_steps=(1, 1, 1, 64))
    pages = PAGE_TABLE.get_raw_memory()
    length = SEQ_LENS.get_raw_memory().load_offset(req)

    # ------------------------------------------------ load Q, which stays in shared memory
    qs = tuple(
        ct.reshape(ct.load(q, (req, s_tile, head_kv, g_tile, c), (1, TS, 1, TG, TK), padding_mode=zero), (TM, TK))
        for c in ct.static_iter(range(CHUNKS))
    )
    q_rope = ct.reshape(ct.load(q, (req, s_tile, head_kv, g_tile, 8), (1, TS, 1, TG, 64), padding_mode=zero), (TM, 64))

    # ------------------------------------------------ this split's KV tiles: first .. last - 1
    tiles = (length + TN - 1) // TN
    per_split = (tiles + splits - 1) // splits
    first = split * per_split
    last = min(first + per_split, tiles)
    limit = length - (S - 1) + s_tile * TS + ct.arange(TM, dtype=ct.int32) // TG

    m = ct.full((1, TM), FLOOR, dtype=ct.float32)
    # A row's denominator stays spread over the tokens of a tile: one reduction over warps less for every tile.
    l = ct.zeros((TN, TM), dtype=ct.float32)
    accs = tuple(ct.zeros((TK, TM), dtype=ct.float32) for c in ct.static_iter(range(CHUNKS)))

    PER_PAGE = PAGE // TN
    table = req * max_pages
    i = ct.arange(TN, dtype=ct.int32)
    for t in range(first, last, 2 if PAIR else 1):
        page = pages.load_offset(table + t // PER_PAGE)
        over = max((t + 1) * TN - length, 0)  # rows of the box before the tile's first token
        ks, k_rope = load(latents, ropes, page, t % PER_PAGE * TN - over, head_kv, TK)
        if CAUSAL:
            seen = (i >= over)[:, None] & ((t * TN - over + i)[:, None] < limit[None, :])
        else:
            seen = (i >= over)[:, None]
        s = scores(qs, q_rope, ks, k_rope, ct.where(seen, 0.0, float("-inf")), CHUNKS)
        if PAIR:
            u = min(t + 1, last - 1)
            page = pages.load_offset(table + u // PER_PAGE)
            over = max((u + 1) * TN - length, 0)
            ks2, k_rope = load(latents, ropes, page, u % PER_PAGE * TN - over, head_kv, TK)
            if CAUSAL:
                seen = (i >= over)[:, None] & ((u * TN - over + i)[:, None] < limit[None, :]) & (t < u)
            else:
                seen = (i >= over)[:, None] & (t < u)
            s2 = scores(qs, q_rope, ks2, k_rope, ct.where(seen, 0.0, float("-inf")), CHUNKS)
            m_new = ct.maximum(m, ct.max(ct.maximum(s, s2), 0, keepdims=True) * scale)
            p2 = ct.exp2(s2 * scale - m_new, flush_to_zero=True)
        else:
            m_new = ct.maximum(m, ct.max(s, 0, keepdims=True) * scale)
        # Softmax: P = exp2(scale · S - m'), l = l · exp2(m - m') + P.
        p = ct.exp2(s * scale - m_new, flush_to_zero=True)
        keep = ct.exp2(m - m_new, flush_to_zero=True)
        m = m_new
        p16 = ct.astype(p, KV.dtype)
        l = l * keep + p
        # Rescale and Oᵀ += Vᵀ·P, with V the latent chunks of K; a stage is free after the product with its last chunk.
        accs = tuple(ct.mma(ct.transpose(ks[c]), p16, accs[c] * keep) for c in ct.static_iter(range(CHUNKS)))
        if PAIR:
            p16 = ct.astype(p2, KV.dtype)
            l = l + p2
            accs = tuple(ct.mma(ct.transpose(ks2[c]), p16, accs[c]) for c in ct.static_iter(range(CHUNKS)))

    # ------------------------------------------------ epilogue: O / l and the LSE, or the partial as it lies
    total = ct.sum(l, 0, keepdims=True)
    if UNSPLIT:
        empty = total == 0.0
        safe = ct.where(empty, 1.0, total)
        factor = 1.0 / safe
        lse = (m + ct.log2(safe)) * LN2
        o_strides = (S * H * 512, H * 512, G * 512, 512, 1)
        out = ct.Array.from_foreign(OUT.foreign_pointer, (b, S, HKV, G, 512), o_strides)
        lses = ct.Array.from_foreign(LSE.foreign_pointer, (b, S, HKV, G), (S * H, 1, G * S, S))
        for c in ct.static_iter(range(CHUNKS)):
            o = ct.transpose(ct.astype(accs[c] * factor, OUT.dtype))
            ct.store(out, (req, s_tile, head_kv, g_tile, c), ct.reshape(o, (1, TS, 1, TG, TK)))
        lse = ct.reshape(ct.where(empty, float("inf"), lse), (1, TS, 1, TG))
        ct.store(lses, (req, s_tile, head_kv, g_tile), lse, allow_tma=False)
    else:
        X = ct.num_blocks(0)
        slot = req * splits + split
        partials = ct.Array.from_foreign(OUT.foreign_pointer, (b * splits, X, 512, TM), (X * TM * 512, TM * 512, TM, 1))
        stats = ct.Array.from_foreign(LSE.foreign_pointer, (b * splits, X, 2, TM), (X * 2 * TM, 2 * TM, TM, 1))
        for c in ct.static_iter(range(CHUNKS)):
            # A TMA store would need a buffer in shared memory.
            ct.store(partials, (slot, x, c, 0), ct.reshape(accs[c], (1, 1, TK, TM)), allow_tma=False)
        ct.store(stats, (slot, x, 0, 0), ct.reshape(m, (1, 1, 1, TM)), allow_tma=False)
        ct.store(stats, (slot, x, 1, 0), ct.reshape(total, (1, 1, 1, TM)), allow_tma=False)


# ------------------------------------------------------------------------------------------------ device: combine
def one_by_one(partials, stats, first, tiles, splits, inner, row, COLUMNS, TM):
    """Adds up the splits from slot `first` on in their order, relative to the running maximum: weighted sums (COLUMNS,
    TM), denominators and maxima (1, TM)."""
    top = ct.full((1, TM), FLOOR, dtype=ct.float32)
    total = ct.zeros((1, TM), dtype=ct.float32)
    acc = ct.zeros((COLUMNS, TM), dtype=ct.float32)
    for i in range(splits):
        slot = first + i * tiles
        m = ct.reshape(stats.load_offset(slot * (2 * TM) + row), (1, TM))
        l = ct.reshape(stats.load_offset(slot * (2 * TM) + TM + row), (1, TM))
        higher = ct.maximum(top, m)
        keep = ct.exp2(top - higher)
        weight = ct.exp2(m - higher)
        total = total * keep + l * weight
        acc = acc * keep + partials.load_offset(slot * (512 * TM) + inner) * weight
        top = higher
    return acc, total, top


@ct.kernel
def join_sums(
    O_PARTIAL,  # handle of (b, splits, query tiles, 512, TS · TG) float32, global
    STATS,  # handle of (b, splits, query tiles, 2, TS · TG) float32, global
    OUT,  # handle of (b, S, HKV · G, 512), global
    LSE,  # handle of (b, HKV · G, S) float32, global
    splits: int,
    S: ConstInt,
    HKV: ConstInt,
    G: ConstInt,
    TS: ConstInt,
    TG: ConstInt,
    SPLITS: ConstInt,
    COLUMNS: ConstInt,
):
    """One CTA some columns of all rows of a query tile, all splits at once; grid (512 / COLUMNS, query tiles, b)."""
    TM = TS * TG
    H = HKV * G
    tiles = ct.num_blocks(1)
    block = ct.bid(0)
    x = ct.bid(1)
    req = ct.bid(2)
    partials = O_PARTIAL.get_raw_memory()
    stats = STATS.get_raw_memory()
    row = ct.arange(TM, dtype=ct.int32)
    column = ct.arange(COLUMNS, dtype=ct.int32)
    lane = ct.arange(SPLITS, dtype=ct.int32)
    inside = (lane < splits)[:, None, None]
    # Offsets are 32 bits: the plan sees to it that they suffice.
    first = req * splits * tiles + x
    slot = first + lane * tiles
    inner = (block * COLUMNS + column)[:, None] * TM + row[None, :]
    o = partials.load_offset(
        slot[:, None, None] * (512 * TM) + inner[None, :, :],
        mask=ct.broadcast_to(inside, (SPLITS, COLUMNS, TM)),
        padding_value=0.0,
    )
    at = slot[:, None, None] * (2 * TM) + row[None, None, :]
    inside = ct.broadcast_to(inside, (SPLITS, 1, TM))
    m = stats.load_offset(at, mask=inside, padding_value=FLOOR)
    l = stats.load_offset(at + TM, mask=inside, padding_value=0.0)
    top = ct.reshape(stats.load_offset(first * (2 * TM) + row), (1, TM))
    weight = ct.exp2(m - top[None, :, :])
    acc = ct.sum(o * weight, 0)
    total = ct.sum(l * weight, 0)

    g_tiles = (G + TG - 1) // TG
    i_s = x // g_tiles // HKV * TS + row // TG
    head = x % g_tiles * TG + row % TG
    valid = (i_s < S) & (head < G)
    head = x // g_tiles % HKV * G + head
    to_out = ((req * S + i_s) * H + head)[None, :] * 512 + (block * COLUMNS + column)[:, None]
    to_lse = (req * H + head) * S + i_s
    in_out = ct.broadcast_to(valid[None, :], (COLUMNS, TM))
    none = total == 0.0
    safe = ct.where(none, 1.0, total)
    OUT.get_raw_memory().store_offset(to_out, ct.astype(acc * (1.0 / safe), OUT.dtype), mask=in_out)
    if block == 0:
        lse = ct.where(none, float("inf"), (top + ct.log2(safe)) * LN2)
        LSE.get_raw_memory().store_offset(to_lse, ct.reshape(lse, (TM,)), mask=valid)

    # Not finite: a later split's maximum is far above the first one's.
    finite = (ct.abs(acc) < LARGE) & (total < LARGE)
    if ct.max(ct.where(finite, 0, 1)) > 0:
        acc, total, top = one_by_one(partials, stats, first, tiles, splits, inner, row, COLUMNS, TM)
        none = total == 0.0
        safe = ct.where(none, 1.0, total)
        OUT.get_raw_memory().store_offset(to_out, ct.astype(acc / safe, OUT.dtype), mask=in_out)
        if block == 0:
            lse = ct.where(none, float("inf"), (top + ct.log2(safe)) * LN2)
            LSE.get_raw_memory().store_offset(to_lse, ct.reshape(lse, (TM,)), mask=valid)


# ------------------------------------------------------------------------------------------------ host
def combine_tile(splits: int) -> tuple[int, int]:
    """The first of `COMBINE_TILES` that holds all splits."""
    return next(tile for tile in COMBINE_TILES if splits <= tile[0])


def combine_kernel(
    partials: tuple[torch.Tensor, torch.Tensor] | None,
    outputs: tuple[torch.Tensor, torch.Tensor] | None,
    *,
    s: int,
    h_kv: int,
    group: int,
    tile_shape: tuple[int, int],
    splits: int,
    dtype: str,
    tiling: Any = None,
    plan: Any = None,
) -> CtKernel:
    """A kernel that combines partials (o_partial, stats) into outputs, (b, s, h_kv · group, 512) and (b, h_kv · group,
    s). With None it compiles only.

    tile_shape: query tokens and heads of a query tile, both powers of two.
    """
    lanes, columns = combine_tile(splits)
    constants = [s, h_kv, group, *tile_shape, lanes, columns]

    def grid(_: Any) -> tuple[int, ...]:
        # Sizes that only tensors have are 0 where there are none.
        tiles, b = (partials[0].shape[2], outputs[0].shape[0]) if partials and outputs else (0, 0)
        return (LATENT // columns, tiles, b)

    def args(_: Any) -> tuple[Any, ...]:
        assert partials is not None and outputs is not None
        return (*(handle(x) for x in (*partials, *outputs)), splits, *constants)

    def describe(_: Any) -> Any:
        return signature([ct.float32, ct.float32, ct_dtype(dtype), ct.float32], [ct.int32], constants)

    return CtKernel(
        join_sums,
        grid,
        args,
        partials or (),
        outputs or (),
        tiling,
        signature_fn=describe,
        name="join_sums",
        plan=plan,
    )


def choose_splits(blocks: int, tiles: int, sms: int, occupancy: int) -> int:
    """The number of splits of each request.

    blocks: CTAs of the unsplit grid. tiles: KV tiles of the longest request. Minimises the time of a simple model in
    microseconds: CTAs run in waves, a tile takes 2.1 for each of the CTAs that share an SM (its share of the memory), a
    wave 4 for its start and end, the combine 4 and 1 for every 60 splits.
    """
    slots = sms * occupancy

    def cost(splits: int) -> float:
        waves = -(-blocks * splits // slots)
        return waves * (-(-tiles // splits) * 2.1 * occupancy + 4) + (4 + splits / 60 if splits > 1 else 0)

    return min(range(1, max(1, min(tiles, MAX_SPLITS)) + 1), key=cost)


def takes(pd: MlaProblem) -> Verdict:
    page = pd.page_size
    if page & (page - 1) or page < TOKENS:
        return Verdict.no(
            f"pages of {page} tokens: a tile is 64 tokens of one page, use pages of 64, 128, … or cutile-dsl/flash_mla."
        )
    rows = ceil_pow2(pd.s) * ceil_pow2(pd.group)
    if rows > ROWS:
        return Verdict.no(
            f"for {ROWS} query rows of a latent cache at most; the problem has {rows}: use cutile-dsl/flash_mla."
        )
    return takes_latents(pd)


# ------------------------------------------------------------------------------------------------ plan
class FlashMlaV2Plan(KernelPlan):
    """Two compiled attention kernels a problem class, unsplit and split; b, lengths and table width are arguments."""

    workload = decode.WORKLOAD
    tiling_type = FlashMlaV2Tiling
    requires = Requirement(archs=("sm_90a",), dtypes=("bf16", "fp16"), features=("wgmma", "tma"), problem=takes)
    deterministic = True

    def default_tiling(self) -> FlashMlaV2Tiling:
        # Three stages and a causal mask together make every product wait for itself; one stage does not.
        return FlashMlaV2Tiling(tile_k=512, occupancy=2) if self.masked() else FlashMlaV2Tiling()

    def masked(self) -> bool:
        """Whether query rows see different tokens."""
        return self.problem.causal and self.problem.s > 1

    def autotune_configs(self) -> list[Tiling]:
        base = self.default_tiling()
        others: list[FlashMlaV2Tiling] = [replace(base, tile_k=256)]
        if not self.masked():
            # In clusters the hint of two CTAs an SM changes nothing, or the products leave the tensor cores as well.
            shapes = [x for x in product((1, 2), (1, 2), (1, 2), (1, 2)) if x[:2] != (2, 2)]
            others = [
                replace(base, tile_k=k, pages=pages, num_warpgroups=groups, occupancy=blocks, num_ctas=ctas)
                for ctas, blocks, pages, groups in shapes
                for k in (512, 256, 128, 64)
            ]
        chosen = self.with_tiling(base).num_splits(self.problem.b, self.problem.max_pages)
        splits = [replace(base, num_splits=n) for n in (1, chosen // 2, chosen * 2) if 1 <= n <= MAX_SPLITS]
        return list(dict.fromkeys(x for x in (base, *splits, *others) if x.validate(self.problem, self.device)))

    # ------------------------------------------------------------ sizes
    def tile_shape(self) -> tuple[int, int]:
        """(query tokens, heads of the group) of a query tile."""
        heads = min(ROWS, ceil_pow2(self.problem.group))
        return ROWS // heads, heads

    def query_tiles(self) -> int:
        """Query tiles of one request, over all latent caches."""
        pd = self.problem
        tokens, heads = self.tile_shape()
        return -(-pd.s // tokens) * -(-pd.group // heads) * pd.h_kv

    def num_splits(self, b: int, max_pages: int) -> int:
        """Splits of the bound kernel: the tiling's, or the model's for these sizes; lengths are not looked at."""
        blocks, tiles = b * self.query_tiles(), max_pages * self.problem.page_size // TOKENS
        if self.tiling.num_splits:
            splits = min(self.tiling.num_splits, tiles)
        else:
            device = self.device or Device.detect()
            sms = (device or Device.assumed()).num_sms
            splits = choose_splits(blocks, tiles, sms, self.tiling.occupancy)
        # Offsets in the partials are 32 bits.
        most = (2**31 - 1) // max(1, blocks * LATENT * ROWS)
        return max(1, min(splits, most))

    # ------------------------------------------------------------ kernels
    def _attention(self, inputs: tuple[Any, ...], results: tuple[Any, ...], splits: int) -> CtKernel:
        """Writes results: with one split (out, lse), else the partials (o_partial, stats)."""
        pd, ti = self.problem, self.tiling
        unsplit = splits == 1
        tile_k = ti.tile_k or (64 if unsplit else 512)
        constants = [
            pd.s, pd.h_kv, pd.group, pd.page_size, self.masked(), *self.tile_shape(), tile_k, ti.pages == 2, unsplit
        ]  # fmt: skip

        def grid(_: Any) -> tuple[int, ...]:
            return (self.query_tiles(), splits, inputs[0].shape[0] if inputs else pd.b)

        def args(_: Any) -> tuple[Any, ...]:
            names = ("q", "kv_cache", "page_table", "seq_lens", "out", "lse")
            handles = [handle(x, name) for x, name in zip((*inputs, *results), names, strict=True)]
            b, max_pages, num_pages = inputs[0].shape[0], inputs[2].shape[1], inputs[1].shape[0]
            return (*handles, pd.scale * LOG2E, b, max_pages, num_pages, splits, *constants)

        def describe(_: Any) -> Any:
            io = ct_dtype(pd.dtype)
            handles = [io, io, ct.int32, ct.int32, io if unsplit else ct.float32, ct.float32]
            return signature(handles, [ct.float32, *[ct.int32] * 4], constants)

        def hints(_: Any) -> dict[str, Any]:
            # Without a hint cuTile plans for one CTA an SM.
            chosen = {"occupancy": ti.occupancy, "num_ctas": ti.num_ctas}
            return {"num_worker_warps": 4 * ti.num_warpgroups} | {name: n for name, n in chosen.items() if n > 1}

        return CtKernel(
            flash_mla_v2,
            grid,
            args,
            inputs,
            results,
            ti,
            hints_fn=hints,
            signature_fn=describe,
            name="flash_mla_v2",
            plan=self,
        )

    def _pipeline(self, inputs: tuple[Any, ...], partials: Any, outputs: Any, splits: int) -> KernelPipeline:
        return KernelPipeline(
            [self._attention(inputs, partials or (), splits), self._combine(partials, outputs, splits)],
            name="flash_mla_v2",
            tiling=self.tiling,
            workspace_tensors=partials or (),
            plan=self,
        )

    def _combine(self, partials: Any, outputs: Any, splits: int) -> CtKernel:
        pd = self.problem
        return combine_kernel(
            partials,
            outputs,
            s=pd.s,
            h_kv=pd.h_kv,
            group=pd.group,
            tile_shape=self.tile_shape(),
            splits=splits,
            dtype=pd.dtype,
            tiling=self.tiling,
            plan=self,
        )

    def _outputs(self, b: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """out (b, s, h, 512) and lse (b, h, s), uninitialised."""
        import torch

        pd = self.problem
        out = torch.empty((b, pd.s, pd.h, LATENT), dtype=like.dtype, device=like.device)
        return out, torch.empty((b, pd.h, pd.s), dtype=torch.float32, device=like.device)

    def _partials(self, b: int, splits: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """o_partial (b, splits, query tiles, 512, rows) and stats (b, splits, query tiles, 2, rows), uninitialised."""
        import torch

        shape = (b, splits, self.query_tiles())
        o_partial = torch.empty((*shape, LATENT, ROWS), dtype=torch.float32, device=like.device)
        return o_partial, torch.empty((*shape, 2, ROWS), dtype=torch.float32, device=like.device)

    @any_scale(0)
    def plan(self, *inputs: Any) -> CtKernel | KernelPipeline:
        self.require()
        q, _, page_table, seq_lens = inputs
        require_int32(page_table=page_table, seq_lens=seq_lens)
        b = q.shape[0]
        splits = self.num_splits(b, page_table.shape[1])
        self._warm_other(inputs, splits)
        outputs = self._outputs(b, q)
        if splits == 1:
            return self._attention(inputs, outputs, 1)
        return self._pipeline(inputs, self._partials(b, splits, q), outputs, splits)

    def plan_empty(self) -> CtKernel | KernelPipeline:
        self.require()
        splits = self.num_splits(self.problem.b, self.problem.max_pages)
        return self._attention((), (), 1) if splits == 1 else self._pipeline((), None, None, splits)

    def _warm_other(self, inputs: tuple[Any, ...], splits: int) -> None:
        """Compiles what a later bind to other sizes may need and this one does not, by attending to no token.

        One compilation writes the output, the other partials: whichever `splits` does not need; and the combine has one
        for each of its tiles.
        """
        import torch

        q, kv_cache, _, _ = inputs
        key = ("other", self.tiling, self.problem.problem_class(), q.device)
        if self.tiling.num_splits or not q.is_cuda or key in self.compiled or not q.shape[0]:
            return
        nothing = torch.zeros((1, 4), dtype=torch.int32, device=q.device)
        one, outputs = (q[:1], kv_cache, nothing, nothing[0]), self._outputs(1, q)
        if splits == 1:
            self._attention(one, self._partials(1, 2, q), 2).launch()
        else:
            self._attention(one, outputs, 1).launch()
        for most, _ in COMBINE_TILES:
            partials = self._partials(1, most, q)
            partials[1].zero_()
            self._combine(partials, outputs, most).launch()
        self.compiled[key] = True
