"""Whole layers without a GPU: what torch's operations compute, compiled or not, and what a layer is made of."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from mla_var3.check.judge import check  # noqa: E402
from mla_var3.device import Device  # noqa: E402
from mla_var3.errors import UserError  # noqa: E402
from mla_var3.kernel import registry  # noqa: E402
from mla_var3.kernel.layer import LayerTiling  # noqa: E402
from mla_var3.kernel.registry import KernelId  # noqa: E402
from mla_var3.kernel.torch.prims.layer import decode_step  # noqa: E402
from mla_var3.runtime import KernelPipeline, LibraryCall, TorchKernel  # noqa: E402
from mla_var3.workload import layer  # noqa: E402
from mla_var3.workload.layer import LayerProblem  # noqa: E402

SMALL = LayerProblem(b=3, h=4, hidden=128, q_rank=64, k=64, p=16, d=32, lengths=(67, 1, 64))
H200 = Device.get("h200")


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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


def test_what_is_prefetched_of_the_output_projection() -> None:
    def of(*knobs: Any, **fields: Any) -> tuple[int, int]:
        return LayerTiling(prefetch=knobs[0], stripes=knobs[1]).prefetched(LayerProblem(**fields))

    assert of(16, 1) == (1, 8 << 20), "16-bit elements"
    assert of(16, 7168) == (7168, 1216), "1170.3 of each row, in whole lines"
    assert of(32, 1, h=16) == (1, 7168 * 16 * 128), "no more than there is"
    assert of(1, 7168 * 16, h=128) == (7168 * 16, 64)
    assert of(28, 7168 * 4, h=16) == (7168 * 4, 512)


def test_a_layer_s_prefetch_is_its_rope_kernel_s() -> None:
    kernel = KernelId.parse("cute-dsl/mla_layer")
    if (reason := registry.missing(kernel)) is not None:
        pytest.skip(reason)
    plan_type, problem = registry.get_plan(kernel), LayerProblem(b=8, h=128)
    rope = {}
    for prefetch, priority in ((0, "evict_last"), (16, "evict_last"), (16, "evict_normal")):
        plan = plan_type(problem, LayerTiling(prefetch=prefetch, priority=priority), H200)
        assert plan.feasible()
        rope[prefetch, priority] = plan.plan_empty().stages[2].plan.tiling
    assert [tiling.prefetch for tiling in rope.values()] == ["nothing", "evict_last", "evict_normal"]
    assert {tiling.eager for tiling in rope.values()} == {True}
    label, rotation, knobs = LayerTiling(attention="peer/flash_mla_lib", prefetch=16).parts(problem)["rope"]
    assert label == "cute-dsl/rope_append" and rotation == problem.rotation
    assert knobs == {"eager": False, "prefetch": "evict_normal"}
    for tiling, reason in (
        (LayerTiling(prefetch=-1), "prefetch = -1 MiB"),
        (LayerTiling(prefetch=16, stripes=0), "stripes = 0"),
        (LayerTiling(prefetch=16, stripes=5), "do not divide into so many stripes"),
        (LayerTiling(prefetch=16, priority="last"), "'last' is unknown"),
        (LayerTiling(rope="torch/rope_append", prefetch=16), "has no field 'prefetch'"),
    ):
        found = tiling.validate(problem, H200)
        assert not found and reason in found.reason, found


def test_a_layer_gives_its_rope_kernel_the_weights_that_are_read_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """W_UV of every head, and the first columns of each row of the output projection, beside the tensors to write."""
    from types import SimpleNamespace

    from mla_var3.toolchain import aot

    kernel = KernelId.parse("cute-dsl/mla_layer")
    if (reason := registry.missing(kernel)) is not None:
        pytest.skip(reason)
    given: dict[str, Any] = {}

    def recorded(plan: Any, name: str, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(handle=lambda *arguments: given.setdefault(name, arguments))

    monkeypatch.setattr(aot, "compiled_host", recorded)
    problem = LayerProblem(b=2, h=16, t=70, hidden=512, lengths=(70, 3))
    inputs = layer.make_inputs(problem, seed=2)
    x = layer.named(inputs)
    tiling = LayerTiling(attention="cute-dsl/flash_mla_v24", prefetch=1, stripes=512)
    made = registry.get_plan(kernel)(problem, tiling, H200).plan(*inputs)
    made.stages[4].launch()
    *_, out, cache, w_uv, w_o = (torch.from_dlpack(each) for each in given["rope_append"][1:])
    assert out.shape == (2, 16, 576) and cache.data_ptr() == x["kv_cache"].data_ptr()
    assert torch.equal(w_uv, x["kv_up"].view(16, 2, 128, 512)[:, 1].flatten(1))
    assert torch.equal(w_o, x["out"][:, :1024]) and w_o.data_ptr() == x["out"].data_ptr()


def test_a_layer_has_flash_mla_where_that_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    from pathlib import Path

    from mla_var3.kernel.peer.prims import find

    plan_type = registry.get_plan(KernelId.parse("peer/flash_mla_layer"))
    monkeypatch.setattr(find, "_flash_mla_lib", lambda: None)
    monkeypatch.setattr(find, "_flash_mla_vllm", lambda: None)
    assert "needs FlashMLA, which is not here" in plan_type(LayerProblem(), None, H200).supported().reason
    library = find.Library("flash_mla_vllm", "extension", Path("x.so"), "1", "a test's")
    monkeypatch.setattr(find, "_flash_mla_vllm", lambda: library)
    monkeypatch.setitem(find._LOOK, "flash_mla_vllm", lambda: library)
    plan = plan_type(LayerProblem(), None, H200)
    assert plan.tiling.attention == "peer/flash_mla_vllm"
    if registry.missing("cute-dsl") is None:
        assert plan.supported() and [s.comes_compiled for s in plan.plan_empty().stages] == [False] * 3 + [True, False]


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
