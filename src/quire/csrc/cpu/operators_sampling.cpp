// Operators on rows of logits: tokens and log-probabilities.

#include <algorithm>
#include <limits>

#include "operators.h"
#include "sampling.h"

namespace quire {
namespace {

// Calls work(sampler, i) for every row: each thread takes rows, or all share them one by one if there are too few.
template <class Work> class RowsStep final : public Step {
 public:
  RowsStep(const Tensor& logits, const std::optional<Tensor>& rows, int64_t passes, Work work)
      : logits_(logits), dtype_(dtype_of(logits)), vocab_(logits.size(1)), passes_(passes), work_(work) {
    if (rows.has_value()) rows_.emplace(*rows, "rows");
    count_ = rows.has_value() ? rows->size(0) : logits.size(0);
    for (int64_t i = 0; i < count_; ++i) {
      STD_TORCH_CHECK(row_of(i) >= 0 && row_of(i) < logits.size(0), "row ", row_of(i), " is not in ", logits.size(0));
    }
  }

  int64_t count() const { return count_; }
  int64_t work(const Extent& extent) const override { return extent.tokens * vocab_ * passes_ / 4; }

  void run(const Extent& extent, Crew& crew) const override {
    const RowMemory needed(at(0), nullptr, nullptr);
    const int64_t count = extent.tokens;
    if (count >= crew.size) {
      char* memory = static_cast<char*>(thread_scratch(needed.shared_bytes + needed.own_bytes));
      const RowMemory room(at(0), memory, memory + needed.shared_bytes);
      return crew.for_each(count, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) sample(i, room, nullptr);
      });
    }
    char* shared = static_cast<char*>(crew.shared_scratch(needed.shared_bytes));
    const RowMemory room(at(0), shared, static_cast<char*>(thread_scratch(needed.own_bytes)));
    for (int64_t i = 0; i < count; ++i) {
      sample(i, room, &crew);
      crew.barrier();
    }
  }

 private:
  int64_t row_of(int64_t i) const { return rows_.has_value() ? rows_->data()[i] : i; }

  LogitRow at(int64_t i) const {
    const int64_t bytes = dtype_ == DType::float32 ? 4 : 2;
    const char* logits = static_cast<const char*>(logits_.const_data_ptr());
    return {dtype_, logits + row_of(i) * logits_.stride(0) * bytes, vocab_, chunk_for(vocab_)};
  }

  void sample(int64_t i, const RowMemory& room, Crew* crew) const {
    RowSampler sampler(at(i), room, crew);
    work_(sampler, i);
  }

  const Tensor logits_;
  const DType dtype_;
  const int64_t vocab_, passes_;
  const Work work_;
  std::optional<Integers> rows_;
  int64_t count_ = 0;
};

// `passes`: how much is done with a logit; 1 is to look at it.
template <class Work>
void over_rows(const Tensor& logits, const std::optional<Tensor>& rows, int64_t passes, Work work) {
  auto step = std::make_unique<RowsStep<Work>>(logits, rows, passes, work);
  const int64_t count = step->count();
  if (count > 0) perform(std::move(step), Extent{count, count});
}

int64_t check_logits(const Tensor& logits, const std::optional<Tensor>& rows) {
  check_rows(logits, 2, "logits");
  STD_TORCH_CHECK(logits.size(1) > 0 && logits.size(1) < (int64_t{1} << 31), "logits: from 1 to 2**31 - 1 tokens");
  return rows.has_value() ? rows->size(0) : logits.size(0);
}

template <class Item> const Item* column(const Tensor& t, ScalarType dtype, int64_t count, const char* name) {
  STD_TORCH_CHECK(t.dim() == 1 && t.size(0) == count && t.scalar_type() == dtype && t.is_contiguous(), name,
                  " must be a contiguous vector with an entry for each row");
  return static_cast<const Item*>(t.const_data_ptr());
}

std::tuple<Tensor, Tensor> best_tokens_op(const Tensor& logits, const std::optional<Tensor>& rows) {
  const int64_t count = check_logits(logits, rows);
  Tensor tokens = empty({count}, ScalarType::Long), greatest = empty({count}, ScalarType::Float);
  int64_t* token = static_cast<int64_t*>(tokens.mutable_data_ptr());
  float* top = static_cast<float*>(greatest.mutable_data_ptr());
  over_rows(logits, rows, 1, [=](RowSampler& sampler, int64_t i) { sampler.choose(Draw{}, token + i, top + i); });
  return {tokens, greatest};
}

std::tuple<Tensor, Tensor> choose_tokens_op(const Tensor& logits, const std::optional<Tensor>& rows,
                                            const Tensor& temperature, const Tensor& top_k, const Tensor& top_p,
                                            const Tensor& min_p, const Tensor& uniform) {
  const int64_t count = check_logits(logits, rows);
  const float* temperatures = column<float>(temperature, ScalarType::Float, count, "temperature");
  const int64_t* top_ks = column<int64_t>(top_k, ScalarType::Long, count, "top_k");
  const double* top_ps = column<double>(top_p, ScalarType::Double, count, "top_p");
  const float* min_ps = column<float>(min_p, ScalarType::Float, count, "min_p");
  const double* uniforms = column<double>(uniform, ScalarType::Double, count, "uniform");
  for (int64_t i = 0; i < count; ++i) {  // anything else could leave no token with a weight
    STD_TORCH_CHECK(temperatures[i] == 0.0f || temperatures[i] > 1e-30f, "temperature must be 0 or above 1e-30");
    STD_TORCH_CHECK(top_ks[i] > 0, "top_k must be positive");
    STD_TORCH_CHECK(min_ps[i] <= 1.0f, "min_p must not be above 1");
  }
  Tensor tokens = empty({count}, ScalarType::Long), greatest = empty({count}, ScalarType::Float);
  int64_t* token = static_cast<int64_t*>(tokens.mutable_data_ptr());
  float* top = static_cast<float*>(greatest.mutable_data_ptr());
  over_rows(logits, rows, 8, [=](RowSampler& sampler, int64_t i) {
    sampler.choose(Draw{temperatures[i], top_ks[i], top_ps[i], min_ps[i], uniforms[i]}, token + i, top + i);
  });
  return {tokens, greatest};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> token_logprobs_op(const Tensor& logits, const std::optional<Tensor>& rows,
                                                             const Tensor& tokens, int64_t most) {
  const int64_t count = check_logits(logits, rows), vocab = logits.size(1);
  const int64_t* token = column<int64_t>(tokens, ScalarType::Long, count, "tokens");
  for (int64_t i = 0; i < count; ++i) {
    STD_TORCH_CHECK(token[i] >= 0 && token[i] < vocab, "token ", token[i], " is not in a vocabulary of ", vocab);
  }
  STD_TORCH_CHECK(most >= 0 && most <= vocab, "most must be between 0 and the vocabulary");
  Tensor chosen = empty({count}, ScalarType::Float), ranks = empty({count}, ScalarType::Long);
  Tensor best = empty({count, most}, ScalarType::Long), values = empty({count, most}, ScalarType::Float);
  float* logprob = static_cast<float*>(chosen.mutable_data_ptr());
  int64_t* rank = static_cast<int64_t*>(ranks.mutable_data_ptr());
  int64_t* ids = static_cast<int64_t*>(best.mutable_data_ptr());
  float* logprobs = static_cast<float*>(values.mutable_data_ptr());
  over_rows(logits, rows, 8, [=](RowSampler& sampler, int64_t i) {
    sampler.read_logprobs(token[i], most, logprob + i, rank + i, ids + i * most, logprobs + i * most);
  });
  return {chosen, ranks, best, values};
}

class GatherStep final : public Step {
 public:
  GatherStep(const Tensor& logits, const Tensor& rows, const Tensor& out)
      : logits_(logits), out_(out), dtype_(dtype_of(logits)), count_(out.size(0)), vocab_(out.size(1)) {
    rows_ = column<int64_t>(rows, ScalarType::Long, count_, "rows");
    for (int64_t i = 0; i < count_; ++i) {
      STD_TORCH_CHECK(rows_[i] >= 0 && rows_[i] < logits.size(0), "row ", rows_[i], " is not in ", logits.size(0));
    }
  }

  int64_t work(const Extent&) const override { return count_ * vocab_; }
  void run(const Extent&, Crew& crew) const override {
    const int64_t bytes = dtype_ == DType::float32 ? 4 : 2;
    crew.for_each(count_, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const char* logits = static_cast<const char*>(logits_.const_data_ptr()) + rows_[i] * logits_.stride(0) * bytes;
        float* out = static_cast<float*>(out_.mutable_data_ptr()) + i * out_.stride(0);
        kernels()->sampling->widen({dtype_, logits, vocab_, vocab_}, 0, vocab_, out);
      }
    });
  }

 private:
  const Tensor logits_, out_;
  const DType dtype_;
  const int64_t count_, vocab_;
  const int64_t* rows_;
};

void gather_logits_op(const Tensor& logits, const Tensor& rows, const Tensor& out) {
  check_rows(logits, 2, "logits");
  check_rows(out, 2, "out");
  STD_TORCH_CHECK(out.scalar_type() == ScalarType::Float && out.size(1) == logits.size(1),
                  "out must be float32 and as wide as the logits");
  const int64_t count = out.size(0);
  if (count > 0) perform(std::make_unique<GatherStep>(logits, rows, out), Extent{count, count});
}

// Excludes the tokens of rows whose bit is not set; in place.
class BitmaskStep final : public Step {
 public:
  BitmaskStep(const Tensor& logits, const Tensor& rows, const Tensor& mask)
      : logits_(logits), mask_(mask), count_(mask.size(0)), words_(mask.size(1)), vocab_(logits.size(1)) {
    rows_ = column<int64_t>(rows, ScalarType::Long, count_, "rows");
    for (int64_t i = 0; i < count_; ++i) {
      STD_TORCH_CHECK(rows_[i] >= 0 && rows_[i] < logits.size(0), "row ", rows_[i], " is not in ", logits.size(0));
    }
  }

  int64_t work(const Extent&) const override { return count_ * vocab_ / 4; }
  void run(const Extent&, Crew& crew) const override {
    crew.for_each(count_, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) exclude(i);
    });
  }

 private:
  void exclude(int64_t i) const {
    const uint32_t* mask = static_cast<const uint32_t*>(mask_.const_data_ptr()) + i * mask_.stride(0);
    float* logits = static_cast<float*>(logits_.mutable_data_ptr()) + rows_[i] * logits_.stride(0);
    constexpr float never = -std::numeric_limits<float>::infinity();
    for (int64_t first = 0; first < vocab_; first += 32) {
      const uint32_t word = first / 32 < words_ ? mask[first / 32] : 0;
      const int64_t size = std::min<int64_t>(32, vocab_ - first);
      if (word == 0) std::fill(logits + first, logits + first + size, never);
      if (word == 0 || word == ~uint32_t{0}) continue;
      for (int64_t bit = 0; bit < size; ++bit) {
        if ((word >> bit & 1) == 0) logits[first + bit] = never;
      }
    }
  }

  const Tensor logits_, mask_;
  const int64_t count_, words_, vocab_;
  const int64_t* rows_;
};

void apply_bitmask_op(const Tensor& logits, const Tensor& rows, const Tensor& mask) {
  check_rows(logits, 2, "logits");
  check_rows(mask, 2, "mask");
  STD_TORCH_CHECK(logits.scalar_type() == ScalarType::Float && mask.scalar_type() == ScalarType::Int,
                  "logits must be float32 and the mask int32");
  const int64_t count = mask.size(0);
  if (count > 0) perform(std::make_unique<BitmaskStep>(logits, rows, mask), Extent{count, count});
}

// Penalties on what the rows of a table of tokens have said; in place.
class PenaltyStep final : public Step {
 public:
  PenaltyStep(const Tensor& logits, const Tensor& tokens, const Tensor& rows, const Tensor& num_prompt,
              const Tensor& lengths, const Tensor& repetition, const Tensor& frequency, const Tensor& presence)
      : logits_(logits), tokens_(tokens), count_(logits.size(0)) {
    check_rows(logits, 2, "logits");
    check_rows(tokens, 2, "tokens");
    STD_TORCH_CHECK(logits.scalar_type() == ScalarType::Float && tokens.scalar_type() == ScalarType::Int,
                    "logits must be float32 and tokens int32");
    rows_ = column<int64_t>(rows, ScalarType::Long, count_, "rows");
    num_prompt_ = column<int64_t>(num_prompt, ScalarType::Long, count_, "num_prompt");
    lengths_ = column<int64_t>(lengths, ScalarType::Long, count_, "lengths");
    repetition_ = column<float>(repetition, ScalarType::Float, count_, "repetition");
    frequency_ = column<float>(frequency, ScalarType::Float, count_, "frequency");
    presence_ = column<float>(presence, ScalarType::Float, count_, "presence");
    for (int64_t i = 0; i < count_; ++i) {
      STD_TORCH_CHECK(rows_[i] >= 0 && rows_[i] < tokens.size(0), "row ", rows_[i], " is not in ", tokens.size(0));
      STD_TORCH_CHECK(lengths_[i] >= 0 && lengths_[i] <= tokens.size(1), "a row has no ", lengths_[i], " tokens");
      STD_TORCH_CHECK(num_prompt_[i] >= 0, "a prompt has no ", num_prompt_[i], " tokens");
      num_tokens_ += lengths_[i];
    }
  }

  int64_t count() const { return count_; }
  int64_t work(const Extent&) const override { return num_tokens_ * 16; }
  void run(const Extent&, Crew& crew) const override {
    crew.for_each(count_, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) penalise(i);
    });
  }

 private:
  struct Said {
    int32_t token, count;
  };

  void penalise(int64_t i) const {
    if (repetition_[i] == 1.0f && frequency_[i] == 0.0f && presence_[i] == 0.0f) return;
    const int32_t* tokens = static_cast<const int32_t*>(tokens_.const_data_ptr()) + rows_[i] * tokens_.stride(0);
    // A hash table, at most half full; -1 is no token.
    int64_t size = 64;
    while (size < 2 * lengths_[i]) size *= 2;
    Said* table = static_cast<Said*>(thread_scratch(size * static_cast<int64_t>(sizeof(Said))));
    std::fill(table, table + size, Said{-1, 0});
    for (int64_t t = repetition_[i] != 1.0f ? 0 : num_prompt_[i]; t < lengths_[i]; ++t) {
      uint64_t place = static_cast<uint32_t>(tokens[t]) * 0x9e3779b97f4a7c15u >> 32;
      while (table[place & (size - 1)].token != tokens[t] && table[place & (size - 1)].token != -1) ++place;
      Said& said = table[place & (size - 1)];
      said.token = tokens[t];
      said.count += t >= num_prompt_[i];
    }
    float* logits = static_cast<float*>(logits_.mutable_data_ptr()) + i * logits_.stride(0);
    for (const Said* said = table; said < table + size; ++said) {
      if (said->token < 0 || said->token >= logits_.size(1)) continue;
      float& logit = logits[said->token];
      logit = logit > 0.0f ? logit / repetition_[i] : logit * repetition_[i];
      logit -= frequency_[i] * static_cast<float>(said->count);
      if (said->count > 0) logit -= presence_[i];
    }
  }

  const Tensor logits_, tokens_;
  const int64_t count_;
  const int64_t *rows_, *num_prompt_, *lengths_;
  const float *repetition_, *frequency_, *presence_;
  int64_t num_tokens_ = 0;
};

void penalise_op(const Tensor& logits, const Tensor& tokens, const Tensor& rows, const Tensor& num_prompt,
                 const Tensor& lengths, const Tensor& repetition, const Tensor& frequency, const Tensor& presence) {
  auto step = std::make_unique<PenaltyStep>(logits, tokens, rows, num_prompt, lengths, repetition, frequency, presence);
  const int64_t count = step->count();
  if (count > 0) perform(std::move(step), Extent{count, count});
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(quire, CPU, library) {
  if (kernels() == nullptr) return;
  library.impl("best_tokens", TORCH_BOX(&best_tokens_op));
  library.impl("choose_tokens", TORCH_BOX(&choose_tokens_op));
  library.impl("token_logprobs", TORCH_BOX(&token_logprobs_op));
  library.impl("gather_logits", TORCH_BOX(&gather_logits_op));
  library.impl("apply_bitmask", TORCH_BOX(&apply_bitmask_op));
  library.impl("penalise", TORCH_BOX(&penalise_op));
}

}  // namespace quire
