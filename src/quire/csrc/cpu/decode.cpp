// A step of decoding in one call: rows with one token to compute get the next one.
//
// Between two programs an interpreter takes a millisecond on a processor whose caches have just seen a whole model: most
// of what it touches comes from memory. Here nothing is between them.

#include <algorithm>
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

void gather(const DecodeArgs& args) {
  for (int64_t i = 0; i < args.num_rows; ++i) {
    const int64_t row = args.rows[i], position = args.num_computed[row];
    args.input_ids[i] = args.token_ids[row * args.token_stride + position];
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

// Whether all have a token now.
bool decode(const DecodeArgs& args) {
  if (!has_one_token_each(args)) return false;
  const int64_t n = args.num_rows;
  gather(args);
  args.forward->run({n, n}, std::nullopt);
  std::memcpy(args.hidden_of_logits, args.hidden, n * args.hidden_bytes);
  args.logits->run({n, 0}, std::nullopt);
  args.choice->run({n, n}, std::nullopt);
  return std::all_of(args.greatest, args.greatest + n, [](float logit) { return std::isfinite(logit); });
}

}  // namespace
}  // namespace quire

extern "C" __attribute__((visibility("default"))) const char* quire_decode(const void* args, bool* are_chosen) {
  return quire::error_of([&] { *are_chosen = quire::decode(*static_cast<const quire::DecodeArgs*>(args)); });
}
