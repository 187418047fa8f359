"""`experiment=compile_matrix` with the designs for every GPU since Ampere, for two architectures that none of our GPUs
has: what it refuses, code that spills registers in the loop of products, is refused in CI."""

from __future__ import annotations

from pathlib import Path

import pytest

from mla_var3.lab.sweep import run as sweep
from mla_var3.record import load

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

DECODE, SPARSE = "cute-dsl/flash_mla_mma_v1", "cute-dsl/sparse_mla_mma"
#: sm_86 and sm_120, with versions that compute such calls there.
DESIGNS = {
    "a40": ("cute-dsl/flash_attention_mma", DECODE, "cute-dsl/flash_mla_mma_v3", SPARSE),
    "rtx5090": (DECODE, SPARSE),
}
CELLS = (
    "[{b: 128, h: 128, t: 4096}, {workload: sparse_decode, b: 128, h: 128, topk: 2048}, "
    "{workload: prefill, b: 1, s: 4096, h: 16, causal: true}]"
)


@pytest.mark.slow
@pytest.mark.parametrize(("device", "designs"), DESIGNS.items(), ids=str)
def test_designs_for_every_gpu_compile_without_spills_in_the_loop(
    device: str, designs: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [f"kernels=[{','.join(designs)}]", f"device={device}", f"experiment.cells={CELLS}", "jobs=1"]
    assert sweep.main(["experiment=compile_matrix", "experiment.targets=device", *words]) == 0
    found = load(tmp_path / "out" / "results").records
    assert sorted((record.device, record.kernel.label) for record in found) == [(device, label) for label in designs]
    for record in found:
        assert record.status == "compiled", record.reason
        assert record.resources is not None and record.resources["spill_loop_bytes"] == 0
