"""Keys of new tokens on their way into the lightning indexer's cache: normed, turned by RoPE, quantised.

    k (tokens, 128) bf16, projected    weight, bias (128,) float32    positions (tokens,)    slots (tokens,)
    table (positions, 64) float32: cosines, then sines, 32 each
    →   codes (pages, 64, 128) uint8 and scales (pages, 64) int32, views of an index cache (`views`): of token i in row
        slots[i] % 64 of page slots[i] // 64

    y      = (k - mean) / sqrt(variance + eps) · weight + bias        over the 128 columns, rounded to bf16
    y[:64] = turned by the position's cosines and sines               rounded to bf16
    scale  = max(largest magnitude, 1e-4) / 448                       with powers: the next power of two from there on
    code   = y / scale in e4m3

Norm (the variance is the mean of squares of deviations), RoPE on the first 64 columns, and rounding are those of
DeepSeek V3.2's and GLM-5's models. Pairs that turn together are (2i, 2i + 1), interleaved, as GLM-5's, or (i, i + 32),
halves, as DeepSeek's indexer is trained. DeepSeek's code turns q and k by a Hadamard matrix too, which leaves their
products as they are: leave it out on both sides, or do it on both.

Scales are the bits of float32. NaN and infinities become the code 0x7F and do not count for the scale; as the norm goes
over the whole row, one of them makes all of its columns NaN. A token whose slot is negative, or past the last row of
the cache, is not written, and no other row is; a position that is no row of the table makes the first 64 columns NaN.

Codes and scales are exact to the bit. What is rounded to bf16 is computed in float32, whose last bits depend on the
order of a sum; inputs are drawn so that no value lies where this would change what it is rounded to.

Distributions of inputs (`dist`):

    normal     N(0, 1) in k, weight of about 1, bias of about 0; positions and slots at random
    ends       positions 0 and the last one alone
    huge       8e3 · N(0, 1)
    tiny       2^-20 · N(0, 1): the variance is smaller than eps
    equal      rows of one value, whose norm is the bias; it is 0 in the first half of columns
    odd        NaN and infinities in some rows, positions outside of the table in others
    skipped    every third token has a negative slot
    none       no token has a slot
    beyond     every second token has a slot past the last row of the cache, some of them by far
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from mla_var3.errors import UserError, nearest
from mla_var3.packed_cache import E4M3_MAX, E4M3_NAN
from mla_var3.workload import Bound, Case, Cost, Output, Problem, Workload, check_bound, check_integer, rope
from mla_var3.workload.indexer_logits import PAGE, TOKEN_BYTES, D, index_pages
from mla_var3.workload.rope import INDICES

if TYPE_CHECKING:
    import torch

ROPE = 64  # columns, the first ones
EPS = 1e-6
#: Of a row: where all columns are smaller, the scale is that of this one.
LEAST = 1e-4
DISTRIBUTIONS = ("normal", "ends", "huge", "tiny", "equal", "odd", "skipped", "none", "beyond")
_FACTORS = {"huge": 8e3, "tiny": 2.0**-20}
#: How far float32 may be off, of the terms of a sum: the norm's, and a turned pair's.
_OFF = 2.0**-20


@dataclass(frozen=True)
class IndexAppendClass:
    """What a compiled kernel is specialised on."""

    interleaved: bool
    powers: bool
    index: str

    def key(self) -> str:
        order, scales = "interleaved" if self.interleaved else "halves", "powers" if self.powers else "scales"
        return f"index_append_{scales}_{order}_{self.index}"


@dataclass(frozen=True)
class IndexAppendProblem(Problem):
    """tokens: new ones. rest: columns of nobody between rows of k. interleaved: the convention of pairs. powers:
    whether scales are powers of two. positions: rows of the table. index: dtype of positions and slots. Raises
    `UserError`, naming the field, when it makes no sense."""

    workload: ClassVar[str] = "index_append"
    layer: ClassVar[str] = "indexer"

    tokens: int = 128
    rest: int = 64
    interleaved: bool = False
    powers: bool = True
    positions: int = 163840
    index: str = "int64"
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        for name in ("tokens", "positions"):
            check_integer(name, getattr(self, name), 1)
        check_integer("rest", self.rest, 0)
        for name in ("interleaved", "powers"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"problem.{name} = {getattr(self, name)!r} is not a boolean: use true or false.")
        if not isinstance(self.index, str) or self.index not in INDICES:
            raise UserError(f"problem.index = {self.index!r} is unknown: {nearest(str(self.index), INDICES)}.")
        if self.dtype != "bf16":
            raise UserError(f"problem.dtype = {self.dtype!r} is not taken: keys are bf16 in front of their codes.")

    @property
    def pages(self) -> int:
        """Pages of the cache: one more than the tokens fill."""
        return -(-self.tokens // PAGE) + 1

    @property
    def label(self) -> str:
        return f"n{self.tokens}" + ("_interleaved" if self.interleaved else "") + ("" if self.powers else "_scales")

    def problem_class(self) -> IndexAppendClass:
        return IndexAppendClass(self.interleaved, self.powers, self.index)

    def cost(self) -> Cost:
        """Rows of k and of the table read, tokens of the cache written. FLOPs: some ten a column."""
        read = self.tokens * (D * 2 + 2 * INDICES[self.index]) + min(self.tokens, self.positions) * ROPE * 4 + D * 8
        return Cost(10 * self.tokens * D, read + self.tokens * TOKEN_BYTES, written=self.tokens * TOKEN_BYTES)

    def input_bytes(self) -> int:
        indices = self.tokens * 2 * INDICES[self.index] + self.positions * ROPE * 4
        return self.tokens * (D + self.rest) * 2 + indices + self.output_bytes()

    def output_bytes(self) -> int:
        return self.pages * PAGE * TOKEN_BYTES


# ---------------------------------------------------------------- the computation, in float64
def normed(k: Any, weight: Any, bias: Any) -> tuple[Any, Any]:
    """(rows normed, how far float32 may be off), float64."""
    x = k.double()
    apart = x - x.mean(-1, keepdim=True)
    reciprocal = (apart.square().mean(-1, keepdim=True) + EPS).rsqrt()
    y = apart * reciprocal * weight.double() + bias.double()
    off = ((x.abs() + apart.abs()) * reciprocal * weight.double().abs() + bias.double().abs()) * _OFF
    return y, off


def _turns(positions: Any, table: Any) -> tuple[Any, Any]:
    turn = table[positions.long().clamp(0, len(table) - 1)].double()
    turn[(positions < 0) | (positions >= len(table))] = math.nan
    return turn[:, : ROPE // 2], turn[:, ROPE // 2 :]


def keys_of(problem: IndexAppendProblem, k: Any, weight: Any, bias: Any, positions: Any, table: Any) -> tuple[Any, Any]:
    """(keys (tokens, 128) bf16 that are quantised, whether float32 may round one of a row elsewhere (tokens,) bool)."""
    import torch

    y, off = normed(k, weight, bias)
    near = _near(y, off)
    y = y.bfloat16().double()
    cosines, sines = _turns(positions, table)
    turned = rope.rotated(y[:, :ROPE], cosines, sines, interleaved=problem.interleaved)
    sizes = y[:, :ROPE].abs(), cosines.abs()
    off = torch.maximum(
        *(rope.rotated(*sizes, sign * sines.abs(), interleaved=problem.interleaved) for sign in (1, -1))
    )
    near |= _near(turned, off * _OFF)
    return torch.cat([turned.bfloat16(), y[:, ROPE:].bfloat16()], dim=1), near


def _near(y: Any, off: Any) -> Any:
    """(tokens,) whether a value of the row is rounded to another bf16 number if it is off by so much."""
    low, high = (y - off).bfloat16(), (y + off).bfloat16()
    return ((low != high) & ~y.isnan()).any(-1)


def quantised(keys: Any, powers: bool) -> tuple[Any, Any]:
    """(codes (tokens, 128) uint8, scales (tokens,) float32) of keys in bf16."""
    import torch

    x = keys.float()
    finite = x.isfinite()
    largest = x.abs().masked_fill(~finite, 0.0).amax(-1)
    # By a tensor: over a number torch multiplies by its reciprocal on a GPU, which rounds twice.
    scale = largest.clamp(min=LEAST) / torch.full_like(largest, E4M3_MAX)
    if powers:
        bits = scale.view(torch.int32) + 0x7FFFFF
        scale = ((bits >> 23) << 23).view(torch.float32)
    over = (x / scale[:, None]).clamp(-E4M3_MAX, E4M3_MAX)
    codes = over.to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.masked_fill(~finite, E4M3_NAN), scale


# ---------------------------------------------------------------- inputs and outputs
def make_inputs(
    problem: IndexAppendProblem, device: Any = "cpu", *, seed: int = 0, dist: str = "normal", **_: Any
) -> tuple[Any, ...]:
    """Random (k, weight, bias, positions, slots, table)."""
    import torch

    if dist not in DISTRIBUTIONS:
        raise UserError(f"index_append input distribution {dist!r} is unknown: {nearest(dist, DISTRIBUTIONS)}.")
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)
    n, index = problem.tokens, getattr(torch, problem.index)
    table = rope._table(problem.positions, ROPE, str(device))
    positions = torch.randint(problem.positions, (n,), device=device, generator=generator)
    if dist == "ends":
        positions = torch.where(positions % 2 == 0, 0, problem.positions - 1)
    k, weight, bias = _drawn(problem, positions, table, generator, dist)
    if dist == "odd":
        positions[1::3] = torch.where(positions[1::3] % 2 == 0, -1, problem.positions)
    slots = torch.randperm(problem.pages * PAGE, device=device, generator=generator)[:n]
    if dist == "skipped":
        slots[::3] = -1
    elif dist == "none":
        slots[:] = -1
    elif dist == "beyond":
        slots[::2] += problem.pages * PAGE
        slots[::4] = torch.iinfo(index).max
    return k, weight, bias, positions.to(index), slots.to(index), table


def drawn(problem: IndexAppendProblem, positions: Any, table: Any, *, seed: int, dist: str) -> tuple[Any, Any, Any]:
    """Random (k (tokens, 128) bf16, weight (128,), bias (128,) float32) for tokens whose positions (tokens,) and table
    (positions, 64) are there, on the table's device. The same seed draws the same values. dist: of `DISTRIBUTIONS`; of
    one that concerns positions or slots alone they are normal."""
    import torch

    generator = torch.Generator(device=table.device)
    generator.manual_seed(seed)
    return _drawn(problem, positions, table, generator, dist)


def _drawn(problem: IndexAppendProblem, positions: Any, table: Any, generator: Any, dist: str) -> tuple[Any, Any, Any]:
    import torch

    n, device = problem.tokens, table.device
    weight = 1.0 + 0.25 * torch.randn(D, device=device, generator=generator)
    bias = 0.1 * torch.randn(D, device=device, generator=generator)
    if dist == "equal":
        bias[:ROPE] = 0.0
    k = torch.full((n, D + problem.rest), math.nan, dtype=torch.bfloat16, device=device)[:, :D]
    wrong = torch.ones(n, dtype=torch.bool, device=device)
    while bool(wrong.any()):
        values = torch.randn((n, D), device=device, generator=generator) * _FACTORS.get(dist, 1.0)
        values = values[:, :1].expand(n, D) if dist == "equal" else values
        k[wrong] = values.bfloat16()[wrong]
        # Rows of one value are the bias, whose own bits decide: they are as they are.
        wrong = wrong & (keys_of(problem, k, weight, bias, positions, table)[1] & (dist != "equal"))
    if dist == "odd":
        odd = torch.tensor([math.nan, math.inf, -math.inf, -math.nan], device=device).bfloat16()
        k[::3, 77] = odd[torch.arange(len(k[::3]), device=device) % 4]
    return k, weight, bias


def views(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes (pages, 64, 128) uint8, scales (pages, 64) int32) of an index cache (pages, 64, 132) uint8."""
    import torch

    codes, scales = index_pages(cache)
    return codes, scales.view(torch.int32)


def new_outputs(problem: IndexAppendProblem, k: torch.Tensor, pages: int | None = None) -> tuple[Any, Any]:
    """(codes, scales) of an uninitialised cache. pages: of it; default: those that `make_inputs` fills."""
    import torch

    pages = problem.replace(tokens=max(len(k), 1)).pages if pages is None else pages
    return views(torch.empty((pages, PAGE, TOKEN_BYTES), dtype=torch.uint8, device=k.device))


def reference(problem: IndexAppendProblem, *inputs: Any, pages: int | None = None) -> tuple[Any, Any]:
    """The oracle: (codes, scales) in float64, NaN in what must not be written."""
    held = [x.double().fill_(math.nan) for x in new_outputs(problem, inputs[0], pages)]
    return appended(problem, *inputs, held=held)


def appended(problem: IndexAppendProblem, *inputs: Any, held: Any) -> tuple[Any, Any]:
    """What (codes, scales), which hold `held`, are after a call, in float64."""
    import torch

    k, weight, bias, positions, slots, table = inputs
    keys, _ = keys_of(problem, k, weight, bias, positions, table)
    codes, scales = quantised(keys, problem.powers)
    there = rope.written(slots, held[1].numel())
    at = (slots[there].long() // PAGE, slots[there].long() % PAGE)
    after_codes, after_scales = (x.double().clone() for x in held)
    after_codes[at], after_scales[at] = codes[there].double(), scales.view(torch.int32)[there].double()
    return after_codes, after_scales


EXACT = Bound(abs=0.5, rel=0.0, cos=1.0)


def bounds(dist: str) -> dict[str, Bound]:
    """By output."""
    return {"codes": EXACT, "scales": EXACT}


# ---------------------------------------------------------------- cases
CASES = {
    "own": "the problem as it is (on a CPU: cut down to a few tokens)",
    "one_token": "a single token, bound to the planned kernel",
    "uneven": "131 tokens (on a CPU: 5), a multiple of nothing",
    "ends": "the first position and the last one of the table",
    "huge": "large values, which the norm takes out",
    "tiny": "values whose variance is smaller than eps",
    "equal": "rows of one value",
    "odd": "NaN and infinities, positions outside of the table",
    "skipped": "every third token without a slot",
    "none": "no token with a slot",
    "beyond": "every second token's slot past the end of the cache",
    "apart": "rows of k further apart, NaN between them",
    "in_place": "other values, positions and slots in the tensors of a bound kernel",
    "planned_few": "3 tokens, planned anew",
    "planned_many": "more tokens than a device holds at a time, planned anew (on a GPU)",
    "other": "the other convention, planned anew",
    "scales": "scales that are no powers of two, or are, planned anew",
    "narrow": "32-bit indices, planned anew",
}
QUICK = ("own", "one_token", "uneven", "odd", "skipped")


def _cases(problem: IndexAppendProblem, on_gpu: bool) -> Iterator[Case]:
    own = problem if on_gpu else small(problem)
    uneven = own.replace(tokens=131 if on_gpu else 5)
    yield Case("own", own, "normal", planned=True)
    yield Case("one_token", own.replace(tokens=1), "normal")
    yield Case("uneven", uneven, "normal")
    for dist in DISTRIBUTIONS[1:]:
        yield Case(dist, uneven, dist)
    yield Case("apart", uneven.replace(rest=problem.rest + 64), "normal")
    yield Case("in_place", uneven, "normal", then=uneven)
    yield Case("planned_few", own.replace(tokens=3), "normal", planned=True)
    yield Case("planned_many", own.replace(tokens=5003), "skipped", planned=True, gpu=True)
    yield Case("other", uneven.replace(interleaved=not problem.interleaved), "normal", planned=True)
    yield Case("scales", uneven.replace(powers=not problem.powers), "normal", planned=True)
    yield Case("narrow", uneven.replace(index="int32"), "beyond", planned=True)


def rebound(problem: IndexAppendProblem, *inputs: Any) -> IndexAppendProblem:
    """The problem of other inputs of the same class. Raises `UserError` for a tensor that does not fit."""
    if len(inputs) != 6:
        raise UserError(f"cannot bind: this kernel takes 6 tensors, and {len(inputs)} are given.")
    k, weight, bias, positions, slots, table = inputs
    n = len(k)
    check_bound("k", k, (n, D), "bf16")
    check_bound("weight", weight, (D,), "fp32")
    check_bound("bias", bias, (D,), "fp32")
    check_bound("positions", positions, (n,), problem.index)
    check_bound("slots", slots, (n,), problem.index)
    check_bound("table", table, (len(table), ROPE), "fp32")
    return problem.replace(tokens=n, positions=len(table), rest=k.stride(0) - D if n > 1 else problem.rest)


def small(problem: IndexAppendProblem) -> IndexAppendProblem:
    """A few tokens and a short table: seconds on a CPU."""
    return problem.replace(tokens=min(problem.tokens, 4), positions=min(problem.positions, 4096))


def sample(small: bool, given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields where nothing else is asked for. small: that a CPU runs in seconds."""
    return {"tokens": 4, "positions": 4096} if small else {"tokens": 128}


WORKLOAD = Workload(
    name="index_append",
    problem=IndexAppendProblem,
    outputs=tuple(
        Output(name, axes, rows=False, partial=True, bits=True)
        for name, axes in (("codes", ("page", "row", "column")), ("scales", ("page", "row")))
    ),
    make_inputs=make_inputs,
    reference=reference,
    cases=_cases,
    case_names=CASES,
    quick=QUICK,
    bounds=bounds,
    rebound=rebound,
    small=small,
    sample=sample,
)
