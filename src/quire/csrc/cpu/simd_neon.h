// Vectors of NEON, in pairs: eight lanes, as with AVX2. With BF16 and I8MM there are products of pairs of bfloat16 and
// of unsigned with signed bytes.
//
// Where the two architectures differ, this does what x86 does: max and min return b if either is NaN.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#include "simd_types.h"

namespace quire::QUIRE_ISA {

struct vf {
  float32x4_t low, high;
};
constexpr int W = 8;
constexpr int NV = 2;  // 6 x 2 accumulators are 24 of the 32 registers
QUIRE_INLINE vf operator+(vf a, vf b) { return {a.low + b.low, a.high + b.high}; }
QUIRE_INLINE vf operator-(vf a, vf b) { return {a.low - b.low, a.high - b.high}; }
QUIRE_INLINE vf operator*(vf a, vf b) { return {a.low * b.low, a.high * b.high}; }
QUIRE_INLINE vf operator/(vf a, vf b) { return {a.low / b.low, a.high / b.high}; }
QUIRE_INLINE vf set1(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
QUIRE_INLINE vf zero() { return set1(0.0f); }
QUIRE_INLINE vf swap_pairs(vf a) { return {vrev64q_f32(a.low), vrev64q_f32(a.high)}; }
QUIRE_INLINE vf spread_pairs(vf a) { return {vzip1q_f32(a.low, a.low), vzip2q_f32(a.low, a.low)}; }
QUIRE_INLINE vf fma(vf a, vf b, vf c) { return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)}; }
QUIRE_INLINE vf fnma(vf a, vf b, vf c) { return {vfmsq_f32(c.low, a.low, b.low), vfmsq_f32(c.high, a.high, b.high)}; }
QUIRE_INLINE vf fma_subtract_add(vf a, vf b, vf c) {
  const auto turned = [](float32x4_t x) {  // in even lanes
    const uint32x4_t signs = vreinterpretq_u32_u64(vdupq_n_u64(0x80000000));
    return vreinterpretq_f32_u32(veorq_u32(vreinterpretq_u32_f32(x), signs));
  };
  return fma(a, b, {turned(c.low), turned(c.high)});
}
QUIRE_INLINE float32x4_t greater(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
QUIRE_INLINE float32x4_t lesser(float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
QUIRE_INLINE vf max(vf a, vf b) { return {greater(a.low, b.low), greater(a.high, b.high)}; }
QUIRE_INLINE vf min(vf a, vf b) { return {lesser(a.low, b.low), lesser(a.high, b.high)}; }
QUIRE_INLINE float hmax(vf a) {
  float32x4_t m = greater(a.low, a.high);
  m = greater(m, vextq_f32(m, m, 2));
  return vgetq_lane_f32(greater(m, vdupq_laneq_f32(m, 1)), 0);
}
QUIRE_INLINE float hsum(vf a) {
  const float32x4_t m = a.low + a.high;
  const float32x2_t halves = vadd_f32(vget_low_f32(m), vget_high_f32(m));
  return vget_lane_f32(halves, 0) + vget_lane_f32(halves, 1);
}
QUIRE_INLINE vf round(vf a) { return {vrndnq_f32(a.low), vrndnq_f32(a.high)}; }
QUIRE_INLINE vf floor(vf a) { return {vrndmq_f32(a.low), vrndmq_f32(a.high)}; }
QUIRE_INLINE vf scale_by_power(vf a, vf n) {
  const auto power = [](float32x4_t x) { return vreinterpretq_f32_s32((vcvtnq_s32_f32(x) + vdupq_n_s32(127)) << 23); };
  return {a.low * power(n.low), a.high * power(n.high)};
}
QUIRE_INLINE vf zero_below(vf a, vf x, float bound) {
  const auto kept = [bound](float32x4_t v, float32x4_t by) {
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(v), vcltq_f32(by, vdupq_n_f32(bound))));
  };
  return {kept(a.low, x.low), kept(a.high, x.high)};
}
QUIRE_INLINE vf keep_lanes(vf a, int first, int last, vf other) {
  const int32x4_t lanes = {0, 1, 2, 3};
  const auto kept = [=](float32x4_t v, float32x4_t else_, int32x4_t lane) {
    const uint32x4_t inside = vandq_u32(vcgeq_s32(lane, vdupq_n_s32(first)), vcltq_s32(lane, vdupq_n_s32(last)));
    return vbslq_f32(inside, v, else_);
  };
  return {kept(a.low, other.low, lanes), kept(a.high, other.high, lanes + vdupq_n_s32(4))};
}

// Eight halves are one vector.
QUIRE_INLINE vf load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
QUIRE_INLINE vf widen(bf16, uint16x8_t h) {
  const uint16x8_t none = vdupq_n_u16(0);
  return {vreinterpretq_f32_u16(vzip1q_u16(none, h)), vreinterpretq_f32_u16(vzip2q_u16(none, h))};
}
QUIRE_INLINE vf widen(fp16, uint16x8_t h) {
  const float16x8_t x = vreinterpretq_f16_u16(h);
  return {vcvt_f32_f16(vget_low_f16(x)), vcvt_high_f32_f16(x)};
}
QUIRE_INLINE uint16x4_t narrow_half(bf16, float32x4_t a) {
  const uint32x4_t u = vreinterpretq_u32_f32(a), odd = (u >> 16) & vdupq_n_u32(1);
  const uint32x4_t rounded = u + (odd + vdupq_n_u32(0x7fff));
  return vshrn_n_u32(vbslq_u32(vceqq_f32(a, a), rounded, vdupq_n_u32(0x7fc00000)), 16);
}
QUIRE_INLINE uint16x8_t narrow(bf16, vf a) {
  return vcombine_u16(narrow_half(bf16{}, a.low), narrow_half(bf16{}, a.high));
}
QUIRE_INLINE uint16x8_t narrow(fp16, vf a) {
  return vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(a.low), a.high));
}
template <class T> QUIRE_INLINE vf load(const T* p) {
  return widen(T{}, vld1q_u16(reinterpret_cast<const uint16_t*>(p)));
}
QUIRE_INLINE void store(float* p, vf a) { vst1q_f32(p, a.low), vst1q_f32(p + 4, a.high); }
template <class T> QUIRE_INLINE void store(T* p, vf a) {
  vst1q_u16(reinterpret_cast<uint16_t*>(p), narrow(T{}, a));
}

// Four vectors of four lanes.
QUIRE_INLINE void transpose_four(float32x4_t r[4]) {
  const auto wide = [](float32x4_t a) { return vreinterpretq_f64_f32(a); };
  const auto floats = [](float64x2_t a) { return vreinterpretq_f32_f64(a); };
  const float32x4_t a = vtrn1q_f32(r[0], r[1]), b = vtrn2q_f32(r[0], r[1]);
  const float32x4_t c = vtrn1q_f32(r[2], r[3]), d = vtrn2q_f32(r[2], r[3]);
  r[0] = floats(vtrn1q_f64(wide(a), wide(c)));
  r[1] = floats(vtrn1q_f64(wide(b), wide(d)));
  r[2] = floats(vtrn2q_f64(wide(a), wide(c)));
  r[3] = floats(vtrn2q_f64(wide(b), wide(d)));
}
QUIRE_INLINE void transpose(vf r[W]) {
  float32x4_t block[2][2][4];  // of rows, of lanes
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    block[0][0][i] = r[i].low, block[0][1][i] = r[i].high;
    block[1][0][i] = r[i + 4].low, block[1][1][i] = r[i + 4].high;
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) transpose_four(block[i / 2][i % 2]);
#pragma GCC unroll 8
  for (int i = 0; i < W; ++i) r[i] = {block[0][i / 4][i % 4], block[1][i / 4][i % 4]};
}

QUIRE_INLINE float32x4_t sum_four(float32x4_t a, float32x4_t b, float32x4_t c, float32x4_t d) {
  const float32x4_t ab = vzip1q_f32(a, b) + vzip2q_f32(a, b), cd = vzip1q_f32(c, d) + vzip2q_f32(c, d);
  return vcombine_f32(vget_low_f32(ab), vget_low_f32(cd)) + vcombine_f32(vget_high_f32(ab), vget_high_f32(cd));
}
QUIRE_INLINE vf sum_by_fours(vf a, vf b, vf c, vf d) {
  return {sum_four(a.low, b.low, c.low, d.low), sum_four(a.high, b.high, c.high, d.high)};
}
QUIRE_INLINE vf sum_of_fours(const vf* x) { return {x[0].low + x[0].high, x[1].low + x[1].high}; }
QUIRE_INLINE float sum_lanes(vf a) {
  const auto sum = [](float32x4_t x) {
    const float32x2_t halves = vadd_f32(vget_low_f32(x), vget_high_f32(x));
    return vget_lane_f32(halves, 0) + vget_lane_f32(halves, 1);
  };
  return sum(a.low) + sum(a.high);
}

using vmask = uint32_t;
QUIRE_INLINE vmask mask_of(uint32x4_t low, uint32x4_t high) {
  const uint32x4_t low_bits = {1, 2, 4, 8}, high_bits = {16, 32, 64, 128};
  return vaddvq_u32(vorrq_u32(vandq_u32(low, low_bits), vandq_u32(high, high_bits)));
}
QUIRE_INLINE vmask is_nan(vf a) { return mask_of(vceqq_f32(a.low, a.low), vceqq_f32(a.high, a.high)) ^ 0xff; }
QUIRE_INLINE vmask at_least(vf a, vf b) { return mask_of(vcgeq_f32(a.low, b.low), vcgeq_f32(a.high, b.high)); }
QUIRE_INLINE vmask above(vf a, vf b) { return mask_of(vcgtq_f32(a.low, b.low), vcgtq_f32(a.high, b.high)); }

struct vi {
  uint32x4_t low, high;
};
QUIRE_INLINE vi operator&(vi a, vi b) { return {a.low & b.low, a.high & b.high}; }
QUIRE_INLINE vi operator|(vi a, vi b) { return {a.low | b.low, a.high | b.high}; }
QUIRE_INLINE vi operator^(vi a, vi b) { return {a.low ^ b.low, a.high ^ b.high}; }
QUIRE_INLINE vi load_integers(const void* p) {
  const uint8_t* bytes = static_cast<const uint8_t*>(p);
  return {vreinterpretq_u32_u8(vld1q_u8(bytes)), vreinterpretq_u32_u8(vld1q_u8(bytes + 16))};
}
QUIRE_INLINE vi all_lanes(uint32_t x) { return {vdupq_n_u32(x), vdupq_n_u32(x)}; }
QUIRE_INLINE vi shift_left(vi a, int n) { return {a.low << n, a.high << n}; }
QUIRE_INLINE vi shift_right(vi a, int n) { return {a.low >> n, a.high >> n}; }
QUIRE_INLINE vi shift_right_signed(vi a, int n) {
  const auto shifted = [n](uint32x4_t x) { return vreinterpretq_u32_s32(vreinterpretq_s32_u32(x) >> n); };
  return {shifted(a.low), shifted(a.high)};
}
QUIRE_INLINE vi plus(vi a, vi b) { return {a.low + b.low, a.high + b.high}; }
QUIRE_INLINE vf as_float(vi a) { return {vreinterpretq_f32_u32(a.low), vreinterpretq_f32_u32(a.high)}; }
QUIRE_INLINE vi as_integers(vf a) { return {vreinterpretq_u32_f32(a.low), vreinterpretq_u32_f32(a.high)}; }
QUIRE_INLINE vf to_float(vi a) {
  return {vcvtq_f32_s32(vreinterpretq_s32_u32(a.low)), vcvtq_f32_s32(vreinterpretq_s32_u32(a.high))};
}
QUIRE_INLINE vi to_nearest(vf a) {
  return {vreinterpretq_u32_s32(vcvtnq_s32_f32(a.low)), vreinterpretq_u32_s32(vcvtnq_s32_f32(a.high))};
}
QUIRE_INLINE vi select_or(vi a, vi mask, vi b) { return (a & mask) | b; }
QUIRE_INLINE void store_bytes(int8_t* p, vi a) {
  const int16x4_t low = vqmovn_s32(vreinterpretq_s32_u32(a.low)), high = vqmovn_s32(vreinterpretq_s32_u32(a.high));
  vst1_s8(p, vqmovn_s16(vcombine_s16(low, high)));
}
QUIRE_INLINE vi sixteen_bytes(const void* p) {
  const uint32x4_t bytes = vreinterpretq_u32_u8(vld1q_u8(static_cast<const uint8_t*>(p)));
  return {bytes, bytes};
}
QUIRE_INLINE vi look_up(vi table, vi codes) {
  const auto found = [](uint32x4_t entries, uint32x4_t which) {
    return vreinterpretq_u32_u8(vqtbl1q_u8(vreinterpretq_u8_u32(entries), vreinterpretq_u8_u32(which)));
  };
  return {found(table.low, codes.low), found(table.high, codes.high)};
}
QUIRE_INLINE vi load_pieces(const char* p, int) { return load_integers(p); }
QUIRE_INLINE vi load_halves_twice(const char* p, int) { return sixteen_bytes(p); }
QUIRE_INLINE vi shift_second_halves(vi a, int n) { return {a.low, a.high >> n}; }
QUIRE_INLINE vi four_words(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const uint32x4_t words = {a, b, c, d};
  return {words, words};
}
QUIRE_INLINE vi load_signed_bytes(const void* p) {
  const int16x8_t wide = vmovl_s8(vld1_s8(static_cast<const int8_t*>(p)));
  return {vreinterpretq_u32_s32(vmovl_s16(vget_low_s16(wide))), vreinterpretq_u32_s32(vmovl_high_s16(wide))};
}
QUIRE_INLINE void store_lowest_bytes(char* to, vi a, int64_t n) {
  const uint8x8_t bytes = vmovn_u16(vcombine_u16(vmovn_u32(a.low), vmovn_u32(a.high)));
  uint8_t all[W];
  vst1_u8(all, bytes);
  memcpy(to, all, n >= W ? W : n);
}

// Products of a byte without and a byte with a sign fit into 16 bits.
QUIRE_INLINE void add_sums_of_two(vi& c, vi a, vi b) {
  const auto sum = [](uint32x4_t start, uint32x4_t x, uint32x4_t y) {
    const int16x8_t products = vmulq_s16(vreinterpretq_s16_u32(x), vreinterpretq_s16_u32(y));
    return vreinterpretq_u32_s32(vpadalq_s16(vreinterpretq_s32_u32(start), products));
  };
  c = {sum(c.low, a.low, b.low), sum(c.high, a.high, b.high)};
}
#if defined(__ARM_FEATURE_DOTPROD)
#define QUIRE_SUMS_OF_FOUR
#if !defined(__ARM_FEATURE_MATMUL_INT8)
#define QUIRE_MULTIPLIES_SIGNED  // both
#endif
QUIRE_INLINE void add_sums_of_four(vi& c, vi a, vi b) {
  const auto sum = [](uint32x4_t start, uint32x4_t x, uint32x4_t y) {
    const int32x4_t sums = vreinterpretq_s32_u32(start);
    const int8x16_t second = vreinterpretq_s8_u32(y);
#if defined(QUIRE_MULTIPLIES_SIGNED)
    return vreinterpretq_u32_s32(vdotq_s32(sums, vreinterpretq_s8_u32(x), second));
#else
    return vreinterpretq_u32_s32(vusdotq_s32(sums, vreinterpretq_u8_u32(x), second));
#endif
  };
  c = {sum(c.low, a.low, b.low), sum(c.high, a.high, b.high)};
}
#endif

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define QUIRE_MULTIPLIES_PAIRS
QUIRE_INLINE bfloat16x8_t as_pairs(float32x4_t a) { return vreinterpretq_bf16_f32(a); }
QUIRE_INLINE vf fma_pairs(vf a, vf b, vf c) {
  return {vbfdotq_f32(c.low, as_pairs(a.low), as_pairs(b.low)), vbfdotq_f32(c.high, as_pairs(a.high), as_pairs(b.high))};
}
QUIRE_INLINE bfloat16x8_t pairs_of(vf a) { return vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(a.low), a.high); }
QUIRE_INLINE vf pairs_of(vf a, vf b) {
  return {vreinterpretq_f32_bf16(pairs_of(a)), vreinterpretq_f32_bf16(pairs_of(b))};
}
QUIRE_INLINE void store_narrowed(bf16* p, vf a) {
  vst1q_u16(reinterpret_cast<uint16_t*>(p), vreinterpretq_u16_bf16(pairs_of(a)));
}
#endif

}  // namespace quire::QUIRE_ISA
