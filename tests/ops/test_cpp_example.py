"""examples/cpp: what is exported, how a C++ program passes it, and on a GPU whether its results are right."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
tvm_ffi = pytest.importorskip("tvm_ffi")

from ops_fakes import not_compiled  # noqa: E402
from ops_gpu import CPP  # noqa: E402

from mla_var3.device import Device  # noqa: E402
from mla_var3.ops.calls import Buffer, call_of  # noqa: E402
from mla_var3.ops.ways import way_for  # noqa: E402
from mla_var3.toolchain import aot, loader  # noqa: E402

H200 = Device.get("h200")
needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
TVM_FFI = Path(tvm_ffi.__file__).parent

# Takes the kernel's place: says what it is given.
FAKE = r"""
#include <cstdio>
#include <cstring>
#include "mla_decode.h"

extern "C" int __tvm_ffi_not_compiled(void*, const TVMFFIAny* given, int32_t count, TVMFFIAny*) {
  for (int32_t i = 0; i < count; ++i) {
    if (given[i].type_index == kTVMFFINone) std::printf("none\n");
    if (given[i].type_index == kTVMFFIInt) std::printf("integer %lld\n", static_cast<long long>(given[i].v_int64));
    if (given[i].type_index == kTVMFFIFloat) std::printf("real %.17g\n", given[i].v_float64);
    if (given[i].type_index != kTVMFFIDLTensorPtr) continue;
    const auto* x = static_cast<const DLTensor*>(given[i].v_ptr);
    std::printf("tensor %lld %d %d", static_cast<long long>(reinterpret_cast<intptr_t>(x->data)), x->dtype.code,
                x->dtype.bits);
    for (int j = 0; j < x->ndim; ++j)
      std::printf(" %lld:%lld", static_cast<long long>(x->shape[j]), static_cast<long long>(x->strides[j]));
    std::printf("\n");
  }
  std::printf("stream %d\n", TVMFFIEnvGetStream(kDLCUDA, 0) == reinterpret_cast<void*>(64));
  TVMFFIErrorSetRaisedFromCStr("ValueError", "a mistake of the caller's");
  return -1;
}

int main() {
  using namespace mla_decode;
  std::vector<Tensor> tensors[3];
  intptr_t at = 0;
  for (const Buffer& b : inputs) tensors[0].push_back({b, reinterpret_cast<void*>(++at)});
  for (const Buffer& b : outputs) tensors[1].push_back({b, reinterpret_cast<void*>(++at)});
  for (const Buffer& b : workspaces) tensors[2].push_back({b, reinterpret_cast<void*>(++at)});
  tensors[0][1].buffer.shape[0] = 77;
  try {
    call(function, arguments, sizeof arguments / sizeof *arguments, tensors[0], tensors[1], tensors[2], 0,
         reinterpret_cast<void*>(64));
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
  }
}
"""


@pytest.fixture
def export(repo_root: Path, module_at: Callable[[Path], Any]) -> Any:
    """examples/cpp/export.py as a module."""
    return module_at(repo_root / "examples" / "cpp" / "export.py")


def compiled_with(*words: str) -> list[str]:
    return ["g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{TVM_FFI / 'include'}", *words]


@needs_gxx
def test_the_program_passes_what_was_exported(
    export: Any, repo_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    monkeypatch.setattr(aot, "load_or_compile", lambda *_, **__: not_compiled())
    problem = CPP[0]
    call = call_of(way_for(problem, H200), problem, H200)
    (tmp_path / "mla_decode.h").write_text(export.header(call, problem, H200))
    (tmp_path / "fake.cpp").write_text(FAKE)
    words = [str(tmp_path / "fake.cpp"), f"-I{repo_root / 'examples/cpp'}", "-o", str(tmp_path / "fake")]
    link = [f"-L{TVM_FFI / 'lib'}", "-ltvm_ffi", f"-Wl,-rpath,{TVM_FFI / 'lib'}"]
    subprocess.run(compiled_with(*words, *link), check=True, timeout=120)
    said = subprocess.run([str(tmp_path / "fake")], capture_output=True, text=True, check=True).stdout.splitlines()
    order = [*call.inputs, *call.outputs, *call.workspaces]
    kinds = {"bfloat16": (4, 16), "float16": (2, 16), "float32": (2, 32), "int32": (0, 32)}  # DLPack's codes and bits

    def wanted(x: Any) -> str:
        if not isinstance(x, Buffer):
            return "none" if x is None else f"integer {x}" if isinstance(x, int) else f"real {x:.17g}"
        shape = (77, *x.shape[1:]) if x == call.inputs[1] else x.shape
        strides = torch.empty(shape, device="meta").stride()
        code, bits = kinds[x.dtype]
        sizes = [f"{a}:{b}" for a, b in zip(shape, strides, strict=True)]
        return " ".join([f"tensor {order.index(x) + 1} {code} {bits}", *sizes])

    assert said[:-2] == [wanted(x) for x in call.steps[0].arguments]
    assert said[-2:] == ["stream 1", "a mistake of the caller's"]
    assert (tmp_path / "mla_decode.h").read_text().count(", true}") == 1  # the workspace that begins as zeros


def test_a_mistake_is_one_sentence(export: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export.main([str(tmp_path), "--device", "h2oo"]) == 2
    assert capsys.readouterr().err.startswith("export.py: There is no device 'h2oo': did you mean")


def built(export: Any, repo_root: Path, folder: Path, words: list[str]) -> subprocess.CompletedProcess[str]:
    """Exports, builds and runs the program."""
    assert export.main([str(folder), *words]) == 0
    runtime = Path(loader.load_runtime(aot.bundle_dirs())).parent
    env = {**os.environ, "TVM_FFI": str(TVM_FFI), "CUTE_RUNTIME": str(runtime)}
    subprocess.run([str(repo_root / "examples/cpp/build.sh"), str(folder)], env=env, check=True, timeout=120)
    plain = {"PATH": "/usr/bin:/bin", "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", "")}
    return subprocess.run([str(folder / "decode")], env=plain, capture_output=True, text=True, timeout=120, check=False)


def cuda() -> bool:
    return (Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "lib64" / "libcudart_static.a").is_file()


@needs_gxx
@pytest.mark.slow
@pytest.mark.skipif(not cuda(), reason="no CUDA toolkit")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: the program's results are judged instead")
def test_the_program_links_and_says_that_there_is_no_gpu(export: Any, repo_root: Path, tmp_path: Path) -> None:
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    done = built(export, repo_root, tmp_path, ["--h", "16"])
    assert done.returncode == 2 and done.stderr.startswith("decode: cudaMalloc: ")


@needs_gxx
@pytest.mark.gpu
@pytest.mark.skipif(not cuda(), reason="no CUDA toolkit")
@pytest.mark.parametrize("problem", CPP, ids=lambda p: p.label)
def test_the_programs_results_are_right(export: Any, repo_root: Path, tmp_path: Path, problem: Any) -> None:
    device = Device.detect()
    assert device is not None
    words = ["--b", str(problem.b), "--h", str(problem.h), "--t", str(problem.t), "--device", device.key]
    done = built(export, repo_root, tmp_path, words)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "right", done.stdout + done.stderr
