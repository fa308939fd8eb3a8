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

// Decoded words stay in the first-level cache.
constexpr int64_t DECODED_AT_ONCE = 4 * SEGMENT_WORDS;

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

// The same of several panels at once, for two and for four of them.
#if defined(__AVX512F__)
#define QUIRE_FOR_PANELS(F, ...)                                                                \
  {{nullptr, F<__VA_ARGS__, 1, 2>, F<__VA_ARGS__, 2, 2>, F<__VA_ARGS__, 3, 2>},                 \
   {nullptr, F<__VA_ARGS__, 1, 4>, F<__VA_ARGS__, 2, 4>, F<__VA_ARGS__, 3, 4>}}
#else
#define QUIRE_FOR_PANELS(F, ...) {{nullptr, F<__VA_ARGS__, 1, 2>}, {nullptr, F<__VA_ARGS__, 1, 4>}}
#endif
constexpr int MOST_ROWS_AND_ONE = MOST_ROWS_OF_PANELS + 1;

using AddProducts = void (*)(const float*, const float*, int64_t, int64_t, Sums, Ahead);
template <class A> constexpr AddProducts ADD_PRODUCTS[] = QUIRE_FOR_ROWS(add_products, A);
template <class A> constexpr AddProducts PRODUCTS_OF_PANELS[2][MOST_ROWS_AND_ONE] = QUIRE_FOR_PANELS(add_products, A);

using AddIntegers = void (*)(const PackedView&, const float*, const char*, const char*, float*, Ahead);
template <WeightFormat F, Scaling S> constexpr AddIntegers ADD_INTEGERS[] = QUIRE_FOR_ROWS(add_integers, F, S);
template <WeightFormat F, Scaling S>
constexpr AddIntegers INTEGERS_OF_PANELS[2][MOST_ROWS_AND_ONE] = QUIRE_FOR_PANELS(add_integers, F, S);

// For 1, 2 or 4 panels.
template <WeightFormat F, Scaling S> const AddIntegers* integers_of(int64_t panels) {
  return panels == 1 ? ADD_INTEGERS<F, S> : INTEGERS_OF_PANELS<F, S>[panels == MOST_PANELS];
}

template <WeightFormat F> const AddIntegers* add_integers_of(const PackedView& w, int64_t panels) {
  if (w.has_zeros) return integers_of<F, Scaling::scales_and_zeros>(panels);
  if (F != WeightFormat::int8 || w.group_head_bytes > 0) return integers_of<F, Scaling::scales>(panels);
  return integers_of<WeightFormat::int8, Scaling::none>(panels);
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
        decoded_(sums_ + (tiles.first_row(end) - first_row_) * PANEL_COLUMNS), most_panels_(most_panels()) {}

  // Some of the panels [panel, last), and how many these were.
  int64_t multiply(int64_t panel, int64_t last) {
    num_panels_ = most_panels_ <= last - panel ? most_panels_ : last - panel >= 2 && most_panels_ > 1 ? 2 : 1;
    for (int64_t p = 0; p < num_panels_; ++p) begin_finish(args_, panel + p, &finish_[p]);
    add_panels(panel);
    return num_panels_;
  }

 private:
  // That are walked at once: few rows read faster from several places than from one.
  int64_t most_panels() const {
    const bool is_stored = w_.format == WeightFormat::float32 ||
                           (w_.format == WeightFormat::bfloat16 && args_.arithmetic == Arithmetic::bfloat16);
    if (end_ - begin_ > 1 || tiles_.first_row(end_) - first_row_ > MOST_ROWS_OF_PANELS) return 1;
    return is_stored || args_.arithmetic == Arithmetic::int8 ? tuning.panels.of(w_) : 1;
  }

  void add_panels(int64_t panel) {
    const char* data = w_.data + panel * w_.panel_bytes;
    switch (w_.format) {
      case WeightFormat::int8: return add_quantized<WeightFormat::int8>(data);
      case WeightFormat::int4: return add_quantized<WeightFormat::int4>(data);
      case WeightFormat::fp4: return add_quantized<WeightFormat::fp4>(data);
      case WeightFormat::int6: return add_quantized<WeightFormat::int6>(data);
      case WeightFormat::float32: return add_stored<Float32>(data);
      case WeightFormat::bfloat16:
#if defined(QUIRE_MULTIPLIES_PAIRS)
        if (args_.arithmetic == Arithmetic::bfloat16) return add_stored<BFloat16>(data);
#endif
      case WeightFormat::float16: return add_halves(data);
    }
  }

  // What a tile fetches while it is multiplied with a piece of `bytes` that ends at `from`: a share of what follows, or
  // the piece itself some distance ahead.
  Ahead ahead(const char* from, int64_t bytes, int64_t words, int64_t tile, int rows) const {
    if (rows < tuning.rows_to_fetch || num_panels_ > 1) {
      if (tile > begin_ || words == 0) return {nullptr, 0};
      return ahead_by(from - bytes, tuning.fetch_bytes.of(w_), bytes / words);
    }
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
      for (int64_t p = 0; p < num_panels_ && is_last; ++p) fetch_rows(args_, finish_[p], row, rows);
      add(reinterpret_cast<const float*>(prepared_ + row * row_bytes_), rows, sums, tile);
      for (int64_t p = 0; p < num_panels_ && is_last; ++p) {
        finish_rows(args_, finish_[p], sums + p * rows * PANEL_COLUMNS, row, rows);
      }
    }
  }

  // Some words of a panel; `first` counts words of x. What follows in the weight is what is read next.
  template <class A>
  void add_words(const float* words, int64_t first, int64_t num_words, bool is_last, const char* next, int64_t bytes) {
    for_each_tile(first == 0, is_last, [&](const float* x, int rows, float* sums, int64_t tile) {
      Ahead fetched = ahead(next, bytes, num_words, tile, rows);
      const AddProducts* add = num_panels_ == 1 ? ADD_PRODUCTS<A> : PRODUCTS_OF_PANELS<A>[num_panels_ == MOST_PANELS];
      for (int pass = 0; pass < PASSES; ++pass) {
        const int column = pass * 2 * W;
        add[rows](x + first * rows, words + column, w_.panel_bytes, num_words, {sums + column, first == 0}, fetched);
        fetched.lines = 0;
      }
    });
  }

  // Words that are multiplied as they are stored.
  template <class A> void add_stored(const char* panel) {
    int64_t i = 0;
    do {
      const int64_t n = min64(tuning.words_at_once, w_.words - i), bytes = n * w_.word_bytes;
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
    if (args_.arithmetic == Arithmetic::int8) return add_whole<F>(panel, add_integers_of<F>(w_, num_panels_));
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
        const char* codes = group + w_.group_head_bytes + pass * Codes<F>::pass_bytes;
        add[rows](w_, x, group + column * 2, codes, sums + column, fetched);
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
  const int64_t most_panels_;
  int64_t num_panels_ = 1;
  Finish finish_[MOST_PANELS];
};

// Where several panels are walked at once nothing is decoded: their sums may take that place.
static_assert(DECODED_AT_ONCE >= MOST_PANELS * MOST_ROWS_OF_PANELS, "sums of several panels need room");
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
  for (int64_t panel = first_panel; panel < last_panel;) panel += block.multiply(panel, last_panel);
}

}  // namespace

extern const MatmulKernels matmul_kernels;
constexpr MatmulKernels matmul_kernels = {TILE_ROWS, MULTIPLIES_BFLOAT16, prepared_row_bytes,
                                          scratch_bytes, prepare, multiply, finish, nullptr, nullptr};

}  // namespace quire::QUIRE_ISA
