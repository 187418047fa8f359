"""FlashMLA, DeepSeek's own dense decode kernel.

    plan():  the schedule of the splits, by the library's small kernel over the lengths: once a step of a model
    call:    split-KV attention → combine, both of the library

Hopper only, 64-token pages, 64 query rows a tile. Called through the installed `flash_mla`, which allocates in every
call.
"""

from __future__ import annotations

from typing import Any

from mla_var3.catalogue.libraries import Library
from mla_var3.device import Requirement
from mla_var3.kernel.peer.prims.kernel import LATENT, Attached, PeerDecodePlan, natural_lse, takes_decode


class FlashMlaLibPlan(PeerDecodePlan):
    """Plan of FlashMLA's dense decode."""

    peer = "flash_mla_lib"
    requires = Requirement(archs=("sm_90a",), dtypes=("bf16", "fp16"), problem=takes_decode("flash_mla_lib", page=64))
    allocates = True

    def attach(self, library: Library, *inputs: Any) -> Attached:
        q, kv_cache, page_table, seq_lens = inputs
        import flash_mla

        s, h = q.shape[1], q.shape[2]
        # The older interface makes the schedule here, the newer one in the first call; both take it back as it came.
        schedule, splits = flash_mla.get_mla_metadata(seq_lens, s * h, 1)
        last: list[Any] = []

        def attend(schedule: Any, splits: Any) -> None:
            last[:] = flash_mla.flash_mla_with_kvcache(
                q,
                kv_cache,
                page_table,
                seq_lens,
                LATENT,
                schedule,
                splits,
                softmax_scale=self.problem.scale,
                causal=self.problem.causal,
            )

        def call() -> None:
            attend(schedule, splits)

        def with_schedule() -> None:
            attend(*flash_mla.get_mla_metadata(seq_lens, s * h, 1))

        call()
        return Attached(
            call,
            lambda: (last[0], natural_lse(last[1])),
            keep=(schedule, splits),
            made=last,
            with_schedule=with_schedule,
        )
