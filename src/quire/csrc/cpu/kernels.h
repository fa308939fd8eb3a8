// What the operators hand to the kernels: plain structs and one table of functions per instruction set.
//
// The kernel sources are compiled once per instruction set, each time in a namespace of its own (QUIRE_ISA). They use
// nothing from the C++ library: an inline function of the library that one object compiled for AVX-512 could be the
// copy that the linker keeps for all, and a processor without AVX-512 would die in it.
#pragma once

#include <cstdint>

namespace quire {

enum class DType { float32, bfloat16, float16 };

struct NormArgs {
  DType dtype;
  const void* x;
  const void* residual;  // null: plain norm
  const void* weight;
  void* out;
  void* total;  // x + residual
  int64_t inner, width;  // rows of a token, elements of a row
  int64_t x_token_stride, x_inner_stride, residual_token_stride, residual_inner_stride;
  float eps;
};

// A norm with a gate: silu(gate) is multiplied onto what is normed, or onto the norm.
struct GatedNormArgs {
  DType dtype;
  bool gates_first;
  const void *x, *gate, *weight;
  void* out;
  int64_t inner, width;  // rows of a token, elements of a row
  int64_t x_token_stride, x_inner_stride, gate_token_stride, gate_inner_stride;
  int64_t weight_stride;  // from a row of a token to the next; 0: one weight for all
  float eps;
};

struct GateArgs {
  DType dtype;
  const void* x;
  void* out;
  int64_t width, x_stride;
  float alpha, limit;  // of the clamped one
};

struct RotaryArgs {
  DType dtype;
  const int64_t* positions;
  void* x;
  const float* cos_sin;
  int64_t heads, token_stride, head_stride, cos_sin_stride;
  int half;  // rotary dimensions / 2
  bool is_interleaved;  // dimension 2 i is paired with 2 i + 1, or else i with i + half
};

struct PairArgs {
  DType dtype;
  bool is_product;  // or a sum
  const void *x, *y;
  void* out;
  int64_t width, x_stride, y_stride;
};

struct ConvertArgs {
  DType from, to;
  const void* x;
  void* out;
  int64_t width, x_stride;
};

struct ScaleArgs {
  DType dtype;
  bool is_division;
  float factor;
  const void* x;
  void* out;
  int64_t width, x_stride;
};

enum class Activation : int { relu, silu, sigmoid, tanh, gelu, gelu_tanh };

struct ActivationArgs {
  DType dtype;
  Activation kind;
  const void* x;
  void* out;
  int64_t width, x_stride;
};

struct LayerNormArgs {
  DType dtype;
  const void* x;
  const void* weight;  // null: 1
  const void* bias;    // null: 0
  void* out;
  int64_t width, x_stride;
  float eps;
};

// A sum over the experts of a token, with a weight for each.
struct WeighArgs {
  DType dtype;
  const void* x;  // [tokens, top_k, width]
  const float* weights;
  void* out;
  int64_t top_k, width, x_token_stride, x_row_stride;
};

struct AdapterKernels;
struct AttentionKernels;
struct MatmulKernels;
struct RecurrentKernels;
struct SamplingKernels;

struct KernelTable {
  const char* isa;
  // Tokens [begin, end) of what the arguments describe; the caller splits the work over threads.
  void (*rms_norm)(const NormArgs&, int64_t begin, int64_t end);
  void (*gated_norm)(const GatedNormArgs&, int64_t begin, int64_t end);
  void (*silu_and_mul)(const GateArgs&, int64_t begin, int64_t end);
  void (*clamped_swiglu)(const GateArgs&, int64_t begin, int64_t end);
  void (*rotary)(const RotaryArgs&, int64_t begin, int64_t end);
  void (*combine_pair)(const PairArgs&, int64_t begin, int64_t end);
  void (*convert)(const ConvertArgs&, int64_t begin, int64_t end);
  void (*scale)(const ScaleArgs&, int64_t begin, int64_t end);
  void (*activate)(const ActivationArgs&, int64_t begin, int64_t end);
  void (*layer_norm)(const LayerNormArgs&, int64_t begin, int64_t end);
  void (*weigh_experts)(const WeighArgs&, int64_t begin, int64_t end);
  const AdapterKernels* adapters;  // adapters.h
  const AttentionKernels* attention;  // attention_args.h
  const MatmulKernels* matmul;  // matmul.h
  const RecurrentKernels* recurrent;  // recurrent.h
  const SamplingKernels* sampling;  // sampling_kernels.h
};

// The best table that this processor can run, or null; QUIRE_CPU_ISA names a lesser one. See isa.cpp.
const KernelTable* kernels();

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

}  // namespace quire
