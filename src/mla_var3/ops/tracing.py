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
    name = function.__name__
    parameters = inspect.signature(function).parameters.values()
    names = tuple(parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD)

    @functools.wraps(function)
    def called(*args: P.args, **options: P.kwargs) -> R:
        seen = options.get("on") is None and traced(args[0] if args else options.get(names[0]))
        if not seen or len(args) > len(names):  # which is one too many for the function, too
            return function(*args, **options)
        given: dict[str, Any] = {**dict(zip(names, args, strict=False)), **options}
        given.pop("on", None)
        made: R = through[name](version=given.pop("kernel", None), **given)
        return made

    return called


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """A function that was marked with `traceable`, without its mark: it computes, whoever is looking."""
    unmarked: Callable[P, R] = inspect.unwrap(function)
    return unmarked
