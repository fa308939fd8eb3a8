// Rows of activations on their way into the tiles that the kernels read (see Tiles).
#pragma once

#include "matmul_codes.h"
#include "matmul_int8.h"

namespace quire::QUIRE_ISA {

// A row in words of 32 bits: floats, or bfloat16 as they are, with zeros up to `words`.
template <class T> static void convert_row(const T* x, int64_t columns, float* to, int64_t words) {
  int64_t i = 0;
  for (; i + W <= columns; i += W) store(to + i, load(x + i));
  if (i < columns) store_part(to + i, load_part(x + i, static_cast<int>(columns - i)), static_cast<int>(columns - i));
  for (i = columns; i < words; ++i) to[i] = 0;
}

// bfloat16 that stay as they are.
struct bf16_words { uint16_t bits; };
static void convert_row(const bf16_words* x, int64_t columns, float* to, int64_t words) {
  memcpy(to, x, columns * sizeof(bf16));
  memset(reinterpret_cast<char*>(to) + columns * sizeof(bf16), 0, words * 4 - columns * sizeof(bf16));
}

// Fewer than W rows of words that lie apart, interleaved: to[i * num_rows + r] = rows[r][i].
static void interleave(const float* const* rows, int num_rows, int64_t words, float* to) {
  if (num_rows == 1) {
    memcpy(to, rows[0], words * sizeof(float));
    return;
  }
  // What a whole vector writes into the next word is written over by that one; the last few must not do so.
  const int whole = W - (W + num_rows - 1) / num_rows + 1;
  int64_t i = 0;
  for (; i + W <= words; i += W, to += W * num_rows) {
    vf block[W];
#pragma GCC unroll 16
    for (int r = 0; r < W; ++r) block[r] = r < num_rows ? load(rows[r] + i) : zero();
    transpose(block);
    for (int k = 0; k < whole; ++k) store(to + k * num_rows, block[k]);
    for (int k = whole; k < W; ++k) store_part(to + k * num_rows, block[k], num_rows);
  }
  for (; i < words; ++i, to += num_rows)
    for (int r = 0; r < num_rows; ++r) to[r] = rows[r][i];
}

// Rows of words as the kernels read them: without segments just interleaved, else segment by segment with their sums.
template <class Words>
static void arrange(const PackedView& w, const float* const* rows, int num_rows, int64_t words, float* to) {
  if (!w.is_quantized()) return interleave(rows, num_rows, words, to);
  const int64_t ratio = words / w.words;
  int64_t end;
  for (int64_t i = 0; i < w.words; i = end) {
    end = end_of_segment(w, i);
    const float* at[W];
    for (int r = 0; r < num_rows; ++r) {
      at[r] = rows[r] + i * ratio;
      to[r] = Words::sum(at[r], (end - i) * ratio);
    }
    interleave(at, num_rows, (end - i) * ratio, to + CODES_HEAD * num_rows);
    to += (CODES_HEAD + (end - i) * ratio) * num_rows;
  }
}

struct FloatWords {
  static float sum(const float* words, int64_t n) {
    vf total = zero();
    for (int64_t i = 0; i < n; i += W) total = total + load_upto(words + i, n - i);
    return hsum(total);
  }
};
struct BFloat16Words {
  static float sum(const float* words, int64_t n) {
    const bf16* values = reinterpret_cast<const bf16*>(words);
    vf total = zero();
    for (int64_t i = 0; i < 2 * n; i += W) total = total + load_upto(values + i, 2 * n - i);
    return hsum(total);
  }
};

template <class Words, class T>
QUIRE_INLINE void convert_rows(const MatmulArgs& args, int64_t first, int num_rows, int64_t words, float* to,
                               float* scratch) {
  const float* rows[W];
  for (int r = 0; r < num_rows; ++r) {
    const T* x = static_cast<const T*>(args.x) + args.x_offset(first + r);
    float* row = scratch + r * words;
    convert_row(x, args.weight.columns, row, words);
    rows[r] = row;
  }
  arrange<Words>(args.weight, rows, num_rows, words, to);
}

// Rows that are words already.
template <class Words, class T>
QUIRE_INLINE void take_rows(const MatmulArgs& args, int64_t first, int num_rows, int64_t words, float* to) {
  const float* rows[W];
  for (int r = 0; r < num_rows; ++r) {
    rows[r] = reinterpret_cast<const float*>(static_cast<const T*>(args.x) + args.x_offset(first + r));
  }
  arrange<Words>(args.weight, rows, num_rows, words, to);
}

template <class T> QUIRE_INLINE void quantize_rows(const MatmulArgs& args, int64_t first, int num_rows, float* to) {
  const T* x = static_cast<const T*>(args.x);
  for (int r = 0; r < num_rows; ++r) quantize_row(args.weight, x + args.x_offset(first + r), to, r, num_rows);
}

static int64_t prepared_row_bytes(const MatmulArgs& args) {
  const PackedView& w = args.weight;
  const int64_t heads = w.is_quantized() ? CODES_HEAD * num_segments(w) * 4 : 0;
  switch (args.arithmetic) {
    case Arithmetic::float32: return w.words * w.values_per_word * 4 + heads;
    case Arithmetic::bfloat16: return w.words * w.values_per_word * 2 + heads;
    case Arithmetic::int8: return (INTEGERS_HEAD * num_segments(w) + X_WORDS * w.words) * 4;
  }
  return 0;
}

static void prepare_tile(const MatmulArgs& args, int64_t first, int num_rows, float* to, float* scratch) {
  const PackedView& w = args.weight;
  const int64_t inputs = w.words * w.values_per_word;
  switch (args.arithmetic) {
    case Arithmetic::int8:
      switch (args.dtype) {
        case DType::float32: return quantize_rows<float>(args, first, num_rows, to);
        case DType::bfloat16: return quantize_rows<bf16>(args, first, num_rows, to);
        case DType::float16: return quantize_rows<fp16>(args, first, num_rows, to);
      }
      break;
    case Arithmetic::bfloat16:
      if (w.columns == inputs) return take_rows<BFloat16Words, bf16>(args, first, num_rows, inputs / 2, to);
      return convert_rows<BFloat16Words, bf16_words>(args, first, num_rows, inputs / 2, to, scratch);
    case Arithmetic::float32:
      switch (args.dtype) {
        case DType::float32:
          if (w.columns == inputs) return take_rows<FloatWords, float>(args, first, num_rows, inputs, to);
          return convert_rows<FloatWords, float>(args, first, num_rows, inputs, to, scratch);
        case DType::bfloat16: return convert_rows<FloatWords, bf16>(args, first, num_rows, inputs, to, scratch);
        case DType::float16: return convert_rows<FloatWords, fp16>(args, first, num_rows, inputs, to, scratch);
      }
  }
}

}  // namespace quire::QUIRE_ISA
