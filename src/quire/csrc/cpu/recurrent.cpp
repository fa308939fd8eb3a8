// The recurrences themselves, for some tokens of one sequence and a part of its state.

#include "recurrent.h"
#include "simd.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr float EPS = 1e-6f;
// Vectors of columns of a delta rule, and chains that each of their sums is added up in.
constexpr int COLUMN_VECTORS = 4;
constexpr int64_t COLUMNS = COLUMN_VECTORS * W;
constexpr int CHAINS = 2;

QUIRE_INLINE vf sigmoid(vf x) { return set1(1.0f) / (set1(1.0f) + exp(zero() - x)); }

// log(1 + exp(x)) = max(x, 0) + log(1 + u), u = exp(-|x|), and log(1 + u) = 2 artanh(u / (2 + u)), of which the series
// ends below 1e-8 because u / (2 + u) is at most 1 / 3.
QUIRE_INLINE vf softplus(vf x) {
  const vf u = exp(min(x, zero() - x));
  const vf s = u / (set1(2.0f) + u), z = s * s;
  vf sum = set1(1.0f / 15);
  sum = fma(sum, z, set1(1.0f / 13));
  sum = fma(sum, z, set1(1.0f / 11));
  sum = fma(sum, z, set1(1.0f / 9));
  sum = fma(sum, z, set1(1.0f / 7));
  sum = fma(sum, z, set1(1.0f / 5));
  sum = fma(sum, z, set1(1.0f / 3));
  sum = fma(sum, z, set1(1.0f));
  return max(zero(), x) + (s + s) * sum;  // this order of arguments keeps NaN
}

template <class T> QUIRE_INLINE float value_of(const T* p) {
  float lanes[W];
  store(lanes, load_part(p, 1));
  return lanes[0];
}
QUIRE_INLINE float value_of(const float* p) { return *p; }

// One number of each of the next W tokens, as a vector: a function of it costs no more than that of one number.
template <class T> QUIRE_INLINE vf numbers_of(const HeadRows& rows, int64_t token, int64_t head, int64_t count) {
  float lanes[W] = {};
  for (int64_t i = 0; i < (count < W ? count : W); ++i) {
    lanes[i] = value_of(static_cast<const T*>(rows.data) + (token + i) * rows.token_stride + head * rows.head_stride);
  }
  return load(lanes);
}

template <class T> QUIRE_INLINE const T* row_of(const HeadRows& rows, int64_t token, int64_t head) {
  return static_cast<const T*>(rows.data) + token * rows.token_stride + head * rows.head_stride;
}

// ------------------------------------------------------------------------------------------ the short convolution

template <class T> int64_t conv_of(const ConvArgs& args, int64_t first, int64_t count, Span span, float* window,
                                   int64_t stride, int64_t oldest) {
  const int64_t width = args.width;
  for (int64_t t = span.begin; t < span.end; ++t) {
    const bool absorbs = t > span.begin || !span.reads_first;
    float* newest = window + oldest * stride;
    if (absorbs && ++oldest == width) oldest = 0;
    const T* x = row_of<T>(args.x, t, 0) + first;
    T* out = static_cast<T*>(args.out) + t * args.channels + first;
    for (int64_t c = 0; c < count; c += W) {
      const int64_t n = count - c;
      if (absorbs) store(newest + c, load_upto(x + c, n));
      vf sum = args.bias != nullptr ? load_upto(args.bias + first + c, n) : zero();
      for (int64_t w = 0, row = oldest; w < width; ++w) {
        sum = fma(load(window + row * stride + c), load_upto(args.weight + w * args.channels + first + c, n), sum);
        if (++row == width) row = 0;
      }
      store_upto(out + c, args.has_silu ? sum * sigmoid(sum) : sum, n);
    }
  }
  return oldest;
}

// ------------------------------------------------------------------------------------------ the gated delta rule

// The row at length `scale`, as floats.
template <class T> QUIRE_INLINE void unit(const T* x, float* out, int64_t size, float scale) {
  vf sum = zero();
  for (int64_t i = 0; i < size; i += W) {
    const vf v = load_upto(x + i, size - i);
    store(out + i, v);
    sum = fma(v, v, sum);
  }
  const vf factor = set1(scale / __builtin_sqrtf(hsum(sum) + EPS));
  for (int64_t i = 0; i < size; i += W) store(out + i, load(out + i) * factor);
}

// Sums of columns of the state, each in CHAINS chains.
struct Columns {
  vf chains[CHAINS][COLUMN_VECTORS];
  QUIRE_INLINE void clear(Columns& c) {
    for (auto& chain : c.chains)
      for (vf& sum : chain) sum = zero();
  }
  QUIRE_INLINE vf total(const Columns& c, int v) { return c.chains[0][v] + c.chains[1][v]; }
};

// sum over d of state[d, e] * x[d]
QUIRE_INLINE void read_columns(const float* state, const float* x, int64_t size, Columns& sums) {
  Columns::clear(sums);
  int64_t d = 0;
  for (; d + CHAINS <= size; d += CHAINS) {
#pragma GCC unroll 2
    for (int chain = 0; chain < CHAINS; ++chain) {
      const vf factor = set1(x[d + chain]);
#pragma GCC unroll 4
      for (int v = 0; v < COLUMN_VECTORS; ++v) {
        sums.chains[chain][v] = fma(load(state + (d + chain) * COLUMNS + v * W), factor, sums.chains[chain][v]);
      }
    }
  }
  if (d < size) {
    for (int v = 0; v < COLUMN_VECTORS; ++v) {
      sums.chains[0][v] = fma(load(state + d * COLUMNS + v * W), set1(x[d]), sums.chains[0][v]);
    }
  }
}

// One row of the state takes in its change and gives what the query asks of it.
QUIRE_INLINE void take_in(float* row, vf left, vf key, vf query, const vf* change, vf* sums) {
#pragma GCC unroll 4
  for (int v = 0; v < COLUMN_VECTORS; ++v) {
    const vf value = fma(key, change[v], load(row + v * W) * left);
    store(row + v * W, value);
    sums[v] = fma(value, query, sums[v]);
  }
}

QUIRE_INLINE void take_in_all(float* state, float left, const float* key, const float* query, int64_t size,
                              const vf* change, Columns& sums) {
  Columns::clear(sums);
  const vf kept = set1(left);
  int64_t d = 0;
  for (; d + CHAINS <= size; d += CHAINS) {
#pragma GCC unroll 2
    for (int chain = 0; chain < CHAINS; ++chain) {
      take_in(state + (d + chain) * COLUMNS, kept, set1(key[d + chain]), set1(query[d + chain]), change,
              sums.chains[chain]);
    }
  }
  if (d < size) take_in(state + d * COLUMNS, kept, set1(key[d]), set1(query[d]), change, sums.chains[0]);
}

template <class T> void delta_rule_of(const DeltaRuleArgs& args, int64_t head, int64_t first, Span span, float* state,
                                      float* scratch) {
  const int64_t size = args.key_dim, num_columns = args.value_dim - first, key_head = head / args.num_shared;
  float *query = scratch, *key = scratch + round_up(size, MOST_LANES);
  const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(size));
  const vf speed = exp(set1(args.a_log[head])), bias = set1(args.dt_bias[head]);
  float left[W], share[W];
  for (int64_t t = span.begin; t < span.end; ++t) {
    const int64_t i = (t - span.begin) % W;
    if (i == 0) {
      const int64_t count = span.end - t;
      store(left, exp(zero() - speed * softplus(numbers_of<T>(args.a, t, head, count) + bias)));
      store(share, sigmoid(numbers_of<T>(args.b, t, head, count)));
    }
    unit(row_of<T>(args.query, t, key_head), query, size, scale);
    Columns sums;
    if (t > span.begin || !span.reads_first) {
      unit(row_of<T>(args.key, t, key_head), key, size, 1.0f);
      read_columns(state, key, size, sums);
      const T* value = row_of<T>(args.value, t, head) + first;
      vf change[COLUMN_VECTORS];
      for (int v = 0; v < COLUMN_VECTORS; ++v) {
        const int64_t n = num_columns - v * W;
        const vf wanted = n > 0 ? load_upto(value + v * W, n) : zero();
        change[v] = fnma(set1(left[i]), Columns::total(sums, v), wanted) * set1(share[i]);
      }
      take_in_all(state, left[i], key, query, size, change, sums);
    } else {
      read_columns(state, query, size, sums);
    }
    T* out = static_cast<T*>(args.out) + (t * args.heads + head) * args.value_dim + first;
    for (int v = 0; v < COLUMN_VECTORS && v * W < num_columns; ++v) {
      store_upto(out + v * W, Columns::total(sums, v), num_columns - v * W);
    }
  }
}

// ------------------------------------------------------------------------------------------ the scan of Mamba 2

template <class T> QUIRE_INLINE void widen_row(const T* x, float* out, int64_t size) {
  for (int64_t i = 0; i < size; i += W) store(out + i, load_upto(x + i, size - i));
}

// SCAN_ROWS rows of the state: S = left * S + input B, where they absorb, and S C.
template <bool ABSORBS> QUIRE_INLINE void scan_rows(float* state, int64_t stride, float left, const float* inputs,
                                                    const float* b, const float* c, float* out) {
  vf sums[SCAN_ROWS], factors[SCAN_ROWS];
#pragma GCC unroll 4
  for (int r = 0; r < SCAN_ROWS; ++r) sums[r] = zero(), factors[r] = set1(inputs[r]);
  const vf kept = set1(left);
  for (int64_t n = 0; n < stride; n += W) {
    const vf added = load(b + n), asked = load(c + n);
#pragma GCC unroll 4
    for (int r = 0; r < SCAN_ROWS; ++r) {
      vf value = load(state + r * stride + n);
      if (ABSORBS) {
        value = fma(factors[r], added, value * kept);
        store(state + r * stride + n, value);
      }
      sums[r] = fma(value, asked, sums[r]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < SCAN_ROWS; ++r) out[r] = hsum(sums[r]);
}

template <class T> void scan_of(const ScanArgs& args, int64_t head, int64_t first, int64_t count, Span span,
                                float* state, float* scratch) {
  const int64_t stride = round_up(args.state_size, W), group = head / args.num_shared;
  float *b = scratch, *c = b + round_up(args.state_size, MOST_LANES);
  float *values = c + round_up(args.state_size, MOST_LANES), *inputs = values + round_up(count, MOST_LANES);
  float* sums = inputs + round_up(count, MOST_LANES);
  const vf speed = exp(set1(args.a_log[head])), bias = set1(args.dt_bias[head]);
  const float skip = args.skip[head];
  float spans[W], lefts[W];
  for (int64_t t = span.begin; t < span.end; ++t) {
    const int64_t i = (t - span.begin) % W;
    if (i == 0) {
      const vf open = softplus(numbers_of<T>(args.dt, t, head, span.end - t) + bias);
      const vf held = min(set1(args.most_dt), max(set1(args.least_dt), open));  // this order of arguments keeps NaN
      store(spans, held);
      store(lefts, exp(zero() - held * speed));
    }
    widen_row(row_of<T>(args.b, t, group), b, args.state_size);
    widen_row(row_of<T>(args.c, t, group), c, args.state_size);
    const T* x = row_of<T>(args.x, t, head) + first;
    T* out = static_cast<T*>(args.out) + (t * args.heads + head) * args.head_dim + first;
    const bool absorbs = t > span.begin || !span.reads_first;
    for (int64_t r = 0; r < count; r += W) {
      const vf value = load_upto(x + r, count - r);
      store(values + r, value);
      store(inputs + r, value * set1(spans[i]));
    }
    for (int64_t r = 0; r < count; r += SCAN_ROWS) {
      float* rows = state + r * stride;
      if (absorbs) scan_rows<true>(rows, stride, lefts[i], inputs + r, b, c, sums + r);
      else scan_rows<false>(rows, stride, 0, inputs + r, b, c, sums + r);
    }
    for (int64_t r = 0; r < count; r += W) {
      store_upto(out + r, fma(set1(skip), load(values + r), load(sums + r)), count - r);
    }
  }
}

int64_t conv(const ConvArgs& args, int64_t first, int64_t count, Span span, float* window, int64_t stride,
             int64_t oldest) {
  switch (args.dtype) {
    case DType::float32: return conv_of<float>(args, first, count, span, window, stride, oldest);
    case DType::bfloat16: return conv_of<bf16>(args, first, count, span, window, stride, oldest);
    case DType::float16: return conv_of<fp16>(args, first, count, span, window, stride, oldest);
  }
  return oldest;
}

void delta_rule(const DeltaRuleArgs& args, int64_t head, int64_t first, Span span, float* state, float* scratch) {
  switch (args.dtype) {
    case DType::float32: return delta_rule_of<float>(args, head, first, span, state, scratch);
    case DType::bfloat16: return delta_rule_of<bf16>(args, head, first, span, state, scratch);
    case DType::float16: return delta_rule_of<fp16>(args, head, first, span, state, scratch);
  }
}

void scan(const ScanArgs& args, int64_t head, int64_t first, int64_t count, Span span, float* state, float* scratch) {
  switch (args.dtype) {
    case DType::float32: return scan_of<float>(args, head, first, count, span, state, scratch);
    case DType::bfloat16: return scan_of<bf16>(args, head, first, count, span, state, scratch);
    case DType::float16: return scan_of<fp16>(args, head, first, count, span, state, scratch);
  }
}

}  // namespace

extern const RecurrentKernels recurrent_kernels = {conv, delta_rule, scan, COLUMNS, W};

}  // namespace quire::QUIRE_ISA
