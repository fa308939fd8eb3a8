// The threads that compute, one crew for the process: they wait for a job, run it together, and wait again.
//
// A job is written once and runs on every thread (`crew.rank` of `crew.size`); threads meet at barriers. So a whole
// forward pass can be one job, and between two operations lies a barrier of a microsecond instead of a start of threads.
#pragma once

#include <atomic>
#include <cstdint>

namespace quire {

class Crew {
 public:
  virtual ~Crew() = default;
  int rank = 0, size = 1;

  // Returns when every thread of the crew has called it.
  virtual void barrier() = 0;

  // Calls work(begin, end) for pieces of [0, count), each index once, on whichever thread is free: a thread begins with
  // its own share, so that it reads the same memory in every step, and then helps the others. Ends with a barrier.
  template <class Work> void for_each(int64_t count, int64_t grain, Work work) {
    next_loop();
    for (int v = 0; v < size; ++v) {
      const int whose = (rank + v) % size;
      const int64_t first = count * whose / size, length = count * (whose + 1) / size - first;
      for (int64_t i; (i = taken(whose).fetch_add(grain, std::memory_order_relaxed)) < length;) {
        work(first + i, first + (i + grain < length ? i + grain : length));
      }
    }
    barrier();
  }

  // Memory that all threads share until the end of the job. Every thread calls it, with the same number of bytes.
  virtual void* shared_scratch(int64_t bytes) = 0;

 protected:
  virtual void next_loop() = 0;
  virtual std::atomic<int64_t>& taken(int whose) = 0;
};

using Job = void (*)(const void* context, Crew& crew);

// How many threads the crew may have, this one included; on a processor for each if `processors` is not null.
void set_crew(int size, const int* processors);
int crew_size();

// Runs the job on `size` threads at most, this one included, and returns when all have ended. One job at a time: a
// second caller waits.
void run_crew(int size, Job job, const void* context);

template <class Work> void run_crew(int size, const Work& work) {
  run_crew(size, [](const void* context, Crew& crew) { (*static_cast<const Work*>(context))(crew); }, &work);
}

// Scratch of the calling thread, kept for the next call: allocating anew would cost more than small calls themselves.
void* thread_scratch(int64_t bytes);

}  // namespace quire
