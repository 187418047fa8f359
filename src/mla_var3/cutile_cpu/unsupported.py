"""What the interpreter does not run: the published list, also in docs/cutile_cpu.md."""

from __future__ import annotations

from typing import Any

from mla_var3.cutile_cpu.refused import REFUSED

#: Opcode of cuTile's IR -> why it is not interpreted. Refused when the kernel is prepared, with its line.
UNSUPPORTED: dict[str, str] = {
    "reinterpret_pointer": "typed pointers exist in cuda.lang only; no function of cuda.tile makes one",
    "address_space_cast": "address spaces exist in cuda.lang only; no function of cuda.tile makes one",
}

#: Uses of interpreted operations that are refused all the same: (what, why).
UNSUPPORTED_USES: tuple[tuple[str, str], ...] = (
    ("arrays of float4_e2m1fn", "elements of 4 bits have no address; pack them with pack_to_bytes"),
    ("`//` of unsigned integers", "the compiler refuses it for every GPU; convert to a signed type first, or shift"),
    ("calls of cuda.tile_preview", "they go into device libraries, which have no CPU code"),
    ("dataclasses as kernel arguments", "cuda-tile itself has them behind a development switch"),
)

#: (operation, detail, data type) of an operation of cuTile's IR, as the table `refused.REFUSED` has them.
Use = tuple[str, str, str]

#: Opcode -> (its operand whose data type counts, its name in the table: "" for the name of its function).
_JUDGED = {
    "fma": ("lhs", "a * b + c"),
    "raw_binary_arith": ("lhs", ""),
    "raw_binary_bitwise": ("lhs", ""),
    "raw_bitwise_shift": ("lhs", ""),
    "raw_cmp": ("lhs", ""),
    "raw_fpowi": ("base", "pow"),
    "raw_where": ("x", "where"),
    "tile_astype": ("x", "astype"),
    "tile_broadcast": ("x", "broadcast_to"),
    "tile_cat": ("x", "cat"),
    "tile_extract": ("x", "extract"),
    "tile_insert": ("x", "insert"),
    "tile_mma": ("x", "mma"),
    "tile_permute": ("x", "permute"),
    "tile_reduce": ("xs", "reduce"),
    "tile_reshape": ("x", "reshape"),
    "tile_scan": ("xs", "scan"),
    "unaryop": ("operand", ""),
}
#: Opcode that makes a view -> the load that uses it; a view that is only stored to has no padding.
_VIEWS = {
    "make_partition_view": "load",
    "make_strided_view": "load with traversal_steps",
    "make_gather_scatter_view": "load_advanced_indexing",
}
#: Functions of the IR that kernels write in another way.
_WRITTEN = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "floordiv": "//", "neg": "negative"}


def use_of(op: Any) -> Use | None:
    """What an operation of the final IR is in the table of refusals; None for one that the table does not judge."""
    opcode = op.op
    if opcode in _VIEWS:
        view = op.result_vars[0].get_type()
        return _VIEWS[opcode], f"padding_mode {view.padding_mode.name}", str(view.array_ty.dtype)
    if opcode not in _JUDGED:
        return None
    operand, name = _JUDGED[opcode]
    var = getattr(op, operand)
    ty = (var[0] if isinstance(var, tuple) else var).get_type()
    detail, dtype = "", str(ty.dtype)
    if opcode == "tile_mma":
        detail = f"with {op.y.get_type().dtype} into {op.acc.get_type().dtype}"
    elif opcode == "tile_astype":
        detail = f"to {op.result_vars[0].get_type().dtype}"
    elif opcode == "tile_permute":
        detail, dtype = f"rank {len(ty.shape)}", "any data type"
    elif opcode in ("tile_reshape", "tile_extract", "tile_broadcast", "tile_cat", "tile_insert"):
        detail = f"rank {len(ty.shape)}"
    return name or _WRITTEN.get(op.fn, op.fn), detail, dtype


def is_refused(use: Use) -> bool:
    """Whether cuTile's compiler refuses the operation with this data type."""
    operation, detail, dtype = use
    return dtype in REFUSED.get((operation, detail), ())


def advice(use: Use) -> str:
    """What to write in the place of a refused use."""
    operation, detail, dtype = use
    if detail.startswith("padding_mode"):
        if not is_refused((operation, "padding_mode ZERO", dtype)):
            return "load with PaddingMode.ZERO and choose the value with ct.where"
        return "pass the array's bytes as uint8 and take the tile's type with ct.bitcast"
    if operation == "permute":
        return "leave it out, since a tile of fewer than two dimensions has one order only"
    if operation == "//":
        return "convert to a signed type first, or shift"
    if operation == "cdiv":
        return "write ct.ceil(x / y)"
    return "convert to float32 first, with ct.astype"
