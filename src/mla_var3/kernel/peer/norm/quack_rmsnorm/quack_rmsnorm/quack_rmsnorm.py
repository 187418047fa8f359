"""quack's rmsnorm (CuTe DSL), untuned as its callers use it; a call for each norm.

With a residual it normalises the sum before that is rounded, where others normalise what they write: another result,
so that such problems are refused. It compiles when it first meets a width, and allocates its outputs in every call.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from mla_var3.catalogue.libraries import Library
from mla_var3.device import Requirement
from mla_var3.kernel.peer.prims.kernel import Attached
from mla_var3.kernel.peer.prims.norm import PeerNormPlan, takes_norm


class QuackRmsNormPlan(PeerNormPlan):
    """Plan of quack's norm."""

    peer = "quack_rmsnorm"
    requires = Requirement(
        archs=("sm_90+",),
        problem=takes_norm("quack_rmsnorm", no_residual="normalises the sum with a residual before it is rounded"),
    )

    def attach(self, library: Library, *inputs: Any) -> Attached:
        forward, eps = import_module("quack.rmsnorm").rmsnorm_fwd, self.problem.eps
        return self.each(lambda rows, weight, _: (forward(rows, weight, eps=eps)[0], None), inputs)
