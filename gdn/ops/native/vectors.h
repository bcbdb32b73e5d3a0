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

// A line of the cache; vectors that cross its borders take twice as long.
struct alignas(64) Line {
  float x[16];
};

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

// Turns a square of numbers, row i of which becomes column i.
inline void transpose(Floats (&x)[kLanes]) {
#if GDN_LANES == 16
  __m512 y[16];
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {  // squares of 4 within the quarters of four vectors
    const __m512 a = _mm512_unpacklo_ps((__m512)x[i], (__m512)x[i + 1]);
    const __m512 b = _mm512_unpackhi_ps((__m512)x[i], (__m512)x[i + 1]);
    const __m512 c = _mm512_unpacklo_ps((__m512)x[i + 2], (__m512)x[i + 3]);
    const __m512 d = _mm512_unpackhi_ps((__m512)x[i + 2], (__m512)x[i + 3]);
    y[i] = _mm512_shuffle_ps(a, c, 0x44), y[i + 1] = _mm512_shuffle_ps(a, c, 0xee);
    y[i + 2] = _mm512_shuffle_ps(b, d, 0x44), y[i + 3] = _mm512_shuffle_ps(b, d, 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {  // and the squares of quarters
    const __m512 a = _mm512_shuffle_f32x4(y[i], y[i + 4], 0x44);
    const __m512 b = _mm512_shuffle_f32x4(y[i], y[i + 4], 0xee);
    const __m512 c = _mm512_shuffle_f32x4(y[i + 8], y[i + 12], 0x44);
    const __m512 d = _mm512_shuffle_f32x4(y[i + 8], y[i + 12], 0xee);
    x[i] = (Floats)_mm512_shuffle_f32x4(a, c, 0x88);
    x[i + 4] = (Floats)_mm512_shuffle_f32x4(a, c, 0xdd);
    x[i + 8] = (Floats)_mm512_shuffle_f32x4(b, d, 0x88);
    x[i + 12] = (Floats)_mm512_shuffle_f32x4(b, d, 0xdd);
  }
#elif GDN_LANES == 8
  __m256 y[8];
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    const __m256 a = _mm256_unpacklo_ps((__m256)x[i], (__m256)x[i + 1]);
    const __m256 b = _mm256_unpackhi_ps((__m256)x[i], (__m256)x[i + 1]);
    const __m256 c = _mm256_unpacklo_ps((__m256)x[i + 2], (__m256)x[i + 3]);
    const __m256 d = _mm256_unpackhi_ps((__m256)x[i + 2], (__m256)x[i + 3]);
    y[i] = _mm256_shuffle_ps(a, c, 0x44), y[i + 1] = _mm256_shuffle_ps(a, c, 0xee);
    y[i + 2] = _mm256_shuffle_ps(b, d, 0x44), y[i + 3] = _mm256_shuffle_ps(b, d, 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    x[i] = (Floats)_mm256_permute2f128_ps(y[i], y[i + 4], 0x20);
    x[i + 4] = (Floats)_mm256_permute2f128_ps(y[i], y[i + 4], 0x31);
  }
#else
  for (int i = 0; i < kLanes; ++i)
    for (int j = i + 1; j < kLanes; ++j) {
      const float kept = x[i][j];
      x[i][j] = x[j][i];
      x[j][i] = kept;
    }
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

// x with its lower 16 bits rounded away, ties to even; NaN stays NaN.
inline Words rounded_to_bfloat16(Floats x) {
  const Words bits = (Words)x, rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u;
  return x == x ? rounded : bits | 0x400000u;
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
