// The likeliest of a row of logits, and the logarithm of what their exponentials sum to.
#pragma once

#include <limits>

#include "vectors.h"

namespace gdn {

struct Peak {
  int32_t place;  // the lowest of equals; 0 where no logit is a number
  float log_total;
};

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
  Floats last = spread(kNone), sums{};
  for (int64_t i = whole; i < size; ++i) {
    last[i - whole] = x[i];
    if (x[i] > top) {
      top = x[i];
      place = int32_t(i);
    }
  }
  for (int64_t i = 0; i < whole; i += kLanes) sums += exponential(at(x + i) - top);
  sums += exponential(last - top);
  return {place, top + std::log(total(sums))};
}

}  // namespace gdn
