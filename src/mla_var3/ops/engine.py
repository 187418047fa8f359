"""Bound kernels that are kept and called again with other tensors of the same shapes.

Planning a kernel allocates its workspaces and looks up compiled code: a tenth of a millisecond. So a kernel is planned
once for its shapes, device and stream, on tensors that belong to the engine; before each launch these are pointed at
the caller's memory (`tensor.data = other`, a third of a microsecond each), and afterwards away from it, so that the
engine keeps no caller's memory alive. A plan with `late_tensors` reads addresses when it launches; a
kernel that keeps views of its tensors (cuTile's handles) is bound anew in each call.

A call that was judged once can be remembered (`Engine.remembered`): its function keeps a signature, which holds all
that the compiled code and the choice of a version depend on, and what launches the planned kernel on other tensors.
Such a call looks its signature up and launches: the compiled function compares shapes, dtypes, strides, addresses and
devices with what it was made for before it launches, so they need not be judged on the way there.

Streams: a kernel's workspaces are used by one stream only, so calls on several streams do not meet. While a stream is
captured, workspaces come from the graph's own memory and are kept for that capture alone; replays of a graph use them
whenever they run. Two calls on one stream are in order anyway.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from mla_var3.device import Device
from mla_var3.errors import Infeasible, Unsupported, UserError
from mla_var3.ops.captured import notes
from mla_var3.toolchain.aot import CompileCache
from mla_var3.toolchain.compiled import CompiledKernel

if TYPE_CHECKING:
    import torch

    from mla_var3.runtime.base import BaseKernel
    from mla_var3.runtime.plan import KernelPlan
    from mla_var3.workload import Problem

MOST_KERNELS = 64
MOST_SIGNATURES = 4096  # of remembered calls
MOST_BYTES = 2 << 30  # of workspaces, over all kernels
MOST_SPARE = 1 << 24  # bytes of a kernel's memory for outputs that nobody asked for
#: Bytes of workspaces of a kernel that serves any sizes: counters, and partials as far as there is room for them, but
#: nothing that grows with a problem.
MOST_OF_ANY_SIZE = 1 << 25


@runtime_checkable
class Scheduled(Protocol):
    """A kernel whose calls may share a schedule: `schedule` is the one of its own."""

    schedule: torch.Tensor

    def launch_with(self, words: torch.Tensor, made: bool) -> None: ...


@dataclass(frozen=True)
class Way:
    """How a problem is computed. make(problem, device): the plan; equal keys for equal code and knobs. any_size: a
    kernel serves all problems of its class, scale and device, as of `KernelPlan.any_size`."""

    key: Any
    make: Callable[[Any, Device | None], KernelPlan] = field(compare=False)
    any_size: bool = False


@dataclass
class DecodeSchedule:
    """How the work of a batch is dealt to multiprocessors, for calls of `mla_decode` over the same lengths and shapes:
    the layers of a model in one step. The first call that is given a fresh one makes it on the device, by a small
    kernel ahead of the attention; the others read it, and launch no such kernel.

    Get a fresh one whenever lengths change: calls do not see that what they read belongs to others. In a CUDA graph it
    is made anew by every replay if the call that makes it is captured with those that read it. One stream.
    """

    words: torch.Tensor | None = None
    key: Any = None
    counted: Any = None  # of the lengths, by `mla_decode_cp`


class Noted(CompileCache):
    """Compiled functions that can note how they are called in place of computing (`noting`)."""

    def __setitem__(self, key: Any, compiled: Any) -> None:
        if isinstance(compiled, CompiledKernel):  # else the cache of a version that the plan's own is made of
            compiled = replace(compiled, handle=functools.partial(_called, compiled))
        super().__setitem__(key, compiled)


Noticed = list[tuple[CompiledKernel, tuple[Any, ...]]]  # compiled functions with their arguments, in order
_noting = threading.local()  # calls: what this thread notes, where it does


@contextmanager
def noting() -> Iterator[Noticed]:
    """In it, functions of a `Noted` cache that this thread calls compute nothing and are appended to what it gives."""
    _noting.calls = calls = list[Any]()
    try:
        yield calls
    finally:
        _noting.calls = None


def _called(compiled: CompiledKernel, *arguments: Any) -> None:
    calls = getattr(_noting, "calls", None)
    if calls is None:
        compiled.handle(*arguments)
    else:
        calls.append((compiled, arguments))


@dataclass
class Remembered:
    """A launch that calls of one signature share: handle(*inputs, *outputs, *rest), on the stream of the signature.
    facts: what the function that remembers it wants to know again. Of calls with equal shapes, n query tokens
    of h heads and values of dv columns, also new_out and new_lse, functions that make out (n, h, dv) in q's dtype and
    lse (h, n) float32, and spare (h, n) float32: memory for an lse that nobody asked for; None: it is too large."""

    handle: Callable[..., Any]
    rest: tuple[Any, ...]
    facts: Any
    bound: Bound
    new_out: Any = None
    new_lse: Any = None
    spare: torch.Tensor | None = None


@dataclass
class Bound:
    """A kernel on the engine's own tensors; `lock` is held while they are pointed at a caller's."""

    kernel: BaseKernel
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]
    blanks: tuple[torch.Tensor, ...]
    follows: bool
    bytes: int
    scheduled: Scheduled | None = None  # the kernel, where its calls may share a schedule
    direct: tuple[Callable[..., Any], tuple[Any, ...]] | None = None  # as of `direct_launch`
    recent: bool = True  # launched by a remembered call, or made, since it was last looked at
    spare: torch.Tensor | None = None  # memory that launches may write and nobody reads
    lock: threading.Lock = field(default_factory=threading.Lock)

    def launch(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], schedule: DecodeSchedule | None = None
    ) -> None:
        """One launch on the current stream that reads `inputs` and writes `outputs`. schedule: of the calls that share
        one; versions without a schedule leave it alone."""
        if not self.follows:
            plan: Any = self.kernel.plan
            if hasattr(plan, "plan_into"):  # what it leaves as it is, a cache's other rows, must be the caller's
                plan.plan_into(inputs, outputs)()
                return
            made = self.kernel.bind(*inputs)()
            for target, value in zip(outputs, made, strict=True):
                target.copy_(value)
            return
        own = (*self.inputs, *self.outputs)
        with self.lock:
            for mine, theirs in zip(own, (*inputs, *outputs), strict=True):
                mine.data = theirs
            try:
                if schedule is not None and self.scheduled is not None:
                    is_there = schedule.words is not None
                    if schedule.words is None:
                        schedule.words = self.scheduled.schedule.new_empty(self.scheduled.schedule.shape)
                    self.scheduled.launch_with(schedule.words, is_there)
                else:
                    self.kernel.launch()
            finally:
                for mine, blank in zip(own, self.blanks, strict=True):
                    mine.data = blank

    def spare_words(self, count: int) -> torch.Tensor | None:
        """So many float32 that every launch may write and nobody reads; None: more than are kept."""
        import torch

        if self.spare is None or self.spare.numel() < count:
            size = 1 << max(count - 1, 0).bit_length()
            if 4 * size > MOST_SPARE:
                return None
            self.spare = torch.empty(size, dtype=torch.float32, device=self.blanks[0].device)
        return self.spare[:count]


class Engine:
    """Planned kernels with their workspaces, by shape and stream. One for the process is enough (`engine()`), and the
    argument `on` of a function names another; several threads may call it. most_kernels, most_bytes: how many are kept,
    and bytes of their workspaces; those that were used longest ago go first."""

    def __init__(self, most_kernels: int = MOST_KERNELS, most_bytes: int = MOST_BYTES) -> None:
        self.most_kernels = most_kernels
        self.most_bytes = most_bytes
        self._kept: OrderedDict[Any, Bound] = OrderedDict()
        self._captured: tuple[int, dict[Any, Bound]] = (0, {})
        self._warm: set[Any] = set()
        self._remembered: dict[Any, Remembered] = {}
        self._compiled: dict[Any, CompileCache] = {}
        self._lock = threading.Lock()

    # ------------------------------------------------------------ what the device says; replaced in tests
    def stream(self, device: torch.device) -> int:
        """A number for the current stream of a device."""
        import torch

        return int(torch.cuda.current_stream(device).cuda_stream)

    def capture(self, stream: int) -> int | None:
        """None when no graph is being captured, else a number for the capture (0: unknown which)."""
        import torch

        if not torch.cuda.is_current_stream_capturing():
            return None
        return capture_id(stream)

    def plain_stream(self, index: int) -> int | None:
        """The number of a device's current stream, where a launch needs no more: the device is the current one, and
        nothing is being captured. Else None."""
        cuda = _bindings()
        if cuda._cuda_getDevice() != index:
            return None
        stream: int = cuda._cuda_getCurrentRawStream(index)
        # CUDA refuses to capture its default stream, which is 0.
        return None if stream and cuda._cuda_isCurrentStreamCapturing() else stream

    def on(self, device: torch.device) -> AbstractContextManager[Any]:
        """Makes a device the current one."""
        import torch

        return nullcontext() if torch.cuda.current_device() == device.index else torch.cuda.device(device)

    def hardware(self, device: torch.device) -> Device | None:
        return _detect(device.index)

    def require_here(self, tensor: torch.Tensor, name: str, function: str) -> None:
        """Raises `UserError` for an argument of a function that is not on a GPU."""
        if tensor.device.type != "cuda":
            raise UserError(
                f"{name} is on {tensor.device}: {function} runs on an NVIDIA GPU, so put the tensors on one."
            )

    # ------------------------------------------------------------ calling
    def run(
        self,
        way: Way,
        problem: Problem,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        schedule: DecodeSchedule | None = None,
        remember: tuple[Any, Any] | None = None,
    ) -> None:
        """Computes a problem on the inputs of its workload into its outputs. A problem of decode says which of its
        tensors have strides (`strided`, `strided_out`), which kernels are given at each launch, and a kernel serves
        caches of `strided_pages` as far apart as its own; of others a kernel serves calls with the same strides and
        shapes.

        remember: (signature, facts) of the call, for `remembered` to find. It is kept where the kernel of the way
        serves any sizes, is one compiled function on the inputs and outputs as they are, and no graph is captured.

        schedule: for calls that share one. Never waits for the device. The first call for a way and shapes plans, and
        compiles what is in no cache. Raises `UserError` when that would happen in a capture, and for a schedule that
        was made for other shapes.
        """
        device = inputs[0].device
        with self.on(device):
            stream = self.stream(device)
            # A problem of decode holds all shapes but the number of pages of the cache, which is no part of any plan.
            key: tuple[Any, ...] = (way.key, problem, device.index)
            # What is planned may depend on strides, and of a cache under indices on the tokens that it has.
            if way.any_size:
                key = (way.key, problem.problem_class(), getattr(problem, "scale", None), device.index)
            elif problem.workload != "decode":
                key = (*key, *((x.shape, x.stride()) for x in (*inputs, *outputs)))
            elif not inputs[1].is_contiguous():
                key = (*key, inputs[1].stride(0))
            if schedule is not None:
                if schedule.key not in (None, key):
                    raise UserError(
                        "schedule was made for other shapes: give calls of each shape a fresh DecodeSchedule()."
                    )
                schedule.key = key
            capture = self.capture(stream)
            if (written := notes()) is not None:
                written.note(problem, inputs, capture is not None)
                remember = None  # so that every call comes here
            bound = self._find(key, stream, capture)
            if bound is None:
                bound = self._plan(way, problem, inputs, key)
                self._keep(key, stream, capture, bound)
            bound.launch(inputs, outputs, schedule)
            self._warm.add(key)
            if remember is not None and bound.direct is not None and capture is None:
                signature, facts = remember
                with self._lock:
                    # What was dropped meanwhile must not stay.
                    if self._kept.get((key, stream)) is bound:
                        made = Remembered(*bound.direct, facts, bound)
                        self._remembered[signature, inputs[0].get_device(), stream] = made

    def remembered(self, signature: Any, index: int) -> Remembered | None:
        """What an earlier call of this signature kept for the current stream of a device; None where there is none, the
        device is not the current one, or a graph is being captured, which has workspaces of its own."""
        found = self._remembered.get((signature, index, self.plain_stream(index)))  # None is no stream
        if found is not None:
            found.bound.recent = True
        return found

    def remember(self, signature: Any, index: int, found: Remembered) -> None:
        """Lets `remembered` find what it gave for the current stream under another signature, too."""
        stream = self.plain_stream(index)
        with self._lock:
            if len(self._remembered) >= MOST_SIGNATURES:
                self._remembered.clear()
            if any(bound is found.bound for bound in self._kept.values()):  # else it was dropped meanwhile
                self._remembered[signature, index, stream] = found

    def _find(self, key: Any, stream: int, capture: int | None) -> Bound | None:
        with self._lock:
            if capture is None:
                bound = self._kept.get((key, stream))
                if bound is not None:
                    self._kept.move_to_end((key, stream))
                return bound
            if key not in self._warm:
                raise UserError(
                    "a graph is being captured and these shapes were not computed before: call once before the "
                    "capture, with the same shapes, so that the kernel is compiled and loaded."
                )
            return self._captured[1].get((key, stream)) if capture and self._captured[0] == capture else None

    def _keep(self, key: Any, stream: int, capture: int | None, bound: Bound) -> None:
        with self._lock:
            if capture is not None:
                if not capture:
                    return  # which capture it is cannot be told: the kernel serves this call alone
                if self._captured[0] != capture:
                    self._captured = (capture, {})
                self._captured[1][key, stream] = bound
                return
            self._kept[key, stream] = bound
            while len(self._kept) > 1 and (
                len(self._kept) > self.most_kernels or sum(b.bytes for b in self._kept.values()) > self.most_bytes
            ):
                oldest, other = self._kept.popitem(last=False)
                if other.recent:  # remembered calls do not move it to the end, so that it gets a second round
                    other.recent = False
                    self._kept[oldest] = other
                    continue
                for signature in [x for x, found in self._remembered.items() if found.bound is other]:
                    del self._remembered[signature]

    def _plan(self, way: Way, problem: Problem, inputs: Sequence[torch.Tensor], key: Any) -> Bound:
        import torch

        hardware = self.hardware(inputs[0].device)
        plan = way.make(problem, hardware)
        plan.supported().require(Unsupported)  # a version that the caller named
        plan.feasible().require(Infeasible)  # sizes that it has no room for: fixed_split picks by the class
        arch = None if hardware is None else hardware.arch
        with self._lock:
            cache = Noted() if way.any_size else CompileCache()
            plan.compiled = self._compiled.setdefault((way.key, plan.code_class(problem), arch), cache)
        plan.late_tensors = True
        # Tensors made in inference mode could not be pointed elsewhere outside of it.
        with torch.inference_mode(False), torch.no_grad():
            own = tuple(holder(x) for x in inputs)
            kernel = plan.plan(*own)
        outputs = tuple(kernel.output_tensors)
        blanks = tuple(x.new_empty(0) for x in (*own, *outputs))
        size = sum(x.numel() * x.element_size() for x in kernel.workspace_tensors)
        if way.any_size and size > MOST_OF_ANY_SIZE:
            raise AssertionError(
                f"{kernel.name} has {size} bytes of workspaces: sizes of a problem may decide of them."
            )
        scheduled = kernel if isinstance(kernel, Scheduled) else None
        direct = direct_launch(kernel, (*own, *outputs)) if way.any_size else None
        return Bound(kernel, own, outputs, blanks, follows_tensors(kernel), size, scheduled, direct)

    def forget(self) -> None:
        """Drops every kernel and its workspaces; compiled code stays."""
        with self._lock:
            self._kept.clear()
            self._captured = (0, {})
            self._warm.clear()
            self._remembered.clear()


def holder(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the engine's that lies on the caller's memory for now."""
    import torch

    own = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    own.data = tensor
    return own


def follows_tensors(kernel: Any) -> bool:
    """Whether a kernel reads the addresses of its tensors when it launches, whatever stage it is made of."""
    from mla_var3.runtime.cute_kernel import CuteKernel
    from mla_var3.runtime.torch_kernel import TorchKernel
    from mla_var3.runtime.triton_kernel import TritonKernel

    return all(
        getattr(stage, "follows_tensors", False) or isinstance(stage, CuteKernel | TorchKernel | TritonKernel)
        for stage in _stages(kernel)
    )


def direct_launch(kernel: Any, own: Sequence[Any]) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """(handle, rest) with which handle(*inputs, *outputs, *rest) launches a planned kernel on other tensors than its
    own. None for a kernel that is more than one compiled function of a `Noted` cache, or takes more of its tensors than
    those and its workspaces, a view say."""
    import torch

    from mla_var3.runtime.cute_kernel import CuteKernel

    if not isinstance(kernel, CuteKernel):
        return None
    with noting() as calls:
        kernel.launch()
    if len(calls) != 1:
        return None
    compiled, arguments = calls[0]
    first, rest = arguments[: len(own)], arguments[len(own) :]
    known = {id(x) for x in kernel.workspace_tensors}
    if [id(x) for x in first] != [id(x) for x in own]:
        return None
    if any(isinstance(x, torch.Tensor) and id(x) not in known for x in rest):
        return None
    import tvm_ffi

    return compiled.handle, tuple(tvm_ffi.from_dlpack(x) if isinstance(x, torch.Tensor) else x for x in rest)


def new_like(dtype: torch.dtype, device: torch.device, *shape: int) -> Callable[[], torch.Tensor]:
    """A function without arguments that makes a contiguous tensor of this dtype, device and shape, not initialised. It
    takes half as long as `torch.empty`, which reads its arguments anew in each call."""
    import torch

    with torch.inference_mode(False):
        return functools.partial(torch.empty_like, torch.empty(1, dtype=dtype, device=device).expand(shape))


def _stages(kernel: Any) -> Iterator[Any]:
    stages = getattr(kernel, "stages", None)
    if stages is None:
        yield kernel
        return
    for stage in stages:
        yield from _stages(stage)


@functools.cache
def _bindings() -> Any:
    """What torch's own functions call; looking its module up takes longer than most of what is in it."""
    import torch

    return torch._C


@functools.cache
def _detect(index: int) -> Device | None:
    return Device.detect(index)


@functools.cache
def engine() -> Engine:
    """The process's engine."""
    return Engine()


# ---------------------------------------------------------------- captures
@functools.cache
def _driver() -> Any:
    try:
        function = ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2
    except (OSError, AttributeError):
        return None
    pointer = ctypes.c_void_p
    function.argtypes = [pointer, ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_uint64), *[pointer] * 3]
    function.restype = ctypes.c_int
    return function


def capture_id(stream: int) -> int:
    """The driver's number of the capture that a stream is in; 0 when it cannot be told."""
    function = _driver()
    if function is None:
        return 0
    status, number = ctypes.c_int(0), ctypes.c_uint64(0)
    failed = function(ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None)
    return 0 if failed or status.value != 1 else int(number.value)
