"""Codes and colours of kernels, the same in every picture of a report."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mla_var3.catalogue.spoken import PEER
from mla_var3.lab.report.charts import shade
from mla_var3.lab.report.gather import Gathered

_LANGUAGES = {"cute-dsl": "cu", "cutile-dsl": "ti", "triton": "tr", "torch": "to"}


@dataclass(frozen=True)
class Kernel:
    """label: the version. code: at most five characters, for a tile. live: it can still be run from here."""

    label: str
    code: str
    colour: str
    live: bool

    @property
    def title(self) -> str:
        """What a colour scale calls it: the code, then the name, and whether it is retired."""
        return f"{self.code}  {self.label}" + ("" if self.live else " (retired)")


def kernels(gathered: Gathered) -> dict[str, Kernel]:
    """By label: live ones first. A language has a hue, of which its versions are shades: retired ones
    pale, the newest the strongest."""
    first = {p.kernel: p for p in gathered.points}
    labels = sorted(first, key=lambda name: (not first[name].live, first[name].language == PEER, name))
    colours: dict[str, str] = {}
    for language in {p.language for p in gathered.points}:
        ids = {n: p.record.kernel for n, p in first.items() if p.language == language}
        for live, low in ((False, 0.0), (True, 0.5)):
            mine = sorted((n for n in ids if first[n].live is live), key=lambda n: (ids[n].design, ids[n].version))
            colours |= {n: shade(language, low + 0.5 * (i + 1) / len(mine)) for i, n in enumerate(mine)}
    codes = dict(zip(labels, _codes(labels), strict=True))
    return {n: Kernel(n, codes[n], colours[n], first[n].live) for n in labels}


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
