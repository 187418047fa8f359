"""`mla_decode` for JAX without a GPU: XLA calls what was noted, on its own memory; torch computes for the kernel."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax", reason="the extra 'jax' is not installed")
pytest.importorskip("jax_tvm_ffi", reason="the extra 'jax' is not installed")
pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

import jax.numpy as jnp  # noqa: E402
from ops_fakes import not_compiled  # noqa: E402

from mla_var3.device import Device  # noqa: E402
from mla_var3.errors import Unsupported, UserError  # noqa: E402
from mla_var3.ops import calls  # noqa: E402
from mla_var3.ops import jax as module  # noqa: E402
from mla_var3.ops.jax import mla_decode  # noqa: E402
from mla_var3.toolchain import aot  # noqa: E402
from mla_var3.workload.decode import MlaProblem, fifth_input, make_inputs, mla_decode_reference  # noqa: E402

RAGGED = MlaProblem(h=16, causal=True, s=2, t=1, lengths=[70, 0, 129], b=3)
PROBLEMS = {
    "causal": RAGGED,
    "packed": RAGGED.replace(queries={"total": 5}),
    "tree": RAGGED.replace(causal=False, tree=True),
}


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Calls for an H200 are noted as they are, and XLA makes them on the CPU, of a function in the kernel's place;
    returns how many arguments each had."""
    made: list[int] = []
    real = calls.call_of

    def call_of(way: Any, problem: MlaProblem, device: Device) -> calls.Call:
        call = real(way, problem, device)

        def compute(*arguments: Any) -> None:
            made.append(len(arguments))
            memory = {
                buffer: torch.from_dlpack(x)
                for x, buffer in zip(arguments, step.arguments, strict=True)
                if isinstance(buffer, calls.Buffer)
            }
            assert all(tuple(x.shape) == b.shape for b, x in memory.items() if b != call.inputs[1])
            zeroed = [x for b, x in memory.items() if b.zeroed]
            assert zeroed and not any(x.any() for x in zeroed)
            given = [memory[b] for b in call.inputs]
            options = {"k": problem.k, "scale": problem.scale, "causal": problem.causal}
            found = mla_decode_reference(*given[:4], **options, **fifth_input(*given))
            for buffer, value in zip(call.outputs, found, strict=True):
                memory[buffer].copy_(value)

        (step,) = call.steps
        step = dataclasses.replace(step, compiled=dataclasses.replace(step.compiled, handle=compute))
        return dataclasses.replace(call, steps=(step,))

    monkeypatch.setattr(module, "call_of", call_of)
    monkeypatch.setattr(module, "PLATFORM", "cpu")
    monkeypatch.setattr(Device, "detect", staticmethod(lambda index=0: Device.get("h200")))
    monkeypatch.setattr(aot, "load_or_compile", lambda *_, **__: not_compiled())
    module._target.cache_clear()
    return made


def arrays(tensors: Any) -> list[Any]:
    return [jnp.from_dlpack(x.contiguous()) for x in tensors]


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", PROBLEMS)
def test_xla_calls_what_was_noted(name: str, jit: bool, on_cpu: list[int]) -> None:
    problem = PROBLEMS[name]
    given = make_inputs(problem, "cpu", seed=0, dist="normal", poison=False)
    fifth = dict(zip(fifth_input(*given), arrays(given[4:]), strict=True))
    if "mask" in fifth:
        fifth["mask"] = fifth["mask"].astype(bool)

    def attend(*given: Any, **fifth: Any) -> Any:
        return mla_decode(*given, **fifth, causal=problem.causal, return_lse=True)

    out, lse = (jax.jit(attend) if jit else attend)(*arrays(given[:4]), **fifth)
    want = mla_decode_reference(*given[:4], k=512, scale=192**-0.5, causal=problem.causal, **fifth_input(*given))
    assert (str(out.dtype), str(lse.dtype), on_cpu) == ("bfloat16", "float32", [14])
    assert torch.equal(torch.from_dlpack(out), want[0].to(torch.bfloat16))
    assert torch.equal(torch.from_dlpack(lse), want[1].float())


@pytest.mark.parametrize("scale", [0.0, -0.25])
def test_a_scale_of_zero_and_below_turns_the_queries(scale: float, on_cpu: list[int]) -> None:
    given = make_inputs(RAGGED, "cpu", seed=0, dist="normal", poison=False)
    attend = jax.jit(lambda *given: mla_decode(*given, causal=True, scale=scale, return_lse=True))
    out, lse = (torch.from_dlpack(x) for x in attend(*arrays(given)))
    want = mla_decode_reference(*given, k=512, scale=scale, causal=True)
    assert on_cpu == [14]
    torch.testing.assert_close(out, want[0].to(torch.bfloat16), rtol=0, atol=0)
    torch.testing.assert_close(lse, want[1].float(), rtol=1e-6, atol=1e-6)


def test_an_empty_batch_has_an_empty_result(on_cpu: list[int]) -> None:
    given = make_inputs(RAGGED, "cpu", poison=False)
    q, cache, table, lens = arrays(given)
    assert mla_decode(q[:0], cache, table[:0], lens[:0]).shape == (0, 2, 16, 512) and on_cpu == []


def test_mistakes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    q, cache, table, lens = arrays(make_inputs(RAGGED, "cpu", poison=False))
    with pytest.raises(UserError, match=r"^page_table is torch.float32: pass it as torch.int32"):
        mla_decode(q, cache, table.astype(jnp.float32), lens)
    with pytest.raises(UserError, match=r"^q is a list: pass a JAX array"):
        mla_decode([q], cache, table, lens)
    with pytest.raises(Unsupported, match=r"^triton/flash_mla is picked, and only cute-dsl versions can be called so"):
        mla_decode(q, cache, table, lens, kernel="triton/flash_mla")
    monkeypatch.setattr(Device, "detect", staticmethod(lambda index=0: None))
    with pytest.raises(UserError, match=r"^there is no GPU here"):
        mla_decode(q, cache, table, lens)
