"""`mla_decode` for JAX: the compiled kernel that the function of torch runs, as a call of XLA's.

    from mla_var3.ops.jax import mla_decode
    out = jax.jit(mla_decode)(q, kv_cache, page_table, seq_lens)

While JAX traces, the version is picked from the shapes, compiled or loaded as for torch (cache, bundles), and given to
XLA through TVM-FFI (jax-tvm-ffi); when XLA runs, it launches on XLA's stream and on XLA's memory, workspaces among it.
torch plans, on tensors without memory, and computes nothing. CuTe's versions can be called so, which are for Hopper.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mla_var3.device import Device
from mla_var3.errors import UserError, absent
from mla_var3.ops.calls import Buffer, Call, call_of
from mla_var3.ops.decode import LATENT
from mla_var3.ops.request import bounds_of, problem_of
from mla_var3.ops.ways import way_for
from mla_var3.runtime.scaling import sign_of

if TYPE_CHECKING:
    import jax

    from mla_var3.workload.decode import MlaProblem

PLATFORM = "gpu"

_names = (f"mla_var3.mla_decode.{number}" for number in itertools.count())


def mla_decode(
    q: jax.Array,
    kv_cache: jax.Array,
    page_table: jax.Array,
    seq_lens: jax.Array,
    *,
    scale: float | None = None,
    causal: bool = False,
    cu_seqlens_q: jax.Array | None = None,
    mask: jax.Array | None = None,
    head_dim_v: int = LATENT,
    return_lse: bool = False,
    fixed_split: int | None = None,
    kernel: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of q over each request's cached tokens, in latent space: `mla_var3.ops.mla_decode` with its arguments,
    shapes and results, on JAX's arrays.

    Arrays may be traced; what is no array is static. Has no gradient and no batching rule. Raises `UserError` in one
    sentence for arguments, a device or a problem that no version takes, and where jax or jax-tvm-ffi is missing.
    """
    needed()
    import jax
    import jax.numpy as jnp

    given = {"q": q, "kv_cache": kv_cache, "page_table": page_table, "seq_lens": seq_lens}
    optional = {name: x for name, x in (("cu_seqlens_q", cu_seqlens_q), ("mask", mask)) if x is not None}
    like = {name: _without_memory(name, x) for name, x in (given | optional).items()}
    problem = problem_of(**like, head_dim_v=head_dim_v, scale=scale, causal=causal)
    if (sign := sign_of(problem.scale)) < 1:  # as `runtime.scaling` does it for torch
        q, problem = q * sign, problem.replace(softmax_scale=-problem.scale if sign else 1.0)
    *tokens, h, _ = q.shape
    if not q.shape[0] or not seq_lens.shape[0]:
        both = jnp.zeros((*tokens, h, head_dim_v), q.dtype), jnp.zeros((tokens[0], h, *tokens[1:]), jnp.float32)
        return both if return_lse else both[0]
    target = _target(problem, Device.detect(), fixed_split, kernel)
    arrays = [q, kv_cache if kv_cache.ndim == 4 else kv_cache[:, :, None], page_table, seq_lens, *optional.values()]
    bounds = bounds_of(problem)
    arrays = [
        # As `request.narrowed`: no value stands for another.
        jnp.clip(x, *bounds[name]).astype(buffer.dtype) if x.dtype == jnp.int64 else x.astype(buffer.dtype)
        for name, x, buffer in zip(given | optional, arrays, target.call.inputs, strict=True)
    ]
    zeros = [jnp.zeros(buffer.shape, buffer.dtype) for buffer in target.zeroed]
    results = [jax.ShapeDtypeStruct(buffer.shape, buffer.dtype) for buffer in target.results]
    aliases = {len(arrays) + i: target.results.index(buffer) for i, buffer in enumerate(target.zeroed)}
    out, lse, *_ = jax.ffi.ffi_call(target.name, results, input_output_aliases=aliases)(*arrays, *zeros)
    return (out, lse) if return_lse else out


def needed() -> None:
    """Raises `UserError` where jax or jax-tvm-ffi is missing."""
    try:
        import jax
        import jax_tvm_ffi
    except ModuleNotFoundError as error:
        sentence = absent("mla_var3.ops.jax", error.name or "")
        if sentence is None:
            raise
        raise UserError(sentence) from error
    del jax, jax_tvm_ffi


def _without_memory(name: str, array: Any) -> Any:
    """A tensor of torch's with an array's shape and dtype."""
    import torch

    try:
        shape, dtype = tuple(map(int, array.shape)), str(array.dtype)
    except (AttributeError, TypeError):
        raise UserError(f"{name} is a {type(array).__name__}: pass a JAX array of a shape that is known.") from None
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise UserError(f"{name} is {dtype}, which torch, whose arguments these are, does not have.")
    return torch.empty(shape, dtype=kind, device="meta")


@dataclass(frozen=True)
class _Target:
    """A call that XLA knows by name. XLA passes inputs and `zeroed`, then `results`; those of `zeroed` are the same
    memory among both."""

    name: str
    call: Call

    @property
    def zeroed(self) -> tuple[Buffer, ...]:
        return tuple(buffer for buffer in self.call.workspaces if buffer.zeroed)

    @property
    def results(self) -> tuple[Buffer, ...]:
        return (*self.call.outputs, *self.call.workspaces)

    def run(self, *tensors: Any) -> None:
        """What XLA calls with its memory, while its stream is TVM-FFI's."""
        passed = (*self.call.inputs, *(None for _ in self.zeroed), *self.results)
        memory = {buffer: tensor for buffer, tensor in zip(passed, tensors, strict=True) if buffer is not None}
        for step in self.call.steps:
            step.compiled.handle(*(memory[x] if isinstance(x, Buffer) else x for x in step.arguments))


@functools.cache
def _target(problem: MlaProblem, device: Device | None, fixed_split: int | None, kernel: str | None) -> _Target:
    """Registered once for a problem, which holds all shapes but the number of pages of the cache."""
    import jax_tvm_ffi
    import tvm_ffi

    way = way_for(problem, device, fixed_split=fixed_split, kernel=kernel)
    assert device is not None
    target = _Target(next(_names), call_of(way, problem, device))
    jax_tvm_ffi.register_ffi_target(
        target.name, tvm_ffi.convert(target.run), ["args", "rets"], platform=PLATFORM, pass_owned_tensor=True
    )
    return target
