// Attention of many single queries over their own K/V, all requests of a layer in one call.
//
// A task is one request's queries that share a K/V head, so K and V are read once for the whole group of heads. Scores go
// through a running maximum and sum, as in flash attention, a block of keys at a time, so that a block's scores stay in
// registers and the first-level cache.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace {

constexpr int kBlock = 64;    // keys of a block
constexpr int kMaxGroup = 16; // query heads of a task; a larger group is cut
constexpr float kMinusInf = -INFINITY;

// exp(x) for x <= 0, within two units in the last place; by hand, because the library's own has no vector form that
// keeps NaN and infinity as they are.
inline float exponential(float x) {
  const float clamped = x < -87.0f ? -87.0f : x; // also keeps a NaN
  const float n = std::nearbyint(clamped * 1.44269504088896341f);
  float r = clamped - n * 0.693359375f;
  r -= n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  union {
    int32_t i;
    float f;
  } scale;
  scale.i = (static_cast<int32_t>(n) + 127) << 23;
  return x < -87.0f ? 0.0f : p * scale.f;
}

inline float widen(float x) { return x; }

// bfloat16 is the upper half of a float32.
inline float widen(uint16_t x) {
  union {
    uint32_t i;
    float f;
  } wide;
  wide.i = static_cast<uint32_t>(x) << 16;
  return wide.f;
}

inline void narrow(float x, float* out) { *out = x; }

inline void narrow(float x, uint16_t* out) {
  union {
    float f;
    uint32_t i;
  } wide;
  wide.f = x;
  const uint32_t rounded = (wide.i + 0x7fff + ((wide.i >> 16) & 1)) >> 16; // to the nearest, to even
  *out = x != x ? 0x7fc0 : static_cast<uint16_t>(rounded);
}

template <typename T>
inline float dot(const float* __restrict a, const T* __restrict b, int size) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int i = 0; i < size; ++i) sum += a[i] * widen(b[i]);
  return sum;
}

template <typename T>
inline void scaled_add(float* __restrict out, const T* __restrict row, float weight, int size) {
#pragma omp simd
  for (int i = 0; i < size; ++i) out[i] += weight * widen(row[i]);
}

// query:        (total_q, num_heads, head_dim), strides in elements, the last one 1
// key_cache:    (num_slots, num_kv_heads, head_dim), likewise
// value_cache:  (num_slots, num_kv_heads, v_head_dim), likewise
// requests:     (num_requests): which requests of the batch to serve, each with one query
// cu_seqlens_q, kv_lens, block_table (all requests, table_width): as in RaggedBatch
// out:          (total_q, num_heads, v_head_dim), contiguous; other rows are left alone
// sliding_window 0: none. softcap 0: none. sinks, slopes: (num_heads) or null.
template <typename T>
void decode(const T* query, int64_t query_row, int64_t query_head, const T* key_cache, int64_t key_slot,
            int64_t key_head, const T* value_cache, int64_t value_slot, int64_t value_head, const int32_t* requests,
            int64_t num_requests, const int32_t* cu_seqlens_q, const int32_t* kv_lens, const int32_t* block_table,
            int64_t table_width, T* out, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
            int64_t v_head_dim, int64_t block_size, int64_t sliding_window, float scaling, float softcap,
            const float* sinks, const float* slopes, int64_t num_threads) {
  const int group = static_cast<int>(num_heads / num_kv_heads);
  const int parts = (group + kMaxGroup - 1) / kMaxGroup;
  const int64_t num_tasks = num_requests * num_kv_heads * parts;
#pragma omp parallel for schedule(dynamic, 1) num_threads(num_threads) if (num_tasks > 1)
  for (int64_t task = 0; task < num_tasks; ++task) {
    const int32_t request = requests[task / (num_kv_heads * parts)];
    const int64_t row = cu_seqlens_q[request];
    const int64_t kv_head = task / parts % num_kv_heads;
    const int first = static_cast<int>(task % parts) * kMaxGroup;
    const int heads = std::min(group - first, kMaxGroup);
    const int64_t head0 = kv_head * group + first;
    const int kv_len = kv_lens[request];
    const int begin = sliding_window > 0 ? static_cast<int>(std::max<int64_t>(0, kv_len - sliding_window)) : 0;
    const int32_t* table = block_table + request * table_width;

    // In float32, whatever the tensors are in: the queries, and what is added up.
    thread_local std::vector<float> memory;
    memory.assign(heads * (head_dim + v_head_dim), 0.0f);
    float* const queries = memory.data();
    float* const result = queries + heads * head_dim;
    for (int h = 0; h < heads; ++h) {
      const T* q = query + row * query_row + (head0 + h) * query_head;
      for (int64_t i = 0; i < head_dim; ++i) queries[h * head_dim + i] = scaling * widen(q[i]);
    }
    float top[kMaxGroup], sum[kMaxGroup];
    alignas(64) float scores[kMaxGroup][kBlock];
    for (int h = 0; h < heads; ++h) {
      top[h] = sinks ? sinks[head0 + h] : kMinusInf;
      sum[h] = sinks ? 1.0f : 0.0f;
    }
    for (int start = begin; start < kv_len; start += kBlock) {
      const int count = std::min(kBlock, kv_len - start);
      int64_t slots[kBlock];
      for (int j = 0; j < count; ++j) {
        const int p = start + j;
        slots[j] = static_cast<int64_t>(table[p / block_size]) * block_size + p % block_size;
      }
      for (int j = 0; j < count; ++j) {
        const T* key = key_cache + slots[j] * key_slot + kv_head * key_head;
        for (int h = 0; h < heads; ++h) scores[h][j] = dot(queries + h * head_dim, key, head_dim);
      }
      for (int h = 0; h < heads; ++h) {
        float* s = scores[h];
        if (softcap > 0.0f)
          for (int j = 0; j < count; ++j) s[j] = softcap * std::tanh(s[j] / softcap);
        if (slopes)
          for (int j = 0; j < count; ++j) s[j] += slopes[head0 + h] * static_cast<float>(start + j - (kv_len - 1));
        float highest = top[h];
        for (int j = 0; j < count; ++j) highest = s[j] > highest || s[j] != s[j] ? s[j] : highest;
        const float rescale = top[h] == kMinusInf ? 0.0f : exponential(top[h] - highest);
        float block_sum = 0.0f;
#pragma omp simd reduction(+ : block_sum)
        for (int j = 0; j < count; ++j) {
          s[j] = exponential(s[j] - highest);
          block_sum += s[j];
        }
        sum[h] = sum[h] * rescale + block_sum;
        top[h] = highest;
        if (rescale != 1.0f)
          for (int64_t i = 0; i < v_head_dim; ++i) result[h * v_head_dim + i] *= rescale;
      }
      for (int j = 0; j < count; ++j) {
        const T* value = value_cache + slots[j] * value_slot + kv_head * value_head;
        for (int h = 0; h < heads; ++h) scaled_add(result + h * v_head_dim, value, scores[h][j], v_head_dim);
      }
    }
    T* target = out + (row * num_heads + head0) * v_head_dim;
    for (int h = 0; h < heads; ++h)
      for (int64_t i = 0; i < v_head_dim; ++i) narrow(result[h * v_head_dim + i] / sum[h], target + h * v_head_dim + i);
  }
}

}  // namespace

extern "C" {

#define ORCA_DECODE(NAME, T)                                                                                          \
  void NAME(const T* query, int64_t query_row, int64_t query_head, const T* key_cache, int64_t key_slot,             \
            int64_t key_head, const T* value_cache, int64_t value_slot, int64_t value_head, const int32_t* requests, \
            int64_t num_requests, const int32_t* cu_seqlens_q, const int32_t* kv_lens, const int32_t* block_table,   \
            int64_t table_width, T* out, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,                  \
            int64_t v_head_dim, int64_t block_size, int64_t sliding_window, float scaling, float softcap,            \
            const float* sinks, const float* slopes, int64_t num_threads) {                                          \
    decode<T>(query, query_row, query_head, key_cache, key_slot, key_head, value_cache, value_slot, value_head,      \
              requests, num_requests, cu_seqlens_q, kv_lens, block_table, table_width, out, num_heads, num_kv_heads, \
              head_dim, v_head_dim, block_size, sliding_window, scaling, softcap, sinks, slopes, num_threads);       \
  }

ORCA_DECODE(orca_decode_f32, float)
ORCA_DECODE(orca_decode_bf16, uint16_t)
}
