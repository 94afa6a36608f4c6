// A thread's share of what happens to rows between products, for whoever has threads running: all of them call it.

#pragma once

#include <cstdint>

#include "linear.h"

// x / rms(x) * (offset + weight), with a weight (size).
struct RmsNorm {
  const float* weight;
  float offset;
  float eps;
};

// Rotary embedding of a row's first num_q_heads + num_k_heads heads, whose halves turn together, after their RMS norms
// if there are any.
//
// cosine, sine: (num_rows, head_dim), rows angle_row apart. q_norm, k_norm: (head_dim) or null.
struct Rotation {
  int64_t num_q_heads;
  int64_t num_k_heads;
  int64_t head_dim;
  const float* cosine;
  const float* sine;
  int64_t angle_row;
  const float* q_norm;
  const float* k_norm;
  float eps;
};

// out: (num_rows, size), contiguous.
void rms_norm_share(Rows x, RmsNorm by, float* out, int64_t num_rows, int64_t size);

// x: (num_rows, heads, head_dim), rows x_row apart; turned in place.
void rotate_share(float* x, int64_t x_row, int64_t num_rows, Rotation by);
