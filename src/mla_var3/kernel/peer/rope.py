"""Libraries that rotate queries and keys and append to the cache: FlashInfer (`flashinfer_rope_append`), and what
torch.compile makes of both (`torch_compile_rope_append`)."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from mla_var3.catalogue.libraries import Library
from mla_var3.device import Requirement
from mla_var3.errors import Verdict
from mla_var3.kernel.library import Attached, NoKnobs, PeerMixin, compiled, has_widths, is_here
from mla_var3.runtime.plan import KernelPlan
from mla_var3.workload import rope
from mla_var3.workload.rope import RopeProblem


def flashinfer_takes(problem: RopeProblem) -> Verdict:
    widths = has_widths("flashinfer_rope_append", problem)
    return is_here("flashinfer_rope_append")(problem) if widths else widths


class FlashInferRopeAppendPlan(PeerMixin, KernelPlan):
    """FlashInfer's rotation of queries and keys and its append to a paged MLA cache.

    These are two launches, as it has none for both in bf16.

    Latent and rope columns of the cache are two tensors to it, which may be views of one. The rotation is called below
    its public function, which takes no rows that lie apart. Where tokens go is told by requests, pages and positions,
    made from the slots in `plan()`, as an engine makes them once a step. Both compile with nvcc when they are first
    used.

    Outputs (out, cache).
    """

    workload = rope.WORKLOAD
    tiling_type = NoKnobs
    peer = "flashinfer_rope_append"
    requires = Requirement(archs=("sm_80+",), problem=flashinfer_takes)
    leaves_out = ("in_place", "skipped", "none", "beyond", "planned_many", "absorbed")

    def attach(self, library: Library, *inputs: Any) -> Attached:
        import torch

        q, latent, rope_, positions, slots, table = inputs
        pd, outputs = self.problem, rope.new_outputs(self.problem, q)
        out, cache = outputs
        rotate = import_module("flashinfer.rope")._apply_rope_pos_ids_cos_sin_cache
        append = import_module("flashinfer.page").append_paged_mla_kv_cache
        key = torch.empty_like(rope_)
        # A request for each page, full, so that a slot is a request and a position.
        pages = torch.arange(len(cache) + 1, dtype=torch.int32, device=q.device)
        full = torch.full_like(pages[1:], pd.page)
        request, position = (slots // pd.page).int(), (slots % pd.page).int()

        def call() -> None:
            rotate(
                q[..., -pd.p :], rope_[:, None], out[..., pd.k :], key[:, None], table, positions, pd.interleaved
            )  # fmt: skip
            append(latent, key, request, position, cache[..., : pd.k], cache[..., pd.k :], pages[:-1], pages, full)

        return Attached(
            call, lambda: outputs, workspaces=(key,), keep=(pages, full, request, position), outputs=outputs
        )  # fmt: skip


def rope_append(
    q: Any, latent: Any, rope_: Any, positions: Any, slots: Any, table: Any, out: Any, cache: Any, interleaved: bool
) -> None:
    p, k = rope_.shape[1], latent.shape[1]
    turns = table[positions]
    cosines, sines = turns[:, : p // 2], turns[:, p // 2 :]
    turned = rope.rotated(q[..., -p:].float(), cosines[:, None], sines[:, None], interleaved=interleaved)
    out[..., k:] = turned.to(out.dtype)
    key = rope.rotated(rope_.float(), cosines, sines, interleaved=interleaved).to(cache.dtype)
    cache[slots // cache.shape[1], slots % cache.shape[1], :k] = latent
    cache[slots // cache.shape[1], slots % cache.shape[1], k:] = key


class TorchCompileRopeAppendPlan(PeerMixin, KernelPlan):
    """What torch.compile makes of the rotation and the append that are written in torch, in one function.

    Compiled for the shape at hand (no dynamic sizes) with tuning on. It writes into the tensors that it is given.
    Tokens without a slot are left out of the check: dropping them takes a size that only the device knows.

    Outputs (out, cache).
    """

    workload = rope.WORKLOAD
    tiling_type = NoKnobs
    peer = "torch_compile_rope_append"
    requires = Requirement(archs=("sm_80+",), problem=is_here("torch_compile_rope_append"))
    plans_lengths = False
    leaves_out = ("skipped", "none", "beyond", "planned_many", "absorbed")

    def attach(self, library: Library, *inputs: Any) -> Attached:
        outputs, run = rope.new_outputs(self.problem, inputs[0]), compiled(rope_append)
        interleaved = self.problem.interleaved

        def call() -> None:
            run(*inputs, *outputs, interleaved)

        return Attached(call, lambda: outputs, outputs=outputs)
