"""Reading SASS: its instructions, where a register is used, and what must not stand beside products in flight."""

from __future__ import annotations

import re

MEMORY = r"\b(LDG|LDGSTS|UTMALDG|STG|ATOMG|RED)\b"


def instructions(sass: str) -> list[str]:
    """Its lines with an instruction, in the order of the code."""
    return [line for line in sass.splitlines() if re.search(r"/\*[0-9a-f]{4,5}\*/", line)]


def first_at(lines: list[str], pattern: str, start: int = 0) -> int:
    """Index of the first line from `start` on that the pattern is found in."""
    return next(i for i in range(start, len(lines)) if re.search(pattern, lines[i]))


def waits_first(lines: list[str]) -> int:
    """Index of the one wait for the kernel before: barriers are made ahead of it, and memory is not touched."""
    waits = [i for i, line in enumerate(lines) if "ACQBULK" in line]
    assert len(waits) == 1
    made = [i for i, line in enumerate(lines) if "SYNCS.EXCH.64" in line]
    assert made and made[-1] < waits[0] < first_at(lines, MEMORY)
    return waits[0]


def used_at(lines: list[str], load: int) -> int:
    """Index of the first line that uses what the load from global memory in line `load` brings."""
    register = re.search(r"LDG\.E (R\d+),", lines[load])
    assert register is not None, lines[load]
    return first_at(lines, rf"\b{register.group(1)}\b", load + 1)


def overwritten_operands(sass: str) -> list[str]:
    """Instructions that write a register in which a product in flight with V may still read its A operand."""
    live: set[int] = set()
    found = []
    for line in sass.splitlines():
        matched = re.match(r"\s+/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+ )?(.*?)\s*;", line)
        if not matched:
            continue
        text = matched.group(1)
        product = re.match(r"HGMMA\.64x256\S* R\d+, R(\d+), gdesc", text)
        if product:
            live |= set(range(int(product.group(1)), int(product.group(1)) + 4))
        elif re.match(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x0|EXIT", text):
            live.clear()
        else:
            written = re.match(r"(\S+) (?:U?PT?\d?, )?R(\d+)\b", text)
            if written and not written.group(1).startswith(("ST", "HGMMA")) and int(written.group(2)) in live:
                found.append(text)
    return found
