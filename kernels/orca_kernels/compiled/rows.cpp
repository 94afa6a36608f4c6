// What happens to each row between a model's products: RMS norm, rotary embedding, the way of K and V to their slots.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include <omp.h>

#include "rows.h"

namespace {

typedef uint32_t Anywhere __attribute__((aligned(1)));  // a word that need not lie on a multiple of its size

constexpr int64_t kSerial = 1 << 15; // elements that are done before a second thread has woken

inline float inverse_rms(const float* __restrict x, int64_t size, float eps) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < size; ++i) sum += x[i] * x[i];
  return 1.0f / std::sqrt(sum / static_cast<float>(size) + eps);
}

inline void norm(const float* x, const float* __restrict weight, float offset, float eps, float* out, int64_t size) {
  const float scale = inverse_rms(x, size, eps);
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) out[i] = x[i] * scale * (offset + weight[i]);
}

// The calling thread's rows of num_rows.
inline std::pair<int64_t, int64_t> own(int64_t num_rows) {
  const int64_t num = omp_get_num_threads(), me = omp_get_thread_num();
  return {num_rows * me / num, num_rows * (me + 1) / num};
}

}  // namespace

void rms_norm_share(Rows x, RmsNorm by, float* out, int64_t num_rows, int64_t size) {
  const auto [begin, end] = own(num_rows);
  for (int64_t r = begin; r < end; ++r) norm(x.row(r), by.weight, by.offset, by.eps, out + r * size, size);
}

void rotate_share(float* x, int64_t x_row, int64_t num_rows, Rotation by) {
  const int64_t num_heads = by.num_q_heads + by.num_k_heads, half = by.head_dim / 2;
  const auto [begin, end] = own(num_rows);
  for (int64_t r = begin; r < end; ++r) {
    const float* __restrict c = by.cosine + r * by.angle_row;
    const float* __restrict s = by.sine + r * by.angle_row;
    for (int64_t h = 0; h < num_heads; ++h) {
      float* head = x + r * x_row + h * by.head_dim;
      const float* weight = h < by.num_q_heads ? by.q_norm : by.k_norm;
      if (weight) norm(head, weight, 0.0f, by.eps, head, by.head_dim);
      float* __restrict first = head;
      float* __restrict second = head + half;
#pragma omp simd
      for (int64_t i = 0; i < half; ++i) {
        const float a = first[i], b = second[i];
        first[i] = a * c[i] - b * s[i];
        second[i] = b * c[half + i] + a * s[half + i];
      }
    }
  }
}

extern "C" {

// x: (num_rows, size), rows x_row apart. weight: (size). out: (num_rows, size), contiguous: x / rms(x) * (offset + weight).
void orca_rms_norm_f32(const float* x, int64_t x_row, const float* weight, float offset, float eps, float* out,
                       int64_t num_rows, int64_t size, int64_t num_threads) {
#pragma omp parallel num_threads(num_threads) if (num_rows * size > kSerial)
  rms_norm_share({x, x_row}, {weight, offset, eps}, out, num_rows, size);
}

// A number for each row: the sum of its words times random factors, in 64 bits. So the change of one word always changes
// it, and any other all but surely; in 32 bits the flip of every sign, which each adds 2^31, would go unseen.
//
// words: (num_rows, size), contiguous, at any address. factors: (size), not 0. out: (num_rows).
void orca_fingerprint(const Anywhere* words, const uint32_t* factors, uint64_t* out, int64_t num_rows, int64_t size,
                      int64_t num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_rows * size > kSerial)
  for (int64_t r = 0; r < num_rows; ++r) {
    const Anywhere* const row = words + r * size;
    uint64_t sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; ++i) sum += static_cast<uint64_t>(row[i]) * factors[i];
    out[r] = sum;
  }
}

// Copies rows of K and V to their slots. All strides and sizes in bytes; sizes are those of a head.
void orca_store(const char* key, int64_t key_row, int64_t key_head, const char* value, int64_t value_row,
                int64_t value_head, char* key_cache, int64_t key_slot, int64_t key_cache_head, char* value_cache,
                int64_t value_slot, int64_t value_cache_head, const int64_t* slots, int64_t num_rows,
                int64_t num_heads, int64_t key_size, int64_t value_size) {
  for (int64_t r = 0; r < num_rows; ++r)
    for (int64_t h = 0; h < num_heads; ++h) {
      std::memcpy(key_cache + slots[r] * key_slot + h * key_cache_head, key + r * key_row + h * key_head, key_size);
      std::memcpy(value_cache + slots[r] * value_slot + h * value_cache_head, value + r * value_row + h * value_head,
                  value_size);
    }
}
}
