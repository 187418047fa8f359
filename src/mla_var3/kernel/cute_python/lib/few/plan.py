"""`FewPlan`: what the plans of versions share whose splits are joined inside their kernel."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from cutlass import Float32, Int32

from mla_var3.kernel.cute_python.lib import host
from mla_var3.kernel.cute_python.lib.few.schedule import clusters_of
from mla_var3.runtime import CuteKernel
from mla_var3.runtime.plan import KernelPlan, require_int32

if TYPE_CHECKING:
    from mla_var3.kernel.cute_python.lib.few.join import PartShape


class FewPlan(KernelPlan):
    """Inputs (q, kv_cache, page_table, seq_lens), outputs (out, lse), a workspace and a counter; one kernel.

    Sizes come from the tensors; b, the page table's width, the splits and the cluster are arguments of one compiled
    function. A subclass gives the host function and the shape that the code is specialised on.
    """

    name: ClassVar[str]
    kernel_fn: ClassVar[Any]
    host_fn: ClassVar[Any]

    @property
    @abstractmethod
    def shape(self) -> Any:
        """What the code is specialised on; has h_kv and row_tiles."""

    @property
    @abstractmethod
    def part(self) -> PartShape:
        """The output of a block."""

    @abstractmethod
    def choose_splits(self, items: int, tiles: int) -> int:
        """Splits for `items` unsplit work items with `tiles` 64-token tiles each."""

    def cut(self, b: int, max_pages: int) -> tuple[int, int]:
        """(splits, blocks of a cluster) for b requests as long as the page table is wide."""
        splits = self.tiling.num_splits
        if not splits:
            items = b * self.shape.h_kv * self.shape.row_tiles
            splits = self.choose_splits(items, max_pages * self.problem.page_size // 64)
        return splits, self.tiling.cluster or clusters_of(splits)

    def arguments(self) -> tuple[Any, ...]:
        """Fake arguments of the host function, without the stream."""
        pd, kind = self.problem, host.element_type(self.problem.dtype)
        b, pages, width, floats, counters = host.symbols(5)
        return (
            host.fake(kind, b, pd.s, pd.h, pd.k + pd.p),
            host.fake(kind, pages, pd.page_size, pd.h_kv, pd.k + pd.p, align=128),
            host.fake(Int32, b, width, align=4),
            host.fake(Int32, b, align=4),
            host.fake(kind, b, pd.s, pd.h, pd.k),
            host.fake(Float32, b, pd.h, pd.s, align=4),
            host.fake(Float32, floats),
            host.fake(Int32, counters, align=4),
            Float32(1.0), Int32(1), Int32(1), self.shape,
        )  # fmt: skip

    def plan(self, *inputs: Any) -> CuteKernel:
        import torch

        self.require()
        q, _, page_table, seq_lens = inputs
        require_int32(page_table=page_table, seq_lens=seq_lens)
        pd, b = self.problem, q.shape[0]
        splits, cluster = self.cut(b, page_table.shape[1])
        items = b * self.shape.h_kv * self.shape.row_tiles
        outputs = q.new_empty((b, pd.s, pd.h, pd.k)), q.new_empty((b, pd.h, pd.s), dtype=torch.float32)
        floats = self.part.workspace(items, splits // cluster)
        workspaces = (
            q.new_empty(max(floats, 4), dtype=torch.float32),
            q.new_zeros(max(items * cluster, 4), dtype=torch.int32),
        )
        return self._make(inputs, outputs, workspaces, splits, cluster)

    def plan_empty(self) -> CuteKernel:
        self.require()
        return self._make((), (), (), 1, 1)

    def _make(self, inputs: Any, outputs: Any, workspaces: Any, splits: int, cluster: int) -> CuteKernel:
        compile_fn = host.compiler(type(self).host_fn, self.arguments, self.name)
        launch_fn: Any = None
        if inputs:
            call = host.function(self, self.name, compile_fn)
            launch_fn = host.launcher(call, *inputs, *outputs, *workspaces, self.problem.scale, splits, cluster)
        return CuteKernel(
            type(self).kernel_fn,
            launch_fn,
            inputs,
            outputs,
            self.tiling,
            compile_fn=compile_fn,
            name=self.name,
            workspace_tensors=workspaces,
            plan=self,
        )
