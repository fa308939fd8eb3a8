// What the operators have in common: from torch's tensors to pointers and strides, with checks.
//
// Only torch's stable ABI is used: one library serves every torch from 2.11 on, and nothing of ATen is compiled. The
// schemas are defined in kernels/operators.py.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>
#include <vector>

#include "crew.h"
#include "kernels.h"
#include "step.h"

namespace quire {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline DType dtype_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float: return DType::float32;
    case ScalarType::BFloat16: return DType::bfloat16;
    case ScalarType::Half: return DType::float16;
    default: break;
  }
  STD_TORCH_CHECK(false, "dtype must be float32, bfloat16 or float16");
  return DType::float32;
}

// int32 and int64 tensors of one dimension, as contiguous int64.
class Integers {
 public:
  Integers(const Tensor& t, const char* name) {
    STD_TORCH_CHECK(t.dim() == 1 && t.is_cpu(), name, " must be a vector on the CPU");
    const int64_t n = t.size(0), stride = t.stride(0);
    if (t.scalar_type() == ScalarType::Long && (stride == 1 || n <= 1)) {
      data_ = static_cast<const int64_t*>(t.const_data_ptr());
    } else {
      // What later runs are given would not be in it.
      STD_TORCH_CHECK(!is_recording(), name, " must be contiguous int64: a program keeps no copy");
      copy_.resize(n);
      if (t.scalar_type() == ScalarType::Long) {
        fill(static_cast<const int64_t*>(t.const_data_ptr()), stride);
      } else {
        STD_TORCH_CHECK(t.scalar_type() == ScalarType::Int, name, " must be int32 or int64");
        fill(static_cast<const int32_t*>(t.const_data_ptr()), stride);
      }
      data_ = copy_.data();
    }
  }
  const int64_t* data() const { return data_; }

 private:
  template <class T> void fill(const T* from, int64_t stride) {
    for (size_t i = 0; i < copy_.size(); ++i) copy_[i] = from[i * stride];
  }
  const int64_t* data_;
  std::vector<int64_t> copy_;
};

inline void check_rows(const Tensor& t, int64_t dim, const char* name) {
  STD_TORCH_CHECK(t.dim() == dim, name, " must have ", dim, " dimensions, not ", t.dim());
  STD_TORCH_CHECK(t.stride(dim - 1) == 1 || t.size(dim - 1) <= 1, name, " must be contiguous in its last dimension");
}

// A contiguous tensor for a result. While a program is recorded, its memory belongs to the program (program.cpp).
Tensor empty(const std::vector<int64_t>& sizes, ScalarType dtype);

inline Tensor empty(const std::vector<int64_t>& sizes, const Tensor& like) { return empty(sizes, like.scalar_type()); }

inline std::vector<int64_t> sizes_of(const Tensor& t) {
  std::vector<int64_t> sizes(t.dim());
  for (size_t d = 0; d < sizes.size(); ++d) sizes[d] = t.size(static_cast<int64_t>(d));
  return sizes;
}

// A tensor as rows [tokens, inner, width] with a stride for each of the first two, which is as far as views go here.
// What has more dimensions must be contiguous in its leading ones, which count as tokens then.
struct Rows {
  int64_t tokens = 1, inner = 1, width = 1, token_stride = 0, inner_stride = 0;
};

inline Rows rows_of(const Tensor& t, const char* name) {
  const int64_t n = t.dim();
  STD_TORCH_CHECK(n >= 1, name, " must have at least one dimension");
  check_rows(t, n, name);
  Rows rows;
  rows.width = t.size(n - 1);
  if (n >= 3) rows.inner = t.size(n - 2), rows.inner_stride = t.stride(n - 2);
  int64_t expected = 0;
  for (int64_t d = n >= 3 ? n - 3 : n - 2; d >= 0; --d) {
    if (rows.tokens == 1) rows.token_stride = t.stride(d);
    STD_TORCH_CHECK(rows.tokens == 1 || t.size(d) == 1 || t.stride(d) == expected, name, ": strides are not supported");
    if (t.size(d) != 1) expected = t.stride(d) * t.size(d);
    rows.tokens *= t.size(d);
  }
  return rows;
}

}  // namespace quire
