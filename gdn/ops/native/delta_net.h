// The core of a Gated DeltaNet layer over a draft tree, between its projections: convolution, gates,
// delta rule, norm and output gate, in one pass. As separate XLA operations they cost more than the
// products beside them.
//
// The rule is applied node by node, with the states between held in the cache of the processor: of
// one head they are small, and no more are live than a path has branches. That costs what the closed
// form of `gdn/ops/tree.py` costs for a handful of nodes, and a node's bits are those that plain
// decoding of its path gives: what is committed later is computed by the same operations.
#pragma once

#include <deque>
#include <vector>

#include "vectors.h"

namespace gdn {

// A call; DK and DV are multiples of kLanes, HV of HK, and parents come before children.
struct TreeDeltaNet {
  const float* inputs;    // [B, M, E], E = 2 HK DK + HV DV: q, k, v before the convolution
  const float* window;    // [B, W - 1, E], inputs before them, oldest first
  const float* taps;      // [E, W]
  const float *a, *b;     // [B, M, HV], before softplus and sigmoid
  const float *a_log, *dt_bias;  // [HV]
  const float* z;         // [B, M, HV, DV], output gate before silu
  const float* norm;      // [DV]
  const float* state;     // [B, HV, DK, DV]
  const bool* ancestors;  // [B, M, M], a node is its own
  float *out, *k, *u, *g; // [B, M, HV, DV], [B, M, HK, DK], [B, M, HV, DV], [B, M, HV]
  int64_t batch, nodes, key_heads, heads, key_size, size, width;
  float eps;

  int64_t channels() const { return 2 * key_heads * key_size + heads * size; }
};

typedef std::vector<std::vector<int64_t>> Paths;  // of each node, from its root to itself

inline Paths paths_of(const bool* ancestors, int64_t nodes) {
  Paths paths(nodes);
  for (int64_t i = 0; i < nodes; ++i)
    for (int64_t j = 0; j < nodes; ++j)
      if (ancestors[i * nodes + j]) paths[i].push_back(j);
  return paths;
}

inline float dot(const float* x, const float* y, int64_t size) {
  Floats sum{};
  for (int64_t i = 0; i < size; i += kLanes) sum = fused(at(x + i), at(y + i), sum);
  return total(sum);
}

// Convolves `count` channels from `first` on along each node's path, then silu; rows of `count`.
inline void convolve(const TreeDeltaNet& call, int64_t b, const Paths& paths, int64_t first,
                     int64_t count, float* out) {
  const int64_t channels = call.channels(), width = call.width;
  std::vector<float> taps(width * count);
  for (int64_t c = 0; c < count; ++c)
    for (int64_t t = 0; t < width; ++t) taps[t * count + c] = call.taps[(first + c) * width + t];
  for (int64_t i = 0; i < call.nodes; ++i, out += count) {
    std::fill(out, out + count, 0.0f);
    for (int64_t t = 0; t < width; ++t) {
      // The input that lies width - 1 - t tokens before the node.
      const int64_t place = int64_t(paths[i].size()) + t - width;
      const float* row = place < 0
          ? call.window + (b * (width - 1) + width - 1 + place) * channels
          : call.inputs + (b * call.nodes + paths[i][place]) * channels;
      for (int64_t c = 0; c < count; c += kLanes)
        at(out + c) = fused(at(row + first + c), at(&taps[t * count + c]), at(out + c));
    }
    for (int64_t c = 0; c < count; c += kLanes) at(out + c) = at(out + c) * sigmoid(at(out + c));
  }
}

// Divides rows by their Euclidean norm, as `l2_normalize`, and multiplies them by a factor.
inline void normalize(float* x, int64_t rows, int64_t size, float factor) {
  for (int64_t r = 0; r < rows; ++r, x += size) {
    const float square = dot(x, x, size);
    const float scale = square == 0 ? 0.0f : factor / std::sqrt(square + 1e-6f);
    for (int64_t i = 0; i < size; i += kLanes) at(x + i) = at(x + i) * scale;
  }
}

// Some columns of a state, `stride` numbers from row to row.
struct Columns {
  const float* data;
  int64_t stride;
};

// r += x . state for some rows of a state, W vectors of each.
template <int W>
void read_columns(const float* x, Columns state, int64_t rows, float* r) {
  Floats sums[W];
#pragma GCC unroll 8
  for (int w = 0; w < W; ++w) sums[w] = at(r + w * kLanes);
  for (int64_t d = 0; d < rows; ++d)
#pragma GCC unroll 8
    for (int w = 0; w < W; ++w)
      sums[w] = fused(at(state.data + d * state.stride + w * kLanes), spread(x[d]), sums[w]);
#pragma GCC unroll 8
  for (int w = 0; w < W; ++w) at(r + w * kLanes) = sums[w];
}

// The same for `width` columns.
inline void read_rows(const float* x, Columns state, int64_t rows, int64_t width, float* r) {
  int64_t c = 0;
  for (; c + 8 * kLanes <= width; c += 8 * kLanes)
    read_columns<8>(x, {state.data + c, state.stride}, rows, r + c);
  for (; c + 4 * kLanes <= width; c += 4 * kLanes)
    read_columns<4>(x, {state.data + c, state.stride}, rows, r + c);
  for (; c < width; c += kLanes)
    read_columns<1>(x, {state.data + c, state.stride}, rows, r + c);
}

// state * decay + k u^T, rounded alike wherever it is computed.
inline Floats advance(Floats state, float decay, float k, Floats u) {
  return fused(u, spread(k), state * decay);
}

// o += q . after for some rows of the state after a token; `after` has rows of `width`, and may be
// where `before` is, or null.
template <int W>
void write_columns(Columns before, float* after, float decay, const float* k, const float* q,
                   const float* u, int64_t rows, int64_t width, float* o) {
  Floats sums[W];
#pragma GCC unroll 4
  for (int w = 0; w < W; ++w) sums[w] = at(o + w * kLanes);
  for (int64_t d = 0; d < rows; ++d)
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w) {
      const Floats old = at(before.data + d * before.stride + w * kLanes);
      const Floats value = advance(old, decay, k[d], at(u + w * kLanes));
      if (after != nullptr) at(after + d * width + w * kLanes) = value;
      sums[w] = fused(value, spread(q[d]), sums[w]);
    }
#pragma GCC unroll 4
  for (int w = 0; w < W; ++w) at(o + w * kLanes) = sums[w];
}

// The same for `width` columns, no more than kTogether.
constexpr int64_t kTogether = 4 * kLanes;
inline void write_rows(Columns before, float* after, float decay, const float* k, const float* q,
                       const float* u, int64_t rows, int64_t width, float* o) {
  if (width == kTogether)
    return write_columns<4>(before, after, decay, k, q, u, rows, width, o);
  for (int64_t c = 0; c < width; c += kLanes)
    write_columns<1>({before.data + c, before.stride}, after ? after + c : nullptr, decay, k, q,
                     u + c, rows, width, o + c);
}

// What a key head gives its value heads.
struct Keys {
  std::vector<float> q, k;  // [M, DK]
};

inline Keys keys_of(const TreeDeltaNet& call, int64_t b, int64_t head, const Paths& paths) {
  const int64_t nodes = call.nodes, size = call.key_size;
  Keys keys{std::vector<float>(nodes * size), std::vector<float>(nodes * size)};
  convolve(call, b, paths, head * size, size, keys.q.data());
  convolve(call, b, paths, (call.key_heads + head) * size, size, keys.k.data());
  normalize(keys.q.data(), nodes, size, 1.0f / std::sqrt(float(size)));
  normalize(keys.k.data(), nodes, size, 1.0f);
  for (int64_t i = 0; i < nodes; ++i)
    std::copy_n(&keys.k[i * size], size,
                call.k + ((b * nodes + i) * call.key_heads + head) * size);
  return keys;
}

// A value head: reads, writes and outputs of all nodes.
//
// A node without a parent reads the cached state as one stream, and leaves its own in pieces of
// kTogether columns, [piece][DK][columns]. Nodes below take piece by piece, which stay in the nearest
// cache meanwhile.
class ValueHead {
 public:
  ValueHead(const TreeDeltaNet& call, int64_t b, int64_t head, const Paths& paths, const Keys& keys)
      : call_(call), keys_(keys), b_(b), head_(head), children_(call.nodes), gates_(call.nodes),
        v_(call.nodes * call.size), read_(call.size), out_(call.nodes * call.size) {
    const int64_t first = 2 * call.key_heads * call.key_size + head * call.size;
    convolve(call, b, paths, first, call.size, v_.data());
    for (int64_t i = 0; i < call.nodes; ++i) {
      gates_[i] = gates_of(i);
      if (paths[i].size() > 1) children_[paths[i][paths[i].size() - 2]].push_back(i);
    }
    for (int64_t i = 0; i < call.nodes; ++i)
      if (paths[i].size() == 1) start(i);
    for (int64_t i = 0; i < call.nodes; ++i) write_out(i);
  }

 private:
  struct Gates {
    float decay, beta;
  };
  typedef std::vector<Line> Scratch;

  static float* grow(Scratch& scratch, int64_t size) {
    scratch.resize(std::max<size_t>(scratch.size(), (size + 15) / 16));
    return reinterpret_cast<float*>(scratch.data());
  }

  int64_t place(int64_t i) const { return (b_ * call_.nodes + i) * call_.heads + head_; }

  Gates gates_of(int64_t i) {
    const float gap = call_.a[place(i)] + call_.dt_bias[head_];
    const float softplus = std::max(gap, 0.0f) + std::log1p(std::exp(-std::fabs(gap)));
    const float g = -std::exp(call_.a_log[head_]) * softplus;
    call_.g[place(i)] = g;
    return {exponential(spread(g))[0], sigmoid(spread(call_.b[place(i)]))[0]};
  }

  // u of some columns, once they are read.
  void set_writes(int64_t i, int64_t first, int64_t width) {
    const auto [decay, beta] = gates_[i];
    float* u = call_.u + place(i) * call_.size + first;
    const float* v = &v_[i * call_.size + first];
    for (int64_t c = 0; c < width; c += kLanes)
      at(u + c) = (at(v + c) - at(&read_[c]) * decay) * beta;
  }

  // A node without a parent, and all below it.
  void start(int64_t i) {
    constexpr int64_t kRows = 8;  // of the state at a time, so that it is one stream
    const int64_t size = call_.size, key_size = call_.key_size;
    const float *k = &keys_.k[i * key_size], *q = &keys_.q[i * key_size];
    const float* state = call_.state + (b_ * call_.heads + head_) * key_size * size;
    const float* u = call_.u + place(i) * size;
    float* own = children_[i].empty() ? nullptr : grow(root_, key_size * size);

    std::fill(read_.begin(), read_.end(), 0.0f);
    for (int64_t d = 0; d < key_size; d += kRows) {
      const int64_t rows = std::min(kRows, key_size - d);
      for (int64_t c = 0; c < rows * size; c += 16)
        __builtin_prefetch(state + (d + kRows) * size + c);
      read_rows(k + d, {state + d * size, size}, rows, size, read_.data());
    }
    set_writes(i, 0, size);
    for (int64_t d = 0; d < key_size; d += kRows)
      for (int64_t c = 0; c < size; c += kTogether) {
        const int64_t rows = std::min(kRows, key_size - d), width = std::min(kTogether, size - c);
        write_rows({state + d * size + c, size}, own ? own + c * key_size + d * width : nullptr,
                   gates_[i].decay, k + d, q + d, u + c, rows, width, &out_[i * size + c]);
      }
    for (int64_t c = 0; c < size; c += kTogether) {
      const int64_t width = std::min(kTogether, size - c);
      for (const int64_t child : children_[i]) visit(child, own + c * key_size, c, width, 0);
    }
  }

  // Some columns of a node and all below it; its state may go to scratch `level`, which may hold
  // `before`.
  void visit(int64_t i, const float* before, int64_t first, int64_t width, size_t level) {
    const auto& below = children_[i];
    const int64_t key_size = call_.key_size;
    const float *k = &keys_.k[i * key_size], *q = &keys_.q[i * key_size];
    if (scratch_.size() <= level) scratch_.emplace_back();
    float* after = below.empty() ? nullptr : grow(scratch_[level], key_size * width);
    std::fill_n(read_.begin(), width, 0.0f);
    read_rows(k, {before, width}, key_size, width, read_.data());
    set_writes(i, first, width);
    const float* u = call_.u + place(i) * call_.size + first;
    write_rows({before, width}, after, gates_[i].decay, k, q, u, key_size, width,
               &out_[i * call_.size + first]);
    for (const int64_t child : below)
      visit(child, after, first, width, child == below.back() ? level : level + 1);
  }

  void write_out(int64_t i) {
    const int64_t size = call_.size;
    const float *out = &out_[i * size], *z = call_.z + place(i) * size;
    const float mean = dot(out, out, size) / float(size);
    const float scale = 1.0f / std::sqrt(mean + call_.eps);
    for (int64_t c = 0; c < size; c += kLanes) {
      const Floats gate = at(z + c) * sigmoid(at(z + c));
      at(call_.out + place(i) * size + c) = at(out + c) * scale * at(call_.norm + c) * gate;
    }
  }

  const TreeDeltaNet& call_;
  const Keys& keys_;
  int64_t b_, head_;
  std::vector<std::vector<int64_t>> children_;
  std::vector<Gates> gates_;
  std::vector<float> v_, read_, out_;
  Scratch root_;
  std::deque<Scratch> scratch_;  // by level
};

// All that hangs on one key head.
inline void mix_key_head(const TreeDeltaNet& call, int64_t b, int64_t head) {
  const Paths paths = paths_of(call.ancestors + b * call.nodes * call.nodes, call.nodes);
  const Keys keys = keys_of(call, b, head, paths);
  const int64_t group = call.heads / call.key_heads;
  for (int64_t h = head * group; h < (head + 1) * group; ++h) ValueHead(call, b, h, paths, keys);
}

// What committing a path needs; P nodes of it, -1 at the end.
struct Commit {
  const float *k, *u, *g;  // [B, M, HK, DK], [B, M, HV, DV], [B, M, HV]
  const int32_t* path;     // [B, P]
  float* state;            // [B, HV, DK, DV], updated in place
  int64_t batch, nodes, length, key_heads, heads, key_size, size;
};

// Takes the path of row b into the state of a value head, token by token, as `ValueHead` did.
inline void commit(const Commit& call, int64_t b, int64_t head) {
  const int64_t size = call.size, key_head = head / (call.heads / call.key_heads);
  float* state = call.state + (b * call.heads + head) * call.key_size * size;
  std::vector<const float*> keys, writes;
  std::vector<float> decays;
  for (int64_t p = 0; p < call.length && call.path[b * call.length + p] >= 0; ++p) {
    const int64_t node = b * call.nodes + call.path[b * call.length + p];
    keys.push_back(call.k + (node * call.key_heads + key_head) * call.key_size);
    writes.push_back(call.u + (node * call.heads + head) * size);
    decays.push_back(exponential(spread(call.g[node * call.heads + head]))[0]);
  }
  if (keys.empty()) return;
  for (int64_t d = 0; d < call.key_size; ++d)
    for (int64_t c = 0; c < size; c += kLanes) {
      Floats value = at(state + d * size + c);
      for (size_t p = 0; p < keys.size(); ++p)
        value = advance(value, decays[p], keys[p][d], at(writes[p] + c));
      at(state + d * size + c) = value;
    }
}

}  // namespace gdn
