"""Host side of CuTe versions: fake tensors to compile from, and a decode kernel made of a compiled host function."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Uint8
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_tensor

from mla_var3.device import Device
from mla_var3.errors import UserError
from mla_var3.kernel.cute_python.prims import paged
from mla_var3.kernel.cute_python.prims.partials import STATS, Partials
from mla_var3.kernel.cute_python.prims.rows import BLOCK
from mla_var3.runtime import CuteKernel
from mla_var3.runtime.plan import require_int32

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


def decode_kernel(
    plan: KernelPlan,
    kernel_fn: Any,
    host_fn: Any,
    name: str,
    constants: Sequence[Any],
    partials: Partials,
    inputs: Sequence[Any],
    requests: int,
    slots: int,
    workers: int,
    fixed: int,
) -> CuteKernel:
    """The kernel of an absorbed decode version whose host function takes

        q, kv_cache, page_table, seq_lens, out, lse, partial outputs, partial statistics, table of splits, flags, scale,
        workers, fixed, cu_seqlens_q, blocks of packed queries, mask, *constants, stream

    inputs: q (b, s, h, k + p), kv_cache (pages, page, h_kv, k + p), page_table (b, width) int32, seq_lens (b,) int32,
    contiguous, but for the pages of a `strided_pages` problem, whose stride is given at the call; without them the
    kernel only compiles. Of a packed problem q is (tokens, h, k + p), out and lse likewise, and cu_seqlens_q (b + 1,)
    int32 a fifth input; where the problem has a tree that is the mask, (b, s, s) uint8. What a problem lacks is None.
    requests: scheduled ones, blocks of packed queries. slots: of partial results. workers, fixed: of `scheduler.Pool`.
    """
    pd, kind = plan.problem, element_type(plan.problem.dtype)

    def arguments() -> tuple[Any, ...]:
        b, pages, width, partial_elements, partial_stats, entries, flags = symbols(7)
        rows, per_row = ((b, pd.s, pd.h), (b, pd.h, pd.s))
        cu_seqlens = blocks = mask = None
        if pd.packed:
            tokens, offsets, most = symbols(3)
            rows, per_row = (tokens, pd.h), (tokens, pd.h)
            cu_seqlens, blocks = fake(Int32, offsets, align=4), fake(Int32, most, BLOCK)
        if pd.tree:
            mask = fake(Uint8, b, pd.s, pd.s, align=1)
        return (
            fake(kind, *rows, pd.k + pd.p),
            fake_cache(kind, pages, pd.page_size, pd.h_kv, pd.k + pd.p, pd.strided_pages),
            fake(Int32, b, width, align=4),
            fake(Int32, b, align=4),
            fake(kind, *rows, pd.k),
            fake(Float32, *per_row, align=4),
            fake(Float16, partial_elements),
            fake(Float32, partial_stats),
            fake(Int32, entries),
            fake(Int32, flags, align=4),
            Float32(1.0),
            Int32(1),
            Int32(0),
            cu_seqlens,
            blocks,
            mask,
            *constants,
        )

    given: tuple[Any, ...] = ()
    outputs: tuple[Any, ...] = ()
    workspaces: tuple[Any, ...] = ()
    if inputs:
        import torch

        q, cache, page_table, seq_lens, *more = inputs
        require_int32(page_table=page_table, seq_lens=seq_lens)
        rows, per_row = slots * partials.tiles * partials.rows, (q.shape[0], pd.h, pd.s)
        optional: list[Any] = [None, None, None]
        if pd.packed:
            require_int32(cu_seqlens_q=more[0])
            per_row = (q.shape[0], pd.h)
            optional[:2] = more[0], q.new_empty((requests, BLOCK), dtype=torch.int32)
        if pd.tree:
            optional[2] = more[0]
        outputs = q.new_empty((*q.shape[:-1], pd.k)), q.new_empty(per_row, dtype=torch.float32)
        workspaces = (
            q.new_empty(rows * partials.columns, dtype=torch.float16),
            q.new_empty(rows * STATS, dtype=torch.float32),
            q.new_empty(2 * (requests + 1), dtype=torch.int32),
            q.new_zeros((requests + workers) * partials.tiles, dtype=torch.int32),
        )
        tensors = (q, cache, page_table, seq_lens, *outputs, *workspaces)
        given = (*tensors, pd.scale, workers, fixed, *optional)
    return stage(plan, kernel_fn, host_fn, name, arguments, given, inputs, outputs, workspaces)


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
    from mla_var3.toolchain.aot import compiled_host

    compile_fn = compiler(host_fn, arguments_fn, name)
    call = compiled_host(plan, name, compile_fn, device=target(plan)).handle if given else None
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


def launcher(call: Any, *arguments: Any, late: bool = False) -> Callable[[Any], None]:
    """`launch_fn` of a `CuteKernel` that calls a compiled host function with these arguments every time.

    A torch tensor costs 0.1 us of conversion at each call, so all but the first are converted here, once (they share
    memory and keep it alive), unless they are `late`: pointed at other memory between launches. The first stays
    torch's own: it is what makes TVM-FFI launch on torch's current stream.
    """
    if late:
        return lambda _: call(*arguments)
    import torch
    import tvm_ffi

    first = arguments[:1]
    ready = (*first, *(tvm_ffi.from_dlpack(x) if isinstance(x, torch.Tensor) else x for x in arguments[1:]))
    return lambda _: call(*ready)
