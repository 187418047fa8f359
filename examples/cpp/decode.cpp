// Attention of one MLA decode step without Python: random queries over a paged latent cache, requests of different
// lengths, shuffled pages; the result is compared with a reference in double precision, and calls are timed.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <limits>
#include <numeric>
#include <random>

#include "mla_decode.h"

namespace {
using namespace mla_decode;

constexpr int64_t requests = inputs[0].shape[0], tokens = inputs[0].shape[1], heads = inputs[0].shape[2];
constexpr int64_t width = inputs[0].shape[3], page = inputs[1].shape[1], table_width = inputs[2].shape[1];
constexpr int64_t pages = requests * table_width;
static_assert(tokens == 1 && inputs[1].shape[2] == 1, "this example has one query token a request, and one cache");

// Bounds of an element for N(0, 1) inputs, absolute or relative, and of 1 - cos over all: rounding P and out to bf16.
constexpr double out_abs = 8e-3, out_rel = 2.01 / 128, out_cos = 5e-6, lse_abs = 1e-4;
constexpr int calls = 100;

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

uint16_t to_bf16(float value) {  // rounds to nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

float from_bf16(uint16_t value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

template <typename T>
Tensor to_device(Buffer buffer, const std::vector<T>& host) {
  void* data = nullptr;
  check(cudaMalloc(&data, buffer.bytes()), "cudaMalloc");
  check(cudaMemcpy(data, host.data(), buffer.bytes(), cudaMemcpyHostToDevice), "cudaMemcpy");
  return {buffer, data};
}

Tensor on_device(Buffer buffer) {
  void* data = nullptr;
  check(cudaMalloc(&data, std::max<size_t>(buffer.bytes(), 1)), "cudaMalloc");
  if (buffer.zeroed) check(cudaMemset(data, 0, buffer.bytes()), "cudaMemset");
  return {buffer, data};
}

int run() {
  std::mt19937 random(0);
  std::normal_distribution<float> normal;
  auto drawn = [&](int64_t count) {
    std::vector<uint16_t> values(count);
    for (auto& value : values) value = to_bf16(normal(random));
    return values;
  };
  Buffer cache_buffer = inputs[1];
  cache_buffer.shape[0] = pages;
  const auto q = drawn(inputs[0].elements()), cache = drawn(cache_buffer.elements());
  std::vector<int32_t> table(pages), lengths(requests);
  std::iota(table.begin(), table.end(), 0);
  std::shuffle(table.begin(), table.end(), random);
  for (int64_t i = 0; i < requests; ++i) {  // the longest, an empty one, and what is drawn
    const int64_t most = table_width * page;
    lengths[i] = static_cast<int32_t>(i == 0 ? most : i == 1 ? 0 : random() % most);
  }

  const std::vector<Tensor> given = {to_device(inputs[0], q), to_device(cache_buffer, cache),
                                     to_device(inputs[2], table), to_device(inputs[3], lengths)};
  std::vector<Tensor> results, scratch;
  for (const Buffer& buffer : outputs) results.push_back(on_device(buffer));
  for (const Buffer& buffer : workspaces) scratch.push_back(on_device(buffer));
  cudaStream_t stream;
  check(cudaStreamCreate(&stream), "cudaStreamCreate");
  auto attend = [&] {
    call(function, arguments, static_cast<int32_t>(std::size(arguments)), given, results, scratch, 0, stream);
  };
  attend();
  std::vector<uint16_t> out(outputs[0].elements());
  std::vector<float> lse(outputs[1].elements());
  check(cudaStreamSynchronize(stream), "the call");
  check(cudaMemcpy(out.data(), results[0].data, outputs[0].bytes(), cudaMemcpyDeviceToHost), "cudaMemcpy");
  check(cudaMemcpy(lse.data(), results[1].data, outputs[1].bytes(), cudaMemcpyDeviceToHost), "cudaMemcpy");

  double worst = 0, worst_lse = 0, product = 0, squares = 0;
  int64_t wrong = 0;
  for (int64_t i = 0; i < requests; ++i) {
    for (int64_t head = 0; head < heads; ++head) {
      const uint16_t* query = &q[(i * heads + head) * width];
      std::vector<double> score(lengths[i]), sum(latent, 0.0);
      auto row = [&](int64_t token) {
        return &cache[(table[i * table_width + token / page] * page + token % page) * width];
      };
      double top = -std::numeric_limits<double>::infinity(), weight = 0;
      for (int64_t token = 0; token < lengths[i]; ++token) {
        double dot = 0;
        for (int64_t c = 0; c < width; ++c) dot += double(from_bf16(query[c])) * from_bf16(row(token)[c]);
        top = std::max(top, score[token] = scale * dot);
      }
      for (int64_t token = 0; token < lengths[i]; ++token) {
        const double p = std::exp(score[token] - top);
        weight += p;
        for (int64_t c = 0; c < latent; ++c) sum[c] += p * from_bf16(row(token)[c]);
      }
      const float found_lse = lse[i * heads + head];
      if (lengths[i] == 0) {
        wrong += !(std::isinf(found_lse) && found_lse > 0);
      } else {
        const double error = std::abs(found_lse - (top + std::log(weight)));
        worst_lse = std::max(worst_lse, error);
        wrong += !(error <= lse_abs);
      }
      for (int64_t c = 0; c < latent; ++c) {
        const double want = lengths[i] ? sum[c] / weight : 0, found = from_bf16(out[(i * heads + head) * latent + c]);
        const double error = std::abs(found - want);
        worst = std::max(worst, error);
        product += found * want;
        squares += found * found + want * want;
        wrong += !(error <= out_abs || error <= out_rel * std::abs(want));
      }
    }
  }
  const double cosine = 1 - 2 * product / squares;
  wrong += !(cosine <= out_cos);

  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "cudaEventCreate");
  check(cudaEventCreate(&end), "cudaEventCreate");
  check(cudaEventRecord(begin, stream), "cudaEventRecord");
  for (int i = 0; i < calls; ++i) attend();
  check(cudaEventRecord(end, stream), "cudaEventRecord");
  check(cudaStreamSynchronize(stream), "the calls");
  float milliseconds = 0;
  check(cudaEventElapsedTime(&milliseconds, begin, end), "cudaEventElapsedTime");
  std::printf("%lld requests, %lld heads, up to %lld tokens: largest error of out %.2e, of lse %.2e, 1 - cos %.2e\n",
              static_cast<long long>(requests), static_cast<long long>(heads),
              static_cast<long long>(table_width * page), worst, worst_lse, cosine);
  std::printf("%.1f us a call, %d calls behind each other on one stream, warm L2\n", 1e3 * milliseconds / calls, calls);
  if (wrong) {
    std::printf("WRONG: %lld values are outside their bounds\n", static_cast<long long>(wrong));
    return 1;
  }
  std::printf("right\n");
  return 0;
}
}  // namespace

int main() {
  try {
    return run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "decode: %s\n", error.what());
    return 2;
  }
}
