"""CuTe kernels compile for sm_90a without a GPU, and what they take is read off correctly."""

# ruff: noqa: E402 - the imports below need what importorskip found
from __future__ import annotations

import re
from pathlib import Path

import pytest

from mla_var3.device import Device
from mla_var3.errors import Infeasible, UserError

cutlass = pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_compact_tensor
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from mla_var3.toolchain import resources, sass, spills
from mla_var3.toolchain.cute import compile_cute, fake_stream, load_cute

H200 = Device.get("h200")
TILE = 64
SLOTS = 300


@cute.kernel
def small_gemm(
    tma_a: cute.CopyAtom,
    a: cute.Tensor,  # (64, 64) bf16, K contiguous
    tma_b: cute.CopyAtom,
    b: cute.Tensor,  # (64, 64) bf16, K contiguous
    c: cute.Tensor,  # (64, 64) fp32
    mma: cute.TiledMma,
    layout_a: cute.ComposedLayout,
    layout_b: cute.ComposedLayout,
):
    tid, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    smem = SmemAllocator()
    barrier = smem.allocate_array(cutlass.Int64, 1)
    smem_a = smem.allocate_tensor(cutlass.BFloat16, layout_a.outer, byte_alignment=1024, swizzle=layout_a.inner)
    smem_b = smem.allocate_tensor(cutlass.BFloat16, layout_b.outer, byte_alignment=1024, swizzle=layout_b.inner)
    if warp == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_init(barrier, 1)
            cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    one = cute.make_layout(1)
    to_a, from_a = cpasync.tma_partition(
        tma_a, 0, one, cute.group_modes(smem_a[None, None, 0], 0, 2), cute.group_modes(a, 0, 2)
    )
    to_b, from_b = cpasync.tma_partition(
        tma_b, 0, one, cute.group_modes(smem_b[None, None, 0], 0, 2), cute.group_modes(b, 0, 2)
    )
    if warp == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, 2 * TILE * TILE * 2)
        cute.copy(tma_a, from_a, to_a, tma_bar_ptr=barrier)
        cute.copy(tma_b, from_b, to_b, tma_bar_ptr=barrier)
    cute.arch.mbarrier_wait(barrier, 0)
    mine = mma.get_slice(tid)
    frag_a = mma.make_fragment_A(mine.partition_A(smem_a))
    frag_b = mma.make_fragment_B(mine.partition_B(smem_b))
    out = mine.partition_C(c)
    acc = cute.make_rmem_tensor(out.shape, cutlass.Float32)
    mma.set(warpgroup.Field.ACCUMULATE, False)
    warpgroup.fence()
    for k in cutlass.range_constexpr(cute.size(frag_a, mode=[2])):
        cute.gemm(mma, acc, frag_a[None, None, k, 0], frag_b[None, None, k, 0], acc)
        mma.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()
    warpgroup.wait_group(0)
    cute.autovec_copy(acc, out)


@cute.jit
def launch_gemm(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, smem: cutlass.Constexpr[int], stream):
    major = OperandMajorMode.K
    mma = sm90.make_trivial_tiled_mma(
        cutlass.BFloat16, cutlass.BFloat16, major, major, cutlass.Float32, (1, 1, 1), (TILE, TILE)
    )
    tiler = (TILE, TILE, TILE)
    layout_a = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tiler, cutlass.BFloat16, 1)
    layout_b = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tiler, cutlass.BFloat16, 1)
    load = cpasync.CopyBulkTensorTileG2SOp()
    tma_a, src_a = cpasync.make_tiled_tma_atom(load, a, cute.slice_(layout_a, (None, None, 0)), (TILE, TILE))
    tma_b, src_b = cpasync.make_tiled_tma_atom(load, b, cute.slice_(layout_b, (None, None, 0)), (TILE, TILE))
    small_gemm(tma_a, src_a, tma_b, src_b, c, mma, layout_a, layout_b).launch(
        grid=(1, 1, 1), block=(128, 1, 1), smem=smem, stream=stream
    )


@cute.kernel
def spilling(x: cute.Tensor, y: cute.Tensor, n: cutlass.Int32):  # both (?,) fp32
    tid, _, _ = cute.arch.thread_idx()
    values = cute.make_rmem_tensor((SLOTS,), cutlass.Float32)
    for i in cutlass.range_constexpr(SLOTS):
        values[i] = x[tid * SLOTS + i]
    for _ in range(n):
        for i in cutlass.range_constexpr(SLOTS):
            values[i] = values[i] * values[(i * 7 + 3) % SLOTS] + 1.0
    for i in cutlass.range_constexpr(SLOTS):
        y[tid * SLOTS + i] = values[i]


@cute.jit
def launch_spilling(x: cute.Tensor, y: cute.Tensor, n: cutlass.Int32, stream):
    spilling(x, y, n).launch(grid=(1, 1, 1), block=(256, 1, 1), stream=stream)


@cute.kernel
def copy_out(x: cute.Tensor, y: cute.Tensor):  # both (?,) fp32
    tid, _, _ = cute.arch.thread_idx()
    y[tid] = x[tid]


@cute.jit
def launch_two(x: cute.Tensor, y: cute.Tensor, n: cutlass.Int32, stream):
    copy_out(x, y).launch(grid=(1, 1, 1), block=(32, 1, 1), smem=4096, stream=stream)
    copy_twice(x, y, n).launch(grid=(1, 1, 1), block=(64, 1, 1), smem=8192, stream=stream)


@cute.kernel
def copy_twice(x: cute.Tensor, y: cute.Tensor, n: cutlass.Int32):  # both (?,) fp32
    tid, _, _ = cute.arch.thread_idx()
    y[tid] = x[tid] * n


def gemm_args(smem: int) -> list[object]:
    def matrix(dtype: type) -> object:
        return make_fake_compact_tensor(dtype, (TILE, TILE), stride_order=(1, 0), assumed_align=16)

    bf16 = cutlass.BFloat16
    return [matrix(bf16), matrix(bf16), matrix(cutlass.Float32), smem, fake_stream()]


def vector() -> object:
    return make_fake_compact_tensor(cutlass.Float32, (cute.sym_int32(),), assumed_align=4)


def test_gemm_uses_the_warpgroup_mma_and_tma(tmp_path: Path) -> None:
    made = compile_cute(launch_gemm, gemm_args(20480), device=H200, out_dir=tmp_path, name="small_gemm")
    taken = made.resources
    assert (made.name, made.arch, made.stages, made.warnings) == ("small_gemm", "sm_90a", (), ())
    assert {k: taken.instructions[k] for k in ("HGMMA", "HMMA", "UTMALDG", "STL")} == {
        "HGMMA": 4,
        "HMMA": 0,
        "UTMALDG": 2,
        "STL": 0,
    }
    assert (taken.threads, taken.smem_dynamic, taken.smem_static, taken.spill_bytes) == (128, 20480, 0, 0)
    assert 32 < taken.registers <= 255
    assert taken.ctas_per_sm == H200.ctas_per_sm(taken.registers, 20480, 128)
    assert set(made.artefacts) == {"ptx", "cubin", "sass"}
    assert "wgmma.mma_async" in made.artefacts["ptx"].read_text()
    assert made.handle is not None


def test_keep_narrows_and_an_object_loads_without_a_gpu(tmp_path: Path) -> None:
    made = compile_cute(launch_gemm, gemm_args(20480), device=H200, out_dir=tmp_path, keep=("object",), name="g")
    assert set(made.artefacts) == {"object"} == {p.suffix.replace(".o", "object") for p in tmp_path.iterdir()}
    assert callable(load_cute(made.artefacts["object"], "g"))
    with pytest.raises(UserError, match="did you mean 'cubin'"):
        compile_cute(launch_gemm, gemm_args(20480), device=H200, out_dir=tmp_path, keep=("cubn",))
    with pytest.raises(UserError, match="give out_dir"):
        compile_cute(launch_gemm, gemm_args(20480), device=H200, keep=("cubin",))


def test_too_much_shared_memory_is_named() -> None:
    with pytest.raises(Infeasible, match="shared memory of 232,456 bytes is over the 232,448 that a block of h200 may"):
        compile_cute(launch_gemm, gemm_args(232_456), device=H200)
    assert not compile_cute(launch_gemm, gemm_args(232_448), device=H200).warnings


@pytest.mark.filterwarnings("ignore:This static loop")
def test_spills_are_found_and_equal_ptxas_s_own_count(tmp_path: Path) -> None:
    args = [vector(), vector(), cutlass.Int32(1), fake_stream()]
    made = compile_cute(launch_spilling, args, device=H200, out_dir=tmp_path, keep=("cubin",), name="plain")
    kinds = ("cubin", "sass", "remarks")
    said = compile_cute(
        launch_spilling, args, device=H200, out_dir=tmp_path, keep=kinds, name="lines", options="--generate-line-info"
    )
    # Source lines change no code, so that they are those of the kernel that is timed.
    assert made.resources == said.resources and made.code == said.code
    remarks = said.artefacts["remarks"].read_text()
    assert re.search(r"[1-9]\d* bytes spill stores", remarks) and f"{__file__}:" in remarks and "\x1b" not in remarks
    assert [*sass.source_lines(made.artefacts["cubin"]).values()] == [{}]
    ((kernel, lines),) = sass.source_lines(said.artefacts["cubin"]).items()
    assert said.resources.code_bytes == 16 * said.resources.instructions["total"] == 16 * len(lines)
    found = spills.of(sass.functions(said.artefacts["sass"].read_text())[kernel], lines)
    assert sum(one.width for one in found) == said.resources.spill_bytes == said.resources.spill_loop_bytes
    assert {one.file for one in found} == {__file__}
    text = Path(__file__).read_text().split("\n")
    assert any("values[(i * 7 + 3) % SLOTS]" in text[one.line - 1] for one in found)
    assert made.resources.spill_bytes > 2000
    assert made.resources.instructions["STL"] > 100
    assert re.search(r"spills registers: [\d,]+ bytes", made.warnings[0])
    assert resources.problems(made.resources, H200) == list(made.warnings)


def test_two_launches_are_two_stages() -> None:
    made = compile_cute(launch_two, [vector(), vector(), cutlass.Int32(1), fake_stream()], device=H200)
    found = {stage.name: (stage.resources.threads, stage.resources.smem_dynamic) for stage in made.stages}
    assert found == {"copy_out": (32, 4096), "copy_twice": (64, 8192)}
    assert all(not stage.warnings for stage in made.stages)


def test_our_command_line_is_not_the_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every compile parses sys.argv for its own flag; `--h 128` would be its --help, which prints and exits with 0."""
    monkeypatch.setattr("sys.argv", ["mla-var3", "--h", "128"])
    x = make_fake_compact_tensor(cutlass.Float32, (cute.sym_int32(),), assumed_align=16)
    assert compile_cute(launch_scale, (x, fake_stream()), device=H200, name="scale").handle is not None


@cute.kernel
def scale(x: cute.Tensor):  # (n,) fp32, global memory
    tid, _, _ = cute.arch.thread_idx()
    x[tid] = x[tid] + x[tid]


@cute.jit
def launch_scale(x: cute.Tensor, stream):
    scale(x).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)
