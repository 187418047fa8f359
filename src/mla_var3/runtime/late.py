"""Planning kernels whose tensors are pointed at other memory before each launch (`mla_var3.ops.engine`).

What a launch is given may be prepared when a kernel is planned, as long as its tensors stay where they are. Inside
`late_tensors()` they do not: whatever is planned there takes addresses at the launch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_late: ContextVar[bool] = ContextVar("late", default=False)


@contextlib.contextmanager
def late_tensors() -> Iterator[None]:
    """Inside, kernels are planned so that they read the addresses of their tensors when they launch."""
    token = _late.set(True)
    try:
        yield
    finally:
        _late.reset(token)


def tensors_are_late() -> bool:
    """Whether a kernel that is planned now must not keep addresses."""
    return _late.get()
