"""An engine on the CPU: streams and captures are what a test says they are."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from mla_var3.device import Device
from mla_var3.ops import flash_mla, ways
from mla_var3.ops.engine import Engine
from mla_var3.toolchain.compiled import CompiledKernel, Resources


class CpuEngine(Engine):
    """Runs versions that work on the CPU as if it were an H200. planned: how many kernels were planned."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.current_stream = 0
        self.current_capture: int | None = None
        self.planned = 0

    def stream(self, device: Any) -> int:
        return self.current_stream

    def capture(self, stream: int) -> int | None:
        return self.current_capture

    def plain_stream(self, index: int) -> int | None:
        return self.current_stream if self.current_capture is None else None

    def on(self, device: Any) -> Any:
        return nullcontext()

    def hardware(self, device: Any) -> Device:
        return Device.get("h200")

    def require_here(self, tensor: Any, name: str, function: str) -> None:
        pass

    def _plan(self, *args: Any) -> Any:
        self.planned += 1
        return super()._plan(*args)


def serve_on_cpu(monkeypatch: pytest.MonkeyPatch) -> CpuEngine:
    """Makes an engine on the CPU the process's, for functions and operators."""
    engine = CpuEngine()
    for module in (ways, flash_mla):
        monkeypatch.setattr(module, "engine", lambda: engine)
    return engine


def not_compiled() -> CompiledKernel:
    """In the place of a compiled function that is not going to be called."""
    return CompiledKernel("not compiled", "sm_90a", Resources())
