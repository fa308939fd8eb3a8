// Bytes from one stage of a pipeline to the next, by memory that they share.
//
//   [aborted]  [arrival] x 64  [sent, taken] x 31        a cache line each
//   [16 slots of link 0][16 slots of link 1]...          link i leads from stage i to stage i + 1
//
// What is sent goes slot by slot. The sender waits where all slots are full, so it may be some steps ahead; the receiver
// waits where there is nothing. Both return with any content once the memory says that it is aborted.

#include <cstring>

#include "meeting.h"
#include "operators.h"

namespace quire {
namespace {

constexpr int64_t MOST_LINKS = 31, FIRST_LINK_LINE = 65, SLOTS = 16;
static_assert((FIRST_LINK_LINE + 2 * MOST_LINKS) * LINE <= MEETING_HEAD_BYTES);

class Link {
 public:
  Link(const Tensor& meeting, int64_t link, int64_t num_links) {
    STD_TORCH_CHECK(0 <= link && link < num_links && num_links <= MOST_LINKS, "link ", link, " of ", num_links,
                    ": must be one of up to ", MOST_LINKS);
    STD_TORCH_CHECK(meeting.is_cpu() && meeting.dim() == 1 && meeting.is_contiguous() &&
                        meeting.scalar_type() == ScalarType::Byte &&
                        meeting.size(0) >= MEETING_HEAD_BYTES + num_links * SLOTS * LINE,
                    "the meeting must be a vector of bytes that the stages share, with slots for each link");
    memory_ = static_cast<char*>(meeting.mutable_data_ptr());
    lines_ = reinterpret_cast<Arrival*>(memory_) + FIRST_LINK_LINE + 2 * link;
    slot_bytes_ = (meeting.size(0) - MEETING_HEAD_BYTES) / (num_links * SLOTS) / LINE * LINE;
    slots_ = memory_ + MEETING_HEAD_BYTES + link * SLOTS * slot_bytes_;
  }

  void send(const char* data, int64_t size) const {
    for (int64_t begin = 0; begin < size; begin += slot_bytes_) {
      const uint32_t count = sent().count.load(std::memory_order_relaxed);
      taken().wait_for(count + 1 - SLOTS, aborted());
      std::memcpy(slot(count), data + begin, min64(slot_bytes_, size - begin));
      sent().arrive(count + 1);
    }
  }

  void receive(char* data, int64_t size) const {
    for (int64_t begin = 0; begin < size; begin += slot_bytes_) {
      const uint32_t count = taken().count.load(std::memory_order_relaxed);
      sent().wait_for(count + 1, aborted());
      std::memcpy(data + begin, slot(count), min64(slot_bytes_, size - begin));
      taken().arrive(count + 1);
    }
  }

 private:
  Arrival& sent() const { return lines_[0]; }
  Arrival& taken() const { return lines_[1]; }
  const std::atomic<uint32_t>& aborted() const { return *reinterpret_cast<std::atomic<uint32_t>*>(memory_); }
  char* slot(uint32_t count) const { return slots_ + count % SLOTS * slot_bytes_; }

  char* memory_;
  Arrival* lines_;
  char* slots_;
  int64_t slot_bytes_;
};

void check_bytes(const Tensor& x, const char* name) {
  STD_TORCH_CHECK(x.is_cpu() && x.dim() == 1 && x.is_contiguous() && x.scalar_type() == ScalarType::Byte, name,
                  " must be a contiguous vector of bytes on the CPU");
}

void send_op(const Tensor& x, const Tensor& meeting, int64_t link, int64_t num_links) {
  check_bytes(x, "x");
  Link(meeting, link, num_links).send(static_cast<const char*>(x.const_data_ptr()), x.size(0));
}

void receive_op(const Tensor& out, const Tensor& meeting, int64_t link, int64_t num_links) {
  check_bytes(out, "out");
  Link(meeting, link, num_links).receive(static_cast<char*>(out.mutable_data_ptr()), out.size(0));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(quire, CPU, library) {
  if (kernels() == nullptr) return;  // a processor without AVX2 keeps the reference
  library.impl("send", TORCH_BOX(&send_op));
  library.impl("receive", TORCH_BOX(&receive_op));
}

}  // namespace quire
