// tile_math for any processor (128-bit vectors), and the choice among the three.
#define VECTOR_BYTES 16
#define DMATTN_ISA portable
#include "tile_math_impl.h"


#include <cstdlib>
#include <string_view>

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
#if defined(__x86_64__)
    const char* const variable = std::getenv("ATEN_CPU_CAPABILITY");
    const std::string_view most = variable ? variable : "";
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (has_avx512 && most != "avx2" && most != "default") return Level::avx512;
    if (has_avx2 && most != "default") return Level::avx2;
#endif
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
