"""The CUDA side, on a stand-in for torch that writes down what it is asked."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from mla_var3.errors import UserError
from mla_var3.measure import cuda_backend
from mla_var3.measure.cuda_backend import CpuBackend, CudaBackend, make_backend


class _Torch:
    """As much of torch as the backend touches; `log` has the order."""

    __version__ = "0"

    def __init__(self, available: bool = True) -> None:
        log: list[str] = []
        self.log = log
        self.clock = 0.0
        outer = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing
                self.at = -1.0

            def record(self) -> None:
                log.append("event")
                self.at = outer.clock

            def synchronize(self) -> None:
                log.append("wait")

            def elapsed_time(self, other: Event) -> float:
                return other.at - self.at

        class Graph:
            def replay(self) -> None:
                log.append("replay")
                outer.clock += 2.5  # milliseconds

        class Capture:
            def __init__(self, graph: Graph) -> None: ...

            def __enter__(self) -> None:
                log.append("[")

            def __exit__(self, *_: Any) -> None:
                log.append("]")

        self.cuda = SimpleNamespace(
            is_available=lambda: available,
            synchronize=lambda: log.append("sync"),
            _sleep=lambda cycles: log.append("spin"),
            empty_cache=lambda: log.append("empty"),
            current_stream=lambda: "the caller's stream",
            set_stream=log.append,
            Event=Event,
            CUDAGraph=Graph,
            graph=Capture,
        )

    def zeros(self, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(add_=lambda x: self.log.append("gap"))


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> _Torch:
    fake = _Torch()
    monkeypatch.setitem(sys.modules, "torch", fake)
    monkeypatch.setattr(cuda_backend, "Sensors", lambda: SimpleNamespace(read=lambda: {"sm_mhz": 1.0}))
    monkeypatch.setattr(cuda_backend.gc, "freeze", lambda: None)
    return fake


def test_a_graph_is_captured_in_order_and_launched_once_before_it_counts(torch: _Torch) -> None:
    backend = CudaBackend()
    calls = [lambda: torch.log.append("a"), lambda: torch.log.append("b")]
    replay = backend.capture(calls, 2)
    assert torch.log == ["gap", "sync", "[", "a", "b", "a", "b", "]", "replay", "sync"]
    assert replay.keep[1] == calls  # what the graph reads stays alive
    torch.log.clear()
    backend.capture(calls, 1, separated=True)
    assert torch.log[2:-2] == ["[", "a", "gap", "b", "gap", "]"]


def test_everything_is_queued_behind_a_spinning_kernel(torch: _Torch) -> None:
    backend = CudaBackend()
    replay = backend.capture([lambda: None], 1)
    torch.log.clear()
    pending = backend.start(replay, 3)
    assert torch.log == ["spin", "event", "replay", "event", "replay", "event", "replay", "event"]
    assert pending.wait() == [2500.0] * 3 and torch.log[-1] == "wait"


def test_what_cannot_be_captured_is_launched_in_a_loop(torch: _Torch) -> None:
    backend = CudaBackend()
    replay = backend.capture([lambda: torch.log.append("a")], 2, graph=False)
    torch.log.clear()
    backend.start(replay, 1)
    assert torch.log == ["spin", "event", "a", "a", "event"]


def test_a_capture_that_fails_gives_the_stream_back(torch: _Torch) -> None:
    def waits() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        CudaBackend().capture([waits], 1)
    assert torch.log[-1] == "the caller's stream"


def test_a_context_that_raises_is_broken(torch: _Torch) -> None:
    backend = CudaBackend()

    def gone() -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    torch.cuda.synchronize = gone
    assert backend.broken()


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", _Torch(available=False))
    with pytest.raises(UserError, match="sees no GPU here"):
        make_backend("auto", on_gpu=True)
    cpu = make_backend("auto", on_gpu=False)
    assert isinstance(cpu, CpuBackend) and not cpu.times
    with pytest.raises(UserError, match="nothing is timed on a CPU"):
        cpu.capture([], 1)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("flash_mla_v23_0", "flash_mla_v23_0"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::Add<float>>(int, float*)",
            "vectorized_elementwise_kernel",
        ),
        ("void (anonymous namespace)::softmax<(int)3>(float const*)", "softmax"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "nvjet_tst_64x8_64x16_4x1_v_bz_TNT"),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD"),
    ],
)
def test_names_of_kernels_are_shortened(name: str, short: str) -> None:
    assert cuda_backend.short_name(name) == short
