"""chunk_absorb v0: new tokens attend to a cached prefix, and to themselves, in latent space.

    absorb_gemm     q · W_UK into the queries' latent columns            CuTe
    rope columns    of q into the queries' other columns                 a copy by torch
    flash_mla       causal, of packed queries over the paged cache       CuTe, split and combined
    absorb_gemm     attended · W_UVᵀ                                     CuTe

No key is made: the cache is read as it lies, by all heads. A pair of a query and a key costs 2(2k + p) FLOPs a head,
3.4 times those over decompressed heads in DeepSeek's models. So this is the way of few new tokens.

The base version; `mla_var3.kernel.chunks` has how one stage feeds the next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mla_var3.device import Requirement
from mla_var3.kernel import chunks
from mla_var3.kernel.chunks import AbsorbTiling, ChunkKernel
from mla_var3.runtime import KernelPlan, Tiling, Verdict
from mla_var3.workload import chunked_prefill

if TYPE_CHECKING:
    from mla_var3.workload.chunked_prefill import ChunkedProblem


FEW = 32  # query rows up to which the version whose tile has few of them is the faster one


def default_tiling(pd: ChunkedProblem) -> AbsorbTiling:
    rows = pd.h * max(1, pd.query_tokens // pd.b)
    return AbsorbTiling(attention="cute-dsl/flash_mla_v24" if rows <= FEW else "cute-dsl/flash_mla_v23")


def takes(pd: ChunkedProblem) -> Verdict:
    return default_tiling(pd).validate(pd)


class ChunkAbsorbPlan(KernelPlan):
    """Inputs and outputs of `workload.chunked_prefill`."""

    workload = chunked_prefill.WORKLOAD
    tiling_type = AbsorbTiling
    requires = Requirement(archs=("sm_90a",), dtypes=("bf16", "fp16"), features=("wgmma", "tma"), problem=takes)
    parts = ("cute-dsl/absorb_gemm", "cute-dsl/flash_mla_v23", "cute-dsl/flash_mla_v24")

    def default_tiling(self) -> AbsorbTiling:
        return default_tiling(self.problem)

    def autotune_configs(self) -> list[Tiling]:
        both = (AbsorbTiling(attention=f"cute-dsl/flash_mla_v{version}") for version in (23, 24))
        return [x for x in both if x.validate(self.problem, self.device)]

    def plan(self, *inputs: Any) -> ChunkKernel:
        self.require()
        return chunks.absorbed(self, inputs)

    def plan_empty(self) -> ChunkKernel:
        self.require()
        return chunks.empty(self, "chunk_absorb")
