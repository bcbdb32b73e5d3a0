// The kernels as XLA custom calls: shapes checked, work shared with XLA's own thread pool.

#include <atomic>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "attention.h"
#include "delta_net.h"
#include "experts.h"
#include "norm.h"
#include "peak.h"
#include "products.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

// Tasks are claimed one by one. The caller claims as well and at the end waits only for tasks that
// another thread is already running: it can never wait for a thread that has not come yet, which
// in a pool of two would be a deadlock when two calls meet.
struct Work {
  std::function<void(int64_t)> task;
  int64_t count;
  std::atomic<int64_t> next{0}, done{0};
  void run() {
    for (int64_t i; (i = next.fetch_add(1)) < count;) {
      task(i);
      done.fetch_add(1, std::memory_order_release);
    }
  }
};

void run_tasks(ffi::ThreadPool& pool, int64_t threads, int64_t count,
               std::function<void(int64_t)> task) {
  if (threads < 2 || count < 2) {
    for (int64_t i = 0; i < count; ++i) task(i);
    return;
  }
  // Shared: a thread may come when all is done and the caller gone.
  auto work = std::make_shared<Work>();
  work->task = std::move(task);
  work->count = count;
  for (int64_t i = 1; i < std::min(threads, count); ++i) pool.Schedule([work] { work->run(); });
  work->run();
  for (int spins = 0; work->done.load(std::memory_order_acquire) < count; ++spins)
    if (spins > 1000) std::this_thread::yield();
}

constexpr int64_t kSmall = 1 << 17;  // multiply-adds that are not worth waking a thread

// A matrix, and where its product goes.
template <class M>
struct Product {
  gdn::Matrix<M> w;
  float* y;
};

// All products of the same rows, which are read and packed once.
template <class M>
void multiply_all(ffi::ThreadPool& pool, const float* x, int64_t rows, int64_t in,
                  const std::vector<Product<M>>& products) {
  int64_t outputs = 0;
  for (const auto& product : products) outputs += product.w.out;
  const bool is_small = rows * in * outputs < kSmall / 4;  // and their rows have to be packed
  const int64_t threads = is_small ? 1 : std::max<int64_t>(1, pool.num_threads());
  const gdn::Activations<M> activations(x, rows, in);
  struct Part {
    const Product<M>* product;
    int64_t begin, end;  // panels
  };
  std::vector<Part> parts;
  for (const auto& product : products) {
    const int64_t size = gdn::panels_per_task(product.w, rows, threads);
    const int64_t panels = product.w.panels();
    for (int64_t begin = 0; begin < panels; begin += size)
      parts.push_back({&product, begin, std::min(begin + size, panels)});
  }
  run_tasks(pool, threads, parts.size(), [&](int64_t i) {
    gdn::product(parts[i].product->w, activations, parts[i].begin, parts[i].end,
                 parts[i].product->y);
  });
}

// Says what is wrong with the shapes x [rows, in], data [panels, groups, 16, K], y [rows, out].
template <class M>
std::string shape_problem(ffi::Span<const int64_t> x, ffi::Span<const int64_t> data,
                          ffi::Span<const int64_t> y) {
  if (x.size() != 2 || y.size() != 2 || data.size() != 4) return "wrong number of axes";
  if (x[1] < 1) return "x has no columns";
  if (x[0] != y[0]) return "x and y have different numbers of rows";
  const int64_t panels = (y[1] + gdn::kPanel - 1) / gdn::kPanel;
  const int64_t groups = (x[1] + M::kGroup - 1) / M::kGroup;
  if (data[0] != panels || data[1] != groups || data[2] != gdn::kPanel || data[3] != M::kGroup)
    return "packed weights have shape [" + std::to_string(data[0]) + ", " +
           std::to_string(data[1]) + ", " + std::to_string(data[2]) + ", " +
           std::to_string(data[3]) + "], expected [" + std::to_string(panels) + ", " +
           std::to_string(groups) + ", 16, " + std::to_string(M::kGroup) + "]";
  return "";
}

// x [rows, in]; of each matrix its data and, of int8, its scales [out]; y [rows, out] of each.
template <class M, ffi::DataType T>
ffi::Error multiply(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::RemainingArgs operands,
                    ffi::RemainingRets results) {
  constexpr size_t kEach = gdn::kIsScaled<M> ? 2 : 1;
  if (operands.size() != kEach * results.size())
    return ffi::Error::InvalidArgument("native matmul: as many results as matrices are needed");
  std::vector<Product<M>> products;
  for (size_t i = 0; i < results.size(); ++i) {
    auto y = results.get<ffi::Buffer<ffi::F32>>(i);
    const auto data = operands.get<ffi::Buffer<T>>(i * kEach);
    if (y.has_error()) return y.error();
    if (data.has_error()) return data.error();
    const auto shape = (*y)->dimensions();
    auto problem = shape_problem<M>(x.dimensions(), data->dimensions(), shape);
    gdn::Matrix<M> w{data->typed_data(), nullptr, 0, 0};
    if (problem.empty() && gdn::kIsScaled<M>) {
      const auto scales = operands.get<ffi::Buffer<ffi::F32>>(i * kEach + 1);
      if (scales.has_error()) return scales.error();
      if (int64_t(scales->element_count()) != shape[1])
        problem = "scales must have one entry for each of " + std::to_string(shape[1]) + " outputs";
      w.scales = scales->typed_data();
    }
    if (!problem.empty()) return ffi::Error::InvalidArgument("native matmul: " + problem);
    w.in = x.dimensions()[1];
    w.out = shape[1];
    products.push_back({w, (*y)->typed_data()});
  }
  const auto xs = x.dimensions();
  multiply_all<M>(pool, x.typed_data(), xs[0], xs[1], products);
  return ffi::Error::Success();
}

using Floats = ffi::Buffer<ffi::F32>;

// What is wrong with the matrices [out, in] of E experts, packed and stacked.
template <class M>
std::string stack_problem(ffi::Span<const int64_t> data, int64_t experts, int64_t out, int64_t in) {
  const int64_t panels = (out + gdn::kPanel - 1) / gdn::kPanel;
  const int64_t groups = (in + M::kGroup - 1) / M::kGroup;
  const std::initializer_list<int64_t> wanted = {experts, panels, groups, gdn::kPanel, M::kGroup};
  if (data.size() == wanted.size() && std::equal(data.begin(), data.end(), wanted.begin()))
    return "";
  return "packed weights do not fit " + std::to_string(experts) + " experts of [" +
         std::to_string(out) + ", " + std::to_string(in) + "]";
}

// x, y [rows, D]; logits [rows, E]; packed matrices of all experts, up [2F, D] and down [D, F]; and of
// int8 the scales of each: up's [E, 2F], down's [E, D].
template <class M, ffi::DataType T>
ffi::Error mix_experts(ffi::ThreadPool pool, Floats x, Floats logits, ffi::Buffer<T> up,
                       ffi::Buffer<T> down, ffi::RemainingArgs more,
                       ffi::ResultBuffer<ffi::F32> y, int64_t inner, int64_t chosen,
                       int64_t normalise) {
  const auto xs = x.dimensions(), ls = logits.dimensions(), ys = y->dimensions();
  if (xs.size() != 2 || ls.size() != 2 || xs[1] < 1 || ls[0] != xs[0] || inner < 1 || chosen < 1 ||
      chosen > ls[1] || !std::equal(ys.begin(), ys.end(), xs.begin(), xs.end()))
    return ffi::Error::InvalidArgument("native experts: shapes do not fit together");
  const int64_t rows = xs[0], width = xs[1], experts = ls[1];
  auto problem = stack_problem<M>(up.dimensions(), experts, 2 * inner, width);
  if (problem.empty()) problem = stack_problem<M>(down.dimensions(), experts, width, inner);
  gdn::Matrix<M> ups{up.typed_data(), nullptr, width, 2 * inner};
  gdn::Matrix<M> downs{down.typed_data(), nullptr, inner, width};
  if (gdn::kIsScaled<M> && problem.empty()) {
    if (more.size() != 2) return ffi::Error::InvalidArgument("native experts: no scales");
    for (gdn::Matrix<M>* w : {&ups, &downs}) {
      const auto scales = more.get<ffi::Buffer<ffi::F32>>(w == &ups ? 0 : 1);
      if (scales.has_error()) return scales.error();
      if (int64_t(scales->element_count()) != experts * w->out)
        problem = "scales must have one entry for each output of each expert";
      w->scales = scales->typed_data();
    }
  }
  if (!problem.empty()) return ffi::Error::InvalidArgument("native experts: " + problem);
  gdn::Experts<M> call(x.typed_data(), logits.typed_data(), rows, ups, downs, experts, chosen,
                       normalise != 0, y->typed_data());
  const bool is_small = 3 * call.pairs() * width * inner < kSmall / 4;
  const int64_t threads = is_small ? 1 : std::max<int64_t>(1, pool.num_threads());
  run_tasks(pool, threads, rows, [&](int64_t i) { call.route(i); });
  call.sort();
  const auto up_parts = call.parts(true, threads), down_parts = call.parts(false, threads);
  run_tasks(pool, threads, call.groups(), [&](int64_t i) { call.gather(i); });
  run_tasks(pool, threads, up_parts.size(), [&](int64_t i) { call.go_up(up_parts[i]); });
  run_tasks(pool, threads, call.groups(), [&](int64_t i) { call.gate(i); });
  run_tasks(pool, threads, down_parts.size(), [&](int64_t i) { call.go_down(down_parts[i]); });
  run_tasks(pool, threads, rows, [&](int64_t i) { call.add_up(i); });
  return ffi::Error::Success();
}

bool has_shape(ffi::Span<const int64_t> found, std::initializer_list<int64_t> wanted) {
  return std::equal(found.begin(), found.end(), wanted.begin(), wanted.end());
}

// Says whether nodes have themselves for ancestors and none that comes after them.
bool is_ordered(const ffi::Buffer<ffi::PRED>& ancestors) {
  const int64_t nodes = ancestors.dimensions()[1], rows = ancestors.dimensions()[0] * nodes;
  for (int64_t i = 0; i < rows; ++i) {
    const bool* row = ancestors.typed_data() + i * nodes;
    if (!row[i % nodes] || std::any_of(row + i % nodes + 1, row + nodes, [](bool x) { return x; }))
      return false;
  }
  return true;
}
constexpr char kDisorder[] = ": nodes must be their own ancestors, and parents before children";

// q, out [B, T, N, H]; k, v [B, K, S, H]; start [B]; own_k, own_v [B, K, T, H]; ancestors [B, T, T].
ffi::Error attend_tree(ffi::ThreadPool pool, Floats q, Floats k, Floats v,
                       ffi::Buffer<ffi::S32> start, Floats own_k, Floats own_v,
                       ffi::Buffer<ffi::PRED> ancestors, ffi::ResultBuffer<ffi::F32> out) {
  const auto qs = q.dimensions(), ks = k.dimensions();
  if (qs.size() != 4 || ks.size() != 4)
    return ffi::Error::InvalidArgument("native attention: q and k must have four axes");
  const int64_t batch = qs[0], nodes = qs[1], size = qs[3], key_heads = ks[1];
  const auto cached = {batch, key_heads, ks[2], size}, own = {batch, key_heads, nodes, size};
  if (!has_shape(ks, cached) || !has_shape(v.dimensions(), cached) || key_heads < 1 ||
      qs[2] % key_heads || !has_shape(start.dimensions(), {batch}) ||
      !has_shape(own_k.dimensions(), own) || !has_shape(own_v.dimensions(), own) ||
      !has_shape(ancestors.dimensions(), {batch, nodes, nodes}) ||
      !has_shape(out->dimensions(), {batch, nodes, qs[2], size}))
    return ffi::Error::InvalidArgument("native attention: shapes do not fit together");
  if (size < 1 || size % gdn::kLanes)
    return ffi::Error::InvalidArgument("native attention: heads of " + std::to_string(size) +
                                       " numbers, expected a multiple of " +
                                       std::to_string(gdn::kLanes));
  if (!is_ordered(ancestors))
    return ffi::Error::InvalidArgument(std::string("native attention") + kDisorder);
  for (int64_t b = 0; b < batch; ++b)
    if (start.typed_data()[b] < 0 || start.typed_data()[b] > ks[2])
      return ffi::Error::InvalidArgument("native attention: more keys than the cache has room for");
  const gdn::TreeAttention call{q.typed_data(), k.typed_data(), v.typed_data(),
                                start.typed_data(), own_k.typed_data(), own_v.typed_data(),
                                ancestors.typed_data(), out->typed_data(), batch, nodes,
                                qs[2], key_heads, ks[2], size};
  const int64_t chunks = call.chunks(), pairs = batch * key_heads;
  int64_t keys = 0;
  for (int64_t b = 0; b < batch; ++b) keys += start.typed_data()[b] + nodes;
  const bool is_small = 2 * keys * nodes * qs[2] * size < kSmall;
  const int64_t threads = is_small ? 1 : std::max<int64_t>(1, pool.num_threads());
  // Of few keys all fit into a cache, and may be read once for some nodes, once for others: three
  // heads are no work for two threads.
  const bool is_split = threads > 1 && pairs * chunks < 4 * threads;
  const int64_t pieces = is_split ? std::min(nodes, 4 * threads / (pairs * chunks)) : 1;
  std::vector<gdn::Partial> parts(pairs * pieces * chunks);
  const auto join = [&](int64_t i) {
    const int64_t pair = i / pieces, piece = i % pieces;
    gdn::join(call, pair / key_heads, pair % key_heads, &parts[i * chunks], chunks,
              piece * nodes / pieces, (piece + 1) * nodes / pieces);
  };
  run_tasks(pool, threads, pairs * pieces * chunks, [&](int64_t i) {
    const int64_t pair = i / chunks / pieces, piece = i / chunks % pieces;
    parts[i] = gdn::attend(call, pair / key_heads, pair % key_heads, i % chunks,
                           piece * nodes / pieces, (piece + 1) * nodes / pieces);
    if (chunks == 1) join(i);
  });
  if (chunks > 1) run_tasks(pool, threads, pairs * pieces, join);
  return ffi::Error::Success();
}

// Shapes as in `TreeDeltaNet`; z and out are [B, M, HV, DV].
ffi::Error mix_tree(ffi::ThreadPool pool, Floats inputs, Floats window, Floats taps, Floats a,
                    Floats b, Floats a_log, Floats dt_bias, Floats z, Floats norm, Floats state,
                    ffi::Buffer<ffi::PRED> ancestors, ffi::ResultBuffer<ffi::F32> out,
                    ffi::ResultBuffer<ffi::F32> k, ffi::ResultBuffer<ffi::F32> u,
                    ffi::ResultBuffer<ffi::F32> g, float eps) {
  const auto outs = out->dimensions(), ks = k->dimensions(), ts = taps.dimensions();
  if (outs.size() != 4 || ks.size() != 4 || ts.size() != 2)
    return ffi::Error::InvalidArgument("native DeltaNet: wrong number of axes");
  const int64_t batch = outs[0], nodes = outs[1], heads = outs[2], size = outs[3];
  const int64_t key_heads = ks[2], key_size = ks[3], width = ts[1];
  const int64_t channels = 2 * key_heads * key_size + heads * size;
  if (key_heads < 1 || heads % key_heads || width < 1 ||
      !has_shape(inputs.dimensions(), {batch, nodes, channels}) ||
      !has_shape(window.dimensions(), {batch, width - 1, channels}) || ts[0] != channels ||
      !has_shape(a.dimensions(), {batch, nodes, heads}) ||
      !has_shape(b.dimensions(), {batch, nodes, heads}) ||
      !has_shape(a_log.dimensions(), {heads}) || !has_shape(dt_bias.dimensions(), {heads}) ||
      !has_shape(z.dimensions(), {batch, nodes, heads, size}) ||
      !has_shape(norm.dimensions(), {size}) ||
      !has_shape(state.dimensions(), {batch, heads, key_size, size}) ||
      !has_shape(ancestors.dimensions(), {batch, nodes, nodes}) ||
      !has_shape(ks, {batch, nodes, key_heads, key_size}) ||
      !has_shape(u->dimensions(), {batch, nodes, heads, size}) ||
      !has_shape(g->dimensions(), {batch, nodes, heads}))
    return ffi::Error::InvalidArgument("native DeltaNet: shapes do not fit together");
  if (size < 1 || key_size < 1 || size % gdn::kLanes || key_size % gdn::kLanes)
    return ffi::Error::InvalidArgument("native DeltaNet: heads must be multiples of " +
                                       std::to_string(gdn::kLanes) + " numbers");
  if (!is_ordered(ancestors))
    return ffi::Error::InvalidArgument(std::string("native DeltaNet") + kDisorder);
  const gdn::TreeDeltaNet call{
      inputs.typed_data(), window.typed_data(), taps.typed_data(), a.typed_data(), b.typed_data(),
      a_log.typed_data(), dt_bias.typed_data(), z.typed_data(), norm.typed_data(),
      state.typed_data(), ancestors.typed_data(), out->typed_data(), k->typed_data(),
      u->typed_data(), g->typed_data(), batch, nodes, key_heads, heads, key_size, size, width, eps};
  const bool is_small = 2 * batch * nodes * heads * key_size * size < kSmall;
  const int64_t threads = is_small ? 1 : std::max<int64_t>(1, pool.num_threads());
  run_tasks(pool, threads, batch * key_heads,
            [&](int64_t i) { gdn::mix_key_head(call, i / key_heads, i % key_heads); });
  return ffi::Error::Success();
}

// state, next [B, HV, DK, DV], one buffer; k, u, g of M nodes as in `Commit`; path [B, P].
ffi::Error commit_path(ffi::ThreadPool pool, Floats state, Floats k, Floats u, Floats g,
                       ffi::Buffer<ffi::S32> path, ffi::ResultBuffer<ffi::F32> next) {
  const auto s = state.dimensions(), ks = k.dimensions(), ps = path.dimensions();
  if (s.size() != 4 || ks.size() != 4 || ps.size() != 2)
    return ffi::Error::InvalidArgument("native commit: wrong number of axes");
  const int64_t batch = s[0], heads = s[1], key_size = s[2], size = s[3], nodes = ks[1];
  if (!has_shape(ks, {batch, nodes, ks[2], key_size}) || ks[2] < 1 || heads % ks[2] ||
      !has_shape(u.dimensions(), {batch, nodes, heads, size}) ||
      !has_shape(g.dimensions(), {batch, nodes, heads}) || ps[0] != batch ||
      size % gdn::kLanes || !has_shape(next->dimensions(), {batch, heads, key_size, size}))
    return ffi::Error::InvalidArgument("native commit: shapes do not fit together");
  for (int64_t i = 0; i < batch * ps[1]; ++i)
    if (path.typed_data()[i] >= nodes)
      return ffi::Error::InvalidArgument("native commit: the path has a node that is not there");
  if (next->typed_data() != state.typed_data())
    std::copy_n(state.typed_data(), state.element_count(), next->typed_data());
  const gdn::Commit call{k.typed_data(), u.typed_data(), g.typed_data(), path.typed_data(),
                         next->typed_data(), batch, nodes, ps[1], ks[2], heads, key_size, size};
  const bool is_small = batch * heads * key_size * size < kSmall;
  const int64_t threads = is_small ? 1 : std::max<int64_t>(1, pool.num_threads());
  run_tasks(pool, threads, batch * heads,
            [&](int64_t i) { gdn::commit(call, i / heads, i % heads); });
  return ffi::Error::Success();
}

ffi::Error norm_rows(ffi::ThreadPool pool, Floats x, Floats weight,
                     ffi::ResultBuffer<ffi::F32> out, float eps, float offset) {
  const auto xs = x.dimensions();
  if (xs.size() != 2 || xs[1] < 1 || !has_shape(weight.dimensions(), {xs[1]}) ||
      !has_shape(out->dimensions(), {xs[0], xs[1]}))
    return ffi::Error::InvalidArgument("native norm: shapes do not fit together");
  const bool is_small = xs[0] * xs[1] < kSmall;
  const int64_t threads = is_small ? 1 : std::max<int64_t>(1, pool.num_threads());
  run_tasks(pool, threads, xs[0], [&](int64_t row) {
    gdn::rms_norm(x.typed_data() + row * xs[1], weight.typed_data(), xs[1], eps, offset,
                  out->typed_data() + row * xs[1]);
  });
  return ffi::Error::Success();
}

// x [R, V]; place, log_total [R].
ffi::Error find_peaks(ffi::ThreadPool pool, Floats x, ffi::ResultBuffer<ffi::S32> place,
                      ffi::ResultBuffer<ffi::F32> log_total) {
  const auto xs = x.dimensions();
  if (xs.size() != 2 || xs[1] < 1 || !has_shape(place->dimensions(), {xs[0]}) ||
      !has_shape(log_total->dimensions(), {xs[0]}))
    return ffi::Error::InvalidArgument("native peak: shapes do not fit together");
  const bool is_small = xs[0] * xs[1] < kSmall / 8;  // an exponential is some multiply-adds
  const int64_t threads = is_small ? 1 : std::max<int64_t>(1, pool.num_threads());
  run_tasks(pool, threads, xs[0], [&](int64_t row) {
    const gdn::Peak peak = gdn::peak_of(x.typed_data() + row * xs[1], xs[1]);
    place->typed_data()[row] = peak.place;
    log_total->typed_data()[row] = peak.log_total;
  });
  return ffi::Error::Success();
}

// x [R, V]; values, places [R, count]; log_total [R].
ffi::Error find_best(ffi::ThreadPool pool, Floats x, ffi::ResultBuffer<ffi::F32> values,
                     ffi::ResultBuffer<ffi::S32> places, ffi::ResultBuffer<ffi::F32> log_total,
                     float worst) {
  const auto xs = x.dimensions(), found = values->dimensions();
  if (xs.size() != 2 || found.size() != 2 || found[1] < 1 || found[1] > xs[1] ||
      found[0] != xs[0] || !has_shape(places->dimensions(), {xs[0], found[1]}) ||
      !has_shape(log_total->dimensions(), {xs[0]}))
    return ffi::Error::InvalidArgument("native best: shapes do not fit together");
  const bool is_small = xs[0] * xs[1] < kSmall / 8;
  const int64_t threads = is_small ? 1 : std::max<int64_t>(1, pool.num_threads());
  run_tasks(pool, threads, xs[0], [&](int64_t row) {
    log_total->typed_data()[row] = gdn::best_of(
        x.typed_data() + row * xs[1], xs[1], found[1], worst,
        values->typed_data() + row * found[1], places->typed_data() + row * found[1]);
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(gdn_matmul_float32, (multiply<gdn::Float32, ffi::F32>),
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .RemainingArgs()
                                  .RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(gdn_matmul_bfloat16, (multiply<gdn::BFloat16, ffi::U16>),
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .RemainingArgs()
                                  .RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(gdn_matmul_int8, (multiply<gdn::Int8, ffi::S8>),
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .RemainingArgs()
                                  .RemainingRets());

#define GDN_EXPERTS(name, M, T)                                  \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, (mix_experts<M, T>),       \
                                ffi::Ffi::Bind()                 \
                                    .Ctx<ffi::ThreadPool>()      \
                                    .Arg<Floats>()               \
                                    .Arg<Floats>()               \
                                    .Arg<ffi::Buffer<T>>()       \
                                    .Arg<ffi::Buffer<T>>()       \
                                    .RemainingArgs()             \
                                    .Ret<Floats>()               \
                                    .Attr<int64_t>("inner")      \
                                    .Attr<int64_t>("chosen")     \
                                    .Attr<int64_t>("normalise"))

GDN_EXPERTS(gdn_experts_float32, gdn::Float32, ffi::F32);
GDN_EXPERTS(gdn_experts_bfloat16, gdn::BFloat16, ffi::U16);
GDN_EXPERTS(gdn_experts_int8, gdn::Int8, ffi::S8);

XLA_FFI_DEFINE_HANDLER_SYMBOL(gdn_tree_attention, attend_tree,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Ret<Floats>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(gdn_tree_delta_net, mix_tree,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Ret<Floats>()
                                  .Ret<Floats>()
                                  .Ret<Floats>()
                                  .Ret<Floats>()
                                  .Attr<float>("eps"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(gdn_rms_norm, norm_rows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Ret<Floats>()
                                  .Attr<float>("eps")
                                  .Attr<float>("offset"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(gdn_commit_state, commit_path,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<Floats>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(gdn_peak, find_peaks,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Ret<Floats>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(gdn_best, find_best,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Ret<Floats>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Ret<Floats>()
                                  .Attr<float>("worst"));
