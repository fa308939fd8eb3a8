// What all instruction sets have in common, whatever their vectors are.
#pragma once

#include <cstdint>

#define QUIRE_INLINE static inline __attribute__((always_inline))

namespace quire::QUIRE_ISA {

struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };

// Asks for a line of memory: into the second-level cache, or into the first.
QUIRE_INLINE void fetch_line(const void* p) { __builtin_prefetch(p, 0, 2); }
QUIRE_INLINE void fetch_line_near(const void* p) { __builtin_prefetch(p, 0, 3); }

}  // namespace quire::QUIRE_ISA
