"""Which calls torch is looking at, and how these reach the operators.

A public function of this room is written as an eager call and marked with `traceable`. A plain call runs it as it
stands, because torch's dispatcher costs microseconds and gives an eager call nothing. A call goes through the
function's operator where somebody is looking: while torch traces, under a dispatch mode, and where the first argument
is a tensor of a subclass, as fake and functional ones are. The other arguments are not looked at. The operator runs the
function without its mark, `eager(function)`, so that no call can come back to where it was.

A function cannot import its operator, which imports the function. It finds the way there in `through`, which
`mla_var3.ops.library` fills when `mla_var3.ops` is imported.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

#: By a function's name: what calls its operator with the function's arguments by name, and returns what the function
#: does. `kernel` comes as `version`, as Inductor has an argument of that name of its own.
through: dict[str, Callable[..., Any]] = {}


def traced(tensor: Any) -> bool:
    """Whether somebody is looking at the calls that are made of a tensor."""
    import torch

    return (
        torch.compiler.is_dynamo_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or (type(tensor) is not torch.Tensor and isinstance(tensor, torch.Tensor))
    )


def traceable(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator of a public function, whose first argument is a tensor: calls that are traced become its operator.

    A call that names an engine with `on=` runs on that engine, as it stands, whoever is looking: an operator's
    arguments are tensors and numbers, and it runs on the engine of the process.
    """
    name, parameters = function.__name__, inspect.signature(function).parameters
    keywords = [x for x, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY]
    places = [x for x in parameters if x not in keywords]
    known = {f"default_{x}": p.default for x, p in parameters.items() if p.default is not p.empty}
    heads = [f"{x}=default_{x}" if f"default_{x}" in known else x for x in parameters]
    heads[len(places) : len(places)] = ["*"] if keywords else []
    by_name = {"version": "kernel" if "kernel" in parameters else "None"}
    by_name |= {x: x for x in parameters if x not in ("kernel", "on")}
    # Written out: to take *args and **options, and to pass them on, costs a call a tenth of what it takes in all.
    source = f"""def {name}({", ".join(heads)}):
    if {"on is None and " if "on" in parameters else ""}traced({places[0]}):
        return through[{name!r}]({", ".join(f"{x}={value}" for x, value in by_name.items())})
    return function({", ".join((*places, *(f"{x}={x}" for x in keywords)))})
"""
    namespace: dict[str, Any] = {"traced": traced, "through": through, "function": function, **known}
    exec(source, namespace)
    called: Callable[P, R] = functools.wraps(function)(namespace[name])
    return called


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """A function that was marked with `traceable`, without its mark: it computes, whoever is looking."""
    unmarked: Callable[P, R] = inspect.unwrap(function)
    return unmarked
