"""Plans of peers that prefill: the decompressed form, keys of d + p and values of d columns a head."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mla_var3.kernel.peer.lib import find
from mla_var3.kernel.peer.lib.kernel import NoKnobs, PeerMixin
from mla_var3.runtime.correctness.prefill import PrefillPlan, takes_prefill
from mla_var3.runtime.types import Verdict

if TYPE_CHECKING:
    from mla_var3.problem import MlaProblem


class PeerPrefillPlan(PeerMixin, PrefillPlan):
    """A peer of the decompressed form: inputs (q, k, v), outputs (out, lse)."""

    tiling_type = NoKnobs
    plans_lengths = False
    leaves_out = ()


def takes_peer_prefill(peer: str) -> Callable[[MlaProblem], Verdict]:
    """A predicate: the problem is a prefill, and the library is here."""

    def verdict(problem: MlaProblem) -> Verdict:
        fits = takes_prefill(problem)
        if not fits:
            return Verdict.no(f"peer/{peer} computes prefill: {fits.reason}")
        reason = find.absent(peer)
        return Verdict.yes() if reason is None else Verdict.no(reason)

    return verdict
