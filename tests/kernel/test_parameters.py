"""Functions of CuTe versions have few parameters: what belongs together is a typed group with shapes."""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from mla_var3 import paths
from mla_var3.catalogue import registry
from mla_var3.workload.decode import MlaProblem

ROOT = Path(registry.__file__).parents[1] / "kernel" / "cute_python"
MOST, MOST_OF_A_LAUNCHER = 10, 12

#: What has more. It can only shrink: an entry that is no longer needed fails the test. All are host functions
#: that take a call's tensors one by one, as a compiled host function does.
LEFT_OVER = {
    "split_kv/launch.py:launch_decode": 16,
    "mla/flash_attention/flash_attention_v22/flash_attention_v22.py:launch_flash_attention": 13,
    "mla/flash_attention/flash_attention_v12/flash_attention_v12.py:launch_flash_attention": 13,
    "mla/flash_attention/flash_attention_v18/flash_attention_v18.py:launch_flash_attention": 13,
    "mla/flash_attention/flash_attention_v23/flash_attention_v23.py:launch_flash_attention": 16,
    "mla/sparse_mla_mma/sparse_mla_mma/sparse_mla_mma.py:launch_sparse_mla_mma": 15,
    "mla/sparse_mla/sparse_mla/sparse_mla.py:launch_sparse_mla": 18,
    "mla/sparse_mla/sparse_mla_v1/sparse_mla_v1.py:launch_sparse_mla_v1": 20,
    "mla/sparse_mla/sparse_mla_v2/sparse_mla_v2.py:launch_sparse_mla_v2": 20,
    "rope/indexed_append/indexed_append/indexed_append.py:launch_indexed_append": 17,
}


#: Names under which versions keep tensors: a tuple of them is a group without a name.
TENSORS = {"acc_o", "row_max", "row_sum", "results", "queries", "sink", "flags", "storage"}


def functions_of(text: str) -> Iterator[tuple[ast.FunctionDef, list[str]]]:
    """Functions of a file, each with the names of its parameters but self and cls."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            given = node.args
            names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
            yield node, [name for name in names if name not in ("self", "cls")]


def too_many(where: str, text: str) -> dict[str, int]:
    """Functions of a file with too many parameters: place -> how many."""
    found = {}
    for node, names in functions_of(text):
        most = MOST_OF_A_LAUNCHER if node.name.startswith("launch") else MOST
        if len(names) > most:
            found[f"{where}:{node.name}"] = len(names)
    return found


def modules_in(text: str) -> set[str]:
    """Names that a file imports modules of split-KV and primitives under."""
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and re.search(r"cute_python\.(split_kv|prims)$", node.module or ""):
            names |= {each.asname or each.name for each in node.names}
    return names


def files() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def place_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def test_functions_have_few_parameters() -> None:
    found: dict[str, int] = {}
    for file in files():
        found |= too_many(place_of(file), file.read_text(encoding="utf-8"))
    assert found == LEFT_OVER


def test_a_function_with_too_many_parameters_is_found() -> None:
    many = ", ".join(f"x{i}" for i in range(11))
    assert too_many("a.py", f"def consume({many}): pass\n") == {"a.py:consume": 11}
    assert too_many("a.py", f"def launch_it({many}): pass\n") == {}
    assert too_many("a.py", f"class A:\n    def run(self, {many}): pass\n") == {"a.py:run": 11}


@pytest.mark.parametrize("file", files(), ids=place_of)
def test_no_parameter_has_the_name_of_a_module(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    modules = modules_in(text)
    taken = {f"{node.name}({name})" for node, names in functions_of(text) for name in names if name in modules}
    assert not taken


@pytest.mark.parametrize("file", files(), ids=place_of)
def test_groups_of_parameters_have_names(file: Path) -> None:
    # A group that is indexed with numbers, or unpacked from a tuple made at the call, does not say what it holds.
    text = file.read_text(encoding="utf-8")
    assert not re.findall(r"(?<!\.)\b(?:registers|tensors)\[\d\]", text)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            packed = [each for each in node.args if isinstance(each, ast.Tuple) and len(each.elts) > 1]
            names = {part.id for each in packed for part in each.elts if isinstance(part, ast.Name)}
            assert not names & TENSORS, node.func.id


def test_techniques_that_versions_name_have_pages() -> None:
    root = paths.repo_root()
    assert root is not None
    pages = root / "docs" / "knowledge" / "optimizations"
    named = {}
    for kernel in registry.all_kernels():
        if kernel.language == "cute-dsl":
            named[kernel.label] = registry.get_plan(kernel).uses
    assert named["cute-dsl/flash_mla_v23"] and named["cute-dsl/flash_mla_v24"] and named["cute-dsl/sparse_mla_v1"]
    for label, uses in named.items():
        assert list(uses) == sorted(set(uses)), label
        assert not [name for name in uses if not (pages / f"{name}.md").is_file()], label


@pytest.mark.parametrize("module", ["mla.flash_mla.flash_mla_v23.flash_mla_v23", "mla.flash_mla.flash_mla.flash_mla"])
def test_two_stages_are_the_schedule_and_no_number(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.import_module(f"mla_var3.kernel.cute_python.{module}")
    tiling = next(
        each for name, each in vars(version).items() if name.endswith("Tiling") and name.startswith("FlashMla")
    )
    # With 256 columns a third stage would fit into shared memory.
    pd = MlaProblem(b=1, t=512, h=128, k=256)
    assert tiling().validate(pd)
    monkeypatch.setattr(version, "STAGES", 3)
    assert "STAGES = 3" in tiling().validate(pd).reason
