"""What a server's log says of the kernels that it runs, or does not run, once."""

from __future__ import annotations

import functools
import logging

from mla_var3 import __version__
from mla_var3.catalogue import registry
from mla_var3.toolchain import aot, loader


@functools.cache
def say(logger: str, backend: str, heads: int, cache: str) -> None:
    """One line to a logger: the backend, of which heads and cache, and where its kernels come from."""
    folders = ", ".join(map(str, aot.bundle_dirs()))
    source = f"from the bundle {folders}" if folders else f"from {aot.default_cache_dir()}"
    if loader.compiler_here():
        source += ", others compiled when they are needed"
    logging.getLogger(logger).info(
        "%s of mla_var3 %s: %d heads, cache %s, kernels %s", backend, __version__, heads, cache, source
    )


@functools.cache
def missing(logger: str, backend: str) -> str | None:
    """Why the kernels of a backend cannot be used here, which one line to a logger says too; None where they can."""
    reason = registry.missing("cute-dsl")
    if reason is not None:
        logging.getLogger(logger).warning("%s of mla_var3 does not serve: %s", backend, reason)
    return reason
