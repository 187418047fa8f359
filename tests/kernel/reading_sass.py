"""Reading SASS: what must not stand beside products in flight."""

from __future__ import annotations

import re
from collections.abc import Iterator


def instructions(sass: str) -> Iterator[str]:
    """Instructions without their predicates."""
    for line in sass.splitlines():
        if matched := re.match(r"\s+/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+ )?(.*?)\s*;", line):
            yield matched.group(1)


def overwritten_operands(sass: str) -> list[str]:
    """Instructions that write a register in which a product in flight with V may still read its A operand."""
    live: set[int] = set()
    found = []
    for text in instructions(sass):
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


def overwritten_in_groups(sass: str) -> list[str]:
    """`overwritten_operands` of products of any shape with A in registers, of kernels that wait for groups of them:
    instructions that write a register that a product may still read."""
    groups: list[set[int]] = []
    current: set[int] = set()
    found = []
    for text in instructions(sass):
        if text.startswith("HGMMA"):
            if a := re.match(r"HGMMA\S* R\d+, R(\d+), gdesc", text):
                current |= set(range(int(a.group(1)), int(a.group(1)) + 4))
            if "gsb0" in text:
                groups, current = [*groups, current], set()
        elif waited := re.match(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\w+)", text):
            left = int(waited.group(1), 16)
            groups = groups[len(groups) - left :] if left < len(groups) else groups
        elif text.startswith(("EXIT", "RET")):
            groups, current = [], set()
        elif written := re.match(r"(\S+) (?:U?PT?\d?, )?R(\d+)\b", text):
            words = 4 if re.search(r"\.128|LDSM.*\.4$", written.group(1)) else 2 if ".64" in written.group(1) else 1
            registers = set(range(int(written.group(2)), int(written.group(2)) + words))
            if not written.group(1).startswith("ST") and registers & set().union(current, *groups):
                found.append(text)
    return found
