"""Libraries that multiply with the absorbed weights: cuBLAS (`cublas_bmm`)."""

from __future__ import annotations

from typing import Any

from mla_var3.catalogue.libraries import Library
from mla_var3.device import Requirement
from mla_var3.kernel.library import Attached, NoKnobs, PeerMixin, is_here
from mla_var3.runtime.plan import KernelPlan
from mla_var3.workload import gemm


class CublasBmmPlan(PeerMixin, KernelPlan):
    """cuBLAS, as torch.bmm calls it on views of our tensors: nothing is copied, and the result goes into place.

    Inputs (x, weight), output (out,) of `workload.gemm`.
    """

    peer = "cublas_bmm"
    workload = gemm.WORKLOAD
    tiling_type = NoKnobs
    plans_lengths = False
    leaves_out = ()
    requires = Requirement(archs=("sm_80+",), dtypes=("bf16", "fp16"), problem=is_here("cublas_bmm"))

    def attach(self, library: Library, *inputs: Any) -> Attached:
        import torch

        x, weight = inputs
        keys, values = gemm.parts(self.problem, weight)
        factor = keys if self.problem.side == "q" else values.transpose(1, 2)
        out = gemm.new_output(self.problem, x)
        rows, into = x.transpose(0, 1), out[..., : self.problem.columns].transpose(0, 1)

        def call() -> None:
            torch.bmm(rows, factor, out=into)

        return Attached(call, lambda: (out,), outputs=(out,), count=1)
