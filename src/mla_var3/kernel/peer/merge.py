"""Libraries that merge partial attention: what torch.compile makes of it (`torch_compile_merge_partials`)."""

from __future__ import annotations

import math
from typing import Any

import torch

from mla_var3.catalogue.libraries import Library
from mla_var3.device import Requirement
from mla_var3.kernel.library import Attached, NoKnobs, PeerMixin, compiled, is_here
from mla_var3.runtime.plan import KernelPlan
from mla_var3.workload import merge


def merge_partials(partials: Any, lse: Any) -> tuple[Any, Any]:
    """(out, lse)."""
    seen = ~lse.isinf()
    any_key = seen.any(0)
    most = torch.where(seen, lse, -math.inf).amax(0)
    most = torch.where(any_key, most, 0.0)
    weights = torch.where(seen, (lse - most).exp(), 0.0)
    total = weights.sum(0)
    out = torch.where(seen[..., None], weights[..., None] * partials.float(), 0.0).sum(0)
    out = torch.where(any_key[:, None], out / total[:, None], 0.0)
    return out.to(partials.dtype), torch.where(any_key, most + total.log(), math.inf)


class TorchCompileMergePartialsPlan(PeerMixin, KernelPlan):
    """What torch.compile makes of a merge of partial attention that is written in torch.

    Compiled for the shape at hand (no dynamic sizes) with tuning on. It allocates its outputs (out, lse) in every
    call.
    """

    workload = merge.WORKLOAD
    tiling_type = NoKnobs
    peer = "torch_compile_merge_partials"
    requires = Requirement(archs=("sm_80+",), problem=is_here("torch_compile_merge_partials"))
    plans_lengths = False
    leaves_out = ()
    allocates = True

    def attach(self, library: Library, *inputs: Any) -> Attached:
        made: list[Any] = list(merge.new_outputs(self.problem, inputs[0]))
        run = compiled(merge_partials)

        def call() -> None:
            made[:] = run(*inputs)

        return Attached(call, lambda: tuple(made), made=made, count=2)
