"""The kernels behind the limits, in Triton's interpreter: they move what they say they move."""

from __future__ import annotations

import pytest

from running import in_tritons_interpreter

pytest.importorskip("triton")

SCRIPT = """
import torch
from mla_var3.measure import read_kernel

x = torch.arange(1, 2 * read_kernel.BLOCK + 1, dtype=torch.int32)
half = x.clone()
read_kernel.launch_copy(*half.chunk(2))
assert torch.equal(half[read_kernel.BLOCK :], x[: read_kernel.BLOCK])

for words, pitch in ((32, 288), (32, 32), (24, 100)):
    y = x.clone()
    rows = read_kernel.launch_copy_rows(y, words, pitch)
    assert rows * (words + pitch) <= y.numel() < (rows + 64) * (words + pitch)
    front, behind = y[: rows * words], y[rows * words :]
    assert torch.equal(front, x[: rows * words])  # rows in order, which are only read
    target = behind[: rows * pitch].view(rows, pitch)
    assert torch.equal(target[:, :words], front.view(rows, words))
    assert torch.equal(target[:, words:], x[rows * words :][: rows * pitch].view(rows, pitch)[:, words:])
print("moved")
"""


def test_copies_move_every_row_and_nothing_beside_it() -> None:
    assert "moved" in in_tritons_interpreter("-c", SCRIPT)
