// Numbers to float32 and back: float32 itself, and bfloat16, which is its upper half.

#pragma once

#include <cstdint>
#include <cstring>

#include "vector.h"

inline float widen(float x) { return x; }

inline float widen(uint16_t x) {
  const uint32_t wide = static_cast<uint32_t>(x) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

inline void narrow(float x, float* out) { *out = x; }

inline void narrow(float x, uint16_t* out) {
  uint32_t wide;
  std::memcpy(&wide, &x, sizeof(wide));
  const uint32_t rounded = (wide + 0x7fff + ((wide >> 16) & 1)) >> 16; // to the nearest, to even
  *out = x != x ? 0x7fc0 : static_cast<uint16_t>(rounded);
}

// To the nearest bfloat16, still as float32.
inline Vector round_to_bf16(Vector x) {
  const Words bits = reinterpret_cast<const Words&>(x);
  const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
  return x != x ? x : reinterpret_cast<const Vector&>(rounded);
}
