"""Host side of CuTe versions: fake tensors to compile from, kernels made of compiled host functions, their calls."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_tensor

from mla_var3.device import Device
from mla_var3.errors import UserError
from mla_var3.kernel.cute_python.prims import paged
from mla_var3.runtime import CuteKernel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mla_var3.runtime.plan import KernelPlan
    from mla_var3.toolchain.compiled import CompiledKernel

_ELEMENTS = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}


def element_type(dtype: str) -> type:
    """CuTe's type for a problem's dtype."""
    return _ELEMENTS[dtype]


def symbols(count: int) -> tuple[Any, ...]:
    """Sizes that are given at the call; a symbol used twice is one size."""
    return tuple(cute.sym_int32() for _ in range(count))


def fake(kind: type, *sizes: Any, align: int = 16) -> Any:
    """A contiguous tensor without memory: last size fastest, base address aligned to `align` bytes."""
    return make_fake_compact_tensor(kind, sizes, stride_order=tuple(reversed(range(len(sizes)))), assumed_align=align)


def fake_cache(kind: type, pages: Any, page: int, h_kv: int, width: int, strided: bool) -> Any:
    """A paged cache without memory: contiguous, or `strided`: but for the stride between pages, a multiple of 16
    bytes."""
    if not strided:
        return fake(kind, pages, page, h_kv, width, align=128)
    strides = (cute.sym_int64(divisibility=paged.CHUNK), h_kv * width, width, 1)
    return make_fake_tensor(kind, (pages, page, h_kv, width), strides, assumed_align=128)


def target(plan: KernelPlan) -> Device:
    """The device to compile for: the plan's, or the one that is here."""
    device = plan.device or Device.detect()
    if device is None:
        raise UserError("there is no GPU here to compile for: give the plan a device, such as Device.get('h200').")
    return device


def stage(
    plan: KernelPlan,
    kernel_fn: Any,
    host_fn: Any,
    name: str,
    arguments_fn: Callable[[], Sequence[Any]],
    given: Sequence[Any],
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    workspaces: Sequence[Any] = (),
) -> CuteKernel:
    """A kernel of the plan whose host function takes `given`; where that is empty, it only compiles.

    arguments_fn: gives the fake arguments to compile from (`compiler`). name: what compiled code is kept under.
    """
    compile_fn = compiler(host_fn, arguments_fn, name)
    call = compiled(plan, name, compile_fn) if given else None
    return CuteKernel(
        kernel_fn,
        launcher(call, *given, late=plan.late_tensors) if given else None,
        inputs,
        outputs,
        plan.tiling,
        compile_fn=compile_fn,
        name=name,
        workspace_tensors=workspaces,
        plan=plan,
    )


def compiler(host_fn: Any, arguments_fn: Callable[[], Sequence[Any]], name: str) -> Callable[..., CompiledKernel]:
    """`compile_fn` of a `CuteKernel`: compiles `host_fn` for a device from fake arguments (the stream is added)."""

    def compile_fn(_: Any, device: Device, out_dir: Path | None = None, keep: Sequence[str] = ()) -> CompiledKernel:
        from mla_var3.toolchain.cute import compile_cute, fake_stream

        arguments = (*arguments_fn(), fake_stream())
        return compile_cute(host_fn, arguments, device=device, out_dir=out_dir, keep=keep, name=name)

    return compile_fn


def compiled(plan: KernelPlan, name: str, compile_fn: Callable[..., CompiledKernel]) -> Any:
    """A plan's host function, from a cache or compiled now."""
    from mla_var3.toolchain.aot import compiled_host

    return compiled_host(plan, name, compile_fn, device=target(plan)).handle


def launcher(call: Any, *arguments: Any, late: bool = False) -> Callable[[Any], None]:
    """`launch_fn` of a `CuteKernel` that calls a compiled host function with these arguments every time. late: the
    tensors may be pointed at other memory between launches."""
    ready = arguments if late else converted(arguments)
    return lambda _: call(*ready)


def converted(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Arguments of a compiled host function, ready for many calls.

    A torch tensor costs 0.1 us of conversion at each call, so all but the first are converted here, once (they share
    memory and keep it alive). The first stays torch's own: it is what makes TVM-FFI launch on torch's current stream.
    """
    import torch
    import tvm_ffi

    rest = (tvm_ffi.from_dlpack(x) if isinstance(x, torch.Tensor) else x for x in arguments[1:])
    return (arguments[0], *rest)
