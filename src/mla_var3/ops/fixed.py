"""The fixed-split mode: the bits of a request do not depend on what else is in the batch.

Left to itself, a version splits a request by how many others want the chip, and sums in another order have other bits.
Two kinds of version split by a request's own length, whatever the batch:

    split_tokens   splits of so many tokens, the last one shorter, merged in an order that their number decides
    num_splits     told 1, a version without the other knob computes each request in one piece

The version, its knobs and with them every sum follow from the problem class, the device and the number of tokens, never
from b, the lengths or the page table's width. Versions of the second kind are taken only where none of the first is
there: a long request then keeps one query tile's CTA busy for all of its tokens.

In sparse decode a request's length is the number of its indices, those that name no token among them: as many as the
caller's lengths say, or all that a row has room for. With an extra cache a split may have indices of both, those of the
extra one behind the others, each filled up to a KV tile.

What it costs: splits never become shorter to fill a chip, so a few long requests leave most SMs idle; and the
partial results have room for every split that the page table could hold. `mla-var3 sweep experiment=fixed_split`
measures it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from mla_var3.errors import Unsupported, UserError, Verdict
from mla_var3.workload import decode, sparse_decode
from mla_var3.workload.decode import MlaProblem

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.dispatch import Choice
    from mla_var3.runtime.plan import KernelPlan
    from mla_var3.workload.sparse_decode import SparseProblem

SPLIT_TOKENS = 4096
STEP = 64  # tokens of a KV tile
SPARSE_TOKENS = 2048  # indices of a query token that a choice for sparse decode is made for, at least


def fixed_choice(
    problem: MlaProblem | SparseProblem, split_tokens: int, device: Device, name: str = "split_tokens"
) -> Choice:
    """The version and knobs that compute a problem's class in splits of so many tokens. name: what the caller calls
    that number. Raises `Unsupported` when no version can."""
    whole = isinstance(split_tokens, int) and not isinstance(split_tokens, bool)
    if not whole or split_tokens < 1 or split_tokens % STEP:
        raise UserError(
            f"{name} = {split_tokens!r} is not a whole number of KV tiles: give a multiple of {STEP} tokens."
        )
    if isinstance(problem, MlaProblem) and problem.packed:
        raise UserError(f"{name} is for requests with equally many query tokens: leave it or cu_seqlens_q out.")
    return _choice(problem.problem_class(), split_tokens, device)


@functools.lru_cache(maxsize=1024)
def _choice(problem_class: Any, split_tokens: int, device: Device) -> Choice:
    """The fastest one where as many splits as fill the device are a request each."""
    from mla_var3.dispatch import choose

    b = max(1, device.num_sms)
    problem: MlaProblem | SparseProblem
    if isinstance(problem_class, sparse_decode.SparseClass):
        tokens = max(split_tokens, SPARSE_TOKENS)
        sizes = {"b": b, "t": tokens}
        if not problem_class.paged:
            sizes |= {"topk": tokens, "extra": tokens if problem_class.extra_page else 0}
        problem = sparse_decode.SparseProblem(**{**vars(problem_class), **sizes})
    else:
        problem = decode.of_class(problem_class, b=b, t=split_tokens)

    def splits(plan_type: type[KernelPlan], plan: KernelPlan) -> Verdict:
        return splits_by_length(plan_type, plan, split_tokens)

    try:
        choice, knob = choose(problem, device, accepts=splits), ("split_tokens", split_tokens)
    except Unsupported:
        choice, knob = choose(problem, device, accepts=leaves_whole), ("num_splits", 1)
    others: Any = choice.tiling
    if isinstance(problem, sparse_decode.SparseProblem):
        # Defaults of its versions look at the batch: those of this one stay.
        others = choice.plan(problem, device).tiling.to_record().items()
    others = tuple(pair for pair in others if pair[0] != knob[0])
    return dataclasses.replace(choice, tiling=(*others, knob))


def splits_by_length(plan_type: type[KernelPlan], plan: KernelPlan, split_tokens: int) -> Verdict:
    """Whether a version splits requests by their own length, so many tokens at a time."""
    return _with_knob(plan_type, plan, "split_tokens", split_tokens)[0]


def leaves_whole(plan_type: type[KernelPlan], plan: KernelPlan) -> Verdict:
    """Whether a version computes every request in one piece when it is told to."""
    verdict, made = _with_knob(plan_type, plan, "num_splits", 1)
    stages = getattr(made.plan_empty(), "stages", ()) if verdict and made is not None else ()
    if stages:
        return Verdict.no(f"with num_splits = 1 it has {len(stages)} stages, between which results may meet")
    return verdict


def _with_knob(
    plan_type: type[KernelPlan], plan: KernelPlan, knob: str, value: int
) -> tuple[Verdict, KernelPlan | None]:
    """Whether a version may have a value of a knob, and its plan with that."""
    if not plan.deterministic:
        return Verdict.no("it does not give the same bits twice"), None
    record = plan.tiling.to_record()
    if knob not in record:
        return Verdict.no(f"it has no knob {knob}, so a request's own length does not decide its splits"), None
    made = plan_type(plan.problem, plan.tiling.from_record({**record, knob: value}), plan.device)
    return made.feasible(), made
