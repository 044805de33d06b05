// The bodies behind tile_math.h. The including file sets VECTOR_BYTES, the target and DMATTN_ISA, the name of its
// table.
#pragma once

#include "tile_math.h"
#include "vector.h"

namespace dmattn {
namespace {

constexpr float kInfinity = __builtin_inff();

// ---- conversions: written on bits, so that the compiler vectorises them without special instructions ----

DMATTN_INLINE uint32_t float_bits(float x) { return __builtin_bit_cast(uint32_t, x); }
DMATTN_INLINE float bits_float(uint32_t x) { return __builtin_bit_cast(float, x); }

DMATTN_INLINE float from_f16(uint16_t half) {
  const uint32_t w = uint32_t{half} << 16, sign = w & 0x80000000u, shifted = w + w;
  const float normal = bits_float((shifted >> 4) + (0xE0u << 23)) * 0x1.0p-112f;
  const float denormal = bits_float((shifted >> 17) | (126u << 23)) - 0.5f;
  return bits_float(sign | (shifted < (1u << 27) ? float_bits(denormal) : float_bits(normal)));
}

DMATTN_INLINE uint16_t to_f16(float x) {
  const uint32_t w = float_bits(x), sign = w & 0x80000000u, shifted = w + w;
  uint32_t exponent = shifted & 0xFF000000u;
  exponent = exponent < 0x71000000u ? 0x71000000u : exponent;
  const float magnitude = (bits_float(w & 0x7FFFFFFFu) * 0x1.0p+112f) * 0x1.0p-110f;
  const uint32_t bits = float_bits(bits_float((exponent >> 1) + 0x07800000u) + magnitude);
  const uint32_t finite = ((bits >> 13) & 0x7C00u) + (bits & 0x0FFFu);
  return static_cast<uint16_t>((sign >> 16) | (shifted > 0xFF000000u ? 0x7E00u : finite));
}

DMATTN_INLINE float from_bf16(uint16_t x) { return bits_float(uint32_t{x} << 16); }

DMATTN_INLINE uint16_t to_bf16(float x) {
  const uint32_t w = float_bits(x);
  const uint32_t rounded = (w + 0x7FFFu + ((w >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((w & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded);
}

template <typename T>
void load(const void* source, Element element, int64_t n, T* target) {
  const auto* f64 = static_cast<const double*>(source);
  const auto* f32 = static_cast<const float*>(source);
  const auto* f16 = static_cast<const uint16_t*>(source);
  switch (element) {
    case Element::f64:
      for (int64_t k = 0; k < n; ++k) target[k] = static_cast<T>(f64[k]);
      break;
    case Element::f32:
      for (int64_t k = 0; k < n; ++k) target[k] = static_cast<T>(f32[k]);
      break;
    case Element::f16:
      for (int64_t k = 0; k < n; ++k) target[k] = static_cast<T>(from_f16(f16[k]));
      break;
    case Element::bf16:
      for (int64_t k = 0; k < n; ++k) target[k] = static_cast<T>(from_bf16(f16[k]));
      break;
  }
}

template <typename T>
void store(const T* source, T factor, int64_t n, void* target, Element element) {
  auto* f64 = static_cast<double*>(target);
  auto* f32 = static_cast<float*>(target);
  auto* f16 = static_cast<uint16_t*>(target);
  switch (element) {
    case Element::f64:
      for (int64_t k = 0; k < n; ++k) f64[k] = static_cast<double>(source[k] * factor);
      break;
    case Element::f32:
      for (int64_t k = 0; k < n; ++k) f32[k] = static_cast<float>(source[k] * factor);
      break;
    case Element::f16:
      for (int64_t k = 0; k < n; ++k) f16[k] = to_f16(static_cast<float>(source[k] * factor));
      break;
    case Element::bf16:
      for (int64_t k = 0; k < n; ++k) f16[k] = to_bf16(static_cast<float>(source[k] * factor));
      break;
  }
}

// ---- products ----

// Rows and vectors of a block of sums that stays in registers, and whether a panel of B that many rows of A meet is
// copied first: where 16 registers are few, a block is narrow, and rows of B that lie apart fall into few sets of the
// cache. On tiles of 128 x 128 x 64 and of 128 x 128 x 128 a thread of an EPYC 9004 ran at 109 and 112 GFLOP/s with
// AVX-512 and at 103 with AVX2, where oneDNN's batch-reduce GEMM ran at 110 and 113, and at 101 and 84 (2026-11).
#if defined(__x86_64__) && VECTOR_BYTES < 64
constexpr int kBlockRows = 4, kBlockVectors = 2;
constexpr bool kCopiesPanels = true;
#else
constexpr int kBlockRows = 4, kBlockVectors = 4;
constexpr bool kCopiesPanels = false;
#endif
constexpr int64_t kManyRows = 48, kLongestCopy = 256;

template <typename T, int rows, int vectors>
DMATTN_INLINE void product_block(int64_t k, const T* a, int64_t a_stride, const T* b, int64_t b_stride, bool accumulate,
                                 T* c, int64_t c_stride) {
  constexpr int lanes = kLanes<T>;
  Vec<T> sums[rows][vectors];
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) sums[r][v] = accumulate ? load_vector<T>(c + r * c_stride + v * lanes) : Vec<T>{};
  for (int64_t inner = 0; inner < k; ++inner) {
    Vec<T> right[vectors];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) right[v] = load_vector<T>(b + inner * b_stride + v * lanes);
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
      const Vec<T> left = splat<T>(a[r * a_stride + inner]);
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) sums[r][v] = multiply_add<T>(left, right[v], sums[r][v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) store_vector<T>(c + r * c_stride + v * lanes, sums[r][v]);
}

// `vectors` vectors of columns.
template <typename T, int rows, int vectors>
void product_panel(int64_t m, int64_t k, const T* a, int64_t a_stride, const T* b, int64_t b_stride, bool accumulate,
                   T* c, int64_t c_stride) {
  constexpr int width = vectors * kLanes<T>;
  alignas(64) T copied[kCopiesPanels ? kLongestCopy * width : 1];
  if (kCopiesPanels && m >= kManyRows && k <= kLongestCopy) {
    for (int64_t inner = 0; inner < k; ++inner)
      for (int v = 0; v < width; v += kLanes<T>)
        store_vector<T>(copied + inner * width + v, load_vector<T>(b + inner * b_stride + v));
    b = copied;
    b_stride = width;
  }
  for (int64_t r = 0; r < m; r += rows)
    product_block<T, rows, vectors>(k, a + r * a_stride, a_stride, b, b_stride, accumulate, c + r * c_stride, c_stride);
}

template <typename T>
void product(int64_t m, int64_t n, int64_t k, const T* a, int64_t a_stride, const T* b, int64_t b_stride,
             bool accumulate, T* c, int64_t c_stride) {
  constexpr int lanes = kLanes<T>, width = kBlockVectors * lanes;
  int64_t col = 0;
  for (; col + width <= n; col += width)
    product_panel<T, kBlockRows, kBlockVectors>(m, k, a, a_stride, b + col, b_stride, accumulate, c + col, c_stride);
  for (; col < n; col += lanes)
    product_panel<T, 2 * kBlockRows, 1>(m, k, a, a_stride, b + col, b_stride, accumulate, c + col, c_stride);
}

template <typename T>
void transpose(const T* source, int64_t source_stride, int64_t rows, int64_t cols, T* target, int64_t target_stride) {
  constexpr int64_t n = kLanes<T>;
  for (int64_t r = 0; r < rows; r += n)
    for (int64_t c = 0; c < cols; c += n)
      transpose_block<T>(source + r * source_stride + c, source_stride, target + c * target_stride + r, target_stride);
}

// ---- scores ----

template <typename T>
void cap(T* scores, int64_t rows, int64_t cols, const SoftCap<T>& softcap, T* slope) {
  constexpr T linear = Constants<T>::linear_tanh;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; c += kLanes<T>) {
      T* at = scores + r * kTile + c;
      const Vec<T> product = load_vector<T>(at), x = product * softcap.inner;
      const Vec<T> t = tanh_vector<T>(x);
      // A cap far above the scores makes x denormal, so that it has lost its digits.
      store_vector<T>(at, (x < linear) & (x > -linear) ? product * softcap.scale : t * softcap.cap);
      if (slope) store_vector<T>(slope + r * kTile + c, 1 - t * t);
    }
  }
}

template <typename T>
void add_bias(T* scores, int64_t rows, int64_t valid_cols, T factor, const void* bias, Element element,
              int64_t row_stride) {
  T row[kTile] = {};
  for (int64_t r = 0; r < rows; ++r) {
    if (r == 0 || row_stride != 0) load<T>(static_cast<const char*>(bias) + r * row_stride, element, valid_cols, row);
    for (int64_t c = 0; c < valid_cols; c += kLanes<T>) {
      T* at = scores + r * kTile + c;
      store_vector<T>(at, multiply_add<T>(load_vector<T>(at), splat<T>(factor), load_vector<T>(row + c)));
    }
  }
}

template <typename T>
void add_row_bias(T* scores, int64_t rows, int64_t cols, T factor, const T* bias) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; c += kLanes<T>) {
      T* at = scores + r * kTile + c;
      store_vector<T>(at, multiply_add<T>(load_vector<T>(at), splat<T>(factor), splat<T>(bias[r])));
    }
  }
}

template <typename T, bool Masked>
DMATTN_INLINE void softmax_rows(T* scores, Columns cols, T factor, const uint32_t* words, int64_t stride, T* max,
                                T* sum, T* alpha) {
  constexpr int n = kLanes<T>;
  const Vec<T> lowest = splat<T>(-kInfinity);
  T block[n * n];
  for (int r = 0; r < n; ++r) {
    Vec<T> best = lowest;
    for (int64_t c = cols.first; c < cols.last; c += n) {
      T* at = scores + r * kTile + c;
      Vec<T> x = load_vector<T>(at) * factor;
      if constexpr (Masked) x = selected<T>(words + r * stride, c) ? x : lowest;
      store_vector<T>(at, x);  // rounded here, as in the backward: exp(0) for the maximum
      best = x > best ? x : best;
    }
    store_vector<T>(block + r * n, best);
  }
  const Vec<T> old = load_vector<T>(max);
  const Vec<T> seen = row_maxima<T>(block);
  const Vec<T> now = seen > old ? seen : old;
  const Vec<T> reference = now == lowest ? Vec<T>{} : now;  // a row without keys so far: exp(-inf - 0) is 0, not NaN
  const Vec<T> rescale = exp_vector<T>(old - reference);
  T shift[n];
  store_vector<T>(shift, reference);
  store_vector<T>(max, now);
  store_vector<T>(alpha, rescale);
  for (int r = 0; r < n; ++r) {
    Vec<T> total{};
    for (int64_t c = cols.first; c < cols.last; c += n) {
      T* at = scores + r * kTile + c;
      const Vec<T> p = exp_vector<T>(load_vector<T>(at) - shift[r]);
      store_vector<T>(at, p);
      total += p;
    }
    store_vector<T>(block + r * n, total);
  }
  store_vector<T>(sum, multiply_add<T>(load_vector<T>(sum), rescale, row_sums<T>(block)));
}

template <typename T>
void softmax_step(T* scores, int64_t rows, Columns cols, T factor, Bits visible, const Softmax<T>& state) {
  constexpr int n = kLanes<T>;
  T alpha[n];
  for (int64_t r = 0; r < rows; r += n) {
    T* group = scores + r * kTile;
    if (visible.words)
      softmax_rows<T, true>(group, cols, factor, visible.words + r * visible.stride, visible.stride, state.max + r,
                            state.sum + r, alpha);
    else
      softmax_rows<T, false>(group, cols, factor, nullptr, 0, state.max + r, state.sum + r, alpha);
    if (!state.has_acc) continue;
    for (int k = 0; k < n; ++k) {
      if (alpha[k] == 1) continue;
      T* acc = state.acc + (r + k) * state.acc_width;
      for (int64_t c = 0; c < state.acc_width; ++c) acc[c] *= alpha[k];
    }
  }
}

template <typename T>
void drop(T* values, int64_t rows, Columns cols, Bits keep, T factor) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = cols.first; c < cols.last; c += kLanes<T>) {
      T* at = values + r * kTile + c;
      store_vector<T>(at, selected<T>(keep.words + r * keep.stride, c) ? load_vector<T>(at) * factor : Vec<T>{});
    }
  }
}

// ---- backward ----

template <typename T, bool Masked, bool Dropped>
DMATTN_INLINE void gradient_rows(T* scores, T* grad_probs, int64_t rows, Columns cols, T factor, Bits visible,
                                 Bits keep, T keep_factor, const QueryStatistics<T>& statistics) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = cols.first; c < cols.last; c += kLanes<T>) {
      T* at = scores + r * kTile + c;
      T* grad_at = grad_probs + r * kTile + c;
      const Vec<T> score = load_vector<T>(at) * factor;  // rounded as in the forward
      const Vec<T> x = (score - load_vector<T>(statistics.lse + c)) - load_vector<T>(statistics.lse_tail + c);
      const Vec<T> p = exp_vector<T>(x > 0 ? Vec<T>{} : x);  // rounding may not make a weight larger than 1
      Vec<T> grad = load_vector<T>(grad_at), dropped = p;
      if constexpr (Dropped) {
        const IntVec<T> kept = selected<T>(keep.words + r * keep.stride, c);
        grad = kept ? grad * keep_factor : Vec<T>{};
        dropped = kept ? p * keep_factor : Vec<T>{};
      }
      grad = p * (grad - load_vector<T>(statistics.delta + c));
      if constexpr (Masked) {
        const IntVec<T> seen = selected<T>(visible.words + r * visible.stride, c);
        dropped = seen ? dropped : Vec<T>{};
        grad = seen ? grad : Vec<T>{};
      }
      store_vector<T>(at, dropped);
      store_vector<T>(grad_at, grad);
    }
  }
}

template <typename T>
void gradient_step(T* scores, T* grad_probs, int64_t rows, Columns cols, T factor, Bits visible, Bits keep,
                   T keep_factor, const QueryStatistics<T>& statistics) {
  auto* step = visible.words ? (keep.words ? gradient_rows<T, true, true> : gradient_rows<T, true, false>)
                             : (keep.words ? gradient_rows<T, false, true> : gradient_rows<T, false, false>);
  step(scores, grad_probs, rows, cols, factor, visible, keep, keep_factor, statistics);
}

template <typename T>
void multiply(T* values, const T* factors, int64_t rows, int64_t cols) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; c += kLanes<T>) {
      T* at = values + r * kTile + c;
      const Vec<T> value = load_vector<T>(at);
      store_vector<T>(at, value == 0 ? Vec<T>{} : value * load_vector<T>(factors + r * kTile + c));
    }
  }
}

template <typename T>
void add(T* target, const T* source, int64_t n) {
  for (int64_t k = 0; k < n; ++k) target[k] += source[k];
}

template <typename T>
DMATTN_INLINE T lanes_total(Vec<T> v) {
  T lanes[kLanes<T>], total = 0;
  store_vector<T>(lanes, v);
  for (T lane : lanes) total += lane;
  return total;
}

template <typename T>
void add_row_sums(T* target, const T* values, int64_t valid_rows, int64_t cols) {
  for (int64_t r = 0; r < valid_rows; ++r) {
    Vec<T> total{};
    for (int64_t c = 0; c < cols; c += kLanes<T>) total += load_vector<T>(values + r * kTile + c);
    target[r] += lanes_total<T>(total);
  }
}

// One accumulator per column, in the order and with the rounding of `product`: where a query sees one key, delta then
// equals dP bit by bit and the gradient is exactly 0.
template <typename T>
void column_dots(const T* left, const T* right, int64_t rows, int64_t cols, T* target) {
  for (int64_t c = 0; c < cols; c += kLanes<T>) {
    Vec<T> total{};
    for (int64_t r = 0; r < rows; ++r)
      total = multiply_add<T>(load_vector<T>(left + r * kTile + c), load_vector<T>(right + r * kTile + c), total);
    store_vector<T>(target + c, total);
  }
}

template <typename T>
bool finite(const T* values, int64_t n) {
  Vec<T> total{};  // stays 0, unless something times 0 is NaN
  for (int64_t k = 0; k < n; k += kLanes<T>) total += load_vector<T>(values + k) * T(0);
  return lanes_total<T>(total) == 0;
}

// ---- bits ----

void equal_ids(const int64_t* ids, int64_t n, int64_t id, uint32_t* words) {
  for (int64_t first = 0; first < n; first += 32) {
    const int64_t count = n - first < 32 ? n - first : 32;
    uint32_t word = 0;
    for (int64_t k = 0; k < count; ++k) word |= uint32_t{ids[first + k] == id} << k;
    words[first >> 5] = word;
  }
}

template <typename U>
DMATTN_INLINE void nonzero_of(const char* row, int64_t stride, int64_t n, uint32_t* words) {
  for (int64_t first = 0; first < n; first += 32) {
    const int64_t count = n - first < 32 ? n - first : 32;
    const char* at = row + first * stride;
    uint32_t word = 0;
    if (stride == sizeof(U) && count == 32) {
      const U* elements = reinterpret_cast<const U*>(at);
      for (int k = 0; k < 32; ++k) word |= uint32_t{elements[k] != 0} << k;
    } else {
      for (int64_t k = 0; k < count; ++k)
        word |= uint32_t{*reinterpret_cast<const U*>(at + k * stride) != 0} << k;
    }
    words[first >> 5] = word;
  }
}

void nonzero(const char* row, int64_t stride, int64_t size, int64_t n, uint32_t* words) {
  if (size == 1) return nonzero_of<uint8_t>(row, stride, n, words);
  if (size == 2) return nonzero_of<uint16_t>(row, stride, n, words);
  if (size == 4) return nonzero_of<uint32_t>(row, stride, n, words);
  nonzero_of<uint64_t>(row, stride, n, words);
}

// A 32 x 32 block by swapping ever smaller off-diagonal halves (Hacker's Delight, 7-3).
DMATTN_INLINE void transpose_words(uint32_t* block) {
  uint32_t mask = 0x0000FFFFu;
  for (int width = 16; width != 0; width >>= 1, mask ^= mask << width) {
    for (int k = 0; k < 32; k = (k + width + 1) & ~width) {
      const uint32_t swap = ((block[k] >> width) ^ block[k + width]) & mask;
      block[k] ^= swap << width;
      block[k + width] ^= swap;
    }
  }
}

void transpose_bits(const uint32_t* source, int64_t source_stride, uint32_t* target, int64_t target_stride) {
  uint32_t block[32];
  for (int64_t r = 0; r < kTileWords; ++r) {
    for (int64_t c = 0; c < kTileWords; ++c) {
      for (int k = 0; k < 32; ++k) block[k] = source[(r * 32 + k) * source_stride + c];
      transpose_words(block);
      for (int k = 0; k < 32; ++k) target[(c * 32 + k) * target_stride + r] = block[k];
    }
  }
}

// Philox4x32-7 under the key 0, `calls` of them side by side, of the counters (query, x[1], seed); x receives the four
// words of each, which are those of (query, key), (query, key + 8), (query + 8, key) and (query + 8, key + 8).
template <int calls>
DMATTN_INLINE void philox(uint64_t seed, uint32_t query, uint32_t (*x)[calls]) {
  for (int k = 0; k < calls; ++k) {
    x[0][k] = query;
    x[2][k] = static_cast<uint32_t>(seed);
    x[3][k] = static_cast<uint32_t>(seed >> 32);
  }
  uint32_t key0 = 0, key1 = 0;
  for (int round = 0; round < 7; ++round, key0 += 0x9E3779B9u, key1 += 0xBB67AE85u) {
    for (int k = 0; k < calls; ++k) {
      const uint64_t a = uint64_t{0xD2511F53u} * x[0][k], b = uint64_t{0xCD9E8D57u} * x[2][k];
      x[0][k] = static_cast<uint32_t>(b >> 32) ^ x[1][k] ^ key0;
      x[1][k] = static_cast<uint32_t>(b);
      x[2][k] = static_cast<uint32_t>(a >> 32) ^ x[3][k] ^ key1;
      x[3][k] = static_cast<uint32_t>(a);
    }
  }
}

void philox_keep(uint64_t seed, uint32_t query, uint32_t first_key, uint32_t last_dropped, uint32_t* words,
                 uint32_t* words_of_8_further) {
  constexpr int calls = kTile / 2;
  uint32_t x[4][calls];
  for (int k = 0; k < calls; ++k) x[1][k] = first_key + static_cast<uint32_t>((k >> 3) * 16 + (k & 7));
  philox<calls>(seed, query, x);
  for (int w = 0; w < kTileWords; ++w) {
    uint32_t word = 0, further = 0;
    for (int k = 0; k < 16; ++k) {
      const int at = w * 16 + k, bit = (k >> 3) * 16 + (k & 7);
      word |= uint32_t{x[0][at] > last_dropped} << bit | uint32_t{x[1][at] > last_dropped} << (bit + 8);
      further |= uint32_t{x[2][at] > last_dropped} << bit | uint32_t{x[3][at] > last_dropped} << (bit + 8);
    }
    words[w] = word;
    words_of_8_further[w] = further;
  }
}

void philox_keep_at(uint64_t seed, uint32_t query, const uint32_t* positions, uint32_t last_dropped, uint32_t* words) {
  uint32_t x[4][kTile];
  for (int k = 0; k < kTile; ++k) x[1][k] = positions[k] & ~8u;
  philox<kTile>(seed, query & ~8u, x);
  const uint32_t(*own)[kTile] = x + (query >> 2 & 2);
  for (int w = 0; w < kTileWords; ++w) {
    uint32_t word = 0;
    for (int k = 0; k < 32; ++k) word |= uint32_t{own[positions[32 * w + k] >> 3 & 1][32 * w + k] > last_dropped} << k;
    words[w] = word;
  }
}

template <typename T>
constexpr TileMath<T> make_tile_math() {
  return {load<T>,         store<T>, product<T>, transpose<T>,     cap<T>,      add_bias<T>, add_row_bias<T>,
          softmax_step<T>, drop<T>,  gradient_step<T>, multiply<T>, add<T>,      add_row_sums<T>,
          column_dots<T>,  finite<T>};
}

}  // namespace

namespace DMATTN_ISA {
extern const TileMath<float> math_f32;
extern const TileMath<double> math_f64;
extern const BitMath bits;
constinit const TileMath<float> math_f32 = make_tile_math<float>();
constinit const TileMath<double> math_f64 = make_tile_math<double>();
constinit const BitMath bits = {equal_ids, nonzero, transpose_bits, philox_keep, philox_keep_at};
}  // namespace DMATTN_ISA

}  // namespace dmattn
