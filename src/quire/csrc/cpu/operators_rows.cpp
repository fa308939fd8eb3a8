// Operators that treat every token by itself: norms, gates, rotary positions, sums, look-ups.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "operators.h"

namespace quire {
namespace {

// A step of one function of the kernel table and its arguments.
template <class Args> class RowStep final : public TokenStep {
 public:
  using Function = void (*KernelTable::*)(const Args&, int64_t, int64_t);
  RowStep(Function function, const Args& args, int64_t work_of_a_row, int64_t rows_of_a_token = 1)
      : run_(kernels()->*function), args_(args), work_of_a_row_(work_of_a_row), rows_of_a_token_(rows_of_a_token) {}
  int64_t work(const Extent& extent) const override { return extent.tokens * rows_of_a_token_ * work_of_a_row_; }
  void run_tokens(int64_t begin, int64_t end) const override {
    run_(args_, begin * rows_of_a_token_, end * rows_of_a_token_);
  }

 private:
  void (*run_)(const Args&, int64_t, int64_t);
  Args args_;
  int64_t work_of_a_row_, rows_of_a_token_;
};

// How many multiply-adds an element of these operations is worth.
constexpr int64_t NORM = 4, GATE = 16, ROTARY = 4, SUM = 2;

void norm(const Tensor& x, const Tensor* residual, const Tensor& weight, double eps, const Tensor& out,
          const Tensor* total) {
  const Rows rows = rows_of(x, "x");
  STD_TORCH_CHECK(weight.dim() == 1 && weight.size(0) == rows.width && weight.scalar_type() == x.scalar_type() &&
                      weight.is_contiguous(),
                  "weight must be a contiguous vector of the last dimension and of the dtype of x");
  NormArgs args{};
  args.dtype = dtype_of(x);
  args.x = x.const_data_ptr(), args.weight = weight.const_data_ptr(), args.out = out.mutable_data_ptr();
  args.inner = rows.inner, args.width = rows.width;
  args.x_token_stride = rows.token_stride, args.x_inner_stride = rows.inner_stride;
  args.eps = static_cast<float>(eps);
  if (residual != nullptr) {
    STD_TORCH_CHECK(sizes_of(*residual) == sizes_of(x) && residual->scalar_type() == x.scalar_type(),
                    "residual must have the shape and the dtype of x");
    const Rows others = rows_of(*residual, "residual");
    args.residual = residual->const_data_ptr(), args.total = total->mutable_data_ptr();
    args.residual_token_stride = others.token_stride, args.residual_inner_stride = others.inner_stride;
  }
  perform(std::make_unique<RowStep<NormArgs>>(&KernelTable::rms_norm, args, NORM * rows.inner * rows.width),
          {rows.tokens, 0});
}

Tensor rms_norm_op(const Tensor& x, const Tensor& weight, double eps) {
  Tensor out = empty(sizes_of(x), x);
  norm(x, nullptr, weight, eps, out, nullptr);
  return out;
}

std::tuple<Tensor, Tensor> add_rms_norm_op(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps) {
  Tensor out = empty(sizes_of(x), x), total = empty(sizes_of(x), x);
  norm(x, &residual, weight, eps, out, &total);
  return {out, total};
}

// The tensor as rows of the last dimension, one a token.
Rows flat_rows(const Tensor& t, const char* name) {
  Rows rows = rows_of(t, name);
  STD_TORCH_CHECK(rows.inner == 1 || rows.tokens == 1 || rows.token_stride == rows.inner * rows.inner_stride, name,
                  ": strides are not supported");
  if (rows.inner > 1) rows.token_stride = rows.inner_stride;
  rows.tokens *= rows.inner;
  rows.inner = 1;
  return rows;
}

Tensor gated_rms_norm_op(const Tensor& x, const Tensor& gate, const Tensor& weight, double eps, bool gates_first) {
  const Rows rows = rows_of(x, "x"), gates = rows_of(gate, "gate");
  STD_TORCH_CHECK(sizes_of(x) == sizes_of(gate) && gate.scalar_type() == x.scalar_type() &&
                      weight.scalar_type() == x.scalar_type() && weight.is_contiguous(),
                  "x and gate must be alike, and the weight contiguous and of their dtype");
  const bool is_shared = weight.dim() == 1 && weight.size(0) == rows.width;
  STD_TORCH_CHECK(is_shared || sizes_of(weight) == std::vector<int64_t>({rows.inner, rows.width}),
                  "weight must be a vector of the last dimension, or one for each row of a token");
  Tensor out = empty(sizes_of(x), x);
  GatedNormArgs args{};
  args.dtype = dtype_of(x), args.gates_first = gates_first;
  args.x = x.const_data_ptr(), args.gate = gate.const_data_ptr(), args.weight = weight.const_data_ptr();
  args.out = out.mutable_data_ptr();
  args.inner = rows.inner, args.width = rows.width;
  args.x_token_stride = rows.token_stride, args.x_inner_stride = rows.inner_stride;
  args.gate_token_stride = gates.token_stride, args.gate_inner_stride = gates.inner_stride;
  args.weight_stride = is_shared ? 0 : rows.width;
  args.eps = static_cast<float>(eps);
  perform(std::make_unique<RowStep<GatedNormArgs>>(&KernelTable::gated_norm, args,
                                                   (NORM + 2 * GATE) * rows.inner * rows.width),
          {rows.tokens, 0});
  return out;
}

using GateFunction = void (*KernelTable::*)(const GateArgs&, int64_t, int64_t);

Tensor gate(const Tensor& x, GateFunction function, double alpha, double limit) {
  std::vector<int64_t> sizes = sizes_of(x);
  STD_TORCH_CHECK(!sizes.empty() && sizes.back() % 2 == 0, "the last dimension must be even");
  sizes.back() /= 2;
  Tensor out = empty(sizes, x);
  const Rows rows = flat_rows(x, "x");
  const GateArgs args{dtype_of(x), x.const_data_ptr(), out.mutable_data_ptr(), sizes.back(), rows.token_stride,
                      static_cast<float>(alpha), static_cast<float>(limit)};
  // a token has several rows where it has several experts
  const int64_t tokens = sizes.size() < 3 ? rows.tokens : sizes[0];
  perform(std::make_unique<RowStep<GateArgs>>(function, args, GATE * args.width,
                                              tokens > 0 ? rows.tokens / tokens : 1),
          {tokens, 0});
  return out;
}

Tensor silu_and_mul_op(const Tensor& x) { return gate(x, &KernelTable::silu_and_mul, 0, 0); }

Tensor clamped_swiglu_op(const Tensor& x, double alpha, double limit) {
  STD_TORCH_CHECK(limit > 0, "limit must be above zero");
  return gate(x, &KernelTable::clamped_swiglu, alpha, limit);
}

Tensor pair(const Tensor& x, const Tensor& y, bool is_product) {
  STD_TORCH_CHECK(sizes_of(x) == sizes_of(y) && x.scalar_type() == y.scalar_type(), "x and y must be alike");
  Tensor out = empty(sizes_of(x), x);
  const Rows rows = flat_rows(x, "x"), others = flat_rows(y, "y");
  PairArgs args{dtype_of(x), is_product, x.const_data_ptr(), y.const_data_ptr(), out.mutable_data_ptr(), rows.width,
                rows.token_stride, others.token_stride};
  perform(std::make_unique<RowStep<PairArgs>>(&KernelTable::combine_pair, args, SUM * args.width), {rows.tokens, 0});
  return out;
}

Tensor add_op(const Tensor& x, const Tensor& y) { return pair(x, y, false); }
Tensor multiply_op(const Tensor& x, const Tensor& y) { return pair(x, y, true); }

Tensor convert_op(const Tensor& x, ScalarType dtype) {
  Tensor out = empty(sizes_of(x), dtype);
  const Rows rows = flat_rows(x, "x");
  const ConvertArgs args{dtype_of(x), dtype_of(out), x.const_data_ptr(), out.mutable_data_ptr(), rows.width,
                         rows.token_stride};
  perform(std::make_unique<RowStep<ConvertArgs>>(&KernelTable::convert, args, SUM * args.width), {rows.tokens, 0});
  return out;
}

Tensor scale_op(const Tensor& x, double factor, bool is_division) {
  Tensor out = empty(sizes_of(x), x);
  const Rows rows = flat_rows(x, "x");
  const ScaleArgs args{dtype_of(x), is_division, static_cast<float>(factor), x.const_data_ptr(),
                       out.mutable_data_ptr(), rows.width, rows.token_stride};
  perform(std::make_unique<RowStep<ScaleArgs>>(&KernelTable::scale, args, SUM * args.width), {rows.tokens, 0});
  return out;
}

Tensor activate_op(const Tensor& x, int64_t kind) {
  Tensor out = empty(sizes_of(x), x);
  const Rows rows = flat_rows(x, "x");
  const ActivationArgs args{dtype_of(x), static_cast<Activation>(kind), x.const_data_ptr(), out.mutable_data_ptr(),
                            rows.width, rows.token_stride};
  perform(std::make_unique<RowStep<ActivationArgs>>(&KernelTable::activate, args, GATE * args.width), {rows.tokens, 0});
  return out;
}

Tensor layer_norm_op(const Tensor& x, std::optional<Tensor> weight, std::optional<Tensor> bias, double eps) {
  Tensor out = empty(sizes_of(x), x);
  const Rows rows = flat_rows(x, "x");
  for (const std::optional<Tensor>* vector : {&weight, &bias}) {
    STD_TORCH_CHECK(!vector->has_value() || ((*vector)->dim() == 1 && (*vector)->size(0) == rows.width &&
                                             (*vector)->scalar_type() == x.scalar_type() && (*vector)->is_contiguous()),
                    "weight and bias must be contiguous vectors of the last dimension and of the dtype of x");
  }
  const LayerNormArgs args{dtype_of(x),
                           x.const_data_ptr(),
                           weight.has_value() ? weight->const_data_ptr() : nullptr,
                           bias.has_value() ? bias->const_data_ptr() : nullptr,
                           out.mutable_data_ptr(),
                           rows.width,
                           rows.token_stride,
                           static_cast<float>(eps)};
  perform(std::make_unique<RowStep<LayerNormArgs>>(&KernelTable::layer_norm, args, NORM * args.width), {rows.tokens, 0});
  return out;
}

class RotaryStep final : public TokenStep {
 public:
  RotaryStep(const Tensor& positions, const Tensor& query, const Tensor& key, const Tensor& cos_sin,
             bool is_interleaved)
      : positions_(positions, "positions"), num_positions_(cos_sin.size(0)) {
    const Tensor* tensors[] = {&query, &key};
    for (int i = 0; i < 2; ++i) {
      const Tensor& x = *tensors[i];
      check_rows(x, 3, "query and key");
      STD_TORCH_CHECK(x.size(0) == positions.size(0) && x.size(2) >= cos_sin.size(1),
                      "one position for each token, and heads as wide as the rotary dimensions");
      args_[i] = {dtype_of(x),  positions_.data(), x.mutable_data_ptr(), static_cast<const float*>(cos_sin.const_data_ptr()),
                  x.size(1),    x.stride(0),       x.stride(1),          cos_sin.stride(0),
                  static_cast<int>(cos_sin.size(1) / 2), is_interleaved};
    }
  }

  int64_t work(const Extent& extent) const override {
    return ROTARY * extent.tokens * args_[0].half * 2 * (args_[0].heads + args_[1].heads);
  }

  void check(const Extent& extent) const override {
    const int64_t* position = positions_.data();
    for (int64_t t = 0; t < extent.tokens; ++t) {
      STD_TORCH_CHECK(position[t] >= 0 && position[t] < num_positions_, "position ", position[t],
                      " is beyond the table of ", num_positions_);
    }
  }

  void run_tokens(int64_t begin, int64_t end) const override {
    for (const RotaryArgs& args : args_) kernels()->rotary(args, begin, end);
  }

 private:
  Integers positions_;
  int64_t num_positions_;
  RotaryArgs args_[2];
};

void rotary_op(const Tensor& positions, const Tensor& query, const Tensor& key, const Tensor& cos_sin,
               bool is_interleaved) {
  check_rows(cos_sin, 2, "cos_sin_cache");
  STD_TORCH_CHECK(cos_sin.scalar_type() == ScalarType::Float && cos_sin.size(1) % 2 == 0,
                  "cos_sin_cache must be float32 with an even number of columns");
  perform(std::make_unique<RotaryStep>(positions, query, key, cos_sin, is_interleaved), {positions.size(0), 0});
}

// Rows of several tensors side by side; of one, a contiguous copy.
class JoinStep final : public TokenStep {
 public:
  JoinStep(const std::vector<Tensor>& tensors, const Tensor& out)
      : size_(static_cast<int64_t>(out.element_size())),
        row_bytes_(out.size(out.dim() - 1) * size_),
        out_(static_cast<char*>(out.mutable_data_ptr())) {
    for (const Tensor& t : tensors) parts_.push_back({rows_of(t, "a tensor"), static_cast<const char*>(t.const_data_ptr())});
  }

  int64_t tokens() const { return parts_[0].rows.tokens; }
  int64_t work(const Extent& extent) const override { return extent.tokens * parts_[0].rows.inner * row_bytes_; }

  void run_tokens(int64_t begin, int64_t end) const override {
    const int64_t inner = parts_[0].rows.inner;
    for (int64_t i = begin * inner; i < end * inner; ++i) {
      char* to = out_ + i * row_bytes_;
      for (const Part& part : parts_) {
        const int64_t offset = i / inner * part.rows.token_stride + i % inner * part.rows.inner_stride;
        std::memcpy(to, part.data + offset * size_, part.rows.width * size_);
        to += part.rows.width * size_;
      }
    }
  }

 private:
  struct Part {
    Rows rows;
    const char* data;
  };
  std::vector<Part> parts_;
  int64_t size_, row_bytes_;
  char* out_;
};

Tensor join_op(const std::vector<Tensor>& tensors) {
  STD_TORCH_CHECK(!tensors.empty() && tensors[0].dim() > 0, "there must be rows to join");
  std::vector<int64_t> sizes = sizes_of(tensors[0]);
  int64_t width = 0;
  for (const Tensor& t : tensors) {
    std::vector<int64_t> others = sizes_of(t);
    STD_TORCH_CHECK(others.size() == sizes.size() && t.scalar_type() == tensors[0].scalar_type(),
                    "tensors must be alike");
    width += others.back();
    others.back() = sizes.back();
    STD_TORCH_CHECK(sizes == others, "tensors must be alike but for their last dimension");
  }
  sizes.back() = width;
  Tensor out = empty(sizes, tensors[0]);
  auto step = std::make_unique<JoinStep>(tensors, out);
  const int64_t tokens = step->tokens();
  perform(std::move(step), {tokens, 0});
  return out;
}

// Rows of a table by their numbers: embeddings. Where the table is a part of one, which begins with row `first`, rows that
// are elsewhere come as zeros.
class LookUpStep final : public TokenStep {
 public:
  LookUpStep(const Tensor& ids, const Tensor& table, std::optional<int64_t> first, const Tensor& out)
      : ids_(ids, "ids"),
        is_part_(first.has_value()),
        first_(first.value_or(0)),
        num_rows_(table.size(0)),
        row_bytes_(table.size(1) * static_cast<int64_t>(table.element_size())),
        stride_bytes_(table.stride(0) * static_cast<int64_t>(table.element_size())),
        table_(static_cast<const char*>(table.const_data_ptr())),
        out_(static_cast<char*>(out.mutable_data_ptr())) {}

  int64_t work(const Extent& extent) const override { return extent.tokens * row_bytes_; }

  void check(const Extent& extent) const override {
    for (int64_t t = 0; t < extent.tokens && !is_part_; ++t) {
      STD_TORCH_CHECK(ids_.data()[t] >= 0 && ids_.data()[t] < num_rows_, "id ", ids_.data()[t],
                      " is beyond the table of ", num_rows_);
    }
  }

  void run_tokens(int64_t begin, int64_t end) const override {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t row = ids_.data()[t] - first_;
      char* to = out_ + t * row_bytes_;
      if (row < 0 || row >= num_rows_) std::memset(to, 0, row_bytes_);
      else std::memcpy(to, table_ + row * stride_bytes_, row_bytes_);
    }
  }

 private:
  Integers ids_;
  bool is_part_;
  int64_t first_, num_rows_, row_bytes_, stride_bytes_;
  const char* table_;
  char* out_;
};

Tensor look_up_op(const Tensor& table, const Tensor& ids, std::optional<int64_t> first) {
  check_rows(table, 2, "table");
  Tensor out = empty({ids.size(0), table.size(1)}, table);
  perform(std::make_unique<LookUpStep>(ids, table, first, out), {ids.size(0), 0});
  return out;
}

// The experts of each token, and how much each of them counts. See reference/route_tokens.py.
struct Routing {
  bool is_sigmoid, is_normalised;
  int64_t num_experts, top_k, num_groups, top_groups;
  float scale;
};

class RouteStep final : public TokenStep {
 public:
  RouteStep(const Routing& routing, const Tensor& logits, const float* bias, const Tensor& weights, const Tensor& ids)
      : routing_(routing), dtype_(dtype_of(logits)), logits_(logits.const_data_ptr()), stride_(logits.stride(0)),
        bias_(bias), weights_(static_cast<float*>(weights.mutable_data_ptr())),
        ids_(static_cast<int32_t*>(ids.mutable_data_ptr())) {}

  int64_t work(const Extent& extent) const override {
    return extent.tokens * routing_.num_experts * (8 + routing_.top_k);
  }

  void run_tokens(int64_t begin, int64_t end) const override {
    float* scratch = static_cast<float*>(thread_scratch(2 * routing_.num_experts * sizeof(float)));
    for (int64_t t = begin; t < end; ++t) route(t, scratch, scratch + routing_.num_experts);
  }

 private:
  float logit(int64_t i) const {
    switch (dtype_) {
      case DType::float32: return static_cast<const float*>(logits_)[i];
      case DType::bfloat16: return static_cast<const torch::headeronly::BFloat16*>(logits_)[i];
      case DType::float16: return static_cast<const torch::headeronly::Half*>(logits_)[i];
    }
    return 0;
  }

  void route(int64_t token, float* scores, float* ranks) const {
    const Routing& r = routing_;
    for (int64_t e = 0; e < r.num_experts; ++e) scores[e] = logit(token * stride_ + e);
    if (r.is_sigmoid) {
      for (int64_t e = 0; e < r.num_experts; ++e) scores[e] = 1.0f / (1.0f + std::exp(-scores[e]));
    } else {
      const float most = *std::max_element(scores, scores + r.num_experts);
      float sum = 0;
      for (int64_t e = 0; e < r.num_experts; ++e) sum += scores[e] = std::exp(scores[e] - most);
      for (int64_t e = 0; e < r.num_experts; ++e) scores[e] /= sum;
    }
    for (int64_t e = 0; e < r.num_experts; ++e) ranks[e] = scores[e] + (bias_ != nullptr ? bias_[e] : 0);
    if (r.top_groups < r.num_groups) leave_groups(ranks);
    float sum = 0;
    for (int64_t k = 0; k < r.top_k; ++k) {
      const int64_t best = std::max_element(ranks, ranks + r.num_experts) - ranks;
      ids_[token * r.top_k + k] = static_cast<int32_t>(best);
      sum += weights_[token * r.top_k + k] = scores[best];
      ranks[best] = -INFINITY;
    }
    const float factor = (r.is_normalised ? 1.0f / (sum + SMALLEST_SUM) : 1.0f) * r.scale;
    for (int64_t k = 0; k < r.top_k; ++k) weights_[token * r.top_k + k] *= factor;
  }

  // Experts of groups that are not among the best are out. A group counts as its two best do where there is a bias.
  void leave_groups(float* ranks) const {
    const Routing& r = routing_;
    const int64_t size = r.num_experts / r.num_groups;
    std::vector<float> of_group(r.num_groups);
    for (int64_t g = 0; g < r.num_groups; ++g) {
      float first = -INFINITY, second = -INFINITY;
      for (int64_t e = g * size; e < (g + 1) * size; ++e) {
        if (ranks[e] > first) second = first, first = ranks[e];
        else if (ranks[e] > second) second = ranks[e];
      }
      of_group[g] = bias_ != nullptr ? first + second : first;
    }
    std::vector<bool> is_in(r.num_groups, false);
    for (int64_t k = 0; k < r.top_groups; ++k) {
      const size_t best = std::max_element(of_group.begin(), of_group.end()) - of_group.begin();
      is_in[best] = true, of_group[best] = -INFINITY;
    }
    for (int64_t e = 0; e < r.num_experts; ++e) {
      if (!is_in[e / size]) ranks[e] = -INFINITY;
    }
  }

  // what Transformers adds where it divides
  static constexpr float SMALLEST_SUM = 1e-20f;
  Routing routing_;
  DType dtype_;
  const void* logits_;
  int64_t stride_;
  const float* bias_;
  float* weights_;
  int32_t* ids_;
};

std::tuple<Tensor, Tensor> route_tokens_op(const Tensor& logits, std::optional<Tensor> bias, int64_t top_k,
                                           bool is_sigmoid, bool is_normalised, int64_t num_groups, int64_t top_groups,
                                           double scale) {
  check_rows(logits, 2, "logits");
  const int64_t tokens = logits.size(0), num_experts = logits.size(1);
  STD_TORCH_CHECK(top_k >= 1 && top_k <= num_experts, "a token has 1 to ", num_experts, " experts, not ", top_k);
  STD_TORCH_CHECK(num_groups >= 1 && num_experts % num_groups == 0 && top_groups >= 1 && top_groups <= num_groups &&
                      num_experts / num_groups * top_groups >= top_k,
                  "groups must be of equal size, and those that are left must hold the experts of a token");
  const float* shift = nullptr;
  if (bias.has_value()) {
    STD_TORCH_CHECK(bias->scalar_type() == ScalarType::Float && bias->dim() == 1 && bias->size(0) == num_experts &&
                        bias->is_contiguous(),
                    "bias must be a contiguous float32 vector, a value for each expert");
    shift = static_cast<const float*>(bias->const_data_ptr());
  }
  Tensor weights = empty({tokens, top_k}, ScalarType::Float), ids = empty({tokens, top_k}, ScalarType::Int);
  const Routing routing{is_sigmoid, is_normalised, num_experts, top_k, num_groups, top_groups,
                        static_cast<float>(scale)};
  perform(std::make_unique<RouteStep>(routing, logits, shift, weights, ids), {tokens, 0});
  return {weights, ids};
}

Tensor weigh_experts_op(const Tensor& x, const Tensor& weights) {
  check_rows(x, 3, "x");
  STD_TORCH_CHECK(weights.dim() == 2 && weights.is_contiguous() && weights.scalar_type() == ScalarType::Float &&
                      weights.size(0) == x.size(0) && weights.size(1) == x.size(1),
                  "weights must be contiguous float32, one for each expert of a token");
  Tensor out = empty({x.size(0), x.size(2)}, x);
  const WeighArgs args{dtype_of(x), x.const_data_ptr(), static_cast<const float*>(weights.const_data_ptr()),
                       out.mutable_data_ptr(), x.size(1), x.size(2), x.stride(0), x.stride(1)};
  perform(std::make_unique<RowStep<WeighArgs>>(&KernelTable::weigh_experts, args, SUM * args.top_k * args.width),
          {x.size(0), 0});
  return out;
}

Tensor new_rows_op(const Tensor& like, const std::vector<int64_t>& sizes) { return empty(sizes, like); }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(quire, CPU, library) {
  if (kernels() == nullptr) return;  // a processor without AVX2 keeps the reference
  library.impl("rms_norm", TORCH_BOX(&rms_norm_op));
  library.impl("add_rms_norm", TORCH_BOX(&add_rms_norm_op));
  library.impl("silu_and_mul", TORCH_BOX(&silu_and_mul_op));
  library.impl("clamped_swiglu", TORCH_BOX(&clamped_swiglu_op));
  library.impl("rotary_embedding", TORCH_BOX(&rotary_op));
  library.impl("gated_rms_norm", TORCH_BOX(&gated_rms_norm_op));
  library.impl("convert", TORCH_BOX(&convert_op));
  library.impl("scale", TORCH_BOX(&scale_op));
  library.impl("add", TORCH_BOX(&add_op));
  library.impl("multiply", TORCH_BOX(&multiply_op));
  library.impl("activate", TORCH_BOX(&activate_op));
  library.impl("layer_norm", TORCH_BOX(&layer_norm_op));
  library.impl("look_up", TORCH_BOX(&look_up_op));
  library.impl("join", TORCH_BOX(&join_op));
  library.impl("new_rows", TORCH_BOX(&new_rows_op));
  library.impl("route_tokens", TORCH_BOX(&route_tokens_op));
  library.impl("weigh_experts", TORCH_BOX(&weigh_experts_op));
}

}  // namespace quire
