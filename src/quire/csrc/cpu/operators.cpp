// The torch operators on the CPU: checks arguments, takes pointers and strides, calls the kernels.
//
// Only torch's stable ABI is used: one library serves every torch from 2.11 on, and nothing of ATen is compiled. The
// schemas are defined in kernels/operators.py.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>
#include <vector>

#include "attention.h"
#include "cache.h"
#include "kernels.h"

namespace quire {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

DType dtype_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float: return DType::float32;
    case ScalarType::BFloat16: return DType::bfloat16;
    case ScalarType::Half: return DType::float16;
    default: break;
  }
  STD_TORCH_CHECK(false, "dtype must be float32, bfloat16 or float16");
  return DType::float32;
}

int max_threads() {
  uint32_t threads = 1;
  torch_get_num_threads(&threads);
  return static_cast<int>(threads);
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

void check_rows(const Tensor& t, int64_t dim, const char* name) {
  STD_TORCH_CHECK(t.dim() == dim, name, " must have ", dim, " dimensions, not ", t.dim());
  STD_TORCH_CHECK(t.stride(dim - 1) == 1 || t.size(dim - 1) <= 1, name, " must be contiguous in its last dimension");
}

void check_cache(const Tensor& cache, const char* name) {
  check_rows(cache, 4, name);
  STD_TORCH_CHECK(cache.stride(2) == cache.size(3) || cache.size(2) == 1, name,
                  " must be contiguous in its last two dimensions");
}

CacheWrite cache_write(const Tensor& rows, const Tensor& cache, const char* name) {
  check_rows(rows, 3, name);
  check_cache(cache, "cache");
  STD_TORCH_CHECK(rows.size(1) == cache.size(1) && rows.size(2) == cache.size(3), name, " and its cache must have the",
                  " same heads and the same head dimension");
  STD_TORCH_CHECK(rows.scalar_type() == cache.scalar_type(), name, " and its cache must have the same dtype");
  const int64_t size = static_cast<int64_t>(rows.element_size());
  return {static_cast<const char*>(rows.const_data_ptr()), static_cast<char*>(cache.mutable_data_ptr()),
          rows.stride(0) * size, rows.stride(1) * size, cache.stride(0) * size, cache.stride(1) * size,
          rows.size(2) * size};
}

void write_kv_op(const Tensor& key, const Tensor& value, const Tensor& k_cache, const Tensor& v_cache,
                 const Tensor& slots) {
  STD_TORCH_CHECK(key.size(0) == slots.size(0) && value.size(0) == slots.size(0), "one slot for each token");
  STD_TORCH_CHECK(k_cache.size(2) == v_cache.size(2), "both caches must have the same block size");
  const Integers slot(slots, "slots");
  const int64_t tokens = slots.size(0), num_slots = min64(k_cache.size(0), v_cache.size(0)) * k_cache.size(2);
  for (int64_t t = 0; t < tokens; ++t) {
    STD_TORCH_CHECK(slot.data()[t] < num_slots, "slot ", slot.data()[t], " is beyond the cache of ", num_slots);
  }
  write_kv(cache_write(key, k_cache, "key"), cache_write(value, v_cache, "value"), slot.data(), tokens, key.size(1),
           k_cache.size(2), max_threads());
}

// Bytes of a block, which must lie side by side.
int64_t block_bytes(const Tensor& cache) {
  int64_t elements = 1;
  for (int64_t d = cache.dim() - 1; d > 0; --d) {
    STD_TORCH_CHECK(cache.stride(d) == elements || cache.size(d) == 1, "the blocks of a cache must be contiguous");
    elements *= cache.size(d);
  }
  return elements * static_cast<int64_t>(cache.element_size());
}

// Pairs (block of the source, block of the destination) as a pointer; every one of them exists.
const int64_t* checked_pairs(const Tensor& pairs, const std::vector<Tensor>& sources,
                             const std::vector<Tensor>& destinations) {
  STD_TORCH_CHECK(pairs.dim() == 2 && pairs.size(1) == 2 && pairs.scalar_type() == ScalarType::Long && pairs.is_cpu() &&
                      pairs.is_contiguous(),
                  "pairs must be a contiguous int64 tensor [N, 2] on the CPU");
  const int64_t* pair = static_cast<const int64_t*>(pairs.const_data_ptr());
  for (int side = 0; side < 2; ++side) {
    for (const Tensor& cache : side == 0 ? sources : destinations) {
      for (int64_t i = side; i < 2 * pairs.size(0); i += 2) {
        STD_TORCH_CHECK(pair[i] >= 0 && pair[i] < cache.size(0), "block ", pair[i], " is not in a cache of ",
                        cache.size(0));
      }
    }
  }
  return pair;
}

std::vector<BlockCopy> block_copies(const std::vector<Tensor>& sources, const std::vector<Tensor>& destinations) {
  STD_TORCH_CHECK(sources.size() == destinations.size(), "one destination for each source");
  std::vector<BlockCopy> copies;
  for (size_t i = 0; i < sources.size(); ++i) {
    const Tensor &from = sources[i], &to = destinations[i];
    const int64_t bytes = block_bytes(from);
    STD_TORCH_CHECK(bytes == block_bytes(to) && from.scalar_type() == to.scalar_type(),
                    "source and destination must have the same blocks");
    copies.push_back({static_cast<const char*>(from.const_data_ptr()), static_cast<char*>(to.mutable_data_ptr()),
                      from.stride(0) * static_cast<int64_t>(from.element_size()),
                      to.stride(0) * static_cast<int64_t>(to.element_size()), bytes});
  }
  return copies;
}

void copy_blocks_op(const std::vector<Tensor>& caches, const Tensor& pairs) {
  const int64_t* pair = checked_pairs(pairs, caches, caches);
  copy_blocks(block_copies(caches, caches), pair, pairs.size(0), max_threads());
}

void move_blocks_op(const std::vector<Tensor>& sources, const std::vector<Tensor>& destinations, const Tensor& pairs) {
  const int64_t* pair = checked_pairs(pairs, sources, destinations);
  move_blocks(block_copies(sources, destinations), pair, pairs.size(0), max_threads());
}

std::vector<float> sinks_as_float(const std::optional<Tensor>& sinks, int64_t num_heads) {
  std::vector<float> values;
  if (!sinks.has_value()) return values;
  STD_TORCH_CHECK(sinks->dim() == 1 && sinks->size(0) == num_heads, "one sink for each query head");
  const void* data = sinks->const_data_ptr();
  for (int64_t h = 0; h < num_heads; ++h) {
    const int64_t i = h * sinks->stride(0);
    switch (dtype_of(*sinks)) {
      case DType::float32: values.push_back(static_cast<const float*>(data)[i]); break;
      case DType::bfloat16:
        values.push_back(static_cast<float>(static_cast<const torch::headeronly::BFloat16*>(data)[i]));
        break;
      case DType::float16:
        values.push_back(static_cast<float>(static_cast<const torch::headeronly::Half*>(data)[i]));
        break;
    }
  }
  return values;
}

void check_attention(const Tensor& query, const Tensor& k_cache, const Tensor& v_cache, const Tensor& out,
                     const Tensor& block_tables) {
  check_rows(query, 3, "query");
  check_rows(out, 3, "out");
  check_cache(k_cache, "k_cache");
  check_cache(v_cache, "v_cache");
  STD_TORCH_CHECK(query.scalar_type() == k_cache.scalar_type() && query.scalar_type() == v_cache.scalar_type() &&
                      query.scalar_type() == out.scalar_type(),
                  "query, caches and out must have the same dtype");
  STD_TORCH_CHECK(query.size(2) == k_cache.size(3) && out.size(2) == v_cache.size(3), "head dimensions do not fit");
  STD_TORCH_CHECK(query.size(2) % 2 == 0, "the head dimension must be even, not ", query.size(2));
  STD_TORCH_CHECK(query.size(0) == out.size(0) && query.size(1) == out.size(1), "out must have the rows of query");
  STD_TORCH_CHECK(k_cache.size(1) == v_cache.size(1) && k_cache.size(2) == v_cache.size(2) &&
                      query.size(1) % k_cache.size(1) == 0,
                  "heads of query must be a multiple of the heads of both caches");
  STD_TORCH_CHECK(block_tables.dim() == 2 && block_tables.scalar_type() == ScalarType::Int && block_tables.is_cpu() &&
                      (block_tables.stride(1) == 1 || block_tables.size(1) <= 1),
                  "block_tables must be int32 [S, M] on the CPU with contiguous rows");
}

AttentionArgs attention_args(const Tensor& query, const Tensor& k_cache, const Tensor& v_cache, const Tensor& tables,
                             const Tensor& out) {
  AttentionArgs args{};
  args.dtype = dtype_of(query);
  args.query = query.const_data_ptr();
  args.k_cache = k_cache.const_data_ptr();
  args.v_cache = v_cache.const_data_ptr();
  args.out = out.mutable_data_ptr();
  args.block_tables = static_cast<const int32_t*>(tables.const_data_ptr());
  args.query_token_stride = query.stride(0), args.query_head_stride = query.stride(1);
  args.out_token_stride = out.stride(0), args.out_head_stride = out.stride(1);
  args.k_block_stride = k_cache.stride(0), args.k_head_stride = k_cache.stride(1);
  args.v_block_stride = v_cache.stride(0), args.v_head_stride = v_cache.stride(1);
  args.table_stride = tables.stride(0);
  args.num_kv_heads = static_cast<int>(k_cache.size(1));
  args.group_size = static_cast<int>(query.size(1) / k_cache.size(1));
  args.head_dim = static_cast<int>(query.size(2));
  args.value_dim = static_cast<int>(out.size(2));
  args.block_size = static_cast<int>(k_cache.size(2));
  return args;
}

void paged_attention_op(const Tensor& query, const Tensor& k_cache, const Tensor& v_cache, const Tensor& block_tables,
                        const Tensor& seq_lens, const Tensor& query_starts, const Tensor& out,
                        std::optional<Tensor> sinks, double scale, int64_t sliding_window, double soft_cap) {
  check_attention(query, k_cache, v_cache, out, block_tables);
  const int64_t num_sequences = block_tables.size(0);
  STD_TORCH_CHECK(seq_lens.size(0) == num_sequences && query_starts.size(0) == num_sequences + 1,
                  "seq_lens and query_starts must fit the ", num_sequences, " rows of block_tables");
  const Integers lens(seq_lens, "seq_lens"), starts(query_starts, "query_starts");
  const int64_t capacity = block_tables.size(1) * k_cache.size(2);
  for (int64_t s = 0; s < num_sequences; ++s) {
    const int64_t rows = starts.data()[s + 1] - starts.data()[s];
    STD_TORCH_CHECK(rows <= 0 || (starts.data()[s] >= 0 && starts.data()[s + 1] <= query.size(0) &&
                                  lens.data()[s] <= capacity),
                    "sequence ", s, " has rows outside of query, or is longer than its ", capacity, " slots");
  }
  AttentionArgs args = attention_args(query, k_cache, v_cache, block_tables, out);
  const std::vector<float> sink = sinks_as_float(sinks, query.size(1));
  args.sinks = sink.empty() ? nullptr : sink.data();
  args.scale = static_cast<float>(scale);
  args.sliding_window = sliding_window;
  args.soft_cap = static_cast<float>(soft_cap);
  paged_attention(args, {static_cast<int>(num_sequences), lens.data(), starts.data()}, max_threads());
}

Tensor empty(const std::vector<int64_t>& sizes, const Tensor& like) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= sizes[d];
  }
  int32_t dtype = 0;
  aoti_torch_get_dtype(like.get(), &dtype);
  AtenTensorHandle handle = nullptr;
  aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), dtype,
                           aoti_torch_device_type_cpu(), 0, &handle);
  return Tensor(handle);
}

std::vector<int64_t> sizes_of(const Tensor& t) {
  std::vector<int64_t> sizes(t.dim());
  for (size_t d = 0; d < sizes.size(); ++d) sizes[d] = t.size(static_cast<int64_t>(d));
  return sizes;
}

// A tensor as rows [outer, inner, width] with a stride for each of the first two, which is as far as views go here.
struct Rows {
  int64_t outer = 1, inner = 1, outer_stride = 0, inner_stride = 0;
};

Rows rows_of(const Tensor& t, const char* name) {
  const int64_t n = t.dim();
  check_rows(t, n, name);
  Rows rows;
  if (n >= 2) rows.inner = t.size(n - 2), rows.inner_stride = t.stride(n - 2);
  int64_t expected = 0;
  for (int64_t d = n - 3; d >= 0; --d) {  // dimensions further out must continue each other
    if (rows.outer == 1) rows.outer_stride = t.stride(d);
    STD_TORCH_CHECK(rows.outer == 1 || t.size(d) == 1 || t.stride(d) == expected, name, ": strides are not supported");
    if (t.size(d) != 1) expected = t.stride(d) * t.size(d);
    rows.outer *= t.size(d);
  }
  return rows;
}

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
  library.impl("write_kv", TORCH_BOX(&write_kv_op));
  library.impl("copy_blocks", TORCH_BOX(&copy_blocks_op));
  library.impl("move_blocks", TORCH_BOX(&move_blocks_op));
  library.impl("paged_attention", TORCH_BOX(&paged_attention_op));
  library.impl("rms_norm", TORCH_BOX(&rms_norm_op));
  library.impl("add_rms_norm", TORCH_BOX(&add_rms_norm_op));
  library.impl("silu_and_mul", TORCH_BOX(&silu_and_mul_op));
  library.impl("rotary_embedding", TORCH_BOX(&rotary_op));
}

}  // namespace quire
