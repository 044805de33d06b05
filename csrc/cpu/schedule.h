// How a call is cut into work: waves that bound the workspace, and items that threads take in turn.
#pragma once


#include <atomic>
#include <vector>

#include <exception>
#include <mutex>
#if defined(__SANITIZE_THREAD__)
#include <thread>
#endif

#include "problem.h"

namespace dmattn {

// One key/value head of one sequence with the query heads that read it.
struct Pair {
  int64_t batch, kv_head;
  int64_t q_tiles, k_tiles;                  // tiles of the sequence
  int64_t first_query_slot, first_key_slot;  // slots in the wave's workspace; query slots: [group, q_tiles]

  int64_t query_slot(int64_t head_in_group, int64_t tile) const {
    return first_query_slot + head_in_group * q_tiles + tile;
  }
  int64_t key_slot(int64_t tile) const { return first_key_slot + tile; }
};

struct QueryTile {
  int64_t pair, head_in_group, tile;
};

struct KeyTile {
  int64_t pair, tile;
};

// The workspace of one wave. Below 32 MiB in one piece, glibc's malloc keeps it for the next call; a larger one goes
// back to the system, and faulting its pages in again took a quarter of a sparse backward's time.
constexpr int64_t kWaveBytes = int64_t{24} << 20;

// Pairs that are computed together; their converted and transposed tiles share one workspace.
struct Wave {
  std::vector<Pair> pairs;
  std::vector<QueryTile> query_tiles;
  std::vector<KeyTile> key_tiles;
};

// Cut all pairs into waves of at most kWaveBytes (at least one pair each), given the bytes of one slot of each kind.
std::vector<Wave> make_waves(const Problem& problem, int64_t query_slot_bytes, int64_t key_slot_bytes);

inline int64_t thread_count() { return torch::stable::get_num_threads(); }

// Call f() on each of `threads` threads, and throw what one of them throws: exceptions do not pass through torch's
// stable interface.
template <typename F>
void on_threads(int64_t threads, const F& f) {
  std::exception_ptr failure;
  std::mutex guard;
  const auto guarded = [&](int64_t, int64_t) {
    try {
      f();
    } catch (...) {
      const std::lock_guard<std::mutex> lock(guard);
      failure = std::current_exception();
    }
  };
#if defined(__SANITIZE_THREAD__)
  // ThreadSanitizer does not know how OpenMP's threads wait for each other.
  std::vector<std::thread> started;
  for (int64_t t = 0; t < threads; ++t) started.emplace_back(guarded, t, t + 1);
  for (std::thread& thread : started) thread.join();
#else
  torch::stable::parallel_for(0, threads, 1, guarded);
#endif
  if (failure) std::rethrow_exception(failure);
}

// Call worker() on each thread, then its result with every item in [0, items), each taken by the thread that is free
// first. What an item writes may not depend on which thread runs it.
template <typename MakeWorker>
void for_each_item(int64_t items, const MakeWorker& make_worker) {
  std::atomic<int64_t> next{0};
  on_threads(std::min<int64_t>(items, thread_count()), [&] {
    auto worker = make_worker();
    for (int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < items;) worker(item);
  });
}

}  // namespace dmattn
