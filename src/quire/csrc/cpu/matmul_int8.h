// Products of quantised weights with activations that were quantised on the way (Arithmetic::int8).
//
// The sum over a segment is an exact integer; it becomes a float, is scaled and added to the sums, in the order of the
// segments. A prepared tile of R rows holds, for each segment:
//
//   [int32 x R]           what the integers start with: -zero_point * sum of the inputs, for codes are unsigned, and
//                         what was taken from the codes, times that sum
//   [float x R]           scale of the inputs
//   [float x R]           sum of the inputs as integers, for weights with zeros
//   [int32 x R] x words   the inputs, as add_dot takes them
#pragma once

#include "matmul_segments.h"

namespace quire::QUIRE_ISA {

constexpr int64_t INTEGERS_HEAD = 3;

// What belongs to the integers of a segment besides the scale of the inputs.
enum class Scaling { none, scales, scales_and_zeros };

// R rows times the 2 * W columns at `panel`, which points into the first group at the place of these columns; `head` at
// the scales of these columns in that group. With P panels, the same of those that follow.
template <WeightFormat F, Scaling SCALING, int R, int P = 1>
static void add_integers(const PackedView& w, const float* x, const char* head, const char* panel, float* sums,
                         Ahead ahead) {
  using Code = Codes<F>;
  const int64_t words_of_group = w.group_words, panel_bytes = w.panel_bytes, group_bytes = w.group_bytes, group_head_bytes = w.group_head_bytes;
  int64_t end_of_group = words_of_group;
  for (int64_t i = 0, end; i < w.words; i = end) {
    if (i == end_of_group) head += group_bytes, panel += group_head_bytes, end_of_group += words_of_group;
    end = min64(i / SEGMENT_WORDS * SEGMENT_WORDS + SEGMENT_WORDS, min64(end_of_group, w.words));
    const int32_t* start = reinterpret_cast<const int32_t*>(x);
    vi acc[P * R][2];
#pragma GCC unroll 12
    for (int r = 0; r < P * R; ++r) acc[r][0] = acc[r][1] = all_lanes(static_cast<uint32_t>(start[r % R]));
    const int32_t* words = start + INTEGERS_HEAD * R;
    int64_t k = i;
    do {  // not `for`: for a loop that might not run the compiler keeps two sets of accumulators
      if (k % WORDS_BETWEEN == 0) fetch<P>(ahead, panel_bytes);
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) {
        const Code codes = Code::load(panel + p * panel_bytes);
        const vi factors[2] = {factors_of<F>(codes.bytes[0]), factors_of<F>(codes.bytes[1])};
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
          const Inputs inputs = inputs_at(words + r, R);
          add_dot(acc[p * R + r][0], factors[0], inputs);
          add_dot(acc[p * R + r][1], factors[1], inputs);
        }
      }
      panel += Code::word_bytes;
      words += X_WORDS * R;
    } while (++k < end);
    asm("" ::: "memory");  // else the compiler keeps a copy of the sums on its stack
    // Loaded for each segment: kept in registers they would push accumulators out.
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      const char* scales = head + p * panel_bytes;
      vf scale[2], zeros[2];
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        if (SCALING != Scaling::none) scale[v] = load_half(scales + v * Code::distance * 2);
        if (SCALING == Scaling::scales_and_zeros) {
          zeros[v] = load_half(scales + (PANEL_COLUMNS + v * Code::distance) * 2);
        }
      }
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const vf x_scale = set1(x[R + r]), x_sum = set1(x[2 * R + r]);
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
          float* to = sums + (p * R + r) * PANEL_COLUMNS + v * Code::distance;
          vf integers = to_float(acc[p * R + r][v]);
          if (SCALING == Scaling::scales_and_zeros) integers = fnma(zeros[v], x_sum, integers);
          if (SCALING != Scaling::none) integers = integers * scale[v];
          store(to, fma(integers, x_scale, i == 0 ? zero() : load(to)));
        }
      }
    }
    x = reinterpret_cast<const float*>(words);
  }
}

// What a row of 128 inputs or less becomes.
struct QuantizedBlock {
  float scale;
  int8_t values[QUANTIZED_TOGETHER];
};

// Below this, inputs count as zero: the inverse of the scale would not be finite.
constexpr float SMALLEST_INPUT = 1e-30f;

template <class T> QUIRE_INLINE void quantize_block(const T* x, int64_t n, QuantizedBlock* block) {
  float values[QUANTIZED_TOGETHER] = {};
  vf largest = zero(), probe = zero();
  for (int64_t i = 0; i < n; i += W) {
    const vf v = load_upto(x + i, n - i);
    store(values + i, v);
    largest = max(largest, max(v, zero() - v));
    probe = fma(v, zero(), probe);  // NaN if anything is NaN or infinite
  }
  const float top = hmax(largest);
  block->scale = top / 127 + hsum(probe);
  const vf inverse = set1(top > SMALLEST_INPUT ? 127 / top : 0.0f);
  for (int64_t i = 0; i < QUANTIZED_TOGETHER; i += W) {
    store_bytes(block->values + i, to_nearest(load(values + i) * inverse));
  }
}

// Words of 8-bit inputs as add_dot takes them.
QUIRE_INLINE void place_words(const int8_t* values, int64_t words, int32_t* to, int stride) {
  for (int64_t i = 0; i < words; ++i, values += 4, to += X_WORDS * stride) {
    if constexpr (X_WORDS == 1) {
      memcpy(to, values, 4);
    } else {
      to[0] = (values[0] & 0xffff) | static_cast<int32_t>(static_cast<uint32_t>(values[2]) << 16);
      to[stride] = (values[1] & 0xffff) | static_cast<int32_t>(static_cast<uint32_t>(values[3]) << 16);
    }
  }
}

// What the inputs of a segment have in common.
struct SegmentHead {
  int32_t start;
  float scale, sum;
};

// The head of a row among those of `num_rows` rows.
QUIRE_INLINE void place_head(const SegmentHead& head, float* to, int num_rows) {
  memcpy(to, &head.start, 4);
  to[num_rows] = head.scale;
  to[2 * num_rows] = head.sum;
}

// Calls place(first word, end, head, values) for each segment of a row.
template <class T, class Place> QUIRE_INLINE void quantize_segments(const PackedView& w, const T* x, Place place) {
  const int taken = w.format == WeightFormat::int8 ? TAKEN_FROM_CODES<WeightFormat::int8> : 0;
  QuantizedBlock block;
  for (int64_t i = 0, end; i < w.words; i = end) {
    if (i % SEGMENT_WORDS == 0) quantize_block(x + i * 4, min64(QUANTIZED_TOGETHER, w.columns - i * 4), &block);
    end = end_of_segment(w, i);
    const int8_t* values = block.values + i % SEGMENT_WORDS * 4;
    int32_t sum = 0;
    for (int64_t k = 0; k < (end - i) * 4; ++k) sum += values[k];
    place(i, end, SegmentHead{(taken - w.zero_point) * sum, block.scale, static_cast<float>(sum)}, values);
  }
}

// One row of a tile of `num_rows`, at its place in the tile.
template <class T>
static void quantize_row(const PackedView& w, const T* x, float* tile, int row, int num_rows) {
  quantize_segments(w, x, [&](int64_t first, int64_t end, const SegmentHead& head, const int8_t* values) {
    place_head(head, tile + row, num_rows);
    int32_t* words = reinterpret_cast<int32_t*>(tile + INTEGERS_HEAD * num_rows);
    place_words(values, end - first, words + row, num_rows);
    tile += (INTEGERS_HEAD + X_WORDS * (end - first)) * num_rows;
  });
}

}  // namespace quire::QUIRE_ISA
