"""Codes and colours of kernels, the same in every picture of a report."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mla_var3.lab.report.answers import winners
from mla_var3.lab.report.charts import PALETTE, dark
from mla_var3.lab.report.gather import STATES, Gathered

_LANGUAGES = {"cute-dsl": "cu", "cutile-dsl": "ti", "triton": "tr", "torch": "to"}


@dataclass(frozen=True)
class Kernel:
    """label: the version. code: at most five characters, for a tile. light: text on `colour` is white."""

    label: str
    code: str
    colour: str
    light: bool

    @property
    def title(self) -> str:
        """What a colour scale calls it: the code, then the name."""
        return f"{self.code}  {self.label}"


def kernels(gathered: Gathered) -> dict[str, Kernel]:
    """By label; those that win most cells come first and get the colours that differ most."""
    wins: Counter[str] = Counter()
    for device in gathered.devices:
        mine = [p for p in gathered.newest if p.record.device == device]
        for state in STATES:
            wins.update(w.best.kernel for w in winners(mine, state))
    labels = sorted({p.kernel for p in gathered.points}, key=lambda name: (-wins[name], name))
    codes = _codes(labels)
    colours = [PALETTE[i % len(PALETTE)] for i in range(len(labels))]
    return {n: Kernel(n, c, colour, dark(colour)) for n, c, colour in zip(labels, codes, colours, strict=True)}


def _codes(labels: Sequence[str]) -> list[str]:
    """`cu2` for cute-dsl/flash_mla_v2, `fml` for peer/flash_mla_lib; a letter is added where two would be alike."""
    codes: list[str] = []
    for label in labels:
        language, _, name = label.rpartition("/")
        match = re.fullmatch(r"(.+?)(?:_v(\d+))?", name)
        design, version = (match[1], match[2] or "0") if match else (name, "0")
        if language in _LANGUAGES:
            initials = "" if design == "flash_mla" else "".join(part[0] for part in design.split("_"))
            code = f"{_LANGUAGES[language]}{initials}{version}"
        else:
            code = "".join(re.findall(r"[a-z](?=[a-z]*)|\d+", re.sub(r"(?<=[a-z])[a-z]+", "", design)))
        code, extra = code[:5], iter("bcdefghijklmnopqrstuvwxyz")
        unique = code
        while unique in codes:
            unique = code[:4] + next(extra)
        codes.append(unique)
    return codes
