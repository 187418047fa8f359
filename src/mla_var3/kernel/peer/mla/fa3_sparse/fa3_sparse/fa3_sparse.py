"""FlashAttention-3 with `qv` over a bf16 cache, the indices of each query token as a page table of size 1.

    plan():  cache → bf16, unless it is; the indices that name a token, in their order, as the page table of a request
             of one query token, and their number as its length; the scheduler's metadata (a small kernel over the
             lengths)
    call:    the attention and, where it split, the combine, both of the library

The call is that of `fa3_qv`, with b · s requests of one query token. A cache of layout v32 is converted ahead of the
call, which is not timed and rounds once: a server that decodes with this library keeps its cache in bf16. So the call
reads 1152 bytes a token where the problem counts 656. Its page tables are not timed either: an indexer writes them so.
Pages of size 1 are gathered by cp.async, and rows behind a request's last one are not loaded. Out of a vllm wheel,
Hopper only.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mla_var3.catalogue.libraries import Library
from mla_var3.device import Requirement
from mla_var3.kernel.peer.prims import fa3
from mla_var3.kernel.peer.prims.kernel import Attached
from mla_var3.kernel.peer.prims.sparse import PeerSparsePlan, in_bf16, single_pages, takes_bf16
from mla_var3.packed_cache import VALUES
from mla_var3.workload import sparse_decode


class Fa3SparsePlan(PeerSparsePlan):
    """Plan of the extension's `fwd` with `q_v`, a page table of size 1 and used lengths."""

    peer = "fa3_sparse"
    requires = Requirement(archs=("sm_90a",), dtypes=("bf16",), problem=takes_bf16("fa3_sparse"))
    allocates = True

    def attach(self, library: Library, *inputs: Any) -> Attached:
        given = sparse_decode.named(self.problem, *inputs)
        q = given["q"]
        b, s, h, columns = q.shape
        found = fa3.attached(
            library,
            q.view(b * s, 1, h, columns),
            in_bf16(self.problem.cache, given["cache"]).view(-1, 1, 1, columns),
            *single_pages(given),
            scale=self.problem.scale,
            causal=False,
            device=self.device,
        )

        def read() -> tuple[Any, ...]:
            out, lse = found.read()
            return out.view(b, s, h, VALUES), lse.view(b, s, h).transpose(1, 2).contiguous()

        return replace(found, read=read)
