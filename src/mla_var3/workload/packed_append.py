"""RoPE of new tokens' queries and keys, and their way into a packed latent cache: `rope`, with bytes for a cache.

    q (tokens, h, columns), p = 64 rope columns last    latent (tokens, k), normalised    rope (tokens, p)
    positions (tokens,)    slots (tokens,)    table (positions, p) float32    [scale (1,) float32: of flat layouts]
    →   out (tokens, h, k + p)      as in `rope`
        codes, scales, plain        of token i in row slots[i] % page of page slots[i] // page of the cache

The cache's row is what `packed_cache.pack` makes of the row that `rope` writes in bf16: the latent, and the rope
columns, rotated and rounded to bf16. k is 512, and 448 where keys have 512 columns with rope columns among them.
Layouts are those of `mla_var3.packed_cache` but bf16, which is `rope`'s.

In layouts without rope columns nothing is turned. Inputs are latent (tokens, 512), whose rows may lie apart, slots, and
in flat_no_rope scale; h, p, columns and positions are 0, and out and plain have no elements.

The outputs beside out are views of a cache (`views`), each (pages, page, its columns):

    codes     uint8: the bits of e4m3, or of two e2m1, of the latent
    scales    int32, the bits of float32, in v32 and v32_no_rope; uint8, ue8m0 or e4m3, elsewhere; no columns in the
              flat layouts
    plain     bf16: the rope columns; in layouts without bf16 uint8, codes as of the latent

Codes and scales are exact to the bit. Columns in bf16 are judged as in `rope`, against what they are before they are
rounded: float32 is off by up to 2^-23 of the larger product, so where the exact value lies that close to the middle
between two bf16 numbers, a right kernel may write either, and against the nearest one the other is off by 2^-7. That is
1 in 10^5 of N(0, 1). Rows of other slots stay as they are, and so does v4's byte that nobody reads.

Distributions of inputs are those of `rope`. The table of layouts without bf16 has quarter turns alone, which are exact
in any precision: elsewhere a column that float32 rounds to the other side could get another code. Two are new:

    tiny       2^-7 · N(0, 1): latents below the smallest scale
    odd        NaN and infinities among latents, of layouts whose rope columns are codes among these too: all the
               columns of a scale, some of them, and none
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
#: The one scale of flat layouts, for values up to 3: larger ones are cut.
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
    p is 64, dtype bf16. Without rope columns h, p, columns and positions are 0, and rest is between rows of latent."""

    workload: ClassVar[str] = "packed_append"

    layout: str = "v32"
    powers: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.layout, str) or self.layout not in LAYOUTS:
            raise UserError(f"problem.layout = {self.layout!r} is unknown: {nearest(str(self.layout), LAYOUTS)}.")
        if self.layout == "bf16":
            raise UserError("problem.layout = 'bf16' has no codes: workload rope appends to such a cache.")
        latent = latent_columns(self.cache)
        if self.k not in (latent, type(self).k):
            raise UserError(f"problem.k = {self.k}: tokens of layout {self.layout} have {latent} latent columns.")
        object.__setattr__(self, "k", latent)
        if self.no_rope:
            self._turn_nothing()
        elif self.p != ROPE:
            raise UserError(f"problem.p = {self.p}: tokens of layout {self.layout} have {ROPE} rope columns.")
        if self.dtype != "bf16":
            raise UserError(f"problem.dtype = {self.dtype!r} is not taken: what is packed into a cache is bf16.")
        if not isinstance(self.powers, bool):
            raise UserError(f"problem.powers = {self.powers!r} is not a boolean: use true or false.")
        if not self.powers and self.cache.scale_bytes != 4:
            raise UserError(
                f"problem.powers = false is for layouts v32 and v32_no_rope: scales of {self.layout} are of one kind."
            )
        if self.no_rope:
            self.least_turned()  # judges the other fields
        else:
            super().__post_init__()

    def _turn_nothing(self) -> None:
        """Sets the fields of what is turned to 0."""
        for name in ("h", "p", "columns", "positions"):
            value = getattr(self, name)
            if value not in (0, getattr(type(self), name)):
                raise UserError(
                    f"problem.{name} = {value!r}: tokens of layout {self.layout} have no rope columns, so that nothing "
                    "is turned; leave it out."
                )
            object.__setattr__(self, name, 0)
        if self.interleaved is not True:
            raise UserError(f"problem.interleaved is for rope columns: tokens of layout {self.layout} have none.")

    def least_turned(self) -> RopeProblem:
        """A problem of `rope` with as many tokens, the same latents and slots, and the least that can be turned."""
        return RopeProblem(
            tokens=self.tokens, h=1, k=self.k, p=2, columns=2, rest=self.rest, page=self.page, positions=1,
            index=self.index,
        )  # fmt: skip

    @property
    def cache(self) -> Layout:
        return layout_of(self.layout)

    @property
    def v41(self) -> bool:
        """Whether the cache has a layout of DeepSeek V4.1."""
        return self.layout in V41

    @property
    def no_rope(self) -> bool:
        """Whether tokens of the cache have no rope columns."""
        return self.layout in NO_ROPE

    @property
    def label(self) -> str:
        return f"{self.layout}_n{self.tokens}" if self.no_rope else f"{self.layout}_{super().label}"

    def problem_class(self) -> PackedAppendClass:  # type: ignore[override]
        return PackedAppendClass(
            self.h, self.columns, self.interleaved, self.page, self.index, self.layout, self.powers
        )  # fmt: skip

    def cost(self) -> Cost:
        """As in `rope`, with a packed token's bytes written. Without rope columns a latent column costs 2 FLOPs: its
        magnitude is compared, and it is scaled."""
        token = self.cache.token_bytes - self.cache.padding
        if self.no_rope:
            read = self.tokens * (self.k * self.element_bytes + INDICES[self.index])
            return Cost(2 * self.tokens * self.k, read + self.tokens * token, written=self.tokens * token)
        read = self.tokens * (self.h * self.p + self.width) * self.element_bytes
        written = self.tokens * (self.h * self.p * self.element_bytes + token)
        tables = min(self.tokens, self.positions) * self.p * 4 + self.tokens * 2 * INDICES[self.index]
        of_rope = super().cost()
        return Cost(of_rope.flops, read + written + tables, written=written, rows=of_rope.rows)

    def output_bytes(self) -> int:
        return self.tokens * self.h * self.width * self.element_bytes + self.pages * self.cache.page_bytes(self.page)


def latent_columns(layout: Layout) -> int:
    """Columns of a token's latent: all that are not rope columns."""
    return layout.columns - (0 if layout.name in NO_ROPE else ROPE)


# ---------------------------------------------------------------- inputs and outputs
def make_inputs(
    problem: PackedAppendProblem, device: Any = "cpu", *, seed: int = 0, dist: str = "normal", **options: Any
) -> tuple[Any, ...]:
    """Random (q, latent, rope, positions, slots, table), or (latent, slots) without rope columns, and the scale of flat
    layouts. Options as of `rope`."""
    import torch

    if dist not in DISTRIBUTIONS:
        raise UserError(f"packed_append input distribution {dist!r} is unknown: {nearest(dist, DISTRIBUTIONS)}.")
    if problem.no_rope:
        made = _latents(problem, device, seed, dist, **options)
        return (*made, _one_scale(dist, device)) if problem.cache.one_scale else made
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
    return *made[:5], table, _one_scale(dist, device)


def _latents(
    problem: PackedAppendProblem, device: Any, seed: int, dist: str, *, poison: bool = True, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """(latent, slots), of which latent has `rest` columns of nobody behind each row."""
    import torch

    plain = "normal" if dist in CHANGED else dist
    _, drawn, _, _, slots, _ = rope.make_inputs(problem.least_turned(), device, seed=seed, dist=plain)
    fill = math.nan if poison else 0.0
    room = torch.full((problem.tokens, problem.k + problem.rest), fill, dtype=drawn.dtype, device=device)
    latent = room[:, : problem.k].copy_(drawn)
    if dist == "tiny":
        latent.mul_(2.0**-7)
    elif dist == "odd":
        _spoil(latent)
    return latent, slots


def _one_scale(dist: str, device: Any) -> torch.Tensor:
    import torch

    largest = _LARGEST * {"huge": rope.HUGE, "tiny": 2.0**-7}.get(dist, 1.0)
    return torch.full((1,), largest / E4M3_MAX, device=device)


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
    latent = latent_columns(layout) * layout.bits // 8
    return there.codes[..., :latent], scales, there.codes[..., latent:]


def new_outputs(
    problem: PackedAppendProblem, first: torch.Tensor, pages: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, codes, scales, plain), uninitialised, the last three of one cache. first: of the inputs. pages: of the
    cache; default: those that `make_inputs` fills."""
    pages = problem.replace(tokens=first.shape[0]).pages if pages is None else pages
    out = first.new_empty((first.shape[0], problem.h, problem.width))
    return out, *views(problem.cache, new_cache(problem.cache, pages, problem.page, first.device))


def reference(problem: PackedAppendProblem, *inputs: Any, pages: int | None = None) -> tuple[Any, ...]:
    """The oracle: (out, codes, scales, plain) in float64, NaN in what must not be written; out and plain unrounded."""
    return appended(problem, *inputs, held=[x.double().fill_(math.nan) for x in new_outputs(problem, inputs[0], pages)])


def appended(problem: PackedAppendProblem, *inputs: Any, held: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """What (out, codes, scales, plain), which hold `held`, are after a call, in float64; out and plain unrounded."""
    # Each token a page of its own, whose rows are in their order.
    if problem.no_rope:
        slots, out, rows = inputs[1], held[0].double(), inputs[0].unsqueeze(1)
    else:
        slots, single = inputs[4], problem.replace(page=1)
        alone = (*inputs[:4], slots.new_tensor(range(len(slots))), inputs[5])
        out, rows = rope.appended(single, *alone, held=(held[0], rope.new_outputs(single, inputs[0])[1]))
        rows = rows[: len(slots)]
    scale = inputs[-1] if problem.cache.one_scale else None
    packed = pack(problem.cache, rows.to(problem.torch_dtype), scale=scale, powers=problem.powers)
    there = rope.written(slots, held[1].shape[0] * problem.page)
    at = (slots[there].long() // problem.page, slots[there].long() % problem.page)
    codes, scales, plain = views(problem.cache, packed)
    if problem.cache.plain:
        plain = rows[:, :, problem.k :]
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
    "scales": "scales that are no powers of two (of v32 and v32_no_rope), planned anew",
    "narrow": "32-bit slots, and rows of latent beside each other (of layouts without rope columns), planned anew",
}


def _cases(problem: PackedAppendProblem, on_gpu: bool) -> Iterator[Case]:
    uneven = problem
    for case in _without_rope(problem, on_gpu) if problem.no_rope else rope.WORKLOAD.cases(problem, on_gpu):
        uneven = case.problem if case.name == "uneven" else uneven
        yield case
    for dist in CHANGED:
        yield Case(dist, uneven, dist)
    if problem.cache.scale_bytes == 4:
        yield Case("scales", uneven.replace(powers=not problem.powers), "normal", planned=True)


def _without_rope(problem: PackedAppendProblem, on_gpu: bool) -> Iterator[Case]:
    """The cases of `rope`, but those of what is turned."""
    own = problem if on_gpu else rope.small(problem)
    uneven = own.replace(tokens=131 if on_gpu else 5)
    yield Case("own", own, "normal", planned=True)
    yield Case("one_token", own.replace(tokens=1), "normal")
    yield Case("uneven", uneven, "normal")
    for dist in ("huge", "skipped", "none", "beyond"):
        yield Case(dist, uneven, dist)
    yield Case("apart", uneven.replace(rest=problem.rest + 64), "normal")
    yield Case("in_place", uneven, "normal", then=uneven)
    yield Case("planned_few", own.replace(tokens=3), "normal", planned=True)
    yield Case("planned_many", own.replace(tokens=70_003), "skipped", planned=True, gpu=True)
    yield Case("narrow", uneven.replace(index="int32", rest=0), "beyond", planned=True)


def rebound(problem: PackedAppendProblem, *inputs: Any) -> PackedAppendProblem:
    """As of `rope`, with the scale of flat layouts."""
    if problem.cache.one_scale:
        check_bound("scale", inputs[-1], (1,), "fp32")
    if not problem.no_rope:
        found: PackedAppendProblem = rope.WORKLOAD.rebound(problem, *inputs[:6])
        return found
    latent, slots = inputs[:2]
    n = latent.shape[0]
    check_bound("latent", latent, (n, problem.k), problem.dtype)
    check_bound("slots", slots, (n,), problem.index)
    if latent.stride(1) != 1:
        raise UserError(f"cannot bind: latent has strides {tuple(latent.stride())}; its columns must lie together.")
    return problem.replace(tokens=n, rest=latent.stride(0) - problem.k if n > 1 else problem.rest)


def sample(small: bool, given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields where nothing else is asked for. small: that a CPU runs in seconds."""
    found = rope.WORKLOAD.sample(small, given)
    if given.get("layout") in NO_ROPE:
        return {name: value for name, value in found.items() if name == "tokens"}
    return found


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
