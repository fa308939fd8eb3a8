// Operators on the paged KV cache: writing, reading, copying.

#include "attention.h"
#include "cache.h"
#include "operators.h"

namespace quire {
namespace {

CacheFormat format_of(const Tensor& cache) {
  switch (cache.scalar_type()) {
    case ScalarType::Float: return CacheFormat::float32;
    case ScalarType::BFloat16: return CacheFormat::bfloat16;
    case ScalarType::Half: return CacheFormat::float16;
    case ScalarType::Char: return CacheFormat::int8;
    case ScalarType::Float8_e4m3fn: return CacheFormat::fp8;
    default: break;
  }
  STD_TORCH_CHECK(false, "a cache must be float32, bfloat16, float16, int8 or float8_e4m3fn");
  return CacheFormat::float32;
}

// The last dimension of a cache includes the scale of a row of codes.
int64_t dim_of(const Tensor& cache) { return cache.size(3) - (has_scales(format_of(cache)) ? SCALE_BYTES : 0); }

void check_cache(const Tensor& cache, const char* name) {
  check_rows(cache, 4, name);
  STD_TORCH_CHECK(cache.stride(2) == cache.size(3) || cache.size(2) == 1, name,
                  " must be contiguous in its last two dimensions");
  STD_TORCH_CHECK(!has_scales(format_of(cache)) || cache.size(3) % SCALE_BYTES == 0, name,
                  ": the head dimension must be a multiple of 4 where scales follow");
}

StoreArgs store_args(const Tensor& rows, const Tensor& cache, Indices slots, const char* name) {
  check_rows(rows, 3, name);
  check_cache(cache, "cache");
  STD_TORCH_CHECK(rows.size(1) == cache.size(1) && rows.size(2) == dim_of(cache), name,
                  " and its cache must have the same heads and the same head dimension");
  const int64_t size = static_cast<int64_t>(cache.element_size());
  StoreArgs args{};
  args.dtype = dtype_of(rows), args.format = format_of(cache);
  args.rows = rows.const_data_ptr(), args.cache = static_cast<char*>(cache.mutable_data_ptr());
  args.slots = slots;
  args.token_stride = rows.stride(0), args.head_stride = rows.stride(1);
  args.block_stride = cache.stride(0) * size, args.cache_head_stride = cache.stride(1) * size;
  args.heads = static_cast<int>(rows.size(1)), args.dim = static_cast<int>(rows.size(2));
  args.block_size = static_cast<int>(cache.size(2));
  return args;
}

// What is in them is read in every run of a step, so only the address is kept here.
Indices indices(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.is_cpu() && (t.scalar_type() == ScalarType::Int || t.scalar_type() == ScalarType::Long), name,
                  " must be int32 or int64 on the CPU");
  STD_TORCH_CHECK(t.stride(t.dim() - 1) == 1 || t.size(t.dim() - 1) <= 1, name, " must be contiguous");
  return {t.const_data_ptr(), t.scalar_type() == ScalarType::Long};
}

void write_kv_op(const Tensor& key, std::optional<Tensor> value, const Tensor& k_cache, const Tensor& v_cache,
                 const Tensor& slots) {
  STD_TORCH_CHECK(slots.dim() == 1 && key.size(0) == slots.size(0) &&
                      (!value.has_value() || value->size(0) == slots.size(0)),
                  "one slot for each token");
  STD_TORCH_CHECK(k_cache.size(2) == v_cache.size(2), "both caches must have the same block size");
  const int64_t num_slots = min64(k_cache.size(0), v_cache.size(0)) * k_cache.size(2);
  const Indices slot = indices(slots, "slots");
  std::vector<StoreArgs> stores{store_args(key, k_cache, slot, "key")};
  if (value.has_value()) stores.push_back(store_args(*value, v_cache, slot, "value"));
  perform(std::make_unique<WriteStep>(std::move(stores), num_slots), {slots.size(0), 0});
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
  copy_blocks(block_copies(caches, caches), pair, pairs.size(0));
}

void move_blocks_op(const std::vector<Tensor>& sources, const std::vector<Tensor>& destinations, const Tensor& pairs) {
  const int64_t* pair = checked_pairs(pairs, sources, destinations);
  move_blocks(block_copies(sources, destinations), pair, pairs.size(0));
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
  STD_TORCH_CHECK(query.scalar_type() == out.scalar_type(), "query and out must have the same dtype");
  STD_TORCH_CHECK(k_cache.scalar_type() == v_cache.scalar_type(), "both caches must have the same dtype");
  // Where values are the beginnings of keys, both caches are one.
  const bool is_one = k_cache.const_data_ptr() == v_cache.const_data_ptr() && dim_of(k_cache) == dim_of(v_cache);
  STD_TORCH_CHECK(query.size(2) == dim_of(k_cache) &&
                      (out.size(2) == dim_of(v_cache) || (is_one && out.size(2) < dim_of(v_cache))),
                  "head dimensions do not fit");
  STD_TORCH_CHECK(query.size(0) == out.size(0) && query.size(1) == out.size(1), "out must have the rows of query");
  STD_TORCH_CHECK(k_cache.size(1) == v_cache.size(1) && k_cache.size(2) == v_cache.size(2) &&
                      query.size(1) % k_cache.size(1) == 0,
                  "heads of query must be a multiple of the heads of both caches");
  STD_TORCH_CHECK(block_tables.dim() == 2, "block_tables must have a row for each sequence");
}

AttentionArgs attention_args(const Tensor& query, const Tensor& k_cache, const Tensor& v_cache, const Tensor& tables,
                             const Tensor& out) {
  AttentionArgs args{};
  args.dtype = dtype_of(query);
  args.query = query.const_data_ptr();
  args.format = format_of(k_cache);
  args.k_cache = static_cast<const char*>(k_cache.const_data_ptr());
  args.v_cache = static_cast<const char*>(v_cache.const_data_ptr());
  args.out = out.mutable_data_ptr();
  args.block_tables = indices(tables, "block_tables");
  args.query_token_stride = query.stride(0), args.query_head_stride = query.stride(1);
  args.out_token_stride = out.stride(0), args.out_head_stride = out.stride(1);
  const int64_t size = static_cast<int64_t>(k_cache.element_size());
  args.k_block_stride = k_cache.stride(0) * size, args.k_head_stride = k_cache.stride(1) * size;
  args.v_block_stride = v_cache.stride(0) * size, args.v_head_stride = v_cache.stride(1) * size;
  args.table_stride = tables.stride(0);
  args.num_blocks = min64(k_cache.size(0), v_cache.size(0)), args.blocks_in_row = tables.size(1);
  args.num_kv_heads = static_cast<int>(k_cache.size(1));
  args.group_size = static_cast<int>(query.size(1) / k_cache.size(1));
  args.head_dim = static_cast<int>(query.size(2));
  args.value_dim = static_cast<int>(out.size(2));
  args.v_row_dim = static_cast<int>(dim_of(v_cache));
  args.block_size = static_cast<int>(k_cache.size(2));
  return args;
}

void paged_attention_op(const Tensor& query, const Tensor& k_cache, const Tensor& v_cache, const Tensor& block_tables,
                        const Tensor& seq_lens, const Tensor& query_starts, const Tensor& out,
                        std::optional<Tensor> sinks, std::optional<Tensor> ends, double scale, int64_t sliding_window, bool is_chunked,
                        double soft_cap) {
  check_attention(query, k_cache, v_cache, out, block_tables);
  const int64_t num_sequences = block_tables.size(0);
  STD_TORCH_CHECK(seq_lens.dim() == 1 && seq_lens.size(0) == num_sequences && query_starts.dim() == 1 &&
                      query_starts.size(0) == num_sequences + 1,
                  "seq_lens and query_starts must fit the ", num_sequences, " rows of block_tables");
  AttentionArgs args = attention_args(query, k_cache, v_cache, block_tables, out);
  args.seq_lens = indices(seq_lens, "seq_lens"), args.query_starts = indices(query_starts, "query_starts");
  if (ends.has_value()) {
    STD_TORCH_CHECK(ends->dim() == 1 && ends->size(0) == query.size(0), "one end for each row of query");
    args.ends = indices(*ends, "ends");
  }
  args.scale = static_cast<float>(scale);
  args.sliding_window = sliding_window, args.is_chunked = is_chunked;
  args.soft_cap = static_cast<float>(soft_cap);
  perform(std::make_unique<AttentionStep>(args, sinks_as_float(sinks, query.size(1))),
          {query.size(0), num_sequences});
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(quire, CPU, library) {
  if (kernels() == nullptr) return;  // a processor without AVX2 keeps the reference
  library.impl("write_kv", TORCH_BOX(&write_kv_op));
  library.impl("copy_blocks", TORCH_BOX(&copy_blocks_op));
  library.impl("move_blocks", TORCH_BOX(&move_blocks_op));
  library.impl("paged_attention", TORCH_BOX(&paged_attention_op));
}

}  // namespace quire
