// Scratch memory of the kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace dmattn {

// Uninitialised, 64-byte aligned scratch; where the system gives huge pages on request, a large one lies on them. Else
// memory beyond what malloc keeps comes in pages of 4 KiB, and to fault those in took 15 % of a dense call of grouped
// heads with its backward.
template <typename T>
class Buffer {
 public:
  explicit Buffer(int64_t size)
      : bytes_(static_cast<size_t>(size) * sizeof(T)), data_(static_cast<T*>(::operator new(bytes_, alignment()))) {
#if defined(__linux__)
    if (bytes_ >= kLarge) madvise(data_, bytes_ / kHugePage * kHugePage, MADV_HUGEPAGE);
#endif
  }
  ~Buffer() { ::operator delete(data_, alignment()); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  T* data() const { return data_; }
  T* at(int64_t index) const { return data_ + index; }

 private:
  static constexpr size_t kHugePage = size_t{2} << 20, kLarge = 2 * kHugePage;

  std::align_val_t alignment() const { return std::align_val_t{bytes_ >= kLarge ? kHugePage : 64}; }

  const size_t bytes_;
  T* const data_;
};

}  // namespace dmattn
