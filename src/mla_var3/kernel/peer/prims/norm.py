"""Plans of peers that normalise rows: inputs (x, weight, [second weight], [residual]) of `workload.norm`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mla_var3.catalogue import libraries
from mla_var3.errors import Verdict
from mla_var3.kernel.peer.prims.kernel import Attached, NoKnobs, PeerMixin
from mla_var3.runtime.plan import KernelPlan
from mla_var3.workload import norm

if TYPE_CHECKING:
    from mla_var3.workload.norm import NormProblem

#: What a library returns for one norm: (normalised rows, new residual or None).
One = Callable[..., tuple[Any, Any]]


class PeerNormPlan(PeerMixin, KernelPlan):
    """A peer that normalises rows: outputs (out, second, new residual)."""

    workload = norm.WORKLOAD
    tiling_type = NoKnobs
    plans_lengths = False
    leaves_out = ()
    allocates = True

    def each(self, one: One, inputs: Sequence[Any]) -> Attached:
        """Calls a library once for each of the problem's norms. one(rows, weight, residual or None)."""
        pd = self.problem
        x, weight, second_weight, residual = norm.named(pd, tuple(inputs))
        made: list[Any] = list(norm.new_outputs(pd, x))
        nothing = x.new_empty((x.shape[0], 0))
        first, rest = x[:, : pd.width], x[:, pd.width :]

        def call() -> None:
            made[0], new_residual = one(first, weight, residual)
            made[1] = nothing if second_weight is None else one(rest, second_weight, None)[0]
            made[2] = nothing if residual is None else new_residual

        return Attached(call, lambda: tuple(made), made=made, count=3)


def takes_norm(peer: str, *, no_residual: str = "") -> Callable[[NormProblem], Verdict]:
    """A predicate: the library is here, and takes the problem. no_residual: what it does where there is one, for which
    it is not asked; empty: it is."""

    def verdict(problem: NormProblem) -> Verdict:
        if problem.residual and no_residual:
            return Verdict.no(f"peer/{peer} {no_residual}")
        reason = libraries.absent(peer)
        return Verdict.yes() if reason is None else Verdict.no(reason)

    return verdict
