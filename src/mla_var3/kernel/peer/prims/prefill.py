"""Plans of peers that prefill: the decompressed form, keys of d + p and values of d columns a head."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mla_var3.catalogue import libraries
from mla_var3.errors import Verdict
from mla_var3.kernel.peer.prims.kernel import NoKnobs, PeerMixin
from mla_var3.runtime.plan import KernelPlan
from mla_var3.workload import prefill

if TYPE_CHECKING:
    from mla_var3.workload.prefill import PrefillProblem


class PeerPrefillPlan(PeerMixin, KernelPlan):
    """A peer of the decompressed form: inputs (q, k, v), outputs (out, lse)."""

    workload = prefill.WORKLOAD
    tiling_type = NoKnobs
    plans_lengths = False
    leaves_out = prefill.PROMISED


def is_here(peer: str) -> Callable[[PrefillProblem], Verdict]:
    """A predicate: the library is here."""

    def verdict(problem: PrefillProblem) -> Verdict:
        reason = libraries.absent(peer)
        return Verdict.yes() if reason is None else Verdict.no(reason)

    return verdict
