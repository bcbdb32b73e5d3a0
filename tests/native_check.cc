// Holds the native kernels against plain loops, with buffers of exactly the size they may touch, so
// that the sanitizers see every byte too many. Prints what is wrong; exit status 1 if anything is.

#include <cstdio>
#include <memory>
#include <random>

#include "attention.h"
#include "delta_net.h"
#include "experts.h"
#include "norm.h"
#include "peak.h"
#include "products.h"

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

// The products, row by row in float64, of activations rounded as the kernels do.
template <class M>
void check(const char* name, int64_t rows, int64_t out, int64_t in, std::mt19937& random) {
  std::vector<float> x(rows * in), y(rows * out, NAN), alone(out, NAN), scales(out);
  for (auto& value : x) value = std::normal_distribution<float>()(random);
  std::fill(x.begin(), x.begin() + in / 2, 0.0f);  // nothing has no scale
  for (auto& value : scales) value = std::uniform_real_distribution<float>(0.5, 2)(random);
  std::vector<typename M::Element> plain(out * in);
  for (auto& value : plain) value = random_weight<M>(random);

  Matrix<M> w{nullptr, scales.data(), in, out};
  std::vector<typename M::Element> packed(w.panels() * w.panel_size(), 0);
  w.data = packed.data();
  for (int64_t o = 0; o < out; ++o)
    for (int64_t i = 0; i < in; ++i) {
      const int64_t group = i / M::kGroup, lane = o % kPanel;
      packed[o / kPanel * w.panel_size() + (group * kPanel + lane) * M::kGroup + i % M::kGroup] =
          plain[o * in + i];
    }

  const Activations<M> activations(x.data(), rows, in);
  const int64_t step = panels_per_task(w, rows, 2);
  for (int64_t begin = 0; begin < w.panels(); begin += step)
    product(w, activations, begin, std::min(begin + step, w.panels()), y.data());

  double worst = 0, top = 1e-30;
  bool is_independent = true;
  for (int64_t r = 0; r < rows; ++r) {
    std::vector<double> values(&x[r * in], &x[r * in] + in);
    for (auto& value : values)
      if (std::is_same_v<M, BFloat16>) value = weight_value<BFloat16>(to_bfloat16(float(value)));
    for (int64_t i = 0, count; kIsScaled<M> && i < in; i += count) {
      constexpr int64_t kInputs = Int8::kSpan * Int8::kGroup;
      int8_t rounded[kInputs];
      count = std::min(kInputs, in - i);
      int32_t sum = 0;
      const double scale = quantize(&x[r * in + i], count, rounded, sum);
      for (int64_t j = 0; j < count; ++j) values[i + j] = scale * rounded[j];
    }
    for (int64_t o = 0; o < out; ++o) {
      double sum = 0;
      for (int64_t i = 0; i < in; ++i) sum += values[i] * weight_value<M>(plain[o * in + i]);
      if (kIsScaled<M>) sum *= scales[o];
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

std::vector<float> normal(int64_t count, std::mt19937& random) {
  std::vector<float> values(count);
  for (auto& value : values) value = std::normal_distribution<float>()(random);
  return values;
}

// Some experts in float32, against float64; and each row alone, which must give the same bits.
void check_experts(int64_t rows, int64_t width, int64_t inner, int64_t count, int64_t chosen,
                   bool normalise, std::mt19937& random) {
  const auto x = normal(rows * width, random), logits = normal(rows * count, random);
  const int64_t out = 2 * inner;
  const auto up = normal(count * out * width, random), down = normal(count * width * inner, random);
  const auto stack = [&](const std::vector<float>& plain, int64_t out, int64_t in) {
    const Matrix<Float32> w{nullptr, nullptr, in, out};
    std::vector<float> packed(count * w.panels() * w.panel_size(), 0);
    for (int64_t e = 0; e < count; ++e)
      for (int64_t o = 0; o < out; ++o)
        for (int64_t i = 0; i < in; ++i)
          packed[(e * w.panels() + o / kPanel) * w.panel_size() + i * kPanel + o % kPanel] =
              plain[(e * out + o) * in + i];
    return packed;
  };
  const auto ups = stack(up, out, width), downs = stack(down, width, inner);
  const auto run = [&](const float* x, const float* logits, int64_t rows, float* y) {
    Experts<Float32> call(x, logits, rows, {ups.data(), nullptr, width, out},
                          {downs.data(), nullptr, inner, width}, count, chosen, normalise,
                          y);
    for (int64_t r = 0; r < rows; ++r) call.route(r);
    call.sort();
    for (int64_t g = 0; g < call.groups(); ++g) call.gather(g);
    for (const auto& part : call.parts(true, 2)) call.go_up(part);
    for (int64_t g = 0; g < call.groups(); ++g) call.gate(g);
    for (const auto& part : call.parts(false, 2)) call.go_down(part);
    for (int64_t r = 0; r < rows; ++r) call.add_up(r);
  };
  std::vector<float> y(rows * width, NAN), alone(width, NAN);
  run(x.data(), logits.data(), rows, y.data());
  double worst = 0, top = 1e-30;
  bool is_independent = true;
  for (int64_t r = 0; r < rows; ++r) {
    const float* l = &logits[r * count];
    std::vector<int64_t> order(count);
    for (int64_t e = 0; e < count; ++e) order[e] = e;
    std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return l[a] > l[b]; });
    double all = 0;
    for (int64_t e = 0; e < (normalise ? chosen : count); ++e) all += std::exp(double(l[order[e]]));
    std::vector<double> wanted(width, 0);
    for (int64_t j = 0; j < chosen; ++j) {
      const int64_t e = order[j];
      for (int64_t f = 0; f < inner; ++f) {
        double gate = 0, value = 0;
        for (int64_t i = 0; i < width; ++i) {
          gate += double(x[r * width + i]) * up[(e * out + f) * width + i];
          value += double(x[r * width + i]) * up[(e * out + inner + f) * width + i];
        }
        const double hidden = gate / (1 + std::exp(-gate)) * value * std::exp(double(l[e])) / all;
        for (int64_t i = 0; i < width; ++i) wanted[i] += hidden * down[(e * width + i) * inner + f];
      }
    }
    for (int64_t i = 0; i < width; ++i) {
      worst = std::max(worst, std::fabs(wanted[i] - y[r * width + i]));
      top = std::max(top, std::fabs(wanted[i]));
    }
    run(&x[r * width], l, 1, alone.data());
    is_independent &= !std::memcmp(alone.data(), &y[r * width], width * sizeof(float));
  }
  if (!(worst <= 3e-6 * top) || !is_independent) {
    ++failures;
    std::printf("experts rows=%ld width=%ld inner=%ld: error %.2g of %.2g%s\n", long(rows),
                long(width), long(inner), worst, top,
                is_independent ? "" : ", rows depend on each other");
  }
}

std::unique_ptr<bool[]> random_tree(int64_t nodes, std::mt19937& random) {
  std::unique_ptr<bool[]> ancestors(new bool[nodes * nodes]());
  for (int64_t t = 0; t < nodes; ++t) {
    const int64_t parent = int64_t(random() % (t + 1)) - 1;  // there may be several roots
    for (int64_t j = 0; j < t; ++j)
      ancestors[t * nodes + j] = parent >= 0 && ancestors[parent * nodes + j];
    ancestors[t * nodes + t] = true;
  }
  return ancestors;
}

// A tree of nodes over S committed keys, against one softmax in float64; and each node alone, with
// its ancestors among the committed keys, which must give the same bits.
void check_attention(int64_t size, int64_t group, int64_t start, int64_t nodes,
                     std::mt19937& random) {
  const int64_t key_heads = 2, heads = group * key_heads, capacity = start + nodes;
  const auto q = normal(nodes * heads * size, random);
  const auto own_k = normal(key_heads * nodes * size, random),
             own_v = normal(key_heads * nodes * size, random);
  auto k = normal(key_heads * capacity * size, random),
       v = normal(key_heads * capacity * size, random);
  std::vector<float> out(nodes * heads * size, NAN), alone(heads * size, NAN);
  const auto ancestors = random_tree(nodes, random);
  const auto run = [](const TreeAttention& call) {
    const int64_t some = call.nodes / 3;  // these nodes, then the others
    for (int64_t head = 0; head < call.key_heads; ++head)
      for (const auto& [from, to] : {std::pair(int64_t(0), some), std::pair(some, call.nodes)}) {
        std::vector<Partial> parts;
        for (int64_t c = 0; c < call.chunks(); ++c)
          parts.push_back(attend(call, 0, head, c, from, to));
        join(call, 0, head, parts.data(), call.chunks(), from, to);
      }
  };
  const int32_t committed = int32_t(start);
  run({q.data(), k.data(), v.data(), &committed, own_k.data(), own_v.data(), ancestors.get(),
       out.data(), 1, nodes, heads, key_heads, capacity, size});
  double worst = 0;
  bool is_independent = true;
  for (int64_t t = 0; t < nodes; ++t) {
    std::vector<int64_t> path;
    for (int64_t j = 0; j <= t; ++j)
      if (ancestors[t * nodes + j]) path.push_back(j);
    const int64_t before = start + int64_t(path.size()) - 1;
    auto longer_k = k, longer_v = v;
    std::vector<float> last_k, last_v;
    for (int64_t head = 0; head < key_heads; ++head) {
      for (size_t i = 0; i < path.size(); ++i)
        for (int64_t h = 0; h < size; ++h) {
          const int64_t from = (head * nodes + path[i]) * size + h;
          const int64_t to = (head * capacity + start + int64_t(i)) * size + h;
          longer_k[to] = own_k[from];
          longer_v[to] = own_v[from];
        }
      const auto from = own_k.begin() + (head * nodes + t) * size;
      last_k.insert(last_k.end(), from, from + size);
      const auto value = own_v.begin() + (head * nodes + t) * size;
      last_v.insert(last_v.end(), value, value + size);
    }
    for (int64_t n = 0; n < heads; ++n) {
      const float* query = &q[(t * heads + n) * size];
      const int64_t first = n / group * capacity;
      std::vector<double> scores(before + 1), wanted(size, 0);
      double top = -1e300, sum = 0;
      for (int64_t j = 0; j <= before; ++j) {
        for (int64_t h = 0; h < size; ++h)
          scores[j] += double(query[h]) * longer_k[(first + j) * size + h] / std::sqrt(double(size));
        top = std::max(top, scores[j]);
      }
      for (int64_t j = 0; j <= before; ++j) {
        const double weight = std::exp(scores[j] - top);
        sum += weight;
        for (int64_t h = 0; h < size; ++h) wanted[h] += weight * longer_v[(first + j) * size + h];
      }
      for (int64_t h = 0; h < size; ++h)
        worst = std::max(worst, std::fabs(wanted[h] / sum - out[(t * heads + n) * size + h]));
    }
    const int32_t longer = int32_t(before);
    const bool self = true;
    run({&q[t * heads * size], longer_k.data(), longer_v.data(), &longer, last_k.data(),
         last_v.data(), &self, alone.data(), 1, 1, heads, key_heads, capacity, size});
    is_independent &=
        !std::memcmp(alone.data(), &out[t * heads * size], heads * size * sizeof(float));
  }
  if (!(worst <= 2e-6) || !is_independent) {
    ++failures;
    std::printf("attention size=%ld group=%ld start=%ld nodes=%ld: error %.2g%s\n", long(size), long(group),
                long(start), long(nodes), worst, is_independent ? "" : ", nodes depend on each other");
  }
}

// A layer over a tree: each path against the recurrence in float64, and against the same nodes
// one at a time with each committed before the next, which must give the same bits.
void check_delta_net(int64_t key_size, int64_t size, int64_t nodes, std::mt19937& random) {
  const int64_t key_heads = 2, heads = 4, width = 4;
  const int64_t channels = 2 * key_heads * key_size + heads * size;
  const auto inputs = normal(nodes * channels, random), window = normal(3 * channels, random);
  const auto taps = normal(channels * width, random), z = normal(nodes * heads * size, random);
  const auto a = normal(nodes * heads, random), b = normal(nodes * heads, random);
  const auto a_log = normal(heads, random), dt = normal(heads, random), norm = normal(size, random);
  const auto state = normal(heads * key_size * size, random);
  const auto ancestors = random_tree(nodes, random);
  const bool self = true;
  std::vector<float> out(nodes * heads * size), k(nodes * key_heads * key_size);
  std::vector<float> u(nodes * heads * size), g(nodes * heads);
  TreeDeltaNet call{inputs.data(), window.data(), taps.data(), a.data(), b.data(), a_log.data(),
                    dt.data(), z.data(), norm.data(), state.data(), ancestors.get(), out.data(),
                    k.data(), u.data(), g.data(), 1, nodes, key_heads, heads, key_size, size, width,
                    1e-6f};
  for (int64_t head = 0; head < key_heads; ++head) mix_key_head(call, 0, head);

  const Paths paths = paths_of(ancestors.get(), nodes);
  double worst = 0;
  bool is_same = true;
  for (int64_t i = 0; i < nodes; ++i) {
    auto now = state, before = window;
    std::vector<float> one_out(heads * size), one_k(key_heads * key_size), one_u(heads * size);
    std::vector<float> one_g(heads);
    for (const int64_t j : paths[i]) {
      const TreeDeltaNet one{&inputs[j * channels], before.data(), taps.data(), &a[j * heads],
                             &b[j * heads], a_log.data(), dt.data(), &z[j * heads * size],
                             norm.data(), now.data(), &self, one_out.data(), one_k.data(),
                             one_u.data(), one_g.data(), 1, 1, key_heads, heads, key_size, size,
                             width, 1e-6f};
      for (int64_t head = 0; head < key_heads; ++head) mix_key_head(one, 0, head);
      const int32_t path[2] = {0, -1};
      for (int64_t head = 0; head < heads; ++head)
        commit({one_k.data(), one_u.data(), one_g.data(), path, now.data(), 1, 1, 2, key_heads,
                heads, key_size, size}, 0, head);
      before.erase(before.begin(), before.begin() + channels);
      before.insert(before.end(), &inputs[j * channels], &inputs[j * channels] + channels);
    }
    is_same &= !std::memcmp(one_out.data(), &out[i * heads * size], heads * size * sizeof(float));
    // The state after the path, against the recurrence over what the nodes write.
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t d = 0; d < key_size; ++d)
        for (int64_t c = 0; c < size; ++c) {
          double wanted = state[(h * key_size + d) * size + c];
          for (const int64_t j : paths[i])
            wanted = wanted * std::exp(double(g[j * heads + h])) +
                     double(k[(j * key_heads + h / 2) * key_size + d]) *
                         u[(j * heads + h) * size + c];
          worst = std::max(worst, std::fabs(wanted - now[(h * key_size + d) * size + c]));
        }
  }
  if (!(worst <= 1e-5) || !is_same) {
    ++failures;
    std::printf("DeltaNet key_size=%ld size=%ld nodes=%ld: error %.2g%s\n", long(key_size),
                long(size), long(nodes), worst, is_same ? "" : ", not as one by one");
  }
}

void check_norm(int64_t size, std::mt19937& random) {
  const auto x = normal(size, random), weight = normal(size, random);
  std::vector<float> out(size, NAN);
  rms_norm(x.data(), weight.data(), size, 1e-6f, 1.0f, out.data());
  double squares = 0, worst = 0;
  for (const float value : x) squares += double(value) * value;
  for (int64_t i = 0; i < size; ++i) {
    const double wanted = x[i] / std::sqrt(squares / size + 1e-6) * (weight[i] + 1.0);
    worst = std::max(worst, std::fabs(wanted - out[i]));
  }
  if (!(worst <= 3e-6)) {
    ++failures;
    std::printf("norm size=%ld: error %.2g\n", long(size), worst);
  }
}

void check_peak(int64_t size, std::mt19937& random) {
  auto x = normal(size, random);
  for (auto& value : x) value = std::round(value * 4) * 3;  // with many equals, far apart
  const Peak found = peak_of(x.data(), size);
  const int64_t wanted = std::max_element(x.begin(), x.end()) - x.begin();
  double sum = 0;
  for (const float value : x) sum += std::exp(double(value) - x[wanted]);
  const double error = std::fabs(x[wanted] + std::log(sum) - found.log_total);
  if (found.place != wanted || !(error <= 1e-5)) {
    ++failures;
    std::printf("peak size=%ld: place %ld of %ld, error %.2g\n", long(size), long(found.place),
                long(wanted), error);
  }
}

void check_best(int64_t size, int64_t count, std::mt19937& random) {
  auto x = normal(size, random);
  for (auto& value : x) value = std::round(value * 4) * 3;
  if (size > 40) x[37] = NAN;
  std::vector<int32_t> order(size), places(count, -1);
  std::vector<float> values(count, NAN);
  const auto of = [&](int32_t i) { return std::isnan(x[i]) ? -1e30f : x[i]; };
  for (int64_t i = 0; i < size; ++i) order[i] = int32_t(i);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return of(a) > of(b); });
  best_of(x.data(), size, count, -1e30f, values.data(), places.data());
  for (int64_t i = 0; i < count; ++i)
    if (places[i] != order[i] || values[i] != of(order[i])) {
      ++failures;
      std::printf("best size=%ld count=%ld: place %ld is %ld, not %ld\n", long(size), long(count),
                  long(i), long(places[i]), long(order[i]));
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
  for (int64_t rows : {9, 70}) {  // so long that sums are taken in parts
    check<Float32>("float32", rows, 50, 3000, random);
    check<BFloat16>("bfloat16", rows, 50, 3000, random);
    check<Int8>("int8", rows, 50, 3000, random);
  }
  for (int64_t size : {16, 80})
    for (int64_t start : {0, 31, 33, 1021, 2050})
      for (int64_t nodes : {1, 8}) check_attention(size, 1 + start % 4, start, nodes, random);
  for (int64_t group : {1, 2, 3, 4, 6, 7}) check_attention(48, group, 61, 8, random);
  for (int64_t nodes : {1, 2, 9}) {
    check_delta_net(16, 16, nodes, random);
    check_delta_net(48, 144, nodes, random);
    check_delta_net(16, 256, nodes, random);
  }
  for (int64_t rows : {1, 2, 9, 40}) {
    check_experts(rows, 1, 1, 1, 1, false, random);
    check_experts(rows, 33, 17, 5, 2, rows == 9, random);
    check_experts(rows, 64, 48, 8, 8, true, random);
  }
  for (int64_t size : {1, 7, 16, 33, 576}) check_norm(size, random);
  for (int64_t size : {1, 7, 16, 33, 5000}) check_peak(size, random);
  for (int64_t size : {1, 16, 129, 5000})
    for (int64_t count : {1, 3, 16, 129})
      if (count <= size) check_best(size, count, random);
  std::printf("%d lanes, offset %d: %d failures\n", kLanes, Int8::kOffset, failures);
  return failures > 0;
}
