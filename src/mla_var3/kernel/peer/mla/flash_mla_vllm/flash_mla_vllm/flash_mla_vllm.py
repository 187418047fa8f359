"""FlashMLA as a vllm wheel builds it.

The dense decode kernel, from the wheel's extension alone, without importing vllm.

    plan():  one call without a schedule makes it (a small kernel over the lengths)
    call:    split-KV attention → combine, both of the library, with that schedule

The same sources as `flash_mla_lib`, in the build of the wheel, which was seen to be 5 to 27 % slower: a record of the
one is not a record of the other. Hopper only. The library allocates outputs and partial results in every call.
"""

from __future__ import annotations

from typing import Any

from mla_var3.catalogue.libraries import Library
from mla_var3.device import Requirement
from mla_var3.kernel.peer.prims.kernel import (
    LATENT,
    Attached,
    PeerDecodePlan,
    load_extension,
    natural_lse,
    takes_decode,
)


class FlashMlaVllmPlan(PeerDecodePlan):
    """Plan of the extension's `dense_decode_fwd`."""

    peer = "flash_mla_vllm"
    requires = Requirement(archs=("sm_90a",), dtypes=("bf16", "fp16"), problem=takes_decode("flash_mla_vllm", page=64))
    allocates = True

    def attach(self, library: Library, *inputs: Any) -> Attached:
        q, kv_cache, page_table, seq_lens = inputs
        decode = load_extension(library, "_flashmla_C").dense_decode_fwd
        # Positional: the extension registers its functions without argument names. The tenth, an optional tensor that
        # the build of vllm 0.25.1 takes beyond FlashMLA's own nine, stays empty.
        given = (q, kv_cache, LATENT, seq_lens, page_table, self.problem.scale, self.problem.causal)
        out, lse, schedule, splits = decode(*given, None, None, None)
        last = [out, lse]

        def call() -> None:
            last[:] = decode(*given, schedule, splits, None)[:2]

        return Attached(call, lambda: (last[0], natural_lse(last[1])), keep=(schedule, splits), made=last)
