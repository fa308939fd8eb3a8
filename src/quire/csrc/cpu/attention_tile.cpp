// Paged attention for one tile of query rows: what attention.cpp hands out to the threads.
//
//   for each partition of 512 keys            its own maximum, sum and values, so that threads can share a sequence
//     for each tile of 64 keys, key head      scores, online softmax, weighted values
//     fold the partition into the total       always in the order of positions
//
// A row's arithmetic does not depend on how many rows share the tile. So a token gets the same bits alone, in a chunk,
// and beside others.
//
// The layout of scratch (floats; e = value_dim padded, d = head_dim padded):
//   ahead  q [rows, d]  s [rows, 64]  part [rows, e]  total [rows, e]  keys [d, 64]  values [64, e]  zeros  states

#include <type_traits>

#include "attention_keys.h"
#include "attention_softmax.h"
#include "attention_values.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr float LOG2_E = 1.44269504f;

struct Scratch {
  int64_t d, e;
  Ahead* ahead;
  float *q, *s, *part, *total, *maximum, *sum, *total_maximum, *total_sum, *correction, *keys, *values, *zeros;

  Scratch(const AttentionArgs& args, float* p) : d(round_up(args.head_dim, LANES)), e(round_up(args.value_dim, LANES)) {
    ahead = reinterpret_cast<Ahead*>(p), p += AHEAD_FLOATS;
    q = p, p += MAX_ROWS * d;
    s = p, p += MAX_ROWS * KEY_TILE;
    part = p, p += MAX_ROWS * e;
    total = p, p += MAX_ROWS * e;
    keys = p, p += KEY_TILE * d;
    values = p, p += KEY_TILE * e;
    zeros = p, p += d > e ? d : e;
    maximum = p, p += MAX_ROWS;
    sum = p, p += MAX_ROWS;
    total_maximum = p, p += MAX_ROWS;
    total_sum = p, p += MAX_ROWS;
    correction = p;
  }
};

// The rows of one key head after one partition.
struct RowStates {
  float *values, *maximum, *sum;

  RowStates(const States& states, int head, int64_t partition, int64_t e) {
    const int64_t n = states.num_rows;
    values = states.at + head * states.head_stride + partition * n * (e + 2) + states.first_row * e;
    maximum = values + n * e - states.first_row * (e - 1);
    sum = maximum + n;
  }
};

template <class C> struct TileKernel {
  static constexpr int per_word = Format<C>::per_word, step = W * per_word;

  const AttentionArgs& args;
  const Work& work;
  const QueryTile& tile;
  Scratch scratch;
  int rows;  // of one key head

  TileKernel(const AttentionArgs& a, const Work& w, float* p) : args(a), work(w), tile(w.tile), scratch(a, p) {
    rows = static_cast<int>(num_rows(tile));
  }

  // Row r of a key head is query head r % num_heads of token r / num_heads; key head h begins at row h * rows.
  int64_t token(int r) const { return r / tile.num_heads; }
  int64_t query_head(int h, int r) const {
    return (work.kv_head + h) * args.group_size + tile.first_head + r % tile.num_heads;
  }
  // The keys of the tile from `base` on that row r sees are [oldest, newest).
  int newest(int r, int64_t base) const {
    return static_cast<int>(min64(KEY_TILE, max64(0, end_visible(args, tile, token(r)) - base)));
  }
  int oldest(int r, int64_t base) const {
    const int64_t first = first_visible(args, tile.sequence, tile.first_position + token(r));
    return static_cast<int>(min64(KEY_TILE, max64(0, first - base)));
  }

  template <class T> void load_query(const T* from, float* to) {
    for (int64_t c = 0; c < scratch.d; c += step) {
      vf x[per_word];
      for (int i = 0; i < per_word; ++i) {
        const int64_t left = args.head_dim - c - i * W;
        x[i] = left > 0 ? load_upto(from + c + i * W, left) * set1(Format<C>::factor_in) : zero();
      }
      store_words<per_word>(to + c / per_word, x);
    }
  }

  template <class T> void load_queries() {
    for (int h = 0; h < work.num_kv_heads; ++h) {
      for (int r = 0; r < rows; ++r) {
        load_query(static_cast<const T*>(args.query) + (tile.first_row + token(r)) * args.query_token_stride +
                       query_head(h, r) * args.query_head_stride,
                   scratch.q + (h * rows + r) * scratch.d);
      }
    }
  }

  void compute_scores(const TileKeys<C>& keys, int h, int64_t base) {
    const int64_t d = scratch.d;
    const float* q = scratch.q + h * rows * d;
    float* s = scratch.s;
    Ahead& ahead = *scratch.ahead;
    if (rows <= few_rows(args.format)) {
      for (int r = 0; r < rows; r += 2, q += 2 * d, s += 2 * KEY_TILE) {
        if (rows - r == 1) score_few<C, 1>(q, d, keys.k, ahead, args.head_dim, keys.last, s);
        else score_few<C, 2>(q, d, keys.k, ahead, args.head_dim, keys.last, s);
      }
      return;
    }
    const int words = static_cast<int>(round_up(args.head_dim, step) / per_word);
    for (int panel = 0; panel < keys.last; panel += PANEL) {
      pack_keys(keys.k + panel, ahead, args.head_dim, scratch.keys);
      for (int r = 0; r < rows; r += SCORE_ROWS) {
        const int some = rows - r < SCORE_ROWS ? rows - r : SCORE_ROWS;
        if (newest(r + some - 1, base) <= panel) continue;
        const float* q_r = q + r * d;
        float* s_r = s + r * KEY_TILE + panel;
        switch (some) {
          case 1: score_panel<per_word, 1>(q_r, d, scratch.keys, words, s_r); break;
          case 2: score_panel<per_word, 2>(q_r, d, scratch.keys, words, s_r); break;
          case 3: score_panel<per_word, 3>(q_r, d, scratch.keys, words, s_r); break;
          default: score_panel<per_word, SCORE_ROWS>(q_r, d, scratch.keys, words, s_r);
        }
      }
    }
  }

  // What the keys of the tile from `base` on are worth more at their distance from a position.
  void read_bias(int64_t head, int64_t position, int64_t base, float* bias) const {
    const float* by_distance = args.bias + head * args.bias_size;
    for (int i = 0; i < KEY_TILE; ++i) {
      const int64_t distance = position - ((base + i) * args.share.size + args.share.rank);
      bias[i] = by_distance[min64(args.bias_size - 1, max64(0, distance))] * LOG2_E;
    }
  }

  void weigh(const TileKeys<C>& keys, int h, int64_t base) {
    float k_scales[KEY_TILE], v_scales[KEY_TILE];
    if constexpr (Format<C>::has_scales) keys.read_scales(args, h, k_scales, v_scales, scratch.ahead);
    float positions[KEY_TILE];
    if (args.slopes != nullptr) {
      for (int i = 0; i < KEY_TILE; ++i) positions[i] = static_cast<float>((base + i) * args.share.size + args.share.rank);
    }
    Softmax softmax{args.scale * LOG2_E * Format<C>::factor_out, args.soft_cap * LOG2_E, k_scales, v_scales, positions, 0,
                    nullptr};
    float bias[KEY_TILE];
    if (args.bias != nullptr) softmax.bias = bias;
    float *maximum = scratch.maximum + h * rows, *sum = scratch.sum + h * rows;
    for (int r = 0; r < rows; ++r) {
      const int first = oldest(r, base), last = newest(r, base);
      float* s = scratch.s + r * KEY_TILE;
      if (args.slopes != nullptr) softmax.slope = args.slopes[query_head(h, r)] * LOG2_E;
      if (args.bias != nullptr) read_bias(query_head(h, r), tile.first_position + token(r), base, bias);
      scratch.correction[r] = first == 0 && last == KEY_TILE
                                  ? softmax_row<C, false>(softmax, s, first, last, maximum + r, sum + r)
                                  : softmax_row<C, true>(softmax, s, first, last, maximum + r, sum + r);
    }
  }

  void add_values(const TileKeys<C>& keys, int h, int64_t base) {
    const int64_t e = scratch.e, width = args.value_dim;
    const float *p = scratch.s, *correction = scratch.correction;
    float* o = scratch.part + h * rows * e;
    Ahead& ahead = *scratch.ahead;
    if (rows <= few_rows(args.format)) {
      for (int r = 0; r < rows; r += 2, p += 2 * KEY_TILE, correction += 2, o += 2 * e) {
        if (rows - r == 1) add_few<C, 1>(p, correction, keys.v, ahead, keys.first, keys.last, width, o, e);
        else add_few<C, 2>(p, correction, keys.v, ahead, keys.first, keys.last, width, o, e);
      }
      return;
    }
    pack_values(keys.v, ahead, keys.first, keys.last, width, scratch.values, e);
    for (int r = 0; r < rows; r += VALUE_ROWS, p += VALUE_ROWS * KEY_TILE, correction += VALUE_ROWS) {
      const int some = rows - r < VALUE_ROWS ? rows - r : VALUE_ROWS;
      const int first = keys.first / per_word, last = (newest(r + some - 1, base) + per_word - 1) / per_word;
      float* o_r = o + r * e;
      switch (some) {
        case 1: add_packed<per_word, 1>(p, correction, scratch.values, e, first, last, o_r); break;
        case 2: add_packed<per_word, 2>(p, correction, scratch.values, e, first, last, o_r); break;
        case 3: add_packed<per_word, 3>(p, correction, scratch.values, e, first, last, o_r); break;
        case 4: add_packed<per_word, 4>(p, correction, scratch.values, e, first, last, o_r); break;
        case 5: add_packed<per_word, 5>(p, correction, scratch.values, e, first, last, o_r); break;
        default: add_packed<per_word, VALUE_ROWS>(p, correction, scratch.values, e, first, last, o_r);
      }
    }
  }

  // Zero, or what was shared of this partition.
  void start_partition(int64_t base) {
    const int64_t e = scratch.e;
    if (base % PARTITION != 0 && base == work.shared_keys) {
      for (int h = 0; h < work.num_kv_heads; ++h) {
        const RowStates from(work.shared, h, base / PARTITION, e);
        memcpy(scratch.part + h * rows * e, from.values, sizeof(float) * rows * e);
        memcpy(scratch.maximum + h * rows, from.maximum, sizeof(float) * rows);
        memcpy(scratch.sum + h * rows, from.sum, sizeof(float) * rows);
      }
      return;
    }
    const int all = work.num_kv_heads * rows;
    for (int r = 0; r < all; ++r) {
      scratch.maximum[r] = -__builtin_inff();
      scratch.sum[r] = 0.0f;
    }
    memset(scratch.part, 0, sizeof(float) * all * e);
  }

  // Folds the partition into the total, or leaves its states.
  void end_partition(int64_t partition) {
    const int64_t e = scratch.e;
    if (work.states.at == nullptr) {
      for (int r = 0; r < work.num_kv_heads * rows; ++r) {
        fold_row(r, scratch.part + r * e, scratch.maximum[r], scratch.sum[r]);
      }
      return;
    }
    for (int h = 0; h < work.num_kv_heads; ++h) {
      const RowStates to(work.states, h, partition - work.first_key / PARTITION, e);
      memcpy(to.values, scratch.part + h * rows * e, sizeof(float) * rows * e);
      memcpy(to.maximum, scratch.maximum + h * rows, sizeof(float) * rows);
      memcpy(to.sum, scratch.sum + h * rows, sizeof(float) * rows);
    }
  }

  // Nothing, and then what was shared of whole partitions.
  void start_total() {
    const int all = work.num_kv_heads * rows;
    memset(scratch.total, 0, sizeof(float) * all * scratch.e);
    for (int r = 0; r < all; ++r) {
      scratch.total_maximum[r] = -__builtin_inff();
      scratch.total_sum[r] = 0.0f;
    }
    for (int64_t p = 0; p < work.shared_keys / PARTITION; ++p) fold(work.shared, p);
  }

  void fold(const States& states, int64_t partition) {
    for (int h = 0; h < work.num_kv_heads; ++h) {
      const RowStates from(states, h, partition, scratch.e);
      for (int r = 0; r < rows; ++r) {
        fold_row(h * rows + r, from.values + r * scratch.e, from.maximum[r], from.sum[r]);
      }
    }
  }

  // total = total * a + other * b, where a and b bring both to the greater maximum.
  void fold_row(int r, const float* values, float maximum, float sum) {
    const float before = scratch.total_maximum[r];
    const float top = maximum > before ? maximum : before;
    if (top == -__builtin_inff() && sum == 0) return;  // nothing seen, and no NaN to pass on
    if (before == -__builtin_inff() && scratch.total_sum[r] == 0) {
      scratch.total_maximum[r] = maximum, scratch.total_sum[r] = sum;
      memcpy(scratch.total + r * scratch.e, values, sizeof(float) * scratch.e);
      return;
    }
    const float a = exp2_of(before - top), b = exp2_of(maximum - top);
    scratch.total_maximum[r] = top;
    scratch.total_sum[r] = scratch.total_sum[r] * a + sum * b;
    float* total = scratch.total + r * scratch.e;
    const vf va = set1(a), vb = set1(b);
    for (int64_t c = 0; c < scratch.e; c += W) store(total + c, fma(load(total + c), va, load(values + c) * vb));
  }

  // What the total is divided by, with one more logit in the denominator if there are sinks: its inverse, and where it
  // is asked for its logarithm.
  struct Divisor {
    float inverse, logarithm;
  };
  Divisor divisor(int r, int64_t head) const {
    float sum = scratch.total_sum[r], factor = Format<C>::has_scales ? Format<C>::factor_out : 1.0f;
    float top = scratch.total_maximum[r];
    if (args.sinks != nullptr) {
      const float sink = args.sinks[head] * LOG2_E, before = top;
      top = sink > before ? sink : before;
      const float a = exp2_of(before - top);
      factor *= a;
      sum = sum * a + exp2_of(sink - top);
    }
    if (!(sum > 0 || sum != sum)) return {0.0f, -__builtin_inff()};
    return {factor / sum, args.is_part ? (top + __builtin_log2f(sum)) / LOG2_E : 0.0f};
  }

  template <class T> void write_row(const float* total, float factor, T* to) {
    for (int64_t c = 0; c < args.value_dim; c += step) {
      vf x[per_word];
      // The sum with 0 makes no difference but for -0.
      for (int i = 0; i < per_word; ++i) x[i] = fma(load(total + c + i * W), set1(factor), zero());
      in_order<per_word>(x);
      for (int i = 0; i < per_word && c + i * W < args.value_dim; ++i) {
        store_upto(to + c + i * W, x[i], args.value_dim - c - i * W);
      }
    }
  }

  template <class T> void write_rows() {
    for (int h = 0; h < work.num_kv_heads; ++h) {
      for (int r = 0; r < rows; ++r) {
        const int64_t head = query_head(h, r), row = h * rows + r;
        const Divisor by = divisor(static_cast<int>(row), head);
        T* const to = static_cast<T*>(args.out) + (tile.first_row + token(r)) * args.out_token_stride +
                      head * args.out_head_stride;
        write_row(scratch.total + row * scratch.e, by.inverse, to);
        if constexpr (std::is_same_v<T, float>) {
          if (args.is_part) to[args.value_dim] = by.logarithm;
        }
      }
    }
  }

  void write_out() {
    switch (args.out_dtype) {
      case DType::float32: return write_rows<float>();
      case DType::bfloat16: return write_rows<bf16>();
      case DType::float16: return write_rows<fp16>();
    }
  }

  void attend(const Work* next) {
    memset(scratch.zeros, 0, sizeof(float) * (scratch.d > scratch.e ? scratch.d : scratch.e));
    switch (args.dtype) {
      case DType::float32: load_queries<float>(); break;
      case DType::bfloat16: load_queries<bf16>(); break;
      case DType::float16: load_queries<fp16>(); break;
    }
    if (work.states.at == nullptr) start_total();
    const int64_t begin = work.first_key, end = work.end_key;
    TileKeys<C> buffers[2];
    TileKeys<C>*keys = buffers, *after = buffers + 1;
    if (begin < end) keys->find(args, work, begin);
    if (!work.follows) {
      scratch.ahead->clear();
      if (begin < end) keys->will_be_used(args, 0, scratch.ahead);
    }
    for (int64_t base = begin; base < end; base += KEY_TILE) {
      if (base == begin || base % PARTITION == 0) start_partition(base);
      const bool is_last = base + KEY_TILE >= end;
      if (!is_last) {
        after->find(args, work, base + KEY_TILE);
      } else if (next != nullptr) {
        after->find(args, *next, next->first_key);
      } else {
        after->num_runs = 0;
      }
      for (int h = 0; h < work.num_kv_heads; ++h) {
        scratch.ahead->use();
        if (h + 1 < work.num_kv_heads) {
          keys->will_be_used(args, h + 1, scratch.ahead);
        } else {
          after->will_be_used(args, 0, scratch.ahead);
        }
        keys->take_head(args, h, scratch.zeros);
        compute_scores(*keys, h, base);
        weigh(*keys, h, base);
        add_values(*keys, h, base);
      }
      if (is_last || (base + KEY_TILE) % PARTITION == 0) end_partition(base / PARTITION);
      TileKeys<C>* const done = keys;
      keys = after, after = done;
    }
    if (work.states.at == nullptr) write_out();
  }

  void combine() {
    start_total();
    const int64_t first = work.first_key / PARTITION, end = (work.end_key + PARTITION - 1) / PARTITION;
    for (int64_t p = first; p < end; ++p) fold(work.states, p - first);
    write_out();
  }
};

}  // namespace

#define QUIRE_BY_FORMAT(CALL)                                     \
  switch (args.format) {                                          \
    case CacheFormat::float32: { using C = float; CALL; break; }  \
    case CacheFormat::bfloat16: { using C = bf16; CALL; break; }  \
    case CacheFormat::float16: { using C = fp16; CALL; break; }   \
    case CacheFormat::int8: { using C = i8; CALL; break; }        \
    case CacheFormat::fp8: { using C = e4m3; CALL; break; }       \
  }

static void attend(const AttentionArgs& args, const Work& work, const Work* next, float* scratch) {
  QUIRE_BY_FORMAT((TileKernel<C>(args, work, scratch).attend(next)))
}

static void combine(const AttentionArgs& args, const Work& work, float* scratch) {
  QUIRE_BY_FORMAT((TileKernel<C>(args, work, scratch).combine()))
}

void store_rows(const StoreArgs& args, int64_t begin, int64_t end);  // cache_rows.cpp

extern const AttentionKernels attention_kernels;
const AttentionKernels attention_kernels = {attend, combine, store_rows};

}  // namespace quire::QUIRE_ISA
