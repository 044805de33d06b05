#include "gemm.h"

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/native/CPUBlas.h>

extern "C" {
#if defined(__linux__)
#define DMATTN_MAYBE __attribute__((weak))
void sgemm_(const char*, const char*, const int*, const int*, const int*, const float*, const float*, const int*,
            const float*, const int*, const float*, float*, const int*) DMATTN_MAYBE;
void dgemm_(const char*, const char*, const int*, const int*, const int*, const double*, const double*, const int*,
            const double*, const int*, const double*, double*, const int*) DMATTN_MAYBE;
#endif
}

namespace dmattn {
namespace {

bool onednn_takes_float32() {
#if defined(CPUBLAS_BRGEMM_F32F32F32)
  static const bool works = [] {
    float a[256] = {}, b[256] = {}, c[256];
    try {
      at::native::cpublas::brgemm(16, 16, 16, 16, 16, 16, false, a, b, c, false);
      at::native::cpublas::brgemm_release(false);
    } catch (const c10::Error&) {
      return false;  // built without it, or the processor lacks the instructions
    }
    return true;
  }();
  return works;
#else
  return false;
#endif
}

template <typename T>
void aten_gemm(int64_t m, int64_t n, int64_t k, const T* a, int64_t a_stride, const T* b, int64_t b_stride,
               bool accumulate, T* c, int64_t c_stride) {
  const auto options = at::TensorOptions().dtype(c10::CppTypeToScalarType<T>::value);
  const auto left = at::from_blob(const_cast<T*>(a), {m, k}, {a_stride, 1}, options);
  const auto right = at::from_blob(const_cast<T*>(b), {k, n}, {b_stride, 1}, options);
  auto result = at::from_blob(c, {m, n}, {c_stride, 1}, options);
  if (accumulate)
    result.addmm_(left, right);
  else
    at::mm_out(result, left, right);
}

template <typename T, typename Routine>
void blas_gemm(Routine routine, int64_t m, int64_t n, int64_t k, const T* a, int64_t a_stride, const T* b,
               int64_t b_stride, bool accumulate, T* c, int64_t c_stride) {
  // Column-major C^T = B^T A^T. The extents are those of a tile; strides of scratch fit an int as well.
  const int rows = static_cast<int>(n), cols = static_cast<int>(m), depth = static_cast<int>(k);
  const int lda = static_cast<int>(b_stride), ldb = static_cast<int>(a_stride), ldc = static_cast<int>(c_stride);
  const T alpha = 1, beta = accumulate ? 1 : 0;
  routine("n", "n", &rows, &cols, &depth, &alpha, b, &lda, a, &ldb, &beta, c, &ldc);
}

}  // namespace

Gemm::Gemm() : onednn_(at::globalContext().userEnabledMkldnn() && onednn_takes_float32()) {}

void Gemm::operator()(int64_t m, int64_t n, int64_t k, const float* a, int64_t a_stride, const float* b,
                      int64_t b_stride, bool accumulate, float* c, int64_t c_stride) const {
#if defined(CPUBLAS_BRGEMM_F32F32F32)
  if (onednn_) {
    return at::native::cpublas::brgemm(m, n, k, a_stride, b_stride, c_stride, accumulate, a, b, c, false);
  }
#endif
#if defined(DMATTN_MAYBE)
  if (sgemm_) return blas_gemm(sgemm_, m, n, k, a, a_stride, b, b_stride, accumulate, c, c_stride);
#endif
  aten_gemm(m, n, k, a, a_stride, b, b_stride, accumulate, c, c_stride);
}

void Gemm::operator()(int64_t m, int64_t n, int64_t k, const double* a, int64_t a_stride, const double* b,
                      int64_t b_stride, bool accumulate, double* c, int64_t c_stride) const {
#if defined(DMATTN_MAYBE)
  if (dgemm_) return blas_gemm(dgemm_, m, n, k, a, a_stride, b, b_stride, accumulate, c, c_stride);
#endif
  aten_gemm(m, n, k, a, a_stride, b, b_stride, accumulate, c, c_stride);
}

void Gemm::release() const {
#if defined(CPUBLAS_BRGEMM_F32F32F32)
  if (onednn_) at::native::cpublas::brgemm_release(false);
#endif
}

}  // namespace dmattn
