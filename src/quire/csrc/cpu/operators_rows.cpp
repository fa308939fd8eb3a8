// Operators that treat every token by itself: norms, gates, rotary positions.

#include "operators.h"

namespace quire {
namespace {

// Runs `work(begin, end)` over the rows, on several threads if there is enough to do.
template <class Work> void over_rows(int64_t rows, int64_t elements, Work work) {
  const int64_t threads = min64(max_threads(), min64(rows, elements / 32768));
  if (threads <= 1) return work(0, rows);
#pragma omp parallel for num_threads(static_cast<int>(threads)) schedule(static)
  for (int64_t i = 0; i < threads; ++i) work(rows * i / threads, rows * (i + 1) / threads);
}

void run_norm(const Tensor& x, const Tensor* residual, const Tensor& weight, double eps, const Tensor& out,
              const Tensor* total) {
  const int64_t width = x.size(x.dim() - 1);
  STD_TORCH_CHECK(weight.dim() == 1 && weight.size(0) == width && weight.scalar_type() == x.scalar_type() &&
                      weight.is_contiguous(),
                  "weight must be a contiguous vector of the last dimension and of the dtype of x");
  const Rows rows = rows_of(x, "x");
  NormArgs args{};
  args.dtype = dtype_of(x);
  args.x = x.const_data_ptr(), args.weight = weight.const_data_ptr(), args.out = out.mutable_data_ptr();
  args.outer = rows.outer, args.inner = rows.inner, args.width = width;
  args.x_outer_stride = rows.outer_stride, args.x_inner_stride = rows.inner_stride;
  args.eps = static_cast<float>(eps);
  if (residual != nullptr) {
    STD_TORCH_CHECK(sizes_of(*residual) == sizes_of(x) && residual->scalar_type() == x.scalar_type(),
                    "residual must have the shape and the dtype of x");
    const Rows others = rows_of(*residual, "residual");
    args.residual = residual->const_data_ptr(), args.total = total->mutable_data_ptr();
    args.residual_outer_stride = others.outer_stride, args.residual_inner_stride = others.inner_stride;
  }
  const int64_t count = rows.outer * rows.inner;
  over_rows(count, count * width, [&](int64_t begin, int64_t end) { kernels()->rms_norm(args, begin, end); });
}

Tensor rms_norm_op(const Tensor& x, const Tensor& weight, double eps) {
  Tensor out = empty(sizes_of(x), x);
  run_norm(x, nullptr, weight, eps, out, nullptr);
  return out;
}

std::tuple<Tensor, Tensor> add_rms_norm_op(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps) {
  Tensor out = empty(sizes_of(x), x), total = empty(sizes_of(x), x);
  run_norm(x, &residual, weight, eps, out, &total);
  return {out, total};
}

Tensor silu_and_mul_op(const Tensor& x) {
  std::vector<int64_t> sizes = sizes_of(x);
  STD_TORCH_CHECK(!sizes.empty() && sizes.back() % 2 == 0, "the last dimension must be even");
  sizes.back() /= 2;
  Tensor out = empty(sizes, x);
  const Rows rows = rows_of(x, "x");
  STD_TORCH_CHECK(rows.outer == 1 || rows.outer_stride == rows.inner * rows.inner_stride,
                  "x: strides are not supported");
  GateArgs args{dtype_of(x), x.const_data_ptr(), out.mutable_data_ptr(), rows.outer * rows.inner, sizes.back(),
                rows.inner_stride};
  over_rows(args.rows, args.rows * args.width, [&](int64_t begin, int64_t end) {
    kernels()->silu_and_mul(args, begin, end);
  });
  return out;
}

void rotary_op(const Tensor& positions, const Tensor& query, const Tensor& key, const Tensor& cos_sin) {
  check_rows(cos_sin, 2, "cos_sin_cache");
  STD_TORCH_CHECK(cos_sin.scalar_type() == ScalarType::Float && cos_sin.size(1) % 2 == 0,
                  "cos_sin_cache must be float32 with an even number of columns");
  const Integers position(positions, "positions");
  const int64_t tokens = positions.size(0);
  for (int64_t t = 0; t < tokens; ++t) {
    STD_TORCH_CHECK(position.data()[t] >= 0 && position.data()[t] < cos_sin.size(0), "position ", position.data()[t],
                    " is beyond the table of ", cos_sin.size(0));
  }
  for (const Tensor* x : {&query, &key}) {
    check_rows(*x, 3, "query and key");
    STD_TORCH_CHECK(x->size(0) == tokens && x->size(2) >= cos_sin.size(1), "one position for each token, and heads as",
                    " wide as the rotary dimensions");
    const RotaryArgs args{dtype_of(*x), position.data(), x->mutable_data_ptr(),
                          static_cast<const float*>(cos_sin.const_data_ptr()), tokens, x->size(1), x->stride(0),
                          x->stride(1), cos_sin.stride(0), static_cast<int>(cos_sin.size(1) / 2)};
    over_rows(tokens, tokens * args.heads * args.half, [&](int64_t begin, int64_t end) {
      kernels()->rotary(args, begin, end);
    });
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(quire, CPU, library) {
  if (kernels() == nullptr) return;  // a processor without AVX2 keeps the reference
  library.impl("rms_norm", TORCH_BOX(&rms_norm_op));
  library.impl("add_rms_norm", TORCH_BOX(&add_rms_norm_op));
  library.impl("silu_and_mul", TORCH_BOX(&silu_and_mul_op));
  library.impl("rotary_embedding", TORCH_BOX(&rotary_op));
}

}  // namespace quire
