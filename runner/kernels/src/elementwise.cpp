// Norms, activation and rotary embedding over rows of tokens. One row is one thread's work and its sums have a fixed
// order, so a row's result doesn't depend on its neighbours. Arithmetic is in float32 whatever is stored.
#include <cmath>

#include "kernels.h"

namespace triptych {
namespace {

// Below this many elements waking the other threads costs more than it saves.
constexpr int64_t kParallelFrom = 16384;

template <typename T>
float sum_of_squares(const T* x, int d) {
    f32x16 total{};
    int i = 0;
    for (; i + kLanes <= d; i += kLanes) {
        f32x16 v = load16(x + i);
        total += v * v;
    }
    float tail = 0;
    for (; i < d; i++) tail += load1(x + i) * load1(x + i);
    return sum_lanes(total) + tail;
}

// y = x / rms(x) rounded to T, times weight: the order of rounding that the published models were trained with.
template <typename T>
void normalize(const T* x, const T* weight, T* y, int d, float eps) {
    const float scale = 1.0f / std::sqrt(sum_of_squares(x, d) / float(d) + eps);
    int i = 0;
    for (; i + kLanes <= d; i += kLanes) {
        T rounded[kLanes];
        store16(rounded, load16(x + i) * scale);
        store16(y + i, load16(rounded) * load16(weight + i));
    }
    for (; i < d; i++) {
        T rounded;
        store1(&rounded, load1(x + i) * scale);
        store1(y + i, load1(&rounded) * load1(weight + i));
    }
}

template <typename T>
void silu_and_mul(const T* gate_up, T* y, int rows, int d) {
#pragma omp parallel for schedule(static) if (int64_t(rows) * d >= kParallelFrom)
    for (int r = 0; r < rows; r++) {
        const T* gate = gate_up + int64_t(r) * 2 * d;
        const T* up = gate + d;
        T* to = y + int64_t(r) * d;
        int i = 0;
        for (; i + kLanes <= d; i += kLanes) store16(to + i, silu16(load16(gate + i)) * load16(up + i));
        for (; i < d; i++) {
            float g = load1(gate + i);
            store1(to + i, g / (1.0f + std::exp(-g)) * load1(up + i));
        }
    }
}

template <typename T>
void rotate(T* x, const float* cos, const float* sin, int half) {
    int i = 0;
    for (; i + kLanes <= half; i += kLanes) {
        f32x16 a = load16(x + i), b = load16(x + half + i);
        f32x16 c = load16(cos + i), s = load16(sin + i);
        store16(x + i, a * c - b * s);
        store16(x + half + i, b * c + a * s);
    }
    for (; i < half; i++) {
        float a = load1(x + i), b = load1(x + half + i);
        store1(x + i, a * cos[i] - b * sin[i]);
        store1(x + half + i, b * cos[i] + a * sin[i]);
    }
}

}  // namespace

template <typename T>
void rms_norm(const T* x, int64_t x_stride, const T* weight, T* y, int64_t y_stride, int rows, int d, float eps) {
#pragma omp parallel for schedule(static) if (int64_t(rows) * d >= kParallelFrom)
    for (int r = 0; r < rows; r++) normalize(x + r * x_stride, weight, y + r * y_stride, d, eps);
}

template <typename T>
void rope(
    T* q, int64_t q_stride, int q_heads, T* k, int64_t k_stride, int k_heads, int head_dim, const int64_t* positions,
    const float* cos_sin, int rot_dim, int rows
) {
#pragma omp parallel for schedule(static) if (int64_t(rows) * (q_heads + k_heads) * head_dim >= kParallelFrom)
    for (int r = 0; r < rows; r++) {
        const float* cos = cos_sin + positions[r] * rot_dim;
        const float* sin = cos + rot_dim / 2;
        for (int h = 0; h < q_heads; h++) rotate(q + r * q_stride + h * head_dim, cos, sin, rot_dim / 2);
        for (int h = 0; h < k_heads; h++) rotate(k + r * k_stride + h * head_dim, cos, sin, rot_dim / 2);
    }
}

template <typename T>
void head_norm(T* x, int64_t x_stride, int heads, int head_dim, const T* weight, int rows, float eps) {
#pragma omp parallel for schedule(static) if (int64_t(rows) * heads * head_dim >= kParallelFrom)
    for (int r = 0; r < rows; r++)
        for (int h = 0; h < heads; h++) {
            T* head = x + r * x_stride + h * head_dim;
            normalize(head, weight, head, head_dim, eps);
        }
}

#define TRIPTYCH_INSTANTIATE(T)                                                                                      \
    template void rms_norm(const T*, int64_t, const T*, T*, int64_t, int, int, float);                               \
    template void rope(T*, int64_t, int, T*, int64_t, int, int, const int64_t*, const float*, int, int);             \
    template void head_norm(T*, int64_t, int, int, const T*, int, float);
TRIPTYCH_INSTANTIATE(float)
TRIPTYCH_INSTANTIATE(bf16)

}  // namespace triptych

using triptych::bf16;

#define TRIPTYCH_ELEMENTWISE(T, NAME)                                                                                \
    void triptych_rms_norm_##NAME(                                                                                   \
        const T* x, int64_t x_stride, const T* weight, T* y, int64_t y_stride, int rows, int d, float eps            \
    ) {                                                                                                              \
        triptych::rms_norm(x, x_stride, weight, y, y_stride, rows, d, eps);                                          \
    }                                                                                                                \
    void triptych_silu_and_mul_##NAME(const T* gate_up, T* y, int rows, int d) {                                     \
        triptych::silu_and_mul(gate_up, y, rows, d);                                                                 \
    }                                                                                                                \
    void triptych_rope_##NAME(                                                                                       \
        T* q, int64_t q_stride, int q_heads, T* k, int64_t k_stride, int k_heads, int head_dim,                      \
        const int64_t* positions, const float* cos_sin, int rot_dim, int rows                                        \
    ) {                                                                                                              \
        triptych::rope(q, q_stride, q_heads, k, k_stride, k_heads, head_dim, positions, cos_sin, rot_dim, rows);     \
    }                                                                                                                \
    void triptych_head_norm_##NAME(                                                                                  \
        T* x, int64_t x_stride, int heads, int head_dim, const T* weight, int rows, float eps                        \
    ) {                                                                                                              \
        triptych::head_norm(x, x_stride, heads, head_dim, weight, rows, eps);                                        \
    }

extern "C" {
TRIPTYCH_ELEMENTWISE(float, f32)
TRIPTYCH_ELEMENTWISE(bf16, bf16)
}
