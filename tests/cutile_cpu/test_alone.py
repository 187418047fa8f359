"""The interpreter for somebody who has nothing else of this package, with each release of cuda-tile that it follows."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import cuda.tile as ct
import pytest
from packaging.requirements import Requirement

from mla_var3.cutile_cpu import CUDA_TILE_RELEASES

#: `make test` puts other releases here, a folder each.
OTHERS = sorted(Path(sys.prefix).glob("cuda-tile-*"))


def _python(*arguments: str, path: list[Path]) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=env, text=True, capture_output=True, timeout=200, check=False)


def test_the_extra_asks_for_the_releases_that_are_followed(repo_root: Path) -> None:
    extras = tomllib.loads((repo_root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (asked,) = map(Requirement, extras["cutile-cpu"])
    assert asked.name == "cuda-tile"
    major, minor = map(int, CUDA_TILE_RELEASES[-1].split("."))
    for release in CUDA_TILE_RELEASES:
        assert asked.specifier.contains(f"{release}.0")
    assert not asked.specifier.contains(f"{major}.{minor + 1}.0")
    assert ct.__version__.rsplit(".", 1)[0] in CUDA_TILE_RELEASES


def test_nothing_else_is_imported(repo_root: Path, tmp_path: Path) -> None:
    program = tmp_path / "alone.py"
    program.write_text("""
import importlib, pkgutil, sys
import cuda.tile as ct, torch
from mla_var3 import cutile_cpu

@ct.kernel
def double(x):
    ct.store(x, (0,), ct.load(x, (0,), (8,)) * 2)

x = torch.ones(8)
cutile_cpu.launch((1,), double, (x,))
assert x.tolist() == [2.0] * 8
for module in pkgutil.walk_packages(cutile_cpu.__path__, "mla_var3.cutile_cpu."):
    importlib.import_module(module.name)
print(*sorted(m for m in sys.modules if m.startswith("mla_var3") and not m.startswith("mla_var3.cutile_cpu")))
print(*sorted({"cutlass", "hydra", "altair", "pandas", "triton", "tvm_ffi"} & set(sys.modules)))
""")
    done = _python(str(program), path=[repo_root / "src"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["mla_var3", ""]


def test_every_release_has_its_folder() -> None:
    if not OTHERS:
        pytest.skip(f"only cuda-tile {ct.__version__} is here: make test installs the others")
    here = {ct.__version__, *(p.name.removeprefix("cuda-tile-") for p in OTHERS)}
    assert {v.rsplit(".", 1)[0] for v in here} == set(CUDA_TILE_RELEASES)


@pytest.mark.slow
@pytest.mark.parametrize("folder", OTHERS, ids=lambda p: p.name)
def test_another_release(folder: Path, repo_root: Path) -> None:
    """The cases of every operation, blocks and memory, in a process that has the other release."""
    code = "import cuda.tile; print(cuda.tile.__version__)"
    path = [folder, repo_root / "src"]
    assert _python("-c", code, path=path).stdout.strip() == folder.name.removeprefix("cuda-tile-")
    files = [str(Path(__file__).parent / f"test_{name}.py") for name in ("completeness", "memory", "blocks")]
    done = _python("-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *files, path=path)
    assert done.returncode == 0, done.stdout[-4000:]
