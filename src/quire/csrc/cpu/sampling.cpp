// What the first thread makes of the chunks of a row; docs/sampling.md says how.

#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "oldest_libraries.h"

namespace quire {
namespace {

constexpr float INFINITE = std::numeric_limits<float>::infinity();
constexpr float LEAST_WEIGHT = std::numeric_limits<float>::denorm_min();
// A nucleus is looked for among so many tokens first.
constexpr int64_t SMALL_NUCLEUS = 256;
// Drawers of a large nucleus: exponent and some bits of mantissa of a weight from 0 to 1, 3 bits in small vocabularies
// and 6 in others.
constexpr int drawer_shift(int64_t vocab) { return vocab > (1 << 14) ? 17 : 20; }
constexpr int num_drawers(int64_t vocab) { return (0x3f800000 >> drawer_shift(vocab)) + 1; }
// Neighbours are added up in different tables: an addition need not wait for the one before it.
constexpr int TABLES = 4;
// More entries than this are sorted digit by digit.
constexpr int64_t FEW_ENTRIES = 256;
// exp need not rise strictly: weights as close as this may stand in the wrong order.
constexpr float SLACK = 1.000001f;

// At most the number just below the bound, so that a running sum always passes it.
double below(double value, double bound) { return std::min(value, std::nextafter(bound, 0.0)); }

// Into the order of tokens. The entries come in the order of ids; `spare` has room for as many.
void sort_entries(uint64_t* entries, uint64_t* spare, int64_t count) {
  if (count <= FEW_ENTRIES) return std::sort(entries, entries + count, std::greater<uint64_t>());
  // Digits of values alone, the lowest first: what is equal stays as it is.
  uint64_t *from = entries, *to = spare;
  for (int shift = 32; shift < 64; shift += 8) {
    const auto rank_of = [shift](uint64_t entry) { return 255 - (entry >> shift & 255); };
    int64_t places[257] = {};
    for (int64_t i = 0; i < count; ++i) ++places[rank_of(from[i]) + 1];
    if (places[rank_of(from[0]) + 1] == count) continue;
    for (int rank = 1; rank <= 256; ++rank) places[rank] += places[rank - 1];
    for (int64_t i = 0; i < count; ++i) to[places[rank_of(from[i])]++] = from[i];
    std::swap(from, to);
  }
  if (from != entries) std::copy(from, from + count, entries);
}

// The first `wanted` of the entries, or all if there are fewer, sorted; how many.
int64_t keep_first(uint64_t* entries, uint64_t* spare, int64_t count, int64_t wanted) {
  if (count <= std::max(FEW_ENTRIES, 2 * wanted)) {
    sort_entries(entries, spare, count);
    return std::min(count, wanted);
  }
  std::nth_element(entries, entries + wanted, entries + count, std::greater<uint64_t>());
  std::sort(entries, entries + wanted, std::greater<uint64_t>());
  return wanted;
}

// The n-th greatest value, counted from 1. `spare` has room for all.
float nth_greatest(const float* values, int64_t count, int64_t n, float* spare) {
  std::copy(values, values + count, spare);
  std::nth_element(spare, spare + n - 1, spare + count, std::greater<float>());
  return spare[n - 1];
}

// The sum of weights at which a share of them is reached; a share of 1 is never reached early.
double needed_for(double top_p, double total) { return top_p < 1.0 ? top_p * total : INFINITE; }

// The first entry at which the running sum, from `sum` on, reaches what is needed or is the last one.
int64_t last_needed(const uint64_t* entries, int64_t count, double needed, double* sum) {
  for (int64_t i = 0;; ++i) {
    *sum += value_of(entries[i]);
    if (*sum >= needed || i == count - 1) return i;
  }
}

// The token whose weight takes the running sum, from `sum` on, beyond the target.
int64_t token_at(const uint64_t* entries, int64_t count, double target, double sum) {
  int64_t i = 0;
  for (; i < count - 1; ++i) {
    sum += value_of(entries[i]);
    if (sum > target) break;
  }
  return id_of(entries[i]);
}

// Cuts the next array off a block of memory of which `used` bytes are taken.
template <class Item> void cut(char* memory, int64_t* used, Item** array, int64_t count) {
  if (memory != nullptr) *array = reinterpret_cast<Item*>(memory + *used);
  *used += round_up(count * static_cast<int64_t>(sizeof(Item)), 64);
}

}  // namespace

RowMemory::RowMemory(const LogitRow& row, char* shared, char* own) {
  const int64_t chunks = row.num_chunks();
  cut(shared, &shared_bytes, &maxima, chunks);
  cut(shared, &shared_bytes, &sums, chunks);
  cut(shared, &shared_bytes, &weights, row.size);
  cut(own, &own_bytes, &bounds, chunks);
  cut(own, &own_bytes, &finer_maxima, row.size / SMALL_CHUNK + 1);
  cut(own, &own_bytes, &spare, row.size / SMALL_CHUNK + 1);
  cut(own, &own_bytes, &masses, num_drawers(row.size) * TABLES);
  cut(own, &own_bytes, &entries, row.size);
  cut(own, &own_bytes, &spare_entries, row.size);
}

RowSampler::RowSampler(const LogitRow& row, const RowMemory& memory, Crew* crew)
    : row_(row),
      memory_(memory),
      crew_(crew),
      kernels_(*kernels()->sampling),
      chunk_(row.chunk),
      num_chunks_(row.num_chunks()) {}

template <class Work> void RowSampler::over_chunks(Work work) {
  if (crew_ == nullptr) return work(0, num_chunks_);
  crew_->for_each(num_chunks_, num_chunks_ / (4 * crew_->size) + 1, work);
}

void RowSampler::choose(const Draw& draw, int64_t* token, float* greatest) {
  find_maxima();
  if (is_first()) *greatest = greatest_;
  if (draw.temperature == 0.0f || !std::isfinite(greatest_)) {
    if (is_first()) *token = best_token();
    return;
  }
  how_ = {greatest_, draw.temperature, draw.min_p};
  kernels_.weigh_each(memory_.maxima, num_chunks_, how_, memory_.bounds);
  if (draw.top_k < row_.size) {
    if (is_first()) *token = draw_from_top_k(draw);
    return;
  }
  const bool has_top_p = draw.top_p < 1.0;
  weigh_all(has_top_p);
  if (is_first()) *token = has_top_p ? draw_from_top_p(draw) : draw_from_all(draw.uniform);
}

void RowSampler::read_logprobs(int64_t token, int64_t most, float* logprob, int64_t* rank, int64_t* ids,
                               float* logprobs) {
  find_maxima();
  if (!std::isfinite(greatest_)) {  // the row has no probabilities
    if (!is_first()) return;
    *logprob = NAN, *rank = 1;
    for (int64_t i = 0; i < most; ++i) ids[i] = i, logprobs[i] = NAN;
    return;
  }
  how_ = {greatest_, 1.0f, 0.0f};
  kernels_.weigh_each(memory_.maxima, num_chunks_, how_, memory_.bounds);
  weigh_all(false);
  if (!is_first()) return;
  double total = 0.0;
  for (int64_t c = 0; c < num_chunks_; ++c) total += memory_.sums[c];
  const double normaliser = greatest_ + std::log(total);
  float value;
  kernels_.widen(row_, token, token + 1, &value);
  *logprob = static_cast<float>(value - normaliser);
  *rank = rank_of(token, value);
  find_first_logits(most);
  for (int64_t i = 0; i < most; ++i) {
    ids[i] = id_of(memory_.entries[i]);
    logprobs[i] = static_cast<float>(value_of(memory_.entries[i]) - normaliser);
  }
}

void RowSampler::find_maxima() {
  over_chunks([&](int64_t begin, int64_t end) { kernels_.find_maxima(row_, begin, end, memory_.maxima + begin); });
  greatest_ = -INFINITE;
  for (int64_t c = 0; c < num_chunks_; ++c) {
    const float value = memory_.maxima[c];
    if (!(value <= greatest_)) greatest_ = value;
    if (std::isnan(value)) break;
  }
}

int64_t RowSampler::best_token() const {
  const auto is_best = [&](float value) { return value == greatest_ || (std::isnan(greatest_) && std::isnan(value)); };
  int64_t c = 0;
  while (!is_best(memory_.maxima[c])) ++c;
  float values[LARGE_CHUNK];
  kernels_.widen(row_, begin_of(c), end_of(c), values);
  int64_t i = 0;
  while (!is_best(values[i])) ++i;
  return begin_of(c) + i;
}

// One more than there are tokens before this one.
int64_t RowSampler::rank_of(int64_t token, float value) const {
  int64_t rank = 1;
  for (int64_t c = 0; c < num_chunks_; ++c) {
    if (memory_.maxima[c] < value) continue;
    const int64_t begin = begin_of(c), end = end_of(c), middle = std::clamp(token, begin, end);
    rank += kernels_.count_above(row_, begin, middle, value, true);
    rank += kernels_.count_above(row_, middle, end, value, false);
  }
  return rank;
}

void RowSampler::weigh_all(bool keep) {
  are_kept_ = keep;
  over_chunks([&](int64_t begin, int64_t end) {
    kernels_.weigh(row_, how_, begin, end, memory_.bounds + begin, memory_.sums + begin,
                   keep ? memory_.weights + begin_of(begin) : nullptr);
  });
}

// Those of a chunk whose bound is not 0, kept or computed into `room`.
const float* RowSampler::weights_of(int64_t c, float* room) const {
  if (are_kept_) return memory_.weights + begin_of(c);
  float sum;
  kernels_.weigh(row_, how_, c, c + 1, memory_.bounds + c, &sum, room);
  return room;
}

// Entries of the positive weights from `least` on and below `limit`, in the order of ids; how many.
int64_t RowSampler::collect_weights(float least, float limit) {
  least = std::max(least, LEAST_WEIGHT);
  float room[LARGE_CHUNK];
  int64_t found = 0;
  for (int64_t c = 0; c < num_chunks_; ++c) {
    if (memory_.bounds[c] == 0.0f || memory_.bounds[c] * SLACK < least) continue;
    const float* weights = weights_of(c, room);
    found += kernels_.collect(weights, end_of(c) - begin_of(c), least, limit, begin_of(c), memory_.entries + found);
  }
  return found;
}

// A logit that at least `count` logits are not below, by the greatest ones of chunks; -inf if there are too few chunks.
float RowSampler::bound_of(int64_t count) const {
  if (count <= num_chunks_) return nth_greatest(memory_.maxima, num_chunks_, count, memory_.spare);
  LogitRow finer = row_;
  finer.chunk = SMALL_CHUNK;
  if (count > finer.num_chunks()) return -INFINITE;
  kernels_.find_maxima(finer, 0, finer.num_chunks(), memory_.finer_maxima);
  return nth_greatest(memory_.finer_maxima, finer.num_chunks(), count, memory_.spare);
}

// The first `count` tokens by logit, sorted, as entries.
void RowSampler::find_first_logits(int64_t count) {
  if (count == 0) return;
  const float least = bound_of(count);
  float values[LARGE_CHUNK];
  int64_t found = 0;
  for (int64_t c = 0; c < num_chunks_; ++c) {
    if (memory_.maxima[c] < least) continue;
    const int64_t length = end_of(c) - begin_of(c);
    kernels_.widen(row_, begin_of(c), end_of(c), values);
    found += kernels_.collect(values, length, least, INFINITE, begin_of(c), memory_.entries + found);
  }
  keep_first(memory_.entries, memory_.spare_entries, found, count);
}

// The first `count` tokens by positive weight, sorted, as entries; how many there are.
int64_t RowSampler::find_first_weights(int64_t count) {
  const float bound = bound_of(count);
  float least;
  kernels_.weigh_each(&bound, 1, how_, &least);
  const int64_t found = collect_weights(least / SLACK, INFINITE);
  return keep_first(memory_.entries, memory_.spare_entries, found, count);
}

// In the order of ids: by chunks, then within one.
int64_t RowSampler::draw_from_all(double uniform) const {
  double total = 0.0;
  for (int64_t c = 0; c < num_chunks_; ++c) total += memory_.sums[c];
  const double target = below(uniform * total, total);
  double start = 0.0, end = 0.0;
  int64_t c = -1;
  do {
    start = end;
    end += memory_.sums[++c];
  } while (end <= target);
  float room[LARGE_CHUNK];
  const float* weights = weights_of(c, room);
  const int64_t length = end_of(c) - begin_of(c);
  // The sum of a chunk in float32 and that in float64 differ a little: go on with the share of the chunk.
  double inner = 0.0, sum = 0.0;
  for (int64_t i = 0; i < length; ++i) inner += weights[i];
  const double inner_target = below((target - start) / (end - start) * inner, inner);
  int64_t i = -1;
  do sum += weights[++i];
  while (sum <= inner_target);
  return begin_of(c) + i;
}

// Of the first top_k tokens, as few as reach the share top_p of their sum.
int64_t RowSampler::draw_from_top_k(const Draw& draw) {
  are_kept_ = false;
  const int64_t count = find_first_weights(draw.top_k);
  double total = 0.0, sum = 0.0;
  for (int64_t i = 0; i < count; ++i) total += value_of(memory_.entries[i]);
  const int64_t last = last_needed(memory_.entries, count, needed_for(draw.top_p, total), &sum);
  return token_at(memory_.entries, last + 1, below(draw.uniform * sum, sum), 0.0);
}

// As few tokens as reach the share top_p of all: a few in most cases.
int64_t RowSampler::draw_from_top_p(const Draw& draw) {
  const int64_t count = find_first_weights(std::min(SMALL_NUCLEUS, num_chunks_));
  double total = 0.0, sum = 0.0;
  for (int64_t c = 0; c < num_chunks_; ++c) total += memory_.sums[c];
  const double needed = needed_for(draw.top_p, total);
  const int64_t last = last_needed(memory_.entries, count, needed, &sum);
  if (sum < needed) return draw_from_large_nucleus(needed, draw.uniform);
  return token_at(memory_.entries, last + 1, below(draw.uniform * sum, sum), 0.0);
}

// Without sorting all: weights are added up by drawers, and only the one in which the nucleus ends and the one that the
// number falls into are looked at one by one.
int64_t RowSampler::draw_from_large_nucleus(double needed, double uniform) {
  fill_drawers();
  // The drawer with which the running sum passes a limit or, as the case may be by rounding, the last one that holds
  // something.
  const auto find = [&](auto is_reached, double* before) {
    double sum = 0.0;
    int found = 0;
    for (int drawer = num_drawers(row_.size); drawer-- > 0;) {
      const double* part = memory_.masses + drawer * TABLES;
      const double mass = (part[0] + part[1]) + (part[2] + part[3]);
      if (mass == 0.0) continue;
      found = drawer, *before = sum, sum += mass;
      if (is_reached(sum)) break;
    }
    return found;
  };
  double before_last = 0.0, before = 0.0;
  const int last_drawer = find([&](double sum) { return sum >= needed; }, &before_last);
  int64_t count = sorted_drawer(last_drawer);
  double nucleus = before_last;
  count = last_needed(memory_.entries, count, needed, &nucleus) + 1;
  const double target = below(uniform * nucleus, nucleus);
  const int drawer = find([&](double sum) { return sum > target; }, &before);
  if (drawer <= last_drawer) return token_at(memory_.entries, count, target, before_last);
  count = sorted_drawer(drawer);
  return token_at(memory_.entries, count, target, before);
}

void RowSampler::fill_drawers() {
  const int shift = drawer_shift(row_.size);
  std::fill(memory_.masses, memory_.masses + num_drawers(row_.size) * TABLES, 0.0);
  for (int64_t c = 0; c < num_chunks_; ++c) {
    if (memory_.bounds[c] == 0.0f) continue;
    const float* weights = memory_.weights + begin_of(c);
    const int64_t length = end_of(c) - begin_of(c);
    for (int64_t i = 0; i < length; ++i) {
      int32_t bits;
      __builtin_memcpy(&bits, weights + i, sizeof(bits));
      memory_.masses[(bits >> shift) * TABLES + i % TABLES] += weights[i];
    }
  }
}

// The entries of a drawer in the order of tokens; how many.
int64_t RowSampler::sorted_drawer(int drawer) {
  const auto least_of = [&](int of) {
    const int32_t bits = of << drawer_shift(row_.size);
    float weight;
    __builtin_memcpy(&weight, &bits, sizeof(weight));
    return weight;
  };
  const int64_t count = collect_weights(least_of(drawer), least_of(drawer + 1));
  sort_entries(memory_.entries, memory_.spare_entries, count);
  return count;
}

}  // namespace quire
