"""Libraries that normalise rows: FlashInfer (`flashinfer_rmsnorm`), quack (`quack_rmsnorm`), and what torch.compile
makes of a norm (`torch_compile_rmsnorm`). Inputs (x, weight, [second weight], [residual]) of `workload.norm`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mla_var3.catalogue.libraries import Library
from mla_var3.device import Requirement
from mla_var3.errors import Verdict
from mla_var3.kernel.library import Attached, NoKnobs, PeerMixin, compiled, is_here
from mla_var3.runtime.plan import KernelPlan
from mla_var3.workload import norm

if TYPE_CHECKING:
    from mla_var3.workload.norm import NormProblem

#: What a library returns for one norm: (normalised rows, new residual or None).
One = Callable[..., tuple[Any, Any]]


class PeerNormPlan(PeerMixin, KernelPlan):
    """A peer that normalises rows: outputs (out, second, new residual)."""

    workload = norm.WORKLOAD
    tiling_type = NoKnobs
    plans_lengths = False
    leaves_out = ()
    allocates = True

    def each(self, one: One, inputs: Sequence[Any]) -> Attached:
        """Calls a library once for each of the problem's norms. one(rows, weight, residual or None)."""
        pd = self.problem
        x, weight, second_weight, residual = norm.named(pd, tuple(inputs))
        made: list[Any] = list(norm.new_outputs(pd, x))
        nothing = x.new_empty((x.shape[0], 0))
        first, rest = x[:, : pd.width], x[:, pd.width :]

        def call() -> None:
            made[0], new_residual = one(first, weight, residual)
            made[1] = nothing if second_weight is None else one(rest, second_weight, None)[0]
            made[2] = nothing if residual is None else new_residual

        return Attached(call, lambda: tuple(made), made=made, count=3)


def takes_norm(peer: str, *, no_residual: str = "") -> Callable[[NormProblem], Verdict]:
    """A predicate: the library is here, and takes the problem. no_residual: what it does where there is one, for which
    it is not asked; empty: it is."""

    def verdict(problem: NormProblem) -> Verdict:
        if problem.residual and no_residual:
            return Verdict.no(f"peer/{peer} {no_residual}")
        return is_here(peer)(problem)

    return verdict


class FlashInferRmsNormPlan(PeerNormPlan):
    """FlashInfer's rmsnorm; a call for each norm.

    Its norm with a residual overwrites both of its inputs, so that it cannot run twice on the same ones: problems with
    a residual are refused. It compiles when it is first used, through CuTe DSL where that is installed, else with nvcc.
    """

    peer = "flashinfer_rmsnorm"
    requires = Requirement(
        archs=("sm_80+",),
        problem=takes_norm("flashinfer_rmsnorm", no_residual="adds a residual in place of its inputs only"),
    )

    def attach(self, library: Library, *inputs: Any) -> Attached:
        normalise, eps = import_module("flashinfer.norm").rmsnorm, self.problem.eps
        return self.each(lambda rows, weight, _: (normalise(rows, weight, eps=eps), None), inputs)


class QuackRmsNormPlan(PeerNormPlan):
    """quack's rmsnorm (CuTe DSL), untuned as its callers use it; a call for each norm.

    With a residual it normalises the sum before that is rounded, where others normalise what they write: another
    result, so that such problems are refused. It compiles when it first meets a width, and allocates its outputs in
    every call.
    """

    peer = "quack_rmsnorm"
    requires = Requirement(
        archs=("sm_90+",),
        problem=takes_norm("quack_rmsnorm", no_residual="normalises the sum with a residual before it is rounded"),
    )

    def attach(self, library: Library, *inputs: Any) -> Attached:
        forward, eps = import_module("quack.rmsnorm").rmsnorm_fwd, self.problem.eps
        return self.each(lambda rows, weight, _: (forward(rows, weight, eps=eps)[0], None), inputs)


def normalised(h: Any, weight: Any, eps: float) -> Any:
    wide = h.float()
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()).to(h.dtype)


def rmsnorm(x: Any, weight: Any, second_weight: Any, residual: Any, eps: float) -> list[Any]:
    """[out, second, new residual], without what there is none of."""
    h = x[:, : weight.shape[0]]
    if residual is not None:
        h = h + residual
    made = [normalised(h, weight, eps)]
    if second_weight is not None:
        made.append(normalised(x[:, weight.shape[0] :], second_weight, eps))
    return [*made, h] if residual is not None else made


class TorchCompileRmsNormPlan(PeerNormPlan):
    """What torch.compile makes of a norm that is written in torch, both norms of a row in one function.

    Compiled for the shape at hand (no dynamic sizes) with tuning on. It allocates its outputs in every call.
    """

    peer = "torch_compile_rmsnorm"
    requires = Requirement(archs=("sm_80+",), problem=takes_norm("torch_compile_rmsnorm"))

    def attach(self, library: Library, *inputs: Any) -> Attached:
        arguments, eps, run = norm.named(self.problem, inputs), self.problem.eps, compiled(rmsnorm)
        _, _, second_weight, residual = arguments
        nothing = inputs[0].new_empty((inputs[0].shape[0], 0))
        made = [x for x in norm.new_outputs(self.problem, inputs[0]) if x.shape[1]]

        def call() -> None:
            made[:] = run(*arguments, eps)

        def read() -> tuple[Any, ...]:
            out, *more = made
            second = more.pop(0) if second_weight is not None else nothing
            return out, second, more.pop(0) if residual is not None else nothing

        return Attached(call, read, made=made, count=3)
