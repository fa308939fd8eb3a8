// Packing of weights and the way back: plain code for every processor.
#pragma once

#include "crew.h"
#include "matmul.h"

namespace quire {

// A weight [rows, columns] as it comes, in one of the three float types; `row_bytes` from row to row.
struct PlainWeight {
  const char* data;
  int64_t row_bytes;
};

// A weight as codes of a byte each, [rows, columns], with float scales and offsets (or null) [rows, groups], contiguous.
// Signed codes that are to have 4 bits are twice the values of 4-bit floats.
struct QuantizedWeight {
  const uint8_t* codes;
  bool are_signed;
  const float* scales;
  const float* offsets;
  int64_t rows, columns, groups;
};

// Headers, complete.
PackedHeader float_header(DType dtype, int64_t rows, int64_t columns);
PackedHeader quantized_header(const QuantizedWeight& weight, int bits, bool is_weight_only);
// Null, or why the offsets of this weight cannot be stored: as offset / scale, in float16.
const char* fault_of(const QuantizedWeight& weight);
int64_t packed_bytes(const PackedHeader& header);
// Null, or what is wrong with a header that was found before so many bytes.
const char* fault_of(const PackedHeader& header, int64_t bytes);

// Panels [begin, end). False: there were codes that do not occur in the format.
void pack_panels(const PlainWeight& from, const PackedView& to, int64_t begin, int64_t end);
bool pack_panels(const QuantizedWeight& from, const PackedView& to, int64_t begin, int64_t end);

// A row of the weight, dequantised.
void unpack_row(const PackedView& weight, int64_t row, float* to);

}  // namespace quire
