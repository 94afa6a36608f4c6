// Products of a few rows with a weight that has been laid out for it.
//
// A weight (num_out, num_in) lies in panels: for kPanel outputs, all their inputs, so that a step along the inputs reads
// kPanel neighbouring values. A thread takes whole panels, and each panel meets all rows while it is in the cache: the
// weight comes from memory once, whatever the number of rows.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "activation.h"
#include "linear.h"
#include "panels.h"
#include "vector.h"

namespace {

constexpr auto kAdd = [](Vector sum, float x, Vector w) { return sum + w * x; };

template <int ROWS>
void multiply(const float* x, int64_t x_row, const float* panel, const float* ahead, int64_t step, float* out,
              int64_t out_row, int64_t depth, bool adds, int width) {
  Vector acc[ROWS][2];
  accumulate<ROWS>(x, x_row, panel, depth, ahead, step, acc, kAdd);
  for (int r = 0; r < ROWS; ++r) {
    float* row = out + r * out_row;
    if (width == kPanel) {
      Vector* target = reinterpret_cast<Vector*>(row);
      if (adds) acc[r][0] += target[0], acc[r][1] += target[1];
      target[0] = acc[r][0];
      target[1] = acc[r][1];
    } else {
      float values[kPanel];
      std::memcpy(values, acc[r], sizeof(values));
      for (int i = 0; i < width; ++i) row[i] = adds ? row[i] + values[i] : values[i];
    }
  }
}

// A panel's first half are gates, its second half what they are for: activation(gate) * value.
template <int ROWS>
void multiply_gated(const float* x, int64_t x_row, const float* panel, const float* ahead, int64_t step, float* out,
                    int64_t out_row, int64_t depth, bool gelu, int width) {
  Vector acc[ROWS][2];
  accumulate<ROWS>(x, x_row, panel, depth, ahead, step, acc, kAdd);
  for (int r = 0; r < ROWS; ++r) {
    const Vector result = activate(acc[r][0], gelu) * acc[r][1];
    if (width == kLanes) {
      *reinterpret_cast<Vector*>(out + r * out_row) = result;
    } else {
      std::memcpy(out + r * out_row, &result, width * sizeof(float));
    }
  }
}

typedef void (*Multiply)(const float*, int64_t, const float*, const float*, int64_t, float*, int64_t, int64_t, bool, int);
constexpr Multiply kMultiply[] = ORCA_BY_ROWS(multiply);
constexpr Multiply kMultiplyGated[] = ORCA_BY_ROWS(multiply_gated);

// `width` rows of a weight, then zeros, into the first `lanes` places of each step of a panel.
void pack_rows(const float* weight, int64_t width, int64_t lanes, int64_t num_in, float* panel) {
  constexpr int64_t kSteps = 64; // what is written meanwhile stays in the first-level cache
  for (int64_t begin = 0; begin < num_in; begin += kSteps)
    for (int64_t i = 0; i < lanes; ++i)
      for (int64_t k = begin; k < std::min(begin + kSteps, num_in); ++k)
        panel[k * kPanel + i] = i < width ? weight[i * num_in + k] : 0.0f;
}

}  // namespace

void linear_share(Rows x, Weight weight, const float* add_to, float* out, int64_t num_rows) {
  const auto [packed, bias, num_out, num_in] = weight;
  for_panels((num_out + kPanel - 1) / kPanel, num_rows, num_in, [&](int64_t p, int64_t begin_row, int64_t end_row) {
    const int64_t first = p * kPanel;
    const int width = static_cast<int>(std::min<int64_t>(kPanel, num_out - first));
    if (add_to)
      for (int64_t r = begin_row; r < end_row; ++r)
        std::memcpy(out + r * num_out + first, add_to + r * num_out + first, width * sizeof(float));
    for (int64_t begin = 0; begin < num_in; begin += kDepth) {
      const int64_t depth = std::min(kDepth, num_in - begin);
      const bool adds = begin > 0 || add_to;
      for_tiles(begin_row, end_row, packed + (p * num_in + begin) * kPanel, depth,
                [&](int64_t row, int64_t rows, const float* panel, const float* ahead, int64_t step) {
                  kMultiply[rows](x.row(row) + begin, x.stride, panel, ahead, step, out + row * num_out + first, num_out,
                                  depth, adds, width);
                });
    }
    if (bias)
      for (int64_t r = begin_row; r < end_row; ++r)
        for (int i = 0; i < width; ++i) out[r * num_out + first + i] += bias[first + i];
  });
}

void gated_share(Rows x, Weight weight, bool gelu, float* out, int64_t num_rows) {
  const int64_t num_out = weight.num_out, num_in = weight.num_in;
  for_panels((num_out + kLanes - 1) / kLanes, num_rows, num_in, [&](int64_t p, int64_t begin_row, int64_t end_row) {
    const int width = static_cast<int>(std::min<int64_t>(kLanes, num_out - p * kLanes));
    for_tiles(begin_row, end_row, weight.packed + p * num_in * kPanel, num_in,
              [&](int64_t row, int64_t rows, const float* panel, const float* ahead, int64_t step) {
                kMultiplyGated[rows](x.row(row), x.stride, panel, ahead, step, out + row * num_out + p * kLanes, num_out,
                                     num_in, gelu, width);
              });
  });
}

extern "C" {

// Floats that a packed weight takes, and a packed pair of gate and up, which have the same shape.
int64_t orca_packed_size(int64_t num_out, int64_t num_in) { return (num_out + kPanel - 1) / kPanel * kPanel * num_in; }
int64_t orca_gated_size(int64_t num_out, int64_t num_in) { return (num_out + kLanes - 1) / kLanes * kPanel * num_in; }

// weight: (num_out, num_in), contiguous. packed: orca_packed_size floats.
void orca_pack_f32(const float* weight, int64_t num_out, int64_t num_in, float* packed) {
  const int64_t panels = (num_out + kPanel - 1) / kPanel;
#pragma omp parallel for schedule(static)
  for (int64_t p = 0; p < panels; ++p)
    pack_rows(weight + p * kPanel * num_in, std::min<int64_t>(kPanel, num_out - p * kPanel), kPanel, num_in,
              packed + p * num_in * kPanel);
}

// x: (num_rows, num_in), rows x_row apart. bias: (num_out) or null. out: (num_rows, num_out), contiguous.
void orca_linear_f32(const float* x, int64_t x_row, const float* packed, const float* bias, float* out,
                     int64_t num_rows, int64_t num_out, int64_t num_in, int64_t num_threads) {
#pragma omp parallel num_threads(num_threads) if (num_rows * num_out * num_in > kSerial)
  linear_share({x, x_row}, {packed, bias, num_out, num_in}, nullptr, out, num_rows);
}

// gate, up: (num_out, num_in), contiguous. packed: orca_gated_size floats.
void orca_pack_gated_f32(const float* gate, const float* up, int64_t num_out, int64_t num_in, float* packed) {
  const int64_t panels = (num_out + kLanes - 1) / kLanes;
#pragma omp parallel for schedule(static)
  for (int64_t p = 0; p < panels; ++p) {
    const int64_t first = p * kLanes * num_in, width = std::min<int64_t>(kLanes, num_out - p * kLanes);
    pack_rows(gate + first, width, kLanes, num_in, packed + p * num_in * kPanel);
    pack_rows(up + first, width, kLanes, num_in, packed + p * num_in * kPanel + kLanes);
  }
}

// activation(x gate^T) * (x up^T), with gelu by tanh or SiLU. out: (num_rows, num_out), contiguous.
void orca_gated_f32(const float* x, int64_t x_row, const float* packed, float* out, int64_t num_rows, int64_t num_out,
                    int64_t num_in, int64_t gelu, int64_t num_threads) {
#pragma omp parallel num_threads(num_threads) if (num_rows * num_out * num_in > kSerial)
  gated_share({x, x_row}, {packed, nullptr, num_out, num_in}, gelu != 0, out, num_rows);
}
}
