"""Figures of a record: units, dotted paths, and the derived figures that have a name.

An expression is either a dotted path into the record (`time_us.burst.median`, `resources.registers`) or a name:

    S            median time (S is burst or sustained)        S.p10  S.p90
    S.tflops     FLOPs of the problem / median time           S.gbps   minimal bytes / median time
    S.limit      the cell's limit, from the same run          S.matmul  S.read   the two rates it comes from
    S.of_limit   limit / median      S.of_matmul  tflops / matmul      S.of_read   gbps / read
    host         time of one launch on the host

and over two records, "A vs B":

    S.speedup            time of B / time of A (above 1: A is faster), with its share of a schedule that the layers of a
                         step have in common, where a library makes one
    S.limit_speedup      the same, each time divided by the limit of its own run: for records of different runs
    S.scheduled_speedup  as limit_speedup, where every call makes its own schedule
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mla_var3 import record as records

Record = Mapping[str, Any]

STATES = ("burst", "sustained")

# Unit as written -> (dimension, factors that bring a figure into the dimension's base). KB has two meanings in use.
_KB, _MB, _GB = (1e3, 1024.0), (1e6, 1024.0**2), (1e9, 1024.0**3)
UNITS: dict[str, tuple[str, tuple[float, ...]]] = {
    **dict.fromkeys(("us", "µs", "μs"), ("time", (1.0,))),
    "ns": ("time", (1e-3,)),
    "ms": ("time", (1e3,)),
    "s": ("time", (1e6,)),
    **dict.fromkeys(("TFLOP/s", "TFLOPs/s", "TFLOPS", "TFLOPs"), ("compute rate", (1.0,))),
    **dict.fromkeys(("GFLOP/s", "GFLOPS"), ("compute rate", (1e-3,))),
    **dict.fromkeys(("PFLOP/s", "PFLOPS"), ("compute rate", (1e3,))),
    "GB/s": ("memory rate", (1.0,)),
    "TB/s": ("memory rate", (1e3,)),
    "%": ("ratio", (0.01,)),
    "x": ("ratio", (1.0,)),
    "×": ("ratio", (1.0,)),
    **dict.fromkeys(("bytes", "byte", "B"), ("bytes", (1.0,))),
    "KB": ("bytes", _KB),
    "kB": ("bytes", _KB),
    "KiB": ("bytes", _KB[1:]),
    "MB": ("bytes", _MB),
    "MiB": ("bytes", _MB[1:]),
    "GB": ("bytes", _GB),
    "GiB": ("bytes", _GB[1:]),
    **dict.fromkeys(("registers", "register", "regs"), ("registers", (1.0,))),
    "MHz": ("clock", (1.0,)),
    "GHz": ("clock", (1e3,)),
    "W": ("power", (1.0,)),
    "°C": ("temperature", (1.0,)),
}
# How a value of each dimension is written when a message or a new entry shows it.
BASE_UNIT = {
    "time": "us",
    "compute rate": "TFLOP/s",
    "memory rate": "GB/s",
    "ratio": "x",
    "bytes": "bytes",
    "registers": "registers",
    "clock": "MHz",
    "power": "W",
    "temperature": "°C",
}
# End of a record's field name -> dimension and factor to its base.
_SUFFIXES: tuple[tuple[str, str, float], ...] = (
    ("_us", "time", 1.0),
    ("_ms", "time", 1e3),
    ("_seconds", "time", 1e6),
    ("_tflops", "compute rate", 1.0),
    ("_gbps", "memory rate", 1.0),
    ("bytes", "bytes", 1.0),
    ("smem", "bytes", 1.0),
    ("smem_static", "bytes", 1.0),
    ("smem_dynamic", "bytes", 1.0),
    ("registers", "registers", 1.0),
    ("_mhz", "clock", 1.0),
    ("_watts", "power", 1.0),
    ("_w", "power", 1.0),
    ("_celsius", "temperature", 1.0),
    ("_c", "temperature", 1.0),
)
# Leaves that count something, whatever stands above them.
_COUNTS = ("n", "ctas_per_sm", "threads")


class Unknown(Exception):
    """An expression has no value in this record; the message says why."""


@dataclass(frozen=True)
class Value:
    """A number in the base unit of its dimension; `dimension` is "" for a plain number."""

    number: float
    dimension: str = ""

    def text(self) -> str:
        """For messages: five significant digits and the base unit."""
        shown = f"{self.number:.5g}" if abs(self.number) < 1e5 else f"{self.number:.0f}"
        unit = BASE_UNIT.get(self.dimension, "")
        return f"{shown} {unit}".rstrip()


def path_value(record: Record, path: str) -> Value:
    """The number at a dotted path; of a list (`tuning.trials.3.time_us`) by its place, from 0.

    Raises `Unknown`, naming the fields there are, when there is none.
    """
    here: Any = record
    keys = path.split(".")
    for depth, key in enumerate(keys):
        if isinstance(here, list):
            here = {str(place): item for place, item in enumerate(here)}
        if not isinstance(here, Mapping) or key not in here:
            where = ".".join(keys[:depth]) or "the record"
            have = ", ".join(map(str, here)) if isinstance(here, Mapping) and here else "nothing"
            raise Unknown(f"{where} has no {key!r}; it has: {have}")
        here = here[key]
    if isinstance(here, bool) or not isinstance(here, int | float):
        raise Unknown(f"{path} is {'empty' if here is None else 'not a number'}")
    dimension, factor = _dimension(keys)
    return Value(here * factor, dimension)


def _dimension(keys: list[str]) -> tuple[str, float]:
    """Dimension of a path: that of the innermost field whose name ends in a unit."""
    if keys[-1] in _COUNTS or "instructions" in keys or keys[0] in ("problem", "tiling"):
        return "", 1.0
    if keys[0] == "seconds":
        return "time", 1e6
    for key in reversed(keys):
        for suffix, dimension, factor in _SUFFIXES:
            if key.endswith(suffix):
                return dimension, factor
    return "", 1.0


def work(record: Record) -> tuple[int, int]:
    """(FLOPs, minimal bytes) of one call: as recorded, else of the problem."""
    from mla_var3.errors import UserError

    try:
        return records.work_of(record.get("flops"), record.get("bytes"), record["problem"])
    except (KeyError, TypeError, UserError) as error:
        raise Unknown(f"its problem cannot be read: {error}") from error


def _time(record: Record, state: str, field: str = "median") -> float:
    status = record.get("status")
    if not record.get("time_us"):
        raise Unknown(f"it has no time: its status is {status}")
    return path_value(record, f"time_us.{state}.{field}").number


def _tflops(record: Record, state: str) -> float:
    return work(record)[0] / _time(record, state) / 1e6


def _gbps(record: Record, state: str) -> float:
    return work(record)[1] / _time(record, state) / 1e3


def _limit(record: Record, state: str, field: str = "limit_us") -> float:
    return path_value(record, f"limits.{state}.{field}").number


def _share(record: Record, state: str) -> float:
    _limit(record, state), _time(record, state)  # what is missing is said by its path
    share = records.Record.model_validate(record).of_limit(state)
    assert share is not None
    return share


def _speedup(record: Record, other: Record, state: str) -> float:
    _time(record, state), _time(other, state)
    ratio = records.Record.model_validate(record).speedup(records.Record.model_validate(other), state)
    assert ratio is not None
    return ratio


def _across_runs(
    record: Record, other: Record, state: str, time: Callable[[records.Record, str], float | None]
) -> float:
    """The other record's time over this one's, each as a share of the limit of its own run."""

    def share(of: Record) -> float:
        _time(of, state)  # what is missing is said by its path
        us = time(records.Record.model_validate(of), state)
        assert us is not None
        return _limit(of, state) / us

    return share(record) / share(other)


_ONE: dict[str, tuple[str, Callable[[Record, str], float]]] = {
    "": ("time", _time),
    "p10": ("time", lambda r, s: _time(r, s, "p10")),
    "p90": ("time", lambda r, s: _time(r, s, "p90")),
    "tflops": ("compute rate", _tflops),
    "gbps": ("memory rate", _gbps),
    "limit": ("time", _limit),
    "matmul": ("compute rate", lambda r, s: _limit(r, s, "matmul_tflops")),
    "read": ("memory rate", lambda r, s: _limit(r, s, "read_gbps")),
    "of_limit": ("ratio", lambda r, s: _share(r, s)),
    "of_matmul": ("ratio", lambda r, s: _tflops(r, s) / _limit(r, s, "matmul_tflops")),
    "of_read": ("ratio", lambda r, s: _gbps(r, s) / _limit(r, s, "read_gbps")),
}
_TWO: dict[str, Callable[[Record, Record, str], float]] = {
    "speedup": lambda a, b, s: _speedup(a, b, s),
    "limit_speedup": lambda a, b, s: _across_runs(a, b, s, records.Record.in_a_step),
    "scheduled_speedup": lambda a, b, s: _across_runs(a, b, s, records.Record.scheduled),
}


def names(*, two: bool = False) -> list[str]:
    """Every name an expression may have, for one record or for two."""
    ends = list(_TWO) if two else list(_ONE)
    found = [f"{state}.{end}".rstrip(".") for state in STATES for end in ends]
    return found if two else [*found, "host"]


def evaluate(expression: str, record: Record, other: Record | None = None) -> Value:
    """The value of an expression, of one record or of two ("record vs other"). Raises `Unknown`."""
    state, _, end = expression.partition(".")
    if other is not None:
        if state not in STATES or end not in _TWO:
            raise Unknown(f"{expression!r} compares nothing; of two records there are: {', '.join(names(two=True))}")
        _same_work(record, other)
        return Value(_TWO[end](record, other, state), "ratio")
    if state in STATES:
        if end not in _ONE:
            raise Unknown(f"{expression!r} is unknown; there are: {', '.join(names())}")
        dimension, function = _ONE[end]
        return Value(function(record, state), dimension)
    return path_value(record, "host_us" if expression == "host" else expression)


def _same_work(record: Record, other: Record) -> None:
    """A speedup is one only on the same problem and device."""
    for field in ("problem", "device"):
        if record.get(field) != other.get(field):
            raise Unknown(f"the two records differ in their {field}, so their times do not compare")


def shown_as(value: Value, number: str, unit: str) -> bool:
    """Whether `number unit`, as written, is this value rounded to the digits that are written.

    A wrong dimension is False as well; `dimension_of` tells the two apart.
    """
    digits = number.replace(",", "").replace("−", "-")
    mantissa, _, exponent = digits.lower().partition("e")
    decimals = len(mantissa.partition(".")[2])
    step = 10.0 ** (int(exponent or 0) - decimals)
    dimension, factors = UNITS[unit] if unit else ("", (1.0,))
    if dimension != value.dimension and not {dimension, value.dimension} <= {"ratio", ""}:
        return False
    return any(abs(float(digits) - value.number / factor) <= step * 0.5 * (1 + 1e-6) + 1e-12 for factor in factors)


def dimension_of(unit: str) -> str:
    """Dimension of a unit as written; "" for none."""
    return UNITS[unit][0] if unit else ""


def write(value: Value, unit: str, digits: int = 4) -> str:
    """The value in a unit, with at least `digits` significant digits (whole numbers in full), without the unit."""
    if unit in ("x", "×"):
        return records.as_ratio(value.number, digits)
    number = value.number / (UNITS[unit][1][0] if unit else 1.0)
    if float(number).is_integer() and abs(number) < 1e12:
        return str(int(number))
    decimals = max(0, digits - len(re.sub(r"\..*", "", f"{abs(number):f}").lstrip("0")))
    if 0 < abs(number) < 1e-3:
        return f"{number:.{digits - 2}e}"
    return f"{number:.{min(decimals, 4)}f}"
