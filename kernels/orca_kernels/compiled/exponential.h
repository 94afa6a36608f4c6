// exp(x) for x <= 0, one by one in a form that compilers turn into vectors, and for a vector.

#pragma once

#include <cmath>
#include <cstdint>

#include "vector.h"

// x - n log(2) for exp(x) = 2^n exp(r), and exp(r) within two units in the last place. By hand, because the library's own
// has no vector form that keeps NaN and infinity as they are.
template <typename F>
inline F exponential_of_rest(F x, F n) {
  F r = x - n * 0.693359375f;
  r -= n * -2.12194440e-4f;
  F p = 1.9875691500e-4f * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  return p * r * r + r + 1.0f;
}

constexpr float kSmallest = -87.0f; // what is below it is 0
constexpr float kLog2E = 1.44269504088896341f;

inline float exponential(float x) {
  const float clamped = x < kSmallest ? kSmallest : x; // also keeps a NaN
  const float n = std::nearbyint(clamped * kLog2E);
  union {
    int32_t i;
    float f;
  } scale;
  scale.i = (static_cast<int32_t>(n) + 127) << 23;
  return x < kSmallest ? 0.0f : exponential_of_rest(clamped, n) * scale.f;
}

inline Vector exponential(Vector x) {
  const Vector clamped = x < kSmallest ? Vector{} + kSmallest : x;
  const Integers n = __builtin_convertvector(clamped * kLog2E - 0.5f, Integers); // to the nearest, as x <= 0
  const Integers scale = (n + 127) << 23;
  const Vector result = exponential_of_rest(clamped, __builtin_convertvector(n, Vector));
  return x < kSmallest ? Vector{} : result * reinterpret_cast<const Vector&>(scale);
}
