"""Host side of versions that split sequences: sizes, workspaces, a decode kernel whose calls may share a schedule."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint8
from cutlass.cute.runtime import make_fake_tensor

from mla_var3.errors import Verdict
from mla_var3.kernel.cute_python import host
from mla_var3.kernel.cute_python.split_kv import rows, scheduler
from mla_var3.kernel.cute_python.split_kv.launch import Version, launch_decode
from mla_var3.kernel.cute_python.split_kv.partials import Partials
from mla_var3.runtime import CuteKernel, limits
from mla_var3.runtime.plan import require_int32
from mla_var3.workload import decode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mla_var3.runtime.plan import KernelPlan


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
    partial_words, words, flags = host.symbols(3)
    return Workspaces(host.fake(Float32, partial_words), host.fake(Int32, flags, align=4), host.fake(Int32, words))


def fake_apart(kind: Any, *sizes: Any, align: int = 16, columns: bool = True) -> Any:
    """A tensor without memory whose strides are given at the call, multiples of `align` bytes. columns: but for the
    last one, whose elements lie side by side."""
    step = 8 * align // kind.width
    strides = [cute.sym_int64(divisibility=step) for _ in sizes[columns:]] + [1] * columns
    return make_fake_tensor(kind, sizes, tuple(strides), assumed_align=align)


def fake_results(kind: Any, out: Sequence[Any], lse: Sequence[Any], strided: bool) -> tuple[Any, Any]:
    """out, whose columns are contiguous, and lse without memory, of these shapes. strided: with any strides."""
    if strided:
        return fake_apart(kind, *out), fake_apart(Float32, *lse, align=4, columns=False)
    return host.fake(kind, *out), host.fake(Float32, *lse, align=4)


def decode_kernel(
    plan: KernelPlan, name: str, version: Version, inputs: Sequence[Any], workers: int, fixed: int
) -> DecodeKernel:
    """The kernel of an absorbed decode version, made and launched by `split_kv.launch.launch_decode`.

    name: what compiled code is kept under. inputs: q (b, s, h, k + p), kv_cache (pages, page, h_kv, k + p), page_table
    (b, width) int32, seq_lens (b,) int32; without them the kernel only compiles. They are contiguous, but for the pages
    of a `strided_pages` problem, and q and page_table of a `strided` one, whose strides are given at the call; so are
    those of out and lse of a `strided_out` problem. Of a packed problem q is (tokens, h, k + p), out and lse
    likewise, and cu_seqlens_q (b + 1,) int32 a fifth input; where the problem has a tree that is the mask, (b, s, s)
    uint8; of others it is None. workers, fixed: of `scheduler.Pool`.
    """
    pd, kind, geometry = plan.problem, host.element_type(plan.problem.dtype), version.geometry

    def arguments() -> tuple[Any, ...]:
        b, pages, width = host.symbols(3)
        rows_of_all, per_row, fifth = (b, pd.s, pd.h), (b, pd.h, pd.s), None
        spaces = fake_workspaces()
        if pd.packed:
            tokens, offsets = host.symbols(2)
            rows_of_all, per_row = (tokens, pd.h), (tokens, pd.h)
            fifth = host.fake(Int32, offsets, align=4)
        if pd.tree:
            fifth = host.fake(Uint8, b, pd.s, pd.s, align=1)
        given_as = fake_apart if pd.strided else host.fake
        return (
            given_as(kind, *rows_of_all, pd.k + pd.p),
            host.fake_cache(kind, pages, pd.page_size, pd.h_kv, pd.k + pd.p, pd.strided_pages),
            given_as(Int32, b, width, align=4),
            host.fake(Int32, b, align=4),
            fifth,
            *fake_results(kind, (*rows_of_all, pd.k), per_row, pd.strided_out),
            *spaces,
            Float32(1.0),
            Int32(1),
            Int32(0),
            Int32(0),
            version,
        )

    compile_fn = host.compiler(launch_decode, arguments, name)
    if not inputs:
        return DecodeKernel(
            version.kernel, None, (), (), plan.tiling, compile_fn=compile_fn, name=name, plan=plan, schedule=None
        )
    q, cache, page_table, seq_lens, *more = inputs
    require_int32(page_table=page_table, seq_lens=seq_lens)
    requests, width = page_table.shape
    if pd.packed:
        require_int32(cu_seqlens_q=more[0])
        requests = rows.most_blocks(len(q), requests, geometry.s)
    slots = scheduler.most_slots(requests, workers, -(-width * pd.page_size // geometry.costs.tokens), fixed)
    outputs = decode.new_outputs(pd, q)
    spaces = workspaces(q, geometry.partials, requests, workers, slots, pd.packed)
    given = (q, cache, page_table, seq_lens, more[0] if more else None, *outputs, *spaces, pd.scale, workers, fixed)
    call = host.compiled(plan, name, compile_fn)
    ready = given if plan.late_tensors else host.converted(given)
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
