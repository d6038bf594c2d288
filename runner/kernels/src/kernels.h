// What the kernels offer each other: the operations of elementwise.cpp, linear.cpp and attention.cpp for float and
// bf16. Shapes as in runner/ops.py; strides are in elements, from row to row.
#pragma once

#include "vec.h"

namespace triptych {

enum Epilogue { kStore = 0, kAddTo = 1, kSiluMul = 2 };

// y = x Wᵀ + b, y += x Wᵀ + b, or y = silu(gates) * ups.
template <typename T, typename Out>
struct Linear {
    const T* x;
    int64_t x_stride;
    const T* packed;
    const float* bias;  // null, or padded to whole panels
    Out* y;
    int64_t y_stride;
    int in, out, epilogue;
};

template <typename T, typename Out>
void linear(const Linear<T, Out>& job, int rows);

template <typename T>
void rms_norm(const T* x, int64_t x_stride, const T* weight, T* y, int64_t y_stride, int rows, int d, float eps);

template <typename T>
void head_norm(T* x, int64_t x_stride, int heads, int head_dim, const T* weight, int rows, float eps);

template <typename T>
void rope(
    T* q, int64_t q_stride, int q_heads, T* k, int64_t k_stride, int k_heads, int head_dim, const int64_t* positions,
    const float* cos_sin, int rot_dim, int rows
);

// A step's page tables and how its tokens are cut into units of work: the first `units` entries of unit_rows (the
// row) and unit_firsts (the first token within the row). Mirrored by PageTables in runner/attention/cpu.py.
struct PageTables {
    const int64_t* slots;
    const int32_t *qo_indptr, *kv_indptr, *kv_indices, *seq_lens, *unit_rows, *unit_firsts;
    int32_t tokens, units, unit_tokens;
};

template <typename T>
struct Attention {
    T* pool;
    int page_size, kv_heads, group, head_dim;
    float scale;
    const T* q;
    int64_t q_stride;
    const T* k;
    int64_t k_stride;
    const T* v;
    int64_t v_stride;
    T* out;  // [tokens, q_heads * head_dim]
};

template <typename T>
void attention(const Attention<T>& job, const PageTables& tables);

}  // namespace triptych
