// Vectors of the compiler's own (GCC and Clang), as wide as the processor compiled for.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#ifndef GDN_PORTABLE  // defined by tests: 4 lanes, no intrinsics
#define GDN_PORTABLE 0
#endif

namespace gdn {

// AVX-512 without its int8 instructions gains less from wide vectors than int8 loses by them.
#if !GDN_PORTABLE && defined(__AVX512F__) && defined(__AVX512VNNI__)
#define GDN_LANES 16
#elif !GDN_PORTABLE && defined(__AVX2__)
#define GDN_LANES 8
#else
#define GDN_LANES 4
#endif
constexpr int kLanes = GDN_LANES;
#if GDN_LANES == 16 || defined(__aarch64__)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif

// May alias and be unaligned: buffers are only known to hold their element type.
typedef float Floats __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));

// Hides from the compiler where a vector came from, so that it stays in its register: GCC would
// load weights from memory once for every row.
template <class V>
inline V keep(V value) {
#if defined(__AVX512F__)
  __asm__("" : "+v"(value));  // any of the 32 registers
#elif defined(__x86_64__)
  __asm__("" : "+x"(value));
#elif defined(__aarch64__)
  __asm__("" : "+w"(value));
#endif
  return value;
}

inline const Floats& at(const float* p) { return *reinterpret_cast<const Floats*>(p); }
inline Floats& at(float* p) { return *reinterpret_cast<Floats*>(p); }

inline Floats spread(float x) { return x - Floats{}; }  // in all lanes; -0.0 stays -0.0

// a b + c, rounded once where the processor can. Spelt out, with contraction by the compiler off: GCC
// fuses a chain of sums in one template and not in another, and then their bits differ.
inline Floats fused(Floats a, Floats b, Floats c) {
#if GDN_LANES == 16
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif GDN_LANES == 8 && defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// Adds up the lanes, always in the same order.
inline float total(Floats x) {
  typedef float Four __attribute__((vector_size(16)));
  Four parts[kLanes / 4];
  std::memcpy(parts, &x, sizeof(x));
  for (int width = kLanes / 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) parts[i] += parts[i + width];
  return (parts[0][0] + parts[0][2]) + (parts[0][1] + parts[0][3]);
}

// Writes `total` of each of four vectors: the same sums, with the shuffles shared.
inline void totals(const Floats* x, float* out) {
#if GDN_LANES == 16
  const auto halves = [](__m512 a, __m512 b) {  // of a, then of b: quarters 0 + 2 and 1 + 3
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  };
  const __m512 a = halves((__m512)x[0], (__m512)x[1]), b = halves((__m512)x[2], (__m512)x[3]);
  __m512 sums = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  sums = _mm512_add_ps(sums, _mm512_permute_ps(sums, 0x4e));
  sums = _mm512_add_ps(sums, _mm512_permute_ps(sums, 0xb1));
  _mm_storeu_ps(out, _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, sums)));
#else
  for (int i = 0; i < 4; ++i) out[i] = total(x[i]);
#endif
}

// The greatest lane, of which none is NaN.
inline float greatest(Floats x) {
#if GDN_LANES == 16
  return _mm512_reduce_max_ps((__m512)x);
#else
  float best = x[0];
  for (int lane = 1; lane < kLanes; ++lane) best = std::max(best, x[lane]);
  return best;
#endif
}

constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, ties to even

// e^x for x <= 0 to one part in 10^7, and exactly 1 at 0; 0 below -87. NaN stays NaN.
// x = n ln 2 + r; the coefficients for e^r are those of Cephes' expf.
inline Floats exponential(Floats x) {
  const Floats shifted = x * 1.44269504f + kMagic, n = shifted - kMagic;
  const Floats r = fused(n, spread(2.12194440e-4f), fused(n, spread(-0.693359375f), x));
  Floats p = fused(r, spread(1.9875691500e-4f), spread(1.3981999507e-3f));
  for (const float next : {8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = fused(p, r, spread(next));
  p = fused(p * r, r, r) + 1.0f;
  const Floats power = (Floats)(((Words)shifted + 127u) << 23);
  return x < -87.0f ? Floats{} : p * power;
}

inline Floats sigmoid(Floats x) {
  const Floats e = exponential(x < 0.0f ? x : -x), whole = 1.0f / (1.0f + e);
  return x < 0.0f ? e * whole : whole;
}

}  // namespace gdn
