"""`LatentPlan`: what the plans of the versions share that take two 64-token tiles at a time (`lib.latent.shape`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from cutlass import Float32, Int32

from mla_var3.device import Requirement
from mla_var3.kernel.cute_python.lib import host, paged
from mla_var3.kernel.cute_python.lib.decode import DecodePlan
from mla_var3.kernel.cute_python.lib.latent.consumer import shared_bytes
from mla_var3.kernel.cute_python.lib.latent.shape import STAGES, TILE_M, TILE_N, Shape
from mla_var3.kernel.cute_python.lib.split import combine, combine_groups
from mla_var3.kernel.cute_python.lib.split.splits import MAX_SPLITS, choose_splits
from mla_var3.runtime import CuteKernel, KernelPipeline, Tiling, Verdict

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.problem import MlaProblem


def takes_latent(pd: MlaProblem) -> Verdict:
    """Whether the shape of `lib.latent.shape` serves a problem."""
    if pd.k % 128 or not 128 <= pd.k <= 512:
        return Verdict.no(f"k = {pd.k} must be 128, 256, 384 or 512: each consumer owns half of the latent")
    if pd.p != paged.BOX:
        return Verdict.no(f"the rope part of p = {pd.p} columns must be {paged.BOX}: P lies in its panel")
    if pd.n:
        return Verdict.no(f"this version reads latent tokens only; the problem has n = {pd.n} decompressed ones")
    if pd.page_size % TILE_N:
        return Verdict.no(f"a page of {pd.page_size} tokens is not a multiple of the tile of {TILE_N}")
    return Verdict.yes()


@dataclass(frozen=True)
class LatentTiling(Tiling):
    """The tile sizes are what registers and shared memory force; the number of splits is free (0: from a model)."""

    launch_fields: ClassVar[tuple[str, ...]] = ("num_splits",)
    choices: ClassVar[Mapping[str, tuple[Any, ...]]] = {}  # values that a version's own fields may take

    tile_m: int = TILE_M
    tile_n: int = TILE_N
    num_warpgroups: int = 3
    num_pipeline_stages: int = STAGES
    num_splits: int = 0

    def validate(self, pd: MlaProblem, device: Device | None = None) -> Verdict:
        for field in fields(self):
            value, allowed = getattr(self, field.name), self.choices.get(field.name, (field.default,))
            if field.name not in self.launch_fields and value not in allowed:
                known = " or ".join(map(str, allowed))
                return Verdict.no(f"{field.name} = {value}, and this version is written for {known}")
        if not 0 <= self.num_splits <= MAX_SPLITS:
            return Verdict.no(f"num_splits = {self.num_splits} is outside 0 (chosen for the sizes) to {MAX_SPLITS}")
        if not (taken := takes_latent(pd)):
            return taken
        smem = shared_bytes(Shape.of(pd), pd.element_bytes)
        if device is not None and smem > device.smem_per_block:
            return Verdict.no(
                f"{smem:,} bytes of shared memory for q and {self.num_pipeline_stages} stages are over the "
                f"{device.smem_per_block:,} that a block of {device.key} may have"
            )
        return Verdict.yes()


class LatentPlan(DecodePlan):
    """One compiled kernel a problem class; b, lengths, page table width and the number of splits are arguments.

    kernel_fn, host_fn: the version's device function and the host function that launches it with the tensors, scale,
    splits and Shape. Both are named after the version's module.
    scalar_types: what the host function takes behind the tensors, as `scalars` gives them.
    """

    kernel_fn: ClassVar[Any]
    host_fn: ClassVar[Any]
    scalar_types: ClassVar[tuple[type, ...]] = (Float32, Int32)
    requires = Requirement(
        archs=("sm_90a",), dtypes=("bf16", "fp16"), features=("wgmma", "tma", "setmaxnreg"), problem=takes_latent
    )

    def results(self, outputs: Sequence[Any], partials: Sequence[Any], splits: int) -> Sequence[Any]:
        """What the version's host function is given to write to."""
        return (*outputs, *partials)

    def result_arguments(self, b: Any) -> tuple[Any, ...]:
        """Fake tensors of `results`; b is the symbol of the batch."""
        pd = self.problem
        *partials, out, lse = combine.fake_partials(host.element_type(pd.dtype), b, pd.s, pd.h, pd.h_kv, pd.k)
        return (out, lse, *partials)

    def scalars(self, b: int, splits: int) -> tuple[float | int, ...]:
        """What the host function is given behind the tensors for b requests."""
        return (self.problem.scale, splits)

    def combine(self, partials: Sequence[Any], outputs: Sequence[Any], splits: int) -> CuteKernel:
        """The stage after the attention where requests are split."""
        return combine_groups.combine_kernel(self, partials, outputs, splits)

    def make(self, inputs: Any, outputs: Any, partials: Any, splits: int) -> CuteKernel | KernelPipeline:
        name = type(self).__module__.rpartition(".")[2]
        compile_fn = host.compiler(self.host_fn, self.arguments, name)
        call = host.function(self, name, compile_fn) if inputs else None
        scalars = self.scalars(inputs[0].shape[0], splits) if inputs else ()
        main = CuteKernel(
            self.kernel_fn,
            host.launcher(call, *inputs, *self.results(outputs, partials, splits), *scalars),
            inputs,
            partials if splits > 1 else outputs,
            self.tiling,
            compile_fn=compile_fn,
            name=name,
            workspace_tensors=partials if splits > 1 else (),
            plan=self,
        )
        if splits == 1:
            return main
        second = self.combine(partials, outputs, splits)
        return KernelPipeline([main, second], name=name, tiling=self.tiling, plan=self)

    def default_tiling(self) -> Tiling:
        return self.tiling_type()

    def autotune_configs(self) -> list[Tiling]:
        pairs = self._pairs(self.problem.max_pages)
        splits = [n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128) if n <= pairs]
        return [self.tiling_type(), *(self.tiling_type(num_splits=n) for n in splits)]

    def num_splits(self, b: int, max_pages: int) -> int:
        """Parts of each request's keys: the tiling's, or the model's for requests as long as the page table is wide."""
        if self.tiling.num_splits:
            return self.tiling.num_splits
        pd = self.problem
        return choose_splits(self.blocks(b), self._pairs(max_pages), b * pd.s * pd.h, pd.k, host.target(self).num_sms)

    def blocks(self, b: int) -> int:
        """Blocks of the grid for b requests, without a split."""
        shape = Shape.of(self.problem)
        return b * shape.h_kv * shape.row_tiles

    def _pairs(self, max_pages: int) -> int:
        return -(-max_pages * self.problem.page_size // (2 * TILE_N))

    def constants(self) -> tuple[Any, ...]:
        """What the code is specialised on: the host function's last arguments before the stream."""
        return (Shape.of(self.problem),)

    def arguments(self) -> tuple[Any, ...]:
        """Fake arguments of the host function, without the stream."""
        pd, kind = self.problem, host.element_type(self.problem.dtype)
        b, pages, width = host.symbols(3)
        results = self.result_arguments(b)
        return (
            host.fake(kind, b, pd.s, pd.h, pd.k + pd.p),
            host.fake(kind, pages, pd.page_size, pd.h_kv, pd.k + pd.p, align=128),
            host.fake(Int32, b, width, align=4),
            host.fake(Int32, b, align=4),
            *results,
            *(kind(1) for kind in self.scalar_types),
            *self.constants(),
        )
