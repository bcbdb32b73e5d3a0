// The routed experts of a mixture: the router's choice, each chosen expert's SwiGLU, the weighted sum.
//
// Rows are gathered by expert, so that the weights of an expert are read once for all rows that chose
// it. What a row gets is computed from the row alone, and added up in the order of its choice: its bits
// do not depend on the other rows.
#pragma once

#include <memory>

#include "products.h"

namespace gdn {

// The `count` likeliest of some experts, the lower index of equals, and their share: of a softmax over
// all, or of that over themselves. Of logits that are no numbers, no share is one.
inline void choose(const float* logits, int64_t experts, int64_t count, bool normalise,
                   int32_t* chosen, float* shares) {
  std::vector<bool> is_taken(experts, false);
  for (int64_t j = 0; j < count; ++j) {
    int64_t best = -1;
    for (int64_t e = 0; e < experts; ++e)
      if (!is_taken[e] && (best < 0 || logits[e] > logits[best])) best = e;
    is_taken[best] = true;
    chosen[j] = int32_t(best);
  }
  const float top = logits[chosen[0]];
  const auto weight = [&](float logit) { return exponential(spread(logit - top))[0]; };
  float all = 0, kept = 0;
  for (int64_t e = 0; e < experts; ++e) all += weight(logits[e]);
  for (int64_t j = 0; j < count; ++j) kept += shares[j] = weight(logits[chosen[j]]) / all;
  for (int64_t j = 0; j < count && normalise; ++j) shares[j] /= kept;
}

// out = silu(gate) * up; any size.
inline void gated(const float* gate, const float* up, int64_t size, float* out) {
  const auto one = [](Floats x, Floats y) { return x * sigmoid(x) * y; };
  const int64_t whole = size / kLanes * kLanes, rest = size - whole;
  for (int64_t i = 0; i < whole; i += kLanes) at(out + i) = one(at(gate + i), at(up + i));
  Floats x{}, y{};
  std::memcpy(&x, gate + whole, rest * sizeof(float));
  std::memcpy(&y, up + whole, rest * sizeof(float));
  x = one(x, y);
  std::memcpy(out + whole, &x, rest * sizeof(float));
}

// A call, stage by stage; the tasks of a stage may run at once, and the stages one after the other.
template <class M>
class Experts {
 public:
  // x [rows, D]; logits [rows, E]; up and down: the matrices [2F, D] (gate first) and [D, F] of the
  // first expert, those of the others behind them; y [rows, D].
  Experts(const float* x, const float* logits, int64_t rows, const Matrix<M>& up,
          const Matrix<M>& down, int64_t experts, int64_t chosen, bool normalise, float* y)
      : x_(x), logits_(logits), up_(up), down_(down), experts_(experts), chosen_(chosen),
        normalise_(normalise), y_(y), ids_(rows * chosen), shares_(ids_.size()),
        slots_(ids_.size()), source_(ids_.size()), hidden_(ids_.size() * up.out),
        gated_(ids_.size() * down.in), out_(ids_.size() * down.out) {}

  void route(int64_t row) {
    choose(logits_ + row * experts_, experts_, chosen_, normalise_, &ids_[row * chosen_],
           &shares_[row * chosen_]);
  }
  void sort() {
    std::vector<int64_t> ends(experts_ + 1, 0);
    for (const int32_t id : ids_) ++ends[id + 1];
    for (int64_t e = 0; e < experts_; ++e) {
      if (ends[e + 1]) groups_.push_back({e, ends[e], ends[e + 1], nullptr});
      ends[e + 1] += ends[e];
    }
    for (size_t pair = 0; pair < ids_.size(); ++pair) {
      slots_[pair] = ends[ids_[pair]]++;
      source_[slots_[pair]] = int64_t(pair) / chosen_;
    }
  }

  int64_t groups() const { return groups_.size(); }
  int64_t pairs() const { return ids_.size(); }

  // Panels of an expert's matrix.
  struct Part {
    int64_t group, begin, end;
  };
  std::vector<Part> parts(bool is_up, int64_t threads) const {
    std::vector<Part> found;
    const Matrix<M>& w = is_up ? up_ : down_;
    for (int64_t g = 0; g < groups(); ++g) {
      const int64_t size = panels_per_task(w, groups_[g].count, threads), all = w.panels();
      for (int64_t begin = 0; begin < all; begin += size)
        found.push_back({g, begin, std::min(begin + size, all)});
    }
    return found;
  }

  void gather(int64_t g) {
    Group& group = groups_[g];
    const int64_t width = up_.in;
    const float* rows = x_ + source_[group.first] * width;  // a single one may stay where it is
    std::vector<float> together;
    if (group.count > 1) {
      together.resize(group.count * width);
      for (int64_t i = 0; i < group.count; ++i)
        std::copy_n(x_ + source_[group.first + i] * width, width, &together[i * width]);
      rows = together.data();
    }
    group.activations.reset(new Activations<M>(rows, group.count, width));
  }
  void go_up(const Part& part) { multiply(up_, part, hidden_.data()); }
  void gate(int64_t g) {
    Group& group = groups_[g];
    const int64_t inner = down_.in;
    for (int64_t slot = group.first; slot < group.first + group.count; ++slot)
      gated(&hidden_[slot * 2 * inner], &hidden_[slot * 2 * inner + inner], inner,
            &gated_[slot * inner]);
    group.activations.reset(
        new Activations<M>(&gated_[group.first * inner], group.count, inner));
  }
  void go_down(const Part& part) { multiply(down_, part, out_.data()); }
  void add_up(int64_t row) {
    const int64_t width = down_.out;
    float* y = y_ + row * width;
    std::fill_n(y, width, 0.0f);
    for (int64_t pair = row * chosen_; pair < (row + 1) * chosen_; ++pair) {
      const float* out = &out_[slots_[pair] * width];
      for (int64_t i = 0; i < width; ++i) y[i] += shares_[pair] * out[i];
    }
  }

 private:
  struct Group {  // of pairs of a row and an expert: those of one expert, side by side
    int64_t expert, first, count;
    std::unique_ptr<Activations<M>> activations;
  };

  void multiply(const Matrix<M>& first, const Part& part, float* out) const {
    const Group& group = groups_[part.group];
    Matrix<M> w = first;
    w.data += group.expert * w.panels() * w.panel_size();
    if (w.scales) w.scales += group.expert * w.out;
    product(w, *group.activations, part.begin, part.end, out + group.first * w.out);
  }

  const float *x_, *logits_;
  Matrix<M> up_, down_;
  int64_t experts_, chosen_;
  bool normalise_;
  float* y_;
  std::vector<int32_t> ids_;             // by row and choice: of the expert
  std::vector<float> shares_;            // and its share
  std::vector<int64_t> slots_, source_;  // of each such pair, its place by expert; of a place, its row
  std::vector<Group> groups_;
  std::vector<float> hidden_, gated_, out_;  // by place
};

}  // namespace gdn
