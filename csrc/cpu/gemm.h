// Products of tiles through the BLAS that torch carries.
#pragma once

#include <algorithm>
#include <cstdint>

namespace dmattn {

// C[m, n] = A[m, k] B[k, n], or += where `accumulate`; all row-major, `a_stride` elements between the rows of A, and so
// on.
//
// float32 goes through oneDNN's batch-reduce GEMM where torch has it: on tiles of 128 x 128 x 64 it ran at 480 GFLOP/s
// where MKL's sgemm ran at 150 to 195 (two cores of an EPYC 9005, torch 2.13, 2026-11). It compiles a kernel per shape
// and thread, which is why tiles are padded to few extents. Else sgemm/dgemm, or ATen where torch exports neither.
class Gemm {
 public:
  Gemm();
  void operator()(int64_t m, int64_t n, int64_t k, const float* a, int64_t a_stride, const float* b, int64_t b_stride,
                  bool accumulate, float* c, int64_t c_stride) const;
  void operator()(int64_t m, int64_t n, int64_t k, const double* a, int64_t a_stride, const double* b, int64_t b_stride,
                  bool accumulate, double* c, int64_t c_stride) const;
  // Call at the end of each thread's work: gives back matrix registers, where the processor has them.
  void release() const;

 private:
  bool onednn_;
};

// The same, in which a 0 of A drops what stands in B, infinity and NaN too. Slow, and only for tiles that hold such.
template <typename T>
void product_of_nonzero(int64_t m, int64_t n, int64_t k, const T* a, int64_t a_stride, const T* b, int64_t b_stride,
                        bool accumulate, T* c, int64_t c_stride) {
  for (int64_t row = 0; row < m; ++row) {
    T* const sums = c + row * c_stride;
    if (!accumulate) std::fill(sums, sums + n, T(0));
    for (int64_t inner = 0; inner < k; ++inner) {
      const T factor = a[row * a_stride + inner];
      if (factor == 0) continue;
      for (int64_t col = 0; col < n; ++col) sums[col] += factor * b[inner * b_stride + col];
    }
  }
}

}  // namespace dmattn
