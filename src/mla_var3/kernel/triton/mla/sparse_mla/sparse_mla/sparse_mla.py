"""sparse_mla v0 in Triton: decode over packed caches, split over the indices, or over the tokens of a page table.

A program takes tile_m heads of one query token, and one split of its indices, those of the extra cache behind those of
the first:

    for each tile of tile_n indices:   indices → page, row → codes, scales, plain columns → K = [latent | rope] in bf16
                                       S = q_latent · latentᵀ + q_rope · ropeᵀ
                                       online softmax in base 2 → P → acc += P · latent
    one split:      out = acc / (l + exp(sink)) and lse are written as they are
    more splits:    normalised float32 partials, then `combine`, which knows the sink

A column is widened, multiplied by its scale in float32 and rounded to bf16 once; the one scale of layout flat is a
factor of the softmax and of out instead. v4 has no columns behind the values: its bf16 columns are the last of the 512.
Masks: an index that names no token of the cache, or stands at or past the request's length, loads nothing (zeros stand
in for it, so NaN in the cache never enters a product) and its logits are -inf. The split of a query token's indices
follows its own lengths, read on the device. Head tiles of one query token are neighbours in the grid: they read the
same tokens from L2. Where there is a page table in place of indices, position i names row i mod page of the page in
its entry i / page, and a query token's length ends with the token that it is itself. Runs on sm_89 and later, which
convert e4m3, and in Triton's interpreter. The base version.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from mla_var3.device import Device, Requirement
from mla_var3.kernel.triton.prims.combine import MAX_SPLITS
from mla_var3.kernel.triton.prims.numerics import dot, interpreted, round_to
from mla_var3.packed_cache import VALUES, layout_of
from mla_var3.runtime import KernelPipeline, KernelPlan, Tiling, TritonKernel, Verdict, limits
from mla_var3.workload import sparse_decode

if TYPE_CHECKING:
    from mla_var3.runtime import BaseKernel
    from mla_var3.workload.sparse_decode import SparseProblem

# Bytes of a packed token (`packed_cache`): of one in v32 and of its scales; of one in the two parts of a v4 page.
_V32, _V4 = layout_of("v32"), layout_of("v4")
_V32_ROW = tl.constexpr(_V32.token_bytes)
_V32_SCALES = tl.constexpr(_V32.scales * _V32.scale_bytes)
_V4_QUANTISED = tl.constexpr(_V4.quantised)
_V4_ROW = tl.constexpr(_V4.quantised + 2 * _V4.plain)
_V4_SCALES = tl.constexpr(_V4.scales + _V4.padding)
#: A split of fewer indices than this costs more in the combine than it brings.
_MIN_PER_SPLIT = 128


@dataclass(frozen=True)
class SparseMlaTiling(Tiling):
    """tile_m: heads a program. tile_n: indices a step. num_pipeline_stages: of loads in flight. num_warps: 4 or 8.

    num_splits: programs that share a query token's indices; 0 lets problem and device decide.
    """

    tile_m: int = 32
    tile_n: int = 16
    num_pipeline_stages: int = 1
    num_warps: int = 8
    num_splits: int = 0

    def validate(self, pd: SparseProblem, device: Device | None = None) -> Verdict:
        for name in ("tile_m", "tile_n"):
            value = getattr(self, name)
            if value < 16 or value & (value - 1):
                return Verdict.no(f"{name} = {value} must be a power of two of at least 16")
        if self.num_warps not in (1, 2, 4, 8, 16):
            return Verdict.no(f"num_warps = {self.num_warps} must be 1, 2, 4, 8 or 16")
        if not 1 <= self.num_pipeline_stages <= 8:
            return Verdict.no(f"num_pipeline_stages = {self.num_pipeline_stages} must be 1 to 8")
        if not 0 <= self.num_splits <= MAX_SPLITS:
            return Verdict.no(f"num_splits = {self.num_splits} must be 0 to {MAX_SPLITS}")
        if device is not None:
            threads = 32 * self.num_warps
            # The accumulator, and a tile of widened columns.
            registers, most = (self.tile_m + self.tile_n) * VALUES // threads, device.max_registers(threads)
            if registers > 0.7 * most:
                return Verdict.no(
                    f"accumulator and keys take {registers} of a thread's {most} registers; use smaller tiles"
                )
            smem = self.smem_bytes(pd)
            if smem > device.smem_per_block:
                return Verdict.no(f"needs about {smem} bytes of shared memory; a block has {device.smem_per_block}")
        programs = -(-pd.h // self.tile_m) * max(1, self.num_splits) * pd.b * pd.s
        return limits.all_of(
            limits.sparse_sizes(pd),
            limits.offsets(programs, f"the programs of {pd.b * pd.s:,} query tokens"),
        )

    def smem_bytes(self, pd: SparseProblem) -> int:
        """Queries, a tile of keys, and as much for each stage, whose bytes and scales Triton lays out by itself."""
        return (self.tile_m + self.tile_n * (1 + self.num_pipeline_stages)) * pd.columns * 2


@triton.jit
def widened(codes, INTERPRET: tl.constexpr):
    """float32 of e4m3 codes (uint8)."""
    if INTERPRET:
        # Sign, exponent and mantissa at their places in a float32 whose exponent is 120 too small, subnormals too.
        bits = codes.to(tl.uint32)
        small = ((bits & 0x80) << 24 | (bits & 0x7F) << 20).to(tl.float32, bitcast=True)
        return tl.where((bits & 0x7F) == 0x7F, float("nan"), small * 1.329227995784916e36)  # 2^120
    else:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def keys_of(
    Cache,
    page,  # (N,) int64
    row,
    exists,
    page_bytes,
    LAYOUT: tl.constexpr,
    VALUES: tl.constexpr,
    P: tl.constexpr,
    PAGE: tl.constexpr,
    N: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """latent (N, VALUES) and rope (N, P) bf16 of N tokens, zeros where none exists; of v4, whose P is 0, no rope."""
    column = tl.arange(0, VALUES)[None, :]
    there = exists[:, None]
    if LAYOUT == "bf16":
        token = (Cache + (page * (page_bytes // 2) + row * (VALUES + P)))[:, None]
        latent = tl.load(token + column, mask=there, other=0.0)
        rope = tl.load(token + VALUES + tl.arange(0, P)[None, :], mask=there, other=0.0)
    elif LAYOUT == "flat":
        token = (Cache + (page * page_bytes + row * (VALUES + P)))[:, None]
        latent = widened(tl.load(token + column, mask=there, other=0), INTERPRET)
        latent = round_to(latent, tl.bfloat16, INTERPRET)
        rope = widened(tl.load(token + VALUES + tl.arange(0, P)[None, :], mask=there, other=0), INTERPRET)
        rope = round_to(rope, tl.bfloat16, INTERPRET)
    elif LAYOUT == "v32":
        at = page * page_bytes + row * _V32_ROW
        Scales = (Cache + VALUES).to(tl.pointer_type(tl.float32), bitcast=True)
        Plain = (Cache + VALUES + _V32_SCALES).to(tl.pointer_type(tl.bfloat16), bitcast=True)
        codes = tl.load((Cache + at)[:, None] + column, mask=there, other=0)
        scales = tl.load((Scales + at // 4)[:, None] + tl.arange(0, 4)[None, :], mask=there, other=0.0)
        x = tl.reshape(widened(codes, INTERPRET), (N, 4, 128)) * scales[:, :, None]
        latent = round_to(tl.reshape(x, (N, VALUES)), tl.bfloat16, INTERPRET)
        rope = tl.load((Plain + at // 2)[:, None] + tl.arange(0, P)[None, :], mask=there, other=0.0)
    else:  # v4
        QUANTISED: tl.constexpr = _V4_QUANTISED
        at = page * page_bytes + row * _V4_ROW
        Plain = (Cache + QUANTISED).to(tl.pointer_type(tl.bfloat16), bitcast=True)
        codes = tl.load((Cache + at)[:, None] + column, mask=there & (column < QUANTISED), other=0)
        # An eighth scale, of nobody, meets codes of 0.
        powers = (Cache + (page * page_bytes + PAGE * _V4_ROW + row * _V4_SCALES))[:, None] + tl.arange(0, 8)[None, :]
        powers = tl.load(powers, mask=there & (tl.arange(0, 8)[None, :] < 7), other=0).to(tl.uint32)
        scales = tl.where(powers == 0, 0x400000, powers << 23).to(tl.float32, bitcast=True)
        x = tl.reshape(widened(codes, INTERPRET), (N, 8, 64)) * scales[:, :, None]
        latent = round_to(tl.reshape(x, (N, VALUES)), tl.bfloat16, INTERPRET)
        plain = (Plain + at // 2)[:, None] + (column - QUANTISED)
        plain = tl.load(plain, mask=there & (column >= QUANTISED), other=0.0)
        latent = tl.where(column < QUANTISED, latent, plain)
        rope = latent
    return latent, rope


@triton.jit
def attend(
    q_latent,
    q_rope,
    m,
    l,
    acc,
    Cache,
    Indices,  # of this query token, or the page table of its request
    length,  # indices, or tokens, that count
    begin,
    end,
    tokens,
    page_bytes,
    scale_log2,
    LAYOUT: tl.constexpr,
    VALUES: tl.constexpr,
    P: tl.constexpr,
    PAGE: tl.constexpr,
    PAGED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """The online softmax over indices begin .. end - 1 of one cache: (m, l, acc) in base 2."""
    lanes = tl.arange(0, BLOCK_N)
    for n in range(begin, end, BLOCK_N):
        position = n + lanes
        if PAGED:
            exists = position < length
            page = tl.cast(tl.load(Indices + position // PAGE, mask=exists, other=0), tl.int64)
            row = position % PAGE
        else:
            index = tl.load(Indices + position, mask=position < length, other=-1)
            exists = (index >= 0) & (index < tokens)
            index = tl.where(exists, index, 0)
            page = tl.cast(index // PAGE, tl.int64)
            row = index % PAGE
        latent, rope = keys_of(
            Cache, page, row, exists, page_bytes, LAYOUT, VALUES, P, PAGE, BLOCK_N, INTERPRET
        )  # fmt: skip
        logits = tl.zeros([q_latent.shape[0], BLOCK_N], dtype=tl.float32)
        if P > 0:
            logits = dot(q_rope, tl.trans(rope), logits, INTERPRET)
        logits = dot(q_latent, tl.trans(latent), logits, INTERPRET)
        logits = tl.where(exists[None, :], logits * scale_log2, float("-inf"))

        top = tl.maximum(m, tl.max(logits, 1))
        base = tl.where(top == float("-inf"), 0.0, top)  # a row that has seen no key yet
        weights = tl.exp2(logits - base[:, None])
        shrink = tl.exp2(m - base)
        l = l * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        acc = dot(round_to(weights, tl.bfloat16, INTERPRET), latent, acc, INTERPRET)
        m = top
    return m, l, acc


@triton.jit(
    do_not_specialize=["tokens", "topk", "extra_tokens", "extra_topk", "num_splits", "head_tiles", "query_tokens"]
)
def sparse_mla(
    Q,  # (query tokens, H, VALUES + P) bf16, contiguous, global
    Cache,  # uint8, or bf16 in layout bf16: tokens and pages as LAYOUT has them
    Indices,  # (query tokens, topk) int32; PAGED: the page table (batch, topk)
    Lengths,  # (batch,) int32; PAGED: cached tokens
    ExtraCache,  # as above, of the extra cache
    ExtraIndices,
    ExtraLengths,
    FlatScale,  # (1,) float32, of layout flat
    Sink,  # (H,) float32; read where there is one split
    Out,  # SPLIT: (num_splits, query tokens, H, VALUES) float32, else (query tokens, H, VALUES) bf16
    Lse,  # SPLIT: (num_splits, query tokens, H) float32, -inf where empty, else (batch, H, S), +inf where empty
    scale,
    page_bytes,
    extra_page_bytes,
    tokens,
    topk,
    extra_tokens,
    extra_topk,
    num_splits,
    head_tiles,
    query_tokens,
    S: tl.constexpr,
    H: tl.constexpr,
    VALUES: tl.constexpr,
    P: tl.constexpr,
    LAYOUT: tl.constexpr,
    PAGE: tl.constexpr,
    PAGED: tl.constexpr,
    EXTRA_PAGE: tl.constexpr,  # 0: no extra cache
    LENGTHS: tl.constexpr,  # whether there are any; else the tensor is another one, and not read. So the next two
    EXTRA_LENGTHS: tl.constexpr,
    SINK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    WIDTH: tl.constexpr = VALUES + P
    LOG2E: tl.constexpr = 1.4426950408889634
    LN2: tl.constexpr = 0.6931471805599453

    program = tl.program_id(0)
    head = program % head_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    split = (program // head_tiles) % num_splits
    token = tl.cast((program // head_tiles) // num_splits, tl.int64)  # of all requests
    request = token // S
    valid = head < H
    column = tl.arange(0, VALUES)[None, :]

    length = topk
    chosen = token
    if PAGED:
        chosen = request
        length = tl.maximum(0, tl.load(Lengths + request) - tl.cast(S - 1 - token % S, tl.int32))
    if LENGTHS:
        length = tl.maximum(0, tl.minimum(length, tl.load(Lengths + request)))
    steps = tl.cdiv(length, BLOCK_N)
    all_steps = steps
    if EXTRA_PAGE > 0:
        extra_length = extra_topk
        if EXTRA_LENGTHS:
            extra_length = tl.maximum(0, tl.minimum(extra_length, tl.load(ExtraLengths + request)))
        all_steps += tl.cdiv(extra_length, BLOCK_N)
    each = tl.cdiv(all_steps, num_splits)
    first = split * each
    last = tl.minimum(first + each, all_steps)

    queries = Q + token * (H * WIDTH)
    rows = head[:, None] * WIDTH
    q_latent = tl.load(queries + (rows + column), mask=valid[:, None], other=0.0)
    q_rope = q_latent
    if P > 0:
        q_rope = tl.load(queries + (rows + VALUES + tl.arange(0, P)[None, :]), mask=valid[:, None], other=0.0)
    factor = 1.0
    if LAYOUT == "flat":
        factor = tl.load(FlatScale)
    scale_log2 = scale * LOG2E * factor
    m = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    l = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, VALUES], dtype=tl.float32)
    m, l, acc = attend(
        q_latent, q_rope, m, l, acc, Cache, Indices + chosen * topk, length,
        first * BLOCK_N, tl.minimum(last, steps) * BLOCK_N, tokens, page_bytes, scale_log2,
        LAYOUT, VALUES, P, PAGE, PAGED, BLOCK_N, INTERPRET,
    )  # fmt: skip
    if EXTRA_PAGE > 0:
        m, l, acc = attend(
            q_latent, q_rope, m, l, acc, ExtraCache, ExtraIndices + token * extra_topk,
            extra_length, tl.maximum(first - steps, 0) * BLOCK_N, (last - steps) * BLOCK_N, extra_tokens,
            extra_page_bytes, scale_log2, LAYOUT, VALUES, P, EXTRA_PAGE, False, BLOCK_N, INTERPRET,
        )  # fmt: skip

    empty = l == 0.0
    total = tl.where(empty, 1.0, l)
    lse = tl.where(empty, float("-inf"), m * LN2 + tl.log(total))
    first_row = token * H
    if SPLIT:
        part = split * (tl.cast(query_tokens, tl.int64) * H) + first_row
        out = acc * factor / total[:, None]
        tl.store(Out + part * VALUES + (head[:, None] * VALUES + column), out, mask=valid[:, None])
        tl.store(Lse + part + head, lse, mask=valid)
    else:
        if SINK:
            sink = tl.load(Sink + head, mask=valid, other=float("-inf"))
            total += tl.exp2(sink * LOG2E - tl.where(empty, 0.0, m))
        out = round_to(acc * factor / total[:, None], tl.bfloat16, INTERPRET)
        tl.store(Out + first_row * VALUES + (head[:, None] * VALUES + column), out, mask=valid[:, None])
        lse = tl.where(empty, float("inf"), lse)
        tl.store(Lse + request * (H * S) + (head * S + token % S), lse, mask=valid)


@triton.jit(do_not_specialize=["num_splits", "rows"])
def combine(
    PartialOut,  # (num_splits, rows, K) float32, contiguous, global
    PartialLse,  # (num_splits, rows) float32, natural log, -inf where a split attends to no token
    Sink,  # (H,) float32
    Out,  # (rows, K) bf16
    Lse,  # (batch, H, S) float32, +inf where a row attends to no token
    num_splits,
    rows,  # query tokens · H
    S: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    SPLITS: tl.constexpr,  # power of two of at least num_splits
    SINK: tl.constexpr,  # whether there is one; else the tensor is another one, and not read
    INTERPRET: tl.constexpr,
):
    """out = Σ wᵢ outᵢ / (exp(sink) + Σ wᵢ) with wᵢ = exp(lseᵢ) of one row, always in the same order."""
    row = tl.cast(tl.program_id(0), tl.int64)
    column = tl.arange(0, K)
    split = tl.arange(0, SPLITS)
    lses = tl.load(PartialLse + split * tl.cast(rows, tl.int64) + row, mask=split < num_splits, other=float("-inf"))
    top = tl.max(lses, 0)
    # Of LSEs that are -inf and NaN the maximum may be -inf: whether there is a token, the sum says, which is NaN then.
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(lses - base), 0)
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    lse = tl.where(empty, float("inf"), base + tl.log(total))
    if SINK:
        total += tl.exp(tl.load(Sink + row % H) - base)
    acc = tl.zeros([K], dtype=tl.float32)
    for i in range(0, num_splits):
        at = i * tl.cast(rows, tl.int64) + row
        acc += tl.exp(tl.load(PartialLse + at) - base) * tl.load(PartialOut + at * K + column)
    tl.store(Out + row * K + column, round_to(acc / total, tl.bfloat16, INTERPRET))
    token = row // H
    tl.store(Lse + (token // S * H + row % H) * S + token % S, lse)


class SparseMlaPlan(KernelPlan):
    """Plan of the kernel and, where the indices are split, of its combine."""

    workload = sparse_decode.WORKLOAD
    tiling_type = SparseMlaTiling
    requires = Requirement(archs=("sm_89+",), dtypes=("bf16",), options=("paged",))

    def default_tiling(self) -> SparseMlaTiling:
        """Without spills on sm_90a, where 64 heads, or 32 with two stages and scales, take more than 255 registers."""
        if self.problem.h > 16:
            return SparseMlaTiling()
        staged = SparseMlaTiling(tile_m=16, tile_n=32, num_pipeline_stages=1 if self.problem.layout == "bf16" else 2)
        return staged if staged.validate(self.problem, self.device) else SparseMlaTiling(tile_m=16)

    def autotune_configs(self) -> list[Tiling]:
        tiles = [m for m in (16, 32, 64) if m < 2 * self.problem.h or m == 16]
        return [
            SparseMlaTiling(tile_m=m, tile_n=n, num_pipeline_stages=stages, num_warps=warps, num_splits=splits)
            for m in tiles[-2:]
            for n in (16, 32)
            for stages in (1, 2, 3)
            for warps in ((4, 8) if m < 64 else (8,))
            for splits in (0, 1)
        ]

    def num_splits(self, query_tokens: int) -> int:
        """Splits of every query token's indices: enough programs for one wave."""
        tiling = self.tiling
        if tiling.num_splits:
            return tiling.num_splits
        sms = (self.device or Device.assumed()).num_sms
        chosen = sum(part.topk for part in self.problem.parts)
        return max(1, min(sms // (query_tokens * self._head_tiles), -(-chosen // _MIN_PER_SPLIT), MAX_SPLITS))

    @property
    def _head_tiles(self) -> int:
        return -(-self.problem.h // self.tiling.tile_m)

    def plan(self, *inputs: torch.Tensor) -> BaseKernel:
        q = inputs[0]
        b, s, h, _ = q.shape
        splits = self.num_splits(b * s)
        outputs = sparse_decode.new_outputs(self.problem, q)
        if splits == 1:
            return self._main(inputs, outputs, (), splits, b)
        partials = (
            q.new_empty((splits, b * s, h, VALUES), dtype=torch.float32),
            q.new_empty((splits, b * s, h), dtype=torch.float32),
        )
        return self._pipeline(inputs, outputs, partials, splits, b)

    def plan_empty(self) -> BaseKernel:
        splits = self.num_splits(self.problem.b * self.problem.s)
        if splits == 1:
            return self._main((), (), (), splits, self.problem.b)
        return self._pipeline((), (), (), splits, self.problem.b)

    def _pipeline(self, inputs: Any, outputs: Any, partials: Any, splits: int, b: int) -> KernelPipeline:
        pd = self.problem
        rows = b * pd.s * pd.h
        sink = sparse_decode.named(pd, *inputs).get("sink", partials[1]) if inputs else None
        joined = TritonKernel(
            combine,
            grid_fn=lambda _: (rows,),
            args_fn=lambda _: (*partials, sink, *outputs, splits, rows),
            input_tensors=(*partials, sink),
            output_tensors=outputs,
            tiling=None,
            meta_fn=lambda _: {
                "S": pd.s, "H": pd.h, "K": VALUES, "SPLITS": MAX_SPLITS, "SINK": pd.sink,
                "INTERPRET": interpreted(combine),
            },
            options_fn=lambda _: {"num_warps": 4, "num_stages": 3},
            signature_fn=lambda _: {
                "PartialOut": "*fp32", "PartialLse": "*fp32", "Sink": "*fp32:1", "Out": "*bf16", "Lse": "*fp32",
                "num_splits": "i32", "rows": "i32",
            },
        )  # fmt: skip
        main = self._main(inputs, (), partials, splits, b)
        return KernelPipeline([main, joined], name="sparse_mla", tiling=self.tiling, plan=self)

    def _main(self, inputs: Any, outputs: Any, partials: Any, splits: int, b: int) -> TritonKernel:
        pd, head_tiles = self.problem, self._head_tiles
        split = splits > 1
        target = partials if split else outputs
        bytes_of = "*bf16" if pd.layout == "bf16" else "*u8"
        aligned = pd.cache.page_bytes(pd.page) % 16 == 0
        element = "fp32" if split else "bf16"
        signature = {
            "Q": "*bf16", "Cache": bytes_of, "Indices": "*i32", "Lengths": "*i32:1", "ExtraCache": bytes_of,
            "ExtraIndices": "*i32", "ExtraLengths": "*i32:1", "FlatScale": "*fp32:1", "Sink": "*fp32:1",
            "Out": f"*{element}", "Lse": "*fp32", "scale": "fp32", "page_bytes": "i32:16" if aligned else "i32",
            "extra_page_bytes": "i32:16", "tokens": "i32", "topk": "i32", "extra_tokens": "i32", "extra_topk": "i32",
            "num_splits": "i32", "head_tiles": "i32", "query_tokens": "i32",
        }  # fmt: skip

        def args(_: Any) -> tuple[Any, ...]:
            given = sparse_decode.named(pd, *inputs)
            q, indices = given["q"], given["page_table" if pd.paged else "indices"]
            pointers: list[Any] = []
            sizes: list[tuple[int, int, int]] = []
            for prefix in ("", "extra_"):
                cache = given.get(f"{prefix}cache", given["cache"])
                chosen = given.get(f"{prefix}indices", indices)
                lengths = "seq_lens" if pd.paged else f"{prefix}lengths"
                pointers += [cache, chosen, given.get(lengths, indices)]
                page_bytes = cache.stride(0) * cache.element_size()
                sizes.append((page_bytes, cache.shape[0] * cache.shape[1], chosen.shape[-1]))
            (page_bytes, tokens, topk), (extra_page_bytes, extra_tokens, extra_topk) = sizes
            return (
                q, *pointers, given.get("scale", q), given.get("sink", q), *target, pd.scale, page_bytes,
                extra_page_bytes, tokens, topk, extra_tokens, extra_topk, splits, head_tiles, b * pd.s,
            )  # fmt: skip

        def meta(t: SparseMlaTiling) -> dict[str, Any]:
            return {
                "S": pd.s, "H": pd.h, "VALUES": VALUES, "P": pd.columns - VALUES, "LAYOUT": pd.layout,
                "PAGE": pd.page, "PAGED": pd.paged, "EXTRA_PAGE": pd.extra_page, "LENGTHS": pd.lengths and not pd.paged,
                "EXTRA_LENGTHS": pd.extra_lengths, "SINK": pd.sink, "BLOCK_M": t.tile_m, "BLOCK_N": t.tile_n,
                "SPLIT": split, "INTERPRET": interpreted(sparse_mla),
            }  # fmt: skip

        return TritonKernel(
            sparse_mla,
            grid_fn=lambda _: (head_tiles * splits * b * pd.s,),
            args_fn=args,
            input_tensors=inputs,
            output_tensors=outputs,
            tiling=self.tiling,
            meta_fn=meta,
            options_fn=lambda t: {"num_warps": t.num_warps, "num_stages": t.num_pipeline_stages},
            signature_fn=lambda _: signature,
            workspace_tensors=partials,
            plan=self,
        )
