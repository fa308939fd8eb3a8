// Which table of kernels this processor gets.

#include <cstdlib>
#include <cstring>

#include "amx_support.h"
#include "kernels.h"

namespace quire {

namespace avx2 { const KernelTable* table(); }
namespace avx512 { const KernelTable* table(); }
namespace avx512_vnni { extern const MatmulKernels matmul_kernels; }
namespace avx512_bf16 { const KernelTable* table(); }
namespace amx {
extern const AdapterKernels adapter_kernels;
extern const MatmulKernels matmul_kernels;
}

namespace {

// The kernels of a lesser set, with products of their own: what else the instructions are good for is not worth a copy.
KernelTable with_products(const KernelTable* lesser, const char* isa, const MatmulKernels& products) {
  KernelTable table = *lesser;
  table.isa = isa, table.matmul = &products;
  return table;
}
const KernelTable* avx512_vnni_table() {
  static const KernelTable table = with_products(avx512::table(), "avx512_vnni", avx512_vnni::matmul_kernels);
  return &table;
}
const KernelTable* amx_table() {
  static const KernelTable table = [] {
    KernelTable with_tiles = with_products(avx512_bf16::table(), "amx", amx::matmul_kernels);
    with_tiles.adapters = &amx::adapter_kernels;
    return with_tiles;
  }();
  return &table;
}

// What -march=x86-64-v3 may use; every processor with AVX2 has F16C, but a virtual machine may hide it.
bool has_avx2() {
#if defined(__clang__)
  const bool has_f16c = true;  // older versions cannot be asked
#else
  const bool has_f16c = __builtin_cpu_supports("f16c");
#endif
  return has_f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
bool has_avx512_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
bool has_avx512_bf16() { return has_avx512_vnni() && __builtin_cpu_supports("avx512bf16"); }

constexpr const char* ABSENT = "this processor does not have it";
template <bool (*HAS)()> const char* fault_of() { return HAS() ? nullptr : ABSENT; }
const char* fault_of_amx_kernels() { return has_avx512_bf16() ? fault_of_amx() : ABSENT; }

struct Candidate {
  const char* name;
  const char* (*fault)();  // why it cannot be used, or null
  const KernelTable* (*table)();
};

// Best first.
constexpr Candidate CANDIDATES[] = {
    {"amx", fault_of_amx_kernels, amx_table},
    {"avx512_bf16", fault_of<has_avx512_bf16>, avx512_bf16::table},
    {"avx512_vnni", fault_of<has_avx512_vnni>, avx512_vnni_table},
    {"avx512", fault_of<has_avx512>, avx512::table},
    {"avx2", fault_of<has_avx2>, avx2::table},
};

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
