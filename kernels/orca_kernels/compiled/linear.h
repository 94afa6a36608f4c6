// A thread's share of a product with a packed weight, for whoever has threads running: all of them call it.

#pragma once

#include <cstdint>

// Rows of floats, `stride` apart.
struct Rows {
  const float* base;
  int64_t stride;

  const float* row(int64_t r) const { return base + r * stride; }
};

// A weight (num_out, num_in) as orca_pack_f32 or orca_pack_gated_f32 lays it out, and a bias (num_out) or null.
struct Weight {
  const float* packed;
  const float* bias;
  int64_t num_out;
  int64_t num_in;
};

// x W^T + bias, plus `add_to` (num_rows, num_out) unless it is null. out: (num_rows, num_out). Both are contiguous.
void linear_share(Rows x, Weight weight, const float* add_to, float* out, int64_t num_rows);

// activation(x gate^T) * (x up^T), with GELU by tanh or SiLU. out: (num_rows, num_out), contiguous.
void gated_share(Rows x, Weight weight, bool gelu, float* out, int64_t num_rows);
