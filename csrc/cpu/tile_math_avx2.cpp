// tile_math for AVX2.
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif
#define VECTOR_BYTES 32
#define DMATTN_ISA avx2
#include "tile_math_impl.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
