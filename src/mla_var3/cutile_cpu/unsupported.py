"""What the interpreter does not run: the published list, also in docs/cutile_cpu.md."""

from __future__ import annotations

#: Opcode of cuTile's IR -> why it is not interpreted. Refused when the kernel is prepared, with its line.
UNSUPPORTED: dict[str, str] = {
    "reinterpret_pointer": "typed pointers exist in cuda.lang only; no function of cuda.tile makes one",
    "address_space_cast": "address spaces exist in cuda.lang only; no function of cuda.tile makes one",
}

#: Uses of interpreted operations that are refused all the same: (what, why).
UNSUPPORTED_USES: tuple[tuple[str, str], ...] = (
    ("arrays of float4_e2m1fn", "elements of 4 bits have no address; pack them with pack_to_bytes"),
    ("`//` of unsigned integers", "tileiras refuses it for every GPU; convert to a signed type first, or shift"),
    ("calls of cuda.tile_preview", "they go into device libraries, which have no CPU code"),
    ("dataclasses as kernel arguments", "cuda-tile itself has them behind a development switch"),
)
