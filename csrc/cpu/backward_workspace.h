// What the backward prepares once per wave: tiles of query and grad_out in both orders, the statistics of each query,
// and room for partial dq.
#pragma once

#include <memory>

#include "differentiate.h"
#include "schedule.h"

namespace dmattn {

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

  QueryPanel<T> panel(int64_t slot) const { return {storage_.at(slot * slot_size_), width, value_width}; }
  // Whether query and grad_out of a slot hold neither infinity nor NaN.
  uint8_t finite(int64_t slot) const { return finite_[slot]; }
  T* dq(int64_t chunk, int64_t slot) const {
    return storage_.at(query_slots_ * slot_size_ + (chunk * query_slots_ + slot) * kTile * width);
  }
  // Whether the chunk has written its partial dq of the slot; until then it is uninitialised.
  uint8_t& touched(int64_t chunk, int64_t slot) const { return touched_[chunk * query_slots_ + slot]; }

 private:
  const int64_t query_slots_, slot_size_;
  const Buffer<T> storage_;
  mutable std::vector<uint8_t> touched_, finite_;
};

}  // namespace dmattn
