"""Scales of zero and below for versions that take the maximum of q·k before they multiply with the scale.

Such a version masks scores with -inf and looks for the largest one while they are still q·k: a scale below zero turns
the order of scores around, and one of zero makes NaN of -inf. A change of sign belongs to q as well as to the scale, so
a plan for such a scale copies q with the sign turned (times 0 where the scale is 0) and computes with the magnitude of
the scale. Device code knows nothing of it, and a call with any other scale has one kernel as before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mla_var3.runtime.pipeline import KernelPipeline
from mla_var3.runtime.torch_kernel import LibraryCall

if TYPE_CHECKING:
    from mla_var3.runtime.base import BaseKernel

#: The smallest normal float32. Kernels get the scale as a float32, of which one below may arrive as 0.
SMALLEST = 2.0**-126


def sign_of(scale: float) -> int:
    """1, -1, or 0 where a float32 may not tell the scale from 0."""
    return 0 if abs(scale) < SMALLEST else 1 if scale > 0 else -1


class SignedQueries(LibraryCall):
    """Copies queries with the sign of a scale, or times 0: what is NaN stays NaN, and inf · 0 becomes NaN. Reads the
    addresses of its tensors when it launches."""

    follows_tensors = True

    def __init__(self, queries: Sequence[Any], copies: Sequence[Any], sign: int) -> None:
        super().__init__(self._copy, name="signed_queries", input_tensors=queries, output_tensors=copies)
        self.sign = sign

    def _copy(self) -> None:
        import torch

        for q, copy in zip(self.input_tensors, self.output_tensors, strict=True):
            torch.mul(q.detach(), self.sign, out=copy)


def any_scale(*places: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates the `plan` of a version that takes scales above zero only. places: of queries among its inputs."""

    def decorated(planned: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(planned)
        def plan(self: Any, *inputs: Any) -> BaseKernel:
            # A problem of another workload has none, and is refused by the version itself.
            sign = sign_of(getattr(self.problem, "scale", 1.0))
            if sign > 0:
                kernel: BaseKernel = planned(self, *inputs)
                return kernel
            import torch

            given, queries = list(inputs), [inputs[place] for place in places]
            copies = [torch.empty(q.shape, dtype=q.dtype, device=q.device) for q in queries]
            for place, copy in zip(places, copies, strict=True):
                given[place] = copy
            scale = -self.problem.scale if sign else 1.0
            kernel = planned(self._derive(self.problem.replace(softmax_scale=scale), self.tiling), *given)
            return KernelPipeline(
                [SignedQueries(queries, copies, sign), kernel],
                name=kernel.name,
                input_tensors=inputs,
                workspace_tensors=[*copies, *kernel.workspace_tensors],
                tiling=self.tiling,
                plan=self,
            )

        return plan

    return decorated
