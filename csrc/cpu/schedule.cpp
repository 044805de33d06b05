#include "schedule.h"

namespace dmattn {

std::vector<Wave> make_waves(const Problem& problem, int64_t query_slot_bytes, int64_t key_slot_bytes) {
  std::vector<Wave> waves;
  int64_t bytes = 0;
  for (int64_t b = 0; b < problem.batch; ++b) {
    const Sequence& sequence = problem.sequence(b);
    const int64_t q_tiles = ceil_div(sequence.q_length, kTile), k_tiles = ceil_div(sequence.k_length, kTile);
    if (q_tiles == 0 && k_tiles == 0) continue;
    for (int64_t h = 0; h < problem.kv_heads; ++h) {
      const int64_t pair_bytes = problem.group * q_tiles * query_slot_bytes + k_tiles * key_slot_bytes;
      if (waves.empty() || bytes + pair_bytes > kWaveBytes) {
        waves.emplace_back();
        bytes = 0;
      }
      bytes += pair_bytes;
      Wave& wave = waves.back();
      const auto index = static_cast<int64_t>(wave.pairs.size());
      wave.pairs.push_back({b, h, q_tiles, k_tiles, static_cast<int64_t>(wave.query_tiles.size()),
                            static_cast<int64_t>(wave.key_tiles.size())});
      for (int64_t g = 0; g < problem.group; ++g)
        for (int64_t t = 0; t < q_tiles; ++t) wave.query_tiles.push_back({index, g, t});
      for (int64_t t = 0; t < k_tiles; ++t) wave.key_tiles.push_back({index, t});
    }
  }
  return waves;
}

}  // namespace dmattn
