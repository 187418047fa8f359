"""Functions of torch operations, compiled by torch.compile for every shape that they meet."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

#: Shapes that a function is compiled for before torch gives up: a sweep has many cells.
MOST_SHAPES = 1024


@cache
def compiled(fn: Callable[..., Any], tuned: bool = True) -> Callable[..., Any]:
    """The function as torch compiles it, with its tuning on unless products are to stay cuBLAS's; a graph is captured
    by who measures, not by torch."""
    import torch

    config: Any = torch._dynamo.config
    config.recompile_limit = config.accumulated_recompile_limit = MOST_SHAPES
    # Rounds where the function says so; else the norm is of a sum that was not rounded, another result.
    options = {"max_autotune": tuned, "coordinate_descent_tuning": tuned, "emulate_precision_casts": True}
    made: Callable[..., Any] = torch.compile(fn, fullgraph=True, dynamic=False, options=options)
    return made
