"""`BaseKernel`: what kernels of every language have in common."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from mla_var3.errors import UserError
from mla_var3.runtime.types import Tiling
from mla_var3.toolchain.aot import Planned
from mla_var3.toolchain.compiled import CompiledKernel

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.toolchain.digest import Code

FlopsBytes = Callable[[Any], tuple[int, int]]


class Plan(Planned, Protocol):
    """What a kernel asks of the plan that it came from; `mla_var3.runtime.plan.KernelPlan` is one."""

    def plan(self, *inputs: Any) -> BaseKernel: ...

    def plan_empty(self) -> BaseKernel: ...

    def rebind(self, *inputs: Any) -> Plan: ...

    def with_tiling(self, tiling: Tiling) -> Plan: ...

    def autotune_configs(self) -> list[Tiling]: ...

    def algorithmic_flops_bytes(self, tiling: Tiling | None = None) -> tuple[int, int]: ...


class Outputs(Sequence[Any]):
    """`count` outputs that are made when they are read: iterate or index it."""

    def __init__(self, read: Callable[[], tuple[Any, ...]], count: int) -> None:
        self._read = read
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        return self._read()[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._read())


class BaseKernel(ABC):
    """A named runnable with its tensors and tiling.

    plan: the plan this kernel came from; `bind` and `retile` go through it. Without one, subclasses that can
    be relaunched with another tiling (`launch_fn(tiling)`) still tune, and only binding is refused.
    """

    #: Whether it calls a library, of which nothing is compiled here.
    comes_compiled: ClassVar[bool] = False

    def __init__(
        self,
        name: str,
        *,
        input_tensors: Sequence[Any] = (),
        output_tensors: Sequence[Any] = (),
        workspace_tensors: Sequence[Any] = (),
        tiling: Any = None,
        autotune_configs: Sequence[Any] = (),
        algorithmic_flops_bytes_fn: FlopsBytes | None = None,
        plan: Plan | None = None,
    ) -> None:
        self.name = name
        self.input_tensors = tuple(input_tensors)
        self.output_tensors = tuple(output_tensors)
        self.workspace_tensors = tuple(workspace_tensors)
        self.tiling = tiling
        self.autotune_configs = list(autotune_configs)
        self.algorithmic_flops_bytes_fn = algorithmic_flops_bytes_fn
        self.plan = plan

    # ------------------------------------------------------------ calling
    @abstractmethod
    def launch(self) -> None:
        """Launches on the current stream: no allocation, no waiting."""

    def __call__(self) -> tuple[Any, ...]:
        """Launches and returns the output tensors (which the device may still be writing)."""
        if not self.output_tensors:
            raise UserError(f"{self.name} was planned without tensors: it compiles, but cannot be called; use plan().")
        self.launch()
        return self.output_tensors

    def written_tensors(self) -> tuple[Any, ...]:
        """What a launch writes, as far as planning made it: outputs and workspaces."""
        return (*self.output_tensors, *self.workspace_tensors)

    @property
    def with_schedule(self) -> Callable[[], Any] | None:
        """A call that also makes what the calls of a step share (a library's schedule of the splits); None where a call
        shares nothing."""
        return None

    @property
    def beside(self) -> Mapping[str, Callable[[], Any]]:
        """Parts of the call, by name, whose own time a record has beside that of the call."""
        return {}

    def sharing(self) -> BaseKernel:
        """This call as one of several over the same lengths, as the layers of a model make them in a step: makes what
        they share now. Itself where there is nothing to make."""
        return self

    def keep_results(self, keep: bool) -> None:  # noqa: B027 - optional to override
        """keep=False: a launch keeps nothing alive that a library makes in the call. Nothing to do for our own
        kernels, whose outputs are made when they are planned."""

    def bind(self, *inputs: Any) -> BaseKernel:
        """A kernel on other tensors of the same problem class, without planning or compiling again."""
        if self.plan is None:
            raise UserError(f"{self.name} has no plan to bind through; make it with KernelPlan.plan().")
        return self.plan.rebind(*inputs).plan(*inputs)

    def retile(self, tiling: Any) -> BaseKernel:
        """The same work with other knobs."""
        if self.plan is not None:
            plan = self.plan.with_tiling(tiling)
            return plan.plan(*self.input_tensors) if self.input_tensors else plan.plan_empty()
        other = copy.copy(self)
        other.tiling = tiling
        return other

    # ------------------------------------------------------------ knowing
    def flops_bytes(self) -> tuple[int, int]:
        """(FLOPs, minimal bytes) of one call; (0, 0) when nobody said."""
        if self.algorithmic_flops_bytes_fn is not None:
            return self.algorithmic_flops_bytes_fn(self.tiling)
        if self.plan is not None:
            return self.plan.algorithmic_flops_bytes(self.tiling)
        return (0, 0)

    @property
    def compiler_picks_products(self) -> bool:
        """Whether the compiler chooses the matrix instructions, so that a tile's shape may miss the fast ones."""
        return any(stage.compiler_picks_products for stage in getattr(self, "stages", ()))

    @property
    def functions(self) -> tuple[str, ...]:
        """Names that what a call runs is compiled and kept under, in order. With the problem's class and the tiling's
        `code_knobs` they say which code it is: a version whose code follows from more, as from the length of a row, has
        that in the name (`mla_var3.toolchain.aot.compiled_host`)."""
        stages = getattr(self, "stages", None)
        if stages is None:
            return () if self.comes_compiled else (self.name,)
        return tuple(name for stage in stages for name in stage.functions)

    def code(self, device: Device) -> Code | None:
        """What a call runs, of a library that comes compiled; of others `compile` says it."""
        return None

    @abstractmethod
    def compile(self, out_dir: Path | None, device: Device, keep: Sequence[str] = ()) -> CompiledKernel:
        """Compiles for `device` with no GPU; artefacts named in `keep` (ptx, cubin, sass, …) stay in `out_dir`."""

    def configs(self) -> list[Any]:
        """The tilings the tuner tries, the current one first."""
        configs = self.autotune_configs or (self.plan.autotune_configs() if self.plan is not None else [])
        return [self.tiling, *[c for c in configs if c != self.tiling]]

    def autotune(self, measure: Callable[[BaseKernel], float], **options: Any) -> Tiling:
        """Measures every feasible tiling and adopts the fastest; see `mla_var3.runtime.autotune.autotune`."""
        from mla_var3.runtime.autotune import autotune

        result = autotune(self, measure, **options)
        self.adopt(self.retile(result.best))
        return result.best

    def adopt(self, other: BaseKernel) -> None:
        """Becomes `other`, which computes the same with another tiling; outputs may be other tensors."""
        self.__dict__.update(other.__dict__)
