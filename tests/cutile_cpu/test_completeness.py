"""Is every operation that cuTile's front end can emit implemented, or in the published list?"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cuda.tile as ct
import cutile_cases_more  # noqa: F401
import pytest
from cutile_cases import CASES

from mla_var3 import cutile_cpu
from mla_var3.cutile_cpu import frontend
from mla_var3.cutile_cpu.ops import FACTORIES, load_all


def _operations() -> dict[str, type]:
    import cuda.tile._ir as package
    from cuda.tile._ir.ir import Operation

    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)

    def below(cls: type) -> Iterator[type]:
        for child in cls.__subclasses__():
            yield child
            yield from below(child)

    # Operations that the package itself defines: a test may define its own.
    return {c._opcode: c for c in below(Operation) if c.__module__.startswith("cuda.tile.")}  # type: ignore[attr-defined]


def test_every_operation_is_implemented_or_listed() -> None:
    load_all()
    known = _operations()
    assert len(known) >= 59
    missing = set(known) - set(FACTORIES) - set(cutile_cpu.UNSUPPORTED)
    assert not missing, f"neither implemented nor in UNSUPPORTED: {sorted(missing)}"
    assert not set(FACTORIES) & set(cutile_cpu.UNSUPPORTED)
    newer = {"foreign_pointer_cast"} if ct.__version__.startswith("1.6.") else set()
    assert set(FACTORIES) | set(cutile_cpu.UNSUPPORTED) <= set(known) | newer, "an operation that cuTile does not have"


def test_every_function_of_one_value_and_of_two_is_implemented() -> None:
    """The operations with a `fn` attribute stand for many functions: cuTile's registries name them."""
    from cuda.tile._ir.ops_utils import BINOP_REGISTRY, UNARYOP_REGISTRY

    from mla_var3.cutile_cpu.dtypes import Dtype, dtype_of
    from mla_var3.cutile_cpu.ops import arith

    f32, i32 = dtype_of(ct.float32), dtype_of(ct.int32)
    assert isinstance(f32, Dtype)
    elsewhere = {"mod", "and_", "or_", "xor", "lshift", "rshift", "is", "eq", "ne", "lt", "le", "gt", "ge", "cdiv"}
    for name in set(BINOP_REGISTRY) - elsewhere:
        if not name.startswith("i") and name not in ("floordiv",):
            fn = "c_mod" if name == "mod" else name
            assert callable(arith._float_arith(fn, "RN", False, False, f32)), name
    for name in ("add", "sub", "mul", "floordiv", "cdiv", "c_mod", "min", "max"):
        assert all(map(callable, arith.int_arith(name, i32)))
    for name in set(UNARYOP_REGISTRY) - {"invert", "bitwise_not", "not_", "isnan"}:
        assert callable(arith._unary_float(name, "RN", False, f32)), name


def test_every_implemented_operation_runs_in_a_case() -> None:
    """What no case of `cutile_cases` runs has a test of its own, named here."""
    elsewhere = {
        "tile_printf": "test_operations.test_printing",
        "tile_mma_scaled": "test_operations.test_block_scaled_product",
        "tile_unpack": "test_operations.test_block_scaled_product",
        "tile_pack": "test_memory.test_bytes_there_and_back",
        "assert": "test_memory.test_assertions_name_the_line",
        "tile_atomic_red_view": "test_memory.test_atomic_store_of_a_tile",
        "grid_dependency_control_wait": "test_blocks.test_programmatic_launch_does_nothing",
        "grid_dependency_control_launch_dependents": "test_blocks.test_programmatic_launch_does_nothing",
        "make_dummy": "test_blocks.test_variables_that_are_not_always_set",
        "raw_fpowi": "test_memory.test_integer_powers",
        "tile_num_blocks": "test_blocks.test_block_ids",
        "assign": "no kernel: cuTile removes it before the final IR",
    }
    if ct.__version__.startswith("1.6."):
        elsewhere["foreign_pointer_cast"] = "since cuda-tile 1.7"
    load_all()
    seen: set[str] = set()
    for case in reversed(CASES):  # those with many operations are the last ones
        if set(FACTORIES) - seen <= set(elsewhere):
            break
        arguments = frontend.describe_arguments(case.kernel, case.inputs())
        seen |= frontend.program(case.kernel, arguments).opcodes
    assert set(FACTORIES) - seen <= set(elsewhere), sorted(set(FACTORIES) - seen - set(elsewhere))


def test_the_list_is_published(repo_root: Path) -> None:
    page = (repo_root / "docs" / "cutile_cpu.md").read_text()
    for name in cutile_cpu.UNSUPPORTED:
        assert f"`{name}`" in page
    for what, _ in cutile_cpu.UNSUPPORTED_USES:
        assert what in page


def test_an_unsupported_operation_is_refused_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    @ct.kernel
    def sums(x, out):
        t = ct.load(x, (0,), (8,))
        ct.store(out, (0,), ct.cumsum(t, 0))  # this line

    arguments: list[Any] = [torch.zeros(8), torch.zeros(8)]
    monkeypatch.setitem(cutile_cpu.UNSUPPORTED, "tile_scan", "a test")
    with pytest.raises(
        cutile_cpu.UnsupportedOperation, match=r"`tile_scan` \(a test\).*test_completeness.py:\d+.*this line"
    ):
        cutile_cpu.launch((1,), sums, arguments)
    monkeypatch.delitem(cutile_cpu.UNSUPPORTED, "tile_scan")
    monkeypatch.delitem(FACTORIES, "tile_scan")
    with pytest.raises(cutile_cpu.UnsupportedOperation, match="does not know the operation `tile_scan`"):
        cutile_cpu.launch((1,), sums, arguments)


def test_another_version_of_cuda_tile_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from mla_var3.cutile_cpu.errors import Misuse

    monkeypatch.setattr(ct, "__version__", "9.9.9")
    with pytest.raises(Misuse, match=r"written for cuda-tile 1\.6 to 1\.7 and this is 9\.9\.9: pip install") as error:
        cutile_cpu.launch((1,), CASES[0].kernel, CASES[0].inputs())
    assert "\n" not in str(error.value)
