// Scores of a tile: rows of the query times 64 keys.
//
//   score[row, key] = the sum over lanes of  q[row, lane] * k[key, lane] + q[row, lane + W] * k[key, lane + W] + ...
//
// There are two ways to the same bits. For few rows every key is read once and multiplied as it lies there; the lanes
// of W keys are added up together. For many rows the keys are transposed first, so that a vector holds W keys, and what
// was a lane becomes a chain of its own; chains are added in the order in which lanes were.
#pragma once

#include "attention_words.h"

namespace quire::QUIRE_ISA {

// Keeps a vector in its register: the compiler would rather load it again each time.
QUIRE_INLINE void keep(vf& x) {
#if defined(__AVX512F__)
  asm("" : "+v"(x));
#endif
}

// The products of R rows with four keys, added up by fours. Keys are read one after the other: memory is fastest in the
// order of addresses. LINES: vectors of words of a row if they are all full, else 0.
template <class C, int R, int LINES>
QUIRE_INLINE void score_four(const float* q, int64_t q_stride, const vf (*x)[LINES > 0 ? LINES : 1], const C* const* k,
                             Ahead& ahead, int64_t dim, vf* out) {
  constexpr int per_word = Format<C>::per_word, step = W * per_word;
  vf acc[4][R];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const C* key = k[i];
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r) acc[i][r] = zero();
    if constexpr (LINES > 0) {
      ahead.template fetch<C, LINES>();
#pragma GCC unroll 8
      for (int line = 0; line < LINES; ++line) {
        const vf y = load_words(key + line * step, step);
#pragma GCC unroll 2
        for (int r = 0; r < R; ++r) acc[i][r] = multiply_add<per_word>(x[r][line], y, acc[i][r]);
      }
    } else {
      for (int64_t c = 0; c < dim; c += step) {
        const vf y = load_words(key + c, dim - c);
        ahead.template fetch<C, 1>();
#pragma GCC unroll 2
        for (int r = 0; r < R; ++r) {
          acc[i][r] = multiply_add<per_word>(load(q + r * q_stride + c / per_word), y, acc[i][r]);
        }
      }
    }
  }
#pragma GCC unroll 2
  for (int r = 0; r < R; ++r) out[r * (W / 4)] = sum_by_fours(acc[0][r], acc[1][r], acc[2][r], acc[3][r]);
}

// The first `last` keys, rounded up to whole vectors.
template <class C, int R, int LINES>
static void score_few(const float* q, int64_t q_stride, const C* const* k, Ahead& ahead, int64_t dim, int last,
                      float* s) {
  vf x[R][LINES > 0 ? LINES : 1];
#pragma GCC unroll 2
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int line = 0; line < LINES; ++line) {
      x[r][line] = load(q + r * q_stride + line * W);
      if constexpr (R * LINES <= 8) keep(x[r][line]);
    }
  for (int j = 0; j < last; j += W) {
    vf sums[R][W / 4];
#pragma GCC unroll 1
    for (int i = 0; i < W / 4; ++i) score_four<C, R, LINES>(q, q_stride, x, k + j + 4 * i, ahead, dim, &sums[0][i]);
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r) store(s + r * KEY_TILE + j, sum_of_fours(sums[r]));
  }
}

template <class C, int R>
static void score_few(const float* q, int64_t q_stride, const C* const* k, Ahead& ahead, int64_t dim, int last,
                      float* s) {
  constexpr int step = W * Format<C>::per_word;
  switch (dim % step == 0 ? dim / step : 0) {
    case 2: return score_few<C, R, 2>(q, q_stride, k, ahead, dim, last, s);
    case 4: return score_few<C, R, 4>(q, q_stride, k, ahead, dim, last, s);
    case 8: return score_few<C, R, 8>(q, q_stride, k, ahead, dim, last, s);
    default: return score_few<C, R, 0>(q, q_stride, k, ahead, dim, last, s);
  }
}

// For many rows: how many of them, and how many vectors of keys, go through the words together.
constexpr int SCORE_ROWS = 4;
constexpr int SCORE_VECTORS = W == 16 ? 2 : 1;
constexpr int PANEL = SCORE_VECTORS * W;

// Keys, transposed: packed[word * PANEL + key]; words up to whole vectors.
template <class C>
QUIRE_INLINE void pack_keys(const C* const* rows, Ahead& ahead, int64_t dim, float* packed) {
  constexpr int step = W * Format<C>::per_word;
  for (int v = 0; v < SCORE_VECTORS; ++v) {
    for (int64_t c = 0, line = 0; c < dim; c += step, ++line) {
      vf block[W];
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) block[i] = load_words(rows[v * W + i] + c, dim - c);
      ahead.template fetch<C, W>();
      transpose(block);
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) store(packed + (line * W + i) * PANEL + v * W, block[i]);
    }
  }
}

// One chain, that of the words w, w + W, w + 2 W ... < words.
template <int PER_WORD, int R>
QUIRE_INLINE void score_chain(const float* q, int64_t q_stride, const float* packed, int words, int w,
                              vf acc[R][SCORE_VECTORS]) {
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < SCORE_VECTORS; ++v) acc[r][v] = zero();
  for (; w < words; w += W) {
    vf k[SCORE_VECTORS];
#pragma GCC unroll 2
    for (int v = 0; v < SCORE_VECTORS; ++v) k[v] = load(packed + w * PANEL + v * W);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const vf a = set1(q[r * q_stride + w]);
#pragma GCC unroll 2
      for (int v = 0; v < SCORE_VECTORS; ++v) acc[r][v] = multiply_add<PER_WORD>(a, k[v], acc[r][v]);
    }
  }
}

// R rows times one panel; `words` is a multiple of W.
template <int PER_WORD, int R>
static void score_panel(const float* q, int64_t q_stride, const float* packed, int words, float* s) {
  vf total[W / 4][R][SCORE_VECTORS];
#pragma GCC unroll 4
  for (int four = 0; four < W / 4; ++four) {
    vf chain[R][SCORE_VECTORS], half[R][SCORE_VECTORS];
    const auto add_to = [](vf(*to)[SCORE_VECTORS], vf(*from)[SCORE_VECTORS]) {
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < SCORE_VECTORS; ++v) to[r][v] = to[r][v] + from[r][v];
    };
    score_chain<PER_WORD, R>(q, q_stride, packed, words, 4 * four, total[four]);
    score_chain<PER_WORD, R>(q, q_stride, packed, words, 4 * four + 2, chain);
    add_to(total[four], chain);
    score_chain<PER_WORD, R>(q, q_stride, packed, words, 4 * four + 1, half);
    score_chain<PER_WORD, R>(q, q_stride, packed, words, 4 * four + 3, chain);
    add_to(half, chain);
    add_to(total[four], half);
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < SCORE_VECTORS; ++v) {
      vf sum = total[0][r][v] + total[1][r][v];
      if constexpr (W == 16) sum = sum + (total[2][r][v] + total[3][r][v]);
      store(s + r * KEY_TILE + v * W, sum);
    }
}

}  // namespace quire::QUIRE_ISA
