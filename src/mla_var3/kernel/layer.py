"""A whole layer (`workload.layer`) made of versions that stand for themselves: which, and how one feeds the next.

    hidden ─mm→ [query | latent | rope] ─norm→ query, latent ─mm→ q ┬─product "q"→ queries[:, :, 0 : k]
                                    └────────── rope ───────────────┴─rope→ queries[:, :, k :], cache[slots]
    queries, cache ─attention→ attended ─product "out"→ heads ─mm→ out

mm is cuBLAS through torch, one of it for both down-projections. The two writers of queries have no column in common.
Every version is a plan of its own, with the problem that its part of the layer is; nothing is copied between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mla_var3.errors import UserError
from mla_var3.kernel.parts import Part, PartsKernel, PartsTiling, plans_of
from mla_var3.runtime import LibraryCall
from mla_var3.runtime.base import BaseKernel, Outputs
from mla_var3.workload import layer

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.runtime import KernelPlan
    from mla_var3.toolchain.digest import Code
    from mla_var3.workload.layer import LayerProblem


@dataclass(frozen=True)
class LayerTiling(PartsTiling):
    """The versions that a layer is made of, by their labels; each has its own default knobs."""

    norm: str = "cute-dsl/rmsnorm"
    rope: str = "cute-dsl/rope_append"
    product: str = "cute-dsl/absorb_gemm"
    attention: str = "cute-dsl/flash_mla_v23"

    def parts(self, pd: LayerProblem) -> dict[str, Part]:
        """Every part but the plain projections, in the order of the data."""
        # FlashMLA's kernel is launched as a programmatic dependent and reads the cache without waiting.
        turning = {"eager": False} if self.attention.startswith("peer/") else {}
        return {
            "norm": (self.norm, pd.norms, {}),
            "absorb": (self.product, pd.product("q"), {}),
            "rope": (self.rope, pd.rotation, turning),
            "attention": (self.attention, pd.attention, {}),
            "values": (self.product, pd.product("out"), {}),
        }


class LayerKernel(PartsKernel):
    """The stages of a layer. Its outputs are `workload.layer`'s: the rows are read from the cache when asked for."""

    def __init__(self, stages: Sequence[BaseKernel], inputs: Sequence[Any], out: Any, **options: Any) -> None:
        super().__init__(stages, name="mla_layer", input_tensors=inputs, output_tensors=(), **options)
        self._out = (out,) if inputs else ()
        if inputs:
            x = layer.named(inputs)
            outputs: Any = Outputs(lambda: (out, layer.written_rows(x["kv_cache"], x["slots"])), 2)
            self.output_tensors = outputs

    def written_tensors(self) -> tuple[Any, ...]:
        return (*self._out, *self.workspace_tensors)

    @property
    def beside(self) -> Mapping[str, Callable[[], Any]]:
        plain = [stage for stage in self.stages if isinstance(stage, LibraryCall)]

        def projections() -> None:
            for stage in plain:
                stage.launch()

        return {"projections": projections} if len(plain) > 1 else {}


class _Handing(BaseKernel):
    """A library's attention, which makes its output in the call: `attended` lies on it afterwards."""

    comes_compiled = True

    def __init__(self, inner: Any, attended: Any) -> None:
        super().__init__(inner.name, output_tensors=(attended,))
        self.inner = inner
        self._shape, self._blank = attended.shape, attended.new_empty(0)

    def _handed(self, call: Callable[[], Any]) -> None:
        (attended,), made = self.output_tensors, self.inner.attached.made
        attended.data = self._blank  # so that the library gets the memory of the call before again
        call()
        attended.data = made[0].view(self._shape)
        made[:] = [None] * len(made)

    def launch(self) -> None:
        self._handed(self.inner.attached.call)

    @property
    def with_schedule(self) -> Callable[[], Any] | None:
        again = self.inner.attached.with_schedule
        return None if again is None else lambda: self._handed(again)

    def code(self, device: Device) -> Code | None:
        found: Code | None = self.inner.code(device)
        return found

    def compile(self, *_: Any) -> Any:
        raise UserError(f"{self.name} is a library's: there is no kernel of its own to compile.")


def compose(plan: KernelPlan, inputs: Sequence[Any] = ()) -> LayerKernel:
    """The kernel of a layer's plan, whose tiling is a `LayerTiling`, on inputs of `workload.layer`; without them it
    compiles only. Raises `UserError` where the tiling names a version that the plan does not declare as one of its
    `parts`."""
    parts, tiling = plans_of(plan), plan.tiling
    if not inputs:
        return LayerKernel([part.plan_empty() for part in parts.values()], (), None, tiling=tiling, plan=plan)
    pd, x = plan.problem, layer.named(inputs)
    b, h, k, p, hidden = len(x["hidden"]), pd.h, pd.k, pd.p, x["hidden"]

    def project(name: str, rows: Any, out: Any) -> LibraryCall:
        import torch

        weight = x[name].t()
        return LibraryCall(lambda: torch.mm(rows, weight, out=out), name=f"{name} projection")

    latents = hidden.new_empty((b, pd.q_rank + k + p))
    norm = parts["norm"].plan(latents[:, : pd.q_rank + k], x["q_norm"], x["kv_norm"])
    query, latent, _ = norm.output_tensors
    q = hidden.new_empty((b, h * (pd.d + p)))
    heads_of_q = q.view(b, h, pd.d + p)
    absorb = parts["absorb"].plan(heads_of_q[..., : pd.d], x["kv_up"])
    (queries,) = absorb.output_tensors
    # Planned on tensors of its own, which are then laid on the queries and on the cache.
    parts["rope"].late_tensors = True
    rotate = parts["rope"].plan(
        heads_of_q, latent, latents[:, pd.q_rank + k :], x["positions"], x["slots"], x["table"]
    )  # fmt: skip
    cache = x["kv_cache"]
    for own, target in zip(rotate.output_tensors, (queries, cache.view(-1, pd.page, k + p)), strict=True):
        own.data = target
    attention = parts["attention"].plan(queries[:, None], cache, x["page_table"], x["seq_lens"])
    if attention.comes_compiled:
        parts["values"].late_tensors = True
        attended = hidden.new_empty((b, h, k))
        attention = _Handing(attention, attended)
    else:
        attended = attention.output_tensors[0][:, 0]
    values = parts["values"].plan(attended, x["kv_up"])
    (heads,) = values.output_tensors
    out = hidden.new_empty((b, pd.hidden))
    stages = [
        project("down", hidden, latents), norm, project("up", query, q), absorb, rotate, attention, values,
        project("out", heads.view(b, h * pd.d), out),
    ]  # fmt: skip
    made = [latents, query, latent, q, queries, *attention.output_tensors, heads]
    workspaces = [tensor for stage in stages for tensor in stage.workspace_tensors]
    return LayerKernel(stages, inputs, out, workspace_tensors=[*made, *workspaces], tiling=tiling, plan=plan)
