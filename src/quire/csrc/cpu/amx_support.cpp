#include "amx_support.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace quire {

#if !defined(QUIRE_KNOWS_AMX)

const char* fault_of_amx() { return "the compiler that built the kernels does not know it (GCC 11 and newer do)"; }

#elif defined(QUIRE_EMULATE_AMX)

const char* fault_of_amx() { return nullptr; }

#else

namespace {

// In <asm/prctl.h> and the kernel's own headers, from Linux 5.16 on.
constexpr long ARCH_REQUEST_PERMISSION = 0x1023, FEATURE_TILE_DATA = 18;

bool processor_has_amx() {
  unsigned a, b, c, d;
  constexpr unsigned BFLOAT16 = 1u << 22, TILE = 1u << 24, INT8 = 1u << 25, NEEDED = BFLOAT16 | TILE | INT8;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & NEEDED) == NEEDED;
}

const char* ask_for_amx() {
  if (!processor_has_amx()) return "this processor does not have it";
  // Eight kilobytes more for each thread to be saved: the system wants to be asked, and gives them at the first use. It
  // answers for the process, also for threads that run already; a child inherits the answer.
  if (syscall(SYS_arch_prctl, ARCH_REQUEST_PERMISSION, FEATURE_TILE_DATA) != 0) {
    return "the system does not permit it (Linux 5.16 or newer is needed, and a sandbox that lets arch_prctl pass)";
  }
  return nullptr;
}

}  // namespace

const char* fault_of_amx() {
  static const char* const fault = ask_for_amx();
  return fault;
}

#endif

}  // namespace quire
