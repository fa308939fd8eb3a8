// The online softmax of one row over one tile of keys: scores in, weights out.
#pragma once

#include "attention_scores.h"

namespace quire::QUIRE_ISA {

// 2^x for x <= 0, exactly 1 at 0, NaN stays NaN. Relative error 1e-7, or 3e-6 where the result is rounded to bfloat16.
// The coefficients are minimax for 2^r on [0, 1), the first fixed.
template <int PER_WORD> QUIRE_INLINE vf exp2(vf x) {
#if defined(__AVX512F__)
  const vf r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // x - floor(x)
#else
  const vf in = max(set1(-126.0f), x), n = floor(in), r = in - n;
#endif
  vf p;
  if constexpr (PER_WORD == 2) {
    p = set1(0.0134266847f);
    p = fma(p, r, set1(0.0522424728f));
    p = fma(p, r, set1(0.241280198f));
    p = fma(p, r, set1(0.693044841f));
  } else {
    p = set1(0.000216129149f);
    p = fma(p, r, set1(0.0012467847f));
    p = fma(p, r, set1(0.00967545155f));
    p = fma(p, r, set1(0.0554852821f));
    p = fma(p, r, set1(0.240229309f));
    p = fma(p, r, set1(0.693147063f));
  }
  p = fma(p, r, set1(1.0f));
#if defined(__AVX512F__)
  return _mm512_scalef_ps(p, x);  // times 2^floor(x)
#else
  return zero_below(scale_by_power(p, n), x, -126.0f);
#endif
}

QUIRE_INLINE float exp2_of(float x) {
  float lanes[W];
  store(lanes, exp2<1>(set1(x)));
  return lanes[0];
}

struct Softmax {
  float scale, soft_cap;  // for logarithms of base 2; no cap: 0
  const float *k_scales, *v_scales;  // of the keys of the tile, for codes
  const float* positions;            // of the keys of the tile, for slopes
  float slope;                       // of the head of the row; 0: none
  const float* bias;                 // of the keys of the tile, for logarithms of base 2; null: none
};

// Keys [first, last) of the tile are seen. Returns the factor for what was summed before.
template <class C, bool IS_MASKED>
QUIRE_INLINE float softmax_row(const Softmax& softmax, float* s, int first, int last, float* maximum, float* sum) {
  constexpr int per_word = Format<C>::per_word, N = KEY_TILE / W;
  const vf lowest = set1(-__builtin_inff());
  vf x[N];
#pragma GCC unroll 8
  for (int v = 0; v < N; ++v) {
    x[v] = load(s + v * W) * set1(softmax.scale);
    if constexpr (Format<C>::has_scales) x[v] = x[v] * load(softmax.k_scales + v * W);
    if (softmax.soft_cap > 0) {
      x[v] = set1(softmax.soft_cap) * tanh(x[v] / set1(softmax.soft_cap));
    }
    if (softmax.slope != 0) x[v] = fma(set1(softmax.slope), load(softmax.positions + v * W), x[v]);
    if (softmax.bias != nullptr) x[v] = x[v] + load(softmax.bias + v * W);
    if constexpr (IS_MASKED) x[v] = keep_lanes(x[v], first - v * W, last - v * W, lowest);
  }
  vf top = x[0];
#pragma GCC unroll 8
  for (int v = 1; v < N; ++v) top = max(top, x[v]);
  const float before = *maximum, tile_maximum = hmax(top);
  const float now = tile_maximum > before ? tile_maximum : before;
  // A row that has seen nothing yet: 2^(-inf - 0) is 0, 2^(-inf - -inf) would be NaN.
  const float shift = now == -__builtin_inff() ? 0.0f : now;
  float correction = 1.0f;
  if (now != before) {
    correction = before == -__builtin_inff() ? 0.0f : exp2_of(before - shift);
    *maximum = now;
  }
  vf total = zero();
#pragma GCC unroll 8
  for (int v = 0; v < N; ++v) {
    x[v] = exp2<per_word>(x[v] - set1(shift));
    if constexpr (IS_MASKED) x[v] = keep_lanes(x[v], first - v * W, last - v * W, zero());
  }
#pragma GCC unroll 8
  for (int v = 0; v < N; v += 2) total = total + (x[v] + x[v + 1]);
  *sum = *sum * correction + sum_lanes(total);
  if constexpr (Format<C>::has_scales) {
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) x[v] = x[v] * (load(softmax.v_scales + v * W) * set1(Format<C>::factor_in));
  }
#pragma GCC unroll 8
  for (int v = 0; v < N; v += per_word) store_words<per_word>(s + v / per_word * W, x + v);
  return correction;
}

}  // namespace quire::QUIRE_ISA
