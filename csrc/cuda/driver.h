// The few functions of libcuda that launch a compiled kernel, found when they are needed: no headers, nothing linked.
#pragma once

#include "plans.h"

namespace dmattn {

struct Gpu {
  int sm, multiprocessors;
};

const Gpu& gpu(int device);

// Launches kernels of plans on the current stream of a device; those of a CPU (-1), which tests have, on device 0.
class Launcher {
 public:
  explicit Launcher(int device);
  ~Launcher();
  Launcher(const Launcher&) = delete;

  void launch(const Kernel& kernel, const Step& step, const std::vector<MaybeTensor>& tensors) const;

 private:
  int device_;
  void* stream_;
};

}  // namespace dmattn
