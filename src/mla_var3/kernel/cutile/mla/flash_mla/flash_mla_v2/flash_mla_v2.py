"""Absorbed MLA decode in cuTile, version 2, for few query rows: a ring of three tiles, filled by TMA.

Tokens lie on the M side of the tensor cores (64, a tile), query rows on N (16). One block takes the rows of one request
and one latent cache and a range of its tokens, and loads each tile of tokens once, as K and as V:

    page id ──► TMA: 64 x 512 latent, 64 x 64 rope ──► Sᵀ = K·Qᵀ ──► online softmax ──► Oᵀ += Kᵀ·P

      ring   │ tile t: softmax, V product │ tile t+1: K product │ tile t+2: in flight │

What decides the speed is how many bytes are in flight and that nothing else waits for them. Four things of the versions
before stood in the way, each seen in the code that cuTile made:

- An atomic in the kernel (version 1's join in the last block) orders all loads before it, and cuTile then waits for
  each TMA load right after asking for it: one load in flight. Here a second kernel joins the splits.
- Shared memory for the epilogue: a run-time branch between the output and a partial result keeps buffers for both, and
  transposing float32 partial results needs more. Each cost a stage of the ring. Here they are two compilations
  (`WHOLE`), and partial results are stored as they lie, (512, rows); the joining kernel transposes. The two want loads
  of different width: with 64 columns a load the first product starts when 8 KB are there, which makes the output's
  compilation faster, but float32 partial results behind such a loop cost it a stage and make every product wait for
  itself. They get one load of 512 columns.
- A second loop for the last, partly filled tile (version 0) has buffers of its own, a third of the ring. As in version
  1 the last tile is a box that *ends* at the last valid token; its rows of negative index are zero-filled by TMA.
- Masking by selection makes the compiler copy accumulators between the products in flight ("insufficient register
  resources", every product then waits for itself). Here a bias of 0 or minus infinity is added: the box holds finite
  values only.

Architecture: Hopper (sm_90a), through HGMMA, TMA and cuTile's own warp specialisation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import cuda.tile as ct

from mla_var3.device import Device, Requirement
from mla_var3.kernel.cutile.lib.handles import ct_dtype, handle, signature
from mla_var3.kernel.cutile.lib.latent import FLOOR, LATENT, LN2, LOG2E, WIDTH, LatentPlan, ceil_pow2, takes_latents
from mla_var3.kernel.cutile.lib.sums import LAYOUTS, join_sums_kernel
from mla_var3.runtime import CtKernel, KernelPipeline, Tiling, Verdict

if TYPE_CHECKING:
    import torch

    from mla_var3.problem import MlaProblem

ConstInt = ct.Constant[int]
ConstBool = ct.Constant[bool]

#: Tokens of a tile: the M side of a warpgroup's product. Query rows of a tile: with 8, products wait for themselves.
TOKENS = 64
ROWS = 16

MAX_SPLITS = LAYOUTS[-1][0]


@dataclass(frozen=True)
class FlashMlaV2Tiling(Tiling):
    """Knobs of the kernel.

    tile_k: latent columns of a load: 64, 128, 256 or 512; 0 takes 64 where a request is not split and 512 where it is.
    pages: tiles of tokens that share a softmax, 1 or 2. num_warpgroups: of those that compute. occupancy: blocks an SM
    should hold; with 2 each has one buffer. num_ctas: of a cluster, which cuTile spreads a tile over. num_splits: parts
    that a request's tokens are split into; 0 chooses from the sizes when the kernel is bound.
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
            given = f"{self.num_warpgroups} warpgroups, {self.occupancy} blocks an SM and clusters of {self.num_ctas}"
            return Verdict.no(f"{given}: each is 1 or 2.")
        if not 0 <= self.num_splits <= MAX_SPLITS:
            return Verdict.no(f"num_splits = {self.num_splits} is outside 0..{MAX_SPLITS}.")
        smem = 2 * WIDTH * (ROWS + TOKENS * self.pages) + 8192
        if device is not None and self.occupancy * smem > device.smem_per_block:
            return Verdict.no(
                f"{self.occupancy} blocks with Q and {self.pages} tiles of tokens take {self.occupancy * smem} bytes; "
                f"a block has {device.smem_per_block}."
            )
        return Verdict.yes()


def load_box(latents, ropes, page, row, head_kv, TK):
    """64 tokens of a page from `row` on, which may be negative: (latent chunks, rope)."""
    ks = tuple(ct.reshape(latents.load((page, row, head_kv, c)), (64, TK)) for c in ct.static_iter(range(512 // TK)))
    return ks, ct.reshape(ropes.load((page, row, head_kv, 8)), (64, 64))


def scores(qs, q_rope, ks, k_rope, bias, CHUNKS):
    """K·Qᵀ + bias, (64, rows)."""
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
    OUT,  # WHOLE: handle of (b, S, HKV · G, 512), global; else of (b, splits, tiles, 512, TS · TG) float32
    LSE,  # WHOLE: handle of (b, HKV · G, S) float32, global; else of (b, splits, tiles, 2, TS · TG) float32
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
    WHOLE: ConstBool,
):
    """Grid (row tiles · HKV, splits, b)."""
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

    m = ct.full((1, TM), FLOOR, dtype=ct.float32)
    # The sum of a row's weights stays spread over the tokens of a tile: one reduction over warps less for every tile.
    l = ct.zeros((TN, TM), dtype=ct.float32)
    accs = tuple(ct.zeros((TK, TM), dtype=ct.float32) for c in ct.static_iter(range(CHUNKS)))

    PER_PAGE = PAGE // TN
    table = req * max_pages
    i = ct.arange(TN, dtype=ct.int32)
    for t in range(first, last, 2 if PAIR else 1):
        page = pages.load_offset(table + t // PER_PAGE)
        over = max((t + 1) * TN - length, 0)  # rows of the box that precede the tile's first token
        ks, k_rope = load_box(latents, ropes, page, t % PER_PAGE * TN - over, head_kv, TK)
        if CAUSAL:
            seen = (i >= over)[:, None] & ((t * TN - over + i)[:, None] < limit[None, :])
        else:
            seen = (i >= over)[:, None]
        s = scores(qs, q_rope, ks, k_rope, ct.where(seen, 0.0, float("-inf")), CHUNKS)
        if PAIR:
            u = min(t + 1, last - 1)
            page = pages.load_offset(table + u // PER_PAGE)
            over = max((u + 1) * TN - length, 0)
            ks2, k_rope = load_box(latents, ropes, page, u % PER_PAGE * TN - over, head_kv, TK)
            if CAUSAL:
                seen = (i >= over)[:, None] & ((u * TN - over + i)[:, None] < limit[None, :]) & (t < u)
            else:
                seen = (i >= over)[:, None] & (t < u)
            s2 = scores(qs, q_rope, ks2, k_rope, ct.where(seen, 0.0, float("-inf")), CHUNKS)
            m_new = ct.maximum(m, ct.max(ct.maximum(s, s2), 0, keepdims=True) * scale)
            p2 = ct.exp2(s2 * scale - m_new, flush_to_zero=True)
        else:
            m_new = ct.maximum(m, ct.max(s, 0, keepdims=True) * scale)
        p = ct.exp2(s * scale - m_new, flush_to_zero=True)
        keep = ct.exp2(m - m_new, flush_to_zero=True)
        m = m_new
        p16 = ct.astype(p, KV.dtype)
        l = l * keep + p
        accs = tuple(ct.mma(ct.transpose(ks[c]), p16, accs[c] * keep) for c in ct.static_iter(range(CHUNKS)))
        if PAIR:
            p16 = ct.astype(p2, KV.dtype)
            l = l + p2
            accs = tuple(ct.mma(ct.transpose(ks2[c]), p16, accs[c]) for c in ct.static_iter(range(CHUNKS)))

    total = ct.sum(l, 0, keepdims=True)
    if WHOLE:
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
        parts = ct.Array.from_foreign(OUT.foreign_pointer, (b * splits, X, 512, TM), (X * TM * 512, TM * 512, TM, 1))
        scales = ct.Array.from_foreign(LSE.foreign_pointer, (b * splits, X, 2, TM), (X * 2 * TM, 2 * TM, TM, 1))
        for c in ct.static_iter(range(CHUNKS)):
            # A TMA store would need a buffer.
            ct.store(parts, (slot, x, c, 0), ct.reshape(accs[c], (1, 1, TK, TM)), allow_tma=False)
        ct.store(scales, (slot, x, 0, 0), ct.reshape(m, (1, 1, 1, TM)), allow_tma=False)
        ct.store(scales, (slot, x, 1, 0), ct.reshape(total, (1, 1, 1, TM)), allow_tma=False)


def _accepts(pd: MlaProblem) -> Verdict:
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


def choose_splits(blocks: int, tiles: int, sms: int, occupancy: int) -> int:
    """How many parts to split each request's tokens into.

    blocks: of the unsplit grid. tiles: of tokens in the longest request. Minimises the time of a simple model in
    microseconds: blocks run in waves, a tile takes 2.1 for each of the blocks that share an SM (its share of the
    memory), a wave 4 for its start and end, joining splits 4 and 1 for every 60 of them.
    """
    slots = sms * occupancy

    def cost(splits: int) -> float:
        waves = -(-blocks * splits // slots)
        return waves * (-(-tiles // splits) * 2.1 * occupancy + 4) + (4 + splits / 60 if splits > 1 else 0)

    return min(range(1, max(1, min(tiles, MAX_SPLITS)) + 1), key=cost)


class FlashMlaV2Plan(LatentPlan):
    """Absorbed MLA decode in cuTile for few query rows, version 2."""

    tiling_type = FlashMlaV2Tiling
    requires = Requirement(archs=("sm_90a",), dtypes=("bf16", "fp16"), features=("wgmma", "tma"), problem=_accepts)
    deterministic = True

    def default_tiling(self) -> FlashMlaV2Tiling:
        # The ring of three and a causal mask together make every product wait for itself; one buffer does not.
        return FlashMlaV2Tiling(tile_k=512, occupancy=2) if self.masked() else FlashMlaV2Tiling()

    def masked(self) -> bool:
        """Whether query rows see different tokens."""
        return self.problem.causal and self.problem.s > 1

    def autotune_configs(self) -> list[Tiling]:
        base = self.default_tiling()
        others: list[FlashMlaV2Tiling] = [replace(base, tile_k=256)]
        if not self.masked():
            # In clusters the hint of two blocks an SM changes nothing, or the products leave the tensor cores as well.
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
    def tile_rows(self) -> int:
        return ROWS

    def tile_tokens(self) -> int:
        return TOKENS

    def choose_splits(self, blocks: int, tiles: int, sms: int) -> int:
        return choose_splits(blocks, tiles, sms, self.tiling.occupancy)

    def num_splits(self, b: int, max_pages: int) -> int:
        # Offsets in the partial results are 32 bits.
        most = (2**31 - 1) // max(1, b * self.row_tiles() * LATENT * ROWS)
        return max(1, min(super().num_splits(b, max_pages), most))

    # ------------------------------------------------------------ kernels
    def _main(self, inputs: tuple[Any, ...], results: tuple[Any, ...], splits: int) -> CtKernel:
        """The attention kernel: writes results, with one split (out, lse), else parts as `lib/sums.py` takes them."""
        pd, ti = self.problem, self.tiling
        whole = splits == 1
        constants = [
            pd.s,
            pd.h_kv,
            pd.group,
            pd.page_size,
            self.masked(),
            *self.row_shape(),
            ti.tile_k or (64 if whole else 512),
            ti.pages == 2,
            whole,
        ]

        def grid(_: Any) -> tuple[int, ...]:
            return (self.row_tiles(), splits, inputs[0].shape[0] if inputs else pd.b)

        def args(_: Any) -> tuple[Any, ...]:
            names = ("q", "kv_cache", "page_table", "seq_lens", "out", "lse")
            handles = [handle(x, n) for x, n in zip((*inputs, *results), names, strict=True)]
            b, max_pages, num_pages = inputs[0].shape[0], inputs[2].shape[1], inputs[1].shape[0]
            return (*handles, pd.scale * LOG2E, b, max_pages, num_pages, splits, *constants)

        def describe(_: Any) -> Any:
            io = ct_dtype(pd.dtype)
            handles = [io, io, ct.int32, ct.int32, io if whole else ct.float32, ct.float32]
            return signature(handles, [ct.float32, *[ct.int32] * 4], constants)

        def hints(_: Any) -> dict[str, Any]:
            # Without a hint cuTile plans for one block an SM.
            asked = {"occupancy": ti.occupancy, "num_ctas": ti.num_ctas}
            return {"num_worker_warps": 4 * ti.num_warpgroups} | {k: n for k, n in asked.items() if n > 1}

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

    def _combine(self, parts: Any, whole: Any, splits: int) -> CtKernel:
        pd = self.problem
        return join_sums_kernel(
            parts,
            whole,
            s=pd.s,
            h_kv=pd.h_kv,
            group=pd.group,
            row_shape=self.row_shape(),
            splits=splits,
            dtype=pd.dtype,
            tiling=self.tiling,
            plan=self,
        )

    def _joined(self, main: CtKernel, combine: CtKernel) -> KernelPipeline:
        return KernelPipeline(
            [main, combine],
            name="flash_mla_v2",
            tiling=self.tiling,
            workspace_tensors=main.output_tensors,
            plan=self,
        )

    def _parts(self, b: int, splits: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Values (b, splits, tiles, 512, rows) and scales (b, splits, tiles, 2, rows), uninitialised."""
        import torch

        shape = (b, splits, self.row_tiles())
        values = torch.empty((*shape, LATENT, ROWS), dtype=torch.float32, device=like.device)
        return values, torch.empty((*shape, 2, ROWS), dtype=torch.float32, device=like.device)

    def plan(self, *inputs: Any) -> CtKernel | KernelPipeline:
        self.require()
        q = inputs[0]
        splits = self.bound_splits(inputs)
        self._warm_other(inputs, splits)
        whole = self.whole(q.shape[0], q)
        if splits == 1:
            return self._main(inputs, whole, 1)
        parts = self._parts(q.shape[0], splits, q)
        return self._joined(self._main(inputs, parts, splits), self._combine(parts, whole, splits))

    def plan_empty(self) -> CtKernel | KernelPipeline:
        self.require()
        splits = self.num_splits(self.problem.b, self.problem.max_pages)
        main = self._main((), (), splits)
        return main if splits == 1 else self._joined(main, self._combine(None, None, splits))

    def _warm_other(self, inputs: tuple[Any, ...], splits: int) -> None:
        """Compiles what a later bind to other sizes may need and this one does not, by attending to no token.

        One compilation writes the output, the other partial results: whichever `splits` does not ask for; and the
        joining kernel has one for each of its layouts.
        """
        import torch

        q, kv_cache, _, _ = inputs
        key = ("other", self.tiling, self.problem.problem_class(), q.device)
        if self.tiling.num_splits or not q.is_cuda or key in self.compiled or not q.shape[0]:
            return
        nothing = torch.zeros((1, 4), dtype=torch.int32, device=q.device)
        few, whole = (q[:1], kv_cache, nothing, nothing[0]), self.whole(1, q)
        self._main(few, *((self._parts(1, 2, q), 2) if splits == 1 else (whole, 1))).launch()
        for most, _ in LAYOUTS:
            parts = self._parts(1, most, q)
            parts[1].zero_()
            self._combine(parts, whole, most).launch()
        self.compiled[key] = True
