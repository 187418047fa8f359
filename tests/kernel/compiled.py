"""What CuTe plans compile to on an H200, with its SASS: each code once a process."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from mla_var3.device import Device
from mla_var3.toolchain.aot import code_knobs

_FOLDER = tempfile.TemporaryDirectory(prefix="compiled-")
_MADE: dict[Any, Any] = {}


def compiled(plan: Any) -> Any:
    """The compiled kernel of a plan, or its compiled kernels."""
    kernel, knobs = plan.plan_empty(), json.dumps(code_knobs(plan.tiling), sort_keys=True)
    key = type(plan), plan.problem.problem_class(), knobs, kernel.functions
    if key not in _MADE:
        folder = Path(_FOLDER.name) / str(len(_MADE))
        _MADE[key] = kernel.compile(folder, Device.get("h200"), ("sass",))
    return _MADE[key]
