"""Importing a CuTe kernel version on a machine that has no CuTe compiler, to plan and launch what a bundle holds.

A version's module imports `cutlass` at its top and decorates its device code with it. Planning needs neither: tiling,
workspaces and the order of launch arguments are plain Python. So, while the version is imported, stand-ins take the
place of the compiler's modules. They accept what stands at module level (imports, decorators, attributes,
subscripts) and refuse to be called or calculated with afterwards. Kernel authors need to do nothing but keep values of
`cutlass` out of what plans compute; what only compiling uses may use anything.

The stand-ins are gone from `sys.modules` when the import is over, so no other library mistakes them for a compiler.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from importlib import abc, import_module, machinery, util
from typing import Any, NoReturn

from mla_var3.errors import UserError, install
from mla_var3.toolchain.loader import compiler_here

# What version modules import at their top, with everything below it.
_ROOTS = ("cutlass", "cuda.bindings")


def import_version(module: str) -> types.ModuleType:
    """The version's module: as it is where the compiler is installed, else with device code that cannot be compiled."""
    if module in sys.modules or compiler_here():
        return import_module(module)
    with stand_ins():
        return import_module(module)


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """Inside, importing the compiler's modules gives stand-ins, unless they are installed."""
    finder = _Finder()
    sys.meta_path.append(finder)  # last: what is installed is found before
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name, module in list(sys.modules.items()):
            if isinstance(module, _StandInModule):
                del sys.modules[name]
                parent, _, child = name.rpartition(".")
                if parent in sys.modules and vars(sys.modules[parent]).get(child) is module:
                    delattr(sys.modules[parent], child)


class StandIn:
    """Takes the place of a value of the compiler. Equal only to itself; refuses arithmetic, iteration and calls."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"<{self._name}, which is not installed>"

    def __getattr__(self, name: str) -> StandIn:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return StandIn(f"{self._name}.{name}")

    def __getitem__(self, item: Any) -> StandIn:  # cutlass.Constexpr[int]
        return self

    def __or__(self, other: Any) -> StandIn:  # in aliases of types
        return self

    __ror__ = __or__
    __iter__ = None  # with __getitem__ alone, a loop over a stand-in would never end

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:  # as a base class
        return ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            if isinstance(args[0], types.FunctionType):
                return _device_function(args[0])
            if isinstance(args[0], type):
                return args[0]
        return StandIn(f"{self._name}(...)")

    def _refuse(self, *args: Any) -> NoReturn:
        raise UserError(
            f"{self._name} was used in planning, and the CuTe compiler is not installed: "
            f"{install('cute')}, or keep it out of what the plan computes."
        )

    __bool__ = __int__ = __index__ = __float__ = __len__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = __rfloordiv__ = __mod__ = _refuse
    __truediv__ = __rtruediv__ = __neg__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse


def _device_function(function: Callable[..., Any]) -> Any:
    """What a decorator of the compiler leaves of a function: its name and documentation."""

    @functools.wraps(function)
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise UserError(
            f"{function.__name__} cannot be compiled here: {install('cute')}, or use a bundle that holds it."
        )

    refuse.set_name_prefix = lambda *args, **kwargs: None  # type: ignore[attr-defined]
    return refuse


class _StandInModule(types.ModuleType):
    def __getattr__(self, name: str) -> StandIn:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return StandIn(f"{self.__name__}.{name}")


class _Finder(abc.MetaPathFinder, abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> machinery.ModuleSpec | None:
        wanted = any(name == root or name.startswith(f"{root}.") for root in _ROOTS)
        # `cuda` may be there for another package; it is made up only when nothing has that name.
        return util.spec_from_loader(name, self, is_package=True) if wanted or name == "cuda" else None

    def create_module(self, spec: machinery.ModuleSpec) -> types.ModuleType:
        return _StandInModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run: attributes are made when they are asked for."""
