// tile_math for any processor (128-bit vectors), and the choice among the three.
#define VECTOR_BYTES 16
#define DMATTN_ISA portable
#include "tile_math_impl.h"

#include <ATen/Version.h>

#include <string>

namespace dmattn {

#if defined(__x86_64__)
namespace avx512 {
extern const TileMath<float> math_f32;
extern const TileMath<double> math_f64;
extern const BitMath bits;
}  // namespace avx512
namespace avx2 {
extern const TileMath<float> math_f32;
extern const TileMath<double> math_f64;
extern const BitMath bits;
}  // namespace avx2
#endif

namespace {

enum class Level { portable, avx2, avx512 };

Level level() {
  static const Level chosen = [] {
    const std::string capability = at::get_cpu_capability();
    if (capability == "AVX512") return Level::avx512;
    if (capability == "AVX2") return Level::avx2;
    return Level::portable;
  }();
  return chosen;
}

}  // namespace

template <>
const TileMath<float>& tile_math<float>() {
#if defined(__x86_64__)
  if (level() == Level::avx512) return avx512::math_f32;
  if (level() == Level::avx2) return avx2::math_f32;
#endif
  return portable::math_f32;
}

template <>
const TileMath<double>& tile_math<double>() {
#if defined(__x86_64__)
  if (level() == Level::avx512) return avx512::math_f64;
  if (level() == Level::avx2) return avx2::math_f64;
#endif
  return portable::math_f64;
}

const BitMath& bit_math() {
#if defined(__x86_64__)
  if (level() == Level::avx512) return avx512::bits;
  if (level() == Level::avx2) return avx2::bits;
#endif
  return portable::bits;
}

}  // namespace dmattn
