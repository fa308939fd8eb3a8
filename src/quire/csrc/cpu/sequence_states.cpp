#include "sequence_states.h"

namespace quire {
namespace {

Indices indices(const Tensor& t, int64_t dim, const char* name) {
  STD_TORCH_CHECK(t.is_cpu() && (t.scalar_type() == ScalarType::Int || t.scalar_type() == ScalarType::Long) &&
                      t.dim() == dim && (t.stride(dim - 1) == 1 || t.size(dim - 1) <= 1),
                  name, " must be contiguous int32 or int64 on the CPU, of ", dim, " dimensions");
  return {t.const_data_ptr(), t.scalar_type() == ScalarType::Long};
}

}  // namespace

SequenceStates::SequenceStates(const std::vector<Tensor>& places, int64_t first_chunk, const Tensor& tables,
                               const Tensor& starts, const Tensor& query_starts, const Tensor& kept, int64_t floats)
    : first_chunk_(first_chunk),
      table_stride_(tables.stride(0)),
      most_sequences_(tables.size(0)),
      tables_(indices(tables, 2, "tables")),
      starts_(indices(starts, 1, "starts")),
      query_starts_(indices(query_starts, 1, "query_starts")),
      kept_(indices(kept, 1, "num_kept")) {
  STD_TORCH_CHECK(!places.empty() && first_chunk >= 0, "states must lie somewhere");
  num_blocks_ = places[0].size(0), chunk_bytes_ = places[0].size(1);
  for (const Tensor& place : places) {
    STD_TORCH_CHECK(place.is_cpu() && place.dim() == 2 && place.scalar_type() == ScalarType::Byte &&
                        place.size(0) == num_blocks_ && place.size(1) == chunk_bytes_ &&
                        (place.stride(1) == 1 || chunk_bytes_ == 1),
                    "places must be bytes on the CPU, [blocks, bytes of a chunk], and alike");
    places_.push_back(static_cast<char*>(place.mutable_data_ptr()));
    strides_.push_back(place.stride(0));
  }
  const int64_t bytes = HEADER + floats * static_cast<int64_t>(sizeof(float));
  num_chunks_ = (bytes + chunk_bytes_ - 1) / chunk_bytes_;
  STD_TORCH_CHECK(chunk_bytes_ >= 8, "a header must fit into a chunk");
  const int64_t num_places = static_cast<int64_t>(places_.size());
  STD_TORCH_CHECK((first_chunk_ + num_chunks_ - 1) / num_places < tables.size(1), "the tables have too few blocks");
  STD_TORCH_CHECK(starts.size(0) == most_sequences_ && kept.size(0) == most_sequences_ &&
                      query_starts.size(0) == most_sequences_ + 1,
                  "starts, num_kept and query_starts must fit the ", most_sequences_, " rows of the tables");
}

void SequenceStates::check(const Extent& extent) {
  STD_TORCH_CHECK(extent.sequences <= most_sequences_, "more sequences than tables");
  reads_first_.assign(extent.sequences, 0);
  const int64_t num_places = static_cast<int64_t>(places_.size());
  for (int64_t s = 0; s < extent.sequences; ++s) {
    STD_TORCH_CHECK(begin(s) >= 0 && begin(s) <= end(s) && end(s) <= extent.tokens, "sequence ", s, ": its tokens ",
                    begin(s), " to ", end(s), " are not among the ", extent.tokens, " of the step");
    STD_TORCH_CHECK(kept_[s] >= 0 && kept_end(s) <= end(s), "sequence ", s, ": num_kept is ", kept_[s]);
    for (int64_t b = first_chunk_ / num_places; b <= (first_chunk_ + num_chunks_ - 1) / num_places; ++b) {
      const int64_t block = tables_[s * table_stride_ + b];
      STD_TORCH_CHECK(block >= 0 && block < num_blocks_, "sequence ", s, ": block ", block, " is not in [0, ",
                      num_blocks_, ")");
    }
    if (starts_[s] == 0) continue;
    int64_t position;
    std::memcpy(&position, chunk(s, 0), sizeof(position));
    STD_TORCH_CHECK(position == starts_[s] || position == starts_[s] + 1,
                    "a recurrent state stands at another token than its sequence: this is a mistake of Quire's");
    reads_first_[s] = position != starts_[s];
  }
}

char* SequenceStates::chunk(int64_t s, int64_t number) const {
  const int64_t num_places = static_cast<int64_t>(places_.size());
  const int64_t all = first_chunk_ + number, place = all % num_places;
  return places_[place] + tables_[s * table_stride_ + all / num_places] * strides_[place];
}

template <class Work> void SequenceStates::each_piece(int64_t s, int64_t from, int64_t count, Work work) const {
  while (count > 0) {
    const int64_t offset = from % chunk_bytes_, bytes = min64(count, chunk_bytes_ - offset);
    work(chunk(s, from / chunk_bytes_) + offset, bytes);
    from += bytes, count -= bytes;
  }
}

void SequenceStates::read(int64_t s, int64_t first, int64_t rows, int64_t width, int64_t stride, float* to,
                          int64_t to_stride) const {
  const int64_t size = sizeof(float);
  for (int64_t r = 0; r < rows; ++r) {
    char* row = reinterpret_cast<char*>(to + r * to_stride);
    if (starts_[s] == 0) {
      std::memset(row, 0, width * size);
      continue;
    }
    each_piece(s, HEADER + (first + r * stride) * size, width * size, [&row](const char* memory, int64_t bytes) {
      std::memcpy(row, memory, bytes);
      row += bytes;
    });
  }
}

void SequenceStates::write(int64_t s, int64_t first, int64_t rows, int64_t width, int64_t stride, const float* from,
                           int64_t from_stride) const {
  const int64_t size = sizeof(float);
  for (int64_t r = 0; r < rows; ++r) {
    const char* row = reinterpret_cast<const char*>(from + r * from_stride);
    each_piece(s, HEADER + (first + r * stride) * size, width * size, [&row](char* memory, int64_t bytes) {
      std::memcpy(memory, row, bytes);
      row += bytes;
    });
  }
}

void SequenceStates::move_position(int64_t s) const {
  const int64_t position = starts_[s] + kept_[s];
  std::memcpy(chunk(s, 0), &position, sizeof(position));
}

}  // namespace quire
