"""`DecodePlan`: what the plans of absorbed decode versions have in common."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from mla_var3.runtime.plan import KernelPlan, require_int32

if TYPE_CHECKING:
    from mla_var3.runtime.base import BaseKernel


class DecodePlan(KernelPlan):
    """Inputs (q, kv_cache, page_table, seq_lens), outputs (out, lse), and, with several splits, partial results.

    A version says how many splits it takes and makes its kernel from the tensors; sizes come from those, so that the
    same plan serves other b and t of its problem class.
    """

    @abstractmethod
    def num_splits(self, b: int, max_pages: int) -> int:
        """Parts of each request's keys: the tiling's, or a model's for requests as long as the page table is wide."""

    @abstractmethod
    def make(self, inputs: Any, outputs: Any, partials: Any, splits: int) -> BaseKernel:
        """The kernel on these tensors, or, where all three are empty, one that only compiles.

        partials: of `partials`; with one split they are empty and must not be touched.
        """

    def plan(self, *inputs: Any) -> BaseKernel:
        import torch

        self.require()
        q, _, page_table, seq_lens = inputs
        require_int32(page_table=page_table, seq_lens=seq_lens)
        pd, b = self.problem, q.shape[0]
        splits = self.num_splits(b, page_table.shape[1])
        out = q.new_empty((b, pd.s, pd.h, pd.k))
        lse = q.new_empty((b, pd.h, pd.s), dtype=torch.float32)
        return self.make(inputs, (out, lse), self.partials(q, splits if splits > 1 else 0), splits)

    def partials(self, q: Any, parts: int) -> tuple[Any, ...]:
        """Workspaces of `parts` partial results; 0 where nothing is split."""
        import torch

        pd, b = self.problem, q.shape[0]
        return (
            q.new_empty((parts, b, pd.h_kv, pd.rows, pd.k), dtype=torch.float32),
            q.new_empty((parts, b, pd.h_kv, pd.rows), dtype=torch.float32),
        )

    def plan_empty(self) -> BaseKernel:
        self.require()
        pd = self.problem
        known = self.device is not None or bool(getattr(self.tiling, "num_splits", 0))
        return self.make((), (), (), self.num_splits(pd.b, pd.max_pages) if known else 1)
