// Where the keys and values of one tile of 64 positions lie.
#pragma once

#include "attention_words.h"

namespace quire::QUIRE_ISA {

// What no row of the query sees, at either end, is never read, for its block may be gone.
template <class C> struct TileKeys {
  const C* k[KEY_TILE];  // of one key head; zeros where nothing is seen
  const C* v[KEY_TILE];
  int first, last;
  // Places of one block, for the first key head.
  struct Run {
    const char *k, *v, *k_scales, *v_scales;
    int first, end;
  };
  Run runs[KEY_TILE];
  int num_runs;

  void find(const AttentionArgs& args, const Work& work, int64_t base) {
    const QueryTile& tile = work.tile;
    const int64_t row = tile.sequence * args.table_stride, size = args.block_size;
    const char* k_head = args.k_cache + work.kv_head * args.k_head_stride;
    const char* v_head = args.v_cache + work.kv_head * args.v_head_stride;
    num_runs = 0;
    first = static_cast<int>(max64(0, first_visible(args, tile) - base));
    last = static_cast<int>(max64(first, min64(KEY_TILE, work.end_key - base)));
    int64_t index = (base + first) / size, place = base + first - index * size;
    for (int j = first; j < last; ++index, place = 0) {
      const int64_t block = args.block_tables[row + index];
      const char *k_block = k_head + block * args.k_block_stride, *v_block = v_head + block * args.v_block_stride;
      Run& run = runs[num_runs++];
      run.k = k_block + place * args.head_dim * sizeof(C), run.v = v_block + place * args.v_row_dim * sizeof(C);
      if constexpr (Format<C>::has_scales) {
        run.k_scales = k_block + size * args.head_dim + place * SCALE_BYTES;
        run.v_scales = v_block + size * args.v_row_dim + place * SCALE_BYTES;
      }
      run.first = j;
      j = run.end = static_cast<int>(min64(last, j + size - place));
    }
  }

  // Tells what one of the key heads will read, keys first.
  void will_be_used(const AttentionArgs& args, int head, Ahead* ahead) const {
    const int64_t k_head = head * args.k_head_stride, v_head = head * args.v_head_stride;
    for (int i = 0; i < num_runs; ++i) {
      const int64_t count = runs[i].end - runs[i].first;
      ahead->add(runs[i].k + k_head, count * args.head_dim * sizeof(C));
      if constexpr (Format<C>::has_scales) ahead->add(runs[i].k_scales + k_head, count * SCALE_BYTES);
    }
    for (int i = 0; i < num_runs; ++i) {
      const int64_t count = runs[i].end - runs[i].first;
      ahead->add(runs[i].v + v_head, count * args.v_row_dim * sizeof(C));
      if constexpr (Format<C>::has_scales) ahead->add(runs[i].v_scales + v_head, count * SCALE_BYTES);
    }
  }

  // Fills k and v for one of the key heads.
  void take_head(const AttentionArgs& args, int head, const float* zero_row) {
    const C* zeros = reinterpret_cast<const C*>(zero_row);
    for (int j = 0; j < first; ++j) k[j] = v[j] = zeros;
    for (int j = last; j < KEY_TILE; ++j) k[j] = v[j] = zeros;
    for (int i = 0; i < num_runs; ++i) {
      const Run& run = runs[i];
      const C* k_row = reinterpret_cast<const C*>(run.k + head * args.k_head_stride);
      const C* v_row = reinterpret_cast<const C*>(run.v + head * args.v_head_stride);
      for (int j = run.first; j < run.end; ++j, k_row += args.head_dim, v_row += args.v_row_dim) {
        k[j] = k_row;
        v[j] = v_row;
      }
    }
  }

  // Scales of all 64 places; 0 where nothing is seen.
  void read_scales(const AttentionArgs& args, int head, float* k_scales, float* v_scales, Ahead* ahead) const {
    for (int j = 0; j < KEY_TILE; j += W) store(k_scales + j, zero()), store(v_scales + j, zero());
    for (int i = 0; i < num_runs; ++i) {
      const Run& run = runs[i];
      const int64_t bytes = (run.end - run.first) * SCALE_BYTES;
      memcpy(k_scales + run.first, run.k_scales + head * args.k_head_stride, bytes);
      memcpy(v_scales + run.first, run.v_scales + head * args.v_head_stride, bytes);
      ahead->fetch_lines<2>();
    }
  }
};

}  // namespace quire::QUIRE_ISA
