#include "arena.h"

#include <sys/mman.h>

#include <new>

namespace quire {
namespace {

constexpr int64_t HUGE_PAGE = int64_t{1} << 21, PAGE = 4096;

int64_t padded(int64_t bytes) {
  const int64_t unit = bytes >= HUGE_PAGE ? HUGE_PAGE : PAGE;
  return bytes < unit ? unit : (bytes + unit - 1) / unit * unit;
}

}  // namespace

Arena::~Arena() {
  for (const Block& block : blocks_) munmap(block.data, block.bytes);
}

void* Arena::take(int64_t bytes_taken) {
  const int64_t bytes = padded(bytes_taken);
  Block* best = nullptr;
  for (Block& block : blocks_) {
    if (block.state == State::free && block.bytes >= bytes && (best == nullptr || block.bytes < best->bytes)) {
      best = &block;
    }
  }
  if (best == nullptr) {
    // Pages come when they are written to: a program for 8,192 tokens that only ever sees one needs little.
    void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED) throw std::bad_alloc();
    if (bytes >= HUGE_PAGE) madvise(data, bytes, MADV_HUGEPAGE);
    blocks_.push_back({data, bytes, bytes_taken, State::taken});
    best = &blocks_.back();
  }
  best->state = State::taken, best->bytes_taken = bytes_taken;
  return best->data;
}

void Arena::give_back(void* data) {
  for (Block& block : blocks_) {
    if (block.data == data) block.state = State::given_back;
  }
}

void Arena::begin_stage() {
  for (Block& block : blocks_) {
    if (block.state == State::given_back) block.state = State::free;
  }
}

std::vector<TokenRows> Arena::taken(int64_t num_tokens) const {
  std::vector<TokenRows> rows;
  for (const Block& block : blocks_) {
    if (block.state == State::taken) rows.push_back({static_cast<char*>(block.data), block.bytes_taken / num_tokens});
  }
  return rows;
}

}  // namespace quire
