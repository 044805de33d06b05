// Runs model.pt2 without Python, and compares with what Python made of the same inputs (export.py).
// usage: run LIBDMATTN MODEL.pt2 CALLS.pt [KERNELS.dmattn]
#include <dlfcn.h>
#include <ATen/ATen.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iterator>

static std::vector<at::Tensor> tensors_of(const c10::IValue& list) {
  std::vector<at::Tensor> tensors;
  for (const c10::IValue& element : list.toListRef()) tensors.push_back(element.toTensor());
  return tensors;
}

int main(int argc, char** argv) {
  if (argc != 4 && argc != 5) {
    std::fprintf(stderr, "usage: %s LIBDMATTN MODEL.pt2 CALLS.pt [KERNELS.dmattn]\n", argv[0]);
    return 2;
  }
  // Loading the library defines the operators dmattn::*, which has to be before the model is loaded.
  void* const library = dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL);
  if (!library) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  if (argc == 5) {  // kernels for a GPU
    const auto load = reinterpret_cast<const char* (*)(const char*)>(dlsym(library, "dmattn_load_kernels"));
    if (const char* const wrong = load(argv[4])) {
      std::fprintf(stderr, "%s\n", wrong);
      return 1;
    }
  }
  torch::inductor::AOTIModelPackageLoader model(argv[2]);
  std::ifstream file(argv[3], std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  const c10::IValue calls = torch::jit::pickle_load(bytes);
  bool right = true;
  for (const c10::IValue& element : calls.toListRef()) {
    const auto& call = element.toTupleRef().elements();
    std::vector<at::Tensor> inputs = tensors_of(call[0]), expected = tensors_of(call[1]);
    const std::vector<at::Tensor> outs = model.run(inputs);
    right = right && outs.size() == expected.size();
    double difference = 0;
    for (size_t k = 0; right && k < outs.size(); ++k) {
      right = outs[k].sizes() == expected[k].sizes();
      if (!right) break;
      const double of_output = (outs[k] - expected[k]).abs().max().item<double>();
      right = of_output < 1e-5;  // not of NaN
      difference = std::max(difference, of_output);
    }
    std::printf("length %ld: largest difference to Python %g\n", static_cast<long>(inputs[0].size(1)), difference);
  }
  return right ? 0 : 1;
}
