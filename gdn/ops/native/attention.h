// Attention of the nodes of a draft tree, over all committed keys and each over its own ancestors.
//
// A node at depth d of a tree over S committed tokens stands at position S + d, and its ancestors
// at S, S + 1, ...: keys are taken by position, wherever they lie, in blocks of 32 that begin at
// multiples of 32, with a running softmax from block to block (arXiv 2205.14135). So the bits of a
// node depend on its own keys alone: not on the nodes beside it, and not on which of the keys have
// been committed. One thread takes a chunk of positions of a key head; what several chunks bring is
// joined in their order.
#pragma once

#include <limits>
#include <type_traits>
#include <vector>

#include "vectors.h"

namespace gdn {

constexpr int kBlock = 32;       // keys
constexpr int64_t kTurned = 64;  // channels of a block that stay in the nearest cache
constexpr int kMostRows = 6;     // that are taken through a block together
constexpr float kNothing = -std::numeric_limits<float>::infinity();

// Where a chunk begins. The first are short, as a few heads are no work for several threads, and the
// others long, as each brings values of its own for every row.
inline int64_t chunk_start(int64_t chunk) { return chunk < 4 ? chunk * 256 : (chunk - 3) * 1024; }

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
    int64_t count = 1;
    while (chunk_start(count) < longest + nodes) ++count;
    return count;
  }
};

// What some keys have brought to some rows: weighted values, the sum of the weights, and the score
// at which a weight is 1.
struct Partial {
  Partial() = default;
  Partial(int64_t rows, int64_t size)
      : size(size), values((rows * size + 15) / 16), scores(rows), total(rows),
        top(rows, kNothing) {}
  float* row(int64_t r) { return reinterpret_cast<float*>(values.data()) + r * size; }
  const float* row(int64_t r) const {
    return reinterpret_cast<const float*>(values.data()) + r * size;
  }

  struct alignas(64) Scores {
    float x[kBlock];
  };
  int64_t size = 0;
  std::vector<Line> values;    // [rows, H]
  std::vector<Scores> scores;  // of a block, while it is taken in
  std::vector<float> total, top;
};

// Lays keys side by side, so that a vector holds one channel of each: inner products with many
// queries then add up without sums over lanes. Of keys beyond `count` any number may come.
inline void turn(const float* const* keys, int count, int64_t begin, int64_t end, float* turned) {
  for (int j = 0; j < count; j += kLanes) {
    const float* rows[kLanes];
    for (int i = 0; i < kLanes; ++i) rows[i] = keys[std::min(j + i, count - 1)];
    for (int64_t h = begin; h < end; h += kLanes) {
      Floats square[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) square[i] = at(rows[i] + h);
      transpose(square);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) at(turned + (h - begin + i) * kBlock + j) = square[i];
    }
  }
}

// Inner products of channels `begin` to `end` of R queries with `count` keys, added to `scores`.
template <int R>
void inner(const float* const* queries, const float* turned, int64_t begin, int64_t end, int count,
           float* scores) {
  for (int j = 0; j < count; j += 2 * kLanes) {
    Floats sums[R][2];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int w = 0; w < 2; ++w)
        sums[r][w] = begin == 0 ? Floats{} : at(scores + r * kBlock + j + w * kLanes);
    for (int64_t h = begin; h < end; ++h) {
      const float* key = turned + (h - begin) * kBlock + j;
      const Floats first = keep(at(key)), second = keep(at(key + kLanes));
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const Floats query = keep(spread(queries[r][h]));
        sums[r][0] = fused(query, first, sums[r][0]);
        sums[r][1] = fused(query, second, sums[r][1]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int w = 0; w < 2; ++w) at(scores + r * kBlock + j + w * kLanes) = sums[r][w];
  }
}

// values = values * fade + weights . v, for R rows and W vectors of each.
template <int R, int W>
void weigh(float* values, int64_t size, const float* fade, const float* weights,
           const float* const* v, int count, int64_t h) {
  Floats sums[R][W];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w) sums[r][w] = at(values + r * size + h + w * kLanes) * fade[r];
  for (int j = 0; j < count; ++j)
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w) {
      const Floats value = keep(at(v[j] + h + w * kLanes));
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r)
        sums[r][w] = fused(value, spread(weights[r * kBlock + j]), sums[r][w]);
    }
#pragma GCC unroll 8
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

// Takes a block of values into R rows from `row` on, whose scores are known.
template <int R>
void add_block(Partial& state, int64_t row, int64_t size, const float* const* values, int count) {
  constexpr int kWide = R * 4 + 5 <= kRegisters ? 4 : 2;  // vectors, whose sums fit into registers
  float fade[std::max(kLanes, 8)] = {}, added[R];
  const float scale = 1.0f / std::sqrt(float(size));
  float* scores = state.scores[row].x;
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
    fade[r] = soften(scores + r * kBlock, count, scale, state.top[row + r], added[r]);
  for (int r = 0; r < R; r += kLanes) at(fade + r) = exponential(at(fade + r));
  for (int r = 0; r < R; ++r) state.total[row + r] = state.total[row + r] * fade[r] + added[r];
  int64_t h = 0;
  float* sums = state.row(row);
  for (; h + kWide * kLanes <= size; h += kWide * kLanes)
    weigh<R, kWide>(sums, size, fade, scores, values, count, h);
  for (; h < size; h += kLanes) weigh<R, 1>(sums, size, fade, scores, values, count, h);
}

// Calls action(row, number of rows), which is known when it is compiled.
template <int R = kMostRows, class Action>
void with_rows(int64_t row, int64_t count, const Action& action) {
  if constexpr (R > 1)
    if (count < R) return with_rows<R - 1>(row, count, action);
  action(row, std::integral_constant<int, R>());
}

// The same for all of some rows, in tiles of about equal height.
template <class Action>
void by_rows(int64_t row, int64_t end, const Action& action) {
  const int64_t rows = end - row, tiles = (rows + kMostRows - 1) / kMostRows;
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t first = t * rows / tiles, last = (t + 1) * rows / tiles;
    with_rows(row + first, last - first, action);
  }
}

// Takes a block of keys and values into rows `row` to `end`; the next one lies `ahead`, or 0.
inline void add_keys(Partial& state, int64_t row, int64_t end, const float* const* queries,
                     int64_t size, const float* const* keys, const float* const* values, int count,
                     int64_t ahead) {
  alignas(64) float turned[kTurned * kBlock];
  for (int64_t first = 0; first < size; first += kTurned) {
    const int64_t last = std::min(first + kTurned, size);
    turn(keys, count, first, last, turned);
    by_rows(row, end, [&](int64_t r, auto rows) {
      inner<rows>(queries + r, turned, first, last, count, state.scores[r].x);
    });
  }
  // Streams are too short for the processor to see what comes next.
  for (const float* const* next : {keys, values})
    for (int j = 0; j < count && ahead; ++j)
      for (int64_t h = 0; h < size; h += 16) __builtin_prefetch(next[j] + ahead + h);
  by_rows(row, end,
          [&](int64_t r, auto rows) { add_block<rows>(state, r, size, values, count); });
}

// What the positions of a chunk bring to a key head's rows of the nodes from `from` to before `to`.
inline Partial attend(const TreeAttention& call, int64_t b, int64_t head, int64_t chunk,
                      int64_t from, int64_t to) {
  const int64_t size = call.size, group = call.group(), start = call.start[b];
  const int64_t begin = chunk_start(chunk), end = chunk_start(chunk + 1);
  const int64_t pair = b * call.key_heads + head;
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
    // Not what another thread is going to read.
    const int64_t ahead = first + kBlock < whole ? kBlock * size : 0;
    add_keys(state, 0, rows, queries.data(), size, keys, values, kBlock, ahead);
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
                 values, count, 0);
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
        at(out + h) += at(parts[c].row(row) + h) * weight;
    }
    for (int64_t h = 0; h < size; h += kLanes) at(out + h) = at(out + h) / sum;
  }
}

}  // namespace gdn
