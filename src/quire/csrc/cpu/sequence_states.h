// The states of a step's sequences, where they lie: spread over the chunks of the blocks that each sequence holds.
//
//     header   int64: how many tokens the state has absorbed; 8 bytes of padding
//     numbers  float32
//
// Chunk c of a sequence is in place c % places of its block c / places (state_layout.py).
#pragma once

#include <cstring>
#include <vector>

#include "attention_args.h"
#include "operators.h"

namespace quire {

class SequenceStates {
 public:
  // Each state has so many floats. What the vectors hold may change between two runs.
  SequenceStates(const std::vector<Tensor>& places, int64_t first_chunk, const Tensor& tables, const Tensor& starts,
                 const Tensor& query_starts, const Tensor& kept, int64_t floats);

  // Of every run: all that is read here leads to memory. Remembers which sequences have absorbed their first token.
  void check(const Extent& extent);

  int64_t begin(int64_t s) const { return query_starts_[s]; }
  int64_t kept_end(int64_t s) const { return begin(s) + kept_[s]; }
  int64_t end(int64_t s) const { return query_starts_[s + 1]; }
  bool reads_first(int64_t s) const { return reads_first_[s] != 0; }

  // `rows` rows of `width` floats, from number `first` on and `stride` apart, to rows that are `to_stride` apart, and
  // back. A sequence that begins has zeros.
  void read(int64_t s, int64_t first, int64_t rows, int64_t width, int64_t stride, float* to, int64_t to_stride) const;
  void write(int64_t s, int64_t first, int64_t rows, int64_t width, int64_t stride, const float* from,
             int64_t from_stride) const;
  // The state has absorbed what the step keeps. Once for each sequence, whichever part of it comes first: nobody reads
  // it before the next check.
  void move_position(int64_t s) const;

 private:
  static constexpr int64_t HEADER = 16;
  char* chunk(int64_t s, int64_t number) const;
  // Calls work(memory, bytes) for the pieces that bytes [from, from + count) of a state lie in, in order.
  template <class Work> void each_piece(int64_t s, int64_t from, int64_t count, Work work) const;

  std::vector<char*> places_;
  std::vector<int64_t> strides_;
  int64_t num_blocks_, chunk_bytes_, first_chunk_, num_chunks_, table_stride_, most_sequences_;
  Indices tables_, starts_, query_starts_, kept_;
  std::vector<char> reads_first_;
};

}  // namespace quire
