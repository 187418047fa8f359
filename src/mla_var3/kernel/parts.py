"""Pipelines whose parts are versions that stand for themselves: which ones, whether they can run, and their plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mla_var3.catalogue import registry
from mla_var3.catalogue.registry import KernelId
from mla_var3.errors import UserError, Verdict
from mla_var3.runtime import KernelPipeline, Tiling

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.runtime import KernelPlan
    from mla_var3.toolchain.digest import Code
    from mla_var3.workload import Problem

#: A part: label of its version, its problem, and knobs that differ from the version's own.
Part = tuple[str, "Problem", Mapping[str, Any]]


@dataclass(frozen=True)
class PartsTiling(Tiling):
    """The versions that a pipeline is made of, by their labels; each has its own default knobs."""

    def parts(self, pd: Any) -> dict[str, Part]:
        """Every part, in the order of the data."""
        raise NotImplementedError

    def validate(self, pd: Any, device: Device | None = None) -> Verdict:
        for label, problem, knobs in self.parts(pd).values():
            try:
                plan = _planned(label, problem, device, knobs)
            except UserError as error:
                return Verdict.no(str(error))
            verdict = plan.supported()
            if verdict:
                verdict = plan.feasible()
            if not verdict:
                return Verdict.no(f"{label}: {verdict.reason}")
        return Verdict.yes()


class PartsKernel(KernelPipeline):
    """The stages of such a pipeline."""

    def code(self, device: Device) -> Code | None:
        return next((code for stage in self.stages if (code := stage.code(device)) is not None), None)


def _planned(label: str, problem: Problem, device: Device | None, knobs: Mapping[str, Any]) -> KernelPlan:
    """The version's plan, its default tiling changed by those of the knobs that it has."""
    plan = registry.get_plan(KernelId.parse(label))(problem, None, device)
    own = plan.tiling.to_record()
    asked = {name: value for name, value in knobs.items() if name in own}
    return plan.with_tiling(plan.tiling.from_record({**own, **asked})) if asked else plan


def plans_of(plan: KernelPlan) -> dict[str, KernelPlan]:
    """The plans of the parts of a pipeline's plan, whose tiling is a `PartsTiling`. Raises `UserError` where it names a
    version that the plan does not declare as one of its `parts`."""
    tiling: Any = plan.tiling
    found: dict[str, KernelPlan] = {}
    for name, (label, problem, knobs) in tiling.parts(plan.problem).items():
        if label not in plan.parts:
            raise UserError(
                f"{label} is no part of {type(plan).__name__}: add it to `parts` there, which the source hash of its "
                "records covers."
            )
        found[name] = part = _planned(label, problem, plan.device, knobs)
        part.compiled = plan.compiled.part(label)
    return found
