"""Absorbed MLA decode in cuTile, version 1: one loop by TMA alone, two blocks an SM, splits joined by the last block.

As in version 0, one block takes a tile of query rows of one request and one latent cache and a range of its tokens, and
loads each tile of tokens once, as K and as V; rows lie on M (64), or tokens do and rows on N (8 or 16, "swapped").

    page id ──► TMA: K tile, in 512 / tile_k column chunks ──► mask, S ──► online softmax ──► O += P·K (latent)

What changed against version 0, and why:

- The last tile of a request comes by TMA as well. A tile is a box of `tile_n` rows of a page that *ends* at the last
  valid token, so its first row may lie before the page's first: TMA fills those rows with zeros, and the rows past the
  end, which may hold NaN, are not read at all.

      page   │ t0 t1 t2 … tv │ garbage │        full tile: rows 0 .. 63
             box ┌───────────┐                  last tile: rows v-63 .. v, of which the negative ones are zero
                 0 0 0 t0 … tv                  and masked: their tokens were in the tile before, or nowhere

  Version 0 loaded that tile through registers, in a second loop. The registers of that loop, not of the first, kept a
  second block off the SM and made cuTile drop warp specialisation where two were asked for.
- Two blocks an SM, 4 worker warps each, for few rows: while one is at its softmax the other's loads are in flight.
- The sum of a row's weights stays spread over the tokens of a tile and is added up once, after the loop: one reduction
  over warps less for every tile.
- exp2 flushes subnormals: two multiplications and a comparison less for every weight.
- Partial results of up to `merge_splits` splits are joined by the block that arrives last (lib/merge.py), which saves
  the launch of a second kernel; more are joined by a kernel that has all its loads in flight at once.

Architecture: Hopper (sm_90a), through HGMMA, TMA and cuTile's own warp specialisation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import cuda.tile as ct

from mla_var3.device import Device, Requirement
from mla_var3.kernel.cutile.lib.combine import warm_up
from mla_var3.kernel.cutile.lib.handles import ct_dtype, handle, signature
from mla_var3.kernel.cutile.lib.latent import FLOOR, LATENT, LN2, LOG2E, WIDTH, LatentPlan, ceil_pow2, takes_pages_of_16
from mla_var3.kernel.cutile.lib.merge import combine_splits_kernel, last_to_arrive, merge_parts
from mla_var3.runtime import CtKernel, KernelPipeline, Tiling, Verdict

if TYPE_CHECKING:
    from mla_var3.problem import MlaProblem

ConstInt = ct.Constant[int]
ConstBool = ct.Constant[bool]

#: Of the shared memory of a block: barriers, row statistics, descriptors.
SMEM_MISC = 2048

MAX_SPLITS = 256


@dataclass(frozen=True)
class FlashMlaV1Tiling(Tiling):
    """Knobs of the kernel.

    swapped: tokens on the M side of the tensor cores and query rows on N; otherwise rows on M. tile_m: query rows of a
    block, 64, or 8 or 16 when swapped. tile_n: tokens of a tile, a page or a divisor of one. tile_k: latent columns of
    a chunk; chunks are separate tiles to cuTile, which decides from their size how many are in flight. num_warpgroups:
    of those that compute. occupancy: blocks an SM should hold. num_splits: parts that a request's tokens are split
    into; 0 chooses from the sizes when the kernel is bound. merge_splits: up to so many are joined by the last block.
    """

    swapped: bool = False
    tile_m: int = 64
    tile_n: int = 64
    tile_k: int = 128
    num_warpgroups: int = 2
    occupancy: int = 1
    num_splits: int = 0
    merge_splits: int = 4

    def validate(self, pd: MlaProblem, device: Device | None = None) -> Verdict:
        page, side = pd.page_size, "swapped" if self.swapped else "with heads on M"
        if self.tile_n > page or page % self.tile_n:
            return Verdict.no(f"tile_n = {self.tile_n} does not divide a page of {page} tokens: a tile is in one page.")
        # Swapped with 32 or 64 rows O does not leave room for a second block, and cuTile 1.7.0 was seen to compute
        # them wrongly in version 0.
        rows = (8, 16) if self.swapped else (64,)
        if self.tile_m not in rows:
            return Verdict.no(f"tile_m = {self.tile_m}: {side} it is one of {rows}.")
        tokens = (64,) if self.swapped else (16, 32, 64)
        if self.tile_n not in tokens:
            return Verdict.no(f"tile_n = {self.tile_n}: {side} it is one of {tokens}.")
        if self.tile_k not in (64, 128, 256, 512):
            return Verdict.no(f"tile_k = {self.tile_k} is not one of 64, 128, 256, 512.")
        # With one block an SM the swapped loop waits for every product, and with 8 warps it spills; with heads on M
        # O (64, 512) needs both warpgroups and the whole SM.
        shape = (1, 2) if self.swapped else (2, 1)
        if (self.num_warpgroups, self.occupancy) != shape:
            return Verdict.no(
                f"{self.num_warpgroups} warpgroups and {self.occupancy} blocks an SM: {side} they are {shape}."
            )
        if not 0 <= self.num_splits <= MAX_SPLITS:
            return Verdict.no(f"num_splits = {self.num_splits} is outside 0..{MAX_SPLITS}.")
        if not 1 <= self.merge_splits <= MAX_SPLITS:
            return Verdict.no(f"merge_splits = {self.merge_splits} is outside 1..{MAX_SPLITS}.")
        smem = 2 * WIDTH * (self.tile_m + self.tile_n) + 2 * self.tile_m * self.tile_n + SMEM_MISC
        if device is not None and self.occupancy * smem > device.smem_per_block:
            return Verdict.no(
                f"{self.occupancy} blocks with Q, one tile of tokens and P take {self.occupancy * smem} bytes; "
                f"a block has {device.smem_per_block}."
            )
        return Verdict.yes()


def attend(qs, q_rope, ks, k_rope, m, l, accs, scale, mask, CHUNKS, SWAPPED):
    """One tile of tokens: the new running maximum (base 2, scaled), denominators and unnormalised output chunks."""
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
    s = ct.where(mask, s, float("-inf"))
    m_new = ct.maximum(m, ct.max(s, axis, keepdims=True) * scale)
    p = ct.exp2(s * scale - m_new, flush_to_zero=True)
    keep = ct.exp2(m - m_new, flush_to_zero=True)
    p16 = ct.astype(p, k_rope.dtype)
    if SWAPPED:
        l = l * keep + p
        accs = tuple(ct.mma(ct.transpose(ks[c]), p16, accs[c] * keep) for c in ct.static_iter(range(CHUNKS)))
    else:
        l = l * keep + ct.sum(p, 1, keepdims=True)
        accs = tuple(ct.mma(p16, ks[c], accs[c] * keep) for c in ct.static_iter(range(CHUNKS)))
    return m_new, l, accs


@ct.kernel
def flash_mla_v1(
    Q,  # handle of (b, S, HKV · G, 576), global
    KV,  # handle of (num_pages, PAGE, HKV, 576), global; same dtype
    PAGE_TABLE,  # handle of (b, max_pages) int32, global
    SEQ_LENS,  # handle of (b,) int32, global
    OUT,  # handle of (b, S, HKV · G, 512), global; not written here when another kernel joins the splits
    LSE,  # handle of (b, HKV · G, S) float32, global; likewise
    O_PART,  # handle of (b, splits, S, HKV · G, 512) float32, global; written when splits > 1, else anything
    LSE_PART,  # handle of (b, splits, S, HKV · G) float32, global; likewise
    ARRIVED,  # handle of (b · row tiles,) int32, global; zero before and after; used when merge_here is 1
    scale: float,  # softmax scale · log2(e)
    b: int,
    max_pages: int,
    num_pages: int,
    splits: int,
    merge_here: int,  # 1: the last block of a row tile joins its splits; 0: a kernel after this one does
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
    """Grid (row tiles · HKV, splits, b): blocks that share tokens are neighbours, so L2 serves all but the first."""
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
    qs = tuple(
        ct.reshape(ct.load(q, (req, s_tile, head_kv, g_tile, c), (1, TS, 1, TG, TK), padding_mode=zero), (TM, TK))
        for c in ct.static_iter(range(CHUNKS))
    )
    q_rope = ct.reshape(ct.load(q, (req, s_tile, head_kv, g_tile, 8), (1, TS, 1, TG, 64), padding_mode=zero), (TM, 64))

    tiles = (length + TN - 1) // TN
    per_split = (tiles + splits - 1) // splits
    first = split * per_split
    last = min(first + per_split, tiles)
    limit = length - (S - 1) + s_tile * TS + ct.arange(TM, dtype=ct.int32) // TG

    if SWAPPED:
        m = ct.full((1, TM), FLOOR, dtype=ct.float32)
        l = ct.zeros((TN, TM), dtype=ct.float32)
        accs = tuple(ct.zeros((TK, TM), dtype=ct.float32) for c in ct.static_iter(range(CHUNKS)))
    else:
        m = ct.full((TM, 1), FLOOR, dtype=ct.float32)
        l = ct.zeros((TM, 1), dtype=ct.float32)
        accs = tuple(ct.zeros((TM, TK), dtype=ct.float32) for c in ct.static_iter(range(CHUNKS)))

    PER_PAGE = PAGE // TN
    table = req * max_pages
    i = ct.arange(TN, dtype=ct.int32)
    for t in range(first, last):
        page = pages.load_offset(table + t // PER_PAGE)
        over = max((t + 1) * TN - length, 0)  # rows of the box that precede the tile's first token
        row = t % PER_PAGE * TN - over
        ks = tuple(ct.reshape(latents.load((page, row, head_kv, c)), (TN, TK)) for c in ct.static_iter(range(CHUNKS)))
        k_rope = ct.reshape(ropes.load((page, row, head_kv, 8)), (TN, 64))
        if CAUSAL:
            token = t * TN - over + i
            if SWAPPED:
                mask = (i >= over)[:, None] & (token[:, None] < limit[None, :])
            else:
                mask = (i >= over)[None, :] & (limit[:, None] > token[None, :])
        elif SWAPPED:
            mask = ct.broadcast_to((i >= over)[:, None], (TN, TM))
        else:
            mask = ct.broadcast_to((i >= over)[None, :], (TM, TN))
        m, l, accs = attend(qs, q_rope, ks, k_rope, m, l, accs, scale, mask, CHUNKS, SWAPPED)

    if SWAPPED:
        l = ct.sum(l, 0, keepdims=True)
    empty = l == 0.0
    safe = ct.where(empty, 1.0, l)
    factor = 1.0 / safe
    lse = ct.reshape((m + ct.log2(safe)) * LN2, (1, TS, 1, TG))
    none = ct.reshape(empty, (1, TS, 1, TG))
    slot = req * splits + split
    o_strides = (S * H * 512, H * 512, G * 512, 512, 1)
    out = ct.Array.from_foreign(OUT.foreign_pointer, (b, S, HKV, G, 512), o_strides)
    lses = ct.Array.from_foreign(LSE.foreign_pointer, (b, S, HKV, G), (S * H, 1, G * S, S))
    parts = ct.Array.from_foreign(O_PART.foreign_pointer, (b * splits, S, HKV, G, 512), o_strides)
    lse_parts = ct.Array.from_foreign(LSE_PART.foreign_pointer, (b * splits, S, HKV, G), (S * H, H, G, 1))
    # A run-time branch, so that one compilation serves any number of splits, taken again for every piece of columns:
    # with more stores in a branch cuTile gives up warp specialisation.
    PIECE = min(TK, 64 if SWAPPED else 128)
    for c in ct.static_iter(range(CHUNKS)):
        o = accs[c] * factor
        for n in ct.static_iter(range(TK // PIECE)):
            if SWAPPED:
                piece = ct.transpose(ct.extract(o, (n, 0), (PIECE, TM)))
            else:
                piece = ct.extract(o, (0, n), (TM, PIECE))
            piece = ct.reshape(piece, (1, TS, 1, TG, PIECE))
            column = c * (TK // PIECE) + n
            if splits == 1:
                ct.store(out, (req, s_tile, head_kv, g_tile, column), ct.astype(piece, OUT.dtype))
            else:
                ct.store(parts, (slot, s_tile, head_kv, g_tile, column), piece, allow_tma=False)
    if splits == 1:
        ct.store(lses, (req, s_tile, head_kv, g_tile), ct.where(none, float("inf"), lse), allow_tma=False)
    else:
        ct.store(lse_parts, (slot, s_tile, head_kv, g_tile), ct.where(none, float("-inf"), lse), allow_tma=False)
        if merge_here == 1:
            if last_to_arrive(ARRIVED, req * ct.num_blocks(0) + x, splits):
                COLUMNS = min(512, 8192 // TM)  # of a partial result at a time: what registers hold
                merge_parts(
                    parts, lse_parts, out, lses, req * splits, req, s_tile, head_kv, g_tile, splits, TS, TG, COLUMNS
                )


def choose_splits(blocks: int, tiles: int, sms: int, tiling: FlashMlaV1Tiling) -> int:
    """How many parts to split each request's tokens into.

    blocks: of the unsplit grid. tiles: of tokens in the longest request. Minimises the time of a simple model in
    microseconds: blocks run in waves over the SMs. A tile takes 2.4 with heads on M (bound by the products); swapped,
    3.0 for a block alone on its SM (bound by the latency of one tile after the other) and 2.1 times the blocks that
    share the SM (bound by reading). A wave costs its start and end. Joining splits costs 1.5 and 0.8 for each of them
    in the last block, or 4.5 and 1 for every 60 in a kernel of its own.
    """
    slots = sms * tiling.occupancy

    def cost(splits: int) -> float:
        waves = -(-blocks * splits // slots)
        sharing = min(tiling.occupancy, -(-blocks * splits // sms))
        tile, ends = (max(3.0, 2.1 * sharing), 3.0) if tiling.swapped else (2.4, 7.0)
        joining = 0.0
        if splits > 1:
            joining = 1.5 + 0.8 * splits if splits <= tiling.merge_splits else 4.5 + splits / 60
        return waves * (-(-tiles // splits) * tile + ends) + joining

    return min(range(1, max(1, min(tiles, MAX_SPLITS)) + 1), key=cost)


class FlashMlaV1Plan(LatentPlan):
    """Absorbed MLA decode in cuTile, version 1."""

    tiling_type = FlashMlaV1Tiling
    requires = Requirement(
        archs=("sm_90a",), dtypes=("bf16", "fp16"), features=("wgmma", "tma"), problem=takes_pages_of_16
    )
    deterministic = True

    def default_tiling(self) -> FlashMlaV1Tiling:
        pd = self.problem
        # Over 16 rows every further tile of rows reads all tokens again; pages under 64 tokens leave part of M empty.
        rows = ceil_pow2(pd.s) * ceil_pow2(pd.group)
        if rows <= 16 and pd.page_size >= 64:
            return FlashMlaV1Tiling(True, 8 if rows <= 8 else 16, 64, 64, num_warpgroups=1, occupancy=2)
        # Smaller tiles of tokens want wider chunks: with narrow ones every HGMMA gets a wait of its own, or it spills.
        tile_n = min(64, pd.page_size)
        return FlashMlaV1Tiling(tile_n=tile_n, tile_k={16: 256, 32: 512}.get(tile_n, 128))

    def autotune_configs(self) -> list[Tiling]:
        base = self.default_tiling()
        others = [replace(base, tile_k=k) for k in ((64, 128, 256, 512) if base.swapped else (128, 256))]
        others += [replace(base, merge_splits=m) for m in (1, 2, 8)]
        chosen = self.with_tiling(base).num_splits(self.problem.b, self.problem.max_pages)
        splits = [replace(base, num_splits=n) for n in (1, chosen // 2, chosen * 2) if 1 <= n <= MAX_SPLITS]
        return list(dict.fromkeys(x for x in (base, *others, *splits) if x.validate(self.problem, self.device)))

    def choose_splits(self, blocks: int, tiles: int, sms: int) -> int:
        return choose_splits(blocks, tiles, sms, self.tiling)

    # ------------------------------------------------------------ kernels
    def _constants(self) -> list[Any]:
        pd, ti = self.problem, self.tiling
        ts, tg = self.row_shape()
        return [pd.s, pd.h_kv, pd.group, pd.page_size, pd.causal, ts, tg, ti.tile_n, ti.tile_k, ti.swapped]

    def _main(
        self,
        inputs: tuple[Any, ...],
        whole: tuple[Any, ...],
        parts: tuple[Any, ...],
        splits: int,
        workspaces: tuple[Any, ...],
    ) -> CtKernel:
        """The attention kernel: leaves its result in `whole` (out, lse), or with many splits in the first `parts`.

        parts: o_part, lse_part, arrived; what is not used may be any tensor. workspaces: those of them that are.
        """
        pd, ti = self.problem, self.tiling
        here = splits <= ti.merge_splits

        def grid(_: Any) -> tuple[int, ...]:
            return (self.row_tiles(), splits, inputs[0].shape[0] if inputs else pd.b)

        def args(_: Any) -> tuple[Any, ...]:
            names = ("q", "kv_cache", "page_table", "seq_lens", "out", "lse", "o_part", "lse_part", "arrived")
            handles = [handle(x, n) for x, n in zip((*inputs, *whole, *parts), names, strict=True)]
            b, max_pages, num_pages = inputs[0].shape[0], inputs[2].shape[1], inputs[1].shape[0]
            return (*handles, pd.scale * LOG2E, b, max_pages, num_pages, splits, int(here), *self._constants())

        def describe(_: Any) -> Any:
            io = ct_dtype(pd.dtype)
            handles = [io, io, ct.int32, ct.int32, io, ct.float32, ct.float32, ct.float32, ct.int32]
            return signature(handles, [ct.float32, *[ct.int32] * 5], self._constants())

        def hints(_: Any) -> dict[str, Any]:
            # Without a hint cuTile plans for one block an SM.
            return {"num_worker_warps": 4 * ti.num_warpgroups} | (
                {"occupancy": ti.occupancy} if ti.occupancy > 1 else {}
            )

        return CtKernel(
            flash_mla_v1,
            grid,
            args,
            inputs,
            whole if here else parts[:2],
            ti,
            hints_fn=hints,
            signature_fn=describe,
            name="flash_mla_v1",
            workspace_tensors=workspaces if here else (),
            plan=self,
        )

    def plan(self, *inputs: Any) -> CtKernel | KernelPipeline:
        import torch

        self.require()
        q = inputs[0]
        b, splits = q.shape[0], self.bound_splits(inputs)
        out, lse = self.whole(b, q)
        arrived = torch.zeros(max(4, b * self.row_tiles()), dtype=torch.int32, device=q.device)
        if splits == 1:
            self._warm_combine(q)
            unused = torch.empty((2, 4), dtype=torch.float32, device=q.device)
            return self._main(inputs, (out, lse), (*unused, arrived), 1, ())
        o_part, lse_part = self.row_parts(b, splits, q)
        parts = (o_part, lse_part, arrived)
        main = self._main(inputs, (out, lse), parts, splits, parts)
        if splits <= self.tiling.merge_splits:
            self._warm_combine(q)
            return main
        return KernelPipeline(
            [main, self._combine(o_part, lse_part, out, lse)],
            name="flash_mla_v1",
            tiling=self.tiling,
            workspace_tensors=[o_part, lse_part],
            plan=self,
        )

    def plan_empty(self) -> CtKernel | KernelPipeline:
        self.require()
        pd = self.problem
        splits = self.num_splits(pd.b, pd.max_pages)
        main = self._main((), (), (), splits, ())
        if splits <= self.tiling.merge_splits:
            return main
        return KernelPipeline(
            [main, self._combine(None, None, None, None)], name="flash_mla_v1", tiling=self.tiling, plan=self
        )

    def _warm_combine(self, q: Any) -> None:
        """Compiles the combine kernel for a later bind with many splits; the attention kernel is the same for both."""
        pd = self.problem
        key = ("combine", pd.s, pd.h, pd.dtype, q.device)
        fixed = self.tiling.num_splits and self.tiling.num_splits <= self.tiling.merge_splits
        if not fixed and q.is_cuda and key not in self.compiled:
            warm_up(combine_splits_kernel, q, s=pd.s, h=pd.h, width=LATENT, dtype=pd.dtype)
            self.compiled[key] = True

    def _combine(self, o_part: Any, lse_part: Any, out: Any, lse: Any) -> CtKernel:
        pd = self.problem
        return combine_splits_kernel(
            o_part, lse_part, out, lse, s=pd.s, h=pd.h, width=LATENT, dtype=pd.dtype, tiling=self.tiling, plan=self
        )
