"""FlashInfer's rotation of queries and keys and its append to a paged MLA cache: two launches, as it has none for both
in bf16.

Latent and rope columns of the cache are two tensors to it, which may be views of one. The rotation is called below its
public function, which takes no rows that lie apart. Where tokens go is told by requests, pages and positions, made from
the slots in `plan()`, as an engine makes them once a step. Both compile with nvcc when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from mla_var3.catalogue import libraries
from mla_var3.catalogue.libraries import Library
from mla_var3.device import Requirement
from mla_var3.errors import Verdict
from mla_var3.kernel.peer.prims.kernel import Attached, NoKnobs, PeerMixin, has_widths
from mla_var3.runtime.plan import KernelPlan
from mla_var3.workload import rope
from mla_var3.workload.rope import RopeProblem

PEER = "flashinfer_rope_append"


def takes(problem: RopeProblem) -> Verdict:
    widths = has_widths(PEER, problem)
    if not widths:
        return widths
    reason = libraries.absent(PEER)
    return Verdict.yes() if reason is None else Verdict.no(reason)


class FlashInferRopeAppendPlan(PeerMixin, KernelPlan):
    """Plan of FlashInfer's rotation and append: outputs (out, cache)."""

    workload = rope.WORKLOAD
    tiling_type = NoKnobs
    peer = PEER
    requires = Requirement(archs=("sm_80+",), problem=takes)
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
