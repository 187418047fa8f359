"""`KernelPlan`: problem + tiling + device, ready to make inputs, a reference, costs and a runnable kernel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Self

from mla_var3.device import Requirement
from mla_var3.errors import Infeasible, Unsupported, UserError
from mla_var3.problem import MlaProblem
from mla_var3.runtime.types import Tiling, Verdict

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.runtime.base import BaseKernel


def require_int32(**tensors: Any) -> None:
    """Raises `UserError` for the first of these tensors that is not int32, by its name."""
    import torch

    for name, tensor in tensors.items():
        if tensor.dtype != torch.int32:
            raise UserError(f"{name} is {tensor.dtype}: pass it as torch.int32.")


class KernelPlan(ABC):
    """One version of a design for one problem and tiling. Subclasses live one a file; the registry names them.

    A subclass sets `tiling_type` and `requires`, and implements `default_tiling`, `autotune_configs`, `plan` and
    `plan_empty`. Compiled functions go into `self.compiled`, a dictionary that rebinding and retuning share, and that
    other plans of the version may be given, under keys that hold everything the code depends on; that is what makes
    binding free of compilation.
    """

    tiling_type: ClassVar[type[Tiling]]
    requires: ClassVar[Requirement]
    deterministic: ClassVar[bool] = True
    graph_capturable: ClassVar[bool] = True
    formulation: ClassVar[str] = "absorbed"

    #: Whether tensors are pointed at other memory between launches, so that what is planned must read addresses then.
    late_tensors: bool = False

    def __init__(self, problem: MlaProblem, tiling: Tiling | None = None, device: Device | None = None) -> None:
        self.problem = problem
        self.device = device
        self.compiled: dict[Any, Any] = {}
        self.tiling = self.default_tiling() if tiling is None else tiling

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
    def prepare_inputs(self, device: str = "cuda", **options: Any) -> tuple[Any, ...]:
        """Fresh random inputs of the problem; see `mla_var3.runtime.correctness.inputs.make_inputs` for the options."""
        from mla_var3.runtime.correctness.inputs import make_inputs

        return make_inputs(self.problem, device, **options)

    def reference_fn(self, *inputs: Any) -> tuple[Any, ...]:
        """The oracle on these inputs: (out, lse) in higher precision."""
        from mla_var3.runtime.correctness.oracle import mla_decode_reference

        q, kv_cache, page_table, seq_lens = inputs
        pd = self.problem
        return mla_decode_reference(q, kv_cache, page_table, seq_lens, k=pd.k, scale=pd.scale, causal=pd.causal)

    def algorithmic_flops_bytes(self, tiling: Tiling | None = None) -> tuple[int, int]:
        """(FLOPs, minimal bytes) of the formulation this design computes."""
        cost = self.problem.cost(self.formulation)
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
        """The plan for other tensors of the same problem class; raises `UserError` when the class differs.

        Lengths stay on the device, so the new problem has t = page table width · page size and uniform lengths:
        an upper bound, never read by kernels. Nothing waits for the device.
        """
        q, kv_cache, page_table, seq_lens = inputs
        pd = self.problem
        b, s, h, width = q.shape
        found = {"s": s, "h": h, "k + p": width, "h_kv": kv_cache.shape[2], "page": kv_cache.shape[1], "dtype": q.dtype}
        want = {
            "s": pd.s,
            "h": pd.h,
            "k + p": pd.k + pd.p,
            "h_kv": pd.h_kv,
            "page": pd.page_size,
            "dtype": pd.torch_dtype,
        }
        for name, value in want.items():
            if found[name] != value:
                raise UserError(
                    f"cannot bind: {name} is {found[name]}, and this kernel was planned for {value}; plan a new kernel."
                )
        if kv_cache.dtype != q.dtype or kv_cache.shape[3] != width:
            raise UserError("cannot bind: q and kv_cache differ in dtype or width; give both as the problem says.")
        if page_table.shape[0] != b or tuple(seq_lens.shape) != (b,):
            raise UserError(f"cannot bind: page_table and seq_lens must have one row for each of the {b} requests.")
        problem = pd.replace(b=b, t=page_table.shape[1] * pd.page_size, lengths="uniform")
        return self._derive(problem, self.tiling)

    def _derive(self, problem: MlaProblem, tiling: Tiling) -> Self:
        other = type(self)(problem, tiling, self.device)
        other.compiled = self.compiled
        other.late_tensors = self.late_tensors
        return other
