// Choosing the token of a row, and reading log-probabilities of one. Operators: operators_sampling.cpp.
//
// One thread takes a row, or the crew shares its chunks; what is not done by chunks the first thread does alone. The
// order of tokens is one everywhere: value falling, then id rising.
#pragma once

#include "crew.h"
#include "sampling_kernels.h"

namespace quire {

// How a row draws. A temperature of 0 takes the best token.
struct Draw {
  float temperature;
  int64_t top_k;
  double top_p;
  float min_p;
  double uniform;
};

// Arrays over the chunks and the logits of a row. `shared` is of the threads that share the row, `own` of each one.
struct RowMemory {
  // Without memory it is known how much is needed.
  RowMemory(const LogitRow& row, char* shared, char* own);

  int64_t shared_bytes = 0, own_bytes = 0;
  float *maxima, *sums, *weights;
  float *bounds, *finer_maxima, *spare;
  double* masses;
  uint64_t *entries, *spare_entries;
};

class RowSampler {
 public:
  // `crew` is null if one thread has the row for itself; otherwise every thread makes the same calls.
  RowSampler(const LogitRow& row, const RowMemory& memory, Crew* crew);

  // The token and the greatest logit. A row with NaN gets the place of a NaN, one without finite logits any token.
  void choose(const Draw& draw, int64_t* token, float* greatest);
  // Log-probability and rank of the token, and the first `most` tokens of the order with their log-probabilities.
  void read_logprobs(int64_t token, int64_t most, float* logprob, int64_t* rank, int64_t* ids, float* logprobs);

 private:
  template <class Work> void over_chunks(Work work);
  bool is_first() const { return crew_ == nullptr || crew_->rank == 0; }
  int64_t begin_of(int64_t chunk) const { return chunk * chunk_; }
  int64_t end_of(int64_t chunk) const { return min64(row_.size, begin_of(chunk) + chunk_); }

  void find_maxima();
  int64_t best_token() const;
  int64_t rank_of(int64_t token, float value) const;
  void weigh_all(bool keep);
  const float* weights_of(int64_t chunk, float* room) const;
  int64_t collect_weights(float least, float limit);
  float bound_of(int64_t count) const;
  void find_first_logits(int64_t count);
  int64_t find_first_weights(int64_t count);

  int64_t draw_from_all(double uniform) const;
  int64_t draw_from_top_k(const Draw& draw);
  int64_t draw_from_top_p(const Draw& draw);
  int64_t draw_from_large_nucleus(double needed, double uniform);
  void fill_drawers();
  int64_t sorted_drawer(int drawer);

  const LogitRow row_;
  const RowMemory memory_;
  Crew* const crew_;
  const SamplingKernels& kernels_;
  const int64_t chunk_, num_chunks_;
  Weighing how_{};
  bool are_kept_ = false;  // the weights of all chunks
  float greatest_ = 0.0f;
};

}  // namespace quire
