"""What an optimization has gained: pairs of records under "Evidence" of its page, one with it and one without."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mla_var3.lab.devlog import values
from mla_var3.lab.devlog.citations import find_record
from mla_var3.lab.devlog.evidence import Cited, Evidence
from mla_var3.workload import problem_from_record

SECTION = "Evidence"
#: So many digits of a ratio stand in the index: more than any measurement has.
_DIGITS = 4


def measured(evidence: Evidence, records: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One mapping a pair "A vs B" and state, in the page's order: record (A), over (B), state, speedup, problem, device
    and bound. A library on either side compares nothing that an optimization did, and is left out, as is what cannot
    be read, which the page's check tells."""
    cited = [
        line for part in evidence.parts if part.heading == SECTION for block in part.blocks for line in block.cited
    ]
    return [gain for line in cited if len(line.ids) == 2 for gain in _of_pair(line, records)]


def _of_pair(line: Cited, records: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    try:
        one, other = (find_record(records, name) for name in line.ids)
    except values.Unknown:
        return []
    if "peer" in (one["kernel"]["language"], other["kernel"]["language"]):
        return []
    found = []
    for expression in line.body.split()[3:]:
        try:
            ratio = values.evaluate(expression, one, other).number
        except values.Unknown:
            continue
        found.append(
            {
                "record": str(one["id"]), "over": str(other["id"]), "state": expression.partition(".")[0],
                "speedup": round(ratio, _DIGITS), "problem": _short(one["problem"]), "device": str(one["device"]),
                "bound": (one.get("limits") or {}).get("bound"),
            }
        )  # fmt: skip
    return found


def _short(record: Mapping[str, Any]) -> dict[str, Any]:
    """A problem's record without the fields that are as they are by default."""
    problem = problem_from_record(record)
    usual = type(problem)().to_record()
    return {name: value for name, value in problem.to_record().items() if name == "workload" or usual[name] != value}
