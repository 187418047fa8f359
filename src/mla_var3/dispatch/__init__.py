"""Which version and which knobs for a problem: the first rule of its workload that fits.

`choose(problem, device)` picks; `survey` judges every rule and says why. The rules are `rules/<workload>.py`, an
ordered list a workload. `evidence` holds them to the records, and `expected` says what a call should take.
"""

from __future__ import annotations

from mla_var3.dispatch.selection import Choice, boundaries, choose, survey

__all__ = ["Choice", "boundaries", "choose", "survey"]
