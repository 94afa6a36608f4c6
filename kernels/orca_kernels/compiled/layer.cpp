// What a decoder layer does before and after its attention, each in one call: of a layer's time with few rows, half would
// go into calling its dozen operations one by one.

#include <cstdint>

#include <omp.h>

#include "linear.h"
#include "rows.h"

extern "C" {

// Queries, keys and values of rows: an RMS norm, one product for all three, the rotary embedding of the first two.
//
// x: (num_rows, num_in), rows x_row apart. norm: (num_in), or null for none. bias: (num_out) or null.
// normed: (num_rows, num_in), scratch. out: (num_rows, num_out), contiguous, num_out as many heads as q, k and v have.
void orca_attention_inputs_f32(const float* x, int64_t x_row, const float* norm, float offset, float eps,
                               const float* packed, const float* bias, const float* cosine, const float* sine,
                               int64_t angle_row, const float* q_norm, const float* k_norm, float head_eps,
                               float* normed, float* out, int64_t num_rows, int64_t num_in, int64_t num_out,
                               int64_t num_q_heads, int64_t num_k_heads, int64_t head_dim, int64_t num_threads) {
#pragma omp parallel num_threads(num_threads)
  {
    Rows input{x, x_row};
    if (norm) {
      rms_norm_share(input, {norm, offset, eps}, normed, num_rows, num_in);
      input = {normed, num_in};
#pragma omp barrier
    }
    linear_share(input, {packed, bias, num_out, num_in}, nullptr, out, num_rows);
#pragma omp barrier
    rotate_share(out, num_out, num_rows,
                 {num_q_heads, num_k_heads, head_dim, cosine, sine, angle_row, q_norm, k_norm, head_eps});
  }
}

// From attention to the next layer: the output's product added to the layer's input, and the gated MLP of its RMS norm
// added to that.
//
// attended: (num_rows, attended_size). input, out: (num_rows, size). All are contiguous.
// scratch: num_rows * (2 * size + inner_size) floats.
void orca_layer_outputs_f32(const float* attended, const float* input, const float* packed_out, const float* out_bias,
                            const float* norm, float offset, float eps, const float* packed_gate_up,
                            const float* packed_down, const float* down_bias, float* scratch, float* out,
                            int64_t num_rows, int64_t attended_size, int64_t size, int64_t inner_size, int64_t gelu,
                            int64_t num_threads) {
  float* const middle = scratch;
  float* const normed = middle + num_rows * size;
  float* const inner = normed + num_rows * size;
#pragma omp parallel num_threads(num_threads)
  {
    linear_share({attended, attended_size}, {packed_out, out_bias, size, attended_size}, input, middle, num_rows);
#pragma omp barrier
    rms_norm_share({middle, size}, {norm, offset, eps}, normed, num_rows, size);
#pragma omp barrier
    gated_share({normed, size}, {packed_gate_up, nullptr, inner_size, size}, gelu != 0, inner, num_rows);
#pragma omp barrier
    linear_share({inner, inner_size}, {packed_down, down_bias, size, inner_size}, middle, out, num_rows);
  }
}
}
