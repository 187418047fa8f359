"""All input sets of a contender write to the same memory, and nothing else is shared."""

from __future__ import annotations

from typing import Any

import torch

from mla_var3.kernel.library import Attached, PeerKernel
from mla_var3.measure.buffers import Shared
from mla_var3.runtime.base import BaseKernel


class Doubling(BaseKernel):
    """out = 2 · input, through a workspace; `kept` is made in the plan and only read."""

    def __init__(self, x: torch.Tensor) -> None:
        self.kept = torch.empty_like(x)
        self.kept.copy_(x)
        work, out = x.new_empty(x.shape), torch.empty(x.shape)
        super().__init__("doubling", input_tensors=(x,), output_tensors=(out,), workspace_tensors=(work,))

    def launch(self) -> None:
        (work,), (out,) = self.workspace_tensors, self.output_tensors
        torch.mul(self.kept, 2.0, out=work)
        out.copy_(work)

    def compile(self, *arguments: Any, **options: Any) -> Any:
        raise NotImplementedError

    def bind(self, *inputs: Any) -> BaseKernel:
        return Doubling(*inputs)


def test_sets_write_to_the_first_ones_outputs_and_workspaces() -> None:
    a, b = torch.ones(3), torch.full((3,), 5.0)
    shared = Shared(lambda: Doubling(a))
    second = shared.bind(b)
    assert second.output_tensors[0] is shared.first.output_tensors[0]
    assert second.workspace_tensors[0] is shared.first.workspace_tensors[0]
    assert second.kept is not shared.first.kept  # type: ignore[attr-defined]
    assert shared.first()[0].tolist() == [2.0] * 3
    assert second()[0].tolist() == [10.0] * 3


def test_another_shape_gets_memory_of_its_own() -> None:
    shared = Shared(lambda: Doubling(torch.ones(3)))
    second = shared.bind(torch.ones(4))
    assert second.output_tensors[0].shape == (4,)
    assert second()[0].tolist() == [2.0] * 4


def test_what_a_library_returns_is_dropped_after_a_call() -> None:
    made: list[Any] = []

    def call() -> None:
        made[:] = [torch.ones(2)]

    kernel = PeerKernel("x", Attached(call, lambda: tuple(made), made=made), input_tensors=(torch.zeros(1),))
    kernel.launch()
    assert made[0] is not None
    kernel.keep_results(False)
    kernel.launch()
    assert made == [None]
