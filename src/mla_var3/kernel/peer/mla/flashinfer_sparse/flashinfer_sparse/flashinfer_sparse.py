"""FlashInfer's paged MLA decode (backend fa3) over a bf16 cache: query tokens as requests, indices as pages of size 1.

As in `fa3_sparse`, a cache of layout v32 is converted ahead of the call, which is not timed, and the call reads 1152
bytes a token where the problem counts 656. Indices that name no token are left out on the host, where the library makes
its schedule; see `mla_var3.kernel.peer.prims.flashinfer`.
"""

from __future__ import annotations

from typing import Any

from mla_var3.device import Requirement
from mla_var3.kernel.peer.prims.find import Library
from mla_var3.kernel.peer.prims.flashinfer import FlashInferCalls, Rows
from mla_var3.kernel.peer.prims.kernel import Attached
from mla_var3.kernel.peer.prims.sparse import PeerSparsePlan, in_bf16, names_token, takes_bf16
from mla_var3.workload import sparse_decode


class FlashInferSparsePlan(FlashInferCalls, PeerSparsePlan):
    """Plan of the fa3 backend over indices."""

    peer = "flashinfer_sparse"
    backend = "fa3"
    requires = Requirement(archs=("sm_90a",), dtypes=("bf16",), problem=takes_bf16("flashinfer_sparse"))

    def attach(self, library: Library, *inputs: Any) -> Attached:
        import torch

        given = sparse_decode.named(self.problem, *inputs)
        q, indices = given["q"], given["indices"]
        names = names_token(given)
        lens = names.sum(-1).flatten().to("cpu", torch.int32)
        offsets = torch.zeros(len(lens) + 1, dtype=torch.int32)
        offsets[1:] = lens.cumsum(0)
        rows = Rows(torch.arange(len(lens) + 1, dtype=torch.int32), offsets, indices[names].contiguous(), lens)
        cache = in_bf16(self.problem.cache, given["cache"])
        return self.attached(library, rows, q, cache.view(-1, 1, q.shape[3]), causal=False)
