// The processor's vectors of float32, by the compiler's own vector types.

#pragma once

#include <cstdint>

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif

typedef float Vector __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2), aligned(2), may_alias));

inline float add_up(Vector x) {
  typedef float Half __attribute__((vector_size(kLanes * 2), aligned(4), may_alias));
  typedef float Quarter __attribute__((vector_size(kLanes), aligned(4), may_alias));
  const Half* halves = reinterpret_cast<const Half*>(&x);
  Half half = halves[0] + halves[1];
  const Quarter* quarters = reinterpret_cast<const Quarter*>(&half);
  Quarter quarter = quarters[0] + quarters[1];
  float sum = 0.0f;
  for (int i = 0; i < kLanes / 4; ++i) sum += quarter[i];
  return sum;
}
