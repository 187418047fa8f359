"""Reading SASS: what must not stand beside products in flight."""

from __future__ import annotations

import re


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
