"""A plan whose kernel is another version's, behind a call of a library."""

from __future__ import annotations

from typing import Any

from mla_var3.catalogue.registry import KernelId, get_plan
from mla_var3.device import Requirement
from mla_var3.errors import Verdict
from mla_var3.runtime import KernelPipeline, KernelPlan, LibraryCall, Tiling
from mla_var3.workload import norm

OTHER = "cute-dsl/rmsnorm"


class NoKnobs(Tiling):
    def validate(self, pd: Any, device: Any = None) -> Verdict:
        return Verdict.yes()


class BorrowingPlan(KernelPlan):
    workload = norm.WORKLOAD
    tiling_type = NoKnobs
    requires = Requirement()

    def default_tiling(self) -> NoKnobs:
        return NoKnobs()

    def autotune_configs(self) -> list[Tiling]:
        return []

    def plan(self, *inputs: Any) -> Any:
        raise NotImplementedError

    def plan_empty(self) -> KernelPipeline:
        part = get_plan(KernelId.parse(OTHER))(self.problem, None, self.device)
        part.compiled = self.compiled.part(OTHER)
        nothing: Any = None
        return KernelPipeline([LibraryCall(nothing, name="library"), part.plan_empty()], plan=self)
