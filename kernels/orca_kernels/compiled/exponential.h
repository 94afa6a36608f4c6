// exp(x) for x <= 0, in a form that compilers turn into vectors.

#pragma once

#include <cmath>
#include <cstdint>

// Within two units in the last place; by hand, because the library's own has no vector form that keeps NaN and infinity
// as they are.
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
