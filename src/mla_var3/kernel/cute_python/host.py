"""Host side of CuTe versions: fake tensors to compile from, and a decode kernel made of a compiled host function."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint8
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_tensor

from mla_var3.device import Device
from mla_var3.errors import UserError, Verdict
from mla_var3.kernel.cute_python.prims import paged
from mla_var3.kernel.cute_python.split_kv import rows, scheduler
from mla_var3.kernel.cute_python.split_kv.launch import Version, launch_decode
from mla_var3.kernel.cute_python.split_kv.partials import Partials
from mla_var3.runtime import CuteKernel, limits
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


def schedule_sizes(
    requests: int, tokens: int, workers: int, fixed: int, partials: Partials, costs: scheduler.Costs
) -> Verdict:
    """Whether 32 bits count what the scheduler does and the workspace of partials. requests: scheduled ones, blocks
    of packed queries. tokens: that the page table, or the indices, of a request have room for. fixed: of
    `scheduler.Pool`, in KV tiles."""
    units = -(-tokens // costs.tokens)
    slots = scheduler.most_slots(requests, workers, units, fixed)
    words = slots * partials.tiles * partials.rows * partials.row_words
    if fixed and words > limits.MOST:
        return Verdict.no(
            f"fixed_split: splits of {fixed * costs.tokens:,} tokens, of {requests:,} requests with room for "
            f"{tokens:,} tokens in page_table, take a workspace of {words:,} float32, and 32 bits count "
            f"{limits.MOST:,}: take longer splits, fewer columns of page_table, or fewer requests in a call"
        )
    # The scheduler rounds the points of the line up to a multiple of the workers, and its model adds a split's overhead
    # and a merge, a tree of two levels at most, to the tiles of one worker.
    points = requests * (units + costs.overhead)
    added = workers + costs.overhead + max(costs.combine, costs.listed, 2 * costs.level)
    return limits.all_of(
        limits.offsets(words, f"the partial results of {requests:,} requests and {workers:,} workers"),
        limits.offsets(points + added, f"the KV tiles of {requests:,} requests"),
    )


class DecodeKernel(CuteKernel):
    """A decode kernel whose calls over the same lengths may share a schedule.

    schedule: int32 words, which such a call writes or reads. mode: of a launch, `scheduler.OWN`, `MADE` or `SHARED`.
    launch_fn takes the mode where other kernels' takes the tiling.
    """

    def __init__(self, *arguments: Any, schedule: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.schedule = schedule
        self.mode = scheduler.OWN

    def launch(self) -> None:
        self.launch_fn(self.mode)

    def sharing(self) -> DecodeKernel:
        self.launch_fn(scheduler.MADE)
        other = copy.copy(self)
        other.mode = scheduler.SHARED
        return other

    def launch_with(self, words: Any, made: bool) -> None:
        """A launch that reads a schedule from `words` (int32, as many as `schedule`) if one was made there by a launch
        for the same shapes and lengths, else makes it there first. For plans with `late_tensors`."""
        own = self.schedule.data
        self.schedule.data = words
        try:
            self.launch_fn(scheduler.SHARED if made else scheduler.MADE)
        finally:
            self.schedule.data = own

    @property
    def with_schedule(self) -> Callable[[], Any] | None:
        return None if self.mode == scheduler.OWN else lambda: self.launch_fn(scheduler.OWN)


class Workspaces(NamedTuple):
    """What a kernel that splits sequences needs besides inputs and outputs. partials: float32 words (`Partials.views`).
    flags: int32, one for each slot and query tile, 0. schedule: int32 words (`scheduler.schedule_in`)."""

    partials: Any
    flags: Any
    schedule: Any


def workspaces(
    like: Any, partials: Partials, requests: int, workers: int, slots: int | None = None, packed: bool = False
) -> Workspaces:
    """Workspaces on the device of the tensor `like`. requests: scheduled ones, blocks of packed queries. slots: of
    partials; None: as many as an even line has."""
    import torch

    most = requests + workers
    rows_of_all = (most if slots is None else slots) * partials.tiles * partials.rows
    return Workspaces(
        like.new_empty(rows_of_all * partials.row_words, dtype=torch.float32),
        like.new_zeros(most * partials.tiles, dtype=torch.int32),
        like.new_empty(scheduler.schedule_words(requests, workers, packed), dtype=torch.int32),
    )


def fake_workspaces() -> Workspaces:
    """`Workspaces` without memory."""
    partial_words, words, flags = symbols(3)
    return Workspaces(fake(Float32, partial_words), fake(Int32, flags, align=4), fake(Int32, words))


def decode_kernel(
    plan: KernelPlan, name: str, version: Version, inputs: Sequence[Any], workers: int, fixed: int
) -> DecodeKernel:
    """The kernel of an absorbed decode version, made and launched by `split_kv.launch.launch_decode`.

    name: what compiled code is kept under. inputs: q (b, s, h, k + p), kv_cache (pages, page, h_kv, k + p), page_table
    (b, width) int32, seq_lens (b,) int32, contiguous, but for the pages of a `strided_pages` problem, whose stride is
    given at the call; without them the kernel only compiles. Of a packed problem q is (tokens, h, k + p), out and lse
    likewise, and cu_seqlens_q (b + 1,) int32 a fifth input; where the problem has a tree that is the mask, (b, s, s)
    uint8; of others it is None. workers, fixed: of `scheduler.Pool`.
    """
    pd, kind, geometry = plan.problem, element_type(plan.problem.dtype), version.geometry

    def arguments() -> tuple[Any, ...]:
        b, pages, width = symbols(3)
        rows_of_all, per_row, fifth = (b, pd.s, pd.h), (b, pd.h, pd.s), None
        spaces = fake_workspaces()
        if pd.packed:
            tokens, offsets = symbols(2)
            rows_of_all, per_row = (tokens, pd.h), (tokens, pd.h)
            fifth = fake(Int32, offsets, align=4)
        if pd.tree:
            fifth = fake(Uint8, b, pd.s, pd.s, align=1)
        return (
            fake(kind, *rows_of_all, pd.k + pd.p),
            fake_cache(kind, pages, pd.page_size, pd.h_kv, pd.k + pd.p, pd.strided_pages),
            fake(Int32, b, width, align=4),
            fake(Int32, b, align=4),
            fifth,
            fake(kind, *rows_of_all, pd.k),
            fake(Float32, *per_row, align=4),
            *spaces,
            Float32(1.0),
            Int32(1),
            Int32(0),
            Int32(0),
            version,
        )

    compile_fn = compiler(launch_decode, arguments, name)
    if not inputs:
        return DecodeKernel(
            version.kernel, None, (), (), plan.tiling, compile_fn=compile_fn, name=name, plan=plan, schedule=None
        )
    import torch

    q, cache, page_table, seq_lens, *more = inputs
    require_int32(page_table=page_table, seq_lens=seq_lens)
    requests, width = page_table.shape
    per_row = (q.shape[0], pd.h, pd.s)
    if pd.packed:
        require_int32(cu_seqlens_q=more[0])
        per_row = (q.shape[0], pd.h)
        requests = rows.most_blocks(len(q), requests, geometry.s)
    slots = scheduler.most_slots(requests, workers, -(-width * pd.page_size // geometry.costs.tokens), fixed)
    outputs = q.new_empty((*q.shape[:-1], pd.k)), q.new_empty(per_row, dtype=torch.float32)
    spaces = workspaces(q, geometry.partials, requests, workers, slots, pd.packed)
    given = (q, cache, page_table, seq_lens, more[0] if more else None, *outputs, *spaces, pd.scale, workers, fixed)
    call = compiled(plan, name, compile_fn)
    ready = given if plan.late_tensors else converted(given)
    return DecodeKernel(
        version.kernel,
        lambda mode: call(*ready, mode),
        inputs,
        outputs,
        plan.tiling,
        compile_fn=compile_fn,
        name=name,
        workspace_tensors=spaces,
        plan=plan,
        schedule=spaces.schedule,
    )


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
