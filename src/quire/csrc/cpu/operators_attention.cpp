// Operators on the paged KV cache: writing, reading, copying.

#include <algorithm>
#include <cmath>

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

KeyShare share_of(int64_t rank, int64_t size) {
  STD_TORCH_CHECK(0 <= rank && rank < size, "rank ", rank, " of ", size, ": there is none");
  return {rank, size};
}

StoreArgs store_args(const Tensor& rows, const Tensor& cache, Indices slots, const KeyShare& share, const char* name) {
  check_rows(rows, 3, name);
  check_cache(cache, "cache");
  STD_TORCH_CHECK(rows.size(1) == cache.size(1) && rows.size(2) == dim_of(cache), name,
                  " and its cache must have the same heads and the same head dimension");
  const int64_t size = static_cast<int64_t>(cache.element_size());
  StoreArgs args{};
  args.dtype = dtype_of(rows), args.format = format_of(cache);
  args.rows = rows.const_data_ptr(), args.cache = static_cast<char*>(cache.mutable_data_ptr());
  args.slots = slots, args.share = share;
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
                 const Tensor& slots, int64_t rank, int64_t size) {
  STD_TORCH_CHECK(slots.dim() == 1 && key.size(0) == slots.size(0) &&
                      (!value.has_value() || value->size(0) == slots.size(0)),
                  "one slot for each token");
  STD_TORCH_CHECK(k_cache.size(2) == v_cache.size(2), "both caches must have the same block size");
  const int64_t num_slots = min64(k_cache.size(0), v_cache.size(0)) * k_cache.size(2) * size;
  const Indices slot = indices(slots, "slots");
  const KeyShare share = share_of(rank, size);
  std::vector<StoreArgs> stores{store_args(key, k_cache, slot, share, "key")};
  if (value.has_value()) stores.push_back(store_args(*value, v_cache, slot, share, "value"));
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

// One number of each query head, or some, which lie side by side.
std::vector<float> as_floats(const std::optional<Tensor>& given, int64_t num_heads, const char* what) {
  std::vector<float> values;
  if (!given.has_value()) return values;
  STD_TORCH_CHECK((given->dim() == 1 || (given->dim() == 2 && given->stride(1) == 1)) && given->size(0) == num_heads,
                  "one of ", what, " for each query head");
  const int64_t width = given->dim() == 1 ? 1 : given->size(1);
  const void* data = given->const_data_ptr();
  for (int64_t n = 0; n < num_heads * width; ++n) {
    const int64_t i = n / width * given->stride(0) + n % width;
    switch (dtype_of(*given)) {
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
                     int64_t value_dim, const Tensor& block_tables) {
  check_rows(query, 3, "query");
  check_rows(out, 3, "out");
  check_cache(k_cache, "k_cache");
  check_cache(v_cache, "v_cache");
  STD_TORCH_CHECK(k_cache.scalar_type() == v_cache.scalar_type(), "both caches must have the same dtype");
  // Where values are the beginnings of keys, both caches are one.
  const bool is_one = k_cache.const_data_ptr() == v_cache.const_data_ptr() && dim_of(k_cache) == dim_of(v_cache);
  STD_TORCH_CHECK(query.size(2) == dim_of(k_cache) &&
                      (value_dim == dim_of(v_cache) || (is_one && value_dim < dim_of(v_cache))),
                  "head dimensions do not fit");
  STD_TORCH_CHECK(query.size(0) == out.size(0) && query.size(1) == out.size(1), "out must have the rows of query");
  STD_TORCH_CHECK(k_cache.size(1) == v_cache.size(1) && k_cache.size(2) == v_cache.size(2) &&
                      query.size(1) % k_cache.size(1) == 0,
                  "heads of query must be a multiple of the heads of both caches");
  STD_TORCH_CHECK(block_tables.dim() == 2, "block_tables must have a row for each sequence");
}

AttentionArgs attention_args(const Tensor& query, const Tensor& k_cache, const Tensor& v_cache, const Tensor& tables,
                             const Tensor& out, int64_t value_dim) {
  AttentionArgs args{};
  args.dtype = dtype_of(query), args.out_dtype = dtype_of(out);
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
  args.value_dim = static_cast<int>(value_dim);
  args.v_row_dim = static_cast<int>(dim_of(v_cache));
  args.block_size = static_cast<int>(k_cache.size(2));
  return args;
}

// What attention does with the scores, and which keys are seen.
struct AttentionOptions {
  const std::optional<Tensor>&sinks, &slopes, &bias, &begins, &ends;
  double scale;
  int64_t sliding_window;
  bool is_chunked;
  double soft_cap;
};

// The rows of `out` are values; where they are those of a part, with a logarithm behind them.
void attend(const Tensor& query, const Tensor& k_cache, const Tensor& v_cache, const Tensor& block_tables,
            const Tensor& seq_lens, const Tensor& query_starts, const Tensor& out, int64_t value_dim,
            const AttentionOptions& options, const KeyShare& share) {
  check_attention(query, k_cache, v_cache, out, value_dim, block_tables);
  const int64_t num_sequences = block_tables.size(0);
  STD_TORCH_CHECK(seq_lens.dim() == 1 && seq_lens.size(0) == num_sequences && query_starts.dim() == 1 &&
                      query_starts.size(0) == num_sequences + 1,
                  "seq_lens and query_starts must fit the ", num_sequences, " rows of block_tables");
  AttentionArgs args = attention_args(query, k_cache, v_cache, block_tables, out, value_dim);
  args.share = share, args.is_part = value_dim < out.size(2);
  args.seq_lens = indices(seq_lens, "seq_lens"), args.query_starts = indices(query_starts, "query_starts");
  if (options.ends.has_value()) {
    const Tensor& ends = *options.ends;
    STD_TORCH_CHECK(ends.dim() == 1 && ends.size(0) == query.size(0), "one end for each row of query");
    args.ends = indices(ends, "ends");
  }
  if (options.begins.has_value()) {
    const Tensor& begins = *options.begins;
    STD_TORCH_CHECK(begins.dim() == 1 && begins.size(0) == num_sequences, "one beginning for each sequence");
    args.begins = indices(begins, "begins");
  }
  if (options.bias.has_value()) {
    STD_TORCH_CHECK(options.bias->dim() == 2 && options.bias->size(1) > 0, "bias must be [heads, distances]");
    args.bias_size = options.bias->size(1);
  }
  args.scale = static_cast<float>(options.scale);
  args.sliding_window = options.sliding_window, args.is_chunked = options.is_chunked;
  args.soft_cap = static_cast<float>(options.soft_cap);
  const int64_t heads = query.size(1);
  perform(std::make_unique<AttentionStep>(args, as_floats(options.sinks, heads, "sinks"),
                                          as_floats(options.slopes, heads, "slopes"),
                                          as_floats(options.bias, heads, "bias")),
          {query.size(0), num_sequences});
}

void paged_attention_op(const Tensor& query, const Tensor& k_cache, const Tensor& v_cache, const Tensor& block_tables,
                        const Tensor& seq_lens, const Tensor& query_starts, const Tensor& out,
                        std::optional<Tensor> sinks, std::optional<Tensor> ends, double scale, int64_t sliding_window,
                        bool is_chunked, double soft_cap, std::optional<Tensor> slopes, std::optional<Tensor> begins,
                        std::optional<Tensor> bias) {
  STD_TORCH_CHECK(query.scalar_type() == out.scalar_type(), "query and out must have the same dtype");
  attend(query, k_cache, v_cache, block_tables, seq_lens, query_starts, out, out.size(2),
         {sinks, slopes, bias, begins, ends, scale, sliding_window, is_chunked, soft_cap}, {});
}

Tensor attention_part_op(const Tensor& query, const Tensor& k_cache, const Tensor& v_cache, const Tensor& block_tables,
                         const Tensor& seq_lens, const Tensor& query_starts, std::optional<Tensor> sinks,
                         std::optional<Tensor> ends, double scale, int64_t sliding_window, bool is_chunked,
                         double soft_cap, int64_t value_dim, int64_t rank, int64_t size,
                         std::optional<Tensor> slopes, std::optional<Tensor> begins, std::optional<Tensor> bias) {
  Tensor part = empty({query.size(0), query.size(1), value_dim + 1}, ScalarType::Float);
  attend(query, k_cache, v_cache, block_tables, seq_lens, query_starts, part, value_dim,
         {sinks, slopes, bias, begins, ends, scale, sliding_window, is_chunked, soft_cap}, share_of(rank, size));
  return part;
}

// Each row of each head of the whole: the parts in their order, each with the weight that its logarithm says.
class MergeStep final : public TokenStep {
 public:
  MergeStep(const Tensor& parts, const Tensor& out)
      : parts_(static_cast<const float*>(parts.const_data_ptr())), out_(out.mutable_data_ptr()),
        dtype_(dtype_of(out)), num_parts_(parts.size(1)), heads_(out.size(1)), dim_(out.size(2)),
        token_stride_(out.stride(0)), head_stride_(out.stride(1)) {}

  int64_t work(const Extent& extent) const override { return extent.tokens * num_parts_ * heads_ * dim_; }

  void run_tokens(int64_t begin, int64_t end) const override {
    float* row = static_cast<float*>(thread_scratch(dim_ * sizeof(float)));
    for (int64_t i = begin * heads_; i < end * heads_; ++i) {
      const int64_t token = i / heads_, head = i % heads_;
      merge(token, head, row);
      store_row(row, token * token_stride_ + head * head_stride_);
    }
  }

 private:
  const float* part(int64_t token, int64_t number, int64_t head) const {
    return parts_ + ((token * num_parts_ + number) * heads_ + head) * (dim_ + 1);
  }

  void merge(int64_t token, int64_t head, float* row) const {
    float top = -INFINITY, sum = 0.0f;
    for (int64_t p = 0; p < num_parts_; ++p) top = std::max(top, part(token, p, head)[dim_]);
    std::fill(row, row + dim_, 0.0f);
    for (int64_t p = 0; p < num_parts_; ++p) {
      const float* from = part(token, p, head);
      if (from[dim_] == -INFINITY) continue;  // has seen nothing
      const float weight = std::exp(from[dim_] - top);
      sum += weight;
      for (int64_t c = 0; c < dim_; ++c) row[c] += weight * from[c];
    }
    if (sum == 0.0f) return;
    for (int64_t c = 0; c < dim_; ++c) row[c] /= sum;
  }

  void store_row(const float* row, int64_t to) const {
    switch (dtype_) {
      case DType::float32: return std::copy(row, row + dim_, static_cast<float*>(out_) + to), void();
      case DType::bfloat16: return std::copy(row, row + dim_, static_cast<torch::headeronly::BFloat16*>(out_) + to), void();
      case DType::float16: return std::copy(row, row + dim_, static_cast<torch::headeronly::Half*>(out_) + to), void();
    }
  }

  const float* parts_;
  void* out_;
  DType dtype_;
  int64_t num_parts_, heads_, dim_, token_stride_, head_stride_;
};

void merge_attention_op(const Tensor& parts, const Tensor& out) {
  check_rows(out, 3, "out");
  STD_TORCH_CHECK(parts.is_cpu() && parts.dim() == 4 && parts.is_contiguous() &&
                      parts.scalar_type() == ScalarType::Float,
                  "parts must be contiguous float32 [tokens, parts, heads, value_dim + 1] on the CPU");
  STD_TORCH_CHECK(parts.size(0) == out.size(0) && parts.size(2) == out.size(1) && parts.size(3) == out.size(2) + 1,
                  "out must have the rows and heads of the parts");
  perform(std::make_unique<MergeStep>(parts, out), {out.size(0), 0});
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(quire, CPU, library) {
  if (kernels() == nullptr) return;  // a processor without AVX2 keeps the reference
  library.impl("write_kv", TORCH_BOX(&write_kv_op));
  library.impl("copy_blocks", TORCH_BOX(&copy_blocks_op));
  library.impl("move_blocks", TORCH_BOX(&move_blocks_op));
  library.impl("paged_attention", TORCH_BOX(&paged_attention_op));
  library.impl("attention_part", TORCH_BOX(&attention_part_op));
  library.impl("merge_attention", TORCH_BOX(&merge_attention_op));
}

}  // namespace quire
