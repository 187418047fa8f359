"""flash_mla v0 in Triton: absorbed MLA decode, split over the keys.

A program takes tile_m query rows (token, head) of one request and one latent cache, and one split of its keys:

    for each tile of tile_n keys:   page table → K = [latent | rope]        (one load serves K and V)
                                    S = q_latent · latentᵀ + q_rope · ropeᵀ
                                    online softmax in base 2 → P → acc += P · latent
    one split:      out = acc / l and lse are written as they are
    more splits:    normalised float32 partials, then `lib/combine.py`

The split of a request's keys follows its own length, read on the device, so lengths may change under a bound kernel.
Row tiles of one request are neighbours in the grid: they read the same keys from L2. Masks: keys at or past the
length are not loaded (zeros stand in for them, so NaN in the padding never enters a product) and their logits are -inf.
Runs on sm_80 and later, and in Triton's interpreter. First version: the online softmax and split-KV are those of
FlashAttention-2 and Flash-Decoding; the single load of K and V is the point of MLA, as in FlashMLA.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from mla_var3.device import Device, Requirement
from mla_var3.kernel.triton.prims.combine import MAX_SPLITS, combine_kernel
from mla_var3.kernel.triton.prims.numerics import dot, interpreted, round_to
from mla_var3.runtime import KernelPipeline, KernelPlan, Tiling, TritonKernel, Verdict, limits
from mla_var3.workload import decode

if TYPE_CHECKING:
    from mla_var3.runtime import BaseKernel
    from mla_var3.workload.decode import MlaProblem

#: A split shorter than this many keys costs more in the combine than it brings.
_MIN_KEYS_PER_SPLIT = 256


def _power_of_two(x: int) -> bool:
    return x >= 16 and x & (x - 1) == 0


def _takes(problem: MlaProblem) -> Verdict:
    if not (_power_of_two(problem.k) and _power_of_two(problem.p)):
        return Verdict.no(f"k and p must be powers of two of at least 16; they are {problem.k} and {problem.p}")
    return Verdict.yes()


@dataclass(frozen=True)
class FlashMlaTiling(Tiling):
    """tile_m: query rows a program. tile_n: keys a step. num_pipeline_stages: key tiles in flight.

    num_warps: 4 or 8. num_splits: programs that share a request's keys; 0 lets problem and device decide.
    """

    tile_m: int = 64
    tile_n: int = 64
    num_pipeline_stages: int = 2
    num_warps: int = 8
    num_splits: int = 0

    def validate(self, pd: MlaProblem, device: Device | None = None) -> Verdict:
        for name in ("tile_m", "tile_n"):
            value = getattr(self, name)
            if not _power_of_two(value):
                return Verdict.no(f"{name} = {value} must be a power of two of at least 16")
        if self.num_warps not in (1, 2, 4, 8, 16):
            return Verdict.no(f"num_warps = {self.num_warps} must be 1, 2, 4, 8 or 16")
        if not 1 <= self.num_pipeline_stages <= 8:
            return Verdict.no(f"num_pipeline_stages = {self.num_pipeline_stages} must be 1 to 8")
        if not 0 <= self.num_splits <= MAX_SPLITS:
            return Verdict.no(f"num_splits = {self.num_splits} must be 0 to {MAX_SPLITS}")
        if device is not None:
            smem = self.smem_bytes(pd)
            if smem > device.smem_per_block:
                return Verdict.no(f"needs about {smem} bytes of shared memory; a block has {device.smem_per_block}")
            threads = 32 * self.num_warps
            registers, most = self.tile_m * pd.k // threads, device.max_registers(threads)
            if registers > 0.6 * most:
                return Verdict.no(
                    f"the accumulator takes {registers} of a thread's {most} registers; use a smaller tile_m"
                )
        programs = -(-pd.rows // self.tile_m) * max(1, self.num_splits) * pd.b * pd.h_kv
        return limits.all_of(
            limits.decode_sizes(pd),
            limits.offsets(programs, f"the programs of {pd.b:,} requests in {max(1, self.num_splits)} splits"),
        )

    def smem_bytes(self, pd: MlaProblem) -> int:
        """Queries and key tiles; what Triton adds for reductions and layout changes is not counted."""
        return (self.tile_m + self.num_pipeline_stages * self.tile_n) * (pd.k + pd.p) * pd.element_bytes


@triton.jit(do_not_specialize=["PageTable", "SeqLens", "max_pages", "num_splits", "row_tiles", "batch"])
def flash_mla(
    Q,  # (batch, S, H, K + P) bf16 or fp16, contiguous, global; H = H_KV · GROUP
    KV,  # (num_pages, PAGE, H_KV, K + P) same dtype, contiguous
    PageTable,  # (batch, max_pages) int32; entries past a request's last page hold anything
    SeqLens,  # (batch,) int32
    Out,  # SPLIT: (num_splits, batch, S, H, K) float32, else (batch, S, H, K) of Q's dtype
    Lse,  # SPLIT: (num_splits, batch, S, H) float32, -inf where empty, else (batch, H, S), +inf where empty
    scale,
    max_pages,
    num_splits,
    row_tiles,  # ceil(S · GROUP / BLOCK_M)
    batch,
    S: tl.constexpr,
    GROUP: tl.constexpr,
    H_KV: tl.constexpr,
    K: tl.constexpr,
    P: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    SPLIT: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    H: tl.constexpr = H_KV * GROUP
    WIDTH: tl.constexpr = K + P
    DTYPE: tl.constexpr = Q.dtype.element_ty
    LOG2E: tl.constexpr = 1.4426950408889634
    LN2: tl.constexpr = 0.6931471805599453

    program = tl.program_id(0)
    row_tile = program % row_tiles
    split = (program // row_tiles) % num_splits
    request = (program // row_tiles) // num_splits
    kv_head = request % H_KV
    request = tl.cast(request // H_KV, tl.int64)

    length = tl.load(SeqLens + request)
    r = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)  # token-major: r = token · GROUP + head of the group
    valid = r < S * GROUP
    token = r // GROUP
    head = kv_head * GROUP + r % GROUP
    row = token * H + head  # within the request; 64-bit offsets are kept out of vectors, where they cost registers
    first_row = request * S * H
    latent_columns = tl.arange(0, K)
    rope_columns = K + tl.arange(0, P)

    # Keys of this split that any row of the tile may see.
    tiles = tl.cdiv(tl.cdiv(length, BLOCK_N), num_splits)
    begin = split * tiles * BLOCK_N
    end = tl.minimum(begin + tiles * BLOCK_N, length)
    if CAUSAL:
        last_token = tl.minimum(row_tile * BLOCK_M + BLOCK_M, S * GROUP) - 1
        end = tl.minimum(end, length - S + 1 + last_token // GROUP)
        limit = length - S + 1 + token  # keys that a row sees

    if begin < end:
        queries = Q + first_row * WIDTH
        q_latent = tl.load(queries + (row[:, None] * WIDTH + latent_columns[None, :]), mask=valid[:, None], other=0.0)
        q_rope = tl.load(queries + (row[:, None] * WIDTH + rope_columns[None, :]), mask=valid[:, None], other=0.0)
        m = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        l = tl.zeros([BLOCK_M], dtype=tl.float32)
        acc = tl.zeros([BLOCK_M, K], dtype=tl.float32)
        scale_log2 = scale * LOG2E
        pages = PageTable + request * max_pages
        lanes = tl.arange(0, BLOCK_N)
        for n in range(begin, end, BLOCK_N):
            position = n + lanes
            exists = position < length
            if PAGE % BLOCK_N == 0:  # the whole tile lies on one page
                page = tl.cast(tl.load(pages + n // PAGE), tl.int64)
                tile = KV + ((page * PAGE + n % PAGE) * H_KV + kv_head) * WIDTH
                keys = tile + lanes * (H_KV * WIDTH)
            else:
                page = tl.cast(tl.load(pages + position // PAGE, mask=exists, other=0), tl.int64)
                keys = KV + ((page * PAGE + position % PAGE) * H_KV + kv_head) * WIDTH
            latent = tl.load(keys[:, None] + latent_columns[None, :], mask=exists[:, None], other=0.0)
            rope = tl.load(keys[:, None] + rope_columns[None, :], mask=exists[:, None], other=0.0)

            logits = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
            logits = dot(q_rope, tl.trans(rope), logits, INTERPRET)
            logits = dot(q_latent, tl.trans(latent), logits, INTERPRET)
            visible = exists[None, :]
            if CAUSAL:
                visible = position[None, :] < limit[:, None]
            logits = tl.where(visible, logits * scale_log2, float("-inf"))

            top = tl.maximum(m, tl.max(logits, 1))
            base = tl.where(top == float("-inf"), 0.0, top)  # a row that has seen no key yet
            weights = tl.exp2(logits - base[:, None])
            shrink = tl.exp2(m - base)
            l = l * shrink + tl.sum(weights, 1)
            acc = acc * shrink[:, None]
            acc = dot(round_to(weights, DTYPE, INTERPRET), latent, acc, INTERPRET)
            m = top

        empty = l == 0.0
        total = tl.where(empty, 1.0, l)
        out = acc / total[:, None]
        lse = tl.where(empty, float("-inf"), m * LN2 + tl.log(total))
        if SPLIT:
            part = split * (tl.cast(batch, tl.int64) * S * H) + first_row
            tl.store(Out + part * K + (row[:, None] * K + latent_columns[None, :]), out, mask=valid[:, None])
            tl.store(Lse + part + row, lse, mask=valid)
        else:
            rounded = round_to(out, DTYPE, INTERPRET)
            tl.store(Out + first_row * K + (row[:, None] * K + latent_columns[None, :]), rounded, mask=valid[:, None])
            lse = tl.where(empty, float("inf"), lse)
            tl.store(Lse + first_row + (head * S + token), lse, mask=valid)
    else:
        if SPLIT:  # the combine reads no output where lse is -inf
            part = split * (tl.cast(batch, tl.int64) * S * H) + first_row
            tl.store(Lse + part + row, tl.full([BLOCK_M], float("-inf"), dtype=tl.float32), mask=valid)
        else:
            zeros = tl.zeros([BLOCK_M, K], dtype=DTYPE)
            tl.store(Out + first_row * K + (row[:, None] * K + latent_columns[None, :]), zeros, mask=valid[:, None])
            nothing = tl.full([BLOCK_M], float("inf"), dtype=tl.float32)
            tl.store(Lse + first_row + (head * S + token), nothing, mask=valid)


class FlashMlaPlan(KernelPlan):
    """Plan of the kernel and, where the keys are split, of its combine."""

    workload = decode.WORKLOAD
    tiling_type = FlashMlaTiling
    requires = Requirement(archs=("sm_80+",), dtypes=("bf16", "fp16"), problem=_takes)

    def default_tiling(self) -> FlashMlaTiling:
        rows = self.problem.rows
        choices = [FlashMlaTiling(tile_m=16, tile_n=64, num_warps=4)]
        if rows > 16:
            choices = [FlashMlaTiling(tile_m=64 if rows > 32 else 32, tile_n=64)]
        # Consumer GPUs have 99 KiB of shared memory a block: smaller tiles there.
        choices += [FlashMlaTiling(tile_m=32, tile_n=16), FlashMlaTiling(tile_m=16, tile_n=16, num_warps=4)]
        return next((c for c in choices if c.validate(self.problem, self.device)), choices[0])

    def autotune_configs(self) -> list[Tiling]:
        rows = self.problem.rows
        tiles = [m for m in (16, 32, 64) if m < 2 * rows or m == 16]
        return [
            FlashMlaTiling(tile_m=m, tile_n=n, num_pipeline_stages=stages, num_warps=warps, num_splits=splits)
            for m in tiles[-2:]
            for n, stages in ((16, 4), (32, 3), (64, 2))
            for warps in ((4, 8) if m < 64 else (8,))
            for splits in (0, 1)
        ]

    def num_splits(self, b: int) -> int:
        """Splits of every request's keys for b requests of up to problem.t tokens: enough programs for one wave."""
        tiling = self.tiling
        if tiling.num_splits:
            return tiling.num_splits
        sms = (self.device or Device.assumed()).num_sms
        programs = b * self.problem.h_kv * self._row_tiles
        longest = max(self.problem.seq_lens, default=0)
        return max(1, min(sms // programs, -(-longest // _MIN_KEYS_PER_SPLIT), MAX_SPLITS))

    @property
    def _row_tiles(self) -> int:
        return -(-self.problem.rows // self.tiling.tile_m)

    def plan(self, *inputs: torch.Tensor) -> BaseKernel:
        q = inputs[0]
        b, s, h, _ = q.shape
        splits = self.num_splits(b)
        out = q.new_empty((b, s, h, self.problem.k))
        lse = q.new_empty((b, h, s), dtype=torch.float32)
        if splits == 1:
            return self._main(inputs, (out, lse), (), splits, b)
        partials = (
            q.new_empty((splits, b, s, h, self.problem.k), dtype=torch.float32),
            q.new_empty((splits, b, s, h), dtype=torch.float32),
        )
        return self._pipeline(inputs, (out, lse), partials, splits, b)

    def plan_empty(self) -> BaseKernel:
        splits = self.num_splits(self.problem.b)
        if splits == 1:
            return self._main((), (), (), splits, self.problem.b)
        return self._pipeline((), (), (), splits, self.problem.b)

    def _pipeline(self, inputs: Any, outputs: Any, partials: Any, splits: int, b: int) -> KernelPipeline:
        pd = self.problem
        main = self._main(inputs, (), partials, splits, b)
        joined = combine_kernel(
            partials, outputs, num_splits=splits, b=b, s=pd.s, h=pd.h, k=pd.k, dtype=pd.dtype
        )  # fmt: skip
        return KernelPipeline([main, joined], name="flash_mla", tiling=self.tiling, plan=self)

    def _main(self, inputs: Any, outputs: Any, partials: Any, splits: int, b: int) -> TritonKernel:
        pd, row_tiles = self.problem, self._row_tiles
        split = splits > 1
        target = partials if split else outputs
        element = "fp32" if split else pd.dtype
        signature = {
            "Q": f"*{pd.dtype}", "KV": f"*{pd.dtype}", "PageTable": "*i32:1", "SeqLens": "*i32:1",
            "Out": f"*{element}", "Lse": "*fp32", "scale": "fp32",
            "max_pages": "i32", "num_splits": "i32", "row_tiles": "i32", "batch": "i32",
        }  # fmt: skip

        def args(_: Any) -> tuple[Any, ...]:
            return (*inputs, *target, pd.scale, inputs[2].shape[1], splits, row_tiles, b)

        def meta(t: FlashMlaTiling) -> dict[str, Any]:
            return {
                "S": pd.s, "GROUP": pd.group, "H_KV": pd.h_kv, "K": pd.k, "P": pd.p, "PAGE": pd.page_size,
                "BLOCK_M": t.tile_m, "BLOCK_N": t.tile_n, "CAUSAL": pd.causal and pd.s > 1, "SPLIT": split,
                "INTERPRET": interpreted(flash_mla),
            }  # fmt: skip

        return TritonKernel(
            flash_mla,
            grid_fn=lambda _: (row_tiles * splits * b * pd.h_kv,),
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
