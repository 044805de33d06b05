// Backward: five products per tile, scores held transposed ([keys][queries]), so that dk and dv need no transposition
// and only dS is turned, for dq. One item owns some key tiles of some pairs: it writes their dk and dv, and its own
// partial dq; partials are added in a fixed order afterwards. No atomics: results do not depend on timing.
#include "kernels.h"

#include <cmath>

#include "backward_workspace.h"
#include "gemm.h"
#include "visibility.h"

namespace dmattn {
namespace {

template <typename T>
class BackwardWorker {
 public:
  BackwardWorker(const BackwardCall<T>& call, const BackwardWave<T>& wave, const Gemm& gemm)
      : call_(call), problem_(call.problem), wave_(wave), gemm_(gemm) {}
  ~BackwardWorker() { gemm_.release(); }

  void operator()(int64_t item) {
    const int64_t chunk = item % wave_.chunks;
    for (const int64_t index : wave_.groups[item / wave_.chunks]) {
      const Pair& pair = wave_.wave.pairs[index];
      // Strided, because a causal band gives the first key tiles the most work.
      for (int64_t tile = chunk; tile < pair.k_tiles; tile += wave_.chunks) own_tile(pair, tile, chunk);
    }
  }

 private:
  struct Work {
    const Pair& pair;
    int64_t head, query_slot, query_tile, key_tile;
    int64_t valid_queries, valid_keys;
    int64_t rows, cols;  // padded extents: keys and queries
  };

  void own_tile(const Pair& pair, int64_t tile, int64_t chunk) {
    const Sequence& sequence = problem_.sequence(pair.batch);
    const int64_t valid_keys = std::min(kTile, sequence.k_length - tile * kTile);
    has_acc_ = has_keys_ = false;
    for (int64_t g = 0; g < problem_.group; ++g) {
      const int64_t head = pair.kv_head * problem_.group + g;
      const Side side = key_side(problem_, pair.batch, head);
      side.visible_tiles(tile, tiles_);
      for (const TileRef& other : tiles_) {
        Bits visible;
        if (!other.full && !side.tile_bits(tile, other.index, visible_.data(), visible)) continue;
        const int64_t valid_queries = std::min(kTile, sequence.q_length - other.index * kTile);
        const Work work{pair,
                        head,
                        pair.query_slot(g, other.index),
                        other.index,
                        tile,
                        valid_queries,
                        valid_keys,
                        padded_extent(valid_keys),
                        padded_extent(valid_queries)};
        if (!has_keys_) pack_keys(pair, tile, valid_keys);
        visit(work, visible, chunk);
      }
    }
    for (int64_t r = 0; r < valid_keys; ++r) {
      const int64_t row = sequence.k_start + tile * kTile + r;
      store_row(dk_.at(r * wave_.width), problem_.scale, problem_.dim, call_.dk.at(pair.batch, row, pair.kv_head));
      store_row(dv_.at(r * wave_.value_width), 1, problem_.value_dim, call_.dv.at(pair.batch, row, pair.kv_head));
    }
  }

  void pack_keys(const Pair& pair, int64_t tile, int64_t valid_keys) {
    const int64_t first = problem_.sequence(pair.batch).k_start + tile * kTile;
    pack_rows<T>(problem_.key, pair.batch, first, valid_keys, pair.kv_head, key_.data());
    pack_rows<T>(problem_.value, pair.batch, first, valid_keys, pair.kv_head, value_.data());
    has_keys_ = true;
  }

  void store_row(const T* source, double factor, int64_t n, char* target) const {
    if (has_acc_)
      math_.store(source, in_range<T>(factor), n, target, problem_.query.element);
    else
      std::memset(target, 0, static_cast<size_t>(n * element_size(problem_.query.element)));
  }

  void visit(const Work& work, const Bits& visible, int64_t chunk) {
    const int64_t width = wave_.width, value_width = wave_.value_width;
    gemm_(work.rows, work.cols, width, key_.data(), width, wave_.query_columns(work.query_slot), kTile, false,
          scores_.data(), kTile);
    gemm_(work.rows, work.cols, value_width, value_.data(), value_width, wave_.grad_columns(work.query_slot), kTile,
          false, grad_scores_.data(), kTile);
    const T factor = finish_scores(work);
    Bits keep;
    if (const Dropout& dropout = problem_.dropout) {
      dropout_bits(dropout, dropout.seed(work.pair.batch, work.head), work.query_tile * kTile, work.valid_queries,
                   work.key_tile * kTile, turned_bits_.data());
      bit_math().transpose(turned_bits_.data(), kTileWords, keep_.data(), kTileWords);
      keep = {keep_.data(), kTileWords};
    }
    math_.gradient_step(scores_.data(), grad_scores_.data(), work.rows, work.cols, factor, visible, keep,
                        static_cast<T>(problem_.dropout.scale),
                        {wave_.lse(work.query_slot), wave_.lse_tail(work.query_slot), wave_.delta(work.query_slot)});
    gemm_(work.rows, value_width, work.cols, scores_.data(), kTile, wave_.grad_rows(work.query_slot), value_width,
          has_acc_, dv_.data(), value_width);
    if (call_.dbias.data) add_bias_gradient(work);
    if (problem_.softcap != 0) math_.multiply(grad_scores_.data(), slope_.data(), work.rows, work.cols);
    gemm_(work.rows, width, work.cols, grad_scores_.data(), kTile, wave_.query_rows(work.query_slot), width, has_acc_,
          dk_.data(), width);
    math_.transpose(grad_scores_.data(), kTile, work.rows, work.cols, scores_.data(), kTile);
    uint8_t& touched = wave_.touched(chunk, work.query_slot);
    gemm_(work.cols, width, work.rows, scores_.data(), kTile, key_.data(), width, touched != 0,
          wave_.dq(chunk, work.query_slot), width);
    touched = 1;
    has_acc_ = true;
  }

  // Softcap and bias; returns the factor that the stored scores are still to be multiplied by.
  T finish_scores(const Work& work) {
    T factor = in_range<T>(problem_.scale);
    if (problem_.softcap != 0) {
      math_.cap(scores_.data(), work.rows, work.cols, softcap_, slope_.data());
      factor = 1;
    }
    if (problem_.bias) {
      const Bias& bias = problem_.bias;
      const int64_t head = broadcast_head(work.head, problem_.heads, bias.heads);
      const int64_t first_key = problem_.sequence(work.pair.batch).k_start + work.key_tile * kTile;
      const char* at = bias.at(work.pair.batch, head, work.query_tile * kTile, first_key);
      std::fill(bias_.data(), bias_.at(kTile * kTile), T(0));
      if (bias.row_stride == 0) {
        math_.load(at, bias.element, work.valid_keys, bias_.data());
        math_.add_row_bias(scores_.data(), work.rows, work.cols, factor, bias_.data());
      } else {
        for (int64_t r = 0; r < work.valid_queries; ++r)
          math_.load(at + r * bias.row_stride, bias.element, work.valid_keys, bias_.at(r * kTile));
        math_.transpose(bias_.data(), kTile, work.cols, work.rows, turned_.data(), kTile);
        math_.add_bias(scores_.data(), work.rows, work.cols, factor, turned_.data(),
                       sizeof(T) == 8 ? Element::f64 : Element::f32, kTile * int64_t{sizeof(T)});
      }
      factor = 1;
    }
    return factor;
  }

  // dbias += dS, over the bias's own shape; only this item touches these elements.
  void add_bias_gradient(const Work& work) {
    const BiasGradient<T>& dbias = call_.dbias;
    const int64_t head = broadcast_head(work.head, problem_.heads, dbias.heads);
    const int64_t first_key = problem_.sequence(work.pair.batch).k_start + work.key_tile * kTile;
    T* at = dbias.at(work.pair.batch, head, work.query_tile * kTile, first_key);
    if (dbias.row_stride == 0) return math_.add_row_sums(at, grad_scores_.data(), work.valid_keys, work.cols);
    math_.transpose(grad_scores_.data(), kTile, work.rows, work.cols, turned_.data(), kTile);
    for (int64_t r = 0; r < work.valid_queries; ++r)
      math_.add(at + r * dbias.row_stride, turned_.at(r * kTile), work.valid_keys);
  }

  const BackwardCall<T>& call_;
  const Problem& problem_;
  const BackwardWave<T>& wave_;
  const Gemm& gemm_;
  const TileMath<T>& math_ = tile_math<T>();
  const SoftCap<T> softcap_ = softcap_of<T>(problem_);
  Buffer<T> scores_{kTile * kTile}, grad_scores_{kTile * kTile};
  Buffer<T> slope_{problem_.softcap != 0 ? kTile * kTile : 0};
  Buffer<T> bias_{problem_.bias ? kTile * kTile : 0}, turned_{problem_.bias ? kTile * kTile : 0};
  Buffer<T> key_{kTile * wave_.width}, value_{kTile * wave_.value_width};
  Buffer<T> dk_{kTile * wave_.width}, dv_{kTile * wave_.value_width};
  Buffer<uint32_t> visible_{kTile * kTileWords}, keep_{kTile * kTileWords}, turned_bits_{kTile * kTileWords};
  std::vector<TileRef> tiles_;
  bool has_acc_ = false, has_keys_ = false;
};

template <typename T>
void run(const Problem& problem, const Gradients& gradients) {
  if (!problem.covers_everything)
    for (const at::Tensor* gradient : {&gradients.dq, &gradients.dk, &gradients.dv}) gradient->zero_();
  at::Tensor dbias_sums;
  const BackwardCall<T> call(problem, gradients, dbias_sums);
  const Gemm gemm;
  for (const Wave& part : BackwardWave<T>::cut(call)) {
    const BackwardWave<T> wave(call, part);
    wave.fill(call);
    const auto items = static_cast<int64_t>(wave.groups.size()) * wave.chunks;
    for_each_item(items, [&] {
      return [worker = std::make_unique<BackwardWorker<T>>(call, wave, gemm)](int64_t item) { (*worker)(item); };
    });
    wave.write_dq(call);
  }
  if (dbias_sums.defined() && !dbias_sums.is_same(*gradients.dbias)) gradients.dbias->copy_(dbias_sums);
}

}  // namespace

void backward(const Arguments& arguments, const Gradients& gradients) {
  const Problem problem = make_problem(arguments);
  if (problem.query.element == Element::f64)
    run<double>(problem, gradients);
  else
    run<float>(problem, gradients);
}

}  // namespace dmattn
