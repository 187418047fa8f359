"""Decoding over a mixed cache in cuTile: the o oldest tokens as latents, the n newest decompressed, both at once.

    q_latent ─► flash_mla        over the paged latents   ─► o_latent (b, s, h, 512), lse ─┐
                                                                    at the same time       ├─► mla_var6_plus ─► out, lse
    q_heads  ─► flash_attention  over the n newest tokens ─► o_heads (b, s, h, 128), lse ──┘

The two paths have outputs in different spaces: softmax-weighted latents, and softmax-weighted values. The last kernel
brings the first into the second with W_UV, head by head, and joins them by their log-sum-exps. With w = exp(lse - max):

    out = (w_old · W_UV·o_latent + w_new · o_heads) / (w_old + w_new)        lse = max + log(w_old + w_new)

`mla_var3.runtime.correctness.mixed` has the computation and its reference. n = 0 leaves out the second path (flash_mla
and its projection), o = 0 the first and the joining (flash_attention). How the paths divide the device is left to
its scheduler: the latent path is compute-bound when s is large, the other one reads 71 times as many bytes a token.

Architecture: Hopper (sm_90a), through HGMMA, TMA and cuTile's own warp specialisation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import cuda.tile as ct

from mla_var3.device import Device, Requirement
from mla_var3.errors import Infeasible, Unsupported
from mla_var3.kernel.cutile.lib.handles import ct_dtype, handle, signature
from mla_var3.kernel.cutile.mla.flash_attention.flash_attention.flash_attention import (
    FlashAttentionPlan,
    FlashAttentionTiling,
)
from mla_var3.kernel.cutile.mla.flash_mla.flash_mla.flash_mla import MAX_SPLITS, FlashMlaPlan
from mla_var3.runtime import CtKernel, KernelPipeline, Tiling, Verdict
from mla_var3.runtime.concurrent import ConcurrentKernels
from mla_var3.runtime.correctness.mixed import MixedPlan, old_problem, takes_mixed

if TYPE_CHECKING:
    from mla_var3.problem import MlaProblem
    from mla_var3.runtime.base import BaseKernel

ConstInt = ct.Constant[int]
ConstBool = ct.Constant[bool]

LATENT = 512
HEAD = 128
ROPE = 64
LN2 = 0.6931471805599453
LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class MlaVar6PlusTiling(Tiling):
    """Knobs of the kernel.

    tile_m: query rows (of all requests, one head) of a block of the joining kernel. tile_k: latent columns it takes at
    a time. old_splits: parts of the latent path, 0 chooses. new_tile_m, new_tile_n: query tokens and keys of a tile of
    the decompressed path, 64 or 128. The paths' other knobs are those that their own designs choose.
    """

    tile_m: int = 64
    tile_k: int = 128
    old_splits: int = 0
    new_tile_m: int = 64
    new_tile_n: int = 64

    def validate(self, pd: MlaProblem, device: Device | None = None) -> Verdict:
        if self.tile_m not in (64, 128):
            return Verdict.no(f"tile_m = {self.tile_m} is neither 64 nor 128.")
        if self.tile_k not in (64, 128, 256):
            return Verdict.no(f"tile_k = {self.tile_k} is not one of 64, 128, 256.")
        if not 0 <= self.old_splits <= MAX_SPLITS:
            return Verdict.no(f"old_splits = {self.old_splits} is outside 0..{MAX_SPLITS}.")
        if self.new_tile_m not in (64, 128):
            return Verdict.no(f"new_tile_m = {self.new_tile_m} is neither 64 nor 128.")
        return self.new_tiling().validate(pd, device)

    def new_tiling(self) -> FlashAttentionTiling:
        """The decompressed path's: one warpgroup, two blocks an SM for a 64 x 64 tile, else the default's columns."""
        if (self.new_tile_m, self.new_tile_n) == (64, 64):
            return FlashAttentionTiling(64, 64, 64, 128, num_warpgroups=1, occupancy=2)
        if self.new_tile_m == 64:
            return FlashAttentionTiling(64, self.new_tile_n, 64, 128, num_warpgroups=1)
        return FlashAttentionTiling(self.new_tile_m, self.new_tile_n)


def seen(LSES, at, inside):
    """Log-sum-exps in base 2 of rows at offsets `at`; rows without a key, which hold +inf, count as -inf."""
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
    """Grid (tiles of b · S query rows, H): out = W_UV · o_latent of one head, joined with o_heads."""
    tile = ct.bid(0)
    head = ct.bid(1)
    rows = b * S
    zero = ct.PaddingMode.ZERO
    latent = ct.Array.from_foreign(O_LATENT.foreign_pointer, (rows, H, 512), (H * 512, 512, 1))
    weight = ct.Array.from_foreign(W_UV.foreign_pointer, (H, 128, 512), (128 * 512, 512, 1))
    out = ct.Array.from_foreign(OUT.foreign_pointer, (rows, H, 128), (H * 128, 128, 1))
    o = ct.zeros((TM, 128), dtype=ct.float32)
    for c in range(512 // TK):
        x = ct.reshape(ct.load(latent, (tile, head, c), (TM, 1, TK), padding_mode=zero), (TM, TK))
        w = ct.reshape(ct.load(weight, (head, 0, c), (1, 128, TK)), (128, TK))
        o = ct.mma(x, ct.transpose(w), o)
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
    whole = ct.where(lse == float("-inf"), float("inf"), lse * LN2)
    LSE.get_raw_memory().store_offset(at, whole, mask=inside)


def _accepts(pd: MlaProblem) -> Verdict:
    if (pd.k, pd.p, pd.d) != (LATENT, ROPE, HEAD):
        return Verdict.no(
            f"written for latent 512, rope 64 and heads of 128; the problem has k = {pd.k}, p = {pd.p}, d = {pd.d}."
        )
    page = pd.page_size
    if page & (page - 1) or page < 16:
        return Verdict.no(f"pages of {page} tokens: cuTile tiles are powers of two, use pages of 16, 32, 64, …")
    if max(pd.b * pd.s * pd.h * LATENT, pd.n * pd.h * (HEAD + ROPE)) >= 2**31:
        return Verdict.no("offsets are 32 bits: b · s · h may be under 4194304, and n · h under 11184811.")
    return takes_mixed(pd)


def _offered(pd: MlaProblem) -> Verdict:
    if not pd.n:
        return Verdict.no("n = 0 keeps no token decompressed, which is flash_mla: use one of its versions.")
    return _accepts(pd)


class MlaVar6PlusPlan(MixedPlan):
    """Decoding over a mixed cache in cuTile, base version."""

    tiling_type = MlaVar6PlusTiling
    requires = Requirement(archs=("sm_90a",), dtypes=("bf16", "fp16"), features=("wgmma", "tma"), problem=_offered)
    deterministic = True

    def require(self) -> None:
        """As in the base, but n = 0 may be planned: flash_mla and its projection, with the inputs of this design."""
        wide = replace(self.requires, problem=_accepts)
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

    # ------------------------------------------------------------ the two paths
    def old_plan(self) -> FlashMlaPlan:
        """The latent path's plan."""
        plan = FlashMlaPlan(old_problem(self.problem), device=self.device)
        plan.compiled = self.compiled
        return plan.with_tiling(replace(plan.tiling, num_splits=self.tiling.old_splits))

    def _new_plan(self) -> FlashAttentionPlan:
        plan = FlashAttentionPlan(self.problem, self.tiling.new_tiling(), self.device)
        plan.compiled = self.compiled
        return plan

    def _join(self, tensors: tuple[Any, ...], outputs: tuple[Any, ...]) -> CtKernel:
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

    def plan(self, *inputs: Any) -> BaseKernel:
        import torch

        self.require()
        q_latent, q_heads, kv_cache, page_table, old_lens, k_new, v_new, w_uv = inputs
        pd, b = self.problem, q_heads.shape[0]
        out = q_heads.new_empty((b, pd.s, pd.h, HEAD))
        lse = torch.empty((b, pd.h, pd.s), dtype=torch.float32, device=q_heads.device)
        if not old_problem(pd).t:
            alone = self._new_plan().kernel_on((q_heads, k_new, v_new), (out, lse))
            return self._whole([alone], inputs, [])
        old = self.old_plan().plan(q_latent, kv_cache, page_table, old_lens)
        o_latent, lse_old = old.output_tensors
        if not pd.n:
            join = self._join((o_latent, lse_old, o_latent, lse_old, w_uv), (out, lse))
            return self._whole([old, join], inputs, [o_latent, lse_old, *old.workspace_tensors])
        o_heads, lse_new = torch.empty_like(out), torch.empty_like(lse)
        new = self._new_plan().kernel_on((q_heads, k_new, v_new), (o_heads, lse_new))
        join = self._join((o_latent, lse_old, o_heads, lse_new, w_uv), (out, lse))
        scratch = [o_latent, lse_old, o_heads, lse_new, *old.workspace_tensors]
        return self._whole([ConcurrentKernels([old, new], name="paths"), join], inputs, scratch)

    def plan_empty(self) -> BaseKernel:
        self.require()
        pd = self.problem
        if not old_problem(pd).t:
            return self._whole([self._new_plan().kernel_on((), ())], (), [])
        old, join = self.old_plan().plan_empty(), self._join((), ())
        if not pd.n:
            return self._whole([old, join], (), [])
        paths = ConcurrentKernels([old, self._new_plan().kernel_on((), ())], name="paths")
        return self._whole([paths, join], (), [])

    def _whole(self, stages: list[BaseKernel], inputs: tuple[Any, ...], workspaces: list[Any]) -> KernelPipeline:
        return KernelPipeline(
            stages,
            name="mla_var6_plus",
            input_tensors=inputs,
            workspace_tensors=workspaces,
            tiling=self.tiling,
            plan=self,
        )
