#include "matmul_pack.h"

#include <torch/headeronly/util/Half.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include <cmath>
#include <cstring>
#include <memory>

namespace quire {
namespace {

constexpr int64_t HEAD = sizeof(PackedHeader);
constexpr int VALUES_PER_WORD[] = {1, 2, 2, 4, 4, 4, 4};
// Not the code of any number.
constexpr uint8_t NO_CODE = 0x80;

// By a signed byte: the 4-bit float of which it is twice the value. Zero has the code 0.
struct Fp4Codes {
  uint8_t of[256];
  constexpr Fp4Codes() : of() {
    for (int i = 0; i < 256; ++i) of[i] = NO_CODE;
    for (int code = 15; code >= 0; --code) of[static_cast<uint8_t>(FP4_CODES[code] - FP4_ZERO_POINT)] = code;
  }
};
constexpr Fp4Codes FP4_OF_BYTE;
alignas(64) constexpr char ZEROS[64] = {};
// Each word of a row lies in a cache line of its own: so many are fetched ahead.
constexpr int64_t WORDS_AHEAD = 32;

// Sixteen words of four rows into four columns of sixteen words.
#if defined(__x86_64__)
void transpose_words(const char* const rows[4], char* to) {
  for (int w = 0; w < 16; w += 4, to += 4 * PANEL_COLUMNS * 4) {
    __m128 r[4];
    for (int i = 0; i < 4; ++i) r[i] = _mm_loadu_ps(reinterpret_cast<const float*>(rows[i]) + w);
    _MM_TRANSPOSE4_PS(r[0], r[1], r[2], r[3]);
    for (int i = 0; i < 4; ++i) _mm_storeu_ps(reinterpret_cast<float*>(to) + i * PANEL_COLUMNS, r[i]);
  }
}
#else
void transpose_words(const char* const rows[4], char* to) {
  for (int w = 0; w < 16; ++w, to += PANEL_COLUMNS * 4)
    for (int i = 0; i < 4; ++i) std::memcpy(to + i * 4, rows[i] + w * 4, 4);
}
#endif

// Rows of words, `bytes` long, become columns of a panel; words beyond the row and rows that are null become zeros.
void pack_rows(const char* const rows[PANEL_COLUMNS], int64_t bytes, int64_t words, char* to) {
  for (int64_t w = 0; w < words; w += 16) {
    const int64_t left = bytes - w * 4;
    for (int c = 0; c < PANEL_COLUMNS; c += 4) {
      const char* four[4];
      alignas(16) char ends[4][64];
      for (int i = 0; i < 4; ++i) {
        const char* row = rows[c + i];
        four[i] = row == nullptr ? ZEROS : row + w * 4;
        if (row != nullptr && left < 64) {
          std::memset(ends[i], 0, 64);
          std::memcpy(ends[i], row + w * 4, left);
          four[i] = ends[i];
        }
      }
      char* place = to + (w * PANEL_COLUMNS + c) * 4;
      if (words - w >= 16) {
        transpose_words(four, place);
      } else {
        for (int64_t k = 0; k < words - w; ++k)
          for (int i = 0; i < 4; ++i) std::memcpy(place + (k * PANEL_COLUMNS + i) * 4, four[i] + k * 4, 4);
      }
    }
  }
}

float half_to_float(uint16_t half) {
  const uint32_t bits = (half & 0x8000u) << 16 | (half & 0x7fffu) << 13;
  float value;
  std::memcpy(&value, &bits, 4);
  return value * 5.192296858534828e33f;  // 2^112: the difference of the two biases
}

float bfloat16_to_float(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

PackedHeader header_of(WeightFormat format, int64_t rows, int64_t columns) {
  PackedHeader header{};
  std::memcpy(header.magic, PACKED_MAGIC, sizeof(header.magic));
  header.version = PACKED_VERSION;
  header.layout = PackedLayout::panels;
  header.format = format;
  header.num_rows = rows, header.num_columns = columns;
  return header;
}

// Whether every offset is -zero_point * scale with the same small integer: that costs neither memory nor arithmetic.
bool have_one_zero_point(const QuantizedWeight& weight, int* zero_point) {
  const int64_t count = weight.rows * weight.groups;
  int64_t first = 0;
  while (first < count && weight.scales[first] == 0) ++first;
  if (first == count) return false;
  const float ratio = std::nearbyint(-weight.offsets[first] / weight.scales[first]);
  if (!(std::fabs(ratio) <= 255)) return false;
  for (int64_t i = 0; i < count; ++i) {
    const float expected = -ratio * weight.scales[i];
    if (!(std::fabs(weight.offsets[i] - expected) <= 1e-6f * std::fabs(expected))) return false;
  }
  *zero_point = static_cast<int>(ratio);
  return true;
}

// Bytes of a word with the lower four bits of the codes of so many columns and elements, and of as many of the second
// half of the columns; with six bits half as many follow, with the other two.
constexpr int64_t PIECE = 32;

// Words of a byte a code become words of fewer bits.
void join_codes(const PackedView& view, const char* words, char* to) {
  for (int64_t i = 0; i < 2 * view.group_words; ++i, to += view.word_bytes / 2) {
    const char* first = words + i / 2 * PANEL_COLUMNS * 4 + i % 2 * PIECE;
    const char* second = first + 2 * PIECE;
    for (int b = 0; b < PIECE; ++b) to[b] = static_cast<char>((first[b] & 15) | (second[b] << 4));
    if (view.format != WeightFormat::int6) continue;
    for (int b = 0; b < PIECE / 2; ++b) {
      const int of_first = first[b] >> 4 | first[b + PIECE / 2] >> 4 << 2;
      const int of_second = (second[b] & 0x30) | (second[b + PIECE / 2] & 0x30) << 2;
      to[PIECE + b] = static_cast<char>(of_first | of_second);
    }
  }
}

// The code of a column in such a word.
int code_at(const PackedView& view, const char* word, int64_t column, int64_t element) {
  const int64_t byte = column * 4 + element, in_piece = byte % PIECE, shift = byte / (2 * PIECE) * 4;
  const uint8_t* piece = reinterpret_cast<const uint8_t*>(word) + byte / PIECE % 2 * (view.word_bytes / 2);
  const int code = piece[in_piece] >> shift & 15;
  if (view.format != WeightFormat::int6) return code;
  const int64_t upper_shift = shift + in_piece / (PIECE / 2) * 2;
  return code | (piece[PIECE + in_piece % (PIECE / 2)] >> upper_shift & 3) << 4;
}

// Whether all of them have six bits; then they are replaced by codes from 0 on.
bool become_int6(char* bytes, int64_t count, bool are_signed) {
  uint8_t all = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint8_t code = static_cast<uint8_t>(bytes[i] + (are_signed ? 32 : 0));
    all |= code;
    bytes[i] = static_cast<char>(code);
  }
  return all < 64;
}

// Whether all of them are twice the value of some 4-bit float; then they are replaced by its code.
bool become_fp4(char* bytes, int64_t count) {
  uint8_t all = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint8_t code = FP4_OF_BYTE.of[static_cast<uint8_t>(bytes[i])];
    all |= code;
    bytes[i] = static_cast<char>(code);
  }
  return (all & NO_CODE) == 0;
}

float zero_of(const QuantizedWeight& weight, int64_t i) {
  return weight.offsets[i] == 0 ? 0.0f : -weight.offsets[i] / weight.scales[i];
}

void pack_head(const QuantizedWeight& weight, const PackedView& to, int64_t first, int64_t group, char* head) {
  std::memset(head, 0, to.group_head_bytes);
  for (int64_t c = 0; c < PANEL_COLUMNS && first + c < weight.rows && to.group_head_bytes > 0; ++c) {
    const int64_t i = (first + c) * weight.groups + group;
    const torch::headeronly::Half scale(weight.scales[i] / to.scale_unit);
    std::memcpy(head + c * 2, &scale, 2);
    if (!to.has_zeros) continue;
    const torch::headeronly::Half zero(zero_of(weight, i));
    std::memcpy(head + (PANEL_COLUMNS + c) * 2, &zero, 2);
  }
}

}  // namespace

PackedHeader float_header(DType dtype, int64_t rows, int64_t columns) {
  const WeightFormat format = dtype == DType::float32    ? WeightFormat::float32
                              : dtype == DType::bfloat16 ? WeightFormat::bfloat16
                                                         : WeightFormat::float16;
  return header_of(format, rows, columns);
}

PackedHeader quantized_header(const QuantizedWeight& weight, int bits, bool is_weight_only) {
  const WeightFormat of_4_bits = weight.are_signed ? WeightFormat::fp4 : WeightFormat::int4;
  const WeightFormat format = bits == 8 ? WeightFormat::int8 : bits == 6 ? WeightFormat::int6 : of_4_bits;
  PackedHeader header = header_of(format, weight.rows, weight.columns);
  header.zero_point = format == WeightFormat::fp4 ? FP4_ZERO_POINT : weight.are_signed ? 1 << (bits - 1) : 0;
  header.flags = is_weight_only ? IS_WEIGHT_ONLY : 0;
  int zero_point = 0;
  if (weight.offsets != nullptr && have_one_zero_point(weight, &zero_point)) {
    header.zero_point += zero_point;
  } else if (weight.offsets != nullptr) {
    header.flags |= HAS_ZEROS;
  }
  const bool has_zeros = (header.flags & HAS_ZEROS) != 0;
  if (bits == 8 && weight.groups == 1 && !has_zeros) return header;  // float32 scales for the columns
  header.group = static_cast<int32_t>(weight.columns / weight.groups);
  float largest = 0;
  for (int64_t i = 0; i < weight.rows * weight.groups; ++i) {
    largest = std::fmax(largest, std::fabs(weight.scales[i]));
  }
  // The largest comes just below the end of float16, so that even much smaller ones keep all their bits.
  header.exponent = largest > 0 ? std::ilogb(largest) - 14 : 0;
  return header;
}

const char* fault_of(const QuantizedWeight& weight) {
  for (int64_t i = 0; weight.offsets != nullptr && i < weight.rows * weight.groups; ++i) {
    if (!(std::fabs(zero_of(weight, i)) <= 65504)) return "an offset is too large for its scale, or not a number";
  }
  return nullptr;
}

PackedView view_of(const PackedHeader& header, char* data) {
  PackedView view{};
  view.format = header.format;
  view.has_zeros = (header.flags & HAS_ZEROS) != 0;
  view.is_weight_only = (header.flags & IS_WEIGHT_ONLY) != 0;
  view.rows = header.num_rows, view.columns = header.num_columns;
  view.num_panels = (view.rows + PANEL_COLUMNS - 1) / PANEL_COLUMNS;
  view.values_per_word = VALUES_PER_WORD[static_cast<int>(header.format)];
  view.word_bytes = PANEL_COLUMNS * (view.format == WeightFormat::int6 ? 3 : view.is_narrow() ? 2 : 4);
  view.zero_point = header.zero_point;
  view.scale_unit = std::ldexp(1.0f, header.exponent);
  view.words = (view.columns + view.values_per_word - 1) / view.values_per_word;
  view.group = header.group > 0 ? header.group : view.words * view.values_per_word;
  view.group_words = (view.group + view.values_per_word - 1) / view.values_per_word;
  view.num_groups = view.group_words > 0 ? view.words / view.group_words : 0;
  const bool has_group_scales = view.is_quantized() && header.group > 0;
  view.group_head_bytes = has_group_scales ? PANEL_COLUMNS * 2 * (view.has_zeros ? 2 : 1) : 0;
  view.panel_head_bytes = view.is_quantized() && !has_group_scales ? PANEL_COLUMNS * 4 : 0;
  view.group_bytes = view.group_head_bytes + view.group_words * view.word_bytes;
  view.panel_bytes = view.panel_head_bytes + view.num_groups * view.group_bytes;
  view.data = data;
  view.heads = data;
  view.slice_bytes = view.panel_bytes;
  return view;
}

const char* fault_of_slices(const PackedView& weight, int64_t num_slices) {
  if (num_slices < 1 || weight.columns % num_slices != 0) return "the inputs of a weight cannot be cut into equal slices";
  const int64_t columns = weight.columns / num_slices;
  if (columns % weight.values_per_word != 0) return "a slice of a weight would end within a word";
  if (weight.group_head_bytes > 0 && columns % weight.group != 0) return "a slice of a weight would end within a group";
  return nullptr;
}

PackedView slice_of(const PackedView& weight, int64_t first, int64_t count) {
  PackedView view = weight;
  view.columns = count;
  view.words = count / weight.values_per_word;
  if (weight.group_head_bytes > 0) {
    view.num_groups = count / weight.group;
    view.data = weight.data + first / weight.group * weight.group_bytes;
    view.slice_bytes = view.num_groups * weight.group_bytes;
    return view;
  }
  view.group = count, view.group_words = view.words;
  view.data = weight.data + first / weight.values_per_word * weight.word_bytes;
  view.slice_bytes = weight.panel_head_bytes + view.words * weight.word_bytes;
  return view;
}

int64_t packed_bytes(const PackedHeader& header) {
  const PackedView view = view_of(header, nullptr);
  return HEAD + view.num_panels * view.panel_bytes;
}

const char* fault_of(const PackedHeader& header, int64_t bytes) {
  if (std::memcmp(header.magic, PACKED_MAGIC, sizeof(header.magic)) != 0) return "this is not a packed weight";
  if (header.version != PACKED_VERSION) return "the weight was packed by another version; pack it again";
  if (header.layout != PackedLayout::panels) return "the weight was packed for the kernels in plain PyTorch";
  const int format = static_cast<int>(header.format);
  // The products of sizes below the greatest fit into 64 bits.
  constexpr int64_t greatest = int64_t{1} << 28;
  if (format < 0 || format > static_cast<int>(WeightFormat::int6) || header.num_rows < 0 || header.num_columns < 0 ||
      header.group < 0 || header.num_rows > greatest || header.num_columns > greatest ||
      (header.group % 4 != 0 && header.group != header.num_columns) ||
      (header.format >= WeightFormat::int8 && header.num_columns == 0) ||
      (header.group > 0 && header.num_columns % header.group != 0)) {
    return "the header of the packed weight is damaged";
  }
  return bytes == packed_bytes(header) ? nullptr : "the packed weight is not as long as its header says";
}

void pack_panels(const PlainWeight& from, const PackedView& to, int64_t begin, int64_t end) {
  const int64_t bytes = to.columns * (4 / to.values_per_word);
  for (int64_t panel = begin; panel < end; ++panel) {
    const char* rows[PANEL_COLUMNS];
    for (int64_t c = 0; c < PANEL_COLUMNS; ++c) {
      const int64_t row = panel * PANEL_COLUMNS + c;
      rows[c] = row < to.rows ? from.data + row * from.row_bytes : nullptr;
    }
    pack_rows(rows, bytes, to.words, to.data + panel * to.panel_bytes);
  }
}

bool pack_panels(const QuantizedWeight& from, const PackedView& to, int64_t begin, int64_t end) {
  bool are_codes = true;
  const std::unique_ptr<char[]> wide(new char[to.group_words * PANEL_COLUMNS * 4]);
  for (int64_t panel = begin; panel < end; ++panel) {
    const int64_t first = panel * PANEL_COLUMNS;
    char* data = to.data + panel * to.panel_bytes;
    std::memset(data, 0, to.panel_head_bytes);
    for (int64_t c = 0; c < PANEL_COLUMNS && first + c < to.rows && to.panel_head_bytes > 0; ++c) {
      std::memcpy(data + c * 4, from.scales + first + c, 4);
    }
    data += to.panel_head_bytes;
    for (int64_t group = 0; group < to.num_groups; ++group) {
      pack_head(from, to, first, group, data);
      data += to.group_head_bytes;
      const char* rows[PANEL_COLUMNS];
      const int64_t bytes = min64(to.group, to.columns);
      for (int64_t c = 0; c < PANEL_COLUMNS; ++c) {
        rows[c] = first + c < to.rows
                      ? reinterpret_cast<const char*>(from.codes) + (first + c) * to.columns + group * to.group
                      : nullptr;
      }
      const int64_t word_bytes = to.group_words * PANEL_COLUMNS * 4;
      char* words = to.is_narrow() ? wide.get() : data;
      pack_rows(rows, bytes, to.group_words, words);
      if (to.format == WeightFormat::fp4) are_codes = become_fp4(words, word_bytes) && are_codes;
      if (to.format == WeightFormat::int6) are_codes = become_int6(words, word_bytes, from.are_signed) && are_codes;
      if (to.is_narrow()) join_codes(to, words, data);
      for (int64_t b = 0; from.are_signed && to.format == WeightFormat::int8 && b < word_bytes; ++b) data[b] ^= '\x80';
      data += to.group_words * to.word_bytes;
    }
  }
  return are_codes;
}

namespace {

void unpack_codes(const PackedView& weight, const char* panel, int64_t column, float* to) {
  const auto float_at = [&](const char* halves) {
    uint16_t half;
    std::memcpy(&half, halves + column * 2, 2);
    return half_to_float(half);
  };
  float scale = 1, zero = 0;
  if (weight.panel_head_bytes > 0) std::memcpy(&scale, panel + column * 4, 4);
  const char* data = panel + weight.panel_head_bytes;
  for (int64_t group = 0, k = 0; group < weight.num_groups; ++group, data += weight.group_bytes) {
    if (weight.group_head_bytes > 0) scale = float_at(data) * weight.scale_unit;
    if (weight.has_zeros) zero = float_at(data + PANEL_COLUMNS * 2);
    const char* words = data + weight.group_head_bytes;
    for (int64_t end = min64(k + weight.group, weight.columns), in_group = 0; k < end; ++k, ++in_group) {
      const char* word = words + in_group / 4 * weight.word_bytes;
      int code = weight.is_narrow() ? code_at(weight, word, column, in_group % 4)
                                    : static_cast<uint8_t>(word[column * 4 + in_group % 4]);
      if (weight.format == WeightFormat::fp4) code = FP4_CODES[code];
      to[k] = scale * (static_cast<float>(code - weight.zero_point) - zero);
    }
  }
}

}  // namespace

void unpack_row(const PackedView& weight, int64_t row, float* to) {
  const char* panel = weight.data + row / PANEL_COLUMNS * weight.panel_bytes;
  const int64_t column = row % PANEL_COLUMNS;
  if (weight.is_quantized()) return unpack_codes(weight, panel, column, to);
  const char* word = panel + column * 4;
  if (weight.format == WeightFormat::float32) {
    for (int64_t k = 0; k < weight.columns; ++k, word += PANEL_COLUMNS * 4) {
      __builtin_prefetch(word + WORDS_AHEAD * PANEL_COLUMNS * 4);
      std::memcpy(to + k, word, 4);
    }
    return;
  }
  const bool is_bfloat16 = weight.format == WeightFormat::bfloat16;
  for (int64_t k = 0; k < weight.columns; k += 2, word += PANEL_COLUMNS * 4) {
    __builtin_prefetch(word + WORDS_AHEAD * PANEL_COLUMNS * 4);
    uint16_t halves[2];
    std::memcpy(halves, word, 4);
    for (int64_t i = 0; i < min64(2, weight.columns - k); ++i) {
      to[k + i] = is_bfloat16 ? bfloat16_to_float(halves[i]) : half_to_float(halves[i]);
    }
  }
}

}  // namespace quire
