// Operators of recurrent layers: each head, or some channels, of a sequence's state takes the sequence's tokens one after
// the other. What each one means is written in kernels/reference. Sums have one order, so that bits do not depend on how
// many tokens, or whose, a step has.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "operators.h"

namespace quire {
namespace {

// Lanes of a sum over neighbours: a fixed number, whatever the processor has.
constexpr int64_t LANES = 8;
constexpr int64_t CHANNELS = 64;
constexpr float EPS = 1e-6f;

const float* floats(const Tensor& t, std::vector<int64_t> sizes, const char* name) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float && t.is_cpu() && t.is_contiguous() && sizes_of(t) == sizes, name,
                  " must be contiguous float32 of the shape that the other tensors ask for");
  return static_cast<const float*>(t.const_data_ptr());
}

float* results(const Tensor& t, std::vector<int64_t> sizes) {
  floats(t, std::move(sizes), "out");
  return static_cast<float*>(t.mutable_data_ptr());
}

// The sequences of a step, and where the state of each one lies.
class Steps {
 public:
  Steps(const Tensor& state, const Tensor& starts, const Tensor& kept, const Tensor& read, int64_t tokens)
      : starts_(starts, "query_starts"), kept_(kept, "num_kept"), read_(read, "num_read"), sequences(state.size(0)),
        numbers_(1), stride_(state.stride(0)), state_(static_cast<float*>(state.mutable_data_ptr())) {
    STD_TORCH_CHECK(!is_recording(), "recurrent layers are no steps of a program");
    STD_TORCH_CHECK(state.scalar_type() == ScalarType::Float && state.is_cpu(), "states must be float32");
    for (int64_t d = state.dim() - 1; d > 0; --d) {
      STD_TORCH_CHECK(state.stride(d) == numbers_ || state.size(d) == 1, "each state must be contiguous");
      numbers_ *= state.size(d);
    }
    STD_TORCH_CHECK(starts.size(0) == sequences + 1 && kept.size(0) == sequences && read.size(0) == sequences,
                    "query_starts, num_kept and num_read must have an entry for each state");
    for (int64_t s = 0; s < sequences; ++s) {
      STD_TORCH_CHECK(begin(s) >= 0 && begin(s) <= begin(s + 1), "query_starts must not fall");
    }
    STD_TORCH_CHECK(begin(sequences) <= tokens, "query_starts go beyond the tokens");
  }

  int64_t begin(int64_t s) const { return starts_.data()[s]; }
  float* state(int64_t s) const { return state_ + s * stride_; }

  // Calls token(t, state, absorbs) for the tokens of a sequence; `part` numbers from `first` on are what it works on, and
  // `copy` has room for as many.
  template <class Token> void each(int64_t s, int64_t first, int64_t part, float* copy, Token token) const {
    float* own = state(s) + first;
    for (int64_t i = 0; i < begin(s + 1) - begin(s); ++i) {
      if (i == kept_.data()[s]) {
        std::memcpy(copy, own, part * sizeof(float));
        own = copy;
      }
      token(begin(s) + i, own, !(i == 0 && read_.data()[s] != 0));
    }
  }

 private:
  Integers starts_, kept_, read_;

 public:
  int64_t sequences;

 private:
  int64_t numbers_, stride_;
  float* state_;
};

// Calls work(sequence, part) for all parts of all sequences, on the threads of the crew.
template <class Work> void for_each_part(int64_t sequences, int64_t parts, const Work& work) {
  const int64_t count = sequences * parts;
  if (count == 0) return;
  run_crew(static_cast<int>(std::min<int64_t>(count, crew_size())), [&](Crew& crew) {
    crew.for_each(count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) work(i / parts, i % parts);
    });
  });
}

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }
float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

float dot(const float* x, const float* y, int64_t n) {
  float lanes[LANES] = {};
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    for (int64_t lane = 0; lane < LANES; ++lane) lanes[lane] += x[i + lane] * y[i + lane];
  }
  for (int64_t lane = 0; i < n; ++i, ++lane) lanes[lane] += x[i] * y[i];
  float total = 0;
  for (float lane : lanes) total += lane;
  return total;
}

// out[e] = sum over d of state[d, e] * x[d]
void read_off(const float* state, const float* x, float* out, int64_t rows, int64_t width) {
  std::fill(out, out + width, 0.0f);
  for (int64_t d = 0; d < rows; ++d) {
    for (int64_t e = 0; e < width; ++e) out[e] += state[d * width + e] * x[d];
  }
}

void causal_conv_op(const Tensor& x, const Tensor& weight, std::optional<Tensor> bias, const Tensor& state,
                    const Tensor& starts, const Tensor& kept, const Tensor& read, const Tensor& result, bool silu) {
  STD_TORCH_CHECK(x.dim() == 2 && state.dim() == 3, "x must be [tokens, channels], the state [sequences, channels, width]");
  const int64_t tokens = x.size(0), channels = x.size(1), width = state.size(2);
  STD_TORCH_CHECK(state.size(1) == channels, "x and the state must have the same channels");
  const float* in = floats(x, {tokens, channels}, "x");
  const float* factors = floats(weight, {channels, width}, "weight");
  const float* shift = bias.has_value() ? floats(*bias, {channels}, "bias") : nullptr;
  float* out = results(result, {tokens, channels});
  const Steps steps(state, starts, kept, read, tokens);
  for_each_part(steps.sequences, (channels + CHANNELS - 1) / CHANNELS, [&](int64_t s, int64_t part) {
    const int64_t first = part * CHANNELS, count = std::min(CHANNELS, channels - first);
    float* copy = static_cast<float*>(thread_scratch(count * width * sizeof(float)));
    steps.each(s, first * width, count * width, copy, [&](int64_t t, float* window, bool absorbs) {
      for (int64_t c = 0; c < count; ++c, window += width) {
        if (absorbs) {
          std::memmove(window, window + 1, (width - 1) * sizeof(float));
          window[width - 1] = in[t * channels + first + c];
        }
        float total = shift != nullptr ? shift[first + c] : 0.0f;
        for (int64_t w = 0; w < width; ++w) total += window[w] * factors[(first + c) * width + w];
        out[t * channels + first + c] = silu ? total * sigmoid(total) : total;
      }
    });
  });
}

void unit(const float* x, float* out, int64_t n, float scale) {
  const float factor = scale / std::sqrt(dot(x, x, n) + EPS);
  for (int64_t i = 0; i < n; ++i) out[i] = x[i] * factor;
}

void gated_delta_rule_op(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& a,
                         const Tensor& b, const Tensor& a_log, const Tensor& dt_bias, const Tensor& state, const Tensor& starts, const Tensor& kept,
                         const Tensor& read, const Tensor& result) {
  STD_TORCH_CHECK(query.dim() == 3 && value.dim() == 3 && state.dim() == 4,
                  "queries and values must be [tokens, heads, size], the state [sequences, heads, key, value]");
  const int64_t tokens = value.size(0), heads = value.size(1), E = value.size(2);
  const int64_t key_heads = query.size(1), D = query.size(2);
  STD_TORCH_CHECK(key_heads > 0 && heads % key_heads == 0 && state.size(1) == heads && state.size(2) == D && state.size(3) == E,
                  "heads of values must be a multiple of those of keys, and the state must fit them");
  const float* q = floats(query, {tokens, key_heads, D}, "query");
  const float* k = floats(key, {tokens, key_heads, D}, "key");
  const float* v = floats(value, {tokens, heads, E}, "value");
  const float* steps_of = floats(a, {tokens, heads}, "a");
  const float* shares = floats(b, {tokens, heads}, "b");
  const float* speeds = floats(a_log, {heads}, "a_log");
  const float* bias = floats(dt_bias, {heads}, "dt_bias");
  float* out = results(result, {tokens, heads, E});
  const Steps steps(state, starts, kept, read, tokens);
  const float scale = 1.0f / std::sqrt(static_cast<float>(D));
  for_each_part(steps.sequences, heads, [&](int64_t s, int64_t head) {
    float* copy = static_cast<float*>(thread_scratch((D * E + D + E) * sizeof(float)));
    float *direction = copy + D * E, *change = direction + D;
    steps.each(s, head * D * E, D * E, copy, [&](int64_t t, float* own, bool absorbs) {
      const int64_t row = t * key_heads + head / (heads / key_heads), at = t * heads + head;
      if (absorbs) {
        const float left = std::exp(-std::exp(speeds[head]) * softplus(steps_of[at] + bias[head]));
        const float share = sigmoid(shares[at]);
        for (int64_t i = 0; i < D * E; ++i) own[i] *= left;
        unit(k + row * D, direction, D, 1.0f);
        read_off(own, direction, change, D, E);
        for (int64_t e = 0; e < E; ++e) change[e] = (v[at * E + e] - change[e]) * share;
        for (int64_t d = 0; d < D; ++d) {
          for (int64_t e = 0; e < E; ++e) own[d * E + e] += direction[d] * change[e];
        }
      }
      unit(q + row * D, direction, D, scale);
      read_off(own, direction, out + at * E, D, E);
    });
  });
}

void ssd_scan_op(const Tensor& x, const Tensor& dt, const Tensor& dt_bias, const Tensor& a_log, const Tensor& b,
                 const Tensor& c, const Tensor& d, const Tensor& state, const Tensor& starts, const Tensor& kept,
                 const Tensor& read, const Tensor& result, double least_dt, double most_dt) {
  STD_TORCH_CHECK(x.dim() == 3 && b.dim() == 3 && state.dim() == 4,
                  "x must be [tokens, heads, size], b [tokens, groups, numbers], the state [sequences, heads, size, numbers]");
  const int64_t tokens = x.size(0), heads = x.size(1), E = x.size(2), groups = b.size(1), N = b.size(2);
  STD_TORCH_CHECK(groups > 0 && heads % groups == 0 && state.size(1) == heads && state.size(2) == E && state.size(3) == N,
                  "heads must be a multiple of groups, and the state must fit them");
  const float* in = floats(x, {tokens, heads, E}, "x");
  const float* spans = floats(dt, {tokens, heads}, "dt");
  const float* bias = floats(dt_bias, {heads}, "dt_bias");
  const float* speeds = floats(a_log, {heads}, "a_log");
  const float least = static_cast<float>(least_dt), most = static_cast<float>(most_dt);
  const float* bs = floats(b, {tokens, groups, N}, "b");
  const float* cs = floats(c, {tokens, groups, N}, "c");
  const float* past = floats(d, {heads}, "d");
  float* out = results(result, {tokens, heads, E});
  const Steps steps(state, starts, kept, read, tokens);
  for_each_part(steps.sequences, heads, [&](int64_t s, int64_t head) {
    float* copy = static_cast<float*>(thread_scratch(E * N * sizeof(float)));
    steps.each(s, head * E * N, E * N, copy, [&](int64_t t, float* own, bool absorbs) {
      const int64_t at = t * heads + head, row = t * groups + head / (heads / groups);
      if (absorbs) {
        const float span = std::min(std::max(softplus(spans[at] + bias[head]), least), most);
        const float left = std::exp(-span * std::exp(speeds[head]));
        for (int64_t e = 0; e < E; ++e) {
          const float input = span * in[at * E + e];
          for (int64_t n = 0; n < N; ++n) own[e * N + n] = own[e * N + n] * left + input * bs[row * N + n];
        }
      }
      for (int64_t e = 0; e < E; ++e) {
        out[at * E + e] = dot(own + e * N, cs + row * N, N) + past[head] * in[at * E + e];
      }
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(quire, CPU, library) {
  if (kernels() == nullptr) return;  // a processor without AVX2 keeps the reference
  library.impl("causal_conv", TORCH_BOX(&causal_conv_op));
  library.impl("gated_delta_rule", TORCH_BOX(&gated_delta_rule_op));
  library.impl("ssd_scan", TORCH_BOX(&ssd_scan_op));
}

}  // namespace quire
