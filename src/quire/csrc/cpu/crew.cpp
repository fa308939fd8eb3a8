// The crew's threads: started once, pinned if asked to, spinning a moment before they sleep.

#include "crew.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "oldest_libraries.h"
#include "spinning.h"

// libstdc++ asks glibc 2.32 here whether the process has one thread, and then counts references without locks. It never
// has, and this answer needs no newer glibc.
extern "C" __attribute__((visibility("hidden"))) char __libc_single_threaded;
char __libc_single_threaded = 0;

namespace quire {
namespace {

// A thread that waits spins about this long, then lets others run: a barrier is a microsecond away if all threads have
// a processor, and a whole time slice if one of them has lost its own.
constexpr int SPINS_BEFORE_YIELD = 4000;
// Between two steps of the model the scheduler and the sampler run, for some tenths of a millisecond.
constexpr int YIELDS_BEFORE_SLEEP = 200;

struct alignas(64) Counter {
  std::atomic<int64_t> value{0};
};

using Scratch = std::unique_ptr<char, decltype(&std::free)>;

int64_t whole_pages(int64_t bytes) { return (bytes + 4095) / 4096 * 4096; }

// Without it the job cannot go on, and one thread that left would leave the others at a barrier for ever: the process
// ends, and says why.
char* new_scratch(int64_t bytes) {
  auto* memory = static_cast<char*>(std::aligned_alloc(4096, bytes));
  if (memory == nullptr) {
    std::fprintf(stderr, "quire: no memory for %lld bytes of scratch\n", static_cast<long long>(bytes));
    std::abort();
  }
  return memory;
}

// For the same reason an exception does not leave a job.
void perform(Job job, const void* context, Crew& member) noexcept { job(context, member); }

template <class Condition> void wait_until(Condition is_met) {
  for (int spins = 0; !is_met(); ++spins) {
    if (spins < SPINS_BEFORE_YIELD) {
      rest_a_moment();
    } else {
      sched_yield();
    }
  }
}

// What the threads of one job share.
struct Shared {
  std::atomic<int> arrived{0};
  std::atomic<uint32_t> generation{0};
  int size = 1;
  std::unique_ptr<Counter[]> counters[2];
  Scratch scratch{nullptr, std::free};
  int64_t scratch_bytes = 0;
};

class Member final : public Crew {
 public:
  Member(int r, Shared& shared) : shared_(shared) {
    rank = r;
    size = shared.size;
  }

  void barrier() override {
    if (size == 1) return;
    const uint32_t generation = shared_.generation.load(std::memory_order_relaxed);
    if (shared_.arrived.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
      shared_.arrived.store(0, std::memory_order_relaxed);
      shared_.generation.store(generation + 1, std::memory_order_release);
      return;
    }
    wait_until([&] { return shared_.generation.load(std::memory_order_acquire) != generation; });
  }

  void* shared_scratch(int64_t bytes) override {
    barrier();  // nobody reads the old one any more
    if (rank == 0 && bytes > shared_.scratch_bytes) {
      shared_.scratch_bytes = whole_pages(bytes);
      shared_.scratch.reset(new_scratch(shared_.scratch_bytes));
    }
    barrier();
    return shared_.scratch.get();
  }

 protected:
  // Two sets of counters by turns: the ones of the next loop are put back before this loop's barrier.
  void next_loop() override {
    turn_ ^= 1;
    shared_.counters[turn_ ^ 1][rank].value.store(0, std::memory_order_relaxed);
  }
  std::atomic<int64_t>& taken(int whose) override { return shared_.counters[turn_][whose].value; }

 private:
  Shared& shared_;
  int turn_ = 0;
};

class Threads {
 public:
  explicit Threads(int size, std::vector<int> processors) : size_(size), processors_(std::move(processors)) {
    for (auto& counters : shared_.counters) counters = std::make_unique<Counter[]>(size);
    for (int rank = 1; rank < size; ++rank) {
      std::thread thread([this, rank] { serve(rank); });
      thread.detach();
    }
  }

  void run(int size, Job job, const void* context) {
    std::lock_guard<std::mutex> one_at_a_time(busy_);
    shared_.size = size < size_ ? size : size_;
    if (shared_.size > 1) {
      job_ = job, context_ = context;
      running_.store(shared_.size - 1, std::memory_order_relaxed);
      {
        std::lock_guard<std::mutex> lock(sleep_);
        const uint64_t number = (ticket_.load(std::memory_order_relaxed) >> SIZE_BITS) + 1;
        ticket_.store(number << SIZE_BITS | static_cast<uint64_t>(shared_.size), std::memory_order_release);
      }
      if (sleepers_.load(std::memory_order_acquire) > 0) wake_.notify_all();
    }
    for (auto& counters : shared_.counters) {
      if (shared_.size == 1) counters[0].value.store(0, std::memory_order_relaxed);
    }
    {
      Member member(0, shared_);
      perform(job, context, member);
    }
    if (shared_.size > 1) wait_until([&] { return running_.load(std::memory_order_acquire) == 0; });
    // For the next job; nobody looks at them now.
    for (auto& counters : shared_.counters) {
      for (int i = 0; i < size_; ++i) counters[i].value.store(0, std::memory_order_relaxed);
    }
  }

  int size() const { return size_; }

 private:
  void serve(int rank) {
    if (rank < static_cast<int>(processors_.size())) pin(processors_[rank]);
    for (uint64_t done = 0;;) {
      for (int spins = 0; ticket_.load(std::memory_order_acquire) == done; ++spins) {
        if (spins < SPINS_BEFORE_YIELD) {
          rest_a_moment();
        } else if (spins < SPINS_BEFORE_YIELD + YIELDS_BEFORE_SLEEP) {
          sched_yield();
        } else {
          sleep(done);
        }
      }
      done = ticket_.load(std::memory_order_acquire);
      // Of the ticket, not of `shared_`: a thread that is not needed may be so late that the next job is there.
      if (rank >= static_cast<int>(done & ((1 << SIZE_BITS) - 1))) continue;
      Member member(rank, shared_);
      perform(job_, context_, member);
      running_.fetch_sub(1, std::memory_order_release);
    }
  }

  void sleep(uint64_t done) {
    std::unique_lock<std::mutex> lock(sleep_);
    sleepers_.fetch_add(1, std::memory_order_acq_rel);
    wake_.wait(lock, [&] { return ticket_.load(std::memory_order_acquire) != done; });
    sleepers_.fetch_sub(1, std::memory_order_acq_rel);
  }

  static void pin(int processor) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(processor, &set);
    pthread_setaffinity_np(pthread_self(), sizeof(set), &set);  // refused by some containers: then it runs unpinned
  }

  // A ticket is the number of a job and, in its lowest bits, how many threads run it.
  static constexpr int SIZE_BITS = 16;

  const int size_;
  const std::vector<int> processors_;
  Shared shared_;
  std::mutex busy_, sleep_;
  std::condition_variable wake_;
  std::atomic<uint64_t> ticket_{0};
  std::atomic<int> running_{0}, sleepers_{0};
  Job job_ = nullptr;
  const void* context_ = nullptr;
};

// The process that the threads belong to: a child after fork() has none of them.
struct Current {
  Threads* threads = nullptr;
  pid_t owner = 0;
  int size = 1;
  std::vector<int> processors;
};

std::mutex& current_lock() {
  static std::mutex& lock = *new std::mutex;
  return lock;
}

Current& current() {
  static Current& current = *new Current;  // never destroyed: threads run until the process ends
  return current;
}

Threads& threads() {
  std::lock_guard<std::mutex> lock(current_lock());
  Current& now = current();
  if (now.threads == nullptr || now.owner != getpid() || now.threads->size() < now.size) {
    // Earlier threads are left asleep: they may be in the middle of a job of somebody else.
    now.threads = new Threads(now.size, now.processors);
    now.owner = getpid();
  }
  return *now.threads;
}

}  // namespace

void set_crew(int size, const int* processors) {
  std::lock_guard<std::mutex> lock(current_lock());
  Current& now = current();
  std::vector<int> wanted;
  if (processors != nullptr) wanted.assign(processors, processors + size);
  now.size = size < 1 ? 1 : size;
  if (wanted == now.processors) return;  // fewer threads than there are: the others go on sleeping
  now.processors = std::move(wanted);
  now.threads = nullptr;
}

int crew_size() {
  std::lock_guard<std::mutex> lock(current_lock());
  return current().size;
}

void run_crew(int size, Job job, const void* context) { threads().run(size, job, context); }

void* thread_scratch(int64_t bytes) {
  thread_local Scratch buffer(nullptr, std::free);
  thread_local int64_t capacity = 0;
  if (bytes > capacity) {
    capacity = whole_pages(bytes);
    buffer.reset(new_scratch(capacity));
  }
  return buffer.get();
}

}  // namespace quire

extern "C" __attribute__((visibility("default"))) void quire_set_crew(int size, const int* processors) {
  quire::set_crew(size, processors);
}
