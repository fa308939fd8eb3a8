// Paged attention: cuts the batch into tiles of query rows and hands them to the threads.
//
// A tile is some tokens of one sequence times the heads that share a key head, so keys and values are read once for
// all of them. A tile that is much longer than its share of the work is cut along the context as well; its partitions
// are folded in the same order afterwards, so the cut does not show in the result.

#include "attention.h"

#include <omp.h>

#include <cstdlib>
#include <memory>
#include <vector>

namespace quire {
namespace {

// Everything about one tile of query rows.
struct Item {
  Work all;
  double cost;            // rows times keys
  int64_t partials = -1;  // offset into the shared buffer if the item is cut
};

// What a thread takes: an item, or a piece of one.
struct Unit {
  Work work;
  int64_t partials;  // offset, or -1: write the output
};

constexpr int64_t UNITS_AT_ONCE = 4;

// A buffer that a thread keeps: allocating scratch anew for every call would cost more than small calls themselves.
float* thread_buffer(int64_t floats) {
  thread_local std::unique_ptr<float, decltype(&std::free)> buffer(nullptr, std::free);
  thread_local int64_t capacity = 0;
  if (floats > capacity) {
    buffer.reset(static_cast<float*>(std::aligned_alloc(64, round_up(floats, 16) * sizeof(float))));
    capacity = floats;
  }
  return buffer.get();
}

std::vector<Item> plan_items(const AttentionArgs& args, const Batch& batch) {
  std::vector<Item> items;
  const int heads_at_once = static_cast<int>(min64(args.group_size, MAX_ROWS));
  const int64_t tokens_at_once = max64(1, MAX_ROWS / heads_at_once);
  for (int s = 0; s < batch.num_sequences; ++s) {
    const int64_t begin = batch.query_starts[s], count = batch.query_starts[s + 1] - begin;
    if (count <= 0) continue;
    const int64_t first_position = batch.seq_lens[s] - count;
    for (int kv_head = 0; kv_head < args.num_kv_heads; ++kv_head) {
      for (int head = 0; head < args.group_size; head += heads_at_once) {
        // The last tokens first: they see the longest context, and short pieces at the end keep all threads busy.
        for (int64_t t = (count - 1) / tokens_at_once * tokens_at_once; t >= 0; t -= tokens_at_once) {
          Item item;
          QueryTile& tile = item.all.tile;
          tile = {s, kv_head, head, static_cast<int>(min64(heads_at_once, args.group_size - head)),
                       begin + t, min64(tokens_at_once, count - t), first_position + t};
          const int64_t first = first_visible(args, tile), end = tile.first_position + tile.num_tokens;
          item.all.first_partition = first / PARTITION;
          item.all.end_partition = max64(item.all.first_partition, (end + PARTITION - 1) / PARTITION);
          // Even a single row costs the packing of its keys: about as much as four rows more.
          item.cost = static_cast<double>(max64(0, end - first)) * (tile.num_tokens * tile.num_heads + 4);
          items.push_back(item);
        }
      }
    }
  }
  return items;
}

int64_t num_rows(const QueryTile& tile) { return tile.num_tokens * tile.num_heads; }

// Pieces of items of more than `share`; returns the floats needed for their partial states.
int64_t cut(const AttentionArgs& args, std::vector<Item>& items, double share, std::vector<Unit>& units) {
  int64_t floats = 0;
  for (Item& item : items) {
    const int64_t begin = item.all.first_partition, count = item.all.end_partition - begin;
    const int64_t pieces = min64(count, static_cast<int64_t>(item.cost / share) + 1);
    if (pieces <= 1) {
      units.push_back({item.all, -1});
      continue;
    }
    const int64_t size = partial_floats(args, num_rows(item.all.tile));
    item.partials = floats;
    floats += count * size;
    for (int64_t p = 0; p < pieces; ++p) {
      const int64_t first = count * p / pieces, end = count * (p + 1) / pieces;
      units.push_back({{item.all.tile, begin + first, begin + end}, item.partials + first * size});
    }
  }
  return floats;
}

}  // namespace

void paged_attention(const AttentionArgs& args, const Batch& batch, int max_threads) {
  const KernelTable& table = *kernels();
  std::vector<Item> items = plan_items(args, batch);
  double cost = 0;
  for (const Item& item : items) cost += item.cost;
  const int threads = cost * args.head_dim < 1e6 ? 1 : max_threads;  // below some 20 us, waking threads costs more
  std::vector<Unit> units;
  units.reserve(items.size());
  // Four pieces a thread even out what one thread loses to others on the machine.
  const int64_t floats = cut(args, items, threads == 1 ? cost + 1 : cost / (4.0 * threads) + 1, units);
  std::unique_ptr<float, decltype(&std::free)> shared(nullptr, std::free);
  if (floats > 0) shared.reset(static_cast<float*>(std::aligned_alloc(64, round_up(floats, 16) * sizeof(float))));
  float* const partials = shared.get();
  const int64_t num_units = static_cast<int64_t>(units.size()), num_items = static_cast<int64_t>(items.size());
  const int64_t scratch_size = scratch_floats(args);
  // Some units in a row, so that the end of one can fetch the keys of the next.
  const int64_t at_once = num_units >= 4 * UNITS_AT_ONCE * threads ? UNITS_AT_ONCE : 1;

#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    float* scratch = thread_buffer(scratch_size);
#pragma omp for schedule(dynamic, 1)
    for (int64_t begin = 0; begin < num_units; begin += at_once) {
      const int64_t end = min64(num_units, begin + at_once);
      for (int64_t u = begin; u < end; ++u) {
        const Work* next = u + 1 < end ? &units[u + 1].work : nullptr;
        float* to = units[u].partials < 0 ? nullptr : partials + units[u].partials;
        table.attend(args, units[u].work, next, scratch, to);
      }
    }
    if (floats > 0) {
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < num_items; ++i) {
        const Work& all = items[i].all;
        if (items[i].partials < 0) continue;
        table.combine(args, all.tile, all.end_partition - all.first_partition, scratch, partials + items[i].partials);
      }
    }
  }
}

}  // namespace quire
