// Products on the matrix unit (AMX): bfloat16, and 8-bit weights with 8-bit activations. avx512_bf16 has the others.
//
// A panel is what the unit takes, as it lies in memory: 16 words of its columns are two tiles of 16 columns each. Rows
// of x become tiles of their own, in chunks of 16 words. A prepared tile of R rows:
//
//   [16 words x R] x steps                               inputs: a step of every row, then the next step
//   ([int32 x R] [float x R] [float x R]) x segments     with 8 bits: the heads of matmul_int8.h
//
// An element of the result is one chain of steps over the inputs in order, and the unit computes each row of a product
// by itself: so a row has the same bits alone and among others. The chain of bfloat16 is another one than AVX-512 has:
// this is why all of them come here, however few rows there are. With 8 bits the bits are those of every other set.

#include "amx_support.h"
#include "matmul.h"

#if defined(QUIRE_KNOWS_AMX)
#include "amx.h"
#include "matmul_finish.h"
#include "matmul_int8.h"
#endif

namespace quire {

namespace avx512_bf16 { extern const MatmulKernels matmul_kernels; }

namespace QUIRE_ISA {

extern const MatmulKernels matmul_kernels;

#if !defined(QUIRE_KNOWS_AMX)

constexpr MatmulKernels matmul_kernels = {};  // fault_of_amx() keeps it from being used

#else

namespace {

constexpr int HALF = ROWS_OF_TILE, MOST_ROWS = 2 * HALF;  // both halves of the rows meet what was loaded of a panel
constexpr int64_t STEP_WORDS = 16;
constexpr int64_t WORD_BYTES = PANEL_COLUMNS * 4, STEP_BYTES = STEP_WORDS * WORD_BYTES;

int64_t num_steps(const PackedView& w) { return (w.words + STEP_WORDS - 1) / STEP_WORDS; }

// Segments of whole steps; only the last one of a row may end within a step.
bool suits(const MatmulArgs& args) {
  const PackedView& w = args.weight;
  if (args.arithmetic == Arithmetic::bfloat16) return w.format == WeightFormat::bfloat16;
  if (args.arithmetic != Arithmetic::int8 || w.format != WeightFormat::int8) return false;
  return w.num_groups == 1 || w.group_words % STEP_WORDS == 0;
}

int64_t prepared_row_bytes(const MatmulArgs& args) {
  const bool has_heads = args.arithmetic == Arithmetic::int8;
  const int64_t heads = has_heads ? round_up(INTEGERS_HEAD * num_segments(args.weight) * 4, CHUNK_BYTES) : 0;
  return num_steps(args.weight) * CHUNK_BYTES + heads;
}

template <class T> void quantize_chunks(const PackedView& w, const T* x, char* tile, int row, int num_rows) {
  float* head = reinterpret_cast<float*>(tile + num_rows * num_steps(w) * CHUNK_BYTES) + row;
  quantize_segments(w, x, [&](int64_t first, int64_t end, const SegmentHead& of_segment, const int8_t* values) {
    place_head(of_segment, head, num_rows);
    head += INTEGERS_HEAD * num_rows;
    char* chunk = tile + (first / STEP_WORDS * num_rows + row) * CHUNK_BYTES;
    place_chunks(values, (end - first) * 4, chunk, num_rows);
  });
}

void prepare_row(const MatmulArgs& args, int64_t at, char* tile, int row, int num_rows) {
  const PackedView& w = args.weight;
  const int64_t offset = args.x_offset(at);
  if (args.arithmetic == Arithmetic::bfloat16) {
    const bf16* x = static_cast<const bf16*>(args.x) + offset;
    return place_chunks(x, w.columns * sizeof(bf16), tile + row * CHUNK_BYTES, num_rows);
  }
  switch (args.dtype) {
    case DType::float32: return quantize_chunks(w, static_cast<const float*>(args.x) + offset, tile, row, num_rows);
    case DType::bfloat16: return quantize_chunks(w, static_cast<const bf16*>(args.x) + offset, tile, row, num_rows);
    case DType::float16: return quantize_chunks(w, static_cast<const fp16*>(args.x) + offset, tile, row, num_rows);
  }
}

void prepare(const MatmulArgs& args, const Tiles& tiles, int64_t begin, int64_t end, char* prepared, char*) {
  const int64_t row_bytes = prepared_row_bytes(args);
  for (int64_t tile = begin; tile < end; ++tile) {
    const int64_t first = tiles.first_row(tile);
    const int num_rows = static_cast<int>(tiles.first_row(tile + 1) - first);
    for (int r = 0; r < num_rows; ++r) prepare_row(args, first + r, prepared + first * row_bytes, r, num_rows);
  }
}

// Tiles of the unit: 0 and 1 are sums of the first half of the rows, 2 and 3 of the second; 4 and 5 are their inputs,
// 6 and 7 the words of both halves of a panel.
TileShapes shapes_of(int num_rows) {
  TileShapes shapes;
  const int lower = num_rows < HALF ? num_rows : HALF, upper = num_rows - lower;
  shapes.set(0, lower), shapes.set(1, lower), shapes.set(4, lower);
  shapes.set(2, upper), shapes.set(3, upper), shapes.set(5, upper);
  shapes.set(6, HALF), shapes.set(7, HALF);
  return shapes;
}

void clear_sums(int num_rows) {
  clear_tile<0>(), clear_tile<1>();
  if (num_rows > HALF) clear_tile<2>(), clear_tile<3>();
}

// Of floats or integers: a row of PANEL_COLUMNS after the other.
void load_sums(const float* from, int num_rows) {
  load_tile<0>(from, WORD_BYTES), load_tile<1>(from + HALF, WORD_BYTES);
  if (num_rows <= HALF) return;
  from += HALF * PANEL_COLUMNS;
  load_tile<2>(from, WORD_BYTES), load_tile<3>(from + HALF, WORD_BYTES);
}

void store_sums(int num_rows, float* to) {
  store_tile<0>(to, WORD_BYTES), store_tile<1>(to + HALF, WORD_BYTES);
  if (num_rows <= HALF) return;
  to += HALF * PANEL_COLUMNS;
  store_tile<2>(to, WORD_BYTES), store_tile<3>(to + HALF, WORD_BYTES);
}

struct BFloat16Product {
  template <int C, int A, int B> QUIRE_INLINE void add() { multiply_bfloat16<C, A, B>(); }
};
struct ByteProduct {
  template <int C, int A, int B> QUIRE_INLINE void add() { multiply_bytes<C, A, B>(); }
};

template <class Product, bool HAS_UPPER>
void add_steps(const char* x, int num_rows, const char* words, int64_t steps, Ahead& ahead) {
  for (int64_t i = 0; i < steps; ++i, x += num_rows * CHUNK_BYTES, words += STEP_BYTES) {
    for (int64_t k = 0; k < STEP_WORDS; k += WORDS_BETWEEN) fetch(ahead);
    load_tile<6>(words, WORD_BYTES), load_tile<7>(words + WORD_BYTES / 2, WORD_BYTES);
    load_tile<4>(x, CHUNK_BYTES);
    Product::template add<0, 4, 6>(), Product::template add<1, 4, 7>();
    if constexpr (HAS_UPPER) {
      load_tile<5>(x + HALF * CHUNK_BYTES, CHUNK_BYTES);
      Product::template add<2, 5, 6>(), Product::template add<3, 5, 7>();
    }
  }
}

// Exact sums of a segment onto the sums in float32: the operations of add_integers, in its order.
template <Scaling SCALING>
void add_scaled(const float* integers, const float* head, const char* scales, int num_rows, bool is_first,
                float* sums) {
  const int32_t* start = reinterpret_cast<const int32_t*>(head);
  for (int v = 0; v < PANEL_COLUMNS; v += W) {
    vf scale, zeros;
    if (SCALING != Scaling::none) scale = load_half(scales + v * 2);
    if (SCALING == Scaling::scales_and_zeros) zeros = load_half(scales + (PANEL_COLUMNS + v) * 2);
    for (int r = 0; r < num_rows; ++r) {
      float* to = sums + r * PANEL_COLUMNS + v;
      const vi exact = load_integers(integers + r * PANEL_COLUMNS + v);
      vf sum = to_float(_mm512_add_epi32(exact, all_lanes(static_cast<uint32_t>(start[r]))));
      if (SCALING == Scaling::scales_and_zeros) sum = fnma(zeros, set1(head[2 * num_rows + r]), sum);
      if (SCALING != Scaling::none) sum = sum * scale;
      store(to, fma(sum, set1(head[num_rows + r]), is_first ? zero() : load(to)));
    }
  }
}

// Tiles [begin, end) of prepared rows, which meet one panel after the other.
class Block {
 public:
  Block(const MatmulArgs& args, const Tiles& tiles, int64_t begin, int64_t end, const char* prepared, char* scratch)
      : args_(args), w_(args.weight), tiles_(tiles), begin_(begin), end_(end), prepared_(prepared),
        row_bytes_(prepared_row_bytes(args)), steps_(num_steps(args.weight)), first_row_(tiles.first_row(begin)),
        tail_(scratch), integers_(reinterpret_cast<float*>(tail_ + STEP_BYTES)),
        sums_(integers_ + MOST_ROWS * PANEL_COLUMNS) {}

  void multiply(int64_t panel) {
    begin_finish(args_, panel, &finish_);
    const char* data = w_.data + panel * w_.panel_bytes;
    keep_tail(data + w_.slice_bytes);
    if (args_.arithmetic == Arithmetic::bfloat16) return add_floats(data);
    if (w_.has_zeros) return add_integers<Scaling::scales_and_zeros>(data);
    w_.group_head_bytes > 0 ? add_integers<Scaling::scales>(data) : add_integers<Scaling::none>(data);
  }

 private:
  // The last words of a panel if they are no whole step, filled up with zeros: what follows in memory may be anything.
  void keep_tail(const char* end_of_panel) {
    const int64_t bytes = w_.words % STEP_WORDS * WORD_BYTES;
    if (bytes == 0) return;
    memcpy(tail_, end_of_panel - bytes, bytes);
    memset(tail_ + bytes, 0, STEP_BYTES - bytes);
  }

  // What a tile fetches during so many steps with `bytes` that end at `from`: a share of what follows, or the same bytes
  // some distance ahead.
  Ahead ahead(const char* from, int64_t bytes, int64_t steps, int64_t tile, int num_rows) const {
    if (num_rows < tuning.rows_to_fetch) {
      if (tile > begin_) return {nullptr, 0};
      return ahead_by(from - bytes, tuning.fetch_bytes.of(w_), WORD_BYTES);
    }
    const int64_t left = w_.data + w_.num_panels * w_.panel_bytes - from;
    return ahead_of(from, min64(bytes, left), steps * STEP_WORDS, tile - begin_, end_ - begin_);
  }

  // Calls add(x, num_rows, sums, tile) for every tile; the last call for a panel leads to results.
  template <class Add> void for_each_tile(bool is_last, Add add) {
    for (int64_t tile = begin_; tile < end_; ++tile) {
      const int64_t row = tiles_.first_row(tile);
      const int num_rows = static_cast<int>(tiles_.first_row(tile + 1) - row);
      if (num_rows != shaped_for_) set_shapes(shapes_of(num_rows));
      shaped_for_ = num_rows;
      float* sums = sums_ + (row - first_row_) * PANEL_COLUMNS;
      if (is_last) fetch_rows(args_, finish_, row, num_rows);
      add(prepared_ + row * row_bytes_, num_rows, sums, tile);
      if (is_last) finish_rows(args_, finish_, sums, row, num_rows);
    }
  }

  // Steps [first, first + count) of a tile at x times the words of the first of them and what follows.
  template <class Product>
  void add_words(const char* x, int num_rows, const char* words, int64_t first, int64_t count, Ahead& fetched) {
    const auto add = num_rows > HALF ? add_steps<Product, true> : add_steps<Product, false>;
    const int64_t whole = min64(count, w_.words / STEP_WORDS - first);
    add(x + first * num_rows * CHUNK_BYTES, num_rows, words, whole, fetched);
    Ahead nothing = {nullptr, 0};
    if (whole < count) add(x + (first + whole) * num_rows * CHUNK_BYTES, num_rows, tail_, 1, nothing);
  }

  void add_floats(const char* panel) {
    int64_t i = 0, n;
    do {
      n = min64(tuning.words_at_once / STEP_WORDS, steps_ - i);
      const char* words = panel + i * STEP_BYTES;
      for_each_tile(i + n == steps_, [&](const char* x, int num_rows, float* sums, int64_t tile) {
        Ahead fetched = ahead(words + n * STEP_BYTES, n * STEP_BYTES, n, tile, num_rows);
        i == 0 ? clear_sums(num_rows) : load_sums(sums, num_rows);
        add_words<BFloat16Product>(x, num_rows, words, i, n, fetched);
        store_sums(num_rows, sums);
      });
      i += n;
    } while (i < steps_);
  }

  template <Scaling SCALING> void add_integers(const char* panel) {
    for_each_tile(true, [&](const char* x, int num_rows, float* sums, int64_t tile) {
      Ahead fetched = ahead(panel + w_.panel_bytes, w_.panel_bytes, steps_, tile, num_rows);
      const float* head = reinterpret_cast<const float*>(x + num_rows * steps_ * CHUNK_BYTES);
      const char* group = panel + w_.panel_head_bytes;
      for (int64_t i = 0, end; i < w_.words; i = end, head += INTEGERS_HEAD * num_rows) {
        if (i > 0 && i % w_.group_words == 0) group += w_.group_bytes;
        end = end_of_segment(w_, i);
        const char* words = group + w_.group_head_bytes + i % w_.group_words * WORD_BYTES;
        clear_sums(num_rows);
        add_words<ByteProduct>(x, num_rows, words, i / STEP_WORDS, (end - i + STEP_WORDS - 1) / STEP_WORDS, fetched);
        store_sums(num_rows, integers_);
        add_scaled<SCALING>(integers_, head, group, num_rows, i == 0, sums);
      }
    });
  }

  const MatmulArgs& args_;
  const PackedView& w_;
  const Tiles& tiles_;
  const int64_t begin_, end_;
  const char* const prepared_;
  const int64_t row_bytes_, steps_, first_row_;
  char* const tail_;
  float *const integers_, *const sums_;
  int shaped_for_ = 0;
  Finish finish_;
};

int64_t scratch_bytes(int64_t rows) { return STEP_BYTES + (MOST_ROWS + rows) * WORD_BYTES; }

void multiply(const MatmulArgs& args, const Tiles& tiles, int64_t begin, int64_t end, int64_t first_panel,
              int64_t last_panel, const char* prepared, char* scratch) {
  Block block(args, tiles, begin, end, prepared, scratch);
  for (int64_t panel = first_panel; panel < last_panel; ++panel) block.multiply(panel);
  release_tiles();
}

}  // namespace

constexpr MatmulKernels matmul_kernels = {MOST_ROWS, true, prepared_row_bytes, scratch_bytes, prepare, multiply, finish,
                                          suits, &avx512_bf16::matmul_kernels};

#endif

}  // namespace QUIRE_ISA
}  // namespace quire
