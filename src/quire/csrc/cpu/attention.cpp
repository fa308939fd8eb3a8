// Paged attention: cuts the batch into tiles of query rows and hands them to the threads.
//
// A tile is some tokens of one sequence times the heads that share a key head, so keys and values are read once for
// all of them. A tile that is much longer than its share of the work is cut along the context as well; its partitions
// are folded in the same order afterwards, so the cut does not show in the result.

#include "attention.h"

#include <stdexcept>
#include <string>

namespace quire {
namespace {

// Pieces of work for each thread: so many even out what one thread loses to others on the machine.
constexpr int UNITS_PER_THREAD = 4;

void check_below(int64_t limit, int64_t value, const char* what, int64_t sequence) {
  if (value >= 0 && value < limit) return;
  throw std::runtime_error("sequence " + std::to_string(sequence) + ": " + what + " " + std::to_string(value) +
                           " is not in [0, " + std::to_string(limit) + ")");
}

}  // namespace

AttentionStep::AttentionStep(const AttentionArgs& args, std::vector<float> sinks)
    : args_(args), sinks_(std::move(sinks)) {
  args_.sinks = sinks_.empty() ? nullptr : sinks_.data();
}

int64_t AttentionStep::work(const Extent& extent) const {
  int64_t pairs = 0;
  for (int64_t s = 0; s < extent.sequences; ++s) {
    const int64_t count = args_.query_starts[s + 1] - args_.query_starts[s], length = args_.seq_lens[s];
    if (count > 0) pairs += count * (args_.sliding_window > 0 ? min64(length, args_.sliding_window) : length);
  }
  return pairs * args_.num_kv_heads * args_.group_size * (args_.head_dim + args_.value_dim);
}

void AttentionStep::check(const Extent& extent) const {
  const int64_t capacity = args_.blocks_in_row * args_.block_size;
  for (int64_t s = 0; s < extent.sequences; ++s) {
    const int64_t begin = args_.query_starts[s], end = args_.query_starts[s + 1], length = args_.seq_lens[s];
    if (end <= begin) continue;
    check_below(extent.tokens, begin, "row", s);
    check_below(extent.tokens, end - 1, "row", s);
    if (length > capacity) {
      throw std::runtime_error("sequence " + std::to_string(s) + ": length " + std::to_string(length) +
                               " is longer than its " + std::to_string(capacity) + " slots");
    }
    const int64_t row = s * args_.table_stride, first = first_visible(args_, length - (end - begin));
    for (int64_t i = first / args_.block_size; i * args_.block_size < length; ++i) {
      check_below(args_.num_blocks, args_.block_tables[row + i], "block", s);
    }
  }
}

void AttentionStep::make_plan(int64_t sequences, int threads) const {
  plan_.tiles.clear(), plan_.units.clear();
  plan_.floats = 0;
  for (int64_t s = 0; s < sequences; ++s) add_tiles(s);
  double cost = 0;
  for (const Tile& tile : plan_.tiles) cost += tile.cost;
  for (Tile& tile : plan_.tiles) cut(tile, threads == 1 ? cost + 1 : cost / (UNITS_PER_THREAD * threads) + 1);
}

void AttentionStep::add_tiles(int64_t sequence) const {
  const int64_t begin = args_.query_starts[sequence], count = args_.query_starts[sequence + 1] - begin;
  if (count <= 0) return;
  const int heads_at_once = static_cast<int>(min64(args_.group_size, MAX_ROWS));
  const int64_t tokens_at_once = max64(1, MAX_ROWS / heads_at_once);
  for (int head = 0; head < args_.group_size; head += heads_at_once) {
    // The last tokens first: they see the longest context, and short pieces at the end keep all threads busy.
    for (int64_t t = (count - 1) / tokens_at_once * tokens_at_once; t >= 0; t -= tokens_at_once) {
      Tile tile{};
      tile.work.tile = {static_cast<int>(sequence),
                        head,
                        static_cast<int>(min64(heads_at_once, args_.group_size - head)),
                        begin + t,
                        min64(tokens_at_once, count - t),
                        args_.seq_lens[sequence] - count + t};
      const QueryTile& rows = tile.work.tile;
      const int64_t first = first_visible(args_, rows), end = rows.first_position + rows.num_tokens;
      tile.work.first_partition = first / PARTITION;
      tile.work.end_partition = max64(tile.work.first_partition, (end + PARTITION - 1) / PARTITION);
      // Even a single row costs the reading of its keys: about as much as four rows more.
      tile.cost = static_cast<double>(max64(0, end - first)) * static_cast<double>(num_rows(rows) + 4) *
                  args_.num_kv_heads;
      plan_.tiles.push_back(tile);
    }
  }
}

// Makes units of about `share` of a tile: first along the key heads, then along the context.
void AttentionStep::cut(Tile& tile, double share) const {
  const int64_t rows = num_rows(tile.work.tile);
  const int wanted = static_cast<int>(min64(1 << 20, static_cast<int64_t>(tile.cost / share) + 1));
  int heads = rows <= FEW_ROWS ? static_cast<int>(min64(args_.num_kv_heads, MAX_ROWS / rows)) : 1;
  if (wanted > 1) heads = static_cast<int>(max64(1, min64(heads, args_.num_kv_heads / wanted)));
  const int64_t head_units = (args_.num_kv_heads + heads - 1) / heads;
  const int64_t begin = tile.work.first_partition, count = tile.work.end_partition - begin;
  const int64_t pieces = max64(1, min64(count, wanted / head_units));
  tile.is_cut = pieces > 1;
  if (tile.is_cut) {
    tile.states = plan_.floats;
    plan_.floats += count * partial_floats(args_, rows) * args_.num_kv_heads;
  }
  const int index = static_cast<int>(&tile - plan_.tiles.data());
  for (int64_t p = 0; p < pieces; ++p) {
    for (int head = 0; head < args_.num_kv_heads; head += heads) {
      plan_.units.push_back({index, head, static_cast<int>(min64(heads, args_.num_kv_heads - head)),
                             begin + count * p / pieces, begin + count * (p + 1) / pieces});
    }
  }
}

Work AttentionStep::work_of(const Unit& unit, float* states) const {
  const Tile& tile = plan_.tiles[unit.tile];
  Work work = tile.work;
  work.kv_head = unit.kv_head, work.num_kv_heads = unit.num_kv_heads;
  work.first_partition = unit.first_partition, work.end_partition = unit.end_partition;
  if (tile.is_cut) {
    const int64_t size = partial_floats(args_, num_rows(tile.work.tile));
    work.partials_stride = (tile.work.end_partition - tile.work.first_partition) * size;
    work.partials = states + tile.states + unit.kv_head * work.partials_stride +
                    (unit.first_partition - tile.work.first_partition) * size;
  }
  return work;
}

void AttentionStep::run(const Extent& extent, Crew& crew) const {
  if (crew.rank == 0) make_plan(extent.sequences, crew.size);
  crew.barrier();
  const AttentionKernels& table = *kernels()->attention;
  const Plan& plan = plan_;
  float* const scratch = static_cast<float*>(thread_scratch(scratch_floats(args_) * sizeof(float)));
  float* states = nullptr;
  if (plan.floats > 0) states = static_cast<float*>(crew.shared_scratch(plan.floats * sizeof(float)));
  const int64_t units = static_cast<int64_t>(plan.units.size());
  int64_t expected = -1;
  crew.for_each(units, 1, [&](int64_t begin, int64_t end) {
    for (int64_t u = begin; u < end; ++u) {
      Work work = work_of(plan.units[u], states), next{};
      work.follows = u == expected;
      // Most likely this thread takes it: the end of one unit fetches the keys of the next.
      if (u + 1 < units) next = work_of(plan.units[u + 1], states);
      table.attend(args_, work, u + 1 < units ? &next : nullptr, scratch);
      expected = u + 1;
    }
  });
  if (plan.floats == 0) return;
  const int heads = args_.num_kv_heads;
  crew.for_each(static_cast<int64_t>(plan.tiles.size()) * heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Tile& tile = plan.tiles[i / heads];
      if (!tile.is_cut) continue;
      const Unit all{static_cast<int>(i / heads), static_cast<int>(i % heads), 1, tile.work.first_partition,
                     tile.work.end_partition};
      table.combine(args_, work_of(all, states), scratch);
    }
  });
}

}  // namespace quire
