"""The rules, one file a workload, found by the workload's name: each has `RULES`, a list whose order decides."""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mla_var3.dispatch.rule import Rule


@cache
def served() -> tuple[str, ...]:
    """Names of the workloads that have rules."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


@cache
def of(workload: str) -> tuple[Rule, ...]:
    """The rules of a workload, in order; none where it has no file here."""
    if workload not in served():
        return ()
    found: tuple[Rule, ...] = tuple(import_module(f"{__name__}.{workload}").RULES)
    return found
