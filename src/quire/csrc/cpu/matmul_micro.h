// The innermost loops of a product with packed weights: R prepared rows times the columns of a panel.
//
// Every element of the result is one chain of multiply-adds over the inputs in order. How many rows share a call
// changes nothing in it, so a row has the same bits alone and among others.
#pragma once

#include "matmul.h"
#include "matmul_integers.h"

namespace quire::QUIRE_ISA {

// Two vectors side by side: with AVX-512 a whole panel, else half of one. TILE_ROWS x 2 accumulators fit into the
// registers.
constexpr int TILE_ROWS = W == 16 ? 12 : 6;
constexpr int PASSES = PANEL_COLUMNS / (2 * W);  // over a panel

// What a call fetches into the second-level cache while it computes: `lines` lines for every WORDS_BETWEEN words, from
// `next` on. Few rows leave the processor's own prefetcher time enough; with many it is late, because so much
// arithmetic lies between two reads that the next ones are not even issued.
constexpr int WORDS_BETWEEN = 8;
constexpr int FEWEST_ROWS_TO_FETCH = 6;
struct Ahead {
  const char* next;
  int lines;
};
QUIRE_INLINE void fetch(Ahead& ahead) {
  for (int i = 0; i < ahead.lines; ++i) fetch_line(ahead.next + i * 64);
  ahead.next += ahead.lines * 64;
}

// The share of one of `tiles` tiles in fetching the `bytes` that follow a piece of `words` words.
QUIRE_INLINE Ahead ahead_of(const char* following, int64_t bytes, int64_t words, int64_t tile, int64_t tiles) {
  const int64_t calls = words / WORDS_BETWEEN;
  if (calls == 0) return {nullptr, 0};
  const int64_t lines = (bytes / 64 + calls * tiles - 1) / (calls * tiles);
  return {following + tile * calls * lines * 64, static_cast<int>(lines)};
}

// Sums of R rows in float32, a row of PANEL_COLUMNS after the other.
struct Sums {
  float* at;
  bool are_new;  // else they go on
};

struct Float32 {
  QUIRE_INLINE vf multiply_add(vf a, vf b, vf c) { return fma(a, b, c); }
};
#if defined(QUIRE_MULTIPLIES_PAIRS)
struct BFloat16 {
  QUIRE_INLINE vf multiply_add(vf a, vf b, vf c) { return fma_pairs(a, b, c); }
};
#endif

template <class A, int R>
static void add_products(const float* x, const float* words, int64_t num_words, Sums sums, Ahead ahead) {
  vf acc[R][2];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) acc[r][v] = sums.are_new ? zero() : load(sums.at + r * PANEL_COLUMNS + v * W);
  const auto add_word = [&](int64_t i) __attribute__((always_inline)) {
    const vf w[2] = {load(words + i * PANEL_COLUMNS), load(words + i * PANEL_COLUMNS + W)};
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const vf a = set1(x[i * R + r]);
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) acc[r][v] = A::multiply_add(a, w[v], acc[r][v]);
    }
  };
  int64_t i = 0;
  for (; i + WORDS_BETWEEN <= num_words; i += WORDS_BETWEEN) {
    fetch(ahead);
#pragma GCC unroll 2
    for (int k = 0; k < WORDS_BETWEEN; ++k) add_word(i + k);
  }
  for (; i < num_words; ++i) add_word(i);
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) store(sums.at + r * PANEL_COLUMNS + v * W, acc[r][v]);
}

}  // namespace quire::QUIRE_ISA
