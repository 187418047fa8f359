"""One set of outputs and workspaces for all input sets of a contender, as a server has one for all layers.

With outputs of its own for every set, what a call wrote goes to memory while the next one reads its cache, and is
fetched again a rotation later: 4 % of the time of 128 requests with 64 heads on an H200, more for kernels with large
partial results. Public figures reuse the memory (a library's outputs are freed and made again in the same place), so
both do here: what a kernel makes with torch in `plan` and writes is given to its `bind` for the next set again, and
what a library returned is dropped after each call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from mla_var3.runtime.base import BaseKernel

_MAKERS = (torch.empty, torch.empty_like, torch.Tensor.new_empty)


class _Recording(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.made: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _MAKERS:
            self.made.append(result)
        return result


class _Reusing(TorchFunctionMode):
    def __init__(self, kept: Sequence[torch.Tensor | None]) -> None:
        super().__init__()
        self.kept = list(kept)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in _MAKERS or not self.kept:
            return result
        kept = self.kept.pop(0)
        return kept if kept is not None and _alike(kept, result) else result


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.shape, a.dtype, a.device, a.stride()) == (b.shape, b.dtype, b.device, b.stride())


class Shared:
    """Plans a contender's first kernel, and binds the others to the tensors that it writes."""

    def __init__(self, plan: Callable[[], BaseKernel]) -> None:
        with _Recording() as record:
            self.first = plan()
        self.first.keep_results(False)
        written = {id(x) for x in self.first.written_tensors()}
        self._kept = [x if id(x) in written else None for x in record.made]

    def bind(self, *inputs: Any) -> BaseKernel:
        """The kernel on other inputs, writing where the first one writes if the shapes are the same."""
        with _Reusing(self._kept):
            kernel = self.first.bind(*inputs)
        kernel.keep_results(False)
        return kernel
