// Products of a few tokens with the two thin matrices of an adapter.

#include "adapters.h"
#include "simd.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int TOKENS = static_cast<int>(ADAPTER_TOKENS);
// Rows of a that are read beside each other: 4 x 4 accumulators.
constexpr int A_ROWS = NV == 4 ? 4 : 2;
// Vectors of the output beside each other.
constexpr int B_VECTORS = NV == 4 ? 4 : 2;

// One accumulator for each pair of a token and a row of a: the order of a sum never depends on its neighbours.
template <class T, int N, int R>
void shrink_tile(const AdapterArgs& args, const T* const* x, const T* a, float* low, int64_t low_stride) {
  vf sums[N][R];
#pragma GCC unroll 4
  for (int t = 0; t < N; ++t)
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) sums[t][r] = zero();
  const auto add = [&](int64_t i, auto get) {
    vf rows[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) rows[r] = get(a + r * args.columns + i);
#pragma GCC unroll 4
    for (int t = 0; t < N; ++t) {
      const vf v = get(x[t] + i);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sums[t][r] = fma(v, rows[r], sums[t][r]);
    }
  };
  int64_t i = 0;
  for (; i + W <= args.columns; i += W) add(i, [](const T* p) { return load(p); });
  const int left = static_cast<int>(args.columns - i);
  if (left > 0) add(i, [left](const T* p) { return load_part(p, left); });
  for (int t = 0; t < N; ++t)
    for (int r = 0; r < R; ++r) low[t * low_stride + r] = hsum(sums[t][r]);
}

template <class T, int N>
void shrink_rows(const AdapterArgs& args, const int32_t* tokens, int64_t begin, int64_t end, float* low) {
  const int64_t all_rows = args.num_parts * args.most_rank;
  const T* x[N];
  for (int t = 0; t < N; ++t) x[t] = static_cast<const T*>(args.x) + tokens[t] * args.x_stride;
  const T* a = static_cast<const T*>(args.a) + args.slots[tokens[0]] * all_rows * args.columns;
  int64_t row = begin;
  for (; row + A_ROWS <= end; row += A_ROWS) {
    shrink_tile<T, N, A_ROWS>(args, x, a + row * args.columns, low + row, all_rows);
  }
  for (; row < end; ++row) shrink_tile<T, N, 1>(args, x, a + row * args.columns, low + row, all_rows);
}

template <class T, int N, int V, bool WHOLE>
void expand_tile(const AdapterArgs& args, T* const* y, const T* b, int64_t rank, int64_t column, int64_t count,
                 const float* low, int64_t low_stride) {
  vf sums[N][V];
#pragma GCC unroll 4
  for (int t = 0; t < N; ++t)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) sums[t][v] = zero();
  for (int64_t j = 0; j < rank; ++j) {
    vf row[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      const T* from = b + j * args.rows + column + v * W;
      row[v] = WHOLE ? load(from) : load_part(from, static_cast<int>(count));
    }
#pragma GCC unroll 4
    for (int t = 0; t < N; ++t) {
      const vf factor = set1(low[t * low_stride + j]);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sums[t][v] = fma(factor, row[v], sums[t][v]);
    }
  }
#pragma GCC unroll 4
  for (int t = 0; t < N; ++t)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      T* to = y[t] + column + v * W;
      if (WHOLE) store(to, load(to) + sums[t][v]);
      else store_part(to, load_part(to, static_cast<int>(count)) + sums[t][v], static_cast<int>(count));
    }
}

template <class T, int N>
void expand_rows(const AdapterArgs& args, const int32_t* tokens, int64_t begin, int64_t end, const float* low) {
  const int64_t low_stride = args.num_parts * args.most_rank;
  const int32_t slot = args.slots[tokens[0]];
  const int64_t rank = args.ranks[slot];
  T* y[N];
  for (int t = 0; t < N; ++t) y[t] = static_cast<T*>(args.y) + tokens[t] * args.y_stride;
  const T* b = static_cast<const T*>(args.b) + slot * args.most_rank * args.rows;
  int64_t first = 0;
  for (int part = 0; part < args.num_parts; ++part) {
    const float* of_part = low + part * args.most_rank;
    int64_t column = begin > first ? begin : first;
    const int64_t last = end < args.part_ends[part] ? end : args.part_ends[part];
    first = args.part_ends[part];
    for (; column + B_VECTORS * W <= last; column += B_VECTORS * W) {
      expand_tile<T, N, B_VECTORS, true>(args, y, b, rank, column, W, of_part, low_stride);
    }
    for (; column + W <= last; column += W) {
      expand_tile<T, N, 1, true>(args, y, b, rank, column, W, of_part, low_stride);
    }
    if (column < last) expand_tile<T, N, 1, false>(args, y, b, rank, column, last - column, of_part, low_stride);
  }
}

template <class T>
void shrink_of(const AdapterArgs& args, const int32_t* tokens, int64_t count, int64_t begin, int64_t end, float* low) {
  switch (count) {
    case 1: return shrink_rows<T, 1>(args, tokens, begin, end, low);
    case 2: return shrink_rows<T, 2>(args, tokens, begin, end, low);
    case 3: return shrink_rows<T, 3>(args, tokens, begin, end, low);
    default: return shrink_rows<T, TOKENS>(args, tokens, begin, end, low);
  }
}

template <class T>
void expand_of(const AdapterArgs& args, const int32_t* tokens, int64_t count, int64_t begin, int64_t end,
               const float* low) {
  switch (count) {
    case 1: return expand_rows<T, 1>(args, tokens, begin, end, low);
    case 2: return expand_rows<T, 2>(args, tokens, begin, end, low);
    case 3: return expand_rows<T, 3>(args, tokens, begin, end, low);
    default: return expand_rows<T, TOKENS>(args, tokens, begin, end, low);
  }
}

void shrink(const AdapterArgs& args, const int32_t* tokens, int64_t count, int64_t begin, int64_t end, float* low) {
  switch (args.dtype) {
    case DType::float32: return shrink_of<float>(args, tokens, count, begin, end, low);
    case DType::bfloat16: return shrink_of<bf16>(args, tokens, count, begin, end, low);
    case DType::float16: return shrink_of<fp16>(args, tokens, count, begin, end, low);
  }
}

void expand(const AdapterArgs& args, const int32_t* tokens, int64_t count, int64_t begin, int64_t end,
            const float* low) {
  switch (args.dtype) {
    case DType::float32: return expand_of<float>(args, tokens, count, begin, end, low);
    case DType::bfloat16: return expand_of<bf16>(args, tokens, count, begin, end, low);
    case DType::float16: return expand_of<fp16>(args, tokens, count, begin, end, low);
  }
}

}  // namespace

extern const AdapterKernels adapter_kernels = {shrink, expand};

}  // namespace quire::QUIRE_ISA
