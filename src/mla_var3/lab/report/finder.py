"""What the page's finder predicts from: the dispatcher's table and the libraries' records, as numbers for a script.

`assets/finder.js` does what `dispatch.model` and `dispatch.selection.rank` do, for the problems that can be typed into
the page: equal lengths over pages of 64 tokens in bf16. Which version takes such a problem only the version knows, so
that is asked here, for every number of heads and query tokens, at the ends of what batch and context can be.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from mla_var3 import paths
from mla_var3.catalogue import registry
from mla_var3.device import Device
from mla_var3.dispatch import model, selection
from mla_var3.dispatch import table as tables
from mla_var3.dispatch.table import DeviceTable, Recipe
from mla_var3.errors import UserError
from mla_var3.files import read_yaml
from mla_var3.lab.report.gather import STATES, Gathered, Point
from mla_var3.workload import DEFAULT, Problem
from mla_var3.workload.decode import MlaProblem

HEADS = 128  # the most that can be asked for
#: (query tokens, causal) that can be asked for; with one query token a causal mask hides nothing.
KINDS = [(s, causal) for s in (*range(1, 9), 16) for causal in (False, True) if s > 1 or not causal]
_ENDS = ((1, 1), (4096, 131072))  # (requests, cached tokens): a version that takes both takes what lies between

#: Predictions whose nearest record is closer than this many octaves are called near.
NEAR = 1.0
_ENOUGH = 10  # predictions that a statement about their errors needs


def data(gathered: Gathered) -> dict[str, Any]:
    """What the finder's script reads: its constants, models by heads, and for each device (`of_device`)."""
    devices = {key: found for key in gathered.devices if (found := of_device(key, gathered.newest))}
    return {
        "heads": HEADS, "kinds": KINDS, "neighbours": model.NEIGHBOURS, "close": model.NEAR, "doubt": model.DOUBT,
        "near": NEAR, "models": models(), "devices": devices,
    }  # fmt: skip


def models() -> list[tuple[str, int]]:
    """(name, heads) of the models in conf/model whose decode problems have the default latent and rope widths."""
    plain, found = MlaProblem(), []
    for name in paths.options("model"):
        said = read_yaml(paths.option_file("model", name))
        if tuple(map(said.get, ("k", "p", "h_kv"))) == (plain.k, plain.p, plain.h_kv):
            found.append((name, said["h"]))
    return sorted(found, key=lambda pair: (pair[0] != "deepseek-v3", pair[0]))


def is_plain(problem: Problem) -> bool:
    """Whether a problem can be typed into the finder: it differs from the default one in b, s, h, t and causal only."""
    sizes: dict[str, Any] = {name: getattr(problem, name, None) for name in ("b", "s", "h", "t", "causal")}
    return problem.workload == DEFAULT and problem == MlaProblem(**sizes)


def of_device(key: str, points: Sequence[Point]) -> dict[str, Any] | None:
    """The numbers behind predictions on a device; None where there is nothing to predict from.

    from: the device that was measured. rates: TFLOP/s and GB/s of each state. recipes, libraries: `_recipe`.
    errors: `_errors`.
    """
    try:
        device = Device.get(key)
    except UserError:
        return None
    measured = tables.load().nearest(device)
    known = set(registry.all_kernels())
    recipes = tuple(r for r in measured.recipes if r.kernel in known)
    limits = device if model.has_peaks(device) else measured.hardware
    if not recipes or not model.has_peaks(limits):
        return None
    ours = DeviceTable(measured.device, measured.floor_us, recipes)
    theirs = DeviceTable(limits.key, measured.floor_us, _libraries(key, points))
    return {
        "from": measured.device,
        "floor": measured.floor_us,
        "rates": [model.rates(limits, MlaProblem().dtype, state) for state in STATES],
        "recipes": [_recipe(ours, r) | {"takes": _takes(r.kernel, r.tiling, key)} for r in ours.recipes],
        "libraries": [_recipe(theirs, r) for r in theirs.recipes],
        "errors": _errors(ours, theirs),
    }


def _libraries(key: str, points: Iterable[Point]) -> tuple[Recipe, ...]:
    """The libraries' newest records of decode on a device, in the form of the dispatcher's table."""
    found: dict[registry.KernelId, list[tables.Point]] = {}
    for p in points:
        mine = p.is_peer and p.record.device == key and p.record.requested in (None, "default")
        problem = p.problem
        if mine and problem.workload == DEFAULT and all(p.stats(state) for state in STATES):
            assert isinstance(problem, MlaProblem)
            us = tables.time_us(p.record, problem)
            found.setdefault(tables.named(p.record), []).append(tables.Point(p.record.id, problem, us, ""))
    return tuple(Recipe(kernel, (), tuple(some)) for kernel, some in sorted(found.items()))


def _recipe(table: DeviceTable, recipe: Recipe) -> dict[str, Any]:
    """points: where each was measured, what sets it apart, ratio and record. near: sizes that its knobs are for."""
    usual = model.place_of(MlaProblem(), table.hardware).other
    points = []
    for place, ratio, record in table.points(recipe):
        unusual = sum(mine != theirs for mine, theirs in zip(place.other[1:], usual[1:], strict=True))
        numbers = [place.rows, place.limit, place.blocks, place.fill]
        points.append([*numbers, int(place.other[0]), unusual, ratio, record])
    problems = [point.problem for point in recipe.points]
    near = [[p.b, p.t, p.s, p.h, int(p.causal)] for p in problems if is_plain(p)]
    k = recipe.kernel
    return {
        "label": recipe.label, "kernel": k.label, "family": f"{k.language}/{k.design}", "version": k.version,
        "points": points, "near": near if recipe.tiling else None,
    }  # fmt: skip


@functools.lru_cache(maxsize=256)
def _takes(kernel: registry.KernelId, tiling: tuple[tuple[str, Any], ...], key: str) -> list[str]:
    """For each of `KINDS` a character for each number of heads from 1: "1" it takes such problems, "0" it does not,
    "?" that depends on batch and context."""
    device, choice = Device.get(key), selection.Choice(kernel, tiling, None, "")
    rows = []
    for s, causal in KINDS:
        said = ""
        for h in range(1, HEADS + 1):
            problems = (MlaProblem(b=b, s=s, h=h, t=t, causal=causal) for b, t in _ENDS)
            verdicts = {bool(selection.takes(choice, problem, device)) for problem in problems}
            said += "?" if len(verdicts) == 2 else str(int(verdicts.pop()))
        rows.append(said)
    return rows


def _errors(*measured: DeviceTable) -> dict[str, list[float] | None]:
    """How far predictions lay from the times of cells that were left out, near to another record and far from any:
    [the median, what nine of ten stay under], as fractions of the time; None where too few can tell."""
    near: list[float] = []
    far: list[float] = []
    for table in measured:
        for recipe in table.recipes:
            for point, (place, ratio, _) in zip(recipe.points, table.points(recipe), strict=True):
                pairs = zip(recipe.points, table.points(recipe), strict=True)
                others = [known for other, known in pairs if other.problem != point.problem]
                if others and not recipe.tiling:
                    guess = model.predict(place, 1.0, 0.0, others)
                    (near if guess.distance <= NEAR else far).append(math.exp(abs(math.log(guess.us / ratio))) - 1)
    return {"near": _spread(near), "far": _spread(far)}


def _spread(errors: Sequence[float]) -> list[float] | None:
    if len(errors) < _ENOUGH:
        return None
    return [statistics.median(errors), statistics.quantiles(errors, n=10)[-1]]
