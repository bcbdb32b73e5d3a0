// Attention of the nodes of a draft tree, over all committed keys and each over its own ancestors.
//
// A node at depth d of a tree over S committed tokens stands at position S + d, and its ancestors
// at S, S + 1, ...: keys are taken by position, wherever they lie, in blocks of 32 that begin at
// multiples of 32, with a running softmax from block to block (arXiv 2205.14135). So the bits of a
// node depend on its own keys alone: not on the nodes beside it, and not on which of the keys have
// been committed. One thread takes up to 1,024 positions of a key head; what several chunks bring
// is joined in their order.
#pragma once

#include <limits>
#include <vector>

#include "vectors.h"

namespace gdn {

constexpr int kBlock = 32;      // keys
constexpr int64_t kChunk = 1024;  // keys
constexpr float kNothing = -std::numeric_limits<float>::infinity();

// A call; H is a multiple of kLanes, N one of K.
struct TreeAttention {
  const float* q;           // [B, T, N, H]
  const float *k, *v;       // [B, K, S, H], committed
  const int32_t* start;     // [B], how many of them
  const float *own_k, *own_v;  // [B, K, T, H], of the nodes, parents before children
  const bool* ancestors;    // [B, T, T], a node is its own
  float* out;               // [B, T, N, H]
  int64_t batch, nodes, heads, key_heads, capacity, size;

  int64_t group() const { return heads / key_heads; }
  const float* query(int64_t b, int64_t head, int64_t row) const {
    const int64_t t = row / group(), n = head * group() + row % group();
    return q + ((b * nodes + t) * heads + n) * size;
  }
  int64_t chunks() const {  // that the longest row may need
    int64_t longest = 0;
    for (int64_t b = 0; b < batch; ++b) longest = std::max<int64_t>(longest, start[b]);
    return (longest + nodes + kChunk - 1) / kChunk;
  }
};

// What some keys have brought to some rows: weighted values, the sum of the weights, and the score
// at which a weight is 1.
struct Partial {
  Partial() = default;
  Partial(int64_t rows, int64_t size)
      : values(rows * size), total(rows), top(rows, kNothing) {}
  std::vector<float> values, total, top;
};

// Inner products of R queries with J keys.
template <int R, int J>
void inner(const float* const* queries, const float* const* keys, int64_t size,
           float (*scores)[kBlock]) {
  Floats sums[R][J] = {};
  for (int64_t h = 0; h < size; h += kLanes)
#pragma GCC unroll 4
    for (int j = 0; j < J; ++j) {
      const Floats key = keep(at(keys[j] + h));
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sums[r][j] = fused(at(queries[r] + h), key, sums[r][j]);
    }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
    if (J == 4)
      totals(sums[r], scores[r]);
    else
#pragma GCC unroll 4
      for (int j = 0; j < J; ++j) scores[r][j] = total(sums[r][j]);
}

// values = values * fade + weights . v, for R rows and W vectors of each.
template <int R, int W>
void weigh(float* values, int64_t size, const float* fade, const float (*weights)[kBlock],
           const float* const* v, int count, int64_t h) {
  Floats sums[R][W];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w) sums[r][w] = at(values + r * size + h + w * kLanes) * fade[r];
  for (int j = 0; j < count; ++j)
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w) {
      const Floats value = keep(at(v[j] + h + w * kLanes));
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sums[r][w] = fused(value, spread(weights[r][j]), sums[r][w]);
    }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w) at(values + r * size + h + w * kLanes) = sums[r][w];
}

// Turns scores into weights of a row, the greatest of all so far 1, and adds them up; returns the
// logarithm of what values and sum so far are to be multiplied by.
inline float soften(float* scores, int count, float scale, float& top, float& sum) {
  std::fill(scores + count, scores + kBlock, kNothing);
  Floats best = spread(top);
  for (int j = 0; j < kBlock; j += kLanes) {
    at(scores + j) = at(scores + j) * scale;
    best = at(scores + j) > best ? at(scores + j) : best;
  }
  const float next = greatest(best);
  Floats sums{};
  for (int j = 0; j < kBlock; j += kLanes) {
    at(scores + j) = exponential(at(scores + j) - next);
    sums += at(scores + j);
  }
  sum = total(sums);
  const float fade = top - next;
  top = next;
  return fade;
}

// Asks for what lies as far behind some keys as the next block: their streams are too short for
// the processor to see them coming.
inline void fetch_ahead(const float* const* rows, int count, int64_t size) {
  for (int j = 0; j < count; ++j)
    for (int64_t h = 0; h < size; h += 16)
      __builtin_prefetch(rows[j] + kBlock * size + h);
}

// Takes a block of keys into R rows from `row` on.
template <int R>
void add_block(Partial& state, int64_t row, const float* const* queries, int64_t size,
               const float* const* keys, const float* const* values, int count) {
  alignas(64) float scores[R][kBlock];
  float fade[kLanes] = {}, added[R];
  const float scale = 1.0f / std::sqrt(float(size));
  int j = 0;
  for (; j + 4 <= count; j += 4) {
    if (row == 0) {
      fetch_ahead(keys + j, 4, size);
      fetch_ahead(values + j, 4, size);
    }
    inner<R, 4>(queries, keys + j, size, reinterpret_cast<float(*)[kBlock]>(&scores[0][j]));
  }
  for (; j < count; ++j)
    inner<R, 1>(queries, keys + j, size, reinterpret_cast<float(*)[kBlock]>(&scores[0][j]));
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
    fade[r] = soften(scores[r], count, scale, state.top[row + r], added[r]);
  at(fade) = exponential(at(fade));
  for (int r = 0; r < R; ++r) state.total[row + r] = state.total[row + r] * fade[r] + added[r];
  int64_t h = 0;
  float* sums = &state.values[row * size];
  for (; h + 4 * kLanes <= size; h += 4 * kLanes)
    weigh<R, 4>(sums, size, fade, scores, values, count, h);
  for (; h < size; h += kLanes) weigh<R, 1>(sums, size, fade, scores, values, count, h);
}

inline void add_keys(Partial& state, int64_t row, int64_t end, const float* const* queries,
                     int64_t size, const float* const* keys, const float* const* values,
                     int count) {
  for (; row + 3 <= end; row += 3)
    add_block<3>(state, row, queries + row, size, keys, values, count);
  if (row + 2 == end) add_block<2>(state, row, queries + row, size, keys, values, count);
  if (row + 1 == end) add_block<1>(state, row, queries + row, size, keys, values, count);
}

// What positions chunk * kChunk and following bring to a key head's rows of the nodes from `from` to
// before `to`.
inline Partial attend(const TreeAttention& call, int64_t b, int64_t head, int64_t chunk,
                      int64_t from, int64_t to) {
  const int64_t size = call.size, group = call.group(), start = call.start[b];
  const int64_t begin = chunk * kChunk, end = begin + kChunk, pair = b * call.key_heads + head;
  const float* k = call.k + pair * call.capacity * size;
  const float* v = call.v + pair * call.capacity * size;
  const int64_t rows = (to - from) * group;
  Partial state(rows, size);
  std::vector<const float*> queries(rows);
  for (int64_t r = 0; r < rows; ++r) queries[r] = call.query(b, head, from * group + r);
  const float *keys[kBlock], *values[kBlock];

  // Blocks that all nodes see.
  const int64_t whole = std::min(end, start / kBlock * kBlock);
  for (int64_t first = begin; first < whole; first += kBlock) {
    for (int j = 0; j < kBlock; ++j) {
      keys[j] = k + (first + j) * size;
      values[j] = v + (first + j) * size;
    }
    add_keys(state, 0, rows, queries.data(), size, keys, values, kBlock);
  }
  // Those with ancestors, which are different for each node.
  for (int64_t t = from; t < to; ++t) {
    const bool* mask = call.ancestors + (b * call.nodes + t) * call.nodes;
    int64_t node = 0, position = std::max(begin, whole);
    for (int64_t skip = position - start; skip > 0 && node < call.nodes; ++node) skip -= mask[node];
    while (position < end) {
      int count = 0;
      for (; count < kBlock; ++count, ++position) {
        if (position < start) {
          keys[count] = k + position * size;
          values[count] = v + position * size;
          continue;
        }
        while (node < call.nodes && !mask[node]) ++node;
        if (node == call.nodes) break;
        keys[count] = call.own_k + (pair * call.nodes + node) * size;
        values[count] = call.own_v + (pair * call.nodes + node) * size;
        ++node;
      }
      if (count > 0)
        add_keys(state, (t - from) * group, (t - from + 1) * group, queries.data(), size, keys,
                 values, count);
      if (count < kBlock) break;
    }
  }
  return state;
}

// Joins what the chunks have brought to such rows, and writes it.
inline void join(const TreeAttention& call, int64_t b, int64_t head, const Partial* parts,
                 int64_t chunks, int64_t from, int64_t to) {
  const int64_t size = call.size;
  for (int64_t row = 0; row < (to - from) * call.group(); ++row) {
    float* out = call.out + (call.query(b, head, from * call.group() + row) - call.q);
    float top = kNothing, sum = 0;
    for (int64_t c = 0; c < chunks; ++c) top = std::max(top, parts[c].top[row]);
    std::fill(out, out + size, 0.0f);
    for (int64_t c = 0; c < chunks; ++c) {
      const float weight = exponential(spread(parts[c].top[row] - top))[0];
      sum += weight * parts[c].total[row];
      for (int64_t h = 0; h < size; h += kLanes)
        at(out + h) += at(&parts[c].values[row * size + h]) * weight;
    }
    for (int64_t h = 0; h < size; h += kLanes) at(out + h) = at(out + h) / sum;
  }
}

}  // namespace gdn
