"""RoPE of new tokens' queries and keys, and their way into a packed latent cache: `rope`, with bytes for a cache.

    q (tokens, h, columns), p = 64 rope columns last    latent (tokens, k), normalised    rope (tokens, p)
    positions (tokens,)    slots (tokens,)    table (positions, p) float32    [scale (1,) float32: of layout flat]
    →   out (tokens, h, k + p)      as in `rope`
        codes, scales, plain        of token i in row slots[i] % page of page slots[i] // page of the cache

The cache's row is what `packed_cache.pack` makes of the row that `rope` writes in bf16: the latent, and the rope
columns, rotated and rounded to bf16. k is 512, and 448 where keys have 512 columns. Layouts are those of
`mla_var3.packed_cache` but bf16, which is `rope`'s.

The outputs beside out are views of a cache (`views`), each (pages, page, its columns):

    codes     uint8: the bits of e4m3, or of two e2m1, of the latent
    scales    int32, the bits of float32, in v32; uint8, ue8m0 or e4m3, elsewhere; no columns in flat
    plain     bf16: the rope columns; in layouts without bf16 uint8, codes as of the latent

Codes and scales are exact to the bit. Columns in bf16 are judged as in `rope`, against what they are before they are
rounded: float32 is off by up to 2^-23 of the larger product, so where the exact value lies that close to the middle
between two bf16 numbers, a right kernel may write either, and against the nearest one the other is off by 2^-7. That is
1 in 10^5 of N(0, 1). Rows of other slots stay as they are, and so does v4's byte that nobody reads.

Distributions of inputs are those of `rope`. The table of layouts without bf16 has quarter turns alone, which are exact
in any precision: elsewhere a column that float32 rounds to the other side could get another code. Two are new:

    tiny       2^-7 · N(0, 1): latents below the smallest scale
    odd        NaN and infinities among latents, of layouts without bf16 among rope columns too: all the columns of a
               scale, some of them, and none
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from mla_var3.errors import UserError, nearest
from mla_var3.packed_cache import E4M3_MAX, LAYOUTS, NO_ROPE, V41, Layout, fields, layout_of, new_cache, pack
from mla_var3.workload import Bound, Case, Cost, Output, Workload, check_bound, rope
from mla_var3.workload.rope import INDICES, RopeProblem

if TYPE_CHECKING:
    import torch

#: Those of the same inputs as N(0, 1), some of which are changed afterwards.
CHANGED = ("tiny", "odd")
DISTRIBUTIONS = (*rope.DISTRIBUTIONS, *CHANGED)
ROPE = 64  # columns
#: The one scale of layout flat, for values up to 3: larger ones are cut.
_LARGEST = 3.0


# ---------------------------------------------------------------- the problem
@dataclass(frozen=True)
class PackedAppendClass:
    """What a compiled kernel is specialised on."""

    h: int
    columns: int
    interleaved: bool
    page: int
    index: str
    layout: str
    powers: bool

    def key(self) -> str:
        order = "interleaved" if self.interleaved else "halves"
        scales = "powers" if self.powers else "scales"
        return f"append_{self.layout}_{scales}_h{self.h}_c{self.columns}_{order}_{self.page}_{self.index}"


@dataclass(frozen=True)
class PackedAppendProblem(RopeProblem):
    """As `RopeProblem`. layout: of the cache. powers: whether its scales are powers of two. k follows from the layout,
    p is 64, dtype bf16."""

    workload: ClassVar[str] = "packed_append"

    layout: str = "v32"
    powers: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.layout, str) or self.layout not in LAYOUTS:
            raise UserError(f"problem.layout = {self.layout!r} is unknown: {nearest(str(self.layout), LAYOUTS)}.")
        if self.layout == "bf16":
            raise UserError("problem.layout = 'bf16' has no codes: workload rope appends to such a cache.")
        if self.layout in NO_ROPE:
            raise UserError(
                f"problem.layout = {self.layout!r} has no rope columns, which are turned here: write such a cache with "
                "mla_var3.packed_cache.pack."
            )
        latent = self.cache.columns - ROPE
        if self.k not in (latent, type(self).k):
            raise UserError(f"problem.k = {self.k}: tokens of layout {self.layout} have {latent} latent columns.")
        object.__setattr__(self, "k", latent)
        if self.p != ROPE:
            raise UserError(f"problem.p = {self.p}: tokens of layout {self.layout} have {ROPE} rope columns.")
        if self.dtype != "bf16":
            raise UserError(f"problem.dtype = {self.dtype!r} is not taken: rope columns of packed caches are bf16.")
        if not isinstance(self.powers, bool):
            raise UserError(f"problem.powers = {self.powers!r} is not a boolean: use true or false.")
        if not self.powers and self.layout != "v32":
            raise UserError(f"problem.powers = false is for layout v32: scales of {self.layout} are not chosen here.")
        super().__post_init__()

    @property
    def cache(self) -> Layout:
        return layout_of(self.layout)

    @property
    def v41(self) -> bool:
        """Whether the cache has a layout of DeepSeek V4.1."""
        return self.layout in V41

    @property
    def label(self) -> str:
        return f"{self.layout}_{super().label}"

    def problem_class(self) -> PackedAppendClass:  # type: ignore[override]
        return PackedAppendClass(
            self.h, self.columns, self.interleaved, self.page, self.index, self.layout, self.powers
        )  # fmt: skip

    def cost(self) -> Cost:
        """As in `rope`, with a packed token's bytes written."""
        token = self.cache.token_bytes - self.cache.padding
        read = self.tokens * (self.h * self.p + self.width) * self.element_bytes
        written = self.tokens * (self.h * self.p * self.element_bytes + token)
        tables = min(self.tokens, self.positions) * self.p * 4 + self.tokens * 2 * INDICES[self.index]
        of_rope = super().cost()
        return Cost(of_rope.flops, read + written + tables, written=written, rows=of_rope.rows)

    def output_bytes(self) -> int:
        return self.tokens * self.h * self.width * self.element_bytes + self.pages * self.cache.page_bytes(self.page)


# ---------------------------------------------------------------- inputs and outputs
def make_inputs(
    problem: PackedAppendProblem, device: Any = "cpu", *, seed: int = 0, dist: str = "normal", **options: Any
) -> tuple[Any, ...]:
    """Random (q, latent, rope, positions, slots, table), and the scale of layout flat. Options as of `rope`."""
    import torch

    if dist not in DISTRIBUTIONS:
        raise UserError(f"packed_append input distribution {dist!r} is unknown: {nearest(dist, DISTRIBUTIONS)}.")
    made = rope.make_inputs(problem, device, seed=seed, dist="normal" if dist in CHANGED else dist, **options)
    if dist == "tiny":
        for x in made[1:3]:
            x.mul_(2.0**-7)
    elif dist == "odd":
        for x in made[1 : 2 if problem.cache.plain else 3]:
            _spoil(x)
    if problem.cache.plain:
        return made
    quarters = torch.arange(problem.positions, device=device)[:, None] + torch.arange(problem.p // 2, device=device)
    turns = torch.tensor([1.0, 0.0, -1.0, 0.0], device=device)
    table = torch.cat([turns[quarters % 4], turns[(quarters + 3) % 4]], dim=1)
    if problem.layout != "flat":
        return *made[:5], table
    largest = _LARGEST * {"huge": rope.HUGE, "tiny": 2.0**-7}.get(dist, 1.0)
    return *made[:5], table, torch.full((1,), largest / E4M3_MAX, device=device)


def _spoil(x: torch.Tensor) -> None:
    """Puts NaN and infinities of either sign into rows (n, columns): into a column of each first row of three, from the
    left and the right end on, and into the first 128 columns of each second one."""
    values = (math.nan, math.inf, -math.inf, -math.nan)
    for i, row in enumerate(x):
        if i % 3 == 0:
            for j, value in enumerate(values):
                row[(i + 5 * j) % len(row)] = value
                row[len(row) - 1 - (i + 67 * j) % len(row)] = value
        elif i % 3 == 1:
            row[:128] = values[i // 3 % 4]


def views(layout: Layout, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes, scales, plain) of a cache (pages, page, bytes of a token): the module's docstring has their types. Raises
    `UserError` for a tensor of another layout."""
    import torch

    there = fields(layout, cache)
    assert there.codes is not None
    scales = cache[..., :0] if there.scales is None else there.scales
    scales = scales.view(torch.int32) if scales.dtype == torch.float32 else scales
    if there.plain is not None:
        return there.codes, scales, there.plain
    latent = (layout.columns - ROPE) * layout.bits // 8
    return there.codes[..., :latent], scales, there.codes[..., latent:]


def new_outputs(
    problem: PackedAppendProblem, q: torch.Tensor, pages: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, codes, scales, plain), uninitialised, the last three of one cache. pages: of it; default: those that
    `make_inputs` fills."""
    pages = problem.replace(tokens=q.shape[0]).pages if pages is None else pages
    out = q.new_empty((q.shape[0], problem.h, problem.width))
    return out, *views(problem.cache, new_cache(problem.cache, pages, problem.page, q.device))


def reference(problem: PackedAppendProblem, *inputs: Any, pages: int | None = None) -> tuple[Any, ...]:
    """The oracle: (out, codes, scales, plain) in float64, NaN in what must not be written; out and plain unrounded."""
    return appended(problem, *inputs, held=[x.double().fill_(math.nan) for x in new_outputs(problem, inputs[0], pages)])


def appended(problem: PackedAppendProblem, *inputs: Any, held: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """What (out, codes, scales, plain), which hold `held`, are after a call, in float64; out and plain unrounded."""
    slots, scale = inputs[4], inputs[6] if problem.layout == "flat" else None
    # Each token a page of its own, whose rows are in their order.
    single = problem.replace(page=1)
    alone = (*inputs[:4], slots.new_tensor(range(len(slots))), inputs[5])
    out, rows = rope.appended(single, *alone, held=(held[0], rope.new_outputs(single, inputs[0])[1]))
    packed = pack(problem.cache, rows[: len(slots)].to(problem.torch_dtype), scale=scale, powers=problem.powers)
    there = rope.written(slots, held[1].shape[0] * problem.page)
    at = (slots[there].long() // problem.page, slots[there].long() % problem.page)
    codes, scales, plain = views(problem.cache, packed)
    if problem.cache.plain:
        plain = rows[: len(slots), :, problem.k :]
    found = []
    for values, before in zip((codes, scales, plain), held[1:], strict=True):
        after = before.double()
        after[at] = values[:, 0][there].double()
        found.append(after)
    return out, *found


EXACT = Bound(abs=1.0, rel=0.0, cos=1.0)


def bounds(dist: str) -> dict[str, Bound]:
    """By output."""
    plain = rope.bounds("normal" if dist in CHANGED else dist)["cache"]
    return {"out": plain, "codes": EXACT, "scales": EXACT, "plain": plain}


# ---------------------------------------------------------------- cases
CASES = {
    **rope.CASES,
    "tiny": "latents below the smallest scale",
    "odd": "NaN and infinities among latents, which must not change what is beside them",
    "scales": "scales that are no powers of two (of v32), planned anew",
}


def _cases(problem: PackedAppendProblem, on_gpu: bool) -> Iterator[Case]:
    uneven = problem
    for case in rope.WORKLOAD.cases(problem, on_gpu):
        uneven = case.problem if case.name == "uneven" else uneven
        yield case
    for dist in CHANGED:
        yield Case(dist, uneven, dist)
    if problem.layout == "v32":
        yield Case("scales", uneven.replace(powers=not problem.powers), "normal", planned=True)


def rebound(problem: PackedAppendProblem, *inputs: Any) -> PackedAppendProblem:
    """As of `rope`, with the scale of layout flat."""
    if problem.layout == "flat":
        check_bound("scale", inputs[6], (1,), "fp32")
    found: PackedAppendProblem = rope.WORKLOAD.rebound(problem, *inputs[:6])
    return found


def sample(small: bool, given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields where nothing else is asked for. small: that a CPU runs in seconds."""
    return rope.WORKLOAD.sample(small, given)


WORKLOAD = Workload(
    name="packed_append",
    problem=PackedAppendProblem,
    outputs=(
        Output("out", ("token", "head", "column"), partial=True),
        *(Output(name, ("page", "row", "column"), rows=False, partial=True, bits=True)
          for name in ("codes", "scales", "plain")),
    ),
    make_inputs=make_inputs,
    reference=reference,
    cases=_cases,
    case_names=CASES,
    quick=(*rope.QUICK, *CHANGED),
    bounds=bounds,
    rebound=rebound,
    small=rope.small,
    sample=sample,
)  # fmt: skip
