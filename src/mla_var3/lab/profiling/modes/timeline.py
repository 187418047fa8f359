"""torch's profiler: kernels, overlap and gaps. Needs no tool and no permission; the trace opens in Perfetto."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mla_var3.errors import UserError
from mla_var3.lab.profiling.modes.spans import Span, ordered

#: Categories of the trace that are work of the device.
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
WARM = 5


def record(kernel: Any, calls: int, path: Path) -> list[Span]:
    """Runs `calls` calls under torch's profiler, writes the Chrome trace, and returns what the device did."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    for _ in range(WARM):
        kernel.launch()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(calls):
            kernel.launch()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))
    spans = read(path)
    if not spans:
        raise UserError(
            f"torch's profiler saw no kernel in {calls} calls of {kernel.name}: it launched nothing, or another "
            "profiler holds the device; try --mode event."
        )
    return spans


def read(path: Path) -> list[Span]:
    """Operations of the device in a Chrome trace, in order."""
    try:
        events = json.loads(path.read_text())["traceEvents"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a Chrome trace: record it again.") from error
    return ordered(
        Span(str(e.get("name", "?")), float(e["ts"]), float(e.get("dur", 0)), str(e.get("args", {}).get("stream", "")))
        for e in events
        if e.get("ph") == "X" and e.get("cat") in _DEVICE
    )
