// Weighted values of a tile:  sum[row] = sum[row] * correction[row] + p[row, 64 keys] * v[64 keys]
//
// Every sum is one chain over the keys in their order (over pairs of keys where words are pairs). The weights are words
// too: p[row][key / PER_WORD]. Sums lie as `interleave` leaves them; `in_order` is for the end.
#pragma once

#include "attention_words.h"

namespace quire::QUIRE_ISA {

// The sums of R rows in N vectors, from memory and back.
template <int R, int N>
QUIRE_INLINE void load_sums(const float* o, int64_t o_stride, const float* correction, vf acc[R][N]) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) acc[r][n] = load(o + r * o_stride + n * W) * set1(correction[r]);
}
template <int R, int N> QUIRE_INLINE void store_sums(float* o, int64_t o_stride, const vf acc[R][N]) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) store(o + r * o_stride + n * W, acc[r][n]);
}

// Few rows: values as they lie in the cache, L loads of each key from column c on, of which n columns are there. Keys
// are read one after the other, in the order of addresses.
template <class C, int R, int L>
QUIRE_INLINE void add_few_block(const float* p, const float* correction, const C* const* v, Ahead& ahead, int first,
                                int last, int64_t c, int64_t n, float* o, int64_t o_stride) {
  constexpr int per_word = Format<C>::per_word, N = L * per_word, step = W * per_word;
  vf acc[R][N];
  load_sums<R, N>(o + c, o_stride, correction, acc);
  for (int j = first / per_word * per_word; j < last; j += per_word) {
    vf x[per_word][L];
    ahead.template fetch<C, N>();
#pragma GCC unroll 2
    for (int i = 0; i < per_word; ++i)
#pragma GCC unroll 8
      for (int l = 0; l < L; ++l) x[i][l] = load_words(v[j + i] + c + l * step, n - l * step);
#pragma GCC unroll 8
    for (int l = 0; l < L; ++l) {
      vf y[per_word];
      if constexpr (per_word == 2) interleave(x[0][l], x[1][l], y);
      else y[0] = x[0][l];
#pragma GCC unroll 2
      for (int r = 0; r < R; ++r) {
        const vf a = set1(p[r * KEY_TILE + j / per_word]);
#pragma GCC unroll 2
        for (int i = 0; i < per_word; ++i)
          acc[r][l * per_word + i] = multiply_add<per_word>(a, y[i], acc[r][l * per_word + i]);
      }
    }
  }
  store_sums<R, N>(o + c, o_stride, acc);
}

template <class C, int R>
static void add_few(const float* p, const float* correction, const C* const* v, Ahead& ahead, int first, int last,
                    int64_t width, float* o, int64_t o_stride) {
  constexpr int per_word = Format<C>::per_word, step = W * per_word, L = W / 2 / per_word;  // 8 vectors of sums, or 4
  int64_t c = 0;
  for (; c + L * step <= width; c += L * step)
    add_few_block<C, R, L>(p, correction, v, ahead, first, last, c, L * step, o, o_stride);
  for (; c < width; c += step)
    add_few_block<C, R, 1>(p, correction, v, ahead, first, last, c, width - c, o, o_stride);
}

// For many rows: how many of them go through the keys together; with NV vectors their sums fill the registers.
constexpr int VALUE_ROWS = 6;

// Values of the tile as words: packed[key / PER_WORD][columns, interleaved].
template <class C>
static void pack_values(const C* const* v, Ahead& ahead, int first, int last, int64_t width, float* packed,
                        int64_t stride) {
  constexpr int per_word = Format<C>::per_word, step = W * per_word;
  for (int j = first / per_word * per_word; j < last; j += per_word) {
    float* to = packed + j / per_word * stride;
    for (int64_t c = 0; c < width; c += step) {
      vf row[per_word], x[per_word];
      ahead.template fetch<C, per_word>();
#pragma GCC unroll 2
      for (int i = 0; i < per_word; ++i) {
        row[i] = load_words(v[j + i] + c, width - c);
      }
      if constexpr (per_word == 2) interleave(row[0], row[1], x);
      else x[0] = row[0];
#pragma GCC unroll 2
      for (int i = 0; i < per_word; ++i) store(to + c + i * W, x[i]);
    }
  }
}

// Words [first, last) of packed values, N vectors of R rows.
template <int PER_WORD, int R, int N>
QUIRE_INLINE void add_packed_block(const float* p, const float* correction, const float* packed, int64_t stride,
                                   int first, int last, float* o, int64_t o_stride) {
  vf acc[R][N];
  load_sums<R, N>(o, o_stride, correction, acc);
  for (int j = first; j < last; ++j) {
    vf x[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) x[n] = load(packed + j * stride + n * W);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const vf a = set1(p[r * KEY_TILE + j]);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) acc[r][n] = multiply_add<PER_WORD>(a, x[n], acc[r][n]);
    }
  }
  store_sums<R, N>(o, o_stride, acc);
}

// `stride` is the padded width, that of sums and of packed values.
template <int PER_WORD, int R>
static void add_packed(const float* p, const float* correction, const float* packed, int64_t stride, int first,
                       int last, float* o) {
  int64_t c = 0;
  for (; c + NV * W <= stride; c += NV * W)
    add_packed_block<PER_WORD, R, NV>(p, correction, packed + c, stride, first, last, o + c, stride);
  for (; c < stride; c += W)
    add_packed_block<PER_WORD, R, 1>(p, correction, packed + c, stride, first, last, o + c, stride);
}

}  // namespace quire::QUIRE_ISA
