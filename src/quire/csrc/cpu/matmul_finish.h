// From sums to results: scales, bias, rounding.
#pragma once

#include "matmul_micro.h"

namespace quire::QUIRE_ISA {

// What the sums of a panel's columns are multiplied with, and what is added.
struct Finish {
  int64_t column, num_columns;
  float scale[PANEL_COLUMNS], bias[PANEL_COLUMNS];
};

template <class T> static void widen_bias(const void* bias, int64_t first, int64_t n, float* to) {
  for (int64_t i = 0; i < n; i += W) {
    store_upto(to + i, load_upto(static_cast<const T*>(bias) + first + i, n - i), n - i);
  }
}

static void begin_finish(const MatmulArgs& args, int64_t panel, Finish* finish) {
  const PackedView& w = args.weight;
  finish->column = panel * PANEL_COLUMNS;
  finish->num_columns = min64(PANEL_COLUMNS, w.rows - finish->column);
  for (int c = 0; c < PANEL_COLUMNS; ++c) finish->scale[c] = w.scale_unit, finish->bias[c] = 0;
  if (w.panel_head_bytes > 0) memcpy(finish->scale, w.heads + panel * w.panel_bytes, sizeof(finish->scale));
  if (args.bias == nullptr) return;
  switch (args.bias_dtype) {
    case DType::float32: return widen_bias<float>(args.bias, finish->column, finish->num_columns, finish->bias);
    case DType::bfloat16: return widen_bias<bf16>(args.bias, finish->column, finish->num_columns, finish->bias);
    case DType::float16: return widen_bias<fp16>(args.bias, finish->column, finish->num_columns, finish->bias);
  }
}

template <class T>
static void write_rows(const MatmulArgs& args, const Finish& finish, const float* sums, int64_t first, int64_t rows) {
  const int64_t n = finish.num_columns;
  for (int64_t r = 0; r < rows; ++r, sums += PANEL_COLUMNS) {
    T* out = static_cast<T*>(args.out) + args.out_offset(first + r) + finish.column;
#pragma GCC unroll 4
    for (int64_t i = 0; i < PANEL_COLUMNS; i += W) {
      const vf y = fma(load(sums + i), load(finish.scale + i), load(finish.bias + i));
      if (i + W <= n) {
        store_result(out + i, y);
      } else if (i < n) {
        store_part(out + i, y, static_cast<int>(n - i));
      }
    }
  }
}

// The lines that `finish_rows` will write, while the sums are formed: rows of a result lie far apart, often at the same
// place of a page, so that a cache holds few of them at a time.
QUIRE_INLINE void fetch_rows(const MatmulArgs& args, const Finish& finish, int64_t first, int64_t rows) {
  const int64_t size = args.out_dtype == DType::float32 ? 4 : 2;
  for (int64_t r = 0; r < rows; ++r) {
    const char* out = static_cast<const char*>(args.out) + (args.out_offset(first + r) + finish.column) * size;
    for (int64_t i = 0; i < PANEL_COLUMNS * size; i += 64) __builtin_prefetch(out + i, 1);
  }
}

static void finish_rows(const MatmulArgs& args, const Finish& finish, const float* sums, int64_t first, int64_t rows) {
  switch (args.out_dtype) {
    case DType::float32: return write_rows<float>(args, finish, sums, first, rows);
    case DType::bfloat16: return write_rows<bf16>(args, finish, sums, first, rows);
    case DType::float16: return write_rows<fp16>(args, finish, sums, first, rows);
  }
}

static void finish(const MatmulArgs& args, int64_t panel, const float* sums, int64_t first, int64_t rows) {
  Finish finish;
  begin_finish(args, panel, &finish);
  finish_rows(args, finish, sums, first, rows);
}

}  // namespace quire::QUIRE_ISA
