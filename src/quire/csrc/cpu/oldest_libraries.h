// What keeps compiled kernels from needing a newer system than torch does: glibc 2.28 and the libstdc++ of GCC 8.
//
// A linker takes the newest version of a symbol that the machine has. These are the few that have newer ones, each in
// the version that every system has. Included behind all other headers, where one of them is used.
#pragma once

#include <cstdlib>

#if defined(__GLIBC__) && defined(__GLIBCXX__) && (defined(__x86_64__) || defined(__aarch64__))
#if defined(__x86_64__)
__asm__(".symver log,log@GLIBC_2.2.5");
__asm__(".symver pthread_setaffinity_np,pthread_setaffinity_np@GLIBC_2.3.4");
#else
__asm__(".symver log,log@GLIBC_2.17");
__asm__(".symver pthread_setaffinity_np,pthread_setaffinity_np@GLIBC_2.17");
#endif
#define QUIRE_WAIT "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE"
__asm__(".symver " QUIRE_WAIT "," QUIRE_WAIT "@GLIBCXX_3.4.11");
#undef QUIRE_WAIT
#endif
