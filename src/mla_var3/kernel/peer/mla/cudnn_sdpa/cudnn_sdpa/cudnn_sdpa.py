"""cuDNN's attention as torch calls it, for prefill.

That is `scaled_dot_product_attention` with the cuDNN backend; the operator behind it is called directly, because it
also returns the log-sum-exp. It takes views (b, h, s, columns) of our tensors, makes its plan when it first meets a
shape, and allocates its outputs in every call.
"""

from __future__ import annotations

from typing import Any

from mla_var3.catalogue.libraries import Library
from mla_var3.device import Requirement
from mla_var3.kernel.peer.prims.kernel import Attached, natural_lse
from mla_var3.kernel.peer.prims.prefill import PeerPrefillPlan, is_here


class CudnnSdpaPlan(PeerPrefillPlan):
    """Plan of torch's cuDNN attention."""

    peer = "cudnn_sdpa"
    requires = Requirement(archs=("sm_80+",), problem=is_here("cudnn_sdpa"))
    allocates = True

    def attach(self, library: Library, *inputs: Any) -> Attached:
        import torch

        q, k, v = (x.transpose(1, 2) for x in inputs)
        b, h, s, _ = q.shape
        attend = torch.ops.aten._scaled_dot_product_cudnn_attention.default
        scale, causal = self.problem.scale, self.problem.causal
        last = [q.new_empty((b, h, s, v.shape[-1])), q.new_empty((b, h, s), dtype=torch.float32)]

        def call() -> None:
            # bias, with log-sum-exp, dropout, causal, without a debug mask
            last[:] = attend(q, k, v, None, True, 0.0, causal, False, scale=scale)[:2]

        def read() -> tuple[Any, ...]:
            return last[0].transpose(1, 2), natural_lse(last[1].reshape(b, h, s).float())

        return Attached(call, read, made=last)
