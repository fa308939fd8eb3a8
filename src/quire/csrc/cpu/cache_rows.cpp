// Rows of keys or values into the cache, in whatever format it holds them.
//
// Codes have a scale for each row, its largest magnitude divided by the largest code. A row that holds a NaN or an
// infinity gets the scale NaN, so that it does not go unnoticed; one that is as good as zero gets the scale 0.

#include "attention_args.h"
#include "simd.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr float LEAST_MAGNITUDE = 1e-30f;  // below it, the inverse of a scale is no float any more

#if defined(__AVX512F__)
using vi = __m512i;
QUIRE_INLINE vi bits(vf x) { return _mm512_castps_si512(x); }
QUIRE_INLINE vf magnitude(vf x) { return _mm512_abs_ps(x); }
QUIRE_INLINE vi to_int(vf x) { return _mm512_cvtps_epi32(x); }
QUIRE_INLINE void store_codes(char* to, vi codes, int64_t n) {
  const __mmask16 mask = n >= W ? 0xffff : static_cast<__mmask16>((1u << n) - 1);
  _mm512_mask_cvtepi32_storeu_epi8(to, mask, codes);
}
QUIRE_INLINE vi codes_of_e4m3(vf y) {
  const vi u = bits(magnitude(y)), sign = _mm512_srli_epi32(_mm512_and_si512(bits(y), _mm512_set1_epi32(1 << 31)), 24);
  const vi odd = _mm512_and_si512(_mm512_srli_epi32(u, 20), _mm512_set1_epi32(1));
  const vi rounded = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7ffff)));
  const vi code = _mm512_sub_epi32(_mm512_srli_epi32(rounded, 20), _mm512_set1_epi32(120 << 3));
  const __mmask16 is_normal = _mm512_cmp_ps_mask(magnitude(y), set1(0x1p-6f), _CMP_GE_OQ);
  return _mm512_maskz_or_epi32(is_normal, sign, code);
}
#else
using vi = __m256i;
QUIRE_INLINE vi bits(vf x) { return _mm256_castps_si256(x); }
QUIRE_INLINE vf magnitude(vf x) { return _mm256_andnot_ps(set1(-0.0f), x); }
QUIRE_INLINE vi to_int(vf x) { return _mm256_cvtps_epi32(x); }
QUIRE_INLINE void store_codes(char* to, vi codes, int64_t n) {
  const vi first = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,  //
                                    0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
  const vi bytes = _mm256_shuffle_epi8(codes, first);  // four in each half
  const __m128i low = _mm256_castsi256_si128(bytes), high = _mm256_extracti128_si256(bytes, 1);
  const int64_t all = _mm_cvtsi128_si64(_mm_unpacklo_epi32(low, high));
  memcpy(to, &all, n >= W ? W : n);
}
QUIRE_INLINE vi codes_of_e4m3(vf y) {
  const vi u = bits(magnitude(y)), sign = _mm256_srli_epi32(_mm256_and_si256(bits(y), _mm256_set1_epi32(1 << 31)), 24);
  const vi odd = _mm256_and_si256(_mm256_srli_epi32(u, 20), _mm256_set1_epi32(1));
  const vi rounded = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7ffff)));
  const vi code = _mm256_sub_epi32(_mm256_srli_epi32(rounded, 20), _mm256_set1_epi32(120 << 3));
  const vi is_normal = bits(_mm256_cmp_ps(magnitude(y), set1(0x1p-6f), _CMP_GE_OQ));
  return _mm256_and_si256(is_normal, _mm256_or_si256(sign, code));
}
#endif

// The scale is divided by the inverse of what codes are multiplied with, and rounded once, in both directions.
template <class T> void encode_row(const T* from, int64_t dim, CacheFormat format, char* codes, char* scale) {
  const float largest_code = format == CacheFormat::int8 ? 127.0f : 448.0f;
  vf top = zero(), nothing = zero();
  for (int64_t c = 0; c < dim; c += W) {
    const vf x = load_upto(from + c, dim - c);
    top = max(top, magnitude(x));
    nothing = nothing + (x - x);  // 0, or NaN if there is a NaN or an infinity
  }
  const float largest = hmax(top), none = hsum(nothing);
  const bool is_zero = !(largest >= LEAST_MAGNITUDE) || none != 0;
  const float by_code = none != 0 ? none : is_zero ? 0.0f : largest / largest_code;
  const float inverse = is_zero ? 0.0f : largest_code / largest;
  memcpy(scale, &by_code, SCALE_BYTES);
  for (int64_t c = 0; c < dim; c += W) {
    const vf y = is_zero ? zero() : load_upto(from + c, dim - c) * set1(inverse);
    store_codes(codes + c, format == CacheFormat::int8 ? to_int(y) : codes_of_e4m3(y), dim - c);
  }
}

template <class T, class C> void convert_row(const T* from, int64_t dim, C* to) {
  for (int64_t c = 0; c < dim; c += W) store_upto(to + c, load_upto(from + c, dim - c), dim - c);
}
template <class T> void convert_row(const T* from, int64_t dim, T* to) { memcpy(to, from, dim * sizeof(T)); }

template <class T> void store_all(const StoreArgs& args, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    int64_t slot = args.slots[t];
    if (slot < 0 || (args.share.size > 1 && slot % args.share.size != args.share.rank)) continue;
    slot /= args.share.size;
    const int64_t block = slot / args.block_size, place = slot - block * args.block_size;
    for (int64_t h = 0; h < args.heads; ++h) {
      const T* from = static_cast<const T*>(args.rows) + t * args.token_stride + h * args.head_stride;
      char* to = args.cache + block * args.block_stride + h * args.cache_head_stride;
      switch (args.format) {
        case CacheFormat::float32: convert_row(from, args.dim, reinterpret_cast<float*>(to) + place * args.dim); break;
        case CacheFormat::bfloat16: convert_row(from, args.dim, reinterpret_cast<bf16*>(to) + place * args.dim); break;
        case CacheFormat::float16: convert_row(from, args.dim, reinterpret_cast<fp16*>(to) + place * args.dim); break;
        case CacheFormat::int8:
        case CacheFormat::fp8: {
          char* scales = to + static_cast<int64_t>(args.block_size) * args.dim;
          encode_row(from, args.dim, args.format, to + place * args.dim, scales + place * SCALE_BYTES);
        }
      }
    }
  }
}

}  // namespace

void store_rows(const StoreArgs& args, int64_t begin, int64_t end) {
  switch (args.dtype) {
    case DType::float32: return store_all<float>(args, begin, end);
    case DType::bfloat16: return store_all<bf16>(args, begin, end);
    case DType::float16: return store_all<fp16>(args, begin, end);
  }
}

}  // namespace quire::QUIRE_ISA
