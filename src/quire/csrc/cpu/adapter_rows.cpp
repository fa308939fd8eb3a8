// Products of a few tokens with the two thin matrices of an adapter, in vectors.
//
// A row is prepared as floats that a vector repeats: one for each word of the matrix, or two of a word that is taken
// apart. What comes out of the first product is such a row again.

#include "adapter_panels.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int64_t TOKENS = 4;
constexpr int V = ADAPTER_COLUMNS / W;  // vectors of a panel
// Words that are next to each other go to sums of their own, where there are registers: few tokens keep the units busy.
constexpr int CHAINS = V == 1 ? 2 : 1;

template <class T> struct Single {
  using Value = T;
  static constexpr int64_t WORD_VALUES = 1, WORD_FLOATS = 1;
  QUIRE_INLINE vf add(vf sum, const float* x, const char* line, int v) {
    return fma(set1(*x), load(reinterpret_cast<const T*>(line) + v * W), sum);
  }
};

#if defined(QUIRE_MULTIPLIES_PAIRS)

struct Pair {
  using Value = bf16;
  static constexpr int64_t WORD_VALUES = 2, WORD_FLOATS = 1;
  QUIRE_INLINE vf add(vf sum, const float* x, const char* line, int v) {
    return fma_pairs(set1(*x), load(reinterpret_cast<const float*>(line) + v * W), sum);
  }
};

QUIRE_INLINE void store_low(Pair, float* to, vf low) { store_result(reinterpret_cast<bf16*>(to), low); }

#else

QUIRE_INLINE vf lower_halves(const char* p) { return as_float(shift_left(load_integers(p), 16)); }
QUIRE_INLINE vf upper_halves(const char* p) { return as_float(load_integers(p) & all_lanes(0xffff0000)); }

struct Pair {
  using Value = bf16;
  static constexpr int64_t WORD_VALUES = 2, WORD_FLOATS = 2;
  QUIRE_INLINE vf add(vf sum, const float* x, const char* line, int v) {
    const char* words = line + v * W * 4;
    return fma(set1(x[1]), upper_halves(words), fma(set1(x[0]), lower_halves(words), sum));
  }
};

#endif

template <class P> QUIRE_INLINE void store_low(P, float* to, vf low) { store(to, low); }

template <class P> void prepare_row(const typename P::Value* x, int64_t count, float* to, int64_t num_floats) {
  if (P::WORD_VALUES > P::WORD_FLOATS) {
    memset(to + count / 2, 0, (num_floats - count / 2) * 4);
    memcpy(to, x, count * 2);
    return;
  }
  for (int64_t i = 0; i < num_floats; i += W) store(to + i, i < count ? load_upto(x + i, count - i) : zero());
}

// Sums of N rows, `x_bytes` from each other, times a panel. Every element is summed in one order.
template <class P, int N>
QUIRE_INLINE void multiply(const char* x, int64_t x_bytes, const char* panel, int64_t words, vf sums[N][V]) {
  constexpr int64_t LINE = ADAPTER_COLUMNS * P::WORD_VALUES * static_cast<int64_t>(sizeof(typename P::Value));
  vf chains[CHAINS][N][V];
#pragma GCC unroll 2
  for (int c = 0; c < CHAINS; ++c)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n)
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) chains[c][n][v] = zero();
  const auto add = [&](int64_t i, int c) __attribute__((always_inline)) {
    const char* line = panel + i * LINE;
    fetch_line_near(line + FETCHED_AHEAD);
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      const float* word = reinterpret_cast<const float*>(x + n * x_bytes) + i * P::WORD_FLOATS;
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) chains[c][n][v] = P::add(chains[c][n][v], word, line, v);
    }
  };
  int64_t i = 0;
  for (; i + CHAINS <= words; i += CHAINS)
#pragma GCC unroll 2
    for (int c = 0; c < CHAINS; ++c) add(i + c, c);
  if (i < words) add(i, 0);
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) sums[n][v] = CHAINS == 2 ? chains[0][n][v] + chains[CHAINS - 1][n][v] : chains[0][n][v];
}

template <class P> int64_t prepared_bytes_of(const AdapterArgs& args) {
  return args.input_words() * P::WORD_FLOATS * static_cast<int64_t>(sizeof(float));
}

int64_t low_bytes(const AdapterArgs& args) { return args.a_panels(args.most_rank) * ADAPTER_COLUMNS * 4; }

template <class P> void prepare_of(const AdapterArgs& args, const AdapterBlock& block) {
  const int64_t bytes = prepared_bytes_of<P>(args);
  for (int64_t t = 0; t < block.count; ++t) {
    const auto* x = static_cast<const typename P::Value*>(args.x) + block.tokens[t] * args.x_stride;
    prepare_row<P>(x, args.columns, reinterpret_cast<float*>(block.prepared + t * bytes), bytes / 4);
  }
}

template <class P, int N> void shrink_rows(const AdapterArgs& args, const AdapterBlock& block, int64_t begin, int64_t end) {
  constexpr int64_t PANEL_FLOATS = ADAPTER_COLUMNS / P::WORD_VALUES * P::WORD_FLOATS;
  const Panels a = Panels::of_a(args, block);
  for (int64_t panel = begin; panel < end; ++panel) {
    vf sums[N][V];
    multiply<P, N>(block.prepared, prepared_bytes_of<P>(args), a[panel], a.words, sums);
    for (int n = 0; n < N; ++n) {
      float* low = reinterpret_cast<float*>(block.low + n * low_bytes(args)) + panel * PANEL_FLOATS;
      for (int v = 0; v < V; ++v) store_low(P{}, low + v * (W / P::WORD_VALUES * P::WORD_FLOATS), sums[n][v]);
    }
  }
}

template <class P, class Y, int N>
void expand_rows(const AdapterArgs& args, const AdapterBlock& block, int64_t begin, int64_t end) {
  const Panels b = Panels::of_b(args, block);
  Outputs to(args, begin);
  for (int64_t panel = begin; panel < end; ++panel, to.skip(1)) {
    vf sums[N][V];
    const char* low = block.low + to.part() * b.words * P::WORD_FLOATS * 4;
    multiply<P, N>(low, low_bytes(args), b[panel], b.words, sums);
    for (int n = 0; n < N; ++n) {
      auto* y = static_cast<Y*>(args.y) + block.tokens[n] * args.y_stride + to.column();
      for (int64_t v = 0; v < V && v * W < to.width(); ++v) {
        const int64_t left = to.width() - v * W;
        store_result_upto(y + v * W, load_upto(y + v * W, left) + sums[n][v], left);
      }
    }
  }
}

template <class P> void shrink_of(const AdapterArgs& args, const AdapterBlock& block, int64_t begin, int64_t end) {
  switch (block.count) {
    case 1: return shrink_rows<P, 1>(args, block, begin, end);
    case 2: return shrink_rows<P, 2>(args, block, begin, end);
    case 3: return shrink_rows<P, 3>(args, block, begin, end);
    default: return shrink_rows<P, TOKENS>(args, block, begin, end);
  }
}

template <class P, class Y>
void expand_onto(const AdapterArgs& args, const AdapterBlock& block, int64_t begin, int64_t end) {
  switch (block.count) {
    case 1: return expand_rows<P, Y, 1>(args, block, begin, end);
    case 2: return expand_rows<P, Y, 2>(args, block, begin, end);
    case 3: return expand_rows<P, Y, 3>(args, block, begin, end);
    default: return expand_rows<P, Y, TOKENS>(args, block, begin, end);
  }
}

template <class P> void expand_of(const AdapterArgs& args, const AdapterBlock& block, int64_t begin, int64_t end) {
  if (args.y_dtype == DType::float32) return expand_onto<P, float>(args, block, begin, end);
  return expand_onto<P, typename P::Value>(args, block, begin, end);
}

int64_t prepared_bytes(const AdapterArgs& args) {
  return args.dtype == DType::bfloat16 ? prepared_bytes_of<Pair>(args) : prepared_bytes_of<Single<float>>(args);
}

void prepare(const AdapterArgs& args, const AdapterBlock& block) {
  switch (args.dtype) {
    case DType::float32: return prepare_of<Single<float>>(args, block);
    case DType::bfloat16: return prepare_of<Pair>(args, block);
    case DType::float16: return prepare_of<Single<fp16>>(args, block);
  }
}

void shrink(const AdapterArgs& args, const AdapterBlock& block, int64_t begin, int64_t end) {
  switch (args.dtype) {
    case DType::float32: return shrink_of<Single<float>>(args, block, begin, end);
    case DType::bfloat16: return shrink_of<Pair>(args, block, begin, end);
    case DType::float16: return shrink_of<Single<fp16>>(args, block, begin, end);
  }
}

void expand(const AdapterArgs& args, const AdapterBlock& block, int64_t begin, int64_t end) {
  switch (args.dtype) {
    case DType::float32: return expand_of<Single<float>>(args, block, begin, end);
    case DType::bfloat16: return expand_of<Pair>(args, block, begin, end);
    case DType::float16: return expand_of<Single<fp16>>(args, block, begin, end);
  }
}

}  // namespace

extern const AdapterKernels adapter_kernels;
constexpr AdapterKernels adapter_kernels = {TOKENS, prepared_bytes, low_bytes, prepare, shrink, expand, nullptr};

}  // namespace quire::QUIRE_ISA
