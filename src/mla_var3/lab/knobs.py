"""Knobs that somebody asks for, by their names: which of them a version's tiling has, and the tiling with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mla_var3.errors import UserError

if TYPE_CHECKING:
    from mla_var3.runtime import Tiling


def own_knobs(plan_type: Any, asked: Mapping[str, Any] | None) -> dict[str, Any]:
    """Those of the fields that were asked for which this version's tiling has."""
    names = {f.name for f in dataclasses.fields(plan_type.tiling_type)}
    return {name: value for name, value in (asked or {}).items() if name in names}


def same_knobs(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> bool:
    """Whether two tilings, of records, profiles or plans, agree in the knobs that both have: a version may have got
    knobs since, or lost some, and a record may name none."""
    return all(other[name] == value for name, value in (one or {}).items() if name in other) if other else True


def knobs(tiling: Tiling, asked: Mapping[str, Any]) -> Tiling:
    """`tiling` with other values; a value of another type than the field's is a `UserError`."""
    values = {}
    for name, value in asked.items():
        current = getattr(tiling, name)
        if isinstance(current, bool) != isinstance(value, bool) or (
            isinstance(current, int | float | str) and not isinstance(value, type(current))
        ):
            if isinstance(current, float) and isinstance(value, int):
                value = float(value)
            else:
                raise UserError(f"tiling.{name} = {value!r} is not of the type of its default {current!r}.")
        values[name] = value
    return dataclasses.replace(tiling, **values)
