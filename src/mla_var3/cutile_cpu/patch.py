"""Letting code that calls `cuda.tile.launch` run here."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mla_var3.cutile_cpu.grid import launch


def _on_a_gpu(args: Any) -> bool:
    if isinstance(args, (tuple, list)):
        return any(_on_a_gpu(a) for a in args)
    return bool(getattr(args, "is_cuda", False))


def _exchange(pairs: list[tuple[Any, Any]]) -> None:
    by_identity = {id(old): new for old, new in pairs}
    for place, module in list(sys.modules.items()):
        names = getattr(module, "__dict__", None)
        if type(names) is dict and not place.startswith(__package__):  # what stands in calls the real ones
            for name, value in list(names.items()):
                if id(value) in by_identity:
                    names[name] = by_identity[id(value)]


@contextmanager
def replaced(modules: Mapping[Any, Mapping[str, Any]]) -> Iterator[None]:
    """Inside, attributes of modules are others, also where a module has taken one by `from … import` before; on the way
    out all are as they were, also where one was taken inside. For the whole process, one caller at a time."""
    added = [(module, name) for module, names in modules.items() for name in names if not hasattr(module, name)]
    pairs = [
        (getattr(module, name), new)
        for module, names in modules.items()
        for name, new in names.items()
        if hasattr(module, name)
    ]
    for module, name in added:
        setattr(module, name, modules[module][name])
    _exchange(pairs)
    try:
        yield
    finally:
        _exchange([(new, old) for old, new in pairs])
        for module, name in added:
            delattr(module, name)


@contextmanager
def in_place_of_launch(**options: Any) -> Iterator[None]:
    """Inside, `ct.launch(stream, grid, kernel, args)` interprets kernels whose tensors are on the CPU.

    options: those of `launch`. The stream may be anything. `pretend_gpu` is for code that asks for a GPU elsewhere too.
    """
    import cuda.tile as ct

    real = ct.launch

    def either(stream: Any, grid: Any, kernel: Any, kernel_args: Any, /, **keywords: Any) -> Any:
        if _on_a_gpu(kernel_args):
            return real(stream, grid, kernel, kernel_args, **keywords)
        return launch(grid, kernel, kernel_args, **options)

    with replaced({ct: {"launch": either}}):
        yield
