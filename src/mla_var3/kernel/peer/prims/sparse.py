"""Plans of peers that decode sparsely, and their indices and caches as libraries want them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mla_var3.catalogue import libraries
from mla_var3.errors import Verdict
from mla_var3.kernel.peer.prims.kernel import NoKnobs, PeerMixin
from mla_var3.packed_cache import Layout, unpack
from mla_var3.runtime.plan import KernelPlan
from mla_var3.workload import sparse_decode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mla_var3.workload.sparse_decode import SparseProblem

#: Columns that are converted at a time: in float64 on the way.
_CHUNK = 1 << 26


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


def single_pages(given: Mapping[str, Any]) -> tuple[Any, Any]:
    """The indices as page tables with pages of size 1, of b · s requests of one query token: (b · s, topk), those that
    name a token first and in their order, 0 behind them; and the number of these, (b · s,) int32."""
    import torch

    indices, names = given["indices"], names_token(given)
    first = names.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    lens = names.sum(-1)
    counts = torch.arange(indices.shape[-1], device=indices.device) < lens.unsqueeze(-1)
    table = indices.gather(-1, first).where(counts, 0)
    return table.flatten(0, 1), lens.flatten().to(torch.int32)


def takes_bf16(peer: str) -> Callable[[SparseProblem], Verdict]:
    """`takes` of a peer that attends to one cache in bf16, converted where it is v32, and knows no sinks."""

    def takes(problem: SparseProblem) -> Verdict:
        if problem.layout not in ("v32", "bf16"):
            return Verdict.no(f"peer/{peer} takes layout bf16, and v32 converted; the problem has {problem.layout}")
        if problem.sink:
            return Verdict.no(f"peer/{peer} takes no attention sinks in float32; the problem has sinks")
        if problem.extra:
            return Verdict.no(f"peer/{peer} takes one cache; the problem has an extra one")
        reason = libraries.absent(peer)
        return Verdict.yes() if reason is None else Verdict.no(reason)

    return takes


def in_bf16(layout: Layout, cache: Any) -> Any:
    """(pages, page, columns), contiguous: the cache itself where it is so."""
    import torch

    if layout.name == "bf16":
        return cache.contiguous()
    pages, page, _ = cache.shape
    made = cache.new_empty((pages, page, layout.columns), dtype=torch.bfloat16)
    step = max(1, _CHUNK // (page * layout.columns))
    for begin in range(0, pages, step):
        made[begin : begin + step] = unpack(layout, cache[begin : begin + step])
    return made
