"""FlashAttention-3 with a second query part (`qv`), out of a vllm wheel.

    q = rope columns of the query, k = rope columns of the cache       S = q kᵀ + qv vᵀ
    qv = latent columns of the query, v = latent columns of the cache   out = softmax(scale · S) v

All four are views of the lab's tensors: nothing is copied. `plan()` makes the scheduler's metadata (a small kernel over
the lengths); a call is the attention and, where it split, the combine. Hopper only; the wheel's is the varlen build.
The library writes into our `out` and allocates the log-sum-exp and partial results.

The number of splits is the library's own choice, except where whole requests alone keep three quarters of the
multiprocessors busy: there it would still cut each in two (b128 s1 h128 t4096: 255.1 us, and 236.5 us uncut; h16: 150.1
and 146.1), and gets 1. A library is measured at its best.

With more than 64 query rows it loads whole pages by TMA, so what lies after a request's last token on its last page is
multiplied by a probability of 0: it must be finite there. The lab's NaN would reach the output, hence `input_options`.
"""

from __future__ import annotations

from typing import Any

from mla_var3.catalogue.libraries import Library
from mla_var3.device import Requirement
from mla_var3.kernel.peer.prims import fa3
from mla_var3.kernel.peer.prims.kernel import Attached, PeerDecodePlan, takes_decode


class Fa3QvPlan(PeerDecodePlan):
    """Plan of the extension's `fwd` with `q_v`, a page table and used lengths."""

    peer = "fa3_qv"
    requires = Requirement(archs=("sm_90a",), dtypes=("bf16", "fp16"), problem=takes_decode("fa3_qv"))
    allocates = True
    input_options = {"poison": False}  # noqa: RUF012

    def attach(self, library: Library, *inputs: Any) -> Attached:
        return fa3.attached(library, *inputs, scale=self.problem.scale, causal=self.problem.causal, device=self.device)
