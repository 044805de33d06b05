// A product of tiles that may hold infinity and NaN; that of finite ones is `TileMath::product`.
#pragma once

#include <algorithm>
#include <cstdint>

namespace dmattn {

// C[m, n] = A[m, k] B[k, n], or += where `accumulate`, in which a 0 of A drops what stands in B, infinity and NaN too.
// Slow, and only for tiles that hold such.
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
