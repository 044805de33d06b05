// tile_math for AVX-512.
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512")
#endif
#define VECTOR_BYTES 64
#define DMATTN_ISA avx512
#include "tile_math_impl.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
