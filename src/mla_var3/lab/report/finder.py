"""What the page's finder looks up: picks and expected times, all computed here; its script computes none.

For the problems that can be typed into the page (equal lengths over pages of 64 tokens in bf16) the pick is asked for
every number of heads and query tokens, at the ends of what batch and context can be. Where a shape was not measured,
the page shows what is expected of the nearest shape of a table.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

from mla_var3 import paths
from mla_var3.device import Device
from mla_var3.dispatch import choose, expected
from mla_var3.dispatch.evidence import of_records
from mla_var3.dispatch.expected import Expectations
from mla_var3.errors import UserError
from mla_var3.files import read_yaml
from mla_var3.lab.report.gather import Gathered, Point
from mla_var3.workload import DEFAULT, Problem
from mla_var3.workload.decode import MlaProblem

HEADS = 128  # the most that can be asked for
#: (query tokens, causal) that can be asked for; with one query token a causal mask hides nothing.
KINDS = [(s, causal) for s in (*range(1, 9), 16) for causal in (False, True) if s > 1 or not causal]
_ENDS = ((1, 1), (4096, 131072))  # (requests, cached tokens): a version that takes both takes what lies between

#: Shapes of the table: heads, query tokens (causal where there are several), requests, cached tokens.
TABLE = {"h": (8, 16, 32, 64, 128), "s": (1, 4), "b": (1, 4, 16, 64, 256), "t": (1024, 4096, 16384, 65536, 131072)}

NOBODY, DEPENDS = -1, -2  # in place of a pick: no version takes it; it depends on batch and context


def data(gathered: Gathered) -> dict[str, Any]:
    """What the finder's script reads: what can be asked, models by heads, and for each device (`of_device`)."""
    devices = {key: found for key in gathered.devices if (found := of_device(key, gathered.points))}
    return {"heads": HEADS, "kinds": KINDS, "table": TABLE, "models": models(), "devices": devices}


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
    """What is picked on a device, and what it should take; None for a device that nobody knows.

    labels: of versions and libraries. picks: for each of `KINDS` and each number of heads from 1 an index of labels,
    `NOBODY` or `DEPENDS`. times: for each shape of `TABLE`, in order, [pick, us, limit us] and, where a library was
    measured, [its index, us]; nothing where nothing can be expected. error: what nine of ten expectations of measured
    shapes that were left out were within, as a fraction of the time; None where too few can tell.
    """
    try:
        device = Device.get(key)
    except UserError:
        return None
    found = of_records((p.record for p in points if p.record.device == key), DEFAULT)
    versions, picks = _picks(key)
    libraries = sorted({one.label for one in found if one.label.startswith("peer/")})
    labels = [*versions, *libraries]
    told = {label: Expectations(label, device, device, found) for label in labels}
    errors = [error for label in versions for error in told[label].errors()]
    spread = expected.spread(errors)
    return {
        "labels": labels,
        "picks": picks,
        "times": _times(device, told),
        "error": None if spread is None else spread[1],
    }


@functools.lru_cache(maxsize=16)
def _picks(key: str) -> tuple[list[str], list[list[int]]]:
    """Labels that are picked on a device, and which is for what; `of_device` has the form."""
    device, labels, rows = Device.get(key), list[str](), []
    for s, causal in KINDS:
        row = []
        for h in range(1, HEADS + 1):
            picked = {_pick(MlaProblem(b=b, s=s, h=h, t=t, causal=causal), device) for b, t in _ENDS}
            label = picked.pop()
            if picked:
                row.append(DEPENDS)
                continue
            if label and label not in labels:
                labels.append(label)
            row.append(labels.index(label) if label else NOBODY)
        rows.append(row)
    return labels, rows


def _pick(problem: MlaProblem, device: Device) -> str:
    """Label of the pick; empty where no version takes the problem."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of a language that is not installed here
        try:
            return choose(problem, device).label
        except UserError:
            return ""


def shapes() -> list[MlaProblem]:
    """The problems of `TABLE`, in order."""
    return [
        MlaProblem(h=h, s=s, b=b, t=t, causal=s > 1)
        for h in TABLE["h"] for s in TABLE["s"] for b in TABLE["b"] for t in TABLE["t"]
    ]  # fmt: skip


def _times(device: Device, told: dict[str, Expectations]) -> list[list[float]]:
    labels, rows = list(told), list[list[float]]()
    for problem in shapes():
        label = _pick(problem, device)
        guess = told[label].of(problem) if label in told else None
        if guess is None:
            rows.append([])
            continue
        row = [labels.index(label), guess.us, expected.limit_us(problem, told[label].device)]
        others = [(other.us, name) for name in labels if name.startswith("peer/") and (other := told[name].of(problem))]
        if others:
            us, name = min(others)
            row += [labels.index(name), us]
        rows.append(row)
    return rows
