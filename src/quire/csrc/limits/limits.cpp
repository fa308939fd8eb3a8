// The limits of this machine, as one line of JSON: bytes a second that are read in order from huge pages, and operations
// a second in float32, bfloat16 and int8 at the rate at which instructions are issued, on a matrix unit if there is one. A
// program of its own, compiled for this processor where it runs.
//
//     limits THREADS
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

using Clock = std::chrono::steady_clock;
constexpr std::size_t HUGE_PAGE = std::size_t{2} << 20;
constexpr std::size_t BYTES = std::size_t{512} << 20;  // in all: more than caches hold
constexpr int PASSES = 40;
constexpr int CHAINS = 12;  // independent ones hide the latency of an operation, and fit into 16 registers

// All threads begin together; what is counted is from the first start to the last end.
double seconds_of(int threads, const std::function<void(int)>& work) {
  std::atomic<int> waiting{threads};
  std::vector<Clock::time_point> begins(threads), ends(threads);
  std::vector<std::thread> crew;
  for (int rank = 0; rank < threads; ++rank) {
    crew.emplace_back([&, rank] {
      --waiting;
      while (waiting.load() > 0) std::this_thread::yield();
      begins[rank] = Clock::now();
      work(rank);
      ends[rank] = Clock::now();
    });
  }
  for (auto& thread : crew) thread.join();
  auto begin = begins[0];
  auto end = ends[0];
  for (int rank = 1; rank < threads; ++rank) {
    if (begins[rank] < begin) begin = begins[rank];
    if (ends[rank] > end) end = ends[rank];
  }
  return std::chrono::duration<double>(end - begin).count();
}

std::atomic<std::uint64_t> sink{0};

#if defined(__AVX512F__)
using Word = __m512i;
Word load(const char* at) { return _mm512_load_si512(at); }
Word both(Word a, Word b) { return _mm512_or_si512(a, b); }
std::uint64_t lowest(Word word) { return static_cast<std::uint64_t>(_mm_cvtsi128_si64(_mm512_castsi512_si128(word))); }
#elif defined(__AVX2__)
using Word = __m256i;
Word load(const char* at) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(at)); }
Word both(Word a, Word b) { return _mm256_or_si256(a, b); }
std::uint64_t lowest(Word word) { return static_cast<std::uint64_t>(_mm_cvtsi128_si64(_mm256_castsi256_si128(word))); }
#else
using Word = std::uint64_t;
Word load(const char* at) {
  Word word;
  std::memcpy(&word, at, sizeof word);
  return word;
}
Word both(Word a, Word b) { return a | b; }
std::uint64_t lowest(Word word) { return word; }
#endif

double bandwidth(int threads) {
  const std::size_t share = (BYTES / threads + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
  std::vector<char*> parts(threads);
  for (auto& part : parts) {
    part = static_cast<char*>(std::aligned_alloc(HUGE_PAGE, share));
    if (part == nullptr) return 0;
    madvise(part, share, MADV_HUGEPAGE);
  }
  // written by the thread that will read them: memory is given where it is first touched
  seconds_of(threads, [&](int rank) { std::memset(parts[rank], rank + 1, share); });
  double best = 1e9;
  for (int pass = 0; pass < PASSES; ++pass) {
    const double seconds = seconds_of(threads, [&](int rank) {
      Word sums[8] = {};
      const char* part = parts[rank];
      for (std::size_t at = 0; at < share; at += 8 * sizeof(Word))
        for (int lane = 0; lane < 8; ++lane) sums[lane] = both(sums[lane], load(part + at + lane * sizeof(Word)));
      for (auto& sum : sums) sink += lowest(sum);
    });
    if (seconds < best) best = seconds;
  }
  for (auto* part : parts) std::free(part);
  return static_cast<double>(share) * threads / best;
}

// In a register from here on: the operation before is neither left out nor moved.
template <class Value>
inline void hold(Value& value) {
  asm volatile("" : "+x"(value));
}

// Operations a second of CHAINS independent chains; `step` does one operation on one of them. They are variables and not
// an array, which the compiler would keep in memory.
template <class Value, class Step>
double rate(int threads, double operations, Value start, Step step) {
  constexpr int ROUNDS = 1 << 18;  // a millisecond or two: on a busy machine some of them are left alone
  constexpr int PASSES_OF_RATE = 60;
  double best = 1e9;
  for (int pass = 0; pass < PASSES_OF_RATE; ++pass) {
    const double seconds = seconds_of(threads, [&](int) {
      Value a = start, b = a, c = a, d = a, e = a, f = a, g = a, h = a, i = a, j = a, k = a, l = a;
      for (int round = 0; round < ROUNDS; ++round) {
        a = step(a), hold(a), b = step(b), hold(b), c = step(c), hold(c), d = step(d), hold(d);
        e = step(e), hold(e), f = step(f), hold(f), g = step(g), hold(g), h = step(h), hold(h);
        i = step(i), hold(i), j = step(j), hold(j), k = step(k), hold(k), l = step(l), hold(l);
      }
    });
    if (seconds < best) best = seconds;
  }
  return operations * CHAINS * ROUNDS * threads / best;
}

#if defined(__AVX512F__)
double float32_rate(int threads) {
  const __m512 one = _mm512_set1_ps(0.5f);
  return rate(threads, 32, one, [=](__m512 sum) { return _mm512_fmadd_ps(one, one, sum); });
}
#elif defined(__AVX2__) && defined(__FMA__)
double float32_rate(int threads) {
  const __m256 one = _mm256_set1_ps(0.5f);
  return rate(threads, 16, one, [=](__m256 sum) { return _mm256_fmadd_ps(one, one, sum); });
}
#else
double float32_rate(int) { return 0; }
#endif

double bfloat16_rate(int threads) {
#if defined(__AVX512BF16__)
  const __m512bh one = (__m512bh)_mm512_set1_epi16(0x3f00);
  return rate(threads, 64, _mm512_setzero_ps(), [=](__m512 sum) { return _mm512_dpbf16_ps(sum, one, one); });
#else
  return float32_rate(threads);  // widened first
#endif
}

double int8_rate(int threads) {
#if defined(__AVX512VNNI__)
  const __m512i one = _mm512_set1_epi8(1);
  return rate(threads, 128, _mm512_setzero_si512(), [=](__m512i sum) { return _mm512_dpbusd_epi32(sum, one, one); });
#elif defined(__AVX2__)
  const __m256i one = _mm256_set1_epi8(1);
  return rate(threads, 64, _mm256_setzero_si256(), [=](__m256i sum) { return _mm256_maddubs_epi16(sum, one); });
#else
  (void)threads;
  return 0;
#endif
}

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
// Operations a second of the matrix unit: 16 x 16 sums in four tiles, which hide the latency, of `of_one` operations each.
template <class Step>
double rate_of_unit(int threads, double of_one, Step step) {
  // numbers of <asm/prctl.h>, which older systems lack; the system saves more for a thread that uses the unit
  constexpr long ASK_FOR_PERMISSION = 0x1023, TILE_DATA = 18;
  if (syscall(SYS_arch_prctl, ASK_FOR_PERMISSION, TILE_DATA) != 0) return 0;
  struct alignas(64) {
    std::uint8_t palette = 1, rest[15] = {};
    std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } shapes;
  constexpr int ROUNDS = 1 << 14, PASSES_OF_RATE = 60;
  double best = 1e9;
  for (int pass = 0; pass < PASSES_OF_RATE; ++pass) {
    const double seconds = seconds_of(threads, [&](int) {
      asm volatile("ldtilecfg %0" ::"m"(shapes));
      for (int round = 0; round < ROUNDS; ++round) step();
      asm volatile("tilerelease");
    });
    if (seconds < best) best = seconds;
  }
  return of_one * 256 * 4 * ROUNDS * threads / best;
}
double bfloat16_rate_of_unit(int threads) {
  return rate_of_unit(threads, 64, [] {
    asm volatile("tdpbf16ps %tmm7, %tmm6, %tmm0\n\ttdpbf16ps %tmm7, %tmm5, %tmm1\n\t"
                 "tdpbf16ps %tmm4, %tmm6, %tmm2\n\ttdpbf16ps %tmm4, %tmm5, %tmm3");
  });
}
double int8_rate_of_unit(int threads) {
  return rate_of_unit(threads, 128, [] {
    asm volatile("tdpbsud %tmm7, %tmm6, %tmm0\n\ttdpbsud %tmm7, %tmm5, %tmm1\n\t"
                 "tdpbsud %tmm4, %tmm6, %tmm2\n\ttdpbsud %tmm4, %tmm5, %tmm3");
  });
}
#else
double bfloat16_rate_of_unit(int) { return 0; }
double int8_rate_of_unit(int) { return 0; }
#endif

}  // namespace

int main(int count, char** arguments) {
  const int threads = count > 1 ? std::atoi(arguments[1]) : 1;
  if (threads < 1 || threads > 4096) return 2;
  std::printf("{\"bandwidth\": %.0f, \"float32\": %.0f, \"bfloat16\": %.0f, \"int8\": %.0f}\n", bandwidth(threads),
              float32_rate(threads), std::max(bfloat16_rate(threads), bfloat16_rate_of_unit(threads)),
              std::max(int8_rate(threads), int8_rate_of_unit(threads)));
}
