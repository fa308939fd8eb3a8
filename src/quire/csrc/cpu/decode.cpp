// A step of decoding in one call: rows with one token to compute get the next one, or several.
//
// Between two programs an interpreter takes a millisecond on a processor whose caches have just seen a whole model: most
// of what it touches comes from memory. Here nothing is between them. And between two steps all threads of the engine
// take as much again, which tokens of one call have once for all of them.

#include <poll.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

#include "program.h"

namespace quire {
namespace {

// Of a group of attention layers: its tables over all rows, and the inputs of its layers.
struct DecodeGroup {
  const int32_t* tables;
  int64_t table_stride;
  int32_t* batch_tables;
  int64_t batch_table_stride;
  int64_t* slots;
  int32_t *lengths, *starts;
};

// worker/kernels/cpu/decode.py has the same fields in the same order, eight bytes each.
struct DecodeArgs {
  int64_t num_rows;
  const int64_t* rows;
  // of all rows
  const int32_t* token_ids;
  int64_t token_stride;
  const int64_t *num_computed, *num_total;
  const bool* is_written;
  const int32_t* adapter_slots;
  // tokens that a row may have in all, and those of which each ends it, `num_stops` a row
  const int64_t* most_total;
  const int32_t* stops;
  int64_t num_stops;
  // what the model reads
  int64_t *input_ids, *positions;
  int32_t* batch_adapter_slots;
  int64_t block_size;
  // from inputs to hidden states, from these to logits, and from these to tokens
  const Program *forward, *logits, *choice;
  const char* hidden;
  char* hidden_of_logits;
  int64_t hidden_bytes;  // of a row
  const float* greatest;
  const int64_t* tokens;
  // how the choice draws the token of each row, and the numbers for one token of each row after the other; or null
  double* uniform;
  const double* uniforms;
  // where tokens go: those of all rows, one of each after the other
  int64_t* chosen;
  // a file that can be read when somebody waits for the end of the call; or -1
  int64_t arrivals;
  int64_t num_groups;
  const DecodeGroup* groups;
};

// Tables are read before the programs check what they are given: a position behind their ends is not for here.
bool has_one_token_each(const DecodeArgs& args) {
  for (int64_t i = 0; i < args.num_rows; ++i) {
    const int64_t row = args.rows[i], position = args.num_computed[row];
    if (args.num_total[row] != position + 1 || args.is_written[row]) return false;
    for (int64_t g = 0; g < args.num_groups; ++g) {
      if (position / args.block_size >= args.groups[g].batch_table_stride) return false;
    }
  }
  return true;
}

// The token that a row computes when it has got so many in this call.
int64_t token_of(const DecodeArgs& args, int64_t i, int64_t num_chosen) {
  const int64_t row = args.rows[i];
  if (num_chosen > 0) return args.chosen[(num_chosen - 1) * args.num_rows + i];
  return args.token_ids[row * args.token_stride + args.num_computed[row]];
}

void gather(const DecodeArgs& args, int64_t num_chosen) {
  for (int64_t i = 0; i < args.num_rows; ++i) {
    const int64_t row = args.rows[i], position = args.num_computed[row] + num_chosen;
    args.input_ids[i] = token_of(args, i, num_chosen);
    args.positions[i] = position;
    args.batch_adapter_slots[i] = args.adapter_slots[row];
    const int64_t block = position / args.block_size;
    for (int64_t g = 0; g < args.num_groups; ++g) {
      const DecodeGroup& group = args.groups[g];
      const int32_t* table = group.tables + row * group.table_stride;
      std::memcpy(group.batch_tables + i * group.batch_table_stride, table, (block + 1) * sizeof(int32_t));
      group.slots[i] = table[block] * args.block_size + position % args.block_size;
      group.lengths[i] = static_cast<int32_t>(position + 1);
      group.starts[i + 1] = static_cast<int32_t>(i + 1);
    }
  }
}

// Whether each row may get another token when it has got so many. Not behind one that ends it: whoever runs the rows is
// to hear of that. And the last place of a block stays free: the next step may have been decided before this one
// answers, as if it brought one token, and with that place it needs no other block.
bool may_go_on(const DecodeArgs& args, int64_t num_chosen) {
  for (int64_t i = 0; i < args.num_rows; ++i) {
    const int64_t row = args.rows[i], position = args.num_computed[row] + num_chosen;
    if (position + 1 >= args.most_total[row]) return false;
    const int64_t place = position % args.block_size;
    if (num_chosen > 0 && (place == 0 || place == args.block_size - 1)) return false;
    const int32_t* stops = args.stops + row * args.num_stops;
    if (std::find(stops, stops + args.num_stops, token_of(args, i, num_chosen)) != stops + args.num_stops) return false;
  }
  return true;
}

bool is_awaited(const DecodeArgs& args) {
  pollfd file{static_cast<int>(args.arrivals), POLLIN, 0};
  return poll(&file, 1, 0) > 0;
}

// Whether all have a token more.
bool choose(const DecodeArgs& args, int64_t num_chosen) {
  const int64_t n = args.num_rows;
  gather(args, num_chosen);
  if (args.uniform != nullptr) std::memcpy(args.uniform, args.uniforms + num_chosen * n, n * sizeof(double));
  args.forward->run({n, n}, std::nullopt);
  std::memcpy(args.hidden_of_logits, args.hidden, n * args.hidden_bytes);
  args.logits->run({n, 0}, std::nullopt);
  args.choice->run({n, n}, std::nullopt);
  std::memcpy(args.chosen + num_chosen * n, args.tokens, n * sizeof(int64_t));
  return std::all_of(args.greatest, args.greatest + n, [](float logit) { return std::isfinite(logit); });
}

// How many tokens each row has got: at most so many, and more than one only as long as they take so little time and
// nobody waits.
int64_t decode(const DecodeArgs& args, int64_t most, int64_t nanoseconds) {
  using Clock = std::chrono::steady_clock;
  if (!has_one_token_each(args)) return 0;
  const Clock::time_point start = Clock::now();
  const bool goes_on = may_go_on(args, 0);
  int64_t num_chosen = 0;
  Clock::duration longest{};
  for (Clock::time_point before = start;;) {
    if (!choose(args, num_chosen)) return num_chosen;
    if (++num_chosen == most || !goes_on || !may_go_on(args, num_chosen)) return num_chosen;
    const Clock::time_point now = Clock::now();
    longest = std::max(longest, now - before);
    before = now;
    if (now - start + longest > std::chrono::nanoseconds(nanoseconds) || is_awaited(args)) return num_chosen;
  }
}

}  // namespace
}  // namespace quire

extern "C" __attribute__((visibility("default"))) const char* quire_decode(const void* args, int64_t most,
                                                                          int64_t nanoseconds, int64_t* num_chosen) {
  return quire::error_of(
      [&] { *num_chosen = quire::decode(*static_cast<const quire::DecodeArgs*>(args), most, nanoseconds); });
}
