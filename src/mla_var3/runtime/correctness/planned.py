"""Plans whose problems are not paged decode: inputs, oracle and cases of their own, judged as `checking` does.

Every case of their check is planned, and one is bound once more (`prefill`, `mixed`).
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from mla_var3.errors import UserError
from mla_var3.runtime.correctness.checking import CaseResult, CheckReport, ErrorReport, bounds_for, judge, report
from mla_var3.runtime.plan import KernelPlan

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.problem import MlaProblem
    from mla_var3.runtime.types import Tiling, Verdict

BOUND_FROM = "normal"  # the case whose kernel is bound to a second set of inputs


class PlannedPlan(KernelPlan):
    """Base of the plans of such designs.

    make_inputs: (problem, device, *, seed, dist) to tensors. takes: whether a problem is of the kind. cases: (problem,
    whether on a GPU, quick) to (name, problem, distribution) of each. cos_slack: what the bounds on cosine differences
    are widened by.
    """

    cos_slack: ClassVar[float] = 0.0

    @staticmethod
    def make_inputs(problem: MlaProblem, device: Any, *, seed: int = 0, dist: str = "flashmla") -> tuple[Any, ...]:
        raise NotImplementedError

    @staticmethod
    def takes(problem: MlaProblem) -> Verdict:
        raise NotImplementedError

    @staticmethod
    def cases(problem: MlaProblem, on_gpu: bool, quick: bool) -> Iterable[tuple[str, MlaProblem, str]]:
        raise NotImplementedError

    def prepare_inputs(self, device: str = "cuda", **options: Any) -> tuple[Any, ...]:
        """Fresh inputs. Options of paged inputs (poison, pages) have no meaning here and are passed over."""
        own = {name: options[name] for name in ("seed", "dist") if name in options}
        return self.make_inputs(self.problem, device, **own)

    @classmethod
    def check(
        cls,
        problem: MlaProblem,
        tiling: Tiling | None = None,
        device: str = "cuda",
        *,
        quick: bool = False,
        seeds: Sequence[int] | None = None,
        hardware: Device | None = None,
        compiled: dict[Any, Any] | None = None,
    ) -> CheckReport:
        """Plans and judges each case, as `checking.check` does for decode, once for each seed (a fresh one by default).

        Outputs and workspaces are filled with NaN before each call, the call is repeated and must give the same bits
        (unless the plan says that it is not deterministic), inputs must not change, and one more set of inputs is bound
        to the planned kernel. Raises `UserError` for a problem of another kind.
        """
        cls.takes(problem).require(UserError)
        cases, results = list(cls.cases(problem, str(device).startswith("cuda"), quick)), list[CaseResult]()
        seeds = tuple(seeds) if seeds is not None else (random.SystemRandom().randrange(1 << 30),)
        for base in seeds:
            for index, (name, own, dist) in enumerate(cases):
                seed = base + 101 * index
                plan = cls(own, tiling, hardware)
                if compiled is not None:
                    plan.compiled = compiled
                inputs = cls.make_inputs(own, device, seed=seed, dist=dist)
                kernel = plan.plan(*inputs)
                error = plan.error_of(kernel, inputs, dist)
                results.append(CaseResult(name, error.ok, error.reason, seed, "plan", own.label, error))
                if name == BOUND_FROM:
                    other = cls.make_inputs(own, device, seed=seed + 1, dist=dist)
                    error = plan.error_of(kernel.bind(*other), other, dist)
                    results.append(CaseResult("bound", error.ok, error.reason, seed + 1, "bind", own.label, error))
        return report(results, seeds, labels=True)

    def error_of(self, kernel: Any, inputs: Sequence[Any], dist: str) -> ErrorReport:
        """How far a kernel of this plan is from its reference on inputs of a distribution; see `checking.judge`."""
        bounds = bounds_for(dist, self)
        reference = functools.partial(self.reference_fn, *inputs)
        return judge(kernel, inputs, reference, bounds, self.problem.torch_dtype, self.deterministic)
