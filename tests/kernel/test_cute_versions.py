"""What the runtime asks of every CuTe version, compiled or not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mla_var3.device import Device
from mla_var3.kernel import registry
from mla_var3.problem import MlaProblem

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

VERSIONS = [k for k in registry.all_kernels() if k.language == "cute-dsl"]


@pytest.mark.parametrize("kernel", VERSIONS, ids=lambda k: k.label)
def test_a_bundle_holds_what_a_plan_asks_for(kernel: registry.KernelId, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled under their names, and a plan looks its functions up by name: the two must be the same."""
    from mla_var3.toolchain import aot

    asked: set[str] = set()

    def compiled_host(plan: Any, name: str, compile_fn: Any, **_: Any) -> Any:
        asked.add(name)
        return SimpleNamespace(handle=lambda *arguments: None)

    monkeypatch.setattr(aot, "compiled_host", compiled_host)
    problem = MlaProblem(b=1, h=16, t=2048)
    plan = registry.get_plan(kernel)(problem, None, Device.get("h200"))
    bound = plan.plan(*plan.prepare_inputs("cpu"))
    stages = getattr(bound, "stages", (bound,))
    assert asked and asked == {stage.name for stage in stages}


@pytest.mark.parametrize("kernel", VERSIONS, ids=lambda k: k.label)
def test_splits_do_not_compile_again(kernel: registry.KernelId) -> None:
    from mla_var3.toolchain.aot import code_knobs

    tiling = registry.get_plan(kernel)(MlaProblem(h=16), None, Device.get("h200")).tiling
    of_launch = {"num_splits", "workers", "split_tokens"} & set(tiling.to_record())
    assert of_launch and not of_launch & set(code_knobs(tiling))


def test_a_launcher_converts_tensors_once_and_leaves_the_first_to_name_the_stream() -> None:
    import torch
    import tvm_ffi

    from mla_var3.kernel.cute_python.lib import host

    tensors = [torch.zeros(2, 3), torch.arange(4, dtype=torch.int32), torch.empty(0, 5)]
    seen: list[tuple[object, ...]] = []
    launch = host.launcher(lambda *arguments: seen.append(arguments), *tensors, 0.5, 3)
    launch(None)
    launch(None)
    first, lengths, nothing, scale, splits = seen[0]
    assert first is tensors[0]
    assert isinstance(lengths, tvm_ffi.Tensor)
    assert isinstance(nothing, tvm_ffi.Tensor)
    assert tuple(nothing.shape) == (0, 5)
    assert (scale, splits) == (0.5, 3)
    assert all(a is b for a, b in zip(seen[0], seen[1], strict=True))
    tensors[1][2] = 40
    assert torch.from_dlpack(lengths).tolist() == [0, 1, 40, 3]
