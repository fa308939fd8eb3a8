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
  const int64_t width = args.width;
  int64_t token = begin, inner = 0;
  for (int64_t row = begin * args.inner; row < end * args.inner; ++row) {
    const T* x = static_cast<const T*>(args.x) + token * args.x_token_stride + inner * args.x_inner_stride;
    T* out = static_cast<T*>(args.out) + row * width;
    if (args.residual != nullptr) {
      const T* residual = static_cast<const T*>(args.residual) + token * args.residual_token_stride +
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
    if (++inner == args.inner) inner = 0, ++token;
  }
}

// What a gated norm takes the norm of, W elements of it.
template <class T, bool GATES_FIRST> QUIRE_INLINE vf normed_part(const T* x, const T* gate, int64_t n) {
  const vf v = load_upto(x, n);
  if (!GATES_FIRST) return v;
  const vf g = load_upto(gate, n);
  return v * (g / (set1(1.0f) + exp(zero() - g)));
}

template <class T, bool GATES_FIRST> void gated_norm_row(const GatedNormArgs& args, const T* x, const T* gate,
                                                         const T* weight, T* out) {
  const int64_t width = args.width;
  vf sum = zero();
  for (int64_t i = 0; i < width; i += W) {
    const vf v = normed_part<T, GATES_FIRST>(x + i, gate + i, width - i);
    sum = fma(v, v, sum);
  }
  const vf scale = set1(1.0f / __builtin_sqrtf(hsum(sum) / static_cast<float>(width) + args.eps));
  for (int64_t i = 0; i < width; i += W) {
    const int64_t n = width - i;
    const vf normed = rounded(x, normed_part<T, GATES_FIRST>(x + i, gate + i, n) * scale);
    vf result = load_upto(weight + i, n) * normed;
    if (!GATES_FIRST) {
      const vf g = load_upto(gate + i, n);
      result = rounded(x, result) * (g / (set1(1.0f) + exp(zero() - g)));
    }
    store_upto(out + i, result, n);
  }
}

template <class T> void gated_norm_rows(const GatedNormArgs& args, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    for (int64_t i = 0; i < args.inner; ++i) {
      const T* x = static_cast<const T*>(args.x) + t * args.x_token_stride + i * args.x_inner_stride;
      const T* gate = static_cast<const T*>(args.gate) + t * args.gate_token_stride + i * args.gate_inner_stride;
      const T* weight = static_cast<const T*>(args.weight) + i * args.weight_stride;
      T* out = static_cast<T*>(args.out) + (t * args.inner + i) * args.width;
      if (args.gates_first) gated_norm_row<T, true>(args, x, gate, weight, out);
      else gated_norm_row<T, false>(args, x, gate, weight, out);
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

// What is loaded comes second in min and max, so that NaN stays NaN.
template <class T> void clamped_gate_rows(const GateArgs& args, int64_t begin, int64_t end) {
  const int64_t width = args.width;
  const vf most = set1(args.limit), least = set1(-args.limit), one = set1(1.0f);
  for (int64_t row = begin; row < end; ++row) {
    const T* gate = static_cast<const T*>(args.x) + row * args.x_stride;
    const T* up = gate + width;
    T* out = static_cast<T*>(args.out) + row * width;
    for (int64_t i = 0; i < width; i += W) {
      const vf g = min(most, load_upto(gate + i, width - i));
      const vf u = max(least, min(most, load_upto(up + i, width - i)));
      const vf glu = g / (one + exp(zero() - g * set1(args.alpha)));
      store_upto(out + i, glu * (u + one), width - i);
    }
  }
}

template <class T> void rotate_pairs(const RotaryArgs& args, int64_t begin, int64_t end) {
  const int64_t half = args.half, width = 2 * half;
  for (int64_t t = begin; t < end; ++t) {
    const float* cos = args.cos_sin + args.positions[t] * args.cos_sin_stride;
    for (int64_t h = 0; h < args.heads; ++h) {
      T* x = static_cast<T*>(args.x) + t * args.token_stride + h * args.head_stride;
      for (int64_t i = 0; i < width; i += W) {
        const int64_t n = width - i, num_angles = min64(W, n) / 2;
        const vf a = load_upto(x + i, n);
        const vf c = spread_pairs(load_upto(cos + i / 2, num_angles));
        const vf s = spread_pairs(load_upto(cos + half + i / 2, num_angles));
        store_upto(x + i, fma_subtract_add(a, c, swap_pairs(a) * s), n);
      }
    }
  }
}

template <class T> void rotate_rows(const RotaryArgs& args, int64_t begin, int64_t end) {
  if (args.is_interleaved) return rotate_pairs<T>(args, begin, end);
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

template <class T> void pair_rows(const PairArgs& args, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    const T* x = static_cast<const T*>(args.x) + t * args.x_stride;
    const T* y = static_cast<const T*>(args.y) + t * args.y_stride;
    T* out = static_cast<T*>(args.out) + t * args.width;
    for (int64_t i = 0; i < args.width; i += W) {
      const int64_t n = args.width - i;
      const vf a = load_upto(x + i, n), b = load_upto(y + i, n);
      store_upto(out + i, args.is_product ? a * b : a + b, n);
    }
  }
}

template <class From, class To> void convert_rows_to(const ConvertArgs& args, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    const From* x = static_cast<const From*>(args.x) + t * args.x_stride;
    To* out = static_cast<To*>(args.out) + t * args.width;
    for (int64_t i = 0; i < args.width; i += W) store_upto(out + i, load_upto(x + i, args.width - i), args.width - i);
  }
}

template <class From> void convert_rows(const ConvertArgs& args, int64_t begin, int64_t end) {
  switch (args.to) {
    case DType::float32: return convert_rows_to<From, float>(args, begin, end);
    case DType::bfloat16: return convert_rows_to<From, bf16>(args, begin, end);
    case DType::float16: return convert_rows_to<From, fp16>(args, begin, end);
  }
}

void convert(const ConvertArgs& args, int64_t begin, int64_t end) {
  switch (args.from) {
    case DType::float32: return convert_rows<float>(args, begin, end);
    case DType::bfloat16: return convert_rows<bf16>(args, begin, end);
    case DType::float16: return convert_rows<fp16>(args, begin, end);
  }
}

template <class T> void scale_rows(const ScaleArgs& args, int64_t begin, int64_t end) {
  const vf factor = set1(args.factor);
  for (int64_t t = begin; t < end; ++t) {
    const T* x = static_cast<const T*>(args.x) + t * args.x_stride;
    T* out = static_cast<T*>(args.out) + t * args.width;
    for (int64_t i = 0; i < args.width; i += W) {
      const vf v = load_upto(x + i, args.width - i);
      store_upto(out + i, args.is_division ? v / factor : v * factor, args.width - i);
    }
  }
}

// The error function to 1.5e-7 (Abramowitz and Stegun, 7.1.26).
QUIRE_INLINE vf erf(vf x) {
  const vf size = max(x, zero() - x), t = set1(1.0f) / fma(set1(0.3275911f), size, set1(1.0f));
  vf p = set1(1.061405429f);
  p = fma(p, t, set1(-1.453152027f));
  p = fma(p, t, set1(1.421413741f));
  p = fma(p, t, set1(-0.284496736f));
  p = fma(p, t, set1(0.254829592f));
  const vf positive = set1(1.0f) - p * t * exp(zero() - size * size);
  return zero_below(positive, x, 0.0f) - zero_below(positive, zero() - x, 0.0f);
}

QUIRE_INLINE vf activated(Activation kind, vf x) {
  const vf one = set1(1.0f), half = set1(0.5f);
  switch (kind) {
    case Activation::relu: return max(zero(), x);  // this order of arguments keeps NaN
    case Activation::silu: return x / (one + exp(zero() - x));
    case Activation::sigmoid: return one / (one + exp(zero() - x));
    case Activation::tanh: return tanh(x);
    case Activation::gelu: return half * x * (one + erf(x * set1(0.70710678f)));
    case Activation::gelu_tanh:
      return half * x * (one + tanh(set1(0.79788456f) * fma(set1(0.044715f) * x * x, x, x)));
  }
  return x;
}

template <class T> void activate_rows(const ActivationArgs& args, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    const T* x = static_cast<const T*>(args.x) + t * args.x_stride;
    T* out = static_cast<T*>(args.out) + t * args.width;
    for (int64_t i = 0; i < args.width; i += W) {
      store_upto(out + i, activated(args.kind, load_upto(x + i, args.width - i)), args.width - i);
    }
  }
}

// Sum of x - shift, or of its square, over the elements of a row.
template <class T, bool IS_SQUARE> QUIRE_INLINE float sum_of(const T* x, int64_t width, float shift) {
  vf sum = zero();
  for (int64_t i = 0; i < width; i += W) {
    vf v = load_upto(x + i, width - i) - set1(shift);
    if (width - i < W) v = keep_lanes(v, 0, static_cast<int>(width - i), zero());
    sum = IS_SQUARE ? fma(v, v, sum) : sum + v;
  }
  return hsum(sum);
}

template <class T> void layer_norm_rows(const LayerNormArgs& args, int64_t begin, int64_t end) {
  const T *weight = static_cast<const T*>(args.weight), *bias = static_cast<const T*>(args.bias);
  for (int64_t t = begin; t < end; ++t) {
    const T* x = static_cast<const T*>(args.x) + t * args.x_stride;
    T* out = static_cast<T*>(args.out) + t * args.width;
    const float mean = sum_of<T, false>(x, args.width, 0.0f) / args.width;
    const float variance = sum_of<T, true>(x, args.width, mean) / args.width;
    const vf scale = set1(1.0f / __builtin_sqrtf(variance + args.eps));
    for (int64_t i = 0; i < args.width; i += W) {
      const int64_t n = args.width - i;
      vf v = (load_upto(x + i, n) - set1(mean)) * scale;
      if (weight != nullptr) v = v * load_upto(weight + i, n);
      if (bias != nullptr) v = v + load_upto(bias + i, n);
      store_upto(out + i, v, n);
    }
  }
}

template <class T> void weigh_rows(const WeighArgs& args, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    const T* x = static_cast<const T*>(args.x) + t * args.x_token_stride;
    const float* weights = args.weights + t * args.top_k;
    T* out = static_cast<T*>(args.out) + t * args.width;
    for (int64_t i = 0; i < args.width; i += W) {
      vf sum = zero();
      for (int64_t k = 0; k < args.top_k; ++k) {
        sum = fma(load_upto(x + k * args.x_row_stride + i, args.width - i), set1(weights[k]), sum);
      }
      store_upto(out + i, sum, args.width - i);
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
QUIRE_ROWS(gated_norm, GatedNormArgs, gated_norm_rows)
QUIRE_ROWS(scale, ScaleArgs, scale_rows)
QUIRE_ROWS(silu_and_mul, GateArgs, gate_rows)
QUIRE_ROWS(clamped_swiglu, GateArgs, clamped_gate_rows)
QUIRE_ROWS(rotary, RotaryArgs, rotate_rows)
QUIRE_ROWS(combine_pair, PairArgs, pair_rows)
QUIRE_ROWS(activate, ActivationArgs, activate_rows)
QUIRE_ROWS(layer_norm, LayerNormArgs, layer_norm_rows)
QUIRE_ROWS(weigh_experts, WeighArgs, weigh_rows)

extern const AdapterKernels adapter_kernels;
extern const AttentionKernels attention_kernels;
extern const MatmulKernels matmul_kernels;
extern const RecurrentKernels recurrent_kernels;
extern const SamplingKernels sampling_kernels;

#define QUIRE_STRING(x) #x
#define QUIRE_NAME(x) QUIRE_STRING(x)

// The one thing that isa.cpp takes from here; a function, so that nothing of this object runs before it is chosen.
const KernelTable* table() {
  static constexpr KernelTable TABLE = {QUIRE_NAME(QUIRE_ISA), rms_norm, gated_norm, silu_and_mul, clamped_swiglu, rotary,
                                        combine_pair, convert, scale, activate, layer_norm, weigh_experts, &adapter_kernels,
                                        &attention_kernels, &matmul_kernels, &recurrent_kernels, &sampling_kernels};
  return &TABLE;
}

}  // namespace quire::QUIRE_ISA
