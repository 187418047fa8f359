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
    """One version of a design for one problem and tiling. Subclasses live one a file; the registry names them.

    A subclass sets `workload`, `tiling_type` and `requires`, and implements `default_tiling`, `autotune_configs`,
    `plan` and `plan_empty`. Inputs, oracle and costs are the workload's. Compiled functions go into `self.compiled`,
    which rebinding and retuning share, and which other plans of the version may be given; that is what makes binding
    free of compilation.
    """

    workload: ClassVar[Workload]
    tiling_type: ClassVar[type[Tiling]]
    requires: ClassVar[Requirement]
    #: Techniques that the version has: names of pages in docs/knowledge/optimizations.
    uses: ClassVar[tuple[str, ...]] = ()
    deterministic: ClassVar[bool] = True
    graph_capturable: ClassVar[bool] = True
    #: Whether the code for inputs with gaps between their rows (option "strided") is that for contiguous ones, as where
    #: TMA descriptors carry the strides: a call's problem need not say then which it has.
    reads_any_strides: ClassVar[bool] = False
    #: Labels of the versions that a pipeline is made of, with whichever tiling. The source hash of the pipeline covers
    #: them; the registry reads them without running the file, so that they stand there as a literal.
    parts: ClassVar[tuple[str, ...]] = ()

    #: Whether a kernel that is planned for some tensors serves others of its problem class, of any sizes and strides,
    #: once its own are pointed at their memory: it reads shapes when it launches, and no workspace depends on them.
    any_size: ClassVar[bool] = False

    #: Whether tensors are pointed at other memory between launches, so that what is planned must read addresses then.
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
        """A tiling that is feasible for the problem class and decent, without measuring."""

    @abstractmethod
    def autotune_configs(self) -> list[Tiling]:
        """The tilings worth measuring; infeasible ones may be among them."""

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
