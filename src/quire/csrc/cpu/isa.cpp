// Which table of kernels this processor gets.

#include <cstdlib>
#include <cstring>

#include "kernels.h"

namespace quire {
namespace {

// The kernels of a lesser set, with products of their own: what else the instructions are good for is not worth a copy.
KernelTable with_products(const KernelTable* lesser, const char* isa, const MatmulKernels& products) {
  KernelTable table = *lesser;
  table.isa = isa, table.matmul = &products;
  return table;
}

constexpr const char* ABSENT = "this processor does not have it";
template <bool (*HAS)()> const char* fault_of() { return HAS() ? nullptr : ABSENT; }

struct Candidate {
  const char* name;
  const char* (*fault)();  // why it cannot be used, or null
  const KernelTable* (*table)();
};

}  // namespace
}  // namespace quire

// CANDIDATES of the architecture, best first.
#if defined(__aarch64__)
#include "isa_arm.h"
#else
#include "isa_x86.h"
#endif

namespace quire {
namespace {

const KernelTable* find(const char* name) {
  for (const Candidate& candidate : CANDIDATES) {
    const bool is_meant = name == nullptr || std::strcmp(name, candidate.name) == 0;
    if (is_meant && candidate.fault() == nullptr) return candidate.table();
  }
  return nullptr;
}

const char* fault_of_name(const char* name) {
  for (const Candidate& candidate : CANDIDATES) {
    if (std::strcmp(name, candidate.name) == 0) return candidate.fault();
  }
  return "there is no such instruction set";
}

const KernelTable*& chosen() {
  static const KernelTable* table = [] {
    const KernelTable* named = find(std::getenv("QUIRE_CPU_ISA"));
    return named != nullptr ? named : find(nullptr);
  }();
  return table;
}

}  // namespace

const KernelTable* kernels() { return chosen(); }

}  // namespace quire

// For the log, and for tests that try each instruction set in turn.
#define QUIRE_EXPORT __attribute__((visibility("default")))
extern "C" {
QUIRE_EXPORT const char* quire_isa() { return quire::kernels() == nullptr ? "" : quire::kernels()->isa; }
// Why an instruction set cannot be used, or null.
QUIRE_EXPORT const char* quire_isa_fault(const char* name) { return quire::fault_of_name(name); }
QUIRE_EXPORT int quire_select_isa(const char* name) {
  const quire::KernelTable* table = quire::find(name);
  if (table == nullptr) return 0;
  quire::chosen() = table;
  return 1;
}
}
