// Calls a compiled function of mla_var3 with the arguments that export.py describes. Needs libtvm_ffi and the CUDA
// runtime; no Python and no torch.
#pragma once
#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace mla_decode {

// A contiguous tensor. zeroed: a workspace that must be 0 before the first call that uses it; every call leaves it so.
struct Buffer {
  int32_t ndim;
  int64_t shape[4];
  DLDataType dtype;
  bool zeroed;

  constexpr int64_t elements() const {
    int64_t product = 1;
    for (int32_t i = 0; i < ndim; ++i) product *= shape[i];
    return product;
  }
  constexpr size_t bytes() const { return static_cast<size_t>(elements()) * dtype.bits / 8; }
};

enum class Kind { input, output, workspace, integer, real, none };

// An argument: number `value` of its kind of tensors, the integer `value`, the number `real`, or an absent tensor.
struct Argument {
  Kind kind;
  int64_t value = 0;
  double real = 0;
};

// Tensors on the device, in the order of the description; where the caller's cache has another number of pages than
// the description, its Buffer says so.
struct Tensor {
  Buffer buffer;
  void* data;
};

// Launches on a stream and returns at once. Throws what the function reports: a wrong shape, a failed launch.
inline void call(TVMFFISafeCallType function, const Argument* arguments, int32_t count,
                 const std::vector<Tensor>& inputs, const std::vector<Tensor>& outputs,
                 const std::vector<Tensor>& workspaces, int device, void* stream) {
  std::vector<DLTensor> views(count);
  std::vector<int64_t> strides(4 * static_cast<size_t>(count));
  std::vector<TVMFFIAny> packed(count);  // zeros: each is kTVMFFINone
  for (int32_t i = 0; i < count; ++i) {
    const Argument& argument = arguments[i];
    if (argument.kind == Kind::none) continue;
    if (argument.kind == Kind::integer) {
      packed[i].type_index = kTVMFFIInt;
      packed[i].v_int64 = argument.value;
      continue;
    }
    if (argument.kind == Kind::real) {
      packed[i].type_index = kTVMFFIFloat;
      packed[i].v_float64 = argument.real;
      continue;
    }
    const auto& group = argument.kind == Kind::input ? inputs : argument.kind == Kind::output ? outputs : workspaces;
    const Tensor& tensor = group.at(argument.value);
    int64_t* stride = &strides[4 * static_cast<size_t>(i)];
    int64_t step = 1;
    for (int32_t j = tensor.buffer.ndim - 1; j >= 0; --j) {
      stride[j] = step;
      step *= tensor.buffer.shape[j];
    }
    views[i] = DLTensor{tensor.data, {kDLCUDA, device}, tensor.buffer.ndim, tensor.buffer.dtype,
                        const_cast<int64_t*>(tensor.buffer.shape), stride, 0};
    packed[i].type_index = kTVMFFIDLTensorPtr;
    packed[i].v_ptr = &views[i];
  }
  TVMFFIStreamHandle before = nullptr;
  TVMFFIEnvSetStream(kDLCUDA, device, stream, &before);
  TVMFFIAny result{};
  const int failed = function(nullptr, packed.data(), count, &result);
  TVMFFIEnvSetStream(kDLCUDA, device, before, nullptr);
  if (!failed) return;
  TVMFFIObjectHandle error = nullptr;
  TVMFFIErrorMoveFromRaised(&error);
  const TVMFFIByteArray message = TVMFFIErrorGetCellPtr(error)->message;
  const std::string text(message.data, message.size);
  TVMFFIObjectDecRef(error);
  throw std::runtime_error(text);
}

}  // namespace mla_decode
