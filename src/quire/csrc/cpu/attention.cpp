// Paged attention: hands the work of a plan to the threads.

#include "attention.h"

#include <stdexcept>
#include <string>

namespace quire {
namespace {

void check_below(int64_t limit, int64_t value, const char* what, int64_t sequence) {
  if (value >= 0 && value < limit) return;
  throw std::runtime_error("sequence " + std::to_string(sequence) + ": " + what + " " + std::to_string(value) +
                           " is not in [0, " + std::to_string(limit) + ")");
}

// Units [begin, end) of the plan, on all threads.
void attend(const AttentionArgs& args, const AttentionPlan& plan, int64_t begin, int64_t end, float* states,
            float* scratch, Crew& crew) {
  const auto& units = plan.units();
  int64_t expected = -1;
  crew.for_each(end - begin, 1, [&](int64_t first, int64_t last) {
    for (int64_t u = begin + first; u < begin + last; ++u) {
      Work work = plan.work_of(units[u], states), next{};
      work.follows = u == expected;
      // Most likely this thread takes it: the end of one unit fetches the keys of the next.
      if (u + 1 < end) next = plan.work_of(units[u + 1], states);
      kernels()->attention->attend(args, work, u + 1 < end ? &next : nullptr, scratch);
      expected = u + 1;
    }
  });
}

}  // namespace

AttentionStep::AttentionStep(const AttentionArgs& args, std::vector<float> sinks, std::vector<float> slopes,
                             std::vector<float> bias)
    : args_(args), sinks_(std::move(sinks)), slopes_(std::move(slopes)), bias_(std::move(bias)) {
  args_.sinks = sinks_.empty() ? nullptr : sinks_.data();
  args_.slopes = slopes_.empty() ? nullptr : slopes_.data();
  args_.bias = bias_.empty() ? nullptr : bias_.data();
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
  const int64_t capacity = args_.blocks_in_row * args_.block_size * args_.share.size;
  for (int64_t s = 0; s < extent.sequences; ++s) {
    const int64_t begin = args_.query_starts[s], end = args_.query_starts[s + 1], length = args_.seq_lens[s];
    if (end <= begin) continue;
    check_below(extent.tokens, begin, "row", s);
    check_below(extent.tokens, end - 1, "row", s);
    if (length > capacity) {
      throw std::runtime_error("sequence " + std::to_string(s) + ": length " + std::to_string(length) +
                               " is longer than its " + std::to_string(capacity) + " slots");
    }
    check_ends(s);
    const int64_t row = s * args_.table_stride, first = first_visible(args_, s, length - (end - begin));
    for (int64_t i = first / args_.block_size; i * args_.block_size < args_.share.below(length); ++i) {
      check_below(args_.num_blocks, args_.block_tables[row + i], "block", s);
    }
  }
}

// Each token sees itself, nothing that is not there, and no less than the one before it.
void AttentionStep::check_ends(int64_t sequence) const {
  if (args_.ends.data == nullptr) return;
  const int64_t begin = args_.query_starts[sequence], end = args_.query_starts[sequence + 1];
  const int64_t length = args_.seq_lens[sequence];
  int64_t least = 0;
  for (int64_t t = begin; t < end; ++t) {
    least = max64(least, length - end + t + 1);
    const int64_t seen = args_.ends[t];
    if (seen < least || seen > length) {
      throw std::runtime_error("sequence " + std::to_string(sequence) + ": a token sees " + std::to_string(seen) +
                               " keys, which must be from " + std::to_string(least) + " to " + std::to_string(length));
    }
    least = seen;
  }
}

void AttentionStep::run(const Extent& extent, Crew& crew) const {
  if (crew.rank == 0) plan_.make(args_, extent, crew.size);
  crew.barrier();
  const AttentionPlan& plan = plan_;
  float* const scratch = static_cast<float*>(thread_scratch(scratch_floats(args_) * sizeof(float)));
  float* states = nullptr;
  if (plan.num_floats() > 0) states = static_cast<float*>(crew.shared_scratch(plan.num_floats() * sizeof(float)));
  const int64_t num_shared = plan.num_shared_units();
  if (num_shared > 0) attend(args_, plan, 0, num_shared, states, scratch, crew);
  attend(args_, plan, num_shared, static_cast<int64_t>(plan.units().size()), states, scratch, crew);
  if (plan.num_floats() == 0) return;
  const int heads = args_.num_kv_heads;
  crew.for_each(plan.num_tiles() * heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (!plan.is_cut(i / heads)) continue;
      kernels()->attention->combine(args_, plan.whole(i / heads, static_cast<int>(i % heads), states), scratch);
    }
  });
}

}  // namespace quire
