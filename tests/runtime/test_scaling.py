"""Scales of zero and below in versions that look for the largest score before they scale it (`runtime.scaling`)."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from mla_var3.catalogue import registry  # noqa: E402
from mla_var3.check.judge import check  # noqa: E402
from mla_var3.device import Device, Requirement  # noqa: E402
from mla_var3.ops.engine import follows_tensors  # noqa: E402
from mla_var3.runtime import KernelPipeline, KernelPlan, Tiling, TorchKernel, Verdict  # noqa: E402
from mla_var3.runtime.scaling import SMALLEST, SignedQueries, any_scale, sign_of  # noqa: E402
from mla_var3.workload import decode  # noqa: E402
from mla_var3.workload.decode import MlaProblem  # noqa: E402

CASES = ("scale_zero", "scale_negative", "nan")
H200 = Device.get("h200")


class NoKnobs(Tiling):
    def validate(self, pd: Any, device: Any = None) -> Verdict:
        return Verdict.yes()


class MaximumFirst(KernelPlan):
    """Attention as the fast versions compute it: masks with -inf, takes the maximum, and scales what is left."""

    workload = decode.WORKLOAD
    tiling_type = NoKnobs
    requires = Requirement(archs=())
    seen: list[float]

    def default_tiling(self) -> Tiling:
        return NoKnobs()

    def autotune_configs(self) -> list[Tiling]:
        return []

    def attend(self, q: Any, cache: Any, table: Any, lens: Any) -> tuple[Any, Any]:
        out = q.new_zeros((*q.shape[:-1], self.problem.k))
        lse = q.new_full((len(q), q.shape[2], q.shape[1]), math.inf, dtype=torch.float32)
        for i, length in enumerate(lens.tolist()):
            pages = -(-length // self.problem.page_size)
            keys = cache[table[i, :pages].long()].flatten(0, 1)[:, 0].float()
            scores = q[i].float() @ keys.nan_to_num().t()
            scores[:, :, length:] = -math.inf
            most = scores.amax(-1, keepdim=True).clamp(min=-1e30) if length else scores.sum(-1, keepdim=True)
            weights = (scores * self.problem.scale - most * self.problem.scale).exp()
            if length:
                keys[length:] = 0.0
                total = weights.sum(-1, keepdim=True)
                out[i] = (weights @ keys[:, : self.problem.k] / total).to(q.dtype)
                lse[i] = (total.log() + most * self.problem.scale)[..., 0].t()
        return out, lse

    def plan(self, *inputs: Any) -> Any:
        q = inputs[0]
        out = q.new_empty((*q.shape[:-1], self.problem.k))
        lse = q.new_empty((len(q), q.shape[2], q.shape[1]), dtype=torch.float32)
        return TorchKernel(
            self.attend, name="attend", input_tensors=inputs, output_tensors=(out, lse), tiling=self.tiling, plan=self
        )

    def plan_empty(self) -> Any:
        return TorchKernel(self.attend, name="attend", tiling=self.tiling, plan=self)


class AnyScale(MaximumFirst):
    plan = any_scale(0)(MaximumFirst.plan)


PROBLEM = MlaProblem(b=2, h=2, t=100, k=16, p=8, d=8, page=16)


@pytest.mark.parametrize("case", CASES[:2])
def test_the_copy_is_what_makes_such_a_version_right(case: str) -> None:
    assert not check(MaximumFirst, PROBLEM, device="cpu", cases=[case], seeds=[3])
    report = check(AnyScale, PROBLEM, device="cpu", cases=[case], seeds=[3])
    assert report.ok, report.reason


def test_any_other_scale_has_one_kernel_as_before() -> None:
    kernel = AnyScale(PROBLEM).plan(*decode.make_inputs(PROBLEM))
    assert isinstance(kernel, TorchKernel) and kernel.plan.problem is PROBLEM


@pytest.mark.parametrize(("scale", "sign"), [(0.1, 1), (-0.1, -1), (0.0, 0), (-0.0, 0), (SMALLEST, 1), (1e-40, 0)])
def test_which_sign_a_scale_has(scale: float, sign: int) -> None:
    assert sign_of(scale) == sign


def test_bound_again_it_reads_the_new_queries_and_keeps_its_problem() -> None:
    problem = PROBLEM.replace(softmax_scale=-0.5)
    first, second = (decode.make_inputs(problem, seed=seed, dist="normal") for seed in (1, 2))
    kernel = AnyScale(problem).plan(*first)
    assert isinstance(kernel, KernelPipeline) and follows_tensors(kernel) and kernel.plan.problem is problem
    for bound, inputs in ((kernel, first), (kernel.bind(*second), second)):
        out, lse = bound()
        want = decode.reference(problem, *inputs)
        torch.testing.assert_close(out.double(), want[0], rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse.double(), want[1], rtol=1e-3, atol=1e-3)
        assert bound.input_tensors[0] is inputs[0] and torch.equal(bound.workspace_tensors[0], -inputs[0])


def test_numbers_that_are_none_stay_so_times_zero() -> None:
    q = torch.tensor([1.0, math.nan, math.inf, -3.0]).bfloat16().requires_grad_()
    copy = torch.empty(4, dtype=torch.bfloat16)
    SignedQueries([q], [copy], 0).launch()
    assert copy.isnan().tolist() == [False, True, True, False] and not copy[[0, 3]].any()


#: Versions of CuTe, which cannot run here, that look for the largest score before they scale it.
FOLDING = ("flash_mla", "flash_mla_v23", "flash_mla_v24")


@pytest.mark.parametrize("name", FOLDING)
def test_a_cute_version_gets_the_magnitude_and_turned_queries(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    from mla_var3.toolchain import aot
    from mla_var3.toolchain.compiled import CompiledKernel, Resources

    calls: list[tuple[Any, ...]] = []
    handle: Any = lambda *given: calls.append(given)  # noqa: E731
    compiled = CompiledKernel("not compiled", "sm_90a", Resources(), handle=handle)
    monkeypatch.setattr(aot, "load_or_compile", lambda *_, **__: compiled)
    problem = MlaProblem(b=2, h=16, t=64, softmax_scale=-0.25)
    plan = registry.get_plan(registry.KernelId.parse(f"cute-dsl/{name}"))(problem, None, H200)
    plan.late_tensors = True
    inputs = plan.prepare_inputs("cpu", seed=1)
    kernel = plan.plan(*inputs)
    kernel.launch()
    (given,) = calls
    assert given[0].data_ptr() == kernel.workspace_tensors[0].data_ptr() and torch.equal(given[0], -inputs[0])
    assert 0.25 in [x for x in given if isinstance(x, float)] and kernel.plan is plan
