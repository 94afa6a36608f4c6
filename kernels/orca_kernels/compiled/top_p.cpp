// transformers' top-p without its sort, in a twentieth of the time, wherever rounding cannot matter.
//
// Natively scores are sorted, their softmax is added up from the smallest on, and who comes to no more than 1 - top_p
// goes. Here only those at the top are sorted, and the others' share is a rest. The sums may differ by a rounding, of
// which more than a bound is known: a row in which a border lies within it is left to transformers, and so is one where
// equals stand on both sides.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "exponential.h"

namespace {

constexpr float kEpsilon = 0x1p-24f;
constexpr float kOfEach = 24 * kEpsilon; // of exponentials, quotients, comparisons and our own sums: about 18
constexpr int64_t kFewestLanes = 4;      // of native's sum, in each of which it adds one by one
constexpr int64_t kBlock = 64;           // of what is added up in float, the blocks in double

struct Row {
  const float* scores;
  int64_t size;
};

float largest_of(Row row) {
  float largest = row.scores[0];
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < row.size; ++i) largest = row.scores[i] > largest ? row.scores[i] : largest;
  return largest;
}

// exps: exp(score - largest) of each. Returns their sum, which is not finite where the row is no distribution.
double exponentials(Row row, float largest, float* exps) {
  double sum = 0.0;
  for (int64_t begin = 0; begin < row.size; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, row.size);
    float part = 0.0f;
#pragma omp simd reduction(+ : part)
    for (int64_t i = begin; i < end; ++i) {
      exps[i] = exponential(row.scores[i] - largest);
      part += exps[i];
    }
    sum += part;
  }
  return sum;
}

// The sum of the exponentials of the scores below a limit.
double sum_below(Row row, const float* exps, float limit) {
  double sum = 0.0;
  for (int64_t begin = 0; begin < row.size; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, row.size);
    float part = 0.0f;
#pragma omp simd reduction(+ : part)
    for (int64_t i = begin; i < end; ++i) part += row.scores[i] < limit ? exps[i] : 0.0f;
    sum += part;
  }
  return sum;
}

// The scores that are not below a limit, largest first.
void sort_top(Row row, float limit, std::vector<float>& top) {
  top.clear();
  for (int64_t i = 0; i < row.size; ++i)
    if (row.scores[i] >= limit) top.push_back(row.scores[i]);
  std::sort(top.begin(), top.end(), [](float a, float b) { return a > b; });
}

// The lowest score that stays; NaN where that is not certain. exps: room for row.size.
float lowest_that_stays(Row row, float rest, int64_t min_kept, float* exps, std::vector<float>& top) {
  const float largest = largest_of(row);
  const double sum = exponentials(row, largest, exps);
  if (!(sum < INFINITY) || rest < 1e-5f) return NAN;
  double below;
  float limit = largest - 4.0f;
  while ((below = sum_below(row, exps, limit)) > 0.1 * rest * sum) limit -= 2.0f;
  sort_top(row, limit, top);
  const int64_t count = top.size();

  // Native's sum is rounded with each exponential as often as it adds after it.
  double error = below * (row.size / kFewestLanes + 4);
  for (int64_t i = 0; i < count; ++i) {
    exps[i] = exponential(top[i] - largest);
    error += exps[i] * (i / kFewestLanes + 4);
  }
  const double wrong = rest * (kOfEach + kEpsilon * error / sum);
  double share = below / sum; // of those from the i-th on
  for (int64_t i = count; i > 0; --i) {
    const double with_next = share + exps[i - 1] / sum;
    if (with_next > rest - wrong) {
      const int64_t kept = std::max(i, min_kept);
      const bool is_told = kept == count || (kept < count && top[kept] < top[kept - 1]);
      return is_told && with_next > rest + wrong && share < rest - wrong ? top[kept - 1] : NAN;
    }
    share = with_next;
  }
  return NAN;
}

}  // namespace

extern "C" {

// scores, out: (num_rows, size), contiguous. rest: 1 - top_p, as native compares with it. filter: for those that go.
// is_done: (num_rows), whether the row of `out` is native's; if not, nothing is in it.
void orca_top_p_f32(const float* scores, float* out, uint8_t* is_done, int64_t num_rows, int64_t size, float rest,
                    int64_t min_kept, float filter, int64_t num_threads) {
#pragma omp parallel num_threads(num_threads) if (num_rows > 1)
  {
    std::vector<float> exps(size), top;
#pragma omp for schedule(dynamic)
    for (int64_t r = 0; r < num_rows; ++r) {
      const Row row{scores + r * size, size};
      const float lowest = lowest_that_stays(row, rest, min_kept, exps.data(), top);
      is_done[r] = !std::isnan(lowest);
      if (!is_done[r]) continue;
      float* const kept = out + r * size;
#pragma omp simd
      for (int64_t i = 0; i < size; ++i) kept[i] = row.scores[i] < lowest ? filter : row.scores[i];
    }
  }
}
}
