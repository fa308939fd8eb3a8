// Counts in memory that processes share: one says how far it is, others wait until it is as far as they need.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

#include "spinning.h"

namespace quire {

// A process that waits spins about this long: the others are rarely more than some microseconds behind. Then it sleeps,
// and looks now and then whether the others are still there.
constexpr int SPINS_BEFORE_SLEEP = 3000;
constexpr long LONGEST_SLEEP = 50'000'000;  // ns
constexpr int64_t LINE = 64, MEETING_HEAD_BYTES = 8192;

// A cache line.
struct alignas(LINE) Arrival {
  std::atomic<uint32_t> count, sleepers;

  void arrive(uint32_t at) {
    count.store(at);
    if (sleepers.load() > 0) futex(FUTEX_WAKE, INT32_MAX, nullptr);
  }

  // Until it is there, or `aborted` says that it never will be.
  void wait_for(uint32_t at, const std::atomic<uint32_t>& aborted) {
    const auto is_there = [&](uint32_t seen) { return static_cast<int32_t>(seen - at) >= 0; };
    for (int spins = 0; spins < SPINS_BEFORE_SLEEP; ++spins) {
      if (is_there(count.load(std::memory_order_acquire))) return;
      rest_a_moment();
    }
    sleepers.fetch_add(1);
    for (uint32_t seen; !is_there(seen = count.load()) && aborted.load(std::memory_order_relaxed) == 0;) {
      const timespec longest{0, LONGEST_SLEEP};
      futex(FUTEX_WAIT, seen, &longest);
    }
    sleepers.fetch_sub(1);
  }

 private:
  void futex(int operation, uint32_t value, const timespec* longest) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&count), operation, value, longest, nullptr, 0);
  }
};
static_assert(sizeof(Arrival) == LINE);

}  // namespace quire
