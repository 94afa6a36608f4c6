// SiLU, and GELU by its tanh approximation.

#pragma once

#include "exponential.h"
#include "vector.h"

// x * sigmoid(z), where z is x (SiLU), or what makes it GELU by tanh: 1 + tanh(z / 2) is 2 sigmoid(z).
inline Vector activate(Vector x, bool gelu) {
  const Vector z = gelu ? 1.5957691216057308f * (x + 0.044715f * x * x * x) : x;
  const Vector e = exponential(z < 0.0f ? z : -z);
  return x * (z < 0.0f ? e : Vector{} + 1.0f) / (1.0f + e);
}
