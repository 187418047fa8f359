"""What torch.compile makes of a decode step of a whole layer that is written in torch operations.

Compiled for the shape at hand (no dynamic sizes), without tuning: products stay cuBLAS's, as in the layers that it is
measured beside, and what lies between them becomes Triton kernels. The check leaves out what would be compiled anew for
another number of requests or pages.
"""

from __future__ import annotations

from typing import Any

from mla_var3.catalogue import libraries
from mla_var3.catalogue.libraries import Library
from mla_var3.device import Requirement
from mla_var3.errors import Verdict
from mla_var3.kernel.peer.prims.kernel import Attached, NoKnobs, PeerMixin
from mla_var3.kernel.peer.prims.torch_compile import compiled
from mla_var3.kernel.torch.prims.layer import decode_step
from mla_var3.runtime.plan import KernelPlan
from mla_var3.workload import layer
from mla_var3.workload.layer import LayerProblem


def takes(problem: LayerProblem) -> Verdict:
    reason = libraries.absent("torch_compile_mla_layer")
    return Verdict.yes() if reason is None else Verdict.no(reason)


class TorchCompileMlaLayerPlan(PeerMixin, KernelPlan):
    """Plan of torch.compile's layer: inputs and outputs of `workload.layer`."""

    workload = layer.WORKLOAD
    tiling_type = NoKnobs
    peer = "torch_compile_mla_layer"
    requires = Requirement(archs=("sm_80+",), dtypes=("bf16", "fp16"), problem=takes)
    plans_lengths = False
    allocates = True
    leaves_out = ("ragged", "first_tokens", "idle", "large", "planned_one")
    input_options = {"poison": False}  # noqa: RUF012

    def attach(self, library: Library, *inputs: Any) -> Attached:
        pd, x = self.problem, layer.named(inputs)
        run, scale = compiled(decode_step, tuned=False), pd.attention.scale
        out = x["hidden"].new_empty((len(x["hidden"]), pd.hidden))

        def call() -> None:
            run(*inputs, out, pd.h, scale)

        return Attached(call, lambda: (out, layer.written_rows(x["kv_cache"], x["slots"])), outputs=(out,))
