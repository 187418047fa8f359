"""The CUDA side of timing, and the CPU's, which checks and never times."""

from __future__ import annotations

import ctypes
import gc
import itertools
import re
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mla_var3.errors import UserError
from mla_var3.measure import timing
from mla_var3.measure.environment import Sensors

if TYPE_CHECKING:
    from mla_var3.measure.timing import Backend, Call
    from mla_var3.workload import Rows

#: Clock cycles the device spins in front of the first event: about 0.3 ms, while the host queues the replays.
LEAD_IN_CYCLES = 600_000
MATMUL_SIZE = 8192
READ_BYTES = 2 << 30
#: Replays that the profiler looks at.
TIMELINE_REPLAYS = 5


class _Replay:
    """A graph, or a loop of launches, with everything it reads kept alive: a graph holds raw pointers."""

    def __init__(self, run: Callable[[], Any], keep: Any) -> None:
        self.run = run
        self.keep = keep


class _Pending:
    def __init__(self, events: list[Any]) -> None:
        self.events = events

    def wait(self) -> list[float]:
        self.events[-1].synchronize()
        return [1e3 * a.elapsed_time(b) for a, b in itertools.pairwise(self.events)]


class CudaBackend:
    """The current CUDA device. Raises `UserError` where torch sees none."""

    torch_device = "cuda"
    times = True
    clock = "CUDA events around each replay, behind a spinning kernel"

    def __init__(self) -> None:
        import torch

        if not torch.cuda.is_available():
            raise UserError(f"torch {torch.__version__} sees no GPU here: times are taken on a GPU only.")
        self.torch = torch
        self.scratch = torch.zeros(1, device="cuda")
        self._sensors = Sensors()
        # What the imports made never dies; a capture collects garbage first, and should not walk over all of it.
        gc.collect()
        gc.freeze()

    def check(self, plan: Any, device: Any, quick: bool) -> Any:
        return _check(self.torch_device, plan, device, quick)

    def capture(self, calls: Sequence[Call], rotations: int, *, graph: bool = True, separated: bool = False) -> _Replay:
        def run() -> None:
            for _ in range(rotations):
                for call in calls:
                    call()
                    if separated:
                        self.scratch.add_(1.0)

        if not graph:
            return _Replay(run, calls)
        self.scratch.add_(1.0)  # loaded before the capture
        captured = self.torch.cuda.CUDAGraph()
        self.torch.cuda.synchronize()
        stream = self.torch.cuda.current_stream()
        try:
            with self.torch.cuda.graph(captured):
                run()
        except Exception:
            self.torch.cuda.set_stream(stream)  # a capture that fails leaves its own stream current
            raise
        captured.replay()  # the first launch uploads the graph
        self.torch.cuda.synchronize()
        return _Replay(captured.replay, (captured, list(calls)))

    def start(self, replay: _Replay, count: int) -> _Pending:
        events = [self.torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        self.torch.cuda._sleep(LEAD_IN_CYCLES)
        events[0].record()
        for event in events[1:]:
            replay.run()
            event.record()
        return _Pending(events)

    def singles(self, call: Call, count: int, flush_bytes: int) -> tuple[list[float], list[float], dict[str, float]]:
        """Microseconds of each of `count` calls on the device and on the host, and what the sensors said meanwhile.
        Before each call that many bytes are read, so that it finds a cold L2; read and not written, so that no dirty
        lines are left to write back."""
        torch = self.torch
        flush = torch.zeros(flush_bytes // 4, device="cuda")
        largest = torch.zeros((), device="cuda")
        torch.amax(flush, 0, out=largest)
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        host = []
        torch.cuda._sleep(LEAD_IN_CYCLES)
        for start, end in pairs:
            torch.amax(flush, 0, out=largest)
            start.record()
            before = time.perf_counter_ns()
            call()
            host.append((time.perf_counter_ns() - before) / 1e3)
            end.record()
        reading = self.sensors()
        torch.cuda.synchronize()
        return [1e3 * start.elapsed_time(end) for start, end in pairs], host, reading

    def launches(self, call: Call) -> int | None:
        self.torch.cuda.synchronize()
        stream = self.torch.cuda.current_stream()
        try:
            captured = self.torch.cuda.CUDAGraph(keep_graph=True)
            with self.torch.cuda.graph(captured):
                call()
            count = ctypes.c_size_t()
            graph = ctypes.c_void_p(captured.raw_cuda_graph())
            failed = ctypes.CDLL("libcuda.so.1").cuGraphGetNodes(graph, None, ctypes.byref(count))
        except Exception:  # a torch that does not keep graphs (under 2.8), or a call that cannot be captured
            self.torch.cuda.set_stream(stream)
            return None
        return None if failed else int(count.value)

    def timeline(self, calls: Sequence[Call]) -> list[tuple[str, float]]:
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        replay = self.capture(calls, 1)
        self.synchronize()
        try:
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                for _ in range(TIMELINE_REPLAYS):
                    replay.run()
                self.synchronize()
        except RuntimeError:  # another profiler has the device: the times are worth having without
            return []
        events = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
        ends = [(short_name(event.name), float(event.time_range.end)) for event in events]
        return timing.divided(ends, TIMELINE_REPLAYS * len(calls))

    def sensors(self) -> dict[str, float]:
        return self._sensors.read()

    def idle(self, seconds: float) -> None:
        time.sleep(seconds)

    def synchronize(self) -> None:
        self.torch.cuda.synchronize()

    def broken(self) -> bool:
        try:
            self.torch.cuda.synchronize()
            return bool((self.scratch.zero_() + 1.0).item() != 1.0)
        except Exception:
            return True

    def release(self) -> None:
        gc.collect()
        self.torch.cuda.empty_cache()

    def rows_call(self, rows: Rows) -> tuple[Call, float]:
        from mla_var3.measure import read_kernel

        x = self.torch.empty(READ_BYTES // 4, device="cuda", dtype=self.torch.int32).random_()
        words, pitch = rows.width // 4, rows.pitch // 4
        copied = read_kernel.launch_copy_rows(x, words, pitch)
        return lambda: read_kernel.launch_copy_rows(x, words, pitch), 2.0 * rows.width * copied

    def limit_calls(self) -> dict[str, tuple[Call, float]]:
        from mla_var3.measure import read_kernel

        torch, n = self.torch, MATMUL_SIZE
        a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        c = torch.empty_like(a)
        x = torch.empty(READ_BYTES // 4, device="cuda", dtype=torch.int32).random_()
        sums = torch.empty(x.numel() // (read_kernel.BLOCK * read_kernel.STEPS), device="cuda", dtype=torch.int32)
        return {
            "matmul": (lambda: torch.mm(a, b, out=c), 2.0 * n**3),
            "read": (lambda: read_kernel.launch(x, sums), float(READ_BYTES)),
            "copy": (lambda: read_kernel.launch_copy(*x.chunk(2)), float(READ_BYTES)),
        }

    def cross_check_us(self, calls: Sequence[Call], graph_ms: float) -> float | None:
        from triton.testing import do_bench_cudagraph

        turn = itertools.cycle(calls)
        return 1e3 * float(do_bench_cudagraph(lambda: next(turn)(), rep=graph_ms, return_mode="median"))


class CpuBackend:
    """Checks kernels on the CPU; has no times to give."""

    torch_device = "cpu"
    times = False
    clock = "none"

    def check(self, plan: Any, device: Any, quick: bool) -> Any:
        return _check(self.torch_device, plan, device, quick)

    def capture(self, calls: Sequence[Call], rotations: int, *, graph: bool = True, separated: bool = False) -> Any:
        raise UserError("nothing is timed on a CPU: use mode check or compile.")

    def start(self, replay: Any, count: int) -> Any:
        raise UserError("nothing is timed on a CPU: use mode check or compile.")

    def launches(self, call: Call) -> int | None:
        return None

    def timeline(self, calls: Sequence[Call]) -> list[tuple[str, float]]:
        return []

    def sensors(self) -> dict[str, float]:
        return {}

    def idle(self, seconds: float) -> None:
        time.sleep(seconds)

    def synchronize(self) -> None: ...

    def broken(self) -> bool:
        return False

    def release(self) -> None: ...

    def rows_call(self, rows: Rows) -> tuple[Call, float]:
        raise NotImplementedError  # nothing is timed here

    def limit_calls(self) -> dict[str, tuple[Call, float]]:
        return {}

    def cross_check_us(self, calls: Sequence[Call], graph_ms: float) -> float | None:
        return None


def short_name(name: str) -> str:
    """A kernel's name without its arguments, template and namespaces, 60 characters at most."""
    plain = re.sub(r"\(anonymous namespace\)::", "", name).removeprefix("void ")
    return re.split(r"[<(]", plain)[0].strip().rsplit("::", 1)[-1][:60] or name[:60]


def _check(torch_device: str, plan: Any, device: Any, quick: bool) -> Any:
    """The check of a version."""
    from mla_var3.check.judge import check

    return check(plan, device=torch_device, quick=quick, hardware=device)


def make_backend(name: str, on_gpu: bool) -> Backend:
    """auto: CUDA or the CPU; else the class that "module:Class" names, made without arguments."""
    if name == "auto":
        return CudaBackend() if on_gpu else CpuBackend()
    from importlib import import_module

    module, _, attribute = name.partition(":")
    backend: Backend = getattr(import_module(module), attribute)()
    return backend
