// Whether AMX can be used: by the compiler that builds the kernels, and by this process.
#pragma once

// An assembler that knows the instructions comes with a compiler that has a header for them (GCC 11, Clang 12).
#if defined(QUIRE_EMULATE_AMX) || __has_include(<amxtileintrin.h>)
#define QUIRE_KNOWS_AMX
#endif

namespace quire {

// Why this process cannot use AMX, or null. The first call asks the system for it, for all threads.
const char* fault_of_amx();

}  // namespace quire
