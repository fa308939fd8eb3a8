// Products with packed weights: which panels and rows meet in which order.

#include "matmul_codes.h"
#include "matmul_decode.h"
#include "matmul_finish.h"
#include "matmul_int8.h"
#include "matmul_micro.h"
#include "matmul_prepare.h"

namespace quire::QUIRE_ISA {
namespace {

#if defined(QUIRE_MULTIPLIES_PAIRS)
constexpr bool MULTIPLIES_BFLOAT16 = true;
#else
constexpr bool MULTIPLIES_BFLOAT16 = false;
#endif

// Words of a panel that all rows meet before the next words come: together with a tile of rows these stay in the
// second-level cache. Decoded words stay in the first-level cache.
constexpr int64_t WORDS_AT_ONCE = 2048, DECODED_AT_ONCE = 4 * SEGMENT_WORDS;

// One function for each number of rows that a tile can have.
#if defined(__AVX512F__)
#define QUIRE_FOR_ROWS(F, ...)                                                                                 \
  {nullptr,           F<__VA_ARGS__, 1>, F<__VA_ARGS__, 2>, F<__VA_ARGS__, 3>,  F<__VA_ARGS__, 4>,             \
   F<__VA_ARGS__, 5>, F<__VA_ARGS__, 6>, F<__VA_ARGS__, 7>, F<__VA_ARGS__, 8>,  F<__VA_ARGS__, 9>,             \
   F<__VA_ARGS__, 10>, F<__VA_ARGS__, 11>, F<__VA_ARGS__, 12>}
#else
#define QUIRE_FOR_ROWS(F, ...)                                                               \
  {nullptr,           F<__VA_ARGS__, 1>, F<__VA_ARGS__, 2>, F<__VA_ARGS__, 3>, F<__VA_ARGS__, 4>, \
   F<__VA_ARGS__, 5>, F<__VA_ARGS__, 6>}
#endif

using AddProducts = void (*)(const float*, const float*, int64_t, Sums, Ahead);
template <class A> constexpr AddProducts ADD_PRODUCTS[] = QUIRE_FOR_ROWS(add_products, A);

using AddIntegers = void (*)(const PackedView&, const float*, const char*, const char*, float*, Ahead);
template <WeightFormat F, Scaling S> constexpr AddIntegers ADD_INTEGERS[] = QUIRE_FOR_ROWS(add_integers, F, S);

template <WeightFormat F> const AddIntegers* add_integers_of(const PackedView& w) {
  if (w.has_zeros) return ADD_INTEGERS<F, Scaling::scales_and_zeros>;
  if (F != WeightFormat::int8 || w.group_head_bytes > 0) return ADD_INTEGERS<F, Scaling::scales>;
  return ADD_INTEGERS<WeightFormat::int8, Scaling::none>;
}

template <class A, WeightFormat F> constexpr AddIntegers ADD_CODES[] = {
    nullptr, add_codes<A, F, 1>, add_codes<A, F, 2>, add_codes<A, F, 3>, add_codes<A, F, 4>};
using AddDecoded = void (*)(const PackedView&, const float*, const char*, const float*, int64_t, float*, float, Ahead);
template <class A> constexpr AddDecoded ADD_DECODED[] = QUIRE_FOR_ROWS(add_decoded, A);

// Tiles [begin, end) of prepared rows, which meet one panel after the other.
class Block {
 public:
  Block(const MatmulArgs& args, const Tiles& tiles, int64_t begin, int64_t end, const char* prepared, char* scratch)
      : args_(args), w_(args.weight), tiles_(tiles), begin_(begin), end_(end), prepared_(prepared),
        row_bytes_(prepared_row_bytes(args)), first_row_(tiles.first_row(begin)),
        sums_(reinterpret_cast<float*>(scratch)),
        decoded_(sums_ + (tiles.first_row(end) - first_row_) * PANEL_COLUMNS) {}

  void multiply(int64_t panel) {
    begin_finish(args_, panel, &finish_);
    const char* data = w_.data + panel * w_.panel_bytes;
    switch (w_.format) {
      case WeightFormat::int8: return add_quantized<WeightFormat::int8>(data);
      case WeightFormat::int4: return add_quantized<WeightFormat::int4>(data);
      case WeightFormat::fp4: return add_quantized<WeightFormat::fp4>(data);
      case WeightFormat::float32: return add_stored<Float32>(data);
      case WeightFormat::bfloat16:
#if defined(QUIRE_MULTIPLIES_PAIRS)
        if (args_.arithmetic == Arithmetic::bfloat16) return add_stored<BFloat16>(data);
#endif
      case WeightFormat::float16: return add_halves(data);
    }
  }

 private:
  // What a tile needs of the bytes that follow `from` in the weight to be fetched while it is multiplied.
  Ahead ahead(const char* from, int64_t bytes, int64_t words, int64_t tile, int rows) const {
    if (rows < FEWEST_ROWS_TO_FETCH) return {nullptr, 0};
    const int64_t left = w_.data + w_.num_panels * w_.panel_bytes - from;
    return ahead_of(from, min64(bytes, left), words, tile - begin_, end_ - begin_);
  }

  // Calls add(x, rows, sums, tile) for every tile; the last call for a panel leads to results.
  template <class Add> void for_each_tile(bool is_first, bool is_last, Add add) {
    for (int64_t tile = begin_; tile < end_; ++tile) {
      const int64_t row = tiles_.first_row(tile);
      const int rows = static_cast<int>(tiles_.first_row(tile + 1) - row);
      // Sums that are done at once need no room of their own: the same lines are used again and again.
      float* sums = is_first && is_last ? sums_ : sums_ + (row - first_row_) * PANEL_COLUMNS;
      if (is_last) fetch_rows(args_, finish_, row, rows);
      add(reinterpret_cast<const float*>(prepared_ + row * row_bytes_), rows, sums, tile);
      if (is_last) finish_rows(args_, finish_, sums, row, rows);
    }
  }

  // Some words of a panel; `first` counts words of x. What follows in the weight is what is read next.
  template <class A>
  void add_words(const float* words, int64_t first, int64_t num_words, bool is_last, const char* next, int64_t bytes) {
    for_each_tile(first == 0, is_last, [&](const float* x, int rows, float* sums, int64_t tile) {
      Ahead fetched = ahead(next, bytes, num_words, tile, rows);
      for (int pass = 0; pass < PASSES; ++pass) {
        const int column = pass * 2 * W;
        ADD_PRODUCTS<A>[rows](x + first * rows, words + column, num_words, {sums + column, first == 0}, fetched);
        fetched.lines = 0;
      }
    });
  }

  // Words that are multiplied as they are stored.
  template <class A> void add_stored(const char* panel) {
    int64_t i = 0;
    do {
      const int64_t n = min64(WORDS_AT_ONCE, w_.words - i), bytes = n * w_.word_bytes;
      const char* words = panel + i * w_.word_bytes;
      add_words<A>(reinterpret_cast<const float*>(words), i, n, i + n == w_.words, words + bytes, bytes);
      i += n;
    } while (i < w_.words);
  }

  // 16-bit floats that become float32 first.
  void add_halves(const char* panel) {
    int64_t i = 0;
    do {
      const int64_t n = min64(DECODED_AT_ONCE / 2, w_.words - i), bytes = n * w_.word_bytes;
      const char* words = panel + i * w_.word_bytes;
      decode_floats(w_.format, words, n, decoded_);
      add_words<Float32>(decoded_, i * 2, n * 2, i + n == w_.words, words + bytes, bytes);
      i += n;
    } while (i < w_.words);
  }

  template <WeightFormat F> void add_quantized(const char* panel) {
    if (args_.arithmetic == Arithmetic::int8) return add_whole<F>(panel, add_integers_of<F>(w_));
#if defined(QUIRE_MULTIPLIES_PAIRS)
    if (args_.arithmetic == Arithmetic::bfloat16) return add_weight_only<BFloat16, F>(panel);
#endif
    add_weight_only<Float32, F>(panel);
  }

  // Quantised weights and activations as they are.
  template <class A, WeightFormat F> void add_weight_only(const char* panel) {
    const char* group = panel + w_.panel_head_bytes;
    if (tiles_.rows <= MOST_ROWS_TO_DECODE) return add_whole<F>(panel, ADD_CODES<A, F>);
    const float excess = Decoder<A, F>::excess(w_);
    int64_t x_floats = 0, end;
    for (int64_t i = 0; i < w_.words; i = end) {
      end = end_of_segment(w_, i);
      if (i > 0 && i % w_.group_words == 0) group += w_.group_bytes;
      const char* codes = group + w_.group_head_bytes + i % w_.group_words * w_.word_bytes;
      const int64_t bytes = (end - i) * w_.word_bytes;
      decode_codes<A, F>(w_, codes, end - i, decoded_);
      for_each_tile(i == 0, end == w_.words, [&](const float* x, int rows, float* sums, int64_t tile) {
        Ahead fetched = ahead(codes + bytes, bytes, end - i, tile, rows);
        for (int pass = 0; pass < PASSES; ++pass) {
          const int column = pass * 2 * W;
          ADD_DECODED<A>[rows](w_, x + x_floats * rows, group + column * 2, decoded_ + column, i, sums + column, excess,
                               fetched);
          fetched.lines = 0;
        }
      });
      x_floats += CODES_HEAD + Decoder<A, F>::num_words * (end - i);
    }
  }

  // A whole panel by one of the kernels that walk through all segments.
  template <WeightFormat F> void add_whole(const char* panel, const AddIntegers* add) {
    const char* group = panel + w_.panel_head_bytes;
    for_each_tile(true, true, [&](const float* x, int rows, float* sums, int64_t tile) {
      Ahead fetched = ahead(panel + w_.panel_bytes, w_.panel_bytes, w_.words, tile, rows);
      for (int pass = 0; pass < PASSES; ++pass) {
        const int column = pass * Codes<F>::step;
        add[rows](w_, x, group + column * 2, group + w_.group_head_bytes + column * 4, sums + column, fetched);
        fetched.lines = 0;
      }
    });
  }

  const MatmulArgs& args_;
  const PackedView& w_;
  const Tiles& tiles_;
  const int64_t begin_, end_;
  const char* const prepared_;
  const int64_t row_bytes_, first_row_;
  float* const sums_;
  float* const decoded_;
  Finish finish_;
};

int64_t scratch_bytes(int64_t rows) { return (rows + DECODED_AT_ONCE) * PANEL_COLUMNS * 4; }

void prepare(const MatmulArgs& args, const Tiles& tiles, int64_t begin, int64_t end, char* prepared, char* scratch) {
  const int64_t row_bytes = prepared_row_bytes(args);
  for (int64_t tile = begin; tile < end; ++tile) {
    const int64_t row = tiles.first_row(tile), rows = tiles.first_row(tile + 1) - row;
    prepare_tile(args, row, static_cast<int>(rows), reinterpret_cast<float*>(prepared + row * row_bytes),
                 reinterpret_cast<float*>(scratch));
  }
}

void multiply(const MatmulArgs& args, const Tiles& tiles, int64_t begin, int64_t end, int64_t first_panel,
              int64_t last_panel, const char* prepared, char* scratch) {
  Block block(args, tiles, begin, end, prepared, scratch);
  for (int64_t panel = first_panel; panel < last_panel; ++panel) block.multiply(panel);
}

}  // namespace

extern const MatmulKernels matmul_kernels;
constexpr MatmulKernels matmul_kernels = {TILE_ROWS, MULTIPLIES_BFLOAT16, prepared_row_bytes,
                                          scratch_bytes, prepare, multiply, finish, nullptr, nullptr};

}  // namespace quire::QUIRE_ISA
