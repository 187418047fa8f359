"""FlashAttention-4, the one in CuTe DSL, for prefill.

Package flash-attn-4 of github.com/Dao-AILab/flash-attention. It compiles its kernel when it first meets a kind of
input (seconds), then keeps it for the process. `out` and `lse` are ours, so a call allocates nothing. On Hopper it has
no absorbed form: it takes part in `prefill` only.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from mla_var3.catalogue.libraries import Library
from mla_var3.device import Requirement
from mla_var3.errors import UserError
from mla_var3.kernel.peer.prims.kernel import Attached, natural_lse
from mla_var3.kernel.peer.prims.prefill import PeerPrefillPlan, is_here


class Fa4Plan(PeerPrefillPlan):
    """Plan of the library's forward function."""

    peer = "fa4"
    requires = Requirement(archs=("sm_90a", "sm_100a", "sm_103a"), problem=is_here("fa4"))

    def attach(self, library: Library, *inputs: Any) -> Attached:
        import torch

        forward = getattr(import_module("flash_attn.cute.interface"), "_flash_attn_fwd", None)
        if forward is None:
            raise UserError(f"flash-attn-4 {library.version} has no _flash_attn_fwd: install another release.")
        q, k, v = inputs
        b, s, h, _ = q.shape
        out = q.new_empty((b, s, h, v.shape[-1]))
        lse = torch.empty((b, h, s), dtype=torch.float32, device=q.device)
        scale, causal = self.problem.scale, self.problem.causal

        def call() -> None:
            forward(q, k, v, softmax_scale=scale, causal=causal, out=out, lse=lse)

        return Attached(call, lambda: (out, natural_lse(lse)), outputs=(out, lse))
