// Recording and running programs, and the operators' way to run a step at once.

#include "program.h"

#include <stdexcept>

namespace quire {
namespace {

// Work of less than this many multiply-adds is done before a second thread has woken up.
constexpr int64_t WORK_WORTH_THREADS = 1 << 17;
// Tokens that a run of small operations takes along at once: their rows stay in the second-level cache.
constexpr int64_t TOKENS_AT_ONCE = 8;

thread_local Program* recording = nullptr;

void throw_if_wrong(const Step& step, const Extent& extent) {
  if (const char* reason = step.check(extent)) throw std::runtime_error(reason);
}

int threads_for(int64_t work) { return work < WORK_WORTH_THREADS ? 1 : crew_size(); }

}  // namespace

void Program::append(std::unique_ptr<Step> step) {
  ++num_steps_;
  const bool joins = !stages_.empty() && step->is_by_token() && stages_.back().front()->is_by_token();
  if (!joins) stages_.emplace_back();
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

void Program::run(const Extent& extent) const {
  int64_t work = 0;
  for (const Stage& stage : stages_)
    for (const auto& step : stage) {
      throw_if_wrong(*step, extent);
      work += step->work(extent);
    }
  run_crew(threads_for(work), [&](Crew& crew) {
    for (const Stage& stage : stages_) run_stage(stage, extent, crew);
  });
}

void perform(std::unique_ptr<Step> step, const Extent& extent) {
  if (recording != nullptr) {
    if (extent.tokens != recording->max_tokens()) {
      throw std::runtime_error("a recorded step must have a first dimension of as many tokens as the program");
    }
    return recording->append(std::move(step));
  }
  throw_if_wrong(*step, extent);
  run_crew(threads_for(step->work(extent)), [&](Crew& crew) { step->run(extent, crew); });
}

}  // namespace quire
