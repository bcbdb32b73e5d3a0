// Holds the native kernels against plain loops, with buffers of exactly the size they may touch, so
// that the sanitizers see every byte too many. Prints what is wrong; exit status 1 if anything is.

#include <cstdio>
#include <random>

#include "kernels.h"

using namespace gdn;

namespace {

int failures = 0;

inline uint16_t to_bfloat16(float value) {  // round to nearest, ties to even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t(bits >> 16 | 0x40);
  return uint16_t((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

template <class M>
double weight_value(typename M::Element element);
template <>
double weight_value<Float32>(float element) { return element; }
template <>
double weight_value<Int8>(int8_t element) { return element; }
template <>
double weight_value<BFloat16>(uint16_t element) {
  const uint32_t bits = uint32_t(element) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

template <class M>
typename M::Element random_weight(std::mt19937& random) {
  if constexpr (std::is_same_v<M, Int8>) return int8_t(int(random() % 255) - 127);
  const float value = std::normal_distribution<float>()(random);
  if constexpr (std::is_same_v<M, BFloat16>) return to_bfloat16(value);
  return typename M::Element(value);
}

// The products, row by row in float64; int8 activations as `quantize` makes them.
template <class M>
void check(const char* name, int64_t rows, int64_t out, int64_t in, std::mt19937& random) {
  std::vector<float> x(rows * in), y(rows * out, NAN), alone(out, NAN), scales(out);
  for (auto& value : x) value = std::normal_distribution<float>()(random);
  for (auto& value : scales) value = std::uniform_real_distribution<float>(0.5, 2)(random);
  std::vector<int32_t> sums(out, 0);
  std::vector<typename M::Element> plain(out * in);
  for (auto& value : plain) value = random_weight<M>(random);

  Matrix<M> w{nullptr, scales.data(), sums.data(), in, out};
  std::vector<typename M::Element> packed(w.panels() * w.panel_size(), 0);
  w.data = packed.data();
  for (int64_t o = 0; o < out; ++o)
    for (int64_t i = 0; i < in; ++i) {
      const int64_t group = i / M::kGroup, lane = o % kPanel;
      packed[o / kPanel * w.panel_size() + (group * kPanel + lane) * M::kGroup + i % M::kGroup] =
          plain[o * in + i];
      sums[o] += int32_t(weight_value<M>(plain[o * in + i]));
    }

  const Activations<M> activations(x.data(), rows, in);
  const int64_t step = panels_per_task(w, rows, 2);
  for (int64_t begin = 0; begin < w.panels(); begin += step)
    product(w, activations, begin, std::min(begin + step, w.panels()), y.data());

  double worst = 0, top = 1e-30;
  bool is_independent = true;
  for (int64_t r = 0; r < rows; ++r) {
    std::vector<uint8_t> bytes(in);
    float scale = 1;
    if (std::is_same_v<M, Int8>) scale = quantize(&x[r * in], in, 0, bytes.data(), in);
    for (int64_t o = 0; o < out; ++o) {
      double sum = 0;
      for (int64_t i = 0; i < in; ++i) {
        double value = x[r * in + i];
        if (std::is_same_v<M, Int8>) value = int8_t(bytes[i]);
        sum += value * weight_value<M>(plain[o * in + i]);
      }
      if (std::is_same_v<M, Int8>) sum *= double(scale) * scales[o];
      worst = std::max(worst, std::fabs(sum - y[r * out + o]));
      top = std::max(top, std::fabs(sum));
    }
    const Activations<M> one(&x[r * in], 1, in);
    product(w, one, 0, w.panels(), alone.data());
    is_independent &= !std::memcmp(alone.data(), &y[r * out], out * sizeof(float));
  }
  if (!(worst <= 2e-6 * top) || !is_independent) {
    ++failures;
    std::printf("%s rows=%ld out=%ld in=%ld: error %.2g of %.2g%s\n", name, long(rows), long(out),
                long(in), worst, top, is_independent ? "" : ", rows depend on each other");
  }
}

}  // namespace

int main() {
  std::mt19937 random(0);
  for (int64_t in : {1, 2, 3, 5, 64, 129})
    for (int64_t out : {1, 15, 16, 17, 100, 333})
      for (int64_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 33}) {
        check<Float32>("float32", rows, out, in, random);
        check<BFloat16>("bfloat16", rows, out, in, random);
        check<Int8>("int8", rows, out, in, random);
      }
  std::printf("%d lanes, offset %d: %d failures\n", kLanes, Int8::kOffset, failures);
  return failures > 0;
}
