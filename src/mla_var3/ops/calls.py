"""A call of `mla_decode` written down: which compiled functions it runs, with which tensors and numbers, in order.

For programs that have their own memory and streams, and perhaps no Python: `mla_var3.ops.jax` calls so, and
examples/cpp does. Planning a version on tensors without memory (torch's device "meta") and launching it once, with
functions that note their arguments, says all of it; so nothing here knows a version's launch arguments. Needs no GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mla_var3.errors import Unsupported, UserError
from mla_var3.ops.engine import Noted, noting
from mla_var3.runtime.scaling import sign_of

if TYPE_CHECKING:
    import torch

    from mla_var3.device import Device
    from mla_var3.ops.engine import Way
    from mla_var3.toolchain.compiled import CompiledKernel
    from mla_var3.workload.decode import MlaProblem

LANGUAGE = "cute-dsl"  # whose compiled functions can be called from anywhere


@dataclass(frozen=True)
class Buffer:
    """A contiguous tensor of a call. role: "input", "output" or "workspace"; index: among those of its role. dtype:
    torch's name without the module ("bfloat16"). zeroed: a workspace that is 0 before the first call that uses it;
    each call leaves it so, and the others may hold anything."""

    role: str
    index: int
    shape: tuple[int, ...]
    dtype: str
    zeroed: bool = False


@dataclass(frozen=True)
class HostCall:
    """One compiled function. compiled: its `handle` can be called, its artefact "object" is the library it is in.
    arguments: by position; None stands for a tensor that the problem lacks."""

    compiled: CompiledKernel
    arguments: tuple[Buffer | float | int | None, ...]


@dataclass(frozen=True)
class Call:
    """All of a call: functions in order on one stream. inputs: (q, kv_cache, page_table, seq_lens) and, where the
    problem has it, cu_seqlens_q or a mask as uint8; the cache may have any number of pages. outputs: (out, lse)."""

    label: str
    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
    workspaces: tuple[Buffer, ...]
    steps: tuple[HostCall, ...]


def call_of(way: Way, problem: MlaProblem, device: Device) -> Call:
    """The call of a version for a problem; t is the tokens that its page table can name.

    Compiles what is in no cache and no bundle. Raises `Unsupported` for a version of another language than CuTe's, and
    `UserError` for a scale that is not above 0, for which torch copies q before the functions are called.
    """
    import torch

    if sign_of(problem.scale) < 1:
        raise UserError(
            f"scale is {problem.scale}: compiled functions take one above 0; pass -scale and -q for one below it, and "
            "q times 0 with a scale of 1 for 0."
        )

    kernel = way.key[0]
    if kernel.language != LANGUAGE:
        from mla_var3.catalogue import registry

        why = registry.missing(LANGUAGE) or f"no {LANGUAGE} version takes {problem.label} on {device.key}."
        raise Unsupported(f"{kernel.label} is picked, and only {LANGUAGE} versions can be called so: {why}")
    plan = way.make(problem, device)
    plan.compiled = Noted()
    plan.late_tensors = True  # the functions are called with torch's tensors, not with what is made of them
    inputs, zeros = inputs_of(problem), _zeros()
    with zeros:
        bound = plan.plan(*inputs)
    with noting() as calls:
        bound.launch()
    groups = {"input": inputs, "output": bound.output_tensors}
    known = {id(x) for group in groups.values() for x in group}
    passed = [x for _, arguments in calls for x in arguments if isinstance(x, torch.Tensor)]
    groups["workspace"] = tuple({id(x): x for x in passed if id(x) not in known}.values())
    buffers = {
        id(x): Buffer(role, i, tuple(x.shape), str(x.dtype).removeprefix("torch."), id(x) in zeros.made)
        for role, group in groups.items()
        for i, x in enumerate(group)
    }

    def plain(argument: Any) -> Any:
        return buffers[id(argument)] if isinstance(argument, torch.Tensor) else argument

    steps = tuple(HostCall(compiled, tuple(map(plain, arguments))) for compiled, arguments in calls)
    given, results, workspaces = (tuple(buffers[id(x)] for x in group) for group in groups.values())
    return Call(kernel.label, given, results, workspaces, steps)


def inputs_of(problem: MlaProblem) -> tuple[Any, ...]:
    """A problem's inputs without memory; the cache has one page, as its number of pages decides nothing."""
    import torch

    def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[problem.dtype]
    rows = (problem.query_tokens,) if problem.packed else (problem.b, problem.s)
    width = problem.k + problem.p
    given = (
        empty(kind, *rows, problem.h, width),
        empty(kind, 1, problem.page_size, problem.h_kv, width),
        empty(torch.int32, problem.b, problem.max_pages),
        empty(torch.int32, problem.b),
    )
    if problem.packed:
        return (*given, empty(torch.int32, problem.b + 1))
    return (*given, empty(torch.uint8, problem.b, problem.s, problem.s)) if problem.tree else given


def _zeros() -> Any:
    """A mode in which torch notes, in `made`, which tensors are made of zeros."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Zeros(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.made: dict[int, torch.Tensor] = {}  # held, so that no other tensor gets the number

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            if func.overloadpacket in (torch.ops.aten.new_zeros, torch.ops.aten.zeros):
                self.made[id(made)] = made
            return made

    return Zeros()
