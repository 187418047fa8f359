"""What a layer with a lightning indexer caches of new tokens: `packed_append` and `index_append` of the same tokens.

    q, latent, rope, positions, slots, table           as of `packed_append`
    k, weight, bias                                    as of `index_append`
    →   out, codes, scales, plain                      as of `packed_append`
        index_codes, index_scales                      as of `index_append`

Both caches have the same slots, and their pages the same tokens, as engines have them: token i is written to row
slots[i] % page of page slots[i] // page of the latent cache, and to row slots[i] % 64 of page slots[i] // 64 of the
index cache. Both turn by the same table, each in its own convention of pairs. The latent cache has layout v32, which is
that of the models with an indexer.

Inputs, oracle, and what is exact are those of the two workloads. Distributions of inputs are those of `packed_append`,
each of which `index_append` has too; in `odd` the indexer's keys have NaN and infinities as well as latents.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from mla_var3.errors import UserError
from mla_var3.workload import Bound, Case, Cost, Output, Workload, check_bound, check_integer, rope
from mla_var3.workload import index_append as keys
from mla_var3.workload import packed_append as latents
from mla_var3.workload.index_append import IndexAppendProblem
from mla_var3.workload.indexer_logits import PAGE, TOKEN_BYTES, D
from mla_var3.workload.packed_append import PackedAppendClass, PackedAppendProblem

if TYPE_CHECKING:
    import torch

LAYOUT = "v32"
GIVEN = 6  # inputs of `packed_append`


# ---------------------------------------------------------------- the problem
@dataclass(frozen=True)
class IndexedAppendClass:
    """What a compiled kernel is specialised on: what one of `packed_append` is, and the convention and the scales of
    the indexer's keys."""

    latents: PackedAppendClass
    interleaved_keys: bool
    powers_of_keys: bool

    def key(self) -> str:
        order, scales = "interleaved" if self.interleaved_keys else "halves", "powers" if self.powers_of_keys else "any"
        return f"indexed_{self.latents.key()}_{order}_{scales}"


@dataclass(frozen=True)
class IndexedAppendProblem(PackedAppendProblem):
    """As `PackedAppendProblem`, of layout v32. rest_of_keys: columns of nobody between rows of the indexer's keys.
    interleaved_keys: their convention of pairs. powers_of_keys: whether their scales are powers of two."""

    workload: ClassVar[str] = "indexed_append"

    rest_of_keys: int = 64
    interleaved_keys: bool = False
    powers_of_keys: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layout != LAYOUT:
            raise UserError(f"problem.layout = {self.layout!r}: beside an index cache stands one of layout {LAYOUT}.")
        if self.page % PAGE:
            raise UserError(f"problem.page = {self.page}: pages of an index cache are {PAGE} tokens, use a multiple.")
        check_integer("rest_of_keys", self.rest_of_keys, 0)
        for name in ("interleaved_keys", "powers_of_keys"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"problem.{name} = {getattr(self, name)!r} is not a boolean: use true or false.")

    @property
    def of_latents(self) -> PackedAppendProblem:
        return PackedAppendProblem(**{x.name: getattr(self, x.name) for x in fields(PackedAppendProblem)})

    @property
    def of_keys(self) -> IndexAppendProblem:
        return IndexAppendProblem(
            tokens=self.tokens, rest=self.rest_of_keys, interleaved=self.interleaved_keys, powers=self.powers_of_keys,
            positions=self.positions, index=self.index,
        )  # fmt: skip

    @property
    def label(self) -> str:
        more = ("_interleaved_keys" if self.interleaved_keys else "") + ("" if self.powers_of_keys else "_scales")
        return super().label + more

    def problem_class(self) -> IndexedAppendClass:  # type: ignore[override]
        return IndexedAppendClass(self.of_latents.problem_class(), self.interleaved_keys, self.powers_of_keys)

    def cost(self) -> Cost:
        """Of both; positions, slots and rows of the table are read once."""
        one, other = self.of_latents.cost(), self.of_keys.cost()
        shared = min(self.tokens, self.positions) * rope_bytes() + self.tokens * 2 * rope.INDICES[self.index]
        bytes_ = one.bytes + other.bytes - shared
        return Cost(one.flops + other.flops, bytes_, written=one.written + other.written, rows=one.rows)

    def input_bytes(self) -> int:
        return self.of_latents.input_bytes() + self.tokens * (D + self.rest_of_keys) * 2 + self.index_bytes()

    def output_bytes(self) -> int:
        return self.of_latents.output_bytes() + self.index_bytes()

    def index_bytes(self) -> int:
        """Of the index cache."""
        return self.pages * self.page * TOKEN_BYTES


def rope_bytes() -> int:
    """Of a row of the table."""
    return latents.ROPE * 4


# ---------------------------------------------------------------- inputs and outputs
def make_inputs(
    problem: IndexedAppendProblem, device: Any = "cpu", *, seed: int = 0, dist: str = "normal", **options: Any
) -> tuple[Any, ...]:
    """Random (q, latent, rope, positions, slots, table, k, weight, bias). Options as of `rope`."""
    given = latents.make_inputs(problem.of_latents, device, seed=seed, dist=dist, **options)
    _, _, _, positions, _, table = given
    return *given, *keys.drawn(problem.of_keys, positions.long(), table, seed=seed, dist=dist)


def new_outputs(problem: IndexedAppendProblem, q: torch.Tensor, pages: int | None = None) -> tuple[torch.Tensor, ...]:
    """(out, codes, scales, plain, index_codes, index_scales), uninitialised. pages: of the latent cache; default: those
    that `make_inputs` fills."""
    import torch

    made = latents.new_outputs(problem.of_latents, q, pages)
    tokens = made[1].shape[0] * problem.page
    room = torch.empty((tokens // PAGE, PAGE, TOKEN_BYTES), dtype=torch.uint8, device=q.device)
    return *made, *keys.views(room)


def reference(problem: IndexedAppendProblem, *inputs: Any, pages: int | None = None) -> tuple[Any, ...]:
    """The oracle, in float64, NaN in what must not be written; out and plain unrounded."""
    return appended(problem, *inputs, held=[x.double().fill_(math.nan) for x in new_outputs(problem, inputs[0], pages)])


def appended(problem: IndexedAppendProblem, *inputs: Any, held: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """What the outputs, which hold `held`, are after a call, in float64; out and plain unrounded."""
    given, (k, weight, bias) = inputs[:GIVEN], inputs[GIVEN:]
    of_latents = latents.appended(problem.of_latents, *given, held=held[:4])
    return *of_latents, *keys.appended(problem.of_keys, k, weight, bias, *given[3:], held=held[4:])


def bounds(dist: str) -> dict[str, Bound]:
    """By output."""
    return {**latents.bounds(dist), **{f"index_{name}": bound for name, bound in keys.bounds(dist).items()}}


# ---------------------------------------------------------------- cases
CASES = {
    **{name: what for name, what in latents.CASES.items() if name not in ("fp16", "narrow")},
    "other": "the other convention and other scales of the indexer's keys, planned anew",
}


def _cases(problem: IndexedAppendProblem, on_gpu: bool) -> Iterator[Case]:
    uneven = problem
    for case in latents.WORKLOAD.cases(problem, on_gpu):
        if case.name in CASES:
            uneven = case.problem if case.name == "uneven" else uneven
            yield case
    changed = {"interleaved_keys": not problem.interleaved_keys, "powers_of_keys": not problem.powers_of_keys}
    yield Case("other", uneven.replace(**changed), "normal", planned=True)


def rebound(problem: IndexedAppendProblem, *inputs: Any) -> IndexedAppendProblem:
    """The problem of other inputs of the same class. Raises `UserError` for a tensor that does not fit."""
    if len(inputs) != GIVEN + 3:
        raise UserError(f"cannot bind: this kernel takes {GIVEN + 3} tensors, and {len(inputs)} are given.")
    one: IndexedAppendProblem = rope.WORKLOAD.rebound(problem, *inputs[:GIVEN])
    k, weight, bias = inputs[GIVEN:]
    check_bound("k", k, (one.tokens, D), "bf16")
    check_bound("weight", weight, (D,), "fp32")
    check_bound("bias", bias, (D,), "fp32")
    return one.replace(rest_of_keys=k.stride(0) - D if len(k) > 1 else problem.rest_of_keys)


def sample(small: bool, given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields where nothing else is asked for. small: that a CPU runs in seconds."""
    return latents.sample(small, given)


WORKLOAD = Workload(
    name="indexed_append",
    problem=IndexedAppendProblem,
    outputs=(
        *latents.WORKLOAD.outputs,
        *(Output(f"index_{x.name}", x.axes, rows=False, partial=True, bits=True) for x in keys.WORKLOAD.outputs),
    ),
    make_inputs=make_inputs,
    reference=reference,
    cases=_cases,
    case_names=CASES,
    quick=latents.WORKLOAD.quick,
    bounds=bounds,
    rebound=rebound,
    small=rope.small,
    sample=sample,
)
