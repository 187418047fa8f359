"""The arrows between rooms and files: that lint-imports refuses what it is to refuse, and what it reads in the sources
seen at run time, where no room, and no version, brings in what lies above it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from mla_var3 import paths
from mla_var3.catalogue import registry

PROGRAM = """
import json, sys

import mla_var3
from mla_var3.catalogue import registry

def rooms():
    return {name.split(".")[1] for name in sys.modules if name.startswith("mla_var3.")}

brought = {}
for kernel in registry.all_kernels():
    if registry.missing(kernel.language):
        continue
    before = set(sys.modules)
    registry.get_plan(kernel)
    brought[kernel.label] = sorted(x for x in set(sys.modules) - before if x.startswith("mla_var3.kernel."))
print(json.dumps({"rooms": sorted(rooms()), "brought": brought}))
"""


def layers(root: Path) -> list[set[str]]:
    """The rooms from the top down, as pyproject.toml has them for lint-imports."""
    contracts = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (rooms,) = (c for c in contracts if c.get("exhaustive") and c["containers"] == ["mla_var3"])
    return [{name.strip() for name in layer.split("|")} for layer in rooms["layers"]]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        env={
            "PATH": "",
            "PYTHONPATH": str(paths.import_root()),
            "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("home")),
        },
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_loading_every_version_brings_in_no_room_above_the_kernels(loaded: dict, repo_root: Path) -> None:
    order = layers(repo_root)
    at = next(i for i, layer in enumerate(order) if "kernel" in layer)
    above = set().union(*order[:at])
    assert above >= {"cli", "lab", "measure", "ops", "dispatch", "check"}
    assert "kernel" in loaded["rooms"] and not above & set(loaded["rooms"])


def test_a_version_brings_in_primitives_and_no_other_version(loaded: dict) -> None:
    assert len(loaded["brought"]) > 5
    for label, modules in loaded["brought"].items():
        language, _, name = label.partition("/")
        # kernel.<language>.<layer>.<design>.<version>, and kernel.peer.<file>: what a version is.
        versions = [m.split(".")[5] for m in modules if m.count(".") > 4]
        assert set(versions) <= {name}, label
        files = [m for m in modules if m.startswith("mla_var3.kernel.peer.")]
        assert len(files) <= (language == "peer"), label


def test_every_room_has_its_place(repo_root: Path) -> None:
    package = paths.package()
    found = {p.stem for p in package.glob("*.py")} | {p.parent.name for p in package.glob("*/__init__.py")}
    assert set().union(*layers(repo_root)) == found - {"__init__", "data", "conf"}


# ---------------------------------------------------------------- planted
def planted_arrows() -> list[tuple[str, str, str]]:
    """(contract, importing module, imported module): arrows that the contracts of versions refuse, in every layer
    of every language."""
    kernels = [k for k in registry.all_kernels() if k.language != "peer"]
    first = {(k.language, k.layer): k for k in reversed(kernels)}
    found = []
    for kernel in first.values():
        other = next(k for k in kernels if k.design != kernel.design)
        found.append(("A version imports no other version", kernel.module, other.module))
        found.append(("A version knows no catalogue", kernel.module, "mla_var3.catalogue.libraries"))
    for language in {language for language, _ in first}:
        folder = registry.LANGUAGES[language].folder
        prims = min((paths.package() / "kernel" / folder / "prims").glob("[a-z]*.py")).stem
        target = next(k.module for k in kernels if k.language == language)
        found.append(("A primitive knows no version", f"mla_var3.kernel.{folder}.prims.{prims}", target))
    peers = "mla_var3.kernel.peer"
    return [
        *found,
        ("A version imports no other version", f"{peers}.mla_torch", f"{peers}.norm"),
        ("A version imports no other version", f"{peers}.gemm", kernels[0].module),
        ("A primitive knows no version", "mla_var3.kernel.cute_python.split_kv.combine", kernels[0].module),
        (
            "A primitive knows no split-KV",
            "mla_var3.kernel.cute_python.prims.sync",
            "mla_var3.kernel.cute_python.split_kv.scheduler",
        ),
        ("What versions share knows no version", "mla_var3.kernel.layer", kernels[0].module),
        ("What versions share knows no version", "mla_var3.kernel.library", f"{peers}.rope"),
        (
            "A peer asks the catalogue for its library and nothing else",
            f"{peers}.merge",
            "mla_var3.catalogue.ledger",
        ),
    ]


def test_no_folder_hides_from_the_contracts() -> None:
    """import-linter follows packages: it would see nothing of a folder without `__init__.py`, as of a new design."""
    folders = {file.parent for file in paths.package().rglob("*.py")}
    assert not sorted(str(folder) for folder in folders if not (folder / "__init__.py").is_file())


def test_a_planted_arrow_is_refused_in_every_layer_of_every_language(repo_root: Path, tmp_path: Path) -> None:
    pytest.importorskip("importlinter")
    shutil.copytree(paths.package(), tmp_path / "mla_var3", ignore=shutil.ignore_patterns("__pycache__", "data"))
    shutil.copy(repo_root / "pyproject.toml", tmp_path)
    plants = planted_arrows()
    assert len({module for _, module, _ in plants}) > 25
    for _, module, other in plants:
        file = tmp_path.joinpath(*module.split(".")).with_suffix(".py")
        file.write_text(f"{file.read_text(encoding='utf-8')}import {other}\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-cache"],
        cwd=tmp_path, env={"PATH": "", "PYTHONPATH": str(tmp_path), "COLUMNS": "500"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    # A heading is underlined; what stands below it is the contract's.
    _, *parts = re.split(r"^(.+)\n-{5,}$", done.stdout.partition("Broken contracts")[2], flags=re.M)
    said = dict(zip(parts[::2], parts[1::2], strict=True))
    for contract, module, other in plants:
        assert f"{module} -> {other} (l." in said[contract], (contract, module, other)


# ---------------------------------------------------------------- what lint-imports refuses
CIRCLE = "No room has a circle"


def contracts(root: Path) -> list[dict]:
    found = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert len(found) > 5
    return found


def circles_of(root: Path, package: Path) -> subprocess.CompletedProcess[str]:
    """What lint-imports says of the circles in a package, by the contract of pyproject.toml alone."""
    (contract,) = (c for c in contracts(root) if c["name"] == CIRCLE)
    lines = [f"{key} = {json.dumps(value)}" for key, value in contract.items()]
    config = package.parent / "only_circles.toml"
    head = ["[tool.importlinter]", 'root_package = "mla_var3"', "[[tool.importlinter.contracts]]"]
    config.write_text("\n".join([*head, *lines]))
    return subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()",
         "--config", str(config), "--no-cache"],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(package.parent)}, timeout=120, check=False,
        cwd=package.parent,
    )  # fmt: skip


def planted(folder: Path, files: dict[str, str]) -> Path:
    """A package mla_var3 of these files, with the rooms that the contract names."""
    package = folder / "mla_var3"
    for name, text in {"lab/plain.py": "", **files}.items():
        file = package / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        for parent in (file.parent, *file.parent.parents):
            if parent == folder:
                break
            (parent / "__init__.py").touch()
    return package


@pytest.mark.parametrize(
    "files",
    [
        {"ops/a.py": "import mla_var3.ops.b", "ops/b.py": "def f():\n    from mla_var3.ops import a"},
        {
            "runtime/a.py": "from mla_var3.runtime.b import B",
            "runtime/b.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from mla_var3.runtime.a import A",
        },
        {
            "lab/sweep/a.py": "import mla_var3.lab.sweep.b", "lab/sweep/b.py": "import mla_var3.lab.sweep.c",
            "lab/sweep/c.py": "import mla_var3.lab.sweep.a",
        },
        {"kernel/x/prims/a.py": "import mla_var3.kernel.x.prims.b",
         "kernel/x/prims/b.py": "import mla_var3.kernel.x.prims.a"},
        {"cutile_cpu/ops/a.py": "import mla_var3.cutile_cpu.machine",
         "cutile_cpu/machine.py": "import mla_var3.cutile_cpu.ops.b", "cutile_cpu/ops/b.py": ""},
    ],
    ids=["in a function", "for types alone", "of three", "deep", "with a folder"],
)  # fmt: skip
def test_a_circle_of_files_is_refused(files: dict[str, str], tmp_path: Path, repo_root: Path) -> None:
    pytest.importorskip("importlinter")
    package = planted(tmp_path, files)
    done = circles_of(repo_root, package)
    assert done.returncode == 1 and "No cycles are allowed in mla_var3." in done.stdout, done.stdout + done.stderr
    (package / next(iter(files))).write_text("")
    assert circles_of(repo_root, package).returncode == 0, "without the planted circle"


def test_contracts_have_no_exceptions(repo_root: Path) -> None:
    for contract in contracts(repo_root):
        assert not contract.get("ignore_imports"), contract["name"]


def in_circles(imports: dict[str, set[str]]) -> set[str]:
    """Those of some modules that import themselves, through whatever others. imports: by module, what it imports."""
    left = dict(imports)
    while True:
        imported = {name for names in left.values() for name in names}
        ends = {name for name, names in left.items() if not names & left.keys() or name not in imported}
        if not ends:
            return set(left)
        left = {name: names for name, names in left.items() if name not in ends}


def test_no_file_of_the_package_is_in_a_circle() -> None:
    """The contract looks at files and folders of one folder, this at files of any two, and at `__init__.py`."""
    assert in_circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"c"}, "e": set()}) == {"b", "c"}
    grimp = pytest.importorskip("grimp")
    graph = grimp.build_graph("mla_var3", cache_dir=None)
    imports = {name: set(graph.find_modules_directly_imported_by(name)) for name in graph.modules}
    assert len(imports) > 300 and in_circles(imports) == set()
