"""Prefill over decompressed heads, of whole prompts of one length.

Each of the h heads has its own keys of d + p columns and values of d columns (192 and 128 in DeepSeek's models).

    q (b, s, h, d + p)   k (b, s, h, d + p)   v (b, s, h, d)   →   out (b, s, h, d), lse (b, h, s) float32

causal: query token i sees keys 0 .. i. lse is the natural log-sum-exp of scale · q·k. Distributions of inputs: normal;
flashmla (N(0, 1) / 10, clamped); nan, which is flashmla with a query row of the first prompt and the first key of the
last one NaN, in one head each; extremes, with logits of ±`decode.EXACT`. Error bounds are those of decoding on the same
values.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from mla_var3.errors import UserError, nearest
from mla_var3.workload import Case, Cost, Problem, Workload, check_dtype, check_integer, decode

DISTRIBUTIONS = ("flashmla", "normal", "nan", "extremes")


@dataclass(frozen=True)
class PrefillClass:
    """What a compiled kernel is specialised on: everything of a problem but b."""

    s: int
    h: int
    p: int
    d: int
    causal: bool
    dtype: str

    def key(self) -> str:
        mask = "causal" if self.causal else "full"
        return f"prefill_s{self.s}_h{self.h}_p{self.p}_d{self.d}_{mask}_{self.dtype}"


@dataclass(frozen=True)
class PrefillProblem(Problem):
    """b prompts of s tokens each. Raises `UserError`, naming the field, when it makes no sense.

    h: heads. d: columns of a value, and of a key without its p rope columns. dtype: bf16, fp16 or fp32. softmax_scale:
    factor on q·k, None for (d + p)^-1/2.
    """

    workload: ClassVar[str] = "prefill"

    b: int = 1
    s: int = 4096
    h: int = 128
    p: int = 64
    d: int = 128
    causal: bool = False
    dtype: str = "bf16"
    softmax_scale: float | None = None

    def __post_init__(self) -> None:
        for name in ("b", "s", "h", "d"):
            check_integer(name, getattr(self, name), 1)
        check_integer("p", self.p, 0)
        check_dtype(self.dtype)
        if not isinstance(self.causal, bool):
            raise UserError(f"problem.causal = {self.causal!r} is not a boolean: use true or false.")

    @property
    def t(self) -> int:
        """Keys of each prompt: as many as queries."""
        return self.s

    @property
    def scale(self) -> float:
        """Factor on q·k before the softmax."""
        return (self.d + self.p) ** -0.5 if self.softmax_scale is None else self.softmax_scale

    @property
    def label(self) -> str:
        text = f"b{self.b}_s{self.s}_h{self.h}_t{self.t}" + ("_causal" if self.causal else "")
        return text if self.dtype == "bf16" else f"{text}_{self.dtype}"

    def problem_class(self) -> PrefillClass:
        return PrefillClass(**{f.name: getattr(self, f.name) for f in dataclasses.fields(PrefillClass)})

    def cost(self) -> Cost:
        """FLOPs and minimal bytes: in each head a pair costs 2(d + p) for q·k and 2d for p·v; all tensors move once.

        A causal problem counts the pairs that attend only.
        """
        pairs = self.b * (self.s * (self.s + 1) // 2 if self.causal else self.s * self.s)
        columns = self.b * self.s * self.h * (4 * self.d + 2 * self.p)
        return Cost(pairs * 2 * (2 * self.d + self.p) * self.h, columns * self.element_bytes, pairs)

    def input_bytes(self) -> int:
        return self.cost().bytes + 4 * self.b * self.s * self.h

    def output_bytes(self) -> int:
        return self.b * self.s * self.h * (self.d * self.element_bytes + 4)

    @property
    def rows(self) -> int:
        """Query rows of one prompt and head."""
        return self.s

    def to_record(self) -> dict[str, Any]:
        data = super().to_record()
        if self.softmax_scale is None:
            del data["softmax_scale"]
        return data

    @classmethod
    def from_record(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of `to_record`. Fields of decode that say what holds for every prefill are allowed: t = s, h_kv = 1,
        uniform lengths, no decompressed tokens beside latents, and dims and pages of a cache that is not read."""
        fields = dict(data)
        if "t" in fields and "s" not in fields:
            fields["s"] = fields["t"]
        implied = {"t": fields.get("s"), "h_kv": 1, "n": 0, "lengths": "uniform"}
        for name, value in implied.items():
            if name in fields and fields.pop(name) != value:
                raise UserError(
                    f"problem.{name} = {data[name]!r} is no prefill's: it has s = t, one length, and no latents."
                )
        for name in ("k", "page"):
            fields.pop(name, None)
        return super().from_record(fields)


def make_inputs(
    problem: PrefillProblem, device: Any = "cpu", *, seed: int = 0, dist: str = "normal", **_: Any
) -> tuple[Any, Any, Any]:
    """Random (q, k, v); options of paged inputs (poison, pages) have no meaning here and are passed over."""
    import torch

    if dist not in DISTRIBUTIONS:
        raise UserError(f"prefill input distribution {dist!r} is unknown: {nearest(dist, DISTRIBUTIONS)}.")
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)

    def draw(columns: int) -> Any:
        shape = (problem.b, problem.s, problem.h, columns)
        x = torch.randn(shape, dtype=problem.torch_dtype, device=device, generator=generator)
        return x if dist == "normal" else x.div_(10).clamp_(-1.0, 1.0)

    q, k, v = draw(problem.d + problem.p), draw(problem.d + problem.p), draw(problem.d)
    if dist == "nan":
        q[0, -1, 0, 0] = math.nan
        k[-1, 0, -1, -1] = math.nan
    elif dist == "extremes":
        stretch(q, k, problem.scale)
    return q, k, v


def stretch(q: Any, k: Any, scale: float) -> None:
    """Makes logits as large as `decode.EXACT`: that of the first key of each sequence, and those of all others as far
    below zero, from up to 64 last columns of q and k, (b, tokens, h, columns)."""
    import torch

    w = min(64, q.shape[-1])
    signs = torch.where(torch.arange(w) % 3 == 0, -1.0, 1.0).to(q)
    q[..., :-w], q[..., -w:] = 0.0, 64.0 * signs
    size = decode.EXACT / (64.0 * w * (scale or 1.0))
    k[..., -w:] = -size * signs
    k[:, :1, :, -w:] = size * signs


def prefill_reference(
    q: Any, k: Any, v: Any, *, scale: float, causal: bool, compute_dtype: Any = None
) -> tuple[Any, Any]:
    """The oracle: out (b, s, h, d) and lse (b, h, s) in float64, or in float32 above `decode.FLOAT64_FLOPS`.

    Head by head, with blocks of rows, so that memory is bounded whatever the length. Keys may be more than queries: the
    mask is then aligned at the end, as in decoding.
    """
    import torch

    b, s, h, width = q.shape
    t, d = v.shape[1], v.shape[3]
    if k.shape != (b, t, h, width) or v.shape != (b, t, h, d):
        raise UserError(
            f"prefill wants k (b, t, h, d + p) and v (b, t, h, d) for q {tuple(q.shape)}; "
            f"they are {tuple(k.shape)} and {tuple(v.shape)}."
        )
    if compute_dtype is None:
        limit = decode.FLOAT64_FLOPS["cuda" if q.is_cuda else "cpu"]
        compute_dtype = torch.float64 if 2.0 * b * h * s * t * (width + d) <= limit else torch.float32
    out = torch.empty((b, s, h, d), dtype=compute_dtype, device=q.device)
    lse = torch.empty((b, h, s), dtype=compute_dtype, device=q.device)
    with decode.full_precision():
        for i in range(b):
            for j in range(h):
                rows, keys, values = (x[i, :, j].to(compute_dtype) for x in (q, k, v))
                out[i, :, j], lse[i, j] = decode.attend(rows, keys, values, 1, s, scale, causal)
    return out, lse


#: Names of the cases of the check, in order, with what each is for.
CASES = {
    "own": "the problem as it is (on a CPU: cut down to a short prompt and a head or two)",
    "short": "prompts just longer than a tile, 65 tokens, with N(0, 1) values",
    "edges": "prompts shorter than, equal to and just longer than a tile: 1, 63, 64, 127, 129 tokens",
    "normal": "N(0, 1) values, with the mask as in the problem",
    "bound": "other tensors bound to the planned kernel",
    "nan": "a query row and a key that are NaN, beside others that are not, planned anew",
    "extremes": "logits as large as float32 scores tell keys apart, of both signs, planned anew",
    "scale_zero": "a scale of 0: every key counts as much, planned anew",
    "scale_negative": "a scale below 0, planned anew",
}
QUICK = ("own", "short", "normal", "bound")
PROMISED = decode.PROMISED


def _cases(problem: PrefillProblem, on_gpu: bool) -> Iterator[Case]:
    heads = problem.h if on_gpu else min(problem.h, 2)
    s = problem.s if on_gpu else min(problem.s, 97)
    own = problem.replace(b=problem.b if on_gpu else min(problem.b, 2), s=s, h=heads)
    yield Case("own", own, "flashmla", planned=True)
    yield Case("short", problem.replace(b=2, s=65, h=min(heads, 4)), "normal", planned=True)
    for edge in (1, 63, 64, 127, 129):
        yield Case("edges", problem.replace(b=2, s=edge, h=min(heads, 4)), "normal", planned=True)
    yield Case("normal", problem.replace(b=1, s=min(s, 1000), h=min(heads, 8)), "normal", planned=True)
    yield Case("bound", own.replace(b=1), "normal")
    few = problem.replace(b=2, s=129 if on_gpu else 97, h=min(heads, 4))
    for dist in ("nan", "extremes"):
        yield Case(dist, few, dist, planned=True)
    yield Case("scale_zero", few.replace(softmax_scale=0.0), "flashmla", planned=True)
    yield Case("scale_negative", few.replace(softmax_scale=-abs(problem.scale) or -1.0), "normal", planned=True)


def reference(problem: PrefillProblem, *inputs: Any) -> tuple[Any, Any]:
    """The oracle on inputs of the problem."""
    q, k, v = inputs
    return prefill_reference(q, k, v, scale=problem.scale, causal=problem.causal)


def rebound(problem: PrefillProblem, *inputs: Any) -> PrefillProblem:
    """The problem of other (q, k, v) of the same class; b may differ. Raises `UserError` when the class does."""
    q, k, v = inputs
    want = (problem.s, problem.h, problem.d + problem.p)
    if tuple(q.shape[1:]) != want or tuple(k.shape) != tuple(q.shape) or tuple(v.shape) != (*q.shape[:3], problem.d):
        raise UserError(
            f"cannot bind: q, k and v are {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}, "
            f"and this kernel was planned for (b, {want[0]}, {want[1]}, {want[2]} and {problem.d}); plan a new kernel."
        )
    if not q.dtype == k.dtype == v.dtype == problem.torch_dtype:
        raise UserError(
            f"cannot bind: the kernel was planned for {problem.dtype}, and q is {q.dtype}; plan a new kernel."
        )
    return problem.replace(b=q.shape[0])


def small(problem: PrefillProblem) -> PrefillProblem:
    """One prompt of 160 tokens, in at most 4 heads: seconds on a CPU."""
    return problem.replace(b=1, s=160, h=min(problem.h, 4))


def sample(small: bool, given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields where nothing else is asked for. small: that a CPU runs in seconds."""
    s = given.get("s", given.get("t", 160 if small else 4096))
    return {"b": 1, "s": s, **({"h": 4} if small else {"causal": True})}


WORKLOAD = Workload(
    name="prefill",
    problem=PrefillProblem,
    outputs=decode.WORKLOAD.outputs,
    make_inputs=make_inputs,
    reference=reference,
    cases=_cases,
    case_names=CASES,
    quick=QUICK,
    bounds=decode.bounds_for,
    rebound=rebound,
    small=small,
    as_bound=lambda problem: problem,
    sample=sample,
)
