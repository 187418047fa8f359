"""The interpreter against the compiler: the same kernels and inputs on a GPU, and what both wrote.

Allowed differences are those of `cutile_cases`: none for integers, moves, comparisons, conversions and correctly
rounded arithmetic; a few units in the last place for elementary functions and for sums whose order is open.
`gpu_compare.py` does the same in several processes.
"""

# ruff: noqa: E402 - the imports below need what importorskip found
from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")

from gpu_compare import case_names, compare

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", case_names())
def test_the_same_result(name: str) -> None:
    outcome, text = compare(name)
    assert outcome in ("same", "refused"), text


@pytest.mark.parametrize("page", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_the_decode_kernel_gives_the_same(causal: bool, page: int) -> None:
    from mla_var3.kernel.cutile.mla.flash_mla.flash_mla.flash_mla import FlashMlaPlan, FlashMlaTiling
    from mla_var3.workload.decode import MlaProblem

    problem = MlaProblem(b=3, s=2, h=16, t=300, lengths=(300, 65, 1), causal=causal, page=page)
    inputs = FlashMlaPlan(problem).prepare_inputs("cpu")
    results = []
    for device in ("cuda", "cpu"):
        given = [t.to(device) for t in inputs]
        # The same splits on both: the number is otherwise chosen from the GPU's multiprocessors.
        plan = FlashMlaPlan(problem, FlashMlaTiling(True, 16, num_splits=3))
        results.append([t.cpu().float() for t in plan.plan(*given)()])
    for compiled, interpreted in zip(*results, strict=True):
        # Both round P and out to bf16; sums differ in their order.
        torch.testing.assert_close(interpreted, compiled, rtol=2e-2, atol=2e-4)
