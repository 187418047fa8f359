"""What all tests share: GPU tests are skipped, with the reason, on a machine without a GPU."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for what tests of several folders share

# Before torch is imported, here and in processes that tests start: several threads a test would wait for each other in
# small products wherever workers share cores, which took up to twenty times as long.
os.environ["OMP_NUM_THREADS"] = "1"


def _why_no_gpu() -> str | None:
    """None when torch can use a GPU. torch is imported only where a driver seems to be present: it takes seconds."""
    if shutil.which("nvidia-smi") is None and not Path("/dev/nvidiactl").exists():
        return "no NVIDIA driver here (nvidia-smi is missing)"
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU"
    return None


def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = _why_no_gpu() if marked else None
    if reason:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {reason}"))


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The checkout that is tested."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def module_at() -> Callable[[Path], Any]:
    """Loads a file that lies in no package, such as a script or an example, as a module of its name."""

    def loaded(path: Path) -> Any:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module  # where dataclasses look for their module
        spec.loader.exec_module(module)
        return module

    return loaded


@pytest.fixture(autouse=True, scope="session")
def _plain_output() -> Iterable[None]:
    """Messages are compared as text: no colours, and a width that does not depend on the terminal."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_COLOR", "1")
        patch.setenv("COLUMNS", "200")
        yield


@pytest.fixture(autouse=True, scope="session")
def _records_are_read_once(repo_root: Path) -> Iterable[None]:
    """The thousands of records of results/, which no test writes: reading them takes seconds, and many tests do."""
    try:
        from mla_var3 import record
    except ImportError:
        yield
        return
    kept: dict[Path, record.LoadResult] = {}
    read = record._load_file

    def load_file(path: Path, result: record.LoadResult) -> None:
        place = path.resolve()
        if not place.is_relative_to(repo_root / "results"):
            return read(path, result)
        if place not in kept:
            read(path, kept.setdefault(place, record.LoadResult()))
        result.records += kept[place].records
        result.problems += kept[place].problems
        return None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "_load_file", load_file)
        yield
