"""What torch.compile makes of a norm that is written in torch, both norms of a row in one function.

Compiled for the shape at hand (no dynamic sizes) with tuning on. It allocates its outputs in every call.
"""

from __future__ import annotations

from typing import Any

from mla_var3.catalogue.libraries import Library
from mla_var3.device import Requirement
from mla_var3.kernel.peer.prims.kernel import Attached
from mla_var3.kernel.peer.prims.norm import PeerNormPlan, takes_norm
from mla_var3.kernel.peer.prims.torch_compile import compiled
from mla_var3.workload import norm


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
    """Plan of torch.compile's norm."""

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
