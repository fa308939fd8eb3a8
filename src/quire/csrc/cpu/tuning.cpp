// The choices of everything that can be tuned, for worker/kernels/cpu/tuning.py.

#include "tuning.h"

#include <cstring>
#include <string>

namespace quire {

Tuning tuning = {{0, 0, 0}, {1, 1, 1}, 6, 448 << 10, 2048, 8 << 20, 16, 256, 4};

namespace {

constexpr int MOST_CHOICES = 4;

struct Tunable {
  const char* name;
  int64_t* value;
  int64_t choices[MOST_CHOICES];  // the default first; 0 only as the first
};

constexpr int64_t KIB = 1 << 10, MIB = 1 << 20;
// In the order in which they are measured.
constexpr Tunable TUNABLES[] = {
    {"fetch_bytes.floats", &tuning.fetch_bytes.floats, {0, 1 * KIB, 2 * KIB, 4 * KIB}},
    {"panels.floats", &tuning.panels.floats, {1, 2, MOST_PANELS}},
    {"fetch_bytes.codes_8", &tuning.fetch_bytes.codes_8, {0, 1 * KIB, 2 * KIB, 4 * KIB}},
    {"panels.codes_8", &tuning.panels.codes_8, {1, 2, MOST_PANELS}},
    {"fetch_bytes.codes_4", &tuning.fetch_bytes.codes_4, {0, 1 * KIB, 2 * KIB, 4 * KIB}},
    {"panels.codes_4", &tuning.panels.codes_4, {1, 2, MOST_PANELS}},
    {"rows_to_fetch", &tuning.rows_to_fetch, {6, 2, 64}},
    {"block_bytes", &tuning.block_bytes, {448 * KIB, 192 * KIB, 896 * KIB, 1344 * KIB}},
    {"words_at_once", &tuning.words_at_once, {2048, 512, 1024, 4096}},
    {"prepared_bytes", &tuning.prepared_bytes, {8 * MIB, 2 * MIB, 16 * MIB}},
    {"pieces", &tuning.pieces, {16, 4, 64}},
    {"attention_lines", &tuning.attention_lines, {256, 64, 512}},
    {"attention_pieces", &tuning.attention_pieces, {4, 2, 8}},
};

const Tunable* find(const char* name) {
  for (const Tunable& tunable : TUNABLES) {
    if (std::strcmp(tunable.name, name) == 0) return &tunable;
  }
  return nullptr;
}

}  // namespace
}  // namespace quire

// Called through ctypes. Only while nothing is computed: kernels read without locks.
#define QUIRE_EXPORT __attribute__((visibility("default")))
extern "C" {
// A line for each: its name and its choices.
QUIRE_EXPORT const char* quire_tunables() {
  static const std::string text = [] {
    std::string lines;
    for (const auto& tunable : quire::TUNABLES) {
      lines += tunable.name;
      for (int i = 0; i < quire::MOST_CHOICES && (i == 0 || tunable.choices[i] != 0); ++i) {
        lines += ' ' + std::to_string(tunable.choices[i]);
      }
      lines += '\n';
    }
    return lines;
  }();
  return text.c_str();
}

// 1, or 0 if there is no such choice.
QUIRE_EXPORT int quire_tune(const char* name, int64_t value) {
  const quire::Tunable* tunable = quire::find(name);
  if (tunable == nullptr) return 0;
  for (int i = 0; i < quire::MOST_CHOICES && (i == 0 || tunable->choices[i] != 0); ++i) {
    if (tunable->choices[i] != value) continue;
    *tunable->value = value;
    return 1;
  }
  return 0;
}
}
