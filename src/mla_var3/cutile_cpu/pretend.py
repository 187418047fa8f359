"""A machine without a GPU stands in for one: other people's wrappers around cuTile kernels run on CPU tensors.

Every tensor in the CPU's memory counts as one on the GPU: `is_cuda` is true, `device` is `cuda:0`, `.cuda()` gives the
tensor itself and `.cpu()` a copy, factory functions take `device="cuda"`. `torch.cuda` answers for a device with one
stream on which everything has been done already; nothing is timed.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ContextDecorator, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch.autograd import graph
from torch.overrides import TorchFunctionMode

from mla_var3.cutile_cpu import frontend, grid
from mla_var3.cutile_cpu.errors import Misuse, WrongType, WrongValue
from mla_var3.cutile_cpu.patch import replaced
from mla_var3.cutile_cpu.settings import own_settings

_CPU = torch.device("cpu")
_GPU = torch.device("cuda", 0)
_CUDA = re.compile(r"cuda(:\d+)?")

#: Of an H200, as torch reports it.
_LIMITS = {
    "total_memory": 150_110_011_392, "L2_cache_size": 62_914_560, "warp_size": 32, "regs_per_multiprocessor": 65536,
    "max_threads_per_block": 1024, "max_threads_per_multi_processor": 2048, "shared_memory_per_block": 49152,
    "shared_memory_per_block_optin": 232448, "shared_memory_per_multiprocessor": 233472, "is_integrated": 0,
    "is_multi_gpu_board": 0,
}  # fmt: skip


# ---------------------------------------------------------------- tensors
def _here(value: Any) -> Any:
    """The CPU for a CUDA device, or anything else as it is."""
    if isinstance(value, torch.device):
        return _CPU if value.type == "cuda" else value
    return "cpu" if isinstance(value, str) and _CUDA.fullmatch(value) else value


def _says_cpu(value: Any) -> bool:
    return value == "cpu" if isinstance(value, str) else isinstance(value, torch.device) and value.type == "cpu"


def _to(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Tensor.to: to the GPU the tensor itself, to the CPU a copy."""
    leaves = any(map(_says_cpu, args[:1])) or _says_cpu(kwargs.get("device"))
    if args and type(args[0]) is int:
        args = (_GPU, *args[1:])
    out = x.to(*map(_here, args), **{k: _CPU if type(v) is int else _here(v) for k, v in kwargs.items()})
    return out.clone() if leaves and out is x else out


#: What tensors in the CPU's memory answer.
_ANSWERS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.is_cuda.__get__: lambda x: True,  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: lambda x: False,  # type: ignore[attr-defined]
    torch.Tensor.device.__get__: lambda x: _GPU,  # type: ignore[attr-defined]
    torch.Tensor.get_device: lambda x: 0,
    torch.Tensor.cuda: lambda x, *_, **__: x,
    torch.Tensor.cpu: lambda x, *_, **__: x.clone(),
    torch.Tensor.to: _to,
    torch.Tensor.pin_memory: lambda x, *_, **__: x,
    torch.Tensor.is_pinned: lambda x, *_, **__: False,
    torch.Tensor.record_stream: lambda x, *_: None,
}


class _TensorsOnTheGpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.device:
            return func(*args, **kwargs)
        answer = _ANSWERS.get(func)
        if answer is not None and args[0].device.type == "cpu":
            return answer(*args, **kwargs)
        kwargs = {k: _here(v) for k, v in kwargs.items() if k != "pin_memory"}
        if type(kwargs.get("device")) is int:
            kwargs["device"] = _CPU
        return func(*map(_here, args), **kwargs)

    def backward(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """The engine of a backward pass: it calls other people's functions, and the mode is off when it is called."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return real(*args, **kwargs)

        return run


# ---------------------------------------------------------------- torch.cuda
class _Done:
    """Streams and events: everything has been done, at once and in order."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def _nothing(self, *_: Any, **__: Any) -> None:
        pass

    synchronize = wait = record = wait_stream = wait_event = _nothing

    def query(self) -> bool:
        return True


class Stream(_Done):
    """In the place of `torch.cuda.Stream`; all are the null stream."""

    cuda_stream = 0
    device = _GPU
    device_index = 0
    priority = 0

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 0

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Event(_Done):
    """In the place of `torch.cuda.Event`: it times nothing."""

    def elapsed_time(self, end: Any) -> float:
        return float("nan")


class _Enters(ContextDecorator):
    """In the place of context managers that choose a device or a stream."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


_RealGenerator = torch.Generator


class _GeneratorType(type(_RealGenerator)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _RealGenerator)


class _Generator(torch.Generator, metaclass=_GeneratorType):
    """`torch.Generator` that takes `device="cuda"`."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return super().__new__(cls, _here(device))


class _NoGraphs:
    """In the place of what records CUDA graphs."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise Misuse("A pretended GPU records no CUDA graphs: run this without them.")


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _zero(*_: Any, **__: Any) -> int:
    return 0


def _torch_cuda(arch: str, capability: tuple[int, int], sms: int) -> dict[str, Any]:
    shown = f"pretended {arch}"
    properties = SimpleNamespace(
        name=shown, major=capability[0], minor=capability[1], multi_processor_count=sms, **_LIMITS
    )
    stream = Stream()
    memory = properties.total_memory
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "get_device_name": lambda *_: shown,
        "get_device_capability": lambda *_: capability,
        "get_device_properties": lambda *_, **__: properties,
        "get_arch_list": lambda: [arch],
        "current_stream": lambda *_, **__: stream,
        "default_stream": lambda *_, **__: stream,
        "mem_get_info": lambda *_: (memory, memory),
        "memory_stats": lambda *_: {},
        "manual_seed": lambda seed: torch.default_generator.manual_seed(seed) and None,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "Stream": Stream,
        "Event": Event,
    }
    answers["manual_seed_all"] = functools.partial(answers["manual_seed"])
    # What stands in has a name of its own for each function, so that `replaced` can tell which one to bring back.
    for name in ("device", "device_of", "stream", "StreamContext"):
        answers[name] = type(name, (_Enters,), {})
    for name in ("CUDAGraph", "graph", "make_graphed_callables"):
        answers[name] = type(name, (_NoGraphs,), {})
    for name in ("init", "set_device", "set_stream", "synchronize", "empty_cache", "reset_peak_memory_stats"):
        answers[name] = functools.partial(_nothing)
    for name in ("current_device", "memory_allocated", "max_memory_allocated", "memory_reserved"):
        answers[name] = functools.partial(_zero)
    return answers


# ---------------------------------------------------------------- cuda.tile
def _is_stream(stream: Any) -> bool:
    """Whether a launch takes it: an integer, or a stream of torch, CuPy or Numba."""
    names = {f"{t.__module__}.{t.__qualname__}" for t in type(stream).__mro__}
    others = {"cupy.cuda.stream.Stream", "cupy.cuda.stream._BaseStream", "numba.cuda.cudadrv.driver.Stream"}
    return isinstance(stream, (int, Stream)) or bool(names & others)


def _launch(options: dict[str, Any]) -> Callable[..., None]:
    def launch(stream: Any, grid_: Any, kernel: Any, kernel_args: Any, /, **keywords: Any) -> None:
        if not _is_stream(stream):
            raise WrongType(
                f"the stream is a {type(stream).__name__}: give torch.cuda.current_stream(), or an integer."
            )
        for name, value in (("grid", grid_), ("kernel_args", kernel_args)):
            if not isinstance(value, tuple):
                raise WrongType(f"{name} is a {type(value).__name__}: give a tuple.")
        for name, value in keywords.items():
            if name != "programmatic_dependent_launch":
                raise RuntimeError(f"ct.launch has no keyword argument {name}.")
            if not isinstance(value, bool):
                raise WrongType(f"{name} is a {type(value).__name__}: give True or False.")
        grid.launch(grid_, kernel, kernel_args, **options)

    return launch


def _search(arch: str) -> Callable[..., Any]:
    def exhaustive_search(
        search_space: Sequence[Any],
        stream: Any,
        grid_fn: Callable[[Any], tuple[int, ...]],
        kernel: Any,
        args_fn: Callable[[Any], tuple[Any, ...]],
        hints_fn: Callable[[Any], dict[str, Any]] | None = None,
        **_: Any,
    ) -> Any:
        """In the place of `ct.tune.exhaustive_search`: the first configuration that compiles, without a time."""
        import cuda.tile as ct
        from cuda.tile.tune import Measurement, TuningResult

        if not len(search_space):
            raise WrongValue("the search space has no configuration.")
        failures = []
        for config in search_space:
            grid.checked(grid_fn(config), ())
            candidate = kernel if isinstance(kernel, ct.kernel) else kernel(config)
            candidate = candidate.replace_hints(**(hints_fn(config) if hints_fn is not None else {}))
            try:
                with own_settings():
                    frontend.program(candidate, frontend.describe_arguments(candidate, args_fn(config)), arch)
            except Exception as error:
                failures.append((config, type(error), str(error)))
                continue
            warnings.warn(
                f"On a pretended GPU ct.tune.exhaustive_search times nothing: for "
                f"{frontend.annotated(candidate).pyfunc.__name__} it took the first of {len(search_space)} "
                f"configurations that compiles, {config}.",
                stacklevel=2,
            )
            nan = float("nan")
            best = Measurement(config=config, mean_us=nan, num_samples=0, error_margin_us=nan)
            return TuningResult(best=best, successes=(best,), failures=tuple(failures))
        config, kind, message = failures[0]
        raise WrongValue(
            f"no configuration of the search space compiles; the first, {config}: {kind.__name__}: {message}"
        )

    return exhaustive_search


def _constraints(kernel: Any, args: Sequence[Any], convention: Any, /) -> list[Any]:
    with own_settings():
        found = frontend.describe_arguments(kernel, args).constraints
    for constraint in found if convention.version < 2 else ():
        # The first calling convention has no static shapes. Nobody else holds the constraint: it is changed in place.
        array = getattr(constraint, "element", constraint)
        if hasattr(array, "shape_constant"):
            object.__setattr__(array, "shape_constant", (None,) * array.ndim)
    return found


def _default_device(device: Any) -> None:
    """`torch.set_default_device`: the pretended GPU is where tensors are anyway."""
    _set_default_device(_here(device))


_set_default_device = torch.set_default_device


@contextmanager
def pretend_gpu(*, arch: str = "sm_90", sms: int = 132, **options: Any) -> Iterator[None]:
    """Inside, this machine stands in for one with a GPU: code that launches cuTile kernels on it runs on the CPU.

    arch: the architecture that `torch.cuda` and `cuda.tile` report, and whose data types kernels may use. sms: its
    multiprocessors, which persistent kernels take as their grid. options: those of `launch`, as `poison=False`.

    Functions are replaced for the whole process, one caller at a time; tensors count as being on the GPU in the thread
    that is inside. Not pretended: CUDA graphs (a `Misuse`), times (NaN), memory that runs out, autocast of the GPU,
    Triton, CuPy and whatever else brings a CUDA library of its own.
    """
    import cuda.tile as ct
    from cuda.tile import _cext, _compile, compilation, tune  # noqa: F401  (all that take functions from _cext)

    frontend.check_version()
    found = re.fullmatch(r"sm_(\d+)(\d)", arch)
    if found is None:
        raise WrongValue(f"arch = {arch!r}: give an architecture as sm_90.")
    capability = (int(found[1]), int(found[2]))
    tensors = _TensorsOnTheGpu()
    with (
        replaced(
            {
                torch: {"Generator": _Generator, "set_default_device": _default_device},
                torch.cuda: _torch_cuda(arch, capability, sms),
                graph: {"_engine_run_backward": tensors.backward(graph._engine_run_backward)},
                ct: {"launch": _launch({"arch": arch, **options})},
                tune: {"exhaustive_search": _search(arch)},
                _cext: {
                    "get_compute_capability": lambda *_: capability,
                    "get_parameter_constraints_from_pyargs": _constraints,
                },
            }
        ),
        tensors,
    ):
        _compile.get_sm_arch.cache_clear()
        try:
            yield
        finally:
            _compile.get_sm_arch.cache_clear()
