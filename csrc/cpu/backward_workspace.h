// What the backward prepares once per wave: tiles of query and grad_out in both orders, the statistics of each query,
// and room for partial dq.
#pragma once

#include <memory>

#include "kernels.h"
#include "schedule.h"
#include "tile_pack.h"

namespace dmattn {

// Sums of dbias: contiguous, the shape of bias, in the compute type. `data` is null where nobody asked.
template <typename T>
struct BiasGradient {
  T* data = nullptr;
  int64_t heads = 1, batch_stride = 0, head_stride = 0, row_stride = 0;  // elements, 0 in broadcast dimensions
  bool per_batch = true, per_kv_head = true;  // false: pairs that differ there share elements

  T* at(int64_t batch, int64_t head, int64_t row, int64_t key) const {
    return data + batch * batch_stride + head * head_stride + row * row_stride + key;
  }
};

template <typename T>
struct BackwardCall {
  const Problem& problem;
  Rows grad_out, out, dq, dk, dv;
  PerQuery<T> lse, lse_tail, grad_lse;
  BiasGradient<T> dbias;

  // `sums` receives the accumulator of dbias: dbias itself where its dtype and layout allow.
  BackwardCall(const Problem& problem, const Gradients& gradients, at::Tensor& sums);
};

template <typename T>
class BackwardWave {
 public:
  static std::vector<Wave> cut(const BackwardCall<T>& call);

  BackwardWave(const BackwardCall<T>& call, const Wave& wave);
  void fill(const BackwardCall<T>& call) const;
  void write_dq(const BackwardCall<T>& call) const;

  const Wave& wave;
  const int64_t width, value_width;
  // Pairs whose dbias overlaps form one group; a group's key tiles are dealt to `chunks` items.
  const std::vector<std::vector<int64_t>> groups;
  const int64_t chunks;

  // Tiles of a query slot: [kTile][width] or [width][kTile].
  T* query_rows(int64_t slot) const { return storage_.at(slot * slot_size_); }
  T* query_columns(int64_t slot) const { return query_rows(slot) + kTile * width; }
  T* grad_rows(int64_t slot) const { return query_columns(slot) + kTile * width; }
  T* grad_columns(int64_t slot) const { return grad_rows(slot) + kTile * value_width; }
  T* lse(int64_t slot) const { return grad_columns(slot) + kTile * value_width; }  // +inf for empty rows
  T* lse_tail(int64_t slot) const { return lse(slot) + kTile; }
  T* delta(int64_t slot) const { return lse_tail(slot) + kTile; }
  T* dq(int64_t chunk, int64_t slot) const {
    return storage_.at(query_slots_ * slot_size_ + (chunk * query_slots_ + slot) * kTile * width);
  }
  // Whether the chunk has written its partial dq of the slot; until then it is uninitialised.
  uint8_t& touched(int64_t chunk, int64_t slot) const { return touched_[chunk * query_slots_ + slot]; }

 private:
  void fill_slot(const BackwardCall<T>& call, const QueryTile& tile, T* out_tile) const;

  const int64_t query_slots_, slot_size_;
  const Buffer<T> storage_;
  mutable std::vector<uint8_t> touched_;
};

}  // namespace dmattn
