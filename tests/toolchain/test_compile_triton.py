"""Triton kernels compile for sm_90 without a GPU."""

# ruff: noqa: E402 - the imports below need what importorskip found
from __future__ import annotations

from pathlib import Path

import pytest

from mla_var3.device import Device
from mla_var3.errors import UserError

triton = pytest.importorskip("triton", reason="triton is not installed")

import triton.language as tl

from mla_var3.toolchain.triton_ import compile_triton

H200 = Device.get("h200")
pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
SIGNATURE = {"a": "*bf16", "b": "*bf16", "c": "*fp32", "size": "i32:16"}
TILES = {"BM": 64, "BN": 64, "BK": 64}


@triton.jit
def block_gemm(a, b, c, size, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # (BM, size), (size, BN), (BM, BN)
    rows, cols, depth = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, size, BK):
        x = tl.load(a + rows[:, None] * size + (k + depth)[None, :])
        y = tl.load(b + (k + depth)[:, None] * BN + cols[None, :])
        acc = tl.dot(x, y, acc)
    tl.store(c + rows[:, None] * BN + cols[None, :], acc)


def compiled(tile: tuple[int, int, int], **options: object):
    constexprs = dict(zip(("BM", "BN", "BK"), tile, strict=True))
    return compile_triton(block_gemm, SIGNATURE, constexprs, device=H200, **options)


def test_gemm(tmp_path: Path) -> None:
    made = compiled((64, 64, 64), num_warps=4, num_stages=3, out_dir=tmp_path, keep=("ptx", "ttgir", "cubin"))
    taken = made.resources
    assert taken.instructions["HGMMA"] > 0 == taken.instructions["HMMA"]
    assert taken.instructions["LDGSTS"] > 0
    assert (taken.threads, taken.spill_bytes, taken.smem_static) == (128, 0, 0)
    assert taken.smem_dynamic >= 2 * (64 * 64 * 2) * 2
    assert taken.ctas_per_sm >= 1
    assert [w.split(" (")[0] for w in made.warnings] == ["loads its operands without TMA"]
    assert set(made.artefacts) == {"ptx", "ttgir", "cubin"}


def test_what_tritons_cache_had_says_nothing_of_the_time_to_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    first, second = compiled((16, 32, 32)), compiled((16, 32, 32))
    assert first.seconds and first.seconds > 0.01 and second.seconds is None
    assert first.resources == second.resources and triton.knobs.compilation.listener is None


def test_rows_below_a_warpgroup_fall_back() -> None:
    made = compiled((16, 64, 64))
    assert made.resources.instructions["HGMMA"] == 0 < made.resources.instructions["HMMA"]
    assert "falls off the tensor-core path" in made.warnings[0]


def test_too_much_shared_memory_is_named() -> None:
    with pytest.raises(UserError, match="over the 232,448"):
        compiled((128, 128, 128), num_stages=6, num_warps=8)


def test_a_wrong_signature_names_the_argument() -> None:
    with pytest.raises(UserError, match="lacks size"):
        compile_triton(block_gemm, {"a": "*bf16", "b": "*bf16", "c": "*fp32"}, TILES, device=H200)
    with pytest.raises(UserError, match="no argument d"):
        compile_triton(block_gemm, SIGNATURE | {"d": "i32"}, TILES, device=H200)
    with pytest.raises(UserError, match="decorate it with"):
        compile_triton(print, SIGNATURE, {}, device=H200)
