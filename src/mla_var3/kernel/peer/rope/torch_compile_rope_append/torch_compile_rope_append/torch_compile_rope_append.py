"""What torch.compile makes of the rotation and the append that are written in torch, in one function.

Compiled for the shape at hand (no dynamic sizes) with tuning on. It writes into the tensors that it is given. Tokens
without a slot are left out of the check: dropping them takes a size that only the device knows.
"""

from __future__ import annotations

from typing import Any

from mla_var3.catalogue import libraries
from mla_var3.catalogue.libraries import Library
from mla_var3.device import Requirement
from mla_var3.errors import Verdict
from mla_var3.kernel.peer.prims.kernel import Attached, NoKnobs, PeerMixin
from mla_var3.kernel.peer.prims.torch_compile import compiled
from mla_var3.runtime.plan import KernelPlan
from mla_var3.workload import rope
from mla_var3.workload.rope import RopeProblem


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


def takes(problem: RopeProblem) -> Verdict:
    reason = libraries.absent("torch_compile_rope_append")
    return Verdict.yes() if reason is None else Verdict.no(reason)


class TorchCompileRopeAppendPlan(PeerMixin, KernelPlan):
    """Plan of torch.compile's rotation and append: outputs (out, cache)."""

    workload = rope.WORKLOAD
    tiling_type = NoKnobs
    peer = "torch_compile_rope_append"
    requires = Requirement(archs=("sm_80+",), problem=takes)
    plans_lengths = False
    leaves_out = ("skipped", "none", "beyond", "planned_many", "absorbed")

    def attach(self, library: Library, *inputs: Any) -> Attached:
        outputs, run = rope.new_outputs(self.problem, inputs[0]), compiled(rope_append)
        interleaved = self.problem.interleaved

        def call() -> None:
            run(*inputs, *outputs, interleaved)

        return Attached(call, lambda: outputs, outputs=outputs)
