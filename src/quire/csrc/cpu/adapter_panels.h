// What the products of adapters have in common on every instruction set: where panels are and where results go.
#pragma once

#include "adapters.h"
#include "simd.h"

namespace quire::QUIRE_ISA {

// Bytes from what is multiplied to what is fetched meanwhile: more than come in the time that a memory takes to answer.
constexpr int64_t FETCHED_AHEAD = 4096;

// The panels of a matrix of one slot.
struct Panels {
  const char* data;
  int64_t words, bytes;

  static Panels of_a(const AdapterArgs& args, const AdapterBlock& block) {
    const int64_t words = args.input_words();
    return of(args.a, args, block.slot * args.a_stride, words);
  }
  static Panels of_b(const AdapterArgs& args, const AdapterBlock& block) {
    return of(args.b, args, block.slot * args.b_stride, args.rank_words(block.rank));
  }
  const char* operator[](int64_t panel) const { return data + panel * bytes; }

 private:
  static Panels of(const void* matrix, const AdapterArgs& args, int64_t elements, int64_t words) {
    const int64_t element_bytes = args.word_bytes() / args.values_of_word();
    return {static_cast<const char*>(matrix) + elements * element_bytes, words, words * args.line_bytes()};
  }
};

// Where the outputs of the panels of b are, one panel after the other.
class Outputs {
 public:
  Outputs(const AdapterArgs& args, int64_t panel) : args_(args), end_(args.part_ends[0]) { skip(panel); }

  int part() const { return part_; }
  int64_t column() const { return column_; }
  // To the end of the part.
  int64_t width() const { return end_ - column_; }
  int64_t panels_left() const { return AdapterArgs::panels_of(width()); }

  void skip(int64_t panels) {
    for (; panels >= panels_left() && part_ + 1 < args_.num_parts; column_ = end_, end_ = args_.part_ends[++part_]) {
      panels -= panels_left();
    }
    column_ += panels * ADAPTER_COLUMNS;
  }

 private:
  const AdapterArgs& args_;
  int part_ = 0;
  int64_t column_ = 0, end_;
};

// The first n values of a vector, if there are so many.
template <class T> QUIRE_INLINE void store_result_upto(T* p, vf a, int64_t n) {
  n >= W ? store_result(p, a) : store_part(p, a, static_cast<int>(n));
}

}  // namespace quire::QUIRE_ISA
