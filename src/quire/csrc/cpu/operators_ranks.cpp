// Sums over the ranks of a machine, and what they bring side by side, by memory that they share.
//
//   [aborted]  [arrived, sleepers] x 64        a cache line each
//   [rank 0][rank 1]...  [rank 0][rank 1]...   places for what each rank brings, twice
//
// A rank writes what it brings to its place, says that it has arrived, and waits until all have. A place is written again
// two turns later: whoever does so has seen that all ranks arrived at the turn between, so nobody reads it any more. Every
// rank adds the same numbers in the same order.
//
// Ranks on several machines have such memory each for itself. There a relay (worker/crossing.py) fills the places of the
// others when this rank has filled its own.

#include <algorithm>
#include <cstring>
#include <mutex>
#include <unordered_map>

#include "meeting.h"
#include "operators.h"

namespace quire {
namespace {

constexpr int64_t MOST_RANKS = 64, HEAD_BYTES = MEETING_HEAD_BYTES;

// Fetches `bytes` of each other rank into the places of a turn; returns with any content once the memory is aborted.
using Relay = void (*)(int64_t turn, int64_t bytes);
std::mutex relays_lock;
std::unordered_map<const char*, Relay> relays;

Relay relay_of(const char* memory) {
  const std::lock_guard<std::mutex> guard(relays_lock);
  const auto found = relays.find(memory);
  return found == relays.end() ? nullptr : found->second;
}

class Meeting {
 public:
  Meeting(char* memory, int64_t bytes, int rank, int size)
      : memory_(memory), rank_(rank), size_(size), capacity_((bytes - HEAD_BYTES) / (2 * size) / LINE * LINE),
        relay_(relay_of(memory)) {}

  int size() const { return size_; }
  int64_t capacity() const { return capacity_; }
  uint32_t own_count() const { return arrival(rank_).count.load(std::memory_order_relaxed); }
  int rank() const { return rank_; }
  float* own_place(uint32_t count) const { return place(count, rank_); }
  float* place(uint32_t count, int rank) const { return reinterpret_cast<float*>(bytes(count, rank)); }
  char* bytes(uint32_t count, int rank) const {
    return memory_ + HEAD_BYTES + ((count & 1) * size_ + rank) * capacity_;
  }

  // The own place of this turn has so many bytes in it.
  void arrive(uint32_t turn, int64_t bytes) const {
    if (relay_ == nullptr) return arrival(rank_).arrive(turn + 1);
    relay_(turn & 1, bytes);
    for (int rank = 0; rank < size_; ++rank) arrival(rank).arrive(turn + 1);
  }

  // Until all have arrived, or nobody will.
  void wait_for_all(uint32_t count) const {
    const auto& aborted = *reinterpret_cast<std::atomic<uint32_t>*>(memory_);
    for (int rank = 0; rank < size_; ++rank) {
      if (rank != rank_) arrival(rank).wait_for(count, aborted);
    }
  }

 private:
  Arrival& arrival(int rank) const { return *reinterpret_cast<Arrival*>(memory_ + (1 + rank) * LINE); }

  char* memory_;
  int rank_, size_;
  int64_t capacity_;
  Relay relay_;
};

// Elements whose sums are formed at once: a level of the tree each stays in the first-level cache.
constexpr int64_t TOGETHER = 256;
constexpr int LEVELS = 7;  // of the tree over MOST_RANKS

template <class T> void widen(const void* from, int64_t first, int64_t n, float* to) {
  const T* values = static_cast<const T*>(from) + first;
  for (int64_t i = 0; i < n; ++i) to[i] = static_cast<float>(values[i]);
}
template <class T> void narrow(const float* from, int64_t n, void* to, int64_t first) {
  T* values = static_cast<T*>(to) + first;
  for (int64_t i = 0; i < n; ++i) values[i] = static_cast<T>(from[i]);
}
void widen(DType dtype, const void* from, int64_t first, int64_t n, float* to) {
  switch (dtype) {
    case DType::float32: return widen<float>(from, first, n, to);
    case DType::bfloat16: return widen<torch::headeronly::BFloat16>(from, first, n, to);
    case DType::float16: return widen<torch::headeronly::Half>(from, first, n, to);
  }
}
void narrow(DType dtype, const float* from, int64_t n, void* to, int64_t first) {
  switch (dtype) {
    case DType::float32: return narrow<float>(from, n, to, first);
    case DType::bfloat16: return narrow<torch::headeronly::BFloat16>(from, n, to, first);
    case DType::float16: return narrow<torch::headeronly::Half>(from, n, to, first);
  }
}
void add(const float* __restrict one, const float* __restrict other, int64_t n, float* __restrict to) {
  for (int64_t i = 0; i < n; ++i) to[i] = one[i] + other[i];
}
void add_onto(const float* __restrict from, int64_t n, float* __restrict to) {
  for (int64_t i = 0; i < n; ++i) to[i] += from[i];
}

class AllReduceStep final : public Step {
 public:
  AllReduceStep(const Meeting& meeting, const Tensor& x, const std::optional<Tensor>& bias, const Tensor& out,
                int64_t elements_of_a_token)
      : meeting_(meeting), x_(x.const_data_ptr()), out_(out.mutable_data_ptr()), x_dtype_(dtype_of(x)),
        out_dtype_(dtype_of(out)), elements_of_a_token_(elements_of_a_token) {
    if (!bias.has_value()) return;
    bias_.resize(bias->size(0));
    widen(dtype_of(*bias), bias->const_data_ptr(), 0, bias->size(0), bias_.data());
  }

  int64_t work(const Extent& extent) const override { return extent.tokens * elements_of_a_token_; }

  void run(const Extent& extent, Crew& crew) const override {
    const int64_t count = extent.tokens * elements_of_a_token_, most = meeting_.capacity() / 4;
    uint32_t meeting = meeting_.own_count();
    for (int64_t begin = 0; begin < count; begin += most, ++meeting) {
      const int64_t n = min64(most, count - begin);
      const int64_t first = n * crew.rank / crew.size, last = n * (crew.rank + 1) / crew.size;
      widen(x_dtype_, x_, begin + first, last - first, meeting_.own_place(meeting) + first);
      crew.barrier();
      if (crew.rank == 0) meeting_.arrive(meeting, n * 4);
      meeting_.wait_for_all(meeting + 1);
      for (int64_t i = first; i < last; i += TOGETHER) sum_up(meeting, i, min64(TOGETHER, last - i), begin + i);
    }
    crew.barrier();
  }

 private:
  // Of ranks 0 and 1, of 2 and 3, then of these two sums, and so on: the same tree, whatever part of it a rank has
  // summed up before. Elements [first, first + n) of the places, which are those from `element` on of the result. What
  // others have written is read once.
  void sum_up(uint32_t meeting, int64_t first, int64_t n, int64_t element) const {
    float room[LEVELS][TOGETHER];
    float* sums[LEVELS];
    for (int level = 0; level < LEVELS; ++level) sums[level] = room[level];
    const bool is_in_place = out_dtype_ == DType::float32;
    if (is_in_place) sums[0] = static_cast<float*>(out_) + element;
    int depth = 0;
    for (int rank = 0; rank < meeting_.size(); rank += 2) {
      const float* one = meeting_.place(meeting, rank) + first;
      if (rank + 1 == meeting_.size()) {
        std::memcpy(sums[depth++], one, n * sizeof(float));
        break;
      }
      add(one, meeting_.place(meeting, rank + 1) + first, n, sums[depth++]);
      for (int pairs = rank / 2; pairs & 1; pairs >>= 1) --depth, add_onto(sums[depth], n, sums[depth - 1]);
    }
    for (; depth > 1; --depth) add_onto(sums[depth - 1], n, sums[depth - 2]);
    const int64_t width = static_cast<int64_t>(bias_.size());
    for (int64_t i = 0, length; width > 0 && i < n; i += length) {
      const int64_t column = (element + i) % width;
      length = min64(width - column, n - i);
      add_onto(bias_.data() + column, length, sums[0] + i);
    }
    if (!is_in_place) narrow(out_dtype_, sums[0], n, out_, element);
  }

  Meeting meeting_;
  const void* x_;
  void* out_;
  DType x_dtype_, out_dtype_;
  int64_t elements_of_a_token_;
  std::vector<float> bias_;
};

// Columns of all ranks side by side: rank r brings those from total * r / size to total * (r + 1) / size. What has no room
// in a place goes in pieces of some rows, or of some columns of one row.
class AllGatherStep final : public Step {
 public:
  AllGatherStep(const Meeting& meeting, const Tensor& x, const Tensor& out, int64_t total)
      : meeting_(meeting), x_(static_cast<const char*>(x.const_data_ptr())),
        out_(static_cast<char*>(out.mutable_data_ptr())), row_bytes_(total * static_cast<int64_t>(out.element_size())) {
    for (int64_t rank = 0; rank <= meeting.size(); ++rank) {
      begins_.push_back(total * rank / meeting.size() * static_cast<int64_t>(out.element_size()));
      if (rank > 0) widest_ = std::max(widest_, begins_[rank] - begins_[rank - 1]);
    }
  }

  int64_t work(const Extent& extent) const override { return extent.tokens * row_bytes_; }

  void run(const Extent& extent, Crew& crew) const override {
    if (widest_ == 0) return;
    const int64_t columns = min64(widest_, meeting_.capacity()), rows = meeting_.capacity() / columns;
    uint32_t turn = meeting_.own_count();
    for (int64_t row = 0; row < extent.tokens; row += rows) {
      const int64_t last = min64(row + rows, extent.tokens);
      for (int64_t column = 0; column < widest_; column += columns, ++turn) {
        const Piece piece{row, last, column, column + columns, columns};
        const int own = meeting_.rank();
        each_row(piece, own, crew, [&](int64_t t, int64_t from, int64_t n) {
          std::memcpy(meeting_.bytes(turn, own) + (t - row) * columns + from - column, x_ + t * width(own) + from, n);
        });
        crew.barrier();
        if (crew.rank == 0) meeting_.arrive(turn, (last - row) * columns);
        meeting_.wait_for_all(turn + 1);
        for (int rank = 0; rank < meeting_.size(); ++rank) {
          each_row(piece, rank, crew, [&](int64_t t, int64_t from, int64_t n) {
            std::memcpy(out_ + t * row_bytes_ + begins_[rank] + from,
                        meeting_.bytes(turn, rank) + (t - row) * columns + from - column, n);
          });
        }
      }
    }
    crew.barrier();
  }

 private:
  // Rows [row, last) of bytes [column, end) of each rank's columns.
  struct Piece {
    int64_t row, last, column, end, columns;
  };

  int64_t width(int rank) const { return begins_[rank + 1] - begins_[rank]; }

  // f(row, first byte of the rank's columns, number of bytes), for the columns of the piece that this member copies.
  template <class F> void each_row(const Piece& piece, int rank, const Crew& crew, F f) const {
    const int64_t n = min64(piece.end, width(rank)) - piece.column;
    if (n <= 0) return;
    const auto cut = [&](int64_t member) { return member == crew.size ? n : n * member / crew.size / LINE * LINE; };
    const int64_t first = cut(crew.rank), last = cut(crew.rank + 1);
    if (first == last) return;
    for (int64_t t = piece.row; t < piece.last; ++t) f(t, piece.column + first, last - first);
  }

  Meeting meeting_;
  const char* x_;
  char* out_;
  int64_t row_bytes_, widest_ = 0;
  std::vector<int64_t> begins_;
};

Meeting meeting_of(const Tensor& memory, int64_t rank, int64_t size) {
  STD_TORCH_CHECK(0 <= rank && rank < size && size <= MOST_RANKS, "rank ", rank, " of ", size, ": must be one of up to ",
                  MOST_RANKS);
  STD_TORCH_CHECK(memory.is_cpu() && memory.dim() == 1 && memory.is_contiguous() &&
                      memory.scalar_type() == ScalarType::Byte && memory.size(0) >= HEAD_BYTES + 2 * size * LINE,
                  "the meeting must be a vector of bytes that all ranks share, with a place for each");
  return Meeting(static_cast<char*>(memory.mutable_data_ptr()), memory.size(0), static_cast<int>(rank),
                 static_cast<int>(size));
}

Tensor all_reduce_op(const Tensor& x, std::optional<Tensor> bias, const Tensor& meeting, int64_t rank, int64_t size,
                     ScalarType dtype) {
  STD_TORCH_CHECK(x.is_cpu() && x.dim() >= 1 && x.is_contiguous(), "x must be contiguous on the CPU");
  const Meeting place = meeting_of(meeting, rank, size);
  STD_TORCH_CHECK(!bias.has_value() || (bias->is_cpu() && bias->dim() == 1 && bias->is_contiguous() &&
                                        bias->size(0) == x.size(x.dim() - 1)),
                  "bias must be a contiguous vector on the CPU, a value for each column of x");
  Tensor out = empty(sizes_of(x), dtype);
  const int64_t tokens = x.dim() == 1 ? 1 : x.size(0);
  const int64_t elements = x.numel();
  if (elements == 0 && !is_recording()) return out;
  perform(std::make_unique<AllReduceStep>(place, x, bias, out, tokens > 0 ? elements / tokens : 0), {tokens, 0});
  return out;
}

Tensor all_gather_op(const Tensor& x, const Tensor& meeting, int64_t rank, int64_t size, int64_t total) {
  STD_TORCH_CHECK(x.is_cpu() && x.dim() == 2 && x.is_contiguous(), "x must be contiguous rows on the CPU");
  const Meeting place = meeting_of(meeting, rank, size);
  STD_TORCH_CHECK(x.size(1) == total * (rank + 1) / size - total * rank / size, "rank ", rank, " of ", size, " brings ",
                  x.size(1), " columns of ", total);
  Tensor out = empty({x.size(0), total}, x);
  perform(std::make_unique<AllGatherStep>(place, x, out, total), {x.size(0), 0});
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(quire, CPU, library) {
  if (kernels() == nullptr) return;  // a processor without AVX2 keeps the reference
  library.impl("all_reduce", TORCH_BOX(&all_reduce_op));
  library.impl("all_gather", TORCH_BOX(&all_gather_op));
}

}  // namespace quire

// Called through ctypes by worker/kernels/ranks.py, before the memory is used; null when nobody may be called any more.
extern "C" __attribute__((visibility("default"))) void quire_set_relay(const char* memory, quire::Relay relay) {
  const std::lock_guard<std::mutex> guard(quire::relays_lock);
  quire::relays.erase(memory);
  if (relay != nullptr) quire::relays.emplace(memory, relay);
}
