"""torch as the interpreter needs it, whatever the caller has set."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


def _flushes_subnormals() -> bool:
    """Whether this thread's arithmetic takes subnormal numbers as zero; torch can set that, and not say it."""
    return sys.float_info.min / 2 == 0.0


@contextmanager
def own_settings() -> Iterator[None]:
    """Inside, the caller's autocast, default data type and device, function modes, flushing of subnormals and reduced
    precision of float32 products have no effect; on the way out they are as before.

    torch has one thread: tiles are small, and where cores are shared its threads wait for one another (a check of the
    decode kernel took 24 s with two threads on two busy cores, 4 s with one).
    """
    with ExitStack() as back:
        # Function modes: a default device is one of them, and so is a pretended GPU.
        back.enter_context(torch._C.DisableTorchFunction())
        if torch.is_autocast_enabled("cpu"):
            back.enter_context(torch.autocast("cpu", enabled=False))
        if torch.get_default_dtype() != torch.float32:
            back.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(torch.float32)
        if _flushes_subnormals():
            back.callback(torch.set_flush_denormal, True)
            torch.set_flush_denormal(False)
        products = torch.backends.mkldnn.matmul
        if products.fp32_precision not in ("none", "ieee"):
            back.callback(setattr, products, "fp32_precision", products.fp32_precision)
            products.fp32_precision = "ieee"
        back.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        yield
