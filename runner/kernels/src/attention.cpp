// Causal attention over a paged KV pool [pages, 2, page_size, kv_heads, head_dim], pages read in place, softmax
// online.
//
// One unit of work is a few consecutive tokens of a row times the query heads that share a key/value head. It walks
// the row's keys from position 0 in blocks of 64: packs them (and the values) into the panels of vec.h, so that
// scores and weighted sums are the same register tile as a linear. Decode is the case of one token.
//
// Two properties that the tests hold it to. Only slots below the row's length are ever read (unused ones may hold
// NaN). And a token's result is the same bits whatever chunk, batch or tile it came in: blocks start at fixed
// positions, and a key that is masked adds exactly zero.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <new>

#include "kernels.h"

namespace triptych {
namespace {

constexpr int kBlock = 2 * kPanel;  // keys per step of the online softmax

template <typename T>
struct Step : Attention<T>, PageTables {};

// One thread's working memory, carved from one allocation that grows and is kept.
class Scratch {
  public:
    ~Scratch() { std::free(memory_); }

    void reset(size_t bytes) {
        used_ = 0;
        if (bytes <= size_) return;
        std::free(memory_);
        size_ = (bytes + 4095) / 4096 * 4096;
        memory_ = static_cast<char*>(std::aligned_alloc(64, size_));
        if (!memory_) throw std::bad_alloc();
    }

    template <typename T>
    T* take(size_t count) {
        T* taken = reinterpret_cast<T*>(memory_ + used_);
        used_ += (count * sizeof(T) + 63) / 64 * 64;
        return taken;
    }

  private:
    char* memory_ = nullptr;
    size_t size_ = 0, used_ = 0;
};

inline void transpose16(u32x16 (&v)[16]) {
    const u32x16 low = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
    const u32x16 high = {8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
#pragma GCC unroll 4
    for (int stage = 0; stage < 4; stage++) {  // four perfect shuffles of 256 elements are a transpose
        u32x16 w[16];
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            w[2 * i] = __builtin_shuffle(v[i], v[i + 8], low);
            w[2 * i + 1] = __builtin_shuffle(v[i], v[i + 8], high);
        }
        for (int i = 0; i < 16; i++) v[i] = w[i];
    }
}

// 32 keys of head_dim elements -> one panel [head_dim / depth][32][depth].
template <typename T>
void pack_keys(const T* const* keys, T* panel, int head_dim) {
    constexpr int depth = kDepth<T>, step = kLanes * depth;
    int d = 0;
    for (; d + step <= head_dim; d += step)
        for (int half = 0; half < 2; half++) {
            u32x16 v[16];
            for (int i = 0; i < 16; i++) v[i] = load<u32x16>(keys[half * kLanes + i] + d);
            transpose16(v);
            T* to = panel + d * kPanel + half * step;
            for (int i = 0; i < 16; i++) store(to + i * kPanel * depth, v[i]);
        }
    for (; d < head_dim; d += depth)
        for (int c = 0; c < kPanel; c++) std::memcpy(panel + d * kPanel + c * depth, keys[c] + d, 4);
}

// 32 values -> panels of 32 columns of the head: [ceil(head_dim / 32)][kBlock / depth][32][depth]; this fills 32 of the
// kBlock positions of depth, beginning at `panels`.
void pack_values(const float* const* values, float* panels, int head_dim) {
    for (int d = 0; d < head_dim; d += kLanes) {
        float* to = panels + d / kPanel * kPanel * kBlock + d % kPanel;
        for (int i = 0; i < kPanel; i++) store16(to + i * kPanel, load16(values[i] + d));
    }
}

void pack_values(const bf16* const* values, bf16* panels, int head_dim) {
    typedef uint16_t u16x32 __attribute__((vector_size(64)));
    const u16x32 low = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                        8,  40, 9,  41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const u16x32 high = low + 16;
    int d = 0;
    for (; d + kPanel <= head_dim; d += kPanel)
        for (int i = 0; i < kPanel; i += 2) {
            bf16* to = panels + d * kBlock + i * kPanel;
            u16x32 even = load<u16x32>(values[i] + d), odd = load<u16x32>(values[i + 1] + d);
            store(to, __builtin_shuffle(even, odd, low));
            store(to + kPanel, __builtin_shuffle(even, odd, high));
        }
    for (; d < head_dim; d++)
        for (int i = 0; i < kPanel; i++)
            panels[d / kPanel * kPanel * kBlock + i / 2 * 2 * kPanel + d % kPanel * 2 + i % 2] = values[i][d];
}

// Walks a row's slots in the order of positions: where each key of a head is; its value lies one plane further.
template <typename T>
class Slots {
  public:
    Slots(const Step<T>& step, int row, int head, int position)
        : width(int64_t(step.kv_heads) * step.head_dim), plane(step.page_size * width),
          first(step.pool + int64_t(head) * step.head_dim),
          page(step.kv_indices + step.kv_indptr[row] + position / step.page_size), page_size(step.page_size),
          offset(position % step.page_size), key(first + 2 * *page * plane + offset * width) {}

    const T* next() {
        if (offset == page_size) {  // looked up only now: there may be no page after the last
            offset = 0;
            key = first + 2 * *++page * plane;
        }
        const T* found = key;
        offset++;
        key += width;
        return found;
    }

  private:
    const int64_t width, plane;
    const T* first;
    const int32_t* page;
    const int page_size;
    int offset;
    const T* key;
};

// Fetches what is worked on next, a little at a time between the work on what is there: pages are scattered and a
// head's part of a token is a line or two, so no hardware prefetcher follows, and many lines at once would only
// stall.
template <typename T>
class Ahead {
  public:
    Ahead(const Step<T>& step, int head, int heads) : step(step), head(head), heads(heads) {}

    void aim(int next_row, int begin, int past) {
        row = next_row;
        position = begin;
        end = std::min(begin + kBlock, past);
        share = (kBlock + kShares * heads - 1) / (kShares * heads);
    }

    void fetch() {
        const int stop = std::min(end, position + share);
        if (position >= stop) return;
        const int64_t plane = int64_t(step.page_size) * step.kv_heads * step.head_dim;
        for (int64_t part : {int64_t(0), plane}) {  // all keys, then all values: the longest runs of addresses
            Slots<T> slots(step, row, head, position);
            for (int i = position; i < stop; i++) {
                const T* from = slots.next() + part;
                for (int j = 0; j < heads * step.head_dim; j += 64 / int(sizeof(T))) __builtin_prefetch(from + j);
            }
        }
        position = stop;
    }

  private:
    static constexpr int kShares = 7;  // calls of fetch() per head and block
    const Step<T>& step;
    const int head, heads;
    int row = 0, position = 0, end = 0, share = 0;
};

// Consecutive tokens of a row, times the query heads of `heads` key/value heads from `head` on. Query i is
// (head, token, query head within the group), in this order.
template <typename T>
class Unit {
  public:
    // `next` is the unit that this thread is likely to do after this one; past the last if none.
    Unit(const Step<T>& step, int unit, int next, int head, int heads, Scratch& scratch)
        : step(step), row(step.unit_rows[unit]), first(step.unit_firsts[unit]), next_unit(next), head(head),
          heads(heads), ahead(step, head, heads) {
        const int length = step.qo_indptr[row + 1] - step.qo_indptr[row];
        const int count = std::min(step.unit_tokens, length - first);
        start = step.seq_lens[row] - length + first;
        end = start + count;
        rows = count * step.group;
        columns = (step.head_dim + kPanel - 1) / kPanel * kPanel;
        const size_t dim = step.head_dim, all = size_t(heads) * rows;
        scratch.reset(
            64 * 8 + sizeof(T) * (all * dim + kBlock * (dim + columns + kTileRows) + dim) +
            all * (columns * sizeof(float) + sizeof(float) + sizeof(f32x16))
        );
        queries = scratch.take<T>(all * dim);
        keys = scratch.take<T>(kBlock * dim);
        values = scratch.take<T>(kBlock * columns);
        weights = scratch.take<T>(kTileRows * kBlock);
        zeros = scratch.take<T>(dim);
        sums = scratch.take<float>(all * columns);
        top = scratch.take<float>(all);
        totals = scratch.take<f32x16>(all);
        std::memset(zeros, 0, dim * sizeof(T));
        if (columns > step.head_dim) std::memset(values, 0, kBlock * columns * sizeof(T));
    }

    void run() {
        const int all = heads * rows, dim = step.head_dim, tiles = (rows + kTileRows - 1) / kTileRows;
        const int64_t q_heads = int64_t(step.kv_heads) * step.group;
        for (int i = 0; i < all; i++) {
            std::memcpy(queries + i * dim, step.q + token(i) * step.q_stride + q_head(i) * dim, dim * sizeof(T));
            top[i] = -std::numeric_limits<float>::infinity();
            totals[i] = f32x16{};
        }
        std::fill(sums, sums + all * columns, 0.0f);
        for (block = 0; block < end; block += kBlock) {
            panels = std::min(2, (end - block + kPanel - 1) / kPanel);
            if (block + kBlock < end)
                ahead.aim(row, block + kBlock, end);
            else if (next_unit < step.units)
                ahead.aim(step.unit_rows[next_unit], 0, step.seq_lens[step.unit_rows[next_unit]]);
            for (int h = 0; h < heads; h++) {
                gather(head + h);
                ahead.fetch();
                for (int t = 0; t < tiles; t++) {
                    const int base = rows * t / tiles;
                    attend_of(rows * (t + 1) / tiles - base, h * rows + base);
                }
            }
        }
        for (int i = 0; i < all; i++) {
            const float scale = 1.0f / sum_lanes(totals[i]);
            T* out = step.out + (token(i) * q_heads + q_head(i)) * dim;
            for (int d = 0; d < dim; d += kLanes) store16(out + d, load16(sums + i * columns + d) * scale);
        }
    }

  private:
    const Step<T>& step;
    const int row, first, next_unit, head, heads;
    Ahead<T> ahead;
    int start, end;    // positions: of the first token, and past the last
    int rows;          // queries of one key/value head
    int columns;       // head_dim rounded up to whole panels
    int block, panels; // first position and 32-key panels of the present block
    T *queries, *keys, *values, *weights, *zeros;
    float* sums;     // [heads * rows][columns]: outputs before normalising
    float* top;      // [heads * rows]: running maximum
    f32x16* totals;  // [heads * rows]: running sum of weights, by lane

    int64_t token(int i) const { return step.qo_indptr[row] + first + i % rows / step.group; }

    int64_t q_head(int i) const { return (head + i / rows) * step.group + i % step.group; }

    void gather(int kv_head) {
        const int64_t plane = int64_t(step.page_size) * step.kv_heads * step.head_dim;
        Slots<T> slots(step, row, kv_head, block);
        for (int p = 0; p < panels; p++) {
            const T *key[kPanel], *value[kPanel];
            for (int i = 0; i < kPanel; i++) {
                const bool used = block + p * kPanel + i < end;
                key[i] = used ? slots.next() : zeros;
                value[i] = used ? key[i] + plane : zeros;
            }
            ahead.fetch();
            pack_keys(key, keys + p * kPanel * step.head_dim, step.head_dim);
            ahead.fetch();
            pack_values(value, values + p * kPanel * kPanel, step.head_dim);
        }
    }

    // Adds the present block to queries base .. base + ROWS, all of one head.
    template <int ROWS>
    void attend(int base) {
        const int dim = step.head_dim, width = panels * kPanel;
        float scores[ROWS][kBlock];
        for (int p = 0; p < panels; p++) {
            f32x16 acc[ROWS][2] = {};
            tile<T, ROWS>(acc, queries + base * dim, dim, keys + p * kPanel * dim, dim / kDepth<T>, nullptr);
            for (int r = 0; r < ROWS; r++)
                for (int half = 0; half < 2; half++) store16(scores[r] + p * kPanel + half * kLanes, acc[r][half]);
        }
        ahead.fetch();
        float shrink[ROWS];
        for (int r = 0; r < ROWS; r++) shrink[r] = soften(scores[r], base + r, width, weights + r * kBlock);
        ahead.fetch();
        for (int column = 0; column < columns; column += kPanel) {
            f32x16 acc[ROWS][2];
            float* sum = sums + base * columns + column;
            for (int r = 0; r < ROWS; r++)
                for (int half = 0; half < 2; half++)
                    acc[r][half] = load16(sum + r * columns + half * kLanes) * shrink[r];
            tile<T, ROWS>(acc, weights, kBlock, values + column * kBlock, width / kDepth<T>, nullptr);
            for (int r = 0; r < ROWS; r++)
                for (int half = 0; half < 2; half++) store16(sum + r * columns + half * kLanes, acc[r][half]);
        }
    }

    template <int ROWS = kTileRows>
    void attend_of(int count, int base) {
        if constexpr (ROWS > 0) {
            if (count == ROWS) return attend<ROWS>(base);
            attend_of<ROWS - 1>(count, base);
        }
    }

    // Scores of one query -> weights 2^(score - maximum); returns what earlier sums are to be multiplied with.
    float soften(float* scores, int i, int width, T* weight) {
        const int visible = start + i % rows / step.group + 1 - block;
        const float hidden = -std::numeric_limits<float>::infinity();
        for (int c = std::max(0, visible); c < width; c++) scores[c] = hidden;
        f32x16 highest = splat(hidden);
        for (int c = 0; c < width; c += kLanes) {
            f32x16 scaled = load16(scores + c) * (step.scale * kLog2E);
            store16(scores + c, scaled);
            highest = max16(highest, scaled);
        }
        const float maximum = std::max(top[i], max_lanes(highest));
        const float shrink = exp2_16(splat(top[i] - maximum))[0];
        top[i] = maximum;
        f32x16 total = totals[i] * shrink;
        for (int c = 0; c < width; c += kLanes) {
            store16(weight + c, exp2_16(load16(scores + c) - maximum));
            total += load16(weight + c);  // as rounded, so that the weights applied sum to one
        }
        totals[i] = total;
        return shrink;
    }
};

template <typename T>
int unit_tokens_of(const Step<T>& step, int unit) {
    const int row = step.unit_rows[unit];
    return std::min(step.unit_tokens, step.qo_indptr[row + 1] - step.qo_indptr[row] - step.unit_firsts[unit]);
}

template <typename T>
void append(const Step<T>& step, int token) {
    const int64_t slot = step.slots[token];
    if (slot < 0) return;  // a token that is not to be kept
    const int64_t width = int64_t(step.kv_heads) * step.head_dim, plane = step.page_size * width;
    T* to = step.pool + 2 * (slot / step.page_size) * plane + slot % step.page_size * width;
    std::memcpy(to, step.k + token * step.k_stride, width * sizeof(T));
    std::memcpy(to + plane, step.v + token * step.v_stride, width * sizeof(T));
}

}  // namespace

template <typename T>
void attention(const Attention<T>& job, const PageTables& tables) {
    const Step<T> step{job, tables};
    const int work = step.units * step.kv_heads;
#pragma omp parallel
    {
        const int threads = omp_get_num_threads();
#pragma omp for schedule(static)
        for (int token = 0; token < step.tokens; token++) append(step, token);
        // (the barrier here: every key is in place before any is read)
        static thread_local Scratch scratch;
        // A decode does little with each key: where there are enough of them for all threads, one thread takes all
        // heads, so that it reads whole pages in order. Otherwise every head is a task of its own.
        const bool whole = step.units >= 2 * threads;
#pragma omp for schedule(dynamic)
        for (int i = 0; i < work; i++) {
            const int unit = i / step.kv_heads, head = i % step.kv_heads;
            const bool grouped = whole && unit_tokens_of(step, unit) == 1;
            if (grouped && head) continue;
            const int heads = grouped ? step.kv_heads : 1;
            Unit<T>(step, unit, grouped ? unit + threads : step.units, head, heads, scratch).run();
        }
    }
}

template void attention(const Attention<float>&, const PageTables&);
template void attention(const Attention<bf16>&, const PageTables&);

}  // namespace triptych

using triptych::bf16;

#define TRIPTYCH_ATTENTION(T, NAME)                                                                                  \
    void triptych_attention_##NAME(                                                                                  \
        T* pool, int page_size, int kv_heads, int group, int head_dim, float scale, const T* q, int64_t q_stride,    \
        const T* k, int64_t k_stride, const T* v, int64_t v_stride, T* out, const triptych::PageTables* tables       \
    ) {                                                                                                              \
        triptych::attention<T>(                                                                                      \
            {pool, page_size, kv_heads, group, head_dim, scale, q, q_stride, k, k_stride, v, v_stride, out}, *tables \
        );                                                                                                           \
    }

extern "C" {
TRIPTYCH_ATTENTION(float, f32)
TRIPTYCH_ATTENTION(bf16, bf16)

// How many query rows (tokens times heads of a group) a unit of attention may hold.
int triptych_attention_rows() { return 4 * triptych::kTileRows; }
}
