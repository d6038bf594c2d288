// All transformer blocks of a step in one call: the loop of runner/model/decoder.py over the same kernels, without
// returning to Python between them. It computes the same bits.
#include "kernels.h"

namespace triptych {

// These three are mirrored by the ctypes structures in runner/kernels/stack.py.
struct Weights {
    const void* packed;
    const float* bias;
    int32_t in, out;
};

struct Layer {
    const void *input_norm, *q_norm, *k_norm, *post_attention_norm;  // q_norm and k_norm may be null
    Weights qkv, output, gate_up, down;
    void* pool;
};

struct Shape {
    int32_t layers, hidden, q_heads, kv_heads, head_dim, rot_dim, page_size;
    float eps, scale;
    const float* cos_sin;
};

namespace {

template <typename T>
void apply(const Weights& w, const T* x, T* y, int width, int rows, Epilogue epilogue) {
    linear<T, T>({x, w.in, static_cast<const T*>(w.packed), w.bias, y, width, w.in, w.out, epilogue}, rows);
}

// residual [rows, hidden] in place. `scratch` holds, one after the other, normed rows [rows, hidden], projections
// [rows, (q_heads + 2 kv_heads) * head_dim], attended [rows, q_heads * head_dim] and inner [rows, intermediate].
template <typename T>
void run_layers(
    const Shape& shape, const Layer* layers, T* residual, const int64_t* positions, const PageTables& tables, T* scratch
) {
    const int rows = tables.tokens, hidden = shape.hidden;
    const int q_width = shape.q_heads * shape.head_dim, kv_width = shape.kv_heads * shape.head_dim;
    const int qkv_width = q_width + 2 * kv_width;
    T* normed = scratch;
    T* q = normed + int64_t(rows) * hidden;
    T* k = q + q_width;
    T* v = k + kv_width;
    T* attended = q + int64_t(rows) * qkv_width;
    T* inner = attended + int64_t(rows) * q_width;
    for (int i = 0; i < shape.layers; i++) {
        const Layer& layer = layers[i];
        const auto norm = [&](const void* weight) {
            rms_norm(residual, hidden, static_cast<const T*>(weight), normed, hidden, rows, hidden, shape.eps);
        };
        norm(layer.input_norm);
        apply(layer.qkv, normed, q, qkv_width, rows, kStore);
        if (layer.q_norm && layer.k_norm) {
            const T *q_norm = static_cast<const T*>(layer.q_norm), *k_norm = static_cast<const T*>(layer.k_norm);
            head_norm(q, qkv_width, shape.q_heads, shape.head_dim, q_norm, rows, shape.eps);
            head_norm(k, qkv_width, shape.kv_heads, shape.head_dim, k_norm, rows, shape.eps);
        }
        rope(
            q, qkv_width, shape.q_heads, k, qkv_width, shape.kv_heads, shape.head_dim, positions, shape.cos_sin,
            shape.rot_dim, rows
        );
        attention<T>(
            {static_cast<T*>(layer.pool), shape.page_size, shape.kv_heads, shape.q_heads / shape.kv_heads,
             shape.head_dim, shape.scale, q, qkv_width, k, qkv_width, v, qkv_width, attended},
            tables
        );
        apply(layer.output, attended, residual, hidden, rows, kAddTo);
        norm(layer.post_attention_norm);
        apply(layer.gate_up, normed, inner, layer.gate_up.out / 2, rows, kSiluMul);
        apply(layer.down, inner, residual, hidden, rows, kAddTo);
    }
}

}  // namespace
}  // namespace triptych

#define TRIPTYCH_LAYERS(T, NAME)                                                                                     \
    void triptych_layers_##NAME(                                                                                     \
        const triptych::Shape* shape, const triptych::Layer* layers, T* residual, const int64_t* positions,          \
        const triptych::PageTables* tables, T* scratch                                                               \
    ) {                                                                                                              \
        triptych::run_layers(*shape, layers, residual, positions, *tables, scratch);                                 \
    }

extern "C" {
TRIPTYCH_LAYERS(float, f32)
TRIPTYCH_LAYERS(triptych::bf16, bf16)
}
