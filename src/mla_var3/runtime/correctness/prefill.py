"""Prefill over decompressed heads: inputs, reference, plan and check of design `flash_attention`.

A prefill problem is an `MlaProblem` with s = t, uniform lengths and no latent columns in play: each of the h heads has
its own keys of d + p columns and values of d columns (192/128 in DeepSeek's models).

    q (b, s, h, d + p)   k (b, t, h, d + p)   v (b, t, h, d)   →   out (b, s, h, d), lse (b, h, s) float32

causal: query token i sees keys 0 .. i. scale = (d + p)^-0.5. lse is the natural log-sum-exp of scale · q·k.
FLOPs and bytes are those of the decompressed formulation, so a causal problem counts attending pairs only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Self

from mla_var3.errors import UserError, nearest
from mla_var3.runtime.correctness.planned import PlannedPlan
from mla_var3.runtime.types import Verdict

if TYPE_CHECKING:
    from mla_var3.problem import MlaProblem

DISTRIBUTIONS = ("flashmla", "normal")


def takes_prefill(problem: MlaProblem) -> Verdict:
    """Whether a problem is a prefill of whole prompts of one length."""
    if problem.s != problem.t or problem.lengths != "uniform":
        return Verdict.no(
            f"prefill has s = t and one length; the problem has s = {problem.s}, t = {problem.t}"
            + ("" if problem.lengths == "uniform" else " and lengths of its own")
        )
    if problem.h_kv != 1 or problem.n:
        return Verdict.no(f"prefill is decompressed (h_kv = 1, n = 0); the problem has {problem.h_kv}, {problem.n}")
    return Verdict.yes()


def make_prefill_inputs(
    problem: MlaProblem, device: Any = "cpu", *, seed: int = 0, dist: str = "normal"
) -> tuple[Any, Any, Any]:
    """Random (q, k, v) of a prefill problem; `dist`: normal, or flashmla (N(0, 1) / 10, clamped)."""
    import torch

    if dist not in DISTRIBUTIONS:
        raise UserError(f"prefill input distribution {dist!r} is unknown: {nearest(dist, DISTRIBUTIONS)}.")
    takes_prefill(problem).require(UserError)
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)
    b, t, h = problem.b, problem.t, problem.h

    def draw(columns: int) -> Any:
        x = torch.randn((b, t, h, columns), dtype=problem.torch_dtype, device=device, generator=generator)
        return x if dist == "normal" else x.div_(10).clamp_(-1.0, 1.0)

    return draw(problem.d + problem.p), draw(problem.d + problem.p), draw(problem.d)


def prefill_reference(
    q: Any, k: Any, v: Any, *, scale: float, causal: bool, compute_dtype: Any = None
) -> tuple[Any, Any]:
    """The oracle: out (b, s, h, d) and lse (b, h, s) in float64, or in float32 above `oracle.FLOAT64_FLOPS`.

    Head by head, with blocks of rows, so that memory is bounded whatever the length. Keys may be more than queries: the
    mask is then aligned at the end, as in decoding.
    """
    import torch

    from mla_var3.runtime.correctness import oracle

    b, s, h, width = q.shape
    t, d = v.shape[1], v.shape[3]
    if k.shape != (b, t, h, width) or v.shape != (b, t, h, d):
        raise UserError(
            f"prefill wants k (b, t, h, d + p) and v (b, t, h, d) for q {tuple(q.shape)}; "
            f"they are {tuple(k.shape)} and {tuple(v.shape)}."
        )
    if compute_dtype is None:
        limit = oracle.FLOAT64_FLOPS["cuda" if q.is_cuda else "cpu"]
        compute_dtype = torch.float64 if 2.0 * b * h * s * t * (width + d) <= limit else torch.float32
    out = torch.empty((b, s, h, d), dtype=compute_dtype, device=q.device)
    lse = torch.empty((b, h, s), dtype=compute_dtype, device=q.device)
    with oracle._full_precision():
        for i in range(b):
            for j in range(h):
                rows, keys, values = (x[i, :, j].to(compute_dtype) for x in (q, k, v))
                out[i, :, j], lse[i, j] = oracle._attend(rows, keys, values, 1, s, scale, causal)
    return out, lse


#: Cases of a prefill plan's check, in order, and what each is for.
CASES = {
    "own": "the problem as it is (on a CPU: cut down to a short prompt and a few heads)",
    "short": "prompts shorter than, equal to and just longer than a tile: 1, 63, 64, 65, 127, 129 tokens",
    "normal": "N(0, 1) values, with the mask as in the problem",
    "bound": "other tensors bound to the planned kernel",
}
_EDGES = (1, 63, 64, 65, 127, 129)


def _cases(problem: MlaProblem, on_gpu: bool, quick: bool) -> Iterator[tuple[str, MlaProblem, str]]:
    heads = problem.h if on_gpu else min(problem.h, 2)
    t = problem.t if on_gpu else min(problem.t, 97)
    yield "own", problem.replace(b=problem.b if on_gpu else min(problem.b, 2), s=t, t=t, h=heads), "flashmla"
    for edge in (65,) if quick else _EDGES:
        yield "short", problem.replace(b=2, s=edge, t=edge, h=min(heads, 4)), "normal"
    t = min(t, 1000)
    yield "normal", problem.replace(b=1, s=t, t=t, h=min(heads, 8)), "normal"


class PrefillPlan(PlannedPlan):
    """Base of the plans of design `flash_attention`: inputs (q, k, v), outputs (out (b, s, h, d), lse (b, h, s))."""

    formulation = "decompressed"
    make_inputs = staticmethod(make_prefill_inputs)
    takes = staticmethod(takes_prefill)
    cases = staticmethod(_cases)

    def reference_fn(self, *inputs: Any) -> tuple[Any, ...]:
        return prefill_reference(*inputs, scale=self.problem.scale, causal=self.problem.causal)

    def rebind(self, *inputs: Any) -> Self:
        """The plan for other (q, k, v) of the same problem class; b may differ."""
        q, k, v = inputs
        pd = self.problem
        want = (pd.s, pd.h, pd.d + pd.p)
        if tuple(q.shape[1:]) != want or tuple(k.shape) != tuple(q.shape) or tuple(v.shape) != (*q.shape[:3], pd.d):
            raise UserError(
                f"cannot bind: q, k and v are {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}, "
                f"and this kernel was planned for (b, {want[0]}, {want[1]}, {want[2]} and {pd.d}); plan a new kernel."
            )
        if not q.dtype == k.dtype == v.dtype == pd.torch_dtype:
            raise UserError(
                f"cannot bind: the kernel was planned for {pd.dtype}, and q is {q.dtype}; plan a new kernel."
            )
        return self._derive(pd.replace(b=q.shape[0]), self.tiling)
