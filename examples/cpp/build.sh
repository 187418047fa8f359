#!/usr/bin/env bash
# Compiles decode.cpp against what export.py wrote into a folder and links it with the exported function.
#
#     examples/cpp/build.sh out/cpp && out/cpp/decode
#
# CUDA_HOME: the CUDA toolkit (/usr/local/cuda). TVM_FFI: the folder of the package tvm_ffi; CUTE_RUNTIME: the one with
# libcute_dsl_runtime.so, of nvidia-cutlass-dsl-libs-cu13. Without them PYTHON (python3) is asked where they are; the
# program itself needs no Python. Both libraries are also found beside the program.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[ $# -eq 1 ] && [ -f "$1/mla_decode.h" ] || { echo "usage: $0 FOLDER, one that export.py wrote into" >&2; exit 2; }
folder=$(cd "$1" && pwd)
cuda=${CUDA_HOME:-/usr/local/cuda}
python=${PYTHON:-python3}
locate() { "$python" -c "import importlib.util as u; print(u.find_spec('$1').submodule_search_locations[0])"; }
tvm_ffi=${TVM_FFI:-$(locate tvm_ffi)}
runtime=${CUTE_RUNTIME:-$(locate nvidia_cutlass_dsl)/cu13/lib}

# The exported library names libcute_dsl_runtime.so without saying where: the program, which does not call it, brings it.
"${CXX:-g++}" -std=c++17 -O2 -Wall -Wextra -o "$folder/decode" "$here/decode.cpp" \
  -I"$folder" -I"$here" -I"$tvm_ffi/include" -I"$cuda/include" \
  -Wl,--no-as-needed -L"$folder" -lmla_decode -L"$tvm_ffi/lib" -ltvm_ffi -L"$runtime" -lcute_dsl_runtime \
  -L"$cuda/lib64" -lcudart_static -ldl -lrt -lpthread \
  -Wl,-rpath,'$ORIGIN' -Wl,-rpath,"$tvm_ffi/lib" -Wl,-rpath,"$runtime"
echo "$folder/decode"
