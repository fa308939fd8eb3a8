// Numbers that decide how fast products and attention are and nothing else: every choice gives the same bits.
//
// The choices stand in tuning.cpp, the default first. worker/kernels/cpu/tuning.py measures which of them this processor
// likes and sets them before anything is computed; the kernels only read.
#pragma once

#include <cstdint>

#include "matmul.h"

namespace quire {

// Panels that are walked side by side at most, with one tile of few rows.
constexpr int MOST_PANELS = 4;

// A number for each kind of what panels hold: floats, codes of 8 bits, codes of fewer.
struct ByContent {
  int64_t floats, codes_8, codes_4;
  int64_t of(const PackedView& w) const {
    return w.is_narrow() ? codes_4 : w.format == WeightFormat::int8 ? codes_8 : floats;
  }
};

struct Tuning {
  // Tiles of fewer rows than `rows_to_fetch` ask for memory so many bytes before they reach it (0: not at all), and walk
  // through so many panels at once where they can. Tiles of more rows ask for the whole of what comes after a piece.
  ByContent fetch_bytes, panels;
  int64_t rows_to_fetch;
  // Prepared rows of a block that meets panel after panel: they stay in the second-level cache, beside a panel.
  int64_t block_bytes;
  // Words of a panel that all rows of a block meet before the next words come: they stay in that cache, too.
  int64_t words_at_once;
  // Prepared rows that are multiplied before the next are prepared: they stay in the last-level cache.
  int64_t prepared_bytes;
  // What a thread takes at a time is one of so many pieces of its share of a product, and not more than 16 panels.
  int64_t pieces;
  // Lines of keys and values that are asked for before they are reached.
  int64_t attention_lines;
  // Pieces of attention for each thread: so many even out what one thread loses to others on the machine.
  int64_t attention_pieces;
};

extern Tuning tuning;

}  // namespace quire
