// How a thread walks through its share of a product with a weight that lies in panels: see linear.cpp.

#pragma once

#include <algorithm>
#include <cstdint>

#include <omp.h>

#include "vector.h"

// 24 accumulators, 2 of the weight, and room to broadcast an input; or 12 accumulators of 16 registers.
constexpr int kRows = kLanes == 16 ? 12 : 6;
constexpr int kPanel = 2 * kLanes;
constexpr int64_t kSerial = 1 << 15; // products that are done before a second thread has woken
constexpr int64_t kChunk = 1 << 16;  // inputs of all the rows that a panel meets at a time: likewise
constexpr int64_t kDepth = 2048;     // inputs that a panel is walked through at a time: fits the second-level cache

#if defined(__AVX512F__)
#define ORCA_BY_ROWS(F) {nullptr, F<1>, F<2>, F<3>, F<4>, F<5>, F<6>, F<7>, F<8>, F<9>, F<10>, F<11>, F<12>}
#else
#define ORCA_BY_ROWS(F) {nullptr, F<1>, F<2>, F<3>, F<4>, F<5>, F<6>}
#endif

// Calls body(panel, begin_row, end_row) for the panels of the calling thread, with as many rows at a time as stay in its
// second-level cache: each panel meets them all.
template <typename Body>
void for_panels(int64_t panels, int64_t num_rows, int64_t num_in, Body body) {
  const int64_t num = omp_get_num_threads(), me = omp_get_thread_num();
  const int64_t most = std::max<int64_t>(4 * kRows, kChunk / num_in), chunks = (num_rows + most - 1) / most;
  for (int64_t c = 0; c < chunks; ++c)
    for (int64_t p = panels * me / num; p < panels * (me + 1) / num; ++p)
      body(p, num_rows * c / chunks, num_rows * (c + 1) / chunks);
}

// Calls body(row, rows, panel, ahead, step) for tiles of equal size: 13 rows are 7 and 6, not 12 and 1. Together they
// bring the next panel in.
template <typename T, typename Body>
void for_tiles(int64_t begin_row, int64_t end_row, const T* panel, int64_t depth, Body body) {
  const int64_t num_rows = end_row - begin_row, tiles = (num_rows + kRows - 1) / kRows;
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t first = num_rows * t / tiles;
    body(begin_row + first, num_rows * (t + 1) / tiles - first, panel, panel + (tiles + t) * depth * kPanel / tiles,
         kPanel / tiles);
  }
}

// Vectors of the words that a panel is made of.
template <typename T>
struct VectorOf;
template <>
struct VectorOf<float> {
  typedef Vector type;
};
template <>
struct VectorOf<uint32_t> {
  typedef Words type;
};

// Some rows times one panel: add(sum, x, w) for each word x of a row. What the next panels need is on its way meanwhile:
// `ahead`, `step` words for each input.
template <int ROWS, typename T, typename Add>
inline void accumulate(const T* __restrict x, int64_t x_row, const T* __restrict panel, int64_t depth, const T* ahead,
                       int64_t step, Vector (&acc)[ROWS][2], Add add) {
  typedef typename VectorOf<T>::type Weights;
  for (int r = 0; r < ROWS; ++r) acc[r][0] = acc[r][1] = Vector{};
  for (int64_t k = 0; k < depth; ++k) {
    __builtin_prefetch(ahead + k * step, 0, 2);
    __builtin_prefetch(ahead + k * step + kPanel / 2, 0, 2);
    const Weights w0 = *reinterpret_cast<const Weights*>(panel + k * kPanel);
    const Weights w1 = *reinterpret_cast<const Weights*>(panel + k * kPanel + kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      const T value = x[r * x_row + k];
      acc[r][0] = add(acc[r][0], value, w0);
      acc[r][1] = add(acc[r][1], value, w1);
    }
  }
}
