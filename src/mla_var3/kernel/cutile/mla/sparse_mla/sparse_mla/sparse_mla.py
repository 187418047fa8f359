"""sparse_mla v0 in cuTile for Hopper (sm_90a): sparse decode over packed caches, the readable baseline.

A CTA (cuTile: block) takes tile_m heads of one query token and all of its indices, those of the extra cache behind
those of the first:

    for each tile of tile_n indices:   indices → page, row → columns in chunks, each with one scale a token
                                       chunk → e4m3 widened, times its scale, rounded to bf16 once; or bf16 as it is
                                       S = sum over chunks of q · chunkᵀ (+ q_rope · ropeᵀ)
                                       online softmax in base 2 → P → O, chunk by chunk, += P · chunk
    end                                out = O / (l + exp(sink)), and lse, which is without the sink

A chunk is 128 latent columns, and 64 in v4, so that it has one scale; v4's last one is plain. The one scale of layout
flat is a factor of the softmax and of out. An index that names no token of the cache, or stands at or past the
request's length, loads nothing (zeros stand in for it, so NaN in the cache never enters a product), and its logits are
-inf. Loads are gathers of columns by offsets: TMA has none on sm_90.

Indices are not split, so a batch of fewer query tokens than SMs leaves some idle. What is gathered goes through
registers on its way to the products, and every tiling spills. The base version.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cuda.tile as ct

from mla_var3.device import Device, Requirement
from mla_var3.kernel.cutile.prims.handles import handle, signature
from mla_var3.kernel.cutile.prims.latent import FLOOR, LN2, LOG2E
from mla_var3.packed_cache import LAYOUTS, fields
from mla_var3.runtime import CtKernel, KernelPlan, Tiling, Verdict, limits
from mla_var3.runtime.scaling import any_scale
from mla_var3.workload import sparse_decode

if TYPE_CHECKING:
    from mla_var3.workload.sparse_decode import SparseProblem

ConstInt = ct.Constant[int]
ConstBool = ct.Constant[bool]

#: Layouts as numbers, which constants of a kernel are.
V32, V4, FLAT, BF16 = range(4)
assert tuple(LAYOUTS)[:4] == ("v32", "v4", "flat", "bf16")
ROPE = 64  # columns
# Bytes, or where there are no codes columns, from one token's row to the next; where packed bf16 columns and scales are
# seen as elements of their own type, so many times fewer (`packed_cache`).
_V32, _V4 = LAYOUTS["v32"], LAYOUTS["v4"]
COLUMNS = LAYOUTS["flat"].columns
V32_ROW, V4_ROW = _V32.token_bytes, _V4.quantised + 2 * _V4.plain
V4_QUANTISED, V4_SCALES = _V4.quantised, _V4.scales + _V4.padding
V32_SCALE = _V32.scale_bytes


# ------------------------------------------------------------------------------------------------ tiling
@dataclass(frozen=True)
class SparseMlaTiling(Tiling):
    """tile_m: heads of a CTA, 16, 32 or 64. tile_n: indices at a time. num_warpgroups: consumers."""

    tile_m: int = 64
    tile_n: int = 16
    num_warpgroups: int = 1

    def validate(self, pd: SparseProblem, device: Device | None = None) -> Verdict:
        if self.tile_m not in (16, 32, 64):
            return Verdict.no(f"tile_m = {self.tile_m} is not one of 16, 32, 64.")
        if self.tile_n not in (16, 32, 64):
            return Verdict.no(f"tile_n = {self.tile_n} is not one of 16, 32, 64.")
        if self.num_warpgroups not in (1, 2):
            return Verdict.no(f"num_warpgroups = {self.num_warpgroups} is not 1 or 2.")
        if pd.layout == "bf16" and self.num_warpgroups == 1:
            # Seen on an H200 with cuTile 1.7.0: where gathered rows go into the products unconverted, one consumer
            # computes wrongly, and otherwise in every run; two are right.
            return Verdict.no("layout bf16 is computed wrongly with num_warpgroups = 1: use 2.")
        return Verdict.yes()


# ------------------------------------------------------------------------------------------------ device
def scaled(codes, exponents, SHIFT):
    """bf16 of e4m3 (TN, TK) times the scale of each row, (TN, 1): float32, or ue8m0 where SHIFT."""
    x = ct.astype(codes, ct.float32)
    if SHIFT:
        bits = ct.astype(exponents, ct.int32)
        bits = ct.where(bits == 0, 0x400000, bits << 23)  # 2^-127 is subnormal
        return ct.astype(x * ct.bitcast(bits, ct.float32), ct.bfloat16)
    return ct.astype(x * exponents, ct.bfloat16)


def chunk_of(CODES, SCALES, PLAIN, at_codes, at_scales, at_plain, there, c, LAYOUT, TN, TK):
    """Latent columns c · TK .. of TN tokens, (TN, TK) bf16. at: where each token's row begins, (TN, 1)."""
    column = (c * TK + ct.arange(TK, dtype=ct.int32))[None, :]
    mask = ct.broadcast_to(there, (TN, TK))
    if LAYOUT == BF16:
        return PLAIN.get_raw_memory().load_offset(at_plain + column, mask=mask, padding_value=0)
    if LAYOUT == V4 and c == 7:
        return PLAIN.get_raw_memory().load_offset(at_plain + (column - V4_QUANTISED), mask=mask, padding_value=0)
    codes = CODES.get_raw_memory().load_offset(at_codes + column, mask=mask, padding_value=0)
    if LAYOUT == FLAT:
        return ct.astype(codes, ct.bfloat16)
    scale = SCALES.get_raw_memory().load_offset(at_scales + c, mask=there, padding_value=0)
    return scaled(codes, scale, LAYOUT == V4)


def attend(
    qs, q_rope, m, l, accs, CODES, SCALES, PLAIN, INDICES, base, length, tokens, code_page, scale_page, plain_page,
    scale, LAYOUT, PAGE, TN, TK,
):  # fmt: skip
    """All indices of one cache: the running maximum m (base 2, scaled), denominator l and unnormalised chunks accs."""
    CHUNKS = 512 // TK
    ROW = V32_ROW if LAYOUT == V32 else V4_ROW if LAYOUT == V4 else COLUMNS
    PLAIN_ROW = V32_ROW // 2 if LAYOUT == V32 else V4_ROW // 2 if LAYOUT == V4 else COLUMNS
    SCALE_ROW = V32_ROW // V32_SCALE if LAYOUT == V32 else V4_SCALES
    for n in range((length + TN - 1) // TN):
        position = n * TN + ct.arange(TN, dtype=ct.int32)
        index = INDICES.get_raw_memory().load_offset(base + position, mask=position < length, padding_value=-1)
        exists = (index >= 0) & (index < tokens)
        index = ct.where(exists, index, 0)
        page = ct.astype(index // PAGE, ct.int64)[:, None]
        row = ct.astype(index % PAGE, ct.int64)[:, None]
        there = exists[:, None]
        at_codes = page * code_page + row * ROW
        at_scales = page * scale_page + row * SCALE_ROW
        at_plain = page * plain_page + row * PLAIN_ROW
        ks = tuple(
            chunk_of(CODES, SCALES, PLAIN, at_codes, at_scales, at_plain, there, c, LAYOUT, TN, TK)
            for c in ct.static_iter(range(CHUNKS))
        )
        # S = Q·Kᵀ
        s = ct.zeros((q_rope.shape[0], TN), dtype=ct.float32)
        if LAYOUT != V4:
            column = ct.arange(64, dtype=ct.int32)[None, :]
            mask = ct.broadcast_to(there, (TN, 64))
            if LAYOUT == FLAT:
                k_rope = CODES.get_raw_memory().load_offset(at_codes + (512 + column), mask=mask, padding_value=0)
                k_rope = ct.astype(k_rope, ct.bfloat16)
            else:
                first = 512 if LAYOUT == BF16 else 0
                k_rope = PLAIN.get_raw_memory().load_offset(at_plain + (first + column), mask=mask, padding_value=0)
            s = ct.mma(q_rope, ct.transpose(k_rope), s)
        for c in ct.static_iter(range(CHUNKS)):
            s = ct.mma(qs[c], ct.transpose(ks[c]), s)
        s = ct.where(exists[None, :], s, float("-inf"))
        # Softmax: P = exp2(scale · S - m'), l = l · exp2(m - m') + sum P.
        m_new = ct.maximum(m, ct.max(s, 1, keepdims=True) * scale)
        p = ct.exp2(s * scale - m_new)
        keep = ct.exp2(m - m_new)
        l = l * keep + ct.sum(p, 1, keepdims=True)
        p16 = ct.astype(p, ct.bfloat16)
        # Rescale and O += P·V.
        accs = tuple(ct.mma(p16, ks[c], accs[c] * keep) for c in ct.static_iter(range(CHUNKS)))
        m = m_new
    return m, l, accs


def count_of(LENGTHS, req, most, GIVEN):
    """How many indices of a request count."""
    if GIVEN:
        return max(0, min(most, LENGTHS.get_raw_memory().load_offset(req)))
    return most


@ct.kernel(num_worker_warps=8)
def sparse_mla(
    Q,  # handle of (query tokens, H, WIDTH) bf16, global
    CODES,  # handle of e4m3 of the cache's first token, global; of layout bf16 anything, and so on
    SCALES,  # handle of its float32 or uint8 scales
    PLAIN,  # handle of its bf16 columns
    INDICES,  # handle of (query tokens, topk) int32, global
    LENGTHS,  # handle of (b,) int32, global; read where LENGTHS_GIVEN
    X_CODES,  # likewise of the extra cache, read where X_PAGE > 0
    X_SCALES,
    X_PLAIN,
    X_INDICES,
    X_LENGTHS,
    FLAT_SCALE,  # handle of (1,) float32; read in layout flat
    SINK,  # handle of (H,) float32; read where SINK_GIVEN
    OUT,  # handle of (query tokens, H, 512) bf16, global
    LSE,  # handle of (b, H, S) float32, global
    scale: float,  # softmax scale · log2(e)
    query_tokens: int,
    tokens: int,
    topk: int,
    code_page: int,
    scale_page: int,
    plain_page: int,
    x_tokens: int,
    x_topk: int,
    x_code_page: int,
    x_scale_page: int,
    x_plain_page: int,
    S: ConstInt,
    H: ConstInt,
    LAYOUT: ConstInt,
    PAGE: ConstInt,
    X_PAGE: ConstInt,
    LENGTHS_GIVEN: ConstBool,
    X_LENGTHS_GIVEN: ConstBool,
    SINK_GIVEN: ConstBool,
    TM: ConstInt,
    TN: ConstInt,
    TK: ConstInt,
):
    """Grid (head tiles, query tokens): CTAs of one query token are neighbours, so L2 serves all but the first."""
    CHUNKS = 512 // TK
    WIDTH = 512 if LAYOUT == V4 else COLUMNS
    head_tile = ct.bid(0)
    token = ct.bid(1)
    req = token // S
    q = ct.Array.from_foreign(Q.foreign_pointer, (query_tokens, H, WIDTH), (H * WIDTH, WIDTH, 1))
    zero = ct.PaddingMode.ZERO
    qs = tuple(
        ct.reshape(ct.load(q, (token, head_tile, c), (1, TM, TK), padding_mode=zero), (TM, TK))
        for c in ct.static_iter(range(CHUNKS))
    )
    # In v4 there are none behind the values: these are the last of them, and not used.
    q_rope = ct.reshape(ct.load(q, (token, head_tile, WIDTH // 64 - 1), (1, TM, 64), padding_mode=zero), (TM, 64))
    factor = 1.0
    if LAYOUT == FLAT:
        factor = FLAT_SCALE.get_raw_memory().load_offset(0)
    m = ct.full((TM, 1), FLOOR, dtype=ct.float32)
    l = ct.zeros((TM, 1), dtype=ct.float32)
    accs = tuple(ct.zeros((TM, TK), dtype=ct.float32) for c in ct.static_iter(range(CHUNKS)))
    length = count_of(LENGTHS, req, topk, LENGTHS_GIVEN)
    m, l, accs = attend(
        qs, q_rope, m, l, accs, CODES, SCALES, PLAIN, INDICES, token * topk, length, tokens, code_page, scale_page,
        plain_page, scale * factor, LAYOUT, PAGE, TN, TK,
    )  # fmt: skip
    if X_PAGE > 0:
        length = count_of(X_LENGTHS, req, x_topk, X_LENGTHS_GIVEN)
        m, l, accs = attend(
            qs, q_rope, m, l, accs, X_CODES, X_SCALES, X_PLAIN, X_INDICES, token * x_topk, length, x_tokens,
            x_code_page, x_scale_page, x_plain_page, scale * factor, LAYOUT, X_PAGE, TN, TK,
        )  # fmt: skip
    # ------------------------------------------------ epilogue: O / (l + exp(sink)), and the LSE
    empty = l == 0.0
    safe = ct.where(empty, 1.0, l)
    lse = ct.where(empty, float("inf"), (m + ct.log2(safe)) * LN2)
    total = safe
    if SINK_GIVEN:
        head = head_tile * TM + ct.arange(TM, dtype=ct.int32)
        sink = SINK.get_raw_memory().load_offset(head, mask=head < H, padding_value=float("-inf"))
        total = safe + ct.exp2(ct.reshape(sink, (TM, 1)) * LOG2E - ct.where(empty, 0.0, m))
    out = ct.Array.from_foreign(OUT.foreign_pointer, (query_tokens, H, 512), (H * 512, 512, 1))
    for c in ct.static_iter(range(CHUNKS)):
        o = ct.reshape(accs[c] * (factor / total), (1, TM, TK))
        ct.store(out, (token, head_tile, c), ct.astype(o, ct.bfloat16))
    lses = ct.Array.from_foreign(LSE.foreign_pointer, (query_tokens // S, S, H), (H * S, 1, S))
    ct.store(lses, (req, token % S, head_tile), ct.reshape(lse, (1, 1, TM)))


# ------------------------------------------------------------------------------------------------ host
def takes(pd: SparseProblem) -> Verdict:
    return limits.all_of(limits.grid(pd.b * pd.s, "query tokens of q"), limits.sparse_sizes(pd))


# ------------------------------------------------------------------------------------------------ plan
class SparseMlaPlan(KernelPlan):
    """One kernel a problem class; sizes and page strides are arguments."""

    workload = sparse_decode.WORKLOAD
    tiling_type = SparseMlaTiling
    requires = Requirement(archs=("sm_90a",), dtypes=("bf16",), problem=takes)

    def default_tiling(self) -> SparseMlaTiling:
        # Those with the fewest spills: no tiling has none.
        heads, layout = self.problem.h, self.problem.layout
        groups = 2 if heads <= 16 or layout == "bf16" else 1
        return SparseMlaTiling(16 if heads <= 16 else 32 if heads <= 32 else 64, 16, groups)

    def autotune_configs(self) -> list[Tiling]:
        own = self.default_tiling().tile_m
        return [SparseMlaTiling(own, n, groups) for n in (16, 32, 64) for groups in (1, 2)]

    @any_scale(0)
    def plan(self, *inputs: Any) -> CtKernel:
        self.require()
        return self._make(inputs, sparse_decode.new_outputs(self.problem, inputs[0]))

    def plan_empty(self) -> CtKernel:
        self.require()
        return self._make((), ())

    def _make(self, inputs: Any, outputs: Any) -> CtKernel:
        pd, ti = self.problem, self.tiling
        chunk = 64 if pd.layout == "v4" else 128
        constants = [
            pd.s, pd.h, tuple(LAYOUTS).index(pd.layout), pd.page, pd.extra_page, pd.lengths, pd.extra_lengths, pd.sink,
            ti.tile_m, ti.tile_n, chunk,
        ]  # fmt: skip

        def args(_: Any) -> tuple[Any, ...]:
            import torch

            given = sparse_decode.named(pd, *inputs)
            q, pointers, sizes = given["q"], [], []

            def begin(x: Any) -> Any:
                """The first element of a cache's part; of a cache without tokens, which nobody reads, any memory."""
                return x[0, 0, :1] if x.numel() else outputs[0].view(-1)[:4].view(x.dtype)[:1]

            for prefix in ("", "extra_"):
                cache = given.get(f"{prefix}cache", given["cache"])
                there = fields(pd.cache, cache)
                chosen = given.get(f"{prefix}indices", given["indices"])
                # What a layout has not is any tensor of the type.
                codes = (cache if there.codes is None else there.codes).view(torch.float8_e4m3fn)
                pointers += [
                    handle(begin(codes), f"{prefix}cache"),
                    handle(outputs[1] if there.scales is None else begin(there.scales), f"scales of {prefix}cache"),
                    handle(outputs[0] if there.plain is None else begin(there.plain), f"columns of {prefix}cache"),
                    handle(chosen, f"{prefix}indices"),
                    handle(given.get(f"{prefix}lengths", chosen), f"{prefix}topk_lens"),
                ]
                steps = [0 if x is None else x.stride(0) for x in (there.codes, there.scales, there.plain)]
                sizes += [cache.shape[0] * cache.shape[1], chosen.shape[2], *steps]
            named = {"scale": "cache_scale", "sink": "sink"}
            more = [handle(given.get(name, outputs[1]), argument) for name, argument in named.items()]
            handles = (handle(q, "q"), *pointers, *more, *(handle(x) for x in outputs))
            return (*handles, pd.scale * LOG2E, q.shape[0] * q.shape[1], *sizes, *constants)

        def grid(_: Any) -> tuple[int, ...]:
            b = inputs[0].shape[0] if inputs else pd.b
            return (-(-pd.h // ti.tile_m), b * pd.s, 1)

        def describe(_: Any) -> Any:
            scales = ct.uint8 if pd.layout == "v4" else ct.float32
            cache = [ct.float8_e4m3fn, scales, ct.bfloat16, ct.int32, ct.int32]
            handles = [ct.bfloat16, *cache, *cache, ct.float32, ct.float32, ct.bfloat16, ct.float32]
            return signature(handles, [ct.float32, *[ct.int32] * 11], constants)

        return CtKernel(
            sparse_mla,
            grid,
            args,
            inputs,
            outputs,
            ti,
            hints_fn=lambda _: {"num_worker_warps": 4 * ti.num_warpgroups},
            signature_fn=describe,
            name="sparse_mla",
            plan=self,
        )
