// The small operations between the linear layers, for a range of rows.

#include "kernels.h"
#include "simd.h"

namespace quire::QUIRE_ISA {
namespace {

// Sum of squares in four chains, always cut the same way.
template <class T> QUIRE_INLINE float mean_square(const T* x, int64_t width) {
  vf sum[4] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + 4 * W <= width; i += 4 * W) {
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      const vf v = load(x + i + k * W);
      sum[k] = fma(v, v, sum[k]);
    }
  }
  for (; i < width; i += W) {
    const vf v = load_upto(x + i, width - i);
    sum[0] = fma(v, v, sum[0]);
  }
  return hsum((sum[0] + sum[1]) + (sum[2] + sum[3])) / static_cast<float>(width);
}

template <class T> void norm_rows(const NormArgs& args, int64_t begin, int64_t end) {
  const T* weight = static_cast<const T*>(args.weight);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t outer = row / args.inner, inner = row % args.inner, width = args.width;
    const T* x = static_cast<const T*>(args.x) + outer * args.x_outer_stride + inner * args.x_inner_stride;
    T* out = static_cast<T*>(args.out) + row * width;
    if (args.residual != nullptr) {
      const T* residual = static_cast<const T*>(args.residual) + outer * args.residual_outer_stride +
                          inner * args.residual_inner_stride;
      T* total = static_cast<T*>(args.total) + row * width;
      for (int64_t i = 0; i < width; i += W) {
        store_upto(total + i, load_upto(x + i, width - i) + load_upto(residual + i, width - i), width - i);
      }
      x = total;
    }
    const vf scale = set1(1.0f / __builtin_sqrtf(mean_square(x, width) + args.eps));
    for (int64_t i = 0; i < width; i += W) {
      const vf normed = rounded(x, load_upto(x + i, width - i) * scale);
      store_upto(out + i, load_upto(weight + i, width - i) * normed, width - i);
    }
  }
}

template <class T> void gate_rows(const GateArgs& args, int64_t begin, int64_t end) {
  const int64_t width = args.width;
  for (int64_t row = begin; row < end; ++row) {
    const T* gate = static_cast<const T*>(args.x) + row * args.x_stride;
    const T* up = gate + width;
    T* out = static_cast<T*>(args.out) + row * width;
    for (int64_t i = 0; i < width; i += W) {
      const vf g = load_upto(gate + i, width - i);
      const vf silu = rounded(gate, g / (set1(1.0f) + exp(zero() - g)));
      store_upto(out + i, silu * load_upto(up + i, width - i), width - i);
    }
  }
}

template <class T> void rotate_rows(const RotaryArgs& args, int64_t begin, int64_t end) {
  const int64_t half = args.half;
  for (int64_t t = begin; t < end; ++t) {
    const float* cos = args.cos_sin + args.positions[t] * args.cos_sin_stride;
    const float* sin = cos + half;
    for (int64_t h = 0; h < args.heads; ++h) {
      T* first = static_cast<T*>(args.x) + t * args.token_stride + h * args.head_stride;
      T* second = first + half;
      for (int64_t i = 0; i < half; i += W) {
        const int64_t n = half - i;
        const vf a = load_upto(first + i, n), b = load_upto(second + i, n);
        const vf c = load_upto(cos + i, n), s = load_upto(sin + i, n);
        store_upto(first + i, fnma(b, s, a * c), n);
        store_upto(second + i, fma(a, s, b * c), n);
      }
    }
  }
}

}  // namespace

#define QUIRE_ROWS(NAME, ARGS, ROWS)                                       \
  void NAME(const ARGS& args, int64_t begin, int64_t end) {                \
    switch (args.dtype) {                                                  \
      case DType::float32: return ROWS<float>(args, begin, end);           \
      case DType::bfloat16: return ROWS<bf16>(args, begin, end);           \
      case DType::float16: return ROWS<fp16>(args, begin, end);            \
    }                                                                      \
  }
QUIRE_ROWS(rms_norm, NormArgs, norm_rows)
QUIRE_ROWS(silu_and_mul, GateArgs, gate_rows)
QUIRE_ROWS(rotary, RotaryArgs, rotate_rows)

void attend(const AttentionArgs&, const Work&, const Work*, float*, float*);
void combine(const AttentionArgs&, const QueryTile&, int64_t, float*, const float*);

#define QUIRE_STRING(x) #x
#define QUIRE_NAME(x) QUIRE_STRING(x)

// The one thing that isa.cpp takes from here; a function, so that nothing of this object runs before it is chosen.
const KernelTable* table() {
  static constexpr KernelTable TABLE = {QUIRE_NAME(QUIRE_ISA), attend, combine, rms_norm, silu_and_mul, rotary};
  return &TABLE;
}

}  // namespace quire::QUIRE_ISA
