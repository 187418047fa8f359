"""Written by tests/cutile_cpu/refusals.py from what the compiler of cuda-tile 1.7.0 refuses."""

from __future__ import annotations

_SMALL = ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")
_FLOATS = ("float16", "bfloat16", "float32", "float64")
_UNSIGNED = ("uint8", "uint16", "uint32", "uint64")
_INTEGERS = ("int8", "int16", "int32", "int64", *_UNSIGNED)

#: (operation, detail) -> data types with which the front end makes IR of it and the compiler refuses it, for every GPU.
REFUSED: dict[tuple[str, str], tuple[str, ...]] = {
    ("!=", ""): _SMALL,
    ("//", ""): _UNSIGNED,
    ("<", ""): _SMALL,
    ("<=", ""): _SMALL,
    ("==", ""): _SMALL,
    (">", ""): _SMALL,
    (">=", ""): _SMALL,
    ("abs", ""): _SMALL,
    ("astype", "to float8_e8m0fnu"): (*_INTEGERS, "bool_"),
    ("atan2", ""): _INTEGERS,
    ("cdiv", ""): _FLOATS,
    ("ceil", ""): _SMALL,
    ("cos", ""): _SMALL,
    ("cosh", ""): _SMALL,
    ("exp", ""): _SMALL,
    ("exp2", ""): _SMALL,
    ("floor", ""): _SMALL,
    ("load", "padding_mode NAN"): (*_INTEGERS, "bool_"),
    ("load", "padding_mode NEG_INF"): (*_INTEGERS, "bool_", "float8_e4m3fn", "float8_e8m0fnu"),
    ("load", "padding_mode NEG_ZERO"): (*_INTEGERS, "bool_", "float8_e8m0fnu"),
    ("load", "padding_mode POS_INF"): (*_INTEGERS, "bool_", "float8_e4m3fn", "float8_e8m0fnu"),
    ("load with traversal_steps", "padding_mode NAN"): (*_INTEGERS, "bool_"),
    ("load with traversal_steps", "padding_mode NEG_INF"): (*_INTEGERS, "bool_", "float8_e4m3fn", "float8_e8m0fnu"),
    ("load with traversal_steps", "padding_mode NEG_ZERO"): (*_INTEGERS, "bool_", "float8_e8m0fnu"),
    ("load with traversal_steps", "padding_mode POS_INF"): (*_INTEGERS, "bool_", "float8_e4m3fn", "float8_e8m0fnu"),
    ("load_advanced_indexing", "padding_mode NAN"): (*_INTEGERS, "bool_", "float8_e8m0fnu"),
    ("load_advanced_indexing", "padding_mode NEG_INF"): (*_INTEGERS, "bool_", "float8_e8m0fnu"),
    ("load_advanced_indexing", "padding_mode NEG_ZERO"): (*_INTEGERS, "bool_", "float8_e8m0fnu"),
    ("load_advanced_indexing", "padding_mode POS_INF"): (*_INTEGERS, "bool_", "float8_e8m0fnu"),
    ("load_advanced_indexing", "padding_mode UNDETERMINED"): ("float8_e8m0fnu",),
    ("load_advanced_indexing", "padding_mode ZERO"): ("float8_e8m0fnu",),
    ("log", ""): _SMALL,
    ("log2", ""): _SMALL,
    ("negative", ""): _SMALL,
    ("permute", "rank 0"): ("any data type",),
    ("permute", "rank 1"): ("any data type",),
    ("pow", ""): _INTEGERS,
    ("reduce", ""): _SMALL,
    ("rsqrt", ""): _SMALL,
    ("scan", ""): _SMALL,
    ("sin", ""): _SMALL,
    ("sinh", ""): _SMALL,
    ("sqrt", ""): _SMALL,
    ("tan", ""): _SMALL,
    ("tanh", ""): _SMALL,
}
