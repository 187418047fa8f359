"""Which version and which knobs for a problem: picked from measured records, in one call.

`choose(problem, device)` picks for one problem; `pick(problem, device)` does so once for a neighbourhood of sizes and
remembers it. `python -m mla_var3.cli dispatch build` makes the table from records.
"""

from __future__ import annotations

from mla_var3.dispatch.selection import Choice, choose, pick, survey

__all__ = ["Choice", "choose", "pick", "survey"]
