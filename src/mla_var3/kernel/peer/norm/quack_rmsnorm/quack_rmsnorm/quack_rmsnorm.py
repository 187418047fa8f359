"""quack's rmsnorm (CuTe DSL), untuned as its callers use it; a call for each norm.

With a residual it normalises the unrounded sum, where others normalise what they write. It compiles when it first meets
a width, and allocates its outputs in every call.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from mla_var3.device import Requirement
from mla_var3.kernel.peer.prims.find import Library
from mla_var3.kernel.peer.prims.kernel import Attached
from mla_var3.kernel.peer.prims.norm import PeerNormPlan, takes_norm


class QuackRmsNormPlan(PeerNormPlan):
    """Plan of quack's norm."""

    peer = "quack_rmsnorm"
    requires = Requirement(archs=("sm_90+",), problem=takes_norm("quack_rmsnorm"))

    def attach(self, library: Library, *inputs: Any) -> Attached:
        forward, eps = import_module("quack.rmsnorm").rmsnorm_fwd, self.problem.eps

        def one(rows: Any, weight: Any, residual: Any) -> tuple[Any, Any]:
            out, new_residual, _ = forward(rows, weight, residual=residual, eps=eps)
            return out, new_residual

        return self.each(one, inputs)
