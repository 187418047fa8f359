"""`mla_decode` for JAX on a GPU gives the bits of the function of torch."""

from __future__ import annotations

import os
from typing import Any

import pytest

torch = pytest.importorskip("torch")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch wants memory too
jax = pytest.importorskip("jax", reason="the extra 'jax' is not installed")
pytest.importorskip("jax_tvm_ffi", reason="the extra 'jax' is not installed")

import jax.numpy as jnp  # noqa: E402
from ops_gpu import JAX as PROBLEMS  # noqa: E402
from ops_gpu import compile_ahead, decode, same_bits  # noqa: E402

from mla_var3.ops.jax import mla_decode  # noqa: E402
from mla_var3.workload.decode import MlaProblem, fifth_input, make_inputs  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    if not any(device.platform == "gpu" for device in jax.devices()):
        pytest.skip("JAX sees no GPU")
    compile_ahead(PROBLEMS)


def call_of(given: Any) -> tuple[list[Any], dict[str, Any]]:
    """JAX's arrays on the memory of torch's tensors."""
    fifth = dict(zip(fifth_input(*given), map(jnp.from_dlpack, given[4:]), strict=True))
    if "mask" in fifth:
        fifth["mask"] = fifth["mask"].astype(bool)
    return [jnp.from_dlpack(x) for x in given[:4]], fifth


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.label)
def test_the_bits_of_the_function_of_torch(problem: MlaProblem) -> None:
    """Traced once, for tensors of four seeds; in a larger function, and by itself."""

    @jax.jit
    def step(q: Any, *rest: Any, **fifth: Any) -> Any:
        out, lse = mla_decode(-q, *rest, causal=problem.causal, return_lse=True, **fifth)
        return out, 2 * lse

    for seed in range(4):
        given = make_inputs(problem, "cuda", seed=seed)
        wanted = decode(problem, (-given[0], *given[1:]))
        torch.cuda.synchronize()
        arrays, fifth = call_of(given)
        out, lse = (torch.from_dlpack(x.block_until_ready()) for x in step(*arrays, **fifth))
        assert same_bits(out, wanted[0]) and same_bits(lse, 2 * wanted[1])
    alone = mla_decode(-arrays[0], *arrays[1:], causal=problem.causal, **fifth)
    assert same_bits(torch.from_dlpack(alone.block_until_ready()), wanted[0])


@pytest.mark.parametrize("scale", [0.0, -0.25])
def test_a_scale_of_zero_and_below(scale: float) -> None:
    given = make_inputs(PROBLEMS[0], "cuda", seed=5, dist="normal")
    wanted = decode(PROBLEMS[0], given, scale=scale)
    torch.cuda.synchronize()
    arrays, _ = call_of(given)
    found = mla_decode(*arrays, scale=scale, return_lse=True)
    out, lse = (torch.from_dlpack(x.block_until_ready()) for x in found)
    assert same_bits(out, wanted[0]) and same_bits(lse, wanted[1]) and not bool(lse[0].isnan().any())


def test_calls_of_one_program_follow_each_other() -> None:
    """The second call reads what the first wrote, and both use workspaces of XLA's."""
    problem = PROBLEMS[0]
    given = make_inputs(problem, "cuda", seed=9)
    rope = given[0][..., 512:]
    first = decode(problem, given)[0]
    wanted = decode(problem, (torch.cat([first, rope], dim=-1), *given[1:]))[0]
    torch.cuda.synchronize()

    @jax.jit
    def twice(q: Any, *rest: Any) -> Any:
        return mla_decode(jnp.concatenate([mla_decode(q, *rest), q[..., 512:]], axis=-1), *rest)

    found = twice(*(jnp.from_dlpack(x) for x in given)).block_until_ready()
    assert same_bits(torch.from_dlpack(found), wanted)
