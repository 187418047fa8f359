"""Problems as calls of the public functions for them, and whether what these return is right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mla_var3 import workload
from mla_var3.check.judge import compare
from mla_var3.lab.naming import cell_name
from mla_var3.ops import mla_decode, packed_mla_decode, sparse_mla_decode
from mla_var3.workload.decode import MlaProblem, fifth_input
from mla_var3.workload.sparse_decode import SparseProblem, input_names

#: Arguments by names of the inputs of sparse decode, where the two differ.
NAMES = {
    "cache": "kv_cache", "lengths": "topk_lens", "scale": "cache_scale", "extra_lengths": "extra_topk_lens",
}  # fmt: skip


def arguments(problem: MlaProblem | SparseProblem, inputs: Sequence[Any]) -> dict[str, Any]:
    """The inputs by the names of arguments, with what else the problem says but its scale."""
    if isinstance(problem, MlaProblem):
        given = dict(zip(("q", "kv_cache", "page_table", "seq_lens"), inputs, strict=False))
        fifth = {name: x.bool() if name == "mask" else x for name, x in fifth_input(*inputs).items()}
        return {**given, **fifth, "causal": problem.causal, "head_dim_v": problem.k}
    given = {NAMES.get(name, name): x for name, x in zip(input_names(problem), inputs, strict=True)}
    extra = {"extra_layout": problem.extra_layout} if problem.extra_layout else {}
    return {**given, "layout": problem.layout, **extra}


def attend(problem: MlaProblem | SparseProblem, inputs: Sequence[Any], **options: Any) -> tuple[Any, Any]:
    """(out, lse) of the function for the problem."""
    function: Any = mla_decode
    if isinstance(problem, SparseProblem):
        function = packed_mla_decode if problem.paged else sparse_mla_decode
    found: tuple[Any, Any] = function(**arguments(problem, inputs), return_lse=True, **options)
    return found


def right(problem: Any, inputs: Sequence[Any], found: Sequence[Any], dist: str = "normal") -> None:
    """Sees that outputs are what the oracle gives, within the bounds of the inputs' distribution."""
    of = workload.get(problem.workload)
    verdict = compare(of, found, of.reference(problem, *inputs), of.bounds(dist))
    assert verdict.ok, f"{cell_name(problem)} {dist}: {verdict.reason}"


def same(found: Sequence[Any], wanted: Sequence[Any]) -> bool:
    """Whether tensors are equal, each to its own."""
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


# ---------------------------------------------------------------- tensors that lie apart
def pages_apart(cache: Any, room: int = 1, before: int = 0) -> Any:
    """The same pages with NaN between them, as long as `room` pages, `before` of it in front of each."""
    between = cache.new_full((len(cache), 1 + room, *cache.shape[1:]), float("nan"))
    between[:, before] = cache
    return between[:, before]


def touched(view: Any, mark: float) -> int:
    """How many elements of the memory around a view no longer hold a mark."""
    room = view.new_empty(0).set_(view.untyped_storage()).clone()
    room.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(mark)
    return int((room != mark).sum())
