#pragma once

#include "kernels.h"

namespace quire {

struct Batch {
  int num_sequences;
  const int64_t* seq_lens;
  const int64_t* query_starts;
};

void paged_attention(const AttentionArgs& args, const Batch& batch, int max_threads);

}  // namespace quire
