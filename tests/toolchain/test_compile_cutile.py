"""cuTile kernels compile for sm_90 without a GPU; a tile that misses the tensor cores' fast path is found out."""

# ruff: noqa: E402 - the imports below need what importorskip found
from __future__ import annotations

from pathlib import Path

import pytest

from mla_var3.device import Device

ct = pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")

from cuda.tile.compilation import ArrayConstraint, CallingConvention, KernelSignature

from mla_var3.toolchain.cutile import compile_cutile
from mla_var3.toolchain.resources import off_tensor_cores

H200 = Device.get("h200")
ConstInt = ct.Constant[int]


@ct.kernel
def tile_gemm(a, b, c, tile_m: ConstInt, tile_n: ConstInt, tile_k: ConstInt):  # (M, K), (K, N), (M, N), all bf16
    i, j = ct.bid(0), ct.bid(1)
    acc = ct.zeros((tile_m, tile_n), ct.float32)
    for k in range(ct.num_tiles(a, 1, (tile_m, tile_k))):
        x = ct.load(a, (i, k), (tile_m, tile_k))
        y = ct.load(b, (k, j), (tile_k, tile_n))
        acc = ct.mma(x, y, acc)
    ct.store(c, (i, j), ct.astype(acc, ct.bfloat16))


def signature(*tile: int) -> KernelSignature:
    matrix = ArrayConstraint(
        ct.bfloat16,
        2,
        index_dtype=ct.int32,
        stride_lower_bound_incl=0,
        alias_groups=(),
        may_alias_internally=False,
        stride_constant=(None, 1),
        stride_divisible_by=(8, 1),
        shape_divisible_by=(8, 8),
        base_addr_divisible_by=16,
    )
    return KernelSignature([matrix] * 3 + list(tile), CallingConvention.cutile_python_v1())


def test_a_fitting_tile_uses_hgmma_and_tma(tmp_path: Path) -> None:
    made = compile_cutile(tile_gemm, signature(64, 64, 64), device=H200, out_dir=tmp_path)
    count = made.resources.instructions
    assert made.name == "tile_gemm"
    assert count["HGMMA"] > 0 and count["HMMA"] == 0 and count["UTMALDG"] > 0 and count["UTMASTG"] > 0
    assert made.warnings == ()
    assert made.resources.threads % 128 == 0 and made.resources.threads > 0
    assert 0 < made.resources.smem_static <= H200.smem_per_block
    assert set(made.artefacts) == {"cubin", "sass", "tileir"}
    assert "HGMMA" in made.artefacts["sass"].read_text()


def test_a_tile_with_too_few_rows_is_flagged_as_fallback() -> None:
    made = compile_cutile(tile_gemm, signature(32, 32, 32), device=H200)
    assert made.resources.instructions["HGMMA"] == 0 < made.resources.instructions["HMMA"]
    assert any("falls off the tensor-core path of sm_90a" in w and "no warpgroup" in w for w in made.warnings)
    usual = compile_cutile(tile_gemm, signature(64, 64, 64), device=H200)
    assert off_tensor_cores(made, usual, H200).startswith("tile_gemm falls off the tensor-core path of sm_90a: ")
    assert off_tensor_cores(usual, None, H200) == "" == off_tensor_cores(usual, usual, H200)
    assert off_tensor_cores(made, usual, Device.get("a100")) == ""


def test_a_tile_too_large_for_the_registers_is_flagged_as_spilling() -> None:
    made = compile_cutile(tile_gemm, signature(256, 256, 32), device=H200)
    assert made.resources.spill_bytes > 1000
    assert made.warnings[0].startswith("spills registers")
