// Portable vectors (GCC and Clang vector extensions) of VECTOR_BYTES, with the functions softmax needs. Included only
// by tile_math_impl.h, after the instruction set was chosen; everything has internal linkage, so that no AVX-512 copy
// of a function can stand in for the portable one at link time.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace dmattn {
namespace {

#define DMATTN_INLINE inline __attribute__((always_inline))

template <typename T>
struct VectorOf {
  typedef T type __attribute__((vector_size(VECTOR_BYTES)));
  typedef T unaligned __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(T)), may_alias));
};
template <typename T>
using Vec = typename VectorOf<T>::type;
template <typename T>
using IntOf = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;
template <typename T>
using IntVec = Vec<IntOf<T>>;
template <typename T>
constexpr int kLanes = VECTOR_BYTES / sizeof(T);

template <typename T>
DMATTN_INLINE Vec<T> load_vector(const T* p) {
  return *reinterpret_cast<const typename VectorOf<T>::unaligned*>(p);
}

template <typename T>
DMATTN_INLINE void store_vector(T* p, Vec<T> v) {
  *reinterpret_cast<typename VectorOf<T>::unaligned*>(p) = v;
}

template <typename T>
DMATTN_INLINE Vec<T> splat(T x) {
  return x - Vec<T>{};
}

// a * b + c, rounded once where the processor has an instruction for it. Written out, because compilers contract
// products and sums or leave them alone as they and their options like, and because the forward and the backward must
// round a score alike.
template <typename T>
DMATTN_INLINE Vec<T> multiply_add(Vec<T> a, Vec<T> b, Vec<T> c) {
#if defined(__x86_64__) && VECTOR_BYTES == 64
  if constexpr (sizeof(T) == 4)
    return (Vec<T>)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
  else
    return (Vec<T>)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined(__x86_64__) && VECTOR_BYTES == 32
  if constexpr (sizeof(T) == 4)
    return (Vec<T>)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
  else
    return (Vec<T>)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#elif defined(__aarch64__)
  if constexpr (sizeof(T) == 4)
    return (Vec<T>)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
  else
    return (Vec<T>)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
#else
  return a * b + c;
#endif
}

template <typename T>
struct Constants;

template <>
struct Constants<float> {
  static constexpr int mantissa = 23;
  static constexpr int32_t one_bits = 127 << 23;
  static constexpr float round_magic = 12582912.0f;  // 1.5 * 2^23
  static constexpr float exp_floor = -87.33654f;  // ln(2^-126)
  static constexpr float largest = 3.40282347e+38f;
  static constexpr float linear_tanh = 0x1p-12f;  // below it tanh(x) rounds to x
  static constexpr float log2e = 1.44269504f;
  // 2^f on [-0.5, 0.5], minimax of the relative error: 1.9e-9
  static constexpr float exp2[] = {1.0f,           0.693147206f,   0.240226469f,   0.0555032878f,
                                   0.00961848896f, 0.00133999312f, 0.000153458122f};
};

template <>
struct Constants<double> {
  static constexpr int mantissa = 52;
  static constexpr int64_t one_bits = int64_t{1023} << 52;
  static constexpr double round_magic = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double exp_floor = -708.39641853226408;  // ln(2^-1022)
  static constexpr double largest = 1.7976931348623157e+308;
  static constexpr double linear_tanh = 0x1p-27;
  static constexpr double log2e = 1.4426950408889634;
  // ln(2)^k / k!, whose remainder on [-0.5, 0.5] is 2e-16
  static constexpr double exp2[] = {1.0,
                                    0.69314718055994531,
                                    0.24022650695910072,
                                    0.055504108664821580,
                                    0.0096181291076284772,
                                    0.0013333558146428443,
                                    0.00015403530393381609,
                                    1.5252733804059841e-05,
                                    1.3215486790144309e-06,
                                    1.0178086009239699e-07,
                                    7.0549116208011233e-09,
                                    4.4455382718708115e-10,
                                    2.5678435993488205e-11};
};

// e^x for x < 88 (709): 0 below the logarithm of the smallest normal number and for -inf, NaN for NaN, 1 for 0.
template <typename T>
DMATTN_INLINE Vec<T> exp_vector(Vec<T> x) {
  using C = Constants<T>;
  constexpr int terms = sizeof(C::exp2) / sizeof(T);
  const Vec<T> log2e = splat<T>(C::log2e);
  const Vec<T> rounded = multiply_add<T>(x, log2e, splat<T>(C::round_magic));  // the low bits now hold round(x log2(e))
  const Vec<T> n = rounded - C::round_magic, f = multiply_add<T>(x, log2e, -n);
  Vec<T> poly = splat<T>(C::exp2[terms - 1]);
#pragma GCC unroll 16
  for (int k = terms - 2; k >= 0; --k) poly = multiply_add<T>(poly, f, splat<T>(C::exp2[k]));
#if defined(__x86_64__) && VECTOR_BYTES == 64
  if constexpr (sizeof(T) == 4)
    return (Vec<T>)_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(C::exp_floor), _CMP_NLT_UQ),
                                          (__m512)poly, (__m512)n);
  else
    return (Vec<T>)_mm512_maskz_scalef_pd(_mm512_cmp_pd_mask((__m512d)x, _mm512_set1_pd(C::exp_floor), _CMP_NLT_UQ),
                                          (__m512d)poly, (__m512d)n);
#else
  const IntVec<T> power = ((IntVec<T>)rounded << C::mantissa) + C::one_bits;
  const Vec<T> result = poly * (Vec<T>)power;
  return x < C::exp_floor ? Vec<T>{} : result;
#endif
}

// tanh, after Cephes: a polynomial near 0, where 1 - 2 / (e^2x + 1) would cancel.
template <typename T>
DMATTN_INLINE Vec<T> tanh_vector(Vec<T> x) {
  const Vec<T> magnitude = x < 0 ? -x : x;
  const Vec<T> clamped = magnitude > 20 ? splat<T>(20) : magnitude;
  const Vec<T> far = 1 - 2 / (exp_vector<T>(clamped * 2) + 1);
  const Vec<T> z = x * x;
  Vec<T> near;
  if constexpr (sizeof(T) == 4) {
    near = (((-5.70498872745e-3f * z + 2.06390887954e-2f) * z - 5.37397155531e-2f) * z + 1.33314422036e-1f) * z -
           3.33332819422e-1f;
  } else {
    near = ((-9.64399179425052238628e-1 * z - 9.92877231001918586564e1) * z - 1.61468768441708447952e3) /
           (((z + 1.12811678491632931402e2) * z + 2.23548839060100448583e3) * z + 4.84406305325125486048e3);
  }
  return magnitude < T(0.625) ? x + x * z * near : (x < 0 ? -far : far);
}

template <typename T>
DMATTN_INLINE IntVec<T> lane_numbers() {
  IntVec<T> lanes;
  for (int k = 0; k < kLanes<T>; ++k) lanes[k] = k;
  return lanes;
}

// All ones in the lanes whose bit is set, for the kLanes columns from `col` of a row of bits.
template <typename T>
DMATTN_INLINE IntVec<T> selected(const uint32_t* row, int64_t col) {
  const IntOf<T> word = static_cast<IntOf<T>>(row[col >> 5] >> (col & 31));
  const IntVec<T> lane_bit = (IntVec<T>{} + 1) << lane_numbers<T>();
  return ((IntVec<T>{} + word) & lane_bit) != 0;
}

// Rows a and b interleaved: the lower (a0 b0 a1 b1 ...) or the upper half of the 2 * kLanes results.
template <typename T, bool Upper, int... K>
DMATTN_INLINE Vec<T> interleave(Vec<T> a, Vec<T> b, std::integer_sequence<int, K...>) {
  constexpr int base = Upper ? kLanes<T> / 2 : 0;
  return __builtin_shufflevector(a, b, (base + K / 2 + (K & 1) * kLanes<T>)...);
}

// log2(lanes) perfect shuffles of the rows transpose a square block.
template <typename T>
DMATTN_INLINE void transpose_block(const T* source, int64_t source_stride, T* target, int64_t target_stride) {
  constexpr int n = kLanes<T>;
  constexpr std::make_integer_sequence<int, n> sequence{};
  Vec<T> rows[n], next[n];
#pragma GCC unroll 16
  for (int k = 0; k < n; ++k) rows[k] = load_vector<T>(source + k * source_stride);
#pragma GCC unroll 4
  for (int width = 1; width < n; width *= 2) {
#pragma GCC unroll 16
    for (int k = 0; k < n / 2; ++k) {
      next[2 * k] = interleave<T, false>(rows[k], rows[k + n / 2], sequence);
      next[2 * k + 1] = interleave<T, true>(rows[k], rows[k + n / 2], sequence);
    }
#pragma GCC unroll 16
    for (int k = 0; k < n; ++k) rows[k] = next[k];
  }
#pragma GCC unroll 16
  for (int k = 0; k < n; ++k) store_vector<T>(target + k * target_stride, rows[k]);
}

// Sum or maximum over each of the kLanes rows of a [kLanes, kLanes] block, as one vector.
template <typename T>
DMATTN_INLINE Vec<T> row_sums(const T* block) {
  constexpr int n = kLanes<T>;
  T columns[n * n];
  transpose_block<T>(block, n, columns, n);
  Vec<T> total = load_vector<T>(columns);
  for (int k = 1; k < n; ++k) total += load_vector<T>(columns + k * n);
  return total;
}

template <typename T>
DMATTN_INLINE Vec<T> row_maxima(const T* block) {
  constexpr int n = kLanes<T>;
  T columns[n * n];
  transpose_block<T>(block, n, columns, n);
  Vec<T> best = load_vector<T>(columns);
  for (int k = 1; k < n; ++k) {
    const Vec<T> other = load_vector<T>(columns + k * n);
    best = other > best ? other : best;
  }
  return best;
}

}  // namespace
}  // namespace dmattn
