// What a model does to each row between its products: RMS norm, rotary embedding.

#include <cmath>
#include <cstdint>

namespace {

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

}  // namespace

extern "C" {

// x: (num_rows, size), rows x_row apart. weight: (size). out: (num_rows, size), contiguous: x / rms(x) * (offset + weight).
void orca_rms_norm_f32(const float* x, int64_t x_row, const float* weight, float offset, float eps, float* out,
                       int64_t num_rows, int64_t size, int64_t num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_rows * size > kSerial)
  for (int64_t r = 0; r < num_rows; ++r) norm(x + r * x_row, weight, offset, eps, out + r * size, size);
}

// Rotary embedding of query and key heads in place, whose halves turn together, after their RMS norms if there are any.
//
// x: (num_rows, num_q_heads + num_k_heads, head_dim), rows x_row apart.
// cosine, sine: (num_rows, head_dim), rows angle_row apart. q_norm, k_norm: (head_dim) or null.
void orca_rotate_f32(float* x, int64_t x_row, int64_t num_rows, int64_t num_q_heads, int64_t num_k_heads,
                     int64_t head_dim, const float* cosine, const float* sine, int64_t angle_row, const float* q_norm,
                     const float* k_norm, float eps, int64_t num_threads) {
  const int64_t num_heads = num_q_heads + num_k_heads, half = head_dim / 2;
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_rows * num_heads * head_dim > kSerial)
  for (int64_t r = 0; r < num_rows; ++r) {
    const float* __restrict c = cosine + r * angle_row;
    const float* __restrict s = sine + r * angle_row;
    for (int64_t h = 0; h < num_heads; ++h) {
      float* head = x + r * x_row + h * head_dim;
      const float* weight = h < num_q_heads ? q_norm : k_norm;
      if (weight) norm(head, weight, 0.0f, eps, head, head_dim);
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
}
