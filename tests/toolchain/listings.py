"""Listings of machine code, written for tests."""

from __future__ import annotations

HGMMA = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24"


def listing(*lines: str, name: str = "kernel") -> str:
    """A listing as cuobjdump writes it, an instruction every 16 bytes."""
    rows = [f"        /*{16 * i:04x}*/                   {text} ;  /* 0x00 */" for i, text in enumerate(lines)]
    return "\n".join(["code for sm_90a", f"\t\tFunction : {name}", *rows])
