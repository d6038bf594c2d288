// y = x Wᵀ + b with W packed once into panels of 32 outputs: [out / 32][in / depth][32][depth], zero beyond `out`.
// At few rows the time is that of streaming the weights; at many it is that of the multiply-accumulates.
#include <algorithm>

#include "kernels.h"

namespace triptych {
namespace {

// Rows whose activations stay in the second-level cache while all panels pass by.
constexpr int kRowChunk = 14 * kTileRows;

template <typename Out>
void put(Out* to, f32x16 v, int count) {
    if (count >= kLanes) {
        store16(to, v);
        return;
    }
    for (int i = 0; i < count; i++) store1(to + i, v[i]);
}

template <typename Out>
f32x16 get(const Out* from, int count) {
    if (count >= kLanes) return load16(from);
    f32x16 v{};
    for (int i = 0; i < count; i++) v[i] = load1(from + i);
    return v;
}

template <typename T, typename Out, int ROWS>
void block(const Linear<T, Out>& job, int row, int panel, const T* ahead) {
    f32x16 acc[ROWS][2];
    for (int half = 0; half < 2; half++) {
        f32x16 start = job.bias ? load16(job.bias + panel * kPanel + half * kLanes) : f32x16{};
        for (int r = 0; r < ROWS; r++) acc[r][half] = start;
    }
    const T* weights = job.packed + ptrdiff_t(panel) * kPanel * job.in;
    const T* x = job.x + row * job.x_stride;
    if (ahead)
        tile<T, ROWS>(acc, x, job.x_stride, weights, job.in / kDepth<T>, ahead);
    else
        tile<T, ROWS>(acc, x, job.x_stride, weights, job.in / kDepth<T>, nullptr);

    if (job.epilogue == kSiluMul) {  // the panel holds 16 gates, then their 16 ups
        Out* y = job.y + row * job.y_stride + panel * kLanes;
        int count = job.out / 2 - panel * kLanes;
        for (int r = 0; r < ROWS; r++, y += job.y_stride) put(y, silu16(acc[r][0]) * acc[r][1], count);
        return;
    }
    Out* y = job.y + row * job.y_stride + panel * kPanel;
    int count = job.out - panel * kPanel;
    for (int r = 0; r < ROWS; r++, y += job.y_stride) {
        for (int half = 0; half < 2; half++) {
            int left = count - half * kLanes;
            if (left <= 0) break;
            f32x16 v = acc[r][half];
            if (job.epilogue == kAddTo) v += get(y + half * kLanes, left);
            put(y + half * kLanes, v, left);
        }
    }
}

template <typename T, typename Out, int ROWS = kTileRows>
void block_of(int rows, const Linear<T, Out>& job, int row, int panel, const T* ahead) {
    if constexpr (ROWS > 0) {
        if (rows == ROWS) return block<T, Out, ROWS>(job, row, panel, ahead);
        block_of<T, Out, ROWS - 1>(rows, job, row, panel, ahead);
    }
}

template <typename T>
void pack(const T* weight, T* packed, int out, int in, bool paired) {
    constexpr int depth = kDepth<T>;
    const int panels = (out + kPanel - 1) / kPanel;
#pragma omp parallel for
    for (int panel = 0; panel < panels; panel++) {
        T* to = packed + ptrdiff_t(panel) * kPanel * in;
        for (int s = 0; s < in / depth; s++)
            for (int c = 0; c < kPanel; c++) {
                int row = panel * kPanel + c;
                if (paired) row = panel * kLanes + c % kLanes + (c < kLanes ? 0 : out / 2);
                for (int d = 0; d < depth; d++)
                    *to++ = row < out ? weight[ptrdiff_t(row) * in + s * depth + d] : T{};
            }
    }
}

}  // namespace

template <typename T, typename Out>
void linear(const Linear<T, Out>& job, int rows) {
    const int panels = (job.out + kPanel - 1) / kPanel;
    for (int begin = 0; begin < rows; begin += kRowChunk) {
        const int end = std::min(rows, begin + kRowChunk);
        // Equal tiles: 16 rows are 8 + 8, not 14 + 2.
        const int tiles = (end - begin + kTileRows - 1) / kTileRows;
#pragma omp parallel for schedule(static)
        for (int panel = 0; panel < panels; panel++) {
            const T* ahead = panel + 1 < panels ? job.packed + ptrdiff_t(panel + 1) * kPanel * job.in : nullptr;
            for (int t = 0; t < tiles; t++) {
                const int first = begin + (end - begin) * t / tiles;
                const int last = begin + (end - begin) * (t + 1) / tiles;
                block_of<T, Out>(last - first, job, first, panel, t == 0 ? ahead : nullptr);
            }
        }
    }
}

template void linear(const Linear<float, float>&, int);
template void linear(const Linear<bf16, bf16>&, int);
template void linear(const Linear<bf16, float>&, int);

}  // namespace triptych

using triptych::bf16;

extern "C" {

// `paired`: out = gates then ups; a panel takes 16 of each, for the kSiluMul epilogue. `out` / 2 must divide by 16
// then.
void triptych_pack_f32(const float* weight, float* packed, int out, int in, int paired) {
    triptych::pack(weight, packed, out, in, paired);
}

void triptych_pack_bf16(const bf16* weight, bf16* packed, int out, int in, int paired) {
    triptych::pack(weight, packed, out, in, paired);
}

void triptych_linear_f32(
    const float* x, int64_t x_stride, const float* packed, const float* bias, float* y, int64_t y_stride, int rows,
    int in, int out, int epilogue
) {
    triptych::linear<float, float>({x, x_stride, packed, bias, y, y_stride, in, out, epilogue}, rows);
}

void triptych_linear_bf16(
    const bf16* x, int64_t x_stride, const bf16* packed, const float* bias, bf16* y, int64_t y_stride, int rows,
    int in, int out, int epilogue
) {
    triptych::linear<bf16, bf16>({x, x_stride, packed, bias, y, y_stride, in, out, epilogue}, rows);
}

void triptych_linear_bf16_f32(
    const bf16* x, int64_t x_stride, const bf16* packed, const float* bias, float* y, int64_t y_stride, int rows,
    int in, int out, int epilogue
) {
    triptych::linear<bf16, float>({x, x_stride, packed, bias, y, y_stride, in, out, epilogue}, rows);
}
}
