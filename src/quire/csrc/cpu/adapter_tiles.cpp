// Products of an adapter's matrices on the matrix unit (AMX): bfloat16. avx512_bf16 has the other types.
//
// A panel is what the unit takes: 16 words of its 16 columns are a tile. Rows of x become chunks of 16 words, those of
// all tokens beside each other. The unit computes each row of a product by itself: it has the same bits alone and among
// others.

#include "adapters.h"
#include "amx_support.h"

#if defined(QUIRE_KNOWS_AMX)
#include "adapter_panels.h"
#include "amx.h"
#endif

namespace quire {

namespace avx512_bf16 { extern const AdapterKernels adapter_kernels; }

namespace QUIRE_ISA {

extern const AdapterKernels adapter_kernels;

#if !defined(QUIRE_KNOWS_AMX)

constexpr AdapterKernels adapter_kernels = {};  // fault_of_amx() keeps it from being used

#else

namespace {

constexpr int64_t LINE = BYTES_OF_TILE_ROW, STEP_BYTES = STEP_OF_WORDS * LINE;
constexpr int64_t TILE_FLOATS = ROWS_OF_TILE * ADAPTER_COLUMNS;

int64_t prepared_bytes(const AdapterArgs& args) { return args.input_words() * 4; }
int64_t low_bytes(const AdapterArgs& args) { return args.a_panels(args.most_rank) * ADAPTER_COLUMNS * 2; }

void prepare(const AdapterArgs& args, const AdapterBlock& block) {
  const int num_rows = static_cast<int>(block.count);
  for (int r = 0; r < num_rows; ++r) {
    const bf16* x = static_cast<const bf16*>(args.x) + block.tokens[r] * args.x_stride;
    place_chunks(x, args.columns * sizeof(bf16), block.prepared + r * CHUNK_BYTES, num_rows);
  }
}

// Tiles of the unit: first sums, then rows, then words of panels.
void set_shapes(const AdapterBlock& block, int num_sums, int num_inputs, int64_t words) {
  const int num_rows = static_cast<int>(block.count), num_words = static_cast<int>(min64(words, STEP_OF_WORDS));
  TileShapes shapes;
  for (int tile = 0; tile < TILES; ++tile) {
    if (tile < num_sums) shapes.set(tile, num_rows);
    else if (tile < num_sums + num_inputs) shapes.set(tile, num_rows, 4 * num_words);
    else shapes.set(tile, num_words);
  }
  set_shapes(shapes);
}

// Lines of a matrix that are fetched while what is there is computed: a few at a time, so that the memory never rests.
struct Ahead {
  const char* next;
  int64_t lines;

  Ahead(const char* words, int64_t bytes, int64_t calls)
      : next(words + FETCHED_AHEAD), lines((bytes / LINE + calls - 1) / calls) {}
  inline __attribute__((always_inline)) void fetch() {
    for (int64_t i = 0; i < lines; ++i, next += LINE) fetch_line_near(next);
  }
};

// Sums C += chunks of rows in tile A times words of a panel in tile B.
template <int C, int A, int B> QUIRE_INLINE void add_words(const char* words) {
  load_tile<B>(words, LINE);
  multiply_bfloat16<C, A, B>();
}

// Even and odd steps have sums of their own: the next one need not wait for the last.
void shrink(const AdapterArgs& args, const AdapterBlock& block, int64_t begin, int64_t end) {
  alignas(64) float even[TILE_FLOATS], odd[TILE_FLOATS];
  const Panels a = Panels::of_a(args, block);
  const int64_t steps = a.words / STEP_OF_WORDS, chunk = block.count * CHUNK_BYTES;
  set_shapes(block, 2, 2, STEP_OF_WORDS);
  for (int64_t panel = begin; panel < end; ++panel) {
    const char *words = a[panel], *rows = block.prepared;
    Ahead ahead(words, steps * STEP_BYTES, steps);
    clear_tile<0>(), clear_tile<1>();
    for (int64_t i = 0; i < steps; i += 2, words += 2 * STEP_BYTES, rows += 2 * chunk) {
      ahead.fetch(), ahead.fetch();
      load_tile<2>(rows, CHUNK_BYTES);
      add_words<0, 2, 4>(words);
      if (i + 1 == steps) break;
      load_tile<3>(rows + chunk, CHUNK_BYTES);
      add_words<1, 3, 5>(words + STEP_BYTES);
    }
    store_tile<0>(even, LINE), store_tile<1>(odd, LINE);
    for (int64_t t = 0; t < block.count; ++t) {
      const vf low = load(even + t * ADAPTER_COLUMNS) + load(odd + t * ADAPTER_COLUMNS);
      store_result(reinterpret_cast<bf16*>(block.low + t * low_bytes(args)) + panel * ADAPTER_COLUMNS, low);
    }
  }
  release_tiles();
}

// Panels of b that follow each other in one part, and meet rows of y as whole lines of the cache.
constexpr int GROUP = 4;
constexpr int64_t GROUP_BYTES = GROUP * LINE;

template <int C>
QUIRE_INLINE void add_panel(int num_panels, const char* words, int64_t panel_bytes, Ahead& ahead) {
  ahead.fetch();
  if (C < num_panels) add_words<C, 4, 5 + C % 3>(words + C * panel_bytes);
}
template <int C> QUIRE_INLINE void store_panel(int num_panels, float* sums) {
  if (C < num_panels) store_tile<C>(sums + C * ADAPTER_COLUMNS, GROUP_BYTES);
}

template <class Y> class Expansion {
 public:
  Expansion(const AdapterArgs& args, const AdapterBlock& block)
      : block_(block), b_(Panels::of_b(args, block)), low_bytes_(low_bytes(args)) {
    for (int64_t t = 0; t < block.count; ++t) {
      y_[t] = static_cast<Y*>(args.y) + block.tokens[t] * args.y_stride;
    }
  }

  // So many panels from one on, whose outputs begin at `to`; `width` of them in all.
  void add(int64_t panel, int num_panels, const Outputs& to, int64_t width) {
    const char *words = b_[panel], *low = block_.low + to.part() * b_.words * 4;
    Ahead ahead(words, num_panels * b_.bytes, GROUP + 2 * block_.count);
    clear_tile<0>(), clear_tile<1>(), clear_tile<2>(), clear_tile<3>();
    for (int64_t i = 0; i < b_.words; i += STEP_OF_WORDS, words += STEP_BYTES) {
      load_tile<4>(low + i * 4, low_bytes_);
      add_panel<0>(num_panels, words, b_.bytes, ahead), add_panel<1>(num_panels, words, b_.bytes, ahead);
      add_panel<2>(num_panels, words, b_.bytes, ahead), add_panel<3>(num_panels, words, b_.bytes, ahead);
    }
    store_panel<0>(num_panels, sums_), store_panel<1>(num_panels, sums_);
    store_panel<2>(num_panels, sums_), store_panel<3>(num_panels, sums_);
    add_to_rows(to.column(), width, ahead);
  }

 private:
  // All rows are read before the first is written: they often lie at the same place of a page, and a processor takes a
  // read for one of what was just written there.
  void add_to_rows(int64_t column, int64_t width, Ahead& ahead) {
    for (int64_t t = 0; t < block_.count; ++t) {
      float* sums = sums_ + t * GROUP * ADAPTER_COLUMNS;
      ahead.fetch();
      for (int64_t i = 0; i < width; i += W) {
        store(sums + i, load(sums + i) + load_upto(y_[t] + column + i, width - i));
      }
    }
    for (int64_t t = 0; t < block_.count; ++t) {
      const float* sums = sums_ + t * GROUP * ADAPTER_COLUMNS;
      ahead.fetch();
      for (int64_t i = 0; i < width; i += W) store_result_upto(y_[t] + column + i, load(sums + i), width - i);
    }
  }

  const AdapterBlock& block_;
  const Panels b_;
  const int64_t low_bytes_;
  Y* y_[ROWS_OF_TILE];
  alignas(64) float sums_[GROUP * TILE_FLOATS];
};

template <class Y>
void expand_onto(const AdapterArgs& args, const AdapterBlock& block, int64_t begin, int64_t end) {
  Expansion<Y> expansion(args, block);
  Outputs to(args, begin);
  set_shapes(block, GROUP, 1, args.rank_words(block.rank));
  while (begin < end) {
    const int num_panels = static_cast<int>(min64(GROUP, min64(end - begin, to.panels_left())));
    expansion.add(begin, num_panels, to, min64(num_panels * ADAPTER_COLUMNS, to.width()));
    begin += num_panels;
    to.skip(num_panels);
  }
  release_tiles();
}

void expand(const AdapterArgs& args, const AdapterBlock& block, int64_t begin, int64_t end) {
  if (args.y_dtype == DType::float32) return expand_onto<float>(args, block, begin, end);
  expand_onto<bf16>(args, block, begin, end);
}

}  // namespace

constexpr AdapterKernels adapter_kernels = {ROWS_OF_TILE, prepared_bytes, low_bytes, prepare, shrink, expand,
                                            &avx512_bf16::adapter_kernels};

#endif

}  // namespace QUIRE_ISA
}  // namespace quire
