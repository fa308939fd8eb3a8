// The matrix unit of AMX: eight tiles of up to 16 rows of 64 bytes each, and products of them.
//
// Assembly instead of intrinsics: those of GCC do not tell the compiler that they read memory, so it may move a store
// behind them, or drop it; and this needs no flag that an older compiler refuses.
#pragma once

#include "simd.h"

namespace quire::QUIRE_ISA {

constexpr int TILES = 8, ROWS_OF_TILE = 16, BYTES_OF_TILE_ROW = 64;

// What ldtilecfg reads. A tile of no rows cannot be used.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int num_rows, int64_t bytes_of_row = BYTES_OF_TILE_ROW) {
    rows[tile] = static_cast<uint8_t>(num_rows);
    row_bytes[tile] = static_cast<uint16_t>(num_rows > 0 ? bytes_of_row : 0);
  }
};
static_assert(sizeof(TileShapes) == 64, "the size that the instruction reads");

constexpr int64_t CHUNK_BYTES = BYTES_OF_TILE_ROW;

// Bytes of one of `num_rows` rows to its chunks, the last one filled up with zeros.
static inline void place_chunks(const void* from, int64_t bytes, char* to, int num_rows) {
  const char* next = static_cast<const char*>(from);
  for (; bytes >= CHUNK_BYTES; bytes -= CHUNK_BYTES, next += CHUNK_BYTES, to += num_rows * CHUNK_BYTES) {
    memcpy(to, next, CHUNK_BYTES);
  }
  if (bytes == 0) return;
  memset(to, 0, CHUNK_BYTES);
  memcpy(to, next, bytes);
}

}  // namespace quire::QUIRE_ISA

#if defined(QUIRE_EMULATE_AMX)
#include "amx_emulated.h"
#else

namespace quire::QUIRE_ISA {

// Shapes belong to a thread. All tiles become zero.
QUIRE_INLINE void set_shapes(const TileShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes) : "memory"); }
// A thread that has no tiles is switched faster, and lets its core sleep deeper.
QUIRE_INLINE void release_tiles() { asm volatile("tilerelease" ::: "memory"); }

template <int T> QUIRE_INLINE void clear_tile() { asm volatile("tilezero %%tmm%c0" ::"i"(T)); }
template <int T> QUIRE_INLINE void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}
template <int T> QUIRE_INLINE void store_tile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}

// C += A B, where B has words of the columns in its rows: two bfloat16, or four bytes.
template <int C, int A, int B> QUIRE_INLINE void multiply_bfloat16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
// A is signed, B unsigned.
template <int C, int A, int B> QUIRE_INLINE void multiply_bytes() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

}  // namespace quire::QUIRE_ISA

#endif
