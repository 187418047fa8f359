"""mla_layer v0 in torch: a decode step of a whole attention layer in torch's own operations.

    products by cuBLAS, norms, rotation and scatter by torch's kernels; attention: gather pages → logits → softmax → P V

What a model's own code does where nobody wrote kernels for it, in the dtype of the model: the yardstick of the fused
layers, not the oracle, which is `workload.layer.reference`. Requests without a token are left out of its check, for
torch's scatter takes no negative index. Nothing to tune.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mla_var3.device import Requirement
from mla_var3.kernel.layer import LayerKernel
from mla_var3.kernel.torch.prims.layer import decode_step
from mla_var3.runtime import KernelPlan, LibraryCall, Tiling, Verdict
from mla_var3.workload import layer

if TYPE_CHECKING:
    import torch

    from mla_var3.device import Device
    from mla_var3.workload.layer import LayerProblem


@dataclass(frozen=True)
class MlaLayerTiling(Tiling):
    """No knobs."""

    def validate(self, pd: LayerProblem, device: Device | None = None) -> Verdict:
        return Verdict.yes()


class MlaLayerPlan(KernelPlan):
    """Inputs and outputs of `workload.layer`. Gathering reads all of a page, and what a page table has in unused
    entries, so inputs are not poisoned."""

    workload = layer.WORKLOAD
    tiling_type = MlaLayerTiling
    requires = Requirement(archs=(), dtypes=("bf16", "fp16", "fp32"))
    leaves_out = ("idle",)
    input_options = {"poison": False}  # noqa: RUF012

    def default_tiling(self) -> MlaLayerTiling:
        return MlaLayerTiling()

    def autotune_configs(self) -> list[Tiling]:
        return [MlaLayerTiling()]

    def plan(self, *inputs: torch.Tensor) -> LayerKernel:
        pd, out = self.problem, inputs[0].new_empty((len(inputs[0]), self.problem.hidden))
        scale = pd.attention.scale
        given: Any = (*inputs, out, pd.h, scale)
        call = LibraryCall(lambda: decode_step(*given), name="decode_step")
        return LayerKernel([call], inputs, out, tiling=self.tiling, plan=self)

    def plan_empty(self) -> LayerKernel:
        nothing: Any = None
        return LayerKernel([LibraryCall(nothing, name="decode_step")], (), None, tiling=self.tiling, plan=self)
