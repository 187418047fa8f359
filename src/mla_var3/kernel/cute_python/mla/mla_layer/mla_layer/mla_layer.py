"""mla_layer v0 in CuTe: a decode step of a whole attention layer, as a pipeline of kernels that stand for themselves.

    stage          what                                                       launch
    down           hidden · downᵀ, both down-projections                      cuBLAS
    rmsnorm        query and latent, normalised                               programmatic dependent
    up             query · upᵀ                                                cuBLAS
    absorb_gemm    q · W_UK into the queries' latent columns                  programmatic dependent
    rope_append    rope of q into their other columns; the new row, cached    programmatic dependent
    flash_mla      attention over the cache, split and combined               programmatic dependents
    absorb_gemm    attended · W_UVᵀ                                           programmatic dependent
    out            heads · outᵀ                                               cuBLAS

A dependent is launched while the kernel before it still runs. It does what needs none of that one's results
(absorb_gemm loads its weight, the others find their addresses), and waits at griddepcontrol.wait before it reads or
writes anything that another kernel touches. Behind cuBLAS, which lets nobody start early, that only hides the launch.

Nothing is transposed, concatenated or copied between stages: two kernels write their columns of the queries, and the
norms read their columns of one product. The base version; `mla_var3.kernel.layer` has how one stage feeds the next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mla_var3.device import Requirement
from mla_var3.kernel.layer import LayerKernel, LayerTiling, compose
from mla_var3.runtime import KernelPlan, Tiling, Verdict
from mla_var3.workload import layer

if TYPE_CHECKING:
    from mla_var3.workload.layer import LayerProblem

FEW = 32  # query rows up to which the version whose tile has few of them is the faster one


def default_tiling(pd: LayerProblem) -> LayerTiling:
    return LayerTiling(attention="cute-dsl/flash_mla_v24" if pd.h <= FEW else "cute-dsl/flash_mla_v23")


def takes(pd: LayerProblem) -> Verdict:
    return default_tiling(pd).validate(pd)


class MlaLayerPlan(KernelPlan):
    """Inputs and outputs of `workload.layer`."""

    workload = layer.WORKLOAD
    tiling_type = LayerTiling
    requires = Requirement(archs=("sm_90a",), dtypes=("bf16", "fp16"), features=("wgmma", "tma"), problem=takes)
    parts = (
        "cute-dsl/rmsnorm",
        "cute-dsl/absorb_gemm",
        "cute-dsl/rope_append",
        "cute-dsl/flash_mla_v23",
        "cute-dsl/flash_mla_v24",
    )

    def default_tiling(self) -> LayerTiling:
        return default_tiling(self.problem)

    def autotune_configs(self) -> list[Tiling]:
        return [LayerTiling(attention=f"cute-dsl/flash_mla_v{version}") for version in (23, 24)]

    def plan(self, *inputs: Any) -> LayerKernel:
        self.require()
        return compose(self, inputs)

    def plan_empty(self) -> LayerKernel:
        self.require()
        return compose(self)
