"""Calls written down without a GPU, and what JAX's users are told where jax is missing."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from ops_fakes import not_compiled  # noqa: E402

from mla_var3.device import Device  # noqa: E402
from mla_var3.errors import Unsupported, UserError, install  # noqa: E402
from mla_var3.ops.calls import Buffer, call_of  # noqa: E402
from mla_var3.ops.ways import way_for  # noqa: E402
from mla_var3.toolchain import aot  # noqa: E402
from mla_var3.workload.decode import MlaProblem  # noqa: E402

H200 = Device.get("h200")
PLAIN = MlaProblem(b=3, h=16, t=512)


@pytest.fixture(autouse=True)
def compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot, "load_or_compile", lambda *_, **__: not_compiled())


@pytest.mark.parametrize(
    "problem",
    [PLAIN, PLAIN.replace(h=128), PLAIN.replace(queries={"total": 7}, causal=True), PLAIN.replace(s=4, tree=True)],
    ids=lambda p: p.label,
)
def test_a_call_has_every_tensor_that_an_engine_would_make(problem: MlaProblem) -> None:
    way = way_for(problem, H200)
    call = call_of(way, problem, H200)
    assert call.label == way.key[0].label and call.label.startswith("cute-dsl/")
    (step,) = call.steps
    named = [x for x in step.arguments if isinstance(x, Buffer)]
    assert sorted(named, key=str) == sorted((*call.inputs, *call.outputs, *call.workspaces), key=str)
    assert problem.scale in step.arguments and len(call.inputs) == 4 + problem.packed + problem.tree
    plan = way.make(problem, H200)
    kernel = plan.plan(*_on_cpu(call.inputs))
    assert len(call.workspaces) == len(kernel.workspace_tensors)
    own = call.workspaces[: len(kernel.workspace_tensors)]
    for buffers, tensors in ((call.outputs, kernel.output_tensors), (own, kernel.workspace_tensors)):
        assert [(b.shape, f"torch.{b.dtype}") for b in buffers] == [(tuple(x.shape), str(x.dtype)) for x in tensors]
    zero = [b.zeroed for b in call.workspaces]
    assert zero.count(True) == 1 and not kernel.workspace_tensors[zero.index(True)].any()


def _on_cpu(buffers: tuple[Buffer, ...]) -> list[Any]:
    return [torch.empty(b.shape, dtype=getattr(torch, b.dtype)) for b in buffers]


def test_fixed_splits_are_the_callers() -> None:
    free, fixed = (call_of(way_for(PLAIN, H200, fixed_split=n), PLAIN, H200) for n in (None, 128))
    differing = [
        i for i, (a, b) in enumerate(zip(*(c.steps[0].arguments for c in (free, fixed)), strict=True)) if a != b
    ]
    assert differing and 2 in fixed.steps[0].arguments  # tiles of 64 tokens


def test_a_version_of_another_language_is_refused() -> None:
    with pytest.raises(
        Unsupported, match=r"^triton/flash_mla is picked, and only cute-dsl versions can be called so: no"
    ):
        call_of(way_for(PLAIN, H200, kernel="triton/flash_mla"), PLAIN, H200)


@pytest.mark.parametrize("scale", [0.0, -0.1, 1e-40])
def test_a_scale_that_torch_would_fold_into_q_is_refused(scale: float) -> None:
    problem = PLAIN.replace(softmax_scale=scale)
    with pytest.raises(UserError, match=rf"^scale is {scale}: compiled functions take one above 0; pass -scale and -q"):
        call_of(way_for(problem, H200), problem, H200)


@pytest.mark.parametrize("module", ["jax", "jax_tvm_ffi"])
def test_a_missing_jax_is_named_with_its_extra(module: str) -> None:
    code = f"""
import sys
sys.modules["{module}"] = None
from mla_var3.ops.jax import mla_decode
mla_decode(None, None, None, None)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.strip().splitlines()[-1] in {
        f"mla_var3.errors.UserError: mla_var3.ops.jax needs the package {name}, which is not installed: "
        f"{install('jax')}."
        for name in ("jax", module)
    }
