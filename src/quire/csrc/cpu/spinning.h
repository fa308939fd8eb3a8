// What a thread does between two looks at something that another one is about to change.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace quire {

inline void rest_a_moment() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("isb");  // `yield` does nothing on most processors
#endif
}

}  // namespace quire
