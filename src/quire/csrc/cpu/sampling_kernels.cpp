// What sampling does with whole vectors of logits.

#include "sampling_kernels.h"

#include "simd.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int LANES16 = 16;        // sums have so many lanes with every instruction set
constexpr int PARTS = LANES16 / W;

// bfloat16 as they come, as signed integers of 16 bits: 2 * W of them.
#if defined(__AVX512F__)

QUIRE_INLINE vi load_shorts(const bf16* p) { return _mm512_loadu_si512(p); }
QUIRE_INLINE vi all_shorts(int16_t x) { return _mm512_set1_epi16(x); }
QUIRE_INLINE vi max_shorts(vi a, vi b) { return _mm512_max_epi16(a, b); }
QUIRE_INLINE vi without_sign(vi a) { return _mm512_and_si512(a, _mm512_set1_epi16(0x7fff)); }
QUIRE_INLINE vi in_order(vi a) {  // a ^ (a >> 15 & 0x7fff)
  return _mm512_ternarylogic_epi32(a, _mm512_srai_epi16(a, 15), _mm512_set1_epi16(0x7fff), 0x78);
}
QUIRE_INLINE __m128i fold_shorts(vi a) {
  const __m256i half = _mm256_max_epi16(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1));
  return _mm_max_epi16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

#elif defined(__AVX2__)

QUIRE_INLINE vi load_shorts(const bf16* p) { return _mm256_loadu_si256(reinterpret_cast<const vi*>(p)); }
QUIRE_INLINE vi all_shorts(int16_t x) { return _mm256_set1_epi16(x); }
QUIRE_INLINE vi max_shorts(vi a, vi b) { return _mm256_max_epi16(a, b); }
QUIRE_INLINE vi without_sign(vi a) { return _mm256_and_si256(a, _mm256_set1_epi16(0x7fff)); }
QUIRE_INLINE vi in_order(vi a) {
  return _mm256_xor_si256(a, _mm256_and_si256(_mm256_srai_epi16(a, 15), _mm256_set1_epi16(0x7fff)));
}
QUIRE_INLINE __m128i fold_shorts(vi a) {
  return _mm_max_epi16(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
}

#else

QUIRE_INLINE int16x8_t shorts(uint32x4_t a) { return vreinterpretq_s16_u32(a); }
QUIRE_INLINE vi of_shorts(int16x8_t low, int16x8_t high) {
  return {vreinterpretq_u32_s16(low), vreinterpretq_u32_s16(high)};
}
QUIRE_INLINE vi load_shorts(const bf16* p) { return load_integers(p); }
QUIRE_INLINE vi all_shorts(int16_t x) { return of_shorts(vdupq_n_s16(x), vdupq_n_s16(x)); }
QUIRE_INLINE vi max_shorts(vi a, vi b) {
  return of_shorts(vmaxq_s16(shorts(a.low), shorts(b.low)), vmaxq_s16(shorts(a.high), shorts(b.high)));
}
QUIRE_INLINE vi without_sign(vi a) { return a & all_shorts(0x7fff); }
QUIRE_INLINE vi in_order(vi a) {
  const auto ordered = [](int16x8_t x) { return x ^ ((x >> 15) & vdupq_n_s16(0x7fff)); };
  return of_shorts(ordered(shorts(a.low)), ordered(shorts(a.high)));
}
QUIRE_INLINE int16_t greatest_short(vi a) { return vmaxvq_s16(vmaxq_s16(shorts(a.low), shorts(a.high))); }

#endif

#if defined(__x86_64__)
QUIRE_INLINE int16_t greatest_short(vi a) {
  // The instruction finds the least of unsigned numbers: turn the order round.
  const __m128i turned = _mm_xor_si128(fold_shorts(a), _mm_set1_epi16(0x7fff));
  return static_cast<int16_t>(_mm_extract_epi16(_mm_minpos_epu16(turned), 0) ^ 0x7fff);
}
#endif

constexpr int SHORTS = 2 * W;
constexpr uint16_t MINUS_INFINITY = 0xff80, PLUS_INFINITY = 0x7f80;

QUIRE_INLINE float infinity() { return __builtin_inff(); }

// The first n logits; the other lanes are -inf.
template <class T> QUIRE_INLINE vf load_logits(const T* p, int64_t n) {
  if (n >= W) return load(p);
  return keep_lanes(load_part(p, static_cast<int>(n)), 0, static_cast<int>(n), set1(-infinity()));
}

template <class T> QUIRE_INLINE float greatest_of(const T* x, int64_t n) {
  vf best[2] = {set1(-infinity()), set1(-infinity())};
  vmask bad = 0;
  int64_t i = 0;
  for (; i + 2 * W <= n; i += 2 * W) {
#pragma GCC unroll 2
    for (int k = 0; k < 2; ++k) {
      const vf v = load(x + i + k * W);
      best[k] = max(best[k], v);
      bad |= is_nan(v);
    }
  }
  for (; i < n; i += W) {
    const vf v = load_logits(x + i, n - i);
    best[0] = max(best[0], v);
    bad |= is_nan(v);
  }
  return bad != 0 ? __builtin_nanf("") : hmax(max(best[0], best[1]));
}

// As whole numbers, twice as many at a time: bfloat16 have the order of their bits, negative ones the reverse.
QUIRE_INLINE float greatest_of(const bf16* x, int64_t n) {
  vi best = all_shorts(INT16_MIN), largest = all_shorts(0);
  int64_t i = 0;
  for (; i + SHORTS <= n; i += SHORTS) {
    const vi v = load_shorts(x + i);
    best = max_shorts(best, in_order(v));
    largest = max_shorts(largest, without_sign(v));
  }
  if (i < n) {
    bf16 rest[SHORTS];
    for (int k = 0; k < SHORTS; ++k) rest[k].bits = i + k < n ? x[i + k].bits : MINUS_INFINITY;
    const vi v = load_shorts(rest);
    best = max_shorts(best, in_order(v));
    largest = max_shorts(largest, without_sign(v));
  }
  if (greatest_short(largest) > PLUS_INFINITY) return __builtin_nanf("");
  const int16_t key = greatest_short(best);
  const uint32_t bits = static_cast<uint32_t>(static_cast<uint16_t>(key ^ ((key >> 15) & 0x7fff))) << 16;
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

template <class T> void maxima_of(const LogitRow& row, int64_t begin, int64_t end, float* maxima) {
  const T* logits = static_cast<const T*>(row.logits);
  const int64_t chunk = row.chunk;
  for (int64_t c = begin; c < end; ++c) {
    maxima[c - begin] = greatest_of(logits + c * chunk, min64(chunk, row.size - c * chunk));
  }
}

// What weighing takes: 2 to the power of (logit - greatest) * scale, and 0 below `least`.
struct Scale {
  vf greatest, scale;
  float least;
};

QUIRE_INLINE Scale scale_of(const Weighing& how) {
  // Powers below the smallest normal number count as 0, those of -inf among them.
  constexpr float SMALLEST = 2.3509887e-38f;
  return {set1(how.greatest), set1(1.44269504f / how.temperature), how.min_p > SMALLEST ? how.min_p : SMALLEST};
}

QUIRE_INLINE vf weights_of(vf logits, const Scale& as) {
  const vf power = max(set1(-126.0f), (logits - as.greatest) * as.scale);
  const vf whole = round(power), r = power - whole;
  // 2^r on [-1/2, 1/2], minimax of degree 5, exactly 1 at 0: the best token has the weight 1. Relative error 1.6e-7.
  vf p = set1(0.0013264727f);
  p = fma(p, r, set1(0.009671513f));
  p = fma(p, r, set1(0.055507336f));
  p = fma(p, r, set1(0.24022242f));
  p = fma(p, r, set1(0.693147f));
  p = fma(p, r, set1(1.0f));
  const vf weights = scale_by_power(p, whole);
  return zero_below(weights, weights, as.least);
}

template <class T, bool STORE>
void weigh_chunks(const LogitRow& row, const Weighing& how, int64_t begin, int64_t end, const float* bounds,
                  float* sums, float* weights) {
  const Scale as = scale_of(how);
  const int64_t chunk = row.chunk;
  for (int64_t c = begin; c < end; ++c) {
    if (bounds[c - begin] == 0.0f) {
      sums[c - begin] = 0.0f;
      continue;
    }
    const T* logits = static_cast<const T*>(row.logits) + c * chunk;
    float* out = STORE ? weights + (c - begin) * chunk : nullptr;
    const int64_t n = min64(chunk, row.size - c * chunk);
    vf sum[PARTS];
    for (vf& part : sum) part = zero();
    int64_t i = 0;
    for (; i + LANES16 <= n; i += LANES16) {
#pragma GCC unroll 2
      for (int k = 0; k < PARTS; ++k) {
        const vf w = weights_of(load(logits + i + k * W), as);
        sum[k] = sum[k] + w;
        if (STORE) store(out + i + k * W, w);
      }
    }
    for (int k = 0; i < n; ++k, i += W) {
      const vf w = weights_of(load_logits(logits + i, n - i), as);
      sum[k] = sum[k] + w;
      if (STORE) store_upto(out + i, w, n - i);
    }
    sums[c - begin] = hsum(PARTS == 1 ? sum[0] : sum[0] + sum[PARTS - 1]);
  }
}

template <class T>
void weigh_of(const LogitRow& row, const Weighing& how, int64_t begin, int64_t end, const float* bounds, float* sums,
              float* weights) {
  if (weights == nullptr) return weigh_chunks<T, false>(row, how, begin, end, bounds, sums, weights);
  weigh_chunks<T, true>(row, how, begin, end, bounds, sums, weights);
}

template <class T> void widen_of(const LogitRow& row, int64_t begin, int64_t end, float* values) {
  const T* logits = static_cast<const T*>(row.logits);
  for (int64_t i = begin; i < end; i += W) store_upto(values + (i - begin), load_upto(logits + i, end - i), end - i);
}

template <class T>
int64_t count_of(const LogitRow& row, int64_t begin, int64_t end, float value, bool or_equal) {
  const T* logits = static_cast<const T*>(row.logits);
  const vf bound = set1(value);
  int64_t count = 0;
  for (int64_t i = begin; i < end; i += W) {
    const int64_t n = end - i;
    const vf v = load_upto(logits + i, n);
    uint32_t mask = or_equal ? at_least(v, bound) : above(v, bound);
    if (n < W) mask &= (1u << n) - 1;
    count += __builtin_popcount(mask);
  }
  return count;
}

#define QUIRE_BY_DTYPE(ROW, CALL)                    \
  switch ((ROW).dtype) {                             \
    case DType::float32: { using T = float; CALL; }  \
    case DType::bfloat16: { using T = bf16; CALL; }  \
    case DType::float16: { using T = fp16; CALL; }   \
  }

void find_maxima(const LogitRow& row, int64_t begin, int64_t end, float* maxima) {
  QUIRE_BY_DTYPE(row, return maxima_of<T>(row, begin, end, maxima))
}

void weigh(const LogitRow& row, const Weighing& how, int64_t begin, int64_t end, const float* bounds, float* sums,
           float* weights) {
  QUIRE_BY_DTYPE(row, return weigh_of<T>(row, how, begin, end, bounds, sums, weights))
}

void weigh_each(const float* values, int64_t count, const Weighing& how, float* weights) {
  const Scale as = scale_of(how);
  for (int64_t i = 0; i < count; i += W) {
    store_upto(weights + i, weights_of(load_logits(values + i, count - i), as), count - i);
  }
}

void widen(const LogitRow& row, int64_t begin, int64_t end, float* values) {
  QUIRE_BY_DTYPE(row, return widen_of<T>(row, begin, end, values))
}

int64_t collect(const float* values, int64_t count, float least, float limit, int64_t first, uint64_t* entries) {
  int64_t found = 0;
  for (int64_t i = 0; i < count; i += W) {
    const int64_t n = count - i;
    const vf v = load_upto(values + i, n);
    uint32_t mask = at_least(v, set1(least)) & above(set1(limit), v);
    if (n < W) mask &= (1u << n) - 1;
    for (; mask != 0; mask &= mask - 1) {
      const int64_t place = i + __builtin_ctz(mask);
      entries[found++] = entry_of(values[place], first + place);
    }
  }
  return found;
}

int64_t count_above(const LogitRow& row, int64_t begin, int64_t end, float value, bool or_equal) {
  QUIRE_BY_DTYPE(row, return count_of<T>(row, begin, end, value, or_equal))
  return 0;
}

}  // namespace

extern const SamplingKernels sampling_kernels = {find_maxima, weigh, weigh_each, widen, collect, count_above};

}  // namespace quire::QUIRE_ISA
