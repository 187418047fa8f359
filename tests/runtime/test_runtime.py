"""Pipelines, concurrent groups, binding and tuning, on the CPU with kernels made of torch."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_var3.device import Device, Requirement
from mla_var3.errors import UserError
from mla_var3.runtime import (
    ConcurrentKernels,
    CuteKernel,
    Kernel,
    KernelPipeline,
    KernelPlan,
    Tiling,
    TorchKernel,
    TritonKernel,
    Verdict,
)
from mla_var3.runtime.autotune import autotune, tuning_key
from mla_var3.toolchain.compiled import CompiledKernel, Resources
from mla_var3.workload import decode
from mla_var3.workload.decode import MlaProblem


@dataclass(frozen=True)
class ToyTiling(Tiling):
    tile_m: int = 1

    def validate(self, pd: MlaProblem, device: Device | None = None) -> Verdict:
        if self.tile_m > 8:
            return Verdict.no(f"tile_m = {self.tile_m} is over 8")
        return Verdict.yes()


class ToyPlan(KernelPlan):
    """Sums q over heads; counts how often it compiles."""

    workload = decode.WORKLOAD
    tiling_type = ToyTiling
    requires = Requirement(archs=(), dtypes=("fp32", "bf16"))
    compiles = 0

    def default_tiling(self) -> ToyTiling:
        return ToyTiling()

    def autotune_configs(self) -> list[Tiling]:
        return [ToyTiling(m) for m in (1, 2, 4, 8, 16)]

    def _function(self) -> Any:
        key = (self.problem.problem_class(), self.tiling)
        if key not in self.compiled:
            type(self).compiles += 1
            self.compiled[key] = lambda q, kv, table, lens: (q.sum(2),)
        return self.compiled[key]

    def plan(self, *inputs: Any) -> TorchKernel:
        q = inputs[0]
        out = torch.full((q.shape[0], q.shape[1], q.shape[3]), float("nan"), dtype=q.dtype)
        return TorchKernel(
            self._function(), name="toy", input_tensors=inputs, output_tensors=[out], tiling=self.tiling, plan=self
        )

    def plan_empty(self) -> TorchKernel:
        return TorchKernel(self._function(), name="toy", tiling=self.tiling, plan=self)


def inputs_of(b: int, pages: int, h: int = 4) -> tuple[torch.Tensor, ...]:
    return (
        torch.randn(b, 1, h, 576),
        torch.zeros(b * pages, 64, 1, 576),
        torch.zeros(b, pages, dtype=torch.int32),
        torch.full((b,), 64 * pages, dtype=torch.int32),
    )


PROBLEM = MlaProblem(b=2, t=128, h=4, dtype="fp32")


def toy(b: int = 2, pages: int = 2) -> TorchKernel:
    return ToyPlan(PROBLEM, device=Device.get("h200")).plan(*inputs_of(b, pages))


def test_kernels_satisfy_the_protocol() -> None:
    assert isinstance(toy(), Kernel)


def test_call_returns_outputs_and_bind_compiles_nothing() -> None:
    kernel = toy()
    (out,) = kernel()
    torch.testing.assert_close(out, kernel.input_tensors[0].sum(2))
    before = ToyPlan.compiles
    other = inputs_of(5, 7)
    bound = kernel.bind(*other)
    torch.testing.assert_close(bound()[0], other[0].sum(2))
    assert ToyPlan.compiles == before
    assert bound.plan is not None and bound.plan.problem.b == 5 and bound.plan.problem.t == 7 * 64


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda i: (i[0].bfloat16(), *i[1:]), "dtype"),
        (lambda i: (i[0][:, :, :3], *i[1:]), "h is 3"),
        (lambda i: (i[0], i[1].reshape(-1, 32, 1, 576), *i[2:]), "page is 32"),
        (lambda i: (*i[:3], i[3][:1]), "2 requests"),
        (lambda i: (i[0].repeat(1, 2, 1, 1), *i[1:]), "s is 2"),
    ],
)
def test_bind_refuses_another_class(change: Any, named: str) -> None:
    kernel = toy()
    with pytest.raises(UserError, match=named):
        kernel.bind(*change(inputs_of(2, 2)))


def test_empty_kernel_says_so() -> None:
    with pytest.raises(UserError, match="without tensors"):
        ToyPlan(PROBLEM).plan_empty()()


def test_plan_flops_and_support() -> None:
    plan = ToyPlan(PROBLEM, device=Device.get("h200"))
    assert plan.plan_empty().flops_bytes() == (PROBLEM.cost().flops, PROBLEM.cost().bytes)
    assert plan.supported() and plan.feasible()
    assert "fp16" in ToyPlan(PROBLEM.replace(dtype="fp16")).supported().reason
    with pytest.raises(UserError, match="over 8"):
        plan.with_tiling(ToyTiling(9)).require()


def test_pipeline_runs_in_order_and_tunes_as_a_whole(tmp_path: Path) -> None:
    x, y, z = torch.ones(3), torch.zeros(3), torch.zeros(3)
    first = TorchKernel(lambda a: (a + 1,), name="add", input_tensors=[x], output_tensors=[y])
    second = TorchKernel(lambda a: (a * 10,), name="scale", input_tensors=[y], output_tensors=[z])
    pipeline = KernelPipeline([first, second], name="both")
    assert pipeline()[0] is z
    assert z.tolist() == [20.0] * 3


def test_concurrent_stages_run_and_are_validated_together() -> None:
    x, y, z = torch.ones(3), torch.zeros(3), torch.zeros(3)
    first = TorchKernel(lambda a: (a + 1,), name="first", input_tensors=[x], output_tensors=[y])
    second = TorchKernel(lambda a: (a + 2,), name="second", input_tensors=[x], output_tensors=[z])
    both = ConcurrentKernels([first, second])
    assert [t.tolist() for t in both()] == [[2.0] * 3, [3.0] * 3]
    reader = TorchKernel(lambda a: (a + 2,), name="reader", input_tensors=[y[1:]], output_tensors=[torch.zeros(2)])
    with pytest.raises(UserError, match=r"first .* writes a tensor that reader"):
        ConcurrentKernels([first, reader])
    with pytest.raises(UserError, match="too much shared memory"):
        ConcurrentKernels([first, second], joint=lambda group, device: Verdict.no("too much shared memory together"))
    with pytest.raises(UserError, match="two stages"):
        ConcurrentKernels([first])


def test_cute_kernel_passes_the_tiling_to_its_closure() -> None:
    seen: list[int] = []

    def device_function() -> None: ...

    def launch(tiling: ToyTiling) -> None:
        seen.append(tiling.tile_m)

    x = torch.zeros(1)
    kernel = CuteKernel(device_function, launch, [x], [x], ToyTiling(2), [ToyTiling(4)], lambda tiling: (7, 3))
    kernel()
    kernel.retile(ToyTiling(4))()
    assert seen == [2, 4] and kernel.name == "device_function" and kernel.flops_bytes() == (7, 3)
    with pytest.raises(UserError, match="compile_fn"):
        kernel.compile(None, Device.get("h200"))


def fake_times(times: dict[int, float]) -> Any:
    def measure(kernel: Any) -> float:
        value = times[kernel.tiling.tile_m]
        if value < 0:
            raise RuntimeError("launch failed")
        return value

    return measure


def test_triton_kernel_refuses_views_of_its_tensors() -> None:
    """Its arguments are kept: a view would stay where it was made when the tensor is pointed at other memory."""
    launched: list[list[float]] = []

    class Jitted:
        __name__ = "toy"

        def __getitem__(self, grid: Any) -> Any:
            return lambda *args: launched.append([x.sum().item() for x in args])

    x, out = torch.ones(4), torch.zeros(4)
    kernel = TritonKernel(Jitted(), lambda _: (1,), lambda _: (x, out), [x], [out], None)
    kernel.launch()
    x.data = torch.full((4,), 2.0)
    kernel.launch()
    assert launched == [[4.0, 0.0], [8.0, 0.0]]
    with pytest.raises(UserError, match="toy: argument 1 of args_fn is a tensor that is none of the kernel's"):
        TritonKernel(Jitted(), lambda _: (1,), lambda _: (x, out[:2]), [x], [out], None).launch()


def test_tuning_measures_skips_records_and_keeps(tmp_path: Path) -> None:
    kernel = toy()
    measure = fake_times({1: 5.0, 2: 3.0, 4: -1.0, 8: 4.0})
    result = autotune(kernel, measure, cache_dir=tmp_path, progress=False)
    assert result.best == ToyTiling(2)
    status = {t.tiling["tile_m"]: t.status for t in result.trials}
    assert status == {1: "measured", 2: "measured", 4: "failed", 8: "measured", 16: "infeasible"}
    reasons = {t.tiling["tile_m"]: t.reason for t in result.trials}
    assert "launch failed" in reasons[4] and "over 8" in reasons[16]

    def never(kernel: Any) -> float:
        raise AssertionError("measured again")

    again = autotune(toy(), never, cache_dir=tmp_path, progress=False)
    assert again.from_cache and again.best == ToyTiling(2)
    assert kernel.autotune(never, cache_dir=tmp_path, progress=False) == ToyTiling(2) == kernel.tiling


class Picking(TorchKernel):
    """As if its compiler chose the matrix instructions, and found none for tile_m = 4."""

    compiler_picks_products = True

    def compile(self, out_dir: Path | None, device: Device, keep: Any = ()) -> CompiledKernel:
        few = self.tiling.tile_m == 4
        count = {"HGMMA": 8, "FADD": 1100} if few else {"HGMMA": 200, "FADD": 50}
        return CompiledKernel("toy", device.arch, Resources(instructions=count))


class PickingPlan(ToyPlan):
    """Wrong with tile_m = 8; the row without a token has infinities, equal ones."""

    def plan(self, *inputs: Any) -> Picking:
        factor = 1.1 if self.tiling.tile_m == 8 else 1.0

        def work(q: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
            total = q.sum(2) * factor
            total[0] = float("inf")
            return (total,)

        out = torch.empty(inputs[0].shape[0], inputs[0].shape[1], inputs[0].shape[3])
        return Picking(work, name="toy", input_tensors=inputs, output_tensors=[out], tiling=self.tiling, plan=self)

    def plan_empty(self) -> Picking:
        return Picking(self._function(), name="toy", tiling=self.tiling, plan=self)


def test_what_is_off_the_tensor_cores_or_wrong_gets_no_time(tmp_path: Path) -> None:
    kernel = PickingPlan(PROBLEM, device=Device.get("h200")).plan(*inputs_of(2, 2))
    timed = []

    def measure(candidate: Any) -> float:
        timed.append(candidate.tiling.tile_m)
        return float(9 - candidate.tiling.tile_m)

    result = autotune(kernel, measure, cache_dir=tmp_path, progress=False)
    assert timed == [1, 2] and result.best == ToyTiling(2)
    said = {t.tiling["tile_m"]: (t.status, t.reason) for t in result.trials}
    assert said[4][0] == "refused"
    assert "falls off the tensor-core path of sm_90a: 8 warpgroup (HGMMA) and 1100 plain adds" in said[4][1]
    assert "where another tiling has 200 and 50" in said[4][1]
    assert said[8][0] == "incorrect" and "0.1 of its norm apart" in said[8][1]
    assert said[16][0] == "infeasible"


def test_tuning_stops_at_its_budget_and_keeps_no_partial_result(tmp_path: Path) -> None:
    def slow(kernel: Any) -> float:
        time.sleep(0.05)
        return 1.0

    cut = autotune(toy(), slow, cache_dir=tmp_path, budget_s=0.01, progress=False)
    assert [t.status for t in cut.trials].count("not reached") >= 3
    assert not list(tmp_path.glob("*.json"))


def test_tuning_without_a_success_names_the_first_reason(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="launch failed"):
        autotune(toy(), fake_times(dict.fromkeys((1, 2, 4, 8), -1.0)), cache_dir=tmp_path, progress=False)


def test_tuning_key_changes_with_what_it_covers(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {tuning_key(toy())}
    keys.add(tuning_key(ToyPlan(PROBLEM.replace(causal=True)).plan_empty()))
    keys.add(tuning_key(ToyPlan(PROBLEM, device=Device.get("h100")).plan_empty()))
    monkeypatch.setattr("mla_var3.runtime.autotune._source_of", lambda kernel: "other")
    keys.add(tuning_key(toy()))
    monkeypatch.setattr("mla_var3.runtime.autotune.installed", lambda names: {"torch": "0"})
    keys.add(tuning_key(toy()))
    assert len(keys) == 5


def test_torn_cache_entry_is_tuned_again(tmp_path: Path) -> None:
    kernel = toy()
    (tmp_path / f"{tuning_key(kernel)}.json").write_text('{"best": {"tile_m"')
    result = autotune(kernel, fake_times({1: 1.0, 2: 2.0, 4: 2.0, 8: 2.0}), cache_dir=tmp_path, progress=False)
    assert not result.from_cache
    assert json.loads(next(tmp_path.glob("*.json")).read_text())["best"] == {"tile_m": 1}


def test_tiling_record_names_the_nearest_field() -> None:
    assert ToyTiling.from_record({"tile_m": 4}) == ToyTiling(4)
    with pytest.raises(UserError, match="tile_m"):
        ToyTiling.from_record({"tile_n": 4})
