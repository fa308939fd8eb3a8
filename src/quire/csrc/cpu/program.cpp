// Recording and running programs, and the operators' way to run a step at once.

#include "program.h"

#include "operators.h"

#include <cstring>
#include <stdexcept>
#include <string>

namespace quire {
namespace {

// Work of less than this many multiply-adds is done before a second thread has woken up.
constexpr int64_t WORK_WORTH_THREADS = 1 << 17;
// Tokens that a run of small operations takes along at once: their rows stay in the second-level cache.
constexpr int64_t TOKENS_AT_ONCE = 8;

thread_local std::unique_ptr<Program> recording;
thread_local std::string last_error;

int threads_for(int64_t work) { return work < WORK_WORTH_THREADS ? 1 : crew_size(); }

}  // namespace

void Program::append(std::unique_ptr<Step> step) {
  ++num_steps_;
  const bool joins = !stages_.empty() && step->is_by_token() && stages_.back().front()->is_by_token();
  if (!joins) {
    if (needs_all_) rest_ = {stages_.size(), arena_->taken(max_tokens_)}, needs_all_ = false;
    stages_.emplace_back();
    arena_->begin_stage();
  }
  needs_all_ |= step->needs_all_tokens();
  stages_.back().push_back(std::move(step));
}

void Program::run_stage(const Stage& stage, const Extent& extent, Crew& crew) {
  if (!stage.front()->is_by_token()) return stage.front()->run(extent, crew);
  int64_t work = 0;
  for (const auto& step : stage) work += step->work(extent);
  const auto run_tokens = [&](int64_t begin, int64_t end) {
    for (const auto& step : stage) static_cast<const TokenStep&>(*step).run_tokens(begin, end);
  };
  if (work < WORK_WORTH_THREADS / 8) {  // the others are awake here, and a barrier costs a microsecond
    if (crew.rank == 0) run_tokens(0, extent.tokens);
    return crew.barrier();
  }
  crew.for_each(extent.tokens, TOKENS_AT_ONCE, run_tokens);
}

// Their rows move to the beginning, over those of others.
void Program::keep_only(const Tokens& wanted, Crew& crew) const {
  const int64_t num_kept = static_cast<int64_t>(rest_.rows.size()), count = num_kept + inputs_.size();
  crew.for_each(count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const TokenRows& rows = i < num_kept ? rest_.rows[i] : inputs_[i - num_kept];
      for (int64_t t = 0; t < wanted.count; ++t) {
        if (wanted.numbers[t] == t) continue;
        std::memcpy(rows.data + t * rows.row_bytes, rows.data + wanted.numbers[t] * rows.row_bytes, rows.row_bytes);
      }
    }
  });
}

void Program::run(const Extent& extent, const std::optional<Tokens>& wanted) const {
  if (extent.tokens < 0 || extent.tokens > max_tokens_) {
    throw std::runtime_error("a program for " + std::to_string(max_tokens_) + " tokens cannot run " +
                             std::to_string(extent.tokens));
  }
  for (int64_t t = 0; wanted.has_value() && t < wanted->count; ++t) {
    const int64_t number = wanted->numbers[t];
    if (number < 0 || number >= extent.tokens || (t > 0 && number <= wanted->numbers[t - 1])) {
      throw std::runtime_error("the tokens whose results are read must be some of the step, in ascending order");
    }
  }
  const bool is_narrowed = wanted.has_value() && can_narrow() && wanted->count < extent.tokens;
  int64_t work = 0;
  for (const Stage& stage : stages_)
    for (const auto& step : stage) {
      step->check(extent);
      work += step->work(extent);
    }
  run_crew(threads_for(work), [&](Crew& crew) {
    const size_t num_whole = is_narrowed ? rest_.first_stage : stages_.size();
    // what stands before the last step that needs all tokens gives that one a row of each
    const Extent of_last{extent.tokens, extent.sequences, is_narrowed ? &*wanted : nullptr};
    for (size_t i = 0; i < num_whole; ++i) run_stage(stages_[i], i + 1 < num_whole ? extent : of_last, crew);
    if (num_whole == stages_.size() || wanted->count == 0) return;
    keep_only(*wanted, crew);
    for (size_t i = num_whole; i < stages_.size(); ++i) run_stage(stages_[i], {wanted->count, extent.sequences}, crew);
  });
}

void perform(std::unique_ptr<Step> step, const Extent& extent) {
  if (recording != nullptr) {
    if (extent.tokens != recording->max_tokens()) {
      throw std::runtime_error("a recorded step must have a first dimension of as many tokens as the program");
    }
    recording->append(std::move(step));
    return;
  }
  step->check(extent);
  run_crew(threads_for(step->work(extent)), [&](Crew& crew) { step->run(extent, crew); });
}

const char* kept_error(const std::exception& error) {
  last_error = error.what();
  return last_error.c_str();
}

bool is_recording() { return recording != nullptr; }

Tensor empty(const std::vector<int64_t>& sizes, ScalarType dtype) {
  std::vector<int64_t> strides(sizes.size());
  int64_t count = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = count;
    count *= sizes[d];
  }
  if (recording != nullptr) {
    const std::shared_ptr<Arena> arena = recording->arena();
    const int64_t bytes_of_an_element = dtype == ScalarType::Float || dtype == ScalarType::Int ? 4
                                        : dtype == ScalarType::Long                            ? 8
                                                                                               : 2;
    return torch::stable::from_blob(arena->take(count * bytes_of_an_element), sizes, strides,
                                    torch::stable::Device(torch::headeronly::DeviceType::CPU), dtype,
                                    [arena](void* data) { arena->give_back(data); });
  }
  AtenTensorHandle handle = nullptr;
  aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                           torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype)),
                           aoti_torch_device_type_cpu(), 0, &handle);
  return Tensor(handle);
}

}  // namespace quire

// Called through ctypes by worker/kernels/cpu/library.py. Errors come back as text.
#define QUIRE_EXPORT __attribute__((visibility("default")))
extern "C" {
QUIRE_EXPORT void quire_record_begin(int64_t max_tokens) {
  quire::recording = std::make_unique<quire::Program>(max_tokens);
}
QUIRE_EXPORT void* quire_record_end() { return quire::recording.release(); }
QUIRE_EXPORT void quire_program_drop(void* program) { delete static_cast<quire::Program*>(program); }
QUIRE_EXPORT int64_t quire_program_size(const void* program) {
  return static_cast<const quire::Program*>(program)->size();
}
QUIRE_EXPORT void quire_record_input(char* data, int64_t row_bytes) {
  quire::recording->add_input({data, row_bytes});
}
QUIRE_EXPORT bool quire_program_can_narrow(const void* program) {
  return static_cast<const quire::Program*>(program)->can_narrow();
}
// `wanted`: null, or the numbers of the tokens whose results are read.
QUIRE_EXPORT const char* quire_program_run(const void* program, int64_t tokens, int64_t sequences,
                                           const int64_t* wanted, int64_t num_wanted) {
  std::optional<quire::Tokens> some;
  if (wanted != nullptr) some = quire::Tokens{wanted, num_wanted};
  return quire::error_of([&] { static_cast<const quire::Program*>(program)->run({tokens, sequences}, some); });
}
}
