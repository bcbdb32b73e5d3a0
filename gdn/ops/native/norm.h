// Root mean square norm, row by row: XLA sums in an order that depends on how many rows there are.
#pragma once

#include "vectors.h"

namespace gdn {

// out = x / sqrt(mean(x^2) + eps) * (weight + offset); any size.
inline void rms_norm(const float* x, const float* weight, int64_t size, float eps, float offset,
                     float* out) {
  const int64_t whole = size / kLanes * kLanes, rest = size - whole;
  const auto last = [&](const float* p) {
    Floats values{};
    std::memcpy(&values, p + whole, rest * sizeof(float));
    return values;
  };
  Floats squares{};
  for (int64_t i = 0; i < whole; i += kLanes) squares = fused(at(x + i), at(x + i), squares);
  const Floats tail = last(x);
  squares = fused(tail, tail, squares);
  const float scale = 1.0f / std::sqrt(total(squares) / float(size) + eps);
  for (int64_t i = 0; i < whole; i += kLanes)
    at(out + i) = at(x + i) * scale * (at(weight + i) + offset);
  const Floats values = tail * scale * (last(weight) + offset);
  std::memcpy(out + whole, &values, rest * sizeof(float));
}

}  // namespace gdn
