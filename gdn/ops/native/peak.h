// The likeliest of a row of logits, one or several, and the logarithm of what their exponentials sum to.
#pragma once

#include <limits>

#include "vectors.h"

namespace gdn {

struct Peak {
  int32_t place;  // the lowest of equals; 0 where no logit is a number
  float log_total;
};

// ln of the sum of e^x, of which `top` is the greatest.
inline float log_total_of(const float* x, int64_t size, float top) {
  const int64_t whole = size / kLanes * kLanes;
  Floats last = spread(-std::numeric_limits<float>::infinity()), sums{};
  for (int64_t i = whole; i < size; ++i) last[i - whole] = x[i];
  for (int64_t i = 0; i < whole; i += kLanes) sums += exponential(at(x + i) - top);
  sums += exponential(last - top);
  return top + std::log(total(sums));
}

inline Peak peak_of(const float* x, int64_t size) {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  const int64_t whole = size / kLanes * kLanes;
  Floats best = spread(kNone);
  Ints places{};  // of the vectors that they came in
  for (int64_t i = 0; i < whole; i += kLanes) {
    const Floats value = at(x + i);
    places = value > best ? Ints{} + int32_t(i) : places;
    best = value > best ? value : best;
  }
  float top = kNone;
  int32_t place = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    const int32_t here = places[lane] + lane;
    if (best[lane] > top || (best[lane] == top && here < place)) {
      top = best[lane];
      place = here;
    }
  }
  for (int64_t i = whole; i < size; ++i)
    if (x[i] > top) {
      top = x[i];
      place = int32_t(i);
    }
  return {place, log_total_of(x, size, top)};
}

// Writes the `count` greatest of at least as many, falling, the lowest place of equals first; what is
// no number counts as `worst`. Returns what `log_total_of` does.
inline float best_of(const float* x, int64_t size, int64_t count, float worst, float* values,
                     int32_t* places) {
  int64_t found = 0;
  const auto offer = [&](int64_t i) {
    const float value = x[i] == x[i] ? x[i] : worst;
    if (found == count && !(value > values[count - 1])) return;
    int64_t slot = found < count ? found++ : count - 1;
    for (; slot > 0 && value > values[slot - 1]; --slot) {
      values[slot] = values[slot - 1];
      places[slot] = places[slot - 1];
    }
    values[slot] = value;
    places[slot] = int32_t(i);
  };
  int64_t i = 0;
  for (; i < count; ++i) offer(i);
  // Hardly any block has one that is better than the worst so far.
  constexpr int64_t kBlock = 8 * kLanes;
  for (; i + kBlock <= size; i += kBlock) {
    Ints better{};
    for (int64_t j = i; j < i + kBlock; j += kLanes) {
      const Floats value = at(x + j);
      better |= (value == value ? value : spread(worst)) > spread(values[count - 1]);
    }
    int64_t any[kLanes / 2], all = 0;
    std::memcpy(any, &better, sizeof(better));
    for (const int64_t part : any) all |= part;
    if (all != 0)
      for (int64_t j = i; j < i + kBlock; ++j) offer(j);
  }
  for (; i < size; ++i) offer(i);
  return log_total_of(x, size, values[0]);
}

}  // namespace gdn
