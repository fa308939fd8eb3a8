// Rows of keys or values into the cache, in whatever format it holds them.
//
// Codes have a scale for each row, its largest magnitude divided by the largest code. A row that holds a NaN or an
// infinity gets the scale NaN, so that it does not go unnoticed; one that is as good as zero gets the scale 0.

#include "attention_args.h"
#include "simd.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr float LEAST_MAGNITUDE = 1e-30f;  // below it, the inverse of a scale is no float any more

QUIRE_INLINE vf magnitude(vf x) { return as_float(as_integers(x) & all_lanes(0x7fffffff)); }
QUIRE_INLINE vi codes_of_e4m3(vf y) {
  const vi u = as_integers(magnitude(y)), sign = shift_right(as_integers(y) & all_lanes(1u << 31), 24);
  const vi odd = shift_right(u, 20) & all_lanes(1);
  const vi rounded = plus(u, plus(odd, all_lanes(0x7ffff)));
  const vi code = plus(shift_right(rounded, 20), all_lanes(static_cast<uint32_t>(-(120 << 3))));
  return as_integers(zero_below(as_float(sign | code), magnitude(y), 0x1p-6f));
}

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
    store_lowest_bytes(codes + c, format == CacheFormat::int8 ? to_nearest(y) : codes_of_e4m3(y), dim - c);
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
