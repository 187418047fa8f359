"""What the tests of this folder share is importable by them, and their small products of matrices take one thread."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    """Threads of torch that wait for each other make these tests thirty times slower where other programs run."""
    try:
        import torch
    except ImportError:
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
