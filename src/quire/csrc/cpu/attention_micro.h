// The two matrix products of attention for a tile of query rows and 64 keys, and the packing that feeds them.
//
//   scores  [rows, 64] = Q [rows, words] x K^T [words, 64]     a word is a float, or two bfloat16 for vdpbf16ps
//   values  [rows, E]  = values * correction + P [rows, 64] x V [64, E]
//
// A row's arithmetic does not depend on how many rows share the call: every score is one chain of fused multiply-adds
// over the words, every value one chain over the keys. So a token gets the same bits alone or in a chunk.
#pragma once

#include "attention_args.h"
#include "simd.h"

namespace quire::QUIRE_ISA {

constexpr int ROWS_AT_ONCE = 6;
constexpr int PANEL = NV * W;  // keys that one call of the micro-kernel handles

// How keys of type T are packed: two bfloat16 to a word where the processor multiplies such pairs, else as floats.
template <class T> struct Words {
  static constexpr int per_word = 1;
  QUIRE_INLINE vf load_some(const T* p, int64_t n) { return load_upto(p, n); }
  QUIRE_INLINE vf multiply_add(vf a, vf b, vf c) { return fma(a, b, c); }
};
#if defined(__AVX512BF16__)
template <> struct Words<bf16> {
  static constexpr int per_word = 2;
  QUIRE_INLINE vf load_some(const bf16* p, int64_t n) {
    if (n >= W) return _mm512_loadu_ps(p);
    return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p);
  }
  QUIRE_INLINE vf multiply_add(vf a, vf b, vf c) { return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b); }
};
#endif

// A hardware prefetcher stops at the end of a page, and blocks are scattered over pages. So the work on one tile asks
// for the rows of the next, a few lines at a time between other work: requests that queue up would stall it. They go in
// the order of addresses, which wakes the hardware prefetcher for the rest of the page, and into the second-level
// cache: the first holds what this tile works on.
template <class T> QUIRE_INLINE void prefetch(const T* p, int64_t elements) {
  constexpr int64_t per_line = 64 / sizeof(T);
  for (int64_t i = 0; i < elements; i += per_line) _mm_prefetch(reinterpret_cast<const char*>(p + i), _MM_HINT_T1);
}

// Of each W rows of keys ahead, this many are fetched while scores are computed, the others while keys are packed.
constexpr int LATER = W / 4;

// Keys of W rows, transposed: packed[word * PANEL + key].
template <class T> QUIRE_INLINE void pack_keys(const T* const* rows, const T* const* ahead, int words, float* packed) {
  constexpr int per_word = Words<T>::per_word;
  for (int w0 = 0, fetched = 0; w0 < words; w0 += W) {
    vf block[W];
    const int n = words - w0;
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) block[i] = Words<T>::load_some(rows[i] + w0 * per_word, n);
    for (; fetched * words < (w0 + W) * (W - LATER) && fetched < W - LATER; ++fetched) {
      prefetch(ahead[fetched], words * per_word);
    }
    transpose(block);
    if (n >= W) {
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) store(packed + (w0 + i) * PANEL, block[i]);
    } else {
      for (int i = 0; i < n; ++i) store(packed + (w0 + i) * PANEL, block[i]);
    }
  }
}

template <class T, int R>
QUIRE_INLINE void score_rows(const float* q, int64_t q_stride, const float* packed, const T* const* ahead, int words,
                             float* s) {
  vf acc[R][NV];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) acc[r][v] = zero();
  for (int w = 0, fetched = 0; w < words; ++w) {
    for (; ahead != nullptr && fetched * words < (w + 1) * LATER * NV && fetched < LATER * NV; ++fetched) {
      prefetch(ahead[fetched / LATER * W + W - LATER + fetched % LATER], words * Words<T>::per_word);
    }
    vf k[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) k[v] = load(packed + w * PANEL + v * W);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const vf a = set1(q[r * q_stride + w]);
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) acc[r][v] = Words<T>::multiply_add(a, k[v], acc[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) store(s + r * KEY_TILE + v * W, acc[r][v]);
}

template <class T>
static void score(const float* q, int64_t q_stride, int rows, const float* packed, const T* const* ahead, int words,
                  float* s) {
  int r = 0;
  for (; r + ROWS_AT_ONCE <= rows; r += ROWS_AT_ONCE) {
    score_rows<T, ROWS_AT_ONCE>(q + r * q_stride, q_stride, packed, ahead, words, s + r * KEY_TILE);
    ahead = nullptr;  // fetched
  }
  q += r * q_stride;
  s += r * KEY_TILE;
  switch (rows - r) {
    case 1: return score_rows<T, 1>(q, q_stride, packed, ahead, words, s);
    case 2: return score_rows<T, 2>(q, q_stride, packed, ahead, words, s);
    case 3: return score_rows<T, 3>(q, q_stride, packed, ahead, words, s);
    case 4: return score_rows<T, 4>(q, q_stride, packed, ahead, words, s);
    case 5: return score_rows<T, 5>(q, q_stride, packed, ahead, words, s);
    default: return;
  }
}

// Values of keys [first, last) weighted and added, N vectors of R rows from `column` on. `v[j]` is the row of key j.
template <class T, int R, int N>
QUIRE_INLINE void add_values_block(const float* p, const float* correction, const T* const* v, const T* const* ahead,
                                   int first, int last, int64_t column, int64_t width, float* o, int64_t o_stride) {
  // The columns so far have fetched this much of the rows ahead, laid end to end.
  int64_t row = first + column * (last - first) / width, place = column * (last - first) % width;
  vf acc[R][N];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) acc[r][n] = load(o + r * o_stride + column + n * W) * set1(correction[r]);
  for (int j = first; j < last; ++j) {
    vf x[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) x[n] = load(v[j] + column + n * W);
    if (ahead != nullptr) {
      prefetch(ahead[row < last ? row : first] + place, N * W);
      place += N * W;
      if (place >= width) place -= width, ++row;
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const vf a = set1(p[r * KEY_TILE + j]);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) acc[r][n] = fma(a, x[n], acc[r][n]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) store(o + r * o_stride + column + n * W, acc[r][n]);
}

template <class T, int R>
static void add_values_rows(const float* p, const float* correction, const T* const* v, const T* const* ahead,
                            int first, int last, int64_t width, float* o, int64_t o_stride) {
  int64_t c = 0;
  for (; c + NV * W <= width; c += NV * W)
    add_values_block<T, R, NV>(p, correction, v, ahead, first, last, c, width, o, o_stride);
  for (; c < width; c += W) add_values_block<T, R, 1>(p, correction, v, ahead, first, last, c, width, o, o_stride);
}

// `width` is a multiple of W; rows of `o` and of `p` are o_stride and KEY_TILE floats long.
template <class T>
static void add_values(const float* p, const float* correction, int rows, const T* const* v, const T* const* ahead,
                       int first, int last, int64_t width, float* o, int64_t o_stride) {
  int r = 0;
  for (; r + ROWS_AT_ONCE <= rows; r += ROWS_AT_ONCE)
    add_values_rows<T, ROWS_AT_ONCE>(p + r * KEY_TILE, correction + r, v, ahead, first, last, width,
                                     o + r * o_stride, o_stride);
  p += r * KEY_TILE;
  correction += r;
  o += r * o_stride;
  switch (rows - r) {
    case 1: return add_values_rows<T, 1>(p, correction, v, ahead, first, last, width, o, o_stride);
    case 2: return add_values_rows<T, 2>(p, correction, v, ahead, first, last, width, o, o_stride);
    case 3: return add_values_rows<T, 3>(p, correction, v, ahead, first, last, width, o, o_stride);
    case 4: return add_values_rows<T, 4>(p, correction, v, ahead, first, last, width, o, o_stride);
    case 5: return add_values_rows<T, 5>(p, correction, v, ahead, first, last, width, o, o_stride);
    default: return;
  }
}

// The online softmax of one row over one tile: scores in, weights out. Returns the factor for what was summed before.
struct RowState {
  float maximum;
  float sum[W];  // by lane; added up once per partition
};

QUIRE_INLINE float softmax_row(float* s, int first, int last, float scale, float soft_cap, RowState* state) {
  const vf lowest = set1(-__builtin_inff());
  vf top = lowest;
  vf x[KEY_TILE / W];
#pragma GCC unroll 8
  for (int v = 0; v < KEY_TILE / W; ++v) {
    x[v] = load(s + v * W) * set1(scale);
    if (soft_cap > 0) x[v] = set1(soft_cap) * tanh(x[v] / set1(soft_cap));
    if (v * W < first || v * W + W > last) x[v] = keep_lanes(x[v], first - v * W, last - v * W, lowest);
    top = max(top, x[v]);
  }
  const float before = state->maximum;
  const float tile_maximum = hmax(top);
  const float maximum = tile_maximum > before ? tile_maximum : before;
  // A row that has seen nothing yet: exp(-inf - 0) is 0, exp(-inf - -inf) would be NaN.
  const vf shift = set1(maximum == -__builtin_inff() ? 0.0f : maximum);
  float correction = 1.0f;
  if (maximum != before) {
    float lanes[W];
    store(lanes, exp(set1(before) - shift));
    correction = lanes[0];
    state->maximum = maximum;
  }
  vf sum = load(state->sum) * set1(correction);
#pragma GCC unroll 8
  for (int v = 0; v < KEY_TILE / W; ++v) {
    const vf e = exp(x[v] - shift);
    store(s + v * W, e);
    sum = sum + e;
  }
  store(state->sum, sum);
  return correction;
}

}  // namespace quire::QUIRE_ISA
