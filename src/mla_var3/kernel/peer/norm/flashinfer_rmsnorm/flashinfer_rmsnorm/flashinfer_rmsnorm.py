"""FlashInfer's rmsnorm; a call for each norm.

Its norm with a residual overwrites both of its inputs, so that it cannot run twice on the same ones: problems with a
residual are refused. It compiles when it is first used, through CuTe DSL where that is installed, else with nvcc.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from mla_var3.catalogue.libraries import Library
from mla_var3.device import Requirement
from mla_var3.kernel.peer.prims.kernel import Attached
from mla_var3.kernel.peer.prims.norm import PeerNormPlan, takes_norm


class FlashInferRmsNormPlan(PeerNormPlan):
    """Plan of FlashInfer's norm."""

    peer = "flashinfer_rmsnorm"
    requires = Requirement(
        archs=("sm_80+",),
        problem=takes_norm("flashinfer_rmsnorm", no_residual="adds a residual in place of its inputs only"),
    )

    def attach(self, library: Library, *inputs: Any) -> Attached:
        normalise, eps = import_module("flashinfer.norm").rmsnorm, self.problem.eps
        return self.each(lambda rows, weight, _: (normalise(rows, weight, eps=eps), None), inputs)
