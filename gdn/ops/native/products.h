// Products of few rows with a large packed matrix, y = x W^T, at the speed the matrix can be read.
//
// Packed layout, the same on every processor: outputs in panels of 16, inputs in groups of K,
//   data[panel][group][16 outputs][K inputs],  K = 1 (float32), 2 (bfloat16), 4 (int8),
// padded with zeros. A panel is read front to back once for a handful of rows. Every output is
// summed by one thread over the groups in order, so a row's bits depend neither on the other rows
// nor on the number of threads.
//
// Only dot products of small types are intrinsics, with a portable form beside them: of int8 for the
// same sums, of bfloat16 for the same up to rounding. This file knows nothing of XLA.
#pragma once

#include <type_traits>
#include <vector>

#include "vectors.h"

namespace gdn {

constexpr int kPanel = 16, kParts = kPanel / kLanes;  // outputs of a panel, vectors that hold them

// A matrix type says how a group of weights is read (`Weight`), what is kept of a group of
// activations (`kWords` of `Word`), how they are spread over the lanes (`Factor`), and how both
// join a sum. Sums are floats; those of int8 are exact integers (`Partial`) over `kSpan` groups at a
// time, whose activations share a scale.

struct Float32 {
  using Element = float;
  using Weight = Floats;
  using Word = float;
  using Factor = Floats;
  using Partial = Floats;
  static constexpr int kGroup = 1, kWords = 1, kMaxRows = kLanes == 16 ? 8 : 6;
  static Weight load(const void* p) { return keep(*static_cast<const Floats*>(p)); }
  static Factor factor(const Word* x) { return keep(spread(x[0])); }
  static void add(Partial& sum, Weight w, Factor x) { sum = fused(w, x, sum); }
};

// Activations are rounded to bfloat16 as well. Two weights share a word, and so do two activations
// where the processor multiplies such pairs; elsewhere both are widened: the upper half of a float32
// is a bfloat16.
struct BFloat16 {
  using Element = uint16_t;
  using Partial = Floats;
  static constexpr int kGroup = 2, kMaxRows = kLanes == 16 ? 8 : 4;
#if GDN_LANES == 16 && defined(__AVX512BF16__)
  using Weight = Words;
  using Word = uint32_t;
  using Factor = Words;
  static constexpr int kWords = 1;
  static Weight load(const void* p) { return keep(*static_cast<const Words*>(p)); }
  static Factor factor(const Word* x) { return x[0] - Words{}; }
  static void add(Partial& sum, Weight w, Factor x) {
    sum = (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)x);
  }
#else
  struct Pair {
    Floats even, odd;
  };
  using Weight = Pair;
  using Word = float;
  using Factor = Pair;
  static constexpr int kWords = 2;
  static Weight load(const void* p) {
    const Words both = *static_cast<const Words*>(p);
    return {(Floats)(both << 16), (Floats)(both & 0xffff0000u)};
  }
  static Factor factor(const Word* x) { return {keep(spread(x[0])), keep(spread(x[1]))}; }
  static void add(Partial& sum, Weight w, Factor x) {
    sum = fused(w.odd, x.odd, fused(w.even, x.even, sum));
  }
#endif
};

// Weights in -127..127, activations too, four of them in a word. Instructions that want one side
// without sign get weights + kOffset, and sums start from -kOffset * sum(x), which that is too much.
struct Int8 {
  using Element = int8_t;
  using Weight = Ints;
  using Word = uint32_t;
  using Partial = Ints;
  static constexpr int kGroup = 4, kWords = 1, kMaxRows = kLanes == 16 ? 8 : 4;
  static constexpr int kSpan = 16;  // groups, 64 inputs
#if GDN_LANES == 16 || GDN_LANES == 8 && defined(__AVXVNNI__)
  static constexpr int kOffset = 128;
#elif GDN_LANES == 4 && defined(GDN_OFFSET)  // by tests, to run the correction on any processor
  static constexpr int kOffset = GDN_OFFSET;
#else
  static constexpr int kOffset = 0;
#endif
  static_assert(kOffset == 0 || kOffset == 128, "load() flips the highest bit of each weight");
  static Weight load(const void* p) {
    const Words weights = *static_cast<const Words*>(p);
    return keep((Ints)(kOffset ? weights ^ 0x80808080u : weights));  // each byte + 128
  }
#if GDN_LANES == 16
  using Factor = Ints;
  static Factor factor(const Word* x) { return (Ints)(x[0] - Words{}); }
  static void add(Partial& sum, Weight w, Factor x) {
    sum = (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
  }
#elif GDN_LANES == 8 && defined(__AVXVNNI__)
  using Factor = Ints;
  static Factor factor(const Word* x) { return (Ints)(x[0] - Words{}); }
  static void add(Partial& sum, Weight w, Factor x) {
    sum = (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)x);
  }
#elif GDN_LANES == 8
  struct Factor {
    __m256i value, size;
  };
  static Factor factor(const Word* x) {
    const __m256i value = _mm256_set1_epi32(int(x[0]));
    return {keep(value), keep(_mm256_abs_epi8(value))};
  }
  static void add(Partial& sum, Weight w, Factor x) {
    // |x| * (w with the sign of x): two products of at most 127 * 127 fit into 16 bits.
    const __m256i pairs = _mm256_maddubs_epi16(x.size, _mm256_sign_epi8((__m256i)w, x.value));
    sum += (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  }
#else
  struct Factor {
    int32_t values[4];
  };
  static Factor factor(const Word* x) {
    Factor result;
    for (int j = 0; j < 4; ++j) result.values[j] = int8_t(x[0] >> 8 * j);
    return result;
  }
  static void add(Partial& sum, Weight w, Factor x) {
    for (int j = 0; j < 4; ++j) {
      const Words top = (Words)w << (24 - 8 * j);
      sum += (kOffset ? (Ints)(top >> 24) : (Ints)top >> 24) * x.values[j];
    }
  }
#endif
};

template <class M>
constexpr bool kIsScaled = std::is_same_v<M, Int8>;

// Rows are cut into tiles of at most M::kMaxRows and about equal height.
template <class M>
int64_t tiles_of(int64_t rows) {
  return (rows + M::kMaxRows - 1) / M::kMaxRows;
}
template <class M>
int64_t tile_start(int64_t rows, int64_t t) {
  return t * rows / tiles_of<M>(rows);
}

// Some activations in -127..127 with a common scale; returns the scale. Beside an infinity or a NaN it
// is NaN, and so are all their products. Adds the integers to `sum`.
inline float quantize(const float* x, int64_t size, int8_t* out, int32_t& sum) {
  const int64_t whole = size / kLanes * kLanes;
  Floats tops{}, breaks{};
  for (int64_t i = 0; i < whole; i += kLanes) {
    const Floats value = at(x + i), sized = value < 0.0f ? -value : value;
    tops = sized > tops ? sized : tops;
    breaks += value * 0.0f;
  }
  float top = greatest(tops), broken = total(breaks);
  for (int64_t i = whole; i < size; ++i) {
    top = std::max(top, std::fabs(x[i]));
    broken += x[i] * 0.0f;
  }
  if (broken != 0) return broken;
  const float inverse = top > 1e-30f ? 127.0f / top : 0.0f;
  typedef int8_t Bytes __attribute__((vector_size(kLanes), aligned(1), may_alias));
  Floats sums{};  // exact: integers
  for (int64_t i = 0; i < whole; i += kLanes) {
    const Floats value = at(x + i) * inverse + kMagic - kMagic;
    *reinterpret_cast<Bytes*>(out + i) =
        __builtin_convertvector(__builtin_convertvector(value, Ints), Bytes);
    sums += value;
  }
  sum += int32_t(total(sums));
  for (int64_t i = whole; i < size; ++i) sum += out[i] = int8_t(x[i] * inverse + kMagic - kMagic);
  return top / 127.0f;
}

// Activations as the kernels read them: tile by tile, [groups][rows of the tile][kWords], so that
// a tile is one stream, whatever the distance between rows is. A single row of floats stays where it
// is.
template <class M>
class Activations {
 public:
  using Word = typename M::Word;

  Activations(const float* x, int64_t rows, int64_t in) : rows_(rows) {
    const int64_t groups = (in + M::kGroup - 1) / M::kGroup;
    stride_ = groups * M::kWords;
    data_ = reinterpret_cast<const Word*>(x);
    if (std::is_same_v<M, Float32> && rows == 1) return;
    copy_.resize(rows * stride_);
    data_ = copy_.data();
    if constexpr (kIsScaled<M>) {
      spans_of_row_ = (groups + M::kSpan - 1) / M::kSpan;
      spans_.reserve(rows * spans_of_row_);
    }
    std::vector<Word> row(stride_);
    for (int64_t t = 0; t < tiles_of<M>(rows); ++t) {
      const int64_t first = tile_start<M>(rows, t), height = tile_start<M>(rows, t + 1) - first;
      for (int64_t r = 0; r < height; ++r) {
        convert(x + (first + r) * in, in, groups, row.data());
        Word* to = copy_.data() + first * stride_ + r * M::kWords;
        for (int64_t g = 0; g < groups; ++g)
          for (int k = 0; k < M::kWords; ++k) to[g * height * M::kWords + k] = row[g * M::kWords + k];
      }
    }
  }
  const Word* tile(int64_t first_row) const { return data_ + first_row * stride_; }
  int64_t rows() const { return rows_; }

  // Of int8, by row and span: what its sums start from, and are to be multiplied with.
  struct Span {
    float scale;
    int32_t start;
  };
  const Span& span(int64_t row, int64_t index) const { return spans_[row * spans_of_row_ + index]; }

 private:
  void convert(const float* x, int64_t in, int64_t groups, Word* out) {
    if constexpr (kIsScaled<M>) {
      constexpr int64_t kInputs = M::kSpan * M::kGroup;
      std::fill(out, out + groups, 0);
      auto* values = reinterpret_cast<int8_t*>(out);
      for (int64_t i = 0; i < in; i += kInputs) {
        const int64_t count = std::min(kInputs, in - i);
        int32_t sum = 0;
        const float scale = quantize(x + i, count, values + i, sum);
        spans_.push_back({scale, -M::kOffset * sum});
      }
    } else if constexpr (std::is_same_v<M, BFloat16>) {
      std::fill(out, out + stride_, Word{});
      int64_t i = 0;
      for (; i + kLanes <= in; i += kLanes) put(rounded_to_bfloat16(at(x + i)), out, i);
      for (; i < in; ++i) {
        const uint32_t bits = rounded_to_bfloat16(spread(x[i]))[0];
        if constexpr (M::kWords == 1)
          out[i / 2] |= bits >> 16 << 16 * (i % 2);
        else
          std::memcpy(out + i, &bits, sizeof(bits));
      }
    } else {
      std::copy(x, x + in, out);
    }
  }
  // Puts numbers with 16 bits each where those from `i` on belong.
  static void put(Words bits, Word* out, int64_t i) {
    if constexpr (M::kWords == 1) {
      typedef uint16_t Halves __attribute__((vector_size(kLanes * 2), aligned(2), may_alias));
      *reinterpret_cast<Halves*>(out + i / 2) = __builtin_convertvector(bits >> 16, Halves);
    } else {
      at(out + i) = (Floats)bits;
    }
  }
  int64_t rows_, stride_, spans_of_row_ = 0;
  const Word* data_;
  std::vector<Word> copy_;
  std::vector<Span> spans_;
};

// What a product needs: the matrix, where the result goes.
template <class M>
struct Matrix {
  const typename M::Element* data;
  const float* scales;  // of each output, int8 only
  int64_t in, out;
  int64_t groups() const { return (in + M::kGroup - 1) / M::kGroup; }
  int64_t panels() const { return (out + kPanel - 1) / kPanel; }
  int64_t panel_size() const { return groups() * kPanel * M::kGroup; }  // elements
};

template <class M>
void store(const Matrix<M>& w, int64_t row, int64_t panel, const Floats (&sums)[kParts], float* y) {
  alignas(64) float values[kPanel];
  const int64_t first = panel * kPanel, count = std::min<int64_t>(kPanel, w.out - first);
  std::memcpy(values, sums, sizeof(values));
  if constexpr (kIsScaled<M>)
    for (int64_t i = 0; i < count; ++i) values[i] *= w.scales[first + i];
  std::memcpy(y + row * w.out + first, values, count * sizeof(float));
}

// Sums of a tile of rows and some panels, while they are not in registers.
template <int R, int P>
using Sums = Floats[R][P][kParts];

// R rows times P panels, over groups `begin` to `end`, which in int8 lie within a span; adds to `sums`
// unless begin is 0.
template <class M, int R, int P>
void tile_of_span(const Matrix<M>& w, const Activations<M>& x, int64_t row, int64_t panel,
                  int64_t begin, int64_t end, Sums<R, P>& sums) {
  // A copy whose places are all known when it is compiled, or GCC keeps it in memory.
  typename M::Partial own[R][P][kParts];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p)
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) {
        if constexpr (kIsScaled<M>)
          own[r][p][part] = x.span(row + r, begin / M::kSpan).start - Ints{};
        else
          own[r][p][part] = begin == 0 ? Floats{} : sums[r][p][part];
      }
  constexpr int kAhead = 24;  // groups
  const int64_t step = kPanel * M::kGroup, size = w.panel_size();
  const auto* weights = w.data + panel * size;
  const auto* activations = x.tile(row);
  for (int64_t g = begin; g < end; ++g) {
    typename M::Weight values[P][kParts];
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) {
      // A group is a cache line; the processor's own prefetch is too late for so few streams.
      __builtin_prefetch(weights + p * size + (g + kAhead) * step);
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part)
        values[p][part] = M::load(weights + p * size + g * step + part * kLanes * M::kGroup);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const auto factor = M::factor(activations + (g * R + r) * M::kWords);
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p)
#pragma GCC unroll 4
        for (int part = 0; part < kParts; ++part) M::add(own[r][p][part], values[p][part], factor);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p)
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) {
        if constexpr (kIsScaled<M>)
          sums[r][p][part] = fused(__builtin_convertvector(own[r][p][part], Floats),
                                   spread(x.span(row + r, begin / M::kSpan).scale),
                                   begin == 0 ? Floats{} : sums[r][p][part]);
        else
          sums[r][p][part] = own[r][p][part];
      }
}

template <class M, int R, int P>
void tile(const Matrix<M>& w, const Activations<M>& x, int64_t row, int64_t panel, int64_t begin,
          int64_t end, Sums<R, P>& sums) {
  if constexpr (kIsScaled<M>) {
    for (; begin < end; begin += M::kSpan)
      tile_of_span<M, R, P>(w, x, row, panel, begin, std::min(begin + M::kSpan, end), sums);
  } else {
    tile_of_span<M, R, P>(w, x, row, panel, begin, end, sums);
  }
}

template <class M, int R, int P>
void store_tile(const Matrix<M>& w, int64_t row, int64_t panel, const Sums<R, P>& sums, float* y) {
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p) store(w, row + r, panel + p, sums[r][p], y);
}

// Panels that are multiplied together with R rows: as many as the registers hold, of each vector R
// sums and its weights, beside a factor.
template <class M, int R>
constexpr int panels_at_once() {
  constexpr int kWeights = sizeof(typename M::Weight) / sizeof(Floats);
  constexpr int kFactor = std::max<int>(1, sizeof(typename M::Factor) / sizeof(Floats));
  return std::clamp((kRegisters - kFactor) / ((R + kWeights) * kParts), 1, 4);
}

// A single tile reads its panels once, front to back.
template <class M, int R, int P>
void few_rows(const Matrix<M>& w, const Activations<M>& x, int64_t panel, float* y) {
  alignas(64) Sums<R, P> sums;
  tile<M, R, P>(w, x, 0, panel, 0, w.groups(), sums);
  store_tile<M, R, P>(w, 0, panel, sums, y);
}

template <class M, int R = M::kMaxRows>
void few_rows_of(const Matrix<M>& w, const Activations<M>& x, int64_t begin, int64_t end,
                 float* y) {
  if constexpr (R > 1) {
    if (x.rows() < R) return few_rows_of<M, R - 1>(w, x, begin, end, y);
  }
  constexpr int kBlock = panels_at_once<M, R>();
  for (; begin + kBlock <= end; begin += kBlock) few_rows<M, R, kBlock>(w, x, begin, y);
  for (; begin < end; ++begin) few_rows<M, R, 1>(w, x, begin, y);
}

// One of several tiles, all of at least half of the most rows.
template <class M, int P, int R = M::kMaxRows>
void one_of_many(const Matrix<M>& w, const Activations<M>& x, int64_t row, int64_t count,
                 int64_t panel, int64_t begin, int64_t end, char* kept, float* y) {
  if constexpr (R > M::kMaxRows / 2) {
    if (count < R) return one_of_many<M, P, R - 1>(w, x, row, count, panel, begin, end, kept, y);
  }
  auto& sums = *reinterpret_cast<Sums<R, P>*>(kept);
  tile<M, R, P>(w, x, row, panel, begin, end, sums);
  if (end == w.groups()) store_tile<M, R, P>(w, row, panel, sums, y);
}

// Parts of the groups of P panels, so small that one stays in the nearest cache while tile after tile
// of rows passes over it.
template <class M, int P>
int64_t parts_of(const Matrix<M>& w) {
  constexpr int64_t kGroupBytes = P * kPanel * M::kGroup * sizeof(typename M::Element);
  return std::max<int64_t>(1, (w.groups() * kGroupBytes + (12 << 10)) / (24 << 10));
}

// Where a part begins: of int8 at the first group of a span.
template <class M>
int64_t part_start(int64_t groups, int64_t part, int64_t parts) {
  const int64_t start = part * groups / parts;
  if constexpr (kIsScaled<M>) return part == parts ? groups : start / M::kSpan * M::kSpan;
  return start;
}

// Many rows, some tiles at a time. Every sum is taken over the groups in order, in parts or not.
constexpr int64_t kTiles = 8;
template <class M, int P>
void many_rows(const Matrix<M>& w, const Activations<M>& x, int64_t first, int64_t last,
               int64_t panel, float* y) {
  alignas(64) char kept[kTiles * M::kMaxRows * P * kPanel * 4];  // sums, of four bytes each
  const int64_t groups = w.groups(), parts = parts_of<M, P>(w);
  for (int64_t part = 0; part < parts; ++part)
    for (int64_t t = first; t < last; ++t) {
      const int64_t row = tile_start<M>(x.rows(), t);
      one_of_many<M, P>(w, x, row, tile_start<M>(x.rows(), t + 1) - row, panel,
                        part_start<M>(groups, part, parts),
                        part_start<M>(groups, part + 1, parts),
                        kept + (t - first) * M::kMaxRows * P * kPanel * 4, y);
    }
}

// Panels `begin` to `end` for all rows.
template <class M>
void product(const Matrix<M>& w, const Activations<M>& x, int64_t begin, int64_t end, float* y) {
  if (x.rows() < 1) return;
  if (x.rows() <= M::kMaxRows) return few_rows_of<M>(w, x, begin, end, y);
  constexpr int kBlock = panels_at_once<M, M::kMaxRows>();
  const int64_t tiles = tiles_of<M>(x.rows()), together = parts_of<M, kBlock>(w) > 1 ? kTiles : 1;
  for (int64_t first = 0; first < tiles; first += together) {
    const int64_t last = std::min(first + together, tiles);
    int64_t panel = begin;
    for (; panel + kBlock <= end; panel += kBlock)
      many_rows<M, kBlock>(w, x, first, last, panel, y);
    for (; panel < end; ++panel) many_rows<M, 1>(w, x, first, last, panel, y);
  }
}

// Panels that one thread takes at a time: enough to be worth it, few enough to share evenly, and of
// many rows so few that they stay in its own cache.
template <class M>
int64_t panels_per_task(const Matrix<M>& w, int64_t rows, int64_t threads) {
  constexpr int kBlock = panels_at_once<M, M::kMaxRows>();
  const int64_t bytes = w.panel_size() * int64_t(sizeof(typename M::Element));
  const int64_t share = (w.panels() + 4 * threads - 1) / (4 * threads);
  if (rows > M::kMaxRows) {
    const int64_t most = std::max<int64_t>(1, (256 << 10) / (bytes * kBlock));
    return std::min((share + kBlock - 1) / kBlock, most) * kBlock;
  }
  const int64_t most = std::max<int64_t>(1, (1 << 20) / bytes);
  const int64_t least = std::max<int64_t>(1, (16 << 10) / bytes);
  return std::clamp(share, std::min(least, most), most);
}

}  // namespace gdn
