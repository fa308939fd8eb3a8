// Operators of recurrent layers: parts of the states of all sequences are shared out among the threads. Each is taken
// out of the cache's blocks, changed token by token, and put back. What each operator means is written in
// kernels/reference.

#include <algorithm>

#include "operators.h"
#include "recurrent.h"
#include "sequence_states.h"

namespace quire {
namespace {

// Channels of a convolution, and floats of a state, that one piece of work has: they stay in the first-level cache.
constexpr int64_t CHANNELS = 512;
constexpr int64_t FLOATS = 8192;

const float* floats(const Tensor& t, std::vector<int64_t> sizes, const char* name) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float && t.is_cpu() && t.is_contiguous() && sizes_of(t) == sizes, name,
                  " must be contiguous float32 of the shape that the other tensors ask for");
  return static_cast<const float*>(t.const_data_ptr());
}

// [tokens, heads, size]; without `size`, [tokens, heads].
HeadRows head_rows(const Tensor& t, const Tensor& like, std::vector<int64_t> sizes, const char* name) {
  STD_TORCH_CHECK(t.is_cpu() && t.scalar_type() == like.scalar_type() && sizes_of(t) == sizes, name,
                  " must have the shape that the other tensors ask for, and their dtype");
  const int64_t last = t.dim() - 1;
  STD_TORCH_CHECK(last < 2 || t.stride(last) == 1 || t.size(last) <= 1, name, " must be contiguous in its last dimension");
  return {t.const_data_ptr(), t.stride(0), t.stride(1)};
}

void* results(const Tensor& t, const Tensor& like, std::vector<int64_t> sizes) {
  STD_TORCH_CHECK(t.is_cpu() && t.scalar_type() == like.scalar_type() && t.is_contiguous() && sizes_of(t) == sizes,
                  "out must be contiguous, of the shape that the inputs ask for and of their dtype");
  return t.mutable_data_ptr();
}

// One operation on the states of all sequences, in parts that do not know of each other.
class StateStep : public Step {
 public:
  StateStep(SequenceStates states, int64_t floats) : floats_(floats), states_(std::move(states)) {}

  int64_t work(const Extent& extent) const final { return WORK * extent.tokens * floats_; }
  void check(const Extent& extent) const final { states_.check(extent); }
  bool needs_all_tokens() const final { return true; }

  void run(const Extent& extent, Crew& crew) const final {
    const int64_t parts = num_parts();
    crew.for_each(extent.sequences * parts, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t s = i / parts;
        if (states_.end(s) == states_.begin(s)) continue;
        run_part(states_, s, i % parts);
        if (i % parts == 0) states_.move_position(s);
      }
    });
  }

 protected:
  virtual int64_t num_parts() const = 0;
  // All tokens of the sequence.
  virtual void run_part(const SequenceStates& states, int64_t s, int64_t part) const = 0;

  // Those that the state takes in, and then the others, of which it keeps nothing.
  static Span kept(const SequenceStates& states, int64_t s) {
    return {states.begin(s), states.kept_end(s), states.reads_first(s)};
  }
  static Span drafts(const SequenceStates& states, int64_t s) {
    return {states.kept_end(s), states.end(s), states.kept_end(s) == states.begin(s) && states.reads_first(s)};
  }

 private:
  static constexpr int64_t WORK = 4;  // multiply-adds for each number of a state
  int64_t floats_;
  mutable SequenceStates states_;  // of this run
};

class ConvStep final : public StateStep {
 public:
  ConvStep(const ConvArgs& args, SequenceStates states)
      : StateStep(std::move(states), args.channels * args.width), args_(args), kernels_(*kernels()->recurrent) {}

 private:
  int64_t num_parts() const override { return (args_.channels + CHANNELS - 1) / CHANNELS; }

  void run_part(const SequenceStates& states, int64_t s, int64_t part) const override {
    const int64_t first = part * CHANNELS, count = std::min(CHANNELS, args_.channels - first), width = args_.width;
    float* window = static_cast<float*>(thread_scratch(width * CHANNELS * sizeof(float)));
    states.read(s, first, width, count, args_.channels, window, CHANNELS);
    const int64_t oldest = kernels_.conv(args_, first, count, kept(states, s), window, CHANNELS, 0);
    for (int64_t w = 0; w < width; ++w) {
      const float* row = window + (oldest + w) % width * CHANNELS;
      states.write(s, first + w * args_.channels, 1, count, args_.channels, row, CHANNELS);
    }
    kernels_.conv(args_, first, count, drafts(states, s), window, CHANNELS, oldest);
  }

  ConvArgs args_;
  const RecurrentKernels& kernels_;
};

class DeltaRuleStep final : public StateStep {
 public:
  DeltaRuleStep(const DeltaRuleArgs& args, SequenceStates states)
      : StateStep(std::move(states), args.heads * args.key_dim * args.value_dim), args_(args),
        kernels_(*kernels()->recurrent), columns_(kernels_.rule_columns),
        slices_((args.value_dim + columns_ - 1) / columns_) {}

 private:
  int64_t num_parts() const override { return args_.heads * slices_; }

  void run_part(const SequenceStates& states, int64_t s, int64_t part) const override {
    const int64_t D = args_.key_dim, E = args_.value_dim, head = part / slices_, first = part % slices_ * columns_;
    const int64_t count = std::min(columns_, E - first), start = head * D * E + first;
    float* own = static_cast<float*>(thread_scratch((D * columns_ + rule_scratch(args_)) * sizeof(float)));
    float* scratch = own + D * columns_;
    if (count < columns_) std::fill(own, scratch, 0.0f);
    states.read(s, start, D, count, E, own, columns_);
    kernels_.delta_rule(args_, head, first, kept(states, s), own, scratch);
    states.write(s, start, D, count, E, own, columns_);
    kernels_.delta_rule(args_, head, first, drafts(states, s), own, scratch);
  }

  DeltaRuleArgs args_;
  const RecurrentKernels& kernels_;
  int64_t columns_, slices_;  // of a head
};

class ScanStep final : public StateStep {
 public:
  ScanStep(const ScanArgs& args, SequenceStates states)
      : StateStep(std::move(states), args.heads * args.head_dim * args.state_size), args_(args),
        kernels_(*kernels()->recurrent), stride_(round_up(args.state_size, kernels_.lanes)),
        rows_(std::max(SCAN_ROWS, std::min(round_up(args.head_dim, SCAN_ROWS), FLOATS / stride_ / SCAN_ROWS * SCAN_ROWS))),
        slices_((args.head_dim + rows_ - 1) / rows_) {}

 private:
  int64_t num_parts() const override { return args_.heads * slices_; }

  void run_part(const SequenceStates& states, int64_t s, int64_t part) const override {
    const int64_t P = args_.head_dim, N = args_.state_size, head = part / slices_, first = part % slices_ * rows_;
    const int64_t count = std::min(rows_, P - first), start = (head * P + first) * N;
    float* own = static_cast<float*>(thread_scratch((rows_ * stride_ + scan_scratch(args_, rows_)) * sizeof(float)));
    float* scratch = own + rows_ * stride_;
    if (N < stride_ || count % SCAN_ROWS != 0) std::fill(own, scratch, 0.0f);
    states.read(s, start, count, N, N, own, stride_);
    kernels_.scan(args_, head, first, count, kept(states, s), own, scratch);
    states.write(s, start, count, N, N, own, stride_);
    kernels_.scan(args_, head, first, count, drafts(states, s), own, scratch);
  }

  ScanArgs args_;
  const RecurrentKernels& kernels_;
  int64_t stride_, rows_, slices_;  // of a row in scratch; of a part; parts of a head
};

void causal_conv_op(const Tensor& x, const Tensor& weight, std::optional<Tensor> bias,
                    const std::vector<Tensor>& places, int64_t first_chunk, const Tensor& tables, const Tensor& starts,
                    const Tensor& query_starts, const Tensor& num_kept, const Tensor& result, bool silu) {
  STD_TORCH_CHECK(x.dim() == 2 && weight.dim() == 2, "x must be [tokens, channels], the weight [width, channels]");
  const int64_t tokens = x.size(0), channels = x.size(1), width = weight.size(0);
  STD_TORCH_CHECK(x.stride(1) == 1 || channels <= 1, "x must be contiguous in its last dimension");
  ConvArgs args{};
  args.dtype = dtype_of(x);
  args.x = head_rows(x, x, {tokens, channels}, "x");
  args.weight = floats(weight, {width, channels}, "weight");
  args.bias = bias.has_value() ? floats(*bias, {channels}, "bias") : nullptr;
  args.out = results(result, x, {tokens, channels});
  args.channels = channels, args.width = width, args.has_silu = silu;
  SequenceStates states(places, first_chunk, tables, starts, query_starts, num_kept, channels * width);
  perform(std::make_unique<ConvStep>(args, std::move(states)), {tokens, tables.size(0)});
}

void gated_delta_rule_op(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& a, const Tensor& b,
                         const Tensor& a_log, const Tensor& dt_bias, const std::vector<Tensor>& places,
                         int64_t first_chunk, const Tensor& tables, const Tensor& starts, const Tensor& query_starts,
                         const Tensor& num_kept, const Tensor& result) {
  STD_TORCH_CHECK(query.dim() == 3 && value.dim() == 3, "queries and values must be [tokens, heads, size]");
  const int64_t tokens = value.size(0), heads = value.size(1), E = value.size(2);
  const int64_t key_heads = query.size(1), D = query.size(2);
  STD_TORCH_CHECK(key_heads > 0 && heads % key_heads == 0, "heads of values must be a multiple of those of keys");
  DeltaRuleArgs args{};
  args.dtype = dtype_of(value);
  args.query = head_rows(query, value, {tokens, key_heads, D}, "query");
  args.key = head_rows(key, value, {tokens, key_heads, D}, "key");
  args.value = head_rows(value, value, {tokens, heads, E}, "value");
  args.a = head_rows(a, value, {tokens, heads}, "a"), args.b = head_rows(b, value, {tokens, heads}, "b");
  args.a_log = floats(a_log, {heads}, "a_log"), args.dt_bias = floats(dt_bias, {heads}, "dt_bias");
  args.out = results(result, value, {tokens, heads, E});
  args.heads = heads, args.num_shared = heads / key_heads, args.key_dim = D, args.value_dim = E;
  SequenceStates states(places, first_chunk, tables, starts, query_starts, num_kept, heads * D * E);
  perform(std::make_unique<DeltaRuleStep>(args, std::move(states)), {tokens, tables.size(0)});
}

void ssd_scan_op(const Tensor& x, const Tensor& dt, const Tensor& dt_bias, const Tensor& a_log, const Tensor& b,
                 const Tensor& c, const Tensor& d, const std::vector<Tensor>& places, int64_t first_chunk,
                 const Tensor& tables, const Tensor& starts, const Tensor& query_starts, const Tensor& num_kept,
                 const Tensor& result, double least_dt, double most_dt) {
  STD_TORCH_CHECK(x.dim() == 3 && b.dim() == 3, "x must be [tokens, heads, size], b [tokens, groups, numbers]");
  const int64_t tokens = x.size(0), heads = x.size(1), P = x.size(2), groups = b.size(1), N = b.size(2);
  STD_TORCH_CHECK(groups > 0 && heads % groups == 0, "heads must be a multiple of groups");
  ScanArgs args{};
  args.dtype = dtype_of(x);
  args.x = head_rows(x, x, {tokens, heads, P}, "x"), args.dt = head_rows(dt, x, {tokens, heads}, "dt");
  args.b = head_rows(b, x, {tokens, groups, N}, "b"), args.c = head_rows(c, x, {tokens, groups, N}, "c");
  args.dt_bias = floats(dt_bias, {heads}, "dt_bias"), args.a_log = floats(a_log, {heads}, "a_log");
  args.skip = floats(d, {heads}, "d");
  args.out = results(result, x, {tokens, heads, P});
  args.heads = heads, args.num_shared = heads / groups, args.head_dim = P, args.state_size = N;
  args.least_dt = static_cast<float>(least_dt), args.most_dt = static_cast<float>(most_dt);
  SequenceStates states(places, first_chunk, tables, starts, query_starts, num_kept, heads * P * N);
  perform(std::make_unique<ScanStep>(args, std::move(states)), {tokens, tables.size(0)});
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(quire, CPU, library) {
  if (kernels() == nullptr) return;  // a processor without AVX2 keeps the reference
  library.impl("causal_conv", TORCH_BOX(&causal_conv_op));
  library.impl("gated_delta_rule", TORCH_BOX(&gated_delta_rule_op));
  library.impl("ssd_scan", TORCH_BOX(&ssd_scan_op));
}

}  // namespace quire
