// Everything elementwise that happens to one tile of scores, compiled once per instruction set (tile_math_*.cpp).
//
// A tile is row-major with kTile columns between rows. `rows` and `cols` are padded to multiples of 16, so that the
// inner loops have no remainders. `Columns` are counted from a pointer to the first column of a tile. The forward holds
// scores as [queries][keys]; the backward transposed.
#pragma once

#include <cstdint>

namespace dmattn {

constexpr int64_t kTile = 128;     // queries and keys of a tile, as in call.py
constexpr int64_t kTileWords = 4;  // 32-bit words in one row of a tile's bits

enum class Element { f64, f32, f16, bf16 };

constexpr int64_t element_size(Element element) {
  return element == Element::f64 ? 8 : element == Element::f32 ? 4 : 2;
}

// One bit per element of a tile: bit (c & 31) of words[r * stride + (c >> 5)]. `words == nullptr`: every bit is set.
struct Bits {
  const uint32_t* words = nullptr;
  int64_t stride = 0;

  Bits from_row(int64_t row) const { return {words ? words + row * stride : nullptr, stride}; }
};

// Columns of a tile, both multiples of 16.
struct Columns {
  int64_t first, last;

  int64_t count() const { return last - first; }
};

// Running softmax of a tile of queries: out = acc / sum, lse = max + ln(sum).
template <typename T>
struct Softmax {
  T* max;
  T* sum;
  T* acc;  // [rows, acc_width]
  int64_t acc_width;
  bool has_acc;  // false before the first tile: acc is then uninitialised
};

// What the backward knows of each query of a tile. P = exp((score - lse) - lse_tail), subtracted in this order: their
// sum would be rounded at the size of the scores. lse is +inf where the row is empty.
template <typename T>
struct QueryStatistics {
  const T* lse;
  const T* lse_tail;
  const T* delta;
};

// softcap * tanh(scale / softcap * product), with every number brought inside the range of T.
template <typename T>
struct SoftCap {
  T scale, inner, cap;  // inner = scale / cap
};

template <typename T>
struct TileMath {
  // Convert `n` elements to or from the compute type.
  void (*load)(const void* source, Element element, int64_t n, T* target);
  void (*store)(const T* source, T factor, int64_t n, void* target, Element element);
  // C[m, n] = A[m, k] B[k, n], or += where `accumulate`; all row-major, `a_stride` elements between the rows of A, and so
  // on. m and n are multiples of 16. The sums run over k in ascending order, whatever m and n are.
  void (*product)(int64_t m, int64_t n, int64_t k, const T* a, int64_t a_stride, const T* b, int64_t b_stride,
                  bool accumulate, T* c, int64_t c_stride);
  // target[c, r] = source[r, c]; rows and cols are multiples of 16.
  void (*transpose)(const T* source, int64_t source_stride, int64_t rows, int64_t cols, T* target,
                    int64_t target_stride);
  // scores = cap * tanh(inner * scores); slope (may be null) = 1 - tanh^2.
  void (*cap)(T* scores, int64_t rows, int64_t cols, const SoftCap<T>& softcap, T* slope);
  // scores = factor * scores + bias, rounded once, over `rows` x `cols` elements, of which `valid_cols` have a bias;
  // row_stride in bytes (0: the same row).
  void (*add_bias)(T* scores, int64_t rows, int64_t valid_cols, T factor, const void* bias, Element element,
                   int64_t row_stride);
  // scores = factor * scores + bias[row].
  void (*add_row_bias)(T* scores, int64_t rows, int64_t cols, T factor, const T* bias);
  // One step of the online softmax: scores become probabilities relative to the new maximum; acc and sum are rescaled.
  void (*softmax_step)(T* scores, int64_t rows, Columns cols, T factor, Bits visible, const Softmax<T>& state);
  // values = keep ? factor * values : 0.
  void (*drop)(T* values, int64_t rows, Columns cols, Bits keep, T factor);
  // scores become probabilities (after dropout), grad_probs becomes P * (dP - delta). Rows are keys, columns queries.
  void (*gradient_step)(T* scores, T* grad_probs, int64_t rows, Columns cols, T factor, Bits visible, Bits keep,
                        T keep_factor, const QueryStatistics<T>& statistics);
  // A value of 0 stays 0, also beside NaN.
  void (*multiply)(T* values, const T* factors, int64_t rows, int64_t cols);
  void (*add)(T* target, const T* source, int64_t n);
  void (*add_row_sums)(T* target, const T* values, int64_t valid_rows, int64_t cols);
  // target[c] = sum over rows of left[r, c] * right[r, c].
  void (*column_dots)(const T* left, const T* right, int64_t rows, int64_t cols, T* target);
  // Whether `n` values, a multiple of 16, hold neither infinity nor NaN.
  bool (*finite)(const T* values, int64_t n);
};

struct BitMath {
  // Bit c of words: ids[c] == id. Writes ceil(n / 32) words, zero behind n.
  void (*equal)(const int64_t* ids, int64_t n, int64_t id, uint32_t* words);
  // Bit c of words: the integer in element c is not zero. `stride` and `size` in bytes.
  void (*nonzero)(const char* row, int64_t stride, int64_t size, int64_t n, uint32_t* words);
  // target bit (c, r) = source bit (r, c) for a 128 x 128 tile; strides in words.
  void (*transpose)(const uint32_t* source, int64_t source_stride, uint32_t* target, int64_t target_stride);
  // Dropout of `query`, whose bit 3 is 0, and of query + 8 over 128 keys from `first_key`, a multiple of 16: bit c is
  // set where key first_key + c is kept.
  void (*philox_keep)(uint64_t seed, uint32_t query, uint32_t first_key, uint32_t last_dropped, uint32_t* words,
                      uint32_t* words_of_8_further);
  // The same for any query and the 128 keys at `positions`.
  void (*philox_keep_at)(uint64_t seed, uint32_t query, const uint32_t* positions, uint32_t last_dropped,
                         uint32_t* words);
};

// The best instruction set that this processor has. ATEN_CPU_CAPABILITY=avx2 or default limits it, as it limits torch.
template <typename T>
const TileMath<T>& tile_math();
const BitMath& bit_math();

}  // namespace dmattn
