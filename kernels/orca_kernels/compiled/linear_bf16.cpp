// linear.cpp's products in bfloat16: half of what float32 reads from memory, and sums in float32.
//
// The weight lies as in linear.cpp, if two neighbouring inputs are taken for one word: so are they in the rows.

#include <cstdint>
#include <vector>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#include "activation.h"
#include "bfloat16.h"
#include "panels.h"
#include "vector.h"

namespace {

// sum + x * w, for both numbers of each word.
constexpr auto kAdd = [](Vector sum, uint32_t x, Words w) {
  const Words words = Words{} + x;
#if defined(__AVX512BF16__)
  return (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)words, (__m512bh)w);
#else
  const auto low = [](Words words) { return (Vector)(words << 16); };
  const auto high = [](Words words) { return (Vector)(words & 0xffff0000u); };
  return sum + low(words) * low(w) + high(words) * high(w);
#endif
};

// Some rows times one panel, (ROWS, kPanel) into `sums`.
template <int ROWS>
void multiply(const uint32_t* x, int64_t x_row, const uint32_t* panel, const uint32_t* ahead, int64_t step, float* sums,
              int64_t depth, bool adds) {
  Vector acc[ROWS][2];
  accumulate<ROWS>(x, x_row, panel, depth, ahead, step, acc, kAdd);
  Vector* target = reinterpret_cast<Vector*>(sums);
  for (int r = 0; r < ROWS; ++r, target += 2) {
    target[0] = adds ? target[0] + acc[r][0] : acc[r][0];
    target[1] = adds ? target[1] + acc[r][1] : acc[r][1];
  }
}

typedef void (*Multiply)(const uint32_t*, int64_t, const uint32_t*, const uint32_t*, int64_t, float*, int64_t, bool);
constexpr Multiply kMultiply[] = ORCA_BY_ROWS(multiply);

// Calls body(panel, row, sums) for each row of the calling thread's panels, with its kPanel sums.
template <typename Body>
void for_sums(const uint32_t* x, int64_t x_row, const uint32_t* packed, int64_t panels, int64_t num_rows, int64_t num_in,
              Body body) {
  std::vector<float> sums;
  for_panels(panels, num_rows, num_in, [&](int64_t p, int64_t begin_row, int64_t end_row) {
    sums.resize((end_row - begin_row) * kPanel);
    for (int64_t begin = 0; begin < num_in; begin += kDepth) {
      const int64_t depth = std::min(kDepth, num_in - begin);
      for_tiles(begin_row, end_row, packed + (p * num_in + begin) * kPanel, depth,
                [&](int64_t row, int64_t rows, const uint32_t* panel, const uint32_t* ahead, int64_t step) {
                  kMultiply[rows](x + row * x_row + begin, x_row, panel, ahead, step,
                                  sums.data() + (row - begin_row) * kPanel, depth, begin > 0);
                });
    }
    for (int64_t r = begin_row; r < end_row; ++r) body(p, r, sums.data() + (r - begin_row) * kPanel);
  });
}

}  // namespace

extern "C" {

// x W^T + bias, rounded once. x: (num_rows, num_in), rows x_row apart; packed: W as orca_pack_f32 lays its words out; both
// of words, which are two inputs. bias: (num_out) or null. out: (num_rows, num_out), contiguous.
void orca_linear_bf16(const uint32_t* x, int64_t x_row, const uint32_t* packed, const uint16_t* bias, uint16_t* out,
                      int64_t num_rows, int64_t num_out, int64_t num_in, int64_t num_threads) {
#pragma omp parallel num_threads(num_threads) if (num_rows * num_out * num_in > kSerial)
  for_sums(x, x_row, packed, (num_out + kPanel - 1) / kPanel, num_rows, num_in,
           [&](int64_t p, int64_t row, const float* sums) {
             const int64_t first = p * kPanel, width = std::min<int64_t>(kPanel, num_out - first);
             for (int64_t i = 0; i < width; ++i)
               narrow(sums[i] + (bias ? widen(bias[first + i]) : 0.0f), out + row * num_out + first + i);
           });
}

// activation(x gate^T) * (x up^T), rounded after each step, as natively. The weights' words lie as orca_pack_gated_f32
// lays them out; the rest as above.
void orca_gated_bf16(const uint32_t* x, int64_t x_row, const uint32_t* packed, uint16_t* out, int64_t num_rows,
                     int64_t num_out, int64_t num_in, int64_t gelu, int64_t num_threads) {
#pragma omp parallel num_threads(num_threads) if (num_rows * num_out * num_in > kSerial)
  for_sums(x, x_row, packed, (num_out + kLanes - 1) / kLanes, num_rows, num_in,
           [&](int64_t p, int64_t row, const float* sums) {
             const Vector* both = reinterpret_cast<const Vector*>(sums);
             const Vector gate = round_to_bf16(activate(round_to_bf16(both[0]), gelu != 0));
             const Vector result = gate * round_to_bf16(both[1]);
             const int64_t first = p * kLanes, width = std::min<int64_t>(kLanes, num_out - first);
             for (int64_t i = 0; i < width; ++i) narrow(result[i], out + row * num_out + first + i);
           });
}
}
