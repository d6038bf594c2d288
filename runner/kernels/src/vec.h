// Sixteen float lanes and the few things the kernels do with them. Written with GCC vector extensions, so that one
// source serves AVX-512 (one register a vector), AVX2 (two) and anything else; bf16 dot products use vdpbf16ps where
// there is one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace triptych {

constexpr int kLanes = 16;
constexpr int kPanel = 32;  // columns of a packed panel: two vectors

// Rows of a register tile: each holds two accumulators, two more registers hold the panel and one the broadcast.
#ifdef __AVX512F__
constexpr int kTileRows = 14;
#else
constexpr int kTileRows = 3;
#endif

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

struct bf16 {
    uint16_t bits;
};

// How many elements share a 32-bit lane of a packed panel: the depth that one multiply-accumulate consumes.
template <typename T>
constexpr int kDepth = 4 / sizeof(T);

template <typename V>
inline V load(const void* from) {
    V v;
    std::memcpy(&v, from, sizeof(V));
    return v;
}

template <typename V>
inline void store(void* to, V v) {
    std::memcpy(to, &v, sizeof(V));
}

inline f32x16 splat(float x) {
    return x - f32x16{};
}

inline u32x16 splat_bits(uint32_t x) {
    return x | u32x16{};
}

inline f32x16 as_float(u32x16 v) {
    return (f32x16)v;
}

inline f32x16 load16(const float* from) {
    return load<f32x16>(from);
}

inline f32x16 load16(const bf16* from) {
    return as_float(__builtin_convertvector(load<u16x16>(from), u32x16) << 16);
}

inline void store16(float* to, f32x16 v) {
    store(to, v);
}

// Rounds to nearest even. NaN stays NaN.
inline void store16(bf16* to, f32x16 v) {
#ifdef __AVX512BF16__
    store(to, _mm512_cvtneps_pbh((__m512)v));
#else
    u32x16 bits = (u32x16)v;
    u32x16 rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    bits = (v == v) ? rounded : (bits | 0x400000u);
    store(to, __builtin_convertvector(bits >> 16, u16x16));
#endif
}

inline float load1(const float* from) {
    return *from;
}

inline float load1(const bf16* from) {
    uint32_t bits = uint32_t(from->bits) << 16;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

inline void store1(float* to, float x) {
    *to = x;
}

inline void store1(bf16* to, float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    bits = x == x ? bits + 0x7fffu + ((bits >> 16) & 1u) : bits | 0x400000u;
    to->bits = uint16_t(bits >> 16);
}

inline f32x16 max16(f32x16 a, f32x16 b) {
    return a > b ? a : b;
}

inline float sum_lanes(f32x16 v) {
    // A fixed tree, so that the sum doesn't depend on how the compiler vectorises.
    float x[kLanes];
    store(x, v);
    for (int width = kLanes / 2; width; width /= 2)
        for (int i = 0; i < width; i++) x[i] += x[i + width];
    return x[0];
}

inline float max_lanes(f32x16 v) {
    v = max16(v, __builtin_shuffle(v, i32x16{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7}));
    v = max16(v, __builtin_shuffle(v, i32x16{4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11}));
    v = max16(v, __builtin_shuffle(v, i32x16{2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13}));
    v = max16(v, __builtin_shuffle(v, i32x16{1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14}));
    return v[0];
}

// 2^x for x <= 127, within 2 ulp; exactly 0 below -126 (and for -inf). Minimax polynomial on [-0.5, 0.5].
inline f32x16 exp2_16(f32x16 x) {
    const f32x16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    f32x16 shifted = x + magic;
    f32x16 f = x - (shifted - magic);
    f32x16 p = splat(1.535336188319500e-4f);
    p = p * f + 1.339887440266574e-3f;
    p = p * f + 9.618437357674640e-3f;
    p = p * f + 5.550332471162809e-2f;
    p = p * f + 2.402264791363012e-1f;
    p = p * f + 6.931472028550421e-1f;
    p = p * f + 1.0f;
    i32x16 scaled = (i32x16)p + ((i32x16)shifted << 23);
    return x < -126.0f ? f32x16{} : (f32x16)scaled;
}

constexpr float kLog2E = 1.4426950408889634f;

inline f32x16 silu16(f32x16 x) {
    // 1 / (1 + 2^(-x log2 e)); for x far below zero the power is capped, and x / 2^126 is 0 for all purposes.
    f32x16 power = x * -kLog2E;
    power = power > 126.0f ? splat(126.0f) : power;
    return x / (1.0f + exp2_16(power));
}

// acc + a · b over the kDepth elements of each 32-bit lane.
template <typename T>
inline f32x16 dot(f32x16 acc, u32x16 a, u32x16 b);

template <>
inline f32x16 dot<float>(f32x16 acc, u32x16 a, u32x16 b) {
    return acc + as_float(a) * as_float(b);
}

template <>
inline f32x16 dot<bf16>(f32x16 acc, u32x16 a, u32x16 b) {
#ifdef __AVX512BF16__
    return (f32x16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
    acc = acc + as_float(a & 0xffff0000u) * as_float(b & 0xffff0000u);
    return acc + as_float(a << 16) * as_float(b << 16);
#endif
}

// acc[r][0..1] += rows of `a` (row r at a + r * stride) times one panel of `steps` lanes-deep rows of 32 columns.
// A row's sum is taken in the order of depth whatever ROWS is: results don't depend on who shares the tile.
template <typename T, int ROWS>
inline __attribute__((always_inline)) void tile(
    f32x16 (&acc)[ROWS][2], const T* a, ptrdiff_t stride, const T* panel, int steps, const T* ahead
) {
    constexpr int depth = kDepth<T>;
    for (int s = 0; s < steps; s++) {
        const T* b = panel + ptrdiff_t(s) * kPanel * depth;
        if (ahead) {
            const char* next = reinterpret_cast<const char*>(ahead + ptrdiff_t(s) * kPanel * depth);
            __builtin_prefetch(next);
            __builtin_prefetch(next + 64);
        }
        u32x16 b0 = load<u32x16>(b);
        u32x16 b1 = load<u32x16>(b + kLanes * depth);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) {
            u32x16 x = splat_bits(load<uint32_t>(a + r * stride + s * depth));
            acc[r][0] = dot<T>(acc[r][0], x, b0);
            acc[r][1] = dot<T>(acc[r][1], x, b1);
        }
    }
}

}  // namespace triptych
