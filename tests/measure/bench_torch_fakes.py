"""Plans of torch operations, for the check that runs on a CPU, and a backend that times them there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from bench_fakes import FakeTiling, HostBackend

from mla_var3.device import Requirement
from mla_var3.runtime import KernelPlan, TorchKernel
from mla_var3.workload import decode
from mla_var3.workload.decode import mla_decode_reference


class TorchRight(KernelPlan):
    """The oracle as a kernel."""

    workload = decode.WORKLOAD
    tiling_type = FakeTiling
    requires = Requirement(archs=())
    graph_capturable = False

    def default_tiling(self) -> FakeTiling:
        return FakeTiling()

    def autotune_configs(self) -> list[Any]:
        return [FakeTiling()]

    def plan_empty(self) -> TorchKernel:
        return TorchKernel(self.attend, name="oracle", tiling=self.tiling, plan=self)

    def attend(self, *inputs: Any) -> tuple[Any, ...]:
        return mla_decode_reference(*inputs, k=self.problem.k, scale=self.problem.scale, causal=self.problem.causal)

    def plan(self, *inputs: Any) -> TorchKernel:
        b, s, h, _ = inputs[0].shape
        out = inputs[0].new_empty(b, s, h, self.problem.k)
        lse = torch.empty(b, h, s, device=inputs[0].device)
        options = {"input_tensors": inputs, "output_tensors": (out, lse), "tiling": self.tiling, "plan": self}
        return TorchKernel(self.attend, name="oracle", **options)


class TorchWrong(TorchRight):
    """Off by one part in twenty."""

    def attend(self, *inputs: Any) -> tuple[Any, ...]:
        out, lse = super().attend(*inputs)
        return out * 1.05, lse


class TwoRequestsAreWrong(HostBackend):
    """Answers are not looked at: of two requests all are wrong, and others right."""

    def check(self, plan: Any, device: Any, quick: bool) -> Any:
        return SimpleNamespace(ok=plan.problem.b != 2, reason="the answer is wrong", error={"out": 0.0, "lse": 0.0})
