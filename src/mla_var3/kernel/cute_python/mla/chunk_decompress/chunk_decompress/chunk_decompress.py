"""chunk_decompress v0: new tokens attend to a cached prefix as keys and values of every head.

    gather            rows of the cache → latents, rope columns into every head's keys   Triton, a leaf primitive
    up-projection     latents · W_UK, · W_UV, into keys and values                       cuBLAS, two batched products
    flash_attention   of all new tokens over the piece; the last piece is causal         CuTe; splits keys itself
    merge             of the piece's result with that before, by their LSE               Triton, a leaf primitive

A piece of a prefix has 1 GiB of keys and values (13,107 tokens of 128 heads); the last one holds the new tokens too, so
that a call of up to so many tokens has one piece, and nothing to merge. A piece costs 2k(d + v) FLOPs a token and head
for the products, and the bytes of its keys and values twice, whatever the number of queries; a pair of a query and a
key then costs 2(d + p + v), where attention in latent space costs 2(2k + p). So this is the way of many new tokens.

The base version; `mla_var3.kernel.chunks` has how one stage feeds the next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mla_var3.device import Requirement
from mla_var3.kernel import chunks
from mla_var3.kernel.chunks import ChunkKernel, DecompressTiling
from mla_var3.runtime import KernelPlan, Tiling, Verdict
from mla_var3.workload import chunked_prefill

if TYPE_CHECKING:
    from mla_var3.workload.chunked_prefill import ChunkedProblem


def takes(pd: ChunkedProblem) -> Verdict:
    return DecompressTiling().validate(pd)


class ChunkDecompressPlan(KernelPlan):
    """Inputs and outputs of `workload.chunked_prefill`."""

    workload = chunked_prefill.WORKLOAD
    tiling_type = DecompressTiling
    requires = Requirement(archs=("sm_90a",), dtypes=("bf16", "fp16"), features=("wgmma", "tma"), problem=takes)
    parts = ("cute-dsl/flash_attention_v18", "cute-dsl/flash_attention_v23")

    def default_tiling(self) -> DecompressTiling:
        return DecompressTiling()

    def autotune_configs(self) -> list[Tiling]:
        v18 = "cute-dsl/flash_attention_v18"
        tilings = [self.tiling, DecompressTiling(v18, v18)]
        return [x for x in tilings if x.validate(self.problem, self.device)]

    def plan(self, *inputs: Any) -> ChunkKernel:
        self.require()
        return chunks.decompressed(self, inputs)

    def plan_empty(self) -> ChunkKernel:
        self.require()
        return chunks.empty(self, "chunk_decompress")
