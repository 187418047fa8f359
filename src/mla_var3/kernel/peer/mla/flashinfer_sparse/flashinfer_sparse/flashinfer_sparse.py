"""FlashInfer's paged MLA decode (backend fa3) over a bf16 cache: query tokens as requests, indices as pages of size 1.

As in `fa3_sparse`, a cache of layout v32 is converted ahead of the call, which is not timed, and the call reads 1152
bytes a token where the problem counts 656. Indices that name no token are left out on the host, where the library makes
its schedule; see `mla_var3.kernel.peer.prims.flashinfer`.
"""

from __future__ import annotations

from typing import Any

from mla_var3.catalogue.libraries import Library
from mla_var3.device import Requirement
from mla_var3.kernel.peer.prims.flashinfer import FlashInferCalls
from mla_var3.kernel.peer.prims.kernel import Attached
from mla_var3.kernel.peer.prims.sparse import PeerSparsePlan, in_bf16, single_pages, takes_bf16
from mla_var3.workload import sparse_decode


class FlashInferSparsePlan(FlashInferCalls, PeerSparsePlan):
    """Plan of the fa3 backend over indices."""

    peer = "flashinfer_sparse"
    backend = "fa3"
    requires = Requirement(archs=("sm_90a",), dtypes=("bf16",), problem=takes_bf16("flashinfer_sparse"))

    def attach(self, library: Library, *inputs: Any) -> Attached:
        given = sparse_decode.named(self.problem, *inputs)
        q = given["q"]
        cache = in_bf16(self.problem.cache, given["cache"]).view(-1, 1, q.shape[3])
        return self.attached(library, q, cache, *single_pages(given), causal=False)
