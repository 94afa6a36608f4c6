// torch.multinomial(probs, 1) on the CPU to the last random number, in a tenth of the time.
//
// PyTorch draws q ~ Exp(1) for every element, from 53 bits of two numbers of its Mersenne Twister, and takes the element
// of the largest p / q. What takes its time is a logarithm for each. Since q = -log(1 - u) >= u, an element can only be
// the largest so far where p / u is; that is seen without one, for all but some twenty elements of a row.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace {

constexpr int kStateWords = 624, kShift = 397;

// torch.Generator.get_state() of a CPU generator.
struct GeneratorState {
  uint64_t seed;
  int32_t left; // words until new ones are made, plus one
  int32_t seeded;
  uint64_t next; // the next word
  uint64_t words[kStateWords];
  double normals[3];
  int32_t has_normal;
  float next_normal;
  bool has_next_normal;
};
static_assert(sizeof(GeneratorState) == 5056, "not what PyTorch's CPUGeneratorImpl keeps");

// MT19937 (Matsumoto and Nishimura, 1998).
class Twister {
 public:
  explicit Twister(const GeneratorState& state) : next_(1 + kStateWords) {
    std::copy_n(state.words, kStateWords, state_);
    if (state.left == 1) return;
    next_ = 1 + static_cast<int>(state.next);
    temper();
  }

  void save(GeneratorState& state) const {
    std::copy_n(state_, kStateWords, state.words);
    state.next = next_ - 1;
    state.left = kStateWords + 1 - static_cast<int>(state.next);
  }

  int available() const { return 1 + kStateWords - next_; }
  const uint32_t* words() const { return words_ + next_; }
  void take(int count) { next_ += count; }

  // New words after the last one, if that is still there. One of the new ones must be taken before `save`.
  void refill() {
    const bool one_left = available() == 1;
    if (one_left) words_[0] = words_[kStateWords];
    twist(0, kStateWords - kShift, kShift);
    twist(kStateWords - kShift, kStateWords - 1, kShift - kStateWords);
    state_[kStateWords - 1] = state_[kShift - 1] ^ mixed(state_[kStateWords - 1], state_[0]);
    temper();
    next_ = one_left ? 0 : 1;
  }

 private:
  static uint32_t mixed(uint32_t high, uint32_t low) {
    const uint32_t both = (high & 0x80000000u) | (low & 0x7fffffffu);
    return (both >> 1) ^ (-(low & 1u) & 0x9908b0dfu);
  }

  // A word depends on those `shift` further on, or -shift before: at least 227 away, more than a vector has.
  void twist(int begin, int end, int shift) {
#pragma omp simd safelen(64)
    for (int i = begin; i < end; ++i) state_[i] = state_[i + shift] ^ mixed(state_[i], state_[i + 1]);
  }

  void temper() {
#pragma omp simd
    for (int i = 0; i < kStateWords; ++i) {
      uint32_t y = state_[i];
      y ^= y >> 11;
      y ^= (y << 7) & 0x9d2c5680u;
      y ^= (y << 15) & 0xefc60000u;
      words_[1 + i] = y ^ (y >> 18);
    }
  }

  uint32_t state_[kStateWords];
  uint32_t words_[1 + kStateWords]; // the first is one that was left over
  int next_;
};

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr uint32_t kHighBits = (1u << 21) - 1; // of u's 53 those in the first word

// The largest p / q of a row. The first of equals counts, and a NaN is larger than anything, as to PyTorch.
class Largest {
 public:
  // The element, or -1 where none can be drawn.
  int64_t place() const { return any_ ? place_ : -1; }

  // Whether one of the elements may be the largest so far, or none that a distribution has.
  bool may_be_in(const float* p, const uint32_t* words, int count) const {
    if (!(ratio_ < kInfinity)) return true;
    // u is not less than its high bits say; the rest is for rounding, which is coarse where numbers are very small.
    const float limit = ratio_ < 0x1p-80f ? 0.0f : ratio_ * (1.0f - 0x1p-19f) * 0x1p-21f;
    int found = 0;
#pragma omp simd reduction(| : found)
    for (int i = 0; i < count; ++i) {
      const int32_t high = words[2 * i] & kHighBits;
      found |= !(p[i] <= limit * static_cast<float>(high)) | (p[i] < 0.0f) | (high == 0);
    }
    return found;
  }

  // False where p is none that a distribution has.
  bool consider(float p, const uint32_t* words, int64_t place) {
    if (!(p >= 0.0f && p < kInfinity)) return false;
    any_ |= p > 0.0f;
    const uint64_t bits = static_cast<uint64_t>(words[0] & kHighBits) << 32 | words[1];
    const double u = static_cast<double>(bits) * 0x1p-53;
    const float ratio = p / static_cast<float>(-std::log1p(-u));
    if (ratio > ratio_ || (std::isnan(ratio) && !std::isnan(ratio_))) {
      ratio_ = ratio;
      place_ = place;
    }
    return true;
  }

 private:
  float ratio_ = 0.0f;
  int64_t place_ = 0;
  bool any_ = false;
};

constexpr int kGroup = 32;

// The element drawn, or -1 where PyTorch would raise an error.
int64_t draw_row(const float* p, int64_t size, Twister& twister) {
  Largest largest;
  for (int64_t i = 0; i < size;) {
    if (twister.available() < 2) twister.refill();
    const uint32_t* words = twister.words();
    const int count = static_cast<int>(std::min<int64_t>({kGroup, twister.available() / 2, size - i}));
    if (largest.may_be_in(p + i, words, count))
      for (int j = 0; j < count; ++j)
        if (!largest.consider(p[i + j], words + 2 * j, i + j)) return -1;
    twister.take(2 * count);
    i += count;
  }
  return largest.place();
}

}  // namespace

extern "C" {

// probs: (num_rows, size), contiguous. state: the generator's, which moves on. tokens: (num_rows).
// Returns 0, and leaves the state alone, where a row is no distribution.
int64_t orca_draw_f32(const float* probs, char* state, int64_t* tokens, int64_t num_rows, int64_t size) {
  GeneratorState generator;
  std::memcpy(&generator, state, sizeof generator);
  Twister twister(generator);
  for (int64_t r = 0; r < num_rows; ++r)
    if ((tokens[r] = draw_row(probs + r * size, size, twister)) < 0) return 0;
  twister.save(generator);
  std::memcpy(state, &generator, sizeof generator);
  return 1;
}
}
