// Paged attention for one tile of query rows: what attention.cpp hands out to the threads.
//
//   for each partition of 512 keys            its own maximum, sum and values, so that threads can share a sequence
//     for each tile of 64 keys                online softmax
//     fold the partition into the total       always in the order of positions
//
// The layout of scratch (floats; e = value_dim padded, d = head_dim padded):
//   q [rows, d]  s [rows, 64]  part [rows, e]  total [rows, e]  keys [d, 64]  values [64, e]  zeros  states of rows

#include "attention_micro.h"

namespace quire::QUIRE_ISA {
namespace {

struct Scratch {
  int64_t d, e;
  float *q, *s, *part, *total, *total_maximum, *total_sum, *correction, *keys, *values, *zeros;
  RowState* states;

  Scratch(const AttentionArgs& args, float* p) : d(round_up(args.head_dim, LANES)), e(round_up(args.value_dim, LANES)) {
    q = p, p += MAX_ROWS * d;
    s = p, p += MAX_ROWS * KEY_TILE;
    part = p, p += MAX_ROWS * e;
    total = p, p += MAX_ROWS * e;
    keys = p, p += KEY_TILE * d;
    values = p, p += KEY_TILE * e;
    zeros = p, p += d > e ? d : e;
    total_maximum = p, p += MAX_ROWS;
    total_sum = p, p += MAX_ROWS;
    correction = p, p += MAX_ROWS;
    states = reinterpret_cast<RowState*>(p);
  }
};

int64_t first_tile(const AttentionArgs& args, const Work& work) {
  return max64(work.first_partition * PARTITION, first_visible(args, work.tile) / KEY_TILE * KEY_TILE);
}

// Where the keys and values of one tile of 64 positions lie. What no row of the query sees, at either end, is never
// read, for its block may be gone: those places point to zeros.
template <class T> struct Rows {
  const T* k[KEY_TILE];
  const T* v[KEY_TILE];
  int first, last;

  void find(const AttentionArgs& args, const Work& work, int64_t base, const float* zero_row) {
    const QueryTile& tile = work.tile;
    const T* zeros = reinterpret_cast<const T*>(zero_row);
    const int64_t row = tile.sequence * args.table_stride;
    const T* k_head = static_cast<const T*>(args.k_cache) + tile.kv_head * args.k_head_stride;
    const T* v_head = static_cast<const T*>(args.v_cache) + tile.kv_head * args.v_head_stride;
    first = static_cast<int>(max64(0, first_visible(args, tile) - base));
    last = static_cast<int>(max64(first, min64(KEY_TILE, tile.first_position + tile.num_tokens - base)));
    for (int j = 0; j < first; ++j) k[j] = v[j] = zeros;
    for (int j = first; j < last;) {
      const int64_t index = (base + j) / args.block_size;
      int place = static_cast<int>((base + j) - index * args.block_size);
      const int64_t block = args.block_tables[row + index];
      const T* k_block = k_head + block * args.k_block_stride;
      const T* v_block = v_head + block * args.v_block_stride;
      for (; place < args.block_size && j < last; ++place, ++j) {
        k[j] = k_block + place * static_cast<int64_t>(args.head_dim);
        v[j] = v_block + place * static_cast<int64_t>(args.value_dim);
      }
    }
    for (int j = last; j < KEY_TILE; ++j) k[j] = v[j] = zeros;
  }
};

template <class T> struct TileKernel {
  const AttentionArgs& args;
  const QueryTile& tile;
  Scratch scratch;
  int rows, words;
  int64_t first_key, end_key;  // what any row of the tile sees

  TileKernel(const AttentionArgs& a, const QueryTile& t, float* p) : args(a), tile(t), scratch(a, p) {
    rows = static_cast<int>(tile.num_tokens) * tile.num_heads;
    words = args.head_dim / Words<T>::per_word;
    first_key = first_visible(args, tile);
    end_key = tile.first_position + tile.num_tokens;
  }

  // Row r of the tile is head r % num_heads of token r / num_heads.
  int64_t token(int r) const { return r / tile.num_heads; }
  int64_t head(int r) const { return tile.kv_head * args.group_size + tile.first_head + r % tile.num_heads; }

  void load_queries() {
    for (int r = 0; r < rows; ++r) {
      const T* from = static_cast<const T*>(args.query) + (tile.first_row + token(r)) * args.query_token_stride +
                      head(r) * args.query_head_stride;
      for (int w = 0; w < words; w += W) {
        store(scratch.q + r * scratch.d + w, Words<T>::load_some(from + w * Words<T>::per_word, words - w));
      }
    }
    memset(scratch.zeros, 0, sizeof(float) * (scratch.d > scratch.e ? scratch.d : scratch.e));
  }

  void compute_scores(const Rows<T>& now, const Rows<T>& ahead) {
    for (int panel = 0; panel < now.last; panel += PANEL) {
      for (int j = panel; j < panel + PANEL; j += W) {
        pack_keys<T>(now.k + j, ahead.k + j, words, scratch.keys + (j - panel));
      }
      score<T>(scratch.q, scratch.d, rows, scratch.keys, ahead.k + panel, words, scratch.s + panel);
    }
  }

  void softmax(int64_t base) {
    for (int r = 0; r < rows; ++r) {
      const int64_t position = tile.first_position + token(r);
      const int64_t oldest = args.sliding_window > 0 ? max64(0, position - args.sliding_window + 1) : 0;
      const int first = static_cast<int>(min64(KEY_TILE, max64(0, oldest - base)));
      const int last = static_cast<int>(min64(KEY_TILE, max64(0, position + 1 - base)));
      scratch.correction[r] = softmax_row(scratch.s + r * KEY_TILE, first, last, args.scale, args.soft_cap,
                                          scratch.states + r);
    }
  }

  void weigh_values(const Rows<T>& now, const Rows<T>& ahead) {
    // Few rows: convert on the way. Many: convert once for all.
    if (rows <= ROWS_AT_ONCE && args.value_dim % W == 0) {
      add_values<T>(scratch.s, scratch.correction, rows, now.v, ahead.v, now.first, now.last, args.value_dim,
                    scratch.part, scratch.e);
      return;
    }
    const float* packed[KEY_TILE];
    for (int j = now.first; j < now.last; ++j) {
      float* to = scratch.values + j * scratch.e;
      for (int64_t c = 0; c < args.value_dim; c += W) {
        store(to + c, load_upto(now.v[j] + c, args.value_dim - c));
      }
      prefetch(ahead.v[j], args.value_dim);
      packed[j] = to;
    }
    add_values<float>(scratch.s, scratch.correction, rows, packed, nullptr, now.first, now.last,
                      round_up(args.value_dim, W), scratch.part, scratch.e);
  }

  void start_partition() {
    for (int r = 0; r < rows; ++r) {
      scratch.states[r].maximum = -__builtin_inff();
      memset(scratch.states[r].sum, 0, sizeof(scratch.states[r].sum));
    }
    memset(scratch.part, 0, sizeof(float) * rows * scratch.e);
  }

  // Folds the partition into the total, or leaves its state in `partial`.
  void end_partition(float* partial) {
    for (int r = 0; r < rows; ++r) {
      const float* values = scratch.part + r * scratch.e;
      const float maximum = scratch.states[r].maximum, sum = hsum(load(scratch.states[r].sum));
      if (partial == nullptr) {
        fold_row(r, values, maximum, sum);
      } else {
        memcpy(partial + r * scratch.e, values, sizeof(float) * scratch.e);
        partial[rows * scratch.e + r] = maximum;
        partial[rows * scratch.e + rows + r] = sum;
      }
    }
  }

  void start_total() {
    memset(scratch.total, 0, sizeof(float) * rows * scratch.e);
    for (int r = 0; r < rows; ++r) {
      scratch.total_maximum[r] = -__builtin_inff();
      scratch.total_sum[r] = 0.0f;
    }
  }

  // total = total * a + other * b, where a and b bring both to the greater maximum.
  void fold_row(int r, const float* values, float maximum, float sum) {
    const float before = scratch.total_maximum[r];
    const float top = maximum > before ? maximum : before;
    if (top == -__builtin_inff() && sum == 0) return;  // nothing seen, and no NaN to pass on
    float a[W], b[W];
    store(a, exp(set1(before - top)));
    store(b, exp(set1(maximum - top)));
    scratch.total_maximum[r] = top;
    scratch.total_sum[r] = scratch.total_sum[r] * a[0] + sum * b[0];
    float* total = scratch.total + r * scratch.e;
    const vf va = set1(a[0]), vb = set1(b[0]);
    for (int64_t c = 0; c < scratch.e; c += W) store(total + c, fma(load(total + c), va, load(values + c) * vb));
  }

  void finish() {
    for (int r = 0; r < rows; ++r) {
      float sum = scratch.total_sum[r], factor = 1.0f;
      if (args.sinks != nullptr) {  // one more logit in the denominator
        const float sink = args.sinks[head(r)], before = scratch.total_maximum[r];
        const float top = sink > before ? sink : before;
        float a[W], b[W];
        store(a, exp(set1(before - top)));
        store(b, exp(set1(sink - top)));
        factor = a[0];
        sum = sum * a[0] + b[0];
      }
      const vf inverse = set1(sum > 0 || sum != sum ? factor / sum : 0.0f);
      T* to = static_cast<T*>(args.out) + (tile.first_row + token(r)) * args.out_token_stride +
              head(r) * args.out_head_stride;
      const float* total = scratch.total + r * scratch.e;
      for (int64_t c = 0; c < args.value_dim; c += W) store_upto(to + c, load(total + c) * inverse, args.value_dim - c);
    }
  }

  void attend(const Work& work, const Work* next, float* partials) {
    load_queries();
    if (partials == nullptr) start_total();
    const int64_t end = min64(end_key, work.end_partition * PARTITION);
    Rows<T> buffers[2];
    Rows<T>*now = buffers, *ahead = buffers + 1;
    for (int64_t base = first_tile(args, work); base < end; base += KEY_TILE) {
      const int64_t partition = base / PARTITION;
      if (base == first_tile(args, work)) {
        now->find(args, work, base, scratch.zeros);
        start_partition();
      } else if (base % PARTITION == 0) {
        start_partition();
      }
      const bool is_last = base + KEY_TILE >= end;
      if (!is_last) {
        ahead->find(args, work, base + KEY_TILE, scratch.zeros);
      } else if (next != nullptr) {
        ahead->find(args, *next, first_tile(args, *next), scratch.zeros);
      } else {
        *ahead = *now;  // nothing left to fetch
      }
      compute_scores(*now, *ahead);
      softmax(base);
      weigh_values(*now, *ahead);
      if (is_last || (base + KEY_TILE) % PARTITION == 0) {
        const int64_t skipped = (partition - work.first_partition) * partial_floats(args, rows);
        end_partition(partials == nullptr ? nullptr : partials + skipped);
      }
      Rows<T>* const done = now;
      now = ahead, ahead = done;
    }
    if (partials == nullptr) finish();
  }

  void combine(int64_t count, const float* partials) {
    start_total();
    for (int64_t p = 0; p < count; ++p, partials += partial_floats(args, rows)) {
      const float* tail = partials + rows * scratch.e;
      for (int r = 0; r < rows; ++r) fold_row(r, partials + r * scratch.e, tail[r], tail[rows + r]);
    }
    finish();
  }
};

}  // namespace

#define QUIRE_BY_DTYPE(CALL)                       \
  switch (args.dtype) {                            \
    case DType::float32: { using T = float; CALL; break; }  \
    case DType::bfloat16: { using T = bf16; CALL; break; }  \
    case DType::float16: { using T = fp16; CALL; break; }   \
  }

void attend(const AttentionArgs& args, const Work& work, const Work* next, float* scratch, float* partials) {
  QUIRE_BY_DTYPE((TileKernel<T>(args, work.tile, scratch).attend(work, next, partials)))
}

void combine(const AttentionArgs& args, const QueryTile& tile, int64_t count, float* scratch, const float* partials) {
  QUIRE_BY_DTYPE((TileKernel<T>(args, tile, scratch).combine(count, partials)))
}

}  // namespace quire::QUIRE_ISA
