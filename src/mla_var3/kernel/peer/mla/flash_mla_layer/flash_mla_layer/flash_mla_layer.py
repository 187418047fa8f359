"""A decode step of a whole layer with FlashMLA for attention: what it takes whose other kernels are ours.

    as cute-dsl/mla_layer, but for the attention: FlashMLA's split-KV kernel and its combine

The projections are the same calls, the small kernels the same compiled code, so the difference to our layer is
attention's alone, and what its kernels let run beside them. FlashMLA is the installed package, else the extension of a
vllm wheel; its schedule of the splits is made when the kernel is planned, as once a step of a model.
"""

from __future__ import annotations

from typing import Any

from mla_var3.catalogue import libraries
from mla_var3.device import Requirement
from mla_var3.errors import Verdict
from mla_var3.kernel.layer import LayerKernel, LayerTiling, compose
from mla_var3.runtime import KernelPlan, Tiling
from mla_var3.workload import layer
from mla_var3.workload.layer import LayerProblem


def default_tiling() -> LayerTiling:
    library = libraries.find("flash_mla_layer")
    return LayerTiling(attention=f"peer/{library.peer if library is not None else 'flash_mla_lib'}")


def takes(problem: LayerProblem) -> Verdict:
    reason = libraries.absent("flash_mla_layer")
    return default_tiling().validate(problem) if reason is None else Verdict.no(reason)


class FlashMlaLayerPlan(KernelPlan):
    """Plan of the layer with FlashMLA: inputs and outputs of `workload.layer`. The library's schedule depends on the
    lengths, so other lengths need a new plan."""

    workload = layer.WORKLOAD
    tiling_type = LayerTiling
    requires = Requirement(archs=("sm_90a",), dtypes=("bf16", "fp16"), problem=takes)
    peer = "flash_mla_layer"
    allocates = True
    leaves_out = ("in_place",)

    def default_tiling(self) -> LayerTiling:
        return default_tiling()

    def autotune_configs(self) -> list[Tiling]:
        return [default_tiling()]

    def plan(self, *inputs: Any) -> LayerKernel:
        self.require()
        return compose(self, inputs)

    def plan_empty(self) -> LayerKernel:
        return compose(self)
