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

int64_t num_rows(const QueryTile& tile) { return tile.num_tokens * tile.num_heads; }

Work of_head(Work work, int kv_head) {
  work.tile.kv_head = kv_head;
  return work;
}

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
  plan_.tiles.clear();
  const int heads_at_once = static_cast<int>(min64(args_.group_size, MAX_ROWS));
  const int64_t tokens_at_once = max64(1, MAX_ROWS / heads_at_once);
  double cost = 0;
  for (int64_t s = 0; s < sequences; ++s) {
    const int64_t begin = args_.query_starts[s], count = args_.query_starts[s + 1] - begin;
    if (count <= 0) continue;
    const int64_t first_position = args_.seq_lens[s] - count;
    for (int head = 0; head < args_.group_size; head += heads_at_once) {
      // The last tokens first: they see the longest context, and short pieces at the end keep all threads busy.
      for (int64_t t = (count - 1) / tokens_at_once * tokens_at_once; t >= 0; t -= tokens_at_once) {
        Piece piece{};
        QueryTile& tile = piece.work.tile;
        tile = {static_cast<int>(s), 0, head, static_cast<int>(min64(heads_at_once, args_.group_size - head)),
                begin + t, min64(tokens_at_once, count - t), first_position + t};
        const int64_t first = first_visible(args_, tile), end = tile.first_position + tile.num_tokens;
        piece.work.first_partition = first / PARTITION;
        piece.work.end_partition = max64(piece.work.first_partition, (end + PARTITION - 1) / PARTITION);
        // Even a single row costs the packing of its keys: about as much as four rows more.
        piece.cost = static_cast<double>(max64(0, end - first)) * static_cast<double>(num_rows(tile) + 4);
        piece.partials = -1;
        cost += piece.cost;
        plan_.tiles.push_back(piece);
      }
    }
  }
  // Four pieces a thread even out what one thread loses to others on the machine.
  cut(threads == 1 ? cost + 1 : cost * args_.num_kv_heads / (4.0 * threads) + 1);
}

// Cuts tiles of more than `share` into pieces.
void AttentionStep::cut(double share) const {
  plan_.pieces.clear();
  plan_.floats = 0;
  for (Piece& tile : plan_.tiles) {
    const int64_t begin = tile.work.first_partition, count = tile.work.end_partition - begin;
    const int64_t num_pieces = min64(count, static_cast<int64_t>(tile.cost / share) + 1);
    if (num_pieces <= 1) {
      plan_.pieces.push_back(tile);
      continue;
    }
    const int64_t size = partial_floats(args_, num_rows(tile.work.tile));
    tile.partials = plan_.floats, tile.stride = count * size;
    plan_.floats += tile.stride * args_.num_kv_heads;
    for (int64_t p = 0; p < num_pieces; ++p) {
      Piece piece = tile;
      const int64_t first = count * p / num_pieces, end = count * (p + 1) / num_pieces;
      piece.work.first_partition = begin + first, piece.work.end_partition = begin + end;
      piece.partials = tile.partials + first * size;
      plan_.pieces.push_back(piece);
    }
  }
}

void AttentionStep::run(const Extent& extent, Crew& crew) const {
  if (crew.rank == 0) make_plan(extent.sequences, crew.size);
  crew.barrier();
  const KernelTable& table = *kernels();
  const Plan& plan = plan_;
  float* const scratch = static_cast<float*>(thread_scratch(scratch_floats(args_) * sizeof(float)));
  float* partials = nullptr;
  if (plan.floats > 0) partials = static_cast<float*>(crew.shared_scratch(plan.floats * sizeof(float)));
  const int heads = args_.num_kv_heads;
  const int64_t units = static_cast<int64_t>(plan.pieces.size()) * heads;
  crew.for_each(units, 1, [&](int64_t begin, int64_t end) {
    for (int64_t u = begin; u < end; ++u) {
      const Piece& piece = plan.pieces[u / heads];
      const int kv_head = static_cast<int>(u % heads);
      const Work work = of_head(piece.work, kv_head);
      Work next{};
      // Most likely this thread takes it: the end of one unit fetches the keys of the next.
      if (u + 1 < units) next = of_head(plan.pieces[(u + 1) / heads].work, static_cast<int>((u + 1) % heads));
      float* const to = piece.partials < 0 ? nullptr : partials + piece.partials + kv_head * piece.stride;
      table.attend(args_, work, u + 1 < units ? &next : nullptr, scratch, to);
    }
  });
  if (plan.floats == 0) return;
  crew.for_each(static_cast<int64_t>(plan.tiles.size()) * heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Piece& tile = plan.tiles[i / heads];
      if (tile.partials < 0) continue;
      const Work all = of_head(tile.work, static_cast<int>(i % heads));
      table.combine(args_, all.tile, all.end_partition - all.first_partition, scratch,
                    partials + tile.partials + all.tile.kv_head * tile.stride);
    }
  });
}

}  // namespace quire
