"""Plans of peers that decode sparsely, and their indices as libraries want them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mla_var3.kernel.peer.prims.kernel import NoKnobs, PeerMixin
from mla_var3.runtime.plan import KernelPlan
from mla_var3.workload import sparse_decode

if TYPE_CHECKING:
    from collections.abc import Mapping


class PeerSparsePlan(PeerMixin, KernelPlan):
    """A peer of sparse decode: inputs of `workload.sparse_decode`, outputs (out, lse)."""

    workload = sparse_decode.WORKLOAD
    tiling_type = NoKnobs


def names_token(given: Mapping[str, Any], prefix: str = "", *, counted: bool = True) -> Any:
    """(b, s, topk) bool: whether an index names a token of its cache and, if counted, stands before the request's
    length. given: inputs by their names. prefix: "extra_" for those of the extra cache."""
    import torch

    indices, cache = given[f"{prefix}indices"], given[f"{prefix}cache"]
    names = (indices >= 0) & (indices < cache.shape[0] * cache.shape[1])
    lengths = given.get(f"{prefix}lengths")
    if counted and lengths is not None:
        names &= torch.arange(indices.shape[-1], device=indices.device) < lengths.view(-1, 1, 1)
    return names
