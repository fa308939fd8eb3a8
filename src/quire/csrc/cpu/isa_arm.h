// The instruction sets of 64-bit ARM. Part of isa.cpp.
#pragma once

#include <sys/auxv.h>

namespace quire {

namespace neon { const KernelTable* table(); }
namespace neon_dotprod { extern const MatmulKernels matmul_kernels; }
namespace neon_bf16 { const KernelTable* table(); }

namespace {

const KernelTable* neon_dotprod_table() {
  static const KernelTable table = with_products(neon::table(), "neon_dotprod", neon_dotprod::matmul_kernels);
  return &table;
}

// As Linux numbers them; older headers lack the names.
constexpr unsigned long DOTPROD = 1ul << 20, I8MM = 1ul << 13, BF16 = 1ul << 14;
bool has_neon() { return true; }
bool has_dotprod() { return (getauxval(AT_HWCAP) & DOTPROD) != 0; }
bool has_bf16() { return has_dotprod() && (getauxval(AT_HWCAP2) & (I8MM | BF16)) == (I8MM | BF16); }

constexpr Candidate CANDIDATES[] = {
    {"neon_bf16", fault_of<has_bf16>, neon_bf16::table},
    {"neon_dotprod", fault_of<has_dotprod>, neon_dotprod_table},
    {"neon", fault_of<has_neon>, neon::table},
};

}  // namespace
}  // namespace quire
