"""Whole layers without a GPU: what torch's operations compute, compiled or not, and what a layer is made of."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from mla_var3.catalogue import registry  # noqa: E402
from mla_var3.catalogue.registry import KernelId  # noqa: E402
from mla_var3.check.judge import check  # noqa: E402
from mla_var3.device import Device  # noqa: E402
from mla_var3.errors import UserError  # noqa: E402
from mla_var3.kernel.layer import LayerTiling  # noqa: E402
from mla_var3.kernel.torch.prims.layer import decode_step  # noqa: E402
from mla_var3.runtime import KernelPipeline, LibraryCall, TorchKernel  # noqa: E402
from mla_var3.workload import layer  # noqa: E402
from mla_var3.workload.layer import LayerProblem  # noqa: E402

SMALL = LayerProblem(b=3, h=4, hidden=128, q_rank=64, k=64, p=16, d=32, lengths=(67, 1, 64))
H200 = Device.get("h200")


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_layer_of_torch_operations_is_right(dtype: str) -> None:
    plan = registry.get_plan(KernelId.parse("torch/mla_layer"))
    report = check(plan, SMALL.replace(dtype=dtype), device="cpu")
    assert report.ok, report.reason
    assert [case.name for case in report.cases] == [name for name in layer.CASES if name != "idle"]


def test_torch_compiles_the_layer_without_a_break() -> None:
    """As torch.compile sees it: one graph, the cache written in place. (Compiled code is compared on a GPU.)"""
    inputs = layer.make_inputs(SMALL, seed=4, poison=False)
    other = [x.clone() for x in inputs]
    wanted, found = (inputs[0].new_empty((3, SMALL.hidden)) for _ in range(2))
    decode_step(*inputs, wanted, SMALL.h, SMALL.attention.scale)
    compiled = torch.compile(decode_step, fullgraph=True, dynamic=False, backend="aot_eager")
    compiled(*other, found, SMALL.h, SMALL.attention.scale)
    assert torch.equal(found, wanted) and bool(wanted.isfinite().all())
    assert torch.equal(other[layer.CACHE].nan_to_num(7.0), inputs[layer.CACHE].nan_to_num(7.0))


# ---------------------------------------------------------------- what a layer is made of
@pytest.mark.parametrize("h", [16, 64, 128])
def test_parts_of_our_layer_take_their_problems_and_device(h: int) -> None:
    kernel = KernelId.parse("cute-dsl/mla_layer")
    if (reason := registry.missing(kernel)) is not None:
        pytest.skip(reason)
    for b in (1, 8, 32, 128):
        plan = registry.get_plan(kernel)(LayerProblem(b=b, h=h), None, H200)
        assert plan.supported() and plan.feasible()
    names = [stage.name for stage in plan.plan_empty().stages]
    attention = "flash_mla_v24" if h == 16 else "flash_mla_v23"
    assert names == ["rmsnorm", "absorb_gemm", "rope_append", attention, "absorb_gemm"]


def test_a_tiling_that_names_what_does_not_fit_says_so() -> None:
    found = LayerTiling(attention="torch/flash_ml").validate(LayerProblem(), H200)
    assert not found and "no kernel 'torch/flash_ml': did you mean" in found.reason
    found = LayerTiling("torch/rmsnorm", "torch/rope_append", "torch/absorb_gemm", "torch/rmsnorm").validate(SMALL)
    assert not found and found.reason.startswith("torch/rmsnorm: the kernel computes norm")


def test_a_layer_has_flash_mla_where_that_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    from pathlib import Path

    from mla_var3.catalogue import libraries

    plan_type = registry.get_plan(KernelId.parse("peer/flash_mla_layer"))
    monkeypatch.setattr(libraries, "_flash_mla_lib", lambda: None)
    monkeypatch.setattr(libraries, "_flash_mla_vllm", lambda: None)
    assert "needs FlashMLA, which is not here" in plan_type(LayerProblem(), None, H200).supported().reason
    library = libraries.Library("flash_mla_vllm", "extension", Path("x.so"), "1", "a test's")
    monkeypatch.setattr(libraries, "_flash_mla_vllm", lambda: library)
    monkeypatch.setitem(libraries._LOOK, "flash_mla_vllm", lambda: library)
    plan = plan_type(LayerProblem(), None, H200)
    assert plan.tiling.attention == "peer/flash_mla_vllm"
    if registry.missing("cute-dsl") is None:
        stages = plan.plan_empty().stages
        assert plan.supported() and [s.comes_compiled for s in stages] == [False] * 3 + [True, False]
        assert not stages[2].plan.tiling.eager, "FlashMLA reads the cache without waiting"


# ---------------------------------------------------------------- pipelines of libraries and of shared schedules
def test_a_pipeline_compiles_no_library_and_shares_what_its_stages_share() -> None:
    said: list[str] = []

    class Scheduled(LibraryCall):
        @property
        def with_schedule(self) -> Any:
            return lambda: said.append("scheduled")

        def sharing(self) -> Any:
            return LibraryCall(lambda: said.append("shared"), name="shared")

    out = torch.zeros(1)
    first = LibraryCall(lambda: said.append("first"), name="first")
    last = TorchKernel(lambda: (said.append("last") or torch.ones(1),), name="last", output_tensors=(out,))
    pipeline = KernelPipeline([first, Scheduled(lambda: said.append("own"), name="own"), last])
    pipeline()
    assert pipeline.with_schedule is not None
    pipeline.with_schedule()
    sharing = pipeline.sharing()
    assert sharing is not pipeline
    sharing()
    assert said == ["first", "own", "last", "first", "scheduled", "last", "first", "shared", "last"]
    plain = KernelPipeline([first, last])
    assert plain.sharing() is plain and plain.with_schedule is None
    with pytest.raises(UserError, match="last is made of torch operations"):
        plain.compile(None, H200)
    with pytest.raises(UserError, match="first is a library's"):
        first.compile(None, H200)
