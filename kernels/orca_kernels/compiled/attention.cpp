// Attention of single queries, each over the K/V that it sees: all requests of a layer in one call.
//
// K and V are read once for all heads that share them. Scores go through a running maximum and sum, as in flash attention,
// a block of keys at a time, so that a block's scores stay in registers and the first-level cache.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include <omp.h>

#include "bfloat16.h"
#include "exponential.h"
#include "vector.h"

namespace {

constexpr int kBlock = 64;    // keys of a block
constexpr int kMaxGroup = 16; // query heads of a task; a larger group is cut
constexpr int kHeads = 4;     // of these at a time, so that what they add up stays in registers
constexpr int kWidth = 4;     // and so many vectors of a value
constexpr float kMinusInf = -INFINITY;

inline Vector load(const float* x) { return *reinterpret_cast<const Vector*>(x); }

inline Vector load(const uint16_t* x) {
  const Words wide = __builtin_convertvector(*reinterpret_cast<const Halves*>(x), Words) << 16;
  return reinterpret_cast<const Vector&>(wide);
}

// Vector `i` of a row of `size`: what is past its end is 0.
template <typename T>
inline Vector load_of(const T* x, int i, int size) {
  if ((i + 1) * kLanes <= size) return load(x + i * kLanes);
  T padded[kLanes] = {};
  std::memcpy(padded, x + i * kLanes, (size - i * kLanes) * sizeof(T));
  return load(padded);
}

// The slots of a block of keys.
struct Slots {
  int count = 0;
  int64_t slot[kBlock];
};

// The K or the V of one head.
template <typename T>
struct Cache {
  const T* base;
  int64_t stride; // from slot to slot
  int size;       // of a row

  const T* row(int64_t slot) const { return base + slot * stride; }
  int vectors() const { return (size + kLanes - 1) / kLanes; }
  void prefetch(int64_t slot) const {
    for (int i = 0; i < size; i += 64 / sizeof(T)) __builtin_prefetch(row(slot) + i, 0, 2);
  }
};

// scores[h][j] of HEADS queries with a block's keys. The keys of the block after it are on their way meanwhile.
template <int HEADS, typename T>
void score(const float* queries, Cache<T> keys, const Slots& slots, const Slots& next, float (*scores)[kBlock]) {
  const int vectors = keys.vectors();
  for (int j = 0; j < slots.count; ++j) {
    if (j < next.count) keys.prefetch(next.slot[j]);
    const T* row = keys.row(slots.slot[j]);
    Vector sums[HEADS] = {};
    for (int i = 0; i < vectors; ++i) {
      const Vector key = load_of(row, i, keys.size);
#pragma GCC unroll 4
      for (int h = 0; h < HEADS; ++h) sums[h] += key * load(queries + (h * vectors + i) * kLanes);
    }
    for (int h = 0; h < HEADS; ++h) scores[h][j] = add_up(sums[h]);
  }
}

// result[h] = rescale[h] * result[h] + sum over j of weights[h][j] * values[j]: WIDTH vectors from the first on, whose last
// may be cut short by the row's end if WIDTH is 1. The values of the block after it are on their way meanwhile.
template <int HEADS, int WIDTH, typename T>
void add_values(float* result, int first, const float* rescale, Cache<T> values, const Slots& slots,
                const Slots& next, const float (*weights)[kBlock]) {
  const int row = values.vectors() * kLanes;
  float* const target = result + first * kLanes;
  Vector sums[HEADS][WIDTH];
#pragma GCC unroll 4
  for (int h = 0; h < HEADS; ++h)
#pragma GCC unroll 4
    for (int i = 0; i < WIDTH; ++i) sums[h][i] = load(target + h * row + i * kLanes) * rescale[h];
  for (int j = 0; j < slots.count; ++j) {
    if (first == 0 && j < next.count) values.prefetch(next.slot[j]);
    const T* const from = values.row(slots.slot[j]);
#pragma GCC unroll 4
    for (int i = 0; i < WIDTH; ++i) {
      const Vector value = WIDTH == 1 ? load_of(from, first, values.size) : load(from + (first + i) * kLanes);
#pragma GCC unroll 4
      for (int h = 0; h < HEADS; ++h) sums[h][i] += value * weights[h][j];
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < HEADS; ++h)
#pragma GCC unroll 4
    for (int i = 0; i < WIDTH; ++i) *reinterpret_cast<Vector*>(target + h * row + i * kLanes) = sums[h][i];
}

// From scores to weights exp(score - top), where top and sum go on from block to block. Returns what the results so far
// must be multiplied by.
inline float weigh(float* __restrict scores, int count, float& top, float& sum) {
  float highest = top;
  for (int j = 0; j < count; ++j) highest = scores[j] > highest || scores[j] != scores[j] ? scores[j] : highest;
  const float rescale = top == kMinusInf ? 0.0f : exponential(top - highest);
  float added = 0.0f;
#pragma omp simd reduction(+ : added)
  for (int j = 0; j < count; ++j) {
    scores[j] = exponential(scores[j] - highest);
    added += scores[j];
  }
  sum = sum * rescale + added;
  top = highest;
  return rescale;
}

// What a block of keys does for HEADS of a task's heads. `distance`: from the query to the block's first key.
template <int HEADS, typename T>
void attend(const float* queries, Cache<T> keys, Cache<T> values, const Slots& slots, const Slots& next, float* result,
            float* top, float* sum, float softcap, const float* slopes, int distance) {
  alignas(64) float scores[HEADS][kBlock];
  float rescale[HEADS];
  score<HEADS>(queries, keys, slots, next, scores);
  for (int h = 0; h < HEADS; ++h) {
    float* s = scores[h];
    if (softcap > 0.0f)
      for (int j = 0; j < slots.count; ++j) s[j] = softcap * std::tanh(s[j] / softcap);
    if (slopes)
      for (int j = 0; j < slots.count; ++j) s[j] += slopes[h] * static_cast<float>(distance + j);
    rescale[h] = weigh(s, slots.count, top[h], sum[h]);
  }
  int i = 0;
  for (; (i + kWidth) * kLanes <= values.size; i += kWidth)
    add_values<HEADS, kWidth>(result, i, rescale, values, slots, next, scores);
  for (; i < values.vectors(); ++i) add_values<HEADS, 1>(result, i, rescale, values, slots, next, scores);
}

template <typename T>
using Attend = void (*)(const float*, Cache<T>, Cache<T>, const Slots&, const Slots&, float*, float*, float*, float,
                        const float*, int);

// query:        (total_q, num_heads, head_dim), strides in elements, the last one 1
// key_cache:    (num_slots, num_kv_heads, head_dim), likewise
// value_cache:  (num_slots, num_kv_heads, v_head_dim), likewise
// rows:         (num_queries): which rows of `query` to serve
// requests:     (num_queries): the request of each
// kv_lens:      (num_queries): keys that each sees
// block_table:  (num_requests, table_width): as in RaggedBatch
// out:          (total_q, num_heads, v_head_dim), contiguous; other rows are left alone
// sliding_window 0: none. softcap 0: none. sinks, slopes: (num_heads) or null.
template <typename T>
void decode(const T* query, int64_t query_row, int64_t query_head, const T* key_cache, int64_t key_slot,
            int64_t key_head, const T* value_cache, int64_t value_slot, int64_t value_head, const int32_t* rows,
            const int32_t* requests, const int32_t* kv_lens, int64_t num_queries, const int32_t* block_table,
            int64_t table_width, T* out, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
            int64_t v_head_dim, int64_t block_size, int64_t sliding_window, float scaling, float softcap,
            const float* sinks, const float* slopes, int64_t num_threads) {
  constexpr Attend<T> by_heads[] = {nullptr, attend<1, T>, attend<2, T>, attend<3, T>, attend<4, T>};
  const int64_t group = num_heads / num_kv_heads;
  const int64_t key_row = (head_dim + kLanes - 1) / kLanes * kLanes, value_row = (v_head_dim + kLanes - 1) / kLanes * kLanes;
  // A task is a query: its heads lie side by side in the caches and are best read together. With few queries it is some
  // heads of one K/V head, so that all threads have work.
  const bool few = num_queries < 2 * num_threads;
  const int64_t step = std::min<int64_t>(group, kMaxGroup), cuts = (group + step - 1) / step;
  const int64_t parts = few ? num_kv_heads * cuts : 1, num_tasks = num_queries * parts;

  const auto begin_of = [&](int64_t i) {
    return sliding_window > 0 ? static_cast<int>(std::max<int64_t>(0, kv_lens[i] - sliding_window)) : 0;
  };
  // Blocks of equal size, so that each has the time to fetch the next.
  const auto num_blocks = [&](int64_t i) { return (kv_lens[i] - begin_of(i) + kBlock - 1) / kBlock; };
  const auto start_of = [&](int64_t i, int64_t block) {
    return begin_of(i) + static_cast<int>((kv_lens[i] - begin_of(i)) * block / num_blocks(i));
  };
  const auto find_slots = [&](int64_t i, int64_t block, Slots& slots) {
    const int start = start_of(i, block);
    slots.count = start_of(i, block + 1) - start;
    for (int j = 0; j < slots.count; ++j) {
      const int64_t p = start + j;
      slots.slot[j] = block_table[requests[i] * table_width + p / block_size] * block_size + p % block_size;
    }
  };
  int64_t num_keys = 0;
  for (int64_t i = 0; i < num_queries; ++i) num_keys += kv_lens[i] - begin_of(i);

#pragma omp parallel num_threads(num_threads) if (num_tasks > 1)
  {
    // Each thread takes neighbouring tasks, which make up its share of the keys.
    const int64_t me = omp_get_thread_num(), num = omp_get_num_threads();
    int64_t task = 0, end = 0;
    for (int64_t i = 0, before = 0; i < num_tasks; ++i) {
      const int64_t owner = before * num / (num_keys * parts);
      task += owner < me;
      end += owner <= me;
      before += kv_lens[i / parts] - begin_of(i / parts);
    }
    std::vector<float> memory;
    Slots slots, next;
    if (task < end) find_slots(task / parts, 0, next);
    for (; task < end; ++task) {
      const int64_t i = task / parts, row = rows[i], part = task % parts;
      const int kv_len = kv_lens[i];
      const int64_t head0 = few ? part / cuts * group + part % cuts * step : 0;
      const int64_t heads = few ? std::min(step, group - part % cuts * step) : num_heads;

      // In float32, whatever the tensors are in, and in whole vectors: the queries, and what is added up.
      memory.assign(heads * (key_row + value_row + 2), 0.0f);
      float* const queries = memory.data();
      float* const result = queries + heads * key_row;
      float* const top = result + heads * value_row;
      float* const sum = top + heads;
      for (int64_t h = 0; h < heads; ++h) {
        const T* q = query + row * query_row + (head0 + h) * query_head;
        for (int64_t d = 0; d < head_dim; ++d) queries[h * key_row + d] = scaling * widen(q[d]);
        top[h] = sinks ? sinks[head0 + h] : kMinusInf;
        sum[h] = sinks ? 1.0f : 0.0f;
      }
      for (int block = 0; block < num_blocks(i); ++block) {
        const int start = start_of(i, block);
        slots = next;
        next.count = 0;
        if (block + 1 < num_blocks(i)) {
          find_slots(i, block + 1, next);
        } else if (task + 1 < end) {
          find_slots((task + 1) / parts, 0, next);
        }
        for (int64_t h = 0; h < heads;) {
          const int64_t kv_head = (head0 + h) / group;
          const int64_t same = std::min({int64_t{kHeads}, heads - h, (kv_head + 1) * group - head0 - h});
          by_heads[same](queries + h * key_row,
                         {key_cache + kv_head * key_head, key_slot, static_cast<int>(head_dim)},
                         {value_cache + kv_head * value_head, value_slot, static_cast<int>(v_head_dim)}, slots, next,
                         result + h * value_row, top + h, sum + h, softcap, slopes ? slopes + head0 + h : nullptr,
                         start - (kv_len - 1));
          h += same;
        }
      }
      T* target = out + (row * num_heads + head0) * v_head_dim;
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t d = 0; d < v_head_dim; ++d)
          narrow(result[h * value_row + d] / sum[h], target + h * v_head_dim + d);
    }
  }
}

}  // namespace

extern "C" {

#define ORCA_DECODE(NAME, T)                                                                                         \
  void NAME(const T* query, int64_t query_row, int64_t query_head, const T* key_cache, int64_t key_slot,            \
            int64_t key_head, const T* value_cache, int64_t value_slot, int64_t value_head, const int32_t* rows,    \
            const int32_t* requests, const int32_t* kv_lens, int64_t num_queries, const int32_t* block_table,       \
            int64_t table_width, T* out, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,                 \
            int64_t v_head_dim, int64_t block_size, int64_t sliding_window, float scaling, float softcap,           \
            const float* sinks, const float* slopes, int64_t num_threads) {                                         \
    decode<T>(query, query_row, query_head, key_cache, key_slot, key_head, value_cache, value_slot, value_head,     \
              rows, requests, kv_lens, num_queries, block_table, table_width, out, num_heads, num_kv_heads,         \
              head_dim, v_head_dim, block_size, sliding_window, scaling, softcap, sinks, slopes, num_threads);      \
  }

ORCA_DECODE(orca_decode_f32, float)
ORCA_DECODE(orca_decode_bf16, uint16_t)
}
