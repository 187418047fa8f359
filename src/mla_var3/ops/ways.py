"""From a call to its engine: the version that computes a problem on a device, and the run of it.

A version is picked by `mla_var3.dispatch`, named by the caller, or chosen for splits of a fixed length. Each becomes a
`Way`, which an engine can run.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mla_var3.errors import UserError
from mla_var3.ops.engine import Way, engine
from mla_var3.ops.fixed import fixed_choice
from mla_var3.ops.request import compact, plain_strides
from mla_var3.workload.decode import MlaProblem
from mla_var3.workload.sparse_decode import SparseProblem

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from mla_var3.device import Device
    from mla_var3.dispatch import Choice
    from mla_var3.ops.engine import DecodeSchedule, Engine
    from mla_var3.workload import Problem


def serve(
    function: str,
    problem: Problem,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    kernel: str | None,
    on: Engine | None,
    *,
    fixed_split: int | None = None,
    first: str = "q",
    apart: Sequence[int] = (),
    apart_out: bool = False,
) -> None:
    """Computes the problem of a call of `function`, unless it has no token. first: what the function calls the first
    of its inputs. apart, apart_out: as of `compute`."""
    served = engine_of(on, inputs[0], first, function)
    if len(inputs[0]):
        way = way_for(problem, served.hardware(inputs[0].device), fixed_split=fixed_split, kernel=kernel)
        compute(served, way, problem, inputs, outputs, apart, apart_out)


def compute(
    served: Engine,
    way: Way,
    problem: Problem,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    apart: Sequence[int] = (),
    apart_out: bool = False,
    schedule: DecodeSchedule | None = None,
    *,
    field: str = "strided",
    remember: tuple[Any, Any] | None = None,
) -> None:
    """Runs a version on tensors whose rows may lie apart. This is the one place where such tensors are copied, for a
    version that does not read or write them.

    apart: places of inputs with gaps between their rows that versions may read. apart_out: whether outputs have such.
    Others are as the version takes them. field: of the problem, that says that inputs have gaps. remember: as of
    `Engine.run`, of a call without copies.
    """
    if apart or apart_out:
        device = served.hardware(inputs[0].device)
        problem, copies_in, copies_out = _taken(way, problem, device, bool(apart), apart_out, field)
        if copies_in:
            remember = None
            inputs = [compact(x) if i in apart else x for i, x in enumerate(inputs)]
        if copies_out:
            import torch

            made = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in outputs]
            served.run(way, problem, inputs, made, schedule)
            for target, value in zip(outputs, made, strict=True):
                target.copy_(value)
            return
        if apart_out:
            outputs = [plain_strides(x) for x in outputs]
    served.run(way, problem, inputs, outputs, schedule, remember)


@functools.lru_cache(maxsize=4096)
def _taken(
    way: Way, problem: Problem, device: Device | None, apart: bool, apart_out: bool, field: str
) -> tuple[Problem, bool, bool]:
    """(problem, copies of inputs, copies of outputs) for tensors that lie apart: the problem whose class has the code
    for those that the version takes, and whether the others have to be copied."""
    problem = problem.replace(**{field: False})
    own = way.make(problem, device)

    def takes(name: str) -> bool:
        plan = way.make(problem.replace(**{name: True}), device)
        # Other knobs than a contiguous call has would give other bits.
        return bool(plan.requires.accepts(plan.problem)) and plan.tiling == own.tiling and bool(plan.feasible())

    reads, writes = apart and takes(field), apart_out and takes("strided_out")
    changes = {field: reads and not own.reads_any_strides} | ({"strided_out": True} if writes else {})
    return problem.replace(**changes), apart and not reads, apart_out and not writes


def engine_of(on: Engine | None, tensor: torch.Tensor, name: str, function: str) -> Engine:
    """The engine of a call of `function`: the one that it names, else the process's. Raises `UserError`, naming the
    argument, for a tensor that is not on a GPU."""
    served = engine() if on is None else on
    served.require_here(tensor, name, function)
    return served


@functools.lru_cache(maxsize=4096)
def way_for(
    problem: Problem,
    device: Device | None,
    *,
    fixed_split: int | None = None,
    kernel: str | None = None,
    knobs: tuple[tuple[str, Any], ...] = (),
) -> Way:
    """How a problem is computed on a device: the dispatcher's pick, a named version, or for a problem of decode, sparse
    decode among it, one with splits of a fixed length. knobs: of the pick, those that its version has."""
    if device is None:
        raise UserError("there is no GPU here that a version is written for.")
    if fixed_split is not None:
        if kernel is not None:
            raise UserError("fixed_split chooses its own version: give it, or kernel, not both.")
        assert isinstance(problem, MlaProblem | SparseProblem)  # no function of others has the argument
        choice = fixed_choice(problem, fixed_split, device, "fixed_split")
    elif kernel is not None:
        choice = _named(kernel)
    else:
        choice = _pick(problem, device)
        own = choice.plan(problem, device).tiling.to_record() if knobs else {}
        choice = replace(choice, tiling=(*choice.tiling, *(knob for knob in knobs if knob[0] in own)))
    return Way((choice.kernel, choice.tiling), choice.plan)


def _pick(problem: Problem, device: Device) -> Choice:
    from mla_var3.dispatch import choose

    return choose(problem, device)


def _named(label: str) -> Choice:
    """The choice of a version that the caller names, with its default knobs."""
    from mla_var3.catalogue.registry import KernelId
    from mla_var3.dispatch import Choice

    if not isinstance(label, str):
        raise UserError(f"kernel is a {type(label).__name__}: pass a version's name, as cute-dsl/flash_mla_v23.")
    return Choice(KernelId.parse(label), (), "asked for by name")
