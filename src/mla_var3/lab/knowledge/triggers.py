"""When an entry applies: conditions in its front matter, and facts about a kernel that they are held against.

    applies:
      - bound: memory                    # alternatives; inside one, every condition must hold
        problem: {rows: "<= 32", b: ">= 32"}
        counters: {tensor: "< 60", stall.gmma: ">= 25"}
        resources: {HMMA: "> 0", HGMMA: "== 0"}
        times: {sustained / burst: "> 1.05"}

`counters` are the keys of `mla_var3.lab.profiling.modes.counters` and `stall.NAME`, the share of a stall in per cent;
`resources` those of a compiled kernel (instructions by their names); `problem` the fields of a problem, and `rows`,
which is s·h/h_kv; `times` are `of_limit` and `of_read` in per cent, and `burst`, `sustained`, `host` in microseconds.
"a / b" is a ratio.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mla_var3.errors import UserError, nearest

#: As `mla_var3.lab.profiling.roofline` has them. What is bound by latency is far from both:
#: `times: {of_limit: "< 60"}`.
BOUNDS = ("compute", "memory")
_PROBLEM = ("b", "s", "t", "h", "h_kv", "k", "p", "d", "n", "rows", "page", "topk", "causal", "ragged")
_RESOURCES = (
    "registers",
    "smem",
    "smem_static",
    "smem_dynamic",
    "spill_bytes",
    "spill_loop_bytes",
    "stack_bytes",
    "threads",
    "ctas_per_sm",
    "code_bytes",
)
_TIMES = ("of_limit", "of_matmul", "of_read", "burst", "sustained", "host", "limit")
_SIGNS: Mapping[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}
_CONDITION = re.compile(r"(<=|>=|==|!=|<|>)\s*(-?\d+(?:\.\d+)?)")


@dataclass(frozen=True)
class Condition:
    """`group.name sign value`; name may be a ratio "a / b" of two facts of its group."""

    group: str
    name: str
    sign: str
    value: float

    def holds(self, facts: Facts) -> bool | None:
        """None when the facts do not say."""
        known = facts.groups.get(self.group, {})
        parts = [known.get(part.strip()) for part in self.name.split("/")]
        if any(part is None for part in parts):
            return None
        have = float(parts[0] or 0.0)
        if len(parts) == 2:
            if not parts[1]:
                return None
            have /= float(parts[1])
        return _SIGNS[self.sign](have, self.value)

    def __str__(self) -> str:
        return f"{self.name} {self.sign} {self.value:g}"

    def to_json(self) -> dict[str, Any]:
        return {"group": self.group, "name": self.name, "sign": self.sign, "value": self.value}


@dataclass(frozen=True)
class Trigger:
    """One alternative of `applies`."""

    bound: str | None
    conditions: tuple[Condition, ...]

    def __str__(self) -> str:
        return ", ".join([*([f"{self.bound}-bound"] if self.bound else []), *map(str, self.conditions)])

    def to_json(self) -> dict[str, Any]:
        return {"bound": self.bound, "conditions": [c.to_json() for c in self.conditions]}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Trigger:
        return cls(record["bound"], tuple(Condition(**c) for c in record["conditions"]))


@dataclass(frozen=True)
class Facts:
    """What is known of a kernel on a problem; anything may be missing. groups: counters, resources, problem, times."""

    bound: str | None = None
    groups: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Match:
    """How far a trigger agrees with facts: conditions that hold, and those of which the facts say nothing."""

    trigger: Trigger
    held: tuple[str, ...]
    open: tuple[str, ...]


def match(trigger: Trigger, facts: Facts) -> Match | None:
    """None when one fact contradicts the trigger, or when no fact speaks for it."""
    held, unknown = [], []
    if trigger.bound is not None:
        if facts.bound is None:
            unknown.append(f"{trigger.bound}-bound")
        elif facts.bound != trigger.bound:
            return None
        else:
            held.append(f"{trigger.bound}-bound")
    for condition in trigger.conditions:
        verdict = condition.holds(facts)
        if verdict is False:
            return None
        (unknown if verdict is None else held).append(str(condition))
    return Match(trigger, tuple(held), tuple(unknown)) if held else None


def parse(applies: Any) -> Iterator[Trigger]:
    """The triggers of a front matter's `applies`. Raises `UserError` with the first mistake."""
    if not isinstance(applies, list) or not applies:
        raise UserError("applies must be a list of conditions, as in `- bound: memory`")
    for entry in applies:
        if not isinstance(entry, Mapping) or not entry:
            raise UserError(f"applies holds {entry!r}: each alternative is a mapping, as in `- bound: memory`")
        yield _parse_one(entry)


def _parse_one(entry: Mapping[str, Any]) -> Trigger:
    groups = vocabulary()
    bound = entry.get("bound")
    if bound is not None and bound not in BOUNDS:
        raise UserError(f"applies: bound {bound!r} is unknown: {nearest(str(bound), BOUNDS)}")
    conditions = []
    for group, wanted in entry.items():
        if group == "bound":
            continue
        if group not in groups:
            raise UserError(f"applies has no group {group!r}: {nearest(str(group), ['bound', *groups])}")
        if not isinstance(wanted, Mapping):
            raise UserError(f"applies: {group} must be a mapping of names and conditions")
        for name, text in wanted.items():
            for part in str(name).split("/"):
                _known(group, part.strip(), groups[group])
            for one in re.split(r"\s*,\s*", str(text)):
                found = _CONDITION.fullmatch(one.strip())
                if found is None:
                    raise UserError(f'applies: {name}: {text!r} is no condition: write "< 60", or ">= 8, <= 64"')
                conditions.append(Condition(group, str(name), found[1], float(found[2])))
    return Trigger(bound, tuple(conditions))


def _known(group: str, name: str, names: tuple[str, ...]) -> None:
    if name in names or (group == "resources" and re.fullmatch(r"[A-Z][A-Z0-9.]+", name)):
        return
    raise UserError(f"applies: {group} has no {name!r}: {nearest(name, names)}")


def vocabulary() -> dict[str, tuple[str, ...]]:
    """Names of facts by group; instruction groups of `resources`, in capitals, come on top."""
    from mla_var3.lab.profiling.modes.counters import COUNTERS, STALLS

    counters = (*(c.key for c in COUNTERS), *(f"stall.{name}" for name in STALLS))
    return {"problem": _PROBLEM, "counters": counters, "resources": _RESOURCES, "times": _TIMES}
