// The kernels as XLA custom calls: shapes checked, work shared with XLA's own thread pool.

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <type_traits>

#include "kernels.h"
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

template <class M>
ffi::Error multiply(ffi::ThreadPool& pool, const float* x, gdn::Matrix<M> w, int64_t rows,
                    float* y) {
  constexpr int64_t kSmall = 1 << 15;  // multiply-adds that are not worth waking a thread
  const bool is_small = rows * w.in * w.out < kSmall;
  const int64_t threads = is_small ? 1 : std::max<int64_t>(1, pool.num_threads());
  const gdn::Activations<M> activations(x, rows, w.in);
  const int64_t size = gdn::panels_per_task(w, rows, threads), panels = w.panels();
  run_tasks(pool, threads, (panels + size - 1) / size, [&](int64_t i) {
    gdn::product(w, activations, i * size, std::min((i + 1) * size, panels), y);
  });
  return ffi::Error::Success();
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

template <class M, ffi::DataType T>
ffi::Error plain(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<T> data,
                 ffi::ResultBuffer<ffi::F32> y) {
  const auto problem = shape_problem<M>(x.dimensions(), data.dimensions(), y->dimensions());
  if (!problem.empty()) return ffi::Error::InvalidArgument("native matmul: " + problem);
  const gdn::Matrix<M> w{data.typed_data(), nullptr, nullptr, x.dimensions()[1],
                         y->dimensions()[1]};
  return multiply<M>(pool, x.typed_data(), w, x.dimensions()[0], y->typed_data());
}

ffi::Error scaled(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S8> data,
                  ffi::Buffer<ffi::F32> scales, ffi::Buffer<ffi::S32> sums,
                  ffi::ResultBuffer<ffi::F32> y) {
  const auto shape = y->dimensions();
  auto problem = shape_problem<gdn::Int8>(x.dimensions(), data.dimensions(), shape);
  if (problem.empty() && (int64_t(scales.element_count()) != shape[1] ||
                          int64_t(sums.element_count()) != shape[1]))
    problem = "scales and sums must have one entry for each of " + std::to_string(shape[1]) +
              " outputs";
  if (!problem.empty()) return ffi::Error::InvalidArgument("native matmul: " + problem);
  const gdn::Matrix<gdn::Int8> w{data.typed_data(), scales.typed_data(), sums.typed_data(),
                                 x.dimensions()[1], shape[1]};
  return multiply<gdn::Int8>(pool, x.typed_data(), w, x.dimensions()[0], y->typed_data());
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(gdn_matmul_float32, (plain<gdn::Float32, ffi::F32>),
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(gdn_matmul_bfloat16, (plain<gdn::BFloat16, ffi::U16>),
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::U16>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(gdn_matmul_int8, scaled,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S8>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
