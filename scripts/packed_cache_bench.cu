// The parts of a kernel that attends to a packed cache, each alone: e4m3 codes into bf16 or half precision, and rows of
// random tokens into shared memory. packed_cache_bench.py builds, checks and times them, and says what they compute.

#include <cstdint>

using u8 = uint8_t;
using u32 = uint32_t;
using u64 = uint64_t;

// Ways to convert. A word of four codes (bytes b0 to b3) becomes two words of two 16-bit values.
enum Way {
    COPY,              // none: the word twice, what moving costs alone
    FP32,              // cvt to half, to fp32, times the fp32 scale, cvt to bf16: rounded once
    FP32_BF16,         // cvt to half, to fp32, to bf16, times the bf16 scale
    PLACE_BF16,        // bits moved into bf16's field, times 2^120 x the bf16 scale
    PLACE_BF16_PAIRS,  // the same in the order b0 b2 | b1 b3, which saves the byte permutes
    PLACE_FP32,        // bits moved into fp32's field, times 2^120 x the fp32 scale, cvt to bf16: rounded once
    HALF,              // cvt to half, no scale: exact
    HALF_SCALED,       // cvt to half, times the half scale
    PLACE,             // bits moved into bf16's field in the order b0 b2 | b1 b3, no scale: exact, 2^-120 of the code
    WAYS
};

__device__ __forceinline__ u32 float_bits(float x) { return __float_as_uint(x); }

__device__ __forceinline__ u32 bf16x2(float low, float high) {
    u32 out;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}

__device__ __forceinline__ u32 half2_of(float x) {
    u32 out;
    asm("cvt.rn.f16x2.f32 %0, %1, %1;" : "=r"(out) : "f"(x));
    return out;
}

__device__ __forceinline__ u32 mul_bf16x2(u32 a, u32 b) {
    u32 out;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}

__device__ __forceinline__ u32 mul_f16x2(u32 a, u32 b) {
    u32 out;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}

// Two codes, in the low 16 bits, as two halves.
__device__ __forceinline__ u32 halves(u32 codes) {
    u32 out;
    asm("{.reg .b16 a; cvt.u16.u32 a, %1; cvt.rn.f16x2.e4m3x2 %0, a;}" : "=r"(out) : "r"(codes));
    return out;
}

__device__ __forceinline__ void floats(u32 half2, float &low, float &high) {
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}"
        : "=f"(low), "=f"(high)
        : "r"(half2));
}

// Bytes 1 and 3 of x into the fields of two bf16: sign to bit 15, exponent and mantissa to bits 10 to 4.
__device__ __forceinline__ u32 placed(u32 x) { return ((x >> 4) & 0x07f007f0u) | (x & 0x80008000u); }

// What a row's scale becomes once, before its codes are converted.
template <int WAY> __device__ __forceinline__ u32 prepared(float scale) {
    constexpr float bias = 0x1p120f;
    if constexpr (WAY == FP32) return float_bits(scale);
    if constexpr (WAY == FP32_BF16) return bf16x2(scale, scale);
    if constexpr (WAY == PLACE_BF16 || WAY == PLACE_BF16_PAIRS) return bf16x2(scale * bias, scale * bias);
    if constexpr (WAY == PLACE_FP32) return float_bits(scale * bias);
    if constexpr (WAY == HALF_SCALED) return half2_of(scale);
    return 0;
}

template <int WAY> __device__ __forceinline__ void convert(u32 w, u32 scale, u32 &low, u32 &high) {
    if constexpr (WAY == COPY) {
        low = high = w;
    } else if constexpr (WAY == FP32 || WAY == FP32_BF16) {
        float a, b, c, d;
        floats(halves(w), a, b);
        floats(halves(w >> 16), c, d);
        if constexpr (WAY == FP32) {
            float s = __uint_as_float(scale);
            low = bf16x2(a * s, b * s), high = bf16x2(c * s, d * s);
        } else {
            low = mul_bf16x2(bf16x2(a, b), scale), high = mul_bf16x2(bf16x2(c, d), scale);
        }
    } else if constexpr (WAY == PLACE_BF16) {
        low = mul_bf16x2(placed(__byte_perm(w, 0, 0x1404)), scale);
        high = mul_bf16x2(placed(__byte_perm(w, 0, 0x3424)), scale);
    } else if constexpr (WAY == PLACE_BF16_PAIRS) {
        low = mul_bf16x2(placed(w << 8), scale), high = mul_bf16x2(placed(w), scale);
    } else if constexpr (WAY == PLACE_FP32) {
        float s = __uint_as_float(scale);
        auto value = [&](u32 x) { return __uint_as_float(((x >> 4) & 0x07f00000u) | (x & 0x80000000u)) * s; };
        low = bf16x2(value(w << 24), value(w << 16)), high = bf16x2(value(w << 8), value(w));
    } else if constexpr (WAY == HALF) {
        low = halves(w), high = halves(w >> 16);
    } else if constexpr (WAY == HALF_SCALED) {
        low = mul_f16x2(halves(w), scale), high = mul_f16x2(halves(w >> 16), scale);
    } else {
        low = placed(w << 8), high = placed(w);
    }
}

// ---- registers only: elements = 4 x 4 x rounds of a thread, one LOP3 more for four elements

template <int WAY> __device__ __forceinline__ void registers(float scale, int rounds, u32 *out, long long *clocks) {
    u32 s = prepared<WAY>(scale);
    u32 w[4];
    for (int i = 0; i < 4; i++) w[i] = (threadIdx.x + 1) * 2654435761u * (i + 1);
    __syncthreads();
    long long start = clock64();
#pragma unroll 4
    for (int r = 0; r < rounds; r++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 low, high;
            convert<WAY>(w[i], s, low, high);
            w[i] = low ^ high ^ 0x9e3779b9u;
        }
    __syncthreads();
    long long end = clock64();
    out[blockIdx.x * blockDim.x + threadIdx.x] = w[0] ^ w[1] ^ w[2] ^ w[3];
    if (threadIdx.x == 0) clocks[blockIdx.x] = end - start;
}

// ---- rows of layout v32 into a tile of 64 tokens: nine blocks of 64 columns, each 64 rows of 128 bytes, swizzled by
// 128 bytes (16-byte chunk c of row r at c ^ r % 8), which is K-major for wgmma

constexpr int TILE_ROWS = 64, BLOCK_BYTES = TILE_ROWS * 128, TILE_BYTES = 9 * BLOCK_BYTES, V32 = 656;

__device__ __forceinline__ uint4 load_shared(u32 at) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(at));
    return x;
}

__device__ __forceinline__ void store_shared(u32 at, uint4 x) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w));
}

__device__ __forceinline__ uint4 load_global(const u8 *at) {
    uint4 x;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(at));
    return x;
}

// Lane l has the codes of columns 16 l to 16 l + 15 of four rows, their scales, and 16 bytes of rope of row l / 8.
struct FourRows {
    uint4 codes[4];
    float scales[4];
    uint4 rope;
};

template <int WAY> __device__ __forceinline__ void emit(const FourRows &rows, u32 tile, int first, int lane) {
    u32 block = tile + (lane / 4) * BLOCK_BYTES;
    // Lanes 4 to 7 of each eight store their second chunk first: with those of lanes 0 to 3 it takes all banks.
    int odd = lane / 4 % 2;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int row = first + i, chunk = 2 * (lane % 4);
        u32 s = prepared<WAY>(rows.scales[i]);
        uint4 a, b;
        convert<WAY>(rows.codes[i].x, s, a.x, a.y);
        convert<WAY>(rows.codes[i].y, s, a.z, a.w);
        convert<WAY>(rows.codes[i].z, s, b.x, b.y);
        convert<WAY>(rows.codes[i].w, s, b.z, b.w);
        u32 at = block + row * 128;
        int swap = row % 8;
        store_shared(at + 16 * ((chunk + odd) ^ swap), odd ? b : a);
        store_shared(at + 16 * ((chunk + 1 - odd) ^ swap), odd ? a : b);
    }
    int row = first + lane / 8;
    store_shared(tile + 8 * BLOCK_BYTES + row * 128 + 16 * (lane % 8 ^ row % 8), rows.rope);
}

__device__ __forceinline__ void store_tile(u32 tile, u8 *out) {
    __syncthreads();
    for (int at = threadIdx.x * 16; at < TILE_BYTES; at += blockDim.x * 16)
        *reinterpret_cast<uint4 *>(out + (size_t)blockIdx.x * TILE_BYTES + at) = load_shared(tile + at);
}

// A product of 64 x 128 x 16 with A in registers: 64 bytes of B from shared memory for each clock of the tensor cores.
__device__ __forceinline__ void mma(float (&d)[64], const u32 (&a)[4], u64 b) {
#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D16(i) D4(i), D4(i + 4), D4(i + 8), D4(i + 12)
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
                 "{%64, %65, %66, %67}, %68, 1, 1, 1, 0;"
                 : D16(0), D16(16), D16(32), D16(48)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

constexpr int MMA_WARPS = 8, RAW_BYTES = TILE_ROWS * V32, FLAG_AT = TILE_BYTES + RAW_BYTES;

// From shared memory to shared memory: `rounds` tiles. With MMA, warps 0 to 7 multiply meanwhile; clocks[1] of a CTA
// counts their products.
template <int WAY, bool MMA>
__device__ __forceinline__ void tile(const u8 *rows, int rounds, u8 *out, long long *clocks) {
    extern __shared__ __align__(1024) u8 memory[];
    u32 base = __cvta_generic_to_shared(memory), raw = base + TILE_BYTES;
    volatile int *done = reinterpret_cast<volatile int *>(memory + FLAG_AT);
    for (int at = threadIdx.x * 16; at < TILE_BYTES + RAW_BYTES; at += blockDim.x * 16)
        store_shared(base + at, at < TILE_BYTES ? uint4{} : load_global(rows + at - TILE_BYTES));
    if (threadIdx.x == 0) *done = 0;
    __syncthreads();
    int warp = threadIdx.x / 32 - (MMA ? MMA_WARPS : 0), warps = blockDim.x / 32 - (MMA ? MMA_WARPS : 0);
    int lane = threadIdx.x % 32;
    if (warp >= 0) {
        long long start = clock64();
        for (int r = 0; r < rounds; r++)
            for (int first = 4 * warp; first < TILE_ROWS; first += 4 * warps) {
                FourRows x;
                u32 from = raw + first * V32;
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    x.codes[i] = load_shared(from + i * V32 + 16 * lane);
                    asm volatile("ld.shared.f32 %0, [%1];"
                                 : "=f"(x.scales[i])
                                 : "r"(from + i * V32 + 512 + lane / 8 * 4));
                }
                x.rope = load_shared(from + lane / 8 * V32 + 528 + lane % 8 * 16);
                emit<WAY>(x, base, first, lane);
            }
        asm volatile("bar.sync 1, %0;" ::"r"(warps * 32));
        if (warp == 0 && lane == 0) clocks[2 * blockIdx.x] = clock64() - start, *done = 1;
    } else if constexpr (MMA) {
        float d[64] = {};
        u32 a[4] = {threadIdx.x * 0x3c003c1u, threadIdx.x * 0x3d013c1u, 0x3f80bf80u, 0xbf003f00u};
        // 128-byte swizzle, eight rows of 128 bytes from one core matrix to the next.
        u64 b = (u64)1 << 62 | (u64)64 << 32 | (u64)1 << 16 | base >> 4;
        unsigned long long products = 0;
        // A warpgroup ends as one: a product waits for all four of its warps.
        auto ended = [&] {
            u32 any;
            asm volatile("{.reg .pred p, q; setp.ne.s32 p, %1, 0; bar.red.or.pred q, %2, 128, p; selp.u32 %0, 1, 0, q;}"
                         : "=r"(any)
                         : "r"(*done), "r"(2 + threadIdx.x / 128)
                         : "memory");
            return any != 0;
        };
        while (!ended()) {
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int k = 0; k < 8; k++) mma(d, a, b + (k / 4) * (2 * BLOCK_BYTES / 16) + k % 4 * 2);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            products += 8;
        }
        float sum = 0;
        for (int i = 0; i < 64; i++) sum += d[i];
        if (threadIdx.x % 128 == 0) atomicAdd(reinterpret_cast<unsigned long long *>(clocks + 2 * blockIdx.x + 1), products);
        if (sum == 0.12345f) out[0] = 1;
    }
    store_tile(base, out);
}

// From device memory to the tile: each warp takes four rows at a time and has the next four under way. tokens:
// (batches, CTAs, warps, 4) rows of the cache.
template <int WAY>
__device__ __forceinline__ void direct(const u8 *cache, const int *tokens, int batches, u8 *out, long long *clocks) {
    extern __shared__ __align__(1024) u8 memory[];
    u32 base = __cvta_generic_to_shared(memory);
    int warp = threadIdx.x / 32, warps = blockDim.x / 32, lane = threadIdx.x % 32;
    auto token = [&](int batch) {
        return batch < batches ? tokens[(((size_t)batch * gridDim.x + blockIdx.x) * warps + warp) * 4 + lane % 4] : 0;
    };
    auto load = [&](int token) {
        FourRows x;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u8 *row = cache + (size_t)__shfl_sync(~0u, token, i) * V32;
            x.codes[i] = load_global(row + 16 * lane);
            x.scales[i] = __ldg(reinterpret_cast<const float *>(row + 512 + lane / 8 * 4));
        }
        x.rope = load_global(cache + (size_t)__shfl_sync(~0u, token, lane / 8) * V32 + 528 + lane % 8 * 16);
        return x;
    };
    long long start = clock64();
    int next = token(1);
    FourRows ahead = load(token(0));
    for (int batch = 0; batch < batches; batch++) {
        FourRows x = ahead;
        ahead = load(next);
        next = token(batch + 2);
        emit<WAY>(x, base, 4 * warp, lane);
    }
    __syncthreads();
    if (threadIdx.x == 0) clocks[blockIdx.x] = clock64() - start;
    store_tile(base, out);
}

#define CONVERSIONS(NAME, WAY)                                                                                        \
    extern "C" __global__ void __launch_bounds__(1024, 1)                                                                \
        registers_##NAME(float scale, int rounds, u32 *out, long long *clocks) {                                      \
        registers<WAY>(scale, rounds, out, clocks);                                                                   \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(512, 1)                                                                 \
        tile_##NAME(const u8 *rows, int rounds, u8 *out, long long *clocks) {                                         \
        tile<WAY, false>(rows, rounds, out, clocks);                                                                  \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(512, 1)                                                                 \
        tile_mma_##NAME(const u8 *rows, int rounds, u8 *out, long long *clocks) {                                     \
        tile<WAY, true>(rows, rounds, out, clocks);                                                                   \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(512, 1)                                                                 \
        direct_##NAME(const u8 *cache, const int *tokens, int batches, u8 *out, long long *clocks) {                  \
        direct<WAY>(cache, tokens, batches, out, clocks);                                                             \
    }

CONVERSIONS(copy, COPY)
CONVERSIONS(fp32, FP32)
CONVERSIONS(fp32_bf16, FP32_BF16)
CONVERSIONS(place_bf16, PLACE_BF16)
CONVERSIONS(place_bf16_pairs, PLACE_BF16_PAIRS)
CONVERSIONS(place_fp32, PLACE_FP32)
CONVERSIONS(half, HALF)
CONVERSIONS(half_scaled, HALF_SCALED)
CONVERSIONS(place, PLACE)

// ---- a gather alone: each warp has two slots of ROWS rows and fills one while the other is under way

struct Row32 {
    static constexpr int BULK = 656, SMALL = 0, SLOT = 656;
    static __device__ __forceinline__ size_t at(int token) { return (size_t)token * 656; }
};

// Layout v4, pages of 64 tokens: 576 bytes, and 8 of scales behind the rows of the page.
struct Row4 {
    static constexpr int BULK = 576, SMALL = 8, SLOT = 592, PAGE = 37440;
    static __device__ __forceinline__ size_t at(int token) { return (size_t)(token / 64) * PAGE + token % 64 * 576; }
    static __device__ __forceinline__ size_t small_at(int token) {
        return (size_t)(token / 64) * PAGE + 64 * 576 + token % 64 * 8;
    }
};

template <typename ROW> __device__ __forceinline__ void copy_small(const u8 *cache, int token, u32 slot) {
    if constexpr (ROW::SMALL > 0)
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(slot + ROW::BULK),
                     "l"(cache + ROW::small_at(token)));
}

__device__ __forceinline__ void mbarrier_wait(u32 at, u32 parity) {
    asm volatile("{.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra again;\n}" ::"r"(at),
                 "r"(parity)
                 : "memory");
}

template <typename ROW, int ROWS, bool BULK>
__device__ __forceinline__ void gather(const u8 *cache, const int *tokens, int batches, u8 *out, long long *clocks) {
    extern __shared__ __align__(1024) u8 memory[];
    constexpr int STAGE = ROWS * ROW::SLOT;
    int warp = threadIdx.x / 32, warps = blockDim.x / 32, lane = threadIdx.x % 32;
    u32 slots = __cvta_generic_to_shared(memory) + warp * 2 * STAGE;
    u32 bars = __cvta_generic_to_shared(memory) + warps * 2 * STAGE + warp * 16;
    if (BULK && lane < 2) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(bars + 8 * lane));
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    auto token = [&](int batch) {
        size_t warp_row = ((size_t)batch * gridDim.x + blockIdx.x) * warps + warp;
        return batch < batches && lane < ROWS ? tokens[warp_row * ROWS + lane] : 0;
    };
    auto issue = [&](int token, int stage) {
        u32 slot = slots + stage * STAGE;
        if constexpr (BULK) {
            u32 bar = bars + 8 * stage;
            if (lane == 0)
                asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(ROWS * ROW::BULK)
                             : "memory");
            __syncwarp();
            if (lane < ROWS)
                asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                                 slot + lane * ROW::SLOT),
                             "l"(cache + ROW::at(token)), "r"(ROW::BULK), "r"(bar)
                             : "memory");
        } else {
            constexpr int CHUNKS = ROW::BULK / 16;
#pragma unroll
            for (int k = 0; k < (ROWS * CHUNKS + 31) / 32; k++) {
                int id = k * 32 + lane, row = id / CHUNKS, chunk = id % CHUNKS;
                const u8 *from = cache + ROW::at(__shfl_sync(~0u, token, row)) + chunk * 16;
                if (id < ROWS * CHUNKS)
                    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(slot + row * ROW::SLOT + chunk * 16),
                                 "l"(from)
                                 : "memory");
            }
        }
        if (lane < ROWS) copy_small<ROW>(cache, token, slot + lane * ROW::SLOT);
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    long long start = clock64();
    int next = token(1);
    issue(token(0), 0);
    for (int batch = 0; batch < batches; batch++) {
        if (batch + 1 < batches)
            issue(next, (batch + 1) % 2);
        else
            asm volatile("cp.async.commit_group;" ::: "memory");
        next = token(batch + 2);
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        if constexpr (BULK) mbarrier_wait(bars + 8 * (batch % 2), batch / 2 % 2);
        __syncwarp();
    }
    __syncthreads();
    if (threadIdx.x == 0) clocks[blockIdx.x] = clock64() - start;
    // The last rows, to be checked: (CTAs, warps, ROWS, SLOT) bytes.
    u32 last = slots + (batches - 1) % 2 * STAGE;
    for (int at = lane * 16; at < STAGE; at += 512)
        *reinterpret_cast<uint4 *>(out + ((size_t)blockIdx.x * warps + warp) * STAGE + at) = load_shared(last + at);
}

#define GATHERS(ROWS)                                                                                                 \
    GATHER(cp_async_v32_##ROWS, Row32, ROWS, false)                                                                   \
    GATHER(bulk_v32_##ROWS, Row32, ROWS, true)                                                                        \
    GATHER(cp_async_v4_##ROWS, Row4, ROWS, false)                                                                     \
    GATHER(bulk_v4_##ROWS, Row4, ROWS, true)
#define GATHER(NAME, ROW, ROWS, BULK)                                                                                 \
    extern "C" __global__ void __launch_bounds__(128, 1)                                                                 \
        NAME(const u8 *cache, const int *tokens, int batches, u8 *out, long long *clocks) {                           \
        gather<ROW, ROWS, BULK>(cache, tokens, batches, out, clocks);                                                 \
    }

GATHERS(8)
GATHERS(16)
GATHERS(32)

// What device memory delivers when it is read in order: n of 16 bytes, a multiple of 8 x threads of the grid.
extern "C" __global__ void __launch_bounds__(512, 1) read_all(const uint4 *x, long long n, u32 *out) {
    u32 sum = 0;
    long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += 8 * step) {
        uint4 v[8];
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] = load_global(reinterpret_cast<const u8 *>(x + i + k * step));
#pragma unroll
        for (int k = 0; k < 8; k++) sum += v[k].x + v[k].y + v[k].z + v[k].w;
    }
    atomicAdd(out, sum);
}
