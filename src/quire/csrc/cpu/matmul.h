// Packed weights and the products with them: what the operators (operators_linear.cpp) and the kernels share.
//
// A packed weight is a tensor of bytes that describes itself: a header of 64 bytes, then panels of 32 output columns
// (rows of the weight). A panel holds one word of 32 bits for each column, then the next word: a word is one float, two
// 16-bit floats or four 8-bit values; with values of 4 or 6 bits 16 or 24 bits are enough for the same four.
//
//   panel:   [column scales]   32 floats, if the format has one scale for each column
//            group 0:   [scales]  [zeros]     32 float16 each, if the format has groups; zeros if the weight has any
//                       word 0 of columns 0..31, word 1 of columns 0..31, ...
//            group 1:   ...
//
// Four bits: byte b of the 64 of a word holds a value of column b / 4 in its lower half, of column 16 + b / 4 in its
// upper half. Where these are floats (fp4: E2M1, as in MXFP4), they are looked up in FP4_CODES on the way into the
// arithmetic, which then sees whole numbers as of any other format. Six bits: the same for the lower four, and behind
// each 32 of these bytes 16 with the other two bits of their values. Byte i has those of bytes i and 16 + i, first of
// the values in lower halves, then of those in upper ones. All instruction sets share this layout.
#pragma once

#include "kernels.h"

namespace quire {

constexpr int PANEL_COLUMNS = 32;
// Activations that become 8-bit share a scale over so many inputs of a token.
constexpr int QUANTIZED_TOGETHER = 128;

enum class WeightFormat : int32_t { float32, bfloat16, float16, int8, int4, fp4, int6 };
enum class PackedLayout : int32_t { rows, panels };  // `rows` is the reference's own, in plain PyTorch

struct PackedHeader {
  char magic[8];
  int32_t version;
  PackedLayout layout;
  WeightFormat format;
  uint32_t flags;
  int64_t num_rows, num_columns;  // of the weight: outputs, inputs
  int32_t group;                  // inputs that share a scale; 0 if all of a row do
  int32_t zero_point;             // value = scale * (code - zero_point - zero), codes are unsigned
  int32_t exponent;               // scales of groups are stored divided by 2 to this power
  int32_t reserved[3];
};
static_assert(sizeof(PackedHeader) == 64, "the header is one cache line");

constexpr char PACKED_MAGIC[8] = {'Q', 'U', 'I', 'R', 'E', 'P', 'W', 0};
constexpr int32_t PACKED_VERSION = 1;
constexpr uint32_t HAS_ZEROS = 1, IS_WEIGHT_ONLY = 2;
// What the floats of 4 bits stand for: twice their value, with this zero point.
constexpr int FP4_ZERO_POINT = 12;
alignas(16) constexpr uint8_t FP4_CODES[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// A packed weight with the sizes that follow from its header.
struct PackedView {
  WeightFormat format;
  bool has_zeros, is_weight_only;
  int64_t rows, columns, num_panels;
  int64_t group, num_groups;  // group == columns rounded up to words if there is one
  int values_per_word, word_bytes, zero_point;
  float scale_unit;  // 2 to the header's exponent
  int64_t words, group_words, group_head_bytes, group_bytes, panel_head_bytes, panel_bytes;
  char* data;
  const char* heads;    // of the panels: `data`, unless this is a slice
  int64_t slice_bytes;  // from where a panel begins in `data` to the end of its words

  bool is_quantized() const { return format >= WeightFormat::int8; }
  // Whether values have fewer bits than a byte.
  bool is_narrow() const { return format >= WeightFormat::int4; }
};

// The view of a header that was checked; `data` is what follows the header, or null.
PackedView view_of(const PackedHeader& header, char* data);
// The inputs [first, first + count) of a weight, which are whole words and groups of it.
PackedView slice_of(const PackedView& weight, int64_t first, int64_t count);
// Null, or why a weight cannot be cut into so many equal slices.
const char* fault_of_slices(const PackedView& weight, int64_t num_slices);

enum class Arithmetic { float32, bfloat16, int8 };

// y = x W^T + bias for some rows of x.
struct MatmulArgs {
  PackedView weight;
  Arithmetic arithmetic;
  DType dtype, bias_dtype, out_dtype;  // of x, of bias, of out
  const void* x;
  const void* bias;  // or null
  void* out;
  int64_t x_stride, out_stride;
  // Where row r is read and where its result goes; null: at r.
  const int32_t* x_rows;
  const int32_t* out_rows;

  int64_t x_offset(int64_t row) const { return (x_rows != nullptr ? x_rows[row] : row) * x_stride; }
  int64_t out_offset(int64_t row) const { return (out_rows != nullptr ? out_rows[row] : row) * out_stride; }
};

// Rows of x are prepared before they are multiplied: converted to what the arithmetic multiplies and interleaved in
// tiles of up to MatmulKernels::tile_rows rows, word by word, so that a kernel walks through one short piece of memory.
// Rows [0, n) are cut into tiles of nearly equal size.
struct Tiles {
  int64_t rows, count;
  Tiles(int64_t n, int64_t tile_rows) : rows(n), count((n + tile_rows - 1) / tile_rows) {}
  int64_t first_row(int64_t tile) const { return rows * tile / count; }
};

struct MatmulKernels {
  int tile_rows;
  bool multiplies_bfloat16;
  // Bytes of a prepared row, and of the scratch that `multiply` needs for a call with so many rows.
  int64_t (*prepared_row_bytes)(const MatmulArgs&);
  int64_t (*scratch_bytes)(int64_t rows);
  // Tiles [begin, end). `prepared` begins with tile 0; `scratch` has room for a prepared tile.
  void (*prepare)(const MatmulArgs&, const Tiles&, int64_t begin, int64_t end, char* prepared, char* scratch);
  // Rows of tiles [begin, end), columns of panels [first_panel, last_panel).
  void (*multiply)(const MatmulArgs&, const Tiles&, int64_t begin, int64_t end, int64_t first_panel, int64_t last_panel,
                   const char* prepared, char* scratch);
  // Rows [first, first + rows) of a panel's columns from their sums: bias, rounding.
  void (*finish)(const MatmulArgs&, int64_t panel, const float* sums, int64_t first, int64_t rows);
  // Null, or whether there is such a product here: `otherwise` has those that are not.
  bool (*suits)(const MatmulArgs&);
  const MatmulKernels* otherwise;
};

}  // namespace quire
