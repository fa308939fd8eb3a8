// The instruction sets of x86. Part of isa.cpp.
#pragma once

#include <cpuid.h>

#include "amx_support.h"

namespace quire {

namespace avx2 { const KernelTable* table(); }
namespace avx2_vnni { extern const MatmulKernels matmul_kernels; }
namespace avx512 { const KernelTable* table(); }
namespace avx512_vnni { extern const MatmulKernels matmul_kernels; }
namespace avx512_bf16 { const KernelTable* table(); }
namespace amx {
extern const AdapterKernels adapter_kernels;
extern const MatmulKernels matmul_kernels;
}

namespace {

const KernelTable* avx2_vnni_table() {
  static const KernelTable table = with_products(avx2::table(), "avx2_vnni", avx2_vnni::matmul_kernels);
  return &table;
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
// Beside AVX2, on processors without AVX-512: its instruction on 256 bits.
bool has_avx2_vnni() {
#if defined(QUIRE_EMULATE_AVX_VNNI)
  return has_avx2() && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
#else
  unsigned a, b, c, d;
  constexpr unsigned AVX_VNNI = 1u << 4;
  return has_avx2() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & AVX_VNNI) != 0;
#endif
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
bool has_avx512_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
bool has_avx512_bf16() { return has_avx512_vnni() && __builtin_cpu_supports("avx512bf16"); }
const char* fault_of_amx_kernels() { return has_avx512_bf16() ? fault_of_amx() : ABSENT; }

constexpr Candidate CANDIDATES[] = {
    {"amx", fault_of_amx_kernels, amx_table},
    {"avx512_bf16", fault_of<has_avx512_bf16>, avx512_bf16::table},
    {"avx512_vnni", fault_of<has_avx512_vnni>, avx512_vnni_table},
    {"avx512", fault_of<has_avx512>, avx512::table},
    {"avx2_vnni", fault_of<has_avx2_vnni>, avx2_vnni_table},
    {"avx2", fault_of<has_avx2>, avx2::table},
};

}  // namespace
}  // namespace quire
