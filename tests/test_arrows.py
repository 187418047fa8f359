"""What lint-imports reads in the sources, seen at run time: no room, and no version, brings in what lies above it."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from mla_var3 import paths

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
    (rooms,) = (c for c in contracts if c.get("exhaustive"))
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
