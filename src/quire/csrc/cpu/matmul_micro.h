// The innermost loops of a product with packed weights: R prepared rows times the columns of a panel.
//
// Every element of the result is one chain of multiply-adds over the inputs in order. How many rows share a call
// changes nothing in it, so a row has the same bits alone and among others.
#pragma once

#include "matmul.h"
#include "matmul_integers.h"
#include "tuning.h"

namespace quire::QUIRE_ISA {

// Two vectors side by side: with AVX-512 a whole panel, else half of one. TILE_ROWS x 2 accumulators fit into the
// registers.
constexpr int TILE_ROWS = W == 16 ? 12 : 6;
constexpr int PASSES = PANEL_COLUMNS / (2 * W);  // over a panel
// Rows whose sums fit into the registers for MOST_PANELS panels as well.
constexpr int MOST_ROWS_OF_PANELS = W == 16 ? 3 : 1;

// What a call fetches into the second-level cache while it computes: `lines` lines for every WORDS_BETWEEN words, from
// `next` on. Few rows leave the processor's own prefetcher time enough; with many it is late, because so much
// arithmetic lies between two reads that the next ones are not even issued.
constexpr int WORDS_BETWEEN = 8;
struct Ahead {
  const char* next;
  int lines;
};
template <int P = 1> QUIRE_INLINE void fetch(Ahead& ahead, int64_t panel_bytes = 0) {
#pragma GCC unroll 4
  for (int p = 0; p < P; ++p)
    for (int i = 0; i < ahead.lines; ++i) fetch_line(ahead.next + p * panel_bytes + i * 64);
  ahead.next += ahead.lines * 64;
}

// The share of one of `tiles` tiles in fetching the `bytes` that follow a piece of `words` words.
QUIRE_INLINE Ahead ahead_of(const char* following, int64_t bytes, int64_t words, int64_t tile, int64_t tiles) {
  const int64_t calls = words / WORDS_BETWEEN;
  if (calls == 0) return {nullptr, 0};
  const int64_t lines = (bytes / 64 + calls * tiles - 1) / (calls * tiles);
  return {following + tile * calls * lines * 64, static_cast<int>(lines)};
}

// What one tile fetches of the words of `word_bytes` that it walks through, some distance before it reaches them. What
// follows the weight is most often the next one.
QUIRE_INLINE Ahead ahead_by(const char* words, int64_t distance, int64_t word_bytes) {
  return {words + distance, distance > 0 ? static_cast<int>(WORDS_BETWEEN * word_bytes / 64) : 0};
}

// Sums of R rows in float32, a row of PANEL_COLUMNS after the other; those of the next panel follow.
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

// P panels, `panel_bytes` from one to the next.
template <class A, int R, int P = 1>
static void add_products(const float* x, const float* words, int64_t panel_bytes, int64_t num_words, Sums sums,
                         Ahead ahead) {
  const int64_t stride = panel_bytes / 4;
  vf acc[P * R][2];
#pragma GCC unroll 12
  for (int r = 0; r < P * R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) acc[r][v] = sums.are_new ? zero() : load(sums.at + r * PANEL_COLUMNS + v * W);
  const auto add_word = [&](int64_t i) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      const float* word = words + p * stride + i * PANEL_COLUMNS;
      const vf w[2] = {load(word), load(word + W)};
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const vf a = set1(x[i * R + r]);
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) acc[p * R + r][v] = A::multiply_add(a, w[v], acc[p * R + r][v]);
      }
    }
  };
  int64_t i = 0;
  for (; i + WORDS_BETWEEN <= num_words; i += WORDS_BETWEEN) {
    fetch<P>(ahead, panel_bytes);
#pragma GCC unroll 2
    for (int k = 0; k < WORDS_BETWEEN; ++k) add_word(i + k);
  }
  for (; i < num_words; ++i) add_word(i);
#pragma GCC unroll 12
  for (int r = 0; r < P * R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) store(sums.at + r * PANEL_COLUMNS + v * W, acc[r][v]);
}

}  // namespace quire::QUIRE_ISA
