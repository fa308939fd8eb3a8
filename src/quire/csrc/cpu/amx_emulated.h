// The matrix unit in plain C++, after Intel's description of the instructions: for tests on processors without it
// (QUIRE_EMULATE_AMX). What the real unit would refuse stops the process.
#pragma once

#include "amx.h"

namespace quire::QUIRE_ISA {

struct EmulatedUnit {
  TileShapes shapes;  // of palette 0 while there are no tiles
  alignas(64) uint8_t bytes[TILES][ROWS_OF_TILE][BYTES_OF_TILE_ROW];
};

static inline EmulatedUnit& unit() {
  static thread_local EmulatedUnit of_this_thread = [] {
    EmulatedUnit fresh{};
    fresh.shapes.palette = 0;
    return fresh;
  }();
  return of_this_thread;
}

QUIRE_INLINE void expect(bool is_so) {
  if (!is_so) __builtin_trap();
}

// Shapes of three tiles that can be multiplied: rows of C and A, columns of C and B, words of A and rows of B.
QUIRE_INLINE void expect_product(const TileShapes& s, int c, int a, int b) {
  expect(s.palette == 1 && c != a && c != b && a != b && s.rows[c] > 0 && s.rows[a] > 0 && s.rows[b] > 0);
  expect(s.rows[c] == s.rows[a] && s.row_bytes[c] == s.row_bytes[b] && s.row_bytes[a] == 4 * s.rows[b]);
}

QUIRE_INLINE void set_shapes(const TileShapes& shapes) {
  expect(shapes.palette == 1 && reinterpret_cast<uintptr_t>(&shapes) % 64 == 0);
  for (int t = 0; t < 16; ++t) {
    expect(shapes.rows[t] <= ROWS_OF_TILE && shapes.row_bytes[t] <= BYTES_OF_TILE_ROW);
    expect((shapes.rows[t] == 0) == (shapes.row_bytes[t] == 0) && (t < TILES || shapes.rows[t] == 0));
  }
  unit() = {};
  unit().shapes = shapes;
}

QUIRE_INLINE void release_tiles() {
  unit() = {};
  unit().shapes.palette = 0;
}

template <int T> static void clear_tile() {
  expect(unit().shapes.palette == 1 && unit().shapes.rows[T] > 0);
  memset(unit().bytes[T], 0, sizeof(unit().bytes[T]));
}

template <int T> static void load_tile(const void* from, int64_t stride) {
  clear_tile<T>();
  EmulatedUnit& u = unit();
  for (int r = 0; r < u.shapes.rows[T]; ++r) {
    memcpy(u.bytes[T][r], static_cast<const char*>(from) + r * stride, u.shapes.row_bytes[T]);
  }
}

template <int T> static void store_tile(void* to, int64_t stride) {
  const EmulatedUnit& u = unit();
  expect(u.shapes.palette == 1 && u.shapes.rows[T] > 0);
  for (int r = 0; r < u.shapes.rows[T]; ++r) {
    memcpy(static_cast<char*>(to) + r * stride, u.bytes[T][r], u.shapes.row_bytes[T]);
  }
}

// Numbers too small for a normal float count as zero, before and after every operation.
QUIRE_INLINE float flushed(float x) { return x < 1.17549435e-38f && x > -1.17549435e-38f ? 0.0f : x; }
QUIRE_INLINE float widened(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float x;
  memcpy(&x, &wide, 4);
  return flushed(x);
}

// One row of A times B: even and odd inputs in a chain of their own, which meet at the end.
static void add_bfloat16_row(const uint16_t* a, const uint16_t (*b)[2 * ROWS_OF_TILE], int words, float* c) {
  float even[ROWS_OF_TILE] = {}, odd[ROWS_OF_TILE] = {};
  for (int k = 0; k < words; ++k) {
    const float a_even = widened(a[2 * k]), a_odd = widened(a[2 * k + 1]);
    for (int n = 0; n < ROWS_OF_TILE; ++n) {
      even[n] = flushed(__builtin_fmaf(a_even, widened(b[k][2 * n]), even[n]));
      odd[n] = flushed(__builtin_fmaf(a_odd, widened(b[k][2 * n + 1]), odd[n]));
    }
  }
  for (int n = 0; n < ROWS_OF_TILE; ++n) c[n] = flushed(flushed(c[n]) + flushed(even[n] + odd[n]));
}

static void add_byte_row(const int8_t* a, const uint8_t (*b)[BYTES_OF_TILE_ROW], int words, int32_t* c) {
  for (int k = 0; k < words; ++k) {
    for (int n = 0; n < ROWS_OF_TILE; ++n) {
      for (int i = 0; i < 4; ++i) c[n] += static_cast<int32_t>(a[4 * k + i]) * b[k][4 * n + i];
    }
  }
}

template <int C, int A, int B> static void multiply_bfloat16() {
  EmulatedUnit& u = unit();
  expect_product(u.shapes, C, A, B);
  uint16_t b[ROWS_OF_TILE][2 * ROWS_OF_TILE];
  memcpy(b, u.bytes[B], sizeof(b));
  for (int m = 0; m < u.shapes.rows[C]; ++m) {
    uint16_t a[2 * ROWS_OF_TILE];
    float c[ROWS_OF_TILE];
    memcpy(a, u.bytes[A][m], sizeof(a)), memcpy(c, u.bytes[C][m], sizeof(c));
    add_bfloat16_row(a, b, u.shapes.rows[B], c);
    memcpy(u.bytes[C][m], c, sizeof(c));
  }
}

template <int C, int A, int B> static void multiply_bytes() {
  EmulatedUnit& u = unit();
  expect_product(u.shapes, C, A, B);
  for (int m = 0; m < u.shapes.rows[C]; ++m) {
    int8_t a[BYTES_OF_TILE_ROW];
    int32_t c[ROWS_OF_TILE];
    memcpy(a, u.bytes[A][m], sizeof(a)), memcpy(c, u.bytes[C][m], sizeof(c));
    add_byte_row(a, u.bytes[B], u.shapes.rows[B], c);
    memcpy(u.bytes[C][m], c, sizeof(c));
  }
}

}  // namespace quire::QUIRE_ISA
