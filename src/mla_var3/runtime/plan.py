"""`KernelPlan`: problem + tiling + device, ready to make inputs, a reference, costs and a runnable kernel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from mla_var3.device import Requirement
from mla_var3.errors import Infeasible, Unsupported, UserError, Verdict
from mla_var3.runtime.types import Tiling
from mla_var3.toolchain.aot import CompileCache

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.runtime.base import BaseKernel
    from mla_var3.workload import Workload


def require_int32(**tensors: Any) -> None:
    """Raises `UserError` for the first of these tensors that is not int32, by its name."""
    import torch

    for name, tensor in tensors.items():
        if tensor.dtype != torch.int32:
            raise UserError(f"{name} is {tensor.dtype}: pass it as torch.int32.")


class KernelPlan(ABC):
    """One version of a design, for one problem, tiling and device. A version's file has one subclass, and the registry
    names the version by the file's place.

    A subclass sets `workload` (what is computed), `tiling_type` (its knobs) and `requires` (architectures and problems
    that it is written for), and implements `default_tiling`, `autotune_configs`, `plan` and `plan_empty`. Inputs,
    oracle and costs are the workload's.

        plan = OutputGatePlan(problem, None, Device.get("h200"))    None: the default tiling
        plan.require()                                              raises where problem, tiling or device do not fit
        kernel = plan.plan(*plan.prepare_inputs())                  on the GPU
        out, = kernel()

    Compiled functions are kept in `self.compiled`. Plans that `rebind` and `with_tiling` make share it, so that other
    tensors of the same problem class are bound without compiling.
    """

    workload: ClassVar[Workload]
    tiling_type: ClassVar[type[Tiling]]
    requires: ClassVar[Requirement]
    #: Techniques that the version has: names of pages in docs/knowledge/optimizations.
    uses: ClassVar[tuple[str, ...]] = ()
    deterministic: ClassVar[bool] = True
    graph_capturable: ClassVar[bool] = True
    #: Whether one piece of code reads contiguous inputs and those with gaps between their rows (option "strided"), as
    #: where TMA descriptors carry the strides: then a call's problem need not say which of the two it has.
    reads_any_strides: ClassVar[bool] = False
    #: Of a pipeline, the labels of the versions that it is made of ("cute-dsl/flash_mla_v23"). Its source hash covers
    #: them. The registry reads them without running the file, so they must be written as a literal.
    parts: ClassVar[tuple[str, ...]] = ()

    #: Whether a kernel that was planned for some tensors also serves other tensors of its problem class, whatever their
    #: sizes and strides. That holds where it reads shapes when it launches, and no workspace depends on them. The
    #: engine (`mla_var3.ops.engine`) then points the kernel's own tensors at the memory of the others.
    any_size: ClassVar[bool] = False

    #: Set by the engine, which points the kernel's tensors at other memory between launches: what is planned must read
    #: addresses when it launches, and keep none of them.
    late_tensors: bool = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # A problem of another workload lacks fields that the version's own predicate reads: it is refused before.
        if "requires" in vars(cls) and hasattr(cls, "workload"):
            cls.requires = replace(cls.requires, workload=cls.workload.name)

    def __init__(self, problem: Any, tiling: Tiling | None = None, device: Device | None = None) -> None:
        self.problem = problem
        self.device = device
        self.compiled = CompileCache()
        if tiling is None:
            # A version chooses by what it takes: of a problem that `supported` refuses, fields may be missing or odd.
            tiling = self.default_tiling() if self.requires.accepts(problem) else self.tiling_type()
        self.tiling = tiling

    # ------------------------------------------------------------ for subclasses
    @abstractmethod
    def default_tiling(self) -> Tiling:
        """A tiling that is feasible for problem and device, chosen by a model or by rules, without measuring."""

    @abstractmethod
    def autotune_configs(self) -> list[Tiling]:
        """The tilings that the tuner tries (`bench --tune`); it leaves out those that are infeasible."""

    @abstractmethod
    def plan(self, *inputs: Any) -> BaseKernel:
        """A kernel bound to `inputs`, outputs and workspaces allocated beside them. Sizes come from the tensors."""

    @abstractmethod
    def plan_empty(self) -> BaseKernel:
        """A kernel without tensors: it compiles and reports its roofline, and cannot be called."""

    # ------------------------------------------------------------ given
    @classmethod
    def code_class(cls, problem: Any) -> Any:
        """What the version's code is specialised on, beside a tiling's `code_knobs`: the problem class, but for a
        version that has one piece of code for several of them."""
        return problem.problem_class()

    def prepare_inputs(self, device: str = "cuda", **options: Any) -> tuple[Any, ...]:
        """Fresh random inputs of the problem; the workload's `make_inputs` has the options."""
        return self.workload.make_inputs(self.problem, device, **options)

    def reference_fn(self, *inputs: Any) -> tuple[Any, ...]:
        """The oracle on these inputs: outputs in higher precision."""
        return self.workload.reference(self.problem, *inputs)

    def algorithmic_flops_bytes(self, tiling: Tiling | None = None) -> tuple[int, int]:
        """(FLOPs, minimal bytes) of the problem."""
        cost = self.problem.cost()
        return cost.flops, cost.bytes

    def feasible(self) -> Verdict:
        """Whether this tiling fits the problem and the device."""
        return self.tiling.validate(self.problem, self.device)

    def supported(self) -> Verdict:
        """Whether the version handles the problem, and the device can run it."""
        verdict = self.requires.accepts(self.problem)
        if verdict and self.device is not None:
            verdict = self.device.can_run(self.requires)
        return verdict

    def require(self) -> None:
        """Raises `Unsupported` or `Infeasible` with the reason."""
        self.supported().require(Unsupported)
        self.feasible().require(Infeasible)

    def with_tiling(self, tiling: Tiling) -> Self:
        """The same plan with other knobs; compiled functions are shared."""
        return self._derive(self.problem, tiling)

    def rebind(self, *inputs: Any) -> Self:
        """The plan for other tensors of the same problem class; raises `UserError` when the class differs."""
        return self._derive(self.workload.rebound(self.problem, *inputs), self.tiling)

    def _derive(self, problem: Any, tiling: Tiling) -> Self:
        other = type(self)(problem, tiling, self.device)
        other.compiled = self.compiled
        other.late_tensors = self.late_tensors
        return other
