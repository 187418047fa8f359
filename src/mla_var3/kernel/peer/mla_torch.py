"""What torch has of attention: cuDNN's prefill (`cudnn_sdpa`), and what torch.compile makes of a decode step of a whole
layer (`torch_compile_mla_layer`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mla_var3.catalogue.libraries import Library
from mla_var3.device import Requirement
from mla_var3.errors import Verdict
from mla_var3.kernel.library import Attached, NoKnobs, PeerMixin, PeerPrefillPlan, compiled, is_here, prefill_lse
from mla_var3.kernel.torch.prims.layer import decode_step
from mla_var3.runtime.plan import KernelPlan
from mla_var3.workload import layer

if TYPE_CHECKING:
    from mla_var3.workload.prefill import PrefillProblem


def takes(problem: PrefillProblem) -> Verdict:
    if not problem.uniform:
        return Verdict.no("peer/cudnn_sdpa takes requests of one length; the problem's differ")
    if problem.causal and problem.s != problem.t:
        return Verdict.no(
            "peer/cudnn_sdpa aligns a causal mask at the start; "
            f"the problem has {problem.s} queries and {problem.t} keys"
        )
    return is_here("cudnn_sdpa")(problem)


class CudnnSdpaPlan(PeerPrefillPlan):
    """cuDNN's attention as torch calls it, for prefill.

    That is `scaled_dot_product_attention` with the cuDNN backend; the operator behind it is called directly, because it
    also returns the log-sum-exp. It takes views (b, h, s, columns) of our tensors, makes its plan when it first meets a
    shape, and allocates its outputs in every call. It knows no packed requests.
    """

    peer = "cudnn_sdpa"
    requires = Requirement(archs=("sm_80+",), problem=takes, options=("strided_kv",))
    allocates = True

    def attach(self, library: Library, *inputs: Any) -> Attached:
        import torch

        pd = self.problem
        q, k, v = (x.unflatten(0, (pd.b, -1)).transpose(1, 2) for x in inputs[:3])
        attend = torch.ops.aten._scaled_dot_product_cudnn_attention.default
        last = [q.new_empty((pd.b, pd.h, pd.s, pd.d)), q.new_empty((pd.b, pd.h, pd.s), dtype=torch.float32)]

        def call() -> None:
            # bias, with log-sum-exp, dropout, causal, without a debug mask
            last[:] = attend(q, k, v, None, True, 0.0, pd.causal, False, scale=pd.scale)[:2]

        def read() -> tuple[Any, ...]:
            lse = last[1].reshape(pd.b, pd.h, pd.s).float()
            return last[0].transpose(1, 2).flatten(0, 1), prefill_lse(lse.transpose(0, 1).flatten(1))

        return Attached(call, read, made=last)


class TorchCompileMlaLayerPlan(PeerMixin, KernelPlan):
    """What torch.compile makes of a decode step of a whole layer that is written in torch operations.

    Compiled for the shape at hand (no dynamic sizes), without tuning: products stay cuBLAS's, as in the layers that it
    is measured beside, and what lies between them becomes Triton kernels. The check leaves out what would be compiled
    anew for another number of requests or pages.

    Inputs and outputs of `workload.layer`. It is one function of torch, so it is made of no other version.
    """

    workload = layer.WORKLOAD
    tiling_type = NoKnobs
    peer = "torch_compile_mla_layer"
    requires = Requirement(archs=("sm_80+",), dtypes=("bf16", "fp16"), problem=is_here("torch_compile_mla_layer"))
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
